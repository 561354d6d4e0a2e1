"""One OpenAI-compatible server: what it offers, its replies, its metrics. Asynchronous.

Owns the HTTP side, through the official client library; everything that goes wrong comes out
as a `MiraError`. Knows nothing of requests and events of the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx2
import openai

from .address import metrics_address
from .errors import not_openai_error, server_error
from .metrics import Metrics, read_metrics

_NO_KEY = "none"
"""The library wants one; servers without a key take any."""

_METRICS_TIMEOUT_S = 3.0
_LISTING_S = 15.0
_LENGTH_FIELDS = ("max_model_len", "context_length", "n_ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a server offers; `context_length` in tokens, `None` where it is not told."""

    name: str
    context_length: int | None = None


class Server:
    """Talks to one server, in one event loop.

    Args:
        address: Where requests go, `/v1` included.
        key: The key, `None` for none.
        connect_timeout_s: Longest wait for a connection.
        silence_timeout_s: Longest wait for the next byte.
    """

    def __init__(
        self, address: str, *, key: str | None, connect_timeout_s: float, silence_timeout_s: float
    ) -> None:
        self._address = address
        self._key = key
        timeout = openai.Timeout(silence_timeout_s, connect=connect_timeout_s)
        # A key goes nowhere but where it was meant to: no redirect is followed. So without TLS
        # in the address there is none, and its certificates (0.2 s) need not be read.
        self._http = openai.DefaultAsyncHttpxClient(
            timeout=timeout, follow_redirects=False, verify=address.startswith("https:")
        )
        self._api = openai.AsyncOpenAI(
            base_url=address,
            api_key=key or _NO_KEY,
            http_client=self._http,
            timeout=timeout,
            max_retries=0,  # The person is told at once, and decides.
        )
        # What the environment holds for the library's own service is not for this server.
        self._api.organization = self._api.project = None
        self._api._custom_headers = {}

    async def close(self) -> None:
        """Gives up the connections."""
        await self._api.close()

    async def models(self) -> tuple[ServedModel, ...] | None:
        """Returns what the server offers, `None` where it has no list.

        Raises:
            ServerError: It cannot be reached, or is another kind of server.
        """
        with self._telling():
            try:
                response = await self._api.models.with_raw_response.list(timeout=_LISTING_S)
            except openai.NotFoundError as error:
                if isinstance(error.body, Mapping):
                    return None
                raise not_openai_error(self._address) from error
        try:
            listed = response.http_response.json()["data"]
            return tuple(_served(each) for each in listed)
        except (ValueError, LookupError, TypeError) as error:
            raise not_openai_error(self._address) from error

    @contextlib.asynccontextmanager
    async def chat(
        self, model: str, messages: Sequence[object], fields: Mapping[str, object]
    ) -> AsyncIterator[AsyncIterator[object]]:
        """Asks for a reply; gives the pieces of its stream. Leaving it closes the connection.

        Raises:
            MiraError: The server cannot be reached, refuses, or stops in the middle.
        """
        with self._telling():
            stream = await self._api.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                stream=True,
                extra_body=dict(fields),
            )
        try:
            kind = stream.response.headers.get("content-type", "")
            if "html" in kind:
                raise not_openai_error(self._address)
            async with contextlib.aclosing(self._pieces(stream)) as pieces:
                yield pieces
        finally:
            await stream.close()

    async def _pieces(self, stream: openai.AsyncStream) -> AsyncIterator[object]:
        with self._telling():
            try:
                async for chunk in stream:
                    yield chunk
            except ValueError as error:  # a line that is no JSON
                raise not_openai_error(self._address) from error

    async def metrics(self) -> Metrics | None:
        """Returns the server's metrics, `None` where it tells none that are known here."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            response = await self._http.get(
                metrics_address(self._address), headers=headers, timeout=_METRICS_TIMEOUT_S
            )
        except httpx2.HTTPError:
            return None
        return read_metrics(response.text) or None if response.is_success else None

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise server_error(error, self._address, key=self._key) from error


def _served(fields: Mapping[str, object]) -> ServedModel:
    meta = fields.get("meta")
    known = {**meta, **fields} if isinstance(meta, Mapping) else fields
    lengths = (known.get(name) for name in _LENGTH_FIELDS)
    length = next((n for n in lengths if isinstance(n, int) and n > 0), None)
    return ServedModel(name=str(fields["id"]), context_length=length)
