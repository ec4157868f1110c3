"""Logs of agents, chats and questions over passages, clean and with one seeded break each.

A conversation is rebuilt from a real agent's run so that it only grows: the first input, then each answer
and what the next input adds. Three applications share the log: an agent with 12 tools (0), a chat (1), and
questions over six passages (2). ``KINDS`` are the breaks that the finder was made with; ``UNSEEN`` were
written from public reports of gateways and agents before the finder first ran on them. ``seed_independent``
has breaks by an author who had not read the finder.
"""

from __future__ import annotations

import copy
import json
import random
import unicodedata
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from canopy_lab.advise.breaks.texts import common_prefix

NAMES = ["Ada Brown", "Bo Lind", "Chen Wei", "Dora Klein", "Emil Novak", "Fay Okoro", "Gil Costa", "Hana Sato"]  # fmt: skip
ALPHABET = "ABCDEFGHabcdefgh0123456789+/"
DEPTHS = ("head", "middle", "end")
Row = dict[str, Any]


def runs_of(folder: Path) -> list[list[tuple[str, str]]]:
    """Turns (new text, answer) of each run in ``folder``: one file of rows with input and output."""
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        turns, seen = [], ""
        for line in path.read_text().splitlines():
            row = json.loads(line)
            n = common_prefix(seen, row["input"])
            new = row["input"][n:] or row["input"][-600:]
            turns.append((new[:6000], (row["output"] or "ok")[:3000]))
            seen = row["input"]
        if len(turns) >= 4:
            found.append(turns[:16])
    return found


def prose_of(folder: Path) -> list[str]:
    """Return long lines of the texts in ``folder``."""
    lines = (line.strip() for path in sorted(folder.rglob("*.txt")) for line in path.open())
    return [line for line in lines if len(line) > 80][:900]


