"""The planner's decision variables, and the grid of all their values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final, Literal

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy

GROUP: Final = "group"
TTL = float | Literal["group"] | None
"""Seconds for all, ``None`` for no expiry, or ``"group"``: a TTL a prefix subtree (Algorithm 2)."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the space. DRAM is per instance; the disk is one for all instances."""

    instances: int = 1
    dram_gib: float = 0.0
    disk: str | None = None
    """A class of the price list."""
    disk_gib: float = 0.0
    ttl: TTL = None
    """On the disk."""
    device_policy: str = "lru"
    host_policy: str = "lru"
    disk_policy: str = "lru"

    def normal(self) -> Configuration:
        """Equal configurations become equal: what an absent tier would do does not matter."""
        found = self
        if found.disk is None or found.disk_gib <= 0:
            found = replace(found, disk=None, disk_gib=0.0, ttl=None, disk_policy="lru")
        if found.dram_gib <= 0:
            found = replace(found, host_policy="lru")
        return found

    def to_json(self) -> dict[str, Any]:
        """The decision variables, as the rows of a plan hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Configuration:
        """From a row; fields that are no decision variable are left out."""
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})

    def label(self) -> str:
        """In a few words, for people."""
        parts = [f"{self.instances} x " if self.instances > 1 else ""]
        parts[0] += f"{gib_text(self.dram_gib)} DRAM" if self.dram_gib else "no DRAM"
        if self.disk:
            parts.append(f"{gib_text(self.disk_gib)} {self.disk}")
            if self.ttl is not None:
                parts.append("group TTL" if self.ttl == GROUP else f"TTL {self.ttl:g} s")
        policies = [
            f"{tier} {name}"
            for tier, name in zip(
                ("device", "host", "disk"),
                (self.device_policy, self.host_policy, self.disk_policy),
            )
            if name != "lru"
        ]
        return ", ".join([*parts, *policies])


@dataclass(frozen=True, slots=True)
class Slice:
    """The variables that are not sizes: one value of each."""

    instances: int
    disk: str | None
    ttl: TTL
    device_policy: str
    host_policy: str
    disk_policy: str


@dataclass(frozen=True, slots=True)
class Space:
    """All values of every variable; the first of each is the one the search begins with."""

    dram_gib: tuple[float, ...]
    """Ascending, from 0."""
    disk_gib: tuple[float, ...]
    """Ascending, from 0."""
    disks: tuple[str, ...]
    ttls: tuple[TTL, ...] = (None,)
    instances: tuple[int, ...] = (1,)
    device_policies: tuple[str, ...] = ("lru",)
    host_policies: tuple[str, ...] = ("lru",)
    disk_policies: tuple[str, ...] = ("lru",)

    def __post_init__(self) -> None:
        for name in ("dram_gib", "disk_gib"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or not values or values[0] != 0:
                raise CanopyError(f"{name} must be ascending sizes that begin with 0")
        for name in ("ttls", "instances", "device_policies", "host_policies", "disk_policies"):
            if not getattr(self, name):
                raise CanopyError(f"{name} must have at least one value")
        for count in self.instances:
            if type(count) is not int or not 1 <= count <= 1024:
                raise CanopyError(f"instances must be whole numbers from 1 to 1024, got {count!r}")
        for name in (*self.device_policies, *self.host_policies, *self.disk_policies):
            make_policy(name, {})

    def first_slices(self) -> list[Slice]:
        """One slice an instance count and disk class, everything else at its first value."""
        rest = (self.ttls[0], self.device_policies[0], self.host_policies[0], self.disk_policies[0])
        disks: Sequence[str | None] = self.disks or (None,)
        return [Slice(n, disk, *rest) for n, disk in product(self.instances, disks)]

    def at(self, where: Slice, dram: int, disk: int) -> Configuration | None:
        """The configuration at two indices; ``None`` for a disk without any DRAM.

        SGLang reads from storage into host memory, so that a disk needs some.
        """
        if disk and (not dram or where.disk is None):
            return None
        return Configuration(
            where.instances,
            self.dram_gib[dram],
            where.disk,
            self.disk_gib[disk],
            where.ttl,
            where.device_policy,
            where.host_policy,
            where.disk_policy,
        ).normal()

    def slices(self) -> Iterator[Slice]:
        """Every combination of what is not a size."""
        disks: Sequence[str | None] = self.disks or (None,)
        yield from (
            Slice(*values)
            for values in product(
                self.instances,
                disks,
                self.ttls,
                self.device_policies,
                self.host_policies,
                self.disk_policies,
            )
        )

    def grid(self) -> list[Configuration]:
        """Every configuration once, in a fixed order."""
        found: dict[Configuration, None] = {}
        for where in self.slices():
            for dram, disk in product(range(len(self.dram_gib)), range(len(self.disk_gib))):
                configuration = self.at(where, dram, disk)
                if configuration is not None:
                    found[configuration] = None
        return list(found)

    def neighbours(self, of: Configuration) -> list[Configuration]:
        """What differs from ``of`` in one variable by one step, or in one choice."""
        found: dict[Configuration, None] = {}
        steps: list[Configuration] = []
        for name, values in (("dram_gib", self.dram_gib), ("disk_gib", self.disk_gib)):
            if getattr(of, name) in values:
                at = values.index(getattr(of, name))
                steps += [
                    _with(of, name, values[i]) for i in (at - 1, at + 1) if 0 <= i < len(values)
                ]
        if of.disk is None and len(self.disk_gib) > 1:
            steps = [s for s in steps if s.disk_gib == 0]
            steps += [
                replace(of, disk=d, disk_gib=self.disk_gib[1], ttl=ttl, disk_policy=policy)
                for d, ttl, policy in product(self.disks, self.ttls[:1], self.disk_policies[:1])
            ]
        if of.dram_gib <= 0:  # without DRAM it has no policy for it
            steps = [replace(s, host_policy=self.host_policies[0]) for s in steps]
        for name, choices in (
            ("disk", self.disks if of.disk else ()),
            ("ttl", self.ttls if of.disk else ()),
            ("instances", self.instances),
            ("device_policy", self.device_policies),
            ("host_policy", self.host_policies),
            ("disk_policy", self.disk_policies if of.disk else ()),
        ):
            steps += [_with(of, name, c) for c in choices if c != getattr(of, name)]
        for step in steps:
            normal = step.normal()
            if normal != of and not (normal.disk and normal.dram_gib <= 0):
                found[normal] = None
        return list(found)


def _with(of: Configuration, name: str, value: Any) -> Configuration:
    return replace(of, **{name: value})


def sizes(most_gib: float, levels: int, ratio: float = 2.0) -> tuple[float, ...]:
    """0, and ``levels`` sizes that grow by ``ratio`` up to ``most_gib`` or a little more.

    Sizes are round: 1, 1.5, 2, 3, 4, 6, ... times a power of two for a ratio below 2, powers of
    two otherwise.
    """
    if not (most_gib > 0 and math.isfinite(most_gib)) or levels < 1:
        raise CanopyError(
            f"sizes need a largest size above 0 and a level, got {most_gib}, {levels}"
        )
    steps = (1.0, 1.5) if ratio < 2 else (1.0,)
    exponent = math.floor(math.log2(most_gib)) - levels
    ladder = [s * 2.0**e for e in range(exponent, exponent + levels + 3) for s in steps]
    top = next(i for i, size in enumerate(ladder) if size >= most_gib * (1 - 1e-9))
    return (0.0, *ladder[max(0, top - levels + 1) : top + 1])


def gib_text(gib: float) -> str:
    """``512 GiB``, ``1.5 TiB``, ``256 MiB``."""
    if 0 < gib < 1:
        return f"{gib * 1024:.3g} MiB"
    return f"{gib:.4g} GiB" if gib < 1024 else f"{gib / 1024:.4g} TiB"
