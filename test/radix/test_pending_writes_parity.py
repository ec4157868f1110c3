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
from support.parity import PAGE_TOKENS, chained_path, serve_tiers, workload
from support.systems import KV_BYTES, profile

DEVICE_BLOCKS, HOST_BLOCKS = 60, 80


class StalledDiskTree(DiskTree):
    """A tree whose copies to the host end, but no write to the disk is ever acknowledged."""

    def settle(self) -> None:
        if self.cache.cache_controller is not None:
            UnifiedRadixCache.writing_check(self.cache, write_back=True)
            self.cache.loading_check()

    def waiting_tokens(self) -> int:
        """Return the tokens that wait to be written."""
        nodes = self.core._node_arena.values()
        components = [node.component_data[ComponentType.FULL] for node in nodes]
        return sum(len(component.host_value) for component in components if component.host_lock_ref)


@pytest.mark.parametrize("seed", [1, 2])
def test_pages_waiting_for_the_disk_stay_on_the_host(tmp_path: Path, seed: int) -> None:
    steps = [step | {"time": float(second)} for second, step in enumerate(workload(seed, 60))]
    live = StalledDiskTree(
        tmp_path, DEVICE_BLOCKS * PAGE_TOKENS, page_size=PAGE_TOKENS, host_tokens=HOST_BLOCKS * PAGE_TOKENS, policy="canopy-lru",
        config={"quantum_tokens": 1, "block_tokens": PAGE_TOKENS},
    )  # fmt: skip
    hit_tokens, max_waiting_tokens = [], 0
    for step in steps:
        match = serve_tiers(live, step, PAGE_TOKENS)
        reusable_tokens = (len(step["blocks"]) - 1) * PAGE_TOKENS
        hit_tokens.append(min(match.device_prefix_len + match.host_hit_length, reusable_tokens))
        max_waiting_tokens = max(max_waiting_tokens, live.waiting_tokens())
    host_tokens = live.cache.cache_controller.mem_pool_host.size

    trace = []
    for step in steps:
        path = chained_path(step)
        trace.append(TraceRequest(step["time"], len(path) * PAGE_TOKENS, 1, path, PAGE_TOKENS))
    config = SystemConfig(
        device_tokens=DEVICE_BLOCKS * PAGE_TOKENS,
        host=TierSpec(host_tokens * KV_BYTES, 1e12, 1e12),
        disk=TierSpec(1e12, 1e12, 1.0),  # a byte a second: no page ends in this minute
        device_policy="canopy-lru",
        page_tokens=PAGE_TOKENS,
        quantum_tokens=1,
        load_back_threshold_tokens=0,
    )
    arrivals = Workload(trace)
    simulated = _SystemRun(arrivals, config, profile(), OpenLoop(arrivals))
    simulated.serve()
    queued_writes = simulated.disks[0].channel._queues[1]
    simulated_waiting_tokens = sum(write.payload_bytes for write in queued_writes) / KV_BYTES
    assert max_waiting_tokens > host_tokens / 2
    assert list(simulated.result(0.0).cached_tokens) == pytest.approx(hit_tokens)
    assert simulated_waiting_tokens == max_waiting_tokens
