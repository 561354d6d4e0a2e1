"""The process that compiles steps, beside the engine that goes on serving.

Started by `mira_engine.runtime.capture` at low priority. Tracing and compiling take tens
of seconds of Python and of the C++ compiler, which in the engine's own process would slow
every token; here they only take a core. No weight is read. Reads one JSON job from its
arguments, writes one JSON line a step to standard output, and ends when its standard
input does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main(argv: list[str] | None = None) -> int:
    """Compiles the steps of a job. Returns 0, also where a step cannot be compiled."""
    parser = argparse.ArgumentParser(prog="mira_engine.runtime.step_compiler")
    parser.add_argument("job", type=Path)
    job = json.loads(parser.parse_args(argv).job.read_text(encoding="utf-8"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)
    warnings.filterwarnings("ignore")
    import torch
    from mira_kernels import native

    torch.set_num_threads(1)  # Baked into the generated code; its loops are short.
    if job["is_native"]:
        native.load(Path(job["cache_dir"]))
    for step in job["steps"]:
        print(json.dumps(_compile(job, step)), flush=True)
    return 0


def _compile(job: dict[str, Any], step: dict[str, str]) -> dict[str, str]:
    """Compiles one step to `step["path"]`. Returns what to tell the engine."""
    import torch
    import torch._inductor

    from ..errors import UnsupportedModelError
    from ..model.steps import StepSpec, trace_step

    path = Path(step["path"])
    try:
        spec = StepSpec.from_json(step["spec"])
        traced = trace_step(Path(job["folder"]), spec, job["dtypes"], job["census"])
        with torch.no_grad():
            compiled = torch._inductor.standalone_compile(
                traced.graph,
                traced.inputs,
                dynamic_shapes="from_graph",
                options={"config_patches": {"size_asserts": False}},
            )
        partial = path.with_suffix(f".{os.getpid()}")
        compiled.save(path=str(partial), format="binary")
        names = path.with_suffix(".json")
        told = {"spec": step["spec"], "weights": traced.weights}
        names.write_text(json.dumps(told), encoding="utf-8")
        partial.replace(path)
    except UnsupportedModelError as error:
        return {"spec": step["spec"], "error": error.message}
    except Exception as error:  # noqa: BLE001 - the compiler documents no narrower class
        traceback.print_exc()
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return {"spec": step["spec"], "error": f"the compiler failed: {reason[0]}"}
    return {"spec": step["spec"]}


if __name__ == "__main__":
    sys.exit(main())
