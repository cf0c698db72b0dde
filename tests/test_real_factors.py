"""Factors that need not be whole, and groups that end by confidence: losses, thoughts and draws by plain loops."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import EXAMPLES, FAMILIES
from sequential import check_shares, encoded, latent, made
from torch import Tensor

from colar import files
from colar.cli import main
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.look.thought import read_thoughts
from colar.methods import grouping, pretrained, registry
from colar.methods.base import Batch, Row, listed
from colar.methods.grouping import parse_factors
from colar.methods.sequential import Sequential, SequentialConfig, SequentialParams
from colar.methods.sequential.choice import Rules, choose_groups
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.ops.sampling import DrawModes
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig

GREEDY = Decoding(max_latents=7, max_completion_length=4)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=7, max_completion_length=4)
WHOLE = [1, 2, 3, 4, 5]
REAL = [1, 1.25, 1.5, 1.75, 2.5, 2.75, 3.33, 4.5, 5]


def phase_of(seed: int, sample: int = 0) -> float:
    return grouping.draw_phase(torch.tensor([seed]), torch.tensor([sample])).item()


def most_of(k: int, c: float, phase: float) -> int:
    return math.floor((k + 1) * c + phase) - math.floor(k * c + phase)


# The loss by a loop


def naive_sizes(n: int, c: float, phase: float, bounds: list[int] | None = None) -> list[int]:
    """Group after group; one that starts at token t has at most bounds[t] tokens."""
    sizes: list[int] = []
    t = 0
    while t < n:
        size = min(most_of(len(sizes), c, phase), n - t)
        if bounds:
            size = min(size, bounds[t])
        sizes.append(size)
        t += size
    return sizes


def naive_window(chain: list[int], start: int, most: int, separator: int) -> list[int]:
    """The tokens from `start` on, and the separator behind them where there is room."""
    return [*chain, separator][start : start + most]


def naive_bounds(lm: LatentLM, row: Row) -> list[int]:
    """How many tokens a group has that starts at each token: those before the first of low confidence."""
    chain = row.chain
    hidden = naive_hidden(lm, row, [1] * len(chain))
    bounds = []
    for t in range(len(chain)):
        most = math.ceil(row.params.compression_factor)
        window = naive_window(chain, t, most, lm.template.separator_id)
        bound = 1
        for logp in naive_logps(lm, hidden[t], window)[1:]:
            if math.exp(logp) < row.params.confidence_threshold:
                break
            bound += 1
        bounds.append(bound)
    return bounds


def naive_windows(
    chain: list[int], sizes: list[int], c: float, phase: float, separator: int
) -> list[list[int]]:
    """What each group's position is asked for: its tokens, and the one that it was cut before."""
    windows, start = [], 0
    for k, size in enumerate(sizes):
        windows.append(naive_window(chain, start, min(most_of(k, c, phase), size + 1), separator))
        start += size
    return windows


def embed(lm: LatentLM, ids: list[int]) -> Tensor:
    return lm.embed(torch.tensor(ids))


def naive_hidden(lm: LatentLM, row: Row, sizes: list[int]) -> Tensor:
    """A forward over the question, these groups' latents and the answer: states from the question's end on."""
    fed, start = [*embed(lm, row.question)], 0
    for size in sizes:
        fed.append(latent(lm, row.chain[start : start + size]))
        start += size
    fed += [*embed(lm, row.answer)]
    return lm.hidden(torch.stack(fed)[None])[0, len(row.question) - 1 :]


def naive_logps(lm: LatentLM, state: Tensor, labels: list[int]) -> list[float]:
    """Log-prob of each label of one position, given those before it."""
    logps = []
    for j, token in enumerate(labels):
        if j:
            state = lm.extra["group_decoder"](state, embed(lm, [labels[j - 1]])[0])
        logps.append(lm.logits(state).log_softmax(-1)[token].item())
    return logps


