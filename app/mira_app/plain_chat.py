"""A chat line by line, for screen readers, pipes and terminals that draw nothing.

Replies go to one stream and everything else to another, so that either can be piped. The
same engine client as the screens use. Blocking, in the main thread: an interrupt stops the
reply and keeps what was said; a second one ends the chat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from difflib import get_close_matches
from typing import BinaryIO, NamedTuple, TextIO

from mira_engine.api import FinishReason, MiraError, ModelLoaded, ReplyStats

from .answer import Answer, Answerer, ReplyStreams
from .conversation import Conversation, Role, TurnStatus
from .engine_client import EngineClient
from .kept_chat import KeptChat
from .reporting import print_error
from .sanitise import sanitise
from .settings import Settings

PROMPT = "you> "
CONTINUED_PROMPT = "...> "


class _Command(NamedTuple):
    run: Callable[[str], None]
    usage: str


class PlainChat:
    """One chat on three streams.

    Args:
        client: The engine, to start it again where it has died.
        answerer: Prepares, loads and answers.
        settings: What the person chose.
        kept: Where the chat is saved.
        conversation: The chat to go on with.
        lines: Questions and commands, UTF-8.
        out: Takes replies.
        err: Takes prompts, notes and figures.
        is_prompting: Whether somebody types: then there is a prompt.
    """

    def __init__(
        self,
        client: EngineClient,
        answerer: Answerer,
        settings: Settings,
        *,
        kept: KeptChat,
        conversation: Conversation,
        lines: BinaryIO,
        out: TextIO,
        err: TextIO,
        is_prompting: bool,
    ) -> None:
        self._client, self._answerer, self._settings = client, answerer, settings
        self._kept, self._conversation = kept, conversation
        self._lines, self._out, self._err = lines, out, err
        self._is_prompting = is_prompting
        self._loaded: ModelLoaded | None = None
        self._answer: Answer | None = None
        self._is_thinking_shown = False
        self._has_ended = False
        self._has_failed = False
        self._commands = {
            "help": _Command(self._help, "this list"),
            "new": _Command(self._new, "begin a new chat"),
            "retry": _Command(self._retry, "have the last question answered again"),
            "edit": _Command(self._edit, "TEXT: ask this instead of the last question"),
            "system": _Command(self._system, "TEXT: the system prompt; - for none; shows it"),
            "think": _Command(self._think, "show or hide what the model thinks first"),
            "stats": _Command(self._stats, "figures of the last reply"),
            "quit": _Command(self._quit, "end; Ctrl+D does, too"),
        }

    def run(self) -> bool:
        """Chats until the input or the person ends it.

        Returns:
            Whether the last question got its reply.

        Raises:
            MiraError: The model cannot be loaded at all.
            KeyboardInterrupt: The person interrupted twice.
        """
        loaded = self._ensure_loaded()
        self._say(f"{loaded.title} is ready. /help lists the commands.")
        for turn in self._conversation.path():
            name = "you" if turn.role is Role.USER else "model"
            self._say(f"{name}: {turn.content}")
        is_interrupted = False
        while not self._has_ended:
            try:
                text = self._read()
                if text is None:
                    break
                is_interrupted = False
                self._obey(text)
            except KeyboardInterrupt as interrupt:
                if is_interrupted or interrupt.__context__ is not None:
                    raise  # At once, or while the reply was being stopped for the one before.
                is_interrupted = True
                self._say("\nCtrl+C again, or Ctrl+D, ends the chat.")
        return not self._has_failed

    # -- lines

    def _read(self) -> str | None:
        """Returns the next question or command; `None` at the end of the input.

        A line that ends with a backslash goes on with the next one.
        """
        parts: list[str] = []
        while True:
            if self._is_prompting:
                self._err.write(CONTINUED_PROMPT if parts else PROMPT)
                self._err.flush()
            line = self._lines.readline()
            if not line:
                return "\n".join(parts) if parts else None
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                self._say("error: that line is not UTF-8 text and was left out.")
                continue
            if not text.endswith("\\"):
                return "\n".join([*parts, text])
            parts.append(text[:-1])

    def _obey(self, text: str) -> None:
        """Does what a line says: a command, else a question."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].strip().partition(" ")
            command = self._commands.get(name)
            if command is None:
                near = get_close_matches(name, self._commands, n=1)
                known = f"did you mean /{near[0]}?" if near else "/help lists them."
                self._say(f"There is no command /{name}: {known}")
                return
            command.run(argument.strip())
        elif text.strip():
            self._ask(self._conversation.with_user(text.removeprefix("/")))

    # -- commands

    def _help(self, argument: str) -> None:
        del argument
        for name, command in self._commands.items():
            self._say(f"/{name}: {command.usage}")
        self._say("A line that ends with \\ goes on. // begins a question that begins with /.")
        self._say("Ctrl+C stops the reply and keeps what was said.")

    def _new(self, argument: str) -> None:
        del argument
        self._kept.begin()
        self._conversation = Conversation(system_prompt=self._conversation.system_prompt)
        self._answer = None
        self._say("A new chat.")

    def _retry(self, argument: str) -> None:
        del argument
        try:
            self._ask(self._conversation.before_reply())
        except ValueError:
            self._say("There is no question yet.")

    def _edit(self, argument: str) -> None:
        try:
            question = self._conversation.before_reply().head
        except ValueError:
            question = None
        if question is None:
            self._say("There is no question yet.")
        elif not argument:
            self._say(f"The last question was: {question.content}")
            self._say("Write /edit and what to ask instead.")
        else:
            self._ask(self._conversation.at(question.parent_id).with_user(argument))

    def _system(self, argument: str) -> None:
        if argument:
            text = "" if argument == "-" else argument
            self._conversation = dataclasses.replace(self._conversation, system_prompt=text)
            self._save()
        shown = self._conversation.system_prompt
        self._say(f"The system prompt is: {shown}" if shown else "There is no system prompt.")

    def _think(self, argument: str) -> None:
        del argument
        self._is_thinking_shown = not self._is_thinking_shown
        state = "shown" if self._is_thinking_shown else "hidden"
        self._say(f"What the model thinks is {state}.")

    def _stats(self, argument: str) -> None:
        del argument
        if self._answer is None or self._answer.stats == ReplyStats():
            self._say("There are no figures yet.")
        else:
            self._say(self._answerer.stats_line(self._answer))

    def _quit(self, argument: str) -> None:
        del argument
        self._has_ended = True

    # -- replies

    def _ensure_loaded(self) -> ModelLoaded:
        """Loads the model, also again after the engine has died."""
        if self._client.lost is not None:
            self._loaded = None
            self._client.restart()
        if self._loaded is None:
            self._loaded = self._answerer.load(Answer())
        return self._loaded

    def _ask(self, conversation: Conversation) -> None:
        """Has the question at the head answered, and saves it with whatever came of it."""
        self._conversation = conversation
        self._save()  # Before the reply: it may be the last thing this program does.
        conversation = self._conversation
        answer = self._answer = Answer()
        streams = ReplyStreams(self._out, self._err if self._is_thinking_shown else None)
        status, failure = TurnStatus.COMPLETE, ""
        self._has_failed = False
        try:
            answer.loaded = self._ensure_loaded()
            sampling = self._settings.sampling_of(self._kept.sampling)
            self._answerer.reply(conversation.messages(), sampling, answer, streams)
            if answer.reason is FinishReason.CANCELLED:
                status = TurnStatus.STOPPED
            elif answer.reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
                self._say(f"note: the reply reached its limit ({answer.reason}).")
        except KeyboardInterrupt as interrupt:
            status = TurnStatus.STOPPED
            if interrupt.__context__ is not None:
                raise  # The second one, while the engine was asked to stop.
            self._say("Stopped; what was said is kept.")
        except MiraError as error:
            status, failure = TurnStatus.ERROR, error.message
            self._has_failed = True
            print_error(error, self._err)
        finally:
            self._conversation = conversation.with_reply(
                answer.text,
                status=status,
                error=failure,
                stats=answer.stats,
                thinking=answer.thinking,
                model=self._settings.model,
            )
            self._save()

    def _save(self) -> None:
        self._conversation = self._kept.save(self._conversation, model=self._settings.model)

    def _say(self, text: str) -> None:
        print(sanitise(text), file=self._err, flush=True)
