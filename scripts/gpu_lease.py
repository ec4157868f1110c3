"""Two commands for a machine with one GPU and no network, ten minutes each.

    ./scripts/gpu_bundle.sh .lease/bundle      # before, with a network
    python scripts/gpu_lease.py kernels        # the chip, kernels right and fast, their tests
    python scripts/gpu_lease.py served         # an 8B Llama of random weights: documents exact and fast,
                                               # and wa, auto and lru under the same requests

Both run in the checkout with ``.lease`` in it; a summary and the logs come back in ``$OUT``. A part has
its own limit and log, and a failed part costs only itself. ``LEASE_SKIP="right movers"`` leaves parts
out. docs/research/documents.md has what was measured so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = os.environ.get("PORT", "30000")
TOKEN_IDS = range(100, 40000)
"""Ids that prompts are drawn from: no special ones."""


def print_result(name: str, **values: Any) -> None:
    """Print a measurement in the line that the summary repeats."""
    print(f"RESULT {name} {json.dumps(values)}", flush=True)


# ---- parts and servers ----


@dataclass(slots=True)
class Lease:
    """One command: its time, its folders and its server."""

    call: str
    work: Path = Path(os.environ.get("WORK", "/tmp/lease"))
    out: Path = Path(os.environ.get("OUT", "/tmp/lease_out"))
    bundle: Path = Path(os.environ.get("BUNDLE", ROOT / ".lease" / "bundle"))
    site: Path = Path(os.environ.get("SITE", "/tmp/site"))
    lease_s: float = float(os.environ.get("LEASE_SECONDS", "565"))
    skipped_parts: Sequence[str] = tuple(os.environ.get("LEASE_SKIP", "").split())
    started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for folder in (self.work / "logs", self.work / "results", self.out):
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.started_at:.0f} s] {text}"
        print(line, flush=True)
        with (self.out / f"summary-{self.call}.txt").open("a") as file:
            file.write(line + "\n")

    def left_s(self) -> float:
        return self.started_at + self.lease_s - time.monotonic() - 8

    def run_part(self, name: str, limit_s: float, *command: object, **variables: str) -> bool:
        """Run a command within its limit. Returns whether it succeeded."""
        left_s = min(limit_s, self.left_s())
        if name in self.skipped_parts or left_s < 3:
            self.say(f"{name}: {'left out' if name in self.skipped_parts else 'NOT RUN, no time'}")
            return False
        log, started_at = self.work / "logs" / f"{name}.log", time.monotonic()
        with log.open("w") as file:
            try:
                code: int | str = subprocess.run(
                    [str(word) for word in command],
                    cwd=ROOT,
                    env={**os.environ, **variables},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=left_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = "its time"
        self.say(f"{name}: {code or 'ok'} after {time.monotonic() - started_at:.0f} s")
        lines = log.read_text(errors="replace").splitlines()
        shown_lines = [line for line in lines if line.startswith("RESULT ")] + (
            lines[-12:] if code else []
        )
        for line in shown_lines:
            self.say(f"    {line}")
        with tarfile.open(self.out / f"logs-{self.call}.tgz", "w:gz") as archive:
            for folder in ("logs", "results"):
                archive.add(self.work / folder, folder)
        return not code

    @contextlib.contextmanager
    def server(self, name: str, limit_s: float, *flags: object, **variables: str) -> Iterator[bool]:
        """Start the bundle's server; yield whether it answers. It is stopped afterwards."""
        command = ["bash", self.bundle / "serve.sh", "--port", PORT, "--host", "127.0.0.1", *flags]
        ends_at = time.monotonic() + min(limit_s, self.left_s() - 30)
        with (self.work / "logs" / f"{name}.server.log").open("w") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, **variables, "SITE": str(self.site)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None and time.monotonic() < ends_at and not _answers():
                    time.sleep(2)
                answers = process.poll() is None and _answers()
                self.say(f"server {name} {'answers' if answers else 'did NOT start'}")
                yield answers
            finally:
                for stop_signal in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, stop_signal)
                        process.wait(6)


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def kernels(lease: Lease) -> None:
    """The chip, every kernel right and fast, and the kernels' tests."""
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "sgl-kernel" / "python")])
    env = {"PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    check = (sys.executable, "benchmark/kernels/gpu_check.py", "--quick", "--only")
    results = lease.work / "results"
    lease.run_part("facts", 60, sys.executable, __file__, "facts", **env)
    install = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target")
    wheels = sorted(lease.bundle.glob("wheels/*.whl"))
    if lease.run_part("install", 90, sys.executable, *install, lease.site, *wheels):
        (lease.site / ".installed").touch()
    for name, limit_s, *sections in (
        ("right", 110, "correctness"),
        ("attention", 80, "attention"),
        ("movers", 50, "movers", "index"),
    ):
        lease.run_part(name, limit_s, *check, *sections, "--json", results / f"{name}.json", **env)
    in_site = {
        "PYTHONPATH": os.pathsep.join([path, str(lease.site), str(lease.bundle / "stand_in")]),
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    }
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    lease.run_part("waits", 60, *pytest, "test/documents/server/test_no_host_waits.py", **in_site)
    lease.run_part("tests", 90, *pytest, "test/kernels/test_kernels_match_references.py", **in_site)


def served(lease: Lease) -> None:
    """An 8B of random weights: documents, then policies with equal pools and requests."""
    model = lease.work / "model_8b"
    path = str(ROOT / "sgl-kernel" / "python")
    lease.run_part("model", 90, sys.executable, __file__, "model", model, lease.bundle / "model", PYTHONPATH=path)  # fmt: skip
    base = ("--model-path", model, "--load-format", "auto", "--mem-fraction-static", "0.75")
    base += ("--cuda-graph-max-bs-decode", "16", "--page-size", "64")
    documents = ("--chunked-prefill-size", "16384", "--context-length", "32768", "--canopy-documents", "on,memory_mb=8192")  # fmt: skip
    graphs = ("--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", "512", "1024", "2048")  # fmt: skip
    with lease.server("documents", 240, *base, *documents, *graphs, GRAPHS="full") as answers:
        if answers:
            lease.run_part("documents_exact", 80, sys.executable, __file__, "exact", "3000")
            lease.run_part("documents_speed", 130, sys.executable, __file__, "speed", "15000")
    for arm in ("wa", "lru", "auto"):
        pool_flags = ("--max-total-tokens", "60000")
        with lease.server(arm, 70, *base, *pool_flags, EVICTION=arm, GRAPHS="full") as answers:
            if answers:
                lease.run_part(f"same_{arm}", 50, sys.executable, __file__, "same")
                lease.run_part(f"churn_{arm}", 50, sys.executable, __file__, "churn", "300")


# ---- the chip and the model ----


def facts() -> None:
    """Limits of the chip: copies, products, pinned memory over the bus, one eager operation."""
    import torch
    import triton

    def seconds(work: Any, repeats: int = 5) -> float:
        work()
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - started_at) / repeats

    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, device="cuda").bfloat16()
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device_copy = torch.empty_like(host, device="cuda")
    small = torch.zeros(8, device="cuda")
    print_result(
        "facts",
        device=torch.cuda.get_device_properties(0).name,
        torch=torch.__version__,
        triton=triton.__version__,
        nvcc=shutil.which("nvcc"),
        copy_gb_s=round(2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e9),
        product_tflop_s=round(2 * 8192**3 / seconds(lambda: matrix @ matrix) / 1e12),
        pinned_gb_s=round(host.nbytes / seconds(lambda: device_copy.copy_(host)) / 1e9, 1),
        operation_us=round(seconds(lambda: small.add_(1), 2000) * 1e6, 2),
    )


