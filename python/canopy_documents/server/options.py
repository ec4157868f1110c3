"""Server settings for document reuse: the keys of ``--canopy-documents``, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from canopy_documents import READ_AHEAD_BYTES, SELECTORS, SPLIT_SELECTORS
from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.errors import CanopyError

DEFAULT_RATIO = 0.15
"""The paper's smallest ratio (CacheTune, section 4.3)."""
AUTOMATIC_PROMPT_TOKENS = 16384
"""Default for the longest prompt that memory is reserved for."""
LEARN_PREFIX_TOKENS = 1024
"""Longest head encoded with documents; a longer head would be encoded again with each document."""
MIN_DOCUMENT_TOKENS = 16
"""Shorter documents are not reused."""


def _mebibyte_key(default: int, help: str) -> Any:
    return declare_key(default, help, metavar="MIB", low=0, high=1 << 30)


def _share_key(default: float | None, help: str, **keywords: Any) -> Any:
    return declare_key(default, help, metavar="SHARE", low=0, high=1, **keywords)


@dataclass(frozen=True, slots=True)
class ReuseOptions:
    """Document reuse as configured for this server. Sizes in MiB, ratios as shares."""

    reuse: str = declare_key("on", "Whether documents are reused at all.", choices=("on", "off"))
    separator: str | None = declare_key(
        None, "The text between two of these in a prompt is a document.", metavar="TEXT"
    )
    ratio: float | None = _share_key(
        None,
        f"Share of a document's tokens to recompute; unless given, as calibrated or {DEFAULT_RATIO}.",
    )
    selector: str = declare_key(
        "question", "How the recomputed tokens are chosen.", choices=SELECTORS
    )
    memory_mb: int = _mebibyte_key(1024, "Host memory for documents.")
    disk_mb: int = _mebibyte_key(0, "Disk space for documents; needs directory.")
    directory: str | None = declare_key(None, "Folder of the documents on disk.", metavar="DIR")
    prompt_tokens: int | None = declare_key(
        None,
        "Longest prompt that reuses documents; memory for planning it is left out of the KV pool. "
        f"Unless given, the model's context, at most {AUTOMATIC_PROMPT_TOKENS:,}.",
        metavar="N",
        low=1,
        high=1 << 24,
    )
    learn_share: float = _share_key(
        0.05, "Under load, tokens encoded for later reuse, as a share of computed prompt tokens."
    )
    min_kept: float | None = _share_key(
        None, "Quality check: refuse to start if a smaller share of correct answers stays correct."
    )
    calibration: str | None = declare_key(
        None, "Ratios by tier, as measured by 'canopy documents calibrate'.", metavar="FILE"
    )

    def __post_init__(self) -> None:
        declared.check(self)
        if self.separator is not None and not self.separator.strip():
            raise CanopyError(
                f"separator {self.separator!r} is blank: give a string that documents do not contain, "
                'for example "\\n###\\n"'
            )
        if not (self.memory_mb or self.disk_mb):
            raise CanopyError("documents need memory: memory_mb and disk_mb are both 0; give one")
        if self.disk_mb and not self.directory:
            raise CanopyError("disk_mb needs 'directory': give a folder for the files")

    def max_prompt_tokens(self, context: int) -> int:
        """Return the longest prompt, in tokens, that may reuse documents; ``context``: the model's."""
        limit_tokens = AUTOMATIC_PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        return min(context, limit_tokens)

    def pool_memory_bytes(self, device: str) -> int:
        """Return the bytes that documents take from the memory of a KV pool on ``device``: 0 unless ``cpu``."""
        if device != "cpu":
            return 0
        return (self.memory_mb << 20) + (READ_AHEAD_BYTES if self.disk_mb else 0)

    def capacity_bytes(self) -> dict[str, int]:
        """Return the capacity of each tier of the document store, in bytes, by name."""
        sizes = {"host": self.memory_mb, "disk": self.disk_mb}
        return {name: size << 20 for name, size in sizes.items() if size}


parse = declared.keyed(ReuseOptions, head="reuse")
"""Parse ``on``, ``KEY=VALUE,...`` or a JSON object. Raises CanopyError."""


def check_server(server_args: Any, options: ReuseOptions) -> None:
    """Raise ``CanopyError`` if this server cannot reuse documents with ``options``."""
    tp_size = server_args.tp_size
    if tp_size > 1 and options.disk_mb:
        raise CanopyError(
            "disk_mb with --tp-size above 1 is not supported: a rank that cannot read its file would "
            "plan otherwise than the others; leave out disk_mb"
        )
    if tp_size > 1 and options.selector not in SPLIT_SELECTORS:
        raise CanopyError(
            f"selector {options.selector!r} looks at one rank's own heads; with --tp-size above 1 "
            f"allowed are {', '.join(SPLIT_SELECTORS)}"
        )
