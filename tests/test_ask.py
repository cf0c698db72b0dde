"""`colar.load`: what a model says when asked is what its engine says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from families import liven, save_untrained, tiny_lm

from colar import Decoding, Engine, Request
from colar.ask import Model, load
from colar.checks import NonFiniteError
from colar.methods import pretrained, registry

QUESTIONS = ["Tom has 5 toys. How many?", "Max has 10 shells. How many?", "Ann has 3 pens."]
LIMITS = {"max_latents": 6, "max_completion_length": 5}


def _model(name: str, factors: object = "1..40") -> Model:
    method = registry.build(name, {"sigma_e": 1.0, "compression_factors": factors} if name == "colar" else {})
    lm = tiny_lm("qwen2")
    pretrained.attach(lm, method, 0)
    return Model(liven(lm), method)


@pytest.mark.parametrize("name", ["cot", "colar", "sequential"])
def test_a_list_is_answered_as_the_engine_answers_it(name: str) -> None:
    model = _model(name)
    values = {} if name == "cot" else {"compression_factor": 3}
    answers = model.ask(QUESTIONS, **LIMITS, **values)
    params = registry.make_params(model.method, values)
    requests = [Request(str(i), each, params, Decoding(**LIMITS)) for i, each in enumerate(QUESTIONS)]
    wanted = Engine(model.lm, model.method).generate(requests)
    assert [each.answer for each in answers] == [completion.text for completion in wanted]
    assert [len(each.thoughts) for each in answers] == [completion.length for completion in wanted]
    assert str(answers[0]) == answers[0].answer
    assert answers[0].question == QUESTIONS[0]


# At c = 40 a thought stands for more tokens than are shown of it.
@pytest.mark.parametrize(("name", "c"), [("cot", None), ("colar", 5), ("colar", 40), ("sequential", 5)])
def test_a_stream_is_the_answer_in_pieces(name: str, c: int | None) -> None:
    model = _model(name)
    options = LIMITS if c is None else {**LIMITS, "compression_factor": c}
    whole = model.ask(QUESTIONS[0], **options)
    pieces = list(model.stream(QUESTIONS[0], **options))
    thoughts = [piece.text for piece in pieces if piece.kind == "thought"]
    # Bytes that have become no character at the end of the chain are a piece of their own.
    n = len(whole.thoughts) - 1
    assert (*thoughts[:n], "".join(thoughts[n:])) == whole.thoughts
    assert "".join(piece.text for piece in pieces if piece.kind == "answer") == whole.answer


@torch.no_grad()
def test_numbers_that_are_not_finite_are_an_error() -> None:
    model = _model("cot")
    for weight in model.lm.parameters():
        weight.fill_(torch.nan)
    for answer in (
        lambda: model.ask(QUESTIONS[0], **LIMITS),
        lambda: list(model.stream(QUESTIONS[0], **LIMITS)),
    ):
        with pytest.raises(NonFiniteError, match="question 1 are not finite"):
            answer()


def test_a_speed_that_was_not_trained_warns_its_caller(recwarn: pytest.WarningsRecorder) -> None:
    model = _model("colar", [1, 5])
    model.ask(QUESTIONS, compression_factor=5, **LIMITS)
    list(model.stream(QUESTIONS[0], compression_factor=5, **LIMITS))
    assert not recwarn.list
    for ask in (model.ask, lambda *args, **options: list(model.stream(*args, **options))):
        with pytest.warns(UserWarning, match="compression_factor 3 was not trained") as found:
            ask(QUESTIONS[0], compression_factor=3, **LIMITS)
        assert found[0].filename == __file__


def test_draws_are_those_of_the_seed() -> None:
    model = _model("colar")
    drawn = [model.ask(QUESTIONS[0], decoding="sampled", seed=seed, **LIMITS).thoughts for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_checkpoint_has_a_speed_and_limits_of_its_own(tmp_path: Path) -> None:
    model = _model("colar")
    model.method.default_params = {"compression_factor": 3}
    model.method.default_limits = {"max_latents": 2, "max_completion_length": 3}
    pretrained.save(model.lm, model.method, tmp_path / "best", {}, "")
    for folder in (tmp_path, tmp_path / "best"):
        request = load(folder).ask(QUESTIONS[0]).completion.request
        assert request.params == registry.make_params(model.method, {"compression_factor": 3})
        assert (request.decoding.max_latents, request.decoding.max_completion_length) == (2, 3)
        request = load(folder).ask(QUESTIONS[0], compression_factor=1, max_latents=4).completion.request
        assert (request.params.compression_factor, request.decoding.max_latents) == (1, 4)


def test_a_device_is_a_text_or_torchs_own(tmp_path: Path) -> None:
    folder = save_untrained(tmp_path)
    for device in ("cpu", torch.device("cpu")):
        assert load(folder, device=device).lm.device.type == "cpu"
    for unknown in ("gpu", "xla"):
        with pytest.raises(ValueError, match=f"^device {unknown} cannot be used: "):
            load(folder, device=unknown)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"speed": 2}, "method colar has no speed; it takes compression_factor"),
        ({"decoding": "hot"}, "decoding must be one of greedy, sampled, got 'hot'"),
        ({"compression_factor": 0}, "compression_factor must be a number, 1 or more"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        _model("colar").ask(QUESTIONS[0], **options)
    with pytest.raises(ValueError, match="question must be a text, or a list of at least one"):
        _model("colar").ask([])


@pytest.mark.parametrize(
    ("context", "part"),
    [
        ([("system", "Be brief.")], "a system message"),
        ((("user", "1 + 1?"), ("assistant", "2")), "turns before the question"),
        ([["user", "1 + 1?"], ["system", ""]], "a system message"),
    ],
)
def test_a_chat_is_not_put_to_a_model_of_bare_questions(
    context: Sequence[tuple[str, str]], part: str
) -> None:
    """The plain format would make one text of its turns."""
    model = _model("cot")
    for answer in (
        lambda: model.ask(QUESTIONS, context=context, **LIMITS),
        lambda: next(model.stream(QUESTIONS[0], context=context, **LIMITS)),
    ):
        with pytest.raises(
            ValueError, match=rf"the model has no place for {part} \(template.format: plain\)"
        ):
            answer()
    assert model.ask(QUESTIONS[0], context=[], **LIMITS).answer == model.ask(QUESTIONS[0], **LIMITS).answer
