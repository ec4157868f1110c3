"""Generate prompts and outputs, as token ids, from a trace's block ids.

A trace has the ids of blocks, not their contents. The token ids of a block depend only on its id,
so a server sees the sharing of the trace, and nothing is stored. Lengths are exact. The output of a
response is taken from the next turn of its conversation (ATC 2025 paper, section 4.3): with forced
outputs, a turn hits the output of the previous turn.

For a small model, lengths can be scaled down: a block of B tokens becomes a block of b tokens with
the same id, which keeps the sharing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MAX_BRANCHES = 8
"""Maximum requests of a conversation that a later request can continue (parallel branches)."""

BlockKey = tuple[int, int, int]
"""(0, block id, 0), or (1, request's ordinal, block index) for a block without an id."""


def usable_token_ids(tokenizer: Any) -> np.ndarray:
    """Return the token ids of a Hugging Face tokenizer that are plain text, sorted.

    Special and added tokens are excluded, as are ids whose text is not printable ASCII: a piece of a
    UTF-8 character decodes to nothing until the character is complete, so a streaming client would
    receive the first token late.
    """
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[i] for i in ids])
    usable = [
        i for i, t in zip(ids, texts, strict=True) if t.strip() and t.isascii() and t.isprintable()
    ]
    if len(usable) < 2:
        raise CanopyError(
            f"the tokenizer has {len(usable)} tokens of plain text, at least 2 are needed; "
            "give another with --tokenizer"
        )
    return np.array(usable, dtype=np.int64)


