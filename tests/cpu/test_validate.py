# SPDX-License-Identifier: Apache-2.0
"""Malformed arguments: ValueError before any launch; well-formed ones at the edge are accepted.

All cases run in one process on the fake driver, so that a check that fails to refuse launches
nothing anywhere.
"""

import functools
import re
from typing import Any

import pytest

from support import fake
from support.problems import address, forward

pytestmark = pytest.mark.L0

REQUIRED = {
    "forward": ("kv", "score", "cu_seqlens", "cu_seqlens_comp", "out"),
    "backward": (
        "kv",
        "score",
        "cu_seqlens",
        "cu_seqlens_comp",
        "grad_out",
        "grad_kv",
        "grad_score",
    ),
}
OUTPUTS = {"forward": ("out",), "backward": ("grad_kv", "grad_score", "grad_ape", "workspace")}
INPUTS = {
    "forward": ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp"),
    "backward": ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out"),
}
HALF = ("kv", "score", "out", "grad_out", "grad_kv", "grad_score")

# (operation, replaced keywords, what the message says; None: accepted)
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {}


def case(name: str, operation: str, message: str | None, **replaced: Any) -> None:
    """Add one row."""
    CASES[f"{operation} {name}"] = (operation, replaced, message)


for op in ("forward", "backward"):
    case("as is", op, None)
    case("ratio 3", op, "ratio 3, coff 2, dtype 1", ratio=3)
    case("coff 3", op, "ratio 4, coff 3", coff=3)
    case("dtype 0", op, "dtype is 0", dtype=0)
    case("dtype 4", op, "dtype is 4", dtype=4)
    case(
        "fp16, not in the bundle", op, "fp16.: no .* serves bf16: ratio 2 coff 1, ratio 2", dtype=2
    )
    case("unknown flags", op, "flags is 0x2", flags=2)
    case("flags that are a sign", op, "flags is 0x80000000", flags=-(2**31))
    case("accumulate", op, None, flags=1)
    for count, top in (("tokens", 2**31 - 1), ("segments", 2**31 - 1), ("rows", 2**31 - 1)):
        case(f"negative {count}", op, f"{count} is -1", **{count: -1})
        case(f"too many {count}", op, f"{count} is {top + 1}", **{count: top + 1})
        case(f"most {count}", op, None, **{count: top})
    case("head_dim 0", op, "head_dim is 0", head_dim=0)
    case("head_dim beyond the limit", op, "head_dim is 8388481", head_dim=8388481)
    case("fewer tokens than ratio", op, "rows > 0 needs at least ratio = 4", tokens=3, rows=1)
    case("as many tokens as ratio", op, None, tokens=4, rows=1)
    case("no segments", op, None, segments=0)
    case("no rows of few tokens", op, None, tokens=3, rows=0)
    case("nothing at all, all NULL that may be", op, None, tokens=0, rows=0, segments=0,
         **dict.fromkeys(HALF, 0))  # fmt: skip
    case(
        "no prefixes though nothing to do", op, "cu_seqlens is NULL", tokens=0, rows=0, cu_seqlens=0
    )
    for tensor in REQUIRED[op]:
        case(f"NULL {tensor}", op, f"{tensor} is NULL", **{tensor: 0})
    for tensor in (t for t in (*INPUTS[op], *OUTPUTS[op]) if t != "workspace"):
        width = 2 if tensor in HALF else 4
        bad = address(tensor) + width // 2
        case(f"{tensor} within an element", op, f"{tensor} is at {bad:#x}", **{tensor: bad})
        case(f"{tensor} at an element", op, None, **{tensor: address(tensor) + width})
        case(f"{tensor} at the end of memory", op, f"{tensor} .*beyond the address space",
             **{tensor: 2**64 - 4})  # fmt: skip
    for tensor in (t for t in (*INPUTS[op], *OUTPUTS[op]) if t in HALF):
        full = 128 if tensor in ("out", "grad_out") else 256
        name = f"{tensor}_stride"
        case(f"negative {name}", op, f"{name} is -{full}", **{name: -full})
        case(f"padded {name}", op, None, **{name: full + 8})
        case(f"{name} beyond memory", op, "beyond the address space", **{name: 2**62})
        narrow = f"{name} is {full - 1}.*{full} elements wide" if tensor in OUTPUTS[op] else None
        case(f"{name} below the width", op, narrow, **{name: full - 1})
        case(f"{name} 0", op, None if tensor in INPUTS[op] else f"{name} is 0", **{name: 0})
    for i, output in enumerate(OUTPUTS[op]):
        for other in (*OUTPUTS[op][i + 1 :], *INPUTS[op]):
            at = address(other) + (0 if other == "workspace" else 4)
            at -= at % (16 if output == "workspace" else 4)
            case(f"{output} over {other}", op, f"{output} .*and {other} .*overlap", **{output: at})
    case("other device", op, "device is 1; pass 0 to 0", device=1)
    case("negative device", op, "device is -1", device=-1)
