"""LiteLLM's proxy: a client's session name becomes the name of Canopy's conversation.

    litellm_settings:
      callbacks: litellm_sessions.sessions

A client names its session in the header ``x-litellm-session-id`` or in ``metadata``'s ``session_id``.
``canopy explain`` and hints use the same name. Equal names of two tenants are two conversations.
"""

from __future__ import annotations

from typing import Any

from litellm.integrations.custom_logger import CustomLogger


class Sessions(CustomLogger):
    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        name = data.get("litellm_session_id") or (data.get("metadata") or {}).get("session_id")
        if isinstance(name, str) and name and call_type.endswith("completion"):
            extra = data["extra_body"] = dict(data.get("extra_body") or {})
            given = extra.get("custom_params") or {}
            extra["custom_params"] = {"canopy_conversation": name, **given}
        return data


sessions = Sessions()
