"""The sections of an ELF file, as the compile report and the comparison of machine code read them."""

from __future__ import annotations

import struct

import pytest

from flashlane.jit import ptx
from flashlane.jit.report import ElfSection, elf_sections


def elf(*sections: tuple[str, int, int, bytes], line: bytes = b"") -> bytes:
    """A file with sections of those names, flags, infos and contents, a further one, and the table of names."""
    listed = [*sections, (".debug_line", 0, 0, line), (".shstrtab", 0, 0, b"")]
    names = b"\0".join(name.encode() for name, *_ in listed) + b"\0"
    listed[-1] = (".shstrtab", 0, 0, names)
    body, headers = bytearray(64), []
    for name, flags, info, content in listed:
        at = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, flags, 0, len(body), len(content), 0, info, 1, 0))
        body += content
    body[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<3H", body, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(body) + b"".join(headers)


def test_sections_have_what_their_headers_say() -> None:
    made = elf((".text.f", 0x300006, 40 << 24 | 7, b"code"), (".nv.constant0.f", 2, 0, bytes(12)))
    code, constant, _, names = elf_sections(made)
    assert code == ElfSection(".text.f", 0x300006, 64, 4, 40 << 24 | 7) and made[64:68] == b"code"
    assert constant == ElfSection(".nv.constant0.f", 2, 68, 12, 0) and names.name == ".shstrtab"
    with pytest.raises(ValueError, match="this is not a cubin"):
        elf_sections(b"\x7fELF\x01\x01" + made[6:])


def test_machine_code_is_the_same_but_for_lines_and_the_symbol_of_its_section() -> None:
    """Registers are in the highest byte of the info, and barriers in the flags."""
    one = elf((".text.f", 6, 40 << 24 | 7, b"code"))
    assert ptx.same_machine_code(one, elf((".text.f", 6, 40 << 24 | 9, b"code"), line=b"lines"))
    for other in ((6, 41 << 24, b"code"), (0x100006, 40 << 24, b"code"), (6, 40 << 24, b"edoc")):
        assert not ptx.same_machine_code(one, elf((".text.f", *other)))
    with pytest.raises(ValueError, match="this is not a cubin"):
        ptx.same_machine_code(one, b"")
