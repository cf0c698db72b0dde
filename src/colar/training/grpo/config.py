"""`GrpoConfig`: settings of sampling, rewards and clipping, checked where it is built. TRL's names and meanings."""

from dataclasses import dataclass
from typing import Literal, get_args

from colar import checks
from colar.engine.request import Decoding
from colar.training.config import TrainingConfig

LossType = Literal["grpo", "dr_grpo", "dapo"]
Level = Literal["token", "sequence"]
WHOLE_FROM = {
    "num_generations": 2,
    "num_iterations": 1,
    "max_latents": 1,
    "dynamic_sampling": 0,
    "max_batch": 1,
}
"""Keys that are whole numbers, with their least values. `length_penalty` divides by `max_latents`."""


@dataclass(frozen=True)
class GrpoConfig:
    """Group relative policy optimisation over latents and tokens. The rows of `training` are outputs, as in TRL."""

    # The sizes of a generation (`plan` below checks that they fit into each other).
    num_generations: int = 8
    """G: outputs sampled for each question ("group size G of 8")."""
    steps_per_generation: int | None = None
    """Batches that the outputs of one generation are divided into; null: gradient_accumulation_steps, one update."""
    num_iterations: int = 1
    """Times that the outputs of one generation are learnt from."""
    # Temperatures and limits of the outputs.
    max_latents: int = 128
    """Most latents of an output; thinking is then cut."""
    max_completion_length: int = 64
    """Most tokens of an answer."""
    temperature: float = 1.0
    """Temperature of stop decisions and answer tokens, in sampling and in scoring. There is no top_p, because tokens
    that a nucleus cuts off could not be scored."""
    latent_temperature: float = 1.0
    """Multiplies the latent head's sigma, in sampling and in scoring; 0: latents are its mean and are not scored. For
    `sequential`, whose thoughts are tokens, divides their logits; 0: the most probable tokens, not scored."""
    # Per-request values of the method: for each question, one value of each list is drawn.
    compression_factors: tuple[float, ...] | None = None
    """Compression factors c to draw from: all outputs of a question have the same c. null for this key and the next:
    the speed of the checkpoint to start from; null for one of them: the method's default."""
    confidence_thresholds: tuple[float, ...] | None = None
    """Thresholds to draw from, likewise (`sequential` only): a group of tokens ends before one that is less likely.
    Each is 0 (none) or above 0.5."""
    # Rewards, and how they become advantages.
    reward_funcs: tuple[str, ...] = ("accuracy",)
    """accuracy: 1 or 0 by the evaluation's judge; length_penalty: -#L / max_latents. The reward is their sum."""
    # The loss (`loss.py` has the formula).
    loss_type: LossType = "grpo"
    """grpo: mean over an output's actions (the paper's "averaged"); dr_grpo: sum over a constant ("w/o average"), the
    mean number of actions of the first generation's outputs; dapo: mean over all actions of an update."""
    importance_sampling_level: Level = "token"
    """Ratio of new to old probability: token, of each action; sequence, one for an output (GSPO's mean)."""
    epsilon: float = 0.2
    """The ratio is clipped at 1 - epsilon ("clip epsilon of 0.2")."""
    epsilon_high: float | None = None
    """And at 1 + epsilon_high; null: epsilon."""
    beta: float = 0.0
    """Weight of the KL divergence from the model at the start (above 0, a copy of the trained weights is kept)."""
    # Which outputs are learnt from.
    mask_truncated_completions: bool = False
    """Leave out outputs whose thinking or answer was cut."""
    dynamic_sampling: int = 0
    """DAPO: most further rounds in which groups without spread are replaced by those of other questions."""
    # Speed of sampling.
    merge_adapter: bool = False
    """Sample with the adapter merged into the weights, rounded to their dtype: faster, but in half precision not
    exactly the model that is scored (`sampling/logp_difference`). Meanwhile a copy of the adapted weights is kept."""
    max_batch: int = 64
    """Outputs sampled at the same time."""
    # The run.
    early_stopping_patience: int | None = None
    """Stop after N validations without a new best; null: never."""

    def __post_init__(self) -> None:
        checks.check_choice("grpo.loss_type", self.loss_type, get_args(LossType))
        checks.check_choice("grpo.importance_sampling_level", self.importance_sampling_level, get_args(Level))
        for name, low in WHOLE_FROM.items():
            checks.check_number(f"grpo.{name}", getattr(self, name), low, whole=True)
        for name in ("steps_per_generation", "early_stopping_patience"):
            value = getattr(self, name)
            checks.check_holds(f"grpo.{name}", value is None or value >= 1, value, "1 or more, or null")
        checks.check_number("grpo.beta", self.beta, 0)
        checks.check_holds("grpo.epsilon", 0 < self.epsilon < 1, self.epsilon, "between 0 and 1")
        high = self.epsilon_high
        checks.check_holds("grpo.epsilon_high", high is None or high > 0, high, "above 0 or null")
        explores = "above 0 (at 0 nothing is drawn, and nothing explores)"
        checks.check_holds("grpo.temperature", self.temperature > 0, self.temperature, explores)
        try:
            _ = self.decoding  # the engine's Decoding checks the other temperatures and limits
        except ValueError as error:
            raise ValueError(f"grpo.{error}") from error
        factors = self.compression_factors
        wanted = "a list of at least one factor, or null for the method's default"
        checks.check_holds("grpo.compression_factors", factors is None or len(factors) > 0, factors, wanted)
        thresholds = self.confidence_thresholds
        # At 0.5 or below several tokens may be likely enough, and scoring the end of a group would need them all.
        scorable = thresholds is None or (
            len(thresholds) > 0 and all(t == 0 or 0.5 < t <= 1 for t in thresholds)
        )
        wanted = "a list of at least one value, each 0 or above 0.5 and at most 1, or null for the method's default"
        checks.check_holds("grpo.confidence_thresholds", scorable, thresholds, wanted)
        funcs = self.reward_funcs
        checks.check_holds("grpo.reward_funcs", len(funcs) > 0, funcs, "a list of at least one reward")

    @property
    def decoding(self) -> Decoding:
        """Temperatures and limits of the outputs."""
        return Decoding(
            temperature=self.temperature,
            latent_temperature=self.latent_temperature,
            max_latents=self.max_latents,
            max_completion_length=self.max_completion_length,
        )

    @property
    def param_choices(self) -> dict[str, tuple[float, ...]]:
        """Choices of each per-request value of the method that is drawn, by name."""
        choices = {
            "compression_factor": self.compression_factors,
            "confidence_threshold": self.confidence_thresholds,
        }
        return {name: values for name, values in choices.items() if values is not None}

    def plan(self, training: TrainingConfig, processes: int = 1) -> "GenerationPlan":
        """The sizes of a generation, its updates and batches. ValueError if they are not multiples of each other, or
        for settings that GRPO does not support.

        With N processes, an update and a generation have N times as many batches.
        """
        if training.fsdp:
            raise ValueError(
                "training.fsdp is for SFT: grpo samples from the model, of which no process would have all weights"
            )
        draws = training.draws_per_example
        rows_are_outputs = "1 for grpo, whose rows are outputs: grpo.num_generations of each question"
        checks.check_holds("training.draws_per_example", draws == 1, draws, rows_are_outputs)
        batch = training.per_device_train_batch_size
        accumulate = training.gradient_accumulation_steps
        steps = accumulate if self.steps_per_generation is None else self.steps_per_generation
        if steps % accumulate:
            raise ValueError(
                f"grpo.steps_per_generation ({steps}) must be a multiple of training.gradient_accumulation_steps "
                f"({accumulate}): an update learns from one generation"
            )
        outputs = batch * steps * processes
        if outputs % self.num_generations:
            by_processes = f" x {processes} processes" if processes > 1 else ""
            raise ValueError(
                f"training.per_device_train_batch_size ({batch}) x grpo.steps_per_generation ({steps}){by_processes} = "
                f"{outputs} outputs of a generation must be a multiple of grpo.num_generations "
                f"({self.num_generations})"
            )
        return GenerationPlan(
            batch, accumulate * processes, steps * processes, self.num_iterations, self.num_generations
        )


@dataclass(frozen=True)
class GenerationPlan:
    """The sizes of a generation. The fields are saved in checkpoints (`grpo.json`) under these names.

    generation    batch x steps outputs, in groups
    update        batch x accumulate of them
    each generation is used `iterations` times

    `accumulate` and `steps` count the batches of all processes: two processes with one each equal one with two.
    """

    batch: int
    """Outputs that go through the model at once, on one device."""
    accumulate: int
    """Batches of an update."""
    steps: int
    """Batches of a generation."""
    iterations: int
    """Times that a generation is learnt from."""
    group: int
    """Outputs of a question."""

    @property
    def outputs(self) -> int:
        """Outputs of a generation."""
        return self.batch * self.steps

    @property
    def questions(self) -> int:
        """Questions of a generation: the paper's "rollout batch size"."""
        return self.outputs // self.group

    @property
    def outputs_per_update(self) -> int:
        """Outputs of an update; divided by `group`, the paper's "optimizer step batch size", in questions."""
        return self.batch * self.accumulate

    @property
    def updates_per_generation(self) -> int:
        """Updates made with the outputs of one generation, over all iterations."""
        return self.steps // self.accumulate * self.iterations
