"""The policies' records of SGLang's objects: ``req.canopy.request`` and ``node.canopy``.

A request's record is equal on every tensor-parallel rank: the arrival stamp travels with the
request, and block hashes depend only on tokens and salts.
"""

from __future__ import annotations

import enum
import itertools
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import xxhash

from sglang_canopy.policy.base import Policy
from sglang_canopy.radix.counters import CAPACITY
from sglang_canopy.radix.tool_calls import calls_tool
from sglang_canopy.records import ABORT, Leaf, Request
from sglang_canopy.tenant import tenant_namespace, tenant_of_req
from sglang_canopy.ttl.table import RESIDUAL
from sglang_canopy.wire.request_state import state_of
from sglang_canopy.wire.stamp import PARAMS_ADDED, read_stamp

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


_ABORT_CLASS = "FINISH_ABORT"
UNSTAMPED_GAP_S = 0.001
"""Seconds between a request without a stamp and the previous request. This keeps the order, equal
on every rank, although no time passes."""


class RequestClock:
    """The largest arrival stamp so far, in seconds: the current time for eviction and the tiers. It
    advances only with requests, so that every rank reads the same time at the same request."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, time: float) -> float:
        """Advance to the stamp ``time``, never backwards. Returns the current time."""
        if time > self.now:  # faster than ``max``
            self.now = time
        return self.now


class RequestPhase(enum.Enum):
    """What has become of a request. A retracted one waits again, but stays admitted."""

    RECEIVED = enum.auto()
    """It has not been admitted; the session gate may hold it."""
    ADMITTED = enum.auto()
    """Chosen for a batch: policies learn only from admitted requests."""
    DONE = enum.auto()
    """Its answer has ended."""
    REFUSED = enum.auto()
    """It ended without admission."""


CauseAndTier = tuple[str, str]
TokensByCause = dict[CauseAndTier, int]


class RequestMisses:
    """Missed tokens of one request by cause, from its admission to its end; afterwards the latest fact of its blocks (``missed.py``)."""

    __slots__ = ("is_running", "tokens_by_cause", "tokens_by_scale", "written_tokens")

    def __init__(self) -> None:
        self.tokens_by_cause: TokensByCause = {}
        self.tokens_by_scale: dict[int, int] = {}
        """Evicted tokens by the smallest of ``missed.MEMORY_SCALES`` that would still hold them, as an index."""
        self.is_running = True
        self.written_tokens = 0
        """Number of tokens of its path that are in the tree."""

    def add(self, key: CauseAndTier, tokens: int) -> None:
        if tokens > 0:
            self.tokens_by_cause[key] = self.tokens_by_cause.get(key, 0) + tokens

    def end(self) -> None:
        """End the request. The object stays as the latest fact of its blocks."""
        self.is_running, self.tokens_by_cause, self.tokens_by_scale = False, {}, {}


@dataclass(slots=True, eq=False, repr=False)
class LiveRequest(Request):
    """A ``Request`` with a serial number, so that a node counts each request once."""

    number: int = field(default_factory=itertools.count().__next__)
    phase: RequestPhase = RequestPhase.RECEIVED
    is_health_probe: bool = False
    """Whether SGLang's health check sent it; policies ignore it."""
    path_hash: int = 0
    """Hash of the path so far, tenant included; the next block's hash is chained to it."""
    stop_hint: str | None = None
    tool_parser: str | None = None
    """SGLang's parser of its tool calls (``tool_calls.py``); ``None`` without tools."""
    epoch: float = 0.0
    """Seconds since 1970 when the requests' clock was 0."""
    ttl_s: float | None = None
    """TTL below the device that the request sets, in seconds."""
    linear: bool = False
    """Whether no two conversations have this name: it comes from a session's field or header."""
    sample_group: tuple[float, int] | None = None
    """Equal for the parallel samples (n > 1) of one prompt and their warm-up; else ``None``."""
    pending_samples: int = 0
    """Number of samples that follow this request, if it is their warm-up."""
    warm_up: LiveRequest | None = None
    """The warm-up, if this request is a sample of it."""
    seniority: int = -1
    """Number of its session at the session gate, for a sample its warm-up's: lower is older, -1 is none."""
    misses: RequestMisses | None = None
    """Causes of its misses, from its admission to its end."""


