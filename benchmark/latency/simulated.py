"""TTFT under load, simulated: the gains of eviction, order, gate and copies.

A question is a workload, a profile, a seed and a size of the host tier. Its loads are shares of the
saturation of SGLang's defaults, which it measures first. Arms are in arms.py.

Workloads, 2,000 requests or fewer each: `conversation` and `synthetic` are Mooncake's traces,
stretched to the load, a turn no earlier than the previous answer; a seed is another window of
the first, and other starts of the conversations of the second. `agentic` is 50 conversations of
the agentic archive in a closed loop, chosen by the seed; sub-agents included. Its load is the rate of
new sessions. `pauses` is the conversation trace with pauses ten times as long, `mix` half of its
requests together with agents that begin in the same time. `unseen-conversation` and
`unseen-synthetic` are windows of the first two that no constant was chosen on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shared_traces import agents as overlay_agents
from shared_traces import mooncake

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, load_profile
from canopy_lab.sim.system.loads import LoadedSystem, LoadRun
from canopy_lab.trace.record import TraceRequest
from latency.arms import ARMS, UNSEEN_WORKLOADS, SystemArm
from question import Question, QuestionRun

REQUEST_COUNT = 2000
AGENT_SESSIONS, MIX_SESSIONS = 50, 20
PAUSE_FACTOR = 10.0
"""Factor of the gaps between turns in `pauses`."""
BLOCK_TOKENS = 64
"""Block size of a mix, which is that of the agents' traces."""
LOADS = (0.6, 0.8, 0.95, 1.1)
SEEDS = (0, 1, 2)
UNSEEN_WINDOWS = dict(zip(UNSEEN_WORKLOADS, (("conversation", 3000), ("synthetic", 2500))))
"""Workload -> Mooncake's trace and its first request."""
WORKLOADS = ("conversation", "synthetic", "agentic", "pauses", "mix", *UNSEEN_WORKLOADS)
DEVICE_TOKENS = {"qwen2.5-7b-h100": 1_000_000, "llama-3.1-8b-h100": 400_000}
"""Profile -> tokens that about 55 GB of KV hold."""
MAX_REQUEST_TOKENS = {"llama-3.1-8b-h100": 131_072}
"""Profile -> tokens of the longest agentic request: the model's context, where the device does
not hold the trace's longest."""


@dataclass(frozen=True)
class SystemRuns:
    """The runs that answer one question: all arms at all loads."""

    workload: str
    profile: str
    seed: int
    host_ratio: float

    @property
    def key(self) -> str:
        return f"{self.workload}-{self.profile}-{self.seed}-host{self.host_ratio:g}"

    @property
    def arms(self) -> list[SystemArm]:
        return [a for a in ARMS if a.host_ratio == self.host_ratio and self.workload in a.workloads]


def all_system_runs() -> list[SystemRuns]:
    """Return the runs of all questions, every workload before the next seed."""
    hosts = sorted({arm.host_ratio for arm in ARMS})
    return [
        SystemRuns(workload, profile, seed, host)
        for seed, host, profile, workload in itertools.product(
            SEEDS, hosts, DEVICE_TOKENS, WORKLOADS
        )
        if workload not in UNSEEN_WORKLOADS or seed == host == 0
    ]


