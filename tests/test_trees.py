"""Rows that begin alike go through the backbone as one sequence: the same hidden states and gradients, fewer positions."""

from random import Random

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.methods import base, pretrained, registry
from colar.methods.base import Batch
from colar.methods.colar import ColarParams
from colar.ops import ragged, trees


def plan(rows, ends):
    """The tree of rows of ids, each followed by its number of positions in `ends`."""
    ids, id_lengths = ragged.pad(rows)
    lengths = id_lengths + torch.tensor(ends)
    return trees.plan(ids, id_lengths, lengths, int(lengths.max()))


def test_the_picture():
    tree = plan([[7, 7, 7, 7], [7, 7, 7, 7], [5, 6]], [2, 3, 1])
    assert tree.branches.tolist() == [
        [0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1, -1, -1, -1, -1, -1],
        [0, 0, 1] + 13 * [-1],
    ]
    assert tree.places[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    # Rows are 7 wide: row 1's fifth position is 7 + 4.
    assert tree.source[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 11, 12, 13]
    assert tree.target[1].tolist() == [0, 1, 2, 3, 6, 7, 8]
    # The first position of the second branch sees the trunk and itself.
    assert tree.seen()[0, 6].nonzero().flatten().tolist() == [0, 1, 2, 3, 6]
    assert tree.behind()[0, 6, :4].tolist() == [4, 3, 2, 1]


def test_rows_with_long_branches_are_left_alone():
    """A tree attends under a dense mask: eight outputs of 200 positions cost half as much again together."""
    ids = torch.arange(60).repeat(8, 1)
    of_question = torch.full((8,), 60)
    assert trees.plan(ids, of_question, torch.full((8,), 95), 95) is not None
    # Fewer go together, or none.
    assert len(trees._trees(ids.tolist(), [265] * 8)) == 4
    for length in (665, 4000):
        assert trees.plan(ids, of_question, torch.full((8,), length), length) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 80), st.integers(0, 900)), min_size=1, max_size=12)
)
def test_no_tree_costs_more_than_its_rows(rows):
    starts = [[question] * n for question, n, _ in rows]
    lengths = [n + longer for _, n, longer in rows]

    def cost(n):
        return n * (trees.KEYS + n)

    for trunk, members in trees._trees(starts, lengths):
        together = trunk + sum(lengths[row] - trunk for row in members)
        assert cost(together) <= sum(cost(lengths[row]) for row in members)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900)), min_size=1, max_size=32))
def test_no_batch_costs_more_than_its_rows(rows):
    """Sequences are padded to the longest tree, also those of a single row."""
    longest = 100 + max(longer for _, longer in rows)
    tree = plan([[question] * 100 for question, _ in rows], [longer for _, longer in rows])
    if tree is None:
        return
    S, P = tree.branches.shape
    # Up to 15 columns of rounding.
    assert S * trees._cost(P - 15) <= len(rows) * trees._cost(longest)


def test_a_batch_with_a_long_tree_among_short_rows_is_left_alone():
    """Nine rows of one question are a tree of 1,000 positions, to which 23 rows of 352 would be padded."""
    starts = [[7] * 100] * 9 + [[8 + row] * 100 for row in range(23)]
    assert plan(starts, [100] * 9 + [252] * 23) is None
    assert plan(starts[:9], [100] * 9) is not None


def test_rows_that_share_little_are_left_alone():
    assert plan([[1, 2, 3, 4], [1, 9, 9, 9]], [1, 1]) is None
    assert plan([[1, 2], [3, 4]], [1, 1]) is None
    assert plan([[1]], [3]) is None
    # A third row would shorten the trunk of the first two, and cost more than it spares.
    tree = plan([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 7, 7]], [1, 1, 1])
    assert tree.branches.shape[0] == 2
    assert tree.source[1, :7].tolist() == [14, 15, 16, 17, 18, 19, 20]


ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=12), st.integers(1, 5)), min_size=1, max_size=7
)


@given(ROWS)
@settings(max_examples=200, deadline=None)
def test_every_position_sees_its_own_row_up_to_itself_and_nothing_else(rows):
    """By brute force over positions: ids and places of what is seen are those of the row."""
    tree = plan([ids for ids, _ in rows], [end for _, end in rows])
    if tree is None:
        return
    width = max(len(ids) + end for ids, end in rows)
    seen = tree.seen()
    for row, (ids, end) in enumerate(rows):
        for place in range(len(ids) + end):
            sequence, column = divmod(int(tree.target[row, place]), tree.branches.shape[1])
            keys = seen[sequence, column].nonzero().flatten()
            assert tree.places[sequence, keys].tolist() == list(range(place + 1))
            for key in keys.tolist():
                other, at = divmod(int(tree.source[sequence, key]), width)
                # Another row's position stands for this one's only where both have the same ids up to it.
                assert other == row or rows[other][0][: at + 1] == ids[: at + 1]
    assert seen.any(-1).all(), "a query that sees nothing has no softmax"
    assert (tree.branches >= 0).sum() < sum(len(ids) + end for ids, end in rows)


