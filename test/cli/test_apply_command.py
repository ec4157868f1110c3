"""``canopy apply`` against servers: the trees are real, HTTP is a few lines."""

from __future__ import annotations

import datetime
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.cli.main import main
from canopy_lab.cli.validate import against_log
from canopy_lab.plan.limits import LIMITS, parse_limits
from canopy_lab.plan.validate import Validation
from sglang_canopy.config.live_plan import part_of
from sglang_canopy.config.plan_file import ServerPlan, read_plan, write_plan
from sglang_canopy.config.server_settings import ServerSettings
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.live_plan import change, in_force
from sglang_canopy.ttl.table import TTLTable
from support.live_tree import LiveTree

FIXED = {"server": {"page_size": 64, "schedule_policy": "fcfs"}, "host_bytes": 1 << 30}
KEY = "the administrator's key"


class Served:
    """A tree behind ``/canopy/plan``."""

    def __init__(self) -> None:
        self.tree = LiveTree(64, "wa", {"quantum_tokens": 1}, host_tokens=128)
        self.refuses = False
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, {"now": in_force(served.tree.core), "fixed": FIXED, "replicas": 1})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                before = in_force(served.tree.core)
                try:
                    if served.refuses:
                        raise CanopyError("not now")
                    if self.headers.get("Authorization") != f"Bearer {KEY}":
                        raise CanopyError("no key")
                    change(served.tree.core, part_of(body))
                except CanopyError as error:
                    self.say(409, {"error": {"message": str(error)}})
                else:
                    self.say(200, {"before": before, "replicas": 1})

            def say(self, code: int, what: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(what).encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def now(self) -> dict[str, Any]:
        return in_force(self.tree.core)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANOPY_API_KEY", KEY)
    found = [Served(), Served()]
    yield found
    for one in found:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(
        path,
        ServerPlan(
            radix_eviction="canopy-lru",
            host_eviction="canopy-slru",
            host_ttl=TTLTable(residual_ttl_s=60.0),
            host_bytes=1 << 31,
            server=ServerSettings(page_size=64, schedule_policy="lpm"),
        ),
    )
    return path


def urls(servers: list[Served]) -> str:
    return ",".join(server.url for server in servers)


def test_a_dry_run_says_what_changes_and_what_needs_a_restart(servers, plan, capsys) -> None:
    before = servers[0].now()
    assert main(["apply", str(plan), "--url", servers[0].url]) == 1
    said = capsys.readouterr().out
    assert "changes         radix_eviction: wa -> canopy-lru" in said
    assert "host_ttl: no expiry -> 60 s for the rest" in said
    assert "needs a restart host_bytes: 1073741824 -> 2147483648" in said
    assert "needs a restart server schedule_policy: fcfs -> lpm" in said
    assert "page_size" not in said
    assert servers[0].now() == before
    assert not list(plan.parent.glob("*.applied.json"))


def test_applied_to_both_and_undone_on_both(servers, plan, capsys) -> None:
    before = [server.now() for server in servers]
    assert main(["apply", str(plan), "--url", urls(servers), "--yes"]) == 0
    for server in servers:
        assert server.now()["radix_eviction"] == "canopy-lru"
        assert server.now()["host_eviction"] == "canopy-slru"
        assert server.now()["host_ttl"]["residual_ttl_s"] == 60.0
    record = plan.with_name("plan.json.applied.json")
    assert record.stat().st_mode & 0o777 == 0o600
    assert KEY not in record.read_text()
    assert main(["apply", str(plan), "--url", urls(servers), "--yes"]) == 0  # it is in force
    assert main(["apply", str(record), "--undo"]) == 0
    assert [server.now() for server in servers] == before
    assert main(["apply", str(record), "--undo"]) == 2
    assert "undone already: asked for" in capsys.readouterr().err


def test_a_server_that_refuses_leaves_none_changed(servers, plan, capsys) -> None:
    before, servers[1].refuses = [server.now() for server in servers], True
    assert main(["apply", str(plan), "--url", urls(servers), "--yes"]) == 2
    assert "not now" in capsys.readouterr().err
    servers[1].refuses = False
    assert [server.now() for server in servers] == before


def test_what_could_not_be_undone_can_be_tried_again(servers, plan, capsys) -> None:
    before = servers[0].now()
    assert main(["apply", str(plan), "--url", servers[0].url, "--yes"]) == 0
    record = str(plan) + ".applied.json"
    servers[0].refuses = True
    assert main(["apply", record, "--undo"]) == 1
    assert main(["apply", str(plan), "--url", servers[1].url, "--yes"]) == 2  # not over a record
    assert "undo it" in capsys.readouterr().err
    servers[0].refuses = False
    assert main(["apply", record, "--undo"]) == 0
    assert servers[0].now() == before


def test_the_key_is_needed(servers, plan, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CANOPY_API_KEY", "a guess")
    before = servers[0].now()
    assert main(["apply", str(plan), "--url", servers[0].url, "--yes"]) == 2
    assert "no key" in capsys.readouterr().err
    assert servers[0].now() == before


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "x"}', '{"format": "canopy-applied"}'])
def test_a_bad_record_is_refused(tmp_path, text, capsys) -> None:
    path = tmp_path / "record"
    path.write_text(text)
    assert main(["apply", str(path), "--undo"]) == 2
    assert "no record of canopy apply" in capsys.readouterr().err


def test_a_bad_plan_is_refused(servers, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1, "host_ttl": {"residual_ttl_s": -1}}')
    assert main(["apply", str(path), "--url", servers[0].url, "--yes"]) == 2
    assert "residual_ttl_s must be seconds" in capsys.readouterr().err
    groups = {"groups": [{"root": 1, "ttl_s": 1}], "hash": "trace"}
    path.write_text(json.dumps({"version": 1, "host_ttl": groups}))
    assert main(["apply", str(path), "--url", servers[0].url, "--yes"]) == 2
    assert "does not know" in capsys.readouterr().err


def log_of(path: Path, began: float, hits: float) -> Path:
    """What SGLang logs of forty requests, each answered before the next, from ``began`` on."""
    lines = []

    def line(kind: str, at: float, body: dict[str, Any]) -> None:
        stamp = datetime.datetime.fromtimestamp(began + at, datetime.UTC).isoformat()
        lines.append(json.dumps({"timestamp": stamp, "event": f"request.{kind}", **body}))

    for at in range(40):
        ids = [at % 2 + 5, *range(640)]
        obj = {"input_ids": ids, "sampling_params": {}}
        line("received", at, {"rid": str(at), "obj": obj})
        meta = {"completion_tokens": 4, "finish_reason": {"type": "stop"}, "e2e_latency": 0.2,
                "cached_tokens": int(hits * len(ids)) if at > 1 else 0,
                "request_received_ts": at + 1.0, "prefill_finished_time": at + 1.1}  # fmt: skip
        line("finished", at + 0.2, {"rid": str(at), "obj": obj, "out": {"meta_info": meta}})
    path.write_text("".join(text + "\n" for text in lines))
    return path


@pytest.mark.parametrize(("hits", "stays"), [(0.9985, True), (0.4, False)])
def test_a_missed_prediction_takes_the_plan_back_by_itself(
    servers, tmp_path, capsys, hits, stays
) -> None:
    """The TTFT of this log is nobody's: only hits are held against the limits."""
    path = tmp_path / "plan.json"
    settings = ServerSettings(page_size=64, max_total_tokens=20_000)
    write_plan(path, ServerPlan(radix_eviction="canopy-lru", server=settings))
    before = servers[0].now()
    log = log_of(tmp_path / "server.log", time.time() + 1, hits)
    command = ["apply", str(path), "--url", servers[0].url, "--yes", "--after", "0"]
    command += ["--log", str(log), "--profile", "llama-3.1-8b-a100", "--limits", "1e6,1e6,2"]
    command += ["--least-requests", "30"]
    assert main(command) == (0 if stays else 3)
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "plan.json.applied.json").read_text())
    if stays:
        assert "the plan stays" in said
        assert servers[0].now()["radix_eviction"] == "canopy-lru"
        assert record["undone"] is None
    else:
        assert "points off, 2 are allowed" in said
        assert servers[0].now() == before
        assert "token hit ratio" in record["undone"]


