"""What calibration finds is what an independent look at files and activations finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import load_tensor, read_draft, read_tensors
from dflash_trt.errors import Failure, UserError
from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
from dflash_trt.quantize.calibrate import DRAFT, TARGET, _passes, calibrate, needs_calibration
from tests.graph.oracle import Oracle, extract_context_feature
from tests.tiny import edit_config, make_draft, make_pair, make_target

TEXTS = [[int(t) for t in np.random.default_rng(n).integers(0, 250, 24)] for n in range(3)]
LONG = [[int(t) for t in np.random.default_rng(9).integers(0, 250, 200)]]


def make_plans(preset: str = "nvfp4", include: tuple[str, ...] = (), **sources: Path):
    owned = {TARGET: {"lm_head"}, DRAFT: {"fc"}}
    return {
        role: make_plan(path, PRESETS[preset], [n for n in include if n in owned[role]])
        for role, path in sources.items()
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    return make_pair(tmp_path_factory.mktemp("pair"), dtype="float32", draft_config=config)


@pytest.fixture(scope="module")
def found(pair):
    target, draft = pair
    plans = make_plans(target=target, draft=draft, include=("fc", "lm_head"))
    models, amaxes = calibrate(plans, target, read_draft(draft), TEXTS)
    return plans, models, amaxes


def test_weight_amax_is_that_of_the_file(found):
    plans, _, amaxes = found
    for role, plan in plans.items():
        for linear in plan.linears:
            assert amaxes[role][linear.module].weight == float(np.abs(load_tensor(linear.ref)).max()), linear.module


def test_exactly_the_planned_modules_are_quantized(found):
    plans, models, _ = found
    for role, plan in plans.items():
        on = {n for n, m in models.models[role].named_modules() if getattr(m, "is_enabled", False)}
        kinds = ("weight_quantizer", "input_quantizer")
        assert on == {f"{linear.module}.{kind}" for linear in plan.linears for kind in kinds}


def test_input_amax_is_the_largest_input_that_the_references_see(found, pair):
    """transformers over the texts, z-lab's wheel at every anchor of them: they are short, so all were sampled."""
    plans, _, amaxes = found
    oracle = Oracle(*pair)
    seen: dict[str, dict[str, float]] = {TARGET: {}, DRAFT: {}}

    def watch(role: str, name: str):
        def hook(module, args):
            seen[role][name] = max(seen[role].get(name, 0.0), float(args[0].abs().max()))

        return hook

    for role, model in ((TARGET, oracle.target), (DRAFT, oracle.draft)):
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(watch(role, name))
    for text in TEXTS:
        with torch.inference_mode():
            states = oracle.target(torch.tensor([text]), output_hidden_states=True).hidden_states
            features = extract_context_feature(states, oracle.draft.target_layer_ids)
        for anchor in range(1, len(text)):
            with torch.inference_mode():
                block = torch.tensor([[text[anchor]] + [250] * 7])
                oracle.draft(
                    target_hidden=features[:, :anchor],
                    noise_embedding=oracle.target.get_input_embeddings()(block),
                    position_ids=torch.arange(anchor + 8)[None],
                )
        with torch.inference_mode():  # the last context row, which no anchor of the text has before it
            context = oracle.draft.hidden_norm(oracle.draft.fc(features))
            for layer in oracle.draft.layers:
                layer.self_attn.k_proj(context)
    for role, plan in plans.items():
        for linear in plan.linears:
            members = [one.module for one in plan.linears if one.group == linear.group]
            expected = max(seen[role][module] for module in members)
            assert amaxes[role][linear.module].input == pytest.approx(expected, rel=1e-4), linear.module


