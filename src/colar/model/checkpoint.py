"""Saving and loading a `LatentLM`: what is in a checkpoint folder, and what is wrong with a broken one.

    colar.json            format, method (opaque), backbone and its fingerprint, how it was trained
    template.json         the prompt layout
    modules.safetensors   what the method adds (absent where it adds nothing)
    adapter_*.{json,safetensors}  or  config.json + model*.safetensors      Hugging Face's own layouts
    tokenizer files, README.md (the model card)

Nothing in it is a pickle. Folders are replaced as a whole: a kill in mid-save leaves the old one.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from colar import files
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.prompts import Template

FORMAT = 1
MODULES = "modules.safetensors"
ADAPTER = "adapter_model.safetensors"
TOKENIZER = "tokenizer.json"
INFO_KEYS = ("method", "backbone", "fingerprint", "weights", "modules", "run")
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
) -> Path:
    """Write `lm` as a checkpoint folder, replacing what was there. Returns the folder.

    `method` is {"name", "config"}, kept as it is; `run` says how it was trained (JSON); `card` is README.md. The
    method's modules named in `leave_out` are not written.
    """
    folder = Path(folder)
    with files.replace_folder(folder) as partial:
        save_weights(lm, partial, leave_out)
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


def save_weights(lm: LatentLM, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Write what was trained: the adapter, or all weights once (tied ones not twice), and the modules.

    Modules named in `leave_out` are not written.
    """
    if isinstance(lm.lm, PeftModel):
        for config in lm.lm.peft_config.values():  # not where this machine keeps the backbone
            config.base_model_name_or_path = backbones.HUB_IDS.get(lm.name, lm.name)
        lm.lm.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    else:
        lm.causal_lm.save_pretrained(folder)
    state = {}
    for key, value in lm.extra.state_dict().items():
        module_name = key.split(".")[0]
        if module_name not in leave_out:
            state[key] = value.contiguous()
    if state:
        save_file(state, folder / MODULES, metadata={"format": "pt"})


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
        state = {key: value for name in names for key, value in _load(name).items()}
        missing, unexpected = lm.causal_lm.load_state_dict(state, strict=False)
        lm.causal_lm.tie_weights()
        tied = set(lm.causal_lm.all_tied_weights_keys or {})
        if unexpected or set(missing) - tied:
            raise ValueError(f"{folder}: weights do not fit: missing {missing}, unexpected {unexpected}")
    load_modules(lm.extra, folder, leave_out)


def load_modules(extra: nn.ModuleDict, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Fill a method's modules from a checkpoint folder; those named in `leave_out` keep the weights that they have."""
    wanted = nn.ModuleDict({name: module for name, module in extra.items() if name not in leave_out})
    if not wanted:
        return
    try:
        wanted.load_state_dict(_load(folder / MODULES))
    except RuntimeError as error:
        raise ValueError(f"{folder / MODULES} does not fit the method's modules: {error}") from error


def convert(folder: str | Path, target: str | Path, dtype: str) -> Path:
    """Write the checkpoint in `folder` as `target`, its floating-point weights in `dtype`, all else as it is."""
    folder, target = Path(folder), Path(target)
    info = read_info(folder)
    if dtype not in backbones.DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(backbones.DTYPES)}, got {dtype!r}")
    with files.replace_folder(target) as partial:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                state = {key: _cast(value, dtype) for key, value in _load(path).items()}
                save_file(state, partial / path.name, metadata={"format": "pt"})
            elif path.is_file():
                shutil.copyfile(path, partial / path.name)
        if info["weights"] == "full":
            config = files.read_json(partial / "config.json")
            files.write_json(partial / "config.json", config | {"dtype": dtype})
    return target


def _cast(value: Tensor, dtype: str) -> Tensor:
    return value.to(backbones.DTYPES[dtype]) if value.is_floating_point() else value


