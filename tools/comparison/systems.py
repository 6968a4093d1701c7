# SPDX-License-Identifier: Apache-2.0
"""The two systems: the same four names, from two packages."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

NAMES = (
    "CSACompressorForward",
    "CSACompressorBackward",
    "csa_compressor_forward_wrapper",
    "csa_compressor_backward_wrapper",
)
PEER, OURS = "peer", "csa_runtime"
DISTRIBUTIONS = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "csa-runtime", "torch")


@dataclass(frozen=True)
class System:
    """One of the two: its wrappers and classes."""

    name: str
    Forward: Any
    Backward: Any
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _system(name: str, package: str) -> System:
    namespace = import_module(package).CSA
    return System(name, *(getattr(namespace, each) for each in NAMES))


def load() -> tuple[System, System]:
    """The peer and this library; exits, saying what to install, where one cannot be imported."""
    try:
        peer = _system(PEER, "cudnn")
    except (ImportError, AttributeError) as error:
        sys.exit(
            "peer: the system compared with, cuDNN frontend's CSA compressor, cannot be imported: "
            f"{type(error).__name__}: {error}\n"
            "Install it beside torch, which it needs too: "
            "pip install nvidia-cudnn-frontend==1.32.0 nvidia-cutlass-dsl==4.8.1"
        )
    try:
        return peer, _system(OURS, "csa_runtime")
    except ImportError as error:
        sys.exit(
            f"peer: csa_runtime cannot be imported: {error}\n"
            "Install a wheel of this tree, and start this tool from another folder than its root"
        )


def versions() -> dict[str, str]:
    """Of the distributions that matter."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def wait(device: str) -> None:
    """Until the device has done all that it was given; errors of its kernels surface here."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
