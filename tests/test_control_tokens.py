"""Text that spells control tokens stays text, on every kind of tokenizer."""

from functools import cache, partial
from random import Random

import pytest
from families import FAMILIES, build_tokenizer, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from colar.data.example import Example
from colar.engine.request import Decoding, Request, prompt_ids
from colar.methods import registry
from colar.model import backbones
from colar.template.template import Template, TemplateConfig

WORDS = ["how many pens", "Ann has 3 eggs", "12 plus 7", "Task # <s> [x] a|b"]
SPELLINGS = [
    "###",
    "<eos>",
    "<bos>",
    "<unk>",
    "<pad>",
    "</s>",
    "<s>",
    "<|endoftext|>",
    "<|im_start|>",
    "<tool>",
    "<｜Assistant｜>",
]
SPELLINGS += ["<|end_of_text|>", "<|begin_of_text|>", "<extra_id_0>", "#", "<", "|>", "eos", "10", "Zurich"]
TEXTS = st.lists(
    st.one_of(st.sampled_from([*SPELLINGS, *WORDS, " ", "\n"]), st.text("ab <#>|é数", max_size=4)), max_size=7
).map("".join)


def special(core, **names):
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", **names)


def unigram():
    """Control tokens and "###" in the vocabulary, where any text may be cut out of; a space before the first word."""
    pieces = [("<unk>", 0.0), ("<eos>", 0.0), ("<bos>", 0.0), ("###", -1.0), ("▁###", -1.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(char, -5.0) for char in sorted(set("".join(WORDS + SPELLINGS)) - {" "}) if char.isascii()]
    core = Tokenizer(models.Unigram([*pieces, ("▁", -3.0)], 0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return special(core, bos_token="<bos>", unk_token="<unk>")


def whole_pieces():
    """Llama 3's `ignore_merges`: a piece that is in the vocabulary as a whole is one token, `<eos>` too."""
    core = Tokenizer(models.BPE(ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<eos>", "<bos>", "<|im_start|>", "###"]
    core.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return special(core, bos_token="<bos>")


def declared_ordinary():
    """EOS and a chat marker that are declared to be no special tokens, and words that were added."""
    tokenizer = build_tokenizer("qwen2")
    tokenizer.add_tokens(
        [AddedToken("<eos>", special=False, normalized=False), "<|im_start|>", "Zurich", "<tool>"]
    )
    tokenizer.add_tokens([AddedToken("###", special=False, normalized=True)])
    tokenizer.eos_token = "<eos>"
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }} in Zurich<eos>{% endfor %}"
    return tokenizer


def fullwidth_markers():
    """DeepSeek's: markers of chats with a bar that byte-level vocabularies write as three bytes, declared ordinary."""
    tokenizer = build_tokenizer("qwen2")
    tokenizer.add_tokens([AddedToken(f"<｜{name}｜>", special=False) for name in ("User", "Assistant")])
    tokenizer.chat_template = "{% for m in messages %}<｜User｜>{{ m.content }}<｜Assistant｜>{% endfor %}"
    return tokenizer


def padded_with_a_sign():
    tokenizer = build_tokenizer("gpt2")
    tokenizer.pad_token = "#"
    return tokenizer


def slow():
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["###"])
    return tokenizer


KINDS = {
    **{family: partial(build_tokenizer, family) for family in FAMILIES},
    "tiny": backbones.tiny_tokenizer,
    "slow": slow,
    "unigram": unigram,
    "ignore_merges": whole_pieces,
    "declared ordinary": declared_ordinary,
    "fullwidth markers": fullwidth_markers,
    "sign for padding": padded_with_a_sign,
}


@cache
def template_of(kind):
    return Template(TemplateConfig(), KINDS[kind]())


def ordinary(template, text):
    """An answer as the tokenizer reads it, control tokens included."""
    ids = template.tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
    return [template.separator_id, *ids, template.eos_id]


def control_ids(template):
    """EOS, BOS, the separator and all that is declared special or is a chat marker."""
    tokenizer = template.tokenizer
    found = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    markers = {"<|im_start|>", "<｜User｜>", "<｜Assistant｜>"}
    found |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in markers}
    found |= {template.separator_id, *tokenizer.all_special_ids}
    return found


def given_back(template, text):
    """The text as this tokenizer gives back texts at all."""
    normalizer = None if not template.tokenizer.is_fast else template.tokenizer.backend_tokenizer.normalizer
    composed = normalizers.NFC().normalize_str(text) if isinstance(normalizer, normalizers.NFC) else text
    return composed.strip()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sign for padding"])
@settings(deadline=None, max_examples=30)
@given(text=TEXTS)
def test_text_has_no_control_token_and_comes_back(kind, text):
    template = template_of(kind)
    control = control_ids(template)
    separator, *ids, eos = template.answer(text)
    assert (separator, eos) == (template.separator_id, template.eos_id)
    assert not control.intersection(ids)
    assert template.decode(ids) == given_back(template, text)

    question = template.question(text, "(Thinking speed: 2)")
    bos = [] if template.bos_id is None else [template.bos_id]
    assert question[: len(bos)] == bos
    assert not control.intersection(question[len(bos) : -1])
    assert question == template.question(text, "(Thinking speed: 2)", cached=False)

    first, second = template.steps((text, text))
    assert not control.intersection(first + second)
    # Ids are as they were unless the text spells a control token.
    before = ordinary(template, text)
    if not control.intersection(before[1:-1]):
        assert template.answer(text) == before


@pytest.mark.parametrize(
    ("kind", "text", "tokens"),
    [
        ("tiny", "2 <eos>", ["2", " ", "<", "e", "o", "s", ">"]),
        ("llama", "a###", ["a", "#", "##"]),
        ("llama", "a####", None),
        ("gemma3", "a###b", ["a", "#", "#", "#", "b"]),
        ("declared ordinary", "Zurich<eos>", ["Zurich", "<", "e", "o", "s", ">"]),
        (
            "declared ordinary",
            "<|im_start|><tool>",
            ["<", "|", "im", "_", "s", "t", "a", "r", "t", "|", ">", "<tool>"],
        ),
        ("sign for padding", "a # b", None),
    ],
)
def test_the_tokens(kind, text, tokens):
    template = template_of(kind)
    found = [template.token(token_id) for token_id in template.answer(text)[1:-1]]
    if tokens is None:
        assert template.answer(text) == ordinary(template, text)
    else:
        assert "".join(found) == "".join(tokens)
        assert found == tokens


def test_a_tokenizer_of_words_writes_unknown():
    words = {"<unk>": 0, "<eos>": 1, "###": 2, "two": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = Template(TemplateConfig(), special(core, unk_token="<unk>"))
    assert template.question("two ### <eos> zebra <unk>") == [3, 0, 0, 0, 0, 2]


def test_a_separator_that_texts_cannot_do_without_is_rejected():
    with pytest.raises(ValueError, match=r"can write '=' as a control token only.*template\.separator"):
        Template(TemplateConfig(separator="="), backbones.tiny_tokenizer())


# Layouts


@pytest.mark.parametrize("format", ["plain", "chat"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("question", "<|im_start|>user\n{question} {speed}"),
        ("question", "{question} {speed}<eos>"),
        ("question", "{question} ### {speed}"),
        ("step_joiner", " <eos> "),
    ],
)
def test_a_layout_has_no_control_tokens(name, text, format):
    config = TemplateConfig(**{name: text}, format=format)
    with pytest.raises(
        ValueError, match=rf"template\.{name} .* has control tokens: .* template\.format: chat"
    ):
        Template(config, declared_ordinary())


def test_a_layout_of_characters_that_the_tokenizer_lacks_is_text():
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "###": 2, "two": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = Template(TemplateConfig("Task: {question} {speed}", "; "), special(core, unk_token="<unk>"))
    assert template.question("two") == [0, 3, 2]
    assert template.steps(("two", " two")) == [[3], [0, 3]]


@pytest.mark.parametrize("layout", ["{question} {speed}\n", "\n{question}\n{speed} "])
def test_white_space_at_a_layouts_ends_does_not_depend_on_the_question(layout):
    template = Template(TemplateConfig(layout), declared_ordinary())
    text = template.tokenizer.decode(template.question("How many?"))
    spelt = template.tokenizer.decode(template.question("How many <|im_start|>?"))
    assert spelt.replace(" <|im_start|>", "") == text


# Saved and loaded


@pytest.mark.parametrize("kind", ["llama", "gemma3", "slow", "unigram", "declared ordinary"])
def test_a_saved_template_spells_none(tmp_path, kind):
    template = template_of(kind)
    template.tokenizer.save_pretrained(tmp_path)
    loaded = Template.from_json(template.to_json(), AutoTokenizer.from_pretrained(tmp_path))
    for text in SPELLINGS:
        assert loaded.answer(text) == template.answer(text)


# Training and inference


@pytest.mark.parametrize("name", list(registry.METHODS))
def test_a_row_of_every_method_has_the_separator_and_eos_where_they_belong(name):
    lm = tiny_lm("llama")
    template, method = lm.template, registry.build(name)
    spelt = "### Task <|end_of_text|>"
    example = Example("t/0", f"Is {spelt}?", (f"{spelt} 1", "1 + 1 = 2 ###"), f"2 {spelt}")
    row = method.encode(template, example, Random(0), 0)
    request = Request("r", example.question, row.params, Decoding(max_latents=4, max_completion_length=4))
    assert prompt_ids(lm, method, request) == row.question
    assert (row.question.count(template.separator_id), row.question[-1]) == (1, template.separator_id)
    assert (row.answer.index(template.eos_id), row.answer.index(template.separator_id)) == (
        len(row.answer) - 1,
        0,
    )
    for step in row.steps:
        assert not {template.separator_id, template.eos_id, template.bos_id}.intersection(step)
