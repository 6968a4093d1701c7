# SPDX-License-Identifier: Apache-2.0
"""Random problems from fixed seeds, which every variant that serves them must pass.

A failure names the problem's seed; `--corpus SEED` runs that one alone.
"""

from collections.abc import Callable

import pytest
import torch

from csa_runtime import _native, backward_workspace_bytes
from gpu import corpus, harness, problems
from gpu.arena import PATTERNS
from gpu.buffers import DEVICE, GUARD
from gpu.corpus import Spec
from gpu.corpus_check import Oracles, Shares, check, check_hostile
from gpu.harness import Problem
from gpu.problems import LONG

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

CONFIGS = pytest.mark.parametrize(("ratio", "coff"), [*problems.CONFIGS, *problems.LONG_CONFIGS])
# Problems of a window; long ones take longest.
WELL_FORMED, WELL_FORMED_LONG, HOSTILE = 400, 250, 200
SHOWN = 3  # failures, after which a test stops


class Kernels:
    """The bundle's variants, launched by name with exactly the workspace that each asks for."""

    device = DEVICE

    def __init__(self) -> None:
        """Without a workspace yet."""
        self.memory = torch.empty(0, dtype=torch.int16, device=DEVICE)

    def variants(
        self, operation: str, p: Problem, outputs: tuple[torch.Tensor, ...]
    ) -> list[str | None]:
        """Those that serve the call; the others must refuse it."""
        serving: list[str | None] = [None]
        for variant in harness.variants(operation, p.ratio, p.coff):
            if harness.serves(variant, p, *outputs, grad_out=operation == "backward"):
                serving.append(variant)
            elif p.packing.rows:
                with pytest.raises(ValueError, match=variant):
                    if operation == "forward":
                        harness.forward(p, *outputs, variant)
                    else:
                        harness.backward(p, *outputs, None, variant)
        return serving

    def forward(self, p: Problem, out: torch.Tensor, variant: str | None) -> None:
        """Launches."""
        harness.forward(p, out, variant)

    def backward(
        self,
        p: Problem,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        variant: str | None,
        accumulate: bool,
        surroundings: int,
    ) -> None:
        """Launches, and looks at the bytes around the workspace."""
        arguments = harness.backward_arguments(p, *grads, None)
        size: int = _native.explain("backward", **arguments, variant=variant)["workspace_bytes"]
        assert size <= backward_workspace_bytes(
            p.packing.tokens, p.packing.rows, p.head_dim, ratio=p.ratio, coff=p.coff
        )
        begin, end = GUARD + 16 * surroundings, GUARD + 16 * surroundings + size
        if self.memory.numel() * 2 < end + GUARD:
            self.memory = torch.empty(end + GUARD, dtype=torch.int16, device=DEVICE)
        near = self.memory[: (end + GUARD) // 2].fill_(PATTERNS[surroundings])
        scratch = near.view(torch.uint8)[begin:end] if size else None
        harness.backward(p, *grads, variant, accumulate=accumulate, scratch=scratch)
        guards = torch.cat([near[: begin // 2], near[end // 2 :]])
        assert bool((guards == PATTERNS[surroundings]).all()), "written around the workspace"


def run_all(
    request: pytest.FixtureRequest,
    count: int,
    problem: Callable[[int], Spec],
    one: Callable[[Spec], None],
) -> None:
    """Checks the problems of seeds 0, 1, ..., or of the one asked for; shows those that fail."""
    asked = request.config.getoption("--corpus")
    failures = []
    for seed in range(count) if asked is None else [asked]:
        spec = problem(seed)
        try:
            one(spec)
        except Exception as error:
            failures.append(f"{request.node.nodeid} --corpus {seed}\n{error}\n{spec}")
            if len(failures) == SHOWN or not isinstance(error, AssertionError):
                break
    if failures:
        raise AssertionError("\n\n".join(failures))


@CONFIGS
def test_random_problems(request: pytest.FixtureRequest, ratio: int, coff: int) -> None:
    kernels, shares = Kernels(), Shares()
    run_all(
        request,
        WELL_FORMED_LONG if ratio == LONG else WELL_FORMED,
        lambda seed: corpus.draw(seed, ratio, coff),
        lambda spec: check(spec, kernels, Oracles(), shares),
    )
    assert not shares.broken(ratio), shares.broken(ratio)


@CONFIGS
def test_hostile_prefixes(request: pytest.FixtureRequest, ratio: int, coff: int) -> None:
    kernels = Kernels()
    run_all(
        request,
        HOSTILE,
        lambda seed: corpus.hostile(seed, ratio, coff),
        lambda spec: check_hostile(spec, kernels),
    )
    torch.cuda.synchronize()
