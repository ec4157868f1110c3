"""Advice in words: the terminal's summary and the sentences of the page."""

from __future__ import annotations

from collections.abc import Iterator

from canopy_lab.advise.advice import LOST_POINTS
from canopy_lab.advise.answers import Advice, ArmRow, Tier
from canopy_lab.report.table import short_number, text_table
from canopy_lab.report.units import bytes_text, percent, seconds

NOTE_BY_KIND = {
    "baseline": "",
    "policy": "",
    "placebo": "placebo",
    "hints": "needs hints",
    "bound": "no server can",
}
FEW_PROMPTS = 50
"""Mean prompts in the simulated cache below which its hit ratio is inaccurate."""
POLICY_COLUMNS = ("policy", "tokens hit", "gain, points", "95 % interval", "prefill s", "TTFT alone", "GPU h saved/day", "")  # fmt: skip
TIER_COLUMNS = ("memory", "holds", "LRU hits", "TTFT alone", "advised hits", "TTFT alone", "GPU h saved/day")  # fmt: skip


def policy_cells(row: ArmRow) -> list[str]:
    """Return a row of the table of policies, under ``POLICY_COLUMNS``."""
    gain, is_baseline = row.gain, row.kind == "baseline"
    return [
        gain.label,
        percent(gain.hit_ratio, 1),
        "" if is_baseline else f"{gain.points:+.1f}",
        "" if is_baseline else f"{gain.low:+.1f} to {gain.high:+.1f}",
        "" if is_baseline else f"{100 * row.prefill_change:+.1f} %",
        seconds(row.cost.ttft_mean_s),
        "" if is_baseline else _gpu_hours_a_day(row.gpu_s_saved_per_hour),
        NOTE_BY_KIND[row.kind],
    ]


def tier_cells(tier: Tier) -> list[str]:
    """Return a row of the table of tiers, under ``TIER_COLUMNS``."""
    return [
        tier.label,
        f"{short_number(tier.tokens)} tokens",
        percent(tier.lru.hit_ratio, 1),
        seconds(tier.lru_cost.ttft_mean_s),
        percent(tier.advised.hit_ratio, 1),
        seconds(tier.advised_cost.ttft_mean_s),
        _gpu_hours_a_day(tier.gpu_s_saved_per_hour),
    ]


def _gpu_hours_a_day(seconds_an_hour: float) -> str:
    return f"{24 * seconds_an_hour / 3600:.3g}"


def describe_log(advice: Advice) -> list[str]:
    """Return lines about the log and its reading, alarms first."""
    sample = advice.sample
    rate = sample["requests_in_log"] / max(sample["span_s"], 1.0)
    roughly = "about " if sample["one_in"] > 1 else ""
    lines = [
        *(f"Note: {alarm}" for alarm in sample["understood"]["alarms"]),
        f"{sample['requests_in_log']:,} requests in {seconds(sample['span_s'])} ({rate:.3g} a second), "
        f"{sample['tokens_in_log'] / max(sample['requests_in_log'], 1):,.0f} prompt tokens each on average, "
        f"{roughly}{sample['conversations']:,} conversations.",
        *sample["understood"]["details"],
    ]
    if sample["one_in"] > 1:
        lines.append(
            f"Sampled: one conversation in {sample['one_in']}, chosen by hash, {sample['requests']:,} requests; "
            "capacities are scaled down with it, and SGLang's LRU is simulated evicting as much as is "
            "needed, not whole nodes. The intervals hold for the sample."
        )
        if advice.scaled_prompts < FEW_PROMPTS:
            lines.append(
                f"The scaled cache holds only {advice.scaled_prompts:.0f} mean prompts, so hit ratios at "
                "small capacities are rough, mostly too low; --sample-requests takes more."
            )
    if sample["method"]:
        text = f"Prompts were cut into blocks; {sample['method']}"
        if sample["token_scale"] != 1.0:
            text += f". The log's server counted {sample['token_scale']:.2f} tokens for each, and capacities are converted by that"  # fmt: skip
        lines.append(text + ".")
    if not sample["span_s"] and sample["requests_in_log"] > 1:
        lines.append("The requests all have the same time: waits and figures an hour mean nothing.")
    if sample["merged"] > 1:
        merged_blocks, block_tokens = sample["merged"], sample["block_tokens"]
        lines.append(f"Blocks are merged by {merged_blocks}, to {block_tokens} tokens.")
    return lines


