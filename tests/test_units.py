"""What c counts, and where groups start and end: groups by plain loops, the same in training and in thinking, exact draws."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import EXAMPLES, FAMILIES
from hypothesis import example, given
from hypothesis import strategies as st
from sequential import check_shares, encoded, latent, made
from test_any_factor import ids_of, most_of, naive_hidden, naive_logps, phase_of, sharpen, sizes_of
from torch import Tensor

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch, Row
from colar.methods.colar import Colar, ColarParams
from colar.methods.colar.group_choice import Rules, choose
from colar.methods.colar.group_decoder import DIGIT_OR_START, GROUP_START, NO_DIGIT
from colar.methods.colar.units import Units
from colar.model.latent_lm import LatentLM
from colar.ops import groups
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig

GREEDY = Decoding(max_latents=8, max_completion_length=4)
SAMPLED = Decoding(1.0, 1.0, 1.0, max_latents=8, max_completion_length=4)

# Groups by plain loops: tokens are numbers here, 0 to 9 the digits, 11 starts or ends a group, or does both.

BY_HAND = Units(digit_ids=tuple(range(10)), start_ids=(11,), end_ids=(11,))
RESULTS_BY_HAND = Units(digit_ids=tuple(range(10)), start_ids=(11, 30, 31), end_ids=(11,), results=True)
OTHER = 20


def naive_used(group: list[int], units: Units) -> int:
    """The units of a group."""
    used = 0
    for at, token in enumerate(group):
        digits = naive_digits(group[:at], units)
        continues = token in units.digit_ids and (digits if units.results else digits % 3) > 0
        used += not continues
    return used


def naive_digits(group: list[int], units: Units) -> int:
    """The digits that a group ends with."""
    n = 0
    while n < len(group) and group[-1 - n] in units.digit_ids:
        n += 1
    return n


def takes_digit(group: list[int], units: Units) -> bool:
    """Whether a digit would belong to the group's last number."""
    digits = naive_digits(group, units)
    if units.results:
        return 0 < digits < 3 and digits == len(group)
    return digits % 3 > 0


def may_join(group: list[int], token: int, most: int, units: Units) -> bool:
    """Whether a token may join a group of `most` units."""
    if token in units.start_ids or group[-1] in units.end_ids:
        return False
    if token in units.digit_ids and takes_digit(group, units):
        return True
    if token in units.digit_ids and units.results and group[-1] in units.digit_ids:
        return False
    return naive_used(group, units) < most


def naive_size(chain: list[int], start: int, most: int, units: Units) -> int:
    """The tokens of a group of `most` units that starts there."""
    size = 1
    while start + size < len(chain) and may_join(
        chain[start : start + size], chain[start + size], most, units
    ):
        size += 1
    return size


def naive_sizes(
    chain: list[int], c: float, phase: float, units: Units, bounds: list[int] | None = None
) -> list[int]:
    sizes: list[int] = []
    t = 0
    while t < len(chain):
        size = naive_size(chain, t, most_of(len(sizes), c, phase), units)
        sizes.append(min(size, bounds[t]) if bounds else size)
        t += sizes[-1]
    return sizes


def found_sizes(chain: list[int], c: float, phase: float, units: Units) -> list[int]:
    ids = torch.tensor([chain])
    found = groups.cut_sizes(
        torch.tensor([len(chain)]),
        torch.tensor([c], dtype=torch.float64),  # as a batch has it: float32 would move groups of 1.54
        torch.tensor([phase], dtype=torch.float64),
        units.bounds(ids),
        units.lengths(ids),
    )
    return sizes_of(found, 0)


