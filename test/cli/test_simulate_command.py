"""``canopy simulate`` as a user runs it."""

import json

import pytest

from canopy_lab.cli.main import main

ROW_KEYS = (
    "trace policy policy_config capacity_blocks capacity_fraction seed requests block_hit_ratio"
    " token_hit_ratio uncached_tokens_p50 uncached_tokens_p90 uncached_tokens_p95"
    " uncached_tokens_p99 tel_tokens seconds"
)


@pytest.fixture
def trace(write_conversations):
    return write_conversations(160, gap_ms=500)


def simulate(trace, *arguments, jobs="1"):
    out = trace.with_name("out.json")
    command = ["simulate", str(trace), "--format", "mooncake", "--json-out", str(out)]
    status = main([*command, "--jobs", jobs, *arguments])
    return status, json.loads(out.read_text()) if out.exists() else None


def drop_times(rows):
    """Return the rows without values that depend on the machine's load."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_rows_have_the_run_and_its_result(trace, capsys):
    status, rows = simulate(trace, "--policy", "canopy-lru,belady", "--capacity", "0.05,0.2,30")
    assert status == 0
    assert all(row.keys() >= set(ROW_KEYS.split()) for row in rows)
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, blocks)
        for policy in ("canopy-lru", "belady")
        for blocks in (rows[0]["capacity_blocks"], rows[1]["capacity_blocks"], 30)
    ]
    distinct_blocks = rows[0]["distinct_blocks"]
    assert rows[1]["capacity_blocks"] == round(0.2 * distinct_blocks)
    assert rows[2]["capacity_fraction"] == 30 / distinct_blocks
    assert rows[0]["requests"] == 160
    for lru, bound in zip(rows[:3], rows[3:]):
        assert bound["block_hit_ratio"] >= lru["block_hit_ratio"]
    printed = capsys.readouterr().out
    assert "belady" in printed


def test_two_processes_give_the_results_of_one(trace):
    arguments = ("--policy", "lru,wa,tail-belady", "--capacity", "0.05,0.2", "--placebo")
    _, one_process = simulate(trace, *arguments)
    _, two_processes = simulate(trace, *arguments, jobs="2")
    assert drop_times(one_process) == drop_times(two_processes)


def test_the_placebo_runs_for_policies_that_read_labels(trace):
    _, rows = simulate(trace, "--policy", "lru,wa", "--capacity", "0.1", "--placebo", "--seed=1,2")
    assert [(row["policy"], row["placebo"], row["seed"]) for row in rows] == [
        ("lru", False, 1),
        ("wa", False, 1),
        ("wa", True, 1),
        ("lru", False, 2),
        ("wa", False, 2),
        ("wa", True, 2),
    ]
    assert drop_times(rows)[0]["block_hit_ratio"] == drop_times(rows)[3]["block_hit_ratio"]


def test_options_reach_the_policy(trace):
    options = ("--policy", "wa", "--policy-config", 'wa={"min_samples":1}')
    _, rows = simulate(trace, *options, "--capacity", "0.1")
    assert [row["policy_config"]["min_samples"] for row in rows] == [1]


def test_the_threshold_of_tail_policies_is_lrus_p90_unless_set(trace):
    policies = "canopy-lru,etlru,canopy-tlru,tail-belady,threshold-lru"
    config = 'threshold-lru={"threshold_tokens":50}'
    _, rows = simulate(trace, "--policy", policies, "--policy-config", config, "--capacity", "0.1")
    p90 = rows[0]["uncached_tokens_p90"]
    assert {row["tel_threshold_tokens"] for row in rows} == {p90}
    thresholds = [row["policy_config"]["threshold_tokens"] for row in rows[1:]]
    assert thresholds == [p90, p90, p90, 50]


def test_broken_lines_are_skipped_on_request(trace, capsys):
    trace.write_text(trace.read_text() + "not json\n")
    status, _ = simulate(trace, "--policy", "lru", "--capacity", "0.1")
    assert status == 2
    assert "161" in capsys.readouterr().err
    status, rows = simulate(trace, "--policy", "lru", "--capacity", "0.1", "--skip-bad", "1")
    assert (status, rows[0]["requests"]) == (0, 160)
