"""Which of the offered tools an answer calls, as one of 64 labels: no name is kept.

A scheduler has token ids and no text. So the entry sends, with a request that offers tools, how each
tool's name begins in tokens and which label it has; where the answer's tool call opens
(``MARKER_KEY``), the first name behind it is the tool's. Every tensor-parallel rank finds the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

TOOLS_KEY = "canopy-tools"
"""The key of ``custom_params`` that carries the offered tools: a flat list of whole numbers, for each
spelling of a name its label, how many token ids follow, and these."""

LABELS = 64
MAX_TOOLS = 32
"""Of a request; those after are not told apart."""
NAME_TOKENS = 8
"""Of a name; what is longer is told by its beginning."""
NEAR = 32
"""Tokens behind the marker within which the name begins."""
_MOST = MAX_TOOLS * 2 * (NAME_TOKENS + 2)


def label_of(name: str) -> str:
    """One of ``LABELS`` small labels, the same in every process. Two tools may share one."""
    return f"tool-{_number(name)}"


def wanted(policy_config: Any) -> bool:
    """Whether a policy asks for tools: ``{"categories": "tools"}``, as an object or in JSON."""
    if isinstance(policy_config, str):
        try:
            policy_config = json.loads(policy_config)
        except ValueError:
            return False
    return isinstance(policy_config, Mapping) and policy_config.get("categories") == "tools"


def to_wire(names: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The list under ``TOOLS_KEY``. ``encode``: a text's token ids.

    A name may share its first token with the quotation mark before it: both spellings are sent.
    """
    wire: list[int] = []
    for name in dict.fromkeys(names[:MAX_TOOLS]):
        for spelling in (name, f'"{name}'):
            ids = list(encode(spelling))[:NAME_TOKENS]
            if ids:
                wire += [_number(name), len(ids), *ids]
    return wire


def called(output: Sequence[int], marker: Sequence[int], custom_params: Any) -> str | None:
    """The label of the first tool that ``output`` calls; ``None`` where nothing tells.

    Of several names that begin at one place the longest counts. Never raises.
    """
    offered = custom_params.get(TOOLS_KEY) if isinstance(custom_params, Mapping) else None
    start = _find(output, marker, 0, len(output)) if offered and marker else -1
    if start < 0:
        return None
    start += len(marker)
    found = []
    for number, ids in _tools(offered):
        at = _find(output, ids, start, min(len(output), start + NEAR + len(ids)))
        if at >= 0:
            found.append((at, -len(ids), number))
    return f"tool-{min(found)[2]}" if found else None


def _tools(offered: Any) -> Iterator[tuple[int, list[int]]]:
    if not isinstance(offered, list) or len(offered) > _MOST:
        return
    if any(type(number) is not int for number in offered):
        return
    at = 0
    while at + 2 < len(offered):
        number, count = offered[at : at + 2]
        ids = offered[at + 2 : at + 2 + count]
        if not 0 <= number < LABELS or not 0 < count == len(ids) <= NAME_TOKENS:
            return
        yield number, ids
        at += 2 + count


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=2).digest()
    return int.from_bytes(digest, "big") % LABELS


def _find(tokens: Sequence[int], run: Sequence[int], start: int, end: int) -> int:
    """Where ``run`` begins in ``tokens[start:end]``; -1 where it does not."""
    run, n = list(run), len(run)
    for at in range(start, end - n + 1):
        if tokens[at] == run[0] and list(tokens[at : at + n]) == run:
            return at
    return -1
