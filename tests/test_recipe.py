"""Recipes: every shipped one loads, overrides are exact, wrong keys are named, a run folder belongs to one run."""

import copy
import dataclasses
import functools
import importlib.util
import json
import operator
import shutil
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colar import files, recipe, recipes, yaml_settings
from colar.engine.request import decoding_of
from colar.methods import pretrained, registry
from colar.recipe.run import load_method, load_model_and_rows
from colar.recipe.schema import defaults, to_json
from colar.training.run_folder import RESUMABLE, RunFolder

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = recipes.names()


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: colar, alpha: 2e-2}}\n"
        "data: {train_size: 6, validation_size: 2, options: {steps: [2, 2]}}\n"
        "training: {per_device_train_batch_size: 3, learning_rate: 3e-4, report_to: none}\n"
        "validation: {page_size: 0, params: [{compression_factor: 2}], limits: {max_latents: 4, max_completion_length: 3}}\n"
    )
    return path


def test_there_are_recipes():
    """At most four for a family of backbones, and each of the methods that people train."""
    assert {"tiny/cot", "tiny/colar", "tiny/sequential", "tiny/grpo", "smollm2-135m/cot", "smollm2-135m/colar",
            "smollm2-135m/sequential", "smollm2-135m/grpo", "llama-3.2-1b/cot", "llama-3.2-1b/colar",
            "llama-3.2-1b/cot-math", "llama-3.2-1b/colar-math", "llama-3.2-1b/grpo-math",
            "llama-3.1-8b/cot", "llama-3.1-8b/colar", "llama-3.1-8b/grpo",
            "deepseek-qwen-1.5b/cot-math", "deepseek-qwen-1.5b/colar-math", "deepseek-qwen-1.5b/grpo-math",
            } == set(SHIPPED)  # fmt: skip


LAB = sorted((ROOT / "lab" / "recipes").glob("*/*.yaml"))


@pytest.mark.parametrize("name", [*SHIPPED, *LAB], ids=lambda name: getattr(name, "stem", name))
def test_every_recipe_loads_and_builds(name):
    for stage in recipe.load_stages(name):
        loaded = stage.recipe
        method = recipe.build_method(loaded)
        assert method.name == loaded.method["name"]
        for values in loaded.validation.params:
            assert method.check_params(registry.make_params(method, values)) is None
        if loaded.grpo is not None:
            for param, drawn in loaded.grpo.param_choices.items():
                for value in drawn:
                    assert method.check_params(registry.make_params(method, {param: value})) is None
        assert loaded.output.startswith("runs/")


def test_a_file_wins_over_a_shipped_recipe_and_an_unknown_name_has_a_nearest_one(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = recipe.load("tiny/colar")
    assert (
        shipped.model.init_from == "runs/tiny/cot/best"
    )  # of the working directory, wherever the recipe lies
    (tmp_path / "tiny").mkdir()
    tiny.rename(tmp_path / "tiny" / "colar")
    assert recipe.load("tiny/colar").output == f"{tmp_path}/run"
    for name in ("tiny/collar", "recipes/tiny/colar.yaml"):
        with pytest.raises(ValueError, match=r"no shipped recipe has that name, did you mean 'tiny/colar'\?"):
            recipe.load(name)


def test_every_shipped_recipe_says_what_it_is():
    for name in SHIPPED:
        assert recipes.describe(name).endswith("."), name
    assert recipes.describe("tiny/colar") == "CoLaR-SFT of the toy model from its CoT-SFT weights."


@pytest.mark.parametrize("name", SHIPPED)
def test_a_copied_recipe_is_the_same_recipe(name, tmp_path):
    own = recipes.copy(name, tmp_path)[0]
    assert own == tmp_path / f"{name}.yaml"
    assert list(yaml_settings.yaml_layers(own).values()) == list(
        yaml_settings.yaml_layers(recipes.find(name)).values()
    )


def test_a_copy_does_not_overwrite(tmp_path):
    own, *bases = recipes.copy("llama-3.1-8b/cot", tmp_path)
    assert bases == [tmp_path / "llama-3.2-1b" / "cot-math.yaml"]
    recipes.copy("llama-3.2-1b/cot-math", tmp_path)  # the base itself, which is there already
    bases[0].write_text("output: mine\n")
    own.unlink()
    with pytest.raises(
        ValueError, match="cot-math.yaml exists and is not the shipped recipe: nothing was copied"
    ):
        recipes.copy("llama-3.1-8b/cot", tmp_path)
    assert not own.exists()
    with pytest.raises(ValueError, match="no shipped recipe is called tiny/cott, did you mean 'tiny/cot'"):
        recipes.copy("tiny/cott", tmp_path)


def test_values_of_the_papers_recipes():
    """What the paper states (section 4.1 and appendix A), spelt once more."""
    for name in (
        "llama-3.2-1b/cot",
        "llama-3.2-1b/colar",
        "deepseek-qwen-1.5b/cot-math",
        "deepseek-qwen-1.5b/colar-math",
    ):
        loaded = recipe.load(name)
        assert (loaded.model.lora.r, loaded.model.lora.lora_alpha) == (128, 32)
        assert (loaded.training.learning_rate, loaded.training.weight_decay) == (1e-4, 1e-2)
        assert (loaded.training.num_train_epochs, loaded.training.max_hours) == (50, 12)
        # A share of the run would be one of 50 epochs, which 12 hours may not reach.
        assert loaded.training.save_steps == 500
        assert loaded.training.per_device_train_batch_size * 8 == 256
    math = recipe.load("deepseek-qwen-1.5b/colar-math")
    assert recipe.build_method(math).config.factors == (2,)
    assert math.validation.limits.max_latents == 128
    for name in (
        "no_cot",
        "icot",
        "coconut",
        "distill",
        "tokenskip",
        "pause",
    ):  # as the paper sets its baselines
        made = recipe.load(ROOT / f"lab/recipes/llama-3.2-1b/{name}.yaml")
        assert (made.model.lora.r, list(made.model.lora.target_modules)) == (128, ["q_proj", "v_proj"])
        assert (made.training.learning_rate, made.training.lr_scheduler_type) == (1e-4, "constant")
    codi = recipe.load(ROOT / "lab/recipes/llama-3.2-1b-authors/distill.yaml")
    assert len(codi.model.lora.target_modules) == 7
    assert (codi.training.learning_rate, codi.training.lr_scheduler_type) == (8e-4, "cosine")
    assert (codi.model.init_from, codi.method["align_weight"]) == (None, 20)
    gsm = recipe.load("llama-3.2-1b/colar")
    assert recipe.build_method(gsm).config.factors == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("name", "stage"), [("cot-overruns", "cot"), ("colar-nll", "colar"), ("grpo", "grpo")]
)
def test_the_laboratorys_runs_are_the_stages_that_ship(name, stage):
    """What results/toy reports of them is true of `tiny/grpo`."""
    own = recipe.load(ROOT / "lab" / "recipes" / "tiny" / f"{name}.yaml")
    [shipped] = [each.recipe for each in recipe.load_stages("tiny/grpo") if each.name == stage]
    places = {"output": "", "label": "", "model": recipe.ModelConfig(backbone="tiny")}
    assert replace(own, **places) == replace(shipped, **places)


