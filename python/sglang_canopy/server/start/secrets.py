"""Redact secrets in SGLang's displayed arguments: ``GET /server_info``, ``GET
/hicache/storage-backend``, its log and its dumps.

SGLang 0.5.23 shows keys there in clear text, so a client with a user's key could read the
administrator's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
"""SGLang's flags whose values are secrets."""

_NAME = re.compile(
    r"(^|[_.-])((api|access|secret|private)[_-]?keys?|passwords?|passwd|secrets?|credentials?"
    r"|(access|auth|bearer|hf|session)[_-]?tokens?)($|[_.-])",
    re.IGNORECASE,
)
"""Names of arguments, and of keys in JSON arguments, whose values are secrets."""

_IN_TEXT = re.compile(r"""(["'])([\w.-]{1,64})\1(\s*:\s*)(["'])((?:\\.|(?!\4).)*)\4""")
"""Key and string value in a JSON argument."""


def redacted(value: Any, name: str = "") -> Any:
    """Return ``value`` with secrets redacted, by field name and by key in JSON texts."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if _is_secret(name):
        return REDACTED
    if isinstance(value, str):
        return _redacted_text(value) if ":" in value else value
    if isinstance(value, Mapping):
        return {key: redacted(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(redacted(one) for one in value)
    return value


@functools.lru_cache(4096)
def _is_secret(name: str) -> bool:
    """Return whether a name is secret. Cached: each reading of ``/server_info`` shows some 500
    names on the scheduler's thread."""
    return _NAME.search(name) is not None


@functools.lru_cache(256)
def _redacted_text(text: str) -> str:
    if text.lstrip().startswith("{"):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            pass  # other text that begins like JSON
        else:
            shown = redacted(parsed)
            return text if shown == parsed else json.dumps(shown)
    return _IN_TEXT.sub(_without_text, text)


def _without_text(found: re.Match[str]) -> str:
    quote, key, colon, opening, _ = found.groups()
    if not _is_secret(key):
        return found[0]
    return f"{quote}{key}{quote}{colon}{opening}{REDACTED}{opening}"


def redacted_arguments(argv: Sequence[str]) -> list[str]:
    """Return a command line with secrets redacted, also after abbreviated flags."""
    shown: list[str] = []
    is_secret = False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if is_secret:
            shown.append(REDACTED)
        elif equals and _is_secret_flag(flag):
            shown.append(f"{flag}={REDACTED}")
        else:
            shown.append(redacted(argument))
        is_secret = not is_secret and not equals and _is_secret_flag(argument)
    return shown


def _is_secret_flag(flag: str) -> bool:
    is_prefix = len(flag) > len("--") and any(full.startswith(flag) for full in FLAGS)
    return is_prefix and not "--ssl-keyfile".startswith(flag)


def resolved(result: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Hook after ``ServerArgs.resolved_dict``, shown by ``/server_info``, the log and dumps."""
    shown: dict[str, Any] = redacted(result)
    return shown


def config_shown(value: Any, _manager: Any, name: str, *_: Any, **__: Any) -> Any:
    """Hook after ``TokenizerManager.config_value``, shown by ``/hicache/storage-backend``."""
    return redacted(value, name)


def printed(text: str, server_args: Any, *_: Any, **__: Any) -> str:
    """Hook after ``ServerArgs.__repr__``."""
    for flag in FLAGS:
        secret = getattr(server_args, flag.removeprefix("--").replace("-", "_"), None)
        if secret:
            text = text.replace(repr(secret), repr(REDACTED))
    return _IN_TEXT.sub(_without_text, text)


def command_line(
    original: Callable[..., str], argv: Sequence[str], *args: Any, **kwargs: Any
) -> str:
    """Hook around ``redact_watermark_command_line``, which returns the displayed ``launch_command``."""
    return original(redacted_arguments(argv), *args, **kwargs)


_CORE = "sglang.srt.sampling.watermarking.core."
_ARGS = "sglang.srt.server_args.ServerArgs."
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."

HOOKS: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (_ARGS + "resolved_dict", "after", resolved, ("self",)),
    (_ARGS + "__repr__", "after", printed, ("self",)),
    (_MANAGER + "config_value", "after", config_shown, ("self", "name")),
    (_CORE + "redact_watermark_command_line", "around", command_line, ("argv", "watermark_config")),
)
"""``(target, kind of hook, hook, leading parameters)``."""
