# SPDX-License-Identifier: Apache-2.0
"""The values of a corpus problem, on the CPU, from its seed: a kind, and special numbers in it."""

import zlib

import torch

from gpu import problems
from gpu.corpus import APART, Spec
from gpu.problems import LONG, Values

LARGEST = torch.finfo(torch.bfloat16).max
# Smallest subnormal bf16, a larger one, the smallest normal.
SMALL = (2.0**-133, -(2.0**-128), 2.0**-126)
TAME = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, *SMALL)
LEVELS = (0.0, -1.5, 60.0, 2.0**-130, LARGEST, -LARGEST)
PRODUCTS = 30.0  # powers of 10


def make(spec: Spec) -> Values:
    """The values of a problem; ape is there even where the call has none."""
    seed = zlib.crc32(f"{spec.ratio} {spec.coff} {spec.seed}".encode())
    random = torch.Generator().manual_seed(seed)
    kind = spec.kind if spec.kind in problems.DISTRIBUTIONS else "gate"
    given = problems.values(
        kind, spec.packing, spec.ratio, spec.coff, spec.head_dim, seed, torch.device("cpu")
    )
    if spec.kind in SHAPED:
        SHAPED[spec.kind](given, random)
    for name in spec.special:
        _sprinkle(getattr(given, name), spec, name, random)
    return given


def _uniform(shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=random)


def _signs(shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    return torch.where(_uniform(shape, random) < 0.5, 1.0, -1.0)


def _pick(choices: tuple[float, ...], random: torch.Generator) -> float:
    return choices[int(torch.randint(len(choices), (), generator=random))]


def _equal(given: Values, random: torch.Generator) -> None:
    """All scores of all windows are one number."""
    level = _pick(LEVELS, random)
    given.score.fill_(level)
    # Beside the largest number any APE is lost, in fp32 and not in fp64.
    given.ape.fill_(0.0 if abs(level) == LARGEST else 0.25)


def _steep(given: Values, random: torch.Generator) -> None:
    """Scores rise or fall by up to 50 from token to token."""
    slope = _pick((0.3, -2.0, 11.0, -50.0), random)
    ramp = torch.arange(given.score.shape[0]) % 97
    given.score.add_((slope * ramp)[:, None].to(given.score.dtype))


def _zeros(given: Values, random: torch.Generator) -> None:
    """Zeros of both signs: everywhere in some tensors, here and there in the others."""
    for tensor in (given.kv, given.score, given.grad_out):
        share = _pick((0.2, 1.0), random)
        zeros = (0.0 * _signs(tensor.shape, random)).to(tensor.dtype)
        tensor.copy_(torch.where(_uniform(tensor.shape, random) < share, zeros, tensor))


def _largest(given: Values, random: torch.Generator) -> None:
    """Values of the largest magnitude; gradients of at most 1/2, or not."""
    given.kv.copy_(LARGEST * _signs(given.kv.shape, random))
    if _pick((0.0, 1.0), random):
        given.grad_out.clamp_(-0.5, 0.5)


def _products(given: Values, random: torch.Generator) -> None:
    """Values and gradients of any size, whose products are beyond fp32."""
    for tensor in (given.kv, given.grad_out):
        power = _uniform(tensor.shape, random) * PRODUCTS
        tensor.copy_(tensor.float() * torch.pow(10.0, power))


SHAPED = {
    "equal": _equal,
    "steep": _steep,
    "zeros": _zeros,
    "largest": _largest,
    "products": _products,
}


def _factors(spec: Spec) -> tuple[str, ...]:
    """Tensors whose infinite products with the smallest weights are not promised to be R's."""
    return ("kv", "grad_out") if spec.ratio == LONG else ("kv",)


def _sprinkle(tensor: torch.Tensor, spec: Spec, name: str, random: torch.Generator) -> None:
    """Puts special numbers where chance says, about `rate` of them in a column of a window."""
    top = torch.finfo(tensor.dtype).max
    numbers = list(TAME) + ([top, -top] if spec.extreme else [])
    if spec.kind in APART and name in _factors(spec):
        # What an infinite product gives under a weight below the smallest number is R's rounding.
        most = SMALL[-1] if spec.ratio == LONG else top
        numbers = [x for x in numbers if not abs(x) > most]
    chosen = torch.randint(len(numbers), tensor.shape, generator=random)
    values = torch.tensor(numbers, dtype=torch.float32)[chosen].to(tensor.dtype)
    here = _uniform(tensor.shape, random) < spec.rate / (spec.ratio * spec.coff)
    tensor.copy_(torch.where(here, values, tensor))
