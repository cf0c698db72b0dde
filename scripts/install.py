"""Make `.venv` and install colar with what it needs. Standard library only; called by the Makefile.

    python3 scripts/install.py .venv [extra ...]

torch comes first, in the version of constraints.txt. On Linux without an NVIDIA GPU the default wheel is a
CUDA build of several gigabytes, so a CPU wheel index is tried there: TORCH_INDEX names another one (or is empty:
use pip's own). An index that does not answer within a few seconds is left out, with a message.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 6.0


def torch_index() -> str | None:
    """The wheel index to add for torch, or None."""
    no_gpu = platform.system() == "Linux" and shutil.which("nvidia-smi") is None
    default = CPU_INDEX if no_gpu else ""
    index = os.environ.get("TORCH_INDEX", default).strip()
    if not index:
        return None
    if answers(index.rstrip("/") + "/torch/"):
        return index
    print(f"TORCH_INDEX {index} does not answer; torch comes from pip's own index", file=sys.stderr)
    return None


def answers(url: str) -> bool:
    """Whether the address answers in time."""
    # In a thread, because a name look-up has no timeout.
    ok = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS):
                ok.set()
        except (OSError, ValueError):
            pass

    threading.Thread(target=ask, daemon=True).start()
    return ok.wait(PROBE_SECONDS)


def main() -> None:
    venv = Path(sys.argv[1])
    extras = sys.argv[2:]
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print(f"making {venv}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    # Python compiles the modules that it imports; pip would compile all of torch and transformers first.
    quiet = ["-q", "--disable-pip-version-check", "--no-compile"]
    pip = [str(python), "-m", "pip", "install", *quiet, "-c", str(constraints)]
    index = torch_index()
    print(f"installing {torch}, then colar and its libraries (a minute or two)", file=sys.stderr)
    from_index = ["--extra-index-url", index] if index else []
    subprocess.run([*pip, torch, *from_index], check=True)
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    subprocess.run([*pip, "-e", wanted], check=True)


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        sys.exit("colar needs Python 3.11 or newer; name one with PYTHON=python3.12 make ...")
    main()
