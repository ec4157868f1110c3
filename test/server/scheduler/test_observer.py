"""`--canopy-observe` says that it watches, and when its figures can be trusted."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from sglang_canopy.server.scheduler.observer import BLOCK_TOKENS, Observer
from sglang_canopy.whatif.meter import LEAST_REQUESTS, Memory, Meter, MeterSetup


def ended(number: int) -> SimpleNamespace:
    """A request of SGLang's that has ended: each a prompt of its own of four blocks."""
    tokens = [1000 * number + i for i in range(4 * BLOCK_TOKENS)]
    return SimpleNamespace(
        finished=lambda: True,
        origin_input_ids=tokens,
        output_ids=[1],
        sampling_params=SimpleNamespace(
            custom_params={"canopy": {"time": float(number), "category": "chat"}}
        ),
        extra_key=None,
        cache_salt=None,
        cached_tokens=0,
        cached_tokens_device=0,
        cached_tokens_host=0,
        finished_reason=SimpleNamespace(),
        to_finish=None,
    )


def test_a_line_at_the_start_and_one_when_the_figures_mean_something(caplog) -> None:
    caplog.set_level(logging.INFO)
    meter = Meter(MeterSetup(one_in=1), Memory(40 * BLOCK_TOKENS), "lru")
    observer = Observer(meter)
    assert "watching lru" in caplog.text
    caplog.clear()
    for number in range(LEAST_REQUESTS - 1):
        observer.computed(SimpleNamespace(reqs=[ended(number)]))
    assert "mean anything" not in caplog.text
    for number in range(LEAST_REQUESTS, LEAST_REQUESTS + 20):
        observer.computed(SimpleNamespace(reqs=[ended(number)]))
    assert caplog.text.count("figures that mean anything: lru hits 0.0 %") == 1
