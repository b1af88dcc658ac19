"""What the compiler says about a kernel: NVRTC's and ptxas's log, read into numbers."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

# Text, which re compiles at its first use: a call whose kernels are in the cache reads no log.
_ENTRY = r"Compiling entry function '([^']+)'"
_SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
_REGISTERS = r"Used (\d+) registers"
_STACK = r"(\d+) bytes cumulative stack size"
_SHARED = r"(\d+) bytes smem"
# ptxas gives its C75xx notes (a serialised wgmma, an ignored setmaxnreg) as "info", but they are warnings to us.
_WARNING = r"\bwarning\b|\(C7\d{3}\)"
_ERROR = r"(?i)\berror\b|\bfatal\b|catastrophic"


@dataclass(frozen=True)
class CompileReport:
    """Resources of one compiled kernel."""

    registers: int
    """Registers of a thread, as allocated at launch."""
    spill_stores: int
    """Bytes of spill stores in the code, with those of the functions it calls."""
    spill_loads: int
    stack: int
    """Bytes of stack of a thread, cumulative over calls."""
    static_shared: int
    """Bytes of statically declared shared memory."""
    constant: int
    """Bytes of the constant banks, parameters included."""
    warnings: tuple[str, ...]
    """Warnings of the front end and of ptxas, and its C7xxx performance notes; a spill warns too."""
    log: str

    @property
    def spills(self) -> int:
        """Bytes spilled, stores and loads."""
        return self.spill_stores + self.spill_loads


def read_log(log: str, entry: str, cubin: bytes) -> CompileReport:
    """Read the report of ``entry`` out of the log of ``ptxas -v``.

    Raises:
        ValueError: the log has no section of that kernel (it was not compiled, or is not ``extern "C"``).
    """
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if (match := re.search(_ENTRY, line)) and match[1] == entry]
    if not starts:
        raise ValueError(f"the compiler's log names no entry function {entry!r}")
    section = [lines[starts[0]]]
    for line in lines[starts[0] + 1 :]:
        if re.search(_ENTRY, line):
            break
        section.append(line)
    text = "\n".join(section)
    frames = [tuple(map(int, match.groups())) for match in re.finditer(_SPILLS, text)]
    stack = _first(_STACK, text) or max((frame for frame, _, _ in frames), default=0)
    return CompileReport(
        registers=_first(_REGISTERS, text),
        spill_stores=sum(stores for _, stores, _ in frames),
        spill_loads=sum(loads for _, _, loads in frames),
        stack=stack,
        static_shared=_first(_SHARED, text),
        constant=sum(
            each.size for each in elf_sections(cubin) if re.fullmatch(rf"\.nv\.constant\d+\.{entry}", each.name)
        ),
        warnings=tuple(line.strip() for line in lines if re.search(_WARNING, line)),
        log=log,
    )


def first_errors(log: str) -> str:
    """The first three lines of a log that say ``error``, or its first three where none does."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(_ERROR, line)]
    return "\n".join((errors or lines)[:3])


class ElfSection(NamedTuple):
    """A section of a cubin."""

    name: str
    flags: int
    """Of code among other things the number of barriers."""
    offset: int
    size: int
    info: int
    """Of code among other things the registers of a thread, in the highest byte."""


def elf_sections(cubin: bytes) -> list[ElfSection]:
    """A cubin's sections (64-bit little-endian ELF).

    Raises:
        ValueError: it is no such file.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is not a cubin (a 64-bit little-endian ELF file)")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    # Elf64_Shdr: name, type, flags, address, offset, size, link, info, alignment, entry size.
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + entry_size * number) for number in range(count)]
    names, found = headers[names_index][4], []
    for name, _, flags, _, offset, size, _, info, *_ in headers:
        end = cubin.index(b"\0", names + name)
        found.append(ElfSection(cubin[names + name : end].decode(), flags, offset, size, info))
    return found


def _first(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
