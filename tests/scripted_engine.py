"""An engine without a process: `serve` asks it, and the test or a script delivers the events."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mira_app.engine_call import EngineCall
from mira_engine import api

STATS = api.ReplyStats(num_prompt_tokens=3, num_new_tokens=2)


class ScriptedEngine:
    """Gives calls.

    Args:
        script: Delivers a call's events at once; without one, the test does it.
    """

    def __init__(self, script: Callable[[api.Generate, EngineCall], None] | None = None) -> None:
        self.script = script
        self.lost: api.EngineProcessError | None = None
        self.calls: list[EngineCall] = []
        self.cancelled: list[EngineCall] = []
        self.has_call, self.is_closed = threading.Event(), threading.Event()

    def new_request_id(self) -> str:
        return f"r{len(self.calls)}"

    def submit(self, request: api.Generate) -> EngineCall:
        self.calls.append(EngineCall(request.request_id))
        self.has_call.set()
        if self.script is not None:
            self.script(request, self.calls[-1])
        return self.calls[-1]

    def cancel(self, call: EngineCall) -> None:
        if not call.is_done:
            self.cancelled.append(call)
            done(call, api.FinishReason.CANCELLED)

    def close(self) -> None:
        self.is_closed.set()


def done(call: EngineCall, reason: api.FinishReason = api.FinishReason.STOP) -> None:
    call.deliver(
        api.GenerationDone(request_id=call.request_id, text="", reason=reason, stats=STATS)
    )


def say(call: EngineCall, text: str, part: api.ReplyPart = api.ReplyPart.ANSWER) -> None:
    call.deliver(api.TokenDelta(request_id=call.request_id, text=text, num_tokens=1, part=part))
