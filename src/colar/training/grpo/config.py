"""`GrpoConfig`: what is sampled, rewarded and clipped, checked where it is built. TRL's names and meanings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from colar.engine.request import Decoding
from colar.methods.rollouts import LatentLogprob
from colar.training.config import TrainingConfig

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo"]
Level = Literal["token", "sequence"]
Scale = Literal["group", "batch", "none"]
Draw = Literal["group", "sample"]
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": get_args(LossType),
    "importance_sampling_level": get_args(Level),
    "scale_rewards": get_args(Scale),
    "latent_logprob": get_args(LatentLogprob),
    "factor_drawn_per": get_args(Draw),
}


@dataclass(frozen=True)
class GrpoConfig:
    """Group relative policy optimisation over latents and tokens. In `training`, rows are outputs, as in TRL."""

    num_generations: int = 8
    """G: outputs sampled for each question ("group size G of 8")."""
    steps_per_generation: int | None = None
    """Batches that the outputs of one generation are divided into; null: gradient_accumulation_steps, one update."""
    num_iterations: int = 1
    """Times that the outputs of one generation are learnt from."""
    max_latents: int = 128
    """Most latents of an output; thinking is then cut."""
    max_completion_length: int = 64
    """Most tokens of an answer."""
    temperature: float = 1.0
    """Of stop decisions and answer tokens, in sampling and in scoring."""
    top_p: float = 1.0
    """1, and nothing else: what a nucleus cuts off could not be scored."""
    latent_temperature: float = 1.0
    """Multiplies the latent head's sigma, in sampling and in scoring; 0: latents are its mean and are not scored."""
    compression_factors: tuple[float, ...] | None = None
    """Factors drawn from; null: the method's default."""
    factor_drawn_per: Draw = "group"
    """group: one factor for a question's outputs; sample: one for each of them."""
    reward_funcs: tuple[str, ...] = ("accuracy",)
    """accuracy: 1 or 0 by the evaluation's judge; length_penalty: -#L / max_latents. Their weighted sum counts."""
    reward_weights: tuple[float, ...] | None = None
    """One for each of reward_funcs; null: 1 each."""
    scale_rewards: Scale = "group"
    """What advantages are divided by: the standard deviation of the group's rewards, of the generation's, or none."""
    loss_type: LossType = "grpo"
    """grpo: mean over an output's actions (the paper's "averaged"); dr_grpo: sum over a constant ("w/o average");
    dapo: mean over all actions of an update; bnpo: over those of a batch."""
    dr_grpo_length: float | None = None
    """dr_grpo's constant; null: the mean number of actions of the first generation's outputs."""
    importance_sampling_level: Level = "token"
    """Ratio of new to old probability: token, of each action; sequence, one for an output (GSPO's mean)."""
    epsilon: float = 0.2
    """The ratio is clipped at 1 - epsilon ("clip epsilon of 0.2")."""
    epsilon_high: float | None = None
    """And at 1 + epsilon_high; null: epsilon."""
    beta: float = 0.0
    """Weight of the KL divergence from the model at the start (its trained weights are kept twice above 0)."""
    latent_logprob: LatentLogprob = "mean"
    """A latent's log-density: mean over its dimensions, of a token's size, or their sum, the true one."""
    mask_truncated_completions: bool = False
    """Leave out outputs whose thinking or answer was cut."""
    dynamic_sampling: int = 0
    """DAPO: most further rounds in which groups without spread are replaced by those of other questions."""
    merge_adapter: bool = False
    """Sample with the adapter folded into the weights, rounded to their dtype: faster, and in half precision no longer
    quite the model that is scored (`sampling/logp_difference`). A copy of the adapted weights is kept meanwhile."""
    max_batch: int = 64
    """Outputs sampled at the same time."""
    early_stopping_patience: int | None = None
    """Stop after so many validations without a new best; null: never."""
    log_completions: int = 2
    """Outputs of each generation written to completions.jsonl, latents read as tokens."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"grpo.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        _require("num_generations", self.num_generations >= 2, self.num_generations, "2 or more")
        for name in ("num_iterations", "max_latents", "max_completion_length", "max_batch"):
            _require(name, getattr(self, name) >= 1, getattr(self, name), "1 or more")
        for name in ("steps_per_generation", "early_stopping_patience"):
            value = getattr(self, name)
            _require(name, value is None or value >= 1, value, "1 or more, or null")
        for name in ("latent_temperature", "beta", "dynamic_sampling", "log_completions"):
            _require(name, getattr(self, name) >= 0, getattr(self, name), "0 or more")
        _require("epsilon", 0 < self.epsilon < 1, self.epsilon, "between 0 and 1")
        for name in ("epsilon_high", "dr_grpo_length"):
            value = getattr(self, name)
            _require(name, value is None or value > 0, value, "above 0 or null")
        if not self.temperature > 0:
            raise ValueError(
                f"grpo.temperature must be above 0, got {self.temperature}: at 0 nothing is drawn, nothing explores"
            )
        if self.top_p != 1:
            raise ValueError(
                f"grpo.top_p must be 1, got {self.top_p}: what a nucleus cuts off could not be scored"
            )
        if self.compression_factors is not None and not self.compression_factors:
            raise ValueError("grpo.compression_factors must not be empty; null draws the method's default")
        self._check_rewards()

    def _check_rewards(self) -> None:
        if not self.reward_funcs:
            raise ValueError("grpo.reward_funcs must not be empty")
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.reward_funcs):
            raise ValueError(
                f"grpo.reward_weights must have one value for each of {', '.join(self.reward_funcs)}, got {weights}"
            )
        if weights is not None and not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"grpo.reward_weights must be finite, got {weights}")

    @property
    def decoding(self) -> Decoding:
        """How outputs are drawn."""
        return Decoding(
            self.temperature,
            self.top_p,
            self.latent_temperature,
            self.max_latents,
            self.max_completion_length,
        )

    @property
    def high(self) -> float:
        """epsilon_high, or epsilon where it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.reward_funcs) if self.reward_weights is None else self.reward_weights

    def plan(self, training: TrainingConfig) -> Plan:
        """How outputs are cut into generations, updates and batches. ValueError where they do not fit."""
        batch, accumulate = training.per_device_train_batch_size, training.gradient_accumulation_steps
        steps = accumulate if self.steps_per_generation is None else self.steps_per_generation
        if steps % accumulate:
            raise ValueError(
                f"grpo.steps_per_generation ({steps}) must be a multiple of training.gradient_accumulation_steps "
                f"({accumulate}): an update learns from one generation"
            )
        if batch * steps % self.num_generations:
            raise ValueError(
                f"training.per_device_train_batch_size ({batch}) x grpo.steps_per_generation ({steps}) = "
                f"{batch * steps} outputs of a generation must be a multiple of grpo.num_generations "
                f"({self.num_generations})"
            )
        return Plan(batch, accumulate, steps, self.num_iterations, self.num_generations)


@dataclass(frozen=True)
class Plan:
    """A generation in numbers, outputs counted."""

    batch: int
    accumulate: int
    steps: int
    iterations: int
    group: int

    @property
    def outputs(self) -> int:
        """Outputs of a generation."""
        return self.batch * self.steps

    @property
    def questions(self) -> int:
        """Questions of a generation: the paper's "rollout batch size"."""
        return self.outputs // self.group

    @property
    def update(self) -> int:
        """Outputs of an update; over `group`, in questions, the paper's "optimizer step batch size"."""
        return self.batch * self.accumulate

    @property
    def updates(self) -> int:
        """Updates made with the outputs of one generation."""
        return self.steps // self.accumulate * self.iterations


def _require(name: str, holds: bool, value: Any, what: str) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not (holds and finite):
        raise ValueError(f"grpo.{name} must be {what}, got {value!r}")
