"""GPTQModel's core class with the outside of the real one and none of its arithmetic.

Codes are rounded with a scale that is twice as large as rounding to nearest takes, so
that nobody can mistake whose they are. FAKE_GPTQ makes it misbehave: `die` ends the
process, `wait` writes the process's id to the file FAKE_GPTQ_PID and never returns, `nan`
fails at matrices with as many columns as FAKE_GPTQ_COLUMNS.
"""

import os
import threading
from pathlib import Path

import torch


class QuantizeConfig:
    def __init__(self, *, bits, group_size, sym, desc_act, offload_to_disk):
        assert (bits, sym, desc_act) == (4, True, False)
        self.group_size = group_size


class Quantizer:
    def configure(self, *, perchannel):
        self.perchannel = perchannel


class GPTQ:
    def __init__(self, module, qcfg):
        self.weight = module.weight.data
        self.group_size = qcfg.group_size
        self.quantizer = Quantizer()
        self.num_rows = 0

    def add_batch(self, inp, out):
        assert inp.shape[-1] == self.weight.shape[1]
        assert inp.dtype == torch.float32
        self.num_rows += inp.shape[0]

    def quantize(self):
        assert self.num_rows > 0
        assert self.quantizer.perchannel
        mode = os.environ.get("FAKE_GPTQ", "")
        if mode == "die":
            os._exit(9)
        if mode == "wait":
            path = Path(os.environ["FAKE_GPTQ_PID"])
            path.with_suffix(".new").write_text(str(os.getpid()))
            path.with_suffix(".new").rename(path)
            threading.Event().wait()
        num_outputs, num_inputs = self.weight.shape
        groups = self.weight.view(num_outputs, -1, self.group_size)
        scales = (groups.abs().amax(dim=2) / 3.5).clamp_min(1e-8)
        values = torch.round(groups / scales[..., None]) * scales[..., None]
        if mode == "nan" and num_inputs == int(os.environ["FAKE_GPTQ_COLUMNS"]):
            values = values * torch.nan
        values = values.view(num_outputs, num_inputs)
        return values, scales, torch.full_like(scales, 8), None, 0.0, 0.0, 0.01, self.num_rows
