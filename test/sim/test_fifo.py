from support.radix_cases import play


def test_use_does_not_matter():
    assert play("fifo", 3, [(1,), (2,), (3,), (1,), (1,), (4,), (5,)]) == [(1,), (2,)]


def test_an_old_parent_waits_for_its_young_child():
    # 1 is oldest but has 3 below it, which is younger than 2.
    assert play("fifo", 3, [(1,), (2,), (1, 3), (4,), (5,), (6,)]) == [(2,), (3,), (1,)]


def test_what_comes_back_is_new():
    assert play("fifo", 2, [(1,), (2,), (3,), (1,), (4,)]) == [(1,), (2,), (3,)]
