"""Python processes forked from one that has imported SGLang, which takes ten seconds of CPU time.

    done = run([sys.executable, "-m", "support.worker", ...], env={...})

A process starts as ``python -c``, ``python -m`` or ``python FILE`` would, with its own environment, folder
and files. SGLang is imported before any plugin loads, and all processes have one hash seed. These functions
use ``subprocess`` if a variable differs that SGLang may read while it is imported. A test of the import, of
hash seeds or of the start itself uses ``subprocess`` too.

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
FORK_CHILDREN_FLAG = "--fork-children"
LATE_READ_PREFIXES = ("CANOPY_", "SGLANG_HICACHE", "SGLANG_PLUGINS", "SGLANG_TIMEOUT_KEEP_ALIVE")
"""Beginnings of the variables that no import reads."""
MAX_JOB_DESCRIPTORS = 64
MAX_JOB_BYTES = 200_000
PR_SET_CHILD_SUBREAPER = 36

ADDRESS_VARIABLE = "TEST_FORKER"
"""Environment variable with the path of the socket that several test processes share."""

Program = Callable[[], None]


# The side of the tests.


@functools.cache
def _forker() -> socket.socket:
    """Connect to the process that forks; it ends with its last client. Processes that have an address in
    ``ADDRESS_VARIABLE`` share one; any other starts its own."""
    job_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = os.environ.get(ADDRESS_VARIABLE, "")  # without one, the system chooses
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
        job_socket.connect(listener.getsockname() or address)
    return job_socket


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
        self.args = [str(argument) for argument in args]
        self.returncode: int | None = None
        self._status_socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with open(os.devnull, "rb") as null_file, child_end:
            stdin_file = null_file if stdin == subprocess.DEVNULL else stdin
            out = _fileno(stdout)
            errors = out if stderr == subprocess.STDOUT else _fileno(stderr)
            descriptors = [_fileno(stdin_file), out, errors]
            job = {
                "arguments": self.args[1:],
                "environment": dict(os.environ if env is None else env),
                "folder": str(cwd or Path.cwd()),
                "starts_session": start_new_session,
                "descriptors": [0, 1, 2],
            }
            _send_job(_forker(), job, [child_end.fileno(), *descriptors])
        self.pid = int(self._status_socket.recv(64))

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
        if self.returncode is None and select.select([self._status_socket], [], [], timeout)[0]:
            self.returncode = int(self._status_socket.recv(64))
            self._status_socket.close()
        return self.returncode


def run(
    args: Sequence[str],
    *,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(args, capture_output=True, text=True)``, forked. Raises subprocess.TimeoutExpired."""
    process_class = Process if _may_fork(env) else subprocess.Popen
    with contextlib.ExitStack() as stack:
        stdin, out, errors = (stack.enter_context(TemporaryFile("w+")) for _ in range(3))
        stdin.write(input or "")
        stdin.seek(0)
        process = process_class(args, stdin=stdin, stdout=out, stderr=errors, env=env, cwd=cwd)
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
    return Process([args[0], FORK_CHILDREN_FLAG, *args[1:]], **options)


def _may_fork(env: Mapping[str, str] | None) -> bool:
    changed_names = {name for name, _ in set((env or os.environ).items()) ^ set(os.environ.items())}
    return all(name.startswith(LATE_READ_PREFIXES) for name in changed_names)


