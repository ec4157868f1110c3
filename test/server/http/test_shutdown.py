"""The seconds of a drain: they begin at the signal, and the time to end requests is subtracted."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import tokenizer_manager

from sglang_canopy.config.server_options import ATTRIBUTE, ServerOptions
from sglang_canopy.config.tiers import TierFlags, TierOptions, tier_options
from sglang_canopy.server.http import shutdown
from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.storage import disk_link
from support.live_tree import LiveTree


class Server:
    """A scheduler, and the HTTP process that receives signals."""

    def __init__(self, drain_s: float, storage: str | None = "dynamic") -> None:
        tiers = TierOptions(drain_s=drain_s)
        options = ServerOptions(tiers=tiers)
        self.server_args = SimpleNamespace(hicache_storage_backend=storage, **{ATTRIBUTE: options})
        self.cache = LiveTree(64, tiers=tiers).cache
        self.scheduler = SimpleNamespace(tree_cache=self.cache)

    async def set_internal_state_communicator(self, message: Any) -> list[Any]:
        return [arrivals.receive_messages(None, self.scheduler, message)]

    async def sigterm(self) -> None:
        shutdown.extend_shutdown(SimpleNamespace(tokenizer_manager=self))
        await asyncio.sleep(0)

    def time_left_s(self) -> float:
        return self.cache.tree_core.disk.time_left_s(self.cache.drain_s)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(shutdown, "_announcement", None)
    monkeypatch.setattr(disk_link, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(tokenizer_manager, "_SCHEDULER_EXIT_TIMEOUT_SECS", 15)
    return now_s


@pytest.mark.parametrize(("ended_after_s", "left_s"), [(5.0, 20.0), (25.0, 0.0), (60.0, -35.0)])
def test_the_time_to_end_requests_is_subtracted(clock: list[float], ended_after_s, left_s) -> None:
    server = Server(25.0)

    async def send_signals() -> None:
        for _ in range(2):  # a second signal changes nothing
            await server.sigterm()
            clock[0] += ended_after_s / 2

    asyncio.run(send_signals())
    assert server.time_left_s() == left_s
    assert tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS == 15 + 25


@pytest.mark.parametrize(("drain_s", "storage"), [(0.0, "dynamic"), (25.0, None)])
def test_without_a_disk_tier_or_time_a_scheduler_that_hangs_is_killed_as_early_as_before(
    clock: list[float], drain_s: float, storage: str | None
) -> None:
    server = Server(drain_s, storage)
    asyncio.run(server.sigterm())
    clock[0] += 5.0
    assert server.time_left_s() == drain_s  # a drain on its own starts its own time
    assert tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS == 15


@pytest.mark.parametrize(("flag_value", "drain_s"), [(None, 25.0), (0.0, 0.0), (7.5, 7.5)])
def test_the_flag_is_the_budget(flag_value, drain_s) -> None:
    assert tier_options(TierFlags(drain_s=flag_value)).drain_s == drain_s
