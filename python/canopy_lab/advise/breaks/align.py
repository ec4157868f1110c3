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
    differ_in_blanks,
    sentence_spans,
    sentences,
)

MAX_PAIRS = 4_000_000
"""Pairs of sentences up to which two texts are aligned; the time of the alignment grows with them."""
_MIN_REORDERED_SHARE = 0.2
"""Share of two texts' common sentences that must be out of order to count as reordered."""
_LABEL_CHARACTERS = 16
_MAX_SHOWN_CHARACTERS = 80
_TOOL_NAME = re.compile(r'"name": ?"([^"]*)"')


class TextRun(NamedTuple):
    """A run of characters of the later prompt."""

    characters: int
    kind: str = ""
    """Kind of the difference; empty for equal text."""
    place: str = ""
    earlier: str = ""
    later: str = ""
    common_characters: int = 0
    """Characters of the difference that the earlier prompt also has, in another order."""
    label: str = ""
    """Words before the difference, which distinguish two differences of one kind."""


class _Spans(NamedTuple):
    """A passage of the earlier text and one of the later text, as positions of characters."""

    begin_earlier: int
    end_earlier: int
    begin_later: int
    end_later: int


def align(earlier: Prompt, later: Prompt) -> Iterator[TextRun]:
    """Yield the runs of ``later``, compared with ``earlier``."""
    head, tools, messages = _split_tools(earlier.segments)
    later_head, later_tools, later_messages = _split_tools(later.segments)
    yield from _align_messages(head, later_head)
    yield from _align_tools(tools, later_tools)
    yield from _align_messages(messages, later_messages)


def _split_tools(segments: list[Segment]) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """Return the segments before the tools, the tools, and the rest."""
    positions = [index for index, segment in enumerate(segments) if segment.role == "tools"]
    if not positions:
        return [], [], segments
    start, end = positions[0], positions[-1] + 1
    return segments[:start], segments[start:end], segments[end:]


def _count_characters(segments: Sequence[Segment]) -> int:
    return sum(segment.characters for segment in segments)


def _count_equal(earlier: list[Segment], later: list[Segment]) -> int:
    """Return the number of leading segments that are equal."""
    pairs = enumerate(zip(earlier, later))
    return next((i for i, (a, b) in pairs if a is not b), min(len(earlier), len(later)))


def _align_tools(earlier: list[Segment], later: list[Segment]) -> Iterator[TextRun]:
    equal = _count_equal(earlier, later)
    if equal:
        yield TextRun(_count_characters(later[:equal]))
    earlier, later = earlier[equal:], later[equal:]
    if not earlier and not later:
        return
    shown = (earlier[0].text if earlier else "", later[0].text if later else "")
    numbers = Counter(tool.number for tool in earlier)
    characters = _count_characters(later)
    if numbers == Counter(tool.number for tool in later):
        yield TextRun(characters, kinds.TOOL_ORDER, TOOLS, *shown, characters)
    elif Counter(tool.canonical for tool in earlier) == Counter(tool.canonical for tool in later):
        yield TextRun(characters, kinds.KEY_ORDER, TOOLS, *shown, characters)
    elif [_tool_name(tool) for tool in earlier] == [_tool_name(tool) for tool in later]:
        for a, b in zip(earlier, later, strict=True):
            yield from ((TextRun(b.characters),) if a is b else _align_texts(a, b, TOOLS))
    else:
        common = sum(tool.characters for tool in later if tool.number in numbers)
        yield TextRun(characters, kinds.TOOL_SET, TOOLS, *shown, common)


def _tool_name(tool: Segment) -> str:
    name = _TOOL_NAME.search(tool.text)
    return name[1] if name else tool.text[:40]


