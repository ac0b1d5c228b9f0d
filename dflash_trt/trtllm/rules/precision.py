"""Numbers in few bits: the drafter's projections, NVFP4 and MXFP4 targets, the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import filter as matching

from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.deployment import ERROR, WARNING, Deployment, declares_nvfp4_apart
from dflash_trt.trtllm.rules.attention import BACKEND
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.settings import TRTLLM

BLACKWELL = 100  # the first SM with tensor cores for four bits
MXFP4, NVFP4 = "mxfp4", "nvfp4"
GPT_OSS = "gpt_oss"
MODELOPT = ("gate_up_proj", "gate_up_proj_weight_scale", "gate_up_proj_weight_scale_2", "gate_up_proj_bias")
MOE, KV_DTYPE = ("moe_config", "backend"), ("kv_cache_config", "dtype")
MOE_SMS = {"TRTLLM": (100, 103), "TRITON": (90, 100, 103)}  # of gpt-oss; CUTLASS has no entry: it runs on all
README = "gpt_oss/README.md and deployment-guide-for-gpt-oss-on-trtllm.md of TensorRT-LLM"


@rule(
    "DF040",
    ERROR,
    "the drafter's q, k and v are dense",
    why="TensorRT-LLM cuts rows of k and v out of qkv_proj.weight as floats: packed ones break it, or draft rubbish",
    source="modeling_dflash.py of TensorRT-LLM; the same fault: vLLM issue 51581",
)
def projections_are_dense(deployment: Deployment) -> Iterator[Fault]:
    drafter = deployment.drafter.shape
    if drafter is not None and drafter.packed_qkv:
        kind = (drafter.quantization or "four bits").upper()
        fix = "quantize the MLPs alone (`dflash-trt quantize --draft-preset nvfp4-mlp`), or serve it in bfloat16"
        yield Fault(f"q, k and v of the drafter are packed ({kind})", fix)


@rule(
    "DF041",
    WARNING,
    "a gpt-oss target is MXFP4, as OpenAI published it",
    why="NVFP4 depends on release and tensor names: one loader takes the packed experts for bfloat16, another reads "
    "exactly what ModelOpt writes",
    source="modeling_gpt_oss.py of TensorRT-LLM; its guide names MXFP4 alone",
)
def gpt_oss_is_mxfp4(deployment: Deployment) -> Iterator[Fault]:
    target = deployment.target
    if not _is_gpt_oss(deployment) or target.precision != NVFP4:
        return
    if target.tensors:
        missing = [name for name in MODELOPT if not matching(target.tensors, f"*.experts.{name}")]
        if missing:
            fix = "convert with `dflash-trt quantize` or ModelOpt's export: experts.gate_up_proj_weight_scale and so on"
            yield Fault(f"NVFP4 gpt-oss without tensors named experts.{missing[0]}", fix, severity=ERROR)
            return
    fix = "try your release with this checkpoint before you rely on it, or serve the MXFP4 one"
    yield Fault(f"an NVFP4 gpt-oss may not load in {deployment.release}, or load wrongly", fix)


@rule(
    "DF042",
    ERROR,
    "moe_config.backend suits the GPU and the parallelism",
    why="each backend has kernels for some GPUs and ways to split experts; others raise, or answer wrongly",
    source=README,
)
def moe_backend_suits(deployment: Deployment) -> Iterator[Fault]:
    settings, card, backend = deployment.settings, deployment.gpus.card, deployment.settings.moe_backend
    if not _is_gpt_oss(deployment):
        return
    sms = MOE_SMS.get(backend)
    if sms and card.sm not in sms:
        listed = " and ".join(f"SM{sm}" for sm in sms)
        what = f"moe_config.backend {backend} is for {listed}; {card.name} is SM{card.sm}"
        yield Fault(what, "write TRITON" if card.sm == 90 else "write CUTLASS", MOE)
    elif backend == "TRITON" and (split := settings.tp // settings.ep) > 1:
        what = f"moe_config.backend TRITON does not split an expert over {split} ranks"
        other = "TRTLLM" if card.sm >= BLACKWELL else "CUTLASS"
        yield Fault(what, f"write {other}, or moe_expert_parallel_size {settings.tp}", MOE)
    elif backend == "TRITON" and card.sm >= BLACKWELL:
        yield Fault("moe_config.backend TRITON is Hopper's", "write TRTLLM or CUTLASS", MOE, WARNING)
    elif backend == "TRTLLM" and settings.attention_dp and settings.ep > 1 and deployment.goal == "throughput":
        what = "moe_config.backend TRTLLM has no all-to-all in older releases"
        yield Fault(what, "measure CUTLASS as well", MOE, WARNING)


@rule(
    "DF043",
    ERROR,
    "the GPU computes in the target's precision",
    why="NVFP4 needs Blackwell's tensor cores; TensorRT-LLM has no kernels for it elsewhere",
    source="quantization.md of TensorRT-LLM (hardware support matrix); our judgement: NVFP4 caches likewise",
)
def gpu_has_the_precision(deployment: Deployment) -> Iterator[Fault]:
    card, keys = deployment.gpus.card, KV_DTYPE
    if card.sm >= BLACKWELL:
        return
    if deployment.target.precision == NVFP4:
        yield Fault(
            f"the target is NVFP4; {card.name} is SM{card.sm}", "use Blackwell, or an FP8 checkpoint", ("model",)
        )
    if deployment.settings.kv_dtype == NVFP4:
        yield Fault(f"kv_cache_config.dtype nvfp4; {card.name} is SM{card.sm}", "write fp8 or auto", keys)


@rule(
    "DF044",
    WARNING,
    "with the TRTLLM backend, the KV cache is stored in bfloat16",
    why="the drafter's context is bfloat16: in a cache of another dtype it finds no place, so a private arena is made, "
    "outside free_gpu_memory_fraction",
    source="_torch/speculative/dflash.py of TensorRT-LLM (warns in its log)",
)
def cache_can_be_shared(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if footprint.backend(settings) == TRTLLM and settings.kv_dtype not in footprint.FLOATS:
        what = f"kv_cache_config.dtype is {settings.kv_dtype}: the drafter's context leaves the KV cache"
        fix = "write auto, or leave memory for the arena (DF020 judges it)"
        yield Fault(what, fix, KV_DTYPE if deployment.has(*KV_DTYPE) else BACKEND)


@rule(
    "DF045",
    WARNING,
    "an NVFP4 target has hf_quant_config.json",
    why="from config.json alone, TensorRT-LLM reads group_size where ModelOpt does not write it, and skips the KV "
    "cache's scheme",
    source="modelopt_config.py of TensorRT-LLM",
)
def quantization_is_declared(deployment: Deployment) -> Iterator[Fault]:
    target = deployment.target
    if target.precision == NVFP4 and target.tensors and not declares_nvfp4_apart(target):
        yield Fault(f"{target.name} has no hf_quant_config.json", "copy it from where the checkpoint was made")


@rule(
    "DF046",
    WARNING,
    "a KV cache in four bits was tried with the target",
    why="no test of it with DFlash is known",
    source="our judgement: TensorRT-LLM PR 11487 brought it, and quantization.md lists FP8 caches alone",
)
def cache_is_tried(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.kv_dtype == NVFP4 and deployment.settings.speculation is not None:
        yield Fault("kv_cache_config.dtype nvfp4 with DFlash is untried", "write fp8 or auto", KV_DTYPE)


def _is_gpt_oss(deployment: Deployment) -> bool:
    target = deployment.target.shape
    return target is not None and target.model_type == GPT_OSS
