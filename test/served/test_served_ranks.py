"""Ranks, replicas and workers: two tensor-parallel ranks over three tiers evict alike, with clients
that disconnect; hints and tenants at replicas and behind gateways."""

import contextlib
import http.client
import json
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_canopy.request.client_hints import GATEWAY_HEADER, SECRET_VARIABLE
from sglang_canopy.request.sent import TENANT_METADATA
from support.gateways import MODULES, post, run_gateway, skip_without
from support.prompts import continuing_prompts, token_ids
from support.served import RANK_CORES_ENVIRONMENT, agreed_status, disk_flags, wait_until

pytestmark = pytest.mark.long
PAGE_TOKENS, REQUEST_COUNT, ANSWER_TOKENS, TIMEOUT_S = 16, 500, 4, 120.0
CATEGORIES = ("chat", "agent", "batch")


def conversations(requests: int, seed: int, turns: int = 5) -> list[tuple[list[int], dict]]:
    """Return (prompt, fields) of the turns of growing conversations, in random order; a third share a head."""
    rng = random.Random(seed)
    shared_head = token_ids(64, seed)
    unsent: list[list[tuple[list[int], dict]]] = []
    for number in range(-(-requests // turns)):
        tokens = list(shared_head) if number % 3 == 0 else []
        conversation = []
        for turn in range(1, turns + 1):
            tokens = tokens + [rng.randrange(100, 40_000) for _ in range(rng.randrange(16, 48))]
            fields = {
                "canopy_category": CATEGORIES[number % 3],
                "canopy_turn": turn,
                "canopy_conversation": f"c{number}",
            }
            conversation.append((tokens, fields))
        unsent.append(conversation)
    turns_in_order = []
    while unsent:
        conversation = rng.choice(unsent[:20])  # twenty at a time
        turns_in_order.append(conversation.pop(0))
        unsent = [conversation for conversation in unsent if conversation]
    return turns_in_order[:requests]


@pytest.fixture
def client(shared_server, small_model, tmp_path_factory):
    disk = tmp_path_factory.getbasetemp() / "two-ranks-disk"
    return shared_server(
        small_model,
        *("--tp-size", "2", "--radix-eviction", "wa", "--page-size", str(PAGE_TOKENS)),
        *("--canopy-queue-order", "bounded-shortest", "--canopy-session-gate", "auto"),
        *("--max-running-requests", "3"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
        *disk_flags(disk),
        kv_tokens=1024,
        environment=RANK_CORES_ENVIRONMENT,
    )


def test_both_ranks_evict_the_same_leaves_over_500_requests(client) -> None:
    hit_tokens = dict.fromkeys(("device", "host", "storage"), 0)
    for tokens, fields in conversations(REQUEST_COUNT, seed=1):
        meta_info = client.generate(tokens, custom_params=fields)["meta_info"]
        for tier in hit_tokens:
            hit_tokens[tier] += (meta_info["cached_tokens_details"] or {}).get(tier, 0)
    assert min(hit_tokens.values()) > 0, hit_tokens
    wait_until(lambda: sum(client.requests_by_category().values()) >= REQUEST_COUNT)
    status = agreed_status(client)
    assert status["agreement"]["victims"] > REQUEST_COUNT
    assert status["agreement"]["records_compared"] > 0
    assert status["policies"] == {"device": "wa", "host": "wa", "disk": "wa"}
    tiers = status["tiers"].values()
    missed_tokens = status["prompt_tokens"] - sum(tier["hit_tokens"] for tier in tiers)
    causes = status["missed"]["tokens"].values()
    assert sum(sum(tokens_by_tier.values()) for tokens_by_tier in causes) == missed_tokens
    assert status["missed"]["corrected_tokens"] == 0
    assert "Traceback" not in client.server.log_text()


def host_entered_tokens(client: Any, category: str) -> float:
    """Return the category's tokens that entered the host: computed, or read with their metadata."""
    line = re.compile(r"^canopy:entered_tokens_total\{(.*)\} (\S+)$", re.MULTILINE)
    for labels, value in line.findall(client.get("/metrics")):
        if 'tier="host"' in labels and f'category="{category}"' in labels:
            return float(value)
    return 0.0


def test_metadata_is_restored_with_every_read_from_disk(client) -> None:
    fields = {"canopy_category": "kept"}
    prompt = token_ids(20 * PAGE_TOKENS, seed=7)
    client.generate(prompt, custom_params=fields)
    for read in range(1, 5):
        # Pages that are read without their records count as "default".
        wait_until(lambda read=read: host_entered_tokens(client, "kept") >= read * len(prompt))
        assert host_entered_tokens(client, "kept") == read * len(prompt)
        client.flush()
        answer = client.generate([*prompt, read], custom_params=fields)
        assert answer["meta_info"]["cached_tokens_details"]["storage"] == len(prompt), read


class Clients:
    """Clients that stream, disconnect, retry and reuse request ids, and the outcomes of their requests."""

    def __init__(self, client: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self.client, self.prompts, self.expected_answers = client, prompts, expected
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            number = rng.randrange(len(self.prompts))
            body: dict[str, Any] = {"extra_key": rng.choice([None, "a", "b"])}
            if rng.random() < 0.5:
                body["rid"] = f"job-{seed}-{rng.randrange(4)}-"
            timeout_s = rng.choice([0.01, 0.1, 0.5, TIMEOUT_S, TIMEOUT_S])
            ids = self.answer(self.prompts[number], timeout_s, body)
            if ids is not None:
                outcome = "answered" if ids == self.expected_answers[number] else "wrong"
            elif timeout_s < TIMEOUT_S:
                outcome = "disconnected"
            else:
                outcome = "name in use" if "rid" in body else "unanswered"
            with self._lock:
                self.outcomes[outcome] += 1

    def answer(self, ids: list[int], timeout_s: float, body: dict[str, Any]) -> list[int] | None:
        """Return all tokens; ``None`` if the client disconnected, or after a refusal."""
        sampling_params = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        request = {"input_ids": ids, "sampling_params": sampling_params, "stream": True, **body}
        output_ids: list[int] = []
        host = self.client.url.removeprefix("http://")
        with (
            contextlib.closing(http.client.HTTPConnection(host, timeout=TIMEOUT_S)) as connection,
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(request), headers)
            connection.sock.settimeout(timeout_s)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    output_ids = json.loads(line.removeprefix(b"data: ")).get("output_ids") or []
                elif line.startswith(b"data: [DONE]"):
                    break
        return output_ids if len(output_ids) == ANSWER_TOKENS else None


def test_ranks_agree_and_others_are_answered_when_clients_disconnect(client) -> None:
    """Tests of the scheduler alone are in test/server/scheduler."""
    prompts = continuing_prompts(12, 5, max_shared_tokens=300)
    prompts = [ids[:700] for ids in prompts]
    expected = [client.generate(ids, ANSWER_TOKENS)["output_ids"] for ids in prompts]
    clients = Clients(client, prompts, expected)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(clients.run, range(6)))
    outcomes = clients.outcomes
    assert outcomes["wrong"] == outcomes["unanswered"] == 0, outcomes
    assert min(outcomes["answered"], outcomes["disconnected"]) > 20, outcomes
    client.flush()  # SGLang flushes only an idle server, and checks for leaks
    assert [client.generate(ids, ANSWER_TOKENS)["output_ids"] for ids in prompts] == expected
    wait_until(lambda: not client.rank()["queue"]["waiting_requests"])
    agreed_status(client)
    assert "Traceback" not in client.server.log_text()


ADMIN_KEY, GATEWAY_SECRET = "the-administrators-key", "0123456789abcdef-of-the-gateway"
ADMIN_HEADER = {"Authorization": f"Bearer {ADMIN_KEY}"}
GATEWAY_HEADERS = {GATEWAY_HEADER: GATEWAY_SECRET}


def fill_replica(client: Any, rank: int, seed: int) -> tuple[list[int], list[int]]:
    """Fill a replica with two conversations; the first is evicted first. Its client says that it is over,
    which is ignored, since users of this server may not give that hint."""
    unended, ended = token_ids(500, seed), token_ids(500, seed + 1)
    for name, prompt in (("unended", unended), ("ended", ended)):
        fields = {"canopy_conversation": name, "canopy_over": name == "unended"}
        client.generate(prompt, custom_params=fields, routed_dp_rank=rank, cache_salt="a")
    return unended, ended


def test_a_trusted_hint_reaches_every_replica_and_no_other_counts(launch, tiny_model) -> None:
    flags = ("--radix-eviction", "wa", "--dp-size", "2")
    flags += ("--admin-api-key", ADMIN_KEY, "--canopy-client-hints", "trusted")
    environment = {SECRET_VARIABLE: GATEWAY_SECRET, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    with launch(tiny_model, *flags, kv_tokens=2048, environment=environment) as client:
        check_that_no_user_reads_of_another_tenants_prompt(client)
        assert client.send("/flush_cache?timeout=20", {}, **ADMIN_HEADER).code == 200
        prompts = [fill_replica(client, rank, 10 * rank) for rank in range(2)]
        hint = {"conversation": "ended", "over": True, "cache_salt": "a"}
        false_hint = {**hint, "conversation": "unended"}
        assert client.send("/canopy/hint", false_hint).code == 401
        assert client.send("/canopy/hint", false_hint, **{GATEWAY_HEADER: "a guess"}).code == 401
        assert client.send("/canopy/hint", hint, **GATEWAY_HEADERS).code == 200
        forged_hints = {"server_args": {"canopy_hints:[]": 1}}
        assert client.send("/set_internal_state", forged_hints, **ADMIN_HEADER).code == 403
        # This request is refused after it was stamped. Its hints must not be lost.
        too_long = {"input_ids": token_ids(9000, 7), "sampling_params": {}}
        assert client.send("/generate", too_long).code == 400
        for rank, (unended, ended) in enumerate(prompts):
            client.generate(token_ids(1400, 50 + rank), routed_dp_rank=rank)
            assert client.cached(unended, routed_dp_rank=rank, cache_salt="a")["total"] > 400
            assert client.cached(ended, routed_dp_rank=rank, cache_salt="a")["total"] < 250
        log = client.server.log_text()
        assert GATEWAY_SECRET not in log
        assert "Traceback" not in log
        check_answers_are_equal_on_both_replicas(client)


def check_that_no_user_reads_of_another_tenants_prompt(client: Any) -> None:
    prompt = token_ids(400, 3)
    for tenant in ("first", "second"):
        client.generate(prompt, 2, cache_salt=tenant, routed_dp_rank=0)

    def missed(**headers: str) -> Any:
        rank = json.loads(client.send("/canopy/status", **headers).text)["ranks"][0]
        return rank["prompt_tokens"] >= 800 and rank["missed"]

    for headers in ({}, ADMIN_HEADER):
        missed_tokens = wait_until(lambda headers=headers: missed(**headers))
        assert missed_tokens["tokens"]["never_seen"]["none"] >= 2 * 398
        for path in ("/canopy/status", "/metrics"):
            assert "namespace" not in client.send(path, **headers).text


def check_answers_are_equal_on_both_replicas(client: Any) -> None:
    prompt, answers = token_ids(300, 4), set()
    for rank in (0, 1, 0, 1):
        answer = client.generate(prompt, 8, routed_dp_rank=rank, cache_salt="both")
        answers.add(str(answer["output_ids"]))
    assert answer["meta_info"]["cached_tokens"] == 299
    assert len(answers) == 1


LONG_TEXT = "The ants go marching one by one. " * 60


def send_chat(url: str, opening: str, salt: str | None = None, **fields: Any) -> int:
    """Send a turn of the conversation ``OPENING-c``; return its cached prompt tokens."""
    messages = [{"role": "user", "content": f"{opening}. {LONG_TEXT}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    if salt is not None:
        metadata = {TENANT_METADATA["cache_salt"]: salt, "user_id": f"u_session_{opening}-c"}
        body["metadata"] = metadata
    status, answer = post(f"{url}/v1/chat/completions", body)
    assert status == 200, answer
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def send_message(url: str, opening: str, salt: str) -> int:
    """Send a turn on ``/v1/messages``; return its cached prompt tokens."""
    system = [{"type": "text", "text": opening}, {"type": "text", "text": LONG_TEXT}]
    body = {"model": "tiny", "system": system, "max_tokens": 4, "cache_salt": salt}
    body["messages"] = [{"role": "user", "content": "Go on."}]
    status, answer = post(f"{url}/v1/messages", body)
    assert status == 200, answer
    return answer["usage"].get("cache_read_input_tokens", 0)


def received_hint(client: Any, conversation: str, salt: str) -> str | None:
    """Return the hint that a worker's policy received about a conversation: ``over`` or ``None``."""
    path, tenant = f"/canopy/explain?conversation={conversation}", {"X-Canopy-Cache-Salt": salt}
    # Users get an explanation every half a second.
    text = wait_until(lambda: (reply := client.send(path, **tenant)).code == 200 and reply.text)
    (explanation,) = json.loads(text)["replicas"][0]
    return explanation["belief"].get("hinted")


def test_tenants_are_separate_behind_gateways_and_hints_reach_both_workers(
    launch, tiny_model, tmp_path
) -> None:
    for gateway in MODULES:
        skip_without(gateway)
    flags = ("--radix-eviction", "wa", "--canopy-carriers", "metadata", "--enable-cache-report")
    flags += ("--served-model-name", "tiny")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(launch(tiny_model, *flags, kv_tokens=16_384)) for _ in range(2)
        ]
        urls = [worker.url for worker in workers]
        for gateway in MODULES:
            url = stack.enter_context(run_gateway(gateway, urls, tmp_path / f"{gateway}.log"))
            name = f"{gateway}-c"
            for salt in ("a", "b"):
                # Round robin: the first two requests meet both workers.
                first_hits = [send_chat(url, gateway, salt) for _ in urls]
                second_hits = [send_chat(url, gateway, salt) for _ in urls]
                assert max(first_hits) < 100, "another tenant's KV"
                assert min(second_hits) > 300
            for worker in workers:
                worker.post("/canopy/hint", {"conversation": name, "over": True, "cache_salt": "a"})
                wait_until(
                    lambda worker=worker, name=name: received_hint(worker, name, "a") == "over"
                )
                assert received_hint(worker, name, "b") is None
        # The last gateway is smg, which has this route.
        for salt in ("a", "b"):
            assert max(send_message(url, "Messages", salt) for _ in urls) < 100
            assert min(send_message(url, "Messages", salt) for _ in urls) > 300
        # sglang-router drops the salt in the body: the worker logs that once.
        router = stack.enter_context(run_gateway("sglang-router", urls, tmp_path / "router.log"))
        for _ in range(4):
            send_chat(router, "Dropped", cache_salt="d")
        for worker in workers:
            assert worker.server.log_text().count("names no tenant") == 1