@pytest.mark.parametrize(
    ("units", "c", "expected"),
    [
        # << 4 8 / 2 = 2 4 >> << 4 8 + 2 4 = 7 2 >>
        (BY_HAND, 1, [1, 2, 1, 1, 1, 2, 1, 1, 2, 1, 2, 1, 2, 1]),
        (BY_HAND, 2, [3, 2, 1, 3, 3, 3, 1, 3]),
        (BY_HAND, 3, [4, 1, 1, 4, 5, 1, 3]),
        (BY_HAND, 1.5, [1, 3, 1, 1, 2, 2, 2, 3, 1, 3]),
        # Digits of operands apart, behind signs that start a group; results whole, behind the "=" that is alone.
        (RESULTS_BY_HAND, 1, [1, 2, 1, 1, 1, 2, 1, 1, 2, 1, 2, 1, 2, 1]),
        (RESULTS_BY_HAND, 2, [2, 1, 2, 1, 3, 2, 1, 2, 1, 1, 3]),
        (RESULTS_BY_HAND, 3, [2, 1, 2, 1, 4, 2, 2, 1, 1, 3]),
        (RESULTS_BY_HAND, 5, [2, 1, 2, 1, 5, 1, 2, 1, 1, 3]),
    ],
)
def test_groups_by_hand(units: Units, c: float, expected: list[int]) -> None:
    a, b = 21, 22
    chain = [a, 4, 8, 30, 2, 11, 2, 4, b, a, 4, 8, 31, 2, 4, 11, 7, 2, b]
    assert found_sizes(chain, c, 0.0, units) == expected
    assert sum(expected) == len(chain)


def test_the_later_digits_of_an_operand_are_together() -> None:
    assert found_sizes([OTHER, 1, 2, 3, 4, 5, OTHER, 6], 2, 0.0, RESULTS_BY_HAND) == [2, 3, 2, 1]
    assert found_sizes([1, 2, OTHER, 1, 2, 3, 4], 3, 0.0, RESULTS_BY_HAND) == [4, 3]
    assert found_sizes([1, 2, 3, 4, OTHER, OTHER], 2, 0.0, RESULTS_BY_HAND) == [3, 2, 1]


def test_a_long_number_has_several_units() -> None:
    assert BY_HAND.lengths(torch.tensor([[1, 2, 3, 4, 5, OTHER, 7, 11, 1, 2]])).tolist() == [
        [3, 3, 3, 2, 1, 1, 1, 1, 2, 1]
    ]
    assert found_sizes([1, 2, 3, 4, 5, OTHER], 1, 0.0, BY_HAND) == [3, 2, 1]
    assert found_sizes([1, 2, 3, 4, 5, OTHER], 2, 0.0, BY_HAND) == [5, 1]


TOKEN = st.sampled_from([0, 1, 7, 11, OTHER, 21])


@given(
    st.lists(TOKEN, min_size=1, max_size=24),
    st.floats(1, 4),
    st.floats(0, 0.99),
    st.sampled_from(["token", "number", "result"]),
    st.sampled_from(["alone", "starts", "ends", ""]),
)
@example([0, 11, 0, 0], 1.54, 0.38, "token", "alone")
def test_groups_are_those_of_a_naive_loop(
    chain: list[int], c: float, phase: float, unit_name: str, closes: str
) -> None:
    digits = () if unit_name == "token" else BY_HAND.digit_ids
    starts = (11,) if closes in ("alone", "starts") else ()
    ends = (11,) if closes in ("alone", "ends") else ()
    units = Units(digits, starts, ends, results=unit_name == "result")
    c, phase = round(c, 2), round(phase, 2)
    sizes = found_sizes(chain, c, phase, units)
    assert sizes == naive_sizes(chain, c, phase, units)
    ids = torch.tensor([chain])
    # The places that merging goes by.
    grouped, start = torch.full((len(sizes), max(sizes)), -1), 0
    for k, size in enumerate(sizes):
        grouped[k, :size] = ids[0, start : start + size]
        start += size
    unit, digit = units.places(grouped)
    for k, size in enumerate(sizes):
        at, places = 0, []
        group = grouped[k, :size].tolist()
        while at < size:
            length = 1
            while length < 3 and naive_digits(group[: at + length + 1], units) > length:
                length += 1
            length = min(length, size - at)
            places += [(len({u for u, _ in places}), d) for d in reversed(range(length))]
            at += length
        assert list(zip(unit[k, :size].tolist(), digit[k, :size].tolist(), strict=True)) == places


@pytest.mark.parametrize("units", [BY_HAND, RESULTS_BY_HAND], ids=["number", "result"])
def test_rows_of_a_batch_are_grouped_as_they_are_alone(units: Units) -> None:
    chains = [[1, 2, 3, 4], [11], [OTHER, 1, 11, 2, 3, OTHER, OTHER], [5, 6]]
    ids = torch.zeros(len(chains), 7, dtype=torch.long)
    for row, chain in enumerate(chains):
        ids[row, : len(chain)] = torch.tensor(chain)
    found = groups.cut_sizes(
        torch.tensor([len(chain) for chain in chains]),
        torch.tensor([2.0] * 4),
        torch.zeros(4).double(),
        units.bounds(ids),
        units.lengths(ids),
    )
    for row, chain in enumerate(chains):
        assert sizes_of(found, row) == naive_sizes(chain, 2, 0.0, units)


