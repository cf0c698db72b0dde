"""examples/quickstart.ipynb runs from top to bottom, in less time: a few updates of a few rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
SHORT = '"runs/quickstart", overrides=["--training.max_steps", "2", "--validation.page_size", "0"])'


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    text = "\n".join(sources)
    for full, short in (("limit=2000", "limit=120"), ('"runs/quickstart")\nrun', f"{SHORT}\nrun")):
        assert text.count(full) == 1
        text = text.replace(full, short)
    names: dict[str, Any] = {}
    exec(compile(text, str(NOTEBOOK), "exec"), names)
    assert "| c = 2 |" in names["run"]._repr_markdown_()
    printed = capsys.readouterr().out
    assert printed.count("thoughts, answer") == 3
