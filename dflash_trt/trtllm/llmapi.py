"""`1/model.yaml` of Triton's llmapi backend: the arguments of TensorRT-LLM's LLM class, and a block for Triton.

The backend is NVIDIA's `model.py` with `helpers.py` (triton_backend/all_models/llmapi in NVIDIA/TensorRT-LLM), which
hands everything but `triton_config` to LLM(). A nested `speculative_config` goes through the same update as that of
trtllm-serve's `--config`. Never executed here.
"""

from __future__ import annotations

from dflash_trt.trtllm.serve_config import Rendered, quoted

HEAD = """\
# The model that Triton's llmapi backend loads: config.yaml with the target in it.
model: {target}
{backend}triton_config:
  max_batch_size: 0  # requests come one by one; TensorRT-LLM batches them itself
  decoupled: false  # true to stream

"""


def model_yaml(rendered: Rendered) -> str:
    """The text of the file."""
    head, _, body = rendered.text.partition("\n\n")
    backend = "" if "backend" in rendered.config else "backend: pytorch\n"
    return f"{head}\n#\n{HEAD.format(target=quoted(str(rendered.target)), backend=backend)}{body}"
