"""The sections and keys of a recipe, each checked by itself, and the method that it names."""

import dataclasses
import importlib.util
import json
from dataclasses import dataclass, field
from typing import Any

from colar import yaml_settings
from colar.checks import check_choice, check_number
from colar.engine.request import DECODINGS
from colar.evaluation.evaluate import AnswerSettings
from colar.methods import registry
from colar.methods.base import Method
from colar.model.lora import LoraSettings
from colar.template.template import TemplateConfig
from colar.training.config import TrainingConfig
from colar.training.grpo.config import GrpoConfig

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class ModelConfig:
    """Source of the weights."""

    backbone: str = "tiny"
    """tiny | tiny-digits | smollm2-135m | a folder | a Hub id. Beside `init_from` it has no effect, and
    is an error on the command line."""
    init_from: str | None = None
    """A colar checkpoint to start from ("all methods are initialized with weights from CoT-SFT")."""
    lora: LoraSettings | None = None
    """Low-rank adapters; null trains all weights."""
    attn_implementation: str | None = None
    """transformers' attention in training: sdpa | eager | flash_attention_2 | flash_attention_3; null: its default,
    which the engine also uses in place of flash attention. On CPUs eager trains faster."""
    dtype: str = "float32"
    """Dtype of the weights: float32 | bfloat16. Half precision is for a frozen base under LoRA; to train all
    weights at its speed leave float32 here and set training.bf16."""
    load_in_4bit: bool = False
    """QLoRA: linears below an adapter in 4 bits (nf4, by bitsandbytes); they compute in model.dtype."""

    def __post_init__(self) -> None:
        # Gradients in float16 would underflow: the loss is not scaled.
        check_choice("model.dtype", self.dtype, ["float32", "bfloat16"])
        # Without an adapter the half-precision weights themselves would be trained. An update of 1e-4 of a weight is
        # less than half of bfloat16's step (4e-3 of the weight), and rounds to nothing.
        if self.dtype != "float32" and self.lora is None:
            raise ValueError(
                f"model.dtype {self.dtype} cannot be trained without model.lora (updates of the weights round to 0): "
                "set model.dtype float32, with training.bf16 true to compute in bfloat16, or give model.lora"
            )
        if self.load_in_4bit and self.lora is None:
            raise ValueError("model.load_in_4bit needs model.lora: weights of 4 bits cannot be trained")
        if self.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(
                "model.load_in_4bit needs bitsandbytes: pip install bitsandbytes, or set it false"
            )
        if self.attn_implementation is not None:
            check_choice("model.attn_implementation", self.attn_implementation, ATTENTION)


@dataclass(frozen=True)
class SourceRows:
    """More training rows: an entry of `data.mixed_in`."""

    source: str
    """As data.source."""
    train_size: int | None = None
    """First N rows; null: all."""
    seed: int | None = None
    """null: data.seed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a generated source."""

    def __post_init__(self) -> None:
        if self.train_size is not None:
            check_number("data.mixed_in: train_size", self.train_size, 1, whole=True)


@dataclass(frozen=True)
class DataConfig:
    """The rows to learn from, and those that select the checkpoint."""

    source: str = "arithmetic"
    """A source by name (`colar data list`), a file of your own (`colar data show FILE`), or a folder of SPLIT files."""
    data_dir: str | None = None
    """Folder with upstream files; else $COLAR_DATA_DIR, else the Hub."""
    train_size: int | None = None
    """First N rows; null: all."""
    train_skip: int = 0
    """Skip N rows before these: the rows that the initial weights were trained on."""
    max_reasoning_steps: int | None = None
    """Use only the rows whose chain has at most N steps; null: all. Reinforcement learns from groups of outputs that
    are partly right, which a small model has where chains are short."""
    validation_source: str | None = None
    """Another source for validation; null: the same (a single file has no other rows: name one)."""
    validation_size: int | None = 200
    """First N rows of its split `validation`; null: all; 0: no validation, the last weights are kept."""
    seed: int = 0
    """Seed of a generated source."""
    options: dict[str, Any] = field(default_factory=dict)
    """A generated source's options (`colar data show arithmetic`)."""
    skip_malformed: bool = False
    """Skip malformed rows instead of stopping at the first."""
    judge: str | None = None
    """module:function of a judge of your own, called as function(question, gold, answer): in validation and as GRPO's
    reward accuracy; null: answers are judged by their type."""
    mixed_in: tuple[SourceRows, ...] = ()
    """More training rows: {source, train_size, seed, options} each; only source is needed."""

    def __post_init__(self) -> None:
        least = {"train_size": 1, "validation_size": 0, "train_skip": 0, "max_reasoning_steps": 1}
        for name, low in least.items():
            if getattr(self, name) is not None:
                check_number(f"data.{name}", getattr(self, name), low, whole=True)


