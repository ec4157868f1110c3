"""A self-contained HTML page of text, tables and figures."""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file

_UNITS = re.compile(r"(\d) (%|(?:s|ms|min|h|[KMGT]iB|B)\b)")


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Cells under a header."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = ()
    """Columns of text besides the first. Columns of numbers are right-aligned."""
    marked: int | None = None
    """Index of the highlighted row."""
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with paragraphs, a figure, a table and points."""

    heading: str
    text: Sequence[str] = ()
    figure: bytes | None = None
    """A PNG file."""
    table: HtmlTable | None = None
    points: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HtmlPage:
    """A report. Every text is escaped."""

    title: str
    sections: Sequence[Section]
    _: KW_ONLY
    command: str
    """The command that makes it, for the footer."""
    source: str
    """A sentence about the method, for the footer."""
    box: Sequence[str] = ()
    """The conclusion; its first line is bold."""
    steps: Sequence[tuple[str, str]] = ()
    """Next steps, each as (purpose, command)."""
    lead: Sequence[str] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    """Paragraphs that are folded."""
    width: str = "60rem"

    def html(self) -> str:
        return _environment().get_template("page.html.j2").render(page=self, version=__version__)

    def write(self, path: Path | str) -> None:
        """Write the page atomically, readable by its owner only. Raises ``CanopyError``."""
        try:
            replace_file(path, self.html())
        except OSError as error:
            raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def png_bytes(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def keep_units_together(text: str) -> Markup:
    """Return ``text`` for a page; a number and its unit stay on one line."""
    return Markup(_UNITS.sub("\\1&nbsp;\\2", str(escape(text))))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("canopy_lab.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"units": keep_units_together, "data": _in_base64}
    return environment


def _in_base64(png: bytes) -> str:
    return base64.b64encode(png).decode()
