"""Starts, watches and restarts the engine process; carries requests and events.

Runs in the app's process. Each engine process has three daemon threads here: a writer
(requests, so that a caller never waits for a full pipe), a reader (events), and a
watcher (silence). Whatever goes wrong ends in one place: the process is killed if it
still runs, the reader meets the end of its pipe, and every open call fails with one
`EngineProcessError`. Knows nothing of chats or terminals.

Order of a shutdown: cancel open calls, send `Shutdown`, close the engine's standard
input, wait, terminate, wait, kill. An app that dies without all that closes the pipe,
which the engine takes as a shutdown too.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mira_engine.api import (
    PROTOCOL_VERSION,
    Cancel,
    DescribeMachine,
    DescribeModel,
    EngineProcessError,
    EngineReady,
    EvaluateModel,
    Generate,
    LoadModel,
    Notice,
    PlanModel,
    PrepareModel,
    ProfileModel,
    Reconfigure,
    Request,
    RequestFailed,
    Shutdown,
    decode,
    encode,
)

from .engine_call import EngineCall
from .engine_log import log_path, log_tail, make_log_file

_MAX_QUEUED_REQUESTS = 64
_CHILD_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
_OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""What Windows has instead of sessions."""

_OUT_OF_MEMORY = frozenset({0xC0000017, 0xC000012D})
"""Exit codes of Windows: STATUS_NO_MEMORY, STATUS_COMMITMENT_LIMIT."""

_MEMORY_HINT = (
    "What was finished is kept: try again. If it happens again the machine may be out of "
    "memory; then give a smaller budget."
)


