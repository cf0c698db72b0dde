"""`colar inspect`: one page and one JSON from checkpoints of several heads, and the JSON's tables counted anew."""

import json

import pytest
from inspect_data import data_of

from colar.cli import main
from colar.data import sources
from colar.engine.request import Decoding
from colar.evaluation.evaluate import answer_all
from colar.look import inspect
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

HEADS = ("gaussian", "sequential")
SHORT = ["--limit", "22", "--max_latents", "6", "--max_completion_length", "3"]


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    """The JSON of two untrained checkpoints at c = 2, and the page beside it."""
    folder = tmp_path_factory.mktemp("inspect")
    checkpoints = []
    for head in HEADS:
        lm = LatentLM.from_backbone(backbones.load("tiny", seed=1))
        method = registry.build("sequential" if head == "sequential" else "colar")
        pretrained.attach(lm, method, 0)
        method.prepare(lm, sources.load_examples("arithmetic", "train", limit=4))
        # In a run's folder, which stands for its checkpoint.
        pretrained.save(lm, method, folder / head / "best", {"seed": 7, "label": ""}, "# card\n")
        checkpoints.append(str(folder / head))
    output = folder / "inspect.html"
    assert main(["inspect", *checkpoints, "--compression_factor", "2", "--output", str(output), *SHORT]) == 0
    numbers = json.loads(output.with_suffix(".json").read_text())
    return {**numbers, "page": output.read_text(encoding="utf-8"), "checkpoint": checkpoints[0]}


def test_every_system_is_there(inspected):
    assert [(s["model"], s["params"]) for s in inspected["systems"]] == [
        ("gaussian", {"compression_factor": 2}), ("sequential", {"compression_factor": 2}),
    ]  # fmt: skip
    assert inspected["asked"] == {"data": "arithmetic", "split": "test", "limit": 22}
    assert "torch" in json.dumps(inspected["provenance"])
    for system in inspected["systems"]:
        assert system["n"] == 22


@pytest.mark.parametrize(("limits", "warm"), [((30, 12), (8, 8)), ((6, 3), (6, 3))])
def test_the_warm_up_thinks_little(limits, warm, monkeypatch):
    lm = LatentLM.from_backbone(backbones.load("tiny", seed=1))
    method = registry.build("cot")
    pretrained.attach(lm, method, 0)
    examples = sources.load_examples("arithmetic", "test", limit=2)
    answered = []

    def answer(lm, method, requests, **options):
        answered.append(
            [(each.decoding.max_latents, each.decoding.max_completion_length) for each in requests]
        )
        return answer_all(lm, method, requests, **options)

    monkeypatch.setattr(inspect, "answer_all", answer)
    decoding = Decoding(max_latents=limits[0], max_completion_length=limits[1])
    inspect.inspect_system("m", lm, method, examples, method.Params(), decoding, controls=False)
    assert answered == [[warm], [limits] * 2]


def test_a_page_that_fails_leaves_the_numbers(inspected, tmp_path, capsys):
    (tmp_path / "a.html").mkdir()
    output = ["--output", str(tmp_path / "a.html")]
    assert main(["inspect", inspected["checkpoint"], *output, *SHORT, "--limit", "2"]) == 2
    said = capsys.readouterr()
    assert "Accuracy and cost" in said.out
    assert "inspect: error: [Errno 21] Is a directory" in said.err
    assert json.loads((tmp_path / "a.json").read_text())["systems"][0]["model"] == HEADS[0]


def test_data_without_reasoning_are_the_reason_why_nothing_is_compared(inspected, tmp_path, capsys):
    path = tmp_path / "bare.jsonl"
    path.write_text('{"question": "1 + 1?", "steps": [], "answer": "2"}\n')
    words = ["inspect", inspected["checkpoint"], "--data", str(path), *SHORT]
    assert main([*words, "--output", str(tmp_path / "a.json")]) == 0
    said = capsys.readouterr().err
    assert f"{path} has no reasoning steps" in said
    assert "its thoughts stand for" not in said


def test_costs_can_be_counted_from_the_answers(inspected):
    for system in inspected["systems"]:
        own = system["cost"]["outcomes"]["own"]
        answers = system["answers"]
        assert len(answers) == own["n"] == 22
        assert own["right"] == [answer["right"] for answer in answers]
        for name in ("length", "forward_passes", "seconds"):
            mean = sum(answer[name] for answer in answers) / 22
            assert own[name] == pytest.approx(mean, rel=1e-3)
        low, high = own["accuracy"]["interval"]
        assert low <= own["accuracy"]["mean"] <= high
        assert set(system["cost"]["outcomes"]) == {"own", "shuffled", "zeroed", "none"}


def test_the_page_has_every_chain(inspected):
    data = data_of(inspected["page"])
    assert data["systems"] == ["gaussian, c = 2", "sequential, c = 2"]
    assert len(data["questions"]) == 22
    for system, chains in zip(inspected["systems"], data["answers"], strict=True):
        for answer, chain in zip(system["answers"], chains, strict=True):
            assert (chain["answer"], chain["cause"], len(chain["thoughts"])) == (
                answer["answer"], answer["cause"], answer["length"],
            )  # fmt: skip
    for section in ("cost", "causes"):
        assert f'<section id="{section}">' in inspected["page"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--output", "inspected.txt"],
            "--output must be a file that ends in .html or a file that ends in .json, got 'inspected.txt'",
        ),
    ],
)
def test_mistakes_are_said(arguments, words, capsys):
    assert main(["inspect", "nowhere", *arguments]) == 2
    assert words in capsys.readouterr().err
