"""Options that are spelt once: a dataclass field whose metadata makes its flag, its key, its check
and its row in the reference.

A command or a server declares its flags as fields of a frozen dataclass::

    @dataclass(frozen=True, slots=True)
    class Limits:
        hit_rate: float = declare(0.5, "--hit-rate", "Least share of hits.", low=0, high=1)
        window: str = declare("day", "--window", "What is looked at.", choices=("day", "week"))
        disk: DiskKeys = declare(
            DiskKeys(), "--disk", "The disk.", parse=keyed(DiskKeys, head="path")
        )

        def __post_init__(self) -> None:
            declared.check(self)

    declared.add_flags(parser.add_argument_group("limits"), Limits)
    limits = declared.read(Limits, parser.parse_args())

What tunes one thing is one flag: ``DiskKeys`` is such a dataclass too, its fields declared with
``declare_key``, and ``--disk`` takes ``/data``, ``/data,capacity_gb=20``, ``capacity_gb=20`` or the
same as a JSON object. A server's configuration objects (``--radix-eviction-policy-config``) are made
from such classes by ``make``. ``rows`` is what the reference pages are made from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError

_KEY = "canopy option"


@dataclass(frozen=True, slots=True)
class Declared:
    """What one field's metadata says of its option."""

    flag: str | None
    """``None``: a key of an object."""
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
    hidden: bool = False
    """Taken, documented, and left out of ``--help``."""
    required: bool = False
    repeated: bool = False
    """May be given several times; the value is a tuple."""
    rest: bool = False
    """Takes everything that follows, another program's options too; the value is a tuple."""

    @property
    def dest(self) -> str:
        """The attribute under which argparse keeps the value."""
        return (self.flag or "").removeprefix("--").replace("-", "_").lower()

    @property
    def positional(self) -> bool:
        """Whether the value stands alone: its ``flag`` is then what it is called."""
        return not (self.flag or "--").startswith("-")

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
        """Whether a value is within choices and bounds. NaN and infinity are in no bounds."""
        if self.choices and value not in self.choices:
            return False
        if isinstance(value, float) and not math.isfinite(value) and self.allowed:
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


def add_flags(group: argparse._ActionsContainer, cls: type) -> None:
    """Add the flags of ``cls``. Their values are ``None`` unless the user typed one."""
    for field, option in declared(cls):
        if option.flag is not None:
            default = _shown_default(field, option)
            text = f"{option.help} (default: {default})" if default else option.help
            help = argparse.SUPPRESS if option.hidden else text.replace("%", "%%")
            if option.positional:
                count = "*" if option.repeated else None
                group.add_argument(option.dest, metavar=option.flag, nargs=count, help=help)
                continue
            group.add_argument(
                option.flag,
                dest=option.dest,
                default=None,
                required=option.required,
                help=help,
                **_argparse_options(field, option),
            )


def _argparse_options(field: dataclasses.Field[Any], option: Declared) -> dict[str, Any]:
    if _is_switch(field):
        return {"action": "store_true"}
    if option.choices:
        return {"choices": option.choices}
    if option.rest:
        return {"metavar": option.metavar, "nargs": argparse.REMAINDER}
    kind = None if option.parse else _number_of(field)
    action = {"action": "append"} if option.repeated else {}
    return {"metavar": option.metavar, **action, **({} if kind is None else {"type": kind})}


def from_args(cls: type, args: Any) -> dict[str, Any]:
    """Field name -> value, of the flags that were typed. Raises ``CanopyError`` naming the flag."""
    given = {}
    for field, option in declared(cls):
        value = getattr(args, option.dest, None)
        if value is not None:
            given[field.name] = _parsed(option, value)
    return given


def read(cls: type, args: Any) -> Any:
    """An object of ``cls`` from parsed arguments. Raises ``CanopyError`` naming the flag."""
    return cls(**from_args(cls, args))


def _parsed(option: Declared, value: Any) -> Any:
    parse = option.parse or (lambda text: text)
    try:
        several = option.repeated or option.rest
        return tuple(map(parse, value)) if several else parse(value)
    except CanopyError as error:
        raise CanopyError(f"{option.flag} {error}") from None


