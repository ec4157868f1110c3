"""A disk that never finishes writing: the simulator and SGLang's cache keep and drop the same KV."""

from pathlib import Path

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from canopy_lab.sim.system import SystemConfig, TierSpec, Workload
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.run import _SystemRun
from canopy_lab.trace.record import TraceRequest
from support.disk_tree import DiskTree
from support.parity import PAGE, chained_path, serve_from_tiers, workload
from support.systems import KV_BYTES, profile

DEVICE_BLOCKS, HOST_BLOCKS = 60, 80


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
    live = NeverWritten(
        tmp_path, DEVICE_BLOCKS * PAGE, page_size=PAGE, host_tokens=HOST_BLOCKS * PAGE, policy="canopy-lru",
        config={"quantum_tokens": 1, "block_tokens": PAGE},
    )  # fmt: skip
    hit_tokens, waiting = [], 0
    for step in steps:
        hit = serve_from_tiers(live, step, PAGE)
        full_blocks = (len(step["blocks"]) - 1) * PAGE
        hit_tokens.append(min(hit.device_prefix_len + hit.host_hit_length, full_blocks))
        waiting = max(waiting, live.pending())
    host_tokens = live.cache.cache_controller.mem_pool_host.size

    trace = []
    for step in steps:
        path = chained_path(step)
        trace.append(TraceRequest(step["time"], len(path) * PAGE, 1, path, PAGE))
    config = SystemConfig(
        device_tokens=DEVICE_BLOCKS * PAGE,
        host=TierSpec(host_tokens * KV_BYTES, 1e12, 1e12),
        disk=TierSpec(1e12, 1e12, 1.0),  # a byte a second: no page ends in this minute
        device_policy="canopy-lru",
        page_tokens=PAGE,
        quantum_tokens=1,
        load_back_threshold_tokens=0,
    )
    simulated = _SystemRun(w := Workload(trace), config, profile(), OpenLoop(w))
    simulated.serve()
    pending = sum(t.size for t in simulated.disks[0].channel._queues[1]) / KV_BYTES
    assert waiting > host_tokens / 2
    assert list(simulated.result(0.0).cached_tokens) == pytest.approx(hit_tokens)
    assert pending == waiting
