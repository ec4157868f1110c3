"""Documents in a real server: time to first token, conversations, request rate, exactness.

    python benchmark/documents/serve.py ttft  --model DIR --data FILE --json OUT --lengths 2048,4096,7168
    python benchmark/documents/serve.py turns --model DIR --data FILE --json OUT --lengths 1024,2048 --repeats 3
    python benchmark/documents/serve.py load  --model DIR --data FILE --json OUT --tokens 2048 --rates 0.2,0.4,0.8
    python benchmark/documents/serve.py exact --model DIR --data FILE --json OUT --tokens 400 --prompts 100

FILE has questions with documents, as ``quality.py`` reads them; popularity follows Zipf's law, orders
are shuffled, 4 to 20 documents a prompt. A request either names its documents or has ``"off"``, which
is SGLang's own prefix cache. All but ``exact`` send both sides to one server. The result is written after
every row.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from comparators.questions import read_examples

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import add_plugin, cpu_arguments, free_port, serving

SYSTEM_TEXT = "You answer questions from the documents that follow. Answer in a few words.\n\n"
TURNS, TOOL_DOCUMENTS, ANSWER_TOKENS = 5, 2, 24
"""Turns of a conversation; documents that a tool returns before the third and the fifth turn; tokens of
an answer in the history, a fixed text, so that both sides have equal prompts."""
RETRY_COUNT, SAMPLE_COUNTS, SAMPLE_TOKENS, EXACT_ANSWER_TOKENS = 5, (4, 8), 8, 8
ZIPF_EXPONENT = 0.8
"""Exponent of the documents' popularity."""
POOL_PROMPTS, MIN_REQUESTS, MAX_DRAIN_SHARE = 8, 8, 0.1
"""Prompts that the KV pool holds under load; minimum arrivals at each rate; time that the server may
need to empty the queue after the last arrival, as a share of the window."""
CONCURRENT_PROMPTS = 4


@dataclass(slots=True)
class DocumentPrompt:
    """A prompt as token ids."""

    ids: list[int]
    bounds: list[int] | str
    """Start and end of each document, flat; or ``"off"``."""
    document_numbers: tuple[int, ...] = ()

    def without_reuse(self) -> DocumentPrompt:
        return replace(self, bounds="off")


@dataclass(slots=True)
class Corpus:
    """Documents as ids, popular ones first; prompts are drawn by Zipf's law without repetition."""

    system_ids: list[int]
    documents: list[list[int]]
    questions: list[list[int]]
    rng: random.Random
    prompt_documents: int
    """Documents a prompt."""

    def draw_prompt(self, extra_documents: int = 0) -> DocumentPrompt:
        """Return a prompt of ``prompt_documents + extra_documents`` different documents, shuffled, and a question."""
        weights = [(i + 1) ** -ZIPF_EXPONENT for i in range(len(self.documents))]
        numbers: list[int] = []
        while len(numbers) < self.prompt_documents + extra_documents:
            (number,) = self.rng.choices(range(len(self.documents)), weights)
            if number not in numbers:
                numbers.append(number)
        self.rng.shuffle(numbers)
        return self.make_prompt(numbers, self.rng.choice(self.questions))

    def make_prompt(self, numbers: Sequence[int], question: list[int]) -> DocumentPrompt:
        ids, bounds = list(self.system_ids), []
        for i in numbers:
            bounds += [len(ids), len(ids) + len(self.documents[i])]
            ids += self.documents[i]
        return DocumentPrompt(ids + question, bounds, tuple(numbers))


def make_corpus(tokenizer: Any, args: argparse.Namespace, tokens: int) -> Corpus:
    """Return documents for prompts of about ``tokens`` tokens: 6 at 2k, 16 at 7k by default."""
    prompt_documents = args.chunks or max(4, min(20, round(2 + tokens / 480)))
    document_tokens = (tokens - 40) // prompt_documents  # 40: system text and question
    examples = read_examples(args.data)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    texts = dict.fromkeys(d for e in examples for d in e.documents if len(d) > 40)
    stream = itertools.chain.from_iterable(encode(t.strip() + "\n\n") for t in texts)
    documents = [list(itertools.islice(stream, document_tokens)) for _ in range(args.documents)]
    if len(documents[-1]) < document_tokens:
        raise SystemExit(f"too few tokens for {args.documents} documents of {document_tokens}")
    questions = [encode(f"Question: {e.question}\nAnswer:") for e in examples]
    rng = random.Random(args.seed)
    return Corpus(encode(SYSTEM_TEXT), documents, questions, rng, prompt_documents)


