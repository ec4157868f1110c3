"""Write the generated parts of docs/reference/ and docs/architecture.md from the code.

    python scripts/reference_docs.py            # rewrite the pages that are stale
    python scripts/reference_docs.py --check    # name them and exit with 1

A page marks each generated part with ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``.
What NAME renders is in ``RENDERERS``; everything outside the markers is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import math
import re
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import layout
from canopy_documents import ATTRIBUTE
from canopy_documents.plugin import hooks as documents
from canopy_documents.plugin import series as document_series
from canopy_documents.server import options as document_options
from canopy_documents.text import fields as document_fields
from canopy_lab.cli import main as cli
from canopy_lab.live.replay import server_plugin
from canopy_lab.sim import hindsight
from sglang_canopy import declared
from sglang_canopy.config import setups
from sglang_canopy.config.tiers import DiskOptions, TreeSettings
from sglang_canopy.config.whatif import MeterOptions
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy import registry
from sglang_canopy.request import identity
from sglang_canopy.server.start import flags, hooks
from sglang_canopy.storage.settings import StorageSettings
from sglang_canopy.telemetry import series
from sglang_canopy.ttl.table import Group, TTLTable
from sglang_canopy.wire import stamp

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
COMMAND = "python scripts/reference_docs.py"

_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.S)

REQUEST_MEANINGS = {
    "canopy_category": "The workload this request belongs to, such as `chat`, `agent` or `rag`.",
    "canopy_turn": "The turn of its conversation; 1 is the first.",
    "canopy_conversation": "An id that all turns of the conversation share.",
    "canopy_stop": "Why the response will stop, if you know better than the server.",
    "canopy_over": "Nothing continues this conversation after this response.",
    "canopy_return_in_s": "When the conversation continues, counted from this request's arrival.",
    "canopy_keep_s": "Keep this request's path on the device for this long, "
    "within the tenant's budget.",
    "canopy_slo_ms": "A TTFT target for this request (`etlru`, `canopy-tlru`).",
    "canopy_ttl_s": "How long the path stays below the device after its last use.",
}
"""Meaning of each field of a request. A new field needs a line here."""

DOCUMENT_MEANINGS = {
    stamp.BOUNDS: "Where the documents are in `input_ids`, or `off` to run normally.",
    stamp.RATIO: "Share of the documents' tokens to compute again; 1 is plain serving.",
    stamp.DOCUMENTS: "`parts`: every text part of a chat message but its last is a document.",
    stamp.ORDER: "`any`: documents may be reordered, so that more of the prompt is cached.",
}
"""Meaning of each field about documents."""


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[_cell(text) for text in line] for line in [header, *rows]]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(lines[0]), *others]) + "\n"


def markdown_list(rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown list of (name, meaning)."""
    lines = [[_one_line(text) for text in row] for row in rows]
    return "\n".join(f"- {name}: {meaning}" for name, meaning in lines) + "\n"


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|") or "-"


def _one_line(text: str) -> str:
    """On one line, with Markdown's backquotes."""
    return " ".join(text.replace("``", "`").split())


def attribute_docs(cls: type) -> dict[str, str]:
    """The string under each annotated field of ``cls`` and its bases, by field name."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for node, following in zip(body.body, body.body[1:]):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
                docs[node.target.id] = str(following.value.value)
    return docs


def option_list(cls: type, excluded: Collection[str] = ()) -> str:
    """Each key of a configuration dataclass, with its meaning and default."""
    return markdown_list(option_rows(cls, excluded))


def option_rows(cls: type, excluded: Collection[str] = ()) -> list[list[str]]:
    """Key and meaning of each."""
    docs = attribute_docs(cls) | {
        field.name: _with_allowed(option.help, option.allowed)
        for field, option in declared.declared_fields(cls)
    }
    return [
        [f"`{field.name}`", _with_default(docs[field.name], _default_text(field))]
        for field in dataclasses.fields(cls)
        if field.init and field.name not in excluded
    ]


def _with_default(meaning: str, default: str) -> str:
    return f"{meaning} ({default})" if default and "Default:" not in meaning else meaning


def _with_allowed(meaning: str, allowed: str) -> str:
    """Return the meaning with the allowed values, unless it names every choice already."""
    choices = allowed[7:].split(", ") if allowed.startswith("one of ") else []
    mentions = [re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", meaning) for word in choices]
    if choices and all(mentions):
        return meaning
    if not meaning.endswith("."):  # a fragment
        return f"{meaning}: {', '.join(choices)}" if choices else meaning
    return f"{meaning} {allowed[:1].upper()}{allowed[1:]}." if allowed else meaning


def _default_text(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING or field.default == ():
        return "empty"
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default == math.inf:
        return "never expires"
    return f"`{json.dumps(field.default)}`" if field.default not in ("", None) else ""


def policy_options() -> str:
    """A heading and a list for every policy that a server has; one list for the simulator's."""
    policy_names = [*registry.policy_names(), *hindsight.hindsight_names()]
    parts, excluded = [], []
    simulated: dict[tuple[str, str], list[str]] = {}
    name_by_config: dict[type, str] = {}
    for name in policy_names:
        cls = policy_config(name)
        if not dataclasses.fields(cls):
            excluded.append(f"`{name}`")
        elif registry.live_name(name) in registry.live_names():
            shown_base = next((base for base in cls.__mro__[1:] if base in name_by_config), None)
            inherited = {f.name for f in dataclasses.fields(shown_base)} if shown_base else set()
            intro = f"All keys of `{name_by_config[shown_base]}`, and:\n\n" if shown_base else ""
            parts.append(f"### `{name}`\n\n{intro}{option_list(cls, inherited)}")
            name_by_config[cls] = name
        else:
            for row in option_rows(cls):
                simulated.setdefault((row[0], row[1]), []).append(f"`{name}`")
    rows = [[f"{', '.join(names)} {key}", meaning] for (key, meaning), names in simulated.items()]
    parts.append(f"### In the simulator only\n\nPolicy, key and meaning:\n\n{markdown_list(rows)}")
    parts.append(f"### Without options\n\n{', '.join(excluded)}.\n")
    return "\n".join(parts)


