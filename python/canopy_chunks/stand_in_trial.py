"""The trial of a tenant's own stand-ins: what reuse loses behind them and behind the neutral ones.

A prompt that was served is computed again in full, and fused twice with chunks made for the purpose:
behind the neutral stand-ins and behind the tenant's own. The KL of the first tokens of full
recomputation's own answer is compared (:mod:`.stand_ins` decides by it). That is done while the server
is idle, in pieces: some tokens of a plain prefill, or one layer of a fused one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from canopy_chunks import engine
from canopy_chunks.background_encoder import PIECE_TOKENS
from canopy_chunks.cache import KVCache, dense_cache
from canopy_chunks.chunk import Chunk, FusedPrompt, Placed
from canopy_chunks.device_copy import to_device
from canopy_chunks.documents import document_name
from canopy_chunks.encode import capture
from canopy_chunks.fusion import Fused, fused_steps
from canopy_chunks.model import Model
from canopy_chunks.quality import divergence, forced_logprobs
from canopy_chunks.selectors import Offline, make_selector
from canopy_chunks.stand_ins import OwnDocuments, Prompt, StandIns
from canopy_chunks.variants import Tokens, acceptable_prefixes

logger = logging.getLogger(__name__)

ANSWER_TOKENS = 8
"""First tokens of the answer along which the KL is measured."""

Work = Generator[int, None, tuple[float, float]]
"""Yields the tokens computed since it last did; returns the KL behind the neutral stand-ins and
behind the tenant's own."""


@dataclass(frozen=True, slots=True)
class Method:
    """How this server reuses chunks: what they are encoded behind, the neutral stand-ins, whether
    reused KV is corrected."""

    encoding: str
    stand_in: Tokens
    correct: bool


class Trials:
    """Measures the prompts that wait in ``stand_ins``, one after the other.

    agreed: gives every rank of a split model the first one's figures.
    """

    def __init__(
        self,
        model: Model,
        stand_ins: StandIns,
        method: Method,
        agreed: Callable[[tuple[float, float]], tuple[float, float]] = lambda mine: mine,
    ) -> None:
        self.model, self.stand_ins, self.method, self.agreed = model, stand_ins, method, agreed
        self.computed_tokens = 0
        self._job: tuple[Prompt, OwnDocuments, Work] | None = None

    @property
    def busy(self) -> bool:
        """Whether a prompt is measured or waits to be."""
        return self._job is not None or self.stand_ins.waiting()

    def step(self) -> bool:
        """One piece; False where a prompt could not be measured, which is left out."""
        try:
            self._step()
        except Exception:
            logger.exception("canopy: a prompt could not be measured; it is left out")
            self.abandon()
            return False
        return True

    def _step(self) -> None:
        if self._job is None:
            found = self.stand_ins.take()
            if found is None:
                return
            self._job = (*found, self._work(*found))
        prompt, own, work = self._job
        try:
            self.computed_tokens += next(work)
        except StopIteration as done:
            self._job = None
            kl = done.value if self.model.ranks is None else self.agreed(done.value)
            self.stand_ins.measured(prompt, own, *kl)

    def abandon(self) -> None:
        """Give up the prompt that is being measured."""
        if self._job is not None:
            self._job[2].close()
            self._job = None

    def forget(self, tenant: str | None) -> None:
        """Give up the prompt that is being measured if it is this tenant's."""
        if self._job is not None and self._job[0].tenant == tenant:
            self.abandon()

    def _work(self, prompt: Prompt, own: OwnDocuments) -> Work:
        true, tokens = yield from _answer(self.model, prompt.ids)
        found = []
        for tokens_behind in (self.method.stand_in, own.tokens):
            chunks = yield from _encoded(self.model, prompt, own, self.method, tokens_behind)
            found.append((yield from self._kl(prompt, chunks, true, tokens)))
            del chunks
        return found[0], found[1]

    def _kl(
        self, prompt: Prompt, chunks: list[Placed], true: torch.Tensor, tokens: list[int]
    ) -> Generator[int, None, float]:
        ids, selector = torch.tensor(prompt.ids, dtype=torch.long), make_selector(prompt.selector)
        if isinstance(selector, Offline):
            for placed in chunks:
                selector.scores(placed.chunk)
        n = len(prompt.ids)
        cache = dense_cache(self.model, n + ANSWER_TOKENS)
        whole = FusedPrompt(to_device(ids, self.model.device), tuple(chunks))
        steps = fused_steps(
            self.model, whole, cache.upto(n), selector, prompt.ratio, self.method.correct
        )
        fused = yield from _counting_no_tokens(steps)
        yield len(fused.rows)
        return divergence(true, forced_logprobs(self.model, cache, fused.logits, tokens, n))


def _counting_no_tokens(steps: Generator[None, None, Fused]) -> Generator[int, None, Fused]:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        yield 0


def _answer(model: Model, ids: Tokens) -> Generator[int, None, tuple[torch.Tensor, list[int]]]:
    """Full recomputation: log-probabilities ``[ANSWER_TOKENS, vocab]`` and its greedy tokens."""
    cache = dense_cache(model, len(ids) + ANSWER_TOKENS)
    hidden = yield from _prefill(model, ids, cache, 0)
    rows, tokens = [], []
    for at in range(len(ids), len(ids) + ANSWER_TOKENS):
        row = engine.logits(model, hidden[-1:])[0]
        rows.append(row)
        tokens.append(int(row.argmax()))
        if len(rows) < ANSWER_TOKENS:
            hidden = yield from _prefill(model, (*ids, *tokens), cache, at)
    return torch.stack(rows).log_softmax(-1), tokens


def _encoded(
    model: Model, prompt: Prompt, own: OwnDocuments, method: Method, stand_in: Tokens
) -> Generator[int, None, list[Placed]]:
    """A prompt's documents encoded behind ``stand_in``, as the server would. What stands in does not
    for itself."""
    placed, whole = [], prompt.head_is_encoded
    head = prompt.ids[: prompt.head] if whole else ()
    known: dict[Tokens, KVCache] = {}
    for a, b in prompt.bounds:
        ids = prompt.ids[a:b]
        itself = document_name(ids, prompt.tenant) in own.names
        before = method.stand_in if itself else stand_in
        behind = acceptable_prefixes(method.encoding, a == prompt.head, head, before, whole)[0]
        if behind not in known:
            known[behind] = dense_cache(model, len(behind))
            yield from _prefill(model, behind, known[behind], 0)
        cache = dense_cache(model, len(behind) + len(ids))
        for mine, theirs in zip(cache.k + cache.v, known[behind].k + known[behind].v):
            mine[: len(behind)] = theirs
        yield from _prefill(model, (*behind, *ids), cache, len(behind))
        chunk: Chunk = capture(model, cache, ids, len(behind), behind)
        placed.append(Placed(chunk, a))
    return placed


def _prefill(
    model: Model, ids: Tokens, cache: KVCache, start: int
) -> Generator[int, None, torch.Tensor]:
    """Prefill of ``ids`` from position ``start`` in pieces; the last piece's hidden states."""
    hidden = torch.empty(0)
    for at in range(start, len(ids), PIECE_TOKENS):
        piece = torch.tensor(ids[at : at + PIECE_TOKENS], dtype=torch.long)
        hidden = engine.prefill(model, to_device(piece, model.device), cache, at)
        yield len(piece)
    return hidden