def test_few_requests_take_nothing_back(servers, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    settings = ServerSettings(page_size=64, max_total_tokens=20_000)
    write_plan(path, ServerPlan(radix_eviction="canopy-lru", server=settings))
    log = log_of(tmp_path / "server.log", time.time() + 1, 0.4)  # a prediction that was missed
    command = ["apply", str(path), "--url", servers[0].url, "--yes", "--after", "0", "--log",
               str(log), "--profile", "llama-3.1-8b-a100"]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Fewer than 200 requests are too few to judge by: the plan stays" in said
    record = tmp_path / "plan.json.applied.json"
    assert servers[0].now()["radix_eviction"] == "canopy-lru"
    assert main(["apply", str(record), "--check", *command[-4:], "--least-requests", "30"]) == 3
    assert "Undone." in capsys.readouterr().out


def test_requests_from_before_the_plan_are_not_held_against_it(servers, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, ServerPlan(radix_eviction="canopy-lru"))
    log = log_of(tmp_path / "server.log", time.time() - 3600, 0.5)
    command = ["apply", str(path), "--url", servers[0].url, "--yes", "--after", "0", "--log",
               str(log), "--profile", "llama-3.1-8b-a100", "--device-tokens", "20000"]  # fmt: skip
    assert main(command) == 2
    assert "only 0 of 40 requests" in capsys.readouterr().err
    assert read_plan(path).radix_eviction == servers[0].now()["radix_eviction"]


def test_what_came_before_fills_the_simulations_cache_too(tmp_path) -> None:
    """The last twenty requests of forty: each finds what the first two left."""
    began = time.time()
    log = log_of(tmp_path / "server.log", began, 0.9985)
    plan = ServerPlan(radix_eviction="canopy-lru", server=ServerSettings(max_total_tokens=20_000))
    found = against_log(str(log), plan, "llama-3.1-8b-a100", began + 19.5)
    assert found.requests == 20
    assert abs(found.error("token_hit_ratio")) < 0.002


def test_limits_are_the_papers_or_a_flag() -> None:
    assert str(LIMITS) == "19.2,6.5,2"
    seen = {"mean_ttft_s": 1.0, "throughput_tokens_per_s": 100.0, "token_hit_ratio": 0.5}
    off = {"mean_ttft_s": 1.19, "throughput_tokens_per_s": 94.0, "token_hit_ratio": 0.481}
    assert LIMITS.missed(Validation(9, seen, off)) == []
    assert len(LIMITS.missed(Validation(9, seen, {**off, "mean_ttft_s": 0.8}))) == 1
    assert len(parse_limits("1,1,1").missed(Validation(9, seen, off))) == 3
    for text in ("1,2", "a,b,c", "1,2,0", "nan,1,1", ""):
        with pytest.raises(CanopyError, match="--limits must be three numbers"):
            parse_limits(text)
