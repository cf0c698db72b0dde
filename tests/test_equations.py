"""What c counts, and where groups start and end: groups by plain loops, the same in training and in thinking, exact draws."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES
from hypothesis import example, given
from hypothesis import strategies as st
from sequential import check_shares, encoded, latent, made, matrices
from test_real_factors import ids_of, most_of, naive_hidden, naive_logps, phase_of, sharpen, sizes_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from colar.data.example import Example
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch, Row
from colar.methods.sequential import Sequential, SequentialParams, decoder
from colar.methods.sequential.boundaries import MOST_DIGITS, Equations, Windows
from colar.methods.sequential.choice import Rules, choose_groups
from colar.methods.sequential.decoder import Ending
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.ops.sampling import DrawModes
from colar.recipe.facts import RowReader, facts_of, without_spaces
from colar.template.template import Template, TemplateConfig
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig

GREEDY = Decoding(max_latents=8, max_completion_length=4)
SAMPLED = Decoding(1.0, 1.0, 1.0, max_latents=8, max_completion_length=4)

# Groups by plain loops: tokens are numbers here, 0 to 9 the digits, 11 "=", 30 and 31 signs.

BY_HAND = Equations(digit_ids=tuple(range(10)), sign_ids=(30, 31), equals_id=11)
OTHER = 20


@dataclasses.dataclass(frozen=True)
class Naive:
    """What a group goes by at one factor: below 2 a digit is like any other token."""

    digits: tuple[int, ...]
    starts: tuple[int, ...]
    equals: int
    tested_behind: tuple[int, ...]

    @classmethod
    def of(cls, equations: Equations, c: float) -> Naive:
        starts = (*equations.sign_ids, equations.equals_id)
        digits = equations.digit_ids if c >= 2 else ()
        return cls(digits, starts, equations.equals_id, equations.sign_ids)

    def run(self, group: list[int]) -> int:
        """The digits that a group ends with."""
        n = 0
        while n < len(group) and group[-1 - n] in self.digits:
            n += 1
        return n

    def used(self, group: list[int]) -> int:
        """The units of a group."""
        return sum(not (token in self.digits and self.run(group[:at]) > 0) for at, token in enumerate(group))

    def takes_digit(self, group: list[int]) -> bool:
        """Whether a digit would belong to the number that the group is."""
        return 0 < self.run(group) < 3 and self.run(group) == len(group)

    def is_tested(self, group: list[int]) -> bool:
        """Whether a threshold applies to the token behind a group."""
        return self.takes_digit(group) or any(token in self.tested_behind for token in group[-1:])

    def may_join(self, group: list[int], token: int, most: int) -> bool:
        """Whether a token may join a group of `most` units."""
        if token in self.starts or group[-1] == self.equals:
            return False
        if token in self.digits and self.takes_digit(group):
            return True
        if token in self.digits and group[-1] in self.digits:
            return False
        return self.used(group) < most

    def size(self, chain: list[int], start: int, most: int) -> int:
        """The tokens of a group of `most` units that starts there."""
        size = 1
        while start + size < len(chain) and self.may_join(
            chain[start : start + size], chain[start + size], most
        ):
            size += 1
        return size

    def sizes(self, chain: list[int], c: float, phase: float, bounds: list[int] | None = None) -> list[int]:
        sizes: list[int] = []
        t = 0
        while t < len(chain):
            size = self.size(chain, t, most_of(len(sizes), c, phase))
            sizes.append(min(size, bounds[t]) if bounds else size)
            t += sizes[-1]
        return sizes


def batch_sizes(chains: list[list[int]], c: float, phase: float) -> list[list[int]]:
    """The groups of chains, as training makes them in one batch where the largest factor is 5."""
    ids, lengths = ragged.pad(chains)
    # float64, as a batch has it: float32 would move groups of 1.54.
    c_B, phase_B = (torch.full(lengths.shape, value, dtype=torch.float64) for value in (c, phase))
    found = Windows.of((ids, lengths), 5, BY_HAND, c_B >= 2).sizes(lengths, c_B, phase_B)
    return [sizes_of(found, row) for row in range(len(chains))]


def found_sizes(chain: list[int], c: float, phase: float) -> list[int]:
    (sizes,) = batch_sizes([chain], c, phase)
    return sizes


@pytest.mark.parametrize(
    ("c", "expected"),
    [
        # << 4 8 / 2 = 2 4 >> << 4 8 + 2 4 = 7 2 >>
        (1, [1] * 19),
        (1.5, [1, 2, 1, 1, 1, 2, 1, 2, 1, 2, 1, 1, 1, 2]),
        # Digits of operands apart, behind signs that start a group; results whole, behind the "=" that is alone.
        (2, [2, 1, 2, 1, 3, 2, 1, 2, 1, 1, 3]),
        (3, [2, 1, 2, 1, 4, 2, 2, 1, 1, 3]),
        (5, [2, 1, 2, 1, 5, 1, 2, 1, 1, 3]),
    ],
)
def test_groups_by_hand(c: float, expected: list[int]) -> None:
    a, b = 21, 22
    chain = [a, 4, 8, 30, 2, 11, 2, 4, b, a, 4, 8, 31, 2, 4, 11, 7, 2, b]
    assert found_sizes(chain, c, 0.0) == expected
    assert sum(expected) == len(chain)


def test_the_later_digits_of_an_operand_are_together() -> None:
    assert found_sizes([OTHER, 1, 2, 3, 4, 5, OTHER, 6], 2, 0.0) == [2, 3, 2, 1]
    assert found_sizes([1, 2, OTHER, 1, 2, 3, 4], 3, 0.0) == [4, 3]
    assert found_sizes([1, 2, 3, 4, OTHER, OTHER], 2, 0.0) == [3, 2, 1]


TOKEN = st.sampled_from([0, 1, 7, 11, 30, OTHER, 21])


@given(st.lists(TOKEN, min_size=1, max_size=24), st.floats(1, 4), st.floats(0, 0.99))
@example([0, 11, 0, 0], 1.54, 0.38)
def test_groups_are_those_of_a_naive_loop(chain: list[int], c: float, phase: float) -> None:
    c, phase = round(c, 2), round(phase, 2)
    naive = Naive.of(BY_HAND, c)
    sizes = found_sizes(chain, c, phase)
    assert sizes == naive.sizes(chain, c, phase)
    assert max(sizes) <= math.ceil(c) + MOST_DIGITS - 1
    ids = torch.tensor([chain])
    # The places that merging goes by.
    grouped, start = torch.full((len(sizes), max(sizes)), -1), 0
    for k, size in enumerate(sizes):
        grouped[k, :size] = ids[0, start : start + size]
        start += size
    unit, digit = BY_HAND.units_and_digits(grouped)
    digits = Naive.of(BY_HAND, 2)
    for k, size in enumerate(sizes):
        at, places = 0, []
        group = grouped[k, :size].tolist()
        while at < size:
            length = 1
            while length < 3 and digits.run(group[: at + length + 1]) > length:
                length += 1
            length = min(length, size - at)
            places += [(len({u for u, _ in places}), d) for d in reversed(range(length))]
            at += length
        assert list(zip(unit[k, :size].tolist(), digit[k, :size].tolist(), strict=True)) == places


def test_rows_of_a_batch_are_grouped_as_they_are_alone() -> None:
    chains = [[1, 2, 3, 4], [11], [OTHER, 1, 11, 2, 3, OTHER, OTHER], [5, 6]]
    for chain, sizes in zip(chains, batch_sizes(chains, 2, 0.0), strict=True):
        assert sizes == Naive.of(BY_HAND, 2).sizes(chain, 2, 0.0)


# Learning


EQUATIONS: dict[str, Any] = {"grouping": "equations", "merge": "ordered"}


def equations_of(lm: LatentLM, method: Sequential) -> Equations:
    found = method.equations(lm)
    assert found is not None
    return found


def naive_asked(lm: LatentLM, row: Row, sizes: list[int], naive: Naive, phase: float) -> list[list[int]]:
    """The labels of each group's position: its tokens, and the one behind where it could have joined."""
    tokens = [*row.chain, lm.template.separator_id]
    labels, start = [], 0
    for k, size in enumerate(sizes):
        most = most_of(k, row.params.compression_factor, phase)
        group = row.chain[start : start + size]
        room = naive.used(group) < most
        # Behind a number of three digits, too.
        number = naive.run(group) >= len(group)
        more = (room or number) and group[-1] != naive.equals
        labels.append(tokens[start : start + size + more])
        start += size
    return labels


