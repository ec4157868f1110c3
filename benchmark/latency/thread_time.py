"""CPU time of Canopy's work on the scheduler's thread at large sizes, before and after.

    PYTHONPATH=test python benchmark/latency/thread_time.py after
    git archive cd67bd3f python test | tar x -C /tmp/old
    PYTHONPATH=/tmp/old/python:/tmp/old/test python benchmark/latency/thread_time.py before

Each row is the median (or the largest, if the row is named so) thread CPU time of a call. Both runs go
into results/thread_time.json; ``PARTS`` renders results/tables.md.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULTS = Path(__file__).parent / "results" / "thread_time.json"
WAITING, PAGES, TENANTS, BLOCKS = 10_000, 50_000, 10_000, 1_000
MANY_PAGES = 1_000_000


def cpu_ms(call: Callable[[], Any]) -> float:
    begin = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - begin)


class Req:
    """The fields of SGLang's ``Req`` that the queue and the gate read."""

    def __init__(self, number: int, draw: random.Random, tokens: int) -> None:
        from sglang_canopy.radix.live_request import LiveRequest

        self.rid, self.tokens, self.output_ids = f"r{number}", tokens, []
        self.path = [draw.getrandbits(60) for _ in range(32)]
        self.to_finish = self.finished_reason = None
        self.canopy = LiveRequest(
            time=number / 100,
            tenant=f"t{number % 20}",
            conversation=f"c{number}",
            prompt_tokens=512,
            block_tokens=16,
            path=self.path,
        )

    def finished(self) -> bool:
        return self.finished_reason is not None


class Requests:
    """The queue's view of these requests."""

    def __init__(self) -> None:
        from sglang_canopy.schedule.prefill_cost import Prefill

        self._prefill = Prefill

    def tenant(self, _req: Req) -> None:
        return None

    def urgency(self, _req: Req) -> int:
        return 0

    def prefill(self, req: Req, look_up: bool) -> Any:
        return self._prefill(req.tokens)

    def path(self, req: Req) -> tuple[list[int], int]:
        return req.path, 16

    def rest(self, req: Req) -> Any:
        return self._prefill(req.tokens)

    def step_tokens_worth(self) -> float:
        return 100.0

    def step_tokens(self) -> int:
        return 8192


def queue(count: int) -> tuple[Any, Any, list[Req]]:
    from sglang_canopy.schedule.arranged import Arranged
    from sglang_canopy.schedule.bounded_shortest import BoundedShortest
    from sglang_canopy.schedule.prefill_cost import PrefillCost

    draw, order = random.Random(1), BoundedShortest(PrefillCost(8192))
    order.own, order.least_s = 0.001, 0.0  # budgets are nearly used up, as in a long overload
    sizes = (200, 800, 3000, 12000, 60000)
    reqs = [Req(number, draw, draw.choice(sizes)) for number in range(count)]
    return order, Arranged(order, Requests()), reqs


def pass_ms() -> float:
    _, arranged, reqs = queue(WAITING)

    def one() -> None:
        nonlocal reqs
        reqs = arranged.arrange(reqs)
        arranged.deferred([])
        entered = {id(req) for req in arranged.admit(arranged.arranged()[:4])}
        reqs = [req for req in reqs if id(req) not in entered]

    one()
    took = [cpu_ms(one) for _ in range(15)]
    return statistics.median(took)


def predictions_ms() -> float:
    from sglang_canopy.server.scheduler.predictions import Predictions

    order, arranged, reqs = queue(3000)
    predictions = Predictions(order)
    for req in reqs:
        predictions.queued(req, 0.0)
    arranged.arrange(reqs)
    new = getattr(arranged, "entered", None) or arranged.waiting
    return cpu_ms(lambda: predictions.arranged(new, 1.0))


