"""Losses against naive loops, gradients, padding, and methods that learn four examples by heart and answer them."""

import dataclasses
import itertools
import math
from random import Random

import pytest
import torch
from families import EXAMPLES, FAMILIES, OWN_LOSS, tiny_lm
from torch.distributions import Normal

from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import grouping, pretrained, registry
from colar.methods.base import Batch, Row
from colar.methods.colar import LOG_STD_RANGE, ColarParams, latent_loss
from colar.methods.thinking import StepConditions, ThinkState
from colar.model.latent_lm import LoraSettings
from colar.ops import noise, trees
from colar.ops.sampling import DrawModes

METHODS = tuple(registry.METHODS)
LAST_STAGE = math.inf
"""An epoch in which every curriculum has come to its end."""
TIES = [(family, tied) for family in FAMILIES for tied in (True, False) if tied or family != "gpt2"]
"""GPT-2's head is always tied."""


def build(lm, name, **config):
    """A method attached to `lm` and prepared, as before training."""
    method = registry.build(name, config)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return method


def encode(method, lm, examples=EXAMPLES, epoch=0.0):
    return [method.encode(lm.template, example, Random(i), epoch) for i, example in enumerate(examples)]


def total(method, lm, batch):
    """(B,) the rows' losses."""
    return sum(value for name, value in method.loss(lm, batch).items() if not name.startswith("_"))


def loss_of(method, lm, rows):
    return method.loss(lm, Batch.collate(rows))


# The loss by hand


@torch.no_grad()
def naive_colar(lm, config, row, c):
    """One row's terms: a loop over groups, no batch, no packing, no shifting."""
    question, chain, answer = (
        [lm.embed(torch.tensor(i)) for i in ids] for ids in (row.question, row.chain, row.answer)
    )
    latents, labels = [], []
    for k, first in enumerate(range(0, len(chain), c)):
        group = chain[first : first + c]
        scale = math.sqrt(len(group)) if config.merge == "sqrt" else len(group)
        latents.append(sum(group) / scale)
        u = noise.uniform(noise.keys(torch.tensor([row.seed]), noise.LABEL), k + 1)[0, k]
        tokens = row.chain[first : first + c]
        tokens = [tokens[int(u * len(group))]] if config.chain_label == "sampled" else tokens
        labels.append(tokens if config.supervise_chain else [])
    embeds = torch.stack([*question, *latents, *answer])
    forward = lm.causal_lm(inputs_embeds=embeds[None], output_hidden_states=True)
    # From the question's last position on.
    log_probs = forward.logits[0, len(question) - 1 :].float().log_softmax(-1)
    hidden = forward.hidden_states[-1][0, len(question) - 1 :]
    labels += [[token] for token in row.answer]
    ce = torch.stack([-log_probs[i, tokens].mean() for i, tokens in enumerate(labels) if tokens]).mean()
    losses = []
    for k, latent in enumerate(latents):
        mean, log_std = lm.extra["latent_head"](hidden[k])
        target = latent / config.sigma_e
        if config.head == "deterministic":
            losses.append(((mean - target) ** 2).mean())
        elif config.latent_loss == "nll":
            constant = 0.5 * math.log(2 * math.pi)
            nll = -Normal(mean, log_std.exp()).log_prob(target) - constant
            losses.append((nll * log_std.exp() ** (2 * config.nll_beta)).mean())
        else:
            entropy = Normal(mean, log_std.exp()).entropy()
            losses.append(((mean - target) ** 2 + log_std.exp() ** 2 - config.alpha * entropy).mean())
    return ce, torch.stack(losses).mean() if losses else torch.tensor(0.0)


CONFIGS = [
    {"latent_loss": "soft_mse", "alpha": 0.5},
    {"latent_loss": "nll"},
    {"latent_loss": "nll", "nll_beta": 0.5},
    {"head": "deterministic"},
    {"merge": "mean", "latent_weight": 0.25},
    {"merge": "mean", "latent_loss": "nll", "supervise_chain": False},
    {"supervise_chain": False},
    {"chain_label": "sampled"},
    {"chain_label": "sampled", "merge": "mean", "latent_loss": "nll"},
]


