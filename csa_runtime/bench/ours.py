# SPDX-License-Identifier: Apache-2.0
"""This library's calls on the buffers of a problem."""

from __future__ import annotations

from typing import Any

import torch

import csa_runtime
from csa_runtime.bench.clock import Call
from csa_runtime.bench.problem import Problem
from csa_runtime.torch import compressor


class Ours:
    """The installed library; `variant` is forced in the window and direction that it serves."""

    def __init__(self, variant: str | None = None) -> None:
        """Nothing is launched."""
        self.variant = variant

    def calls(self, problem: Problem) -> dict[str, Call]:
        """Through addresses, into the problem's buffers: what a graph can capture."""
        forward, backward = (self._launch(problem, name) for name in ("forward", "backward"))

        def both() -> None:
            forward()
            backward()

        return {"forward": forward, "backward": backward, "both": both}

    def _launch(self, problem: Problem, name: str) -> Call:
        ratio, coff = problem.pack[:2]
        launch = getattr(csa_runtime, f"launch_{name}")
        served = (self.variant or "").startswith(f"csa_{name}_r{ratio}_c{coff}_")
        arguments = problem.arguments[name] | {"variant": self.variant if served else None}
        current = torch.cuda.current_stream

        def run() -> None:
            launch(**arguments, stream=current().cuda_stream)

        return run

    def host_calls(self, problem: Problem) -> dict[str, Call]:
        """The ways to call it from Python, results allocated where the call does that."""
        window: dict[str, Any] = {"ratio": problem.pack.ratio, "coff": problem.pack.coff}
        full = window | {"total_comp": problem.pack.rows}
        inputs, grad_out = problem.inputs, problem.grad_out
        backward: Any = csa_runtime.compressor_backward
        leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs[:3])

        def both() -> Any:
            out = compressor(*leaves, *inputs[3:], **full)
            return torch.autograd.grad(out, leaves, grad_out)

        launches = self.calls(problem)
        return {
            "launch_forward": launches["forward"],
            "launch_backward": launches["backward"],
            "compressor_forward": lambda: csa_runtime.compressor_forward(*inputs, **full),
            "compressor_backward": lambda: backward(*inputs, grad_out, **window),
            "torch.compressor, no gradient": lambda: compressor(*inputs, **full),
            "torch.compressor and autograd.grad": both,
        }
