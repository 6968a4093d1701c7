# SPDX-License-Identifier: Apache-2.0
"""The GPU that each architecture's launch shapes are made for, and the rule where none was at hand.

The rule takes over what was found on the measured GPU:

1. The variants, in the same order, where they are built.
2. Blocks of a backward: as many a multiprocessor as there, but no more than its shared memory holds
   at once, since a second wave may cost as much as the first. Registers allow as many everywhere: a
   variant's `min_blocks` binds the compiler. The number is fixed for an image and orders the sums
   of grad_ape, so a smaller part of the architecture runs it in more waves, and a larger one leaves
   multiprocessors idle.
3. Sizes at which another variant takes over: the same elements a multiprocessor. Where the reason
   is that a pack leaves the second-level cache, that cache's size.
4. The blocks of a forward that fetch ahead: as many.
5. Bandwidth and issue slots choose nothing. Memory brings a multiprocessor of sm_100 1.5 times the
   bytes a cycle that it brings one of sm_90 (27 to 18), so instructions bind sooner there. It
   brings one of sm_80 13 and one of sm_120 4 of them: memory binds, whatever the variant.
"""

from typing import NamedTuple

from aot.variants import Variant

BLOCK_RESERVE = 1024  # bytes of shared memory that the system takes of each block


class Machine(NamedTuple):
    """One GPU.

    cache: of the second level, 10**6 bytes. shared: of a multiprocessor, bytes.
    """

    name: str
    multiprocessors: int
    cache: int
    shared: int


# By NVIDIA's data sheets. Images for sm_80 also run on 8.6 (up to 84 multiprocessors) and 8.9 (up
# to 142), those for sm_120 on the RTX PRO 6000 (188): larger parts hold a wave of the one named.
MACHINES = {
    80: Machine("A100", 108, 40, 164 << 10),
    90: Machine("H200", 132, 50, 228 << 10),
    100: Machine("B200", 148, 126, 228 << 10),
    120: Machine("RTX 5090", 170, 96, 100 << 10),
}
MEASURED = 90


def blocks(architecture: int, variant: Variant, found: int) -> int:
    """Blocks of a launch that has `found` of them where it was measured (0: one pass, stays 0)."""
    machine, measured = MACHINES[architecture], MACHINES[MEASURED]
    each = found // measured.multiprocessors
    if architecture == MEASURED or not each:
        return found
    if variant.dynamic_shared:
        each = min(each, machine.shared // (variant.dynamic_shared + BLOCK_RESERVE))
    return max(each, 1) * machine.multiprocessors


def elements(architecture: int, found: int) -> int:
    """A size at which another variant takes over; -1, any size, stays."""
    if found < 0 or architecture == MEASURED:
        return found
    return found * MACHINES[architecture].multiprocessors // MACHINES[MEASURED].multiprocessors
