"""The benchmark of gateways sends a trace in its order, on which the hit rates depend."""

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

FILE = Path(__file__).resolve().parents[2] / "benchmark" / "gateways" / "run.py"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("gateways_run", FILE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@given(
    talks=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    at_once=st.integers(1, 5),
    takes=st.lists(st.integers(0, 6), min_size=20, max_size=20),
)
def test_requests_begin_in_the_order_of_the_trace(benchmark, talks, at_once, takes) -> None:
    last: dict[int, int] = {}
    planned = []
    for ordinal, talk in enumerate(talks):
        planned.append(SimpleNamespace(ordinal=ordinal, previous=last.get(talk)))
        last[talk] = ordinal
    begun: list[int] = []
    under_way: set[int] = set()

    async def send(one: Any) -> int:
        begun.append(one.ordinal)
        under_way.add(one.ordinal)
        assert len(under_way) <= at_once
        assert one.previous not in under_way
        for _ in range(takes[one.ordinal]):
            await asyncio.sleep(0)
        under_way.discard(one.ordinal)
        return one.ordinal

    rows = asyncio.run(benchmark.in_order(SimpleNamespace(planned=planned), at_once, send))
    assert rows == begun == list(range(len(talks)))


def test_a_failed_request_ends_the_replay(benchmark) -> None:
    planned = [SimpleNamespace(ordinal=n, previous=n - 1 if n else None) for n in range(3)]

    async def send(one: Any) -> int:
        raise ValueError(one.ordinal)

    with pytest.raises(ValueError, match="0"):
        asyncio.run(benchmark.in_order(SimpleNamespace(planned=planned), 1, send))
