"""Shared parts of the HTML reports: templates, tables and embedded figures."""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

_UNITS = re.compile(r"(\d) (%|(?:s|ms|min|h|[KMGT]iB|B)\b)")


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Cells under a header, as rendered by ``parts.html.j2``."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Sequence[int] = ()
    """Columns of text besides the first. Columns of numbers are right-aligned."""
    marked: int | None = None
    """Index of the highlighted row."""
    notes: Sequence[str] = ()


def render(template: str, **values: object) -> str:
    """Render ``templates/NAME.html.j2``. Every value is escaped."""
    return _environment().get_template(f"{template}.html.j2").render(**values)


def png_bytes(figure: Figure) -> bytes:
    """Return ``figure`` as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def as_data(png: bytes) -> str:
    """Return a PNG file in base64, for embedding in a page."""
    return base64.b64encode(png).decode()


def units(text: str) -> Markup:
    """Return ``text`` for a page; a number and its unit stay on one line."""
    return Markup(_UNITS.sub("\\1&nbsp;\\2", str(escape(text))))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("canopy_lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["units"] = units
    return environment
