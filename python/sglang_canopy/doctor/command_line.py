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
from sglang_canopy.admission.activation import GATE_AUTO
from sglang_canopy.config import setups
from sglang_canopy.config.refusals import unsupported_reasons
from sglang_canopy.config.server_options import AutoPart
from sglang_canopy.doctor.machine import AUTO_PART, REFUSED, TESTED, UNTESTED, Finding
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names

HIDDEN = "***"
_SECRET_NAME = re.compile(r"key|token$|secret|password|credential|quota|salt", re.IGNORECASE)
"""Options and JSON keys with hidden values. Quotas contain tenants, which are secret."""
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_KEY = re.compile(
    r"((?:^|,)[\w-]*(?:key|secret|password|credential|quota|salt)[\w-]*=).*", re.I
)
"""Keys of ``KEY=VALUE,...`` after which the rest is hidden."""


def _is_secret(flag: str) -> bool:
    """Return whether a flag's value is hidden; SGLang accepts abbreviated flags."""
    return bool(_SECRET_NAME.search(flag)) or any(name.startswith(flag) for name in _SECRET_FLAGS)


def mask_secrets(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the values of keys, secrets and quotas hidden."""
    masked: list[str] = []
    is_next_secret = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_next_secret and not word.startswith("--"):
            masked.append(HIDDEN)
        elif name.startswith("-") and equals:
            masked.append(f"{name}={HIDDEN if _is_secret(name) else _mask_text(value)}")
        else:
            masked.append(word if name.startswith("-") else _mask_text(word))
        is_next_secret = word.startswith("-") and not equals and _is_secret(word)
    return masked


def _mask_text(text: str) -> str:
    if not text.lstrip().startswith(("{", "[")):
        text = _SECRET_KEY.sub(rf"\1{HIDDEN}", text)
        return re.sub(r"(://[^/:@]*:)[^@/]*@", rf"\1{HIDDEN}@", text)
    try:
        return json.dumps(_mask_json(json.loads(text)))
    except ValueError:
        return HIDDEN  # invalid JSON may contain a secret


def _mask_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: HIDDEN if _SECRET_NAME.search(k) else _mask_json(v) for k, v in value.items()}
    return [_mask_json(item) for item in value] if isinstance(value, list) else value


def server_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of the server that ``words`` start; a leading model gets ``--model-path``.
    Raises ``CanopyError`` for a command that starts something else."""
    launchers = (["sglang", "serve"], ["-m", "sglang.launch_server"])
    ends = [i + 2 for i in range(len(words)) if list(words[i : i + 2]) in launchers]
    arguments = list(words[ends[0] :] if ends else words)
    if arguments and not arguments[0].startswith("-"):
        if not ends and arguments[1:] and not arguments[1].startswith("-"):
            raise CanopyError(
                f"{arguments[0]!r} does not start an SGLang server; put 'canopy doctor' before the "
                "server's own command: sglang serve MODEL ..."
            )
        arguments.insert(0, "--model-path")
    return arguments


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Parse all options of ``words`` by SGLang's parser with Canopy's flags. Raises ``CanopyError`` if
    SGLang's parser fails. Canopy's options are checked later."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sglang_canopy.server.start import arguments, plugin

    plugin.load()
    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang serve")  # accepts abbreviated flags like SGLang's
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            ServerArgs.add_cli_args(parser)
            arguments.add_flags(None, parser)  # needed if SGLang's plugin loading is disabled
            words = arguments.expand_arguments(list(words))[0][0]
            if "--config" in words:
                from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

                words = ConfigArgumentMerger(parser).merge_config_with_args(words)
            args, unknown = parser.parse_known_args(words)
    except SystemExit as stop:
        lines = output.getvalue().strip().splitlines()
        raise CanopyError(str(stop.code) if not lines else lines[-1]) from None
    except (OSError, ValueError) as error:
        raise CanopyError(str(error)) from None
    if unknown:
        raise CanopyError(_describe_unknown(unknown, list(parser._option_string_actions)))
    return args


def _describe_unknown(words: Sequence[str], options: Sequence[str]) -> str:
    """Return the error for words that SGLang's parser does not know, with the nearest flags."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    if not flags:
        return f"SGLang does not know {' '.join(words)[:200]}"
    nearest = {flag: get_close_matches(flag, options, n=1, cutoff=0.75) for flag in flags}
    return f"SGLang {SGLANG_VERSION} does not know " + ", ".join(
        f"{flag} (did you mean {matches[0]}?)" if matches else flag
        for flag, matches in nearest.items()
    )


def requested_features(args: argparse.Namespace) -> list[str]:
    """Return the features of ``setups.FLAGS`` that a command line enables."""
    is_requested = {
        setups.POLICIES: args.radix_eviction_policy in (AUTO, *live_names()),
        setups.GATE: getattr(args, "canopy_session_gate", None) == GATE_AUTO,
        setups.DISK: getattr(args, "hicache_storage_backend", None) == "canopy",
        setups.DOCUMENTS: getattr(args, "canopy_documents", None) not in (None, "off"),
    }
    return [feature for feature, is_on in is_requested.items() if is_on]


def refusal_findings(args: argparse.Namespace) -> list[Finding]:
    """Return all refusals that apply, not only the first."""
    return [
        Finding(REFUSED, f"{setups.FLAGS[feature]}: {reason}")
        for feature in requested_features(args)
        for reason in unsupported_reasons(feature, args)
    ]


def try_start(words: Sequence[str]) -> Any:
    """Return the server's parsed arguments, or the ``Finding`` that stops the start."""
    from sglang.srt.server_args import prepare_server_args

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            return prepare_server_args(list(words))
    except SystemExit as stop:
        lines = output.getvalue().strip().splitlines()
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
    has_host = bool(getattr(args, "enable_hierarchical_cache", False))
    is_used = {
        "device": is_canopy,
        "host": is_canopy and has_host,
        "disk": has_host and getattr(args, "hicache_storage_backend", None) == "canopy",
        "documents": setups.DOCUMENTS in requested,
    }
    return tuple(part for part in is_used if is_used[part])


def auto_findings(parts: Sequence[AutoPart]) -> list[Finding]:
    """Return the state of the ``parts`` of ``auto``: one line for the active ones, and one each for
    the others."""
    active_text = "; ".join(part.text() for part in parts if part.active)
    inactive = [Finding(AUTO_PART, part.text()) for part in parts if not part.active]
    return [Finding(AUTO_PART, active_text), *inactive] if parts else []


def tested_findings(args: argparse.Namespace) -> list[Finding]:
    """Return the set-ups that are tested, by the level of the tests and by part."""
    names_by_level: dict[str, list[str]] = {}
    for setup, levels in _parts_by_level(args):
        for level, parts in levels.items():
            if level in (setups.SERVED, setups.CACHE):
                names_by_level.setdefault(level, []).append(f"{setup.name} ({', '.join(parts)})")
    return [Finding(TESTED, f"{level}: {', '.join(n)}") for level, n in names_by_level.items()]


def untested_findings(args: argparse.Namespace) -> list[Finding]:
    """Return the parts and set-ups that are neither refused nor tested."""
    return [
        Finding(UNTESTED, f"{setup.name}: {', '.join(levels[setups.UNTESTED])}")
        for setup, levels in _parts_by_level(args)
        if setups.UNTESTED in levels
    ]


def _parts_by_level(args: argparse.Namespace) -> list[tuple[setups.Setup, dict[str, list[str]]]]:
    """Return the rows of ``setups`` that a command line selects, and its parts by level."""
    rows = []
    for setup in setups.SETUPS:
        if setup.option and setup.applies(getattr(args, setup.option, None)):
            levels: dict[str, list[str]] = {}
            for part in used_parts(args):
                levels.setdefault(setup.level(part), []).append(part)
            rows.append((setup, levels))
    return rows
