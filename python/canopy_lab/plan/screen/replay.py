"""One instance's queue, replayed over arrays: all configurations side by side, request by request.

A simplification of ``sim/system``, for first come, first served. Requests go into prefill steps of
at most ``chunk_tokens``; those that came before a step begins are in it together. Decode steps run
while no prompt waits, and while a prompt waits for room in the pool. A prompt that waits for its
disk lets others go first. Left out: prefixes that
running requests share, copies to the host, retraction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.sim.system.costs import Costs
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.sim.system.prefetch import PREFETCH_HOST_SHARE

_FRACTIONS = 9
_RESERVED = 0.5
"""Of an output, what a running request holds beside its prompt, on average: half of it is there, and
SGLang reserves a small share of the rest."""
_BUSY = 0.5
"""Of a shared channel, what reads get while writes are under way."""

_STEPS, _BUCKETS = 32, 128
"""Decode steps of a bucket, and buckets: longer outputs end in the last one."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Queued:
    """Requests of one instance, in order. Times in seconds, lengths in tokens, one entry each."""

    arrival: Floats
    prompt: Ints
    output: Ints


@dataclass(frozen=True, slots=True)
class Tiers:
    """Of each configuration, one entry each. Sizes in tokens, speeds in tokens/s."""

    device: Floats
    page: Ints
    chunk: Floats
    host_speed: Floats
    host: Floats
    disk_read: Floats
    """Infinite without a disk."""
    disk_write: Floats
    disk_shared: NDArray[np.bool_]
    wait_base: Floats
    """A prefetch is waited for so long, and ``wait_per_token`` for each token asked for: 0 for
    ``best_effort``, infinite for ``wait_complete``."""
    wait_per_token: Floats
    running: Floats
    """Requests that decode together at most."""
    threshold: Ints
    """Fewer tokens on the disk are not fetched."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What each configuration did."""

    ttft: NDArray[np.float32]
    """Shape (requests, configurations)."""
    hits: Floats
    """Tokens found on device, host and disk, shape (3, configurations)."""
    written: Floats
    """Tokens that the disk took."""
    end: Floats
    """When the last answer was done."""


class CostTables:
    """The costs of a profile, as arrays."""

    def __init__(self, profile: EngineProfile, prompts: Ints) -> None:
        costs = Costs(profile)
        self.tokens = np.array(profile.prefill_tokens)
        self.linear = np.array(profile.prefill_linear_s)
        self.request_s = profile.prefill_request_s
        self.layers = profile.layers
        self.arrival_s = profile.arrival_s
        # Attention of each prompt whose first share is cached.
        shares = np.linspace(0.0, 1.0, _FRACTIONS)
        lengths, self._which = np.unique(prompts, return_inverse=True)
        table = np.zeros((len(lengths), _FRACTIONS))
        for at, length in enumerate(lengths):
            for column, share in enumerate(shares):
                context = min(round(length * share), int(length) - 1)
                table[at, column] = profile._attend_s(length - context, context, costs._pair_s)
        self._attention = table
        # A decode step: a constant, and a share for each request and for each token of context.
        points, values = [], []
        for i, batch in enumerate(profile.decode_batch):
            for j, context in enumerate(profile.decode_context_tokens):
                points.append((1.0, batch, batch * context))
                values.append(profile.decode_step_s[i][j])
        # Relative errors count: long contexts would outweigh all else.
        weight = 1 / np.array(values)
        found, *_ = np.linalg.lstsq(
            np.array(points) * weight[:, None], np.array(values) * weight, rcond=None
        )
        self.decode = np.maximum(found, 0.0)

    def attention(self, request: int, share: Floats) -> Floats:
        """Seconds for a request of the trace, where that share of its prompt is cached."""
        row = self._attention[self._which[request]]
        at = share * (_FRACTIONS - 1)
        low = np.minimum(at.astype(np.int64), _FRACTIONS - 2)
        return row[low] + (at - low) * (row[low + 1] - row[low])