def _align_messages(
    earlier: list[Segment], later: list[Segment], yielded: int = 0
) -> Iterator[TextRun]:
    """Compare messages; the first ``yielded`` are equal and were yielded."""
    equal = _count_equal(earlier, later)
    if equal > yielded:
        yield TextRun(_count_characters(later[yielded:equal]))
    tail_earlier, tail_later = earlier[equal:], later[equal:]
    if not tail_later:
        return
    removed = tail_earlier[0] if tail_earlier else None
    if removed and tail_earlier[1:2] == tail_later[:1] and _recurs(removed, tail_later):
        yield TextRun(0, kinds.REMINDER, HISTORY, removed.text[:_MAX_SHOWN_CHARACTERS], "")
        yield from _align_messages([*later[:equal], *tail_earlier[1:]], later, equal)
        return
    tails = (tail_earlier, tail_later)
    numbers, later_numbers = ([segment.number for segment in tail] for tail in tails)
    opcodes = SequenceMatcher(None, numbers, later_numbers, autojunk=False).get_opcodes()
    lost_numbers = {
        segment.number
        for tag, begin, end, _, _ in opcodes
        if tag in ("delete", "replace")
        for segment in tail_earlier[begin:end]
    }
    for tag, begin_earlier, end_earlier, begin, end in opcodes:
        before, after = tail_earlier[begin_earlier:end_earlier], tail_later[begin:end]
        if tag == "equal":
            yield TextRun(_count_characters(after))
            continue
        place = _place(later, equal + begin)
        moved = sum(segment.characters for segment in after if segment.number in lost_numbers)
        if moved >= MIN_RUN:
            shown = (before[0].text if before else "", after[0].text)
            yield TextRun(_count_characters(after), kinds.ORDER, place, *shown, moved)
        elif tag == "replace" and (len(after) == len(before) or end == len(tail_later)):
            yield from _align_pairs(before, after, later, equal + begin)
        else:
            yield _changed_run(tag, before, after, place, tail_later)


def _align_pairs(
    before: list[Segment], after: list[Segment], prompt: list[Segment], index: int
) -> Iterator[TextRun]:
    """Compare segments pairwise; surplus ones are new. ``after`` begins at ``prompt[index]``."""
    for number, (a, b) in enumerate(zip(before, after)):
        place = _place(prompt, index + number)
        if a.kind == b.kind and a.role == b.role:
            yield from _align_texts(a, b, place, prompt[-1])
        else:
            yield TextRun(b.characters, kinds.TEXT, place, a.text, b.text)
    for segment in after[len(before) :]:
        yield TextRun(segment.characters, kinds.NEW, HISTORY, "", segment.text)


def _changed_run(
    tag: str, before: list[Segment], after: list[Segment], place: str, history: list[Segment]
) -> TextRun:
    """Return the run of messages that differ in number. ``tag``: of ``difflib``."""
    if tag == "delete":
        recurs = len(before) == 1 and _recurs(before[0], history)
        kind = kinds.REMINDER if recurs else kinds.DROPPED
    else:
        kind = kinds.INSERTED if tag == "insert" else kinds.REWRITTEN
    place = HISTORY if place == FIRST else place
    return TextRun(_count_characters(after), kind, place, _excerpt(before), _excerpt(after))


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
    """Return the place of segment ``index``: in the system prompt, the first message or the history."""
    roles = [segment.role for segment in prompt[: index + 1]]
    if index >= len(prompt):
        return HISTORY
    if roles[-1] == "system" and all(role in ("system", "tools") for role in roles):
        return SYSTEM
    messages = [role for role in roles if role not in ("system", "tools")]
    if not messages:
        return HISTORY
    since_first = roles[roles.index(messages[0]) :]
    return FIRST if set(since_first) == {messages[0]} else HISTORY


def _align_texts(
    earlier: Segment, later: Segment, place: str, last_segment: Segment | None = None
) -> Iterator[TextRun]:
    """Compare two versions of one segment. ``last_segment``: the last segment of the later prompt."""
    a, b = earlier.text, later.text
    if earlier.is_media:
        yield TextRun(later.characters, kinds.PICTURE, place, a[-40:], b[-40:])
        return
    prefix = common_prefix(a, b)
    if prefix:
        yield TextRun(prefix)
    tail_a, tail_b = a[prefix:], b[prefix:]
    shown = (tail_a[:_MAX_SHOWN_CHARACTERS], tail_b[:_MAX_SHOWN_CHARACTERS])
    for is_kind, kind in (
        (earlier.canonical == later.canonical, kinds.KEY_ORDER),
        (differ_in_blanks(tail_a, tail_b), kinds.WHITE_SPACE),
    ):
        if is_kind:
            yield TextRun(len(tail_b), kind, place, *shown, len(tail_b))
            return
    suffix = common_suffix(tail_a, tail_b)
    inner = _Spans(prefix, len(a) - suffix, prefix, len(b) - suffix)
    yield from _align_sentences(a, b, inner, place, last_segment)
    if suffix:
        yield TextRun(suffix)


