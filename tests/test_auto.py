"""`colar train auto`: its values follow from model, rows and device, and its end measures every speed."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import save_untrained
from hypothesis import given, settings
from hypothesis import strategies as st

import colar
from colar import files, processes, recipe, yaml_settings
from colar.cli import main
from colar.cli.checkpoints import data_of_runs
from colar.data import sources
from colar.data.example import Example
from colar.data.judge import Verdict
from colar.evaluation import evaluate, report
from colar.evaluation.report_rows import Difference, Report, ReportRow, System
from colar.methods import pretrained, registry
from colar.model import backbones, checkpoint
from colar.ops import devices
from colar.recipe import auto_recipe, auto_run, auto_speeds, facts, parsing, speed_report
from colar.recipe.auto_run import AutoCall, finish, prepare_run, prepared
from colar.recipe.facts import SLOT, Facts, RowReader, facts_of
from colar.training.run_folder import AutoFolder

ROWS = [row.as_row() for row in sources.load_examples("arithmetic", "train", limit=60)]
NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
FACTS = Facts(
    model="someone/model-500m",
    parameters=500_000_000,
    context=4096,
    rows=5000,
    chain=80,
    question=60,
    answer=3,
    row=120.0,
    equations=True,
    digits=True,
    signs=True,
    judged=True,
    prompt_format="plain",
    device="cuda",
    bfloat16=True,
    longest=400,
    activations=0.8e6,
    memory=80e9,
)


def _stages(found: Facts, folder: Path, **asked: Any) -> list[Any]:
    tree, why = auto_recipe.make_recipe(found, str(folder / "run"), **asked)
    return recipe.load_stages(auto_recipe.write_recipe(folder / "recipe.yaml", tree, why))


@pytest.mark.parametrize("method", auto_recipe.METHODS)
@pytest.mark.parametrize(
    "found",
    [
        FACTS,
        replace(FACTS, device="cpu", bfloat16=False),
        replace(FACTS, equations=False, digits=False, rows=400_000),
        replace(FACTS, model="tiny", parameters=800_000, device="cpu", bfloat16=False, rows=300),
    ],
)
def test_the_recipe_is_one_that_can_be_read(found: Facts, method: str, tmp_path: Path) -> None:
    cot, own, reinforced = _stages(found, tmp_path, method=method, grpo=True)
    assert [stage.recipe.method["name"] for stage in (cot, own, reinforced)] == ["cot", method, method]
    assert own.recipe.model.init_from == f"{tmp_path}/run/cot/best"
    assert reinforced.recipe.grpo is not None
    # It has the config of its start: `--stages.sequential.method.KEY` would be contradicted here, after all of SFT.
    assert list(reinforced.recipe.method) == ["name"]
    assert {stage.recipe.data.source for stage in (cot, own, reinforced)} == {f"{tmp_path}/run/data"}


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8, 16])
def test_processes_share_the_rows_of_an_update(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is that of one process as far as the rows can be divided, and the recipe can be run by so many."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    cot, own, reinforced = (
        stage.recipe for stage in _stages(replace(FACTS, processes=processes), tmp_path, grpo=True)
    )
    rows = [
        each.training.per_device_train_batch_size * each.training.gradient_accumulation_steps * processes
        for each in (cot, own, reinforced)
    ]
    assert own.training.per_device_train_batch_size % own.training.draws_per_example == 0
    if processes in (1, 2, 4, 8):
        assert rows == [32, 64, 32]
    elif processes == 3:
        assert rows == [30, 60, 24]
    else:
        assert rows == [32, 64, 64]
    plan = reinforced.grpo.plan(reinforced.training, processes)
    assert plan.steps == 2 * plan.accumulate
    small = replace(FACTS, model="tiny", parameters=800_000, device="cpu", bfloat16=False, rows=300)
    cot, own = (stage.recipe for stage in _stages(replace(small, processes=processes), tmp_path))
    assert cot.training == replace(own.training, modules_learning_rate=None)
    assert cot.training.per_device_train_batch_size == max(1, 8 // processes)


def test_a_call_that_was_killed_while_it_wrote_rows_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, write = AutoCall("tiny", ROWS, tmp_path), files.write_jsonl
    written = []

    def killed(path: Path, rows: Any) -> Path:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_jsonl", killed)
        with pytest.raises(KeyboardInterrupt), prepared(call):
            pass
    with prepared(call) as stages:
        assert len(stages) == 2
    assert all((tmp_path / "data" / f"{name}.jsonl").exists() for name in ("train", "validation", "test"))


def test_a_trial_is_named_by_the_run_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call, trial = AutoCall("tiny", ROWS, tmp_path), ["--training.max_steps", "2"]
    prepare_run(call, trial)
    prepare_run(call, trial)
    assert "keeps" not in capsys.readouterr().err
    prepare_run(call, ["--training.max_steps", "500"])
    assert "keeps" not in capsys.readouterr().err
    prepare_run(call)
    assert "recipe.yaml keeps --training.max_steps 2, as an earlier command had it" in capsys.readouterr().err


def test_all_weights_are_not_trained_at_an_adapters_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_run, "facts_of", lambda *_: FACTS)
    all_weights = ["--model.lora", "null"]
    with pytest.raises(
        ValueError, match="--model.lora null trains all weights, .* give --training.learning_rate"
    ):
        prepare_run(AutoCall("tiny", ROWS, tmp_path), all_weights)
    prepare_run(
        AutoCall("tiny", ROWS, tmp_path),
        [*all_weights, "--training.learning_rate", "1e-5", "--model.dtype", "float32"],
    )


def test_a_recipe_of_another_machine_is_not_taken_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` writes the recipe, mostly in one process."""
    call = AutoCall("tiny", ROWS, tmp_path)
    prepare_run(call)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "best", lambda: "cuda")
        with pytest.raises(ValueError, match=r"on cpu, and here it is 1 process\(es\) on cuda: delete it"):
            prepare_run(call)
    launched = processes.launched
    monkeypatch.setattr(processes, "launched", lambda: 8)
    monkeypatch.setattr(processes, "join", lambda *_: None)
    with pytest.raises(
        ValueError, match=r"made for 1 process\(es\) on cpu, and here it is 8 process\(es\) on cpu: delete it"
    ):
        prepare_run(call)
    # The remedy works.
    (tmp_path / "recipe.yaml").unlink()
    prepare_run(call)
    monkeypatch.setattr(processes, "launched", launched)
    (tmp_path / "cot" / "best").mkdir(parents=True)
    prepare_run(call)
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize("method", ["coconut", "distill"])
def test_the_manual_compares_other_methods_on_the_rows_of_a_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe in docs/methods.md, beside a run: the same model, rows and limits, from the same CoT weights."""
    monkeypatch.chdir(tmp_path)
    cot, *_ = _stages(FACTS, Path("runs"))
    page = (NOTEBOOK.parent.parent / "docs" / "methods.md").read_text()
    text = page.partition("```yaml\n# compare.yaml\n")[2].partition("```")[0]
    files.write_text("compare.yaml", text.replace("runs/mine/recipe.yaml", "runs/recipe.yaml"))
    stages = recipe.load_stages("compare.yaml", (), ["coconut", "distill"])
    [found] = [stage.recipe for stage in stages if stage.name == method]
    assert found.method["name"] == method
    assert found.model == replace(cot.recipe.model, init_from="runs/mine/cot/best")
    assert (found.data, found.validation.limits) == (cot.recipe.data, cot.recipe.validation.limits)
    assert found.output == f"runs/compare/{method}"


def test_values_follow_from_the_facts(tmp_path: Path) -> None:
    cot, own = _stages(FACTS, tmp_path)
    assert cot.recipe.model.lora is not None
    assert cot.recipe.model.dtype == "bfloat16"
    assert cot.recipe.training.bf16
    assert cot.recipe.training.tokens_per_batch == 16_384
    assert own.recipe.method["grouping"] == "equations"
    assert own.recipe.method["merge"] == "ordered"
    # Both limits leave a quarter of room above the percentile.
    limits = own.recipe.validation.limits
    assert (limits.max_latents, limits.max_completion_length) == (104, 8)

    [slow, _] = _stages(replace(FACTS, device="cpu", bfloat16=False), tmp_path)
    assert slow.recipe.model.dtype == "float32"
    assert not slow.recipe.training.bf16
    assert slow.recipe.model.attn_implementation == "eager"
    small = replace(FACTS, model="tiny", parameters=800_000, device="cpu")
    assert _stages(small, tmp_path)[0].recipe.model.lora is None
    words = replace(FACTS, equations=False, digits=False)
    assert _stages(words, tmp_path)[1].recipe.method["grouping"] == "tokens"
    assert _stages(replace(FACTS, signs=False), tmp_path)[1].recipe.method["grouping"] == "tokens"
    with pytest.raises(ValueError, match="--grpo needs answers that can be judged"):
        _stages(replace(FACTS, judged=False), tmp_path, grpo=True)
    with pytest.raises(ValueError, match="--method must be one of sequential, colar, got 'cot'"):
        _stages(FACTS, tmp_path, method="cot")


def test_rows_beyond_the_context_are_left_out_of_every_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": f"What is {i} + 1?", "steps": [f"<<{i}+1={i + 1}>>"], "answer": i + 1} for i in range(60)
    ]
    # Wherever the hash puts them: chains and questions of more tokens than tiny's 1024 positions.
    rows += [{"question": f"Is {i} so?", "steps": ["1 " * 2000], "answer": i} for i in range(5)]
    rows += [{"question": f"Why is {i} so? " * 400, "steps": ["1"], "answer": i} for i in range(5)]
    prepare_run(AutoCall("tiny", rows, tmp_path))
    n = {
        name: len(sources.load_examples(str(tmp_path / "data"), name))
        for name in ("train", "validation", "test")
    }
    said = capsys.readouterr().err
    left_out = {kind: int(count) for count, kind in re.findall(r"left out (\d+) of \d+ (\w+)", said)}
    assert left_out["training"] > 0
    # A long chain alone is cut in generation.
    assert 60 <= sum(n.values()) <= 65
    assert sum(n.values()) + sum(left_out.values()) == 70
    assert "positions, the model's context is 1024): choose a --model with a longer context" in said
    limits = parsing.load_stages(tmp_path / "recipe.yaml")[0].recipe.validation.limits
    assert limits.max_latents + limits.max_completion_length < 1024
    with pytest.raises(ValueError, match=r"\d+ of \d+ training rows are too long: choose a --model"):
        prepare_run(AutoCall("tiny", [{**row, "steps": ["1 " * 2000]} for row in rows], tmp_path / "long"))


def test_questions_that_are_too_long_for_the_limits_of_an_override_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "question": f"What is {i} + 1?{' Why?' * (60 if i % 4 == 0 else 0)}",
            "steps": [f"{i}+1={i + 1}"],
            "answer": i + 1,
        }
        for i in range(80)
    ]
    counts = {}
    for limit in (60, 900):
        output = tmp_path / str(limit)
        prepare_run(AutoCall("tiny", rows, output), ["--validation.limits.max_latents", str(limit)])
        counts[limit] = [
            len(sources.load_examples(str(output / "data"), name)) for name in ("validation", "test")
        ]
        left_out = re.findall(r"left out \d+ of \d+ (\w+)", capsys.readouterr().err)
        assert left_out == ([] if limit == 60 else ["validation", "test"])
    assert all(few < all_ for few, all_ in zip(counts[900], counts[60], strict=True))


def test_updates_grow_with_the_rows_on_a_gpu(tmp_path: Path) -> None:
    """While there are a thousand of them."""
    for rows, expected in (
        (2_000, 32),
        (31_999, 32),
        (32_000, 64),
        (100_000, 64),
        (400_000, 256),
        (9_000_000, 256),
    ):
        cot, own = _stages(replace(FACTS, rows=rows), tmp_path)
        sizes = [each.recipe.training.per_device_train_batch_size for each in (cot, own)]
        assert sizes == [expected, 2 * expected], rows
    [on_cpu, _] = _stages(replace(FACTS, rows=400_000, device="cpu", bfloat16=False), tmp_path)
    assert on_cpu.recipe.training.per_device_train_batch_size == 16


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_rows_that_are_not_tokenised_are_short(texts: list[tuple[str, str]], generated: int) -> None:
    rows = [Example(str(i), f"?{a}", (f"={b}",), "1") for i, (a, b) in enumerate(texts)]
    reader = RowReader.of("tiny")
    # Multiples of `backbones.CONTEXT_MULTIPLE`.
    for context in (64, 128, 192):
        config = copy.copy(reader.config)
        config.max_position_embeddings = context
        short = replace(reader, config=config)
        lengths = [reader.tokens(row) for row in rows]
        needed = [SLOT + q + (generated or c + a) for q, c, a in lengths]
        found = short.too_long(rows, generated or None)
        assert list(found) == [i for i, n in enumerate(needed) if n > context]


def test_of_many_rows_some_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Example(str(i), "?", ("=" * (1 + i % 7),), "1") for i in range(400)]
    reader, whole = RowReader.of("tiny"), RowReader.tokens
    read: list[Example] = []

    def tokens(reader: RowReader, example: Example) -> tuple[int, int, int]:
        read.append(example)
        return whole(reader, example)

    monkeypatch.setattr(facts, "MEASURED", 100)
    monkeypatch.setattr(RowReader, "tokens", tokens)
    found = facts_of(reader, rows, device="cpu")
    assert (found.rows, found.chain, len(set(read))) == (400, 7, 100)


def test_the_measured_rows_are_counted_by_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Example(str(i), "1 + 1?", ("<<1+1=2>>",), "2") for i in range(30)]
    tracked: list[tuple[str, int]] = []

    def track(items: list[Example], description: str) -> list[Example]:
        tracked.append((description, len(items)))
        return items

    monkeypatch.setattr(facts, "MEASURED", 20)
    monkeypatch.setattr(facts.progress, "track", track)
    facts_of(RowReader.of("tiny"), rows, device="cpu")
    assert tracked == [("measure rows", 20)]


def test_long_chains_are_validated_less_and_drawn_less(tmp_path: Path) -> None:
    """Validating 500 questions of 6,000 thoughts eight times takes as long as training, and four draws of a long row
    are four rows."""
    cot, own = _stages(replace(FACTS, row=6000.0, chain=15_000, context=32_768), tmp_path)
    assert (cot.recipe.data.validation_size, cot.recipe.training.eval_steps) == (100, 0.5)
    assert own.recipe.training.draws_per_example == 2
    assert own.recipe.training.per_device_train_batch_size == 32
    cot, own = _stages(FACTS, tmp_path)
    assert (cot.recipe.data.validation_size, cot.recipe.training.eval_steps) == (None, 0.2)
    assert own.recipe.training.draws_per_example == 4
    assert own.recipe.training.per_device_train_batch_size == 64


@pytest.mark.parametrize(
    ("parameters", "bytes_of_position", "checkpoints"), [(1.5e9, 2.06e6, False), (7.6e9, 4.45e6, True)]
)
def test_layers_are_computed_again_where_the_longest_row_would_not_fit(
    parameters: float, bytes_of_position: float, checkpoints: bool, tmp_path: Path
) -> None:
    """Rows of 16,384 tokens on a GPU of 80 GB: 34 GB with 1.5 B weights, 88 GB with 7.6 B."""
    found = replace(FACTS, parameters=int(parameters), activations=bytes_of_position, longest=16_384)
    for stage in _stages(found, tmp_path):
        assert stage.recipe.training.gradient_checkpointing == checkpoints
    # On other devices the memory is not known.
    assert not replace(found, memory=math.inf).crowded


def test_limits_stay_within_the_context() -> None:
    tree, _ = auto_recipe.make_recipe(replace(FACTS, chain=4000, answer=20, question=400), "run")
    limits = tree["validation"]["limits"]
    assert limits["max_completion_length"] == 29
    assert limits["max_latents"] == 4096 - 400 - SLOT - 29


def test_facts_are_counted(tmp_path: Path) -> None:
    rows = [Example(str(i), f"What is {i} + 1?", (f"<<{i}+1={i + 1}>>",), str(i + 1)) for i in range(40)]
    found = facts_of(RowReader.of("tiny"), rows, device="cpu")
    # << 39 + 1 = 40 >> is seven tokens of tiny's, in which a number of two digits is one.
    assert (found.rows, found.chain, found.answer) == (40, 7, 1)
    assert found.equations
    assert not found.digits
    assert found.judged
    assert found.prompt_format == "plain"
    assert facts_of(RowReader.of("tiny-digits"), rows, device="cpu").digits
    words = [replace(row, steps=("One more than that.",), answer_type="text") for row in rows]
    found = facts_of(RowReader.of("tiny"), words, device="cpu")
    assert not found.equations
    assert not found.judged


def _row(method: str, label: str, accuracy: float, length: float, **params: float) -> ReportRow:
    return ReportRow(
        System("m", method, label, tuple(sorted(params.items())), "greedy", None), speed_report.DATASET, [0], 100,
        accuracy, 0.03, 0.0, length, length + 2, length / 100, None, None, None, 0.0, 100, None, None, None,
    )  # fmt: skip


def test_long_chains_are_counted_in_digits() -> None:
    rows = [_row("cot", "", 0.8, 140.4), _row("cot", speed_report.NO_CHAIN, 0.1, 0.0)]
    made = Report({}, [*rows, _row("sequential", "", 0.8, 72.3, compression_factor=2)], [])
    made.rows.append(_row("sequential", "", 0.8, 99.6, compression_factor=3))
    table = speed_report.speeds_table(made, {}, {})
    assert [row[3] for row in table.rows] == ["140", "0", "72", "100"]


def test_results_of_an_evaluation_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    rows = [
        {"question": f"{i} + 1?", "steps": [f"{i} + 1 = {i + 1}"], "answer": f"{i + 1}"} for i in range(40)
    ]
    call = AutoCall("tiny", rows, tmp_path)
    with (
        pytest.raises(ValueError, match="results is not of a run of auto, and would be replaced"),
        prepared(call),
    ):
        pass


@pytest.mark.parametrize(
    ("accuracies", "se", "chosen", "part"),
    [
        (
            (0.80, 0.795, 0.70),
            0.004,
            2,
            "c = 2 answers as well as CoT, 0.5 ± 0.8 points less, with 50% of the",
        ),
        (
            (0.80, 0.80, 0.80),
            0.004,
            5,
            "c = 5 answers as well as CoT, 0.0 ± 0.8 points more, with 20% of the",
        ),
        (
            (0.70, 0.60, 0.50),
            0.004,
            1,
            "no speed is within a point of CoT: c = 1 answers 10.0 ± 0.8 points less",
        ),
        (
            (0.80, 0.79, 0.70),
            0.04,
            1,
            "too few to choose a speed by (± 8 points), so c = 1 is the default; c = 2 answers 1 ± 8 points less, with 50% of",
        ),
        # Surely behind, and within the point all the same.
        (
            (0.795, 0.70, 0.60),
            0.001,
            1,
            "c = 1 answers as well as CoT, 0.5 ± 0.2 points less, with 100% of the",
        ),
        (
            (0.795, 0.793, 0.60),
            0.001,
            2,
            "c = 2 answers as well as CoT, 0.7 ± 0.2 points less, with 50% of the",
        ),
        # CoT may be behind: a speed is compared with c = 1 as well.
        (
            (0.90, 0.81, 0.80),
            0.004,
            1,
            "c = 1 answers as well as CoT, 10.0 ± 0.8 points more, with 100% of the",
        ),
    ],
)
def test_the_fastest_speed_within_a_point_of_cot_is_chosen(
    accuracies: tuple[float, ...], se: float, chosen: float, part: str
) -> None:
    cot = _row("cot", "", 0.80, 20.0)
    own = [
        _row("sequential", "", accuracy, 20 / c, compression_factor=c)
        for c, accuracy in zip((1, 2, 5), accuracies, strict=True)
    ]
    bare = _row("cot", speed_report.NO_CHAIN, 0.1, 0.0)
    differences = [
        Difference(row.system, speed_report.DATASET, cot.system, 100, row.accuracy - 0.80, se, None)
        for row in own
    ]
    made = Report({}, [cot, bare, *own], differences)
    default, sentence = speed_report.choose(made)
    assert default == {"compression_factor": chosen}
    assert sentence.startswith("CoT answers 80% of 100 held-out questions")
    assert part in sentence


def test_speeds_are_those_that_the_method_was_trained_for() -> None:
    """A factor that it cannot work with would end the run at its table, after all of the training; one that was not
    trained could become the default."""
    two = registry.build("sequential", {"compression_factors": [1, 2]})
    assert [(each.compression_factor, each.confidence_threshold) for each in auto_speeds.params_of_speeds(two)] == [
        (1, 0), (2, 0),
    ]  # fmt: skip
    for factor in (4, 5):
        one = registry.build("sequential", {"compression_factors": [factor]})
        assert [each.compression_factor for each in auto_speeds.params_of_speeds(one)] == [factor]
    assert len(auto_speeds.params_of_speeds(registry.build("cot"))) == 1


def test_what_was_answered_otherwise_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was answered so is not, after any of the changes."""
    asked: list[int] = []
    whole = evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", lambda *given: asked.append(whole(*given)))
    monkeypatch.setattr(auto_speeds, "TIMED_SINGLY", 1)
    monkeypatch.setattr(report, "write", lambda *given, **named: None)
    monkeypatch.setattr(speed_report, "choose", lambda measured: ({}, ""))
    monkeypatch.setattr(speed_report, "speeds_table", lambda *given: None)
    monkeypatch.setattr(evaluate, "verdict", lambda text, example: Verdict(False, text))
    start = save_untrained(tmp_path / "start")
    lm, method = pretrained.load(start)
    lm.causal_lm.get_input_embeddings().weight.data.mul_(1.5)
    other = pretrained.save(lm, method, tmp_path / "other", {}, "")
    load, loaded = pretrained.load_for_inference, weakref.WeakSet()

    def load_one(*given: Any) -> Any:
        # A GPU may have room for one model only.
        assert not loaded
        lm, method = load(*given)
        loaded.add(lm)
        return lm, method

    monkeypatch.setattr(pretrained, "load_for_inference", load_one)
    rows = [Example("1", "1 + 1?", (), "2"), Example("2", "1 + 2?", (), "3")]
    values: dict[str, Any] = {
        "cot": start, "last": start, "examples": rows, "dtype": "float32",
        "settings": evaluate.AnswerSettings(max_latents=2, max_completion_length=2),
    }  # fmt: skip
    changes: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [2, 2, 2]),
        # Without a chain there is no thought to be cut.
        ({"settings": replace(values["settings"], max_latents=3)}, [2, 0, 2]),
        ({"settings": replace(values["settings"], max_completion_length=3)}, [2, 2, 2]),
        ({"examples": [replace(row, judge="operator:eq") for row in rows]}, [2, 2, 2]),
        ({"examples": [rows[0], replace(rows[1], answer="4")]}, [2, 2, 2]),
        ({"dtype": "bfloat16"}, [2, 2, 2]),
        ({}, [2, 2, 2]),
        ({"last": other}, [0, 0, 2]),
    ]
    for change, n in changes:
        for is_first in (True, False):
            asked.clear()
            auto_speeds.measure_and_publish(AutoFolder(tmp_path / "run"), **values | change)
            # CoT, CoT without a chain and the last stage, each at 4 speeds.
            assert asked == [each if is_first else 0 for each in n for _ in range(4)]
            seconds = files.read_json(tmp_path / "run" / "results" / "records-latents.json")["alone"]
            assert len(seconds) == 4


