"""Format one status of a server as text, for ``canopy top``. The page at ``/canopy/ui`` has charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canopy_lab.report.table import short_number, text_table

MAX_ROWS = 16
_REASONS = ("capacity", "ttl", "trim", "quota")


def frame(status: Mapping[str, Any], trouble: str | None = None) -> str:
    """Return the status as text. ``trouble``: reason why it is out of date."""
    return "\n\n".join(part for part in _parts(status, trouble) if part)


def _parts(status: Mapping[str, Any], trouble: str | None) -> Iterator[str]:
    yield _header(status)
    if status["ranks"]:
        yield "\n".join(line for line in (_hit_ratios(status), _prefill(status)) if line)
        if status.get("workers"):
            yield _workers(status["workers"])
        yield _tiers(status)
        yield _categories(status)
    if status.get("groups"):
        yield _groups(status["groups"])
    if status.get("whatif"):
        yield _whatif(status["whatif"])
    faults = {kind: n for kind, n in status.get("faults", {}).items() if n}
    if faults:
        counts = ", ".join(f"{plain(kind)} {short_number(n)}" for kind, n in faults.items())
        yield f"disk faults answered by recomputation: {counts}"
    yield trouble or ""


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def seconds(ttl_s: float | None) -> str:
    """Format a time to live; ``None`` never expires."""
    if ttl_s is None:
        return "no expiry"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if ttl_s >= 2 * length:
            return f"{ttl_s / length:.3g} {unit}"
    return f"{ttl_s:.3g} s"


def plain(text: object, longest: int = 32) -> str:
    """Return text from a server without control characters, cut to ``longest`` characters."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _header(status: Mapping[str, Any]) -> str:
    line = f"sglang-canopy {plain(status['version'])}   up {seconds(status['uptime_s'])}"
    ranks, workers = len(status["ranks"]), len(status.get("workers", ()))
    if workers:
        line += f"   {workers} servers, {ranks} replicas added up"
    elif ranks > 1:
        line += f"   {ranks} replicas added up"
    step = status.get("next_step")
    return f"{line}\n{plain(step, 400)}" if step else line


def _hit_ratios(status: Mapping[str, Any]) -> str:
    lines = []
    for title, prompts, key in (
        ("last minute", status["prompt_tokens_last_minute"], "hit_tokens_last_minute"),
        ("since start", status["prompt_tokens"], "hit_tokens"),
    ):
        hits = {name: tier[key] for name, tier in status["tiers"].items()}
        by_tier = "  ".join(f"{name} {percent(count, prompts)}" for name, count in hits.items())
        total = percent(sum(hits.values()), prompts)
        lines.append(f"{title}: {total} of {short_number(prompts)} prompt tokens hit: {by_tier}")
    return "\n".join(lines)


