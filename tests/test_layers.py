"""Layers: imports run one way, downward. Read off the syntax trees, imports inside functions included."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
LAYERS = (
    ("cli",),
    ("recipe",),
    ("recipes",),
    ("serve", "training"),
    ("ask",),
    ("look", "integrations"),
    ("evaluation",),
    ("engine",),
    ("methods",),
    ("model",),
    ("template",),
    ("ops", "data"),
    ("processes",),
    ("yaml_settings",),
    ("files", "progress", "checks"),
    ("__init__",),
)
"""From the top down; packages of one layer never import each other. `colar/__init__.py` has the version and public names."""

LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
WITHOUT_TORCH = ("data", "yaml_settings", "files", "progress", "checks", "recipes")
HEAVY = {"torch", "transformers", "peft", "accelerate"}


def modules():
    """(dotted name, file) of every module under src/colar."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found.append((".".join(parts), path))
    return found


def package_of(name):
    """colar.engine.cache -> engine; colar and colar.__init__ -> __init__."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(name, text):
    """Dotted names that a module imports: `from colar import files` is colar.files, relative ones resolved."""
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            dotted = ".".join(base)
            if dotted == "colar":
                yield from (
                    "colar" if alias.name.startswith("__") else f"colar.{alias.name}" for alias in node.names
                )
            else:
                yield dotted


def faults(name, text):
    """What is wrong with the imports of one module, in words."""
    package = package_of(name)
    if package not in LAYER_OF:
        return [f"{name}: {package} is in no layer; add it to LAYERS, where it belongs"]
    found = []
    for imported in imports(name, text):
        top = imported.split(".")[0]
        if package in WITHOUT_TORCH and top in HEAVY:
            found.append(f"{name} imports {imported}, but {package} does without")
        if top != "colar" or package_of(imported) == package:
            continue
        target = package_of(imported)
        if target not in LAYER_OF:
            found.append(f"{name} imports {imported}: {target} is in no layer")
        elif LAYER_OF[target] <= LAYER_OF[package]:
            found.append(f"{name} imports {imported}: {target} is not below {package}")
    return found


def test_every_module_keeps_to_the_house():
    found = modules()
    assert {"colar.files", "colar.engine.engine", "colar.methods.registry"} <= {name for name, _ in found}
    assert [fault for name, path in found for fault in faults(name, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("colar.ops.noise", "from colar.engine import engine", "engine is not below ops"),
        ("colar.ops.noise", "def f():\n    import colar.model.backbones", "model is not below ops"),
        ("colar.ops.noise", "from colar import data", "data is not below ops"),
        ("colar.ops.noise", "from ..data import example", "data is not below ops"),
        ("colar.ops.noise", "from .. import template", "template is not below ops"),
        ("colar.files", "from colar import progress", "progress is not below files"),
        (
            "colar.serve.app",
            "if True:\n    from colar.training import sft",
            "training is not below serve",
        ),
        (
            "colar.evaluation.report",
            "from colar.integrations.lm_eval import x",
            "integrations is not below evaluation",
        ),
        ("colar.recipe", "import colar.cli", "cli is not below recipe"),
        ("colar.template.template", "import colar.utils.misc", "utils is in no layer"),
        ("colar.utils", "", "utils is in no layer"),
        ("colar.utils.misc", "", "utils is in no layer"),
        ("colar.evaluation.picture", "from colar.look import diagnosis", "look is not below evaluation"),
        ("colar.checks", "from colar import files", "files is not below checks"),
        ("colar.data.example", "def f():\n    import torch.nn", "data does without"),
        ("colar.files", "from torch import Tensor", "files does without"),
        ("colar.__init__", "from colar.engine import engine", "engine is not below __init__"),
    ],
)
def test_a_fault_is_found(name, text, part):
    (fault,) = faults(name, text)
    assert part in fault


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "colar.cli.train",
            "from colar.cli import options\nfrom colar import recipe, __version__\nimport torch",
        ),
        ("colar.engine.engine", "from . import cache\nfrom .request import fold\nfrom ..methods import base"),
        (
            "colar.ops.noise",
            "import torch\nfrom colar.ops.trees import plan\nfrom colar.files import read_json",
        ),
        ("colar.data.sources", "import datasets\nfrom colar import files, progress"),
    ],
)
def test_what_is_allowed_is_let_pass(name, text):
    assert faults(name, text) == []


MAPPED = ("data", "engine", "evaluation", "look", "methods", "model", "recipe", "serve", "training")


@pytest.mark.parametrize("package", MAPPED)
def test_a_package_says_what_each_of_its_files_is_for(package):
    """The docstring of a large package names every file and folder of it: a stranger knows where to open it."""
    folder = SOURCE / "colar" / package
    words = set(re.findall(r"\w+", ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert files | folders <= words