def _align_sentences(
    earlier: str, later: str, inner: _Spans, place: str, last_segment: Segment | None
) -> Iterator[TextRun]:
    """Compare the ``inner`` spans of two texts sentence by sentence."""
    a = earlier[inner.begin_earlier : inner.end_earlier]
    b = later[inner.begin_later : inner.end_later]
    if not a and not b:
        return
    if len(a) > 200 and len(b) > 200:
        common = _reordered_characters(a, b)
        if common:
            shown = (a[:_MAX_SHOWN_CHARACTERS], b[:_MAX_SHOWN_CHARACTERS])
            yield TextRun(len(b), kinds.ORDER, place, *shown, common)
            return
    at_earlier, at_later = inner.begin_earlier, inner.begin_later
    for equal in _equal_spans(a, b):
        begin_earlier = inner.begin_earlier + equal.begin_earlier
        begin_later = inner.begin_later + equal.begin_later
        if begin_earlier > at_earlier or begin_later > at_later:
            spans = _Spans(at_earlier, begin_earlier, at_later, begin_later)
            yield _difference(earlier, later, spans, place, last_segment)
        if equal.end_later > equal.begin_later:
            yield TextRun(equal.end_later - equal.begin_later)
        at_earlier = inner.begin_earlier + equal.end_earlier
        at_later = inner.begin_later + equal.end_later


def _equal_spans(a: str, b: str) -> Iterator[_Spans]:
    """Yield the passages of equal sentences, widened by equal characters; at last the empty end."""
    a_spans, b_spans = sentence_spans(a), sentence_spans(b)
    if len(a_spans) * len(b_spans) > MAX_PAIRS:
        a_spans = b_spans = []
    a_texts, b_texts = ([text for _, _, text in spans] for spans in (a_spans, b_spans))
    matcher = SequenceMatcher(None, a_texts, b_texts, autojunk=False)
    at_a = at_b = 0
    for block in matcher.get_matching_blocks()[:-1]:
        begin_a, begin_b = a_spans[block.a][0], b_spans[block.b][0]
        end_a, end_b = a_spans[block.a + block.size - 1][1], b_spans[block.b + block.size - 1][1]
        while begin_a > at_a and begin_b > at_b and a[begin_a - 1] == b[begin_b - 1]:
            begin_a, begin_b = begin_a - 1, begin_b - 1
        suffix = common_prefix(a[end_a:], b[end_b:])
        end_a, end_b = end_a + suffix, end_b + suffix
        is_equal = a[begin_a:end_a] == b[begin_b:end_b]
        is_long = end_b - begin_b >= MIN_RUN
        if is_equal and is_long and begin_a >= at_a and begin_b >= at_b:
            yield _Spans(begin_a, end_a, begin_b, end_b)
            at_a, at_b = end_a, end_b
    yield _Spans(len(a), len(a), len(b), len(b))


def _reordered_characters(a: str, b: str) -> int:
    """Return the characters of two texts' common sentences, if enough are in another order."""
    a_sentences, b_sentences = sentences(a), sentences(b)
    common_counts = Counter(a_sentences) & Counter(b_sentences)
    common = sum(len(text) * count for text, count in common_counts.items())
    if common < MIN_RUN or len(a_sentences) * len(b_sentences) > MAX_PAIRS:
        return 0
    blocks = SequenceMatcher(None, a_sentences, b_sentences, autojunk=False).get_matching_blocks()
    in_order = sum(len(text) for _, start, n in blocks for text in b_sentences[start : start + n])
    min_moved = max(MIN_RUN, _MIN_REORDERED_SHARE * common)
    return common if common - in_order >= min_moved else 0


def _difference(
    earlier: str, later: str, spans: _Spans, place: str, last_segment: Segment | None
) -> TextRun:
    """Name one difference, widened to whole words."""
    earlier_words, later_words, begin = kinds.widen_to_words(earlier, later, spans[:2], spans[2:])
    label = re.sub(r"[\d\W_]+", " ", later[max(0, begin - 32) : begin]).strip()
    kind = kinds.difference_kind(earlier_words, later_words, place)
    removed = earlier[spans.begin_earlier : spans.end_earlier].strip()
    recurs = last_segment is not None and removed in last_segment.text
    if kind == kinds.SHORTENED and len(removed) >= MIN_RUN and recurs:
        kind, place = kinds.REMINDER, HISTORY
    characters = spans.end_later - spans.begin_later
    return TextRun(
        characters, kind, place, earlier_words, later_words, 0, label[-_LABEL_CHARACTERS:]
    )
