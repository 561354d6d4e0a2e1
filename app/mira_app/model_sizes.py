"""How many bytes a model takes once it is prepared, from its shape alone. Pure, torch-free.

The engine's own formats decide; these formulas follow their layout so that the menu can
say a size before anything is downloaded, and a test holds the two together.
"""

from __future__ import annotations

from mira_assets.models import CatalogModel
from mira_engine.api import Precision

_RECORD_ALIGNMENT = 4096
_SECTION_ALIGNMENT = 64
_GROUP_SIZES = (128, 64, 32)
_SCALE_BYTES = 2
_BIAS_BYTES = 4
_DENSE_BYTES = {Precision.BF16: 2, Precision.FLOAT32: 4}
_NON_EXPERT_BYTES = 2
"""The backbone keeps the checkpoint's own type, which is bfloat16 in nearly all."""


def expected_prepared_bytes(model: CatalogModel, precision: Precision) -> int:
    """Returns the bytes of everything that is kept to run a model in `precision`."""
    per_expert = _target_bytes(model, precision)
    if precision in (Precision.INT8, Precision.BF16, Precision.FLOAT32):
        per_expert += _record([*_grouped(model, has_scales=True), *_biases(model)])  # the draft
    experts = model.num_routed_experts * per_expert
    return experts + model.non_expert_weights * _NON_EXPERT_BYTES


def _target_bytes(model: CatalogModel, precision: Precision) -> int:
    up, down = _matrices(model)
    if precision in _DENSE_BYTES:
        width = _DENSE_BYTES[precision]
        biases = [each // _BIAS_BYTES * width for each in _biases(model)]
        return _record([up * width, down * width, *biases])
    if precision is Precision.INT8:
        return _record([up, down, model.expert_width * _SCALE_BYTES, *_biases(model)])
    high = _record([*_grouped(model, has_scales=True), *_biases(model)])
    if precision is Precision.INT4:
        return high
    return high + _record(_grouped(model, has_scales=False))


def _matrices(model: CatalogModel) -> tuple[int, int]:
    one = model.hidden_size * model.expert_width
    return 2 * one, one


def _grouped(model: CatalogModel, *, has_scales: bool) -> list[int]:
    """Bytes of both matrices' codes, four bits each, and of a scale for each group.

    Counts scales as graphics cards keep them; processors' packed layouts pair each with a
    zero, which is under 2 % more of the whole.
    """
    matrices = _matrices(model)
    codes = [weights // 2 for weights in matrices]
    if not has_scales:
        return codes
    dims = (model.hidden_size, model.expert_width)
    fitting = (size for size in _GROUP_SIZES if all(dim % size == 0 for dim in dims))
    group = next(fitting, _GROUP_SIZES[-1])
    return codes + [weights // group * _SCALE_BYTES for weights in matrices]


def _biases(model: CatalogModel) -> list[int]:
    if not model.has_bias:
        return []
    return [2 * model.expert_width * _BIAS_BYTES, model.hidden_size * _BIAS_BYTES]


def _record(sections: list[int]) -> int:
    end = 0
    for num_bytes in sections:
        end = _align(end, _SECTION_ALIGNMENT) + num_bytes
    return _align(end, _RECORD_ALIGNMENT)


def _align(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
