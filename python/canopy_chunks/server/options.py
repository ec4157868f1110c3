"""The server's settings for chunk reuse: flags, their checks, and what each mode stands for."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from canopy_chunks import ENCODINGS, SERVABLE, SPLIT_SELECTORS, TENANT_SHARE
from canopy_chunks.variants import STAND_IN_ENCODINGS
from sglang_canopy import declared
from sglang_canopy.config.refusals import CHUNKS, unsupported
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError

ATTRIBUTE = "_canopy_chunks"
"""Where the plugin notes the options on ``ServerArgs`` (``None``: chunk reuse is off)."""

COMMAND = "canopy_chunk:"
"""How a command begins in ``SetInternalStateReq.server_args``: ``canopy_chunk:pin:ID:TENANT``."""

FULL, PREFIX, REUSE = "full", "prefix", "reuse"


@dataclass(frozen=True, slots=True)
class Mode:
    """What one ``--canopy-chunk-mode`` does.

    selector: who chooses the recomputed tokens; ratio: their share, ``None`` for the server's;
    encode: what a chunk is encoded behind; fuses: whether KV is reused at all.
    """

    selector: str = "default"
    ratio: float | None = None
    encode: str = "prefix"
    fuses: bool = True


MODES = {
    "default": Mode(),
    FULL: Mode(fuses=False),
    PREFIX: Mode(fuses=False),
    REUSE: Mode("first-k", 0.0, "alone"),
    "epic": Mode("epic", None, "alone"),
    "cacheblend": Mode("hkvd", None, "alone"),
    "cachetune": Mode("frequency", None, "alone"),
}
"""``full``: no cache at all; ``prefix``: SGLang's own prefix cache; ``reuse``: no recompute."""

AUTOMATIC_PROMPT_TOKENS = 16384
"""The longest prompt that memory is set aside for where the operator names none."""

LEARN_PREFIX_TOKENS = 1024
"""Chunks behind a longer system text are encoded as if there were none: it would be encoded again
with each."""


def _mebibytes(default: int, flag: str, help: str) -> Any:
    return declare(default, flag, help, metavar="MIB", low=0, high=1 << 30)


def _share(default: float | None, flag: str, help: str) -> Any:
    return declare(default, flag, help, metavar="SHARE", low=0, high=1)


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether chunks are reused at all. Without it the other flags mean nothing."""

    chunks: str = declare(
        "off",
        "--canopy-chunks",
        "Reuse the KV of documents wherever they come in a prompt. Approximate: "
        "docs/guide/documents.md.",
        choices=("off", "on"),
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Chunk reuse as this server was started. Sizes in MiB, ratios as shares, tokens as counts."""

    mode: str = declare(
        "default",
        "--canopy-chunk-mode",
        "What is reused and recomputed: Canopy's own method, or a baseline to compare with.",
        choices=tuple(MODES),
    )
    separator: str | None = declare(
        None,
        "--canopy-chunk-separator",
        "The text between two of these in a prompt is a document.",
        metavar="TEXT",
    )
    ratio: float = declare(
        0.15,
        "--canopy-chunk-ratio",
        "Share of a chunk's tokens that is recomputed.",
        metavar="R",
        low=0,
        high=1,
        shown_default="0.15, or as calibrated",
    )
    given_ratio: bool = False
    """Whether the operator gave ``ratio``."""
    selector: str | None = declare(
        None,
        "--canopy-chunk-selector",
        "Who chooses the tokens that are recomputed.",
        choices=SERVABLE,
        shown_default="the mode's",
    )
    encode: str | None = declare(
        None,
        "--canopy-chunk-encode",
        "Encode chunks behind what precedes the first one, behind that and stand-in documents, "
        "the former where they come first and the latter elsewhere (mixed), or alone.",
        choices=ENCODINGS,
        shown_default="the mode's",
    )
    correct: str = declare(
        "off",
        "--canopy-chunk-correct",
        "Correct the reused KV by what the recomputed tokens reveal of it.",
        choices=("off", "on"),
    )
    device_mb: int = _mebibytes(0, "--canopy-chunk-device-mb", "Device memory for chunks.")
    memory_mb: int = _mebibytes(1024, "--canopy-chunk-memory-mb", "Host memory for chunks.")
    disk_mb: int = _mebibytes(
        0, "--canopy-chunk-disk-mb", "Disk space for chunks; needs --canopy-chunk-dir."
    )
    directory: str | None = declare(
        None, "--canopy-chunk-dir", "Folder of the chunks on disk.", metavar="DIR"
    )
    read_ahead_mb: int = _mebibytes(
        256,
        "--canopy-chunk-read-ahead-mb",
        "Memory for chunks on disk that are read while their request waits (0: none are).",
    )
    prompt_tokens: int | None = declare(
        None,
        "--canopy-chunk-prompt-tokens",
        "Longest prompt that reuses chunks; what planning one takes is left out of the KV pool.",
        metavar="N",
        low=1,
        high=1 << 24,
        shown_default=f"the model's context, at most {AUTOMATIC_PROMPT_TOKENS:,}",
    )
    learn_share: float = _share(
        0.05,
        "--canopy-chunk-learn-share",
        "Under load, tokens encoded for later reuse, as a share of the prompt tokens computed.",
    )
    min_tokens: int = declare(
        16,
        "--canopy-chunk-min-tokens",
        "Shorter documents are computed as they come.",
        metavar="N",
        low=1,
        high=1 << 20,
    )
    tenant_share: float = _share(
        TENANT_SHARE,
        "--canopy-chunk-tenant-share",
        "What one tenant may hold of the registered documents and of the memory for pinned "
        "chunks; use 1 where there is only one tenant.",
    )
    max_kl: float | None = declare(
        None,
        "--canopy-chunk-max-kl",
        "Quality gate: refuse to start if reuse loses more than this (measured at start).",
        metavar="NATS",
        low=0,
        high=100,
    )
    min_top1: float | None = _share(
        None,
        "--canopy-chunk-min-top1",
        "Quality gate: refuse to start if fewer tokens than this stay the same.",
    )
    min_kept: float | None = _share(
        None,
        "--canopy-chunk-min-kept",
        "Quality gate: refuse to start if fewer right answers than this stay right.",
    )
    calibration: str | None = declare(
        None,
        "--canopy-chunk-calibration",
        "What 'canopy documents calibrate' measured: ratios by tier.",
        metavar="FILE",
    )
    tp_size: int = 1

    def __post_init__(self) -> None:
        declared.check(self)
        if self.separator is not None and not self.separator.strip():
            raise CanopyError(
                f"--canopy-chunk-separator {self.separator!r} is blank: give a string that "
                'documents do not contain, for example " # # "'
            )
        if not (self.device_mb or self.memory_mb or self.disk_mb):
            raise CanopyError(
                "chunks have nowhere to live: --canopy-chunk-device-mb, -memory-mb and -disk-mb "
                "are all 0; give one of them"
            )
        if self.disk_mb and not self.directory:
            raise CanopyError("--canopy-chunk-disk-mb needs --canopy-chunk-dir, a directory")

    @property
    def fuses(self) -> bool:
        """Whether this mode reuses chunk KV at all."""
        return MODES[self.mode].fuses

    @property
    def chosen_selector(self) -> str:
        """The selector of a request that names none."""
        return self.selector or MODES[self.mode].selector

    @property
    def ratio_is_fixed(self) -> bool:
        """Whether the operator or the mode gave the ratio, so that calibration does not."""
        return self.given_ratio or MODES[self.mode].ratio is not None

    @property
    def chosen_ratio(self) -> float:
        """The ratio of a request that gives none."""
        fixed = MODES[self.mode].ratio
        return self.ratio if fixed is None else fixed

    @property
    def chosen_encode(self) -> str:
        """What chunks are encoded behind: the tokens before the first chunk (``prefix``), these and
        two documents about nothing (``standin``), the former where a document comes first and the
        latter elsewhere (``mixed``), or nothing (``alone``)."""
        return self.encode or MODES[self.mode].encode

    def longest_prompt(self, context: int) -> int:
        """Tokens of the longest prompt that reuses chunks, of a model that takes ``context``."""
        given = AUTOMATIC_PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        return min(context, given)

    @property
    def stands_in(self) -> bool:
        """Whether chunks are encoded behind stand-ins."""
        return self.chosen_encode in STAND_IN_ENCODINGS

    def bytes_beside_pool(self, device: str) -> int:
        """Bytes of chunks in the memory that SGLang's pool is in: ``cpu`` or a device."""
        sizes = [self.device_mb]
        if device == "cpu":
            sizes += [self.memory_mb, self.read_ahead_mb if self.disk_mb else 0]
        return sum(sizes) << 20

    def capacity_bytes(self) -> dict[str, int]:
        """Bytes by tier name of the chunk store."""
        sizes = {"device": self.device_mb, "host": self.memory_mb, "disk": self.disk_mb}
        return {name: size << 20 for name, size in sizes.items() if size}