@torch.no_grad()
def naive_loss(lm: LatentLM, row: Row, naive: Naive) -> tuple[float, list[int]]:
    phase = phase_of(row.seed)
    c = row.params.compression_factor
    bounds = None
    if row.params.confidence_threshold > 0:
        hidden = naive_hidden(lm, row, [1] * len(row.chain))
        bounds = []
        for t in range(len(row.chain)):
            window = row.chain[t : t + naive.size(row.chain, t, math.ceil(c))]
            confident = [
                math.exp(p) >= row.params.confidence_threshold or not naive.is_tested(window[:j])
                for j, p in enumerate(naive_logps(lm, hidden[t], window))
            ]
            bounds.append(next((j for j in range(1, len(confident)) if not confident[j]), len(confident)))
    sizes = naive.sizes(row.chain, c, phase, bounds)
    hidden = naive_hidden(lm, row, sizes)
    labels = naive_asked(lm, row, sizes, naive, phase) + [[token] for token in row.answer]
    means = []
    for k, label in enumerate(labels):
        logps = naive_logps(lm, hidden[k], label)
        means.append(-sum(logps) / len(logps))
    return sum(means) / len(means), sizes


@pytest.mark.parametrize(
    ("family", "thresholds"),
    [("llama", [0]), ("gemma3", [0, 1e-4, 2e-3]), ("gpt2", [0, 1e-4, 2e-3])],
    ids=str,
)
def test_the_loss_is_a_naive_loop(family: str, thresholds: list[float]) -> None:
    lm, method = made(
        family,
        digits=True,
        compression_factors=[1, 1.5, 2, 3],
        confidence_thresholds=thresholds,
        **EQUATIONS,
    )
    rows = encoded(lm, method, times=2)
    batch = Batch.collate(rows)
    found, sizes = method.loss(lm, batch)["ce"], method.training_thoughts(lm, batch)[1]
    grouped = 0
    for i, row in enumerate(rows):
        naive = Naive.of(equations_of(lm, method), row.params.compression_factor)
        loss, expected = naive_loss(lm, row, naive)
        assert sizes_of(sizes, i) == expected, i
        assert found[i].item() == pytest.approx(loss, rel=1e-4, abs=1e-5), i
        grouped += len(expected) < len(row.chain)
    assert grouped