def _workers(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format one row per server: failed servers first, then by prompt tokens."""
    cells = []
    for row in sorted(rows, key=lambda row: ("error" not in row, -row.get("prompt_tokens", 0))):
        if "error" in row:
            cells.append((plain(row["url"], 48), plain(row["error"], 64), "", "", "", ""))
            continue
        lately = row["prompt_tokens_last_minute"]
        cells.append(
            (
                plain(row["url"], 48),
                plain(row["policy"], 20),
                short_number(row["requests"]),
                short_number(row["prompt_tokens"]),
                percent(row["hit_tokens"], row["prompt_tokens"]),
                percent(row["hit_tokens_last_minute"], lately),
            )
        )
    heading = ("server", "policy", "requests", "prompt tokens", "hit", "hit last minute")
    return _table(heading, cells, "servers")


def _tiers(status: Mapping[str, Any]) -> str:
    tiers = status["tiers"]
    named = [reason for tier in tiers.values() for reason in tier["evicted_tokens"]]
    reasons = [*dict.fromkeys([*_REASONS, *named])]
    rows = []
    for name, tier in tiers.items():
        used, room = tier["used_bytes"], tier["capacity_bytes"]
        memory = ("not known", "", "")
        if used is not None and room:
            share = f"{100 * used / room:.0f} %"
            memory = (share, f"{short_number(used)}B", f"{short_number(room)}B")
        rows.append(
            (
                name,
                plain(status["policies"].get(name, "-"), 20),
                *memory,
                short_number(tier["entered_tokens"]),
                *(short_number(tier["evicted_tokens"].get(reason, 0)) for reason in reasons),
                short_number(tier["demoted_tokens"]),
            )
        )
    heading = ("tier", "policy", "used", "bytes", "of", "entered")
    return _table((*heading, *(f"evicted: {r}" for r in reasons), "demoted"), rows)


def _categories(status: Mapping[str, Any]) -> str:
    tiers = list(status["tiers"])
    held = [tier for tier in tiers if tier != "disk"]
    rows = []
    for row in status["categories"]:
        hits = [row["hit_tokens"].get(tier, 0) for tier in tiers]
        rows.append(
            (
                plain(row["category"]),
                short_number(row["requests"]),
                short_number(row["prompt_tokens"]),
                percent(sum(hits), row["prompt_tokens"]),
                *map(short_number, hits),
                short_number(row["miss_tokens"]),
                *(short_number(row["held_tokens"].get(tier, 0)) for tier in held),
            )
        )
    heading = ("category", "requests", "prompt tokens", "hit", *tiers, "missed")
    return _table((*heading, *(f"held: {tier}" for tier in held)), rows, "categories")


def _groups(groups: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (plain(g["tier"]), plain(g["group"]), seconds(g["ttl_s"]), plain(g["name"])) for g in groups
    ]
    return _table(("tier", "group", "TTL", "name"), rows, "groups")


def _whatif(meter: Mapping[str, Any]) -> str:
    """Format the hit ratio of each policy at each capacity; the running policy's is measured."""
    if meter.get("undecided"):
        return f"what if: {plain(meter['undecided'], 80)}"
    arms = {(arm["policy"], arm["capacity"]): arm for arm in meter["arms"]}
    capacities = list(dict.fromkeys(capacity for _, capacity in arms))
    rows = []
    for policy in dict.fromkeys(policy for policy, _ in arms):
        cells = [_arm(arms.get((policy, capacity))) for capacity in capacities]
        rows.append((plain(policy, 20), *cells, _seconds(meter, arms.get((policy, "now")))))
    return (
        f"{_table(('what if', *capacities, 'prefill seconds'), rows)}\n"
        f"share of prompt tokens hit; {plain(meter['running'])} runs and hits "
        f"{100 * meter['hit_ratio']:.1f} %; {short_number(meter['sampled_requests'])} sampled "
        f"requests, one block in {meter['one_block_in']}"
    )


def _arm(arm: Mapping[str, Any] | None) -> str:
    if arm is None:
        return "-"
    ratio, error = 100 * arm["hit_ratio"], 200 * arm["standard_error"]
    return f"{ratio:.1f} %" if arm["running"] else f"{ratio:.1f} % ± {error:.1f}"


def _seconds(meter: Mapping[str, Any], arm: Mapping[str, Any] | None) -> str:
    """Format an arm's prefill seconds against those of the running policy, in percent."""
    left = 1.0 - (meter.get("saved_share") or 0.0)
    if arm is None or arm["running"] or not meter.get("depth_scale_tokens") or left <= 0.0:
        return "-"
    more = meter["saved_share"] - arm["saved_share"]
    return f"{100 * more / left:+.1f} % ± {200 * arm['saved_share_error'] / left:.1f}"


def _prefill(status: Mapping[str, Any]) -> str:
    """Format the prefill seconds that hits saved since the start, as the server measured."""
    ranks = [rank["prefill"] for rank in status["ranks"] if rank.get("prefill")]
    if not ranks:
        return ""
    saved, computed = (sum(rank[key] for rank in ranks) for key in ("saved_s", "computed_s"))
    return (
        f"prefill since start: {seconds(saved)} saved by hits, {seconds(computed)} computed "
        f"({percent(saved, saved + computed)} saved)"
    )


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], name: str = "rows") -> str:
    text = text_table(heading, rows[:MAX_ROWS])
    more = len(rows) - MAX_ROWS
    return f"{text}\n{more} more {name}" if more > 0 else text
