"""The rows of a recipe: those to train on, of one source or of several, and those that validate.

No row is both. A question may be, in two rows of their own: published sets overlap a little, so that is only said.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

from colar import progress
from colar.data import sources
from colar.data.example import Example, collapsed
from colar.data.judge import answers
from colar.data.renumber import new_rows
from colar.recipe.schema import DataConfig, SourceRows

VALIDATION = "validation"
"""The split that selects the checkpoint."""


def load_example_sets(data: DataConfig) -> tuple[list[Example], list[Example]]:
    """Training rows, and validation rows ([] where the recipe has none).

    ValueError where validation would be on training rows, where rows occur twice, or where none are left. Says on
    stderr how many validation questions are also trained on, if any.
    """
    held_out = _validation_rows(data)
    limit = None if data.train_size is None else data.train_skip + data.train_size
    main = SourceRows(data.source, data.train_split, limit, data.seed, data.options, data.renumber)
    sections = {"data": main} | {f"data.mixed_in[{i}]": source for i, source in enumerate(data.mixed_in)}
    rows_of: dict[str, list[Example]] = {}
    for key, source in sections.items():
        seed = data.seed if source.seed is None else source.seed
        rows = _load_source(data, source.source, source.train_split, source.train_size, seed, source.options)
        rows = _selected(data, rows) if source is main else rows
        rows_of[key] = rows + _renumbered(data, key, source, seed, rows, held_out)
    train_rows = list(itertools.chain.from_iterable(rows_of.values()))
    # A row's random draws are a function of its id: two rows of one id would see the same draws.
    repeated = [id for id, n in Counter(example.id for example in train_rows).items() if n > 1]
    if repeated:
        where = " and ".join(
            key for key, rows in rows_of.items() if any(row.id == repeated[0] for row in rows)
        )
        raise ValueError(
            f"{where}: some rows occur twice, {repeated[0]!r} for one: name a source once, and give rows of files of "
            "one name ids of their own"
        )
    trained = {(example.id, example.question) for example in train_rows}
    shared = [example.id for example in held_out if (example.id, example.question) in trained]
    if shared:
        raise ValueError(
            f"data.validation_source: {len(shared)} of its rows are trained on, {shared[0]!r} for one: name other "
            "rows, or set data.validation_size 0"
        )
    _say_asked_twice(train_rows, held_out)
    if data.judge is None:
        return train_rows, held_out
    return answers.judged_by(train_rows, data.judge), answers.judged_by(held_out, data.judge)


def _say_asked_twice(train_rows: list[Example], held_out: list[Example]) -> None:
    """Say how many validation questions are also trained on, under any id; log nothing if there are none.

    Ids name their split or file, so two copies of a question have two. A generated source's splits share no question.
    """

    def conversation(example: Example) -> tuple[str, ...]:
        return (*(collapsed(text) for _, text in example.context), collapsed(example.question))

    trained = {conversation(example) for example in train_rows}
    both = [example.id for example in held_out if conversation(example) in trained]
    if both:
        progress.say(
            f"validation: {len(both)} of {len(held_out)} questions are also trained on, {both[0]!r} for one; accuracy "
            "on these says little about new questions"
        )


def _selected(data: DataConfig, rows: list[Example]) -> list[Example]:
    """The main source's rows from train_skip on, without those of too many steps."""
    if len(rows) <= data.train_skip:
        raise ValueError(
            f"data.train_skip is {data.train_skip}, but {data.source} has no more rows than that"
        )
    rows = rows[data.train_skip :]
    longest = data.max_reasoning_steps
    if longest is None:
        return rows
    short_rows = [row for row in rows if len(row.steps) <= longest]
    if not short_rows:
        raise ValueError(
            f"data.max_reasoning_steps is {longest}, and every row of {data.source} has more steps"
        )
    progress.say(
        f"{data.source}: {len(short_rows):,} of {len(rows):,} rows have at most {longest} steps of reasoning"
    )
    return short_rows


def _renumbered(
    data: DataConfig, key: str, source: SourceRows, seed: int, rows: list[Example], held_out: list[Example]
) -> list[Example]:
    """New rows made of `rows` with other numbers; none of them asks a question of validation or of a test set.

    `key` is the section that asks for them, for errors.
    """
    if source.renumber == 0:
        return []
    questions = sources.held_out_questions(
        source.source, source.train_split, data_dir=data.data_dir, skip_malformed=data.skip_malformed
    )
    # Validation may be on another source, whose questions are not among those of `source`.
    questions.update(example.question for example in held_out)
    found = new_rows.renumbered(rows, source.renumber, seed, questions)
    found.say(len(rows))
    if found.alone.total() == len(rows):
        raise ValueError(
            f"{key}.renumber: {source.source} has no row whose chain is equations that can be run again"
        )
    return found.examples


def _validation_rows(data: DataConfig) -> list[Example]:
    """The rows that select the checkpoint."""
    if data.validation_size == 0:
        return []
    source = data.validation_source or data.source
    same = source == data.source
    if same and data.train_split == VALIDATION:
        raise ValueError(
            "data.train_split validation is the one to validate on: name another, another data.validation_source, or "
            "set data.validation_size 0"
        )
    # The same file may be written in several ways.
    file = sources.user_file(source, VALIDATION)
    trained: list[DataConfig | SourceRows] = [data, *data.mixed_in]
    for section in trained:
        if file is not None and file == sources.user_file(section.source, section.train_split):
            raise ValueError(
                f"{section.source} is one file, {file}, which would validate on its own training rows: name another in "
                "data.validation_source, or set data.validation_size 0"
            )
    # The main source's options mean nothing to another one.
    options = data.options if same else {}
    return _load_source(data, source, VALIDATION, data.validation_size, data.seed, options)


def _load_source(
    data: DataConfig, source: str, split: str, limit: int | None, seed: int, options: dict[str, Any]
) -> list[Example]:
    """The first rows of a source, with what all sources of a recipe share."""
    return sources.load_examples(
        source,
        split,
        data_dir=Path(data.data_dir) if data.data_dir else None,
        limit=limit,
        seed=seed,
        skip_malformed=data.skip_malformed,
        options=options,
    )