def test_anchors_follow_the_seed(pair):
    target, path = pair
    plans, draft = make_plans("nvfp4-mlp", draft=path), read_draft(path)
    first, again, other = (calibrate(plans, target, draft, LONG, seed=seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    assert first.keys() == {DRAFT}


def test_weights_alone_need_no_calibration(pair):
    plans = make_plans("nvfp4-weight-only", target=pair[0], draft=pair[1])
    assert not any(map(needs_calibration, plans.values()))


def test_a_module_that_no_text_reached_is_named(pair):
    target, draft = pair
    with pytest.raises(Failure, match=r"layers\.0\.\S+ could not be calibrated: no text reached it — .*--input-amax"):
        calibrate(make_plans(draft=draft), target, read_draft(draft), [[5]] * 300)


def test_inputs_that_were_always_zero_are_no_failure(pair, tmp_path):
    """ModelOpt warns, and its export takes 6 for their amax; so does the writer."""
    draft = make_draft(tmp_path / "draft", dtype="float32")
    edit_values(draft, "layers.1.post_attention_layernorm.weight", 0.0)
    plans = make_plans(draft=draft)
    _, amaxes = calibrate(plans, pair[0], read_draft(draft), TEXTS)
    zero = {module for module, amax in amaxes[DRAFT].items() if amax.input == 0}
    assert zero == {f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    write_checkpoint(plans[DRAFT], tmp_path / "out", amaxes[DRAFT])
    scales = read_tensors(tmp_path / "out")
    for module in zero:
        assert load_tensor(scales[f"{module}.input_scale"]) == np.float32(6) / np.float32(2688)


def test_each_of_the_pair_is_calibrated_as_its_own_preset_asks(pair):
    target, draft = pair
    plans = make_plans("nvfp4-mlp", target=target) | make_plans(draft=draft)
    _, amaxes = calibrate(plans, target, read_draft(draft), TEXTS)
    for role, plan in plans.items():
        assert [*amaxes[role]] == [linear.module for linear in plan.linears]
        assert all(amax.input > 0 for amax in amaxes[role].values())


def test_presets_of_other_algorithms_take_another_pass_and_the_drafter_is_first(pair):
    plans = make_plans("nvfp4-mse", target=pair[0]) | make_plans("nvfp4-mlp", draft=pair[1])
    assert [[*passed] for passed in _passes(plans)] == [[DRAFT], [TARGET]]
    assert [[*passed] for passed in _passes(plans | make_plans(target=pair[0]))] == [[DRAFT, TARGET]]


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "layers.1.input_layernorm.weight"])
def test_a_weight_that_is_nan_is_named_before_models_are_loaded(name, pair, tmp_path, monkeypatch):
    draft = make_draft(tmp_path / "draft", dtype="float32")
    edit_values(draft, name, float("nan"))
    monkeypatch.setattr("dflash_trt.quantize.calibrate.Models", None)
    with pytest.raises(UserError, match=f"{name} holds .* NaN"):
        calibrate(make_plans(draft=draft), pair[0], read_draft(draft), TEXTS)


def test_a_nan_in_the_target_is_named_though_only_the_drafter_is_quantized(pair, tmp_path):
    target = make_target(tmp_path / "target", dtype="float32")
    edit_values(target, "model.layers.2.input_layernorm.weight", float("nan"))
    draft = read_draft(pair[1])
    with pytest.raises(UserError, match=r"layers\.2\.input_layernorm\.weight holds .* NaN"):
        calibrate(make_plans(draft=pair[1]), target, draft, TEXTS)


def test_activations_that_overflow_are_a_failure(tmp_path):
    target = make_target(tmp_path / "target", dtype="float32")
    for name in ("gate_proj", "up_proj"):
        edit_values(target, f"model.layers.5.mlp.{name}.weight", 1e30)
    with pytest.raises(Failure, match="an activation is not finite: detected inf values in amax"):
        calibrate(make_plans(target=target), target, None, TEXTS)


def test_a_drafter_of_another_target_is_refused(pair, tmp_path):
    other = make_draft(tmp_path / "draft", {"hidden_size": 32})
    with pytest.raises(UserError, match="hidden_size of the drafter is 32, the target has 64"):
        calibrate(make_plans(draft=other), pair[0], read_draft(other), TEXTS)


def test_a_token_without_embedding_is_refused(pair):
    with pytest.raises(UserError, match="makes token 256, the embedding has 256 rows"):
        calibrate(make_plans(target=pair[0]), pair[0], None, [[1, 256]])


def test_a_target_that_transformers_does_not_know_is_refused(tmp_path):
    target = make_target(tmp_path / "target")
    plans = make_plans(target=target)
    edit_config(target, set={"model_type": "novel"})
    with pytest.raises(UserError, match=r"transformers cannot load the target: .*novel.*--input-amax"):
        calibrate(plans, target, None, TEXTS)


def test_a_target_larger_than_the_memory_is_refused(pair, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    with pytest.raises(UserError, match=r"the target needs .* GiB, this machine has .*--input-amax"):
        calibrate(make_plans(target=pair[0]), pair[0], None, TEXTS)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_are_those_of_the_files(prefix, tmp_path):
    target, draft = make_pair(tmp_path)
    for folder, add in ((target, not prefix), (draft, bool(prefix))):  # the spelling that its writer does not use
        file = folder / "model.safetensors"
        tensors = load_file(file)
        if add and folder == draft:
            tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        elif add:
            tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    plans = make_plans("nvfp4-mlp", target=target, draft=draft)
    _, amaxes = calibrate(plans, target, read_draft(draft), TEXTS)
    for role, plan in plans.items():
        assert list(amaxes[role]) == [linear.module for linear in plan.linears]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_calibrated_under_the_files_names(family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_experts": 4, "moe_intermediate_size": 32} if family == "qwen3_moe" else {"num_local_experts": 4}
    config = AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, vocab_size=256, num_experts_per_tok=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plans = make_plans("nvfp4-experts", target=tmp_path)
    amaxes = calibrate(plans, tmp_path, None, TEXTS)[1][TARGET]
    tensors = read_tensors(tmp_path)
    for linear in plans[TARGET].linears:
        members = [one for one in plans[TARGET].linears if one.group == linear.group]
        largest = max(float(np.abs(load_tensor(tensors[one.ref.name]).astype(np.float32)).max()) for one in members)
        assert amaxes[linear.module].weight == largest
        assert 0 < amaxes[linear.module].input < 100


def edit_values(directory: Path, name: str, value: float) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, file, metadata={"format": "pt"})