class EngineProcess:
    """One engine process, from its start to its end. Not restarted: a new one is made."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        heartbeat_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_timeout_s = start_timeout_s
        self._log_path = log_path
        self._lock = threading.Lock()
        self._calls: dict[str, EngineCall] = {}
        self._outbox: queue.Queue[Request] = queue.Queue(_MAX_QUEUED_REQUESTS)
        self._is_ready = threading.Event()
        self._has_ended = threading.Event()
        self._is_closing = False
        self._num_events = 0
        self._error: EngineProcessError | None = None
        self._process_notices: dict[str, Notice] = {}
        self._load_notices: dict[str, Notice] = {}
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **_CHILD_ENVIRONMENT},
                    # A Ctrl-C in the terminal is for the app, which cancels in order.
                    start_new_session=True,
                    creationflags=_OWN_GROUP,
                )
            except OSError as error:
                raise EngineProcessError(
                    f"The engine process cannot be started: {error}.",
                    hint="Install mira-chat again.",
                ) from error
        self._threads = [
            threading.Thread(target=target, name=f"engine-{name}", daemon=True)
            for name, target in (
                ("writer", self._write),
                ("reader", self._read),
                ("watcher", self._watch),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def error(self) -> EngineProcessError | None:
        """Why the process ended, or `None` while it runs and after an ordered shutdown."""
        return self._error if self._has_ended.is_set() else None

    @property
    def is_ready(self) -> bool:
        """Whether the process has introduced itself; only then it reads requests."""
        return self._is_ready.is_set()

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Notices in force: of the process, and of the model loaded last."""
        with self._lock:
            return tuple({**self._process_notices, **self._load_notices}.values())

    def send(self, request: Request, call: EngineCall | None = None) -> None:
        """Queues a request without blocking; `call` gets the events that answer it."""
        with self._lock:
            if call is not None:
                if self._has_ended.is_set():
                    call.fail(self._error or EngineProcessError("The engine process has ended."))
                    return
                self._calls[call.request_id] = call
                if isinstance(request, LoadModel):
                    self._load_notices = {}
        try:
            self._outbox.put_nowait(request)
        except queue.Full:
            self._break("The engine process does not read its requests.", "Start mira-chat again.")

    def close(self, grace_s: float) -> None:
        """Ends the process in order; blocks for at most about `grace_s` + 1 seconds."""
        self._is_closing = True
        with self._lock:
            open_ids = list(self._calls)
        if self._is_ready.is_set():
            for request_id in open_ids:
                self.send(Cancel(request_id=request_id))
            self.send(Shutdown())
        elif self._child.poll() is None:
            self._child.terminate()
        stops = ((None, grace_s), (self._child.terminate, 0.5), (self._child.kill, 0.5))
        for stop, wait_s in stops:
            if stop is not None:
                stop()
            if self._has_ended.wait(wait_s):
                break
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)

    # -- threads

    def _write(self) -> None:
        assert self._child.stdin is not None
        try:
            with self._child.stdin as pipe:
                while not self._has_ended.is_set():
                    if not self._is_ready.wait(timeout=0.1):
                        continue
                    try:
                        request = self._outbox.get(timeout=0.1)
                    except queue.Empty:
                        continue
                    pipe.write(encode(request).encode("ascii") + b"\n")
                    pipe.flush()
                    if isinstance(request, Shutdown):
                        return
        except (OSError, ValueError):
            # The engine is gone; the reader finds out why and tells the open calls.
            return

    def _read(self) -> None:
        assert self._child.stdout is not None
        try:
            with self._child.stdout as pipe:
                for line in pipe:
                    self._num_events += 1
                    try:
                        event = decode(line.decode("utf-8", "replace"))
                        self._dispatch(event)
                    except EngineProcessError as error:
                        self._break(error.message, error.hint)
                        break
        finally:
            # Whatever went wrong here: nobody may wait for this process any longer.
            self._end()

    def _dispatch(self, event: object) -> None:
        if not self._is_ready.is_set():
            if not isinstance(event, EngineReady):
                raise EngineProcessError(
                    "The engine process did not introduce itself.", hint="Install mira-chat again."
                )
            if event.protocol_version != PROTOCOL_VERSION:
                raise EngineProcessError(
                    f"The engine speaks protocol {event.protocol_version}, "
                    f"this app speaks {PROTOCOL_VERSION}.",
                    hint="App and engine come from different versions; install again.",
                )
            self._is_ready.set()
            return
        if isinstance(event, RequestFailed) and not event.request_id:
            # A request it could not read, so its call would wait for ever.
            raise EngineProcessError(event.message, hint=event.hint)
        with self._lock:
            if isinstance(event, Notice):
                # Requests are answered in order, so it belongs to the oldest open call.
                call = next(iter(self._calls.values()), None)
                kept = self._process_notices if call is None else self._load_notices
                kept[event.code] = event
            else:
                call = self._calls.get(getattr(event, "request_id", ""))
            if call is None:
                return
            call.deliver(event)
            if call.is_done:
                del self._calls[call.request_id]

    def _watch(self) -> None:
        """Kills a silent engine.

        Silence is added up in short steps, each counted at most twice its length: after
        the app itself was suspended the engine gets its time again.
        """
        step_s = min(self._heartbeat_timeout_s, self._start_timeout_s) / 10
        silent_s, seen, before = 0.0, -1, time.monotonic()
        while not self._has_ended.wait(step_s):
            now = time.monotonic()
            silent_s += min(now - before, 2 * step_s)
            before = now
            if self._num_events != seen:
                seen, silent_s = self._num_events, 0.0
            if not self._is_ready.is_set():
                if silent_s > self._start_timeout_s:
                    self._break(
                        f"The engine process did not start within {self._start_timeout_s:g} s.",
                        "The machine may be busy; try again.",
                    )
            elif silent_s > self._heartbeat_timeout_s and not self._is_closing:
                self._break(
                    f"The engine process gave no sign of life for {silent_s:.0f} s.",
                    _MEMORY_HINT,
                )

    def _break(self, message: str, hint: str) -> None:
        try:
            text = message + self._tail_text()
            with self._lock:
                if self._error is None:
                    self._error = EngineProcessError(text, hint=hint)
        finally:
            if self._child.poll() is None:
                self._child.kill()

    def _end(self) -> None:
        """Runs once, in the reader, when the engine's standard output has ended."""
        try:
            code = self._wait_or_kill()
            if self._error is None and not self._is_closing:
                death = self._death_error(code)
                with self._lock:
                    self._error = self._error or death
        finally:
            with self._lock:
                open_calls = list(self._calls.values())
                self._calls.clear()
                self._has_ended.set()
            closed = EngineProcessError("The engine process was shut down.")
            for call in open_calls:
                call.fail(self._error or closed)

    def _wait_or_kill(self) -> int:
        try:
            return self._child.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            if self._is_closing:
                self._child.kill()
            else:
                self._break("The engine process can no longer be heard.", "Try again.")
            return self._child.wait()

    def _death_error(self, code: int) -> EngineProcessError:
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            message = f"The engine process was killed by {name}."
        else:
            shown = f"{code:#x}" if code >= 1 << 31 else str(code)  # as Windows names its own
            message = f"The engine process ended with exit code {shown}."
        hint = f"Its log is {self._log_path}."
        if code == -getattr(signal, "SIGKILL", 9) or code in _OUT_OF_MEMORY:
            hint = f"{_MEMORY_HINT} {hint}"
        return EngineProcessError(message + self._tail_text(), hint=hint)

    def _tail_text(self) -> str:
        lines = log_tail(self._log_path, self._log_start)
        return "\nLast lines of the engine:\n  " + "\n  ".join(lines) if lines else ""


