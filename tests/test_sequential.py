"""The sequential method: its loss by a naive loop, its tokens against the reference, c = 1 as CoT, exact log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import EXAMPLES, publishable
from sequential import choice_logps, encoded, latent, made
from torch import Tensor

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.look.thought import read_thoughts
from colar.methods import registry
from colar.methods.base import Batch, Row
from colar.methods.sequential import SequentialParams, decoder
from colar.methods.sequential import choice as group_choice
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.grpo import generation, rollout
from colar.training.grpo import train as grpo_train
from colar.training.grpo.config import GrpoConfig

GREEDY = Decoding(max_latents=6, max_completion_length=5)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-4])
def test_going_on_at_a_tiny_temperature_has_a_log_prob(temperature: float) -> None:
    """Logits divided by it are as large as float32 can hold; requests have 1e-6 or more."""
    logits = torch.tensor([[12.0, 30.0, 29.0, 5.0]] * 2)
    column = torch.full((2,), temperature, dtype=torch.float64)
    # The separator is token 0: going on is certain, and of the others 1 and 2 are drawn at temperature 1.
    state: Any = SimpleNamespace(
        logits=lambda: logits,
        temperature=column,
        latent_temperature=torch.ones_like(column),
        conditions=SimpleNamespace(one_temperature=False),
    )
    found = group_choice.first_logps(state, 0, torch.tensor([1, 2]))
    wanted = torch.tensor([30.0, 29.0, 5.0]).log_softmax(-1)[:2]
    torch.testing.assert_close(found, wanted)


def naive(lm: LatentLM, row: Row, c: int, widest: int = 0, ahead: float = 0) -> Tensor:
    """One row's loss: groups, places and labels in plain loops, a forward of its own."""
    decoder, separator = lm.extra["group_decoder"], lm.template.separator_id
    embed = lambda ids: lm.embed(torch.tensor(ids))  # noqa: E731
    starts = list(range(0, len(row.chain), c))
    latents = [latent(lm, row.chain[s : s + c]) for s in starts]
    fed = [*embed(row.question), *latents, *embed(row.answer)]
    hidden = lm.hidden(torch.stack(fed)[None])[0, len(row.question) - 1 :]
    labels = []
    for s in starts:
        labels.append([*row.chain, separator][s : s + max(c, widest)])
    labels += [[token] for token in row.answer]
    means = []
    for k, group in enumerate(labels):
        state, losses, weights = hidden[k], [], []
        for j, token in enumerate(group):
            if j:
                state = decoder(state, lm.embed(torch.tensor(group[j - 1])))
            weights.append(1 if j < c else ahead)
            losses.append(-weights[-1] * lm.logits(state).log_softmax(-1)[token])
        means.append(torch.stack(losses).sum() / sum(weights))
    return torch.stack(means).mean()


