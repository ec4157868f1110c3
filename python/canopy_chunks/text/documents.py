"""Documents of a prompt: found in its text, tokenised separately, and registered ahead of time.

A document is tokenised separately, so that it has the same ids in every prompt. Tokenising the
whole prompt at once may merge characters across a document's ends.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from canopy_chunks import TENANT_SHARE
from canopy_chunks.text.key import chunk_key
from sglang_canopy.errors import CanopyError
from sglang_canopy.wire.document_names import BOUNDS

DOCUMENT = "document"
"""Replaces the model's identity in document names, which are digests of tokens and tenant."""
MAX_DOCUMENTS = 1 << 16
"""Largest number of registered documents."""
IDLE_S = 24 * 3600.0
"""Seconds without use after which a full server may drop a document that is not pinned."""
MAX_MARKED_TOKENS = 1 << 22
"""Largest number of tokens that the marks of one HTTP request may stand for: a mark of 80 bytes
stands for a whole document."""
MARK = re.compile(r"\[\[canopy:([0-9a-f]{64})\]\]")
"""Mark of a registered document in a prompt: ``[[canopy:ID]]``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: text or ids, and whether it is a document."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    document: bool = False


@dataclass(slots=True)
class Document:
    """A registered document: ids, tenant, pinned or not, and last use (``Documents.clock``)."""

    ids: tuple[int, ...]
    tenant: str | None
    pinned: bool = False
    used_s: float = 0.0


def document_name(ids: Sequence[int], tenant: str | None) -> str:
    """Return a document's id. Ids of two tenants differ and do not reveal each other."""
    return chunk_key(ids, DOCUMENT, (), tenant or "")


@dataclass(slots=True)
class Documents:
    """Registered documents by id, in the HTTP process.

    At most ``most_tokens`` in ``most`` documents, and ``share`` of both for one tenant. A full
    server drops documents idle for ``IDLE_S``, then the least recently used documents of the tenant
    with the largest holding, so that invented tenants cannot keep others out.

    removed: dropped documents; the caller deletes their other data.
    """

    most_tokens: int = 1 << 22
    most: int = MAX_DOCUMENTS
    share: float = TENANT_SHARE
    by_tenant: dict[str | None, dict[str, Document]] = field(default_factory=dict)
    tokens: Counter[str | None] = field(default_factory=Counter)
    removed: list[Document] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    def add(self, ids: Sequence[int], tenant: str | None) -> str:
        """Register a document; returns its id, which is the same for the same document.

        Raises CanopyError if the tenant has used its share, or has the largest holding of a full
        server.
        """
        name = document_name(ids, tenant)
        if not self.has(name, tenant):
            self._check_share(len(ids), tenant)
            self._make_room(len(ids), tenant)
            self.by_tenant.setdefault(tenant, {})[name] = Document(tuple(ids), tenant)
            self.tokens[tenant] += len(ids)
        self._use(name, tenant)
        return name

    def of(self, tenant: str | None) -> dict[str, Document]:
        """Return a tenant's documents by id."""
        return dict(self.by_tenant.get(tenant, {}))

    def has(self, name: str, tenant: str | None) -> bool:
        """Return whether the tenant has a document of this id."""
        return name in self.by_tenant.get(tenant, {})

    def get(self, name: str, tenant: str | None) -> Document:
        """Return the tenant's document of an id. Raises CanopyError for an unknown id."""
        found = self.by_tenant.get(tenant, {}).get(name)
        if found is None:
            raise CanopyError(
                f"there is no document {name[:12]}... here: it was deleted, displaced, never "
                "registered, or "
                "belongs to another extra_key or cache_salt; POST /canopy/chunks registers one"
            )
        self._use(name, tenant)
        return found

    def remove(self, name: str, tenant: str | None) -> Document:
        """Remove a document. Raises CanopyError as :meth:`get`."""
        found = self.get(name, tenant)
        own = self.by_tenant[tenant]
        del own[name]
        self.tokens[tenant] -= len(found.ids)
        if not own:
            del self.by_tenant[tenant], self.tokens[tenant]
        return found

    def _use(self, name: str, tenant: str | None) -> None:
        """Make a document its tenant's most recently used."""
        own = self.by_tenant[tenant]
        own[name] = own.pop(name)
        own[name].used_s = self.clock()

    def _check_share(self, tokens: int, tenant: str | None) -> None:
        own, own_tokens = len(self.by_tenant.get(tenant, ())), self.tokens[tenant]
        most, most_tokens = int(self.share * self.most), int(self.share * self.most_tokens)
        if own_tokens + tokens > most_tokens or own + 1 > most:
            raise CanopyError(
                f"this tenant has registered {own} documents with {own_tokens} tokens and this one "
                f"has {tokens}; allowed are {most} with {most_tokens} tokens: delete some, or "
                "start the server with a larger tenant_share of --canopy-chunks"
            )

    def _make_room(self, tokens: int, tenant: str | None) -> None:
        """Remove documents until ``tokens`` more fit. Raises CanopyError if ``tenant`` would then
        have the largest holding."""
        if self._fits(tokens):
            return
        self._remove_idle()
        while not self._fits(tokens):
            by_tokens = self.tokens.total() + tokens > self.most_tokens
            largest = max(self.by_tenant, key=lambda name: self._held(name, by_tokens))
            mine = self._held(tenant, by_tokens) + (tokens if by_tokens else 1)
            if largest == tenant or self._held(largest, by_tokens) < mine:
                raise CanopyError(  # does not reveal the other tenants' share
                    f"the tenants of this server have registered all that is allowed, {self.most} "
                    f"documents or {self.most_tokens} tokens; delete some"
                )
            own = self.by_tenant[largest]
            self._remove(next((n for n in own if not own[n].pinned), next(iter(own))), largest)

    def _fits(self, tokens: int) -> bool:
        registered = sum(map(len, self.by_tenant.values()))
        return self.tokens.total() + tokens <= self.most_tokens and registered < self.most

    def _held(self, tenant: str | None, by_tokens: bool) -> int:
        return self.tokens[tenant] if by_tokens else len(self.by_tenant.get(tenant, ()))

    def _remove_idle(self) -> None:
        before = self.clock() - IDLE_S
        for tenant, own in list(self.by_tenant.items()):
            idle = [n for n, one in own.items() if one.used_s < before and not one.pinned]
            for name in idle:
                self._remove(name, tenant)

    def _remove(self, name: str, tenant: str | None) -> None:
        self.removed.append(self.remove(name, tenant))


