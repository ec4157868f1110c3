"""Run a replay with the command line of ``sglang.benchmark.serving``, and our requests.

No code of the benchmark is copied. During one run, a few names of its module are replaced: the
dataset loader, the loop that sends the requests, and the tokenizer if there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from canopy_lab.live.replay import endpoint, options, outcome
from canopy_lab.live.replay.schedule import ReplayRequest, Schedule
from canopy_lab.trace.materialise import Materialiser, middle_token_ids, usable_token_ids
from sglang_canopy import SGLANG_VERSION, __version__
from sglang_canopy.errors import CanopyError
from sglang_canopy.wire.stamp import FORCE_OUTPUT

_TIMEOUT_S = 6 * 3600
_MAX_LINE_BYTES = 64 << 20
_SERVER_FACTS = (
    *("version", "model_path", "radix_eviction_policy", "radix_eviction_policy_config"),
    *("max_total_num_tokens", "context_length", "page_size", "enable_hierarchical_cache"),
    *("hicache_storage_backend", "schedule_policy", "chunked_prefill_size"),
    *("max_running_requests", "device"),
)


class Replay:
    """A replay of one command line, at one of its ``--rates``. ``upstream``: the benchmark."""

    def __init__(self, upstream: Any, args: argparse.Namespace, rate: float | None = None) -> None:
        options.check(args)
        if args.backend not in endpoint.DIALECTS:
            raise CanopyError(
                f"--backend {args.backend} cannot replay a trace: prompts are token ids, which "
                f"only these take: {', '.join(endpoint.DIALECTS)}"
            )
        self.args = args
        self.dialect = endpoint.DIALECTS[args.backend]
        self._upstream = upstream
        self._rate = rate
        self._is_forced = False
        self._jobs: list[ReplayRequest] = []
        self._prompts: Materialiser | None = None
        self._left_out = 0
        self._session: aiohttp.ClientSession | None = None
        self._server: Mapping[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Run the replay. Returns the result, and writes it to ``--output-file`` if that was given.

        Raises ``CanopyError`` if no request succeeded.
        """
        args, upstream = self.args, self._upstream
        args.canopy_dataset = args.dataset_name
        with replace_names(
            upstream,
            get_dataset=self._load,
            benchmark=self._serve,
            check_chat_template=lambda _model: True,
            get_tokenizer=self._tokenizer(upstream.get_tokenizer),
        ):
            arguments = vars(args) | {"dataset_name": f"canopy-{args.dataset_name}"}
            upstream.run_benchmark(argparse.Namespace(**arguments))
        result = self._result()
        if args.output_file and self._rate is None:
            Path(args.output_file).write_text(json.dumps(result, indent=1) + "\n")
        if result["completed"] == 0:
            kinds = result["errors"]["kinds"]
            raise CanopyError(f"none of {len(self._jobs)} requests succeeded: {next(iter(kinds))}")
        return result

    def _tokenizer(self, original: Any) -> Any:
        def get_tokenizer(name: str) -> Any:
            if self.args.vocab_size is not None:
                return None
            try:
                return original(name)
            except Exception as error:
                raise CanopyError(
                    f"no tokenizer at {name!r} ({type(error).__name__}); give --tokenizer PATH, "
                    "or --vocab-size N to do without one"
                ) from None

        return get_tokenizer

    def _load(self, args: argparse.Namespace, tokenizer: Any, _model_id: Any = None) -> list[Any]:
        if self.args.vocab_size is not None:
            vocabulary = middle_token_ids(self.args.vocab_size)
        else:
            vocabulary = usable_token_ids(tokenizer)
        self._server = self._ask_server(args)
        limit = self.args.max_request_tokens or self._max_server_tokens()
        self._jobs, self._prompts, self._left_out = options.build_jobs(self.args, vocabulary, limit)
        if self._left_out:
            print(f"Left out {self._left_out} requests of more than {limit} tokens.")
        self._vocabulary = vocabulary
        self._tokens_to_text = getattr(tokenizer, "decode", None)
        return self._jobs

    def _ask_server(self, args: argparse.Namespace) -> Mapping[str, Any]:
        if not args.backend.startswith("sglang"):
            return {}
        upstream = self._upstream
        base = upstream.resolve_base_url(args.base_url, args.host, args.port)
        try:
            answer = upstream.requests.get(
                base + "/server_info", headers=upstream.get_auth_headers(), timeout=10
            )
            return answer.json() if answer.status_code == 200 else {}
        except (upstream.requests.RequestException, ValueError):
            return {}

    def _max_server_tokens(self) -> int | None:
        limits = [
            self._server.get(key)
            for key in ("max_total_num_tokens", "max_req_input_len", "context_length")
        ]
        known_limits = [n for n in limits if isinstance(n, int) and n > 0]
        return min(known_limits) if known_limits else None

    async def _serve(
        self,
        *,
        base_url: str,
        api_url: str,
        model_id: str,
        extra_request_body: Mapping[str, Any],
        flush_cache: bool,
        flush_cache_timeout: float,
        disable_tqdm: bool,
        **_: Any,
    ) -> dict[str, Any]:
        """Send every job when it is due. Takes the arguments of the benchmark's own loop."""
        self._url, self._model, self._extra_body = api_url, model_id, extra_request_body
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, read_bufsize=_MAX_LINE_BYTES
        ) as self._session:
            await self._probe()
            if flush_cache:
                self._upstream.flush_server_cache(base_url, self.args.backend, flush_cache_timeout)
            schedule = self._make_schedule()
            with tqdm(total=len(self._jobs), disable=disable_tqdm) as bar:
                tasks = []
                async for job in schedule.arrivals():
                    tasks.append(asyncio.create_task(self._request(job, schedule, bar)))
                await asyncio.gather(*tasks)
        return {}

    def _make_schedule(self) -> Schedule:
        args, jobs, links = self.args, self._jobs, None
        if args.closed_loop:
            links = options.link_turns(jobs, args.time_scale, args.think_cap_s)
        if links is not None and self._rate is not None:
            offsets = options.session_offsets_s(links, self._rate, args.seed)
        else:
            offsets = options.due_offsets_s(
                jobs, args.time_scale, args.request_rate, args.seed, self._rate
            )
        return Schedule(jobs, offsets, args.max_concurrency, links)

    async def _probe(self) -> None:
        """Send one small request before the clock starts; detect whether outputs are forced."""
        prompt, forced_tokens = self._vocabulary[:8].tolist(), self._vocabulary[-8:].tolist()
        custom_params = {FORCE_OUTPUT: forced_tokens}
        reply = await self._send(prompt, 8, custom_params)
        if not reply.is_complete:
            raise CanopyError(f"the endpoint {self._url} does not answer: {reply.error}")
        if self.dialect.is_native:
            self._is_forced = reply.output_ids == forced_tokens
        elif self.dialect.has_custom_params and self._tokens_to_text:
            self._is_forced = reply.text.strip() == self._tokens_to_text(forced_tokens).strip()
        if not self._is_forced:
            print(
                "Outputs are not forced: the server does not obey custom_params."
                f"{FORCE_OUTPUT} (--canopy-enable-forced-output). A turn hits the prompt of "
                "the turn before it, not what that generated."
            )

    async def _request(self, job: ReplayRequest, schedule: Schedule, bar: Any) -> None:
        assert self._prompts is not None
        custom_params = dict(job.labels)
        forced_tokens: list[int] = []
        if self._is_forced:
            custom_params[FORCE_OUTPUT] = forced_tokens = self._prompts.output(job.planned)
        prompt = self._prompts.prompt(job.planned)
        job.reply = await self._send(prompt, job.planned.output_tokens, custom_params)
        is_checked = job.reply.is_complete and self._is_forced and self.dialect.is_native
        if is_checked and job.reply.output_ids != forced_tokens:
            job.reply.error = "the response is not the forced output"
        schedule.record_answer(job)
        bar.update(1)

    async def _send(
        self, prompt: list[int], output_tokens: int, custom_params: Mapping[str, Any]
    ) -> endpoint.Reply:
        assert self._session is not None
        payload = endpoint.make_body(
            self.dialect,
            self._model,
            prompt,
            output_tokens,
            custom_params,
            self._extra_body,
            stream=not self.args.disable_stream,
        )
        headers = self._upstream.get_request_headers()
        return await endpoint.send(self._session, self._url, self.dialect, payload, headers)

    def _result(self) -> dict[str, Any]:
        due_s = [job.due_s for job in self._jobs if job.reply is not None]
        done_s = [job.reply.done_s for job in self._jobs if job.reply and job.reply.is_complete]
        duration_s = max(max(done_s, default=0.0) - min(due_s, default=0.0), 1e-9)
        args = self.args
        result: dict[str, Any] = {
            "label": args.tag or self._server.get("radix_eviction_policy") or args.backend,
            "dataset": {"name": args.canopy_dataset, "path": str(args.dataset_path)},
            "options": {
                "num_prompts": args.num_prompts,
                "time_scale": args.time_scale,
                "request_rate": None if np.isinf(args.request_rate) else args.request_rate,
                "scale_lengths": str(args.scale_lengths),
                "max_concurrency": args.max_concurrency,
                "closed_loop": args.closed_loop,
                "think_cap_s": args.think_cap_s if args.closed_loop else None,
                "rate": self._rate,
                "warm_up_share": args.warm_up_share,
                "labels": not args.no_labels and self.dialect.has_custom_params,
                "seed": args.seed,
                "backend": args.backend,
                "model": args.model,
                "command": [sys.executable, *sys.argv],
            },
            "outputs_forced": self._is_forced,
            "output_pinned": self.dialect.pins_output,
            "left_out_too_long": self._left_out,
            "versions": {
                "sglang_canopy": __version__,
                "sglang": SGLANG_VERSION,
                "python": platform.python_version(),
            },
            "server": {key: self._server[key] for key in _SERVER_FACTS if key in self._server},
            **outcome.summarise(
                self._jobs, duration_s, warm_up_share=args.warm_up_share, slo=args.slo
            ),
        }
        if args.output_details:
            result["details"] = [_detail(job) for job in self._jobs]
        return result


@contextlib.contextmanager
def replace_names(module: Any, **names: Any) -> Iterator[None]:
    """Set these names of ``module`` within the block.

    Raises ``AttributeError`` for a name that the module lacks, before any replacement.
    """
    originals = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)


def _detail(job: ReplayRequest) -> dict[str, Any]:
    detail: dict[str, Any] = {
        "line": job.planned.request.line,
        "category": job.planned.request.category,
        "turn": job.planned.request.turn,
        "conversation": job.planned.request.conversation,
        "stop": job.planned.request.stop,
        "due_s": job.due_s,
    }
    if job.reply is not None:
        reply = asdict(job.reply)
        for field in ("output_ids", "text", "gaps_s"):
            del reply[field]
        detail.update(reply)
    return detail
