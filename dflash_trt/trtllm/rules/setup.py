"""Is DFlash asked for at all, of a TensorRT-LLM that has it, with checkpoints that exist?"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.document import nearest
from dflash_trt.trtllm.deployment import ERROR, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.settings import DFLASH, SPECULATION
from dflash_trt.trtllm.support import FIRST, older

TYPES = ("DFlash", "DSpark", "Eagle", "Eagle3", "MTP", "NGram", "Draft_Target", "PARD", "Medusa", "Lookahead", "SA")

# Variable → (values that do no harm, severity, what it does).
ENVIRONMENT = {
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": (
        ("",), ERROR, "counts drafts as accepted that the target would refuse: answers are wrong, figures made up",
    ),
    "ENABLE_PERFECT_ROUTER": (("", "0"), ERROR, "replaces the router's choice of experts: answers are wrong"),
    "TLLM_DFLASH_ACCEPT_STATS_DIR": (
        ("",), WARNING, "records acceptance in eager mode alone: without CUDA graphs a step takes far longer",
    ),
    "TRTLLM_SKIP_KV_CACHE_ESTIMATION": (
        ("", "0"), WARNING, "lets the KV cache take its fraction before the drafter's arena, which gets what is left",
    ),
    "OVERRIDE_QUANT_ALGO": (("",), WARNING, "changes the precision the experts compute in, for tests of accuracy"),
    "CUDA_LAUNCH_BLOCKING": (("", "0"), WARNING, "waits for every kernel: for finding faults, not for serving"),
}  # fmt: skip


@rule(
    "DF001",
    ERROR,
    "speculative_config is there",
    why="without it the server answers as it always does, and nothing says that no drafter is used",
    source="speculative-decoding.md of TensorRT-LLM",
)
def speculation_is_asked_for(deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.speculation is None:
        fix = "add speculative_config with decoding_type: DFlash, speculative_model and max_draft_len"
        yield Fault("there is no speculative_config: the target would decode alone", fix, (SPECULATION,))


@rule(
    "DF002",
    ERROR,
    "decoding_type is DFlash, spelled so",
    why="the spelling picks the class that reads the section; another one refuses DFlash's keys, or drafts otherwise",
    source="DFlashDecodingConfig, API reference of TensorRT-LLM",
)
def decoding_type_is_dflash(deployment: Deployment) -> Iterator[Fault]:
    speculation = deployment.settings.speculation
    if speculation is None or speculation.decoding_type == DFLASH:
        return
    kind, keys = speculation.decoding_type, (SPECULATION, "decoding_type")
    if kind is None:
        yield Fault("decoding_type is missing", f"write decoding_type: {DFLASH}", keys)
    elif kind not in TYPES:
        plain = "".join(letter for letter in kind.lower() if letter.isalnum())
        meant = {word.lower(): word for word in TYPES}.get(nearest(plain, [word.lower() for word in TYPES]) or "")
        yield Fault(f"decoding_type {kind!r} is none", f"write {meant or DFLASH}, with these capitals", keys)
    elif kind != "DSpark":  # DF051 knows which drafters want that one
        drafter = deployment.drafter.shape
        severity = ERROR if drafter is not None and drafter.target_layer_ids else WARNING
        what = f"decoding_type is {kind}: the rules here are about DFlash"
        yield Fault(what, f"write {DFLASH} for a DFlash drafter", keys, severity)


@rule(
    "DF003",
    ERROR,
    "speculative_model names a drafter that can be read",
    why="the server loads it after the target, minutes into its start",
    source="DFlashDecodingConfig, API reference of TensorRT-LLM",
)
def drafter_is_there(deployment: Deployment) -> Iterator[Fault]:
    speculation, drafter = deployment.settings.speculation, deployment.drafter
    keys = (SPECULATION, "speculative_model")
    if speculation is not None and speculation.model is None and drafter.name is None:
        yield Fault("speculative_model is missing: DFlash has no drafter of its own", "name the drafter's folder", keys)
    elif drafter.fault:
        yield Fault(f"the drafter cannot be read: {drafter.fault}", drafter.fix, keys)


@rule(
    "DF004",
    ERROR,
    "max_draft_len is set, and at least 1",
    why="TensorRT-LLM asserts it where it reads the file; unset, the comparison itself fails",
    source="tensorrt_llm/llmapi/llm_args.py",
)
def draft_length_is_set(deployment: Deployment) -> Iterator[Fault]:
    speculation, drafter = deployment.settings.speculation, deployment.drafter.shape
    if speculation is None or speculation.draft_length:
        return
    block = drafter.block_size if drafter else None
    said = "is missing" if speculation.draft_length is None else "is 0"
    fix = f"write {block - 1}, what the drafter's block of {block} holds" if block else "write how many tokens to draft"
    yield Fault(f"max_draft_len {said}", fix, (SPECULATION, "max_draft_len"))


@rule(
    "DF005",
    ERROR,
    f"TensorRT-LLM {FIRST} or later",
    why="older ones have no DFlash; no 1.2 release has",
    source="TensorRT-LLM PR 12794, on its main branch since 2026-04-27; the first tag after that, by date",
)
def release_has_dflash(deployment: Deployment) -> Iterator[Fault]:
    if older(deployment.release, FIRST):
        yield Fault(f"TensorRT-LLM {deployment.release} has no DFlash", f"use {FIRST} or later", ("release",))


@rule(
    "DF006",
    ERROR,
    "the PyTorch backend",
    why="AutoDeploy and the TensorRT backend do not know DFlash",
    source="DFlashDecodingConfig.supports_backend; TensorRT-LLM PR 14843 (AutoDeploy, open)",
)
def backend_is_pytorch(deployment: Deployment) -> Iterator[Fault]:
    backend = deployment.settings.backend
    if deployment.settings.speculation is not None and backend.lower() != "pytorch":
        yield Fault(f"backend {backend} has no DFlash", "write backend: pytorch, or leave it out", ("backend",))


@rule(
    "DF007",
    ERROR,
    "the target can be read",
    why="nothing can be served without it, and little can be checked",
    source="trtllm-serve, command-line reference of TensorRT-LLM",
)
def target_is_there(deployment: Deployment) -> Iterator[Fault]:
    if deployment.target.fault:
        yield Fault(f"the target cannot be read: {deployment.target.fault}", deployment.target.fix, ("model",))


@rule(
    "DF008",
    WARNING,
    "no environment variable that falsifies or slows answers",
    why="they are for tests and measurements, and a server inherits them from the shell it is started in",
    source="_torch/speculative/interface.py and accept_stats.py, modeling_gpt_oss.py and PR 19466 of TensorRT-LLM; "
    "CUDA C++ Programming Guide",
)
def environment_is_harmless(deployment: Deployment) -> Iterator[Fault]:
    for name, (harmless, severity, effect) in ENVIRONMENT.items():
        value = deployment.environment.get(name, "")
        if value not in harmless:
            keys = ("env_overrides", name)
            yield Fault(f"{name}={value} {effect}", f"unset {name}", keys, severity)
