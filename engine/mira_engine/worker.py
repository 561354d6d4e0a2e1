"""The engine process: requests in on stdin, events out on stdout, the log on stderr.

Three threads. The main thread does one job at a time, in order; the reader thread
takes requests and applies `Cancel` at once; the heart thread sends `Heartbeat` every
second, also while the engine computes. Standard output belongs to the protocol alone:
its descriptor is set aside at the start and descriptor 1 then points at stderr, so that
nothing a library prints can break a line. Which job runs and who was asked to stop is
known to `mira_engine.running_job`, the engine in use to `mira_engine.engine_seat`.

Shut-down order: end of input or `Shutdown` cancels the running job, the main thread
finishes it, closes the engine, stops the heart, and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from . import wire
from .engine_seat import EngineSeat
from .errors import MemoryShortageError, MiraError
from .events import (
    PROTOCOL_VERSION,
    Cancel,
    DescribeMachine,
    DescribeModel,
    EngineReady,
    EvaluateModel,
    EvaluationDone,
    EvaluationProgress,
    Event,
    Generate,
    Heartbeat,
    LoadModel,
    MachineDescribed,
    PlanModel,
    PrepareModel,
    ProfileDone,
    ProfileModel,
    ProfileProgress,
    Reconfigure,
    Request,
    RequestFailed,
    Shutdown,
)
from .library import ModelLibrary
from .running_job import RunningJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Engine

_HEARTBEAT_S = 1.0

_Job = (
    PrepareModel
    | LoadModel
    | ProfileModel
    | Generate
    | Reconfigure
    | PlanModel
    | DescribeModel
    | DescribeMachine
    | EvaluateModel
)


class EventWriter:
    """Writes events as lines; safe from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Writes one event and flushes it.

        Raises:
            BrokenPipeError: The app is gone.
        """
        line = wire.encode(event)
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except OSError as error:  # Windows calls it an invalid argument.
                raise BrokenPipeError from error


class Worker:
    """Runs jobs for one app.

    Args:
        library: Where models are.
        writer: Takes events.
        cache_dir: Where native kernels and compiled steps are kept, `None` for none.
    """

    def __init__(
        self, library: ModelLibrary, writer: EventWriter, cache_dir: Path | None = None
    ) -> None:
        self._library = library
        self._cache_dir = cache_dir
        self._writer = writer
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._running = RunningJob()
        self._seat = EngineSeat(self._running, writer.send, cache_dir)

    @property
    def engine(self) -> Engine | None:
        """The engine in use, `None` where none is loaded."""
        return self._seat.engine

    # -- reader thread -------------------------------------------------------------------

    def read_requests(self, stream: TextIO) -> None:
        """Takes requests until the input ends."""
        for line in stream:
            if not line.strip():
                continue
            try:
                request = wire.decode(line)
            except MiraError as error:
                self._fail("", error)
                continue
            if isinstance(request, Shutdown):
                break
            self._accept(request)
        self._running.cancel_for_good()
        self._jobs.put(None)

    def _accept(self, request: Request | Event) -> None:
        if isinstance(request, Cancel):
            self._running.cancel(request.request_id)
        elif isinstance(request, _Job):
            self._jobs.put(request)

    # -- main thread ---------------------------------------------------------------------

    def run(self) -> None:
        """Does jobs until told to stop, then closes the engine."""
        while True:
            job = self._jobs.get()
            if job is None:
                break
            self._run_job(job)
        self.close()

    def close(self) -> None:
        """Gives the engine up."""
        self._seat.empty()

    def _run_job(self, job: _Job) -> None:
        is_memory_short = False
        try:
            self._running.begin(job.request_id)
            self._do(job)
        except MemoryShortageError as error:
            is_memory_short = True
            self._fail(job.request_id, error)
            traceback.print_exception(error)
        except MiraError as error:
            self._fail(job.request_id, error)
        except Exception as error:
            shortage = _shortage(error)
            if shortage is None:
                raise
            is_memory_short = True
            self._fail(job.request_id, shortage)
            traceback.print_exception(error)
        finally:
            self._running.end(job.request_id)
        if is_memory_short:
            with contextlib.suppress(MemoryError, ImportError):
                from .runtime.shortage import give_memory_back

                give_memory_back()

    def _do(self, job: _Job) -> None:
        match job:
            case PrepareModel():
                self._prepare(job)
            case LoadModel():
                self._seat.load(job, self._library.resolve(job.model))
            case PlanModel():
                self._plan(job)
            case DescribeModel():
                self._describe_model(job)
            case ProfileModel():
                self._profile(job)
            case Reconfigure():
                self._seat.reconfigure(job)
            case DescribeMachine():
                self._describe_machine(job)
            case EvaluateModel():
                self._evaluate(job)
            case Generate():
                self._generate(job)

    def _fail(self, request_id: str, error: MiraError) -> None:
        self._writer.send(RequestFailed(request_id=request_id, **error.to_fields()))

    def _is_cancelled(self, job: _Job) -> Callable[[], bool]:
        """Returns what tells whether a job was cancelled."""
        return partial(self._running.is_cancelled, job.request_id)

    def _prepare(self, job: PrepareModel) -> None:
        from .preparing import Preparation

        Preparation(job, self._library, self._writer.send, self._running).run()

    def _describe_model(self, job: DescribeModel) -> None:
        from .model_report import describe

        home = self._library.resolve(job.model)
        self._writer.send(describe(home, job, is_cancelled=self._is_cancelled(job)))

    def _plan(self, job: PlanModel) -> None:
        from .model_report import locate
        from .planning import plan_model

        home = locate(self._library.resolve(job.model), is_cancelled=self._is_cancelled(job))
        self._writer.send(
            plan_model(home, job, data_dir=self._library.data_dir, cache_dir=self._cache_dir)
        )

    def _describe_machine(self, job: DescribeMachine) -> None:
        from .machine_report import describe_machine

        facts = describe_machine(self._library, job, cache_dir=self._cache_dir)
        self._writer.send(MachineDescribed(request_id=job.request_id, facts=facts))

    def _profile(self, job: ProfileModel) -> None:
        from .profiling import FULL_SWEEP, QUICK_SWEEP, profile_model

        home = self._library.resolve(job.model)
        self._seat.empty()
        profile = profile_model(
            home,
            job.config,
            QUICK_SWEEP if job.is_quick else FULL_SWEEP,
            cache_dir=self._cache_dir,
            on_progress=lambda done, total, detail: self._writer.send(
                ProfileProgress(request_id=job.request_id, done=done, total=total, detail=detail)
            ),
            on_notice=self._writer.send,
            is_cancelled=self._is_cancelled(job),
        )
        self._writer.send(ProfileDone(request_id=job.request_id, model=job.model, profile=profile))

    def _evaluate(self, job: EvaluateModel) -> None:
        from .evaluation import evaluate_model

        home = self._library.resolve(job.model)
        self._seat.empty()
        report = evaluate_model(
            home,
            job.config,
            precisions=job.precisions,
            files=[Path(file) for file in job.files],
            max_tokens=job.max_tokens,
            on_progress=lambda done, total, detail: self._writer.send(
                EvaluationProgress(request_id=job.request_id, done=done, total=total, detail=detail)
            ),
            on_notice=self._writer.send,
            is_cancelled=self._is_cancelled(job),
        )
        self._writer.send(EvaluationDone(request_id=job.request_id, report=report))

    def _generate(self, job: Generate) -> None:
        from .memory_retry import LastingReplies

        seat = self._seat
        replier = LastingReplies(
            seat.loaded, partial(seat.reload, job.request_id), self._writer.send
        )
        events = seat.loaded().stream(
            job.request_id,
            job.messages,
            job.sampling,
            is_residency_wanted=job.is_residency_wanted,
            replier=replier,
        )
        for event in events:
            self._writer.send(event)
        seat.loaded().take_compiled()


def _shortage(error: Exception) -> MemoryShortageError | None:
    """Returns what to tell of an error that is a shortage of memory, `None` for any other."""
    try:
        from .runtime.shortage import as_shortage
    except (MemoryError, ImportError):  # Not even torch can be loaded.
        is_short = isinstance(error, MemoryError) or "failed to map segment" in str(error)
        return (
            MemoryShortageError(
                "Memory ran out before the model was loaded: the libraries alone take more.",
                hint="Close other programs, or lift the limit (ulimit -v).",
            )
            if is_short
            else None
        )
    return as_shortage(error, "in the middle of this")


def _beat(writer: EventWriter, stopped: threading.Event) -> None:
    started = time.monotonic()
    while not stopped.wait(_HEARTBEAT_S):
        try:
            writer.send(Heartbeat(uptime_s=time.monotonic() - started))
        except BrokenPipeError:
            return  # The app is gone; the main thread finds out as well.


def _claim_stdout() -> TextIO:
    """Sets the protocol's descriptor aside and points descriptor 1 at stderr."""
    protocol = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(protocol, "w", encoding="utf-8", newline="\n")


def main(argv: list[str] | None = None) -> int:
    """Runs the engine process. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="mira_engine.worker")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--cache-dir", type=Path, default=None)
    arguments = parser.parse_args(argv)
    writer = EventWriter(_claim_stdout())
    worker = Worker(ModelLibrary(arguments.data_dir), writer, arguments.cache_dir)
    writer.send(EngineReady(protocol_version=PROTOCOL_VERSION, pid=os.getpid()))
    stopped = threading.Event()
    heart = threading.Thread(target=_beat, args=(writer, stopped), name="mira-heart", daemon=True)
    reader = threading.Thread(
        target=worker.read_requests, args=(sys.stdin,), name="mira-requests", daemon=True
    )
    heart.start()
    reader.start()
    try:
        worker.run()
    except BrokenPipeError:
        return 1  # The app is gone; nobody is left to tell.
    finally:
        stopped.set()
    return 0


if __name__ == "__main__":
    sys.exit(main())
