"""The wheel: everything of the package is in it, and its commands work where there is no checkout."""

import json
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from colar import __version__

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")


# Without PYTHONPATH: pip would find the checkout there and call the wheel installed already.
SETTINGS = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, cwd=None):
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=SETTINGS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(python, *words):
    return run(sys.executable, "-m", "pip", "--python", python, *words, "--no-index", "--no-deps", "-q")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without a network from a copy of the sources, so that the checkout gets no build folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=NOT_SHIPPED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip(sys.executable, "wheel", "--no-build-isolation", "-w", folder, source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def colar(wheel, tmp_path_factory):
    """The `colar` of an environment that holds the wheel, sees this one's libraries, and nothing of the checkout."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip(python, "install", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, its own .pth files are not read: an editable install stays behind.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    # As an environment often is: a folder inside somebody's own repository.
    run("git", "init", "-q", environment)
    run(
        "git",
        "-C",
        environment,
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "x",
    )

    def call(*words):
        return run(environment / "bin" / words[0], *words[1:], cwd=elsewhere)

    found = call("python", "-c", "import colar; print(colar.__file__)").strip()
    assert Path(found) == packages / "colar" / "__init__.py"
    return call


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("colar/")}
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "colar").rglob("*") if path.is_file()]
    assert inside == {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert {"colar/py.typed", "colar/recipes/tiny/colar.yaml"} <= inside


def test_the_installed_commands_work_in_an_empty_folder(colar):
    assert colar("colar", "--version").strip() == f"colar {__version__}"
    listed = [line.split()[0] for line in colar("colar", "recipes", "list").splitlines()]
    assert listed == sorted(path.relative_to(ROOT / "src/colar/recipes").with_suffix("").as_posix()
                            for path in ROOT.glob("src/colar/recipes/*/*.yaml"))  # fmt: skip
    shown = colar("colar", "data", "show", "arithmetic", "--limit", "1")
    assert json.loads(shown)["id"].startswith("arithmetic/train/")


def test_an_installed_package_is_of_no_commit(colar):
    """The commit of the repository around its environment is not the commit that made a result."""
    code = (
        "import json; from colar.evaluation.provenance import collect_provenance\n"
        "print(json.dumps(collect_provenance()))"
    )
    found = json.loads(colar("python", "-c", code))
    assert found["versions"]["colar"] == __version__
    assert found["commit"] is None
