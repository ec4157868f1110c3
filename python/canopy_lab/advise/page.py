"""Write advice as one self-contained HTML page with a light and a dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from canopy_lab.advise import text as words
from canopy_lab.advise.answers import Advice
from canopy_lab.advise.charts import DARK, LIGHT, charts
from canopy_lab.advise.first_start import first_start
from canopy_lab.report.html import HtmlTable, as_data, png_bytes, render
from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file


def write_page(path: Path | str, advice: Advice, name: str, breaks: Sequence[str] = ()) -> None:
    """Write the page of the log ``name`` atomically. Raises ``CanopyError``.

    ``breaks``: sentences about differences that break prefixes."""
    try:
        replace_file(path, page(advice, name, breaks))
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def page(advice: Advice, name: str, breaks: Sequence[str] = ()) -> str:
    """Return the page, figures included as data."""
    light = {n: as_data(png_bytes(f)) for n, f in charts(advice, LIGHT)}
    dark = {n: as_data(png_bytes(f)) for n, f in charts(advice, DARK)}
    marked = next(
        (
            at
            for at, row in enumerate(advice.rows)
            if advice.decision.gain and row.gain.label == advice.decision.gain.label
        ),
        0,
    )
    policies = [words.policy_cells(row) for row in advice.rows]
    sections = [
        {
            "heading": "How much of the traffic repeats, and what a cache of any size hits",
            "text": [
                words.about_repeats(advice),
                words.about_misses(advice),
                words.about_capacity(advice),
            ],
            "figure": "capacity" if advice.repeats else None,
            "table": None,
        },
        {
            "heading": "What each policy, and hints, would add",
            "text": [words.about_placebo(advice), words.about_hints(advice)] if advice.repeats else [],
            "figure": "policies" if advice.repeats else None,
            "table": HtmlTable(
                words.HEAD, policies, text=(len(words.HEAD) - 1,), marked=marked,
                notes=[words.about_uncertainty(advice), words.about_profile(advice)],
            ),
        },
    ]  # fmt: skip
    if len(advice.tiers) > 1:
        tiers = [words.tier_cells(tier) for tier in advice.tiers]
        sections.append(
            {
                "heading": "What host memory and a disk would add",
                "text": [],
                "figure": None,
                "table": HtmlTable(words.TIER_HEAD, tiers, notes=[words.about_tiers()]),
            }
        )
    if breaks:
        sections.append(
            {"heading": "What breaks prefixes", "text": list(breaks), "figure": None, "table": None}
        )
    return render(
        "advise",
        title=f"A cache for {name}",
        sentence=advice.decision.sentence,
        steps=_steps(advice),
        about=words.about_log(advice),
        sections=sections,
        light=light,
        dark=dark,
        version=__version__,
    )


def _steps(advice: Advice) -> list[tuple[str, str]]:
    """Return the next steps, each as (purpose, command)."""
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
