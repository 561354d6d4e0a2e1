"""The chat line by line: what it asks, prints, keeps and says."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import fake_engine
import pytest
from app_fakes import FakeCatalog
from mira_app.answer import Answerer
from mira_app.conversation import Conversation, TurnStatus
from mira_app.engine_call import EngineCall
from mira_app.history import HistoryStore
from mira_app.kept_chat import KeptChat, find_chat
from mira_app.plain_chat import PlainChat
from mira_app.progress import LineProgress
from mira_app.settings import Settings, load_settings
from mira_app.stored_chat import HistoryError, StoredChat
from mira_engine import api


class InterruptedCall(EngineCall):
    """Interrupts whoever reads it: before the first event that `is_due` names, once or twice."""

    def __init__(self, request_id: str, num_interrupts: int) -> None:
        super().__init__(request_id)
        self.num_interrupts = num_interrupts

    def __iter__(self):
        for event in super().__iter__():
            yield event
            if isinstance(event, api.TokenDelta) and self.num_interrupts:
                self.num_interrupts -= 1
                raise KeyboardInterrupt


class TalkingClient:
    """An engine that answers each chat with what `reply` says, at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[str, str], ...]] = []
        self.sampling: list[api.SamplingConfig] = []
        self.loads = 0
        self.restarts = 0
        self.lost: api.EngineProcessError | None = None
        self.is_ready = True
        self.reply: Callable[[EngineCall], None] = say("Yes.")
        self.num_interrupts = 0

    def new_request_id(self) -> str:
        return f"r{len(self.sent)}"

    def submit(self, request) -> EngineCall:
        call = InterruptedCall(request.request_id, self.num_interrupts)
        if isinstance(request, api.LoadModel):
            self.loads += 1
            call.deliver(
                api.ModelLoaded(
                    request_id=call.request_id, model=request.model, title="Fake MoE",
                    context_length=2048, plan=fake_engine.PLAN, load_s=0.1,
                )
            )  # fmt: skip
        else:
            self.sent.append(tuple((each.role, each.content) for each in request.messages))
            self.sampling.append(request.sampling)
            self.reply(call)
        return call

    def cancel(self, call: EngineCall) -> None:
        end(call, "Ye", api.FinishReason.CANCELLED)

    def restart(self) -> None:
        self.lost, self.restarts = None, self.restarts + 1


def end(call: EngineCall, text: str, reason: api.FinishReason = api.FinishReason.STOP) -> None:
    call.deliver(
        api.GenerationDone(
            request_id=call.request_id, text=text, reason=reason, stats=fake_engine.STATS
        )
    )


def delta(call: EngineCall, text: str, part: api.ReplyPart = api.ReplyPart.ANSWER) -> None:
    call.deliver(api.TokenDelta(request_id=call.request_id, text=text, num_tokens=1, part=part))


def say(
    text: str, reason: api.FinishReason = api.FinishReason.STOP
) -> Callable[[EngineCall], None]:
    def reply(call: EngineCall) -> None:
        delta(call, text)
        end(call, text, reason)

    return reply


class Lines(io.BytesIO):
    """Typed lines; `^C` on one of its own is an interrupt."""

    def readline(self, size=-1) -> bytes:
        line = super().readline(size)
        if line == b"^C\n":
            raise KeyboardInterrupt
        return line


class FakeFullHistoryStore(HistoryStore):
    """Its disk is full."""

    def save(self, chat: StoredChat) -> str:
        raise HistoryError("The disk is full.")


class Chat:
    def __init__(self, store: HistoryStore) -> None:
        self.client = TalkingClient()
        self.out, self.err = io.StringIO(), io.StringIO()
        self.store = store
        self.chat: PlainChat | None = None

    def run(
        self,
        text: str | bytes,
        *,
        conversation: Conversation | None = None,
        is_prompting: bool = False,
        settings: Settings | None = None,
        stored: StoredChat | None = None,
    ) -> bool:
        settings = settings or Settings()
        answerer = Answerer(
            self.client, FakeCatalog(is_ready=True), settings,
            err=self.err, make_progress=LineProgress,
        )  # fmt: skip
        kept = KeptChat(self.store, say=lambda text: print(text, file=self.err))
        if stored is not None:
            conversation = kept.resume(stored)
        self.chat = PlainChat(
            self.client, answerer, settings,
            kept=kept,
            conversation=conversation or Conversation(),
            lines=Lines(text if isinstance(text, bytes) else text.encode()),
            out=self.out, err=self.err, is_prompting=is_prompting,
        )  # fmt: skip
        return self.chat.run()

    @property
    def conversation(self) -> Conversation:
        return self.chat._conversation

    @property
    def said(self) -> str:
        return self.err.getvalue()

    def stored(self) -> list[StoredChat]:
        return [self.store.load(each.chat_id) for each in self.store.chats()]


