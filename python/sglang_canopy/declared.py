"""Options declared once: a dataclass field's metadata defines its flag, key, check and reference row.

A command or a server declares its flags as fields of a frozen dataclass::

    @dataclass(frozen=True, slots=True)
    class Limits(declared.Checked):
        hit_rate: float = declare(0.5, "--hit-rate", "Least share of hits.", low=0, high=1)
        window: str = declare("day", "--window", "Period to report.", choices=("day", "week"))
        disk: DiskKeys = declare(
            DiskKeys(), "--disk", "The disk.", parse=keyed(DiskKeys, head="path")
        )

    declared.add_flags(parser.add_argument_group("limits"), Limits)
    limits = declared.read(Limits, parser.parse_args())

Related options share one flag: ``DiskKeys`` is another such dataclass, with fields declared by
``declare_key``, and ``--disk`` accepts ``/data``, ``/data,capacity_gb=20``, ``capacity_gb=20`` or the
equivalent JSON object. ``make`` builds a server's configuration objects
(``--radix-eviction-policy-config``) from such classes. The reference pages show ``table_rows``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

_METADATA_KEY = "canopy option"


@dataclass(frozen=True, slots=True)
class Option:
    """An option, from the metadata of its field."""

    flag: str | None
    """``None`` for a key of an object."""
    help: str
    metavar: str | None = None
    choices: Collection[str] = ()
    low: float | None = None
    high: float | None = None
    """Bounds of a number, inclusive."""
    parse: Callable[[str], Any] | None = None
    """Parses the typed text; raises ``CanopyError`` with a "must be" text. ``None``: a switch,
    ``int`` or ``float`` by the field's type, else text."""
    shown_default: str | None = None
    """The default in words, if the value needs explanation."""
    former_flag: str | None = None
    """Earlier name of the flag, which still works, with a warning."""
    hidden: bool = False
    """Accepted and documented, but not in ``--help``."""
    required: bool = False
    repeated: bool = False
    """Allowed several times; the value is a tuple."""
    join: Callable[[list[str]], str] | None = None
    """Makes one value of the words of a positional option that takes several."""

    @property
    def dest(self) -> str:
        """Attribute in which argparse stores the value."""
        return (self.flag or "").removeprefix("--").replace("-", "_").lower()

    @property
    def is_positional(self) -> bool:
        """Whether the option is positional; ``flag`` is then its display name."""
        return not (self.flag or "--").startswith("-")

    @property
    def allowed(self) -> str:
        """The choices or the bounds in words, or an empty text."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"from {self.low:,.10g} to {self.high:,.10g}"
        if self.low is not None:
            return f"at least {self.low:,.10g}"
        return "" if self.high is None else f"at most {self.high:,.10g}"

    def allows(self, value: Any) -> bool:
        """Return whether a value is within choices and bounds; NaN and infinity never are."""
        if self.choices and value not in self.choices:
            return False
        if isinstance(value, float) and not math.isfinite(value) and self.allowed:
            return False
        is_above = self.low is None or value >= self.low
        return is_above and (self.high is None or value <= self.high)


def declare(default: Any, flag: str, help: str, **properties: Any) -> Any:
    """Return a dataclass field with a flag. ``properties``: the other fields of ``Option``."""
    return _field(default, Option(flag, help, **properties))


def declare_key(default: Any, help: str, **properties: Any) -> Any:
    """Return a dataclass field that is a key of a JSON object, without its own flag."""
    return _field(default, Option(None, help, **properties))


def _field(default: Any, option: Option) -> Any:
    return dataclasses.field(default=default, metadata={_METADATA_KEY: option})


def declared_fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """Yield the declared fields of ``cls``, in order."""
    for field in dataclasses.fields(cls):
        if _METADATA_KEY in field.metadata:
            yield field, field.metadata[_METADATA_KEY]


def option_of(cls: type, name: str) -> Option:
    return next(option for field, option in declared_fields(cls) if field.name == name)


def add_flags(group: argparse._ActionsContainer, cls: type) -> None:
    """Add the flags of ``cls``. Flags not typed have the value ``None``."""
    for field, option in declared_fields(cls):
        if option.flag is not None:
            default = _shown_default(field, option)
            text = f"{option.help} (default: {default})" if default else option.help
            help = argparse.SUPPRESS if option.hidden else text.replace("%", "%%")
            if option.is_positional:
                count = "*" if option.repeated else "+" if option.join else None
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
            if option.former_flag is not None:
                group.add_argument(
                    option.former_flag, dest=option.dest, action=_FormerFlag, help=argparse.SUPPRESS
                )


class _FormerFlag(argparse.Action):
    """Set a flag by its earlier name."""

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        logger.warning("%s is called --%s now", flag, self.dest.replace("_", "-"))
        setattr(namespace, self.dest, value)


def _argparse_options(field: dataclasses.Field[Any], option: Option) -> dict[str, Any]:
    if _is_switch(field):
        return {"action": "store_true"}
    if option.choices:
        return {"choices": option.choices}
    number_type = None if option.parse else _number_type(field)
    action = {"action": "append"} if option.repeated else {}
    typed = {} if number_type is None else {"type": number_type}
    return {"metavar": option.metavar, **action, **typed}


def typed_values(cls: type, args: Any) -> dict[str, Any]:
    """Return field name -> value for the typed flags. Raises ``CanopyError`` naming the flag."""
    values = {}
    for field, option in declared_fields(cls):
        value = getattr(args, option.dest, None)
        if value is not None:
            values[field.name] = _parse_value(option, value)
    return values


def read(cls: type, args: Any) -> Any:
    """Return an object of ``cls`` from parsed arguments. Raises ``CanopyError`` naming the flag."""
    return cls(**typed_values(cls, args))


def _parse_value(option: Option, value: Any) -> Any:
    parse = option.parse or (lambda text: text)
    try:
        value = option.join(value) if option.join else value
        return tuple(map(parse, value)) if option.repeated else parse(value)
    except CanopyError as error:
        raise CanopyError(f"{option.flag} {error}") from None


# ---- objects: keys and their types ----


def make(cls: type, values: Any) -> Any:
    """Return an object of the dataclass ``cls`` from a JSON object. Checks keys by name and type, then
    by the errors of ``cls`` (``CanopyError`` or ``ValueError``) for a key. Raises ``CanopyError``
    naming the key and the allowed keys."""
    if not isinstance(values, Mapping):
        raise CanopyError(f"the configuration must be a JSON object, got {values!r:.60}")
    annotations = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    allowed = {name: annotations[name] for name in names}
    listing = ", ".join(f"{key} ({_type_name(type_)})" for key, type_ in allowed.items()) or "none"
    for key, value in values.items():
        if key not in allowed:
            raise CanopyError(f"unknown key {key!r:.60}; allowed keys: {listing}")
        if not _has_type(value, allowed[key]):
            raise CanopyError(
                f"key {key!r} must be {_type_name(allowed[key])}, got {value!r:.60}; "
                f"allowed keys: {listing}"
            )
    try:
        return cls(**values)
    except ValueError as error:
        raise CanopyError(f"{error}; allowed keys: {listing}") from None


def keyed(cls: type, head: str) -> Callable[[str], Any]:
    """Return a parser of ``HEAD``, ``HEAD,KEY=VALUE,...``, ``KEY=VALUE,...`` or a JSON object. Words
    without ``=`` are the value of the key ``head``, joined with commas. Values of keys with a parser
    and of text keys are texts; other values are JSON."""
    typed = ((field, option.parse or _text_type(field)) for field, option in declared_fields(cls))
    parsers = {field.name: parse for field, parse in typed if parse is not None}

    def parse(text: str) -> Any:
        try:
            if text.lstrip().startswith("{"):
                values = json_object(text)
                for key, value in values.items():
                    if key in parsers and type(value) is str:
                        values[key] = parsers[key](value)
                return make(cls, values)
            words, values = split_keys(text, parsers)
            if words:
                values[head] = _parse_word(parsers.get(head), ",".join(words))
            return make(cls, values)
        except CanopyError as error:
            raise CanopyError(f"{text:.80}: {error}") from None

    return parse


def split_keys(
    text: str, parsers: Mapping[str, Callable[[str], Any]] = types.MappingProxyType({})
) -> tuple[list[str], dict[str, Any]]:
    """Return the words of ``WORD,KEY=VALUE,...`` without ``=``, and the values by key."""
    words = [word.strip() for word in text.split(",")]
    values = {}
    for word in words:
        if "=" in word:
            key, _, value = word.partition("=")
            key = key.strip().replace("-", "_")
            values[key] = _parse_word(parsers.get(key), value.strip())
    return [word for word in words if "=" not in word], values


def _parse_word(parse: Callable[[str], Any] | None, text: str) -> Any:
    if parse is not None:
        return parse(text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text_type(field: dataclasses.Field[Any]) -> type[str] | None:
    """Return ``str`` if the field is annotated as one, else ``None``."""
    return str if "str" in _type_names(field) else None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _has_type(value: Any, annotation: Any) -> bool:
    for alternative in _alternatives(annotation):
        if alternative is type(None):
            is_match = value is None
        elif alternative is float:
            is_match = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif alternative is int:
            is_match = isinstance(value, int) and not isinstance(value, bool)
        else:
            is_match = isinstance(value, typing.get_origin(alternative) or alternative)
        if is_match:
            return True
    return False


def _type_name(annotation: Any) -> str:
    return " or ".join(
        "null" if alternative is type(None) else getattr(alternative, "__name__", str(alternative))
        for alternative in _alternatives(annotation)
    )


# ---- checks and pages ----


def check(options: Any) -> None:
    """Raise ``CanopyError`` for a value outside its field's choices or bounds."""
    for field, option in declared_fields(type(options)):
        value = getattr(options, field.name)
        if value is not None and not option.allows(value):
            name = option.flag or f"key {field.name!r}"
            raise CanopyError(f"{name} must be {option.allowed}, got {value!r}")


