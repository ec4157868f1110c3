"""A real Prometheus scrapes a real server under load. Every query of the dashboard and of the alerts is
sent to it, and a browser draws the panels from its answers.

    python benchmark/metrics/dashboard_live.py --picture docs/figures/dashboard.png

Needs Prometheus on the PATH, or `--prometheus FILE` (Debian: `apt-get install prometheus`), and
Chromium for the picture. Prints a line per panel with the numbers of lines and points of its queries,
and exits with status 1 if a query was refused.
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
from dashboard_page import page

from live import photograph, send_traffic, small_server

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_S = 2
VARIABLES = {"$__rate_interval": "20s", "$job": ".*", "$instance": ".*"}
"""Grafana's values of variables."""
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
def prometheus(binary: str, folder: Path, servers: list[str]) -> Iterator[str]:
    """Its address, while it scrapes ``servers`` every two seconds."""
    from launch_server import free_port

    targets = [urllib.parse.urlparse(server).netloc for server in servers]
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [
            {
                "job_name": "canopy",
                "static_configs": [{"targets": targets}],
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
            process.wait(120)


def ask(url: str, query: str, start: float, end: float) -> list[Line]:
    """Return the lines of a query between two times. Raises ValueError with Prometheus's message."""
    asked = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": SCRAPE_S})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{asked}", timeout=120) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode()) from None
    lines = []
    for one in found:
        times = [t - start for t, _ in one["values"]]
        lines.append((json.dumps(one["metric"]), times, [float(v) for _, v in one["values"]]))
    return lines


def check_targets(url: str) -> None:
    """Raise SystemExit with Prometheus's message if it cannot scrape a server."""
    with urllib.request.urlopen(f"{url}/api/v1/targets", timeout=120) as answer:
        targets = json.loads(answer.read())["data"]["activeTargets"]
    for target in targets:
        if target["health"] != "up":
            raise SystemExit(
                f"Prometheus cannot scrape {target['scrapeUrl']}: {target['lastError']}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=90.0, help="of traffic (default 90)")
    parser.add_argument("--servers", metavar="URL,URL", help="that run and have traffic already")
    parser.add_argument("--picture", type=Path, help="where the panels are drawn (PNG)")
    args = parser.parse_args()
    if args.prometheus is None:
        parser.error("no prometheus on the PATH: install it, or give --prometheus FILE")
    kubernetes = ROOT / "deploy" / "kubernetes"
    text = (kubernetes / "dashboard.json").read_text()
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    panels = json.loads(text)["panels"]
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
        with contextlib.ExitStack() as stack:
            servers = args.servers.split(",") if args.servers else []
            if not servers:
                server = stack.enter_context(small_server(folder, "--enable-metrics"))
                servers = [server.url]
            url = stack.enter_context(prometheus(args.prometheus, folder, servers))
            start = time.time()
            if args.servers:
                time.sleep(args.seconds)
            else:
                send_traffic(servers[0], args.seconds)
            check_targets(url)
            answers = {query: ask(url, query, start, time.time()) for query in queries}
            fired = {name: ask(url, expr, start, time.time()) for name, expr in alerts.items()}
            if args.picture:
                file = folder / "dashboard.html"
                file.write_text(page(panels, url, start, time.time(), SCRAPE_S))
                rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
                size = (1460, 34 * rows + 20)
                photograph(file.as_uri(), args.picture, folder / "browser", dark=True, size=size)
    for panel in panels:
        for target in panel.get("targets", ()):
            lines = answers[target["expr"]]
            points = sum(len(values) for _, _, values in lines)
            print(
                f"{panel['title']}: {target['legendFormat']}: {len(lines)} lines, {points} points"
            )
    for name, lines in fired.items():
        print(f"alert {name}: {'would fire' if lines else 'quiet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
