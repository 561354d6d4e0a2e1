"""A remote client against a scripted server: replies, stopping, and every way it can fail."""

from __future__ import annotations

import socket
import ssl

import fake_server
import httpx2
import openai
import pytest
from fake_server import REPLY, FakeServer, cuts, fails_midway, refuses, says, shows_page, stalls
from mira_app.catalog import ModelState
from mira_app.remote.catalog import RemoteCatalog, with_served_model
from mira_app.remote.client import RemoteClient
from mira_app.remote.errors import ServerError, server_error
from mira_app.remote.figures import ServerFigures
from mira_app.settings import load_settings
from mira_engine import api

KEY = "sk-secret-of-the-tests"
QUESTION = (api.ChatMessage(role="user", content="What is a cache?"),)


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


@pytest.fixture
def client(server):
    with RemoteClient(server.address, silence_timeout_s=30) as running:
        yield running


def load(client: RemoteClient, model: str = "fake-moe") -> list:
    return list(client.submit(api.LoadModel(request_id=client.new_request_id(), model=model)))


def ask(client: RemoteClient, messages=QUESTION, **sampling):
    return client.submit(
        api.Generate(
            request_id=client.new_request_id(),
            messages=tuple(messages),
            sampling=api.SamplingConfig(**sampling),
        )
    )


def reply(client: RemoteClient, messages=QUESTION, **sampling) -> tuple[api.GenerationDone, list]:
    events = list(ask(client, messages, **sampling))
    assert isinstance(events[-1], api.GenerationDone)
    return events[-1], events


def failure(client: RemoteClient, messages=QUESTION) -> tuple[api.MiraError, str]:
    """How a reply fails, and the text that had come."""
    call = ask(client, messages)
    texts: list[str] = []
    with pytest.raises(api.MiraError) as caught:
        texts.extend(event.text for event in call if isinstance(event, api.TokenDelta))
    assert "\n" not in caught.value.message
    return caught.value, "".join(texts)


# -- replies --------------------------------------------------------------------------------


def test_load_tells_the_model_its_context_and_no_plan(server, client):
    figures, loaded = load(client)
    assert figures == ServerFigures(address=server.address, context_length=4096)
    assert (loaded.model, loaded.title, loaded.context_length) == ("fake-moe", "fake-moe", 4096)
    assert loaded.plan is None


def test_reply_is_streamed_counted_and_ended(server, client):
    load(client)
    done, events = reply(client, max_new_tokens=7)
    assert (done.text, done.thinking, done.reason) == (REPLY, "", api.FinishReason.STOP)
    deltas = [event.text for event in events if isinstance(event, api.TokenDelta)]
    assert "".join(deltas) == REPLY
    stats = done.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_new_tokens) == (20, 8, 5)
    assert 0 < stats.ttft_s <= stats.elapsed_s
    assert server.requests == [{
        "model": "fake-moe", "messages": [{"role": "user", "content": "What is a cache?"}],
        "stream": True, "temperature": 0.0, "max_tokens": 7,
        "stream_options": {"include_usage": True},
    }]  # fmt: skip


def test_thinking_and_limit_are_told(server, client):
    server.scripts.append(says("Yes.", thinking=("hm ", "so"), finish="length"))
    done, _ = reply(client)
    assert (done.text, done.thinking, done.reason) == ("Yes.", "hm so", api.FinishReason.LENGTH)


def test_server_without_usage_is_told_of_once(server, client):
    server.scripts += [says("a", "b", counts={}), says("a", counts={})]
    done, events = reply(client)
    notices = [event for event in events if isinstance(event, api.Notice)]
    assert [notice.code for notice in notices] == ["no-usage"]
    assert done.stats.num_new_tokens == 2
    assert not any(isinstance(event, api.Notice) for event in reply(client)[1])
    assert [notice.code for notice in client.notices] == ["no-usage"]


