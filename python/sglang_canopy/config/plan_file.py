"""The plan file: a server's configuration, written by the planner or by hand.

JSON with a version. All other keys are optional; a server applies the keys of the file and its own
options for the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sglang_canopy.config.server_settings import ServerSettings
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.private_file import replace_file
from sglang_canopy.ttl.table import SERVER_HASH, TTLTable

VERSION = 1
MAX_FILE_BYTES = 16 << 20
MAX_CONFIG_KEYS = 64

_SGLANGS_OWN = ("lru", "lfu", "slru", "priority", "tlru")
"""SGLang's own policies on the device (``--radix-eviction-policy``)."""
_MAX_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server's configuration; ``None`` or ``{}`` for values that the plan omits.

    Raises ``CanopyError`` naming the invalid field.
    """

    radix_eviction: str | None = None
    """Eviction policy on the device."""
    radix_eviction_config: Mapping[str, Any] = field(default_factory=dict)
    host_eviction: str | None = None
    host_eviction_config: Mapping[str, Any] = field(default_factory=dict)
    disk_eviction: str | None = None
    disk_eviction_config: Mapping[str, Any] = field(default_factory=dict)
    host_bytes: int | None = None
    """Capacity of the host pool per server."""
    disk_bytes: int | None = None
    """Per server: capacity of its disk, or its contribution to a shared store."""
    disk_path: str | None = None
    """Folder of the disk store."""
    ttl: TTLTable | None = None
    host_ttl: TTLTable | None = None
    server: ServerSettings | None = None
    """SGLang's settings in the plan's simulation."""
    infeasible: str | None = None
    """Limits that the configuration misses. A server refuses such a plan."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Source of the plan, for readers: command, trace hash, date."""

    def __post_init__(self) -> None:
        _check_policy("radix_eviction", self.radix_eviction, (*_SGLANGS_OWN, AUTO, *live_names()))
        _check_policy("host_eviction", self.host_eviction, live_names())
        _check_policy("disk_eviction", self.disk_eviction, live_names())
        for tier in ("radix", "host", "disk"):
            config = getattr(self, f"{tier}_eviction_config")
            _check_config(f"{tier}_eviction_config", config)
            if config and getattr(self, f"{tier}_eviction") is None:
                raise CanopyError(
                    f"plan: {tier}_eviction_config is given without {tier}_eviction; "
                    "name the policy it is for"
                )
        _check_bytes("host_bytes", self.host_bytes)
        _check_bytes("disk_bytes", self.disk_bytes)
        path = self.disk_path
        if path is not None and (not isinstance(path, str) or not path or "\0" in path):
            raise CanopyError(f"plan: disk_path must be the path of a folder, got {path!r:.60}")
        for name in ("ttl", "host_ttl"):
            table = getattr(self, name)
            if table is not None and not isinstance(table, TTLTable):
                raise CanopyError(f"plan: {name} must be a TTL table, got {table!r:.60}")
        missed = self.infeasible
        if missed is not None and (not isinstance(missed, str) or not missed):
            raise CanopyError(f"plan: infeasible must be a text, got {missed!r:.60}")
        if self.server is not None and not isinstance(self.server, ServerSettings):
            raise CanopyError(f"plan: server must be settings, got {self.server!r:.60}")
        _check_config("made_by", self.made_by)

    def check_for_server(self) -> None:
        """Raise ``CanopyError`` unless a server can use the plan: it meets its limits, and its
        roots are a server's."""
        self.check_feasible()
        for name in ("ttl", "host_ttl"):
            table = getattr(self, name)
            if table is not None and table.groups and table.hash != SERVER_HASH:
                raise CanopyError(
                    f"plan: the roots of {name!r} are block ids of a trace (hash "
                    f"{table.hash!r}), which a server does not know; make the plan from the "
                    "server's own request log (--format sglang), or drop 'groups' and give "
                    "'categories'"
                )

    def check_feasible(self) -> None:
        """Raise ``CanopyError`` if no configuration of the plan met its limits."""
        if self.infeasible is not None:
            raise CanopyError(
                f"plan: this configuration misses {self.infeasible}, and no other that was tried "
                "meets it; plan again with other limits or more instances, or remove the key "
                "'infeasible' to start with it anyway"
            )

    def to_json(self) -> dict[str, Any]:
        """Return JSON data without the omitted values."""
        data: dict[str, Any] = {"version": VERSION}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (TTLTable, ServerSettings)):
                data[f.name] = value.to_json()
            elif value is not None and value != {}:
                data[f.name] = dict(value) if isinstance(value, Mapping) else value
        return data

    @classmethod
    def from_json(cls, data: Any) -> ServerPlan:
        """Parse the result of ``to_json``, or a handwritten plan. Raises ``CanopyError``."""
        if not isinstance(data, Mapping):
            raise CanopyError(f"a plan must be a JSON object, got {data!r:.60}")
        version = data.get("version")
        if version != VERSION or isinstance(version, bool):
            raise CanopyError(f'plan: "version" must be {VERSION}, got {version!r:.60}')
        given = {k: v for k, v in data.items() if k != "version"}
        allowed = [f.name for f in fields(cls)]
        for key in given:
            if key not in allowed:
                raise CanopyError(
                    f"plan: unknown key {key!r:.60}; allowed keys: version, {', '.join(allowed)}"
                )
        for name in ("ttl", "host_ttl"):
            if given.get(name) is not None:
                try:
                    given[name] = TTLTable.from_json(given[name])
                except CanopyError as error:
                    raise CanopyError(f"plan: {name}: {error}") from None
        if given.get("server") is not None:
            try:
                given["server"] = ServerSettings.from_json(given["server"])
            except CanopyError as error:
                raise CanopyError(f"plan: {error}") from None
        return cls(**given)


