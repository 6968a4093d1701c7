# SPDX-License-Identifier: Apache-2.0
"""The array operations on the CPU: results, memory, options."""

import ml_dtypes
import numpy as np
import pytest
import torch

import csa_runtime
from csa_runtime import calls, checks, prefixes
from csa_runtime.arrays import describe
from csa_runtime.reference import reference_backward, reference_forward
from support.array_calls import SENTINEL, Exporter, backward, forward, results
from support.eager import eager
from support.packs import Pack, random_pack


@pytest.fixture
def pack() -> Pack:
    """Two rows of padding, tails, an empty segment."""
    return random_pack([9, 0, 30, 4], ratio=4, coff=2, head_dim=6, padding=2, first=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_torch_cpu_tensors_take_the_reference(dtype: torch.dtype) -> None:
    """In every dtype; results are tensors."""
    pack = random_pack([9, 30], ratio=2, coff=1, head_dim=5, padding=1, dtype=dtype)
    out = forward(pack)
    expected = reference_forward(*pack.inputs, **pack.options, total_comp=pack.total_comp)
    assert out.dtype == dtype and torch.equal(out, expected)
    for ours, theirs in zip(
        backward(pack), reference_backward(*pack.inputs, pack.grad_out, **pack.options), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_numpy_arrays_take_the_reference(pack: Pack) -> None:
    """Results are arrays, bf16 through ml_dtypes."""
    arrays = {
        name: getattr(pack, name).float().numpy().astype(ml_dtypes.bfloat16)
        for name in ("kv", "score", "grad_out")
    } | {name: getattr(pack, name).numpy() for name in ("ape", "cu_seqlens", "cu_seqlens_comp")}
    out = forward(pack, **{k: v for k, v in arrays.items() if k != "grad_out"})
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), forward(pack).float().numpy())
    for ours, theirs in zip(backward(pack, **arrays), backward(pack), strict=True):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())


def test_strangers_on_the_cpu_are_read_and_written_in_place(pack: Pack) -> None:
    """DLPack alone, bf16 included; their results must be given, and total_comp too."""
    names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
    strange = {name: Exporter(getattr(pack, name)) for name in names}
    with pytest.raises(ValueError, match="pass out="):
        forward(pack, **strange)
    out, *grads = results(pack)
    given = Exporter(out)
    with pytest.raises(ValueError, match=r"out is .* \(9, 6\) is allowed"):
        forward(pack, **strange, out=Exporter(out[:-1]), total_comp=9)
    assert forward(pack, **strange, out=given) is given
    assert torch.equal(out, forward(pack))
    wrapped = tuple(Exporter(grad) for grad in grads)
    backward(pack, **strange, grad_out=Exporter(pack.grad_out), grads=wrapped)
    for ours, theirs in zip(grads, backward(pack), strict=True):
        assert torch.equal(ours, theirs)


def test_given_results_are_written_and_returned(pack: Pack) -> None:
    """Row-strided ones too, and what lies between their rows is untouched."""
    wide = torch.full((pack.total_comp, 20), SENTINEL, dtype=torch.bfloat16)
    out = wide[:, 3:9]
    assert forward(pack, out=out) is out
    assert torch.equal(out, forward(pack))
    assert (wide[:, :3] == SENTINEL).all() and (wide[:, 9:] == SENTINEL).all()
    fused = torch.full((pack.kv.shape[0], 24), SENTINEL, dtype=torch.bfloat16)
    grads = (fused[:, :12], fused[:, 12:], torch.full_like(pack.ape, SENTINEL))
    assert backward(pack, grads=grads)[0] is grads[0]
    for ours, theirs in zip(grads, backward(pack), strict=True):
        assert torch.equal(ours, theirs)


def test_strided_and_broadcast_inputs_are_read_in_place(pack: Pack) -> None:
    """Row strides, 0 included, of every 16-bit input."""
    fused = torch.cat([pack.kv, pack.score], dim=1)
    one = pack.grad_out[:1].expand(pack.grad_out.shape)
    strided = backward(pack, kv=fused[:, :12], score=fused[:, 12:], grad_out=one)
    for ours, theirs in zip(strided, backward(pack, grad_out=one.contiguous()), strict=True):
        assert torch.equal(ours, theirs)


