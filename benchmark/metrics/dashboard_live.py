"""A real Prometheus scrapes a real server under load; every query of the dashboard and of the alerts
is asked, and the panels are drawn from the answers.

    python benchmark/metrics/dashboard_live.py --picture docs/figures/dashboard.png

Needs Prometheus on the PATH, or `--prometheus FILE` (Debian: `apt-get install prometheus`). Prints
one line a panel, with how many lines and points its queries gave, and ends with status 1 where a
query was refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from live import send_traffic, small_server

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_S = 2
WINDOW = "20s"
Line = tuple[str, list[float], list[float]]


def relabelling() -> list[dict[str, Any]]:
    """The rules of the ServiceMonitor, in Prometheus' own spelling of their keys."""
    text = (ROOT / "deploy" / "kubernetes" / "monitoring.yaml").read_text()
    (monitor,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "ServiceMonitor")
    rules = monitor["spec"]["endpoints"][0]["metricRelabelings"]
    return [
        {re.sub("[A-Z]", lambda m: "_" + m[0].lower(), key): value for key, value in rule.items()}
        for rule in rules
    ]


@contextlib.contextmanager
def prometheus(binary: str, folder: Path, server: str) -> Iterator[str]:
    """Its address, while it scrapes ``server`` every two seconds."""
    from sglang_canopy.bench.launch import free_port

    target = urllib.parse.urlparse(server).netloc
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [
            {
                "job_name": "canopy",
                "static_configs": [{"targets": [target]}],
                "metric_relabel_configs": relabelling(),
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


def ask(url: str, query: str, start: float, end: float) -> list[Line]:
    """The lines of a query between two times. Raises ValueError with what Prometheus says."""
    query = query.replace("$__rate_interval", WINDOW).replace("$job", ".*")
    query = query.replace("$instance", ".*")
    asked = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": SCRAPE_S})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{asked}", timeout=30) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode()) from None
    lines = []
    for one in found:
        times = [t - start for t, _ in one["values"]]
        lines.append((json.dumps(one["metric"]), times, [float(v) for _, v in one["values"]]))
    return lines


def check_target(url: str) -> None:
    """Raise SystemExit with what Prometheus says where it cannot scrape the server."""
    with urllib.request.urlopen(f"{url}/api/v1/targets", timeout=30) as answer:
        (target,) = json.loads(answer.read())["data"]["activeTargets"]
    if target["health"] != "up":
        raise SystemExit(f"Prometheus cannot scrape {target['scrapeUrl']}: {target['lastError']}")


def legend(template: str, metric: str) -> str:
    for name, value in json.loads(metric).items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw(panels: list[dict[str, Any]], answers: dict[str, list[Line]], out: Path) -> None:
    """Each panel where the dashboard has it, as Grafana's dark theme would."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    with pyplot.style.context("dark_background"):
        figure = pyplot.figure(figsize=(15, rows * 0.34), layout=None)
        for panel in panels:
            at = panel["gridPos"]
            box = [at["x"] / 24 + 0.028, 1 - (at["y"] + at["h"] - 1.5) / rows]
            box += [at["w"] / 24 - 0.04, (at["h"] - 3) / rows]
            if panel["type"] == "row":
                figure.text(0.01, 1 - (at["y"] + 0.8) / rows, panel["title"], fontsize=12)
                continue
            axes = figure.add_axes(box)
            axes.set_title(panel["title"], fontsize=9, loc="left")
            stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
            lines = [
                (legend(target["legendFormat"], metric), times, values)
                for target in panel["targets"]
                for metric, times, values in answers[target["expr"]]
            ]
            lines = sorted(lines, key=lambda line: -max(line[2]))[:12]
            base: dict[float, float] = {}
            for name, times, values in lines:
                if stacked:
                    low = [base.get(t, 0.0) for t in times]
                    high = [a + b for a, b in zip(low, values)]
                    axes.fill_between(times, low, high, alpha=0.5, label=name)
                    base |= dict(zip(times, high))
                else:
                    axes.plot(times, values, label=name, linewidth=1.2)
            axes.set_ylim(bottom=0, top=panel["fieldConfig"]["defaults"].get("max"))
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.15)
            if lines:
                axes.legend(fontsize=6, loc="upper left", framealpha=0.4)
            else:
                axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
        figure.savefig(out, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=90.0, help="of traffic (default 90)")
    parser.add_argument("--picture", type=Path, help="where the panels are drawn (PNG)")
    args = parser.parse_args()
    if args.prometheus is None:
        parser.error("no prometheus on the PATH: install it, or give --prometheus FILE")
    kubernetes = ROOT / "deploy" / "kubernetes"
    panels = json.loads((kubernetes / "dashboard.json").read_text())["panels"]
    queries = [t["expr"] for panel in panels for t in panel.get("targets", ())]
    rules = yaml.safe_load_all((kubernetes / "monitoring.yaml").read_text())
    alerts = {
        rule["alert"]: rule["expr"]
        for one in rules
        if one["kind"] == "PrometheusRule"
        for rule in one["spec"]["groups"][0]["rules"]
    }
    with tempfile.TemporaryDirectory(prefix="canopy-dashboard-") as scratch:
        folder = Path(scratch)
        with (
            small_server(folder, "--enable-metrics") as server,
            prometheus(args.prometheus, folder, server.url) as url,
        ):
            start = time.time()
            send_traffic(server.url, args.seconds)
            check_target(url)
            answers = {query: ask(url, query, start, time.time()) for query in queries}
            fired = {name: ask(url, expr, start, time.time()) for name, expr in alerts.items()}
    for panel in panels:
        for target in panel.get("targets", ()):
            lines = answers[target["expr"]]
            points = sum(len(values) for _, _, values in lines)
            print(
                f"{panel['title']}: {target['legendFormat']}: {len(lines)} lines, {points} points"
            )
    for name, lines in fired.items():
        print(f"alert {name}: {'would fire' if lines else 'quiet'}")
    if args.picture:
        draw(panels, answers, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
