"""What a run takes: computed from shapes, beside what is measured, and numbers by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from colar import cli, planning, recipe, recipes
from colar.data.synthetic import ArithmeticConfig, generate
from colar.methods import registry
from colar.methods.base import NoParams, Row
from colar.model import tiny
from colar.planning import estimate, hardware, shapes
from colar.planning.plan import backbone_of, shipped_models
from colar.planning.replay import replay
from colar.planning.trace import Work, trace, twin_of
from colar.training import peak, room
from colar.training.sft import train

EXAMPLES = list(generate(ArithmeticConfig(), "train", 8, seed=0))
SMALL = ["--data.train_size", "64", "--data.validation_size", "0", "--output", "unused"]
TINY = ["--model.init_from", "null", "--model.backbone", "tiny"]
ONE_ROW = ["--training.per_device_train_batch_size", "1"]
CHECKPOINTS = ["--training.gradient_checkpointing", "true"]
LORA = ["--model.lora.r", "8", "--training.bf16", "true", "--training.gradient_checkpointing", "true"]

pytestmark = pytest.mark.usefixtures("one_thread")


# Computed beside measured


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny/cot", ["--training.per_device_train_batch_size", "32"]),
        ("tiny/cot", ["--training.per_device_train_batch_size", "32", *LORA]),
        ("tiny/colar", [*TINY, "--training.per_device_train_batch_size", "16"]),
        ("tiny/colar", [*TINY, "--training.tokens_per_batch", "600"]),
        ("tiny/cot", ["--method.name", "distill"]),
        ("tiny/cot", [*ONE_ROW, *CHECKPOINTS, "--training.gradient_accumulation_steps", "4"]),
        ("tiny/cot", [*ONE_ROW, "--training.tokens_per_batch", "100000"]),
        ("tiny/cot", ["--training.per_device_train_batch_size", "4", "--training.tokens_per_batch", "80"]),
    ],
    ids=["full", "adapter-checkpoints-bf16", "colar", "parts", "distill", "accumulated", "one-part", "rows"],
)
def test_memory_of_a_plan_is_what_a_check_measures(name: str, keys: list[str]) -> None:
    """Within 15%, whatever is trained and recomputed. Where a batch is small, gradients are a quarter of it all."""
    made = recipe.load(name, [*SMALL, *keys])
    computed = planning.plan(made, "h100").peak_bytes
    measured = planning.check(made).peak_bytes
    assert computed == pytest.approx(measured, rel=0.15)


# Shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
    ],
)
def test_known_shapes_have_their_models_parameters(name: str, parameters: int) -> None:
    """As the Hub's pages say."""
    mode = FakeTensorMode()
    lm = shapes.without_memory(shapes.find(name), registry.build("cot", {}), "bfloat16", None, mode)
    assert sum(weight.numel() for weight in lm.parameters()) == parameters
    # Rotary frequencies are all that there is beside the weights.
    assert peak.held(lm) == pytest.approx(2 * parameters, rel=1e-4)


def test_every_shipped_recipe_has_known_shapes() -> None:
    """Also where it starts from another recipe's weights, which are not there."""
    found = shipped_models()
    assert len(found) == len(recipes.names())
    for output in found:
        backbone = backbone_of(recipe.Recipe("unused", model=recipe.ModelConfig(init_from=f"{output}/best")))
        assert backbone in tiny.DIGITS or backbone in shapes.KNOWN, output
    with pytest.raises(ValueError, match="no shipped recipe writes it"):
        backbone_of(recipe.Recipe("unused", model=recipe.ModelConfig(init_from="nowhere/best")))


