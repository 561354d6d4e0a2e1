"""How well each model would run on this machine, asked of the engine one by one.

The engine's `PlanModel` is the judge. It runs in a process of this module's own, which is
started when there is something to ask and ended when all is answered: the chat's engine
stays free, and a download's is busy for hours. Verdicts are kept in a file, by model and
engine configuration; one is asked anew when the free memory has changed much.

Nothing here blocks: `poll`, called by a timer, takes what arrived and asks the next one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mira_engine.api import (
    CacheMode,
    ConfigError,
    EngineConfig,
    EngineProcessError,
    MiraError,
    ModelError,
    PlanAlternative,
    PlanMade,
    PlanModel,
    format_bytes,
    system_memory,
    to_plain,
)

from .catalog import CatalogEntry
from .catalog_configs import plannable_name
from .engine_call import EngineCall
from .engine_client import EngineClient
from .state_files import read_json, write_json

VERDICTS_FILE = "verdicts.json"
"""In the cache directory."""

_FILE_VERSION = 2
_MAX_MEMORY_CHANGE = 0.25
"""Share by which the free memory may differ from a kept verdict's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitVerdict:
    """What a plan says of one model on this machine.

    Attributes:
        mode: How much of the experts the memory holds; `None` where nothing fits.
        has_draft: Whether tokens would be drafted.
        num_draft_tokens: K.
        tokens_per_s: Measured or predicted; `None` where it is unknown.
        is_measured: Whether a profile measured that here.
        missing_bytes: What is missing where nothing fits, 0 where something does.
        reason: Why, in a sentence or two.
        is_runnable: Whether the engine runs the model at all.
    """

    mode: CacheMode | None = None
    has_draft: bool = False
    num_draft_tokens: int = 0
    tokens_per_s: float | None = None
    is_measured: bool = False
    missing_bytes: int = 0
    reason: str = ""
    is_runnable: bool = True

    @property
    def text(self) -> str:
        """The verdict in a few words."""
        return ", ".join(self._parts)

    def fitting(self, width: int) -> str:
        """Returns as much of the verdict as so many characters hold, the rate in any case."""
        parts = list(self._parts)
        while len(parts) > 2 and len(", ".join(parts)) > width:
            parts.pop()
        return ", ".join(parts)

    @property
    def _parts(self) -> tuple[str, ...]:
        """From what matters most to what may be left out."""
        if not self.is_runnable:
            return ("cannot run",)
        if self.mode is None:
            return (f"needs {format_bytes(self.missing_bytes)} more",)
        rate: tuple[str, ...] = ()
        if self.tokens_per_s:
            origin = "measured" if self.is_measured else "estimate"
            rate = (f"about {rate_text(self.tokens_per_s)} tok/s", origin)
        draft = f"draft {self.num_draft_tokens}" if self.has_draft else "no draft"
        return (*rate, self.mode.value, draft)


def rate_text(tokens_per_s: float) -> str:
    """Formats a rate in two digits; more would pretend to know better."""
    digits = 1 - math.floor(math.log10(tokens_per_s))
    rounded = round(tokens_per_s, digits)
    return f"{rounded:.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def verdict_of(made: PlanMade) -> FitVerdict:
    """Reduces a plan to its verdict."""
    chosen = next((each for each in made.alternatives if each.is_chosen), None)
    if chosen is None or chosen.plan is None:
        short = [each.missing_bytes for each in made.alternatives if each.missing_bytes]
        reason = " ".join(part for part in (made.refusal, made.hint) if part)
        return FitVerdict(missing_bytes=min(short, default=0), reason=reason)
    k, tpot_s = chosen.num_draft_tokens, chosen.tpot_s
    if made.measured is not None:
        k, tpot_s = made.measured.num_draft_tokens, made.measured.tpot_s
    return FitVerdict(
        mode=chosen.plan.mode,
        has_draft=k > 0,
        num_draft_tokens=k,
        tokens_per_s=1 / tpot_s if tpot_s else None,
        is_measured=made.measured is not None,
        reason=_reason(made, chosen),
    )


