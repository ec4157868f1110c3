"""A hostile tenant floods a real server with requests, false hints and probes; measure what an honest tenant loses.

    python benchmark/security/hostile_soak.py --minutes 10 --json OUT

Three runs of the same steps. In a step the honest tenant sends the next request of a conversation,
then the hostile one a prompt of the same length:

- *hostile*: ``--minutes`` long. The hostile tenant invents a category for each request, says that
  it returns in a second (or that a conversation is over, and goes on with it), asks to keep, to
  pin and for the longest TTL. Beside that, four threads flood hints, document registrations with
  pins, malformed and endless bodies, and read whatever can be read.
- *truthful*: the same prompts in the same order, without any of that.
- *alone*: the honest tenant's prompts only, in half of the pool.

Why half of the pool: an eviction policy promises no tenant a share. But both tenants send equally
many tokens, so under LRU each would hold half of what the pool holds; a tenant that lies must not
get more than that at the other's cost. The honest tenant sends 40 % of the pool's tokens between
two requests of one conversation. That fits in a half, and still does when the hostile tenant uses
up the budget for what it asks to keep (a tenth of the pool): 40 % + 40 % + 10 %. A hostile tenant
that gets more than its share and that budget pushes conversations out before they return.

Passes if the honest tenant's hit rate (prompt tokens from the cache, warm-up left out) in *hostile*
is no more than one point below that in *alone* and in *truthful*; nothing of the honest tenant was
readable or reusable by the other; no answer was a 5xx, no traceback logged; and memory (resident,
all of the server's processes) grows by at most 3 % and 24 MiB from the middle third to the last; and of the
scheduler's thread no call of a hook or of the tree takes over 50 ms of processor time, nor all hooks
over 2 %. Prints one JSON object; exits with 1 if a claim fails. All addresses are loopback.

``tree_share`` is SGLang's own work in the tree; ``computed_share``: documents encoded in idle time.

The model has two layers, so a prompt takes far less than usual; ``--model DIR`` serves another one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from hook_clocks import COMPUTED_PREFIX, TREE_PREFIX, clocked_start
from tenants import Honest, Hostile

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
POLICY = "wa"
MAX_HIT_RATE_LOSS = 0.01
SAMPLE_INTERVAL_S = 2.0
MAX_GROWTH_SHARE, MAX_GROWTH_MIB = 0.03, 24.0
"""Tolerated growth of memory, the sum of both: allocators fluctuate."""
MAX_CALL_S, MAX_HOOK_SHARE = 0.05, 0.02
"""The longest call of a hook, and the share of the scheduler's thread that all of them may take."""


