"""A command of colar in a process of its own, and the processes of a Ray cluster on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from colar import files

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import ray_workers  # the machines are the tests'

SECONDS = 300
"""Time until a command that does not end is a failure."""
SCRIPT = """\
import os, sys
from pathlib import Path
from colar.cli import main
Path(sys.argv[1]).write_text(str(os.getpid()))
{settings}
sys.exit(main(sys.argv[2:]))
"""


class Driver:
    """The command, forked as workers are. `settings`: lines of Python that come before it."""

    def __init__(self, folder: Path, words: list[str], settings: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.id, self.errors, self.output = (folder / name for name in ("id", "stderr", "stdout"))
        self.id.unlink(missing_ok=True)
        script = files.write_text(folder / "driver.py", SCRIPT.format(settings=settings))
        command = [sys.executable, ray_workers.__file__, str(script), str(self.id), *words]
        with open(self.errors, "w") as errors, open(self.output, "w") as output:
            self.process = subprocess.Popen(command, stderr=errors, stdout=output)

    def wait(self) -> str:
        """The last line that it wrote to stderr, once it has ended."""
        self.process.wait(SECONDS)
        return (self.errors.read_text().splitlines() or [""])[-1]

    def first_line(self) -> str:
        """The first line on its stdout, once it is there."""
        deadline = time.monotonic() + SECONDS
        while not self.output.read_text().endswith("\n"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a command failed: {self.errors.read_text()}")
            time.sleep(0.05)
        return self.output.read_text().splitlines()[0]

    def kill(self) -> None:
        """By kill -9, where the command has begun."""
        if self.id.exists() and self.id.read_text():
            os.kill(int(self.id.read_text()), signal.SIGKILL)


def workers(title: str) -> list[psutil.Process]:
    """Processes of this process's clusters by a part of their title.

    They are no children of it; their output is in Ray's folder for the cluster, whose name ends with this process's id.
    """
    found = []
    for each in psutil.process_iter():
        try:
            logs = [file.path for file in each.open_files()] if title in " ".join(each.cmdline()) else []
        except psutil.Error:
            continue
        if any(f"_{os.getpid()}/logs/" in path for path in logs):
            found.append(each)
    return found
