"""The shortlist: rows of the LM head against the whole head, what is counted, loss and log-probs by naive loops, and the
engine against the reference."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sequential
import torch
from families import EXAMPLES, FAMILIES, liven, publishable, tiny_lm
from sequential import choice_logps, encoded, label_logp
from test_real_factors import naive_hidden, naive_sizes, naive_windows
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from colar.data.example import Example
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch, Row
from colar.methods.sequential import Sequential, SequentialParams
from colar.methods.sequential.choice import Rules, choose_groups
from colar.model.head import PartialHead, head_logits
from colar.model.latent_lm import LatentLM
from colar.model.lora import LoraSettings
from colar.ops.sampling import DrawModes
from colar.training.config import TrainingConfig
from colar.training.grpo import rollout
from colar.training.grpo import train as grpo_train
from colar.training.grpo.config import GrpoConfig

GREEDY = Decoding(max_latents=6, max_completion_length=5)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=5)
TWO_TEMPERATURES = Decoding(0.0, 0.9, 0.8, max_latents=6, max_completion_length=5)
IDS = (0, 2, 3, 7, 31, 40)
ANY_SPEED = {"compression_factors": [1, 1.5, 2, 2.5, 3, 5], "confidence_thresholds": [0, 0.05]}


def hidden_of(lm: LatentLM) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 3, lm.width)


def narrow(lm: LatentLM, hidden: Tensor, ids: tuple[int, ...] = IDS) -> Tensor:
    return lm.logits(hidden, lm.partial_head(ids))


# Rows of the LM head


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_logits_of_some_ids_are_those_of_the_whole_head(family: str, live: bool) -> None:
    """Tied and untied heads, with a bias (`liven` gives one) and without."""
    lm = liven(tiny_lm(family)) if live else tiny_lm(family)
    hidden = hidden_of(lm)
    torch.testing.assert_close(narrow(lm, hidden), lm.logits(hidden)[..., list(IDS)], rtol=1e-5, atol=1e-5)


SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Cohere2ForCausalLM, Cohere2Config(logit_scale=0.25, **SIZES, **HEADS)),
        (GraniteForCausalLM, GraniteConfig(logits_scaling=8.0, **SIZES, **HEADS)),
        (Gemma2ForCausalLM, Gemma2Config(final_logit_softcapping=0.5, **SIZES, **HEADS)),
    ],
)
@torch.no_grad()
def test_scaled_and_capped_logits_are_scaled_and_capped_for_some_ids_too(model: Any, config: Any) -> None:
    lm, ours = model(config).eval(), tiny_lm("llama")
    hidden = hidden_of(ours)
    rows = PartialHead.gather(lm.get_output_embeddings(), IDS, ours.device)
    whole = head_logits(lm, hidden)
    plain = lm.get_output_embeddings()(hidden)
    assert not torch.allclose(whole, plain, rtol=0.01)
    torch.testing.assert_close(head_logits(lm, hidden, rows), whole[..., list(IDS)])


def test_ids_outside_the_vocabulary_are_refused() -> None:
    lm = tiny_lm("llama")
    with pytest.raises(ValueError, match="ids must be in the model's vocabulary of"):
        lm.partial_head((3, 10_000))
    with pytest.raises(ValueError, match="ids must be in the model's vocabulary of .*, got none"):
        lm.partial_head(())


def test_gradients_reach_the_heads_weight_through_some_of_its_rows() -> None:
    lm = tiny_lm("llama")
    hidden, weight = hidden_of(lm), lm.causal_lm.get_output_embeddings().weight
    narrow(lm, hidden).sum().backward()
    found, weight.grad = weight.grad, None
    lm.logits(hidden)[..., list(IDS)].sum().backward()
    torch.testing.assert_close(found, weight.grad)
    assert found[list(IDS)].abs().sum() > 0


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "all-linear"),
        ("llama", ("q_proj", "lm_head")),
        ("qwen2", "all-linear"),
        ("gemma3", "all-linear"),
    ],
)
def test_rows_are_right_under_an_adapter_and_after_it_is_merged(family: str, targets: Any) -> None:
    """Heads that are tied, and one that is adapted."""
    lora = LoraSettings(r=4, lora_alpha=8, target_modules=targets)
    lm = tiny_lm(family, lora=lora)
    ids = tuple(sorted({*IDS, lm.template.separator_id}))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    hidden = hidden_of(lm)

    @torch.no_grad()
    def check() -> Tensor:
        found = narrow(lm, hidden, ids)
        torch.testing.assert_close(found, lm.logits(hidden)[..., list(ids)], rtol=1e-4, atol=1e-4)
        return found

    before = check()
    with lm.merged():
        check()
    torch.testing.assert_close(check(), before)
    lm.merge()
    check()


# What is counted


def test_prepare_counts_the_tokens_of_the_chains_and_the_separator() -> None:
    lm, _ = made()
    method = registry.build("sequential", {"shortlist": True})
    stream: Iterator[Example] = (example for example in EXAMPLES)
    assert list(method.prepare(lm, stream)) == list(EXAMPLES)  # a stream is not used up
    wanted = {lm.template.separator_id}
    for example in EXAMPLES:
        for step in lm.template.steps(example.steps):
            wanted |= set(step)
    assert method.config.shortlist_ids == tuple(sorted(wanted))
    again = dataclasses.replace(method.config)
    method.prepare(lm, EXAMPLES[:1])
    assert method.config == again  # what was counted is kept


def test_without_a_shortlist_nothing_is_counted() -> None:
    lm, _ = made()
    method = registry.build("sequential")
    assert method.prepare(lm, EXAMPLES) == list(EXAMPLES)
    assert method.config.shortlist_ids is None


def test_what_a_kept_shortlist_lacks_is_counted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    lm, method = made()
    known = method.config.shortlist_ids
    assert "warning" not in capsys.readouterr().err
    chain = [token for step in lm.template.steps(("<<3+4=7>>",)) for token in step]
    lacking = chain[0]
    ids = tuple(i for i in known if i != lacking)
    poor = registry.build("sequential", {"shortlist": True, "shortlist_ids": list(ids)})
    poor.prepare(lm, EXAMPLES)
    said = capsys.readouterr().err
    chains = [[t for step in lm.template.steps(e.steps) for t in step] for e in EXAMPLES]
    total = sum(map(len, chains))
    times = sum(chain.count(lacking) for chain in chains)
    assert f"lacks {times:,} of the {total:,} tokens of these chains (1 different ones" in said
    assert repr(lm.template.token(lacking)) in said
    assert said.count("warning") == 1


def test_a_shortlist_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    lm, method = made(live=False)
    folder = pretrained.save(lm, method, tmp_path / "saved", {"seed": 0}, "card")
    _, back = pretrained.load(folder)
    assert back.config == method.config
    assert len(back.config.shortlist_ids) > 5


def made(family: str = "llama", live: bool = True, **config: Any) -> tuple[LatentLM, Sequential]:
    return sequential.made(family, live, **{"shortlist": True, **config})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"shortlist_ids": [1]},
            "shortlist_ids is given, but method.shortlist is false",
        ),
        ({"shortlist": 3}, "shortlist must be true or false, got 3"),
        *(
            ({"shortlist": True, "shortlist_ids": ids}, "in ascending order, each once")
            for ids in ([], [2, 1], [1, 1], [-1, 2])
        ),
        *(
            (
                {"shortlist": True, "shortlist_ids": [wrong]},
                r"shortlist_ids\[0\] must be a whole number, got ",
            )
            for wrong in (1.5, "a", True)
        ),
    ],
)
def test_wrong_values_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.build("sequential", config)


def test_a_shortlist_that_cannot_be_counted_or_is_not_yet() -> None:
    lm, method = made()
    fresh = registry.build("sequential", {"shortlist": True})
    with pytest.raises(ValueError, match="no row has a chain"):
        fresh.prepare(lm, [EXAMPLES[2]])
    with pytest.raises(ValueError, match="shortlist_ids are not known yet: call prepare"):
        fresh.loss(lm, Batch.collate(encoded(lm, method)))


# Learning


@torch.no_grad()
def naive(lm: LatentLM, row: Row, c: int, ids: tuple[int, ...]) -> tuple[float, int]:
    """One row's loss, and how many of its labels the shortlist lacks, in plain loops."""
    sizes = naive_sizes(len(row.chain), c, 0.0)
    hidden = naive_hidden(lm, row, sizes)
    labels = naive_windows(row.chain, sizes, c, 0.0, lm.template.separator_id)
    labels += [[token] for token in row.answer]
    means, lacking = [], 0
    for k, label in enumerate(labels):
        state, losses = hidden[k], [-label_logp(lm, hidden[k], label[0])]
        for before, token in itertools.pairwise(label):
            state = lm.extra["group_decoder"](state, lm.embed(torch.tensor(before)))
            losses.append(-label_logp(lm, state, token, ids))
            lacking += token not in ids
        means.append(sum(losses) / len(losses))
    return sum(means) / len(means), lacking


