"""Find the breaks of a log in its first ``MAX_PROMPTS`` prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from canopy_lab.advise.breaks.finder import Breaks, Finder
from canopy_lab.advise.breaks.memory import MAX_BYTES, MAX_PROMPTS
from canopy_lab.trace.lines import Tolerance
from canopy_lab.trace.open import open_texts

NO_TEXT = "the log holds ids of blocks, not prompts"
NEEDS_TOKENIZER = "the log holds token ids; give --tokenizer PATH, the model's tokenizer.json"


def read_breaks(
    path: Path,
    format: str,
    *,
    tokenizer: str | None = None,
    skip_bad: int = 0,
    max_prompts: int = MAX_PROMPTS,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[int], object] = lambda n: None,
) -> Breaks:
    """Read the first ``max_prompts`` prompts of a log. Raises ``CanopyError`` as readers do."""
    prompts = open_texts(path, format, Tolerance(path, skip_bad), tokenizer)
    if prompts is None:
        return _unread_breaks(NO_TEXT)
    finder, token_prompts = Finder(max_prompts, max_bytes), 0
    for number, prompt in enumerate(prompts):
        progress(1)
        if number >= max_prompts:
            return replace(finder.breaks(), is_whole=False)
        token_prompts += prompt.token_ids is not None
        finder.add(prompt)
    if not finder.requests and token_prompts:
        return _unread_breaks(NEEDS_TOKENIZER)
    return finder.breaks()


def _unread_breaks(why: str) -> Breaks:
    return Breaks(0, 0, 0, 0, (), not_read=why)