case("one row narrower than wide", "forward", None, tokens=4, rows=1, out_stride=0)
case("no ape", "forward", None, ape=0)
case("no ape, no grad_ape", "backward", None, ape=0, grad_ape=0, workspace=0, workspace_bytes=0)
case("no ape but grad_ape", "backward", "without ape there is no grad_ape", ape=0)
case(
    "no workspace", "backward", "workspace is .* of 1073741824 bytes; this call needs", workspace=0
)
case("small workspace", "backward", "of 4095 bytes; this call needs 4096", workspace_bytes=4095,
     rows=1, tokens=8)  # fmt: skip
case("exact workspace", "backward", None, workspace_bytes=4096, rows=1, tokens=8)
case("negative workspace", "backward", "workspace_bytes is -1", workspace_bytes=-1)
case("workspace off 16", "backward", "align it to 16", workspace=address("workspace") + 8)
case("workspace unused and off 16", "backward", None, workspace=8, grad_ape=0)
case("no rows, no workspace", "backward", None, rows=0, workspace=0, workspace_bytes=0)
case("both halves of one buffer", "backward", None, grad_kv_stride=512, grad_score_stride=512,
     grad_score=address("grad_kv") + 512)  # fmt: skip
case("halves one element into each other", "backward", "grad_kv .*grad_score .*overlap",
     grad_kv_stride=512, grad_score_stride=512, grad_score=address("grad_kv") + 510)  # fmt: skip
case("out between the rows of kv", "forward", None, kv_stride=384, out_stride=384,
     out=address("kv") + 512)  # fmt: skip
case("out touching the rows of kv", "forward", "out .*kv .*overlap", kv_stride=384, out_stride=384,
     out=address("kv") + 514)  # fmt: skip
case("out into a row of kv by another stride", "forward", "out .*kv .*overlap", kv_stride=384,
     out_stride=385, out=address("kv") + 512)  # fmt: skip
case("out right after kv", "forward", None, out=address("kv") + 64 * 256 * 2)
case("out on the last element of kv", "forward", "overlap", out=address("kv") + 64 * 256 * 2 - 2)
case("out beside a broadcast kv", "forward", None, kv_stride=0, out=address("kv") + 512)
case("out over a broadcast kv", "forward", "overlap", kv_stride=0, out=address("kv") + 510)
case("no rows over kv", "forward", None, rows=0, out=address("kv"))
case("ignored fields are not looked at", "forward", None, grad_kv=1, grad_kv_stride=-5, workspace=1)


@functools.cache
def outcomes() -> dict[str, Any]:
    """Each case's error, or the number of launches."""
    script = f"""
results = {{}}
for name, (operation, replaced, _) in {CASES!r}.items():
    call = globals()[operation]() | replaced
    before = sum(_native.launch_counts().values())
    error = attempt(getattr(csa_runtime, "launch_" + operation), **call)
    results[name] = (error, sum(_native.launch_counts().values()) - before)
emit(results)
"""
    return fake.run(script).output


@pytest.mark.parametrize("name", CASES)
def test_arguments(name: str) -> None:
    operation, replaced, message = CASES[name]
    error, launches = outcomes()[name]
    if message is None:
        assert error is None
        empty = replaced.get("rows") == 0 and (
            operation == "forward" or not replaced.get("tokens", 1)
        )
        assert launches > 0 or empty
    else:
        assert error is not None, "accepted"
        assert error["type"] == "ValueError" and launches == 0
        assert re.search(message, error["text"]), error["text"]


def test_overlap_is_exact_for_row_strided_regions() -> None:
    script = """
import random
random.seed(7)
wrong, seen = [], [0, 0]
def elements(base, rows, stride, width):
    return {base + r * stride + c for r in range(rows) for c in range(width)}
for trial in range(4000):
    d, rows = random.randint(1, 6), random.randint(1, 6)
    tokens = random.randint(4, 9)
    out_stride, kv_stride = d + random.randint(0, 12), random.choice([0, 1, random.randint(0, 14)])
    if trial % 3 == 0:
        kv_stride = out_stride
    base = 1 << 30
    shift = random.randint(-6 * 18, 8 + 9 * 14)
    call = forward(4, 1, d, tokens, rows, kv=2 * base, out=2 * (base + shift), kv_stride=kv_stride,
                   out_stride=out_stride)
    meets = bool(elements(base, tokens, kv_stride, d)
                 & elements(base + shift, rows, out_stride, d))
    seen[meets] += 1
    error = attempt(csa_runtime.launch_forward, **call)
    if (error is not None) != meets or (error and "overlap" not in error["text"]):
        wrong.append((d, rows, tokens, kv_stride, out_stride, shift, meets, error))
emit([wrong[:3], seen])
"""
    wrong, seen = fake.run(script, FAKE_CUDA_LOG="").output
    assert wrong == []
    assert min(seen) > 500, "both outcomes must be tried often"


