"""What does a person read when a download goes wrong, and does the second try mend it?

Question: for every fault that the tests' hub knows, kept and deleted downloads alike: the
sentence and the hint of the first try, whether the second one finishes, and whether what it
made has the bytes of a preparation without faults.

Method: a tiny model of ten shards on a hub of this machine that speaks the real protocol to
the real client. A file's fault is planted behind the report of space, in the way of the
weights; the information's before the first question. Left out: what only a person's own
network does (proxies, captive portals), and time: patience is cut to tenths of a second.

Run: python tests/bench/hub_faults.py. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import hub_server
import huggingface_hub
from hub_scenes import (
    PASSING_FAULTS,
    REPO,
    SHARD,
    SHORT,
    TOLD_FAULTS,
    client_settings,
    hashes,
    publish,
)
from huggingface_hub import constants
from mira_engine.errors import MiraError
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision

API_FAULTS = {
    "information fails once": (hub_server.status(500),),
    "information out of order": (hub_server.status(503), hub_server.status(503)),
    "information, too many requests": (hub_server.status(429, Retry_After="30"),),
    "information is empty": (hub_server.empty,),
}
GATES = {"gated, no token": "token", "private, no token": "private"}
"""Repositories that let nobody in without a token; opened before the second try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault in one way of preparing."""

    fault: str
    way: str
    said: str
    second_try: str
    is_equal: bool


def tried(home: ModelHome, is_deleted: bool, on_space=lambda: None) -> str:
    """Prepares once. Returns what a person reads, empty where all went well."""

    def note(code: str, text: str) -> None:
        if code == "space":
            on_space()

    try:
        prepare(
            home, Precision.NESTED, on_progress=lambda *args: None, patience=SHORT,
            is_download_deleted=is_deleted, on_note=note,
        )  # fmt: skip
    except MiraError as error:
        return f"{error.message} Hint: {error.hint}"
    return ""


def row(
    name: str, place: str, faults: tuple[hub_server.Fault, ...], published: Path,
    whole: dict[str, str], folder: Path, is_deleted: bool,
) -> Row:  # fmt: skip
    """Meets one fault, then tries again."""
    server = hub_server.FakeHub().start()
    server.add(REPO, published)
    for key, value in client_settings(server, folder).items():
        setattr(constants, key, value)

    def plant() -> None:
        server.faults[place] = list(faults)

    try:
        home = ModelLibrary(folder / "data").resolve(REPO)
        server.repos[REPO].gate = GATES.get(name, "")
        if place == "api":
            plant()
        said = tried(home, is_deleted, plant if place != "api" else lambda: None)
        assert not server.faults[place], f"the fault {name!r} was not met"
        server.repos[REPO].gate = ""
        again = tried(home, is_deleted)
        return Row(
            fault=name,
            way="deleted" if is_deleted else "kept",
            said=said or "(nothing: it passes)",
            second_try=again or "ready",
            is_equal=hashes(home) == whole,
        )
    finally:
        server.close()
        huggingface_hub.close_session()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Meets every fault and prints the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ.pop("HF_TOKEN", None)
    cases = [(name, SHARD, case.faults) for name, case in TOLD_FAULTS.items()]
    cases += [(name, SHARD, faults) for name, faults in PASSING_FAULTS.items()]
    cases += [(name, "api", faults) for name, faults in API_FAULTS.items()]
    cases += [(name, "api", ()) for name in GATES]
    rows = []
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        published = publish(base / "tiny")
        home = ModelLibrary(base / "whole").resolve(str(published))
        prepare(home, Precision.NESTED, on_progress=lambda *args: None)
        whole = hashes(home)
        print("| fault | files | what the user reads | second try | hashes equal |")
        print("|---|---|---|---|---|")
        for number, (name, place, faults) in enumerate(cases):
            for is_deleted in (False, True):
                folder = base / f"{number}-{is_deleted}"
                folder.mkdir()
                made_row = row(name, place, faults, published, whole, folder, is_deleted)
                equal = "yes" if made_row.is_equal else "NO"
                cells = (made_row.fault, made_row.way, made_row.said, made_row.second_try, equal)
                print(f"| {' | '.join(cells)} |", flush=True)
                rows.append(made_row)
    num_mended = sum(each.is_equal and each.second_try == "ready" for each in rows)
    print(
        json.dumps(
            {
                "num_cases": len(rows),
                "num_mended": num_mended,
                "rows": [asdict(each) for each in rows],
            }
        )
    )
    if num_mended < len(rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
