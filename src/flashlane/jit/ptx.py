"""A kernel's PTX as CUDA C++ that NVRTC has only to assemble, which takes half of the time of compiling its source.

NVRTC takes no PTX. But the body of a kernel may be one statement of inline assembly, and then the front end and the
optimiser have nothing to do. Around that statement are the parameters, launch bounds, cluster dimensions and dynamic
shared memory that the PTX declares. ptxas makes the same machine code of it: :func:`same_machine_code` tells.
"""

from __future__ import annotations

import re

from flashlane.jit.report import elf_sections

_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(\n(.*?)^\)\n(.*?)^\{\n(.*)^\}\s*\Z", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"\s*\.param \.align (\d+) \.b8 (\w+)\[(\d+)\]")
_GLOBAL = re.compile(r"\.(?:visible )?\.?global .*?\.\w+ (\w+)(?:\[\d*\])?(?: = .*)?;")
_SHARED = re.compile(r"(?:\.extern )?\.shared \.align (\d+) \.b8 (\w+)\[(\d*)\];")
_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_FURTHER = re.compile(r"^.*\.(?:entry|func|callprototype)\b.*$", re.MULTILINE)
_HEADS = (".version ", ".target ", ".address_size ")

_TEXT = """\
{parameter_types}{shared}
extern "C" __global__ void {attributes}{entry}({parameters}) {{
  asm volatile(R"PTX({{
{body}
}})PTX" ::{operands});
}}
"""


def kernel_from_ptx(ptx: str, entry: str) -> str:
    """CUDA C++ of a kernel whose body is the PTX that NVRTC made of the kernel.

    Args:
        ptx: a module with one entry, compiled without line numbers.
        entry: the kernel's name.

    Raises:
        ValueError: the module has something that this does not translate, such as a function or a table in constant
            memory; the message says what.
    """
    found = _ENTRY.search(ptx)
    if found is None or found[1] != entry:
        raise ValueError(f"the PTX has no entry {entry}")
    if further := _FURTHER.search(found[4]):
        raise ValueError(f"the PTX of {entry} has more than the entry: {further[0]}")
    body = "\n".join(filter(None, (_COMMENT.sub("", line).strip() for line in found[4].splitlines())))
    parameters = [_parameter(line, entry, index) for index, line in enumerate(found[2].splitlines())]
    external, own = _shared_memory(ptx[: found.start()], entry, set(_WORD.findall(body)))
    # A name in an operand keeps its declaration, which the optimiser would drop: it does not read assembly.
    operands = [f' "l"((unsigned long long){name})' for _, name in external]
    return _TEXT.format(
        parameter_types="\n".join(
            f"struct __align__({align}) Parameter{index} {{ unsigned char bytes[{size}]; }};"
            for index, (align, size) in enumerate(parameters)
        ),
        shared="".join(f"\nextern __shared__ __align__({align}) unsigned char {name}[];" for align, name in external),
        attributes=_attributes(found[3], entry),
        entry=entry,
        parameters=", ".join(f"const __grid_constant__ Parameter{i} parameter{i}" for i in range(len(parameters))),
        body="\n".join([*own, body]).replace("%", "%%").replace("$", "_"),
        operands=",".join(operands or [' "r"(0)']),  # without one, %% would be two signs
    )


def _parameter(line: str, entry: str, index: int) -> tuple[int, int]:
    """Alignment and bytes of a parameter that is a struct."""
    found = _PARAMETER.fullmatch(line.rstrip(","))
    if found is None or found[2] != f"{entry}_param_{index}":
        raise ValueError(f"the PTX of {entry} has a parameter that is no struct: {line.strip()}")
    return int(found[1]), int(found[3])


def _shared_memory(head: str, entry: str, used: set[str]) -> tuple[list[tuple[int, str]], list[str]]:
    """Alignment and name of dynamic shared memory, and the declarations of static shared memory."""
    external, own = [], []
    for line in filter(None, (_COMMENT.sub("", line).strip() for line in head.splitlines())):
        if line.startswith(_HEADS):
            continue
        if (found := _SHARED.fullmatch(line)) is not None:
            if found[3]:
                own.append(line)
            else:
                external.append((int(found[1]), found[2]))
        elif (found := _GLOBAL.fullmatch(line)) is None or found[1] in used:
            raise ValueError(f"the PTX of {entry} has a declaration that cannot stand in a function: {line}")
    return external, own


def _attributes(directives: str, entry: str) -> str:
    """Launch bounds and cluster dimensions in C++."""
    values: dict[str, str] = {}
    for line in directives.split("\n"):
        name, _, value = line.strip().partition(" ")
        values[name] = value
    values.pop("", None)
    threads, least = values.pop(".maxntid", None), values.pop(".minnctapersm", None)
    cluster, registers = values.pop(".reqnctapercluster", None), values.pop(".maxnreg", None)
    explicit = values.pop(".explicitcluster", None) is not None
    flat = threads is None or threads.endswith(", 1, 1")
    if values or not flat or explicit != (cluster is not None) or (least and threads is None):
        raise ValueError(f"the PTX of {entry} has directives that have no form in C++: {directives.split()}")
    words = []
    if threads is not None:
        words.append(f"__launch_bounds__({', '.join(filter(None, (threads.split(',')[0], least)))}) ")
    if cluster is not None:
        words.append(f"__cluster_dims__({cluster}) ")
    if registers is not None:
        words.append(f"__maxnreg__({registers}) ")
    return "".join(words)


def same_machine_code(one: bytes, other: bytes) -> bool:
    """Whether two cubins have the same instructions and the same resources of each kernel; line numbers may differ."""
    return _code(one) == _code(other)


def _code(cubin: bytes) -> dict[str, tuple[int, int, bytes]]:
    """Registers, flags (barriers among them) and instructions of each code section, by its name.

    Source: the ELF-64 format, and the fields of it that cubins use for registers and barriers.
    """
    return {
        each.name: (each.info >> 24, each.flags, cubin[each.offset : each.offset + each.size])
        for each in elf_sections(cubin)
        if each.name.startswith(".text.")
    }