def test_no_more_questions_are_timed_than_a_minute_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one: other processes wait for these."""
    lm, method = pretrained.load(save_untrained(tmp_path / "start"))
    rows = [Example(str(i), "1 + 1?", (), "2") for i in range(3)]
    model = evaluate.EvaluatedModel("model", lm, method)
    settings = evaluate.AnswerSettings(max_latents=2, max_completion_length=2)
    timed: list[float] = []
    monkeypatch.setattr(auto_speeds.statistics, "median", lambda seconds: timed.append(len(seconds)))
    grid = evaluate.make_grid(model, ["held out"], [method.Params(c) for c in (1, 2)], ["greedy"], [0])
    for limit, n in ((60.0, 3), (1e-9, 1)):
        files.write_json(tmp_path / "records.json", {})
        for _ in range(2):
            assert auto_speeds._time_singly(grid, rows, settings, tmp_path / "records.jsonl", limit)[1] == n
    # Every speed has the questions of the first.
    assert timed == [3, 3, 1, 1]


@pytest.mark.parametrize("changed", ["max_latents", "max_completion_length"])
@pytest.mark.parametrize("grpo", [False, True])
def test_limits_of_a_later_stage_that_no_speed_has_are_said(
    changed: str,
    grpo: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(auto_speeds, "measure_and_publish", lambda *given: taken.append(given[4]))
    stages = prepare_run(AutoCall("tiny", ROWS, tmp_path, grpo=grpo))
    finish(tmp_path, stages)
    assert "validation.limits" not in capsys.readouterr().err
    name = stages[-1].name
    finish(
        tmp_path,
        parsing.load_stages(tmp_path / "recipe.yaml", [f"--stages.{name}.validation.limits.{changed}", "3"]),
    )
    assert f"validation.limits of cot hold for all speeds, not those of {name}" in capsys.readouterr().err
    assert taken[0] == taken[1] == stages[0].recipe.validation.limits


def test_a_cot_that_has_not_learnt_chooses_no_speed() -> None:
    cot, bare = _row("cot", "", 0.03, 20.0), _row("cot", speed_report.NO_CHAIN, 0.0, 0.0)
    own = [_row("sequential", "", 0.05, 20 / c, compression_factor=c) for c in (2, 1)]
    default, sentence = speed_report.choose(Report({}, [cot, bare, *own], []))
    assert default == {"compression_factor": 1}
    assert (
        sentence
        == "CoT answers 3% of 100 held-out questions: it has hardly learnt, and no speed can be chosen by it."
    )


@pytest.mark.parametrize(("n", "chosen"), [(5, 1), (59, 1), (60, 5)])
def test_equal_verdicts_of_few_questions_choose_no_speed(n: int, chosen: int) -> None:
    """Their spread is 0, and yet 3 / n of all questions may differ."""
    cot, bare = _row("cot", "", 1.0, 20.0), _row("cot", speed_report.NO_CHAIN, 0.0, 0.0)
    own = [_row("sequential", "", 1.0, 20 / c, compression_factor=c) for c in (5, 1)]
    rows = [replace(row, n=n) for row in (cot, bare, *own)]
    differences = [Difference(row.system, speed_report.DATASET, cot.system, n, 0.0, 0.0, None) for row in own]
    default, sentence = speed_report.choose(Report({}, rows, differences))
    assert default == {"compression_factor": chosen}
    assert ("too few" in sentence) == (chosen == 1)


def test_without_c_1_the_slowest_speed_is_the_safest() -> None:
    cot, bare = _row("cot", "", 0.8, 20.0), _row("cot", speed_report.NO_CHAIN, 0.0, 0.0)
    own = [_row("sequential", "", 0.79, 20 / c, compression_factor=c) for c in (3, 2)]
    differences = [
        Difference(row.system, speed_report.DATASET, cot.system, 100, -0.01, 0.04, None) for row in own
    ]
    default, sentence = speed_report.choose(Report({}, [cot, bare, *own], differences))
    assert default == {"compression_factor": 2}
    assert "so c = 2 is the default" in sentence


@pytest.mark.parametrize("change", ["no cot", "no speed"])
def test_a_recipe_that_cannot_end_as_auto_does_is_found_before_training(change: str, tmp_path: Path) -> None:
    call, path = AutoCall("tiny", ROWS, tmp_path), tmp_path / "recipe.yaml"
    prepare_run(call)
    tree = yaml_settings.read_yaml(path, path.read_text())
    if change == "no cot":
        del tree["stages"]["cot"]
    else:
        tree["stages"]["sequential"] = {"method": {"name": "coconut"}}
    path.write_text(yaml_settings.yaml_text(tree))
    with pytest.raises(ValueError, match=r"recipe.yaml was changed: .* `colar train .*` trains its stages"):
        prepare_run(call)
    # One stage alone is not measured.
    assert len(prepare_run(call, only=["sequential"])) == 1


def test_a_copied_run_does_not_train_in_the_folder_it_was_copied_from(tmp_path: Path) -> None:
    prepare_run(AutoCall("tiny", ROWS, tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=rf"b/recipe.yaml is of the run in {tmp_path}/a: give --output"):
        prepare_run(AutoCall("tiny", ROWS, tmp_path / "b"))


def test_the_recipe_has_what_the_command_line_set(tmp_path: Path) -> None:
    """The same command without its overrides goes on as the run was begun."""
    words = ["--training.num_train_epochs", "2", "--stages.cot.training.learning_rate", "5e-4"]
    words += ["--model.lora", "{r: 3}", "--template.format", "plain", "--label", "1e-3"]
    made = prepare_run(AutoCall("tiny", ROWS, tmp_path), words)
    assert [stage.recipe.training.num_train_epochs for stage in made] == [2, 2]
    assert [stage.recipe.label for stage in made] == ["1e-3", "1e-3"]
    assert prepare_run(AutoCall("tiny", ROWS, tmp_path)) == made
    assert recipe.load_stages(tmp_path / "recipe.yaml") == made
    head = (tmp_path / "recipe.yaml").read_text().splitlines()[0]
    assert head.startswith("# Made by `colar train auto`, with the keys that its command line set.")


def test_rows_are_known_by_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.write_jsonl("my.jsonl", ROWS)
    calls = [
        AutoCall("tiny", data, tmp_path).to_json()
        for data in ("my.jsonl", "./my.jsonl", tmp_path / "my.jsonl")
    ]
    assert calls[0] == calls[1] == calls[2]
    files.write_jsonl("other.jsonl", ROWS[1:])
    assert AutoCall("tiny", "other.jsonl", tmp_path).to_json() != calls[0]
    # An iterator is read once: the digest leaves its rows to be trained on.
    with pytest.raises(ValueError, match="19 rows are too few to train on"):
        colar.train("tiny", iter(ROWS[:19]), tmp_path / "run")


def test_a_call_that_trained_nothing_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    rows = [row.as_row() for row in sources.load_examples("arithmetic", "train", limit=90)]
    out = tmp_path / "run"
    # Before rows are read.
    with pytest.raises(
        ValueError, match="--epochs 2: unknown key 'epochs', did you mean 'training.num_train_epochs'"
    ):
        prepare_run(AutoCall("tiny", "no/such/file.jsonl", out), ["--epochs", "2"])
    assert not (out / "recipe.yaml").exists()
    assert [stage.name for stage in prepare_run(AutoCall("tiny", rows[:60], out))] == ["cot", "sequential"]
    # Another file is no other run, as long as nothing has been trained.
    [cot] = prepare_run(AutoCall("tiny", rows, out), only=["cot"])
    assert len(list(files.read_jsonl(out / "data" / "train.jsonl"))) == 46
    text = (out / "recipe.yaml").read_text()
    (out / "recipe.yaml").write_text(text.replace("learning_rate: 0.002", "learning_rate: 0.004"))
    [cot] = prepare_run(AutoCall("tiny", rows, out), only=["cot"])
    assert cot.recipe.training.learning_rate == 0.004
    (out / "cot" / "best").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds another run .data was"):
        prepare_run(AutoCall("tiny", rows[:60], out))
    with pytest.raises(ValueError, match="has published no best/ yet: the same command resumes it"):
        checkpoint.check_folder(out)


def test_a_run_gets_the_stage_that_is_added_to_it(tmp_path: Path) -> None:
    """Made by the recipe as a user has changed it."""
    call, path = AutoCall("tiny", ROWS, tmp_path), tmp_path / "recipe.yaml"
    before = prepare_run(call, ["--training.seed", "3"])
    (tmp_path / "cot" / "best").mkdir(parents=True)
    path.write_text(path.read_text().replace("max_completion_length: 6", "max_completion_length: 9"))
    path.write_text(path.read_text().replace("stages:", "# a user's\nstages:"))
    head = path.read_text()
    # A call that is rejected leaves the run as it was.
    for wrong in ("--stages.grpo.grpo.num_generations", "--training.gradient_accumulation_steps"):
        with pytest.raises(ValueError, match="must be a multiple of"):
            prepare_run(replace(call, grpo=True), [wrong, "3"])
        assert path.read_text() == head
        assert len(prepare_run(call)) == 2
    added = prepare_run(replace(call, grpo=True), ["--stages.grpo.training.max_steps", "5"])
    assert [stage.name for stage in added] == ["cot", "sequential", "grpo"]
    limits = before[0].recipe.validation.limits
    assert added[:2] == [
        replace(
            stage,
            recipe=replace(
                stage.recipe,
                validation=replace(stage.recipe.validation, limits=replace(limits, max_completion_length=9)),
            ),
        )
        for stage in before
    ]
    own = added[2].recipe
    assert own.grpo is not None
    assert own.training.max_steps == 5
    assert "# a user's" in path.read_text()
    assert (own.grpo.max_latents, own.grpo.max_completion_length) == (limits.max_latents, 9)
    assert own.model.init_from == f"{tmp_path}/sequential/best"
    assert path.read_text().startswith(head)
    # The same command without its overrides goes on.
    assert prepare_run(replace(call, grpo=True)) == added
    with pytest.raises(ValueError, match="holds another run .grpo was True, now False; method was"):
        prepare_run(AutoCall("tiny", ROWS, tmp_path, method="colar", grpo=False))


def test_a_stage_of_reinforcement_that_a_user_has_added_stays(tmp_path: Path) -> None:
    call, path = AutoCall("tiny", ROWS, tmp_path), tmp_path / "recipe.yaml"
    *_, last = prepare_run(call)
    own = "  grpo: {method: {name: sequential}, grpo: {num_generations: 4}, training: {max_steps: 7}}\n"
    path.write_text(path.read_text() + own)
    for _ in range(2):
        added = prepare_run(replace(call, grpo=True))
        assert added[1].recipe == last.recipe
        assert added[2].recipe.training.max_steps == 7
        assert path.read_text().endswith(own)


@pytest.mark.parametrize("beside", ["index.bin", "model.safetensors"])
def test_the_rows_of_a_folder_are_its_files_whatever_lies_beside_them(beside: str, tmp_path: Path) -> None:
    def identity(rows: str) -> str:
        (tmp_path / "train.jsonl").write_text(rows)
        return str(AutoCall("tiny", tmp_path, tmp_path / "run").to_json()["data"])

    before = identity("1")
    (tmp_path / beside).write_bytes(b"x")
    assert len({before, identity("1"), identity("2")}) == 3


def test_the_notebook_runs_and_what_it_leaves_is_a_model_and_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """examples/quickstart.ipynb from top to bottom, with few short rows and two updates a stage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auto_speeds, "TIMED_SINGLY", 1)
    folder = "runs/quickstart"
    short = ["--training.max_steps", "2", "--training.report_to", "none", "--validation.page_size", "0"]
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for full, shorter in (
        ("limit=2000", 'limit=60, options={"steps": [1, 1]}'),
        (f'"{folder}")\nrun', f'"{folder}", overrides={short})\nrun'),
    ):
        assert text.count(full) == 1
        text = text.replace(full, shorter)
    names: dict[str, Any] = {}
    exec(compile(text, str(NOTEBOOK), "exec"), names)
    assert capsys.readouterr().out.count("thoughts, answer") == 3

    run, rows, model = names["run"], names["rows"], names["model"]
    assert [row[0].removesuffix(" (default)") for row in run.speeds_table.rows] == [
        "CoT", "no chain", "c = 1", "c = 2", "c = 3", "c = 5", "c = 2, threshold 0.8",
    ]  # fmt: skip
    assert run.picture.exists()
    assert "accuracy %" in run.table
    assert "| c = 2 |" in run._repr_markdown_()
    assert run.sentence in run._repr_markdown_()
    # The folder is a model, and asks at the speed that was chosen.
    info = checkpoint.read_info(checkpoint.resolve(folder))
    assert info["method"]["params"] == dict(run.default)
    assert model.method.default_limits == info["method"]["limits"]
    asked = model.ask("Tom has 5 toys and finds 12 more. How many toys does Tom have?")
    assert asked.completion.request.params == registry.make_params(model.method, run.default)
    assert repr(model) == "Model(tiny, method sequential, compression_factor 1)"
    assert "completion" not in repr(asked)
    with pytest.raises(ValueError, match="question must be a text, got ' '"):
        model.ask(" ")

    again = colar.train("tiny", rows, folder, overrides=short)
    assert again.report.rows == run.report.rows
    with pytest.raises(ValueError, match="holds another run .method was 'sequential', now 'colar'"):
        colar.train("tiny", rows, folder, method="colar")
    # A shorter run is another one: what was learnt so far is not its end.
    with pytest.raises(ValueError, match="stage cot has finished, and sequential began from its weights"):
        colar.train("tiny", rows, folder, overrides=["--training.max_steps", "1", *short[2:]])
    # Reinforcement may be added to a run that has ended.
    reinforced = colar.train("tiny", rows, folder, grpo=True, overrides=short)
    assert checkpoint.read_info(Path(folder, "best"))["run"]["recipe"]["grpo"] is not None
    assert reinforced.report.provenance != run.report.provenance
    with pytest.raises(ValueError, match="holds another run .grpo was True, now False"):
        colar.train("tiny", rows, folder)
    # Its recipe, by itself, is one as any other.
    capsys.readouterr()
    assert main(["train", f"{folder}/recipe.yaml", *short]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{folder}/grpo/best"]
    # Commands that name no data take the questions held out, and say what was trained on.
    assert main(["evaluate", folder, "--limit", "2", "--output", "results"]) == 0
    assert f"--data {folder}/data, by default" in capsys.readouterr().err
    for inner in ("best", "cot/best", "cot"):
        assert data_of_runs([f"{folder}/{inner}", folder]).endswith(f"{folder}/data")
    (tmp_path / "runs/other/data").mkdir(parents=True)
    for name in ("asked.json", "data/test.jsonl"):
        (tmp_path / "runs/other" / name).write_text("{}")
    with pytest.raises(ValueError, match="--data is needed: each run held out questions of its own"):
        data_of_runs([folder, "runs/other/best"])
    files.write_jsonl("my.jsonl", rows)
    capsys.readouterr()
    words = ["--data", "my.jsonl", "--limit", "9", "--output", "other"]
    assert main(["evaluate", f"{folder}/best", *words]) == 0
    assert "questions of my" in capsys.readouterr().err
    assert main(["report", f"{folder}/results", "--output", "folded"]) == 0
    # Another run's rows have the same names.
    twin = files.read_json(Path(folder) / "results" / "evaluation.json")
    shutil.copytree(f"{folder}/results", "twin")
    files.write_json("twin/evaluation.json", {**twin, "models": dict.fromkeys(twin["models"], "0")})
    capsys.readouterr()
    assert main(["report", f"{folder}/results", "twin", "--output", "both"]) == 2
    assert "have other checkpoints under one name, cot" in capsys.readouterr().err
    assert main(["generate", folder, "1 + 1?", "--compression_factor", "1", "2"]) == 0
    assert {"[compression_factor 1]", "[compression_factor 2]"} <= set(capsys.readouterr().out.splitlines())

    questions = {}
    for name in ("train", "test"):
        found = files.read_jsonl(Path(folder) / "data" / f"{name}.jsonl")
        questions[name] = {row["question"] for _, row in found}
    assert not questions["train"] & questions["test"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["auto"], "colar train auto needs --model, --data, --output"),
        (
            ["--model", "tiny"],
            "name a recipe: colar train auto --model tiny --data my.jsonl --output runs/mine",
        ),
        (["auto", "--model", "tiny", "--data", "x.jsonl"], "colar train auto needs --output"),
        (["tiny/cot", "--data", "x.jsonl"], "--data is for colar train auto; tiny/cot has keys of its own"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert part in capsys.readouterr().err


def test_spaces_are_left_out_of_equations_whose_signs_they_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        backbones.smollm2_gguf()
    except ValueError as error:
        pytest.skip(f"SmolLM2's tokenizer: {error}")
    rows = [{"question": f"{i} and 5?", "steps": [f"{i} + 5 = {i + 5}"], "answer": i + 5} for i in range(60)]
    folder = tmp_path / "run"
    with prepared(AutoCall("smollm2-135m", rows, folder), []):
        _, own = recipe.load_stages(folder / "recipe.yaml")
    assert own.recipe.method["grouping"] == "equations"
    for split in ("train", "validation", "test"):
        for row in files.resume_jsonl(folder / "data" / f"{split}.jsonl"):
            assert re.fullmatch(r"\d+\+5=\d+", row["steps"][0])
    assert "spaces in equations are left out" in capsys.readouterr().err
