"""`--canopy-observe` reports that it observes, and whether its figures are reliable."""

import logging
import random
import time
from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_canopy.schedule.prefill_cost import REFIT_BATCHES
from sglang_canopy.server.scheduler.observer import BLOCK_TOKENS, Observer
from sglang_canopy.whatif.meter import MIN_REQUESTS, Memory, Meter, MeterSetup


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


def decoded(reqs: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(reqs=reqs, launch_ts=None, forward_mode=ForwardMode.DECODE)


def test_prefill_times_are_measured_and_the_meter_prices_by_them() -> None:
    meter = Meter(MeterSetup(one_in=1), Memory(40 * BLOCK_TOKENS), "lru")
    observer, draw = Observer(meter), random.Random(1)
    for _ in range(REFIT_BATCHES):
        new, cached = draw.randrange(100, 8000), draw.randrange(0, 30_000)
        observer._times.done_at = time.monotonic() - 1e-4 * new * (1 + (cached + new / 2) / 20_000)
        req = SimpleNamespace(
            finished=lambda: False, num_matched_prefix_tokens=cached, host_loaded_length=0
        )
        observer.computed(
            SimpleNamespace(
                reqs=[req],
                launch_ts=None,
                forward_mode=ForwardMode.EXTEND,
                extend_lens=[new],
                prefix_lens=[cached],
            )
        )
    assert meter.stats()["depth_scale_tokens"] == pytest.approx(20_000, rel=0.2)


def test_a_line_at_the_start_and_one_when_the_figures_mean_something(caplog) -> None:
    caplog.set_level(logging.INFO)
    meter = Meter(MeterSetup(one_in=1), Memory(40 * BLOCK_TOKENS), "lru")
    observer = Observer(meter)
    assert "observing lru" in caplog.text
    caplog.clear()
    for number in range(MIN_REQUESTS - 1):
        observer.computed(decoded([ended(number)]))
    assert "significant figures" not in caplog.text
    for number in range(MIN_REQUESTS, MIN_REQUESTS + 20):
        observer.computed(decoded([ended(number)]))
    assert caplog.text.count("first significant figures: lru hits 0.0 %") == 1
