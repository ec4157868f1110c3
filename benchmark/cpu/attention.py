"""Time one layer's attention on a CPU: SGLang's `torch_native` against Canopy's, same batches.

python benchmark/cpu/attention.py [--dtype float32] [--repeat 10]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from types import SimpleNamespace

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from tqdm import tqdm

from canopy_cpu.attention import NewTokensAttnBackend

HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64  # SmolLM2-135M
EXTENDS = {  # name: (cached, new) tokens of each request
    "1,000 new": [(0, 1000)],
    "60 new after 1,000 cached": [(1000, 60)],
    "60 new after 4,000 cached": [(4000, 60)],
    "8 x 20 new after 500 cached": [(500, 20)] * 8,
}
DECODES = {  # name: length of each request
    "1 x 4,000": [4000],
    "8 x 1,000": [1000] * 8,
    "8 x 50 to 4,000": [200, 400, 900, 1500, 4000, 100, 50, 700],
    "32 x 64": [64] * 32,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=10, help="the least of so many")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    rows = []
    for name, requests in tqdm(EXTENDS.items(), desc="extend", leave=False):
        lengths = [cached + new for cached, new in requests]
        batch = make_batch(lengths, sum(new for _, new in requests), dtype)
        new = torch.tensor([new for _, new in requests])
        batch |= {"extend_seq_lens": new, "extend_prefix_lens": batch["seq_lens"] - new}
        rows.append((f"extend, {name}", *measure("extend", batch | {"causal": True}, args.repeat)))
    for name, lengths in tqdm(DECODES.items(), desc="decode", leave=False):
        batch = make_batch(lengths, len(lengths), dtype)
        rows.append((f"decode, {name}", *measure("decode", batch, args.repeat)))
    print(f"{args.dtype}, {args.threads} thread(s), least of {args.repeat}, CPU ms a layer\n")
    print("| batch | torch_native | canopy | ratio |\n|---|---:|---:|---:|")
    for name, stock, ours in rows:
        print(f"| {name} | {stock:.2f} | {ours:.2f} | {stock / ours:.1f} |")


def make_batch(lengths: list[int], queries: int, dtype: torch.dtype) -> dict:
    """Requests whose cache rows are scattered over the pool, as after much eviction."""
    slots = sum(lengths)
    order = torch.randperm(slots)
    req_to_token = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    taken = 0
    for row, length in enumerate(lengths):
        req_to_token[row, :length] = order[taken : taken + length].int()
        taken += length
    query = torch.randn(queries, HEADS, HEAD_SIZE).to(dtype)
    return {
        "query": query,
        "output": torch.empty_like(query),
        "k_cache": torch.randn(slots, KV_HEADS, HEAD_SIZE).to(dtype),
        "v_cache": torch.randn(slots, KV_HEADS, HEAD_SIZE).to(dtype),
        "req_to_token": req_to_token,
        "req_pool_indices": torch.arange(len(lengths)),
        "seq_lens": torch.tensor(lengths),
        "scaling": HEAD_SIZE**-0.5,
        "enable_gqa": True,
    }


def measure(phase: str, batch: dict, repeat: int) -> tuple[float, float]:
    """CPU milliseconds of the stock and of our backend, which take turns on the same batch.

    CPU time, because other programs on the machine then count for little.

    Ours makes its plan on every call here; in a server one plan serves all layers.
    """
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    calls: list[Callable[..., torch.Tensor]] = [
        getattr(backend(runner), f"_run_sdpa_forward_{phase}")
        for backend in (TorchNativeAttnBackend, NewTokensAttnBackend)
    ]
    best = [float("inf"), float("inf")]
    for _ in range(repeat):
        for which, call in enumerate(calls):
            started = time.process_time()
            call(**batch)
            best[which] = min(best[which], time.process_time() - started)
    return best[0] * 1e3, best[1] * 1e3


if __name__ == "__main__":
    main()
