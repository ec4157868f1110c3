"""Our order of the queue on real servers over HTTP, and on two ranks."""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.prompts import continuing_prompts, token_ids
from support.served_ranks import agreed

PAGE = 64
PATIENCE_S = 60.0
OURS = ("--canopy-queue-order", "bounded-shortest")


def prompts(count: int, seed: int) -> list[list[int]]:
    return continuing_prompts(count, seed, most_shared=900)


def all_at_once(client: Any, asked: Sequence[list[int]], **more: Any) -> list[list[int]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda ids: client.generate(ids, tokens=4, **more), asked))
    return [answer["output_ids"] for answer in answers]


def one_by_one(client: Any, asked: Sequence[list[int]]) -> list[list[int]]:
    return [client.generate(ids, tokens=4)["output_ids"] for ids in asked]


@pytest.fixture
def ours(shared_server, smollm2):
    """Chunked prefill, pages of 64, priorities, and so little room that requests wait."""
    return shared_server(
        smollm2,
        *("--radix-eviction", "wa", *OURS, "--page-size", str(PAGE)),
        *("--chunked-prefill-size", "256", "--max-running-requests", "3"),
        *("--enable-priority-scheduling", "--disable-priority-preemption"),
        *("--default-priority-value", "0"),
        *("--decode-log-interval", "4"),  # as often are the gauges brought up to date
        kv_tokens=8192,
    )


@pytest.mark.long
def test_every_answer_equals_the_answer_alone(ours) -> None:
    asked = prompts(24, seed=1)
    alone = one_by_one(ours, asked)
    ours.flush()
    assert all_at_once(ours, asked) == alone
    assert "Traceback" not in ours.server.log_text()


def order_of_answers(client: Any, asked: Sequence[dict[str, Any]]) -> list[int]:
    """Occupy the server with long answers until all of ``asked`` wait; return the order of answers."""
    order: list[int] = []

    def ask(number: int) -> None:
        client.generate(asked[number].pop("ids"), tokens=1, **asked[number])
        order.append(number)

    held = [
        threading.Thread(target=client.generate, args=(token_ids(8, 900 + i), 160))
        for i in range(3)
    ]
    for thread in held:
        thread.start()
    wait_for(client, "sglang:num_running_reqs", 3)
    threads = []
    for number in range(len(asked)):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        wait_for(client, "sglang:num_queue_reqs", number + 1)
    for thread in [*held, *threads]:
        thread.join()
    return order


def wait_for(client: Any, gauge: str, least: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for line in client.get("/metrics").splitlines():
            if line.startswith(gauge + "{") and float(line.rsplit(" ", 1)[1]) >= least:
                return
        time.sleep(0.02)
    raise AssertionError(f"{gauge} never reached {least}")


@pytest.mark.long
def test_short_requests_overtake_and_priorities_come_first(ours) -> None:
    long = [{"ids": token_ids(700, seed)} for seed in (1, 2, 3)]
    short = [{"ids": token_ids(20, seed)} for seed in (4, 5, 6)]
    urgent = [{"ids": token_ids(700, seed), "priority": 5} for seed in (7, 8)]
    order = order_of_answers(ours, [*long, *short, *urgent])
    place = {number: at for at, number in enumerate(order)}
    assert max(place[6], place[7]) < 4  # three run at a time: one more may end with them
    assert sum(place[n] for n in (3, 4, 5)) < sum(place[n] for n in (0, 1, 2))


@pytest.mark.long
def test_two_ranks_serve_one_order(shared_server, tiny_model) -> None:
    cores = sorted(os.sched_getaffinity(0))
    client = shared_server(
        tiny_model,
        *("--tp-size", "2", "--radix-eviction", "wa", *OURS, "--max-running-requests", "3"),
        kv_tokens=4096,
        environment={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    )
    for seed in range(4):
        all_at_once(client, prompts(40, seed))
    first = agreed(client, PATIENCE_S)
    assert first["agreement"]["victims"] > 0
    assert first["agreement"]["records_disagreed"] == 0
    assert "Traceback" not in client.server.log_text()
