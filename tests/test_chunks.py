"""Logits in chunks: losses, log-probs and gradients of every method are those of all logits at once, and these never
exist. Batches in parts: each row once, within the limit."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from colar.data.example import Example
from colar.methods import pretrained, registry
from colar.methods import tokenskip as importance
from colar.methods.base import Batch, Method
from colar.methods.losses import chosen_logps, position_losses
from colar.model.head import positions_of
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig
from colar.training.objective import divide, part_indices, take
from colar.training.rows import RowSchedule

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
METHODS: dict[str, dict[str, Any]] = {
    "cot": {"name": "cot"},
    "no_cot": {"name": "no_cot"},
    "icot": {"name": "icot"},
    "coconut": {"name": "coconut"},
    "distill": {"name": "distill"},
    "pause": {"name": "pause"},
    "ruplar": {"name": "ruplar"},
    "sim_cot": {"name": "sim_cot"},
    "colar": {"name": "colar"},
    "colar-sampled-label": {"name": "colar", "chain_label": "sampled"},
    "colar-unsupervised": {"name": "colar", "supervise_chain": False},
    "sequential": {"name": "sequential"},
    "sequential-shortlist": {"name": "sequential", "shortlist": True},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(settings: dict[str, Any], family: str = "llama", **options: Any) -> tuple[LatentLM, Method]:
    lm = tiny_lm(family, **options)
    config = {key: value for key, value in settings.items() if key != "name"}
    method = registry.build(settings["name"], config)
    pretrained.attach(lm, method, 0)
    list(method.prepare(lm, EXAMPLES))
    return lm, method


def in_chunks(lm: LatentLM, positions: int) -> LatentLM:
    """The model with chunks of this many positions of its vocabulary."""
    lm.chunk_bytes = positions * 4 * lm.vocabulary_size
    return lm


def batch_of(lm: LatentLM, method: Method) -> Batch:
    return Batch.collate([method.encode(lm.template, each, Random(7), 2.0) for each in EXAMPLES])


def gradients(lm: LatentLM, loss: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    loss.backward()
    found = {name: value.grad.clone() for name, value in lm.named_parameters() if value.grad is not None}
    assert found
    return found


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Within 1e-5 of the largest entry: a small entry is a difference of large ones."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        scale = theirs[name].abs().max().item()
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


# Losses


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_a_methods_loss_and_gradients_are_those_of_all_logits_at_once(settings: dict[str, Any]) -> None:
    lm, method = made(settings)
    batch = batch_of(lm, method)
    whole = method.loss(lm, batch)
    wanted = gradients(lm, sum(term.sum() for name, term in whole.items() if name[0] != "_"))
    found = method.loss(in_chunks(lm, 3), batch)
    for name, term in found.items():
        torch.testing.assert_close(term, whole[name], **TOLERANCE)
    assert_close(gradients(lm, sum(term.sum() for name, term in found.items() if name[0] != "_")), wanted)


HEADS: dict[str, tuple[str, ...]] = {
    "full": (),
    "adapter": ("q_proj", "c_attn"),
    "adapter-on-the-head": ("q_proj", "c_attn", "lm_head"),
}
"""Name -> adapted linears."""


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("llama", "full"),
        ("gemma3", "full"),
        ("qwen2", "adapter"),
        ("llama", "adapter-on-the-head"),
        ("gemma3", "adapter-on-the-head"),
        ("gpt2", "adapter"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_tied_scaled_and_adapted_heads(family: str, head: str) -> None:
    targets = HEADS[head]
    lora = LoraSettings(r=4, lora_alpha=8, target_modules=targets) if targets else None
    # An adapter on one end of a tied weight is refused.
    tied = False if "lm_head" in targets else None
    lm, method = made(METHODS["cot"], family, lora=lora, tied=tied)
    batch = batch_of(lm, method)
    whole = method.loss(lm, batch)["ce"]
    wanted = gradients(lm, whole.sum())
    found = method.loss(in_chunks(lm, 3), batch)["ce"]
    torch.testing.assert_close(found, whole, **TOLERANCE)
    assert_close(gradients(lm, found.sum()), wanted)


def test_a_head_that_is_trained_as_a_copy_of_its_own() -> None:
    """peft's modules_to_save."""
    lm, method = made(METHODS["cot"])
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    lm.lm = get_peft_model(lm.causal_lm, config)
    batch = batch_of(lm, method)
    wanted = gradients(lm, method.loss(lm, batch)["ce"].sum())
    assert any("modules_to_save" in name for name in wanted)
    assert_close(gradients(lm, method.loss(in_chunks(lm, 4), batch)["ce"].sum()), wanted)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": None}
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, **SIZES}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Cohere2ForCausalLM, lambda V: Cohere2Config(vocab_size=V, logit_scale=0.25, **SHAPE)),
        (GraniteForCausalLM, lambda V: GraniteConfig(vocab_size=V, logits_scaling=8.0, **SHAPE)),
        (Gemma2ForCausalLM, lambda V: Gemma2Config(vocab_size=V, final_logit_softcapping=0.5, **SHAPE)),
    ],
)
def test_scaled_and_capped_logits(model: Any, config: Any) -> None:
    lm = tiny_lm("llama")
    lm.lm = model(config(lm.vocabulary_size)).eval()
    torch.manual_seed(0)
    hidden_XD, ids_X = torch.randn(10, lm.width, requires_grad=True), torch.arange(10)
    results = []
    for positions in (100, 3):
        (logps_X,) = in_chunks(lm, positions).reduce_logits(chosen_logps, hidden_XD, ids_X)
        results.append((logps_X, *torch.autograd.grad(logps_X.sum(), hidden_XD)))
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, **TOLERANCE)
    expected = lm.logits(hidden_XD).log_softmax(-1)[torch.arange(10), ids_X]
    torch.testing.assert_close(results[1][0], expected, **TOLERANCE)


