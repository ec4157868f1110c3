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
            sglang_method = _overridden_method(subclass, name)
            if sglang_method is None or not inspect.isfunction(method):
                continue
            for positional, named in _call_forms(inspect.signature(sglang_method)):
                try:
                    inspect.signature(method).bind(*positional, **named)
                except TypeError as error:
                    raise CanopyError(
                        f"{sglang_method.__qualname__} of this SGLang has other parameters than the tested "
                        f"ones ({error}); install a tested SGLang (docs/guide/serving.md)"
                    ) from None


def _overridden_method(subclass: type, name: str) -> Any:
    """Return SGLang's method of this name, or ``None``. Constructors are called by Canopy itself."""
    if name == "__init__":
        return None
    for base in subclass.__mro__[1:]:
        if base.__module__.startswith("sglang.") and name in vars(base):
            method = inspect.unwrap(vars(base)[name])
            return method if inspect.isfunction(method) else None
    return None


def _call_forms(signature: inspect.Signature) -> Iterator[tuple[list[None], dict[str, None]]]:
    """Yield the two ways in which SGLang may pass all parameters: by position, and by name."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    names = [name for name, kind in kinds.items() if kind not in _VARIADIC]
    named = {name: None for name in names if kinds[name] is inspect.Parameter.KEYWORD_ONLY}
    positional = [name for name in names if name not in named]
    yield [None] * len(positional), named
    yield [None], {**dict.fromkeys(positional[1:]), **named}
