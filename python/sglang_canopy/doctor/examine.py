"""Run all checks of the doctor, and report the findings."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_canopy.config.server_options import AutoPart, options_of
from sglang_canopy.doctor import command_line, machine
from sglang_canopy.doctor.machine import NOTE, STOPS, Finding
from sglang_canopy.errors import CanopyError


@dataclass(slots=True)
class Report:
    """Contents of a bug report, without secrets."""

    command: str
    facts: dict[str, str]
    findings: list[Finding] = field(default_factory=list)
    auto: tuple[AutoPart, ...] = ()
    """Parts of ``--radix-eviction auto``; empty with other policies or if the start is refused."""

    @property
    def status(self) -> int:
        """Exit status: 1 if a finding prevents a start, else 0."""
        return int(any(finding.kind in STOPS for finding in self.findings))

    def text(self) -> str:
        width = max(map(len, self.facts))
        lines = ["### canopy doctor", "", "```"]
        lines += [f"{name:{width}}  {value}" for name, value in self.facts.items()]
        lines += [f"{'flags':{width}}  {self.command or '(none)'}", "```", ""]
        for finding in self.findings:
            lines.append(f"- **{finding.kind}**: {finding.text}")
        if not self.findings:
            lines.append("- nothing is refused, untested or missing")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        findings = [{"kind": finding.kind, "text": finding.text} for finding in self.findings]
        return {
            "status": self.status,
            "flags": self.command,
            "environment": self.facts,
            "findings": findings,
            "auto": [part.to_json() for part in self.auto],
        }


def examine(words: Sequence[str]) -> Report:
    """Check a server's command line, which may be empty, and this machine. Raises ``CanopyError`` for a
    command line without a server or that SGLang's parser rejects."""
    arguments = command_line.server_arguments(words)
    report = Report(shlex.join(command_line.mask_secrets(arguments)), machine.collect_facts())
    report.findings += machine.check_packages()
    report.findings += machine.check_tools()
    if not arguments:
        return report
    if any(finding.kind in STOPS for finding in machine.check_packages()):
        return report  # the parser of another SGLang version is not comparable
    args = command_line.parse_options(arguments)
    refusals = command_line.refusal_findings(args)
    started = command_line.try_start(arguments)
    if isinstance(started, Finding):
        if not any(_contains_text(finding, started) for finding in refusals):
            refusals.insert(0, started)
    else:
        report.auto = options_of(started).auto or ()
        report.findings += command_line.auto_findings(report.auto)
    args.enable_lora = args.enable_lora or bool(args.lora_paths)  # as SGLang's resolution does
    args.device = args.device or "cuda"  # the device of this machine may differ from the server's
    report.findings += [
        *refusals,
        *command_line.tested_findings(args),
        *command_line.untested_findings(args),
    ]
    report.findings += [*_check_resources(args), *_note_slow_settings(args)]
    return report


def _note_slow_settings(args: argparse.Namespace) -> list[Finding]:
    """Return notes on slow settings for which SGLang has a faster alternative."""
    has_storage = args.enable_hierarchical_cache and args.hicache_storage_backend is not None
    if not has_storage or args.hicache_storage_prefetch_policy != "best_effort":
        return []
    return [
        Finding(
            NOTE,
            "--hicache-storage-prefetch-policy best_effort: a request takes what has been read by "
            "its turn, and computes the rest; where queues are short that is most of it. timeout, "
            "SGLang's default, waits for a bounded time",
        )
    ]


def _contains_text(finding: Finding, other: Finding) -> bool:
    """Return whether ``other``, the server's own message, contains the text of ``finding``."""
    return finding.text.partition(": ")[2] in other.text


def _check_resources(args: argparse.Namespace) -> list[Finding]:
    """Check the port, memory and folders that this server would use on this machine."""
    findings = machine.check_port(args.host, args.port)
    groups = 1 if args.enable_dp_attention else args.dp_size
    ranks = max(1, groups * args.tp_size * args.pp_size // args.nnodes)  # of this machine
    if args.enable_hierarchical_cache and args.device != "cpu":  # Canopy needs less on a CPU
        size_gb = args.hicache_size or getattr(args, "canopy_host_gb", None) or 0
        findings += machine.check_host_memory(size_gb * ranks * machine.GB)
    if "disk" in command_line.used_parts(args):
        from sglang_canopy.server.start.flags import parse_extra_config
        from sglang_canopy.storage.settings import StorageSettings

        try:
            settings = StorageSettings.from_extra(
                parse_extra_config(args.hicache_storage_backend_extra_config)
            )
        except CanopyError:
            return findings  # ``start`` has reported the error
        capacity_bytes = settings.capacity_bytes * ranks
        findings += machine.check_folder("disk tier", Path(settings.path), capacity_bytes)
    return findings
