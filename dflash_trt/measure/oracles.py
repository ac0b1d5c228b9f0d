"""Independent references in float32 on the CPU: transformers for the target, z-lab's `dflash` wheel for the drafter.

Neither keeps a cache here: every answer is computed from the whole text. Both need torch, so they are imported when a
check runs and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from dflash_trt.checkpoint import Draft, Target
from dflash_trt.errors import UserError
from dflash_trt.measure.rounded import round_inputs, weights

INSTALL = {
    "transformers": "pip install -r requirements-dev.txt",
    "torch": "pip install -r requirements-dev.txt",
    "dflash.model": "pip install --no-deps -r requirements-nodeps.txt",
}


def load_oracle(name: str) -> ModuleType:
    """Raises UserError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"the reference {name.partition('.')[0]} cannot be imported ({error})"
        raise UserError(what, where="verify", fix=INSTALL[name]) from None


class TargetOracle:
    """The target as transformers runs it; NVFP4 weights unpacked, inputs rounded where the checkpoint says so."""

    def __init__(self, target: Target):
        self._torch = torch = load_oracle("torch")
        transformers = load_oracle("transformers")
        transformers.utils.logging.disable_progress_bar()
        auto = transformers.AutoModelForCausalLM
        if target.quantization is None:
            self.model = auto.from_pretrained(target.path, dtype=torch.float32).eval()
            return
        config = transformers.AutoConfig.from_pretrained(target.path)
        del config.quantization_config  # transformers does not read ModelOpt's
        self.model = auto.from_config(config, dtype=torch.float32).eval()
        stored = {name: torch.from_numpy(values) for name, values in weights(target)}
        if target.config.tie_embeddings:
            stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
        self.model.load_state_dict(stored)
        round_inputs(self.model, target)

    def read(self, text: Sequence[int]) -> tuple[np.ndarray, Any]:
        """Logits after each token, [T, V] float32, and the hidden states of every layer."""
        with self._torch.inference_mode():
            output = self.model(self._torch.tensor([list(text)]), output_hidden_states=True)
        return output.logits[0].numpy(), output.hidden_states


class DraftOracle:
    """The drafter as z-lab's wheel runs it, on the hidden states of a `TargetOracle`."""

    def __init__(self, draft: Draft, target: TargetOracle):
        self._torch = torch = load_oracle("torch")
        self._dflash = load_oracle("dflash.model")
        transformers = load_oracle("transformers")
        config = transformers.Qwen3Config.from_pretrained(draft.path, attention_bias=draft.config.attention_bias)
        self.model = self._dflash.DFlashDraftModel(config).float().eval()
        self.model.load_state_dict({name: torch.from_numpy(values) for name, values in weights(draft)})
        round_inputs(self.model, draft)
        self.model.block_size = draft.config.block_size
        self._target = target.model
        self._masks = torch.full((1, draft.config.block_size - 1), draft.config.mask_token_id)
        self._scale = draft.config.embedding_scale

    def draft(self, states: Any, certain: int, anchor: int) -> np.ndarray:
        """Draft logits [K-1, V] float32 for the block that starts with `anchor` behind `certain` tokens of a text whose
        hidden states are `states`."""
        torch = self._torch
        block = torch.cat([torch.tensor([[anchor]]), self._masks], dim=1)
        features = self._dflash.extract_context_feature(states, self.model.target_layer_ids)
        with torch.inference_mode():
            hidden = self.model(
                target_hidden=features[:, :certain],
                noise_embedding=self._target.get_input_embeddings()(block) * self._scale,
                position_ids=torch.arange(certain + block.shape[1])[None],
            )
            return self.model.compute_logits(hidden[:, 1:], self._target.get_output_embeddings())[0].numpy()
