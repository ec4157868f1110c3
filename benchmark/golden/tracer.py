"""Trace the project's functions that run, in order, with counts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Frames that are a part of the function around them."""


@dataclass(slots=True)
class Traced:
    """One function that ran."""

    file: str
    """Path below the folder of packages: ``sglang_canopy/policy/wa.py``."""
    name: str
    """Qualified: ``WorkloadAware.victim``."""
    line: int
    depth: int
    """Project functions on the stack at its first call."""
    stage: str
    """Stage of its first call."""
    calls: int = 0
    about: str = ""
    """The first line of its docstring."""


class Tracer:
    """Records calls of Python functions whose files are below ``folders`` and not below ``but``.

    It records within ``with tracer.staged(NAME)``, in that thread only. A generator counts once for
    any number of resumptions.
    """

    def __init__(self, folders: Sequence[Path], but: Sequence[Path] = ()) -> None:
        self._folders = [f"{folder}/" for folder in folders]
        self._but = tuple(f"{folder}/" for folder in but)
        self._codes: dict[CodeType, Traced] = {}
        self._others: set[CodeType] = set()
        self._under_way: list[FrameType] = []
        """Frames of the project that have not returned."""
        self._generators: list[FrameType] = []
        """Frames kept alive, so that their ids are not reused."""
        self._stage = ""

    @property
    def functions(self) -> list[Traced]:
        """Functions in the order of their first calls."""
        return list(self._codes.values())

    @property
    def files(self) -> list[str]:
        """Files in the order of their first calls."""
        return list(dict.fromkeys(traced.file for traced in self.functions))

    @property
    def calls(self) -> int:
        return sum(traced.calls for traced in self.functions)

    @contextmanager
    def staged(self, stage: str) -> Iterator[None]:
        """Trace the calls inside. ``stage``: the request's current stage."""
        self._stage = stage
        sys.setprofile(self._heard)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _heard(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code in self._others:
            return
        if event == "call":
            traced = self._codes.get(code) or self._first_call(frame)
            if traced is None:
                self._others.add(code)
                return
            if code.co_flags & inspect.CO_GENERATOR:
                if any(known is frame for known in self._generators):
                    return
                self._generators.append(frame)
            else:
                self._under_way.append(frame)
            traced.calls += 1
        elif event == "return" and self._under_way and self._under_way[-1] is frame:
            self._under_way.pop()

    def _first_call(self, frame: FrameType) -> Traced | None:
        code = frame.f_code
        folder = next((f for f in self._folders if code.co_filename.startswith(f)), None)
        inner = code.co_name in _INNER or code.co_name == "<module>"
        if folder is None or inner or code.co_filename.startswith(self._but):
            return None
        about = code.co_consts[0] if code.co_consts else None
        self._codes[code] = traced = Traced(
            file=code.co_filename.removeprefix(folder),
            name=code.co_qualname.replace("<locals>.", ""),
            line=code.co_firstlineno,
            depth=len(self._under_way),
            stage=self._stage,
            about=about.strip().split("\n")[0] if isinstance(about, str) else "",
        )
        return traced