def test_groups_end_in_training_as_in_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the whole model: dropout would lower the confidence. And the forward before the loss leaves nothing in
    autocast's cache, which up to torch 2.10 would hand weights without gradient to the loss."""
    lm, method = made("gpt2", digits=True, compression_factors=[3], confidence_thresholds=[2e-3], **EQUATIONS)
    batch = Batch.collate(encoded(lm, method, times=2))
    wanted = method.training_thoughts(lm, batch)[1]
    for module in lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    cached = []
    label_logps = decoder.label_logps

    def watched(*args: Any) -> Any:
        cached.append(torch.is_autocast_cache_enabled())
        return label_logps(*args)

    monkeypatch.setattr(decoder, "label_logps", watched)
    lm.train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert method.training_thoughts(lm, batch)[1].equal(wanted)
    assert cached == [False]
    assert lm.training


@torch.no_grad()
def test_labels_behind_a_group_are_those_that_one_of_the_largest_factor_has() -> None:
    """Nothing behind the place where that group ends: there the decoder is never asked."""
    lm, method = made(digits=True, compression_factors=[1, 2, 3], lookahead_weight=0.2, **EQUATIONS)
    rows = encoded(lm, method, times=2)
    found = method.loss(lm, Batch.collate(rows))["ce"]
    largest = Naive.of(equations_of(lm, method), 3)
    behind = 0
    for i, row in enumerate(rows):
        phase = phase_of(row.seed)
        naive = Naive.of(equations_of(lm, method), row.params.compression_factor)
        sizes = naive.sizes(row.chain, row.params.compression_factor, phase)
        hidden = naive_hidden(lm, row, sizes)
        means, start = [], 0
        for k, own in enumerate(naive_asked(lm, row, sizes, naive, phase)):
            rest = dataclasses.replace(row, steps=[row.chain[start:]], params=SequentialParams(3))
            longest = largest.size(rest.chain, 0, 3)
            (far,) = naive_asked(lm, rest, [longest], largest, 0.0)
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


def test_rows_without_reasoning_have_no_groups_to_end() -> None:
    lm, method = made(digits=True, compression_factors=[2], confidence_thresholds=[0.5], **EQUATIONS)
    rows = [dataclasses.replace(row, steps=[]) for row in encoded(lm, method)]
    assert not any(row.chain for row in rows)
    batch = Batch.collate(rows)
    assert method.training_thoughts(lm, batch)[1].sum() == 0
    assert method.loss(lm, batch)["ce"].isfinite().all()


