"""A hub's model made ready, and all that has to hold then."""

from hub_scenes import NEEDED, REPO, SHORT, hashes
from mira_engine.checkpoint import hub_download
from mira_engine.prepare import prepare
from mira_engine.types import Precision


def ignore(*args):
    """Takes progress and drops it."""


def make(library, name=REPO, *, on_progress=ignore, patience=SHORT, **fields):
    prepare(
        library.resolve(name),
        Precision.NESTED,
        on_progress=on_progress,
        patience=patience,
        **fields,
    )


def check_finished(library, published, whole, name=REPO):
    """The model is ready, made of exactly the published bytes, and nothing else was fetched."""
    home = library.resolve(name)
    assert home.is_ready(Precision.NESTED)
    assert {path.name for path in home.checkpoint_dir.iterdir()} == NEEDED
    for file in NEEDED:
        assert (home.checkpoint_dir / file).read_bytes() == (published / file).read_bytes()
    assert not list(home.checkpoint_dir.parent.parent.rglob(f"*{hub_download.PARTIAL_SUFFIX}"))
    assert hashes(home) == whole
