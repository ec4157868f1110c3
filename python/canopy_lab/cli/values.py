"""Parsers of options of several commands. Each raises ``CanopyError`` with a "must be" text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from canopy_lab.plan.server_plan import CONFIG_SUFFIXES
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file

Value = TypeVar("Value")


def out_file(text: str) -> Path:
    """Parse the path of a file to write. Its folder must exist."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise CanopyError(f"cannot write {text!r}: its folder does not exist; make it first")
    return path


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically, with mode 0600. Raises ``CanopyError``."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Write ``value`` as ``write_text`` does. ``options``: arguments of ``json.dumps``."""
    write_text(path, json.dumps(value, indent=1, **options) + "\n")


def list_parser(parse: Callable[[str], Value], noun: str) -> Callable[[str], tuple[Value, ...]]:
    """Return a parser of distinct values separated by commas. ``noun``: name in errors."""

    def parse_all(text: str) -> tuple[Value, ...]:
        try:
            values = tuple(parse(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values or len(set(values)) < len(values):
            raise CanopyError(f"must be {noun}, each once, got {text!r}")
        return values

    return parse_all


def positive(text: str) -> float:
    """Parse a finite number above 0. Raises ``ValueError``, for ``list_parser``."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def above_zero(text: str) -> float:
    """Parse a single finite number above 0. Raises ``CanopyError``."""
    try:
        return positive(text)
    except ValueError:
        raise CanopyError(f"must be above 0, got {text!r}") from None


def yaml_file(text: str) -> Path:
    """Parse the path of a file for SGLang's ``--config``. Raises ``CanopyError``."""
    path = out_file(text)
    if path.suffix not in CONFIG_SUFFIXES:
        raise CanopyError(f"must end in .yaml, which SGLang's --config asks for; got {text!r:.80}")
    return path