@pytest.mark.parametrize(
    ("text", "digits", "pieces"),
    [
        ("Tom has 1234 apples.", 3, ["Tom", " has", " ", "123", "4", " apples", "."]),
        ("Tom has 1234 apples.", 1, ["Tom", " has", " ", "1", "2", "3", "4", " apples", "."]),
        ("<<3*4=12>>", 2, ["<<", "3", "*", "4", "=", "12", ">>"]),
        ("a\n\nb\\frac c", 3, ["a", "\n\n", "b", "\\frac", " c"]),
    ],
)
def test_tokens_are_counted_as_llama_cuts_a_text(text: str, digits: int, pieces: list[str]) -> None:
    tokenizer = shapes.counting_tokenizer(digits)
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces
    # One id for all, but for what groups may be cut by.
    known = {"=": 4} | {str(digit): 5 + digit for digit in range(10)}
    assert tokenizer(text)["input_ids"] == [known.get(piece, 0) for piece in pieces]


# Work


def row(question: int, chain: int, answer: int) -> Row:
    return Row([0] * question, [[0] * chain], [0] * answer, NoParams(), 0)


def test_the_work_of_cot_by_hand() -> None:
    """Two rows of 5 + 7 + 3 and 4 + 2 + 3: padded to 16 positions; labels are the chain's and the answer's tokens."""
    method = registry.build("cot", {})
    twin = twin_of(method, EXAMPLES)
    work = trace(twin, method, [row(5, 7, 3), row(4, 2, 3)], twin.template)
    assert work.passes == [[2, 16]]
    assert work.logits == [7 + 3 + 2 + 3]
    assert work.modules == []


def test_thoughts_that_extend_a_cache_are_one_forward() -> None:
    """Coconut: the question, its thoughts one by one, the rest."""
    method = registry.build("coconut", {"epochs_per_stage": 1, "n_stages": 2})
    twin = twin_of(method, EXAMPLES)
    rows = [method.encode(twin.template, each, Random(0), 5.0) for each in EXAMPLES[:2]]
    work = trace(twin, method, rows, twin.template)
    (only,) = work.passes
    widest = max(len(each.question) for each in rows)
    assert only[0] == 2
    assert only[1] >= widest + max(each.n_latents for each in rows)


def test_products_are_six_a_weight_and_position() -> None:
    """Training all weights: two of the forward, four of the backward. Attention and the embedding are beside it."""
    mode = FakeTensorMode()
    shape = shapes.find("smollm2-135m")
    lm = shapes.without_memory(shape, registry.build("cot", {}), "float32", None, mode)
    found = replay(lm, Work([[2, 64]], [128], []), False, mode)
    weights = sum(weight.numel() for weight in lm.parameters())
    assert found.flops == pytest.approx(6 * weights * 128, rel=0.05)


# Numbers by hand


def test_a_ring_by_hand() -> None:
    """Eight cards send 7/8 of 8 GB twice, at 450 GB a second; sixteen at the network's 50."""
    card = hardware.GPUS["h100"]
    assert hardware.all_reduce_seconds(card, 1, 8e9) == 0
    assert hardware.all_reduce_seconds(card, 8, 8e9) == pytest.approx(14 / 450)
    assert hardware.all_reduce_seconds(card, 16, 8e9) == pytest.approx(15 / 50)


@pytest.mark.parametrize(("gpu", "count", "part"), [("h1000", 1, "--gpu"), ("h100", 0, "--count")])
def test_unknown_cards_are_rejected(gpu: str, count: int, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        hardware.find(gpu, count)


def test_disk_is_that_of_a_run(tmp_path: Path) -> None:
    """The best weights, and a checkpoint with moments; while the next is written, one more."""
    made = recipe.load("tiny/cot", ["--output", str(tmp_path / "run"), "--training.save_steps", "1"])
    lm, method = recipe.load_model(made)
    trained = peak.trained(lm)
    train(lm, method, EXAMPLES, _steps(made, 2), tmp_path / "run")
    kinds = (".safetensors", ".pt", ".bin")
    found = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.suffix in kinds)
    assert found == pytest.approx(estimate.disk(trained, 2, 2) - 3 * trained, rel=0.1)


def _steps(made: recipe.Recipe, n: int) -> Any:
    return dataclasses.replace(made.training, max_steps=n, report_to="none")


# Rows that are elsewhere