def gate_ms(armed: bool) -> tuple[float, float]:
    """An arrival, and a step, with ``WAITING`` requests."""
    from sglang_canopy.admission.gate import SessionGate
    from sglang_canopy.admission.settings import GateSettings
    from sglang_canopy.server.scheduler.session_gate import ServerGate

    tokens = 10_000 if armed else 1_000_000
    gate, draw = ServerGate(SessionGate(GateSettings(always=armed), tokens)), random.Random(1)
    scheduler = SimpleNamespace(
        waiting_queue=[], chunked_req=None, running_batch=None, last_batch=None
    )
    settle = "report_ended" if hasattr(gate, "report_ended") else "settle"  # as of cd67bd3f
    settled = getattr(gate, settle)

    def arrive(number: int) -> float:
        req = Req(number, draw, 512)
        took = cpu_ms(lambda: gate.request_comes(scheduler, req))
        scheduler.waiting_queue.append(req)
        return took

    setattr(gate, settle, lambda *_: None)  # the queue is filled without its cost
    for number in range(WAITING):
        arrive(number)
    setattr(gate, settle, settled)
    arrivals = [arrive(WAITING + number) for number in range(25)]
    steps = [
        cpu_ms(lambda: gate.with_admitted(scheduler, (None,), lambda: None)) for _ in range(15)
    ]
    return statistics.median(arrivals), statistics.median(steps)


def disk_ms() -> tuple[float, float, float]:
    """A request under a quota for every tenant, the statistics, and clearing."""
    from sglang_canopy.disk.page import PageMeta
    from sglang_canopy.disk.store import DiskStore
    from sglang_canopy.policy.registry import make_policy
    from sglang_canopy.records import Request
    from support.disk_pages import Clock, page_key

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = DiskStore(
            folder,
            page_bytes=64,
            capacity_bytes=64 * 2 * PAGES,
            policy=make_policy("wa"),
            now=Clock(),
            quotas={"*": 1 << 30},
        )
        for begin in range(0, PAGES, 500):
            numbers = range(begin, begin + 500)
            metas = [PageMeta(0, 16, tenant=f"t{n % TENANTS}", category="c") for n in numbers]
            keys = [page_key("p", n) for n in numbers]
            store.write(keys, [b"x" * 64] * 500, metas, [None] * 500)
        request = Request(
            time=2000.0, path=tuple(range(60)), block_tokens=16, prompt_tokens=960, tenant="t1"
        )
        served = [cpu_ms(lambda: (store.arrive(request), store.finish(request))) for _ in range(9)]
        stats = [cpu_ms(store.stats) for _ in range(9)]
        cleared = cpu_ms(store.clear)
        store.close()
    return statistics.median(served), statistics.median(stats), cleared


def million_pages() -> tuple[float, float, float]:
    """Opening a million pages of 100,000 tenants in ms, clearing them, and the longest later slice
    of another thread, 0 if none."""
    from sglang_canopy.disk.page import PageMeta
    from sglang_canopy.disk.store import DiskStore
    from sglang_canopy.policy.registry import make_policy
    from support.disk_pages import Clock, page_key

    def opened(folder: str) -> Any:
        return DiskStore(
            folder,
            page_bytes=64,
            capacity_bytes=128 * MANY_PAGES,
            policy=make_policy("wa"),
            now=Clock(),
        )

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = opened(folder)
        meta = PageMeta(0, 16, tenant="t", conversation="c", category="c")
        store.write([page_key("p", 0)], [b"x" * 64], [meta], [None])
        store.close()
        _multiply(Path(folder))
        stores: list[Any] = []
        opening = cpu_ms(lambda: stores.append(opened(folder)))
        assert len(stores[0]) == MANY_PAGES
        cleared = cpu_ms(stores[0].clear)
        retired = getattr(stores[0].state, "retired", ())
        slices = [ms for one in retired for ms in _release_ms(one)]
        stores[0].close()
    return opening, cleared, max(slices, default=0.0)


def _release_ms(retired: Any) -> list[float]:
    took, over = [], [False]
    while not over.pop():
        took += [cpu_ms(retired.next_stays), cpu_ms(lambda: over.append(retired.release()))]
    return took


