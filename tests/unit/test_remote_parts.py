"""Addresses, request fields, replies, metrics and trimming of a remote model. Pure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mira_app.remote.address import (
    api_key,
    host_of,
    is_loopback,
    is_unprotected,
    metrics_address,
    server_address,
)
from mira_app.remote.body import message_fields, option_fields, refused_field
from mira_app.remote.figures import ServerFigures
from mira_app.remote.metrics import read_metrics, server_figures
from mira_app.remote.reply import ReplyReader
from mira_app.remote.trimming import left_out, shortened, without
from mira_app.settings import load_settings
from mira_engine import api

# -- the address ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://host", "http://host/v1"),
        ("https://host/", "https://host/v1"),
        ("http://host:1/v1/", "http://host:1/v1"),
        ("http://host/api/v1/chat/completions", "http://host/api/v1"),
        ("http://host/v1/models", "http://host/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_address_is_completed(given, address):
    assert server_address(given) == address


@pytest.mark.parametrize(
    "given", ["", "http://", "ftp://host", "http://host:99999", "http://a b", "http://host/?k=1"]
)
def test_address_that_is_none_is_refused(given):
    with pytest.raises(api.ConfigError) as caught:
        server_address(given)
    assert "http://host:8000" in caught.value.hint


def test_address_with_a_password_is_refused_and_not_repeated():
    with pytest.raises(api.ConfigError) as caught:
        server_address("http://me:hunter2@host")
    assert "hunter2" not in str(caught.value)
    assert "MIRA_API_KEY" in caught.value.hint


def test_host_and_metrics_follow_from_the_address():
    assert host_of("https://host:8443/v1") == "host:8443"
    assert metrics_address("http://host:1/v1") == "http://host:1/metrics"
    assert metrics_address("http://host/api") == "http://host/api/metrics"


def test_only_loopback_is_protected_without_tls():
    assert is_loopback("127.0.0.9")
    assert is_loopback("[::1]")
    assert is_loopback("LocalHost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("localhost.example")
    assert is_unprotected("http://host/v1")
    assert not is_unprotected("https://host/v1")
    assert not is_unprotected("http://127.0.0.1:1/v1")


def test_own_key_wins_over_the_usual_one():
    safe = "https://host/v1"
    assert api_key({"OPENAI_API_KEY": "b"}, safe) == "b"
    assert api_key({"OPENAI_API_KEY": "b", "MIRA_API_KEY": "a"}, safe) == "a"
    assert api_key({"MIRA_API_KEY": ""}, safe) is None


def test_usual_key_is_not_sent_where_it_can_be_read_on_the_way():
    both = {"OPENAI_API_KEY": "b", "MIRA_API_KEY": "a"}
    assert api_key({"OPENAI_API_KEY": "b"}, "http://10.0.0.5:8000/v1") is None
    assert api_key(both, "http://10.0.0.5:8000/v1") == "a"
    assert api_key({"OPENAI_API_KEY": "b"}, "http://127.0.0.1:8000/v1") == "b"


# -- the setting ----------------------------------------------------------------------------


def test_connect_comes_from_flag_environment_and_file_and_is_completed():
    file = {"connect": "file:1"}
    short, long = {"MIRA_CONNECT": "short:2"}, {"MIRA_CHAT_CONNECT": "long:3"}
    assert load_settings({}, {}).connect is None
    assert load_settings({}, {}, file).connect == "http://file:1/v1"
    assert load_settings({}, short, file).connect == "http://short:2/v1"
    assert load_settings({}, short | long, file).connect == "http://long:3/v1"
    assert load_settings({"connect": "flag:4"}, short, file).connect == "http://flag:4/v1"
    assert load_settings({"connect": ""}, short, file).connect is None


def test_model_counts_as_given_for_a_server_only_where_it_was_named_no_earlier():
    def is_given(flags: dict, file: dict) -> bool:
        return load_settings(flags, {}, file).is_model_given

    assert not is_given({"connect": "host"}, {"model": "/models/mine"})
    assert is_given({"connect": "host", "model": "big"}, {})
    assert is_given({}, {"connect": "host", "model": "big"})
    assert is_given({"model": "big"}, {"connect": "host"})
    assert is_given({}, {"model": "/models/mine"})


# -- what is asked --------------------------------------------------------------------------


def test_greedy_asks_for_nothing_but_temperature_and_usage():
    fields = option_fields(api.SamplingConfig(top_p=0.5, top_k=3))
    assert fields == {"temperature": 0.0, "stream_options": {"include_usage": True}}


def test_sampling_asks_for_each_setting_that_is_on():
    sampling = api.SamplingConfig(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, seed=0,
        max_new_tokens=5,
    )  # fmt: skip
    fields = option_fields(sampling)
    assert fields.pop("stream_options")
    assert fields == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
        "seed": 0, "max_tokens": 5,
    }  # fmt: skip
    less = option_fields(sampling, {"max_tokens", "seed", "stream_options"})
    assert less["max_completion_tokens"] == 5
    assert {"max_tokens", "seed", "stream_options"}.isdisjoint(less)


def test_thinking_goes_back_to_the_server_unless_it_refused_it():
    chat = (
        api.ChatMessage(role="user", content="q"),
        api.ChatMessage(role="assistant", content="a", thinking="t"),
    )
    with_it = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    assert message_fields(chat) == [{"role": "user", "content": "q"}, with_it]
    assert "reasoning_content" not in message_fields(chat, {"reasoning_content"})[1]


def test_refused_field_is_found_by_name_or_in_what_is_said():
    sent = {"top_k": 3, "temperature": 1, "max_tokens": 5, "stream_options": {}}
    rows = [{"role": "assistant", "content": "a", "reasoning_content": "t"}]
    assert refused_field("top_k", "Unknown field.", sent, rows) == "top_k"
    usage = "stream_options.include_usage"
    assert refused_field(usage, "Extra inputs are not permitted", sent, rows) == "stream_options"
    assert refused_field("", "Unsupported parameter: 'max_tokens'.", sent, rows) == "max_tokens"
    assert refused_field("", "extra field reasoning_content", sent, rows) == "reasoning_content"
    assert refused_field("", "Unknown: stop_k", sent, rows) is None
    assert refused_field("messages", "Unknown role.", sent, rows) is None
    assert refused_field("temperature", "It must be at most 2.", sent, rows) is None


# -- what comes -----------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def piece(finish: str | None = None, **delta: object) -> SimpleNamespace:
    choice = SimpleNamespace(delta=SimpleNamespace(**delta), finish_reason=finish)
    return SimpleNamespace(choices=[choice], usage=None)


def counted(prompt: int, new: int) -> SimpleNamespace:
    return SimpleNamespace(
        choices=[], usage=SimpleNamespace(prompt_tokens=prompt, completion_tokens=new)
    )


def read(*chunks: object) -> ReplyReader:
    reader = ReplyReader("r1", Clock())
    for each in chunks:
        reader.take(each)
    reader.end()
    return reader


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_in_its_own_field_is_told_apart(field):
    reader = read(piece(**{field: "hm "}), piece(**{field: "so"}), piece(content="Yes."))
    assert reader.whole() == ("Yes.", "hm so")


def test_thinking_between_tags_split_anywhere_is_told_apart():
    reader = read(*(piece(content=sign) for sign in "<think>\nhm\n</think>\n\nYes."))
    assert reader.whole() == ("Yes.", "hm")


def test_thinking_that_the_template_opened_is_told_apart_at_the_end():
    reader = read(piece(content="hm"), piece(content="\n</think>\n\nYes."))
    assert reader.whole() == ("Yes.", "hm")


def test_answer_about_tags_stays_an_answer():
    text = "Write <think> and </think> around it."
    assert read(piece(content=text)).whole() == (text, "")


def test_whitespace_is_kept():
    reader = read(piece(content="\n"), piece(content="    "), piece(content="x\n"))
    assert reader.whole()[0] == "\n    x\n"


def test_times_are_of_the_clock_and_tokens_of_the_server():
    clock = Clock()
    reader = ReplyReader("r1", clock)
    clock.now += 2
    reader.take(piece(role="assistant", content=""))
    assert reader.stats().ttft_s == 0
    clock.now += 1
    deltas = reader.take(piece(content="a"))
    assert [(d.request_id, d.text, d.num_tokens) for d in deltas] == [("r1", "a", 1)]
    clock.now += 4
    reader.take(piece(content="b", finish="length"))
    clock.now += 1
    assert reader.stats().num_new_tokens == 2  # pieces, for want of a report
    assert not reader.has_usage
    reader.take(counted(7, 9))
    stats = reader.stats()
    assert (stats.ttft_s, stats.decode_s, stats.elapsed_s) == (3.0, 4.0, 8.0)
    assert (stats.num_prompt_tokens, stats.num_new_tokens) == (7, 9)
    assert stats.tokens_per_s == 2.0
    assert reader.reason is api.FinishReason.LENGTH


# -- metrics --------------------------------------------------------------------------------

METRICS = """\
# HELP vllm:num_requests_running Number of requests running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
vllm:broken nothing
process_cpu_seconds_total 3.0
"""


def test_metrics_are_summed_over_engines_and_rates_are_of_the_reply():
    before, now = read_metrics(METRICS % (100, 90)), read_metrics(METRICS % (140, 110))
    assert server_figures("u", 10, now, before) == ServerFigures(
        address="u", context_length=10, num_running=3, num_waiting=4, cache_share=0.375,
        acceptance_rate=0.5,
    )  # fmt: skip


def test_metrics_that_cannot_be_told_are_none():
    now = read_metrics(METRICS % (140, 110))
    assert server_figures("u", None, now).acceptance_rate is None
    assert server_figures("u", None, now, now).acceptance_rate is None  # nothing was drafted
    restarted = read_metrics(METRICS % (5, 1))
    assert server_figures("u", None, restarted, now).acceptance_rate is None
    assert read_metrics("<html>vllm: no</html>\nother 1") == {}
    assert server_figures("u", None, {}) == ServerFigures(address="u")


# -- trimming -------------------------------------------------------------------------------


def chat(num_turns: int, *, system: bool = True) -> tuple[api.ChatMessage, ...]:
    head = (api.ChatMessage(role="system", content="s"),) if system else ()
    turns = [
        api.ChatMessage(role=role, content=f"{role} {turn}")
        for turn in range(num_turns)
        for role in ("user", "assistant")
    ]
    return (*head, *turns[:-1])


def test_shortened_keeps_the_system_prompt_and_the_newer_half():
    whole = chat(5)
    kept = shortened(whole)
    assert [m.content for m in kept] == ["s", "user 3", "assistant 3", "user 4"]
    assert [m.content for m in left_out(whole, kept)][-1] == "assistant 2"
    assert [m.content for m in shortened(kept)] == ["s", "user 4"]
    assert shortened(chat(1)) is None


def test_what_was_left_out_stays_out_of_the_same_chat_only():
    whole = chat(5)
    gone = left_out(whole, shortened(whole))
    longer = chat(6)
    assert len(longer) - len(without(longer, gone)) == len(gone)
    assert without(chat(2), gone) == chat(2)
    other = (api.ChatMessage(role="user", content="new"),)
    assert without(other, gone) == other
    assert without(whole, ()) == whole
