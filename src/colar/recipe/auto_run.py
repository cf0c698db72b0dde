"""`colar.train`: from a model and a file of problems to a model that thinks at any speed.

    OUTPUT/data/       the rows, split by a hash of the question
    OUTPUT/recipe.yaml the recipe that was made for this model and these rows (`auto_recipe.py`)
    OUTPUT/cot, ...    a folder for each stage
    OUTPUT/results/    every speed on questions held out (`auto_speeds.py`)
    OUTPUT/best/       the model

Each part is made once: the same call goes on where it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files, processes, progress
from colar.checks import check_same_run
from colar.data import own, sources
from colar.data.example import leave_out
from colar.data.judge import custom
from colar.data.judge.custom import Judge
from colar.recipe import auto_recipe, auto_speeds, parsing
from colar.recipe.auto_speeds import Outcome
from colar.recipe.run import run_stages
from colar.recipe.schema import Stage
from colar.training.run_folder import RunFolder, input_digest

RECIPE = "recipe.yaml"
ASKED = "asked.json"


def train(
    model: str,
    data: Any,
    output: str | Path,
    *,
    method: str = "sequential",
    grpo: bool = False,
    test: Any = None,
    columns: Mapping[str, str] | None = None,
    template: str = "auto",
    judge: str | Judge | None = None,
    overrides: Sequence[str] = (),
    resume: bool = True,
) -> Outcome:
    """Train a model to think in latents on one's own problems, and measure it at every speed.

    Stages of CoT-SFT, SFT by the method and, with `grpo`, reinforcement run one after another, each in a folder below
    `output`. The same call resumes a run that was stopped.

    Args:
        model: A folder, a Hub id, or a built-in backbone (`tiny`, `smollm2-135m`).
        data: A file, a folder of SPLIT files, a Hub data set `owner/name`, a list of dicts, or a `datasets.Dataset`.
        output: Folder of the run; afterwards a checkpoint by its name.
        method: `sequential` (ours) or `colar` (the paper's Gaussian head).
        grpo: Also learn by reinforcement, for answers that can be judged.
        test: Rows for the table at the end; by default a part of `data` is held out.
        columns: `{"question": "problem", ...}` where columns cannot be recognised.
        template: `chat`, `plain`, or `auto`, which takes `chat` where the tokenizer has a chat template.
        judge: A function (question, gold, answer) -> bool, or its `module:function`, that judges answers in validation,
            in the table and as reward; by default they are judged by their kind.
        overrides: `["--training.num_train_epochs", "2"]`, as on the command line.
        resume: False begins all stages anew.

    Raises:
        ValueError: For what is wrong with the rows, the model or a value, before anything is trained.
    """
    output = files.require_writable(output)
    stages = prepare_run(
        model, data, output, method=method, grpo=grpo, test=test, columns=columns, template=template,
        judge=judge, overrides=overrides,
    )  # fmt: skip
    run_stages(stages, resume)
    return finish(output, stages)


def prepare_run(
    model: str,
    data: Any,
    output: Path,
    *,
    method: str = "sequential",
    grpo: bool = False,
    test: Any = None,
    columns: Mapping[str, str] | None = None,
    template: str = "auto",
    judge: str | Judge | None = None,
    overrides: Sequence[str] = (),
    only: Sequence[str] | None = None,
) -> list[Stage]:
    """Read and split the rows, make the recipe, and return its stages, or those in `only`.

    A recipe that is there for the same call is taken as it is: a user may have changed it.
    """
    # Before rows are read: a misspelt key costs a second.
    parsing.check_overrides(overrides)
    processes.join()
    judged_by = custom.name_of(judge)
    asked = {
        "model": model,
        "data": _named(data),
        "test": _named(test),
        "method": method,
        "grpo": grpo,
        "columns": dict(columns or {}),
        "template": template,
        **({"judge": judged_by} if judged_by else {}),
    }

    def make() -> None:
        begun = any(output.glob("*/best")) or any(output.glob("*/checkpoints/*"))
        known = files.read_json(output / ASKED) if (output / ASKED).exists() else None
        if begun:
            check_same_run(output, known or {}, asked, "give this run its own --output")
        if known == asked and (output / RECIPE).exists():
            return
        # What an earlier call left that trained nothing may have been a mistake: it is made anew.
        reader = auto_recipe.RowReader.of(model, template)
        split = _split(data, test, columns, judged_by)
        rows = {
            "train": leave_out(split.train, reader.too_long(split.train), "training rows", auto_recipe.LONGER)
        }
        found = auto_recipe.facts_of(reader, rows["train"])
        tree, why = auto_recipe.make_recipe(found, str(output), method, grpo, judged_by)
        limits = tree["validation"]["limits"]
        generated = limits["max_latents"] + limits["max_completion_length"]
        for name, held_out in (("validation", split.validation), ("test", split.test)):
            too_long = reader.too_long(held_out, generated)
            rows[name] = leave_out(held_out, too_long, f"{name} questions", auto_recipe.LONGER)
        # The plain command, and the recipe by itself, go on with what this command asked for.
        parsing.override_stages(tree["stages"], overrides, only)
        try:
            auto_recipe.write_recipe(output / RECIPE, tree, why)
            parsing.load_stages(output / RECIPE, overrides, only)
        except ValueError:
            (output / RECIPE).unlink()
            raise
        for name, examples in rows.items():
            files.write_jsonl(output / "data" / f"{name}.jsonl", [row.as_row() for row in examples])
        files.write_json(output / ASKED, asked)
        for reason in why:
            progress.say(reason)

    processes.from_main(make)
    progress.say(f"recipe: {output / RECIPE}")
    return parsing.load_stages(output / RECIPE, overrides, only)


def folder_of(recipe: str | Path) -> Path | None:
    """The run that a recipe was made for, where `prepare_run` has made it; None for any other recipe."""
    path = Path(recipe)
    return path.parent if path.name == RECIPE and (path.parent / ASKED).exists() else None


def _split(data: Any, test: Any, columns: Mapping[str, str] | None, judge: str | None) -> own.Divided:
    """Read and split the rows, and log how they were understood."""
    rows = own.read(data, columns, judge=judge)
    for line in rows.summary():
        progress.say(line)
    rows.require_chains()
    test_rows = None if test is None else own.read(test, columns, "test", judge).examples
    split = own.divide(rows.examples, test_rows)
    if split.also_in_test:
        progress.say(f"left out {split.also_in_test:,}: the test asks the same question")
    progress.say(
        f"{len(split.train):,} rows to train on, {len(split.validation):,} to validate, {len(split.test):,} held out"
    )
    return split


def _named(data: Any) -> str | None:
    """A path or id with a digest of what lies there; rows in memory by a digest of them."""
    if data is None:
        return None
    if isinstance(data, str | Path):
        return f"{data} {input_digest(data) or ''}".strip()
    return files.digest(json.dumps(row, sort_keys=True, default=str) for row in data)


def finish(output: Path, stages: Sequence[Stage]) -> Outcome:
    """Measure what the stages have learnt, and publish it."""
    first, last = stages[0].recipe, stages[-1].recipe
    held_out = custom.applied(sources.load(str(output / "data"), "test"), first.data.judge)
    made = auto_speeds.conclude(
        output,
        RunFolder(first.output).best,
        RunFolder(last.output).best,
        held_out,
        first.validation.limits,
        first.model.dtype if first.model.lora else "float32",
    )
    processes.from_main(lambda: files.write_text(output / "results" / "speeds.md", f"{made}\n"))
    progress.say(f"wrote {output / 'best'} (the model), {output / 'results'} (its speeds)")
    return made
