"""The form TensorRT compiles (fixed cache length, no conditionals, half precision) decides as the CPU form does."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from dflash_trt.checkpoint import pair, read_draft, read_target
from dflash_trt.graph import write_step
from tests.graph.drive import Row, inputs, load
from tests.tiny import make_pair

CACHE = 128


@pytest.mark.parametrize("base", ["tiny-qwen3", "tiny-llama", "tiny-gptoss"])
def test_the_float16_form_decides_as_the_float32_form_does(base, tmp_path):
    """ONNX Runtime runs float16 by casting around float32 kernels: the values are rounded, the graph is
    the one TensorRT gets, for gpt-oss with products over all experts, and sinks in masks that are added. Six layers of
    roundings of 2**-11 each leave logits within 2 % of the largest. (4-bit weights it cannot unpack as TensorRT does.)
    """
    target, draft = make_pair(tmp_path, base)
    checked = pair(read_target(target), read_draft(draft))
    (tmp_path / "half").mkdir()
    graph = write_step(checked, tmp_path / "half", "rank0", dtype="float16", cache_len=CACHE, debug=True)
    session = load(target, draft, tmp_path / "full")
    K, prompt = session.limits.block_size, list(range(40, 60))

    half, caches = _load(graph, tmp_path / "half"), None
    for row in (Row(prompt, len(prompt)), Row([7, 8, 9, 10], 1, len(prompt))):
        step = inputs(K, [row])
        _, full = session.debug_step(step)
        outputs, caches = _run(half, step, caches)
        for name in ("logits", "draft_logits"):
            scale = np.abs(full[name]).max()
            np.testing.assert_allclose(outputs[name], full[name], rtol=0, atol=0.02 * scale)


def _load(graph, directory) -> ort.InferenceSession:
    options = ort.SessionOptions()
    links = sorted((directory / "weights").iterdir())
    buffers = [np.fromfile(link, np.uint8) for link in links]
    options.add_external_initializers_from_files_in_memory(
        [f"weights/{link.name}" for link in links], buffers, [len(buffer) for buffer in buffers]
    )
    return ort.InferenceSession(graph, options)


def _run(session, step, caches):
    caches = caches or {
        i.name: np.zeros((1, i.shape[1], CACHE, i.shape[3]), np.float16)
        for i in session.get_inputs()
        if "_cache." in i.name
    }
    small = {i.name: getattr(step, i.name) for i in session.get_inputs() if i.name not in caches}
    names = [o.name for o in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, small | caches), strict=True))
    return outputs, {name: outputs[name.replace("_cache.", "_present.")] for name in caches}
