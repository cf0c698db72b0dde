"""The scripts under reproduce/ with a `colar` that only writes down what it is asked: are the commands ones it knows,
in an order that works, and is the arena's budget the same for all?"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from colar import recipe
from colar.cli import build_parser, underscored
from colar.cli.train import overrides

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "lab" / "recipes"
ARENA = sorted(path.stem for path in LAB.glob("arena/*.yaml"))
STUB = """#!/bin/sh
{ for word in "$@"; do printf '%s\\037' "$word"; done; printf '\\036'; } >> "$ASKED"
if [ "$FAIL_AT" ] && [ "$2" = "$FAIL_AT" ]; then echo "colar: error: no luck" >&2; exit 2; fi
while [ $# -gt 1 ]; do
  if [ "$1" = --output ]; then mkdir -p "$2"; touch "$2/records.jsonl"; fi
  shift
done
"""


def run(script, folder, *args, after=(), fail_at=""):
    """(exit code, stderr, the commands asked for) of a script; `after` are arguments that follow the output folder."""
    stub = folder / "bin" / "colar"
    shutil.rmtree(stub.parent, ignore_errors=True)
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    python = stub.parent / "python"  # scripts/, which read what colar wrote
    python.write_text("#!/bin/sh\necho 7\n")
    python.chmod(0o755)
    asked = folder / "asked"
    asked.unlink(missing_ok=True)
    environment = os.environ | {
        "PATH": f"{stub.parent}:{os.environ['PATH']}", "ASKED": str(asked), "FAIL_AT": fail_at, "PROCS": "1", "SEEDS": "0",
        "ARENA": str(folder / "arena"), "RESULTS": str(folder / "results"),
    }  # fmt: skip
    command = ["bash", str(ROOT / "lab" / "reproduce" / script), *args, str(folder / "out"), *after]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = asked.read_text().split("\036")[:-1] if asked.exists() else []
    return done.returncode, done.stderr, [line.split("\037")[:-1] for line in lines]


SCRIPTS = (
    "table1.sh", "table2.sh", "c_curves.sh", "sequential.sh", "smollm2_sequential.sh", "qwen_sequential.sh",
)  # fmt: skip


RESUMED = ("table1.sh", "table2.sh")
"""Those that run nothing twice: given again, they report alone."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_is_understood_and_finds_what_it_needs(script, tmp_path):
    code, _, commands = run(script, tmp_path)
    assert code == 0
    trained, answered, reported = set(), set(), set()
    parser = build_parser()
    for words in commands:
        args, rest = parser.parse_known_args([underscored(word) for word in words])
        if words[0] == "train":
            for stage in recipe.load_stages(args.recipe, overrides(rest, args.output), args.stages):
                made = stage.recipe
                assert made.model.init_from is None or made.model.init_from in trained
                assert f"{made.output}/best" not in trained
                trained.add(f"{made.output}/best")
        elif words[0] == "evaluate":
            assert not rest
            assert {text.partition("=")[2] for text in args.checkpoints} <= trained
            answered.add(args.output)
        elif words[0] == "inspect":
            assert not rest
            assert {text.partition("=")[2] for text in args.checkpoints} <= trained
        elif words[0] == "export":
            assert not rest
            assert args.checkpoint in trained
        else:
            assert words[0] == "report"
            # A script may put what was committed before, or some of its own answers again, beside its answers.
            folder = f"{tmp_path}/out/eval"
            own = set(args.records) - {f"{folder}/paper", f"{folder}/beside"}
            assert own <= answered
            reported |= own
    assert reported == answered
    assert len(answered) >= 2
    if script in RESUMED:
        assert len(commands) > 6
        _, _, commands = run(script, tmp_path)
        assert [words[0] for words in commands] == ["report"]


def test_one_change_each_is_understood_and_starts_from_table2(tmp_path):
    code, said, commands = run("grpo_stability.sh", tmp_path, after=[str(tmp_path / "table2")])
    assert (code, commands) == (1, [])
    assert f"{tmp_path}/table2/cot-0/best is not there: run lab/reproduce/table2.sh first" in said
    for name in ("cot-0", "nll-0", "dl-0"):
        (tmp_path / "table2" / name / "best").mkdir(parents=True)
    code, _, commands = run("grpo_stability.sh", tmp_path, after=[str(tmp_path / "table2")])
    assert code == 0
    there = {f"{tmp_path}/table2/{name}/best" for name in ("cot-0", "nll-0", "dl-0")}
    outputs = set()
    for words in commands:
        assert words[0] == "train"
        args, rest = build_parser().parse_known_args([underscored(word) for word in words])
        made = recipe.load(args.recipe, overrides(rest, args.output))
        assert made.model.init_from in there
        there.add(f"{made.output}/best")
        outputs.add(made.output)
    assert len(outputs) == len(commands) == 24


def test_the_figures_commands_are_understood_and_sizes_see_equal_rows(tmp_path):
    code, _, commands = run("figures.sh", tmp_path)
    assert code == 0
    parser = build_parser()
    trained, rows, asked = {"checkpoints/smollm2-135m-gsm"}, {}, []
    for words in commands:
        args, rest = parser.parse_known_args([underscored(word) for word in words])
        asked.append(words[0])
        if words[0] == "train":
            made = recipe.load(args.recipe, overrides(rest, args.output))
            assert made.model.init_from is None or made.model.init_from in trained
            trained.add(f"{made.output}/best")
            size, _, name = (
                made.output.removeprefix(f"{tmp_path}/out/").split("/")
                if "m/seed" in made.output
                else (None,) * 3
            )
            if size:
                rows.setdefault(name, {})[size] = (made.data.train_skip, made.data.train_size, made.data.seed)
        else:
            assert not rest
            named = getattr(args, "checkpoints", [getattr(args, "checkpoint", None)])
            assert {text.rpartition("=")[2] for text in named if text} <= trained
    # The first part reads thoughts, the second trains the sizes.
    assert asked.index("generate") < asked.index("report")
    assert set(rows) == {"cot-init", "cot", "colar"}
    for name, by_size in rows.items():
        assert set(by_size) == {"0.1m", "0.4m", "1.8m", "6m"}, name
        assert len(set(by_size.values())) == 1, name
    assert rows["cot"] == rows["colar"]
    skip, more, seed = rows["cot"]["6m"]
    assert rows["cot-init"]["6m"] == (0, skip, seed)
    assert more > 0
    # Nothing but reports is made again, and of two parts one can be asked for.
    _, _, commands = run("figures.sh", tmp_path)
    assert [words[0] for words in commands] == ["report"]


def test_the_curves_take_cot_weights_from_the_arena_where_they_are(tmp_path):
    (tmp_path / "arena/seed0").mkdir(parents=True)
    (tmp_path / "arena/seed0/cot-init.done").touch()
    _, _, commands = run("c_curves.sh", tmp_path)
    trained = [words for words in commands if words[0] == "train"]
    assert all(
        words[words.index("--model.init_from") + 1] == f"{tmp_path}/arena/seed0/cot-init/best"
        for words in trained
    )
    assert "lab/recipes/arena/cot-init.yaml" not in {words[1] for words in trained}


def test_a_script_goes_on_where_it_was_and_says_where_it_failed(tmp_path):
    code, said, commands = run("table1.sh", tmp_path, "--smoke", fail_at="lab/recipes/arena/coconut.yaml")
    assert code != 0
    assert "failed: " in said
    assert "no luck" in said
    before = [words[1] for words in commands]
    assert before[-1] == "lab/recipes/arena/coconut.yaml"
    code, _, commands = run("table1.sh", tmp_path, "--smoke")
    assert code == 0
    after = [words[1] for words in commands if words[0] == "train"]
    assert after[0] == "lab/recipes/arena/coconut.yaml"
    assert not set(before[:-1]) & set(after)
    _, _, commands = run("table1.sh", tmp_path, "--smoke")
    assert [words[0] for words in commands] == ["report"]


def test_the_arenas_methods_see_the_same_problems_each_once():
    """70,000 of one source, those of the CoT weights counted in."""
    init = recipe.load(LAB / "arena/cot-init.yaml")
    assert len(ARENA) == 18
    for name in ARENA:
        made = recipe.load(LAB / f"arena/{name}.yaml")
        same = ("source", "options", "seed", "mixed_in", "validation_size")
        assert [getattr(made.data, key) for key in same] == [getattr(init.data, key) for key in same], name
        assert made.training.num_train_epochs == 1
        if name != "cot-init":
            from_cot = made.model.init_from == f"{init.output}/best"
            assert made.data.train_skip == (init.data.train_size if from_cot else 0), name
            assert made.data.train_skip + made.data.train_size == 70_000, name


def test_the_arenas_curricula_end_in_time():
    for name in ARENA:
        made = recipe.load(LAB / f"arena/{name}.yaml")
        method = recipe.build_method(made)
        assert method.stage(0.6) == method.last_stage(), name  # at least 40% of the rows train the last stage


def test_an_ablation_differs_from_colar_in_one_value():
    """The NLL has its weight as well: it is in other units than soft-MSE (lab/LOG.md)."""
    differ = {
        "DL": {"head"},
        "OC": {"supervise_chain"},
        "MP": {"merge"},
        "NLL": {"latent_loss", "latent_weight"},
    }
    colar = recipe.load(LAB / "arena/colar.yaml")
    for label, keys in differ.items():
        made = recipe.load(LAB / f"arena/colar-{label.lower()}.yaml")
        assert made.label == label
        assert (made.training, made.data, made.model) == (colar.training, colar.data, colar.model)
        assert {key for key in colar.method if made.method[key] != colar.method[key]} == keys
        assert made.method.keys() == colar.method.keys()
