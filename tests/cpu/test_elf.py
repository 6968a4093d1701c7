# SPDX-License-Identifier: Apache-2.0
"""What aot/elf.py reads from the committed cubins, and what it makes of damaged ones."""

import hashlib
import json
import random
import struct
from pathlib import Path

import pytest

from aot import compile as aot_compile
from aot import elf
from aot.variants import BY_NAME, VARIANTS

CUBINS = Path(__file__).resolve().parents[2] / "cubins"
IMAGES = json.loads((CUBINS / "manifest.json").read_text())["images"]
IDS = [image["file"] for image in IMAGES]


def one_per_architecture() -> list[dict]:
    """The first image of each architecture."""
    return list({image["arch"]: image for image in reversed(IMAGES)}.values())


SAMPLES = [pytest.param(image, id=f"sm_{image['arch']}") for image in one_per_architecture()]


def data_of(image: dict) -> bytearray:
    """The committed bytes of an image."""
    return bytearray((CUBINS / image["file"]).read_bytes())


def patch_record(data: bytearray, attribute: int, word: int, value: int) -> None:
    """Overwrite 32-bit `word` of the first sized .nv.info record of this attribute and 8 bytes."""
    at = data.index(struct.pack("<BBH", 4, attribute, 8))
    struct.pack_into("<I", data, at + 4 + 4 * word, value)


@pytest.mark.parametrize("image", IMAGES, ids=IDS)
def test_manifest_record_is_what_the_image_says(image: dict) -> None:
    data = bytes(data_of(image))
    cubin = elf.read(data)
    (kernel,) = cubin.kernels
    assert hashlib.sha256(data).hexdigest() == image["sha256"]
    assert len(data) == image["bytes"]
    assert kernel.symbol == image["symbol"] == image["variant"] + "_0"
    assert [list(parameter) for parameter in kernel.parameters] == image["parameters"]
    assert list(kernel.block or ()) == image["block"]
    assert kernel.registers == image["registers"]
    assert kernel.frame == image["frame"] == 0
    assert kernel.min_stack == 0
    assert kernel.static_shared == image["static_shared"]
    assert cubin.arch == image["arch"]
    assert cubin.abi_version == image["abi_version"]
    assert cubin.elf_flags == image["elf_flags"]
    assert cubin.release == image["toolchain_release"]


def test_every_variant_has_an_image_for_each_of_its_architectures() -> None:
    built = {(image["variant"], image["arch"]) for image in IMAGES}
    assert built == {(v.name, arch) for v in VARIANTS for arch in v.architectures}


@pytest.mark.parametrize(
    ("arch", "flags", "abi_version", "release"),
    [
        (80, 0x500550, 7, "12.9"),
        (90, 0x5A055A, 7, "12.9"),
        (100, 0x6006402, 8, "12.9.83"),
        (120, 0x6007802, 8, "12.9.83"),
    ],
)
def test_flags_of_each_architecture(arch: int, flags: int, abi_version: int, release: str) -> None:
    found = {
        (i["elf_flags"], i["abi_version"], i["toolchain_release"])
        for i in IMAGES
        if i["arch"] == arch
    }
    assert found == {(flags, abi_version, release)}


def test_architecture_is_read_from_both_layouts_of_the_flags() -> None:
    image = next(i for i in IMAGES if i["abi_version"] == 8)
    data = data_of(image)
    struct.pack_into("<I", data, 48, 0x6005A04)
    cubin = elf.read(bytes(data))
    assert (cubin.arch, cubin.accelerated) == (90, False)
    struct.pack_into("<I", data, 48, 0x6005A0C)
    assert elf.read(bytes(data)).accelerated


@pytest.mark.parametrize("image", SAMPLES)
def test_every_truncation_is_an_error(image: dict) -> None:
    data = bytes(data_of(image))
    for size in [*range(0, len(data), 37), *range(len(data) - 64, len(data))]:
        with pytest.raises(elf.ElfError):
            elf.read(data[:size])