def test_maps_of_digits_and_of_places_are_trained() -> None:
    lm, method = made(digits=True, compression_factors=[2], **EQUATIONS)
    method.loss(lm, Batch.collate(encoded(lm, method)))["ce"].sum().backward()
    assert lm.extra["place_maps"].up.grad.abs().sum() > 0
    # The examples have numbers of two digits: the map of a second one is trained, and that of a third is not.
    second, third = lm.extra["digit_maps"].up.grad.abs().sum((1, 2)).tolist()
    assert second > 0
    assert third == 0
    assert lm.extra["digit_maps"].up.shape[0] == 2
    assert lm.extra["place_maps"].up.shape[0] == 1


def test_c_1_is_cot_and_from_c_2_on_results_are_units() -> None:
    lm, method = made(digits=True, compression_factors=[1, 2], **EQUATIONS)
    cot = registry.build("cot", {})
    rows = encoded(lm, method, times=4)
    single = [row for row in rows if row.params.compression_factor == 1]
    batch = Batch.collate(single)
    assert method.training_thoughts(lm, batch)[1].amax() == 1
    torch.testing.assert_close(method.loss(lm, batch)["ce"], cot.loss(lm, batch)["ce"])
    double = [row for row in rows if row.params.compression_factor == 2]
    assert method.training_thoughts(lm, Batch.collate(double))[1].amax() == 3


# Thinking


def lively(
    family: str = "llama", shortlist: bool = False, equals: float = 1.6, **config: Any
) -> tuple[LatentLM, Sequential]:
    """A random model that often thinks digits, and "=": the more often, the larger `equals` is."""
    lm, method = made(
        family,
        live=True,
        digits=True,
        shortlist=shortlist,
        **{"compression_factors": [1, 1.5, 2, 3], "confidence_thresholds": [0, 0.5], **EQUATIONS, **config},
    )
    equations = equations_of(lm, method)
    with torch.no_grad():
        bias = lm.causal_lm.get_output_embeddings().bias
        spread = lm.logits(torch.randn(64, lm.width)).std().item()
        bias[list(equations.digit_ids)] += 1.2 * spread
        bias[[lm.tokenizer.get_vocab()["+"], equations.equals_id]] += equals * spread
    return lm, method


def test_places_say_what_a_digit_is_worth() -> None:
    # 4 8 + 1 2 3 4 5: the last number has two units.
    group = torch.tensor([4, 8, OTHER, 1, 2, 3, 4, 5, -1])
    unit, digit = BY_HAND.units_and_digits(group)
    assert unit[:8].tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert digit[:8].tolist() == [1, 0, 0, 2, 1, 0, 1, 0]


