"""Writes to the disk: limited by its bandwidth, from locked host memory."""

import pytest

from canopy_lab.sim.system import SystemConfig, TierSpec, Workload
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.run import _SystemRun
from support.systems import KV_BYTES, profile, request, rounds

FAST_TIER = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}


def serve(trace, waiting_bytes=None, **fields) -> _SystemRun:
    """Serve the trace; ``waiting_bytes`` receives the bytes that wait for the disk after each step."""
    workload = Workload(trace)
    fields = {"quantum_tokens": 1, "prefetch_threshold_tokens": 1, **fields}
    simulation = _SystemRun(workload, SystemConfig(**fields), profile(), OpenLoop(workload))
    original_step = simulation._step

    def step(instance, now):
        original_step(instance, now)
        instance.tree.verify()
        if waiting_bytes is not None:
            writes = [write for disk in simulation.disks for write in disk.channel._queues[1]]
            waiting_bytes.append(sum(write.remaining_bytes for write in writes))

    simulation._step = step  # type: ignore[method-assign]
    simulation.serve()
    return simulation


def slow_disk(write_bytes_per_s: float, **options) -> TierSpec:
    return TierSpec(1e9, 1e9, write_bytes_per_s, **options)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("instances", [1, 2])
def test_bytes_waiting_for_the_disk_fit_in_the_host(write_policy, instances):
    # A prompt of 100 tokens every 0.3 s, 333 KB a second of KV, and a disk that takes 50.
    host = TierSpec(500 * KV_BYTES, **FAST_TIER)
    waiting_bytes: list[float] = []
    simulation = serve(
        rounds(40, 3, interval_s=0.3), waiting_bytes, device_tokens=300, instances=instances, host=host,
        disk=slow_disk(50e3), write_policy=write_policy,
    )  # fmt: skip
    result = simulation.result(0.0)
    assert max(waiting_bytes) <= instances * 500 * KV_BYTES
    assert max(waiting_bytes) > 200 * KV_BYTES  # the disk is the bottleneck
    # No byte is counted that the disk had no time to write.
    assert 0 < result.disk_written_bytes <= 50e3 * result.makespan_s * 1.001


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_host_pages_are_unlocked_when_the_disk_has_written_them(write_policy):
    host = TierSpec(500 * KV_BYTES, **FAST_TIER)
    simulation = serve(
        rounds(40, 1, interval_s=0.3), device_tokens=300, host=host, disk=slow_disk(50e3),
        write_policy=write_policy,
    )  # fmt: skip
    (instance,), (disk,) = simulation.instances, simulation.disks
    assert disk.channel.is_writing
    assert any(node.host_locks for node in instance.tree.nodes())
    disk.channel.advance(1e9)
    assert not any(node.host_locks for node in instance.tree.nodes())
    instance.tree.verify()
    host_tokens = sum(node.length for node in instance.tree.nodes() if node.on_host)
    assert instance.tree.host_used_tokens == host_tokens


def test_the_host_keeps_pages_being_written_and_drops_later_ones():
    # 200 of 300 host tokens are being written; a third prompt fits, a fourth does not.
    trace = [request(float(i), tuple(range(i * 10 + 1, i * 10 + 11))) for i in range(4)]
    host = TierSpec(300 * KV_BYTES, **FAST_TIER)
    simulation = serve(trace, device_tokens=500, host=host, disk=slow_disk(10.0))
    tree = simulation.instances[0].tree
    assert tree.host_used_tokens == 300
    assert [tree.match(sent.blocks).node.on_host for sent in trace] == [
        True, True, True, False,
    ]  # fmt: skip


def test_kv_that_the_host_had_no_space_for_is_copied_at_its_next_use():
    # The fourth prompt returns after the disk has caught up (100 KB/s, 300 KB to write).
    trace = [request(0.5 * i, tuple(range(i * 10 + 1, i * 10 + 11))) for i in range(4)]
    repeated = request(20.0, trace[3].blocks)
    host, disk = TierSpec(300 * KV_BYTES, **FAST_TIER), slow_disk(100e3)
    simulation = serve([*trace, repeated], device_tokens=250, host=host, disk=disk)
    simulation.disks[0].channel.advance(1e9)
    assert simulation.disks[0].count_leading(repeated.blocks, 1e9) == len(repeated.blocks)
