"""Servers of this folder's benchmarks: forked from a process that has imported SGLang, one core for the scheduler.

The argument ``plain`` starts SGLang without Canopy: `canopy_cpu` alone is loaded, since SGLang does not serve on a CPU
without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

from launch_server import ServerProcess, add_plugin, free_port, serving  # noqa: E402
from support import forked  # noqa: E402
from support.chip import kernel_environment  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

TOKENIZER = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
TEMPLATE = Path(__file__).with_name("hermes.jinja")
PLAIN = "plain"
CONTEXT_TOKENS = 12_288


def prepare(folder: Path) -> None:
    """Set the environment of all servers, and write to ``folder`` what they load.

    Call it before the first server: the process that forks them copies this environment.
    """
    os.environ |= kernel_environment(is_compiled=False)
    os.environ |= {"SGLANG_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[-2:])
    os.environ |= add_plugin(folder, PLAIN, "canopy_cpu:install")


def write_model(folder: Path, width: int, layers: int) -> Path:
    """Write a model with random weights, and return its folder. The tokenizer is SmolLM2's.

    ``<tool_call>`` and ``</tool_call>`` are tokens of it, as in models that hermes parses.
    """
    out = folder / f"model-{width}-{layers}"
    if out.exists():
        return out
    write_tiny_model(out, TOKENIZER)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": max(1, width // 64)}
    config = json.loads((out / "config.json").read_text())
    context = {"max_position_embeddings": CONTEXT_TOKENS}
    (out / "config.json").write_text(json.dumps(config | sizes | heads | context))
    tokenizer = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    for token_id, name in ((3, "<tool_call>"), (5, "</tool_call>")):
        tokenizer["added_tokens"][token_id] |= {"content": name, "special": False}
        ids_by_token = tokenizer["model"]["vocab"]
        replaced = next(token for token, number in ids_by_token.items() if number == token_id)
        ids_by_token[name] = ids_by_token.pop(replaced)
    (out / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return out


def serve_model(
    model: Path, kv_tokens: int, arguments: Sequence[str], log: Path, start: Any = forked.serve
) -> contextlib.AbstractContextManager[ServerProcess]:
    """Serve a model until the block ends; with ``plain`` in ``arguments``, by SGLang without Canopy.

    ``start``: starts a process from a command, as ``subprocess.Popen`` does.
    """
    is_plain = PLAIN in arguments
    server_arguments = [argument for argument in arguments if argument != PLAIN]
    return serving(
        [
            *("--model-path", str(model), "--load-format", "dummy", "--served-model-name", "m"),
            *("--device", "cpu", "--dtype", "float32", "--disable-overlap-schedule"),
            *("--max-total-tokens", str(kv_tokens), "--sleep-on-idle", "--enable-cache-report"),
            *("--context-length", str(CONTEXT_TOKENS), "--chat-template", str(TEMPLATE)),
            *("--tool-call-parser", "hermes", *server_arguments),
        ],
        log=log, port=free_port(), start=start, patience_s=1.0,
        environment={"SGLANG_PLUGINS": PLAIN if is_plain else "canopy,canopy_documents,canopy_replay"},
    )  # fmt: skip


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def flush_cache(server: ServerProcess) -> None:
    """Drop the KV of earlier requests."""
    request = urllib.request.Request(f"{server.url}/flush_cache?timeout=20", b"")
    urllib.request.urlopen(request, timeout=60).close()


class Processes:
    """A server's processes by name: ``http``, ``scheduler`` and ``detokenizer``."""

    def __init__(self, server: ServerProcess) -> None:
        leader = psutil.Process(server.process.pid)
        self.by_name = {"http": leader}
        for child in leader.children(recursive=True):
            title = " ".join(child.cmdline()) + child.name()
            for name in ("scheduler", "detokenizer"):
                if name in title:
                    self.by_name[name] = child

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process since its start."""
        return {name: sum(_thread_cpu_s(process.pid)) for name, process in self.by_name.items()}

    def rss_mb(self) -> dict[str, float]:
        return {n: round(p.memory_info().rss / 1e6, 1) for n, p in self.by_name.items()}


def _thread_cpu_s(pid: int) -> Iterator[float]:
    """Yield the CPU seconds of each thread, from ``schedstat`` (nanoseconds)."""
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            yield int((folder / "schedstat").read_text().split()[0]) / 1e9