def test_a_shared_label_by_hand() -> None:
    """Two positions of four tokens: a label shared by tokens 0 and 1, and token 3 alone."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 0.0]])
    labels, weights = torch.tensor([[0, 1], [3, 0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    (found,) = position_losses(logits, labels, weights)
    first = torch.tensor([0.0, 1.0, 2.0, 3.0]).exp().sum().log() - 0.5
    second = torch.log(torch.e + torch.tensor(3.0))
    torch.testing.assert_close(found, torch.stack([first, second]))


# Log-probs of outputs


@pytest.mark.parametrize(
    ("settings", "decoding"),
    [
        (METHODS["cot"], {}),
        (METHODS["colar"], {"temperature": 0.7}),
        (METHODS["sequential"], {}),
        (METHODS["sequential-shortlist"], {"temperature": 0.7, "latent_temperature": 1.3}),
    ],
    ids=["cot", "colar", "sequential", "two-temperatures"],
)
def test_scores_are_those_of_all_logits_at_once(settings: dict[str, Any], decoding: dict[str, float]) -> None:
    lm, method = made(settings)
    liven(lm)
    config = GrpoConfig(num_generations=2, max_latents=5, max_completion_length=6, **decoding)
    outputs = rollout.roll_out(lm, method, config, EXAMPLES, seed=3, generation=1)
    rollouts = rollout.collate(outputs, lm.width)
    whole = method.logps(lm, rollouts)
    wanted = gradients(lm, whole.logps.sum())
    found = method.logps(in_chunks(lm, 3), rollouts)
    torch.testing.assert_close(found.logps, whole.logps, **TOLERANCE)
    torch.testing.assert_close(found.entropy, whole.entropy, equal_nan=True, **TOLERANCE)
    assert_close(gradients(lm, found.logps.sum()), wanted)
    # A policy is scored without a gradient, and by exactly the numbers that are trained.
    with torch.no_grad():
        assert torch.equal(method.logps(lm, rollouts).logps, found.logps)


def test_surprisal_is_that_of_all_logits_at_once() -> None:
    lm = tiny_lm("llama")
    whole = list(importance.surprisal(lm, EXAMPLES))
    found = list(importance.surprisal(in_chunks(lm, 2), EXAMPLES))
    for mine, theirs in zip(found, whole, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


# Precision


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bfloat16_backbone_has_float32_losses_in_chunks_too(frozen: bool) -> None:
    lm, method = made(METHODS["cot"])
    lm.to(torch.bfloat16)
    lm.causal_lm.get_output_embeddings().requires_grad_(not frozen)
    batch = batch_of(lm, method)
    whole = method.loss(lm, batch)["ce"]
    found = method.loss(in_chunks(lm, 4), batch)["ce"]
    assert found.dtype == whole.dtype == torch.float32
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_chunks_add_up_the_heads_gradient_in_its_own_dtype() -> None:
    """A sum of 200 chunks in bfloat16 would lose what is below 1/256 of it."""
    lm = tiny_lm("llama")
    torch.manual_seed(0)
    hidden_XD = torch.randn(800, lm.width)
    ids_X = torch.full((800,), 3)
    weight = lm.causal_lm.get_output_embeddings().weight

    def gradient(positions: int, autocast: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (logps_X,) = in_chunks(lm, positions).reduce_logits(chosen_logps, hidden_XD, ids_X)
            loss = logps_X.sum()
        return torch.autograd.grad(loss, weight)[0]

    exact = gradient(800, autocast=False)
    error = (gradient(800, autocast=True) - exact).norm()
    assert (gradient(4, autocast=True) - exact).norm() < 1.2 * error


# Memory


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_all_logits_at_once_never_exist() -> None:
    lm = tiny_lm("llama")
    V, X = lm.vocabulary_size, 4000
    torch.manual_seed(0)
    hidden_XD = torch.randn(X, lm.width, requires_grad=True)
    ids_X = torch.zeros(X, dtype=torch.int64)
    found = {}
    for positions in (X, 400):
        with Largest() as largest:
            (logps_X,) = in_chunks(lm, positions).reduce_logits(chosen_logps, hidden_XD, ids_X)
            logps_X.sum().backward()
        found[positions] = largest.numel
    assert found[X] == X * V
    # The hidden states themselves are larger than a chunk.
    assert found[400] == max(400 * V, X * lm.width)


@pytest.mark.parametrize(
    ("positions", "trained", "products"),
    [(10, False, 1), (9, False, 2), (1, False, 10), (10, True, 1), (9, True, 4), (1, True, 20)],
)
def test_logits_are_made_twice_only_where_the_head_is_trained(
    positions: int, trained: bool, products: int
) -> None:
    """Ten positions: one chunk, two of five, ten. One chunk is made once in any case."""
    lm = tiny_lm("llama")
    head = lm.causal_lm.get_output_embeddings().requires_grad_(trained)
    sizes = []
    head.register_forward_hook(lambda _, args, out: sizes.append(len(out)))
    hidden_XD = torch.zeros(10, lm.width, requires_grad=True)
    (logps_X,) = in_chunks(lm, positions).reduce_logits(
        chosen_logps, hidden_XD, torch.zeros(10, dtype=torch.int64)
    )
    logps_X.sum().backward()
    assert hidden_XD.grad is not None
    # Whether the head is trained is asked of no positions.
    made = [size for size in sizes if size > 0]
    assert len(made) == products
    assert len(set(made)) == 1


def test_derivatives_are_scaled_position_by_position() -> None:
    """A position's gradient is its derivative times what reaches its value; of two values, the sum of both."""
    # In float64, but for the logits: a product of two rows sums in another order than one of seven, and derivatives of 6
    # make more of that.
    lm = tiny_lm("llama").double()
    lm.requires_grad_(False)
    torch.manual_seed(0)
    hidden_XD = torch.randn(7, lm.width, dtype=torch.float64, requires_grad=True)
    upstream_X = torch.arange(7.0, dtype=torch.float64)

    def two(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logged_CV = logits_CV.detach()
        return logits_CV.logsumexp(-1), logged_CV.amax(-1), logged_CV.amin(-1), logits_CV[:, 3]

    results = []
    for positions in (7, 2):
        total_X, largest_X, least_X, third_X = in_chunks(lm, positions).reduce_logits(two, hidden_XD)
        assert not largest_X.requires_grad
        assert not least_X.requires_grad
        (gradient_XD,) = torch.autograd.grad((upstream_X * (total_X - 2 * third_X)).sum(), hidden_XD)
        results.append(gradient_XD)
    torch.testing.assert_close(results[1], results[0], **TOLERANCE)
    assert results[1][0].abs().max() == 0


def test_no_positions_are_one_empty_chunk() -> None:
    lm = in_chunks(tiny_lm("llama"), 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    (logps_X,) = lm.reduce_logits(chosen_logps, torch.zeros(0, lm.width), nothing)
    assert logps_X.shape == (0,)


def test_a_chunk_is_counted_in_bytes() -> None:
    assert positions_of(2**28, 128_256) == 523  # 523 x 128,256 x 4 bytes: just below 2^28
    assert positions_of(2**28, 350) == 191_739
    assert positions_of(100, 350) == 1


# Batches in parts


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000))
def test_parts_hold_each_row_once_within_the_limit(lengths: list[int], most: int) -> None:
    parts = [part.tolist() for part in part_indices(torch.tensor(lengths), most)]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        width = -(-max(lengths[row] for row in part) // 8) * 8
        assert len(part) == 1 or len(part) * width <= most
    # The longest first, and no row could have stood in the part before its own.
    longest = [max(lengths[row] for row in part) for part in parts]
    assert longest == sorted(longest, reverse=True)


def test_rows_that_fit_are_one_part_in_their_order() -> None:
    lengths = torch.tensor([3, 30, 17])
    for most in (None, 96):
        (part,) = part_indices(lengths, most)
        assert part.tolist() == [0, 1, 2]
    assert [part.tolist() for part in part_indices(lengths, 95)] == [[1, 2], [0]]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.data())