@pytest.fixture
def store(tmp_path):
    """A history in which each write is a day younger than the one before."""
    days = (datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=i) for i in range(1000))
    made = HistoryStore(tmp_path / "history.sqlite3", clock=days.__next__)
    assert made.open() == []
    yield made
    made.close()


@pytest.fixture
def chat(store):
    return Chat(store)


def test_replies_alone_are_on_stdout_and_each_question_brings_the_chat(chat):
    assert chat.run("one\n\n  \ntwo")
    assert chat.out.getvalue() == "Yes.\nYes.\n"
    assert chat.client.sent == [
        (("user", "one"),),
        (("user", "one"), ("assistant", "Yes."), ("user", "two")),
    ]
    assert chat.client.loads == 1
    assert "Fake MoE is ready." in chat.said
    assert "you> " not in chat.said


def test_prompt_is_on_stderr_where_somebody_types(chat):
    chat.run("one\\\nmore\n", is_prompting=True)
    assert chat.client.sent == [(("user", "one\nmore"),)]
    assert chat.said.endswith("you> ...> you> ")


def test_reply_cannot_control_the_terminal(chat):
    def reply(call):
        delta(call, "a\x1b[3")
        delta(call, "1mb\x07")
        end(call, "a\x1b[31mb\x07")

    chat.client.reply = reply
    chat.run("x\n")
    assert chat.out.getvalue() == "ab\n"
    assert chat.conversation.head.content == "a\x1b[31mb\x07"  # kept as it was said


def test_line_that_is_not_utf8_is_left_out_and_the_chat_goes_on(chat):
    chat.run(b"caf\xe9\nok\n")
    assert chat.client.sent == [(("user", "ok"),)]
    assert "not UTF-8" in chat.said


def test_retry_and_edit_make_siblings(chat):
    chat.run("one\n/retry\n/edit other\n")
    assert chat.client.sent == [(("user", "one"),), (("user", "one"),), (("user", "other"),)]
    conversation = chat.conversation
    assert [turn.content for turn in conversation.siblings(0)] == ["one", "other"]
    assert len(conversation.siblings(1)) == 2


def test_edit_alone_shows_the_question_and_changes_nothing(chat):
    chat.run("one\n/edit\n")
    assert "The last question was: one" in chat.said
    assert len(chat.client.sent) == 1


@pytest.mark.parametrize("command", ["/retry", "/edit x", "/edit"])
def test_command_without_a_question_says_so(chat, command):
    chat.run(f"{command}\n")
    assert "There is no question yet." in chat.said
    assert not chat.client.sent


def test_notes_of_the_engine_stand_behind_the_reply_and_not_inside(chat):
    def reply(call: EngineCall) -> None:
        delta(call, "A ")
        call.deliver(api.Notice(code="n", text="Something fell back."))
        delta(call, "cache.")
        end(call, "A cache.", api.FinishReason.STOP)

    chat.client.reply, chat.err = reply, chat.out  # One terminal shows both.
    chat.run("one\n")
    shown = chat.out.getvalue()
    assert "A cache.\n" in shown
    assert shown.index("A cache.") < shown.index("Something fell back.")


def test_system_prompt_is_sent_shown_and_taken_back(chat):
    chat.run("/system\n/system be brief\none\n/system -\ntwo\n")
    assert chat.client.sent[0] == (("system", "be brief"), ("user", "one"))
    assert chat.client.sent[1][0] == ("user", "one")
    assert chat.said.count("There is no system prompt.") == 2
    assert "The system prompt is: be brief" in chat.said


def test_new_begins_another_chat_and_keeps_the_first(chat):
    chat.run("one\n/new\ntwo\n")
    assert chat.client.sent[1] == (("user", "two"),)
    titles = sorted(stored.title for stored in chat.store.chats())
    assert titles == ["one", "two"]
    assert chat.store.load(chat.chat._kept.chat_id).shown_title == "two"


