"""Advice as one self-contained HTML page with a light and a dark theme."""

from __future__ import annotations

from collections.abc import Sequence

from canopy_lab.advise import text as words
from canopy_lab.advise.answers import Advice
from canopy_lab.advise.charts import DARK, LIGHT, capacity_chart, policies_chart
from canopy_lab.advise.first_start import first_start
from canopy_lab.report.html import HtmlTable, Page, Section, png_bytes


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
    first = first_start(advice)
    found = [("Start so, with your model:", _served(*first.flags))]
    gain, flag = advice.decision.gain, advice.decision.flag
    if gain is None:
        return [*found, ("Its page reports a possible gain:", "canopy page")]
    found.append(("See the meter's figures for your traffic:", "canopy page"))
    if flag != "canopy-lru":
        found.append(("If the meter agrees:", _served("--radix-eviction", flag)))
    return [*found, ("The way back:", _served("--radix-eviction", "lru"))]


def _served(*flags: str) -> str:
    return " ".join(("sglang serve MODEL", *flags))
