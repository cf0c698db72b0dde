"""Recipes: every shipped one loads, overrides are exact, wrong keys are named, a run folder belongs to one run."""

import dataclasses
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from colar import files, planning, recipe, recipes
from colar.data.generators import GENERATORS
from colar.methods import pretrained, registry

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = recipes.names()


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: colar, alpha: 2e-2}}\n"
        "data: {train_size: 6, validation_size: 2, options: {steps: [2, 2]}}\n"
        "training: {per_device_train_batch_size: 3, learning_rate: 3e-4, report_to: none}\n"
        "validation: {params: [{compression_factor: 2}], limits: {max_latents: 4, max_completion_length: 3}}\n"
    )
    return path


def test_there_are_recipes():
    assert {"tiny/cot-overruns", "tiny/colar-nll", "smollm2-135m/grpo", "llama-3.2-1b/cot-math",
            "llama-3.2-1b/colar-math", "llama-3.2-1b/grpo-math", "deepseek-qwen-1.5b/grpo-math",
            "llama-3.1-8b/cot", "llama-3.1-8b/colar", "llama-3.1-8b/grpo", "tiny/cot", "tiny/no_cot", "tiny/colar", "tiny/grpo", "smollm2-135m/cot", "smollm2-135m/colar",
            "llama-3.2-1b/cot", "llama-3.2-1b/colar", "deepseek-qwen-1.5b/cot-math",
            "deepseek-qwen-1.5b/colar-math"} <= set(SHIPPED)  # fmt: skip
    logic = {
        f"logic-smollm2/{task}-{method}"
        for task in ("prosqa", "prontoqa")
        for method in ("cot", "no_cot", "colar")
    }
    assert logic <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_loads_and_builds(name):
    loaded = recipe.load(name)
    method = recipe.build_method(loaded)
    assert method.name == loaded.method["name"]
    for values in loaded.validation.params:
        assert method.trained(registry.make_params(method, values)) is None
    if loaded.grpo is not None:
        for param, drawn in loaded.grpo.drawn.items():
            for value in drawn:
                assert method.trained(registry.make_params(method, {param: value})) is None
    assert loaded.output.startswith("runs/")
    assert recipes.that_writes(loaded.output) == name


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
    assert files.layered_yaml(own) == files.layered_yaml(recipes.find(name))


def test_a_copy_does_not_overwrite(tmp_path):
    own, *bases = recipes.copy("arena/icot", tmp_path)
    assert [path.stem for path in bases] == ["cot", "cot-init"]
    recipes.copy("arena/colar", tmp_path)  # on the same bases, which are there already
    bases[-1].write_text("output: mine\n")
    with pytest.raises(
        ValueError, match="cot-init.yaml exists and is not the shipped recipe: nothing was copied"
    ):
        recipes.copy("arena/coconut", tmp_path)
    assert not (tmp_path / "arena" / "coconut.yaml").exists()
    with pytest.raises(ValueError, match="no shipped recipe is called arena/cott, did you mean 'arena/cot'"):
        recipes.copy("arena/cott", tmp_path)


