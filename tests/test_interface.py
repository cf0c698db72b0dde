"""What the one interface lets a method have: modules made of the backbone, modules only training needs, removed options."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm
from torch import Tensor, nn

from colar import files
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import base, pretrained, registry, thinking
from colar.methods.base import Batch, NoParams, Row
from colar.methods.cot import CotConfig
from colar.methods.thinking import ThinkState, Thought
from colar.model import weights
from colar.model.latent_lm import LatentLM
from colar.template.template import Template
from colar.training.config import TrainingConfig
from colar.training.run_folder import RunFolder
from colar.training.sft import train

QUICK = {"report_to": "none", "logging_steps": 1, "save_steps": 2, "learning_rate": 1e-3, "max_steps": 4}
DECODING = Decoding(max_latents=4, max_completion_length=4)


class Supervised(base.Method):
    """Thinks nothing, and says the chain from a decoder that only training has (as SIM-CoT's auxiliary decoder).

    The decoder starts as a copy of the backbone's head; a scale, which inference needs, starts at 1.
    """

    name = "supervised"
    Config = CotConfig

    def training_modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        decoder = nn.Linear(lm.width, lm.config.vocab_size, bias=False)
        decoder.load_state_dict({"weight": lm.causal_lm.get_output_embeddings().weight.detach().clone()})
        return {"decoder": decoder}

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        scale = nn.Linear(1, 1, bias=False)
        nn.init.ones_(scale.weight)
        return {"scale": scale}

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        return base.encode_row(template, example, NoParams(), "", rng.getrandbits(62))

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        hidden_BQD = lm.hidden(lm.embed(batch.question_ids))
        last_BD = hidden_BQD[torch.arange(len(batch.seeds)), batch.question_lengths - 1]
        last_BD = last_BD * lm.extra["scale"].weight[0, 0]
        logits_BV = lm.extra["decoder"](last_BD)
        first_B = batch.answer_ids[:, 1]
        return {"ce": nn.functional.cross_entropy(logits_BV, first_B, reduction="none")}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        assert "decoder" not in lm.extra or lm.training is False
        return thinking.fixed_thought(state, state.hidden * lm.extra["scale"].weight[0, 0], 1)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, Supervised.name, Supervised)


def attached(family: str = "llama") -> tuple[LatentLM, Supervised]:
    lm, method = tiny_lm(family), Supervised(CotConfig())
    pretrained.attach(lm, method, seed=0)
    return lm, method


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_may_be_made_of_the_backbones_weights(family: str) -> None:
    lm, _ = attached(family)
    head = lm.causal_lm.get_output_embeddings().weight
    assert torch.equal(lm.extra["decoder"].weight, head)
    assert lm.extra["decoder"].weight is not head


def test_what_only_training_needs_is_resumed_and_not_published(tmp_path: Path) -> None:
    lm, method = attached()
    before = lm.extra["decoder"].weight.detach().clone()
    result = train(lm, method, EXAMPLES, TrainingConfig(**QUICK), tmp_path / "run")
    trained = {name: module.state_dict()["weight"].clone() for name, module in lm.extra.items()}
    assert not torch.equal(trained["decoder"], before)

    folder = RunFolder(tmp_path / "run").last_resume_state()
    assert folder is not None
    kept = weights.read(folder / weights.MODULES)
    torch.testing.assert_close(kept["decoder.weight"], trained["decoder"], rtol=0, atol=0)

    published = weights.read(result.best / weights.MODULES)
    assert set(published) == {"scale.weight"}
    assert files.read_json(result.best / "colar.json")["modules"] == ["scale"]
    again, loaded = pretrained.load(result.best)
    assert set(again.extra) == {"scale"}
    question = Request("x", EXAMPLES[0].question, NoParams(), DECODING)
    (answer,) = Engine(again, loaded).generate([question])
    (expected,) = Engine(lm.eval(), method).generate([question])
    assert answer.token_ids == expected.token_ids


def test_a_run_resumes_with_what_only_training_needs(tmp_path: Path) -> None:
    """Stopped after two of four updates and resumed, it ends as the run that was never stopped."""
    lm, method = attached()
    train(lm, method, EXAMPLES, TrainingConfig(**QUICK), tmp_path / "whole")
    whole = copy.deepcopy(lm.extra.state_dict())

    lm, method = attached()
    train(lm, method, EXAMPLES, TrainingConfig(**{**QUICK, "max_steps": 2}), tmp_path / "halves")
    lm, method = attached()
    train(lm, method, EXAMPLES, TrainingConfig(**QUICK), tmp_path / "halves")
    assert {key: value.tolist() for key, value in lm.extra.state_dict().items()} == {
        key: value.tolist() for key, value in whole.items()
    }


def test_another_stage_of_training_makes_afresh_what_was_not_published(tmp_path: Path) -> None:
    lm, method = attached()
    with torch.no_grad():
        lm.extra["scale"].weight.fill_(3.0)
        lm.extra["decoder"].weight.fill_(3.0)
    pretrained.save(lm, method, tmp_path / "made", {}, "a card")
    again = pretrained.load_for_training(tmp_path / "made", method, None, "float32", seed=0)
    assert again.extra["scale"].weight.item() == 3.0
    assert torch.equal(again.extra["decoder"].weight, again.causal_lm.get_output_embeddings().weight)
