"""Scripts of the project, which are in no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def module(path: str) -> ModuleType:
    """A new module of a script, such as lab/scripts/figures.py."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # a dataclass looks for the module that it is in
    spec.loader.exec_module(made)
    return made
