"""Replace names in a module of SGLang during one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Set these names of ``module`` within the block.

    Raises ``AttributeError`` for a name that the module lacks, before any replacement.
    """
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
