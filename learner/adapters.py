"""Low-rank adapters (LoRA, Hu et al. 2021): only they are trained; what is published and exported is a plain model.

peft puts them into the model in place, so that its class, and how it is scored and sharded, stay the same.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from seed_async.topology import Lora

_NAME = "default"
_BASE, _ADAPTER = ".base_layer.", ".lora_"


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze `model` and add trainable adapters; every rank must give the same `seed`.

    Raises ImportError without the extra `lora`, and ValueError when `targets` name no layer of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(lora.targets) if lora.targets else "all-linear"
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_NAME)


def plain_parameters(
    model: PreTrainedModel, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of every parameter of the plain model, tied ones once.

    Of a layer with an adapter that is W + alpha / rank * B A, in the dtype of W. `whole` puts shards together; each
    rank calls it for the same tensors in the same order.
    """
    for name, parameter in model.named_parameters():
        if _ADAPTER in name:
            continue
        value = whole(parameter.detach())
        if _BASE in name:
            layer: Any = model.get_submodule(name[: name.index(_BASE)])
            if name.endswith(".weight"):
                down, up = (whole(each[_NAME].weight.detach()) for each in (layer.lora_A, layer.lora_B))
                value = value + (layer.scaling[_NAME] * (up @ down)).to(value.dtype)
            name = name.replace(_BASE, ".")
        yield name, value
