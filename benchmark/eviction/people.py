"""People who talk, with every message's text and time: what a person's last message tells.

The corpus is that of the package `chitchat-dataset` 0.9.0 (BYU's Chit-Chat Challenge, 2018; MIT):
two people each. Who speaks first stands for the user, the other for the model: a request is all text
so far, its answer what the other writes next, and it returns when the user writes again. Pauses are
the real ones; starts are drawn at random, so that there is competition.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
from pathlib import Path
from typing import Any

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.request.farewell import is_farewell

FAREWELL = "thanks, farewell"
CHARS = 64
"""Characters of a block: about 16 tokens."""
CONVERSATIONS, WINDOW_S = 1500, 7200.0
_PAUSE_S = 3600.0
"""A user who writes later than that is another visit: the request before it had no return."""
_LONG = 300
"""Characters of a message that is more like a pasted text; the median is some 80."""


def labels(said: str, answered: str) -> dict[str, str]:
    """What a server could see in the last message, and in the answer to it."""
    asks, parts = "?" in said, is_farewell(said)
    return {
        "question": "question" if asks else "-",
        FAREWELL: "parting" if parts else "-",
        "long text": "long" if len(said) >= _LONG or said.count("\n") > 2 else "-",
        "length": f"4^{len(said).bit_length() // 2}",
        "answer asks": "question" if "?" in answered else "-",
        "answer parts": "parting" if is_farewell(answered) else "-",
        "all of these": " ".join(
            name
            for name, there in (
                ("asks", asks),
                ("parts", parts),
                ("asked", "?" in answered),
                ("parted", is_farewell(answered)),
            )
            if there
        ),
    }


def people(corpus: Path, seed: int) -> tuple[list[TraceRequest], dict[str, list[str]]]:
    """The requests of some conversations in order of time, and the labels of each signal."""
    draw = random.Random(seed)
    chats = [turns for turns in map(_turns, json.loads(corpus.read_text()).values()) if turns]
    made: list[tuple[TraceRequest, dict[str, str]]] = []
    for name, turns in enumerate(draw.sample(chats, CONVERSATIONS)):
        start, text = draw.uniform(0, WINDOW_S), ""
        chain, ids = hashlib.blake2b(str(name).encode(), digest_size=7), []
        for at in range(0, len(turns), 2):
            when, said = turns[at]
            answered = turns[at + 1][1] if at + 1 < len(turns) else ""
            text += said
            for first in range(len(ids) * CHARS, len(text) - CHARS + 1, CHARS):
                chain.update(text[first : first + CHARS].encode())
                ids.append(int.from_bytes(chain.digest(), "big"))
            request = TraceRequest(
                start + when - turns[0][0] + draw.uniform(0, 1e-3),
                max(1, len(text) // 4),
                max(1, len(answered) // 4),
                tuple(ids),
                CHARS // 4,
                category="chat",
                turn=at // 2 + 1,
                conversation=str(name),
                user=str(name),
                stop="end",
            )
            made.append((request, labels(said, answered)))
            text += answered
    made.sort(key=lambda pair: pair[0].time_s)
    names = made[0][1]
    return [r for r, _ in made], {name: [given[name] for _, given in made] for name in names}


def _turns(chat: dict[str, Any]) -> list[tuple[float, str]]:
    """Time and text of each turn, the user's first, until a pause of more than an hour. A turn with
    several messages is at its last."""
    found: list[tuple[float, str, str]] = []
    for message in (one for group in chat["messages"] for one in group):
        when = datetime.datetime.fromisoformat(message["timestamp"].rstrip("Z")).timestamp()
        if found and not 0 <= when - found[-1][0] <= _PAUSE_S:
            break
        if found and found[-1][2] == message["sender"]:
            found[-1] = (when, f"{found[-1][1]}\n{message['text']}", message["sender"])
        else:
            found.append((when, message["text"], message["sender"]))
    return [(when, text) for when, text, _ in found] if len(found) > 1 else []
