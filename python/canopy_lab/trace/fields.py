"""Find fields in a log entry that wraps a request's body in other objects."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from canopy_lab.trace.lines import MAX_NUMBER, BadLine

BODY_FIELDS = (
    *("standard_logging_object", "body", "request", "request_body", "requestBody"),
    *("proxy_server_request", "kwargs", "payload", "optional_params"),
    *("model_parameters", "modelParameters"),
)
"""Fields that hold a request's body, or a part of it."""
_LABEL_FIELDS = ("metadata", "custom_params", "extra_body", "request_properties", "properties")
"""Fields whose objects describe a request but hold no part of its prompt."""
_MAX_OBJECTS = 16

JsonObject = Mapping[str, Any]


def bodies_of(entry: JsonObject) -> list[JsonObject]:
    """Return the entry and the objects in it that may hold a prompt, outermost first."""
    return _nested_objects(entry, BODY_FIELDS)


def objects_in(entry: JsonObject) -> list[JsonObject]:
    """Return the entry and the objects in it that may describe a request, outermost first."""
    return _nested_objects(entry, (*BODY_FIELDS, *_LABEL_FIELDS))


def _nested_objects(entry: JsonObject, names: tuple[str, ...]) -> list[JsonObject]:
    objects, index = [entry], 0
    while index < len(objects) and len(objects) < _MAX_OBJECTS:
        for name in names:
            value = decode(objects[index].get(name))
            if isinstance(value, dict) and value:
                objects.append(value)
        index += 1
    return objects[:_MAX_OBJECTS]


def find(objects: list[JsonObject], names: tuple[str, ...]) -> Any:
    """Return the first field of ``names`` that is set, in the outermost object that has one."""
    for candidate in objects:
        for name in names:
            value = candidate.get(name)
            if value is not None and value != "":
                return value
    return None


def find_filled(objects: list[JsonObject], names: tuple[str, ...]) -> tuple[JsonObject | None, Any]:
    """Return the first field that is not an empty object or list, decoded, and its object."""
    for candidate in objects:
        for name in names:
            value = decode(candidate.get(name))
            if value is not None and value not in ("", {}, []):
                return candidate, value
    return None, None


def decode(value: Any) -> Any:
    """Return ``value``, parsed if an export has put JSON into a string."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def parse_time_s(value: Any) -> float:
    """Convert a date, or a number of s, ms, us or ns, to s since 1970. Raises ``BadLine``."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                date = datetime.datetime.fromisoformat(value)
            except ValueError:
                raise BadLine(f"its time must be a number or a date, got {value[:40]!r}") from None
            if date.tzinfo is None:
                date = date.replace(tzinfo=datetime.timezone.utc)
            return date.timestamp()
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
        raise BadLine(f"its time must be a number of 0 or more or a date, got {value!r}")
    for threshold in (1e17, 1e14, 1e11):
        if value >= threshold:
            return value / (threshold / 1e8)
    return float(value)
