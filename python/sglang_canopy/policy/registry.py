"""Every eviction policy by the name a user types."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy

_MODULES = {
    "wa": "wa",
    "lru": "lru",
    "lfu": "lfu",
    "fifo": "fifo",
    "slru": "slru",
    "s3fifo": "s3fifo",
    "gdfs": "gdfs",
    "threshold-lru": "threshold_lru",
    "sglang-tlru": "sglang_tlru",
    "canopy-tlru": "canopy_tlru",
    "etlru": "etlru",
}

_SGLANGS_OWN = ("lru", "lfu", "fifo", "slru")


def policy_names() -> tuple[str, ...]:
    """Names of the online policies, as ``canopy simulate --policy`` takes them."""
    return tuple(_MODULES)


def live_names() -> tuple[str, ...]:
    """Names Canopy adds to ``--radix-eviction-policy``.

    Where SGLang has a policy of the same name, ours is ``canopy-NAME``: SGLang's own names
    keep meaning SGLang's own code.
    """
    return tuple(f"canopy-{n}" if n in _SGLANGS_OWN else n for n in _MODULES)


def _base_name(name: str) -> str:
    short = name.removeprefix("canopy-")
    return short if short in _SGLANGS_OWN else name


def policy_class(name: str) -> type[Policy]:
    """The class of the policy called ``name``. Raises ``CanopyError`` for an unknown one."""
    base = _base_name(name)
    if base not in _MODULES:
        raise CanopyError(
            f"unknown eviction policy {name!r}; choose one of: {', '.join(policy_names())}"
        )
    module = importlib.import_module(f"sglang_canopy.policy.{_MODULES[base]}")
    made: type[Policy] = module.POLICY
    return made


def make_policy(name: str, config: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its name and its JSON options.

    Raises ``CanopyError`` naming the policy, the offending key and the allowed keys.
    """
    made = policy_class(name)
    return made(parse_config(name, made.Config, config or {}))


def parse_config(policy: str, cls: type, given: Mapping[str, Any]) -> Any:
    """Turn a JSON object into the policy's ``Config`` dataclass.

    Keys are checked by name and by type; range checks are the dataclass's ``__post_init__``,
    which raises ``CanopyError`` (or ``ValueError``) with a sentence about one key.
    """
    hints = typing.get_type_hints(cls)
    allowed = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    listing = ", ".join(f"{k} ({_type_name(t)})" for k, t in allowed.items()) or "none"
    if not isinstance(given, Mapping):
        raise CanopyError(
            f"policy {policy!r}: the configuration must be a JSON object, got {given!r}"
        )
    for key, value in given.items():
        if key not in allowed:
            raise CanopyError(f"policy {policy!r}: unknown key {key!r}; allowed keys: {listing}")
        if not _fits(value, allowed[key]):
            raise CanopyError(
                f"policy {policy!r}: key {key!r} must be {_type_name(allowed[key])}, "
                f"got {value!r}; allowed keys: {listing}"
            )
    try:
        return cls(**given)
    except ValueError as error:
        raise CanopyError(f"policy {policy!r}: {error}; allowed keys: {listing}") from None


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for option in _options(hint):
        if option is type(None):
            ok = value is None
        elif option is float:
            ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif option is int:
            ok = isinstance(value, int) and not isinstance(value, bool)
        else:
            ok = isinstance(value, typing.get_origin(option) or option)
        if ok:
            return True
    return False


def _type_name(hint: Any) -> str:
    names = [
        ("null" if o is type(None) else getattr(o, "__name__", str(o))) for o in _options(hint)
    ]
    return " or ".join(names)
