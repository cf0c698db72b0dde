"""How a group's tokens become a latent: `merge: ordered` by plain loops, and what a plain sum cannot tell."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, tiny_lm
from sequential import encoded, latent, made, matrices

from colar import files
from colar.engine import reference
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch
from colar.methods.sequential import SequentialParams
from colar.methods.sequential.merging import PlaceMaps, merge_chains, merge_groups
from colar.model import weights


def test_it_starts_as_the_plain_sum() -> None:
    """From the same start, the first loss of `ordered` is that of `sqrt`."""
    lm, method = made(compression_factors=[3])
    batch = Batch.collate(encoded(lm, method))
    plain = method.loss(lm, batch)["ce"]
    lm.add_modules({"place_maps": PlaceMaps(lm.width, 3)})
    ordered = registry.build("sequential", {"compression_factors": [3], "merge": "ordered"})
    torch.testing.assert_close(ordered.loss(lm, batch)["ce"], plain)


def test_each_place_has_its_map_and_the_first_has_none() -> None:
    lm, _ = made(compression_factors=[3], merge="ordered")
    ids = torch.tensor([[[5, 6, 7], [8, 9, -1]], [[7, 6, 5], [-1, -1, -1]]])
    found = merge_groups(lm, ids)
    torch.testing.assert_close(found[0, 0], latent(lm, [5, 6, 7]))
    torch.testing.assert_close(found[0, 1], latent(lm, [8, 9]))
    torch.testing.assert_close(found[1, 0], latent(lm, [7, 6, 5]))
    assert not found[1, 1].any()
    # The order of tokens is seen, which a plain sum has lost.
    assert not torch.allclose(found[0, 0], found[1, 0], atol=0.1)


def test_chains_are_merged_group_by_group() -> None:
    lm, _ = made(compression_factors=[3], merge="ordered")
    chains = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]])
    sizes = torch.tensor([[2, 3], [1, 2]])
    found = merge_chains(lm, chains, sizes)
    for row, k, ids in ((0, 0, [11, 12]), (0, 1, [13, 14, 15]), (1, 0, [21]), (1, 1, [22, 23])):
        torch.testing.assert_close(found[row, k], latent(lm, ids))


def test_the_maps_are_trained_and_c_1_needs_none() -> None:
    lm, method = made(compression_factors=[1, 3], merge="ordered")
    rows = encoded(lm, method, times=4)
    batch = Batch.collate([row for row in rows if row.params.compression_factor == 3])
    method.loss(lm, batch)["ce"].sum().backward()
    for weight in lm.extra["place_maps"].parameters():
        assert (weight.grad.abs().sum((1, 2)) > 0).all()
    assert "place_maps" not in made(compression_factors=[1], merge="ordered")[0].extra


def test_a_wrong_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="method.merge must be one of sqrt, ordered, got 'mean'"):
        registry.build("sequential", {"merge": "mean"})


def test_a_checkpoint_keeps_its_maps(tmp_path: Path) -> None:
    lm, method = made(compression_factors=[3], merge="ordered")
    pretrained.save(lm, method, tmp_path / "model", {}, "")
    again, method_again = pretrained.load(tmp_path / "model")
    assert method_again.config.merge == "ordered"
    torch.testing.assert_close(matrices(again.extra["place_maps"]), matrices(lm.extra["place_maps"]))
    decoding = Decoding(max_latents=5, max_completion_length=4)
    request = Request("a", EXAMPLES[0].question, SequentialParams(3), decoding, 0, keep_latents=True)
    ours, theirs = reference.complete(lm, method, request), reference.complete(again, method_again, request)
    assert (ours.token_ids, ours.length) == (theirs.token_ids, theirs.length)
    assert ours.length > 0
    # What it fed is what training feeds.
    separator = lm.template.separator_id
    for fed, info in zip(ours.latents, ours.thought_info(), strict=False):
        ids = [i for i in info["group_ids"].tolist() if i not in (-1, separator)]
        torch.testing.assert_close(fed, latent(lm, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_does_not_round_what_is_fed(dtype: torch.dtype) -> None:
    lm, _ = made(compression_factors=[3], merge="ordered")
    ids = torch.tensor([[5, 6, 7]])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = merge_groups(lm, ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], latent(lm, [5, 6, 7]))


def test_two_digits_are_told_apart_only_in_order() -> None:
    """Two orders of the same tokens, at c = 2: one latent as a plain sum, two where places have maps."""
    lm = tiny_lm("llama")
    ids = torch.tensor([[5, 6], [6, 5]])
    plain: Any = merge_groups(lm, ids)
    torch.testing.assert_close(plain[0], plain[1])
    torch.testing.assert_close(plain[0], lm.embed(ids[0]).sum(0) / math.sqrt(2))
    ordered, _ = made(compression_factors=[2], merge="ordered")
    found = merge_groups(ordered, ids)
    assert not torch.allclose(found[0], found[1], atol=0.1)


@pytest.mark.parametrize("grouping", ["tokens", "equations"])
def test_mapping_each_token_once_is_mapping_each_place(grouping: str) -> None:
    """Values and gradients are those of the maps at every place, with a matrix product each."""
    lm, method = made(compression_factors=[3], merge="ordered", digits=True, grouping=grouping)
    equations = method.equations(lm)
    digits = lm.template.token_ids(tuple("0123456789"), "")
    torch.manual_seed(0)
    ids = torch.tensor([5, 6, *digits])[torch.randint(0, 12, (4, 6, 3))]
    real = torch.arange(3) < torch.randint(0, 4, (4, 6, 1))
    weight = torch.randn(lm.width)

    def gradients(latents: torch.Tensor) -> dict[str, torch.Tensor]:
        lm.zero_grad()
        (latents @ weight).square().sum().backward()
        return {name: each.grad.clone() for name, each in lm.named_parameters() if each.grad is not None}

    found = merge_groups(lm, torch.where(real, ids, -1))
    mine = gradients(found)
    embeds = lm.embed(torch.where(real, ids, 0))
    unit = torch.arange(3).expand(ids.shape)
    if equations is not None:
        unit, digit = equations.units_and_digits(torch.where(real, ids, -1))
        embeds = lm.extra["digit_maps"](embeds, digit)
    embeds = lm.extra["place_maps"](embeds, unit)
    expected = (embeds * real[..., None]).sum(-2) / real.sum(-1, keepdim=True).clamp(min=1).sqrt()
    torch.testing.assert_close(found, expected)
    theirs = gradients(expected)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5)


# Maps to start from


def random_maps(width: int, places: int) -> PlaceMaps:
    maps = PlaceMaps(width, places)
    for weight in maps.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return maps


def test_a_map_is_what_its_matrix_says() -> None:
    maps = random_maps(8, 4)
    embeds = torch.randn(5, 3, 8)
    places = torch.randint(0, 4, (5, 3))
    by_matrix = torch.zeros_like(embeds)
    for row in range(5):
        for g in range(3):
            place = int(places[row, g])
            matrix = torch.eye(8) if place == 0 else matrices(maps)[place - 1]
            by_matrix[row, g] = matrix @ embeds[row, g]
    torch.testing.assert_close(maps(embeds, places), by_matrix, rtol=1e-4, atol=1e-5)


def test_maps_start_from_those_of_a_checkpoint() -> None:
    """Places that it has not seen start as the plain sum, and those that are no longer there are left out."""
    before = random_maps(8, 3)
    more, fewer = PlaceMaps(8, 5), PlaceMaps(8, 2)
    more.start_from(before.state_dict())
    fewer.start_from(before.state_dict())
    torch.testing.assert_close(matrices(more)[:2], matrices(before))
    torch.testing.assert_close(matrices(more)[2:], torch.eye(8).repeat(2, 1, 1))
    torch.testing.assert_close(matrices(fewer), matrices(before)[:1])


@pytest.mark.parametrize("merge", ["ordered", "sqrt"])
def test_maps_that_a_checkpoint_lacks_start_as_the_identity(tmp_path: Path, merge: str) -> None:
    """c from 1 up, or other ways to merge in the next stage: the first had no maps of places."""
    lm, method = made(compression_factors=[1], merge=merge)
    assert "place_maps" not in lm.extra
    folder = pretrained.save(lm, method, tmp_path / "first", {}, "")
    wider = registry.build("sequential", {"compression_factors": [1, 3], "merge": "ordered"})
    again = pretrained.load_for_training(folder, wider, None, "float32", seed=0)
    maps = again.extra["place_maps"]
    assert isinstance(maps, PlaceMaps)
    torch.testing.assert_close(matrices(maps), torch.eye(lm.width).repeat(2, 1, 1))
    decoders = (again.extra["group_decoder"].state_dict(), lm.extra["group_decoder"].state_dict())
    torch.testing.assert_close(*decoders)
    # What is asked, and not trained further, must have all of its modules.
    with pytest.raises(ValueError, match='(?s)does not fit the method.s modules: .*"place_maps.up"'):
        weights.load_modules(again.extra, folder)


def test_maps_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"maps of \(4, 32\) do not fit those of \(8, 32\)"):
        PlaceMaps(8, 3).start_from(PlaceMaps(4, 3).state_dict())


def test_training_goes_on_from_other_maps_and_thinking_does_not(tmp_path: Path) -> None:
    """`init_from` takes over maps of fewer places; a checkpoint that is loaded must have its own."""
    lm, method = made(compression_factors=[2], merge="ordered")
    folder = tmp_path / "model"
    pretrained.save(lm, method, folder, {}, "")
    other = registry.build("sequential", {"compression_factors": [4], "merge": "ordered"})
    again = pretrained.load_for_training(folder, other, None, "float32", seed=0)
    started = matrices(again.extra["place_maps"])
    torch.testing.assert_close(started[0], matrices(lm.extra["place_maps"])[0])
    assert len(started) == 3
    for name, weight in lm.extra["group_decoder"].state_dict().items():
        torch.testing.assert_close(again.extra["group_decoder"].state_dict()[name], weight)

    info = files.read_json(folder / "colar.json")
    info["method"]["config"]["compression_factors"] = [4]
    files.write_json(folder / "colar.json", info)
    with pytest.raises(ValueError, match=r"modules.safetensors does not fit the method's modules"):
        pretrained.load(folder)
