"""Earlier prompts in bounded memory, and the most similar one to a new prompt."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from canopy_lab.advise.breaks.texts import canonical, sentences
from canopy_lab.trace.chat import PromptPart
from canopy_lab.trace.prompts import LoggedPrompt

MAX_PROMPTS = 20_000
MAX_BYTES = 256 << 20
"""Maximum bytes of remembered texts, sentences and block hashes."""
BLOCK_CHARACTERS = 64
"""Characters in a block of the unbounded cache: 16 tokens."""
MIN_RUN = 64
"""Minimum characters of equal text after a difference that make the difference cost something."""

_BLOCK_BYTES = 160
"""Estimated bytes per remembered block hash, including both generations."""
_SENTENCE_BYTES = 150
_MAX_CANDIDATES = 6
"""Remembered prompts that are compared in full with a new one."""


K = TypeVar("K")
V = TypeVar("V")


class Segment:
    """One part of a prompt; equal parts of all prompts are one object."""

    def __init__(self, part: PromptPart, number: int) -> None:
        self.kind, self.role, self.text = part
        self.number, self.characters = number, len(part.text)
        self.prompt_count = 0
        """Number of remembered prompts that contain it."""
        self.last_prompt_number = -1
        """Number of the latest prompt that contains it."""

    @property
    def is_media(self) -> bool:
        return self.kind in ("image", "media")

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        return () if self.is_media else tuple(sentences(self.text))

    @cached_property
    def canonical(self) -> str:
        return canonical(self.text)

    @property
    def memory_bytes(self) -> int:
        """Return an estimate of its memory, including its sentences."""
        return 2 * sys.getsizeof(self.text) + _SENTENCE_BYTES * len(self.sentences)


@dataclass(slots=True, eq=False)
class Prompt:
    """A logged prompt. ``salts`` and ``user``: as logged; ``application``: number of its system prompt's group."""

    number: int
    segments: list[Segment]
    conversation: str | None
    user: str | None
    salts: tuple[str, ...]
    application: int = 0
    segment_numbers: set[int] = field(default_factory=set)

    @property
    def characters(self) -> int:
        return sum(segment.characters for segment in self.segments)


