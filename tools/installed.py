# SPDX-License-Identifier: Apache-2.0
"""The committed manifest, for tools that run the installed package and report on its images."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # last: the installed package comes before its sources

from aot import bundle  # noqa: E402


def read_manifest() -> bundle.Manifest:
    """`cubins/manifest.json`."""
    return bundle.read_manifest(ROOT / "cubins")


def manifest_in_use() -> bundle.Manifest:
    """`cubins/manifest.json`; exits unless the installed package carries exactly that bundle."""
    from csa_runtime import _native

    manifest, info = read_manifest(), _native.bundle_info()
    committed = {(i["variant"], i["arch"]): i["sha256"] for i in manifest["images"]}
    installed = {(i["variant"], i["arch"]): i["sha256"] for i in info["images"]}
    tables = bundle.HEADER.unpack_from(bundle.pack(ROOT / "cubins"))[-1].hex()
    if installed != committed or info["sha256"] != tables:
        sys.exit(
            f"the installed bundle ({info['source']}, {info['sha256'][:16]}) is not the committed "
            f"one ({tables[:16]}); install a wheel built from this tree"
        )
    return manifest
