"""Routes that generate support the same fields and refuse the same mistakes; metrics agree with the answers.

No route, status, metric or log line shows a key or a salt.
"""

import json
import os
import random
import re
import stat
import urllib.parse
from collections import Counter
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from sglang_canopy.telemetry.series import CACHE_METRICS, IGNORED_METRICS, PREFIX
from sglang_canopy.tenant import DOCUMENTS_MARK
from support.prompts import token_ids
from support.served import ROUTES, body_of, greedy_ids, wait_until

pytestmark = pytest.mark.xdist_group("metrics")
TEXT = "Which leaf goes first? " * 8
TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
TIERS = {"device": "device", "host": "host", "storage": "disk"}
ANTHROPIC_TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
CHAT = [{"role": "user", "content": TEXT}]
TWO_TURNS = [*CHAT, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]

SECOND_TURN_BY_PATH: dict[str, tuple[dict[str, Any], str]] = {
    "/generate": ({}, "generate"),
    "/v1/completions": ({}, "completion"),
    "/v1/chat/completions": (
        {"messages": TWO_TURNS, "tools": [{"type": "function", "function": TOOL}]}, "chat-tools",
    ),
    "/v1/responses": ({"input": TWO_TURNS, "tools": [{"type": "function", **TOOL}]}, "chat-tools"),
    "/v1/messages": ({"messages": TWO_TURNS, "tools": [ANTHROPIC_TOOL]}, "chat-tools"),
    "/invocations": ({"messages": TWO_TURNS}, "chat"),
    "/api/chat": ({"messages": TWO_TURNS}, "chat"),
    "/api/generate": ({}, "generate"),
}  # fmt: skip
"""Fields of a second turn by path, with tools where the route has them, and its category."""


def request_to(path: str, params: Any, **fields: Any) -> dict[str, Any]:
    """Return a request of `TEXT` with ``custom_params``."""
    body = {**body_of(path, TEXT), **fields}
    if params is None:
        return body
    if path == "/generate":
        return {**body, "sampling_params": {**body["sampling_params"], "custom_params": params}}
    return {**body, "custom_params": params}


def wait_until_counted(client: Any, category: str, requests_before: int = 0) -> None:
    wait_until(lambda: client.requests_by_category().get(category, 0) > requests_before)


