"""Options that are spelt once: a dataclass field whose metadata makes its flag.

``declare`` writes a field's flag, help, allowed range and parser into the field itself. From
there come the command line (``add_flags``), the values read back from it (``from_args``), their
checks (``check``) and the rows of the reference page (``rows``). ``declare_key`` does the same for
a key of a JSON object, which needs no flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError

_KEY = "canopy option"


@dataclass(frozen=True, slots=True)
class Declared:
    """What one field's metadata says of its option."""

    flag: str | None
    """``None``: a key of a JSON object."""
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    """Bounds of a number, both allowed."""
    parse: Callable[[str], Any] | None = None
    """From the text that was typed. Raises ``CanopyError`` with what the value "must be".
    ``None``: a switch, ``int`` or ``float`` as the field is, else text."""
    shown_default: str | None = None
    """The default in words, where the value does not speak for itself."""

    @property
    def dest(self) -> str:
        """The attribute under which argparse keeps the value."""
        return (self.flag or "").removeprefix("--").replace("-", "_")

    @property
    def allowed(self) -> str:
        """The choices or the bounds in words; empty where there are none."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"from {self.low:,.10g} to {self.high:,.10g}"
        if self.low is not None:
            return f"at least {self.low:,.10g}"
        return "" if self.high is None else f"at most {self.high:,.10g}"

    def allows(self, value: Any) -> bool:
        """Whether a value is within choices and bounds. NaN is in no bounds."""
        if self.choices and value not in self.choices:
            return False
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high)


def declare(default: Any, flag: str, help: str, **more: Any) -> Any:
    """A dataclass field with a flag. ``more``: the other fields of ``Declared``."""
    return _field(default, Declared(flag, help, **more))


def declare_key(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is a key of a JSON object, without a flag of its own."""
    return _field(default, Declared(None, help, **more))


def _field(default: Any, option: Declared) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: option})


def declared(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Declared]]:
    """The fields of ``cls`` that are declared here, in order."""
    for field in dataclasses.fields(cls):
        if _KEY in field.metadata:
            yield field, field.metadata[_KEY]


def option_of(cls: type, name: str) -> Declared:
    """What is declared of the field ``name``."""
    return next(option for field, option in declared(cls) if field.name == name)


def add_flags(group: argparse._ArgumentGroup, cls: type) -> None:
    """Add the flags of ``cls``. Their values are ``None`` unless the user typed one."""
    for field, option in declared(cls):
        if option.flag is not None:
            default = _shown_default(field, option)
            text = f"{option.help} (default: {default})" if default else option.help
            group.add_argument(
                option.flag,
                dest=option.dest,
                default=None,
                help=text.replace("%", "%%"),
                **_argparse_options(field, option),
            )


def _argparse_options(field: dataclasses.Field[Any], option: Declared) -> dict[str, Any]:
    if _is_switch(field):
        return {"action": "store_true"}
    if option.choices:
        return {"choices": option.choices}
    kind = None if option.parse else _number_of(field)
    return {"metavar": option.metavar, **({} if kind is None else {"type": kind})}


def from_args(cls: type, args: Any) -> dict[str, Any]:
    """Field name -> value, of the flags that were typed. Raises ``CanopyError`` naming the flag."""
    given = {}
    for field, option in declared(cls):
        value = getattr(args, option.dest, None)
        if value is not None:
            given[field.name] = _parsed(option, value)
    return given


def _parsed(option: Declared, value: Any) -> Any:
    if option.parse is None:
        return value
    try:
        return option.parse(value)
    except CanopyError as error:
        raise CanopyError(f"{option.flag} {error}") from None


def check(options: Any) -> None:
    """Raise ``CanopyError`` for a value outside its field's choices or bounds."""
    for field, option in declared(type(options)):
        value = getattr(options, field.name)
        if value is not None and not option.allows(value):
            name = option.flag or f"key {field.name!r}"
            raise CanopyError(f"{name} must be {option.allowed}, got {value!r}")


def rows(cls: type) -> list[Mapping[str, str]]:
    """``flag``, ``value``, ``default``, ``allowed`` and ``help`` of each option, for the
    reference page."""
    return [
        {
            "flag": option.flag or field.name,
            "value": "" if _is_switch(field) else option.metavar or "",
            "default": _shown_default(field, option),
            "allowed": option.allowed,
            "help": option.help,
        }
        for field, option in declared(cls)
    ]


def json_object(text: str) -> dict[str, Any]:
    """A parser of options that are JSON objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CanopyError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CanopyError(f"must be a JSON object, got {text:.60}")
    return value


def _shown_default(field: dataclasses.Field[Any], option: Declared) -> str:
    if option.shown_default is not None:
        return option.shown_default
    return "" if field.default is None or _is_switch(field) else str(field.default)


def _is_switch(field: dataclasses.Field[Any]) -> bool:
    return "bool" in _types(field)


def _number_of(field: dataclasses.Field[Any]) -> type | None:
    """``int`` or ``float`` where the field is annotated as one, else ``None``."""
    names = _types(field)
    return int if "int" in names else float if "float" in names else None


def _types(field: dataclasses.Field[Any]) -> list[str]:
    """The annotation's alternatives, where it is text (``from __future__ import annotations``)."""
    return str(field.type).replace(" ", "").split("|")