def test_recipes_of_the_papers_models_are_ready_for_a_card():
    """One bad row of 385,620 stops no run; validation is as the test; long rows go through in parts; an update of
    reinforcement is one batch."""
    papers = ("llama-3.2-1b/", "llama-3.1-8b/", "deepseek-qwen-1.5b/")
    names = [name for name in SHIPPED if name.startswith(papers)]
    assert len(names) == 11
    for name in names:
        made = recipe.load(name)
        assert made.data.skip_malformed, name
        assert made.validation.decoding == "sampled", name
        assert made.training.tokens_per_batch is not None, name
        if made.grpo is not None:
            assert made.training.gradient_accumulation_steps == 1, name
    assert recipe.load(ROOT / "lab/recipes/llama-3.2-1b-authors/coconut.yaml").validation.decoding == "greedy"


def test_values_of_the_papers_reinforcement():
    """Section 4.1, Table 2 and appendix A, spelt once more; batches are of questions, each with its G outputs."""
    for name in ("llama-3.2-1b/grpo-math", "deepseek-qwen-1.5b/grpo-math", "llama-3.1-8b/grpo"):
        loaded = recipe.load(name)
        grpo, training, plan = loaded.grpo, loaded.training, loaded.grpo.plan(loaded.training)
        assert (plan.questions, plan.outputs_per_update // plan.group, plan.group) == (8, 4, 8)
        assert (grpo.epsilon, grpo.beta, grpo.loss_type, grpo.reward_funcs) == (0.2, 0, "grpo", ("accuracy",))
        assert (grpo.compression_factors, grpo.max_latents) == ((2,), 128)
        assert (training.learning_rate, training.weight_decay, training.seed) == (1e-6, 1e-2, 0)
        sft = recipe.load(name.replace("grpo", "colar"))
        assert f"{sft.output}/best" == loaded.model.init_from
        assert recipe.build_method(sft).config.latent_loss == "nll"
        assert sft.model.lora == loaded.model.lora


def test_tiny_reinforcement_starts_from_a_teacher_who_errs_and_is_rewarded_by_right_answers():
    _, sft, grpo = (stage.recipe for stage in recipe.load_stages("tiny/grpo"))
    assert grpo.model.init_from == f"{sft.output}/best"
    assert sft.data.options["overruns"] > 0
    assert not grpo.data.options.get("overruns")
    assert list(grpo.grpo.compression_factors) == [grpo.validation.params[0]["compression_factor"]]
    assert set(grpo.grpo.compression_factors) <= set(recipe.build_method(sft).config.factors)


def test_overrides_touch_exactly_the_named_key(tiny):
    """PITFALLS 20: an override must not set every key of that name."""
    before, after = recipe.load(tiny), recipe.load(tiny, ["--training.seed", "5"])
    assert (after.training.seed, after.data.seed) == (5, before.data.seed)
    assert recipe.load(tiny, ["--method.merge", "mean"]).method == {
        "name": "colar",
        "alpha": 0.02,
        "merge": "mean",
    }
    lora = recipe.load(tiny, ["--model.lora", "{r: 8, target_modules: all-linear}"]).model.lora
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (8, 32, "all-linear")
    assert recipe.load(tiny, ["--model.lora", "{}"]).model.lora.r == 128


def test_a_recipe_says_what_differs_from_its_base(tiny):
    one, two = tiny.parent / "one.yaml", tiny.parent / "two.yaml"
    one.write_text("base: recipe.yaml\nlabel: MP\nmethod: {merge: mean}\ntraining: {learning_rate: 1e-3}\n")
    two.write_text(
        "base: one.yaml\ndata: {options: {max_number: 9}}\nvalidation: {params: [{compression_factor: 5}]}\n"
    )
    before, after = recipe.load(tiny), recipe.load(two, ["--training.seed", "4"])
    assert after.method == {"name": "colar", "alpha": 0.02, "merge": "mean"}
    assert after.data.options == {"steps": [2, 2], "max_number": 9}
    assert after.validation.params == ({"compression_factor": 5},)  # a list is replaced, not lengthened
    assert (after.label, after.training.learning_rate, after.training.seed) == ("MP", 1e-3, 4)
    assert (after.output, after.training.report_to, after.validation.limits) == (
        before.output, "none", before.validation.limits,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: missing.yaml\n", "mine.yaml: no file at "),
        ("base: mine.yaml\n", "mine.yaml: its base mine.yaml has it as its own base"),
        (
            "base: recipe.yaml\nmethod: {merj: mean}\n",
            "unknown key 'method.merj', did you mean 'method.merge'",
        ),
        ("base: [recipe.yaml\n", "mine.yaml: not valid YAML: "),
        ("- base\n", "mine.yaml must hold keys and values"),
    ],
)
def test_a_wrong_base_is_named(tiny, text, words):
    path = tiny.parent / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="mine.yaml|method") as error:
        recipe.load(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


TWICE = [
    (
        "training: {seed: 1}\nlabel: x\ntraining: {max_steps: 3}\n",
        "lines 1 and 3: the key 'training' is there twice",
    ),
    (
        "data:\n  options:\n    steps: [1, 2]\n    steps: [2, 2]\n",
        "lines 3 and 4: the key 'steps' is there twice",
    ),
    (
        '"validation": {"params": [{"compression_factor": 1,\n "compression_factor": 2}]}\n',
        "lines 1 and 2: the key",
    ),
]


@pytest.mark.parametrize("in_base", [False, True])
@pytest.mark.parametrize(("text", "words"), TWICE)
def test_a_key_that_is_there_twice_is_named_with_its_lines(tiny, text, words, in_base):
    file = tiny.parent / "twice.yaml"
    file.write_text(text)
    top = tiny.parent / "top.yaml"
    top.write_text("base: twice.yaml\n")
    with pytest.raises(ValueError, match=r"twice\.yaml: ") as error:
        recipe.load(top if in_base else file)
    assert words in str(error.value)


UNQUOTED = (
    "1e-3",
    "0o17",
    "0x1F",
    "010",
    "1:30",
    "2026-01-31",
    "yes",
    "True",
    "~",
    "null",
    ".5",
    "1.",
    ".inf",
)
TEXTS = st.text() | st.sampled_from([*UNQUOTED, "<<", "=", "-", "#"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


@given(
    st.dictionaries(
        TEXTS,
        st.recursive(
            VALUES,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=3,
    )
)
@example({text: [text, {text: text}] for text in UNQUOTED})
@settings(deadline=None, derandomize=True, max_examples=50)
def test_written_yaml_is_read_as_the_same_values(values):
    """Also texts that YAML 1.1, or 1.2 alone, would read as a number."""
    assert repr(yaml_settings.read_yaml("", yaml_settings.yaml_text(values))) == repr(values)


def test_a_key_may_stand_in_two_sections_and_over_an_anchors(tiny):
    more = "shared: &shared {a: 1, b: 2}\nmine: {<<: *shared, a: 3}\n"
    assert yaml_settings.read_yaml("", more) == {"shared": {"a": 1, "b": 2}, "mine": {"b": 2, "a": 3}}
    tiny.write_text(tiny.read_text().replace("{train_size: 6,", "{seed: 1, train_size: 6,"))
    assert recipe.load(tiny, ["--training.seed", "1", "--training.seed", "2"]).training.seed == 2


@pytest.mark.parametrize(
    "value", ["010", "-07", "0o17", "0x1F", "1_000", "1:30", "yes", "No", "2026-01-31", "="]
)
def test_values_that_look_like_something_else_are_texts(tiny, value):
    """As in YAML 1.2; YAML 1.1 makes 8, 90, true and dates of them."""
    whole = tiny.read_text()
    tiny.write_text(f"{whole}label: {value}\n")
    assert recipe.load(tiny).label == value
    assert recipe.load(tiny, ["--label", value]).label == value
    with pytest.raises(ValueError, match=r"^--training.max_steps .* must be a whole number, got '"):
        recipe.load(tiny, ["--training.max_steps", value])
    assert recipe.load(tiny, ["--data.options", f"{{a: {value}}}"]).data.options == {"a": value}
    tiny.write_text(f"{whole}5: 3\n")
    with pytest.raises(
        ValueError,
        match=rf"recipe\.yaml: not valid YAML: line {len(whole.splitlines()) + 1}: a key must be a text",
    ):
        recipe.load(tiny)


def test_numbers_and_texts_that_mean_one_thing_are_read(tiny):
    options = "{a: 0, b: -12, c: 1e-3, d: .5, e: 1.50, f: +3, g: 'no', h: True, i: ~}"
    expected = {"a": 0, "b": -12, "c": 1e-3, "d": 0.5, "e": 1.5, "f": 3, "g": "no", "h": True, "i": None}
    assert recipe.load(tiny, ["--data.options", options]).data.options == expected
    assert recipe.load(tiny, ["--training.learning_rate", "5e-05"]).training.learning_rate == 5e-5


def sections(config, above=()):
    """Every key of a config, those of its sections below it: (section, ..., name)."""
    for field in dataclasses.fields(config):
        yield (*above, field.name)
        for kind in yaml_settings.kinds_of(typing.get_type_hints(config)[field.name]):
            if dataclasses.is_dataclass(kind):
                yield from sections(kind, (*above, field.name))


METHOD_KEYS = [
    ("method", name, field.name)
    for name, method in registry.METHODS.items()
    for field in dataclasses.fields(method.Config)
]


def test_a_key_without_a_value_is_named_or_legal(tmp_path):
    """Every key of the schema, and of every method: what is blank is a null that the type has, or an error of one line."""
    path = tmp_path / "recipe.yaml"
    passed, refused = [], {}
    for key in [*sections(recipe.Recipe), ("method", "name"), *METHOD_KEYS]:
        tree = {"output": "runs/x", "method": {"name": "colar"}, "model": {"init_from": "x"}}
        dotted = ".".join(key)
        if key in METHOD_KEYS:
            tree["method"] = {"name": key[1]}
            key = (key[0], key[2])
            dotted = ".".join(key)
        below = tree
        for name in key[:-1]:
            below = below.setdefault(name, {})
        below[key[-1]] = None
        path.write_text(yaml.safe_dump(tree).replace("null", ""))
        try:
            made = recipe.load(path)
        except ValueError as error:
            refused[dotted] = str(error)
            continue
        passed.append(dotted)
        value = made
        for name in key:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        assert value is None
    for dotted, message in refused.items():
        assert f"recipe.yaml: {dotted} is blank (null): it must be " in message
        assert "\n" not in message
    assert {"training.max_hours", "model.lora", "grpo", "method.smoothing_lambda"} <= set(passed)
    assert not {"training.seed", "model.backbone", "label", "method.merge"} & set(passed)


def test_a_blank_key_is_named_with_its_own_file_or_option(tiny):
    top = tiny.parent / "top.yaml"
    top.write_text("base: recipe.yaml\nlabel: x\n")
    tiny.write_text(tiny.read_text() + "model:\n  backbone:\n")
    with pytest.raises(
        ValueError, match=r"/recipe\.yaml: model\.backbone is blank .* must be text; .* default, tiny"
    ):
        recipe.load(top)
    tiny.write_text(tiny.read_text().replace("model:\n  backbone:\n", ""))
    for overrides in (
        ["--training.save_steps", "null"],
        ["--training", "{save_steps: }"],
        ["--training.save_steps="],
    ):
        with pytest.raises(
            ValueError, match=r"^--training.* training\.save_steps is blank \(null\): it must be a number"
        ):
            recipe.load(top, overrides)
    top.write_text("base:\noutput: x\n")
    with pytest.raises(ValueError, match="top.yaml: base must be the path of a recipe"):
        recipe.load(top)


def test_rows_that_were_seen_are_skipped():
    """A second stage goes on in the same data: the first stage's rows and its own are all rows, each once."""
    whole, _ = recipe.load_example_sets(recipe.DataConfig(train_size=9, validation_size=0))
    first, _ = recipe.load_example_sets(recipe.DataConfig(train_size=4, validation_size=0))
    rest, _ = recipe.load_example_sets(recipe.DataConfig(train_size=5, train_skip=4, validation_size=0))
    assert first + rest == whole
    with pytest.raises(ValueError, match="data.train_skip must be a whole number, 0 or more, got -1"):
        recipe.DataConfig(train_skip=-1)
    with pytest.raises(ValueError, match="data.train_skip is 10000, but arithmetic has no more rows"):
        recipe.load_example_sets(recipe.DataConfig(train_skip=10_000, validation_size=0))


def test_rows_of_more_steps_are_left_out(capsys):
    """Of the rows that train_size leaves, in their order; validation has chains of any length."""
    of = {"options": {"steps": [1, 4]}, "train_size": 40, "validation_size": 20}
    whole, validation = recipe.load_example_sets(recipe.DataConfig(**of))
    short, same = recipe.load_example_sets(recipe.DataConfig(**of, max_reasoning_steps=2))
    assert short == [row for row in whole if len(row.steps) <= 2]
    assert 0 < len(short) < len(whole)
    assert same == validation
    assert f"arithmetic: {len(short)} of 40 rows have at most 2 steps of reasoning" in capsys.readouterr().err
    three = of | {"options": {"steps": [3, 3]}}
    with pytest.raises(
        ValueError, match="data.max_reasoning_steps is 2, and every row of arithmetic has more"
    ):
        recipe.load_example_sets(recipe.DataConfig(**three, max_reasoning_steps=2))
    with pytest.raises(ValueError, match="data.max_reasoning_steps must be a whole number, 1 or more, got 0"):
        recipe.DataConfig(max_reasoning_steps=0)


def test_rows_of_more_steps_are_left_out_of_every_source(tmp_path, capsys):
    rows = [{"question": f"{n}?", "steps": ["1+1=2"] * n, "answer": "2"} for n in (1, 2, 3, 4)]
    files.write_jsonl(tmp_path / "mine.jsonl", rows)
    mixed_in = (recipe.SourceRows(str(tmp_path / "mine.jsonl")),)
    data = recipe.DataConfig(train_size=9, validation_size=0, mixed_in=mixed_in, max_reasoning_steps=3)
    train_rows, _ = recipe.load_example_sets(data)
    assert [len(row.steps) for row in train_rows if row.id.startswith("mine")] == [1, 2, 3]
    assert "mine.jsonl: 3 of 4 rows have at most 3 steps of reasoning" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["gsm8k", "tinygsm"])
def test_a_source_without_a_validation_split_names_the_keys(source):
    with pytest.raises(ValueError, match=f"{source} has no validation split: .* data.validation_size 0"):
        recipe.load_example_sets(recipe.DataConfig(source=source))


@pytest.mark.parametrize(
    ("source", "validation_source"),
    [("owner/rows:train", None), ("owner/rows", "owner/rows:train"), ("owner/rows:test", "owner/rows:test")],
)
def test_a_split_of_the_hub_is_not_validated_on_while_it_is_trained_on(source, validation_source):
    data = recipe.DataConfig(source=source, validation_source=validation_source)
    with pytest.raises(ValueError, match="on its own training rows, owner/rows:t"):
        recipe.load_example_sets(data)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--training.learnin_rate", "1"], "did you mean 'training.learning_rate'"),
        (["--training.learn", "1"], "unknown key 'training.learn'"),  # no abbreviations
        (["--trainin.seed", "1"], "unknown key 'trainin', did you mean 'training'"),
        (["--model.lora", "{rank: 3}"], "unknown key 'model.lora.rank'"),
        (["--training.learning_rate", "fast"], "training.learning_rate must be a number, got 'fast'"),
        (["--training.max_hours", "x"], "training.max_hours must be a number or null, got 'x'"),
        (["--training.bf16", "maybe"], "training.bf16 must be true or false, got 'maybe'"),
        (["--training", "x"], "training must be keys and values, got 'x'"),
        (["--model.lora", "3"], "model.lora must be keys and values or null, got 3"),
        (["--model.lora.r", "x"], "model.lora.r must be a whole number, got 'x'"),
        (["--model.lora.r", "0"], "recipe.yaml: model.lora.r must be 1 or more, got 0"),
        (
            ["--method.head", "cauchy"],
            "method.head must be one of gaussian, deterministic, got 'cauchy'",
        ),
        (["--method.alpha", "lots"], "method.alpha must be a number, got 'lots'"),
        (["--method.alpha", ".nan"], "method.alpha must be a number, got nan"),
        (["--method.latent_loss", "nll", "--method.head", "deterministic"], "needs a spread"),
        (["--validation.params", "[]"], "must not be empty"),
        (
            ["--method", "{name: sequential}", "--validation.params", "[{compression_factor: 9}]"],
            "validation.params: compression_factor 9 is above what was trained",
        ),
        (["--data.mixed_in", "[{size: 3}]"], "unknown key 'data.mixed_in[0].size'"),
        (["--data.mixed_in", "[{train_size: 3}]"], "data.mixed_in[0].source is missing: it must be text"),
        (["--data.mixed_in", "[{source: 5}]"], "data.mixed_in[0].source must be text, got 5"),
        (
            ["--data.mixed_in", "[{source: arithmetic}, {source: [svamp]}]"],
            "data.mixed_in[1].source must be text, got ['svamp']",
        ),
        (
            ["--data.mixed_in", "[{source: arithmetic, train_size: 0}]"],
            "data.mixed_in: train_size must be a whole number, 1 or more, got 0",
        ),
        (["--data.train_size", "0"], "data.train_size must be a whole number, 1 or more, got 0"),
        (["--data.validation_size", "-1"], "data.validation_size must be a whole number, 0 or more, got -1"),
        (["--validation.limits.batch_size", "0"], "batch_size must be a whole number, 1 or more"),
    ],
)
def test_wrong_keys_and_values_are_named(tiny, overrides, words):
    with pytest.raises(ValueError, match="recipe.yaml|--|method") as error:
        recipe.load(tiny, overrides)
    assert words in str(error.value)


def test_training_in_shares_with_validation_is_found_when_the_recipe_is_loaded():
    with pytest.raises(ValueError, match=r"training.fsdp trains without validation.* data.validation_size 0"):
        recipe.load("tiny/cot", ["--training.fsdp", "true"])
    recipe.load("tiny/cot", ["--training.fsdp", "true", "--data.validation_size", "0"])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sequential", "fsdp", "true"),
        ("cot", "draws_per_example", "2"),
    ],
)
def test_what_a_method_cannot_be_trained_with_is_found_when_the_recipe_is_loaded(name, key, value):
    thresholds = ["--method.confidence_thresholds", "[0, 0.8]"] if name == "sequential" else []
    with pytest.raises(ValueError, match=f"training.{key} (cannot train|must be 1 for) {name}"):
        recipe.load(f"tiny/{name}", [f"--training.{key}", value, *thresholds])


