"""Evaluation: the grid, one record an answer, noise by seed and question, validation by the same path."""

import itertools
from dataclasses import replace

import pytest
import torch

from colar import files
from colar.checks import NonFiniteError
from colar.data.arithmetic import ArithmeticConfig, generate
from colar.data.example import Example
from colar.engine import reference
from colar.evaluation import evaluate
from colar.evaluation.evaluate import AnswerSettings, EvaluatedModel, GridPoint, Question
from colar.evaluation.settings import claim_evaluation
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

LIMITS = AnswerSettings(max_latents=5, max_completion_length=3, batch_size=4)
EXAMPLES = generate(ArithmeticConfig(), "test", 6, seed=0)


@pytest.fixture(scope="module")
def model():
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    return EvaluatedModel("toy", lm, method, train_seed=3)


def params(model, *factors):
    return [registry.make_params(model.method, {"compression_factor": c}) for c in factors]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_latents": -1}, "max_latents must be 0 or more, got -1"),
        ({"max_completion_length": 0}, "max_completion_length must be 1 or more, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, got 0"),
    ],
)
def test_settings_are_checked_where_they_are_made(values, message):
    with pytest.raises(ValueError, match=message):
        AnswerSettings(**values)


def test_greedy_is_asked_once_and_sampled_with_every_seed(model):
    grid = evaluate.make_grid(model, ["a", "b"], params(model, 1, 2), ["greedy", "sampled"], [4, 5, 6])
    seeds = {
        decoding: [point.seed for point in grid if point.decoding == decoding]
        for decoding in ("greedy", "sampled")
    }
    # Of no seed: asked again with --seeds 5, they would pass for a second sample.
    assert seeds["greedy"] == [0] * 4
    assert sorted(seeds["sampled"]) == sorted([4, 5, 6] * 4)


def test_what_is_asked_twice_is_answered_once(model):
    """A second record of one cell and question would make the records unreadable."""
    grid = evaluate.make_grid(model, ["a"], params(model, 2, 2.0), ["sampled", "sampled"], [4, 4, 5])
    assert [point.seed for point in grid] == [4, 5]


def test_a_record_says_what_the_reference_says(model, tmp_path):
    (param,) = params(model, 2)
    grid = evaluate.make_grid(model, ["arithmetic"], [param], ["sampled"], [9])
    path = tmp_path / "records.jsonl"
    assert evaluate.evaluate(grid, {"arithmetic": EXAMPLES}, path, LIMITS) == len(EXAMPLES)
    records = {record["id"]: record for record in files.resume_jsonl(path)}
    for example in EXAMPLES:
        request = evaluate.make_request(grid[0], example, LIMITS)
        completion = reference.complete(model.lm, model.method, request)
        record = records[example.id]
        assert record["completion"] == completion.text
        assert record["length"] == completion.length
        assert record["forward_passes"] == completion.forward_passes
        assert record["truncated"] == completion.truncated
        assert record["gold_length"] == sum(map(len, model.lm.template.steps(example.steps)))
        assert (record["model"], record["train_seed"], record["seed"]) == ("toy", 3, 9)
        assert record["params"] == {"compression_factor": 2}
    assert evaluate.evaluate(grid, {"arithmetic": EXAMPLES}, path, LIMITS) == 0


def test_one_question_in_two_data_sets_is_answered_in_both(model, tmp_path):
    """The requests are equal, and so are the answers; each data set has its own records."""
    grid = evaluate.make_grid(model, ["a", "b"], params(model, 2), ["sampled"], [4])
    path = tmp_path / "records.jsonl"
    assert evaluate.evaluate(grid, {"a": EXAMPLES, "b": EXAMPLES[:3]}, path, LIMITS) == len(EXAMPLES) + 3
    completions = {(r["dataset"], r["id"]): r["completion"] for r in files.resume_jsonl(path)}
    assert len(completions) == len(EXAMPLES) + 3
    for example in EXAMPLES[:3]:
        assert completions["a", example.id] == completions["b", example.id]


