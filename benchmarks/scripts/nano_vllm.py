"""Serve with nano-vllm, unmodified, on flashlane under FlashAttention-2's module names.

    python benchmarks/scripts/nano_vllm.py PATH/nano-vllm [--layers 4] [--requests 64] [--seqs 64] [--out FOLDER]
        [--modes eager,graphs,compiled]
    python benchmarks/scripts/nano_vllm.py PATH/nano-vllm --on-cpu

nano-vllm (GeeeekExplorer/nano-vllm) imports two functions of ``flash_attn``: packed prefill, over pages where a prefix
is cached, and paged decoding, captured in CUDA graphs. It serves a Qwen3 of random weights here. Every token that it
gives is then held against the logits of transformers' own Qwen3 for the same tokens; then the throughput is measured.
It does so in each of ``--modes``: eager; with decoding in CUDA graphs; and as nano-vllm does by itself, with
torch.compile of its small layers too, which takes most of that mode's time. Each line has its second, and ``--out``
writes nano_vllm.json again after each mode. It needs one CUDA device. With ``--on-cpu`` a CPU answers what nano-vllm
asks of CUDA, and a tiny model is served: prefill, a cached prefix and paged decoding are checked, without graphs, and
nothing is measured.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flashlane.bench.measure.environment import environment
from flashlane.integrations import flash_attn

MODES = ("eager", "graphs", "compiled")
VOCABULARY = 4096
STARTED = time.perf_counter()
WORST = 0.5
"""How far below the best logit (their standard deviation is about 3) a token may be that two bf16 models both take."""


def make_model(folder: Path, layers: int, hidden: int = 1024, heads: int = 16) -> Any:
    """A Qwen3 of random weights in bf16 and a tokenizer of its vocabulary, written to a folder; returns the model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=hidden // heads, tie_word_embeddings=False,
        max_position_embeddings=4096, attn_implementation="sdpa", eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=3 / hidden**0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", unk_token="t1").save_pretrained(folder)
    # As it is read back: a model that is cast whole has the frequencies of its rotary embedding in bf16 too.
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


@torch.no_grad()
def regrets(model: Any, prompt: list[int], given: list[int]) -> torch.Tensor:
    """How far each token given after a prompt is below the best logit of a model that reads the same tokens."""
    tokens = torch.tensor([[*prompt, *given]], device=model.device)
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.amax(-1) - logits.gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1)


def prompts_of(count: int, longest: int, shared: int) -> list[list[int]]:
    """Random token ids; every second prompt begins with the same tokens, so that a prefix is cached."""
    draw = random.Random(0)
    prefix = [draw.randrange(2, VOCABULARY) for _ in range(shared)]
    rest = [[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    return [prefix + tokens if number % 2 else tokens for number, tokens in enumerate(rest)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a checkout of nano-vllm")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--requests", type=int, default=64, help="whose throughput is measured")
    parser.add_argument("--seqs", type=int, default=64, help="served at a time; a CUDA graph is captured for each 16")
    parser.add_argument("--on-cpu", action="store_true", help="a tiny model on a CPU, to see that its tokens are right")
    parser.add_argument("--modes", default=",".join(MODES), help="one after another; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of nano_vllm.json")
    options = parser.parse_args(arguments)
    if not (options.repository / "nanovllm").is_dir():
        parser.error(f"repository is {options.repository}, which has no folder nanovllm; download nano-vllm")
    if not options.on_cpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; nano-vllm serves on CUDA only (--on-cpu checks its tokens without)")
    modes = tuple(options.modes.split(","))
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes has {', '.join(sorted(unknown))}; it may hold {', '.join(MODES)}")
    flash_attn.install("flash_attn", replace=True)
    torch.compiler.set_stance("force_eager")
    said("a model of random weights is made")
    sys.path.insert(0, str(options.repository))
    if options.on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: nano-vllm has a kernel of its own
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), layers=2, hidden=64, heads=4)
            answer_for_cuda()  # not sooner: transformers would not build the model as it should
            return check_on_cpu(folder, model)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), options.layers)
        said("the model is written")
        rows: list[dict[str, Any]] = []
        for mode in modes:
            rows.append(serve(folder, model, options.requests, options.seqs, mode))
            if options.out:
                write(options.out, options.layers, rows)
        return int(not all(row["ok"] for row in rows))


