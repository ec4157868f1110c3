"""Programs that call an API: the generator behind ``trace-b``.

Tenants have fixed system prompts and run jobs; a job sends requests at its own speed, each with
its own payload, now and then asking twice about the same one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from synthetic.blocks import DrawnRequest, GrowingPrompt, SharedPrefix, SharedPrompts
from synthetic.draw import OUTPUT_TOKENS_PER_S, choose_index, cumulate, draw_tokens
from synthetic.presets import ApiLoad

_MAX_MEAN_GAP_S = 60.0
"""Largest mean gap between two requests of a job (assumption)."""
_WARM_UP_S = 3600.0
"""Seconds before the trace at which jobs start, so that some are running at its beginning."""


@dataclass(slots=True)
class _Job:
    tenant: int
    system_prompt: SharedPrefix
    requests_left: int
    mean_gap_s: float
    """Mean seconds between two requests of the job."""
    last_payload: SharedPrefix | None = None
    """System prompt and payload of the job's last new payload."""


@dataclass(slots=True)
class _Reply:
    """The second turn of one of the few conversations; ``turn`` is its number in the trace."""

    conversation: int
    prompt: GrowingPrompt
    tenant: int
    turn: int


class ApiSource:
    """Draws the jobs of a load; iterate it once."""

    def __init__(self, load: ApiLoad, trace_s: float, rng: Random, ids: itertools.count) -> None:
        self.load, self.trace_s, self.rng, self.ids = load, trace_s, rng, ids
        self._tenant_weights = cumulate([(i + 1) ** -load.tenant_skew for i in range(load.tenants)])
        self._prompts_by_tenant = [
            SharedPrompts(
                ids, [self._prompt_tokens(tenant) for _ in range(rng.randint(1, load.templates))]
            )
            for tenant in range(load.tenants)
        ]
        self._conversation_numbers = itertools.count()
        self._due: list[tuple[float, int, _Job | _Reply]] = []
        """Heap of when each job or reply sends its next request, in seconds of the trace."""
        self._tie_breakers = itertools.count()

    def __iter__(self) -> Iterator[DrawnRequest]:
        load, rng = self.load, self.rng
        sigma = load.job_requests.sigma
        mean_requests = load.job_requests.median * math.exp(sigma * sigma / 2.0)
        jobs_per_s = load.requests_per_s / mean_requests
        start_s = -_WARM_UP_S + rng.expovariate(jobs_per_s)
        while start_s < self.trace_s:
            yield from self._draw_until(start_s)
            self._schedule(start_s, self._draw_job())
            start_s += rng.expovariate(jobs_per_s)
        yield from self._draw_until(self.trace_s)

    def _prompt_tokens(self, tenant: int) -> int:
        load = self.load
        is_head = tenant < load.head_tenant_share * load.tenants
        return draw_tokens(self.rng, load.head_prompt if is_head else load.prompt)

    def _schedule(self, due_s: float, sender: _Job | _Reply) -> None:
        heapq.heappush(self._due, (due_s, next(self._tie_breakers), sender))

    def _draw_until(self, end_s: float) -> Iterator[DrawnRequest]:
        while self._due and self._due[0][0] < end_s:
            time_s, _, sender = heapq.heappop(self._due)
            if isinstance(sender, _Job):
                request = self._draw_job_request(time_s, sender)
            else:
                request = self._draw_reply_request(time_s, sender)
            if time_s >= 0.0:
                yield request

    def _draw_job(self) -> _Job:
        load, rng = self.load, self.rng
        tenant = choose_index(rng, self._tenant_weights)
        prompts = self._prompts_by_tenant[tenant]
        if rng.random() < load.fresh_prompt_share:
            prompts = SharedPrompts(self.ids, [self._prompt_tokens(tenant)])
        system_prompt = rng.choice(prompts)
        rate = load.job_requests_per_s
        mean_gap_s = 1.0 / (rate.median * math.exp(rng.gauss(0.0, rate.sigma)))
        request_count = draw_tokens(rng, load.job_requests)
        return _Job(tenant, system_prompt, request_count, min(mean_gap_s, _MAX_MEAN_GAP_S))

    def _draw_job_request(self, time_s: float, job: _Job) -> DrawnRequest:
        load, rng = self.load, self.rng
        job.requests_left -= 1
        if job.requests_left > 0:
            self._schedule(time_s + rng.expovariate(1.0 / job.mean_gap_s), job)
        if job.last_payload is not None and rng.random() < load.repeat_share:
            prompt = GrowingPrompt(self.ids, job.last_payload)
        else:
            prompt = GrowingPrompt(self.ids, job.system_prompt)
            prompt.extend(draw_tokens(rng, load.payload))
            job.last_payload = prompt.as_shared()
        prompt.extend(draw_tokens(rng, load.question))
        output_tokens = draw_tokens(rng, load.output)
        conversation = next(self._conversation_numbers)
        reply_s = time_s + output_tokens / OUTPUT_TOKENS_PER_S + rng.expovariate(0.2)
        has_reply = rng.random() < load.multi_turn_ratio and reply_s < self.trace_s
        request = DrawnRequest(
            time_s, prompt.tokens, output_tokens, prompt.blocks(), "api", 1, conversation, job.tenant,
            has_reply,
        )  # fmt: skip
        if has_reply:
            prompt.extend(output_tokens)
            # A conversation begun before the trace enters it with its reply.
            turn = 2 if time_s >= 0.0 else 1
            self._schedule(reply_s, _Reply(conversation, prompt, job.tenant, turn))
        return request

    def _draw_reply_request(self, time_s: float, reply: _Reply) -> DrawnRequest:
        prompt = reply.prompt
        prompt.extend(draw_tokens(self.rng, self.load.question))
        output_tokens = draw_tokens(self.rng, self.load.output)
        return DrawnRequest(
            time_s, prompt.tokens, output_tokens, prompt.blocks(), "api", reply.turn,
            reply.conversation, reply.tenant, False,
        )  # fmt: skip