@dataclass(frozen=True)
class ValidationConfig:
    """Validation of a checkpoint, by generation as at test time."""

    params: tuple[dict[str, Any], ...] = ({},)
    """The per-request values to validate at, e.g. [{compression_factor: 2}]; accuracy is the mean over them."""
    decoding: str = "greedy"
    """greedy | sampled."""
    limits: AnswerSettings = field(default_factory=AnswerSettings)
    """Limits of generation, and how the engine runs."""
    page_size: int = 16
    """First N validation rows for the page of the run, inspect.html; 0: no page."""

    def __post_init__(self) -> None:
        check_number("validation.page_size", self.page_size, 0, whole=True)
        check_choice("validation.decoding", self.decoding, list(DECODINGS))
        if not self.params:
            raise ValueError("validation.params must not be empty; [{}] asks with the method's defaults")

    def method_params(self, method: Method) -> list[Any]:
        """`params` as objects of the method's `Params`. ValueError for a value that it does not have."""
        return [registry.make_params(method, values) for values in self.params]

    def check_params(self, method: Method) -> None:
        """Reject `params` that the method does not have, or that cannot work with its weights as trained."""
        for params in self.method_params(method):
            try:
                method.check_params(params)
            except ValueError as error:
                raise ValueError(f"validation.params: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """One run."""

    output: str
    """Run folder."""
    label: str = ""
    """Name of the ablation or control, shown in reports; stored in the checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Weights."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Prompt layout; a checkpoint to start from has its own."""
    data: DataConfig = field(default_factory=DataConfig)
    """Rows."""
    method: dict[str, Any] = field(default_factory=lambda: {"name": "cot"})
    """`name` and the keys of that method's config."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length and learning rates."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Choice of the best checkpoint."""
    grpo: GrpoConfig | None = None
    """Reinforcement instead of imitation: the model of `model.init_from` learns from its own outputs."""

    def __post_init__(self) -> None:
        if self.model.load_in_4bit and self.training.fsdp:
            raise ValueError("model.load_in_4bit and training.fsdp exclude each other: set one of them false")


@dataclass(frozen=True)
class Stage:
    """One run of a recipe."""

    name: str
    """"" in a recipe without stages."""
    recipe: Recipe


def build_method(recipe: Recipe) -> Method:
    """The method that the recipe names. ValueError for an unknown name, key or per-request value."""
    config = dict(recipe.method)
    name = config.pop("name", "")
    if name is None:
        raise ValueError(f"method.name is blank (null): it must be one of {', '.join(registry.METHODS)}")
    method = registry.build(str(name), config)
    # A value that the method does not have fails here, and not at the first validation.
    if recipe.grpo is None:
        recipe.validation.check_params(method)
    else:
        # The supported values depend on the checkpoint to start from: `run.load_method` checks them.
        recipe.validation.method_params(method)
    return method


def defaults() -> dict[str, Any]:
    """The default of every key, by its dotted name, as `to_json` would have it."""
    named = {
        key: default for key, default, _ in yaml_settings.keys(Recipe) if default is not dataclasses.MISSING
    }
    return {key: list(default) if isinstance(default, tuple) else default for key, default in named.items()}


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON values (tuples as lists)."""
    tree: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return tree
