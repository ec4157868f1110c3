"""The requests of a tree: receives them, announces them to the policies on admission, and marks
their nodes as used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_canopy.radix.conversations import Conversations
from sglang_canopy.radix.counters import INVALID
from sglang_canopy.radix.live_request import (
    LiveRequest,
    RequestClock,
    RequestPhase,
    complete_request,
    is_refused,
    make_live_request,
    set_offsets,
)
from sglang_canopy.radix.parallel_samples import ParallelSamples
from sglang_canopy.radix.tree import Tree
from sglang_canopy.records import ABORT
from sglang_canopy.wire.request_state import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class TreeRequests:
    """Handles a tree's requests. Call it between tree operations, in the scheduler's order."""

    def __init__(self, tree: Tree, conversations: Conversations) -> None:
        self.tree, self.live = tree, tree.live
        self.conversations = conversations
        self.samples = ParallelSamples()
        self._admission_clock = RequestClock()

    def register(self, req: Req) -> LiveRequest:
        """Return the policies' record of ``req``; created on first use. Policies receive it on
        admission: a request that is refused, or aborted while it waits, and then sent again, does not
        count as a return. Health probes are ignored."""
        request_state = state_of(req)
        request: LiveRequest | None = request_state.request
        if request is None:
            request = make_live_request(req, self.tree.clock.now, self.live.settings.block_tokens)
            request_state.request = request
            request.is_health_probe = str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)
            if not request.is_health_probe:
                self._receive(request)
        return request

    def admit(self, req: Req) -> LiveRequest | None:
        """Admit ``req``, which is about to be computed. Returns its record, ``None`` if refused. SGLang
        computes one token of a refused request, to answer it. Further calls have no effect."""
        request = self.register(req)
        if request.phase is RequestPhase.RECEIVED and not request.is_health_probe:
            if is_refused(req):
                self.refuse(request, INVALID)
            else:
                self._announce(request)
                if request.warm_up is None:
                    self._classify_misses(request, req)
        return None if request.phase is RequestPhase.REFUSED else request

    def _classify_misses(self, request: LiveRequest, req: Req) -> None:
        """Record the causes of the misses of ``req``, which is about to be computed."""
        host_tokens = getattr(req, "host_hit_length", 0)
        loaded_tokens = getattr(req, "host_loaded_length", 0)
        self.tree.missed.classify(
            request,
            min(getattr(req, "prefix_len", 0), request.prompt_tokens),
            max(0, host_tokens - loaded_tokens),
        )

    def refuse(self, request: LiveRequest, reason: int) -> None:
        """Record that ``request`` ended for a reason of ``REFUSALS``; ignored after admission."""
        if request.phase is not RequestPhase.RECEIVED or request.is_health_probe:
            return
        request.phase = RequestPhase.REFUSED
        if request.warm_up is None:
            self.live.counters.refusal_counts[reason] += 1

    def record_abort(self, request: LiveRequest) -> None:
        """Record that an admitted ``request`` was aborted between two chunks of its prompt, or while it
        waited again: SGLang inserts nothing more of it. Ignored in any other state."""
        if request.phase is not RequestPhase.ADMITTED:
            return
        request.phase, request.stop = RequestPhase.DONE, ABORT
        if request.misses is not None:
            request.misses.end()
            request.misses = None
        if not request.pending_samples:
            self.finish(request)

    def report_end(self, req: Req) -> None:
        """Report the end of ``req`` to the policies, once."""
        request = self.admit(req)
        if request is None or request.phase is RequestPhase.DONE or request.is_health_probe:
            return
        complete_request(request, req)
        if not request.pending_samples:  # the samples of a warm-up determine how the request ended
            self.finish(request)
        meter = self.live.meter
        if request.warm_up is not None:
            if meter is not None:
                meter.record_parallel_output(request)
            return
        hit_tokens = (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
        label, tokens = request.label or request.category, request.prompt_tokens
        self.live.counters.record_request(label, tokens, hit_tokens, request.tenant)
        self.tree.missed.count_misses(request, sum(hit_tokens))
        if meter is not None:
            meter.record_request(request, req.cached_tokens_device + req.cached_tokens_host)

    def arrive(self, request: LiveRequest) -> None:
        """Receive and admit ``request`` at once, for a caller without a queue."""
        self._receive(request)
        self._announce(request)

    def _receive(self, request: LiveRequest) -> None:
        """Register a request that entered the scheduler. Call once for each, in arrival order."""
        tree, live = self.tree, self.live
        if tree.evictable_device_leaves.pending or tree.evictable_host_leaves.pending:
            self._admit_pending()
        # Requests of several HTTP processes, and long prompts, may arrive after younger ones.
        request.time = tree.clock.advance(request.time)
        if request.sample_group is not None:
            self.samples.register(request)
        if live.meter is not None:
            live.follow_floor(live.meter)
        tree.disk.record_arrival(request.epoch)

    def _announce(self, request: LiveRequest) -> None:
        """Announce an admitted request to the policies. Call once for each, in order of admission."""
        request.phase = RequestPhase.ADMITTED
        if request.warm_up is not None:
            request.label, request.turn = request.warm_up.label, request.warm_up.turn
            return
        tree = self.tree
        if tree.evictable_device_leaves.pending or tree.evictable_host_leaves.pending:
            self._admit_pending()
        # An overtaken request counts as arriving with its overtakers.
        request.time = self._admission_clock.advance(request.time)
        # Nodes carry the labels of the first policy that learns.
        label = None
        for policy in self.live.learners:
            policy_label = policy.arrive(request)
            label = policy_label if label is None else label
        request.label = label
        if request.conversation is not None:
            self.conversations.apply_session_end(request)

    def _admit_pending(self) -> None:
        """Pass the nodes of earlier requests to the policies in their current state. The simulator,
        which serves one request at a time, does the same."""
        tree = self.tree
        for leaves in (tree.evictable_device_leaves, tree.evictable_host_leaves):
            if leaves.pending:
                leaves.admit_pending()

    def finish(self, request: LiveRequest) -> None:
        """Report the request's output and stop reason to the policies."""
        labels = [policy.finish(request) for policy in self.live.learners]
        request.label = labels[0] if labels else None
        if self.live.profile is not None:
            self.live.profile.save_if_due(self.live.learner, self.tree.clock.now)

    # ---- the nodes of a request ----

    def mark_path_used(self, node: UnifiedTreeNode, request: LiveRequest | None) -> None:
        """Mark every node from the root to ``node`` as used by ``request``. A node counts a request
        once, however often its path is inserted. Without a request (direct calls of ``insert``) nodes
        are marked with the clock alone."""
        tree = self.tree
        if request is not None:
            self.conversations.set_end(request, node)
            charged_to = tree.protected.charged_tenant(request.tenant, request.source)
            if request.keep_until is not None:
                tree.protected.keep_path(node, request.keep_until, charged_to)
            if request.misses is not None:
                set_offsets(node)
                tree.missed.record_written(request, node.canopy.offset + node.canopy.length)
        is_done = request is not None and tree.disk.active and request.phase is RequestPhase.DONE
        device_leaves, host_leaves = tree.evictable_device_leaves, tree.evictable_host_leaves
        while node is not tree.root_node:
            leaf = node.canopy
            if leaf.awaited_until is not None:
                tree.protected.awaited.end_protection(leaf)
            if node in device_leaves:
                device_leaves.readmit(node)
            elif node in host_leaves:
                host_leaves.readmit(node)
            if request is None:
                leaf.count_use_without_request(tree.clock.now)
            else:
                self._mark_used(node, request)
                if is_done:
                    tree.disk.record_node_use(node)
            node = node.parent
        if is_done:
            assert request is not None
            tree.disk.record_finish(request)

    def _mark_used(self, node: UnifiedTreeNode, request: LiveRequest) -> None:
        leaf, groups = node.canopy, self.tree.groups
        leaf.path = request.path
        if leaf.request_number == request.number:
            leaf.refresh(request)
        else:
            leaf.mark_used(request)
            leaf.request_number = request.number
        if leaf.ttl_s is not None or request.ttl_s is not None:
            leaf.set_ttl(request)
        if groups.disk_table is not None or groups.host_table is not None:
            set_offsets(node)
            groups.assign(leaf, request)