@pytest.mark.parametrize(
    ("family", "c", "kept"),
    [
        ("llama", 1, "all"),
        ("llama", 5, "half"),
        ("qwen2", 2, "half"),
        ("gemma3", 2, "all"),
        ("gemma3", 5, "half"),
        ("gpt2", 1, "half"),
        ("gpt2", 5, "all"),
    ],
)
def test_the_loss_is_a_naive_loop_also_where_labels_are_lacking(family: str, c: int, kept: str) -> None:
    lm, method = made(family, live=False, compression_factors=[c])
    if kept == "half":
        ids = method.config.shortlist_ids[::2]
        method.config = dataclasses.replace(method.config, shortlist_ids=ids)
    rows = encoded(lm, method)
    found = method.loss(lm, Batch.collate(rows))
    wanted = [naive(lm, row, c, method.config.shortlist_ids) for row in rows]
    assert found["ce"].tolist() == pytest.approx([loss for loss, _ in wanted], rel=1e-4)
    assert (max(lacking for _, lacking in wanted) > 0) == (kept == "half" and c > 1)
    # It is trained as it is scored: a finite gradient, where labels are lacking too.
    found["ce"].sum().backward()
    gradient = lm.extra["group_decoder"].mlp[-1].weight.grad
    assert c == 1 or float(gradient.abs().sum()) > 0
    assert gradient is None or bool(gradient.isfinite().all())


