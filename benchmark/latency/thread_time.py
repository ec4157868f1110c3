"""CPU time of Canopy's hooks in a real server at prompts of 500 to 1,000 blocks, 20 a second.

    PYTHONPATH=test python benchmark/latency/thread_time.py --seconds 60

A model of one layer and one head serves conversations whose KV is on the device: a prompt repeats the
previous one and adds one token, so the device computes almost nothing; the shares are therefore of hashing,
matching, learning, meter and admission, without eviction. Open loop. Writes results/long_prompts.json. Goals:
2 % of the thread's time, 50 ms a call.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmark" / "security")]

from hook_clocks import TREE_PREFIX, clocked_start  # noqa: E402
from hostile_soak import longest_call_s, thread_share  # noqa: E402

from launch_server import cpu_arguments, free_port, post, serving  # noqa: E402
from support.small_models import change_config  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
RESULT_FILE = Path(__file__).parent / "results" / "long_prompts.json"
PAGE_TOKENS, CONVERSATION_COUNT, REQUESTS_PER_S, PROMPT_BLOCKS = 64, 8, 20, (500, 1000)
ARMS = {
    "wa": ("--radix-eviction", "wa"),
    "wa, order and gate": (
        *("--radix-eviction", "wa", "--canopy-queue-order", "bounded-shortest"),
        *("--canopy-session-gate", "auto"),
    ),
}


def send_prompt(url: str, prompt: list[int]) -> int:
    """Send a prompt for one token; return the prompt's cached tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    answer = post(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling})
    return int(answer["meta_info"]["cached_tokens"])


def measure_arm(name: str, seconds: int, folder: Path) -> dict[str, Any]:
    """Serve an arm; return shares of the thread's time, cached share of prompt tokens, and the longest call."""
    rng = random.Random(1)
    conversations = [
        [rng.randrange(1000, 40000) for _ in range(PAGE_TOKENS * rng.randint(*PROMPT_BLOCKS) + 1)]
        for _ in range(CONVERSATION_COUNT)
    ]
    kv_tokens = 2 * CONVERSATION_COUNT * PAGE_TOKENS * PROMPT_BLOCKS[1]
    arguments = cpu_arguments(folder / "model", kv_tokens=kv_tokens, dtype="float32")
    arguments += ["--load-format", "dummy", "--page-size", str(PAGE_TOKENS), *ARMS[name]]
    context_tokens = PAGE_TOKENS * PROMPT_BLOCKS[1] + 4096
    arguments += ["--context-length", str(context_tokens), "--chunked-prefill-size", "2048"]
    clocks, environment = folder / "clocks.json", {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with serving(
        arguments, log=folder / "server.log", port=free_port(), environment=environment,
        start=clocked_start(clocks),
    ) as server:  # fmt: skip
        for conversation in conversations:
            send_prompt(server.url, conversation)
        time.sleep(1.5)  # the scheduler writes its clocks once a second
        clocks_before, start_s = json.loads(clocks.read_text()), time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(CONVERSATION_COUNT) as pool:
            answers = []
            for number in range(REQUESTS_PER_S * seconds):
                time.sleep(max(0.0, start_s + number / REQUESTS_PER_S - time.monotonic()))
                conversation = conversations[number % CONVERSATION_COUNT]
                conversation.append(rng.randrange(1000, 40000))
                answer = pool.submit(send_prompt, server.url, list(conversation))
                answers.append((len(conversation), answer))
            cached_tokens = sum(answer.result() for _, answer in answers)
        took_s = time.monotonic() - start_s
        time.sleep(1.5)
        clocks_after = json.loads(clocks.read_text())
    hook_s = {
        key: row["seconds"] - clocks_before["hooks"].get(key, {"seconds": 0.0})["seconds"]
        for key, row in clocks_after["hooks"].items()
    }
    hooks = {key: {"seconds": s} for key, s in hook_s.items()}
    window_clocks = {"hooks": hooks, "thread_s": took_s}
    return {
        "requests": len(answers),
        "seconds": round(took_s, 1),
        "rate": round(len(answers) / took_s, 2),
        "cached": round(cached_tokens / sum(length for length, _ in answers), 4),
        "thread": round((clocks_after["thread_s"] - clocks_before["thread_s"]) / took_s, 4),
        "hooks": thread_share(window_clocks),
        "tree": thread_share(window_clocks, TREE_PREFIX),
        "longest_ms": round(1e3 * longest_call_s(clocks_after), 2),
        "by_hook": {
            key: round(value / took_s, 5)
            for key, value in sorted(hook_s.items(), key=lambda pair: -pair[1])[:12]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=RESULT_FILE)
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", MODEL)
        counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        change_config(
            Path(folder) / "model", **dict.fromkeys(counts, 1), hidden_size=32, intermediate_size=64
        )
        for name in ARMS:
            rows[name] = measure_arm(name, args.seconds, Path(folder))
            print(name, json.dumps(rows[name], indent=1), flush=True)
    args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
