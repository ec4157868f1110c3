"""A disk: whole blocks in their own tree, with their own policy, TTLs and bandwidth.

Pages on disk are linked by their keys, not by an instance's tree, so instances that share a disk
share one tree. A write is dropped if its prefix was evicted meanwhile, because no lookup could reach
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from canopy_lab.sim.system.channel import DiskChannel, DiskIO
from canopy_lab.sim.system.config import TierSpec
from canopy_lab.sim.system.tier_spec import Expiry
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import Node, RadixTree
from sglang_canopy.records import Leaf, Request


class _QueuedWrite(NamedTuple):
    """A queued write: path, leading blocks already stored, request, and completion callback."""

    path: tuple[int, ...]
    stored_blocks: int
    request: Request
    callback: Callable[[], None]


class Disk:
    """One disk of ``spec``; blocks of ``block_bytes``."""

    def __init__(
        self,
        spec: TierSpec,
        policy: Policy,
        block_tokens: int,
        block_bytes: float,
        *,
        whole_nodes: bool = False,
    ) -> None:
        self.spec = spec
        self.policy = policy
        self.block_bytes = block_bytes
        self.tree = RadixTree(
            policy, max(1, int(spec.capacity_bytes // block_bytes)), block_tokens,
            whole_nodes=whole_nodes,
        )  # fmt: skip
        self.expiry = Expiry.from_ttl(spec.ttl)
        self.channel = DiskChannel(spec, self._finish_write)
        self._queued_blocks: set[int] = set()
        """Blocks in queued writes."""

    @property
    def used_bytes(self) -> float:
        return self.tree.used_blocks * self.block_bytes

    def count_leading(self, path: tuple[int, ...], now: float) -> int:
        """Return the number of leading blocks of ``path`` that are stored and not expired."""
        return self._match(path, now)[1]

    def deepest_leaf(self, path: tuple[int, ...]) -> Leaf | None:
        """Return the attributes of the deepest node of ``path``."""
        node, _ = self.tree.match(path)
        return None if node is self.tree.root else node

    def record_use(self, path: tuple[int, ...], request: Request, now: float) -> int:
        """Record a use of ``path`` in any tier; return its leading blocks stored or queued."""
        node, stored_blocks = self._match(path, now)
        is_ranked = not node.children and not node.locks and node is not self.tree.root
        if is_ranked:
            self.policy.drop(node)
        self.tree.mark_used(request, node)
        if is_ranked:
            self.policy.admit(node, self.tree.now)
        while stored_blocks < len(path) and path[stored_blocks] in self._queued_blocks:
            stored_blocks += 1
        return stored_blocks

    def write(
        self,
        path: tuple[int, ...],
        stored_blocks: int,
        request: Request,
        now: float,
        callback: Callable[[], None],
    ) -> None:
        """Write the blocks of ``path`` after the first ``stored_blocks``.

        ``callback`` is called after all earlier writes, even if none is missing or this write is dropped.
        """
        missing_blocks = path[stored_blocks:]
        if missing_blocks and missing_blocks[-1] in self._queued_blocks:
            missing_blocks, stored_blocks = (), len(path)
        if not missing_blocks and not self.channel.is_writing:
            callback()
            return
        self._queued_blocks.update(missing_blocks)
        write_bytes = len(missing_blocks) * self.block_bytes
        self.channel.write(now, write_bytes, _QueuedWrite(path, stored_blocks, request, callback))

    def sweep(self, now: float) -> None:
        self.channel.advance(now)
        if self.expiry is None:
            return
        for leaf in [leaf for leaf in self.policy.leaves() if self.expiry.has_expired(leaf, now)]:
            self._drop_run(leaf, now)  # type: ignore[arg-type]

    def _match(self, path: tuple[int, ...], now: float) -> tuple[Node, int]:
        self.channel.advance(now)
        tree = self.tree
        tree.now = max(tree.now, now)
        node, hit_blocks = tree.match(path)
        if self.expiry is None or node is tree.root:
            return node, hit_blocks
        # A parent's last use is not older than its child's: nothing above ``unexpired`` has expired.
        unexpired: Any = node
        while unexpired is not tree.root and self.expiry.has_expired(unexpired, now):
            unexpired = unexpired.parent
        if unexpired is node:
            return node, hit_blocks
        self._drop_run(node, now)
        return unexpired, 0 if unexpired is tree.root else (
            unexpired.offset + unexpired.length
        ) // tree.block_tokens

    def _drop_run(self, leaf: Node, now: float) -> None:
        """Remove ``leaf`` and its expired ancestors without other children."""
        tree = self.tree
        node: Any = leaf
        assert self.expiry is not None
        while (
            node is not tree.root
            and not node.children
            and not node.locks
            and self.expiry.has_expired(node, now)
        ):
            parent = node.parent
            tree.remove(node)
            node = parent

    def _finish_write(self, transfer: DiskIO) -> None:
        write: _QueuedWrite = transfer.payload
        write.callback()
        path = write.path
        if write.stored_blocks == len(path):
            return
        self._queued_blocks.difference_update(path[write.stored_blocks :])
        tree = self.tree
        node, hit_blocks = tree.match(path)
        if hit_blocks < write.stored_blocks:
            return
        tree.lock(node)
        leaf = tree.insert(path, node, hit_blocks)
        if leaf is node:
            tree.unlock(node)
            return
        leaf.mark_used(write.request)
        if self.expiry is not None:
            leaf.group = self.expiry.group(path)
        # Ancestors stored after this request used them are not marked by it.
        ancestor = leaf.parent
        while ancestor is not tree.root and ancestor is not None:
            if ancestor.last_access >= leaf.last_access:
                break
            ancestor.refresh(write.request)
            ancestor = ancestor.parent
        node.locks -= 1  # not ``unlock``, which ranks leaves: it has a child now
        self.policy.admit(leaf, tree.now)
