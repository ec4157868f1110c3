"""``canopy trial``: alternate two policies on a server until the difference is significant."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

from canopy_lab.cli.shared import ServerOptions
from canopy_lab.live.trial import turns
from canopy_lab.live.trial.server import RunningServer
from canopy_lab.live.trial.turns import Pair, Slice, pairs
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names


@dataclass(frozen=True, slots=True)
class Options(ServerOptions):
    policy: str = declare("wa", "--policy", "the policy on trial", choices=live_names())
    against: str = declare(
        "canopy-lru", "--against", "the other one", choices=live_names()
    )  # fmt: skip
    slice: float = declare(
        60.0, "--slice-s", "time that one policy ranks per turn; the first half is not counted",
        metavar="SECONDS", low=1.0, high=86400.0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        declared.check(self)
        if self.policy == self.against:
            raise CanopyError(
                f"--policy and --against are both {self.policy}: give two different policies"
            )


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Return 0 if the policy won, else 1.

    The winner ranks afterwards. Without a winner, the previous policy ranks again. If the server
    fails, the previous policy is restored before ``CanopyError`` is raised.
    """
    server = RunningServer(args.url, args.key)
    if not _meter_agrees(server.status(), args):
        return 1
    print(
        f"{args.policy} and {args.against} rank in turns of {args.slice:g} s, {turns.LOOKS[0]} to "
        f"{turns.LOOKS[-1]} pairs: {_minutes(args, 0):.0f} to {_minutes(args, -1):.0f} minutes. "
        "Ctrl-C goes back.\n"
        "A pair: the share of the prefill seconds that each saves (in brackets: that the shadow "
        "caches of both would save), the share of the prompt tokens that it hits, and the difference "
        "in points of seconds, in excess of the shadows. So far: mean and interval.",
        flush=True,
    )
    before, verdict, pair = server.counts().running, None, None
    try:
        for number, pair in enumerate(
            pairs(server, args.policy, args.against, args.slice, time.sleep), start=1
        ):
            print(_line(number, pair, args), flush=True)
            verdict = None if pair.so_far is None else pair.so_far.verdict
    finally:
        won = {turns.BETTER: args.policy, turns.WORSE: args.against}
        ranks = won.get(verdict or "", before)
        with contextlib.nullcontext() if verdict else contextlib.suppress(CanopyError):
            server.exchange(ranks)
        if verdict is None:
            print(_unfinished(args, pair, ranks), flush=True)
    assert pair is not None
    assert pair.so_far is not None
    unit = "prompt tokens" if math.isinf(server.counts().depth_scale) else "prefill seconds"
    print("\n".join(_end(args, pair.so_far, unit, ranks, "again" if ranks == before else "now")))
    return 0 if verdict == turns.BETTER else 1


def _meter_agrees(status: dict[str, Any], args: Options) -> bool:
    """Return whether the meter, which costs no hits, justifies a trial; prints a reason if not."""
    meter, why = status.get("whatif"), None
    if meter is None:
        return True
    arm = next(
        (a for a in meter["arms"] if (a["policy"], a["capacity"]) == (args.policy, "now")), None
    )
    if meter["undecided"]:
        why = f"{meter['undecided']}; try again later"
    elif arm is not None and meter["running"] == args.against:
        points = 100 * (arm["saved_share"] - meter["saved_share"])
        error = 200 * arm["saved_share_error"]
        result = f"{args.policy} would save {points:+.1f} ± {error:.1f} points"
        print(f"The meter: {result}.")
        if points + error < turns.WORTH_POINTS:
            why = f"{result}, too little to try"
    if why is not None:
        print(f"Nothing to try on {args.url}: {why}.")
    return why is None


def _minutes(args: Options, look: int) -> float:
    return 2 * args.slice * turns.LOOKS[look] / 60


def _line(number: int, pair: Pair, args: Options) -> str:
    text = (
        f"pair {number}: {args.policy} {_shown(pair.policy)}, {args.against} "
        f"{_shown(pair.against)}, {pair.points:+.1f}"
    )
    far = pair.so_far
    return text if far is None else f"{text}; so far {far.points:+.1f} ({_interval(far)})"


def _shown(one: Slice) -> str:
    beside = f" (shadows {100 * one.shadow:.1f})" if one.shadow else ""
    return f"saves {100 * one.saved:.1f} %{beside}, hits {100 * one.hit:.1f} %"


def _interval(far: turns.Standing) -> str:
    return f"{far.low:+.1f} to {far.high:+.1f}"


def _unfinished(args: Options, pair: Pair | None, ranks: str) -> str:
    """Return the last line of a trial that was stopped or failed."""
    far = None if pair is None else pair.so_far
    if far is None:
        known = "too few pairs to say anything"
    else:
        known = f"{args.policy} against {args.against} {far.points:+.1f} points ({_interval(far)}), {far.pairs} pairs"
    return f"Stopped before a verdict: {known}. {ranks} ranks again."


def _end(args: Options, far: turns.Standing, unit: str, ranks: str, since: str) -> list[str]:
    result = f"{far.points:+.1f} points of the {unit} ({_interval(far)}), {far.pairs} pairs."
    back = f'curl -X POST {args.url}/canopy/policy -d \'{{"device": "{args.against}"}}\''
    if far.verdict == turns.BETTER:
        flag = "auto" if args.policy == "wa" else args.policy
        return [
            f"{args.policy} is better than {args.against}: {result} It ranks now.",
            f"For good: restart with --radix-eviction {flag}. Back: {back}",
        ]
    why = {
        turns.WORSE: f"{args.policy} is worse than {args.against}",
        turns.SAME: f"no difference of {turns.WORTH_POINTS:g} points",
        turns.IDLE: "not tried: nothing was evicted, and where no policy evicts none differs; try "
        "again when the cache is full",
        turns.UNSURE: "not sure after the last look; longer slices tell more",
    }[far.verdict or turns.UNSURE]
    return [f"{why[0].upper()}{why[1:]}: {result} {ranks} ranks {since}."]
