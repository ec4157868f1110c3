"""`canopy top` against a small HTTP server on loopback that answers as a Canopy server does."""

import contextlib
import copy
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from canopy_lab.cli.main import main
from canopy_lab.live.top.frame import frame, percent, plain, seconds
from canopy_lab.live.top.source import fetch, fetch_all
from launch_server import free_port
from sglang_canopy.errors import CanopyError


def tier(hits: int, **more: Any) -> dict[str, Any]:
    return {
        "capacity_bytes": 4_000_000,
        "used_bytes": 3_000_000,
        "hit_tokens": hits,
        "hit_tokens_last_minute": hits // 2,
        "entered_tokens": 900,
        "demoted_tokens": 30,
        "evicted_tokens": {"capacity": 70, "ttl": 0, "trim": 5, "quota": 0},
        **more,
    }


RANK: dict[str, Any] = {
    "rank": 0,
    "uptime_s": 100.0,
    "reporting_s": 0.05,
    "policies": {"device": "wa", "host": "wa", "disk": "lru"},
    "prompt_tokens": 1000,
    "prompt_tokens_last_minute": 500,
    "history": [[10, 0], [0, 0], [10, 10]],
    "history_point_s": 5.0,
    "tiers": {
        "device": tier(300),
        "host": tier(80),
        "disk": tier(20, evicted_tokens={"capacity": 1, "ttl": 44, "corrupt": 2}),
    },
    "categories": [
        {
            "category": "chat",
            "requests": 7,
            "prompt_tokens": 1000,
            "miss_tokens": 600,
            "hit_tokens": {"device": 300, "host": 80, "disk": 20},
            "evicted_tokens": {"device": 75, "host": 75, "disk": 0},
            "held_tokens": {"device": 640, "host": 320},
        }
    ],
    "groups": [
        {"tier": "disk", "group": "0", "name": "system prompt", "ttl_s": 7200.0},
        {"tier": "disk", "group": "residual", "name": "every other prefix", "ttl_s": None},
    ],
    "disk": {"faults": {"corrupt": 2}},
}
STATUS: dict[str, Any] = {
    "version": "9.9",
    "policy": "wa",
    "policy_config": {},
    "uptime_s": 120.0,
    "ranks": [RANK],
}


