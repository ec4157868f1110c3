"""Device, host and disk: contents, durations, and complete accounts."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.system import SystemConfig, TierSpec, Workload, simulate_system
from canopy_lab.sim.system.arrivals import OpenLoop, TurnsWait
from canopy_lab.sim.system.channel import DiskChannel
from canopy_lab.sim.system.run import _SystemRun
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.ttl.table import Group, TTLTable
from support.systems import KV_BYTES, profile, request, rounds
from support.tree_recount import recount

FAST_TIER = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}


def tier_of(tokens: int, **options) -> TierSpec:
    return TierSpec(tokens * KV_BYTES, **FAST_TIER, **options)


def run(trace, **fields):
    fields = {"device_tokens": 300, "quantum_tokens": 1, "prefetch_threshold_tokens": 1, **fields}
    return simulate_system(trace, SystemConfig(**fields), profile())


def random_chats(seed: int):
    """Return growing conversations in blocks of four tokens, some with a shared beginning."""
    rng, ids, path_by_name = random.Random(seed), itertools.count(1), {}
    time_s, turns = 0.0, []
    for _ in range(150):
        time_s += rng.expovariate(20.0)
        name = str(rng.randrange(25))
        blocks = path_by_name.get(name) or ((10**6, 10**6 + 1)[: rng.choice((0, 1, 2))])
        prompt_tokens = len(blocks) * 4 + rng.randrange(1, 240)
        path = blocks + tuple(next(ids) for _ in range(-(-prompt_tokens // 4) - len(blocks)))
        output_tokens = rng.randrange(1, 40)
        turns.append(TraceRequest(time_s, prompt_tokens, output_tokens, path, 4, conversation=name))
        path_by_name[name] = path[: prompt_tokens // 4]
        if rng.random() < 0.15:
            del path_by_name[name]
    return turns


@pytest.mark.parametrize("policy", ["lru", "lfu", "wa"])
def test_separate_requests_hit_as_in_the_cache_simulator(policy):
    rng = random.Random(7)
    trace, ids = [], itertools.count(1000)
    for i in range(400):
        prefix = rng.randrange(12)
        path = tuple(range(prefix * 20 + 1, prefix * 20 + 1 + rng.randrange(1, 20)))
        trace.append(request(100.0 * i, (*path, next(ids)), category=str(prefix % 3)))
    capacity_blocks = 60
    hit_tokens: list[int] = []
    ranking = make_policy(policy)
    simulate(trace, ranking, capacity_blocks, on_request=lambda _, hit: hit_tokens.append(hit))
    result = run(trace, device_tokens=capacity_blocks * 10, device_policy=policy)
    # A node is a block more or less where a policy's order has ties of time.
    assert abs(sum(hit_tokens) - int(result.cached_tokens.sum())) <= 0.01 * sum(hit_tokens)


def test_one_cut_is_enough_for_a_need_of_partial_blocks():
    tree = TieredTree(make_policy("lru"), 1000, 16, quantum_tokens=64)
    tree.claim(320)
    leaf, _ = tree.insert(tuple(range(20)), 20, 320)
    tree.lock(leaf)
    tree.unlock(leaf)  # unlocked nodes may be evicted
    assert tree.evict_device(100) == 112  # seven blocks; six, and then a quantum, would be ten
    tree.verify()


def test_demoted_kv_is_loaded_from_the_host():
    result = run(rounds(10, 3), host=tier_of(2000))
    assert result.token_hit_ratio_by_tier["host"] == pytest.approx(2 / 3 * 0.99)
    assert result.token_hit_ratio_by_tier["device"] == 0.0
    assert result.host_written_bytes == 10 * 100 * KV_BYTES  # once each


def test_a_shared_disk_serves_pages_of_other_instances():
    trace = rounds(3, 4)  # round robin over two instances moves each prompt on
    options = {"instances": 2, "host": tier_of(1000), "prefetch_policy": "wait_complete"}
    shared = run(trace, disk=tier_of(10**6), **options)
    separate = run(trace, disk=tier_of(10**6), disk_per_instance=True, **options)
    assert shared.token_hit_ratio_by_tier["disk"] > 0.2
    assert separate.token_hit_ratio_by_tier["disk"] == 0.0


def test_a_ttl_drops_unused_kv_from_the_host_and_from_the_disk():
    trace = rounds(10, 2)  # each prompt again after 10 s
    for ttl_s, is_hit in ((9.0, False), (11.0, True)):
        with_disk = {"host": tier_of(400), "disk": tier_of(10**6, ttl=ttl_s)}
        with_disk["prefetch_policy"] = "wait_complete"
        for tiers in ({"host": tier_of(2000, ttl=ttl_s)}, with_disk):
            assert (run(trace, **tiers).token_hit_ratio > 0.4) == is_hit
    mean_bytes = run(trace, host=tier_of(2000, ttl=3.0)).mean_bytes_by_tier["host"]
    assert mean_bytes < 0.7 * run(trace, host=tier_of(2000)).mean_bytes_by_tier["host"]


def test_each_group_has_the_ttl_of_its_table():
    # Prompt 0 begins with block 1, and alone has a long time to live.
    table = TTLTable((Group(1, 100.0),), residual_ttl_s=1.0, block_tokens=10, hash="trace")
    result = run(rounds(10, 2), host=tier_of(2000, ttl=table))
    assert list(result.cached_tokens[10:]) == [99] + [0] * 9


def test_a_prefetch_that_takes_too_long_is_stopped_by_the_timeout():
    slow_disk = TierSpec(1e9, 2e4, 1e9)  # 90 tokens: 4.5 s
    options = {"host": tier_of(400), "disk": slow_disk, "prefetch_timeout_base_s": 0.5}
    complete = run(rounds(10, 2, interval_s=10.0), prefetch_policy="wait_complete", **options)
    stopped = run(rounds(10, 2, interval_s=10.0), prefetch_policy="timeout", **options)
    assert complete.ttft_s[-1] == pytest.approx(4.5 + 0.01, rel=0.01)
    assert stopped.ttft_s[-1] == pytest.approx(0.5 + 90 / 1024 * 0.25 + 0.1, rel=0.02)


@settings(max_examples=settings.default.max_examples // 4)
@given(
    seed=st.integers(0, 10**6),
    instances=st.integers(1, 2),
    routing=st.sampled_from(["round-robin", "prefix-aware"]),
    tiers_below_device=st.integers(0, 2),
    host_share=st.sampled_from([0.5, 2.0]),
    ttl_s=st.sampled_from([None, 1.0]),
    device_policy=st.sampled_from(["lru", "wa"]),
    write_policy=st.sampled_from(["write_through", "write_back"]),
    chunk_tokens=st.sampled_from([64, 8192]),
    page_tokens=st.sampled_from([1, 4]),
    prefetch_policy=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
    max_running=st.sampled_from([3, 256]),
    turns_wait=st.booleans(),
    disk_bytes_per_s=st.sampled_from([1e9, 1e5]),
    touches_waiting=st.booleans(),
    schedule_policy=st.sampled_from(["fcfs", "bounded-shortest"]),
)
def test_every_token_is_accounted_for_after_every_step(
    seed, instances, routing, tiers_below_device, host_share, ttl_s, device_policy, write_policy, chunk_tokens,
    page_tokens, prefetch_policy, max_running, turns_wait, disk_bytes_per_s, touches_waiting, schedule_policy,
):  # fmt: skip
    workload = Workload(random_chats(seed))
    device_tokens = workload.longest_request_tokens * 2
    disk_bytes = device_tokens * 3 * KV_BYTES
    disk = TierSpec(disk_bytes, 1e9, disk_bytes_per_s, shared_channel=True, ttl=ttl_s)
    config = SystemConfig(
        device_tokens=device_tokens,
        instances=instances,
        routing=routing,
        host=tier_of(int(device_tokens * host_share), ttl=ttl_s) if tiers_below_device else None,
        disk=disk if tiers_below_device == 2 else None,
        device_policy=device_policy,
        write_policy=write_policy,
        chunked_prefill_tokens=chunk_tokens,
        page_tokens=page_tokens,
        prefetch_threshold_tokens=8,
        prefetch_policy=prefetch_policy,
        max_running=max_running,
        touches_waiting=touches_waiting,
        schedule_policy=schedule_policy,
    )
    arrivals = (TurnsWait if turns_wait else OpenLoop)(workload)
    simulation = _SystemRun(workload, config, profile(), arrivals)
    original_step = simulation._step

    def step(instance, now):
        original_step(instance, now)
        instance.tree.verify()
        assert instance.tree.private_tokens >= 0
        for disk in simulation.disks:
            recount(disk.tree)

    simulation._step = step  # type: ignore[method-assign]
    simulation.serve()
    result = simulation.result(0.0)
    for disk in simulation.disks:
        disk.channel.advance(1e9)
    assert (result.ttft_s > 0).all()
    assert (result.e2e_s >= result.ttft_s).all()
    for instance in simulation.instances:
        assert not instance.waiting_count
        assert not instance.decoding.jobs
        assert instance.tree.private_tokens == 0
        assert all(node.locks == node.host_locks == 0 for node in instance.tree.nodes())
        host_tokens = sum(node.length for node in instance.tree.nodes() if node.on_host)
        assert host_tokens == instance.tree.host_used_tokens


def test_prefetches_leave_half_of_the_host_to_demoted_kv(monkeypatch):
    # Six prompts of 100 tokens are on the disk and return at once, behind others. SGLang starts no
    # prefetch while running ones need half of the host, here 400 tokens, or more
    # (``prefetch_capacity_limit``): the sixth waits until the first is admitted.
    first_uses = rounds(20, 1, interval_s=10.0)
    ahead = [request(300.0, tuple(range(50000 + i * 20, 50020 + i * 20))) for i in range(6)]
    returning = [request(300.01 + 0.001 * i, sent.blocks) for i, sent in enumerate(first_uses[:6])]
    reads, read = [], DiskChannel.read
    monkeypatch.setattr(DiskChannel, "read", lambda *args: reads.append(read(*args)) or reads[-1])
    disk = TierSpec(1e9, 1e6, 1e9)  # 90 ms to read a prompt
    run([*first_uses, *ahead, *returning], device_tokens=450, host=tier_of(800), disk=disk)
    begins_s = sorted(transfer.begin_s for transfer in reads)
    assert [b - a for a, b in itertools.pairwise(begins_s[:5])] == pytest.approx([0.09] * 4)
    assert begins_s[5] - begins_s[4] > 0.3


def test_the_host_keeps_the_parent_of_a_prefetch():
    # The head of a prompt is on the host and the rest on the disk. While it waits, others fill the
    # host; without its head, the pages read could not be reached.
    path = tuple(range(1, 21))
    evicting = [request(10.0 + i, tuple(range(1000 + i * 10, 1010 + i * 10))) for i in range(2)]
    ahead = [request(100.0, tuple(range(5000 + i * 20, 5020 + i * 20))) for i in range(3)]
    trace = [request(0.0, path), *evicting, *ahead, request(100.05, path)]
    disk = TierSpec(1e9, 1e6, 1e9)
    result = run(trace, device_tokens=450, host=tier_of(400), disk=disk)
    assert result.cached_tokens[-1] > 150


@pytest.mark.parametrize(("new_tokens", "is_hidden"), [(150, True), (1, False)])
def test_layerwise_loading_hides_behind_a_long_prefill_only(new_tokens, is_hidden):
    # 100 tokens on the host, at 1 MB/s: 0.1 s to load; ``new_tokens`` ms to compute (Kareto, 3.2).
    prompt = tuple(range(1, 11))
    evicting = [request(1.0 + i, tuple(range(1000 + i * 10, 1010 + i * 10))) for i in range(3)]
    blocks = -(-new_tokens // 10)
    returning = request(10.0, prompt + tuple(range(500, 500 + blocks)))
    trace = [request(0.0, prompt), *evicting, returning]
    config = SystemConfig(
        device_tokens=300, quantum_tokens=1, load_back_threshold_tokens=1,
        host=TierSpec(1e9, 1e6, 1e9),
    )  # fmt: skip
    overlapped_s = simulate_system(trace, config, profile(layers=100)).ttft_s[-1]
    one_by_one_s = simulate_system(trace, config, profile(layers=1)).ttft_s[-1]
    compute_s = blocks * 10 * 0.001
    assert one_by_one_s == pytest.approx(compute_s + 0.1)
    assert overlapped_s == pytest.approx(max(compute_s + 0.1 / 100, 0.1 + compute_s / 100))
    assert (overlapped_s < compute_s * 1.05) == is_hidden
