"""The bounded container compared with a list of its entries."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_canopy.bounded import BoundedByTenant, Entry

TENANTS = st.sampled_from([None, "a", "b", "c"])
KEYS = st.integers(0, 6)
MAX_SIZE, MAX_TENANT_SIZE = 12, 8


class BoundedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bounded = BoundedByTenant[int, int](MAX_SIZE, MAX_TENANT_SIZE)
        self.entries: list[tuple[Entry[int, int], int]] = []
        """Entries with their sizes, oldest first."""
        self.tenant_order: list[str | None] = []
        self.value = 0

    def size(self, tenant: str | None) -> int:
        return sum(size for entry, size in self.entries if entry.tenant == tenant)

    def oldest(self, tenant: str | None) -> Entry[int, int]:
        return next(entry for entry, _ in self.entries if entry.tenant == tenant)

    def remove(self, *removed: Entry[int, int]) -> None:
        self.entries = [(entry, size) for entry, size in self.entries if entry not in removed]
        tenants = {entry.tenant for entry, _ in self.entries}
        self.tenant_order = [tenant for tenant in self.tenant_order if tenant in tenants]

    def find(self, tenant: str | None, key: int) -> Entry[int, int] | None:
        return next((e for e, _ in self.entries if (e.tenant, e.key) == (tenant, key)), None)

    @rule(tenant=TENANTS, key=KEYS, size=st.integers(1, 4))
    def put(self, tenant: str | None, key: int, size: int) -> None:
        self.value += 1
        evicted = self.bounded.put(tenant, key, self.value, size)
        replaced = self.find(tenant, key)
        if replaced is not None:
            self.remove(replaced)
        self.entries.append((Entry(tenant, key, self.value), size))
        if tenant not in self.tenant_order:
            self.tenant_order.append(tenant)
        for entry in evicted:
            if self.size(tenant) <= MAX_TENANT_SIZE:
                assert sum(size for _, size in self.entries) > MAX_SIZE
                assert self.size(entry.tenant) == max(map(self.size, self.tenant_order))
            assert entry == self.oldest(entry.tenant)
            self.remove(entry)

    @rule(tenant=TENANTS, key=KEYS)
    def pop(self, tenant: str | None, key: int) -> None:
        entry = self.find(tenant, key)
        assert self.bounded.pop(tenant, key) == (entry and entry.value)
        self.remove(*filter(None, [entry]))

    @rule()
    def pop_round_robin(self) -> None:
        entry = self.bounded.pop_round_robin()
        if not self.tenant_order:
            assert entry is None
            return
        tenant = self.tenant_order.pop(0)
        assert entry == self.oldest(tenant)
        self.tenant_order.append(tenant)
        self.remove(entry)

    @rule(tenant=TENANTS)
    def drop_tenant(self, tenant: str | None) -> None:
        assert self.bounded.drop_tenant(tenant) == (tenant in self.tenant_order)
        self.remove(*(entry for entry, _ in self.entries if entry.tenant == tenant))

    @invariant()
    def equals_the_list(self) -> None:
        assert sorted(self.bounded, key=repr) == sorted((e for e, _ in self.entries), key=repr)
        assert self.bounded.size == sum(size for _, size in self.entries) <= MAX_SIZE
        assert len(self.bounded) == len(self.entries)
        tenants_by_size = self.bounded._tenants_by_size.items()
        by_size = {tenant: size for size, tenants in tenants_by_size for tenant in tenants}
        assert by_size == {tenant: self.size(tenant) for tenant in self.tenant_order}
        for tenant in (None, "a"):
            assert self.bounded.tenant_size(tenant) == self.size(tenant) <= MAX_TENANT_SIZE
            entry = self.find(tenant, 3)
            assert self.bounded.get(tenant, 3) == (entry and entry.value)
        assert set(self.bounded.tenants_of(3)) == {e.tenant for e, _ in self.entries if e.key == 3}


TestBounded = BoundedMachine.TestCase
TestBounded.settings = settings(stateful_step_count=40)
