"""Parameters of the presets of ``make_synthetic.py``, with their sources.

``trace-a`` and ``trace-b`` follow the statistics of "KVCache Cache in the Wild"
(USENIX ATC 2025, arXiv 2506.02634); ``published.py`` lists them with their sources and
states the allowed error. A parameter below that the paper does not give is marked
"calibrated" (chosen to reproduce a published number) or "assumption" (not published).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_canopy.errors import CanopyError

BLOCK_TOKENS = 16
MAX_TURNS = 232
"""Turns of the longest session of trace A (Section 3.3)."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal quantity: its median, in the unit of the field, and its logarithm's deviation."""

    median: float
    sigma: float


@dataclass(frozen=True, slots=True)
class ChatKind:
    """One request type of a chat load: Text, File, Multimodal or Search of the paper."""

    name: str
    """The word in the Bailian ``type`` field."""
    request_share: float
    multi_turn_ratio: float
    """Share of this type's requests that are not a first turn (Figure 5)."""
    think_s: float
    """Mean pause between an answer and the next prompt of an attentive user."""
    first_tokens: LogNormal
    """Prompt and output of a first turn together, without the document."""
    later_tokens: LogNormal
    """Tokens that a later turn adds, prompt and output together."""
    document_tokens: LogNormal | None = None
    """Tokens of a file or of search results in the first prompt, unique to the session."""
    output_share: float = 0.42
    """Output tokens among those that a turn adds."""


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """People in conversations (trace A)."""

    requests_per_s: float
    kinds: tuple[ChatKind, ...]
    users: int
    user_sigma: float
    """Users' activity is log-normal with this deviation."""
    long_first_share: float
    """Share of first turns that are 1.5 to 5 times as long (pasted text)."""
    session_sigma: float
    """Standard deviation of a turn's length between sessions (log-normal)."""
    length_decay: float
    """The turns of a session of T turns are shorter by the factor T ** -length_decay."""
    away_share: float
    """Share of conversations with long pauses (``away_s``), while the user does something else."""
    away_s: float
    context_tokens: int
    """A prompt that would grow beyond this keeps its last quarter, and loses its prefix."""
    shared_prompt_share: float
    """Share of conversations that start with one of the applications' system prompts."""
    prompt_count: int
    """System prompts of all applications."""
    prompt_tokens: LogNormal
    """Tokens of a system prompt."""
    slow_from_turn: int = MAX_TURNS
    """From this turn on pauses are ``slow_factor`` times as long: users multitask in long conversations."""
    slow_factor: float = 1.0
    tail: tuple[float, float] = (2.75, 3.3)
    """(a, b): turn k >= 2 is followed by another with probability 1 - a / (k + b)."""


@dataclass(frozen=True, slots=True)
class ApiLoad:
    """Programs that call an API (trace B): tenants run jobs, jobs send requests."""

    requests_per_s: float
    tenants: int
    tenant_skew: float
    """Zipf exponent of the tenants' numbers of jobs."""
    head_tenant_share: float
    """Share of tenants, the busiest first, whose system prompts have ``head_prompt`` tokens."""
    head_prompt: LogNormal
    """Tokens of their system prompts."""
    prompt: LogNormal
    """Tokens of the other tenants' system prompts."""
    templates: int
    """A tenant has 1 to this many system prompts."""
    fresh_prompt_share: float
    """Share of the jobs with a system prompt of their own, which no later job uses."""
    job_requests: LogNormal
    """Requests of a job, and their rate."""
    job_requests_per_s: LogNormal
    payload: LogNormal
    """Tokens of a request's payload, after the system prompt."""
    repeat_share: float
    """Probability that a request reuses the previous request's payload with another question."""
    question: LogNormal
    """Tokens after the payload."""
    output: LogNormal
    multi_turn_ratio: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A load and its description for the trace's ``.meta.json`` file."""

    name: str
    load: ChatLoad | ApiLoad
    description: str

    def at_rate(self, requests_per_s: float | None) -> Preset:
        """Return the same load at another mean request rate."""
        if requests_per_s is None:
            return self
        if not 0 < requests_per_s <= 10_000:
            raise CanopyError(
                f"the rate must lie above 0 and be at most 10000 requests/s, got {requests_per_s}"
            )
        load = self.load
        if isinstance(load, ChatLoad):
            # Scale the number of users with the rate, not their habits.
            users = max(1, round(load.users * requests_per_s / load.requests_per_s))
            return replace(self, load=replace(load, requests_per_s=requests_per_s, users=users))
        return replace(self, load=replace(load, requests_per_s=requests_per_s))


_FIRST = LogNormal(730, 0.38)  # calibrated: mean 973 tokens a single-turn request (Section 3.5)
_LATER = LogNormal(1400, 0.5)  # calibrated: mean 5,953 tokens a multi-turn request (Section 3.5)