def read_plan(path: Path | str) -> ServerPlan:
    """Read and check a plan file. Raises ``CanopyError`` with the file's name."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CanopyError(
                f"plan file {str(path)!r} is larger than {MAX_FILE_BYTES >> 20} MiB: not a plan"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CanopyError(f"cannot read the plan file {str(path)!r}: {error}") from None
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except RecursionError:
        raise CanopyError(f"plan file {str(path)!r}: nested too deeply") from None
    except CanopyError as error:
        raise CanopyError(f"plan file {str(path)!r}: {error}") from None
    except ValueError as error:
        raise CanopyError(f"plan file {str(path)!r} is not JSON: {error}") from None
    try:
        return ServerPlan.from_json(data)
    except CanopyError as error:
        raise CanopyError(f"plan file {str(path)!r}: {error}") from None


def write_plan(path: Path | str, plan: ServerPlan) -> None:
    """Write ``plan`` atomically, readable by its owner only (0600). Raises ``CanopyError``."""
    path = Path(path)
    text = json.dumps(plan.to_json(), indent=2, allow_nan=False) + "\n"
    try:
        replace_file(path, text, durable=True)
    except OSError as error:
        raise CanopyError(f"cannot write the plan file {str(path)!r}: {error}") from None


def _check_policy(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and (not isinstance(value, str) or value not in allowed):
        raise CanopyError(
            f"plan: {key} must be the name of a policy, one of: {', '.join(allowed)}; "
            f"got {value!r:.60}"
        )


def _check_config(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise CanopyError(f"plan: {key} must be a JSON object, got {value!r:.60}")
    if len(value) > MAX_CONFIG_KEYS:
        raise CanopyError(f"plan: {key} may have {MAX_CONFIG_KEYS} keys, got {len(value)}")
    for name, item in value.items():
        scalar = item is None or isinstance(item, (bool, int, float, str))
        if not isinstance(name, str) or not scalar or _is_not_finite(item):
            raise CanopyError(
                f"plan: {key}: {name!r:.60} must be a string, a finite number, true, false or "
                f"null, got {item!r:.60}"
            )


def _check_bytes(key: str, value: Any) -> None:
    if value is None:
        return
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise CanopyError(
            f"plan: {key} must be a whole number of bytes, 0 or more, got {value!r:.60}"
        )


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _no_constant(name: str) -> float:
    raise CanopyError(f"{name} is not a number a plan can hold; leave the key out or use null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CanopyError(f"key {key!r:.60} is given twice")
        found[key] = value
    return found
