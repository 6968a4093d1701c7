# SPDX-License-Identifier: Apache-2.0
"""What a cubin says about its kernels, read from the ELF file itself: no CUDA, no driver.

A cubin is an ELF64 little-endian file whose attributes lie in `.nv.info` (whole file, values keyed
by symbol) and `.nv.info.<kernel>`. The format is NVIDIA's and unpublished; what is relied on here
is what CUDA 12.9's ptxas writes, in the two layouts it uses (ELF ABI 7 up to sm_90, 8 from sm_100).
"""

import struct
from dataclasses import dataclass

MACHINE_CUDA = 190
SECTION_SYMTAB = 2
SECTION_NOBITS = 8
SYMBOL_FUNCTION = 2

# From sm_90 on the first KiB of a block's shared memory is the system's, and a kernel's section of
# static shared memory counts it although no limit that a launch meets does.
RESERVED_SHARED = 1024

# .nv.info records: format byte, attribute byte, then a 16-bit value, or a 16-bit size and payload.
FORMAT_SIZED = 4
ATTRIBUTE_FRAME_SIZE = 0x11
ATTRIBUTE_MIN_STACK_SIZE = 0x12
ATTRIBUTE_KPARAM_INFO = 0x17
ATTRIBUTE_REQNTID = 0x10
ATTRIBUTE_REGCOUNT = 0x2F
ATTRIBUTE_CUDA_API_VERSION = 0x37

NOTE_TOOLKIT = 2000


class ElfError(ValueError):
    """Not a cubin, or a damaged one."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a cubin.

    parameters: (offset, size) in bytes, in order. block: the size the kernel requires, None if it
    requires none. frame, min_stack: bytes of local memory a thread; spills live there.
    static_shared: bytes a block, without what the system reserves.
    """

    symbol: str
    parameters: tuple[tuple[int, int], ...]
    block: tuple[int, int, int] | None
    registers: int
    frame: int
    min_stack: int
    static_shared: int


@dataclass(frozen=True)
class Cubin:
    """A whole cubin.

    arch: 90 for sm_90. accelerated: built for sm_90a and the like, so for that device alone.
    release: of the toolchain, "12.9", or "12.9.83" where the file says so much.
    options: ptxas's command line, "" where the file does not keep it.
    """

    kernels: tuple[Kernel, ...]
    arch: int
    accelerated: bool
    abi_version: int
    elf_flags: int
    release: str
    options: str
    sections: tuple[str, ...]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    data: bytes


class _File:
    """The sections and symbols of an ELF file, every access bounds checked."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        if data[:7] != b"\x7fELF\x02\x01\x01":
            raise ElfError("not an ELF64 little-endian file")
        (machine,) = self._unpack("<H", 18)
        if machine != MACHINE_CUDA:
            raise ElfError(f"ELF machine {machine} is not CUDA's")
        self.abi_version = data[8]
        (self.flags,) = self._unpack("<I", 48)
        (segments,) = self._unpack("<Q", 32)
        entry_size, count = self._unpack("<HH", 54)
        self._slice(segments, entry_size * count)
        self.sections = self._sections()
        self.symbols = self._symbols()

    def _slice(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > len(self._data):
            raise ElfError(f"{size} bytes at {offset} lie outside the file's {len(self._data)}")
        return self._data[offset : offset + size]

    def _unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(layout, self._slice(offset, struct.calcsize(layout)))

    def _sections(self) -> dict[str, _Section]:
        (table,) = self._unpack("<Q", 40)
        entry_size, count, names_index = self._unpack("<HHH", 58)
        if entry_size != 64 or names_index >= count:
            raise ElfError("damaged section header table")
        headers = [self._unpack("<IIQQQQIIQQ", table + i * entry_size) for i in range(count)]
        names = self._slice(headers[names_index][4], headers[names_index][5])
        sections: dict[str, _Section] = {}
        for name_offset, kind, _, _, offset, size, *_ in headers:
            name = _string(names, name_offset)
            data = b"" if kind in (0, SECTION_NOBITS) else self._slice(offset, size)
            sections.setdefault(name, _Section(name, kind, size, data))
        return sections

    def _symbols(self) -> list[tuple[str, int]]:
        """(name, type) by symbol index."""
        table, strings = self.sections.get(".symtab"), self.sections.get(".strtab")
        if table is None or strings is None or table.kind != SECTION_SYMTAB or table.size % 24:
            raise ElfError("no symbol table, or a damaged one")
        return [
            (_string(strings.data, name), info & 15)
            for name, info, _, _, _, _ in struct.iter_unpack("<IBBHQQ", table.data)
        ]


def _string(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if offset >= len(table) or end < 0:
        raise ElfError("a name lies outside its string table")
    try:
        return table[offset:end].decode("ascii")
    except UnicodeDecodeError as error:
        raise ElfError("a name is not ASCII") from error


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) of a section of .nv.info records; payload as is, or the 16-bit value."""
    attributes, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise ElfError("a .nv.info record is cut off")
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = data[at - 2 : at]
        if form == FORMAT_SIZED:
            payload = data[at : at + value]
            at += value
            if len(payload) != value:
                raise ElfError("a .nv.info record is cut off")
        attributes.append((attribute, payload))
    return attributes


