"""Checkpoints of earlier versions, whose sequential method was `colar` with `head: sequential`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, tiny_lm
from sequential import made
from torch import Tensor

from colar import files, recipe
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation.names import name_checkpoints
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

OLD: dict[str, Any] = {
    "compression_factors": [1, 2, 3],
    "merge": "ordered",
    "merge_rank": 32,
    "unit": "result",
    "numbers_from": 2,
    "alone": ["="],
    "starts": ["+", "-", "*", "/"],
    "head": "sequential",
    "latent_loss": "soft_mse",
    "alpha": 0.02,
    "nll_beta": 0.0,
    "supervise_chain": True,
    "chain_label": "expected",
    "stop": "majority",
    "comp_weight": 1.0,
    "latent_weight": 1.0,
    "lookahead_weight": 0.0,
    "confidence_thresholds": [0, 0.8],
    "threshold_on": "number",
    "shortlist": False,
    "shortlist_ids": None,
    "sigma_e": 0.1355768468868656,
}
"""The config of checkpoints/smollm2-135m-gsm as the version that trained it wrote it, its numbers apart."""
PLAIN = {"unit": "token", "numbers_from": 1, "alone": [], "starts": [], "threshold_on": "token"}
NEW = {"compression_factors": [1, 2, 3], "merge": "ordered", "confidence_thresholds": [0, 0.8]}


def old_folder(folder: Path, lm: LatentLM, method: Method, config: dict[str, Any]) -> Path:
    """A checkpoint of `method` with the `method` entry of an earlier version."""
    pretrained.save(lm, method, folder, {"seed": 0, "label": "sequential"}, "a card")
    info = files.read_json(folder / "colar.json")
    info["method"] = {"name": "colar", "config": config}
    files.write_json(folder / "colar.json", info)
    return folder


def thoughts(lm: LatentLM, method: Method) -> list[tuple[list[int], list[list[int]], list[Tensor]]]:
    decoding = Decoding(max_latents=6, max_completion_length=4)
    requests = []
    for i, example in enumerate(EXAMPLES):
        params = method.Params(1 + i % 3, confidence_threshold=(0, 0.8)[i % 2])
        requests.append(Request(example.id, example.question, params, decoding, i, keep_latents=True))
    found = []
    for done in Engine(lm, method, 4).generate(requests):
        groups = [info["group_ids"].tolist() for info in done.info]
        found.append((done.token_ids, groups, done.latents))
    return found


@pytest.mark.parametrize(("before", "grouping"), [({}, "equations"), (PLAIN, "tokens")])
def test_it_thinks_as_before(tmp_path: Path, before: dict[str, Any], grouping: str) -> None:
    lm, method = made(live=True, digits=True, grouping=grouping, **NEW)
    folder = old_folder(tmp_path / "old", lm, method, OLD | before)
    again, converted = pretrained.load(folder)
    assert converted.name == "sequential"
    assert converted.config == method.config
    again.causal_lm.get_output_embeddings().bias = lm.causal_lm.get_output_embeddings().bias
    for mine, theirs in zip(thoughts(again, converted), thoughts(lm, method), strict=True):
        assert mine[:2] == theirs[:2]
        torch.testing.assert_close(mine[2], theirs[2])


def test_its_rows_name_the_method_that_it_is_now(tmp_path: Path) -> None:
    lm, method = made(digits=True, grouping="equations", **NEW)
    folder = old_folder(tmp_path / "old", lm, method, OLD)
    (name,) = name_checkpoints([("m", str(folder))], None)
    assert (name.method, name.label) == ("sequential", "sequential")


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    lm, method = made(digits=True, grouping="equations", **NEW)
    folder = old_folder(tmp_path / "old", lm, method, OLD)
    fresh = registry.build("sequential", {"grouping": "equations", **NEW})
    again = pretrained.load_for_training(folder, fresh, None, "float32", seed=3)
    for name, weight in lm.extra.state_dict().items():
        assert torch.equal(again.extra.state_dict()[name], weight)
    # Reinforcement takes the method as it was trained.
    text = f"output: {tmp_path / 'run'}\nmodel: {{init_from: {folder}}}\nmethod: {{name: sequential}}\ngrpo: {{}}\n"
    (tmp_path / "grpo.yaml").write_text(text)
    reinforced = recipe.load_method(recipe.load(tmp_path / "grpo.yaml"))
    assert reinforced.config == method.config


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (OLD | {"unit": "number"}, "unit 'number'"),
        (OLD | {"numbers_from": 1}, "numbers_from 1"),
        (OLD | {"alone": []}, r"alone \[\]"),
        (OLD | {"starts": ["+"]}, r"starts \['\+'\]"),
        (OLD | PLAIN | {"alone": ["="]}, r"alone \['='\]"),
        (OLD | {"threshold_on": "token"}, "threshold_on 'token'"),
        (OLD | {"merge": "mean"}, "merge 'mean'"),
        (OLD | {"merge_rank": None}, "merge_rank None"),
        ({"head": "anchored"}, "head 'anchored'"),
        ({"own_latents": 0.5}, "own_latents 0.5"),
    ],
    ids=str,
)
def test_what_is_gone_is_refused_by_name(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    lm, method = tiny_lm("llama"), registry.build("colar", {"sigma_e": 1.0})
    pretrained.attach(lm, method, seed=0)
    folder = old_folder(tmp_path / "old", lm, method, config)
    expected = (
        f"old: trained with method.{key}, an option that this version no longer has; load it with the version"
    )
    with pytest.raises(ValueError, match=expected):
        pretrained.load(folder)


def test_options_of_colar_that_were_off_are_dropped(tmp_path: Path) -> None:
    lm, method = tiny_lm("llama"), registry.build("colar", {"sigma_e": 1.0})
    pretrained.attach(lm, method, seed=0)
    config = {**OLD, **PLAIN, "head": "gaussian", "merge": "sqrt", "merge_rank": None, "sigma_e": 1.0}
    config |= {"confidence_thresholds": [0], "own_latents": 0.0}
    _, again = pretrained.load(old_folder(tmp_path / "old", lm, method, config))
    assert again.name == "colar"
    assert again.config.compression_factors == (1, 2, 3)
    with pytest.raises(ValueError, match="unknown key 'method.nonsense'"):
        pretrained.load(old_folder(tmp_path / "newer", lm, method, {"nonsense": 1}))


def test_number_tokens_are_refused(tmp_path: Path) -> None:
    lm, method = tiny_lm("llama"), registry.build("cot")
    folder = pretrained.save(lm, method, tmp_path / "old", {}, "a card")
    template = files.read_json(folder / "template.json")
    files.write_json(folder / "template.json", {**template, "number_tokens": None, "first_number_id": None})
    assert pretrained.load(folder)[1].name == "cot"
    files.write_json(folder / "template.json", {**template, "number_tokens": 99, "first_number_id": 7})
    with pytest.raises(ValueError, match="trained with model.number_tokens 99, an option that this version"):
        pretrained.load(folder)


def test_an_old_recipe_is_told_the_new_name(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        f"output: {tmp_path / 'run'}\nmethod: {{name: colar, head: sequential, unit: result}}\n", "utf-8"
    )
    with pytest.raises(
        ValueError, match="write method.name sequential and leave method.head out; unit, alone"
    ):
        recipe.load(path)


def test_keys_that_are_constants_now_are_dropped_where_they_had_that_value() -> None:
    old = {"n_latents": 4, "projection": True, "align_loss": "smooth_l1", "align_scale": True}
    found = registry.rebuild({"name": "distill", "config": old}, "here")
    assert (found.name, found.config.n_latents) == ("distill", 4)
    registry.rebuild({"name": "tokenskip", "config": {"scorer": "surprisal", "scorer_model": "x"}}, "here")
    with pytest.raises(
        ValueError, match="here: trained with method.projection False, an option that this version"
    ):
        registry.rebuild({"name": "distill", "config": {**old, "projection": False}}, "here")