def _reason(made: PlanMade, chosen: PlanAlternative) -> str:
    plan = chosen.plan
    assert plan is not None
    hits = "" if chosen.hit_rate is None else f", {chosen.hit_rate:.0%} hits expected"
    return (
        f"{format_bytes(plan.total_bytes)} of {format_bytes(made.memory_bytes)} free memory; "
        f"{plan.num_slots} of {plan.num_experts} experts resident{hits}; {chosen.reason}."
    ).replace("..", ".")


class Verdicts(Protocol):
    """What a menu needs of the verdicts."""

    def want(self, entries: tuple[CatalogEntry, ...], *, is_memory_free: bool) -> None:
        """Asks for the verdicts of these models, where they are not known."""
        ...

    def poll(self) -> bool:
        """Takes what arrived; returns whether a verdict is new. Never blocks."""
        ...

    def of(self, model: str) -> FitVerdict | None:
        """Returns the verdict on a model, or `None` while it is not known."""
        ...

    def is_pending(self, model: str) -> bool:
        """Whether a verdict is being worked out, or waits for its turn."""
        ...

    def forget(self, model: str) -> None:
        """Has a model judged anew, after something was measured or made for it."""
        ...

    def close(self, grace_s: float = 0.2) -> None:
        """Ends the process, if there is one."""
        ...


