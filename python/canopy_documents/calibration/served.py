"""Calibration through a running server, with its own scheduler, kernels, tiers and overlap.

CacheTune, Algorithm 1 with equations 9 to 13. Each probe is an ordinary request. The cost of a
request without its documents (t_o) is fitted from prompts of two lengths, so that it does not count
as transfer. Tokens are random, since times do not depend on them.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canopy_documents.calibration.saved import TIER_NAMES, Calibration
from canopy_documents.calibration.search import CostProfile, RatioSearchResult, golden_section
from sglang_canopy.errors import CanopyError

SYSTEM_TOKENS, QUESTION_TOKENS = 16, 24
"""Number of tokens before the documents, and after them."""

SendPrompt = Callable[[Sequence[int], Sequence[int], "float | None"], tuple[float, dict[str, Any]]]
"""``(prompt, bounds, ratio)`` -> seconds to the first token, and the answer's ``canopy_documents``
report. With ratio None the server chooses."""


@dataclass
class ServedPrompts:
    """Prompts of ``documents`` documents of ``document_tokens`` each; ``learn`` makes the server encode
    them.

    vocabulary: range of token ids to draw from; wait_encoded: waits until the server has
    encoded the documents.
    """

    send_prompt: SendPrompt
    wait_encoded: Callable[[], None]
    vocabulary: tuple[int, int]
    prompts: int = 6
    documents: int = 6
    document_tokens: int = 160
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._system = self._tokens(SYSTEM_TOKENS)
        self._documents = [
            [self._tokens(self.document_tokens) for _ in range(self.documents)]
            for _ in range(self.prompts)
        ]
        self.tiers: Counter[str] = Counter()

    def learn(self) -> None:
        """Send every document once, in another order than later: an exact prefix is no reuse."""
        for documents in self._documents:
            self._send(documents[::-1], None, must_fuse=False)
        self.wait_encoded()

    def measure_ttft_s(self, ratio: float, share: float = 1.0) -> float:
        """Return equation 12: the mean over prompts of the median time to the first token, in
        seconds.

        share: share of each prompt's documents to send.
        """
        count = max(1, round(share * self.documents))
        return statistics.fmean(
            statistics.median(self._send(documents[:count], ratio) for _ in range(self.repeats))
            for documents in self._documents
        )

    def profile(self) -> CostProfile:
        """Fit t_c, t_i and t_o of equation 10, by least squares.

        Uses whole and half prompts at ratios 0 (all transfer) and 1 (all computed).
        """
        half = max(1, round(self.documents / 2))
        cost_factors, times_s = [], []
        for count in sorted({half, self.documents}):
            tokens = count * self.document_tokens
            for ratio in (0.0, 1.0):
                cost_factors.append((tokens * ratio, tokens * (1 - ratio), 1.0))
                times_s.append(self.measure_ttft_s(ratio, count / self.documents))
        fitted = np.linalg.lstsq(np.array(cost_factors), np.array(times_s), rcond=None)[0]
        return CostProfile(*(max(0.0, float(cost_s)) for cost_s in fitted))

    @property
    def tier(self) -> str:
        """The tier that supplied most of the reused KV. Raises CanopyError if no KV was reused."""
        if not self.tiers.total():
            raise CanopyError(
                "the server reused nothing: its tiers are too small for the prompts, or still empty; enlarge them, or wait for the encoding"
            )
        return self.tiers.most_common(1)[0][0]

    def _send(
        self, documents: list[list[int]], ratio: float | None, must_fuse: bool = True
    ) -> float:
        ids, bounds = list(self._system), []
        for document in documents:
            bounds += [len(ids), len(ids) + len(document)]
            ids += document
        seconds, report = self.send_prompt(ids + self._tokens(QUESTION_TOKENS), bounds, ratio)
        if must_fuse and not report.get("fused"):
            raise CanopyError(
                f"a prompt of the calibration was not fused: {report.get('why', report)}; give the "
                "server memory for its documents, and send it no other requests meanwhile"
            )
        for name, tier in TIER_NAMES.items():
            self.tiers[tier] += report.get(f"reused_{name}", 0)
        return seconds

    def _tokens(self, count: int) -> list[int]:
        low, high = self.vocabulary
        return [self._random.randrange(low, high) for _ in range(count)]


def calibrate_server(
    prompts: ServedPrompts, r_min: float, r_max: float = 1.0, ratio_tolerance: float = 0.05
) -> tuple[Calibration, RatioSearchResult]:
    """Run Algorithm 1 on a server that has the prompts' documents."""
    profile = prompts.profile()
    start = profile.prior_ratio(r_min, r_max) if profile.compute_s > 0 else r_min
    search = golden_section(prompts.measure_ttft_s, start, r_min, r_max, ratio_tolerance)
    return Calibration(search.ratio, r_min, profile), search
