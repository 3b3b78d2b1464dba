"""How published adapters (LoRA) reach the workers of a vLLM engine: as an adapter folder in memory, replaced in place.

There is one adapter, which every request names. vLLM finds the layers of a packed module (`qkv_proj` of `q_proj` and
its siblings) by the names that peft gives, which are the published ones. Its base weights are those of the model folder
and never change.
"""

import json
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from vllm import LLMEngine
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from seed_async.actors.engines.published import as_torch
from seed_async.actors.engines.vllm_weights import folder_in_memory
from seed_async.adapters import ADAPTER_PART, peft_settings
from seed_async.topology import Lora

_NAME, _NUMBER = "policy", 1
SERVED_ADAPTER = LoRARequest(_NAME, _NUMBER, "in memory")
"""The adapter as requests name it: it is loaded before the first of them, so that its path is never read."""


def adapter_args(model: PreTrainedModel, lora: Lora) -> dict[str, Any]:
    """What EngineArgs say about the adapters of `model`.

    Only the layers that have one make room for it: vLLM would wrap the embeddings too, at the cost of every step.
    """
    adapted = (name.split(ADAPTER_PART)[0] for name, _ in model.named_parameters() if ADAPTER_PART in name)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
    }


class AdapterSender:
    """Replaces the adapter of an engine's workers, between two steps; a `WeightSender`."""

    def __init__(self, engine: LLMEngine, lora: Lora) -> None:
        """Nothing is loaded yet."""
        self._engine = engine
        self._config = {"peft_type": "LORA", **peft_settings(lora)}

    def send(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Return when every worker has `tensors`; the version plays no part, because the next one takes its place."""
        with folder_in_memory() as folder:
            (folder / "adapter_config.json").write_text(json.dumps(self._config))
            save_file(dict(as_torch(tensors)), folder / "adapter_model.safetensors")
            self._engine.add_lora(LoRARequest(_NAME, _NUMBER, str(folder), load_inplace=True))


def zero_adapters(parameters: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Adapters that change nothing: zeros for each of `parameters`."""
    return {name: np.zeros(tuple(parameter.shape), dtype=np.float32) for name, parameter in parameters.items()}
