"""The drafter's attention: which backend runs on which GPU, and what becomes of windows and of looking ahead."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.checkpoint.shape import FULL, SLIDING
from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.deployment import ERROR, NOTE, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.settings import FA4, SPECULATION, TRTLLM, VANILLA
from dflash_trt.trtllm.support import older

BACKEND = (SPECULATION, "attention_backend")
TRTLLM_SMS = (100, 103)
FA4_SM = 90
WINDOWS_SINCE = "1.3.0rc27"  # the first release read that has PR 16914
NARROW_HEADS, GROUP = (72, 80, 96), 32  # head sizes without a kernel; query heads of one KV head, at most


@rule(
    "DF030",
    ERROR,
    "attention_backend TRTLLM runs on SM100 and SM103 alone",
    why="its kernels are built for these; elsewhere the server stops once the drafter is loaded",
    source="_torch/speculative/dflash_attention.py (TensorRT-LLM PR 16914)",
)
def trtllm_has_its_sm(deployment: Deployment) -> Iterator[Fault]:
    card = deployment.gpus.card
    if footprint.backend(deployment.settings) == TRTLLM and card.sm not in TRTLLM_SMS:
        what = f"attention_backend TRTLLM needs SM100 or SM103 (B200, B300); {card.name} is SM{card.sm}"
        yield Fault(what, f"write {FA4 if card.sm == FA4_SM else VANILLA}", BACKEND)


@rule(
    "DF031",
    ERROR,
    "attention_backend TRTLLM has no sliding window that looks ahead",
    why="its kernel cannot mask a finite window that is not causal: DFlash2 and use_swa are refused; a plain drafter's "
    "layers run causal, against its training",
    source="TensorRT-LLM PR 19159, modeling_dflash.py; our judgement: plain drafters are refused here, too",
)
def trtllm_can_mask(deployment: Deployment) -> Iterator[Fault]:
    if footprint.backend(deployment.settings) == TRTLLM and (layers := _ahead(deployment)):
        what = f"attention_backend TRTLLM, but {layers} sliding-window layers of the drafter are not causal"
        yield Fault(what, f"write {VANILLA}", BACKEND)


@rule(
    "DF032",
    WARNING,
    "layers look ahead in the block as they were trained to",
    why="TensorRT-LLM ignores is_causal of a plain DFlash drafter: its sliding layers are run causal, its full ones "
    "are not; acceptance falls",
    source="modeling_dflash.py of TensorRT-LLM (_get_attention_mask_args; pinned by test_dflash2_semantics.py)",
)
def causality_is_kept(deployment: Deployment) -> Iterator[Fault]:
    drafter = deployment.drafter.shape
    if drafter is None or drafter.variant is not None:
        return
    elsewhere = footprint.backend(deployment.settings) == TRTLLM or older(deployment.release, WINDOWS_SINCE)
    ahead = 0 if elsewhere else _ahead(deployment)  # DF031 and DF033 speak of them
    blind = sum(causal for kind, causal in zip(drafter.kinds, drafter.causal, strict=True) if kind == FULL)
    fix = "measure acceptance before you rely on it"
    if ahead:
        yield Fault(f"{ahead} sliding layers of the drafter look ahead in training, but are served causal", fix)
    if blind:
        yield Fault(f"{blind} full-attention layers of the drafter are causal in training, but not served so", fix)


@rule(
    "DF033",
    WARNING,
    "windows are kept",
    why="older releases run sliding layers as full ones: right within the window, less so beyond",
    source="TensorRT-LLM PR 16914 (July and August 2026) brought windows",
)
def windows_are_kept(deployment: Deployment) -> Iterator[Fault]:
    drafter, sequence = deployment.drafter.shape, footprint.sequence(deployment)
    if drafter is None or not drafter.window or not older(deployment.release, WINDOWS_SINCE):
        return
    if SLIDING in drafter.kinds and (sequence is None or sequence > drafter.window):
        what = f"sliding layers of the drafter see more than their window of {drafter.window} tokens"
        yield Fault(what, f"use {WINDOWS_SINCE} or later, or expect fewer accepted drafts beyond that")


@rule(
    "DF034",
    ERROR,
    "sliding layers have a window",
    why="TensorRT-LLM refuses a window below 1, and runs a sliding layer without one as a full layer",
    source="_torch/pyexecutor/config_utils.py and modeling_dflash.py of TensorRT-LLM (sliding_window, swa_window_size)",
)
def windows_are_there(deployment: Deployment) -> Iterator[Fault]:
    drafter = deployment.drafter.shape
    if drafter is not None and SLIDING in drafter.kinds and not drafter.window:
        said = "is missing" if drafter.window is None else "is 0"
        what = f"the drafter has sliding layers, but sliding_window (or swa_window_size) {said}"
        yield Fault(what, "write the window it was trained with to its config.json")


@rule(
    "DF035",
    ERROR,
    "the target's attention is TensorRT-LLM's own",
    why="only its metadata carries the drafter's pages: FlashInfer is refused, with others the arena becomes private",
    source="TensorRT-LLM PR 19466; _torch/speculative/dflash.py",
)
def target_attends_natively(deployment: Deployment) -> Iterator[Fault]:
    backend = deployment.settings.attention_backend
    if deployment.settings.speculation is not None and backend != TRTLLM:
        severity = ERROR if backend.startswith("FLASHINFER") else WARNING
        yield Fault(f"attn_backend {backend} does not carry DFlash", "leave attn_backend out", ("attn_backend",),
                    severity)  # fmt: skip


@rule(
    "DF036",
    WARNING,
    "attention_backend FA4 runs on SM90",
    why="it is written for Hopper; its author did not try it on Blackwell",
    source="TensorRT-LLM PR 18553",
)
def fa4_has_its_sm(deployment: Deployment) -> Iterator[Fault]:
    card = deployment.gpus.card
    if footprint.backend(deployment.settings) == FA4 and card.sm != FA4_SM:
        meant = TRTLLM if card.sm in TRTLLM_SMS and not _ahead(deployment) else VANILLA
        yield Fault(f"attention_backend FA4 aims at SM{FA4_SM}; {card.name} is SM{card.sm}", f"write {meant}", BACKEND)


@rule(
    "DF037",
    NOTE,
    "on SM100 and SM103, attention_backend TRTLLM where it can",
    why="VANILLA needs the package flash-attn, and its arena lies outside the KV cache's budget",
    source="_torch/speculative/dflash.py; TensorRT-LLM PR 16914",
)
def vanilla_is_meant(deployment: Deployment) -> Iterator[Fault]:
    fast = deployment.gpus.card.sm in TRTLLM_SMS and not _ahead(deployment)
    if footprint.backend(deployment.settings) == VANILLA and fast:
        said = "VANILLA" if deployment.has(*BACKEND) else "not set: VANILLA"
        fix = "write TRTLLM, if the release has it, or see that flash-attn is installed"
        yield Fault(f"attention_backend is {said}, on a {deployment.gpus.card.name}", fix, BACKEND)


@rule(
    "DF038",
    ERROR,
    "attention_backend TRTLLM has kernels for the drafter's heads",
    why="it is checked when the arena is made: RuntimeError at the first forward",
    source="_torch/speculative/dflash_attention.py of TensorRT-LLM (validate_dflash_trtllm_gen_runtime)",
)
def trtllm_has_the_heads(deployment: Deployment) -> Iterator[Fault]:
    drafter = deployment.drafter.shape
    if drafter is None or drafter.latent or footprint.backend(deployment.settings) != TRTLLM:
        return
    if drafter.heads % drafter.kv_heads or drafter.heads // drafter.kv_heads > GROUP:
        what = f"attention_backend TRTLLM takes up to {GROUP} query heads a KV head, evenly; the drafter has "
        yield Fault(f"{what}{drafter.heads} for {drafter.kv_heads}", f"write {VANILLA}", BACKEND)
    if drafter.head_dim in NARROW_HEADS and not all(drafter.causal):
        what = f"attention_backend TRTLLM has no kernel that looks ahead for heads of {drafter.head_dim}"
        yield Fault(what, f"write {VANILLA}", BACKEND)


def _ahead(deployment: Deployment) -> int:
    """Sliding layers of the drafter that see later places of the block."""
    drafter = deployment.drafter.shape
    if drafter is None:
        return 0
    return sum(kind == SLIDING and not causal for kind, causal in zip(drafter.kinds, drafter.causal, strict=True))
