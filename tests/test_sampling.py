"""Draws: exact at the edges, distributed as the softmax says, without a sort, a function of the row alone."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colar.ops import noise, sampling
from colar.ops.sampling import probability, sample_tokens, token_logps

LAST = 1 - 2**-53
"""The largest uniform number."""


def draws(n: int, seed: int = 0) -> Tensor:
    return noise.uniform(noise.keys(torch.tensor([seed])), n)[0]


def sample(logits_V: Tensor, uniform_N: Tensor, temperature: float = 1, top_p: float = 1) -> Tensor:
    """The ids that one row's logits give at each uniform number."""
    n = len(uniform_N)
    columns = [torch.full((n,), value, dtype=torch.float64) for value in (temperature, top_p)]
    return sample_tokens(logits_V.expand(n, -1).clone(), *columns, uniform_N)


def kept_by_sorting(probs_V: Tensor, top_p: float) -> Tensor:
    """The nucleus of one row, as bools, by a stable sort in float64: the definition."""
    values, order = probs_V.double().sort(descending=True, stable=True)
    before = values.cumsum(0) - values
    kept = torch.zeros_like(probs_V, dtype=torch.bool)
    kept[order[before < top_p * values.sum()]] = True
    return kept


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """P of a chi-square statistic as large as this, cells that expect fewer than 10 taken together."""
    n = counts.sum()
    expected = probs.double() * n
    small = expected < 10
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    found = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    if expected[-1] < 10:
        expected, found = expected[:-1], found[:-1]
    statistic = ((found - expected).square() / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("size", [1, 2, 7, 255, 256, 257, 513, 1000])
def test_a_draw_is_the_first_id_whose_cumulated_probability_exceeds_the_number(size):
    logits = 2 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    ends = logits.double().softmax(-1).cumsum(-1)
    uniform = draws(400, size)
    uniform = uniform[(ends[:, None] - uniform).abs().amin(0) > 1e-6]  # not where rounding decides
    expected = (ends[:, None] <= uniform).sum(0)
    assert sample(logits, uniform).tolist() == expected.tolist()


@pytest.mark.parametrize("top_p", [1, 1 - 1e-9, 0.9])
@pytest.mark.parametrize("size", [5, 256, 300, 1024])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
def test_a_token_of_probability_zero_is_never_drawn(size, uniform, top_p):
    """At both ends of the row, of its blocks, and in whole blocks; nor by an underflow."""
    alone = [0, size // 2, size - 2, min(255, size - 1)]
    for token in alone:
        for low in (-math.inf, -500.0):
            logits = torch.full((size,), low)
            logits[token] = 3.0
            assert sample(logits, torch.tensor([uniform], dtype=torch.float64), top_p=top_p).item() == token
    logits = torch.full((size,), -math.inf)
    logits[1::2] = torch.randn(size // 2, generator=torch.Generator().manual_seed(0))
    ids = sample(logits, torch.cat([draws(500), torch.tensor([0.0, LAST])]), top_p=top_p)
    assert (ids % 2 == 1).all()


def test_the_last_token_is_not_drawn_by_rounding():
    """Float32 sums of 50,000 terms are off by far more than the last token's probability."""
    logits = torch.zeros(50_001)
    logits[-1] = -12.0
    uniform = (
        1 - draws(200) * 1e-5
    )  # the last hundred-thousandth holds the last token but one, and little more
    uniform = uniform.clamp(max=LAST)
    ids = sample(logits, uniform)
    share = (ids == 50_000).double().mean().item()
    expected = math.exp(-12) / (50_000 + math.exp(-12)) / 1e-5
    assert share <= 10 * expected + 1e-9
    assert sample(logits[:-1], torch.tensor([LAST], dtype=torch.float64)).item() == 49_999


@pytest.mark.parametrize(("spread", "temperature"), [(4.0, 0.5), (1.0, 1.0), (4.0, 1.7)])
def test_draws_are_distributed_as_multinomial_draws_are(spread, temperature):
    n, size = 40_000, 300
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(1))
    found = torch.cat([sample(logits, part, temperature) for part in draws(n).split(5000)])
    probs = (logits.double() / temperature).softmax(-1)
    theirs = torch.multinomial(probs, n, replacement=True, generator=torch.Generator().manual_seed(2))
    assert chi_square_p(torch.bincount(theirs, minlength=size), probs) > 1e-3  # the test itself
    assert chi_square_p(torch.bincount(found, minlength=size), probs) > 1e-3
    wrong = (logits.double() / (temperature * 1.1)).softmax(-1)
    assert chi_square_p(torch.bincount(found, minlength=size), wrong) < 1e-3  # and it can fail


@pytest.mark.parametrize(("spread", "top_p"), [(4.0, 0.9), (1.0, 0.9), (0.3, 0.5), (2.0, 1 - 1e-9)])
def test_a_nucleus_is_the_one_that_a_sort_finds(spread, top_p):
    """In the window (spread 4) and beyond it: never outside, and distributed as inside."""
    n, size = 6_000, 300
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(3))
    probs = logits.softmax(-1)
    kept = kept_by_sorting(probs, top_p)
    _, _, holds = sampling.in_window(probs[None] / probs.max(), top_p * probs.sum()[None] / probs.max())
    assert bool(holds) == (spread == 4)
    inside = torch.where(kept, probs.double(), 0)
    found = torch.cat([sample(logits, part, top_p=top_p) for part in draws(n).split(5000)])
    assert kept[found].all()
    assert chi_square_p(torch.bincount(found, minlength=size), inside / inside.sum()) > 1e-3


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_equals_at_the_edge_stay_by_their_ids(seed, top_p):
    """Logits of few different values, as bfloat16's are: the window and the search agree with a stable sort."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(seed)).mul(3).round()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    goal = top_p * sampling.mass(weights)
    expected = torch.stack([kept_by_sorting(row, top_p) for row in weights])
    assert torch.equal(sampling.in_all(weights, goal) > 0, expected)
    for window in (4, 64, 300):
        ids, kept, holds = sampling.in_window(weights, goal, window)
        for row in range(2):
            found = ids[row][kept[row] > 0].tolist()
            if holds[row]:
                assert found == expected[row].nonzero()[:, 0].tolist()
            else:
                assert (
                    window < expected[row].sum() + (weights[row] == weights[row][expected[row]].min()).sum()
                )
    assert not sampling.in_window(weights, goal, 300)[2].logical_not().any()


def test_window_and_search_draw_the_same_token(monkeypatch):
    logits = 3 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(4))
    columns = (torch.ones(200), torch.full((200,), 0.8, dtype=torch.float64), draws(200))
    wide = sample_tokens(logits, *columns)
    narrow = sampling.in_window
    monkeypatch.setattr(sampling, "in_window", lambda weights, goal: narrow(weights, goal, 2))
    assert sample_tokens(logits, *columns).tolist() == wide.tolist()
    assert len(wide.unique()) > 50


def test_rows_of_all_kinds_are_what_they_are_alone():
    """Greedy, plain and nucleus rows, tied and not, in one batch and one by one, and in another order."""
    n = 48
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(n, 777, generator=generator) * torch.tensor([0.2, 2.0, 5.0]).repeat(16)[:, None]
    logits[::2] = logits[::2].round()
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.5] * 12, dtype=torch.float64)
    top_p = torch.tensor([0.9, 1.0, 0.5] * 16, dtype=torch.float64)
    columns = (logits, temperature, top_p, draws(n))
    together = sample_tokens(*columns).tolist()
    for i in range(n):
        assert sample_tokens(*(column[i : i + 1] for column in columns)).item() == together[i]
    flipped = sample_tokens(*(column.flip(0) for column in columns))
    assert flipped.flip(0).tolist() == together
    assert together[::4] == logits.argmax(-1)[::4].tolist()


class Watch(TorchDispatchMode):
    """Notes the operations and the largest float64 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sorted = 0
        self.doubles = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "sort" in func.__name__:
            self.sorted = max(self.sorted, args[0].numel())
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.dtype == torch.float64:
                self.doubles = max(self.doubles, one.numel())
        return result


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_nothing_as_large_as_the_vocabulary_is_sorted_or_float64(top_p):
    logits = 6 * torch.randn(4, 30_000, generator=torch.Generator().manual_seed(6))
    with Watch() as watch:
        sample_tokens(logits, torch.ones(4), torch.full((4,), top_p), draws(4))
    assert watch.sorted < 4 * 300
    assert watch.doubles < 4 * 5000


def test_the_probability_of_one_token_is_the_softmax_there():
    logits = 3 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(9))
    for token in (0, 999):
        torch.testing.assert_close(probability(token, logits), logits.softmax(-1)[:, token])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_log_probs_are_those_of_the_softmax(temperature):
    """Also where the probability itself is 0 in float32."""
    logits = 60 * torch.randn(50, 600, generator=torch.Generator().manual_seed(10))
    ids = torch.arange(50)
    found = token_logps(logits, torch.full((50,), temperature, dtype=torch.float64), ids)
    scaled = logits.double() / (temperature or 1.0)
    torch.testing.assert_close(found, scaled.log_softmax(-1)[ids, ids].float())
    assert found.min() < -105
