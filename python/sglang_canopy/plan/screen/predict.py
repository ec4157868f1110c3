"""Rows of configurations that nobody has simulated, from hits and a replayed queue."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_canopy.plan.objective import Metric
from sglang_canopy.plan.screen.hits import found_blocks, paths_of
from sglang_canopy.plan.screen.replay import CostTables, Queued, Replayed, Tiers, replay
from sglang_canopy.plan.space import Configuration
from sglang_canopy.plan.system import row_of, system_of
from sglang_canopy.plan.worker import PlanInputs
from sglang_canopy.sim.system.config import SystemConfig, TierSpec
from sglang_canopy.sim.system.routing import Router

PREDICTED = frozenset(
    (
        "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "throughput_tokens_per_s",
        "token_hit_ratio", "cost", "cost_per_hour",
    )
)  # fmt: skip
"""Metrics that a predicted row has, by key."""
_CELLS = 10_000_000
"""Requests times configurations that are replayed side by side."""
_QUANTILES = {"p50_ttft_s": 50, "p90_ttft_s": 90, "p99_ttft_s": 99}


def can_predict(c: Configuration, metrics: Sequence[Metric] = ()) -> bool:
    """Whether ``Predictor`` knows the policies of ``c``, and ``metrics``: LRU without TTLs, copied
    to the host at once, first come, first served. The others are simulated in full."""
    plain = Configuration()
    same = all(
        getattr(c, name) == getattr(plain, name)
        for name in ("ttl", "device_policy", "host_policy", "disk_policy", "write_policy",
                     "schedule_policy")
    )  # fmt: skip
    return same and all(m.key in PREDICTED for m in metrics)


class Predictor:
    """Predicts on one trace. Rows have the keys of ``PREDICTED``, and those that their cost needs."""

    def __init__(self, work: PlanInputs) -> None:
        self._work = work
        self._served = work.served()
        self._kv = float(work.engine.profile.kv_bytes_per_token)
        self._paths = paths_of(self._served)
        trace = self._served.trace
        self._prompts = np.array([max(r.input_tokens, 1) for r in trace])
        self._outputs = np.array([max(r.output_tokens, 1) for r in trace])
        self._arrivals = np.array(self._served.times)
        self._tables = CostTables(work.engine.profile, self._prompts)
        self._routes: dict[int, NDArray[np.int64]] = {}

    def __call__(self, configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
        """A row for each, in order."""
        rows: list[dict[str, Any]] = [{}] * len(configurations)
        for instances in sorted({c.instances for c in configurations}):
            at = [i for i, c in enumerate(configurations) if c.instances == instances]
            # Each instance replays its own requests: a pass is as wide as memory allows, since its
            # time hardly depends on the width.
            step = max(64, _CELLS * instances // max(len(self._prompts), 1))
            for begin in range(0, len(at), step):
                part = at[begin : begin + step]
                found = self._some([configurations[i] for i in part], instances)
                for i, row in zip(part, found):
                    rows[i] = row
        return rows

    def _some(self, some: Sequence[Configuration], instances: int) -> list[dict[str, Any]]:
        work, kv = self._work, self._kv
        configs = [system_of(c, work.engine, work.prices, {}) for c in some]
        where = self._routed(instances)
        served = [np.flatnonzero(where == n) for n in range(instances)]
        shared = np.array([c.disk is not None and not c.disk_per_instance for c in configs])
        span = max(float(np.ptp(self._arrivals)), 1e-9)
        fresh = float((self._prompts + self._outputs).sum()) / instances
        lookup = _Capacities(configs, kv, span, fresh, shared, instances)
        sizes = lookup.blocks(self._served.block_tokens)
        # What all instances share is looked up among all requests.
        every = found_blocks(self._paths, sizes) if shared.any() or instances == 1 else None
        ttft = np.zeros((len(self._prompts), len(some)), np.float32)
        hits = np.zeros((3, len(some)))
        written, end = np.zeros(len(some)), np.full(len(some), -math.inf)
        for mine in served:
            if not len(mine):
                continue
            own = every if instances == 1 else found_blocks(self._paths, sizes, mine)
            assert own is not None
            got = self._instance(mine, own, every, lookup)
            ttft[mine] = got.ttft
            hits += got.hits
            written += got.written
            end = np.maximum(end, got.end)
        return self._rows(some, ttft, hits, written, end - self._arrivals[0])

    def _instance(
        self,
        mine: NDArray[np.int64],
        own: NDArray[np.int32],
        every: NDArray[np.int32] | None,
        lookup: _Capacities,
    ) -> Replayed:
        size = self._served.block_tokens
        queued = Queued(self._arrivals[mine], self._prompts[mine], self._outputs[mine])
        device, host, disk = lookup.tokens(own[mine], size)
        if every is not None and lookup.shared.any():
            _, _, all_of = lookup.tokens(every[mine], size)
            disk = np.where(lookup.shared, all_of, disk)
        return replay(queued, lookup.tiers, device, host, disk, self._tables, mine)

    def _rows(
        self,
        some: Sequence[Configuration],
        ttft: NDArray[np.float32],
        hits: NDArray[np.float64],
        written: NDArray[np.float64],
        span: NDArray[np.float64],
    ) -> list[dict[str, Any]]:
        total = float(self._prompts.sum())
        served = total + float(self._outputs.sum())
        quantiles = np.percentile(ttft, list(_QUANTILES.values()), axis=0)
        means = ttft.mean(axis=0, dtype=np.float64)
        prices, kv = self._work.prices, self._kv
        rows = []
        for at, c in enumerate(some):
            share = hits[:, at] / total
            held = min(c.disk_gib * 2.0**30 * prices.disks_of(c.disk, c.instances), written[at] * kv) if c.disk else 0.0  # fmt: skip
            metrics = {
                "requests": len(ttft),
                "mean_ttft_s": float(means[at]),
                **{name: float(q[at]) for name, q in zip(_QUANTILES, quantiles)},
                "throughput_tokens_per_s": served / float(span[at]),
                "makespan_s": float(span[at]),
                "token_hit_ratio": float(share.sum()),
                "token_hit_ratio_by_tier": dict(zip(("device", "host", "disk"), share.tolist())),
                "mean_bytes_by_tier": {"disk": held},
                "disk_read_bytes": float(hits[2, at]) * kv,
                "disk_written_bytes": float(written[at]) * kv,
            }
            rows.append(row_of(c, metrics, prices, kv))
        return rows

    def _routed(self, instances: int) -> NDArray[np.int64]:
        """Which instance gets each request: the simulator's router, in front of instances whose
        answers take as long as they do alone."""
        if instances not in self._routes:
            work, profile = self._work, self._work.engine.profile
            stubs = [SimpleNamespace(requests=0, outstanding=0) for _ in range(instances)]
            router = Router(work.engine.routing, stubs, 0)  # type: ignore[arg-type]
            under_way: list[tuple[float, int, int]] = []
            found = []
            for i, now in enumerate(self._arrivals):
                while under_way and under_way[0][0] <= now:
                    _, instance, tokens = heapq.heappop(under_way)
                    stubs[instance].requests -= 1
                    stubs[instance].outstanding -= tokens
                request = SimpleNamespace(path=self._served.trace[i].blocks)
                chosen = router.choose(SimpleNamespace(request=request))  # type: ignore[arg-type]
                prompt, output = int(self._prompts[i]), int(self._outputs[i])
                took = profile.prefill_s(prompt) + output * profile.decode_s(8, prompt)
                heapq.heappush(under_way, (now + took, chosen, prompt + output))
                stubs[chosen].requests += 1
                stubs[chosen].outstanding += prompt + output
                found.append(chosen)
            self._routes[instances] = np.array(found)
        return self._routes[instances]


class _Capacities:
    """The tiers of some configurations in tokens, and what is looked up for each of them."""

    def __init__(
        self,
        configs: Sequence[SystemConfig],
        kv_bytes: float,
        span_s: float,
        fresh: float,
        shared: NDArray[np.bool_],
        instances: int,
    ) -> None:
        def tokens(tier: TierSpec | None) -> float:
            return 0.0 if tier is None else tier.capacity_bytes / kv_bytes

        def each(value: Any) -> NDArray[np.float64]:
            return np.array([value(c) for c in configs], float)

        self.shared = shared
        self.device = each(lambda c: c.device_tokens)
        host = each(lambda c: tokens(c.host))
        self.disk = each(lambda c: tokens(c.disk))
        part = np.where(shared, 1.0 / instances, 1.0) / kv_bytes
        reads = part * each(lambda c: c.disk.read_bytes_per_s if c.disk else math.inf)
        writes = part * each(lambda c: c.disk.write_bytes_per_s if c.disk else kv_bytes * 1e12)
        # With write-through the host has what the device has, and no less than that is found.
        self.host = np.maximum(host, self.device)
        # A disk that is too slow for all that is new refuses the rest, which then does not come to
        # the host either: what is there stays longer. What is used often is offered again.
        self.taken = np.minimum(1.0, (writes * span_s + host) / fresh)
        self.kept = np.maximum(host / self.taken, self.device)
        waits = {"best_effort": 0.0, "wait_complete": math.inf}
        self.tiers = Tiers(
            device=self.device,
            page=each(lambda c: c.page_tokens).astype(np.int64),
            chunk=each(lambda c: c.chunked_prefill_tokens),
            host_speed=each(lambda c: c.host.read_bytes_per_s / kv_bytes if c.host else math.inf),
            host=host,
            disk_read=reads,
            disk_write=writes,
            disk_shared=each(lambda c: c.disk is not None and c.disk.shared_channel) > 0,
            wait_base=each(lambda c: waits.get(c.prefetch_policy, c.prefetch_timeout_base_s)),
            wait_per_token=each(
                lambda c: (
                    0.0 if c.prefetch_policy in waits else c.prefetch_timeout_per_ki_token_s / 1024
                )
            ),
            running=each(lambda c: c.max_running),
            threshold=each(lambda c: c.prefetch_threshold_tokens).astype(np.int64),
        )
        self._all = np.unique(np.concatenate([self.device, self.host, self.kept, self.disk]))

    def blocks(self, block_tokens: int) -> NDArray[np.float64]:
        """The capacities that are looked up."""
        return self._all / block_tokens

    def tokens(
        self, found: NDArray[np.int32], block_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that device, host and disk hold of each prompt, shape (requests, configurations),
        from the blocks found for ``blocks``."""

        def at(capacity: NDArray[np.float64]) -> NDArray[np.int64]:
            return found[:, np.searchsorted(self._all, capacity)].astype(np.int64) * block_tokens

        host, disk = at(self.host), at(self.disk)
        slow = self.taken < 1
        if slow.any():
            share = (at(self.kept) * np.sqrt(self.taken)).astype(np.int64)
            host = np.where(slow, np.maximum(host, share), host)
            disk = np.where(slow, 0, disk)
        return at(self.device), host, disk
