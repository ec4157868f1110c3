"""NVIDIA Dynamo's KV indexer from its package, fed with our tree's events over ZMQ.

It must not become a dependency of a server: install it into a folder of its own.

    pip install --no-deps --target FOLDER ai-dynamo-runtime==1.6.1
    CANOPY_INDEXER=FOLDER python -m pytest test/radix/test_dynamo_indexer.py
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher

from launch_server import free_port
from support.cached_prefixes import CPU, GPU, PAGE, Cached, cached, serve, spread
from support.live_tree import LiveTree

FOLDER = "CANOPY_INDEXER"
VERSION = "1.6.1"
READY_S = 40.0
WORKER = 7
SALTS = (None, "a")


class Indexer:
    """The indexer's own process, by its HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, raw, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def matched(self, tokens: list[int], salt: str | None) -> tuple[int, int]:
        """Tokens of a prompt that the worker has on the device, and in any tier."""
        asked = {"model_name": "tiny", "token_ids": tokens, "cache_salt": salt}
        rows = self.call("/query", asked)["instances"]
        row = rows.get(str(WORKER), {"gpu": 0, "longest_matched": 0})
        return row["gpu"], row["longest_matched"]


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    folder = os.environ.get(FOLDER, "")
    if not (Path(folder) / "dynamo" / "indexer").is_dir() and not _is_installed():
        pytest.skip(
            "Dynamo's indexer is not installed: pip install --no-deps --target FOLDER "
            f"ai-dynamo-runtime=={VERSION}, and set {FOLDER}=FOLDER"
        )
    port = free_port()
    log = tmp_path / "indexer.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": folder},
        )
    made = Indexer(f"http://127.0.0.1:{port}")

    def ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            made.call("/health")
        except OSError:
            return False
        return True

    try:
        assert soon(ready), log.read_text(errors="replace")[-2000:]
        yield made
    finally:
        process.kill()
        process.wait()


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("dynamo.indexer") is not None
    except ModuleNotFoundError:
        return False


def soon(true: Callable[[], bool]) -> bool:
    """Poll until ``true`` is true or a timeout; return its value."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return False


def leading(prefixes: Cached, tokens: list[int], salt: str | None) -> int:
    """Tokens of the prompt that are cached from its beginning, page after page."""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        if (salt, tuple(tokens[:end])) not in prefixes:
            return end - PAGE
    return len(tokens) // PAGE * PAGE


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "comes late"])
def test_it_counts_each_tenants_tokens_on_device_and_host(indexer: Indexer, late: bool) -> None:
    """For every cached prefix and many other prompts, its answer equals the tree's contents."""
    pub, replay = free_port(), free_port()
    # SGLang's publisher binds to addresses with a star.
    publisher = ZmqEventPublisher(0, endpoint=f"tcp://*:{pub}", replay_endpoint=f"tcp://*:{replay}")

    def register() -> None:
        asked = {
            "instance_id": WORKER,
            "model_name": "tiny",
            "block_size": PAGE,
            "endpoint": f"tcp://127.0.0.1:{pub}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        assert indexer.call("/register", asked) == {"status": "ok"}

    try:
        if not late:
            register()
        tree = LiveTree(
            64, "wa", {"quantum_tokens": 1}, PAGE,
            host_tokens=96, write_policy="write_back", events=True,
        )  # fmt: skip
        draw, batches = random.Random(5), 0
        prompts = [
            spread([draw.randrange(3) for _ in range(draw.randrange(1, 9))]) for _ in range(120)
        ]
        for n, tokens in enumerate(prompts):
            serve(tree, tokens, float(n), draw.choice(SALTS))
            if draw.random() < 0.3:
                tree.load_back(tokens)
            if draw.random() < 0.3:
                tree.evict(draw.randrange(1, 30))
            tree.settle()
            events = tree.cache.take_events()
            if events:
                publisher.publish(KVEventBatch(ts=float(n), events=events))
                batches += 1
            if late and n == 60:
                register()
        on_device, on_host = cached(tree, GPU), cached(tree, CPU)
        assert on_device
        assert on_host - on_device
        assert batches > 60
        expected = {
            (tuple(tokens), salt): (
                leading(on_device, tokens, salt),
                leading(on_device | on_host, tokens, salt),
            )
            for tokens in prompts
            for salt in SALTS
        }
        assert len(set(expected.values())) > 5

        def known() -> dict[Any, tuple[int, int]]:
            return {key: indexer.matched(list(key[0]), key[1]) for key in expected}

        def beat() -> None:
            """Send another batch: a late listener detects missed batches by its number."""
            publisher.publish(KVEventBatch(ts=0.0, events=[]))

        def agrees() -> bool:
            beat()
            return known() == expected

        soon(agrees)
        assert known() == expected
    finally:
        publisher.shutdown()
