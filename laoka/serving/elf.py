"""What a native library says of itself without being loaded: the glibc that it needs, the constant that a function returns."""

from __future__ import annotations

import re
from typing import IO

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

MAX_CODE_BYTES = 64


class NotElf(ValueError):
    """The file is no library for Linux on x86-64, or is damaged."""


def _open(stream: IO[bytes]) -> ELFFile:
    try:
        found = ELFFile(stream)
        machine = found.get_machine_arch()
    except (ELFError, ValueError, OverflowError, UnicodeDecodeError) as error:
        raise NotElf(f"not an ELF file: {str(error)[:80] or type(error).__name__}") from None
    if machine != "x64":
        raise NotElf(f"made for {machine}, not for x86-64")
    return found


def glibc_needed(stream: IO[bytes]) -> tuple[int, int] | None:
    """The newest glibc version that a library asks for, (2, 38); None when it asks for none. Errors: NotElf."""
    found: list[tuple[int, int]] = []
    try:
        for section in _open(stream).iter_sections():
            if not isinstance(section, GNUVerNeedSection):
                continue
            for _, needed in section.iter_versions():
                for item in needed:
                    match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", str(item.name))
                    if match:
                        found.append((int(match[1]), int(match[2])))
    except (ELFError, ValueError, OverflowError, UnicodeDecodeError) as error:
        raise NotElf(f"damaged: {str(error)[:80] or type(error).__name__}") from None
    return max(found, default=None)


def constant_of(stream: IO[bytes], symbol: str) -> int | None:
    """The constant that an exported function returns, read from its machine code; None when there is no such function.

    Only the plain form is understood that compilers make of `return 16;`: an optional endbr64, `mov eax, imm32` (or
    `xor eax, eax`), `ret`. Errors: NotElf; ValueError for a function of another form.
    """
    elf = _open(stream)
    try:
        table = elf.get_section_by_name(".dynsym")
        named = table.get_symbol_by_name(symbol) if isinstance(table, SymbolTableSection) else None
        if not named or named[0]["st_shndx"] == "SHN_UNDEF":
            return None
        start, size = int(named[0]["st_value"]), min(int(named[0]["st_size"]), MAX_CODE_BYTES)
        offset = next(iter(elf.address_offsets(start, 1)), None)
        if offset is None:
            raise NotElf(f"{symbol} lies outside the file")
        stream.seek(offset)
        code = stream.read(size)
    except (ELFError, ValueError, OverflowError, UnicodeDecodeError) as error:
        raise NotElf(f"damaged: {str(error)[:80] or type(error).__name__}") from None
    found = re.match(rb"(?:\xf3\x0f\x1e\xfa)?(?:\xb8(....)|(?:\x31|\x33)\xc0)\xc3", code, re.DOTALL)
    if not found:
        raise ValueError(f"{symbol} is not a plain constant: {code.hex()}")
    return int.from_bytes(found[1], "little", signed=True) if found[1] else 0
