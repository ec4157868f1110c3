"""What was said, as a signal for `wa` (after LPC, NeurIPS 2025): does the text tell who goes on?

    pip download --no-deps chitchat-dataset==0.9.0 && unzip chitchat_dataset-*.whl -d CHATS
    python benchmark/eviction/said.py --data DIR --chats CHATS

Hashed words of the end of the last message and of the answer go into a logistic model that learns
online whether the conversation goes on within 300 s. A request's score, as one of four quantiles of
the last 2,000 scores, is one more refinement of its category. The placebo reads the text of another
request. Two traces with text: runs of one agent with a shell (`agent_text_miniswe.tar.xz`, each four
times with blocks of its own) and 500 conversations of two people each. Prints one row a run.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import random
import re
import tarfile
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.reuse.categories import features

CHARS = 64
"""Characters of a block: about 16 tokens."""
READ = 300
"""Characters of the end of a message or an answer that are read."""
SIZE, RATE, WITHIN_S = 4096, 0.1, 300.0
BUCKETS, SCORES = 4, 2000
COPIES, STARTS_S = 4, 480.0
CONVERSATIONS, WINDOW_S, PAUSE_S = 500, 2400.0, 3600.0
CAPACITIES = {"agents": (0.01, 0.02), "people": (0.02, 0.05)}
SEEDS = (1,)

Text = tuple[str, str]
"""The last message and the answer."""


class Chain:
    """Block ids of a text that grows, each of which names all before it."""

    def __init__(self, name: str) -> None:
        self._hash = hashlib.blake2b(name.encode(), digest_size=7)
        self.ids: list[int] = []

    def grow(self, text: str) -> tuple[int, ...]:
        for at in range(len(self.ids) * CHARS, len(text) - CHARS + 1, CHARS):
            self._hash.update(text[at : at + CHARS].encode())
            self.ids.append(int.from_bytes(self._hash.digest(), "big"))
        return tuple(self.ids)


def agents(data: Path, _: Path, seed: int) -> Iterator[tuple[TraceRequest, Text]]:
    draw = random.Random(seed)
    with tarfile.open(data / "agent_text_miniswe.tar.xz") as tar:
        files = [tar.extractfile(m) for m in tar if m.isfile() and m.name.endswith(".jsonl")]
        runs = [[json.loads(line) for line in file] for file in files if file is not None]
    for number, run in enumerate(runs):
        run.sort(key=lambda entry: entry["timestamp"])
        for copy in range(COPIES):
            start = draw.uniform(0, STARTS_S) - run[0]["timestamp"] / 1e6
            name = f"{number}-{copy}"
            for turn, entry in enumerate(run, 1):
                said, answer = entry["input"], entry["output"]
                # Prompts of this agent are cut at the front, so each has a chain of its own.
                blocks = Chain(name).grow(said)
                yield request(
                    start + entry["timestamp"] / 1e6, said, answer, blocks, turn, name,
                    "tool" if "```bash" in answer else "end",
                ), (said, answer)  # fmt: skip


def people(_: Path, chats: Path, seed: int) -> Iterator[tuple[TraceRequest, Text]]:
    draw = random.Random(seed)
    corpus = json.loads((chats / "chitchat_dataset" / "dataset.json").read_text())
    talks = [turns for turns in map(turns_of, corpus.values()) if turns]
    for number, turns in enumerate(draw.sample(talks, CONVERSATIONS)):
        start, text, chain = draw.uniform(0, WINDOW_S), "", Chain(str(number))
        for at in range(0, len(turns), 2):
            when, said = turns[at]
            answer = turns[at + 1][1] if at + 1 < len(turns) else ""
            text += said
            time_s = start + when - turns[0][0] + draw.uniform(0, 1e-3)
            yield request(
                time_s, text, answer, chain.grow(text), at // 2 + 1, str(number), "end"
            ), (said, answer)  # fmt: skip
            text += answer


def turns_of(chat: dict[str, Any]) -> list[tuple[float, str]]:
    """Time and text of each turn, until a pause of more than an hour."""
    found: list[tuple[float, str, str]] = []
    for message in (one for group in chat["messages"] for one in group):
        when = datetime.datetime.fromisoformat(message["timestamp"].rstrip("Z")).timestamp()
        if found and not 0 <= when - found[-1][0] <= PAUSE_S:
            break
        if found and found[-1][2] == message["sender"]:
            found[-1] = (when, f"{found[-1][1]}\n{message['text']}", message["sender"])
        else:
            found.append((when, message["text"], message["sender"]))
    return [(when, text) for when, text, _ in found] if len(found) > 1 else []


def request(
    time_s: float, text: str, answer: str, blocks: tuple[int, ...], turn: int, name: str, stop: str
) -> TraceRequest:
    return TraceRequest(
        time_s, max(1, len(text) // 4), max(1, len(answer) // 4), blocks, CHARS // 4,
        category="chat", turn=turn, conversation=name, user=name, stop=stop,
    )  # fmt: skip


def words(text: Text) -> list[int]:
    """Places of a text's words, and of pairs of them, in the model."""
    places = set()
    for side, part in zip("ma", text):
        found = re.findall(r"\w+|[?!.`]", part[-READ:].lower())
        for one in (*found, *map(" ".join, pairwise(found))):
            places.add(zlib.crc32(f"{side} {one}".encode()) % SIZE)
    return sorted(places)


