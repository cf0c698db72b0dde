"""Numbers as tokens: how a text is cut, what the new rows start from, how they are trained, saved and loaded."""

import math
import re
from pathlib import Path

import pytest
import torch
from families import EXAMPLES, FAMILIES, backbone, build_tokenizer, liven, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_checkpoint import completions, logits, save_backbone, train
from test_engine import GREEDY, SAMPLED, same
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from colar import number_tokens, recipe
from colar.data.example import Example
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Request
from colar.methods import pretrained, registry
from colar.model import added_rows, backbones, card, checkpoint, number_rows, weights
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.template.template import Template, TemplateConfig

LARGEST = number_tokens.LARGEST
RUN = {"seed": 0, "steps": 3}


def lora_for(family):
    return LoraSettings(r=2, target_modules="all-linear" if family == "gpt2" else ("q_proj", "v_proj"))


def built(family, largest):
    template = Template(TemplateConfig(), build_tokenizer(family, family != "gemma3", digits=True))
    template.add_numbers(largest)
    return template


@pytest.fixture(scope="module")
def templates():
    return {(family, largest): built(family, largest) for family in FAMILIES for largest in LARGEST}


def numbers_in(template, ids):
    """The tokens that are digits, as text."""
    texts = [template.token(token_id).strip() for token_id in ids]
    return [text for text in texts if text.isdecimal()]


def cut(text, largest):
    """The same by brute force: from the left, the longest number that is a token; a zero in front is a digit."""
    longest = len(str(largest))
    found = []
    for digits in re.findall(r"[0-9]+", text):
        while digits:
            length = 1 if digits[0] == "0" else min(longest, len(digits))
            found.append(digits[:length])
            digits = digits[length:]
    return found


# Where tokens are cut


CUTS = {
    # text: tokens of its numbers with numbers to 99, to 999
    "12": ("12", "12"),
    "7": ("7", "7"),
    "125": ("12 5", "125"),
    "1234": ("12 34", "123 4"),
    "1,000": ("1 0 0 0", "1 0 0 0"),
    "1000000": ("10 0 0 0 0 0", "100 0 0 0 0"),
    "$1,234.50": ("1 23 4 50", "1 234 50"),
    "0.05": ("0 0 5", "0 0 5"),
    "007": ("0 0 7", "0 0 7"),
    "0123": ("0 12 3", "0 123"),
    "1005": ("10 0 5", "100 5"),
    "a12b345": ("12 34 5", "12 345"),
    "-98%": ("98", "98"),
    "<<12*50=600>>": ("12 50 60 0", "12 50 600"),
    "3 pens, 40 eggs": ("3 40", "3 40"),
}


@pytest.mark.parametrize(("text", "expected"), CUTS.items())
@pytest.mark.parametrize("family", FAMILIES)
def test_cuts(templates, family, text, expected):
    for largest, tokens in zip(LARGEST, expected, strict=True):
        template = templates[family, largest]
        assert numbers_in(template, template.answer(text)) == tokens.split() == cut(text, largest)


NUMBERS = st.integers(0, 10**7).map(str) | st.from_regex(
    r"[0-9]{1,3}(,[0-9]{3}){0,2}(\.[0-9]{1,3})?", fullmatch=True
)
WORDS = st.sampled_from(
    ("Ann has ", " eggs", "$", "%", "<<", "*", "=", ">>", " ", "  ", "\n\n", "x", "é", "数", "▲", "²")
)
TEXTS = st.lists(NUMBERS | WORDS, min_size=1, max_size=8).map("".join)


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_any_text_comes_back_and_is_cut_from_the_left(templates, family, largest, text):
    template = templates[family, largest]
    ids = template.answer(text)[1:-1]
    assert template.decode(ids) == text.strip()
    assert numbers_in(template, ids) == cut(text, largest)


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=60)
@given(number=st.integers(0, 10**5).map(str))
def test_a_number_is_the_same_tokens_wherever_it_stands(templates, family, largest, number):
    """In a question, at the start of a step and inside one, in an answer."""
    template = templates[family, largest]
    alone = template.answer(number)[1:-1]
    steps = template.steps((f"{number}=x", f"<<{number}*({number}-x)>>"))
    for ids, times in (
        (template.question(f"Ann has {number} pens.", "speed"), 1),
        (template.question(f"{number} pens"), 1),
        (steps[0], 1),
        (steps[1], 2),
        (template.answer(f"${number}"), 1),
    ):
        joined = " ".join(map(str, ids))
        assert (
            f" {joined} ".count(" " + " ".join(map(str, alone[-len(cut(number, largest)) :])) + " ") >= times
        )
        assert numbers_in(template, ids) == cut(number, largest) * times


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=40)
@given(digits=st.text("123456789", min_size=1, max_size=9))
def test_without_zeros_numbers_are_cut_as_in_llama_3(templates, family, digits):
    template = templates[family, 999]
    assert numbers_in(template, template.answer(digits)) == re.findall(r"\d{1,3}", digits)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_numbers_of_two_digits_is_as_before(templates, family):
    plain = Template(TemplateConfig(), build_tokenizer(family, family != "gemma3", digits=True))
    for text in ("Ann has 3 pens and buys 4.", "<<3+4=7>>", "how many eggs?"):
        assert templates[family, 999].answer(text) == plain.answer(text)


