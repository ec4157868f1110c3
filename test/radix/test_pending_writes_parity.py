"""A disk that never finishes writing: the simulator and SGLang's cache keep, and drop, the same."""

from pathlib import Path

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from canopy_lab.sim.system import SystemConfig, TierSpec, Workload
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.run import _SystemRun
from canopy_lab.trace.record import TraceRequest
from support.disk_tree import DiskTree
from support.parity import PAGE, chained, serve_from_tiers, workload
from support.systems import KV, profile

DEVICE, HOST = 60, 80
"""Blocks."""


class NeverWritten(DiskTree):
    """Copies to the host end; no write to the disk is ever acknowledged."""

    def settle(self) -> None:
        if self.cache.cache_controller is not None:
            UnifiedRadixCache.writing_check(self.cache, write_back=True)
            self.cache.loading_check()

    def pending(self) -> int:
        """Tokens that wait to be written."""
        parts = [node.component_data[ComponentType.FULL] for node in self.core._node_arena.values()]
        return sum(len(part.host_value) for part in parts if part.host_lock_ref)


@pytest.mark.parametrize("seed", [1, 2])
def test_pages_waiting_for_the_disk_stay_on_the_host(tmp_path: Path, seed: int) -> None:
    steps = [s | {"time": i * 1.0} for i, s in enumerate(workload(seed, 60))]
    theirs = NeverWritten(
        tmp_path, DEVICE * PAGE, page_size=PAGE, host_tokens=HOST * PAGE, policy="canopy-lru",
        config={"quantum_tokens": 1, "block_tokens": PAGE},
    )  # fmt: skip
    served, waiting = [], 0
    for step in steps:
        hit = serve_from_tiers(theirs, step, PAGE)
        whole = (len(step["blocks"]) - 1) * PAGE
        served.append(min(hit.device_prefix_len + hit.host_hit_length, whole))
        waiting = max(waiting, theirs.pending())
    host_tokens = theirs.cache.cache_controller.mem_pool_host.size

    trace = []
    for step in steps:
        path = chained(step)
        trace.append(TraceRequest(step["time"], len(path) * PAGE, 1, path, PAGE))
    config = SystemConfig(
        device_tokens=DEVICE * PAGE,
        host=TierSpec(host_tokens * KV, 1e12, 1e12),
        disk=TierSpec(1e12, 1e12, 1.0),  # a byte a second: no page ends in this minute
        device_policy="canopy-lru",
        page_tokens=PAGE,
        quantum_tokens=1,
        load_back_threshold_tokens=0,
    )
    ours = _SystemRun(w := Workload(trace), config, profile(), OpenLoop(w))
    ours.serve()
    pending = sum(t.size for t in ours.disks[0].channel._queues[1]) / KV
    assert waiting > host_tokens / 2
    assert list(ours.result(0.0).cached_tokens) == pytest.approx(served)
    assert pending == waiting
