"""CPU time of Canopy's hooks in a real server at prompts of 500 to 1,000 blocks, 20 a second.

    python benchmark/latency/long_prompts.py --seconds 60

A model of one layer and one head serves ``TALKS`` conversations whose KV is on the device: a prompt adds one
token to the prompt before it, because no CPU computes a million tokens a second. So the shares include hashing,
matching, learning, meter and admission at that length, and no eviction. Open loop. Writes
results/long_prompts.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmark" / "security")]

from hostile_soak import longest, share  # noqa: E402

from launch_server import cpu_arguments, free_port, serving  # noqa: E402
from sglang_canopy import thread_time  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
RESULTS = Path(__file__).parent / "results" / "long_prompts.json"
PAGE, TALKS, RATE, BLOCKS = 64, 8, 20, (500, 1000)
ARMS = {
    "wa": ("--radix-eviction", "wa"),
    "wa, order and gate": (
        *("--radix-eviction", "wa", "--canopy-queue-order", "bounded-shortest"),
        *("--canopy-session-gate", "auto"),
    ),
}


def write_smallest_model(out: Path) -> None:
    from support.small_models import change_config

    write_tiny_model(out, MODEL)
    one = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    change_config(out, **dict.fromkeys(one, 1), hidden_size=32, intermediate_size=64)


def call(url: str, body: Any = None, timeout_s: float = 600.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, data, headers), timeout=timeout_s
    ) as answer:
        return json.loads(answer.read())


def ask(url: str, prompt: list[int]) -> int:
    """Send a prompt; return its cached tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    answer = call(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling})
    return int(answer["meta_info"]["cached_tokens"])


def scheduler(url: str) -> dict[str, Any]:
    (rank,) = call(f"{url}/canopy/status")["ranks"]
    return dict(rank["scheduler"])


def run(name: str, seconds: int, folder: Path) -> dict[str, Any]:
    draw = random.Random(1)
    talks = [
        [draw.randrange(1000, 40000) for _ in range(PAGE * draw.randint(*BLOCKS) + 1)]
        for _ in range(TALKS)
    ]
    given = cpu_arguments(folder / "model", kv_tokens=2 * TALKS * PAGE * BLOCKS[1], dtype="float32")
    given = [*given, "--load-format", "dummy", "--page-size", str(PAGE), *ARMS[name]]
    given += ["--context-length", str(PAGE * BLOCKS[1] + 4096), "--chunked-prefill-size", "2048"]
    every = {thread_time.VARIABLE: "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    log = folder / "server.log"
    with serving(given, log=log, port=free_port(), describe=name, environment=every) as server:
        for talk in talks:
            ask(server.url, talk)
        before, begin = scheduler(server.url), time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(TALKS) as pool:
            answers = []
            for number in range(RATE * seconds):
                time.sleep(max(0.0, begin + number / RATE - time.monotonic()))
                talk = talks[number % TALKS]
                talk.append(draw.randrange(1000, 40000))
                answers.append((len(talk), pool.submit(ask, server.url, list(talk))))
            found = sum(answer.result() for _, answer in answers)
        after, took = scheduler(server.url), time.monotonic() - begin
    spent = {
        key: row["seconds"] - before["seams"].get(key, {"seconds": 0.0})["seconds"]
        for key, row in after["seams"].items()
    }
    timed = {"seams": {key: {"seconds": s} for key, s in spent.items()}, "thread_s": took}
    return {
        "requests": len(answers),
        "seconds": round(took, 1),
        "rate": round(len(answers) / took, 2),
        "cached": round(found / sum(length for length, _ in answers), 4),
        "thread": round((after["thread_s"] - before["thread_s"]) / took, 4),
        "hooks": share(timed),
        "tree": share(timed, thread_time.TREE),
        "longest_ms": round(1e3 * longest(after), 2),
        "by_hook": {
            key: round(value / took, 5)
            for key, value in sorted(spent.items(), key=lambda pair: -pair[1])[:12]
        },
    }


def table() -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [
        "| server | requests a second | hooks, % of the thread's time | Canopy's tree, with SGLang's part | longest call, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, arm in found.items():
        shares = f"{100 * arm['hooks']:.1f} | {100 * arm['tree']:.1f}"
        lines.append(f"| {name} | {arm['rate']:.1f} | {shares} | {arm['longest_ms']:.1f} |")
    return "\n".join(lines)


PARTS = {"table": table}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_smallest_model(Path(folder) / "model")
        for name in ARMS:
            found[name] = run(name, args.seconds, Path(folder))
            print(name, json.dumps(found[name], indent=1), flush=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
