"""Targets whose engine also returns the hidden states a DFlash drafter was trained on. Never executed.

    trtllm-build --model_cls_file target.py --model_cls_name DFlashLlama      (or DFlashQwen3)

Written against the public sources of TensorRT-LLM 1.2.1, whose own networks these are; one output is added:

    target_hidden  [tokens of the step, layers * hidden], the outputs of the layers `dflash_target_layer_ids` of
                   config.json side by side, each after its residual sum and before the next norm

Build with `--workers 1`, or under MPI: more workers are spawned processes, which cannot import this file's module.
"""

# mypy: ignore-errors
# (TensorRT-LLM is not where this is checked.)

from __future__ import annotations

from tensorrt_llm._common import default_net
from tensorrt_llm.functional import concat
from tensorrt_llm.models import LLaMAForCausalLM, QWenForCausalLM


class TappedMixin:
    """Listens to the layers' outputs. Layers are replaced by nobody after this: quantizing swaps what is in them."""

    def __init__(self, config):
        super().__init__(config)
        self.tapped = {}
        for index in config.dflash_target_layer_ids:
            self._tap(index)

    def _tap(self, index):
        layer = self.transformer.layers[index]
        plain = layer.forward

        def forward(*args, **kwargs):
            output = plain(*args, **kwargs)
            self.tapped[index] = output[0] if isinstance(output, tuple) else output  # (hidden, cache) with a cache
            return output

        layer.forward = forward

    def forward(self, *args, **kwargs):
        plugins = default_net().plugin_config
        if plugins.reduce_fusion or plugins.norm_quant_fusion:
            raise ValueError("a layer's output is no tensor of its own with reduce_fusion or norm_quant_fusion")
        outputs = super().forward(*args, **kwargs)
        features = concat([self.tapped[index] for index in self.config.dflash_target_layer_ids], dim=-1)
        features.mark_output("target_hidden", self.config.dtype)
        return outputs


class DFlashLlama(TappedMixin, LLaMAForCausalLM):
    """Llama."""


class DFlashQwen3(TappedMixin, QWenForCausalLM):
    """Dense Qwen3."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.transformer.layers:  # whose norms over heads take another epsilon by default, 1e-5
            layer.attention.q_layernorm.eps = config.norm_epsilon
            layer.attention.k_layernorm.eps = config.norm_epsilon
