"""The page of ``canopy advise``: self-contained, with text, and rendered by a browser if there is one."""

import re

import pytest

from canopy_lab.advise.advice import LowerTier, advise
from canopy_lab.advise.advice_page import make_page
from canopy_lab.advise.advice_text import summary
from canopy_lab.advise.sample import LogSample
from canopy_lab.sim.system.engine_profile import load_profile
from support.tiny_traces import request_of


@pytest.fixture(scope="module")
def advice():
    requests = []
    for i in range(240):
        chat = i % 12
        requests.append(request_of(float(i), range(chat * 100, chat * 100 + 3 + i // 12), conversation=f"t{chat}", turn=1 + i // 12, block_tokens=64))  # fmt: skip
    blocks = {block for request in requests for block in request.blocks}
    sample = LogSample(
        requests, one_in=4, requests_in_log=960, tokens_in_log=10**6, span_s=239.0, block_tokens=64,
        method="4 bytes of UTF-8 count as a token", token_scale=1.1, distinct_blocks=len(blocks),
        log_blocks=4.0 * len(blocks),
    )  # fmt: skip
    profile = load_profile("llama-3.1-8b-h100")
    tiers = [LowerTier("8 GB of host memory", 8.0)]
    return advise(sample, profile, capacity_tokens=20_000, tiers=tiers, jobs=1)


def test_the_page_answers_every_question_and_loads_nothing(advice):
    html = make_page(advice, "chats <1>.jsonl", ["plan <2>.json"]).html()
    for phrase in ("How much of the traffic repeats", "What each policy, and hints", "host memory",
                  "hindsight bound", "random labels", "95 % interval", "GPU h saved/day", "prefill s",
                  "one conversation in 4", "4 bytes of UTF-8", "1.10 tokens",
                  "chats &lt;1&gt;.jsonl"):  # fmt: skip
        assert phrase in html.replace("&nbsp;", " ")
    assert not re.search(r"(?:src|href|srcset)=\"?https?:|<link|@import|url\(|<script", html)
    assert html.count("data:image/png;base64,") == 2


def test_with_a_sample_the_baseline_evicts_by_need_and_the_page_has_the_cache_size(advice):
    """Nodes are not scaled down with the cache: whole ones would weigh too much."""
    rows = {row.gain.label: row.gain for row in advice.rows}
    assert rows["lru, as in SGLang"].hit_ratio == rows["canopy-lru"].hit_ratio
    text = summary(advice)
    assert "evicting as much as is needed" in text
    assert advice.scaled_prompts < 50
    assert f"holds only {advice.scaled_prompts:.0f} mean prompts" in text


def test_the_terminal_ends_with_the_recommendation(advice):
    assert summary(advice).splitlines()[-1] == advice.decision.sentence
    assert re.match(r"(Use|Keep) ", advice.decision.sentence)