_TRACE_A = ChatLoad(
    requests_per_s=5.98,  # 43,058 requests in the public two-hour sample of trace A
    # Shares and multi-turn ratios: Figure 5. Pauses: calibrated, in the order of Figure 14
    # (Multimodal, Text, Search, File).
    kinds=(
        ChatKind("text", 0.78, 0.47, 67.0, _FIRST, _LATER),
        ChatKind("file", 0.04, 0.51, 120.0, _FIRST, _LATER, LogNormal(900, 0.8)),
        ChatKind("image", 0.03, 0.10, 36.0, _FIRST, _LATER),
        ChatKind("search", 0.15, 0.49, 93.0, _FIRST, _LATER, LogNormal(150, 0.5)),
    ),
    users=144_000,  # assumption: of a day
    user_sigma=0.6,  # calibrated: 19 % of the users send 50 % of the requests (Figure 8)
    long_first_share=0.03,  # calibrated: P99 of the single-turn lengths (Section 3.5)
    session_sigma=0.5,  # calibrated: P90 of the multi-turn lengths (Section 3.5)
    length_decay=0.05,  # calibrated: as above
    away_share=0.0,
    away_s=0.0,
    # calibrated on a day: 80 % of the reuses within 10 minutes while the P90 lifespan of a block is
    # 612 s, so that long pauses belong to few blocks, each reused often (Sections 3.4, 3.5)
    slow_from_turn=11,
    slow_factor=35.0,
    context_tokens=26_000,  # calibrated: P99 of the multi-turn lengths (Section 3.5)
    shared_prompt_share=0.28,  # under 30 % of single-turn requests are reusable (Figure 13)
    prompt_count=24,  # assumption
    prompt_tokens=LogNormal(220, 0.6),  # assumption
)

_TRACE_B = ApiLoad(
    requests_per_s=24.0,  # 172,800 requests in the public two-hour sample of trace B
    tenants=2_000,  # assumption
    tenant_skew=1.5,  # calibrated: 15 % of the users send 90 % of the requests (Figure 8)
    head_tenant_share=0.01,  # calibrated: 4 % of the users have 90 % of the hits (Figure 7)
    head_prompt=LogNormal(335, 0.15),  # calibrated: ideal hit ratio 54 % (Figure 4)
    prompt=LogNormal(130, 0.6),
    templates=3,  # assumption
    fresh_prompt_share=0.3,  # calibrated: P99 lifespan 97 s
    job_requests=LogNormal(20, 1.3),  # assumption
    # some above 10 requests/s (Section 3.2); calibrated: 80 % of the reuses within 10 s (Section 3.4)
    job_requests_per_s=LogNormal(0.12, 2.2),
    payload=LogNormal(180, 0.8),  # calibrated: median input of the public sample, 574 tokens
    repeat_share=0.14,  # calibrated: P90 lifespan 0.3 s
    question=LogNormal(40, 0.5),
    output=LogNormal(120, 0.9),  # assumption
    multi_turn_ratio=0.0008,  # Figure 5
)

_SMALL = ChatLoad(
    requests_per_s=1.5,
    kinds=(
        ChatKind("text", 0.5, 0.55, 4.0, LogNormal(420, 0.3), LogNormal(220, 0.3)),
        ChatKind(
            "search", 0.2, 0.5, 6.0, LogNormal(420, 0.3), LogNormal(220, 0.3), LogNormal(150, 0.4)
        ),
        ChatKind(
            "file", 0.2, 0.5, 8.0, LogNormal(420, 0.3), LogNormal(220, 0.3), LogNormal(400, 0.3)
        ),
        ChatKind("image", 0.1, 0.3, 3.0, LogNormal(420, 0.3), LogNormal(220, 0.3)),
    ),
    users=20,
    user_sigma=0.6,
    long_first_share=0.0,
    session_sigma=0.1,
    length_decay=0.0,
    away_share=0.0,
    away_s=30.0,
    context_tokens=3_000,
    shared_prompt_share=0.9,
    prompt_count=3,
    prompt_tokens=LogNormal(220, 0.2),
    tail=(6.0, 6.0),
)

PRESETS = {
    "trace-a": Preset("trace-a", _TRACE_A, "people in chat, file, image and search conversations"),
    "trace-b": Preset("trace-b", _TRACE_B, "programs calling an API with fixed system prompts"),
    "small": Preset("small", _SMALL, "a minute of short conversations, for a first try"),
}


def get_preset(name: str) -> Preset:
    """Return a preset by name. Raises ``CanopyError`` if it does not exist."""
    if name not in PRESETS:
        raise CanopyError(f"unknown preset {name!r}; choose one of: {', '.join(PRESETS)}")
    return PRESETS[name]
