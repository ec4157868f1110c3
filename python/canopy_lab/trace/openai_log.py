"""Logs of an OpenAI API: JSON lines with ``messages`` or ``prompt`` and a time.

What gateways export, each in its own words: LiteLLM's ``StandardLoggingPayload``, Langfuse's
observations (exported to blob storage, or from its pages as one JSON list), OpenAI's batch form with
``body``, and plain lines of one's own:

    {"time": "2026-01-02T10:00:00Z", "messages": [{"role": "user", "content": "Hello"}]}

The messages are joined as role, text, tool calls; the tools that a request offers come first, as in
most chat templates. So the tokens are not quite those of a model's own template; which prompts share
which prefix is the same. Requests may be out of order by ``prompts.ORDER_WINDOW`` requests.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.prompts import LoggedPrompt, clients_name
from sglang_canopy.errors import CanopyError

TIMES = (
    *("startTime", "start_time", "time", "timestamp", "ts", "requestedAt", "request_time"),
    *("created_at", "createdAt", "created", "date"),
)
CONVERSATIONS = (
    *("canopy_conversation", "conversation_id", "conversationId", "session_id", "sessionId"),
    *("thread_id", "threadId", "litellm_session_id", "conversation"),
)
USERS = ("user", "user_id", "userId", "end_user", "user_api_key_user_id")
INPUTS = ("messages", "prompt", "input", "prompt_token_ids", "input_ids")
_WRAPPERS = (
    *("standard_logging_object", "body", "request", "proxy_server_request", "kwargs"),
    *("payload", "model_parameters", "modelParameters", "metadata", "custom_params", "extra_body"),
)
_APART = ("model", "lora_path", "extra_key", "cache_salt")
"""What keeps the KV of two prompts apart."""
_NO_CALLS = ("SPAN", "EVENT", "TRACE")
_OTHER_OBSERVATIONS = (
    "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"
)  # fmt: skip
"""Langfuse's that are no generation of a model; chains repeat their model's input."""
_OTHER_CALLS = ("embedding", "image", "transcription", "speech", "moderation", "rerank")
"""In LiteLLM's ``call_type``."""
_DATA_CHARACTERS = 256
"""A longer string without a blank in a part that is no text: a picture's bytes, not words."""
_STOPS = {"tool_calls": "tool", "function_call": "tool", "stop": "end", "length": "length"}
_LONGEST_LIST = 1 << 30
"""Bytes of a file that is one JSON list: it has to be read at once."""


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the prompts of ``path`` in the order of the file.

    Left out without a word: calls that failed, and what is no call of a language model (embeddings,
    Langfuse's spans).
    """
    models: dict[str, None] = {}
    for line, item in _objects(path):
        try:
            entry = lines.parse_object(item) if isinstance(item, bytes) else _checked(item)
            found = parse(entry, line)
        except lines.BadLine as error:
            tolerance.bad(line, error)
            continue
        models |= dict.fromkeys(prompt.apart[0] for prompt in found if prompt.apart[0])
        yield from found
    if len(models) > 1:
        lines.log.warning(
            "%s: it has calls of %d models (%s), which share no KV but here one cache; give a log of "
            "what one server runs", path, len(models), ", ".join(list(models)[:5]),
        )  # fmt: skip


def parse(entry: Mapping[str, Any], line: int = 0) -> list[LoggedPrompt]:
    """The prompts of one entry of a log; none for what is not a served call. Raises ``BadLine``."""
    if entry.get("status") in ("failure", "error") or entry.get("level") == "ERROR":
        return []
    kind, observed = str(entry.get("type")).upper(), "trace_id" in entry or "traceId" in entry
    if kind in _NO_CALLS or (observed and kind in _OTHER_OBSERVATIONS):
        return []
    if any(word in str(entry.get("call_type")) for word in _OTHER_CALLS):
        return []
    places = _places(entry)
    when = _first(places, TIMES)
    if when is None:
        raise lines.BadLine(f"it has no time; name it one of: {', '.join(TIMES)}")
    time_s = _seconds(when)
    places, prompts = _prompts_of(places)
    return [
        _prompt(LoggedPrompt(time_s, line), one, entry, places, len(prompts)) for one in prompts
    ]


def _prompt(
    prompt: LoggedPrompt,
    given: Any,
    entry: Mapping[str, Any],
    places: list[Mapping[str, Any]],
    calls: int,
) -> LoggedPrompt:
    """``prompt``, filled; ``given`` is one of ``calls`` of its entry."""
    _fill_prompt(prompt, given, places)
    named = _first(places, CONVERSATIONS)
    prompt.conversation = None if named is None else clients_name(named)
    user = _first(places, USERS)
    prompt.user = None if user is None else str(user)
    prompt.apart = tuple(str(_first(places, (name,)) or "") for name in _APART)
    category, turn = _first(places, ("canopy_category",)), _first(places, ("canopy_turn",))
    prompt.category = str(category) if category else prompt.category
    prompt.turn = turn if type(turn) is int and turn > 0 else prompt.turn
    _fill_answer(prompt, entry, places)
    if calls > 1:
        prompt.output_tokens, prompt.logged_tokens = prompt.output_tokens // calls, None
    return prompt


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """(line or ordinal, a line's bytes or an entry of the list that the file is)."""
    with lines.open_binary(path) as stream:
        begin = stream.read(64).lstrip()[:1]
    if begin != b"[":
        yield from lines.read_lines(path)
        return
    with lines.open_binary(path) as stream:
        raw = stream.read(_LONGEST_LIST + 1)
    if len(raw) > _LONGEST_LIST:
        raise CanopyError(f"{str(path)!r} is one JSON list of more than 1 GiB; make lines of it: jq -c '.[]'")  # fmt: skip
    try:
        yield from enumerate(json.loads(raw), 1)
    except ValueError as error:
        raise CanopyError(f"{str(path)!r} is not a JSON list ({error})") from None


def _checked(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise lines.BadLine(f"must be a JSON object, got {type(item).__name__}")
    return item


def _places(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entry and the objects in it that may hold what is looked for, outermost first."""
    places, at = [entry], 0
    while at < len(places) and len(places) < 16:
        for name in _WRAPPERS:
            inner = _decoded(places[at].get(name))
            if isinstance(inner, dict):
                places.append(inner)
        at += 1
    return places


def _first(places: list[Mapping[str, Any]], names: tuple[str, ...]) -> Any:
    for place in places:
        for name in names:
            value = place.get(name)
            if value is not None and value != "":
                return value
    return None


def _prompts_of(
    places: list[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Where to look for the rest, and the inputs of a call: several for a list of texts or of ids."""
    given = _decoded(_first(places, INPUTS))
    if isinstance(given, dict):  # Langfuse: {"messages": [...], "tools": [...]}
        places = [given, *places]
        given = _decoded(_first([given], INPUTS))
    several = isinstance(given, list) and bool(given) and set(map(type, given)) <= {str, list}
    return places, given if several else [given]


def _fill_prompt(prompt: LoggedPrompt, given: Any, places: list[Mapping[str, Any]]) -> None:
    if isinstance(given, list) and given and all(type(i) is int and 0 <= i < 1 << 63 for i in given):  # fmt: skip
        prompt.token_ids = given
    elif isinstance(given, list) and given and all(isinstance(part, dict) for part in given):
        _fill_messages(prompt, given, places)
    elif isinstance(given, str):
        prompt.text = given
    else:
        raise lines.BadLine(
            f"it has no prompt (messages, prompt or input); it has: {', '.join(sorted(map(str, places[0])))[:200]}"
        )


def _fill_messages(
    prompt: LoggedPrompt, messages: list[dict[str, Any]], places: list[Mapping[str, Any]]
) -> None:
    tools = _decoded(_first(places, ("tools", "functions")))
    category, roles = "chat", [str(m.get("role", "")) for m in messages]
    parts = [f"{json.dumps(tools)}\n"] if tools else []
    image = False
    for message, role in zip(messages, roles):
        text, has_image = _text(message)
        image = image or has_image
        parts.append(f"<{role}>\n{text}\n")
        if prompt.opening is None and role in ("user", "human"):
            prompt.opening = "".join(parts)
    prompt.text = "".join(parts)
    prompt.opening = prompt.opening or prompt.text
    # As the server infers them from a body (request/infer.py).
    category += "-tools" * bool(tools)
    category += "-json" * (_first(places, ("response_format",)) is not None)
    category += "-image" * image
    category += "-after-tool" * (roles[-1] in ("tool", "function"))
    prompt.category = category
    prompt.turn = 1 + sum(role in ("assistant", "ai", "model") for role in roles)


def _text(message: Mapping[str, Any]) -> tuple[str, bool]:
    """What a message adds to a prompt, and whether it holds something else than text."""
    content, image, parts = message.get("content", message.get("parts")), False, []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict):
            words = part.get("text", part.get("content"))
            shown = words if isinstance(words, str) else json.dumps(_short(part), sort_keys=True)
            parts.append(shown)
            image = image or "image" in str(part.get("type", ""))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        parts.append(json.dumps(call.get("function", call) if isinstance(call, dict) else call))
    return "\n".join(parts), image


def _short(value: Any) -> Any:
    """``value`` with a digest in place of a picture's or a sound's bytes."""
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    if not isinstance(value, str) or len(value) <= _DATA_CHARACTERS:
        return value
    words = not value.isascii() or len(value.split(maxsplit=1)) > 1
    return value if words else blake2b(value.encode(), digest_size=8).hexdigest()


def _fill_answer(
    prompt: LoggedPrompt, entry: Mapping[str, Any], places: list[Mapping[str, Any]]
) -> None:
    response = _decoded(entry.get("response"))
    answer = response if isinstance(response, dict) else {}
    body = answer.get("body")
    answer = body if isinstance(body, dict) else answer
    counts = [*places, answer]
    for name in ("usage", "usageDetails", "usage_details"):
        counts += [c for c in (_decoded(place.get(name)) for place in (*places, answer)) if isinstance(c, dict)]  # fmt: skip
    prompt.output_tokens = _count(counts, ("completion_tokens", "output_tokens", "output", "completionTokens")) or 0  # fmt: skip
    prompt.logged_tokens = _count(counts, ("prompt_tokens", "input_tokens", "input", "promptTokens"))  # fmt: skip
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        prompt.stop = _STOPS.get(str(choices[0].get("finish_reason")))
    reason = _first(places, ("canopy_stop", "finish_reason"))
    prompt.stop = _STOPS.get(str(reason), prompt.stop)


def _count(places: list[Mapping[str, Any]], names: tuple[str, ...]) -> int | None:
    """The first of ``names`` that holds a whole number above 0."""
    for place in places:
        for name in names:
            value = place.get(name)
            if type(value) is int and value > 0:
                return value
    return None


def _decoded(value: Any) -> Any:
    """``value``, parsed where an export has put JSON into a string."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _seconds(value: Any) -> float:
    """Seconds since 1970 of a number (s, ms, us or ns, told by its size) or a date and time."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                when = datetime.datetime.fromisoformat(value)
            except ValueError:
                raise lines.BadLine(f"its time must be a number or a date, got {value[:40]!r}") from None  # fmt: skip
            if when.tzinfo is None:
                when = when.replace(tzinfo=datetime.timezone.utc)
            return when.timestamp()
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise lines.BadLine(f"its time must be a number of 0 or more or a date, got {value!r}")
    for limit in (1e17, 1e14, 1e11):
        if value >= limit:
            return value / (limit / 1e8)
    return float(value)
