"""Rows that begin alike go through the backbone as one sequence: the same hidden states and gradients, fewer positions."""

from random import Random
from types import SimpleNamespace

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from colar.methods import base, pretrained, registry
from colar.methods.base import Batch
from colar.methods.colar import ColarParams
from colar.model import masks
from colar.ops import ragged, trees
from colar.training import preflight


def plan(rows, ends, packed=False):
    """The tree of rows of ids, each followed by its number of positions in `ends`."""
    ids, id_lengths = ragged.pad(rows)
    lengths = id_lengths + torch.tensor(ends)
    return trees.plan(ids, id_lengths, lengths, int(lengths.max()), packed)


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


def test_packed_rows():
    tree = plan([[7, 7, 7, 7], [5, 6], [8, 9, 9], [7, 7, 7, 7]], [1, 1, 1, 2], packed=True)
    # Two rows begin alike: a tree of 7 positions. The other two have 3 and 4.
    assert tree.branches.tolist() == [[0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 6] + 2 * [-1]]
    assert tree.trunks.tolist() == [[0] * 7 + [3] * 4 + [5] * 3 + 2 * [-1]]
    assert tree.places.tolist() == [[0, 1, 2, 3, 4, 4, 5, 0, 1, 2, 3, 0, 1, 2, 0, 0]]


def test_packed_sequences_are_of_nearly_equal_length():
    tree = plan([[n] * n for n in range(1, 11)], [1] * 10, packed=True)
    # 65 positions, the longest row 11: three sequences of 22, not ten of 11.
    assert tree.branches.shape == (3, 24)
    assert sorted((tree.branches >= 0).sum(1).tolist()) == [21, 22, 22]


@given(ROWS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_position_sees_its_own_row_up_to_itself_and_nothing_else(rows, packed):
    """By brute force over positions: ids and places of what is seen are those of the row."""
    tree = plan([ids for ids, _ in rows], [end for _, end in rows], packed)
    if tree is None:
        return
    width = max(len(ids) + end for ids, end in rows)
    seen = tree.seen()
    S, P = tree.branches.shape
    each = torch.meshgrid(torch.arange(S), torch.arange(P), torch.arange(P), indexing="ij")
    assert torch.equal(tree.sees(*each), seen)
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
    total = sum(len(ids) + end for ids, end in rows)
    assert (tree.branches >= 0).sum() < total + packed


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


RAGGED, ONE, SHORT = slice(0, 6), slice(3, 4), slice(1, 3)
PACKED = [
    *((family, name, RAGGED) for family in FAMILIES for name in ("cot", "colar")),
    *(("llama", name, RAGGED) for name in METHODS if name not in ("cot", "colar")),
    # Batches that are packed otherwise or not at all: a family sees nothing of that but positions and windows.
    *((family, "colar", rows) for family in ("gemma3", "gpt2") for rows in (ONE, SHORT)),
    ("llama", "sequential", SHORT),
    ("llama", "cot", ONE),
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_flex_attention_computes_packed_rows_as_rows_by_themselves(family, flex_on_cpu):
    """By blocks of a mask: losses and gradients of the dense mask, windows of Gemma 3 included."""
    lm = tiny_lm(family, scale=0.1)
    method, batch = versions(lm)
    alone, gradients = terms_and_gradients(lm, method, batch)
    fed = []
    lm.causal_lm.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["attention_mask"]), with_kwargs=True
    )
    lm.causal_lm.set_attn_implementation(masks.FLEX)
    with preflight.prepared(lm, packed=True):
        packed, packed_gradients = terms_and_gradients(lm, method, batch)
    (mask,) = fed
    by_layer = mask.values() if isinstance(mask, dict) else [mask]
    assert all(isinstance(each, flex_attention.BlockMask) for each in by_layer)
    for term, values in alone.items():
        torch.testing.assert_close(packed[term], values, rtol=1e-5, atol=1e-5)
    for weight, gradient in gradients.items():
        torch.testing.assert_close(
            packed_gradients[weight], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max()
        )


@pytest.mark.parametrize(("family", "name", "rows"), PACKED, ids=str)
def test_packed_rows_learn_what_rows_by_themselves_do(family, name, rows):
    """In float32: every term of every row, and every gradient. Gemma 3's windows of 8 end inside rows."""
    lm = tiny_lm(family, scale=0.1)
    method = registry.build(name)
    pretrained.attach(lm, method, 0)
    examples = list(method.prepare(lm, EXAMPLES))
    batch = Batch.collate([method.encode(lm.template, row, Random(0), 0.0) for row in examples[rows]])
    fed = []
    lm.causal_lm.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    alone, gradients = terms_and_gradients(lm, method, batch)
    with preflight.prepared(lm, packed=True):
        packed, packed_gradients = terms_and_gradients(lm, method, batch)
    if rows == RAGGED:
        assert fed[1] < fed[0]
    assert packed.keys() == alone.keys()
    for term, values in alone.items():
        torch.testing.assert_close(packed[term], values, rtol=1e-5, atol=1e-5)
    assert packed_gradients.keys() == gradients.keys()
    for weight, gradient in gradients.items():
        torch.testing.assert_close(
            packed_gradients[weight], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max()
        )
    assert not lm.packs_rows


def test_a_row_as_long_as_the_context_is_packed_with_others():
    lm = tiny_lm("gpt2", scale=0.1)  # learnt positions: there is none behind the last
    lengths = torch.tensor([lm.context, 5, 9])
    embeds = lm.embed(torch.randint(5, 60, (3, lm.context), generator=torch.Generator().manual_seed(0)))
    starts = (torch.arange(3)[:, None], torch.ones(3, dtype=torch.int64))
    alone = lm.hidden_of_rows(embeds, starts, lengths)
    lm.packs_rows = True
    packed = lm.hidden_of_rows(embeds, starts, lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(packed[row, :length], alone[row, :length], rtol=1e-5, atol=1e-5)


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


def test_blocks_of_a_mask_compile_for_any_sizes(flex_on_cpu):
    """Traced, without kernels: full and near masks of packed rows, forward and backward, in few graphs."""
    compiled = torch.compile(flex_attention.flex_attention, backend="aot_eager")
    config = SimpleNamespace(
        _attn_implementation=masks.FLEX,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=4,
    )
    with torch.compiler.set_stance("default"):
        for seed in range(5):
            draw = Random(seed)
            rows = [[draw.randint(1, 3) for _ in range(draw.randint(2, 12))] for _ in range(8)]
            tree = plan(rows, [draw.randint(1, 9) for _ in rows], packed=True)
            q, k, v = (torch.randn(*tree.places.shape, 2, 16).transpose(1, 2) for _ in range(3))
            inputs = [each.requires_grad_() for each in (q, k, v)]
            dense = masks.additive(config, tree.seen(), tree.behind(), q)
            for kind, mask in masks.of_tree(config, tree, q).items():
                wanted = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=dense[kind])
                found = compiled(*inputs, block_mask=mask)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
                gradients = (torch.autograd.grad(each.square().sum(), inputs) for each in (found, wanted))
                for mine, theirs in zip(*gradients, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


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