@pytest.mark.parametrize(("config", "family"), zip(CONFIGS, itertools.cycle(FAMILIES), strict=False), ids=str)
def test_colar_loss_equals_a_naive_loop(config, family):
    """A config is about terms, a family about the forward: each of both at least once."""
    lm = tiny_lm(family)
    method = build(lm, "colar", compression_factors=[1, 2, 3, 5], **config)
    rows = [row for i in range(2) for row in encode(method, lm, epoch=i)]
    rows = [dataclasses.replace(row, params=ColarParams(1 + i % 5), seed=i) for i, row in enumerate(rows)]
    found = loss_of(method, lm, rows)
    for b, row in enumerate(rows):
        ce, latent = naive_colar(lm, method.config, row, row.params.compression_factor)
        torch.testing.assert_close(found["ce"][b], ce, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            found["latent"][b], latent * method.config.latent_weight, rtol=1e-4, atol=1e-5
        )
        # Row 2 of every six has no reasoning: nothing to compress, and the stop and the answer are still learnt.
        assert (latent == 0) == (len(row.chain) == 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_cot_loss_equals_hugging_face(family):
    lm = tiny_lm(family)
    for name in ("cot", "no_cot"):
        method = build(lm, name)
        rows = encode(method, lm)
        assert all(
            (row.chain == []) == (name == "no_cot" or not example.steps)
            for row, example in zip(rows, EXAMPLES, strict=True)
        )
        found = loss_of(method, lm, rows)["ce"]
        for b, row in enumerate(rows):
            ids = [*row.question, *row.chain, *row.answer]
            labels = [-100] * len(row.question) + ids[len(row.question) :]
            theirs = lm.causal_lm(torch.tensor([ids]), labels=torch.tensor([labels])).loss
            torch.testing.assert_close(found[b], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_colar_at_factor_one_is_cot(family):
    """A group of one token is that token's embedding, so with the same prompt L_comp is CoT's loss."""
    lm = tiny_lm(family)
    cot = build(lm, "cot")
    rows = encode(cot, lm)
    expected = loss_of(cot, lm, rows)["ce"]
    colar = build(lm, "colar")
    rows = [dataclasses.replace(row, params=ColarParams(1)) for row in rows]
    torch.testing.assert_close(loss_of(colar, lm, rows)["ce"], expected, rtol=1e-5, atol=1e-6)


# Padding and batches


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "gemma3") for name in OWN_LOSS), *(("coconut", each) for each in FAMILIES if each != "gemma3")],
)
def test_padding_and_batch_mates_do_not_matter(name, family):
    """PITFALLS 4, 5: columns of garbage, and longer rows beside it, leave a row's loss as it is.

    At the beginning, in the middle and at the end of a curriculum. Gemma has windows; Coconut has a cache beside them,
    so that it sees every family. In float64: a batch of another shape adds up in another order, and each hidden state
    that is fed again multiplies the rounding error, in some families a thousandfold over six latents. What is left
    is the rounding of the losses themselves, means in float32 over fewer than a hundred positions.
    """
    lm = tiny_lm(family)
    method = build(lm, name)
    lm.double()
    examples = list(method.prepare(lm, EXAMPLES))
    staged = method.stage(0.0) != method.stage(LAST_STAGE)
    rows = [
        row
        for epoch in ((0.0, 4.0, LAST_STAGE) if staged else (0.0,))
        for row in encode(method, lm, examples, epoch)
    ]
    batch = Batch.collate(rows)
    together = method.loss(lm, batch)
    losses = total(method, lm, batch)
    assert torch.isfinite(losses).all()
    assert (losses > 0).all()
    padded = {
        key: torch.cat([getattr(batch, key), torch.randint(5, 90, (len(rows), 3))], dim=1)
        for key in ("question_ids", "chain_ids", "answer_ids", "step_sizes")
    }
    for key, lengths in (
        ("question_ids", "question_lengths"),
        ("chain_ids", "chain_lengths"),
        ("answer_ids", "answer_lengths"),
    ):
        real = torch.arange(padded[key].shape[1]) < getattr(batch, lengths)[:, None]
        padded[key] = torch.where(real, padded[key], torch.randint(5, 90, padded[key].shape))
    with_garbage = method.loss(lm, dataclasses.replace(batch, **padded))
    # Each example once, in a curriculum two of them at each stage: a forward for every latent of every row takes long.
    some = [i for i in range(len(rows)) if not staged or i % 3 == i // len(examples)]
    alone = [method.loss(lm, Batch.collate([rows[i]])) for i in some]
    backwards = method.loss(lm, Batch.collate(rows[::-1]))
    rounding = 100 * torch.finfo(torch.float32).eps
    for key, values in together.items():
        by_itself = torch.stack([terms[key][0] for terms in alone])
        for others, own in (
            (by_itself, values[some]),
            (backwards[key].flip(0), values),
            (with_garbage[key], values),
        ):
            torch.testing.assert_close(others, own, rtol=rounding, atol=rounding / 10)


def test_batch_survives_the_trip_as_tensors():
    lm = tiny_lm("llama")
    method = build(lm, "colar")
    batch = Batch.collate(encode(method, lm))
    back = Batch.from_tensors({name: value.clone() for name, value in batch.tensors().items()})
    assert batch.tensors().keys() == back.tensors().keys()
    for name, value in batch.tensors().items():
        assert torch.equal(value, back.tensors()[name])
    assert back.params["compression_factor"].tolist() == [
        r.params.compression_factor for r in encode(method, lm)
    ]
    sizes = [[len(step) for step in row.steps] for row in encode(method, lm)]
    assert [[n for n in row if n] for row in batch.step_sizes.tolist()] == sizes


# What CoLaR feeds and labels


def colar_row(length, c):
    return Row(
        [7, 8, 9], [list(range(100, 100 + length))] if length else [], [50, 51, 1], ColarParams(c), length
    )


@pytest.mark.parametrize("c", [1, 2, 3, 4, 5])
def test_the_stop_label_is_never_lost(c):
    """PITFALLS 7: for every length, L_c labels out of their groups and then, without a gap, ### answer EOS."""
    method = registry.build("colar")
    for length in range(13):
        batch = Batch.collate([colar_row(length, c), colar_row(12, 1)])
        n = math.ceil(length / c)
        sizes = grouping.even_sizes(batch.chain_lengths, batch.params["compression_factor"])
        labels, weights = method.labels(batch, sizes)
        assert labels[0, n : n + 3, 0].tolist() == [50, 51, 1]
        assert weights[0, n : n + 3, 0].tolist() == [1, 1, 1]
        total = weights.sum(-1)
        torch.testing.assert_close(
            total[0], torch.tensor([1.0] * (n + 3) + [0.0] * (labels.shape[1] - n - 3))
        )
        for k in range(n):
            group = list(range(100 + k * c, 100 + min(length, (k + 1) * c)))
            assert labels[0, k][weights[0, k] > 0].tolist() == group
        stop_only = registry.build("colar", {"supervise_chain": False})
        _, only = stop_only.labels(batch, sizes)
        assert only[0].sum(-1).nonzero()[:, 0].tolist() == [n, n + 1, n + 2]


def test_what_is_fed_is_what_is_compressed(monkeypatch):
    """The inputs of the backbone, seen by a hook: question, groups scaled by sqrt of their size, answer."""
    # Each row by itself: these two have one question.
    monkeypatch.setattr(trees, "plan", lambda *_: None)
    lm = tiny_lm("gemma3")
    method = build(lm, "colar")
    rows = [colar_row(7, 3), colar_row(0, 3)]
    seen = []
    layer = lm.causal_lm.base_model.layers[0]
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss_of(method, lm, rows)
    handle.remove()
    embed = lambda *ids: lm.embed(torch.tensor(ids))  # noqa: E731
    merged = [embed(*range(100 + a, 100 + b)).sum(0) / math.sqrt(b - a) for a, b in ((0, 3), (3, 6), (6, 7))]
    expected = torch.cat([embed(7, 8, 9), torch.stack(merged), embed(50, 51, 1)])
    assert seen[0].shape[1] == 16, "9 positions, padded to a multiple of 8"
    torch.testing.assert_close(seen[0][0, :9], expected)
    torch.testing.assert_close(seen[0][1, :6], embed(7, 8, 9, 50, 51, 1))


def test_the_factor_is_drawn_per_row_and_again_the_same():
    """PITFALLS 8, and: c is a function of the rng it is given, in the prompt as in the params."""
    lm = tiny_lm("llama")
    method = build(lm, "colar")
    examples = [dataclasses.replace(EXAMPLES[0], id=f"t/{i}") for i in range(60)]
    rows = encode(method, lm, examples)
    assert {row.params.compression_factor for row in rows} == {1, 2, 3, 4, 5}
    assert rows == encode(method, lm, examples)
    assert len({row.seed for row in rows}) == 60
    for row in rows:
        c = row.params.compression_factor
        assert row.question == lm.template.question(EXAMPLES[0].question, f"(Thinking speed: {c})")
    only = registry.build("colar", {"compression_factors": [1.5]}).encode(
        lm.template, EXAMPLES[0], Random(0), 0
    )
    assert lm.template.decode(only.question).count("(Thinking speed: 1.5)") == 1


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, None) for family in FAMILIES), ("gemma3", LoraSettings(r=2, target_modules="all-linear"))],
)
def test_sigma_e_is_measured_on_the_embedding_modules_output(family, lora):
    """PITFALLS 9: Gemma scales by sqrt(width) inside the module, the others do not; no table of names."""
    lm = tiny_lm(family, lora=lora)
    method = build(lm, "colar")
    rows = lm.causal_lm.get_input_embeddings().weight.shape[0]
    output = lm.embed(torch.arange(rows)).std(correction=0).item()
    assert method.config.sigma_e == pytest.approx(output, rel=1e-5)
    weights = lm.causal_lm.get_input_embeddings().weight.std(correction=0).item()
    assert output / weights == pytest.approx(math.sqrt(32) if family == "gemma3" else 1.0, rel=1e-4)
    kept = build(lm, "colar", sigma_e=0.125)
    assert kept.config.sigma_e == 0.125


