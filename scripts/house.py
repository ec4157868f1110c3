"""How the packages are laid out: their rooms, what each may import, and three journeys through it.

`test/test_architecture.py` holds the code against this file, and `scripts/reference_docs.py` makes
the tables of `docs/architecture.md` from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "python"

PACKAGES: dict[str, str] = {
    "sglang_canopy": "What runs inside a server, and the policies that the laboratory shares with it.",
    "canopy_lab": "Traces, simulators, advice, plans and the command line: neither torch nor sglang.",
    "canopy_chunks": "Documents in any order: reuse of KV that is not a prefix.",
}
"""Each reads alone: a server without documents never imports the other two."""

OPEN = {"declared", "errors", "private_file", "records", "tenant", "__init__"}
"""Files at the top of ``sglang_canopy``, which import nothing but each other and are open to every room."""

ROOMS: dict[str, set[str]] = {
    "policy": {"reuse"},
    "reuse": set(),
    "ttl": set(),
    "whatif": {"policy", "reuse"},
    "schedule": set(),
    "admission": {"reuse"},
    "disk": {"policy", "ttl"},
    "config": {"admission", "policy", "request", "schedule", "ttl"},
    "request": set(),
    "trace": set(),
    "latency": set(),
    "compiled": set(),
    "sim": {"admission", "latency", "policy", "reuse", "schedule", "trace", "ttl"},
    "characterize": {"policy", "reuse", "sim", "trace"},
    "advise": {"characterize", "policy", "sim", "trace"},
    "plan": {"compiled", "config", "policy", "sim", "trace", "ttl"},
    "report": {"advise", "characterize", "plan", "sim"},
    "top": {"policy"},
    "radix": {"admission", "config", "policy", "request", "reuse", "ttl", "whatif"},
    "storage": {"disk", "policy", "radix", "request", "ttl"},
    "telemetry": {"admission", "policy", "radix", "reuse", "ttl", "whatif"},
    "ui": set(),
    "canopy_chunks": {"policy"},
    "canopy_chunks/server": {"canopy_chunks", "config", "request"},
    "bench": {"latency", "request", "trace"},
    "profiling": set(),
    "server": {
        *(
            "admission",
            "canopy_chunks/server",
            "config",
            "policy",
            "radix",
            "request",
        ),
        *("reuse", "schedule", "storage", "telemetry", "ui", "whatif"),
    },
    "doctor": {"admission", "config", "policy", "server", "storage"},
    "cli": {
        *(
            "advise",
            "characterize",
            "canopy_chunks",
            "compiled",
            "config",
            "doctor",
            "latency",
            "plan",
        ),
        *("policy", "profiling", "report", "request", "sim", "top", "trace", "ttl"),
    },
    "bench_serving": {"bench"},
}
"""Room -> the rooms it may import. Directions only: no two rooms import each other."""

LABORATORY = (
    *("policy", "reuse", "ttl", "disk", "trace", "sim", "characterize", "plan", "report"),
    *(
        "advise",
        "admission",
        "compiled",
        "config",
        "latency",
        "request",
        "schedule",
        "top",
        "whatif",
    ),
)
"""Rooms that need neither torch nor sglang."""

SGLANG = {
    *(
        "radix",
        "storage",
        "telemetry",
        "server",
        "bench",
        "bench_serving",
        "canopy_chunks/server",
    ),
    *("request", "doctor"),
}
"""Rooms that may import sglang; ``request`` inside functions only."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stop of a journey: a function or method, and what happens there."""

    module: str
    name: str
    what: str

    @property
    def path(self) -> Path:
        return PYTHON / f"{self.module}.py"


@dataclass(frozen=True, slots=True)
class Journey:
    """A way through the package, file by file."""

    title: str
    steps: tuple[Step, ...]
    most_files: int


