"""How many tokens of KV the tiers in memory hold together."""

from __future__ import annotations


def capacity_tokens(device_tokens: int, host_tokens: int, *, exclusive: bool) -> int:
    """Different tokens that device and host can hold.

    ``exclusive``: whether tokens are copied to the host when they leave the device
    (``write_back``). Otherwise they are copied when they come (``write_through``), and the host
    holds again what the device has.
    """
    return device_tokens + host_tokens if exclusive else max(device_tokens, host_tokens)
