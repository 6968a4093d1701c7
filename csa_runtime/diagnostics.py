# SPDX-License-Identifier: Apache-2.0
"""What is in the bundle, what ran on a GPU, and what a call would launch."""

from __future__ import annotations

from typing import Any

from csa_runtime import _native
from csa_runtime.checks import DTYPE_CODES, integer, window
from csa_runtime.errors import DriverError

COMPILED_ONLY = "compiled only"
ELEMENT = 2  # bytes; the alignment that the tensors of all served calls have


def version() -> str:
    """The installed distribution's version."""
    from importlib import metadata

    try:
        return metadata.version("csa-runtime")
    except metadata.PackageNotFoundError:
        return "0+source"


def reason(error: DriverError) -> str:
    """Why there is no GPU to use, in a few words."""
    if error.call == "dlopen":
        return "no CUDA driver, libcuda.so.1 cannot be opened"
    if error.call and error.name:
        return f"{error.name} ({error.code}) from {error.call}"
    return str(error)


def load(device: int | None = None, *, bundle: str | None = None) -> None:
    """Load and finish every kernel of the device's architecture: no later launch loads anything.

    Args:
        device: CUDA ordinal; None is the current context's device, or 0 without one.
        bundle: path of a bundle to use in place of the packaged one; only before its first use.

    Raises:
        ValueError: what is no ordinal or no path.
        UnsupportedArch: no image runs on the device.
        DriverError: no driver, too old a driver, or a failed call.
        BundleError: damaged, of another schema, or chosen after first use.
    """
    from os import fspath

    try:
        path = None if bundle is None else fspath(bundle)
    except TypeError:
        path = bundle
    if path is not None and not isinstance(path, str):
        raise ValueError(
            f"bundle is a {type(bundle).__qualname__}; the path of a bundle.bin, a str or a "
            "pathlib.Path, is allowed"
        )
    _native.load(-1 if device is None else integer("device", device, 0), path)


def _dtype_code(dtype: str) -> int:
    code = DTYPE_CODES.get(dtype) if isinstance(dtype, str) else None
    if code is None:
        raise ValueError(f"dtype is {dtype!r}; one of {', '.join(DTYPE_CODES)} is allowed")
    return code


def backward_workspace_bytes(
    total_tokens: int,
    total_comp: int,
    head_dim: int,
    *,
    ratio: int,
    coff: int,
    dtype: str = "bfloat16",
) -> int:
    """Bytes of workspace that suffice for a backward on every device and for every alignment.

    Starts no driver and does not grow with `total_tokens`: at most 32 MiB up to
    `coff * head_dim = 1024`. The memory is contiguous, 16-byte aligned, uninitialised, not kept
    between calls and not shared by calls that may overlap.

    Args:
        total_tokens: tokens of the pack.
        total_comp: rows of `out`, padding included.
        head_dim: columns of `out`.
        ratio: tokens of a block.
        coff: 1 or 2.
        dtype: of kv: "bfloat16", or "float16" and "float32" once images serve them.

    Raises:
        ValueError: a window, dtype or size that no variant serves.
    """
    ratio, coff = window(ratio, coff)
    return _native.backward_workspace_bytes(
        integer("total_tokens", total_tokens, 0),
        integer("total_comp", total_comp, 0),
        integer("head_dim", head_dim, 1),
        ratio,
        coff,
        _dtype_code(dtype),
    )