@pytest.mark.parametrize("task", ["prosqa", "prontoqa"])
def test_recipes_of_logic_train_and_validate_on_made_rows(task):
    for method in ("cot", "no_cot", "colar"):
        loaded = recipe.load(f"logic-smollm2/{task}-{method}")
        assert (loaded.data.source, loaded.data.validation_source) == (f"{task}-made", None)
        assert loaded.output == f"runs/logic-smollm2/{task}-{method}"
        assert loaded.model.backbone == "smollm2-135m"
    # The last one is CoLaR's.
    assert loaded.model.init_from == f"runs/logic-smollm2/{task}-cot/best"
    config = recipe.build_method(loaded).config
    assert (config.head, config.lookahead_weight) == ("sequential", 0.2)
    assert config.factors.values == (1, 2, 2, 3, 3, 4, 5, 5)


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
        assert loaded.training.per_device_train_batch_size * 8 == 256
    math = recipe.load("deepseek-qwen-1.5b/colar-math")
    assert recipe.build_method(math).config.factors.values == (2,)
    assert math.validation.limits.max_latents == 128
    for name in (
        "no_cot",
        "icot",
        "coconut",
        "distill",
        "tokenskip",
        "pause",
    ):  # as the paper sets its baselines
        made = recipe.load(f"llama-3.2-1b/{name}")
        assert (made.model.lora.r, list(made.model.lora.target_modules)) == (128, ["q_proj", "v_proj"])
        assert (made.training.learning_rate, made.training.lr_scheduler_type) == (1e-4, "constant")
    codi = recipe.load("llama-3.2-1b-authors/distill")
    assert len(codi.model.lora.target_modules) == 7
    assert (codi.training.learning_rate, codi.training.lr_scheduler_type) == (8e-4, "cosine")
    assert (codi.model.init_from, codi.method["align_weight"]) == (None, 20)
    gsm = recipe.load("llama-3.2-1b/colar")
    assert recipe.build_method(gsm).config.factors.values == (1, 2, 3, 4, 5)


def test_recipes_of_the_papers_models_are_ready_for_a_card():
    """One bad row of 385,620 stops no run; validation is as the test; long rows go through in parts; an update of
    reinforcement is one batch."""
    papers = ("llama-3.2-1b/", "llama-3.2-3b/", "llama-3.1-8b/", "deepseek-qwen-1.5b/")
    names = [name for name in SHIPPED if name.startswith(papers)]
    assert len(names) >= 19
    for name in names:
        made = recipe.load(name)
        assert made.data.skip_malformed, name
        assert made.validation.decoding == "sampled", name
        assert made.training.tokens_per_batch is not None, name
        if made.grpo is not None:
            assert made.training.gradient_accumulation_steps == 1, name
    assert recipe.load("llama-3.2-1b-authors/coconut").validation.decoding == "greedy"


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
    sft, grpo = (recipe.load(f"tiny/{name}") for name in ("colar-nll", "grpo"))
    assert grpo.model.init_from == f"{sft.output}/best"
    assert sft.data.options["overruns"] > 0
    assert not grpo.data.options.get("overruns")
    assert list(grpo.grpo.compression_factors) == [grpo.validation.params[0]["compression_factor"]]
    assert set(grpo.grpo.compression_factors) <= set(recipe.build_method(sft).config.factors.values)


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


def test_what_is_done_to_a_recipe_stays_out_of_the_next(tiny):
    """One parser reads them all: neither its defaults nor its values are in a recipe that was read."""
    first = recipe.load(tiny)
    before = dataclasses.asdict(first)
    first.method["name"] = "another"
    first.data.options["steps"] = [1, 1]
    with pytest.raises(ValueError, match=r"training\.max_steps"):
        recipe.load(tiny, ["--training.max_steps", "many"])
    recipe.load(tiny, ["--training.max_steps", "7", "--validation.params", "[{}]"])
    assert dataclasses.asdict(recipe.load(tiny)) == before


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
        ("base: recipe.yaml\nmethod: {merj: mean}\n", "unknown key 'merj', did you mean 'merge'"),
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


def test_rows_that_were_seen_are_skipped():
    """A second stage goes on in the same data: the first stage's rows and its own are all rows, each once."""
    whole, _ = recipe.load_examples(recipe.DataConfig(train_size=9, validation_size=0))
    first, _ = recipe.load_examples(recipe.DataConfig(train_size=4, validation_size=0))
    rest, _ = recipe.load_examples(recipe.DataConfig(train_size=5, train_skip=4, validation_size=0))
    assert first + rest == whole
    with pytest.raises(ValueError, match="data.train_skip must be a whole number, 0 or more, got -1"):
        recipe.DataConfig(train_skip=-1)
    with pytest.raises(ValueError, match="data.train_skip is 10000, but arithmetic has no more rows"):
        recipe.load_examples(recipe.DataConfig(train_skip=10_000, validation_size=0))


