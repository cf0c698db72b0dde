"""The tables at the heads of the paper's recipes are those of the recipes as they are (scripts/write_plans.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from colar import recipe, recipes

SCRIPT = Path(__file__).parent.parent / "scripts" / "write_plans.py"


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_plans", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def text_of(name: str) -> str:
    return Path(str(recipes.find(name))).read_text(encoding="utf-8")


def test_every_recipe_of_the_papers_models_has_its_own_table(plans: ModuleType) -> None:
    """After a change: python scripts/write_plans.py NAME."""
    assert len(plans.names()) == 19
    outdated = []
    for name in plans.names():
        if f"{plans.BEGIN} recipe {plans.digest(name)}\n" not in text_of(name):
            outdated.append(name)
    assert not outdated


def test_a_table_is_for_as_many_cards_as_its_recipes_commands(plans: ModuleType) -> None:
    """Reinforcement has no command for eight: they would multiply the outputs of an update by eight."""
    for name in plans.names():
        text = text_of(name)
        assert ("torchrun --nproc_per_node 8" in text) == (recipe.load(name, []).grpo is None), name
        cards = 8 if "torchrun" in text else 1
        assert f" on {cards} x {plans.GPU} (" in text, name
        if cards == 1:
            assert "32 outputs, without their sampling" in text, name


def test_no_table_says_that_its_recipe_does_not_fit(plans: ModuleType) -> None:
    for name in plans.names():
        assert "does not fit" not in text_of(name), name


def test_a_table_takes_the_place_of_the_one_before(plans: ModuleType) -> None:
    text = "# A recipe.\n#\n#   colar train x\noutput: x\n# not the head\n"
    once = plans.with_plan(text, ["# plan: recipe 1", "#   a", "# end of plan"])
    assert once.splitlines()[2:7] == ["#   colar train x", "#", "# plan: recipe 1", "#   a", "# end of plan"]
    twice = plans.with_plan(once, ["# plan: recipe 2", "#   b", "#   c", "# end of plan"])
    assert twice.replace("recipe 2", "recipe 1").replace("#   b\n#   c", "#   a") == once
    assert twice.endswith("output: x\n# not the head\n")


@pytest.mark.usefixtures("real_data")
def test_a_table_is_what_is_computed_now(plans: ModuleType) -> None:
    name = "llama-3.2-1b/cot-math"
    assert "\n".join(plans.table(name, recipe.load(name, []))) in text_of(name)
