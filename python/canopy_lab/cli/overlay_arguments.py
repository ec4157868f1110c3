"""The options of an overlay of single conversations, for every command that reads an archive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add_overlay_arguments(add: Callable[..., Any]) -> None:
    """Declare the options. ``add``: ``add_argument`` of a parser or of one of its groups."""
    add(
        "--conversations",
        type=int,
        metavar="N",
        help="overlay N conversations of an archive, started within --window-s",
    )
    add(
        "--window-s",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds within which the conversations of an overlay start",
    )
    add(
        "--own-prefixes",
        action="store_true",
        help="in an overlay, share no system prompts and tools between conversations",
    )