def replay(
    queued: Queued,
    tiers: Tiers,
    device: Ints,
    host: Ints,
    disk: Ints,
    costs: CostTables,
    numbers: Ints,
) -> Replayed:
    """Serve ``queued`` on every configuration. ``device``, ``host``, ``disk``: tokens of each
    prompt that the tier holds, with what is above it, shape (requests, configurations).
    ``numbers``: of the requests in the trace that ``costs`` was made for."""
    count, width = len(queued.arrival), len(tiers.device)
    ends = np.zeros((2 * count + 1, width), np.float32)
    step_of = np.zeros((count, width), np.int32)
    hits = np.zeros((3, width))
    columns = np.arange(width)
    running = Running(width, costs)
    begin = np.full(width, float(queued.arrival[0]))
    """When the step that is being filled begins, and its tokens, attention and end."""
    tokens, attention = np.zeros(width), np.zeros(width)
    free = begin.copy()
    step = np.zeros(width, np.int64)
    read_free, write_free = begin.copy(), begin.copy()
    written = np.zeros(width)
    full_linear = np.interp(tiers.chunk, costs.tokens, costs.linear)
    origin = float(queued.arrival[0])
    has_disk = np.isfinite(tiers.disk_read)
    any_disk = bool(has_disk.any())
    for i in range(count):
        arrival, prompt, output = queued.arrival[i], int(queued.prompt[i]), int(queued.output[i])
        limit = (prompt - 1) // tiers.page * tiers.page
        on_device = np.minimum(device[i] // tiers.page * tiers.page, limit)
        on_host = np.maximum(np.minimum(host[i] // tiers.page * tiers.page, limit), on_device)
        ready = np.full(width, arrival)
        came = on_host
        if any_disk:
            pending = np.maximum(write_free - arrival, 0.0) * tiers.disk_write
        if any_disk and (disk[i] > on_host).any():
            wanted = np.minimum(disk[i] // tiers.page * tiers.page, limit) - on_host
            # What waits to be written holds host memory, and a prefetch needs some.
            room = np.minimum(PREFETCH_HOST_SHARE * tiers.host, tiers.host - pending)
            wanted = np.minimum(wanted, room.astype(np.int64))
            wanted = np.where(has_disk & (wanted >= tiers.threshold), wanted, 0)
            busy = tiers.disk_shared & (write_free > arrival)
            speed = tiers.disk_read * np.where(busy, _BUSY, 1.0)
            begun = np.maximum(read_free, arrival)
            done = begun + wanted / speed
            # It is looked at when its turn comes, and waited for from then on.
            turn = np.maximum(free, arrival)
            patience = tiers.wait_base + tiers.wait_per_token * (prompt - on_host)
            ready = np.where(
                wanted > 0, np.minimum(np.maximum(done, turn), turn + patience), arrival
            )
            share = np.clip((ready - begun) / np.maximum(done - begun, 1e-12), 0.0, 1.0)
            fetched = np.where(done <= ready + 1e-9, wanted, (wanted * share).astype(np.int64))
            came = on_host + fetched // tiers.page * tiers.page
            read_free = np.where(wanted > 0, np.minimum(done, np.maximum(ready, begun)), read_free)
        new = prompt - came
        # Whether it joins the step that is being filled, or one of its own.
        idle = ready > free
        apart = idle | (arrival > begin)
        running.decode(np.where(idle, ready - free, 0.0))
        opens = np.where(idle, ready, free)
        need = prompt + output
        waited = running.until(tiers.device - need, tiers.running)
        if waited is not None:
            opens, apart = opens + waited, apart | (waited > 0)
        step += apart
        begin = np.where(apart, opens, begin)
        tokens = np.where(apart, 0.0, tokens)
        attention = np.where(apart, 0.0, attention + costs.request_s)
        # Its tokens fill this step, and perhaps several more.
        tokens = tokens + new
        compute = costs.attention(int(numbers[i]), came / prompt)
        load = (came - on_device) / tiers.host_speed
        layers = costs.layers
        linear = np.interp(new, costs.tokens, costs.linear)
        hidden = np.maximum(load - (linear + compute) * (1 - 1 / layers), load / layers)
        attention = attention + compute + hidden
        over = tokens > tiers.chunk
        if over.any():
            whole = (tokens // tiers.chunk) * over
            left = tokens - whole * tiers.chunk
            part = np.where(over, left / np.maximum(new, 1.0), 0.0)
            boundary = begin + whole * full_linear + attention * (1 - part)
            ends[step[over], columns[over]] = (boundary - origin)[over]
            begin = np.where(over, boundary, begin)
            attention = np.where(over, attention * part, attention)
            tokens = np.where(over, left, tokens)
            step += over
        step_of[i] = step
        free = begin + np.interp(tokens, costs.tokens, costs.linear) + attention
        ends[step, columns] = free - origin
        running.add(output, prompt + _RESERVED * output)
        hits += on_device, on_host - on_device, came - on_host
        if any_disk:
            fresh = prompt + output - np.minimum(disk[i], prompt)
            taken = np.where(pending + fresh <= tiers.host, fresh, 0)
            write_free = np.where(
                taken > 0, np.maximum(write_free, arrival) + taken / tiers.disk_write, write_free
            )
            written += taken
    end = free + running.rest()
    ttft = np.take_along_axis(ends, step_of, axis=0)
    ttft += np.float32(costs.arrival_s) - (queued.arrival - origin).astype(np.float32)[:, None]
    return Replayed(ttft, hits, written, end)


class Running:
    """The requests that decode, of every configuration: how many end in which decode steps."""

    def __init__(self, width: int, costs: CostTables) -> None:
        self._pace = costs.decode
        self._columns = np.arange(width)
        self._steps = np.zeros(width)
        self._jobs = np.zeros((_BUCKETS, width))
        self._held = np.zeros((_BUCKETS, width))
        """By the bucket of steps in which they end."""
        self.jobs = np.zeros(width)
        self.held = np.zeros(width)
        """Tokens."""

    def add(self, output: int, held: float) -> None:
        """One more, everywhere."""
        # At the end of a bucket, the one that is nearest.
        now = self._steps // _STEPS
        ahead = np.clip(np.rint((self._steps + output) / _STEPS) - 1, now, now + _BUCKETS - 1)
        at = ahead.astype(np.int64) % _BUCKETS
        self._jobs[at, self._columns] += 1
        self._held[at, self._columns] += held
        self.jobs += 1
        self.held += held

    def decode(self, seconds: Floats) -> None:
        """Decode for so long."""
        left = seconds.copy()
        while True:
            on = np.flatnonzero((left > 0) & (self.jobs > 0))
            if not len(on):
                return
            left[on] -= self._bucket(on, left[on])

    def until(self, room: Floats, most: Floats) -> Floats | None:
        """Decode where more than ``room`` tokens are held or ``most`` run; the seconds of it."""
        waited = None
        while True:
            full = ((self.held > room) | (self.jobs >= most)) & (self.jobs > 0)
            if not full.any():
                return waited
            on = np.flatnonzero(full)
            waited = np.zeros(len(full)) if waited is None else waited
            waited[on] += self._bucket(on, np.full(len(on), np.inf))

    def rest(self) -> Floats:
        """Decode until all are done; the seconds of it."""
        waited = self.until(np.full(len(self.jobs), -1.0), np.zeros(len(self.jobs)))
        return np.zeros(len(self.jobs)) if waited is None else waited

    def _bucket(self, on: Ints, seconds: Floats) -> Floats:
        """Decode to the end of the bucket, no longer than ``seconds``; the seconds of it."""
        fixed, per_request, per_token = self._pace
        pace = fixed + per_request * self.jobs[on] + per_token * self.held[on]
        steps = self._steps[on]
        bucket = steps // _STEPS
        need = ((bucket + 1) * _STEPS - steps) * pace
        over = need <= seconds
        self._steps[on] = np.where(over, (bucket + 1) * _STEPS, steps + seconds / pace)
        done, at = on[over], bucket[over].astype(np.int64) % _BUCKETS
        self.jobs[done] -= self._jobs[at, done]
        self.held[done] -= self._held[at, done]
        self._jobs[at, done] = 0.0
        self._held[at, done] = 0.0
        self.held[done] *= self.jobs[done] > 0
        return np.where(over, need, seconds)
