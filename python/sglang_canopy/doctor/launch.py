"""Find a server's command line in the command of a container, a manifest or a Compose file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError

_MODULE = "sglang.launch_server"
_CONTAINERS = ("docker", "podman", "nerdctl", "kubectl", "srun", "apptainer", "singularity")
_ENVIRONMENT = ("-e", "--env")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DEFAULT = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
"""A variable of a Compose file, with or without a default."""
_BETWEEN = (";", "&&", "||", "|", "&")
_JOINED = re.compile(r"\d*>&\d")
"""A redirection of one stream to another."""
_REDIRECTED = re.compile(r"\d?>")
_HOW = "put 'canopy doctor' before the server's own command: sglang serve MODEL ..."


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    arguments: list[str]
    """Arguments of the server, without the launcher; a leading model has ``--model-path``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command or the file sets."""
    elsewhere: str = ""
    """The launcher, if it is not this machine's shell."""


def launch_of(words: Sequence[str]) -> Launch:
    """Return the server that ``words`` start: its command, a container's, or a YAML file.

    Raises ``CanopyError`` for a command or file without exactly one server.
    """
    words = list(words)
    file, _, name = words[0].partition("#") if len(words) == 1 else ("", "", "")
    if file.endswith((".yaml", ".yml")):
        return _from_file(Path(file), name)
    set_here = _assignments(words)
    words = words[len(set_here) :]
    if words[:1] == ["env"]:
        words = words[1:]
        more = _assignments(words)
        set_here, words = [*set_here, *more], words[len(more) :]
    environment = dict(_pair(word) for word in set_here)
    found = _server(words)
    program = Path(words[0]).name if words else ""
    if found is None:
        if not words or words[0].startswith("-"):
            return Launch(words, environment)
        if program in _CONTAINERS or program in ("bash", "sh", "python", "python3"):
            raise CanopyError(f"this {program} command has no 'sglang serve' or {_MODULE}; {_HOW}")
        if len(words) > 1 and not words[1].startswith("-"):
            raise CanopyError(f"{program!r} does not start an SGLang server; {_HOW}")
        return Launch(_with_model(words), environment)
    start, arguments = found
    before = words[:start]
    environment |= _options_of_container(before)
    elsewhere = program if program in _CONTAINERS else ""
    return Launch(arguments, environment, elsewhere)


def _server(words: Sequence[str]) -> tuple[int, list[str]] | None:
    """Return the index of the launcher in ``words`` and the arguments after it, or ``None``."""
    for at, word in enumerate(words):
        if Path(word).name == "sglang" and words[at + 1 : at + 2] == ["serve"]:
            return at, _with_model(words[at + 2 :])
        if word == "-m" and words[at + 1 : at + 2] == [_MODULE]:
            return at, _with_model(words[at + 2 :])
        if " " in word and (_MODULE in word or "sglang serve" in word):
            inner = _server(_shell_words(word))
            if inner is not None:
                return at, inner[1]
    return None


def _shell_words(text: str) -> list[str]:
    """Return the words of the first command in a shell script that starts a server."""
    for line in text.replace("\\\n", " ").splitlines():
        words = _commands(line)
        starts = [0, *(at + 1 for at, word in enumerate(words) if word in _BETWEEN)]
        for start, end in zip(starts, [*(at - 1 for at in starts[1:]), len(words)], strict=True):
            command = [word for word in words[start:end] if not _REDIRECTED.match(word)]
            if _server(command) is not None:
                return command
    return []


def _with_model(words: Sequence[str]) -> list[str]:
    """Return ``words``; a leading model gets ``--model-path``."""
    leading = words and not words[0].startswith("-")
    return ["--model-path", *words] if leading else list(words)