def explain(
    operation: str = "forward",
    *,
    ratio: int,
    coff: int,
    head_dim: int,
    total_tokens: int,
    total_comp: int,
    segments: int = 1,
    dtype: str = "bfloat16",
    ape: bool = True,
    alignment: int = 256,
    device: int = 0,
    compute_capability: int | tuple[int, int] | None = None,
    shared_limit: int = 0,
    variant: str | None = None,
) -> dict[str, Any]:
    """What a call with contiguous tensors would launch; nothing is launched.

    Args:
        operation: "forward" or "backward".
        ratio: tokens of a block.
        coff: 1 or 2.
        head_dim: columns of `out`.
        total_tokens: tokens of the pack.
        total_comp: rows of `out`.
        segments: of the pack.
        dtype: of kv.
        ape: whether there is one, and so a grad_ape.
        alignment: bytes, a power of two, to which all base addresses are aligned and no further.
        device: ordinal of the CUDA device asked about.
        compute_capability: such as 90 or (9, 0), to ask about a device that is not here; no driver.
        shared_limit: with it, the most shared memory a block may have there, bytes; 0 is that of
            its architecture.
        variant: force one by name. Of the schedules' rows that name it, the first for the size says
            how it is launched; if none is for it, the first.

    Returns:
        variant: name of the kernel; image: sha256 of its cubin; arch: of that, such as 90;
        compute_capability, shared_limit: of the device; grid, block: three extents each;
        lanes_log2, column_tiles, groups, fill_ctas: how rows and columns are dealt to threads;
        workspace_bytes: what this very call needs; launches: each kernel's variant, grid, block,
        shared (dynamic bytes) and parameters (the bytes it is given).

    Raises:
        ValueError: nothing serves the call.
        RuntimeError: without `compute_capability`, the driver's errors.
    """
    if not isinstance(operation, str) or operation not in ("forward", "backward"):
        raise ValueError(f"operation is {operation!r}; 'forward' or 'backward' is allowed")
    ratio, coff = window(ratio, coff)
    alignment = integer("alignment", alignment, 1)
    if alignment & (alignment - 1):
        raise ValueError(f"alignment is {alignment}; a power of two is allowed")
    if variant is not None and not isinstance(variant, str):
        raise ValueError(
            f"variant is {variant!r}; a name from info()['variants'], or None, is allowed"
        )
    names = ["kv", "score", "cu_seqlens", "cu_seqlens_comp", *(["ape"] if ape else [])]
    words = integer("head_dim", head_dim, 1)
    fields: dict[str, Any] = {"kv_stride": coff * words, "score_stride": coff * words}
    if operation == "forward":
        names += ["out"]
        fields["out_stride"] = words
    else:
        names += ["grad_out", "grad_kv", "grad_score", *(["grad_ape", "workspace"] if ape else [])]
        fields |= dict.fromkeys(("grad_kv_stride", "grad_score_stride"), coff * words)
        fields["grad_out_stride"] = words
        if ape:
            fields["workspace_bytes"] = backward_workspace_bytes(
                total_tokens, total_comp, head_dim, ratio=ratio, coff=coff, dtype=dtype
            )
    # Addresses that nothing dereferences, far enough apart for any tensor. The pointers that have
    # an alignment of their own keep it.
    own = {"ape": 4, "cu_seqlens": 4, "cu_seqlens_comp": 4, "grad_ape": 4, "workspace": 16}
    for position, name in enumerate(names, start=1):
        fields[name] = (position << 48) + max(alignment, own.get(name, 1))
    try:
        result: dict[str, Any] = _native.explain(
            operation,
            device=integer("device", device, 0),
            ratio=ratio,
            coff=coff,
            dtype=_dtype_code(dtype),
            tokens=integer("total_tokens", total_tokens, 0),
            segments=integer("segments", segments, 0),
            rows=integer("total_comp", total_comp, 0),
            head_dim=words,
            compute_capability=_capability(compute_capability),
            shared_limit=integer("shared_limit", shared_limit, 0),
            variant=variant,
            **fields,
        )
    except DriverError as error:
        text = f"{error}; explain() asks no driver when given compute_capability="
        raise DriverError(text, error.name, error.code, error.call) from None
    return result


def _capability(given: int | tuple[int, int] | None) -> int | None:
    """90 for 90 and for (9, 0)."""
    if given is None:
        return None
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return 10 * integer("compute_capability[0]", given[0], 1, 100) + integer(
            "compute_capability[1]", given[1], 0, 10
        )
    if not isinstance(given, int) or isinstance(given, bool) or not 10 <= given < 1000:
        raise ValueError(
            f"compute_capability is {given!r}; 90 or (9, 0) for 9.0 is allowed: pass ten times the "
            "major plus the minor"
        )
    return given


def _evidence() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The packaged manifest and attestations; those of the source tree when run from there."""
    import json
    from pathlib import Path

    here = Path(__file__).resolve().parent
    folder = here / "evidence"
    if not folder.is_dir():
        folder = here.parent / "cubins"
    manifest = folder / "manifest.json"
    attested = sorted((folder / "attested").glob("*.json"))
    return (
        json.loads(manifest.read_text()) if manifest.is_file() else {},
        [json.loads(path.read_text()) for path in attested],
    )


def _ran_on(attestations: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By image digest: the GPUs that launched it in a passing test."""
    ran: dict[str, list[dict[str, Any]]] = {}
    for attestation in attestations:
        summary = {key: attestation.get(key) for key in ("gpu", "driver")}
        summary["passed"] = attestation.get("suite", {}).get("passed")
        for image in attestation.get("images", ()):
            ran.setdefault(image["sha256"], []).append(summary)
    return ran


def info(devices: bool = False) -> dict[str, Any]:
    """What is installed, as plain data; starts no driver unless `devices`.

    Args:
        devices: also ask the driver for its version and the devices.

    Returns:
        version, toolchain, bundle (source, digest), architectures, variants, images (each with
        `ran_on`, the GPUs that passed tests with it, and `status`, "compiled only" without any),
        and with `devices` the driver's version and devices.

    Raises:
        BundleError: the bundle is damaged.
        DriverError: with `devices`, no driver or a failed call.
    """
    bundle = _native.bundle_info()
    manifest, attestations = _evidence()
    ran = _ran_on(attestations)
    images = []
    for image in bundle["images"]:
        gpus = ran.get(image["sha256"], [])
        names = ", ".join(sorted({str(gpu["gpu"]) for gpu in gpus}))
        status = f"ran on {names}" if gpus else COMPILED_ONLY
        images.append({**image, "ran_on": gpus, "status": status})
    result: dict[str, Any] = {
        "version": version(),
        "toolchain": manifest.get("toolchain", {}),
        "bundle": {"source": bundle["source"], "sha256": bundle["sha256"]},
        "architectures": sorted({image["arch"] for image in images}),
        "variants": list(bundle["variants"]),
        "images": images,
    }
    if devices:
        driver = _native.driver_info()
        result["driver"] = driver["version"]
        result["devices"] = driver["devices"]
    return result
