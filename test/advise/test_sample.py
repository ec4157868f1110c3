"""A bounded sample of a log of any length."""

import json
import random
from pathlib import Path

import pytest

from canopy_lab.advise.sample import RequestSampler, hash_conversation, read_sample
from canopy_lab.sim.stack import lru_curve
from sglang_canopy.errors import CanopyError
from support.tiny_traces import request_of


def conversation_requests(count: int, turns: int, seed: int = 0):
    """Conversations that share a system prompt of 4 blocks and grow by 2 blocks a turn."""
    rng = random.Random(seed)
    starts_s = sorted((rng.uniform(0, count * 10), conversation) for conversation in range(count))
    rows = []
    for start_s, conversation in starts_s:
        path = [1, 2, 3, 4]
        for turn in range(turns):
            path = [*path, *(10 + (conversation * turns + turn) * 2 + step for step in range(2))]
            rows.append(request_of(start_s + turn * rng.uniform(5, 60), path, conversation=f"t{conversation}", turn=turn + 1))  # fmt: skip
    return sorted(rows, key=lambda request: request.time_s)


def chat_log(path: Path, requests: int, has_ids: bool = False) -> Path:
    with path.open("w") as out:
        for i in range(requests):
            chat, turn = i % (requests // 4), i // (requests // 4)
            messages = [{"role": "system", "content": "S" * 2000}]
            for step in range(turn + 1):
                messages.append({"role": "user", "content": f"{chat}/{step} " * 40})
                messages.append({"role": "assistant", "content": f"{step}! " * 40})
            fields = {"time": float(i), "messages": messages[:-1], "prompt_tokens": 1000}
            out.write(json.dumps(fields | ({"session_id": f"s{chat}"} if has_ids else {})) + "\n")
    return path


def test_a_sample_has_whole_conversations_within_its_limit_in_any_order():
    rows, samples = conversation_requests(200, 5), []
    shuffled = random.Random(3).sample(rows, len(rows))
    for order in (rows, shuffled):
        sampler = RequestSampler(100, 10**9)
        for row in order:
            if sampler.selects(hash_conversation(row)):
                sampler.add(hash_conversation(row), row)
        assert sampler.one_in in (8, 16, 32)
        samples.append(sampler.requests())
    sample, shuffled_sample = samples
    assert sample == shuffled_sample
    assert 50 <= len(sample) <= 100
    assert len(sample) == 5 * len({request.conversation for request in sample})
    assert [request.time_s for request in sample] == sorted(request.time_s for request in sample)


def test_blocks_are_merged_before_conversations_are_dropped():
    rows = [request_of(float(i), range(i * 1000, i * 1000 + 64), conversation=str(i), block_tokens=16) for i in range(50)]  # fmt: skip
    sampler = RequestSampler(1000, 900)
    for row in rows:
        sampler.add(hash_conversation(row), row)
    assert sampler.merged == 4
    assert {request.block_tokens for request in sampler.requests()} == {64}
    assert sampler.one_in == 1


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_scaled_cache_of_a_sample_has_the_hit_ratio_of_the_whole(has_ids: bool, tmp_path: Path):
    path = chat_log(tmp_path / "log.jsonl", 2000, has_ids)
    full_sample = read_sample(path, "openai")
    thinned = read_sample(path, "openai", max_requests=500)
    assert (full_sample.one_in, full_sample.sampled_share) == (1, 1.0)
    assert thinned.one_in in (4, 8)
    assert thinned.requests_in_log == full_sample.requests_in_log == 2000
    assert thinned.tokens_in_log == full_sample.tokens_in_log
    # The log's server counted otherwise, and capacities follow it.
    assert full_sample.token_scale == pytest.approx(2000 * 1000 / full_sample.tokens_in_log)
    for tokens in (1e6, 4e6, 1e7, 2.5e7):
        hit_ratios = []
        for sample in (full_sample, thinned):
            curve = lru_curve(sample.requests)
            hit_ratios.append(curve.token_hits(sample.blocks_of(tokens)) / curve.tokens)
        assert hit_ratios[1] == pytest.approx(hit_ratios[0], abs=0.02)
        assert thinned.tokens_of(thinned.blocks_of(tokens)) == pytest.approx(tokens, rel=0.01)


def test_a_log_without_requests_is_refused(tmp_path: Path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(CanopyError, match="holds no requests"):
        read_sample(path, "openai")
    with pytest.raises(CanopyError, match="blocks already"):
        read_sample(path, "mooncake", tokenizer="t")
