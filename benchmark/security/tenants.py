"""The two tenants of the hostile soak: an honest tenant, and a hostile one with false hints, floods and probes.

Tenants differ by ``extra_key``, which a gateway would set: the hostile tenant never sends the honest
tenant's key. Prompts are a function of a step's number only, so every run sends the same prompts.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

HONEST, HOSTILE = "honest-tenant", "hostile-tenant"
WORKING_SET_SHARE = 0.4
"""Tokens that the honest tenant sends in one round of its conversations, as a share of the pool."""
SYSTEM_TOKENS, TURN_TOKENS, TURNS = 96, 48, 6
"""Tokens of the shared system prompt, of a turn, and turns of a conversation."""
PAUSE_S = 0.02
"""Pause between two requests of a flooding thread."""
DOCUMENT_TOKENS = 64
"""Tokens of a document of the honest tenant. Registering one computes it, and that is traffic
beyond the prompts: kept small, so that both tenants still send about equally much."""


def send_request(url: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """Send a request; return its status and text. ``body``: bytes or an iterator are sent as they are, others as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    if body is not None and not isinstance(body, bytes) and not hasattr(body, "__next__"):
        body = json.dumps(body).encode()
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def generate(
    url: str, prompt: list[int], tenant: str, custom: dict[str, Any] | None = None, **body: Any
) -> tuple[int, Any]:
    """Generate one token for a prompt; return the status, and the answer or the refusal's text."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    if custom:
        sampling["custom_params"] = custom
    request_body = {"input_ids": prompt, "sampling_params": sampling, "extra_key": tenant, **body}
    status, text = send_request(url, "POST", "/generate", request_body)
    return status, json.loads(text) if status == 200 else text


def make_tokens(count: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(1000, 20_000) for _ in range(count)]


class StepPrompt(NamedTuple):
    """The honest tenant's request in a step."""

    conversation: str
    turn: int
    tokens: list[int]


