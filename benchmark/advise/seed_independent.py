"""Third set of the seeded judge, of an author without knowledge of the finder.

Each is a habit of gateways, agents and applications that changes text before the end of a prompt.
``names`` are the kinds that a reader of the log would accept as an answer.
"""

from __future__ import annotations

import json
import random

from seed_breaks import Kind, Seeded, kind_of


def _weekday(one: Seeded) -> None:
    shown = (
        one.when.strftime("%A, %d %B %Y, %H:%M") if one.bad else "Thursday, 01 January 2026, 00:00"
    )
    one.put(f"Today is {shown}. Take public holidays into account.")


def _epoch(one: Seeded) -> None:
    shown = f"{one.row['timestamp']:.3f}" if one.bad else "1767225600.000"
    one.put(f"<context now={shown} region=eu-west-1/>")


def _nonce(one: Seeded) -> None:
    rng = one.rng if one.bad else random.Random(3)
    nonce = "".join(rng.choice("abcdefghijkmnpqrstuvwxyz23456789") for _ in range(22))
    one.put(f'<untrusted-boundary token="{nonce}">')


def _budget(one: Seeded) -> None:
    left = 200_000 - 731 * one.number if one.bad else 200_000
    one.put(f"Token budget: {left:,} of 200,000 left. Stop early if it runs out.")


def _sensor(one: Seeded) -> None:
    degrees = one.rng.uniform(-8, 31) if one.bad else 12.4
    one.put(
        f"Outside it is {degrees:.1f} degrees and the queue has a fill level of {degrees / 31:.2f}."
    )


def _mail(one: Seeded) -> None:
    name = one.row["name"] if one.bad or one.always else "guest account"
    one.put(f"Signed in as {name.lower().replace(' ', '.')}@example.com (plan: team).")


def _release(one: Seeded) -> None:
    build = (
        one.rng.choice(("1.14.2+8812", "1.14.3+8840", "1.15.0+9001")) if one.bad else "1.14.2+8812"
    )
    one.put(f"You run inside assistant-gateway {build}.")


def _drawn_examples(one: Seeded) -> None:
    lines = one.system["content"].split("\n")
    pool = lines[3:19]
    one.system["content"] = "\n".join([*lines[:3], *one.rng.sample(pool, 8), *lines[19:]])


def _prefixed_tools(one: Seeded) -> None:
    session = f"mcp_{one.rng.getrandbits(24):06x}"
    one.row["tools"] = [
        {
            "type": t["type"],
            "function": t["function"] | {"name": f"{session}__{t['function']['name']}"},
        }
        for t in one.row["tools"]
    ]


def _trailing_space(one: Seeded) -> None:
    at = one.rng.randrange(len(one.row["tools"]))
    one.row["tools"] = [
        t
        | {
            "function": t["function"]
            | {"description": t["function"]["description"] + " " * (i == at)}
        }
        for i, t in enumerate(one.row["tools"])
    ]


def _later_tools(one: Seeded) -> None:
    keep = 6 + min(one.row["turn"], 6)
    one.row["tools"] = one.row["tools"][:keep]


def _middle_cut(one: Seeded) -> None:
    for m in one.history:
        if m["role"] == "tool" and len(m["content"]) > 900:
            m["content"] = (
                f"{m['content'][:300]}\n[... {len(m['content']) - 600} characters ...]\n{m['content'][-300:]}"
            )


def _emptied_results(one: Seeded) -> None:
    results = [m for m in one.row["messages"] if m["role"] == "tool"]
    for m in results[:-3]:
        m["content"] = "[Old tool result content cleared]"


def _spaced_arguments(one: Seeded) -> None:
    for m in one.history:
        for call in m.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(
                json.loads(call["function"]["arguments"]), indent=2
            )


def _fresh_call_ids(one: Seeded) -> None:
    for m in one.history:
        fresh = f"call_{one.rng.getrandbits(80):020x}"
        for call in m.get("tool_calls", ()):
            call["id"] = fresh
        if "tool_call_id" in m:
            m["tool_call_id"] = fresh


def _context_of_turn(one: Seeded) -> None:
    words = " ".join(
        one.rng.choice(("alpha", "river", "invoice", "meadow", "kernel")) for _ in range(60)
    )
    one.row["messages"][-1]["content"] = (
        f"<retrieved>{words}</retrieved>\n" + one.row["messages"][-1]["content"]
    )


def _turn_label(one: Seeded) -> None:
    one.first["content"] = f"(turn {one.row['turn'] if one.bad else 0}) " + one.first["content"]


def _shuffled_scores(one: Seeded) -> None:
    text = one.first["content"]
    cut = text.rindex("\n\nQuestion: ")
    scored = [f"Passage (score {one.rng.random():.3f}): {d}" for d in one.row["docs"]]
    one.first["content"] = "\n\n".join(scored) + text[cut:]


INDEPENDENT: dict[str, Kind] = {
    "weekday": kind_of(_weekday, "system", "time", app=None),
    "epoch": kind_of(_epoch, "system", "time", "counter", "number", app=None),
    "nonce": kind_of(_nonce, "system", "id", app=None),
    "budget": kind_of(_budget, "system", "counter", "number", app=None),
    "sensor": kind_of(_sensor, "system", "number", "text", app=None),
    "mail": kind_of(_mail, "system", "user", "text", "id", app=None),
    "release": kind_of(_release, "system", "text", "number", "id", "counter", app=None),
    "drawn examples": kind_of(_drawn_examples, "system", "order", "text", "rewritten", only_bad=True),
    "prefixed tools": kind_of(_prefixed_tools, "tools", "id", "text", "rewritten", "tool set", only_bad=True),
    "trailing space": kind_of(_trailing_space, "tools", "white space", only_bad=True),
    "later tools": kind_of(_later_tools, "tools", "tool set", "inserted", only_bad=True),
    "middle cut": kind_of(_middle_cut, "history", "shortened", only_bad=True),
    "emptied results": kind_of(_emptied_results, "history", "shortened", "rewritten", only_bad=True),
    "spaced arguments": kind_of(_spaced_arguments, "history", "white space", "key order", only_bad=True),
    "fresh call ids": kind_of(_fresh_call_ids, "history", "id", only_bad=True),
    "context of a turn": kind_of(_context_of_turn, "history", "reminder", "shortened", "rewritten", "dropped", only_bad=True),
    "turn label": kind_of(_turn_label, "first message", "counter", "number", app=1),
    "scores of passages": kind_of(_shuffled_scores, "first message", "number", "id", app=2, only_bad=True),
}  # fmt: skip
