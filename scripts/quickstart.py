"""From a fresh clone to a running server: the program behind ./scripts/quickstart.sh.

Makes .venv with the pinned packages, prepares a small model, and serves it three times: under SGLang's
`lru`, under `lru` with host memory, and under `auto` with the same host memory. Runs the same agents on
each (scripts/agents.py), and prints their results side by side and the actions of `auto`. Finished steps
are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import environment
from agents import AgentTraffic, ClientTurn, Outcome, comparison_table, outcome_of, read_texts
from environment import BAR_INTERVAL_S, ROOT, STATE_FOLDER, SetupError, say

MODEL_NAME = "smollm2-135m-instruct"
QUESTION = "What is the capital of France? Answer in one sentence."
# Ten agents' conversations need about 5,000 tokens: they fit in host memory, with the readers' documents,
# but not on the device.
KV_TOKENS = 3072
MAX_RUNNING = 3  # without a limit, held requests fill the pool, and no policy has a choice
# Prompts of a few hundred tokens: by default reuse is learnt in blocks of 64.
TREE_CONFIG = '{"block_tokens": 16, "quantum_tokens": 16}'
RUN_S = 50
HOST_RATIO = 4
HOST_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO), "--hicache-write-policy", "write_back")  # fmt: skip
AUTO_SERVER = "auto + host"
SERVERS = {"lru": ("lru",), "lru + host": ("lru", *HOST_TIER), AUTO_SERVER: ("auto", *HOST_TIER)}
"""Name -> eviction policy and further arguments."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, default=30000, help="default 30000")
    model_help = "serve this model (config.json, weights and tokenizer) instead of SmolLM2-135M"
    add("--model", type=Path, metavar="DIR", help=model_help)
    data_help = "text that the agents work on, such as your own transcripts (default: Canopy's docs and code)"
    add("--data", type=Path, metavar="DIR", help=data_help)
    add("--seconds", type=float, default=RUN_S, help=f"agents' time per server (default {RUN_S})")
    add("--once", action="store_true", help="stop the server at the end")
    device_help = "which packages to install; auto: cuda where nvidia-smi answers"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device_help)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        device = environment.detect_device(args.device)
        check_port(args.port)
        if args.model is not None:
            check_model(args.model)
        if not 5 <= args.seconds <= 3600:
            raise SetupError(f"--seconds {args.seconds:g}: choose from 5 to 3600")
        texts = read_texts([args.data] if args.data else [ROOT / "docs", ROOT / "python"])
        environment.enter_venv(device)
        say(f"1/5 packages ({device})")
        environment.install(device)
        say("2/5 model")
        if args.model is not None:
            return compare(args.model.resolve(), args.model.resolve().name, device, args, texts)
        from prepare import prepare_smollm2

        return compare(prepare_smollm2(), MODEL_NAME, device, args, texts)
    except SetupError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130


def check_port(port: int) -> None:
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
    """Raise SetupError if a model folder lacks a file that a server needs."""
    required = {
        "config.json": ("config.json",),
        "weights (*.safetensors or *.bin)": ("*.safetensors", "*.bin"),
        "a tokenizer (tokenizer.json or tokenizer.model)": ("tokenizer.json", "tokenizer.model"),
    }
    for part, patterns in required.items():
        if not any(any(model.glob(pattern)) for pattern in patterns):
            raise SetupError(
                f"--model {model}: no {part} there; give a folder as `huggingface-cli download "
                "--local-dir` makes it, or leave --model out to serve SmolLM2-135M"
            )


