"""The traffic of ``traffic.py`` in every format that is read, as each program writes it."""

import csv
import datetime
import io
import json
from collections.abc import Callable
from typing import Any

from traffic import START_S, TOOLS, Call, when

Rows = list[Any]
FORMATS: dict[str, tuple[str, Callable[[list[Call]], bytes]]] = {}
"""Name -> (format that ``guess_format`` finds, writer)."""


def of_rows(name: str, format: str) -> Callable[[Callable[[Call, int], Any]], Any]:
    """A format of one line, or several, for each call."""

    def register(row: Callable[[Call, int], Any]) -> Any:
        def write(calls: list[Call]) -> bytes:
            made: Rows = []
            for number, call in enumerate(calls):
                found = row(call, number)
                made += found if isinstance(found, list) else [found]
            return lines(made)

        FORMATS[name] = (format, write)
        return row

    return register


def lines(rows: Rows) -> bytes:
    """Rows as lines: text as it is, anything else as JSON."""
    return b"".join(
        (r if isinstance(r, str) else json.dumps(r)).encode("utf-8", "surrogatepass") + b"\n"
        for r in rows
    )


@of_rows("own", "openai")
def own(c: Call, n: int) -> Any:
    return {"time": when(c.at_s), "session_id": c.talk, "model": "m", "messages": c.messages,
            "tools": TOOLS, "usage": c.usage}  # fmt: skip


@of_rows("own-unnamed", "openai")
def own_unnamed(c: Call, n: int) -> Any:
    return {"time": when(c.at_s), "messages": c.messages, "tools": TOOLS, "usage": c.usage}


@of_rows("litellm-payload", "openai")
def litellm_payload(c: Call, n: int) -> Any:
    """``StandardLoggingPayload``."""
    return {
        "id": f"chatcmpl-{n}", "trace_id": c.talk, "session_id": c.talk, "call_type": "acompletion",
        "status": "success", "startTime": START_S + c.at_s, "endTime": START_S + c.at_s + 3,
        "model": "m", "prompt_tokens": c.tokens, "completion_tokens": 25, "cache_hit": False,
        "messages": c.messages, "model_parameters": {"tools": TOOLS, "temperature": 0},
        "metadata": {"user_api_key_user_id": "u"},
        "response": {"choices": [{"finish_reason": "stop"}], "usage": c.usage},
    }  # fmt: skip


def spend_log(c: Call, n: int) -> dict[str, Any]:
    """A row of LiteLLM's table SpendLogs with ``store_prompts_in_spend_logs``: JSON in strings."""
    return {
        "request_id": f"chatcmpl-{n}", "call_type": "acompletion", "api_key": "h", "spend": 0.1,
        "prompt_tokens": c.tokens, "completion_tokens": 25, "startTime": when(c.at_s),
        "endTime": when(c.at_s + 3), "model": "m", "user": "", "cache_hit": "False",
        "metadata": json.dumps({"status": "success", "user_api_key_user_id": "u"}),
        "messages": "{}", "session_id": c.talk, "status": "success",
        "response": json.dumps({"choices": [{"finish_reason": "stop"}], "usage": c.usage}),
        "proxy_server_request": json.dumps({"model": "m", "messages": c.messages, "tools": TOOLS}),
    }  # fmt: skip


of_rows("litellm-spendlogs", "openai")(spend_log)


