"""Parse a server's command line as the server does."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from sglang_canopy import SGLANG_VERSION
from sglang_canopy.admission.activation import AUTO as AUTO_GATE
from sglang_canopy.config import setups
from sglang_canopy.config.refusals import unsupported_reasons
from sglang_canopy.config.server_options import AutoPart
from sglang_canopy.doctor.machine import AUTO as AUTO_PART
from sglang_canopy.doctor.machine import REFUSED, TESTED, UNTESTED, Finding
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names

HIDDEN = "***"
_SECRET = re.compile(r"key|token$|secret|password|credential|quota|salt", re.IGNORECASE)
"""Options and JSON keys with hidden values. Quotas contain tenants, which are secret."""
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_KEY = re.compile(
    r"((?:^|,)[\w-]*(?:key|secret|password|credential|quota|salt)[\w-]*=).*", re.I
)
"""Keys of ``KEY=VALUE,...`` after which the rest is hidden."""


def _is_secret(flag: str) -> bool:
    """Whether a flag's value is hidden; SGLang accepts abbreviated flags."""
    return bool(_SECRET.search(flag)) or any(name.startswith(flag) for name in _SECRET_FLAGS)


def mask_secrets(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the values of keys, secrets and quotas hidden."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        elif name.startswith("-") and equals:
            shown.append(f"{name}={HIDDEN if _is_secret(name) else _without_secrets(value)}")
        else:
            shown.append(word if name.startswith("-") else _without_secrets(word))
        hide = word.startswith("-") and not equals and _is_secret(word)
    return shown


def _without_secrets(text: str) -> str:
    if not text.lstrip().startswith(("{", "[")):
        text = _SECRET_KEY.sub(rf"\1{HIDDEN}", text)
        return re.sub(r"(://[^/:@]*:)[^@/]*@", rf"\1{HIDDEN}@", text)
    try:
        return json.dumps(_hide(json.loads(text)))
    except ValueError:
        return HIDDEN  # invalid JSON may contain a secret


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: HIDDEN if _SECRET.search(k) else _hide(v) for k, v in value.items()}
    return [_hide(each) for each in value] if isinstance(value, list) else value


def arguments_of(words: Sequence[str]) -> list[str]:
    """Return the arguments of the server that ``words`` start; a leading model gets ``--model-path``.

    Raises ``CanopyError`` for a command that starts something else.
    """
    launchers = (["sglang", "serve"], ["-m", "sglang.launch_server"])
    ends = [at + 2 for at in range(len(words)) if list(words[at : at + 2]) in launchers]
    arguments = list(words[ends[0] :] if ends else words)
    if arguments and not arguments[0].startswith("-"):
        if not ends and arguments[1:] and not arguments[1].startswith("-"):
            raise CanopyError(
                f"{arguments[0]!r} does not start an SGLang server; put 'canopy doctor' before the "
                "server's own command: sglang serve MODEL ..."
            )
        arguments.insert(0, "--model-path")
    return arguments


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse all options of ``words`` by SGLang's parser with Canopy's flags.

    Raises ``CanopyError`` if SGLang's parser fails. Canopy's options are checked later.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sglang_canopy.server.start import arguments, plugin

    plugin.load()
    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang serve")  # accepts abbreviated flags like SGLang's
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            ServerArgs.add_cli_args(parser)
            arguments.add_flags(None, parser)  # needed if SGLang's plugin loading is disabled
            words = arguments.expand(list(words))[0][0]
            if "--config" in words:
                from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

                words = ConfigArgumentMerger(parser).merge_config_with_args(words)
            args, unknown = parser.parse_known_args(words)
    except SystemExit as stop:
        lines = printed.getvalue().strip().splitlines()
        raise CanopyError(str(stop.code) if not lines else lines[-1]) from None
    except (OSError, ValueError) as error:
        raise CanopyError(str(error)) from None
    if unknown:
        raise CanopyError(_unknown(unknown, list(parser._option_string_actions)))
    return args


