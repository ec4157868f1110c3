"""The learnt state of a live policy is restored at the next start."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_canopy.private_file import SET_ASIDE_COUNTS
from sglang_canopy.radix.saved_profile import SAVE_INTERVAL_S, Profile, read_or_set_aside
from sglang_canopy.server.http import entry
from sglang_canopy.telemetry.window import TtftHour
from support.live_tree import LiveTree


def serve_requests(tree: LiveTree, count: int) -> None:
    for i in range(count):
        tokens = [i % 5] * (20 + i)
        tree.serve(tokens, time=2.0 * i, category="chat", path=list(range(i % 5, 400, 5))[: i + 1])


def test_a_saved_profile_gives_the_next_run_its_curves(tmp_path: Path) -> None:
    path = tmp_path / "wa.json"
    tree = LiveTree(4096, "wa")
    tree.core.live.profile = Profile(str(path))
    serve_requests(tree, 60)
    tree.core.live.profile.writer.join()
    assert path.exists()
    tree.core.live.profile.save(tree.core.live.device_policy)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    restored_policy = LiveTree(4096, "wa").core.live.device_policy
    restored_policy.restore(read_or_set_aside(str(path)))
    categories = json.loads(path.read_text())["categories"]
    assert restored_policy.state()["categories"].keys() == categories.keys() != set()


def test_a_profile_is_saved_once_per_interval(tmp_path: Path) -> None:
    saves = 0

    class Policy:
        def state(self) -> dict[str, int]:
            nonlocal saves
            saves += 1
            return {"version": 1}

    profile = Profile(str(tmp_path / "p.json"))
    for now_s in (0.0, 1.0, SAVE_INTERVAL_S - 1, SAVE_INTERVAL_S + 1, SAVE_INTERVAL_S + 2):
        profile.save_if_due(Policy(), now_s)  # type: ignore[arg-type]
        profile.writer.join()
    assert saves == 2


def test_a_profile_that_cannot_be_written_does_not_stop_serving(tmp_path: Path, caplog) -> None:
    tree = LiveTree(4096, "wa")
    profile = tree.core.live.profile = Profile(str(tmp_path / "gone" / "p.json"))
    serve_requests(tree, 40)
    for _ in range(2):
        profile.save(tree.core.live.device_policy)
    assert caplog.text.count("cannot save") == 1


def test_first_tokens_with_times_are_counted_by_the_ttft_fit() -> None:
    count_before = entry.http_state.ttft_fit.stats()["requests"]
    time_stats = SimpleNamespace(forward_entry_time=1.0, prefill_finished_time=1.5)
    batch_output = SimpleNamespace(time_stats=[time_stats], prompt_tokens=[100], cached_tokens=[40])
    request_state = SimpleNamespace(time_stats=SimpleNamespace(created_time=0.0))
    entry.record_first_token(None, request_state, batch_output, 0)
    entry.record_first_token(None, request_state, SimpleNamespace(time_stats=None), 0)
    assert entry.http_state.ttft_fit.stats()["requests"] == count_before + 1


def test_client_waits_are_counted_from_the_requests_creation(monkeypatch):
    ttft_hour = TtftHour(lambda: 1e9)
    monkeypatch.setattr(entry.http_state, "ttft_hour", ttft_hour)
    request_state = SimpleNamespace(time_stats=SimpleNamespace(created_time=10.0))
    monkeypatch.setattr(entry.time, "perf_counter", lambda: 14.0)
    for token_time in (12.0, None):  # the second has no time of its own
        entry.record_first_token(token_time, request_state, SimpleNamespace(time_stats=None), 0)
    (point,) = ttft_hour.points()
    assert (point["requests"], point["p50_s"], point["p99_s"]) == (
        2,
        pytest.approx(2.0, rel=0.06),
        pytest.approx(4.0, rel=0.06),
    )


DAMAGED_FILES = {
    "empty": b"",
    "cut off": b'{"version": 1, "categories": {"de',
    "binary": bytes(range(256)),
    "of another version": b'{"version": 2, "categories": {}}',
    "no counts": b'{"version": 1, "categories": {"default": {}}}',
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_profile_is_set_aside_and_learning_restarts(tmp_path, damage, caplog):
    path = tmp_path / "wa.json"
    path.write_bytes(DAMAGED_FILES[damage])
    assert read_or_set_aside(str(path)) is None
    assert (tmp_path / "wa.json.bad").read_bytes() == DAMAGED_FILES[damage]
    assert SET_ASIDE_COUNTS["wa.json"] >= 1
    assert caplog.text.count("cannot be used") == 1
    Profile(str(path)).save(LiveTree(64, "wa").core.live.device_policy)
    assert path.exists()


def test_a_profile_that_cannot_be_read_is_not_used(tmp_path: Path, caplog) -> None:
    assert read_or_set_aside(str(tmp_path)) is None
    assert caplog.text.count("is not used") == 1
