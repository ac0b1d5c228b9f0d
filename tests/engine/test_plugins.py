"""`--ops plugin`: the whole step graph becomes TensorRT plugins, one launch a stage, up to the call into TensorRT."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest

from dflash_trt.engine import convert
from dflash_trt.engine.hardware import TENSORRT, TENSORRT_RTX, find_sm
from dflash_trt.engine.plugins import check_build
from dflash_trt.errors import UserError
from dflash_trt.plugins.tensorrt import PLUGINS
from dflash_trt.plugins.tensorrt.lower import lower
from tests.tiny import make_pair

LAYERS, DRAFT_LAYERS = 6, 2


@pytest.mark.parametrize(("base", "injected"), [("tiny-qwen3", "kv_inject"), ("tiny-llama", "kv_inject_unnormed")])
def test_every_op_of_a_step_becomes_a_plugin_and_no_body_is_left(base, injected, tmp_path):
    pair = make_pair(tmp_path, base, target_config={"head_dim": 64}, draft_config={"head_dim": 64})
    path = convert(*pair, tmp_path / "engine", ops="plugin", max_seq_len=64).graph(cpu=False)
    model = ir.load(path)
    before = Counter(node.op_type for node in model.graph.all_nodes() if node.domain == "dflash")
    expected = Counter(
        {
            injected: LAYERS,
            "block_attention_plain": LAYERS + DRAFT_LAYERS,
            "draft_head": 2,
            "accept": 1,
            "sample_few": 2,
        }
    )
    assert before == expected + Counter({"kv_inject": 1})  # one launch for all draft layers
    used = lower(model)
    after = [node for node in model.graph.all_nodes() if node.domain == "dflash"]
    assert not model.functions and {node.op_type for node in after} == set(used) <= PLUGINS.keys()
    for node in after:
        assert node.attributes["plugin_namespace"].value == "dflash" and node.attributes["aot"].value == 1
    standard = {node.domain for node in model.graph.all_nodes()} - {"dflash"}
    assert standard == {""}
    assert not {"Attention", "TensorScatter"} & {node.op_type for node in model.graph.all_nodes()}
    known = {*model.graph.inputs, *model.graph.initializers.values()}
    for node in model.graph:
        assert known.issuperset(value for value in node.inputs if value is not None)
        known |= {*node.outputs}
    assert known.issuperset(model.graph.outputs)


def test_a_compiler_or_gpu_without_plugins_is_refused(tmp_path):
    check_build(tmp_path, TENSORRT, find_sm(100))
    with pytest.raises(UserError, match=r"tensorrt-rtx takes no plugins .* convert with --ops native"):
        check_build(tmp_path, TENSORRT_RTX, find_sm(120))
    with pytest.raises(UserError, match=r"no plugins for SM89 .* 90, 100, 103, 120"):
        check_build(tmp_path, TENSORRT, find_sm(89))
