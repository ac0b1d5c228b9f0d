"""Do target and drafter belong together, and does TensorRT-LLM serve such a pair?"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.trtllm.deployment import ERROR, NOTE, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.settings import DFLASH, SPECULATION
from dflash_trt.trtllm.support import NO, TESTED, UNLISTED, find_family, older, variants

MODEL = (SPECULATION, "speculative_model")
KIND = (SPECULATION, "decoding_type")


@rule(
    "DF050",
    WARNING,
    "TensorRT-LLM serves this target with DFlash",
    why="a target that does not hand its hidden states over starts, and drafts nothing that is accepted",
    source="supported-models.md of TensorRT-LLM (column DFlash); support.yaml here",
)
def target_is_supported(deployment: Deployment) -> Iterator[Fault]:
    target = deployment.target.shape
    if target is None or deployment.settings.speculation is None:
        return
    family, keys = find_family(target), ("model",)
    kind = target.architecture or target.model_type
    if family is None:
        yield Fault(f"nothing is known of DFlash with {kind}", "try it before you rely on it", keys)
    elif family.verdict == NO:
        fix = "use the engine lane, vLLM or SGLang for this target"
        yield Fault(f"{family.name} has no DFlash in TensorRT-LLM: {family.source}", fix, keys, ERROR)
    elif family.verdict == UNLISTED:
        yield Fault(f"{family.name} is not listed for DFlash: {family.source}", "try it before you rely on it", keys)
    elif family.verdict == TESTED and "matrix says No" in family.source:
        what = f"{family.name}: TensorRT-LLM tests it with DFlash, while its support matrix says No"
        yield Fault(what, "measure acceptance once it runs", keys, NOTE)


@rule(
    "DF051",
    ERROR,
    "decoding_type is the one of the drafter's variant",
    why="a relative of DFlash drafts by other rules; TensorRT-LLM refuses it, or leaves its extra weights out",
    source="TensorRT-LLM PRs 18043 (DSpark), 19159 (DFlash2), 15666 (Laguna); support.yaml here",
)
def variant_is_meant(deployment: Deployment) -> Iterator[Fault]:
    drafter, speculation = deployment.drafter.shape, deployment.settings.speculation
    if drafter is None or speculation is None:
        return
    variant = variants().get(drafter.variant or "")
    if variant is None:
        if speculation.decoding_type == "DSpark":
            yield Fault("decoding_type is DSpark, but the drafter has no heads of it", f"write {DFLASH}", KIND)
    elif variant.decoding_type is None:
        fix = "use a drafter in the z-lab layout"
        yield Fault(f"the drafter is {variant.name}, which TensorRT-LLM cannot draft with", fix, MODEL)
    elif speculation.decoding_type != variant.decoding_type:
        what = f"the drafter is {variant.name}, but decoding_type is {speculation.decoding_type}"
        yield Fault(what, f"write {variant.decoding_type}", KIND)
    elif variant.since and older(deployment.release, variant.since):
        what = f"{variant.name} drafters need about {variant.since}; the release is {deployment.release}"
        yield Fault(what, f"use {variant.since} or later", MODEL, WARNING)


@rule(
    "DF052",
    ERROR,
    "the drafter's layers have keys and values of heads (no MLA)",
    why="TensorRT-LLM raises ValueError for a DFlash drafter without q, k and v; MLA drafters need DSpark's path",
    source="modeling_dflash.py; TensorRT-LLM PR 19040",
)
def drafter_has_heads(deployment: Deployment) -> Iterator[Fault]:
    drafter = deployment.drafter.shape
    if drafter is not None and drafter.latent:
        yield Fault("the drafter's layers are MLA", "use a drafter with grouped heads", MODEL)


@rule(
    "DF053",
    ERROR,
    "target and drafter have the same hidden size",
    why="the drafter embeds its block with the target's table and hands its states to the target's head",
    source="load_weights_from_target_model, TensorRT-LLM",
)
def hidden_sizes_agree(deployment: Deployment) -> Iterator[Fault]:
    target, drafter = deployment.target.shape, deployment.drafter.shape
    if target and drafter and target.hidden != drafter.hidden:
        what = f"hidden_size is {target.hidden} in the target, {drafter.hidden} in the drafter"
        yield Fault(what, "use the drafter of this target", MODEL)


@rule(
    "DF054",
    ERROR,
    "target and drafter have the same vocabulary",
    why="the drafter drafts with the target's head; a mapping of its own vocabulary (d2t) would be applied to ids that "
    "need none, and DFlash2 refuses it",
    source="TensorRT-LLM PR 19159; load_weights_from_target_model",
)
def vocabularies_agree(deployment: Deployment) -> Iterator[Fault]:
    target, drafter = deployment.target.shape, deployment.drafter.shape
    if drafter is None:
        return
    rows, vocab = drafter.draft_vocab, drafter.vocab
    if (rows is not None and vocab is not None and rows != vocab) or "d2t" in deployment.drafter.tensors:
        what = f"the drafter has a vocabulary of its own ({rows or 'd2t'} of {vocab})"
        yield Fault(what, "use a drafter that shares the target's head", MODEL)
    elif target and target.vocab is not None and drafter.vocab is not None and target.vocab != drafter.vocab:
        what = f"vocab_size is {target.vocab} in the target, {drafter.vocab} in the drafter"
        yield Fault(what, "use the drafter of this target", MODEL)


@rule(
    "DF055",
    ERROR,
    "the drafter was trained for a target of so many layers",
    why="its layer ids mean other layers in a target of another depth",
    source="num_target_layers in the drafter's config.json",
)
def depths_agree(deployment: Deployment) -> Iterator[Fault]:
    target, drafter = deployment.target.shape, deployment.drafter.shape
    if target and drafter and drafter.num_target_layers not in (None, target.layers):
        what = f"the drafter was trained for {drafter.num_target_layers} layers; the target has {target.layers}"
        yield Fault(what, "use the drafter of this target", MODEL)


@rule(
    "DF056",
    WARNING,
    "the drafter was trained on the answers that are served",
    why="a drafter of answers without thinking loses about half of its accepted tokens on thoughts, and the other way "
    "round",
    source="README of z-lab/dflash; arXiv 2602.06036 tables 1 and 2",
)
def answers_are_those_trained_on(deployment: Deployment) -> Iterator[Fault]:
    mode, parser = deployment.trained_on, deployment.settings.reasoning_parser
    if mode == "non-thinking":
        served = f", and reasoning_parser {parser} says that thoughts are served" if parser else ""
        fix = "turn thinking off (chat_template_kwargs: enable_thinking false), or train a drafter on thoughts"
        yield Fault(f"the drafter was trained on answers without thinking{served}", fix, ("reasoning_parser",))
    elif mode == "thinking" and parser is None:
        fix = "leave thinking on, and set reasoning_parser"
        yield Fault("the drafter was trained on thoughts; nothing says that they are served", fix,
                    ("reasoning_parser",), NOTE)  # fmt: skip


@rule(
    "DF057",
    NOTE,
    "what the checks rest on was seen in a published config",
    why="a key that was inferred may differ in the files you download",
    source="build_recipes/checkpoints",
)
def config_was_seen(deployment: Deployment) -> Iterator[Fault]:
    for role, source in (("target", deployment.target), ("drafter", deployment.drafter)):
        if source.inferred:
            keys = ", ".join(source.inferred)
            fix = f"check again with the files: --{'draft' if role == 'drafter' else role} DIR"
            yield Fault(f"inferred in the {role}'s config: {keys}", fix)


@rule(
    "DF058",
    NOTE,
    "target and drafter are known",
    why="rules about sizes, layers, vocabularies and memory need the configs of both",
    source="config.json of the checkpoints",
)
def pair_is_known(deployment: Deployment) -> Iterator[Fault]:
    for role, option, source in (("target", "target", deployment.target), ("drafter", "draft", deployment.drafter)):
        if source.shape is None and source.fault is None and deployment.settings.speculation is not None:
            named = f"nothing is known of {source.name}" if source.name else "is not named"
            what = f"the {role} {named}" if not source.name else named
            yield Fault(f"{what}: what depends on the {role} was not checked", f"pass --{option} DIR or owner/name")
