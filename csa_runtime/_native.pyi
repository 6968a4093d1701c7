# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any, TypedDict

from typing_extensions import Unpack

class VariantRecord(TypedDict):
    name: str
    operation: str
    ratio: int
    coff: int
    dtype: str
    kind: str
    columns: int
    alignment: int
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

# The fields of csa_args but its size, by its names and in its order, and two more. Numbers default
# to 0, addresses and the variant to None.
class Launch(TypedDict, total=False):
    device: int | None
    ratio: int | None
    coff: int | None
    dtype: int | None
    flags: int | None
    tokens: int | None
    segments: int | None
    rows: int | None
    head_dim: int | None
    kv: int | None
    score: int | None
    ape: int | None
    cu_seqlens: int | None
    cu_seqlens_comp: int | None
    out: int | None
    grad_out: int | None
    grad_kv: int | None
    grad_score: int | None
    grad_ape: int | None
    workspace: int | None
    workspace_bytes: int | None
    kv_stride: int | None
    score_stride: int | None
    out_stride: int | None
    grad_out_stride: int | None
    grad_kv_stride: int | None
    grad_score_stride: int | None
    stream: int | None
    variant: str | None

class Explain(Launch, total=False):
    compute_capability: int | None
    shared_limit: int | None

def launch_forward(**fields: Unpack[Launch]) -> None: ...
def launch_backward(**fields: Unpack[Launch]) -> None: ...
def explain(operation: str, **fields: Unpack[Explain]) -> dict[str, Any]: ...
def backward_workspace_bytes(
    tokens: int, rows: int, head_dim: int, ratio: int, coff: int, dtype_code: int
) -> int: ...
def load(device: int = -1, bundle: str | None = None) -> None: ...
def bundle_info() -> BundleInfo: ...
def driver_info() -> DriverInfo: ...
def launch_counts() -> dict[tuple[str, int], int]: ...
def bind_torch(
    tensor: type, parameter: type, exchange: object, stream: Callable[[int], int]
) -> None: ...
def torch_forward(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: Any,
    coff: Any,
    total_comp: Any,
    out: Any,
    stream: Any,
    /,
) -> Any: ...
def torch_backward(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    grad_out: Any,
    ratio: Any,
    coff: Any,
    need_ape: bool,
    grads: Any,
    workspace: Any,
    accumulate: Any,
    stream: Any,
    /,
) -> tuple[Any, Any, Any] | None: ...
def torch_usual(kv: Any, score: Any, ape: Any, *others: Any) -> bool: ...
def abi_version() -> int: ...
