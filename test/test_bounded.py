"""The bounded container against a list of its entries."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_canopy.bounded import BoundedByTenant, Entry

TENANTS = st.sampled_from([None, "a", "b", "c"])
KEYS = st.integers(0, 6)
MOST, MOST_OWN = 12, 8


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bounded = BoundedByTenant[int, int](MOST, MOST_OWN)
        self.entries: list[tuple[Entry[int, int], int]] = []
        """Entries with their sizes, oldest first."""
        self.turns: list[str | None] = []
        self.value = 0

    def size(self, tenant: str | None) -> int:
        return sum(size for entry, size in self.entries if entry.tenant == tenant)

    def oldest(self, tenant: str | None) -> Entry[int, int]:
        return next(entry for entry, _ in self.entries if entry.tenant == tenant)

    def remove(self, *gone: Entry[int, int]) -> None:
        self.entries = [one for one in self.entries if one[0] not in gone]
        held = {entry.tenant for entry, _ in self.entries}
        self.turns = [tenant for tenant in self.turns if tenant in held]

    def find(self, tenant: str | None, key: int) -> Entry[int, int] | None:
        return next((e for e, _ in self.entries if (e.tenant, e.key) == (tenant, key)), None)

    @rule(tenant=TENANTS, key=KEYS, size=st.integers(1, 4))
    def put(self, tenant: str | None, key: int, size: int) -> None:
        self.value += 1
        left = self.bounded.put(tenant, key, self.value, size)
        replaced = self.find(tenant, key)
        if replaced is not None:
            self.remove(replaced)
        self.entries.append((Entry(tenant, key, self.value), size))
        if tenant not in self.turns:
            self.turns.append(tenant)
        for turn in left:
            if self.size(tenant) <= MOST_OWN:
                assert sum(size for _, size in self.entries) > MOST
                assert self.size(turn.tenant) == max(map(self.size, self.turns))
            assert turn == self.oldest(turn.tenant)
            self.remove(turn)

    @rule(tenant=TENANTS, key=KEYS)
    def pop(self, tenant: str | None, key: int) -> None:
        found = self.find(tenant, key)
        assert self.bounded.pop(tenant, key) == (found and found.value)
        self.remove(*filter(None, [found]))

    @rule()
    def take_turns(self) -> None:
        entry = self.bounded.next()
        if not self.turns:
            assert entry is None
            return
        tenant = self.turns.pop(0)
        assert entry == self.oldest(tenant)
        self.turns.append(tenant)
        self.remove(entry)

    @rule(tenant=TENANTS)
    def forget(self, tenant: str | None) -> None:
        assert self.bounded.forget(tenant) == (tenant in self.turns)
        self.remove(*(entry for entry, _ in self.entries if entry.tenant == tenant))

    @invariant()
    def equals_the_list(self) -> None:
        assert sorted(self.bounded, key=repr) == sorted((e for e, _ in self.entries), key=repr)
        assert self.bounded.size == sum(size for _, size in self.entries) <= MOST
        assert len(self.bounded) == len(self.entries)
        by_size = {name: size for size, names in self.bounded._by_size.items() for name in names}
        assert by_size == {tenant: self.size(tenant) for tenant in self.turns}
        for tenant in (None, "a"):
            assert self.bounded.size_of(tenant) == self.size(tenant) <= MOST_OWN
            found = self.find(tenant, 3)
            assert self.bounded.get(tenant, 3) == (found and found.value)
        assert set(self.bounded.tenants_of(3)) == {e.tenant for e, _ in self.entries if e.key == 3}


TestBounded = Machine.TestCase
TestBounded.settings = settings(stateful_step_count=40)
