"""The same work on ranks that talk over gloo, each a process of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(count: int, work: Callable[..., Any], folder: Path, *args: Any) -> dict[int, Any]:
    """Return the results of ``work(rank, *args)``, a function of a module, on ``count`` ranks."""
    out = torch.multiprocessing.get_context("spawn").SimpleQueue()
    given = (count, work, str(folder / "meet"), out, args)
    joined = torch.multiprocessing.spawn(_one_rank, given, nprocs=count, join=False)
    found = dict(out.get() for _ in range(count))
    while not joined.join():
        pass
    return found


def _one_rank(rank: int, count: int, work: Callable[..., Any], meet: str, out, args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=count)
    try:
        out.put((rank, work(rank, *args)))
    except BaseException as error:  # the other ranks would be waited for
        out.put((rank, repr(error)))
        raise
    dist.barrier()  # none leaves while another still talks to it
    dist.destroy_process_group()