def add_flags(_result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
    """After ``ServerArgs.add_cli_args``: the flags of chunk reuse."""
    if "--canopy-chunks" in parser._option_string_actions:
        return
    group = parser.add_argument_group("canopy chunks", "Reuse of documents in any order.")
    declared.add_flags(group, Switch)
    declared.add_flags(group, Options)


def from_args(args: Any) -> Options | None:
    """The options of parsed flags, or ``None`` where chunk reuse is off. Raises CanopyError."""
    if not _is_on(args):
        return None
    given = declared.from_args(Options, args)
    return Options(**given, given_ratio="ratio" in given)


def _is_on(args: Any) -> bool:
    return Switch(**declared.from_args(Switch, args)).chunks == "on"


def note_options(_cls: Any, args: Any, *_: Any, **__: Any) -> None:
    """Before ``ServerArgs.from_cli_args``: mode ``full`` is a server without a prefix cache."""
    if _is_on(args) and args.canopy_chunk_mode == FULL:
        args.disable_radix_cache = True


def keep_options(result: Any, _cls: Any, args: Any, *_: Any, **__: Any) -> None:
    """After ``ServerArgs.from_cli_args``: check the flags and keep them with the arguments."""
    try:
        options = from_args(args)
        if options is not None:
            options = dataclasses.replace(options, tp_size=getattr(result, "tp_size", 1) or 1)
            _check_server(result, options)
    except CanopyError as error:
        raise SystemExit(f"sglang-canopy: {error}") from None
    setattr(result, ATTRIBUTE, options)


def _check_server(server_args: Any, options: Options) -> None:
    """Raise ``CanopyError`` for a server that cannot reuse chunks in this mode."""
    if options.fuses:
        refusal = unsupported(CHUNKS, server_args) or split_unsupported(options)
        if refusal:
            raise CanopyError(f"--canopy-chunks on: {refusal}")


def split_unsupported(options: Options) -> str | None:
    """Why these options cannot be used with tensor parallelism; ``None`` if they can."""
    if options.tp_size == 1:
        return None
    if options.chosen_selector not in SPLIT_SELECTORS:
        return (
            f"selector {options.chosen_selector!r} looks at one rank's own heads; with --tp-size "
            f"above 1 allowed are {', '.join(SPLIT_SELECTORS)}"
        )
    return None
