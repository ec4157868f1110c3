"""Every kernel on a GPU: right, how far from its floor, and what fused prefill gains end to end.

    python benchmark/kernels/gpu_check.py --json OUT.json [--quick]

Floors use the bandwidth and matrix rate measured first, on this very device. ``--smoke`` runs tiny
sizes on a CPU, to prove that the script itself runs; its times mean nothing.
"""

# ruff: noqa: B023, F821 - every closure here is run before its loop or its del
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from layer_ahead import pipelined_prefill  # beside this file

from canopy_kernel import attention, flashinfer_attention, fuse, lowpass, pages, rope_scatter
from sglang_canopy.chunk import engine
from sglang_canopy.chunk.cache import dense_cache
from sglang_canopy.chunk.chunk import Chunk, FusedPrompt, Placed
from sglang_canopy.chunk.fusion import fused_prefill
from sglang_canopy.chunk.model import Shape, random_model
from sglang_canopy.chunk.selectors import make_selector
from sglang_canopy.chunk.selectors.frequency import layer_scores

LLAMA_8B = Shape(32, 32, 8, 128, 4096, 128256, 1e-5)
FLASHINFER = {"positions": "flashinfer", "mask": "flashinfer-mask"}
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Bench:
    """Timing on one device: medians, in seconds."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = "cpu" if smoke else "cuda"

    def time(self, work: Callable[[], object], repeats: int = 10) -> float:
        if self.smoke:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        for _ in range(3):
            work()
        laps = []
        for _ in range(repeats):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            work()
            b.record()
            torch.cuda.synchronize()
            laps.append(a.elapsed_time(b) / 1e3)
        return statistics.median(laps)

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=torch.float32).to(dtype)


def ceilings(b: Bench) -> dict:
    """Bytes/s of a large copy (read plus write) and FLOP/s of a large bf16 product."""
    n = 1 << (16 if b.smoke else 29)
    x = b.random(n)
    y = torch.empty_like(x)
    copy = b.time(lambda: y.copy_(x))
    del y, x
    m = 256 if b.smoke else 8192
    p, q = b.random(m, m), b.random(m, m)
    return {
        "bytes_per_second": 2 * n * 2 / copy,
        "flop_per_second": 2 * m**3 / b.time(lambda: p @ q),
    }


def table(length: int, dim: int, device: str) -> torch.Tensor:
    """cos and sin of every position."""
    steps = torch.arange(0, dim, 2, device=device) / dim
    angle = torch.arange(length, device=device)[:, None] * 10000.0**-steps
    return torch.cat([angle.cos(), angle.sin()], -1)


def correctness(b: Bench) -> list[dict]:
    """Each kernel against its reference over head sizes, dtypes, page sizes and layouts."""
    found = []
    shapes = [(64, 6, 2), (128, 8, 2), (256, 4, 4)]
    for dim, heads, kv_heads in shapes[: 1 if b.smoke else 3]:
        for dtype in TOLERANCE:
            for page in (1, 16, 64):
                for layout in pages.LAYOUTS:
                    found.append(_one_case(b, dim, heads, kv_heads, dtype, page, layout))
                    if b.smoke:
                        return found
    return found


def _one_case(
    b: Bench, dim: int, heads: int, kv_heads: int, dtype: torch.dtype, page: int, layout: str
) -> dict:
    torch.manual_seed(dim + page)
    n, m, where = 300, 70, b.device
    inner = (page, kv_heads) if layout == "NHD" else (kv_heads, page)

    def pool() -> torch.Tensor:
        return pages.view(b.random(640 // page + 2, *inner, dim, dtype=dtype), layout)

    slots = torch.randperm(640)[:n].to(where)
    rows = attention.Rows.one(torch.randperm(n)[:m].sort()[0].to(where), slots)
    q, k, v = b.random(m, heads, dim, dtype=dtype), pool(), pool()
    errors = {}

    def off(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got.float() - expected.float()).abs().max())

    expected = attention.reference(q, k, v, rows, dim**-0.5)
    errors["attention"] = off(attention.sparse_prefill_triton(q, k, v, rows, dim**-0.5), expected)
    for how, backend in FLASHINFER.items():
        if flashinfer_attention.unavailable(k, how) is None and dtype != torch.float32:
            got = attention.sparse_prefill(q, k, v, rows, dim**-0.5, backend)
            errors[backend] = off(got, expected)
    cos_sin = table(1000, dim, where)
    raw = [b.random(n, kv_heads, dim, dtype=dtype) for _ in range(4)]
    at = torch.randint(0, 1000, (n,), device=where)
    origin = torch.where(torch.rand(n, device=where) < 0.2, 1, -1) * torch.randint(
        1, n, (n,), device=where
    )
    for name, fast, slow, args in (
        ("rope_scatter", rope_scatter.rope_scatter_triton, rope_scatter.reference, (*raw[:2], torch.randperm(n, device=where), at, slots, cos_sin)),
        ("fuse", fuse.fuse_triton, fuse.reference, (*raw, origin, at, slots, cos_sin)),
    ):  # fmt: skip
        pools = [pool(), pool()]
        copies = [p.clone() for p in pools]
        fast(*args, *pools)
        slow(*args, *copies)
        errors[name] = max(off(x, y) for x, y in zip(pools, copies))
    x, y = (b.random(2, n, kv_heads * dim, dtype=dtype) for _ in range(2))
    errors["energy"] = off(lowpass.energy_triton(x, y), lowpass.reference(x, y))
    return {
        "case": f"d{dim} {heads}/{kv_heads} {str(dtype)[6:]} page{page} {layout}",
        "errors": errors,
        "ok": all(e <= TOLERANCE[dtype] for e in errors.values()),
    }


def attention_times(b: Bench, top: dict, lengths: list[int], ratios: list[float]) -> list[dict]:
    """Sparse prefill of one 8B-shaped layer, against its floor, masked SDPA and dense causal."""
    found, (heads, kv_heads, dim) = [], (32, 8, 128)
    for n in lengths:
        k, v = b.random(n, 1, kv_heads, dim), b.random(n, 1, kv_heads, dim)
        slots = torch.arange(n, device=b.device)
        dense = None
        for ratio in ratios:
            m = int(n * ratio)
            positions = torch.randperm(n)[:m].sort()[0].to(b.device)
            rows = attention.Rows.one(positions, slots)
            q = b.random(m, heads, dim)
            flops = 4 * heads * dim * float((positions + 1).sum())
            moved = 2 * (2 * m * heads * dim + 2 * n * kv_heads * dim)
            floor = max(flops / top["flop_per_second"], moved / top["bytes_per_second"])
            row = {"tokens": n, "ratio": ratio, "floor_s": floor}
            run = attention.sparse_prefill_triton
            row["triton_s"] = b.time(lambda: run(q, k, v, rows, dim**-0.5))
            row["times_floor"] = row["triton_s"] / floor
            if m * n <= 2e8:  # a dense mask of queries x keys
                mask = torch.arange(n, device=b.device) <= positions[:, None]
                args = [x[:, 0].transpose(0, 1)[None] for x in (k, v)]
                query = q.transpose(0, 1)[None]
                row["masked_sdpa_s"] = b.time(
                    lambda: F.scaled_dot_product_attention(
                        query, *args, attn_mask=mask, enable_gqa=True
                    )
                )
                del mask
            if dense is None:
                full = b.random(n, heads, dim)
                dense = _dense(b, full, k, v)
                del full
            row.update(dense)
            if flashinfer_attention.unavailable(k, "positions") is None:
                row["flashinfer_s"] = b.time(
                    lambda: attention.sparse_prefill(q, k, v, rows, dim**-0.5, "flashinfer"), 3
                )
            if m * n <= 2e8 and flashinfer_attention.unavailable(k) is None:
                # plan() and the mask's packing are part of this call, as they are of a first use
                row["flashinfer_mask_s"] = b.time(
                    lambda: attention.sparse_prefill(q, k, v, rows, dim**-0.5, "flashinfer-mask"), 3
                )
            found.append(row)
    return found


def _dense(b: Bench, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict:
    """Full causal prefill of the same layer: torch's, and FlashInfer's where it is."""
    args = [x[:, 0].transpose(0, 1)[None] for x in (k, v)]
    query = q.transpose(0, 1)[None]
    out = {
        "dense_causal_s": b.time(
            lambda: F.scaled_dot_product_attention(query, *args, is_causal=True, enable_gqa=True), 3
        )
    }
    if flashinfer_attention.unavailable(k) is None:
        import flashinfer

        out["flashinfer_dense_s"] = b.time(
            lambda: flashinfer.single_prefill_with_kv_cache(q, k[:, 0], v[:, 0], causal=True), 3
        )
    return out


def movers(b: Bench, top: dict, lengths: list[int]) -> list[dict]:
    """rope_scatter, fuse and energy of one 8B-shaped layer against their bytes."""
    found, (heads, dim) = [], (8, 128)
    for n in lengths:
        raw = [b.random(n, heads, dim) for _ in range(4)]
        pools = [b.random(n, 1, heads, dim) for _ in range(2)]
        at = torch.arange(n, device=b.device)
        slots = torch.randperm(n, device=b.device)
        cos_sin = table(n, dim, b.device)
        origin = torch.where(torch.rand(n, device=b.device) < 0.15, at, -1 - at)
        bytes_moved = 4 * n * heads * dim * 2 + n * (3 * 8 + dim * 4)
        floor = bytes_moved / top["bytes_per_second"]
        scatter = b.time(
            lambda: rope_scatter.rope_scatter_triton(*raw[:2], at, at, slots, cos_sin, *pools)
        )
        fused = b.time(lambda: fuse.fuse_triton(*raw, origin, at, slots, cos_sin, *pools))
        x = b.random(4, n, heads * dim, dtype=torch.float32)
        energy = b.time(lambda: lowpass.energy_triton(x, x))
        found.append(
            {"tokens": n, "kernel": "rope_scatter", "s": scatter, "times_floor": scatter / floor}
        )
        found.append({"tokens": n, "kernel": "fuse", "s": fused, "times_floor": fused / floor})
        floor = 2 * x.nbytes / top["bytes_per_second"]
        found.append(
            {"tokens": n, "kernel": "energy (4 layers)", "s": energy, "times_floor": energy / floor}
        )
    return found


def end_to_end(b: Bench, lengths: list[int], ratio: float) -> list[dict]:
    """Prefill of a random 8B-shaped Llama: full, chunks on the device, chunks in pinned memory."""
    shape = Shape(2, 4, 2, 64, 128, 512, 1e-5) if b.smoke else LLAMA_8B
    dtype = torch.float32 if b.smoke else torch.bfloat16
    model = random_model(shape, 256 if b.smoke else 14336, 500000.0, dtype, b.device)
    found = []
    for n in lengths:
        ids = torch.randint(0, shape.vocab, (n,), device=b.device)
        chunk_tokens, placed, at = (40 if b.smoke else 500), [], 32
        while at + chunk_tokens <= n - 32:
            size = (shape.layers, chunk_tokens, shape.kv_heads, shape.head_dim)
            tokens = tuple(ids[at : at + chunk_tokens].tolist())
            placed.append(
                Placed(
                    Chunk(tokens, b.random(*size, dtype=dtype), b.random(*size, dtype=dtype)), at
                )
            )
            at += chunk_tokens
        here = FusedPrompt(ids, tuple(placed))
        for p in placed:
            make_selector("frequency").scores(p.chunk)
        away = FusedPrompt(ids, tuple(Placed(_pinned(p.chunk, b), p.start) for p in placed))
        cache = dense_cache(model, n)

        def wall(work: Callable[[], object]) -> float:
            laps = []
            for _ in range(2 if b.smoke else 4):
                begin = time.perf_counter()
                work()
                if not b.smoke:
                    torch.cuda.synchronize()
                laps.append(time.perf_counter() - begin)
            return statistics.median(laps[1:])

        row = {
            "tokens": n,
            "ratio": ratio,
            "full_s": wall(lambda: engine.prefill(model, ids, cache)),
        }
        for name in ("frequency", "asked"):
            choose = make_selector(name)
            row[f"device_{name}_s"] = wall(lambda: fused_prefill(model, here, cache, choose, ratio))
        stored = make_selector("frequency")
        row["device_pipelined_s"] = wall(
            lambda: pipelined_prefill(model, here, cache, stored, ratio)
        )
        row["host_pipelined_s"] = wall(lambda: pipelined_prefill(model, away, cache, stored, ratio))
        row["speedup_device"] = row["full_s"] / row["device_pipelined_s"]
        row["speedup_host"] = row["full_s"] / row["host_pipelined_s"]
        row["host_over_device"] = row["host_pipelined_s"] / row["device_pipelined_s"]
        found.append(row)
    return found


def _pinned(chunk: Chunk, b: Bench) -> Chunk:
    k, v = chunk.raw_k.cpu(), chunk.v.cpu()
    if not b.smoke:
        k, v = k.pin_memory(), v.pin_memory()
    return Chunk(chunk.ids, k, v, chunk.prefix, chunk.scores)


def index_time(b: Bench) -> dict:
    """Low-frequency scores of a 3k-token chunk of an 8B-shaped model (the paper: 0.69 ms)."""
    layers, n = (2, 64) if b.smoke else (32, 3072)
    k, v = (b.random(layers, n, 8, 128) for _ in range(2))
    chunk = Chunk(tuple(range(n)), k, v)
    return {
        "tokens": n,
        "layers": layers,
        "s": b.time(lambda: layer_scores(chunk)),
        "paper_s": 0.69e-3,
    }


def show(title: str, rows: list[dict]) -> None:
    """Rows as a table; seconds as milliseconds."""
    print(f"\n{title}")
    for row in rows:
        cells = []
        for key, value in row.items():
            if isinstance(value, float):
                value = (
                    f"{value * 1e3:.3f} ms" if key.endswith("_s") or key == "s" else f"{value:.2f}"
                )
            cells.append(f"{key.removesuffix('_s')}={value}")
        print("  " + "  ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="shorter lists of lengths and ratios")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on a CPU, times meaningless"
    )
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--smoke proves that this script runs)")
        return 1
    b, report = Bench(args.smoke), {}
    report["device"] = "cpu smoke run" if args.smoke else torch.cuda.get_device_name()
    report["torch"] = torch.__version__

    def section(name: str, work: Callable[[], object]) -> None:
        """One section; a failure is reported and does not lose the others."""
        try:
            report[name] = work()
        except Exception as error:
            report[name] = [{"failed": f"{type(error).__name__}: {error}"}]
        found = report[name]
        show(name, found if isinstance(found, list) else [found])
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))

    section("ceilings", lambda: ceilings(b))
    top = (
        report["ceilings"]
        if isinstance(report["ceilings"], dict)
        else {"bytes_per_second": 1e12, "flop_per_second": 1e14}
    )
    section("correctness", lambda: correctness(b))
    lengths = [128] if args.smoke else [4096, 16384] if args.quick else [4096, 16384, 65536]
    ratios = [0.15] if args.smoke or args.quick else [0.05, 0.15, 0.5]
    section("attention", lambda: attention_times(b, top, lengths, ratios))
    section("movers", lambda: movers(b, top, lengths))
    section("index", lambda: index_time(b))
    e2e = [150] if args.smoke else [8192] if args.quick else [8192, 32768]
    section("end_to_end", lambda: end_to_end(b, e2e, 0.15))
    wrong = [c for c in report["correctness"] if not c.get("ok")]
    failed = [n for n, v in report.items() if isinstance(v, list) and any("failed" in r for r in v)]
    print(f"\nwrong: {[c.get('case', c) for c in wrong]}; sections that failed: {failed}")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
