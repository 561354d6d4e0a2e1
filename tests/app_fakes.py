"""Fakes for the app's tests: a catalog, a client without a process, the fake engine's command.

`python app_fakes.py MARKER MODE,MODE ARG...` runs the real command line against the fake
engine; the model counts as ready once the file MARKER exists. Chats are kept beside it,
unless MIRA_CHAT_DATA_DIR names another place.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from mira_app.catalog import CatalogEntry
from mira_app.conversation import Conversation
from mira_app.engine_call import EngineCall
from mira_app.engine_client import EngineClient
from mira_app.paths import DATA_DIR_VARIABLE
from mira_app.stored_chat import StoredChat
from mira_engine import api

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


def fake_engine_command(*modes: str) -> list[str]:
    return [sys.executable, str(FAKE_ENGINE), *modes]


class FakeCatalog:
    """Two models; ready when told so, or once a marker file exists."""

    def __init__(self, *, is_ready: bool = False, marker: Path | None = None) -> None:
        self.is_ready = is_ready
        self.marker = marker

    def entries(self, precision: api.Precision) -> tuple[CatalogEntry, ...]:
        del precision
        ready = self.is_ready or (self.marker is not None and self.marker.exists())
        return (
            CatalogEntry(
                model="builtin",
                title="Built-in model",
                about="a 135M model upcycled to MoE; poor facts, good for seeing the engine work",
                is_ready=ready,
            ),
            CatalogEntry(
                model="/models/OLMoE-1B-7B",
                title="OLMoE-1B-7B",
                about="/models/OLMoE-1B-7B",
                is_ready=True,
            ),
        )

    def find(self, model: str, precision: api.Precision) -> CatalogEntry:
        for entry in self.entries(precision):
            if entry.model == model:
                return entry
        raise api.UnknownModelError(f"There is no model {model!r}.", hint="Try builtin.")


class FakeShelf(FakeCatalog):
    """Knows a third model, of 3 MiB, until it is removed: then a file is there."""

    def __init__(self, removed: Path, *, marker: Path | None = None) -> None:
        super().__init__(marker=marker)
        self.removed = removed

    def find(self, model: str, precision: api.Precision) -> CatalogEntry:
        if model != "owner/moe":
            return super().find(model, precision)
        is_here = self.disk_bytes(model) > 0
        return CatalogEntry(
            model=model, title="MoE", about="", is_ready=is_here, is_removable=is_here
        )

    def disk_bytes(self, model: str) -> int:
        return 0 if model != "owner/moe" or self.removed.exists() else 3 * 2**20

    def remove(self, model: str) -> int:
        freed = self.disk_bytes(model)
        self.removed.touch()
        return freed

    def add(self, name: str) -> str:
        return name

    def free_bytes(self) -> int:
        return 2**40


class PatientEngineClient(EngineClient):
    """Gives the engine so long to end that whoever waits for all of it runs out of time."""

    def close(self, grace_s: float = 600.0) -> None:
        super().close(grace_s)


class FakeHistory:
    """Keeps every save; fails with `error` where one is set."""

    def __init__(self) -> None:
        self.saved: list[StoredChat] = []
        self.error: api.MiraError | None = None

    def save(self, chat: StoredChat) -> Conversation:
        if self.error is not None:
            raise self.error
        self.saved.append(chat)
        return chat.conversation


class FakeEngineClient:
    """Stands in for `EngineClient`; the test itself delivers the events."""

    def __init__(self) -> None:
        self.requests: list = []
        self.calls: list[EngineCall] = []
        self.cancelled: list[EngineCall] = []
        self.notices: tuple[api.Notice, ...] = ()
        self.lost: api.EngineProcessError | None = None
        self.num_restarts = 0
        self.is_running = True
        self._ids = itertools.count(1)

    def new_request_id(self) -> str:
        return f"r{next(self._ids)}"

    def submit(self, request) -> EngineCall:
        self.requests.append(request)
        self.calls.append(EngineCall(request.request_id))
        return self.calls[-1]

    def cancel(self, call: EngineCall) -> None:
        self.cancelled.append(call)

    def start(self) -> None:
        pass

    def restart(self) -> None:
        self.num_restarts += 1
        self.lost = None

    def close(self, grace_s: float = 3.0) -> None:
        pass

    # -- what tests say in the engine's name

    def die(self) -> None:
        self.lost = api.EngineProcessError("The engine process was killed by SIGKILL.")
        for call in self.calls:
            call.fail(self.lost)

    def deliver_loaded(self, plan: api.MemoryPlan, title: str = "Built-in model") -> None:
        call, request = self.calls[-1], self.requests[-1]
        call.deliver(
            api.ModelLoaded(
                request_id=call.request_id,
                model=getattr(request, "model", "builtin"),
                title=title,
                context_length=2048,
                plan=plan,
                load_s=1.0,
            )
        )

    def deliver_text(
        self,
        text: str,
        stats: api.ReplyStats | None = None,
        part: api.ReplyPart = api.ReplyPart.ANSWER,
    ) -> None:
        call = self.calls[-1]
        call.deliver(api.TokenDelta(request_id=call.request_id, text=text, num_tokens=1, part=part))
        if stats is not None:
            call.deliver(api.StatsSample(request_id=call.request_id, stats=stats))

    def deliver_done(
        self,
        text: str,
        stats: api.ReplyStats,
        reason: api.FinishReason = api.FinishReason.STOP,
        thinking: str = "",
    ) -> None:
        call = self.calls[-1]
        call.deliver(
            api.GenerationDone(
                request_id=call.request_id,
                text=text,
                reason=reason,
                stats=stats,
                thinking=thinking,
            )
        )


def main() -> None:
    from mira_app import cli, wiring

    marker, modes = Path(sys.argv[1]), [mode for mode in sys.argv[2].split(",") if mode]
    sys.argv = ["mira-chat", *sys.argv[3:]]
    os.environ.setdefault(DATA_DIR_VARIABLE, str(marker.parent))
    wiring.make_catalog = lambda: FakeShelf(marker.parent / "removed", marker=marker)
    wiring.make_client = lambda: PatientEngineClient(
        fake_engine_command(f"marker={marker}", *modes), log_dir=marker.parent / "logs"
    )
    cli.main()


if __name__ == "__main__":
    main()