def make_live_request(req: Req, now: float, block_tokens: int) -> LiveRequest:
    """Return the policies' view of ``req``. ``now``: time of the previous request, in seconds, for a
    request without a stamp. ``block_tokens``: tokens per block of ``path``."""
    stamp = read_stamp(state_of(req).params)
    # Fields of other names here; the others have the same names.
    stamp.pop(PARAMS_ADDED, None)
    time, keep_s = stamp.pop("time", now + UNSTAMPED_GAP_S), stamp.pop("keep_s", None)
    stop_hint, sample_count = stamp.pop("stop", None), stamp.pop("samples", 0)
    alpha, beta = stamp.pop("alpha", None), stamp.pop("beta", None)
    prompt = req.origin_input_ids
    request = LiveRequest(
        time=time,
        tenant=tenant_of_req(req),
        stop_hint=stop_hint,
        keep_until=None if keep_s is None else time + keep_s,
        ttft_model=None if alpha is None or beta is None else (alpha, beta),
        block_tokens=block_tokens,
        prompt_tokens=len(prompt),
        path=[],
        path_hash=_initial_hash(req),
        **stamp,
    )
    extend_path(request, prompt)
    if sample_count:
        partial_block = array("q", prompt[len(request.path) * block_tokens :])
        request.sample_group = time, xxhash.xxh3_64_intdigest(partial_block, seed=request.path_hash)
        # TokenizerManager._handle_batch_request (tokenizer_manager.py) sends a prompt with n > 1
        # once, without output, and then n copies, which may have no limit yet.
        request.pending_samples = sample_count if req.sampling_params.max_new_tokens == 0 else 0
    return request


def is_refused(req: Req) -> bool:
    """Return whether SGLang ends ``req``, which was not admitted yet, with an error."""
    return type(req.to_finish or req.finished_reason).__name__ == _ABORT_CLASS


def complete_request(request: LiveRequest, req: Req) -> None:
    """Write the end of ``req`` into ``request``: output, cached tokens and stop reason. A server that
    only prefills (``--disaggregation-mode prefill``) has neither output nor stop reason: the client's
    fields are used, and the next turn supplies the rest."""
    request.phase = RequestPhase.DONE
    is_handed_over = _is_handed_to_decode(req)
    output = [] if is_handed_over else list(req.output_ids)
    request.output_tokens = len(output)
    request.cached_tokens = req.cached_tokens
    request.stop = request.stop_hint
    if request.stop is None and not is_handed_over:
        request.stop = _stop_reason(req, request)
    hashed_tokens = len(request.path) * request.block_tokens
    extend_path(request, [*req.origin_input_ids[hashed_tokens:], *output])


_PUBLIC_HASH = xxhash.xxh3_64_intdigest(tenant_namespace(None, None))


def _initial_hash(req: Req) -> int:
    """Return the hash of the tenant, to which the first block's hash is chained."""
    if not req.extra_key and not req.cache_salt:
        return _PUBLIC_HASH
    return xxhash.xxh3_64_intdigest(tenant_namespace(req.extra_key, req.cache_salt))


def extend_path(request: LiveRequest, tokens: Sequence[int]) -> None:
    """Append the chained hashes of the full blocks of ``tokens`` to ``request.path``."""
    block_bytes = 8 * request.block_tokens
    token_bytes = memoryview(_as_int64(tokens)).cast("B")
    path_hash = request.path_hash
    path = cast("list[int]", request.path)  # policies receive it as an immutable sequence
    whole_bytes = len(token_bytes) // block_bytes * block_bytes
    blocks = struct.iter_unpack(f"{block_bytes}s", token_bytes[:whole_bytes])
    digest = xxhash.xxh3_64_intdigest
    path += [path_hash := digest(block, path_hash) for (block,) in blocks]
    request.path_hash = path_hash


