"""A trace prepared for many simulations, with the output of each request.

A trace names the blocks of prompts. What a response leaves in the cache is read off the next turn
of its conversation, as the replay does (ATC 2025 paper, section 4.3); where there is none, it is
blocks of its own that nobody asks for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.requests import to_requests
from canopy_lab.sim.system.stamps import spread_stamps
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request


class Workload:
    """The requests of a trace in order. Give it to ``simulate_system`` instead of the trace to
    prepare only once.

    ``outputs`` names the blocks from a prompt's last partial one on, where they are known (by
    ordinal); for other requests they are read off the next turn. Requests that share a stamp are
    spread over its interval (``stamps.py``), from ``seed``, unless ``keep_stamps``.

    Raises ``CanopyError`` for an empty trace, one whose times run backwards, or mixed block sizes.
    """

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        outputs: Mapping[int, tuple[int, ...]] | None = None,
        *,
        keep_stamps: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(trace, Sequence):
            trace = CompactTrace(trace)
        self.trace: Sequence[TraceRequest] = trace
        self.times = array("d")
        self.block_tokens = 0
        self.longest_tokens = 0
        noted = [record.time_s for record in trace]
        given = noted if keep_stamps else spread_stamps(noted, seed)
        self.stamped = given != noted
        """Whether requests of one stamp were spread over its interval."""
        for request in to_requests(trace, times=given):
            if not self.times:
                self.block_tokens = request.block_tokens
            elif request.block_tokens != self.block_tokens:
                raise CanopyError(
                    f"request {len(self.times) + 1} has blocks of {request.block_tokens} tokens, "
                    f"the ones before of {self.block_tokens}; simulate traces of one block size"
                )
            self.times.append(request.time)
            self.longest_tokens = max(
                self.longest_tokens, request.prompt_tokens + request.output_tokens
            )
        if not self.times:
            raise CanopyError("the trace has no requests; give one that has")
        self.outputs = outputs
        self._after: dict[int, tuple[int, ...]] = dict(outputs or {})
        """What the output's blocks are called, for requests that a later one continues."""
        self.next_turn = array("q", [-1]) * len(self.times)
        self._connect()

    def __len__(self) -> int:
        return len(self.times)

    def request(self, index: int) -> tuple[Request, tuple[int, ...], int, int, int]:
        """``(request, path, prompt tokens, output tokens, tokens cached at its end)``.

        ``path`` covers prompt and output; its last block may be partial. A response of which the
        trace says nothing is one token.
        """
        record = self.trace[index]
        prompt = max(record.input_tokens, 1)
        output = max(record.output_tokens, 1)
        size = self.block_tokens
        # The last generated token has no KV yet.
        end = prompt + output - 1
        full = prompt // size
        after = self._after.get(index)
        # A trace may name fewer blocks than the prompt fills, or none.
        blocks = record.blocks[: -(-prompt // size)]
        if after is not None:
            path = blocks[:full] + after
            end = min(end, len(path) * size)
        else:
            more = -(-end // size) - len(blocks)
            own = -1 - (index << 20)
            path = blocks + tuple(range(own, own - more, -1)) if more > 0 else blocks
        request = Request(
            time=self.times[index],
            category=record.category,
            path=record.blocks,
            block_tokens=size,
            prompt_tokens=prompt,
            output_tokens=output,
            turn=record.turn,
            conversation=record.conversation,
            stop=record.stop,
            tenant=record.user,
        )
        return request, path, prompt, output, end

    def _connect(self) -> None:
        size = self.block_tokens
        later: dict[str, tuple[int, TraceRequest]] = {}
        for index in range(len(self.times) - 1, -1, -1):
            record = self.trace[index]
            if record.conversation is None:
                continue
            next_turn = later.get(record.conversation)
            later[record.conversation] = index, record
            if next_turn is None:
                continue
            at, following = next_turn
            self.next_turn[index] = at
            if index in self._after:
                continue
            full = record.input_tokens // size
            end = -(-(record.input_tokens + record.output_tokens - 1) // size)
            if (
                following.input_tokens >= record.input_tokens
                and len(following.blocks) > full
                and following.blocks[:full] == record.blocks[:full]
            ):
                self._after[index] = following.blocks[full:end]