def spend_logs_table(calls: list[Call]) -> bytes:
    """The same table as psql's ``\\copy ... csv header`` writes it."""
    rows = [spend_log(c, n) for n, c in enumerate(calls)]
    out = io.StringIO()
    table = csv.DictWriter(out, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    return out.getvalue().encode()


FORMATS["litellm-spendlogs-csv"] = ("openai", spend_logs_table)


@of_rows("langfuse", "openai")
def langfuse(c: Call, n: int) -> Any:
    """Its export to blob storage."""
    stamp = datetime.datetime.fromtimestamp(START_S + c.at_s, datetime.timezone.utc)
    return {
        "id": f"o{n}", "trace_id": f"t{c.talk}", "type": "GENERATION", "session_id": c.talk,
        "start_time": stamp.strftime("%Y-%m-%d %H:%M:%S.%f"), "user_id": "u", "level": "DEFAULT",
        "provided_model_name": "m", "output": json.dumps({"role": "assistant", "content": c.answer}),
        "input": json.dumps({"messages": c.messages, "tools": TOOLS}),
        "usage_details": {"input": c.tokens - 40, "input_cached_tokens": 40, "output": 25},
    }  # fmt: skip


def langfuse_page(calls: list[Call]) -> bytes:
    """Return the export of its pages: a JSON list."""
    return json.dumps([
        {"id": f"o{n}", "traceId": f"t{c.talk}", "type": "GENERATION", "startTime": when(c.at_s),
         "sessionId": c.talk, "model": "m", "input": {"messages": c.messages, "tools": TOOLS},
         "usageDetails": {"input": c.tokens, "output": 25}}
        for n, c in enumerate(calls)
    ], indent=1).encode()  # fmt: skip


FORMATS["langfuse-page"] = ("openai", langfuse_page)


@of_rows("helicone", "openai")
def helicone(c: Call, n: int) -> Any:
    return {
        "request_id": f"q{n}", "request_created_at": when(c.at_s), "response_status": 200,
        "request_body": {"model": "m", "messages": c.messages, "tools": TOOLS},
        "response_body": {"choices": [{"finish_reason": "stop"}], "usage": c.usage},
        "response_id": f"r{n}", "response_created_at": when(c.at_s + 3), "request_model": "m",
        "request_path": "/v1/chat/completions", "request_user_id": "u", "cache_enabled": False,
        "cache_reference_id": "00000000-0000-0000-0000-000000000000",
        "request_properties": {"Helicone-Session-Id": c.talk},
    }  # fmt: skip


def anthropic_tools() -> list[dict[str, Any]]:
    return [
        {
            **{k: t["function"][k] for k in ("name", "description")},
            "input_schema": {"type": "object"},
        }
        for t in TOOLS
    ]


@of_rows("anthropic", "openai")
def anthropic(c: Call, n: int) -> Any:
    """Return a body of ``/v1/messages``; ``input_tokens`` excludes cached tokens."""
    blocks = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in c.history]  # fmt: skip
    blocks[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[index]
    system = [{"type": "text", "text": c.system, "cache_control": {"type": "ephemeral"}}]
    counts = {"input_tokens": 30, "cache_read_input_tokens": c.tokens - 50,
              "cache_creation_input_tokens": 20, "output_tokens": 25}  # fmt: skip
    return {
        "timestamp": when(c.at_s), "session_id": c.talk,
        "request": {"model": "m", "system": system, "tools": anthropic_tools(), "messages": blocks},
        "response": {"type": "message", "stop_reason": "end_turn", "usage": counts},
    }  # fmt: skip


@of_rows("responses", "openai")
def responses(c: Call, n: int) -> Any:
    """Bodies of ``/v1/responses``."""
    items: Rows = []
    for m in c.history:
        kind = "input_text" if m["role"] == "user" else "output_text"
        items.append({"type": "message", "role": m["role"], "content": [{"type": kind, "text": m["content"]}]})  # fmt: skip
    tools = [{"type": "function", **t["function"]} for t in TOOLS]
    return {
        "created_at": START_S + c.at_s, "session_id": c.talk,
        "body": {"model": "m", "instructions": c.system, "tools": tools, "input": items},
        "response": {"usage": {"input_tokens": c.tokens, "output_tokens": 25,
                               "input_tokens_details": {"cached_tokens": 40}}},
    }  # fmt: skip


@of_rows("gemini", "openai")
def gemini(c: Call, n: int) -> Any:
    turns = [{"role": "user" if m["role"] == "user" else "model", "parts": [{"text": m["content"]}]} for m in c.history]  # fmt: skip
    return {
        "timestamp": when(c.at_s), "session_id": c.talk, "model": "m",
        "request": {"systemInstruction": {"parts": [{"text": c.system}]}, "contents": turns,
                    "tools": [{"functionDeclarations": [t["function"] for t in TOOLS]}]},
        "response": {"usageMetadata": {"promptTokenCount": c.tokens, "candidatesTokenCount": 25}},
    }  # fmt: skip


@of_rows("batch", "openai")
def batch(c: Call, n: int) -> Any:
    """A line of the input file, which has no time."""
    body = {"model": "m", "messages": c.messages, "tools": TOOLS}
    return {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@of_rows("aiperf-messages", "openai")
def aiperf_messages(c: Call, n: int) -> Any:
    return {"session_id": c.talk, "messages": c.messages, "tools": TOOLS, "output_length": 25,
            "timestamp": round(c.at_s * 1000)}  # fmt: skip


def attribute(key: str, value: Any) -> dict[str, Any]:
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": key, "value": {kind: str(value)}}


def gen_ai(c: Call) -> dict[str, Any]:
    parts = [{"role": m["role"], "parts": [{"type": "text", "content": m["content"]}]} for m in c.history]  # fmt: skip
    return {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.conversation.id": c.talk,
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": c.system}]),
        "gen_ai.input.messages": json.dumps(parts), "gen_ai.tool.definitions": json.dumps(TOOLS),
        "gen_ai.usage.input_tokens": c.tokens, "gen_ai.usage.output_tokens": 25,
    }  # fmt: skip


@of_rows("otel-otlp", "otel")
def otel_otlp(c: Call, n: int) -> Any:
    """Return a line of a collector's file exporter."""
    span = {"traceId": f"{n:032x}", "spanId": f"{n:016x}", "name": "chat m", "kind": 3,
            "startTimeUnixNano": str(round((START_S + c.at_s) * 1e9)), "status": {},
            "attributes": [attribute(k, v) for k, v in gen_ai(c).items()]}  # fmt: skip
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [span]}]}]}