@contextlib.contextmanager
def answering(answer: Any, code: int = 200, key: str | None = None) -> Iterator[str]:
    """A server that answers every GET with `answer` (JSON, or a string as it is)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            denied = key is not None and self.headers.get("Authorization") != f"Bearer {key}"
            self.send_response(401 if denied else code)
            self.end_headers()
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shown(status: dict[str, Any]) -> str:
    with answering(status) as url:
        return frame(fetch(url))


# ---- a frame ----


def test_a_frame_has_tiers_ratios_reasons_categories_and_groups() -> None:
    text = shown(STATUS)
    assert "sglang-canopy 9.9" in text
    assert "40.0 % of 1000 prompt tokens hit: device 30.0 %  host 8.0 %  disk 2.0 %" in text
    assert "40.0 % of 500 prompt tokens hit" in text
    for heading in ("capacity", "ttl", "trim", "quota", "corrupt", "demoted", "held: device"):
        assert heading in text
    assert "75 %" in text
    assert "3MB" in text
    assert "system prompt" in text
    assert "2 h" in text
    assert "no expiry" in text
    assert "disk faults answered by recomputation: corrupt 2" in text


def test_each_tier_is_shown_with_the_policy_that_ranks_there() -> None:
    policies = {"device": "wa", "host": "canopy-lru", "disk": "lru"}
    text = shown({**STATUS, "ranks": [{**RANK, "policies": policies}]})
    rows = re.findall(r"\b(device|host|disk) +(wa|canopy-lru|lru)\b", text)
    assert dict(rows) == policies


WHATIF: dict[str, Any] = {
    "running": "lru",
    "hit_ratio": 0.41,
    "arms": [
        {"policy": p, "capacity": c, "hit_ratio": h, "standard_error": 0.004, "running": r}
        for p, c, h, r in (
            ("lru", "now", 0.41, True),
            ("wa", "now", 0.47, False),
            ("wa", "host x2", 0.58, False),
        )
    ],
    "sampled_requests": 4200,
    "one_block_in": 8,
}


def test_estimates_of_other_policies_are_shown() -> None:
    text = shown({**STATUS, "whatif": WHATIF})
    assert "40.0 % of 1000 prompt tokens hit" in text
    for part in ("host x2", "47.0 % ± 0.8", "58.0 % ± 0.8", "lru runs and hits 41.0 %"):
        assert part in text


def test_a_meter_without_samples_reports_no_figures() -> None:
    undecided = {**WHATIF, "undecided": "too few requests: 5 of 200"}
    text = shown({**STATUS, "whatif": undecided})
    assert "too few requests: 5 of 200" in text
    assert "47.0 %" not in text


def test_a_server_that_is_only_watched_has_a_frame_too() -> None:
    text = shown({**STATUS, "policy": "lru", "ranks": [], "whatif": WHATIF})
    assert "one block in 8" in text
    assert "prompt tokens hit:" not in text


def test_replicas_are_added_up() -> None:
    status = copy.deepcopy(STATUS)
    second = copy.deepcopy(RANK)
    second["history"] = [[10, 10]]
    status["ranks"] = [RANK, second]
    with answering(status) as url:
        found = fetch(url)
    assert found["tiers"]["device"]["hit_tokens"] == 600
    assert found["tiers"]["disk"]["evicted_tokens"] == {"capacity": 2, "ttl": 88, "corrupt": 4}
    assert found["history"] == [(20, 20)]
    assert found["categories"][0]["requests"] == 14
    assert "2 replicas" in shown(status)


def test_a_tier_of_unknown_size_is_shown_as_not_known() -> None:
    status = copy.deepcopy(STATUS)
    status["ranks"][0]["tiers"]["disk"] |= {"capacity_bytes": None, "used_bytes": None}
    assert "not known" in shown(status)


def test_a_server_that_served_nothing_divides_by_nothing() -> None:
    status = copy.deepcopy(STATUS)
    rank = status["ranks"][0]
    rank |= {"prompt_tokens": 0, "prompt_tokens_last_minute": 0, "history": [], "categories": []}
    assert "- of 0 prompt tokens" in shown(status)


def test_names_cannot_drive_the_terminal() -> None:
    status = copy.deepcopy(STATUS)
    status["ranks"][0]["groups"][0]["name"] = "\x1b[2J[red]x\u202e"
    text = shown(status)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "?[2J[red]x?" in text
    assert plain("x" * 99, 8) == "xxxxxxx…"


def test_many_categories_end_in_a_line() -> None:
    status = copy.deepcopy(STATUS)
    one = RANK["categories"][0]
    status["ranks"][0]["categories"] = [{**one, "category": f"c{n}"} for n in range(33)]
    assert "17 more categories" in shown(status)


def test_numbers_read_well() -> None:
    assert [seconds(s) for s in (None, 0.5, 90, 120, 7200, 172_800)] == [
        "no expiry",
        "0.5 s",
        "90 s",
        "2 min",
        "2 h",
        "2 d",
    ]
    assert percent(1, 0) == "-"


# ---- the command ----


def test_one_frame_is_printed_without_a_terminal(capsys) -> None:
    with answering(STATUS) as url:
        assert main(["top", "--url", url, "--once"]) == 0
    assert "sglang-canopy 9.9" in capsys.readouterr().out


def test_json_is_for_scripts(capsys) -> None:
    with answering(STATUS) as url:
        assert main(["top", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"]["host"]["hit_tokens"] == 80


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ("not found", 404, "has no /canopy/status"),
        ("<html>", 200, "is not JSON"),
        ({"hello": 1}, 200, "is not Canopy's"),
        ({**STATUS, "policy": "lru", "ranks": []}, 200, "SGLang's own policy 'lru'"),
        ({**STATUS, "policy": None, "ranks": []}, 200, "runs no eviction policy"),
        ("oops", 500, "answers 500"),
    ],
)
def test_other_servers_are_reported_in_one_line(answer, code, says, capsys) -> None:
    with answering(answer, code) as url:
        assert main(["top", "--url", url, "--once"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("canopy top: ")
    assert error.count("\n") == 1


def test_a_missing_server_is_reported_in_one_line(capsys) -> None:
    assert main(["top", "--url", f"http://127.0.0.1:{free_port()}", "--once"]) == 2
    assert "no server answers at http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "file:///etc/passwd", ""])
def test_a_url_that_is_none_is_refused(url) -> None:
    with pytest.raises(CanopyError, match="--url must be like"):
        fetch(url)


def test_an_api_key_is_sent() -> None:
    with answering(STATUS, key="secret") as url:
        with pytest.raises(CanopyError, match="give --api-key"):
            fetch(url)
        assert fetch(url, "secret")["policy"] == "wa"


def test_the_interval_has_a_floor(capsys) -> None:
    assert main(["top", "--watch-s", "0"]) == 2
    assert "--watch-s must be at least 0.2" in capsys.readouterr().err


def test_watching_and_one_status_exclude_each_other(capsys) -> None:
    assert main(["top", "--watch-s", "1", "--json"]) == 2
    assert "--watch-s runs until Ctrl-C" in capsys.readouterr().err


def test_watching_continues_while_the_server_does_not_answer() -> None:
    command = [sys.executable, "-m", "canopy_lab.cli.main", "top", "--watch-s", "0.2"]
    with answering(STATUS) as url:
        watch = subprocess.Popen([*command, "--url", url], stdout=subprocess.PIPE, text=True)
        assert watch.stdout is not None
        assert "sglang-canopy 9.9" in watch.stdout.readline()
    try:
        assert any("no answer for" in line for line in watch.stdout)
    finally:
        watch.kill()
        watch.wait()


# ---- several servers ----


def test_several_servers_are_added_up_and_shown_one_by_one() -> None:
    host = copy.deepcopy(STATUS)
    device = copy.deepcopy(STATUS)
    for name in ("host", "disk"):
        del device["ranks"][0]["tiers"][name], device["ranks"][0]["policies"][name]
    device["ranks"][0]["prompt_tokens"] = 3000
    with answering(device) as a, answering(host) as b:
        found = fetch_all([a, b])
        one = fetch(b)
    assert found["prompt_tokens"] == 4000
    assert found["tiers"]["device"]["hit_tokens"] == 600
    assert found["tiers"]["disk"] == one["tiers"]["disk"]
    assert found["policies"] == one["policies"]
    (chat,) = found["categories"]
    assert (chat["requests"], chat["hit_tokens"]["host"]) == (14, 160)
    assert [(w["url"], w["prompt_tokens"], w["hit_tokens"]) for w in found["workers"]] == [
        (a, 3000, 300),
        (b, 1000, 400),
    ]
    assert "2 servers, 2 replicas added up" in frame(found)
    assert a in frame(found)
    assert "10.0 %" in frame(found)


def test_one_of_several_that_does_not_answer_is_named_and_the_others_count() -> None:
    with answering(STATUS) as url:
        gone = f"http://127.0.0.1:{free_port()}"
        found = fetch_all([gone, url])
    assert found["prompt_tokens"] == 1000
    assert "no server answers" in found["workers"][0]["error"]
    assert gone in frame(found)


def test_no_answer_from_several_servers_is_reported() -> None:
    with pytest.raises(CanopyError, match="no server answers"):
        fetch_all([f"http://127.0.0.1:{free_port()}" for _ in range(2)])


def test_estimates_of_other_capacities_are_not_summed() -> None:
    with answering({**STATUS, "whatif": WHATIF}) as url:
        assert "whatif" not in fetch_all([url, url])
        assert fetch_all([url])["whatif"] == WHATIF


def test_the_command_takes_several_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(STATUS) as a, answering(STATUS) as b:
        assert main(["top", "--once", "--url", f"{a}, {b}"]) == 0
    assert "2 servers" in capsys.readouterr().out
