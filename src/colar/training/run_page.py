"""The page of a run, inside.html in its folder: a few validation questions, looked at as `colar inspect` does.

    before the first step   GRPO: the chains that the weights start with     chains_before.json
    the end                 the chains of the published weights              inside.html, inside.json

What takes long is left out: controls, changed thoughts. Nothing here changes the course of a run: no random number of
its own is drawn, and a failure is a line on stderr. Of several processes the main one does it all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from colar import files, processes, progress
from colar.data.example import Example
from colar.engine.request import Decoding
from colar.look.chains import Chain
from colar.look.inspect import Findings, Inspection, inspect_system, key_of
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.training.run_folder import RunFolder

LOOK = 8
"""Questions whose layers and attention are looked at."""


@dataclass(frozen=True)
class RunPage:
    """What the page is made of: questions, the per-request values that validation asks with, and where it lies."""

    folder: RunFolder
    examples: Sequence[Example]
    params: Sequence[Any]
    decoding: Decoding

    def keep_before(self, lm: LatentLM, method: Method) -> None:
        """Write what the model thinks now, for the page to set beside what it thinks at the end."""
        with progress.harmless("the chains before the run"), as_asked(lm):
            kept = []
            for system in self._systems(lm, method, "before"):
                chains = [asdict(chain) for chain in system.chains]
                kept.append({"numbers": system.numbers, "chains": chains})
            files.write_text(self.folder.before, json.dumps(kept, ensure_ascii=False, allow_nan=False))

    def write(self, lm: LatentLM, method: Method) -> bool:
        """Write the page and its numbers; False where that failed, which a line on stderr has reported."""
        with progress.harmless("the page"), as_asked(lm):
            run = self.folder.path.resolve().name
            name = "after" if self.folder.before.exists() else run
            systems = [*self._kept(), *self._systems(lm, method, name)]
            asked = {"limit": len(self.examples), "look": LOOK}
            inspection = Inspection(list(self.examples), systems, {"title": run, "asked": asked})
            files.write_json(self.folder.numbers, inspection.to_json())
            inspection.save(self.folder.page)
            return True
        return False

    def _systems(self, lm: LatentLM, method: Method, name: str) -> list[Findings]:
        systems = []
        for params in self.params:
            key = key_of(name, params)
            systems.append(
                inspect_system(
                    key,
                    lm,
                    method,
                    self.examples,
                    params,
                    self.decoding,
                    look=LOOK,
                    controls=False,
                    causal=False,
                )
            )
        return systems

    def _kept(self) -> list[Findings]:
        """What `keep_before` wrote; [] where it was not called."""
        if not self.folder.before.exists():
            return []
        systems = []
        for kept in files.read_json(self.folder.before):
            systems.append(Findings(kept["numbers"], [Chain(**chain) for chain in kept["chains"]]))
        return systems


class ChainsBefore(TrainerCallback):  # type: ignore[misc]
    """Collects the chains before the first step, for the run's page."""

    def __init__(self, page: RunPage, lm: LatentLM, method: Method) -> None:
        self.page = page
        self.lm = lm
        self.method = method

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A resumed run's weights are no longer those that it started with.
        if state.global_step == 0 and processes.is_main():
            self.page.keep_before(self.lm, self.method)


@contextlib.contextmanager
def as_asked(lm: LatentLM) -> Iterator[None]:
    """The model as validation has it: eval mode, no gradient, adapter folded in; and as it was, behind the block."""
    was_training = lm.training
    devices = [lm.device] if lm.device.type == "cuda" else []
    lm.eval()
    try:
        # Compiled layers would be compiled anew for every shape.
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices), torch.no_grad(), eager, lm.merged():
            yield
    finally:
        lm.train(was_training)
