"""A preparation as it was asked for: the store, then predictors and a draft by GPTQ.

Knows the request and in which order its parts are made, not how each is made. Runs in the
engine process' main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from . import calibrate, gptq, prepare
from .checkpoint.gptq_process import require_gptqmodel
from .errors import CancelledError, ConfigError, MiraError
from .events import Event, Notice, PrepareDone, PrepareModel, PrepareProgress
from .library import ModelHome, ModelLibrary
from .memory_retry import SHRUNK
from .running_job import RunningJob
from .types import Rounding

_PROGRESS_INTERVAL_S = 0.2

Send = Callable[[Event], None]


class Preparation:
    """Makes what one request asks for.

    Args:
        job: The request.
        library: Where models are.
        send: Takes events.
        running: Says whether the request was cancelled.
    """

    def __init__(
        self, job: PrepareModel, library: ModelLibrary, send: Send, running: RunningJob
    ) -> None:
        self._job = job
        self._library = library
        self._send = send
        self._on_progress = _SparseProgress(job.request_id, send)
        self._is_cancelled = partial(running.is_cancelled, job.request_id)
        self._is_draft_wanted = job.draft is Rounding.GPTQ or job.draft_from is not None

    def run(self) -> None:
        """Makes all of it; what is there already is not made again.

        Raises:
            CancelledError: It was asked to stop.
            ConfigError: The parts asked for exclude each other; nothing was made.
            MiraError: A part cannot be made.
        """
        job = self._job
        if job.draft is Rounding.GPTQ:
            require_gptqmodel()
        is_deleted = self._is_download_deleted()
        home = self._library.resolve(job.model)
        prompts = calibrate.read_prompts(Path(job.calibration)) if job.calibration else None
        prepare.preflight(home)
        if home.note:
            self._send(Notice(code="name", text=home.note))
        prepare.prepare(
            home,
            job.precision,
            draft=job.draft,
            on_progress=self._on_progress,
            is_cancelled=self._is_cancelled,
            is_download_deleted=is_deleted,
            on_note=lambda code, text: self._send(Notice(code=code, text=text)),
        )
        if job.is_predicting:
            self._make_predictors(home, prompts)
        if self._is_draft_wanted:
            self._make_draft(prompts)
        self._send(PrepareDone(request_id=job.request_id, model=job.model, precision=job.precision))

    def _is_download_deleted(self) -> bool | None:
        is_deleted = self._job.is_download_deleted
        if not self._is_draft_wanted:
            return is_deleted
        if is_deleted:
            raise ConfigError(
                "A GPTQ draft is made from the downloaded weights, so they cannot be deleted "
                "before.",
                hint="Leave --delete-download out; mira-chat rm frees them later.",
            )
        return False

    def _make_predictors(self, home: ModelHome, prompts: Sequence[str] | None) -> None:
        """Makes the predictors. What hinders that is told, and hinders no chat."""
        try:
            calibrate.calibrate(
                home,
                self._job.precision,
                prompts=prompts,
                on_progress=self._on_progress,
                on_notice=self._tell_shrunk,
                is_cancelled=self._is_cancelled,
            )
        except CancelledError:
            raise
        except MiraError as error:
            text = f"No predictors were made: {error} The model chats without them."
            self._send(Notice(code="no-predictors", text=text))

    def _tell_shrunk(self, notice: Notice) -> None:
        """Passes on that memory ran out. What else the recording's load falls back from is of
        no chat.
        """
        if notice.code == SHRUNK:
            self._send(notice)

    def _make_draft(self, prompts: Sequence[str] | None) -> None:
        """Makes the draft by GPTQ, last: all else is there and in use meanwhile."""
        job = self._job
        home = self._library.resolve(job.model)  # Anew: a download has moved the checkpoint.
        if job.draft_from is not None:
            gptq.take_gptq_draft(
                home,
                job.precision,
                Path(job.draft_from),
                on_progress=self._on_progress,
                on_notice=self._send,
                is_cancelled=self._is_cancelled,
            )
            return
        gptq.make_gptq_draft(
            home,
            job.precision,
            prompts=prompts,
            on_progress=self._on_progress,
            on_notice=self._send,
            is_cancelled=self._is_cancelled,
        )


class _SparseProgress:
    """Sends reports of progress: the first and the last of every step, others now and then.

    Args:
        request_id: Given in every report.
        send: Takes events.
        clock: Seconds, on any clock that goes on evenly.
    """

    def __init__(
        self, request_id: str, send: Send, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request_id = request_id
        self._send = send
        self._clock = clock
        self._sent_at = 0.0
        self._step = ""

    def __call__(self, step: str, done: int, total: int, unit: str, detail: str) -> None:
        now = self._clock()
        is_soon = now - self._sent_at < _PROGRESS_INTERVAL_S
        if step == self._step and done != total and is_soon:
            return
        self._sent_at, self._step = now, step
        self._send(
            PrepareProgress(
                request_id=self._request_id,
                step=step,
                done=done,
                total=total,
                unit=unit,
                detail=detail,
            )
        )
