# SPDX-License-Identifier: Apache-2.0
"""Arguments that are wrong or unusual: what each changes in a sound call.

A case is a function of the sound arguments that returns the changed ones; its first key says which
calls it concerns, those that take that argument. Numbers are those of docs/seed_coverage.md,
"Differences": what lets the two systems answer differently.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Arguments = dict[str, Any]
MISSING = object()  # the argument is left out
WIDE, STRIDED, OTHER_WINDOWS, OTHER_ARRAYS, STREAMS, WORKSPACE = 3, 2, 4, 5, 6, 14
NUMBERS, OVERLAP, RECORDED = 17, 18, 19
READ = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
RESULTS = ("out", "grad_out", "grad_kv", "grad_score", "grad_ape")


class Case(NamedTuple):
    """What is changed, and the differences that explain another answer.

    `known` lets this library serve the call, `refused` lets it raise a ValueError that names the
    argument.
    """

    change: Callable[[Arguments], Arguments]
    known: int | None = None
    refused: int | None = None


def columns_apart(t: torch.Tensor) -> torch.Tensor:
    """The same shape, elements of a row two apart."""
    return torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]


def rows_apart(t: torch.Tensor) -> torch.Tensor:
    """The same shape, rows twice as far apart."""
    return torch.cat([t, t], dim=1)[:, : t.shape[1]]


def shifted(t: torch.Tensor) -> torch.Tensor:
    """A contiguous copy one element off the start of its memory."""
    memory = t.new_zeros(t.numel() + 1)
    return memory[1:].view(t.shape).copy_(t)


def setting(name: str, value: Any) -> Callable[[Arguments], Arguments]:
    """A change of one argument to a value."""
    return lambda _: {name: value}


def changing(names: tuple[str, ...], change: Callable[[Any], Any]) -> Any:
    """A change of these arguments, each by a function of what it is."""
    return lambda a: {name: change(a[name]) for name in names if a[name] is not None}


def _dtypes() -> dict[str, Case]:
    found = {}
    for name in ("kv", "score", "out", "grad_out", "grad_kv", "grad_score"):
        for dtype in (torch.float32, torch.float16):
            words = f"{name} {str(dtype).removeprefix('torch.')}"
            found[words] = Case(changing((name,), lambda t, to=dtype: t.to(to)))
    for name in ("ape", "grad_ape"):
        found[f"{name} bfloat16"] = Case(changing((name,), lambda t: t.bfloat16()))
        found[f"{name} float64"] = Case(changing((name,), lambda t: t.double()))
    for name in ("cu_seqlens", "cu_seqlens_comp"):
        found[f"{name} int64"] = Case(changing((name,), lambda t: t.long()))
        found[f"{name} float32"] = Case(changing((name,), lambda t: t.float()))
    every = ("kv", "score", "out", "grad_out", "grad_kv", "grad_score")
    found["all float16"] = Case(changing(every, lambda t: t.half()))
    found["both prefixes int64"] = Case(changing(READ[3:], lambda t: t.long()))
    return found


def _shapes() -> dict[str, Case]:
    flat, deep = (lambda t: t.flatten()), (lambda t: t[None])
    found = {}
    for name in (*READ, *RESULTS):
        found[f"{name} one dimension more"] = Case(changing((name,), deep))
    for name in ("kv", "score", "ape", *RESULTS):
        found[f"{name} flat"] = Case(changing((name,), flat))
        found[f"{name} a row less"] = Case(changing((name,), lambda t: t[:-1]))
        narrower = changing((name,), lambda t: t[:, :-1].contiguous())
        found[f"{name} a column less"] = Case(narrower)
    both = ("kv", "score")
    return found | {
        "kv and score without columns": Case(changing(both, lambda t: t[:, :0])),
        "kv and score without tokens": Case(changing(both, lambda t: t[:0])),
        "kv and score shorter than ratio": Case(changing(both, lambda t: t[:3])),
        "kv a scalar": Case(changing(("kv",), lambda t: t[0, 0])),
        "cu_seqlens shorter": Case(changing(("cu_seqlens",), lambda t: t[:-1])),
        "cu_seqlens_comp shorter": Case(changing(("cu_seqlens_comp",), lambda t: t[:-1])),
        "prefixes of no segment": Case(changing(READ[3:], lambda t: t[:1]), OTHER_WINDOWS),
        "prefixes without elements": Case(changing(READ[3:], lambda t: t[:0])),
        "ape of ratio 2": Case(changing(("ape",), lambda t: t[:2].contiguous())),
        "ape of one half": Case(changing(("ape",), lambda t: t[:, : t.shape[1] // 2].contiguous())),
    }


def _layouts() -> dict[str, Case]:
    found = {}
    for name in ("kv", "score", "out", "grad_out", "grad_kv", "grad_score"):
        found[f"{name} columns apart"] = Case(changing((name,), columns_apart))
        found[f"{name} rows apart"] = Case(changing((name,), rows_apart), STRIDED)
        found[f"{name} 2 bytes off"] = Case(changing((name,), shifted), STRIDED)
    for name in ("ape", "grad_ape"):
        found[f"{name} rows apart"] = Case(changing((name,), rows_apart))
        found[f"{name} 4 bytes off"] = Case(changing((name,), shifted), STRIDED)
    for name in ("cu_seqlens", "cu_seqlens_comp"):
        apart = changing((name,), columns_apart)
        found[f"{name} elements apart"] = Case(apart)
        found[f"{name} 4 bytes off"] = Case(changing((name,), shifted))
    return found | {
        "kv one row for all": Case(changing(("kv",), lambda t: t[:1].expand(t.shape)), STRIDED),
        "out one row for all": Case(changing(("out",), lambda t: t[:1].expand(t.shape))),
        "kv transposed": Case(changing(("kv",), lambda t: t.t().contiguous().t())),
    }


def _places() -> dict[str, Case]:
    away = lambda t: t.cpu()  # noqa: E731
    found = {}
    for name in (*READ, *RESULTS):
        found[f"{name} on the CPU"] = Case(changing((name,), away))
        found[f"{name} meta"] = Case(changing((name,), lambda t: t.to("meta")))
    every = (*READ, *RESULTS)
    return found | {
        "all on the CPU": Case(changing(every, away), OTHER_ARRAYS),
        "all meta": Case(changing(every, lambda t: t.to("meta"))),
    }


def _kinds() -> dict[str, Case]:
    found = {}
    for name in (*READ, *RESULTS):
        found[f"{name} None"] = Case(setting(name, None), OTHER_WINDOWS if name == "ape" else None)
        found[f"{name} left out"] = Case(setting(name, MISSING))
        found[f"{name} a list"] = Case(setting(name, [0, 4]))
    as_numpy = changing(("cu_seqlens",), lambda t: t.cpu().numpy())
    return found | {
        "ape and grad_ape None": Case(lambda _: {"ape": None, "grad_ape": None}, OTHER_WINDOWS),
        "kv a string": Case(setting("kv", "kv")),
        "kv a number": Case(setting("kv", 5)),
        "kv of NumPy": Case(setting("kv", np.zeros((64, 256), np.float32))),
        "cu_seqlens of NumPy": Case(as_numpy),
        "kv wants a gradient": Case(changing(("kv",), lambda t: t.clone().requires_grad_())),
        "ape a parameter": Case(changing(("ape",), lambda t: torch.nn.Parameter(t.clone()))),
        "out wants a gradient": Case(
            changing(("out",), lambda t: t.clone().requires_grad_()), refused=RECORDED
        ),
        "an argument too many": Case(setting("colour", 1)),
    }


def _windows() -> dict[str, Case]:
    ratios = (0, 1, 3, 8, 32, 64, 129, -4, "4", 4.0, 4.5, True, None, MISSING)
    coffs = (0, 3, -1, "2", 2.0, True, None, 1, MISSING)
    dims = (0, 64, 256, -1, "128", 128.0, True)
    rows = (-1, 2**31, 2**31 // 128, 2.5, "16", True)
    found = {}
    for name, values in (("ratio", ratios), ("coff", coffs), ("head_dim", dims)):
        for value in values:
            words = "left out" if value is MISSING else repr(value)
            found[f"{name} {words}"] = Case(setting(name, value), refused=NUMBERS)
    for value in rows:
        explained = WIDE if value == 2**31 // 128 else None
        found[f"total_comp {value!r}"] = Case(setting("total_comp", value), explained, NUMBERS)
    found["total_comp a float of the rows"] = Case(
        lambda a: {"total_comp": float(a["rows"])}, refused=NUMBERS
    )
    found["total_comp a tensor"] = Case(lambda a: {"total_comp": a["cu_seqlens_comp"][-1]})
    found["deterministic a string"] = Case(setting("deterministic", "yes"))
    return found


def _streams() -> dict[str, Case]:
    found = {
        f"stream {value!r}": Case(
            setting("stream", value), STREAMS if value == 2 else None, NUMBERS
        )
        for value in (0, 1, 2, "0", "x", 1.5, [0])
    }
    found["stream of torch"] = Case(lambda a: {"stream": a["streams"]()[0]}, STREAMS)
    found["stream a handle"] = Case(lambda a: {"stream": a["streams"]()[0].cuda_stream})
    found["stream of cuda.bindings"] = Case(lambda a: {"stream": a["streams"]()[1]})
    return found


def _buffers() -> dict[str, Case]:
    def bytes_of(a: Arguments, size: int) -> torch.Tensor:
        return torch.zeros(max(0, size), dtype=torch.uint8, device=a["kv"].device)

    off = changing(("workspace",), lambda t: t.new_zeros(t.numel() + 16)[1:-15])
    apart = changing(("workspace",), lambda t: t.new_zeros(2 * t.numel())[::2])
    words = changing(("workspace",), lambda t: t.new_zeros((t.numel() + 3) // 4).float())
    return {
        "workspace None": Case(setting("workspace", None), WORKSPACE),
        "workspace a list": Case(setting("workspace", [0])),
        "workspace 16 bytes short": Case(
            lambda a: {"workspace": bytes_of(a, a["workspace"].numel() - 16)}, WORKSPACE
        ),
        "workspace empty": Case(lambda a: {"workspace": bytes_of(a, 0)}),
        "workspace larger": Case(lambda a: {"workspace": bytes_of(a, a["workspace"].numel() + 64)}),
        "workspace 1 byte off": Case(off),
        "workspace bytes apart": Case(apart),
        "workspace float32": Case(words),
        "workspace int8": Case(changing(("workspace",), lambda t: t.view(torch.int8))),
        "workspace on the CPU": Case(changing(("workspace",), lambda t: t.cpu())),
        "workspace of two dimensions": Case(changing(("workspace",), lambda t: t.view(2, -1))),
        "workspace in an operand": Case(
            lambda a: {"workspace": _shared(a), "grad_kv": _shared(a, a["grad_kv"].shape)}
        ),
        "workspace where none is used": Case(
            lambda a: {"workspace": a["workspace"], "deterministic": False}, WORKSPACE
        ),
        "grad_kv is kv": Case(lambda a: {"grad_kv": a["kv"]}, refused=OVERLAP),
        "grad_score is grad_kv": Case(lambda a: {"grad_score": a["grad_kv"]}, refused=OVERLAP),
        "out in kv": Case(
            lambda a: {"out": a["kv"].flatten()[: a["out"].numel()].view_as(a["out"])},
            refused=OVERLAP,
        ),
        "grad_ape is ape": Case(lambda a: {"grad_ape": a["ape"]}, refused=OVERLAP),
    }


def _shared(a: Arguments, shape: Any = None) -> torch.Tensor:
    """Memory that holds a workspace, or a bf16 result of that shape at its start."""
    size = max(a["workspace"].numel(), a["grad_kv"].numel() * 2)
    memory = a.setdefault("shared", a["workspace"].new_zeros(size))
    if shape is None:
        return memory
    return memory[: a["grad_kv"].numel() * 2].view(torch.bfloat16).view(shape)


CASES: dict[str, Case] = {
    **_dtypes(), **_shapes(), **_layouts(), **_places(), **_kinds(), **_windows(), **_streams(),
    **_buffers(),
}  # fmt: skip
