"""SIM-CoT: texts by hand, both terms and their gradients by one full forward a group, and what a checkpoint holds."""

import copy
import dataclasses
import math
from pathlib import Path
from random import Random

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from colar import files
from colar.data.arithmetic import ArithmeticConfig, generate
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch
from colar.methods.sim_cot import BackboneCopy
from colar.model import backbones, weights
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.config import TrainingConfig
from colar.training.run_folder import RunFolder
from colar.training.sft import train

LAST = math.inf
CURRICULUM = {"epochs_per_stage": 1, "n_stages": 2}
STAGES = (0.0, 1.0, LAST)
TOY = list(generate(ArithmeticConfig(), "train", 16, seed=0))


def build(family="llama", scale=0.5, **config):
    lm = tiny_lm(family, scale=scale)
    method = registry.build("sim_cot", {**CURRICULUM, **config})
    pretrained.attach(lm, method, seed=3)
    return lm, method


def encode(lm, method, examples=EXAMPLES, epoch=LAST):
    return [method.encode(lm.template, example, Random(i), epoch) for i, example in enumerate(examples)]


def embed(lm, ids):
    return [lm.embed(torch.tensor([token]))[0] for token in ids]


# What the decoder writes


@pytest.mark.parametrize(
    ("epoch", "texts"),
    [
        (0.0, ["<<12*5=60>>"]),
        (1.0, ["<<12*5=60>>", "<<60-8=52>>"]),
        (LAST, ["<<12*5=60>>", "<<60-8=52>> <<52*1=52>>"]),
    ],
)
def test_a_text_for_each_step_that_is_replaced(epoch, texts):
    """Three steps and two stages: in the last one the last group of latents stands for all that are left."""
    lm, method = build()
    (row,) = encode(lm, method, EXAMPLES[3:4], epoch)
    assert [lm.template.decode(text[:-1]).strip() for text in row.latent_texts] == texts
    assert {text[-1] for text in row.latent_texts} <= {lm.template.eos_id}
    assert row.n_latents == 2 * len(texts)


def test_no_step_is_written_twice_and_none_is_lost():
    lm, method = build(n_stages=3, n_latents_per_step=1)
    for epoch in (0.0, 1.0, 2.0, LAST):
        for row, example in zip(encode(lm, method, epoch=epoch), EXAMPLES, strict=True):
            steps = lm.template.steps(example.steps)
            written = [token for text in row.latent_texts[: len(steps)] for token in text[:-1]]
            assert written + row.chain == [token for step in steps for token in step]


def test_latents_without_a_step_say_the_answer():
    lm, method = build()
    one_step, no_step = encode(lm, method, [EXAMPLES[0], EXAMPLES[2]])
    (step,) = lm.template.steps(EXAMPLES[0].steps)
    eos = lm.template.eos_id
    assert one_step.latent_texts == [[*step, eos], one_step.answer[1:]]
    assert no_step.latent_texts == [no_step.answer[1:]] * 2
    assert no_step.answer[-1] == eos
    assert lm.template.decode(no_step.answer[1:-1]).strip() == "9"


# The loss by hand