@torch.no_grad()
def naive(lm: LatentLM, row: Row) -> tuple[float, list[int]]:
    """One row's loss, and the sizes of its groups."""
    params, separator, chain = row.params, lm.template.separator_id, row.chain
    c, phase = params.compression_factor, phase_of(row.seed)
    bounds = naive_bounds(lm, row) if params.confidence_threshold > 0 else None
    sizes = naive_sizes(len(chain), c, phase, bounds)
    hidden = naive_hidden(lm, row, sizes)
    labels = naive_windows(chain, sizes, c, phase, separator) + [[token] for token in row.answer]
    means = []
    for k, label in enumerate(labels):
        logps = naive_logps(lm, hidden[k], label)
        means.append(-sum(logps) / len(logps))
    return sum(means) / len(means), sizes


def sizes_of(found: Tensor, row: int) -> list[int]:
    return [size for size in found[row].tolist() if size]


@pytest.mark.parametrize(
    ("family", "factors"), [("llama", REAL), ("gemma3", [1.25]), ("gpt2", [1.5, 2.75])], ids=str
)
def test_the_loss_of_a_real_c_is_a_naive_loop(family: str, factors: Any) -> None:
    lm, method = made(family, compression_factors=factors)
    rows = encoded(lm, method)
    batch = Batch.collate(rows)
    found, sizes = method.loss(lm, batch)["ce"].tolist(), method.training_thoughts(lm, batch)[1]
    for i, row in enumerate(rows):
        expected, expected_sizes = naive(lm, row)
        assert sizes_of(sizes, i) == expected_sizes
        assert found[i] == pytest.approx(expected, rel=1e-4)


THRESHOLDS = [0, 1e-9, 1e-4, 0.3]
"""Random models are sure of little: those in the middle cut some groups and leave others."""


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_the_loss_with_a_threshold_is_a_naive_loop(family: str) -> None:
    lm, method = made(family, compression_factors=[1.5, 2, 2.75, 5], confidence_thresholds=THRESHOLDS)
    rows = encoded(lm, method, times=3)
    assert {row.params.confidence_threshold for row in rows} == set(THRESHOLDS)
    batch = Batch.collate(rows)
    found, sizes = method.loss(lm, batch)["ce"].tolist(), method.training_thoughts(lm, batch)[1]
    kinds = set()
    for i, row in enumerate(rows):
        expected, expected_sizes = naive(lm, row)
        assert sizes_of(sizes, i) == expected_sizes, (i, row.params)
        assert found[i] == pytest.approx(expected, rel=1e-4)
        uncut = naive_sizes(len(row.chain), row.params.compression_factor, phase_of(row.seed))
        every = len(expected_sizes) == len(row.chain)
        kinds.add("none" if expected_sizes == uncut else "all" if every else "some")
    # Or else the test could not tell one kind of threshold from another.
    assert kinds == {"none", "some", "all"}


def test_a_threshold_trains_rows_without_any_reasoning() -> None:
    """A batch may hold nothing but questions that are answered at once."""
    lm, method = made(compression_factors=[3], confidence_thresholds=[0.5])
    rows = [method.encode(lm.template, EXAMPLES[2], Random(i), 0.0) for i in range(2)]
    assert all(not row.chain for row in rows)
    found = method.loss(lm, Batch.collate(rows))["ce"].tolist()
    assert found == pytest.approx([naive(lm, row)[0] for row in rows], rel=1e-4)


def test_cut_groups_are_trained() -> None:
    lm, method = made(compression_factors=[3], confidence_thresholds=[1e-4])
    batch = Batch.collate(encoded(lm, method))
    assert method.training_thoughts(lm, batch)[0].requires_grad
    method.loss(lm, batch)["ce"].sum().backward()
    assert lm.extra["group_decoder"].mlp[0].weight.grad.abs().sum() > 0


# Thinking


