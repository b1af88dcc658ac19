"""Saved q, k, v: the safetensors file that ``flashlane capture`` writes and ``flashlane bench --qkv`` reads.

A file holds one attention call or many. One call is three tensors ``q``, ``k``, ``v``; each of many is
``NAME.q``, ``NAME.k``, ``NAME.v``. Tensors are (batch, seqlen, heads, head_dim), or (batch, heads, seqlen,
head_dim) when the file's metadata says ``layout="bhsd"``. What tensors cannot say is in the metadata, all of it
optional, so that ``safetensors.torch.save_file({"q": q, "k": k, "v": v}, path)`` is a valid file:

========== ====================================================================================================
``layout`` ``"bshd"`` (default) or ``"bhsd"``
``causal`` ``"true"`` or ``"false"`` (default), for every call whose entry in ``calls`` has no ``causal``
``scale``  softmax scale as a number, for every call whose entry has no ``scale``; default head_dim^-0.5
``calls``  JSON object: name -> {"causal": bool, "scale": number, "window": [left, right]}, each optional
========== ====================================================================================================
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlane.core.files import NotWritten, parse_json
from flashlane.core.problem import AttentionProblem, Inputs

SINGLE = "qkv"
"""Name of the only call of a file whose tensors are plain ``q``, ``k``, ``v``."""
LAYOUTS = ("bshd", "bhsd")
CALL_KEYS = ("causal", "scale", "window")


@dataclass(frozen=True)
class Captured:
    """The tensors of one recorded attention call and what is known about it.

    ``q`` (b, sq, h, d), ``k`` (b, sk, hk, d), ``v`` (b, sk, hk, dv), one dtype, on the CPU when loaded.
    """

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    scale: float | None = None
    """Softmax scale; None is head_dim^-0.5."""
    window: tuple[int, int] = (-1, -1)
    """Keys visible to the left and right, −1 unbounded, as in ``flash_attn_func``'s ``window_size``."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The file's own metadata: model, text digest, versions."""

    def problem(self) -> AttentionProblem:
        """The problem of this call; raises as :meth:`AttentionProblem.from_inputs` when the tensors do not fit."""
        return AttentionProblem.from_inputs(
            Inputs(self.q, self.k, self.v), scale=self.scale, causal=self.causal, window_size=self.window
        )


def save_qkv(path: str | Path, calls: Sequence[Captured], metadata: Mapping[str, str] | None = None) -> None:
    """Write calls to a safetensors file, replacing it atomically: a reader sees the old file or the whole new one.

    Raises:
        NotWritten: the file cannot be written.
        ValueError: there are no calls, two have one name, or the tensors of one do not fit each other.
        ImportError: safetensors is not installed.
    """
    save = _safetensors("safetensors.torch").save_file
    names = [call.name for call in calls]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"calls are named {names}; there must be at least one, and each name once")
    tensors, described = {}, {}
    for call in calls:
        call.problem()
        prefix = "" if call.name == SINGLE else f"{call.name}."
        # clone: safetensors refuses tensors that share memory, as slices of one packed projection do
        tensors |= {prefix + side: getattr(call, side).detach().cpu().contiguous().clone() for side in "qkv"}
        described[call.name] = {"causal": call.causal, "scale": call.scale, "window": list(call.window)}
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save(tensors, temporary, metadata={**(metadata or {}), "layout": "bshd", "calls": json.dumps(described)})
        os.chmod(temporary, 0o644)  # others may read it, as every other result
        os.replace(temporary, path)
    except Exception as error:  # safetensors raises an error class of its own
        raise NotWritten(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_qkv(path: str | Path) -> list[Captured]:
    """Read and check every attention call of a file; its tensors are copied to the CPU as (b, s, h, d).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a whole safetensors file, lacks a tensor, or the tensors or metadata do not fit; the
            message names the file, the tensor and what was expected.
        TypeError: a tensor's dtype is not one that attention takes, or q, k and v differ in it.
        ImportError: safetensors is not installed.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; --qkv must be a .safetensors file with tensors q, k and v")
    tensors, metadata = _read(path)
    layout = metadata.get("layout", LAYOUTS[0])
    if layout not in LAYOUTS:
        raise ValueError(f"{path}: metadata layout is {layout!r}; it may be {' or '.join(map(repr, LAYOUTS))}")
    described = _described_calls(path, metadata)
    calls = []
    for name, sides in _triples(path, tensors).items():
        facts = described.get(name, {})
        call = Captured(
            name, *_canonical(path, name, sides, layout), **_facts(path, facts, metadata), metadata=metadata
        )
        try:
            call.problem()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: call {name!r} (layout {layout}): {error}") from error
        calls.append(call)
    return calls


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    safetensors = _safetensors("safetensors")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({path.stat().st_size} bytes): {error}") from error