# Learning


NUMBERS: dict[str, Any] = {"unit": "number", "alone": ["="], "merge": "ordered"}
RESULTS: dict[str, Any] = {**NUMBERS, "unit": "result", "starts": ["+"]}
KINDS_OF = {
    "number": NUMBERS,
    "result": RESULTS,
    "result, on numbers": {**RESULTS, "threshold_on": "number"},
    "number, on numbers": {**NUMBERS, "threshold_on": "number"},
}


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [KINDS_OF[name] for name in names], ids=names)


UNITS = kinds("number", "result")
ON_NUMBERS = kinds("result, on numbers", "number, on numbers")
KINDS = kinds(*KINDS_OF)


def units_of(lm: LatentLM, method: Colar) -> Units:
    config = method.config
    return Units.of(lm.template, config.unit, config.alone, config.starts)


def of_row(units: Units, c: float, numbers_from: float) -> Units:
    """What counts in a row: below `numbers_from` a digit is like any other token."""
    return units if c >= numbers_from else Units((), units.start_ids, units.end_ids)


def naive_asked(lm: LatentLM, row: Row, sizes: list[int], units: Units, phase: float) -> list[list[int]]:
    """The labels of each group's position: its tokens, and the one behind where it could have joined."""
    tokens = [*row.chain, lm.template.separator_id]
    labels, start = [], 0
    for k, size in enumerate(sizes):
        most = most_of(k, row.params.compression_factor, phase)
        group = row.chain[start : start + size]
        room = naive_used(group, units) < most
        # Behind a number of three digits, too.
        number = naive_digits(group, units) >= (len(group) if units.results else 1)
        more = (room or number) and group[-1] not in units.end_ids
        labels.append(tokens[start : start + size + more])
        start += size
    return labels


@torch.no_grad()
def naive_loss(lm: LatentLM, row: Row, units: Units, threshold_on: str) -> tuple[float, list[int]]:
    phase = phase_of(row.seed)
    c = row.params.compression_factor
    bounds = None
    if row.params.confidence_threshold > 0:
        hidden = naive_hidden(lm, row, [1] * len(row.chain))
        bounds = []
        for t in range(len(row.chain)):
            window = row.chain[t : t + naive_size(row.chain, t, math.ceil(c), units)]
            sure = [
                math.exp(p) >= row.params.confidence_threshold
                or (threshold_on == "number" and not takes_digit(window[:j], units))
                for j, p in enumerate(naive_logps(lm, hidden[t], window))
            ]
            bounds.append(next((j for j in range(1, len(sure)) if not sure[j]), len(sure)))
    sizes = naive_sizes(row.chain, c, phase, units, bounds)
    hidden = naive_hidden(lm, row, sizes)
    labels = naive_asked(lm, row, sizes, units, phase) + [[token] for token in row.answer]
    means = []
    for k, label in enumerate(labels):
        logps = naive_logps(lm, hidden[k], label)
        means.append(-sum(logps) / len(logps))
    return sum(means) / len(means), sizes


SOME_THRESHOLDS = [0, 1e-4, 2e-3]
EVERY_LOSS = [("llama", thresholds, c) for thresholds in ([0], SOME_THRESHOLDS) for c in (1, 1.5, 2)]
"""How groups end is the same in every family: one has all cases, each of the others one."""


@KINDS
@pytest.mark.parametrize(
    ("family", "thresholds", "numbers_from"),
    [*EVERY_LOSS, *[(family, SOME_THRESHOLDS, 1.5) for family in FAMILIES if family != "llama"]],
    ids=str,
)
def test_the_loss_is_a_naive_loop(
    family: str, thresholds: list[float], numbers_from: float, kind: dict[str, Any]
) -> None:
    lm, method = made(
        family,
        digits=True,
        compression_factors=[1, 1.5, 2, 3],
        confidence_thresholds=thresholds,
        numbers_from=numbers_from,
        **kind,
    )
    units = units_of(lm, method)
    rows = encoded(lm, method, times=4)
    batch = Batch.collate(rows)
    found, sizes = method.loss(lm, batch)["ce"], method.group_sizes(lm, batch)
    numbers = 0
    for i, row in enumerate(rows):
        of_this = of_row(units, row.params.compression_factor, numbers_from)
        loss, naive = naive_loss(lm, row, of_this, method.config.threshold_on)
        assert sizes_of(sizes, i) == naive, i
        assert found[i].item() == pytest.approx(loss, rel=1e-4, abs=1e-5), i
        numbers += len(naive) < len(row.chain)
    assert numbers


