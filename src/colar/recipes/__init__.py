"""The recipes that ship with colar: YAML files in the folders beside this module, found by name.

`tiny/colar` names the file `tiny/colar.yaml`. A recipe may be based on another one: its key `base` names that file,
relative to its own. Nothing here needs torch, so `colar recipes list` is instant.
"""

import re
from pathlib import Path

from colar import files, yaml_settings
from colar.checks import did_you_mean

FOLDER = Path(__file__).resolve().parent
AUTO = "auto"
"""The recipe that is made for a user's data: no file."""


def names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    paths = FOLDER.glob("*/*.yaml")
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in paths)


def find(name: str | Path) -> Path:
    """The file of a recipe: the path `name` where there is such a file, else the shipped recipe of that name.

    ValueError names the nearest shipped recipe.
    """
    if Path(name).is_file():
        return Path(name)
    if str(name) in names():
        return FOLDER / f"{name}.yaml"
    raise ValueError(
        f"no recipe at {name}: there is no such file, and no shipped recipe has that name{_nearest(name, AUTO)} "
        "(`colar recipes list` shows them all; the recipe comes first, overrides after it)"
    )


def describe(name: str) -> str:
    """The first sentence of a shipped recipe's opening comment."""
    paragraph = []
    for line in find(name).read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        paragraph.append(text)
    return re.split(r"(?<=\.)\s", " ".join(paragraph))[0]


def copy(name: str, target: str | Path) -> list[Path]:
    """Copy a shipped recipe into the folder `target`, and the recipes it is based on. Returns the files, its own first.

    Folders keep their names (`tiny/colar` becomes `TARGET/tiny/colar.yaml`), so that every `base` still leads to its
    file. ValueError where another file is in the way; nothing is copied then.
    """
    if name not in names():
        raise ValueError(
            f"no shipped recipe is called {name}{_nearest(name)} (`colar recipes list` shows them all)"
        )
    texts = {}
    for source in yaml_settings.yaml_layers(FOLDER / f"{name}.yaml"):
        path = Path(target) / source.resolve().relative_to(FOLDER)
        texts[path] = source.read_text(encoding="utf-8")
    # Two recipes may share a base: the same file may be there already.
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_text(encoding="utf-8") == text):
            raise ValueError(
                f"{path} exists and is not the shipped recipe: nothing was copied; give another folder, "
                "or move that file away"
            )
    for path, text in texts.items():
        if not path.exists():
            files.write_text(path, text)
    return list(texts)


def _nearest(name: str | Path, *more: str) -> str:
    """`, did you mean 'tiny/colar'?`, also for the path of a file in a clone, recipes/tiny/colar.yaml."""
    return did_you_mean(str(name).removeprefix("recipes/").removesuffix(".yaml"), [*names(), *more])
