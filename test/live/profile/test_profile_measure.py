"""The costs measured on a server with known costs equal the known costs."""

import pytest

from canopy_lab.live.profile.client import ProfiledServer
from canopy_lab.live.profile.measure import Limits, Measurer
from sglang_canopy.errors import CanopyError
from support.chat_endpoint import chat_endpoint

ARRIVAL_S, STEP_S, TOKEN_S, PAIR_S, REQUEST_S, DECODE_S = 0.005, 0.01, 1e-4, 1e-7, 0.002, 0.001


class KnownServer:
    """A server whose times follow a formula, and which caches prefixes as a radix tree does."""

    pool_tokens, page_tokens, token_range = 100_000, 1, (0, 1 << 30)

    def __init__(self, has_cache: bool = True) -> None:
        self._cached_prompts: set[tuple[int, ...]] = set()
        self._has_cache = has_cache

    def generate(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, int]:
        new_tokens = attention_s = hit_tokens = context_tokens = 0.0
        for prompt in prompts:
            cached_tokens = self._cached_tokens(prompt) if self._has_cache else 0
            uncached = len(prompt) - cached_tokens
            new_tokens += uncached
            hit_tokens += cached_tokens
            context_tokens += len(prompt)
            attention_s += PAIR_S * (uncached * cached_tokens + uncached * (uncached + 1) / 2)
            self._cached_prompts.add(tuple(prompt))
        prefill_s = ARRIVAL_S + STEP_S + TOKEN_S * new_tokens + attention_s
        prefill_s += REQUEST_S * (len(prompts) - 1)
        step_s = STEP_S + TOKEN_S + DECODE_S * (len(prompts) - 1) + PAIR_S * context_tokens
        return prefill_s + (output_tokens - 1) * step_s, int(hit_tokens)

    def _cached_tokens(self, prompt: list[int]) -> int:
        cached_lengths = [len(k) for k in self._cached_prompts if tuple(prompt[: len(k)]) == k]
        return min(max(cached_lengths, default=0), len(prompt) - 1)


def measure_costs(server, **limits):
    fields = {"prompt_tokens": 1024, "context_tokens": 4096, "batch": 4, "repeats": 1, **limits}
    return Measurer(server, Limits(**fields), lambda _: None).measure_surfaces()


def test_known_costs_are_recovered():
    costs = measure_costs(KnownServer())
    assert costs.arrival_s == pytest.approx(ARRIVAL_S, abs=1e-4)
    for tokens, linear_s in zip(costs.prefill_tokens, costs.prefill_linear_s, strict=True):
        assert linear_s == pytest.approx(STEP_S + TOKEN_S * tokens, rel=0.02)
    for new_tokens, row_s in zip(costs.prefill_tokens, costs.attention_s, strict=True):
        for context_tokens, seconds in zip(costs.attention_context_tokens, row_s, strict=True):
            pairs = new_tokens * context_tokens + new_tokens * (new_tokens + 1) / 2
            assert seconds == pytest.approx(PAIR_S * pairs, rel=0.05, abs=2e-5)
    assert costs.prefill_request_s == pytest.approx(REQUEST_S, rel=0.05)
    assert costs.decode_batch == (1, 2, 4)
    assert costs.decode_step_s[2][0] == pytest.approx(STEP_S + TOKEN_S + 3 * DECODE_S, rel=0.05)


def test_a_server_without_a_cache_is_refused_by_name():
    with pytest.raises(CanopyError, match="was not cached"):
        measure_costs(KnownServer(has_cache=False))


def test_a_batch_that_does_not_fit_is_extrapolated():
    server = KnownServer()
    server.pool_tokens = 6000
    costs = measure_costs(server)
    assert costs.decode_step_s[2][-1] > costs.decode_step_s[2][-2] > 0


def test_an_unreachable_address_is_reported_in_one_line():
    with pytest.raises(CanopyError, match="is the server up") as error_info:
        ProfiledServer("http://127.0.0.1:9")
    assert "\n" not in str(error_info.value)
    with pytest.raises(CanopyError, match="http://HOST:PORT"):
        ProfiledServer("ftp://somewhere")


FP8_SERVER = {"model_path": "m", "kv_cache_dtype": "fp8_e4m3", "tp_size": 2}


@pytest.mark.parametrize(
    ("memory", "status", "expected"),
    [
        ({"kvcache": 4.0, "token_capacity": 131_072}, None, 65_536),
        ({"kvcache": 0.004, "token_capacity": 2048}, None, None),  # rounded to thousandths
        ({}, {"ranks": [{"kv_bytes_per_token": 32_768.0}]}, 65_536),
        ({}, {"ranks": []}, None),
    ],
)
def test_the_size_of_a_tokens_kv_is_that_of_the_servers_pools(memory, status, expected):
    """Under ``--kv-cache-dtype fp8_e4m3`` the model's config would give twice the size."""
    server_info = {**FP8_SERVER, "internal_states": [{"memory_usage": memory}]}
    answers = {"/server_info": server_info, **({"/canopy/status": status} if status else {})}
    with chat_endpoint([], answers) as (url, received):
        assert ProfiledServer(url, "k").kv_bytes_per_token() == expected
    assert set(received.auth_keys) == {"Bearer k"}
