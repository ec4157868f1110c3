"""Completion of the ``canopy`` command by the shell, with shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

FLAG = "--print-completion"
SHELLS = ("bash", "zsh", "tcsh")


def print_completion(words: Sequence[str]) -> int:
    """Print the script for the shell that ``words`` name. Return the exit status."""
    if len(words) != 1 or words[0] not in SHELLS:
        return _mistake(f"must be one of {', '.join(SHELLS)}; got {' '.join(words)[:60]!r}")
    try:
        import shtab
    except ImportError:
        return _mistake("needs shtab; pip install 'sglang-canopy[completion]'")
    print(shtab.complete(whole_parser(), shell=words[0]))
    return 0


def _mistake(text: str) -> int:
    import sys

    print(f"canopy: {FLAG}: {text}", file=sys.stderr)
    return 2


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands. A command's second word is a command of its own."""
    from canopy_lab.cli.main import COMMANDS, parser_of

    whole = argparse.ArgumentParser(prog="canopy")
    first = whole.add_subparsers()
    names: dict[str, list[str]] = {}
    for name in COMMANDS:
        head, _, part = name.partition(" ")
        names.setdefault(head, []).append(part)
    for head, parts in names.items():
        own = [parser_of(head)[0]] if "" in parts else []
        parser = first.add_parser(
            head, parents=own, add_help=not own, help=COMMANDS.get(head, head)
        )
        if any(parts):
            second = parser.add_subparsers()
            for part in filter(None, parts):
                name = f"{head} {part}"
                second.add_parser(
                    part, parents=[parser_of(name)[0]], add_help=False, help=COMMANDS[name]
                )
    return whole