@of_rows("otel-flat", "otel")
def otel_flat(c: Call, n: int) -> Any:
    """Return the output of the console exporter, on one line."""
    return {"name": "chat m", "context": {"trace_id": f"0x{n:x}", "span_id": f"0x{n:x}"},
            "kind": "SpanKind.CLIENT", "start_time": when(c.at_s), "attributes": gen_ai(c)}  # fmt: skip


@of_rows("openllmetry", "otel")
def openllmetry(c: Call, n: int) -> Any:
    said: dict[str, Any] = {"gen_ai.request.model": "m", "llm.request.type": "chat",
                            "traceloop.association.properties.session_id": c.talk,
                            "gen_ai.usage.input_tokens": c.tokens}  # fmt: skip
    for at, m in enumerate(c.messages):
        said |= {f"gen_ai.prompt.{at}.role": m["role"], f"gen_ai.prompt.{at}.content": m["content"]}
    for at, tool in enumerate(TOOLS):
        for key, value in tool["function"].items():
            said[f"llm.request.functions.{at}.{key}"] = value if isinstance(value, str) else json.dumps(value)  # fmt: skip
    return {"name": "openai.chat", "start_time": when(c.at_s), "attributes": said}


@of_rows("openinference", "otel")
def openinference(c: Call, n: int) -> Any:
    """Return Phoenix's nested export."""
    return {"name": "ChatCompletion", "span_kind": "LLM", "start_time": when(c.at_s), "status_code": "OK",
            "attributes": {"llm": {"input_messages": [{"message": m} for m in c.messages],
                                   "tools": [{"tool": {"json_schema": json.dumps(t)}} for t in TOOLS],
                                   "model_name": "m", "token_count": {"prompt": c.tokens}},
                           "session": {"id": c.talk}}}  # fmt: skip


