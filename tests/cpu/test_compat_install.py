# SPDX-License-Identifier: Apache-2.0
"""Installing over a training framework's dispatch, on a stub of it, and undoing that."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from csa_runtime.compat import install_megatron, uninstall_megatron
from support import frameworks

pytestmark = pytest.mark.L0


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing stays installed."""
    yield
    uninstall_megatron()


def test_undoing_restores_every_name() -> None:
    """In the module, in callers, and in those that import it only afterwards."""
    module: Any = frameworks.make()
    original, gate = module.maybe_compress_thd_fused, module.fused_compressor_available
    with frameworks.framework(module) as caller:
        installed = install_megatron()
        assert module.maybe_compress_thd_fused is not original
        assert caller.maybe_compress_thd_fused is module.maybe_compress_thd_fused
        late: Any = type(sys)("late_importer")
        late.maybe_compress_thd_fused = module.maybe_compress_thd_fused
        sys.modules["late_importer"] = late
        try:
            installed.uninstall()
            installed.uninstall()
        finally:
            del sys.modules["late_importer"]
        for holder in (module, caller, late):
            assert holder.maybe_compress_thd_fused is original
        assert module.fused_compressor_available is gate
        assert not uninstall_megatron()


def test_installing_twice_gives_the_same_handle() -> None:
    """Another module is refused until then."""
    with frameworks.framework(frameworks.make()):
        installed = install_megatron()
        assert install_megatron(frameworks.NEW) is installed
        with pytest.raises(RuntimeError, match="uninstall_megatron"):
            install_megatron(frameworks.make("elsewhere"))
        assert uninstall_megatron()
        assert install_megatron() is not installed


def test_a_fork_passes_its_module() -> None:
    """By name or as it is."""
    module: Any = frameworks.make("fork.compressor")
    with frameworks.framework(module):
        for given in ("fork.compressor", module):
            with install_megatron(given) as installed:
                assert installed.module == "fork.compressor"
                assert module.maybe_compress_thd_fused.__self__ is not None


def _moved(kv: Any, score: Any, ape: Any, layout: Any) -> None: ...


def test_an_unknown_shape_is_refused_and_nothing_is_replaced() -> None:
    """Naming the version, what it has and what was expected."""
    module: Any = frameworks.make(function=_moved)
    with frameworks.framework(module, version="9.9") as caller:
        with pytest.raises(RuntimeError) as caught:
            install_megatron()
        for text in ("9.9", "(kv, score, ape, layout)", "total_comp, ratio, head_dim, coff"):
            assert text in str(caught.value)
        assert caller.maybe_compress_thd_fused is _moved
        module.maybe_compress_thd_fused = None
        with pytest.raises(RuntimeError, match="has no function"):
            install_megatron()


def test_another_gate_is_refused() -> None:
    """It is replaced too, so its parameters must be known."""
    module: Any = frameworks.make()
    module.fused_compressor_available = lambda device, dtype: True
    with frameworks.framework(module), pytest.raises(RuntimeError, match="device, dtype"):
        install_megatron()


def test_without_the_framework_the_error_says_what_was_looked_for() -> None:
    """Both known places."""
    with pytest.raises(ModuleNotFoundError, match=r"csa_utils\.fused_compressor or .*module="):
        install_megatron()


def test_installing_starts_no_driver() -> None:
    """So a process may fork after it."""
    code = """
import pathlib
from support import fake, frameworks
from csa_runtime import megatron_dispatch
from csa_runtime.compat import install_megatron
with frameworks.framework(frameworks.make()):
    install_megatron()
    print("libcuda.so" in pathlib.Path("/proc/self/maps").read_text())
"""
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}{code}"],
        capture_output=True, text=True, cwd="/", check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
