"""Families that use transformers' experts interface and still cannot run here, and why.

What the engine can tell from a model's form (no routed experts, experts that are mixed with
one another when they are loaded, layers of different size) it finds by itself; these are the
others. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UnsupportedModelError

_LOOPED = "some of their layers run several times for each token"

REFUSED_FAMILIES: Mapping[str, str] = {
    "deepseek_ocr2": "they read pictures of text and do not chat",
    "diffusion_gemma": "they write whole blocks of text by diffusion, not token after token",
    "inkling2_loop": _LOOPED,
    "inkling2_loop_text": _LOOPED,
    "minimax": "their linear attention keeps its state in a cache of its own",
    "qwen3_omni_moe": "they write and speak by several models that run one after another",
    "unlimited_ocr": "they read pictures of text and do not chat",
}
"""Reason by transformers' `model_type`; it goes on after "because"."""


def check_family(family: str) -> None:
    """Refuses a family of `REFUSED_FAMILIES`.

    Raises:
        UnsupportedModelError: The family is one of them; says why.
    """
    reason = REFUSED_FAMILIES.get(family)
    if reason is not None:
        raise UnsupportedModelError(
            f"Models of the family {family} do not run here, because {reason}.",
            hint="Pick a Mixture-of-Experts model of another family.",
        )
