# SPDX-License-Identifier: Apache-2.0
"""Gated-softmax pooling over windows of packed tokens, forward and backward, without a compiler.

Importing this starts no driver and imports no framework. The launcher is there at once; everything
else is imported at its first use, since typing alone would be two thirds of the import's time.
"""

from __future__ import annotations

from csa_runtime.errors import BundleError, DriverError, UnsupportedArch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from csa_runtime.compat import (
        CSA,
        CSACompressorBackward,
        CSACompressorForward,
        csa_compressor_backward_wrapper,
        csa_compressor_forward_wrapper,
    )
    from csa_runtime.diagnostics import backward_workspace_bytes, explain, info, load
    from csa_runtime.ops import compressor_backward, compressor_forward
    from csa_runtime.prefixes import check_prefixes, compressed_prefixes, max_rows

try:
    from csa_runtime._native import launch_backward, launch_forward
except ModuleNotFoundError as error:
    if error.name != "csa_runtime._native":
        raise
    raise ImportError(
        f"csa_runtime was imported from {__path__[0]}, which has no compiled module: this source "
        "folder hides the installed package. Run Python from another folder, or install it for "
        "development: pip install -e ."
    ) from error

__all__ = [
    "CSA",
    "BundleError",
    "CSACompressorBackward",
    "CSACompressorForward",
    "DriverError",
    "UnsupportedArch",
    "backward_workspace_bytes",
    "check_prefixes",
    "compressed_prefixes",
    "compressor_backward",
    "compressor_forward",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
    "explain",
    "info",
    "launch_backward",
    "launch_forward",
    "load",
    "max_rows",
]

# Modules, and where the other names are.
_MODULES = ("compat", "torch", "reference")
_HOMES = {
    "CSA": "compat",
    "CSACompressorBackward": "compat",
    "CSACompressorForward": "compat",
    "backward_workspace_bytes": "diagnostics",
    "check_prefixes": "prefixes",
    "compressed_prefixes": "prefixes",
    "compressor_backward": "ops",
    "compressor_forward": "ops",
    "csa_compressor_backward_wrapper": "compat",
    "csa_compressor_forward_wrapper": "compat",
    "explain": "diagnostics",
    "info": "diagnostics",
    "load": "diagnostics",
    "max_rows": "prefixes",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, once."""
    if name == "__version__":
        from csa_runtime.diagnostics import version

        return version()
    home = _HOMES.get(name)
    if home is None and name not in _MODULES:
        raise AttributeError(f"module 'csa_runtime' has no attribute {name!r}")
    from importlib import import_module

    found = import_module(f"csa_runtime.{home or name}")
    if home is not None:
        found = globals()[name] = getattr(found, name)
    return found


def __dir__() -> list[str]:
    """What is imported later too."""
    return sorted({*globals(), *__all__})
