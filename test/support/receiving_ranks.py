"""Scenarios of two ranks: SGLang's request receiver over real process groups, and a tree of Canopy's.

In ``dp_attention`` each rank is a replica with its own requests; in ``pipeline`` the first of two stages
receives. Each scenario returns the times, hits and victims that the received requests gave on the tree.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.managers.io_struct import SetInternalStateReq, TokenizedGenerateReqInput, sock_send
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import point_to_point_pyobj

from sglang_canopy.config.queue import BOUNDED_SHORTEST, QueueFlags
from sglang_canopy.schedule.cost import REFIT_BATCHES
from sglang_canopy.server.scheduler.arrivals import receive_messages
from sglang_canopy.server.scheduler.live_order import LiveOrder
from sglang_canopy.server.start import plugin
from sglang_canopy.wire.hints import hint_of, pack
from sglang_canopy.wire.messages import HINTS
from support.live_tree import LiveTree, fake_req
from support.receiver import message_of, receiver_of
from support.waiting_requests import batch_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "pipeline": {"pp_size": 2},
}
ROUND_COUNT, STAMPED_ROUNDS = 80, 70
POOL_TOKENS = 96


class RankServer:
    """The receiver of a rank, its sockets, and a tree that serves the requests."""

    def __init__(self, layout: str, rank: int, folder: Path) -> None:
        self.tree = LiveTree(POOL_TOKENS, "wa", config={"quantum_tokens": 1})
        arguments = {"model_path": "dummy", "device": "cpu", "radix_eviction_policy": "wa"}
        server_args = ServerArgs(**arguments, **LAYOUTS[layout])
        world = SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0)
        publish(server_args, role="scheduler", ranks=world)
        init_distributed_environment(
            backend="gloo",
            world_size=2,
            rank=rank,
            local_rank=0,
            distributed_init_method=f"file://{folder}/meet",
        )
        initialize_model_parallel(backend="gloo")
        parallel_state = get_parallel()
        self.is_pipeline = layout == "pipeline"
        cache = self.tree.cache
        cache.tp_group = get_dp_tp_group().cpu_group  # the group that SGLang's cache factory passes
        cache.tp_world_size = torch.distributed.get_world_size(cache.tp_group)
        cache.attn_tp_group = parallel_state.attn_tp_group.cpu_group
        cache.attn_cp_group = parallel_state.attn_cp_group.cpu_group
        self.live_order = LiveOrder(cache, QueueFlags(queue_order=BOUNDED_SHORTEST))
        self.receiver, self.socket = receiver_of(server_args, zmq.Context())
        self.effects: dict[str, Any] = {**{name: [] for name in ("times", "hits")}, "hinted": 0}

    def send(self, message: Any) -> None:
        sock_send(self.socket, message)

    def receive(self) -> list[Any]:
        """Run one iteration of the scheduler's loop. A first stage forwards its requests, as in SGLang."""
        messages = self.receiver.recv_requests()
        if self.is_pipeline and get_parallel().pp_rank == 0:
            point_to_point_pyobj(messages, 0, get_parallel().world_group.cpu_group, 0, 1)
        return messages

    def serve(self, message: TokenizedGenerateReqInput) -> None:
        """Look up, compute and insert."""
        core, ids = self.tree.core, list(message.input_ids)
        req = fake_req(ids, [], rid=message.rid, num_matched_prefix_tokens=0, host_loaded_length=0)
        req.sampling_params = message.sampling_params
        request = core.requests.register(req)
        hit_tokens = self.tree.match(ids)
        req.cached_tokens = req.cached_tokens_device = hit_tokens
        core.requests.report_end(req)
        self.tree.insert(ids, request)
        self.effects["times"].append(request.time)
        self.effects["hits"].append(hit_tokens)
        if not self.is_pipeline:  # --canopy-queue-order is refused there
            batch = batch_of([req], [len(ids) - hit_tokens], [hit_tokens], None)
            self.live_order.record_batch(batch)

    def apply_hints(self, message: SetInternalStateReq) -> None:
        receive_messages(lambda *_: None, SimpleNamespace(tree_cache=self.tree.cache), message)
        self.effects["hinted"] += 1


def requests_by_round(seed: int, rounds: int, limit: int) -> list[list[TokenizedGenerateReqInput]]:
    """Return each round's arrivals: up to ``limit`` requests, which share prefixes."""
    rng, arrivals = random.Random(seed), []
    for step in range(rounds):
        requests = []
        # The HTTP process stamps requests; for the last ones the receiver does, as for gRPC.
        for number in range(rng.randint(0, limit)):
            stamp = {"canopy": {"time": float(step), "conversation": f"c{rng.randrange(5)}"}}
            if step >= STAMPED_ROUNDS:
                stamp = {"canopy_turn": 2}
            tokens = [1000 * rng.randrange(5) + token for token in range(rng.randint(2, 30))]
            requests.append(message_of(stamp, tokens, f"{seed}-{step}-{number}"))
        arrivals.append(requests)
    return arrivals


def hint_messages(step: int) -> list[SetInternalStateReq]:
    """Return the hints that the HTTP process broadcasts in this round."""
    keys = []
    if step % 10 == 5:
        last_hint = {"conversation": f"c{step // 10 % 5}", "over": True}
        keys.append(HINTS.key(pack([hint_of(last_hint, float(step))])))
    return [SetInternalStateReq(server_args={key: 1}) for key in keys]


def run_layout(layout: str, rank: int, folder: Path) -> dict[str, Any]:
    plugin.load()
    HookRegistry.apply_hooks()
    server = RankServer(layout, rank, folder)
    # Replicas get unequal loads: a collective of one replica's ranks must not wait for the other replica.
    arrivals = requests_by_round(rank, ROUND_COUNT, limit=1 if rank else 4)
    for step in range(ROUND_COUNT):
        if rank == 0 or layout == "dp_attention":
            for request in arrivals[step]:
                server.send(request)
        if rank == 0:
            for message in hint_messages(step):
                server.send(message)
        for message in server.receive():
            if isinstance(message, TokenizedGenerateReqInput):
                server.serve(message)
            else:
                server.apply_hints(message)
    counters = server.tree.core.live.counters
    fits = server.live_order.prefill_batches // REFIT_BATCHES
    return {**server.effects, "victims": counters.victim_digest.count_and_digest, "fits": fits}


def dp_attention(rank: int, folder: Path) -> dict[str, Any]:
    return run_layout("dp_attention", rank, folder)


def pipeline(rank: int, folder: Path) -> dict[str, Any]:
    return run_layout("pipeline", rank, folder)