def test_the_draws_of_a_question_follow_each_other(model, tmp_path):
    """The engine then prefills a question once for several draws; also where some of them have been answered."""
    asked = []

    def make(model, questions, settings):
        asked.extend(questions)
        return evaluate.make_records(model, questions, settings)

    path = tmp_path / "records.jsonl"
    grid = evaluate.make_grid(model, ["sums"], params(model, 1, 2), ["greedy", "sampled"], [0, 1, 2])
    (first,) = [point for point in grid if point.seed == 1 and point.params.compression_factor == 2]
    assert evaluate.evaluate([first], {"sums": EXAMPLES[:4]}, path, LIMITS) == 4
    assert evaluate.evaluate(grid, {"sums": EXAMPLES}, path, LIMITS, make) == len(grid) * len(EXAMPLES) - 4
    runs = [list(draws) for _, draws in itertools.groupby(asked, lambda q: (q.point.cell, q.example.id))]
    # Two speeds, greedy and sampled.
    assert len(runs) == 2 * 2 * len(EXAMPLES)
    assert sorted(map(len, runs)) == [1] * 2 * len(EXAMPLES) + [2] * 4 + [3] * (2 * len(EXAMPLES) - 4)
    assert len(set(asked)) == len(asked) == len(files.resume_jsonl(path)) - 4


def test_noise_belongs_to_seed_and_question_not_to_system(model):
    (param,) = params(model, 2)
    one = GridPoint(model, "arithmetic", param, "sampled", 1)
    other = GridPoint(replace(model, name="another"), "arithmetic", param, "sampled", 1)
    seeds = [evaluate.make_request(one, example, LIMITS).seed for example in EXAMPLES]
    assert seeds == [evaluate.make_request(other, example, LIMITS).seed for example in EXAMPLES]
    assert len(set(seeds)) == len(EXAMPLES)
    assert evaluate.make_request(replace(one, seed=2), EXAMPLES[0], LIMITS).seed != seeds[0]


def test_grades_come_from_the_one_judge(model):
    (param,) = params(model, 2)
    point = GridPoint(model, "arithmetic", param, "greedy", 0)
    example = EXAMPLES[0]
    completion = reference.complete(model.lm, model.method, evaluate.make_request(point, example, LIMITS))
    right = evaluate.grade(replace(completion, text=f"{int(example.answer)}.0"), example)
    assert (right["correct"], right["parsed"] is not None) == (True, True)
    garbage = evaluate.grade(replace(completion, text="no number here"), example)
    assert (garbage["correct"], garbage["parsed"]) == (False, None)


def test_validation_is_evaluation(model):
    both = params(model, 1, 5)
    metrics = evaluate.validate(model.lm, model.method, EXAMPLES, both, "greedy", LIMITS)
    for param in both:
        point = GridPoint(model, "x", param, "greedy", 0)
        questions = [Question(point, e, evaluate.make_request(point, e, LIMITS)) for e in EXAMPLES]
        records = list(evaluate.make_records(model, questions, replace(LIMITS, batch_size=4)))
        name = f"/compression_factor={param.compression_factor}"
        assert metrics["length" + name] == pytest.approx(sum(r["length"] for r in records) / len(records))
        assert metrics["accuracy" + name] == pytest.approx(sum(r["correct"] for r in records) / len(records))
    lengths = [metrics[f"length/compression_factor={c}"] for c in (1, 5)]
    assert metrics["length"] == pytest.approx(sum(lengths) / 2)


def test_numbers_that_are_not_finite_are_no_wrong_answer(tmp_path):
    """A record would count as done: the same command could never ask the question again."""
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    with torch.no_grad():
        lm.extra["latent_head"].log_std.bias[0] = torch.nan
    broken = EvaluatedModel("toy", lm, method)
    grid = evaluate.make_grid(broken, ["sums"], params(broken, 2), ["sampled"], [0])
    path = tmp_path / "records.jsonl"
    with pytest.raises(
        NonFiniteError, match=r"toy on sums, float32: .* for arithmetic/test/\d are not finite"
    ):
        evaluate.evaluate(grid, {"sums": EXAMPLES}, path, LIMITS)
    assert files.resume_jsonl(path) == []
    with pytest.raises(NonFiniteError):
        evaluate.validate(lm, method, EXAMPLES, params(broken, 2), "sampled", LIMITS)


def test_a_question_too_long_stops_before_the_first_answer(model, tmp_path):
    long = Example("long", "word " * 3000, (), "1")
    grid = evaluate.make_grid(model, ["x"], params(model, 1), ["greedy"], [0])
    path = tmp_path / "records.jsonl"
    with pytest.raises(ValueError, match="request long: the question has"):
        evaluate.evaluate(grid, {"x": [EXAMPLES[0], long]}, path, LIMITS)
    assert not path.exists()