def naive_terms(lm, method, row):
    """One row: latents by full forwards without a cache, then each text by a forward of its own."""
    C = method.config.n_latents_per_step
    fed = embed(lm, row.question)
    for _ in range(row.n_latents):
        fed.append(lm.hidden(torch.stack(fed)[None])[0, -1])
    latents, tail = fed[len(row.question) :], [*row.chain, *row.answer]
    log_probs = lm.logits(lm.hidden(torch.stack([*fed, *embed(lm, tail)])[None])[0]).log_softmax(-1)
    ce = torch.stack([-log_probs[len(fed) - 1 + i, token] for i, token in enumerate(tail)]).mean()
    losses = []
    for group, text in enumerate(row.latent_texts):
        read = [*latents[C * group : C * (group + 1)], *embed(lm, text[:-1])]
        decoder = lm.extra["step_decoder"].body
        states = decoder(inputs_embeds=torch.stack(read)[None]).last_hidden_state[0]
        says = lm.logits(states).log_softmax(-1)
        losses.append(torch.stack([-says[C - 1 + i, token] for i, token in enumerate(text)]).mean())
    return ce, torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("family", "n_latents_per_step"), [("llama", 1), ("qwen2", 3), ("gemma3", 3), ("gpt2", 1)]
)
def test_terms_and_gradients_are_those_of_full_forwards(family, n_latents_per_step):
    """Rows of all stages in one batch: through latents the decoder's loss reaches the model, the question included."""
    # Smaller weights than elsewhere: fed back nine times, rounding errors of the float32 logits stay small.
    lm, method = build(family, 0.2, n_latents_per_step=n_latents_per_step, decoder_weight=0.5)
    lm.double()
    with torch.no_grad():  # so that decoder and model differ
        for weight in lm.extra.parameters():
            weight.mul_(1.1)
    # Of one step, of none, and of three.
    examples = (EXAMPLES[0], *EXAMPLES[2:4])
    rows = [row for epoch in STAGES for row in encode(lm, method, examples, epoch)]
    found = method.loss(lm, Batch.collate(rows))
    sum(found.values()).sum().backward()
    gradients = {name: weight.grad for name, weight in lm.named_parameters()}
    lm.zero_grad()
    expected = [naive_terms(lm, method, row) for row in rows]
    for b, (ce, decoder) in enumerate(expected):
        torch.testing.assert_close(found["ce"][b], ce.float(), rtol=1e-5, atol=1e-5, check_dtype=False)
        wanted = 0.5 * decoder.float()
        torch.testing.assert_close(found["decoder"][b], wanted, rtol=1e-5, atol=1e-5, check_dtype=False)
        assert decoder > 0
    sum(ce + 0.5 * decoder for ce, decoder in expected).backward()
    for name, weight in lm.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_the_decoder_teaches_the_model_through_the_latents():
    """A token that only the question holds has a gradient of the decoder's loss alone."""
    lm, method = build()
    (row,) = encode(lm, method, EXAMPLES[:1])
    told = {token for text in row.latent_texts for token in text}
    (token, *_) = [token for token in row.question if token not in told]
    method.loss(lm, Batch.collate([row]))["decoder"].sum().backward()
    assert lm.causal_lm.get_input_embeddings().weight.grad[token].abs().sum() > 0


# Padding, batch mates, order, seeds


@pytest.fixture(scope="module")
def known():
    lm, method = build()
    rows = [row for epoch in STAGES for row in encode(lm, method, epoch=epoch)]
    with torch.no_grad():
        return lm, method, rows, method.loss(lm, Batch.collate(rows))


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_neither_order_nor_batch_mates_nor_padding_change_a_row(known, data):
    lm, method, rows, expected = known
    order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, 8))]
    batch = Batch.collate([rows[i] for i in order])
    extra = data.draw(st.integers(0, 4))
    garbage = torch.randint(5, 90, (len(order), batch.text_ids.shape[1] + extra))
    real = torch.arange(garbage.shape[1]) < batch.text_sizes.sum(1)[:, None]
    garbage[:, : batch.text_ids.shape[1]][real[:, : batch.text_ids.shape[1]]] = batch.text_ids[
        real[:, : batch.text_ids.shape[1]]
    ]
    padded = dataclasses.replace(batch, text_ids=garbage)
    with torch.no_grad():
        for name, values in method.loss(lm, padded).items():
            torch.testing.assert_close(values, expected[name][order], rtol=1e-3, atol=1e-4)
        # A part of a batch is as wide as the batch.
        part = method.loss(lm, padded.rows(torch.tensor([0])))
        torch.testing.assert_close(part["decoder"], expected["decoder"][order[:1]], rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), epoch=st.floats(0, 6), index=st.integers(0, len(EXAMPLES) - 1))
def test_a_row_is_a_function_of_its_arguments(known, seed, epoch, index):
    lm, method, *_ = known
    one, same = (method.encode(lm.template, EXAMPLES[index], Random(seed), epoch) for _ in range(2))
    assert one == same
    other = method.encode(lm.template, EXAMPLES[index], Random(seed + 1), epoch)
    assert dataclasses.replace(other, seed=one.seed) == one, "nothing but the seed is drawn"


# The decoder


ADAPTER = LoraSettings(r=2, target_modules="all-linear")