def test_absent_ape_is_zeros_and_has_no_gradient(pack: Pack) -> None:
    """And an unwanted grad_ape is not computed."""
    assert torch.equal(forward(pack, ape=None), forward(pack, ape=torch.zeros_like(pack.ape)))
    assert backward(pack, ape=None)[2] is None
    grads = (torch.empty_like(pack.kv), torch.empty_like(pack.kv), None)
    assert backward(pack, grads=grads)[2] is None
    assert torch.equal(grads[0], backward(pack)[0])


def test_accumulate_adds_to_the_given_grad_ape(pack: Pack) -> None:
    """Once, after the sum is finished."""
    fresh = backward(pack)
    grads = results(pack)[1:]
    backward(pack, grads=grads, accumulate=True)
    assert torch.equal(grads[2], fresh[2] + SENTINEL)
    assert torch.equal(grads[0], fresh[0])


def test_capacity_comes_from_out_or_the_prefixes(pack: Pack) -> None:
    """total_comp=None."""
    real = int(pack.cu_seqlens_comp[-1])
    assert forward(pack, total_comp=None).shape == (real, 6)
    out = results(pack)[0]
    assert forward(pack, total_comp=None, out=out).shape == (pack.total_comp, 6)
    assert forward(pack, total_comp=3).shape == (3, 6)


def test_no_rows_give_empty_output_and_zero_gradients() -> None:
    """Segments shorter than ratio, no segment at all, no token."""
    for segments in ([3, 2], [], [0]):
        pack = random_pack(segments, ratio=4, coff=2, head_dim=3)
        assert forward(pack).shape == (0, 3)
        grads = backward(pack)
        assert all((grad == 0).all() for grad in grads)
        assert grads[0].shape == pack.kv.shape


def test_all_rows_of_a_pack_without_segments_are_padding() -> None:
    """B == 0 with a capacity: equal to eager."""
    pack = random_pack([], ratio=4, coff=2, head_dim=3, padding=2, first=5)
    torch.testing.assert_close(forward(pack), eager(pack).out)


def test_a_sufficient_workspace_is_taken_and_not_needed_on_the_cpu(pack: Pack) -> None:
    """Its size counts only where a GPU would use it: with an ape, for what images serve."""
    size = csa_runtime.backward_workspace_bytes(
        pack.kv.shape[0], pack.total_comp, 6, ratio=4, coff=2
    )
    small = torch.zeros(16, dtype=torch.uint8)
    backward(pack, workspace=torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"of 16 bytes; this call needs up to {size} on a GPU"):
        backward(pack, workspace=small)
    backward(pack, workspace=small, grads=(*results(pack)[1:3], None))
    backward(pack, workspace=small, ape=None)
    odd = random_pack([9, 30], ratio=3, coff=1, head_dim=5, padding=1)
    backward(odd, workspace=small)