def test_validation_shows_the_default_of_several_values_by_itself():
    """TokenSkip at its default ratio and at another one: the mean of both must not be taken for the first's."""
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("tokenskip")
    pretrained.attach(lm, method, 0)
    both = [registry.make_params(method, {}), registry.make_params(method, {"ratio": 0.75})]
    metrics = evaluate.validate(lm, method, EXAMPLES, both, "greedy", LIMITS)
    assert set(metrics) == {
        f"{kind}{of}" for kind in ("accuracy", "length") for of in ("", "/default", "/ratio=0.75")
    }
    assert metrics["length"] == pytest.approx((metrics["length/default"] + metrics["length/ratio=0.75"]) / 2)
    alone = evaluate.validate(lm, method, EXAMPLES, both[:1], "greedy", LIMITS)
    assert alone == {"accuracy": metrics["accuracy/default"], "length": metrics["length/default"]}
    grid = evaluate.make_grid(EvaluatedModel("toy", lm, method, "DL"), ["x"], both, ["greedy"], [0])
    systems = [point.cell.system for point in grid]
    assert [(system.label, dict(system.params)) for system in systems] == [
        ("DL", {}),
        ("DL", {"ratio": 0.75}),
    ]


def test_a_folder_belongs_to_one_evaluation(tmp_path):
    """Data sets, questions and checkpoints may be added; whatever else changes is named, with both values."""
    out = tmp_path / "out"
    method = registry.build("cot")
    for seed, name in enumerate("ab"):
        lm = LatentLM.from_backbone(backbones.load("tiny", seed=seed))
        pretrained.save_pretrained(lm, method, tmp_path / name)
    settings = {"split": "test", "data_seed": 0}
    a, b = {"a cot": tmp_path / "a"}, {"b cot": tmp_path / "b"}
    claim_evaluation(
        out, {**settings, "split": "train"}, {"d": EXAMPLES[:2]}, b
    )  # leaves no record: the folder stays free
    claim_evaluation(out, settings, {"d": EXAMPLES[:2]}, a)
    (out / "records.jsonl").write_text("{}\n")
    claim_evaluation(out, settings, {"d": EXAMPLES[:4], "e": EXAMPLES[:1]}, b)
    made = files.read_json(out / "evaluation.json")
    assert list(made) == ["split", "data_seed", "questions", "models"]
    assert {name: n for name, (n, *_) in made["questions"].items()} == {"d": 4, "e": 1}
    assert set(made["models"]) == {"a cot", "b cot"}

    for change, words in (
        (
            {"split": "train"},
            r"holds another run \(split was 'test', now 'train'\); give this evaluation its own",
        ),
        ({"dtype": "bfloat16"}, r"\(dtype was None, now 'bfloat16'\)"),
    ):
        with pytest.raises(ValueError, match=words):
            claim_evaluation(out, {**settings, **change}, {"d": EXAMPLES}, a)
    with pytest.raises(
        ValueError, match=r"\(checkpoint a cot was '\w{16}', now '\w{16}'\); give this checkpoint"
    ):
        claim_evaluation(out, settings, {"d": EXAMPLES}, {"a cot": tmp_path / "b"})
    # A verdict depends on the type of the answer, and a record has the length of the reference chain.
    for edit in ({"answer": "0.5"}, {"question": "?"}, {"steps": ("1",)}, {"answer_type": "text"}):
        edited = [replace(example, **edit) for example in EXAMPLES]
        with pytest.raises(ValueError, match=r"\(the first 4 questions of d were others\)"):
            claim_evaluation(out, settings, {"d": edited}, a)
    with pytest.raises(
        ValueError, match="holds 4 questions of d, and this command has 3: .* raise --limit, or give"
    ):
        claim_evaluation(out, settings, {"d": EXAMPLES[:3]}, a)
    # The same weights, asked with another prompt.
    for name in ("template.json", "tokenizer.json"):
        text = files.read_text(tmp_path / "a" / name)
        (tmp_path / "a" / name).write_text(text + "\n")
        with pytest.raises(ValueError, match="give this checkpoint another name"):
            claim_evaluation(out, settings, {"d": EXAMPLES}, a)
        (tmp_path / "a" / name).write_text(text)
    with pytest.raises(ValueError, match="no checkpoint at .*: there is no such folder"):
        claim_evaluation(out, settings, {"d": EXAMPLES}, {"c cot": tmp_path / "c"})
    (out / "records-cot.jsonl").touch()
    with pytest.raises(ValueError, match="out holds the speeds of colar train auto; give this evaluation"):
        claim_evaluation(out, settings, {"d": EXAMPLES}, a)
    (out / "records-cot.jsonl").unlink()
    assert files.read_json(out / "evaluation.json") == made
    (out / "evaluation.json").unlink()
    with pytest.raises(ValueError, match=r"out holds records.jsonl without the evaluation.json"):
        claim_evaluation(out, settings, {"d": EXAMPLES}, a)