def test_a_wrong_key_in_the_file_is_named(tiny):
    tiny.write_text(tiny.read_text() + "modle: {backbone: tiny}\n")
    with pytest.raises(ValueError, match="unknown key 'modle', did you mean 'model'"):
        recipe.load(tiny)


def test_half_precision_is_for_frozen_weights_only(tiny):
    dtype = "bfloat16"
    wanted = f"model.dtype {dtype} cannot be trained without model.lora"
    with pytest.raises(ValueError, match=wanted) as error:
        recipe.load(tiny, ["--model.dtype", dtype])
    assert "set model.dtype float32, with training.bf16 true" in str(error.value)
    assert recipe.load(tiny, ["--model.dtype", dtype, "--model.lora.r", "4"]).model.lora.r == 4
    with pytest.raises(ValueError, match="model.dtype must be one of float32, bfloat16, got 'float16'"):
        recipe.load(tiny, ["--model.dtype", "float16", "--model.lora.r", "4"])
    assert recipe.load(tiny, ["--model.dtype", "float32", "--training.bf16", "true"]).training.bf16


def test_an_attention_that_cannot_be_had_is_named(tiny):
    def load(name):
        return recipe.load(tiny, ["--model.attn_implementation", name])

    allowed = "eager, sdpa, flash_attention_2, flash_attention_3"
    for wrong in ("flex_attention", '"null"'):
        with pytest.raises(ValueError, match=f"attn_implementation must be one of {allowed}, got {wrong!r}"):
            load(wrong)
    if importlib.util.find_spec("flash_attn") is None:
        made = load("flash_attention_2")
        with pytest.raises(ValueError, match=r"^model.attn_implementation: .*FlashAttention2 .* installed"):
            recipe.load_model(made, recipe.load_method(made))
    assert load("eager").model.attn_implementation == "eager"
    assert load("null").model.attn_implementation is None