class Model:
    """Logistic regression on hashed words, learnt online (AdaGrad)."""

    def __init__(self) -> None:
        self.weights, self.seen = [0.0] * SIZE, [1.0] * SIZE
        self.bias = 0.0

    def score(self, places: Sequence[int]) -> float:
        norm = 1.0 / math.sqrt(max(1, len(places)))
        raw = self.bias + norm * sum(self.weights[place] for place in places)
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, raw))))

    def learn(self, places: Sequence[int], goes_on: bool) -> None:
        norm = 1.0 / math.sqrt(max(1, len(places)))
        slope = self.score(places) - goes_on
        self.bias -= 0.01 * slope
        for place in places:
            self.seen[place] += (slope * norm) ** 2
            self.weights[place] -= RATE * slope * norm / math.sqrt(self.seen[place])


def scored(trace: Sequence[TraceRequest], texts: Sequence[Text]) -> tuple[list[str], float]:
    """A label for each request, from what was known when it was answered, and the AUC of the scores."""
    model, recent, labels = Model(), deque(maxlen=SCORES), []
    waiting: dict[str, tuple[float, list[int], int]] = {}
    scores, truth = [], [False] * len(trace)
    for index, (one, text) in enumerate(zip(trace, texts)):
        for name, (born, places, at) in list(waiting.items()):
            if name == one.conversation or one.time_s - born > WITHIN_S:
                truth[at] = one.time_s - born <= WITHIN_S
                model.learn(places, truth[at])
                del waiting[name]
        places = words(text)
        score = model.score(places)
        order = sorted(recent)
        rank = bisect_right(order, score) / len(order) if order else 0.5
        labels.append(f"said{min(BUCKETS - 1, int(BUCKETS * rank))}")
        recent.append(score)
        scores.append(score)
        waiting[one.conversation or ""] = (one.time_s, places, index)
    return labels, auc(scores, truth)


def auc(scores: Sequence[float], truth: Sequence[bool]) -> float:
    order = sorted(range(len(scores)), key=scores.__getitem__)
    below = right = 0
    for index in order:
        if truth[index]:
            right += below
        else:
            below += 1
    return right / max(1, below * (len(scores) - below))


def refined(of_time: dict[float, str]) -> Policy:
    """`wa` that also refines by what was said, known by the request's time, which no two share."""
    policy: Any = make_policy("wa", {"max_categories": 1024})

    def categorise(tip: Any, one: Any) -> Any:
        names = features(
            one.category, one.stop, tip.turn, one.output_tokens, tip.own_gap_s, tip.added
        )
        return policy.model.categories.refine((*names, of_time[one.time]), one.tenant, one.time)

    policy.model._categorise = categorise
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--chats", type=Path, required=True)
    args = parser.parse_args()
    for name, make in {"people": people, "agents": agents}.items():
        for seed in SEEDS:
            made = sorted(make(args.data, args.chats, seed), key=lambda pair: pair[0].time_s)
            trace = [one for one, _ in made]
            times = [one.time for one in to_requests(trace)]
            texts = [text for _, text in made]
            shuffled = random.Random(seed).sample(texts, len(texts))
            distinct = distinct_blocks(trace)
            arms: dict[str, tuple[dict[float, str], float]] = {}
            for arm, given in (("said", texts), ("placebo", shuffled)):
                labels, area = scored(trace, given)
                arms[arm] = dict(zip(times, labels)), area
            for capacity in CAPACITIES[name]:
                blocks = round(distinct * capacity)
                for arm in ("lru", "wa", *arms):
                    policy = refined(arms[arm][0]) if arm in arms else make_policy(arm)
                    hits = 100 * simulate(trace, policy, blocks).block_hit_ratio
                    area = f", AUC {arms[arm][1]:.3f}" if arm in arms else ""
                    print(f"{name} {seed} {capacity:.0%} {arm}: {hits:.2f}{area}", flush=True)


if __name__ == "__main__":
    main()
