"""`--canopy-observe` reports that it observes, and whether its figures are reliable."""

import logging
from types import SimpleNamespace

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_canopy.server.scheduler.observer import BLOCK_TOKENS, Observer
from sglang_canopy.whatif.meter import MIN_REQUESTS, Memory, Meter, MeterSetup
from support.live_tree import FakeReq, fake_req


def ended(number: int) -> FakeReq:
    """A request of SGLang's that has ended: each a prompt of its own of four blocks."""
    tokens = [1000 * number + i for i in range(4 * BLOCK_TOKENS)]
    return fake_req(tokens, [1], {"time": float(number), "category": "chat"}, finished=lambda: True)


def decoded(reqs: list[FakeReq]) -> SimpleNamespace:
    return SimpleNamespace(reqs=reqs, launch_ts=None, forward_mode=ForwardMode.DECODE)


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
