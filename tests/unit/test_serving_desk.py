"""How `serve` has an engine answer: turns, keep-alives, stops, and who leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from mira_app.engine_call import EngineCall
from mira_app.serving.chat_requests import ChatRequest
from mira_app.serving.errors import ApiError
from mira_app.serving.replies import Ended, Piece, ReplyDesk, Waiting
from mira_engine import api
from scripted_engine import STATS, ScriptedEngine, done, say

LONG_S = 60.0
WAIT_S = 60.0


def request(*stops: str) -> ChatRequest:
    message = api.ChatMessage(role="user", content="q")
    return ChatRequest(model=None, messages=(message,), sampling=api.SamplingConfig(), stops=stops)


@pytest.fixture
async def engine():
    scripted = ScriptedEngine()
    yield scripted
    for call in scripted.calls:
        done(call)  # or a thread would wait for it, and the event loop for the thread


def make_desk(
    engine: ScriptedEngine,
    *,
    keep_alive_s: float = LONG_S,
    reload: Callable[[], None] = lambda: None,
    max_waiting: int = 1,
) -> ReplyDesk:
    return ReplyDesk(engine, reload, max_waiting=max_waiting, keep_alive_s=keep_alive_s)


async def begun(engine: ScriptedEngine, steps) -> tuple[asyncio.Task, EngineCall]:
    """Asks for the first step, and waits for the engine's call."""
    engine.has_call.clear()
    first = asyncio.ensure_future(anext(steps))
    assert await asyncio.to_thread(engine.has_call.wait, WAIT_S)
    return first, engine.calls[-1]


async def test_reply_is_told_in_pieces_with_its_thinking(engine):
    desk = make_desk(engine)
    steps = desk.reply(request())
    first, call = await begun(engine, steps)
    say(call, "hm", api.ReplyPart.THINKING)
    assert await first == Piece(part=api.ReplyPart.THINKING, text="hm")
    say(call, "yes")
    done(call, api.FinishReason.LENGTH)
    assert [step async for step in steps] == [
        Piece(part=api.ReplyPart.ANSWER, text="yes"),
        Ended(reason=api.FinishReason.LENGTH, stats=STATS),
    ]
    assert not engine.cancelled
    assert len(desk.line) == 0


async def test_who_leaves_stops_the_engine_and_frees_the_turn(engine):
    desk = make_desk(engine)
    steps = desk.reply(request())
    first, call = await begun(engine, steps)
    waiting = desk.reply(request())
    assert await anext(waiting) == Waiting(about="waiting, 1 before this one")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert engine.cancelled == [call]
    second, next_call = await begun(engine, waiting)
    say(next_call, "yes")
    assert (await second).text == "yes"
    await waiting.aclose()
    assert engine.cancelled == [call, next_call]
    assert len(desk.line) == 0


async def test_silence_is_broken_before_it_is_too_long(engine):
    desk = make_desk(engine, keep_alive_s=0.01)
    steps = desk.reply(request())
    assert await anext(steps) == Waiting(about="the reply is being made")
    say(engine.calls[-1], "yes")
    while isinstance(step := await anext(steps), Waiting):
        pass
    assert step.text == "yes"
    await steps.aclose()


async def test_stop_text_ends_the_engines_work_and_counts_it(engine):
    desk = make_desk(engine)
    steps = desk.reply(request("END"))
    first, call = await begun(engine, steps)
    say(call, "one E")
    assert (await first).text == "one "
    say(call, "ND two")
    assert [step async for step in steps] == [Ended(reason=api.FinishReason.STOP, stats=STATS)]
    assert engine.cancelled == [call]


async def test_chat_beyond_the_context_is_refused_and_not_trimmed(engine):
    steps = make_desk(engine).reply(request())
    first, call = await begun(engine, steps)
    call.deliver(api.ContextTrimmed(request_id="r", num_turns=2, num_tokens=90, limit=100))
    with pytest.raises(ApiError) as caught:
        await first
    assert caught.value.code == "context_length_exceeded"
    assert engine.cancelled == [call]