def test_metrics_become_figures_of_the_reply(server, client):
    text = (
        "vllm:kv_cache_usage_perc 0.5\nvllm:spec_decode_num_draft_tokens_total {}\n"
        "vllm:spec_decode_num_accepted_tokens_total {}\n"
    )
    server.metrics += [text.format(10, 5), text.format(10, 5), text.format(20, 12)]
    assert load(client)[0].cache_share == 0.5
    _, events = reply(client)
    (figures,) = (event for event in events if isinstance(event, ServerFigures))
    assert figures == ServerFigures(
        address=server.address, context_length=4096, cache_share=0.5, acceptance_rate=0.7
    )


def test_server_without_metrics_is_not_asked_for_them_again(server, client):
    load(client)
    num_before = len(server.headers)
    reply(client)
    assert len(server.headers) == num_before + 1


# -- stopping -------------------------------------------------------------------------------


def test_cancel_closes_the_connection_and_keeps_the_text(server, client):
    server.scripts.append(stalls("A cache ", "keeps "))
    call = ask(client)
    text = ""
    for event in call:
        text += event.text if isinstance(event, api.TokenDelta) else ""
        if text == "A cache keeps ":
            client.cancel(call)
    assert isinstance(event, api.GenerationDone)
    assert (event.text, event.reason) == ("A cache keeps ", api.FinishReason.CANCELLED)
    assert server.has_left.wait(fake_server.WAIT_S)
    assert reply(client)[0].text == REPLY


def test_cancel_at_once_ends_the_call(server, client):
    server.scripts.append(stalls())
    call = ask(client)
    client.cancel(call)
    try:
        events = list(call)
    except api.CancelledError:
        return  # before it had begun
    assert events[-1].reason is api.FinishReason.CANCELLED


def test_close_ends_open_calls_and_can_be_done_twice(server):
    client = RemoteClient(server.address)
    server.scripts.append(stalls("A"))
    call = ask(client)
    assert server.has_stalled.wait(fake_server.WAIT_S)
    client.close()
    client.close()
    assert call.is_done
    assert server.has_left.wait(fake_server.WAIT_S)
    assert not client.is_running


# -- what a server does not take ------------------------------------------------------------


def test_field_that_is_refused_is_left_out_from_then_on_and_told_once(server, client):
    server.scripts.append(refuses(400, "Unrecognized request argument: top_k", param="top_k"))
    sampling = {"temperature": 1.0, "top_k": 3, "seed": 1}
    done, events = reply(client, **sampling)
    assert done.text == REPLY
    (notice,) = (event for event in events if isinstance(event, api.Notice))
    assert notice.code == "left-out-top_k"
    assert "top_k 3" in notice.text
    assert "Unrecognized" in notice.text
    reply(client, **sampling)
    assert ["top_k" in body for body in server.requests] == [True, False, False]
    assert all(body["seed"] == 1 for body in server.requests)


def test_limit_has_another_name_where_the_first_is_refused(server, client):
    server.scripts.append(refuses(400, "Use 'max_completion_tokens'.", param="max_tokens"))
    reply(client, max_new_tokens=9)
    assert server.requests[1]["max_completion_tokens"] == 9
    assert "max_tokens" not in server.requests[1]


def test_refusal_of_what_cannot_be_left_out_is_told_as_it_is(server, client):
    server.scripts.append(refuses(400, "Roles must alternate.", param="messages"))
    error, _ = failure(client)
    assert "Roles must alternate." in error.message
    assert len(server.requests) == 1


def test_chat_that_is_too_long_loses_its_oldest_turns_and_says_so(server, client):
    load(client)
    too_long = refuses(400, "Too many tokens.", code="context_length_exceeded")
    server.scripts += [too_long, too_long]
    turns = [
        api.ChatMessage(role=role, content=f"{role} {n}")
        for n in range(5)
        for role in ("user", "assistant")
    ][:-1]
    system = api.ChatMessage(role="system", content="be brief")
    done, events = reply(client, (system, *turns))
    assert done.text == REPLY
    trimmed = [event for event in events if isinstance(event, api.ContextTrimmed)]
    assert [(event.num_turns, event.limit) for event in trimmed] == [(6, 4096), (8, 4096)]
    asked = [message["content"] for message in server.requests[-1]["messages"]]
    assert asked == ["be brief", "user 4"]
    more = (*turns, api.ChatMessage(role="assistant", content="a"), *QUESTION)
    reply(client, (system, *more))  # what was left out before is not asked for again
    assert [m["content"] for m in server.requests[-1]["messages"]] == [
        "be brief", "user 4", "a", "What is a cache?",
    ]  # fmt: skip


