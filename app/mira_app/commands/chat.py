"""`mira-chat chat`, and `mira-chat` alone: the chat, on a screen or line by line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import wiring
from ..options import CHAT_SETTINGS, Flags, Plain, takes_settings
from ..reporting import reporting_errors

if TYPE_CHECKING:
    from ..catalog import Catalog
    from ..model_desk import ModelDesk
    from ..settings import Settings

FIXED_QUESTION = "In one sentence: what is a cache?"
"""What `mira-chat` asks where there is no terminal to chat in."""

FIXED_MAX_TOKENS = 48


@takes_settings(*CHAT_SETTINGS)
def chat(
    flags: Flags,
    chat_id: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="A chat to go on with; the beginning of its id will do."),
    ] = None,
    is_continued: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the last chat.")
    ] = False,
    is_plain: Plain = False,
) -> None:
    """Opens the chat, or goes on with one. With --plain, or without a terminal: line by line."""
    if is_continued and chat_id is not None:
        raise typer.BadParameter("--continue goes on with the last chat: leave the id out")
    begin_chat(
        flags,
        is_plain=is_plain or not _has_terminal(),
        chat="last" if is_continued else chat_id,
    )


def begin_chat(flags: Flags, *, is_plain: bool, chat: str | None = None) -> None:
    """Chats on a screen or line by line; asks a fixed question where there is no terminal.

    Args:
        flags: Settings that were given.
        is_plain: Line by line.
        chat: What `find_chat` takes; `None` begins a new chat.
    """
    with reporting_errors():
        if _has_screen() and not is_plain:
            _open_app(flags, chat)
            return
        settings = wiring.read_settings(flags)
        wiring.refuse_engine_flags(flags, settings)
        if is_plain or _has_terminal():
            chat_plainly(settings, chat)
        else:
            ask_fixed_question(settings, has_own_limit=flags.get("max_tokens") is not None)


def _has_terminal() -> bool:
    return all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))


def _has_screen() -> bool:
    return wiring.is_terminal(sys.stdin) and wiring.is_terminal(sys.stdout)


def ask_fixed_question(settings: Settings, *, has_own_limit: bool) -> None:
    """Shows that it works: prepares the model, asks, and is brief about it."""
    from ..answer import Answer
    from .run import answer_prompt

    if not has_own_limit:
        limit = min(settings.sampling.max_new_tokens or FIXED_MAX_TOKENS, FIXED_MAX_TOKENS)
        sampling = dataclasses.replace(settings.sampling, max_new_tokens=limit)
        settings = dataclasses.replace(settings, sampling=sampling)
    typer.echo("note: there is no terminal here; asking one question.", err=True)
    typer.echo(f"> {FIXED_QUESTION}", err=True)
    answer_prompt(FIXED_QUESTION, settings, Answer(), is_plain=True)


def chat_plainly(settings: Settings, chat: str | None) -> None:
    """Chats line by line on the standard streams.

    Raises:
        MiraError: The chat or the model cannot be opened.
        KeyboardInterrupt: The person interrupted twice.
    """
    from ..conversation import Conversation
    from ..kept_chat import KeptChat, find_chat
    from ..plain_chat import PlainChat

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    lines = sys.stdin.buffer if sys.stdin is not None else io.BytesIO()
    is_prompting = sys.stdin is not None and sys.stdin.isatty()
    with wiring.opened_history() as store:
        kept = KeptChat(store, say=lambda text: typer.echo(text, err=True))
        conversation = Conversation(system_prompt=settings.system_prompt)
        if chat is not None:
            stored = find_chat(store, chat)
            conversation, settings = kept.resume(stored), _with_model_of(stored, settings)
        with wiring.opened_engine(settings) as (client, catalog, settings):
            plain = PlainChat(
                client,
                wiring.make_answerer(client, settings, is_plain=True, catalog=catalog),
                settings,
                kept=kept,
                conversation=conversation,
                lines=lines,
                out=sys.stdout,
                err=sys.stderr,
                is_prompting=is_prompting,
            )
            has_succeeded = plain.run()
    if not (has_succeeded or is_prompting):
        raise typer.Exit(1)


def _with_model_of(stored: Any, settings: Settings) -> Settings:
    """Takes a chat's own model, unless the person named another, or a server."""
    if settings.is_model_given or settings.connect or not stored.model:
        return settings
    return dataclasses.replace(settings, model=stored.model, is_model_given=True)


def _without_last_chat(settings: Settings) -> Settings:
    """Begins with a new chat: a question in the last one would send all of it to the server."""
    interface = dataclasses.replace(settings.interface, is_chat_restored=False)
    return dataclasses.replace(settings, interface=interface)


def _open_app(flags: Flags, chat: str | None) -> None:
    from ..controller import ChatController
    from ..history import HistoryStore
    from ..kept_chat import find_chat
    from ..model_desk import make_desk
    from ..paths import app_paths, cache_dir
    from ..tui.app import run_app

    opened = wiring.open_settings_of(flags, is_lenient=True)
    settings, stored = opened.settings, None
    wiring.refuse_engine_flags(flags, settings)
    if chat is not None:
        with wiring.opened_history() as store:
            stored = find_chat(store, chat)
        settings = _with_model_of(stored, settings)
    paths = app_paths(os.environ, settings.interface.history_path)

    def run(client: Any, catalog: Catalog, settings: Settings, desk: ModelDesk | None) -> None:
        controller = ChatController(client, catalog, settings)
        if stored is not None:
            controller.open_chat(stored)
        run_app(
            controller,
            store=HistoryStore(paths.history),
            paths=paths,
            desk=desk,
            problems=opened.problems,
        )

    if settings.connect is not None:
        # Asked before there is a screen: a server that is not there ends the command.
        with wiring.opened_engine(settings, is_model_needed=False) as (client, models, settings):
            run(client, models, _without_last_chat(settings), None)
        return
    shelf = wiring.make_catalog()
    client = wiring.make_client()
    desk = make_desk(
        shelf,
        settings.engine,
        wiring.make_client,
        data_dir=paths.data_dir,
        cache_dir=cache_dir(),
    )
    try:
        run(client, shelf, settings, desk)
    finally:
        desk.close()
        client.close()