class Ids:
    """Chained block ids of prompts, numbered in order."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, c: Call, block_tokens: int) -> tuple[int, list[int]]:
        text = json.dumps(TOOLS) + "".join(m["content"] for m in c.messages)
        ends = range(0, len(text), block_tokens * 4)
        ids = [
            self.known.setdefault(text[: end + block_tokens * 4], len(self.known)) for end in ends
        ]
        return -(-len(text) // 4), ids


def mooncake(name: str, block_tokens: int, session: bool) -> None:
    def write(calls: list[Call]) -> bytes:
        ids, rows = Ids(), []
        for c in calls:
            tokens, blocks = ids(c, block_tokens)
            row = {"timestamp": round(c.at_s * 1000), "input_length": tokens, "output_length": 25,
                   "hash_ids": blocks}  # fmt: skip
            rows.append(row | ({"session_id": c.talk} if session else {}))
        return lines(rows)

    FORMATS[name] = ("mooncake", write)


mooncake("mooncake", 512, False)
mooncake("mooncake-16", 16, False)
mooncake("dynamo-64", 64, True)


def bailian(calls: list[Call]) -> bytes:
    ids, last, rows = Ids(), {}, []
    for n, c in enumerate(calls):
        tokens, blocks = ids(c, 16)
        rows.append({"chat_id": n, "parent_chat_id": last.get(c.talk, -1), "timestamp": round(c.at_s, 3),
                     "input_length": tokens, "output_length": 25, "type": "text", "turn": c.turn,
                     "hash_ids": blocks})  # fmt: skip
        last[c.talk] = n
    return lines(rows)


FORMATS["bailian"] = ("bailian", bailian)


def prompt_text(c: Call) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in c.messages)
    return json.dumps(TOOLS) + turns


def vllm_line(c: Call, n: int) -> str:
    stamp = datetime.datetime.fromtimestamp(START_S + c.at_s, datetime.timezone.utc)
    return (
        f"INFO {stamp:%m-%d %H:%M:%S} [logger.py:39] Received request chatcmpl-{n}: prompt: "
        f"{prompt_text(c)!r}, params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None."
    )


of_rows("vllm", "vllm")(vllm_line)


@of_rows("vllm-debug", "vllm")
def vllm_debug(c: Call, n: int) -> Any:
    """Since 0.11.1."""
    stamp = datetime.datetime.fromtimestamp(START_S + c.at_s, datetime.timezone.utc)
    start = f"{stamp:%m-%d %H:%M:%S} [logger.py:49]"
    return [
        f"(APIServer pid=9) INFO {start} Received request chatcmpl-{n}: params: SamplingParams(n=1), lora_request: None.",
        f"(APIServer pid=9) DEBUG {start} Request chatcmpl-{n} details: prompt: {prompt_text(c)!r}, prompt_token_ids: None, prompt_embeds shape: None.",
    ]  # fmt: skip


def sglang_rows(c: Call, n: int) -> list[Any]:
    obj = {"rid": f"r{n}", "text": None, "input_ids": [ord(x) for x in prompt_text(c)][::4], "session_id": c.talk, "sampling_params": {"n": 1}}  # fmt: skip
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 25, "e2e_latency": 2.0}
    return [
        {"timestamp": when(c.at_s), "event": "request.received", "rid": f"r{n}", "obj": obj},
        {"timestamp": when(c.at_s + 2), "event": "request.finished", "rid": f"r{n}", "obj": obj,
         "out": {"text": "x", "meta_info": meta}},
    ]  # fmt: skip


def sglang(calls: list[Call]) -> bytes:
    rows = [row for n, c in enumerate(calls) for row in sglang_rows(c, n)]
    return lines(sorted(rows, key=lambda row: row["timestamp"]))


FORMATS["sglang"] = ("sglang", sglang)


def in_docker(inner: bytes) -> bytes:
    """Docker's json-file: lines of more than 16 KiB are cut."""
    rows: Rows = []
    for line in inner.decode().splitlines(keepends=True):
        pieces = [line[at : at + 16384] for at in range(0, len(line), 16384)]
        rows += [{"log": piece, "stream": "stdout", "time": when(0)} for piece in pieces]
        rows.append({"log": "INFO something else\n", "stream": "stderr", "time": when(0)})
    return lines(rows)


def in_containerd(inner: bytes, at: int = 3000) -> bytes:
    """Wrap in CRI: parts of a line are marked P, the last part F; another stream is in between."""
    rows: Rows = []
    for line in inner.decode().splitlines():
        pieces = [line[k : k + at] for k in range(0, len(line), at)]
        for number, piece in enumerate(pieces):
            rows.append(f"{when(0)} stdout {'F' if number == len(pieces) - 1 else 'P'} {piece}")
            rows.append(f"{when(0)} stderr F INFO something else")
    return lines(rows)


for base in ("vllm", "vllm-debug", "sglang"):
    kind, inner_writer = FORMATS[base]
    FORMATS[f"{base}-docker"] = (kind, lambda calls, w=inner_writer: in_docker(w(calls)))
    FORMATS[f"{base}-containerd"] = (kind, lambda calls, w=inner_writer: in_containerd(w(calls)))
