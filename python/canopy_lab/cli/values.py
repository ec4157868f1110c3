"""Parsers of options that several commands have: each raises ``CanopyError`` with what a value "must be"."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file

Value = TypeVar("Value")


def out_file(text: str) -> Path:
    """A file to write, in a folder that is there."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise CanopyError(f"cannot write {text!r}: its folder does not exist; make it first")
    return path


def write(path: Path, text: str) -> None:
    """Write ``text`` with mode 0600, whole or not at all. Raises ``CanopyError``."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def listed(parse: Callable[[str], Value], what: str) -> Callable[[str], tuple[Value, ...]]:
    """A parser of values separated by commas, each once. ``what`` they must be."""

    def parse_all(text: str) -> tuple[Value, ...]:
        try:
            values = tuple(parse(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values or len(set(values)) < len(values):
            raise CanopyError(f"must be {what}, each once, got {text!r}")
        return values

    return parse_all


def positive(text: str) -> float:
    """A finite number above 0. Raises ``ValueError``, for ``listed``."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def above_zero(text: str) -> float:
    """The same as an option of its own."""
    try:
        return positive(text)
    except ValueError:
        raise CanopyError(f"must be above 0, got {text!r}") from None
