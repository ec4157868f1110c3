"""A trace as each instance gets it, replayed on many configurations side by side."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from canopy_lab.plan.screen.capacities import Capacities
from canopy_lab.plan.screen.hits import found_blocks, paths_of
from canopy_lab.plan.screen.replay import CostTables, Queued, Replayed, replay
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.system import system_of
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.system.routing import Router
from canopy_lab.trace.record import TraceRequest


@dataclass(frozen=True, slots=True)
class Part:
    """Configurations of so many instances, and the one whose requests are replayed."""

    configurations: tuple[Configuration, ...]
    instances: int
    number: int
    """From 0."""


def replay_part(work: PlanInputs, part: Part) -> tuple[NDArray[np.int64], Replayed | None]:
    """The ordinals of the instance's requests, and what came of them; ``None`` if it has none."""
    return work.kept("traffic", Traffic).replayed(part)


def tokens_of(trace: Iterable[TraceRequest]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and output tokens of each request, one at least."""
    both = [(max(r.input_tokens, 1), max(r.output_tokens, 1)) for r in trace]
    prompts, outputs = np.array(both, np.int64).T
    return prompts, outputs


class Traffic:
    """The requests of one trace as arrays, and where a router would send them."""

    def __init__(self, work: PlanInputs) -> None:
        self._work = work
        self._served = work.served()
        self._kv = float(work.engine.profile.kv_bytes_per_token)
        self._paths = paths_of(self._served)
        self._prompts, self._outputs = tokens_of(self._served.trace)
        self._arrivals = np.array(self._served.times)
        self._tables = CostTables(work.engine.profile, self._prompts)
        self._routes: dict[int, NDArray[np.int64]] = {}
        self._among_all: tuple[bytes, NDArray[np.int32]] = b"", np.zeros((0, 0), np.int32)
        """The last sizes that were looked up among all requests, and what was found: the instances
        of one pass ask the same."""

    def replayed(self, part: Part) -> tuple[NDArray[np.int64], Replayed | None]:
        """``replay_part``."""
        work, some, instances = self._work, part.configurations, part.instances
        mine = np.flatnonzero(self.routed(instances) == part.number)
        if not len(mine):
            return mine, None
        configs = [system_of(c, work.engine, work.prices, {}) for c in some]
        shared = np.array([c.disk is not None and not c.disk_per_instance for c in configs])
        span = max(float(np.ptp(self._arrivals)), 1e-9)
        fresh = float((self._prompts + self._outputs).sum()) / instances
        lookup = Capacities(configs, self._kv, span, fresh, shared, instances)
        size = self._served.block_tokens
        sizes = lookup.blocks(size)
        # What all instances share is looked up among all requests.
        every = self._found(sizes) if shared.any() or instances == 1 else None
        own = found_blocks(self._paths, sizes, mine) if every is None or instances > 1 else every
        device, host, disk = lookup.tokens(own[mine], size)
        if every is not None and shared.any():
            _, _, all_of = lookup.tokens(every[mine], size)
            disk = np.where(shared, all_of, disk)
        queued = Queued(self._arrivals[mine], self._prompts[mine], self._outputs[mine])
        return mine, replay(queued, lookup.tiers, device, host, disk, self._tables, mine)

    def _found(self, sizes: NDArray[np.float64]) -> NDArray[np.int32]:
        if self._among_all[0] != sizes.tobytes():
            self._among_all = sizes.tobytes(), found_blocks(self._paths, sizes)
        return self._among_all[1]

    def routed(self, instances: int) -> NDArray[np.int64]:
        """Which instance gets each request: the simulator's router, in front of instances whose
        answers take as long as they do alone."""
        if instances not in self._routes:
            work, profile = self._work, self._work.engine.profile
            stubs = [SimpleNamespace(requests=0, outstanding=0) for _ in range(instances)]
            router = Router(work.engine.routing, stubs, 0)
            under_way: list[tuple[float, int, int]] = []
            found = []
            for i, now in enumerate(self._arrivals):
                while under_way and under_way[0][0] <= now:
                    _, instance, tokens = heapq.heappop(under_way)
                    stubs[instance].requests -= 1
                    stubs[instance].outstanding -= tokens
                chosen = router.choose(self._served.trace[i].blocks)
                prompt, output = int(self._prompts[i]), int(self._outputs[i])
                took = profile.prefill_s(prompt) + output * profile.decode_s(8, prompt)
                heapq.heappush(under_way, (now + took, chosen, prompt + output))
                stubs[chosen].requests += 1
                stubs[chosen].outstanding += prompt + output
                found.append(chosen)
            self._routes[instances] = np.array(found)
        return self._routes[instances]
