"""Saving and loading a `LatentLM`: the files of a checkpoint folder, and the errors of a broken one.

    colar.json            format, method (opaque here), backbone and its fingerprint, how it was trained
    template.json         the prompt layout
    modules.safetensors   the modules of the method (absent where it has none)
    adapter_*.{json,safetensors}  or  config.json + model*.safetensors      Hugging Face's own layouts
    tokenizer files (none where an adapter takes its backbone's), README.md (the model card)

No file is a pickle. Folders are replaced as a whole, so that a kill during a save leaves the old one.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from colar import files, progress
from colar.checks import check_choice, check_holds, in_library
from colar.model import backbones, quantized, weights
from colar.model.latent_lm import LatentLM
from colar.template.template import Template

FORMAT = 1
TOKENIZER = "tokenizer.json"
INFO_KEYS = {
    "method": dict,
    "backbone": str,
    "fingerprint": str,
    "weights": str,
    "modules": list,
    "tokenizer": list,
    "run": dict,
}
METHOD_KEYS = {"name": str, "config": dict}
TEMPLATE_KEYS = dict.fromkeys(
    ("question", "step_joiner", "separator", "separator_id", "bos_id", "eos_id"), object
)


def save(
    lm: LatentLM,
    folder: str | Path,
    method: dict[str, Any],
    run: dict[str, Any],
    card: str,
    gathered: dict[str, Tensor] | None = None,
) -> Path:
    """Write `lm` as a checkpoint folder, replacing what was there. Returns the folder.

    `method` is the entry that `registry.rebuild` takes; `run` says how it was trained (JSON); `card` is README.md.
    Modules in `lm.training_only` are not written. `gathered` are the whole weights if `lm` has only a share.
    """
    folder = Path(folder)
    with _replacing(folder) as partial:
        weights.save(lm, partial, lm.training_only, gathered)
        # Many tokenizers have no tokenizer.json; some return names of files that they have not written.
        written = [Path(path) for path in lm.tokenizer.save_pretrained(partial)]
        files.write_json(partial / "template.json", lm.template.to_json())
        files.write_text(partial / "README.md", card)
        info = {
            "format": FORMAT,
            "method": method,
            "backbone": lm.name,
            "backbone_seed": lm.backbone_seed,
            "fingerprint": lm.fingerprint,
            "weights": "adapter" if lm.has_adapter else "full",
            "modules": sorted(lm.extra.keys() - lm.training_only),
            # Named chat templates lie in a folder of their own.
            "tokenizer": sorted(path.relative_to(partial).as_posix() for path in written if path.is_file()),
            "run": run,
        }
        files.write_json(partial / "colar.json", info)
    return folder


def check_replaceable(folder: str | Path) -> None:
    """Reject a folder of anything else than a checkpoint, because saving one replaces the whole folder."""
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
    """`files.replace_folder`, with an OSError for weights that cannot be written: safetensors raises an error of its
    own for a full disk."""
    try:
        with files.replace_folder(folder) as partial:
            yield partial
    except SafetensorError as error:
        raise OSError(f"cannot write {folder}: {error}") from error


def convert(folder: str | Path, target: str | Path, dtype: str) -> Path:
    """Copy the checkpoint in `folder` to `target`, with its floating-point weights in `dtype`. All else, the method's
    modules included, is copied unchanged."""
    folder = resolve(folder)
    target = Path(target)
    info = read_info(folder)
    check_choice("dtype", dtype, list(backbones.DTYPES))
    with _replacing(target) as partial:
        # Other subfolders are not copied: a clone's .git, for instance.
        for path in sorted({*folder.iterdir(), *(folder / name for name in info["tokenizer"])}):
            copied = partial / path.relative_to(folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            # The method's modules are small, and stay in float32 for every dtype of the backbone.
            if path.suffix == ".safetensors" and path.name != weights.MODULES:
                state = weights.read(path)
                for key, value in state.items():
                    if value.is_floating_point():
                        state[key] = value.to(backbones.DTYPES[dtype])
                save_file(state, copied, metadata={"format": "pt"})
            elif path.is_file():
                shutil.copyfile(path, copied)
        # transformers reads the dtype of the weights from their config.
        if info["weights"] == "full":
            config = files.read_json(partial / "config.json")
            _check_keys(config, {"model_type": object}, folder / "config.json")
            config["dtype"] = dtype
            files.write_json(partial / "config.json", config)
    return target


def read_info(folder: str | Path) -> dict[str, Any]:
    """colar.json of a checkpoint folder, checked for its format and for the files that it names."""
    folder = check_folder(folder)
    path = folder / "colar.json"
    info: dict[str, Any] = files.read_json(path)
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise ValueError(f"{path}: format is not {FORMAT}, the one this colar reads")
    _check_keys(info, INFO_KEYS, path)
    _check_keys(info["method"], METHOD_KEYS, f"{path}: method")
    check_choice(f"{path}: weights", info["weights"], ["adapter", "full"])
    # Earlier versions used the run's seed for the backbone.
    info.setdefault("backbone_seed", info["run"].get("seed", 0))

    is_full = info["weights"] == "full"
    wanted = ["template.json", *map(str, info["tokenizer"])]
    wanted += ["config.json"] if is_full else ["adapter_config.json", weights.ADAPTER]
    if info["modules"]:
        wanted.append(weights.MODULES)
    missing = [name for name in wanted if not (folder / name).exists()]
    # Full weights are one file or several, under names that Hugging Face numbers.
    if is_full and not list(folder.glob("model*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise ValueError(f"checkpoint {folder} lacks {', '.join(missing)}")
    return info


def check_folder(folder: str | Path) -> Path:
    """The path of a folder that holds colar.json; ValueError names what is there instead."""
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"no checkpoint at {folder}: there is no such folder")
    if folder.is_file():
        raise ValueError(f"no checkpoint at {folder}: it is a file")
    if (folder / "colar.json").exists():
        return folder

    # Other folders that users pass by mistake.
    if (folder / "recipe.json").exists() or (folder / "recipe.yaml").exists():
        kind = "it is the folder of a run that has published no best/ yet: the same command resumes it"
    elif (folder / "trainer_state.json").exists():
        kind = "a run resumes from it: give the folder of the run"
    elif (folder / "config.json").exists():
        kind = "it is a Hugging Face model that colar has not trained (model.backbone of a recipe takes it)"
    else:
        kind = "it is no colar checkpoint"
    raise ValueError(f"{folder} lacks colar.json: {kind}")


def load(
    folder: str | Path, dtype: str = "float32", backbone: str | None = None, load_in_4bit: bool = False
) -> tuple[LatentLM, dict[str, Any]]:
    """The `LatentLM` of a checkpoint, without its method's modules, and colar.json.

    `backbone` overrides the folder or Hub id of an adapter's backbone (with a local copy, for instance). ValueError for
    a missing or broken file, which it names, for a backbone other than the one the adapter was trained on, and for a
    `backbone` given for full weights. `load_in_4bit` is for training an adapter (`quantized.py`).
    """
    folder = Path(folder)
    info = read_info(folder)
    # Checked before any library reads the files, because libraries' errors do not name the file.
    for path in sorted(folder.iterdir()):
        if path.name != TOKENIZER:
            _check_readable(path)
    # A folder with all weights is its own backbone. An adapter's backbone comes from elsewhere, and may be another
    # model of the same shape. The weights of `tiny` are drawn from a seed.
    is_full = info["weights"] == "full"
    if is_full and backbone is not None:
        raise ValueError(f"{folder} holds all weights: give no backbone, got {backbone!r}")
    name = str(folder) if is_full else backbone or info["backbone"]
    saved = files.read_json(folder / "template.json")
    _check_keys(saved, TEMPLATE_KEYS, folder / "template.json")
    # Loaded before the backbone, which may have to be downloaded. An adapter may take its backbone's tokenizer.
    tokenizer = _load_tokenizer(folder) if info["tokenizer"] else None
    template = None if tokenizer is None else Template.from_json(saved, tokenizer)
    try:
        loaded = backbones.load(name, dtype, info["backbone_seed"], tokenizer)
    except ValueError as error:
        if is_full or backbone is not None:
            raise
        raise ValueError(
            f"the backbone of the adapter in {folder} (another place is named by --backbone, where a command has "
            f"it): {error}"
        ) from error
    template = template or Template.from_json(saved, loaded.tokenizer)
    # A published adapter may have been trained above a quantised copy, whose fingerprint only that copy has.
    if not is_full and not info["fingerprint"]:
        progress.say(f"warning: {folder} has no fingerprint of its backbone: {loaded.name} is not checked")
    elif not is_full and info["fingerprint"] != loaded.fingerprint:
        raise ValueError(
            f"the adapter in {folder} was trained on {info['backbone']} (fingerprint {info['fingerprint']}), "
            f"but {loaded.name} is another model (fingerprint {loaded.fingerprint}); an adapter of a quantised copy "
            'loads above others, unchecked, with "fingerprint": "" in colar.json'
        )
    if load_in_4bit:
        quantized.quantize_below_adapter(loaded.lm)
    # Keep the name of the backbone that training began with, unless no fingerprint shows that it is the same one.
    known = info["backbone"] if is_full or info["fingerprint"] else loaded.name
    lm = LatentLM(dataclasses.replace(loaded, name=known), template)
    if is_full:
        return lm, info
    with in_library(f"the adapter in {folder} cannot be loaded"):
        lm.lm = weights.with_empty_adapter(lm.causal_lm, folder)
        weights.load_adapter(lm.lm, folder / weights.ADAPTER)
    return lm, info


def resolve(path_or_id: str | Path) -> Path:
    """The folder of a path or Hub id: a run's folder stands for the checkpoint in it, `best`; a Hub id is downloaded
    into the Hub's cache; any other path is returned as it is.

    ValueError if it can only be a Hub id and the Hub does not answer, does not know it, or has another model. A path
    is not checked here: `read_info` and `check_folder` do that.
    """
    folder = Path(path_or_id)
    text = str(path_or_id)
    if (folder / "best" / "colar.json").is_file() and not (folder / "colar.json").is_file():
        return folder / "best"
    # A Hub id is OWNER/NAME; anything else can only be a path.
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        return folder
    # If there is a folder OWNER, this is a mistyped path, which the Hub would take half a minute to refuse.
    if folder.parent.is_dir():
        return folder
    try:
        # Fetch colar.json alone first, because the weights of another model may be many gigabytes.
        hf_hub_download(text, "colar.json")
        return Path(snapshot_download(text))
    except (OSError, HFValidationError) as error:
        # LocalEntryNotFoundError means that the Hub does not answer.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ValueError(
                f"{text} on the Hub lacks colar.json: colar has not trained it (model.backbone of a recipe takes it)"
            ) from error
        # Errors of the Hub's client have several lines.
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no checkpoint at {text}: there is no such folder, and the Hub does not give it: {reason}"
        ) from error


def digest(folder: Path) -> str:
    """Digest of a checkpoint (weights, method, prompt), 16 hex digits. ValueError names what is there in its place."""
    info = read_info(folder)
    # Without `run`, which has the run's duration: weights that are published again must have the same digest.
    settings = {key: info[key] for key in INFO_KEYS if key != "run"} | {"seed": info["backbone_seed"]}
    texts = [folder / name for name in ("template.json", TOKENIZER)]
    paths = sorted([*folder.glob("*.safetensors"), *filter(Path.exists, texts)])
    return files.digest(
        [json.dumps(settings, sort_keys=True), *(bytes.fromhex(files.sha256(path)) for path in paths)]
    )


def push_to_hub(folder: str | Path, repo_id: str, private: bool = True) -> str:
    """Upload a checkpoint folder, or that of a run, as a model repository. Returns its address."""
    folder = resolve(folder)
    read_info(folder)
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(
        api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message="Upload colar checkpoint")
    )


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. ValueError if its file is damaged."""
    try:
        return backbones.tokenizer_in(folder)
    except Exception:
        # The file holds the whole vocabulary and is slow to read twice, so it is checked only after a failure.
        if (folder / TOKENIZER).exists():
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


def _check_keys(saved: Any, kinds: Mapping[str, type], where: object) -> None:
    """Reject all but a dict that has these keys, with values of these types."""
    if not isinstance(saved, dict):
        raise ValueError(f"{where} must hold keys and values, got {str(saved)[:80]!r}")
    missing = [key for key in kinds if key not in saved]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for key, kind in kinds.items():
        check_holds(f"{where}: {key}", isinstance(saved[key], kind), saved[key], f"a {kind.__name__}")
