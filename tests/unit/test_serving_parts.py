"""What `serve` reads and refuses, where replies stop, and whose turn it is. Pure."""

from __future__ import annotations

import asyncio
import json

import pytest
from mira_app.serving.chat_requests import read_chat_request
from mira_app.serving.completions import Completion, comment, event, usage
from mira_app.serving.errors import ApiError, from_engine
from mira_app.serving.stops import StopText
from mira_app.serving.turns import Line
from mira_engine import api

DEFAULTS = api.SamplingConfig(max_new_tokens=100)
HELLO = [{"role": "user", "content": "hello"}]


def refusal(body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_chat_request(body, DEFAULTS)
    return caught.value


# -- requests -------------------------------------------------------------------------------


def test_request_takes_what_it_gives_and_defaults_for_the_rest():
    wanted = read_chat_request({"messages": HELLO}, DEFAULTS)
    assert wanted.sampling == DEFAULTS
    assert (wanted.model, wanted.stops, wanted.is_streamed) == (None, (), False)
    wanted = read_chat_request(
        {
            "model": "m", "messages": HELLO, "temperature": 1, "top_p": 0.5, "top_k": 4, "seed": 3,
            "max_completion_tokens": 9, "repetition_penalty": 1.5, "stop": "END", "stream": True,
            "stream_options": {"include_usage": True}, "n": 1, "tools": [], "user": "me",
            "frequency_penalty": 0, "logprobs": False, "presence_penalty": None,
        },
        DEFAULTS,
    )  # fmt: skip
    assert wanted.sampling == api.SamplingConfig(
        temperature=1.0, top_p=0.5, top_k=4, seed=3, max_new_tokens=9, repetition_penalty=1.5
    )
    assert (wanted.stops, wanted.is_streamed, wanted.is_usage_wanted) == (("END",), True, True)


def test_messages_are_text_by_role_with_what_was_thought():
    wanted = read_chat_request(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"},
                                             {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "reasoning_content": "t"},
                {"role": "user", "content": "d", "reasoning_content": "x"},
            ]
        },
        DEFAULTS,
    )  # fmt: skip
    assert [(m.role, m.content, m.thinking) for m in wanted.messages] == [
        ("system", "be brief", ""), ("user", "ab", ""), ("assistant", "c", "t"), ("user", "d", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", True), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
        ("functions", [{}]), ("logprobs", True), ("top_logprobs", 3), ("logit_bias", {"1": 5}),
        ("frequency_penalty", 0.5), ("presence_penalty", -1),
        ("response_format", {"type": "json_object"}), ("modalities", ["text", "audio"]),
        ("audio", {}), ("best_of", 3), ("no_such_field", 1), ("reasoning_effort", "high"),
    ],
)  # fmt: skip
def test_field_that_asks_for_what_there_is_not_is_refused_by_name(field, value):
    error = refusal({"messages": HELLO, field: value})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert field in error.message
    assert error.body()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", "hot", None), ("temperature", 11, None), ("top_p", float("nan"), None),
        ("top_p", 0, None), ("seed", 1.5, None), ("seed", -1, None), ("seed", 1e300, None),
        ("max_tokens", 0, None), ("max_tokens", True, None), ("stream", "yes", None),
        ("stop", [""], None), ("stop", ["a"] * 17, None), ("stop", 3, None), ("model", 3, None),
        ("messages", [], None), ("messages", "hello", None), ("stream_options", 3, None),
        ("messages", [3], "messages[0]"),
        ("messages", [{"role": "tool", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": [], "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [3]}], "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_value_that_cannot_be_used_is_refused_by_name(field, value, param):
    error = refusal({"messages": HELLO, field: value})
    assert (error.status, error.param, error.code) == (400, param or field, "invalid_value")


def test_images_are_refused_where_they_stand():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    text = {"type": "text", "text": "what is it?"}
    error = refusal({"messages": [*HELLO, {"role": "user", "content": [text, image]}]})
    assert error.param == "messages[1].content[1].type"
    assert error.code == "unsupported_parameter"


def test_body_that_is_no_object_is_refused():
    assert refusal([HELLO]).status == 400


def test_errors_of_the_engine_have_a_status_and_keep_its_log_to_themselves():
    died = api.EngineProcessError("It was killed.\nLast lines of the engine:\n  /home/me")
    assert from_engine(died).status == 503
    assert from_engine(died).message == "It was killed."
    assert from_engine(api.ContextLengthError("too long")).code == "context_length_exceeded"
    assert from_engine(api.GenerationError("template")).status == 400
    assert from_engine(api.NonFiniteError("nan")).status == 500


# -- stops ----------------------------------------------------------------------------------


def stopped(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop = StopText(stops)
    text = "".join(stop.push(piece) for piece in pieces)
    return text + stop.flush(), stop.is_reached


def test_stop_split_over_pieces_ends_the_text_before_it():
    assert stopped(["END"], ["one E", "N", "D two", " three"]) == ("one ", True)
    assert stopped(["END", "ne"], list("one END")) == ("o", True)
    assert stopped(["END"], ["one E", "NOUGH"]) == ("one ENOUGH", False)
    assert stopped(["aab"], list("aaab")) == ("a", True)
    assert stopped([], ["a", "b"]) == ("ab", False)


def test_stop_holds_back_no_more_than_could_become_one():
    stop = StopText(["END"])
    assert stop.push("one E") == "one "
    assert stop.push("x") == "Ex"


# -- bodies ---------------------------------------------------------------------------------


def test_bodies_count_tokens_and_name_thinking():
    stats = api.ReplyStats(num_prompt_tokens=7, num_cached_tokens=3, num_new_tokens=2)
    completion = Completion(id="c", created=1, model="m")
    whole = completion.whole("yes", "hm", api.FinishReason.CONTEXT, stats)
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert choice["finish_reason"] == "length"
    assert whole["usage"] == usage(stats)
    assert usage(stats)["total_tokens"] == 9
    assert usage(stats)["prompt_tokens_details"] == {"cached_tokens": 3}
    thought = completion.piece(api.ReplyPart.THINKING, "hm")
    assert thought["choices"][0]["delta"] == {"reasoning_content": "hm"}
    line = event(thought)
    assert json.loads(line.removeprefix(b"data: ")) == thought
    assert comment("a\n\ndata: b") == b": a data: b\n\n"  # never an event of its own


# -- turns ----------------------------------------------------------------------------------


async def test_line_moves_on_in_order_and_refuses_when_full():
    line = Line(max_waiting=2)
    first, second, third = line.join(), line.join(), line.join()
    with pytest.raises(ApiError) as caught:
        line.join()
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert caught.value.headers["Retry-After"]
    assert [turn.num_before for turn in (first, second, third)] == [0, 1, 2]
    line.leave(second)
    await third.wait_moved(timeout_s=60)
    assert third.num_before == 1
    line.leave(first)
    await third.wait_moved(timeout_s=60)
    assert third.num_before == 0


async def test_wait_in_line_ends_with_its_time_and_stays():
    line = Line(max_waiting=1)
    line.join()
    second = line.join()
    await second.wait_moved(timeout_s=0.001)
    assert second.num_before == 1


async def test_closed_line_sends_away_who_waits_and_who_comes():
    line = Line(max_waiting=1)
    line.join()
    second = line.join()
    waiting = asyncio.ensure_future(second.wait_moved(timeout_s=60))
    await asyncio.sleep(0)
    line.close()
    with pytest.raises(ApiError, match="shutting down"):
        await waiting
    with pytest.raises(ApiError, match="shutting down"):
        line.join()
