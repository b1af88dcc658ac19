"""transformers' own FlashAttention implementations over flashlane's module names, against its eager attention in f32.

They are asked for in another process, since transformers looks for FlashAttention once, and on a CPU what asks for a
GPU is told that there is one: the functions that it then calls are the same.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
SCRIPT = """
import copy, functools, importlib, json, sys
from flashlane.integrations import flash_attn
flash_attn.install()

import torch, transformers
import transformers.utils.import_utils as found

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    found.is_torch_cuda_available = lambda: True
calls = []
def counted(function, module):
    @functools.wraps(function)
    def call(*args, **keywords):
        calls.append(module)
        return function(*args, **keywords)
    return call
MODULES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface",
           "flash_attention_4": "flash_attn.cute"}
for asked, path in MODULES.items():
    module = importlib.import_module(path)
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        if hasattr(module, name):
            setattr(module, name, counted(getattr(module, name), asked))

torch.manual_seed(0)
FAMILY, NAMES, YARDSTICK = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
             vocab_size=97, sliding_window=6, initializer_range=0.15)
if FAMILY == "GptOss":
    sizes |= {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2}
config = getattr(transformers, FAMILY + "Config")(**sizes)
model = getattr(transformers, FAMILY + "ForCausalLM")(config).to(DEVICE, torch.bfloat16)
if DEVICE == "cpu":
    type(model)._flash_attn_can_dispatch = lambda self, **asked: True
ids = torch.randint(1, 97, (2, 12), device=DEVICE)
padding = torch.ones_like(ids)
padding[0, :5] = 0
labels = ids.clone()
labels[0, :6] = -100  # what is said of and by padding
positions = torch.tensor([[*range(4), *range(8)]], device=DEVICE)

def of(model, apart=False):
    model.zero_grad()
    model(ids, attention_mask=padding, labels=labels).loss.backward()
    layer = model.model.layers[0].self_attn
    found = {"gradient": layer.q_proj.weight.grad.clone()}
    if FAMILY == "GptOss":
        found["gradient of sinks"] = layer.sinks.grad.clone()
    with torch.no_grad():
        found["plain"] = model(ids).logits
        found["padded"] = model(ids, attention_mask=padding).logits[padding.bool()]
        if apart:
            found["packed"] = torch.cat([model(ids[:1, :4]).logits, model(ids[:1, 4:]).logits], 1)
        else:
            found["packed"] = model(ids[:1], position_ids=positions, use_cache=False).logits
    return found

def errors(got):
    return {key: float((got[key].float() - want[key]).norm() / want[key].norm()) for key in want}

def regret(tokens):
    '''How far a token is at most below the best logit that the oracle finds, in standard deviations of the logits.'''
    seen = torch.cat([padding, torch.ones_like(tokens[:, ids.shape[1]:])], 1)
    with torch.no_grad():
        logits = oracle(tokens, attention_mask=seen).logits[:, ids.shape[1] - 1 : -1]
    below = logits.amax(-1) - logits.gather(-1, tokens[:, ids.shape[1]:, None]).squeeze(-1)
    return float((below / logits.std()).max())

oracle = copy.deepcopy(model).float()
oracle.set_attn_implementation("eager")
def windows(size):
    oracle.config.sliding_window = size
    for layer in oracle.model.layers:
        if getattr(layer.self_attn, "sliding_window", None):
            layer.self_attn.sliding_window = size