def policy_config(name: str) -> type:
    """The options of a policy of either kind."""
    online = name in registry.policy_names()
    return (registry.policy_class(name) if online else hindsight.hindsight_class(name)).Config


def declared_flags(*classes: type, hidden: bool | None = None) -> list[list[str]]:
    """Return flag and meaning of each declared option; ``hidden`` as in ``declared.table_rows``."""
    rows = []
    for row in (row for cls in classes for row in declared.table_rows(cls, hidden)):
        value = f" {row['value']}" if row["value"] else ""
        rows.append([f"`{row['flag']}{value}`", _full_meaning(row)])
    return rows


def _full_meaning(row: Mapping[str, str]) -> str:
    """Return the meaning of an option, its allowed values and its default."""
    return _with_default(_with_allowed(row["help"], row["allowed"]), row["default"])


def keys_table(cls: type) -> str:
    """Return the keys that a flag takes."""
    return markdown_list([f"`{r['flag']}`", _full_meaning(r)] for r in declared.table_rows(cls))


def canopy_flags(hidden: bool) -> str:
    """Return the flags of ``--help``, or the hidden flags."""
    short_row = [f"`{flags.SHORT_FLAG} NAME`", flags.short_help()]
    rows = declared_flags(*flags.FLAG_CLASSES, server_plugin.ReplayFlags, hidden=hidden)
    return markdown_list(rows if hidden else [short_row, *rows])


FEATURE_NAMES = {"gate": "session gate", "queue": "queue order"}


def refused_setups() -> str:
    """Return the set-ups that the start refuses, by the features that refuse them."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for setup in setups.SETUPS:
        refusing = tuple(FEATURE_NAMES.get(f, f) for f in setups.FLAGS if setup.reason(f))
        if refusing:
            rows.setdefault(refusing, []).append(setup.name)
    return markdown_table(
        ["refused by", "set-ups"], ([", ".join(k), ", ".join(names)] for k, names in rows.items())
    )


def setups_table() -> str:
    """Return the level of testing of each set-up with each part; rows without a tested part have one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for setup in setups.SETUPS:
        levels = tuple(setup.level(part) for part in setups.PARTS)
        if {*levels} != {setups.REFUSED, setups.UNTESTED} and {*levels} != {setups.REFUSED}:
            rows.setdefault(levels, []).append(setup.name)
    lines = [[", ".join(names), *levels] for levels, names in rows.items()]
    return markdown_table(["set-up", *setups.PARTS], lines)


def command_tables() -> str:
    """Return each subcommand of ``canopy`` with an example, and the keys of its grouped options."""
    rows = [
        [f"`{name}`", summary, f"`canopy {cli.EXAMPLES[name]}`"]
        for name, summary in cli.COMMANDS.items()
    ]
    parts = [markdown_table(["command", "what it gives", "example"], rows)]
    for name in cli.COMMANDS:
        for group in _option_classes(name):
            for field, option in declared.declared_fields(group):
                default = field.default  # of an option that is KEY=VALUE,...
                is_keyed = dataclasses.is_dataclass(default)
                keys = declared.table_rows(type(default)) if is_keyed else []
                if keys:
                    parts.append(f"Keys of `canopy {name} {option.flag}`:\n\n{_grouped_keys(keys)}")
    return "\n".join(parts)


def _grouped_keys(keys: Iterable[Mapping[str, str]]) -> str:
    """Return a list of keys and meanings; keys of one meaning share a line."""
    names: dict[str, list[str]] = {}
    for key in keys:
        value = key["value"] or key["flag"].upper()
        names.setdefault(_full_meaning(key), []).append(f"`{key['flag']}={value}`")
    return markdown_list([", ".join(keys), meaning] for meaning, keys in names.items())


