"""Walk through docs/guide/start-here.md: every step on a small log and a small server on the CPU.

    python scripts/journey.py --slice 10 --out benchmark/advise/results/journey.json --pictures docs/figures

The commands are read from the page. The log has sessions among prompts that never repeat
(``test/support/logs.py``), the traffic is similar, and the model has two layers of random weights. The
result has the seconds of each step and the trial's verdict. With a browser, pictures of both pages
are taken.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from launch_server import Server, cpu_arguments, free_port, wait_until_ready

ROOT = Path(__file__).resolve().parents[1]
CANOPY = [sys.executable, "-m", "canopy_lab.cli.main"]
POOL_TOKENS = 6000
"""Size of the KV pool: too small for the open sessions."""
CLIENTS, SESSIONS, TURNS, TURN_TOKENS, SCAN_TOKENS = 2, 8, 6, 170, 660
"""Traffic with the log's sessions and lengths. A client has SESSIONS and continues a random one."""


def commands() -> list[str]:
    """Return the commands of the page's steps, in order."""
    page = (ROOT / "docs" / "guide" / "start-here.md").read_text(encoding="utf-8")
    steps = page[page.index("## 1.") : page.index("## Which logs")]
    return [line[4:] for line in steps.splitlines() if line.startswith("    ")]


ADVISE, START, DOCTOR, SERVE, LOOK, TRIAL, SWITCH, BACK, SWITCH_BACK = commands()


@dataclass(slots=True)
class Walk:
    """Seconds and output of each step."""

    seconds: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def done(self, step: str, output: str) -> None:
        self.seconds[step] = round(time.monotonic() - self.began, 1)
        self.outputs[step] = output
        self.began = time.monotonic()


def on_this_log(command: str, log: Path, *more: str) -> list[str]:
    """The arguments of ``canopy``, with a log in place of LOG and ``more`` before any --start."""
    words = [str(log) if word == "LOG" else word for word in shlex.split(command)][1:]
    at = words.index("--start") if "--start" in words else len(words)
    return [*words[:at], *more, *words[at:]]


def walk(model: Path, log: Path, folder: Path, slice_s: float, pictures: Path | None) -> Walk:
    """All steps in ``folder``; the server is stopped at the end."""
    capacity, made = ("--capacity-tokens", str(POOL_TOKENS), "--jobs", "1"), Walk()
    made.done("advise", run([*CANOPY, *on_this_log(ADVISE, log, *capacity)], folder))
    doctor = shlex.split(DOCTOR.replace("MODEL", str(model)))[1:]
    made.done("doctor", run([*CANOPY, *doctor], folder))
    words = on_this_log(START, log, *capacity)
    server = start(words[: words.index("--start") + 1], model, folder)
    stopped = threading.Event()
    try:
        wait_until_ready(server, 800)
        made.done("start", server.log_text())
        for seed in range(CLIENTS):
            threading.Thread(target=ask, args=(server.url, seed, stopped), daemon=True).start()
        trial = shlex.split(f"{TRIAL} --url {server.url} --slice-s {slice_s:g}")[1:]
        made.done("meter", until_the_meter_knows(server.url))
        made.done("look", look(server.url, folder, pictures))
        made.done("top", run([*CANOPY, "top", "--once", "--url", server.url], folder))
        made.done("trial", run([*CANOPY, *trial], folder))
        back = shlex.split(BACK.replace("http://127.0.0.1:30000", server.url))
        made.done("back", run(back, folder))
    finally:
        stopped.set()
        server.stop(0)
    if pictures is not None:
        picture((folder / "advice.html").as_uri(), pictures / "start-here-advice.png", folder)
    return made


def until_the_meter_knows(url: str) -> str:
    """Return the first line of the server's page, once there are enough requests."""
    while True:
        with urllib.request.urlopen(f"{url}/canopy/status", timeout=60) as answer:
            sentence: str = json.load(answer)["next_step"]
        if not sentence.startswith("Nothing to decide yet"):
            return sentence
        time.sleep(1)


def start(words: list[str], model: Path, folder: Path) -> Server:
    """``canopy advise LOG --start`` of a server with the flags of a CPU."""
    port, log = free_port(), folder / "server.log"
    served = [*cpu_arguments(model, kv_tokens=POOL_TOKENS, dtype="float32"), "--port", str(port)]
    served += ["--load-format", "dummy", "--page-size", "16"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*CANOPY, *words, sys.executable, "-m", "sglang.launch_server", *served],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Server(f"http://127.0.0.1:{port}", log, process)


def run(words: list[str], folder: Path) -> str:
    """Run a command and return its output. Raises ``AssertionError`` for a traceback."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def ask(url: str, seed: int, stopped: threading.Event) -> None:
    """Growing sessions, among prompts that are never repeated."""
    draw, talks = random.Random(seed), [list[int]() for _ in range(SESSIONS)]
    while not stopped.is_set():
        talk = draw.choice(talks)
        if len(talk) == TURNS * TURN_TOKENS:
            talk.clear()
        talk.extend(draw.choices(range(100, 40_000), k=TURN_TOKENS))
        for tokens in (talk, draw.choices(range(100, 40_000), k=SCAN_TOKENS)):
            body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 2}}
            request = urllib.request.Request(
                f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except OSError:
                return


def look(url: str, folder: Path, pictures: Path | None) -> str:
    """``canopy top page`` without a browser of its own: its address, and a picture of it."""
    words = [*CANOPY, *shlex.split(LOOK)[1:], "--no-browser", "--url", url]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline()
        try:
            if pictures is not None:
                picture(printed.split()[0], pictures / "start-here-page.png", folder)
            else:
                assert urllib.request.urlopen(printed.split()[0], timeout=60).status == 200
        finally:
            process.terminate()
    return printed


def picture(url: str, out: Path, folder: Path) -> None:
    """Take a picture of the upper part of a page, if there is a browser."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is not None:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        more = ("--virtual-time-budget=6000", "--window-size=1100,760", f"--screenshot={out}")
        profile = f"--user-data-dir={folder}/browser"
        subprocess.run([browser, *flags, *more, profile, url], check=True, capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slice", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, required=True, metavar="JSON")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    sys.path.append(str(ROOT / "test"))
    from support.logs import agents
    from tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "tiny", ROOT / ".canopy" / "models" / "smollm2-135m-instruct")
        log, pictures = agents(folder / "agents.jsonl"), arguments.pictures
        walked = walk(
            folder / "tiny", log, folder, arguments.slice, pictures and pictures.resolve()
        )
    trial = walked.outputs["trial"].splitlines()
    found = {"slice_s": arguments.slice, "seconds": walked.seconds, "trial": trial}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