@pytest.mark.parametrize(
    ("family", "lora"), [("llama", None), *((family, ADAPTER) for family in FAMILIES)], ids=str
)
@torch.no_grad()
def test_the_decoder_starts_as_the_model(family, lora):
    """The same hidden states; an adapter that was trained before is in its weights."""
    lm = tiny_lm(family, lora=lora)
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    decoder = BackboneCopy(lm)
    embeds = lm.embed(torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]))
    torch.testing.assert_close(decoder(embeds), lm.hidden(embeds), rtol=1e-4, atol=1e-4)
    assert all(weight.requires_grad for weight in decoder.parameters())
    own = {weight.data_ptr() for weight in decoder.parameters()}
    assert not own & {weight.data_ptr() for weight in lm.parameters()}
    assert not any("lora" in name or "wte" in name or "embed_tokens" in name for name in decoder.state_dict())


def test_weights_of_4_bits_are_refused():
    lm = tiny_lm("llama")
    lm.causal_lm.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="load_in_4bit must be false: a copy of the backbone is trained"):
        BackboneCopy(lm)


def test_on_a_half_precision_backbone_it_is_trained_in_float32():
    lm = tiny_lm("llama", lora=LoraSettings(r=2))
    lm.lm.to(torch.bfloat16)
    method = registry.build("sim_cot", CURRICULUM)
    pretrained.attach(lm, method, seed=0)
    assert {weight.dtype for weight in lm.extra.parameters()} == {torch.float32}
    sum(method.loss(lm, Batch.collate(encode(lm, method))).values()).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in lm.extra.parameters())


# Through training


QUICK = {"report_to": "none", "logging_steps": 1, "save_steps": 3, "per_device_train_batch_size": 8}


def run(folder: Path, lora=None, **options):
    """Two updates an epoch, each epoch another stage."""
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=lora)
    method = registry.build("sim_cot", CURRICULUM)
    pretrained.attach(lm, method, seed=0)
    result = train(lm, method, TOY, TrainingConfig(**QUICK, **options), folder)
    return lm, method, result


@pytest.fixture(scope="module", params=[None, LoraSettings(r=2)], ids=["full", "lora"])
def trained(request, tmp_path_factory):
    """A run through all stages, and whether it has an adapter."""
    return *run(tmp_path_factory.mktemp("run"), request.param, num_train_epochs=3), request.param is not None


def test_a_checkpoint_without_the_decoder_answers_as_the_model(trained):
    lm, method, result, _ = trained
    assert files.read_json(result.best / "colar.json")["modules"] == []
    assert not (result.best / weights.MODULES).exists()
    again, loaded = pretrained.load(result.best)
    assert not again.extra
    decoding = Decoding(max_latents=16, max_completion_length=6)
    requests = [Request(e.id, e.question, method.Params(), decoding, keep_latents=True) for e in TOY[:5]]
    with_decoder = Engine(lm.eval(), method).generate(requests)
    without = Engine(again, loaded).generate(requests)
    for one, other in zip(with_decoder, without, strict=True):
        assert one.token_ids == other.token_ids
        assert one.length == other.length == 4
        assert torch.equal(one.latents, other.latents)


def test_a_run_resumes_exactly_between_two_stages(tmp_path):
    """Stopped within its second epoch and resumed, it ends as the run that was never stopped, decoder included."""
    whole, _, _ = run(tmp_path / "whole", max_steps=5)
    run(tmp_path / "halves", max_steps=3)
    checkpoint = RunFolder(tmp_path / "halves").last_resume_state()
    assert any(name.startswith("step_decoder.") for name in weights.read(checkpoint / weights.MODULES))
    resumed, _, _ = run(tmp_path / "halves", max_steps=5)
    before = copy.deepcopy(whole.state_dict())
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_another_stage_of_training_copies_the_weights_it_starts_from(trained):
    lm, method, result, adapted = trained
    settings = LoraSettings(r=2) if adapted else None
    again = pretrained.load_for_training(result.best, method, settings, "float32", seed=0)
    embeds = lm.embed(torch.tensor([[5, 6, 7]]))
    torch.testing.assert_close(again.extra["step_decoder"](embeds), lm.eval().hidden(embeds))
