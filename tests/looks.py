"""What the app looks like: every screen in a state worth looking at, by name.

A look is an app and a way there. All of them are still: no cursor blinks, nothing moves,
no clock is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from app_scenes import Scene, settle, state_text, until
from desk_fakes import BUILTIN, OLMOE, DeskScene
from history_scenes import fill, listed, make_screen, open_store, search
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.controls import ControlsScreen
from mira_app.tui.screens.details import DetailsScreen
from mira_app.tui.screens.tour import TourScreen
from mira_app.tui.widgets.panels.plots import HistoryPlot
from mira_engine import api
from panel_scenes import Feed
from textual.pilot import Pilot

Reach = Callable[[Pilot], Awaitable[None]]
Look = Callable[[Path], tuple[MiraApp, Reach]]

THOUGHTS = (
    "The person asks about caches. I should say what one is first, then why it pays off, "
    "and end with the trade-off between size and speed.\n\nA short example would help."
)
LINK_BYTES_PER_S = 500 * 2**20


def _still(app: MiraApp, reach: Reach) -> tuple[MiraApp, Reach]:
    app.animation_level = "none"
    return app, reach


# -- the menu of models


def models(folder: Path) -> tuple[MiraApp, Reach]:
    scene = DeskScene(folder, BUILTIN)

    async def reach(pilot: Pilot) -> None:
        await scene.open(pilot)
        await scene.judge(pilot)
        await scene.judge(pilot, refusal="1.2 GiB more are needed.")
        await scene.mark(pilot, OLMOE)
        await settle(pilot)

    return _still(scene.app, reach)


def preparing(folder: Path) -> tuple[MiraApp, Reach]:
    scene = DeskScene(folder, BUILTIN)

    async def reach(pilot: Pilot) -> None:
        await scene.open(pilot)
        await scene.judge(pilot)
        await scene.start(pilot, OLMOE)
        for done in range(1, 5):
            scene.now_s += 10
            await scene.progress(pilot, "download", done * 2**30, 13 * 2**30)
        await settle(pilot)

    return _still(scene.app, reach)


# -- the chat


def _chat(reach: Callable[[Scene, Pilot], Awaitable[None]]) -> Look:
    def make(folder: Path) -> tuple[MiraApp, Reach]:
        del folder
        scene = Scene()

        async def go(pilot: Pilot) -> None:
            await reach(scene, pilot)
            await settle(pilot)

        return _still(scene.app, go)

    return make


async def feed(scene: Scene, pilot: Pilot, num_steps: int = 24) -> None:
    """Has the engine tell of that many quarters of a second, and the panels show the last."""
    source = Feed()
    for _ in range(num_steps):
        state = source.next()
        call = scene.client.calls[-1]
        call.deliver(api.StatsSample(request_id=call.request_id, stats=state.stats))
        call.deliver(state.residency)
        await scene.app._poll()
    side = scene.app.chat_screen.side_panel
    shown = scene.app.chat_screen.panel_state
    if side.is_on_screen:
        await until(pilot, lambda: side.column._state == shown)


async def streaming(scene: Scene, pilot: Pilot) -> None:
    await scene.streaming(pilot)
    await feed(scene, pilot)


async def thinking(scene: Scene, pilot: Pilot) -> None:
    await scene.chatting(pilot)
    await scene.asking(pilot, "Explain what a cache is.")
    scene.client.deliver_text(THOUGHTS, part=api.ReplyPart.THINKING)
    await scene.poll(pilot)
    await until(pilot, lambda: scene.replies[-1].thinking is not None)


async def editing(scene: Scene, pilot: Pilot) -> None:
    """A question asked in two ways, and about to be asked in a third."""
    await scene.answered(pilot)
    await pilot.press("tab", "up", "e")
    composer = scene.app.chat_screen.composer
    await until(pilot, lambda: composer.edited_turn_id == 0)
    composer.text = "Explain what a page cache is."
    await pilot.press("enter")
    await scene.requested(pilot, 3)
    scene.client.deliver_done("It keeps **pages** of files in memory.", api.ReplyStats())
    await until(pilot, lambda: state_text(scene.app) == "ready")
    await pilot.press("tab", "up", "e")
    await until(pilot, lambda: composer.edited_turn_id == 2)


async def new_chat(scene: Scene, pilot: Pilot) -> None:
    await scene.chatting(pilot)


async def messages(scene: Scene, pilot: Pilot) -> None:
    """A message is marked: the footer says what can be done with it."""
    await scene.answered(pilot)
    await pilot.press("tab")


# -- what lies over the chat


async def details(scene: Scene, pilot: Pilot) -> None:
    await scene.streaming(pilot)
    await feed(scene, pilot)
    await pilot.press("f4")
    await until(pilot, lambda: isinstance(scene.app.screen, DetailsScreen))
    screen = scene.app.screen
    await until(pilot, lambda: screen.map.map is not None)
    session = scene.app.chat_screen.panel_state.session
    await until(pilot, lambda: all(plot._session == session for plot in screen.query(HistoryPlot)))


async def controls(scene: Scene, pilot: Pilot) -> None:
    await scene.answered(pilot)
    await pilot.press("f2")
    await until(pilot, lambda: isinstance(scene.app.screen, ControlsScreen))
    scene.app.screen.budget_input.cursor_blink = False
    await pilot.press("end", *["backspace"] * 4, *"40%")


async def tour(scene: Scene, pilot: Pilot) -> None:
    await scene.menu(pilot)
    scene.app.show_tour()
    await until(pilot, lambda: isinstance(scene.app.screen, TourScreen))


async def chat_settings(scene: Scene, pilot: Pilot) -> None:
    await scene.answered(pilot)
    await pilot.press("f5")
    await until(pilot, lambda: type(scene.app.screen).__name__ == "ChatSettingsScreen")
    scene.app.screen.query_one("#system").cursor_blink = False


# -- the history


def _history(reach: Reach, *, is_filled: bool = True) -> Look:
    def make(folder: Path) -> tuple[MiraApp, Reach]:
        scene = Scene()
        store = open_store(folder / "history.sqlite")
        if is_filled:
            fill(store)

        async def go(pilot: Pilot) -> None:
            await scene.chatting(pilot)
            screen = make_screen(store, Path("/home/me"))
            await scene.app.push_screen(screen)
            for field in (screen.search_input, screen.rename_input, screen.path_input):
                field.cursor_blink = False
            await listed(pilot, len(store.chats()))
            await reach(pilot)
            await settle(pilot)

        return _still(scene.app, go)

    return make


async def history_list(pilot: Pilot) -> None:
    await pilot.press("down")


async def history_search(pilot: Pilot) -> None:
    await search(pilot, "needle")


async def history_deleted(pilot: Pilot) -> None:
    await pilot.press("d")
    await listed(pilot, 3)


LOOKS: dict[str, Look] = {
    "models": models,
    "preparing": preparing,
    "new-chat": _chat(new_chat),
    "streaming": _chat(streaming),
    "thinking": _chat(thinking),
    "stopped": _chat(Scene.stopped),
    "broken": _chat(Scene.broken),
    "editing": _chat(editing),
    "messages": _chat(messages),
    "help": _chat(Scene.help),
    "details": _chat(details),
    "controls": _chat(controls),
    "chat-settings": _chat(chat_settings),
    "tour": _chat(tour),
    "history": _history(history_list),
    "history-search": _history(history_search),
    "history-deleted": _history(history_deleted),
    "history-empty": _history(history_list, is_filled=False),
}
