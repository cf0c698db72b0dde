"""Saving and loading a `LatentLM`: the files of a checkpoint folder, and the errors of a broken one.

    colar.json            format, method (opaque here), backbone and its fingerprint, how it was trained
    template.json         the prompt layout
    modules.safetensors   the modules of the method (absent where it has none)
    adapter_*.{json,safetensors}  or  config.json + model*.safetensors      Hugging Face's own layouts
    tokenizer files, README.md (the model card)

Nothing in it is a pickle. Folders are replaced as a whole: a kill in mid-save leaves the old one.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from colar import files
from colar.checks import check_choice, check_holds, in_library
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.prompts import Template

FORMAT = 1
MODULES = "modules.safetensors"
ADAPTER = "adapter_model.safetensors"
TOKENIZER = "tokenizer.json"
INFO_KEYS = {
    "method": dict,
    "backbone": str,
    "fingerprint": str,
    "weights": str,
    "modules": list,
    "run": dict,
}
TEMPLATE_KEYS = (
    "question",
    "step_joiner",
    "separator",
    "separator_id",
    "separator_added",
    "bos_id",
    "eos_id",
)


def save(
    lm: LatentLM,
    folder: str | Path,
    method: dict[str, Any],
    run: dict[str, Any],
    card: str,
    leave_out: Collection[str] = (),
    gathered: dict[str, Tensor] | None = None,
) -> Path:
    """Write `lm` as a checkpoint folder, replacing what was there. Returns the folder.

    `method` is {"name", "config"}, kept as it is; `run` says how it was trained (JSON); `card` is README.md. The
    method's modules named in `leave_out` are not written. `gathered` are the weights where `lm` has only a share.
    """
    folder = Path(folder)
    with _replacing(folder) as partial:
        save_weights(lm, partial, leave_out, gathered)
        lm.tokenizer.save_pretrained(partial)
        files.write_json(partial / "template.json", lm.template.to_json())
        files.write_text(partial / "README.md", card)
        info = {
            "format": FORMAT,
            "method": method,
            "backbone": lm.name,
            "fingerprint": lm.fingerprint,
            "weights": "adapter" if lm.has_adapter else "full",
            "modules": sorted(lm.extra.keys() - set(leave_out)),
            "run": run,
        }
        files.write_json(partial / "colar.json", info)
    return folder


def check_replaceable(folder: str | Path) -> None:
    """Reject a folder of other things: a checkpoint takes the place of all that is there."""
    folder = Path(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if (folder / ".git").exists():
        raise ValueError(
            f"{folder} is a git repository, which would be replaced: give another folder, and copy the files"
        )
    if not (folder / "colar.json").exists():
        raise ValueError(f"{folder} exists and is not a checkpoint: give a folder that may be replaced")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """`files.replace_folder`, where OSError says that weights could not be written: safetensors has an error of its
    own for a full disk, which nobody waits for."""
    try:
        with files.replace_folder(folder) as partial:
            yield partial
    except SafetensorError as error:
        raise OSError(f"cannot write {folder}: {error}") from error


def save_weights(
    lm: LatentLM,
    folder: Path,
    leave_out: Collection[str] = (),
    gathered: dict[str, Tensor] | None = None,
) -> None:
    """Write the trained weights: the adapter, or all weights once (tied ones not twice), and the modules.

    Modules named in `leave_out` are not written. `gathered` are the weights where `lm` has only a share of each, by
    the names of its state dict (`sharded.py`).
    """
    weights = None if gathered is None else _under("lm.", gathered)
    if isinstance(lm.lm, PeftModel):
        # peft would write the path at which this machine keeps the backbone.
        for config in lm.lm.peft_config.values():
            config.base_model_name_or_path = backbones.HUB_IDS.get(lm.name, lm.name)
        lm.lm.save_pretrained(
            str(folder), safe_serialization=True, save_embedding_layers=False, state_dict=weights
        )
    else:
        lm.causal_lm.save_pretrained(folder, state_dict=weights)
    state = {}
    modules = lm.extra.state_dict() if gathered is None else _under("extra.", gathered)
    for key, value in modules.items():
        module_name = key.split(".")[0]
        if module_name not in leave_out:
            state[key] = value.contiguous()
    if state:
        save_file(state, folder / MODULES, metadata={"format": "pt"})


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def load_weights(lm: LatentLM, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Put the weights of a checkpoint into an `lm` of the same shape, in place.

    Modules named in `leave_out` keep the weights that they have.
    """
    if isinstance(lm.lm, PeftModel):
        state = _load(folder / ADAPTER)
        _check_adapter(lm.lm, set(state), folder / ADAPTER)
        set_peft_model_state_dict(lm.lm, state)
    else:
        names = sorted(folder.glob("model*.safetensors"))
        if not names:
            raise ValueError(f"{folder} lacks model.safetensors")
        # Large models are saved in several files, each with its own tensors.
        state = {}
        for name in names:
            state.update(_load(name))
        missing, unexpected = lm.causal_lm.load_state_dict(state, strict=False)
        # A tied weight is stored once, so its other name is missing by right.
        lm.causal_lm.tie_weights()
        tied = set(lm.causal_lm.all_tied_weights_keys or {})
        if unexpected or set(missing) - tied:
            raise ValueError(f"{folder}: weights do not fit: missing {missing}, unexpected {unexpected}")
    load_modules(lm.extra, folder, leave_out)


