"""`--canopy-observe` feeds the what-if meter from ended requests."""

import logging
from types import SimpleNamespace

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_canopy.server.scheduler.observer import BLOCK_TOKENS, Observer
from sglang_canopy.whatif.meter import MIN_REQUESTS, Meter, MeterSetup, TierTokens
from support.live_tree import FakeReq, fake_req


def ended_request(i: int) -> FakeReq:
    """Return an ended request of SGLang's, with a prompt of its own of four blocks."""
    tokens = [1000 * i + j for j in range(4 * BLOCK_TOKENS)]
    return fake_req(tokens, [1], {"time": float(i), "category": "chat"}, finished=lambda: True)


def decode_batch(reqs: list[FakeReq]) -> SimpleNamespace:
    return SimpleNamespace(reqs=reqs, launch_ts=None, forward_mode=ForwardMode.DECODE)


def test_an_observer_logs_its_start_and_counts_ended_requests(caplog) -> None:
    caplog.set_level(logging.INFO)
    meter = Meter(MeterSetup(sample_stride=1), TierTokens(40 * BLOCK_TOKENS), "lru")
    observer = Observer(meter)
    assert "observing lru" in caplog.text
    for i in range(MIN_REQUESTS - 1):
        observer.record_batch(decode_batch([ended_request(i)]))
    assert meter.undecided_reason is not None
    for i in range(MIN_REQUESTS, MIN_REQUESTS + 20):
        observer.record_batch(decode_batch([ended_request(i)]))
    assert meter.undecided_reason is None
    assert meter.stats()["hit_ratio"] == 0.0