def test_help_stats_quit_and_unknown_commands(chat):
    chat.run("/help\n/stats\none\n/stats\n/sats\n//slash\n/quit\nnot read\n")
    for name in ("new", "retry", "edit", "system", "think", "stats", "quit"):
        assert f"/{name}: " in chat.said
    assert "There are no figures yet." in chat.said
    assert "8.0 tok/s" in chat.said
    assert "There is no command /sats: did you mean /stats?" in chat.said
    assert [sent[-1] for sent in chat.client.sent] == [("user", "one"), ("user", "/slash")]


def test_thinking_is_shown_only_where_asked(chat):
    def reply(call):
        delta(call, "Hm.", api.ReplyPart.THINKING)
        delta(call, "Yes.")
        end(call, "Yes.")

    chat.client.reply = reply
    chat.run("one\n/think\ntwo\n")
    assert chat.out.getvalue() == "Yes.\nYes.\n"
    assert chat.said.count("Hm.\n") == 1


def test_interrupt_stops_the_reply_keeps_it_and_the_chat_goes_on(chat):
    def reply(call):
        delta(call, "Ye")
        chat.client.num_interrupts = 0
        chat.client.reply = say("Yes.")

    chat.client.reply, chat.client.num_interrupts = reply, 1
    chat.run("one\ntwo\n")
    assert chat.out.getvalue() == "Ye\nYes.\n"
    assert "Stopped" in chat.said
    first = chat.conversation.turns[1]
    assert (first.content, first.status) == ("Ye", TurnStatus.STOPPED)
    assert chat.client.sent[1][1] == ("assistant", "Ye")


def test_second_interrupt_while_stopping_ends_and_keeps_the_reply(chat):
    """The first one is being obeyed when the second one comes."""

    def reply(call):
        delta(call, "Ye")

    def cancel(call):
        delta(call, "s")

    chat.client.reply, chat.client.cancel = reply, cancel
    chat.client.num_interrupts = 2
    with pytest.raises(KeyboardInterrupt):
        chat.run("one\ntwo\n")
    (stored,) = chat.stored()
    assert stored.conversation.head.content == "Yes"
    assert stored.conversation.head.status is TurnStatus.STOPPED


def test_one_interrupt_at_the_prompt_warns_and_two_end(chat):
    chat.run("^C\none\n^C\n")
    assert len(chat.client.sent) == 1
    assert chat.said.count("Ctrl+C again") == 2
    with pytest.raises(KeyboardInterrupt):
        chat.run("^C\n^C\nnot read\n")
    assert len(chat.client.sent) == 1


def test_failed_reply_is_told_kept_and_can_be_retried(chat):
    def fail(call):
        delta(call, "Ye")
        error = api.ContextLengthError("Too long.", hint="Less.")
        call.deliver(api.RequestFailed(request_id=call.request_id, **error.to_fields()))
        chat.client.reply = say("Yes.")

    chat.client.reply = fail
    assert not chat.run("one\n")
    assert "error: Too long.\nhint: Less." in chat.said
    head = chat.conversation.head
    assert (head.content, head.status, head.error) == ("Ye", TurnStatus.ERROR, "Too long.")
    assert chat.run("/retry\n", conversation=chat.conversation)
    assert chat.conversation.head.status is TurnStatus.COMPLETE


def test_engine_that_died_is_started_again_with_the_model(chat):
    def die(call):
        delta(call, "Ye")
        chat.client.lost = api.EngineProcessError("The engine process was killed.")
        call.fail(chat.client.lost)
        chat.client.reply = say("Yes.")

    chat.client.reply = die
    assert chat.run("one\ntwo\n")
    assert (chat.client.restarts, chat.client.loads) == (1, 2)
    assert chat.out.getvalue() == "Ye\nYes.\n"


def test_reply_that_reached_its_limit_is_told(chat):
    chat.client.reply = say("Yes", api.FinishReason.LENGTH)
    chat.run("one\n")
    assert "reached its limit (length)" in chat.said


def test_question_is_kept_before_its_reply(chat):
    def reply(call):
        chat.seen = [stored.conversation.head.content for stored in chat.stored()]
        end(call, "Yes.")

    chat.client.reply = reply
    chat.run("one\n")
    assert chat.seen == ["one"]
    (stored,) = chat.stored()
    assert (stored.model, stored.conversation.head.model) == ("builtin", "builtin")
    assert chat.store.last_chat_id == stored.chat_id