def test_ids_are_new_ones_in_order():
    tokenizer = build_tokenizer("qwen2", True, digits=True)
    before = len(tokenizer)
    template = Template(TemplateConfig(), tokenizer)
    template.add_numbers(99)
    assert template.number_ids == list(range(before, before + 90)) == template.added_ids
    assert template.token(template.number_ids[0]) == "10"
    assert template.token(template.number_ids[-1]) == "99"
    # The separator is added first.
    template = built("gemma3", 99)
    assert template.added_ids == [template.separator_id, *template.number_ids]


def test_ids_that_were_asked_for_before_are_made_anew():
    template = Template(TemplateConfig(), build_tokenizer("qwen2", True, digits=True))
    assert len(template.answer("12")) == 4
    template.add_numbers(99)
    assert len(template.answer("12")) == 3


SMOLLM2 = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-gsm"


def test_smollm2():
    """The tokenizer of the shipped checkpoint."""
    template = Template(TemplateConfig(), AutoTokenizer.from_pretrained(SMOLLM2))
    template.add_numbers(99)
    assert template.number_ids == list(range(49152, 49152 + 90))
    tokens = [template.token(i) for i in template.question("Ann has 12 pens, $1,250.", "(Thinking speed: 2)")]
    assert "|".join(tokens[1:]) == "Ann| has| |12| pens|,| $|1|,|25|0|.| (|Thinking| speed|:| |2|)|###"
    (step,) = template.steps(("<<12*125=1500>>",))
    assert "|".join(template.token(i) for i in step) == "<<|12|*|12|5|=|15|0|0|>>"
    for text, (expected, _) in CUTS.items():
        ids = template.answer(text)
        assert numbers_in(template, ids) == expected.split()
        assert template.decode(ids[1:]) == text


# What is rejected


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma3"])
def test_a_tokenizer_with_numbers_of_its_own_is_rejected(family):
    template = Template(TemplateConfig(), build_tokenizer(family, True))
    with pytest.raises(
        ValueError, match=r"model.number_tokens must be null .* has tokens for numbers already, '"
    ):
        template.add_numbers(99)


def test_they_are_not_added_twice(templates):
    with pytest.raises(ValueError, match=r"has tokens for numbers already, '10' is \['10'\]"):
        built("qwen2", 99).add_numbers(999)


def test_a_tokenizer_without_digits_is_rejected():
    made = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "1": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")
    with pytest.raises(ValueError, match="model.number_tokens must be null .* no token for the digit 0"):
        number_tokens.add(tokenizer, 99)


