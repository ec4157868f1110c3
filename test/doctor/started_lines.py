"""Servers of ``public_lines`` on this machine: what each does, and which parts of ``auto`` it has.

A line keeps its flags, but for those of hardware: one node, at most two ranks, a model of two layers without
weights, and SGLang's kernels for CPUs.
"""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

from doctor.public_lines import Line
from launch_server import Server, cpu_arguments, free_port
from support import forked
from support.small_models import LLAMA, VOCABULARY, change_config, write_adapter, write_model
from tiny_model import write_tiny_model

AUTO = "--radix-eviction auto"
READY_S = 400.0
HARDWARE = {
    "--attention-backend": 1, "--dist-init-addr": 1, "--enable-torch-compile": 0,
    "--disaggregation-ib-device": 1, "--hicache-size": 1, "--host": 1, "--mem-fraction": 1,
    "--mem-fraction-static": 1, "--moe-a2a-backend": 1, "--moe-runner-backend": 1,
    "--nccl-init-addr": 1, "--node-rank": 1, "--nnodes": 1, "--port": 1, "--quantization": 1,
}  # fmt: skip
"""Flags that a server here goes without, and their number of values."""
RANKS = {
    "--dp", "--dp-size", "--ep-size", "--expert-parallel-size", "--moe-dense-tp-size", "--tp",
    "--tp-size", "--tensor-parallel-size",
}  # fmt: skip
SLOW_MACHINE = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
"""SGLang ends a worker that imports for longer than ten seconds."""
PLAIN = {("--hicache-storage-backend", "mooncake"): "file"}
"""Values whose packages are not installed here, by flag, and what replaces them."""
DRAFT, ALGORITHM = "--speculative-draft-model-path", "--speculative-algorithm"
DRAFTS = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
"""Architectures of draft models, by algorithm."""
HEAD = {"tie_word_embeddings": False, "draft_vocab_size": VOCABULARY}
"""An EAGLE draft replaces its output head."""


def arguments(line: Line) -> list[str]:
    """Return the server's arguments of a line; ``M`` is the model."""
    script = line.command.replace("\\\n", " ").replace("AUTO", AUTO)
    if "args: [" in script:
        script = f"--model-path M --host 0.0.0.0 --port 30000 {AUTO}"
    elif "command:\n" in script:
        script = script.partition("command:\n")[2]
    elif "\n" not in script:
        script += f" {AUTO}"
    return shlex.split(script.rpartition("sglang.launch_server")[2] or script)


def on_this_machine(given: list[str], model: Path, adapters: list[str]) -> list[str]:
    """Return ``given`` without hardware, on ``model``. ``adapters``: values of ``--lora-paths``."""
    found: list[str] = []
    words = iter(given)
    drafts = {DRAFT: model.with_name(given[given.index(ALGORITHM) + 1])} if DRAFT in given else {}
    for word in words:
        if word in HARDWARE:
            for _ in range(HARDWARE[word]):
                next(words)
        elif word in RANKS:
            found += [word, str(min(2, int(next(words))))]
        elif word == "--lora-paths":
            for _ in adapters:
                next(words)
            found += [word, *adapters, "--lora-backend", "torch_native"]
        else:
            flag = found[-1] if found else ""
            path = drafts.get(flag, model)
            found.append(str(path) if word == "M" else PLAIN.get((flag, word), word))
    cpu = cpu_arguments(model, kv_tokens=4096, dtype="float32")[2:]
    # SGLang's CPU engine hangs at the first batch of some of them, with its own policies too.
    found += [*cpu, "--skip-server-warmup"]
    return found if "--lora-paths" in found else [*found, "--load-format", "dummy"]


def started(words: list[str], log: Path) -> dict[str, Any]:
    """Start a server. Return ``parts``, or ``stopped``, the end of its log."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", *words, "--port", str(port)]
    more = SLOW_MACHINE if "--tokenizer-worker-num" in words else {}
    if (ranks := _ranks(words)) > 1:
        more = {**more, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)}
    with log.open("wb") as output:
        process = forked.serve(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **more},
            start_new_session=True,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", log, process)  # type: ignore[arg-type]
    deadline = time.monotonic() + READY_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            parts = _parts(server.url)
            if parts is not None:
                return {"parts": parts}
            time.sleep(0.5)
    finally:
        server.stop(0.0)
    return {"stopped": server.log_text()[-20_000:]}


def _ranks(words: list[str]) -> int:
    """Return the number of schedulers."""
    size = {flag: int(value) for flag, value in pairwise(words) if flag in RANKS}
    tensor = max((size[flag] for flag in size if flag.startswith("--t")), default=1)
    data = max((size[flag] for flag in size if flag.startswith("--d")), default=1)
    return tensor if "--enable-dp-attention" in words else tensor * data


def _parts(url: str) -> list[dict[str, Any]] | None:
    """Return the parts of ``auto`` of a server that is up."""
    try:
        with urllib.request.urlopen(f"{url}/canopy/status", timeout=5.0) as answer:
            found: list[dict[str, Any]] | None = json.load(answer)["auto_parts"]
            return found
    except (urllib.error.URLError, OSError, ValueError):
        return None


def models(folder: Path, smollm2: Path) -> tuple[Path, Path, list[str]]:
    """Write a tiny model, and one with two adapters, in the form of ``--lora-paths``."""
    tiny = folder / "tiny"
    write_tiny_model(tiny, smollm2)
    for algorithm, architecture in DRAFTS.items():
        write_tiny_model(draft := folder / algorithm, smollm2)
        change_config(draft, architectures=[architecture], num_hidden_layers=1, **HEAD)
    change_config(tiny, tie_word_embeddings=False)
    adapted = write_model(folder / "adapted", smollm2, LLAMA)
    names = ("lora0", "lora1")
    paths = [f"{a}={write_adapter(folder / a, adapted, n)}" for n, a in enumerate(names)]
    return tiny, adapted, paths


def words_of(line: Line, made: tuple[Path, Path, list[str]]) -> list[str]:
    """Return the arguments of the server that ``line`` starts here. ``made``: by ``models``."""
    tiny, adapted, adapters = made
    model = adapted if "--lora-paths" in line.command else tiny
    return on_this_machine(arguments(line), model, adapters)


def compared(line: Line, report: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a row: the answers of the doctor and of the server, and whether they agree.

    ``report``: the doctor's on the words of the server. ``found``: of ``started``.
    """
    refusals = [one["text"] for one in report.get("findings", ()) if one["kind"] == "refused"]
    stopped = found.get("stopped")
    if report["code"] == 2:
        errors = [text for text in (stopped or "").splitlines() if "error: " in text]
        error = errors[-1].partition("error: ")[2] if errors else ""
        answer, server = f"unknown: {line.said}", f"ends: {error[:60]}"
        agrees = line.said in error
    elif refusals:
        short = refusals[0].split(", or ")[0].split("; ")[0]
        answer, server = f"refused: {short}", "ends with that sentence"
        agrees = any(text.partition(": ")[2] in (stopped or "") for text in refusals)
    else:
        off = [part["name"] for part in report["auto"] if not part["active"]]
        answer = f"starts; off: {', '.join(off)}" if off else "starts; all parts of `auto` are on"
        server, agrees = "has these parts", found.get("parts") == report["auto"]
        if stopped is not None:
            server = f"SGLang ends on a CPU: {line.stops}"
            agrees = bool(line.stops) and line.stops in stopped
    return {"answer": answer, "server": server, "agrees": agrees}