def test_a_part_of_the_rows_stands_for_all_of_them() -> None:
    """Ten times the rows, of the same lengths: ten times the time (less padding, by wider pools), the same memory."""
    made = recipe.load("tiny/cot", [*SMALL, "--training.per_device_train_batch_size", "8"])
    part = planning.plan(made, "h100")
    whole = planning.plan(made, "h100", as_many=640)
    assert whole.numbers["an epoch"] == pytest.approx(10 * part.numbers["an epoch"], rel=0.1)
    assert whole.peak_bytes == pytest.approx(part.peak_bytes, rel=0.02)
    said = [" ".join(line.split()) for line in whole.text()]
    assert "rows 640 as long as the 64 at hand" in said
    assert not any("at hand" in line for line in part.text())


@pytest.mark.parametrize("count", [0, -1])
def test_a_number_of_rows_is_checked(count: int) -> None:
    with pytest.raises(ValueError, match="rows must be a whole number, 1 or more"):
        planning.plan(recipe.load("tiny/cot", SMALL), "h100", as_many=count)


# What does not fit


def planned_on(monkeypatch: pytest.MonkeyPatch, mebibytes: float, keys: Sequence[str]) -> estimate.Estimate:
    """`tiny/cot` on a card whose tensors get this much."""
    memory_gib = mebibytes / 1024 / hardware.USABLE
    monkeypatch.setitem(hardware.GPUS, "small", hardware.Gpu("small", memory_gib, 100, 1000, 100))
    rows = ["--training.per_device_train_batch_size", "32"]
    return planning.plan(recipe.load("tiny/cot", [*SMALL, *rows, *keys]), "small")


@pytest.mark.parametrize("method", ["cot", "distill"])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_run_that_does_not_fit_says_what_would(
    monkeypatch: pytest.MonkeyPatch, method: str, share: float
) -> None:
    """Also where fewer than 1,024 positions fit; and where a batch is two sequences a row, as in Distill."""
    keys = ["--method.name", method]
    whole = planned_on(monkeypatch, 1000, keys)
    assert whole.problems == []
    mebibytes = share * whole.peak_bytes / 2**20
    (problem,) = planned_on(monkeypatch, mebibytes, keys).problems
    assert problem.startswith(f"{estimate.gib(whole.peak_bytes)} of 0 GiB: set training.tokens_per_batch ")
    assert problem.endswith(" or training.gradient_checkpointing true")
    tokens = problem.partition("tokens_per_batch ")[2].split()[0]
    assert planned_on(monkeypatch, mebibytes, [*keys, "--training.tokens_per_batch", tokens]).problems == []


WEIGHTS = "weights, moments and gradients alone take "
FLOAT32_LORA = ["--model.lora.r", "8"]
ADAPTER = "train an adapter (model.lora) of weights in bfloat16 (model.dtype)"
FSDP = "divide the weights between several cards (training.fsdp)"
OTHER = "take a smaller backbone or a device with more memory"


@pytest.mark.parametrize(
    ("mebibytes", "keys", "says"),
    [
        # Four bytes of each of 0.8 M weights, of their gradients, and of two moments: 12.8 MiB.
        (12, [], f"{ADAPTER}, {FSDP}, {OTHER}"),
        (12, ["--method.name", "coconut"], f"{ADAPTER}, {OTHER}"),
        # Not even an adapter: the weights alone are 1.6 MiB in bfloat16.
        (1, [], f"{FSDP}, {OTHER}"),
        (3, FLOAT32_LORA, f"keep the backbone's weights in bfloat16 (model.dtype), {FSDP}, {OTHER}"),
        (1, [*FLOAT32_LORA, "--model.dtype", "bfloat16"], f"{FSDP}, {OTHER}"),
    ],
    ids=["full", "coconut", "no-adapter", "adapter-float32", "adapter"],
)  # fmt: skip
def test_where_weights_alone_do_not_fit_parts_of_a_batch_are_not_advised(
    monkeypatch: pytest.MonkeyPatch, mebibytes: float, keys: list[str], says: str
) -> None:
    (problem,) = planned_on(monkeypatch, mebibytes, keys).problems
    _, _, advice = problem.partition(": ")
    assert advice.startswith(WEIGHTS)
    assert advice.partition(": ")[2] == says


