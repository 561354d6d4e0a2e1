"""An OpenAI-compatible server on loopback that says what a test tells it to.

A server in threads. What it answers to the next chats is a queue of scripts, each used once;
where that is empty, it says `WORDS`. What was asked is recorded.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("A cache ", "keeps ", "**hot** ", "things ", "near.")
REPLY = "".join(WORDS)
WAIT_S = 60
"""Only a failure takes so long."""

_POLL_S = 0.02
"""How long the end of the server may take to be seen."""

Script = Callable[["_Handler"], None]


class FakeServer:
    """The server.

    Attributes:
        models: What `/v1/models` lists; a script in its place answers instead.
        context_length: Tokens that it says its models read, `None` to say nothing.
        scripts: What the next chats are answered with.
        metrics: What `/metrics` says at each reading, the last one for ever; empty for none.
        requests: The bodies of chats that were asked for.
        headers: Headers of all requests.
        has_stalled: Set once a `stalls` has said its pieces.
        has_left: Set once a client has closed the connection during a `stalls`.
    """

    def __init__(self) -> None:
        self.models: Sequence[str] | Script = ("fake-moe",)
        self.context_length: int | None = 4096
        self.scripts: deque[Script] = deque()
        self.metrics: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.has_stalled, self.has_left = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.fake = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), daemon=True
        )

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def address(self) -> str:
        return f"{self.root}/v1"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> FakeServer:
        return self.server.fake  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        fake = self.fake
        fake.headers.append(self.headers)
        if self.path == "/v1/models" and callable(fake.models):
            fake.models(self)
        elif self.path == "/v1/models":
            length = {"max_model_len": fake.context_length} if fake.context_length else {}
            rows = [{"id": name, "object": "model", **length} for name in fake.models]
            self.answer(200, json.dumps({"object": "list", "data": rows}))
        elif self.path == "/metrics" and fake.metrics:
            text = fake.metrics.pop(0) if len(fake.metrics) > 1 else fake.metrics[0]
            self.answer(200, text, kind="text/plain")
        else:
            self.answer(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        fake = self.fake
        fake.headers.append(self.headers)
        fake.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        script = fake.scripts.popleft() if fake.scripts else says(*WORDS)
        script(self)

    def answer(
        self, status: int, body: str, *, kind: str = "application/json", **more: str
    ) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        line = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


# -- scripts --------------------------------------------------------------------------------


def chunk(delta: Mapping[str, object], finish: str | None = None) -> dict[str, object]:
    return {
        "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "fake-moe",
        "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish}],
    }  # fmt: skip


def usage(prompt: int, new: int, cached: int = 0) -> dict[str, object]:
    counts = {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
    return {**chunk({}), "choices": [], "usage": counts}


def says(
    *words: str,
    thinking: Sequence[str] = (),
    thinking_field: str = "reasoning_content",
    finish: str = "stop",
    counts: Mapping[str, object] | None = None,
) -> Script:
    """A whole reply; `counts` is what it reports of tokens, an empty mapping for nothing."""

    def script(handler: _Handler) -> None:
        handler.begin_stream()
        handler.event(chunk({"role": "assistant", "content": ""}))
        for thought in thinking:
            handler.event(chunk({thinking_field: thought}))
        for word in words:
            handler.event(chunk({"content": word}))
        handler.event(chunk({}, finish))
        told = usage(20, len(words) + len(thinking), 8) if counts is None else counts
        if told:
            handler.event(told)
        handler.event("[DONE]")
        handler.end_stream()

    return script


def refuses(
    status: int,
    message: str = "",
    *,
    param: str | None = None,
    code: str | None = None,
    **headers: str,
) -> Script:
    """An error in the interface's own form."""
    body = {"error": {"message": message, "type": "error", "param": param, "code": code}}
    return lambda handler: handler.answer(status, json.dumps(body), **headers)


def shows_page(status: int = 200) -> Script:
    """What a web server that is no OpenAI server answers."""
    page = "<html><body>Welcome</body></html>"
    return lambda handler: handler.answer(status, page, kind="text/html")


def cuts(*words: str, is_clean: bool) -> Script:
    """Says a part of a reply and closes the connection, in the middle of a chunk or not."""

    def script(handler: _Handler) -> None:
        handler.begin_stream()
        for word in words:
            handler.event(chunk({"content": word}))
        handler.close_connection = True
        if is_clean:
            handler.end_stream()
            # Closed at once, what is still on its way to a slow client may be lost.
            handler.connection.settimeout(WAIT_S)
            with contextlib.suppress(OSError):
                handler.connection.shutdown(socket.SHUT_WR)
                while handler.connection.recv(4096):
                    pass

    return script


def fails_midway(*words: str, message: str) -> Script:
    """Says a part of a reply, then that it cannot go on."""

    def script(handler: _Handler) -> None:
        handler.begin_stream()
        for word in words:
            handler.event(chunk({"content": word}))
        handler.event({"error": {"message": message, "type": "server_error"}})
        handler.end_stream()

    return script


def stalls(*words: str) -> Script:
    """Says a part of a reply and waits until the client leaves."""

    def script(handler: _Handler) -> None:
        fake = handler.fake
        handler.begin_stream()
        for word in words:
            handler.event(chunk({"content": word}))
        fake.has_stalled.set()
        handler.connection.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            if handler.connection.recv(1):
                return
        fake.has_left.set()
        handler.close_connection = True

    return script
