# SPDX-License-Identifier: Apache-2.0
"""The command line of `csa-runtime bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from csa_runtime.bench.record import Record

# As they are measured: the profiler comes last, for what followed it was slower.
SECTIONS = {
    "graph": "time per call inside a graph: forward, backward, and both",
    "wall": "time per call by the host's clock",
    "host": "what a call costs the calling thread",
    "cold": "as graph, over buffers of three times the second-level cache in turn",
    "segments": "1 to 32,768 segments, alike and ragged",
    "tokens": "1,024 to 131,072 tokens",
    "kernels": "sums of kernel durations, by torch's profiler",
}
SYSTEMS = ("csa_runtime", "eager", "peer", "twin")
EPILOG = (
    "Sections, all where none is named: "
    + "; ".join(f"{name}: {text}" for name, text in SECTIONS.items())
    + ". Systems: csa_runtime; eager, the same in torch's own operations; peer, cuDNN frontend's "
    "CSA compressor, if it is installed; twin, a kernel that moves what the call moves and "
    "computes nothing, where a compiler is at hand. A copy of the same bytes stands beside them."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Declare them."""
    command.epilog = EPILOG
    add = command.add_argument
    add("sections", nargs="*", type=_section, default=[], metavar="SECTION", help="see below")
    add(
        "--systems", type=_systems, default=SYSTEMS, metavar="NAMES",
        help=f"separated by commas, of {', '.join(SYSTEMS)}; all where it is left out",
    )  # fmt: skip
    add(
        "--pack", action="append", type=_pack, metavar="RATIO,COFF,HEAD_DIM,SEGMENTSxLENGTH",
        help="in place of the usual packs of graph, kernels, wall and cold; may be repeated",
    )  # fmt: skip
    add("--variant", metavar="NAME", help="force this kernel variant where it serves")
    add("--lift-gate", action="store_true", help="let the peer run on GPUs older than it admits")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    add("--plots", type=Path, metavar="FOLDER", help="draw PNG files there (needs matplotlib)")
    add(
        "--baseline", type=Path, metavar="FILE",
        help="an earlier --json: list what is slower by more than 3%%, and exit with 1 if anything "
        "is",
    )  # fmt: skip
    add(
        "--from", type=Path, dest="stored", metavar="FILE",
        help="an earlier --json in place of measuring: needs no GPU and no torch",
    )  # fmt: skip


def bench(options: argparse.Namespace) -> int:
    """Measure or read, and print Markdown.

    Returns:
        1 if something is slower than the baseline or a call of this library failed, else 0.

    Raises:
        RuntimeError: no GPU, torch finds none, a file that is no record, a baseline that cannot be
            compared, or options that contradict each other.
        ImportError: torch is missing, or matplotlib where plots are asked for.
    """
    from csa_runtime.bench import tables
    from csa_runtime.bench.record import OURS

    _check(options)  # before minutes are spent
    plots = _plots() if options.plots else None
    before = _read(options.baseline) if options.baseline else None
    record = _read(options.stored) if options.stored else _measure(options)
    text = tables.render(record)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if plots is not None:
        for path in plots.draw(record, options.plots):
            print(f"drawn: {path}", file=sys.stderr)
    failed = any(row.error for row in record.rows if row.system == OURS)
    if before is not None:
        report, slower = _report(options.baseline, before, record)
        print(f"\n{report}")
        failed = failed or slower
    return int(failed)


def _check(options: argparse.Namespace) -> None:
    """Raise where the options contradict each other or a result could not be written."""
    if options.stored and (options.sections or options.pack or options.variant or options.json):
        raise RuntimeError("--from measures nothing: sections, --pack, --variant and --json do")
    for path in (options.json, options.markdown):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise RuntimeError(f"{path} cannot be written: a file in an existing folder is wanted")


def _measure(options: argparse.Namespace) -> Record:
    from csa_runtime._demo import gpu

    device, why_not = gpu()
    if device is None:
        raise RuntimeError(
            f"no GPU ({why_not}): it times kernels, so nothing was measured; --from FILE shows "
            "what an earlier run found"
        )
    if device["arch"] is None:
        major, minor = divmod(device["compute_capability"], 10)
        raise RuntimeError(
            f"the bundle has no image for {device['name']}, compute capability {major}.{minor}"
        )
    try:
        from csa_runtime.bench.run import measure
    except ImportError as error:
        raise ImportError(f"it measures with torch, a build for CUDA: {error}") from error
    from csa_runtime.bench.packs import PACKS

    def each(record: Record, section: str) -> None:
        print(f"{section}: {record.seconds[section]} s", file=sys.stderr, flush=True)
        if options.json:
            record.write(options.json)

    sections = tuple(name for name in SECTIONS if not options.sections or name in options.sections)
    return measure(
        sections, options.systems, tuple(options.pack or PACKS),
        variant=options.variant, lift=options.lift_gate, each=each,
    )  # fmt: skip


def _plots() -> Any:
    try:
        from csa_runtime.bench import plots
    except ImportError as error:
        where = "pip install '.[bench]' in the clone"
        raise ImportError(f"plots need matplotlib: {where} ({error})") from error
    return plots


def _read(path: Path) -> Record:
    from csa_runtime.bench.record import read

    try:
        return read(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RuntimeError(f"{path} cannot be read: {error}") from error


def _report(path: Path, before: Record, now: Record) -> tuple[str, bool]:
    from csa_runtime.bench import baseline

    try:
        return baseline.report(baseline.changes(before, now))
    except ValueError as error:
        raise RuntimeError(f"baseline {path}: {error}") from error


def _section(text: str) -> str:
    if text not in SECTIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SECTIONS)}")
    return text


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SYSTEMS)}")
    return names


def _pack(text: str) -> Any:
    from csa_runtime.bench.packs import parse

    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