@pytest.mark.parametrize("validation_size", [0, 4])
def test_a_backbone_that_the_engine_cannot_run_is_found_before_the_first_step(
    validation_size, tiny, tmp_path, capsys
):
    """The toy's folder, as a model with a kind of attention that the engine does not know."""
    loaded = recipe.load(tiny)
    lm = recipe.load_model(loaded, recipe.load_method(loaded))
    folder = tmp_path / "odd"
    lm.causal_lm.config.layer_types = ["chunked_attention"] * lm.config.num_hidden_layers
    lm.causal_lm.config.attention_chunk_size = 64
    lm.causal_lm.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    overrides = ["--model.backbone", str(folder), "--output", str(tmp_path / "run")]
    made = recipe.load(tiny, [*overrides, "--data.validation_size", str(validation_size)])
    with pytest.raises(ValueError, match="has layers of type chunked_attention, .* the engine cannot run it"):
        recipe.run(made)
    assert "check training rows" not in capsys.readouterr().err  # the first thing that training itself does


def claim(made, folder):
    """As a run does at its start, and when its rows and its model are loaded."""
    RunFolder(folder).check_recipe(to_json(made), defaults())
    RunFolder(folder).begin(to_json(made), resume=True)


def test_a_run_folder_belongs_to_one_run(tiny, capsys):
    first = recipe.load(tiny)
    output = files.require_writable(first.output)
    claim(recipe.load(tiny, ["--method.alpha", "0.5"]), output)  # nothing was saved: no run yet
    claim(first, output)
    (output / "best").mkdir()
    claim(first, output)
    assert capsys.readouterr().err == ""
    files.write_json(output / "finished.json", {})
    claim(recipe.load(tiny, ["--training.max_hours", "2"]), output)  # a longer budget goes on
    said = "had ended with training.max_hours None: it goes on with 2"
    assert said in capsys.readouterr().err
    # As many rows an update by other batches or processes: the run itself counts them.
    claim(recipe.load(tiny, ["--training.gradient_accumulation_steps", "2"]), output)
    # So does another card, and what is slower on it.
    others = {
        "device": "cpu", "tokens_per_batch": 99, "compile": "false", "gradient_checkpointing": "true",
        "dataloader_num_workers": 2, "logging_steps": 3, "save_steps": 7,
    }  # fmt: skip
    claim(
        recipe.load(
            tiny, [word for key, value in others.items() for word in (f"--training.{key}", str(value))]
        ),
        output,
    )
    sharded = to_json(first)
    sharded["training"]["fsdp"] = True  # as far as it trains without validation
    RunFolder(output).check_recipe(sharded, defaults())
    with pytest.raises(
        ValueError,
        match=r"holds another run \(method.alpha was 0.02, now 0.5\); give this run its own --output",
    ):
        claim(recipe.load(tiny, ["--method.alpha", "0.5"]), output)