@dataclass(slots=True)
class TimedAnswer:
    """The answer to a request: its times, the report of reuse, and token ids."""

    seconds: float
    """Seconds from sending to the first streamed token, or to the whole answer."""
    cached_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    """Processor seconds of the server."""


@dataclass(slots=True)
class DocumentClient:
    """Requests to a server."""

    url: str
    pid: int

    def post(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        method = "GET" if path == "/server_info" else "POST"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=3600)
        except urllib.error.HTTPError as error:  # a busy server refuses to flush with 400, too
            raise SystemExit(f"{path}: {error.code} {error.read()[:500]!r}") from error

    def send(
        self, prompt: DocumentPrompt, answer_tokens: int = 1, stream: bool = False, **params: Any
    ) -> TimedAnswer:
        """Send a prompt and decode greedily; with ``stream`` only the time to the first token is returned."""
        sampling = {"temperature": 0, "max_new_tokens": answer_tokens, "ignore_eos": True}
        custom = {"canopy_document_bounds": prompt.bounds, **params}
        body = {"input_ids": prompt.ids, "stream": stream}
        cpu_start_s, start_s = self.cpu_s(), time.perf_counter()
        with self.post("/generate", {**body, "sampling_params": {**sampling, "custom_params": custom}}) as answer:  # fmt: skip
            if stream:
                next(line for line in answer if line.startswith(b"data:"))
                seconds = time.perf_counter() - start_s
                answer.read()
                return TimedAnswer(seconds)
            result = json.loads(answer.read())
        seconds, meta = time.perf_counter() - start_s, result["meta_info"]
        report = (meta.get("canopy_documents") or [{}])[0]
        return TimedAnswer(
            seconds, meta["cached_tokens"], report, result["output_ids"], self.cpu_s() - cpu_start_s
        )

    def time_samples(self, prompt: DocumentPrompt, samples: int) -> tuple[float, float]:
        """Return seconds and processor seconds until all ``samples`` answers are complete."""
        sampling = {"temperature": 0.7, "max_new_tokens": SAMPLE_TOKENS, "ignore_eos": True}
        sampling["n"] = samples
        sampling["custom_params"] = {"canopy_document_bounds": prompt.bounds}
        cpu_start_s, start_s = self.cpu_s(), time.perf_counter()
        body = {"input_ids": prompt.ids, "sampling_params": sampling}
        with self.post("/generate", body) as answer:
            assert len(json.loads(answer.read())) == samples
        return time.perf_counter() - start_s, self.cpu_s() - cpu_start_s

    def cpu_s(self) -> float:
        server = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (server, *server.children(recursive=True))]
        return sum(cpu.user + cpu.system for cpu in times)

    def flush(self) -> None:
        """Empty the exact cache; SGLang waits until the last answer has gone out."""
        self.post("/flush_cache?timeout=20").close()

    def encode_documents(self, corpus: Corpus) -> None:
        """Send every document twice, the second time in reverse order, and wait until all are encoded:
        a document is encoded behind the system text only after that text has recurred."""
        for numbers in (range(len(corpus.documents)), range(len(corpus.documents))[::-1]):
            self.flush()
            for part in (numbers[i : i + 4] for i in range(0, len(numbers), 4)):
                self.send(corpus.make_prompt(part, corpus.questions[0]))
            self.wait_until_encoded()
        self.flush()

    def wait_until_encoded(self) -> None:
        while (counters := self.counters())["waiting_documents"] or counters["waiting_tokens"]:
            time.sleep(0.5)

    def counters(self) -> dict[str, Any]:
        with self.post("/server_info") as answer:
            return dict(json.loads(answer.read())["internal_states"][0]["canopy_documents"])

    def measure_pairs(
        self, corpus: Corpus, repeats: int
    ) -> list[tuple[DocumentPrompt, TimedAnswer, TimedAnswer]]:
        """Return prompts with their answers by plain serving and by reuse. Reuse runs first, since a plain
        run fills the exact tree."""
        answered = []
        for _ in range(repeats):
            prompt = corpus.draw_prompt()
            reused = self.send(prompt)
            assert reused.report.get("fused"), reused.report
            answered.append((prompt, self.send(prompt.without_reuse()), reused))
        return answered