def test_rows_of_more_steps_are_left_out(capsys):
    """Of the rows that train_size leaves, in their order; validation has chains of any length."""
    of = {"options": {"steps": [1, 4]}, "train_size": 40, "validation_size": 20}
    whole, validation = recipe.load_examples(recipe.DataConfig(**of))
    short, same = recipe.load_examples(recipe.DataConfig(**of, max_reasoning_steps=2))
    assert short == [row for row in whole if len(row.steps) <= 2]
    assert 0 < len(short) < len(whole)
    assert same == validation
    assert f"arithmetic: {len(short)} of 40 rows have at most 2 steps of reasoning" in capsys.readouterr().err
    three = of | {"options": {"steps": [3, 3]}}
    with pytest.raises(
        ValueError, match="data.max_reasoning_steps is 2, and every row of arithmetic has more"
    ):
        recipe.load_examples(recipe.DataConfig(**three, max_reasoning_steps=2))
    with pytest.raises(ValueError, match="data.max_reasoning_steps must be a whole number, 1 or more, got 0"):
        recipe.DataConfig(max_reasoning_steps=0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--training.learnin_rate", "1"], "did you mean 'training.learning_rate'"),
        (["--training.learn", "1"], "unknown key 'training.learn'"),  # no abbreviations
        (["--trainin.seed", "1"], "did you mean 'training.seed'"),
        (["--model.lora", "{rank: 3}"], "unknown key 'model.lora.rank'"),
        (["--training.learning_rate", "fast"], "training.learning_rate must be a number, got fast"),
        (["--training.max_hours", "x"], "training.max_hours must be a number or null, got x"),
        (["--training.bf16", "maybe"], "training.bf16 must be true or false, got maybe"),
        (["--training", "x"], "training must be keys and values, got x"),
        (["--model.lora", "3"], "model.lora must be keys and values or null, got 3"),
        (["--model.lora.r", "x"], "model.lora.r must be a whole number, got x"),
        (["--model.lora.r", "0"], "recipe.yaml: model.lora.r must be 1 or more, got 0"),
        (
            ["--method.head", "cauchy"],
            "method.head must be one of gaussian, deterministic, anchored, sequential, got 'cauchy'",
        ),
        (["--method.alpha", "lots"], "alpha must be a float, got 'lots'"),
        (["--method.alpha", ".nan"], "method.alpha must be a finite number, got nan"),
        (["--method.latent_loss", "nll", "--method.head", "deterministic"], "needs a spread"),
        (["--validation.params", "[]"], "must not be empty"),
        (["--data.mixed_in", "[{sauce: arithmetic}]"], "an entry has a source and no keys but"),
        (["--data.mixed_in", "[{source: arithmetic, siez: 3}]"], "an entry has a source and no keys but"),
        (["--data.mixed_in", "[{source: 5}]"], "data.mixed_in: source must be text, got 5"),
        (
            ["--data.mixed_in", "[{source: svamp, train_split: [train]}]"],
            "data.mixed_in: train_split must be text, got ['train']",
        ),
        (
            ["--data.mixed_in", "[{source: arithmetic, train_size: all}]"],
            "data.mixed_in: train_size must be a whole number, 1 or more, got 'all'",
        ),
        (
            ["--data.mixed_in", "[{source: arithmetic, seed: one}]"],
            "data.mixed_in: seed must be a whole number, got 'one'",
        ),
        (
            ["--data.mixed_in", "[{source: arithmetic, options: steps}]"],
            "data.mixed_in: options must be keys and values, got 'steps'",
        ),
        (["--data.train_size", "0"], "data.train_size must be a whole number, 1 or more, got 0"),
        (["--data.validation_size", "-1"], "data.validation_size must be a whole number, 0 or more, got -1"),
        (["--validation.limits.batch_size", "0"], "batch_size must be 1 or more"),
    ],
)
def test_wrong_keys_and_values_are_named(tiny, overrides, words):
    with pytest.raises(ValueError, match="recipe.yaml|method|validation|batch_size|data") as error:
        recipe.load(tiny, overrides)
    assert words in str(error.value)


