"""Ranks: does the work divide by them, and are there GPUs for them?"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.trtllm.deployment import ERROR, NOTE, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule

TP, PP, EP = ("tensor_parallel_size",), ("pipeline_parallel_size",), ("moe_expert_parallel_size",)
ATTENTION_DP = ("enable_attention_dp",)


@rule(
    "DF060",
    ERROR,
    "no pipeline parallelism",
    why="TensorRT-LLM does not combine it with speculative decoding",
    source="feature-combination-matrix.md of TensorRT-LLM (speculative decoding, linear: No)",
)
def pipeline_is_off(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if settings.pp > 1 and settings.speculation is not None:
        fix = f"write 1, and tensor_parallel_size {settings.tp * settings.pp}"
        yield Fault(f"pipeline_parallel_size is {settings.pp}: speculative decoding has none", fix, PP)


@rule(
    "DF061",
    ERROR,
    "heads and MLPs divide by tensor_parallel_size",
    why="every rank holds the same share; TensorRT-LLM asserts it while it builds the layers",
    source="modules/attention.py and linear.py of TensorRT-LLM",
)
def heads_divide(deployment: Deployment) -> Iterator[Fault]:
    settings, tp = deployment.settings, deployment.settings.tp
    for role, shape in (("target", deployment.target.shape), ("drafter", deployment.drafter.shape)):
        if shape is None or tp == 1 or settings.attention_dp:
            continue
        sizes = {"attention heads": shape.heads}
        if shape.ffn and (not shape.experts or shape.dense_layers):
            sizes["intermediate_size"] = shape.ffn
        for name, size in sizes.items():
            if size % tp:
                yield Fault(f"{name} of the {role} ({size}) cannot be divided by tensor_parallel_size {tp}",
                            f"write {_divisors(size, deployment.gpus.total)}", TP)  # fmt: skip
        heads = shape.kv_heads
        if not shape.latent and heads % tp and tp % heads:
            what = f"{heads} KV heads of the {role} neither divide by tensor_parallel_size {tp} nor repeat evenly"
            yield Fault(what, f"write {_divisors(heads, deployment.gpus.total)}", TP)


@rule(
    "DF062",
    ERROR,
    "experts divide by moe_expert_parallel_size, and that divides tensor_parallel_size",
    why="every rank holds as many experts, or as large a part of each; others are refused",
    source="parallel-strategy.md of TensorRT-LLM (product of the two); our judgement: that experts divide",
)
def experts_divide(deployment: Deployment) -> Iterator[Fault]:
    settings, target = deployment.settings, deployment.target.shape
    ep, split = settings.ep, settings.moe_tp
    if settings.tp % ep:
        yield Fault(f"moe_expert_parallel_size {ep} does not divide tensor_parallel_size {settings.tp}",
                    f"write {_divisors(settings.tp, settings.tp)}", EP)  # fmt: skip
    elif split is not None and split * ep != settings.tp:
        what = f"moe_tensor_parallel_size {split} x moe_expert_parallel_size {ep} is not {settings.tp}"
        yield Fault(what, f"write {settings.tp // ep}, or leave it out", ("moe_tensor_parallel_size",))
    if target is None:
        return
    if not target.experts and ep > 1:
        yield Fault(f"moe_expert_parallel_size is {ep}, but the target has no experts", "leave it out", EP, WARNING)
    elif target.experts and target.experts % ep:
        yield Fault(f"{target.experts} experts do not divide by moe_expert_parallel_size {ep}",
                    f"write {_divisors(target.experts, settings.tp)}", EP)  # fmt: skip


@rule(
    "DF063",
    ERROR,
    "as many ranks as GPUs",
    why="each rank takes a GPU of its own; GPUs without a rank stand idle",
    source="deployment-guide-for-gpt-oss-on-trtllm.md of TensorRT-LLM (tp_size matches the GPUs)",
)
def ranks_have_gpus(deployment: Deployment) -> Iterator[Fault]:
    settings, gpus = deployment.settings, deployment.gpus
    made = f"tensor_parallel_size {settings.tp}" + "".join(
        f" x {name} {size}"
        for name, size in (("pipeline_parallel_size", settings.pp), ("context_parallel_size", settings.cp))
        if size > 1
    )
    if settings.world > gpus.total:
        what = f"{made} makes {settings.world} ranks, but {gpus} has {gpus.total} GPUs"
        yield Fault(what, f"write {gpus.total}, or name more GPUs", TP)
    elif settings.world < gpus.total:
        what = f"{made} uses {settings.world} of the {gpus.total} GPUs of {gpus}"
        yield Fault(what, f"write {gpus.total}, or start one server for every {settings.world} GPUs", TP, WARNING)


@rule(
    "DF064",
    WARNING,
    "no attention data parallelism where latency counts",
    why="every rank then attends alone for its requests, with all heads: more requests at a time, each of them slower",
    source="parallel-strategy.md of TensorRT-LLM (for large batches); PR 19040 (the drafter's context is not split)",
)
def attention_is_split(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.attention_dp and deployment.goal == "latency":
        yield Fault("enable_attention_dp is on, but the goal is latency", "write false", ATTENTION_DP)


@rule(
    "DF065",
    ERROR,
    "no context parallelism (Helix)",
    why="TensorRT-LLM does not combine the two",
    source="feature-combination-matrix.md of TensorRT-LLM (speculative decoding, Helix: No)",
)
def context_is_whole(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if settings.cp > 1 and settings.speculation is not None:
        what = f"context_parallel_size is {settings.cp}: speculative decoding has none"
        yield Fault(what, "leave it out", ("context_parallel_size",))


@rule(
    "DF066",
    WARNING,
    "tensor parallelism stays within NVLink",
    why="every layer is summed over the ranks twice; over PCIe or a network that takes longer than the layer",
    source="our judgement, from the data sheets of the GPUs (gpus.yaml)",
)
def ranks_are_linked(deployment: Deployment) -> Iterator[Fault]:
    gpus, tp = deployment.gpus, deployment.settings.tp
    if tp > gpus.count and gpus.nodes > 1:
        yield Fault(f"tensor_parallel_size {tp} spans nodes of {gpus.count} GPUs", f"write {gpus.count}, and serve one "
                    "model a node, unless NVLink joins the nodes", TP)  # fmt: skip
    elif tp > 1 and not gpus.card.nvlink:
        what = f"tensor_parallel_size {tp} over PCIe: {gpus.card.name} has no NVLink"
        yield Fault(what, "measure one GPU as well", TP, NOTE)


def _divisors(size: int, most: int) -> str:
    """`1, 2, 4 or 8`"""
    words = [str(count) for count in range(1, max(1, min(size, most)) + 1) if size % count == 0]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
