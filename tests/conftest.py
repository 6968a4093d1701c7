# SPDX-License-Identifier: Apache-2.0
"""Markers, the only reasons to skip, and the record of what ran on a GPU.

`--attest-file PATH` writes, as JSON, what `tools/attest` turns into evidence: how many tests were
collected and how they ended, the launches that the launcher counted during tests that passed, and
how many elements those tests compared.
"""

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

# `support` and `gpu` are found in tests/, `aot` in the root; an installed csa_runtime wins over the
# source tree, which has no native module unless one was built there.
if str(ROOT) in sys.path and not list((ROOT / "csa_runtime").glob("_native*.so")):
    sys.path.remove(str(ROOT))
sys.path += [path for path in (str(TESTS), str(ROOT)) if path not in sys.path]

MARKERS = {
    "gpu": "runs kernels on an NVIDIA GPU; skipped without one",
    "multi_gpu": "needs two NVIDIA GPUs; skipped with fewer",
    "L0": "seconds: run it on every change",
    "L1": "a large tensor, a subprocess or a tool: run it before evidence is written",
}
BEFORE = pytest.StashKey[dict[str, Counter[str]]]()
CALL_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--attest-file` and `--corpus`."""
    parser.addoption("--attest-file", default=None, help="write what passing GPU tests launched")
    parser.addoption("--corpus", type=int, help="of the random problems, that of this seed alone")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers and the recorder."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.pluginmanager.register(Recorder(config.getoption("--attest-file")), "csa-recorder")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test carries a level: L0 where it names none."""
    for item in items:
        if not any(item.get_closest_marker(level) for level in ("L0", "L1")):
            item.add_marker("L0")


@functools.cache
def gpu_count() -> int:
    """Usable NVIDIA GPUs, asked once."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what the machine cannot run; nothing else skips a GPU test."""
    if item.get_closest_marker("gpu") and gpu_count() < 1:
        pytest.skip("no usable NVIDIA GPU")
    if item.get_closest_marker("multi_gpu") and gpu_count() < 2:
        pytest.skip(f"needs 2 NVIDIA GPUs, found {gpu_count()}")


def launches() -> Counter[str]:
    """The launcher's own counts so far, keyed "variant sm_arch"."""
    native = importlib.import_module("csa_runtime._native")
    counts = native.launch_counts()
    return Counter({f"{variant} {arch}": number for (variant, arch), number in counts.items()})


def compared() -> Counter[str]:
    """Elements compared so far, by what they were compared for."""
    tally = sys.modules.get("gpu.tally")
    return Counter(tally.COMPARED) if tally else Counter()


def worst() -> dict[str, float]:
    """The largest deviations seen so far, by name."""
    tally = sys.modules.get("gpu.tally")
    return dict(tally.WORST) if tally else {}


class Recorder:
    """Adds up, over passing GPU tests, launches and compared elements."""

    def __init__(self, path: str | None) -> None:
        """Records nothing but elements where `path` is None."""
        self.path = path
        self.collected = 0
        self.outcomes: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts what will run."""
        self.collected = len(session.items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Remembers the counts before a GPU test's body."""
        if item.get_closest_marker("gpu"):
            before = launches() if self.path else Counter()
            item.stash[BEFORE] = {"launches": before, "compared": compared()}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Takes the difference where the body and the teardown passed."""
        report: pytest.TestReport = yield
        if report.when == "call":
            item.stash[CALL_PASSED] = report.passed
        if report.skipped:
            self.outcomes["skipped"] += 1
            reason = report.longrepr
            self.skips[str(reason[2]) if isinstance(reason, tuple) else str(reason)] += 1
        elif report.failed:
            self.outcomes["failed"] += 1
        elif report.when == "teardown" and item.stash.get(CALL_PASSED, False):
            self.outcomes["passed"] += 1
            if BEFORE in item.stash:
                before = item.stash[BEFORE]
                self.compared.update(compared() - before["compared"])
                if self.path:
                    self.launches.update(launches() - before["launches"])
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says how much was compared."""
        write = terminalreporter.write_line
        if self.compared:
            write(f"compared {self.compared['bitwise']:,} elements bitwise")
            for name, number in sorted(self.compared.items()):
                if name != "bitwise":
                    write(f"  {name}: {number:,}")
        for name, value in sorted(worst().items()):
            write(f"  worst {name}: {value:.3g}")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Writes the record."""
        if self.path is None:
            return
        record = {
            "collected": self.collected,
            "passed": self.outcomes["passed"],
            "failed": self.outcomes["failed"],
            "skipped": self.outcomes["skipped"],
            "skips": dict(sorted(self.skips.items())),
            "launches": dict(sorted(self.launches.items())),
            "compared": dict(sorted(self.compared.items())),
            "worst": dict(sorted(worst().items())),
            "exitstatus": int(exitstatus),
        }
        Path(self.path).write_text(json.dumps(record, indent=1) + "\n")