class MemorySampler:
    """Samples a server's resident memory in a thread of its own."""

    def __init__(self, pid: int) -> None:
        self.resident_mib: list[float] = []
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def is_flat(self) -> bool:
        """Whether the last third's median is about that of the middle third."""
        third = len(self.resident_mib) // 3
        if not third:
            return True
        middle = statistics.median(self.resident_mib[third : 2 * third])
        last = statistics.median(self.resident_mib[-third:])
        return last <= middle * (1 + MAX_GROWTH_SHARE) + MAX_GROWTH_MIB

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            total_bytes = 0
            try:
                server_process = psutil.Process(self._pid)
                processes = [server_process, *server_process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    total_bytes += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.resident_mib.append(round(total_bytes / 2**20, 1))


def serve_tenants(
    name: str, options: argparse.Namespace, folder: Path, steps: int | None
) -> dict[str, Any]:
    """Return one of the three runs, on its own server. ``steps``: ``None`` for ``--minutes``."""
    honest = Honest(options.pool)
    hostile = None if name == "alone" else Hostile(honest, tells_lies=name == "hostile")
    pool_tokens = options.pool // 2 if name == "alone" else options.pool
    model = options.model or folder / "model"
    server_arguments = cpu_arguments(model, kv_tokens=pool_tokens, dtype="float32")
    server_arguments += [] if options.model else ["--load-format", "dummy"]
    server_arguments += ["--radix-eviction", POLICY, "--canopy-documents", "memory_mb=32"]
    log = folder / f"{name}.log"
    clocks = folder / f"{name}.clocks.json"
    start = clocked_start(clocks)
    with serving(server_arguments, log=log, port=free_port(), describe=name, start=start) as server:
        memory = MemorySampler(server.process.pid)
        if hostile is not None and hostile.tells_lies:
            hostile.start(server.url)
        end_s = time.monotonic() + 60 * options.minutes
        step = 0
        while step < steps if steps is not None else time.monotonic() < end_s:
            honest.step(server.url, step)
            if hostile is not None:
                hostile.step(server.url, step)
            step += 1
        if hostile is not None:
            hostile.stop()
        memory.stop()
        clocks_report = json.loads(clocks.read_text())
        log_text = server.log_text()
    return {
        "steps": step,
        "warm_up_steps": honest.warm_up_steps,
        "pool_tokens": pool_tokens,
        "hit_rate": round(honest.hit_rate, 4),
        "honest_errors": honest.errors[:5],
        "hostile_sent": {} if hostile is None else hostile.requests_by_kind,
        "faults": [] if hostile is None else sorted(set(hostile.faults))[:20],
        "tracebacks": log_text.count("Traceback"),
        "rss_mb": memory.resident_mib,
        "memory_flat": memory.is_flat(),
        "hooks_share": thread_share(clocks_report),
        "tree_share": thread_share(clocks_report, TREE_PREFIX),
        "computed_share": thread_share(clocks_report, COMPUTED_PREFIX),
        "longest_s": longest_call_s(clocks_report),
        "scheduler": clocks_report,
    }


def thread_share(clocks_report: dict[str, Any], prefix: str = "") -> float:
    """Return the share of the scheduler's thread of the rows under ``prefix``; without one, of our hooks."""
    other_prefixes = (TREE_PREFIX, COMPUTED_PREFIX)
    seconds = sum(
        row["cpu_s"]
        for name, row in clocks_report["hooks"].items()
        if (name.startswith(prefix) if prefix else not name.startswith(other_prefixes))
    )
    return round(seconds / clocks_report["thread_s"], 4)


def longest_call_s(clocks_report: dict[str, Any]) -> float:
    """Return the seconds of the longest call of a hook or of our tree."""
    hooks = clocks_report["hooks"].items()
    times = [row["longest_s"] for name, row in hooks if not name.startswith(COMPUTED_PREFIX)]
    return round(max(times), 4)


def check_claims(runs: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return each claim, and whether it holds."""
    rates = {name: result["hit_rate"] for name, result in runs.items()}
    has_enough_steps = all(run["steps"] > 2 * run["warm_up_steps"] for run in runs.values())
    return {
        "enough steps to tell": has_enough_steps,
        "within a point of alone": rates["hostile"] >= rates["alone"] - MAX_HIT_RATE_LOSS,
        "nothing gained by lying": rates["hostile"] >= rates["truthful"] - MAX_HIT_RATE_LOSS,
        "nothing readable, nothing refused wrongly": not any(
            result["faults"] or result["honest_errors"] for result in runs.values()
        ),
        "no traceback": not any(result["tracebacks"] for result in runs.values()),
        "memory flat": runs["hostile"]["memory_flat"],
        "no hook's call over 50 ms": all(r["longest_s"] <= MAX_CALL_S for r in runs.values()),
        "hooks within 2 % of the scheduler's thread": all(
            result["hooks_share"] <= MAX_HOOK_SHARE for result in runs.values()
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="of the hostile run")
    parser.add_argument("--pool", type=int, default=8192, help="tokens of the KV pool")
    parser.add_argument("--model", type=Path, help="serve this one instead of a tiny one")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    options = parser.parse_args()
    from tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.logs or Path(scratch)
        write_tiny_model(folder / "model", MODEL)
        runs: dict[str, dict[str, Any]] = {}
        steps = None
        for name in ("hostile", "truthful", "alone"):
            runs[name] = serve_tenants(name, options, folder, steps)
            steps = runs[name]["steps"]
            if options.json:  # a run takes minutes: keep the results of earlier runs
                write_result(options.json, {"policy": POLICY, "runs": runs})
    result = {"policy": POLICY, "verdict": check_claims(runs), "runs": runs}
    print(json.dumps(result, indent=1))
    if options.json:
        write_result(options.json, result)
    return 0 if all(result["verdict"].values()) else 1


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write what a page may show; all of it is printed."""
    runs = {
        name: {key: run[key] for key in run if key not in ("rss_mb", "scheduler")}
        for name, run in result["runs"].items()
    }
    result = {**result, "runs": runs}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