def test_history_that_cannot_be_written_is_told_once_and_the_chat_goes_on(tmp_path):
    chat = Chat(FakeFullHistoryStore(tmp_path / "history.sqlite3"))
    chat.run("one\ntwo\n")
    assert len(chat.client.sent) == 2
    assert chat.said.count("not being saved: The disk is full.") == 1


def test_chat_that_goes_on_is_shown_and_sent(chat):
    before = Conversation().with_user("one").with_reply("Yes.")
    chat.run("two\n", conversation=before)
    assert "you: one\nmodel: Yes.\n" in chat.said
    assert chat.client.sent == [(("user", "one"), ("assistant", "Yes."), ("user", "two"))]


def test_sampling_of_the_command_line_is_for_this_run_and_not_kept(chat):
    settings = load_settings({"max_tokens": 20, "temperature": 0.0}, {"MIRA_CHAT_TOP_K": "5"})
    chat.run("one\n", settings=settings)
    (stored,) = chat.stored()
    assert stored.sampling is None
    chat.run("two\n", stored=stored)
    asked = [(each.max_new_tokens, each.top_k) for each in chat.client.sampling]
    assert asked == [(20, 5), (1024, Settings().sampling.top_k)]


def test_sampling_of_the_chats_own_holds_below_the_command_line_and_stays(chat):
    own = api.SamplingConfig(temperature=0.5, max_new_tokens=99)
    chat.store.save(dataclasses.replace(stored_chat("aa11"), sampling=own))
    settings = load_settings({"max_tokens": 20}, {"MIRA_CHAT_TEMPERATURE": "1.5"})
    chat.run("one\n/new\ntwo\n", settings=settings, stored=chat.store.load("aa11"))
    asked = [(each.temperature, each.max_new_tokens) for each in chat.client.sampling]
    assert asked == [(0.5, 20), (1.5, 20)], "the new chat has nothing of its own"
    assert chat.store.load("aa11").sampling == own


def test_chat_that_another_program_went_on_with_goes_on_as_a_branch_and_is_told(chat, tmp_path):
    def reply(call):
        if len(chat.client.sent) == 2:
            other = HistoryStore(tmp_path / "history.sqlite3")
            other.open()
            theirs = other.load(chat.chat._kept.chat_id)
            answered = theirs.conversation.with_reply("No.")
            other.save(dataclasses.replace(theirs, conversation=answered))
            other.close()
        end(call, "Yes.")

    chat.client.reply = reply
    chat.run("one\ntwo\nthree\n")
    (stored,) = chat.stored()
    ours = ["one", "Yes.", "two", "Yes.", "three", "Yes."]
    assert [turn.content for turn in stored.conversation.path()] == ours
    assert [turn.content for turn in stored.conversation.siblings(3)] == ["No.", "Yes."]
    assert chat.said.count("note: This chat was changed by another window.") == 1
    assert [m[1] for m in chat.client.sent[-1]] == ours[:-1]


def stored_chat(chat_id: str, title: str = "") -> StoredChat:
    conversation = Conversation().with_user("one")
    return StoredChat(chat_id=chat_id, title=title, conversation=conversation)


@pytest.mark.parametrize(
    ("wanted", "found"), [("aa11", "aa11"), ("b", "bb22"), (None, "bb22"), ("last", "bb22")]
)
def test_chat_is_found_by_id_beginning_and_age(store, wanted, found):
    for chat_id in ("aa11", "bb22"):
        store.save(stored_chat(chat_id))
    assert find_chat(store, wanted).chat_id == found


def test_last_chat_is_the_one_that_was_open(store):
    for chat_id in ("aa11", "bb22"):
        store.save(stored_chat(chat_id))
    store.set_last_chat("aa11")
    assert find_chat(store, "last").chat_id == "aa11"
    store.delete("aa11")
    assert find_chat(store, "last").chat_id == "bb22"


def test_chat_that_is_not_there_is_named_with_those_that_are(store):
    with pytest.raises(api.ConfigError, match="no chat yet"):
        find_chat(store, "x")
    store.save(stored_chat("aa11", title="T"))
    with pytest.raises(api.ConfigError, match="begins with 'x'") as caught:
        find_chat(store, "x")
    assert "aa11 (T)" in caught.value.hint
