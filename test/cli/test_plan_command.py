"""``canopy plan`` as a user runs it."""

import json
import os
import stat

import pytest

from canopy_lab.cli.main import main
from canopy_lab.plan.server_plan import read_config

ROW_KEYS = {
    "instances",
    "dram_gib",
    "disk",
    "disk_gib",
    "ttl",
    "policy",
    "mean_ttft_s",
    "p99_ttft_s",
    "throughput_tokens_per_s",
    "cost_per_hour",
    "token_hit_ratio_by_tier",
}
SMALL_SEARCH = (
    "--device-tokens", "30000", "--search", "dram_levels=3,disk_levels=2",
    "--disks", "gp3", "--jobs", "1", "--policy", "canopy-lru",
)  # fmt: skip
UNCHECKED = ("--search", "dram_levels=3,disk_levels=2,checks=off")


@pytest.fixture
def trace_path(write_conversations):
    return write_conversations(120, gap_ms=400)


@pytest.fixture
def plan(trace_path, tmp_path):
    """``plan(*arguments)``: run the command on the trace; return its exit status and its JSON."""

    def run(*arguments, base=SMALL_SEARCH):
        out = tmp_path / "out.json"
        input_options = [str(trace_path), "--format", "mooncake"]
        status = main(["plan", *input_options, *base, "--json-out", str(out), *arguments])
        return status, json.loads(out.read_text()) if out.exists() else None

    return run


def test_a_plan_is_printed_and_written_in_every_form(plan, tmp_path, capsys):
    page_path, plan_path = tmp_path / "plan.html", tmp_path / "plan.yaml"
    status, report = plan(
        "--slo", "p99_ttft<600s", "--best", "cost", "--html", str(page_path), "--out", str(plan_path),
        "--disk-path", "/var/lib/kv",
    )  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    for phrase in ("Pareto front", "against the fixed baseline", "Chosen (least cost",
                  "at other loads", "an example to replace",
                  f"--config {plan_path}"):  # fmt: skip
        assert phrase in printed
    assert {"evaluations", "front", "baseline", "hypervolume", "seconds"} <= set(report)
    assert all(set(row) >= ROW_KEYS for row in [*report["front"], report["baseline"]])
    assert report["baseline"]["disk"] is None
    assert 0 < report["hypervolume"] <= 1.2
    assert report["evaluations"] == len(report["evaluated"])
    assert set(report["sensitivity"]) == {"0.8", "1", "1.2"}
    chosen = report["chosen"]
    assert chosen["cost"] == min(row["cost"] for row in report["evaluated"])
    config = read_config(plan_path)
    assert config["radix-eviction"] == "canopy-lru"
    assert config.get("canopy-host-gb", 0) == round(chosen["dram_gib"] * 2**30) / 1e9
    assert config["page-size"] == chosen["page_size"]
    assert config["max-total-tokens"] == 30000
    assert stat.S_IMODE(os.stat(plan_path).st_mode) == 0o600
    html = page_path.read_text()
    assert html.count("data:image/png;base64,") == 1
    assert html.index("Chosen (least cost") < html.index("<img") < html.index("<details>")
    assert "http" not in html.split("<p class=small>Prices")[0]


def test_unmet_limits_name_the_binding_one_and_the_nearest_point(plan, tmp_path, capsys):
    plan_path = tmp_path / "plan.yaml"
    status, report = plan("--slo", "p99_ttft<1us,cost<1000", "--out", str(plan_path))
    printed = capsys.readouterr().out
    assert status == 1
    assert "No configuration meets p99_ttft<1us and cost<1000" in printed
    assert "p99_ttft<1us: the best found is" in printed
    assert "The nearest feasible point" in printed
    assert "it is feasible with: p99_ttft<" in printed
    assert not report["feasible"]
    assert report["binding"] == ["p99_ttft<1us"]
    assert "Try next: more instances (--instances 2)" in printed
    assert not plan_path.exists()


def test_prompts_larger_than_the_device_are_skipped_and_counted(plan, trace_path, capsys):
    """A server of this size refuses them, so the plan is for the others."""
    long_row = {"timestamp": 10**6, "input_length": 29_950, "output_length": 9, "hash_ids": [*range(10**6, 10**6 + 59)]}  # fmt: skip
    trace_path.write_text(trace_path.read_text() + json.dumps(long_row) + "\n")
    status, report = plan(*UNCHECKED)
    assert status == 0
    assert (report["about"]["requests"], report["about"]["too_long"]) == (120, 1)
    printed = capsys.readouterr().out
    assert "1 of 121 requests need more than the 30000 tokens of the device's KV pool" in printed
    assert "few requests" in printed


def test_a_trace_of_one_moment_is_planned_and_the_report_names_it(plan, trace_path, capsys):
    plan(*UNCHECKED)
    assert "all have the same time" not in capsys.readouterr().out
    rows = [json.loads(line) for line in trace_path.read_text().splitlines()]
    trace_path.write_text("".join(json.dumps({**row, "timestamp": 5}) + "\n" for row in rows))
    assert plan(*UNCHECKED)[0] == 0
    assert "all have the same time" in capsys.readouterr().out


QUICK_SEARCH = (
    *("--search", "dram_levels=2,checks=off", "--disks", "none"),
    *("--server", "page_size=1", "--jobs", "1"),
)


def test_a_price_of_another_gpu_is_not_used(plan, capsys):
    status, report = plan("--profile", "smollm2-135m-cpu", base=QUICK_SEARCH)
    assert (status, report) == (2, None)
    printed = capsys.readouterr().err
    assert "the GPU-hour of H100, and profile smollm2-135m-cpu is of one core of a Xeon" in printed
    status, report = plan("--profile", "smollm2-135m-cpu=0.05", base=QUICK_SEARCH)
    assert status == 0
    assert report["chosen"]["cost_per_hour"] < 0.2


def test_twice_the_traffic_is_simulated(plan, capsys):
    options = ("--search=dram_levels=2,loads=2", "--slo=p99_ttft<600s", "--device-tokens=30000")
    status, report = plan(*options, base=QUICK_SEARCH)
    assert status == 0
    assert set(report["sensitivity"]) == {"0.8", "1", "1.2", "2"}
    assert "+100 %" in capsys.readouterr().out


def test_two_gpus_an_instance_are_paid_for(plan):
    with_one_gpu, with_two_gpus = (
        plan("--server", f"page_size=1,gpus={n}", "--device-tokens", "30000", base=QUICK_SEARCH)[1]
        for n in "12"
    )
    cost = with_two_gpus["baseline"]["cost_per_hour"] - with_one_gpu["baseline"]["cost_per_hour"]
    assert cost == pytest.approx(3.9)