def check_marks(prompts: Iterable[tuple[Any, str | None]], documents: Documents) -> None:
    """Check the marks of ``(text, tenant)`` prompts.

    Raises CanopyError if they stand for more than ``MAX_MARKED_TOKENS``, or if a mark is not a
    document of its tenant.
    """
    tokens = 0
    for text, tenant in prompts:
        for name in MARK.findall(text) if isinstance(text, str) else ():
            tokens += len(documents.get(name, tenant).ids)
            if tokens > MAX_MARKED_TOKENS:
                raise CanopyError(
                    "the documents marked in this request are too long: at most "
                    f"{MAX_MARKED_TOKENS:,} tokens are allowed in a request; send fewer prompts, or "
                    "fewer marks, in one"
                )


def split_documents(
    text: str, separator: str | None, documents: Documents, tenant: str | None
) -> list[Piece]:
    """Return a prompt's pieces. A document is a text between two separators, or a mark.

    Without two separators and without a mark the text is the only piece. Empty documents are
    omitted. Separators stay in the text, outside the documents.
    """
    pieces: list[Piece] = []
    parts = text.split(separator) if separator else [text]
    for i, part in enumerate(parts):
        if i and separator:
            pieces.append(Piece(separator))
        pieces += _split_at_marks(part, documents, tenant, inner=0 < i < len(parts) - 1)
    return pieces


def _split_at_marks(
    text: str, documents: Documents, tenant: str | None, inner: bool
) -> list[Piece]:
    if not MARK.search(text):
        return [Piece(text, document=inner)] if text else []
    pieces, at = [], 0
    for found in MARK.finditer(text):
        if found.start() > at:
            pieces.append(Piece(text[at : found.start()]))
        ids = documents.get(found.group(1), tenant).ids
        pieces.append(Piece(ids=ids, document=True))
        at = found.end()
    if at < len(text):
        pieces.append(Piece(text[at:]))
    return pieces


def split_at_signs(text: str, opening: str, closing: str) -> list[Piece]:
    """Return the pieces of a rendered chat, with documents between the request's markers."""
    pieces: list[Piece] = []
    head, *rest = text.split(opening)
    if head:
        pieces.append(Piece(head))
    for part in rest:
        document, mark, after = part.partition(closing)
        if not mark:
            raise CanopyError(
                "the chat template cut a document in two; mark it with a separator instead"
            )
        if document:
            pieces.append(Piece(document, document=True))
        if after:
            pieces.append(Piece(after))
    return pieces


def replace_marks(pieces: Sequence[Piece], documents: Documents, tenant: str | None) -> list[Piece]:
    """Return the pieces of a text with documents in the place of their marks."""
    return [
        part
        for one in pieces
        for part in _split_at_marks(one.text, documents, tenant, inner=one.document)
    ]


def tokenise(
    tokenizer: Any, pieces: Sequence[Piece], specials: bool = True
) -> tuple[list[int], list[int]]:
    """Return the ids of the whole prompt, and the flat bounds of its documents.

    Adjacent pieces that are not documents are tokenised together. The first text gets the tokens
    that the tokenizer adds before a prompt (a BOS), unless ``specials`` is off because a chat
    template has written them; documents never do. A document directly after another keeps its own
    bounds.
    """
    ids: list[int] = []
    bounds: list[int] = []
    at_start = specials
    for piece in _joined(pieces):
        if piece.ids is not None:
            new = list(piece.ids)
        else:
            new = list(tokenizer.encode(piece.text, add_special_tokens=at_start))
        if at_start and piece.document:
            begin = tokenizer.encode("", add_special_tokens=True)
            ids += begin
            new = list(piece.ids or tokenizer.encode(piece.text, add_special_tokens=False))
        at_start = False
        if piece.document and new:
            bounds += [len(ids), len(ids) + len(new)]
        ids += new
    return ids, bounds


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and not last.document and not piece.document:
            joined[-1] = Piece(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def with_bounds(custom: Any, bounds: Sequence[int]) -> dict[str, Any]:
    """Return ``custom_params`` with the bounds that the server found. Raises CanopyError if the
    client also gave bounds."""
    custom = dict(custom or {})
    if BOUNDS in custom:
        raise CanopyError(
            f"custom_params key {BOUNDS!r} gives bounds, and the prompt has separators or "
            "documents too; use one of them"
        )
    custom[BOUNDS] = list(bounds)
    return custom
