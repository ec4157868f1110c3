"""Splitting a trace over instances: nothing lost, conversations whole, the pattern of the whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic.presets import get_preset
from synthetic.trace import synthesise
from wa.split import one_part

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError


def drawn(name: str, seconds: float) -> list[TraceRequest]:
    return [d.request for d in synthesise(get_preset(name), seconds, 1)]


@given(st.integers(1, 5), st.integers(0, 10**6), st.booleans())
@settings(max_examples=15)
def test_every_request_is_in_one_part_in_order_with_its_conversation(
    parts: int, seed: int, named: bool
) -> None:
    trace = [d.request for d in synthesise(get_preset("small"), 60.0, seed)]
    given = trace if named else [replace(r, conversation=None) for r in trace]
    split = [list(one_part(given, parts, k)) for k in range(parts)]
    assert sorted(r.line for part in split for r in part) == [r.line for r in trace]
    talk = {r.line: r.conversation for r in trace}
    homes: dict[str | None, set[int]] = {}
    for k, part in enumerate(split):
        assert [r.line for r in part] == sorted(r.line for r in part)
        for r in part:
            homes.setdefault(talk[r.line], set()).add(k)
    assert all(len(where) == 1 for where in homes.values())


def test_each_part_has_the_work_the_rate_over_time_and_the_reuse_of_the_whole() -> None:
    trace = drawn("trace-a", 3600.0)
    split = [list(one_part(trace, 4, k)) for k in range(4)]
    work = [sum(r.input_tokens + r.output_tokens for r in part) for part in split]
    assert max(work) < 1.05 * min(work)
    whole = np.histogram([r.time_s for r in trace], 12, (0.0, 3600.0))[0] / len(trace)
    for part in split:
        rate = np.histogram([r.time_s for r in part], 12, (0.0, 3600.0))[0] / len(part)
        assert np.abs(rate - whole).max() < 0.03
        later = np.mean([r.turn > 1 for r in part])
        assert later == pytest.approx(np.mean([r.turn > 1 for r in trace]), abs=0.03)


def test_a_missing_part_is_an_error() -> None:
    for part, parts in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(CanopyError, match="parts - 1"):
            one_part([], parts, part)
