"""A server with three tiers under mixed traffic: its status in `canopy top`, and the cost of it.

    python benchmark/metrics/live.py
    python benchmark/metrics/live.py --page docs/figures/ui.png
    python benchmark/metrics/live.py --counters

The first starts a server on CPU (two layers, random weights, policy `wa`, a device pool and a
host pool far too small, our disk store with TTLs by category), sends it conversations, agents
and one-off documents for `--seconds`, prints a status of `canopy top` and the
reporting thread's time. The second has the what-if meter on, and a headless
Chromium takes a picture of `/canopy/ui`. The third needs no server: it serves the same requests to two trees
in one process, in turns, one of them without counting, and prints the microseconds a request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
ROOT = Path(__file__).resolve().parents[2]

MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
KV_TOKENS = 6144
TOKEN_BYTES = 1024
PAGE = 16
PLAN = {
    "version": 1,
    "host_bytes": 12_000 * TOKEN_BYTES,
    "disk_bytes": 60_000 * TOKEN_BYTES,
    "ttl": {"residual_ttl_s": 900, "categories": {"document": 10, "agent": 120}},
    "made_by": {"who": "benchmark/metrics/live.py"},
}


def ask(url: str, tokens: list[int], said: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "custom_params": said}
    request = urllib.request.Request(
        url + "/generate",
        data=json.dumps({"input_ids": tokens, "sampling_params": sampling}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())["meta_info"]


def client(url: str, kind: str, seed: int, until: float) -> None:
    """Act as one user after another: chats and agents continue, documents are used once."""
    draw = random.Random(seed)
    talks: list[tuple[str, list[int]]] = []
    number = 0
    while time.monotonic() < until:
        if kind == "document" or len(talks) < 6 or draw.random() < 0.15:
            number += 1
            first = 600 if kind == "document" else 240
            talks.append(
                (f"{kind}{seed}-{number}", [draw.randrange(100, 40_000) for _ in range(first)])
            )
            talk = talks[-1]
        else:
            talk = draw.choice(talks[-24:])
            talk[1].extend(draw.randrange(100, 40_000) for _ in range(draw.randrange(30, 90)))
        if len(talk[1]) > 1500:
            talks.remove(talk)
            continue
        with contextlib.suppress(OSError):
            ask(url, talk[1], {"canopy_category": kind, "canopy_conversation": talk[0]})
        time.sleep(draw.random() * 0.2)


@contextlib.contextmanager
def small_server(folder: Path, *more: str, policy: str = "wa", disk: bool = True) -> Iterator[Any]:
    """A server with three tiers that are far too small; without ``disk`` the device alone."""
    from launch_server import cpu_arguments, free_port, serving
    from tiny_model import write_tiny_model

    write_tiny_model(folder / "tiny", MODEL)
    plan = folder / "plan.json"
    plan.write_text(json.dumps({**PLAN, "disk_path": str(folder / "disk")}))
    tiers = ["--enable-hierarchical-cache", "--hicache-storage-backend", "canopy"]
    tiers += ["--hicache-storage-prefetch-policy", "wait_complete", "--canopy-plan", str(plan)]
    arguments = [
        *cpu_arguments(folder / "tiny", kv_tokens=KV_TOKENS, dtype="float32"),
        *("--load-format", "dummy", "--radix-eviction", policy, "--page-size", str(PAGE)),
        *(tiers if disk else ()),
        *more,
    ]
    with serving(arguments, log=folder / "log", port=free_port(), deadline_s=900) as server:
        yield server


def send_traffic(url: str, seconds: float) -> None:
    """Two chats, an agent and a reader of documents, until the time is over."""
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=(url, kind, seed, until))
        for seed, kind in enumerate(("chat", "chat", "agent", "document"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(2)  # the last report


def photograph(
    url: str, out: Path, profile: Path, dark: bool = False, size: tuple[int, int] = (1280, 2380)
) -> None:
    """A picture of a page in Debian's Chromium, in light or in dark colours."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=8000"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command += [f"--user-data-dir={profile}", f"--screenshot={out.resolve()}", url]
    subprocess.run(command, check=True, capture_output=True, timeout=180)