# When thinking stops


def state_of(lm, hidden, **params):
    """One greedy thinking step of as many requests as there are hidden states."""
    n = hidden.shape[0]
    columns = {"compression_factor": torch.full((n,), 2.0)}
    columns |= {name: torch.full((n,), float(value)) for name, value in params.items()}
    zeros = torch.zeros(n, dtype=torch.float64)
    whole = torch.arange(n)
    greedy = DrawModes.of([(0.0, 1.0)])
    most = tuple((name, math.ceil(column.max())) for name, column in columns.items())
    conditions = StepConditions(greedy, greedy, True, most, frozenset(columns))
    return ThinkState(
        hidden, whole * 0, columns, zeros, zeros + 1, zeros, whole, whole * 0, lm.logits, conditions
    )


def test_greedy_thinking_stops_when_that_is_more_likely_than_not():
    """At 40% a separator is likelier than any of five tokens of 12%, and yet the thinking should go on."""
    lm = tiny_lm("llama")
    for stop, at_40 in (("majority", False), ("argmax", True)):
        method = build(lm, "colar", stop=stop)
        state = state_of(lm, torch.zeros(2, lm.width))
        probs = torch.full((2, lm.embedding_table().shape[0]), 1e-9)
        probs[:, 7:12] = torch.tensor([[0.12], [0.08]])
        probs[:, lm.template.separator_id] = torch.tensor([0.4, 0.6])
        state.make_logits = lambda _, probs=probs: probs.log()
        assert method.think(lm, state).done.tolist() == [at_40, True]


