"""Advice as one self-contained HTML page, and its figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from canopy_lab.advise import advice_text as words
from canopy_lab.advise.answers import Advice, ArmRow
from canopy_lab.advise.decide import first_start
from canopy_lab.report.axes import (
    AXES_FRAME,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    name_axes,
    new_figure,
    note,
)
from canopy_lab.report.html import HtmlPage, HtmlTable, Section, png_bytes
from canopy_lab.report.table import short_number


def capacity_chart(advice: Advice) -> Figure:
    """Plot the token hit ratio against capacity: a curve for LRU, points for simulated policies."""
    figure, axes = _figure(3.9)
    lru = advice.lru
    axes.plot(lru.tokens, _percents(lru.hit_ratio), color=BLUE, lw=1.8, label="LRU at every capacity")  # fmt: skip
    styles = {
        "hindsight bound": (INK, "--", "v"),
        "wa": (ORANGE, "-", "o"),
        "lru, as in SGLang": (BLUE, ":", "s"),
    }
    for label, (colour, line, marker) in styles.items():
        curve = advice.others[label]
        axes.plot(curve.tokens, _percents(curve.hit_ratio), color=colour, ls=line, marker=marker, ms=4, lw=1.4, label=label)  # fmt: skip
    axes.axhline(100 * advice.repeats, color=GREY, ls="-.", lw=1, label="endless cache")
    axes.axvline(advice.capacity_tokens, color=GREY, lw=1)
    capacity_position, frame = (advice.capacity_tokens, 1), ("data", AXES_FRAME)
    note(axes, "your capacity", capacity_position, INK, (0, 3), frame, ha="center", fontsize=7.5)
    axes.set_xscale("log")
    axes.set_xlim(left=min(advice.others["wa"].tokens[0], advice.capacity_tokens) / 8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short_number(v)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    name_axes(axes, "capacity, tokens of KV", "prompt tokens hit, %")
    axes.legend(
        fontsize=7.5, labelcolor=INK, loc="upper left", bbox_to_anchor=(0, 0.95),
        facecolor="white", edgecolor="none", framealpha=1,
    )  # fmt: skip
    return figure


def policies_chart(advice: Advice) -> Figure:
    """Plot the gain of each arm over SGLang's LRU, with its interval."""
    rows = [row for row in advice.rows if row.kind != "baseline"][::-1]
    figure, axes = _figure(0.9 + 0.28 * len(rows))
    position = np.arange(len(rows))
    points = np.array([row.gain.points for row in rows])
    interval = np.array([[r.gain.points - r.gain.low, r.gain.high - r.gain.points] for r in rows])
    axes.barh(position, points, height=0.62, color=[_colour(row) for row in rows])
    axes.errorbar(points, position, xerr=np.maximum(interval.T, 0), fmt="none", ecolor=INK, lw=1)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(position, [row.gain.label for row in rows])
    axes.grid(False, axis="y")
    if not points.any():
        axes.set_xlim(-1, 1)
    name_axes(axes, "gain over SGLang's LRU, points of the prompt tokens", "")
    return figure


def _colour(row: ArmRow) -> str:
    if row.kind == "placebo":
        return FAINT
    if row.kind == "hints":
        return GREEN
    if row.kind == "bound":
        return GREY
    return ORANGE if row.gain.label.startswith("wa") else BLUE


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, axes = new_figure(height=height)
    return figure, axes[0, 0]


def _percents(ratios: tuple[float, ...]) -> list[float]:
    return [100 * ratio for ratio in ratios]


def make_page(advice: Advice, name: str, breaks: Sequence[str] = ()) -> HtmlPage:
    """Return the page of the log ``name``. ``breaks``: sentences about broken prefixes."""
    labels = [row.gain.label for row in advice.rows]
    gain = advice.decision.gain
    marked = labels.index(gain.label) if gain and gain.label in labels else 0
    capacity, policies = (
        png_bytes(draw(advice)) if advice.repeats else None
        for draw in (capacity_chart, policies_chart)
    )
    text = [words.describe_repeats(advice), *words.describe_agents(advice)]
    text.append(words.describe_capacity(advice))
    hints = [words.describe_placebo(advice), words.describe_hints(advice)] if advice.repeats else []
    table = HtmlTable(
        words.POLICY_COLUMNS, [words.policy_cells(row) for row in advice.rows],
        text_columns=(len(words.POLICY_COLUMNS) - 1,), marked=marked,
        notes=[words.describe_uncertainty(advice), words.describe_profile(advice)],
    )  # fmt: skip
    sections = [
        Section("How much of the traffic repeats, and what a cache of any size hits", text, capacity),
        Section("What each policy, and hints, would add", hints, policies, table),
    ]  # fmt: skip
    if len(advice.tiers) > 1:
        tiers = [words.tier_cells(tier) for tier in advice.tiers]
        table = HtmlTable(words.TIER_COLUMNS, tiers, notes=[words.describe_tiers()])
        sections.append(Section("What host memory and a disk would add", table=table))
    if breaks:
        sections.append(Section("What breaks prefixes", breaks))
    return HtmlPage(
        f"A cache for {name}", sections, box=[advice.decision.sentence], steps=_steps(advice),
        notes=list(words.describe_log(advice)), width="72rem", command="advise",
        source=". A simulation of cache contents with the policy objects that the server runs; nothing was served.",
    )  # fmt: skip


def _steps(advice: Advice) -> list[tuple[str, str]]:
    first = first_start(advice.decision)
    steps = [("Start so, with your model:", _serve_command(*first.flags))]
    gain, flag = advice.decision.gain, advice.decision.flag
    if gain is None:
        return [*steps, ("Its page reports a possible gain:", "canopy page")]
    steps.append(("See the meter's figures for your traffic:", "canopy page"))
    if flag != "canopy-lru":
        steps.append(("If the meter agrees:", _serve_command("--radix-eviction", flag)))
    return [*steps, ("The way back:", _serve_command("--radix-eviction", "lru"))]


def _serve_command(*flags: str) -> str:
    return " ".join(("sglang serve MODEL", *flags))
