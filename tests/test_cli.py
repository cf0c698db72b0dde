"""The command line as a user meets it: what it prints where, its exit codes, and its words for mistakes."""

import argparse
import dataclasses
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from colar import files, recipes
from colar.cli import _failed, build_parser, main, options
from colar.cli.checkpoints import (
    name_and_path,
    name_sources,
    param_combinations,
    say_trained_on,
    unchecked_backbone,
)
from colar.cli.options import source_options
from colar.data.example import Example
from colar.evaluation import answer_files
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Untrained `cot` and `colar` checkpoints: what they answer is noise, but they answer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("cot", 1), ("cot", 2), ("colar", 1), ("coconut", 1)):
        lm = LatentLM.from_backbone(backbones.load("tiny", seed=seed))
        method = registry.build(name)
        pretrained.attach(lm, method, 0)
        method.prepare(lm, [])
        path = folder / (name if seed == 1 else f"{name}{seed}")
        pretrained.save(lm, method, path, {"seed": 7, "label": ""}, "# card\n")
    return folder


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [
        {"id": "a", "question": "Ann has 2 pens. She buys 3. How many?", "answer": "5"},
        {"question": "2 + 2?"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SHORT = ["--max_latents", "4", "--max_completion_length", "3"]

HINT = "(words behind an option of several values are its values: put others before it, or after --)"

MISTAKES = [
    # arguments, exit code, words on stderr
    (["train", "missing.yaml"], 2, "no recipe at missing.yaml"),
    (["train", "tiny/collar"], 2, "did you mean 'tiny/colar'? (`colar recipes list` shows them all"),
    (["train", "{recipe}", "--column", "a=b"], 2, "--column a=b: unknown key 'column'"),
    (["train", "{recipe}", "--epochs", "3"], 2, "did you mean 'training.num_train_epochs'?"),
    (["train", "autto", "--model", "tiny"], 2, "did you mean 'auto'?"),
    (["recipes", "copy", "tiny/collar", "{out}"], 2, "no shipped recipe is called tiny/collar, did you mean 'tiny/colar'?"),
    (["train", "{recipe}", "--training.learning_rat", "1"], 2, "'training.learning_rat', did you mean 'training.learning_rate'?"),
    (["train", "{recipe}", "--method.alhpa", "1"], 2, "unknown key 'method.alhpa', did you mean 'method.alpha'?"),
    (["train", "{recipe}", "--method.name", "collar"], 2, "unknown method.name 'collar', did you mean 'colar'?"),
    (["train", "{recipe}", "--method.compression_factors", "[0.5]"], 2, "each of method.compression_factors must be a number, 1 or more, got 0.5"),
    (["train", "{recipe}", "--method.compression_factors", "5..1"], 2, "or a range of whole numbers such as \"1..5\", got '5..1'"),
    (["train", "{recipe}", "--data.source", "gsm8kaug"], 2, "did you mean 'gsm8k-aug'?"),
    (["train", "{recipe}", "--model.backbone", "no/such/folder"], 2, "cannot load backbone 'no/such/folder'"),
    (["train", "{recipe}", "--output", "/proc/none/x"], 2, "cannot write to /proc/none/x"),
    (["train", "{recipe}", "--validation.decoding", "warm"], 2, "must be one of greedy, sampled, got 'warm'"),
    (["train", "{recipe}", "--validation.params", "[{{ratio: 2}}]"], 2, "method colar has no ratio; it takes compression_factor"),
    (["generate", "{colar}", "q", "--compression_factor", "0.5"], 2, "compression_factor must be a number, 1 or more, got 0.5"),
    (["generate", "{colar}", "q", "--compression_factor", "2.5"], 2, "2.5 is not whole and was not trained; trained: 1, 2, 3, 4, 5"),
    (["generate", "{colar}", "q", "--compression_factor", "nan"], 2, "compression_factor must be a number, got nan"),
    (["generate", "{cot}", "q", "--compression_factor", "2"], 2, "method cot has no compression_factor; it takes none"),
    (["generate", "{colar}", "word " * 2000], 2, "the model's context is"),
    (["generate", "{colar}"], 2, "give a question, or --input"),
    (["generate", "{colar}", ""], 2, "error: the question is empty"),
    (["generate", "{colar}", " \n"], 2, "error: the question is empty"),
    (["generate", "{colar}", "--input", "{out}/none.jsonl"], 2, "error: --input must be a file of questions, and there is none at {out}/none.jsonl"),
    (["generate", "{colar}", "--input", "{out}"], 2, "error: --input must be a file of questions, and there is none at {out}"),
    (["generate", "{colar}", "q", "--system", "Be brief."], 2, "has no place for a system message (template.format: plain)"),
    (["generate", "{colar}", "--input", "{halves}"], 2, "halves.jsonl:2: answer holds half of a surrogate pair, '\\ud83d'"),
    (["generate", "{colar}", "5 \udcff 3?"], 2, "the command line's '5 \\udcff 3?' holds half of a surrogate pair"),
    (["evaluate", "{cot}", "--label", "\udcff", "--limit", "2", "--output", "{out}"], 2, "holds half of a surrogate pair"),
    (["generate", "{colar}", "q", "--temperature", "-1"], 2, "temperature must be 0, or from 1e-06 to 100, got -1"),
    (["generate", "{colar}", "q", "--device", "gpu"], 2, "device gpu cannot be used"),
    (["evaluate", "{cot}", "--data", "{empty}", "{out}/empty.jsonl", "--output", "{out}"], 2, "two data sets of --data have one name"),
    (["generate", "no/such/folder/here", "q"], 2, "there is no such folder"),
    (["evaluate", "{cot}", "--limit", "2", "--output", "/proc/none/x"], 2, "cannot write to /proc/none/x"),
    (["evaluate", "{cot}", "--limit", "2", "--compression_factor", "2", "--output", "{out}"], 2, "method cot has no compression_factor; it takes none"),
    (["evaluate", "{cot}", "{cot}", "--limit", "2", "--output", "{out}"], 2, "two checkpoints have one name"),
    (["evaluate", "{cot}", "--columns", "question=ask,answer=said", "--output", "{out}"], 2, "columns are named for a file of your own, and arithmetic is"),
    (["evaluate", "{cot}", "--columns", "question", "--output", "{out}"], 2, "--columns takes KEY=COLUMN,KEY=COLUMN, got 'question'"),
    (["evaluate", "{cot}", "--data", "arithmetc", "--output", "{out}"], 2, "did you mean 'arithmetic'?"),
    (["evaluate", "{cot}", "--data", "arithmetic", "arithmetic=arithmetic", "--output", "{out}"], 2, "write NAME=... for one"),
    (["evaluate", "{cot}", "--data", "average=arithmetic", "--output", "{out}"], 2, "no data set of --data may be called 'average'"),
    (["evaluate", "{out}/lr=1e-4/best", "--output", "{out}"], 2, "no checkpoint at {out}/lr=1e-4/best: there is no such folder"),
    (["evaluate", "a={out}/lr=1e-4/best", "--output", "{out}"], 2, "no checkpoint at {out}/lr=1e-4/best: there is no such folder"),
    (["evaluate", "{cot}", "--data", "{out}/n=2.jsonl", "--output", "{out}"], 2, "{out}/n=2.jsonl"),
    (["evaluate", "{cot}", "--limit", "2", "--options", "hard.max_number=9", "--output", "{out}"], 2, "no source here is called hard (there is arithmetic)"),
    (["evaluate", "{cot}", "--limit", "2", "--control", "zeroed", "--output", "{out}"], 2, "none of the methods (cot) thinks in any"),
    (["evaluate", "no/such/folder/here", "--limit", "2", "--control", "zeroed", "--output", "{out}"], 2, "there is no such folder"),
    (["evaluate", "{cot}", "--limit", "2", "--options", "max_number", "--output", "{out}"], 2, "--options takes KEY=VALUE"),
    (["inspect", "{cot}", "--limit", "2", "--compression_factor", "2", "--output", "{out}/a.html"], 2, "method cot has no compression_factor; it takes none"),
    (["inspect", "{colar}", "{cot}", "--limit", "2", "--ratio", "0.5", "--output", "{out}/a.html"], 2, "method colar has no ratio; it takes compression_factor; method cot has no ratio; it takes none"),
    (["inspect", "{cot}", "no/such/folder/here", "--limit", "2", "--output", "{out}/a.html"], 2, "there is no such folder"),
    (["inspect", "{cot}", "{cot}", "--limit", "2", "--output", "{out}/a.html"], 2, "two checkpoints have one name (cot)"),
    (["generate", "{cot}", "q", "--backbone", "no/such/folder"], 2, "--backbone is for adapters, and {cot} holds all weights"),
    (["inspect", "{cot}", "--limit", "2", "--backbone", "tiny", "--output", "{out}/a.html"], 2, "--backbone is for adapters"),
    (["evaluate", "{cot}", "--limit", "2", "--backbone", "tiny", "--output", "{out}"], 2, "--backbone is for adapters"),
    (["serve", "{cot}", "--port", "0", "--backbone", "tiny"], 2, "--backbone is for adapters"),
    (["evaluate", "{cot}", "--limit", "2", "--output", ""], 2, "the output folder has no name"),
    (["train", "{recipe}", "--output", ""], 2, "the output folder has no name"),
    (["report", "{out}", "--output", "{out}"], 2, "holds no records.jsonl"),
    (["report", "{out}/none", "--output", "{out}"], 2, "error: no records at {out}/none: there is no such file or folder"),
    (["train", "{recipe}", "--model.init_from", "{out}/best"], 2, "error: model.init_from: no checkpoint at {out}/best"),
    (["train", "{recipe}", "--model.backbone", "tiny", "--model.init_from", "x"], 2, "--model.backbone has no effect beside model.init_from (x)"),
    (["data", "show", "{empty}"], 2, "empty.jsonl"),
    (["evaluate", "{cot}", "--ray_cpus", "2", "--output", "{out}"], 2, "--ray_actors and --ray_cpus go with --ray"),
    (["generate", "{cot}", "q", "--ray_actors", "2"], 2, "--ray_actors and --ray_cpus go with --ray"),
    (["export", "{cot}", "{out}/x", "--backbone", "tiny"], 2, "--backbone goes with --merge"),
    (["evaluate", "no/such/folder/here", "--data", "no.jsonl", "--output", "{out}"], 2, "there is no such folder"),
    (["inspect", "no/such/folder/here", "--data", "no.jsonl", "--output", "{out}/a.html"], 2, "there is no such folder"),
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["MODEL", "7?", "--device", "cpu"],
        ["MODEL", "--device", "cpu", "7?"],
        ["--device", "cpu", "MODEL", "7?"],
    ],
)
def test_the_question_may_stand_behind_options(words):
    args = build_parser("generate").parse_args(["generate", *words])
    assert (args.checkpoint, args.question, args.device) == ("MODEL", "7?", "cpu")


@pytest.mark.parametrize(
    "words", [["MODEL", "--device", "cpu", "7?", "8?"], ["MODEL", "7?", "--device", "cpu", "8?"]]
)
def test_a_second_question_is_unknown(words, capsys):
    with pytest.raises(SystemExit):
        build_parser("generate").parse_args(["generate", *words])
    assert "8?" in capsys.readouterr().err


def test_a_value_that_is_given_twice_counts_once():
    given = dict.fromkeys(registry.all_param_names()) | {"compression_factor": [2, 2, 1, 2.0]}
    [params] = param_combinations({"a": registry.build("colar")}, argparse.Namespace(**given)).values()
    assert [each.compression_factor for each in params] == [2, 1]


@pytest.mark.parametrize("key", ["fingerprint", "tokenizer"])
def test_a_backbone_that_is_not_checked_is_a_setting_of_the_run(key, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints / "colar", tmp_path / "one")
    args = argparse.Namespace(backbone="./tiny")
    assert unchecked_backbone([folder], args) == {}
    info = files.read_json(folder / "colar.json")
    files.write_json(folder / "colar.json", {**info, key: type(info[key])()})
    assert unchecked_backbone([checkpoints / "cot", folder], args) == {"backbone": "./tiny"}
    assert unchecked_backbone([folder], argparse.Namespace(backbone=None)) == {}


@pytest.mark.parametrize(("args", "code", "words"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistakes_are_named(args, code, words, checkpoints, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    good = {"question": "q", "steps": [], "answer": "1"}
    (tmp_path / "no_answer.jsonl").write_text(
        json.dumps(good) + "\n" + json.dumps({"question": "q", "steps": []}) + "\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: colar}}\ndata: {{train_size: 4, validation_size: 2}}\n"
    )
    (tmp_path / "out").mkdir()
    files.write_json(tmp_path / "odd" / "config.json", {"model_type": "odd"})
    names = {
        "recipe": recipe, "out": tmp_path / "out", "colar": checkpoints / "colar", "cot": checkpoints / "cot",
        "empty": tmp_path / "empty.jsonl", "no_answer": tmp_path / "no_answer.jsonl",
        "odd": tmp_path / "odd", "halves": tmp_path / "halves.jsonl",
    }  # fmt: skip
    names["halves"].write_text('{"question": "q"}\n{"question": "q", "answer": "\\ud83d"}\n')
    assert main([arg.format(**names) for arg in args]) == code
    captured = capsys.readouterr()
    assert words.format(**names) in captured.err
    # What a library says in several lines is one of ours.
    assert captured.err.strip().splitlines()[-1].startswith(f"colar {args[0]}: error: ")
    assert captured.out == ""


def test_a_path_may_have_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("runs/lr=1e-4/best", str(tmp_path / "lr=1e-4" / "best"), "./lr=1e-4/best"):
        assert name_and_path(text) == ("lr=1e-4", text)
        assert name_and_path(f"mine={text}") == ("mine", text)
    assert name_and_path("c=2=lr=1") == ("c", "2=lr=1")
    assert name_sources(["runs/n=2.jsonl", "a=runs/n=2.jsonl"]) == {
        "n=2": "runs/n=2.jsonl", "a": "runs/n=2.jsonl",
    }  # fmt: skip
    # Without a "/" it is a name, unless there is such a path.
    assert name_and_path("lr=1e-4/best") == ("lr", "1e-4/best")
    (tmp_path / "lr=1e-4" / "best").mkdir(parents=True)
    assert name_and_path("lr=1e-4/best") == ("lr=1e-4", "lr=1e-4/best")
    assert name_sources(["n=2.jsonl"]) == {"n": "2.jsonl"}
    (tmp_path / "n=2.jsonl").write_text("")
    assert name_sources(["n=2.jsonl"]) == {"n=2": "n=2.jsonl"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "x", "q", "--compression_factor", "two"], "colar generate: error: "),
        (["nothing"], "colar: error: "),
        (["recipes", "lits"], "usage: colar recipes"),
        (["report", "x", "--output", "x", "--titel", "x"], "did you mean '--title'?"),
        (["evaluate", "x", "--control", "mixed", "--output", "x"], "colar evaluate: error: "),
        (["export", "a", "b", "--d", "float16"], "unknown --d float16, did you mean '--dtype'?"),
        (["export", "a", "b", "c"], "usage: colar export"),
        (
            ["generate", "x", "q", "--batch_size", "0"],
            "--batch_size: must be a whole number, 1 or more, got 0",
        ),
        (
            ["generate", "x", "q", "--max_latents", "-1"],
            "--max_latents: must be a whole number, 0 or more, got -1",
        ),
        (["serve", "x", "--batch-size", "1.5"], "--batch_size: must be a whole number, 1 or more, got 1.5"),
        (["serve", "x", "--token_budget", "0"], "--token_budget: must be a whole number, 1 or more, got 0"),
        (["serve", "x", "--max_latents", "-1"], "--max_latents: must be a whole number, 0 or more, got -1"),
        (
            ["evaluate", "x", "--max_completion_length", "0"],
            "--max_completion_length: must be a whole number, 1 or more",
        ),
        (["generate", "x", "--compression_factor", "2", "How many?"], f"'How many?' {HINT}"),
        (["evaluate", "--output", "x", "--control", "zeroed", "x"], HINT),
        (["evaluate", "--output", "x", "--data", "a", "x"], HINT),
    ],
)
def test_argparse_mistakes_exit_with_2(args, words, capsys):
    with pytest.raises(SystemExit) as error:
        main(args)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


def test_without_an_option_of_several_values_there_is_no_hint(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--output", "x"])
    assert HINT not in capsys.readouterr().err


def test_words_behind_two_hyphens_are_as_they_stand(monkeypatch):
    questions = []
    monkeypatch.setattr("colar.cli.generate.run_generate", lambda args: questions.append(args.question))
    for words in (["x", "--", "--is-it-so?"], ["x", "--compression-factor", "2", "--", "--is-it-so?"]):
        assert main(["generate", *words]) == 0
    assert questions == ["--is-it-so?"] * 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_says_that_it_resumes(number, code, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("colar.cli.train.run_train", lambda args: os.kill(os.getpid(), number))
    # A shell starts what it puts into the background with SIGINT ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["train", "tiny/cot"]) == code
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert capsys.readouterr().err == "stopped; the same command resumes from here\n"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("option", ["--no_resume", "--check"])
def test_a_stopped_command_that_begins_anew_does_not_say_that_it_resumes(option, monkeypatch, capsys):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("colar.recipe.load_stages", stop)
    assert main(["train", "tiny/cot", option]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_generate_prints_the_answer_on_stdout_and_reads_latents(checkpoints, capsys):
    question = "Ann has 2 pens. She buys 3. How many?"
    assert main(["generate", str(checkpoints / "colar"), question, "--compression-factor", "2", *SHORT]) == 0
    plain = capsys.readouterr()
    assert "thoughts" in plain.err
    assert (
        main(
            [
                "generate",
                str(checkpoints / "colar"),
                question,
                "--compression_factor",
                "2",
                "--show-latents",
                *SHORT,
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.endswith(plain.out)
    assert shown.count("sigma") == 4  # an untrained model does not stop before its limit
    assert "  1  " in shown


def test_values_that_a_method_refuses_are_found_before_its_weights_are_read(checkpoints, tmp_path, capsys):
    folder = tmp_path / "colar"
    shutil.copytree(checkpoints / "colar", folder)
    for weights in folder.glob("*.safetensors"):
        weights.write_text("none")
    assert main(["generate", str(folder), "q", "--compression_factor", "2.5", *SHORT]) == 2
    assert "compression_factor 2.5 is not whole and was not trained" in capsys.readouterr().err
    assert main(["generate", str(folder), "q", "--ratio", "0.5", *SHORT]) == 2
    assert "method colar has no ratio" in capsys.readouterr().err


def test_an_untrained_factor_warns_and_answers(checkpoints, capsys):
    assert main(["generate", str(checkpoints / "colar"), "q", "--compression_factor", "9", *SHORT]) == 0
    assert "compression_factor 9 was not trained (trained: 1, 2, 3, 4, 5)" in capsys.readouterr().err


def test_generate_in_batches_resumes(checkpoints, questions, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    args = ["generate", str(checkpoints / "colar"), "--input", str(questions), "--output", str(out)]
    args += ["--compression_factor", "1", "2", *SHORT]
    assert main(args) == 0
    whole = {
        (row["id"], row["params"]["compression_factor"]): row["answer"] for _, row in files.read_jsonl(out)
    }
    assert set(whole) == {("a", 1), ("a", 2), ("2", 1), ("2", 2)}
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:10])  # killed while writing the second line
    assert main(args) == 0
    assert "3 new answers, 1 were there" in capsys.readouterr().err
    again = {
        (row["id"], row["params"]["compression_factor"]): row["answer"] for _, row in files.read_jsonl(out)
    }
    assert again == whole


def test_generate_keeps_the_expected_answer_beside_its_own(checkpoints, tmp_path):
    questions, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    rows = [{"question": "Ann has 2 pens. How many?", "answer": "2"}, {"question": "How many?"}]
    files.write_jsonl(questions, rows)
    assert (
        main(["generate", str(checkpoints / "cot"), "--input", str(questions), "--output", str(out), *SHORT])
        == 0
    )
    expected = {row["question"]: row.get("expected") for _, row in files.read_jsonl(out)}
    assert expected == {"Ann has 2 pens. How many?": "2", "How many?": None}


def test_evaluate_takes_a_file_whose_columns_are_named(checkpoints, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("ask,said,hint\nAnn has 2 pens. How many?,2,<<1+1=2>>\nTom has 5. How many?,5,\n")
    words = ["--data", str(path), "--columns", "question=ask,answer=said", "--output", str(tmp_path / "out")]
    assert main(["evaluate", str(checkpoints / "cot"), *words, *SHORT]) == 0
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert [(row["dataset"], row["n"]) for row in rows if row["dataset"] != "average"] == [("mine", 2)]


def test_a_question_in_other_turns_is_another_one(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    trained = Example("1", "And in total?", (), "5", "number", context=(("user", "2 and 3"),))
    files.write_jsonl(run / "data" / "train.jsonl", [trained.as_row()])
    same = dataclasses.replace(trained, id="2")
    others = [dataclasses.replace(trained, context=turns) for turns in ((), (("user", "2 and 4"),))]
    say_trained_on("mine", [same, *others], [str(run)])
    assert "was trained on 1 of 3 questions of mine" in capsys.readouterr().err


def test_generate_answers_a_question_that_has_changed(checkpoints, tmp_path, capsys):
    """An answer belongs to its question, not to a number or an id that another question may have by now."""
    questions, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    args = ["generate", str(checkpoints / "cot"), "--input", str(questions), "--output", str(out), *SHORT]
    first, second = {"question": "Ann has 2 pens. How many?"}, {"question": "Tom has 5 toys. How many?"}
    named = {"id": "1", "question": "Ann has 2 pens and 1 cup. How many?"}
    for row, said in (
        (first, "1 new answers, 0 were there)"),
        (second, "1 new answers, 0 were there, beside 1 to other questions or values)"),
        (named, "1 new answers, 0 were there, beside 2 to other questions or values)"),
        # The first question again: its answer is still there.
        (first, "0 new answers, 1 were there, beside 2 to other questions or values)"),
    ):
        questions.write_text(json.dumps(row) + "\n")
        assert main(args) == 0
        assert said in capsys.readouterr().err
    rows = [row for _, row in files.read_jsonl(out)]
    assert [row["question"] for row in rows] == [row["question"] for row in (first, second, named)]
    assert len({row["key"] for row in rows}) == 3


def test_generate_does_not_take_other_answers_for_its_own(checkpoints, questions, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    args = ["--input", str(questions), "--output", str(out), *SHORT]
    assert main(["generate", str(checkpoints / "cot"), *args]) == 0
    kept = out.read_text()
    for other in (
        ["generate", str(checkpoints / "colar"), *args],
        ["generate", str(checkpoints / "cot"), *args, "--seed", "1"],
        # The rows that are there have no thoughts.
        ["generate", str(checkpoints / "cot"), *args, "--show_latents"],
    ):
        capsys.readouterr()
        assert main(other) == 2
        assert "give another --output" in capsys.readouterr().err
    # Other weights under the same name.
    retrained = tmp_path / "retrained"
    shutil.copytree(checkpoints / "cot", retrained)
    elsewhere = tmp_path / "elsewhere.jsonl"
    words = ["generate", str(retrained), "--input", str(questions), "--output", str(elsewhere), *SHORT]
    assert main(words) == 0
    weights = next(retrained.glob("*.safetensors"))
    state = load_file(weights)
    save_file({name: value + 1 for name, value in state.items()}, weights, {"format": "pt"})
    capsys.readouterr()
    assert main(words) == 2
    assert "holds another run (weights_digest was" in capsys.readouterr().err
    # By the same weights, however their path is spelt.
    assert main(["generate", os.path.relpath(checkpoints / "cot"), *args]) == 0
    assert out.read_text() == kept
    out.write_text('{"answer": "7"}\n')
    assert main(["generate", str(checkpoints / "cot"), *args]) == 2
    assert (
        "answers.jsonl:1 is no answer of colar generate: it lacks id, key, asked" in capsys.readouterr().err
    )


def test_generate_leaves_a_file_alone_that_holds_no_answers(checkpoints, tmp_path, capsys):
    """Without a newline its last line looks torn: it must not be cut off."""
    rows = '{"question": "q"}\n{"question": "r"}'
    questions, other = tmp_path / "questions.jsonl", tmp_path / "other.jsonl"
    for path in (questions, other):
        path.write_text(rows)
    args = ["generate", str(checkpoints / "cot"), *SHORT, "--input", str(questions), "--output"]
    assert main([*args, str(questions)]) == 2
    assert "--output must be another file than --input" in capsys.readouterr().err
    assert main([*args, str(other)]) == 2
    assert "other.jsonl:1 is no answer of colar generate" in capsys.readouterr().err
    assert questions.read_text() == other.read_text() == rows
    for text in ("a note", '{"question": "q', '{"id": 7, "question": "q'):
        other.write_text(text)
        assert main([*args, str(other)]) == 2
        assert "other.jsonl:1 is no answer of colar generate" in capsys.readouterr().err
        assert other.read_text() == text
    # What a kill leaves before the very first answer.
    other.write_text("")
    assert main([*args, str(other)]) == 0
    assert len(list(files.read_jsonl(other))) == len(rows.splitlines())


def test_generate_prints_a_file_of_questions_with_the_expected_answers(checkpoints, questions, capsys):
    assert (
        main(
            [
                "generate",
                str(checkpoints / "colar"),
                "--input",
                str(questions),
                "--compression_factor",
                "1",
                "5",
                *SHORT,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert out.count("(expected 5)") == 2
    assert "[compression_factor 1]" in out


def evaluate_args(checkpoints, out, *more):
    return [
        "evaluate", str(checkpoints / "cot"), str(checkpoints / "colar"), "--limit", "5", "--compression_factor", "1", "2",
        "--decoding", "greedy", "sampled", "--seeds", "0", "1", "--output", str(out), *SHORT, *more,
    ]  # fmt: skip


def test_two_evaluations_do_not_write_into_one_folder(checkpoints, tmp_path, capsys, taken):
    with taken(tmp_path / "out"):
        assert main(evaluate_args(checkpoints, tmp_path / "out")) == 2
    assert "another process is writing to" in capsys.readouterr().err
    assert not (tmp_path / "out" / "records.jsonl").exists()


def test_evaluate_writes_records_report_and_picture_and_resumes(checkpoints, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(evaluate_args(checkpoints, out)) == 0
    records = files.resume_jsonl(out / "records.jsonl")
    assert len(records) == 5 * 3 * 3  # questions x (cot, c = 1, c = 2) x (greedy once, two sampled seeds)
    assert {r["train_seed"] for r in records} == {7}
    report = files.read_json(out / "report.json")
    cells = [row for row in report["rows"] if row["dataset"] == "arithmetic"]
    assert {(r["method"], r["params"].get("compression_factor"), r["decoding"]) for r in cells} == {
        (method, c, decoding)
        for method, c in (("cot", None), ("colar", 1), ("colar", 2))
        for decoding in ("greedy", "sampled")
    }
    assert all(row["n"] == 5 for row in cells)
    said = capsys.readouterr().err
    for picture in ("accuracy_vs_length.png", "accuracy_vs_length-sampled.png"):
        assert (out / picture).stat().st_size > 5000
        assert f"{out / picture}" in said
    assert "CoT" in (out / "report.md").read_text() or "cot" in (out / "report.md").read_text()

    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    (out / "records.jsonl").write_text("".join(lines[:20]))
    capsys.readouterr()
    assert main(evaluate_args(checkpoints, out)) == 0
    timeless = [
        {k: v for k, v in r.items() if k != "seconds"} for r in files.resume_jsonl(out / "records.jsonl")
    ]
    key = lambda r: json.dumps(r, sort_keys=True)  # noqa: E731
    assert sorted(map(key, timeless)) == sorted(
        key({k: v for k, v in r.items() if k != "seconds"}) for r in records
    )


def test_a_console_that_cannot_show_a_sign_shows_another(checkpoints, tmp_path, monkeypatch):
    """The next test has a report on an ASCII console."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "2 \u2248 ?", "answer": "2", "id": "a"}\n')
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="cp1252"))
    assert main(["generate", str(checkpoints / "cot"), "--input", str(questions), *SHORT]) == 0
    assert "2 ? ?" in printed.getvalue().decode("cp1252")


def test_a_backend_that_is_not_there_is_not_needed(checkpoints, tmp_path):
    """And an ASCII console, in a process of its own: Python's own streams."""
    records = tmp_path / "out"
    assert main(["evaluate", str(checkpoints / "cot"), "--limit", "2", "--output", str(records), *SHORT]) == 0
    (records / "accuracy_vs_length.png").unlink()
    environment = os.environ | {"MPLBACKEND": "nonsense", "PYTHONIOENCODING": "ascii"}
    code = f"""if True:
        import sys
        from colar.cli import main
        code = main(["report", {str(records)!r}, "--output", {str(records)!r}])
        # Seconds: a report loads no model.
        print("imported", sorted({{"transformers", "peft"}} & sys.modules.keys()))
        sys.exit(code)
    """
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr
    assert "? is 1.96" in done.stdout
    assert done.stdout.endswith("imported []\n")
    assert (records / "accuracy_vs_length.png").stat().st_size > 5000


def test_evaluate_refuses_records_of_another_checkpoint_or_limit(checkpoints, tmp_path, capsys):
    out = tmp_path / "out"
    base = ["evaluate", f"model={checkpoints / 'cot'}", "--limit", "2", "--output", str(out)]
    assert (
        main([*base, "--max_latents", "5", "--dtype", "float32", "--device", "gpu"]) == 2
    )  # leaves no record
    assert main([*base, *SHORT]) == 0
    assert main([*base, "--max_latents", "5"]) == 2
    assert "holds another run (limits was" in capsys.readouterr().err
    other = ["--limit", "2", "--output", str(out), *SHORT]
    assert main(["evaluate", f"model={checkpoints / 'cot2'}", *other]) == 2
    assert "holds another run (checkpoint model cot, run 7 was" in capsys.readouterr().err
    assert main(["evaluate", f"model={checkpoints / 'coconut'}", *other]) == 0  # another method of that model
    assert {r["method"] for r in files.resume_jsonl(out / "records.jsonl")} == {"cot", "coconut"}


def test_controls_fill_rows_of_their_own_beside_the_plain_ones(checkpoints, tmp_path, capsys):
    out = tmp_path / "out"
    names = [f"tiny={checkpoints / name}" for name in ("cot", "coconut", "colar")]
    plain = ["evaluate", *names, "--limit", "4", "--compression_factor", "2", "--output", str(out), *SHORT]
    controlled = [*plain, "--control", "zeroed", "shuffled"]
    assert main(plain) == 0
    assert main(controlled) == 0
    assert "without controls, as they think in no latents: tiny cot, run 7\n" in capsys.readouterr().err
    records = {(r["method"], r["label"], r["id"]): r for r in files.resume_jsonl(out / "records.jsonl")}
    assert {key[:2] for key in records} == {
        ("cot", ""), *((method, label) for method in ("coconut", "colar") for label in ("", "control-zeroed", "control-shuffled")),
    }  # fmt: skip
    assert len(records) == 4 * 7
    for (method, label, name), record in records.items():
        if label == "control-zeroed":
            assert record["length"] == records[method, "", name]["length"]
    compared = {
        (r["method"], r["label"], r["baseline"]["method"])
        for r in files.read_json(out / "report.json")["comparisons"]
    }
    assert {("coconut", "control-shuffled", "coconut"), ("colar", "control-zeroed", "colar")} <= compared

    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    (out / "records.jsonl").write_text("".join(lines[:-2]))
    assert main(controlled) == 0  # resumed: what was missing, and the same
    again = {(r["method"], r["label"], r["id"]): r for r in files.resume_jsonl(out / "records.jsonl")}
    assert again.keys() == records.keys()
    assert all(again[key]["completion"] == records[key]["completion"] for key in records)


def test_a_folder_of_files_has_one_name_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "svamp").mkdir()  # the source of that name wins
    for text in ("mine", "mine/", "./mine", "../" + tmp_path.name + "/mine", str(tmp_path / "mine")):
        assert name_sources([text]) == {"mine": text}
    assert name_sources(["svamp"]) == {"svamp": "svamp"}


def test_options_of_sources_are_read_as_strictly_as_recipes():
    assert source_options(["steps=[1, 2]", "word='no'"], "arithmetic") == {"steps": [1, 2], "word": "no"}
    for pair, words in (
        ("x={a: 1, a: 2}", "the key 'a' is there twice"),
        ("steps=[1", "not valid YAML: while parsing"),
    ):
        with pytest.raises(ValueError, match=f"--options {re.escape(pair)}: .*{re.escape(words)}"):
            source_options([pair], "arithmetic")


def test_one_source_under_several_names_with_options_each(checkpoints, tmp_path):
    out = tmp_path / "out"
    args = ["evaluate", str(checkpoints / "cot"), "--data", "arithmetic", "short=arithmetic", "--limit", "3"]
    args += ["--options", "arithmetic.steps=[2,3]", "short.steps=[1,1]", "--label", "control-cut"]
    assert main([*args, "--output", str(out), *SHORT]) == 0
    records = files.resume_jsonl(out / "records.jsonl")
    assert {(r["dataset"], r["label"]) for r in records} == {
        ("arithmetic", "control-cut"),
        ("short", "control-cut"),
    }
    tokens = {
        name: [r["gold_length"] for r in records if r["dataset"] == name] for name in ("arithmetic", "short")
    }
    assert max(tokens["short"]) < min(tokens["arithmetic"])


def test_report_folds_several_folders(checkpoints, tmp_path):
    for name in ("cot", "colar"):
        args = ["evaluate", str(checkpoints / name), "--limit", "2", "--output", str(tmp_path / name), *SHORT]
        assert main(args) == 0
    assert (
        main(["report", str(tmp_path / "cot"), str(tmp_path / "colar"), "--output", str(tmp_path / "both")])
        == 0
    )
    made = files.read_json(tmp_path / "both" / "report.json")
    assert {row["method"] for row in made["rows"]} == {"cot", "colar"}
    assert set(made["provenance"]["models"]) == {"cot cot, run 7", "colar colar, run 7"}
    assert made["provenance"]["limits"] == {"max_latents": 4, "max_completion_length": 3}


def test_data_commands(tmp_path, capsys):
    assert main(["data", "list"]) == 0
    assert "multiarith" in capsys.readouterr().out
    assert main(["data", "show", "arithmetic", "--limit", "2", "--options", "steps=[3,3]"]) == 0
    assert capsys.readouterr().out.count('"question"') == 2
    assert (
        main(["data", "prepare", "arithmetic", "--limit", "4", "--splits", "test", "--output", str(tmp_path)])
        == 0
    )
    written = capsys.readouterr().out.strip()
    assert len(list(files.read_jsonl(written))) == 4


def test_recipes_commands(tmp_path, capsys, monkeypatch):
    assert main(["recipes", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(recipes.names()) > 15
    assert "tiny/colar                   CoLaR-SFT of the toy model from its CoT-SFT weights." in listed
    assert main(["recipes", "copy", "llama-3.1-8b/cot", str(tmp_path)]) == 0
    copied = capsys.readouterr().out.splitlines()
    assert copied == [f"{tmp_path}/{name}.yaml" for name in ("llama-3.1-8b/cot", "llama-3.2-1b/cot-math")]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["recipes", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [line[:60] for line in listed]  # a line each on a terminal


def test_docs_show_the_help_of_now():
    spec = importlib.util.spec_from_file_location("write_cli_docs", ROOT / "scripts" / "write_cli_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "cli.md").read_text() == module.render(), "run scripts/write_cli_docs.py"


def test_of_several_processes_the_first_warns_and_errors_come_from_any(checkpoints, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["generate", str(checkpoints / "colar"), "q", "--compression_factor", "9", *SHORT]) == 0
    assert capsys.readouterr().err == ""
    assert main(["generate", str(checkpoints / "colar"), "q", "--compression_factor", "0.5", *SHORT]) == 2
    assert "must be a number, 1 or more" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["generate", str(checkpoints / "colar"), "q", "--compression_factor", "9", *SHORT]) == 0
    assert "was not trained" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("fails", "words", "explains_itself"),
    [
        (lambda: options.columns_of("a"), "--columns takes KEY=COLUMN,KEY=COLUMN, got 'a'", True),
        # In colar, but not by a `raise` of its own; and in another package.
        (lambda: options.number("two"), "could not convert string to float: 'two'", False),
        (lambda: load_file(ROOT / "nothing"), None, True),
        (lambda: json.loads("{"), "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", False),
    ],
)  # fmt: skip
def test_an_error_that_colar_did_not_raise_can_be_traced(
    fails, words, explains_itself, shown, monkeypatch, capsys
):
    if shown:
        monkeypatch.setenv("COLAR_TRACEBACK", "1")
    with pytest.raises((ValueError, OSError)) as found:
        fails()
    assert _failed("generate", found.value) == 2
    said = capsys.readouterr().err
    hint = "" if shown or explains_itself else " (COLAR_TRACEBACK=1 shows where)"
    assert said.splitlines()[-1] == f"colar generate: error: {words or found.value}{hint}"
    assert said.startswith("Traceback") == shown


def test_every_key_of_a_recipe_is_listed_with_its_default_and_meaning(capsys):
    assert main(["train", "--keys"]) == 0
    listed = capsys.readouterr().out
    assert "\noutput: Run folder.\n" in f"\n{listed}"
    for line in (
        "training.max_steps (default: -1): Stop after N updates",
        "grpo.num_generations (default: 8): G:",
        "method.lookahead_weight of sequential (default: 0.0): Weight of the labels behind a group",
        "method.n_pauses of pause (default: ",
    ):
        assert f"\n{line}" in listed
    # Every key has a meaning.
    assert not re.search(r"^\S+( of \w+)?( \(default: [^)]*\))?:\s*$", listed, flags=re.MULTILINE)


def test_questions_come_in_any_table(tmp_path):
    """A training file is one of questions too: its column may have another name, and its kind be CSV."""
    more = {"rationale": "", "source": "another column"}
    rows = [{"problem": f"What is {i} + 1?", "result": str(i + 1), **more} for i in range(2)]
    (tmp_path / "q.csv").write_text("problem,result\nWhat is 0 + 1?,1\nWhat is 1 + 1?,2\n")
    files.write_jsonl(tmp_path / "q.jsonl", rows)
    for name in ("q.csv", "q.jsonl"):
        found = answer_files.read_questions(tmp_path / name)
        assert [(row["id"], row["question"]) for row in found] == [
            ("1", "What is 0 + 1?"),
            ("2", "What is 1 + 1?"),
        ]
    files.write_jsonl(tmp_path / "bad.jsonl", [{"text": "a"}])
    with pytest.raises(
        ValueError, match=r"bad.jsonl:1: no question: a row needs one of question, problem, prompt"
    ):
        answer_files.read_questions(tmp_path / "bad.jsonl")
