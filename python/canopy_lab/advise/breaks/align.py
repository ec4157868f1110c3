"""Align a prompt with an earlier one: equal text, and the differences in between."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from canopy_lab.advise.breaks import differences as kinds
from canopy_lab.advise.breaks.differences import FIRST, HISTORY, SYSTEM, TOOLS
from canopy_lab.advise.breaks.memory import MIN_RUN, Prompt, Segment
from canopy_lab.advise.breaks.texts import (
    common_prefix,
    common_suffix,
    equal_but_blanks,
    sentences,
    spans,
)

MAX_PAIRS = 4_000_000
"""Pairs of sentences up to which two texts are aligned; the time of the alignment grows with them."""
_REORDERED = 0.2
"""Share of two texts' common sentences that must be out of order to count as reordered."""
_LABEL_CHARACTERS = 16
_SHOWN = 80
_NAME = re.compile(r'"name": ?"([^"]*)"')


class Run(NamedTuple):
    """A run of characters of the later prompt."""

    size: int
    """Characters."""
    kind: str = ""
    """Kind of the difference; empty for equal text."""
    place: str = ""
    old: str = ""
    new: str = ""
    inside: int = 0
    """Characters of the difference that the earlier prompt also has, in another order."""
    label: str = ""
    """Words before the difference, which distinguish two differences of one kind."""


def align(old: Prompt, new: Prompt) -> Iterator[Run]:
    """Yield the runs of ``new``, compared with ``old``."""
    before, tools, rest = _split(old.segments)
    new_before, new_tools, new_rest = _split(new.segments)
    yield from _messages(before, new_before)
    yield from _tools(tools, new_tools)
    yield from _messages(rest, new_rest)


def _split(segments: list[Segment]) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """Return the segments before the tools, the tools, and the rest."""
    at = [n for n, one in enumerate(segments) if one.role == "tools"]
    if not at:
        return [], [], segments
    begin, end = at[0], at[-1] + 1
    return segments[:begin], segments[begin:end], segments[end:]


def _size(segments: Sequence[Segment]) -> int:
    return sum(one.size for one in segments)


def _equal_heads(old: list[Segment], new: list[Segment]) -> int:
    n = 0
    while n < len(old) and n < len(new) and old[n] is new[n]:
        n += 1
    return n


def _tools(old: list[Segment], new: list[Segment]) -> Iterator[Run]:
    n = _equal_heads(old, new)
    if n:
        yield Run(_size(new[:n]))
    old, new = old[n:], new[n:]
    if not old and not new:
        return
    first_old, first_new = old[0].text if old else "", new[0].text if new else ""
    numbers = Counter(tool.number for tool in old)
    size = _size(new)
    if numbers == Counter(tool.number for tool in new):
        yield Run(size, kinds.TOOL_ORDER, TOOLS, first_old, first_new, size)
    elif Counter(tool.canonical for tool in old) == Counter(tool.canonical for tool in new):
        yield Run(size, kinds.KEY_ORDER, TOOLS, first_old, first_new, size)
    elif [_tool_name(tool) for tool in old] == [_tool_name(tool) for tool in new]:
        for a, b in zip(old, new, strict=True):
            yield from ((Run(b.size),) if a is b else _texts(a, b, TOOLS))
    else:
        common = sum(tool.size for tool in new if tool.number in numbers)
        yield Run(size, kinds.TOOL_SET, TOOLS, first_old, first_new, common)


def _tool_name(tool: Segment) -> str:
    name = _NAME.search(tool.text)
    return name[1] if name else tool.text[:40]