def busiest(url: str) -> str:
    """Return a conversation that is partly cached and partly evicted."""
    for number in range(1, 40):
        for kind in ("chat0", "chat1", "agent2"):
            name = f"{kind}-{number}"
            with urllib.request.urlopen(f"{url}/canopy/explain?conversation={name}") as answer:
                told = json.load(answer)["replicas"][0][0]
            if told["cached"] and told["evicted"]:
                return name
            time.sleep(0.6)  # a user gets one every half a second
    return "chat0-1"


def live(seconds: float, page: Path | None = None) -> dict[str, Any]:
    from canopy_lab.live.top.source import fetch

    with (
        tempfile.TemporaryDirectory(prefix="canopy-metrics-") as scratch,
        small_server(Path(scratch), *(("--canopy-whatif", "auto") if page else ())) as server,
    ):
        send_traffic(server.url, seconds)
        canopy = [sys.executable, "-m", "canopy_lab.cli.main", "top", "--url", server.url]
        subprocess.run([*canopy, "--once"], check=True)
        if page is not None:
            found = f"{server.url}/canopy/ui#conversation={busiest(server.url)}"
            photograph(found, page, Path(scratch) / "browser")
            dark = page.with_stem(page.stem + "-dark")
            photograph(found, dark, Path(scratch) / "browser", dark=True)
        status = fetch(server.url)
        rank = status["ranks"][0]
    return {
        "requests": sum(row["requests"] for row in status["categories"]),
        "nodes": rank["nodes"],
        "uptime_s": round(rank["uptime_s"], 1),
        "reporting_cpu_s": round(rank["reporting_s"], 3),
        "reporting_share_of_a_core": round(status["reporting_share"], 5),
    }


def counters(requests: int, rounds: int) -> dict[str, Any]:
    """Microseconds a request, counting and not, on the device tier alone and over a host tier."""
    import logging

    logging.disable(logging.WARNING)
    from sglang_canopy.radix.counters import Counters
    from support.live_tree import LiveTree

    class Silent(Counters):
        def served(self, *_: Any) -> None: ...
        def evicted(self, *_: Any) -> None: ...

    result: dict[str, Any] = {}
    for host_tokens, name in ((0, "device only"), (16_384, "device and host")):
        draw = random.Random(3)
        prompts = [
            [n % 97, *(draw.randrange(9) for _ in range(draw.randrange(40, 160)))]
            for n in range(requests)
        ]
        taken: dict[str, list[float]] = {"counting": [], "silent": []}
        evictions = 0
        for turn in range(2 * rounds):
            kind = ("counting", "silent")[turn % 2]
            tree = LiveTree(4096, "wa", page_size=1, host_tokens=host_tokens)
            if kind == "silent":
                tree.core.live.counters = Silent()
                tree.core.traffic.computed = lambda *_: None
                tree.core.traffic.entered = lambda *_: None
                tree.core.traffic.left = lambda *_, **__: None
            start = time.perf_counter()
            for i, prompt in enumerate(prompts):
                request_hit = tree.serve(prompt, float(i), category="chat")
                if kind == "counting":
                    tree.core.live.counters.served("chat", len(prompt), (request_hit, 0, 0))
            taken[kind].append((time.perf_counter() - start) / requests * 1e6)
            if kind == "counting":
                evictions = sum(
                    sum(t.evicted) for r in tree.core.live.counters.rows() for t in r.tiers
                )
        medians = {kind: statistics.median(of) for kind, of in taken.items()}
        result[name] = {
            **{f"{kind}_us_a_request": round(of, 1) for kind, of in medians.items()},
            "more": f"{100 * (medians['counting'] / medians['silent'] - 1):.2f} %",
            "spread_of_silent": f"{100 * (max(taken['silent']) / min(taken['silent']) - 1):.1f} %",
            "evicted_tokens_a_round": evictions,
        }
    row = Counters()
    times = 200_000
    start = time.perf_counter()
    for _ in range(times):
        row.evicted(0, "chat|end|turn1", 64, 0, 3.0)
    result["ns_an_eviction_counted"] = round((time.perf_counter() - start) / times * 1e9)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=75.0, help="of traffic (default 75)")
    parser.add_argument(
        "--page", type=Path, help="where a picture of /canopy/ui goes (PNG); the dark one beside it"
    )
    parser.add_argument("--counters", action="store_true", help="what counting costs a tree")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    done = counters(args.requests, args.rounds) if args.counters else live(args.seconds, args.page)
    print(json.dumps(done, indent=1))


if __name__ == "__main__":
    main()
