"""One frame of ``canopy top``: a status as tables and bars of ``rich``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MAX_ROWS = 16
"""Categories and groups that a frame shows."""
BAR_CELLS = 24

_BLOCKS = " ▁▂▃▄▅▆▇█"
_REASONS = ("capacity", "ttl", "trim", "quota")
_COLOURS = {"device": "green", "host": "cyan", "disk": "magenta"}


def frame(status: Mapping[str, Any], trouble: str | None = None) -> RenderableType:
    """Everything about one status; ``trouble`` is a line about why it is not fresh."""
    empty = Text()
    lines: list[RenderableType] = [_header(status)]
    if status.get("next_step"):
        lines.append(plain(status["next_step"], 400))
    if status["ranks"]:
        lines += [empty, _hit_ratios(status), empty]
        if status.get("workers"):
            lines += [_workers(status["workers"]), empty]
        lines += [_tiers(status), empty, _categories(status)]
    if status.get("groups"):
        lines += [empty, _groups(status["groups"])]
    if status.get("whatif"):
        lines += [empty, _whatif(status["whatif"])]
    footer = _footer(status, trouble)
    if footer:
        lines += [empty, footer]
    return Panel(Group(*lines), title="canopy top", title_align="left", border_style="dim")


def sparkline(points: Sequence[tuple[int, int]]) -> str:
    """Hit ratios as one character each: prompt tokens and hits by point, oldest first.

    A point without requests is ``·``; a full block is a ratio of 1.
    """
    return "".join(
        _BLOCKS[round(hits / prompts * (len(_BLOCKS) - 1))] if prompts else "·"
        for prompts, hits in points
    )


def size(count: float) -> str:
    """``1.5M``: three digits or so, in thousands."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 999.5:
            return f"{count:.0f}" if not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}P"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def seconds(ttl_s: float | None) -> str:
    """A time to live as people say it; ``None`` is no end."""
    if ttl_s is None:
        return "no expiry"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if ttl_s >= 2 * length:
            return f"{ttl_s / length:.3g} {unit}"
    return f"{ttl_s:.3g} s"


def plain(text: object, longest: int = 32) -> Text:
    """What a server sent, without control characters that a terminal would act on."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return Text(shown if len(shown) <= longest else shown[: longest - 1] + "…")


def _header(status: Mapping[str, Any]) -> Text:
    ranks = len(status["ranks"])
    line = Text(f"sglang-canopy {plain(status['version'])}", style="bold")
    line.append(f"   up {seconds(status['uptime_s'])}", style="not bold")
    workers = status.get("workers", ())
    if workers:
        line.append(f"   {len(workers)} servers, {ranks} replicas added up", style="not bold")
    elif ranks > 1:
        line.append(f"   {ranks} replicas added up", style="not bold")
    return line


def _hit_ratios(status: Mapping[str, Any]) -> RenderableType:
    tiers = status["tiers"]
    table = Table.grid(padding=(0, 2))
    for title, prompts, key in (
        ("last minute", status["prompt_tokens_last_minute"], "hit_tokens_last_minute"),
        ("since start", status["prompt_tokens"], "hit_tokens"),
    ):
        hits = {name: tier[key] for name, tier in tiers.items()}
        line = Text()
        line.append(percent(sum(hits.values()), prompts), style="bold")
        line.append(f" of {size(prompts)} prompt tokens hit: ")
        for name, count in hits.items():
            line.append(f"{name} {percent(count, prompts)}  ", style=_COLOURS.get(name, ""))
        table.add_row(Text(title, style="dim"), line)
    minutes = len(status["history"]) * status["history_point_s"] / 60
    table.add_row(
        Text(f"{minutes:.1f} min", style="dim"), Text(sparkline(status["history"]), style="yellow")
    )
    return table


def _workers(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a server: those that do not answer first, then the busiest."""
    table = _table("server", "policy", "requests", "prompt", "hit", "last minute", "hit then")
    table.columns[0].justify = "left"
    busiest = sorted(rows, key=lambda row: ("error" not in row, -row.get("prompt_tokens", 0)))
    for row in busiest[:MAX_ROWS]:
        url = plain(row["url"], 48)
        if "error" in row:
            table.add_row(url, Text(plain(row["error"], 64).plain, style="red"))
            continue
        prompts, lately = row["prompt_tokens"], row["prompt_tokens_last_minute"]
        table.add_row(
            url,
            plain(row["policy"], 20),
            size(row["requests"]),
            size(prompts),
            Text(percent(row["hit_tokens"], prompts), style="bold"),
            size(lately),
            percent(row["hit_tokens_last_minute"], lately),
        )
    if len(rows) > MAX_ROWS:
        table.caption = f"{len(rows) - MAX_ROWS} more servers"
    return table


