"""The presets: what each quantizes and how. Whatever a preset does not name stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.shared_expert.*_proj")
EXPERTS = ("mlp.experts.*",)  # one linear an expert (Qwen3-MoE), or all experts in one tensor (gpt-oss)

# Readers fuse these into one matrix product of this name, which has one global scale for its weights and one for its
# input: TensorRT-LLM asserts that the members agree, vLLM takes one of them (NVIDIA/Model-Optimizer ties by name too).
GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# Linears outside the decoder layers, quantized only if asked for by name.
ON_REQUEST = ("fc", "lm_head")


@dataclass(frozen=True)
class Preset:
    """One row of the table."""

    name: str
    summary: str
    linears: tuple[str, ...]  # fnmatch patterns over the name inside a decoder layer: "self_attn.q_proj"
    activations: bool = True  # W4A4: the inputs of these linears are rounded to NVFP4 as well; else W4A16
    algorithm: str = "max"  # ModelOpt's name for how amax is found
    needs_cuda: bool = False  # its calibration runs ModelOpt's simulated forward, which has no CPU form
    mxfp4: bool = False  # takes experts that are stored in MXFP4, and casts them


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("nvfp4", "all linears of the layers, weights and inputs (W4A4)", ATTENTION + MLP + EXPERTS),
        Preset(
            "nvfp4-weight-only",
            "all linears of the layers, weights alone (W4A16), read by vLLM and TensorRT-LLM since mid 2026, not by "
            "TensorRT-LLM 1.2, nor by SGLang, which takes any NVFP4 for W4A4",
            ATTENTION + MLP + EXPERTS,
            activations=False,
        ),
        Preset(
            "nvfp4-mlp",
            "o_proj and the MLP, weights and inputs; q/k/v stay, for readers that slice a fused qkv",
            ("self_attn.o_proj", *MLP, *EXPERTS),
        ),
        Preset("nvfp4-experts", "MoE experts alone, weights and inputs; casts gpt-oss's MXFP4", EXPERTS, mxfp4=True),
        Preset(
            "nvfp4-mse",
            "as nvfp4, block scales chosen by a search for the least error (CUDA; untested)",
            ATTENTION + MLP + EXPERTS,
            algorithm="mse",
            needs_cuda=True,
        ),
        Preset(
            "nvfp4-awq",
            "as nvfp4, inputs rescaled by activation (AWQ lite; CUDA; untested)",
            ATTENTION + MLP + EXPERTS,
            algorithm="awq_lite",
            needs_cuda=True,
        ),
    )
}
