# SPDX-License-Identifier: Apache-2.0
"""Row prefixes from token prefixes, their bound, and the check of both."""

import itertools
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from csa_runtime import check_prefixes, compressed_prefixes, max_rows
from support.array_calls import OnGpu


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize("lengths", [[], [0], [3], [4, 0, 5], [127, 128, 129, 0, 512]])
def test_compressed_prefixes_sum_the_rows(ratio: int, lengths: list[int]) -> None:
    """int32, of the array's own library, from any first token."""
    tokens = np.cumsum([5, *lengths], dtype=np.int32)
    expected = np.cumsum([0, *(length // ratio for length in lengths)])
    ours = compressed_prefixes(tokens, ratio=ratio)
    assert isinstance(ours, np.ndarray) and ours.dtype == np.int32
    np.testing.assert_array_equal(ours, expected)
    tensor = compressed_prefixes(torch.from_numpy(tokens), ratio=ratio)
    assert tensor.dtype == torch.int32
    np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(3, np.int64),
        np.zeros(3, np.uint32),
        np.zeros((1, 3), np.int32),
        np.zeros(0, np.int32),
        torch.zeros(3, dtype=torch.int64),
        [0, 4, 8],
        np.int32(3),
    ],
    ids=["int64", "uint32", "2-D", "empty", "torch int64", "list", "scalar"],
)
def test_compressed_prefixes_refuse_what_is_no_prefix(bad: object) -> None:
    """Shape and dtype."""
    with pytest.raises(ValueError, match="cu_seqlens is"):
        compressed_prefixes(bad, ratio=4)


def test_compressed_prefixes_trace_without_a_read_back() -> None:
    """No value reaches the host: fake tensors have none."""
    compiled = torch.compile(
        lambda t: compressed_prefixes(t, ratio=4), backend="aot_eager", fullgraph=True
    )
    assert compiled(torch.tensor([0, 9, 12], dtype=torch.int32)).tolist() == [0, 2, 2]


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("segments", [0, 1, 2, 3])
def test_max_rows_is_reached_and_never_exceeded(ratio: int, segments: int) -> None:
    """Over every pack of up to three segments and nine tokens."""
    for tokens in range(10):
        packs = (
            lengths
            for lengths in itertools.product(range(tokens + 1), repeat=segments)
            if sum(lengths) <= tokens
        )
        best = max(sum(length // ratio for length in lengths) for lengths in packs)
        assert max_rows(tokens, segments, ratio=ratio) == best


GOOD = ([2, 10, 10, 13], [0, 2, 2, 2])


def test_check_accepts_well_formed_prefixes() -> None:
    """Fewer rows than fit are allowed unless strict; lists and arrays both serve."""
    check_prefixes(*GOOD, 13, ratio=4, total_comp=5, strict=True)
    check_prefixes([0, 9], [0, 1], 9, ratio=4)
    check_prefixes([0], [0], 0, ratio=4)
    kinds: dict[Any, Any] = {torch.tensor: torch.int32, np.array: np.int32}
    for make in kinds:
        check_prefixes(*(make(prefix, dtype=kinds[make]) for prefix in GOOD), 13, ratio=4)


@pytest.mark.parametrize(
    ("tokens", "rows", "named"),
    [
        ([-1, 10, 10, 13], GOOD[1], r"cu_seqlens\[0\] is -1"),
        ([14, 14], [0, 0], r"cu_seqlens\[0\] is 14"),
        ([14, 12], [1, 0], r"cu_seqlens\[0\] is 14"),
        ([2, 10, 9, 13], GOOD[1], r"cu_seqlens\[2\] is 9"),
        ([2, 10, 10, 14], GOOD[1], r"cu_seqlens\[3\] is 14"),
        (GOOD[0], [1, 2, 2, 2], r"cu_seqlens_comp\[0\] is 1"),
        (GOOD[0], [0, 2, 1, 2], r"cu_seqlens_comp\[2\] is 1"),
        (GOOD[0], [0, 3, 3, 3], r"cu_seqlens_comp\[1\] gives segment 0 3 rows"),
        (GOOD[0], [0, 2, 2], "4 elements and cu_seqlens_comp 3"),
    ],
)
def test_check_names_the_first_bad_index(tokens: list[int], rows: list[int], named: str) -> None:
    """Whatever comes after it."""
    with pytest.raises(ValueError, match=named):
        check_prefixes(tokens, rows, 13, ratio=4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"cu_seqlens": np.array([GOOD[0]], np.int32)},
            r"cu_seqlens is int32 \(1, 4\)",
        ),
        ({"cu_seqlens": torch.tensor(GOOD[0])[None]}, r"cu_seqlens is int64 \(1, 4\)"),
        ({"cu_seqlens": torch.tensor(GOOD[0])}, r"cu_seqlens is int64 \(4,\)"),
        ({"cu_seqlens": np.array(GOOD[0], np.uint32)}, r"cu_seqlens is uint32 \(4,\)"),
        ({"cu_seqlens": np.ma.masked_array(GOOD[0], dtype=np.int32)}, "cu_seqlens is masked"),
        ({"cu_seqlens": 5}, "cu_seqlens is a builtins.int"),
        ({"cu_seqlens_comp": "0222"}, "cu_seqlens_comp is a builtins.str"),
        ({"cu_seqlens": [2, 10, 10, 2**31]}, r"cu_seqlens\[3\] is 2147483648"),
        ({"total_tokens": "13"}, "total_tokens is '13'"),
        ({"total_tokens": 2**31}, "total_tokens is 2147483648"),
        ({"ratio": True}, "ratio is True"),
        ({"total_comp": 2.5}, r"total_comp is 2\.5"),
        ({"cu_seqlens_comp": np.array(GOOD[1], np.float32)}, r"cu_seqlens_comp is float32"),
        ({"cu_seqlens_comp": [0, 2, 2.0, 2]}, r"cu_seqlens_comp\[2\] is 2\.0"),
        ({"cu_seqlens": None}, "cu_seqlens is a builtins.NoneType"),
        ({"total_tokens": -1}, "total_tokens is -1"),
        ({"total_tokens": 13.0}, r"total_tokens is 13\.0"),
        ({"ratio": 0}, "ratio is 0"),
        ({"total_comp": -1}, "total_comp is -1"),
    ],
)
def test_check_refuses_what_are_no_vectors_or_sizes(changes: dict[str, Any], named: str) -> None:
    """As ValueErrors that name the argument."""
    arguments = {
        "cu_seqlens": GOOD[0], "cu_seqlens_comp": GOOD[1], "total_tokens": 13, "ratio": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        check_prefixes(**arguments | changes)


def well_formed(
    tokens: list[int], rows: list[int], total: int, ratio: int, capacity: int | None, strict: bool
) -> bool:
    """The definition, of prefixes cut off anywhere."""
    lengths = [b - a for a, b in itertools.pairwise(tokens)]
    counts = [b - a for a, b in itertools.pairwise(rows)]
    fitting = zip(counts, lengths, strict=True)
    return (
        0 <= tokens[0]
        and min(lengths, default=0) >= 0
        and tokens[-1] <= total
        and rows[0] == 0
        and min(counts, default=0) >= 0
        and all(n == m // ratio if strict else n * ratio <= m for n, m in fitting)
        and not (strict and capacity is not None and rows[-1] > capacity)
    )


def test_check_agrees_with_the_definition_on_random_prefixes() -> None:
    """And names the first index at which they cannot be saved any more."""
    draw = random.Random(11)
    outcomes: Counter[int] = Counter()
    for _ in range(100_000):
        ratio, strict, capacity = draw.choice((1, 2, 4)), draw.random() < 0.4, draw.randrange(9)
        tokens, rows = [draw.choice((0, 0, 2, 5))], [0]
        for _ in range(draw.randrange(5)):
            length = draw.randrange(9)
            tokens.append(tokens[-1] + length)
            rows.append(rows[-1] + length // ratio)
        total = tokens[-1] + draw.choice((0, 0, 3))
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            spoilt = draw.choice((tokens, rows))
            spoilt[draw.randrange(len(spoilt))] += draw.choice((-9, -3, -1, 1, 2, 9, 30))
        given = (total, ratio, capacity, strict)
        bad = [
            i for i in range(len(tokens)) if not well_formed(tokens[: i + 1], rows[: i + 1], *given)
        ]
        outcomes[bad[0] if bad else -1] += 1
        try:
            check_prefixes(tokens, rows, total, ratio=ratio, total_comp=capacity, strict=strict)
        except ValueError as error:
            named = re.match(r"cu_seqlens(?:_comp)?\[(\d+)\]", str(error))
            assert named and bad and int(named[1]) == bad[0], (tokens, rows, given, str(error))
        else:
            assert not bad, (tokens, rows, given)
    assert set(outcomes) == {-1, 0, 1, 2, 3, 4}


def test_check_refuses_device_memory_that_nobody_reads() -> None:
    """A bare interface: nothing of its own reads it back."""
    prefix = OnGpu((4,), "<i4")
    with pytest.raises(ValueError, match=r"cu_seqlens of .* cannot be read back.*pass a list"):
        check_prefixes(prefix, prefix, 13, ratio=4)


def test_check_takes_lists_of_any_integers() -> None:
    """NumPy's own, say."""
    check_prefixes(list(np.array(GOOD[0], np.int32)), GOOD[1], 13, ratio=4)


def test_strict_check_asks_for_every_row_and_the_capacity() -> None:
    """What only some callers promise."""
    with pytest.raises(ValueError, match=r"cu_seqlens_comp\[1\].*exactly 2"):
        check_prefixes([0, 9], [0, 1], 9, ratio=4, strict=True)
    with pytest.raises(ValueError, match="at most total_comp = 1"):
        check_prefixes([0, 9], [0, 2], 9, ratio=4, total_comp=1, strict=True)
    check_prefixes([0, 9], [0, 2], 9, ratio=4, total_comp=1)
