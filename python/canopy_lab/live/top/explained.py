"""``/canopy/explain`` of a running server, and its answer as a few lines of text."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_canopy.errors import CanopyError

TIMEOUT_S = 30.0
MAX_BYTES = 8 << 20
_HEADERS = {"extra_key": "X-Canopy-Extra-Key", "cache_salt": "X-Canopy-Cache-Salt"}


def fetch(
    url: str,
    conversation: str,
    api_key: str | None = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """Return the answer of the server at ``url``. Raises ``CanopyError`` in one line."""
    query = urllib.parse.urlencode({"conversation": conversation})
    request = urllib.request.Request(f"{url.rstrip('/')}/canopy/explain?{query}")
    if not request.full_url.startswith(("http://", "https://")):
        raise CanopyError(f"--url must be like http://127.0.0.1:30000, got {url!r:.80}")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    for field, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if value:
            request.add_header(_HEADERS[field], value)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise CanopyError(f"{url} answers {error.code}: {_reason(error)}") from None
    except (OSError, ValueError) as error:
        raise CanopyError(f"no answer from {url} ({error}); give --url") from None
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(4096))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


def lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer as readable lines."""
    found = [one for replica in answer["replicas"] for one in replica]
    found = [one for one in found if one["cached"] or one["evicted"]] or found[:1]
    if not found:
        yield "no tenant has, or lately had, a conversation of this name"
    for one in found:
        yield from _conversation(one)


def _conversation(one: Mapping[str, Any]) -> Iterator[str]:
    whose = "" if one["tenant"] is None else f" of tenant {_plain(one['tenant'])}"
    yield f"conversation {_plain(one['conversation'])}{whose}"
    if one["cached"]:
        held = ", ".join(f"{tier} {n:,}" for tier, n in one["tokens"].items() if n)
        ago = one["last_use_ago_s"]
        used = "only the part shared with others" if ago is None else f"last used {ago:g} s ago"
        yield f"  tokens held: {held or 'none'}; {used}"
        for node in one["nodes"]:
            where = "+".join(node["tiers"]) or "nowhere"
            shared = ", shared" if node["shared"] else ""
            yield (
                f"    {node['offset']:>8,} .. {node['offset'] + node['tokens']:<8,} {where:<12} "
                f"{_plain(node['category'])}, {node['uses']} uses{shared}"
            )
    else:
        yield "  not cached"
    if one["belief"]:
        believed = ", ".join(f"{_plain(k)} {_plain(v)}" for k, v in one["belief"].items())
        yield f"  {_plain(one['policy'])} estimates: {believed}"
    turn = one["next_to_go"]
    if turn is not None:
        yield "  " + _turn(turn)
    missed = sum(sum(row.values()) for row in one.get("missed", {}).values())
    if missed:
        yield f"  {missed:,} tokens that this tenant missed: {missed_in_words(one['missed'])}"
    for gone in one["evicted"]:
        kept = ", kept one tier below" if gone["demoted"] else ""
        yield (
            f"  {gone['evicted_ago_s']:g} s ago {_plain(gone['by'])} evicted {gone['tokens']:,} tokens from "
            f"{gone['offset']:,} on from the {gone['tier']} ({gone['reason']}), unused for "
            f"{gone['idle_s']:g} s, as {_plain(gone['category'])}{kept}"
        )


def missed_in_words(missed: Mapping[str, Mapping[str, int]]) -> str:
    """Return the causes of missed tokens as shares, most tokens first."""
    rows = [(n, cause, tier) for cause, row in missed.items() for tier, n in row.items() if n]
    total = sum(n for n, _, _ in rows) or 1
    return ", ".join(
        f"{_plain(cause).replace('_', ' ')}{'' if tier == 'none' else f' ({_plain(tier)})'} {n / total:.1%}"
        for n, cause, tier in sorted(rows, reverse=True)
    )


def _turn(turn: Mapping[str, Any]) -> str:
    free = f"{turn['free_tokens']:,} tokens are free"
    if turn["tokens_before"] is None and not turn["looked_at_tokens"]:
        return f"place in the eviction order unknown; {free}"
    if turn["tokens_before"] is None:
        return f"not among the next {turn['looked_at_tokens']:,} tokens to be evicted; {free}"
    when = "" if turn["seconds"] is None else f", in about {turn['seconds']:g} s at today's rate"
    return f"would be evicted after {turn['tokens_before']:,} other tokens{when}; {free}"


def _plain(text: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text))
