"""The ops of a graph become nodes that TensorRT's parser looks up as plugins."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from dflash_trt.errors import Failure
from dflash_trt.plugins.tensorrt.lower import lower


def node(op: str, inputs: int, outputs: int, **attributes: Any) -> ir.Model:
    """A model of one op with a body that is an Identity of its first input."""
    values = [ir.val(f"x{i}") for i in range(inputs)]
    made = ir.node(op, values, attributes, domain="dflash", num_outputs=outputs, name="here")
    for i, value in enumerate(made.outputs):
        value.name = f"y{i}"
    graph = ir.Graph(values, made.outputs, nodes=[made], opset_imports={"": 24, "dflash": 1}, name="graph")
    x = ir.val("x")
    body = ir.node("Identity", [x])
    inner = ir.Graph([x], body.outputs, nodes=[body], opset_imports={"": 24}, name=op)
    return ir.Model(graph, ir_version=11, functions=[ir.Function("dflash", op, graph=inner, attributes=[])])


def test_an_op_becomes_a_node_that_the_parser_looks_up_and_its_body_goes():
    model = node("kv_inject", 7, 2, epsilon=1e-6, rotated=128)
    names = [value.name for value in model.graph.outputs]
    assert lower(model) == ["kv_inject"]
    assert not model.functions and [value.name for value in model.graph.outputs] == names
    (made,) = model.graph
    assert (made.domain, made.op_type) == ("dflash", "kv_inject")
    assert [value.name for value in made.inputs] == [f"x{i}" for i in range(7)]
    attributes = [(name, attribute.value) for name, attribute in made.attributes.items()]
    place = pytest.approx(1e-6)
    assert attributes == [("rotated", 128), ("epsilon", place), ("plugin_namespace", "dflash"), ("aot", 1)]


def test_an_op_of_two_launches_becomes_two_nodes():
    model = node("draft_head", 2, 2)
    assert lower(model) == ["draft_head", "draft_head_combine"]
    first, second = model.graph
    assert list(second.inputs) == list(first.outputs) and list(model.graph.outputs) == list(second.outputs)
    assert [value.name for value in model.graph.outputs] == ["y0", "y1"]


@pytest.mark.parametrize("op, sinks", [("block_attention", 1), ("block_attention_plain", 0)])
def test_attention_is_split_among_programs_or_not(op, sinks):
    attributes = {"k_head": 0, "v_head": 8, "causal": 1, "window": 0, "both_sides": 0, "scale": 0.125}

    def model() -> ir.Model:
        made = node(op, 6 + sinks, 1, **attributes)
        made.graph.inputs[0].dtype = ir.DataType.FLOAT16
        return made

    shared, combine = model(), "block_attention_combine" + "_plain" * (not sinks)
    assert lower(shared) == ["block_attention_split", combine]
    first, second = shared.graph
    assert [value.name for value in first.inputs] == [f"x{i}" for i in range(6)]
    assert list(second.inputs) == [*first.outputs, *list(shared.graph.inputs)[5:]]
    assert second.attributes["to"].value == 10 and [value.name for value in second.outputs] == ["y0"]
    alone = model()
    assert lower(alone, split=False) == [op]
    (only,) = alone.graph
    assert list(only.inputs) == list(alone.graph.inputs)
    assert list(only.attributes) == [*attributes, "plugin_namespace", "aot"]


def test_the_type_of_an_attention_is_that_of_its_cache(tmp_path):
    """In a graph that was written and read only inputs tell their types."""
    x = [ir.val(f"x{i}", dtype=ir.DataType.INT64 if i in (4, 5) else None) for i in range(12)]
    x[6].dtype = ir.DataType.BFLOAT16
    inject = ir.node("kv_inject_unnormed", x[:3] + x[4:7], {"rotated": 64}, domain="dflash", num_outputs=2, name="i")
    attributes = {"k_head": 0, "v_head": 1, "causal": 1, "window": 0, "both_sides": 0, "scale": 0.125}
    inputs = [*x[7:10], inject.outputs[0], x[4], x[5]]
    attend = ir.node("block_attention_plain", inputs, attributes, domain="dflash", name="a")
    graph = ir.Graph(x, [attend.outputs[0]], nodes=[inject, attend], opset_imports={"": 24, "dflash": 1}, name="g")
    model = ir.Model(graph, ir_version=11)
    lower(model)
    assert [n.attributes["to"].value for n in model.graph if n.op_type == "block_attention_combine_plain"] == [16]
    with pytest.raises(Failure, match="tells its type: neither BFLOAT16 nor FLOAT16"):
        lower(node("block_attention_plain", 6, 1, **attributes))


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: node("other", 1, 1), "no plugin for dflash::other .* known: kv_inject"),
        (lambda: node("kv_inject", 6, 2, epsilon=1e-6, rotated=128), "kv_inject takes rows, cos, sin, k_norm"),
        (lambda: node("kv_inject", 7, 2, rotated=128), "kv_inject lacks epsilon"),
    ],
)
def test_a_node_that_is_no_plugin_is_refused(model, words):
    with pytest.raises(Failure, match=words):
        lower(model())
