"""Shared fixtures."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from device import DEVICE, DTYPES, TOLERANCES, Tolerance

# Libraries read these when they are imported: long before a test calls a command, which sets them as well.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Python looks for no garbage among what is imported and collected: to do so is a fifth of that time.
gc.disable()
if DEVICE == "cpu":
    # Training takes a GPU where it sees one: all other tests compare what a CPU computes.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


LONGEST = (
    "ray", "smallest_runs", "training", "ray_serve", "engine", "graphs", "update", "other_device",
    "grpo", "gpu_syncs", "fuzz", "methods", "terminal", "real_factors", "baselines", "equations", "device",
    "released", "scheduling", "serve", "recipe", "results", "shortlist", "serve_page", "auto", "processes",
    "sharded", "docs", "cli", "programs",
)  # fmt: skip
"""Files that take ten seconds or more, the longest first: processes that take them in this order end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    gone = [name for name in order if not Path(__file__).with_name(f"{name}.py").exists()]
    assert not gone, f"LONGEST names files that are not there: {gone}"
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    gc.enable()


def stacks_of(run: str, worker: str) -> Path:
    """File for the stacks of a process of `pytest -n` that crashes."""
    return Path(tempfile.gettempdir()) / f"colar-tests-{run}-{worker}.txt"


def pytest_sessionstart(session: pytest.Session) -> None:
    given = getattr(session.config, "workerinput", None)
    if given:
        # Stays open until the process ends. pytest's own goes to stderr, far above the summary of a long run.
        faulthandler.enable(open(stacks_of(given["testrunuid"], given["workerid"]), "w"))  # noqa: SIM115


def pytest_sessionfinish(session: pytest.Session) -> None:
    given = getattr(session.config, "workerinput", None)
    if given:
        stacks_of(given["testrunuid"], given["workerid"]).unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """The report of a crash quotes the stacks."""
    path = stacks_of(report.node.workerinput["testrunuid"], report.node.gateway.id)
    report.longrepr += "\n" + (path.read_text() or "no stack: it was killed, or has called _exit")
    path.unlink()


@pytest.fixture(scope="module", autouse=True)
def out_of_the_collectors_sight() -> None:
    """Keep the garbage collector off what is there before a module's first test; what tests make is collected.

    The libraries and the collected tests are a million objects that stay: to look for garbage among them took a quarter
    of the time of a short training run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_probe_of_another_module() -> None:
    """Tests of a module see the probes of backbones that they cause, whichever module ran before."""
    probes = sys.modules.get("colar.model.probes")
    if probes is not None:
        probes._FOUND.clear()


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the lane (tests/device.py)."""
    import torch

    if DEVICE != "cpu" and not getattr(torch, DEVICE).is_available():
        pytest.fail(f"COLAR_TEST_DEVICE is {DEVICE}, which this machine does not have")
    return DEVICE


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    """Each dtype of the lane."""
    return str(request.param)


@pytest.fixture
def tolerance(dtype: str) -> Tolerance:
    """How far results may differ in this dtype."""
    return TOLERANCES[dtype]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of published data sets, laid out as `colar.data.catalogue` names them."""
    folder = os.environ.get("COLAR_DATA_DIR")
    if not folder:
        pytest.skip("needs the published data sets: set COLAR_DATA_DIR to their folder")
    return Path(folder)


@pytest.fixture(scope="session")
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of `pytest -n`."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def machines(ray_folder: Path) -> Iterator[Any]:
    """A Ray cluster of one machine with one CPU; a test may add others, which it removes."""
    import ray_workers

    with ray_workers.cluster(ray_folder, 1) as running:
        yield running


@pytest.fixture
def taken() -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Holds a folder's lock as another process would, inside the block."""
    fcntl = pytest.importorskip("fcntl")

    @contextlib.contextmanager
    def hold(folder: Path) -> Iterator[None]:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    return hold


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Inside, torch.compile writes C++ without vectors: the same graphs and kernels, which compile in half of the time.

    What vectors this CPU has is asked by compiling and loading a library for each kind, which takes longer still.
    """
    from torch._inductor import config  # takes seconds: for the few tests that compile

    with config.patch({"cpp.vec_isa_ok": False}):
        yield
    # The kernels of some tests compute nothing: no later compilation may run them.
    sys.modules["torch"]._dynamo.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order: equal means equal bit for bit."""
    import torch  # seconds: the process that hands out tests needs none of it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
