"""The endpoints with an engine in the test's own process, asked by the official client."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx2
import openai
import pytest
from mira_app import cli
from mira_app.serving import answers
from mira_app.serving.application import Service, make_application
from mira_app.serving.replies import ReplyDesk
from mira_engine import api
from scripted_engine import ScriptedEngine, done, say
from typer.testing import CliRunner

HELLO = [{"role": "user", "content": "hello"}]
LOADED = api.ModelLoaded(
    request_id="l", model="builtin", title="MoE", context_length=2048, plan=None, load_s=0.0
)


@pytest.fixture
async def ask():
    """Asks an engine with that script for a chat."""
    clients: list[openai.AsyncOpenAI] = []

    async def create(script, **fields):
        engine = ScriptedEngine(script)
        desk = ReplyDesk(engine, lambda: None, max_waiting=1, keep_alive_s=60.0)
        service = Service(desk, LOADED, name="builtin", defaults=api.SamplingConfig())
        transport = httpx2.ASGITransport(app=make_application(service, key=None))
        http = httpx2.AsyncClient(transport=transport)
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="any", http_client=http, max_retries=0
        )
        clients.append(client)
        return await client.chat.completions.create(
            **{"model": "builtin", "messages": HELLO} | fields
        )

    yield create
    for client in clients:
        await client.close()


def echo(request: api.Generate, call) -> None:
    say(call, "hm ", api.ReplyPart.THINKING)
    say(call, "so", api.ReplyPart.THINKING)
    for each in request.messages:
        say(call, f"{each.role}: {each.content}\n")
    done(call)


async def test_messages_and_thinking_go_through_whole_and_streamed(ask):
    chat = [{"role": "system", "content": "be brief"}, *HELLO]
    message = (await ask(echo, messages=chat)).choices[0].message
    assert message.content == "system: be brief\nuser: hello\n"
    assert message.reasoning_content == "hm so"
    stream = await ask(echo, messages=chat, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    thoughts = (getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert "".join(thoughts) == "hm so"
    assert "".join(delta.content or "" for delta in deltas) == message.content


async def test_sampling_reaches_the_engine(ask):
    seen: list[api.SamplingConfig] = []

    def script(request: api.Generate, call) -> None:
        seen.append(request.sampling)
        done(call, api.FinishReason.LENGTH)

    answer = await ask(
        script, temperature=0.5, top_p=0.9, seed=3, max_tokens=7, extra_body={"top_k": 4}
    )
    assert answer.choices[0].finish_reason == "length"
    assert seen == [
        api.SamplingConfig(temperature=0.5, top_p=0.9, top_k=4, seed=3, max_new_tokens=7)
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_chat_beyond_the_context_is_refused_with_its_status(ask, is_streamed):
    def script(request: api.Generate, call) -> None:
        del request
        call.deliver(api.ContextTrimmed(request_id="r", num_turns=2, num_tokens=2000, limit=2048))

    with pytest.raises(openai.BadRequestError) as caught:
        await ask(script, stream=is_streamed)
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message


async def test_reply_that_fails_midway_says_so_in_the_stream(ask):
    def script(request: api.Generate, call) -> None:
        del request
        say(call, "A cache ")
        call.fail(api.NonFiniteError("There was a nan."))

    stream = await ask(script, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="There was a nan"):
        await read()
    assert "".join(texts) == "A cache "


async def test_client_that_stays_and_reads_no_more_frees_the_engine(monkeypatch):
    """It would hold the one engine there is for ever."""
    monkeypatch.setattr(answers, "_SENDING_S", 0.01)
    engine = ScriptedEngine(lambda request, call: say(call, "A cache "))
    desk = ReplyDesk(engine, lambda: None, max_waiting=1, keep_alive_s=60.0)
    service = Service(desk, LOADED, name="builtin", defaults=api.SamplingConfig())
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    asked = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()  # It stays.
        raise AssertionError

    sent = []

    async def send(message: dict) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # The connection takes nothing more.

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": "",
    }  # fmt: skip
    async with asyncio.timeout(60):
        await make_application(service, key=None)(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    assert engine.cancelled == engine.calls
    assert len(desk.line) == 0


# -- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "a key is needed"),
        (("--host", "::"), "a key is needed"),
        (("--api-key", "two words"), "no header can hold"),
        (("--port", "70000"), "--port"),
        (("--host", "192.0.2.1", "--api-key", "k"), "cannot listen"),
        (("--max-waiting", "-1"), "max-waiting"),
    ],
)
def test_wrong_usage_exits_2_before_anything_is_loaded(data_dir, options, said):
    done = CliRunner().invoke(cli.app, ["serve", *options], prog_name="mira-chat")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


def test_port_that_is_taken_is_told(data_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(cli.app, ["serve", "--port", port], prog_name="mira-chat")
    assert done.exit_code == 2
    assert f"port {port}" in done.output