def test_a_shortlist_of_the_whole_vocabulary_changes_nothing() -> None:
    lm, short = made(**ANY_SPEED)
    everything = tuple(range(lm.causal_lm.get_input_embeddings().weight.shape[0]))
    short.config = dataclasses.replace(short.config, shortlist_ids=everything)
    whole = registry.build("sequential", {**ANY_SPEED})
    whole.prepare(lm, EXAMPLES)
    batch = Batch.collate(encoded(lm, short))
    torch.testing.assert_close(short.loss(lm, batch)["ce"], whole.loss(lm, batch)["ce"])
    # Each factor once, two of each decoding.
    for request in requests()[::3]:
        mine, theirs = (reference.complete(lm, method, request) for method in (short, whole))
        assert mine.token_ids == theirs.token_ids
        for one, other in zip(mine.thought_info(), theirs.thought_info(), strict=True):
            assert one["group_ids"].tolist() == other["group_ids"].tolist()


# Thinking


def requests() -> list[Request]:
    """Whole and real factors, with a threshold and without, greedy and sampled: all share the batches."""
    asked = []
    for place, (mode, decoding) in enumerate(
        (("greedy", GREEDY), ("sampled", SAMPLED), ("two", TWO_TEMPERATURES))
    ):
        for i, example in enumerate(EXAMPLES):
            threshold = (0, 0.05)[(place + i) % 2]
            params = SequentialParams((1, 2, 3, 5, 1.5, 2.5)[(place + i) % 6], confidence_threshold=threshold)
            asked.append(
                Request(f"{mode}/{i}", example.question, params, decoding, i, i % 3, keep_latents=True)
            )
    return asked


def group(info: Any) -> list[int]:
    return [token for token in info["group_ids"].tolist() if token >= 0]


@pytest.mark.parametrize(("family", "shortlist"), [("llama", False), ("llama", True), ("gemma3", True)])
def test_the_engine_equals_the_reference(family: str, shortlist: bool) -> None:
    lm, method = made(family, shortlist=shortlist, **ANY_SPEED)
    # Without one: tests/test_real_factors.py, but for the decodings of two temperatures.
    asked = requests() if shortlist else requests()[::2]
    expected = [reference.complete(lm, method, request) for request in asked]
    firsts, behind = set(), set()
    for mine, theirs in zip(Engine(lm, method, 5).generate(asked), expected, strict=True):
        assert (mine.token_ids, mine.length) == (theirs.token_ids, theirs.length), mine.request.id
        for one, other in zip(mine.thought_info(), theirs.thought_info(), strict=True):
            assert one["group_ids"].tolist() == other["group_ids"].tolist()
            torch.testing.assert_close(one["group_logps"], other["group_logps"], rtol=1e-3, atol=1e-4)
            firsts.add(group(one)[0])
            behind |= set(group(one)[1:])
    if shortlist:
        assert behind <= set(method.config.shortlist_ids)
        assert not firsts <= set(method.config.shortlist_ids)  # the first token has the whole vocabulary
    assert len(behind) > 2


def test_infos_that_nobody_looks_at_change_nothing() -> None:
    lm, method = made(**ANY_SPEED)
    asked = [dataclasses.replace(request, keep_latents=False) for request in requests()]
    looked = Engine(lm, method, 8).generate(requests())
    for mine, theirs in zip(Engine(lm, method, 8).generate(asked), looked, strict=True):
        assert (mine.token_ids, mine.length) == (theirs.token_ids, theirs.length)


