"""`Recipe`: everything that a training run is, from one YAML file and exact dotted overrides.

    colar train recipes/tiny/colar.yaml --training.learning_rate 1e-3 --method.alpha 0.05

A recipe may begin from another one, `base: colar.yaml` (beside it), and say only what differs: sections are merged key
by key, anything else is replaced. An unknown key is an error that names the nearest right one; every value is checked
before any work starts.
`run` wires data, model, method, validation and training together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonargparse
import torch

from colar import files, progress
from colar.data import sources
from colar.data.example import Example
from colar.engine.request import DECODINGS
from colar.evaluation.evaluate import Limits, require_fit, score
from colar.methods import registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.prompts import TemplateConfig
from colar.training import grpo_run, rewards
from colar.training.grpo_config import GrpoConfig
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainingConfig, TrainResult, train

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class ModelConfig:
    """Where the weights come from."""

    backbone: str = "tiny"
    """tiny | smollm2-135m | a folder | a Hub id. Unused where `init_from` is given."""
    init_from: str | None = None
    """A colar checkpoint to start from ("all methods are initialized with weights from CoT-SFT")."""
    lora: LoraSettings | None = None
    """Low-rank adapters; null trains all weights."""
    attn_implementation: str | None = None
    """transformers' attention: sdpa | eager | flash_attention_2 ...; null: its default. On CPUs eager trains faster."""
    dtype: str = "float32"
    """Dtype of the weights: float32 | bfloat16 | float16 (a frozen base under LoRA may be half precision)."""

    def __post_init__(self) -> None:
        if self.dtype == "float16" and self.lora is None:
            raise ValueError(
                "model.dtype float16 cannot be trained (updates underflow): float32, or give model.lora"
            )


MIXED_KEYS = {"source", "train_split", "train_size", "seed", "options"}


@dataclass(frozen=True)
class DataConfig:
    """What is learnt from."""

    source: str = "arithmetic"
    """A source by name (`colar data list`) or a .json / .jsonl file."""
    data_dir: str | None = None
    """Folder with upstream files; else $COLAR_DATA_DIR, else the Hub."""
    train_split: str = "train"
    """Split to train on."""
    train_size: int | None = None
    """First so many rows; null: all."""
    train_skip: int = 0
    """Leave out so many rows before them: those that the weights to start from have seen."""
    validation_source: str | None = None
    """Another source for validation; null: the same (a single file has no other rows: name one)."""
    validation_split: str = "validation"
    """Split that selects the checkpoint."""
    validation_size: int | None = 200
    """First so many of its rows; 0: no validation, the last weights are kept."""
    seed: int = 0
    """Of a generated source."""
    options: dict[str, Any] = field(default_factory=dict)
    """A generated source's options (`colar data show arithmetic`)."""
    skip_malformed: bool = False
    """Go on without the malformed rows instead of stopping at the first."""
    mixed_in: tuple[dict[str, Any], ...] = ()
    """More training rows: a list of {source, train_split, train_size, seed, options}; only source is needed."""

    def __post_init__(self) -> None:
        if self.train_skip < 0:
            raise ValueError(f"data.train_skip must be 0 or more, got {self.train_skip}")
        for more in self.mixed_in:
            if "source" not in more or set(more) - MIXED_KEYS:
                raise ValueError(
                    f"data.mixed_in: an entry has a source and no keys but {', '.join(sorted(MIXED_KEYS))}, got {more}"
                )


@dataclass(frozen=True)
class ValidationConfig:
    """How a checkpoint is validated: by thinking as at test time."""

    params: tuple[dict[str, Any], ...] = ({},)
    """The per-request values asked for, e.g. [{compression_factor: 2}]; accuracy is the mean over them."""
    decoding: str = "greedy"
    """greedy | sampled."""
    limits: Limits = field(default_factory=Limits)
    """Where generation is cut."""

    def __post_init__(self) -> None:
        if self.decoding not in DECODINGS:
            raise ValueError(
                f"validation.decoding must be one of {', '.join(DECODINGS)}, got {self.decoding!r}"
            )
        if not self.params:
            raise ValueError("validation.params must not be empty; [{}] asks with the method's defaults")


