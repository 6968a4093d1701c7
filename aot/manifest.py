# SPDX-License-Identifier: Apache-2.0
"""The manifest of the tables and images at hand: what `cubins/manifest.json` will say."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aot import bundle, elf
from aot.compile import DSL, DSL_VERSION, FLAVOUR, NEW_LAYOUT, OPTIONS, check
from aot.schedules import SCHEDULES, Schedule
from aot.variants import PARAMETERS, VARIANTS, Variant

HERE = Path(__file__).parent

Record = dict[str, Any]
ImageKey = tuple[str, int]


def jobs() -> list[tuple[Variant, int]]:
    """Every (variant, architecture) of the bundle, in its order."""
    return [(variant, arch) for variant in VARIANTS for arch in variant.architectures]


def source_digest() -> str:
    """sha256 in hex over the names and bytes of every source that decides an image's bytes."""
    digest = hashlib.sha256()
    sources = [*HERE.glob("kernels/**/*.py"), HERE / "variants.py", HERE / "compile.py"]
    for path in sorted(sources):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(HERE).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def image_record(variant: Variant, arch: int, image: bytes, digest: str) -> Record:
    """The manifest's record of an image built from sources of `digest`, read from its bytes.

    Raises:
        CompileError, elf.ElfError: as `aot.compile.check`.
    """
    kernel = check(variant, arch, image)
    cubin = elf.read(image)
    return {
        "variant": variant.name,
        "arch": arch,
        "file": bundle.image_file(variant.name, arch),
        "bytes": len(image),
        "sha256": hashlib.sha256(image).hexdigest(),
        "symbol": kernel.symbol,
        "registers": kernel.registers,
        "static_shared": kernel.static_shared,
        "frame": kernel.frame,
        "block": list(kernel.block or ()),
        "parameters": [list(parameter) for parameter in kernel.parameters],
        "abi_version": cubin.abi_version,
        "elf_flags": cubin.elf_flags,
        "toolchain_release": cubin.release,
        "source_digest": digest,
    }


def _variant_record(variant: Variant) -> Record:
    return {
        "name": variant.name,
        "operation": variant.operation,
        "ratio": variant.ratio,
        "coff": variant.coff,
        "dtype": variant.dtype,
        "kind": "early" if variant.kind == "short" and variant.early else variant.kind,
        "rows": variant.rows,
        "columns": variant.columns,
        "alignment": variant.required_alignment,
        "threads": variant.threads,
        "dynamic_shared": variant.dynamic_shared,
        "params": list(variant.parameters),
    }


def _schedule_record(schedule: Schedule) -> Record:
    return {
        "arch": schedule.architecture,
        "operation": schedule.variant.operation,
        "ratio": schedule.variant.ratio,
        "coff": schedule.variant.coff,
        "dtype": schedule.variant.dtype,
        "variant": schedule.variant.name,
        "max_elements": schedule.max_elements,
        "max_rows_per_segment": schedule.max_rows_per_segment,
        "lanes_log2": schedule.lanes_log2,
        "ctas": schedule.ctas,
        "fill_ctas": schedule.fill_ctas,
        "evidence": schedule.evidence,
    }


def compose(records: Iterable[Record]) -> bundle.Manifest:
    """The manifest of these images, with the tables as they are now.

    Schedules whose image is missing, in a tree built in part, are left out.
    """
    by_key: dict[ImageKey, Record] = {(r["variant"], r["arch"]): r for r in records}
    keys = [(variant.name, arch) for variant, arch in jobs()]
    return {
        "schema": bundle.SCHEMA,
        "toolchain": {
            DSL: DSL_VERSION,
            "flavour": FLAVOUR,
            "ptxas": NEW_LAYOUT[1],
            "options": OPTIONS,
        },
        "source_digest": source_digest(),
        "parameters": {name: {"id": i, "bytes": b} for name, (i, b) in PARAMETERS.items()},
        "variants": [_variant_record(variant) for variant in VARIANTS],
        "schedules": [
            _schedule_record(schedule)
            for schedule in SCHEDULES
            if (schedule.variant.name, schedule.architecture) in by_key
        ],
        "images": [by_key[key] for key in keys if key in by_key],
    }
