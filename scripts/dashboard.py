"""The Grafana dashboard of `deploy/kubernetes/dashboard.json`, written from the list of panels below.

    python scripts/dashboard.py            # write it
    python scripts/dashboard.py --check    # exit status 1 if it differs from the list

Import it in Grafana (Dashboards, New, Import), or let the chart's side-car find the config map.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes" / "dashboard.json"
HERE = '{job=~"$job",instance=~"$instance"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: ``queries`` are pairs of PromQL and legend; ``unit`` is Grafana's name of it."""

    title: str
    meaning: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False
    most: float | None = None
    kind: str = "timeseries"


def rate(name: str, by: str = "", extra: str = "") -> str:
    """Units a second of a counter, summed; ``by``: labels that are kept; ``extra``: matchers."""
    where = HERE[:-1] + (f",{extra}" if extra else "") + "}"
    return f"sum{f' by ({by})' if by else ''} (rate({name}{where}[$__rate_interval]))"


def quantile(q: float, name: str, by: str = "") -> str:
    """A quantile of a histogram's buckets."""
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', f'{by}, le' if by else 'le')})"


def total(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({name}{HERE})"


PROMPTS = rate("canopy:prompt_tokens_total")
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What users feel",
        (
            Panel(
                "Prompt tokens found, by tier",
                "Share of the prompt tokens whose KV was found. What is missing to 1 was computed.",
                (
                    (
                        f"{rate('canopy:hit_tokens_total', 'tier')} / ignoring(tier) group_left {PROMPTS}",
                        "{{tier}}",
                    ),
                ),
                "percentunit",
                stacked=True,
                most=1,
            ),
            Panel(
                "Time to first token",
                "SGLang's own histogram, from the arrival at the server.",
                tuple(
                    (quantile(q, "sglang:time_to_first_token_seconds"), f"P{q * 100:g}")
                    for q in (0.5, 0.95, 0.99)
                ),
                "s",
            ),
            Panel(
                "Requests",
                "Waiting and running.",
                (
                    (total("sglang:num_queue_reqs"), "waiting"),
                    (total("sglang:num_running_reqs"), "running"),
                ),
            ),
        ),
    ),
    (
        "What is cached",
        (
            Panel(
                "Fill of each tier",
                "Used of what the tier can hold.",
                (
                    (
                        f"{total('canopy:used_bytes', 'tier')} / {total('canopy:capacity_bytes', 'tier')}",
                        "{{tier}}",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Tokens on the device, by category",
                "By the category of their last user.",
                (
                    (
                        f'sum by (category) (canopy:held_tokens{HERE[:-1]},tier="device"}})',
                        "{{category}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Prompt tokens not found, by category",
                "What had to be computed, a second.",
                ((rate("canopy:miss_tokens_total", "category"), "{{category}}"),),
                stacked=True,
            ),
        ),
    ),
    (
        "What leaves",
        (
            Panel(
                "Tokens evicted, by tier and reason",
                "A second. Tokens that leave the device may lie on the host still.",
                ((rate("canopy:evicted_tokens_total", "tier, reason"), "{{tier}}, {{reason}}"),),
                stacked=True,
            ),
            Panel(
                "Tokens that left the device and are nowhere else",
                "A second: evicted without a copy on the host.",
                (
                    (
                        rate("canopy:evicted_tokens_total", extra='tier="device"')
                        + " - ("
                        + rate("canopy:demoted_tokens_total", extra='tier="device"')
                        + " or vector(0))",
                        "lost",
                    ),
                ),
            ),
            Panel(
                "Median stay before eviction",
                "A token counts once.",
                ((quantile(0.5, "canopy:residency_seconds", "tier"), "{{tier}}"),),
                "s",
            ),
        ),
    ),
    (
        "Disk, copies and the session gate",
        (
            Panel(
                "Disk traffic",
                "Bytes in segment files.",
                (
                    (rate("canopy:disk_read_bytes_total"), "read"),
                    (rate("canopy:disk_written_bytes_total"), "written"),
                ),
                "Bps",
            ),
            Panel(
                "Faults answered by computing again",
                "Of the disk tier, by kind; and ranks that read different records.",
                (
                    (rate("canopy:disk_faults_total", "kind"), "{{kind}}"),
                    (rate("canopy:rank_disagreements_total"), "ranks disagree"),
                ),
            ),
            Panel(
                "Sessions at the gate",
                "With --canopy-session-gate.",
                (
                    (total("canopy:gate_active_sessions"), "active"),
                    (total("canopy:gate_waiting_sessions"), "waiting"),
                ),
            ),
        ),
    ),
    (
        "What other policies would hit (with --canopy-whatif, --canopy-observe or auto)",
        (
            Panel(
                "Estimated hit ratio, by policy",
                "Share of the prompt tokens at the server's own capacity, over about an hour.",
                (
                    (
                        f'avg by (policy) (canopy:whatif_hit_ratio{HERE[:-1]},capacity="now"}} >= 0)',
                        "{{policy}}",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Estimated hit ratio, by capacity",
                "What more memory would win.",
                (
                    (
                        f"avg by (policy, capacity) (canopy:whatif_hit_ratio{HERE} >= 0)",
                        "{{policy}}, {{capacity}}",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Verdict of the meter",
                "Servers with enough requests for an estimate, and servers on which canopy-lru ranks "
                "because their policy fell behind it.",
                (
                    (total("canopy:whatif_decided"), "decided"),
                    (total("canopy:whatif_behind"), "behind canopy-lru"),
                ),
            ),
        ),
    ),
    (
        "Tenants",
        (
            Panel(
                "Tenants at a limit",
                "Those that use 95 % of their quota on disk, of their pins or of their kept paths.",
                ((total("canopy:tenants_at_limit", "limit"), "{{limit}}"),),
            ),
            Panel(
                "Refused at a limit",
                "A second: pages beyond a quota, wishes to pin or to keep.",
                ((rate("canopy:limit_refusals_total", "limit"), "{{limit}}"),),
            ),
            Panel(
                "Tenants whose hints are not acted on",
                "By what they say and by whose word it is: it came true no more often than a guess.",
                (
                    (
                        f'sum by (said, source) (canopy:hint_tenants{HERE[:-1]},heeded="no"}})',
                        "{{said}}, {{source}}",
                    ),
                ),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model, schema version 39 (Grafana 11 and later)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(_row(title, len(panels) + 1, y))
        width = 24 // len(row)
        for i, panel in enumerate(row):
            at = {"x": i * width, "y": y + 1, "w": width, "h": 8}
            panels.append(_panel(panel, len(panels) + 1, at))
        y += 9
    return {
        "uid": "sglang-canopy",
        "title": "Canopy: KV cache of SGLang",
        "tags": ["sglang", "canopy"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                _variable("job", "label_values(canopy:tree_nodes, job)"),
                _variable("instance", 'label_values(canopy:tree_nodes{job=~"$job"}, instance)'),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    at = {"x": 0, "y": y, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": at, "panels": []}


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 25 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}  # type: ignore[assignment]
    defaults = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": source,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": name, "datasource": source}
            for i, (expr, name) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    args = parser.parse_args()
    text = json.dumps(dashboard(), indent=1) + "\n"
    if args.check:
        if OUT.read_text(encoding="utf-8") != text:
            print(f"{OUT} is not current: python scripts/dashboard.py", file=sys.stderr)
            return 1
        return 0
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