def _safetensors(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError('saved tensors need safetensors: pip install "flashlane[hf]"') from error


def _triples(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors grouped by call, in layer order: numbers inside names count as numbers."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for full, tensor in tensors.items():
        prefix, _, side = full.rpartition(".")
        if side in ("q", "k", "v"):
            groups.setdefault(prefix or SINGLE, {})[side] = tensor
    if not groups:
        found = ", ".join(sorted(tensors)[:8]) or "none"
        raise ValueError(f"{path} has no tensors q, k, v (or NAME.q, NAME.k, NAME.v); its tensors: {found}")
    for name, sides in groups.items():
        prefix = "" if name == SINGLE and SINGLE + ".q" not in tensors else f"{name}."
        missing = [prefix + side for side in "qkv" if side not in sides]
        if missing:
            has = ", ".join(prefix + side for side in "qkv" if side in sides)
            raise ValueError(f"{path} has {has} but no tensor {' or '.join(missing)}; a call needs q, k and v")
    return dict(sorted(groups.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _canonical(path: Path, name: str, sides: Mapping[str, torch.Tensor], layout: str) -> list[torch.Tensor]:
    out = []
    for side in "qkv":
        tensor = sides[side]
        if tensor.dim() != 4:
            axes = "(batch, seqlen, heads, head_dim)" if layout == "bshd" else "(batch, heads, seqlen, head_dim)"
            raise ValueError(
                f"{path}: {side} of call {name!r} has shape {tuple(tensor.shape)}, rank {tensor.dim()}; "
                f"it must have rank 4: {axes}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{path}: {side} of call {name!r} has {bad} values that are not finite")
        tensor = tensor.transpose(1, 2) if layout == "bhsd" else tensor
        # a copy: a tensor mapped from the file starts at any multiple of 8 bytes, and kernels load 16 at once
        out.append(tensor.clone(memory_format=torch.contiguous_format))
    return out


def _described_calls(path: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    text = metadata.get("calls", "{}")
    try:
        described = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: metadata calls is not valid JSON: {error}") from None
    if not isinstance(described, dict) or not all(isinstance(facts, dict) for facts in described.values()):
        raise ValueError(f"{path}: metadata calls is {text[:80]!r}; it must be a JSON object of objects")
    for name, facts in described.items():
        unknown = sorted(set(facts) - set(CALL_KEYS))
        if unknown:
            raise ValueError(f"{path}: metadata calls[{name!r}] has {unknown}; it may have {', '.join(CALL_KEYS)}")
    return described


def _facts(path: Path, facts: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """causal, scale and window of one call: from its own description, else from the file's, else the defaults."""
    causal = facts.get("causal", {"true": True, "false": False}.get(metadata.get("causal", "false").lower()))
    if not isinstance(causal, bool):
        raise ValueError(f"{path}: metadata causal is {metadata.get('causal', causal)!r}; it may be 'true' or 'false'")
    scale = facts.get("scale", metadata.get("scale"))
    try:
        scale = None if scale is None else float(scale)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: metadata scale is {scale!r}; it must be a number") from None
    window = facts.get("window", (-1, -1))
    if not isinstance(window, list | tuple) or [type(side) for side in window] != [int, int]:
        raise ValueError(f"{path}: metadata window is {window!r}; it must be two whole numbers [left, right]")
    return {"causal": causal, "scale": scale, "window": tuple(window)}
