# SPDX-License-Identifier: Apache-2.0
"""The command `csa-runtime`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from csa_runtime.bench.options import add_options, bench
from csa_runtime.diagnostics import info, reason, version
from csa_runtime.errors import BundleError, DriverError, UnsupportedArch

DESCRIPTION = (
    "Prebuilt CUDA kernels that pool windows of packed tokens by a gated softmax, forward and "
    "backward: what is installed, and whether it works here."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 1 for a failure that has been explained."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except BrokenPipeError:
        # Whoever read has enough, as `head` does. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (BundleError, DriverError, UnsupportedArch, ImportError, RuntimeError) as error:
        print(f"csa-runtime {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="csa-runtime", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"csa-runtime {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "info": "version, compiler, driver, devices, and for each kernel image who ran it",
        "demo": "pool one ragged pack forward and backward, on the GPU if there is one, and "
        "compare with the CPU reference (needs NumPy)",
        "check": "check the bundle of images and, on a GPU, run every variant against the CPU "
        "reference (needs NumPy)",
        "bench": "time this library on the GPU beside a copy of the same bytes and other systems "
        "(needs torch), or show what an earlier run found",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:])
        if name == "info":
            command.add_argument("--json", action="store_true", help="as JSON, for programs")
        elif name == "bench":
            add_options(command)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.command == "info":
        status = _info(options.json)
    elif options.command == "demo":
        from csa_runtime._demo import demo

        status = demo()
    elif options.command == "bench":
        status = bench(options)
    else:
        from csa_runtime._check import check

        status = check()
    sys.stdout.flush()
    return status


def _info(as_json: bool) -> int:
    try:
        found = info(devices=True)
    except DriverError as error:
        found = info() | {"driver": None, "driver_error": str(error), "devices": []}
        if not as_json:
            found["driver_error"] = reason(error)
    if as_json:
        print(json.dumps(found, indent=1, default=str))
    else:
        _print_info(found)
    return 0


def _print_info(found: dict[str, Any]) -> None:
    bundle = found["bundle"]
    print(f"csa_runtime {found['version']}")
    print(f"bundle      {bundle['source']}, sha256 {bundle['sha256']}")
    toolchain = ", ".join(f"{name} {value}" for name, value in found["toolchain"].items())
    print(f"toolchain   {toolchain or 'not recorded here'}")
    if found["driver"] is None:
        print(f"driver      none: {found['driver_error']}")
    else:
        print(f"driver      CUDA {found['driver'] // 1000}.{found['driver'] % 1000 // 10}")
    for device in found["devices"]:
        arch = device["arch"]
        images = f"images of sm_{arch}" if arch else "no image in this bundle"
        capability = device["compute_capability"]
        print(
            f"device {device['ordinal']}    {device['name']}, compute capability "
            f"{capability // 10}.{capability % 10}, {device['multiprocessors']} multiprocessors: "
            f"{images}"
        )
    print()
    status = {(image["variant"], image["arch"]): image["status"] for image in found["images"]}
    columns = found["architectures"]
    names = [variant["name"] for variant in found["variants"]]
    first = max([len("variant"), *map(len, names)])
    width = max([len("compiled only"), *(len(text) for text in status.values())])
    print(f"{'variant':<{first}} " + " ".join(f"{f'sm_{arch}':<{width}}" for arch in columns))
    for name in names:
        row = " ".join(f"{status.get((name, arch), '-'):<{width}}" for arch in columns)
        print(f"{name:<{first}} {row}".rstrip())
    print(
        "\ncompiled only: no GPU has run this image yet; -: not built for this "
        "architecture, where another variant serves those calls"
    )


if __name__ == "__main__":
    sys.exit(main())
