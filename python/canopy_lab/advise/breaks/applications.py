"""Distinguish applications, whose prompts have mostly the same tools and system prompt."""

from __future__ import annotations

from collections import Counter

from canopy_lab.advise.breaks.memory import Prompt

MIN_SHARED = 0.5
"""Minimum share of tools and system prompt that two prompts of one application have in common."""
MAX_SENTENCES = 200_000
MAX_HEADS = 50_000
_NAME_CHARACTERS = 60


class Applications:
    """Numbers applications in the order in which they appear."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """First words of each application's system prompt."""
        self._of_head: dict[tuple[int, ...], int] = {}
        self._of_sentence: dict[str, int] = {}

    def number(self, prompt: Prompt) -> int:
        """Return the number of the prompt's application."""
        head = [one for one in prompt.segments if one.role in ("tools", "system")]
        head = head or prompt.segments[:1]
        key = tuple(one.number for one in head)
        known = self._of_head.get(key)
        if known is not None:
            return known
        texts = [s for one in head for s in one.sentences or (one.text[:200],)]
        votes: Counter[int] = Counter()
        for text in texts:
            if text in self._of_sentence:
                votes[self._of_sentence[text]] += len(text)
        found, shared = votes.most_common(1)[0] if votes else (len(self.names), 0)
        if shared < MIN_SHARED * sum(map(len, texts)):
            found = len(self.names)
            named = next((one.text for one in head if one.role != "tools"), head[0].text)
            self.names.append(" ".join(named.removeprefix("<system>\n").split())[:_NAME_CHARACTERS])
        if len(self._of_sentence) < MAX_SENTENCES:
            for text in texts:
                self._of_sentence.setdefault(text, found)
        if len(self._of_head) < MAX_HEADS:
            self._of_head[key] = found
        return found