def read_info(folder: str | Path) -> dict[str, Any]:
    """colar.json of a checkpoint folder, checked for its format and for the files that it names."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: there is no checkpoint there")
    if not (folder / "colar.json").exists():
        raise ValueError(f"{folder} lacks colar.json: it is no colar checkpoint")
    info: dict[str, Any] = files.read_json(folder / "colar.json")
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise ValueError(f"{folder / 'colar.json'}: format is not {FORMAT}, the one this colar reads")
    _require(info, INFO_KEYS, folder / "colar.json")
    wanted = ["template.json", "tokenizer.json", "tokenizer_config.json"]
    wanted += ["adapter_config.json", ADAPTER] if info["weights"] == "adapter" else ["config.json"]
    wanted += [MODULES] if info["modules"] else []
    missing = [name for name in wanted if not (folder / name).exists()]
    if info["weights"] == "full" and not list(folder.glob("model*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise ValueError(f"checkpoint {folder} lacks {', '.join(missing)}")
    return info


def load(
    folder: str | Path, dtype: str = "float32", backbone: str | None = None
) -> tuple[LatentLM, dict[str, Any]]:
    """The `LatentLM` of a checkpoint, without its method's modules, and colar.json.

    `backbone` overrides where an adapter's backbone is looked for (a local copy, say). ValueError names the
    file that is missing or broken, and a backbone other than the one the adapter was trained on.
    """
    folder = Path(folder)
    info = read_info(folder)
    for path in sorted(folder.iterdir()):
        if path.name != TOKENIZER:
            _check_readable(path)
    tokenizer = _load_tokenizer(folder)
    saved = files.read_json(folder / "template.json")
    _require(saved, TEMPLATE_KEYS, folder / "template.json")
    template = Template.from_json(saved, tokenizer)
    if info["weights"] == "full":
        loaded = backbones.load(str(folder), dtype, tokenizer=tokenizer)
        lm = LatentLM(backbones.Backbone(info["backbone"], loaded.lm, tokenizer), template)
        return lm, info
    seed = info["run"].get("seed", 0)
    loaded = backbones.load(backbone or info["backbone"], dtype, seed, tokenizer)
    found = backbones.fingerprint(loaded.lm)
    if found != info["fingerprint"]:
        raise ValueError(
            f"the adapter in {folder} was trained on {info['backbone']} (fingerprint {info['fingerprint']}), "
            f"but {loaded.name} is another model (fingerprint {found})"
        )
    lm = LatentLM(backbones.Backbone(info["backbone"], loaded.lm, tokenizer), template)
    # Without low_cpu_mem_usage peft first draws at random the adapter that it is about to read.
    lm.lm = PeftModel.from_pretrained(lm.causal_lm, str(folder), is_trainable=True, low_cpu_mem_usage=True)
    with safe_open(folder / ADAPTER, framework="pt") as stored:
        _check_adapter(lm.lm, set(stored.keys()), folder / ADAPTER)
    return lm, info


def resolve(path_or_id: str | Path) -> Path:
    """A local folder as it is; anything else is a Hub id, downloaded into the Hub's cache."""
    folder = Path(path_or_id)
    looks_local = (
        folder.exists() or str(path_or_id).startswith((".", "/", "~")) or str(path_or_id).count("/") != 1
    )
    if looks_local:
        return folder
    try:
        return Path(snapshot_download(str(path_or_id)))
    except (OSError, HFValidationError) as error:
        raise ValueError(f"no folder {path_or_id} here, and the Hub does not give it: {error}") from error


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
        raise


def _check_readable(path: Path) -> None:
    """Libraries that read these files do not say which one is broken."""
    if path.suffix == ".json":
        files.read_json(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is corrupt: {error}") from error


def _check_adapter(lm: PeftModel, stored: set[str], path: Path) -> None:
    """peft only warns of weights that are missing, and says nothing of those that it does not know."""
    wanted = set(get_peft_model_state_dict(lm, save_embedding_layers=False))
    if wanted != stored:
        raise ValueError(
            f"{path}: weights do not fit: missing {sorted(wanted - stored)}, unexpected {sorted(stored - wanted)}"
        )


def _require(saved: Any, keys: tuple[str, ...], path: Path) -> None:
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