@dataclass(slots=True)
class Honest:
    """Conversations in rotation, each restarted after ``TURNS``, with true labels."""

    pool_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def conversation_count(self) -> int:
        average_tokens = SYSTEM_TOKENS + TURN_TOKENS * (TURNS + 1) // 2
        return max(2, int(WORKING_SET_SHARE * self.pool_tokens / average_tokens))

    @property
    def warm_up_steps(self) -> int:
        """Steps until every conversation has been through all of its turns once."""
        return self.conversation_count * TURNS

    def prompt(self, step: int) -> StepPrompt:
        number = step % self.conversation_count
        rounds = step // self.conversation_count + number  # they do not all restart at once
        name, turn = f"honest-{number}-{rounds // TURNS}", rounds % TURNS + 1
        turn_tokens = make_tokens(TURN_TOKENS * TURNS, name)[: TURN_TOKENS * turn]
        return StepPrompt(name, turn, make_tokens(SYSTEM_TOKENS, "system") + turn_tokens)

    def step(self, url: str, step: int) -> None:
        """Send a step's request; count its tokens once everything is warm."""
        name, turn, prompt = self.prompt(step)
        hints = {"canopy_category": "chat", "canopy_turn": turn, "canopy_conversation": name}
        status, answer = generate(url, prompt, HONEST, hints)
        if status != 200:
            self.errors.append(f"step {step}: {status} {answer[:200]}")
        elif step >= self.warm_up_steps:
            self.prompt_tokens += answer["meta_info"]["prompt_tokens"]
            self.cached_tokens += answer["meta_info"]["cached_tokens"]

    def make_document(self, i: int) -> list[int]:
        return make_tokens(DOCUMENT_TOKENS, f"the honest tenant's document {i}")

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class Hostile:
    """Sends the same number of tokens as the honest tenant; with ``tells_lies``, also runs all attacks."""

    honest: Honest
    tells_lies: bool
    requests_by_kind: dict[str, int] = field(default_factory=dict)
    """Requests of each kind."""
    faults: list[str] = field(default_factory=list)
    """Answers that there should not be: leaks, and errors of the server's own."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def step(self, url: str, step: int) -> None:
        """Send a prompt of the honest prompt's length: mostly new tokens, at times an old prompt (a
        conversation with the hint that it is over continues), at times the honest tenant's prompt."""
        name, _, honest_prompt = self.honest.prompt(step)
        if step % 20 == 0:
            self._probe(url, step, honest_prompt)
            return
        past_step = step - 5 if step % 10 == 9 else step
        prompt = make_tokens(len(self.honest.prompt(past_step).tokens), f"flood {past_step}")
        hints = self._false_hints(step, name) if self.tells_lies else None
        status, answer = generate(url, prompt, HOSTILE, hints)
        self._count_answer("prompts", status, answer)

    def _false_hints(self, step: int, conversation: str) -> dict[str, Any]:
        hints: dict[str, Any] = {
            "canopy_category": f"invented-{step}",
            "canopy_turn": 1 + step % 1000,
            "canopy_conversation": conversation,
            "canopy_stop": "tool",
            "canopy_keep_s": 3600,
            "canopy_ttl_s": 30 * 24 * 3600,
            "canopy_slo_ms": 1,
        }
        return hints | ({"canopy_over": True} if step % 10 == 4 else {"canopy_return_in_s": 1})

    def _probe(self, url: str, step: int, honest_prompt: list[int]) -> None:
        """Send the honest tenant's prompt and document from an unused namespace: any reuse is a leak."""
        salt = f"probe-{step}"
        status, answer = generate(url, honest_prompt, HOSTILE, cache_salt=salt)
        self._count_answer("probes", status, answer)
        if status == 200 and answer["meta_info"]["cached_tokens"]:
            self.faults.append(f"step {step}: reused the honest tenant's KV: {answer['meta_info']}")
        document = self.honest.make_document(step % 3)
        prompt = [*make_tokens(20, salt), *document, *make_tokens(10, salt)]
        bounds = {"canopy_document_bounds": [20, 20 + len(document)]}
        status, answer = generate(url, prompt, HOSTILE, bounds, cache_salt=salt)
        self._count_answer("probes", status, answer)
        report = answer["meta_info"].get("canopy_documents") if status == 200 else None
        if report and report[0] and report[0].get("fused"):
            self.faults.append(f"step {step}: reused the honest tenant's document: {report[0]}")

    def start(self, url: str) -> None:
        """Flood every route of Canopy's until ``stop``."""
        attacks = (self._send_hints, self._delete_documents, self._send_malformed, self._read)
        for attack in attacks:
            thread = threading.Thread(target=self._repeat, args=(attack, url), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)

    def _repeat(self, attack: Callable[[str, int], None], url: str) -> None:
        for count in itertools.count():
            if self._stop.wait(PAUSE_S):
                return
            try:
                attack(url, count)
            except (OSError, http.client.HTTPException) as error:
                # The server closes the connection on endless bodies; elsewhere this is a fault.
                if attack != self._send_malformed:
                    self.faults.append(f"{attack.__name__} {count}: {error!r}")

    def _send_hints(self, url: str, i: int) -> None:
        number = i % self.honest.conversation_count
        name = f"honest-{number}-{i // 500}" if i % 2 else f"invented-{i}"
        hint = {"conversation": name, "extra_key": HOSTILE, "over": bool(i % 3), "keep_s": 3600}
        self._count_answer("hints", *send_request(url, "POST", "/canopy/hint", hint))

    def _delete_documents(self, url: str, i: int) -> None:
        """Delete the documents of its own tenant and of one that does not exist."""
        name = HOSTILE if i % 2 else f"invented-{i}"
        path = f"/canopy/documents?extra_key={name}"
        self._count_answer("documents", *send_request(url, "DELETE", path))

    def _send_malformed(self, url: str, i: int) -> None:
        method, path, body = MALFORMED[i % len(MALFORMED)]
        status, text = send_request(url, method, path, body() if callable(body) else body)
        self._count_answer("malformed", status, text)
        if status == 200:
            self.faults.append(f"{path} took malformed body {i % len(MALFORMED)}: {text[:200]}")

    def _read(self, url: str, i: int) -> None:
        path = ("/canopy/status", "/server_info", "/metrics")[i % 3]
        status, text = send_request(url, "GET", path)
        self._count_answer("readings", status, text)
        for secret in (HONEST, "honest-0-"):
            if secret in text:
                self.faults.append(f"{path} shows {secret} of the honest tenant")

    def _count_answer(self, kind: str, status: int, text: Any) -> None:
        self.requests_by_kind[kind] = self.requests_by_kind.get(kind, 0) + 1
        if status >= 500:
            self.faults.append(f"{kind}: status {status}: {str(text)[:200]}")


def _endless_body() -> Iterator[bytes]:
    """A body of no stated length, four times as long as any route takes."""
    for _ in range(1024):
        yield b" " * (1 << 16)


def _body_with(**custom_params: Any) -> dict[str, Any]:
    return {"text": "x", "sampling_params": {"max_new_tokens": 1, "custom_params": custom_params}}


MALFORMED: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/canopy/hint", b""),
    ("POST", "/canopy/hint", b"\xff\xfe\x00"),
    ("POST", "/canopy/hint", b"[" * 4000),
    ("POST", "/canopy/hint", b'{"conversation": "a", "keep_s": 1' + b"0" * 400 + b"}"),
    ("POST", "/canopy/hint", {"conversation": "a", "over": True, "tenant": HONEST}),
    ("POST", "/canopy/hint", b'{"a": "' + b"x" * (1 << 20) + b'"}'),
    ("POST", "/canopy/hint", _endless_body),
    ("DELETE", "/canopy/documents?extra_key=a&extra_key=b", None),
    ("POST", "/generate", _body_with(canopy_keep_s=1e400)),
    ("POST", "/generate", _body_with(canopy_keep_s=10**400)),
    ("POST", "/generate", _body_with(canopy_documents=[5, 1])),
    ("POST", "/generate", _body_with(canopy_turn="\ud800")),
)
"""Each must be answered with a refusal."""
