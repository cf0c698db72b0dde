"""`colar.train`: from a model and a file of problems to a model that thinks at any speed.

    OUTPUT/data/       the rows, split by a hash of the question
    OUTPUT/recipe.yaml the recipe that was made for this model and these rows (`auto_recipe.py`)
    OUTPUT/cot, ...    a folder for each stage
    OUTPUT/results/    every speed on questions held out (`auto_speeds.py`)
    OUTPUT/best/       the model

Each part is made once: the same call resumes where it was stopped.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colar import files, processes, progress, yaml_settings
from colar.checks import check_same_run
from colar.data import sources, user_rows
from colar.data.held_out import Divided, divide
from colar.data.judge import Judge, judge_name
from colar.methods import registry
from colar.model import checkpoint
from colar.ops import devices
from colar.recipe import auto_recipe, auto_speeds, parsing
from colar.recipe.auto_speeds import Outcome
from colar.recipe.facts import Facts, RowReader, facts_of, without_spaces
from colar.recipe.run import run_stages
from colar.recipe.schema import Stage
from colar.training.config import TrainingConfig
from colar.training.run_folder import AutoFolder, RunFolder, input_digest


@dataclass(frozen=True)
class AutoCall:
    """The arguments of `train` that identify its run: once a stage has saved weights, others are an error, but for a
    `grpo` that is added."""

    model: str
    data: Any
    output: Path
    method: str = "sequential"
    grpo: bool = False
    test: Any = None
    columns: Mapping[str, str] | None = None
    template: str = "auto"
    judge: str | Judge | None = None

    @property
    def judge_name(self) -> str | None:
        """`module:function` of the judge. ValueError for a function that has no such name."""
        return judge_name(self.judge)

    def to_json(self) -> dict[str, Any]:
        """The values of asked.json: data by digest, so that changed rows are another call."""
        values = {
            "model": self.model,
            "data": _identity(self.data),
            "test": _identity(self.test),
            "method": self.method,
            "grpo": self.grpo,
            "columns": dict(self.columns or {}),
            "template": self.template,
        }
        return values | ({"judge": self.judge_name} if self.judge_name else {})


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
        data: A file, a folder (its `train` file, and those of `validation` and `test` where it has them), a Hub data
            set `owner/name[/config][:split]` (default: `train`), a list of dicts, or a `datasets.Dataset`.
        output: Folder of the run, which loads as a checkpoint afterwards.
        method: `sequential` (ours) or `colar` (the paper's Gaussian head).
        grpo: Also learn by reinforcement, for answers that can be judged. It may be added to a run that has ended.
        test: Rows for the table at the end; by default the folder's own, or a part of `data` that is held out.
        columns: `{"question": "problem", ...}` where columns cannot be recognised.
        template: `chat`, `plain`, or `auto`, which takes `chat` where the tokenizer has a chat template.
        judge: A function (question, gold, answer) -> bool, or its `module:function`, that judges answers in validation,
            in the table and as reward; by default they are judged by their kind.
        overrides: `["--training.num_train_epochs", "2"]`, as on the command line.
        resume: False begins all stages anew.

    Raises:
        ValueError: If the rows, the model or a value are wrong, before anything is trained.
    """
    rows, test_rows = _in_memory(data), _in_memory(test)
    folder = files.require_writable(output)
    call = AutoCall(model, rows, folder, method, grpo, test_rows, columns, template, judge)
    with prepared(call, overrides) as stages:
        run_stages(stages, resume)
        return finish(call.output, stages)


@contextmanager
def prepared(
    call: AutoCall, overrides: Sequence[str] = (), only: Sequence[str] | None = None
) -> Iterator[list[Stage]]:
    """The stages of `prepare_run`. Inside the block no other process may prepare, train or measure in the folder.

    ValueError where the run would replace files of something else.
    """
    # Before rows are read, so that a misspelt key is reported within a second.
    keys = parsing.keys_of_overrides(overrides).get("training", {})
    # Processes join before there is a recipe, so their timeout is read from the overrides.
    timeout = {name: keys[name] for name in keys if name == "ddp_timeout"}
    processes.join(yaml_settings.built(TrainingConfig, timeout, "training.").ddp_timeout)
    # Before the lock, which marks the folder as one of colar's.
    processes.from_main(lambda: _check_replaceable(call, AutoFolder(call.output)))
    with processes.locked(call.output):
        yield prepare_run(call, overrides, only)


