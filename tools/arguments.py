# SPDX-License-Identifier: Apache-2.0
"""Kinds of command-line arguments that several tools take."""

import argparse
from pathlib import Path


def new_file(text: str) -> Path:
    """A file to write at the end: asked for before minutes of measuring, not after them.

    Raises:
        argparse.ArgumentTypeError: its folder does not exist, or it is a folder itself.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {path.parent}; make it first")
    return path
