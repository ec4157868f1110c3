"""Every command of "Start here" is run: those that need no server here, the others on a real one."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from canopy_lab.cli.main import main
from support.logs import agents
from support.prompts import token_ids

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "start-here.md").read_text(encoding="utf-8")
ADVISE = "canopy advise LOG"
START = "canopy advise LOG --start sglang serve MODEL"
DOCTOR = "canopy doctor sglang serve MODEL --canopy-plan advice.plan.json"
SERVE = "sglang serve MODEL --canopy-plan advice.plan.json --canopy-whatif auto,floor=off"
LOOK = "canopy top page"
TRIAL = "canopy trial --policy wa"
SWITCHED = ("sglang serve MODEL --radix-eviction auto", "sglang serve MODEL --radix-eviction lru")
BACK = (
    "curl -X POST http://127.0.0.1:30000/canopy/policy "
    """-d '{"device": "canopy-lru"}'"""
)
POOL = 6000


def test_these_are_the_commands_of_the_page() -> None:
    steps = PAGE[PAGE.index("## 1.") : PAGE.index("## Which logs")]
    found = [line[4:] for line in steps.splitlines() if line.startswith("    ")]
    assert found == [ADVISE, START, DOCTOR, SERVE, LOOK, TRIAL, SWITCHED[0], BACK, SWITCHED[1]]


def on_this_log(command: str, log: Path, *more: str) -> list[str]:
    """The arguments of ``canopy``, with a log in place of LOG and ``more`` before any --start."""
    words = [str(log) if word == "LOG" else word for word in shlex.split(command)][1:]
    at = words.index("--start") if "--start" in words else len(words)
    return [*words[:at], *more, *words[at:]]


def test_a_log_becomes_a_server_that_can_be_tried(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line

    monkeypatch.chdir(tmp_path)
    log, ran = agents(tmp_path / "agents.jsonl"), []
    monkeypatch.setattr("canopy_lab.cli.advise.os.execvp", lambda *a: ran.append(a[1]))
    main(on_this_log(START, log, "--capacity-tokens", str(POOL), "--jobs", "1"))
    said = capsys.readouterr().out
    assert ran == [shlex.split(SERVE)]
    assert "Use auto (wa ranks)" in said
    assert (tmp_path / "advice.html").exists()
    for line in (SERVE, *SWITCHED):
        given = command_line.parse(command_line.server_arguments(shlex.split(line)))
        assert not command_line.refused(given), line


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_journey_on_a_real_server(tiny_model, tmp_path) -> None:
    """Advice starts the server; doctor passes it; meter, trial and the way back answer."""
    from launch_server import Server, cpu_arguments, free_port, wait_until_ready

    canopy = [sys.executable, "-m", "canopy_lab.cli.main"]
    log, port = agents(tmp_path / "agents.jsonl"), free_port()
    served = [*cpu_arguments(tiny_model, kv_tokens=2048, dtype="float32"), "--port", str(port)]
    served += ["--load-format", "dummy", "--page-size", "16"]
    words = on_this_log(START, log, "--capacity-tokens", str(POOL), "--jobs", "1")
    words = words[: words.index("--start") + 1]
    said = tmp_path / "server.log"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*canopy, *words, sys.executable, "-m", "sglang.launch_server", *served],
            cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", said, process)
    stopped = threading.Event()
    try:
        wait_until_ready(server, 800)
        asking = [threading.Thread(target=ask, args=(server.url, k, stopped)) for k in range(2)]
        for thread in asking:
            thread.start()
        steps = f"--url {server.url} --slice 2"
        trial = run([*canopy, *on_this_log(f"{TRIAL} {steps}", log)], tmp_path)
        while "too few requests" in trial or "has not filled" in trial:
            trial = run([*canopy, *on_this_log(f"{TRIAL} {steps}", log)], tmp_path)
        shown = run([*canopy, "top", "--once", "--url", server.url], tmp_path)
        doctor = run(
            [*canopy, *shlex.split(DOCTOR.replace("MODEL", str(tiny_model)))[1:]], tmp_path
        )
        back = shlex.split(BACK.replace("http://127.0.0.1:30000", server.url))
        answer = json.loads(run(back, tmp_path))
    finally:
        stopped.set()
        server.stop(0)
    assert re.search(r"^(pair 6|Nothing to try)", trial, re.M), trial
    assert "Keep " in shown or "would find" in shown or "Nothing to decide" in shown
    assert "refused" not in doctor.lower() or "nothing is refused" in doctor.lower()
    assert answer == {"device": "canopy-lru", "replicas": 1}


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def ask(url: str, seed: int, stopped: threading.Event) -> None:
    """Sessions that grow, among prompts that never come again."""
    import urllib.request

    draw, talks = random.Random(seed), [list[int]() for _ in range(6)]
    while not stopped.is_set():
        talk = draw.choice(talks)
        if len(talk) > 400:
            talk.clear()
        talk.extend(token_ids(64, draw.randrange(10**6)))
        for tokens in (talk, token_ids(300, draw.randrange(10**6))):
            body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 2}}
            request = urllib.request.Request(
                f"{url}/generate",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except OSError:
                return
