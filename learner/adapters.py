"""What the learner publishes and exports of a model: a plain one, with its adapters merged, or the adapters alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from seed_async.adapters import ADAPTER_NAME, ADAPTER_PART, adapter_parameters
from seed_async.topology import Model

_BASE = ".base_layer."

Unshard = Callable[[torch.Tensor], torch.Tensor]
"""Puts the shards of a tensor together; each rank calls it for the same tensors in the same order."""
ParameterSource = Callable[[PreTrainedModel, Unshard], Iterator[tuple[str, torch.Tensor]]]
"""Yields name and value of what leaves a learner."""


def plain_parameters(model: PreTrainedModel, whole: Unshard) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of every parameter of the plain model, tied ones once.

    Of a layer with an adapter that is W + alpha / rank * B A, in the dtype of W.
    """
    for name, parameter in model.named_parameters():
        if ADAPTER_PART in name:
            continue
        value = whole(parameter.detach())
        if _BASE in name:
            layer: Any = model.get_submodule(name[: name.index(_BASE)])
            if name.endswith(".weight"):
                down, up = (whole(each[ADAPTER_NAME].weight.detach()) for each in (layer.lora_A, layer.lora_B))
                value = value + (layer.scaling[ADAPTER_NAME] * (up @ down)).to(value.dtype)
            name = name.replace(_BASE, ".")
        yield name, value


def adapters_alone(model: PreTrainedModel, whole: Unshard) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield published name and value of A and B of every layer that has an adapter."""
    for name, parameter in adapter_parameters(model).items():
        yield name, whole(parameter.detach())


def choose_parameters(settings: Model) -> ParameterSource:
    """Which parameters a version holds, by `model.lora.publish`."""
    return adapters_alone if settings.served_adapters is not None else plain_parameters
