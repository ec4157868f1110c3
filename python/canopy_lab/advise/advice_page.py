"""Advice as one self-contained HTML page with a light and a dark theme, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from canopy_lab.advise import advice_text as words
from canopy_lab.advise.answers import Advice, Row
from canopy_lab.advise.decide import first_start
from canopy_lab.report.axes import WHOLE, clean, name_axes, note
from canopy_lab.report.html import HtmlTable, Page, Section, png_bytes
from canopy_lab.report.table import short_number


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one page. The lines are Okabe and Ito's, lighter on a dark ground."""

    ground: str
    ink: str
    faint: str
    lru: str
    wa: str
    bound: str
    grey: str
    hints: str


LIGHT = Theme("#ffffff", "#222222", "#d9d9d9", "#0072b2", "#d55e00", "#222222", "#8a8a8a", "#009e73")  # fmt: skip
DARK = Theme("#16191d", "#e4e6e8", "#3a4047", "#56b4e9", "#f0a057", "#e4e6e8", "#8d959c", "#4fc99f")  # fmt: skip


def capacity_chart(advice: Advice, theme: Theme) -> Figure:
    """Plot the token hit ratio against capacity: a curve for LRU, points for simulated policies."""
    figure, axes = _figure(theme, 3.9)
    lru = advice.lru
    axes.plot(lru.tokens, _percents(lru.hit_ratio), color=theme.lru, lw=1.8, label="LRU at every capacity")  # fmt: skip
    styles = {
        "hindsight bound": (theme.bound, "--", "v"),
        "wa": (theme.wa, "-", "o"),
        "lru, as in SGLang": (theme.lru, ":", "s"),
    }
    for label, (colour, line, marker) in styles.items():
        curve = advice.others[label]
        axes.plot(curve.tokens, _percents(curve.hit_ratio), color=colour, ls=line, marker=marker, ms=4, lw=1.4, label=label)  # fmt: skip
    axes.axhline(100 * advice.repeats, color=theme.grey, ls="-.", lw=1, label="endless cache")
    axes.axvline(advice.capacity_tokens, color=theme.grey, lw=1)
    at, frame = (advice.capacity_tokens, 1), ("data", WHOLE)
    note(axes, "your capacity", at, theme.ink, (0, 3), frame, ha="center", fontsize=7.5)
    axes.set_xscale("log")
    axes.set_xlim(left=min(advice.others["wa"].tokens[0], advice.capacity_tokens) / 8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short_number(v)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    name_axes(axes, "capacity, tokens of KV", "prompt tokens hit, %", theme.ink)
    axes.legend(
        fontsize=7.5, labelcolor=theme.ink, loc="upper left", bbox_to_anchor=(0, 0.95),
        facecolor=theme.ground, edgecolor="none", framealpha=1,
    )  # fmt: skip
    return figure


def policies_chart(advice: Advice, theme: Theme) -> Figure:
    """Plot the gain of each arm over SGLang's LRU, with its interval."""
    rows = [row for row in advice.rows if row.kind != "baseline"][::-1]
    figure, axes = _figure(theme, 0.9 + 0.28 * len(rows))
    at = np.arange(len(rows))
    points = np.array([row.gain.points for row in rows])
    spread = np.array([[r.gain.points - r.gain.low, r.gain.high - r.gain.points] for r in rows])
    axes.barh(at, points, height=0.62, color=[_colour(row, theme) for row in rows])
    axes.errorbar(points, at, xerr=np.maximum(spread.T, 0), fmt="none", ecolor=theme.ink, lw=1)
    axes.axvline(0, color=theme.ink, lw=0.8)
    axes.set_yticks(at, [row.gain.label for row in rows])
    axes.grid(False, axis="y")
    if not points.any():
        axes.set_xlim(-1, 1)
    name_axes(axes, "gain over SGLang's LRU, points of the prompt tokens", "", theme.ink)
    return figure


def _colour(row: Row, theme: Theme) -> str:
    if row.kind == "placebo":
        return theme.faint
    if row.kind == "hints":
        return theme.hints
    if row.kind == "bound":
        return theme.grey
    return theme.wa if row.gain.label.startswith("wa") else theme.lru


def _figure(theme: Theme, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.6, height), dpi=130, facecolor=theme.ground)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.set_facecolor(theme.ground)
    clean(axes, theme.ink, theme.grey, theme.faint)
    return figure, axes


def _percents(ratios: tuple[float, ...]) -> list[float]:
    return [100 * ratio for ratio in ratios]


def page(advice: Advice, name: str, breaks: Sequence[str] = ()) -> Page:
    """Return the page of the log ``name``.

    ``breaks``: sentences about differences that break prefixes."""
    labels = [row.gain.label for row in advice.rows]
    gain = advice.decision.gain
    marked = labels.index(gain.label) if gain and gain.label in labels else 0
    capacity, policies = (
        tuple(png_bytes(draw(advice, t)) for t in (LIGHT, DARK) if advice.repeats)
        for draw in (capacity_chart, policies_chart)
    )
    text = [words.about_repeats(advice), words.about_misses(advice), *words.about_agents(advice)]
    text.append(words.about_capacity(advice))
    hints = [words.about_placebo(advice), words.about_hints(advice)] if advice.repeats else []
    table = HtmlTable(
        words.HEAD, [words.policy_cells(row) for row in advice.rows],
        text=(len(words.HEAD) - 1,), marked=marked,
        notes=[words.about_uncertainty(advice), words.about_profile(advice)],
    )  # fmt: skip
    sections = [
        Section("How much of the traffic repeats, and what a cache of any size hits", text, capacity),
        Section("What each policy, and hints, would add", hints, policies, table),
    ]  # fmt: skip
    if len(advice.tiers) > 1:
        tiers = [words.tier_cells(tier) for tier in advice.tiers]
        table = HtmlTable(words.TIER_HEAD, tiers, notes=[words.about_tiers()])
        sections.append(Section("What host memory and a disk would add", table=table))
    if breaks:
        sections.append(Section("What breaks prefixes", breaks))
    return Page(
        f"A cache for {name}", sections, box=[advice.decision.sentence], steps=_steps(advice),
        notes=list(words.about_log(advice)), width="72rem", command="advise",
        source=". A simulation of cache contents with the policy objects that the server runs; nothing was served.",
    )  # fmt: skip


def _steps(advice: Advice) -> list[tuple[str, str]]:
    first = first_start(advice.decision)
    steps = [("Start so, with your model:", _served(*first.flags))]
    gain, flag = advice.decision.gain, advice.decision.flag
    if gain is None:
        return [*steps, ("Its page reports a possible gain:", "canopy page")]
    steps.append(("See the meter's figures for your traffic:", "canopy page"))
    if flag != "canopy-lru":
        steps.append(("If the meter agrees:", _served("--radix-eviction", flag)))
    return [*steps, ("The way back:", _served("--radix-eviction", "lru"))]


def _served(*flags: str) -> str:
    return " ".join(("sglang serve MODEL", *flags))
