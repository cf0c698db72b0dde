"""transformers' `Trainer` with the few changes that latents need.

| ours | why |
|---|---|
| rows counted instead of labels | the scale of accumulation: every row weighs the same |
| its own schedule of rows | draws and order survive a resume |
| batches in parts of `tokens_per_batch` | memory, also with the longest rows |
| a learning rate for the method's modules | they are trained from scratch, the backbone is not |
| weights saved as a checkpoint folder has them | adapter or full, and modules: nothing frozen, nothing twice |
| validation by generation | as at test time |
| weights split between processes (`training.fsdp`) | models that one GPU does not hold (`model/weights.py`) |
| each term of the loss in the logs | |
| a stop at a loss or gradient that is not finite | before it reaches the weights |

Everything else is Trainer's: loop, accumulation, DDP, autocast, resume state. Its public methods and events are used
wherever they suffice; a test lists the private names, and why no public one serves.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Sized
from functools import cached_property, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerControl, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from colar import processes
from colar.engine import graphs
from colar.methods.base import Batch, Method
from colar.model import weights
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.training.config import TrainingConfig
from colar.training.curriculum import Curriculum
from colar.training.objective import (
    Objective,
    collate,
    count_rows,
    divide,
    mark_copies,
    part_indices,
    take,
)
from colar.training.rows import RowSchedule, Schedule, TrainingRows
from colar.training.terms import LossTerms

Validate = Callable[[LatentLM, Method], dict[str, float]]
"""Model and method -> metrics, with `accuracy` among them."""


class LatentTrainer(Trainer):  # type: ignore[misc]
    """Trainer over an `Objective` that is on its device already.

    `validate` is called at each evaluation by all processes together, which may divide the work; the metrics of the
    main process count. The loss on the rows `held_out` is logged beside them. `args` are those of `config`
    (`resumable_run.arguments`). `rows[key]` is a row of the loss for each key that `schedule` yields.
    """

    samples: ClassVar[bool] = False
    """True if batches are outputs that the model samples when they are due, not rows of a file."""

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        config: TrainingConfig,
        rows: Dataset[Any] | range,
        schedule: Schedule,
        validate: Validate | None = None,
        held_out: TrainingRows | None = None,
    ) -> None:
        super().__init__(model=objective, args=args, train_dataset=rows, data_collator=collate)
        # Tells Trainer that the model places its weights itself, so that it is not wrapped into DDP.
        self.is_distributed_loading_by_transformers = config.fsdp
        self.objective = objective
        self.config = config
        self.schedule = schedule
        self.validate = validate
        self.held_out = held_out
        self.tokens_per_batch = config.tokens_per_batch
        """The configured limit, or a lower one that the device's memory needs (`preflight.halve`)."""
        self.fsdp = config.fsdp
        self.terms = LossTerms(self.accelerator.gather)

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The rows in the order of the schedule, divided between the processes by accelerate.

        Batches stay on the CPU, so that Python can branch on them without synchronising with a GPU.
        """
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            sampler=self.schedule,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare_data_loader(loader, device_placement=False)
        return prepared

    @cached_property
    def curriculum(self) -> Curriculum:
        """The stages of this trainer's updates."""
        # Trainer's own arithmetic, which accounts for accumulation, several processes and ragged last updates.
        loader = self.get_train_dataloader()
        _, steps_per_epoch, *_, max_steps = self.set_initial_training_values(self.args, loader)
        # Outputs are sampled in the last stage from the start.
        return Curriculum(self.objective.method, steps_per_epoch, max_steps, applies=not self.samples)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The batches of one update, and the number of rows that all processes hold for it."""
        self.terms.of_update = {}
        # Trainer would count labels here, which would give longer rows more weight.
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.world_size > 1:
            self._mark_copies(batches)
        own_rows = devices.numbers([sum(map(count_rows, batches))], device)
        return batches, self.accelerator.gather(own_rows).sum()

    def _mark_copies(self, batches: list[Any]) -> None:
        """Mark the copies of rows that fill up an epoch's last update."""
        assert isinstance(self.schedule, Sized)
        n_rows, size, n = len(self.schedule), self.args.train_batch_size, self.args.world_size
        turns = math.ceil(n_rows / (size * n))
        updates = math.ceil(turns / self.args.gradient_accumulation_steps)
        first = self.state.global_step % updates * self.args.gradient_accumulation_steps
        mark_copies(batches, first, size, self.args.process_index, n, n_rows)

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        """Positions of each row of a batch, (B,)."""
        return self.objective.method.positions(Batch.from_tensors(inputs))

    def longest_batch(self) -> dict[str, Tensor]:
        """A batch of the longest rows, in the curriculum's stage that makes it longest: no epoch has a larger one."""
        rows, schedule = self.train_dataset, self.schedule
        assert isinstance(rows, TrainingRows), "a run that samples has no rows"
        assert isinstance(schedule, RowSchedule), "rows have a schedule"
        n_examples = self.args.train_batch_size // schedule.n_draws
        longest = sorted(range(len(rows)), key=lambda index: schedule.lengths[index])[-n_examples:]
        in_stages = []
        for epoch in self.curriculum.stage_epochs():
            in_stages.append(collate([rows[epoch, i, draw] for i in longest for draw in range(rows.n_draws)]))
        return max(in_stages, key=lambda batch: int(self.positions(batch).max()))

    def parts(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """A batch in parts of at most `tokens_per_batch` positions; the batch itself if it fits."""
        indices = part_indices(self.positions(inputs), self.tokens_per_batch)
        return [inputs] if len(indices) == 1 else [take(inputs, rows) for rows in indices]

    # Loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a batch, part by part: their losses and gradients add up to the batch's.

        Trainer's own step would move the batch to the device before Python branches on it.
        """
        parts = self.parts(inputs)
        if self.fsdp:
            # As many parts in each process, because all gather weights together, part by part.
            parts = divide(parts, max(gather_object([len(parts)])), self.positions)
        model.train()
        losses: list[Tensor] = []
        for part in parts:
            # Processes may have different numbers of parts, so gradients are synchronised at the last one.
            with contextlib.nullcontext() if part is parts[-1] else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    # DistributedDataParallel would move the tensors of a dict to the GPU one by one, and Python's
                    # branches would then synchronise.
                    batch = {"batch": MappingProxyType(part)}
                    loss, outputs = self.compute_loss(model, batch, True, num_items_in_batch)
                self.accelerator.backward(loss)
            losses.append(loss.detach())
            self.terms.add(outputs, count_rows(part))
        return reduce(torch.add, losses)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Called once per update, before the optimiser: a number that is not finite must not reach the weights.

        A fused optimiser skips such an update and all later ones on its device. The error is raised at the next log,
        where Python synchronises with the device in any case.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        finite = self.terms.end_update(self.state.global_step + 1, norm)
        skips = self.args.optim == "adamw_torch_fused" and finite.device.type in ("cpu", "cuda")
        if skips and not self.fsdp:
            # The attribute by which torch's gradient scaler makes an optimiser skip an update.
            fused: Any = self.optimizer.optimizer  # type: ignore[attr-defined]
            fused.found_inf = 1 - finite.float()
        else:
            self.terms.require_finite()
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the terms' means and the modules' learning rate to a training row; other rows are unchanged."""
        self.terms.require_finite()
        if "loss" in logs:
            logs |= self.terms.means(self.args.device)
            if self.config.modules_learning_rate is not None:
                # Both rates follow one schedule, so their ratio stays.
                ratio = self.config.modules_learning_rate / self.args.learning_rate
                logs["learning_rate_modules"] = logs["learning_rate"] * ratio
        super().log(logs, start_time)

    # Optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over `parameter_groups`; with `fsdp` the weights are split before it sees them."""
        if self.fsdp and not weights.is_sharded(self.objective):
            weights.shard(self.objective, self.objective.lm.decoder_layers(), self.args.device)
        if self.optimizer is None:
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.objective)
            self.optimizer: torch.optim.Optimizer = cls(self.parameter_groups(self.objective), **options)
        return self.optimizer

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Up to four groups: backbone and the method's modules, each without and with weight decay."""
        decayed_names = set(self.get_decay_parameter_names(model))
        groups: defaultdict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # LatentLM keeps the modules of the method under `extra`.
                groups[".extra." in f".{name}", name in decayed_names].append(parameter)
        own_rate = self.config.modules_learning_rate
        options = []
        # In a fixed order, because the optimiser's saved state identifies its groups by their position.
        for is_module, decays in sorted(groups):
            rate = own_rate if is_module and own_rate is not None else self.args.learning_rate
            decay = self.args.weight_decay if decays else 0.0
            options.append({"params": groups[is_module, decays], "lr": rate, "weight_decay": decay})
        return options

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Validate by generation, and log it; all processes call it together and get the same numbers."""
        if self.validate is None:
            return {}
        self.terms.require_finite()
        lm = self.objective.lm
        # Training continues with the random numbers that it would have had without an evaluation.
        # Compiled layers would recompile for every shape of a decode step.
        eager = torch.compiler.set_stance("force_eager")
        with lm.evaluating(), devices.forked_rng(lm.device), torch.no_grad(), eager:
            own = self._held_out_losses()
            # Decoding with a merged adapter costs no more than the backbone; evaluations merge it, too.
            with lm.merged():
                own |= self.validate(lm, self.objective.method)
        graphs.leave_room(lm)
        # A user's function may not be aware of several processes, and return other numbers in each.
        metrics = processes.from_main(lambda: own)
        if "accuracy" not in metrics:
            raise ValueError(
                f"validate must return an accuracy, it returned {', '.join(metrics) or 'nothing'}"
            )
        logs = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(logs)
        handler = self.callback_handler
        self.control: TrainerControl = handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    def _held_out_losses(self) -> dict[str, float]:
        """Mean of each term of the loss over the validation rows: the training loss on rows that were not trained on.

        Rows are encoded in the stage that the last update was made in; their draws are the same each time.
        """
        rows = self.held_out
        if rows is None:
            return {}
        epoch = self.curriculum.epoch(self.state.global_step)
        size = self.args.train_batch_size
        sums: defaultdict[str, float] = defaultdict(float)
        state = self.accelerator.state
        for start in range(size * state.process_index, len(rows), size * state.num_processes):
            end = min(start + size, len(rows))
            batch = [rows.encoded(epoch, index, draws_of=0)[0] for index in range(start, end)]
            for part in self.parts(collate(batch)):
                # In the precision of training, because the two losses are compared.
                with self.accelerator.autocast():
                    means = self.objective(**part)
                for name, mean in means.items():
                    sums[name] += float(mean) * count_rows(part)
        totals: defaultdict[str, float] = defaultdict(float)
        for share in gather_object([sums]):
            for name, total in share.items():
                totals[name] += total
        return {name: total / len(rows) for name, total in totals.items()}

    # Resume state

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained weights; the base class would save the whole model, frozen weights included."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        lm = self.objective.lm
        # All processes gather; one writes.
        gathered = weights.gathered(lm)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            weights.save(lm, folder, gathered=gathered)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        weights.load_into(self.objective.lm, Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.fsdp:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # Whole, as a single process saves it, because a run may resume on another number of processes.
        state = weights.whole_state(self.optimizer.state_dict())
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.fsdp or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, weights_only=True, mmap=True)
        self.optimizer.load_state_dict(weights.share_state(state, self.optimizer))
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)
