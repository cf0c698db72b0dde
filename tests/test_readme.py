"""The commands that README, the manuals and the recipes show are understood by the program."""

import re
import shlex
from pathlib import Path

import pytest

from colar import recipe
from colar.cli import build_parser, underscored
from colar.cli.train import overrides

ROOT = Path(__file__).resolve().parent.parent


def commands(text):
    """Every `colar ...` command in a text, continuation lines joined and comments dropped."""
    text = re.sub(r"\\[ \t]*(#[^\n]*)?\n[ \t]*#?", " ", text)
    for line in text.splitlines():
        found = re.search(r"(?:^|[\s/(])colar (train|evaluate|generate|report|data)\s+(?P<rest>.*)", line)
        if found and not line.strip().startswith("- ") and "`" not in line:
            yield shlex.split(f"{found[1]} {found['rest']}", comments=True)


MANUALS = sorted(path for path in ROOT.glob("docs/*.md") if path.name not in ("cli.md", "log.md"))
SOURCES = [
    ROOT / "README.md",
    *MANUALS,
    ROOT / "lab" / "reproduce" / "demo.sh",
    *sorted(ROOT.glob("src/colar/recipes/*/*.yaml")),
    *sorted(ROOT.glob("lab/recipes/*/*.yaml")),
]
FOUND = [(path.relative_to(ROOT), words) for path in SOURCES for words in commands(path.read_text())]


def test_there_are_commands_to_check():
    assert {"train", "evaluate", "generate", "data"} <= {words[0] for _, words in FOUND}
    assert len(FOUND) > 12


@pytest.mark.parametrize(
    ("path", "words"),
    FOUND,
    ids=lambda value: " ".join(value)[:70] if isinstance(value, list) else str(value),
)
def test_a_shown_command_is_understood(path, words):
    words = [re.sub(r"[<>&].*|\$\w+", "x", word) for word in words if not re.match(r"^\d?[<>&]", word)]
    args, rest = build_parser().parse_known_args([underscored(word) for word in words])
    if getattr(args, "takes_keys", False) and args.recipe not in ("RECIPE", "auto"):
        recipe.load_stages(args.recipe, overrides(rest, args.output), args.stages)
    else:
        assert not rest
