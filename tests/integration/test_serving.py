"""`mira-chat serve` with a scripted engine, asked by the official client and by curl."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import socket

import fake_engine
import httpx2
import openai
import pytest
from programs import begun
from served import KEY, fake_serve, serving

REPLY = "".join(fake_engine.WORDS)
HELLO = [{"role": "user", "content": "hello"}]
TIMEOUT_S = 300
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A server that answers at once."""
    with serving(fake_serve(tmp_path_factory.mktemp("plain"))) as served:
        yield served


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A server whose replies go on until they are stopped; two more may wait."""
    folder = tmp_path_factory.mktemp("slow")
    with serving(fake_serve(folder, "slow", options=("--max-waiting", "2"))) as served:
        yield served


@pytest.fixture
def api(plain):
    with plain.client() as client:
        yield client


def curl(*arguments: str):
    program = shutil.which("curl")
    if program is None:
        pytest.skip("no curl here")
    return begun(
        [program, "--noproxy", "*", "--no-buffer", "--silent", "--show-error", *arguments],
        text=True,
    )


def stream_arguments(served) -> list[str]:
    body = json.dumps({"messages": HELLO, "stream": True})
    return [f"{served.root}{CHAT}", "-H", "Content-Type: application/json", "-d", body]


# -- answers --------------------------------------------------------------------------------


def test_client_gets_a_whole_reply_with_its_count(api):
    answer = api.chat.completions.create(model="builtin", messages=HELLO)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (REPLY, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 5)


def test_client_gets_a_stream_of_the_same_text_and_usage_where_wanted(api):
    stream = api.chat.completions.create(
        model="builtin", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.total_tokens == 25
    plain = list(api.chat.completions.create(model="builtin", messages=HELLO, stream=True))
    assert all(chunk.usage is None for chunk in plain)


def test_stop_text_ends_the_reply_before_it(api):
    answer = api.chat.completions.create(model="builtin", messages=HELLO, stop=["**h", "never"])
    assert answer.choices[0].message.content == "A cache keeps "
    assert answer.choices[0].finish_reason == "stop"


def test_models_and_health_are_told(plain, api):
    (model,) = api.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("builtin", "mira-chat", 2048)
    assert api.models.retrieve("builtin").id == "builtin"
    assert httpx2.get(f"{plain.root}/health").json() == {"status": "ok"}


# -- refusals -------------------------------------------------------------------------------


def test_unsupported_field_is_refused_in_the_interfaces_own_form(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="builtin", messages=HELLO, n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")


def test_other_models_and_other_paths_are_not_found(plain, api):
    with pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(model="gpt", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="builtin", prompt="x")
    assert httpx2.get(f"{plain.root}{CHAT}").status_code == 405


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Type": "application/json"}, b"{", 400),
        ({"Content-Type": "application/json"}, b"[" * 100_000, 400),
        ({"Content-Type": "application/json"}, b"x" * (4 * 2**20 + 1), 413),
        ({"Content-Type": "application/json", "Host": "evil.example"}, b"{}", 403),
        ({"Content-Type": "application/json", "Host": "127.0.0.1.evil.example:80"}, b"{}", 403),
        ({"Content-Type": "application/json", "Host": "localhost:1"}, b"{}", 400),
    ],
)
def test_request_that_must_not_be_read_is_refused(plain, headers, body, status):
    answer = httpx2.post(f"{plain.root}{CHAT}", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_engine_that_dies_is_told_and_started_again(tmp_path):
    once = tmp_path / "once"
    once.touch()
    with serving(fake_serve(tmp_path, f"die-once={once}")) as served, served.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="builtin", messages=HELLO)
        assert caught.value.status_code == 503
        assert "SIGKILL" in caught.value.message
        assert httpx2.get(f"{served.root}/health").status_code == 503
        answer = client.chat.completions.create(model="builtin", messages=HELLO)
        assert answer.choices[0].message.content == REPLY


# -- the key --------------------------------------------------------------------------------


def test_key_is_needed_where_there_is_one_and_in_no_line(tmp_path):
    options = ("--host", "0.0.0.0")
    with serving(fake_serve(tmp_path, options=options), MIRA_API_KEY=KEY) as served:
        local = f"http://127.0.0.1:{served.port}"
        assert httpx2.get(f"{local}/v1/models").status_code == 401
        assert httpx2.get(f"{local}/health").status_code == 200
        for given in (f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer", "Bearer é"):
            headers = {"Authorization": given.encode()}
            answer = httpx2.get(f"{local}/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        with openai.OpenAI(base_url=f"{local}/v1", api_key=KEY) as client:
            answer = client.chat.completions.create(model="builtin", messages=HELLO)
        assert answer.choices[0].message.content == REPLY
        named = httpx2.get(
            f"{local}/v1/models", headers={"Authorization": f"Bearer {KEY}", "Host": "pc.lan"}
        )
        assert named.status_code == 200
        assert not any(KEY in line for line in served.said)


# -- several clients, and those who leave -----------------------------------------------------


def data_lines(stream):
    """Yields the lines of a stream that say something."""
    return (line.strip() for line in stream if line.strip())


def content(lines) -> str:
    """Waits for the first event that says something, and returns it."""
    return next(line for line in lines if line.startswith("data:") and '"content": "A' in line)


def test_clients_wait_for_their_turn_and_one_too_many_is_sent_away(slow):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(curl(*stream_arguments(slow)))
        assert content(data_lines(first.stdout))
        second = stack.enter_context(curl(*stream_arguments(slow)))
        waiting = data_lines(second.stdout)
        assert next(waiting) == ": waiting, 1 before this one"
        third = stack.enter_context(curl(*stream_arguments(slow)))
        assert next(data_lines(third.stdout)) == ": waiting, 2 before this one"
        fourth = httpx2.post(f"{slow.root}{CHAT}", json={"messages": HELLO})
        assert (fourth.status_code, fourth.json()["error"]["code"]) == (503, "queue_full")
        assert fourth.headers["Retry-After"]
        third.kill()  # who gives up waiting costs nobody anything
        first.kill()  # who leaves is stopped: only then the engine takes up the next reply
        assert content(waiting)
        second.kill()


def test_client_that_leaves_before_its_whole_reply_stops_the_engine(slow):
    body = json.dumps({"messages": HELLO})
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(curl(*stream_arguments(slow)))
        assert content(data_lines(first.stdout))
        connection = socket.create_connection(("127.0.0.1", int(slow.port)))
        with connection:
            connection.sendall(head.encode())
            third = stack.enter_context(curl(*stream_arguments(slow)))
            waiting = data_lines(third.stdout)
            assert next(waiting) == ": waiting, 2 before this one"
            first.kill()
            # As it is told again after some seconds, however many that takes.
            again = itertools.islice(waiting, 20)
            moved = (line for line in again if line != ": waiting, 2 before this one")
            assert next(moved) == ": waiting, 1 before this one"
        assert content(waiting)
        third.kill()


def test_interrupt_before_the_model_is_there_ends_the_server_at_once(tmp_path):
    with begun(fake_serve(tmp_path, "slow-prepare"), text=True) as process:
        assert process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "Serving" not in err


def test_interrupt_ends_reply_who_waits_and_server_in_order(tmp_path):
    with serving(fake_serve(tmp_path, "slow")) as served, contextlib.ExitStack() as stack:
        first = stack.enter_context(curl(*stream_arguments(served)))
        lines = data_lines(first.stdout)
        assert next(line for line in lines if line.startswith("data:"))
        second = stack.enter_context(curl(*stream_arguments(served)))
        assert next(data_lines(second.stdout)).startswith(": waiting")
        served.process.send_signal(signal.SIGINT)
        assert "shutting down" in list(lines)[-1]
        assert "shutting down" in second.stdout.read()
        assert served.wait(TIMEOUT_S) == 0
    assert served.said[-1] == "Ended.\n"
    assert not any("Traceback" in line for line in served.said)
