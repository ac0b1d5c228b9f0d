"""What a trtllm-serve YAML comes to: the values that the rules reckon with, and TensorRT-LLM's defaults for the rest.

A value of the wrong type counts as absent here: `releases.judge` is what names it. Defaults are those of
`tensorrt_llm/llmapi/llm_args.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Default = TypeVar("Default")

DFLASH = "DFlash"
VANILLA, TRTLLM, FA4 = "VANILLA", "TRTLLM", "FA4"
SCHEDULE = "draft_len_schedule"
SPECULATION = "speculative_config"
LARGEST = 1 << 62  # numbers are cut there: more is nonsense, and no float holds all of it


@dataclass(frozen=True)
class Speculation:
    """`speculative_config`."""

    decoding_type: str | None
    model: str | None  # a directory, or a name to download
    draft_length: int | None  # K
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...] | None
    attention_backend: str
    recompute_tail: int
    skip_budget_check: bool
    rejection_sampling: bool
    max_concurrency: int | None
    schedule: Mapping[int, int] | None  # batch size → draft length


@dataclass(frozen=True)
class Settings:
    """The rest of the file."""

    speculation: Speculation | None
    backend: str
    batch: int  # max_batch_size; under attention data parallelism that of each rank
    tokens: int  # max_num_tokens of a step
    sequence: int | None  # max_seq_len; None: taken from the target's config
    beams: int
    tp: int
    pp: int
    ep: int  # 1: the experts are split as the other layers are
    moe_tp: int | None
    cp: int
    attention_dp: bool
    attention_backend: str  # of the target
    kv_fraction: float
    kv_dtype: str
    kv_tokens: int | None
    prefix_reuse: bool
    graphs: bool
    graph_padding: bool
    graph_batches: tuple[int, ...]  # those named; empty: chosen from `graph_batch`
    graph_batch: int | None
    moe_backend: str
    guided: str | None
    cpp_sampler: bool
    logits_processor: bool
    lora: bool
    disaggregated: bool
    chunked_prefill: bool
    overlap: bool
    reasoning_parser: str | None
    environment: Mapping[str, str]

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.cp

    @property
    def width(self) -> int | None:
        """Positions that a step computes for a sequence: K drafts and the token before them."""
        draft_length = self.speculation.draft_length if self.speculation else None
        return None if draft_length is None else draft_length + 1


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Never raises: what is missing or misshapen gets its default."""
    kv, graphs = _section(config, "kv_cache_config"), _section(config, "cuda_graph_config")
    sampler = str(config.get("sampler_type") or "")
    return Settings(
        speculation=_speculation(config),
        backend=str(config.get("backend") or "pytorch"),
        batch=_number(config, "max_batch_size", 2048),
        tokens=_number(config, "max_num_tokens", 8192),
        sequence=_number(config, "max_seq_len", None),
        beams=_number(config, "max_beam_width", 1),
        tp=_number(config, "tensor_parallel_size", 1),
        pp=_number(config, "pipeline_parallel_size", 1),
        ep=_number(config, "moe_expert_parallel_size", 1),
        moe_tp=_number(config, "moe_tensor_parallel_size", None),
        cp=_number(config, "context_parallel_size", 1),
        attention_dp=config.get("enable_attention_dp") is True,
        attention_backend=str(config.get("attn_backend") or TRTLLM).upper(),
        kv_fraction=_fraction(kv, "free_gpu_memory_fraction", 0.9),
        kv_dtype=str(kv.get("dtype") or "auto").lower(),
        kv_tokens=_number(kv, "max_tokens", None),
        prefix_reuse=kv.get("enable_block_reuse") is not False,
        graphs=config.get("cuda_graph_config", {}) is not None,
        graph_padding=graphs.get("enable_padding") is True,
        graph_batches=_integers(graphs.get("batch_sizes")) or (),
        graph_batch=_number(graphs, "max_batch_size", None),
        moe_backend=str(_section(config, "moe_config").get("backend") or "AUTO").upper(),
        guided=config.get("guided_decoding_backend") or None,
        cpp_sampler=sampler.lower() == "trtllmsampler" or config.get("enable_trtllm_sampler") is True,
        logits_processor=any(config.get(key) for key in ("batched_logits_processor", "logits_post_processors")),
        lora=config.get("enable_lora") is True or bool(config.get("lora_config")),
        disaggregated=bool(config.get("cache_transceiver_config")),
        chunked_prefill=config.get("enable_chunked_prefill") is True,
        overlap=config.get("disable_overlap_scheduler") is not True,
        reasoning_parser=config.get("reasoning_parser") or None,
        environment={str(key): str(value) for key, value in _section(config, "env_overrides").items()},
    )


def _speculation(config: Mapping[str, Any]) -> Speculation | None:
    values = _section(config, SPECULATION)
    if not values:
        return None
    model = values.get("speculative_model") or values.get("speculative_model_dir")
    kind = values.get("decoding_type")
    schedule = values.get(SCHEDULE)
    return Speculation(
        decoding_type=None if kind is None else str(kind),
        model=None if model is None else str(model),
        draft_length=_number(values, "max_draft_len", None, at_least=0),
        mask_token_id=_number(values, "mask_token_id", None, at_least=None),
        target_layer_ids=_integers(values.get("target_layer_ids")),
        attention_backend=str(values.get("attention_backend") or VANILLA),
        recompute_tail=_number(values, "context_recompute_tail", 0, at_least=0),
        skip_budget_check=values.get("skip_ctx_buffer_budget_check") is True,
        rejection_sampling=values.get("use_rejection_sampling") is True,
        max_concurrency=_number(values, "max_concurrency", None),
        schedule=_schedule(schedule) if isinstance(schedule, Mapping) else None,
    )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(values: Mapping[str, Any], key: str, default: Default, at_least: int | None = 1) -> int | Default:
    value = values.get(key)
    if type(value) is not int or (at_least is not None and value < at_least):
        return default
    return min(value, LARGEST)


def _fraction(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return default
    return math.copysign(math.inf, value > 0 or -1) if abs(value) >= LARGEST else float(value)


def _integers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        return None
    return tuple(value)


def _schedule(values: Mapping[Any, Any]) -> Mapping[int, int]:
    """JSON, which Triton's model.yaml may carry, knows no integer keys."""
    pairs = ((int(key) if str(key).isdecimal() else key, length) for key, length in values.items())
    return {batch: length for batch, length in pairs if type(batch) is int and type(length) is int}
