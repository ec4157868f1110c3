"""Two tensor-parallel ranks over three tiers, with an order, a gate and clients that disconnect: they
evict alike, and pages keep their metadata."""

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

from support.prompts import continuing_prompts, token_ids
from support.served import CORES, agreed, disk_flags, until

pytestmark = pytest.mark.long
PAGE, REQUESTS, ANSWER, PATIENCE_S = 16, 500, 4, 120.0
CATEGORIES = ("chat", "agent", "batch")


def conversations(requests: int, seed: int, turns: int = 5) -> list[tuple[list[int], dict]]:
    """Prompts of conversations that grow turn by turn, in random order; a third share a head."""
    draw = random.Random(seed)
    shared = token_ids(64, seed)
    waiting: list[list[tuple[list[int], dict]]] = []
    for number in range(-(-requests // turns)):
        tokens = list(shared) if number % 3 == 0 else []
        talk = []
        for turn in range(1, turns + 1):
            tokens = tokens + [draw.randrange(100, 40_000) for _ in range(draw.randrange(16, 48))]
            said = {
                "canopy_category": CATEGORIES[number % 3],
                "canopy_turn": turn,
                "canopy_conversation": f"c{number}",
            }
            talk.append((tokens, said))
        waiting.append(talk)
    mixed = []
    while waiting:
        talk = draw.choice(waiting[:20])  # twenty at a time
        mixed.append(talk.pop(0))
        waiting = [talk for talk in waiting if talk]
    return mixed[:requests]


@pytest.fixture
def client(shared_server, small_model, tmp_path_factory):
    disk = tmp_path_factory.getbasetemp() / "two-ranks-disk"
    return shared_server(
        small_model,
        *("--tp-size", "2", "--radix-eviction", "wa", "--page-size", str(PAGE)),
        *("--canopy-queue-order", "bounded-shortest", "--canopy-session-gate", "auto"),
        *("--max-running-requests", "3"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
        *disk_flags(disk),
        kv_tokens=1024,
        environment=CORES,
    )


def test_both_ranks_evict_the_same_leaves_over_500_requests(client) -> None:
    hits = dict.fromkeys(("device", "host", "storage"), 0)
    sent = 0
    for tokens, said in conversations(REQUESTS, seed=1):
        found = client.generate(tokens, custom_params=said)["meta_info"]["cached_tokens_details"]
        sent += len(tokens)
        for tier in hits:
            hits[tier] += (found or {}).get(tier, 0)
    assert min(hits.values()) > 0, hits
    until(lambda: sum(client.requests_by_category().values()) >= REQUESTS)
    status = agreed(client)
    assert status["agreement"]["victims"] > REQUESTS
    assert status["agreement"]["records_compared"] > 0
    assert status["policies"] == {"device": "wa", "host": "wa", "disk": "wa"}
    missed = status["prompt_tokens"] - sum(t["hit_tokens"] for t in status["tiers"].values())
    assert sum(n for row in status["missed"]["tokens"].values() for n in row.values()) == missed
    assert status["missed"]["corrected_tokens"] == 0
    assert "Traceback" not in client.server.log_text()


def entered_host(client: Any, category: str) -> float:
    """Return the category's tokens that entered the host: computed, or read with their metadata."""
    line = re.compile(r"^canopy:entered_tokens_total\{(.*)\} (\S+)$", re.MULTILINE)
    for labels, value in line.findall(client.get("/metrics")):
        if 'tier="host"' in labels and f'category="{category}"' in labels:
            return float(value)
    return 0.0


def test_metadata_is_restored_with_every_read_from_disk(client) -> None:
    said = {"canopy_category": "kept"}
    prompt = token_ids(20 * PAGE, seed=7)
    client.generate(prompt, custom_params=said)
    for read in range(1, 5):
        # Pages that are read without their records count as "default".
        until(lambda read=read: entered_host(client, "kept") >= read * len(prompt))
        assert entered_host(client, "kept") == read * len(prompt)
        client.flush()
        answer = client.generate([*prompt, read], custom_params=said)
        assert answer["meta_info"]["cached_tokens_details"]["storage"] == len(prompt), read


class Clients:
    """Clients that stream, disconnect, retry and reuse names, and what became of their requests."""

    def __init__(self, client: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
        self.client, self.prompts, self.alone = client, prompts, alone
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(25):
            which = draw.randrange(len(self.prompts))
            body: dict[str, Any] = {"extra_key": draw.choice([None, "a", "b"])}
            if draw.random() < 0.5:
                body["rid"] = f"job-{seed}-{draw.randrange(4)}-"
            patience_s = draw.choice([0.01, 0.1, 0.5, PATIENCE_S, PATIENCE_S])
            found = self.answer(self.prompts[which], patience_s, body)
            if found is not None:
                what = "answered" if found == self.alone[which] else "wrong"
            elif patience_s < PATIENCE_S:
                what = "hung up"
            else:
                what = "name in use" if "rid" in body else "unanswered"
            with self._lock:
                self.counts[what] += 1

    def answer(self, ids: list[int], patience_s: float, body: dict[str, Any]) -> list[int] | None:
        """Return all tokens; ``None`` if the client has hung up, or after a refusal."""
        sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
        given = {"input_ids": ids, "sampling_params": sampling, "stream": True, **body}
        found: list[int] = []
        host = self.client.url.removeprefix("http://")
        with (
            contextlib.closing(http.client.HTTPConnection(host, timeout=PATIENCE_S)) as connection,
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(given), headers)
            connection.sock.settimeout(patience_s)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    found = json.loads(line.removeprefix(b"data: ")).get("output_ids") or []
                elif line.startswith(b"data: [DONE]"):
                    break
        return found if len(found) == ANSWER else None


def test_ranks_agree_and_others_are_answered_when_clients_disconnect(client) -> None:
    """The scheduler alone: test/server/scheduler."""
    prompts = continuing_prompts(12, 5, most_shared=300)
    prompts = [ids[:700] for ids in prompts]
    alone = [client.generate(ids, ANSWER)["output_ids"] for ids in prompts]
    clients = Clients(client, prompts, alone)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(clients.run, range(6)))
    assert clients.counts["wrong"] == clients.counts["unanswered"] == 0, clients.counts
    assert min(clients.counts["answered"], clients.counts["hung up"]) > 20, clients.counts
    client.flush()  # SGLang flushes only an idle server, and checks for leaks
    assert [client.generate(ids, ANSWER)["output_ids"] for ids in prompts] == alone
    until(lambda: not client.rank()["queue"]["waiting_requests"])
    agreed(client)
    assert "Traceback" not in client.server.log_text()