def requests(thresholds: tuple[float, ...] = (0, 0.3)) -> list[Request]:
    asked = []
    for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for i in range(24):
            params = SequentialParams(
                (1, 1.5, 2, 3)[i % 4], confidence_threshold=thresholds[i // 4 % len(thresholds)]
            )
            question = EXAMPLES[i % 6].question
            asked.append(Request(f"{mode}/{i}", question, params, decoding, i, i % 3, keep_latents=True))
    return asked


@pytest.mark.parametrize(("family", "shortlist"), [("llama", False), ("qwen2", True), ("gemma3", True)])
def test_the_engine_equals_the_reference(family: str, shortlist: bool) -> None:
    """Greedy and sampled, at several speeds and thresholds, alone and among others."""
    lm, method = lively(family, shortlist)
    # Of either decoding a third, another one in each family: each speed with both thresholds.
    first = ("llama", "qwen2", "gemma3").index(family) * 4
    asked = [each for i, each in enumerate(requests()) if first <= i % 24 < first + 8]
    references = [reference.complete(lm, method, request) for request in asked]
    # A row by itself is what the reference has: some of them show it.
    for max_batch, step in ((1, 5), (5, 1), (64, 1)):
        done = Engine(lm, method, max_batch).generate(asked[::step])
        for request, expected, found in zip(asked[::step], references[::step], done, strict=True):
            assert (found.token_ids, found.length) == (expected.token_ids, expected.length), request.id
            for mine, theirs in zip(found.thought_info(), expected.thought_info(), strict=True):
                assert mine["group_ids"].tolist() == theirs["group_ids"].tolist()
                assert mine["endings"].tolist() == theirs["endings"].tolist()
                torch.testing.assert_close(mine["logp"], theirs["logp"], rtol=1e-3, atol=1e-4)


def test_groups_have_as_many_units_as_c_lets_in() -> None:
    """Each by a plain loop over its tokens. Its last unit may be a number whose next digit was not drawn."""
    lm, method = lively()
    separator = lm.template.separator_id
    seen = set()
    asked = [
        dataclasses.replace(each, id=f"{each.id}/{s}", sample=s) for each in requests((0,)) for s in range(2)
    ]
    for request, done in zip(asked, Engine(lm, method, 64).generate(asked), strict=True):
        naive = Naive.of(equations_of(lm, method), request.params.compression_factor)
        phase = phase_of(request.seed, request.sample)
        for k, info in enumerate(done.thought_info()):
            ids = ids_of(info)
            kept = [token for token in ids if token != separator]
            most = most_of(k, request.params.compression_factor, phase)
            used = naive.used(kept)
            assert used <= most
            for size in range(1, len(kept)):
                assert naive.may_join(kept[:size], kept[size], most)
            # Fewer than c lets in only before a token that may not join, behind one that ends it, or before the stop.
            short = used < most and separator not in ids
            closed = kept[-1] == naive.equals
            if short and not closed and request.decoding == SAMPLED:
                refused = kept[-1] in naive.digits and not naive.takes_digit(kept)
                assert info["endings"] == (Ending.DIGIT_OR_START if refused else Ending.START)
            torch.testing.assert_close(done.latents[k], latent(lm, kept), rtol=1e-4, atol=1e-5)
            seen.add((used, len(kept) > used, closed))
    expected = {(1, False, True), (1, False, False), (2, True, False), (3, True, False)}
    assert expected <= seen


# Reinforcement


@pytest.mark.parametrize(
    ("shortlist", "threshold", "drawn_at"),
    [(False, 0.0, 1.0), (True, 0.0, 1.3), (False, 0.7, 1.3), (True, 0.7, 1.0)],
)
def test_how_a_group_ended_is_scored(shortlist: bool, threshold: float, drawn_at: float) -> None:
    """By training as by the engine: the tokens of a group, and that what was drawn behind them has ended it."""
    lm, method = lively(shortlist=shortlist, equals=2.5)
    if threshold:
        sharpen(lm)
    config = GrpoConfig(
        num_generations=16 if threshold else 8,
        max_latents=6,
        max_completion_length=3,
        compression_factors=(1, 2, 3),
        confidence_thresholds=(threshold,) if threshold else None,
        latent_temperature=drawn_at,
    )
    outputs = rollout.roll_out(lm, method, config, EXAMPLES, seed=3, generation=1)
    tensors = rollout.collate(outputs, lm.width)
    declined = tensors.endings != -1
    assert declined.any()
    if not threshold:
        ends = set(tensors.endings.unique().tolist())
        assert Ending.START in ends
        assert Ending.DIGIT_OR_START in ends
    scores = method.logps(lm, tensors)
    engine = rollout.engine_logps(method, outputs, tensors)
    torch.testing.assert_close(scores.logps[scores.mask], engine[scores.mask], rtol=1e-3, atol=1e-3)
    # It counts.
    without = dataclasses.replace(tensors, endings=torch.full_like(tensors.endings, -1))
    other = method.logps(lm, without)
    at = torch.nn.functional.pad(declined, (0, scores.logps.shape[1] - declined.shape[1]))
    assert bool((other.logps[at] >= scores.logps[at]).all())
    assert bool((other.logps[at] > scores.logps[at]).any())
    torch.testing.assert_close(other.logps[~at], scores.logps[~at])
    scores.logps.sum().backward()
    assert lm.extra["group_decoder"].mlp[-1].weight.grad.isfinite().all()


@pytest.mark.parametrize("threshold", [0.0, 0.6])
@torch.no_grad()
def test_groups_come_as_often_as_their_log_probs_say(threshold: float) -> None:
    """Many draws of one group: the share of each outcome against exp(logp), all modes to end included."""
    lm, method = lively()
    equations = equations_of(lm, method)
    n = 8_000
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2, lm.width, generator=generator)
    columns = torch.ones(n, dtype=torch.float64)
    declined = set()
    for i in range(len(state)):
        for first_id in (equations.digit_ids[3], 7, equations.equals_id):
            uniform = torch.rand(6, n, generator=generator, dtype=torch.float64)
            most = torch.full((n,), 2 + i % 2)
            rules = Rules(
                units=most,
                most_units=2 + i % 2,
                temperature=columns,
                top_p=columns,
                modes=DrawModes(greedy=False, plain=True, nucleus=False),
                confidence_threshold=threshold * columns,
                has_threshold=threshold > 0,
                uniform=lambda place, u=uniform: u[place],
                equations=equations,
                unites_digits=columns > 0,
            )
            found = choose_groups(lm, state[i].expand(n, -1), torch.full((n,), first_id), rules)
            declined |= {int(which) for _, which in check_shares(found, 2e-4)}
    if threshold == 0:
        assert {Ending.START, Ending.DIGIT_OR_START} <= declined