want = of(oracle, apart=True)
model.set_attn_implementation(YARDSTICK)
said = {"yardstick": errors(of(model, apart=True))}
windows(5)
said["another window"] = errors(of(oracle, apart=True))
windows(6)
for name in NAMES:
    calls.clear()
    model.set_attn_implementation(name)
    found = errors(of(model))
    greedy = {"attention_mask": padding, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        tokens = [model.generate(ids, cache_implementation=kind, **greedy) for kind in ("dynamic", "static")]
    said[name] = {"calls": {module: calls.count(module) for module in set(calls)}, "errors": found}
    said[name] |= {"regret": max(map(regret, tokens)), "worst": regret(tokens[0].roll(1, -1))}
print(json.dumps(said))
"""
BATCH = """
import json, sys
from flashlane.integrations import flash_attn, torch_flex
flash_attn.install()
torch_flex.enable()

import torch, transformers
import transformers.utils.import_utils as found
from transformers.generation.continuous_batching import cache
from flashlane.core import registry
from flashlane.flex import attention

found.is_torch_cuda_available = lambda: True
cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), 4 << 30, 0, 0)  # it asks psutil
ran = []
reference = registry.get("reference")
def noted(*args, _forward=reference.forward, **keywords):
    ran.append("names")
    return _forward(*args, **keywords)
reference.forward = noted
def attended(*args, _attend=attention.attend):
    ran.append("flex")
    return _attend(*args)
attention.attend = attended

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    vocab_size=97, bos_token_id=1, eos_token_id=96, pad_token_id=0,
)
model = transformers.LlamaForCausalLM(config).eval()
type(model)._flash_attn_can_dispatch = lambda self, **asked: True
ids = torch.randint(2, 96, (2, 12))
greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 96, "pad_token_id": 0}
prompts = [ids[0], ids[1, :7], ids[1]]
want = [model.generate(prompt[None], **greedy)[0, len(prompt):].tolist() for prompt in prompts]
plain = model(ids, labels=ids)
model.set_attn_implementation("flex_attention")
flex = model(ids, labels=ids)
flex.loss.backward()
calls = {"flex": ran.count("flex"), "error": float((flex.logits - plain.logits).abs().max())}
calls["gradient"] = float(model.model.layers[0].self_attn.q_proj.weight.grad.norm())
config = transformers.GenerationConfig(**greedy)
calls |= {"batches": [], "want": want, "names": []}
for name in ("flash_attention_2", "flash_attention_3"):
    ran.clear()
    model.set_attn_implementation(name)
    found = model.generate_batch([prompt.tolist() for prompt in prompts], generation_config=config, progress_bar=False)
    calls["batches"].append([each.generated_tokens for each in found.values()])
    calls["names"].append(ran.count("names"))
print(json.dumps(calls))
"""


def test_continuous_batching_and_flex_attention() -> None:
    done = subprocess.run([sys.executable, "-c", BATCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["flex"] == 2 and said["error"] < 1e-5 and said["gradient"] > 0, said
    assert said["batches"] == [said["want"]] * 2 and min(said["names"]) >= 10, said


FAMILIES = {
    "Mistral": ("flash_attention_2,flash_attention_3,flash_attention_4", "sdpa"),
    "GptOss": ("flash_attention_4", "eager"),  # transformers takes a kernel of the Hub for the other two names
}
"""The names that a family of models accepts, and which attention in bf16 says what error is usual."""
OF_SINKS = 0.1
"""The relative error that the gradient of four sinks may have in bf16; without one it is 1."""


def check(family: str) -> None:
    names, yardstick = FAMILIES[family]
    command = [sys.executable, "-c", SCRIPT, family, names, yardstick]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    usual, another = said.pop("yardstick"), said.pop("another window")
    assert set(said) == set(names.split(","))
    for what, error in usual.items():  # the comparison sees a window that is wrong by one
        assert another[what] > 4 * error, (what, another, usual)
    for name, outcome in said.items():
        # Two layers of: a training step, three forwards, and with each cache a prefill and four steps after it.
        assert outcome["calls"] == {name: 28}, (name, outcome)
        for what, error in outcome["errors"].items():
            limit = OF_SINKS if what == "gradient of sinks" else 1.5 * usual[what] + 1e-3
            assert error < limit, (name, what, outcome, usual)
        # Two bf16 models may take another of two tokens that are nearly as good; other tokens are far from the best.
        assert outcome["regret"] < 0.1 < 1 < outcome["worst"], (name, outcome)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_gives_what_others_give(family: str) -> None:
    check(family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_gives_what_others_give_on_a_gpu(family: str) -> None:
    check(family)
