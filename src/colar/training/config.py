"""`TrainingConfig`: length and speed of a run, checked where it is built."""

import importlib.util
import math
from dataclasses import dataclass, replace

import torch

from colar import checks
from colar.methods.base import Method
from colar.ops import devices

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
DEVICES = ("cuda", "mps", "cpu")
OPTIMISERS = {"adamw_torch_fused": "torch", "adamw_8bit": "bitsandbytes"}
"""Optimisers by their names in transformers, with the package that each comes from."""
TRACKERS = ("tensorboard", "wandb", "trackio", "none")
WHOLE = {
    "seed": (0, 2**32 - 1),
    "per_device_train_batch_size": (1, math.inf),
    "draws_per_example": (1, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    "dataloader_num_workers": (0, 256),
}
"""Keys that are whole numbers, with their least and largest values. The largest seed is numpy's; more loader processes
would exhaust a machine before the first update."""
ABOVE_0 = ("learning_rate", "logging_steps", "save_steps", "ddp_timeout")
ABOVE_0_OR_NULL = ("max_hours", "modules_learning_rate", "eval_steps", "tokens_per_batch")
SHARES = ("logging_steps", "eval_steps", "save_steps")
"""Keys that count updates or, below 1, are a share of all updates."""


@dataclass(frozen=True)
class TrainingConfig:
    """Length and speed of a run. Names are those of transformers' `TrainingArguments` where they exist there."""

    seed: int = 0
    """Fixes new weights, the order of rows and every draw."""
    # How long. max_steps, where it is given, takes precedence over the epochs; max_hours ends either.
    num_train_epochs: float = 1.0
    """Passes over the rows."""
    max_steps: int = -1
    """Stop after N updates; -1: those of the epochs."""
    max_hours: float | None = None
    """Stop after N hours of wall-clock, evaluations included, summed over resumes; null: no limit."""
    # The size of an update.
    per_device_train_batch_size: int = 32
    """Rows that go through the model at once on each device."""
    draws_per_example: int = 1
    """Rows of each example in a batch, each with its own draws (for CoLaR, its own speed). They share the question,
    which is computed once, so four cost about as much as two of different examples. An epoch has N times the rows."""
    tokens_per_batch: int | None = None
    """Most positions (rows x the longest) that go through the model at once; a larger batch is split into parts of
    rows of similar length. Bounds memory only: updates and results are the same. null: no limit."""
    gradient_accumulation_steps: int = 1
    """Batches per update; 8 x 1 and 1 x 8 train alike."""
    # The optimiser.
    optim: str = "adamw_torch_fused"
    """adamw_torch_fused | adamw_8bit (bitsandbytes): with 8 bits AdamW's moments need a quarter of the memory."""
    learning_rate: float = 1e-4
    """Learning rate of AdamW, after warm-up."""
    modules_learning_rate: float | None = None
    """Learning rate of the modules that the method adds to the backbone (a latent head); null: the same."""
    lr_scheduler_type: str = "constant"
    """constant | constant_with_warmup | linear | cosine."""
    warmup_steps: float = 0
    """Updates of linear warm-up; below 1: a share of all."""
    weight_decay: float = 0.01
    """Decoupled (AdamW); biases and norms have none."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm; 0: never."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    # Precision, memory, speed: the course of a run is the same up to rounding.
    device: str | None = None
    """cuda | mps | cpu; null: a GPU where CUDA has one, else the CPU. Apple's mps is for LoRA, and untested."""
    bf16: bool = False
    """Compute in bfloat16 where it is safe (autocast); weights keep their dtype."""
    fsdp: bool = False
    """Split weights, gradients and AdamW's moments between the processes (FSDP2): for models that do not fit on
    one GPU. SFT without validation (data.validation_size 0); docs/parallel.md."""
    compile: bool | None = None
    """Compile the backbone's layers (torch.compile): half a minute at the start, a fifth less time after on a CPU, and
    more on a GPU; null: on CUDA, where a C compiler is installed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    dataloader_num_workers: int = 0
    """Processes that encode rows; 0: the training process itself."""
    # Logs, validation and checkpoints. None of them changes the course of a run.
    logging_steps: float = 10
    """Updates between two rows of the log; below 1: a share of all."""
    eval_steps: float | None = None
    """Updates between two validations; below 1: a share of all; null: once an epoch. One more at the end."""
    load_best_model_at_end: bool = True
    """Publish the weights with the best validation accuracy, ties broken by the loss on held-out rows; false: the last
    weights, regardless of validation."""
    save_steps: float = 0.05
    """Updates between two checkpoints to resume from; below 1: a share of all and of max_hours. One more at the end."""
    report_to: str = "tensorboard"
    """tensorboard | wandb | trackio | none. history.json is written in any case."""
    # Several processes.
    ddp_timeout: float = 1800
    """Seconds that a process waits for another one, which hangs or is slower, before all end with an error."""

    def __post_init__(self) -> None:
        checks.check_choice("training.lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        checks.check_choice("training.report_to", self.report_to, TRACKERS)
        checks.check_choice("training.optim", self.optim, list(OPTIMISERS))
        if self.device is not None:
            checks.check_choice("training.device", self.device, DEVICES)
        for name, (low, high) in WHOLE.items():
            checks.check_number(f"training.{name}", getattr(self, name), low, high, whole=True)
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            checks.check_number(f"training.{name}", getattr(self, name), 0)
        for name in ABOVE_0:
            value = getattr(self, name)
            checks.check_holds(f"training.{name}", value > 0, value, "above 0")
        for name in ABOVE_0_OR_NULL:
            value = getattr(self, name)
            checks.check_holds(f"training.{name}", value is None or value > 0, value, "above 0 or null")
        for name in SHARES:
            value = getattr(self, name)
            fits = value is None or value < 1 or value == int(value)
            allowed = "a whole number, or below 1 for a share of all updates"
            checks.check_holds(f"training.{name}", fits, value, allowed)
        size, draws = self.per_device_train_batch_size, self.draws_per_example
        allowed = f"a multiple of training.draws_per_example, {draws}: rows of one example share a batch"
        checks.check_holds("training.per_device_train_batch_size", size % draws == 0, size, allowed)
        epochs = self.num_train_epochs
        # Updates are counted in 64 bits.
        allowed = "above 0, and 1,000,000 or less"
        checks.check_holds("training.num_train_epochs", 0 < epochs <= 1e6, epochs, allowed)
        steps = self.max_steps
        checks.check_holds("training.max_steps", steps == -1 or steps > 0, steps, "above 0 or -1")
        checks.check_holds("training.adam_beta2", 0 <= self.adam_beta2 < 1, self.adam_beta2, "in [0, 1)")
        if self.fsdp and self.optim != "adamw_torch_fused":
            raise ValueError(f"training.fsdp needs training.optim adamw_torch_fused, got {self.optim}")
        if self.fsdp and self.compile:
            raise ValueError("training.fsdp and training.compile exclude each other: set one of them false")
        # Trainer would silently ignore the warm-up.
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                "training.warmup_steps has no effect with lr_scheduler_type constant: use constant_with_warmup"
            )

    def resolved(self) -> "TrainingConfig":
        """The configuration with `compile` decided for this machine, as a run applies and records it."""
        if self.compile is not None:
            return self
        on_cuda = not self.on_cpu and self.device != "mps"
        return replace(self, compile=on_cuda and not self.fsdp and devices.can_compile(torch.device("cuda")))

    def check_method(self, method: Method) -> None:
        """Raise ValueError for settings that SFT by the method does not support."""
        if self.draws_per_example > 1 and not method.choices():
            raise ValueError(
                f"training.draws_per_example must be 1 for {method.name}, which draws no per-request values, got "
                f"{self.draws_per_example}"
            )
        # With fsdp a layer's weights are dropped after the backward pass of one of its forwards, while another forward
        # still needs them; and all processes must make the same number of forwards.
        if self.fsdp and method.multiple_forwards:
            raise ValueError(
                f"training.fsdp cannot train {method.name} as configured: its loss feeds the model several times; "
                "set it false"
            )

    @property
    def device_type(self) -> str:
        """The device that the run trains on: cuda, mps or cpu. Of several GPUs it is the process's own."""
        return self.device or devices.best()

    @property
    def on_cpu(self) -> bool:
        """True where the run trains on the CPU."""
        return self.device_type == "cpu"

    def check_validation(self, wanted: bool) -> None:
        """Raise ValueError if validation is requested for a model that is split between processes."""
        if self.fsdp and wanted:
            raise ValueError(
                "training.fsdp trains without validation, as no process has all weights to answer with: set "
                "data.validation_size 0, and evaluate the published weights afterwards"
            )

    def check_installed(self) -> None:
        """Raise ValueError if the package of `report_to` or `optim` is not installed, or `device` is not available."""
        if self.device in ("cuda", "mps") and not getattr(torch, self.device).is_available():
            raise ValueError(
                f"training.device {self.device} is not there: use cpu, or null for what this machine has"
            )
        if self.report_to != "none" and importlib.util.find_spec(self.report_to) is None:
            raise ValueError(
                f"training.report_to {self.report_to} is not installed: pip install {self.report_to}, "
                f"or use one of {', '.join(TRACKERS)}"
            )
        package = OPTIMISERS[self.optim]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"training.optim {self.optim} needs {package}: pip install {package}, or use adamw_torch_fused"
            )
