"""From a fresh clone to a running server: what ./scripts/quickstart.sh runs.

Makes .venv with the pinned packages, prepares a small model, serves it under `lru` and under
`wa`, asks a question, replays a small synthetic trace under each and shows them side by side.
Finished steps are not repeated.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import environment
from environment import ROOT, STATE, SetupError, say

TRACE = ROOT / "benchmark" / "quickstart" / "mixed_synthetic.jsonl"
NAME = "smollm2-135m-instruct"
QUESTION = "What is the capital of France? Answer in one sentence."
# At this scale the trace holds 8,700 different tokens and its longest request 150: this pool has to evict.
KV_TOKENS = 384
# A block of the trace is one token here; by default reuse is learnt in blocks of 64.
WA_CONFIG = '{"block_tokens": 1, "quantum_tokens": 16}'
LENGTHS = ("--scale-lengths", "1/16")
# Of its five minutes: a replay in about one. A slow machine takes its time.
FASTEST = 0.22
# What a mean request of the scaled trace is, and how often one comes at its own pace.
PROMPT_TOKENS, OUTPUT_TOKENS, EVERY_S = 42, 11, 0.72
# Above this share of what the machine can serve, TTFT would be waiting and little else.
LOAD = 0.5
# A slower machine replays the beginning of the trace.
REPLAY_S = 100


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    parser.add_argument("--port", type=int, default=30000, help="default 30000")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="serve this model (config.json, weights and tokenizer) instead of SmolLM2-135M",
    )
    parser.add_argument("--once", action="store_true", help="stop the server at the end")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="which packages to install; auto: cuda where nvidia-smi answers",
    )
    return parser.parse_args()


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        kind = environment.device(args.device)
        check_port(args.port)
        if args.model is not None:
            check_model(args.model)
        environment.enter(kind)
        say(f"1/4 packages ({kind})")
        environment.install(kind)
        say("2/4 model")
        if args.model is not None:
            return compare(args.model.resolve(), args.model.resolve().name, kind, args)
        from prepare import prepare_smollm2

        return compare(prepare_smollm2(), NAME, kind, args)
    except SetupError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130


def check_port(port: int) -> None:
    import socket

    if not 0 < port < 65536:
        raise SetupError(f"--port {port}: choose one from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SetupError(
                f"port {port} cannot be used ({error.strerror}); stop what listens there, or "
                f"choose another with --port"
            ) from error


def check_model(model: Path) -> None:
    """Raise SetupError where a folder has not what a server needs of a model."""
    wanted = {
        "config.json": ("config.json",),
        "weights (*.safetensors or *.bin)": ("*.safetensors", "*.bin"),
        "a tokenizer (tokenizer.json or tokenizer.model)": ("tokenizer.json", "tokenizer.model"),
    }
    for what, patterns in wanted.items():
        if not any(any(model.glob(pattern)) for pattern in patterns):
            raise SetupError(
                f"--model {model}: no {what} there; give a folder as `huggingface-cli download "
                "--local-dir` makes it, or leave --model out to serve SmolLM2-135M"
            )


def compare(model: Path, name: str, kind: str, args: argparse.Namespace) -> int:
    """Serve under both policies, one after the other; the second stays up unless `--once`."""
    from sglang_canopy.bench import report
    from sglang_canopy.errors import CanopyError

    results = []
    pace = 0.0
    try:
        for number, policy in ((3, "lru"), (4, "wa")):
            say(f"{number}/4 {policy}: a server of its own, then the trace")
            with serve(model, name, kind, policy, args.port) as server:
                if policy == "wa":
                    ask(server.url, name)
                request_s = warm_up(server.url, vocabulary(model))
                pace = pace or pace_for(request_s)  # the first server's, for both
                flush(server.url)  # both replays begin with an empty cache
                results.append(replay(server.url, model, name, policy, pace))
                if policy == "lru":
                    continue
                print(f"\n{report.results_table(results, ('category',))}\n", flush=True)
                print(f"The trace is synthetic ({TRACE.parent.relative_to(ROOT)}/README.md).")
                if not args.once:
                    stay(server, name)
    except CanopyError as error:
        raise SetupError(str(error)) from error
    return 0


def serve(model: Path, name: str, kind: str, policy: str, port: int):  # type: ignore[no-untyped-def]
    from sglang_canopy.bench.launch import cpu_arguments, serving

    arguments = cpu_arguments(model, kv_tokens=KV_TOKENS)
    if kind == "cuda":
        arguments = ["--model-path", str(model), "--max-total-tokens", str(KV_TOKENS)]
        arguments += ["--enable-cache-report", "--enable-metrics"]
    arguments += ["--served-model-name", name, "--radix-eviction", policy]
    if policy == "wa":
        arguments += ["--radix-eviction-policy-config", WA_CONFIG]
    return serving(
        [*arguments, "--canopy-enable-forced-output"],
        log=STATE / "logs" / f"server-{policy}.log",
        port=port,
        describe=f"{policy}: start",
    )


def ask(url: str, name: str) -> None:
    """One chat question through the `openai` client."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=32,
        extra_body={"custom_params": {"canopy_category": "chat", "canopy_turn": 1}},
    )
    print(f"\n> {QUESTION}\n{(answer.choices[0].message.content or '').strip()}\n", flush=True)


