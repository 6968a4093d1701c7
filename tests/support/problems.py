# SPDX-License-Identifier: Apache-2.0
"""Well-formed calls of the launcher, with addresses that nothing reads."""

from typing import Any

GIB = 1 << 30
POINTERS = (
    "kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "out",
    "grad_out", "grad_kv", "grad_score", "grad_ape", "workspace",
)  # fmt: skip


def address(name: str) -> int:
    """64 TiB apart, so that no two tensors meet."""
    return (POINTERS.index(name) + 1) << 46


def _common(ratio: int, coff: int, head_dim: int, tokens: int, rows: int) -> dict[str, Any]:
    inputs = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
    return {
        "ratio": ratio,
        "coff": coff,
        "dtype": 1,
        "tokens": tokens,
        "segments": 1,
        "rows": rows,
        "head_dim": head_dim,
        "kv_stride": coff * head_dim,
        "score_stride": coff * head_dim,
        **{name: address(name) for name in inputs},
    }


def forward(
    ratio: int = 4,
    coff: int = 2,
    head_dim: int = 128,
    tokens: int = 64,
    rows: int = 16,
    **more: Any,
) -> dict[str, Any]:
    """Keywords of launch_forward; `more` replaces some."""
    call = _common(ratio, coff, head_dim, tokens, rows)
    return call | {"out": address("out"), "out_stride": head_dim} | more


def backward(
    ratio: int = 4,
    coff: int = 2,
    head_dim: int = 128,
    tokens: int = 64,
    rows: int = 16,
    **more: Any,
) -> dict[str, Any]:
    """Keywords of launch_backward; `more` replaces some."""
    call = _common(ratio, coff, head_dim, tokens, rows)
    names = ("grad_out", "grad_kv", "grad_score", "grad_ape", "workspace")
    call |= {name: address(name) for name in names}
    call |= {"grad_out_stride": head_dim, "workspace_bytes": GIB}
    return call | dict.fromkeys(("grad_kv_stride", "grad_score_stride"), coff * head_dim) | more
