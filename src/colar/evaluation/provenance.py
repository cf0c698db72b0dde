"""Provenance of a result: command, commit, versions and machine of the process that makes it."""

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
"""Instructions for bfloat16, by their names in /proc/cpuinfo: they make a difference of a factor of ten in speed."""


def collect_provenance() -> dict[str, Any]:
    """Provenance of the results of this process, as JSON values; the time is UTC."""
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
    # On Linux only this file has the processor's model and instructions; elsewhere `platform` has the model.
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
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _command() -> str:
    """The command line of `colar`, or of a script below the working directory.

    For any other program only its name, because its arguments are paths of the machine (a notebook's kernel).
    """
    program = Path(sys.argv[0])
    script = program.resolve()
    # Under torchrun and `python -m colar.cli`, the program's name is the path of that module.
    if program.stem == "colar" or script == Path(__file__).parents[1] / "cli" / "__main__.py":
        return shlex.join(["colar", *sys.argv[1:]])
    if program.suffix == ".py" and script.is_relative_to(Path.cwd()):
        return shlex.join(["python", str(script.relative_to(Path.cwd())), *sys.argv[1:]])
    return program.name


@functools.cache  # the running code was imported once: later edits and commits do not count
def _commit() -> str | None:
    """Commit of the checkout this package lies in, with `+` when the tree is dirty; None outside a checkout."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # Installed into an environment inside another repository, the package lies in a checkout that is not its own.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
