"""The networks for `trtllm-build` cannot run here. They compile, and what they use of TensorRT-LLM is there in 1.2.1.

`KNOWN` was read off the public sources of TensorRT-LLM: where a name is defined, and its parameters. A name or a
parameter that is not in it fails here, until somebody has looked it up.
"""

from __future__ import annotations

import ast
import py_compile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.trtllm import model_class
from dflash_trt.trtllm.export import export_pair
from tests.trtllm.export.pairs import make
from tests.trtllm.export.reading import read_network

FILES = {role: Path(model_class.__file__).with_name(f"{role}.py") for role in ("target", "draft")}

# name → (where it is imported from, the file in tensorrt_llm/ that defines it, its parameters)
FUNCTIONAL = "tensorrt_llm.functional"
KNOWN = {
    "default_net": ("tensorrt_llm._common", "_common.py", ""),
    "pad_vocab_size": ("tensorrt_llm._utils", "_utils.py", "vocab_size tp_size"),
    "str_dtype_to_trt": ("tensorrt_llm._utils", "_utils.py", "dtype"),
    "Tensor": (FUNCTIONAL, "functional.py", "name dtype shape dim_range is_network_input location network trt_tensor"),
    "RopeEmbeddingUtils": (FUNCTIONAL, "functional.py", ""),
    "RotaryScalingType": (FUNCTIONAL, "functional.py", ""),
    "cast": (FUNCTIONAL, "functional.py", "input dtype"),
    "concat": (FUNCTIONAL, "functional.py", "inputs dim"),
    "constant": (FUNCTIONAL, "functional.py", "ndarray as_dtype as_shape"),
    "cos": (FUNCTIONAL, "functional.py", "input"),
    "sin": (FUNCTIONAL, "functional.py", "input"),
    "matmul": (FUNCTIONAL, "functional.py", "input mat2 transa transb use_fp32_acc"),
    "op_and": (FUNCTIONAL, "functional.py", "left right"),
    "shape": (FUNCTIONAL, "functional.py", "input dim cast_to_dtype clip_before_cast"),
    "slice": (FUNCTIONAL, "functional.py", "input starts sizes strides mode fill_value"),
    "softmax": (FUNCTIONAL, "functional.py", "input dim"),
    "split": (FUNCTIONAL, "functional.py", "tensor split_size_or_sections dim"),
    "tanh": (FUNCTIONAL, "functional.py", "input"),
    "unsqueeze": (FUNCTIONAL, "functional.py", "input axis"),
    "where": (FUNCTIONAL, "functional.py", "condition left right"),
    "ColumnLinear": (
        "tensorrt_llm.layers", "layers/linear.py",
        "in_features out_features bias dtype tp_group tp_size gather_output share_weight strict_dtype pad_lda pad_ldc "
        "prefer_managed_weight is_qkv",
    ),
    "RowLinear": (
        "tensorrt_llm.layers", "layers/linear.py",
        "in_features out_features bias dtype tp_group tp_size strict_dtype pad_lda prefer_managed_weight is_expert",
    ),
    "Embedding": (
        "tensorrt_llm.layers", "layers/embedding.py",
        "num_embeddings embedding_dim dtype tp_size tp_group sharding_dim tp_rank",
    ),
    "GatedMLP": (
        "tensorrt_llm.layers", "layers/mlp.py",
        "hidden_size ffn_hidden_size hidden_act bias dtype tp_group tp_size quant_mode inner_layernorm eps is_expert",
    ),
    "RmsNorm": (
        "tensorrt_llm.layers", "layers/normalization.py", "normalized_shape num_groups eps elementwise_affine dtype",
    ),
    "MODEL_MAP": ("tensorrt_llm.models", "models/__init__.py", ""),
    "LLaMAForCausalLM": ("tensorrt_llm.models", "models/llama/model.py", "config"),
    "QWenForCausalLM": ("tensorrt_llm.models", "models/qwen/model.py", "config"),
    "PretrainedModel": ("tensorrt_llm.models.modeling_utils", "models/modeling_utils.py", "config"),
    "Module": ("tensorrt_llm.module", "module.py", ""),
    "ModuleList": ("tensorrt_llm.module", "module.py", "modules"),
    "current_all_reduce_helper": ("tensorrt_llm.plugin", "plugin/plugin.py", ""),
}  # fmt: skip
METHODS = {
    "view": "shape zero_is_placeholder",
    "permute": "dims",
    "mark_output": "name dtype",
    "from_string": "s",
    "set_workspace_tensor": "mapping num_profiles",
    "create_sinusoidal_positions_for_attention_plugin":
        "num_pos dim theta scale scale_type rope_scaling_config duplicate_data dtype",
    "create_sinusoidal_positions_yarn":
        "num_pos dim base scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
        "duplicate_data dtype",
}  # fmt: skip
OF_PYTHON = {"get", "items", "reshape", "ascontiguousarray", "from_iterable"}  # of dicts, numpy and tables
OF_CONFIG = {"mapping", "quant_mode"}  # what PretrainedConfig makes of other keys