def trace_of(
    workload: str, seed: int, folder: Path, limit_tokens: int | None = None
) -> list[TraceRequest]:
    """Return a workload's requests. An agent's session ends before its first request of more than
    ``limit_tokens`` tokens."""
    if workload == "agentic":
        requests_of_agents = agents(AGENT_SESSIONS, seed, folder, limit_tokens)
        return list(itertools.islice(requests_of_agents, REQUEST_COUNT))
    if workload == "synthetic":
        requests = mooncake(folder, "synthetic", REQUEST_COUNT)
        return requests if seed == 0 else exchange_starts(requests, seed)
    if workload in UNSEEN_WORKLOADS:
        name, skipped = UNSEEN_WINDOWS[workload]
        return mooncake(folder, name, REQUEST_COUNT, skipped)
    if workload == "mix":
        chat = conversation_window(seed, REQUEST_COUNT // 2, folder)
        return merge_by_time(chat, agents(MIX_SESSIONS, seed, folder, limit_tokens))[:REQUEST_COUNT]
    requests = conversation_window(seed, REQUEST_COUNT, folder)
    return with_pauses(requests, PAUSE_FACTOR) if workload == "pauses" else requests


def agents(
    sessions: int, seed: int, folder: Path, limit_tokens: int | None
) -> Iterator[TraceRequest]:
    requests = overlay_agents(folder, sessions, 3600.0, seed)
    return iter(requests) if limit_tokens is None else drop_longer(requests, limit_tokens)


def conversation_window(seed: int, count: int, folder: Path) -> list[TraceRequest]:
    return mooncake(folder, "conversation", count, 1400 * seed)


def drop_longer(requests: Iterable[TraceRequest], limit_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests of each session before its first request with more than ``limit_tokens`` tokens."""
    dropped_users: set[str | None] = set()
    for request in requests:
        if request.input_tokens + request.output_tokens > limit_tokens:
            dropped_users.add(request.user)
        if request.user not in dropped_users:
            yield request


def exchange_starts(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Exchange the start times of conversations; gaps between turns stay."""
    starts: dict[str | None, float] = {}
    for request in requests:
        starts.setdefault(request.conversation, request.time_s)
    start_times = list(starts.values())
    random.Random(seed).shuffle(start_times)
    new_starts = dict(zip(starts, start_times, strict=True))
    exchanged = [
        replace(r, time_s=r.time_s - starts[r.conversation] + new_starts[r.conversation])
        for r in requests
    ]
    return sorted(exchanged, key=lambda r: r.time_s)


def with_pauses(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the conversations with the same starts, and gaps between turns ``factor`` times as long."""
    starts: dict[str | None, float] = {}
    moved = []
    for request in requests:
        start = starts.setdefault(request.conversation, request.time_s)
        moved.append(replace(request, time_s=start + factor * (request.time_s - start)))
    return sorted(moved, key=lambda r: r.time_s)


def merge_by_time(
    chat: Sequence[TraceRequest], agents: Iterable[TraceRequest]
) -> list[TraceRequest]:
    """Return both by time. Agents' sessions start within the time of the chat; their gaps stay."""
    agent_requests = list(agents)
    starts: dict[str | None, float] = {}
    for request in agent_requests:
        starts.setdefault(request.user, request.time_s)
    first_s, last_s = min(starts.values()), max(starts.values())
    shrink = (chat[-1].time_s - chat[0].time_s) / max(last_s - first_s, 1e-9)
    first_free_id = 1 + max(block for request in agent_requests for block in request.blocks)
    moved_agents = [
        replace(r, time_s=r.time_s - starts[r.user] + shrink * (starts[r.user] - first_s))
        for r in agent_requests
    ]
    moved_chat = [
        replace(_reblock(r, first_free_id), time_s=r.time_s - chat[0].time_s, user=r.conversation)
        for r in chat
    ]
    return sorted([*moved_chat, *moved_agents], key=lambda r: r.time_s)


def _reblock(request: TraceRequest, first_id: int) -> TraceRequest:
    """Return the request in blocks of ``BLOCK_TOKENS``, with ids from ``first_id`` on."""
    parts = request.block_tokens // BLOCK_TOKENS
    blocks = [first_id + block * parts + part for block in request.blocks for part in range(parts)]
    full_blocks = -(-request.input_tokens // BLOCK_TOKENS)
    return replace(request, blocks=tuple(blocks[:full_blocks]), block_tokens=BLOCK_TOKENS)


def make_config(arm: SystemArm, runs: SystemRuns, kv_bytes: int) -> SystemConfig:
    """Return an arm's configuration."""
    settings: dict[str, Any] = {
        "device_tokens": DEVICE_TOKENS[runs.profile],
        "fixed_outputs": True,  # as in replays and in all previous runs
        **arm.settings,
    }
    if arm.host_ratio:
        profile = load_profile(runs.profile)
        assert profile.host is not None
        settings["host"] = TierSpec(
            arm.host_ratio * settings["device_tokens"] * kv_bytes,
            profile.host.read_bytes_per_s,
            profile.host.write_bytes_per_s,
            policy=settings.get("device_policy", "lru"),
            policy_config=settings.get("device_policy_config", {}),
        )
    return SystemConfig(**settings)


def measure_runs(run: QuestionRun, runs: SystemRuns) -> dict[str, Any]:
    """Return the saturation, and the figures of every arm at every load."""
    limit_tokens = MAX_REQUEST_TOKENS.get(runs.profile)
    requests = trace_of(runs.workload, runs.seed, run.data_folder, limit_tokens)
    workload = Workload(CompactTrace(requests), seed=runs.seed)
    profile = load_profile(runs.profile)
    loop = "closed" if runs.workload == "agentic" else "turns-wait"

    def system_of(arm: SystemArm) -> LoadedSystem:
        configuration = make_config(arm, runs, profile.kv_bytes_per_token)
        return LoadedSystem(workload, configuration, profile, loop=loop, logged_times=True)

    saturation = system_of(runs.arms[0]).saturation(runs.seed)
    figures = {
        f"{arm.key}@{load:g}": stored_figures(system_of(arm).run_at(load * saturation, runs.seed))
        for arm, load in itertools.product(runs.arms, LOADS)
    }
    length = {"requests": REQUEST_COUNT, "sessions": AGENT_SESSIONS}
    return {"length": length, "saturation": saturation, "runs": figures}


def stored_figures(run: LoadRun) -> dict[str, float]:
    """Return the stored figures of a run, four digits each."""
    latency, system = run.latency, run.system
    values = {
        "mean": latency.ttft_s.mean,
        "p50": latency.ttft_s.p50,
        "p95": latency.ttft_s.p95,
        "p99": latency.ttft_s.p99,
        "max": latency.ttft_s.max,
        "shortest_mean": latency.deciles[0].ttft_s.mean,
        "longest_mean": latency.deciles[-1].ttft_s.mean,
        "longest_p99": latency.deciles[-1].ttft_s.p99,
        "sessions_per_hour": latency.sessions_per_hour,
        "session_p99": latency.session_s.p99,
        "hits": system.token_hit_ratio,
        **{f"saved_{tier}": s for tier, s in system.prefill_s_saved_by_tier.items()},
    }
    return {key: float(f"{value:.4g}") for key, value in values.items()}


QUESTIONS = tuple(
    Question(f"simulated/{runs.key}", "TTFT by arm and load", partial(measure_runs, runs=runs), 5)
    for runs in all_system_runs()
)