def _words(payload: bytes, count: int) -> tuple[int, ...]:
    if len(payload) < 4 * count:
        raise ElfError("a .nv.info record is too short")
    return struct.unpack_from(f"<{count}I", payload)


def _by_symbol(file: _File, attribute: int) -> dict[str, int]:
    """Values of a whole-file attribute, by symbol name."""
    section = file.sections.get(".nv.info")
    values: dict[str, int] = {}
    for found, payload in _attributes(section.data if section else b""):
        if found == attribute:
            index, value = _words(payload, 2)
            if index >= len(file.symbols):
                raise ElfError("a .nv.info record names no symbol")
            values[file.symbols[index][0]] = value
    return values


def _parameters(attributes: list[tuple[int, bytes]]) -> tuple[tuple[int, int], ...]:
    found: dict[int, tuple[int, int]] = {}
    for attribute, payload in attributes:
        if attribute == ATTRIBUTE_KPARAM_INFO:
            _, position, packed = _words(payload, 3)
            ordinal, offset = position & 0xFFFF, position >> 16
            found[ordinal] = (offset, packed >> 18)
    if sorted(found) != list(range(len(found))):
        raise ElfError("the kernel's parameters are not numbered from 0")
    return tuple(found[i] for i in range(len(found)))


def _kernel(file: _File, symbol: str, arch: int) -> Kernel:
    section = file.sections.get(f".nv.info.{symbol}")
    if section is None:
        raise ElfError(f"no .nv.info.{symbol}")
    attributes = _attributes(section.data)
    block = None
    for attribute, payload in attributes:
        if attribute == ATTRIBUTE_REQNTID:
            x, y, z = _words(payload, 3)
            block = (x, y, z)
    whole = {}
    for attribute in (ATTRIBUTE_REGCOUNT, ATTRIBUTE_FRAME_SIZE, ATTRIBUTE_MIN_STACK_SIZE):
        values = _by_symbol(file, attribute)
        if symbol not in values:
            raise ElfError(f"no attribute {attribute:#x} of {symbol}")
        whole[attribute] = values[symbol]
    shared = file.sections.get(f".nv.shared.{symbol}")
    static_shared = shared.size if shared else 0
    if arch >= 90:
        static_shared = max(0, static_shared - RESERVED_SHARED)
    return Kernel(
        symbol,
        _parameters(attributes),
        block,
        whole[ATTRIBUTE_REGCOUNT],
        whole[ATTRIBUTE_FRAME_SIZE],
        whole[ATTRIBUTE_MIN_STACK_SIZE],
        static_shared,
    )


def _toolkit_note(file: _File) -> tuple[str, str]:
    """(release, ptxas's options) of .note.nv.tkinfo, empty where there is none."""
    section = file.sections.get(".note.nv.tkinfo")
    if section is None:
        return "", ""
    note = section.data
    if len(note) < 12:
        raise ElfError("the toolkit note is cut off")
    name_size, size, kind = struct.unpack_from("<III", note)
    content = note[12 + -(-name_size // 4) * 4 :][:size]
    if kind != NOTE_TOOLKIT or len(content) != size or size < 24:
        raise ElfError("the toolkit note is damaged")
    _, _, _, version, _, options = struct.unpack_from("<6I", content)
    strings = content[24:]
    # "Cuda compilation tools, release 12.9, V12.9.83"
    release = _string(strings, version).rpartition(", V")[2]
    return release, _string(strings, options)


def _api_release(file: _File, kernels: tuple[Kernel, ...]) -> str:
    for kernel in kernels:
        for attribute, payload in _attributes(file.sections[f".nv.info.{kernel.symbol}"].data):
            if attribute == ATTRIBUTE_CUDA_API_VERSION:
                (version,) = _words(payload, 1)
                return f"{version // 10}.{version % 10}"
    return ""


def read(data: bytes) -> Cubin:
    """Everything this module knows of a cubin.

    Raises:
        ElfError: not a cubin, damaged, or of an ELF ABI version other than 7 and 8.
    """
    file = _File(data)
    if file.abi_version == 7:
        arch, accelerated = file.flags & 0xFF, bool(file.flags & 0x800)
    elif file.abi_version == 8:
        arch, accelerated = file.flags >> 8 & 0xFF, bool(file.flags & 0x8)
    else:
        raise ElfError(f"ELF ABI version {file.abi_version} is neither 7 nor 8")
    kernels = tuple(
        _kernel(file, name, arch)
        for name, kind in file.symbols
        if kind == SYMBOL_FUNCTION and f".text.{name}" in file.sections
    )
    release, options = _toolkit_note(file)
    return Cubin(
        kernels,
        arch,
        accelerated,
        file.abi_version,
        file.flags,
        release or _api_release(file, kernels),
        options,
        tuple(file.sections),
    )