@torch.no_grad()
def test_a_threshold_is_asked_behind_numbers_and_signs_alone() -> None:
    """No token reaches a threshold of 1: groups end where a number could go on or begins, and nowhere else."""
    lm, method = lively()
    equations = equations_of(lm, method)
    n = 500
    generator = torch.Generator().manual_seed(0)
    state_ND = torch.randn(n, lm.width, generator=generator)
    ones = torch.ones(n, dtype=torch.float64)
    sizes = {}
    for first_id in (equations.digit_ids[3], equations.sign_ids[1], 7):
        uniform = torch.rand(12, n, generator=generator, dtype=torch.float64)
        rules = Rules(
            units=torch.full((n,), 3),
            most_units=3,
            temperature=ones,
            top_p=ones,
            modes=DrawModes(greedy=False, plain=True, nucleus=False),
            confidence_threshold=ones,
            has_threshold=True,
            uniform=lambda place, u=uniform: u[place],
            equations=equations,
            unites_digits=ones > 0,
        )
        ids = choose_groups(lm, state_ND, torch.full((n,), first_id), rules).ids
        sizes[first_id] = (ids != -1).sum(1)
    # Behind a digit that begins a group a number is open. Behind any other token none is, and three may stand together.
    assert (sizes[equations.digit_ids[3]] == 1).all()
    assert sizes[equations.sign_ids[1]].max() == 1
    assert sizes[7].max() == 3


# Bad values, checkpoints


def test_a_wrong_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match="method.grouping must be one of tokens, equations, got 'words'"):
        registry.build("sequential", {"grouping": "words"})


def test_a_token_that_the_tokenizer_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="method.grouping equations: this tokenizer has no token '-'"):
        made("gemma3", grouping="equations")


def test_signs_that_are_joined_to_spaces_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Byte-level tokenizers, SmolLM2's and Qwen's among them, write " =" as one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        special_tokens=["<eos>", "###"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["4 / 2 = 2", "3 + 1 = 4", "9 - 8 = 1", "2 * 2 = 4"] * 9, trainer)
    template = Template(TemplateConfig(), PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>"))
    equations = Equations.of(template)
    joined, apart, words = ("48 / 2 = 24",), ("<<48/2=24>>", "24-8=16"), ("Half of them.",)
    assert equations.are_seen(template, [apart, words, ()])
    assert not equations.are_seen(template, [joined])
    assert not equations.are_seen(template, [("48/2 = 24",)])
    assert equations.are_seen(template, [apart] * 9 + [joined])
    assert not equations.are_seen(template, [apart] * 8 + [joined] * 2)
    # Auto then chooses tokens, and a recipe that names equations is warned.
    reader = RowReader("tiny", LlamaConfig(), template)
    for steps in (joined, apart):
        rows = [Example(str(i), "q", steps, "1") for i in range(30)]
        found = facts_of(reader, rows, device="cpu")
        assert (found.equations, found.digits, found.signs) == (True, True, steps == apart)
    # It leaves out the spaces, but none that parts two numbers.
    dense = without_spaces(
        Example("0", "q", ("48 / 2 = 24", "<<( 3 + 1 ) * 2 = 8>>", "3 1/2 = 3.5", "Half of - them."), "1")
    )
    assert dense.steps == ("48/2=24", "<<(3+1)*2=8>>", "3 1/2=3.5", "Half of - them.")
    lm, method = made("llama", grouping="equations")
    lm.template = template
    capsys.readouterr()
    method.prepare(lm, [Example("0", "q", apart, "1")])
    assert capsys.readouterr().err == ""
    method.prepare(lm, [Example("0", "q", joined, "1")])
    assert "signs and = are no tokens by themselves" in capsys.readouterr().err


def test_a_checkpoint_thinks_as_before(tmp_path: Path) -> None:
    lm, method = lively()
    pretrained.save(lm, method, tmp_path / "model", {}, "")
    again, method_again = pretrained.load(tmp_path / "model")
    assert method_again.config == method.config
    ours: Tensor = matrices(lm.extra["digit_maps"])
    torch.testing.assert_close(matrices(again.extra["digit_maps"]), ours)
