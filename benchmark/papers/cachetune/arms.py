"""Arms of the comparison: a selector, a ratio and the text after which chunks are encoded."""

from __future__ import annotations

from dataclasses import dataclass

from comparators import SELECTORS

from canopy_documents.fuse.selectors.base import Selector

RATIO = 0.15
RATIOS = (0.05, 0.15, 0.25)
ENCODINGS = ("bos", "alone")
"""A chunk behind the model's BOS, which is then dropped, as CacheBlend's script encodes; and behind
nothing."""


@dataclass(frozen=True)
class ReuseArm:
    """One way to reuse. ``ratio`` 0: nothing is recomputed."""

    selector: str
    ratio: float = RATIO
    encoding: str = "bos"

    @property
    def name(self) -> str:
        selector = "no recompute" if self.ratio == 0 else self.selector
        ratio_text = "" if self.ratio in (0, RATIO) else f" r={self.ratio:g}"
        return f"{selector}{ratio_text}, {self.encoding}"

    def make_selector(self) -> Selector:
        """Return the selector."""
        return SELECTORS[self.selector]()


SELECTOR_NAMES = (
    "frequency",
    "high-frequency",
    "random",
    "hkvd",
    "epic",
    "first-k",
    "prophetkv",
    "question",
)
"""The paper's selector, its controls (Figure 10), CacheBlend, EPIC with 16 tokens a chunk, as many
first tokens as the others have, ProphetKV, ours."""

QUALITY_ARMS = (
    *(ReuseArm("random", 0.0, encoding) for encoding in (*ENCODINGS, "prefix")),
    *(ReuseArm(name, encoding=encoding) for encoding in ENCODINGS for name in SELECTOR_NAMES),
    *(ReuseArm("frequency", r, encoding) for encoding in ENCODINGS for r in RATIOS if r != RATIO),
    ReuseArm("question", encoding="prefix"),
)
"""Figures 7, 9 and 10 behind BOS and behind nothing; an arm encoded behind the system text, this
project's default."""
