"""Advice on small traffic whose answer is known, and on the real traces."""

import numpy as np
import pytest

from canopy_lab.advise.advice import LowerTier, advise
from canopy_lab.advise.advice_text import describe_agents, describe_capacity, describe_log
from canopy_lab.advise.answers import Advice
from canopy_lab.advise.arms import CANOPY_LRU, SGLANG_LRU
from canopy_lab.advise.costs import CostModel
from canopy_lab.advise.sample import LogSample, read_sample, sample_of
from canopy_lab.report.units import percent
from canopy_lab.sim.driver import simulate
from canopy_lab.sim.system.engine_profile import load_profile
from sglang_canopy.policy.registry import make_policy
from support.tiny_traces import request_of

PROFILE = load_profile("llama-3.1-8b-h100")


def scan_log(count: int, gap_s: float = 1.0, chats: int = 20, has_names: bool = False) -> LogSample:
    """Chats that return among scans that never do: LRU evicts them, ``wa`` need not."""
    requests = []
    for i in range(count):
        chat, turn = (i // 3) % chats, (i // 3) // chats
        blocks, category = range(chat * 1000, chat * 1000 + 4 + turn), "chat"
        if i % 3:
            blocks, category, turn = range(10**6 + i * 8, 10**6 + i * 8 + 8), "scan", 0
        name = f"{category} {i if i % 3 else chat}" if has_names else None
        requests.append(request_of(i * gap_s, blocks, conversation=name, category=category, turn=turn + 1, block_tokens=64))  # fmt: skip
    return sample_of(requests)


@pytest.fixture(scope="module")
def mixed_sample() -> LogSample:
    return scan_log(1500, chats=50, has_names=True)


@pytest.fixture(scope="module")
def advice(mixed_sample):
    return advise(
        mixed_sample, PROFILE, capacity_tokens=400 * 64, tiers=[LowerTier("host", 8.0), LowerTier("disk", 100.0, True)], jobs=1
    )  # fmt: skip


def test_wa_is_recommended_if_scans_evict_reused_prefixes(advice):
    assert advice.decision.flag == "auto"
    assert "Use auto (wa ranks)" in advice.decision.sentence
    rows = {row.gain.label: row for row in advice.rows}
    assert rows["wa"].gain.low > 0
    bound = rows["hindsight bound"].gain.hit_ratio
    assert rows["wa"].gain.hit_ratio <= bound <= advice.repeats + 1e-9
    assert rows["wa"].gpu_s_saved_per_hour > 0
    assert rows["lru, as in SGLang"].gpu_s_saved_per_hour == 0


def test_hit_ratios_are_those_of_the_simulator(advice, mixed_sample):
    lru = simulate(mixed_sample.requests, make_policy("lru"), 400, whole_nodes=True)
    assert advice.rows[0].gain.hit_ratio == pytest.approx(lru.token_hit_ratio)
    endless = simulate(mixed_sample.requests, make_policy("lru"), mixed_sample.distinct_blocks)
    assert advice.repeats == pytest.approx(endless.token_hit_ratio)
    assert advice.lru.hit_ratio[-1] == pytest.approx(endless.token_hit_ratio)


def test_more_memory_never_hits_less_under_lru(advice):
    hit_ratios = [tier.lru.hit_ratio for tier in advice.tiers]
    assert hit_ratios == sorted(hit_ratios)
    for label in (SGLANG_LRU.label, CANOPY_LRU.label):
        assert list(advice.others[label].hit_ratio) == sorted(advice.others[label].hit_ratio)


def test_the_same_call_gives_the_same_advice(mixed_sample):
    sample, tiers = (
        sample_of(mixed_sample.requests[:300]),
        [LowerTier("host", 8.0), LowerTier("disk", 100.0, True)],
    )
    with_one_job, with_two_jobs = (
        advise(sample, PROFILE, capacity_tokens=100 * 64, tiers=tiers, jobs=jobs) for jobs in (1, 2)
    )
    assert with_one_job.as_json() == with_two_jobs.as_json()


def test_lru_is_kept_without_a_simulation_if_nothing_repeats():
    rows = [request_of(float(i), range(i * 10, i * 10 + 8), conversation=str(i)) for i in range(60)]
    tiers, simulations = [LowerTier("host", 8.0)], []
    advice = advise(
        sample_of(rows), PROFILE, capacity_tokens=1000, tiers=tiers,
        jobs=1, progress=lambda: simulations.append(1),
    )  # fmt: skip
    assert not simulations
    assert {row.gain.hit_ratio for row in advice.rows} == {0.0}
    assert advice.decision.flag == "lru"
    assert "repeat" in advice.decision.sentence
    assert len(advice.rows) == 7


def test_costs_are_the_profiles():
    tokens = np.array([1000, 2000])
    first_s, second_s = PROFILE.prefill_s(400, 600), PROFILE.prefill_s(1, 1999)
    cost_model = CostModel(PROFILE, tokens, 1.0)
    cost = cost_model.cost(np.array([400, 0]))
    assert cost.gpu_s_per_request == pytest.approx((first_s + second_s) / 2)
    assert cost.ttft_mean_s == pytest.approx((first_s + second_s) / 2 + PROFILE.arrival_s)
    waits_s = cost_model.transfer_s(np.array([0, 1000]), 1e9)
    assert waits_s.tolist() == [0, 1000 * PROFILE.kv_bytes_per_token / 1e9]


@pytest.mark.long
def test_auto_is_advised_on_the_conversation_trace_and_on_its_sample(data_dir):
    path = data_dir / "mooncake" / "conversation_first60.jsonl"
    full_advice = advise(read_sample(path, "mooncake"), PROFILE, capacity_tokens=1_000_000)
    sampled_advice = advise(read_sample(path, "mooncake", max_requests=3500), PROFILE, capacity_tokens=1_000_000)  # fmt: skip
    assert full_advice.decision.flag == sampled_advice.decision.flag == "auto"
    assert sampled_advice.sample["one_in"] > 1
    for full_row, sampled_row in zip(full_advice.rows, sampled_advice.rows):
        assert abs(full_row.gain.hit_ratio - sampled_row.gain.hit_ratio) < 0.03


def test_the_memory_that_holds_agents_sessions_is_stated_for_agents_alone() -> None:
    """Six agents, of whose sessions two fit, beside a person who pauses for minutes."""
    trace = [
        request_of(10.0 * turn + agent, range(1000 * agent, 1000 * agent + 10 + turn), conversation=f"a{agent}", turn=turn + 1)
        for turn in range(10)
        for agent in range(6)
    ]  # fmt: skip
    trace += [request_of(50.0 * turn + 0.5, range(9000, 9001 + turn), conversation="person") for turn in range(3)]  # fmt: skip
    sample = sample_of(sorted(trace, key=lambda request: request.time_s))
    advice = advise(sample, PROFILE, capacity_tokens=2 * 19 * 10, jobs=1)
    agents = advice.agents
    assert (agents.sessions, agents.tokens) == (6, 6 * 19 * 10)
    hit_ratio = sum(10 + turn - 1 for turn in range(1, 10)) / sum(10 + turn for turn in range(10))
    assert agents.hit_ratio_with == pytest.approx(hit_ratio)
    assert agents.hit_ratio < hit_ratio / 2
    (line,) = describe_agents(advice)
    assert "up to 6 sessions at a time hold 1140 tokens" in line
    assert f"hit {percent(hit_ratio)} of the agents' prompt tokens instead of" in line
    (line_for_large_device,) = describe_agents(advise(sample, PROFILE, capacity_tokens=1e6, jobs=1))
    assert line_for_large_device.endswith("for which the device has room.")
    people = [request for request in sample.requests if request.conversation == "person"]
    assert describe_agents(advise(sample_of(people), PROFILE, capacity_tokens=100, jobs=1)) == []


def advise_alone(sample: LogSample, capacity_tokens: float = 150 * 64, *tiers: LowerTier) -> Advice:
    return advise(sample, PROFILE, capacity_tokens=capacity_tokens, tiers=tiers, jobs=1)


def test_a_log_of_few_requests_is_too_short_for_advice() -> None:
    advice = advise_alone(scan_log(29))
    assert advice.decision.flag == "lru"
    assert "has only 29 requests, too few to tell" in advice.decision.sentence
    assert "too few to tell" not in advise_alone(scan_log(30)).decision.sentence


def test_requests_of_one_moment_have_an_interval() -> None:
    """A bootstrap over one window of time has no variance: every gain would look certain."""
    advice = advise_alone(scan_log(900, gap_s=0.0))
    assert (advice.clusters, advice.cluster_kind) == (50, "runs of requests")
    gains = [row.gain for row in advice.rows if row.gain.points]
    assert gains
    assert all(gain.low < gain.points < gain.high for gain in gains)
    assert "all have the same time" in " ".join(describe_log(advice))
    assert "same time" not in " ".join(describe_log(advise_alone(scan_log(90))))


def test_a_capacity_smaller_than_the_prompts_is_reported() -> None:
    advice = advise_alone(scan_log(300), 300)
    assert advice.too_long == pytest.approx(14 / 15)
    assert "93.3 % of the prompts are longer than that" in describe_capacity(advice)
    assert "longer than that" not in describe_capacity(advise_alone(scan_log(300)))


def test_the_gain_of_memory_is_reported_for_the_smallest_tier() -> None:
    requests = [request_of(float(i), range(i % 50 * 100, i % 50 * 100 + 64), block_tokens=64) for i in range(200)]  # fmt: skip
    disk = LowerTier("a disk of 100 GB", 100.0, is_disk=True)
    tiers = (LowerTier("40 GB of host memory", 40.0), disk)
    sentence = advise_alone(sample_of(requests), 64 * 64.0, *tiers).decision.sentence
    assert sentence.endswith(" 40 GB of host memory would add 75.0 points.")
    small_tiers = (LowerTier("0.1 GB of host memory", 0.1), disk)
    sentence = advise_alone(sample_of(requests), 64 * 64.0, *small_tiers).decision.sentence
    assert sentence.endswith(" 0.1 GB of host memory and a disk of 100 GB would add 75.0 points.")
