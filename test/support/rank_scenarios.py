"""Scenarios of two ranks, each with a tree, a disk store and a clock of its own: see `ranks`."""

import itertools
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_canopy.config.queue import BOUNDED_SHORTEST, QueueFlags
from sglang_canopy.schedule.cost import REFIT_BATCHES
from sglang_canopy.server.scheduler.admission import Admission
from sglang_canopy.server.scheduler.live_order import LiveOrder
from sglang_canopy.storage import disk_retry, drain
from sglang_canopy.storage.learnt_state import read_on_first_rank
from sglang_canopy.storage.page_table import PAGES
from support.disk_tree import DiskTree
from support.live_tree import LiveTree, fake_req
from support.waiting_requests import batch_of

RANK_COUNT = 2
PROMPT = [100 + i for i in range(8)]


def tree_of(rank: int, folder: Path, **options: Any) -> DiskTree:
    """A rank's tree, in step with the other's; its disk is its own, as on another machine."""
    tree = DiskTree(folder / f"disk-{rank}", config={"quantum_tokens": 1}, **options)
    tree.cache.tp_group, tree.cache.tp_world_size = torch.distributed.group.WORLD, RANK_COUNT
    tree.store.state.clock = lambda: 1000.0 + rank / 4
    return tree


def empty_memory(tree: DiskTree) -> None:
    """Empty the device and the host; the disk keeps its pages."""
    tree.cache.reset()
    tree.allocator.clear()


def node_metadata(tree: DiskTree) -> list[Any]:
    """Return the metadata of every node, the deepest last."""
    nodes = (node for node in tree.core._node_arena.values() if node is not tree.core.root_node)
    leaves = sorted((node.canopy for node in nodes), key=lambda leaf: leaf.offset)
    return [
        [leaf.offset, leaf.length, leaf.category, leaf.conversation, leaf.hits, leaf.last_access]
        for leaf in leaves
    ]


def record_comparisons(tree: DiskTree) -> dict[str, int]:
    """Return how many records of pages the ranks compared, and how many differed."""
    counters = tree.core.live.counters
    return {"compared": counters.records_compared, "disagreed": counters.records_disagreed}


def read_three_times(rank: int, folder: Path) -> Any:
    """Serve a prompt once; read it from disk three times, with a use after each read."""
    tree = tree_of(rank, folder)
    tree.epoch = 990.0
    tree.serve(PROMPT, 1.0, category="chat", conversation="c")
    reads = []
    for turn in range(3):
        empty_memory(tree)
        tree.request(20.0 + turn)
        reads.append([tree.fetch(PROMPT), node_metadata(tree)])
    tree.close()
    return {"reads": reads, **record_comparisons(tree)}


def read_shared_disk(rank: int, folder: Path) -> Any:
    """Ranks of MLA on one disk write a path, read it, and read it again after a restart."""
    rank_numbers = dict.fromkeys(("tp_rank", "attn_tp_rank"), rank)
    rank_numbers |= dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), RANK_COUNT)
    world, reads = torch.distributed.group.WORLD, []
    for start_number in range(2):
        groups = {"rank_group": world, "rank_numbers": rank_numbers}
        tree = DiskTree(folder / "disk", has_latent_kv=True, **groups)
        if start_number == 0:
            tree.serve(PROMPT, 1.0)
            empty_memory(tree)
        torch.distributed.barrier()
        tokens = tree.fetch(PROMPT)
        tree.load_back(PROMPT)
        reads.append([tokens, tree.kv(PROMPT), tree.storage.status()["unavailable"]])
        torch.distributed.barrier()
        tree.close()
    return reads


def read_before_use_is_stored(rank: int, folder: Path) -> Any:
    """Read pages while the second rank's store has not yet received the last use."""
    tree = tree_of(rank, folder)
    tree.epoch = 990.0
    tree.serve(PROMPT, 1.0, category="chat", conversation="c")
    tree.delivers_reports = rank == 0
    tree.serve(PROMPT[:4], 9.0, category="agent", conversation="d")
    empty_memory(tree)
    tree.request(20.0)
    tree.fetch(PROMPT)
    metadata = node_metadata(tree)
    tree.close()
    return {"metadata": metadata, **record_comparisons(tree)}


def refuse_pages(rank: int, folder: Path) -> Any:
    """Return how many pages were on disk already at each write, before and after one rank's disk refused some."""
    disk_retry.MIN_ROUND_S = 0.0
    tree, present_pages = tree_of(rank, folder), []
    tree.serve(PROMPT, 1.0)
    for begin_s in (2.0, 5.0):
        if rank == 1 and present_pages:
            PAGES.add_refusal()
        tree.request(begin_s)
        tree.serve(PROMPT, begin_s + 1)
        tree.request(begin_s + 2)
        tree.settle()
        present_pages.append(tree.store.counters.present_pages)
    tree.close()
    return present_pages


def drain_slowly(rank: int, folder: Path) -> Any:
    """Drain while the second rank's disk is slow: the time limit ends before all is written."""
    tree = tree_of(rank, folder, write_policy="write_back", tokens=256, host_tokens=512)
    for number in range(25):
        tree.serve([number * 100 + i for i in range(8)], 1.0 + number)
    original_write = tree.store._writer.write

    def write_slowly(keys: Any, *arguments: Any) -> Any:
        time.sleep(0.02 * rank * len(keys))
        return original_write(keys, *arguments)

    tree.store._writer.write = write_slowly  # type: ignore[method-assign]
    drain.UNMEASURED_BYTES = 1
    tree.cache.drain_s = 1.0
    tree.cache.release_host_resources()
    reopened = tree_of(rank, folder, write_policy="write_back")
    return [reopened.disk_tokens([number * 100 + i for i in range(8)]) for number in range(25)]


