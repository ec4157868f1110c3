"""Findings in words: kind, place, cost and cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from canopy_lab.advise.breaks import differences as kinds
from canopy_lab.advise.breaks.finder import Breaks, RepeatedBreak

CAUSES_AND_CURES = {
    kinds.TIME: ("time", "move it to the last message, or round it (a date costs one miss a day)"),
    kinds.IDENTIFIER: ("id", "leave it out, or move it to the last message or the request's metadata"),
    kinds.COUNTER: ("counter", "leave it out, or move it to the last message"),
    kinds.NUMBER: ("number", "move it to the last message"),
    kinds.USER: ("text about the user", "move it behind what all users share, into the first message"),
    kinds.TEXT: ("changing text", "put what is constant before what changes"),
    kinds.TOOL_ORDER: ("another order of tools", "sort the tools by name before sending them"),
    kinds.TOOL_SET: ("another set of tools", "send the same tools with every call and restrict them with tool_choice"),
    kinds.KEY_ORDER: ("another order of keys or words", "serialise with sorted keys, and send back what was received byte for byte"),
    kinds.WHITE_SPACE: ("other white space or encoding of accents", "normalise texts once, before they are first sent"),
    kinds.ORDER: ("another order of passages", "keep the order of the first request and append new passages, or reuse documents in any order"),
    kinds.PICTURE: ("a picture that is encoded or signed again", "send the same bytes, or the same URL, of a picture each time"),
    kinds.SHORTENED: ("shortened text", "shorten a result once, when it arrives, or rarely and in large steps"),
    kinds.DROPPED: ("dropped messages", "drop messages rarely and in large steps"),
    kinds.INSERTED: ("inserted messages", "append messages, do not insert them"),
    kinds.REWRITTEN: ("rewritten messages", "send back what was received byte for byte; summarise rarely"),
    kinds.REMINDER: ("a reminder that moves", "leave earlier reminders where they are, and append the new one"),
    kinds.MODELS: ("the same prompt sent to several models", "keep a conversation on one model"),
}  # fmt: skip
"""Kind -> description and cure."""
_BILLING = "x-anthropic-billing-header"
"""Claude Code's first line of a system prompt, with a number of its own in each request."""
_BILLING_CURE = "this is Claude Code's billing line: set CLAUDE_CODE_ATTRIBUTION_HEADER=0 in the client's environment"

_PLACES = {kinds.TOOLS: "the tools", kinds.SYSTEM: "the system prompt", kinds.FIRST: "the first message", kinds.HISTORY: "the history"}  # fmt: skip
_MAX_SHOWN_FINDINGS = 12


def sentences(breaks: Breaks, *, show_values: bool = False) -> list[str]:
    """Return one sentence per finding, or a single sentence if there is no finding."""
    return list(_sentences(breaks, show_values))


def _sentences(breaks: Breaks, show_values: bool) -> Iterator[str]:
    if breaks.not_read:
        yield f"What breaks prefixes was not examined: {breaks.not_read}."
        return
    if not breaks.requests:
        return
    scope = f"{breaks.requests:,} requests" if breaks.is_whole else f"the first {breaks.requests:,} requests"  # fmt: skip
    if not breaks.findings:
        yield f"No difference breaks the prefixes of {scope}: equal text always follows equal text."
        return
    lost = sum(finding.tokens for finding in breaks.findings)
    yield (
        f"Of {scope}, {lost:,} tokens ({lost / max(breaks.tokens, 1):.0%}) are computed again although an "
        "earlier prompt has the same text, because something before it differs:"
    )
    for finding in breaks.findings[:_MAX_SHOWN_FINDINGS]:
        yield "- " + sentence(finding, show_values=show_values)
    if len(breaks.findings) > _MAX_SHOWN_FINDINGS:
        yield f"- and {len(breaks.findings) - _MAX_SHOWN_FINDINGS} more; --json has all of them."


def sentence(finding: RepeatedBreak, *, show_values: bool = False) -> str:
    """Return a finding as one sentence. Texts of the log are in it only with ``show_values``."""
    cause, cure = CAUSES_AND_CURES[finding.kind][0], cure_of(finding)
    place = "" if finding.kind == kinds.MODELS else f" in {_PLACES[finding.place]}"
    name = f" {finding.name!r}" if show_values else ""
    text = (
        f"application {finding.application} ({finding.category}){name}: {cause}{place}, about {finding.at_token:,} tokens "
        f"in, new in each {finding.per}: {finding.requests:,} requests, {finding.tokens:,} tokens ({finding.share:.0%}); {cure}"
    )
    if show_values and finding.examples:
        old, new = finding.examples[0]
        after_label = f" behind {finding.label!r}" if finding.label else ""
        text += f" [{old!r} -> {new!r}{after_label}]"
    return text


def cure_of(finding: RepeatedBreak) -> str:
    """Return the cure. A client's own switch comes first."""
    in_billing_line = (
        finding.place == kinds.SYSTEM and _BILLING in finding.name and "cch" in finding.label
    )
    return _BILLING_CURE if in_billing_line else CAUSES_AND_CURES[finding.kind][1]


def as_json(breaks: Breaks, *, show_values: bool = False) -> dict[str, Any]:
    """Return plain data. Texts of the log are in it only with ``show_values``."""
    data = asdict(breaks)
    for row, finding in zip(data["findings"], breaks.findings, strict=True):
        row["cure"] = cure_of(finding)
        if not show_values:
            for field in ("label", "name", "examples"):
                del row[field]
    return data
