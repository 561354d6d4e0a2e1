"""A server in the place of the engine process: the same requests, calls and events.

Stands in for `EngineClient`, so that nobody above knows the difference. All that waits for
the network runs in one daemon thread with an event loop of its own: there, stopping a reply
is cancelling a task, which closes the connection at once. Only that thread touches the tasks
and what is known of the server. There is no process that could die, hence nothing to restart:
a server that has gone is an error of the next request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from typing import Any

from mira_engine.api import CancelledError, EngineProcessError, MiraError, Notice

from mira_app.engine_call import EngineCall

from .address import host_of
from .errors import ServerError
from .server import ServedModel, Server
from .talk import Talk

_CLOSING_S = 2.0


class RemoteClient:
    """The engine's client, of a model that another program serves.

    Nothing here blocks except `list_models`, `close`, `restart` and iterating over a call.

    Args:
        address: Where the server is, as `server_address` completes it.
        key: Opens it, `None` where it needs none.
        connect_timeout_s: Longest wait for a connection.
        silence_timeout_s: Longest wait for the next byte of an answer.
    """

    lost: EngineProcessError | None = None
    """Never anything: there is no process here that could die."""

    pid: int | None = None

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        connect_timeout_s: float = 10.0,
        silence_timeout_s: float = 600.0,
    ) -> None:
        self.address = address
        self._key = key
        self._timeouts = {
            "connect_timeout_s": connect_timeout_s, "silence_timeout_s": silence_timeout_s,
        }  # fmt: skip
        self._ids = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._talk: Talk | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # -- as `EngineClient`

    def start(self) -> None:
        """Starts the thread; nothing is sent yet."""
        if self._loop is not None:
            return
        server = Server(self.address, key=self._key, **self._timeouts)
        self._talk = Talk(server, self.address, has_key=self._key is not None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="remote-client", daemon=True
        )
        self._thread.start()

    def restart(self) -> None:
        """Gives up every connection."""
        self.close()
        self.start()

    def close(self, grace_s: float = _CLOSING_S) -> None:
        """Stops what is under way and gives up the connections."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None or self._talk is None:
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(self._talk), loop)
        concurrent.futures.wait([ending], timeout=grace_s)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(timeout=grace_s)
        if not self._thread.is_alive():
            loop.close()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._loop is not None

    @property
    def is_running(self) -> bool:
        """Whether there is a thread that takes requests."""
        return self._loop is not None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What a person should know of this server."""
        return tuple(self._talk.notices.values()) if self._talk is not None else ()

    def new_request_id(self) -> str:
        """Returns an id no other request of this client has."""
        return f"r{next(self._ids)}"

    def submit(self, request: Any) -> EngineCall:
        """Begins a request; the call returned receives its events."""
        self.start()
        assert self._loop is not None
        call = EngineCall(request.request_id)
        self._loop.call_soon_threadsafe(self._begin, request, call)
        return call

    def cancel(self, call: EngineCall) -> None:
        """Stops a call by closing its connection; it then ends by itself."""
        if self._loop is not None and not call.is_done:
            self._loop.call_soon_threadsafe(self._stop, call)

    def __enter__(self) -> RemoteClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- beside it

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """What the server offered when it was last asked."""
        return self._talk.served if self._talk is not None else ()

    def list_models(self) -> tuple[ServedModel, ...] | None:
        """Asks what the server offers, and waits; `None` where it has no list.

        Raises:
            ServerError: It cannot be reached, or is another kind of server.
        """
        self.start()
        assert self._loop is not None
        assert self._talk is not None
        listing = asyncio.run_coroutine_threadsafe(self._talk.list_models(), self._loop)
        try:
            return listing.result()
        except BaseException:
            listing.cancel()  # an interrupt does not stop the request by itself
            raise

    # -- in the thread

    @staticmethod
    async def _end(talk: Talk) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await talk.close()
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _begin(self, request: object, call: EngineCall) -> None:
        assert self._talk is not None
        task = asyncio.ensure_future(self._talk.answer(request, call))
        self._tasks[call.request_id] = task
        task.add_done_callback(lambda ended: self._close_call(ended, call))

    def _stop(self, call: EngineCall) -> None:
        task = self._tasks.get(call.request_id)
        if task is not None:
            task.cancel()

    def _close_call(self, task: asyncio.Task[None], call: EngineCall) -> None:
        """Ends a call whatever its task came to: nobody may wait for it any longer."""
        self._tasks.pop(call.request_id, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MiraError):
            call.fail(error)
        elif error is not None:
            what = type(error).__name__
            call.fail(ServerError(f"The talk with {host_of(self.address)} broke off: {what}."))
        else:
            call.fail(CancelledError("Stopped."))  # Does nothing to one that has ended.
