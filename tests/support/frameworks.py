# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a training framework's dispatch of the compressor, with gates of its own.

Written for the tests of `install_megatron`: names and parameters are the framework's, the bodies
are not. `frontend` stands for the kernels that the framework would call.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PACKAGE = "megatron.core.transformer.experimental_attention_variant"
NEW, OLD = f"{PACKAGE}.csa_utils.fused_compressor", f"{PACKAGE}.csa_fused_compressor"
CALLER = f"{PACKAGE}.csa"
MINIMUM = 10  # the compute capability, major, that the stub asks for


def _gates(kv: Any, module: ModuleType) -> bool:
    """The three that a drop-in for the kernels alone would never get past."""
    return (
        module.fused_compressor_available(kv.device)
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.compiler.is_compiling()
    )


def dispatch_function(module: ModuleType, switch: bool) -> Callable[..., Any]:
    """The dispatch function, with the caller's switch among its parameters or not."""

    def serve(kv: Any, total_comp: int) -> Any:
        if not _gates(kv, module):
            return None
        module.frontend.calls += 1
        return torch.zeros(total_comp, 1, 1)

    # Annotated like the framework's own: annotations do not count.
    def with_switch(
        kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor,
        cu_seqlens_comp: torch.Tensor, total_comp: int, ratio: int, head_dim: int, coff: int,
        enabled: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        return serve(kv, total_comp) if enabled else None

    def without(
        kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor,
        cu_seqlens_comp: torch.Tensor, total_comp: int, ratio: int, head_dim: int, coff: int,
    ) -> torch.Tensor | None:  # fmt: skip
        return serve(kv, total_comp) if module._dispatch_enabled() else None

    return with_switch if switch else without


def make(
    name: str = NEW, switch: bool = True, capability: int = 9, function: Any = None
) -> ModuleType:
    """The module, not yet in `sys.modules`."""
    module: Any = ModuleType(name)
    module.frontend = SimpleNamespace(calls=0)
    module.enabled = True

    def fused_compressor_available(device: torch.device | None = None) -> bool:
        return capability >= MINIMUM

    module.fused_compressor_available = fused_compressor_available
    if not switch:
        module._dispatch_enabled = lambda: module.enabled
    module.maybe_compress_thd_fused = function or dispatch_function(module, switch)
    return module


@contextmanager
def framework(module: ModuleType, version: str = "0.18.0rc1") -> Iterator[ModuleType]:
    """The framework's packages in `sys.modules`, and a caller that imported the function by name.

    Gives the caller: its `pool` asks the dispatch first and falls back to "eager".
    """
    caller: Any = ModuleType(CALLER)
    caller.maybe_compress_thd_fused = module.maybe_compress_thd_fused

    def pool(*arguments: Any, **options: Any) -> Any:
        fused = caller.maybe_compress_thd_fused(*arguments, **options)
        return "eager" if fused is None else fused

    caller.pool = pool
    made = {module.__name__: module, CALLER: caller}
    for name in list(made):
        while name := name.rpartition(".")[0]:
            package = types.ModuleType(name)
            package.__path__ = []
            made.setdefault(name, package)
    made["megatron.core"].__version__ = version  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield caller
    finally:
        for name, old in before.items():
            sys.modules.pop(name)
            if old is not None:
                sys.modules[name] = old