@contextlib.contextmanager
def server_of(
    args: argparse.Namespace,
    max_tokens: int,
    pool_prompts: int = 2,
    with_documents: bool = True,
    is_plain: bool = False,
) -> Iterator[DocumentClient]:
    """A server whose KV pool holds ``pool_prompts`` prompts of ``max_tokens`` tokens.

    ``with_documents``: with ``--canopy-documents``; ``is_plain``: SGLang without Canopy, but with `canopy_cpu`,
    which it needs to serve on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        kv_tokens = (max_tokens + 512) * pool_prompts
        arguments = cpu_arguments(args.model, kv_tokens=kv_tokens, dtype="float32")
        arguments += ["--canopy-documents", args.document_options] if with_documents else []
        arguments += ["--chunked-prefill-size", "8192", "--context-length", "8192"]
        arguments += ["--mem-fraction-static", "0.6"]
        environment = {"OMP_NUM_THREADS": str(args.threads)}
        if is_plain:
            environment |= add_plugin(Path(folder), "plain", "canopy_cpu:install")
            environment["SGLANG_PLUGINS"] = "plain"
        log = Path(folder) / "server.log"
        with serving(arguments, log=log, port=free_port(), environment=environment) as server:
            yield DocumentClient(server.url, server.process.pid)
            print(f"errors in the server's log: {server.log_text().count('Traceback')}")


ResultRow = dict[str, Any]


def measure_ttft(tokenizer: Any, args: argparse.Namespace) -> Iterator[ResultRow]:
    """Medians of alternating requests, by prompt length."""
    with server_of(args, max(args.lengths)) as client:
        for tokens in args.lengths:
            corpus = make_corpus(tokenizer, args, tokens)
            client.encode_documents(corpus)
            pairs = client.measure_pairs(corpus, args.repeats)
            last_report = pairs[-1][2].report
            yield {
                "tokens": len(pairs[-1][0].ids),
                "chunks": corpus.prompt_documents,
                "prefix_s": statistics.median(plain.seconds for _, plain, _ in pairs),
                "reuse_s": statistics.median(reused.seconds for _, _, reused in pairs),
                "speedup": statistics.median(p.seconds / r.seconds for _, p, r in pairs),
                **{key: last_report[key] for key in ("ratio", "recomputed", "computed")},
                "reused_by_tier": {k: v for k, v in last_report.items() if k.startswith("reused_")},
                "all": {
                    "prefix_s": [plain.seconds for _, plain, _ in pairs],
                    "reuse_s": [reused.seconds for _, _, reused in pairs],
                    "prefix_cpu_s": [plain.cpu_s for _, plain, _ in pairs],
                    "reuse_cpu_s": [reused.cpu_s for _, _, reused in pairs],
                    "plan_ms": [reused.report["plan_ms"] for _, _, reused in pairs],
                },
            }


def measure_turns(tokenizer: Any, args: argparse.Namespace) -> Iterator[ResultRow]:
    """Conversations with documents and with "off", by length of the first prompt: seconds to the first
    token of each turn, of a retry, and of n samples."""
    with server_of(args, 2 * max(args.lengths), pool_prompts=3) as client:
        for tokens in args.lengths:
            corpus = make_corpus(tokenizer, args, tokens)
            client.encode_documents(corpus)
            for repeat in range(args.repeats):
                prompts = [
                    corpus.draw_prompt(2 * TOOL_DOCUMENTS),
                    *(corpus.draw_prompt() for _ in range(1 + len(SAMPLE_COUNTS))),
                ]
                sides = ("documents", "plain")
                for side in sides if repeat % 2 == 0 else sides[::-1]:
                    client.flush()
                    row = {"tokens": tokens, "repeat": repeat, "side": side}
                    row["chunks"] = corpus.prompt_documents
                    yield row | _run_conversation(client, corpus, prompts, side == "plain")


def _run_conversation(
    client: DocumentClient, corpus: Corpus, prompts: list[DocumentPrompt], is_plain: bool
) -> ResultRow:
    """Five turns, a retry and samples. The first drawn prompt has the documents of all turns."""

    def as_sent(prompt: DocumentPrompt) -> DocumentPrompt:
        return prompt.without_reuse() if is_plain else prompt

    documents = [corpus.documents[i] for i in prompts[0].document_numbers]
    ids, bounds, answers = list(corpus.system_ids), [], []
    for turn in range(TURNS):
        count = corpus.prompt_documents if turn == 0 else TOOL_DOCUMENTS if turn in (2, 4) else 0
        for document in documents[:count]:
            bounds += [len(ids), len(ids) + len(document)]
            ids += document
        documents = documents[count:]
        ids += corpus.questions[turn % len(corpus.questions)]
        answers.append(client.send(as_sent(DocumentPrompt(list(ids), list(bounds)))))
        ids += corpus.questions[-1][:1] * ANSWER_TOKENS
    _, *retries = (client.send(as_sent(prompts[1])) for _ in range(RETRY_COUNT + 1))
    row: ResultRow = {
        "ttft_s": [a.seconds for a in answers],
        "cpu_s": [a.cpu_s for a in answers],
        "cached": [a.cached_tokens for a in answers],
        "prompt_tokens": len(ids) - ANSWER_TOKENS,
        "computed": [a.report.get("computed") for a in answers],
        "kept": [a.report.get("kept") for a in answers],
        "retry_s": statistics.median(a.seconds for a in retries),
        "retry_cpu_s": statistics.median(a.cpu_s for a in retries),
        "retries_s": [a.seconds for a in retries],
    }
    for samples, prompt in zip(SAMPLE_COUNTS, prompts[2:]):
        seconds, cpu_s = client.time_samples(as_sent(prompt), samples)
        row[f"n{samples}_s"], row[f"n{samples}_cpu_s"] = seconds, cpu_s
    return row


def measure_load(tokenizer: Any, args: argparse.Namespace) -> Iterator[ResultRow]:
    """Poisson arrivals at each rate, without and with reuse; the rate sustained at the target.

    Both sides get the same prompts at the same times; a side ends at the first rate whose 90th
    percentile misses the target (twice the prefix cache's time alone, unless given), or that leaves
    a queue behind: a slow overload would pass in a short window where the target is generous.
    """
    with server_of(args, args.tokens, POOL_PROMPTS) as client:
        corpus = make_corpus(tokenizer, args, args.tokens)
        client.encode_documents(corpus)
        pairs = client.measure_pairs(corpus, args.repeats)
        alone_s = {
            "prefix": statistics.median(plain.seconds for _, plain, _ in pairs),
            "reuse": statistics.median(reused.seconds for _, _, reused in pairs),
        }
        target_s = args.target or 2 * alone_s["prefix"]
        sustained_per_s = {"prefix": 0.0, "reuse": 0.0}
        yield {"tokens": len(pairs[-1][0].ids), "alone_s": alone_s, "target_s": target_s}
        for side in ("prefix", "reuse"):
            for rate in sorted(args.rates):
                client.flush()
                row = {"side": side, **_time_rate(client, tokenizer, args, rate, side == "prefix")}
                yield row
                has_backlog = row["behind_s"] - alone_s[side] > MAX_DRAIN_SHARE * row["window_s"]
                if row["p90_s"] > target_s or has_backlog:
                    break
                sustained_per_s[side] = rate
        yield {"target_s": target_s, "sustained_per_s": sustained_per_s}


def _time_rate(
    client: DocumentClient, tokenizer: Any, args: argparse.Namespace, rate: float, is_plain: bool
) -> ResultRow:
    """Return a row of one rate: percentiles and every TTFT in s, and the seconds from the last arrival to
    the last answer."""
    corpus = make_corpus(tokenizer, args, args.tokens)
    corpus.rng = random.Random(f"{args.seed} {rate}")
    rng, ttft_s = random.Random(f"{args.seed} arrivals {rate}"), []
    threads: list[threading.Thread] = []

    def send(prompt: DocumentPrompt) -> None:
        ttft_s.append(client.send(prompt, 2, stream=True).seconds)

    start_s, due_s, last_due_s = time.perf_counter(), 0.0, 0.0
    while (due_s := due_s + rng.expovariate(rate)) < args.seconds or len(threads) < MIN_REQUESTS:
        last_due_s, prompt = due_s, corpus.draw_prompt()
        time.sleep(max(0.0, start_s + due_s - time.perf_counter()))
        sent_prompt = prompt.without_reuse() if is_plain else prompt
        threads.append(threading.Thread(target=send, args=(sent_prompt,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    drain_s = time.perf_counter() - start_s - last_due_s
    p90_s = sorted(ttft_s)[min(len(ttft_s) - 1, int(0.9 * len(ttft_s)))]
    row = {"rate": rate, "n": len(ttft_s), "p50_s": statistics.median(ttft_s), "p90_s": p90_s}
    return {**row, "window_s": last_due_s, "behind_s": drain_s, "ttft_s": ttft_s}


def compare_exact(tokenizer: Any, args: argparse.Namespace) -> Iterator[ResultRow]:
    """Greedy ids of the same prompts, four at a time: ratio 1.0 and "off" on one server, then on two more:
    without the flag, and without Canopy."""
    corpus = make_corpus(tokenizer, args, args.tokens)
    prompts = [corpus.draw_prompt() for _ in range(args.prompts)]

    def answer_all(send: Callable[[DocumentPrompt], TimedAnswer]) -> list[TimedAnswer]:
        with ThreadPoolExecutor(CONCURRENT_PROMPTS) as pool:
            return list(pool.map(send, prompts))

    def compare_ids(name: str, other_name: str) -> ResultRow:
        count = sum(a.ids == b.ids for a, b in zip(answers[name], answers[other_name]))
        fused = sum(bool(a.report.get("fused")) for a in answers[name])
        return {"pair": [name, other_name], "same": count, "of": len(prompts), "fused": fused}

    answers: dict[str, list[TimedAnswer]] = {}
    tokens = EXACT_ANSWER_TOKENS
    with server_of(args, args.tokens, 2 * CONCURRENT_PROMPTS) as client:
        client.encode_documents(corpus)
        answers["ratio 1"] = answer_all(
            lambda p: client.send(p, tokens, canopy_recompute_ratio=1.0)
        )
        client.flush()
        answers["off"] = answer_all(lambda p: client.send(p.without_reuse(), tokens))
    yield compare_ids("ratio 1", "off")
    for name in filter(None, args.others.split(",")):
        with server_of(
            args, args.tokens, 2 * CONCURRENT_PROMPTS, False, name == "no Canopy"
        ) as other:
            answers[name] = answer_all(lambda p: other.send(DocumentPrompt(p.ids, []), tokens))
        yield compare_ids("off", name)


TASKS = {"ttft": measure_ttft, "turns": measure_turns, "load": measure_load, "exact": compare_exact}


def _list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [convert(part) for part in text.split(",")]


def main() -> None:
    raw_text = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw_text)
    add = parser.add_argument
    add("task", choices=tuple(TASKS))
    add("--model", type=Path, required=True)
    add("--data", type=Path, required=True, help="a file of questions")
    add("--json", type=Path, required=True, help="written anew after every row")
    add("--documents", type=int, default=24, help="documents there are")
    add("--chunks", type=int, default=0, help="documents a prompt; 0: 6 at 2k to 16 at 7k tokens")
    add("--document-options", default="memory_mb=4096", help="value of --canopy-documents")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--lengths", type=_list_of(int), default="2048,4096,7168", help="tokens (ttft, turns)")
    add("--tokens", type=int, default=2048, help="prompt tokens (load, exact)")
    add("--repeats", type=int, default=5, help="pairs of requests, of conversations (turns)")
    add("--rates", type=_list_of(float), default="0.1,0.2,0.4,0.8", help="requests a second (load)")
    add("--seconds", type=float, default=60, help="of arrivals a rate (load)")
    add("--target", type=float, help="TTFT target in s (load)")
    add("--prompts", type=int, default=100, help="prompts (exact)")
    add("--others", default="no flag,no Canopy", help="servers beside the first (exact)")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    settings = {key: str(value) for key, value in vars(args).items()}
    settings["what"], rows = settings.pop("task"), []
    for row in TASKS[args.task](AutoTokenizer.from_pretrained(args.model), args):
        rows.append(row)
        print(json.dumps(row), flush=True)
        result = {"settings": settings, "cpus": os.cpu_count(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
