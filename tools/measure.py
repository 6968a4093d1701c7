# SPDX-License-Identifier: Apache-2.0
"""Kernel times of one pack, forward and backward, beside a copy that moves the same bytes."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
TARGET_US = 20000.0  # of GPU time per measurement
# (d, lengths), of ratio 4 and coff 2 unless said
PACKS = (
    (128, (8192,)),
    (128, (8192,) * 3),
    (512, (8192,)),
    (512, (8192,) * 3),
    (512, (131072,)),
)
# (ratio, coff, d, lengths)
LONG = (
    (128, 1, 128, (8192,)),
    (128, 1, 128, (131072,)),
    (128, 2, 128, (8192,)),
    (128, 2, 128, (65536,)),
    (128, 1, 512, (65536,)),
    (128, 2, 512, (65536,)),
    (128, 2, 512, (131072,)),
)


class Problem:
    """Buffers of one pack and its calls through the pointer API."""

    def __init__(self, d: int, lengths: tuple[int, ...], ratio: int, coff: int) -> None:
        """Allocates on the current device."""
        import torch

        from csa_runtime import backward_workspace_bytes

        self.torch = torch
        width, tokens = coff * d, sum(lengths)
        cu, comp = [0], [0]
        for length in lengths:
            cu.append(cu[-1] + length)
            comp.append(comp[-1] + length // ratio)
        rows = comp[-1]

        def make(*shape: int, dtype: Any = torch.bfloat16, scale: float = 1.0) -> Any:
            return (torch.randn(shape, device="cuda") * scale).to(dtype)

        kv, score, grad_out = make(tokens, width), make(tokens, width, scale=1.5), make(rows, d)
        ape = make(ratio, width, dtype=torch.float32, scale=0.25)
        prefixes = [torch.tensor(p, dtype=torch.int32, device="cuda") for p in (cu, comp)]
        out, grad_ape = torch.empty_like(grad_out), torch.empty_like(ape)
        grad_kv, grad_score = torch.empty_like(kv), torch.empty_like(kv)
        scratch = backward_workspace_bytes(tokens, rows, d, ratio=ratio, coff=coff)
        workspace = torch.empty(max(scratch, 16), dtype=torch.uint8, device="cuda")
        self.keep = (
            kv, score, grad_out, ape, *prefixes, out, grad_ape, grad_kv, grad_score, workspace,
        )  # fmt: skip
        common = dict(
            device=torch.cuda.current_device(), ratio=ratio, coff=coff, dtype=1, tokens=tokens,
            segments=len(lengths), rows=rows, head_dim=d, kv=kv.data_ptr(),
            score=score.data_ptr(), ape=ape.data_ptr(), cu_seqlens=prefixes[0].data_ptr(),
            cu_seqlens_comp=prefixes[1].data_ptr(), kv_stride=width, score_stride=width,
        )  # fmt: skip
        self.arguments: dict[str, dict[str, Any]] = {
            "forward": dict(common, out=out.data_ptr(), out_stride=d),
            "backward": dict(
                common, grad_out=grad_out.data_ptr(), grad_out_stride=d,
                grad_kv=grad_kv.data_ptr(), grad_kv_stride=width,
                grad_score=grad_score.data_ptr(), grad_score_stride=width,
                grad_ape=grad_ape.data_ptr(), workspace=workspace.data_ptr(),
                workspace_bytes=workspace.numel(),
            ),
        }  # fmt: skip
        element, whole = 2 * d, tokens * width * 2
        # Of the first halves a segment's last block is never read.
        used = sum(n // ratio * ratio * coff - (coff - 1) * ratio * (n >= ratio) for n in lengths)
        out_bytes, read = rows * element, 2 * used * element
        self.nominal = {"forward": 2 * whole + out_bytes, "backward": 4 * whole + out_bytes}
        self.moved = {"forward": read + out_bytes, "backward": read + 2 * whole + out_bytes}

    def call(self, direction: str, variant: str | None) -> Callable[[], None]:
        """The call on the stream that is current then."""
        import csa_runtime

        launch = getattr(csa_runtime, f"launch_{direction}")
        arguments = dict(self.arguments[direction], variant=variant)
        current = self.torch.cuda.current_stream

        def run() -> None:
            launch(**arguments, stream=current().cuda_stream)

        return run

    def copy(self, moved: int) -> Callable[[], None]:
        """A copy that reads half of `moved` bytes and writes the other half."""
        source, target = (
            self.torch.randint(0, 255, (moved // 2,), dtype=self.torch.uint8, device="cuda")
            for _ in range(2)
        )

        def run() -> None:
            target.copy_(source)

        return run


def raise_clocks() -> None:
    """Keeps the GPU busy for 0.3 s, so that its clocks are up."""
    import torch

    heat = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        torch.mm(heat, heat)
    torch.cuda.synchronize()


def loops_for(moved: int) -> int:
    """Calls of one measurement, fewer where a call moves many bytes."""
    return max(20, min(200, int(TARGET_US / (moved / 4e6))))


def kernel_times(run: Callable[[], None], loops: int) -> dict[str, float]:
    """Microseconds per call by kernel (or copy) name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(5):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(loops):
            run()
        torch.cuda.synchronize()
    durations: dict[str, list[float]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            durations[event.name()].append(event.duration_ns() / 1000.0)
    return per_call(durations, loops)


def per_call(durations: dict[str, list[float]], loops: int) -> dict[str, float]:
    """The mean duration of each kernel that ran once a call.

    Raises:
        RuntimeError: a kernel was seen neither hardly ever nor once a call. The profiler may lose a
            record and adds one for the synchronisation; a sum without a kernel would be no time.
    """
    few = loops // 20
    seen = {name: len(times) for name, times in durations.items()}
    kernels = {name for name, count in seen.items() if count > few}
    if not kernels or any(abs(seen[name] - loops) > few for name in kernels):
        raise RuntimeError(f"{loops} calls, but the profiler saw {seen}")
    return {name: statistics.fmean(durations[name]) for name in sorted(kernels)}


def graph_time(run: Callable[[], None], repeats: int) -> float:
    """Microseconds per call inside a graph: (graph of 100 - graph of 50) / 50, by events."""
    import torch

    times = []
    for calls in (50, 100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        graph.replay()
        samples = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1000.0)
        times.append(statistics.median(samples))
    return (times[1] - times[0]) / 50


def measure(
    d: int, lengths: tuple[int, ...], shape: tuple[int, int], variant: str | None, graphs: bool
) -> Row:
    """One row: both directions beside a copy of the same bytes."""
    problem = Problem(d, lengths, *shape)
    window = f"{shape[0]}, {shape[1]}, {d}"
    alike = len(set(lengths)) == 1
    row: Row = {
        "pack": f"{window}, {len(lengths)}" + (f"x{lengths[0]}" if alike else " ragged"),
        "window": window,
        "tokens": sum(lengths),
        "segments": len(lengths),
        "head_dim": d,
    }
    for direction in ("forward", "backward"):
        nominal = problem.nominal[direction]
        loops = loops_for(nominal)
        ours = f"csa_{direction}_r{shape[0]}_c{shape[1]}_"
        forced = variant if variant is not None and variant.startswith(ours) else None
        run, copy = problem.call(direction, forced), problem.copy(nominal)
        kernels = kernel_times(run, loops)
        copied = sum(kernel_times(copy, loops).values())
        total = sum(kernels.values())
        part: Row = {
            "bytes": nominal,
            "bytes_moved": problem.moved[direction],
            "kernels_us": kernels,
            "total_us": total,
            "copy_us": copied,
            "over_copy": total / copied,
        }
        if graphs:
            part["graph_us"] = graph_time(run, 7)
            part["graph_copy_us"] = graph_time(copy, 7)
        row[direction] = part
    return row
