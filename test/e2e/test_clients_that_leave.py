"""Real servers whose clients disconnect at random, retry, and reuse names."""

import contextlib
import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from support.prompts import continuing_prompts, token_ids
from support.served_ranks import agreed

OURS = ("--canopy-queue-order", "bounded-shortest")
GATE = ("--canopy-session-gate", "auto")
PRIORITIES = ("--enable-priority-scheduling", "--default-priority-value", "0")
ANSWER = 4
CLIENTS, ASKS = 8, 40
PATIENCE_S = 120.0
BUSY = ("--page-size", "64", "--chunked-prefill-size", "256", "--max-running-requests", "2")

pytestmark = pytest.mark.long


class Asking:
    """A streamed request whose client may disconnect."""

    def __init__(self, client: Any, ids: list[int], tokens: int = ANSWER, **body: Any) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        given = {"input_ids": ids, "sampling_params": sampling, "stream": True, **body}
        self._connection = http.client.HTTPConnection(
            client.url.removeprefix("http://"), timeout=PATIENCE_S
        )
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/generate", json.dumps(given), headers)

    def hang_up(self) -> None:
        self._connection.close()

    def answer(self, patience_s: float = PATIENCE_S) -> list[int] | None:
        """Return all tokens; ``None`` after a timeout or a refusal."""
        assert self._connection.sock is not None
        self._connection.sock.settimeout(patience_s)
        found: list[int] | None = None
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = self._connection.getresponse()
            for line in answer:
                if line.startswith(b"data: {"):
                    part = json.loads(line.removeprefix(b"data: "))
                    found = part.get("output_ids")
                elif line.startswith(b"data: [DONE]"):
                    return found if found is not None and len(found) == ANSWER else None
        return None


def settled(client: Any) -> dict[str, float]:
    """Return running and waiting requests once there are none, or after a timeout."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = {}
        for line in client.get("/metrics").splitlines():
            for gauge in ("sglang:num_running_reqs", "sglang:num_queue_reqs"):
                if line.startswith(gauge + "{"):
                    found[gauge] = float(line.rsplit(" ", 1)[1])
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def queue_is_empty(client: Any) -> bool:
    """Return whether the queue's status, updated once a second, is empty."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
        if not rank["queue"]["waiting_requests"]:
            return True
        time.sleep(0.2)
    return False


def test_a_retry_after_an_abort_is_answered_under_load(shared_server, tiny_model):
    client = shared_server(tiny_model, "--radix-eviction", "wa", *OURS, *BUSY)
    prompt, over = token_ids(1200, 1), threading.Event()

    def others(seed: int) -> None:
        while not over.is_set():
            seed += 10
            client.generate(token_ids(60, seed), 8)

    threads = [threading.Thread(target=others, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            first = Asking(client, prompt)
            assert first.answer(patience_s=0.05) is None
            first.hang_up()
        assert Asking(client, prompt).answer() is not None
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not any(settled(client).values())


class Clients:
    """Several clients at once, and what became of their requests."""

    def __init__(self, client: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
        self.client, self.prompts, self.alone = client, prompts, alone
        self.counts: Counter[str] = Counter()
        self.wrong: list[int] = []
        self.unanswered: list[int] = []
        self._lock = threading.Lock()

    def run(self, seed: int, priorities: bool) -> None:
        draw = random.Random(seed)
        for number in range(ASKS):
            which = draw.randrange(len(self.prompts))
            body: dict[str, Any] = {"extra_key": draw.choice([None, "a", "b"])}
            if priorities:
                body["priority"] = draw.randrange(3)
            if draw.random() < 0.5:
                body["rid"] = f"job-{seed}-{draw.randrange(4)}-"
            patience_s = draw.choice([0.01, 0.1, 0.5, PATIENCE_S, PATIENCE_S])
            self._ask(which, body, patience_s, number)

    def _ask(self, which: int, body: dict[str, Any], patience_s: float, number: int) -> None:
        asking = Asking(self.client, self.prompts[which], **body)
        found = asking.answer(patience_s)
        asking.hang_up()
        with self._lock:
            if found is not None:
                self.counts["answered"] += 1
                if found != self.alone[which]:
                    self.wrong.append(which)
            elif patience_s < PATIENCE_S:
                self.counts["hang_ups"] += 1
                self.counts["same name next"] += "rid" in body
            elif "rid" in body:
                self.counts["name still in use"] += 1
            else:
                self.unanswered.append(number)


def fuzz(client: Any, priorities: bool = False) -> dict[str, int]:
    prompts = continuing_prompts(12, 5, most_shared=600)
    alone = [client.generate(ids, ANSWER)["output_ids"] for ids in prompts]
    clients = Clients(client, prompts, alone)
    threads = [threading.Thread(target=clients.run, args=(n, priorities)) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients.wrong == []
    assert clients.unanswered == []
    assert not any(settled(client).values())
    client.flush()  # SGLang flushes only an idle server, and checks for leaks
    assert [client.generate(ids, ANSWER)["output_ids"] for ids in prompts] == alone
    assert "Traceback" not in client.server.log_text()
    counts = dict(clients.counts)
    print(counts)
    assert min(counts["answered"], counts["hang_ups"]) > 20
    return counts


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="fcfs"),
        pytest.param(("--schedule-policy", "hrrn"), id="hrrn"),
        pytest.param(OURS, id="ours"),
        pytest.param((*OURS, *GATE, *PRIORITIES), id="ours-gate-priorities"),
    ],
)
def test_other_requests_are_answered_when_one_leaves(server, tiny_model, arguments):
    with server(tiny_model, "--radix-eviction", "wa", *BUSY, *arguments) as client:
        fuzz(client, priorities=PRIORITIES[0] in arguments)
        if OURS[0] in arguments:
            assert queue_is_empty(client)


@pytest.mark.parametrize("gate", [(), GATE], ids=["open", "gate"])
def test_two_ranks_agree_when_any_request_leaves(server, tiny_model, gate):
    cores = sorted(os.sched_getaffinity(0))
    with server(
        tiny_model,
        *("--tp-size", "2", "--radix-eviction", "wa", *BUSY, *OURS, *gate),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    ) as client:
        fuzz(client)
        agreed(client, PATIENCE_S)
