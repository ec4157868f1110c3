"""Checks of the machine and the environment in which a server would start."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_canopy import SGLANG_VERSION, __version__, releases

REFUSED, FAULT, UNTESTED, NOTE = "refused", "fault", "untested", "note"
"""Kinds: the start stops; the machine lacks a requirement; not tested; for information."""
TESTED, AUTO_PART = "tested", "auto"
"""Kinds: level of testing of the set-ups; state of the parts of ``--radix-eviction auto``."""

STOPS = (REFUSED, FAULT)
"""Kinds that set the exit status to 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    kind: str
    text: str


PACKAGES = (
    *("sglang", "sglang-kernel", "sgl-kernel", "torch", "triton", "flashinfer-python"),
    *("transformers", "numpy", "xgrammar", "mooncake-transfer-engine"),
)
MIN_OPEN_FILES = 4096
"""Recommended limit of open files for SGLang and the disk store."""
GB = 10**9
MIN_FREE_GB = 1.0
"""Minimum free space of a folder; less is a fault."""


def collect_facts() -> dict[str, str]:
    """Return facts about the environment for a bug report."""
    facts = {
        "canopy": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    facts |= {name: version for name in PACKAGES if (version := _package_version(name)) is not None}
    facts["torch build"] = _describe_torch()
    facts["compiler"] = _find_compiler(os.environ) or "none"
    facts["open files"] = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    facts["locked memory"] = _soft_limit(resource.RLIMIT_MEMLOCK)
    return facts


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_torch() -> str:
    try:
        import torch
    except Exception as error:  # broken builds raise exceptions of any type
        return f"cannot be imported ({type(error).__name__}: {error})"
    if torch.version.cuda:
        state = "usable" if torch.cuda.is_available() else "no device"
        return f"{torch.__version__}, CUDA {torch.version.cuda}, {state}"
    return f"{torch.__version__}, {'ROCm' if torch.version.hip else 'CPU'}"


def _find_compiler(environment: Mapping[str, str]) -> str | None:
    """Return the compiler that Triton and inductor would use."""
    names = (environment.get("CC", ""), "gcc", "clang", "cc")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _soft_limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def check_packages(distributions: Iterable[Any] | None = None) -> list[Finding]:
    """Check that one SGLang of the right version is installed. ``distributions``: default installed."""
    findings = []
    if distributions is None:
        distributions = importlib.metadata.distributions()
    installations = {
        (str(distribution.locate_file("")), distribution.version)
        for distribution in distributions
        if (distribution.metadata["Name"] or "").lower() == "sglang"
    }
    versions = ", ".join(f"{version} in {place}" for place, version in sorted(installations))
    if not installations:
        findings.append(
            Finding(FAULT, f"sglang is not installed; pip install sglang=={SGLANG_VERSION}")
        )
    elif len(installations) > 1:
        findings.append(Finding(FAULT, f"two sglangs are installed: {versions}; uninstall one"))
    elif not {version for _, version in installations} & {*releases.TESTED_RELEASES}:
        text = f"sglang {releases.RELEASE_RANGE} is tested, found {versions}; a server tests it at start"
        findings.append(Finding(NOTE, text))
    return findings


def check_tools(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check for a compiler, and the limit of open files."""
    findings = []
    if _find_compiler(environment) is None:
        findings.append(
            Finding(FAULT, "no C compiler (gcc, clang, $CC): Triton and torch.compile need one")
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < MIN_OPEN_FILES:
        findings.append(
            Finding(NOTE, f"only {files} files may be open; ulimit -n {MIN_OPEN_FILES} or more")
        )
    return findings


def check_host_memory(requested_bytes: float) -> list[Finding]:
    """Check that a host tier of ``requested_bytes`` over all ranks (0: not given) fits into the memory.
    SGLang keeps a reserve of free memory, and stops the start if too little remains."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host.base import (
        HICACHE_HOST_MEMORY_RESERVE_BYTES as RESERVE_BYTES,
    )

    available_bytes = available_host_memory_bytes(allow_cgroup_fallback=True)
    if available_bytes - RESERVE_BYTES > requested_bytes:
        return []
    request_text = (
        f"--hicache-size asks for {requested_bytes / GB:.1f} GB"
        if requested_bytes
        else "none is left"
    )
    return [
        Finding(
            FAULT,
            f"host tier: {available_bytes / GB:.1f} GB of memory are available, SGLang leaves "
            f"{RESERVE_BYTES / GB:.1f} GB of them alone, and {request_text}; free memory, ask for less, or start "
            "without --enable-hierarchical-cache",
        )
    ]


def check_folder(role: str, path: Path, needed_bytes: int = 0) -> list[Finding]:
    """Check that ``path`` is writable and has enough free space, without creating it."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        return [Finding(FAULT, f"{role} {path}: {existing} is not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Finding(FAULT, f"{role} {path}: {existing} cannot be written to")]
    free_bytes = shutil.disk_usage(existing).free
    findings = []
    if free_bytes < MIN_FREE_GB * GB:
        findings.append(Finding(FAULT, f"{role} {path}: only {free_bytes / GB:.1f} GB are free"))
    elif free_bytes < needed_bytes:
        text = f"{role} {path}: {needed_bytes / GB:.1f} GB are configured, {free_bytes / GB:.1f} GB are free"
        findings.append(Finding(NOTE, text))
    if existing == path and path.stat().st_mode & 0o077:
        findings.append(Finding(NOTE, f"{role} {path}: other users may enter it; chmod 700"))
    return findings


def check_port(host: str, port: int) -> list[Finding]:
    """Check that a server can listen on ``host``:``port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            return [Finding(FAULT, f"port {port} on {host} cannot be used: {reason}")]
    return []