# The latent losses


def test_log_std_is_clamped():
    """PITFALLS 10: heads that have run away give finite losses and spreads within the range."""
    lm = tiny_lm("llama")
    method = build(lm, "colar", latent_loss="nll")
    rows = encode(method, lm)
    for bias, bound in ((-500.0, LOG_STD_RANGE[0]), (500.0, LOG_STD_RANGE[1])):
        torch.nn.init.constant_(lm.extra["latent_head"].log_std.bias, bias)
        found = loss_of(method, lm, rows)
        assert torch.isfinite(found["latent"]).all()
        has_chain = torch.tensor([bool(row.chain) for row in rows])
        torch.testing.assert_close(found["_sigma"], torch.where(has_chain, math.exp(bound), 0.0))


def test_soft_mse_is_the_expectation_in_closed_form():
    """PITFALLS 11: E[(mu + sigma eps - e)^2] - alpha H, by a million draws; entropy is subtracted."""
    mean, log_std, target = torch.tensor([0.4, -1.0]), torch.tensor([-0.5, 0.3]), torch.tensor([0.1, 0.2])
    eps = torch.randn(1_000_000, 2, generator=torch.Generator().manual_seed(0))
    drawn = (mean + log_std.exp() * eps - target).square().mean(0)
    expected = drawn - 0.3 * Normal(mean, log_std.exp()).entropy()
    torch.testing.assert_close(
        latent_loss(mean, log_std, target, "soft_mse", 0.3), expected, rtol=0, atol=0.02
    )