def test_prefix_contents_are_checked_when_asked(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CSA_RUNTIME_CHECK=1, read once; without it malformed prefixes give some values."""
    pack.cu_seqlens_comp[1] = 5
    forward(pack)
    monkeypatch.setattr(calls.prefixes, "checking", lambda: True)
    with pytest.raises(ValueError, match=r"cu_seqlens_comp\[1\] gives segment 0 5 rows"):
        forward(pack)
    with pytest.raises(ValueError, match=r"cu_seqlens_comp\[1\] gives segment 0 5 rows"):
        backward(pack)


def test_prefixes_of_strangers_are_checked_when_asked(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that have DLPack alone, neither tolist nor shape, on the host."""
    monkeypatch.setattr(calls.prefixes, "checking", lambda: True)
    names = ("cu_seqlens", "cu_seqlens_comp")
    strange = {name: Exporter(getattr(pack, name)) for name in names}
    assert torch.equal(forward(pack, **strange), forward(pack))
    assert forward(pack, **strange, total_comp=None).shape == (10, 6)
    prefixes.check_prefixes(*strange.values(), pack.kv.shape[0], ratio=4)
    pack.cu_seqlens_comp[1] = 5
    with pytest.raises(ValueError, match=r"cu_seqlens_comp\[1\] gives segment 0 5 rows"):
        forward(pack, **strange)
    with pytest.raises(ValueError, match=r"cu_seqlens_comp\[1\] gives segment 0 5 rows"):
        prefixes.check_prefixes(*strange.values(), pack.kv.shape[0], ratio=4)


def test_results_that_require_a_gradient_are_refused(pack: Pack) -> None:
    """As torch's own out= does, unless nothing is recorded."""
    out = results(pack)[0].requires_grad_()
    with pytest.raises(ValueError, match="out requires a gradient"):
        forward(pack, out=out)
    assert (out == SENTINEL).all()
    grads = [grad.requires_grad_() for grad in results(pack)[1:]]
    with pytest.raises(ValueError, match="grad_kv requires a gradient"):
        backward(pack, grads=tuple(grads))
    with torch.no_grad():
        assert torch.equal(forward(pack, out=out), forward(pack))


def test_disjoint_views_of_one_buffer_are_allowed() -> None:
    """Element by element, as on the GPU: rows of different pitches, a prefix between rows."""
    pack = random_pack([9, 30], ratio=4, coff=2, head_dim=6)
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    kv = memory.as_strided(pack.kv.shape, (48, 1), 0).copy_(pack.kv)
    out = memory.as_strided((pack.total_comp, 6), (96, 1), 12)
    prefix = memory[20:26].view(torch.int32).copy_(pack.cu_seqlens)
    assert torch.equal(forward(pack, kv=kv, cu_seqlens=prefix, out=out), forward(pack))
    assert torch.equal(kv, pack.kv) and torch.equal(prefix, pack.cu_seqlens)
    for start in (43, 11):
        with pytest.raises(ValueError, match="overlaps kv"):
            forward(pack, kv=kv, out=memory.as_strided(out.shape, (96, 1), start))
    with pytest.raises(ValueError, match="overlaps cu_seqlens"):
        forward(pack, kv=kv, cu_seqlens=prefix, out=memory.as_strided(out.shape, (96, 1), 16))


def test_overlap_is_decided_byte_by_byte() -> None:
    """Against the sets of addresses of small strided matrices and vectors."""
    generator = np.random.default_rng(7)
    buffer, seen = np.zeros(256, np.int16), set()
    for _ in range(4000):
        views = []
        for _ in range(2):
            rows, columns, pitch = generator.integers((0, 1, 0), (5, 5, 13))
            start = int(generator.integers(0, 60))
            flat = buffer[start:]
            views.append(np.lib.stride_tricks.as_strided(flat, (rows, columns), (2 * pitch, 2)))
        if generator.integers(2):
            start, count = (int(n) for n in generator.integers((0, 1), (60, 4)))
            views[1] = buffer[2 * start : 2 * (start + count)].view(np.int32)
        touched = [
            {
                view.__array_interface__["data"][0] + byte
                + sum(i * s for i, s in zip(index, view.strides, strict=True))
                for index in np.ndindex(view.shape)
                for byte in range(view.itemsize)
            }
            for view in views
        ]  # fmt: skip
        expected = bool(touched[0] & touched[1])
        assert checks.overlap(*(describe("view", view) for view in views)) is expected
        seen.add(expected)
    assert seen == {True, False}


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_environment_asks_for_checks(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    """Only "1" does."""
    prefixes.checking.cache_clear()
    if value is None:
        monkeypatch.delenv("CSA_RUNTIME_CHECK", raising=False)
    else:
        monkeypatch.setenv("CSA_RUNTIME_CHECK", value)
    assert prefixes.checking() is expected
    prefixes.checking.cache_clear()
