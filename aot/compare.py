# SPDX-License-Identifier: Apache-2.0
"""What two manifests, and so two bundles, differ in: `python -m aot.compare OLD NEW`.

A manifest holds the digest of every image, so two that are equal stand for equal bytes.
"""

import sys
from pathlib import Path

from aot import bundle


def compare(old: bundle.Manifest, new: bundle.Manifest) -> list[str]:
    """Readable differences between two manifests, one line each; empty when they are equal."""
    lines: list[str] = []
    _compare("", _keyed(old), _keyed(new), lines)
    if not lines and old != new:
        lines.append("~ the order of the variants, schedules or images")
    return lines


def _keyed(manifest: bundle.Manifest) -> bundle.Manifest:
    """The manifest with its lists as mappings, so that one inserted row is one difference."""
    families: dict[str, int] = {}
    sources: dict[str, int] = {}
    images: dict[str, bundle.Manifest] = {}

    def schedule_key(row: bundle.Manifest) -> str:
        family = f"sm_{row['arch']} {row['operation']} r{row['ratio']} c{row['coff']}"
        families[family] = families.get(family, -1) + 1
        return f"{family} row {families[family]}"

    for image in manifest["images"]:
        record = dict(image)
        source = record.pop("source_digest", "unknown")
        sources[source] = sources.get(source, 0) + 1
        images[f"sm_{image['arch']} {image['variant']}"] = record
    return {
        **manifest,
        "variants": {v["name"]: v for v in manifest["variants"]},
        "schedules": {schedule_key(s): s for s in manifest["schedules"]},
        "images": images,
        "images by source digest": sources,
    }


def _compare(where: str, old: object, new: object, lines: list[str]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{where} / {key}" if where else key
            if key not in new:
                lines.append(f"- {inner}")
            elif key not in old:
                lines.append(f"+ {inner}")
            else:
                _compare(inner, old[key], new[key], lines)
    elif old != new:
        lines.append(f"~ {where}: {old!r} -> {new!r}")


def main(argv: list[str]) -> int:
    """Command line: two `cubins/` directories; 1 when they differ."""
    old, new = (bundle.read_manifest(Path(path)) for path in argv)
    lines = compare(old, new)
    sys.stdout.writelines(line + "\n" for line in lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