def _multiply(folder: Path) -> None:
    """Make ``MANY_PAGES`` records of the only one, in paths of ten pages, one for each tenant."""
    import os
    import sqlite3

    with sqlite3.connect(next(folder.rglob("index.sqlite"))) as index:
        names = [column[1] for column in index.execute("PRAGMA table_info(pages)")]
        first = dict(zip(names, index.execute("SELECT * FROM pages").fetchone()))

        def records() -> Any:
            for n in range(MANY_PAGES):
                yield tuple(
                    {
                        **first,
                        "id": n,
                        "key": n.to_bytes(32, "little"),
                        "parent": n - 1 if n % 10 else -1,
                        "unit": n,
                        "offset": 16 * (n % 10),
                        "tenant": f"t{n // 10}",
                        "conversation": f"c{n // 10}",
                    }.values()
                )

        index.execute("DELETE FROM pages")
        index.executemany(f"INSERT INTO pages VALUES ({','.join('?' * len(names))})", records())
    index.close()
    os.truncate(next(folder.rglob("segment-00000.kv")), 64 * MANY_PAGES)


def meter(rate: int, blocks: int, seconds: int) -> tuple[float, float]:
    """Share of the thread in percent after a minute, and the longest call in ms."""
    from sglang_canopy.records import Request
    from sglang_canopy.whatif.meter import Memory, Meter, MeterSetup

    meter, draw = Meter(MeterSetup(), Memory(1_000_000, 2_000_000), "wa"), random.Random(1)
    talks: dict[int, list[int]] = {}
    took = []
    for number in range(rate * seconds):
        who = draw.randrange(rate * 20)
        path = talks.get(who, [])
        if not path or len(path) > blocks:
            path = [draw.getrandbits(60) for _ in range(blocks // 2)]
        path = talks[who] = path + [draw.getrandbits(60) for _ in range(4)]
        request = Request(
            time=number / rate,
            block_tokens=64,
            prompt_tokens=64 * (len(path) - 2),
            path=path,
            output_tokens=128,
        )
        took.append(cpu_ms(lambda request=request: meter.ended(request, 0)))
    late = took[rate * 60 :]
    return sum(late) / len(late) * rate / 10.0, max(took[1:])


def measure() -> dict[str, float]:
    rows = {"predict": predictions_ms(), "pass": pass_ms()}
    rows["arrive"], _ = gate_ms(armed=False)
    rows["armed arrive"], rows["armed step"] = gate_ms(armed=True)
    rows["twins"], rows["stats"], rows["clear"] = disk_ms()
    rows["meter 20"], rows["meter 20 longest"] = meter(20, BLOCKS, 90)
    rows["meter 200"], rows["meter 200 longest"] = meter(200, 128, 90)
    # Last: Python's collector would visit what is left of it during the other calls.
    rows["open"], rows["clear million"], rows["release"] = million_pages()
    return rows


NAMES = {
    "predict": "3,000 arrivals at once, budgets used up: their predictions, ms",
    "pass": "an ordering pass, 10,000 waiting, budgets used up, ms",
    "arrive": "an arrival at a session gate that is not armed, 10,000 waiting, ms",
    "armed arrive": "the same, armed, ms",
    "armed step": "a step with an armed gate, 10,000 waiting, ms",
    "twins": "a request with a quota for each of 10,000 tenants on disk, ms",
    "stats": "the disk store's statistics, 50,000 pages, each second, ms",
    "clear": "clearing 50,000 pages of 10,000 tenants, ms",
    "open": "opening a million pages of 100,000 tenants, before the server starts, ms",
    "clear million": "clearing a million pages of 100,000 tenants, ms",
    "release": "longest slice in which another thread then releases their memory, ms",
    "meter 20": "the meter at 20 requests per second of 500 to 1,000 blocks, % of the thread",
    "meter 20 longest": "its longest call, ms",
    "meter 200": "the meter at 200 requests per second of 64 to 128 blocks, % of the thread",
    "meter 200 longest": "its longest call, ms",
}


def table() -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = ["| CPU time | before (cd67bd3f) | after |", "|---|---:|---:|"]
    for key, name in NAMES.items():
        before, after = (_figure(found[when].get(key)) for when in ("before", "after"))
        lines.append(f"| {name} | {before} | {after} |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


PARTS = {"table": table}

if __name__ == "__main__":
    which = sys.argv[1]
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found[which] = {key: round(value, 4) for key, value in measure().items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
