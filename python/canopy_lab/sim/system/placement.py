"""Store computed KV in an instance's tree, in host memory and on disk.

A disk write locks its host copy until it ends, so queued writes never exceed the host. KV without room
on the host is neither copied nor written until its next use (SGLang's ``write_backup_storage``, which
locks the node, and ``_execute_kv_backup``, which stops if ``evict_host`` frees too little).
"""

from __future__ import annotations

import itertools
from functools import partial

from canopy_lab.sim.system.channel import Link
from canopy_lab.sim.system.disk import Disk
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.nodes import TierNode
from canopy_lab.sim.system.tree import TieredTree
from canopy_lab.sim.system.waiting import WaitingPrefixes
from sglang_canopy.records import Request


class Placement:
    """Copies one instance's KV to host and disk."""

    def __init__(
        self,
        tree: TieredTree,
        host_link: Link | None,
        disk: Disk | None,
        kv_bytes: float,
        page_tokens: int,
        uses_before_copy: int,
        waiting_prefixes: WaitingPrefixes,
    ) -> None:
        self.tree = tree
        self.host_link = host_link
        self.disk = disk
        self.kv_bytes = kv_bytes
        self.page_tokens = page_tokens
        self.uses_before_copy = uses_before_copy
        self.waiting_prefixes = waiting_prefixes
        tree.retains_demoted = disk is not None

    def insert(self, job: SimulatedRequest, tokens: int, now: float) -> None:
        """Insert the first ``tokens`` of a job into the tree, and copy them down if due."""
        tree, page = self.tree, self.page_tokens
        # Output that the next turn does not repeat has no block ids.
        tokens = min(tokens, len(job.path) * tree.block_tokens) // page * page
        if not tokens:
            return
        blocks = job.blocks_of(tokens, tree.block_tokens)
        leaf, added_tokens = tree.insert(job.path, blocks, tokens, job.leaf)
        job.private_tokens -= added_tokens
        tree.lock(leaf, job.leaf)
        job.leaf = leaf
        tree.mark_used(leaf, job.request, job.index)
        self.waiting_prefixes.record_use(leaf, job.request)
        copied_tokens = 0
        if self.host_link is not None:
            copied_tokens = self._back_up(leaf, now)
        if self.disk is not None:
            whole_blocks = job.path[: tokens // tree.block_tokens]
            if job.disk_blocks < 0:
                prompt_path = job.path[: job.prompt_tokens // page * page // tree.block_tokens]
                job.disk_blocks = self.disk.record_use(prompt_path, job.request, now)
            if leaf.on_host and (copied_tokens or len(whole_blocks) > job.disk_blocks):
                tree.lock_host(leaf)
                self.disk.write(
                    whole_blocks, job.disk_blocks, job.request, now, partial(tree.unlock_host, leaf)
                )
                job.disk_blocks = max(job.disk_blocks, len(whole_blocks))

    def _back_up(self, node: TierNode, now: float) -> int:
        """Copy ``node`` and its ancestors to the host if they were used often enough."""
        assert self.host_link is not None
        while node is not self.tree.root and node.hits < self.uses_before_copy:
            node = node.parent
        if node is self.tree.root or not self.uses_before_copy:
            return 0
        copied_tokens = self.tree.back_up(node)
        if copied_tokens:
            self.host_link.write(now, copied_tokens * self.kv_bytes)
        return copied_tokens

    def write_demoted(self, now: float) -> float:
        """Copy victims demoted under ``write_back`` to the host, and queue their disk writes.

        Returns the end of the last copy, which the next step waits for.
        """
        assert self.host_link is not None
        copies_end_s = now
        for node in self.tree.demoted:
            _, copies_end_s = self.host_link.write(now, node.length * self.kv_bytes)
            if self.disk is None:
                continue
            runs, ancestor = [], node
            while ancestor is not self.tree.root and ancestor is not None:
                runs.append(ancestor.blocks)
                ancestor = ancestor.parent
            path = tuple(itertools.chain.from_iterable(reversed(runs)))
            request = Request(
                time=node.last_access, category=node.category, conversation=node.conversation,
                block_tokens=self.tree.block_tokens, turn=node.turn, tenant=node.tenant,
            )  # fmt: skip
            path = path[: (node.offset + node.length) // self.tree.block_tokens]
            stored_blocks = self.disk.record_use(path, request, now)
            self.disk.write(path, stored_blocks, request, now, partial(self.tree.unlock_host, node))
        self.tree.demoted.clear()
        return copies_end_s