def test_values_are_refused_before_the_driver_is_looked_for() -> None:
    script = """
emit([attempt(csa_runtime.launch_forward, **forward(ratio=3)),
      attempt(csa_runtime.launch_forward, **forward(out=0)),
      attempt(csa_runtime.launch_forward, **forward())])
"""
    first, second, valid = fake.run(script, driver=False).output
    assert first["type"] == second["type"] == "ValueError"
    assert valid["type"] == "DriverError"


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"kv": -1}, "ValueError", "kv is -1"),
        ({"kv": 2**64}, "ValueError", "kv is 18446744073709551616"),
        ({"kv": 1.5}, "TypeError", "kv: 1.5 is no integer"),
        ({"tokens": 2**63}, "ValueError", "tokens is 9223372036854775808"),
        ({"ratio": 2**31}, "ValueError", "ratio is 2147483648"),
        ({"ratio": "4"}, "TypeError", "ratio: '4' is no integer"),
        ({"stream": -1}, "ValueError", "stream is -1"),
        ({"variant": 4}, "TypeError", "variant: 4 is no string"),
        ({"variant": "a\0b"}, "ValueError", "NUL"),
        ({"size": 4}, "TypeError", "unexpected keyword argument 'size'"),
        ({"compute_capability": 90}, "TypeError", "unexpected keyword"),
    ],
)
def test_conversion_errors_name_the_keyword(keywords: Any, kind: str, message: str) -> None:
    script = f"emit(attempt(csa_runtime.launch_forward, **(forward() | {keywords!r})))"
    error = fake.run(script, driver=False).output
    assert error["type"] == kind and message in error["text"]


def test_positional_arguments_are_refused() -> None:
    error = fake.run("emit(attempt(csa_runtime.launch_forward, 1))", driver=False).output
    assert error["type"] == "TypeError" and "keyword arguments only" in error["text"]


def test_any_index_serves_as_an_integer_and_none_as_absent() -> None:
    script = """
class Index:
    def __init__(self, value): self.value = value
    def __index__(self): return self.value
call = {k: Index(v) for k, v in forward().items()}
call["ape"] = None
csa_runtime.launch_forward(**call)
"""
    assert len(fake.run(script).launches) == 1


def test_keywords_mean_the_same_in_any_order_and_from_any_call() -> None:
    """Spelled out, of which the names are remembered, unpacked, and from within each other."""
    spelled = ", ".join(f"{name}={value}" for name, value in forward().items())
    turned = ", ".join(f"{name}={value}" for name, value in reversed(forward().items()))
    other = ", ".join(f"{name}={value}" for name, value in forward(head_dim=64).items())
    script = f"""
class Calling:
    def __index__(self):
        csa_runtime.launch_forward({turned})
        return 64
def first(): csa_runtime.launch_forward({spelled})
def second(): csa_runtime.launch_forward({other})
for _ in range(2):
    first(); csa_runtime.launch_forward({turned}); second()
    csa_runtime.launch_forward(**forward())
    csa_runtime.launch_forward(**dict(reversed(forward().items())))
    attempt(csa_runtime.launch_forward, **forward(), size=4)
    attempt(csa_runtime.launch_forward, size=4, **forward())
csa_runtime.launch_forward(**forward() | dict(tokens=Calling()))
first()
"""
    parameters = [launch["parameters"] for launch in fake.run(script).launches]
    one, two = parameters[0], parameters[2]
    assert one != two
    assert parameters == [one, one, two, one, one] * 2 + [one] * 3


def test_the_documentation_names_the_dtypes_that_are_served() -> None:
    """And no other, which the bundle has no image for."""
    script = "emit([csa_runtime.launch_forward.__doc__, _native.bundle_info()['variants']])"
    text, variants = fake.run(script, driver=False).output
    served = {variant["dtype"] for variant in variants if variant["operation"] != "finish"}
    for name in ("bf16", "fp16", "fp32"):
        assert (name in text) == (name in served), name
