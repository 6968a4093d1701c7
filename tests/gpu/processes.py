# SPDX-License-Identifier: Apache-2.0
"""Scripts in fresh processes: what a first call does can be seen only there. And their threads."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def start(script: Path, *arguments: str, before: list[str] | None = None) -> subprocess.Popen[str]:
    """Starts a script with this Python, its own session's csa_runtime and the tests on its path."""
    spec = find_spec("csa_runtime")
    assert spec is not None and spec.origin is not None
    here = [str(SCRIPTS.parents[1]), str(Path(spec.origin).parents[1])]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *here])
    return subprocess.Popen(
        [*(before or []), sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    """What it printed; fails with that where it failed or took longer."""
    try:
        log, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        log, _ = process.communicate()
        raise AssertionError(f"no end after {seconds:g} s:\n{log}") from None
    assert process.returncode == 0, f"exit status {process.returncode}:\n{log}"
    return log


def race(work: Callable[[int], None], count: int) -> list[threading.Thread]:
    """Runs `work(number)` in `count` threads to their end; raises what the first to fail raised."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def enter(number: int) -> None:
        try:
            barrier.wait(60)
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return threads