def middle_token_ids(vocab_size: int) -> np.ndarray:
    """Return token ids for a model without a tokenizer. Special tokens are at both ends."""
    if vocab_size < 16:
        raise CanopyError(f"the vocabulary must have 16 or more tokens, got {vocab_size}")
    edge = min(1000, vocab_size // 8)
    return np.arange(edge, vocab_size - edge, dtype=np.int64)


@dataclass(slots=True)
class PlannedJob:
    """One request ready to be sent. Token counts are scaled."""

    request: TraceRequest
    ordinal: int
    prompt_tokens: int
    output_tokens: int
    previous: int | None
    """Ordinal of the request that must be answered before this one is sent."""
    continues: int | None = None
    """Ordinal of the request whose prompt and output this prompt begins with."""


class Materialiser:
    """Converts a slice of a trace to prompts and outputs.

    ``requests``: in order of time; ``vocabulary``: the token ids to use; ``scale``: the factor on
    lengths, at most 1. The tokens of a block depend only on its id, ``seed`` and the vocabulary.
    Raises ``CanopyError``.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        vocabulary: np.ndarray,
        scale: Fraction | float = 1,
        seed: int = 0,
    ) -> None:
        self.scale = Fraction(scale).limit_denominator(1 << 20)
        if not 0 < self.scale <= 1:
            raise CanopyError(
                f"lengths can be scaled by a factor above 0 and at most 1, got {scale}"
            )
        self._vocabulary = np.asarray(vocabulary, dtype=np.int64)
        self._salt = _mix(seed)
        self._continued_key: dict[BlockKey, BlockKey] = {}
        self.planned = [self._plan(r, i) for i, r in enumerate(requests)]
        self._link_turns()

    def block_tokens(self, original: int) -> int:
        """Return the scaled size, at least 1, of a block of ``original`` tokens in the trace."""
        return max(1, round(original * self.scale))

    def length(self, tokens: int, block_tokens: int) -> int:
        """Return ``tokens`` of the trace, scaled. Non-decreasing, and exact if the scale is 1."""
        block = self.block_tokens(block_tokens)
        return tokens // block_tokens * block + -(-(tokens % block_tokens) * block // block_tokens)

    def prompt(self, planned: PlannedJob) -> list[int]:
        """Return the ``prompt_tokens`` token ids of a request's prompt."""
        return self._token_ids(planned, 0, planned.prompt_tokens)

    def output(self, planned: PlannedJob) -> list[int]:
        """Return the ``output_tokens`` token ids of the response.

        They equal the next turn of the conversation at that position, if it has one; the rest is
        unique to the request.
        """
        start_token = planned.prompt_tokens
        return self._token_ids(planned, start_token, start_token + planned.output_tokens)

    def _plan(self, request: TraceRequest, ordinal: int) -> PlannedJob:
        block_tokens = request.block_tokens
        prompt = max(1, self.length(request.input_tokens, block_tokens))
        total = self.length(request.input_tokens + request.output_tokens, block_tokens)
        return PlannedJob(request, ordinal, prompt, max(1, total - prompt), None)

    def _link_turns(self) -> None:
        """Link each request to the one it continues, whose output is then part of its prompt."""
        latest: dict[str, int] = {}
        branches: dict[str, deque[PlannedJob]] = defaultdict(lambda: deque(maxlen=_MAX_BRANCHES))
        for planned in self.planned:
            conversation = planned.request.conversation
            if conversation is None:
                continue
            planned.previous = latest.get(conversation)
            latest[conversation] = planned.ordinal
            candidates = branches[conversation]
            continued = [c for c in candidates if _is_continued_by(c.request, planned.request)]
            if continued:
                previous = max(continued, key=lambda c: (c.request.input_tokens, c.ordinal))
                candidates.remove(previous)
                planned.continues = previous.ordinal
                self._join_blocks(previous, planned)
            candidates.append(planned)

    def _join_blocks(self, previous: PlannedJob, planned: PlannedJob) -> None:
        size = previous.request.block_tokens
        first = min(previous.request.input_tokens // size, len(previous.request.blocks))
        end_tokens = min(
            previous.request.input_tokens + previous.request.output_tokens,
            planned.request.input_tokens,
        )
        for index in range(first, -(-end_tokens // size)):
            previous_key, planned_key = self._key(previous, index), self._key(planned, index)
            # If two requests end in the same id, its tokens are those of the first continuation.
            if previous_key != self._resolve_key(planned_key):
                self._continued_key.setdefault(previous_key, planned_key)

    def _key(self, planned: PlannedJob, index: int) -> BlockKey:
        blocks = planned.request.blocks
        return (0, blocks[index], 0) if index < len(blocks) else (1, planned.ordinal, index)

    def _resolve_key(self, key: BlockKey) -> BlockKey:
        while key in self._continued_key:
            key = self._continued_key[key]
        return key

    def _token_ids(self, planned: PlannedJob, start: int, stop: int) -> list[int]:
        size = self.block_tokens(planned.request.block_tokens)
        first, end = start // size, -(-stop // size)
        seeds = np.array(
            [self._seed(self._resolve_key(self._key(planned, i))) for i in range(first, end)],
            dtype=np.uint64,
        )
        offsets = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
        indices = _mix_array(seeds[:, None] + offsets[None, :]) % np.uint64(len(self._vocabulary))
        tokens = self._vocabulary[indices.reshape(-1).astype(np.int64)]
        return tokens[start - first * size : stop - first * size].tolist()

    def _seed(self, key: BlockKey) -> int:
        source, number, index = key
        return _mix(_mix(_mix(self._salt ^ number) ^ index) + source)


def _is_continued_by(earlier: TraceRequest, later: TraceRequest) -> bool:
    """Return whether ``later`` begins with all full blocks of ``earlier``, and is longer."""
    full_blocks = min(earlier.input_tokens // earlier.block_tokens, len(earlier.blocks))
    return (
        later.input_tokens > earlier.input_tokens
        and later.block_tokens == earlier.block_tokens
        and later.blocks[:full_blocks] == earlier.blocks[:full_blocks]
    )


def _mix(x: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele et al., OOPSLA 2014): 64 bits to 64 bits."""
    x &= _MASK_64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK_64
    return x ^ (x >> 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