class VerdictBoard:
    """The verdicts on all models of the menu, for one configuration.

    Args:
        make_client: Makes the client of a new engine process.
        config: How models would be loaded: memory, budget, K, precision.
        cache_dir: Where verdicts are kept; what is known of a model that is not downloaded
            is written there too, because a plan is made from a folder with `config.json`.
        free_memory: Bytes free for programs.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        config: EngineConfig,
        cache_dir: Path,
        *,
        free_memory: Callable[[], int] = lambda: system_memory().available_bytes,
    ) -> None:
        self._make_client = make_client
        self._config = config
        self._cache_dir = cache_dir
        self._free_memory = free_memory
        self._client: EngineClient | None = None
        self._call: EngineCall | None = None
        self._asked: CatalogEntry | None = None
        self._waiting: dict[str, CatalogEntry] = {}
        self._unknown: set[str] = set()
        self._is_memory_free = True
        self._verdicts = self._read()

    def want(self, entries: tuple[CatalogEntry, ...], *, is_memory_free: bool) -> None:
        """Asks for the verdicts of these models, where they are not known.

        Args:
            entries: The models, those wanted first in front.
            is_memory_free: Whether no model is loaded. One that is takes memory which
                another would have: what is known stays valid then, and only models of which
                nothing is known are asked for.
        """
        free = self._free_memory() if is_memory_free else None
        self._is_memory_free = is_memory_free
        wanted = [each for each in entries if not self._is_known(each, free)]
        self._waiting = {
            each.model: each
            for each in wanted
            if each.model not in self._unknown and each != self._asked
        }

    def of(self, model: str) -> FitVerdict | None:
        """Returns the verdict on a model, or `None` while it is not known."""
        kept = self._verdicts.get(model)
        return kept.verdict if kept is not None else None

    def is_pending(self, model: str) -> bool:
        """Whether a verdict is being worked out, or waits for its turn."""
        return model in self._waiting or (self._asked is not None and self._asked.model == model)

    def forget(self, model: str) -> None:
        """Has a model judged anew, after something was measured or made for it."""
        self._verdicts.pop(model, None)
        self._unknown.discard(model)

    def poll(self) -> bool:
        """Takes what arrived and asks the next one; returns whether something is new."""
        is_new = False
        if self._call is not None and self._call.is_done:
            is_new = self._take(self._call)
            self._call = self._asked = None
        if self._call is None and self._waiting:
            self._ask(next(iter(self._waiting)))
        elif self._call is None and self._client is not None:
            self._write()
            self._release()
        return is_new

    def close(self, grace_s: float = 0.2) -> None:
        """Ends the process, if there is one; blocks for a second or two at most."""
        client, self._client, self._call, self._asked = self._client, None, None, None
        if client is not None:
            client.close(grace_s)

    def _release(self) -> None:
        """Ends the process in the background, so that no screen waits for it."""
        client, self._client = self._client, None
        if client is not None:
            threading.Thread(target=client.close, args=(1.0,), name="verdicts-end").start()

    def _ask(self, model: str) -> None:
        entry = self._waiting.pop(model)
        name = plannable_name(entry, self._cache_dir)
        if name is None:
            self._unknown.add(model)
            return
        if self._client is None:
            self._client = self._make_client()
        self._asked = entry
        try:
            self._call = self._client.submit(
                PlanModel(request_id=self._client.new_request_id(), model=name, config=self._config)
            )
        except EngineProcessError:
            self._give_up(model)

    def _take(self, call: EngineCall) -> bool:
        assert self._asked is not None
        model, error = self._asked.model, call.error
        made = [event for event in call.drain() if isinstance(event, PlanMade)]
        if made:
            verdict = verdict_of(made[-1])
        elif isinstance(error, (ModelError, ConfigError)):
            verdict = FitVerdict(is_runnable=False, reason=_error_text(error))
        elif isinstance(error, EngineProcessError):
            self._give_up(model)
            return False
        else:
            self._unknown.add(model)
            return False
        if not self._is_memory_free:
            reason = f"{verdict.reason} Judged beside the loaded model."
            verdict = dataclasses.replace(verdict, reason=reason)
        self._verdicts[model] = _Kept(
            key=_key(self._asked, self._config), free_bytes=self._free_memory(), verdict=verdict
        )
        return True

    def _give_up(self, model: str) -> None:
        """A process that cannot be started or dies would do it again for every model."""
        self._unknown |= {model, *self._waiting}
        self._waiting = {}
        self._release()

    # -- what is kept

    def _is_known(self, entry: CatalogEntry, free_bytes: int | None) -> bool:
        kept = self._verdicts.get(entry.model)
        if kept is None or kept.key != _key(entry, self._config):
            return False
        if free_bytes is None:
            return True
        return abs(kept.free_bytes - free_bytes) <= _MAX_MEMORY_CHANGE * max(1, free_bytes)

    def _read(self) -> dict[str, _Kept]:
        plain = read_json(self._cache_dir / VERDICTS_FILE)
        if not isinstance(plain, dict) or plain.get("version") != _FILE_VERSION:
            return {}
        verdicts = {}
        for model, fields in plain.get("verdicts", {}).items():
            try:
                verdicts[model] = _Kept.from_plain(fields)
            except (KeyError, TypeError, ValueError):
                continue  # Written by another version: worked out anew.
        return verdicts

    def _write(self) -> None:
        """Keeps the verdicts; where that fails they are worked out again the next time."""
        plain = {model: dataclasses.asdict(kept) for model, kept in self._verdicts.items()}
        write_json(self._cache_dir / VERDICTS_FILE, {"version": _FILE_VERSION, "verdicts": plain})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    key: str
    free_bytes: int
    verdict: FitVerdict

    @classmethod
    def from_plain(cls, fields: Mapping) -> _Kept:
        verdict = dict(fields["verdict"])
        mode = verdict.pop("mode")
        verdict["mode"] = CacheMode(mode) if mode is not None else None
        return cls(
            key=str(fields["key"]),
            free_bytes=int(fields["free_bytes"]),
            verdict=FitVerdict(**verdict),
        )


def _key(entry: CatalogEntry, config: EngineConfig) -> str:
    """What a verdict depends on besides the free memory."""
    depends = [
        platform.node(), platform.machine(), os.cpu_count(), system_memory().total_bytes,
        entry.state.value, dict(entry.facts.config) if entry.facts is not None else None,
        to_plain(config),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


def _error_text(error: MiraError) -> str:
    return " ".join(part for part in (error.message, error.hint) if part)
