"""Section 3 of the paper, figure by figure: what reuse looks like."""

from __future__ import annotations

from typing import Any

from result_tables import Claim, Results, Row, listed, near

RESULTS = Results("wa")


def section_3() -> list[Row]:
    totals = RESULTS["figures-4-10"]
    a, b, real = (totals[name] for name in ("trace-a", "trace-b", "conversation"))
    turns = RESULTS["figures-11-14"]
    parts = RESULTS["figures-16-18"]
    lives = RESULTS["figures-19-20"]
    fits = RESULTS["figures-15-29"]
    types = a["figure_5_types"]
    within = {
        name: turns[name]["figure_12_reused_within_s_percent"] for name in ("trace-a", "trace-b")
    }
    single = {
        name: turns[name]["figure_13"]["first_turns_reused_by_a_first_turn_percent"]
        for name in ("trace-a", "trace-b", "conversation")
    }
    medians = [
        turns["trace-a"]["figure_14_reuse_s_by_type"][t]
        for t in ("image", "text", "search", "file")
    ]
    p50 = [m["p50"] for m in medians]
    fit = {name: row["mean_by_blocks"] for name, row in fits.items() if "mean_by_blocks" in row}
    conversation = fit["conversation, first half on second"]
    next_turn = {name: turns[name]["figure_11"] for name in ("trace-a", "conversation")}
    return [
        Row(
            "Figure 4",
            (
                Claim("ideal hits 62 % (A)", near(a["figure_4_ideal_block_hit_percent"], 62, 0.05)),
                Claim("54 % (B)", near(b["figure_4_ideal_block_hit_percent"], 54, 0.05)),
            ),
            f"{a['figure_4_ideal_block_hit_percent']:.1f}, {b['figure_4_ideal_block_hit_percent']:.1f} %; "
            f"conversation {real['figure_4_ideal_block_hit_percent']:.1f} %",
            "`figures-4-10`",
            calibrated=True,
        ),
        Row(
            "Figure 5",
            (
                Claim(
                    "four types; 78 % of A is text",
                    near(types["text"]["requests_percent"], 78, 0.05),
                ),
            ),
            f"text {types['text']['requests_percent']:.1f} %",
            "`figures-4-10`",
            calibrated=True,
        ),
        Row(
            "Figure 6",
            (Claim("hits across users are rare", a["figure_6_hits_across_users_percent"] < 10),),
            f"{a['figure_6_hits_across_users_percent']:.1f} % of A's hits",
            "`figures-4-10`",
            calibrated=True,
        ),
        Row(
            "Figure 7",
            (
                Claim("19 % of A's users have 90 % of the hits", near(_users(a, 7), 19)),
                Claim("4 % of B's", near(_users(b, 7), 4)),
            ),
            f"{_users(a, 7):.1f} %, {_users(b, 7):.1f} %",
            "`figures-4-10`",
            because="B is less skewed over its 20 minutes",
        ),
        Row(
            "Figure 8",
            (
                Claim("72 % of A's users send 90 % of the requests", near(_users(a, 8), 72)),
                Claim("15 % of B's", near(_users(b, 8), 15)),
            ),
            f"{_users(a, 8):.1f} %, {_users(b, 8):.1f} %",
            "`figures-4-10`",
        ),
        Row(
            "Figure 9",
            (
                Claim("54 % first turns", near(a["figure_9"]["first_turns_percent"], 54, 0.05)),
                Claim("P90 5", a["figure_9"]["turn_p90"] == 5),
                Claim("the longest 232", near(a["figure_9"]["longest"], 232)),
            ),
            f"{a['figure_9']['first_turns_percent']:.1f} %, {a['figure_9']['turn_p90']:.0f}, "
            f"{a['figure_9']['longest']}; conversation {real['figure_9']['first_turns_percent']:.1f} %, "
            f"{real['figure_9']['turn_p90']:.0f}, {real['figure_9']['longest']}",
            "`figures-4-10`",
            because="one session",
        ),
        Row(
            "Figure 10",
            (Claim("the top tenth of users have 8.9 times the mean turns", near(_top(a), 8.9)),),
            f"{_top(a):.1f} times",
            "`figures-4-10`",
            because="the generator draws turns without regard to users, and no public trace names users",
        ),
        Row(
            "Figure 11",
            (
                Claim(
                    "later turns make a next one likelier",
                    all(n["after_later_turn"] > n["after_first_turn"] for n in next_turn.values()),
                ),
                Claim(
                    "0.5 after a first turn", near(next_turn["trace-a"]["after_first_turn"], 0.5)
                ),
                Claim("0.8 after later ones", near(next_turn["trace-a"]["after_later_turn"], 0.8)),
                Claim(
                    "stable from window to window",
                    all(n["mean_change_from_window_to_window"] < 0.1 for n in next_turn.values()),
                ),
            ),
            "; ".join(
                f"{name} {n['after_first_turn']:.2f} and {n['after_later_turn']:.2f}, moving by "
                f"{n['mean_change_from_window_to_window']:.2f}"
                for name, n in next_turn.items()
            ),
            "`figures-11-14`",
            because="the levels contradict the 54 % of first turns",
        ),
        Row(
            "Figure 12",
            (
                Claim(
                    "80 % of reuses within 10 minutes (A)", near(within["trace-a"]["600"], 80, 0.1)
                ),
                Claim("within 10 seconds (B)", near(within["trace-b"]["10"], 80, 0.1)),
            ),
            f"{within['trace-a']['600']:.1f} %, {within['trace-b']['10']:.1f} %",
            "`figures-11-14`",
            calibrated=True,
        ),
        Row(
            "Figure 13",
            (
                Claim(
                    "under 30 % of A's single turns are reused by others", single["trace-a"] < 30
                ),
                Claim("over 50 % of B's", single["trace-b"] > 50),
            ),
            ", ".join(f"{name} {value:.1f} %" for name, value in single.items()),
            "`figures-11-14`",
        ),
        Row(
            "Figure 14",
            (Claim("reuse: image before text before search before file", p50 == sorted(p50)),),
            f"medians {listed(p50, '{:.0f}')} s",
            "`figures-11-14`",
            calibrated=True,
        ),
        Row(
            "Figure 15",
            (
                Claim("exponentials fit (within 0.1)", conversation["exponential_here"] < 0.1),
                Claim("an hour is like the next", conversation["exponential_next"] < 0.1),
            ),
            f"conversation: {conversation['exponential_here']:.3f} off in its own half, "
            f"{conversation['exponential_next']:.3f} in the next",
            "`figures-15-29`",
        ),
        Row(
            "Figure 16",
            (Claim("the start of a prompt hits most", _halves(parts, "all types of trace-a") > 0),),
            f"first half {parts['all types of trace-a']['first_half_percent']:.1f} of "
            f"{parts['all types of trace-a']['whole_prompt_percent']:.1f} %, last half "
            f"{parts['all types of trace-a']['last_half_percent']:.1f}",
            "`figures-16-18`",
        ),
        Row(
            "Figure 17",
            (Claim("so in multi-turn requests", _halves(parts, "conversation") > 0),),
            f"conversation: {parts['conversation']['first_half_percent']:.1f} of "
            f"{parts['conversation']['whole_prompt_percent']:.1f} %, "
            f"{parts['conversation']['last_half_percent']:.1f}",
            "`figures-16-18`",
        ),
        Row(
            "Figure 18",
            (
                Claim("text and images share heads, file and search do not", _heads_differ(parts)),
                Claim("B peaks at half a prompt", _halves(parts, "trace-b") > 0),
            ),
            "first tenth of first turns: "
            + ", ".join(
                f"{kind} {parts[f'trace-a, {kind}']['first_tenth_of_first_turns_percent']:.1f} %"
                for kind in ("text", "image", "search", "file")
            ),
            "`figures-16-18`",
            because="the generator gives every type the same share of shared heads",
        ),
        Row(
            "Figure 19",
            (
                Claim(
                    "90 % of A's blocks live 612 s or less", near(lives["trace-a"]["p90_s"], 612)
                ),
                Claim("of B's 0.3 s", near(lives["trace-b"]["p90_s"], 0.3)),
            ),
            ", ".join(f"{name} {life['p90_s']:,.1f} s" for name, life in lives.items()),
            "`figures-19-20`",
            calibrated=True,
        ),
        Row(
            "Figure 20",
            (
                Claim(
                    "a category's mean life is stable over two hours",
                    all(
                        lives[n]["figure_20_change_from_window_to_window"] < 0.25
                        for n in ("trace-a", "conversation")
                    ),
                ),
            ),
            f"moves by {lives['trace-a']['figure_20_change_from_window_to_window']:.2f} of itself "
            f"(trace-a), {lives['conversation']['figure_20_change_from_window_to_window']:.2f} "
            "(conversation)",
            "`figures-19-20`",
            because="means of a long tail, on traces that end",
        ),
        figure_21(),
        figure_22(),
        Row(
            "Figure 29",
            shows="the distributions of five workdays are alike",
            here=f"another day of trace-a {fit[_days(fit)]['curve_next']:.3f} apart; the halves of "
            f"conversation {conversation['curve_next']:.3f}, of Mooncake's synthetic trace "
            f"{fit['Mooncake synthetic, first half on second']['curve_next']:.3f}",
            where="`figures-15-29`",
            impossible="no public trace is longer than an hour",
        ),
    ]


