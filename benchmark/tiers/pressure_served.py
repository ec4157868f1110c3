"""A server under memory pressure with a slow disk: wrong tokens, failed requests, waits of the scheduler.

    python benchmark/tiers/pressure_served.py --minutes 60 --out benchmark/tiers/results/pressure_served.json

``auto`` with a device pool and a host pool for a few of ``live.py``'s prompts; each read and write of the
disk store lasts ``--slow-s`` longer. ``--clients`` send prompts at random until the time is over. Each
answer is compared with that of a server without a cache. SGLang's own check of idle memory ends a server
whose KV is still locked.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
import live
from launch_server import add_plugin

DELAY_VARIABLE = "CANOPY_BENCHMARK_DISK_DELAY_S"
PLUGIN_NAME = "slow_disk"
ANSWER_TOKENS = 16
"""Of each answer."""


def install() -> None:
    """The plugin: delay each read and write of Canopy's disk tier."""
    from sglang_canopy.storage.current_store import CurrentStore

    delay_s = float(os.environ[DELAY_VARIABLE])
    read, write = CurrentStore.read, CurrentStore.write

    def slow_read(*arguments: Any) -> Any:
        time.sleep(delay_s)
        return read(*arguments)

    def slow_write(*arguments: Any) -> None:
        time.sleep(delay_s)
        write(*arguments)

    CurrentStore.read, CurrentStore.write = slow_read, slow_write  # type: ignore[method-assign]


def slow_disk_environment(folder: Path, slow_s: float) -> dict[str, str]:
    here = Path(__file__)
    return {
        **add_plugin(folder, PLUGIN_NAME, f"{here.stem}:install", here.parent),
        "SGLANG_PLUGINS": f"canopy,canopy_replay,{PLUGIN_NAME}",
        DELAY_VARIABLE: str(slow_s),
    }


def send_until_over(
    url: str,
    prompts: Sequence[live.SessionPrompt],
    uncached_answers: Sequence[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Send prompts until the time is over. Returns counts, and tokens found by tier."""
    end_s = time.monotonic() + 60 * options.minutes
    hits, counts, lock = Counter[str](), Counter[str](), threading.Lock()

    def run_client(number: int) -> None:
        rng = random.Random(options.seed + number)
        while time.monotonic() < end_s:
            index = rng.randrange(len(prompts))
            try:
                ids, by_tier = live.send(url, prompts[index], ANSWER_TOKENS)
            except OSError:
                with lock:
                    counts["failed"] += 1
                continue
            with lock:
                hits.update(by_tier)
                counts["answers"] += 1
                counts["wrong"] += ids != uncached_answers[index]

    with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
        list(pool.map(run_client, range(options.clients)))
    answer_counts = {name: counts[name] for name in ("answers", "failed", "wrong")}
    return {**answer_counts, "hits": {tier: hits[tier] for tier in live.TIERS}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--slow-s", type=float, default=0.2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    prompts = live.make_prompts(options.prompts, options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "disk"
        folder.mkdir(mode=0o700)
        setup = live.ServedSetup(folder, Path(scratch), policy="auto", write_policy="write_back")
        with setup.server("--disable-radix-cache") as server:
            uncached_answers, _ = live.send_all(server.url, prompts, ANSWER_TOKENS, "no cache")
        setup.environment |= slow_disk_environment(Path(scratch), options.slow_s)
        with setup.server(*setup.tier_arguments) as server:
            row = send_until_over(server.url, prompts, uncached_answers, options)
            live.flush_memory(server.url)
            time.sleep(10)  # SGLang checks the memory of an idle server
            with urllib.request.urlopen(f"{server.url}/canopy/status", timeout=30) as answer:
                row["storage_holds"] = json.load(answer)["ranks"][0]["storage_holds"]
            log = server.log_text()
    for name, text in {"tracebacks": "Traceback", "out_of_memory": "out of memory"}.items():
        row[name] = log.count(text)
    row |= {name: value for name, value in vars(options).items() if name != "out"}
    options.out.write_text(json.dumps({"kind": "served over HTTP", "rows": [row]}, indent=1) + "\n")
    print(json.dumps(row, indent=1))
    return int(bool(row["wrong"] or row["failed"] or row["tracebacks"] or row["out_of_memory"]))


if __name__ == "__main__":
    sys.exit(main())