def vocabulary(model: Path) -> int:
    """Token ids that a model has."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return int(config.get_text_config().vocab_size)


def warm_up(url: str, ids: int) -> float:
    """Seconds that a mean request of the trace takes this server when it is busy."""
    import random
    import time

    draw = random.Random(1)
    busy_s = []
    for _ in range(3):
        began = time.monotonic()
        prompts = [
            [draw.randrange(min(100, ids // 2), ids) for _ in range(PROMPT_TOKENS)]
            for _ in range(4)
        ]
        sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        post(f"{url}/generate", {"input_ids": prompts, "sampling_params": sampling})
        busy_s.append((time.monotonic() - began) / len(prompts))
    return min(busy_s)


def pace_for(request_s: float) -> float:
    """The share of the trace's own time in which it can be replayed without a queue."""
    pace = max(FASTEST, request_s / EVERY_S / LOAD)
    said = f"{1000 * request_s:.0f} ms a request here"
    say(f"{said}: {count(pace)} requests, {1 / pace:.1f} times as fast as they came")
    return pace


def count(pace: float) -> int:
    """Requests of the trace that are replayed in ``REPLAY_S`` seconds."""
    return int(REPLAY_S / (EVERY_S * pace))


def post(url: str, body: dict) -> None:
    import json
    import urllib.request

    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=120).close()


def flush(url: str) -> None:
    post(f"{url}/flush_cache?timeout=20", {})


def replay(url: str, model: Path, name: str, policy: str, pace: float) -> dict:
    """Replay the bundled trace; the benchmark's own bar is shown, its report goes to a log."""
    from sglang_canopy.bench import report

    output = STATE / "quickstart" / f"{policy}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    log = STATE / "logs" / f"replay-{policy}.log"
    command = [sys.executable, "-m", "sglang_canopy.bench_serving"]
    command += ["--dataset-name", "bailian", "--dataset-path", str(TRACE)]
    command += ["--base-url", url, "--model", name, "--tokenizer", str(model)]
    command += ["--num-prompts", str(count(pace)), *LENGTHS, "--time-scale", f"{pace:.3f}"]
    command += ["--output-file", str(output)]
    with log.open("w", encoding="utf-8") as text:
        ran = subprocess.run(
            command, stdout=text, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=False
        )
    if ran.returncode != 0:
        raise SetupError(f"the replay ended with status {ran.returncode}; its output is in {log}")
    return report.load(str(output))


def stay(server, name: str) -> None:  # type: ignore[no-untyped-def]
    """Leave the server running in the foreground until Ctrl-C."""
    print(
        f"The wa server stays up at {server.url} (log: {server.log.relative_to(ROOT)}). Try:\n\n"
        f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n\n'
        "Ctrl-C stops it.",
        flush=True,
    )
    status = server.process.wait()
    raise SetupError(f"the server ended with status {status}; see {server.log}")


if __name__ == "__main__":
    sys.exit(main())