class EngineClient:
    """The engine, whichever process it currently is.

    Nothing here blocks except `close`, `restart` and iterating over a call.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_dir: Path,
        heartbeat_timeout_s: float = 20.0,
        start_timeout_s: float = 180.0,
    ) -> None:
        self._command = list(command)
        self._log_dir = log_dir
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_timeout_s = start_timeout_s
        self._process: EngineProcess | None = None
        self._ids = itertools.count(1)

    def start(self) -> None:
        """Starts the process; returns before it is ready, requests wait for that.

        Raises:
            EngineProcessError: The command cannot be run.
        """
        if self._process is None:
            self._process = EngineProcess(
                self._command,
                make_log_file(self._log_dir),
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                start_timeout_s=self._start_timeout_s,
            )

    def restart(self) -> None:
        """Ends what is left of the process and starts a new one."""
        self.close()
        self.start()

    def close(self, grace_s: float = 3.0) -> None:
        """Ends the process, if there is one, in the order the module names."""
        process, self._process = self._process, None
        if process is not None:
            process.close(grace_s)

    @property
    def is_ready(self) -> bool:
        """Whether the process has introduced itself and takes requests."""
        return self._process is not None and self._process.is_ready

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not died."""
        return self._process is not None and self._process.error is None

    @property
    def lost(self) -> EngineProcessError | None:
        """Why the process died by itself, else `None`."""
        return self._process.error if self._process is not None else None

    @property
    def log_path(self) -> Path:
        """Where the engine process of this app process writes its log."""
        return log_path(self._log_dir)

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process is not None else None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Notices in force: of the process, and of the model loaded last."""
        return self._process.notices if self._process is not None else ()

    def new_request_id(self) -> str:
        """Returns an id no other request of this client has."""
        return f"r{next(self._ids)}"

    def submit(
        self,
        request: PrepareModel
        | LoadModel
        | ProfileModel
        | Generate
        | Reconfigure
        | PlanModel
        | DescribeModel
        | DescribeMachine
        | EvaluateModel,
    ) -> EngineCall:
        """Sends a request; the call returned receives its events. Starts a process if none."""
        self.start()
        assert self._process is not None
        call = EngineCall(request.request_id)
        self._process.send(request, call)
        return call

    def cancel(self, call: EngineCall) -> None:
        """Asks the engine to stop a call; the call then ends by itself."""
        if self._process is not None and not call.is_done:
            self._process.send(Cancel(request_id=call.request_id))

    def __enter__(self) -> EngineClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
