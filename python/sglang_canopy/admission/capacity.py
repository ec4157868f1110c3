"""KV capacity of the memory tiers together, in tokens."""

from __future__ import annotations


def capacity_tokens(device_tokens: int, host_tokens: int, *, exclusive: bool) -> int:
    """Return the number of distinct tokens that device and host can hold.

    ``exclusive``: tokens are copied to the host when the device evicts them (``write_back``).
    Otherwise they are copied when they are computed (``write_through``), and the host duplicates
    the device.
    """
    return device_tokens + host_tokens if exclusive else max(device_tokens, host_tokens)
