"""Advice on logs with little information: it states that, and recommends nothing."""

import pytest

from canopy_lab.advise.advice import Below, advise
from canopy_lab.advise.advice_text import about_capacity, about_log
from canopy_lab.advise.answers import Advice
from canopy_lab.advise.sample import Sample, sample_of
from canopy_lab.sim.system.engine_profile import load_profile
from support.tiny_traces import ask

PROFILE = load_profile("llama-3.1-8b-h100")


def scanned(count: int, every_s: float = 1.0) -> Sample:
    """A few chats that return among scans that never do: LRU evicts them, ``wa`` need not."""
    rows = []
    for at in range(count):
        if at % 3 == 0:
            talk, turn = (at // 3) % 20, (at // 3) // 20
            rows.append(ask(at * every_s, range(talk * 1000, talk * 1000 + 4 + turn), kind="chat", turn=turn + 1, block_tokens=64))  # fmt: skip
        else:
            rows.append(ask(at * every_s, range(10**6 + at * 8, 10**6 + at * 8 + 8), kind="scan", block_tokens=64))  # fmt: skip
    return sample_of(rows)


def advised(sample: Sample, capacity_tokens: float = 150 * 64, *below: Below) -> Advice:
    return advise(sample, PROFILE, capacity_tokens=capacity_tokens, below=below, jobs=1)


def test_a_log_of_few_requests_is_too_short_for_advice() -> None:
    got = advised(scanned(29))
    assert got.decision.flag == "lru"
    assert "has only 29 requests, too few to tell" in got.decision.sentence
    assert "too few to tell" not in advised(scanned(30)).decision.sentence


def test_requests_of_one_moment_have_an_interval() -> None:
    """A bootstrap over a single window of time has no variance, and looked certain."""
    got = advised(scanned(900, every_s=0.0))
    assert (got.clusters, got.cluster_kind) == (50, "runs of requests")
    gains = [row.gain for row in got.rows if row.gain.points]
    assert gains
    assert all(gain.low < gain.points < gain.high for gain in gains)
    assert "all have the same time" in " ".join(about_log(got))
    assert "same time" not in " ".join(about_log(advised(scanned(90))))


def test_a_capacity_that_prompts_do_not_fit_is_doubted() -> None:
    got = advised(scanned(300), 300)
    assert got.too_long == pytest.approx(14 / 15)
    assert "93.3 % of the prompts are longer than that" in about_capacity(got)
    assert "longer than that" not in about_capacity(advised(scanned(300)))


def test_the_gain_of_memory_is_reported_for_the_smallest_tier() -> None:
    rows = [ask(float(i), range(i % 50 * 100, i % 50 * 100 + 64), block_tokens=64) for i in range(200)]  # fmt: skip
    below = (Below("40 GB of host memory", 40.0), Below("and a disk of 100 GB", 100.0, disk=True))
    sentence = advised(sample_of(rows), 64 * 64.0, *below).decision.sentence
    assert sentence.endswith(" 40 GB of host memory would add 75.0 points.")
    small = (Below("0.1 GB of host memory", 0.1), Below("and a disk of 100 GB", 100.0, disk=True))
    sentence = advised(sample_of(rows), 64 * 64.0, *small).decision.sentence
    assert sentence.endswith(" 0.1 GB of host memory and a disk of 100 GB would add 75.0 points.")
