"""Writes to the disk: limited by its bandwidth, from locked host memory."""

import pytest

from canopy_lab.sim.system import SystemConfig, TierSpec, Workload
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.run import _SystemRun
from support.systems import KV, profile, request, rounds

FAST = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}


def served(trace, pending=None, **config) -> _SystemRun:
    """A run; ``pending`` takes the bytes that wait for the disk after each step."""
    workload = Workload(trace)
    config = {"quantum_tokens": 1, "prefetch_threshold_tokens": 1, **config}
    simulation = _SystemRun(workload, SystemConfig(**config), profile(), OpenLoop(workload))
    plain = simulation._step

    def step(instance, now):
        plain(instance, now)
        instance.tree.verify()
        if pending is not None:
            waiting = sum(t.remaining for d in simulation.disks for t in d.channel._queues[1])
            pending.append(waiting)

    simulation._step = step  # type: ignore[method-assign]
    simulation.serve()
    return simulation


def slow_disk(write_bytes_per_s: float, **others) -> TierSpec:
    return TierSpec(1e9, 1e9, write_bytes_per_s, **others)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("instances", [1, 2])
def test_no_more_waits_for_the_disk_than_the_host_holds(write_policy, instances):
    # A prompt of 100 tokens every 0.3 s, 333 KB a second of KV, and a disk that takes 50.
    host = TierSpec(500 * KV, **FAST)
    pending: list[float] = []
    simulation = served(
        rounds(40, 3, every_s=0.3), pending, device_tokens=300, instances=instances, host=host,
        disk=slow_disk(50e3), write_policy=write_policy,
    )  # fmt: skip
    result = simulation.result(0.0)
    assert max(pending) <= instances * 500 * KV
    assert max(pending) > 200 * KV  # the disk is the bottleneck
    # No byte is counted that the disk had no time to write.
    assert 0 < result.disk_written_bytes <= 50e3 * result.makespan_s * 1.001


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_all_that_was_held_is_free_when_the_disk_has_it(write_policy):
    host = TierSpec(500 * KV, **FAST)
    simulation = served(
        rounds(40, 1, every_s=0.3), device_tokens=300, host=host, disk=slow_disk(50e3),
        write_policy=write_policy,
    )  # fmt: skip
    (instance,), (disk,) = simulation.instances, simulation.disks
    assert disk.channel.writing
    assert any(node.host_locks for node in instance.tree.nodes())
    disk.channel.advance(1e9)
    assert not any(node.host_locks for node in instance.tree.nodes())
    instance.tree.verify()
    held = sum(node.length for node in instance.tree.nodes() if node.host)
    assert instance.tree.host_used == held


def test_the_host_keeps_pages_being_written_and_drops_later_ones():
    # 200 of 300 host tokens are being written; a third prompt fits, a fourth does not.
    trace = [request(float(i), tuple(range(i * 10 + 1, i * 10 + 11))) for i in range(4)]
    made = served(trace, device_tokens=500, host=TierSpec(300 * KV, **FAST), disk=slow_disk(10.0))
    tree = made.instances[0].tree
    assert tree.host_used == 300
    assert [tree.match(r.blocks).node.host for r in trace] == [
        True, True, True, False,
    ]  # fmt: skip


def test_kv_without_room_is_copied_at_its_next_use():
    # The fourth prompt returns after the disk has caught up (100 KB/s, 300 KB to write).
    trace = [request(0.5 * i, tuple(range(i * 10 + 1, i * 10 + 11))) for i in range(4)]
    again = request(20.0, trace[3].blocks)
    simulation = served(
        [*trace, again], device_tokens=250, host=TierSpec(300 * KV, **FAST), disk=slow_disk(100e3)
    )
    simulation.disks[0].channel.advance(1e9)
    assert simulation.disks[0].leading(again.blocks, 1e9) == len(again.blocks)