async def test_lost_engine_is_started_again_by_the_next_request(engine):
    engine.lost = api.EngineProcessError("It was killed.")
    may_load = threading.Event()

    def reload() -> None:
        assert may_load.wait(WAIT_S)
        engine.lost = None

    desk = make_desk(engine, keep_alive_s=0.01, reload=reload)
    assert desk.is_lost
    steps = desk.reply(request())
    assert await anext(steps) == Waiting(about="the engine is being started again")
    may_load.set()
    while not engine.calls:
        await anext(steps)
    assert not desk.is_lost
    await steps.aclose()


async def test_engine_that_cannot_be_started_again_is_told(engine):
    engine.lost = api.EngineProcessError("It was killed.")

    def reload() -> None:
        raise api.BudgetError("Too little memory.")

    with pytest.raises(ApiError, match="Too little memory") as caught:
        await anext(make_desk(engine, reload=reload).reply(request()))
    assert caught.value.status == 500


async def test_engine_that_could_not_load_is_started_by_the_request_after(engine):
    engine.lost = api.EngineProcessError("It was killed.")
    tries = []

    def reload() -> None:
        tries.append(len(tries))
        engine.lost = None  # The process runs; whether it has a model is another question.
        if len(tries) == 1:
            raise api.BudgetError("Too little memory.")

    desk = make_desk(engine, reload=reload)
    with pytest.raises(ApiError):
        await anext(desk.reply(request()))
    assert desk.is_lost

    first, call = await begun(engine, steps := desk.reply(request()))

    assert tries == [0, 1]
    assert not desk.is_lost
    say(call, "yes")
    await first
    await steps.aclose()


async def test_client_that_leaves_a_start_leaves_it_to_the_next_request(engine):
    engine.lost = api.EngineProcessError("It was killed.")
    may_load, starts = threading.Event(), []

    def reload() -> None:
        starts.append(1)
        engine.lost = None
        assert may_load.wait(WAIT_S)

    desk = make_desk(engine, keep_alive_s=0.01, reload=reload)
    steps = desk.reply(request())
    await anext(steps)
    await steps.aclose()

    again = desk.reply(request())
    assert await anext(again) == Waiting(about="the engine is being started again")
    assert not engine.calls  # Nothing is asked of an engine without a model.
    may_load.set()
    while not engine.calls:
        await anext(again)

    assert starts == [1]
    await again.aclose()


async def test_lost_engine_is_started_again_by_who_asks_for_its_health(engine):
    engine.lost = api.EngineProcessError("It was killed.")
    has_loaded = threading.Event()

    def reload() -> None:
        engine.lost = None
        has_loaded.set()

    desk = make_desk(engine, reload=reload)
    desk.revive()
    assert await asyncio.to_thread(has_loaded.wait, WAIT_S)
    while desk.is_lost:
        await asyncio.sleep(0)
        desk.revive()


async def test_end_of_the_server_while_the_engine_loads_ends_the_engine(engine):
    engine.lost = api.EngineProcessError("It was killed.")

    def reload() -> None:
        engine.lost = None
        assert engine.is_closed.wait(WAIT_S), "nothing else ends a load"
        raise api.EngineProcessError("The engine process was shut down.")

    desk = make_desk(engine, keep_alive_s=0.01, reload=reload)
    steps = desk.reply(request())
    assert await anext(steps) == Waiting(about="the engine is being started again")
    desk.close()

    async def wait() -> None:
        async for step in steps:
            assert isinstance(step, Waiting)

    with pytest.raises(ApiError, match="shut down") as caught:
        await wait()
    assert caught.value.status == 503
    assert not engine.calls
    assert len(desk.line) == 0


async def test_end_of_the_server_leaves_an_engine_alone_that_loads_nothing(engine):
    make_desk(engine).close()
    assert not engine.is_closed.is_set()


async def test_end_of_the_server_stops_the_reply_and_is_told(engine):
    desk = make_desk(engine)
    steps = desk.reply(request())
    first, call = await begun(engine, steps)
    say(call, "yes")
    await first
    desk.close()
    with pytest.raises(ApiError, match="shutting down"):
        await anext(steps)
    assert engine.cancelled == [call]
    with pytest.raises(ApiError, match="shutting down"):
        await anext(desk.reply(request()))
