"""A batch that computes more than a window holds, cut into several forwards.

Admission counts a fused prompt at what it is expected to compute. Where planning fails, or a chunk
has gone meanwhile, all of it is computed: in forwards of at most a window each, since one of the
whole prompt is what the window is there to prevent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cut(
    chosen: Sequence[torch.Tensor], most: int, tails: Sequence[int]
) -> list[list[torch.Tensor]]:
    """``chosen[i]`` (sorted positions of request i) as forwards of at most ``most`` rows, in order.

    Only the last forward is sampled from: it has the last ``tails[i]`` rows of every request, at
    least 1, even where that is more than ``most``. SGLang wants a row of every request of a batch;
    one that has none in an earlier forward computes its first row there, which gives the same KV
    whenever it is computed.
    """
    surplus = sum(map(len, chosen)) - most
    if surplus <= 0:
        return [list(chosen)]
    room = max(1, most - len(chosen) + 1)  # beside a row of each of the others
    early: list[list[torch.Tensor]] = []
    last, free = [], 0
    for i, rows in enumerate(chosen):
        count = max(0, min(len(rows) - max(1, tails[i]), surplus))
        surplus -= count
        at = 0
        while at < count:
            if free == 0:
                early.append([one[:1] for one in chosen])
                free = room
            step = min(count - at, free)
            early[-1][i] = rows[at : at + step]
            at, free = at + step, free - step
        last.append(rows[count:])
    return [*early, last]