def _as_int64(tokens: Sequence[int]) -> array[int]:
    """Return ``tokens`` as 64-bit integers. SGLang's prompts are, and are not copied."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return tokens
    return array("q", tokens)


def _is_handed_to_decode(req: Req) -> bool:
    """Return whether SGLang handed ``req`` to a decode server. SGLang marks this by a finish length of
    0, although the first token is computed."""
    reason = req.finished_reason
    return (
        type(reason).__name__ == "FINISH_LENGTH"
        and getattr(reason, "length", None) == 0
        and len(req.output_ids) > 0
    )


def _stop_reason(req: Req, request: LiveRequest) -> str:
    reason_class = type(req.finished_reason).__name__
    if reason_class == "FINISH_LENGTH":
        return "length"
    if reason_class == _ABORT_CLASS:
        return ABORT
    return "tool" if calls_tool(req, request.tool_parser) else "end"


@dataclass(slots=True, eq=False, repr=False)
class NodeLeaf(Leaf):
    """The policy's view of one SGLang tree node, at ``node.canopy``."""

    node: UnifiedTreeNode = field(kw_only=True)
    is_on_host: bool = False
    """Whether the host copy is counted."""
    eviction_reason: int = CAPACITY
    """Reason of this node's eviction (``counters.REASONS``)."""
    policy: Policy | None = None
    """Policy of the tier that last ranked this node, to which ``rank_state`` belongs."""
    request_number: int = -1
    """Number of the last request counted in ``hits``."""
    ttl_s: float | None = None
    """TTL below the device requested by a request, in seconds; ``None``: the group's."""
    host_group: int = RESIDUAL
    """Group in the host tier's table."""
    is_on_disk: bool = False
    """Whether these pages were written to the disk tier, or read from it."""
    disk_round: int = 0
    """Round of ``disk_retry`` in which these pages were last written to disk or read."""
    disk_written_at: float = float("-inf")
    """The requests' clock at the last write to disk; ``-inf`` if unknown."""
    reported_at: float = float("-inf")
    """The requests' clock when a use was last reported to the disk tier."""

    path: Sequence[int] = ()
    """Block hashes of the last request that used it, shared with the request."""

    def inherit(self, other: Leaf) -> None:
        Leaf.inherit(self, other)
        if isinstance(other, NodeLeaf):
            self.ttl_s = other.ttl_s
            self.host_group = other.host_group
            self.is_on_disk, self.reported_at = other.is_on_disk, other.reported_at
            self.disk_round, self.disk_written_at = other.disk_round, other.disk_written_at

    def become_head(self, tail: NodeLeaf, tokens: int) -> None:
        """Initialise this new parent node, which holds the first ``tokens`` of ``tail``."""
        self.inherit(tail)
        self.request_number = tail.request_number
        self.is_on_host = tail.is_on_host
        self.policy, self.path = tail.policy, tail.path
        self.offset, self.length = tail.offset, tokens

    def set_ttl(self, request: LiveRequest) -> None:
        """Set the TTL of the request. A node shared with other conversations keeps the longest TTL. A
        request without a TTL restores the group's."""
        ttl_s = request.ttl_s
        if self.shared and ttl_s is not None:
            ttl_s = None if self.ttl_s is None else max(ttl_s, self.ttl_s)
        self.ttl_s = ttl_s

    def count_use_without_request(self, now: float) -> None:
        """Count a use without a request (a direct call of the cache's ``insert``)."""
        if self.hits == 0:
            self.created = now
        self.hits += 1
        self.last_access = now


def set_offsets(node: UnifiedTreeNode) -> None:
    """Set offset and length of ``node`` and of every ancestor without them."""
    if node.canopy.length == len(node.key):
        return
    unset_nodes = []
    while node.parent is not None and node.canopy.length != len(node.key):
        unset_nodes.append(node)
        node = node.parent
    offset = node.canopy.offset + node.canopy.length
    for unset_node in reversed(unset_nodes):
        unset_node.canopy.offset = offset
        unset_node.canopy.length = len(unset_node.key)
        offset += unset_node.canopy.length