def requests() -> list[Request]:
    """Whole and other factors, thresholds, and decodings, all in one list."""
    asked = []
    factors = (1, 1.25, 1.5, 2, 2.75, 5)
    thresholds = (0, 0.3, 0.9, 0.05)
    for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for i in range(24):
            params = SequentialParams(factors[i % 6], confidence_threshold=thresholds[i // 6])
            question = EXAMPLES[(i + i // 6) % 6].question
            asked.append(Request(f"{mode}/{i}", question, params, decoding, i, i % 3, keep_latents=True))
    return asked


def thinker(family: str = "llama", merge: str = "sqrt") -> tuple[LatentLM, Sequential]:
    config = {"compression_factors": REAL, "confidence_thresholds": [0, 0.5], "merge": merge}
    return made(family, live=True, **config)


@pytest.mark.parametrize(
    ("family", "merge"), [("llama", "sqrt"), ("qwen2", "ordered"), ("gemma3", "sqrt"), ("gpt2", "ordered")]
)
def test_the_engine_equals_the_reference(family: str, merge: str) -> None:
    lm, method = thinker(family, merge)
    asked = requests()
    # A quarter, another one in each family: each factor with each threshold under both decodings, over all of them.
    first = FAMILIES.index(family)
    some = [each for i, each in enumerate(asked) if (i + i // 6 + i // 24) % 4 == first]
    assert len({each.params.compression_factor for each in some}) > 2
    assert len({each.params.confidence_threshold for each in some}) == 4
    expected = [reference.complete(lm, method, request) for request in some]
    assert len({done.length for done in expected}) > 1
    wanted = {done.request.id: done for done in expected}
    # A row by itself is what the reference has: some of them show it.
    for max_batch, order in ((1, some[::5]), (3, some[::-1]), (64, some)):
        for mine in Engine(lm, method, max_batch).generate(order):
            theirs, where = wanted[mine.request.id], (max_batch, mine.request.id)
            assert (mine.token_ids, mine.length) == (theirs.token_ids, theirs.length), where
            for one, other in zip(mine.thought_info(), theirs.thought_info(), strict=True):
                assert one["group_ids"].tolist() == other["group_ids"].tolist(), where
                torch.testing.assert_close(one["logp"], other["logp"], rtol=1e-3, atol=1e-4)


def ids_of(info: Any) -> list[int]:
    return [i for i in info["group_ids"].tolist() if i >= 0]


def test_groups_are_as_large_as_their_phase_says_and_no_token_in_them_is_unsure() -> None:
    lm, method = thinker()
    separator = lm.template.separator_id
    seen = set()
    asked = [
        dataclasses.replace(each, id=f"{each.id}/{s}", sample=s) for each in requests() for s in range(2)
    ]
    for request, done in zip(asked, Engine(lm, method, 64).generate(asked), strict=True):
        c, threshold = request.params.compression_factor, request.params.confidence_threshold
        phase = phase_of(request.seed, request.sample)
        for k, info in enumerate(done.thought_info()):
            ids = ids_of(info)
            most = grouping.nominal_units(
                torch.tensor(k), torch.tensor(c), torch.tensor(phase).double()
            ).item()
            assert most == most_of(k, c, phase)
            stopped = ids[-1] == separator
            assert ids[0] != separator
            assert separator not in ids[:-1]
            assert len(ids) <= most
            early = len(ids) < most and not stopped
            # Without a threshold nothing but the separator ends a group before its size.
            assert threshold or not early
            later = info["group_logps"][1 : len(ids)].exp()
            assert bool((later >= threshold).all())
            of_tokens = info["group_logps"][: len(ids)].sum().item()
            if info["endings"] >= 0:
                assert early
                assert info["logp"] < of_tokens
            else:
                assert info["logp"] == pytest.approx(of_tokens, rel=1e-5)
            assert bool((info["group_logps"][len(ids) :] == 0).all())
            kept = ids[:-1] if stopped else ids
            expected = embed(lm, kept).sum(0) / math.sqrt(len(kept))
            torch.testing.assert_close(done.latents[k], expected)
            seen.add((threshold > 0, "early" if early else "separator" if stopped else "full"))
            if threshold:
                seen.add("low_confidence")
    assert {(True, "early"), (True, "full"), (False, "separator"), (False, "full")} <= seen


def test_a_group_ends_before_a_token_that_is_below_the_threshold() -> None:
    """The first thought with a threshold is that without one, up to the first later token of low confidence."""
    lm, method = thinker()
    cut = set()
    asked = [request for request in requests() if request.decoding == GREEDY]
    whole = [
        dataclasses.replace(each, params=dataclasses.replace(each.params, confidence_threshold=0))
        for each in asked
    ]
    pairs = zip(Engine(lm, method).generate(whole), Engine(lm, method).generate(asked), strict=True)
    for request, (free, gated) in zip(asked, pairs, strict=True):
        if not free.thought_info():
            assert not gated.thought_info()
            continue
        ids, logps = ids_of(free.thought_info()[0]), free.thought_info()[0]["group_logps"].tolist()
        kept = 1
        while kept < len(ids) and math.exp(logps[kept]) >= request.params.confidence_threshold:
            kept += 1
        assert ids_of(gated.thought_info()[0]) == ids[:kept]
        cut.add(kept < len(ids))
    assert cut == {True, False}


@torch.no_grad()
def test_a_threshold_of_1_thinks_token_by_token() -> None:
    """The tokens of a chain of thought from the same prompt: one token a forward, whatever c is."""
    lm, method = thinker()
    lengths = set()
    for example in EXAMPLES:
        for c in (1.5, 5):
            params = SequentialParams(c, confidence_threshold=1)
            done = reference.complete(
                lm, method, Request("x", example.question, params, GREEDY, keep_latents=True)
            )
            fed = embed(lm, lm.template.question(example.question, method.speed_text(params)))
            chain: list[int] = []
            while len(chain) < GREEDY.max_latents:
                token = int(lm.logits(lm.hidden(fed[None])[0, -1]).argmax())
                if token == lm.template.separator_id:
                    break
                chain.append(token)
                fed = torch.cat([fed, embed(lm, [token])])
            assert [ids_of(info) for info in done.thought_info()] == [[token] for token in chain]
            lengths.add(len(chain))
    assert len(lengths) > 1


# What training draws


@pytest.mark.parametrize("factors", ["1..5", [1, 2, 2, 2], [1, 1.5, 2]], ids=str)
@pytest.mark.parametrize("name", ["colar", "sequential"])
def test_listed_factors_are_drawn_as_ever(factors: Any, name: str) -> None:
    lm, method = made(compression_factors=WHOLE)
    method = registry.build(name, {"compression_factors": factors})
    values = range(1, 6) if factors == "1..5" else factors
    for i in range(50):
        rng = Random(i)
        c = rng.choice(list(values))
        row = method.encode(lm.template, EXAMPLES[0], Random(i), 0.0)
        assert (row.params.compression_factor, row.seed) == (c, rng.getrandbits(62))


def test_thresholds_are_drawn_after_everything_else() -> None:
    lm, method = made(compression_factors=WHOLE, confidence_thresholds=[0, 0.8, 0.9])
    one = registry.build("sequential", {"compression_factors": WHOLE, "confidence_thresholds": [0.7]})
    for i in range(50):
        rng = Random(i)
        c, seed, threshold = rng.choice(WHOLE), rng.getrandbits(62), rng.choice((0, 0.8, 0.9))
        row = method.encode(lm.template, EXAMPLES[0], Random(i), 0.0)
        assert row.seed == seed
        assert row.params == SequentialParams(c, confidence_threshold=threshold)
        # One value is no draw.
        alone = one.encode(lm.template, EXAMPLES[0], Random(i), 0.0)
        assert (alone.seed, alone.params) == (seed, SequentialParams(c, confidence_threshold=0.7))


def test_draws_of_one_example_have_each_threshold_once() -> None:
    lm, method = made(compression_factors=[1, 2, 2], confidence_thresholds=[0, 0.8, 0.9])
    for i in range(20):
        rows = method.encode_draws(lm.template, EXAMPLES[0], Random(i), 0.0, 4)
        thresholds = [row.params.confidence_threshold for row in rows]
        assert sorted(thresholds[:3]) == [0, 0.8, 0.9]
        assert thresholds[3] in (0, 0.8, 0.9)
        factors = [row.params.compression_factor for row in rows]
        assert sorted(factors[:3]) == [1, 2, 2]


@pytest.mark.parametrize(
    ("given", "values", "text"),
    [
        ("1..3", (1, 2, 3), "1, 2, 3"),
        ("2..2", (2,), "2"),
        ([1, 1.5, 1.5], (1, 1.5, 1.5), "1, 1.5"),
    ],
)
def test_factors_are_read(given: Any, values: tuple[float, ...], text: str) -> None:
    factors = parse_factors(given)
    assert (factors, listed(factors)) == (values, text)
    assert SequentialConfig(compression_factors=given).most_units == math.ceil(max(values))


@pytest.mark.parametrize(
    "given", ["", "..", "1..", "1", "nan..5", "1..inf", "1.0..5.0", "1..2.5", "1e0..5", "5..1", 3, None]
)
def test_factors_that_make_no_sense_are_refused_by_name(given: Any) -> None:
    with pytest.raises(ValueError, match="compression_factor"):
        SequentialConfig(compression_factors=given)


# What is refused, and what is warned of


@pytest.mark.parametrize(
    ("config", "params", "message"),
    [
        ({}, {"compression_factor": 3.01}, "compression_factor 3.01 is above what was trained"),
        ({"compression_factors": [1, 1.5]}, {"compression_factor": 2}, "2 is above what was trained"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused(config: Any, params: Any, message: str) -> None:
    method = registry.build("sequential", {"compression_factors": [1, 2, 3], **config})
    with pytest.raises(ValueError, match=message):
        method.check_params(SequentialParams(**params))


LEFT_OUT = "compression_factor 1.5 was not trained"
UNGATED = "confidence_threshold 0.9: groups that end early were not trained"


@pytest.mark.parametrize(
    ("config", "params", "expected"),
    [
        ({}, {"compression_factor": 2}, []),
        ({}, {"compression_factor": 1.5}, [LEFT_OUT]),
        ({"compression_factors": [1, 1.5, 3]}, {"compression_factor": 1.5}, []),
        ({}, {"compression_factor": 2, "confidence_threshold": 0.9}, [UNGATED]),
        ({}, {"compression_factor": 1.5, "confidence_threshold": 0.9}, [LEFT_OUT, UNGATED]),
        ({"confidence_thresholds": [0, 0.8]}, {"compression_factor": 2, "confidence_threshold": 0.9}, []),
    ],
)  # fmt: skip
def test_what_was_not_trained_is_said(config: Any, params: Any, expected: list[str]) -> None:
    method = registry.build("sequential", {"compression_factors": [1, 2, 3], **config})
    said = method.check_params(SequentialParams(**params))
    if not expected:
        assert said is None
    for text in expected:
        assert text in said


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "0.5", True, None])
def test_thresholds_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="confidence_threshold must be a number, from 0 to 1, got"):
        SequentialParams(2, confidence_threshold=value)
    with pytest.raises(ValueError, match=r"method\.confidence_thresholds must be a number, from 0 to 1, got"):
        SequentialConfig(confidence_thresholds=(0, value))


@pytest.mark.parametrize("value", [0.99, 0, -2, math.nan, math.inf, "2"])
def test_factors_below_1_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="compression_factor must be a number, 1 or more, got"):
        SequentialParams(value)
    with pytest.raises(
        ValueError, match=r"each of method\.compression_factors must be a number, 1 or more, got"
    ):
        SequentialConfig(compression_factors=(value,))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"confidence_thresholds": []}, r"method.confidence_thresholds must be a list of numbers \(\[0\]: none\)"),
        ({"confidence_thresholds": 0.5}, "method.confidence_thresholds must be a list"),
    ],
)  # fmt: skip
def test_wrong_thresholds_of_training_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.build("sequential", config)


def test_factors_that_are_not_whole_are_scored_like_others() -> None:
    lm, method = thinker()
    config = GrpoConfig(
        num_generations=2, max_latents=4, max_completion_length=3, compression_factors=(1.5, 2.75)
    )
    outputs = rollout.roll_out(lm, method, config, EXAMPLES, seed=3, generation=1)
    tensors = rollout.collate(outputs, lm.width)
    scores = method.logps(lm, tensors)
    engine = rollout.engine_logps(method, outputs, tensors)
    torch.testing.assert_close(scores.logps[scores.mask], engine[scores.mask], rtol=1e-3, atol=1e-3)
    tensors.params["confidence_threshold"][1] = 0.5
    with pytest.raises(ValueError, match="confidence_threshold must be 0 or above 0.5 in outputs that are"):
        method.logps(lm, tensors)


@pytest.mark.parametrize(("shortlist", "latent_temperature"), [(False, 0.3), (True, 1.0)])
def test_groups_that_end_early_are_scored(shortlist: bool, latent_temperature: float) -> None:
    """By training as by the engine: the tokens of a group, and that another draw would have let it go on."""
    lm, method = made(live=True, shortlist=shortlist, compression_factors=[5], confidence_thresholds=[0, 0.7])
    sharpen(lm)
    config = GrpoConfig(
        num_generations=12,
        max_latents=6,
        max_completion_length=3,
        compression_factors=(5,),
        confidence_thresholds=(0.7,),
        latent_temperature=latent_temperature,
    )
    outputs = rollout.roll_out(lm, method, config, EXAMPLES, seed=3, generation=1)
    assert all(output.completion.request.params.confidence_threshold == 0.7 for output in outputs)
    tensors = rollout.collate(outputs, lm.width)
    sizes = (tensors.group_ids >= 0).sum(-1)
    assert sizes.max() > 1
    declined = tensors.endings >= 0
    assert declined.any()
    scores = method.logps(lm, tensors)
    engine = rollout.engine_logps(method, outputs, tensors)
    torch.testing.assert_close(scores.logps[scores.mask], engine[scores.mask], rtol=1e-3, atol=1e-3)
    # It counts: without it, a group that was ended by a draw would be as likely as its tokens alone.
    without = dataclasses.replace(tensors, endings=torch.full_like(tensors.endings, -1))
    other = method.logps(lm, without)
    at = torch.nn.functional.pad(declined, (0, scores.logps.shape[1] - declined.shape[1]))
    assert bool((other.logps[at] > scores.logps[at]).all())
    torch.testing.assert_close(other.logps[~at], scores.logps[~at])
    # The gradient is finite, also where the token declined was nearly certain.
    scores.logps.sum().backward()
    assert lm.extra["group_decoder"].mlp[-1].weight.grad.isfinite().all()


def sharpen(lm: LatentLM) -> None:
    """Random models are sure of nothing: the decoder gets larger strides."""
    with torch.no_grad():
        lm.extra["group_decoder"].mlp[-1].weight.mul_(SHARPER)


SHARPER = 12.0


@pytest.mark.parametrize("threshold", [0.1, 0.6])
@torch.no_grad()
def test_groups_come_as_often_as_their_log_probs_say(threshold: float) -> None:
    """Many draws of one group: the share of each outcome against exp(logp), the end by an unlikely draw included."""
    lm, _ = made(live=True, compression_factors=[3])
    sharpen(lm)
    n = 6_000
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2, lm.width, generator=generator)
    columns = torch.ones(n, dtype=torch.float64)
    kinds = set()
    for i in range(len(state)):
        uniform = torch.rand(3, n, generator=generator, dtype=torch.float64)
        rules = Rules(
            units=torch.full((n,), 3),
            most_units=3,
            unites_digits=columns > 0,
            temperature=columns,
            top_p=columns,
            modes=DrawModes(greedy=False, plain=True, nucleus=False),
            confidence_threshold=threshold * columns,
            has_threshold=True,
            uniform=lambda place, u=uniform: u[place],
        )
        first = torch.full((n,), 7)
        found = choose_groups(lm, state[i].expand(n, -1), first, rules)
        for ids, declined in check_shares(found):
            kinds.add((int((ids >= 0).sum()), bool(declined >= 0)))
    assert {(1, True), (3, False)} <= kinds


