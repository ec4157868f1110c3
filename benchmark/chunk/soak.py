"""Soak: documents are registered and deleted at a share of saturation; errors, memory, pools and texts are watched.

    python benchmark/chunk/soak.py --model DIR --data DATA --minutes 30 --share 0.8 --json OUT

The store is made small, so chunks are evicted to disk, forgotten and learnt again all the time.
Every tenth request is ordinary, out of a few whose answers are known from the start; now and then a
document is registered, pinned, used by its id and deleted. A line is written to ``--json`` each half minute.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rag_load import Library, Prompt, ask, flush, learn, library, median, percentile, settle, state

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

SAMPLE_S = 30
AT_ONCE = 4
ORDINARY = 4
"""Number of ordinary prompts; each is repeated and must always get the same answer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--data", type=Path, required=True)
    add("--minutes", type=float, default=30)
    add("--share", type=float, default=0.8, help="of the saturation rate")
    add("--tokens", type=int, default=800, help="prompt tokens")
    add("--chunks", type=int, default=6)
    add("--documents", type=int, default=48)
    add("--memory-mb", type=int, default=96, help="less than the documents need")
    add("--disk-mb", type=int, default=64)
    add("--json", type=Path, help="JSON lines, written as the soak goes")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    each = (args.tokens - 40) // args.chunks
    lib = library(tokenizer, args.data, args.documents, each, 0.6, 0)
    with tempfile.TemporaryDirectory() as folder:
        chunks = Path(folder) / "chunks"
        keys = {"memory_mb": args.memory_mb, "disk_mb": args.disk_mb, "directory": str(chunks)}
        flags = ["--canopy-chunks", json.dumps(keys)]
        given = [*cpu_arguments(args.model, kv_tokens=8 * args.tokens, dtype="float32"), *flags]
        log = Path(folder) / "server.log"
        environment = {"OMP_NUM_THREADS": "1"}
        with serving(given, log=log, port=free_port(), environment=environment) as server:
            soak = Soak(server, lib, args)
            result = soak.run()
            result["files"] = _files(chunks, state(server.url))
            result["tracebacks"] = server.log_text().count("Traceback")
            result["alive"] = server.process.poll() is None
    soak.note(result)
    print(json.dumps(result, indent=1))


