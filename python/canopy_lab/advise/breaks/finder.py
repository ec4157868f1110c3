"""Read prompts in order and sum up the differences that break their prefixes.

For each prompt: the leading text that an unbounded cache would hold; the remembered prompt that
shares most text with what follows; an alignment of the two. A difference followed by equal text is
a break, and costs that text. Tokens are characters / 4.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from canopy_lab.advise.breaks import differences as kinds
from canopy_lab.advise.breaks.align import TextRun, align
from canopy_lab.advise.breaks.memory import MAX_BYTES, MAX_PROMPTS, MIN_RUN, Prompt, PromptMemory
from canopy_lab.trace.prompts import LoggedPrompt
from canopy_lab.trace.template import prompt_parts

MIN_COMMON_SHARE = 0.5
"""Minimum share of tools and system prompt that two prompts of one application have in common."""
MAX_SENTENCES = 200_000
MAX_HEADS = 50_000
_NAME_CHARACTERS = 60


class Applications:
    """Numbers applications in the order in which they appear."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """First words of each application's system prompt."""
        self._number_by_head: dict[tuple[int, ...], int] = {}
        self._number_by_sentence: dict[str, int] = {}

    def number_of(self, prompt: Prompt) -> int:
        """Return the number of the prompt's application."""
        head = [segment for segment in prompt.segments if segment.role in ("tools", "system")]
        head = head or prompt.segments[:1]
        key = tuple(segment.number for segment in head)
        cached_number = self._number_by_head.get(key)
        if cached_number is not None:
            return cached_number
        texts = [s for segment in head for s in segment.sentences or (segment.text[:200],)]
        votes: Counter[int] = Counter()
        for text in texts:
            if text in self._number_by_sentence:
                votes[self._number_by_sentence[text]] += len(text)
        nearest, shared = votes.most_common(1)[0] if votes else (len(self.names), 0)
        if shared < MIN_COMMON_SHARE * sum(map(len, texts)):
            nearest = len(self.names)
            title = next((s.text for s in head if s.role != "tools"), head[0].text)
            self.names.append(" ".join(title.removeprefix("<system>\n").split())[:_NAME_CHARACTERS])
        if len(self._number_by_sentence) < MAX_SENTENCES:
            for text in texts:
                self._number_by_sentence.setdefault(text, nearest)
        if len(self._number_by_head) < MAX_HEADS:
            self._number_by_head[key] = nearest
        return nearest


CHARACTERS_PER_TOKEN = 4
MIN_FINDING_SHARE = 0.005
"""Minimum share of the prompt tokens of a reported finding."""
MIN_FINDING_REQUESTS = 3

_COUNTER_SHARE = 0.8
"""Minimum share of changes in one direction that makes a value a counter."""
_LABELLED_KINDS = (kinds.TIME, kinds.IDENTIFIER, kinds.NUMBER, kinds.USER, kinds.TEXT)
_EDIT_KINDS = (kinds.SHORTENED, kinds.DROPPED, kinds.INSERTED, kinds.REWRITTEN)
_MAX_VALUES = 5000
_MAX_EXAMPLES = 3
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RepeatedBreak:
    """One kind of break at one place of one application."""

    application: int
    """Number from 1, in order of appearance."""
    category: str
    """Category of the application's first request."""
    kind: str
    place: str
    per: str
    """Scope of a value: ``request``, ``conversation`` or ``user``."""
    requests: int
    tokens: int
    """Tokens computed again because of it."""
    share: float
    """Share of all prompt tokens."""
    at_token: int
    """Median distance from the prompt's start, in tokens."""
    values: int
    label: str
    """Words before the value. Text of the log."""
    name: str
    """First words of the application's system prompt. Text of the log."""
    examples: tuple[tuple[str, str], ...]
    """Pairs of values. Text of the log."""


@dataclass(frozen=True, slots=True)
class Breaks:
    """Totals of the log and the findings, most tokens first."""

    requests: int
    tokens: int
    cached_tokens: int
    """Tokens in an unbounded cache."""
    applications: int
    findings: tuple[RepeatedBreak, ...]
    is_whole: bool = True
    """Whether the whole log was read."""
    not_read: str = ""
    """Reason why prompts were not compared; empty if they were."""


