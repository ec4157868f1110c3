"""Completion of the ``canopy`` command by the shell, with shtab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

FLAG = "--print-completion"
SHELLS = ("bash", "zsh", "tcsh")


def print_completion(words: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]) -> int:
    """Print the script for the shell that ``words`` name. Return the exit status.

    ``parsers``: the parser of each command, by its name of one or two words.
    """
    if len(words) != 1 or words[0] not in SHELLS:
        return _mistake(f"must be one of {', '.join(SHELLS)}; got {' '.join(words)[:60]!r}")
    try:
        import shtab
    except ImportError:
        return _mistake("needs shtab; pip install 'sglang-canopy[completion]'")
    print(shtab.complete(_whole_parser(parsers), shell=words[0]))
    return 0


def _mistake(text: str) -> int:
    print(f"canopy: {FLAG}: {text}", file=sys.stderr)
    return 2


def _whole_parser(parsers: Mapping[str, argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return one parser for all commands. A command's second word is a separate subcommand."""
    whole = argparse.ArgumentParser(prog="canopy")
    first = whole.add_subparsers()
    parts: dict[str, list[str]] = {}
    for name in parsers:
        head, _, part = name.partition(" ")
        parts.setdefault(head, []).append(part)
    for head, seconds in parts.items():
        own = [parsers[head]] if head in parsers else []
        parser = first.add_parser(head, parents=own, add_help=not own, help=head)
        named = [part for part in seconds if part]
        second = parser.add_subparsers() if named else None
        for part in named:
            assert second is not None
            of_part = parsers[f"{head} {part}"]
            second.add_parser(part, parents=[of_part], add_help=False, help=of_part.description)
    return whole
