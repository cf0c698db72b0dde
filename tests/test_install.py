"""The installer's probe and the package's front door."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from script_files import module

from colar import __version__

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def install(monkeypatch):
    made = module("scripts/install.py")
    monkeypatch.setattr(made, "PROBE_SECONDS", 0.5)
    return made


def test_an_index_that_accepts_and_never_answers_does_not_hang_the_install(install, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("TORCH_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}/whl")
        started = time.monotonic()
        assert install.torch_index() is None
        assert time.monotonic() - started < 5
    assert "does not answer" in capsys.readouterr().err


def test_an_empty_torch_index_asks_nobody(install, monkeypatch):
    monkeypatch.setenv("TORCH_INDEX", "")
    monkeypatch.setattr(install, "answers", lambda url: pytest.fail(f"asked {url}"))
    assert install.torch_index() is None


def test_constraints_pin_torch_and_every_dependency_that_the_project_names():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().split()
    }
    project = (ROOT / "pyproject.toml").read_text()
    named = project.partition("dependencies = [")[2].partition("]\n")[0]
    names = [
        line.strip().strip('",').split(">")[0].split("[")[0].lower()
        for line in named.splitlines()
        if '"' in line
    ]
    assert len(names) > 8
    assert {name.replace("_", "-") for name in names} <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_importing_colar_is_cheap_and_its_names_are_there():
    code = "import sys, colar; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    )
    import colar

    for name in colar.__all__:
        getattr(colar, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        colar.nonsense  # noqa: B018


def test_citation_workflow_and_hooks_say_what_the_project_does():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert cited["references"][0]["title"].startswith("Think Silently, Think Fast")
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    assert job["steps"][-1] == {"run": "make test"}
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in local["hooks"]:  # the tools of `make lint`
        assert f"$(BIN)/{Path(hook['entry'].split()[0]).name}" in makefile
    for page in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"):
        assert {"name", "about"} <= yaml.safe_load(page.read_text().split("---")[1]).keys()
