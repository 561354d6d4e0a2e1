"""The engine process: requests in on stdin, events out on stdout, the log on stderr.

Three threads. The main thread does one job at a time, in order; the reader thread
takes requests and applies `Cancel` at once; the heart thread sends `Heartbeat` every
second, also while the engine computes. Standard output belongs to the protocol alone:
its descriptor is set aside at the start and descriptor 1 then points at stderr, so that
nothing a library prints can break a line.

Shut-down order: end of input or `Shutdown` cancels the running job, the main thread
finishes it, closes the engine, stops the heart, and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from . import wire
from .errors import CancelledError, ConfigError, MemoryShortageError, MiraError
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
    ModelLoaded,
    Notice,
    PlanModel,
    PrepareDone,
    PrepareModel,
    PrepareProgress,
    ProfileDone,
    ProfileModel,
    ProfileProgress,
    Reconfigure,
    Request,
    RequestFailed,
    Shutdown,
)
from .library import ModelHome, ModelLibrary
from .types import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .checkpoint.progress import OnProgress
    from .config import EngineConfig
    from .engine import Engine

_HEARTBEAT_S = 1.0
_PROGRESS_INTERVAL_S = 0.2

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
        self._lock = threading.Lock()
        self._running_id: str | None = None
        self._cancelled_ids: set[str] = set()
        self._ending = threading.Event()
        self._engine: Engine | None = None
        self._model = ""
        """As it was named when it was loaded."""
        self._asked: EngineConfig | None = None
        """What was asked for then or since; the engine's own may ask for less memory."""

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
        self._ending.set()
        self._cancel_all()
        self._jobs.put(None)

    def _accept(self, request: Request | Event) -> None:
        if isinstance(request, Cancel):
            with self._lock:
                self._cancelled_ids.add(request.request_id)
                is_running = self._running_id == request.request_id
                engine = self._engine
            if is_running and engine is not None:
                engine.cancel()
        elif isinstance(request, _Job):
            self._jobs.put(request)

    def _cancel_all(self) -> None:
        with self._lock:
            if self._running_id is not None:
                self._cancelled_ids.add(self._running_id)
            engine = self._engine
        if engine is not None:
            engine.cancel()

    # -- main thread ---------------------------------------------------------------------

    def run(self) -> None:
        """Does jobs until told to stop, then closes the engine."""
        while True:
            job = self._jobs.get()
            if job is None:
                break
            self._run_job(job)
        self._unload()

    def _run_job(self, job: _Job) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.clear_cancel()
            self._running_id = job.request_id
            is_cancelled = job.request_id in self._cancelled_ids
        is_memory_short = False
        try:
            if is_cancelled:
                raise CancelledError("Stopped before it began.")
            if isinstance(job, PrepareModel):
                self._prepare(job)
            elif isinstance(job, LoadModel):
                self._load(job)
            elif isinstance(job, PlanModel):
                self._plan(job)
            elif isinstance(job, DescribeModel):
                self._describe_model(job)
            elif isinstance(job, ProfileModel):
                self._profile(job)
            elif isinstance(job, Reconfigure):
                self._reconfigure(job)
            elif isinstance(job, DescribeMachine):
                self._describe_machine(job)
            elif isinstance(job, EvaluateModel):
                self._evaluate(job)
            else:
                self._generate(job)
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
            with self._lock:
                self._running_id = None
                self._cancelled_ids.discard(job.request_id)
        if is_memory_short:
            with contextlib.suppress(MemoryError, ImportError):
                from .runtime.shortage import give_memory_back

                give_memory_back()

    def _is_cancelled(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._cancelled_ids

    def _fail(self, request_id: str, error: MiraError) -> None:
        self._writer.send(RequestFailed(request_id=request_id, **error.to_fields()))

    def _prepare(self, job: PrepareModel) -> None:
        from .calibrate import read_prompts
        from .checkpoint.gptq_process import require_gptqmodel
        from .prepare import preflight, prepare

        if job.draft is Rounding.GPTQ:
            require_gptqmodel()
        is_deleted = job.is_download_deleted
        if job.draft is Rounding.GPTQ or job.draft_from is not None:
            if is_deleted:
                raise ConfigError(
                    "A GPTQ draft is made from the downloaded weights, so they cannot be deleted "
                    "before.",
                    hint="Leave --delete-download out; mira-chat rm frees them later.",
                )
            is_deleted = False
        home = self._library.resolve(job.model)
        prompts = read_prompts(Path(job.calibration)) if job.calibration else None
        preflight(home)
        if home.note:
            self._writer.send(Notice(code="name", text=home.note))
        last_sent = 0.0
        last_step = ""

        def on_progress(step: str, done: int, total: int, unit: str, detail: str) -> None:
            nonlocal last_sent, last_step
            now = time.monotonic()
            if step == last_step and done != total and now - last_sent < _PROGRESS_INTERVAL_S:
                return
            last_sent, last_step = now, step
            self._writer.send(
                PrepareProgress(
                    request_id=job.request_id,
                    step=step,
                    done=done,
                    total=total,
                    unit=unit,
                    detail=detail,
                )
            )

        prepare(
            home,
            job.precision,
            draft=job.draft,
            on_progress=on_progress,
            is_cancelled=lambda: self._is_cancelled(job.request_id),
            is_download_deleted=is_deleted,
            on_note=lambda code, text: self._writer.send(Notice(code=code, text=text)),
        )
        if job.is_predicting:
            self._calibrate(job, home, prompts, on_progress)
        if job.draft is Rounding.GPTQ or job.draft_from is not None:
            self._make_draft(job, prompts, on_progress)
        self._writer.send(
            PrepareDone(request_id=job.request_id, model=job.model, precision=job.precision)
        )

    def _calibrate(
        self,
        job: PrepareModel,
        home: ModelHome,
        prompts: Sequence[str] | None,
        on_progress: OnProgress,
    ) -> None:
        """Makes the predictors. What hinders that is told, and hinders no chat."""
        from .calibrate import calibrate
        from .memory_retry import SHRUNK

        def tell(notice: Notice) -> None:
            if notice.code == SHRUNK:  # What else that load falls back from is of no chat.
                self._writer.send(notice)

        try:
            calibrate(
                home,
                job.precision,
                prompts=prompts,
                on_progress=on_progress,
                on_notice=tell,
                is_cancelled=lambda: self._is_cancelled(job.request_id),
            )
        except CancelledError:
            raise
        except MiraError as error:
            text = f"No predictors were made: {error} The model chats without them."
            self._writer.send(Notice(code="no-predictors", text=text))

    def _make_draft(
        self, job: PrepareModel, prompts: Sequence[str] | None, on_progress: OnProgress
    ) -> None:
        """Makes the draft by GPTQ, last: all else is there and in use meanwhile."""
        from .gptq import make_gptq_draft, take_gptq_draft

        home = self._library.resolve(job.model)  # Anew: a download has moved the checkpoint.
        if job.draft_from is not None:
            take_gptq_draft(
                home,
                job.precision,
                Path(job.draft_from),
                on_progress=on_progress,
                on_notice=self._writer.send,
                is_cancelled=lambda: self._is_cancelled(job.request_id),
            )
            return
        make_gptq_draft(
            home,
            job.precision,
            prompts=prompts,
            on_progress=on_progress,
            on_notice=self._writer.send,
            is_cancelled=lambda: self._is_cancelled(job.request_id),
        )

    def _load(self, job: LoadModel) -> None:
        home = self._library.resolve(job.model)
        self._unload()
        self._model, self._asked = job.model, job.config
        self._load_engine(home, job.config, lambda: self._is_cancelled(job.request_id))
        self._tell_loaded(job.request_id)

    def _load_engine(
        self, home: ModelHome, config: EngineConfig, is_cancelled: Callable[[], bool]
    ) -> Engine:
        from .memory_retry import load_with_retry

        engine = load_with_retry(
            home,
            config,
            cache_dir=self._cache_dir,
            on_notice=self._writer.send,
            is_cancelled=is_cancelled,
        )
        with self._lock:
            self._engine = engine
            if self._running_id in self._cancelled_ids:
                engine.cancel()  # The cancel may have come when there was none to tell.
        return engine

    def _tell_loaded(
        self, request_id: str, *, is_cache_kept: bool = False, seconds: float | None = None
    ) -> None:
        engine = self._engine
        assert engine is not None
        self._writer.send(
            ModelLoaded(
                request_id=request_id,
                model=self._model,
                title=engine.home.title,
                context_length=engine.context_length,
                plan=engine.plan,
                load_s=engine.load_s if seconds is None else seconds,
                is_cache_kept=is_cache_kept,
                link_bytes_per_s=engine.link_bytes_per_s,
                dtype=engine.config.dtype,
            )
        )

    def _reconfigure(self, job: Reconfigure) -> None:
        from .reconfiguring import change_in_place, unchanged

        if self._engine is None or self._asked is None:
            raise MiraError("No model is loaded.", hint="Pick a model first.")
        started = time.perf_counter()
        changed = self._asked.changed_fields(job.config)
        # What memory made the engine give up stays given up, unless another value is wanted.
        wanted = replace(self._engine.config, **{n: getattr(job.config, n) for n in changed})
        try:
            is_kept = change_in_place(self._engine, wanted, self._writer.send)
        except MiraError as error:
            raise unchanged(error) from error
        if not is_kept:
            self._reload(job.request_id, lambda: wanted)
        self._asked = job.config
        self._tell_loaded(
            job.request_id, is_cache_kept=is_kept, seconds=time.perf_counter() - started
        )

    def _reload(self, request_id: str, choose: Callable[[], EngineConfig]) -> None:
        """Loads the model with what is chosen once its memory is free, else as it was."""
        from .reconfiguring import Reloading

        assert self._engine is not None
        reloading = Reloading(
            self._engine,
            load=self._load_engine,
            on_notice=self._writer.send,
            is_cancelled=lambda: self._is_cancelled(request_id),
            is_ending=self._ending.is_set,
        )
        self._unload()
        reloading.run(choose)

    def _describe_model(self, job: DescribeModel) -> None:
        from .model_report import describe

        home = self._library.resolve(job.model)
        self._writer.send(
            describe(home, job, is_cancelled=lambda: self._is_cancelled(job.request_id))
        )

    def _plan(self, job: PlanModel) -> None:
        from .model_report import locate
        from .planning import plan_model

        home = locate(
            self._library.resolve(job.model),
            is_cancelled=lambda: self._is_cancelled(job.request_id),
        )
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
        self._unload()
        profile = profile_model(
            home,
            job.config,
            QUICK_SWEEP if job.is_quick else FULL_SWEEP,
            cache_dir=self._cache_dir,
            on_progress=lambda done, total, detail: self._writer.send(
                ProfileProgress(request_id=job.request_id, done=done, total=total, detail=detail)
            ),
            on_notice=self._writer.send,
            is_cancelled=lambda: self._is_cancelled(job.request_id),
        )
        self._writer.send(ProfileDone(request_id=job.request_id, model=job.model, profile=profile))

    def _evaluate(self, job: EvaluateModel) -> None:
        from .evaluation import evaluate_model

        home = self._library.resolve(job.model)
        self._unload()
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
            is_cancelled=lambda: self._is_cancelled(job.request_id),
        )
        self._writer.send(EvaluationDone(request_id=job.request_id, report=report))

    def _generate(self, job: Generate) -> None:
        from .memory_retry import LastingReplies

        replier = LastingReplies(
            self._loaded, partial(self._reload, job.request_id), self._writer.send
        )
        events = self._loaded().stream(
            job.request_id,
            job.messages,
            job.sampling,
            is_residency_wanted=job.is_residency_wanted,
            replier=replier,
        )
        for event in events:
            self._writer.send(event)
        self._loaded().take_compiled()

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise MiraError("No model is loaded.", hint="Pick a model first.")
        return self._engine

    def _unload(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            del engine
            gc.collect()  # Its parts know each other; what they hold must be free for the next.


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