def gradients(losses: Tensor, trained: list[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(losses.mean(), trained, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(
    ("family", "c", "merge"),
    [("llama", 1, "sqrt"), ("qwen2", 2, "sqrt"), ("gemma3", 3, "ordered"), ("gpt2", 5, "sqrt")],
)
def test_the_loss_is_a_naive_loop_over_groups_and_places(family: str, c: int, merge: str) -> None:
    lm, method = made(family, compression_factors=[c], merge=merge)
    rows = encoded(lm, method)
    found = method.loss(lm, Batch.collate(rows))
    assert set(found) == {"ce"}
    expected = torch.stack([naive(lm, row, c) for row in rows])
    torch.testing.assert_close(found["ce"], expected, rtol=1e-4, atol=1e-5)
    # Gradients, too: of the decoder, of the backbone, and of the embeddings, through what is fed as well as as labels.
    trained = [p for p in lm.parameters() if p.requires_grad]
    assert any(p is lm.causal_lm.get_input_embeddings().weight for p in trained)
    for got, wanted in zip(gradients(found["ce"], trained), gradients(expected, trained), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("c", [1, 2, 5])
def test_labels_behind_the_group_have_a_weight_of_their_own(c: int) -> None:
    """Whatever the row's c, each position is also taught the tokens that a group of the largest factor would have."""
    lm, method = made(compression_factors=[1, 2, 5], lookahead_weight=0.2)
    rows = [dataclasses.replace(row, params=SequentialParams(c)) for row in encoded(lm, method)]
    found = method.loss(lm, Batch.collate(rows))["ce"].tolist()
    assert found == pytest.approx([naive(lm, row, c, 5, 0.2).item() for row in rows], rel=1e-4)
    assert found != pytest.approx([naive(lm, row, c).item() for row in rows], rel=1e-4) or c == 5


def test_at_c_1_it_is_cot() -> None:
    """The same loss, and the same tokens thought: those of its groups are CoT's chain."""
    lm, method = made(live=True, compression_factors=[1])
    cot = registry.build("cot")
    batch = Batch.collate(encoded(lm, method))
    plain = Batch.collate([cot.encode(lm.template, e, Random(0), 0.0) for e in EXAMPLES])
    same_questions = Batch(
        **{**vars(plain), "question_ids": batch.question_ids, "question_lengths": batch.question_lengths}
    )
    ours, cots = method.loss(lm, batch)["ce"], cot.loss(lm, same_questions)["ce"]
    torch.testing.assert_close(ours, cots)
    # What is fed is trained as it is in CoT.
    backbone = list(lm.causal_lm.parameters())
    for got, wanted in zip(gradients(ours, backbone), gradients(cots, backbone), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


def requests() -> list[Request]:
    asked = []
    for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for i, example in enumerate(EXAMPLES):
            params = SequentialParams((1, 2, 3, 5)[i % 4])
            asked.append(
                Request(f"{mode}/{i}", example.question, params, decoding, i, i % 3, keep_latents=True)
            )
    return asked


@pytest.mark.parametrize(
    ("family", "temperature", "drawn_at", "merge"),
    [
        ("llama", 1.0, 1.0, "sqrt"),
        ("qwen2", 0.7, 0.7, "ordered"),
        ("gemma3", 0.7, 1.2, "sqrt"),
        ("gpt2", 1.0, 0.0, "sqrt"),
    ],
)
def test_log_probs_of_thoughts_are_exact(
    family: str, temperature: float, drawn_at: float, merge: str
) -> None:
    lm, method = made(family, live=True, compression_factors=[1, 2, 3], merge=merge)
    config = GrpoConfig(
        num_generations=4,
        max_latents=5,
        max_completion_length=4,
        compression_factors=(2.0, 3.0),
        temperature=temperature,
        latent_temperature=drawn_at,
    )
    rollouts = rollout.roll_out(lm, method, config, EXAMPLES, seed=3, generation=1)
    tensors = rollout.collate(rollouts, lm.width)
    scores = method.logps(lm, tensors)
    engine = rollout.engine_logps(method, rollouts, tensors)
    for row, each in enumerate(rollouts):
        mask, wanted = scores.mask[row], choice_logps(lm, each)
        assert scores.logps[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
        assert engine[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
    scores.logps.sum().backward()
    assert (lm.extra["group_decoder"].mlp[0].weight.grad.abs().sum() > 0) == (drawn_at > 0)

    # After an update of the embeddings, too: a latent is what was chosen, not what was fed at that time.
    with torch.no_grad():
        embeddings = lm.causal_lm.get_input_embeddings().weight
        embeddings += 0.1 * embeddings.std() * torch.randn_like(embeddings)
    later = method.logps(lm, tensors)
    if drawn_at == 0:
        return  # another thought is the likeliest now
    for row, each in enumerate(rollouts):
        assert later.logps[row][later.mask[row]].tolist() == pytest.approx(
            choice_logps(lm, each), rel=2e-4, abs=2e-4
        )


@pytest.mark.parametrize("c", [1.0, 2.0, 5.0])
def test_outputs_to_read_have_the_tokens_that_were_chosen(c: float) -> None:
    """Not those nearest to their sum, which may be others, in another order and of another number."""
    lm, method = made(live=True, compression_factors=[1, 2, 5])
    config = GrpoConfig(num_generations=2, max_latents=4, max_completion_length=2, compression_factors=(c,))
    outputs = rollout.roll_out(lm, method, config, EXAMPLES[:1], seed=3, generation=1)
    group = generation.OutputGroup(outputs, torch.zeros(2, 1))
    records = generation.records_to_read(lm, [group], ["accuracy"], torch.zeros(2))
    for record, output in zip(records, outputs, strict=True):
        assert len(record["thoughts"]) == output.completion.length
        chosen = [
            i
            for info in output.completion.thought_info()
            for i in info["group_ids"].tolist()
            if i >= 0 and i != lm.template.separator_id
        ]
        assert "".join(record["thoughts"]) == lm.template.tokenizer.decode(chosen, skip_special_tokens=True)
    assert sum(len(record["thoughts"]) for record in records) > 2


def test_what_was_chosen_is_fed_anew_with_gradient() -> None:
    lm, method = made(live=True, compression_factors=[2])
    config = GrpoConfig(num_generations=2, max_latents=4, max_completion_length=2, compression_factors=(2.0,))
    rollouts = rollout.roll_out(lm, method, config, EXAMPLES[:1], seed=3, generation=1)
    tensors = rollout.collate(rollouts, lm.width)
    assert int(tensors.thought_counts.min()) >= 1
    # What was fed is not stored beside the tokens that it is made of.
    assert tensors.latents.shape[-1] == 0
    embeddings = lm.causal_lm.get_input_embeddings().weight
    # Tied ones would get gradient as labels, too.
    assert lm.causal_lm.get_output_embeddings().weight is not embeddings

    scores = method.logps(lm, tensors)
    answer = scores.logps.gather(1, tensors.thought_counts[:, None] + 1)
    (gradient,) = torch.autograd.grad(answer.sum(), embeddings)
    chosen = tensors.group_ids[tensors.group_ids >= 0].unique()
    assert (gradient[chosen].abs().sum(-1) > 0).all()


def test_a_first_pass_scores_the_tokens_that_c_lets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that only a group of the largest factor would have. And it reads no answer."""
    lm, method = made(compression_factors=[1, 2, 3, 5], confidence_thresholds=[0, 0.05])
    rows = []
    for c, threshold in [(1, 0.05), (2, 0.05), (3, 0.05), (3, 0), (5, 0.05)]:
        row = method.encode(lm.template, EXAMPLES[0], Random(0), 0.0)
        # The question of all is that of one draw.
        rows.append(dataclasses.replace(row, params=SequentialParams(c, threshold)))
    scored: list[Tensor] = []
    fed: list[Tensor] = []

    def watched(lm: LatentLM, hidden: Tensor, ids: Tensor, real: Tensor, *more: Any) -> Tensor:
        scored.append(real)
        return label_logps(lm, hidden, ids, real, *more)

    def read(embeds: Tensor, starts: tuple[Tensor, Tensor], lengths: Tensor) -> Tensor:
        fed.append(lengths)
        return hidden_of_rows(embeds, starts, lengths)

    label_logps, hidden_of_rows = decoder.label_logps, lm.hidden_of_rows
    monkeypatch.setattr(decoder, "label_logps", watched)
    monkeypatch.setattr(lm, "hidden_of_rows", read)
    method.training_thoughts(lm, Batch.collate(rows))
    [real_XTG] = scored
    n = len(rows[0].chain)
    expected = [[place for start in range(n) for place in range(1, min(c, n - start))] for c in (2, 3, 5)]
    assert [real_TG.nonzero()[:, 1].tolist() for real_TG in real_XTG] == expected
    assert [lengths.tolist() for lengths in fed] == [3 * [len(rows[0].question) + n]]


def test_each_temperature_draws_its_own() -> None:
    """At a cold temperature and warm thoughts, thoughts vary and stops do not; the other way round, stops alone."""
    lm, method = made(live=True, compression_factors=[2])
    question = EXAMPLES[0].question

    def drawn(temperature: float, latent_temperature: float) -> list[Any]:
        decoding = Decoding(
            temperature, latent_temperature=latent_temperature, max_latents=3, max_completion_length=1
        )
        asked = [
            Request("q", question, SequentialParams(2), decoding, 5, sample, keep_latents=True)
            for sample in range(48)
        ]
        return Engine(lm, method).generate(asked)

    def first_groups(outputs: list[Any]) -> set[tuple[int, ...]]:
        return {
            tuple(output.thought_info()[0]["group_ids"].tolist())
            for output in outputs
            if output.thought_info()
        }

    warm = drawn(1.0, 1.0)
    assert len({output.length for output in warm}) > 1
    assert len(first_groups(warm)) > 1
    cold_thoughts = drawn(1.0, 0.0)
    assert len({output.length for output in cold_thoughts}) > 1
    assert len(first_groups(cold_thoughts)) == 1
    cold_stops = drawn(1e-6, 1.0)
    assert len(first_groups(cold_stops)) > 1
    # Whether the first thought comes at all is decided before anything is drawn.
    assert len({output.length > 0 for output in cold_stops}) == 1
    # And stopping is as frequent with drawn thoughts as without: of the first decision, the very same draws.
    assert [output.length > 0 for output in warm] == [output.length > 0 for output in cold_thoughts]


def test_a_thought_is_read_as_the_tokens_it_was_chosen_as() -> None:
    lm, method = made(live=True, compression_factors=[1, 2, 3, 5])
    request = next(r for r in requests() if r.params.compression_factor == 3 and r.decoding == SAMPLED)
    done = reference.complete(lm, method, request)
    thoughts = read_thoughts(lm, done, 2)
    assert thoughts
    for thought, info in zip(thoughts, done.thought_info(), strict=True):
        ids = [i for i in info["group_ids"].tolist() if i >= 0]
        kept = [i for i in ids if i != lm.template.separator_id]
        assert [token["id"] for token in thought["tokens"]] == kept
        # The separator that ends a group is no part of it, but one of its draws.
        if kept == ids:
            total = sum(token["logprob"] for token in thought["tokens"])
            assert total == pytest.approx(float(info["logp"]), rel=1e-4)


def test_reinforcement_shortens_what_costs(tmp_path: Path) -> None:
    """A reward for few thoughts: chains get shorter, and engine and trainer agree on every action on the way."""

    def shorter(completions: Sequence[str], length: Sequence[int], **columns: Any) -> list[float]:
        return [-n for n in length]

    lm, method = made(live=True, compression_factors=[2, 3])
    publishable(lm)
    training = TrainingConfig(
        report_to="none",
        logging_steps=1,
        save_steps=1000,
        learning_rate=3e-2,
        max_steps=8,
        per_device_train_batch_size=24,
    )
    config = GrpoConfig(
        num_generations=4, max_latents=5, max_completion_length=4, compression_factors=(2.0, 3.0)
    )
    result = grpo_train.train(lm, method, EXAMPLES, training, config, tmp_path, reward_funcs={"own": shorter})
    rows = [row for row in result.history if "loss" in row]
    lengths = [row["latents/mean_length"] for row in rows]
    assert sum(lengths[:2]) / 2 - sum(lengths[-2:]) / 2 > 0.5
    assert max(row["sampling/logp_difference"] for row in rows) < 1e-3
