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
    sentence_spans,
    sentences,
)

MAX_PAIRS = 4_000_000
"""Pairs of sentences up to which two texts are aligned; the time of the alignment grows with them."""
_REORDERED = 0.2
"""Share of two texts' common sentences that must be out of order to count as reordered."""
_LABEL_CHARACTERS = 16
_SHOWN = 80
_NAME = re.compile(r'"name": ?"([^"]*)"')


class TextRun(NamedTuple):
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


def align(old: Prompt, new: Prompt) -> Iterator[TextRun]:
    """Yield the runs of ``new``, compared with ``old``."""
    head, tools, messages = _split_tools(old.segments)
    new_before, new_tools, new_rest = _split_tools(new.segments)
    yield from _align_messages(head, new_before)
    yield from _align_tools(tools, new_tools)
    yield from _align_messages(messages, new_rest)


def _split_tools(segments: list[Segment]) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """Return the segments before the tools, the tools, and the rest."""
    positions = [n for n, segment in enumerate(segments) if segment.role == "tools"]
    if not positions:
        return [], [], segments
    start, end = positions[0], positions[-1] + 1
    return segments[:start], segments[start:end], segments[end:]


def _size(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _equal_heads(old: list[Segment], new: list[Segment]) -> int:
    n = 0
    while n < len(old) and n < len(new) and old[n] is new[n]:
        n += 1
    return n


def _align_tools(old: list[Segment], new: list[Segment]) -> Iterator[TextRun]:
    equal = _equal_heads(old, new)
    if equal:
        yield TextRun(_size(new[:equal]))
    old, new = old[equal:], new[equal:]
    if not old and not new:
        return
    first_old, first_new = old[0].text if old else "", new[0].text if new else ""
    numbers = Counter(tool.number for tool in old)
    size = _size(new)
    if numbers == Counter(tool.number for tool in new):
        yield TextRun(size, kinds.TOOL_ORDER, TOOLS, first_old, first_new, size)
    elif Counter(tool.canonical for tool in old) == Counter(tool.canonical for tool in new):
        yield TextRun(size, kinds.KEY_ORDER, TOOLS, first_old, first_new, size)
    elif [_tool_name(tool) for tool in old] == [_tool_name(tool) for tool in new]:
        for a, b in zip(old, new, strict=True):
            yield from ((TextRun(b.size),) if a is b else _align_texts(a, b, TOOLS))
    else:
        common = sum(tool.size for tool in new if tool.number in numbers)
        yield TextRun(size, kinds.TOOL_SET, TOOLS, first_old, first_new, common)


def _tool_name(tool: Segment) -> str:
    name = _NAME.search(tool.text)
    return name[1] if name else tool.text[:40]


def _align_messages(old: list[Segment], new: list[Segment], yielded: int = 0) -> Iterator[TextRun]:
    """Compare messages; the first ``yielded`` are equal and were yielded."""
    equal = _equal_heads(old, new)
    if equal > yielded:
        yield TextRun(_size(new[yielded:equal]))
    rest_old, rest_new = old[equal:], new[equal:]
    if not rest_new:
        return
    if len(rest_old) > 1 and rest_old[1] is rest_new[0] and _recurs(rest_old[0], rest_new):
        yield TextRun(0, kinds.REMINDER, HISTORY, rest_old[0].text[:_SHOWN], "")
        yield from _align_messages([*new[:equal], *rest_old[1:]], new, equal)
        return
    numbers_old = [segment.number for segment in rest_old]
    numbers_new = [segment.number for segment in rest_new]
    codes = SequenceMatcher(None, numbers_old, numbers_new, autojunk=False).get_opcodes()
    lost = Counter(
        segment.number
        for code, i, j, _, _ in codes
        if code in ("delete", "replace")
        for segment in rest_old[i:j]
    )
    count = len(rest_new)
    for code, i, j, k, end in codes:
        if code == "equal":
            yield TextRun(_size(rest_new[k:end]))
            continue
        place = _place(new, equal + k)
        later, earlier = rest_new[k:end], rest_old[i:j]
        moved = sum(segment.size for segment in later if lost.get(segment.number))
        if moved >= MIN_RUN:
            sample = earlier[0].text if earlier else ""
            yield TextRun(_size(later), kinds.ORDER, place, sample, later[0].text, moved)
        elif code == "replace" and (len(later) == len(earlier) or end == count):
            yield from _align_pairs(earlier, later, new, equal + k)
        else:
            yield _changed_run(code, earlier, later, place, rest_new)


def _align_pairs(
    earlier: list[Segment], later: list[Segment], new: list[Segment], index: int
) -> Iterator[TextRun]:
    """Compare segments pairwise; surplus segments of ``later`` are new."""
    for number, (a, b) in enumerate(zip(earlier, later)):
        place = _place(new, index + number)
        if a.kind == b.kind and a.role == b.role:
            yield from _align_texts(a, b, place, new[-1])
        else:
            yield TextRun(b.size, kinds.TEXT, place, a.text, b.text)
    for b in later[len(earlier) :]:
        yield TextRun(b.size, kinds.NEW, HISTORY, "", b.text)


def _changed_run(
    code: str, earlier: list[Segment], later: list[Segment], place: str, history: list[Segment]
) -> TextRun:
    if code == "delete":
        recurs = len(earlier) == 1 and _recurs(earlier[0], history)
        kind = kinds.REMINDER if recurs else kinds.DROPPED
    else:
        kind = kinds.INSERTED if code == "insert" else kinds.REWRITTEN
    if place == FIRST:
        place = HISTORY
    return TextRun(_size(later), kind, place, _excerpt(earlier), _excerpt(later))


def _recurs(segment: Segment, history: list[Segment]) -> bool:
    """Return whether a message is among ``history``, perhaps with a few other words such as a time."""
    if any(candidate is segment for candidate in history):
        return True
    texts = set(segment.sentences)
    return bool(texts) and any(
        2 * sum(len(text) for text in candidate.sentences if text in texts)
        >= sum(map(len, segment.sentences))
        for candidate in history[-3:]
        if candidate.role == segment.role
    )


def _excerpt(segments: list[Segment]) -> str:
    return " | ".join(segment.text[:40] for segment in segments[:2])


def _place(prompt: list[Segment], index: int) -> str:
    if index >= len(prompt):
        return HISTORY
    if prompt[index].role == "system" and all(
        segment.role in ("system", "tools") for segment in prompt[:index]
    ):
        return SYSTEM
    start = next(
        (n for n, segment in enumerate(prompt) if segment.role not in ("system", "tools")), -1
    )
    in_first = start >= 0 and index >= start and all(segment.role == prompt[start].role for segment in prompt[start : index + 1])  # fmt: skip
    return FIRST if in_first else HISTORY


def _align_texts(
    a: Segment, b: Segment, place: str, end: Segment | None = None
) -> Iterator[TextRun]:
    """Compare two versions of one segment. ``end``: the last segment of the later prompt."""
    if a.is_media:
        yield TextRun(b.size, kinds.PICTURE, place, a.text[-40:], b.text[-40:])
        return
    old, new = a.text, b.text
    prefix = common_prefix(old, new)
    if prefix:
        yield TextRun(prefix)
    rest_old, rest_new = old[prefix:], new[prefix:]
    for is_equal, kind in (
        (a.canonical == b.canonical, kinds.KEY_ORDER),
        (equal_but_blanks(rest_old, rest_new), kinds.WHITE_SPACE),
    ):
        if is_equal:
            yield TextRun(len(rest_new), kind, place, old[prefix : prefix + _SHOWN], new[prefix : prefix + _SHOWN], len(rest_new))  # fmt: skip
            return
    tail = common_suffix(rest_old, rest_new)
    ends = len(old) - tail, len(new) - tail
    yield from _align_sentences(old, new, prefix, *ends, place, end)
    if tail:
        yield TextRun(tail)


def _align_sentences(
    old: str, new: str, n: int, end_old: int, end_new: int, place: str, end: Segment | None
) -> Iterator[TextRun]:
    """Compare ``old[n:end_old]`` with ``new[n:end_new]`` sentence by sentence."""
    inner_old, inner_new = old[n:end_old], new[n:end_new]
    if not inner_old and not inner_new:
        return
    if len(inner_old) > 200 and len(inner_new) > 200:
        common = _reordered_characters(inner_old, inner_new)
        if common:
            yield TextRun(len(inner_new), kinds.ORDER, place, inner_old[:_SHOWN], inner_new[:_SHOWN], common)  # fmt: skip
            return
    a, b = sentence_spans(inner_old), sentence_spans(inner_new)
    if not a or not b or len(a) * len(b) > MAX_PAIRS:
        yield _difference(old, new, (n, end_old), (n, end_new), place, end)
        return
    matcher = SequenceMatcher(None, [s for _, _, s in a], [s for _, _, s in b], autojunk=False)
    at_old = at_new = 0
    for edits in matcher.get_matching_blocks():
        if edits.size:
            begin_old, begin_new = a[edits.a][0], b[edits.b][0]
            stop_old, stop_new = a[edits.a + edits.size - 1][1], b[edits.b + edits.size - 1][1]
            while begin_old > at_old and begin_new > at_new and inner_old[begin_old - 1] == inner_new[begin_new - 1]:  # fmt: skip
                begin_old, begin_new = begin_old - 1, begin_new - 1
            suffix = common_prefix(inner_old[stop_old:], inner_new[stop_new:])
            stop_old, stop_new = stop_old + suffix, stop_new + suffix
            equal = inner_old[begin_old:stop_old] == inner_new[begin_new:stop_new]
            if not equal or stop_new - begin_new < MIN_RUN or begin_old < at_old or begin_new < at_new:  # fmt: skip
                continue
        else:
            begin_old = stop_old = len(inner_old)
            begin_new = stop_new = len(inner_new)
        if begin_old > at_old or begin_new > at_new:
            yield _difference(
                old, new, (n + at_old, n + begin_old), (n + at_new, n + begin_new), place, end
            )
        if edits.size:
            yield TextRun(stop_new - begin_new)
        at_old, at_new = stop_old, stop_new


def _reordered_characters(old: str, new: str) -> int:
    """Return the characters of two texts' common sentences, if enough are in another order."""
    a, b = sentences(old), sentences(new)
    common = sum(len(text) * n for text, n in (Counter(a) & Counter(b)).items())
    if common < MIN_RUN or len(a) * len(b) > MAX_PAIRS:
        return 0
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    in_order = sum(len(text) for equal in blocks for text in b[equal.b : equal.b + equal.size])
    return common if common - in_order >= max(MIN_RUN, _REORDERED * common) else 0


def _difference(
    old: str,
    new: str,
    at_old: tuple[int, int],
    at_new: tuple[int, int],
    place: str,
    end: Segment | None,
) -> TextRun:
    """Name one difference, widened to whole words."""
    x, y, begin = kinds.whole_words(old, new, at_old, at_new)
    label = re.sub(r"[\d\W_]+", " ", new[max(0, begin - 32) : begin]).strip()
    kind = kinds.difference_kind(x, y, place)
    text = old[at_old[0] : at_old[1]].strip()
    if kind == kinds.SHORTENED and end is not None and len(text) >= MIN_RUN and text in end.text:
        kind, place = kinds.REMINDER, HISTORY
    size = at_new[1] - at_new[0]
    return TextRun(size, kind, place, x, y, 0, label[-_LABEL_CHARACTERS:])