def places_of(tree, path=()):
    """The paths of all keys of a recipe, as far as they are colar's own."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict) and key not in ("method", "options"):
            yield from places_of(value, (*path, key))


def at(tree, path):
    return functools.reduce(operator.getitem, path, tree)


def leaves(tree):
    found = {}
    for key, value in tree.items():
        inner = leaves(value) if isinstance(value, dict) and value else {"": value}
        found |= {f"{key}.{name}".rstrip("."): leaf for name, leaf in inner.items()}
    return found


def test_a_run_of_another_version_goes_on(tiny, capsys):
    """Of one that lacked a key, or had one that is gone; a value that differs is another run still."""
    made = recipe.load(tiny)
    folder = RunFolder(files.require_writable(made.output))
    (folder.path / "best").mkdir()
    files.write_json(folder.finished, {})
    now, n_same = to_json(made), 0
    for path in places_of(now):
        if path == ("output",) or path[0] == "method":
            continue
        older = copy.deepcopy(now)
        value = at(older, path[:-1]).pop(path[-1])
        at(older, path[:-1])[f"{path[-1]}_that_is_gone"] = value
        files.write_json(folder.recipe, older)
        # A new key at another value than its default is another run.
        fixed = {key: leaf for key, leaf in leaves({".".join(path): value}).items() if key not in RESUMABLE}
        if fixed.items() <= defaults().items():
            folder.check_recipe(now, defaults())
            assert folder.has_finished(now, defaults())
            assert f"{'.'.join(path)}_that_is_gone" in capsys.readouterr().err
            n_same += 1
        else:
            assert not folder.has_finished(now, defaults())
            with pytest.raises(ValueError, match=f"holds another run .*{path[-1]}"):
                folder.check_recipe(now, defaults())
    assert n_same > 50
    for path, value in (
        (("method", "alpha"), 9),
        (("model", "lora"), {"r": 2}),
        (("validation", "params"), [{"compression_factor": 3}]),
    ):
        other = copy.deepcopy(now)
        at(other, path[:-1])[path[-1]] = value
        for before, after in ((other, now), (now, other)):
            files.write_json(folder.recipe, before)
            assert not folder.has_finished(after, defaults())
            with pytest.raises(ValueError, match=f"holds another run .*{path[-1]}"):
                folder.check_recipe(after, defaults())


def test_what_may_change_when_a_run_resumes_does_not_train_a_finished_one_again(tiny, tmp_path, capsys):
    words = [
        "--data.train_size",
        "8",
        "--data.validation_size",
        "0",
        "--training.max_steps",
        "1",
        "--training.report_to",
        "none",
    ]
    made = recipe.load(tiny, words)
    recipe.run(made)
    folder = RunFolder(made.output)
    weights = (folder.best / "model.safetensors").read_bytes()
    for key, value in (
        ("logging_steps", "3"),
        ("save_steps", "7"),
        ("device", "cpu"),
        ("dataloader_num_workers", "2"),
    ):
        changed = recipe.load(tiny, [*words, f"--training.{key}", value])
        assert folder.has_finished(to_json(changed), defaults())
    assert not folder.has_finished(
        to_json(recipe.load(tiny, [*words, "--training.max_steps", "2"])), defaults()
    )
    # To free space.
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(ValueError, match="holds a finished run without its checkpoints"):
        recipe.run(recipe.load(tiny, [*words, "--training.max_steps", "2"]))
    assert (folder.best / "model.safetensors").read_bytes() == weights


def test_a_checkpoint_answers_within_the_limits_of_its_validation(tiny):
    made = recipe.load(tiny, ["--training.max_steps", "1"])
    best = recipe.run(made).best
    _, method = pretrained.load(best)
    assert decoding_of(method).max_latents == 4
    assert decoding_of(method).max_completion_length == 3


def test_a_run_goes_on_from_the_same_weights_alone(tmp_path):
    def made(start, output="run"):
        return recipe.Recipe(
            output=str(tmp_path / output), model=recipe.ModelConfig(init_from=str(tmp_path / start))
        )

    start = tmp_path / "start"
    for folder in (start, tmp_path / "run" / "best"):
        folder.mkdir(parents=True)
    (start / "model.safetensors").write_bytes(b"1")
    claim(made("start"), tmp_path / "run")
    # Run and start may be moved.
    start.rename(tmp_path / "moved")
    (tmp_path / "run").rename(tmp_path / "other")
    claim(made("moved", "other"), tmp_path / "other")
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"2")
    with pytest.raises(
        ValueError, match=r"holds another run \(weights of the start was '\w{16}', now '\w{16}'\)"
    ):
        claim(made("moved", "other"), tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"model.init_from was '.*', now 'owner/name'; weights of the start was"
    ):
        claim(replace(made("moved"), model=recipe.ModelConfig(init_from="owner/name")), tmp_path / "other")


@pytest.mark.parametrize(
    "others", [("history.json", "recipe.json"), ("asked.json", "recipe.yaml"), ("old.bin",)]
)
def test_a_start_that_names_a_run_is_known_by_the_weights_that_it_published(others, tmp_path):
    """Of a recipe or of `auto`: the run's own files may change, and its weights may not."""
    start, output = tmp_path / "start", RunFolder(tmp_path / "run")
    for folder in (start / "best", output.best):
        folder.mkdir(parents=True)
        (folder / "colar.json").write_text("{}")
    weights = start / "best" / "model.safetensors"
    for name in (*others, "best/model.safetensors"):
        (start / name).write_bytes(b"1")
    made = recipe.Recipe(output=str(output.path), model=recipe.ModelConfig(init_from=str(start)))
    direct = replace(made, model=recipe.ModelConfig(init_from=f"{start}/best"))
    claim(made, output.path)
    files.write_json(output.finished, {})
    for name in (*others, "inspect.html"):
        (start / name).write_bytes(b"2")
    assert output.has_finished(to_json(made), defaults())
    for same in (made, direct):
        output.check_recipe(to_json(same), defaults())

    weights.write_bytes(b"2")
    with pytest.raises(ValueError, match=f"was trained from other weights than {start} holds now"):
        output.has_finished(to_json(made), defaults())
    for other in (made, direct):
        with pytest.raises(ValueError, match="weights of the start was"):
            output.check_recipe(to_json(other), defaults())
    # The start may be gone by now.
    shutil.rmtree(start / "best")
    assert output.has_finished(to_json(made), defaults())


