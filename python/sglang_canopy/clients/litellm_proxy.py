"""LiteLLM's proxy: sends its clients' session names to the server, with the tools that answers
call.

    litellm_settings:
      callbacks: sglang_canopy.clients.litellm_proxy.canopy

A client names its session in the header ``x-litellm-session-id`` or in ``metadata``'s
``session_id``. Canopy's conversation has the same name, for ``canopy explain`` and hints.
``CANOPY_URL`` is the server's address. ``CANOPY_API_KEY``, or ``CANOPY_GATEWAY_SECRET``, is sent
with hints. The proxy cannot detect the end of a task.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from sglang_canopy.clients.called import tools_in
from sglang_canopy.clients.session import Session

MAX_SESSIONS = 4096
_TYPES = ("completion", "acompletion", "text_completion", "atext_completion")
_NAME = "canopy_session"
"""Key of the session's name in a request's metadata, for its answer."""


class CanopyLogger(CustomLogger):
    """LiteLLM callback. ``url``: the server, without ``/v1``; ``options``: keyword arguments of
    ``Session``."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__()
        self.url, self.options = url, options
        self._sessions: dict[str, Session] = {}
        self._owners: dict[str, str] = {}
        """The API key whose clients use a session's name."""
        self._lock = threading.Lock()

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        given = data.get("litellm_session_id") or _metadata(data).get("session_id")
        if call_type not in _TYPES or not isinstance(given, str) or not given:
            return data
        name = self._name(str(getattr(user_api_key_dict, "api_key", None) or ""), given)
        extra = dict(data.get("extra_body") or {})
        fields = self._session(name).fields()
        extra["custom_params"] = {**fields, **(extra.get("custom_params") or {})}
        data["extra_body"] = extra
        data["metadata"] = {**_metadata(data), _NAME: name}
        return data

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        name = _metadata(kwargs.get("litellm_params")).get(_NAME)
        if isinstance(name, str) and hasattr(response_obj, "model_dump"):
            self._session(name).answered(tools_in(response_obj.model_dump()))

    @property
    def sessions(self) -> list[Session]:
        """The known sessions, the most recently used last."""
        return list(self._sessions.values())

    def _name(self, key: str, given: str) -> str:
        """Return the client's own name. Return a digest if clients of another key use that name, or
        if the server would reject it."""
        with self._lock:
            owner = self._owners.pop(given, key)
            self._owners[given] = owner
            if len(self._owners) > MAX_SESSIONS:
                del self._owners[next(iter(self._owners))]
        if owner == key and given.strip() and given.isprintable():
            return given
        return hashlib.sha256(f"{key} {given}".encode()).hexdigest()[:32]

    def _session(self, name: str) -> Session:
        with self._lock:
            found = self._sessions.pop(name, None) or Session(self.url, name, **self.options)
            self._sessions[name] = found
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return found


def _metadata(of: Any) -> Mapping[str, Any]:
    found = of.get("metadata") if isinstance(of, Mapping) else None
    return found if isinstance(found, Mapping) else {}


canopy = CanopyLogger(os.environ.get("CANOPY_URL", "http://127.0.0.1:30000"))
