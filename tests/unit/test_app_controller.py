"""The state machine under the screens, without a process."""

from __future__ import annotations

import pytest
from app_fakes import FakeCatalog, FakeEngineClient
from fake_engine import PLAN, STATS
from mira_app.controller import ChatController, Stage
from mira_app.conversation import TurnStatus
from mira_app.settings import Settings
from mira_engine import api


@pytest.fixture
def client():
    return FakeEngineClient()


@pytest.fixture
def controller(client):
    return ChatController(client, FakeCatalog(is_ready=True), Settings())


@pytest.fixture
def ready(controller, client):
    controller.choose("builtin")
    client.deliver_loaded(PLAN)
    controller.poll()
    assert controller.stage is Stage.READY
    return controller


def test_unknown_model_raises_and_changes_nothing(controller, client):
    with pytest.raises(api.UnknownModelError):
        controller.choose("nope")
    assert controller.stage is Stage.IDLE
    assert client.requests == []


def test_error_of_reply_keeps_partial_and_chat_goes_on(ready, client):
    ready.send("q")
    client.deliver_text("half", STATS)
    client.calls[-1].fail(api.NonFiniteError("nan in the logits."))
    update = ready.poll()
    assert isinstance(update.error, api.NonFiniteError)
    assert ready.conversation.head.status is TurnStatus.ERROR
    assert ready.conversation.head.content == "half"
    assert ready.can_send


def test_death_mid_reply_reloads_once_and_second_death_gives_up(ready, client):
    ready.send("q")
    client.deliver_text("half")
    client.die()
    assert isinstance(ready.poll().error, api.EngineProcessError)
    assert (ready.stage, client.num_restarts) == (Stage.RECOVERING, 1)
    client.die()
    assert ready.poll().error is not None
    assert (ready.stage, client.num_restarts) == (Stage.FAILED, 1)
    assert ready.poll().error is None


def test_send_after_failure_reloads_and_then_asks(ready, client):
    client.die()
    ready.poll()
    client.die()
    ready.poll()
    assert ready.stage is Stage.FAILED
    ready.send("again")
    assert (ready.stage, client.num_restarts) == (Stage.RECOVERING, 2)
    client.deliver_loaded(PLAN)
    ready.poll()
    assert ready.stage is Stage.REPLYING
    client.deliver_done("answer", STATS)
    ready.poll()
    ready.poll()
    assert ready.conversation.head.content == "answer"
    assert ready.stage is Stage.READY


def test_failed_reload_marks_the_waiting_question(ready, client):
    client.die()
    ready.poll()
    client.die()
    ready.poll()
    ready.send("again")
    client.calls[-1].fail(api.BudgetError("Too small."))
    assert isinstance(ready.poll().error, api.BudgetError)
    assert ready.conversation.head.status is TurnStatus.ERROR
    assert ready.stage is Stage.FAILED


def test_choosing_another_model_while_answering_keeps_partial_as_stopped(ready, client):
    ready.send("q")
    client.deliver_text("half")
    ready.poll()
    ready.choose("/models/OLMoE-1B-7B")
    assert client.cancelled == [client.calls[1]]
    assert ready.conversation.head.status is TurnStatus.STOPPED
    assert ready.conversation.head.content == "half"
    assert ready.stage is Stage.LOADING


def test_cancelled_request_without_done_event_counts_as_stopped(ready, client):
    ready.send("q")
    assert ready.stop()
    client.calls[-1].fail(api.CancelledError("Stopped."))
    assert ready.poll().error is None
    assert ready.conversation.head.status is TurnStatus.STOPPED
    assert not ready.stop()


def test_send_while_answering_is_refused(ready):
    ready.send("q")
    with pytest.raises(ValueError, match="replying"):
        ready.send("r")
    with pytest.raises(ValueError, match="replying"):
        ready.regenerate()
    with pytest.raises(ValueError, match="under way"):
        ready.new_chat()
