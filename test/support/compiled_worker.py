# ruff: noqa: E402
"""Simulate on many set-ups, compiled or not, and print what came of it as JSON.

Run as a process of its own, since a process has the modules either way for good.
"""

import json
import random
import sys
import types
from dataclasses import asdict, dataclass

from canopy_lab.compiled.finder import use

wanted = "compiled" in sys.argv
assert use() is wanted, f"compiled: {not wanted}"

from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import SystemConfig, TierSpec, simulate_system
from canopy_lab.sim.system import tree as simulated_tree
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.sim.system.queue_order import QUEUE_ORDERS
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy import registry
from sglang_canopy.policy.ranked import RankedPolicy

assert simulated_tree.__file__.endswith(".so") is wanted

PROFILE = load_profile("llama-3.1-8b-a100")
SIZE = 64
BYTES = PROFILE.kv_bytes_per_token


class Newest(RankedPolicy):
    """Plain Python, as a user's would be: the leaf used last goes first."""

    name = "newest"

    @dataclass(frozen=True)
    class Config:
        pass

    def rank(self, leaf):
        return -leaf.last_access


module = types.ModuleType("sglang_canopy.policy.newest")
module.POLICY = Newest
sys.modules[module.__name__] = module
registry._MODULES["newest"] = module.__name__


def trace(requests=400):
    """Conversations that grow, documents that many ask about, and questions asked once."""
    draw, at = random.Random(7), 0.0
    turns: dict[int, list[int]] = {}
    fresh = iter(range(10**6, 10**7))
    for _ in range(requests):
        at += draw.expovariate(3.0)
        who = draw.randrange(40)
        if draw.random() < 0.3:
            blocks = [*range(1000 * (who % 5), 1000 * (who % 5) + 40), next(fresh)]
            conversation, turn = None, 1
        else:
            turns.setdefault(who, [])
            turns[who] += [next(fresh) for _ in range(draw.randrange(1, 12))]
            blocks, conversation, turn = list(turns[who]), str(who), len(turns[who])
        yield TraceRequest(
            time_s=at, input_tokens=len(blocks) * SIZE - draw.randrange(SIZE),
            output_tokens=draw.randrange(1, 90), blocks=tuple(blocks), block_tokens=SIZE,
            conversation=conversation, turn=turn, category=draw.choice(["chat", "agent", "tool"]),
        )  # fmt: skip


def tier(blocks, **fields):
    given = {"read_bytes_per_s": 4e9, "write_bytes_per_s": 2e9, **fields}
    return TierSpec(capacity_bytes=blocks * SIZE * BYTES, **given)


POLICIES = registry.policy_names()
SETUPS = {
    **{f"device, {name}": {"device_policy": name} for name in POLICIES},
    **{f"host, {name}": {"host": tier(900, policy=name), "device_policy": name} for name in POLICIES},
    **{f"order, {name}": {"schedule_policy": name} for name in QUEUE_ORDERS},
    **{
        f"disk, {prefetch}, pages of {page}": {
            "host": tier(700), "disk": tier(4000, read_bytes_per_s=1e9, write_bytes_per_s=3e8, latency_s=1e-4, shared_channel=True),
            "prefetch_policy": prefetch, "page_tokens": page,
        }
        for prefetch in ("best_effort", "timeout", "wait_complete")
        for page in (1, 64)
    },
    "write_back, a TTL": {"host": tier(700), "disk": tier(3000, ttl=40.0), "write_policy": "write_back"},
    "selective, two instances": {"host": tier(500), "write_policy": "write_through_selective", "instances": 2, "routing": "prefix-aware"},
    "gate, turns wait": {"session_gate": "footprint"},
    "whole nodes": {"whole_nodes": True, "host": tier(500)},
}  # fmt: skip


def plain(value):
    return value.tolist() if hasattr(value, "tolist") else value


def plan_rows():
    """A plan's inputs that have been used, sent to two processes, as a second search does."""
    work = PlanInputs(
        CompactTrace(trace(150)), Engine(PROFILE, 900 * SIZE), load_prices("aws-us-east-1")
    )
    work.served()
    with Evaluator(work, jobs=2) as evaluate:
        rows = evaluate([Configuration(), Configuration(dram_gib=4.0)])
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def main():
    records, found = list(trace()), {}
    for name, fields in SETUPS.items():
        config = SystemConfig(
            device_tokens=900 * SIZE, max_running=32, quantum_tokens=SIZE, **fields
        )
        result = simulate_system(records, config, PROFILE, turns_wait="turns wait" in name)
        row = {k: plain(v) for k, v in asdict(result).items() if k != "seconds"}
        found[name] = row
    found["a plan"] = plan_rows()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
