"""Redact SGLang's keys in ``GET /server_info`` and in the arguments that it logs at start.

SGLang 0.5.23 shows them in clear text, so a client with a user's key could read the administrator's.
"""

from __future__ import annotations

from typing import Any

REDACTED = "<redacted>"
SECRET_FIELDS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def redact_keys(result: Any, *_: Any, **__: Any) -> Any:
    """Hook after ``redact_watermark_secrets``, through which SGLang passes what it shows, nested
    values too."""
    if not isinstance(result, dict) or SECRET_FIELDS[0] not in result:
        return result
    secrets = {field: result[field] for field in SECRET_FIELDS if result.get(field)}
    redacted = {**result, **dict.fromkeys(secrets, REDACTED)}
    for secret in secrets.values() if result.get("launch_command") else ():
        redacted["launch_command"] = redacted["launch_command"].replace(secret, REDACTED)
    return redacted