def test_the_last_line_names_what_was_written(tiny, tmp_path, capsys, monkeypatch):
    for report_to, logs in (("tensorboard", True), ("none", False)):
        made = recipe.load(tiny, ["--training.report_to", report_to, "--training.max_steps", "1"])
        made = replace(made, data=replace(made.data, validation_size=0))
        recipe.run(made, resume=False)
        last = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("wrote "))
        for text in last.removeprefix("wrote ").split(", "):
            assert Path(text.partition(" (")[0]).exists(), text
        assert ("TensorBoard" in last) == logs


def test_a_second_process_leaves_the_recipe_of_a_run_as_it_is(tiny, tmp_path, taken):
    made = recipe.load(tiny)
    with taken(Path(made.output)), pytest.raises(ValueError, match="another process is writing to"):
        recipe.run(made)
    assert sorted(path.name for path in Path(made.output).iterdir()) == [".lock"]


def test_a_file_does_not_validate_on_its_own_training_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "steps": [], "answer": "1"}\n')
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "another", "steps": [], "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"on its own training rows.*data.validation_source"):
        recipe.load_example_sets(recipe.DataConfig(source=str(rows)))
    train_rows, none = recipe.load_example_sets(recipe.DataConfig(source=str(rows), validation_size=0))
    assert len(train_rows) == 1
    assert none == []
    _, validation = recipe.load_example_sets(
        recipe.DataConfig(source=str(rows), validation_source=str(other))
    )
    assert [example.question for example in validation] == ["another"]


