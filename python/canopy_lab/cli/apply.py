"""``canopy apply``: what of a plan file a running server can take, applied, held against its log,
and undone."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from canopy_lab.cli.hint import worker_urls
from canopy_lab.cli.validate import against_log, table
from canopy_lab.plan.apply import MAX_SERVERS, Record, Server, apply, difference, undo
from canopy_lab.plan.limits import LIMITS, parse_limits
from sglang_canopy.config.plan_file import read_plan
from sglang_canopy.errors import CanopyError

MISSED = 3
"""Exit status: the prediction was missed, and what was applied is undone."""

LEAST_REQUESTS = 200
"""TTFTs scatter by more than their mean: of 200 requests the mean itself is 10 % off or so, half of
what is allowed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy apply``."""
    add = parser.add_argument
    add("plan", metavar="FILE", help="the plan file; with --undo or --check what --record wrote")
    add(
        "--url",
        default="http://127.0.0.1:30000",
        metavar="URL,URL",
        help="the servers of the plan themselves, not their gateway (default: %(default)s)",
    )
    add(
        "--api-key",
        default=os.environ.get("CANOPY_API_KEY"),
        help="the servers' --admin-api-key, or --api-key where they have none of the former "
        "(default: $CANOPY_API_KEY)",
    )
    add("--yes", action="store_true", help="apply it; without this, only say what would change")
    add("--record", metavar="OUT", help="what was in force before (default: FILE.applied.json)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="go back to what was in force before")
    what.add_argument(
        "--check",
        action="store_true",
        help="hold the servers' logs since then against the plan's prediction, and go back where "
        "it was missed",
    )
    add(
        "--log",
        action="append",
        metavar="LOG",
        help="a server's log, once for each --url (see canopy validate): with --yes, wait --after "
        "minutes, then do what --check does",
    )
    add("--profile", help="engine profile that the plan was made with")
    add("--after", type=float, default=60.0, metavar="MIN", help="minutes (default %(default)s)")
    add(
        "--limits",
        default=str(LIMITS),
        metavar="TTFT,TOKENS,HITS",
        help="errors that are too large, in percent of mean TTFT and throughput and in points of "
        "hits (default %(default)s)",
    )
    add(
        "--least-requests",
        type=int,
        default=LEAST_REQUESTS,
        metavar="N",
        help="of a log since then; with fewer nothing is judged, and the plan stays (default "
        "%(default)s)",
    )
    add("--device-tokens", type=int, metavar="N", help="KV pool (default: the plan's)")
    add("--disk-mib-s", type=float, metavar="X", help="the disk's bandwidth, if not the profile's")
    parser.epilog = (
        f"Exit status {MISSED}: the prediction was missed, and the change is undone; 1: something "
        "needs a new start (without --yes), or could not be undone."
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status of the epilog, else 0. Raises ``CanopyError``."""
    parse_limits(args.limits)
    if args.undo or args.check:
        record = Record.read(Path(args.plan))
        if record.undone is not None:
            raise CanopyError(f"{args.plan!r} is undone already: {record.undone}")
        return _check(record, args) if args.check else _undo(record, args, "asked for")
    if args.log and not args.yes:
        raise CanopyError("--log goes with --yes or --check")
    if args.log:
        _needs_profile(args)
        if not 0 <= args.after <= 7 * 24 * 60:
            raise CanopyError(f"--after must be minutes, 0 to a week, got {args.after:g}")
    return _apply(args)


def _apply(args: argparse.Namespace) -> int:
    plan = read_plan(args.plan)
    servers = [Server(url, args.api_key) for url in worker_urls(args.url, "--url", MAX_SERVERS)]
    changes, restart = [], False
    for server in servers:
        answer = server.ask()
        found = difference(plan, answer)
        restart = restart or bool(found.restart)
        print(f"{server.url}:")
        for line in found.lines:
            print(f"  changes         {line}")
        for line in found.restart:
            print(f"  needs a restart {line}")
        if not found.lines and not found.restart:
            print("  the plan is in force")
        if found.change:
            changes.append((server, found, answer["now"]))
    if not args.yes:
        if changes:
            print("Nothing was changed; --yes does it.")
        return int(restart)
    if not changes:
        return 0
    record = Record(Path(args.record or f"{args.plan}.applied.json"), args.plan, 0.0)
    if record.path.exists() and Record.read(record.path).undone is None:
        raise CanopyError(
            f"{str(record.path)!r} says what was in force before a change that still is; undo it "
            "(--undo), or give another --record"
        )
    apply(record, changes)
    print(f"Applied. To go back: canopy apply --undo {record.path}")
    if not args.log:
        return 0
    print(f"Held against the log in {args.after:g} minutes.", flush=True)
    time.sleep(60 * args.after)
    return _check(record, args)


def _check(record: Record, args: argparse.Namespace) -> int:
    _needs_profile(args)
    if not args.log:
        raise CanopyError("--check needs --log: the servers' logs since the plan was applied")
    limits, plan, missed, few = parse_limits(args.limits), read_plan(record.plan), [], False
    for log in args.log:
        found = against_log(
            log, plan, args.profile, record.time, args.device_tokens, args.disk_mib_s
        )
        print(f"{log}: {found.requests} requests since the plan was applied")
        print(table(found))
        if found.requests < args.least_requests:
            few = True
            continue
        missed += [f"{log}: {miss}" for miss in limits.missed(found)]
    if not missed and few:
        print(
            f"Fewer than {args.least_requests} requests are too few to judge by: the plan stays. "
            f"Later: canopy apply --check {record.path} --log ..."
        )
        return 0
    if not missed:
        print("Within the limits: the plan stays.")
        return 0
    for miss in missed:
        print(f"Missed: {miss}")
    return _undo(record, args, "; ".join(missed)) or MISSED


def _undo(record: Record, args: argparse.Namespace, why: str) -> int:
    keys = {entry["url"]: args.api_key for entry in record.servers}
    trouble = undo(record, keys, why)
    print(f"Could not be undone: {trouble}" if trouble else "Undone.")
    return int(trouble is not None)


def _needs_profile(args: argparse.Namespace) -> None:
    if not args.profile:
        raise CanopyError("--log needs --profile: the engine profile that the plan was made with")
