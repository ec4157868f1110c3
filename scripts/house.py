"""How the package is laid out: its rooms, what each may import, and three journeys through it.

`test/test_architecture.py` holds the code against this file, and `scripts/reference_docs.py` makes
the tables of `docs/architecture.md` from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "sglang_canopy"

OPEN = {"errors", "private_file", "records", "tenant", "__init__"}
"""Files at the top, which import nothing but each other and are open to every room."""

ROOMS: dict[str, set[str]] = {
    "policy": {"reuse"},
    "reuse": set(),
    "ttl": set(),
    "whatif": {"policy", "reuse"},
    "schedule": set(),
    "admission": {"reuse"},
    "disk": {"policy", "ttl"},
    "config": {"admission", "policy", "schedule", "ttl"},
    "request": set(),
    "trace": set(),
    "latency": set(),
    "compiled": set(),
    "sim": {"admission", "latency", "policy", "reuse", "schedule", "trace", "ttl"},
    "characterize": {"policy", "reuse", "sim", "trace"},
    "advise": {"characterize", "policy", "sim", "trace"},
    "plan": {"compiled", "config", "policy", "sim", "trace", "ttl"},
    "report": {"advise", "characterize", "plan", "sim"},
    "radix": {"admission", "config", "policy", "request", "reuse", "ttl", "whatif"},
    "storage": {"disk", "policy", "radix", "request", "ttl"},
    "telemetry": {"policy", "radix", "reuse", "ttl", "whatif"},
    "ui": set(),
    "chunk": {"policy"},
    "chunk/server": {"chunk", "config", "request"},
    "bench": {"latency", "request", "trace"},
    "profiling": set(),
    "cpu": set(),
    "models": set(),
    "server": {
        *("admission", "bench", "chunk/server", "config", "cpu", "policy", "radix", "request"),
        *("reuse", "schedule", "storage", "telemetry", "ui", "whatif"),
    },
    "doctor": {"config", "policy", "server", "storage"},
    "cli": {
        *("advise", "characterize", "chunk", "compiled", "config", "doctor", "latency", "plan"),
        *("policy", "profiling", "report", "request", "sim", "telemetry", "trace", "ttl"),
    },
    "bench_serving": {"bench"},
}
"""Room -> the rooms it may import. Directions only: no two rooms import each other."""

LABORATORY = (
    *("policy", "reuse", "ttl", "disk", "trace", "sim", "characterize", "plan", "report"),
    *("advise", "admission", "compiled", "config", "latency", "request", "schedule", "whatif"),
)
"""Rooms that need neither torch nor sglang."""

SGLANG = {
    *("radix", "storage", "telemetry", "server", "cpu", "bench", "bench_serving", "chunk/server"),
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
        return PACKAGE / f"{self.module}.py"


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
                "server/entry",
                "chat_converted",
                "a hook: SGLang has converted the body, and the request is stamped once",
            ),
            Step("request/fields", "client_fields", "`canopy_category` is checked"),
            Step("request/infer", "infer_from_chat", "the category, where the client gave none"),
            Step(
                "request/stamp",
                "make_stamp",
                "both become one dict in `custom_params`, with the time of arrival; SGLang carries "
                "it to every rank",
            ),
            Step(
                "server/arrivals",
                "request_created",
                "a hook: the scheduler has made its `Req`, and the tree hears of it",
            ),
            Step(
                "radix/live_request",
                "live_request",
                "the stamp is read, without what is forged in it, into the policy's `Request`",
            ),
            Step(
                "radix/core",
                "CanopyTreeCore.arrive",
                "the policies hear of the request and answer with the label of its category",
            ),
            Step(
                "radix/core",
                "CanopyTreeCore.record_use",
                "at insertion: every node on the request's path carries that label",
            ),
            Step(
                "radix/component",
                "CanopyFullComponent._evict_device_next_node",
                "the pool is full, and SGLang asks for a victim",
            ),
            Step(
                "radix/evictable",
                "EvictableLeaves.next_victim",
                "leaves that became evictable are admitted, then the policy is asked",
            ),
            Step(
                "policy/wa",
                "WorkloadAware.victim",
                "the leaf whose category promises the least reuse",
            ),
        ),
        10,
    ),
    "arrival": Journey(
        "One arrival, through `canopy simulate`",
        (
            Step("cli/simulate", "run", "options become a plan of policies, capacities and seeds"),
            Step("sim/sweep", "run_sweep", "one task for each of them, on several processes"),
            Step("trace/open", "open_trace", "any format as one kind of record"),
            Step("sim/requests", "to_requests", "records become the requests that policies see"),
            Step("sim/driver", "simulate", "request after request through one tree"),
            Step(
                "reuse/learner",
                "ReuseModel.arrive",
                "through `Policy.arrive`: the path is looked up in what was seen before",
            ),
            Step("policy/block_tree", "RadixTree.match", "what of the path is cached"),
            Step("policy/block_tree", "RadixTree.evict", "room for the rest"),
            Step("policy/wa", "WorkloadAware.victim", "which leaf goes next"),
            Step("policy/cut", "tokens_kept", "and how much of it stays"),
        ),
        10,
    ),
    "documents": Journey(
        "Documents, from a chat body to attention",
        (
            Step(
                "chunk/server/hooks",
                "_convert_chat",
                "the one place that asks whether chunk reuse is on, here and in the scheduler",
            ),
            Step("chunk/server/http/entry", "convert_chat", "the documents of a body are found"),
            Step("chunk/fields", "parse_fields", "what the request says of chunks is checked"),
            Step("chunk/documents", "split_documents", "the text is cut and tokenised in pieces"),
            Step("chunk/server/scheduler", "request_created", "the scheduler has made its `Req`"),
            Step("chunk/server/engine", "ChunkEngine.new_request", "its chunks are looked up"),
            Step(
                "chunk/server/request",
                "ChunkRequest",
                "what is remembered of them until the answer is done",
            ),
            Step("chunk/store", "ChunkStore.get", "the KV of each, on device, host or disk"),
            Step("chunk/read_ahead", "ReadAhead.request", "from disk while the request waits"),
            Step("chunk/server/forward", "forward", "around SGLang's forward: rows of a window"),
            Step("chunk/server/plan", "choose_tokens", "which tokens are computed again"),
            Step("chunk/placement", "place_chunks", "the others' KV, rotated, into the pool"),
            Step("chunk/server/batch", "pack_rows", "a batch of the chosen rows alone"),
            Step(
                "chunk/server/attention",
                "FusedAttention.attend",
                "each row over all that is before it",
            ),
        ),
        15,
    ),
}


def files() -> Iterator[Path]:
    return iter(sorted(PACKAGE.rglob("*.py")))


def room_of(path: Path) -> str:
    """The room that a file is in; the file's own name at the top of the package."""
    parts = path.relative_to(PACKAGE).parts
    if parts[:2] == ("chunk", "server"):
        return "chunk/server"
    return parts[0].removesuffix(".py")


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    path = PACKAGE / room / "__init__.py"
    if not path.exists():
        path = PACKAGE / f"{room}.py"
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
    """One journey as a numbered list, with the lines of today."""
    lines = []
    for number, step in enumerate(JOURNEYS[name].steps, 1):
        lines.append(f"{number}. `{step.module}.py:{line_of(step)}` `{step.name}`: {step.what}")
    return "\n".join(lines) + "\n"
