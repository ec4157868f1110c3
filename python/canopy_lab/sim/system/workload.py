"""A trace prepared for repeated simulation, with the blocks of each request's output.

A trace names only the blocks of prompts. Output blocks are taken from the next turn of the
conversation, as in the replay (ATC 2025 paper, section 4.3); without a next turn they are unique.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request

ROUNDED_SHARE = 0.5
"""Times count as rounded if more than this share of the requests has a non-unique time."""


def spread_rounded(times_s: Sequence[float], seed: int = 0) -> list[float]:
    """Return ``times_s`` with requests of equal time spread over the rounding interval.

    Rounded times (Mooncake: 3 s) would otherwise cause bursts that did not exist. If more than half
    of the requests share their time with another request, equal times are redrawn uniformly up to
    the next time, at most the median gap, in the same order. Other traces are unchanged.
    Deterministic in ``seed``.
    """
    groups: list[list[int]] = []
    for index, time_s in enumerate(times_s):
        if groups and times_s[groups[-1][0]] == time_s:
            groups[-1].append(index)
        else:
            groups.append([index])
    shared_count = sum(len(group) for group in groups if len(group) > 1)
    if shared_count <= ROUNDED_SHARE * len(times_s) or len(groups) < 2:
        return list(times_s)
    distinct_times_s = [times_s[group[0]] for group in groups]
    gaps_s = [later - earlier for earlier, later in pairwise(distinct_times_s)]
    median_gap_s, rng, spread_s = median(gaps_s), random.Random(seed), list(times_s)
    for group, gap_s in zip(groups, [*gaps_s, median_gap_s], strict=True):
        offsets = sorted(rng.random() for _ in group)
        for index, offset in zip(group, offsets, strict=True):
            spread_s[index] = times_s[index] + offset * min(gap_s, median_gap_s)
    return spread_s


class Workload:
    """The requests of a trace in order; pass it to ``simulate_system`` to prepare a trace once.

    ``outputs``: known blocks from a prompt's last partial block on, by request index; other requests
    take them from the next turn. Rounded times are spread (by ``seed``) unless
    ``logged_times`` is set.

    Raises ``CanopyError`` for an empty or unsorted trace, or mixed block sizes.
    """

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        outputs: Mapping[int, tuple[int, ...]] | None = None,
        *,
        logged_times: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(trace, Sequence):
            trace = CompactTrace(trace)
        self.trace: Sequence[TraceRequest] = trace
        self.seed = seed
        self.times_s = array("d")
        self.block_tokens = 0
        self.longest_request_tokens = 0
        record_times = [record.time_s for record in trace]
        times_s = record_times if logged_times else spread_rounded(record_times, seed)
        self.times_were_spread = times_s != record_times
        """True if rounded times were spread."""
        for request in to_requests(trace, times_s=times_s):
            if not self.times_s:
                self.block_tokens = request.block_tokens
            elif request.block_tokens != self.block_tokens:
                raise CanopyError(
                    f"request {len(self.times_s) + 1} has blocks of {request.block_tokens} tokens, "
                    f"the ones before of {self.block_tokens}; simulate traces of one block size"
                )
            self.times_s.append(request.time)
            self.longest_request_tokens = max(
                self.longest_request_tokens, request.prompt_tokens + request.output_tokens
            )
        if not self.times_s:
            raise CanopyError("the trace has no requests; give a trace with requests")
        self.outputs = outputs
        self._output_blocks: dict[int, tuple[int, ...]] = dict(outputs or {})
        """Output blocks of requests that a later request continues."""
        self.next_turn = array("q", [-1]) * len(self.times_s)
        self._link_turns()

    def __len__(self) -> int:
        return len(self.times_s)

    def request(self, index: int) -> tuple[Request, tuple[int, ...], int, int, int]:
        """Return (request, path, prompt tokens, output tokens, tokens cached at its end).

        ``path`` covers prompt and output; its last block may be partial. An unknown output is one
        token.
        """
        record = self.trace[index]
        prompt_tokens = max(record.input_tokens, 1)
        output_tokens = max(record.output_tokens, 1)
        block_tokens = self.block_tokens
        # The last generated token has no KV yet.
        end_tokens = prompt_tokens + output_tokens - 1
        full_blocks = prompt_tokens // block_tokens
        output_blocks = self._output_blocks.get(index)
        # A trace may name fewer blocks than the prompt has.
        blocks = record.blocks[: -(-prompt_tokens // block_tokens)]
        if output_blocks is not None:
            path = blocks[:full_blocks] + output_blocks
            end_tokens = min(end_tokens, len(path) * block_tokens)
        else:
            missing = -(-end_tokens // block_tokens) - len(blocks)
            first_id = -1 - (index << 20)
            path = blocks + tuple(range(first_id, first_id - missing, -1))
        request = Request(
            time=self.times_s[index],
            category=record.category,
            path=record.blocks,
            block_tokens=block_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            turn=record.turn,
            conversation=record.conversation,
            stop=record.stop,
            tenant=record.user,
        )
        return request, path, prompt_tokens, output_tokens, end_tokens

    def _link_turns(self) -> None:
        block_tokens = self.block_tokens
        next_turns: dict[str, tuple[int, TraceRequest]] = {}
        for index in range(len(self.times_s) - 1, -1, -1):
            record = self.trace[index]
            if record.conversation is None:
                continue
            next_turn = next_turns.get(record.conversation)
            next_turns[record.conversation] = index, record
            if next_turn is None:
                continue
            next_index, following = next_turn
            self.next_turn[index] = next_index
            if index in self._output_blocks:
                continue
            full_blocks = record.input_tokens // block_tokens
            end_block = -(-(record.input_tokens + record.output_tokens - 1) // block_tokens)
            if (
                following.input_tokens >= record.input_tokens
                and len(following.blocks) > full_blocks
                and following.blocks[:full_blocks] == record.blocks[:full_blocks]
            ):
                self._output_blocks[index] = following.blocks[full_blocks:end_block]