@pytest.mark.parametrize("alpha", [0.02, 0.5])
@pytest.mark.parametrize("error", [0.0, 3.0])
def test_sigma_settles_at_the_root_of_half_alpha(alpha, error):
    log_std = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([log_std], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = latent_loss(torch.tensor(error), log_std, torch.tensor(0.0), "soft_mse", alpha)
        value.backward()
        return value

    optimiser.step(loss)
    assert log_std.exp().item() == pytest.approx(math.sqrt(alpha / 2), rel=0.01)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_beta_nll_scales_the_gradients_of_the_nll_by_sigma(beta):
    """At 1 the mean has half the squared error's; sigma is least where it is the error, at any beta."""
    mean, log_std, target = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    mean.requires_grad_(), log_std.requires_grad_()
    latent_loss(mean, log_std, target, "nll", nll_beta=beta).sum().backward()
    sigma, error = log_std.detach().exp(), mean.detach() - target
    torch.testing.assert_close(mean.grad, error * sigma ** (2 * beta - 2))
    torch.testing.assert_close(log_std.grad, (1 - (error / sigma) ** 2) * sigma ** (2 * beta))


# Gradients


def gradients(lm, method, rows=None):
    lm.zero_grad()
    total(method, lm, Batch.collate(rows or encode(method, lm))).sum().backward()
    return {
        name: p.grad for name, p in lm.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
    }


def names(lm, part):
    """Parameter names that contain `part`; at least one does."""
    found = {name for name, _ in lm.named_parameters() if part in name}
    assert found
    return found


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("qwen2", True), ("gpt2", True)]
)
def test_full_training_reaches_all_but_the_embeddings(family, tied):
    """The targets are made of the embeddings: they stand still, and with them a tied head."""
    lm = tiny_lm(family, tied=tied)
    method = build(lm, "colar")
    everything = {name for name, _ in lm.named_parameters()}
    frozen = names(lm, "wte" if family == "gpt2" else "embed_tokens")
    assert gradients(lm, method).keys() == everything - frozen
    assert ("lm.lm_head.weight" in everything - frozen) == (not tied)