def _messages(old: list[Segment], new: list[Segment], done: int = 0) -> Iterator[Run]:
    """Compare messages; the first ``done`` are equal and were yielded."""
    n = _equal_heads(old, new)
    if n > done:
        yield Run(_size(new[done:n]))
    rest_old, rest_new = old[n:], new[n:]
    if not rest_new:
        return
    if len(rest_old) > 1 and rest_old[1] is rest_new[0] and _comes_again(rest_old[0], rest_new):
        yield Run(0, kinds.REMINDER, HISTORY, rest_old[0].text[:_SHOWN], "")
        yield from _messages([*new[:n], *rest_old[1:]], new, n)
        return
    numbers_old = [segment.number for segment in rest_old]
    numbers_new = [segment.number for segment in rest_new]
    codes = SequenceMatcher(None, numbers_old, numbers_new, autojunk=False).get_opcodes()
    gone = Counter(
        segment.number
        for code, i, j, _, _ in codes
        if code in ("delete", "replace")
        for segment in rest_old[i:j]
    )
    last = len(rest_new)
    for code, i, j, k, end in codes:
        if code == "equal":
            yield Run(_size(rest_new[k:end]))
            continue
        place = _place(new, n + k)
        mine, theirs = rest_new[k:end], rest_old[i:j]
        moved = sum(segment.size for segment in mine if gone.get(segment.number))
        if moved >= MIN_RUN:
            shown = theirs[0].text if theirs else ""
            yield Run(_size(mine), kinds.ORDER, place, shown, mine[0].text, moved)
        elif code == "replace" and (len(mine) == len(theirs) or end == last):
            yield from _replaced(theirs, mine, new, n + k)
        else:
            yield _inserted_or_dropped(code, theirs, mine, place, rest_new)


def _replaced(
    theirs: list[Segment], mine: list[Segment], new: list[Segment], at: int
) -> Iterator[Run]:
    """Compare segments pairwise; surplus segments of ``mine`` are new."""
    for number, (a, b) in enumerate(zip(theirs, mine)):
        place = _place(new, at + number)
        if a.kind == b.kind and a.role == b.role:
            yield from _texts(a, b, place, new[-1])
        else:
            yield Run(b.size, kinds.TEXT, place, a.text, b.text)
    for b in mine[len(theirs) :]:
        yield Run(b.size, kinds.NEW, HISTORY, "", b.text)


def _inserted_or_dropped(
    code: str, theirs: list[Segment], mine: list[Segment], place: str, rest: list[Segment]
) -> Run:
    if code == "delete":
        again = len(theirs) == 1 and _comes_again(theirs[0], rest)
        kind = kinds.REMINDER if again else kinds.DROPPED
    else:
        kind = kinds.INSERTED if code == "insert" else kinds.REWRITTEN
    if place == FIRST:
        place = HISTORY
    return Run(_size(mine), kind, place, _shown(theirs), _shown(mine))


def _comes_again(segment: Segment, rest: list[Segment]) -> bool:
    """Return whether a message is among ``rest``, perhaps with a few other words such as a time."""
    if any(other is segment for other in rest):
        return True
    mine = set(segment.sentences)
    return bool(mine) and any(
        2 * sum(len(text) for text in other.sentences if text in mine)
        >= sum(map(len, segment.sentences))
        for other in rest[-3:]
        if other.role == segment.role
    )


def _shown(segments: list[Segment]) -> str:
    return " | ".join(one.text[:40] for one in segments[:2])


def _place(new: list[Segment], at: int) -> str:
    if at >= len(new):
        return HISTORY
    if new[at].role == "system" and all(
        segment.role in ("system", "tools") for segment in new[:at]
    ):
        return SYSTEM
    first = next(
        (n for n, segment in enumerate(new) if segment.role not in ("system", "tools")), -1
    )
    in_first = first >= 0 and at >= first and all(segment.role == new[first].role for segment in new[first : at + 1])  # fmt: skip
    return FIRST if in_first else HISTORY


def _texts(a: Segment, b: Segment, place: str, last: Segment | None = None) -> Iterator[Run]:
    """Compare two versions of one segment. ``last``: the last segment of the later prompt."""
    if a.is_media:
        yield Run(b.size, kinds.PICTURE, place, a.text[-40:], b.text[-40:])
        return
    old, new = a.text, b.text
    n = common_prefix(old, new)
    if n:
        yield Run(n)
    rest_old, rest_new = old[n:], new[n:]
    for same, kind in (
        (a.canonical == b.canonical, kinds.KEY_ORDER),
        (equal_but_blanks(rest_old, rest_new), kinds.WHITE_SPACE),
    ):
        if same:
            yield Run(len(rest_new), kind, place, old[n : n + _SHOWN], new[n : n + _SHOWN], len(rest_new))  # fmt: skip
            return
    tail = common_suffix(rest_old, rest_new)
    ends = len(old) - tail, len(new) - tail
    yield from _middle(old, new, n, *ends, place, last)
    if tail:
        yield Run(tail)