def tree(role: str) -> ast.Module:
    return ast.parse(FILES[role].read_text())


def calls(role: str) -> Iterator[tuple[str, str, ast.Call]]:
    """(name, its parameters, call) of everything that is TensorRT-LLM's."""
    own = {node.name for node in ast.walk(tree(role)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree(role)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in KNOWN:
            yield node.func.id, KNOWN[node.func.id][2], node
        elif isinstance(node.func, ast.Attribute) and node.func.attr not in own | OF_PYTHON:
            name = node.func.attr
            if name in METHODS:
                yield name, METHODS[name], node
            else:  # a part of the network, called
                assert ast.unparse(node.func.value) in ("self", "parts", "layer.attention"), ast.unparse(node)


@pytest.mark.parametrize("role", FILES)
def test_it_compiles_alone(role, tmp_path):
    py_compile.compile(str(FILES[role]), cfile=str(tmp_path / "compiled"), doraise=True)
    modules = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in ast.walk(tree(role))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules <= {"__future__", "collections", "numpy", "tensorrt", "tensorrt_llm"}
    assert "Never executed" in ast.get_docstring(tree(role))


@pytest.mark.parametrize("role", FILES)
def test_every_name_is_imported_from_where_tensorrt_llm_has_it(role):
    for node in ast.walk(tree(role)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tensorrt_llm"):
            for alias in node.names:
                assert KNOWN[alias.name][0] == node.module, alias.name
                assert alias.asname is None


@pytest.mark.parametrize("role", FILES)
def test_every_call_fits_the_signature(role):
    found = list(calls(role))
    for name, parameters, call in found:
        known = parameters.split()
        assert len(call.args) <= len(known), ast.unparse(call)
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        assert given <= set(known[len(call.args) :]), f"{name}: {ast.unparse(call)}"
    assert len(found) >= {"target": 3, "draft": 60}[role]


def test_every_key_of_a_config_is_written(tmp_path):
    target, draft = make(tmp_path / "source", "tiny-llama")
    export_pair(target, draft, tmp_path / "out")
    for role in FILES:
        read = {
            node.attr
            for node in ast.walk(tree(role))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config")
        }
        assert read and read <= read_network(tmp_path / "out" / role).config.keys() | OF_CONFIG
        assert (tmp_path / "out/model_class" / f"{role}.py").read_bytes() == FILES[role].read_bytes()


def test_parameters_have_the_names_that_are_exported(tmp_path):
    """Attributes that are modules, put together as `Module.named_parameters` does."""
    biased = {"attention_bias": True}
    target, draft = make(tmp_path / "source", "tiny-llama", draft_config=biased)
    export_pair(target, draft, tmp_path / "out")
    modules: dict[str, set[str]] = {}
    for node in ast.walk(tree("draft")):
        if isinstance(node, ast.ClassDef):
            modules[node.name] = {
                target.attr
                for line in ast.walk(node)
                if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call)
                for target in line.targets
                if isinstance(target, ast.Attribute)
                and ast.unparse(line.value.func) in {*modules, *KNOWN, "Attention", "Transformer"}
            }
    made = {f"transformer.{name}" for name in modules["Transformer"] - {"layers"}} | {"lm_head"}
    for layer in range(2):
        name = f"transformer.layers.{layer}."
        made |= {name + part for part in modules["Layer"] - {"attention", "mlp"}}
        made |= {f"{name}attention.{part}" for part in modules["Attention"]}
        made |= {f"{name}mlp.{part}" for part in ("fc", "gate", "proj")}  # GatedMLP's
    exported = read_network(tmp_path / "out/draft").ranks[0]
    assert {name.rpartition(".")[0] for name in exported} == made