def _days(fit: dict[str, Any]) -> str:
    return next(name for name in fit if "another day" in name)


def _users(trace: dict[str, Any], figure: int) -> float:
    what = "hits" if figure == 7 else "requests"
    return trace[f"figure_{figure}_users_with_90_percent_of_{what}"]


def _top(trace: dict[str, Any]) -> float:
    return trace["figure_10"]["top_tenth_over_mean"]


def _halves(parts: dict[str, Any], name: str) -> float:
    return parts[name]["first_half_percent"] - parts[name]["last_half_percent"]


def _heads_differ(parts: dict[str, Any]) -> bool:
    heads = {
        kind: parts[f"trace-a, {kind}"]["first_tenth_of_first_turns_percent"]
        for kind in ("text", "image", "search", "file")
    }
    return min(heads["text"], heads["image"]) > 2 * max(heads["search"], heads["file"])


def figure_21() -> Row:
    share = RESULTS["figure-21"]["Qwen2-7B"]["percent_of_hbm"]
    single, multi = share["text, single-turn"], share["text, multi-turn"]
    theirs = {"p50": (0.09, 0.36), "p90": (0.15, 1.31), "p99": (0.37, 2.21)}
    agree = [near(row[p], theirs[p][i]) for p in theirs for i, row in enumerate((single, multi))]
    return Row(
        "Figure 21",
        (
            Claim(
                "KV of a text request over HBM, Qwen2-7B, P50 and P90: 0.09 and 0.15 % single, "
                "0.36 and 1.31 % multi-turn",
                all(agree[:4]),
            ),
            Claim("P99 0.37 and 2.21 %", all(agree[4:])),
        ),
        "; ".join(f"{p.upper()} {single[p]:.2f} and {multi[p]:.2f} %" for p in theirs),
        "`figure-21`",
        because="lengths of single turns have a shorter tail",
    )


def figure_22() -> Row:
    need = {name: case["models"] for name, case in RESULTS["figure-22"].items()}
    a, b = need["trace-a"], need["trace-b"]
    return Row(
        "Figure 22",
        (
            Claim("Llama3-70B wants 4 times HBM on A", near(a["Llama3-70B"]["hbm_needed_mean"], 4)),
            Claim("below HBM on B", b["Llama3-70B"]["hbm_needed_mean"] < 1),
            Claim(
                "MHA far more",
                a["Llama2-13B"]["hbm_needed_mean"] > 5 * a["Llama3-70B"]["hbm_needed_mean"],
            ),
        ),
        f"{a['Llama3-70B']['hbm_needed_mean']:.1f} and {b['Llama3-70B']['hbm_needed_mean']:.2f}; "
        f"Llama2-13B {a['Llama2-13B']['hbm_needed_mean']:.0f} and {b['Llama2-13B']['hbm_needed_mean']:.1f}",
        "`figure-22`",
        because="trace-a's long conversations pause for long",
    )