def compare(
    model: Path, model_name: str, device: str, args: argparse.Namespace, texts: Sequence[str]
) -> int:
    """Serve three times, one after the other; the last server stays up unless `--once`."""
    from sglang_canopy.errors import CanopyError

    outcome_by_server: dict[str, Outcome] = {}
    try:
        for number, server_name in enumerate(SERVERS, 3):
            say(f"{number}/5 {server_name}: a server of its own, then the agents")
            with serve(model, model_name, device, server_name, args.port) as server:
                is_canopy = server_name == AUTO_SERVER
                ask_question(server.url, model_name, show=is_canopy)
                flush = f"{server.url}/flush_cache?timeout=20"  # all begin with an empty cache
                urllib.request.urlopen(flush, data=b"{}", timeout=120).close()
                if is_canopy:
                    open_page(f"{server.url}/canopy/ui")
                arguments = (server.url, model_name, server_name, texts, args.seconds)
                outcome_by_server[server_name] = run_agents(*arguments)
                if not is_canopy:
                    continue
                print(f"\n{comparison_table(outcome_by_server, args.seconds)}\n", flush=True)
                print(f"What auto did: {what_auto_did(server.url)}\n", flush=True)
                if not args.once:
                    keep_server(server, model_name)
    except CanopyError as error:
        raise SetupError(str(error)) from error
    return 0


def serve(model: Path, name: str, device: str, server_name: str, port: int):  # type: ignore[no-untyped-def]
    from launch_server import cpu_arguments, serving

    arguments = cpu_arguments(model, kv_tokens=KV_TOKENS)
    if device == "cuda":
        arguments = ["--model-path", str(model), "--max-total-tokens", str(KV_TOKENS)]
        arguments += ["--enable-cache-report", "--enable-metrics"]
    policy, *tier_arguments = SERVERS[server_name]
    arguments += ["--served-model-name", name, "--radix-eviction", policy, *tier_arguments]
    arguments += ["--max-running-requests", str(MAX_RUNNING)]
    if server_name == AUTO_SERVER:
        arguments += ["--radix-eviction-policy-config", TREE_CONFIG]
    return serving(arguments, log=log_of(server_name), port=port, describe=f"{server_name}: start")


def log_of(server_name: str) -> Path:
    return STATE_FOLDER / "logs" / f"server-{server_name.replace(' + ', '-')}.log"


def ask_question(url: str, model_name: str, *, show: bool) -> None:
    """One chat question through the `openai` client; it also warms the server up."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    try:
        answer = client.chat.completions.create(
            model=model_name,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
        )
    except openai.OpenAIError as error:
        raise SetupError(f"the model did not answer a chat: {error}") from error
    if show:
        print(f"\n> {QUESTION}\n{(answer.choices[0].message.content or '').strip()}\n", flush=True)


def open_page(url: str) -> None:
    """Show the server's page while the agents work, if there is a screen."""
    print(f"What its cache holds and does: {url}", flush=True)
    screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if screen:
        webbrowser.open(url)


def run_agents(url: str, model: str, server: str, texts: Sequence[str], seconds: float) -> Outcome:
    """Run the agents with a bar."""
    import openai
    from tqdm import tqdm

    start_s = time.monotonic()
    layout = "{desc}: |{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with tqdm(
        total=seconds, desc=server, bar_format=layout, mininterval=BAR_INTERVAL_S, leave=False
    ) as bar:

        def update_bar(answers: Sequence[ClientTurn]) -> None:
            so_far = outcome_of(answers)
            hits = f"{100 * so_far.hit_ratio:.0f} %"
            bar.set_postfix_str(f"{so_far.steps} steps, {hits} hit", refresh=False)
            bar.update(min(time.monotonic() - start_s, seconds) - bar.n)

        try:
            answers = AgentTraffic(url, model, texts).run(seconds, update_bar)
        except openai.OpenAIError as error:
            raise SetupError(f"a request failed: {error}; log: {log_of(server)}") from error
    return outcome_of(answers)


def what_auto_did(url: str) -> str:
    """Return the actions of `auto` and their reasons, from the server's status."""
    with urllib.request.urlopen(f"{url}/canopy/status", timeout=30) as response:
        return json.load(response)["auto"]


def keep_server(server, model_name: str) -> None:  # type: ignore[no-untyped-def]
    """Leave the server running in the foreground until Ctrl-C."""
    print(
        f"The server with {AUTO_SERVER} stays up at {server.url} (log: {server.log.relative_to(ROOT)}). Try:\n\n"
        f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n\n'
        "Ctrl-C stops it.",
        flush=True,
    )
    status = server.process.wait()
    raise SetupError(f"the server ended with status {status}; see {server.log}")


if __name__ == "__main__":
    sys.exit(main())