ABSENT_HOOKS = {
    f"sglang.srt.managers.scheduler.Scheduler.{name}"
    for name in ("send_abort_output", "_create_generation_req")
}
"""Hooks that are off on SGLang 0.5.22."""
PROMPT_TOKENS = 320

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read_samples(text: str) -> Samples:
    """Return every sample of Canopy's in Prometheus' text format."""
    samples = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(canopy:\w+)(?:\{(.*)\})? (\S+)", line)
        if match:
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            samples[match[1], labels] = float(match[3])
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of a series over the labels that are not given."""
    required = set(labels.items())
    return sum(
        value
        for (series, sample_labels), value in samples.items()
        if series == PREFIX + name and required <= sample_labels
    )


def samples_after(client, requests: int) -> Samples:
    """Return the samples once they count `requests` requests of the two categories."""

    def all_counted() -> Any:
        samples = read_samples(client.get("/metrics"))
        counted = sum(total(samples, "requests_total", category=name) for name in ("talk", "rag"))
        return samples if counted == requests else None

    return wait_until(all_counted)


def test_metrics_agree_with_the_responses(client) -> None:
    """Hits by tier and category are the sums of what each response reported."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 9000) for _ in range(PROMPT_TOKENS)] for _ in range(20)]
    request_counts = {"talk": 0, "rag": 0}
    hits_by_category = {name: dict.fromkeys(TIERS, 0) for name in request_counts}
    for i in (0, 0, *range(1, 20), 0, 1, 18):
        category = "rag" if i % 2 else "talk"
        answer = client.generate(prompts[i], 2, custom_params={"canopy_category": category})
        details = answer["meta_info"].get("cached_tokens_details") or {}
        for tier in hits_by_category[category]:
            hits_by_category[category][tier] += details.get(tier, 0)
        request_counts[category] += 1
    assert sum(hits["device"] for hits in hits_by_category.values()) > 0
    assert sum(hits["host"] + hits["storage"] for hits in hits_by_category.values()) > 0

    samples = samples_after(client, sum(request_counts.values()))
    for category, hits_by_tier in hits_by_category.items():
        for tier, tokens in hits_by_tier.items():
            labels = {"tier": TIERS[tier], "category": category}
            assert total(samples, "hit_tokens_total", **labels) == tokens, (category, tier)
        prompt_tokens = request_counts[category] * PROMPT_TOKENS
        assert total(samples, "prompt_tokens_total", category=category) == prompt_tokens
        missed_tokens = total(samples, "miss_tokens_total", category=category)
        assert missed_tokens == prompt_tokens - sum(hits_by_tier.values())
    for tier in ("device", "host"):
        assert total(samples, "evicted_tokens_total", tier=tier) > 0
    assert total(samples, "demoted_tokens_total", tier="device") > 0
    assert total(samples, "disk_written_bytes_total") > 0
    bytes_per_token = total(samples, "kv_bytes_per_token")
    for tier in ("device", "host", "disk"):
        capacity = total(samples, "capacity_bytes", tier=tier)
        assert 0 < total(samples, "used_bytes", tier=tier) <= capacity
        assert capacity >= 2048 * bytes_per_token
    assert total(samples, "group_ttl_seconds", tier="disk", group="category rag") == 60
    assert total(samples, "group_ttl_seconds", tier="disk", group="residual") == 3600
    documented_names = {PREFIX + metric.name for metric in (*CACHE_METRICS, *IGNORED_METRICS)}
    shown_names = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in samples}
    assert shown_names <= documented_names, shown_names - documented_names
    # Before any other test of this file: their traffic would hide that the status is a second old.
    sent_tokens = sum(request_counts.values()) * PROMPT_TOKENS
    wait_until(lambda: client.rank()["prompt_tokens"] >= sent_tokens)
    status, samples = client.rank(), read_samples(client.get("/metrics"))
    for tier, row in status["tiers"].items():
        assert total(samples, "hit_tokens_total", tier=tier) == row["hit_tokens"]
        for reason, tokens in row["evicted_tokens"].items():
            assert total(samples, "evicted_tokens_total", tier=tier, reason=reason) == tokens
    assert set(status["tiers"]) == {"device", "host", "disk"}
    assert status["policies"]["disk"] == "wa"
    assert {row["category"] for row in status["categories"]} >= {"talk", "rag"}


def test_auto_with_a_host_and_a_disk_tier_generates_transformers_text(client, small_model) -> None:
    """test_differential.py compares with a server without Canopy."""
    prompts = [token_ids(64, seed=1) + token_ids(336, seed=2 + i) for i in range(10)]

    def output_ids() -> list[list[int]]:
        answers = [client.generate(prompt, 8) for prompt in prompts]
        for answer in answers:
            details = answer["meta_info"].get("cached_tokens_details") or {}
            cached_tokens.update({tier: details.get(tier, 0) for tier in ("host", "storage")})
        return [answer["output_ids"] for answer in answers]

    cached_tokens: Counter[str] = Counter()
    expected = greedy_ids(small_model, prompts, 8)
    pages_before = client.rank()["disk"]["pages"]
    assert output_ids() == output_ids() == expected
    assert cached_tokens["host"] > 300
    wait_until(lambda: client.rank()["disk"]["pages"] >= pages_before + 40)
    client.flush()
    assert output_ids() == expected
    assert cached_tokens["storage"] > 300
    assert client.status()["off"].keys() <= ABSENT_HOOKS