def test_question_that_is_too_long_is_told_in_plain_words(server, client):
    said = "This model's maximum context length is 64 tokens. You asked for 99."
    server.scripts.append(refuses(400, said))
    error, _ = failure(client)
    assert isinstance(error, api.ContextLengthError)
    assert "longer than the model" in error.message
    assert "64 tokens" in error.message
    assert error.hint


# -- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said", "hint"),
    [
        (refuses(307, location="https://other/v1"), "sends to https://other/v1", "that one"),
        (refuses(401, "No."), "wants a key", "MIRA_API_KEY"),
        (refuses(403, "Not in your country."), "Not in your country", "MIRA_API_KEY"),
        (refuses(404, "No model x."), "No model x", "--model"),
        (refuses(429, "Slow down.", retry_after="7"), "takes no more requests now", "in 7 s"),
        (refuses(429), "takes no more requests now", "in a moment"),
        (refuses(500, "Out of memory."), "failed with status 500: Out of memory.", "again"),
        (shows_page(502), "failed with status 502.", "again"),
        (shows_page(404), "no such model or address", "OpenAI-compatible"),
        (shows_page(), "no OpenAI-compatible server", "http://host:8000/v1"),
        (cuts(is_clean=True), "no OpenAI-compatible server", ""),
    ],
)
def test_refusal_is_one_sentence_with_a_hint(server, client, script, said, hint):
    server.scripts.append(script)
    error, text = failure(client)
    assert said in error.message
    assert hint in error.hint
    assert not isinstance(error, api.EngineProcessError)  # which would restart an engine
    assert text == ""
    assert reply(client)[0].text == REPLY  # and nothing is broken for the next one


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (cuts("A cache ", "keeps ", is_clean=True), "in the middle of the reply"),
        (cuts("A cache ", "keeps ", is_clean=False), "in the middle of the reply"),
        (cuts(is_clean=False), "ended before an answer"),
        (fails_midway("A cache ", "keeps ", message="Lost a GPU."), "gave up: Lost a GPU."),
    ],
)
def test_reply_that_breaks_off_keeps_what_had_come(server, client, script, said):
    server.scripts.append(script)
    error, text = failure(client)
    assert said in error.message
    assert text == ("" if "before" in said else "A cache keeps ")


def test_silence_ends_after_its_time(server):
    for silence_s in (0.3, 3.0, 30.0):  # a busy machine may be silent before the first word, too
        server.scripts.append(stalls("A cache "))
        with RemoteClient(server.address, silence_timeout_s=silence_s) as client:
            error, text = failure(client)
        assert "did not answer in time" in error.message
        if text:
            break
    assert text == "A cache "


def test_environment_of_another_service_is_not_sent(server, monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Token: header-secret")
    server.scripts.append(refuses(401, "no"))
    with RemoteClient(server.address) as client:
        failure(client)
    sent = str(server.headers[-1])
    assert "secret" not in sent, sent


def test_key_is_sent_and_never_told(server):
    server.scripts.append(refuses(401, f"Incorrect API key provided: {KEY}."))
    with RemoteClient(server.address, key=KEY) as client:
        error, _ = failure(client)
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert "refuses the key" in error.message
    server.scripts.append(refuses(500, f"Incorrect API key provided: {KEY}."))
    with RemoteClient(server.address, key=KEY) as client:
        error, _ = failure(client)
    assert KEY not in str(error)
    assert "***" in error.message


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "said", "hint"),
    [
        ("http://127.0.0.1:{free}/v1", "Nothing can be reached", "started"),
        ("https://127.0.0.1:{used}/v1", "no TLS", "http://"),
        ("http://no-such-host.invalid/v1", "No host is known", "address"),
    ],
)
def test_server_that_cannot_be_reached_is_told_why(server, address, said, hint, monkeypatch):
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    used = server.root.rpartition(":")[2]
    with RemoteClient(address.format(free=free_port(), used=used)) as client:
        with pytest.raises(ServerError) as caught:
            client.list_models()
        assert said in caught.value.message
        assert hint in caught.value.hint
        call = client.submit(api.LoadModel(request_id="r", model="fake-moe"))
        with pytest.raises(ServerError, match=said):
            list(call)


