"""Three tiers on a real server: equal answers, hits by tier, restarts and kills.

    python benchmark/tiers/live.py

Serves ``--prompts`` prompts of growing conversations (greedy, float32) first without
a cache, then twice on a server whose device and host are too small and whose disk holds all.
Stops that server, starts another on the same folder and repeats the prompts with empty memory; then kills servers (SIGKILL, all processes) in the middle of load and starts them again. Prints
one JSON object; exit status 1 if an answer differs, a start fails or a tier served nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import ServerProcess, cpu_arguments, free_port, post, serving

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
PAGE_TOKENS = 16
TIERS = ("device", "host", "storage")
DEVICE_TOKENS, HOST_RATIO, DISK_GB = 1024, 1.5, 8.0
KILL_COUNT, PROMPTS_AFTER_KILL = 3, 20
"""Kills under load, and prompts that are asked after each."""
SessionPrompt = dict[str, Any]


def make_prompts(count: int, seed: int, turns: int = 5) -> list[SessionPrompt]:
    """Conversations of ``turns`` turns, the turns of all of them mixed; a third share a head."""
    rng = random.Random(seed)
    shared_head = [rng.randrange(100, 40_000) for _ in range(96)]
    conversations: list[list[SessionPrompt]] = []
    for number in range(-(-count // turns)):
        tokens = list(shared_head) if number % 3 == 0 else []
        conversation = []
        for turn in range(1, turns + 1):
            tokens = tokens + [rng.randrange(100, 40_000) for _ in range(rng.randrange(30, 80))]
            labels = {
                "canopy_category": ("chat", "agent", "batch")[number % 3],
                "canopy_turn": turn,
                "canopy_conversation": f"c{number}",
            }
            conversation.append({"tokens": tokens, "labels": labels})
        conversations.append(conversation)
    mixed_prompts = []
    while any(conversations):
        conversation = rng.choice([t for t in conversations if t])
        mixed_prompts.append(conversation.pop(0))
    return mixed_prompts[:count]


def send(url: str, prompt: SessionPrompt, answer_tokens: int) -> tuple[list[int], Counter[str]]:
    """Send a prompt; return the answer's token ids, and the prompt's cached tokens by tier."""
    sampling = {"temperature": 0, "max_new_tokens": answer_tokens, "ignore_eos": True}
    body = {
        "input_ids": prompt["tokens"],
        "sampling_params": {**sampling, "custom_params": prompt["labels"]},
    }
    answer = post(f"{url}/generate", body)
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return answer["output_ids"], Counter({tier: details.get(tier, 0) for tier in TIERS})


def send_all(
    url: str, prompts: Sequence[SessionPrompt], tokens: int, label: str, concurrency: int = 2
) -> tuple[list[list[int]], Counter[str]]:
    hits: Counter[str] = Counter()
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        answers = list(
            tqdm(pool.map(lambda p: send(url, p, tokens), prompts), desc=label, total=len(prompts))
        )
    for _, by_tier in answers:
        hits += by_tier
    return [ids for ids, _ in answers], hits


class ServedSetup:
    """Arguments of the servers of a run."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        model: Path = MODEL,
        backend: str = "canopy",
        policy: str = "wa",
        write_policy: str = "write_through",
    ) -> None:
        self.base_arguments = cpu_arguments(model, kv_tokens=DEVICE_TOKENS, dtype="float32")
        self.base_arguments += ["--page-size", str(PAGE_TOKENS)]
        if not (model / "model.safetensors").exists():
            self.base_arguments += ["--load-format", "dummy"]
        storage: dict[str, Any] = {"prefetch_threshold": PAGE_TOKENS}
        if backend == "canopy":
            storage |= {"path": str(folder), "capacity_gb": DISK_GB}
        self.tier_arguments = [
            *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)),
            *("--hicache-storage-backend", backend),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-write-policy", write_policy),
            *("--hicache-storage-backend-extra-config", json.dumps(storage)),
            *("--radix-eviction", policy),
        ]
        self.environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
        self.logs = logs
        self.server_count = 0

    @contextlib.contextmanager
    def server(self, *arguments: str) -> Iterator[ServerProcess]:
        self.server_count += 1
        log = self.logs / f"server-{self.server_count}.log"
        with serving(
            [*self.base_arguments, *arguments],
            log=log,
            port=free_port(),
            environment=self.environment,
            describe=f"server {self.server_count}",
            deadline_s=900.0,
        ) as server:
            yield server


