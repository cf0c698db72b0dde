"""Watchers of a GRPO run: validation that stops getting better, and ways in which learning dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from colar import progress

LOGS = 5
"""Successive logs that must all show a collapse before there is a warning."""


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops after `patience` validations without a new best.

    All that it knows it reads off the history: a resumed run stops where an uninterrupted one does.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.out_of_patience(state):
            progress.say(
                f"no better validation in {self.patience}: the run stops at step {state.global_step}"
            )
            # The checkpoint holds the history, by which a resumed run finds that it has ended.
            control.should_training_stop = True
            control.should_save = True

    def out_of_patience(self, state: TrainerState) -> bool:
        """Whether the last `patience` validations were no better than one before them."""
        # The validation before the first step counts too.
        found = [row["eval_accuracy"] for row in state.log_history if "eval_accuracy" in row]
        if self.patience is None or len(found) <= self.patience:
            return False
        latest = found[-self.patience :]
        earlier = found[: -self.patience]
        return bool(max(latest) <= max(earlier))


class Collapse(TrainerCallback):  # type: ignore[misc]
    """Warns, once each, when nothing can be learnt any more or the thinking has gone to an end of its range."""

    def __init__(self) -> None:
        self.warned: set[str] = set()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A collapse stays: without this set it would be said at every log.
        for text in collapsed(state.log_history):
            if text not in self.warned:
                self.warned.add(text)
                progress.say(f"step {state.global_step}: warning: {text}")


def collapsed(history: Sequence[dict[str, Any]]) -> list[str]:
    """The collapses that the last `LOGS` logs of generations show, each as a sentence; empty where all is well."""
    rows = [row for row in history if "frac_reward_zero_std" in row][-LOGS:]
    if len(rows) < LOGS:
        return []
    found = []
    if all(row["frac_reward_zero_std"] == 1 for row in rows):
        found.append(
            f"no group has had spread in its rewards for {LOGS} logs, so nothing is learnt: questions are all too easy "
            "or too hard, or sampling has no noise left (latents/sigma, entropy)"
        )
    if all(row["latents/clipped_ratio"] > 0.95 for row in rows):
        found.append(
            f"thinking has met max_latents in nearly all outputs for {LOGS} logs: the length has run away; "
            "a lower learning_rate, a length_penalty or a larger max_latents may help"
        )
    if all(row["latents/max_length"] == 0 for row in rows):
        found.append(f"no output has had a latent for {LOGS} logs: the thinking is gone")
    return found
