"""The server's settings for chunk reuse: flags, their checks, and what each mode stands for."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from sglang_canopy.chunk import ENCODINGS, SERVABLE, SPLIT_SELECTORS, TENANT_SHARE
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
    "epic": Mode("first-k", None, "alone"),
    "cacheblend": Mode("hkvd", None, "alone"),
    "cachetune": Mode("frequency", None, "alone"),
}
"""``full``: no cache at all; ``prefix``: SGLang's own prefix cache; ``reuse``: no recompute."""

LEARN_PREFIX_TOKENS = 1024
"""Chunks behind a longer system text are encoded as if there were none: it would be encoded again
with each."""


@dataclass(frozen=True, slots=True)
class Options:
    """Chunk reuse as this server was started. Sizes in MiB, ratios as shares, tokens as counts."""

    mode: str = "default"
    separator: str | None = None
    ratio: float = 0.15
    given_ratio: bool = False
    selector: str | None = None
    encode: str | None = None
    device_mb: int = 0
    memory_mb: int = 1024
    disk_mb: int = 0
    directory: str | None = None
    read_ahead_mb: int = 256
    learn_share: float = 0.05
    min_tokens: int = 16
    tenant_share: float = TENANT_SHARE
    max_kl: float | None = None
    min_top1: float | None = None
    min_kept: float | None = None
    calibration: str | None = None
    tp_size: int = 1

    def __post_init__(self) -> None:
        _one_of("--canopy-chunk-mode", self.mode, tuple(MODES))
        if self.selector is not None:
            _one_of("--canopy-chunk-selector", self.selector, SERVABLE)
        if self.encode is not None:
            _one_of("--canopy-chunk-encode", self.encode, ENCODINGS)
        for flag, value, low, high in (
            ("--canopy-chunk-ratio", self.ratio, 0, 1),
            ("--canopy-chunk-learn-share", self.learn_share, 0, 1),
            ("--canopy-chunk-device-mb", self.device_mb, 0, 1 << 30),
            ("--canopy-chunk-memory-mb", self.memory_mb, 0, 1 << 30),
            ("--canopy-chunk-disk-mb", self.disk_mb, 0, 1 << 30),
            ("--canopy-chunk-read-ahead-mb", self.read_ahead_mb, 0, 1 << 30),
            ("--canopy-chunk-min-tokens", self.min_tokens, 1, 1 << 20),
            ("--canopy-chunk-tenant-share", self.tenant_share, 0, 1),
            ("--canopy-chunk-max-kl", self.max_kl, 0, 100),
            ("--canopy-chunk-min-top1", self.min_top1, 0, 1),
            ("--canopy-chunk-min-kept", self.min_kept, 0, 1),
        ):
            if value is not None and not low <= value <= high:
                raise CanopyError(f"{flag} {value}: allowed are {low} to {high}")
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
        two documents about nothing (``standin``), or nothing (``alone``)."""
        return self.encode or MODES[self.mode].encode

    def capacity_bytes(self) -> dict[str, int]:
        """Bytes by tier name of the chunk store."""
        sizes = {"device": self.device_mb, "host": self.memory_mb, "disk": self.disk_mb}
        return {name: size << 20 for name, size in sizes.items() if size}


def add_flags(_result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
    """After ``ServerArgs.add_cli_args``: the flags of chunk reuse."""
    if "--canopy-chunks" in parser._option_string_actions:
        return
    group = parser.add_argument_group("canopy chunks", "Reuse of documents in any order.")
    add = group.add_argument
    add(
        "--canopy-chunks",
        choices=("off", "on"),
        default="off",
        help="Reuse the KV of documents wherever they come in a prompt. Approximate: docs/guide/documents.md.",
    )
    add(
        "--canopy-chunk-separator",
        metavar="TEXT",
        help="The text between two of these in a prompt is a document.",
    )
    add(
        "--canopy-chunk-mode",
        choices=tuple(MODES),
        default="default",
        help="What is reused and recomputed: ours, or a baseline to compare with.",
    )
    add(
        "--canopy-chunk-ratio",
        type=float,
        default=None,
        metavar="R",
        help="Share of a chunk's tokens that is recomputed (0.15, or as calibrated).",
    )
    add(
        "--canopy-chunk-selector",
        choices=SERVABLE,
        default=None,
        help="Who chooses the tokens that are recomputed.",
    )
    add(
        "--canopy-chunk-encode",
        choices=ENCODINGS,
        default=None,
        help="Encode chunks behind what precedes the first one, behind that and stand-in documents, "
        "or alone.",
    )
    add(
        "--canopy-chunk-device-mb",
        type=int,
        default=0,
        metavar="MIB",
        help="Device memory for chunks.",
    )
    add(
        "--canopy-chunk-memory-mb",
        type=int,
        default=1024,
        metavar="MIB",
        help="Host memory for chunks.",
    )
    add("--canopy-chunk-disk-mb", type=int, default=0, metavar="MIB", help="Disk space for chunks.")
    add("--canopy-chunk-dir", default=None, metavar="DIR", help="Where chunks on disk are.")
    add(
        "--canopy-chunk-read-ahead-mb",
        type=int,
        default=256,
        metavar="MIB",
        help="Memory for chunks on disk that are read while their request waits (0: none are).",
    )
    add(
        "--canopy-chunk-learn-share",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="Under load, tokens encoded for later reuse, as a share of the prompt tokens computed.",
    )
    add(
        "--canopy-chunk-min-tokens",
        type=int,
        default=16,
        metavar="N",
        help="Shorter documents are computed as they come.",
    )
    add(
        "--canopy-chunk-tenant-share",
        type=float,
        default=TENANT_SHARE,
        metavar="SHARE",
        help="What one tenant may hold of the registered documents and of the memory for pinned "
        "chunks (0.1; 1 where there is only one tenant).",
    )
    add(
        "--canopy-chunk-max-kl",
        type=float,
        default=None,
        metavar="NATS",
        help="Quality gate: refuse to start if reuse loses more than this (measured at start).",
    )
    add(
        "--canopy-chunk-min-top1",
        type=float,
        default=None,
        metavar="SHARE",
        help="Quality gate: refuse to start if fewer tokens than this stay the same.",
    )
    add(
        "--canopy-chunk-min-kept",
        type=float,
        default=None,
        metavar="SHARE",
        help="Quality gate: refuse to start if fewer right answers than this stay right.",
    )
    add(
        "--canopy-chunk-calibration",
        default=None,
        metavar="FILE",
        help="What `canopy calibrate` measured: ratios by tier.",
    )


def from_args(args: Any) -> Options | None:
    """The options of parsed flags, or ``None`` where chunk reuse is off. Raises CanopyError."""
    if getattr(args, "canopy_chunks", "off") != "on":
        return None
    given = {
        "mode": args.canopy_chunk_mode,
        "separator": args.canopy_chunk_separator,
        "selector": args.canopy_chunk_selector,
        "encode": args.canopy_chunk_encode,
        "device_mb": args.canopy_chunk_device_mb,
        "memory_mb": args.canopy_chunk_memory_mb,
        "disk_mb": args.canopy_chunk_disk_mb,
        "directory": args.canopy_chunk_dir,
        "read_ahead_mb": args.canopy_chunk_read_ahead_mb,
        "learn_share": args.canopy_chunk_learn_share,
        "min_tokens": args.canopy_chunk_min_tokens,
        "tenant_share": args.canopy_chunk_tenant_share,
        "max_kl": args.canopy_chunk_max_kl,
        "min_top1": args.canopy_chunk_min_top1,
        "min_kept": args.canopy_chunk_min_kept,
        "calibration": args.canopy_chunk_calibration,
    }
    if args.canopy_chunk_ratio is not None:
        given |= {"ratio": args.canopy_chunk_ratio, "given_ratio": True}
    return Options(**given)


def note_options(_cls: Any, args: Any, *_: Any, **__: Any) -> None:
    """Before ``ServerArgs.from_cli_args``: mode ``full`` is a server without a prefix cache."""
    if getattr(args, "canopy_chunks", "off") == "on" and args.canopy_chunk_mode == FULL:
        args.disable_radix_cache = True


def keep_options(result: Any, _cls: Any, args: Any, *_: Any, **__: Any) -> None:
    """After ``ServerArgs.from_cli_args``: check the flags and keep them with the arguments."""
    try:
        options = from_args(args)
    except CanopyError as error:
        raise SystemExit(f"sglang-canopy: {error}") from None
    if options is not None:
        options = dataclasses.replace(options, tp_size=getattr(result, "tp_size", 1) or 1)
    setattr(result, ATTRIBUTE, options)
    if options is not None and options.fuses:
        refusal = unsupported(result) or split_unsupported(options)
        if refusal:
            raise SystemExit(f"sglang-canopy: --canopy-chunks on: {refusal}")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CanopyError(f"{flag} {value!r}: allowed are {', '.join(allowed)}")


_REFUSED = (
    ("speculative_algorithm", "speculative decoding keeps KV of a second model"),
    ("enable_lmcache", "--enable-lmcache brings its own reuse"),
    ("enable_dp_attention", "data-parallel attention is not verified"),
    ("enable_streaming_session", "--enable-streaming-session keeps KV outside the tree"),
    ("enable_return_hidden_states", "hidden states of reused tokens are never computed"),
    ("enable_encoder_swa_bounded_replay", "the encoder replay rewrites the same batches"),
)


def unsupported(server_args: Any) -> str | None:
    """Why these server arguments cannot reuse chunks; ``None`` if they can."""
    for name, why in _REFUSED:
        if getattr(server_args, name, None):
            return f"{why}; drop that option, or chunk reuse"
    for name in ("pp_size", "dp_size", "tokenizer_worker_num"):
        size = getattr(server_args, name, 1) or 1
        if size > 1:
            flag = "--" + name.replace("_", "-")
            return f"{flag} {size} is not done yet, only 1; drop it, or chunk reuse"
    kv = getattr(server_args, "kv_cache_dtype", "auto")
    if kv not in ("auto", None):
        return f"--kv-cache-dtype {kv} keeps quantised KV, which cannot be moved; use auto"
    if getattr(server_args, "quantization", None):
        return "quantised weights are not done yet; serve the model unquantised"
    mode = getattr(server_args, "disaggregation_mode", "null")
    if mode not in (None, "null"):
        return f"--disaggregation-mode {mode} is not done; drop it, or chunk reuse"
    return None


def split_unsupported(options: Options) -> str | None:
    """Why these options cannot be used with tensor parallelism; ``None`` if they can."""
    if options.tp_size == 1:
        return None
    if options.disk_mb:
        return (
            "--canopy-chunk-disk-mb with --tp-size above 1: a file that one rank alone cannot read "
            "would leave the ranks out of step; keep chunks in memory"
        )
    if options.chosen_selector not in SPLIT_SELECTORS:
        return (
            f"selector {options.chosen_selector!r} looks at one rank's own heads; with --tp-size "
            f"above 1 allowed are {', '.join(SPLIT_SELECTORS)}"
        )
    return None