def _fileno(file: int | IO[Any]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _send_job(receiver: socket.socket, job: dict[str, Any], descriptors: Sequence[int]) -> None:
    socket.send_fds(receiver, [json.dumps(job).encode()], list(descriptors))


# The process that forks.


def _serve(job_socket: socket.socket, forks_orphans: bool) -> Program:
    """Fork a child for each job until no client is connected. In a child, return its program.
    ``job_socket`` is connected, or listens. The first descriptor of a job is a socket, which receives
    the child's process id and then its exit status. With ``forks_orphans`` it receives only the id:
    the parent is the process that sent the job."""
    status_sockets: dict[int, socket.socket] = {}
    open_sockets = [job_socket]
    wake_reader, wake_writer = socket.socketpair()
    for end in (wake_reader, wake_writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer.fileno())
    while True:
        ready = select.select([wake_reader, *open_sockets], [], [])[0]
        if wake_reader in ready:
            wake_reader.recv(4096)
            while status_sockets and (child_status := os.waitpid(-1, os.WNOHANG))[0]:
                status_socket = status_sockets.pop(child_status[0])
                _send_number(status_socket, os.waitstatus_to_exitcode(child_status[1]))
                status_socket.close()
            continue
        ready_socket = ready[0]
        if ready_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            open_sockets.append(ready_socket.accept()[0])
            continue
        text, descriptors, _, _ = socket.recv_fds(ready_socket, MAX_JOB_BYTES, MAX_JOB_DESCRIPTORS)
        if not text:
            open_sockets.remove(ready_socket)
            ready_socket.close()
            if open_sockets in ([], [job_socket]):
                os._exit(0)
            continue
        job = json.loads(text)
        status_socket = socket.socket(fileno=descriptors.pop(0))
        child = os.fork()
        if child and forks_orphans:
            os.waitpid(child, 0)
            status_socket.close()
        elif child:
            _send_number(status_socket, child)
            status_sockets[child] = status_socket
        elif forks_orphans and (middle_pid := os.getpid()) and (grandchild := os.fork()):
            _send_number(status_socket, grandchild)
            os._exit(0)
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            own_sockets = (wake_reader, wake_writer, status_socket)
            for inherited in (*open_sockets, *own_sockets, *status_sockets.values()):
                inherited.close()
            # SGLang's children end with their parent.
            while forks_orphans and os.getppid() == middle_pid:
                time.sleep(0.001)
            return _become(job, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _send_number(receiver: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the receiver has ended
        receiver.send(str(number).encode())


def _become(job: dict[str, Any], descriptors: list[int]) -> Program:
    """Set up this process as the job describes. Return its program, which has not run."""
    if job["starts_session"]:
        os.setsid()
    # First above all numbers in use: a descriptor may have the target number of another.
    first_unused = max(*descriptors, *job["descriptors"]) + 1
    copies = [_duplicate_above(descriptor, first_unused) for descriptor in descriptors]
    for copy, number in zip(copies, job["descriptors"], strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    arguments = job["arguments"]
    if arguments[0] == FORK_CHILDREN_FLAG:
        arguments.pop(0)
        child_program = _fork_children()
        if child_program is not None:
            return child_program
    return _load_program(arguments)


def _duplicate_above(descriptor: int, number: int) -> int:
    import fcntl

    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD, number)
    os.close(descriptor)
    return copy


def _load_program(arguments: list[str]) -> Program:
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    first, *others = arguments
    if first == "-m":
        sys.argv[:], sys.path[0] = [first, *others[1:]], os.getcwd()
        return lambda: runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
    if first == "-c":
        sys.argv[:], sys.path[0] = [first, *others[1:]], ""
        file_name, text = "<string>", others[0]
    else:
        sys.argv[:], sys.path[0] = arguments, str(Path(first).parent)
        main.__file__ = first
        file_name, text = first, Path(first).read_text(encoding="utf-8")
    return lambda: exec(compile(text, file_name, "exec"), main.__dict__)


def _fork_children() -> Program | None:
    """Fork the processes that ``multiprocessing`` spawns, from a copy of this process as it is now. A child is an orphan at
    first; then this process becomes its parent. In a child, return its program."""
    import ctypes

    server_end, forker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        server_end.close()
        return _serve(forker_end, forks_orphans=True)
    forker_end.close()
    original_spawn = multiprocessing.util.spawnv_passfds

    def spawn_forked(path: Any, args: Sequence[str | bytes], passed: Sequence[int]) -> int:
        arguments = [os.fsdecode(argument) for argument in args]
        if "--multiprocessing-fork" not in arguments:  # the resource tracker
            return original_spawn(path, args, passed)
        arguments = arguments[arguments.index("-c") :]  # the interpreter's flags already apply
        status_socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = [0, 1, 2, *passed]
        job = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "starts_session": False,
            "descriptors": descriptors,
        }
        with status_socket, child_end:
            _send_job(server_end, job, [child_end.fileno(), *descriptors])
            child_end.close()
            return int(status_socket.recv(64))

    multiprocessing.util.spawnv_passfds = spawn_forked  # type: ignore[assignment]
    return None


def _run_and_exit(program: Program) -> None:
    """Run ``program`` and exit as Python does, without the seconds that it takes to free all modules."""
    status = 0
    try:
        program()
    except SystemExit as exit_error:
        status = exit_error.code if isinstance(exit_error.code, int) else bool(exit_error.code)
        if isinstance(exit_error.code, str):
            print(exit_error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main(job_socket: socket.socket) -> Program:
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
    return _serve(job_socket, forks_orphans=False)


if __name__ == "__main__":
    if "-c" in sys.argv:
        arguments = [sys.executable, *sys.argv[sys.argv.index("-c") :]]
        sys.exit(Process(arguments, stdin=0, stdout=1, stderr=2).wait())
    _run_and_exit(_main(socket.socket(fileno=int(sys.argv[1]))))
