"""The seconds of a drain: from the signal on, minus what SGLang spent on ending requests."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import ShutdownReq

from sglang_canopy.config.server_options import ATTRIBUTE, ServerOptions
from sglang_canopy.config.tiers import TierFlags, TierOptions, tier_options
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.http import shutdown
from sglang_canopy.server.scheduler.shutdown import shutdown_requested
from support import forked


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(shutdown, "_signalled_at", [])
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tokenizer_manager, "_SCHEDULER_EXIT_TIMEOUT_SECS", 15)
    return now


def manager(drain_s: float, storage: str | None = "dynamic") -> SimpleNamespace:
    options = ServerOptions(tiers=TierOptions(drain_s=drain_s))
    args = SimpleNamespace(hicache_storage_backend=storage, **{ATTRIBUTE: options})
    return SimpleNamespace(server_args=args)


def drained_for(message: ShutdownReq) -> float:
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(drain_s=25.0))
    shutdown_requested(scheduler, message)
    return scheduler.tree_cache.drain_s


@pytest.mark.parametrize(("ended_after_s", "left_s"), [(5.0, 20.0), (25.0, 0.0), (60.0, 0.0)])
def test_the_time_to_end_requests_counts(clock: list[float], ended_after_s, left_s) -> None:
    shutdown.sigterm_received()
    clock[0] += ended_after_s / 2
    shutdown.sigterm_received()  # an impatient operator
    clock[0] += ended_after_s / 2
    message = ShutdownReq()
    shutdown.message_dispatched(manager(25.0), message)
    assert drained_for(message) == left_s
    assert 15 + left_s == tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS


@pytest.mark.parametrize(("typed", "drain_s"), [(None, 25.0), (0.0, 0.0), (7.5, 7.5)])
def test_the_flag_is_the_budget(typed, drain_s) -> None:
    assert tier_options(TierFlags(drain_s=typed)).drain_s == drain_s


@pytest.mark.parametrize("typed", [-1.0, 1e9, float("nan")])
def test_a_budget_out_of_range_is_refused(typed) -> None:
    with pytest.raises(CanopyError, match="--canopy-drain-s must be"):
        TierFlags(drain_s=typed)


def test_without_a_signal_or_for_another_message_nothing_changes() -> None:
    message, other = ShutdownReq(), SimpleNamespace(rid="r1")
    shutdown.message_dispatched(manager(25.0), message)
    shutdown.sigterm_received()
    shutdown.message_dispatched(manager(25.0), other)
    assert message.rid is None
    assert other.rid == "r1"
    assert drained_for(message) == 25.0
    assert tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS == 15


def test_without_a_disk_tier_a_scheduler_that_hangs_is_killed_as_early_as_before() -> None:
    shutdown.sigterm_received()
    message = ShutdownReq()
    shutdown.message_dispatched(manager(25.0, storage=None), message)
    assert message.rid is None
    assert tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS == 15


def test_sglang_finds_schedulers_of_a_forked_server_by_their_title() -> None:
    """Else it ends at SIGTERM without waiting for them, and they drain nothing."""
    titled = "import setproctitle, sys; setproctitle.setproctitle('sglang::scheduler'); print(1, flush=True); sys.stdin.read()"  # fmt: skip
    given, gives = os.pipe()
    reads, out = os.pipe()
    process = forked.Process(
        [sys.executable, "-c", titled], stdin=given, stdout=out, stderr=subprocess.STDOUT,
        env={**os.environ, "CANOPY_TITLE": "1"},
    )  # fmt: skip
    os.read(reads, 1)
    assert psutil.Process(process.pid).cmdline()[0].startswith("sglang::scheduler")
    for end in (given, gives, reads, out):
        os.close(end)
    process.kill()
