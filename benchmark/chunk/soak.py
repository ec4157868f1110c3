"""Soak: documents come and go at a share of saturation; errors, memory and pools are watched.

    python benchmark/chunk/soak.py --model DIR --data FOLDER --minutes 30 --share 0.8

The store is made small, so chunks are evicted and learnt again all the time; every tenth request
is ordinary, some are registered documents that are pinned, used and deleted.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rag_load import Prompt, ask, learn, library, median, percentile, state

from sglang_canopy.launch import cpu_arguments, free_port, serving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--share", type=float, default=0.8, help="of the saturation rate")
    parser.add_argument("--tokens", type=int, default=800, help="prompt tokens")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--memory-mb", type=int, default=96, help="less than the documents need")
    parser.add_argument("--disk-mb", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    each = (args.tokens - 40) // args.chunks
    lib = library(tokenizer, args.data, args.documents, each, 0.6, 0)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--canopy-chunks", "on", "--canopy-chunk-memory-mb", str(args.memory_mb)]
        flags += ["--canopy-chunk-disk-mb", str(args.disk_mb), "--canopy-chunk-dir", folder]
        given = [*cpu_arguments(args.model, kv_tokens=8 * args.tokens, dtype="float32"), *flags]
        environment = {"OMP_NUM_THREADS": "1"}
        log = Path(folder) / "server.log"
        with serving(given, log=log, port=free_port(), environment=environment) as server:
            result = soak(server, lib, args)
            result["tracebacks"] = server.log_text().count("Traceback")
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def soak(server: Any, lib: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Arrivals at ``share`` of the rate that back-to-back requests reached; samples every 15 s."""
    learn(server.url, lib, args.chunks)
    began = time.perf_counter()
    for _ in range(12):
        ask(server.url, lib.prompt(args.chunks))
    saturation = 12 / (time.perf_counter() - began)
    rate, draw = args.share * saturation, random.Random(1)
    times, errors, threads, samples = [], [], [], []

    def one(index: int, prompt: Prompt) -> None:
        try:
            if index % 10 == 9:
                prompt = Prompt(prompt.ids, "off", ())  # type: ignore[arg-type]
            if index % 25 == 24:
                _documents(server.url, lib, index)
            times.append(ask(server.url, prompt).ttft_s)
        except Exception as error:  # counted: the result says how many and the first
            errors.append(repr(error))

    started, at, sampled = time.perf_counter(), 0.0, -1e9
    while at < 60 * args.minutes:
        at += draw.expovariate(rate)
        time.sleep(max(0.0, started + at - time.perf_counter()))
        threads = [t for t in threads if t.is_alive()]
        threads.append(threading.Thread(target=one, args=(len(times), lib.prompt(args.chunks))))
        threads[-1].start()
        if at - sampled > 15:
            sampled = at
            samples.append(_rss_mb(server.process.pid))
    for thread in threads:
        thread.join()
    found, half = state(server.url), len(samples) // 2
    return {
        "minutes": args.minutes,
        "requests": len(times),
        "saturation_per_s": saturation,
        "rate_per_s": rate,
        "errors": len(errors),
        "first_error": errors[:1],
        "ttft_p50_s": median(times),
        "ttft_p99_s": percentile(times, 0.99),
        "rss_mb_first_half_max": max(samples[: half or 1]),
        "rss_mb_second_half_max": max(samples[half:]),
        "server": {k: v for k, v in found.items() if k != "stored"},
    }


def _documents(url: str, lib: Any, index: int) -> None:
    """Register, list and delete a document of its own."""
    ids = [*lib.documents[index % len(lib.documents)][:60], *range(1000, 1010)]
    made = _call(url, "/canopy/chunks", "POST", {"input_ids": ids})
    _call(url, "/canopy/chunks", "GET")
    _call(url, f"/canopy/chunks/{made['id']}", "DELETE")


def _call(url: str, path: str, method: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


def _rss_mb(pid: int) -> float:
    """Resident memory of the server and its children."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(p.memory_info().rss for p in family) / 2**20


if __name__ == "__main__":
    main()