def versions(lm, seed=0):
    """A batch of every example at three speeds, in an order of no use."""
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    rows = []
    for c in (1, 2, 3):
        for example in EXAMPLES:
            params = ColarParams(c)
            rows.append(base.encode_row(lm.template, example, params, method.speed_text(params), seed))
    return method, Batch.collate(rows)


METHODS = ("cot", "no_cot", "icot", "colar", "sequential", "pause", "tokenskip", "ruplar")


def terms_and_gradients(lm, method, batch):
    """The loss's terms, and the gradient of every weight."""
    lm.zero_grad()
    terms = method.loss(lm, batch)
    # Another weight for each row: what one row's loss does to another's gradient would show.
    weights = 1 + torch.arange(len(batch.seeds), device=lm.device)
    sum((term * weights).sum() for name, term in terms.items() if not name.startswith("_")).backward()
    return terms, {
        name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_what_rows_by_themselves_teach(name, monkeypatch):
    """In float32: every term of every row, and every gradient."""
    lm = tiny_lm("llama", scale=0.1)
    method = registry.build(name)
    pretrained.attach(lm, method, 0)
    examples = list(method.prepare(lm, EXAMPLES))
    # Each example twice, by draws of its own.
    rows = [method.encode(lm.template, row, Random(draw), 0.0) for draw in range(2) for row in examples]
    batch = Batch.collate(rows)
    fed = []
    assert lm.why_no_trees() is None
    lm.causal_lm.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    shared, gradients = terms_and_gradients(lm, method, batch)
    monkeypatch.setattr(trees, "plan", lambda *_: None)
    alone, wanted = terms_and_gradients(lm, method, batch)
    assert fed == [len(examples), len(rows)]
    assert shared.keys() == alone.keys()
    for term, values in alone.items():
        torch.testing.assert_close(shared[term], values, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for weight, gradient in wanted.items():
        torch.testing.assert_close(gradients[weight], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max())


def test_a_tree_may_be_longer_than_the_context():
    lm = tiny_lm("gpt2", scale=0.1)  # learnt positions: there is none behind the last
    ids = torch.randint(5, 60, (2, lm.context), generator=torch.Generator().manual_seed(0))
    shared = lm.context // 2
    ids[1, :shared] = ids[0, :shared]
    embeds, lengths = lm.embed(ids), (lm.context, lm.context - 3)
    starts = (ids[:, :shared], torch.full((2,), shared))
    together = lm.hidden_of_rows(embeds, starts, torch.tensor(lengths))
    alone = lm.hidden(embeds)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(together[row, :length], alone[row, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_rows_by_themselves(family, monkeypatch):
    """Gemma 3's windows of 8 end inside the trunks."""
    lm = tiny_lm(family, scale=0.2).double()
    method, batch = versions(lm)
    shared = method.loss(lm, batch)
    shared["ce"].sum().backward()
    gradients = {
        name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None
    }
    lm.zero_grad()

    monkeypatch.setattr(trees, "plan", lambda *_: None)
    alone = method.loss(lm, batch)
    alone["ce"].sum().backward()
    for name, values in alone.items():
        torch.testing.assert_close(shared[name], values, rtol=1e-6, atol=1e-7)
    for name, weight in lm.named_parameters():
        if weight.grad is not None:
            # Logits are float32, whatever the model is.
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_fewer_positions_go_through_the_backbone(monkeypatch):
    lm = tiny_lm("llama")
    method, batch = versions(lm)
    fed = []
    hidden = lm.hidden
    monkeypatch.setattr(lm, "hidden", lambda embeds, *rest: fed.append(embeds.shape) or hidden(embeds, *rest))
    method.loss(lm, batch)
    ((sequences, _, _),) = fed
    assert sequences == len(EXAMPLES)


def test_other_attention_computes_each_row_by_itself(monkeypatch):
    lm = tiny_lm("llama")
    method, batch = versions(lm)
    monkeypatch.setattr(lm.config, "_attn_implementation_internal", "flash_attention_2")
    monkeypatch.setattr(lm, "hidden", _refuses_masks(lm.hidden))
    with pytest.raises(RuntimeError, match="reached"):
        method.loss(lm, batch)


def _refuses_masks(hidden):
    def checked(embeds, *rest):
        assert not rest, "a mask of ours"
        raise RuntimeError("reached")

    return checked
