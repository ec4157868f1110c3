"""Many requests against a pool far too small: does anything break, leak or change the text?

    python benchmark/eviction/soak.py --requests 1000

Serves a two-layer random model (``--model DIR`` for another) with ``--radix-eviction POLICY``
and a KV pool of a tenth of the working set, sends multi-turn conversations at concurrency 8,
then sends a sample of the prompts to a server without a cache. Prints one JSON object and
exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def ask(url: str, prompt: list[int], tokens: int, custom: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return post(
        f"{url}/generate",
        {"input_ids": prompt, "sampling_params": {**sampling, "custom_params": custom}},
    )


def used_tokens(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.findall(
            r"^sglang:num_used_tokens\{.*\} ([\d.e+]+)$", answer.read().decode(), re.M
        )
    return sum(map(float, found))


def conversations(requests: int, turns: int, seed: int) -> list[list[dict[str, Any]]]:
    """Prompts of growing conversations; a third of them share a system prompt."""
    draw = random.Random(seed)
    shared = [draw.randrange(100, 40_000) for _ in range(96)]
    made = []
    for number in range(requests // turns):
        tokens = list(shared) if number % 3 == 0 else []
        kind = ("chat", "agent", "batch")[number % 3]
        conversation = []
        for turn in range(1, turns + 1):
            tokens = tokens + [draw.randrange(100, 40_000) for _ in range(draw.randrange(30, 90))]
            custom = {
                "canopy_category": kind,
                "canopy_turn": turn,
                "canopy_conversation": f"c{number}",
                "canopy_stop": "tool" if kind == "agent" else "end",
            }
            conversation.append({"prompt": tokens, "custom": custom})
        made.append(conversation)
    return made


def soak(arguments: argparse.Namespace, model: Path, log: Path) -> dict[str, Any]:
    talks = conversations(arguments.requests, arguments.turns, arguments.seed)
    working_set = sum(len(talk[-1]["prompt"]) for talk in talks)
    pool = max(1024, working_set // 10)
    base = cpu_arguments(model, kv_tokens=pool, dtype="float32")
    if not (model / "model.safetensors").exists():
        base += ["--load-format", "dummy"]
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    errors: list[str] = []

    def talk_through(number: int, bar: tqdm) -> None:
        for turn, step in enumerate(talks[number]):
            try:
                answers[number, turn] = ask(url, step["prompt"], arguments.tokens, step["custom"])
            except OSError as error:
                errors.append(f"conversation {number}, turn {turn + 1}: {error}")
            bar.update()

    served = [*base, "--radix-eviction", arguments.policy]
    with serving(served, log=log / "cached.log", port=free_port(), describe="server") as server:
        url = server.url
        before = used_tokens(url)
        with (
            tqdm(total=sum(map(len, talks)), unit="request", desc=arguments.policy) as bar,
            concurrent.futures.ThreadPoolExecutor(arguments.concurrency) as pool_of_clients,
        ):
            list(pool_of_clients.map(lambda n: talk_through(n, bar), range(len(talks))))
        post(f"{url}/flush_cache?timeout=20", {})
        ask(url, [1, 2, 3], 1, {})  # the metric is written with the next batch
        post(f"{url}/flush_cache?timeout=20", {})
        ask(url, [1, 2, 3], 1, {})
        after = used_tokens(url)
        logged = [
            line for line in server.log_text().splitlines() if re.search(r"leak|Traceback", line)
        ]

    sample = random.Random(0).sample(sorted(answers), min(arguments.sample, len(answers)))
    different = []
    with serving(
        [*base, "--disable-radix-cache"], log=log / "plain.log", port=free_port(), describe="plain"
    ) as server:
        for number, turn in tqdm(sample, unit="prompt", desc="same text without a cache"):
            step = talks[number][turn]
            plain = ask(server.url, step["prompt"], arguments.tokens, {})
            if plain["output_ids"] != answers[number, turn]["output_ids"]:
                different.append([number, turn])
    cached = sum(a["meta_info"]["cached_tokens"] for a in answers.values())
    asked = sum(a["meta_info"]["prompt_tokens"] for a in answers.values())
    return {
        "policy": arguments.policy,
        "requests": len(answers),
        "concurrency": arguments.concurrency,
        "working_set_tokens": working_set,
        "pool_tokens": pool,
        "token_hit_ratio": round(cached / asked, 4) if asked else None,
        "errors": errors,
        "used_tokens_before": before,
        "used_tokens_after_flush": after,
        "log_lines_of_leaks_or_tracebacks": logged,
        "texts_compared": len(sample),
        "texts_different": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="output tokens a request")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--sample", type=int, default=50, help="prompts compared without a cache")
    parser.add_argument("--policy", default="wa")
    parser.add_argument("--model", type=Path, help="default: two layers, random weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if model is None:
            from tiny_model import write_tiny_model

            model = Path(scratch) / "tiny"
            write_tiny_model(model, MODEL)
        result = soak(arguments, model, Path(scratch))
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    leaked = result["used_tokens_after_flush"] > result["used_tokens_before"] + 8
    wrong = result["errors"] or result["texts_different"] or leaked
    return 1 if wrong or result["log_lines_of_leaks_or_tracebacks"] else 0


if __name__ == "__main__":
    sys.exit(main())