def test_rows_are_gathered_once_and_again_after_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimiser does not count its changes: whoever kept rows by the weight's counter would miss them."""
    lm, method = made(**ANY_SPEED)
    gathered = []
    gather = lm.partial_head
    monkeypatch.setattr(lm, "partial_head", lambda ids: gathered.append(ids) or gather(ids))
    engine = Engine(lm, method, max_batch=64)
    weight = lm.causal_lm.get_output_embeddings().weight
    optimizer = torch.optim.AdamW([weight], lr=0.3, fused=True)
    for done in range(1, 4):
        found = engine.generate(requests()[::3])
        assert gathered == done * [method.config.shortlist_ids]
        for mine, theirs in zip(found, Engine(lm, method, 64).generate(requests()[::3]), strict=True):
            assert mine.token_ids == theirs.token_ids
            for one, other in zip(mine.thought_info(), theirs.thought_info(), strict=True):
                torch.testing.assert_close(one["group_logps"], other["group_logps"], rtol=1e-3, atol=1e-4)
        gathered.pop()
        before = weight._version
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        assert weight._version == before


@pytest.mark.parametrize("shortlist", [False, True])
@torch.no_grad()
def test_a_row_whose_group_has_ended_costs_nothing(shortlist: bool) -> None:
    """The decoder runs as often as there are tokens behind the first of a group."""
    lm, method = made(shortlist=shortlist, compression_factors=[1, 2, 5])
    decoded = []
    lm.extra["group_decoder"].register_forward_hook(lambda module, given, state: decoded.append(len(state)))
    torch.manual_seed(5)
    hidden = torch.randn(40, lm.width)
    first = torch.randint(0, 60, (40,))
    first[:7] = lm.template.separator_id
    most = torch.tensor([1, 2, 5, 5])[torch.arange(40) % 4]
    zero, one = torch.zeros(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    rows = lm.partial_head(method.config.shortlist_ids) if shortlist else None
    for temperature in (zero, one):
        decoded.clear()
        draws = torch.rand(5, 40, dtype=torch.float64)
        modes = DrawModes.of([(float(temperature[0]), 1.0)])

        def rules_of(
            some: Any, draws: Any = draws, modes: Any = modes, temperature: Any = temperature
        ) -> Rules:
            columns = [column[some] for column in (most, temperature, one, zero)]
            units, own_temperature, top_p, threshold = columns
            return Rules(
                units,
                5,
                units > 1,
                own_temperature,
                top_p,
                modes,
                threshold,
                False,
                lambda place: draws[place, some],
                rows,
            )

        ids = choose_groups(lm, hidden, first, rules_of(slice(None))).ids
        real = ids >= 0
        assert sum(decoded) == int(real.sum()) - 40
        assert decoded[0] < 40
        # Each row is what it is alone.
        for i in range(40):
            found = choose_groups(lm, hidden[i : i + 1], first[i : i + 1], rules_of(slice(i, i + 1))).ids
            assert found[0].tolist() == ids[i].tolist()


# Reinforcement


@pytest.mark.parametrize(
    ("family", "temperature", "drawn_at"),
    [("llama", 1.0, 1.0), ("gemma3", 0.7, 1.2), ("gpt2", 1.0, 0.0)],
)
def test_log_probs_of_thoughts_are_exact(family: str, temperature: float, drawn_at: float) -> None:
    lm, method = made(family, compression_factors=[1, 2, 3])
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
        mask, wanted = scores.mask[row], choice_logps(lm, each, method.config.shortlist_ids)
        assert scores.logps[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
        assert engine[row][mask].tolist() == pytest.approx(wanted, rel=2e-4, abs=2e-4)
    scores.logps.sum().backward()
    if drawn_at > 0:
        assert lm.extra["group_decoder"].mlp[0].weight.grad.abs().sum() > 0


def test_reinforcement_samples_with_the_weights_that_it_trains(tmp_path: Path) -> None:
    """The untied head moves at each update: rows that were kept from before would show in the difference."""
    lm, method = made(compression_factors=[2, 3])
    publishable(lm)
    training = TrainingConfig(
        report_to="none",
        logging_steps=1,
        save_steps=1000,
        learning_rate=1e-2,
        max_steps=6,
        per_device_train_batch_size=24,
    )
    config = GrpoConfig(
        num_generations=4, max_latents=5, max_completion_length=4, compression_factors=(2.0, 3.0)
    )
    before = lm.causal_lm.get_output_embeddings().weight.detach().clone()
    shorter = lambda completions, length, **columns: [-n for n in length]  # noqa: E731
    result = grpo_train.train(lm, method, EXAMPLES, training, config, tmp_path, reward_funcs={"own": shorter})
    rows = [row for row in result.history if "loss" in row]
    assert len(rows) == 6
    assert max(row["sampling/logp_difference"] for row in rows) < 1e-3
    assert not torch.allclose(before, lm.causal_lm.get_output_embeddings().weight, atol=1e-3)
