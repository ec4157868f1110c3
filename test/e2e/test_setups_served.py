"""Set-ups of SGLang that a server is started in every day: the text is that of its own policy."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.prompts import token_ids

PAGE = 64
POOL = 1280
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOGETHER = (
    *("--page-size", str(PAGE), "--chunked-prefill-size", "128", "--enable-mixed-chunk"),
    *("--enable-priority-scheduling", "--disable-priority-preemption"),
    *("--max-running-requests", "4"),
)

ENGINE = """
import json, pathlib, os, sys, time, sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=2048,
        disable_overlap_schedule=True, radix_eviction_policy=sys.argv[2], enable_cache_report=True,
    )
    said, cached = [], []
    for prompt in json.loads(sys.stdin.read()):
        answer = engine.generate(
            input_ids=prompt,
            sampling_params={
                "temperature": 0, "max_new_tokens": 6, "ignore_eos": True,
                "custom_params": {"canopy_category": "agent", "canopy_turn": 2},
            },
        )
        said.append(answer["output_ids"])
        cached.append(answer["meta_info"]["cached_tokens"])
    written = pathlib.Path(os.environ["CANOPY_STATUS_DIR"], "rank-0.json")
    while sys.argv[2] == "wa" and sum(  # it is written once a second
        row["requests"] for row in json.loads(written.read_text())["categories"]
    ) < len(said):
        time.sleep(0.1)
    print("ANSWERS " + json.dumps([said, cached]), flush=True)
    engine.shutdown()
"""


def answers(client: Any) -> tuple[list[Any], int]:
    """Return the answers to three rounds of prompts with shared prefixes, and the cached tokens."""
    heads = [token_ids(300, seed) for seed in (1, 2, 3)]
    jobs = [
        {
            "input_ids": heads[number % 3] + token_ids(40 + 30 * number, 50 + number),
            "priority": number % 2,
        }
        for number in range(6)
    ]
    with ThreadPoolExecutor(4) as pool:
        rounds = [list(pool.map(lambda job: ask(client, job, 8), jobs)) for _ in range(3)]
    shaped = [
        client.post(
            "/generate",
            {
                "text": f"Describe person number {number} as JSON: ",
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": 40,
                    "json_schema": json.dumps(SCHEMA),
                },
            },
        )
        for number in (1, 2, 1)
    ]
    for answer in shaped:
        assert answer["text"].lstrip().startswith("{")
    every = [answer for one in rounds for answer in one] + shaped
    found = sum(answer["meta_info"]["cached_tokens"] for answer in every)
    return [answer["text"] for answer in every], found


def evicted(metrics: str) -> float:
    """Tokens that left the device."""
    rows = [line for line in metrics.splitlines() if "canopy" in line and "evicted_tokens" in line]
    return sum(float(row.split()[-1]) for row in rows if 'tier="device"' in row)


def ask(client: Any, job: dict[str, Any], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return client.post("/generate", {**job, "sampling_params": sampling})


@pytest.mark.long
def test_chunks_mixed_batches_pages_of_64_priorities_and_schemas(server, smollm2) -> None:
    """All at once, with the overlap schedule, in a pool that evicts."""
    said, found = {}, {}
    for policy in ("lru", "wa"):
        options = {"kv_tokens": POOL, "overlap": True}
        with server(smollm2, "--radix-eviction", policy, *TOGETHER, **options) as client:
            said[policy], found[policy] = answers(client)
            if policy == "wa":
                metrics = client.get("/metrics")
            assert "Traceback" not in client.server.log_text()
    assert said["wa"] == said["lru"]
    assert min(found.values()) > 0, found
    assert evicted(metrics) > PAGE


@pytest.mark.long
def test_an_engine_in_python_stamps_learns_and_answers_as_under_lru(smollm2, tmp_path) -> None:
    """``sglang.Engine`` has no HTTP; fields come in ``custom_params``."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    heads = [token_ids(300, seed) for seed in (1, 2, 3)]
    prompts = [heads[number % 3] + token_ids(60, 50 + number) for number in range(9)]
    results = {}
    for policy in ("lru", "wa"):
        status = tmp_path / policy
        status.mkdir()
        done = subprocess.run(
            [sys.executable, str(script), str(smollm2), policy],
            input=json.dumps(prompts),
            env={**os.environ, "CANOPY_STATUS_DIR": str(status)},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        (line,) = [one for one in done.stdout.splitlines() if one.startswith("ANSWERS ")] or [""]
        assert line, done.stdout[-2000:] + done.stderr[-3000:]
        results[policy] = json.loads(line.removeprefix("ANSWERS "))
    assert results["wa"][0] == results["lru"][0]
    assert all(found >= 300 for found in results["wa"][1][3:6]), results["wa"][1]
    shown = json.loads((tmp_path / "wa" / "rank-0.json").read_text())
    served = {row["category"].split("/")[0]: row["requests"] for row in shown["categories"]}
    assert sum(n for name, n in served.items() if name.startswith("agent")) == len(prompts), served