def test_a_tokenizer_that_would_put_spaces_around_numbers_is_rejected():
    """One that marks the start of each piece of text as the start of a word."""
    words = {character: i for i, character in enumerate("▁0123456789abcdefghijklmnopqrstuvwxyzA<>*=.,$%-\n")}
    made = Tokenizer(models.BPE({**words, "<unk>": len(words)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<unk>")
    assert tokenizer.decode(tokenizer.encode("x10y")) == "x10y"
    with pytest.raises(ValueError, match=r"with numbers as tokens it gives 'Ann has 12 .*' back as '"):
        number_tokens.add(tokenizer, 99)


@pytest.mark.parametrize("value", [9, 50, 0, 1000, True])
def test_other_values_are_rejected(value):
    with pytest.raises(ValueError, match=f"model.number_tokens must be 99, 999 or null, got {value}"):
        recipe.ModelConfig(number_tokens=value)


# What rows start from


def test_a_turn_by_hand():
    row = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(number_rows.turn(row, math.pi / 2), torch.tensor([-3.0, -4.0, 1.0, 2.0]))
    torch.testing.assert_close(number_rows.turn(row, 0.0), row)
    odd = torch.tensor([3.0, 4.0, 7.0])
    torch.testing.assert_close(number_rows.turn(odd, math.pi), torch.tensor([-3.0, -4.0, 7.0]))
    assert number_rows.turn(row, 0.4).norm() == pytest.approx(row.norm().item())


def test_a_row_by_hand():
    """The first digit is turned by 30 degrees towards dimension i + 2, then all is scaled back to length 2."""
    one, two = torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0, 0.0])
    cos, sin, half = math.sqrt(3) / 2, 0.5, math.sqrt(0.5)
    twelve = 2 * half * torch.tensor([cos, 1.0, sin, 0.0])
    twenty_one = 2 * half * torch.tensor([1.0, cos, 0.0, sin])
    eleven = 2 * torch.tensor([math.cos(math.radians(15)), 0.0, math.sin(math.radians(15)), 0.0])
    torch.testing.assert_close(number_rows.combined(torch.stack([one, two])), twelve)
    torch.testing.assert_close(number_rows.combined(torch.stack([two, one])), twenty_one)
    torch.testing.assert_close(number_rows.combined(torch.stack([one, one])), eleven)
    # Turned by 60, 30 and 0 degrees.
    expected = 2 * torch.tensor([cos, 0.0, sin, 0.0])
    torch.testing.assert_close(number_rows.combined(torch.stack([one, one, one])), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_start_apart_and_as_long_as_the_digits(family, tied):
    made = backbone(family, tied=tied, digits=True)
    embedding, head = made.lm.get_input_embeddings(), made.lm.get_output_embeddings()
    before = [module.weight.detach().clone() for module in (embedding, head)]
    lm = LatentLM.from_backbone(made, number_tokens=999)
    ids = lm.template.number_ids
    digits = number_tokens.digit_ids(lm.tokenizer)
    for old, module in zip(
        before, (lm.causal_lm.get_input_embeddings(), lm.causal_lm.get_output_embeddings()), strict=True
    ):
        rows = module.weight.detach()
        assert torch.equal(rows[: len(old)], old)
        lengths = rows[digits].norm(dim=1)
        # 370 is number 360 from 10 on.
        assert rows[ids[360]].norm() == pytest.approx(lengths[[3, 7, 0]].mean().item(), rel=1e-5)
        torch.testing.assert_close(rows[ids[2]], number_rows.combined(rows[digits][[1, 2]]))
        every = torch.cat([rows[digits], rows[ids]])
        apart = torch.cdist(every, every).fill_diagonal_(math.inf)
        assert apart.min() > 0.02 * lengths.mean()
    assert (lm.causal_lm.get_output_embeddings().weight is lm.causal_lm.get_input_embeddings().weight) == tied


def test_a_heads_bias_starts_as_the_digits_mean():
    made = backbone("llama", digits=True)
    head = made.lm.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.arange(float(head.weight.shape[0])))
    lm = LatentLM.from_backbone(made, number_tokens=99)
    digits = number_tokens.digit_ids(lm.tokenizer)
    expected = torch.tensor([digits[1], digits[2]]).float().mean()
    assert lm.causal_lm.get_output_embeddings().bias[lm.template.number_ids[2]] == expected


def test_spare_rows_are_used_first():
    """Padded vocabularies (Qwen2's) have rows beyond the tokenizer's last id."""
    made = backbone("qwen2", digits=True)
    rows = len(made.tokenizer) + 40
    made.lm.resize_token_embeddings(rows, mean_resizing=False)
    lm = LatentLM.from_backbone(made, number_tokens=99)
    assert lm.causal_lm.get_input_embeddings().weight.shape[0] == rows + 50


def test_the_fingerprint_stays_that_of_the_backbone():
    assert tiny_lm("qwen2", number_tokens=999).fingerprint == backbones.fingerprint(
        backbone("qwen2", digits=True).lm
    )


# How they are computed and trained


def texts():
    """Rows whose chains have numbers of one, two and three digits."""
    return [Example("n/0", "Ann has 12 pens and 345.", ("<<12+345=357>>",), "357"), *EXAMPLES]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_an_adapter_compute_as_pefts_own_layer(family, tied):
    """Values and gradients, at the added rows and beside them."""
    lm = tiny_lm(family, tied=tied, lora=lora_for(family), number_tokens=99)
    embedding, head = lm.causal_lm.get_input_embeddings(), lm.causal_lm.get_output_embeddings()
    with torch.no_grad():
        for module in (embedding, head):
            added_rows.adapter_rows(module).weight_ND.add_(torch.randn(len(lm.template.added_ids), 32))
    ids = torch.tensor([[3, *lm.template.number_ids[:4], 9], [lm.template.added_ids[-1], 5, 5, 0, 1, 2]])
    hidden = torch.randn(3, 2, 32, requires_grad=True)
    for ours, theirs, module in (
        (lm.embed(ids), embedding(ids), embedding),
        (added_rows.logits(head, hidden), head(hidden), head),
    ):
        torch.testing.assert_close(ours, theirs)
        weights = [added_rows.adapter_rows(module).weight_ND]
        weights += [hidden] if module is head else []
        probe = torch.randn_like(ours)
        found = torch.autograd.grad((ours * probe).sum(), weights)
        torch.testing.assert_close(found, torch.autograd.grad((theirs * probe).sum(), weights))
    assert torch.equal(lm.vocabulary()[ids], lm.embed(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_some_rows_of_the_head_hold_the_adapters(family):
    lm = tiny_lm(family, lora=lora_for(family), number_tokens=99)
    with torch.no_grad():
        added_rows.adapter_rows(lm.causal_lm.get_output_embeddings()).weight_ND.add_(1)
    wanted = (2, 5, *lm.template.number_ids[3:7])
    hidden = torch.randn(4, 32)
    rows = lm.head_rows(wanted)
    assert rows.weight_SD is not None
    torch.testing.assert_close(lm.logits(hidden, rows), lm.logits(hidden)[:, list(wanted)])
    with lm.merged():
        torch.testing.assert_close(
            lm.logits(hidden, lm.head_rows(wanted)), lm.logits(hidden)[:, list(wanted)]
        )


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("head", ["gaussian", "sequential"])
def test_rows_are_trained_unless_they_are_targets(family, kind, head):
    """The latent head's targets are sums of embeddings, which must stand still; the separator's row is none of them."""
    lora = lora_for(family) if kind == "lora" else None
    lm = tiny_lm(family, tied=True, separator=False, lora=lora, number_tokens=999)
    method = registry.build("colar", {"head": head, "compression_factors": [1, 2]})
    pretrained.attach(lm, method, 0)
    method.prepare(lm, texts())
    ids = torch.tensor(lm.template.added_ids)
    before = lm.embed(ids).detach().clone()
    train(lm, method)
    moved = (lm.embed(ids) - before).abs().sum(1) > 1e-6
    seen = set()
    for example in EXAMPLES:
        for step in lm.template.steps(example.steps):
            seen.update(step)
    of_chains = [token_id in seen for token_id in ids.tolist()]
    assert sum(of_chains) >= 8
    assert moved[lm.template.added_ids.index(lm.template.separator_id)]
    if head == "sequential":
        assert all(moved[torch.tensor(of_chains)])
    else:
        assert moved.sum() == 1


def test_frozen_rows_get_no_weight_decay():
    lm = tiny_lm("qwen2", separator=False, lora=LoraSettings(r=2), number_tokens=99)
    assert added_rows.partly_trained(lm.causal_lm) == []
    lm.freeze_embeddings()
    (weight,) = added_rows.partly_trained(lm.causal_lm)
    assert weight is added_rows.adapter_rows(lm.causal_lm.get_input_embeddings()).weight_ND
    # Without an added separator there is nothing to train among them.
    lm = tiny_lm("qwen2", lora=LoraSettings(r=2), number_tokens=99)
    lm.freeze_embeddings()
    assert added_rows.partly_trained(lm.causal_lm) == []
    assert not added_rows.adapter_rows(lm.causal_lm.get_input_embeddings()).weight_ND.requires_grad


# The engine


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "config"), [("cot", {}), ("colar", {"head": "sequential"})])
def test_engine_equals_reference(family, largest, name, config):
    lm = liven(tiny_lm(family, number_tokens=largest))
    method = registry.build(name, config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, texts())
    requests = []
    for i, example in enumerate(texts()):
        for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED)):
            requests.append(
                Request(f"{i}/{mode}", example.question, method.Params(), decoding, i, keep_latents=True)
            )
    for request, found in zip(requests, Engine(lm, method, 4).generate(requests), strict=True):
        same(found, reference.complete(lm, method, request))