def test_the_status_folder_is_private(client) -> None:
    (folder,) = Path(gettempdir()).glob(f"canopy-status-{client.server.process.pid}-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    for file in folder.glob("*.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_salt_is_in_the_status_the_metrics_the_server_info_or_the_log(client) -> None:
    """The salts are as a gateway sets them. A user's key opens these routes; the log includes the access log."""
    salt, key = "salt-of-acme/7f!", "key-of-acme"
    owner = {"cache_salt": salt, "extra_key": key}
    hint_fields = {"canopy_keep_s": 600, "canopy_conversation": "a"}
    client.generate(list(range(2000, 2064)), 2, custom_params=hint_fields, **owner)
    hint = {"conversation": "a", "return_in_s": 5, **owner}
    assert client.send("/canopy/hint", hint, **client.key_header("--admin-api-key")).code == 200
    query = urllib.parse.urlencode(owner)
    assert client.get(f"/canopy/status?{query}")

    def kept_tenants() -> Any:
        return [row["tenant"] for row in client.rank()["keep"]["tenants"]]

    assert wait_until(kept_tenants) != [None]
    texts = [client.get(path) for path in ("/canopy/status", "/metrics", "/server_info")]
    text = "".join([*texts, client.server.log_text()])
    assert '"GET /canopy/status HTTP/1.1" 200' in text
    for secret in (salt, key, urllib.parse.quote(salt, safe=""), query):
        assert secret not in text


@pytest.mark.parametrize("path", ROUTES)
def test_category_turn_tools_and_hints_are_read(client: Any, path: str) -> None:
    second_turn, category = SECOND_TURN_BY_PATH[path]
    name = "from" + path.replace("/", "-")
    params = {"canopy_category": name, "canopy_turn": 2, "canopy_conversation": f"c{path}"}
    code, text = client.send(path, request_to(path, params))
    assert code == 200, text
    wait_until_counted(client, name)
    explained = json.loads(client.get(f"/canopy/explain?conversation=c{path}"))
    assert explained["replicas"][0][0]["cached"], explained
    requests_before = client.requests_by_category().get(category, 0)
    code, text = client.send(path, request_to(path, None, **second_turn))
    assert code == 200, text
    wait_until_counted(client, category, requests_before)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_four_answers_to_one_request_count_once(client: Any, path: str) -> None:
    name = "four" + path.replace("/", "-")
    for _ in range(2):
        body = request_to(path, {"canopy_category": name, "canopy_conversation": f"n{path}"})
        if path == "/generate":
            body["sampling_params"] |= {"n": 4, "temperature": 1}
        else:
            body |= {"n": 4, "temperature": 1}
        code, text = client.send(path, body)
        assert code == 200, text
        answers = json.loads(text)
        assert len(answers if path == "/generate" else answers["choices"]) == 4
    assert client.send(path, request_to(path, {"canopy_category": f"last-{name}"})).code == 200
    wait_until_counted(client, f"last-{name}")  # so all that ended before are in the status
    assert client.requests_by_category()[name] == 2


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_wrong_hint_is_ignored_and_a_wrong_tenant_refused_with_400(client, path, is_streamed):
    wrong_fields = {"canopy_turn": 0, "canopy_nonsense": 1, "canopy": {"time": 0}}
    assert client.send(path, request_to(path, wrong_fields, stream=is_streamed)).code == 200
    assert client.status()["ignored_fields"].keys() >= {"canopy_turn", "other"}
    marked = {"extra_key": DOCUMENTS_MARK, "stream": is_streamed}
    code, text = client.send(path, request_to(path, None, **marked))
    assert (code, "extra_key" in text) == (400, True), text


CHANGING_PARTS = ("start_", "stop_", "dump_", "flush_", "expert_distribution", "profile")
"""Parts of routes that change a server; some stop a server without experts."""


def test_no_route_and_no_line_of_the_log_shows_a_key(client: Any) -> None:
    """The last test of the file, since it makes the server log requests with their salts."""
    user, admin = (client.key_header(flag) for flag in ("--api-key", "--admin-api-key"))
    paths = [
        path
        for path, methods in json.loads(client.get("/openapi.json"))["paths"].items()
        if "get" in methods and "{" not in path and not any(part in path for part in CHANGING_PARTS)
    ]
    assert "/server_info" in paths
    assert "admin_api_key" in client.get("/server_info")
    paths += ["/metrics", "/canopy/status", "/canopy/ui", "/canopy/explain?conversation=c"]
    texts = {
        f"{path} with key {number}": client.send(path, **header).text
        for path in paths
        for number, header in enumerate(({"Authorization": ""}, user, admin))
    }
    assert client.send("/configure_logging", {"log_requests": True}, **admin).code == 200
    body = {"model": "m", "messages": CHAT, "max_tokens": 2}
    assert client.send("/v1/chat/completions", body).code == 200
    wait_until(lambda: "Finish: obj" in client.server.log_text())
    texts["the log"] = client.server.log_text()
    keys = [header["Authorization"].removeprefix("Bearer ") for header in (user, admin)]
    assert [source for source, text in texts.items() if any(key in text for key in keys)] == []
