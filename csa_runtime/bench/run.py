# SPDX-License-Identifier: Apache-2.0
"""A run on this machine's GPU: finds the systems, measures section by section."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from csa_runtime import _native, diagnostics
from csa_runtime.bench import clock
from csa_runtime.bench.eager import Eager
from csa_runtime.bench.ours import Ours
from csa_runtime.bench.packs import Pack
from csa_runtime.bench.peer import DISTRIBUTION, Imported, Peer, lift_gate
from csa_runtime.bench.record import EAGER, OURS, PEER, TWIN, Record, said
from csa_runtime.bench.sections import SECTIONS, Scope, Systems
from csa_runtime.bench.twin import Twin

SEED = 0
CACHE = 50 << 20  # bytes of second-level cache, where torch does not say


def measure(
    sections: tuple[str, ...],
    names: tuple[str, ...],
    chosen: tuple[Pack, ...],
    *,
    variant: str | None,
    lift: bool,
    each: Callable[[Record, str], None],
) -> Record:
    """Measure on device 0.

    Args:
        sections: of `SECTIONS`, in this order.
        names: of systems; the peer is left out, with a note, where it cannot be imported, and the
            twin where it cannot be compiled.
        chosen: packs of the sections graph, kernels, wall and cold.
        variant: of this library, forced where it serves.
        lift: let the peer run on GPUs older than it admits.
        each: called after each section with the record so far and the section's name.

    Raises:
        RuntimeError: torch finds no GPU, or a problem of ours cannot be made.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no GPU; one built for CUDA is needed")
    record = Record(machine=_machine(variant))
    systems = _systems(names, variant, lift, record)
    torch.manual_seed(SEED)
    properties = torch.cuda.get_device_properties(0)
    cache = getattr(properties, "L2_cache_size", CACHE)
    # Captures need another stream than the default one; autograd goes where a forward ran.
    stream: Any = torch.cuda.Stream
    with torch.cuda.device(0), torch.cuda.stream(stream()):
        _native.load(0, None)
        scope = Scope(systems, chosen, cache, _twin(record) if TWIN in names else None)
        clock.raise_clocks()
        gc.freeze()  # each capture collects garbage: not torch's own modules each time
        for section in sections:
            begin = time.monotonic()
            for pack, row in SECTIONS[section](scope):
                record.add(pack, row)
            record.seconds[section] = round(time.monotonic() - begin, 1)
            each(record, section)
        gc.unfreeze()
    return record


def _machine(variant: str | None) -> dict[str, str]:
    """What all times depend on."""
    bundle, driver = _native.bundle_info(), _native.driver_info()["version"]
    major, minor = torch.cuda.get_device_capability(0)
    return {
        "gpu": torch.cuda.get_device_name(0),
        "capability": f"{major}.{minor}",
        "driver": f"CUDA {driver // 1000}.{driver % 1000 // 10}",
        "torch": torch.__version__,
        "bundle": f"{bundle['source']}, {bundle['sha256'][:12]}",
        "variant": variant or "scheduled",
    }


def _systems(names: tuple[str, ...], variant: str | None, lift: bool, record: Record) -> Systems:
    """Those that can be had; the record says which they are, and why others are missing."""
    systems: Systems = {}
    if OURS in names:
        systems[OURS] = Ours(variant)
        record.systems[OURS] = diagnostics.version()
    if EAGER in names:
        systems[EAGER] = Eager()
        record.systems[EAGER] = f"torch {torch.__version__}"
    if PEER in names:
        try:
            systems[PEER] = Peer(Imported())
        except Exception as error:  # whatever its import raises
            record.systems[PEER] = f"left out: {said(error)}"
        else:
            gate = lift_gate(torch.cuda.get_device_capability(0)[0]) if lift else ""
            version = f"{DISTRIBUTION} {_version(DISTRIBUTION)}"
            record.systems[PEER] = "; ".join(filter(None, (version, gate)))
    return systems


def _twin(record: Record) -> Twin | None:
    """Compiled, or left out; the record says which."""
    try:
        twin = Twin()
    except RuntimeError as error:
        record.systems[TWIN] = f"left out: {error}"
        return None
    record.systems[TWIN] = f"compiled by {twin.compiler}"
    return twin


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"