def _middle(
    old: str, new: str, n: int, end_old: int, end_new: int, place: str, last: Segment | None
) -> Iterator[Run]:
    """Compare ``old[n:end_old]`` with ``new[n:end_new]`` sentence by sentence."""
    inner_old, inner_new = old[n:end_old], new[n:end_new]
    if not inner_old and not inner_new:
        return
    if len(inner_old) > 200 and len(inner_new) > 200:
        common = _reordered(inner_old, inner_new)
        if common:
            yield Run(len(inner_new), kinds.ORDER, place, inner_old[:_SHOWN], inner_new[:_SHOWN], common)  # fmt: skip
            return
    a, b = spans(inner_old), spans(inner_new)
    if not a or not b or len(a) * len(b) > MAX_PAIRS:
        yield _difference(old, new, (n, end_old), (n, end_new), place, last)
        return
    matcher = SequenceMatcher(None, [s for _, _, s in a], [s for _, _, s in b], autojunk=False)
    at_old = at_new = 0
    for edits in matcher.get_matching_blocks():
        if edits.size:
            begin_old, begin_new = a[edits.a][0], b[edits.b][0]
            stop_old, stop_new = a[edits.a + edits.size - 1][1], b[edits.b + edits.size - 1][1]
            while begin_old > at_old and begin_new > at_new and inner_old[begin_old - 1] == inner_new[begin_new - 1]:  # fmt: skip
                begin_old, begin_new = begin_old - 1, begin_new - 1
            more = common_prefix(inner_old[stop_old:], inner_new[stop_new:])
            stop_old, stop_new = stop_old + more, stop_new + more
            equal = inner_old[begin_old:stop_old] == inner_new[begin_new:stop_new]
            if not equal or stop_new - begin_new < MIN_RUN or begin_old < at_old or begin_new < at_new:  # fmt: skip
                continue
        else:
            begin_old = stop_old = len(inner_old)
            begin_new = stop_new = len(inner_new)
        if begin_old > at_old or begin_new > at_new:
            yield _difference(
                old, new, (n + at_old, n + begin_old), (n + at_new, n + begin_new), place, last
            )
        if edits.size:
            yield Run(stop_new - begin_new)
        at_old, at_new = stop_old, stop_new


def _reordered(old: str, new: str) -> int:
    """Return the characters of two texts' common sentences, if enough are in another order."""
    a, b = sentences(old), sentences(new)
    both = sum(len(text) * n for text, n in (Counter(a) & Counter(b)).items())
    if both < MIN_RUN or len(a) * len(b) > MAX_PAIRS:
        return 0
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    in_order = sum(len(text) for equal in blocks for text in b[equal.b : equal.b + equal.size])
    return both if both - in_order >= max(MIN_RUN, _REORDERED * both) else 0


def _difference(
    old: str,
    new: str,
    at_old: tuple[int, int],
    at_new: tuple[int, int],
    place: str,
    last: Segment | None,
) -> Run:
    """Name one difference, widened to whole words."""
    x, y, begin = kinds.whole_words(old, new, at_old, at_new)
    label = re.sub(r"[\d\W_]+", " ", new[max(0, begin - 32) : begin]).strip()
    kind = kinds.kind_of(x, y, place)
    gone = old[at_old[0] : at_old[1]].strip()
    if kind == kinds.SHORTENED and last is not None and len(gone) >= MIN_RUN and gone in last.text:
        kind, place = kinds.REMINDER, HISTORY
    size = at_new[1] - at_new[0]
    return Run(size, kind, place, x, y, 0, label[-_LABEL_CHARACTERS:])
