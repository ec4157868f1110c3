"""Python processes forked from one that has imported SGLang, which takes ten seconds of CPU time.

    done = run([sys.executable, "-m", "support.worker", ...], env={...})

A process starts as ``python -c``, ``python -m`` or ``python FILE`` would, with its own environment, folder
and files, and SGLang is imported before any plugin loads. All have one hash seed. A test of the import, of
hash seeds or of the start itself uses ``subprocess``, as these functions do with an environment that
SGLang may read while it is imported.

``python -m support.forked -c PROGRAM`` is ``python -c PROGRAM`` in a forked process: pytest's workers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
FORK_CHILDREN = "--fork-children"
LATE_READ_PREFIXES = ("CANOPY_", "SGLANG_HICACHE", "SGLANG_PLUGINS", "SGLANG_TIMEOUT_KEEP_ALIVE")
"""Beginnings of the variables that no import reads."""
MAX_ORDER_FILES = 64
MAX_ORDER_BYTES = 200_000
PR_SET_CHILD_SUBREAPER = 36

SHARED = "TEST_FORKER"
"""Variable with the path of a socket."""

Start = Callable[[], None]


# The side of the tests.


@functools.cache
def _forker() -> socket.socket:
    """Connect to the process that forks, which ends with the last process that is connected. All processes
    with an address in ``SHARED`` use one; any other has its own."""
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = os.environ.get(SHARED, "")  # without one, the system chooses
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:  # another process starts it
            time.sleep(0.1)
        else:
            listener.listen()
            subprocess.Popen(
                [sys.executable, "-m", "support.forked", str(listener.fileno())],
                cwd=TESTS, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
                # no threads of numpy's: a fork loses them
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        orders.connect(listener.getsockname() or address)
    return orders


class Process:
    """A forked process with the part of ``subprocess.Popen`` that tests use."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = [str(word) for word in args]
        self.returncode: int | None = None
        self._status, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with open(os.devnull, "rb") as null, child_end:
            source = null if stdin == subprocess.DEVNULL else stdin
            out = _fileno(stdout)
            files = [_fileno(source), out, out if stderr == subprocess.STDOUT else _fileno(stderr)]
            order = {
                "arguments": self.args[1:],
                "environment": dict(os.environ if env is None else env),
                "folder": str(cwd or Path.cwd()),
                "session": start_new_session,
                "files": [0, 1, 2],
            }
            _send(_forker(), order, [child_end.fileno(), *files])
        self.pid = int(self._status.recv(64))

    def poll(self) -> int | None:
        return self._poll_status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        status = self._poll_status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _poll_status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.recv(64))
            self._status.close()
        return self.returncode