def _unknown(words: Sequence[str], options: Sequence[str]) -> str:
    """Return the error for words that SGLang's parser does not know, with the nearest flags."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    if not flags:
        return f"SGLang does not know {' '.join(words)[:200]}"
    near = {flag: get_close_matches(flag, options, n=1, cutoff=0.75) for flag in flags}
    return f"SGLang {SGLANG_VERSION} does not know " + ", ".join(
        f"{flag} (did you mean {close[0]}?)" if close else flag for flag, close in near.items()
    )


def requested_features(args: argparse.Namespace) -> list[str]:
    """Return the features of ``setups.FLAGS`` that a command line enables."""
    requested = {
        setups.POLICIES: args.radix_eviction_policy in (AUTO, *live_names()),
        setups.GATE: getattr(args, "canopy_session_gate", None) == AUTO_GATE,
        setups.DISK: getattr(args, "hicache_storage_backend", None) == "canopy",
        setups.DOCUMENTS: getattr(args, "canopy_documents", None) not in (None, "off"),
    }
    return [feature for feature, wanted in requested.items() if wanted]


def refusal_findings(args: argparse.Namespace) -> list[Finding]:
    """Return all refusals that apply, not only the first."""
    return [
        Finding(REFUSED, f"{setups.FLAGS[feature]}: {why}")
        for feature in requested_features(args)
        for why in unsupported_reasons(feature, args)
    ]


def try_start(words: Sequence[str]) -> Any:
    """Return the server's parsed arguments, or the ``Finding`` that stops the start."""
    from sglang.srt.server_args import prepare_server_args

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return prepare_server_args(list(words))
    except SystemExit as stop:
        lines = printed.getvalue().strip().splitlines()
        reason = stop.code if isinstance(stop.code, str) else (lines or ["it ends"])[-1]
        return Finding(REFUSED, reason.removeprefix("sglang-canopy: "))
    except Exception as error:
        return Finding(REFUSED, f"{type(error).__name__}: {error}")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def used_parts(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the ``setups.PARTS`` that a command line uses."""
    requested = requested_features(args)
    is_canopy = setups.POLICIES in requested
    host = bool(getattr(args, "enable_hierarchical_cache", False))
    used = {
        "device": is_canopy,
        "host": is_canopy and host,
        "disk": host and getattr(args, "hicache_storage_backend", None) == "canopy",
        "documents": setups.DOCUMENTS in requested,
    }
    return tuple(part for part in used if used[part])


def auto_findings(parts: Sequence[AutoPart]) -> list[Finding]:
    """Return the state of the ``parts`` of ``auto``: one line for the active ones, and one each for
    the others."""
    on = "; ".join(part.text() for part in parts if part.active)
    off = [Finding(AUTO_PART, part.text()) for part in parts if not part.active]
    return [Finding(AUTO_PART, on), *off] if parts else []


def tested_findings(args: argparse.Namespace) -> list[Finding]:
    """Return the set-ups that are tested, by the level of the tests and by part."""
    rows = [
        (level, f"{setup.name} ({', '.join(parts)})")
        for setup, levels in _levels(args)
        for level, parts in levels.items()
        if level in (setups.SERVED, setups.CACHE)
    ]
    names = {level: [name for tested_at, name in rows if tested_at == level] for level, _ in rows}
    return [Finding(TESTED, f"{level}: {', '.join(some)}") for level, some in names.items()]


def untested_findings(args: argparse.Namespace) -> list[Finding]:
    """Return the parts and set-ups that are neither refused nor tested."""
    return [
        Finding(UNTESTED, f"{setup.name}: {', '.join(levels[setups.UNTESTED])}")
        for setup, levels in _levels(args)
        if setups.UNTESTED in levels
    ]


def _levels(args: argparse.Namespace) -> list[tuple[setups.Setup, dict[str, list[str]]]]:
    """Return the rows of ``setups`` that a command line selects, and its parts by level."""
    rows = []
    for setup in setups.SETUPS:
        if setup.option and setup.applies(getattr(args, setup.option, None)):
            levels: dict[str, list[str]] = {}
            for part in used_parts(args):
                levels.setdefault(setup.level(part), []).append(part)
            rows.append((setup, levels))
    return rows