@runtime_checkable
class Startable(Protocol):
    """A module that can start its training from weights of another shape, or from none: it changes nothing at first."""

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint's weights, by their names in the module. ValueError where they cannot fit."""
        ...


def load_modules(
    extra: nn.ModuleDict, folder: Path, leave_out: Collection[str] = (), starts: bool = False
) -> None:
    """Fill a method's modules from a checkpoint folder; those named in `leave_out` keep the weights that they have.

    With `starts` another stage of training begins: a module may start from weights of another shape, and one that the
    checkpoint lacks keeps its own (`Startable`).
    """
    wanted = nn.ModuleDict({name: module for name, module in extra.items() if name not in leave_out})
    if not wanted:
        return
    state = _load(folder / MODULES)
    try:
        for name, module in list(wanted.items()):
            own = _under(f"{name}.", state)
            if starts and isinstance(module, Startable):
                if own:
                    module.start_from(own)
                del wanted[name]
                state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
        wanted.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder / MODULES} does not fit the method's modules: {error}") from error


def convert(folder: str | Path, target: str | Path, dtype: str) -> Path:
    """Write the checkpoint in `folder` as `target`, its floating-point weights in `dtype`, all else as it is."""
    folder = Path(folder)
    target = Path(target)
    info = read_info(folder)
    check_choice("dtype", dtype, list(backbones.DTYPES))
    with _replacing(target) as partial:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                state = {key: _cast(value, dtype) for key, value in _load(path).items()}
                save_file(state, partial / path.name, metadata={"format": "pt"})
            elif path.is_file():
                shutil.copyfile(path, partial / path.name)
        # transformers reads the dtype of the weights from their config.
        if info["weights"] == "full":
            config = files.read_json(partial / "config.json")
            _require(config, ("model_type",), folder / "config.json")
            config["dtype"] = dtype
            files.write_json(partial / "config.json", config)
    return target


def _cast(value: Tensor, dtype: str) -> Tensor:
    return value.to(backbones.DTYPES[dtype]) if value.is_floating_point() else value


