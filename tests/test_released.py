"""The checkpoints that are committed: small, without pickles, and answering as docs/usage.md shows."""

import shlex
from pathlib import Path

import pytest

from colar import files
from colar.cli import main
from colar.model import backbones

ROOT = Path(__file__).resolve().parent.parent
RELEASED = sorted(path.parent for path in ROOT.glob("checkpoints/*/colar.json"))
SHOWN = (ROOT / "docs" / "usage.md").read_text().partition("<!-- checkpoint:begin -->")[2]
SHOWN = SHOWN.partition("<!-- checkpoint:end -->")[0]


def test_there_are_two():
    assert [path.name for path in RELEASED] == ["smollm2-135m-gsm", "smollm2-135m-gsm-rl"]


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
def test_it_is_small_and_holds_no_pickle(folder):
    found = list(folder.iterdir())
    assert sum(path.stat().st_size for path in found) < 18e6
    assert {path.suffix for path in found} <= {".json", ".safetensors", ".md", ".jinja"}
    assert files.read_json(folder / "colar.json")["weights"] == "adapter"


def test_the_usage_page_shows_what_it_answers(capsys, monkeypatch):
    try:
        backbones.smollm2_gguf()
    except ValueError as error:
        pytest.skip(f"SmolLM2's weights: {error}")
    monkeypatch.chdir(ROOT)
    command, _, answer = SHOWN.partition("```\n")[2].partition("\n```")[0].partition("\n")
    words = shlex.split(command)
    assert words[0] == "colar"
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.splitlines() == answer.splitlines()
