"""The what-if meter in a scheduler, and ``--canopy-observe``, which observes SGLang's own cache.

Reads only ended requests: their tokens, stamp and hits. It changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_canopy.config.server_options import options_of
from sglang_canopy.policy import registry
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.floored import FlooredPolicy
from sglang_canopy.radix.counters import REFUSALS
from sglang_canopy.radix.live_request import complete_request, is_refused, make_live_request
from sglang_canopy.radix.parallel_samples import ParallelSamples
from sglang_canopy.whatif.meter import Meter, MeterSetup, TierTokens
from sglang_canopy.wire.request_state import state_of

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
"""Tokens per block of a path, as ``block_tokens`` by default."""


def meter_of(
    server_args: Any, cache: Any, running: str, policy: Policy | None = None
) -> Meter | None:
    """Return the meter for a scheduler with this cache, if its server has one. ``running``: name of
    the policy that ranks; ``policy``: its object, if it is one of Canopy's."""
    options = options_of(server_args).meter
    if options is None:
        return None
    setup = MeterSetup(
        options.policies,
        options.capacity,
        configs={} if policy is None else {running: registry.config_of(policy)},
        floor=isinstance(policy, FlooredPolicy),
    )
    return Meter(setup, tier_tokens_of(server_args, cache), running)


def tier_tokens_of(server_args: Any, cache: Any) -> TierTokens:
    """Return the capacities of a scheduler's memory tiers."""
    pool = getattr(getattr(cache, "cache_controller", None), "mem_pool_host", None)
    return TierTokens(
        int(cache.token_to_kv_pool_allocator.size),
        0 if pool is None else int(pool.size),
        is_exclusive=server_args.hicache_write_policy == "write_back",
    )


def has_floor(server_args: Any) -> bool:
    """Return whether ``canopy-lru`` ranks while the policy is behind it."""
    options = options_of(server_args).meter
    return options is not None and options.floor == "on"


class Observer:
    """One scheduler's meter under an SGLang policy."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.refusal_counts = [0] * len(REFUSALS)
        """Requests that ended without having been admitted, by reason."""
        self._now = 0.0
        self._has_failed = False
        self._samples = ParallelSamples()
        logger.info(
            "canopy: observing %s, without changing it; see 'canopy page' or /canopy/ui",
            meter.running,
        )

    def record_batch(self, batch: Any) -> None:
        """Record the requests of a computed batch that have ended."""
        for req in batch.reqs:
            if req.finished():
                self._observe_once(req, self._record_end)

    def refuse(self, req: Any, reason: int) -> None:
        """Count ``req``, which ended for a reason of ``counters.REFUSALS``, unless it was admitted."""
        if not req.output_ids and not req.retraction_count:
            self._observe_once(req, self._count_refusal, reason)

    def _observe_once(self, req: Any, record: Callable[..., None], *args: Any) -> None:
        """Call ``record`` with ``req``, unless ``req`` was observed before. An error must not end a
        server that is only observed."""
        state = state_of(req)
        if state.observed:
            return
        state.observed = True
        try:
            record(req, *args)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("canopy: cannot observe; later errors are not logged")

    def _count_refusal(self, req: Any, reason: int) -> None:
        request = make_live_request(req, self._now, BLOCK_TOKENS)
        self._samples.register(request)
        if request.warm_up is None:
            self.refusal_counts[reason] += 1

    def _record_end(self, req: Any) -> None:
        if is_refused(req) and not req.output_ids:
            return
        request = make_live_request(req, self._now, BLOCK_TOKENS)
        complete_request(request, req)
        self._now = max(self._now, request.time)
        self._samples.register(request)
        if request.warm_up is not None:
            self.meter.record_parallel_output(request)
            return
        self.meter.record_request(request, req.cached_tokens_device + req.cached_tokens_host)


def observer_of(scheduler: Any) -> Observer | None:
    """Return the scheduler's observer; ``None`` without ``--canopy-observe``."""
    observer: Observer | None = getattr(scheduler, "canopy", None)
    if observer is None and not hasattr(scheduler, "canopy"):
        args: Any = getattr(scheduler, "server_args", None)
        options = options_of(args).meter
        if options is not None and options.observe:
            from sglang_canopy.telemetry import reporter

            meter = meter_of(args, scheduler.tree_cache, str(args.radix_eviction_policy))
            assert meter is not None
            observer = Observer(meter)
            has_metrics = bool(getattr(args, "enable_metrics", False))
            reporter.start_observer_reporter(meter, observer.refusal_counts, has_metrics)
        scheduler.canopy = observer
    return observer
