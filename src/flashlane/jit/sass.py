"""What the machine runs: a cubin disassembled, and its instructions counted.

The disassembler is NVIDIA's: Triton's wheel carries it, and so does a CUDA toolkit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

_TOOLS = {"nvdisasm": ("-c", "-ndf"), "cuobjdump": ("-sass",)}
_ENCODINGS = {"nvdisasm": ("-hex",), "cuobjdump": ()}
_TIMEOUT_SECONDS = 120
# `/*0a10*/  @!P0 HMMA.16816.F32 R4, …`: an address, perhaps a predicate, an opcode with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def disassemble(cubin: bytes, encodings: bool = False) -> str | None:
    """The SASS of a cubin as text; None when there is no disassembler that knows it.

    Args:
        cubin: the compiled code.
        encodings: also the 16 bytes of each instruction, as comments of 8 bytes on its line and on the next.
    """
    with tempfile.TemporaryDirectory(prefix="flashlane-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        for tool in disassemblers():
            try:
                command = [tool, *_TOOLS[Path(tool).stem], *_ENCODINGS[Path(tool).stem] * encodings, str(path)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0 and _INSTRUCTION.search(done.stdout):
                return done.stdout
    return None


def instruction_counts(cubin: bytes) -> dict[str, int] | None:
    """How often each opcode stands in a cubin, most frequent first; None when there is no disassembler.

    Modifiers are dropped (``HMMA.16816.F32`` counts as ``HMMA``), except for ``MUFU``, whose modifier says which
    function it is (``MUFU.EX2``).
    """
    text = disassemble(cubin)
    return None if text is None else count_instructions(text)


def count_instructions(text: str) -> dict[str, int]:
    """Opcode counts of disassembled code."""
    return dict(Counter(_family(found[1]) for found in _INSTRUCTION.finditer(text)).most_common())


def _family(opcode: str) -> str:
    name, *modifiers = opcode.split(".")
    return f"{name}.{modifiers[0]}" if name == "MUFU" and modifiers else name


@functools.cache
def disassemblers() -> tuple[str, ...]:
    """Paths of the disassemblers found: in Triton's wheel, on PATH, in CUDA_HOME or CUDA_PATH."""
    folders = []
    spec = importlib.util.find_spec("triton")
    for root in spec.submodule_search_locations or () if spec else ():
        folders.append(Path(root, "backends", "nvidia", "bin"))
    path = os.environ.get("PATH", "")
    toolkits = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    where = os.pathsep.join([*map(str, folders), path, *map(str, toolkits), "/usr/local/cuda/bin"])
    found = (shutil.which(tool, path=where) for tool in _TOOLS)
    return tuple(tool for tool in found if tool)