@dataclass(frozen=True)
class Recipe:
    """One run."""

    output: str
    """Run folder."""
    label: str = ""
    """What the run is in a comparison (ablation, control); kept with the checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Weights."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Prompt layout; a checkpoint to start from brings its own."""
    data: DataConfig = field(default_factory=DataConfig)
    """Rows."""
    method: dict[str, Any] = field(default_factory=lambda: {"name": "cot"})
    """`name` and the keys of that method's config."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How long and how fast."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """How the best checkpoint is chosen."""
    grpo: GrpoConfig | None = None
    """Reinforcement instead of imitation: the model of `model.init_from` learns from its own outputs."""


def parser(prog: str = "colar train") -> jsonargparse.ArgumentParser:
    """The parser of a recipe: `--config file.yaml` and a dotted option for every key."""
    made = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False)
    made.add_argument("--config", action="config", help="The recipe.")
    made.add_class_arguments(Recipe, fail_untyped=False)
    return made


def load(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """The recipe in a YAML file with `--dotted.key value` overrides. ValueError in words for a wrong key or value."""
    if not Path(path).is_file():
        raise ValueError(f"no recipe at {path} (the recipe comes first, overrides after it)")
    made = parser()
    try:
        namespace = made.parse_args(["--config", files.layered_yaml(path), *(overrides or [])])
        for name in ("model", "template", "data", "training", "validation"):
            if not isinstance(namespace[name], jsonargparse.Namespace):
                raise ValueError(f"{path}: {name} must hold keys and values, got {namespace[name]!r}")
        values = made.instantiate(namespace).as_dict()
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"{path}: {_explain(made, str(error))}") from error
    recipe = Recipe(**{f.name: values[f.name] for f in dataclasses.fields(Recipe)})
    build_method(recipe)
    if recipe.grpo is not None:
        check_grpo(recipe, recipe.grpo)
    return recipe


def check_grpo(recipe: Recipe, grpo: GrpoConfig) -> None:
    """ValueError for a `grpo` section that the rest of the recipe does not fit."""
    if recipe.model.init_from is None:
        raise ValueError("grpo needs model.init_from: a checkpoint that has learnt to think")
    grpo.plan(recipe.training)
    rewards.named(grpo.reward_funcs)


def build_method(recipe: Recipe) -> Method:
    """The recipe's method; unknown names, keys and per-request values are ValueErrors."""
    config = dict(recipe.method)
    method = registry.build(str(config.pop("name", "")), config)
    for values in recipe.validation.params:
        registry.make_params(method, values)
    return method


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train as the recipe says. Everything that can be wrong with it is found before the first step."""
    output = files.require_writable(recipe.output)
    claim(recipe, output)
    examples, validation = load_examples(recipe.data)
    lm, method = load_model(recipe)
    params = [registry.make_params(method, values) for values in recipe.validation.params]
    require_fit(lm, method, validation, params, recipe.validation.limits)
    info = {"recipe": to_json(recipe), "seed": recipe.training.seed, "label": recipe.label}
    shared: dict[str, Any] = {
        "validate": make_validate(recipe, validation),
        "run_info": info,
        "resume": resume,
    }
    if recipe.grpo is not None:
        result = grpo_run.train(lm, method, examples, recipe.training, recipe.grpo, output, **shared)
    else:
        result = train(lm, method, examples, recipe.training, output, held_out=validation, **shared)
    progress.say(
        f"wrote {result.best} (the checkpoint), {output}/learning_curves.png, {output}/logs (TensorBoard)"
    )
    return result


def claim(recipe: Recipe, output: Path) -> None:
    """Write the recipe into its run folder; a folder that holds another run is refused, not mixed up."""
    path, mine, folder = output / "recipe.json", to_json(recipe), RunFolder(output)
    # A run that failed before it saved anything is none: its mistake may be put right in place.
    if path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        now, then = _flat(mine), _flat(files.read_json(path))
        # A key that came into recipes since then had its default.
        default = _flat(to_json(Recipe(output="")))
        then |= {key: default[key] for key in now.keys() - then.keys() if key in default}
        differing = [key for key in now | then if now.get(key) != then.get(key)]
        # A longer budget is the one change that a run may go on with.
        differing = [key for key in differing if key.split(".")[-1] not in RESUMABLE]
        if differing:
            raise ValueError(
                f"{output} holds another run (other {', '.join(sorted(differing))}); "
                "give this one its own --output, or remove that folder"
            )
    files.write_json(path, mine)


RESUMABLE = ("num_train_epochs", "max_hours", "max_steps", "report_to")


def load_examples(data: DataConfig) -> tuple[list[Example], list[Example]]:
    """Training rows and validation rows."""

    def rows(source: str, split: str, limit: int | None, seed: int, options: dict[str, Any]) -> list[Example]:
        return sources.load(
            source,
            split,
            data_dir=Path(data.data_dir) if data.data_dir else None,
            limit=limit,
            seed=seed,
            skip_malformed=data.skip_malformed,
            options=options,
        )

    source = data.validation_source or data.source
    if data.validation_size != 0 and source == data.source and Path(source).is_file():
        raise ValueError(
            f"{source} is one file, which would validate on its own training rows: name another in "
            "data.validation_source, or set data.validation_size 0"
        )
    own = data.options if source == data.source else {}
    size, skip = data.train_size, data.train_skip
    train_rows = rows(data.source, data.train_split, size and skip + size, data.seed, data.options)[skip:]
    if not train_rows:
        raise ValueError(f"data.train_skip is {skip}, but {data.source} has no more rows than that")
    for more in data.mixed_in:
        split, seed = more.get("train_split", "train"), more.get("seed", data.seed)
        train_rows += rows(more["source"], split, more.get("train_size"), seed, more.get("options", {}))
    if len({example.id for example in train_rows}) < len(train_rows):  # draws are functions of a row's id
        raise ValueError("data.mixed_in: some rows are there twice; a source is mixed in once, beside others")
    if data.validation_size == 0:
        return train_rows, []
    return train_rows, rows(source, data.validation_split, data.validation_size, data.seed, own)


def load_model(recipe: Recipe) -> tuple[LatentLM, Method]:
    """Model and method, ready to train: from a checkpoint's weights or from a backbone."""
    method = build_method(recipe)
    lm = _load_lm(recipe, method)
    if recipe.model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(recipe.model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model.attn_implementation: {error}") from error
    return lm, method


def _load_lm(recipe: Recipe, method: Method) -> LatentLM:
    model = recipe.model
    if recipe.grpo is not None:
        _take_config(recipe, method)
    torch.manual_seed(recipe.training.seed)  # peft draws an adapter's first weights from the global generator
    if model.init_from is None:
        backbone = backbones.load(model.backbone, model.dtype, recipe.training.seed)
        lm = LatentLM.from_backbone(backbone, recipe.template, model.lora)
        registry.attach(lm, method, recipe.training.seed)
        return lm
    seed = recipe.training.seed
    return registry.load_for_training(model.init_from, method, model.lora, model.dtype, seed)


def _take_config(recipe: Recipe, method: Method) -> None:
    """Reinforcement goes on with the checkpoint's method as it was trained (a measured sigma_e included).

    ValueError where the recipe names another method, or for a key another value than the checkpoint's.
    """
    folder = checkpoint.resolve(str(recipe.model.init_from))
    trained = checkpoint.read_info(folder)["method"]
    if trained["name"] != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained['name']}")
    config = registry.build(method.name, trained["config"]).config
    for key in set(recipe.method) - {"name"}:
        mine, theirs = getattr(method.config, key), getattr(config, key)
        if _plain(mine) != _plain(theirs):
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    method.config = config