def drain_without_host_memory(rank: int, folder: Path) -> Any:
    """Drain while the second rank's host tier has no room for every third node."""
    tree = tree_of(rank, folder, write_policy="write_back", tokens=256, host_tokens=512)
    for number in range(8):
        tree.serve([number * 100 + i for i in range(8)], 1.0 + number)
    original_backup, calls = tree.cache.backup_node_for_write_back, itertools.count()
    tree.cache.backup_node_for_write_back = lambda node: (
        not (rank and next(calls) % 3) and original_backup(node)
    )
    tree.cache.release_host_resources()
    reopened = tree_of(rank, folder, write_policy="write_back")
    return [reopened.disk_tokens([number * 100 + i for i in range(8)]) for number in range(8)]


def load_first_profile(rank: int, folder: Path) -> Any:
    """Return the saved profile of the first rank, as each rank receives it."""
    path = str(folder / f"machine-{rank}" / "wa.json")
    return read_on_first_rank(path, (torch.distributed.group.WORLD,))


def order_queue(rank: int, folder: Path) -> Any:
    """Each rank orders the same queue; the measured times of their batches differ."""
    rng, speed_rng = random.Random(1), random.Random(rank)
    tree = LiveTree(4096, "wa")
    tree.cache.tp_group, tree.cache.tp_world_size = torch.distributed.group.WORLD, RANK_COUNT
    live = LiveOrder(tree.cache, QueueFlags(queue_order=BOUNDED_SHORTEST))
    live.protect = lambda _queue: None  # type: ignore[method-assign]
    admission = Admission(live)
    orders: list[Any] = []
    waiting: list[Any] = []
    admitted: list[Any] = []
    for step in range(5 * REFIT_BATCHES):
        for _ in range(rng.randint(0, 4)):
            tokens = [rng.randrange(2000) for _ in range(rng.randint(5, 400))]
            if rng.random() < 0.7:  # a branch of a few new prompts
                tokens = [rng.randrange(2)] * 512 + tokens
            req = fake_req(
                tokens,
                [],
                {"time": step / 10},
                rid=f"{step}-{len(waiting)}-{tokens[0]}",
                num_matched_prefix_tokens=rng.randint(0, 4),
                prefix_len=0,
                host_loaded_length=0,
                finished=lambda: False,
                to_finish=None,
                cache_salt=rng.choice([None, "a", "b"]),
            )
            waiting.append(req)
        live.look_up = lambda req: None

        scheduler = SimpleNamespace(
            waiting_queue=waiting, running_batch=None, last_batch=None, chunked_req=None
        )

        def choose(scheduler: Any = scheduler) -> tuple[Any, Any]:
            admission.arrange(queue := scheduler.waiting_queue, 0, lambda: None)
            orders.append([req.rid for req in queue])
            scheduler.waiting_queue = queue[2:]
            new_batch = SimpleNamespace(reqs=queue[:2]) if queue else None
            return new_batch, SimpleNamespace(is_empty=lambda: False)

        batch, _ = admission.choose(scheduler, SimpleNamespace(reqs=admitted), choose)
        admitted = [] if batch is None else batch.reqs
        waiting = scheduler.waiting_queue
        forward_mode = ForwardMode.DECODE if step % 5 == 4 else ForwardMode.EXTEND
        new_tokens = [len(req.origin_input_ids) for req in admitted] or [1]
        launched_s = time.monotonic() - speed_rng.uniform(0.1, 2.0)
        live.batch_ended_at = launched_s
        reqs = admitted or [fake_req([1], [], num_matched_prefix_tokens=0, host_loaded_length=0)]
        batch = batch_of(reqs, new_tokens, [0] * len(new_tokens), launched_s, forward_mode)
        live.record_batch(batch)
    cost = live.prefill_cost
    return {"fitted": cost.fit(), "used": cost.coefficients, "orders": orders}


def alternate_orders(rank: int, folder: Path) -> Any:
    """LRU and the policy alternate over the same requests, on ranks whose nodes have different addresses."""
    from sglang_canopy.whatif.meter import Meter, MeterSetup, TierTokens

    ballast = [object() for _ in range(1000 * rank)]
    tree = tree_of(rank, folder, policy="wa", has_floor=True)
    live, rng = tree.core.live, random.Random(7)
    live.meter = Meter(MeterSetup(), TierTokens(live.device_tokens), "wa")
    hits, victims, ranking_policies = [], [], []
    for step in range(240):
        if step % 40 == 20:
            live.meter._floor.is_behind = not live.meter.is_behind
        prompt = [100 * rng.randrange(6) + token for token in range(2 * rng.randrange(1, 6))]
        request = tree.request(
            float(step),
            prompt_tokens=len(prompt),
            path=tuple(prompt),
            block_tokens=1,
            tenant=rng.choice("ab"),
        )
        hits.append(tree.match(prompt))
        tree.core.requests.finish(request)
        live.meter.record_request(request, hits[-1])
        tree.insert(prompt, request)
        victims.append(tree.core.live.counters.victim_digest.count_and_digest)
        ranking_policies.append(live.ranking_policy_name)
    stats = live.meter.stats()
    del stats["spent_s"], ballast
    return {"hits": hits, "victims": victims, "meter": stats, "running": ranking_policies}