def run(
    args: Sequence[str],
    *,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(args, capture_output=True, text=True)``, forked. Raises as it does."""
    start = Process if _may_fork(env) else subprocess.Popen
    with contextlib.ExitStack() as files:
        stdin, out, errors = (files.enter_context(TemporaryFile("w+")) for _ in range(3))
        stdin.write(input or "")
        stdin.seek(0)
        process = start(args, stdin=stdin, stdout=out, stderr=errors, env=env, cwd=cwd)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(args, status, out.read(), errors.read())


def serve(args: Sequence[str], **options: Any) -> Process | subprocess.Popen[bytes]:
    """``subprocess.Popen`` of a server, forked with the processes that SGLang spawns for it. Ranks
    are spawned, since each needs a hash seed of its own."""
    if "--tp" in args or "--dp" in args or not _may_fork(options["env"]):
        return subprocess.Popen(args, **options)
    return Process([args[0], FORK_CHILDREN, *args[1:]], **options)


def _may_fork(env: Mapping[str, str] | None) -> bool:
    changed = {name for name, _ in set((env or os.environ).items()) ^ set(os.environ.items())}
    return all(name.startswith(LATE_READ_PREFIXES) for name in changed)


def _fileno(file: int | IO[Any]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _send(receiver: socket.socket, order: dict[str, Any], files: Sequence[int]) -> None:
    socket.send_fds(receiver, [json.dumps(order).encode()], list(files))


# The process that forks.


def _serve(orders: socket.socket, orphan: bool) -> Start:
    """Fork a child for each order until no other side is connected. In a child, return its start.
    ``orders`` is connected, or listens. The first file of an order is a socket, which receives the
    child's number and then its exit status; of an ``orphan``, only its number: its parent is the
    reaper, the process that orders it."""
    running: dict[int, socket.socket] = {}
    sources = [orders]
    wake_reader, wake_writer = socket.socketpair()
    for end in (wake_reader, wake_writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer.fileno())
    while True:
        ready = select.select([wake_reader, *sources], [], [])[0]
        if wake_reader in ready:
            wake_reader.recv(4096)
            while running and (child_status := os.waitpid(-1, os.WNOHANG))[0]:
                status = running.pop(child_status[0])
                _send_number(status, os.waitstatus_to_exitcode(child_status[1]))
                status.close()
            continue
        source = ready[0]
        if source.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sources.append(source.accept()[0])
            continue
        text, files, _, _ = socket.recv_fds(source, MAX_ORDER_BYTES, MAX_ORDER_FILES)
        if not text:
            sources.remove(source)
            source.close()
            if sources in ([], [orders]):
                os._exit(0)
            continue
        order = json.loads(text)
        status = socket.socket(fileno=files.pop(0))
        child = os.fork()
        if child and orphan:
            os.waitpid(child, 0)
            status.close()
        elif child:
            _send_number(status, child)
            running[child] = status
        elif orphan and (middle_pid := os.getpid()) and (grandchild := os.fork()):
            _send_number(status, grandchild)
            os._exit(0)
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (*sources, wake_reader, wake_writer, status, *running.values()):
                inherited.close()
            while orphan and os.getppid() == middle_pid:  # whose end would kill a child of SGLang
                time.sleep(0.001)
            return _become(order, files)
        for file in files:
            os.close(file)


def _send_number(receiver: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the other side has ended
        receiver.send(str(number).encode())


def _become(order: dict[str, Any], files: list[int]) -> Start:
    """Turn this process into the ordered one, but for its program, which is returned."""
    if order["session"]:
        os.setsid()
    # First above all numbers in use, since a file may have the target number of another.
    first_unused = max(*files, *order["files"]) + 1
    copies = [_duplicate_above(file, first_unused) for file in files]
    for file, number in zip(copies, order["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    words = order["arguments"]
    if words[0] == FORK_CHILDREN:
        words.pop(0)
        start = _fork_children()
        if start is not None:
            return start
    return _load_program(words)


def _duplicate_above(file: int, number: int) -> int:
    import fcntl

    copy = fcntl.fcntl(file, fcntl.F_DUPFD, number)
    os.close(file)
    return copy


def _load_program(words: list[str]) -> Start:
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    mode, *arguments = words
    if mode == "-m":
        sys.argv[:], sys.path[0] = [mode, *arguments[1:]], os.getcwd()
        return lambda: runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    if mode == "-c":
        sys.argv[:], sys.path[0] = [mode, *arguments[1:]], ""
        name, text = "<string>", arguments[0]
    else:
        sys.argv[:], sys.path[0] = words, str(Path(mode).parent)
        main.__file__ = mode
        name, text = mode, Path(mode).read_text(encoding="utf-8")
    return lambda: exec(compile(text, name, "exec"), main.__dict__)


def _fork_children() -> Start | None:
    """Fork what ``multiprocessing`` spawns from a process as clean as this one is now. Such a child
    is an orphan at first; this process becomes its parent. In a child, return its start."""
    import ctypes

    server_end, forker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        server_end.close()
        return _serve(forker_end, orphan=True)
    forker_end.close()
    original_spawn = multiprocessing.util.spawnv_passfds

    def spawn_forked(path: Any, args: Sequence[str | bytes], passed: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in args]
        if "--multiprocessing-fork" not in words:  # the resource tracker
            return original_spawn(path, args, passed)
        words = words[words.index("-c") :]  # the interpreter's own flags hold already
        status, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [0, 1, 2, *passed]
        order = {
            "arguments": words,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "session": False,
            "files": files,
        }
        with status, child_end:
            _send(server_end, order, [child_end.fileno(), *files])
            child_end.close()
            return int(status.recv(64))

    multiprocessing.util.spawnv_passfds = spawn_forked  # type: ignore[assignment]
    return None


def _run_and_exit(program: Start) -> None:
    """Run ``program`` and exit as Python does, without the seconds that it takes to free all modules."""
    status = 0
    try:
        program()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else bool(leaving.code)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main(orders: socket.socket) -> Start:
    import setproctitle
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    setproctitle.getproctitle()  # finds the title's place in an environment that is not changed yet
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"{threads} threads run after the import of SGLang: a fork loses them")
    return _serve(orders, orphan=False)


if __name__ == "__main__":
    if "-c" in sys.argv:
        words = [sys.executable, *sys.argv[sys.argv.index("-c") :]]
        sys.exit(Process(words, stdin=0, stdout=1, stderr=2).wait())
    _run_and_exit(_main(socket.socket(fileno=int(sys.argv[1]))))
