"""What is written is the pair that was given: names, dtypes, shapes and values, for every number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.trtllm.export import export_pair
from tests.graph.oracle import Oracle
from tests.tiny import dequantized, edit_config, load_tensors
from tests.trtllm.export.pairs import make, quantized
from tests.trtllm.export.reading import read_network, save

TEXT = [[int(t) for t in np.random.default_rng(0).integers(0, 251, 40)]]
BASES = ("tiny-llama", "tiny-qwen3")


@pytest.fixture(scope="module", params=[(base, form) for base in BASES for form in ("floats", "nvfp4")], ids=str)
def pair(request, tmp_path_factory):
    """(target, drafter), and both as floats."""
    base, form = request.param
    root = tmp_path_factory.mktemp("pair")
    target, draft = make(root, base)
    if form == "nvfp4":
        target = quantized(target, root / "target4", include=("lm_head",))
        draft = quantized(draft, root / "draft4", include=("fc",))
    return target, draft, dequantized(target), dequantized(draft)


def check_equal(made: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert made.keys() == want.keys()
    for name, value in want.items():
        assert np.array_equal(made[name], value.astype(np.float32)), name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_read_back_the_pair_has_the_same_weights_and_logits(pair, tp, tmp_path):
    target, draft, target_floats, draft_floats = pair
    export_pair(target, draft, tmp_path / "out", tp=tp)
    back = read_network(tmp_path / "out/target").as_published("model.")
    want = load_tensors(target_floats)
    check_equal(back, want)
    ours = save(shutil.copytree(target_floats, tmp_path / "target"), back)

    back_draft = read_network(tmp_path / "out/draft").as_published("")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(back_draft.pop(name), back[name]), "the drafter has the target's embedding and head"
    theirs = save(shutil.copytree(draft_floats, tmp_path / "draft"), back_draft)
    check_equal(back_draft, load_tensors(draft_floats))

    made, given = Oracle(ours, theirs), Oracle(target_floats, draft_floats)
    assert np.array_equal(made.logits(TEXT[0]), given.logits(TEXT[0]))
    assert np.array_equal(made.draft_logits(TEXT[0], 8), given.draft_logits(TEXT[0], 8))


@pytest.mark.parametrize("form", ["floats", "nvfp4"])
def test_tensors_have_tensorrt_llms_names_dtypes_and_shapes(form, tmp_path):
    target, draft = make(tmp_path, "tiny-qwen3")
    if form == "nvfp4":
        target = quantized(target, tmp_path / "target4")
    export_pair(target, draft, tmp_path / "out", tp=2)
    network = read_network(tmp_path / "out/target")
    hidden, q, kv, ffn = 64, 64, 16, 192  # of a rank: half of 8 heads, of 2 key/value heads, of 384
    linears = {"attention.qkv": (q + 2 * kv, hidden), "attention.dense": (hidden, q), "mlp.fc": (ffn, hidden),
               "mlp.gate": (ffn, hidden), "mlp.proj": (hidden, ffn)}  # fmt: skip
    norms = {"input_layernorm": 64, "post_layernorm": 64, "attention.q_layernorm": 16, "attention.k_layernorm": 16}
    bf16, f8, f32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    want = {"transformer.vocab_embedding.weight": (bf16, (126, 64)), "lm_head.weight": (bf16, (126, 64)),
            "transformer.ln_f.weight": (bf16, (64,))}  # fmt: skip
    for layer in range(6):
        name = f"transformer.layers.{layer}."
        want |= {f"{name}{norm}.weight": (bf16, (size,)) for norm, size in norms.items()}
        for linear, (out, width) in linears.items():
            if form == "floats":
                want[f"{name}{linear}.weight"] = (bf16, (out, width))
                continue
            tiles = (-(-out // 128) * 128, -(-(width // 16) // 4) * 4)
            want |= {
                f"{name}{linear}.weight": (torch.uint8, (out, width // 2)),
                f"{name}{linear}.weights_block_scaling_factor": (f8, (out, width // 16)),
                f"{name}{linear}.weights_block_scaling_factor_interleaved": (f8, tiles),
                f"{name}{linear}.weights_global_scaling_factor": (f32, (1,)),
                f"{name}{linear}.activation_global_scaling_factor": (f32, (1,)),
                f"{name}{linear}.alpha": (f32, (1,)),
            }
    assert {n: (t.dtype, tuple(t.shape)) for n, t in network.ranks[1].items()} == want


def test_alpha_is_the_product_of_the_two_scales_of_the_checkpoint(tmp_path):
    target, draft = make(tmp_path, "tiny-llama")
    target = quantized(target, tmp_path / "target4")
    export_pair(target, draft, tmp_path / "out")
    source, made = load_tensors(target), read_network(tmp_path / "out/target").ranks[0]
    modules = {"attention.qkv": "self_attn.q_proj", "attention.dense": "self_attn.o_proj", "mlp.gate": "mlp.up_proj"}
    for name, module in modules.items():
        weight, given = (source[f"model.layers.3.{module}.{part}"] for part in ("weight_scale_2", "input_scale"))
        name = f"transformer.layers.3.{name}"
        assert made[f"{name}.weights_global_scaling_factor"].item() == weight
        assert made[f"{name}.activation_global_scaling_factor"].item() == given
        assert made[f"{name}.alpha"].numpy() == np.float32(weight) * np.float32(given)


def test_what_is_not_packed_is_excluded_by_name(tmp_path):
    target, draft = make(tmp_path, "tiny-qwen3")
    target = quantized(target, tmp_path / "target4")
    draft = quantized(draft, tmp_path / "draft4", preset="nvfp4-mlp")
    made = export_pair(target, draft, tmp_path / "out")
    quantization = read_network(tmp_path / "out/target").config["quantization"]
    assert quantization["quant_algo"] == "NVFP4" and quantization["exclude_modules"] == ["lm_head"]
    kept = [f"transformer.layers.{layer}.attention.qkv" for layer in range(2)]
    assert read_network(tmp_path / "out/draft").config["quantization"]["exclude_modules"] == [
        "lm_head", "transformer.fc", *kept,
    ]  # fmt: skip
    assert [network.quantization for network in made.networks.values()] == ["NVFP4", "NVFP4"]


def test_a_tied_head_is_written_out(tmp_path):
    target, draft = make(tmp_path, "tiny-qwen3", target_config={"tie_word_embeddings": True})
    export_pair(target, draft, tmp_path / "out", tp=4)
    back = read_network(tmp_path / "out/target").as_published("model.")
    assert np.array_equal(back["lm_head.weight"], back["model.embed_tokens.weight"])
    assert np.array_equal(back["lm_head.weight"], load_tensors(target)["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_of_projections_that_sum_over_ranks_are_whole_on_each(tp, tmp_path):
    biased = {"attention_bias": True}
    target, draft = make(tmp_path, "tiny-llama", target_config=biased | {"mlp_bias": True}, draft_config=biased)
    export_pair(target, draft, tmp_path / "out", tp=tp)
    for role, prefix, path in (("target", "model.", target), ("draft", "", draft)):
        network = read_network(tmp_path / "out" / role)
        assert network.config["attn_bias"]
        back = network.as_published(prefix)
        ends = () if role == "target" else ("model.embed_tokens.weight", "lm_head.weight")
        check_equal({name: value for name, value in back.items() if name not in ends}, load_tensors(path))


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", [None, "bfloat16", "float16", "float32"])
def test_floats_are_converted_as_asked_and_the_report_says_so(stored, wanted, tmp_path):
    target, draft = make(tmp_path, "tiny-llama", dtype=stored)
    made = export_pair(target, draft, tmp_path / "out", dtype=wanted)
    dtype = getattr(torch, wanted or stored)
    ranks = read_network(tmp_path / "out/target").ranks
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, stored))
    want = model.get_parameter("model.layers.2.mlp.down_proj.weight").detach().to(dtype)
    assert torch.equal(ranks[0]["transformer.layers.2.mlp.proj.weight"], want)
    assert made.dtype == (wanted or stored)
    notes = made.networks["target"].notes
    assert len(notes) == (made.dtype != stored)
    if notes:
        assert ("widened" if wanted == "float32" else "rounded") in notes[0]


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64},
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
             "beta_slow": 1.0},
        ),
    ],
    ids=lambda value: (value or {}).get("rope_type", ""),
)  # fmt: skip
def test_rope_is_told_in_tensorrt_llms_words(scaling, want, tmp_path):
    target, draft = make(tmp_path, "tiny-llama")
    edit_config(target, set={"rope_parameters": {"rope_theta": 5e5} | scaling})
    export_pair(target, draft, tmp_path / "out")
    config = read_network(tmp_path / "out/target").config
    assert (config["rotary_base"], config["rotary_scaling"]) == (5e5, want)


def test_both_configs_say_what_the_networks_are_built_of(tmp_path):
    target, draft = make(tmp_path, "tiny-qwen3")
    export_pair(target, draft, tmp_path / "out", tp=2, block_size=4)
    config = read_network(tmp_path / "out/target").config
    common = {"vocab_size": 251, "hidden_size": 64, "num_attention_heads": 8, "head_size": 16, "dtype": "bfloat16",
              "norm_epsilon": 1e-6, "position_embedding_type": "rope_gpt_neox", "hidden_act": "silu"}  # fmt: skip
    own = {"architecture": "Qwen3ForCausalLM", "num_key_value_heads": 2, "intermediate_size": 384, "qwen_type": "qwen3",
           "num_hidden_layers": 6, "attn_bias": False, "dflash_target_layer_ids": [1, 3, 4]}  # fmt: skip
    assert config.items() >= (common | own).items()
    of_draft = {"architecture": "DFlashDraftModel", "num_key_value_heads": 4, "num_hidden_layers": 2,
                "dflash_block_size": 4, "dflash_mask_token_id": 250, "dflash_target_layer_ids": [1, 3, 4],
                "dflash_windows": [None, None], "dflash_causal": [False, False]}  # fmt: skip
    assert read_network(tmp_path / "out/draft").config.items() >= (common | of_draft).items()


def test_windows_and_causality_of_a_drafter_are_told(tmp_path):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    target, draft = make(tmp_path, "tiny-qwen3", draft_config=sliding)
    export_pair(target, draft, tmp_path / "out")
    config = read_network(tmp_path / "out/draft").config
    assert (config["dflash_windows"], config["dflash_causal"]) == ([8, None], [True, False])


def test_the_same_pair_gives_the_same_bytes(tmp_path):
    target, draft = make(tmp_path, "tiny-qwen3")
    for name in ("a", "b"):
        export_pair(target, draft, tmp_path / name, tp=2)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    different = {str(f) for f in files if (tmp_path / "a" / f).read_bytes() != (tmp_path / "b" / f).read_bytes()}
    assert different == {"export.json"}, "which names the folder"


def test_a_checkpoint_in_many_files_reads_as_one(tmp_path):
    from tests.tiny import edit_tensors

    target, draft = make(tmp_path, "tiny-llama")
    export_pair(target, draft, tmp_path / "one", tp=2)
    edit_tensors(target, split=5)
    export_pair(target, draft, tmp_path / "many", tp=2)
    files: list[Path] = [Path("target/rank0.safetensors"), Path("target/rank1.safetensors")]
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "many" / f).read_bytes() for f in files)
