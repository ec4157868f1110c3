"""Every query of the dashboard and of the alerts reads series, and labels, that the server has."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from canopy_documents.plugin.series import METRICS
from sglang_canopy.telemetry.series import CACHE_METRICS, PREFIX, RANK_LABEL

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/kubernetes/dashboard.json").read_text(encoding="utf-8"))
COMMON_LABELS = {RANK_LABEL, "job", "instance", "le"}
RULES = yaml.safe_load_all((ROOT / "deploy/kubernetes/monitoring.yaml").read_text("utf-8"))
ALERTS = {
    rule["alert"]: rule["expr"]
    for document in RULES
    if document["kind"] == "PrometheusRule"
    for group in document["spec"]["groups"]
    for rule in group["rules"]
}
PANELS = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}


def labels_by_series() -> dict[str, set[str]]:
    """Return the labels of each series on ``/metrics``."""
    labels_of = {}
    for metric in (*CACHE_METRICS, *METRICS):
        labels_of[PREFIX + metric.name] = {*metric.labels, *COMMON_LABELS}
    return labels_of


def read_sglang_collector() -> str:
    from sglang.srt.observability import metrics_collector

    return Path(metrics_collector.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("title", [*PANELS, *ALERTS])
def test_a_query_reads_existing_series(title) -> None:
    query = ({**PANELS, **ALERTS})[title].replace("$__rate_interval", "1m")
    promql_parser.parse(query)  # raises if it is not PromQL
    names = re.findall(r"\b((?:canopy|sglang):\w+)", query)
    assert names
    labels_of, collector_code = labels_by_series(), read_sglang_collector()
    grouping_labels = {
        label.strip()
        for labels in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", query)
        for label in labels.split(",")
    }
    filters = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", query))
    for name in names:
        if name.startswith("sglang:"):
            assert f'"{name.removesuffix("_bucket")}"' in collector_code, name
            assert grouping_labels <= COMMON_LABELS
        else:
            assert name in labels_of, name
            assert filters <= labels_of[name], f"{name} has no label {filters - labels_of[name]}"
    assert grouping_labels <= set().union(*(labels_of.get(name, COMMON_LABELS) for name in names))


def test_every_series_of_faults_has_an_alert() -> None:
    expressions = " ".join(ALERTS.values())
    for name in (
        *("disk_faults_total", "rank_disagreements_total", "hit_tokens_total"),
        *("hint_tenants", "tenants_at_limit"),
    ):
        assert PREFIX + name in expressions


def test_legends_name_labels() -> None:
    legends = [title.partition(": ")[2] for title in PANELS]
    assert any("{{" in legend for legend in legends)
    for legend, query in zip(legends, PANELS.values()):
        for label in re.findall(r"{{(\w+)}}", legend):
            assert re.search(rf"by \([^)]*\b{label}\b", query)
