"""Chunk reuse of one scheduler process: what may be reused, the plan of a request, the counters."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from sglang_canopy.chunk.cache import Cache
from sglang_canopy.chunk.chunk import Chunk
from sglang_canopy.chunk.disk import DiskChunk
from sglang_canopy.chunk.encode import capture
from sglang_canopy.chunk.selectors import make_selector
from sglang_canopy.chunk.selectors.base import Offline
from sglang_canopy.chunk.server import view
from sglang_canopy.chunk.server.ahead import Reader
from sglang_canopy.chunk.server.attention import fuses
from sglang_canopy.chunk.server.choose import again, choose
from sglang_canopy.chunk.server.eligible import STILL_LEARN, refusal
from sglang_canopy.chunk.server.fields import BOUNDS, Said, said
from sglang_canopy.chunk.server.learner import Learner, stand_in_of
from sglang_canopy.chunk.server.options import LEARN_PREFIX_TOKENS, Options
from sglang_canopy.chunk.server.place import place
from sglang_canopy.chunk.server.versions import Versions
from sglang_canopy.chunk.server.wish import Known, Plan, Wish, custom_params
from sglang_canopy.chunk.store import ChunkStore
from sglang_canopy.errors import CanopyError
from sglang_canopy.request.stamp import read_stamp
from sglang_canopy.tenant import namespace_of, tenant_of_req

logger = logging.getLogger(__name__)

COUNTERS = (
    "fused_requests",
    "reused_tokens",
    "recomputed_tokens",
    "fused_batches",
    "mixed_batches",
    "replanned_requests",
    "split_batches",
    "most_rows",
    "fallbacks",
)
"""split_batches: batches of more than a window, computed in several forwards; most_rows: the most
tokens that one forward with chunk requests computed; mixed_batches: fused batches with decode rows
in them; replanned_requests: begun anew after a
retraction; fallbacks: failures that were caught, after which a request or batch ran normally."""

WORTH = 0.2
"""A prompt is fused if at least this share of what is not cached exactly is in known chunks."""


class ChunkEngine:
    """Plans, places, learns. One a scheduler; lives on ``model_runner.canopy_chunks``.

    Raises CanopyError for a model or an attention backend that cannot fuse.
    """

    def __init__(self, runner: Any, options: Options, tokenizer: Any = None) -> None:
        if not fuses(runner.attn_backend):
            raise CanopyError(
                f"the attention backend {type(runner.attn_backend).__name__} cannot fuse; "
                "use --attention-backend torch_native (CPU) or triton"
            )
        self.runner, self.options = runner, options
        self.stand_in = stand_in_of(tokenizer) if options.chosen_encode == "standin" else ()
        self.model = view.model_view(runner)
        self.store = self._new_store()
        self.versions = Versions(self.store, options.tenant_share)
        self.learner = Learner(self.model, self.store, self._score, self.versions.stored)
        self.reader = Reader(options.read_ahead_mb << 20)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.credit = 0.0
        self.time_s = 0.0
        self.window_tokens: int | None = None
        self.prefill_tokens: int | None = None
        self.ratios: dict[str, float] = {}

    def _new_store(self) -> ChunkStore:
        options = self.options
        return ChunkStore(
            self.model.identity,
            options.capacity_bytes(),
            options.directory,
            device=str(self.model.device),
        )

    def most_rows(self, longest: int) -> int:
        """Tokens that one forward may compute, as SGLang's own admission has it.

        longest: tokens of the batch's longest request, which runs whole without chunked prefill.
        """
        if self.window_tokens is not None:
            return self.window_tokens
        return max(longest, self.prefill_tokens or (1 << 62))

    def weights_changed(self) -> bool:
        """After a flush: other weights make other KV, so their chunks are another store's."""
        model = view.model_view(self.runner)
        if model.identity == self.model.identity:
            return False
        self.model = model
        self.store = self._new_store()
        self.versions = Versions(self.store, self.options.tenant_share, self.versions)
        self.learner = Learner(model, self.store, self._score, self.versions.stored)
        return True

    def wish(self, req: Any) -> Wish | None:
        """What a new request wants; ``None`` where it names no chunks."""
        params = custom_params(req)
        if BOUNDS not in params:
            return None
        try:
            asked = said(params)
        except CanopyError:  # the entry refuses it: this came by another way
            self.reasons["malformed"] += 1
            return None
        if asked.off:
            self.reasons["off"] += 1
            return None
        self.time_s = max(self.time_s, read_stamp(params).get("time", 0.0))
        ids = list(req.origin_input_ids)
        salt = namespace_of(req.extra_key, req.cache_salt).hex()
        return self._wish(ids, asked, salt, tenant_of_req(req))

    def may_fuse(self, req: Any, wish: Wish) -> bool:
        """Whether a request may be fused at all; the reason is looked for once, and counted.

        Not when the request is made: SGLang fills in some of its fields afterwards.
        """
        if not wish.checked:
            wish.checked = True
            wish.why = refusal(req, wish, self.options)
            if wish.why:
                self.reasons[wish.why] += 1
        return wish.why is None

    def _wish(self, ids: Sequence[int], asked: Said, salt: str, tenant: str | None) -> Wish:
        options = self.options
        bounds = tuple(
            (a, min(b, len(ids)))
            for a, b in asked.bounds or ()
            if min(b, len(ids)) - a >= options.min_tokens
        )
        behind = options.chosen_encode != "alone"
        first = asked.bounds[0][0] if asked.bounds else 0
        head = tuple(ids[:first]) if behind and first <= LEARN_PREFIX_TOKENS else ()
        prefix, none = head + self.stand_in, self.stand_in
        keys = tuple(self.store.key(ids[a:b], prefix, salt) for a, b in bounds)
        alone = tuple(self.store.key(ids[a:b], none, salt) for a, b in bounds) if head else keys
        return Wish(
            bounds,
            keys,
            alone,
            prefix,
            salt,
            tenant,
            options.chosen_ratio if asked.ratio is None else asked.ratio,
            asked.selector or options.chosen_selector,
            self.time_s,
            said_ratio=asked.ratio is not None,
        )

    def known(self, wish: Wish, touch: bool = False) -> list[Known]:
        """The chunks of a wish, with the KV the store has of them."""
        found = []
        for (start, end), behind, alone in zip(wish.bounds, wish.keys, wish.alone):
            key, tier, chunk = behind, self.store.where(behind), None
            if tier is None and alone != behind:  # registered ahead of time
                key, tier = alone, self.store.where(alone)
            if touch and tier is not None:
                chunk = self.store.get(key, wish.time_s)
            found.append(Known(start, end, key, tier, chunk))
        return found

    def read_ahead(self, wish: Wish) -> None:
        """A request was made: its chunks on disk are read while it waits."""
        if not self.options.disk_mb or not self.options.fuses:
            return
        known = self.known(wish)
        if not self.worth(known, 0, wish.bounds[-1][1] if wish.bounds else 0):
            return
        for one in known:
            chunk = self.store.look(one.key) if one.tier == "disk" else None
            if isinstance(chunk, DiskChunk):
                self.reader.ask(one.key, chunk, wish)

    def worth(self, known: Sequence[Known], prefix: int, total: int) -> int:
        """Tokens whose KV would be reused, before any is recomputed; 0 where it is not worth it."""
        usable = sum(max(0, k.end - max(k.start, prefix)) for k in known if k.tier is not None)
        return usable if usable and usable >= WORTH * (total - prefix) else 0

    def ratio_of(self, wish: Wish, known: Sequence[Known]) -> float:
        """The request's ratio, or the calibrated one of the slowest tier among its chunks."""
        if wish.said_ratio or self.options.ratio_is_fixed:
            return wish.ratio
        tiers = {k.tier for k in known if k.tier is not None}
        rates = [self.ratios[t] for t in tiers if t in self.ratios]
        return max(rates, default=wish.ratio)

    def plan(self, req: Any, wish: Wish, prefix: int, row: torch.Tensor) -> Plan | None:
        """The plan of a request's prompt, made at its first window; ``None``: run normally.

        row: the slots allocated so far; prefix: tokens of exact KV in it.
        """
        started = time.perf_counter()
        ids = list(req.full_untruncated_fill_ids)
        known = self.known(wish)
        if not self.worth(known, prefix, len(ids)):
            self.note(wish, prefix, known, "too little is known")
            return None
        known = self.known(wish, touch=True)
        for one in known:
            if one.tier == "disk":
                one.chunk = self.reader.take(one.key) or one.chunk
        placed = tuple(p for k in known if (p := k.placed(prefix)) is not None)
        ratio = self.ratio_of(wish, known)
        tokens = torch.tensor(ids, dtype=torch.long, device=self.model.device)
        if wish.chosen is not None:  # begun anew after a retraction
            computed, ready = again(wish.chosen, prefix, placed, len(ids)), False
            self.counts["replanned_requests"] += 1
        else:
            computed, ready = choose(
                self.model, self.runner, tokens, row, prefix, placed, wish.selector, ratio
            )
            wish.chosen = computed.clone()
            wish.chosen[:prefix] = True
        plan = Plan(computed, placed, prefix)
        if not ready:
            self.spread(plan, row, prefix, min(len(ids), row.numel()))
        if not wish.told:
            wish.report = self._report(wish, known, plan, ratio, time.perf_counter() - started)
            self.counts["fused_requests"] += 1
            self.counts["reused_tokens"] += wish.report["reused"]
            self.counts["recomputed_tokens"] += wish.report["recomputed"]
        return plan

    def spread(self, plan: Plan, row: torch.Tensor, first: int, end: int) -> None:
        """Write the reused KV of positions ``first..end`` into the row's slots."""
        wanted = ~plan.computed
        wanted[:first] = False
        wanted[end:] = False
        keys, values = view.pool_views(self.runner)
        place(self.model, plan.placed, Cache(keys, values, row), wanted)

    def drop_damaged(self, wish: Wish) -> None:
        """After planning failed: a chunk whose file cannot be read is deleted, to be encoded again."""
        for key in {*wish.keys, *wish.alone}:
            chunk = self.store.look(key)
            if not isinstance(chunk, DiskChunk):
                continue
            try:
                chunk.load()
            except (CanopyError, OSError) as error:
                logger.warning("canopy: %s", error)
                self.store.delete(key)

    def learn_from(self, req: Any, wish: Wish, row: torch.Tensor) -> None:
        """After a prefill: ask for the chunks that the store does not have.

        A first chunk that was computed plainly, behind exactly what it is to be encoded behind, is
        taken from the pool as it is; ``row`` has its slots.
        """
        if wish.why is not None and wish.why not in STILL_LEARN:
            return
        ids = req.origin_input_ids
        for (start, end), key in zip(wish.bounds, wish.keys):
            if self.store.where(key) is not None:
                self.versions.seen(key, ids[start:end], wish.tenant)
                continue
            if not wish.fused and tuple(ids[:start]) == wish.prefix:
                cache = view.row_cache(self.runner, row, len(ids))
                chunk = capture(self.model, cache, ids[start:end], start, wish.prefix)
                self.learner.keep(key, chunk, wish.salt, wish.tenant, wish.time_s)
            else:
                self.learner.want(ids[start:end], wish.prefix, wish.salt, wish.tenant)

    def earn(self, tokens: int) -> None:
        """Under load: a prefill of so many tokens pays for a share of them to be encoded, later."""
        owed = self.credit + self.options.learn_share * tokens
        self.credit = owed if self.learner.busy else 0.0

    def spend(self, most: int | None = None) -> None:
        """Encode what was earned, at most ``most`` pieces.

        Before another forward, never between a prefill and its answer: who brings a document for
        the first time does not wait for it.
        """
        pieces = 0
        while self.credit >= 1.0 and pieces != most:
            done = self.encode_piece()
            self.credit = self.credit - done if done else 0.0
            pieces += 1

    def encode_piece(self) -> int:
        """One piece of what waits; returns its tokens. A chunk that cannot be encoded is dropped."""
        try:
            return self.learner.step(self.time_s)
        except Exception:
            logger.exception("canopy: a chunk could not be encoded; it is dropped")
            self.counts["fallbacks"] += 1
            self.learner.drop()
            return 0

    def note(self, wish: Wish, prefix: int, known: Sequence[Known], why: str) -> None:
        """A request runs normally after all: count why, and tell it."""
        wish.why = why
        self.reasons[why] += 1
        wish.report = {
            "fused": False,
            "why": why,
            "prefix": prefix,
            "chunks": len(wish.bounds),
            "unknown_chunks": sum(k.tier is None for k in known),
        }

    def command(self, verb: str, name: str, tenant: str | None) -> bool:
        """Pin, unpin or delete a tenant's document in every version.

        False where nothing of it is stored, nothing was pinned, or the tenant's pins are full.
        """
        if verb == "delete":
            self.learner.forget(name, tenant)
            return self.versions.delete(name, tenant)
        do = self.versions.pin if verb == "pin" else self.versions.unpin
        return do(name, tenant)

    def stats(self) -> dict[str, Any]:
        """Counters since the start; tokens, bytes, requests."""
        learner = self.learner
        return {
            **{name: self.counts[name] for name in COUNTERS},
            "not_fused": dict(self.reasons),
            "store": self.store.stats(),
            "waiting_chunks": len(learner.waiting) + int(learner.busy and not learner.waiting),
            "waiting_tokens": learner.waiting.tokens,
            "encoded_chunks": learner.encoded_chunks,
            "encoded_tokens": learner.encoded_tokens,
            "forgotten_chunks": learner.waiting.forgotten,
            "pinned_bytes": sum(self.versions.pinned_bytes().values()),
            "pinned_chunks": len(self.versions.held),
            "read_ahead": self.reader.stats(),
            "ratios": dict(self.ratios),
        }

    def _score(self, chunk: Chunk) -> None:
        """Before a chunk is stored: its scores, where the server's selector has any."""
        selector = make_selector(self.options.chosen_selector)
        if isinstance(selector, Offline):
            selector.scores(chunk)

    def _report(
        self, wish: Wish, known: Sequence[Known], plan: Plan, ratio: float, seconds: float
    ) -> dict[str, Any]:
        inside = torch.zeros_like(plan.computed)
        for p in plan.placed:
            inside[p.start : p.end] = True
        tiers: Counter[str] = Counter()
        for k in known:
            if k.tier is not None and k.end > plan.prefix:
                tiers[k.tier] += int((~plan.computed[max(k.start, plan.prefix) : k.end]).sum())
        return {
            "fused": True,
            "prefix": plan.prefix,
            "reused": sum(tiers.values()),
            **{f"reused_{name}": count for name, count in sorted(tiers.items())},
            "recomputed": int((plan.computed & inside).sum()),
            "computed": int(plan.computed.sum()),
            "chunks": len(wish.bounds),
            "unknown_chunks": sum(k.tier is None for k in known),
            "ratio": round(ratio, 4),
            "plan_ms": round(1000 * seconds, 3),
        }
