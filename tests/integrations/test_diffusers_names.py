"""diffusers' own FlashAttention backends over flashlane's module names, against its native backend.

They are asked for in another process, since diffusers looks for FlashAttention once, when it is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
SCRIPT = """
import functools, importlib, json
from flashlane.integrations import flash_attn
flash_attn.install()

import torch

calls = []
def counted(function, name):
    @functools.wraps(function)
    def call(*args, **keywords):
        calls.append(name)
        return function(*args, **keywords)
    return call
for path in ("flash_attn", "flash_attn_interface"):
    module = importlib.import_module(path)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        setattr(module, name, counted(getattr(module, name), f"{path}.{name}"))

import test_diffusers as models
from diffusers.models import attention_dispatch

if not torch.cuda.is_available():  # the library wraps this function in an operator for CUDA alone
    operator = attention_dispatch._wrapped_flash_attn_3
    operator.register_kernel("cpu")(operator._init_fn)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

def step(model, given, trains):
    if not trains:
        with torch.no_grad():
            return [model(**given, return_dict=False)[0]]
    out = model(**given, return_dict=False)[0]
    gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, model.parameters())]
    return [out.detach(), torch.cat([g.flatten() for g in flat])]

found = {}
for make in (models.wan, models.flux):
    torch.manual_seed(0)
    model, given = make()
    model = model.eval().to(DEVICE, DTYPE)
    given = {name: t.to(DEVICE, DTYPE if t.is_floating_point() else t.dtype) for name, t in given.items()}
    for name in ("flash", "flash_varlen", "_flash_3", "_flash_varlen_3"):
        trains = name != "_flash_3"  # the library's operator around it has no backward
        model.set_attention_backend("native")
        want = step(model, given, trains)
        calls.clear()
        model.set_attention_backend(name)
        got = step(model, given, trains)
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, want)]
        said = {"error": max(errors), "compared": len(errors)}
        found[f"{make.__name__} {name}"] = said | {"calls": {each: calls.count(each) for each in set(calls)}}
print(json.dumps({"device": DEVICE, "found": found}))
"""
FUNCTIONS = {
    "flash": "flash_attn.flash_attn_func",
    "flash_varlen": "flash_attn.flash_attn_varlen_func",
    "_flash_3": "flash_attn_interface.flash_attn_func",
    "_flash_varlen_3": "flash_attn_interface.flash_attn_varlen_func",
}


def check() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    limit = 1e-4 if said["device"] == "cpu" else 5e-2
    for make, attentions in (("wan", 4), ("flux", 2)):
        for name, function in FUNCTIONS.items():
            outcome = said["found"].pop(f"{make} {name}")
            assert outcome["calls"] == {function: attentions}, (make, name, outcome)
            assert outcome["error"] < limit, (make, name, outcome)
            assert outcome["compared"] == (1 if name == "_flash_3" else 2), (make, name, outcome)
    assert not said["found"]


def test_every_name_gives_what_native_gives() -> None:
    check()


@pytest.mark.gpu
def test_every_name_gives_what_native_gives_on_a_gpu() -> None:
    check()
