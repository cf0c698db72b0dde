"""Compress against a brute-force loop, ragged rows by hand, noise as a function of its counters, sampling against its
definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.methods import grouping
from colar.methods.colar import pick_one
from colar.methods.grouping import compress, tokens_of_groups
from colar.methods.sequential.boundaries import Windows
from colar.ops import devices, noise, ragged
from colar.ops.sampling import sample_tokens


def by_hand(row, c, merge):
    """The definition, one group at a time."""
    out = []
    for k in range(math.ceil(len(row) / c)):
        group = [row[t] for t in range(len(row)) if math.floor(k * c) <= t < math.floor((k + 1) * c)]
        total = torch.stack(group).sum(0)
        out.append(total / (math.sqrt(len(group)) if merge == "sqrt" else len(group)))
    return out


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=4),
    factors=st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 1.5, 2.5]), min_size=4, max_size=4),
    merge=st.sampled_from(["sqrt", "mean"]),
    extra=st.integers(0, 3),
)
def test_compress_equals_a_loop(lengths, factors, merge, extra):
    torch.manual_seed(0)
    embeds = torch.randn(len(lengths), max(lengths) + extra, 3)
    lengths_B, c_B = torch.tensor(lengths), torch.tensor(factors[: len(lengths)], dtype=torch.float64)
    sizes = grouping.even_sizes(lengths_B, c_B)
    latents, counts = compress(embeds, sizes, merge), grouping.count_groups(sizes)
    for b, (n, c) in enumerate(
        zip(lengths, factors, strict=False)
    ):  # c_B took as many factors as there are rows
        want = by_hand(list(embeds[b, :n]), c, merge)
        assert counts[b] == len(want) == math.ceil(n / c)
        for k in range(latents.shape[1]):
            torch.testing.assert_close(latents[b, k], want[k] if k < len(want) else torch.zeros(3))


def test_last_group_is_scaled_by_its_own_size():
    """PITFALLS 7: seven ones at c = 3 give sqrt(3), sqrt(3), 1, and there is no fourth, empty slot."""
    sizes = grouping.even_sizes(torch.tensor([7]), torch.tensor([3]))
    latents = compress(torch.ones(1, 9, 1), sizes)
    torch.testing.assert_close(latents[0, :, 0], torch.tensor([3**0.5, 3**0.5, 1.0]))
    assert grouping.count_groups(sizes).tolist() == [3]


def test_nan_in_padding_does_not_leak():
    embeds = torch.ones(1, 4, 1)
    embeds[0, 2:] = float("nan")
    latents = compress(embeds, grouping.even_sizes(torch.tensor([2]), torch.tensor([5])))
    torch.testing.assert_close(latents, torch.full((1, 1, 1), 2**0.5))


def test_empty_chain_has_no_latents():
    sizes = grouping.even_sizes(torch.tensor([0, 0]), torch.tensor([2, 3]))
    assert compress(torch.ones(2, 0, 3), sizes).shape == (2, 0, 3)
    assert grouping.count_groups(sizes).tolist() == [0, 0]
    assert tokens_of_groups(torch.zeros(2, 0, dtype=torch.int64), sizes)[0].shape == (2, 0, 0)


def test_pick_one_takes_each_member_equally_often_and_nothing_else():
    ids = torch.tensor([[10, 11, 12, 13, 14, 99, 99]]).repeat(6000, 1)
    uniform = noise.uniform(noise.keys(torch.arange(6000)), 2)
    found, real = tokens_of_groups(ids, torch.tensor([[3, 2]]).repeat(6000, 1))
    one = pick_one(real, uniform)
    assert (one.sum(-1) == 1).all()
    picked = (found * one).sum(-1)
    assert set(picked[:, 0].tolist()) == {10, 11, 12}
    assert set(picked[:, 1].tolist()) == {13, 14}
    share = torch.bincount(picked[:, 0])[10:13] / 6000
    torch.testing.assert_close(share, torch.full((3,), 1 / 3), atol=0.025, rtol=0)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=4),
    factors=st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 1.5, 2.5]), min_size=4, max_size=4),
    more=st.integers(0, 2),
)
def test_members_are_the_tokens_of_each_group(lengths, factors, more):
    T = max(lengths) + more
    ids = torch.arange(1, 1 + len(lengths) * T).view(len(lengths), T)
    c_B = torch.tensor(factors[: len(lengths)], dtype=torch.float64)
    sizes = grouping.even_sizes(torch.tensor(lengths), c_B)
    K = sizes.shape[1] + more
    found, real = tokens_of_groups(ids, torch.nn.functional.pad(sizes, (0, more)))
    for b, n in enumerate(lengths):
        for k in range(K):
            want = [
                int(ids[b, t])
                for t in range(n)
                if math.floor(k * factors[b]) <= t < math.floor((k + 1) * factors[b])
            ]
            assert found[b, k][real[b, k]].tolist() == want
            assert (found[b, k][~real[b, k]] == 0).all()


# Groups


def whole_groups(lengths, c, phase):
    """The sizes of groups that nothing ends early."""
    ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    return Windows.of((ids, lengths), 6, None, c >= 2).sizes(lengths, c, phase)


def test_groups_of_one_and_a_half_by_hand():
    """The picture of methods/grouping.py: seven tokens at c = 1.5 and at 3, with two phases."""
    lengths, c = torch.tensor([7, 7, 7, 0]), torch.tensor([1.5, 1.5, 3, 2], dtype=torch.float64)
    sizes = whole_groups(lengths, c, torch.tensor([0, 0.5, 0.9, 0.3], dtype=torch.float64))
    assert sizes.tolist() == [[1, 2, 1, 2, 1], [2, 1, 2, 1, 1], [3, 3, 1, 0, 0], [0] * 5]
    assert grouping.count_groups(sizes).tolist() == [5, 5, 3, 0]
    assert grouping.group_starts(sizes)[0].tolist() == [0, 1, 3, 4, 6]
    assert grouping.even_sizes(lengths, c).tolist() == [
        [1, 2, 1, 2, 1],
        [1, 2, 1, 2, 1],
        [3, 3, 1, 0, 0],
        [0] * 5,
    ]


def test_a_row_by_itself_has_all_its_tokens():
    """45 * 2.8 is below 126 in floating point, so the last token is a group of its own; batch mates change nothing."""
    lengths, factors = torch.arange(1, 400), [1.1, 1.4, 2.8, 3.3, 5.6]
    for c in factors:
        for length in lengths[:, None]:
            alone = grouping.even_sizes(length, torch.tensor([c], dtype=torch.float64))
            assert int(alone.sum()) == int(length)
        together = grouping.even_sizes(lengths, torch.full((len(lengths),), c, dtype=torch.float64))
        assert together.sum(1).tolist() == lengths.tolist()


CENTS = st.integers(100, 600).map(lambda hundredths: hundredths / 100)


@settings(deadline=None, max_examples=150)
@given(n=st.integers(0, 40), c=CENTS, seed=st.integers(0, 10**6))
def test_groups_are_a_partition_with_sizes_around_c(n, c, seed):
    phase = grouping.draw_phase(torch.tensor([seed]))
    sizes = whole_groups(torch.tensor([n]), torch.tensor([c], dtype=torch.float64), phase)[0]
    assert sizes.sum() == n
    assert (sizes > 0).all()
    full = set(sizes[:-1].tolist())
    assert full <= {math.floor(c), math.ceil(c)}
    most = grouping.nominal_units(torch.arange(len(sizes)), torch.tensor(c, dtype=torch.float64), phase)
    assert (sizes[:-1] == most[:-1]).all()
    assert len(sizes) == 0 or 0 < sizes[-1] <= most[-1]


def test_groups_have_c_tokens_on_average_and_the_phase_of_a_whole_c_does_nothing():
    phase = grouping.draw_phase(torch.arange(4000))
    assert phase.min() >= 0
    assert phase.max() < 1
    c = torch.full((4000,), 2.3, dtype=torch.float64)
    for step in (0, 1, 7):
        most = grouping.nominal_units(torch.full((4000,), step), c, phase)
        assert abs(most.double().mean().item() - 2.3) < 0.03
        assert set(most.tolist()) == {2, 3}
    # The phase nearest to 1 that there is, and a long chain: nothing is rounded up to the next token.
    last = torch.tensor([1 - 1 / grouping.PHASES], dtype=torch.float64)
    assert (grouping.nominal_units(torch.arange(100_000), torch.tensor(5.0), last) == 5).all()


def loop_cut(n, c, phase, bounds):
    """Sizes one token after another."""
    sizes, t = [], 0
    while t < n:
        k, size = len(sizes), 1
        most = math.floor((k + 1) * c + phase) - math.floor(k * c + phase)
        while size < most and t + size < n and size < bounds[t]:
            size += 1
        sizes.append(size)
        t += size
    return sizes


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(st.integers(1, 6), max_size=14), min_size=1, max_size=4),
    factors=st.lists(CENTS, min_size=4, max_size=4),
    seed=st.integers(0, 999),
    more=st.integers(0, 2),
)
def test_cut_groups_equal_a_loop(rows, factors, seed, more):
    bounds, lengths = ragged.pad(rows)
    bounds = torch.nn.functional.pad(bounds, (0, more))
    c = torch.tensor(factors[: len(rows)], dtype=torch.float64)
    phase = grouping.draw_phase(torch.arange(len(rows)) + seed)
    # Ids play no part.
    uncut = Windows.of((bounds, lengths), 6, None, c >= 2)
    assert uncut.sizes(lengths, c, 0 * phase).tolist() == grouping.even_sizes(lengths, c).tolist()
    found = uncut.cut_before(torch.arange(6) >= bounds[..., None]).sizes(lengths, c, phase)
    for b, row in enumerate(rows):
        expected = loop_cut(len(row), factors[b], phase[b].item(), row)
        assert [size for size in found[b].tolist() if size] == expected


# Ragged rows


def test_segments_are_packed_end_to_end():
    """The picture of ops/ragged.py, with a number for each token."""
    question = (torch.tensor([[1, 2, 3, 9], [1, 9, 0, 0]]), torch.tensor([4, 2]))
    chain = (torch.tensor([[4, 5, 0, 0], [4, 5, 6, 7]]), torch.tensor([2, 4]))
    answer = (torch.tensor([[9, 8, 7], [9, 8, 7]]), torch.tensor([3, 3]))
    packed = ragged.pack(question, chain, answer, multiple=8)
    assert packed.tolist() == [
        [1, 2, 3, 9, 4, 5, 9, 8, 7, 0, 0, 0, 0, 0, 0, 0],
        [1, 9, 4, 5, 6, 7, 9, 8, 7, 0, 0, 0, 0, 0, 0, 0],
    ]
    read = ragged.take_from(packed[..., None], torch.tensor([3, 1]), 6)[..., 0]
    assert read.tolist() == [[9, 4, 5, 9, 8, 7], [9, 4, 5, 6, 7, 9]]


def test_rows_are_aligned_at_their_right_end():
    values = torch.arange(1, 11.0).reshape(2, 5, 1)
    found, real = ragged.align_right(values, torch.tensor([3, 5]))
    assert found.shape == (2, 8, 1)
    assert found[0, 5:, 0].tolist() == [1, 2, 3]
    assert found[1, 3:, 0].tolist() == [6, 7, 8, 9, 10]
    assert real.sum(1).tolist() == [3, 5]
    assert real[:, -1].all()


# Noise


def test_noise_is_a_function_of_its_key_alone():
    seeds = torch.tensor([3, 4, 5])
    alone = noise.normal(noise.keys(seeds[1:2], 0, 7), 5)
    torch.testing.assert_close(noise.normal(noise.keys(seeds, 0, 7), 5)[1:2], alone, rtol=0, atol=0)
    assert not torch.equal(alone, noise.normal(noise.keys(seeds[1:2], 0, 8), 5))
    assert not torch.equal(alone, noise.normal(noise.keys(seeds[1:2], 1, 7), 5))


def test_splitmix_matches_the_published_sequence():
    """The reference C program seeded with 1234567 prints 6457827717110365317, 3203168211198807973, ..."""
    key = torch.tensor([1234567])
    raw = noise._mix(key[:, None] + torch.arange(1, 3) * noise.GOLDEN)[0]
    assert [int(x) % 2**64 for x in raw] == [6457827717110365317, 3203168211198807973]


def test_noise_has_the_right_moments_and_no_correlation_between_neighbours():
    normal = noise.normal(noise.keys(torch.arange(2000), 0, 0), 100).double()
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs((normal**4).mean() - 3) < 0.1
    for a, b in [
        (normal[:-1], normal[1:]),
        (normal[:, :-1], normal[:, 1:]),
        (normal[:, :50], normal[:, 50:]),
    ]:
        assert abs((a * b).mean()) < 0.01
    uniform = noise.uniform(noise.keys(torch.arange(2000)), 50)
    assert 0 <= uniform.min()
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01


def test_seed_from_is_fixed():
    assert noise.seed_from(0, "a", 1) == noise.seed_from(0, "a", 1) != noise.seed_from(0, "a1", "")
    assert 0 <= noise.seed_from("x") < 2**63


def test_sampling_matches_the_truncated_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    probs = (logits / 0.7).softmax(-1)[0]
    kept = torch.tensor([probs[0], probs[1], 0, 0])  # 0.9 is reached by the first two
    assert probs[0] < 0.9 <= probs[0] + probs[1]
    n = 20000
    ids = sample_tokens(
        logits.repeat(n, 1),
        torch.full((n,), 0.7),
        torch.full((n,), 0.9),
        noise.uniform(noise.keys(torch.arange(n)), 1)[:, 0],
    )
    share = torch.bincount(ids, minlength=4) / n
    torch.testing.assert_close(share, kept / kept.sum(), atol=0.012, rtol=0)


def test_temperature_zero_is_argmax_and_each_row_has_its_own():
    logits = torch.tensor([[0.0, 5.0, 1.0]] * 3)
    ids = sample_tokens(
        logits,
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([1.0, 1e-9, 1.0]),
        torch.tensor([0.99, 0.99, 0.99999]),
    )
    # Ids are laid end to end in their order: the last hundred-thousandth is in the last one.
    assert ids.tolist() == [1, 1, 2]


def test_greedy_rows_among_sampled_ones_are_what_they_are_alone():
    torch.manual_seed(0)
    logits = torch.randn(12, 50).round()  # full of ties
    temperature = torch.tensor([0.0, 0.7, 1.0] * 4)
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.9] * 3)
    uniform = torch.rand(12, dtype=torch.float64)
    together = sample_tokens(logits, temperature, top_p, uniform)
    rows = zip(logits, temperature, top_p, uniform, strict=True)
    alone = [sample_tokens(*(column[None] for column in row)).item() for row in rows]
    assert together.tolist() == alone
    assert together[::3].tolist() == logits.argmax(-1)[::3].tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_sampling_never_returns_a_token_of_probability_zero(uniform):
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    ids = sample_tokens(logits, torch.ones(1), torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert ids.item() in (0, 2)


@pytest.mark.parametrize(
    ("device", "there", "computes", "expected"),
    [
        ("cuda", True, True, "bfloat16"),
        ("cuda:1", True, True, "bfloat16"),
        ("cuda", True, False, "float32"),
        ("cuda", False, True, "float32"),
        ("cpu", True, True, "float32"),
        ("mps", False, False, "float32"),
    ],
)
def test_weights_that_only_answer_are_bfloat16_on_a_gpu(device, there, computes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: computes)
    assert devices.inference_dtype(device) == expected
    if device.startswith("cuda"):
        # `colar train auto` trains by the same answer: a GPU that is not in this machine is taken to be a recent one.
        assert devices.computes_bfloat16(torch.device(device)) is (computes or not there)
