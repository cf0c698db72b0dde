"""The page of a run, inside.html in its folder: what the published weights think of a few validation questions.

It is made as `colar inspect` makes it, without what takes long: controls and changed thoughts. Of several processes the
main one makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from colar import files, progress
from colar.data.example import Example
from colar.engine.request import DECODINGS
from colar.look.inspect import Inspection, inspect_system, key_of
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.recipe.schema import ValidationConfig
from colar.training.run_folder import RunFolder


def write(
    settings: ValidationConfig, folder: RunFolder, lm: LatentLM, method: Method, held_out: Sequence[Example]
) -> None:
    """Write the page and its numbers for the per-request values of validation; a failure is reported and harmless."""
    examples = list(held_out[: settings.page_size])
    if not examples:
        return
    decoding = replace(
        DECODINGS[settings.decoding],
        max_latents=settings.limits.max_latents,
        max_completion_length=settings.limits.max_completion_length,
    )
    run = folder.path.resolve().name
    eager = torch.compiler.set_stance("force_eager")
    with progress.warn_on_error("the page"), torch.no_grad(), eager, lm.merged():
        systems = []
        for values in settings.params:
            params = registry.make_params(method, values)
            systems.append(
                inspect_system(
                    key_of(run, params),
                    lm,
                    method,
                    examples,
                    params,
                    decoding,
                    controls=False,
                    causal=False,
                )
            )
        asked = {"limit": len(examples)}
        inspection = Inspection(examples, systems, {"title": run, "asked": asked})
        files.write_json(folder.numbers, inspection.to_json())
        inspection.save(folder.page)
        progress.say(f"page of the best checkpoint: {folder.page}")
