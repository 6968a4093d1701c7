# SPDX-License-Identifier: Apache-2.0
"""Torch's autograd thread at the end of a process."""

import torch


def settle() -> None:
    """Returns once the thread of the current GPU has let go of all that ran on it before.

    It drops its last references to a Python function after whoever called backward goes on. If by
    then the interpreter has begun to end, the thread that asks for its lock brings the process
    down: "terminate called without an active exception" (pytorch issue 38228). It works one
    task after another, and this one holds nothing of Python.
    """
    one = torch.ones((), device="cuda", requires_grad=True)
    (one + 1).backward()
