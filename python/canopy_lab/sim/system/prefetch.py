"""Prefetch queued requests' prefixes from the disk, as HiCache does."""

from __future__ import annotations

import math
from collections.abc import Iterable

from canopy_lab.sim.system.config import SystemConfig
from canopy_lab.sim.system.disk import Disk
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.sim.system.waiting import WaitingPrefixes

PREFETCH_BATCH_PAGES = 128
"""Pages per storage read of SGLang; a cancelled prefetch keeps whole batches."""
PREFETCH_HOST_SHARE = 0.5
"""Share of the host pool above which SGLang starts no prefetch (``prefetch_capacity_limit``)."""


class Prefetcher:
    """The prefetches of one instance from ``disk`` into the host part of ``tree``."""

    def __init__(
        self,
        disk: Disk,
        tree: TieredTree,
        config: SystemConfig,
        kv_bytes: int,
        waiting_prefixes: WaitingPrefixes,
    ) -> None:
        self.disk = disk
        self.tree = tree
        self.config = config
        self.kv_bytes = kv_bytes
        self.max_occupied_tokens = PREFETCH_HOST_SHARE * tree.host_tokens
        self.waiting_prefixes = waiting_prefixes
        self.to_prefetch: list[SimulatedRequest] = []
        """Jobs whose prefetch starts at the next step."""
        self.occupied_tokens = 0
        """Tokens requested by running prefetches, on the disk or not."""

    def wake_at(self, waiting: Iterable[SimulatedRequest], now: float) -> float:
        """Return the time at which an idle instance must check its prefetches again."""
        time_s, channel = math.inf, self.disk.channel
        for job in waiting:
            if job.fetch is not None:
                time_s = min(time_s, channel.estimate_end_s(job.fetch, now), job.deadline_s)
        return max(time_s, now + 1e-6)

    def start_prefetches(self, now: float) -> None:
        """Start the prefetches of requests that arrived during the last step.

        SGLang queries storage at arrival and receives the answer in its next round. Under
        ``best_effort`` a request admitted in that round gets no prefetch.
        """
        disk, tree = self.disk, self.tree
        block_tokens = tree.block_tokens
        max_tokens = self.max_occupied_tokens
        jobs, self.to_prefetch = self.to_prefetch, []
        for index, job in enumerate(jobs):
            if self.occupied_tokens >= max_tokens:
                # As SGLang's limiter: requests that have not started retry in the next round.
                self.to_prefetch = jobs[index:]
                return
            if not math.isnan(job.start_s):
                continue
            path = job.path[: (job.prompt_tokens - 1) // block_tokens]
            match = tree.match(path)
            self.waiting_prefixes.record_match(job, match.node)
            cached_tokens = match.tokens
            if match.node is not tree.root and not match.node.on_host:
                continue
            if job.prompt_tokens - 1 - cached_tokens < self.config.prefetch_threshold_tokens:
                continue
            tokens = disk.count_leading(path, now) * block_tokens - cached_tokens
            if tokens < max(1, self.config.prefetch_threshold_tokens):
                continue
            claimed_tokens = tree.claim_host(tokens) // block_tokens * block_tokens
            if claimed_tokens < max(1, self.config.prefetch_threshold_tokens):
                continue
            tree.host_used_tokens += claimed_tokens
            job.prefetch_tokens = job.prompt_tokens - 1 - cached_tokens
            self.occupied_tokens += job.prefetch_tokens
            job.fetch_start_block = match.blocks
            job.anchor = match.node
            tree.lock_host(match.node)
            job.fetch = disk.channel.read(now, claimed_tokens * self.kv_bytes, claimed_tokens)

    def settle(self, job: SimulatedRequest, now: float) -> bool:
        """Return True if a request may start: its prefetch is done, or is cancelled now."""
        disk, tree, policy = self.disk, self.tree, self.config.prefetch_policy
        fetch = job.fetch
        assert fetch is not None
        disk.channel.advance(now)
        is_complete = fetch.end_s <= now
        if not is_complete and policy == "wait_complete":
            return False
        tokens = fetch.payload
        if not is_complete and policy == "timeout":
            if job.deadline_s == math.inf:
                kilotokens = (job.prompt_tokens - job.fetch_start_block * tree.block_tokens) / 1024
                job.deadline_s = (
                    now
                    + self.config.prefetch_timeout_base_s
                    + kilotokens * self.config.prefetch_timeout_per_ki_token_s
                )
            if now < job.deadline_s:
                return False
        job.fetch = None
        self.occupied_tokens -= job.prefetch_tokens
        anchor, job.anchor = job.anchor, None
        tree.host_used_tokens -= tokens
        if not is_complete:
            disk.channel.cancel(fetch, now)
            batch_tokens = PREFETCH_BATCH_PAGES * self.config.page_tokens
            tokens = int(fetch.done_share * tokens) // batch_tokens * batch_tokens
        blocks = job.fetch_start_block + tokens // tree.block_tokens
        if tokens:
            path = job.path[:blocks]
            added = tree.add_to_host(path, job.fetch_start_block, blocks, disk.deepest_leaf(path))
            job.disk_hit_tokens = added
            job.disk_start_token = blocks * tree.block_tokens - added
        tree.unlock_host(anchor)  # type: ignore[arg-type]  # set with the fetch
        return True