def _tiers(status: Mapping[str, Any]) -> Table:
    named = [reason for tier in status["tiers"].values() for reason in tier["evicted_tokens"]]
    reasons = [*dict.fromkeys([*_REASONS, *named])]
    table = _table(
        "tier", "policy", "", "used", "of", "entered", "evicted: capacity", *reasons[1:], "demoted"
    )
    for name, tier in status["tiers"].items():
        used, room = tier["used_bytes"], tier["capacity_bytes"]
        is_reported = used is not None and room
        table.add_row(
            Text(name, style=_COLOURS.get(name, "")),
            plain(status["policies"].get(name, "-"), 20),
            _bar(used / room, _COLOURS.get(name, ""))
            if is_reported
            else Text("not known", style="dim"),
            size(used) + "B" if is_reported else "-",
            size(room) + "B" if is_reported else "-",
            size(tier["entered_tokens"]),
            *(_count(tier["evicted_tokens"].get(reason, 0)) for reason in reasons),
            _count(tier["demoted_tokens"]),
        )
    table.caption = (
        "tokens that entered, were evicted by reason, and of these still are a tier down"
    )
    return table


def _categories(status: Mapping[str, Any]) -> Table:
    tiers = list(status["tiers"])
    held = [t for t in tiers if t != "disk"]
    table = _table(
        "category", "requests", "prompt", "hit", *tiers, "missed", *(f"held {t}" for t in held)
    )
    rows = status["categories"]
    for row in rows[:MAX_ROWS]:
        prompts = row["prompt_tokens"]
        hits = [row["hit_tokens"].get(t, 0) for t in tiers]
        table.add_row(
            plain(row["category"]),
            size(row["requests"]),
            size(prompts),
            Text(percent(sum(hits), prompts), style="bold"),
            *map(_count, hits),
            _count(row["miss_tokens"]),
            *(_count(row["held_tokens"].get(t, 0)) for t in held),
        )
    table.caption = "prompt tokens of finished requests, by the tier that had them"
    if len(rows) > MAX_ROWS:
        table.caption += f"; {len(rows) - MAX_ROWS} more categories"
    return table


def _groups(groups: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("tier", "group", "TTL", "name")
    shown = [*groups[: MAX_ROWS - 1], *(groups[-1:] if len(groups) >= MAX_ROWS else [])]
    for group in shown:
        table.add_row(
            plain(group["tier"]),
            plain(group["group"]),
            seconds(group["ttl_s"]),
            plain(group["name"]),
        )
    if len(groups) > len(shown):
        table.caption = f"{len(groups) - len(shown)} more groups"
    return table


def _whatif(meter: Mapping[str, Any]) -> RenderableType:
    """What each policy would hit at each capacity; the running one's as measured."""
    if meter.get("undecided"):
        return Text(f"what if: {plain(meter['undecided'], 80)}", style="dim italic")
    arms = meter["arms"]
    capacities = list(dict.fromkeys(arm["capacity"] for arm in arms))
    table = _table("what if", *capacities)
    table.columns[0].justify = "left"
    for policy in dict.fromkeys(arm["policy"] for arm in arms):
        cells = []
        for capacity in capacities:
            for arm in arms:
                if (arm["policy"], arm["capacity"]) == (policy, capacity):
                    ratio, error = 100 * arm["hit_ratio"], 200 * arm["standard_error"]
                    style = "bold" if arm["running"] else ""
                    near = "" if arm["running"] else f" ± {error:.1f}"
                    cells.append(Text(f"{ratio:.1f} %{near}", style=style))
        table.add_row(plain(policy, 20), *cells)
    # A table's caption would be as narrow as the table.
    below = (
        f"share of prompt tokens hit; {plain(meter['running'])} runs and hits "
        f"{100 * meter['hit_ratio']:.1f} %; {size(meter['sampled_requests'])} sampled requests, "
        f"one block in {meter['one_block_in']}"
    )
    return Group(table, Text(below, style="dim italic"))


def _footer(status: Mapping[str, Any], trouble: str | None) -> Text | None:
    line = Text()
    faults = {kind: n for kind, n in status.get("faults", {}).items() if n}
    if faults:
        counts = ", ".join(f"{plain(kind)} {size(n)}" for kind, n in faults.items())
        line.append(f"disk faults answered by recomputation: {counts}  ", style="red")
    if trouble:
        line.append(trouble, style="red")
    return line if line.plain else None


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left", expand=False)
    left = {"tier", "policy", "", "category", "group", "name"}
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def _bar(share: float, colour: str) -> Text:
    full = min(BAR_CELLS, max(0, round(share * BAR_CELLS)))
    bar = Text("█" * full, style=colour)
    bar.append("░" * (BAR_CELLS - full), style="dim")
    return bar.append(f" {100 * share:3.0f} %")


def _count(tokens: float) -> Text:
    return Text(size(tokens), style="" if tokens else "dim")
