"""The KV of a document that is used at a place, and the context it is encoded behind."""

from canopy_chunks.text.variants import Heads, Place

HEAD, STAND_IN, ALL = (1, 2), (8, 9), (8, 9, 10, 11)


def place(first: bool = False, head=HEAD, encoding: str = "mixed", long: bool = False) -> Place:
    return Place(encoding, first, head, (STAND_IN, ALL), True, long)


def test_a_document_encoded_behind_an_unknown_head_is_found_behind_any() -> None:
    for first in (True, False):
        for encoded, *_ in place(first, head=(3, 4)).to_encode(head_returns=False):
            for again in (True, False):
                assert encoded in place(again).acceptable()


def test_an_encoding_behind_a_recurring_head_is_preferred_there() -> None:
    for first in (True, False):
        ((encoded, *_),) = place(first).to_encode(head_returns=True)
        assert encoded == place(first).acceptable()[0]
    assert place(True).acceptable()[0] == HEAD
    assert place(False).acceptable()[0] == HEAD + STAND_IN


def test_a_document_registered_by_itself_is_encoded_for_every_place() -> None:
    assert place(True, head=()).to_encode(head_returns=False) == (((),), (STAND_IN, ALL))


def test_a_long_prompt_is_encoded_behind_all_stand_ins_which_a_short_one_uses_too() -> None:
    short, long = place(), place(long=True)
    assert set(short.acceptable()) == set(long.acceptable())
    assert long.acceptable()[0] == HEAD + ALL
    for returns in (False, True):
        (few,), (all_,) = short.to_encode(returns), long.to_encode(returns)
        assert len(all_) == 1
        assert all_[0] in few[1:]
        assert [len(STAND_IN), len(ALL)] == [short.stand_in_of(p) for p in few]
    assert [short.stand_in_of(p) for p in (HEAD, ())] == [0, 0]


def test_prefix_encoding_has_no_stand_ins() -> None:
    one = place(True, encoding="prefix")
    assert one.acceptable() == (HEAD, ())
    assert one.to_encode(False) == one.to_encode(True) == ((HEAD,),)


def test_heads_are_bounded_and_of_each_tenants_own() -> None:
    heads = Heads(most=4)
    assert not heads.seen_before("mine", HEAD)
    assert not heads.seen_before("yours", HEAD)
    for i in range(100):
        heads.seen_before("invented", (i,))
    assert heads.seen_before("mine", HEAD)
    assert heads.seen_before("yours", HEAD)