def read_info(folder: str | Path) -> dict[str, Any]:
    """colar.json of a checkpoint folder, checked for its format and for the files that it names."""
    folder = check_folder(folder)
    info: dict[str, Any] = files.read_json(folder / "colar.json")
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise ValueError(f"{folder / 'colar.json'}: format is not {FORMAT}, the one this colar reads")
    _require(info, tuple(INFO_KEYS), folder / "colar.json")
    for key, kind in INFO_KEYS.items():
        check_holds(
            f"{folder / 'colar.json'}: {key}", isinstance(info[key], kind), info[key], f"a {kind.__name__}"
        )
    _require(info["method"], ("name", "config"), f"{folder / 'colar.json'}: method")
    for key, kind in (("name", str), ("config", dict)):
        value = info["method"][key]
        check_holds(
            f"{folder / 'colar.json'}: method.{key}", isinstance(value, kind), value, f"a {kind.__name__}"
        )
    check_choice(f"{folder / 'colar.json'}: weights", info["weights"], ["adapter", "full"])

    wanted = ["template.json", "tokenizer.json", "tokenizer_config.json"]
    if info["weights"] == "adapter":
        wanted += ["adapter_config.json", ADAPTER]
    else:
        wanted.append("config.json")
    if info["modules"]:
        wanted.append(MODULES)
    missing = [name for name in wanted if not (folder / name).exists()]
    # Full weights are one file or several, under names that Hugging Face numbers.
    if info["weights"] == "full" and not list(folder.glob("model*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise ValueError(f"checkpoint {folder} lacks {', '.join(missing)}")
    return info


def check_folder(folder: str | Path) -> Path:
    """The path of a folder that holds colar.json; ValueError says what lies there instead, and what may be meant."""
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"no checkpoint at {folder}: there is no such folder{_nearest(folder)}")
    if folder.is_file():
        raise ValueError(f"no checkpoint at {folder}: it is a file{_or_rather(folder.parent)}")
    if (folder / "colar.json").exists():
        return folder

    # Other folders that people name: a run, its resume state, a Hugging Face model or adapter.
    best = folder / "best"
    if best.is_dir():
        found = f"it is the folder of a run{_or_rather(best)}"
    elif (folder / "recipe.json").exists():
        found = "it is the folder of a run that has published no best/ yet"
    elif (folder / "trainer_state.json").exists():
        found = f"a run resumes from it{_or_rather(folder.parent.parent / 'best')}"
    elif (folder / "template.json").exists():
        found = "it is a damaged checkpoint"
    elif (folder / "adapter_config.json").exists():
        found = "it is an adapter that colar has not trained"
    elif (folder / "config.json").exists():
        found = "it is a Hugging Face model that colar has not trained (model.backbone of a recipe takes it)"
    else:
        found = "it is no colar checkpoint"
    raise ValueError(f"{folder} lacks colar.json: {found}")


def _nearest(folder: Path) -> str:
    """`, did you mean FOLDER?`: the folder that is called nearly as the first part of the path that is not there."""
    # The working directory or the root is there.
    there = next(parent for parent in folder.parents if parent.is_dir())
    missing, *rest = folder.relative_to(there).parts
    siblings = [path.name for path in there.iterdir() if path.is_dir()]
    near = difflib.get_close_matches(missing, siblings, n=1)
    if not near:
        return ""
    whole = there.joinpath(near[0], *rest)
    return f", did you mean {whole if whole.exists() else there / near[0]}?"


def _or_rather(folder: Path) -> str:
    """`, did you mean FOLDER?` where that one is a checkpoint."""
    return f", did you mean {folder}?" if (folder / "colar.json").exists() else ""


def load(
    folder: str | Path, dtype: str = "float32", backbone: str | None = None
) -> tuple[LatentLM, dict[str, Any]]:
    """The `LatentLM` of a checkpoint, without its method's modules, and colar.json.

    `backbone` overrides where an adapter's backbone is looked for (a local copy, for instance). ValueError names
    the file that is missing or broken, and a backbone other than the one the adapter was trained on.
    """
    folder = Path(folder)
    info = read_info(folder)
    # Before any library reads them: their errors do not name the file.
    for path in sorted(folder.iterdir()):
        if path.name != TOKENIZER:
            _check_readable(path)
    tokenizer = _load_tokenizer(folder)
    saved = files.read_json(folder / "template.json")
    _require(saved, TEMPLATE_KEYS, folder / "template.json")
    template = Template.from_json(saved, tokenizer)

    # All weights: the folder is its own backbone. It keeps the name of the one that training began with.
    if info["weights"] == "full":
        loaded = backbones.load(str(folder), dtype, tokenizer=tokenizer)
        lm = LatentLM(
            backbones.Backbone(info["backbone"], loaded.lm, tokenizer, loaded.fingerprint), template
        )
        return lm, info

    # An adapter: its backbone is loaded from elsewhere, and may be another model of the same shape. The weights of
    # `tiny` are drawn from the seed of the run.
    name = info["backbone"] if backbone is None else backbone
    loaded = backbones.load(name, dtype, info["run"].get("seed", 0), tokenizer)
    # Adapters that earlier versions trained in float16 have the fingerprint of the rounded weights.
    if info["fingerprint"] not in (loaded.fingerprint, backbones.fingerprint(loaded.lm)):
        raise ValueError(
            f"the adapter in {folder} was trained on {info['backbone']} (fingerprint {info['fingerprint']}), "
            f"but {loaded.name} is another model (fingerprint {loaded.fingerprint})"
        )
    lm = LatentLM(backbones.Backbone(info["backbone"], loaded.lm, tokenizer, loaded.fingerprint), template)
    # low_cpu_mem_usage: the adapter's weights are not drawn at random before they are read.
    with in_library(f"the adapter in {folder} cannot be loaded"):
        lm.lm = PeftModel.from_pretrained(
            lm.causal_lm, str(folder), is_trainable=True, low_cpu_mem_usage=True
        )
    with safe_open(folder / ADAPTER, framework="pt") as stored:
        _check_adapter(lm.lm, set(stored.keys()), folder / ADAPTER)
    return lm, info


def resolve(path_or_id: str | Path) -> Path:
    """The folder of a path or Hub id: a path is returned as it is, a Hub id is downloaded into the Hub's cache.

    ValueError where it can only be a Hub id and the Hub does not answer, or does not know it. A path is not checked
    here: `read_info` and `check_folder` do that.
    """
    folder = Path(path_or_id)
    text = str(path_or_id)
    # A Hub id is OWNER/NAME; anything else can only be a path.
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        return folder
    # Where a folder is called OWNER, it is a path with a mistake in it: the Hub would be asked for half a minute.
    if folder.parent.is_dir():
        return folder
    try:
        return Path(snapshot_download(text))
    except (OSError, HFValidationError) as error:
        # The Hub's client explains itself in several lines.
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no checkpoint at {text}: there is no such folder, and the Hub does not give it: {reason}"
        ) from error