def test_a_group_that_ended_unsure_is_read_as_such() -> None:
    lm, method = thinker()
    seen = set()
    asked = requests()
    for request, done in zip(asked, Engine(lm, method).generate(asked), strict=True):
        phase = phase_of(request.seed, request.sample)
        for k, (thought, info) in enumerate(
            zip(read_thoughts(lm, done, 3), done.thought_info(), strict=True)
        ):
            ids = ids_of(info)
            assert [token["id"] for token in thought["tokens"]] == [
                i for i in ids if i != lm.template.separator_id
            ]
            full = len(ids) == most_of(k, request.params.compression_factor, phase)
            assert thought["low_confidence"] == (not full and ids[-1] != lm.template.separator_id)
            assert request.params.confidence_threshold or not thought["low_confidence"]
            seen.add(thought["low_confidence"])
    assert seen == {True, False}


# The command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained sequential method on the built-in backbone, for c from 1 to 3."""
    folder = tmp_path_factory.mktemp("checkpoints") / "sequential"
    lm = LatentLM.from_backbone(backbones.load("tiny", seed=1))
    method = registry.build("sequential", {"compression_factors": [1, 1.5, 2, 3]})
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    pretrained.save(lm, method, folder, {"seed": 7, "label": ""}, "# card\n")
    return folder