def test_a_deterministic_head_has_no_spread_to_train():
    lm = tiny_lm("qwen2")
    found = gradients(lm, build(lm, "colar", head="deterministic"))
    assert not any("log_std" in name for name in found)
    assert any("latent_head.mean" in name for name in found)


@pytest.mark.parametrize(("family", "tied"), TIES)
def test_lora_trains_the_adapter_and_the_latent_head(family, tied):
    targets = ("c_attn",) if family == "gpt2" else ("q_proj", "v_proj")
    lm = tiny_lm(family, tied=tied, lora=LoraSettings(r=2, target_modules=targets))
    method = build(lm, "colar")
    trainable = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert trainable == names(lm, "lora_") | names(lm, "extra.")
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)  # zero at first, which would hide lora_A's gradient
    assert gradients(lm, method).keys() == trainable


def test_no_gradient_flows_into_targets_or_compressed_inputs():
    """Even with embeddings that are not frozen: a token that occurs in the chain alone gets no gradient."""
    lm = tiny_lm("llama")
    method = registry.build("colar", {"sigma_e": 0.5})
    pretrained.attach(lm, method, seed=0)
    grad = gradients(lm, method, [colar_row(9, 2), colar_row(4, 1)])["lm.model.embed_tokens.weight"]
    # EOS (1) is the last input, and nothing is predicted from there.
    assert grad.abs().sum(1).nonzero()[:, 0].tolist() == [7, 8, 9, 50, 51]


def test_gradient_checkpointing_changes_nothing():
    for lora in (None, LoraSettings(r=2)):
        lm = tiny_lm("llama", lora=lora).train()
        method = build(lm, "colar")
        plain = {name: grad.clone() for name, grad in gradients(lm, method).items()}
        lm.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        again = gradients(lm, method)
        assert plain.keys() == again.keys()
        for name, grad in plain.items():
            torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6)


# Params and configs


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, "compression_factor must be a number, 1 or more, got 0.5"),
        (0, "compression_factor must be a number, 1 or more, got 0"),
        (-2, "compression_factor must be a number, 1 or more, got -2"),
        (math.nan, "compression_factor must be a number, 1 or more, got nan"),
        (math.inf, "compression_factor must be a number, 1 or more, got inf"),
        ("2", "compression_factor must be a number, 1 or more, got '2'"),
        (True, "compression_factor must be a number, 1 or more, got True"),
        (None, "compression_factor must be a number, 1 or more, got None"),
        (10**400, "compression_factor must be a number, 1 or more, got 1000"),
    ],
)
def test_a_factor_that_is_none(value, message):
    with pytest.raises(ValueError, match=message):
        ColarParams(value)
    with pytest.raises(ValueError, match="compression_factor (is blank .*: it )?must be"):
        registry.make_params(registry.build("colar"), {"compression_factor": value})


def test_factors_far_beyond_what_was_trained_are_refused():
    """They would take as long as they are large, for whoever reads c tokens of each thought."""
    method = registry.build("colar", {"compression_factors": [1, 2, 5]})
    assert "was not trained" in method.check_params(ColarParams(32))
    for c in (33, 1e9, 10**300):
        with pytest.raises(ValueError, match=r"compression_factor must be 32 or less .*trained: 1, 2, 5"):
            method.check_params(ColarParams(c))
    wide = registry.build("colar", {"compression_factors": [1, 40]})
    assert wide.check_params(ColarParams(40)) is None


def test_factors_beyond_what_was_trained():
    method = registry.build("colar", {"compression_factors": [1, 2, 2.5]})
    assert method.check_params(ColarParams(2)) is None
    assert method.check_params(ColarParams(2.0)) is None
    assert method.check_params(ColarParams(2.5)) is None
    assert (
        method.check_params(ColarParams(7))
        == "compression_factor 7 was not trained (trained: 1, 2, 2.5): expect less"
    )
    with pytest.raises(
        ValueError, match=r"compression_factor 1\.5 is not whole and was not trained; trained: 1, 2, 2\.5"
    ):
        method.check_params(ColarParams(1.5))
    assert registry.build("cot").check_params(registry.make_params(registry.build("cot"), {})) is None


