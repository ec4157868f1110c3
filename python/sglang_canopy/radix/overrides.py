"""Compare the methods that a class of Canopy overrides with the parameters that SGLang passes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from sglang_canopy.errors import CanopyError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_overrides(*classes: type) -> None:
    """Raise ``CanopyError`` with the first method that does not accept SGLang's parameters."""
    for subclass in classes:
        for name, method in vars(subclass).items():
            sglang_method = _overridden(subclass, name)
            if sglang_method is None or not inspect.isfunction(method):
                continue
            for positional, named in _calls(inspect.signature(sglang_method)):
                try:
                    inspect.signature(method).bind(*positional, **named)
                except TypeError as error:
                    raise CanopyError(
                        f"{sglang_method.__qualname__} of this SGLang has other parameters than the tested "
                        f"ones ({error}); install a tested SGLang (docs/guide/serving.md)"
                    ) from None


def _overridden(subclass: type, name: str) -> Any:
    """Return SGLang's method of this name, or ``None``. Constructors are called by Canopy itself."""
    if name == "__init__":
        return None
    for base in subclass.__mro__[1:]:
        if base.__module__.startswith("sglang.") and name in vars(base):
            method = inspect.unwrap(vars(base)[name])
            return method if inspect.isfunction(method) else None
    return None


def _calls(signature: inspect.Signature) -> Iterator[tuple[list[None], dict[str, None]]]:
    """Yield the two ways in which SGLang may pass all parameters: by position, and by name."""
    parameters = [p for p in signature.parameters.values() if p.kind not in _VARIADIC]
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    yield [None] * len(positional), named
    yield [None], {**{p.name: None for p in positional[1:]}, **named}
