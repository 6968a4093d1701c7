# SPDX-License-Identifier: Apache-2.0
"""Gated-softmax pooling over windows of packed tokens, forward and backward, without a compiler.

Importing this starts no driver and imports no framework; `csa_runtime.torch`, the differentiable
form, is imported at its first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from csa_runtime.compat import (
        CSA,
        CSACompressorBackward,
        CSACompressorForward,
        csa_compressor_backward_wrapper,
        csa_compressor_forward_wrapper,
    )

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
from csa_runtime.diagnostics import backward_workspace_bytes, explain, info, load
from csa_runtime.errors import BundleError, DriverError, UnsupportedArch
from csa_runtime.ops import compressor_backward, compressor_forward
from csa_runtime.prefixes import check_prefixes, compressed_prefixes, max_rows

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

_LAZY = ("compat", "torch", "reference")
# The drop-in's names: most processes never use them.
_COMPAT = (
    "CSA",
    "CSACompressorBackward",
    "CSACompressorForward",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
)


def __getattr__(name: str) -> Any:
    """Import what needs a framework, NumPy or time when it is asked for."""
    if name == "__version__":
        from csa_runtime.diagnostics import version

        return version()
    if name in _COMPAT:
        from csa_runtime import compat

        return getattr(compat, name)
    if name in _LAZY:
        from importlib import import_module

        return import_module(f"csa_runtime.{name}")
    raise AttributeError(f"module 'csa_runtime' has no attribute {name!r}")