OUTPUT_GAIN, EMBEDDING_GAIN = 1.6, 20.0
"""Gain of a product and of the embeddings. A layer's output must not vanish beside these; with SGLang's
dummy weights of a thousandth every answer is alike."""


def write_model(out: Path, bundled: Path, device: str = "cuda") -> int:
    """Write a random Llama with the configuration and tokenizer of ``bundled``. Returns the bytes."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((bundled / "config.json").read_text())
    hidden, inner, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config[f"num_{n}_heads"] * config["head_dim"] for n in ("attention", "key_value"))  # fmt: skip
    layer_sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    outer_sizes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}  # fmt: skip
    layers = range(config["num_hidden_layers"])
    files = [outer_sizes, *({f"model.layers.{i}.{n}": size for n, size in layer_sizes.items()} for i in layers)]  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    file_by_weight, total_bytes = {}, 0
    for number, sizes in enumerate(files):
        weights = {}
        for name, size in sizes.items():
            weight = torch.ones(size)
            if len(size) > 1:
                gain = OUTPUT_GAIN * size[1] ** -0.5 * (EMBEDDING_GAIN if "embed" in name else 1.0)
                weight = torch.randn(*size, device=device, generator=generator) * gain
            weights[f"{name}.weight"] = weight.bfloat16().cpu()
        save_file(weights, out / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        file_by_weight |= dict.fromkeys(weights, f"model-{number:05d}.safetensors")
        total_bytes += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_by_weight}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in (bundled / "config.json", *bundled.glob("tokenizer*.json")):
        shutil.copy(file, out)
    return total_bytes


# ---- requests ----


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer. ``cached_tokens``: of the prompt, in the prefix cache; ``top_logprobs``: of its first token, by id."""

    seconds: float
    ids: list[int]
    cached_tokens: int
    documents: dict[str, Any]
    top_logprobs: dict[int, float]


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(TOKEN_IDS, k=count)


