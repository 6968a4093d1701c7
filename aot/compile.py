# SPDX-License-Identifier: Apache-2.0
"""One variant and one architecture in, checked cubin bytes out.

Importing this module needs no compiler; `prepare` imports it, once a process, after making sure
that it is the pinned one. The compiler can fail without raising, so nothing it returns is trusted:
`check` reads the image back.
"""

import functools
import importlib
import importlib.metadata
import os
import sys
import tempfile
from typing import Any

from aot import elf
from aot.bundle import natural_layout
from aot.variants import PARAMETERS, Variant

DSL = "nvidia-cutlass-dsl"
DSL_VERSION = "4.8.1"
FLAVOUR = "cu12"
OTHER_FLAVOUR = "cu13"
OPTIONS = "--gpu-arch sm_{arch} --keep-cubin"

# What the pinned flavour's ptxas writes: (ELF ABI version, release as far as the file keeps it).
OLD_LAYOUT = (7, "12.9")
NEW_LAYOUT = (8, "12.9.83")
NEW_LAYOUT_FROM = 100


class CompileError(Exception):
    """The toolchain is not the pinned one, or an image is not what its variant says."""


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_toolchain() -> None:
    """Stop unless exactly the pinned compiler is there, and nothing that would sway it.

    A driver in sight does not: the compiler chooses by its version among the flavours that are
    installed, which is one.

    Raises:
        CompileError: another version, or the cu13 flavour's libraries are installed too.
    """
    for distribution in (DSL, f"{DSL}-libs-core", f"{DSL}-libs-{FLAVOUR}"):
        found = _installed(distribution)
        if found != DSL_VERSION:
            raise CompileError(f"{distribution} is {found or 'not installed'}, not {DSL_VERSION}")
    other = f"{DSL}-libs-{OTHER_FLAVOUR}"
    if _installed(other) is not None:
        raise CompileError(f"{other} is installed: images would depend on which flavour is taken")


@functools.cache
def prepare() -> None:
    """Import the compiler into this process in a known environment; later calls do nothing.

    Raises:
        CompileError: as `check_toolchain`, or the compiler was imported before, unprepared.
    """
    if "cutlass" in sys.modules:
        raise CompileError("cutlass was imported before its environment was prepared")
    check_toolchain()
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        del os.environ[name]
    os.environ.update(CUTE_DSL_NO_CACHE="1", CUTE_DSL_DISABLE_FILE_CACHING="1")
    # Every compile names its architecture. Unless this one is set, too, the compiler starts the
    # driver to ask for the GPU's.
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    importlib.import_module("cutlass.cute")


def compile_image(variant: Variant, arch: int) -> bytes:
    """The cubin of `variant` for sm_`arch`, checked.

    Raises:
        CompileError: as `prepare` and `check`, or the compiler returned no image.
    """
    prepare()
    cute: Any = importlib.import_module("cutlass.cute")
    module = importlib.import_module(f"aot.kernels.{variant.module}")
    kernel, host, arguments = module.entry(variant)
    kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    # The compiler writes the image to a file and reads that back; from a directory that it shares
    # with another compile it would take a stale file of the same name for its result.
    with tempfile.TemporaryDirectory(prefix="csa-aot-") as dump:
        options = f"{OPTIONS.format(arch=arch)} --dump-dir={dump}"
        image = cute.compile(host, *arguments, options=options).__cubin__
    # For an architecture its libraries lack the compiler returns the path it would have written.
    if not isinstance(image, bytes):
        raise CompileError(f"the compiler made no image: {image!r}")
    check(variant, arch, image)
    return image


def check(variant: Variant, arch: int, image: bytes) -> elf.Kernel:
    """The one kernel of `image`, after making sure that it is `variant` built for sm_`arch`.

    Raises:
        CompileError: names the first property that is not as it must be.
        elf.ElfError: the image is damaged.
    """
    cubin = elf.read(image)
    symbols = [kernel.symbol for kernel in cubin.kernels]
    _expect("kernels", symbols, [f"{variant.name}_0"])
    kernel = cubin.kernels[0]
    _expect("architecture", cubin.arch, arch)
    _expect("built for one device only", cubin.accelerated, False)
    abi_version, release = NEW_LAYOUT if arch >= NEW_LAYOUT_FROM else OLD_LAYOUT
    _expect("ELF ABI version", cubin.abi_version, abi_version)
    _expect("toolchain release", cubin.release, release)
    if cubin.options:
        _expect("ptxas options", cubin.options.split(), ["-O", "3", "-arch", f"sm_{arch}"])
    layout = natural_layout([PARAMETERS[name][1] for name in variant.parameters])
    _expect("parameters (offset, size)", [list(p) for p in kernel.parameters], layout)
    _expect("block", kernel.block, (variant.threads, 1, 1))
    # Both are local memory. A frame is the kernel's own (arrays, spills); a stack beyond it would
    # be a callee's, and kernels here call nothing that needs one.
    _expect("frame bytes (local memory, spills)", kernel.frame, 0)
    _expect("stack bytes", kernel.min_stack, 0)
    # A global would be state shared by concurrent streams and graphs.
    _expect("globals", [s for s in cubin.sections if s.startswith(".nv.global")], [])
    return kernel


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CompileError(f"{what}: {found!r}, expected {expected!r}")