@pytest.mark.parametrize("image", SAMPLES)
def test_flipped_bytes_raise_nothing_but_the_modules_error(image: dict) -> None:
    data = bytes(data_of(image))
    chance = random.Random(20240)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        try:
            elf.read(bytes(damaged))
        except elf.ElfError:
            pass


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"not an image" * 20, bytes(5000)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(elf.ElfError):
        elf.read(data)


def test_a_host_object_is_refused() -> None:
    data = data_of(IMAGES[0])
    struct.pack_into("<H", data, 18, 62)
    with pytest.raises(elf.ElfError, match="machine 62"):
        elf.read(bytes(data))


@pytest.mark.parametrize("image", SAMPLES)
def test_check_accepts_the_image_and_refuses_it_for_another_row(image: dict) -> None:
    data = bytes(data_of(image))
    variant = BY_NAME[image["variant"]]
    assert aot_compile.check(variant, image["arch"], data).symbol == image["symbol"]
    other = next(v for v in VARIANTS if v != variant)
    with pytest.raises(aot_compile.CompileError, match="kernels"):
        aot_compile.check(other, image["arch"], data)
    with pytest.raises(aot_compile.CompileError, match="architecture"):
        aot_compile.check(variant, image["arch"] + 1, data)


@pytest.mark.parametrize("image", SAMPLES)
@pytest.mark.parametrize(
    ("attribute", "complaint"),
    [(elf.ATTRIBUTE_FRAME_SIZE, "frame"), (elf.ATTRIBUTE_MIN_STACK_SIZE, "stack")],
)
def test_check_refuses_local_memory(image: dict, attribute: int, complaint: str) -> None:
    data = data_of(image)
    patch_record(data, attribute, 1, 16)
    with pytest.raises(aot_compile.CompileError, match=complaint):
        aot_compile.check(BY_NAME[image["variant"]], image["arch"], bytes(data))


@pytest.mark.parametrize("image", SAMPLES)
def test_check_refuses_another_block_layout_and_device_class(image: dict) -> None:
    variant, arch = BY_NAME[image["variant"]], image["arch"]
    data = data_of(image)
    block = data.index(struct.pack("<BBHI", 4, elf.ATTRIBUTE_REQNTID, 12, variant.threads))
    struct.pack_into("<I", data, block + 4, variant.threads // 2)
    with pytest.raises(aot_compile.CompileError, match="block"):
        aot_compile.check(variant, arch, bytes(data))

    data = data_of(image)
    parameter = data.index(struct.pack("<BBH", 4, elf.ATTRIBUTE_KPARAM_INFO, 12))
    (position,) = struct.unpack_from("<I", data, parameter + 8)
    struct.pack_into("<I", data, parameter + 8, position + (4 << 16))
    with pytest.raises(aot_compile.CompileError, match="parameters"):
        aot_compile.check(variant, arch, bytes(data))

    data = data_of(image)
    accelerated = 0x800 if image["abi_version"] == 7 else 0x8
    struct.pack_into("<I", data, 48, image["elf_flags"] | accelerated)
    with pytest.raises(aot_compile.CompileError, match="one device"):
        aot_compile.check(variant, arch, bytes(data))


@pytest.mark.parametrize("image", SAMPLES)
def test_check_refuses_another_toolchain(image: dict) -> None:
    data = data_of(image)
    if image["abi_version"] == 8:
        data = bytearray(bytes(data).replace(b"V12.9.83", b"V13.0.48"))
    else:
        at = data.index(struct.pack("<BBHI", 4, elf.ATTRIBUTE_CUDA_API_VERSION, 4, 129))
        struct.pack_into("<I", data, at + 4, 130)
    with pytest.raises(aot_compile.CompileError, match="release"):
        aot_compile.check(BY_NAME[image["variant"]], image["arch"], bytes(data))
