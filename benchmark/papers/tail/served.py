"""T-LRU on real servers: SGLang's own ``lru`` and ``tlru`` beside ``canopy-tlru`` and ``etlru``.

    python benchmark/papers/tail/served.py --model MODEL --out OUT

The stochastic model's requests at 1/8 of their lengths, in slices; all servers are up at the same
time and take each slice in turns, in another order each time, since a machine's speed drifts. Not
part of run.py: it starts servers and its times are the machine's.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.driver import distinct_blocks
from canopy_lab.sim.hindsight.future import Future
from sglang_canopy.bench_serving import replay
from tail.birth_death import birth_death

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "traces"))
from synthetic.trace import synthesise, to_bailian

from launch_server import cpu_arguments, free_port, serving

SCALE = Fraction(1, 8)
RESULT = Path(__file__).parents[1] / "results" / "tail" / "served.json"
CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


def arms(threshold: int, growth: int, block: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Value and configuration of ``--radix-eviction-policy``, by name."""
    own = {"block_tokens": block, "quantum_tokens": block, "threshold_tokens": threshold}
    return {
        "SGLang's lru": ("lru", {}),
        "SGLang's tlru": ("tlru", {"threshold": threshold, "next_prompt_estimate": growth}),
        "canopy-tlru": ("canopy-tlru", own),
        "etlru": ("etlru", own),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M")
    parser.add_argument("--out", type=Path, required=True, help="folder for slices and logs")
    parser.add_argument("--seconds", type=float, default=400.0, help="of the trace")
    parser.add_argument("--slices", type=int, default=6)
    parser.add_argument("--capacity", type=float, default=0.2, help="pool, of distinct tokens")
    parser.add_argument("--threshold", type=int, default=1000, help="tokens, before scaling")
    parser.add_argument("--arms", nargs="+", help="of the four, these alone")
    parser.add_argument("--starts", type=int, default=2, help="servers that start at a time")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    drawn = list(synthesise(birth_death(), given.seconds, 1))
    trace = [d.request for d in drawn]
    block = max(1, round(trace[0].block_tokens * SCALE))
    pool = round(given.capacity * distinct_blocks(trace)) * block
    growth = round(Future(trace).mean_growth_tokens * SCALE)
    chosen = arms(round(given.threshold * SCALE), growth, block)
    chosen = {name: chosen[name] for name in given.arms or chosen}
    slices = []
    for number, part in enumerate(np.array_split(np.arange(len(drawn)), given.slices)):
        path = given.out / f"slice-{number}.jsonl"
        first = trace[part[0]].time_s
        rows = [
            drawn[i]._replace(request=replace(trace[i], time_s=round(trace[i].time_s - first, 3)))
            for i in part
        ]
        path.write_text("".join(to_bailian(row) + "\n" for row in rows))
        slices.append(path)

    with ExitStack() as stack, ThreadPoolExecutor(given.starts) as pool_of_starts:

        def start(name: str) -> str:
            policy, config = chosen[name]
            arguments = cpu_arguments(given.model, kv_tokens=pool)
            arguments += ["--radix-eviction-policy", policy, "--canopy-enable-forced-output"]
            if config:
                arguments += ["--radix-eviction-policy-config", json.dumps(config)]
            server = serving(
                arguments,
                log=given.out / f"{policy}.log",
                port=free_port(),
                environment={CORE: "python"},
                deadline_s=600.0,
            )
            return stack.enter_context(server).url

        urls = dict(zip(chosen, pool_of_starts.map(start, chosen), strict=True))
        rows = []
        for number, path in enumerate(slices):
            names = list(urls)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                result = replay(
                    "bailian", str(path), urls[name], "replay", tokenizer=str(given.model),
                    time_scale=0.0, trace_clock=True, scale_lengths=SCALE, max_concurrency=1,
                    tag=name,
                )  # fmt: skip
                overall = result["overall"]
                rows.append(
                    {
                        "slice": number,
                        "arm": name,
                        "requests": overall["requests"],
                        "errors": result["errors"]["count"],
                        "prompt_tokens": overall["prompt_tokens"],
                        "cached_tokens": overall["cached_tokens"],
                        "ttft_ms": {k: round(v, 1) for k, v in overall["ttft_ms"].items()},
                        "uncached": overall["uncached_tokens"],
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    set_up = {"pool_tokens": pool, "threshold_tokens": round(given.threshold * SCALE)}
    RESULT.write_text(json.dumps({**set_up, "growth": growth, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
