"""transformers' `Trainer` with the few things that latents need otherwise.

Ours are: rows counted instead of labels (the scale of accumulation), an own order of rows, a learning rate for
the method's modules, weights saved as a checkpoint folder has them (adapter or full, and modules: nothing
frozen, nothing twice), validation by generation, each term of the loss in the logs, and a stop at a loss or
gradient that is not finite. Everything else is Trainer's: loop, accumulation, DDP, autocast, resume state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerControl, TrainingArguments

from colar.methods.base import Method
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.training.batches import Schedule, TrainingRows, collate, count_rows
from colar.training.objective import Objective

Validate = Callable[[LatentLM, Method], dict[str, float]]


class NonFiniteError(FloatingPointError):
    """The loss or the gradient is NaN or infinite; says at which step, in which terms, and what is still good."""


class LossTermSums:
    """Sums of the loss's terms since the last log, kept on the device: no synchronisation at a step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows, self.paused_seconds = 0, 0.0
        self.started: float | None = None

    def start(self) -> None:
        """At the first update after a log: what lies between (an evaluation, a save) is not counted."""
        if self.started is None:
            self.started, self.paused_seconds = time.monotonic(), 0.0

    def add(self, outputs: dict[str, Tensor], rows: int) -> None:
        self.rows += rows
        for name, mean in outputs.items():
            if name != "loss":
                self.sums[name] = self.sums.get(name, 0) + mean * rows

    def means(self, gather: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float]:
        """Mean of each term over the window's rows on all processes, and rows a second."""
        local = [*self.sums.values(), torch.tensor([self.rows], device=device)]
        totals = gather(torch.stack([value.double().reshape(()) for value in local])[None]).sum(0).tolist()
        rows = max(totals[-1], 1)
        means = {name: total / rows for name, total in zip(self.sums, totals, strict=False)}
        seconds = time.monotonic() - (self.started or 0.0) - self.paused_seconds
        return means | {"rows_per_second": rows / max(seconds, 1e-9)}


class LatentTrainer(Trainer):  # type: ignore[misc]
    """`validate` is called at each evaluation, on the main process; the others wait for what it says.

    The loss on the rows `held_out` is logged beside it.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        rows: Dataset[Any],
        schedule: Schedule,
        modules_learning_rate: float | None = None,
        validate: Validate | None = None,
        held_out: TrainingRows | None = None,
    ) -> None:
        super().__init__(model=objective, args=args, train_dataset=rows, data_collator=collate)
        self.objective, self.schedule, self.validate, self.held_out = objective, schedule, validate, held_out
        self.modules_learning_rate = modules_learning_rate
        self.term_sums = LossTermSums()
        self.last_terms: dict[str, Tensor] = {}

    # Data

    def _get_train_sampler(self, train_dataset: Any = None) -> Schedule:
        return self.schedule

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The batches of one update, and the rows that they and those of the other processes hold."""
        self.term_sums.start()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self.accelerator.gather(count_rows(batches).to(device)[None]).sum()

    # Loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        rows = int(count_rows([inputs]))
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.term_sums.add(outputs, rows)
        self.last_terms = outputs
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Called once an update, before the optimiser: what is not finite must not reach the weights."""
        norm = super()._get_grad_norm(model, grad_norm)
        losses = torch.stack([term.reshape(()) for term in self.last_terms.values()])
        if not math.isfinite(float(norm)) or not bool(torch.isfinite(losses).all()):
            terms = ", ".join(f"{name} {float(value.detach()):g}" for name, value in self.last_terms.items())
            raise NonFiniteError(
                f"step {self.state.global_step + 1}: {terms}, gradient norm {float(norm):g}; "
                "training stops before it reaches the weights"
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.term_sums.means(self.accelerator.gather, self.args.device)
            if self.modules_learning_rate is not None:
                ratio = self.modules_learning_rate / self.args.learning_rate  # one schedule for both
                logs["learning_rate_modules"] = logs["learning_rate"] * ratio
            self.term_sums.clear()
        super().log(logs, start_time)

    # Optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Groups with and without weight decay, and the method's modules with a learning rate of their own."""
        if self.optimizer is None:
            target = self.model if model is None else model
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer: torch.optim.Optimizer = cls(self.parameter_groups(target), **options)
        return self.optimizer

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        decayed = set(self.get_decay_parameter_names(model))
        frozen_rows = masked_embedding(self.objective.lm)
        groups: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            module = ".extra." in f".{name}"
            decay = name in decayed and parameter is not frozen_rows
            rate = self.modules_learning_rate if module else None
            group: dict[str, Any] = {"params": [], "lr": self.args.learning_rate if rate is None else rate}
            group["weight_decay"] = self.args.weight_decay if decay else 0.0
            groups.setdefault((module, decay), group)["params"].append(parameter)
        return [groups[key] for key in sorted(groups)]

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Validate by generation, and log it; every process returns the main process's numbers."""
        if self.validate is None:
            return {}
        started = time.monotonic()
        holder = [self._validate(self.validate) if self.is_world_process_zero() else {}]
        metrics = broadcast_object_list(holder)[0] if self.args.world_size > 1 else holder[0]
        metrics["seconds"] = time.monotonic() - started
        self.term_sums.paused_seconds += metrics["seconds"]
        logs = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(logs)
        handler = self.callback_handler
        self.control: TrainerControl = handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    def _validate(self, validate: Validate) -> dict[str, float]:
        lm = self.objective.lm
        was_training = lm.training
        lm.eval()
        # Training goes on with the random numbers it would have had without an evaluation.
        devices = [lm.device] if lm.device.type == "cuda" else []
        # Compiled layers would be compiled anew for every shape of a decode step.
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices), torch.no_grad(), eager:
            metrics = self._held_out_losses() | dict(validate(lm, self.objective.method))
        lm.train(was_training)
        if "accuracy" not in metrics:
            raise ValueError(
                f"validate must return an accuracy, it returned {', '.join(metrics) or 'nothing'}"
            )
        return metrics

    def _held_out_losses(self) -> dict[str, float]:
        """Mean of each term of the loss over the validation rows: what training minimises, where it was not trained.

        Rows are encoded as they are due now (a curriculum's stage), their draws the same each time.
        """
        rows, size = self.held_out, self.args.train_batch_size
        if rows is None:
            return {}
        sums: dict[str, float] = {}
        for start in range(0, len(rows), size):
            batch = [rows.at(self.state.epoch or 0.0, i) for i in range(start, min(start + size, len(rows)))]
            tensors = self._prepare_inputs(collate(batch))
            with self.accelerator.autocast():
                means = self.objective(**tensors)
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + float(mean) * len(batch)
        return {name: total / len(rows) for name, total in sums.items()}

    # Resume state

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        started = time.monotonic()
        super()._save_checkpoint(model, trial)
        self.term_sums.paused_seconds += time.monotonic() - started

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save_weights(self.objective.lm, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.load_weights(self.objective.lm, Path(resume_from_checkpoint))


def masked_embedding(lm: LatentLM) -> Tensor | None:
    """The embedding of which only an added separator's row is trained (`LatentLM.freeze_embeddings`).

    Its other rows get no gradient, and must get no weight decay either.
    """
    weight: Tensor = lm.causal_lm.get_input_embeddings().weight
    hooked = bool(getattr(weight, "_backward_hooks", None))
    return weight if weight.requires_grad and hooked else None