def write_rows(path, *questions, **fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": question, "steps": [], "answer": "1", **fields} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_under_another_name_is_the_same_file(tmp_path):
    rows = write_rows(tmp_path / "a" / "train.jsonl", "q")
    (tmp_path / "link.jsonl").symlink_to(rows)
    others = (f"{tmp_path}/a/../a/train.jsonl", f"{tmp_path}/link.jsonl")
    for other in others:
        data = recipe.DataConfig(source=str(rows), validation_source=other)
        with pytest.raises(
            ValueError,
            match=r"would validate on its own training rows, .*a/train\.jsonl: .*data.validation_size 0",
        ):
            recipe.load_example_sets(data)
    folder = recipe.DataConfig(source=f"{tmp_path}/a", validation_source=f"{tmp_path}/a/")
    # A folder's other splits are other files.
    write_rows(tmp_path / "a" / "validation.jsonl", "another")
    held_out = recipe.load_example_sets(folder)[1]
    assert [example.question for example in held_out] == ["another"]
    mixed = recipe.DataConfig(
        train_size=2, mixed_in=(recipe.SourceRows(str(rows)),), validation_source=others[0], validation_size=1
    )
    with pytest.raises(ValueError, match="on its own training rows"):
        recipe.load_example_sets(mixed)


def test_validation_rows_that_are_trained_on_are_refused(tmp_path):
    """A copy of a file is another file; its rows are the same by id and question."""
    rows = write_rows(tmp_path / "rows.jsonl", "q", id="a")
    data = recipe.DataConfig(source=str(rows), validation_source=str(tmp_path / "copy.jsonl"))
    write_rows(tmp_path / "copy.jsonl", "q", id="a")
    with pytest.raises(ValueError, match="data.validation_source: 1 of its rows are trained on, 'a' for one"):
        recipe.load_example_sets(data)
    # Two files may number their rows alike.
    write_rows(tmp_path / "copy.jsonl", "another", id="a")
    assert [example.question for example in recipe.load_example_sets(data)[1]] == ["another"]


def test_validation_questions_that_are_trained_on_are_counted(tmp_path, capsys):
    """Not refused: published sets overlap a little. Rows have the file's name in their ids, so the questions decide."""
    write_rows(tmp_path / "own" / "train.jsonl", "one", "two", "three")
    write_rows(tmp_path / "own" / "validation.jsonl", "four", " two ", "one\nmore", "three", "three")
    data = recipe.DataConfig(source=f"{tmp_path}/own")
    train_rows, held_out = recipe.load_example_sets(data)
    assert (len(train_rows), len(held_out)) == (3, 5)  # nothing is left out
    told = "validation: 3 of 5 questions are also trained on, 'own/validation/1' for one"
    assert told in capsys.readouterr().err
    # White space makes no other question, and rows that are mixed in are trained on, too.
    write_rows(tmp_path / "more" / "train.jsonl", "one  more")
    mixed = replace(data, mixed_in=(recipe.SourceRows(f"{tmp_path}/more"),))
    recipe.load_example_sets(mixed)
    assert "validation: 4 of 5 questions are also trained on" in capsys.readouterr().err
    # In another conversation it is another question.
    turns = [["user", "one?"], ["assistant", "1"]]
    rows = [
        {"question": "and then?", "answer": "2", "context": turns},
        {"question": "and then?", "answer": "3"},
    ]
    for name, row in zip(("train", "validation"), rows, strict=True):
        files.write_jsonl(tmp_path / "chats" / f"{name}.jsonl", [row])
    recipe.load_example_sets(recipe.DataConfig(source=f"{tmp_path}/chats"))
    assert "also trained on" not in capsys.readouterr().err
    # The first rows alone validate, and without validation nothing is asked twice.
    recipe.load_example_sets(replace(data, validation_size=1))
    recipe.load_example_sets(replace(data, validation_size=0))
    assert "validation" not in capsys.readouterr().err


def test_rows_that_occur_twice_are_refused(tmp_path):
    """The same file, however it is written, and two files of one name whose rows have no ids."""
    first = write_rows(tmp_path / "a" / "train.jsonl", "one", "two")
    second = write_rows(tmp_path / "b" / "train.jsonl", "three")
    repeated = r"^data and data.mixed_in\[0\]: some rows occur twice, 'train/train/0' for one"
    for again in (first, f"{tmp_path}/b/../a/train.jsonl", second):
        mixed = (recipe.SourceRows(str(again)),)
        data = recipe.DataConfig(source=str(first), validation_size=0, mixed_in=mixed)
        with pytest.raises(ValueError, match=repeated):
            recipe.load_example_sets(data)
    write_rows(second, "three", id="b")
    assert [row.question for row in recipe.load_example_sets(data)[0]] == ["one", "two", "three"]


def test_a_validation_question_beyond_the_context_is_found_before_the_first_step(tiny):
    made = recipe.load(tiny, ["--validation.limits.max_latents", "2000"])
    with pytest.raises(ValueError, match=r"request arithmetic/validation/.*the model's context is 1024"):
        recipe.run(made)
    assert not (Path(made.output) / "checkpoints").exists()


@pytest.mark.parametrize(
    ("method", "max_latents", "needs"),
    [
        # Two equations of 7 tokens: <<3*4=12>> has one for each sign and number.
        ("cot", 13, "14 and 1"),
        ("cot", 14, None),
        ("colar", 6, "7 and 1"),
        ("colar", 7, None),
        ("icot", 0, None),
        ("coconut", 5, "6 and 1"),
        ("coconut", 6, None),
    ],
)
def test_a_limit_that_is_shorter_than_the_training_chains_is_a_warning(
    tiny, capsys, method, max_latents, needs
):
    """Without it every validation is 0%, and the checkpoint keeps the limit."""
    keys = ["--validation.params", "[{compression_factor: 2}]" if method == "colar" else "[{}]"]
    config = {"name": method} | ({"n_stages": 3, "n_latents_per_step": 2} if method == "coconut" else {})
    keys += ["--method", json.dumps(config), "--validation.limits.max_latents", str(max_latents)]
    made = recipe.load(tiny, keys)
    load_model_and_rows(made, load_method(made))
    said = capsys.readouterr().err
    if needs is None:
        assert "warning: validation.limits" not in said
    else:
        assert f"of 6 training rows, which need up to {needs}: answers are cut" in said


def test_run_trains_and_leaves_a_checkpoint_that_answers(tiny, tmp_path):
    result = recipe.run(recipe.load(tiny))
    lm, method = pretrained.load(result.best)
    assert method.name == "colar"
    assert method.config.sigma_e == pytest.approx(lm.embedding_std(), rel=1e-5)
    info = files.read_json(Path(result.best) / "colar.json")
    assert info["run"]["recipe"]["data"]["train_size"] == 6
    card = (Path(result.best) / "README.md").read_text()
    assert "colar generate" in card
    assert "arithmetic" in card


def test_colar_starts_from_cot_weights_with_fresh_modules(tiny, tmp_path):
    cot = recipe.run(
        recipe.load(
            tiny, ["--method", "{name: cot}", "--validation.params", "[{}]", "--output", f"{tmp_path}/cot"]
        )
    )
    second = recipe.load(tiny, ["--model.init_from", str(cot.best)])
    lm = recipe.load_model(second, recipe.load_method(second))
    trained, _ = pretrained.load(cot.best)
    theirs = trained.causal_lm.state_dict()
    assert all((value == theirs[key]).all() for key, value in lm.causal_lm.state_dict().items())
    assert set(lm.extra) == {"latent_head"}


def test_a_start_that_is_not_there_is_found_before_the_rows_are_read(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "^model.init_from: no checkpoint at mine/cot/best: there is no such folder$"
    missing = ["--model.init_from", "mine/cot/best", "--data.source", "svamp", "--data.data_dir", "none"]
    with pytest.raises(ValueError, match=message):
        recipe.run(recipe.load(tiny, missing))
    with pytest.raises(ValueError, match=message):
        recipe.load_method(recipe.load(tiny, missing))


def test_a_backbone_beside_a_start_is_refused_on_the_command_line_alone(tiny):
    with pytest.raises(ValueError, match=r"--model.backbone has no effect beside model.init_from \(x\)"):
        recipe.load(tiny, ["--model.init_from", "x", "--model.backbone=tiny-digits"])
    alone = recipe.load("tiny/colar", ["--model.backbone", "tiny-digits", "--model.init_from", "null"])
    assert alone.model.backbone == "tiny-digits"
    # The file's own, or its base's, is left alone.
    inherited = recipe.load(ROOT / "lab/recipes/smollm2-135m/colar-continued.yaml").model
    assert (inherited.backbone, bool(inherited.init_from)) == ("smollm2-135m", True)


def test_a_layout_beside_a_start_is_refused_on_the_command_line(tiny):
    """The checkpoint has its own: a model is prompted as it was trained."""
    for word, key in (("--template.separator=@@@", "--template.separator"), ("--template", "--template")):
        value = [] if "=" in word else ["{step_joiner: ;}"]
        with pytest.raises(ValueError, match=rf"^{key} has no effect beside model.init_from \(x\)"):
            recipe.load(tiny, ["--model.init_from", "x", word, *value])
    assert recipe.load(tiny, ["--template.separator", "@@@"]).template.separator == "@@@"


def test_rows_of_another_source_are_mixed_in(tmp_path):
    """Its own size, seed and options; validation stays with the main source."""
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "a", "question": "1+1?", "steps": ["<<1+1=2>>"], "answer": "2"}\n')
    more = recipe.SourceRows("arithmetic", train_size=5, seed=9, options={"steps": [2, 2]})
    data = recipe.DataConfig(
        source=str(own), validation_source="arithmetic", validation_size=3, mixed_in=(more,)
    )
    train_rows, validation = recipe.load_example_sets(data)
    assert [len(train_rows), len(validation)] == [6, 3]
    assert {len(example.steps) for example in train_rows[1:]} == {2}
    plain, _ = recipe.load_example_sets(recipe.DataConfig(train_size=50))
    assert max(len(example.steps) for example in plain) > 2


GRPO = ["--grpo.num_generations", "2", "--grpo.max_latents", "4", "--grpo.max_completion_length", "3",
        "--training.per_device_train_batch_size", "4", "--training.max_steps", "2"]  # fmt: skip
COT = ["--method", "{name: cot}", "--validation.params", "[{}]"]


def test_grpo_goes_on_with_a_checkpoint_and_its_method(tiny, tmp_path):
    sft = recipe.run(recipe.load(tiny, ["--method.alpha", "0.05", "--training.max_steps", "1"]))
    # As `train auto` and `import` publish it, with a speed and limits of its own.
    published = files.read_json(sft.best / "colar.json")
    own = {"params": {"compression_factor": 1}, "limits": {"max_latents": 9, "max_completion_length": 5}}
    published["method"] |= own
    files.write_json(sft.best / "colar.json", published)
    first = ["--model.init_from", str(sft.best), *GRPO, "--output", f"{tmp_path}/grpo"]
    again = ["--method", "{name: colar}", *first]
    result = recipe.run(recipe.load(tiny, again))
    _, method = pretrained.load(result.best)
    assert method.config.alpha == 0.05
    assert (method.default_params, method.default_limits) == (own["params"], own["limits"])
    assert result.steps == 2
    # What came along, not the recipe's section, which only names the method; not what was measured.
    shown = '## Method\n\n```json\n{\n  "name": "colar",\n  "alpha": 0.05\n}\n```'
    assert shown in (Path(result.best) / "README.md").read_text()
    info = files.read_json(Path(result.best) / "colar.json")["run"]
    assert info["recipe"]["grpo"]["num_generations"] == info["grpo"]["num_generations"] == 2
    assert (tmp_path / "grpo" / "completions.jsonl").exists()
    with pytest.raises(ValueError, match=r"method.alpha is 0.02, but .* was trained with 0.05: leave it out"):
        recipe.run(recipe.load(tiny, [*first, "--output", f"{tmp_path}/other"]))
    speeds = ["--validation.params", "[{compression_factor: 2.5}]"]
    with pytest.raises(ValueError, match=r"^validation.params: .* 2.5 is not whole and was not trained"):
        recipe.load_method(recipe.load(tiny, [*again, *speeds]))
    with pytest.raises(ValueError, match=r"method.name is cot, but .* was trained by colar"):
        recipe.run(recipe.load(tiny, [*first, *COT, "--output", f"{tmp_path}/other"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "grpo needs model.init_from"),
        (["--grpo", "3"], "--grpo 3: grpo must be keys and values or null, got 3"),
        (
            ["--grpo.loss_type", "ppo"],
            "--grpo.loss_type ppo: grpo.loss_type must be one of grpo, dr_grpo, dapo, got 'ppo'",
        ),
        (
            ["--grpo.num_generations", "1"],
            "recipe.yaml: grpo.num_generations must be a whole number, 2 or more, got 1",
        ),
        (
            ["--grpo.compression_factors", "[a]"],
            "grpo.compression_factors[0] must be a number, got 'a'",
        ),
        (
            ["--model.init_from", "x", "--grpo.top_p", "0.9"],
            "--grpo.top_p 0.9: unknown key 'grpo.top_p'",
        ),
        (
            ["--model.init_from", "x", "--grpo.num_generations", "3"],
            "must be a multiple of grpo.num_generations (3)",
        ),
        (
            ["--model.init_from", "x", "--grpo.reward_funcs", "[speed]"],
            "unknown reward in grpo.reward_funcs: 'speed'",
        ),
        (
            ["--model.init_from", "x", "--grpo.latent_logprob", "sum"],
            "--grpo.latent_logprob sum: unknown key 'grpo.latent_logprob'",
        ),
        (
            ["--model.init_from", "x", *COT, "--method", "{name: pause}"],
            "method.name pause cannot be trained by grpo",
        ),
        (["--model.init_from", "x", "--grpo.num_generation", "2"], "did you mean 'grpo.num_generations'"),
        (["--model.init_from", "x", "--training.fsdp", "true"], "training.fsdp is for SFT"),
    ],
)
def test_a_wrong_grpo_section_is_found_when_it_is_loaded(tiny, overrides, words):
    with pytest.raises(ValueError, match="grpo") as error:
        recipe.load(tiny, [*GRPO, *overrides])
    assert words in str(error.value)


def test_an_override_of_a_section_that_is_an_anchor_leaves_the_other(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "output: x\nmethod: {name: colar}\nvalidation:\n  params: [{compression_factor: 2}]\n"
        "data: {options: &shared {steps: [2, 2]}, mixed_in: [{source: svamp, options: *shared}]}\n"
    )
    made = recipe.load(path, ["--data.options.steps", "[1, 1]"])
    assert made.data.options == {"steps": [1, 1]}
    assert made.data.mixed_in[0].options == {"steps": [2, 2]}