def test_divided_parts_hold_the_same_rows(lengths: list[int], data: st.DataObject) -> None:
    rows = {"length": torch.tensor(lengths), "row": torch.arange(len(lengths))}
    # One row is far longer than all others together: it cannot be cut.
    rows["length"][0] = 100_000
    n = data.draw(st.integers(1, len(lengths)))
    parts = divide([rows], n, lambda part: part["length"])
    assert len(parts) == n
    assert all(len(part["row"]) for part in parts)
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(len(lengths)))
    for part in parts:
        assert torch.equal(part["length"], rows["length"][part["row"]])
    with pytest.raises(
        ValueError, match=f"{len(lengths)} rows cannot be divided into {len(lengths) + 1} parts"
    ):
        divide([rows], len(lengths) + 1, lambda part: part["length"])


def test_rows_are_taken_with_their_own_padding() -> None:
    lm, method = made(METHODS["colar"])
    rows = [method.encode(lm.template, each, Random(7), 0.0) for each in EXAMPLES]
    whole = Batch.collate(rows)
    assert whole.positions().tolist() == [len(row) for row in rows]
    taken = Batch.from_tensors(take(whole.tensors(), torch.tensor([4, 1])))
    alone = Batch.collate([rows[4], rows[1]])
    for name, column in alone.tensors().items():
        mine = taken.tensors()[name]
        assert torch.equal(mine[:, : column.shape[1]] if name == "step_sizes" else mine, column), name


@pytest.mark.parametrize(("groups", "pool"), [(3, 1), (8, 2), (26, 6), (400, 50)])
def test_a_pool_is_a_part_of_the_data(groups: int, pool: int) -> None:
    """Rows of lengths 0, 1, 2 ... in updates of 16: an update's rows are neighbours in a pool, not in the data."""
    n = 16 * groups
    examples = [Example(f"x/{i}", "q", (), "1") for i in range(n)]
    order = RowSchedule(examples, list(range(n)), 0, 16).permutation(0)
    spreads = [max(order[i : i + 16]) - min(order[i : i + 16]) for i in range(0, n, 16)]
    # A group is a pool-th of its pool's range, which is about the whole.
    mean = sum(spreads) / len(spreads)
    assert 0.6 * n / pool < mean < 1.1 * n / pool
