# SPDX-License-Identifier: Apache-2.0
"""The segment of a row or token: found in non-decreasing prefixes, in a few loads.

Every search but `among` returns the largest s in [0, segments) with prefixes[s] <= value, or 0 if
there is none, whatever the prefixes hold: malformed ones give a wrong s, never one out of range.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.ptx import select
from aot.kernels.warp import WARP


@cute.jit
def search(prefixes: cute.Pointer, segments: Int32, value: Int32) -> Int32:
    """The segment of a `value` that is the same in all lanes: 32 probes a step.

    1,000 segments take two dependent loads and a million take four, where bisection would take
    ten and twenty.
    """
    lane = arch.lane_idx()
    low = Int32(0)
    width = segments  # the answer lies in [low, low + width)
    while width > 1:
        step = Int32((Uint32(width) + (WARP - 1)) // WARP)
        offset = Uint32(lane + 1) * Uint32(step)
        below = Int32(0)
        if offset < Uint32(width):
            below = Int32(arch.load(prefixes + (low + Int32(offset)), Int32) <= value)
        passed = arch.popc(arch.vote_ballot_sync(below != 0)) * step
        low = low + passed
        width = min(width - passed, step)
    return low


@cute.jit
def gallop(prefixes: cute.Pointer, segments: Int32, start: Int32, value: Int32) -> Int32:
    """The segment of a lane's own `value`, known not to lie before `start`.

    Doubling steps, then halving ones: a value in the start's own segment costs one load.
    """
    low = start
    step = Int32(1)
    growing = Int32(1)
    while growing != 0:
        growing = Int32(0)
        if step < segments - low:
            if arch.load(prefixes + (low + step), Int32) <= value:
                low = low + step
                growing = Int32(1)
                step = step * 2
    while step > 1:
        step = step // 2
        if step < segments - low:
            if arch.load(prefixes + (low + step), Int32) <= value:
                low = low + step
    return low


def among(prefix: Int32, value: Int32) -> Int32:
    """The last of a warp's lanes whose `prefix` is at most a lane's own value, or the first.

    prefix: a lane's own; from lane to lane they do not decrease.
    """
    found = Int32(0)
    for step in (16, 8, 4, 2, 1):
        below = arch.shuffle_sync(prefix, found + step) <= value
        found = select(below, found + step, found)
    return found


@cute.jit
def guess(segments: Int32, value: Int32, extent: Int32) -> Int32:
    """The first of the 32 prefixes that a warp looks at for a `value`, the same in all lanes.

    They lie around the place where it would be if the segments shared `extent` equally: so one
    load finds it where the segments are few or alike.
    """
    begin = Int32(0)
    if segments >= WARP:
        share = Float32(value) * ar.rcp_approx(Float32(extent))
        middle = Int32(share * Float32(segments))
        begin = max(min(middle - WARP // 2, segments - (WARP - 1)), 0)
    return begin


def of_lane(begin: Int32, segments: Int32) -> Int32:
    """The index of the prefix that a lane looks at: from `begin` on, up to the last one."""
    index = Uint32(begin + arch.lane_idx())  # of nearly 2**31 segments it may have all 32 bits
    return Int32(select(index < Uint32(segments), index, Uint32(segments)))


def glance(
    prefixes: cute.Pointer, others: cute.Pointer, segments: Int32, value: Int32, extent: Int32
) -> tuple[Int32, Int32, Int32]:
    """Starts loading what `guess` names: its first, a lane's prefix, and the one of `others`."""
    begin = guess(segments, value, extent)
    return begin, *_load_lane(prefixes, others, segments, begin)


def _load_lane(
    prefixes: cute.Pointer, others: cute.Pointer, segments: Int32, begin: Int32
) -> tuple[Int32, Int32]:
    index = of_lane(begin, segments)
    return arch.load(prefixes + index, Int32), arch.load(others + index, Int32)


@cute.jit
def settle(
    prefixes: cute.Pointer,
    others: cute.Pointer,
    segments: Int32,
    value: Int32,
    begin: Int32,
    prefix: Int32,
    other: Int32,
) -> tuple[Int32, Int32, Int32, Int32]:
    """Ends what `glance` began: the value's segment, by `search` if it is not among the 32.

    Returns the place among the 32 (those of the lanes now), their first, and the lane's two.
    """
    passed = Int32(1)
    if segments > 1:
        passed = arch.popc(arch.vote_ballot_sync(prefix <= value))
    if segments >= WARP:
        before = (passed == 0) & (begin > 0)
        behind = (passed == WARP) & (begin <= segments - WARP)
        # By a vote, so that the compiler knows that the warp stays together.
        if arch.vote_any_sync(before | behind):
            begin = search(prefixes, segments, value)
            passed = Int32(1)
            prefix, other = _load_lane(prefixes, others, segments, begin)
    return max(passed - 1, 0), begin, prefix, other