def test_a_whole_number_may_be_written_with_a_point():
    """6.0 in YAML is a size of 6."""
    n_pauses = registry.build("pause", {"n_pauses": 6.0}).config.n_pauses
    assert (n_pauses, type(n_pauses)) == (6, int)


def test_a_number_beyond_the_largest_float_is_no_size():
    with pytest.raises(ValueError, match="n_pauses must be a whole number, got 1000"):
        registry.build("pause", {"n_pauses": 10**400})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"merge": "sum"}, "method.merge must be one of sqrt, mean, got 'sum'"),
        ({"head": "gauss"}, "method.head must be one of gaussian, deterministic, got 'gauss'"),
        ({"own_latents": 0.0}, "unknown key 'method.own_latents'"),
        ({"nll_beta": 2.0}, "method.nll_beta must be a number, from 0 to 1, got 2.0"),
        ({"nll_beta": 0.5}, "method.nll_beta is a value of latent_loss nll; this one is soft_mse"),
        ({"stop": "never"}, "method.stop must be one of majority, argmax, got 'never'"),
        ({"latent_loss": "mse"}, "method.latent_loss must be one of soft_mse, nll, got 'mse'"),
        ({"head": "deterministic", "latent_loss": "nll"}, "method.latent_loss nll needs a spread"),
        ({"alpha": -0.1}, "method.alpha must be a number, 0 or more, got -0.1"),
        ({"alpha": math.nan}, "method.alpha must be a number, got nan"),
        ({"alpha": "0.1"}, "method.alpha must be a number, got '0.1'"),
        ({"latent_weight": math.inf}, "method.latent_weight must be a number, got inf"),
        ({"supervise_chain": 1}, "supervise_chain must be true or false, got 1"),
        ({"sigma_e": 0.0}, "sigma_e must be above 0 or null, got 0.0"),
        ({"sigma_e": math.inf}, "method.sigma_e must be a number or null, got inf"),
        ({"sigma_e": "big"}, "method.sigma_e must be a number or null, got 'big'"),
        ({"compression_factors": []}, "method.compression_factors must be a list of numbers, or a range"),
        (
            {"compression_factors": 3},
            "method.compression_factors must be a list (a number each) or text, got 3",
        ),
        ({"compression_factors": "5..1"}, "or a range of whole numbers such as \"1..5\", got '5..1'"),
        ({"compression_factors": "two"}, "or a range of whole numbers such as \"1..5\", got 'two'"),
        (
            {"compression_factors": "0..3"},
            "each of method.compression_factors must be a number, 1 or more, got 0",
        ),
        ({"compression_factors": [2, "3"]}, "method.compression_factors[1] must be a number, got '3'"),
        (
            {"compresion_factors": [2]},
            "unknown key 'method.compresion_factors', did you mean 'method.compression_factors'?",
        ),
    ],
    ids=str,
)
def test_config_errors_name_the_key_and_the_allowed(config, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (checked below, as plain text)
        registry.build("colar", config)
    assert message in str(error.value)


def test_unknown_names_are_told_the_nearest():
    with pytest.raises(
        ValueError, match=r"unknown method.name 'colr', did you mean 'colar'\?; allowed: cot, no_cot, colar"
    ):
        registry.build("colr")
    with pytest.raises(ValueError, match="method cot has no compression_factor; it takes none"):
        registry.make_params(registry.build("cot"), {"compression_factor": 2})
    with pytest.raises(ValueError, match="method colar has no ratio; it takes compression_factor"):
        registry.make_params(registry.build("colar"), {"ratio": 2})
    assert registry.make_params(registry.build("colar"), {"compression_factor": 3}) == ColarParams(3)


def test_an_unprepared_colar_says_so():
    lm = tiny_lm("llama")
    method = registry.build("colar")
    pretrained.attach(lm, method, seed=0)
    with pytest.raises(ValueError, match="sigma_e"):
        loss_of(method, lm, encode(method, lm))


def test_a_token_that_the_model_lacks_names_its_example():
    lm = tiny_lm("llama")
    lm.template.n_known = 5
    bad = Example("src/train/17", "q", ("1", "a b"), "1")
    for name in METHODS:
        with pytest.raises(ValueError, match="src/train/17: the token .* the model cannot read it"):
            registry.build(name).encode(lm.template, bad, Random(0), 0)


def test_modules_start_from_their_seed():
    lm = tiny_lm("llama")
    weights = []
    for seed in (1, 1, 2):
        pretrained.attach(lm, registry.build("colar"), seed)
        weights.append(lm.extra["latent_head"].mean.weight.clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# Four examples by heart


def learn(lm, method, batch, steps, lr):
    """A plain loop: Adam on the mean of the rows' losses."""
    lm.train()
    optimiser = torch.optim.Adam([p for p in lm.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimiser.zero_grad()
        total(method, lm, batch).mean().backward()
        optimiser.step()
    lm.eval()


HEART = (
    Example("h/0", "3 plus 4?", ("<<3+4=7>>",), "7"),
    Example("h/1", "5 plus 4, how many eggs?", ("<<5+4=9>>",), "9"),
    Example("h/2", "Ann has 2 times 4 pens.", ("<<2*4=8>>",), "8"),
    Example("h/3", "8, and 2 times 8?", ("<<2*8=16>>", "<<8+1=9>>"), "16"),
)


HEART_CONFIGS = {
    "colar": {"compression_factors": [1, 2], "alpha": 0.002},
    "sequential": {"compression_factors": [1, 2]},
}


# The other losses are compared with naive loops (tests/test_baselines.py, tests/test_sim_cot.py). CoLaR's latents are
# predictions, which have to be good ones.
@pytest.mark.parametrize("name", ["cot", "colar", "sequential", "ruplar"])
def test_four_examples_are_learnt_by_heart(name):
    """Learning and thinking meet: what is learnt from the loss comes out of the engine, stops included."""
    lm = tiny_lm("llama", scale=0.1)
    method = build(lm, name, **HEART_CONFIGS.get(name, {}))
    examples = list(method.prepare(lm, HEART))
    speeds = (
        [method.Params(1), method.Params(2)] if "compression_factors" in HEART_CONFIGS.get(name, {}) else None
    )
    asked = speeds or [method.Params()]
    rows = [
        dataclasses.replace(row, params=p, question=lm.template.question(e.question, method.speed_text(p)))
        for p in asked
        for row, e in zip(encode(method, lm, examples, epoch=LAST_STAGE), HEART, strict=True)
    ]
    batch = Batch.collate(rows)
    learn(lm, method, batch, *((150, 1e-2) if name == "colar" else (60, 2e-2)))
    decoding = Decoding(max_latents=40, max_completion_length=8)
    requests = [Request(e.id, e.question, p, decoding, keep_latents=True) for p in asked for e in HEART]
    found = Engine(lm, method).generate(requests)
    thoughts, sizes = method.training_thoughts(lm, batch)
    counts = (sizes > 0).sum(-1)
    for b, (done, example) in enumerate(zip(found, HEART * len(asked), strict=True)):
        assert (done.text, done.truncated) == (example.answer, False)
        assert done.length == counts[b]
        if (
            name not in ("colar", "ruplar") and done.length
        ):  # their latents are predictions of what training feeds, the others' the same
            torch.testing.assert_close(done.latents, thoughts[b, : done.length], rtol=1e-3, atol=1e-4)
    assert any(token_id >= 0 for done in found for token_id in done.thought_ids) == (name == "cot")
