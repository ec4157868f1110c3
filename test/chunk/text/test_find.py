"""Registered documents are found in prompts without marks."""

import random

import pytest

np = pytest.importorskip("numpy")

from canopy_chunks.text.find import MIN_TOKENS, SEAM, WINDOW, Finder, _Hashes  # noqa: E402

MAX_FOUND = 256


def tokens(count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(50_000) for _ in range(count))


DOCUMENTS = [tokens(MIN_TOKENS + 30 * i, i) for i in range(4)]


@pytest.fixture
def finder() -> Finder:
    made = Finder()
    for one in DOCUMENTS:
        made.add(one, None)
    return made


def prompt(order) -> tuple[list[int], list[int]]:
    """Ids and bounds of a prompt: documents with other text before, between and behind."""
    ids, bounds = list(tokens(7, 90)), []
    for i in order:
        bounds += [len(ids) + SEAM, len(ids) + len(DOCUMENTS[i]) - SEAM]
        ids += [*DOCUMENTS[i], *tokens(3, 100 + i)]
    return ids, bounds


def test_documents_are_found_at_any_position(finder) -> None:
    for order in ((0,), (2, 0, 3, 1), (1, 1), (3, 2)):
        ids, bounds = prompt(order)
        assert finder.find(ids, None, MAX_FOUND) == bounds


def test_a_document_with_other_end_tokens_is_found_without_them(finder) -> None:
    ids, (start, end) = prompt((1,))
    for changed in (start - 2, start - 1, end, end + 1):
        other = [*ids[:changed], 60_000, *ids[changed + 1 :]]
        assert finder.find(other, None, MAX_FOUND) == [start, end]
    for changed in (start, (start + end) // 2, end - 1):
        other = [*ids[:changed], 60_000, *ids[changed + 1 :]]
        assert finder.find(other, None, MAX_FOUND) == []


def test_a_prompt_that_ends_inside_a_document_or_is_short_has_none(finder) -> None:
    ids, (start, end) = prompt((2,))
    for cut in (0, 1, WINDOW, start + WINDOW, end - 1):
        assert finder.find(ids[:cut], None, MAX_FOUND) == []
    assert finder.find(ids[:end], None, MAX_FOUND) == [start, end]
    assert finder.find(ids[start:], None, MAX_FOUND) == [0, end - start]


def test_the_longer_of_two_documents_with_a_common_beginning_is_found(finder) -> None:
    longer = (*DOCUMENTS[0], *tokens(20, 7))
    finder.add(longer, None)
    assert finder.find([1, 2, 3, *longer, 4], None, MAX_FOUND) == [5, 1 + len(longer)]
    assert finder.find([1, 2, 3, *DOCUMENTS[0], 4], None, MAX_FOUND) == [5, 1 + MIN_TOKENS]


def test_a_document_is_found_in_its_own_tenants_prompts_alone(finder) -> None:
    ids, _ = prompt((0, 1))
    assert finder.find(ids, "other", MAX_FOUND) == []
    finder.add(DOCUMENTS[1], "other")
    assert len(finder.find(ids, "other", MAX_FOUND)) == 2


def test_deleted_and_short_documents_are_not_found(finder) -> None:
    ids, bounds = prompt((0, 1))
    finder.remove(DOCUMENTS[0], None)
    finder.remove(DOCUMENTS[0], None)
    assert finder.find(ids, None, MAX_FOUND) == bounds[2:]
    for one in DOCUMENTS[1:]:
        finder.remove(one, None)
    assert not finder._tables
    assert not finder.add(tokens(MIN_TOKENS - 1, 1), None)
    assert not finder.add(tokens(MIN_TOKENS, 1), None, least=MIN_TOKENS)
    assert not finder._tables


def test_the_number_of_found_documents_is_bounded(finder) -> None:
    ids, bounds = prompt([0, 1] * 5)
    assert finder.find(ids, None, 3) == bounds[:6]


def test_the_hash_of_a_run_does_not_depend_on_its_position() -> None:
    run = tokens(WINDOW, 3)
    alone = _Hashes(run).of(np.array([0]), WINDOW)
    every = np.arange(5001)
    assert _Hashes([*tokens(5000, 4), *run]).of(every, WINDOW)[-1] == alone[0]
    among = _Hashes(tokens(5000, 4)).of(every[: 5000 - WINDOW + 1], WINDOW)
    assert len(set(among.tolist())) == 5000 - WINDOW + 1


class Counted(list):
    """Ids that count reads of runs."""

    looked = 0

    def __getitem__(self, at):
        self.looked += isinstance(at, slice)
        return list.__getitem__(self, at)


def test_documents_with_a_common_beginning_are_not_compared_one_by_one() -> None:
    """A tenant could hold up the server: a prompt of one token again and again, and documents like it."""
    finder, ids = Finder(), Counted([5] * 2000)
    for i in range(300):
        finder.add((*[5] * (MIN_TOKENS + i % 7), 1000 + i, *tokens(SEAM, i)), None)
    assert finder.find(ids, None, MAX_FOUND) == []
    finder.add((5,) * 100, None)
    found = finder.find(ids, None, MAX_FOUND)
    assert found == [x for at in range(0, 2000 - 95, 96) for x in (at, at + 96)]
    assert ids.looked <= len(ids)


def test_documents_with_the_same_middle_are_found_until_the_last_is_deleted() -> None:
    finder, middle = Finder(), tokens(MIN_TOKENS, 7)
    both = [(*tokens(SEAM, i), *middle, *tokens(SEAM, 10 + i)) for i in range(2)]
    for one in (*both, both[0]):
        finder.add(one, None)
    for one in both:
        assert finder.find(middle, None, MAX_FOUND) == [0, MIN_TOKENS]
        finder.remove(one, None)
    assert finder.find(middle, None, MAX_FOUND) == []
