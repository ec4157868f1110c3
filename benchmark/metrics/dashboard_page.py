"""The dashboard as a page that asks a Prometheus itself, for a browser: uPlot draws what Grafana would.

There is no package of Grafana where this project is built. The page has the dashboard's panels where
it has them, with its queries, legends and units; a browser sends the queries.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

_PAGE = """<!doctype html><meta charset="utf-8"><title>Canopy</title>
<style>STYLE
body { background: #111217; color: #ccccdc; font: 12px sans-serif; margin: 8px; width: 1440px }
#grid { display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: 30px; gap: 4px }
.row { font-size: 14px; align-self: end }
.panel { background: #181b1f; border: 1px solid #2c3235; padding: 4px; overflow: hidden }
.panel h2 { font-size: 12px; margin: 0 } .empty { text-align: center; padding-top: 60px }
.u-legend { font-size: 9px; text-align: left; max-height: 42px; overflow: hidden }
.u-legend .u-value, .u-legend tr:first-child { display: none }
.u-legend th::after { content: none !important } .u-inline tr { margin-right: 8px }
</style><div id="grid"></div><script>SCRIPT</script><script>
const panels = PANELS, prometheus = "URL", start = START, end = END, step = STEP;
const colours = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9",
  "#705da0", "#37872d", "#fade2a", "#c4162a", "#1f60c4"];
const units = {percentunit: v => (100 * v).toFixed(0) + " %", s: v => v + " s",
  Bps: v => (v / 1e6) + " MB/s"};
async function lines(target) {
  const asked = new URLSearchParams({query: target.expr, start, end, step});
  const answer = await (await fetch(prometheus + "/api/v1/query_range?" + asked)).json();
  return answer.data.result.map(one => ({
    name: target.legendFormat.replace(/{{(\\w+)}}/g, (_, label) => one.metric[label] ?? ""),
    values: new Map(one.values.map(([t, v]) => [Math.round(t), +v])),
  }));
}
function draw(box, panel, found) {
  const times = [...new Set(found.flatMap(line => [...line.values.keys()]))].sort((a, b) => a - b);
  const {unit, max, custom} = panel.fieldConfig.defaults, show = units[unit] ?? (v => v);
  const rows = found.map(line => times.map(t => {
    const value = line.values.get(t);
    return Number.isFinite(value) ? value : null;
  }));
  if (custom.stacking) for (let i = 1; i < rows.length; i++)
    rows[i] = rows[i].map((v, at) => (v ?? 0) + (rows[i - 1][at] ?? 0));
  const series = found.map((line, i) => ({label: line.name, stroke: colours[i % 12], width: 1.3,
    fill: custom.stacking && i == 0 ? colours[0] + "55" : undefined, points: {show: false}}));
  const bands = custom.stacking ? rows.slice(1).map((_, i) => (
    {series: [i + 2, i + 1], fill: colours[(i + 1) % 12] + "55"})) : [];
  const axis = {stroke: "#ccccdc", grid: {stroke: "#2c3235", width: 1}, font: "10px sans-serif"};
  new uPlot({width: box.clientWidth - 8, height: box.clientHeight - 62, bands,
    series: [{}, ...series], scales: {y: {range: (_, low, high) => [0, max ?? (high * 1.1 || 1)]}},
    axes: [{...axis, values: "{HH}:{mm}:{ss}"}, {...axis, size: 62, values: (_, ticks) => ticks.map(show)}],
    cursor: {show: false}}, [times, ...rows], box);
}
for (const panel of panels) {
  const box = document.createElement("div"), at = panel.gridPos;
  box.className = panel.type == "row" ? "row" : "panel";
  box.style.gridArea = `${at.y + 1} / ${at.x + 1} / span ${at.h} / span ${at.w}`;
  box.innerHTML = panel.type == "row" ? panel.title : `<h2>${panel.title}</h2>`;
  document.getElementById("grid").append(box);
  if (panel.type != "row") Promise.all(panel.targets.map(lines)).then(found => {
    const some = found.flat();
    if (some.some(line => line.values.size)) draw(box, panel, some);
    else box.innerHTML += `<div class="empty">no data</div>`;
  });
}
</script>"""


def page(panels: list[dict[str, Any]], prometheus: str, start: float, end: float, step: int) -> str:
    """The page that draws ``panels`` from what ``prometheus`` (its address) has between two times."""
    static = resources.files("sglang_canopy") / "ui" / "static"
    made = _PAGE
    for name, value in {
        "STYLE": (static / "uPlot.min.css").read_text(),
        "SCRIPT": (static / "uPlot.iife.min.js").read_text(),
        "PANELS": json.dumps(panels).replace("</", "<\\/"),
        "URL": prometheus,
        "START": str(start),
        "END": str(end),
        "STEP": str(step),
    }.items():
        made = made.replace(name, value, 1)
    return made