@dataclass(slots=True)
class _BreakTotals:
    """A finding while it grows."""

    requests: int = 0
    characters: int = 0
    number_changes: int = 0
    ascending_changes: int = 0
    in_conversations: int = 0
    """Number of requests with a conversation."""
    positions: list[int] = field(default_factory=list)
    values: set[int] = field(default_factory=set)
    by_conversation: dict[str | int, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_user: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    examples: list[tuple[str, str]] = field(default_factory=list)


def _merge(totals: list[_BreakTotals]) -> _BreakTotals:
    merged = _BreakTotals(examples=totals[0].examples)
    for other in totals:
        merged.requests += other.requests
        merged.characters += other.characters
        merged.in_conversations += other.in_conversations
        merged.positions += other.positions
        merged.values |= other.values
        for merged_values, other_values in (
            (merged.by_conversation, other.by_conversation),
            (merged.by_user, other.by_user),
        ):
            for name, values in other_values.items():
                merged_values[name] |= values  # type: ignore[index]
    return merged


class _Key(NamedTuple):
    application: int
    place: str
    kind: str
    label: str


class Finder:
    """Call ``add`` for each prompt, then ``breaks``."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self.memory = PromptMemory(max_prompts, max_bytes)
        self.applications = Applications()
        self.requests = self.characters = self.cached_characters = 0
        self._totals: dict[_Key, _BreakTotals] = defaultdict(_BreakTotals)
        self._categories: list[str] = []

    def add(self, logged: LoggedPrompt) -> None:
        """Compare one prompt with earlier ones and remember it."""
        parts = prompt_parts(logged)
        if not parts:
            return
        prompt = self.memory.make_prompt(logged, parts)
        hit_characters, elsewhere_characters = self.memory.add_to_unbounded_cache(prompt)
        prompt.application = self.applications.number_of(prompt)
        if prompt.application == len(self._categories):
            self._categories.append(logged.category)
        self.requests += 1
        self.characters += prompt.characters
        self.cached_characters += min(hit_characters, prompt.characters)
        if elsewhere_characters >= MIN_RUN:
            model = prompt.salts[0]
            elsewhere_run = TextRun(0, kinds.MODELS, kinds.HISTORY, later=model, label=model)
            self._record_break(prompt, elsewhere_run, elsewhere_characters, hit_characters)
        similar = self.memory.most_similar(prompt, hit_characters)
        if similar is not None:
            self._compare(similar, prompt, hit_characters)
        self.memory.remember(prompt)

    def _compare(self, earlier: Prompt, later: Prompt, hit: int) -> None:
        """Charge each difference with the equal text up to the next difference, after ``hit``."""
        position, lost_characters = 0, 0
        pending, start = None, 0
        for run in align(earlier, later):
            end = position + run.characters
            if not run.kind:
                if end - max(position, hit) >= MIN_RUN:
                    lost_characters += end - max(position, hit)
            else:
                if pending is not None:
                    self._record_break(later, pending, lost_characters, start)
                pending, start = run, position
                # Another prompt may also have this part, so only text after ``hit`` is lost.
                moved = run.common_characters if run.common_characters >= MIN_RUN else 0
                lost_characters = max(0, moved - max(0, hit - position))
            position = end
        if pending is not None:
            self._record_break(later, pending, lost_characters, start)

    def _record_break(self, prompt: Prompt, run: TextRun, lost_characters: int, start: int) -> None:
        if lost_characters < MIN_RUN:
            return
        has_label = run.kind in _LABELLED_KINDS and run.place != kinds.HISTORY
        label = run.label if has_label or run.kind == kinds.MODELS else ""
        totals = self._totals[_Key(prompt.application, run.place, run.kind, label)]
        totals.requests += 1
        totals.characters += lost_characters
        if len(totals.positions) < _MAX_VALUES:
            totals.positions.append(start)
            value = hash(run.later)
            totals.values.add(value)
            totals.in_conversations += prompt.conversation is not None
            owner = prompt.number if prompt.conversation is None else prompt.conversation
            totals.by_conversation[owner].add(value)
            if prompt.user is not None:
                totals.by_user[prompt.user].add(value)
        numbers = kinds.parse_number(run.earlier), kinds.parse_number(run.later)
        if numbers[0] is not None and numbers[1] is not None:
            totals.number_changes += 1
            totals.ascending_changes += numbers[0] < numbers[1]
        if len(totals.examples) < _MAX_EXAMPLES and run.earlier != run.later:
            totals.examples.append((run.earlier[:_MAX_SHOWN], run.later[:_MAX_SHOWN]))

    def breaks(self) -> Breaks:
        findings = [
            self._make_finding(key, totals)
            for key, totals in self._fold_edits().items()
            if totals.requests >= MIN_FINDING_REQUESTS
            and totals.characters >= MIN_FINDING_SHARE * self.characters
        ]
        findings.sort(key=lambda finding: -finding.tokens)
        return Breaks(
            self.requests,
            self.characters // CHARACTERS_PER_TOKEN,
            self.cached_characters // CHARACTERS_PER_TOKEN,
            len(self.applications.names),
            tuple(findings),
        )

    def _fold_edits(self) -> dict[_Key, _BreakTotals]:
        """Return the sums, with an application's edits of its history under the costliest kind."""
        totals = dict(self._totals)
        edits: dict[int, list[_Key]] = defaultdict(list)
        for key in totals:
            if key.place == kinds.HISTORY and key.kind in _EDIT_KINDS:
                edits[key.application].append(key)
        for keys in edits.values():
            costliest = max(keys, key=lambda key: totals[key].characters)
            others = [totals.pop(key) for key in keys if key != costliest]
            totals[costliest] = _merge([totals[costliest], *others])
        return totals

    def _make_finding(self, key: _Key, totals: _BreakTotals) -> RepeatedBreak:
        kind = key.kind
        if kind == kinds.NUMBER and totals.number_changes:
            rising = totals.ascending_changes / totals.number_changes
            kind = kinds.COUNTER if max(rising, 1 - rising) >= _COUNTER_SHARE else kind
        value_counts = [len(values) for values in totals.by_conversation.values()]
        if totals.in_conversations:
            changes_often = sum(value_counts) > 1.5 * len(value_counts)
        else:
            changes_often = 2 * len(totals.values) > len(totals.positions)
        per = "request" if changes_often else "conversation"
        users = totals.by_user.values()
        if per == "conversation" and users and all(len(values) == 1 for values in users):
            per = "user"
        if kind == kinds.USER and per == "request":
            kind = kinds.TEXT
        return RepeatedBreak(
            application=key.application + 1,
            category=self._categories[key.application],
            kind=kind,
            place=key.place,
            per=per,
            requests=totals.requests,
            tokens=totals.characters // CHARACTERS_PER_TOKEN,
            share=totals.characters / max(self.characters, 1),
            at_token=sorted(totals.positions)[len(totals.positions) // 2] // CHARACTERS_PER_TOKEN,
            values=len(totals.values),
            label=key.label,
            name=self.applications.names[key.application],
            examples=tuple(totals.examples),
        )