class Soak:
    """A run: requests in threads, their times and their errors."""

    def __init__(self, server: Any, lib: Library, args: argparse.Namespace) -> None:
        self.server, self.lib, self.args, self.url = server, lib, args, server.url
        self.times: list[float] = []
        self.errors: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.changed = self.sent = self.ordinary = self.fused = 0
        self.known: list[tuple[Prompt, list[int]]] = []

    def run(self) -> dict[str, Any]:
        """Measure saturation, arrive at a share of it, and count."""
        learn(self.url, self.lib, self.args.chunks)
        for _ in range(ORDINARY):
            prompt = self._prompt()
            plain = Prompt(prompt.ids, "off", ())
            self.known.append((plain, ask(self.url, plain, 8, stream=False).ids))
        saturation = self._saturation()
        self.times.clear()
        rate, draw = self.args.share * saturation, random.Random(1)
        self.note({"saturation_per_s": saturation, "rate_per_s": rate})
        threads: list[threading.Thread] = []
        started, at, sampled = time.perf_counter(), 0.0, 0.0
        while at < 60 * self.args.minutes:
            at += draw.expovariate(rate)
            time.sleep(max(0.0, started + at - time.perf_counter()))
            threads = [t for t in threads if t.is_alive()]
            threads.append(threading.Thread(target=self.one, args=(self.sent, self._prompt())))
            self.sent += 1
            threads[-1].start()
            if at - sampled > SAMPLE_S:
                sampled = at
                self._sample(at, len(threads))
        for thread in threads:
            thread.join()
        took = time.perf_counter() - started
        settle(self.url)
        flush(self.url)
        return {
            "seconds": took,
            "saturation_per_s": saturation,
            "rate_per_s": rate,
            **self._found(),
        }

    def one(self, index: int, prompt: Prompt) -> None:
        """Send request ``index`` of the mix."""
        try:
            if index % 10 == 9:
                plain, expected = self.known[index // 10 % ORDINARY]
                found = ask(self.url, plain, 8, stream=False)
                self.ordinary += 1
                self.changed += found.ids != expected
                return
            if index % 25 == 24:
                self._document(index)
            answer = ask(self.url, prompt)
            self.fused += bool(answer.report.get("fused"))
            self.times.append(answer.ttft_s)
        except Exception as error:  # counted: the result has their number and the first
            self.errors.append(repr(error))

    def note(self, row: dict[str, Any]) -> None:
        """Append a line to the JSON file."""
        if self.args.json is not None:
            with self.args.json.open("a") as f:
                f.write(json.dumps(row) + "\n")

    def _prompt(self) -> Prompt:
        return self.lib.prompt(self.args.chunks)

    def _saturation(self) -> float:
        """Return requests per second of the same mix, with ``AT_ONCE`` always in flight."""
        jobs = [(i, self._prompt()) for i in range(40)]
        began = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda job: self.one(*job), jobs))
        return len(jobs) / (time.perf_counter() - began)

    def _document(self, index: int) -> None:
        """Register, pin, use, unpin and delete a document of its own."""
        ids = [*self.lib.documents[index % len(self.lib.documents)][:60], *range(1000, 1010)]
        ids.append(1010 + index % 10_000)
        made = self._call("/canopy/chunks", "POST", {"input_ids": ids, "pin": True})
        text = f"Read. {made['mark']} What is it?"
        self._call("/generate", "POST", {"text": text, "sampling_params": {"max_new_tokens": 1}})
        self._call(f"/canopy/chunks/{made['id']}/unpin", "POST", {})
        self._call("/canopy/chunks", "GET")
        self._call(f"/canopy/chunks/{made['id']}", "DELETE")

    def _call(self, path: str, method: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def _sample(self, at: float, waiting: int) -> None:
        process = psutil.Process(self.server.process.pid)
        family = [process, *process.children(recursive=True)]
        row = {
            "at_s": round(at, 1),
            "rss_mb": round(_over(family, lambda p: p.memory_info().rss) / 2**20, 1),
            "files": _over(family, lambda p: p.num_fds()),
            "threads": _over(family, lambda p: p.num_threads()),
            "in_flight": waiting,
            "done": len(self.times),
            "errors": len(self.errors),
        }
        self.samples.append(row)
        self.note(row)

    def _found(self) -> dict[str, Any]:
        found, count = state(self.url), len(self.samples)
        thirds = self.samples[count // 3 : 2 * count // 3], self.samples[2 * count // 3 :]
        return {
            "requests": self.sent,
            "fused": self.fused,
            "ordinary": self.ordinary,
            "ordinary_changed": self.changed,
            "errors": len(self.errors),
            "first_error": self.errors[:1],
            "ttft_p50_s": median(self.times),
            "ttft_p99_s": percentile(self.times, 0.99),
            **{
                f"{name}_second_and_last_third": [max(s[name] for s in t) for t in thirds if t]
                for name in ("rss_mb", "files", "threads", "in_flight")
            },
            "kv_tokens_in_use_after_a_flush": _used_tokens(self.url),
            "server": found,
        }


def _over(family: list[Any], look: Callable[[Any], int]) -> int:
    """Return the sum over the processes that still run."""
    total = 0
    for process in family:
        try:
            total += look(process)
        except psutil.NoSuchProcess:
            continue
    return total


def _used_tokens(url: str) -> float:
    """Slots of the KV pool in use, by the server's own metrics."""
    time.sleep(2)  # they are written once an idle second
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [x for x in lines if x.startswith("sglang:num_used_tokens{")]
    return sum(float(x.rsplit(" ", 1)[1]) for x in found)


def _files(folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the chunk files on disk, and the store's own count of them."""
    files = list(folder.rglob("*.chunk"))
    disk = found["store"]["tiers"]["disk"]
    return {
        "files": len(files),
        "bytes": sum(f.stat().st_size for f in files),
        "store_chunks": disk["chunks"],
        "store_bytes": disk["used_bytes"],
        "leftovers": len([f for f in folder.rglob("*") if f.is_file()]) - len(files),
    }


if __name__ == "__main__":
    main()
