"""The alerts, evaluated by Prometheus' own ``promtool`` over series as servers export them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FIRING_CASES = {
    "a first fault": ("_x5 3x30", 7),
    "a first fault after zero": ("0x5 3x30", 7),
    "a later fault": ("1x20 2x30", 22),
}
SILENT_CASES = {"no fault": ("0x40", 20), "an old fault": ("3x40", 20)}
SERIES_BY_ALERT = {
    "CanopyDiskFull": 'canopy:disk_faults_total{instance="a",kind="full"}',
    "CanopyDiskFaults": 'canopy:disk_faults_total{instance="a",kind="io"}',
}


def evaluate(folder: Path, series: str, values: str, query: str, minute: int, samples: list[dict]):
    """Check ``query`` at ``minute`` under the alerts, while ``series`` takes ``values``, one a minute."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not on the PATH: it is in Debian's package prometheus")
    text = (ROOT / "deploy" / "kubernetes" / "monitoring.yaml").read_text(encoding="utf-8")
    (rules,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "PrometheusRule")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
    expression = {"expr": query, "eval_time": f"{minute}m", "exp_samples": samples}
    test_case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values}],
        "promql_expr_test": [expression],
    }
    test_file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test_case]}
    (folder / "test.yaml").write_text(yaml.safe_dump(test_file))
    command = [program, "test", "rules", "test.yaml"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("alert", SERIES_BY_ALERT)
@pytest.mark.parametrize("case", [*FIRING_CASES, *SILENT_CASES])
def test_an_alert_fires_for_the_first_fault_and_every_new_one(tmp_path, alert, case) -> None:
    values, minute = (FIRING_CASES | SILENT_CASES)[case]
    alerts = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    samples = [{"labels": "{}", "value": int(case in FIRING_CASES)}]
    evaluate(tmp_path, SERIES_BY_ALERT[alert], values, alerts, minute, samples)


def test_the_panel_of_lost_tokens_has_a_value_without_a_host_tier(tmp_path) -> None:
    dashboard = ROOT / "deploy" / "kubernetes" / "dashboard.json"
    (query,) = (
        target["expr"]
        for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", ())
        if panel["title"] == "Tokens that left the device and are nowhere else"
    )
    for variable, value in (("$job", "j"), ("$instance", "a"), ("$__rate_interval", "5m")):
        query = query.replace(variable, value)
    series = 'canopy:evicted_tokens_total{instance="a",job="j",tier="device",category="chat"}'
    evaluate(tmp_path, series, "0+600x30", query, 10, [{"labels": "{}", "value": 10}])
