"""The rows of a recipe: those to train on, and those that select the checkpoint.

No row is used in both. Two rows may ask the same question, because published sets overlap a little: this is logged.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

from colar import progress
from colar.data import sources
from colar.data.catalogue import SOURCES
from colar.data.example import Example
from colar.data.held_out import question_key
from colar.recipe.schema import DataConfig, SourceRows

TRAIN, VALIDATION = "train", "validation"
"""The split to learn from, and the one that selects the checkpoint."""


def load_example_sets(data: DataConfig) -> tuple[list[Example], list[Example]]:
    """Training rows, and validation rows ([] where the recipe has none).

    ValueError if validation would be on training rows, if rows occur twice, or if none are left. Logs how many
    validation questions are also trained on, if any.
    """
    load = partial(
        sources.load_examples,
        data_dir=data.data_dir or None,
        skip_malformed=data.skip_malformed,
        judge=data.judge,
    )
    held_out = _validation_rows(data, load)
    limit = None if data.train_size is None else data.train_skip + data.train_size
    rows = load(data.source, TRAIN, limit=limit, seed=data.seed, options=data.options)
    rows_of = {"data": _short(data, data.source, _skipped(data, rows))}
    for place, more in enumerate(data.mixed_in):
        seed = data.seed if more.seed is None else more.seed
        rows = load(more.source, TRAIN, limit=more.train_size, seed=seed, options=more.options)
        rows_of[f"data.mixed_in[{place}]"] = _short(data, more.source, rows)
    train_rows = list(itertools.chain.from_iterable(rows_of.values()))
    # A row's random draws are a function of its id: two rows of one id would see the same draws.
    times = Counter(row.id for row in train_rows)
    repeated = [id for id, n in times.items() if n > 1]
    if repeated:
        where = " and ".join(
            key for key, rows in rows_of.items() if any(row.id == repeated[0] for row in rows)
        )
        raise ValueError(
            f"{where}: some rows occur twice, {repeated[0]!r} for one: name a source once, and give rows of files of "
            "one name ids of their own"
        )
    trained = {(row.id, row.conversation) for row in train_rows}
    shared = [row.id for row in held_out if (row.id, row.conversation) in trained]
    if shared:
        raise ValueError(
            f"data.validation_source: {len(shared)} of its rows are trained on, {shared[0]!r} for one: name other "
            "rows, or set data.validation_size 0"
        )
    # The same question under another id: ids name their split or file, so its copies have different ids.
    if not held_out:
        return train_rows, held_out
    questions = set(map(question_key, train_rows))
    both = [row.id for row in held_out if question_key(row) in questions]
    if both:
        progress.say(
            f"validation: {len(both)} of {len(held_out)} questions are also trained on, {both[0]!r} for one; accuracy "
            "on these says little about new questions"
        )
    return train_rows, held_out


def _skipped(data: DataConfig, rows: list[Example]) -> list[Example]:
    """The main source's rows from train_skip on."""
    rows = rows[data.train_skip :]
    if not rows:
        raise ValueError(
            f"data.train_skip is {data.train_skip}, but {data.source} has no more rows than that"
        )
    return rows


def _short(data: DataConfig, source: str, rows: list[Example]) -> list[Example]:
    """The rows of a source, without those that have too many steps."""
    longest = data.max_reasoning_steps
    if longest is None:
        return rows
    short_rows = [row for row in rows if len(row.steps) <= longest]
    if not short_rows:
        raise ValueError(f"data.max_reasoning_steps is {longest}, and every row of {source} has more steps")
    progress.say(
        f"{source}: {len(short_rows):,} of {len(rows):,} rows have at most {longest} steps of reasoning"
    )
    return short_rows


def _validation_rows(data: DataConfig, load: Callable[..., list[Example]]) -> list[Example]:
    """The rows that select the checkpoint."""
    if data.validation_size == 0:
        return []
    source = data.validation_source or data.source
    if source in SOURCES and VALIDATION not in sources.splits_of(source):
        raise ValueError(
            f"{source} has no {VALIDATION} split: name another source in data.validation_source, or set "
            "data.validation_size 0"
        )
    # Compared by place, because ids of rows name their split, and a path may be written in several ways.
    place = sources.place_of(source, VALIDATION)
    sections: list[DataConfig | SourceRows] = [data, *data.mixed_in]
    for trained in sections:
        if place is not None and place == sources.place_of(trained.source, TRAIN):
            raise ValueError(
                f"{trained.source} would validate on its own training rows, {place}: name others in "
                "data.validation_source, or set data.validation_size 0"
            )
    # The main source's options do not apply to another one.
    options = data.options if source == data.source else {}
    return load(source, VALIDATION, limit=data.validation_size, seed=data.seed, options=options)
