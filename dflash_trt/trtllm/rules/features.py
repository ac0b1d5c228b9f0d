"""What else the server does beside drafting: reuse, grammars, samplers, schedules, graphs."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.deployment import ERROR, NOTE, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.settings import SCHEDULE, SPECULATION
from dflash_trt.trtllm.support import older

REUSE = ("kv_cache_config", "enable_block_reuse")
TAIL_SINCE = "1.4.0rc1"  # context_recompute_tail
GRAPHS = ("cuda_graph_config",)
CONCURRENCY = (SPECULATION, "max_concurrency")
SCHEDULED = (SPECULATION, SCHEDULE)
REJECTION = (SPECULATION, "use_rejection_sampling")
MATRIX = "feature-combination-matrix.md of TensorRT-LLM"


@rule(
    "DF070",
    WARNING,
    "prompts are read where answers are written (no disaggregated serving)",
    why="the generating server receives keys and values, but no hidden states: the drafter starts with an empty "
    "context and drafts poorly until the answer has grown",
    source="_torch/speculative/dflash.py of TensorRT-LLM (DFlashSpecMetadata.prepare)",
)
def context_is_computed_here(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if settings.disaggregated and settings.speculation is not None:
        fix = "serve without cache_transceiver_config, or measure acceptance on short answers"
        yield Fault("cache_transceiver_config: the drafter's context is not transferred", fix,
                    ("cache_transceiver_config",))  # fmt: skip


@rule(
    "DF071",
    WARNING,
    "prefix reuse is off, or recomputes a tail for the drafter",
    why="a hit restores the target's cache, not the drafter's context: the drafter does not see how the prompt begins, "
    "and acceptance falls",
    source="TensorRT-LLM issue 16005, PR 19410",
)
def prefixes_are_recomputed(deployment: Deployment) -> Iterator[Fault]:
    settings, speculation = deployment.settings, deployment.settings.speculation
    if speculation is None or not settings.prefix_reuse or speculation.recompute_tail:
        return
    said = "on" if deployment.has(*REUSE) else "on by default"
    tail = (
        "" if older(deployment.release, TAIL_SINCE) else ", or context_recompute_tail (say 512) to speculative_config"
    )
    fix = f"write enable_block_reuse: false to kv_cache_config{tail}"
    yield Fault(f"enable_block_reuse is {said}: after a hit the drafter misses what was reused", fix, REUSE)


@rule(
    "DF072",
    ERROR,
    "rejection sampling without grammars, without context parallelism",
    why="a grammar masks the target's logits between draft and verification, which rejection sampling cannot undo; "
    "TensorRT-LLM raises",
    source="tensorrt_llm/llmapi/llm_args.py (use_rejection_sampling)",
)
def rejection_stands_alone(deployment: Deployment) -> Iterator[Fault]:
    settings, speculation = deployment.settings, deployment.settings.speculation
    if speculation is None or not speculation.rejection_sampling:
        return
    if settings.guided:
        what = f"use_rejection_sampling beside guided_decoding_backend {settings.guided}"
        yield Fault(what, "leave one of them out", REJECTION)
    if settings.cp > 1:
        yield Fault("use_rejection_sampling beside context_parallel_size", "leave one of them out", REJECTION)


@rule(
    "DF073",
    ERROR,
    "no beam search",
    why="a step verifies one line of drafts a request",
    source="our judgement: sampling.md of TensorRT-LLM describes beams without drafts alone",
)
def beams_are_off(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.beams > 1 and deployment.settings.speculation is not None:
        yield Fault(f"max_beam_width is {deployment.settings.beams}", "leave it out", ("max_beam_width",))


@rule(
    "DF074",
    ERROR,
    "the torch sampler, not the C++ one",
    why="TensorRT-LLM's C++ sampler does not verify drafts of one-model speculation",
    source=f"{MATRIX} (TLLM C++ sampler: No)",
)
def sampler_is_torch(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.cpp_sampler and deployment.settings.speculation is not None:
        key = "sampler_type" if deployment.has("sampler_type") else "enable_trtllm_sampler"
        yield Fault(f"{key} asks for the C++ sampler", "leave it out", (key,))


@rule(
    "DF075",
    ERROR,
    "no logits post-processor",
    why="it changes the target's logits after the drafts were made; TensorRT-LLM does not combine the two",
    source=f"{MATRIX} (logits post-processor: No)",
)
def logits_are_untouched(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.logits_processor and deployment.settings.speculation is not None:
        key = next(key for key in ("batched_logits_processor", "logits_post_processors") if deployment.has(key))
        yield Fault(f"{key} beside speculative_config", "leave one of them out", (key,))


@rule(
    "DF076",
    WARNING,
    "no LoRA",
    why="the drafter knows the base model's answers; the combination is untested",
    source=f"{MATRIX} (LoRA: Untested)",
)
def lora_is_off(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.lora and deployment.settings.speculation is not None:
        key = "lora_config" if deployment.has("lora_config") else "enable_lora"
        yield Fault(f"{key} beside speculative_config is untested", "measure acceptance with your adapters", (key,))


@rule(
    "DF077",
    ERROR,
    "draft_len_schedule and max_concurrency agree",
    why="max_concurrency is turned into a schedule: the two exclude each other, and a schedule starts at max_draft_len",
    source="tensorrt_llm/llmapi/llm_args.py (draft_len_schedule)",
)
def schedule_is_one(deployment: Deployment) -> Iterator[Fault]:
    speculation = deployment.settings.speculation
    if speculation is None or speculation.schedule is None:
        return
    schedule, most = speculation.schedule, speculation.draft_length
    if speculation.max_concurrency is not None:
        yield Fault("max_concurrency beside draft_len_schedule", "leave one of them out", CONCURRENCY)
    if bad := [batch for batch, length in schedule.items() if batch < 1 or length < 0]:
        what = f"draft_len_schedule has an entry {bad[0]}: {schedule[bad[0]]}"
        yield Fault(what, "keys are batch sizes from 1 on, values draft lengths from 0 on", SCHEDULED)
    if not schedule:
        yield Fault("draft_len_schedule is empty", f"start with 1: {most}, or leave it out", SCHEDULED)
    elif most is not None and schedule[min(schedule)] != most:
        first = min(schedule)
        what = f"draft_len_schedule starts with {first}: {schedule[first]}, but max_draft_len is {most}"
        yield Fault(what, f"write {first}: {most}", SCHEDULED)
    if most is not None and (longer := [length for length in schedule.values() if length > most]):
        what = f"draft_len_schedule drafts {longer[0]} tokens, but max_draft_len is {most}"
        yield Fault(what, f"write {most} or less", SCHEDULED)


@rule(
    "DF078",
    WARNING,
    "speculation is never switched off within a request",
    why="while it is off nothing is stored for the drafter: it never sees those tokens, and drafts worse afterwards",
    source="_torch/speculative/dflash.py of TensorRT-LLM (returns before it stores context)",
)
def drafting_goes_on(deployment: Deployment) -> Iterator[Fault]:
    settings, speculation = deployment.settings, deployment.settings.speculation
    if speculation is None:
        return
    if speculation.max_concurrency is not None and speculation.max_concurrency < settings.batch:
        what = f"above max_concurrency {speculation.max_concurrency} nothing is drafted, nor stored for later"
        yield Fault(what, "keep K small instead, or accept it for bursts", CONCURRENCY)
    if speculation.schedule and 0 in speculation.schedule.values():
        what = "draft_len_schedule holds a 0: nothing is drafted there, nor stored for later"
        yield Fault(what, "write 1 instead", SCHEDULED)


@rule(
    "DF079",
    WARNING,
    "CUDA graphs cover every batch up to max_batch_size",
    why="a batch without a graph launches every kernel by itself, which takes longer than a step of a small batch",
    source="deployment-guide-for-gpt-oss-on-trtllm.md of TensorRT-LLM (cuda_graph_config); PR 16548",
)
def graphs_cover_the_batch(deployment: Deployment) -> Iterator[Fault]:
    settings, batch = deployment.settings, deployment.settings.batch
    if settings.speculation is None or not deployment.has("max_batch_size"):
        return
    if not settings.graphs:
        yield Fault("cuda_graph_config is null: no CUDA graphs", "leave the key out, or enable padding", GRAPHS)
        return
    largest = max(settings.graph_batches, default=settings.graph_batch or 0)
    if largest and largest < batch:
        what = f"CUDA graphs end at batch {largest}, max_batch_size is {batch}"
        key = "batch_sizes" if settings.graph_batches else "max_batch_size"
        yield Fault(what, f"write {batch} to cuda_graph_config", (*GRAPHS, key))
    scheduled = settings.speculation.schedule is not None or settings.speculation.max_concurrency is not None
    if settings.graph_padding or scheduled or batch == 1:
        return
    if not settings.graph_batches or set(settings.graph_batches) < set(range(1, batch + 1)):
        what = "without enable_padding, only the batch sizes of the list run as CUDA graphs"
        yield Fault(what, "write enable_padding: true to cuda_graph_config", GRAPHS)


@rule(
    "DF080",
    WARNING,
    "the overlap scheduler is on",
    why="without it the GPU waits for the host between two steps; DFlash supports it",
    source=f"{MATRIX} (overlap scheduler: Yes)",
)
def steps_overlap(deployment: Deployment) -> Iterator[Fault]:
    if not deployment.settings.overlap and deployment.settings.speculation is not None:
        key = "disable_overlap_scheduler"
        yield Fault(f"{key} is true", "leave it out", (key,))


@rule(
    "DF081",
    WARNING,
    "prompts fit a step, or are read in chunks",
    why="without chunked prefill, a prompt longer than max_num_tokens is refused",
    source="paged-attention-ifb-scheduler.md of TensorRT-LLM (max_num_tokens, chunked context)",
)
def prompts_fit(deployment: Deployment) -> Iterator[Fault]:
    settings, sequence = deployment.settings, footprint.sequence(deployment)
    if settings.chunked_prefill or sequence is None or settings.tokens >= sequence:
        return
    what = f"prompts of more than max_num_tokens {settings.tokens} are refused; max_seq_len is {sequence}"
    yield Fault(what, "write enable_chunked_prefill: true", ("max_num_tokens",))


@rule(
    "DF082",
    NOTE,
    "TensorRT-LLM's own check of memory is on",
    why="it refuses before the weights are loaded what would fail after",
    source="TensorRT-LLM PR 19466 (skip_ctx_buffer_budget_check)",
)
def budget_is_checked(deployment: Deployment) -> Iterator[Fault]:
    speculation = deployment.settings.speculation
    if speculation is not None and speculation.skip_budget_check:
        keys = (SPECULATION, "skip_ctx_buffer_budget_check")
        yield Fault("skip_ctx_buffer_budget_check is true", "leave it out unless its estimate is wrong", keys)


@rule(
    "DF083",
    NOTE,
    "grammars and drafts get along",
    why="the drafter does not know the grammar, so drafts that it forbids are lost; answers stay right",
    source=f"{MATRIX} (guided decoding: Yes); our judgement: the loss",
)
def grammars_are_expected(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if settings.guided and settings.speculation is not None:
        yield Fault(f"guided_decoding_backend {settings.guided}: drafts ignore the grammar",
                    "expect fewer accepted drafts in such answers", ("guided_decoding_backend",))  # fmt: skip
