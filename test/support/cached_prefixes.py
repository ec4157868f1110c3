"""Cached prefixes of a live tree by tier, to compare KV events with."""

from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_canopy.radix.live_request import State
from support.live_tree import LiveTree

PAGE = 2
GPU, CPU = StorageMedium.GPU.value, StorageMedium.CPU.value
Cached = set[tuple[str | None, tuple[int, ...]]]


def cached(tree: LiveTree, medium: str) -> Cached:
    """Every cached prefix that ends at a page, with its salt."""
    found: Cached = set()

    def visit(node: Any, above: tuple[int, ...]) -> None:
        tokens = above + tuple(node.key.raw_token_ids() if node.parent is not None else ())
        data = node.component_data[ComponentType.FULL]
        here = data.value if medium == GPU else data.host_value
        if node.parent is not None and here is not None:
            ends = range(len(above) + PAGE, len(tokens) + 1, PAGE)
            found.update((node.key.cache_salt, tokens[:end]) for end in ends)
        for child in node.children.values():
            visit(child, tokens)

    visit(tree.core.root_node, ())
    return found


def serve(tree: LiveTree, tokens: list[int], time: float, salt: str | None, **asks: Any) -> None:
    request = tree.request(time, prompt_tokens=len(tokens), tenant=salt, **asks)
    tree.core.requests.finish(request)
    request.state = State.DONE
    tree.insert(tokens, request, salt)


def spread(run: list[int]) -> list[int]:
    """Tokens of a path: equal beginnings are shared."""
    return [100 * i + token for i, token in enumerate(run) for _ in range(PAGE)]
