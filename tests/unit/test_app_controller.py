"""The state machine under the screens, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from app_fakes import FakeCatalog, FakeEngineClient, FakeHistory
from fake_engine import PLAN, STATS
from mira_app.controller import ChatController, Stage
from mira_app.conversation import Conversation, TurnStatus
from mira_app.settings import Settings, load_settings
from mira_app.stored_chat import StoredChat
from mira_engine import api


@pytest.fixture
def client():
    return FakeEngineClient()


@pytest.fixture
def history():
    return FakeHistory()


@pytest.fixture
def controller(client, history):
    return ChatController(client, FakeCatalog(is_ready=True), Settings(), history=history)


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


def answer(controller, client, text: str, **fields) -> None:
    client.deliver_done(text, STATS, **fields)
    controller.poll()
    controller.poll()


def test_thinking_is_kept_apart_and_passed_on(ready, client):
    ready.send("q")
    client.deliver_text("hm ", part=api.ReplyPart.THINKING)
    client.deliver_text("so", part=api.ReplyPart.THINKING)
    client.deliver_text("yes")
    update = ready.poll()
    assert (update.thinking, update.text) == ("hm so", "yes")
    assert (ready.thinking, ready.partial) == ("hm so", "yes")
    answer(ready, client, "yes", thinking="hm so")
    assert ready.conversation.head.thinking == "hm so"
    assert ready.conversation.head.model == "builtin"
    ready.send("r")
    assert client.requests[-1].messages[1].thinking == "hm so"
    assert ready.thinking == ""


def test_chat_is_saved_after_question_and_reply_with_title_of_first_question(
    ready, client, history
):
    ready.send("What is\n a cache? " + "x" * 100)
    assert [len(chat.conversation.turns) for chat in history.saved] == [1]
    answer(ready, client, "a store")
    ready.send("more")
    assert [len(chat.conversation.turns) for chat in history.saved] == [1, 2, 3]
    assert len({chat.chat_id for chat in history.saved}) == 1
    title = history.saved[-1].title
    assert title.startswith("What is a cache? xxx")
    assert len(title) <= 60
    assert history.saved[-1].sampling is None


def test_save_that_fails_is_told_once_and_the_chat_goes_on(ready, client, history):
    history.error = api.MiraError("The disk is full.")
    ready.send("q")
    assert ready.poll().error is history.error
    assert ready.poll().error is None
    history.error = None
    answer(ready, client, "a")
    assert len(history.saved) == 1


def test_edit_makes_a_sibling_and_siblings_can_be_shown(ready, client):
    ready.send("one")
    answer(ready, client, "a")
    ready.send("two")
    answer(ready, client, "b")
    ready.edit(0, "uno")
    assert [m.content for m in client.requests[-1].messages] == ["uno"]
    with pytest.raises(ValueError, match="under way"):
        ready.show_sibling(4, -1)
    answer(ready, client, "c")
    ready.show_sibling(4, -1)
    assert [turn.content for turn in ready.conversation.path()] == ["one", "a", "two", "b"]
    ready.show_sibling(0, -1)
    assert ready.conversation.head.content == "b"
    ready.reach(5)
    assert [turn.content for turn in ready.conversation.path()] == ["uno", "c"]
    with pytest.raises(ValueError, match="no question"):
        ready.edit(5, "no")


def test_regenerate_answers_an_earlier_question_again(ready, client):
    for text in ("one", "two"):
        ready.send(text)
        answer(ready, client, "a")
    ready.regenerate(1)
    assert [m.content for m in client.requests[-1].messages] == ["one"]
    answer(ready, client, "again")
    assert [t.content for t in ready.conversation.siblings(4)] == ["a", "again"]


def test_opened_chat_goes_on_with_its_own_sampling_and_prompt(ready, client, history):
    sampling = api.SamplingConfig(temperature=1.5)
    conversation = Conversation(system_prompt="be kind").with_user("q").with_reply("a", stats=STATS)
    ready.open_chat(
        StoredChat(
            chat_id="x", title="old", model="m", conversation=conversation, sampling=sampling
        )
    )
    assert ready.stats == STATS
    ready.send("r")
    request = client.requests[-1]
    assert request.sampling == sampling
    assert request.messages[0].content == "be kind"
    assert (history.saved[-1].chat_id, history.saved[-1].title) == ("x", "old")
    assert history.saved[-1].sampling == sampling
    answer(ready, client, "b")
    ready.new_chat()
    assert ready.chat_id != "x"
    assert (ready.title, ready.system_prompt, ready.sampling) == ("", "", Settings().sampling)


def test_option_of_the_sampling_holds_for_this_run_and_is_not_kept(client, history):
    settings = load_settings({"max_tokens": 20}, {})
    controller = ChatController(client, FakeCatalog(is_ready=True), settings, history=history)
    controller.choose("builtin")
    client.deliver_loaded(PLAN)
    controller.poll()
    controller.send("q")
    assert client.requests[-1].sampling.max_new_tokens == 20
    assert history.saved[-1].sampling is None
    client.deliver_done("a", STATS)
    controller.poll()
    own = api.SamplingConfig(temperature=1.5, max_new_tokens=99)
    controller.open_chat(StoredChat(chat_id="x", conversation=Conversation(), sampling=own))
    assert controller.sampling == replace(own, max_new_tokens=20)
    controller.send("q")
    assert history.saved[-1].sampling == own


def test_sampling_that_is_set_in_a_chat_is_kept_with_it_though_an_option_was_given(client, history):
    settings = load_settings({"max_tokens": 20}, {})
    controller = ChatController(client, FakeCatalog(is_ready=True), settings, history=history)
    controller.conversation = Conversation().with_user("q")
    controller.set_chat_settings("be kind", controller.sampling)
    assert history.saved[-1].sampling is None, "only the prompt was changed"
    chosen = replace(controller.sampling, temperature=1.5)
    controller.set_chat_settings("be kind", chosen)
    assert controller.sampling == chosen
    assert history.saved[-1].sampling == replace(Settings().sampling, temperature=1.5)
    controller.set_chat_settings("be kind", settings.sampling)
    assert history.saved[-1].sampling is None


def test_option_of_the_sampling_is_not_kept_with_what_is_set_in_a_chat(client, history):
    settings = load_settings({"temperature": 0.9}, {"MIRA_CHAT_SEED": "7"})
    controller = ChatController(client, FakeCatalog(is_ready=True), settings, history=history)
    own = api.SamplingConfig(temperature=0.2, max_new_tokens=99)
    controller.open_chat(
        StoredChat(chat_id="x", conversation=Conversation().with_user("q"), sampling=own)
    )
    chosen = replace(controller.sampling, max_new_tokens=77)
    controller.set_chat_settings("", chosen)
    assert controller.sampling == chosen
    assert history.saved[-1].sampling == replace(own, max_new_tokens=77)

    controller.new_chat()
    controller.conversation = Conversation().with_user("q")
    controller.set_chat_settings("", replace(controller.sampling, max_new_tokens=77))
    lasting = replace(Settings().sampling, seed=7)
    assert history.saved[-1].sampling == replace(lasting, max_new_tokens=77)


def test_turns_of_another_app_come_into_the_chat_and_are_told_once(ready, client, history):
    ready.send("q")
    other = Conversation().with_user("theirs")
    history.save = lambda chat: chat.conversation.grafted_on(other)
    client.deliver_done("a", STATS)
    update = ready.poll()
    assert update.is_changed_elsewhere
    assert update.renumbered == {0: 1, 1: 2}
    assert [turn.content for turn in ready.conversation.turns] == ["theirs", "q", "a"]
    assert [turn.content for turn in ready.conversation.path()] == ["q", "a"]
    assert not ready.poll().is_changed_elsewhere


def test_opened_chat_that_ends_with_a_question_is_not_asked_by_itself(ready, client):
    client.die()
    ready.poll()
    ready.open_chat(
        StoredChat(chat_id="x", title="", model="", conversation=Conversation().with_user("q"))
    )
    client.deliver_loaded(PLAN)
    ready.poll()
    assert ready.stage is Stage.READY
    assert not any(isinstance(request, api.Generate) for request in client.requests)


def test_trimmed_and_residency_are_kept(ready, client):
    ready.send("q")
    call = client.calls[-1]
    trimmed = api.ContextTrimmed(request_id=call.request_id, num_turns=2, num_tokens=9, limit=10)
    sample = api.ResidencySample(request_id=call.request_id, regions=("H.",), heat=("90",))
    call.deliver(trimmed)
    call.deliver(sample)
    ready.poll()
    assert (ready.trimmed, ready.residency) == (trimmed, sample)
    answer(ready, client, "a")
    ready.send("r")
    assert ready.trimmed is None
    assert ready.residency is sample


def test_reconfigure_waits_for_the_reply_and_keeps_the_model(ready, client):
    engine = api.EngineConfig(num_draft_tokens=2)
    ready.send("q")
    ready.reconfigure(engine)
    ready.poll()
    assert not any(isinstance(request, api.Reconfigure) for request in client.requests)
    answer(ready, client, "a")
    ready.poll()
    assert client.requests[-1].config == engine
    assert not ready.can_send
    client.deliver_loaded(PLAN)
    ready.poll()
    assert ready.stage is Stage.READY
    assert ready.settings.engine == engine


def test_reconfigure_leaves_no_reason_for_a_k_that_no_longer_holds(ready, client):
    ready.stats = replace(ready.stats, governor_reason="drafting is off.")
    ready.reconfigure(api.EngineConfig(num_draft_tokens=2))
    ready.poll()
    client.deliver_loaded(PLAN)
    ready.poll()
    assert not ready.stats.governor_reason


def test_refused_reconfigure_goes_back_and_the_model_stays_loaded(ready, client):
    before = ready.settings.engine
    ready.reconfigure(api.EngineConfig(num_draft_tokens=2))
    ready.poll()
    client.calls[-1].fail(api.BudgetError("Too small."))
    assert isinstance(ready.poll().error, api.BudgetError)
    assert ready.stage is Stage.READY
    assert ready.settings.engine == before
    assert ready.loaded is not None