def describe_capacity(advice: Advice) -> str:
    kv_size = bytes_text(advice.capacity_tokens * advice.kv_bytes_per_token)
    if advice.capacity_from != "curve":
        source = {
            "log": ", as the server's log says",
            "ranks": ", the sum of the DP ranks in the server's log: hits are those of a router that "
            "keeps each conversation on one rank",
        }.get(advice.capacity_from, "")
        return f"Capacity: {advice.capacity_tokens:,.0f} tokens, {kv_size} of KV{source}.{_describe_too_long(advice)}"
    return (
        f"Capacity: {advice.capacity_tokens:,.0f} tokens ({kv_size}) are assumed: the largest at "
        f"which LRU has lost {LOST_POINTS:.0f} points. Yours is max_total_num_tokens in SGLang's log; give it as "
        "--capacity-tokens, summed over replicas if a router keeps conversations together."
    )


def _describe_too_long(advice: Advice) -> str:
    if not advice.too_long:
        return ""
    return (
        f" {percent(advice.too_long, 1)} of the prompts are longer than that: no such server can take them, "
        "so check --capacity-tokens."
    )


def describe_repeats(advice: Advice) -> str:
    base = advice.rows[0].gain.hit_ratio
    text = f"{percent(advice.repeats, 1)} of the prompt tokens repeat an earlier prompt: an endless cache would hit them."
    if advice.repeats:
        text += (
            f" It would hold {short_number(advice.distinct_tokens)} tokens. SGLang's LRU hits "
            f"{percent(base, 1)} at your capacity, {percent(base / advice.repeats, 1)} of what repeats."
        )
    return text


def describe_agents(advice: Advice) -> list[str]:
    """Return a line about the memory that holds the agents' sessions; an empty list without agents."""
    agents = advice.agents
    if agents is None:
        return []
    demand = f"Agents: up to {agents.sessions:,} sessions at a time hold {short_number(agents.tokens)} tokens"
    missing = agents.tokens - advice.capacity_tokens
    if missing <= 0:
        return [f"{demand}, for which the device has room."]
    return [
        f"{demand}. {bytes_text(missing * advice.kv_bytes_per_token)} of host memory would hold what the device cannot, "
        f"and LRU would hit {percent(agents.hit_ratio_with)} of the agents' prompt tokens instead of "
        f"{percent(agents.hit_ratio)}."
    ]


def describe_placebo(advice: Advice) -> str:
    wa = next(r.gain for r in advice.rows if r.gain.label == "wa")
    return (
        f"Placebo: with another request's labels (type, turn, stop, length, gaps) on each request, wa "
        f"gains {advice.placebo_points:+.1f} points; with the true labels, {wa.points:+.1f}. The gain "
        "with the placebo does not come from the labels."
    )


def describe_hints(advice: Advice) -> str:
    half_gain, all_gain = [r.gain.points for r in advice.rows if r.kind == "hints"]  # HINTED_ARMS
    bound = advice.rows[-1].gain
    return (
        f"With hints whether and when a conversation continues: {half_gain:+.1f} points if half of the clients "
        f"give them and nine in ten are true; {all_gain:+.1f} if all clients give them and all are true. A policy "
        f"that knows the future: {bound.points:+.1f}."
    )


def describe_profile(advice: Advice) -> str:
    return (
        f"Times are those of {advice.profile} ({advice.profile_source}). TTFT alone is the mean of each "
        "request by itself, the least that hits save (canopy simulate system has the queue). Prefill s is the change of the prefill seconds of all "
        f"requests, GPU h saved/day what that is in a day at this log's rate. Prefill under LRU {_describe_busy_share(advice.prefill_busy)}."
    )


def _describe_busy_share(share: float) -> str:
    """Return the share of a GPU's time, or the number of GPUs."""
    if share <= 1:
        return f"keeps one such GPU busy for {percent(share, 1)} of the time"
    return f"is the work of {share:.1f} such GPUs"


def describe_uncertainty(advice: Advice) -> str:
    return (
        f"Intervals: {advice.clusters:,} {advice.cluster_kind} drawn with replacement a thousand times, "
        "with what the simulator gave for each request. They do not cover another week's traffic."
    )


def describe_tiers() -> str:
    return (
        "A lower tier holds copies of the tiers above it, so its size decides. Hits from it are "
        "charged with their transfer; queues on the link are not simulated (canopy simulate system, "
        "canopy plan)."
    )


def summary(advice: Advice) -> str:
    return "\n".join(_summary(advice))


def _summary(advice: Advice) -> Iterator[str]:
    yield from describe_log(advice)
    yield describe_capacity(advice)
    yield describe_repeats(advice)
    yield from describe_agents(advice)
    yield ""
    yield text_table(POLICY_COLUMNS, [policy_cells(row) for row in advice.rows])
    yield ""
    if advice.repeats:
        yield describe_placebo(advice)
        yield describe_hints(advice)
        yield ""
    if len(advice.tiers) > 1:
        yield text_table(TIER_COLUMNS, [tier_cells(tier) for tier in advice.tiers])
        yield ""
    yield describe_profile(advice)
    yield ""
    yield advice.decision.sentence
