"""Read and sum ``/canopy/status`` of running servers."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names

TIERS = ("device", "host", "disk")
TIMEOUT_S = 5.0
MAX_BYTES = 8 << 20
MAX_SERVERS = 256
_AT_ONCE = 16

_TIER_SUMS = ("hit_tokens", "hit_tokens_last_minute", "entered_tokens", "demoted_tokens")
_CATEGORY_SUMS = ("requests", "prompt_tokens", "miss_tokens")
_CATEGORY_SUMS_BY_TIER = ("hit_tokens", "evicted_tokens", "held_tokens")


def fetch(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Return one status of the server at ``url``, with its data-parallel replicas summed.

    Raises ``CanopyError`` in one line if no server answers, it is not Canopy, or nothing is
    counted.
    """
    status = _status_of(url.rstrip("/"), api_key)
    return {**status, **_added_up(url, status)}


def fetch_all(urls: Sequence[str], api_key: str | None = None) -> dict[str, Any]:
    """Return one status of several servers, such as the workers of a gateway, summed.

    ``workers`` has a row for each server: its ``url``, policy, requests, prompt tokens and hits, or
    the ``error`` of a server without counts. One server gives the result of ``fetch``. Raises
    ``CanopyError`` if no server has counted anything, with the first server's reason.
    """
    if len(urls) == 1:
        return fetch(urls[0], api_key)
    if not 0 < len(urls) <= MAX_SERVERS:
        raise CanopyError(f"--url must name 1 to {MAX_SERVERS} servers, got {len(urls)}")

    def ask(url: str) -> dict[str, Any] | CanopyError:
        try:
            return fetch(url, api_key)
        except CanopyError as error:
            return error

    with ThreadPoolExecutor(min(len(urls), _AT_ONCE)) as pool:
        answers = list(pool.map(ask, urls))
    rows = [_worker(url, answer) for url, answer in zip(urls, answers)]
    counted = [a for a in answers if not isinstance(a, CanopyError) and a.get("ranks")]
    if not counted:
        raise next(
            (a for a in answers if isinstance(a, CanopyError)),
            CanopyError("no server has counted anything yet; try again"),
        )
    ranks = [rank for status in counted for rank in status["ranks"]]
    together = {**counted[0], "ranks": ranks, "uptime_s": min(s["uptime_s"] for s in counted)}
    for own in ("whatif", "next_step"):  # per server: depends on its own capacity
        together.pop(own, None)
    return {**together, **_added_up(urls[0], together), "workers": rows}


def _worker(url: str, answer: dict[str, Any] | CanopyError) -> dict[str, Any]:
    """Return one server's row."""
    if isinstance(answer, CanopyError):
        return {"url": url, "error": str(answer)}
    if not answer.get("ranks"):
        return {"url": url, "policy": answer["policy"], "error": "nothing counted"}
    tiers = answer["tiers"].values()
    return {
        "url": url,
        "policy": answer["policies"]["device"],
        "uptime_s": answer["uptime_s"],
        "requests": sum(row["requests"] for row in answer["categories"]),
        "prompt_tokens": answer["prompt_tokens"],
        "hit_tokens": sum(tier["hit_tokens"] for tier in tiers),
        "prompt_tokens_last_minute": answer["prompt_tokens_last_minute"],
        "hit_tokens_last_minute": sum(tier["hit_tokens_last_minute"] for tier in tiers),
    }


def _status_of(url: str, api_key: str | None) -> dict[str, Any]:
    """Return the server's status. Raises ``CanopyError``."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise CanopyError(f"--url must be like http://127.0.0.1:30000, got {url!r:.80}")
    request = urllib.request.Request(f"{url}/canopy/status")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            status = json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise CanopyError(_refusal(url, error.code)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            raise CanopyError(f"{url}/canopy/status is not JSON: another kind of server") from None
        reason = getattr(error, "reason", error)
        raise CanopyError(f"no server answers at {url} ({reason}); give --url") from None
    if not isinstance(status, dict) or "policy" not in status:
        raise CanopyError(f"{url}/canopy/status is not Canopy's: another kind of server")
    return status


def _refusal(url: str, code: int) -> str:
    if code == 404:
        return f"the server at {url} has no /canopy/status: install sglang-canopy beside it"
    if code in (401, 403):
        return f"the server at {url} needs an API key; give --api-key"
    return f"{url}/canopy/status answers {code}"


def _added_up(url: str, status: Mapping[str, Any]) -> dict[str, Any]:
    ranks = status.get("ranks")
    if not ranks:
        if status.get("whatif"):
            return {}
        policy = status["policy"]
        if policy is None:
            raise CanopyError(
                f"the server at {url} runs no eviction policy: it has just started (try again), or "
                "its prefix cache is off"
            )
        raise CanopyError(
            f"the server at {url} runs SGLang's own policy {policy!r}, which Canopy does not "
            f"count; start it with --radix-eviction and one of: {', '.join(live_names())}"
        )
    first = ranks[0]
    return {
        "policies": {t: name for r in reversed(ranks) for t, name in r["policies"].items()},
        "groups": first["groups"],
        "history": [
            tuple(map(sum, zip(*points)))
            for points in zip(*(r["history"][-_shortest(ranks) :] for r in ranks))
        ]
        if _shortest(ranks)
        else [],
        "history_point_s": first["history_point_s"],
        "prompt_tokens": sum(r["prompt_tokens"] for r in ranks),
        "prompt_tokens_last_minute": sum(r["prompt_tokens_last_minute"] for r in ranks),
        "tiers": {
            tier: _tier([r["tiers"][tier] for r in ranks if tier in r["tiers"]])
            for tier in TIERS
            if any(tier in r["tiers"] for r in ranks)
        },
        "categories": _categories(ranks),
        "faults": _sum_by_key([(r.get("disk") or {}).get("faults", {}) for r in ranks]),
        "reporting_share": max(r["reporting_s"] / max(r["uptime_s"], 1.0) for r in ranks),
    }


def _shortest(ranks: list[dict[str, Any]]) -> int:
    return min(len(r["history"]) for r in ranks)


def _tier(ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        name: None if any(r[name] is None for r in ranks) else sum(r[name] for r in ranks)
        for name in ("capacity_bytes", "used_bytes")
    }
    return {
        **sizes,
        **{name: sum(r[name] for r in ranks) for name in _TIER_SUMS},
        "evicted_tokens": _sum_by_key([r["evicted_tokens"] for r in ranks]),
    }


def _categories(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_category: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        for row in rank["categories"]:
            by_category.setdefault(row["category"], []).append(row)
    rows = [
        {
            "category": category,
            **{name: sum(row[name] for row in rows) for name in _CATEGORY_SUMS},
            **{name: _sum_by_key([row[name] for row in rows]) for name in _CATEGORY_SUMS_BY_TIER},
        }
        for category, rows in by_category.items()
    ]
    return sorted(rows, key=lambda row: -row["prompt_tokens"])


def _sum_by_key(rows: list[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: sum(row.get(key, 0) for row in rows) for key in keys}