def _option_classes(name: str) -> Iterable[type]:
    """The classes that declare the options of a subcommand; ``doctor`` has none."""
    if name in cli.PASS_THROUGH_COMMANDS:
        return ()
    groups: Iterable[type] = importlib.import_module(cli.module_of(name)).OPTIONS
    return groups


def request_fields() -> str:
    """Return key, allowed values and meaning of the fields that a client may put into ``custom_params``."""
    rows = [
        [f"`{key}`", _allowed_text(check), REQUEST_MEANINGS[key]]
        for key, (_, check) in stamp.CLIENT_FIELDS.items()
    ]
    return markdown_table(["key", "value", "meaning"], rows)


def document_request_fields() -> str:
    rows = []
    for key, meaning in DOCUMENT_MEANINGS.items():
        try:
            document_fields.parse_fields({key: object()})
        except CanopyError as error:
            allowed = re.search(r"must be (.*), got <object", str(error), re.S)[1]
            rows.append([f"`{key}`", allowed, meaning])
    return markdown_table(["key", "value", "meaning"], rows)


def identity_sources() -> str:
    """Return the possible places of a conversation's name, in order of precedence."""
    rows = [[source.locations_text, source.sent_by] for source in identity.IDENTITY_FIELDS]
    return markdown_table(["where", "who sends it"], rows)


def _allowed_text(check: Callable[[Any], Any]) -> str:
    """Return the allowed values of a check, from the message of its refusal."""
    try:
        check(object())
    except ValueError as error:
        return re.sub(r"\b\d[\d.]*(e\+\d+)?\b", lambda n: f"{float(n[0]):,.10g}", str(error))
    raise AssertionError(f"{check} takes anything")


def metrics_table() -> str:
    rows = []
    for metric in (*series.CACHE_METRICS, *series.IGNORED_METRICS, *document_series.METRICS):
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        rows.append([f"`{series.PREFIX}{metric.name}{labels}`", metric.meaning])
    return markdown_list(rows)


def routes_table() -> str:
    """Method and path of each route that Canopy adds to SGLang's server."""
    import fastapi

    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    stand_in = types.ModuleType("sglang.srt.entrypoints.http_server")
    stand_in.app = app  # type: ignore[attr-defined]
    server_args = types.SimpleNamespace(admin_api_key=None, tp_size=1)
    setattr(server_args, ATTRIBUTE, document_options.ReuseOptions())
    sys.modules[stand_in.__name__] = stand_in
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        for hook in (*hooks.HOOKS, *documents.HOOKS):
            if hook.target.endswith("http_server.launch_server"):
                hook.function(server_args)
        tempfile.tempdir = None
    del sys.modules[stand_in.__name__]
    return markdown_table(
        ["method", "path"], [[min(route.methods), f"`{route.path}`"] for route in app.routes]
    )


RENDERERS: dict[str, Callable[[], str]] = {
    "tree-settings": lambda: option_list(TreeSettings),
    "policy-options": policy_options,
    "server-flags": lambda: canopy_flags(hidden=False),
    "advanced-flags": lambda: canopy_flags(hidden=True),
    "meter-keys": lambda: keys_table(MeterOptions),
    "disk-keys": lambda: keys_table(DiskOptions),
    "storage-keys": lambda: option_list(StorageSettings),
    "refused": refused_setups,
    "setups": setups_table,
    "document-keys": lambda: option_list(document_options.ReuseOptions),
    "commands": command_tables,
    "request-fields": request_fields,
    "document-request-fields": document_request_fields,
    "identity-sources": identity_sources,
    "metrics": metrics_table,
    "ttl-table": lambda: option_list(TTLTable),
    "ttl-group": lambda: option_list(Group),
    "routes": routes_table,
    "folders": layout.folder_list,
}


def reference_pages() -> list[Path]:
    return [*sorted(PAGES.glob("*.md")), ROOT / "docs" / "architecture.md"]


def render(page: str) -> str:
    """Return ``page`` with every generated part rendered from the code."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{RENDERERS[m[2]]()}\n{m[3]}", page)


def stale_pages() -> dict[Path, str]:
    """Pages whose generated parts differ from the code, with the text they should have."""
    fresh = {path: render(path.read_text(encoding="utf-8")) for path in reference_pages()}
    return {path: text for path, text in fresh.items() if path.read_text(encoding="utf-8") != text}


def unused_parts() -> set[str]:
    """Parts that no page shows."""
    shown = {m[2] for path in reference_pages() for m in _BLOCK.finditer(path.read_text("utf-8"))}
    return set(RENDERERS) - shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    args = parser.parse_args()
    stale_texts = stale_pages()
    for path, text in stale_texts.items():
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(ROOT)}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    if unused := unused_parts():
        print(f"no page shows: {', '.join(sorted(unused))}")
    if args.check and stale_texts:
        print(f"run: {COMMAND}")
    return 1 if unused or (args.check and stale_texts) else 0


if __name__ == "__main__":
    sys.exit(main())