@UNITS
@pytest.mark.parametrize("numbers_from", [1, 2])
@torch.no_grad()
def test_labels_behind_a_group_are_those_that_one_of_the_largest_factor_has(
    numbers_from: float, kind: dict[str, Any]
) -> None:
    """Nothing behind the place where that group ends: there the decoder is never asked."""
    lm, method = made(
        digits=True, compression_factors=[1, 2, 3], lookahead_weight=0.2, numbers_from=numbers_from, **kind
    )
    units = units_of(lm, method)
    rows = encoded(lm, method, times=2)
    found = method.loss(lm, Batch.collate(rows))["ce"]
    behind = 0
    for i, row in enumerate(rows):
        phase = phase_of(row.seed)
        of_this = of_row(units, row.params.compression_factor, numbers_from)
        sizes = naive_sizes(row.chain, row.params.compression_factor, phase, of_this)
        hidden = naive_hidden(lm, row, sizes)
        means, start = [], 0
        for k, own in enumerate(naive_asked(lm, row, sizes, of_this, phase)):
            rest = dataclasses.replace(row, steps=[row.chain[start:]], params=ColarParams(3))
            longest = naive_size(rest.chain, 0, 3, units)
            (far,) = naive_asked(lm, rest, [longest], units, 0.0)
            label = max(own, far, key=len)
            weights = [1.0] * len(own) + [0.2] * (len(label) - len(own))
            logps = naive_logps(lm, hidden[k], label)
            means.append(-sum(w * logp for w, logp in zip(weights, logps, strict=True)) / sum(weights))
            behind += len(label) - len(own)
            start += sizes[k]
        for k, token in enumerate(row.answer, start=len(sizes)):
            means.append(-naive_logps(lm, hidden[k], [token])[0])
        assert found[i].item() == pytest.approx(sum(means) / len(means), rel=1e-4, abs=1e-5), i
    assert behind


@KINDS
def test_rows_without_reasoning_have_no_groups_to_end(kind: dict[str, Any]) -> None:
    lm, method = made(digits=True, compression_factors=[2], confidence_thresholds=[0.5], **kind)
    rows = [dataclasses.replace(row, steps=[]) for row in encoded(lm, method)]
    assert not any(row.chain for row in rows)
    batch = Batch.collate(rows)
    assert method.group_sizes(lm, batch).sum() == 0
    assert method.loss(lm, batch)["ce"].isfinite().all()


def test_maps_of_digits_and_of_places_are_trained() -> None:
    lm, method = made(digits=True, compression_factors=[2], **NUMBERS)
    method.loss(lm, Batch.collate(encoded(lm, method)))["ce"].sum().backward()
    assert lm.extra["place_maps"].maps.grad.abs().sum() > 0
    # The examples have numbers of two digits: the map of a second one is trained, and that of a third is not.
    second, third = lm.extra["digit_maps"].maps.grad.abs().sum((1, 2)).tolist()
    assert second > 0
    assert third == 0
    assert lm.extra["digit_maps"].maps.shape[0] == 2
    assert lm.extra["place_maps"].maps.shape[0] == 1


def test_at_c_1_a_number_is_one_thought() -> None:
    lm, method = made(digits=True, compression_factors=[1], **NUMBERS)
    assert set(lm.extra) == {"group_decoder", "digit_maps"}
    (row,) = [method.encode(lm.template, EXAMPLES[4], Random(0), 0.0)]
    groups_of = []
    start = 0
    for size in sizes_of(method.group_sizes(lm, Batch.collate([row])), 0):
        groups_of.append("".join(lm.template.token(i) for i in row.chain[start : start + size]))
        start += size
    assert "".join(groups_of) == "<<10+11=21>>"
    assert {"10", "11", "21", "="} <= set(groups_of)


