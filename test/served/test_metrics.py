"""Counters and gauges on a real server's `/metrics`, and the status."""

import os
import random
import re
import stat
import urllib.parse
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from sglang_canopy.telemetry.series import CACHE, IGNORED, PREFIX
from support.served import until

pytestmark = pytest.mark.xdist_group("metrics")
PROMPT = 320

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(text: str) -> Samples:
    """Every sample of Canopy's in Prometheus' text format."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(canopy:\w+)(?:\{(.*)\})? (\S+)", line)
        if match:
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            found[match[1], labels] = float(match[3])
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a series over the labels that are not given."""
    wanted = set(labels.items())
    return sum(v for (n, have), v in samples.items() if n == PREFIX + name and wanted <= have)


@pytest.fixture
def client(metrics_server):
    return metrics_server


def reported(client, requests: int) -> Samples:
    """The samples once `requests` requests of the named categories are in them."""

    def true() -> Any:
        samples = series(client.get("/metrics"))
        done = sum(total(samples, "requests_total", category=c) for c in ("talk", "rag"))
        return samples if done == requests else None

    return until(true)


def test_metrics_agree_with_the_responses(client) -> None:
    """Hits by tier and category are the sums of what each response reported."""
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 9000) for _ in range(PROMPT)] for _ in range(20)]
    said = {kind: dict.fromkeys(("device", "host", "storage"), 0) for kind in ("talk", "rag")}
    asked = {"talk": 0, "rag": 0}
    for i in (0, 0, *range(1, 20), 0, 1, 18):
        kind = "rag" if i % 2 else "talk"
        found = client.generate(prompts[i], 2, custom_params={"canopy_category": kind})
        details = found["meta_info"].get("cached_tokens_details") or {}
        for tier in said[kind]:
            said[kind][tier] += details.get(tier, 0)
        asked[kind] += 1
    tiers = {"device": "device", "host": "host", "storage": "disk"}
    hit = {tier: sum(of[tier] for of in said.values()) for tier in tiers}
    assert hit["device"] > 0, said
    assert hit["host"] + hit["storage"] > 0, said

    samples = reported(client, sum(asked.values()))
    for kind, of in said.items():
        for tier, tokens in of.items():
            shown = total(samples, "hit_tokens_total", tier=tiers[tier], category=kind)
            assert shown == tokens, (kind, tier)
        assert total(samples, "prompt_tokens_total", category=kind) == asked[kind] * PROMPT
        missed = total(samples, "miss_tokens_total", category=kind)
        assert missed == asked[kind] * PROMPT - sum(of.values())
    for tier in ("device", "host"):
        gone = total(samples, "evicted_tokens_total", tier=tier)
        assert gone > 0
        assert total(samples, "residency_seconds_count", tier=tier) == gone
    assert total(samples, "demoted_tokens_total", tier="device") > 0
    assert total(samples, "disk_written_bytes_total") > 0
    bytes_a_token = total(samples, "kv_bytes_per_token")
    for tier in ("device", "host", "disk"):
        room = total(samples, "capacity_bytes", tier=tier)
        assert 0 < total(samples, "used_bytes", tier=tier) <= room
        assert room >= 2048 * bytes_a_token
    assert total(samples, "group_ttl_seconds", tier="disk", group="category rag") == 60
    assert total(samples, "group_ttl_seconds", tier="disk", group="residual") == 3600
    known = {PREFIX + m.name for m in (*CACHE, *IGNORED)}
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in samples}
    assert shown <= known, shown - known


def test_the_status_agrees_with_the_metrics(client) -> None:
    for kind in ("talk", "rag"):
        client.generate(list(range(1000, 1000 + PROMPT)), custom_params={"canopy_category": kind})

    until(lambda: client.rank()["prompt_tokens"])
    status = client.rank()
    samples = series(client.get("/metrics"))
    for tier, of in status["tiers"].items():
        assert total(samples, "hit_tokens_total", tier=tier) == of["hit_tokens"]
        for reason, tokens in of["evicted_tokens"].items():
            assert total(samples, "evicted_tokens_total", tier=tier, reason=reason) == tokens
    assert set(status["tiers"]) == {"device", "host", "disk"}
    assert status["policies"]["disk"] == "wa"
    assert {row["category"] for row in status["categories"]} >= {"talk", "rag"}


def test_the_status_folder_is_private(client) -> None:
    (folder,) = Path(gettempdir()).glob(f"canopy-status-{client.server.process.pid}-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    for file in folder.glob("*.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_salt_is_in_the_status_the_metrics_the_server_info_or_the_log(client) -> None:
    """Salts as a gateway sets them; every route that a user's key opens, and the access log."""
    salt, key = "salt-of-acme/7f!", "key-of-acme"
    owner = {"cache_salt": salt, "extra_key": key}
    kept = {"canopy_keep_s": 600, "canopy_conversation": "a"}
    client.generate(list(range(2000, 2064)), 2, custom_params=kept, **owner)
    hint = {"conversation": "a", "return_in_s": 5, **owner}
    assert client.post("/canopy/hint", hint)["waiting"] >= 0
    query = urllib.parse.urlencode(owner)
    assert client.get(f"/canopy/status?{query}")

    def kept_tenants() -> Any:
        return [row["tenant"] for row in client.rank()["keep"]["tenants"]]

    assert until(kept_tenants) != [None]
    told = [client.get(path) for path in ("/canopy/status", "/metrics", "/server_info")]
    shown = "".join([*told, client.server.log_text()])
    assert '"GET /canopy/status HTTP/1.1" 200' in shown
    for secret in (salt, key, urllib.parse.quote(salt, safe=""), query):
        assert secret not in shown