class RecentMap(Generic[K, V]):
    """Bounded map that keeps recently used keys: two generations of ``max_keys`` keys each."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self._recent: dict[K, V] = {}
        self._earlier: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        value = self._recent.get(key)
        if value is None:
            value = self._earlier.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._recent) >= self.max_keys:
            self._earlier, self._recent = self._recent, {}
        self._recent[key] = value


class PromptMemory:
    """Remembered prompts. The oldest are forgotten beyond ``max_prompts`` or ``max_bytes``."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self.max_prompts = max_prompts
        self.max_text_bytes = max_bytes // 2
        self.text_bytes = 0
        max_hashes = max(1024, max_bytes // 2 // _BLOCK_BYTES)
        self._block_hashes: RecentMap[int, bool] = RecentMap(max_hashes)
        self._chain_hashes: RecentMap[tuple[int, int], int] = RecentMap(max_hashes // 8)
        self._salts_by_text: RecentMap[int, tuple[str, ...]] = RecentMap(max_hashes // 8)
        self._prompts: OrderedDict[int, Prompt] = OrderedDict()
        self._segments: dict[PromptPart, Segment] = {}
        self._segment_by_sentence: dict[str, Segment] = {}
        self._number_by_conversation: dict[str, int] = {}
        self._segment_count = self._prompt_count = 0

    def make_prompt(self, logged: LoggedPrompt, parts: tuple[PromptPart, ...]) -> Prompt:
        """Return ``logged`` as segments, not remembered yet."""
        segments = [self._segment(part) for part in parts]
        number, self._prompt_count = self._prompt_count, self._prompt_count + 1
        prompt = Prompt(number, segments, logged.conversation, logged.user, logged.salts)
        prompt.segment_numbers = {segment.number for segment in segments}
        return prompt

    def _segment(self, part: PromptPart) -> Segment:
        segment = self._segments.get(part)
        if segment is None:
            segment = self._segments[part] = Segment(part, self._segment_count)
            self._segment_count += 1
        return segment

    def add_to_unbounded_cache(self, prompt: Prompt) -> tuple[int, int]:
        """Return the leading characters that an unbounded cache holds, and add the prompt to it.

        The second number: characters after the hit that the same prompt left in the cache of
        another model or adapter, which are the first two salts.
        """
        chain_hash, is_hit, hit_characters = hash(prompt.salts), True, 0
        model_free_hash, elsewhere_characters = hash(prompt.salts[2:]), 0
        for segment in prompt.segments:
            child_hash = self._chain_hashes.get((chain_hash, segment.number))
            if child_hash is None:
                child_hash = chain_hash
                for start in range(0, segment.characters - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
                    child_hash = hash((child_hash, segment.text[start : start + BLOCK_CHARACTERS]))
                    if self._block_hashes.get(child_hash) is None:
                        is_hit = False
                        self._block_hashes.put(child_hash, True)
                    hit_characters += BLOCK_CHARACTERS * is_hit
                is_hit = False
                child_hash = hash((child_hash, segment.number))
                self._chain_hashes.put((chain_hash, segment.number), child_hash)
            elif is_hit:
                hit_characters += segment.characters
            chain_hash = child_hash
            model_free_hash = hash((model_free_hash, segment.number))
            latest_salts = self._salts_by_text.get(model_free_hash)
            if latest_salts is not None and latest_salts != prompt.salts and not is_hit:
                elsewhere_characters += segment.characters
            self._salts_by_text.put(model_free_hash, prompt.salts)
        return hit_characters, elsewhere_characters

    def most_similar(self, prompt: Prompt, hit_characters: int) -> Prompt | None:
        """Return the remembered prompt that shares most text with ``prompt`` after its hit."""
        votes = self._count_votes(prompt, hit_characters)
        previous = None
        if prompt.conversation is not None:
            previous = self._number_by_conversation.get(prompt.conversation)
        candidates = [number for number, _ in votes.most_common(_MAX_CANDIDATES)]
        if previous is not None and previous not in candidates:
            candidates.append(previous)
        nearest, best_score = None, 0
        for number in candidates:
            candidate = self._prompts.get(number)
            if candidate is None or candidate.application != prompt.application:
                continue
            score = _shared_characters(prompt, candidate) + MIN_RUN * (number == previous)
            if score > best_score:
                nearest, best_score = candidate, score
        return nearest

    def _count_votes(self, prompt: Prompt, hit_characters: int) -> Counter[int]:
        """Return the characters after ``hit_characters``, by the latest prompt that contains them."""
        votes: Counter[int] = Counter()
        end = 0
        for segment in prompt.segments:
            end += segment.characters
            if end <= hit_characters:
                continue
            if segment.last_prompt_number >= 0:
                votes[segment.last_prompt_number] += segment.characters
            else:
                for sentence in segment.sentences:
                    known_segment = self._segment_by_sentence.get(sentence)
                    if known_segment is not None:
                        votes[known_segment.last_prompt_number] += len(sentence)
        return votes

    def remember(self, prompt: Prompt) -> None:
        """Add ``prompt`` and forget the oldest prompts beyond the limits."""
        for segment in prompt.segments:
            if segment.prompt_count == 0:
                self.text_bytes += segment.memory_bytes
                for sentence in segment.sentences:
                    self._segment_by_sentence[sentence] = segment
            segment.prompt_count += 1
            segment.last_prompt_number = prompt.number
        self._prompts[prompt.number] = prompt
        if prompt.conversation is not None:
            self._number_by_conversation[prompt.conversation] = prompt.number
        while len(self._prompts) > self.max_prompts or (
            self.text_bytes > self.max_text_bytes and len(self._prompts) > 1
        ):
            self._forget(self._prompts.popitem(last=False)[1])

    def _forget(self, prompt: Prompt) -> None:
        if self._number_by_conversation.get(str(prompt.conversation)) == prompt.number:
            del self._number_by_conversation[str(prompt.conversation)]
        for segment in prompt.segments:
            segment.prompt_count -= 1
            if segment.prompt_count == 0:
                self.text_bytes -= segment.memory_bytes
                self._segments.pop(PromptPart(segment.kind, segment.role, segment.text), None)
                for sentence in segment.sentences:
                    if self._segment_by_sentence.get(sentence) is segment:
                        del self._segment_by_sentence[sentence]


def _shared_characters(prompt: Prompt, earlier: Prompt) -> int:
    """Return the characters of ``prompt`` that ``earlier`` contains, by segment and sentence."""
    shared_characters = 0
    earlier_sentences: set[str] | None = None
    for segment in prompt.segments:
        if segment.number in earlier.segment_numbers:
            shared_characters += segment.characters
        elif segment.last_prompt_number < 0 and not segment.is_media:
            if earlier_sentences is None:
                earlier_sentences = set()
                for earlier_segment in earlier.segments:
                    if earlier_segment.number not in prompt.segment_numbers:
                        earlier_sentences.update(earlier_segment.sentences)
            shared_characters += sum(len(s) for s in segment.sentences if s in earlier_sentences)
    return shared_characters