def make_validate(
    recipe: Recipe, examples: list[Example]
) -> Callable[[LatentLM, Method], dict[str, float]] | None:
    """Validation by generation, or None where the recipe has no validation rows."""
    if not examples:
        return None
    settings = recipe.validation

    def validate(lm: LatentLM, method: Method) -> dict[str, float]:
        params = [registry.make_params(method, values) for values in settings.params]
        return score(lm, method, examples, params, settings.decoding, settings.limits)

    return validate


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON values (tuples as lists)."""
    return {key: _plain(value) for key, value in dataclasses.asdict(recipe).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        path: leaf
        for key, value in tree.items()
        for path, leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


UNKNOWN_KEY = (
    r"(?:[Gg]roup '(?P<group>[\w.]+)' )?does not accept (?:option|nested key) '(?P<key>[\w.]+)'",
    r"[Uu]nrecognized arguments?: --(?P<key>[\w.]+)",
    r"(?s)(?:Parser key \"(?P<group>[\w.]+)\".*)?Option '(?P<key>[\w.]+)' is not accepted",
)
"""How jsonargparse says that a key is unknown."""


def _explain(made: jsonargparse.ArgumentParser, message: str) -> str:
    """jsonargparse's message, with the nearest right key where it complains of an unknown one."""
    known = [name.removeprefix("--") for action in made._actions for name in action.option_strings]
    for section, cls in (("model.lora", LoraSettings), ("grpo", GrpoConfig)):
        known += [f"{section}.{f.name}" for f in dataclasses.fields(cls)]
    for pattern in UNKNOWN_KEY:
        if unknown := re.search(pattern, message):
            key = ".".join(filter(None, (unknown.groupdict().get("group"), unknown["key"])))
            return f"unknown key {key!r}{registry.nearest(key, known)}"
    return message