def test_from_c_2_numbers_are_units_and_c_1_is_cot() -> None:
    lm, method = made(digits=True, compression_factors=[1, 2], numbers_from=2, **NUMBERS)
    cot = registry.build("cot", {})
    rows = encoded(lm, method, times=4)
    single = [row for row in rows if row.params.compression_factor == 1]
    batch = Batch.collate(single)
    assert method.group_sizes(lm, batch).amax() == 1
    torch.testing.assert_close(method.loss(lm, batch)["ce"], cot.loss(lm, batch)["ce"])
    double = [row for row in rows if row.params.compression_factor == 2]
    assert method.group_sizes(lm, Batch.collate(double)).amax() == 3


# Thinking


def lively(
    family: str = "llama", shortlist: bool = False, equals: float = 1.6, **config: Any
) -> tuple[LatentLM, Colar]:
    """A random model that often thinks digits, and "=": the more often, the larger `equals` is."""
    lm, method = made(
        family,
        live=True,
        digits=True,
        shortlist=shortlist,
        **{"compression_factors": [1, 1.5, 2, 3], "confidence_thresholds": [0, 0.5], **NUMBERS, **config},
    )
    units = units_of(lm, method)
    with torch.no_grad():
        bias = lm.causal_lm.get_output_embeddings().bias
        spread = lm.logits(torch.randn(64, lm.width)).std().item()
        bias[list(units.digit_ids)] += 1.2 * spread
        bias[list({*units.start_ids, *units.end_ids})] += equals * spread
    return lm, method


def test_places_say_what_a_digit_is_worth() -> None:
    # 4 8 + 1 2 3 4 5: the last number has two units.
    group = torch.tensor([4, 8, OTHER, 1, 2, 3, 4, 5, -1])
    unit, digit = BY_HAND.places(group)
    assert unit[:8].tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert digit[:8].tolist() == [1, 0, 0, 2, 1, 0, 1, 0]