def write(folder: Path, layers: int, rows: list[dict[str, Any]]) -> None:
    """Write nano_vllm.json: what was served, where, and the results of each mode so far."""
    body = {
        "format": "flashlane-nano-vllm/1",
        "environment": environment(torch.device("cuda", torch.cuda.current_device())),
        "settings": {"layers": layers, "dtype": "bfloat16", "vocabulary": VOCABULARY, "largest_regret": WORST},
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nano_vllm.json").write_text(json.dumps(body, indent=1) + "\n")


def said(what: str) -> None:
    """Say how far it is, and when."""
    print(f"[{time.perf_counter() - STARTED:5.1f} s] {what}", flush=True)


def answer_for_cuda() -> None:
    """Have this process answer on the CPU what nano-vllm's model runner asks of CUDA; nothing is put back."""
    init, tensor, default = torch.distributed.init_process_group, torch.tensor, torch.set_default_device
    torch.distributed.init_process_group = lambda backend, *args, **named: init("gloo", *args, **named)
    torch.tensor = lambda *args, pin_memory=False, **named: tensor(*args, **named)
    torch.set_default_device = lambda device: default("cpu")
    torch.Tensor.cuda = lambda self, *args, **named: self
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda *args: None)
    torch.cuda.mem_get_info = lambda *args: (1 << 28, 1 << 29)
    torch.cuda.memory_stats = lambda *args: dict.fromkeys(
        ("allocated_bytes.all.peak", "allocated_bytes.all.current"), 0
    )


def check_on_cpu(folder: str, model: Any) -> int:
    """Hold the tokens of a few requests, two of which share cached pages, against the model; the exit status."""
    from nanovllm import LLM, SamplingParams

    sizes = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 8, "gpu_memory_utilization": 0.6}
    served = LLM(folder, enforce_eager=True, **sizes)
    said("ready to serve")
    prompts = [tokens[:300] for tokens in prompts_of(6, 40, 270)]  # a page has 256 rows
    greedy = SamplingParams(temperature=1e-3, ignore_eos=True, max_tokens=6)
    served.generate(prompts[1:2], greedy, use_tqdm=False)  # leaves the shared prefix in the cache
    answers = [answer["token_ids"] for answer in served.generate(prompts, greedy, use_tqdm=False)]
    worst = max(float(regrets(model, *each).max()) for each in zip(prompts, answers, strict=True))
    said(f"{sum(map(len, answers))} tokens, each at most {worst:.3f} below transformers' best logit (may be {WORST})")
    return int(worst > WORST)


def serve(folder: str, model: Any, requests: int, seqs: int, mode: str) -> dict[str, Any]:
    """Check and measure nano-vllm in one of its modes with the model of a folder.

    Returns:
        Of the greedy tokens: their count, how many had the best logit, the largest distance below it, and whether it is
        small enough (``ok``); of the sampled ones: requests, tokens, seconds and tokens a second.
    """
    from nanovllm import LLM, SamplingParams

    torch.compiler.set_stance("default" if mode == "compiled" else "force_eager")
    served = LLM(
        folder, enforce_eager=mode == "eager", max_model_len=2048, max_num_seqs=seqs, gpu_memory_utilization=0.5
    )
    said(f"{mode}: ready to serve")
    prompts = prompts_of(16, 400, 600)
    greedy = SamplingParams(temperature=1e-3, ignore_eos=True, max_tokens=32)
    served.generate(prompts[1:2], greedy, use_tqdm=False)  # leaves the shared prefix in the cache
    answers = [answer["token_ids"] for answer in served.generate(prompts, greedy, use_tqdm=False)]
    model = model.cuda()
    regret = torch.cat([regrets(model, *each) for each in zip(prompts, answers, strict=True)])
    worst, best = float(regret.max()), int((regret == 0).sum())
    said(
        f"{mode}: {len(regret)} tokens, {best} with transformers' best logit and the others at most {worst:.3f} below "
        f"it (may be {WORST})"
    )
    model.cpu()
    prompts, asked = prompts_of(requests, 1000, 0), SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=256)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    answers = [answer["token_ids"] for answer in served.generate(prompts, asked, use_tqdm=False)]
    seconds = time.perf_counter() - begin
    count = sum(map(len, answers))
    said(f"{mode}: {requests} requests, {count} tokens in {seconds:.2f} s, {count / seconds:.0f} a second")
    atexit.unregister(served.exit)
    served.exit()
    del served
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "mode": mode, "ok": worst <= WORST, "tokens": len(regret), "best": best, "largest_regret": round(worst, 4),
        "requests": requests, "timed_tokens": count, "seconds": round(seconds, 3),
        "tokens_per_second": round(count / seconds),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
