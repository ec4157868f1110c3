"""A minimal client of a server, for profiling. Standard library only."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from sglang_canopy.errors import CanopyError

_TIMEOUT_S = 600.0
_FLUSH_TIMEOUT_S = 60.0
_OPTIONAL_PATHS = ("/metrics", "/canopy/status")
MIN_EXACT_GIB = 0.25
"""Smallest pool whose reported size is exact to a few thousandths."""


class ProfiledServer:
    """A running SGLang server at ``url``. Raises ``CanopyError`` if it does not answer."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise CanopyError(f"--url must be http://HOST:PORT, got {url!r}")
        self.url = f"http://{parts.hostname}:{parts.port or 80}"
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=_TIMEOUT_S
        )
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.facts: dict[str, Any] = self._ask("GET", "/server_info")
        if not isinstance(self.facts, dict) or "model_path" not in self.facts:
            raise CanopyError(f"{self.url} is not an SGLang server: /server_info is empty")
        self.pool_tokens = int(self.facts.get("max_total_num_tokens") or 4096)
        self.page_tokens = int(self.facts.get("page_size") or 1)
        self.cached_by_tier: dict[str, int] = {}
        """Cached tokens of the last answer by tier, if reported."""
        vocab = int(self.facts.get("vocab_size") or 32000)
        self.token_range = (min(1000, vocab // 8), vocab - min(1000, vocab // 8))

    def generate(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, int]:
        """Return the seconds to answer ``prompts`` with ``output_tokens`` each, and the cached tokens."""
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling}
        begin_s = time.perf_counter()
        answers = self._ask("POST", "/generate", body)
        seconds = time.perf_counter() - begin_s
        meta_infos = [answer["meta_info"] for answer in answers]
        self.cached_by_tier = {}
        for meta_info in meta_infos:
            for tier, count in (meta_info.get("cached_tokens_details") or {}).items():
                if isinstance(count, int):
                    self.cached_by_tier[tier] = self.cached_by_tier.get(tier, 0) + count
        return seconds, sum(meta_info.get("cached_tokens") or 0 for meta_info in meta_infos)

    def first_token(
        self, prompt: list[int], custom_params: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Return the seconds to one token of one prompt, and its ``meta_info``."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "custom_params": custom_params}
        begin_s = time.perf_counter()
        answer = self._ask("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling})
        return time.perf_counter() - begin_s, answer["meta_info"]

    def scheduler_state(self, name: str) -> dict[str, Any]:
        """Return the first scheduler's current state under ``name``, or an empty mapping."""
        states = self._ask("GET", "/server_info").get("internal_states") or [{}]
        return states[0].get(name) or {}

    def kv_bytes_per_token(self) -> int | None:
        """Return the bytes of one token's KV on all ranks, from the server's pools.

        Windows, states and the dtype of the KV cache are part of the pools. ``None`` if the server
        reports no size, or rounds the size of a small pool to a few of SGLang's thousandths of a GiB.
        """
        ranks = int(self.facts.get("tp_size") or 1) * int(self.facts.get("pp_size") or 1)
        status = self._ask("GET", "/canopy/status")
        rows = status.get("ranks") if isinstance(status, dict) else None
        if rows and rows[0].get("kv_bytes_per_token"):
            return round(rows[0]["kv_bytes_per_token"] * ranks)
        memory_gib = self.scheduler_state("memory_usage")
        gib, tokens = memory_gib.get("kvcache") or 0.0, memory_gib.get("token_capacity") or 0
        return round(gib * 2**30 / tokens * ranks) if gib >= MIN_EXACT_GIB and tokens else None

    def flush(self) -> None:
        """Empty device and host, not the disk; wait for a server that still writes to its disk."""
        self._ask("POST", f"/flush_cache?timeout={_FLUSH_TIMEOUT_S:g}")

    def metric(self, name: str) -> float | None:
        """Return the sum of a Prometheus metric over its labels, or ``None``."""
        text = self._ask("GET", "/metrics")
        if not isinstance(text, str):
            return None
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values) if values else None

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        encoded_body = None if body is None else json.dumps(body).encode()
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            self._connection.request(method, path, encoded_body, headers)
            response = self._connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise CanopyError(
                f"no answer from {self.url}{path}: {error}; is the server up, and this its address?"
            ) from None
        if response.status != 200:
            if path in _OPTIONAL_PATHS:
                return None
            raise CanopyError(f"{self.url}{path} answered {response.status}: {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            return text


def wait_until(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.02) -> bool:
    """Return whether ``condition()`` became true within ``timeout_s``."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(every_s)
    return True