def _assignments(words: Sequence[str]) -> list[str]:
    count = next((i for i, word in enumerate(words) if not _ASSIGNED.fullmatch(word)), len(words))
    return list(words[:count])


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _options_of_container(words: Sequence[str]) -> dict[str, str]:
    """Return the variables set by ``-e NAME=VALUE`` and ``--env=NAME=VALUE``."""
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        given = words[at + 1] if word in _ENVIRONMENT and at + 1 < len(words) else ""
        text = value if option == "--env" and value else given
        if _ASSIGNED.fullmatch(text):
            found |= dict([_pair(text)])
    return found


# ---- files ----


def _from_file(file: Path, name: str) -> Launch:
    """Return the server of a Kubernetes manifest or a Compose file, by the container's ``name``.

    Raises ``CanopyError``.
    """
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        documents = list(yaml.safe_load_all(text))
        servers = [
            (label, f"{owner}/{label}", launch)
            for document in documents
            for owner, label, container in _containers(document)
            if (launch := _from_container(container, str(file))) is not None
        ]
    except RecursionError:
        raise CanopyError(f"{file} is nested too deeply, or contains itself") from None
    except (OSError, ValueError) as error:
        raise CanopyError(f"{file}: {error}") from None
    except yaml.YAMLError as error:
        if "{{" in text:
            raise CanopyError(f"{file} is a template; render it first (helm template)") from None
        raise CanopyError(f"{file} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if name:
        servers = [one for one in servers if name in one[:2]]
    if len(servers) == 1:
        return servers[0][2]
    if not servers:
        of = f" named {name!r}" if name else ""
        raise CanopyError(f"{file} has no container{of} that starts SGLang; {_HOW}")
    labels = [label for label, _, _ in servers]
    names = [label if labels.count(label) == 1 else whole for label, whole, _ in servers]
    raise CanopyError(
        f"{file} starts {len(servers)} servers; choose one: "
        + ", ".join(f"{file.name}#{one}" for one in names)
    )


def _containers(
    node: Any, label: str = "", owner: str = ""
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the containers below ``node``, in a pod's list or a Compose file's services.

    Each with its name, and the name of the object that it belongs to.
    """
    if isinstance(node, Mapping):
        metadata = node.get("metadata")
        if isinstance(metadata, Mapping) and metadata.get("name"):
            owner = str(metadata["name"])
        if "command" in node or "args" in node or "entrypoint" in node:
            yield owner, str(node.get("name") or label), node
        for key, value in node.items():
            yield from _containers(value, str(key), owner)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value, label, owner)


def _from_container(container: Mapping[str, Any], file: str) -> Launch | None:
    environment = dict(_variables(container.get("env") or container.get("environment")))
    words: list[str] = []
    for key in ("entrypoint", "command", "args"):
        words += _words_of(container.get(key), environment)
    found = _server(words)
    return None if found is None else Launch(found[1], environment, file)


def _variables(given: Any) -> Iterator[tuple[str, str]]:
    """Yield the variables of a pod (list of name and value) or of a Compose file."""
    if isinstance(given, Mapping):
        yield from ((str(name), str(value)) for name, value in given.items() if value is not None)
    for one in given if isinstance(given, list) else ():
        if isinstance(one, Mapping) and "value" in one:
            yield str(one.get("name")), str(one["value"])
        elif isinstance(one, str) and "=" in one:
            yield _pair(one)


def _words_of(given: Any, environment: Mapping[str, str]) -> list[str]:
    """Return the words of a command (list or string). Known variables are replaced."""

    def known(match: re.Match[str]) -> str:
        return environment.get(match[1], match[2] if match[2] is not None else match[0])

    if isinstance(given, list):
        words = [str(word) for word in given]
    else:
        words = _plain_words(str(given)) if given else []
    words = [_DEFAULT.sub(known, word) for word in words]
    return [re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word) for word in words]


def _commands(line: str) -> list[str]:
    """Return the words of a shell line. Operators between commands are words of their own."""
    parser = shlex.shlex(_JOINED.sub(" ", line), posix=True, punctuation_chars=";&|")
    parser.whitespace_split, parser.commenters = True, ""
    try:
        return list(parser)
    except ValueError:
        return line.split()


def _plain_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
