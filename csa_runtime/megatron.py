# SPDX-License-Identifier: Apache-2.0
"""Puts this library in place of Megatron-LM's dispatch of the compressor, gates included.

Assumed of the framework, and read from its public source, not run with it: a function
`maybe_compress_thd_fused`, in one of the modules of `KNOWN`, with one of their parameter lists. It
takes `kv` and `score` as `(tokens, 1, coff * head_dim)` and returns `(total_comp, 1, head_dim)`, or
None, and then the caller runs its eager code. Its own gates ask for compute capability 10, for
deterministic mode to be off and for no compilation. Only the module's place and its functions'
parameters can be checked, and are: anything else is refused. `Installed.report()` says afterwards
what was served.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from csa_runtime.megatron_dispatch import Dispatch

FUNCTION = "maybe_compress_thd_fused"
AVAILABLE = "fused_compressor_available"
_PACKAGE = "megatron.core.transformer.experimental_attention_variant"
_INPUTS = "kv, score, ape, cu_seqlens, cu_seqlens_comp, total_comp, ratio, head_dim, coff"


class Shape(NamedTuple):
    """Where a version of the framework keeps the function, and what it takes."""

    module: str
    parameters: str


KNOWN = (
    Shape(f"{_PACKAGE}.csa_utils.fused_compressor", f"{_INPUTS}, enabled=True"),
    Shape(f"{_PACKAGE}.csa_fused_compressor", f"{_INPUTS}, enabled=True"),
    Shape(f"{_PACKAGE}.csa_fused_compressor", _INPUTS),
)

_lock = threading.Lock()
_installed: Installed | None = None


class Installed:
    """What `install_megatron` did; as a context manager it undoes it at the end.

    Attributes:
        module: name of the framework's module.
        version: of the framework, or "unknown".
        served: calls that ran here, those traced by `torch.compile` not counted.
        declined: calls left to the framework's eager code, by reason.
    """

    def __init__(self, module: ModuleType, version: str) -> None:
        """Replace the functions, in the module and wherever they were imported to."""
        self.module, self.version = module.__name__, version
        self.served = 0
        self.declined: Counter[str] = Counter()
        dispatch = Dispatch(module, self)
        self._replaced: dict[str, tuple[Any, Any]] = {
            FUNCTION: (getattr(module, FUNCTION), dispatch.compress)
        }
        if hasattr(module, AVAILABLE):
            self._replaced[AVAILABLE] = (getattr(module, AVAILABLE), dispatch.available)
        for original, ours in self._replaced.values():
            _exchange(original, ours)

    def uninstall(self) -> None:
        """Put the framework's own functions back everywhere; again does nothing."""
        global _installed
        with _lock:
            for original, ours in self._replaced.values():
                _exchange(ours, original)
            if _installed is self:
                _installed = None

    def report(self) -> str:
        """What was served and what was not, in words."""
        lines = [f"{self.module} (version {self.version}): {self.served} calls served"]
        lines += [f"  left to it, {count} times: {why}" for why, count in self.declined.items()]
        return "\n".join(lines)

    def __enter__(self) -> Installed:
        """Installed already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Uninstall."""
        self.uninstall()


def install_megatron(module: ModuleType | str | None = None) -> Installed:
    """Serve Megatron-LM's dispatch of the compressor by this library, until uninstalled.

    Afterwards the framework's own gates are gone: every compute capability the bundle has an image
    for is served, deterministic mode and `torch.compile` too. Its switches stay: `enabled=False`
    and the environment variable of older versions. Starts no driver. Installing again gives what
    is installed.

    Args:
        module: that holds the dispatch function, or its name; None looks in the known places. A
            fork that moved it passes it.

    Returns:
        A handle: `report()`, `uninstall()`.

    Raises:
        ModuleNotFoundError: no such module; what was looked for is named.
        RuntimeError: the function takes other parameters than known, or another module's is
            replaced already.
    """
    global _installed
    found = _find(module)
    with _lock:
        if _installed is not None:
            if _installed.module == found.__name__:
                return _installed
            raise RuntimeError(
                f"{_installed.module} is served already and {found.__name__} was given; one at a "
                "time is allowed: uninstall_megatron() first"
            )
        version = _version(found)
        _check(found, version)
        _installed = Installed(found, version)
        return _installed


def uninstall_megatron() -> bool:
    """Undo `install_megatron`; returns whether there was anything to undo."""
    installed = _installed
    if installed is not None:
        installed.uninstall()
    return installed is not None


def _find(module: ModuleType | str | None) -> ModuleType:
    """The module, imported."""
    if isinstance(module, ModuleType):
        return module
    names = [module] if module else list(dict.fromkeys(shape.module for shape in KNOWN))
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # What the module itself fails to import is its own fault to report.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    raise ModuleNotFoundError(
        f"no module {' or '.join(names)}; a Megatron-LM with a dispatch of the compressor is "
        f"expected: install one, or pass module=, the one that defines {FUNCTION}",
        name=names[0],
    )


def _version(module: ModuleType) -> str:
    """Of the nearest package above that has one."""
    name = module.__name__
    while name:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            return str(version)
        name = name.rpartition(".")[0]
    return "unknown"


def _check(module: ModuleType, version: str) -> None:
    """Check that the functions take what is known."""
    function = getattr(module, FUNCTION, None)
    given = _parameters(function)
    known = list(dict.fromkeys(shape.parameters for shape in KNOWN))
    if given not in known:
        raise RuntimeError(
            f"{module.__name__} (version {version}) has "
            + (f"no function {FUNCTION}" if given is None else f"{FUNCTION}({given})")
            + f"; expected {' or '.join(f'{FUNCTION}({one})' for one in known)}: use a "
            "csa_runtime that knows this version, or call csa_runtime.torch.compressor yourself"
        )
    available = getattr(module, AVAILABLE, None)
    if available is not None and _parameters(available) != "device=None":
        raise RuntimeError(
            f"{module.__name__} (version {version}) has {AVAILABLE}({_parameters(available)}); "
            f"expected {AVAILABLE}(device=None): use a csa_runtime that knows this version"
        )


def _parameters(function: Any) -> str | None:
    """Names and defaults as they would be written, without annotations; None if not callable."""
    if not callable(function):
        return None
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))[1:-1]


def _exchange(old: Any, new: Any) -> None:
    """Bind to `new` every module attribute that is `old`: importers by name hold their own."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == __name__:
            continue
        for name in (FUNCTION, AVAILABLE):
            if vars(module).get(name) is old:
                setattr(module, name, new)
