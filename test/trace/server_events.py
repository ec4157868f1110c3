"""Lines of SGLang's request log, as its own logger writes them."""

import json
from typing import Any


def event(kind: str, rid: str | list[str], second: float, **more: Any) -> str:
    stamp = f"2026-01-02T03:04:{second:09.6f}"
    body = json.dumps({"timestamp": stamp, "event": f"request.{kind}", "rid": rid, **more})
    return f"[2026-01-02 03:04:05] {body}"


def finished(rid: str, second: float, ids: list[Any] | None, **more: Any) -> str:
    meta = {"completion_tokens": 4, "e2e_latency": 1.0, "finish_reason": {"type": "stop"}}
    obj = {"input_ids": ids, "text": None, "sampling_params": {}, **more}
    return event("finished", rid, second, obj=obj, out={"meta_info": meta})