def prepare_run(
    call: AutoCall, overrides: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[Stage]:
    """Read and split the rows, make the recipe, and return its stages, or those in `only`.

    An existing recipe of the same call is used as it is, because a user may have changed it.
    """
    processes.from_main(lambda: _make_recipe(call, overrides, only))
    recipe = AutoFolder(call.output).recipe
    progress.say(f"recipe: {recipe}")
    stages = parsing.load_stages(recipe, overrides, only)
    # The recipe has the paths of its stages and rows, so a copy of the folder would train in the original.
    made_in = Path(stages[0].recipe.output).parent
    if made_in.resolve() != call.output.resolve():
        raise ValueError(f"{recipe} is of the run in {made_in}: give --output {made_in}, or a new folder")
    first, last = (registry.METHODS[stage.recipe.method["name"]] for stage in (stages[0], stages[-1]))
    # A user may have changed the recipe.
    if not only and not (first.name == "cot" and "compression_factor" in registry.param_names(last)):
        raise ValueError(
            f"{recipe} was changed: a run of auto begins with cot and ends with a method that has a "
            f"compression_factor; `colar train {recipe}` trains its stages"
        )
    return stages


def _make_recipe(call: AutoCall, overrides: Sequence[str], only: Sequence[str] | None) -> None:
    """Write rows, recipe and call into the run's folder, unless they are there."""
    folder, values = AutoFolder(call.output), call.to_json()
    begun = any(folder.path.glob("*/best")) or any(folder.path.glob("*/checkpoints/*"))
    before = files.read_json(folder.call) if folder.call.exists() else {}
    machine = {"processes": processes.launched(), "device": devices.best()}
    overridden = before.pop("overrides", [])
    made_for = {key: before.pop(key, value) for key, value in machine.items()}
    if folder.recipe.exists() and call.grpo and before == {**values, "grpo": False}:
        _add_grpo(call, folder, overrides, only)
        overridden += overrides
        files.write_json(folder.call, values | made_for | {"overrides": overridden})
        before = values
    if begun:
        check_same_run(folder.path, before, values, "give this run its own --output")
    if before == values and folder.recipe.exists():
        _say_kept(folder, overridden, overrides)
        if made_for != machine:
            then, now = ("{processes} process(es) on {device}".format(**each) for each in (made_for, machine))
            text = f"{folder.recipe} was made for {then}, and here it is {now}"
            if not begun:
                raise ValueError(f"{text}: delete it, so that it is made anew")
            progress.say(f"warning: {text}: its batch sizes, dtype and attention may not fit")
        return
    # Files of an earlier call that trained nothing are made anew, because that call may have been a mistake.
    given = parsing.keys_of_overrides(overrides)
    reader = RowReader.of(call.model, call.template, given.get("template", {}).get("separator"))
    split = _split(call)
    split = replace(split, train=reader.fitting(split.train, "training rows"))
    facts = facts_of(reader, split.train)
    if call.method == "sequential" and facts.equations and facts.digits and not facts.signs:
        facts, split = _without_spaces(reader, facts, split)
    trains_all = given.get("model", {}).get("lora", {}) is None
    if facts.lora and trains_all and "learning_rate" not in given.get("training", {}):
        raise ValueError(
            "--model.lora null trains all weights, and auto's learning rate is one of an adapter: give "
            "--training.learning_rate as well, 1e-5 for example"
        )
    tree, why = auto_recipe.make_recipe(facts, str(folder.path), call.method, call.grpo, call.judge_name)
    # Written into the file, so that the same command without overrides, and the recipe by itself, run with them too.
    parsing.override_stages(tree["stages"], overrides, only)
    # The folder is a run's from here on, also if this one is killed before it has written all.
    files.write_json(folder.call, {})
    try:
        auto_recipe.write_recipe(folder.recipe, tree, why)
        first, *_ = parsing.load_stages(folder.recipe, overrides, only)
        # By the limits after all overrides: a question that does not fit is found now, and not after training.
        limits = first.recipe.validation.limits
        generated = limits.max_latents + limits.max_completion_length
        rows = {
            "train": split.train,
            "validation": reader.fitting(split.validation, "validation questions", generated),
            "test": reader.fitting(split.test, "test questions", generated),
        }
    except ValueError:
        folder.recipe.unlink()
        raise
    for name, examples in rows.items():
        files.write_jsonl(folder.rows(name), [row.as_row() for row in examples])
    files.write_json(folder.call, values | machine | {"overrides": list(overrides)})
    for reason in why:
        progress.say(reason)


def _say_kept(folder: AutoFolder, earlier: Sequence[str], now: Sequence[str]) -> None:
    """Log the overrides of earlier commands that the recipe keeps."""
    given_now = dict(parsing.parse_overrides(now))
    kept = [f"--{key} {text}" for key, text in parsing.parse_overrides(earlier) if key not in given_now]
    if kept:
        progress.say(f"{folder.recipe} keeps {' '.join(kept)}, as an earlier command had it")


def _add_grpo(
    call: AutoCall, folder: AutoFolder, overrides: Sequence[str], only: Sequence[str] | None
) -> None:
    """Add the stage of reinforcement to the recipe of a run that was begun without it, unless a user has added one.

    The recipe stays as it was if the stage, with these overrides, is invalid.
    """
    there = parsing.load_stages(folder.recipe)
    if "grpo" in [stage.name for stage in there]:
        return
    last = there[-1]
    separator = parsing.keys_of_overrides(overrides).get("template", {}).get("separator")
    reader = RowReader.of(call.model, call.template, separator or last.recipe.template.separator)
    facts = facts_of(reader, sources.load_examples(str(folder.data), "train"))
    made, _ = auto_recipe.make_recipe(facts, str(folder.path), call.method, True, call.judge_name)
    stage = made["stages"]["grpo"]
    stage["grpo"] |= auto_speeds.limits_of(last.recipe.validation.limits)
    text = files.read_text(folder.recipe)
    stages = yaml_settings.read_yaml(folder.recipe, text).get("stages", {})
    # An earlier command may have given the stage before it another adapter.
    model = {**(stages.get(last.name, {}).get("model") or {})}
    model.pop("init_from", None)
    if model:
        stage["model"] = model
    stages["grpo"] = stage
    parsing.override_stages(stages, overrides)
    try:
        auto_recipe.append_stage(folder.recipe, "grpo", stages["grpo"])
        parsing.load_stages(folder.recipe, overrides, only)
    except ValueError:
        files.write_text(folder.recipe, text)
        raise


def _without_spaces(reader: RowReader, facts: Facts, split: Divided) -> tuple[Facts, Divided]:
    """Leave out the spaces in equations, and log it, if signs are tokens of their own then."""
    train, validation, test = (
        list(map(without_spaces, rows)) for rows in (split.train, split.validation, split.test)
    )
    facts_of_dense = facts_of(reader, train)
    if not facts_of_dense.signs:
        return facts, split
    progress.say("spaces in equations are left out (5+12=17), so that signs are tokens of their own")
    return facts_of_dense, replace(split, train=train, validation=validation, test=test)


def _check_replaceable(call: AutoCall, folder: AutoFolder) -> None:
    """ValueError where the run would replace rows, a recipe or a checkpoint that are not its own."""
    for option, given in (("--data", call.data), ("--test", call.test)):
        is_there = isinstance(given, str | Path) and Path(given).exists()
        if is_there and Path(given).resolve().is_relative_to(folder.data.resolve()):
            raise ValueError(
                f"{option} {given} lies in {folder.data}, where the run writes its own rows: give another --output"
            )
    if folder.call.exists():
        return
    checkpoint.check_replaceable(folder.best)
    for path in (folder.data, folder.recipe, folder.results):
        if path.exists():
            raise ValueError(
                f"{path} is not of a run of auto, and would be replaced: give another --output, or delete it"
            )


def _split(call: AutoCall) -> Divided:
    """Read and split the rows, and log how they were read."""
    rows = user_rows.read(call.data, call.columns, judge=call.judge_name)
    for line in rows.summary():
        progress.say(line)
    rows.require_chains()
    held_out = user_rows.read_held_out(call.data, rows, call.columns, call.test)
    for name, given in held_out.items():
        given.left_out.say(f"{given.name}/{name}", len(given.examples))
    split = divide(rows.examples, **{name: given.examples for name, given in held_out.items()})
    if split.also_held_out:
        progress.say(f"left out {split.also_held_out:,}: validation or test rows ask the same question")
    if split.without_chain:
        progress.say(
            f"left out {split.without_chain:,} training rows without reasoning: they would teach it not to think"
        )
    progress.say(
        f"{len(split.train):,} rows to train on, {len(split.validation):,} to validate, {len(split.test):,} held out"
    )
    return split


def _in_memory(data: Any) -> Any:
    """An iterator's rows as a list, because they are read twice, first for a digest."""
    return list(data) if isinstance(data, Iterator) else data


def _identity(data: Any) -> str | None:
    """Digest of the file, the folder's files or the rows, independent of the path; of a Hub data set its id."""
    if data is None:
        return None
    if isinstance(data, str | Path):
        return input_digest(data) or str(data)
    return files.digest(json.dumps(row, sort_keys=True, default=str) for row in data)


def finish(output: Path, stages: Sequence[Stage]) -> Outcome:
    """Measure every speed of the last stage and the CoT of the first one, and publish the model.

    All are measured with the limits of the first stage.
    """
    first, last = stages[0].recipe, stages[-1].recipe
    if last.validation.limits != first.validation.limits:
        progress.say(
            f"validation.limits of {stages[0].name} hold for all speeds, not those of {stages[-1].name}"
        )
    folder = AutoFolder(output)
    held_out = sources.load_examples(str(folder.data), "test", judge=first.data.judge)
    outcome = auto_speeds.measure_and_publish(
        folder,
        RunFolder(first.output).best,
        RunFolder(last.output).best,
        held_out,
        first.validation.limits,
        first.model.dtype if first.model.lora else "float32",
    )
    processes.from_main(lambda: files.write_text(folder.results / "speeds.md", f"{outcome}\n"))
    progress.say(f"wrote {folder.best} (the model), {folder.results} (its speeds)")
    return outcome
