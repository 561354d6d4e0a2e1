"""The one seat for an engine: what is loaded there, and how another takes its place.

Two engines never exist at once, as their memory together was never planned: the seat is
emptied before the next one is loaded, and whoever needs the engine asks here each time.
Imports torch with the first engine only. Runs in the engine process' main thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import MiraError
from .events import Event, LoadModel, ModelLoaded, Reconfigure
from .running_job import RunningJob

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine
    from .library import ModelHome


class EngineSeat:
    """Holds the engine in use; empty at first.

    Args:
        running: Says whether a job was asked to stop, and tells the engine.
        send: Takes events.
        cache_dir: Where native kernels and compiled steps are kept, `None` for none.
    """

    def __init__(
        self, running: RunningJob, send: Callable[[Event], None], cache_dir: Path | None
    ) -> None:
        self._running = running
        self._send = send
        self._cache_dir = cache_dir
        self.engine: Engine | None = None
        """The one in use, `None` where none is loaded."""
        self._model = ""
        """As it was named when it was loaded."""
        self._asked: EngineConfig | None = None
        """What was asked for then or since; the engine's own may ask for less memory."""

    def loaded(self) -> Engine:
        """Returns the engine in use.

        Raises:
            MiraError: No model is loaded.
        """
        if self.engine is None:
            raise MiraError("No model is loaded.", hint="Pick a model first.")
        return self.engine

    def load(self, job: LoadModel, home: ModelHome) -> None:
        """Loads a model in place of the one loaded before, and tells of it.

        Raises:
            MiraError: As `Engine.load`; the seat is empty.
        """
        self.empty()
        self._model, self._asked = job.model, job.config
        self._load_engine(home, job.config, partial(self._running.is_cancelled, job.request_id))
        self._tell_loaded(job.request_id)

    def reconfigure(self, job: Reconfigure) -> None:
        """Goes over to another configuration, by a reload where need be, and tells of it.

        Raises:
            MiraError: No model is loaded, or what is asked for cannot be had; the message says
                what is loaded now.
        """
        from .reconfiguring import change_in_place, unchanged

        engine = self.loaded()
        assert self._asked is not None
        started = time.perf_counter()
        changed = self._asked.changed_fields(job.config)
        # What memory made the engine give up stays given up, unless another value is wanted.
        wanted = replace(engine.config, **{n: getattr(job.config, n) for n in changed})
        try:
            is_kept = change_in_place(engine, wanted, self._send)
        except MiraError as error:
            raise unchanged(error) from error
        del engine  # A reload must find nobody else holding on to it.
        if not is_kept:
            self.reload(job.request_id, lambda: wanted)
        self._asked = job.config
        self._tell_loaded(
            job.request_id, is_cache_kept=is_kept, seconds=time.perf_counter() - started
        )

    def reload(self, request_id: str, choose: Callable[[], EngineConfig]) -> None:
        """Loads the model with what is chosen once its memory is free, else as it was.

        Raises:
            MiraError: As `Reloading.run`.
        """
        from .reconfiguring import Reloading

        reloading = Reloading(
            self.loaded(),
            load=self._load_engine,
            on_notice=self._send,
            is_cancelled=partial(self._running.is_cancelled, request_id),
            is_ending=self._running.is_ending,
        )
        self.empty()
        reloading.run(choose)

    def empty(self) -> None:
        """Closes the engine, where there is one, and frees what it held."""
        self._running.detach()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
            del engine
            gc.collect()  # Its parts know each other; what they hold must be free for the next.

    def _load_engine(
        self, home: ModelHome, config: EngineConfig, is_cancelled: Callable[[], bool]
    ) -> Engine:
        from .memory_retry import load_with_retry

        engine = load_with_retry(
            home,
            config,
            cache_dir=self._cache_dir,
            on_notice=self._send,
            is_cancelled=is_cancelled,
        )
        self.engine = engine
        self._running.attach(engine)
        return engine

    def _tell_loaded(
        self, request_id: str, *, is_cache_kept: bool = False, seconds: float | None = None
    ) -> None:
        engine = self.loaded()
        self._send(
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
