"""One step graph as a TensorRT network: parse it, put right what the parser drops, prove what it became."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_trt.engine.manifest import Limits
from dflash_trt.errors import Failure

CACHE_UPDATE, ATTENTION = NATIVE = ("KV_CACHE_UPDATE", "ATTENTION")  # layer types


def parse(trt: ModuleType, builder: Any, logger: Any, graph: Path, decoder_layers: int, packed_weights: int) -> Any:
    """The network of a graph of so many decoder layers and 4-bit weights.

    Raises Failure with the parser's words if it refuses, or if attention, caches or 4-bit weights did not stay native.
    """
    network = _read(trt, builder, logger, graph, lambda parser: parser.parse_from_file(str(graph)))
    _set_lengths(trt, network)
    _require_native(network, graph, decoder_layers)
    _require_packed(trt, network, graph, packed_weights)
    return network


def parse_plugins(
    trt: ModuleType, builder: Any, logger: Any, graph: Path, config: Any, sm: int, packed_weights: int
) -> Any:
    """As `parse`, of a graph whose attention and caches are plugins for `sm`."""
    from dflash_trt.engine.plugins import parse_with_plugins

    network = _read(trt, builder, logger, graph, lambda parser: parse_with_plugins(trt, parser, config, graph, sm))
    _require_packed(trt, network, graph, packed_weights)
    return network


def _read(trt: ModuleType, builder: Any, logger: Any, graph: Path, parse: Callable[[Any], bool]) -> Any:
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parse(parser):
        raise refusal(f"cannot read {graph}", [parser.get_error(i).desc() for i in range(parser.num_errors)])
    return network


def refusal(what: str, reasons: Sequence[str]) -> Failure:
    """A compiler's refusal in its own words."""
    return Failure("\n  ".join([what, *(line.strip() for reason in reasons for line in reason.splitlines())]))


def count_layers(network: Any) -> dict[str, int]:
    """Layers by type. The two boundary layers of an attention count as one ATTENTION."""
    names = (layer.type.name for layer in _layers(network))
    count = Counter(name.replace("ATTENTION_INPUT", ATTENTION) for name in names if name != "ATTENTION_OUTPUT")
    return dict(sorted(count.items()))


def add_profiles(builder: Any, config: Any, network: Any, limits: Limits) -> None:
    """Profile 0 is for decoding, up to max_batch rows of K columns; profile 1 also takes prefill chunks."""
    for low, high in ((limits.block_size, limits.block_size), (1, max(limits.max_query, limits.block_size))):
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            smallest, largest = (
                tuple(sizes.get(name, size) for name, size in zip(names, tensor.shape, strict=True))
                for sizes in ({"batch": 1, "query": low}, {"batch": limits.max_batch, "query": high})
            )
            profile.set_shape(tensor.name, smallest, largest, largest)
        config.add_optimization_profile(profile)


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def _set_lengths(trt: ModuleType, network: Any) -> None:
    """Give each attention its key lengths, which the parser of TensorRT-RTX 1.7 drops without a word.

    The masks are correct by themselves; lengths let a kernel stop early. A causal attention is refused, because the
    parser aligns it to the upper left, which is wrong for a cache.
    """
    layers = _layers(network)
    tensors = {layer.get_output(j).name: layer.get_output(j) for layer in layers for j in range(layer.num_outputs)}
    lengths: dict[str, Any] = {}
    for layer in layers:
        if layer.type.name != "ATTENTION_INPUT":
            continue
        layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
        attention, role = layer.attention, layer.name.partition("/")[0]
        if attention.causal_kind != trt.CausalMaskKind.NONE:
            raise Failure(f"{layer.name} became {attention.causal_kind} — report this with the compiler's version")
        if attention.key_value_lengths is None:
            if role not in lengths:
                lengths[role] = network.add_cast(tensors[f"{role}.kv_lengths"], trt.int32).get_output(0)
            attention.key_value_lengths = lengths[role]


def _require_native(network: Any, graph: Path, decoder_layers: int) -> None:
    """Every cache goes from its input through one update layer to its output, and nowhere through a copy."""
    found, wanted = count_layers(network), {CACHE_UPDATE: 2 * decoder_layers, ATTENTION: decoder_layers}
    for kind, count in wanted.items():
        if found.get(kind, 0) != count:
            raise Failure(f"the network has {found.get(kind, 0)} {kind} layers, not {count} — {graph} — report this")
    updates = {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in _layers(network)
        if layer.type.name == CACHE_UPDATE
    }
    outputs = (network.get_output(i).name for i in range(network.num_outputs))
    for name in (name for name in outputs if "_present." in name):
        if updates.get(name) != name.replace("_present.", "_cache."):
            raise Failure(f"{name} is not what a {CACHE_UPDATE} layer made of its cache — {graph} — report this")


def _require_packed(trt: ModuleType, network: Any, graph: Path, count: int) -> None:
    """Every NVFP4 or MXFP4 weight is a constant of 4-bit values: none was unpacked on the way."""
    constants = [layer for layer in _layers(network) if layer.type.name == "CONSTANT"]
    found = sum(layer.get_output(0).dtype == trt.DataType.FP4 for layer in constants) if count else 0
    if found != count:
        raise Failure(f"the network has {found} 4-bit weights, not {count} — {graph} — report this")