def push_to_hub(folder: str | Path, repo_id: str, private: bool = True) -> str:
    """Upload a checkpoint folder as a model repository. Returns its address."""
    read_info(folder)
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(
        api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message="Upload colar checkpoint")
    )


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. ValueError where its file is damaged."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception:
        # Its file holds the whole vocabulary, and reading it twice takes a while: it is checked when it has failed.
        _check_readable(folder / TOKENIZER)
        with in_library(f"the tokenizer of {folder} cannot be loaded"):
            raise


def _check_readable(path: Path) -> None:
    """Reject a file that is cut off or damaged, by name."""
    if path.suffix == ".json":
        files.read_json(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is corrupt: {error}") from error


def _check_adapter(lm: PeftModel, stored: set[str], path: Path) -> None:
    """Reject an adapter that peft would load by half.

    It only warns of weights that are missing, and ignores those that it does not know.
    """
    wanted = set(get_peft_model_state_dict(lm, save_embedding_layers=False))
    if wanted != stored:
        missing = sorted(wanted - stored)
        unexpected = sorted(stored - wanted)
        raise ValueError(f"{path}: weights do not fit: missing {missing}, unexpected {unexpected}")


def _require(saved: Any, keys: tuple[str, ...], path: object) -> None:
    if not isinstance(saved, dict):
        raise ValueError(f"{path} must hold keys and values, got {str(saved)[:80]!r}")
    missing = [key for key in keys if key not in saved]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"checkpoint {path.parent} lacks {path.name}")
    try:
        state: dict[str, Any] = load_file(path)
        return state
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