def requests(thresholds: tuple[float, ...] = (0, 0.3)) -> list[Request]:
    asked = []
    for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for i in range(24):
            params = ColarParams(
                (1, 1.5, 2, 3)[i % 4], confidence_threshold=thresholds[i // 4 % len(thresholds)]
            )
            question = EXAMPLES[i % 6].question
            asked.append(Request(f"{mode}/{i}", question, params, decoding, i, i % 3, keep_latents=True))
    return asked


EVERY_ENGINE = [("llama", False, 1), ("llama", True, 1), ("llama", True, 2)]


@UNITS
@pytest.mark.parametrize(
    ("family", "shortlist", "numbers_from"),
    [*EVERY_ENGINE, *[(family, True, 1) for family in FAMILIES if family != "llama"]],
)
def test_the_engine_equals_the_reference(
    family: str, shortlist: bool, numbers_from: float, kind: dict[str, Any]
) -> None:
    check_engine(*lively(family, shortlist, numbers_from=numbers_from, **kind))


@ON_NUMBERS
@pytest.mark.parametrize(("family", "shortlist", "numbers_from"), [("llama", False, 1), ("gpt2", True, 2)])
def test_the_engine_equals_the_reference_with_a_threshold_on_numbers(
    family: str, shortlist: bool, numbers_from: float, kind: dict[str, Any]
) -> None:
    check_engine(*lively(family, shortlist, numbers_from=numbers_from, **kind))


def check_engine(lm: LatentLM, method: Colar) -> None:
    """Greedy and sampled, at several speeds and thresholds, alone and among others."""
    asked = requests()
    references = [reference.complete(lm, method, request) for request in asked]
    for max_batch in (1, 5, 64):
        done = Engine(lm, method, max_batch).generate(asked)
        for request, expected, found in zip(asked, references, done, strict=True):
            assert (found.token_ids, found.length) == (expected.token_ids, expected.length), request.id
            for mine, theirs in zip(found.info, expected.info, strict=True):
                assert mine["group_ids"].tolist() == theirs["group_ids"].tolist()
                assert mine["declined_ids"].tolist() == theirs["declined_ids"].tolist()
                torch.testing.assert_close(mine["logp"], theirs["logp"], rtol=1e-3, atol=1e-4)


@UNITS
@pytest.mark.parametrize("numbers_from", [1, 2])
def test_groups_have_as_many_units_as_c_lets_in(numbers_from: float, kind: dict[str, Any]) -> None:
    """Each by a plain loop over its tokens. Its last unit may be a number whose next digit was not drawn."""
    lm, method = lively(numbers_from=numbers_from, **kind)
    all_units = units_of(lm, method)
    separator = lm.template.separator_id
    seen = set()
    asked = [
        dataclasses.replace(each, id=f"{each.id}/{s}", sample=s) for each in requests((0,)) for s in range(4)
    ]
    for request, done in zip(asked, Engine(lm, method, 64).generate(asked), strict=True):
        units = of_row(all_units, request.params.compression_factor, numbers_from)
        phase = phase_of(request.seed, request.sample)
        for k, info in enumerate(done.info):
            ids = ids_of(info)
            kept = [token for token in ids if token != separator]
            most = most_of(k, request.params.compression_factor, phase)
            used = naive_used(kept, units)
            assert used <= most
            for size in range(1, len(kept)):
                assert may_join(kept[:size], kept[size], most, units)
            # Fewer than c lets in only before a token that may not join, behind one that ends it, or before the stop.
            short = used < most and separator not in ids
            closed = kept[-1] in units.end_ids
            if short and not closed and request.decoding == SAMPLED:
                refused = units.results and kept[-1] in units.digit_ids and not takes_digit(kept, units)
                assert info["declined_ids"] == (DIGIT_OR_START if refused else GROUP_START)
            torch.testing.assert_close(done.latents[k], latent(lm, kept), rtol=1e-4, atol=1e-5)
            seen.add((used, len(kept) > used, kept[-1] in units.end_ids))
    expected = {(1, False, True), (1, False, False), (2, True, False), (3, True, False)}
    assert expected <= seen
    # A number by itself is one thought at c = 1 and 1.5, where these count numbers.
    assert ((1, True, False) in seen) or numbers_from > 1


# Reinforcement


@pytest.mark.parametrize("drawn_at", [1.0, 1.3])
@pytest.mark.parametrize("threshold", [0.0, 0.7])
@pytest.mark.parametrize(("shortlist", "numbers_from"), [(False, 1), (True, 1), (True, 2)])
@KINDS
def test_how_a_group_ended_is_scored(
    kind: dict[str, Any], shortlist: bool, numbers_from: float, threshold: float, drawn_at: float
) -> None:
    """By training as by the engine: the tokens of a group, and that what was drawn behind them has ended it."""
    lm, method = lively(shortlist=shortlist, equals=2.5, numbers_from=numbers_from, **kind)
    if threshold:
        sharpen(lm)
    config = GrpoConfig(
        num_generations=16,
        max_latents=6,
        max_completion_length=3,
        compression_factors=(1, 2, 3),
        confidence_thresholds=(threshold,) if threshold else None,
        latent_temperature=drawn_at,
    )
    outputs = rollout.roll_out(lm, method, config, EXAMPLES, seed=3, generation=1)
    tensors = rollout.collate(outputs, lm.width)
    declined = tensors.declined_ids != -1
    on_numbers = kind.get("threshold_on") == "number"
    if threshold:
        # With a threshold on numbers, groups also end before what may not join.
        assert on_numbers or (tensors.declined_ids >= -1).all()
        assert declined.any()
    else:
        ends = set(tensors.declined_ids.unique().tolist())
        assert GROUP_START in ends
        assert ends & ({NO_DIGIT, DIGIT_OR_START} if kind["unit"] == "result" else {NO_DIGIT})
    scores = method.logps(lm, tensors, "mean")
    engine = rollout.engine_logps(method, outputs, tensors, "mean")
    torch.testing.assert_close(scores.logps[scores.mask], engine[scores.mask], rtol=1e-3, atol=1e-3)
    # It counts.
    without = dataclasses.replace(tensors, declined_ids=torch.full_like(tensors.declined_ids, -1))
    other = method.logps(lm, without, "mean")
    at = torch.nn.functional.pad(declined, (0, scores.logps.shape[1] - declined.shape[1]))
    assert bool((other.logps[at] >= scores.logps[at]).all())
    assert bool((other.logps[at] > scores.logps[at]).any())
    torch.testing.assert_close(other.logps[~at], scores.logps[~at])
    scores.logps.sum().backward()
    assert lm.extra["group_decoder"].mlp[-1].weight.grad.isfinite().all()


@KINDS
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.6])
@torch.no_grad()
def test_groups_come_as_often_as_their_log_probs_say(threshold: float, kind: dict[str, Any]) -> None:
    """Many draws of one group: the share of each outcome against exp(logp), all ways to end included."""
    lm, method = lively(**kind)
    units = units_of(lm, method)
    n = 8_000
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(4, lm.width, generator=generator)
    columns = torch.ones(n, dtype=torch.float64)
    declined = set()
    for i in range(len(state)):
        for first_id in (units.digit_ids[3], 7, units.end_ids[0]):
            uniform = torch.rand(6, n, generator=generator, dtype=torch.float64)
            most = torch.full((n,), 1 + i % 2)
            rules = Rules(
                most,
                columns,
                columns,
                threshold * columns,
                lambda place, u=uniform: u[place],
                units=units,
                threshold_on=method.config.threshold_on,
            )
            found = choose(lm, state[i].expand(n, -1), torch.full((n,), first_id), rules)
            declined |= {int(which) for _, which in check_shares(found, 2e-4)}
    if threshold == 0:
        assert NO_DIGIT in declined
        assert (DIGIT_OR_START in declined) == (kind["unit"] == "result")
    elif kind.get("threshold_on") != "number":
        assert max(declined) >= 0