def flush_memory(url: str) -> None:
    """Wait for copies and writes, then flush the memory."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            post(f"{url}/flush_cache?timeout=20")
            return
        time.sleep(0.2)


def send_stored(
    url: str, prompts: Sequence[SessionPrompt], tokens: int, expected: list[list[int]]
) -> Any:
    """Send prompts with empty memory each time; return hits on disk and wrong answers."""
    hit_tokens = page_tokens = wrong_answers = 0
    last_turns: dict[str, SessionPrompt] = {}
    for prompt in prompts:
        last_turns[prompt["labels"]["canopy_conversation"]] = prompt
    by_prompt = {id(prompt): ids for prompt, ids in zip(prompts, expected)}
    for prompt in tqdm(last_turns.values(), desc="after the restart"):
        flush_memory(url)
        ids, by_tier = send(url, prompt, tokens)
        wrong_answers += ids != by_prompt[id(prompt)]
        hit_tokens += by_tier["storage"]
        page_tokens += (len(prompt["tokens"]) - 1) // PAGE_TOKENS * PAGE_TOKENS
    asked = {"asked": len(last_turns), "tokens": page_tokens}
    return {**asked, "from_storage": hit_tokens, "wrong": wrong_answers}


def kill_under_load(
    server: ServerProcess,
    prompts: Sequence[SessionPrompt],
    tokens: int,
    after_s: float,
    rng: random.Random,
) -> int:
    """Kill every process of ``server`` while it works. Returns its earlier answers."""
    stop, answer_count = threading.Event(), 0

    def send_load() -> None:
        nonlocal answer_count
        thread_rng = random.Random(rng.random())
        while not stop.is_set():
            with contextlib.suppress(OSError, ValueError):
                send(server.url, thread_rng.choice(prompts), tokens)
                answer_count += 1

    threads = [threading.Thread(target=send_load, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(after_s)
    os.killpg(server.process.pid, signal.SIGKILL)
    stop.set()
    for thread in threads:
        thread.join(30)
    return answer_count


def run_all(arguments: argparse.Namespace, folder: Path, logs: Path) -> dict[str, Any]:
    prompts = make_prompts(arguments.prompts, arguments.seed)
    tokens, rng = arguments.tokens, random.Random(arguments.seed)
    setup = ServedSetup(folder, logs, arguments.model, arguments.backend, arguments.policy)
    with setup.server("--disable-radix-cache") as server:
        expected, no_hits = send_all(server.url, prompts, tokens, "no cache")
    assert not +no_hits, no_hits
    result: dict[str, Any] = {"prompts": len(prompts), "backend": arguments.backend}
    with setup.server(*setup.tier_arguments) as server:
        first_ids, hits = send_all(server.url, prompts, tokens, "three tiers")
        order = list(range(len(prompts)))
        rng.shuffle(order)
        last_ids, last_hits = send_all(server.url, [prompts[i] for i in order], tokens, "and again")
        flush_memory(server.url)
        log = server.log_text()
    result["hits"] = {tier: (hits + last_hits)[tier] for tier in TIERS}
    result["prompt_tokens"] = 2 * sum(len(p["tokens"]) for p in prompts)
    result["wrong"] = sum(a != b for a, b in zip(first_ids, expected))
    result["wrong"] += sum(last_ids[k] != expected[i] for k, i in enumerate(order))
    result["tracebacks"] = log.count("Traceback")
    with setup.server(*setup.tier_arguments) as server:
        result["restart"] = send_stored(server.url, prompts, tokens, expected)
    result["kills"] = []
    sample = rng.sample(range(len(prompts)), min(PROMPTS_AFTER_KILL, len(prompts)))
    for _ in range(KILL_COUNT):
        after_s = rng.uniform(1.0, 5.0)
        with setup.server(*setup.tier_arguments) as server:
            answers_before = kill_under_load(server, prompts, tokens, after_s, rng)
        with setup.server(*setup.tier_arguments) as server:
            ids, hits = send_all(server.url, [prompts[i] for i in sample], tokens, "after a kill")
        wrong = sum(a != expected[i] for a, i in zip(ids, sample))
        result["kills"].append(
            {
                "after_s": round(after_s, 2),
                "answers_before": answers_before,
                "asked": len(sample),
                "wrong": wrong,
                "from_storage": hits["storage"],
            }
        )
    result["starts"] = setup.server_count
    return result


def has_passed(result: dict[str, Any]) -> bool:
    restart = result["restart"]
    return (
        not result["wrong"]
        and not restart["wrong"]
        and all(result["hits"].values())
        and restart["from_storage"] >= 0.95 * restart["tokens"]
        and not any(kill["wrong"] for kill in result["kills"])
        and not result["tracebacks"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--policy", default="wa")
    parser.add_argument("--backend", default="canopy", help="or file, SGLang's own")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "disk"
        folder.mkdir(mode=0o700)
        result = run_all(arguments, folder, Path(scratch))
    print(json.dumps(result, indent=2))
    return 0 if has_passed(result) else 1


if __name__ == "__main__":
    sys.exit(main())
