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
_MAX_SHOWN = 80
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
    common: int = 0
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
    positions = [index for index, segment in enumerate(segments) if segment.role == "tools"]
    if not positions:
        return [], [], segments
    start, end = positions[0], positions[-1] + 1
    return segments[:start], segments[start:end], segments[end:]


def _total_size(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _count_equal(old: list[Segment], new: list[Segment]) -> int:
    equal = 0
    while equal < len(old) and equal < len(new) and old[equal] is new[equal]:
        equal += 1
    return equal


def _align_tools(old: list[Segment], new: list[Segment]) -> Iterator[TextRun]:
    equal = _count_equal(old, new)
    if equal:
        yield TextRun(_total_size(new[:equal]))
    old, new = old[equal:], new[equal:]
    if not old and not new:
        return
    first_old, first_new = old[0].text if old else "", new[0].text if new else ""
    numbers = Counter(tool.number for tool in old)
    size = _total_size(new)
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
    equal = _count_equal(old, new)
    if equal > yielded:
        yield TextRun(_total_size(new[yielded:equal]))
    tail_old, tail_new = old[equal:], new[equal:]
    if not tail_new:
        return
    if len(tail_old) > 1 and tail_old[1] is tail_new[0] and _recurs(tail_old[0], tail_new):
        yield TextRun(0, kinds.REMINDER, HISTORY, tail_old[0].text[:_MAX_SHOWN], "")
        yield from _align_messages([*new[:equal], *tail_old[1:]], new, equal)
        return
    numbers_old = [segment.number for segment in tail_old]
    numbers_new = [segment.number for segment in tail_new]
    codes = SequenceMatcher(None, numbers_old, numbers_new, autojunk=False).get_opcodes()
    lost_counts = Counter(
        segment.number
        for code, i, j, _, _ in codes
        if code in ("delete", "replace")
        for segment in tail_old[i:j]
    )
    count = len(tail_new)
    for code, i, j, k, end in codes:
        if code == "equal":
            yield TextRun(_total_size(tail_new[k:end]))
            continue
        place = _place(new, equal + k)
        later, earlier = tail_new[k:end], tail_old[i:j]
        moved = sum(segment.size for segment in later if lost_counts.get(segment.number))
        if moved >= MIN_RUN:
            sample = earlier[0].text if earlier else ""
            yield TextRun(_total_size(later), kinds.ORDER, place, sample, later[0].text, moved)
        elif code == "replace" and (len(later) == len(earlier) or end == count):
            yield from _align_pairs(earlier, later, new, equal + k)
        else:
            yield _changed_run(code, earlier, later, place, tail_new)


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
    return TextRun(_total_size(later), kind, place, _excerpt(earlier), _excerpt(later))


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
    a: Segment, b: Segment, place: str, last_segment: Segment | None = None
) -> Iterator[TextRun]:
    """Compare two versions of one segment. ``last_segment``: the last segment of the later prompt."""
    if a.is_media:
        yield TextRun(b.size, kinds.PICTURE, place, a.text[-40:], b.text[-40:])
        return
    old, new = a.text, b.text
    prefix = common_prefix(old, new)
    if prefix:
        yield TextRun(prefix)
    tail_old, tail_new = old[prefix:], new[prefix:]
    for is_equal, kind in (
        (a.canonical == b.canonical, kinds.KEY_ORDER),
        (equal_but_blanks(tail_old, tail_new), kinds.WHITE_SPACE),
    ):
        if is_equal:
            yield TextRun(len(tail_new), kind, place, old[prefix : prefix + _MAX_SHOWN], new[prefix : prefix + _MAX_SHOWN], len(tail_new))  # fmt: skip
            return
    suffix = common_suffix(tail_old, tail_new)
    ends = len(old) - suffix, len(new) - suffix
    yield from _align_sentences(old, new, prefix, *ends, place, last_segment)
    if suffix:
        yield TextRun(suffix)


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
            yield TextRun(len(inner_new), kinds.ORDER, place, inner_old[:_MAX_SHOWN], inner_new[:_MAX_SHOWN], common)  # fmt: skip
            return
    a, b = sentence_spans(inner_old), sentence_spans(inner_new)
    if not a or not b or len(a) * len(b) > MAX_PAIRS:
        yield _difference(old, new, (n, end_old), (n, end_new), place, end)
        return
    matcher = SequenceMatcher(None, [s for _, _, s in a], [s for _, _, s in b], autojunk=False)
    at_old = at_new = 0
    for block in matcher.get_matching_blocks():
        if block.size:
            begin_old, begin_new = a[block.a][0], b[block.b][0]
            stop_old, stop_new = a[block.a + block.size - 1][1], b[block.b + block.size - 1][1]
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
        if block.size:
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
    span_old: tuple[int, int],
    span_new: tuple[int, int],
    place: str,
    last_segment: Segment | None,
) -> TextRun:
    """Name one difference, widened to whole words."""
    text_old, text_new, begin = kinds.widen_to_words(old, new, span_old, span_new)
    label = re.sub(r"[\d\W_]+", " ", new[max(0, begin - 32) : begin]).strip()
    kind = kinds.difference_kind(text_old, text_new, place)
    stripped = old[span_old[0] : span_old[1]].strip()
    recurs = last_segment is not None and stripped in last_segment.text
    if kind == kinds.SHORTENED and len(stripped) >= MIN_RUN and recurs:
        kind, place = kinds.REMINDER, HISTORY
    size = span_new[1] - span_new[0]
    return TextRun(size, kind, place, text_old, text_new, 0, label[-_LABEL_CHARACTERS:])
