"""One storage offering: sizes, speeds and prices.

A class may sell IOPS and throughput separately from the size, between a minimum and a maximum; the
bandwidth is then a variable of the plan. The cliffs of public price lists are modelled: a smallest
size, sizes sold in steps, bandwidth tied to the size, and price steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_canopy.errors import CanopyError

HOURS_PER_MONTH = 730.0
GIB = 2.0**30
MIB = 2.0**20
BILLING = ("provisioned", "used")


@dataclass(frozen=True, slots=True)
class PriceSteps:
    """Marginal price by amount: ``(up_to, price)`` pairs, the last up to infinity."""

    steps: tuple[tuple[float, float], ...]

    def total(self, amount: float) -> float:
        """Return the price of ``amount`` units, each part at the price of its step."""
        price_so_far, previous = 0.0, 0.0
        for up_to, price in self.steps:
            if amount <= previous:
                break
            price_so_far += (min(amount, up_to) - previous) * price
            previous = up_to
        return price_so_far


@dataclass(frozen=True, slots=True)
class BoughtRate:
    """IOPS or MiB/s bought separately from the size."""

    minimum: float
    """Minimum amount sold."""
    included: float
    """Amount included without charge."""
    monthly_price: PriceSteps
    maximum: float = 0.0
    """Maximum amount sold; 0 if ``minimum`` is the only one."""

    def price_per_month(self, amount: float = 0.0) -> float:
        """Return the price of ``amount``, or of the smallest amount if that is more."""
        bought = max(amount, self.minimum)
        free_price = self.monthly_price.total(min(self.included, bought))
        return self.monthly_price.total(bought) - free_price


@dataclass(frozen=True, slots=True)
class DiskClass:
    """One offering. Sizes in GiB, bandwidths in MiB/s, prices per GiB and month.

    ``mib_s`` is the bandwidth bought (0: the smallest). ``page_bytes`` is the size of a page of KV,
    which is one operation (infinite: operations are no limit).
    """

    name: str
    per_gib_month: PriceSteps
    smallest_gib: float = 1.0
    largest_gib: float = math.inf
    step_gib: float = 0.0
    """Sold in multiples of this; 0 for any size."""
    base_mib_s: float = 0.0
    per_gib_mib_s: float = 0.0
    per_iops_mib_s: float = 0.0
    most_mib_s: float = math.inf
    write_share: float = 1.0
    """Write bandwidth as a share of the read bandwidth."""
    latency_s: float = 0.0
    """Added to each transfer."""
    iops: BoughtRate | None = None
    io_kib: float = math.inf
    """Maximum size of one operation, KiB. Larger operations count as several."""
    throughput: BoughtRate | None = None
    shared_channel: bool = True
    """Reads and writes share the bandwidth (network disks)."""
    billing: str = "provisioned"
    """``used``: billed by the mean bytes held instead of the size bought."""
    read_per_gib: float = 0.0
    """Price per GiB read."""
    write_per_gib: float = 0.0
    shared: bool = False
    """One store for all instances (Mooncake); else one disk per instance."""

    def bought_gib(self, gib: float) -> float:
        """Return the size to buy for ``gib``. Raises ``CanopyError`` above the largest size."""
        size = max(gib, self.smallest_gib)
        if self.step_gib:
            size = math.ceil(size / self.step_gib - 1e-9) * self.step_gib
        if size > self.largest_gib:
            raise CanopyError(
                f"disk class {self.name!r} is sold up to {self.largest_gib:g} GiB, "
                f"{gib:g} GiB were asked for; give a smaller --search disk_gib=G or another class"
            )
        return size

    def bandwidths(self) -> tuple[float, float] | None:
        """Return the (minimum, maximum) bandwidth sold, in MiB/s; ``None`` if it is fixed."""
        minimum = maximum = 0.0
        if self.throughput is not None:
            minimum, maximum = self.throughput.minimum, self.throughput.maximum
        elif self.iops is not None and self.per_iops_mib_s:
            minimum = self.per_iops_mib_s * self.iops.minimum
            maximum = min(self.per_iops_mib_s * self.iops.maximum, self.most_mib_s)
        return (minimum, maximum) if maximum > minimum else None

    def iops_for(self, mib_s: float, page_bytes: float = math.inf) -> float:
        """Return the operations per second that are bought with this bandwidth."""
        if self.iops is None:
            return 0.0
        iops = self.iops.minimum
        if mib_s:
            operation_mib = min(page_bytes / MIB, self.io_kib / 1024)
            iops = max(iops, mib_s / operation_mib if math.isfinite(operation_mib) else 0.0)
            if self.per_iops_mib_s:
                iops = max(iops, mib_s / self.per_iops_mib_s)
        return min(iops, max(self.iops.maximum, self.iops.minimum))

    def read_bytes_per_s(
        self, gib: float, mib_s: float = 0.0, page_bytes: float = math.inf
    ) -> float:
        """Return the read bandwidth, bytes/s, of a disk bought for ``gib`` with ``mib_s``."""
        size = self.bought_gib(gib)
        iops = self.iops_for(mib_s, page_bytes)
        mib_s_read = self.base_mib_s + self.per_gib_mib_s * size
        if self.throughput is not None:
            mib_s_read = max(mib_s_read, self.throughput.minimum, mib_s)
            if self.per_iops_mib_s:
                mib_s_read = min(mib_s_read, self.per_iops_mib_s * iops)
        elif self.iops is not None:
            mib_s_read += self.per_iops_mib_s * iops
        if self.iops is not None:
            operation_mib = min(page_bytes / MIB, self.io_kib / 1024)
            mib_s_read = min(mib_s_read, iops * operation_mib)
        return min(mib_s_read, self.most_mib_s) * MIB

    def write_bytes_per_s(
        self, gib: float, mib_s: float = 0.0, page_bytes: float = math.inf
    ) -> float:
        """Return the write bandwidth, bytes/s."""
        return self.read_bytes_per_s(gib, mib_s, page_bytes) * self.write_share

    def price_per_hour(
        self,
        gib: float,
        used_gib: float | None = None,
        mib_s: float = 0.0,
        page_bytes: float = math.inf,
    ) -> float:
        """Return the price per hour. ``used_gib``: mean GiB held, for ``billing: used``."""
        size = self.bought_gib(gib)
        if self.billing == "used" and used_gib is not None:
            size = used_gib
        monthly = self.per_gib_month.total(size)
        if self.iops is not None:
            monthly += self.iops.price_per_month(self.iops_for(mib_s, page_bytes))
        if self.throughput is not None:
            monthly += self.throughput.price_per_month(mib_s)
        return monthly / HOURS_PER_MONTH

    def transfer_price(self, read_bytes: float, written_bytes: float) -> float:
        """Return the price of the bytes read and written."""
        return (read_bytes * self.read_per_gib + written_bytes * self.write_per_gib) / GIB
