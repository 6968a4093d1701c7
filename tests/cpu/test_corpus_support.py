# SPDX-License-Identifier: Apache-2.0
"""The net of random problems on the CPU: what it draws, and that the reference passes it."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import csa_runtime
from gpu import corpus, problems, tolerance
from gpu.corpus import Spec
from gpu.corpus_check import Shares, check, check_hostile
from gpu.problems import LONG
from gpu.test_corpus import WELL_FORMED_LONG, run_all
from support import expected, fake
from support.corpus_reference import ORACLES, Reference, own_tally

pytestmark = pytest.mark.L0
__all__ = ["own_tally"]  # a fixture of every test here

WINDOWS = [*problems.CONFIGS, *problems.LONG_CONFIGS]
CONFIGS = pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
ELEMENTS = (500, 3_000)


def request(seed: int | None = None) -> Any:
    """What pytest tells a test: which seed was asked for."""
    config = SimpleNamespace(getoption=lambda name: seed)
    return SimpleNamespace(config=config, node=SimpleNamespace(nodeid="a test"))


@CONFIGS
def test_the_reference_passes(ratio: int, coff: int) -> None:
    runner, shares = Reference(), Shares()
    run_all(
        request(),
        8 if ratio == LONG else 60,
        lambda seed: corpus.draw(seed, ratio, coff, ELEMENTS),
        lambda spec: check(spec, runner, ORACLES, shares),
    )
    assert not shares.broken(ratio)


@CONFIGS
def test_the_reference_stays_inside_under_any_prefixes(ratio: int, coff: int) -> None:
    run_all(
        request(),
        8 if ratio == LONG else 30,
        lambda seed: corpus.hostile(seed, ratio, coff),
        lambda spec: check_hostile(spec, Reference()),
    )


def test_too_many_elements_off_by_a_step_are_found_together() -> None:
    shares = Shares()
    wanted = torch.ones(1000)
    found = wanted.clone()
    found[:2] += 2.0**-7
    for _ in range(tolerance.COUNTABLE // 1000):
        shares.add("fine", "out", wanted, wanted)
        shares.add("coarse", "out", found, wanted)
    (broken,) = shares.broken(LONG)
    assert broken.startswith("coarse: 40 of 20000 elements of out")


def test_of_padding_what_differs_counts_once_and_all_of_it_must_be_near() -> None:
    p: Any = SimpleNamespace(packing=SimpleNamespace(rows=10, computed=2))
    exact = torch.ones(10, 8)
    found = exact.clone()
    found[2:, 0] += 2.0**-7  # once, or eight times
    wanted: Any = SimpleNamespace(out=exact, out64=exact.double() + 2.0**-8)
    tolerance.assert_output(p, found, wanted)
    p.packing.computed = 10
    with pytest.raises(AssertionError, match="8 of 80 elements differ from R"):
        tolerance.assert_output(p, found, wanted)
    p.packing.computed, found[9, 1] = 2, 1.5
    with pytest.raises(AssertionError, match="from fp64"):
        tolerance.assert_output(p, found, wanted)


def test_a_failure_names_the_problem_and_runs_alone() -> None:
    ran = []

    def fails(spec: Spec) -> None:
        ran.append(spec.seed)
        assert spec.seed != 3, "some reason"

    with pytest.raises(AssertionError, match="a test --corpus 3\nsome reason") as e:
        run_all(request(), 6, lambda seed: corpus.draw(seed, 4, 2), fails)
    assert ran == [*range(6)] and repr(corpus.draw(3, 4, 2)) in str(e.value)
    with pytest.raises(AssertionError, match="a test --corpus 3"):
        run_all(request(3), 6, lambda seed: corpus.draw(seed, 4, 2), fails)
    assert ran == [*range(6), 3]


def each_kind(specs: list[Spec]) -> Iterator[str]:
    """What the problems have, a word for each."""
    for spec in specs:
        packing, ratio = spec.packing, spec.ratio
        yield from (spec.kind, f"ape {spec.ape}", f"accumulate {spec.accumulate}")
        yield from (f"special {name}" for name in spec.special)
        yield from (f"joined {first}" for first, _ in spec.joined)
        yield f"extreme {bool(spec.extreme and spec.special)}"
        for name, place in spec.places.items():
            yield f"{name} aligned {min(place.offset & -place.offset or 16, 16)}"
            if name in ("kv", "score", "grad_out"):
                columns = spec.head_dim if name == "grad_out" else spec.width
                yield f"{name} {'repeats' if not place.stride else place.stride < columns}"
            if place.stride > 2 * spec.width:
                yield f"{name} apart"
        lengths = [b - a for a, b in zip(packing.cu_seqlens, packing.cu_seqlens[1:], strict=False)]
        yield from {"empty" for length in lengths if length == 0}
        yield from {"shorter" for length in lengths if 0 < length < ratio}
        yield from {"exact" for length in lengths if length and length % ratio == 0}
        yield from {"tail" for length in lengths if length > ratio and length % ratio}
        yield f"segments {min(len(lengths), 2)}"
        yield f"start {bool(packing.cu_seqlens[0])}"
        yield f"after {packing.tokens > packing.cu_seqlens[-1]}"
        yield f"padding rows {packing.rows > packing.computed}"
        yield f"beyond capacity {packing.cu_seqlens_comp[-1] > packing.rows}"
        yield f"rows {bool(packing.rows)}"
        yield f"head_dim modulo 8 {spec.head_dim % 8}"
        yield f"head_dim over 256 {spec.head_dim > 256}"


@CONFIGS
def test_the_problems_are_well_formed_and_of_every_kind(ratio: int, coff: int) -> None:
    specs = [corpus.draw(seed, ratio, coff) for seed in range(WELL_FORMED_LONG)]
    assert specs[:50] == [corpus.draw(seed, ratio, coff) for seed in range(50)]
    for spec in specs:
        prefixes = (
            torch.tensor(entries, dtype=torch.int32)
            for entries in (spec.packing.cu_seqlens, spec.packing.cu_seqlens_comp)
        )
        csa_runtime.check_prefixes(*prefixes, spec.packing.tokens, ratio=ratio)
    found = Counter(each_kind(specs))
    wanted = set(corpus.LONG_KINDS if ratio == LONG else corpus.SHORT_KINDS)
    wanted |= {f"{x} {flag}" for x in ("ape", "accumulate", "extreme") for flag in (True, False)}
    wanted |= {f"special {name}" for name in corpus.SPRINKLED} | {"joined kv", "joined grad_kv"}
    tensors = ("kv", "score", "out", "grad_out", "grad_kv", "grad_score")
    wanted |= {f"{name} aligned {unit}" for name in tensors for unit in (2, 4, 8, 16)}
    wanted |= {f"{name} {how}" for name in ("kv", "score", "grad_out") for how in ("repeats", True)}
    wanted |= {"empty", "shorter", "exact", "tail"} | {f"segments {count}" for count in range(3)}
    for what in ("start", "after", "padding rows", "beyond capacity", "rows", "head_dim over 256"):
        wanted |= {f"{what} True", f"{what} False"}
    wanted |= {f"head_dim modulo 8 {rest}" for rest in range(8)}
    rare = {name: found[name] for name in wanted if found[name] < 2}
    assert not rare, rare


@CONFIGS
def test_most_hostile_prefixes_are_malformed(ratio: int, coff: int) -> None:
    specs = [corpus.hostile(seed, ratio, coff) for seed in range(200)]
    malformed = 0
    for spec in specs:
        prefixes = (
            torch.tensor(entries, dtype=torch.int32)
            for entries in (spec.packing.cu_seqlens, spec.packing.cu_seqlens_comp)
        )
        try:
            csa_runtime.check_prefixes(*prefixes, spec.packing.tokens, ratio=ratio)
        except ValueError:
            malformed += 1
    assert malformed > 150


LAUNCHES = """
import torch
import gpu.buffers
gpu.buffers.DEVICE = torch.device("cpu")  # the driver only counts
from gpu import corpus, harness, problems
from gpu.corpus_check import check_hostile
from gpu.test_corpus import Kernels
harness.stream = lambda: 0
kernels = Kernels()
for ratio, coff in (*problems.CONFIGS, *problems.LONG_CONFIGS):
    for seed in range(60):
        check_hostile(corpus.draw(seed, ratio, coff), kernels)
        check_hostile(corpus.hostile(seed, ratio, coff), kernels)
emit({name: count for (name, arch), count in _native.launch_counts().items()})
"""


def test_the_launcher_takes_every_problem_and_every_variant_gets_its_share() -> None:
    launched = fake.run(LAUNCHES, FAKE_CUDA_DEVICES="90").output
    images = [image for image in expected.manifest()["images"] if image["arch"] == 90]
    rare = {i["variant"]: launched.get(i["variant"], 0) for i in images}
    rare = {name: count for name, count in rare.items() if count < 8}
    assert not rare, rare