@torch.no_grad()
def test_a_threshold_on_numbers_is_asked_behind_numbers_alone() -> None:
    """No token reaches a threshold of 1: groups end where a number could go on, and nowhere else."""
    lm, method = lively(**KINDS_OF["result, on numbers"])
    units = units_of(lm, method)
    n = 500
    generator = torch.Generator().manual_seed(0)
    state_ND = torch.randn(n, lm.width, generator=generator)
    ones = torch.ones(n, dtype=torch.float64)
    sizes = {}
    for threshold_on in ("token", "number"):
        for first_id in (units.digit_ids[3], 7):
            uniform = torch.rand(12, n, generator=generator, dtype=torch.float64)
            rules = Rules(
                torch.full((n,), 3),
                ones,
                ones,
                ones,
                lambda place, u=uniform: u[place],
                units=units,
                threshold_on=threshold_on,
            )
            ids = choose(lm, state_ND, torch.full((n,), first_id), rules).ids
            sizes[threshold_on, first_id] = (ids != -1).sum(1)
    assert (sizes["token", units.digit_ids[3]] == 1).all()
    assert (sizes["token", 7] == 1).all()
    # Behind a digit that begins a group a number is open. Behind any other token none is, and three may stand together.
    assert (sizes["number", units.digit_ids[3]] == 1).all()
    assert sizes["number", 7].max() == 3


# Bad values, checkpoints


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"unit": "word"}, "method.unit must be one of token, number, result"),
        ({"alone": "="}, "method.alone must be a list of tokens, got '='"),
        ({"alone": [""]}, "method.alone must be a list of tokens"),
        ({"head": "gaussian", "unit": "number"}, "method.unit is an option of head: sequential; this one is gaussian"),
        ({"numbers_from": 0.5}, "method.numbers_from must be a number, 1 or more, got 0.5"),
        ({"numbers_from": 2}, "method.numbers_from is a value of unit: number and unit: result; this one is token"),
        ({"threshold_on": "all"}, "method.threshold_on must be one of token, number"),
        ({"threshold_on": "number"}, "method.threshold_on number is a value of unit: number and unit: result"),
        ({"head": "gaussian", "alone": ["="]}, "method.alone is an option of head: sequential"),
        ({"head": "gaussian", "starts": ["="]}, "method.starts is an option of head: sequential"),
        ({"starts": [3]}, "method.starts must be a list of tokens"),
        ({"starts": ["+", "="], "alone": ["="]}, "method.starts has '=', which is in method.alone: it starts one anyway"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.build("colar", {"head": "sequential", **config})


def test_a_token_that_the_tokenizer_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="method.alone: this tokenizer has no token 'equals'"):
        made(alone=["equals"])
    with pytest.raises(ValueError, match="method.starts: this tokenizer has no token 'equals'"):
        made(starts=["equals"])


def test_a_checkpoint_thinks_as_before(tmp_path: Path) -> None:
    lm, method = lively()
    pretrained.save(lm, method, tmp_path / "model", {}, "")
    again, method_again = pretrained.load(tmp_path / "model")
    assert isinstance(method_again, Colar)
    assert method_again.config.unit == "number"
    assert tuple(method_again.config.alone) == ("=",)
    ours: Tensor = lm.extra["digit_maps"].maps
    torch.testing.assert_close(again.extra["digit_maps"].maps, ours)
