"""Documents in any order: the reordering, and the tokens that later prompts share."""

import random
from collections import Counter

import pytest

from canopy_documents.text.order import MAX_GAP, MIN_ORDER_SIZE, Orders

HEAD, GAP, QUESTION = [1, 2, 3], [9], [7, 7]


def document(number: int) -> list[int]:
    return [100 * number + i for i in range(5 + number % 3)]


def prompt(numbers, gap=GAP, head=HEAD, question=QUESTION):
    ids, bounds = list(head), []
    for number in numbers:
        ids += gap if bounds else []
        bounds.append((len(ids), len(ids) + len(document(number))))
        ids += document(number)
    return ids + list(question), tuple(bounds)


def arrange(orders, numbers, tenant=None, **options):
    """Return the documents' numbers in the order after `Orders.arrange`."""
    ids, bounds = orders.arrange(*prompt(numbers, **options), tenant)
    order = [ids[start] // 100 for start, _ in bounds]
    assert (ids, bounds) == prompt(order, **options)  # as if the client had sent this order
    assert sorted(order) == sorted(numbers)
    return order


def test_a_prompt_continues_the_earlier_order_with_most_shared_documents() -> None:
    orders = Orders()
    assert arrange(orders, [1, 2, 3]) == [1, 2, 3]
    assert arrange(orders, [4, 3, 2, 1]) == [1, 2, 3, 4]
    assert arrange(orders, [5, 4, 2]) == [2, 4, 5]  # none begins so: the most frequent first
    assert arrange(orders, [3, 1]) == [1, 3]
    assert arrange(orders, [1, 1, 3, 2]) == [1, 2, 3, 1]


def test_the_same_documents_keep_their_order_after_other_prompts() -> None:
    orders, rng = Orders(), random.Random(0)
    first_order = arrange(orders, [6, 2, 5, 1])
    for _ in range(200):
        arrange(orders, rng.sample(range(1, 12), 4))
    for _ in range(5):
        assert arrange(orders, rng.sample([1, 2, 5, 6], 4)) == first_order
    next_turn = prompt(first_order, question=[*QUESTION, 8, 8])[0]  # with its tool's documents
    for new_documents in ([3, 4], [4, 3]):
        ids, bounds = prompt(new_documents, head=next_turn)
        bounds = prompt(first_order)[1] + bounds
        arranged, _ = orders.arrange(ids, bounds, None)
        assert arranged == prompt([3, 4], head=next_turn)[0]


@pytest.mark.parametrize("gap", [[5] * (MAX_GAP + 1), "differs"])
def test_documents_with_other_text_between_them_stay(gap) -> None:
    orders = Orders()
    arrange(orders, [1, 2, 3])
    if gap == "differs":
        ids = [*HEAD, *document(3), 9, *document(2), 8, *document(1)]
        bounds = ((3, 8), (9, 16), (17, 23))
        assert orders.arrange(ids, bounds, None) == (ids, bounds)
    else:
        assert arrange(orders, [3, 2, 1], gap=gap) == [3, 2, 1]


def test_tenants_learn_nothing_of_each_others_orders() -> None:
    orders = Orders()
    arrange(orders, [1, 2, 3], tenant="a")
    assert arrange(orders, [3, 2, 1], tenant="b") == [3, 2, 1]
    assert arrange(orders, [3, 2, 1], tenant="a") == [1, 2, 3]


def test_memory_is_bounded_and_the_largest_tenant_loses_first() -> None:
    orders, rng = Orders(limit=40, tenant_limit=30), random.Random(1)
    small_order = arrange(orders, [3, 1, 2], tenant="small")
    for i in range(500):
        arrange(orders, rng.sample(range(100), 5), tenant=rng.choice("ab"))
        if i % 100 == 0:
            arrange(orders, [1, 2], tenant=f"once {i}")
    order_counts = {name: len(stored.orders) for name, stored in orders.by_tenant.items()}
    assert orders.size == MIN_ORDER_SIZE * sum(order_counts.values()) <= MIN_ORDER_SIZE * 40
    assert max(order_counts.values()) <= 30
    assert arrange(orders, [1, 2, 3], tenant="small") == small_order
    for stored in orders.by_tenant.values():
        assert +stored.uses == Counter(name for _, names in stored.orders for name in names)


@pytest.mark.parametrize("prompts_per_tenant", [1, 2])
def test_invented_tenants_do_not_displace_orders_that_were_used(prompts_per_tenant) -> None:
    orders, rng = Orders(limit=40, tenant_limit=30), random.Random(1)
    used_orders = [arrange(orders, [number, number + 1, number + 2]) for number in range(1, 60, 3)]
    for _ in range(3):
        assert [arrange(orders, rng.sample(order, 3)) for order in used_orders] == used_orders
    for i in range(200):
        for _ in range(prompts_per_tenant):
            arrange(orders, [1, 2], tenant=f"invented {i}")
    assert [arrange(orders, rng.sample(order, 3)) for order in used_orders] == used_orders
    assert orders.size <= MIN_ORDER_SIZE * 40


def test_memory_is_bounded_for_any_number_of_documents() -> None:
    orders = Orders(limit=8, tenant_limit=4)
    for i in range(40):
        numbers = range(1000 * i + 1, 1000 * i + 2 + 4 * MIN_ORDER_SIZE * (i % 2))
        arrange(orders, [*numbers, 7], tenant="ab"[i // 20])
    stored_names = [names for stored in orders.by_tenant.values() for _, names in stored.orders]
    assert sum(map(len, stored_names)) <= orders.size <= 8 * MIN_ORDER_SIZE
    assert orders.size == sum(stored.size for stored in orders.by_tenant.values())


def test_a_template_separates_turns_and_stays_where_it_is() -> None:
    orders, separator = Orders(), 50
    arrange(orders, [1, 2], gap=[separator])
    unchanged = prompt([2, 1], gap=[separator])
    assert orders.arrange(*unchanged, None, frozenset([separator])) == unchanged
    ids, bounds = prompt([2, 1])
    ids[bounds[1][0] + 1] = separator  # a separator at either side of the turn
    assert orders.arrange(ids, bounds, None, frozenset([separator])) == (ids, bounds)


def shared_tokens(first, second):
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_popular_documents_are_shared_by_more_prompts() -> None:
    rng, orders = random.Random(2), Orders()
    weights = [1 / (i + 1) for i in range(40)]
    earlier_prompts: list[list[list[int]]] = [[], []]
    hits = [0, 0]
    for _ in range(300):
        numbers: list[int] = []
        while len(numbers) < 5:
            numbers += {rng.choices(range(40), weights)[0]}.difference(numbers)
        rng.shuffle(numbers)
        for arm, ids in enumerate((prompt(numbers)[0], prompt(arrange(orders, numbers))[0])):
            hits[arm] += max((shared_tokens(ids, past) for past in earlier_prompts[arm]), default=0)
            earlier_prompts[arm].append(ids)
    assert hits[1] > 1.3 * hits[0]
