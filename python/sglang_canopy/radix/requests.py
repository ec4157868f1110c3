"""A tree's requests: announced to the policies, and written on the nodes that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_canopy.radix.conversations import Conversations
from sglang_canopy.radix.exchange import Exchange
from sglang_canopy.radix.leaf import set_offsets
from sglang_canopy.radix.live_request import LiveRequest, complete, live_request
from sglang_canopy.radix.tree import Tree
from sglang_canopy.records import Request

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class Requests:
    """Call it between the tree's own operations, in the order of SGLang's scheduler."""

    def __init__(self, tree: Tree, conversations: Conversations, exchange: Exchange) -> None:
        self.tree, self.live = tree, tree.live
        self.conversations, self.exchange = conversations, exchange

    def of(self, req: Req) -> LiveRequest:
        """``req``'s policy request; made, and announced to the policies, on first use.

        Not announced where it only asks whether the server is well: probes come every few seconds,
        and are no traffic.
        """
        request: LiveRequest | None = getattr(req, "canopy", None)
        if request is None:
            request = live_request(req, self.tree.clock.now, self.live.settings.block_tokens)
            req.canopy = request
            request.done = str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)
            if not request.done:
                self.arrive(request)
        return request

    def ended(self, req: Req) -> None:
        """``req`` is done: tell the policies, once, how it ended."""
        request = self.of(req)
        if request.done:
            return
        complete(request, req)
        self.finish(request)
        hits = (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
        label, tokens = request.label or request.category, request.prompt_tokens
        self.live.counters.served(label, tokens, hits, request.tenant)
        adapter = getattr(req, "canopy_adapter", None)
        if adapter is not None:
            self.live.counters.served_adapter(adapter, tokens, hits)
        if self.live.meter is not None:
            self.live.meter.ended(request, req.cached_tokens_device + req.cached_tokens_host)

    def arrive(self, request: LiveRequest) -> None:
        """A request entered the scheduler. Call once for each, in arrival order."""
        tree, live = self.tree, self.live
        # The policy first hears of what the requests before this one left, in the state that
        # it had then: the simulator, which serves one request at a time, does the same.
        tree.evictable_device_leaves.admit_pending()
        tree.evictable_host_leaves.admit_pending()
        # Requests of several HTTP processes, and long prompts, may come later than younger ones.
        request.time = tree.clock.advance(request.time)
        if live.meter is not None:
            self.exchange.keep_the_floor(live.meter)
        tree.disk.request_arrived(request.epoch)
        # Labels are the first's that learns.
        labels = [policy.arrive(request) for policy in live.learners]
        request.label = labels[0] if labels else None
        self.conversations.arrived(request)

    def finish(self, request: Request) -> None:
        """The request's output and stop reason are known."""
        labels = [policy.finish(request) for policy in self.live.learners]
        request.label = labels[0] if labels else None
        if self.live.profile is not None:
            self.live.profile.save_sometimes(self.live.device_policy, self.tree.clock.now)

    # ---- what a request uses ----

    def used(self, node: UnifiedTreeNode, request: LiveRequest | None) -> None:
        """``request`` used every node from the root to ``node``.

        It counts once a node however often its path is inserted. Without a request (direct
        calls of ``insert``) the nodes are stamped with the clock alone.
        """
        tree = self.tree
        if request is not None:
            self.conversations.remember(request, node)
            if request.keep_until is not None:
                tree.protected.keep(node, request.keep_until, request.tenant)
        done = request is not None and tree.disk.active and request.done
        device, host = tree.evictable_device_leaves, tree.evictable_host_leaves
        while node is not tree.root_node:
            leaf = node.canopy
            if leaf.awaited_until is not None:
                tree.protected.waiting.served(leaf)
            if node in device:
                device.readmit(node)
            elif node in host:
                host.readmit(node)
            if request is None:
                leaf.touch(tree.clock.now)
            else:
                self._stamp(node, request)
                if done:
                    tree.disk.node_used(node)
            node = node.parent
        if done:
            assert request is not None
            tree.disk.request_finished(request)

    def _stamp(self, node: UnifiedTreeNode, request: LiveRequest) -> None:
        leaf, groups = node.canopy, self.tree.groups
        if leaf.request_number == request.number:
            leaf.refresh(request)
        else:
            leaf.stamp(request)
            leaf.request_number = request.number
        asks = request.ttl_s is not None or request.pin_s is not None
        if leaf.ttl_s is not None or asks:
            leaf.set_retention(request)
        if groups.disk is not None or groups.host is not None:
            set_offsets(node)
            groups.assign(leaf, request)
