"""One step graph as a TensorRT network: parse it, put right what the parser drops, say which shapes will come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from dflash_trt.engine.manifest import Limits
from dflash_trt.errors import Failure

NATIVE = {"TensorScatter": "KV_CACHE_UPDATE", "Attention": "ATTENTION"}  # ONNX operator → TensorRT layer
LENGTHS = 6  # the input nonpad_kv_seqlen of Attention


def parse(trt: ModuleType, builder: Any, logger: Any, graph: Path) -> Any:
    """The network of a graph. Raises Failure with the parser's words if it refuses."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        raise refusal(f"{trt.__name__} cannot read {graph}", [parser.get_error(i).desc() for i in range(parser.num_errors)])
    model = onnx.load(graph, load_external_data=False)
    _restore_lengths(trt, network, model)
    _require_native(network, model, graph)
    return network


def refusal(what: str, reasons: Sequence[str]) -> Failure:
    """A compiler's refusal in its own words."""
    return Failure("\n  ".join([what, *reasons]))


def count_layers(network: Any) -> dict[str, int]:
    """Layers by type. The two boundary layers of an attention count as one ATTENTION."""
    names = (network.get_layer(i).type.name for i in range(network.num_layers))
    count = Counter(name.replace("ATTENTION_INPUT", "ATTENTION") for name in names if name != "ATTENTION_OUTPUT")
    return dict(sorted(count.items()))


def add_profiles(builder: Any, config: Any, network: Any, limits: Limits) -> None:
    """Profile 0 is for decoding: B up to max_batch rows of K columns; profile 1 for calls that also hold prefill chunks."""
    for low, high in ((limits.block_size, limits.block_size), (1, limits.max_query)):
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            shape = [
                tuple({"batch": batch, "query": query}.get(name, size) for name, size in zip(names, tensor.shape, strict=True))
                for batch, query in ((1, low), (limits.max_batch, high))
            ]
            profile.set_shape(tensor.name, shape[0], shape[1], shape[1])
        config.add_optimization_profile(profile)


def _restore_lengths(trt: ModuleType, network: Any, model: onnx.ModelProto) -> None:
    """Give each attention its key lengths. The parser of TensorRT-RTX 1.7 takes Attention's seventh input and drops it."""
    lengths = {
        node.name: node.input[LENGTHS]
        for node in model.graph.node
        if node.op_type == "Attention" and len(node.input) > LENGTHS and node.input[LENGTHS]
    }
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    tensors = {layer.get_output(j).name: layer.get_output(j) for layer in layers for j in range(layer.num_outputs)}
    cast: dict[str, Any] = {}
    for layer in layers:
        name = layer.name.removesuffix("_AttentionInput")
        if layer.type.name != "ATTENTION_INPUT" or name not in lengths:
            continue
        layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
        if layer.attention.key_value_lengths is None:
            source = lengths[name]
            cast.setdefault(source, network.add_cast(tensors[source], trt.int32).get_output(0))
            layer.attention.key_value_lengths = cast[source]


def _require_native(network: Any, model: onnx.ModelProto, graph: Path) -> None:
    """Every cache update and attention must have become the native layer: anything else copies caches."""
    operators, layers = Counter(node.op_type for node in model.graph.node), count_layers(network)
    for operator, layer in NATIVE.items():
        if operators[operator] != layers.get(layer, 0):
            raise Failure(
                f"the parser made {layers.get(layer, 0)} {layer} layers of {operators[operator]} {operator} nodes — {graph} — "
                "report this with the compiler's version"
            )
