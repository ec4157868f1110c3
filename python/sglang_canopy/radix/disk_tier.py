"""What the tree core tells the tier below the host, and asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.live_request import LiveRequest


class DiskTier(Protocol):
    """The tier that stores pages; all calls come from the scheduler's thread."""

    active: bool
    """Whether the storage backend takes metadata with its pages. Where it does not, the tree
    core skips ``node_used``, ``request_finished`` and ``unwritten_ancestors``."""

    def attach(self, cache: UnifiedRadixCache) -> None:
        """The cache that the tree belongs to exists now."""

    def request_arrived(self, epoch: float) -> None:
        """A request entered; ``epoch``: seconds since 1970 when the requests' clock was 0."""

    def request_finished(self, request: LiveRequest) -> None:
        """``request`` is complete; its path is in the tree."""

    def node_used(self, node: UnifiedTreeNode) -> None:
        """A finished request used ``node``."""

    def before_write(self, node: UnifiedTreeNode) -> None:
        """SGLang is about to write ``node``'s pages."""

    def before_staged_write(self, node: UnifiedTreeNode) -> None:
        """Like ``before_write``, where SGLang may ask many times before it writes."""

    def unwritten_ancestors(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Nodes above ``node`` to write before it, shallowest first."""

    def pages_read(self, node_id: int | None, hashes: Sequence[str]) -> None:
        """Pages ``hashes`` were read; ``node_id`` is the deepest node that now holds them."""

    def tree_reset(self) -> None:
        """The tree is being emptied. What is stored stays."""


class NoDiskTier:
    """Nothing is below the host, or nothing of ours."""

    active = False

    def __init__(self, _tree: Any = None) -> None: ...

    def attach(self, cache: UnifiedRadixCache) -> None: ...

    def request_arrived(self, epoch: float) -> None: ...

    def request_finished(self, request: LiveRequest) -> None: ...

    def node_used(self, node: UnifiedTreeNode) -> None: ...

    def before_write(self, node: UnifiedTreeNode) -> None: ...

    def before_staged_write(self, node: UnifiedTreeNode) -> None: ...

    def unwritten_ancestors(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        return []

    def pages_read(self, node_id: int | None, hashes: Sequence[str]) -> None: ...

    def tree_reset(self) -> None: ...
