"""What a deployment takes of each GPU: weights, the drafter's arena, the target's KV cache."""

from __future__ import annotations

from dflash_trt.checkpoint.shape import SLIDING, DrafterShape, Shape
from dflash_trt.kv import CACHE_WIDTHS, PAGE, WIDTHS, Arena, rank_heads
from dflash_trt.trtllm.arena import Memory
from dflash_trt.trtllm.deployment import Deployment, Source
from dflash_trt.trtllm.settings import TRTLLM, Settings

FLOAT = WIDTHS["bf16"]
BYTES = WIDTHS | {"compressed-tensors": WIDTHS["nvfp4"]}  # which has four bits and scales, too
FLOATS = ("auto", "bf16", "bfloat16")  # KV caches that the drafter's bfloat16 context can share


def arena(deployment: Deployment) -> Arena | None:
    """The drafter's; None where its sizes or K are not known, or no length bounds it."""
    settings, drafter = deployment.settings, deployment.drafter.shape
    positions = context(deployment)
    if drafter is None or drafter.latent or settings.width is None or positions is None:
        return None
    return Arena(
        layers=drafter.layers,
        positions=positions,
        width=settings.width,
        kv_heads=rank_heads(drafter.kv_heads, sharing(settings)),
        head_dim=drafter.head_dim,
        page=PAGE if backend(settings) == TRTLLM else 1,
    )


def context(deployment: Deployment) -> int | None:
    """Positions of the arena: the longest sequence, as far as the drafter can count."""
    drafter = deployment.drafter.shape
    bounds = [sequence(deployment), drafter.max_position if drafter else None]
    return min((bound for bound in bounds if bound), default=None)


def sequence(deployment: Deployment) -> int | None:
    """Of the server: max_seq_len, or what TensorRT-LLM takes from the target's config."""
    target = deployment.target.shape
    return deployment.settings.sequence or (target.max_position if target else None)


def backend(settings: Settings) -> str:
    return settings.speculation.attention_backend if settings.speculation else ""


def pooled(settings: Settings) -> bool:
    """Whether the context lies in pages of the KV cache, and no private arena is made."""
    return backend(settings) == TRTLLM and settings.kv_dtype in FLOATS and settings.attention_backend == TRTLLM


def cache_first(deployment: Deployment) -> bool:
    """Whether the KV cache is allocated before the arena: where TensorRT-LLM skips to estimate it (PR 19466)."""
    skipped = deployment.environment.get("TRTLLM_SKIP_KV_CACHE_ESTIMATION") == "1"
    return skipped or deployment.settings.attention_backend == "VANILLA" or deployment.settings.cp > 1


def memory(deployment: Deployment) -> Memory | None:
    """Of one GPU; None where the target's size is not known."""
    target = weights(deployment.target, deployment.settings)
    if target is None:
        return None
    drafter = drafter_weights(deployment.drafter.shape, deployment.settings) if deployment.drafter.shape else 0
    settings = deployment.settings
    return Memory(deployment.gpus.card.memory, target + drafter, settings.kv_fraction, cache_first(deployment))


def weights(target: Source[Shape], settings: Settings) -> int | None:
    """Bytes of the target on one rank: of its files, if ranks share all of them, or else reckoned from its sizes."""
    split = settings.tp * settings.pp
    if target.size is not None and sharing(settings) == settings.tp:
        return target.size // split
    shape = target.shape
    if shape is None or shape.vocab is None or (width := BYTES.get(target.precision or "bf16")) is None:
        return None
    attention = shape.layers * attention_weights(shape) * (FLOAT if width < 1 else width)
    sparse = shape.layers - shape.dense_layers if shape.experts else 0
    dense = 3 * shape.hidden * ((shape.layers - sparse) * shape.ffn + sparse * shape.shared_ffn)
    experts = sparse * 3 * shape.hidden * shape.experts * shape.expert_ffn
    table = shape.vocab * shape.hidden * (1 if shape.tied else 2) * FLOAT
    each = (attention + dense * width + table) / (sharing(settings) * settings.pp)
    return int(each + experts * width / split)


def sharing(settings: Settings) -> int:
    """Ranks that share all but experts; with attention DP each has them whole."""
    return 1 if settings.attention_dp else settings.tp


def drafter_weights(shape: DrafterShape, settings: Settings) -> int:
    """Bytes on one rank: `fc` whole, the layers split."""
    layers = shape.layers * (attention_weights(shape) + 3 * shape.hidden * shape.ffn)
    fc = len(shape.target_layer_ids or ()) * shape.hidden**2
    return int((layers / sharing(settings) + fc) * FLOAT)


def attention_weights(shape: Shape) -> int:
    """Of one layer. A layer with a state, or with MLA, is taken for one with full heads: about as many."""
    return shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)


def cache_per_sequence(deployment: Deployment, tokens: int) -> int | None:
    """Bytes of the target's keys and values of `tokens` on one rank; sliding layers keep their window."""
    shape, settings = deployment.target.shape, deployment.settings
    if shape is None:
        return None
    width = CACHE_WIDTHS.get(settings.kv_dtype, FLOAT)
    heads = shape.kv_heads
    share = 1.0 if shape.latent else rank_heads(heads, sharing(settings)) / heads
    kept = (
        values * (min(tokens, shape.window) if kind == SLIDING and shape.window else tokens)
        for values, kind in zip(shape.cached, shape.kinds, strict=True)
    )
    return int(sum(kept) * width * share / settings.pp)