def tools_of(rng: random.Random, prose: list[str]) -> list[dict[str, Any]]:
    tools = []
    for i in range(12):
        verb = rng.choice(["get", "find", "list", "update", "cancel", "book"])
        name = f"{verb}_{rng.choice(['order', 'user', 'flight', 'file', 'page', 'row'])}_{i}"
        props = {
            f"{rng.choice('abcdefgh')}{j}_{rng.choice(['id', 'name', 'date'])}": {
                "type": rng.choice(["string", "integer"]),
                "description": rng.choice(prose)[:90],
            }
            for j in range(4)
        }
        parameters = {"type": "object", "properties": props, "required": sorted(props)[:2]}
        function = {"name": name, "description": rng.choice(prose)[:200], "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def clean_log(runs: list, prose: list[str], seed: int, sessions: int) -> list[Row]:
    """A log in which every conversation only grows."""
    rng = random.Random(seed)
    tools = tools_of(rng, prose)
    systems = ["\n".join(prose[k : k + 22]) for k in (0, 40, 80)]
    passages = [" ".join(prose[k : k + 2]) for k in range(120, len(prose) - 6, 6)]
    log: list[Row] = []
    for s in range(sessions):
        app, user = s % 3, rng.randrange(len(NAMES))
        at = 1_790_000_000 + rng.random() * 900
        docs = rng.sample(passages[:60], 6) if app == 2 else []
        messages: list[Row] = [{"role": "system", "content": systems[app]}]
        for k, (new, answer) in enumerate(runs[(s + 7 * seed) % len(runs)]):
            messages.append(_question(app, s, k, new, docs))
            row = {
                "timestamp": at, "model": "m", "session_id": f"s{s}", "user": f"u{user}", "app": app,
                "name": NAMES[user], "messages": copy.deepcopy(messages), "docs": docs, "turn": k,
            }  # fmt: skip
            if app == 0:
                row["tools"] = tools
            log.append(row)
            messages.append(_answer(app, s, k, answer, tools))
            at += 5 + rng.random() * 40
    return sorted(log, key=lambda row: row["timestamp"])


def _question(app: int, s: int, k: int, new: str, docs: list[str]) -> Row:
    if k == 0 and app == 2:
        content = "\n\n".join(f"Passage: {d}" for d in docs) + "\n\nQuestion: " + new[:1500]
        return {"role": "user", "content": content}
    if app == 0 and k:
        return {"role": "tool", "content": new, "tool_call_id": f"call_{s}_{k}"}
    return {"role": "user", "content": new}


def _answer(app: int, s: int, k: int, answer: str, tools: list) -> Row:
    if app:
        return {"role": "assistant", "content": answer}
    args = {"path": answer[:40], "text": answer[40:400], "limit": k, "mode": "read"}
    function = {"name": tools[k % 12]["function"]["name"], "arguments": json.dumps(args)}
    call = {"id": f"call_{s}_{k}", "type": "function", "function": function}
    return {"role": "assistant", "content": answer[:800], "tool_calls": [call]}


@dataclass
class Seeded:
    """One request while a break is put into it."""

    row: Row
    bad: bool
    """Whether this request gets a value of its own; else the same as all others."""
    number: int
    rng: random.Random
    depth: str
    always: bool

    @property
    def system(self) -> Row:
        return self.row["messages"][0]

    @property
    def first(self) -> Row:
        return next(m for m in self.row["messages"] if m["role"] == "user")

    @property
    def history(self) -> list[Row]:
        """The messages between the system prompt and the last message."""
        return self.row["messages"][1:-1]

    @property
    def when(self) -> datetime:
        return datetime.fromtimestamp(self.row["timestamp"], timezone.utc)

    def put(self, what: str) -> None:
        """Put a line into the system prompt."""
        lines = self.system["content"].split("\n")
        at = {"head": 1, "middle": len(lines) // 2, "end": len(lines) - 1}[self.depth]
        self.system["content"] = "\n".join([*lines[:at], what, *lines[at:]])


@dataclass(frozen=True)
class Kind:
    """A break, and its expected names."""

    put: Callable[[Seeded], None]
    place: str
    names: frozenset[str]
    app: int | None = 0
    """Its application; ``None``: any."""
    only_bad: bool = False
    """Whether the other requests stay as they are."""


def kind_of(put: Any, place: str, *names: str, app: int | None = 0, only_bad: bool = False) -> Kind:
    return Kind(put, place, frozenset(names), app, only_bad)


def _time(one: Seeded) -> None:
    shown = one.when.strftime("%Y-%m-%d %H:%M:%S") if one.bad else "2026-01-01 00:00:00"
    one.put(f"Current time: {shown} UTC.")


def _id(one: Seeded) -> None:
    name = uuid.UUID(int=one.rng.getrandbits(128) if one.bad else 7)
    one.put(f"Trace {name} of this call.")


def _counter(one: Seeded) -> None:
    one.put(f"You have answered {one.number if one.bad else 0} requests so far.")


def _user(one: Seeded) -> None:
    name = one.row["name"] if one.bad or one.always else "a customer"
    one.put(f"You are talking to {name}, a customer.")


def _white_space(one: Seeded) -> None:
    text = one.system["content"]
    at = text.find(" ", {"head": 60, "middle": len(text) // 2, "end": len(text) - 120}[one.depth])
    one.system["content"] = text[:at] + one.rng.choice(["  ", " \n", "\t"]) + text[at + 1 :]


def _time_in_first(one: Seeded) -> None:
    shown = one.when.strftime("%d/%m/%Y %H:%M:%S") if one.bad else "01/01/2026 00:00:00"
    one.first["content"] = f"[{shown}] " + one.first["content"]


def _tool_order(one: Seeded) -> None:
    one.rng.shuffle(one.row["tools"])


def _key_order(one: Seeded) -> None:
    one.row["tools"] = [
        {"type": t["type"], "function": dict(one.rng.sample(list(t["function"].items()), 3))}
        for t in one.row["tools"]
    ]


def _tool_set(one: Seeded) -> None:
    del one.row["tools"][one.rng.randrange(len(one.row["tools"]))]


def _shortened(one: Seeded) -> None:
    for m in [m for m in one.row["messages"] if m["role"] == "tool"][:-2]:
        if len(m["content"]) > 260:
            m["content"] = m["content"][:200] + " ... [cut]"


def _key_order_in_calls(one: Seeded) -> None:
    for m in one.row["messages"]:
        for call in m.get("tool_calls", ()):
            args = json.loads(call["function"]["arguments"])
            mixed = dict(one.rng.sample(list(args.items()), len(args)))
            call["function"]["arguments"] = json.dumps(mixed)


def _order(one: Seeded) -> None:
    docs = one.rng.sample(one.row["docs"], len(one.row["docs"]))
    text = one.first["content"]
    passages = "\n\n".join(f"Passage: {d}" for d in docs)
    one.first["content"] = passages + text[text.rindex("\n\nQuestion: ") :]


def _picture_of(one: Seeded, url: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": url}}
    one.first["content"] = [picture, {"type": "text", "text": one.first["content"]}]


def _picture(one: Seeded) -> None:
    rng = one.rng if one.bad else random.Random(1)
    data = "".join(rng.choice(ALPHABET) for _ in range(6000))
    _picture_of(one, f"data:image/png;base64,{data}")


def _dropped(one: Seeded) -> None:
    if len(one.row["messages"]) > 9:
        one.row["messages"] = one.row["messages"][:2] + one.row["messages"][-6:]


KINDS: dict[str, Kind] = {
    "time": kind_of(_time, "system", "time", app=None),
    "id": kind_of(_id, "system", "id", app=None),
    "counter": kind_of(_counter, "system", "counter", "number", app=None),
    "user": kind_of(_user, "system", "user", "text", app=None),
    "white space": kind_of(_white_space, "system", "white space", app=None, only_bad=True),
    "tool order": kind_of(_tool_order, "tools", "tool order", only_bad=True),
    "key order": kind_of(_key_order, "tools", "key order", only_bad=True),
    "tool set": kind_of(_tool_set, "tools", "tool set", only_bad=True),
    "shortened": kind_of(_shortened, "history", "shortened", only_bad=True),
    "key order in calls": kind_of(_key_order_in_calls, "history", "key order", "white space", only_bad=True),
    "order": kind_of(_order, "first message", "order", app=2, only_bad=True),
    "picture": kind_of(_picture, "first message", "picture", app=1),
    "dropped": kind_of(_dropped, "history", "dropped", only_bad=True),
    "time in first message": kind_of(_time_in_first, "first message", "time", app=1),
}  # fmt: skip
"""The breaks that the finder was made with."""


def _state_of_files(one: Seeded) -> None:
    files = [f" M src/{one.rng.choice(NAMES).split()[0].lower()}_{i}.py" for i in range(12)]
    shown = files[: one.rng.randrange(1, 12)] if one.bad else [" nothing to commit"]
    one.put(
        "Working folder /home/dev/project, git status:\n" + "\n".join(shown) + "\nEnd of status."
    )


def _line_ends(one: Seeded) -> None:
    for m in one.history[1:]:
        m["content"] = m["content"].replace("\n", "\r\n")


def _reasoning_removed(one: Seeded) -> None:
    answers = [m for m in one.row["messages"] if m["role"] == "assistant"]
    for m in answers:
        m["content"] = m["content"] if m is not answers[-1] else "<think>\n" + m["content"] + "\nSo it is.\n</think>\n" + m["content"]  # fmt: skip


def _time_in_tool(one: Seeded) -> None:
    one.row["tools"] = copy.deepcopy(one.row["tools"])
    shown = one.when.strftime("%I:%M:%S %p") if one.bad else "12:00:00 AM"
    one.row["tools"][0]["function"]["description"] += f" Clock of the server: {shown}."


def _id_in_first(one: Seeded) -> None:
    name = f"req_{one.rng.getrandbits(64):016x}" if one.bad else "req_0000000000000000"
    one.first["content"] = f"(ref {name}) " + one.first["content"]


def _examples(one: Seeded) -> None:
    lines = one.system["content"].split("\n")
    examples = lines[4:16]
    one.rng.shuffle(examples)
    one.system["content"] = "\n".join([*lines[:4], *examples, *lines[16:]])


def _signed_picture(one: Seeded) -> None:
    sign = f"{one.rng.getrandbits(128):032x}" if one.bad else "0" * 32
    _picture_of(one, f"https://files.example.com/a/plan.png?X-Expires=900&X-Signature={sign}")


def _summary(one: Seeded) -> None:
    messages = one.row["messages"]
    if len(messages) > 9:
        text = f"Summary after {len(messages)} messages: " + " ".join(m["content"][:60] for m in messages[2:-6])  # fmt: skip
        one.row["messages"] = [*messages[:2], {"role": "user", "content": text}, *messages[-6:]]


REMINDER = "Reminder: do not touch files outside the project. Answer briefly. Prefer the tools that you have over guesses."


def _moving_reminder(one: Seeded) -> None:
    one.row["messages"].insert(-1, {"role": "user", "content": REMINDER})


def _reminder_in_last(one: Seeded) -> None:
    one.row["messages"][-1]["content"] += f"\n\n<reminder>{REMINDER}</reminder>"


def _two_models(one: Seeded) -> None:
    one.row["model"] = f"m-{one.row['turn'] % 2}"


def _accents(one: Seeded) -> None:
    shown = "Café Zürich, señor Müller, naïve façade: always greet in French."
    one.put(unicodedata.normalize("NFD", shown) if one.bad else shown)


def _memories(one: Seeded) -> None:
    facts = [f"The user likes {one.rng.choice(NAMES)} and {one.rng.getrandbits(16)}." for _ in range(5)]  # fmt: skip
    text = "What is remembered:\n" + "\n".join(facts if one.bad else ["Nothing."])
    one.row["messages"].insert(1, {"role": "system", "content": text})


def _indented_results(one: Seeded) -> None:
    for m in [m for m in one.row["messages"] if m["role"] == "tool"][:-1]:
        m["content"] = "\n".join("  " + line for line in m["content"].split("\n"))


UNSEEN: dict[str, Kind] = {
    "state of files": kind_of(_state_of_files, "system", "text", "user", "rewritten"),
    "line ends": kind_of(_line_ends, "history", "white space", only_bad=True),
    "reasoning removed": kind_of(_reasoning_removed, "history", "shortened", "rewritten", app=1, only_bad=True),
    "time in a tool": kind_of(_time_in_tool, "tools", "time"),
    "id in first message": kind_of(_id_in_first, "first message", "id", app=1),
    "examples drawn": kind_of(_examples, "system", "order", only_bad=True),
    "signed picture": kind_of(_signed_picture, "first message", "picture", app=1),
    "summary": kind_of(_summary, "history", "rewritten", "dropped", "shortened", only_bad=True),
    "moving reminder": kind_of(_moving_reminder, "history", "reminder", only_bad=True),
    "reminder in last": kind_of(_reminder_in_last, "history", "reminder", only_bad=True),
    "two models": kind_of(_two_models, "history", "models", only_bad=True),
    "accents": kind_of(_accents, "system", "white space"),
    "memories": kind_of(_memories, "system", "text", "user", "inserted", "rewritten", "number"),
    "indented results": kind_of(_indented_results, "history", "white space", only_bad=True),
}  # fmt: skip
"""Breaks that the finder was not made with."""


BOTH = {**KINDS, **UNSEEN}


def seeded(
    log: list[Row], name: str, depth: str, rate: float, seed: int, kinds: Mapping[str, Kind] = BOTH
) -> list[Row]:
    """A copy of ``log`` with the break ``name`` in ``rate`` of one application's requests."""
    kind = kinds[name]
    rng = random.Random(1000 * seed + zlib.crc32(name.encode()) % 997)
    app = rng.randrange(3) if kind.app is None else kind.app
    found = []
    for number, row in enumerate(log):
        row, bad = copy.deepcopy(row), rng.random() < rate
        if row["app"] == app and (bad or not kind.only_bad):
            kind.put(Seeded(row, bad, number, rng, depth, rate == 1))
        found.append(row)
    return found


def without_labels(row: Row, *, named: bool) -> Row:
    """The request as a gateway would log it; ``named``: with its conversation and user."""
    hidden = {"app", "docs", "name", "turn"} | (set() if named else {"session_id", "user"})
    return {key: value for key, value in row.items() if key not in hidden}