SHORT = ["--max_latents", "5", "--max_completion_length", "3"]
GRID = ["--compression_factor", "1.5", "3", "--confidence_threshold", "0", "1"]


@pytest.mark.parametrize(
    ("command", "values", "message"),
    [
        ("generate", ["--confidence_threshold", "0.5", "1.5"], "confidence_threshold must be a number, from 0 to 1, got 1.5"),
        ("generate", ["--confidence_threshold", "-0.1"], "confidence_threshold must be a number, from 0 to 1, got -0.1"),
        ("generate", ["--confidence_threshold", "nan"], "confidence_threshold must be a number, got nan"),
        ("generate", ["--compression_factor", "0.9"], "compression_factor must be a number, 1 or more, got 0.9"),
        ("generate", ["--ratio", "2"], "ratio"),
        ("evaluate", ["--confidence_threshold", "0.5", "1.5"], "confidence_threshold must be a number, from 0 to 1, got 1.5"),
        ("inspect", ["--compression_factor", "0.9"], "compression_factor must be a number, 1 or more, got 0.9"),
    ],
)  # fmt: skip
def test_values_out_of_range_fail_before_weights_are_loaded(
    command: str, values: list[str], message: str, checkpoint: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    rest = ["q"] if command == "generate" else ["--limit", "2", "--output", str(tmp_path / "out.json")]
    assert main([command, str(broken), *rest, *values]) == 2
    assert message in capsys.readouterr().err


def test_what_a_checkpoint_cannot_do_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "q", "--compression_factor", "4", *SHORT]) == 2
    assert "compression_factor 4 is above what was trained (3)" in capsys.readouterr().err
    assert main(["generate", str(checkpoint), "q", "--confidence_threshold", "0.5", *SHORT]) == 0
    assert "groups that end early were not trained" in capsys.readouterr().err


