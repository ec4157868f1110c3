"""Convert SGLang's ``Req`` to the policy's ``Request``.

The result is equal on every tensor-parallel rank: the arrival stamp travels with the request, and
block hashes depend only on tokens and salts.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import xxhash

from sglang_canopy.records import ABORT, CLIENT, Request
from sglang_canopy.tenant import namespace_of, tenant_of_req
from sglang_canopy.wire.params import own_params
from sglang_canopy.wire.stamp import read_marker, read_stamp

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.block_facts import Misses

_ABORTED = "FINISH_ABORT"
UNSTAMPED_S = 0.001
"""Seconds between a request without a stamp and the one before.

It keeps the order, equal on every rank, although no time passes.
"""


class RequestClock:
    """The largest arrival stamp so far, in seconds: the present time for eviction and the tiers.

    It advances only with requests, so that every rank reads the same time at the same request.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, time: float) -> float:
        """Advance to the stamp ``time``, never back. Returns the present time."""
        if time > self.now:  # faster than ``max``
            self.now = time
        return self.now


@dataclass(slots=True, eq=False, repr=False)
class LiveRequest(Request):
    """A ``Request`` with a serial number, so that a node counts each request once."""

    number: int = field(default_factory=itertools.count().__next__)
    done: bool = False
    hash: int = 0
    """Hash of the path so far, tenant included; the next block's hash is chained to it."""
    stop_hint: str | None = None
    tool_marker: list[int] = field(default_factory=list)
    epoch: float = 0.0
    """Seconds since 1970 when the requests' clock was 0."""
    ttl_s: float | None = None
    """TTL below the device that the request sets, in seconds."""
    pin_s: float | None = None
    """Time to pin the request's path on disk, in seconds."""
    parent: str | None = None
    """The conversation that waits for this one, of the same tenant."""
    linear: bool = False
    """Whether one conversation has this name: each request extends or abandons the previous one."""
    left: UnifiedTreeNode | None = None
    """End of the conversation before this request."""
    admitted: bool = False
    """Whether it was chosen for a batch: policies learn only from admitted requests."""
    refused: bool = False
    """Whether it ended without admission."""
    refusal: str | None = None
    """Answer that refuses it by its predicted TTFT, and its samples."""
    group: tuple[float, int] | None = None
    """Equal for the parallel samples (n > 1) of one prompt and their warm-up; else ``None``."""
    samples: int = 0
    """Samples that follow this request, if it is their warm-up."""
    first: LiveRequest | None = None
    """The warm-up, if this request is a sample of it."""
    session: Any = None
    """The session gate's session."""
    misses: Misses | None = None
    """Causes of its misses, from its admission to its end."""


def live_request(req: Req, now: float, block_tokens: int) -> LiveRequest:
    """Return the policies' view of ``req``.

    ``now``: time of the request before, in seconds, for a request without a stamp.
    ``block_tokens``: tokens per block of ``path``.
    """
    params = own_params(req)
    stamp = read_stamp(params)
    time, keep_s = stamp.get("time", now + UNSTAMPED_S), stamp.get("keep_s")
    request = LiveRequest(
        time=time,
        tenant=tenant_of_req(req),
        category=stamp.get("category", "default"),
        turn=stamp.get("turn", 1),
        conversation=stamp.get("conversation"),
        linear=stamp.get("linear", False),
        parent=stamp.get("parent"),
        stop_hint=stamp.get("stop"),
        tool_marker=read_marker(params) if stamp else [],
        source=stamp.get("source", CLIENT),
        over=stamp.get("over", False),
        return_in_s=stamp.get("return_in_s"),
        keep_until=None if keep_s is None else time + keep_s,
        ttl_s=stamp.get("ttl_s"),
        pin_s=stamp.get("pin_s"),
        slo_ms=stamp.get("slo_ms"),
        epoch=stamp.get("epoch", 0.0),
        block_tokens=block_tokens,
        prompt_tokens=len(req.origin_input_ids),
        path=[],
        hash=xxhash.xxh3_64_intdigest(namespace_of(req.extra_key, req.cache_salt)),
    )
    if "alpha" in stamp and "beta" in stamp:
        request.ttft_model = (stamp["alpha"], stamp["beta"])
    extend_path(request, req.origin_input_ids)
    samples = stamp.get("samples", 0)
    if samples:
        covered = len(request.path) * block_tokens
        rest = array("q", req.origin_input_ids[covered:])
        request.group = time, xxhash.xxh3_64_intdigest(rest, seed=request.hash)
        # SGLang computes a prompt with n > 1 once, without output, and then sends n copies.
        request.samples = 0 if req.sampling_params.max_new_tokens else samples
    return request


def is_refused(req: Req) -> bool:
    """Return whether SGLang ends ``req``, which was not admitted yet, with an error."""
    return type(req.to_finish or req.finished_reason).__name__ == _ABORTED


def complete(request: LiveRequest, req: Req) -> None:
    """Write the end of ``req`` into ``request``: output, cached tokens and stop reason.

    A server that only prefills (``--disaggregation-mode prefill``) has neither output nor stop
    reason: the client's fields are used, and the next turn supplies the rest.
    """
    request.done = True
    handed_over = _handed_to_decode(req)
    output = [] if handed_over else list(req.output_ids)
    request.output_tokens = len(output)
    request.cached_tokens = req.cached_tokens
    request.stop = request.stop_hint
    if request.stop is None and not handed_over:
        request.stop = _stop_reason(req, request, output)
    covered = len(request.path) * request.block_tokens
    extend_path(request, [*req.origin_input_ids[covered:], *output])


def extend_path(request: LiveRequest, tokens: Sequence[int]) -> None:
    """Append the chained hashes of the full blocks of ``tokens`` to ``request.path``."""
    data = memoryview(array("q", tokens)).cast("B")
    width = 8 * request.block_tokens
    chain, path = request.hash, cast("list[int]", request.path)  # as the policies see it
    for start in range(0, len(data) - width + 1, width):
        chain = xxhash.xxh3_64_intdigest(data[start : start + width], seed=chain)
        path.append(chain)
    request.hash = chain


def _handed_to_decode(req: Req) -> bool:
    """Return whether SGLang handed ``req`` to a decode server.

    SGLang marks this by a finish length of 0, although the first token is computed.
    """
    reason = req.finished_reason
    return (
        type(reason).__name__ == "FINISH_LENGTH"
        and getattr(reason, "length", None) == 0
        and len(req.output_ids) > 0
    )


def _stop_reason(req: Req, request: LiveRequest, output: list[int]) -> str:
    kind = type(req.finished_reason).__name__
    if kind == "FINISH_LENGTH":
        return "length"
    if kind == _ABORTED:
        return ABORT
    marker = request.tool_marker
    return "tool" if marker and _contains(output, marker) else "end"


def _contains(tokens: list[int], marker: list[int]) -> bool:
    n = len(marker)
    return any(
        tokens[i] == marker[0] and tokens[i : i + n] == marker for i in range(len(tokens) - n + 1)
    )
