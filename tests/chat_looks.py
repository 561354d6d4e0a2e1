"""What a test says and sees in the chat's screen."""

from __future__ import annotations

from app_scenes import STATS, Scene, settle, state_text, until
from mira_app.tui.widgets.messages import ReplyMessage

SIZE = (80, 24)


def messages_of(scene: Scene):
    return scene.app.chat_screen.messages


def composer_of(scene: Scene):
    return scene.app.chat_screen.composer


async def answer(scene: Scene, pilot, text: str, **fields) -> None:
    scene.client.deliver_text(text, STATS)
    await scene.poll(pilot)
    scene.client.deliver_done(text, STATS, **fields)
    await until(pilot, lambda: state_text(scene.app) == "ready")
    await settle(pilot)


async def exchange(scene: Scene, pilot, question: str, reply: str) -> None:
    await scene.asking(pilot, question)
    await answer(scene, pilot, reply)


def shown(scene: Scene) -> list[str]:
    return [
        message.answer.source if isinstance(message, ReplyMessage) else message._text
        for message in messages_of(scene).turns
    ]


def focused_id(scene: Scene) -> int | None:
    return getattr(scene.app.focused, "turn_id", None)


def caption(message) -> str:
    return "".join(str(part.content) for part in message.query(".caption"))