def test_a_wrong_key_in_the_file_is_named(tiny):
    tiny.write_text(tiny.read_text() + "modle: {backbone: tiny}\n")
    with pytest.raises(ValueError, match="'modle.backbone', did you mean 'model.backbone'"):
        recipe.load(tiny)


def test_a_section_without_keys_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output: x\ntraining: 3\n")
    with pytest.raises(ValueError, match="training must hold keys and values, got 3"):
        recipe.load(path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_for_frozen_weights_only(tiny, dtype):
    wanted = f"model.dtype {dtype} cannot be trained without model.lora"
    with pytest.raises(ValueError, match=wanted) as error:
        recipe.load(tiny, ["--model.dtype", dtype])
    assert "set model.dtype float32, with training.bf16 true" in str(error.value)
    assert recipe.load(tiny, ["--model.dtype", dtype, "--model.lora.r", "4"]).model.lora.r == 4
    assert recipe.load(tiny, ["--model.dtype", "float32", "--training.bf16", "true"]).training.bf16


def test_an_attention_that_cannot_be_had_is_found_when_the_recipe_is_loaded(tiny):
    def load(*overrides):
        return recipe.load(tiny, ["--model.attn_implementation", *overrides]).model.attn_implementation

    allowed = "eager, sdpa, flex_attention, flash_attention_2, flash_attention_3, null, got 'flash'"
    with pytest.raises(ValueError, match="model.attn_implementation must be one of " + allowed):
        load("flash")
    with pytest.raises(
        ValueError, match="flash_attention_2 needs the package flash_attn, which is not inst"
    ) as error:
        load("flash_attention_2")
    assert "eager, sdpa, flex_attention or null" in str(error.value)
    # Installed, but not for the engine, which validates and samples.
    with pytest.raises(ValueError, match="must be one of eager, sdpa or null where the run generates"):
        load("flex_attention")
    assert load("flex_attention", "--data.validation_size", "0") == "flex_attention"
    assert load("eager") == "eager"
    assert load("null") is None


def test_a_backbone_that_the_engine_cannot_run_is_found_before_the_first_step(tiny, tmp_path, capsys):
    """The toy's folder, as a model with a kind of attention that the engine does not know."""
    lm, _ = recipe.load_model(recipe.load(tiny))
    folder = tmp_path / "odd"
    lm.causal_lm.config.layer_types = ["chunked_attention"] * lm.config.num_hidden_layers
    lm.causal_lm.config.attention_chunk_size = 64
    lm.causal_lm.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    output = str(tmp_path / "run")
    with pytest.raises(ValueError, match="has layers of type chunked_attention, .* the engine cannot run it"):
        recipe.run(recipe.load(tiny, ["--model.backbone", str(folder), "--output", output]))
    assert "check rows" not in capsys.readouterr().err  # the first thing that training itself does


def test_a_run_folder_belongs_to_one_run(tiny, tmp_path):
    first = recipe.load(tiny)
    output = files.require_writable(first.output)
    recipe.claim(recipe.load(tiny, ["--method.alpha", "0.5"]), output)  # nothing was saved: no run yet
    recipe.claim(first, output)
    (output / "best").mkdir()
    recipe.claim(first, output)
    recipe.claim(recipe.load(tiny, ["--training.max_hours", "2"]), output)  # a longer budget goes on
    # As many rows an update by other batches or processes: the run itself counts them.
    recipe.claim(recipe.load(tiny, ["--training.gradient_accumulation_steps", "2"]), output)
    recipe.claim(recipe.load(tiny, ["--training.tokens_per_batch", "99"]), output)  # so does another card
    with pytest.raises(
        ValueError,
        match=r"holds another run \(method.alpha was 0.02, now 0.5\); give this run its own --output",
    ):
        recipe.claim(recipe.load(tiny, ["--method.alpha", "0.5"]), output)
    older = files.read_json(output / "recipe.json")
    del older["data"][
        "train_skip"
    ]  # a run that began before there was this key goes on, with its default alone
    older["grpo"] = {"top_p": 1.0}  # a key that is gone, and had one legal value
    files.write_json(output / "recipe.json", older)
    with pytest.raises(ValueError, match=r"holds another run \(data.train_skip was 0, now 1\)"):
        recipe.claim(recipe.load(tiny, ["--data.train_skip", "1"]), output)
    recipe.claim(recipe.load(tiny, ["--training.max_hours", "2"]), output)


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
    with pytest.raises(ValueError, match=r"is one file.*data.validation_source"):
        recipe.load_examples(recipe.DataConfig(source=str(rows)))
    train_rows, none = recipe.load_examples(recipe.DataConfig(source=str(rows), validation_size=0))
    assert len(train_rows) == 1
    assert none == []
    _, validation = recipe.load_examples(recipe.DataConfig(source=str(rows), validation_source=str(other)))
    assert [example.question for example in validation] == ["another"]
    same = recipe.DataConfig(source="arithmetic", train_size=4, validation_split="train", validation_size=2)
    with pytest.raises(ValueError, match=r"data.validation_split train is the one to train on"):
        recipe.load_examples(same)


def write_rows(path, *questions, **fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": question, "steps": [], "answer": "1", **fields} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_under_another_name_is_the_same_file(tmp_path):
    rows = write_rows(tmp_path / "a" / "train.jsonl", "q")
    (tmp_path / "link.jsonl").symlink_to(rows)
    others = (f"{tmp_path}/a/../a/train.jsonl", f"{tmp_path}/link.jsonl", f"{tmp_path}/a")
    for other in others:
        data = recipe.DataConfig(source=str(rows), validation_source=other, validation_split="train")
        with pytest.raises(ValueError, match=r"are one file, .*a/train\.jsonl.*data.validation_size 0"):
            recipe.load_examples(data)
    folder = recipe.DataConfig(
        source=f"{tmp_path}/a", validation_source=f"{tmp_path}/a/", validation_split="train"
    )
    with pytest.raises(ValueError, match="are one file"):
        recipe.load_examples(folder)
    # A folder's other splits are other files.
    write_rows(tmp_path / "a" / "validation.jsonl", "another")
    held_out = recipe.load_examples(replace(folder, validation_split="validation"))[1]
    assert [example.question for example in held_out] == ["another"]
    mixed = recipe.DataConfig(
        train_size=2, mixed_in=({"source": str(rows)},), validation_source=others[0], validation_size=1
    )
    with pytest.raises(ValueError, match="are one file"):
        recipe.load_examples(mixed)


def test_validation_rows_that_are_trained_on_are_refused(tmp_path):
    """A copy of a file is another file; its rows are the same by id and question."""
    rows = write_rows(tmp_path / "rows.jsonl", "q", id="a")
    data = recipe.DataConfig(source=str(rows), validation_source=str(tmp_path / "copy.jsonl"))
    write_rows(tmp_path / "copy.jsonl", "q", id="a")
    with pytest.raises(ValueError, match="data.validation_source: 1 of its rows are trained on, 'a' for one"):
        recipe.load_examples(data)
    # Two files may number their rows alike.
    write_rows(tmp_path / "copy.jsonl", "another", id="a")
    assert [example.question for example in recipe.load_examples(data)[1]] == ["another"]


def test_validation_questions_that_are_trained_on_are_counted(tmp_path, capsys):
    """Not refused: published sets overlap a little. Rows have the file's name in their ids, so the questions decide."""
    write_rows(tmp_path / "own" / "train.jsonl", "one", "two", "three")
    write_rows(tmp_path / "own" / "validation.jsonl", "four", " two ", "one\nmore", "three", "three")
    data = recipe.DataConfig(source=f"{tmp_path}/own")
    train_rows, held_out = recipe.load_examples(data)
    assert (len(train_rows), len(held_out)) == (3, 5)  # nothing is left out
    told = "validation: 3 of 5 questions are also trained on, 'own/validation/1' for one"
    assert told in capsys.readouterr().err
    # White space makes no other question, and rows that are mixed in are trained on, too.
    write_rows(tmp_path / "more" / "train.jsonl", "one  more")
    mixed = replace(data, mixed_in=({"source": f"{tmp_path}/more"},))
    recipe.load_examples(mixed)
    assert "validation: 4 of 5 questions are also trained on" in capsys.readouterr().err
    # The first rows alone validate, and without validation nothing is asked twice.
    recipe.load_examples(replace(data, validation_size=1))
    recipe.load_examples(replace(data, validation_size=0))
    assert "validation" not in capsys.readouterr().err


@pytest.mark.parametrize("source", sorted(GENERATORS))
def test_generated_rows_of_two_splits_ask_no_question_twice(source, capsys):
    """Their splits are disjoint by construction: nothing is said of them, and needs no exception."""
    options = {"drill": {"terms": [1, 1], "max_value": 20}, "arithmetic": {"steps": [1, 1]}}.get(source, {})
    data = recipe.DataConfig(source=source, train_size=60, validation_size=60, options=options)
    train_rows, held_out = recipe.load_examples(data)
    assert (len(train_rows), len(held_out)) == (60, 60)
    assert capsys.readouterr().err == ""


def test_two_files_of_one_name_are_mixed(tmp_path):
    """Their rows have ids of their own; those of the first, and of a file alone, are as they always were."""
    first = write_rows(tmp_path / "a" / "train.jsonl", "one", "two")
    second = write_rows(tmp_path / "b" / "train.jsonl", "three", "three", "four")
    data = recipe.DataConfig(source=str(first), validation_size=0, mixed_in=({"source": str(second)},))
    train_rows, _ = recipe.load_examples(data)
    assert [row.id for row in train_rows[:2]] == ["train/train/0", "train/train/1"]
    assert [row.id for row in train_rows[2:]] == [f"{second}/train:train/train/{i}" for i in range(3)]
    assert [row.question for row in train_rows] == ["one", "two", "three", "three", "four"]
    assert train_rows[3].cluster == train_rows[2].id
    alone = recipe.load_examples(recipe.DataConfig(source=str(second), validation_size=0))[0]
    assert [row.id for row in alone] == [f"train/train/{i}" for i in range(3)]
    # The same file again, however it is written, has the same rows.
    for again in (str(first), f"{tmp_path}/b/../a/train.jsonl"):
        with pytest.raises(ValueError, match="some rows occur twice, 'train/train/0' for one"):
            recipe.load_examples(replace(data, mixed_in=({"source": again},)))


def test_a_validation_question_beyond_the_context_is_found_before_the_first_step(tiny):
    made = recipe.load(tiny, ["--validation.limits.max_latents", "2000"])
    with pytest.raises(ValueError, match=r"request arithmetic/validation/.*the model's context is 1024"):
        recipe.run(made)
    assert not (Path(made.output) / "checkpoints").exists()


@pytest.mark.curves
def test_run_trains_and_leaves_a_checkpoint_that_answers(tiny, tmp_path):
    result = recipe.run(recipe.load(tiny))
    lm, method = pretrained.load(result.best)
    assert method.name == "colar"
    assert method.config.sigma_e == pytest.approx(lm.embedding_std(), rel=1e-5)
    info = files.read_json(Path(result.best) / "colar.json")
    assert info["run"]["recipe"]["data"]["train_size"] == 6
    assert (tmp_path / "run" / "learning_curves.png").exists()
    card = (Path(result.best) / "README.md").read_text()
    assert "colar generate" in card
    assert "arithmetic" in card


def test_colar_starts_from_cot_weights_with_fresh_modules(tiny, tmp_path):
    cot = recipe.run(
        recipe.load(
            tiny, ["--method", "{name: cot}", "--validation.params", "[{}]", "--output", f"{tmp_path}/cot"]
        )
    )
    lm, method = recipe.load_model(recipe.load(tiny, ["--model.init_from", str(cot.best)]))
    trained, _ = pretrained.load(cot.best)
    theirs = trained.causal_lm.state_dict()
    assert all((value == theirs[key]).all() for key, value in lm.causal_lm.state_dict().items())
    assert set(lm.extra) == {"latent_head"}
    with pytest.raises(ValueError, match="no checkpoint at .*no/such: there is no such folder"):
        recipe.load_model(recipe.load(tiny, ["--model.init_from", "./no/such"]))


def test_a_start_that_is_not_there_is_named_with_the_recipe_that_makes_it(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = (
        "^model.init_from: no checkpoint at runs/tiny/cot/best: there is no such folder; "
        "`colar train tiny/cot` makes it$"
    )
    # Before the rows, which a shipped recipe has many of.
    missing = ["--model.init_from", "runs/tiny/cot/best", "--data.source", "svamp", "--data.data_dir", "none"]
    with pytest.raises(ValueError, match=message):
        recipe.run(recipe.load(tiny, missing))
    with pytest.raises(ValueError, match=message):
        recipe.load_model(recipe.load("tiny/colar"))
    message = "^model.init_from: no checkpoint at mine/cot/best: there is no such folder$"
    with pytest.raises(ValueError, match=message):
        recipe.load_model(recipe.load(tiny, ["--model.init_from", "mine/cot/best"]))


def test_a_backbone_beside_a_start_is_refused_on_the_command_line_alone(tiny):
    with pytest.raises(ValueError, match=r"--model.backbone has no effect beside model.init_from \(x\)"):
        recipe.load(tiny, ["--model.init_from", "x", "--model.backbone=tiny-digits"])
    alone = recipe.load("tiny/colar", ["--model.backbone", "tiny-digits", "--model.init_from", "null"])
    assert alone.model.backbone == "tiny-digits"
    # The base's, which this recipe does not take back.
    inherited = recipe.load("smollm2-135m/colar-unsure-digits").model
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
    more = {"source": "arithmetic", "train_size": 5, "seed": 9, "options": {"steps": [2, 2]}}
    data = recipe.DataConfig(
        source=str(own), validation_source="arithmetic", validation_size=3, mixed_in=(more,)
    )
    train_rows, validation = recipe.load_examples(data)
    assert [len(train_rows), len(validation)] == [6, 3]
    assert {len(example.steps) for example in train_rows[1:]} == {2}
    assert max(len(example.steps) for example in recipe.load_examples(recipe.DataConfig())[0]) > 2
    with pytest.raises(ValueError, match="some rows occur twice"):
        recipe.load_examples(
            recipe.DataConfig(train_size=5, mixed_in=({"source": "arithmetic", "train_size": 5},))
        )


GRPO = ["--grpo.num_generations", "2", "--grpo.max_latents", "4", "--grpo.max_completion_length", "3",
        "--training.per_device_train_batch_size", "4", "--training.max_steps", "2"]  # fmt: skip
COT = ["--method", "{name: cot}", "--validation.params", "[{}]"]


def test_grpo_goes_on_with_a_checkpoint_and_its_method(tiny, tmp_path):
    sft = recipe.run(recipe.load(tiny, ["--method.alpha", "0.05", "--training.max_steps", "1"]))
    first = ["--model.init_from", str(sft.best), *GRPO, "--output", f"{tmp_path}/grpo"]
    again = ["--method", "{name: colar}", *first]
    result = recipe.run(recipe.load(tiny, again))
    _, method = pretrained.load(result.best)
    assert method.config.alpha == 0.05
    assert result.steps == 2
    # What came along, not the recipe's section, which only names the method; not what was measured.
    shown = '## Method\n\n```json\n{\n  "name": "colar",\n  "alpha": 0.05\n}\n```'
    assert shown in (Path(result.best) / "README.md").read_text()
    info = files.read_json(Path(result.best) / "colar.json")["run"]
    assert info["recipe"]["grpo"]["num_generations"] == info["grpo"]["num_generations"] == 2
    assert (tmp_path / "grpo" / "completions.jsonl").exists()
    with pytest.raises(ValueError, match=r"method.alpha is 0.02, but .* was trained with 0.05: leave it out"):
        recipe.run(recipe.load(tiny, [*first, "--output", f"{tmp_path}/other"]))
    with pytest.raises(ValueError, match=r"method.name is cot, but .* was trained by colar"):
        recipe.run(recipe.load(tiny, [*first, *COT, "--output", f"{tmp_path}/other"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "grpo needs model.init_from"),
        (["--grpo", "3"], "recipe.yaml: grpo must be keys and values or null, got 3"),
        (
            ["--grpo.loss_type", "ppo"],
            "recipe.yaml: grpo.loss_type must be one of grpo, dr_grpo, dapo, bnpo, got ppo",
        ),
        (
            ["--grpo.num_generations", "1"],
            "recipe.yaml: grpo.num_generations must be a whole number, 2 or more, got 1",
        ),
        (["--grpo.compression_factors", "[a]"], "grpo.compression_factors must be a number or null, got a"),
        (
            ["--model.init_from", "x", "--grpo.top_p", "0.9"],
            "recipe.yaml: unknown key 'grpo.top_p': leave it out",
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
            ["--model.init_from", "x", "--method.head", "sequential", "--grpo.latent_logprob", "sum"],
            "grpo.latent_logprob must be mean for method.name colar as it is set here: its thoughts are not drawn "
            "from a density, got 'sum'",
        ),
        (
            ["--model.init_from", "x", "--grpo.latent_logprob", "sum", *COT],
            "grpo.latent_logprob must be mean for method.name cot as it is set here",
        ),
        (["--model.init_from", "x", "--grpo.num_generation", "2"], "did you mean 'grpo.num_generations'"),
    ],
)
def test_a_wrong_grpo_section_is_found_when_it_is_loaded(tiny, overrides, words):
    with pytest.raises(ValueError, match="grpo") as error:
        recipe.load(tiny, [*GRPO, *overrides])
    assert words in str(error.value)


def test_a_density_that_is_asked_of_a_checkpoint_without_one_is_refused_before_rows_are_read(
    tiny, tmp_path, monkeypatch
):
    """The head is the checkpoint's: the recipe need not name it."""
    sft = recipe.run(recipe.load(tiny, ["--method.head", "sequential", "--training.max_steps", "1"]))
    first = ["--method", "{name: colar}", "--model.init_from", str(sft.best), *GRPO]
    first += ["--output", f"{tmp_path}/grpo"]
    summed = recipe.load(tiny, [*first, "--grpo.latent_logprob", "sum"])
    with monkeypatch.context() as patched:
        for name in ("colar.recipe.wiring", "colar.planning.check"):
            module = importlib.import_module(name)
            patched.setattr(module, "load_examples", lambda data: pytest.fail("rows were read"))
        with pytest.raises(ValueError, match=r"grpo.latent_logprob must be mean for method.name colar"):
            recipe.run(summed)
        with pytest.raises(ValueError, match=r"grpo.latent_logprob must be mean for method.name colar"):
            planning.check(summed)
    assert not (tmp_path / "grpo" / "recipe.json").exists()
    assert recipe.run(recipe.load(tiny, [*first, "--grpo.latent_logprob", "mean"])).steps == 2
