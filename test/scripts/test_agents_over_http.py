"""benchmark/agents: results are counted from the turns, and the tables have them."""

import sys
from dataclasses import replace

import pytest

from environment import ROOT

for package in ("aiohttp", "openai", "psutil"):
    pytest.importorskip(package)
sys.path.append(str(ROOT / "benchmark" / "agents"))

import compare  # noqa: E402
import no_gain  # noqa: E402
from clients import SessionRun, SessionSizes  # noqa: E402

SESSION_SIZES = SessionSizes(
    sessions=2, turns=2, system_tokens=1, result_tokens=1, pause_s=(0.0, 0.0), people=1
)


def row_of_turn(client_kind: str, session: int, turn: int, ttft_s: float, cached_tokens: int) -> dict[str, object]:  # fmt: skip
    return {"client_kind": client_kind, "session": session, "turn": turn, "ttft_s": ttft_s, "end_s": 1.0, "prompt_tokens": 100, "cached_tokens": cached_tokens, "output_tokens": 5, "tool_calls": int(client_kind == "agent")}  # fmt: skip


RUN_ROW = {"regime": "dear-4", "arm": "lru", "sizes": {"turns": 2}}


def finished_run() -> SessionRun:
    run = SessionRun("", SESSION_SIZES, [], [])
    run.rows = [row_of_turn("agent", n, t, 1.0 + t, 50 * t) for n in (0, 1) for t in (0, 1)]
    run.rows += [row_of_turn("person", 0, 0, 9.0, 0)]
    return run


def test_sessions_turns_waits_and_hits_are_counted() -> None:
    totals = compare.summary(finished_run(), wall_s=7200.0)
    assert (totals["sessions_per_hour"], totals["turns"], totals["turns_with_a_call"]) == (1, 4, 4)
    assert totals["first_ttft_s"] == {"mean": 1.0, "p99": 1.0}
    assert totals["later_ttft_s"]["mean"] == 2.0
    assert totals["people_ttft_s"]["mean"] == 9.0
    assert totals["hit_percent"] == 20.0


def test_a_client_that_fails_is_recorded() -> None:
    run = SessionRun("http://127.0.0.1:9", replace(SESSION_SIZES, sessions=1, people=0), [], [])
    run.run_sessions()
    assert run.errors == ["agent 0: IndexError('list index out of range')"]


def test_a_table_has_the_median_of_the_runs() -> None:
    rows = [
        RUN_ROW | {"cpu_s": {"scheduler": 3, "http": 5}} | compare.summary(finished_run(), wall_s)
        for wall_s in (10.0, 30.0, 20.0)
    ]
    table = compare.markdown_tables(rows)
    assert "| lru | 3 | 20 | 4 | 360 | 0.2 | 0.25 | 1 |" in table
    assert "| dear-4, wall_s | 20 (4) |" in table


def test_a_server_that_ended_is_a_row_without_figures() -> None:
    table = compare.markdown_tables([RUN_ROW | {"server_ended": "RuntimeError: Out of memory"}])
    assert "| lru | 1 |" + " - |" * 13 in table
    assert "lru: the server ended with RuntimeError: Out of memory" in table


def test_a_ratio_is_paired_by_round() -> None:
    assert no_gain.paired_ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == [2.0, 2.0, 2.0]


def test_every_arm_of_auto_has_one_of_sglangs_beside_it() -> None:
    auto_arms = [name for name in compare.ARMS if name.startswith("auto, ")]
    assert auto_arms
    assert {name.replace("auto", "lru") for name in auto_arms} <= set(compare.ARMS)
