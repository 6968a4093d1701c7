# SPDX-License-Identifier: Apache-2.0
"""The command `csa-runtime`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from csa_runtime.diagnostics import info
from csa_runtime.errors import BundleError, DriverError, UnsupportedArch


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 1 for a failure that has been explained."""
    parser = argparse.ArgumentParser(prog="csa-runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("info", help="version, toolchain, images, driver and devices")
    show.add_argument("--json", action="store_true", help="as JSON")
    commands.add_parser("demo", help="a ragged pack forward and backward, against the reference")
    commands.add_parser("check", help="the bundle and, on a GPU, every variant")
    options = parser.parse_args(arguments)
    try:
        if options.command == "info":
            return _info(options.json)
        if options.command == "demo":
            from csa_runtime._demo import demo

            return demo()
        from csa_runtime._check import check

        return check()
    except (BundleError, DriverError, UnsupportedArch, ImportError, RuntimeError) as error:
        print(f"csa-runtime {options.command}: {error}", file=sys.stderr)
        return 1


def _info(as_json: bool) -> int:
    try:
        found = info(devices=True)
    except DriverError as error:
        found = info() | {"driver": None, "driver_error": str(error), "devices": []}
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
        print(
            f"device {device['ordinal']}    {device['name']}, compute capability "
            f"{device['compute_capability']}, {device['multiprocessors']} multiprocessors: {images}"
        )
    print()
    status = {(image["variant"], image["arch"]): image["status"] for image in found["images"]}
    columns = found["architectures"]
    width = max([len("compiled only"), *(len(text) for text in status.values())])
    print(f"{'variant':<32} " + " ".join(f"{f'sm_{arch}':<{width}}" for arch in columns))
    for variant in found["variants"]:
        name = variant["name"]
        row = " ".join(f"{status.get((name, arch), '-'):<{width}}" for arch in columns)
        print(f"{name:<32} {row}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
