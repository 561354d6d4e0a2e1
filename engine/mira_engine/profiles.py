"""Profiles of K on the disk: one small file per model, machine, budget and precision.

Written by `mira_engine.profiling`, read when a model is loaded. A file that is damaged, or
was measured for something else, is as good as none, and is said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .checkpoint.writing import write_json
from .config import MAX_DRAFT_TOKENS, EngineConfig
from .events import DepthResult, KProfile
from .types import Precision
from .wire import to_plain

PROFILE_VERSION = 1
_FOLDER = "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile holds for.

    Attributes:
        model_revision: Fingerprint of the checkpoint.
        machine: Processor, cores, threads, arithmetic, and an emulated link.
        budget_bytes: Of experts, draft and slots together.
        precision: Expert format of the target.
    """

    model_revision: str
    machine: str
    budget_bytes: int
    precision: Precision

    @classmethod
    def of_engine(
        cls, config: EngineConfig, *, machine: str, model_revision: str, budget_bytes: int
    ) -> ProfileKey:
        """Builds the key of a configuration on this machine."""
        link = config.link
        if link.is_emulated:
            rate = f"{link.bytes_per_s:.0f} bytes/s" if link.bytes_per_s else "own speed"
            machine += f", link {rate} + {link.latency_s:g} s"
        if config.gpu is not None:
            machine += f", card {config.gpu}"
        return cls(
            model_revision=model_revision,
            machine=f"{machine}, {config.arithmetic}, draft of {config.draft_experts} experts",
            budget_bytes=budget_bytes,
            precision=config.precision,
        )

    @property
    def file_name(self) -> str:
        """Name of the profile's file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"k-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def save_profile(root: Path, key: ProfileKey, profile: KProfile) -> Path:
    """Writes a profile into a model's home by rename. Returns its path.

    Raises:
        PrepareError: The file cannot be written.
    """
    path = root / _FOLDER / key.file_name
    write_json(
        path,
        {"version": PROFILE_VERSION, "key": to_plain(key), "profile": to_plain(profile)},
    )
    return path


def load_profile(
    root: Path, key: ProfileKey, on_notice: Callable[[str, str], None]
) -> KProfile | None:
    """Reads the profile of a model's home.

    Args:
        root: The model's home.
        key: What it must have been measured for.
        on_notice: Told code and text where there is a file that cannot be used.

    Returns:
        The profile, or `None` where there is none to be used.
    """
    path = root / _FOLDER / key.file_name
    again = "It is left aside; mira-chat profile makes a new one."
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        is_ours = raw["version"] == PROFILE_VERSION and raw["key"] == to_plain(key)
        profile = _read(raw["profile"]) if is_ours else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        on_notice("profile-unusable", f"The profile of K {path.name} is damaged. {again}")
        return None
    if profile is None:
        on_notice("profile-unusable", f"The profile of K {path.name} is not of this kind. {again}")
    return profile


def _read(raw: dict) -> KProfile:
    """Builds a profile from plain values.

    Raises:
        ValueError: A number is none, or out of range.
    """
    results = tuple(
        DepthResult(
            num_draft_tokens=int(each["num_draft_tokens"]),
            tpot_s=float(each["tpot_s"]),
            num_replies=int(each["num_replies"]),
        )
        for each in raw["results"]
    )
    profile = KProfile(best=int(raw["best"]), acceptance=float(raw["acceptance"]), results=results)
    depths = [result.num_draft_tokens for result in results]
    is_sound = (
        profile.best in depths
        and all(0 <= k <= MAX_DRAFT_TOKENS for k in depths)
        and 0 <= profile.acceptance <= 1
        and all(0 < result.tpot_s < float("inf") for result in results)
    )
    if not is_sound:
        raise ValueError("a number is out of range")
    return profile
