"""Tables of an engine's step costs, measured by ``canopy profile`` or from published figures.

A prefill step costs a part linear in its tokens (projections, feed-forward, the step itself) plus
attention of each request over its context. A decode step's cost depends on the batch size and the
mean length. Values between measured points are interpolated; beyond them the last slope continues.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError

PROFILE_FOLDER = Path(__file__).parent / "profiles"
FILE_VERSION = 1
MEASURED = "measured"
PUBLISHED = "published figures, not measured"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of a tier, and the latency of each transfer."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """One model on one device. Times in seconds, lengths in tokens."""

    name: str
    model: str
    device: str
    date: str
    source: str
    """``"measured"`` or ``"published figures, not measured"``."""
    sources: tuple[str, ...] = ()
    """The measuring command, or the sources of the figures."""
    kv_bytes_per_token: int
    layers: int
    prefill_tokens: tuple[float, ...]
    """Tokens of a prefill step, over all its requests, ascending."""
    prefill_linear_s: tuple[float, ...]
    """Cost of such a step without attention."""
    attention_new_tokens: tuple[float, ...]
    attention_context_tokens: tuple[float, ...]
    attention_s: tuple[tuple[float, ...], ...]
    """``[new][context]``: attention of one request's new tokens after its cached tokens."""
    decode_batch: tuple[float, ...]
    decode_context_tokens: tuple[float, ...]
    decode_step_s: tuple[tuple[float, ...], ...]
    """``[batch][context]``: one decode step, by requests and tokens per request."""
    prefill_request_s: float = 0.0
    """Cost of each further request in a prefill step."""
    arrival_s: float = 0.0
    """Time from the client to the scheduler's queue, and back for the first token."""
    host: Bandwidth | None = None
    """Transfers between host memory and device; ``None`` if not measured."""
    disk: Bandwidth | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def prefill_s(self, new_tokens: float, context_tokens: float = 0.0) -> float:
        return self.linear_s(new_tokens) + self.attend_s(new_tokens, context_tokens)

    def prefill_batch_s(self, requests: Iterable[tuple[float, float]]) -> float:
        """Return the seconds of a prefill step of (new tokens, context tokens) requests."""
        total_tokens, attention_s = 0.0, -self.prefill_request_s
        for new_tokens, context_tokens in requests:
            total_tokens += new_tokens
            attention_s += self.attend_s(new_tokens, context_tokens) + self.prefill_request_s
        return self.linear_s(total_tokens) + attention_s

    def linear_s(self, tokens: float) -> float:
        """Return the part of a prefill step that is linear in its tokens."""
        return _interpolate(self.prefill_tokens, self.prefill_linear_s, tokens)

    def attend_s(self, new_tokens: float, context_tokens: float) -> float:
        """Return the seconds of attention of ``new_tokens`` tokens after ``context_tokens`` tokens.

        Interpolated as seconds per pair of query and key, which vary little, while the number of
        pairs grows with the square.
        """
        new_axis, context_axis = self.attention_new_tokens, self.attention_context_tokens
        i, new_weight = _locate(new_axis, min(max(new_tokens, new_axis[0]), new_axis[-1]))
        j, context_weight = _locate(context_axis, min(context_tokens, context_axis[-1]))
        pair_s = 0.0
        for row, row_weight in ((i, 1 - new_weight), (i + 1, new_weight)):
            if not row_weight:
                continue
            for column, column_weight in ((j, 1 - context_weight), (j + 1, context_weight)):
                if column_weight:
                    pair_s += row_weight * column_weight * self._seconds_per_pair[row][column]
        return pair_s * _pairs(new_tokens, context_tokens)

    @cached_property
    def _seconds_per_pair(self) -> list[list[float]]:
        """Seconds per query-key pair at the measured points, ``[new][context]``."""
        return [
            [
                seconds / _pairs(new_tokens, context_tokens)
                for context_tokens, seconds in zip(self.attention_context_tokens, row, strict=True)
            ]
            for new_tokens, row in zip(self.attention_new_tokens, self.attention_s, strict=True)
        ]

    def decode_s(self, batch_size: float, context_tokens: float) -> float:
        """Return the seconds of a decode step of ``batch_size`` requests with this mean context."""
        contexts, batches = self.decode_context_tokens, self.decode_batch
        i, weight = _locate(batches, batch_size)
        low_s = _interpolate(contexts, self.decode_step_s[i], context_tokens)
        if not weight or len(batches) == 1:
            return low_s
        high_s = _interpolate(contexts, self.decode_step_s[i + 1], context_tokens)
        return max(low_s + weight * (high_s - low_s), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, the input of ``from_json``."""
        return {"version": FILE_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> EngineProfile:
        """Validate and load JSON data. Raises ``CanopyError`` naming the wrong field."""
        if not isinstance(data, dict) or data.get("version") != FILE_VERSION:
            raise CanopyError(
                f"an engine profile is a JSON object with version {FILE_VERSION}; make one with: "
                "canopy profile --url URL --out FILE"
            )
        values = {key: value for key, value in data.items() if key != "version"}
        allowed = {f.name for f in fields(cls)}
        if unknown := set(values) - allowed:
            raise CanopyError(
                f"engine profile: unknown field {min(unknown)!r}; allowed: {', '.join(sorted(allowed))}"
            )
        try:
            for key in ("host", "disk"):
                if values.get(key) is not None:
                    values[key] = Bandwidth(**values[key])
            for key in ("attention_s", "decode_step_s"):
                values[key] = tuple(tuple(row) for row in values[key])
            for key, value in values.items():
                if isinstance(value, list):
                    values[key] = tuple(value)
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise CanopyError(f"engine profile: {error}; measure it again") from None


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.json")))


def load_profile(name: str | Path) -> EngineProfile:
    """Load a profile of the package by name, or a file by path.

    Raises ``CanopyError`` for an unknown name, or an unreadable or invalid file.
    """
    text = str(name)
    path = PROFILE_FOLDER / f"{text}.json" if text in profile_names() else Path(text)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise CanopyError(
            f"profile {text!r} is neither one of {', '.join(profile_names())} nor a readable "
            "file; measure one with: canopy profile --url URL --out FILE"
        ) from None
    except ValueError:
        raise CanopyError(f"profile {text!r} is not JSON; measure it again") from None
    return EngineProfile.from_json(data)


def _pairs(new_tokens: float, context_tokens: float) -> float:
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) / 2


def _locate(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Return the segment of ``axis`` for ``x``, and the position in it; clamped to the ends."""
    if len(axis) == 1:
        return 0, 0.0
    i = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


def _interpolate(axis: Sequence[float], values: Sequence[float], x: float) -> float:
    i, weight = _locate(axis, x)
    if not weight:
        return values[i]
    return max(values[i] + weight * (values[i + 1] - values[i]), 0.0)


def _check(profile: EngineProfile) -> None:
    def invalid(what: str) -> CanopyError:
        return CanopyError(f"engine profile {profile.name!r}: {what}; measure it again")

    for key in ("name", "model", "device", "date", "source"):
        if not isinstance(getattr(profile, key), str) or not getattr(profile, key):
            raise invalid(f"{key} must be a text")
    if profile.source not in (MEASURED, PUBLISHED):
        raise invalid(f"source must be {MEASURED!r} or {PUBLISHED!r}, got {profile.source!r}")
    for key in ("kv_bytes_per_token", "layers"):
        if type(getattr(profile, key)) is not int or getattr(profile, key) < 1:
            raise invalid(f"{key} must be a whole number of 1 or more")
    axes = ("prefill_tokens", "attention_new_tokens", "attention_context_tokens")
    for key in (*axes, "decode_batch", "decode_context_tokens"):
        axis = getattr(profile, key)
        if not _are_numbers(axis) or not axis or any(b <= a for a, b in pairwise(axis)):
            raise invalid(f"{key} must be ascending numbers of 0 or more")
    if profile.attention_new_tokens[0] < 1:
        raise invalid("attention_new_tokens must begin at 1 or more")
    linear_s = profile.prefill_linear_s
    if not _are_numbers(linear_s) or len(linear_s) != len(profile.prefill_tokens):
        raise invalid("prefill_linear_s must have one time for each of prefill_tokens")
    for key, rows, columns in (
        ("attention_s", profile.attention_new_tokens, profile.attention_context_tokens),
        ("decode_step_s", profile.decode_batch, profile.decode_context_tokens),
    ):
        table = getattr(profile, key)
        if len(table) != len(rows) or any(
            not _are_numbers(row) or len(row) != len(columns) for row in table
        ):
            raise invalid(f"{key} must be {len(rows)} rows of {len(columns)} times of 0 or more")
    if min(map(min, profile.decode_step_s)) <= 0 or max(linear_s) <= 0:
        raise invalid("a step must take more than 0 s")
    if not _are_numbers((profile.arrival_s, profile.prefill_request_s)):
        raise invalid("arrival_s and prefill_request_s must be 0 or more")
    for key in ("host", "disk"):
        bandwidth = getattr(profile, key)
        if bandwidth is None:
            continue
        numbers = (bandwidth.read_bytes_per_s, bandwidth.write_bytes_per_s, bandwidth.latency_s)
        if not _are_numbers(numbers) or min(numbers[:2]) <= 0:
            raise invalid(f"{key} must have bandwidths above 0")


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and v >= 0
        for v in values
    )
