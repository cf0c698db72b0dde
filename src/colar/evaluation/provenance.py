"""Provenance of a result: command, versions, machine, commit and time."""

import functools
import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from colar import __version__

LIBRARIES = ("torch", "transformers", "peft", "accelerate")
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions for bfloat16, by their names in /proc/cpuinfo: two processors differ by a factor of ten."""


def collect_provenance() -> dict[str, Any]:
    """The provenance of what this process makes, as JSON values; the time is UTC."""
    versions = {"colar": __version__}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "command": _command(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": versions,
        "machine": _machine(),
    }


def _machine() -> dict[str, Any]:
    # Linux names the processor's model and instructions there alone; other systems tell Python the model.
    known: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            known.setdefault(key.strip(), value.strip())
    # "Features" on ARM.
    flags = f"{known.get('flags', '')} {known.get('Features', '')}".split()
    return {
        "system": platform.system(),
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "instructions": [torch.backends.cpu.get_cpu_capability(), *(x for x in BFLOAT16 if x in flags)],
        "cores": os.cpu_count(),
    }


def _command() -> str:
    """The command line of `colar`, or of a script below the working directory.

    Of any other program only its name: what it was called with are paths of the machine (a notebook's kernel).
    """
    program = Path(sys.argv[0])
    script = program.resolve()
    # torchrun and `python -m colar.cli` have the path of that module in place of the program's name.
    if program.stem == "colar" or script == Path(__file__).parents[1] / "cli" / "__main__.py":
        return shlex.join(["colar", *sys.argv[1:]])
    if program.suffix == ".py" and script.is_relative_to(Path.cwd()):
        return shlex.join(["python", str(script.relative_to(Path.cwd())), *sys.argv[1:]])
    return program.name


@functools.cache  # the code that runs was imported once: later edits and commits are not in it
def _commit() -> str | None:
    """Commit of the checkout this package lies in, with `+` when the tree is dirty; None outside a checkout."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # Installed into an environment inside somebody's repository, we lie in a checkout that is not ours.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