# Saved and loaded


KINDS = {
    "full": ("llama", {"tied": False}, False),
    "full-tied-added": ("gemma3", {}, False),
    "lora": ("llama", {"tied": False}, True),
    "lora-tied": ("qwen2", {}, True),
    "lora-tied-added": ("gemma3", {}, True),
    "lora-gpt2": ("gpt2", {}, True),
}
"""name: family, how its backbone differs, an adapter or not."""


class Saved:
    """A trained model with number tokens, and the folder that it was saved in."""

    def __init__(self, root, kind, number_tokens=99):
        family, how, adapter = KINDS[kind]
        self.lora = lora_for(family) if adapter else None
        self.base = save_backbone(root / "base", family, digits=True, **how)
        self.lm = LatentLM.from_backbone(
            backbones.load(self.base), lora=self.lora, number_tokens=number_tokens
        )
        self.method = registry.build("cot")
        pretrained.attach(self.lm, self.method, 0)
        train(self.lm, self.method)
        self.lm.eval()
        self.folder = pretrained.save(self.lm, self.method, root / "saved", RUN, "# A model\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = Saved(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_as_it_went(saved, kind, tmp_path):
    old = saved(kind)
    lm, method = pretrained.load(old.folder)
    assert lm.template.to_json() == old.lm.template.to_json()
    assert lm.template.added_ids == old.lm.template.added_ids
    ids = torch.tensor(lm.template.added_ids)
    with torch.no_grad():
        torch.testing.assert_close(lm.embed(ids), old.lm.embed(ids))
    torch.testing.assert_close(logits(lm), logits(old.lm), rtol=1e-5, atol=1e-5)
    assert completions(lm, method) == completions(old.lm, old.method)
    # And once more, in place.
    again, _ = pretrained.load(pretrained.save(lm, method, tmp_path / "again", RUN, "card"))
    assert len(again.tokenizer) == len(old.lm.tokenizer)
    weights.load(again, old.folder)
    torch.testing.assert_close(logits(again), logits(old.lm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lora" in kind])
def test_an_adapter_holds_the_rows_and_no_table(saved, kind):
    old = saved(kind)
    state = load_file(old.folder / weights.ADAPTER)
    tables = {name: value for name, value in state.items() if "trainable_tokens" in name}
    assert len(tables) == (1 if "tied" in kind or "gpt2" in kind else 2)
    for value in tables.values():
        assert value.shape == (len(old.lm.template.added_ids), 32)
    others = [value for name, value in state.items() if name not in tables]
    assert max(value.shape[0] for value in others) < 200


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lora" in kind])
def test_merged_and_converted_checkpoints_have_them(saved, kind, tmp_path):
    old = saved(kind)
    merged = pretrained.merge(old.folder, tmp_path / "merged", "float32")
    lm, _ = pretrained.load(merged)
    assert not lm.has_adapter
    assert lm.template.number_tokens == 99
    torch.testing.assert_close(logits(lm), logits(old.lm), rtol=1e-4, atol=1e-4)
    half, _ = pretrained.load(checkpoint.convert(old.folder, tmp_path / "half", "bfloat16"))
    ids = torch.tensor(lm.template.number_ids)
    with torch.no_grad():
        rows = added_rows.adapter_rows(half.causal_lm.get_input_embeddings()).weight_ND
        assert torch.equal(rows, rows.bfloat16().float())
        torch.testing.assert_close(half.embed(ids), old.lm.embed(ids), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["full", "lora-tied-added"])
def test_the_same_rows_are_trained_in_another_stage(saved, kind):
    old = saved(kind)
    for value in (None, 99):
        lm = pretrained.load_for_training(old.folder, registry.build("cot"), old.lora, "float32", 0, value)
        ids = torch.tensor(lm.template.number_ids)
        before = lm.embed(ids).detach().clone()
        train(lm, registry.build("cot"))
        assert (lm.embed(ids) - before).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["full", "lora-tied"])
def test_other_numbers_than_the_checkpoints_are_rejected(saved, kind):
    old = saved(kind)
    with pytest.raises(
        ValueError, match=r"model.number_tokens is 999, but .* was trained with 99: leave it out"
    ):
        pretrained.load_for_training(old.folder, registry.build("cot"), old.lora, "float32", 0, 999)


def test_an_adapter_without_number_tokens_gets_none(tmp_path):
    old = Saved(tmp_path, "lora-tied", number_tokens=None)
    with pytest.raises(
        ValueError, match=r"model.number_tokens is 99, but .* is an adapter without number tokens"
    ):
        pretrained.load_for_training(old.folder, old.method, old.lora, "float32", 0, 99)
    assert (
        pretrained.load_for_training(old.folder, old.method, old.lora, "float32", 0).template.number_ids == []
    )


def test_full_weights_without_number_tokens_may_get_them(tmp_path):
    """In full or through an adapter, whose checkpoint then finds its rows on the weights without them."""
    old = Saved(tmp_path, "full-tied-added", number_tokens=None)
    for lora in (None, lora_for("gemma3")):
        lm = pretrained.load_for_training(old.folder, old.method, lora, "float32", 0, 99)
        rows = lm.embed(torch.tensor(number_tokens.digit_ids(lm.tokenizer)))[[1, 2]] / 32**0.5
        first = lm.embed(torch.tensor(lm.template.number_ids[2])) / 32**0.5
        torch.testing.assert_close(first, number_rows.combined(rows))
        train(lm, old.method)
        back, _ = pretrained.load(
            pretrained.save(lm.eval(), old.method, tmp_path / f"next-{lora is None}", RUN, "card")
        )
        torch.testing.assert_close(logits(back), logits(lm), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_an_earlier_version_has_none():
    template = Template(TemplateConfig(), build_tokenizer("qwen2", True))
    old = template.to_json()
    del old["number_tokens"], old["first_number_id"]
    assert Template.from_json(old, template.tokenizer).to_json() == template.to_json()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_template_knows_its_numbers(tmp_path, family):
    template = built(family, 999)
    template.tokenizer.save_pretrained(tmp_path)
    loaded = Template.from_json(template.to_json(), AutoTokenizer.from_pretrained(tmp_path))
    assert loaded.to_json() == template.to_json()
    assert loaded.added_ids == template.added_ids
    for text in CUTS:
        assert loaded.answer(text) == template.answer(text)


def test_a_tokenizer_of_another_checkpoint_is_rejected():
    saved = built("qwen2", 99).to_json()
    with pytest.raises(ValueError, match="the tokenizer has no token for 10, where numbers to 99 are tokens"):
        Template.from_json(saved, build_tokenizer("qwen2", True, digits=True))
    moved = build_tokenizer("qwen2", True, digits=True)
    moved.add_tokens(["something"])
    number_tokens.add(moved, 99)
    with pytest.raises(
        ValueError, match=r"was trained with first_number_id = \d+, but its tokenizer gives \d+"
    ):
        Template.from_json(saved, moved)


def test_the_model_card_says_so():
    assert "Numbers from 10 to 99 are tokens" in card.text(
        tiny_lm("qwen2", number_tokens=99), {"name": "cot"}, {}
    )
    assert "Numbers from" not in card.text(tiny_lm("qwen2"), {"name": "cot"}, {})


# A recipe


def test_a_recipe_passes_the_key_on(tmp_path):
    base = save_backbone(tmp_path / "base", "qwen2", digits=True)
    text = f"output: {tmp_path / 'run'}\nmodel: {{backbone: {base}, number_tokens: 99, lora: {{r: 2}}}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    loaded = recipe.load(tmp_path / "recipe.yaml")
    lm, _ = recipe.load_model(loaded)
    assert lm.template.number_tokens == 99
    with pytest.raises(ValueError, match="model.number_tokens must be 99, 999 or null, got 50"):
        recipe.load(tmp_path / "recipe.yaml", ["--model.number_tokens", "50"])
    with pytest.raises(ValueError, match="model.number_tokens must be a whole number or null, got 'many'"):
        recipe.load(tmp_path / "recipe.yaml", ["--model.number_tokens", "many"])
    plain = recipe.load(tmp_path / "recipe.yaml", ["--model.number_tokens", "null"])
    assert recipe.load_model(plain)[0].template.number_tokens is None
