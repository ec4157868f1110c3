"""Replace names in a module of SGLang for the time of one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Let ``module`` have these names within the block. Raises ``AttributeError`` for one that
    it does not have already, before anything is replaced."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