def test_an_advice_that_is_followed_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row needs more than is left beside the weights: no number of positions helps."""
    (problem,) = planned_on(monkeypatch, 13, []).problems
    assert problem.endswith(" of 0 GiB: set training.gradient_checkpointing true")
    (problem,) = planned_on(monkeypatch, 13, CHECKPOINTS).problems
    assert "set training" not in problem
    assert "which leaves too little for the longest row: train an adapter (model.lora)" in problem


def test_reinforcement_is_not_advised_to_divide_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.GPUS, "small", hardware.Gpu("small", 0.001, 100, 1000, 100))
    (problem,) = planning.plan(recipe.load("tiny/grpo", SMALL), "small").problems
    assert WEIGHTS in problem
    assert "fsdp" not in problem


@pytest.mark.parametrize(
    ("mebibytes", "keys", "says"),
    [
        (12, [], [WEIGHTS, ADAPTER, FSDP, OTHER]),
        (12, ["--method.name", "coconut"], [WEIGHTS, ADAPTER, OTHER]),
        (1, FLOAT32_LORA, [WEIGHTS, FSDP, OTHER]),
        (14, [], ["lower training.tokens_per_batch", ", or set training.gradient_checkpointing true"]),
        (14, CHECKPOINTS, ["lower training.tokens_per_batch"]),
        (12.95, [*CHECKPOINTS, *ONE_ROW], ["which leaves too little for the longest row", ADAPTER]),
    ],
    ids=["full", "coconut", "adapter", "batch", "checkpoints", "one-row"],
)
def test_a_check_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch, mebibytes: float, keys: list[str], says: list[str]
) -> None:
    """On a device with this much memory. Nothing that is no help, or is done already."""
    monkeypatch.setattr(room, "memory_of", lambda device: int(mebibytes * 2**20))
    (problem,) = planning.check(recipe.load("tiny/cot", [*SMALL, *keys])).problems
    everything = [
        WEIGHTS,
        ADAPTER,
        FSDP,
        OTHER,
        "lower training.tokens_per_batch",
        "set training.gradient_check",
    ]
    for part in says:
        assert part in problem
    for part in everything:
        assert (part in problem) == any(part in each for each in [*says, *implied(says)]), part


def implied(says: list[str]) -> list[str]:
    """What comes along with "too little for the longest row": the advice of weights that do not fit."""
    return [WEIGHTS, FSDP, OTHER] if any("longest row" in each for each in says) else []


# Commands


def test_a_check_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    keys = ["--data.train_size", "24", "--data.validation_size", "4", "--output", str(folder)]
    torch.manual_seed(0)
    assert cli.main(["train", "tiny/cot", "--check", *keys]) == 0
    shown = capsys.readouterr().out
    for what in ("peak memory", "an epoch", "a validation", "checkpoints on disk"):
        assert what in shown
    assert not folder.exists()


def test_a_check_finds_a_held_out_chain_that_training_could_not_take(tmp_path: Path) -> None:
    """Its question fits, so only the loss at the first validation would fail."""
    rows = tmp_path / "rows.jsonl"
    row = {"id": "far", "question": "How many?", "steps": ["1 " * 1100], "answer": "1"}
    rows.write_text(json.dumps(row) + "\n")
    keys = ["--data.train_size", "8", "--data.validation_source", str(rows), "--data.validation_size", "1"]
    made = recipe.load("tiny/cot", [*keys, "--output", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="far: the row has"):
        planning.check(made)


def test_plan_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny/cot", "--gpu", "a100", "--count", "8", *SMALL]) == 0
    assert "tiny on 8 x a100" in capsys.readouterr().out
    assert cli.main(["plan", "tiny/cot", "--gpu", "x", *SMALL]) == 2
    assert "--gpu" in capsys.readouterr().err


def test_nothing_is_said_of_the_twins_words(capsys: pytest.CaptureFixture[str]) -> None:
    twin_of(registry.build("colar", {"head": "sequential", "shortlist": True}), EXAMPLES)
    assert capsys.readouterr().err == ""
