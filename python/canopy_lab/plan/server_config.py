"""A server's configuration in the form of SGLang's ``--config``: YAML with flags as keys.

SGLang turns each key into the flag of that name, and a nested value into JSON. Flags on the command
line replace those of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file

SUFFIXES = (".yaml", ".yml")
"""SGLang reads no other file."""

Config = Mapping[str, Any]
"""Value by flag without its dashes: ``{"page-size": 64}``."""


def write_config(path: Path, config: Config, about: Mapping[str, Any]) -> None:
    """Write ``config`` atomically, readable by its owner only, below ``about`` as comments.

    Raises ``CanopyError``.
    """
    notes = [f"# {name}: {' '.join(str(value).split())}" for name, value in about.items()]
    text = "\n".join([*notes, yaml.safe_dump(dict(config), sort_keys=False, width=100)])
    try:
        replace_file(path, text, durable=True)
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def read_config(path: Path | str) -> dict[str, Any]:
    """Return a server's configuration, its keys spelt with dashes. Raises ``CanopyError``."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CanopyError(f"cannot read the configuration {str(path)!r}: {error}") from None
    if not isinstance(config, dict):
        raise CanopyError(f"{str(path)!r} is no configuration: it must have flags as keys")
    return {str(name).replace("_", "-"): value for name, value in config.items()}
