"""The table of generated sources: what makes the rows of each, and which published set they must keep clear of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from colar.checks import check_known
from colar.data import arithmetic, prontoqa, prosqa
from colar.data.example import Example


@dataclass(frozen=True)
class Generator:
    """One entry: `generate(config, split, n, seed)` makes rows, and `config` is the dataclass of its options.

    `published`: the source of the catalogue that it imitates. Its validation and test questions are never made;
    `generate` takes their hashes as `avoid`.
    """

    config: type[Any]
    generate: Callable[..., list[Example]]
    published: str | None = None


GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "arithmetic": Generator(arithmetic.ArithmeticConfig, arithmetic.generate),
        prosqa.SOURCE: Generator(prosqa.ProsqaConfig, prosqa.generate, published="prosqa"),
        prontoqa.SOURCE: Generator(prontoqa.ProntoqaConfig, prontoqa.generate, published="prontoqa"),
    }
)


def generate(
    source: str, split: str, n: int, seed: int, options: Mapping[str, Any], avoid: frozenset[str]
) -> list[Example]:
    """Make the first `n` rows of a generated source's split. `avoid`: hashes of questions that are never made.

    Raises ValueError for an unknown option or a wrong value of one, and where the options hold too few problems.
    """
    generator = GENERATORS[source]
    # Checked here, for a dataclass answers an unknown name with a TypeError.
    check_known(f"{source} option", options, [field.name for field in fields(generator.config)])
    config = generator.config(**options)
    # What imitates no published set has nothing to avoid.
    if generator.published is None:
        return generator.generate(config, split, n, seed)
    return generator.generate(config, split, n, seed, avoid=avoid)
