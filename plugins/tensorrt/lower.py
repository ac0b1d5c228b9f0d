"""The ops of a graph as nodes that TensorRT's parser turns into plugins; their function bodies go.

A body would win: the parser inlines a function before it looks for a plugin. A plugin is one launch, so an op of two
launches becomes two nodes. The parser finds a plugin by the node's type and the attribute `plugin_namespace`, whatever
the domain; `aot` asks for the form that needs no Python at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from dflash_trt.errors import Failure
from dflash_trt.plugins.tensorrt.ops import NAMESPACE, PLUGINS, TYPE_CODES, Plugin

STEPS = {  # ops of several launches
    "draft_head": ("draft_head", "draft_head_combine"),
    "sample": ("sample_sums", "sample"),
    "block_attention": ("block_attention_split", "block_attention_combine"),
    "block_attention_plain": ("block_attention_split", "block_attention_combine_plain"),
}
TYPES = [ir.DataType(code) for code in TYPE_CODES]
KINDS: dict[type, Callable[[str, Any], ir.Attr]] = {int: ir.AttrInt64, float: ir.AttrFloat32}


def lower(model: ir.Model, *, split: bool = True) -> list[str]:
    """Replace the ops of domain `dflash` in place; returns the plugins that the model now needs.

    `split`: share the keys of an attention among programs, two launches; without, one launch, which is enough where
    batch, heads and queries fill the GPU. The number of shares follows the batch at run time.
    """
    used: dict[str, None] = {}
    for node in list(model.graph.all_nodes()):
        if node.domain == NAMESPACE:
            plugins = _steps(node, split)
            _replace(node, plugins)
            used |= dict.fromkeys(plugin.name for plugin in plugins)
    for identifier in [key for key in model.functions if key[0] == NAMESPACE]:
        del model.functions[identifier]
    return list(used)


def _steps(node: ir.Node, split: bool) -> list[Plugin]:
    """The plugins that compute a node, in order."""
    op = node.op_type
    if op not in PLUGINS:
        raise Failure(f"there is no plugin for {NAMESPACE}::{op} — node {node.name}, known: {', '.join(PLUGINS)}")
    return [PLUGINS[step] for step in (STEPS.get(op, (op,)) if split or op in ("draft_head", "sample") else (op,))]


def _inputs(plugins: list[Plugin]) -> list[str]:
    """What the first of several launches does not make for the others."""
    names: list[str] = []
    made: set[str] = set()
    for plugin in plugins:
        names += [t.name for t in plugin.inputs if t.name not in made and t.name not in names]
        made |= {t.name for t in plugin.op.outputs}
    return names


def _replace(node: ir.Node, plugins: list[Plugin]) -> None:
    names = _inputs(plugins)
    if len(node.inputs) != len(names) or None in node.inputs:
        raise Failure(f"{NAMESPACE}::{node.op_type} takes {', '.join(names)} — node {node.name}")
    values = dict(zip(names, node.inputs, strict=True))
    made = []
    for plugin in plugins:
        step = ir.Node(
            NAMESPACE,
            plugin.name,
            [values[tensor.name] for tensor in plugin.inputs],
            [*_attributes(node, plugin), ir.AttrString("plugin_namespace", NAMESPACE), ir.AttrInt64("aot", 1)],
            num_outputs=len(plugin.op.outputs),
            name=f"{node.name}/{plugin.name}",
        )
        for tensor, value in zip(plugin.op.outputs, step.outputs, strict=True):
            value.name = f"{node.name}/{tensor.name}"
        values |= dict(zip((tensor.name for tensor in plugin.op.outputs), step.outputs, strict=True))
        made.append(step)
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], made, node.outputs, made[-1].outputs[: len(node.outputs)]
    )


def _attributes(node: ir.Node, plugin: Plugin) -> list[ir.Attr]:
    """The plugin's attributes in its own order: TensorRT passes them on by place."""
    values: dict[str, int | float] = {name: attribute.value for name, attribute in node.attributes.items()}
    if "to" in plugin.attributes:
        values["to"] = _activation(node).value
    if missing := [name for name in plugin.attributes if name not in values]:
        raise Failure(f"{NAMESPACE}::{node.op_type} lacks {', '.join(missing)} — node {node.name}")
    return [KINDS[kind](name, values[name]) for name, kind in plugin.attributes.items()]


def _activation(node: ir.Node) -> ir.DataType:
    """T of an attention: of an input that tells its type, as the cache does where it enters the graph."""
    waiting = list(node.inputs)
    while waiting:
        value = waiting.pop(0)
        if value is not None and value.dtype in TYPES:
            return value.dtype
        producer = value.producer() if value is not None else None
        if producer is not None and producer.domain == NAMESPACE:
            waiting += producer.inputs  # kv_inject: the same cache before
    raise Failure(f"no input of {node.name} tells its type: neither {' nor '.join(kind.name for kind in TYPES)}")
