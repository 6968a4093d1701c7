# SPDX-License-Identifier: Apache-2.0
from typing import Any, TypedDict

class VariantRecord(TypedDict):
    name: str
    operation: str
    ratio: int
    coff: int
    dtype: str
    columns: int
    threads: int
    dynamic_shared: int

class ImageRecord(TypedDict):
    variant: str
    arch: int
    sha256: str
    bytes: int
    registers: int
    static_shared: int
    symbol: str

class BundleInfo(TypedDict):
    source: str
    sha256: str
    schema: int
    variants: list[VariantRecord]
    images: list[ImageRecord]

class DeviceRecord(TypedDict):
    ordinal: int
    name: str
    compute_capability: int
    shared_limit: int
    arch: int | None
    multiprocessors: int

class DriverInfo(TypedDict):
    version: int
    devices: list[DeviceRecord]

def launch_forward(
    *,
    device: int | None = 0,
    ratio: int | None = 0,
    coff: int | None = 0,
    dtype: int | None = 0,
    flags: int | None = 0,
    tokens: int | None = 0,
    segments: int | None = 0,
    rows: int | None = 0,
    head_dim: int | None = 0,
    kv: int | None = None,
    score: int | None = None,
    ape: int | None = None,
    cu_seqlens: int | None = None,
    cu_seqlens_comp: int | None = None,
    out: int | None = None,
    grad_out: int | None = None,
    grad_kv: int | None = None,
    grad_score: int | None = None,
    grad_ape: int | None = None,
    workspace: int | None = None,
    workspace_bytes: int | None = 0,
    kv_stride: int | None = 0,
    score_stride: int | None = 0,
    out_stride: int | None = 0,
    grad_out_stride: int | None = 0,
    grad_kv_stride: int | None = 0,
    grad_score_stride: int | None = 0,
    stream: int | None = 0,
    variant: str | None = None,
) -> None: ...
def launch_backward(
    *,
    device: int | None = 0,
    ratio: int | None = 0,
    coff: int | None = 0,
    dtype: int | None = 0,
    flags: int | None = 0,
    tokens: int | None = 0,
    segments: int | None = 0,
    rows: int | None = 0,
    head_dim: int | None = 0,
    kv: int | None = None,
    score: int | None = None,
    ape: int | None = None,
    cu_seqlens: int | None = None,
    cu_seqlens_comp: int | None = None,
    out: int | None = None,
    grad_out: int | None = None,
    grad_kv: int | None = None,
    grad_score: int | None = None,
    grad_ape: int | None = None,
    workspace: int | None = None,
    workspace_bytes: int | None = 0,
    kv_stride: int | None = 0,
    score_stride: int | None = 0,
    out_stride: int | None = 0,
    grad_out_stride: int | None = 0,
    grad_kv_stride: int | None = 0,
    grad_score_stride: int | None = 0,
    stream: int | None = 0,
    variant: str | None = None,
) -> None: ...
def explain(
    operation: str,
    *,
    device: int | None = 0,
    ratio: int | None = 0,
    coff: int | None = 0,
    dtype: int | None = 0,
    flags: int | None = 0,
    tokens: int | None = 0,
    segments: int | None = 0,
    rows: int | None = 0,
    head_dim: int | None = 0,
    kv: int | None = None,
    score: int | None = None,
    ape: int | None = None,
    cu_seqlens: int | None = None,
    cu_seqlens_comp: int | None = None,
    out: int | None = None,
    grad_out: int | None = None,
    grad_kv: int | None = None,
    grad_score: int | None = None,
    grad_ape: int | None = None,
    workspace: int | None = None,
    workspace_bytes: int | None = 0,
    kv_stride: int | None = 0,
    score_stride: int | None = 0,
    out_stride: int | None = 0,
    grad_out_stride: int | None = 0,
    grad_kv_stride: int | None = 0,
    grad_score_stride: int | None = 0,
    stream: int | None = 0,
    variant: str | None = None,
    compute_capability: int | None = None,
    shared_limit: int | None = 0,
) -> dict[str, Any]: ...
def backward_workspace_bytes(
    tokens: int, rows: int, head_dim: int, ratio: int, coff: int, dtype_code: int
) -> int: ...
def load(device: int = -1, bundle: str | None = None) -> None: ...
def bundle_info() -> BundleInfo: ...
def driver_info() -> DriverInfo: ...
def launch_counts() -> dict[tuple[str, int], int]: ...
def abi_version() -> int: ...