def test_generate_answers_at_every_threshold(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "2 + 2?"}) + "\n")
    asked = ["generate", str(checkpoint), "--input", str(questions), *GRID, "--show_latents", *SHORT]
    assert main(asked) == 0
    out = capsys.readouterr().out
    unsure = {}
    for section in out.strip().split("\n\n"):
        asked_with = section.splitlines()[0].partition("  [")[2]
        unsure[asked_with.rstrip("]")] = section.count("  ?\n")
    assert unsure.pop("compression_factor 1.5") == unsure.pop("compression_factor 3") == 0
    # A threshold of 1 holds back all but a group's first token: at c = 1.5 every other group has no more anyway.
    assert unsure.pop("compression_factor 1.5, confidence_threshold 1") in (2, 3)
    assert unsure == {"compression_factor 3, confidence_threshold 1": 5}

    answers = tmp_path / "answers.jsonl"
    assert main([*asked, "--output", str(answers)]) == 0
    rows = [row for _, row in files.read_jsonl(answers)]
    pairs = {(row["params"]["compression_factor"], row["params"]["confidence_threshold"]) for row in rows}
    assert pairs == {(1.5, 0), (1.5, 1), (3, 0), (3, 1)}
    for row in rows:
        sizes = [len(thought) for thought in row["thoughts"]]
        assert len(sizes) == row["length"]
        if row["params"]["confidence_threshold"] == 1:
            assert set(sizes) == {1}
        else:
            assert max(sizes) == math.ceil(row["params"]["compression_factor"])


