"""Documents are cut out of a prompt and tokenised separately, at any position."""

import pytest

from canopy_chunks.text.documents import (
    IDLE_S,
    Documents,
    split_at_signs,
    split_documents,
    tokenise,
    with_bounds,
)
from sglang_canopy.errors import CanopyError


class Letters:
    """A tokenizer of pairs of letters with a BOS, so that seams show: 'ab' is one token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [hash_of(text[i : i + 2]) for i in range(0, len(text), 2)]
        return [1, *ids] if add_special_tokens else ids


def hash_of(pair: str) -> int:
    return sum(ord(c) << (8 * i) for i, c in enumerate(pair)) + 10


def document(text: str) -> list[int]:
    return Letters().encode(text, add_special_tokens=False)


def test_between_two_separators_is_a_document_and_separators_stay() -> None:
    pieces = split_documents("system##doc one##two##question", "##", Documents(), None)
    assert [p.text for p in pieces if p.document] == ["doc one", "two"]
    assert "".join(p.text for p in pieces) == "system##doc one##two##question"


def test_the_same_document_has_the_same_ids_in_every_prompt() -> None:
    for text in ("sys##odd##q", "longer system##x##odd##q", "##odd##"):
        ids, bounds = tokenise(Letters(), split_documents(text, "##", Documents(), None))
        found = [ids[a:b] for a, b in zip(bounds[::2], bounds[1::2])]
        assert document("odd") in found
        assert ids.count(1) == 1
        assert ids[0] == 1


def test_text_without_documents_is_tokenised_as_ever() -> None:
    ids, bounds = tokenise(Letters(), split_documents("plain text", "##", Documents(), None))
    assert bounds == []
    assert ids == Letters().encode("plain text")


def test_empty_documents_are_skipped() -> None:
    _, bounds = tokenise(Letters(), split_documents("s####a##q", "##", Documents(), None))
    assert len(bounds) == 2


def test_a_mark_is_replaced_by_its_registered_document() -> None:
    known = Documents()
    name = known.add(document("fact"), "tenant")
    pieces = split_documents(f"sys [[canopy:{name}]] why?", None, known, "tenant")
    ids, bounds = tokenise(Letters(), pieces)
    assert [ids[a:b] for a, b in zip(bounds[::2], bounds[1::2])] == [document("fact")]


def test_a_mark_of_another_tenant_or_a_deleted_one_is_refused() -> None:
    known = Documents()
    name = known.add(document("fact"), "tenant")
    for other in (None, "other"):
        with pytest.raises(CanopyError, match="no document"):
            split_documents(f"[[canopy:{name}]]", None, known, other)
    known.remove(name, "tenant")
    with pytest.raises(CanopyError, match="deleted"):
        split_documents(f"[[canopy:{name}]]", None, known, "tenant")
    assert known.tokens.total() == 0
    assert not known.by_tenant


def test_two_tenants_get_two_ids_and_registering_twice_one() -> None:
    known = Documents()
    assert known.add([1, 2], "a") != known.add([1, 2], "b")
    assert known.add([1, 2], "a") == known.add([1, 2], "a")
    assert known.tokens == {"a": 2, "b": 2}


def test_registrations_are_bounded() -> None:
    known = Documents(most_tokens=50)
    for tenant in ("a", "b"):  # a tenth each, regardless of the other tenant's share
        known.add([1, 2, 3], tenant)
        with pytest.raises(CanopyError, match="1 documents with 3 tokens"):
            known.add([4, 5, 6], tenant)
    known.add([4, 5], "a")


def test_documents_are_bounded_in_number_too() -> None:
    known = Documents(most=20)
    known.add([1], "a")
    known.add([2], "a")
    with pytest.raises(CanopyError, match="allowed are 2"):
        known.add([3], "a")
    known.remove(known.add([1], "a"), "a")
    known.add([3], "a")


def test_a_full_server_reveals_nothing_about_other_tenants() -> None:
    known = Documents(most_tokens=10, share=0.5)
    for tenant in ("a", "b", "c"):
        known.add([1, 2, 3], tenant)
    with pytest.raises(CanopyError, match="all that is allowed") as refused:
        known.add([1, 2, 3, 4, 5], "d")  # it would hold most
    assert "a" not in known.of("d")
    assert "3 tokens" not in str(refused.value)
    with pytest.raises(CanopyError, match="a larger tenant_share"):
        Documents(most_tokens=10).add([1, 2], "a")


def test_signs_of_a_rendered_chat_bound_its_documents() -> None:
    pieces = split_at_signs("<u><one>\n<two>\nask", "<", ">")
    assert [p.text for p in pieces if p.document] == ["u", "one", "two"]
    with pytest.raises(CanopyError, match="cut a document"):
        split_at_signs("a<b", "<", ">")


def test_bounds_of_the_client_and_found_ones_exclude_each_other() -> None:
    assert with_bounds({"x": 1}, [0, 4]) == {"x": 1, "canopy_chunks": [0, 4]}
    with pytest.raises(CanopyError, match="use one of them"):
        with_bounds({"canopy_chunks": [0, 2]}, [0, 4])


def fill(documents: Documents, salts: int) -> None:
    """``salts`` tenants that register all they may."""
    for salt in range(salts):
        for i in range(10_000):
            try:
                documents.add([salt, i] * 4, f"salt {salt}")
            except CanopyError:
                break


def test_invented_tenants_exclude_no_tenant() -> None:
    documents = Documents(most_tokens=8000, most=1000)
    fill(documents, 11)
    name = documents.add([1, 2, 3] * 40, "honest")
    assert documents.get(name, "honest").ids == (1, 2, 3) * 40
    assert documents.removed
    assert documents.tokens.total() <= 8000
    assert sum(map(len, documents.by_tenant.values())) <= 1000
    fill(documents, 11)  # the others are encoded again, and the smallest holder stays
    assert documents.get(name, "honest")


def test_idle_documents_are_dropped_first_and_pinned_ones_last() -> None:
    now = [0.0]
    documents = Documents(most_tokens=30, most=100, share=1.0, clock=lambda: now[0])
    pinned = documents.add(range(10), "a")
    documents.get(pinned, "a").pinned = True
    idle = documents.add(range(10, 20), "b")
    now[0] = IDLE_S + 1
    used = documents.add(range(20, 30), "a")
    documents.add(range(30, 40), "c")
    assert [one.ids[0] for one in documents.removed] == [10]
    with pytest.raises(CanopyError, match="displaced"):
        documents.get(idle, "b")
    assert documents.get(pinned, "a")
    assert documents.get(used, "a")
    documents.add(range(40, 45), "d")  # the largest tenant gives way, but not its pinned document
    with pytest.raises(CanopyError, match="displaced"):
        documents.get(used, "a")
