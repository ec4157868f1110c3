"""Hits on real servers in the five minutes before and after each of three restarts.

    PYTHONPATH=test python benchmark/tiers/restart_served.py --data DATA --out benchmark/tiers/results/restart_served.json

Twenty minutes of a trace in four windows of five, with a restart (SIGTERM to the HTTP process, then a new
start) between two windows: three pairs of a window before and one after. One server at a time, with a
two-layer random model on a CPU. A block of 512 tokens of the trace becomes a page of 16, and time runs up
to ``MAX_SPEED_UP`` times as fast: a request is sent when it is due and the one before it is answered. ``drain``:
``auto`` and ``write_back``; ``no drain``: with ``--canopy-drain-s 0``; ``write_through``: with that write
policy; ``lru, file``: SGLang alone, ``write_through`` to its file storage; ``cold``: ``drain`` with an empty folder
at each start, without the first window and the warm-up. ``ttft_s``: seconds until the answer of one token.
Rows that OUT has already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from overlays import overlay

from canopy_lab.advise.sample import with_long_blocks
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from launch_server import SERVER_ENVIRONMENT, cpu_arguments, free_port, serving
from live import TIERS, send
from support import forked
from support.chip import has_cuda, kernel_environment
from tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
PAGE_TOKENS, DEVICE_TOKENS, HOST_RATIO = 16, 16_384, 2
MAX_SPEED_UP = 15.0
WINDOW_S, WINDOW_COUNT, WARM_UP_S = 300.0, 4, 120.0
ARMS = ("drain", "lru, file", "no drain", "write_through", "cold")


def read_traces(data: Path) -> Iterator[tuple[str, list[TraceRequest]]]:
    """A sixth of the conversations of a trace, and an overlay of agents' sessions."""
    end_s = WARM_UP_S + WINDOW_COUNT * WINDOW_S
    hour = open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake")
    conversations = (r for r in hour if len(r.blocks) > 1 and r.blocks[1] % 6 == 0)
    yield "conversation", [r for r in conversations if r.time_s < end_s]
    agents = overlay(data / "agentic_coding" / "traces_500.tar.xz", 20, end_s, 1)
    yield "agents", [with_long_blocks(r, 8) for r in agents if r.time_s < end_s]


def tokens_of(request: TraceRequest, number: int) -> list[int]:
    """A page of tokens for each block, and one token more, so that every page can hit."""
    token_ids = range(100, 40_000)
    pages = [random.Random(block).choices(token_ids, k=PAGE_TOKENS) for block in request.blocks]
    return [*(token for page in pages for token in page), 100 + number]


def server_arguments(arm: str, model: Path, folder: Path) -> list[str]:
    storage: dict[str, Any] = {"prefetch_threshold": PAGE_TOKENS}
    if arm == "lru, file":
        policy_arguments = ["--radix-eviction-policy", "lru"]
        backend, write_policy = "file", "write_through"
    else:
        policy_arguments = ["--radix-eviction", "auto"]
        policy_arguments += ["--canopy-drain-s", "0"] if arm == "no drain" else []
        backend, storage = "canopy", {**storage, "path": str(folder), "capacity_gb": 2}
        write_policy = "write_through" if arm == "write_through" else "write_back"
    return [
        *cpu_arguments(model, kv_tokens=DEVICE_TOKENS, dtype="float32"),
        *("--load-format", "dummy", "--page-size", str(PAGE_TOKENS), "--enable-hierarchical-cache"),
        *("--hicache-ratio", str(HOST_RATIO), "--hicache-storage-backend", backend),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-write-policy", write_policy),
        *("--hicache-storage-backend-extra-config", json.dumps(storage), *policy_arguments),
    ]


def replay(url: str, requests: list[tuple[float, list[int]]], from_s: float) -> dict[str, Any]:
    """Send the requests in order, none before it is due. Returns prompt tokens, those hit, and TTFT."""
    start_s, prompt_tokens, hit_tokens = time.monotonic(), 0, Counter[str]()
    ttft_s = []
    for due_s, tokens in requests:
        time.sleep(max(0.0, (due_s - from_s) / MAX_SPEED_UP - (time.monotonic() - start_s)))
        sent_s = time.monotonic()
        _, hits = send(url, {"tokens": tokens, "labels": {}}, 1)
        hit_tokens += hits
        ttft_s.append(time.monotonic() - sent_s)
        prompt_tokens += len(tokens) - 1
    return {
        "requests": len(requests), "tokens": prompt_tokens, **{tier: hit_tokens[tier] for tier in TIERS},
        "seconds": round(time.monotonic() - start_s, 1),
        "ttft_s": {"mean": round(statistics.fmean(ttft_s), 3), "p50": round(statistics.median(ttft_s), 3)},
    }  # fmt: skip


def run_arm(
    arm: str, trace: list[TraceRequest], model: Path, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Run one server a window. Yields the hits of each window, except the first of ``cold``."""
    folder = scratch / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    requests = [(r.time_s, tokens_of(r, n)) for n, r in enumerate(trace)]
    first_window = 1 if arm == "cold" else 0
    for window in range(first_window, WINDOW_COUNT):
        if arm == "cold":
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        start_s = WARM_UP_S + window * WINDOW_S
        launch_s = time.monotonic()
        with serving(
            server_arguments(arm, model, folder), log=scratch / "server.log", port=free_port(),
            environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}, deadline_s=600.0,
            start=forked.serve,
        ) as server:  # fmt: skip
            ready_s = time.monotonic() - launch_s
            if window == 0:
                earlier_requests = [(due_s, ids) for due_s, ids in requests if due_s < start_s]
                replay(server.url, earlier_requests, 0.0)
            end_s = start_s + WINDOW_S
            window_requests = [(due_s, ids) for due_s, ids in requests if start_s <= due_s < end_s]
            row = {"window": window, **replay(server.url, window_requests, start_s)}
            stop_start_s = time.monotonic()
            os.kill(server.process.pid, signal.SIGTERM)
            server.process.wait(timeout=180)
            stop_s = time.monotonic() - stop_start_s
            log_lines = server.log_text().splitlines()
            drain_lines = [line for line in log_lines if "pages are lost" in line]
        yield row | {
            "ready_s": round(ready_s, 1), "stop_s": round(stop_s, 1),
            "drained": drain_lines[-1].split("] ")[-1] if drain_lines else None,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    finished_runs = {(row["trace"], row["arm"]) for row in rows}
    traces_by_name = dict(read_traces(options.data))
    for key, value in {**SERVER_ENVIRONMENT, **kernel_environment(has_cuda())}.items():
        os.environ.setdefault(key, value)  # before the process that forks servers starts
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        write_tiny_model(model, MODEL)
        for arm in ARMS:
            for name, trace in traces_by_name.items():
                if (name, arm) in finished_runs:
                    continue
                distinct = PAGE_TOKENS * len({block for r in trace for block in r.blocks})
                for row in run_arm(arm, trace, model, Path(scratch)):
                    print(json.dumps(row), flush=True)
                    rows.append({"trace": name, "arm": arm, "distinct_tokens": distinct, **row})
                options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
