"""Evaluation with a model's thoughts replaced (`controls.py`): rows labelled control-zeroed, control-shuffled, ...

A control is made from all questions of a point of the grid, also from those that are answered already: a resumed
evaluation feeds the thoughts that an uninterrupted one would. Of several processes each makes all controls, and they
divide the answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from colar import progress
from colar.data.example import Example
from colar.evaluation import controls, output_folder
from colar.evaluation.evaluate import AnswerSettings, EvaluatedModel, GridPoint, evaluate, make_request
from colar.evaluation.records import RecordKey, record_key
from colar.evaluation.report_rows import CONTROL


def require_latent(models: Sequence[EvaluatedModel]) -> list[EvaluatedModel]:
    """The models that think in latents; logs which do not. ValueError where there is none."""
    latent = [model for model in models if model.method.thinks_in_latents]
    if not latent:
        names = ", ".join(dict.fromkeys(model.method.name for model in models))
        raise ValueError(
            f"--control replaces latents, but none of the methods ({names}) thinks in any; a chain of tokens can be "
            "cut short instead: --max_latents 6 --label control-cut"
        )
    if others := [model.name for model in models if model not in latent]:
        progress.say(f"without controls, as they think in no latents: {', '.join(others)}")
    return latent


def evaluate_controls(
    grid: Sequence[GridPoint],
    kinds: Sequence[str],
    datasets: Mapping[str, Sequence[Example]],
    records: Path,
    settings: AnswerSettings,
) -> int:
    """Answer the grid under each kind of control, where `records` has no answer yet. Returns how many were new."""
    done = {record_key(record) for record in output_folder.read_records(records)}
    order: list[RecordKey] = []
    n_new = 0
    for point in grid:
        examples = datasets[point.dataset]
        keys = {kind: [labelled(point, kind).record_key(example) for example in examples] for kind in kinds}
        order += itertools.chain(*keys.values())
        missing = [kind for kind in keys if not done.issuperset(keys[kind])]
        if not missing:
            continue
        # The model thinks once, for all the controls that are missing.
        model = point.model
        requests = [make_request(point, example, settings) for example in examples]
        methods = controls.build(model.lm, model.method, missing, requests, max_batch=settings.batch_size)
        for kind, control in zip(missing, methods, strict=True):
            controlled = labelled(point, kind)
            # The control answers as a method of the same name: its rows differ from the method's by their label.
            controlled = replace(controlled, model=replace(controlled.model, method=control))
            n_new += evaluate([controlled], datasets, records, settings)
    # An earlier call may have been killed with all answered, before they stood in order.
    output_folder.put_in_order(records, order)
    return n_new


def labelled(point: GridPoint, kind: str) -> GridPoint:
    """The point under the label that the rows of its control have."""
    labels = [point.model.label, f"{CONTROL}{kind}"]
    label = ", ".join(part for part in labels if part)
    return replace(point, model=replace(point.model, label=label))