def test_certificate_that_is_not_trusted_is_told_with_its_reason():
    cause = ssl.SSLCertVerificationError("certificate verify failed")
    cause.verify_message = "self-signed certificate"
    request = httpx2.Request("GET", "https://host/v1/models")
    error = openai.APIConnectionError(request=request)
    error.__cause__ = httpx2.ConnectError("failed")
    error.__cause__.__cause__ = ExceptionGroup("all attempts", [cause])
    told = server_error(error, "https://host/v1", key=None)
    assert "certificate of host" in told.message
    assert "self-signed certificate" in told.message
    assert told.hint


@pytest.mark.parametrize("models", [shows_page(), shows_page(404), refuses(200)])
def test_list_of_another_kind_of_server_is_told(server, client, models):
    server.models = models
    with pytest.raises(ServerError, match="no OpenAI-compatible server"):
        client.list_models()


def test_requests_for_an_engine_here_are_refused(client):
    call = client.submit(api.DescribeMachine(request_id="r", model="m"))
    with pytest.raises(api.ConfigError, match="not in the engine here"):
        list(call)


# -- which model ----------------------------------------------------------------------------


def chosen(client: RemoteClient, *, is_needed: bool = True, **flags: str):
    settings = load_settings({"connect": client.address, **flags}, {})
    return with_served_model(client, settings, is_needed=is_needed)


def test_only_model_of_a_server_is_taken(client):
    settings = chosen(client)
    assert (settings.model, settings.is_model_given) == ("fake-moe", True)
    (entry,) = RemoteCatalog(client).entries(settings.engine.precision)
    assert (entry.model, entry.is_ready, entry.is_remote) == ("fake-moe", True, True)
    assert entry.state is ModelState.READY
    assert client.address in entry.about


def test_several_models_are_listed_and_one_has_to_be_named(server, client):
    server.models = ("one", "two")
    with pytest.raises(api.ConfigError, match="several models: one, two") as caught:
        chosen(client)
    assert "--model" in caught.value.hint
    assert not chosen(client, is_needed=False).is_model_given
    catalog = RemoteCatalog(client)
    assert [entry.model for entry in catalog.entries(api.Precision.NESTED)] == ["one", "two"]
    assert chosen(client, model="two").model == "two"
    with pytest.raises(api.UnknownModelError) as caught:
        catalog.find("three", api.Precision.NESTED)
    assert "one, two" in caught.value.hint
    with pytest.raises(api.UnknownModelError, match="no model 'three'"):
        load(client, "three")


def test_server_without_models_or_without_a_list_is_told(server, client):
    server.models = ()
    with pytest.raises(ServerError, match="offers no model"):
        chosen(client)
    server.models = refuses(404, "Not found.")
    with pytest.raises(api.ConfigError, match="no list of its models"):
        chosen(client)
    assert load(client, "any")[-1].model == "any"


@pytest.mark.parametrize(("key", "codes"), [(KEY, ["key-exposed"]), (None, [])])
def test_key_that_others_can_read_on_the_way_is_told(server, monkeypatch, key, codes):
    monkeypatch.setattr("mira_app.remote.talk.is_unprotected", lambda address: True)
    with RemoteClient(server.address, key=key) as client:
        notices = [event for event in load(client) if isinstance(event, api.Notice)]
    assert [notice.code for notice in notices] == codes