# ---- objects: keys and their types ----


def make(cls: type, given: Any) -> Any:
    """An object of the dataclass ``cls`` from a JSON object: keys are checked by name and type, then
    by what ``cls`` itself raises (``CanopyError`` or ``ValueError``) of one key.

    Raises ``CanopyError`` naming the key and what is allowed.
    """
    if not isinstance(given, Mapping):
        raise CanopyError(f"the configuration must be a JSON object, got {given!r:.60}")
    hints = typing.get_type_hints(cls)
    allowed = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    listing = ", ".join(f"{k} ({_type_name(t)})" for k, t in allowed.items()) or "none"
    for key, value in given.items():
        if key not in allowed:
            raise CanopyError(f"unknown key {key!r:.60}; allowed keys: {listing}")
        if not _fits(value, allowed[key]):
            raise CanopyError(
                f"key {key!r} must be {_type_name(allowed[key])}, got {value!r:.60}; "
                f"allowed keys: {listing}"
            )
    try:
        return cls(**given)
    except ValueError as error:
        raise CanopyError(f"{error}; allowed keys: {listing}") from None


def keyed(cls: type, head: str) -> Callable[[str], Any]:
    """A parser of ``HEAD``, ``HEAD,KEY=VALUE,...``, ``KEY=VALUE,...`` or a JSON object.

    Words without ``=`` are the key ``head``; several of them are one text with commas between. The
    values of keys with a parser are its texts, as are those of text; the others are JSON.
    """
    found = ((field, option.parse or _text_of(field)) for field, option in declared(cls))
    parsers = {field.name: parse for field, parse in found if parse is not None}

    def parse(text: str) -> Any:
        try:
            if text.lstrip().startswith("{"):
                given = json_object(text)
                texts = {
                    k: parsers[k](v) for k, v in given.items() if k in parsers and type(v) is str
                }
                return make(cls, given | texts)
            heads, given = split_keys(text, parsers)
            if heads:
                given[head] = _value(parsers.get(head), ",".join(heads))
            return make(cls, given)
        except CanopyError as error:
            raise CanopyError(f"{text:.80}: {error}") from None

    return parse


def split_keys(
    text: str, parsers: Mapping[str, Callable[[str], Any]] = types.MappingProxyType({})
) -> tuple[list[str], dict[str, Any]]:
    """The words of ``WORD,KEY=VALUE,...`` that have no ``=``, and the values of those that have."""
    words = [word.strip() for word in text.split(",")]
    given = {}
    for word in words:
        if "=" in word:
            key, _, value = word.partition("=")
            key = key.strip().replace("-", "_")
            given[key] = _value(parsers.get(key), value.strip())
    return [word for word in words if "=" not in word], given


def _value(parse: Callable[[str], Any] | None, text: str) -> Any:
    if parse is not None:
        return parse(text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text_of(field: dataclasses.Field[Any]) -> type[str] | None:
    """``str`` where the field is annotated as one, else ``None``."""
    return str if "str" in _types(field) else None


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


# ---- checks and pages ----


def check(options: Any) -> None:
    """Raise ``CanopyError`` for a value outside its field's choices or bounds."""
    for field, option in declared(type(options)):
        value = getattr(options, field.name)
        if value is not None and not option.allows(value):
            name = option.flag or f"key {field.name!r}"
            raise CanopyError(f"{name} must be {option.allowed}, got {value!r}")


def rows(cls: type, hidden: bool | None = None) -> list[Mapping[str, str]]:
    """``flag``, ``value``, ``default``, ``allowed`` and ``help`` of each option, for the
    reference page. ``hidden``: only those that ``--help`` leaves out, or only the others."""
    return [
        {
            "flag": option.flag or field.name,
            "value": "" if _is_switch(field) else option.metavar or "",
            "default": "required" if option.required else _shown_default(field, option),
            "allowed": option.allowed,
            "help": option.help,
        }
        for field, option in declared(cls)
        if hidden in (None, option.hidden)
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