def post(path: str, body: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{PORT}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def generate(ids: Sequence[int], count: int, fields: Any = None, top: int = 0) -> ServedAnswer:
    """Return ``count`` greedy tokens after ``ids``; ``fields``: ``custom_params``."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    sampling |= {"custom_params": fields} if fields else {}
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling}
    if top:
        body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": -1}
    started_at = time.perf_counter()
    answer = json.loads(post("/generate", body))
    seconds = time.perf_counter() - started_at
    meta = answer["meta_info"]
    report = meta.get("canopy_documents") or {}
    return ServedAnswer(
        seconds,
        answer["output_ids"],
        meta.get("cached_tokens", 0),
        report[0] if isinstance(report, list) else report,
        {t: value for value, t, *_ in meta["output_top_logprobs"][0]} if top else {},
    )


def flush() -> None:
    """Empty the prefix cache once no request runs. Raises ``OSError`` after ten seconds."""
    for tries_left in reversed(range(20)):
        try:
            post("/flush_cache", {})
            return
        except urllib.error.URLError:
            if not tries_left:
                raise
            time.sleep(0.5)


DOCUMENT_TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS = 500, 40, 40
"""Tokens of a document, of the system text and of a question."""
REUSE_OFF = {"canopy_document_bounds": "off"}


@dataclass(slots=True)
class PromptLibrary:
    """A system text and documents of ``tokens`` and more."""

    tokens: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    system: list[int] = field(init=False)
    documents: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        count = self.tokens // DOCUMENT_TOKENS + 2
        self.documents = [draw_tokens(self.rng, DOCUMENT_TOKENS) for _ in range(count)]
        self.system = draw_tokens(self.rng, SYSTEM_TOKENS)

    def prompt(self, document_indices: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt of these documents and a new question, and the field with their positions."""
        ids, bounds = list(self.system), []
        for i in document_indices:
            bounds += [len(ids), len(ids) + len(self.documents[i])]
            ids += self.documents[i]
        return ids + draw_tokens(self.rng, QUESTION_TOKENS), {"canopy_document_bounds": bounds}

    def draw_prompt(self, count: int) -> tuple[list[int], dict[str, Any]]:
        return self.prompt(self.rng.sample(range(len(self.documents)), count))

    def encode_all(self) -> None:
        """Encode every document, and compile what the first requests compile."""
        indices = range(len(self.documents))
        for first in indices[::4]:
            ids, fields = self.prompt(indices[first : first + 4])
            generate(ids, 1, fields)
        time.sleep(20)  # documents are encoded while the server has nothing else to do
        ids, fields = self.draw_prompt(3)
        generate(ids, 1, fields)
        generate(ids, 4, REUSE_OFF)


def exact(tokens: int, repeats: int = 10) -> None:
    """Compare answers at ratio 1 with plain ones. The ruler: plain answers over a cached prefix."""
    library = PromptLibrary(tokens)
    library.encode_all()
    fused_differences, cached_differences, equal = [], [], 0
    for _ in range(repeats):
        ids, fields = library.draw_prompt(3)
        flush()
        fused = generate(ids, 8, {**fields, "canopy_recompute_ratio": 1.0}, top=20)
        flush()
        plain, cached = generate(ids, 8, REUSE_OFF, top=20), generate(ids, 8, REUSE_OFF, top=20)
        equal += fused.ids == plain.ids
        for differences, other in ((fused_differences, fused), (cached_differences, cached)):
            shared_ids = other.top_logprobs.keys() & plain.top_logprobs.keys()
            pairs = ((other.top_logprobs[t], plain.top_logprobs[t]) for t in shared_ids)
            differences.append(max((abs(a - b) for a, b in pairs), default=9e9))
    print_result("exact", equal=equal, of=repeats, difference=max(fused_differences), ruler=max(cached_differences))  # fmt: skip


def speed(tokens: int, repeats: int = 6) -> None:
    """Time fused prefill beside SGLang's own, each with an empty prefix cache, without the first pair."""
    library = PromptLibrary(tokens)
    library.encode_all()
    for count in (n for n in (4, 8, 16, 30) if n * DOCUMENT_TOKENS <= tokens):
        plain, fused = [], []
        for _ in range(repeats):
            ids, fields = library.draw_prompt(count)
            for answers, sent_fields in ((plain, REUSE_OFF), (fused, fields)):
                flush()
                answers.append(generate(ids, 1, sent_fields))
        ms = [1000 * statistics.median(a.seconds for a in side[1:]) for side in (plain, fused)]
        report = {name: fused[-1].documents.get(name) for name in ("plan_ms", "computed", "reused", "why")}  # fmt: skip
        print_result("speed", tokens=len(ids), plain_ms=ms[0], fused_ms=ms[1], times=ms[0] / ms[1], **report)  # fmt: skip


def same() -> None:
    """The same prompts cold, hot, side by side and after an eviction: equal answers, and hits."""
    rng = random.Random(7)
    heads = [draw_tokens(rng, 900) for _ in range(4)]
    prompts = [head + draw_tokens(rng, 60 + 13 * i) for i in range(6) for head in heads]
    filler = [draw_tokens(rng, 2500) for _ in range(60)]  # more than the pool holds
    flush()
    cold, hot = [generate(p, 24) for p in prompts], [generate(p, 24) for p in prompts]
    with ThreadPoolExecutor(12) as pool:
        concurrent = list(pool.map(lambda p: generate(p, 24), prompts))
        list(pool.map(lambda ids: generate(ids, 2), filler))
    evicted = [generate(p, 24) for p in prompts]
    for name, answers in (("hot", hot), ("crowd", concurrent), ("evicted", evicted)):
        equal = sum(a.ids == b.ids for a, b in zip(cold, answers))
        first = sum(a.ids[0] == b.ids[0] for a, b in zip(cold, answers))
        cached = sum(a.cached_tokens for a in answers)
        print_result(name, of=len(prompts), all=equal, first=first, cached=cached)


def zipf_prompts(count: int) -> list[list[int]]:
    """Return prompts over 60 prefixes of 1,200 tokens that follow Zipf's law."""
    rng = random.Random(7)
    prefixes = [draw_tokens(rng, 1200) for _ in range(60)]
    chosen = rng.choices(prefixes, [(i + 1) ** -0.9 for i in range(60)], k=count)
    return [prefix + draw_tokens(rng, rng.choice((100, 400, 900))) for prefix in chosen]


def churn(count: int) -> None:
    """Send sixteen requests at once to a pool that is too small for their prefixes."""
    prompts = zipf_prompts(count)
    flush()
    started_at = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda ids: generate(ids, 8), prompts))
    seconds = time.perf_counter() - started_at
    waits = sorted(a.seconds for a in answers)
    hits = sum(a.cached_tokens for a in answers) / sum(map(len, prompts))
    print_result("churn", seconds=seconds, mean_s=statistics.mean(waits), p95_s=waits[int(0.95 * count)], hits=hits)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    calls: dict[str, Any] = {f.__name__: f for f in (facts, same, exact, speed, churn)}
    parser.add_argument("call", choices=("kernels", "served", "model", *calls))
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.call in calls:
        calls[args.call](*map(int, args.words))
    elif args.call == "model":
        out, bundled = map(Path, args.words)
        print_result("model", gib=write_model(out, bundled) / 2**30)
    else:
        lease = Lease(args.call)
        {"kernels": kernels, "served": served}[args.call](lease)
        lease.say(f"{args.call} is over")


if __name__ == "__main__":
    main()