JOURNEYS: dict[str, Journey] = {
    "category": Journey(
        "A category, from the HTTP body to the choice of a victim",
        (
            Step(
                "sglang_canopy/server/entry",
                "chat_converted",
                "a hook: SGLang has converted the body, and the request is stamped once",
            ),
            Step("sglang_canopy/request/fields", "client_fields", "`canopy_category` is checked"),
            Step(
                "sglang_canopy/request/infer",
                "infer_from_chat",
                "the category, where the client gave none",
            ),
            Step(
                "sglang_canopy/request/stamp",
                "make_stamp",
                "both become one dict in `custom_params`, with the time of arrival; SGLang carries "
                "it to every rank",
            ),
            Step(
                "sglang_canopy/server/arrivals",
                "request_created",
                "a hook: the scheduler has made its `Req`, and the tree hears of it",
            ),
            Step(
                "sglang_canopy/radix/live_request",
                "live_request",
                "the stamp is read, without what is forged in it, into the policy's `Request`",
            ),
            Step(
                "sglang_canopy/radix/core",
                "CanopyTreeCore.arrive",
                "the policies hear of the request and answer with the label of its category",
            ),
            Step(
                "sglang_canopy/radix/core",
                "CanopyTreeCore.record_use",
                "at insertion: every node on the request's path carries that label",
            ),
            Step(
                "sglang_canopy/radix/component",
                "CanopyFullComponent._evict_device_next_node",
                "the pool is full, and SGLang asks for a victim",
            ),
            Step(
                "sglang_canopy/radix/evictable",
                "EvictableLeaves.next_victim",
                "leaves that became evictable are admitted, then the policy is asked",
            ),
            Step(
                "sglang_canopy/policy/wa",
                "WorkloadAware.victim",
                "the leaf whose category promises the least reuse",
            ),
        ),
        10,
    ),
    "arrival": Journey(
        "One arrival, through `canopy simulate`",
        (
            Step(
                "canopy_lab/cli/simulate",
                "run",
                "options become a plan of policies, capacities and seeds",
            ),
            Step(
                "canopy_lab/sim/sweep",
                "run_sweep",
                "one task for each of them, on several processes",
            ),
            Step("canopy_lab/trace/open", "open_trace", "any format as one kind of record"),
            Step(
                "canopy_lab/sim/requests",
                "to_requests",
                "records become the requests that policies see",
            ),
            Step("canopy_lab/sim/driver", "simulate", "request after request through one tree"),
            Step(
                "sglang_canopy/reuse/learner",
                "ReuseModel.arrive",
                "through `Policy.arrive`: the path is looked up in what was seen before",
            ),
            Step(
                "sglang_canopy/policy/block_tree", "RadixTree.match", "what of the path is cached"
            ),
            Step("sglang_canopy/policy/block_tree", "RadixTree.evict", "room for the rest"),
            Step("sglang_canopy/policy/wa", "WorkloadAware.victim", "which leaf goes next"),
            Step("sglang_canopy/policy/cut", "tokens_kept", "and how much of it stays"),
        ),
        10,
    ),
    "documents": Journey(
        "Documents, from a chat body to attention",
        (
            Step(
                "canopy_chunks/server/hooks",
                "_convert_chat",
                "the one place that asks whether chunk reuse is on, here and in the scheduler",
            ),
            Step(
                "canopy_chunks/server/http/entry",
                "convert_chat",
                "the documents of a body are found",
            ),
            Step(
                "canopy_chunks/fields", "parse_fields", "what the request says of chunks is checked"
            ),
            Step(
                "canopy_chunks/documents",
                "split_documents",
                "the text is cut and tokenised in pieces",
            ),
            Step(
                "canopy_chunks/server/scheduler",
                "request_created",
                "the scheduler has made its `Req`",
            ),
            Step(
                "canopy_chunks/server/engine", "ChunkEngine.new_request", "its chunks are looked up"
            ),
            Step(
                "canopy_chunks/server/request",
                "ChunkRequest",
                "what is remembered of them until the answer is done",
            ),
            Step(
                "canopy_chunks/store", "ChunkStore.get", "the KV of each, on device, host or disk"
            ),
            Step(
                "canopy_chunks/read_ahead", "ReadAhead.request", "from disk while the request waits"
            ),
            Step(
                "canopy_chunks/server/forward",
                "forward",
                "around SGLang's forward: rows of a window",
            ),
            Step("canopy_chunks/server/plan", "choose_tokens", "which tokens are computed again"),
            Step(
                "canopy_chunks/placement", "place_chunks", "the others' KV, rotated, into the pool"
            ),
            Step("canopy_chunks/server/batch", "pack_rows", "a batch of the chosen rows alone"),
            Step(
                "canopy_chunks/server/attention",
                "FusedAttention.attend",
                "each row over all that is before it",
            ),
        ),
        15,
    ),
}


def files() -> Iterator[Path]:
    return iter(sorted(path for name in PACKAGES for path in (PYTHON / name).rglob("*.py")))


def room_of(path: Path) -> str:
    """The room that a file is in; the file's own name at the top of its package."""
    package, *parts = path.relative_to(PYTHON).parts
    if package == "canopy_chunks":
        return f"{package}/server" if parts[0] == "server" else package
    return parts[0].removesuffix(".py")


def folder_of(room: str) -> Path:
    """The folder of a room, or the file that it is."""
    if room.startswith("canopy_chunks"):
        return PYTHON / room
    places = [PYTHON / package / room for package in PACKAGES]
    return next(
        (place for place in places if place.is_dir()), PYTHON / "sglang_canopy" / f"{room}.py"
    )


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    path = folder_of(room)
    if path.is_dir():
        path /= "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def line_of(step: Step) -> int | None:
    """The line where the step's function is defined; ``None`` where there is none."""
    if not step.path.exists():
        return None
    nodes: list[ast.AST] = [ast.parse(step.path.read_text(encoding="utf-8"))]
    found: ast.AST | None = None
    for part in step.name.split("."):
        found = next(
            (
                node
                for parent in nodes
                for node in ast.walk(parent)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name == part
            ),
            None,
        )
        if found is None:
            return None
        nodes = [found]
    return getattr(found, "lineno", None)


def rooms_table() -> str:
    """The rooms as a Markdown table."""
    lines = ["| room | what is in it | may import |", "| --- | --- | --- |"]
    for room, allowed in ROOMS.items():
        names = ", ".join(f"`{name}`" for name in sorted(allowed)) or "nothing"
        lines.append(f"| `{room}` | {purpose(room)} | {names} |")
    return "\n".join(lines) + "\n"


def journey(name: str) -> str:
    """One journey as a numbered list."""
    lines = []
    for number, step in enumerate(JOURNEYS[name].steps, 1):
        lines.append(f"{number}. `{step.module}.py` `{step.name}`: {step.what}")
    return "\n".join(lines) + "\n"
