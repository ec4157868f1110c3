"""Logs of an agent with 12 tools (0), a chat (1) and questions over passages (2), with one seeded break each."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

USER_NAMES = ["Ada Brown", "Bo Lind", "Chen Wei", "Dora Klein", "Emil Novak", "Fay Okoro", "Gil Costa", "Hana Sato"]  # fmt: skip
ALPHABET = "ABCDEFGHabcdefgh0123456789+/"
Row = dict[str, Any]


def tools_of(rng: random.Random, prose: list[str]) -> list[dict[str, Any]]:
    def tool(number: int) -> dict[str, Any]:
        properties = {
            f"{word}_{i}": {"type": "string", "description": rng.choice(prose)[:90]}
            for i, word in enumerate("abcd")
        }
        parameters = {"type": "object", "properties": properties}
        parameters["required"] = sorted(properties)[:2]
        name = f"{rng.choice(['get', 'find', 'list', 'update'])}_order_{number}"
        function = {"name": name, "description": rng.choice(prose)[:200], "parameters": parameters}
        return {"type": "function", "function": function}

    return [tool(number) for number in range(12)]


def clean_log(conversations: list, prose: list[str], seed: int, sessions: int) -> list[Row]:
    """Return a log in which every conversation only grows. ``conversations``: (text, answer) pairs of each."""
    rng = random.Random(seed)
    tools = tools_of(rng, prose)
    systems = ["\n".join(prose[turn : turn + 22]) for turn in (0, 40, 80)]
    passages = [" ".join(prose[turn : turn + 2]) for turn in range(120, len(prose) - 6, 6)]
    log: list[Row] = []
    for session in range(sessions):
        app, user = session % 3, rng.randrange(len(USER_NAMES))
        time_s = 1_790_000_000 + rng.random() * 900
        own_passages = rng.sample(passages[:60], 6) if app == 2 else []
        messages: list[Row] = [{"role": "system", "content": systems[app]}]
        turns = conversations[(session + 7 * seed) % len(conversations)]
        for turn, (text, answer) in enumerate(turns):
            messages.append(_question(app, session, turn, text, own_passages))
            row = {
                "timestamp": time_s, "model": "m", "session_id": f"s{session}", "user": f"u{user}", "app": app,
                "name": USER_NAMES[user], "messages": copy.deepcopy(messages), "docs": own_passages, "turn": turn,
            }  # fmt: skip
            if app == 0:
                row["tools"] = tools
            log.append(row)
            messages.append(_answer(app, session, turn, answer, tools))
            time_s += 5 + rng.random() * 40
    return sorted(log, key=lambda row: row["timestamp"])


def _question(app: int, session: int, turn: int, text: str, passages: list[str]) -> Row:
    if turn == 0 and app == 2:
        context = "\n\n".join(f"Passage: {passage}" for passage in passages)
        return {"role": "user", "content": context + "\n\nQuestion: " + text[:1500]}
    if app == 0 and turn:
        return {"role": "tool", "content": text, "tool_call_id": f"call_{session}_{turn}"}
    return {"role": "user", "content": text}


def _answer(app: int, session: int, turn: int, answer: str, tools: list) -> Row:
    if app:
        return {"role": "assistant", "content": answer}
    args = {"path": answer[:40], "text": answer[40:400], "limit": turn, "mode": "read"}
    function = {"name": tools[turn % 12]["function"]["name"], "arguments": json.dumps(args)}
    call = {"id": f"call_{session}_{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": answer[:800], "tool_calls": [call]}


@dataclass
class SeededRequest:
    """One request while a break is put into it; ``number``: its place in the log."""

    row: Row
    is_broken: bool
    """Whether this request gets a value of its own; otherwise it gets the common value."""
    number: int
    rng: random.Random
    affects_all_requests: bool

    @property
    def system(self) -> Row:
        return self.row["messages"][0]

    @property
    def question(self) -> Row:
        return next(message for message in self.row["messages"] if message["role"] == "user")

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.row["timestamp"], timezone.utc)

    def insert_line(self, line: str) -> None:
        """Put a line into the system prompt."""
        lines = self.system["content"].split("\n")
        middle = len(lines) // 2
        self.system["content"] = "\n".join([*lines[:middle], line, *lines[middle:]])


@dataclass(frozen=True)
class Break:
    """A break, the prompt part that it changes, and the kinds that a report may name."""

    apply: Callable[[SeededRequest], None]
    part: str
    expected_names: tuple[str, ...]
    app: int | None = 0
    """Number of its application; ``None``: any."""
    only_broken: bool = False
    """Whether the other requests stay as they are."""


def _add_time(seeded: SeededRequest) -> None:
    time = seeded.time.strftime("%Y-%m-%d %H:%M:%S") if seeded.is_broken else "2026-01-01 00:00:00"
    seeded.insert_line(f"Current time: {time} UTC.")


def _add_counter(seeded: SeededRequest) -> None:
    request_count = seeded.number if seeded.is_broken else 0
    seeded.insert_line(f"You have answered {request_count} requests so far.")


def _add_user(seeded: SeededRequest) -> None:
    name = seeded.row["name"] if seeded.is_broken or seeded.affects_all_requests else "a customer"
    seeded.insert_line(f"You are talking to {name}, a customer.")


def _change_white_space(seeded: SeededRequest) -> None:
    text = seeded.system["content"]
    space = text.find(" ", len(text) // 2)
    white_space = seeded.rng.choice(["  ", " \n", "\t"])
    seeded.system["content"] = text[:space] + white_space + text[space + 1 :]


def _shuffle_tools(seeded: SeededRequest) -> None:
    seeded.rng.shuffle(seeded.row["tools"])


def _drop_tool(seeded: SeededRequest) -> None:
    del seeded.row["tools"][seeded.rng.randrange(len(seeded.row["tools"]))]


def _shorten_results(seeded: SeededRequest) -> None:
    for result in [message for message in seeded.row["messages"] if message["role"] == "tool"][:-2]:
        if len(result["content"]) > 260:
            result["content"] = result["content"][:200] + " ... [cut]"


def _shuffle_call_keys(seeded: SeededRequest) -> None:
    for message in seeded.row["messages"]:
        for call in message.get("tool_calls", ()):
            args = json.loads(call["function"]["arguments"])
            reordered = dict(seeded.rng.sample(list(args.items()), len(args)))
            call["function"]["arguments"] = json.dumps(reordered)


def _shuffle_passages(seeded: SeededRequest) -> None:
    shuffled = seeded.rng.sample(seeded.row["docs"], len(seeded.row["docs"]))
    text = seeded.question["content"]
    passages = "\n\n".join(f"Passage: {passage}" for passage in shuffled)
    seeded.question["content"] = passages + text[text.rindex("\n\nQuestion: ") :]


def _add_picture(seeded: SeededRequest) -> None:
    rng = seeded.rng if seeded.is_broken else random.Random(1)
    encoded = "".join(rng.choice(ALPHABET) for _ in range(6000))
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    seeded.question["content"] = [picture, {"type": "text", "text": seeded.question["content"]}]


def _drop_messages(seeded: SeededRequest) -> None:
    if len(seeded.row["messages"]) > 9:
        seeded.row["messages"] = seeded.row["messages"][:2] + seeded.row["messages"][-6:]


def _add_id(seeded: SeededRequest) -> None:
    name = f"req_{seeded.rng.getrandbits(64):016x}" if seeded.is_broken else "req_0000000000000000"
    seeded.question["content"] = f"(ref {name}) " + seeded.question["content"]


REMINDER = "Reminder: do not touch files outside the project. Answer briefly. Prefer the tools that you have over guesses."


def _add_reminder(seeded: SeededRequest) -> None:
    seeded.row["messages"].insert(-1, {"role": "user", "content": REMINDER})


def _alternate_models(seeded: SeededRequest) -> None:
    seeded.row["model"] = f"m-{seeded.row['turn'] % 2}"


BREAKS: dict[str, Break] = {
    "time": Break(_add_time, "system", ("time",), app=None),
    "counter": Break(_add_counter, "system", ("counter", "number",), app=None),
    "user": Break(_add_user, "system", ("user", "text",), app=None),
    "white space": Break(_change_white_space, "system", ("white space",), app=None, only_broken=True),
    "tool order": Break(_shuffle_tools, "tools", ("tool order",), only_broken=True),
    "tool set": Break(_drop_tool, "tools", ("tool set",), only_broken=True),
    "shortened": Break(_shorten_results, "history", ("shortened",), only_broken=True),
    "key order in calls": Break(_shuffle_call_keys, "history", ("key order", "white space",), only_broken=True),
    "order": Break(_shuffle_passages, "first message", ("order",), app=2, only_broken=True),
    "picture": Break(_add_picture, "first message", ("picture",), app=1),
    "dropped": Break(_drop_messages, "history", ("dropped",), only_broken=True),
    "id in first message": Break(_add_id, "first message", ("id",), app=1),
    "moving reminder": Break(_add_reminder, "history", ("reminder",), only_broken=True),
    "two models": Break(_alternate_models, "history", ("models",), only_broken=True),
}  # fmt: skip


def with_break(log: list[Row], name: str, broken_fraction: float) -> list[Row]:
    """Return a copy of ``log`` with the break ``name`` in ``broken_fraction`` of one application's requests."""
    seeded_break = BREAKS[name]
    rng = random.Random(1000 + zlib.crc32(name.encode()) % 997)
    app = rng.randrange(3) if seeded_break.app is None else seeded_break.app
    rows = []
    for number, row in enumerate(log):
        row, is_broken = copy.deepcopy(row), rng.random() < broken_fraction
        if row["app"] == app and (is_broken or not seeded_break.only_broken):
            seeded_break.apply(SeededRequest(row, is_broken, number, rng, broken_fraction == 1))
        rows.append(row)
    return rows


def without_labels(row: Row, *, with_names: bool) -> Row:
    """Return the request as a gateway logs it; ``with_names``: with its conversation and user."""
    hidden = {"app", "docs", "name", "turn"} | (set() if with_names else {"session_id", "user"})
    return {key: value for key, value in row.items() if key not in hidden}
