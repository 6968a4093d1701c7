# SPDX-License-Identifier: Apache-2.0
"""A system with the drop-in names, cuDNN frontend's CSA compressor or this library's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from csa_runtime.bench.clock import Call
from csa_runtime.bench.problem import Problem

PACKAGE, DISTRIBUTION = "cudnn", "nvidia-cudnn-frontend"
# The module whose constant decides which compute capabilities it lets pass.
GATE = "cudnn.csa.compressor.api", "MINIMUM_COMPUTE_CAPABILITY_MAJOR"
KINDS = ("forward", "backward", "deterministic")


class Names(Protocol):
    """The four names."""

    Forward: Any
    Backward: Any
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class Imported:
    """The four names of cuDNN frontend."""

    def __init__(self) -> None:
        """Import it.

        Raises:
            ImportError: it is not installed, or has no such operation.
        """
        try:
            csa = import_module(PACKAGE).CSA
        except AttributeError as error:
            raise ImportError(f"{PACKAGE} has no CSA compressor: {error}") from error
        self.Forward, self.Backward = csa.CSACompressorForward, csa.CSACompressorBackward
        self.forward = csa.csa_compressor_forward_wrapper
        self.backward = csa.csa_compressor_backward_wrapper


def lift_gate(major: int) -> str:
    """Let it run from this major compute capability on; says what was done."""
    module, name = GATE
    try:
        api = import_module(module)
        before = getattr(api, name)
    except (ImportError, AttributeError) as error:
        return f"its capability gate was not found: {error}"
    setattr(api, name, min(before, major))
    return f"{name} was {before}, is {getattr(api, name)}"


class Operations:
    """One system's calls on the buffers of one problem, by class and by wrapper."""

    def __init__(self, system: Names, problem: Problem, kinds: tuple[str, ...] = KINDS) -> None:
        """Compiles each kind, and notes how long that took.

        Raises:
            Exception: whatever the system raises where it cannot serve the problem.
        """
        window = {"ratio": problem.pack.ratio, "coff": problem.pack.coff}
        inputs, out, grad_out = problem.inputs, problem.out, problem.grad_out
        makers: dict[str, Callable[[], Any]] = {
            "forward": lambda: system.Forward(*inputs, out, **window),
            "backward": lambda: system.Backward(*inputs, grad_out, **window),
            "deterministic": lambda: system.Backward(
                *inputs, grad_out, **window, deterministic=True
            ),
        }
        made = {kind: makers[kind]() for kind in kinds}
        self.compile_seconds: dict[str, float] = {}
        for kind, operation in made.items():
            begin = time.perf_counter()
            operation.check_support()
            operation.compile()
            self.compile_seconds[kind] = time.perf_counter() - begin
        written = (*inputs, grad_out, problem.grad_kv, problem.grad_score, problem.grad_ape)
        workspace = None
        if "deterministic" in kinds:
            size = made["deterministic"].scratch_workspace_bytes()
            workspace = torch.empty(max(16, size), dtype=torch.uint8, device=out.device)

        def backward() -> None:
            problem.grad_ape.zero_()
            made["backward"].execute(*written)

        classes: dict[str, Call] = {
            "forward": lambda: made["forward"].execute(*inputs, out),
            "backward": lambda: made["backward"].execute(*written),
            "deterministic": lambda: made["deterministic"].execute(*written, workspace=workspace),
        }
        self.classes = {kind: classes[kind] for kind in kinds}
        # What a caller of the adding class runs: its zero-fill belongs to it.
        self.kernels = {kind: backward if kind == "backward" else classes[kind] for kind in kinds}
        rows, head_dim = out.shape
        window["head_dim"] = head_dim
        wrappers: dict[str, Call] = {
            "forward": lambda: system.forward(*inputs, **window, total_comp=rows),
            "backward": lambda: system.backward(*inputs, grad_out, **window),
            "deterministic": lambda: system.backward(
                *inputs, grad_out, **window, deterministic=True
            ),
        }
        self.wrappers = {kind: wrappers[kind] for kind in kinds}


class Peer:
    """Its calls, by the same names as the other systems'."""

    def __init__(self, system: Names) -> None:
        """Nothing is compiled yet."""
        self.system = system

    def calls(self, problem: Problem) -> dict[str, Call]:
        """By class, into the problem's buffers; backward fills grad_ape with zeros first."""
        kernels = Operations(self.system, problem, KINDS[:2]).kernels

        def both() -> None:
            kernels["forward"]()
            kernels["backward"]()

        return {**kernels, "both": both}

    def host_calls(self, problem: Problem) -> dict[str, Call]:
        """By class and by wrapper."""
        made = Operations(self.system, problem, KINDS[:2])
        return {
            "class, forward": made.classes["forward"],
            "class, backward": made.kernels["backward"],
            "wrapper, forward": made.wrappers["forward"],
            "wrapper, backward": made.wrappers["backward"],
        }