def test_thoughts_have_one_form(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", str(checkpoint), "How many?", "--compression_factor", "3", "--show_latents"]
    assert main([*asked, "--max_latents", "12", "--max_completion_length", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [line[:4].strip() for line in lines[:-1]]
    assert [number for number in numbers if number] == [str(n) for n in range(1, 13)]
    # Where one thought needs more lines, no thought has what is near in its first.
    assert sum(line.startswith("      near: ") for line in lines) == 12
    assert not any("near:" in line for line in lines if line[:4].strip())


def test_a_report_keeps_thresholds_apart(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    asked = ["evaluate", f"m={checkpoint}", "--limit", "3", *GRID, "--output", str(out), *SHORT]
    assert main(asked) == 0
    report = json.loads((out / "report.json").read_text())
    rows = {
        (row["params"]["compression_factor"], row["params"].get("confidence_threshold"))
        for row in report["rows"]
        if row["dataset"] == "arithmetic"
    }
    assert rows == {(1.5, None), (1.5, 1), (3, None), (3, 1)}
    assert all(row["n"] == 3 for row in report["rows"])
    assert len(list(files.read_jsonl(out / "records.jsonl"))) == 12
    table = (out / "report.md").read_text()
    assert "c=1.5 (confidence_threshold=1)" in table
    # Another threshold, asked for later, joins them.
    capsys.readouterr()
    assert main([*asked, "--confidence_threshold", "0.25"]) == 0
    again = json.loads((out / "report.json").read_text())
    assert {row["params"].get("confidence_threshold") for row in again["rows"]} == {None, 1, 0.25}


def test_inspect_tells_thresholds_apart(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "inspect.json"
    asked = [
        "inspect",
        f"m={checkpoint}",
        "--limit",
        "1",
        *GRID,
        "--output",
        str(out),
        *SHORT,
    ]
    assert main(asked) == 0
    systems = json.loads(out.read_text())["systems"]
    assert [each["params"] for each in systems] == [
        {"compression_factor": c, **threshold}
        for c in (1.5, 3)
        for threshold in ({}, {"confidence_threshold": 1})
    ]
    assert "c = 1.5 (confidence_threshold=1)" in capsys.readouterr().out
