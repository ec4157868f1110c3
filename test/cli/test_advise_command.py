"""``canopy advise`` as a user runs it."""

import json

import pytest

from canopy_lab.cli.main import main


@pytest.fixture
def chats(tmp_path):
    """A gateway's log: forty conversations of three turns, which share a system prompt."""
    path = tmp_path / "chats.jsonl"
    with path.open("w") as log_file:
        for i in range(120):
            chat, turn = i % 40, i // 40
            messages = [{"role": "system", "content": "Be brief. " * 60}]
            for earlier in range(turn + 1):
                messages.append({"role": "user", "content": f"secret {chat} {earlier} " * 30})
                messages.append({"role": "assistant", "content": f"{chat}: {earlier} " * 30})
            fields = {"startTime": 1.7e9 + i, "messages": messages[:-1], "completion_tokens": 9}
            log_file.write(json.dumps(fields) + "\n")
    return path


def advise(tmp_path, log, *options):
    out = tmp_path / "page.html"
    common_options = ["--capacity-tokens", "20000", "--out", str(out), "--jobs", "1"]
    return main(["advise", str(log), *common_options, *options]), out


def test_a_log_becomes_a_page_a_summary_and_numbers(chats, tmp_path, capsys):
    json_path = tmp_path / "advice.json"
    status, out = advise(tmp_path, chats, "--json-out", str(json_path), "--host-gb", "8,16")
    printed = capsys.readouterr().out
    assert status == 0
    assert "120 requests" in printed
    assert "16 GB of host memory" in printed
    report = json.loads(json_path.read_text())
    assert report["decision"]["sentence"] in printed
    assert 0.3 < report["repeats"] < 1
    assert report["decision"]["sentence"].split()[0] in ("Use", "Keep")
    assert out.read_text().startswith("<!doctype html>")


def server_log(tmp_path, pool):
    """Write a server's log with a pool of ``pool_tokens``; ``None``: without the line that states it."""
    lines = [] if pool is None else [f"[2026-01-02 03:04:01] max_total_num_tokens={pool}, chunk"]
    for i in range(120):
        ids = [1000 * (i % 40) + token for token in range(64 * (i // 40 + 1))]
        out = {"meta_info": {"completion_tokens": 4, "finish_reason": {"type": "stop"}}}
        for event_name, time_s, fields in (
            ("received", i, {"obj": {}}),
            ("finished", i + 0.5, {"obj": {"input_ids": ids, "text": None}, "out": out}),
        ):
            stamp = f"2026-01-02T03:{time_s // 60:02.0f}:{time_s % 60:09.6f}"
            event = {"timestamp": stamp, "event": f"request.{event_name}", "rid": str(i), **fields}
            lines.append("[2026-01-02 03:04:05] " + json.dumps(event))
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def advise_plainly(tmp_path, log):
    json_path = tmp_path / "n.json"
    out = ["--out", str(tmp_path / "page.html"), "--json-out", str(json_path), "--jobs", "1"]
    assert main(["advise", str(log), *out]) == 0
    return json.loads(json_path.read_text())


def test_the_capacity_is_the_one_in_the_servers_log(tmp_path, capsys):
    report = advise_plainly(tmp_path, server_log(tmp_path, 4096))
    assert report["capacity_tokens"] == 4096
    assert "4,096 tokens (max_total_num_tokens in the log)" in capsys.readouterr().out


def test_without_a_capacity_the_pool_at_which_lru_lost_five_points_is_assumed(tmp_path, capsys):
    report = advise_plainly(tmp_path, server_log(tmp_path, None))
    printed = capsys.readouterr().out.splitlines()
    sentence = report["decision"]["sentence"]
    assert "assumed, the largest at which LRU has lost 5 points" in sentence
    assert "--capacity-tokens" in sentence
    assert sentence in printed
    lru = dict(zip(report["lru"]["tokens"], report["lru"]["hit_ratio"]))
    hit_ratio = max(ratio for tokens, ratio in lru.items() if tokens <= report["capacity_tokens"])
    assert hit_ratio <= report["repeats"] - 0.05 + 1e-9


def test_if_lru_is_advised_the_server_is_only_observed(tmp_path, capsys):
    advise(tmp_path, server_log(tmp_path, 400_000))
    printed = capsys.readouterr().out
    assert "--canopy-observe\n" in printed
    assert "Keep LRU" in printed