class Checked:
    """A base of options that are checked when an object is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


def table_rows(cls: type, hidden: bool | None = None) -> list[Mapping[str, str]]:
    """Return ``flag``, ``value``, ``default``, ``allowed`` and ``help`` of each option, for the
    reference. ``hidden``: whether to return only the options hidden from ``--help``, or only the
    others."""
    return [
        {
            "flag": option.flag or field.name,
            "value": "" if _is_switch(field) else option.metavar or "",
            "default": "required" if option.required else _shown_default(field, option),
            "allowed": option.allowed,
            "help": option.help,
        }
        for field, option in declared_fields(cls)
        if hidden in (None, option.hidden)
    ]


def json_object(text: str) -> dict[str, Any]:
    """Parse an option that is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CanopyError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CanopyError(f"must be a JSON object, got {text:.60}")
    return value


def _shown_default(field: dataclasses.Field[Any], option: Option) -> str:
    if option.shown_default is not None:
        return option.shown_default
    return "" if field.default is None or _is_switch(field) else str(field.default)


def _is_switch(field: dataclasses.Field[Any]) -> bool:
    return "bool" in _type_names(field)


def _number_type(field: dataclasses.Field[Any]) -> type | None:
    """Return ``int`` or ``float`` if the field is annotated as one, else ``None``."""
    names = _type_names(field)
    return int if "int" in names else float if "float" in names else None


def _type_names(field: dataclasses.Field[Any]) -> list[str]:
    """Return the annotation's alternatives as text (``from __future__ import annotations``)."""
    return str(field.type).replace(" ", "").split("|")
