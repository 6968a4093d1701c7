# SPDX-License-Identifier: Apache-2.0
"""What the profiler prints, and a stand-in for it: for the tools that read its counters."""

import sys
from pathlib import Path

HEAD = {
    "ID": "", "Process ID": "7", "Process Name": "python3.12", "Host Name": "127.0.0.1",
    "Kernel Name": "", "Context": "1", "Stream": "7", "Block Size": "(256, 1, 1)",
    "Grid Size": "(128, 1, 1)", "Device": "0", "CC": "9.0",
}  # fmt: skip
PROFILER = """#!{python}
import json, pathlib, sys
given = sys.argv[1:]
{body}
"""


def printed(kernels: list[tuple[str, dict[str, str]]]) -> str:
    """As the profiler prints it: chatter, headings, units, a line a kernel."""
    names = list(kernels[0][1])
    lines = [
        "==PROF== Connected to process 7 (/usr/bin/python3.12)",
        '"quoted" chatter of the program',
        *(f'==PROF== Profiling "{name}": 0%....50%....100% - 19 passes' for name, _ in kernels),
        "==PROF== Disconnected from process 7",
    ]
    for row in (
        [*HEAD, *names],
        [*("" for _ in HEAD), *("byte" for _ in names)],
        *(
            [*(HEAD | {"ID": str(i), "Kernel Name": name}).values(), *values.values()]
            for i, (name, values) in enumerate(kernels)
        ),
    ):
        lines.append(",".join(f'"{cell}"' for cell in row))
    return "\n".join(lines) + "\n"


def stand_in(folder: Path, body: str) -> Path:
    """A command that runs the body, lines of Python with `given`, in place of the profiler."""
    path = folder / "ncu"
    path.write_text(PROFILER.format(python=sys.executable, body=body))
    path.chmod(0o755)
    return path
