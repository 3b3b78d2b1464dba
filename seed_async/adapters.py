"""Low-rank adapters (LoRA, Hu et al. 2021): how they are put into a model, and what they are called when published.

The learner trains them, engines may serve them, and both must mean the same by them. peft puts them into the model in
place, so that its class, and how it is scored, sharded and served, stay the same. Torch and peft are imported when
adapters are added, never before.
"""

from typing import TYPE_CHECKING, Any

from seed_async.topology import Lora

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ADAPTER_NAME = "default"
"""peft's name of the one adapter of a layer, and so a part of its parameters' names."""
ADAPTER_PART = ".lora_"
"""What the name of every adapter parameter holds and no other's does."""


def peft_settings(lora: Lora) -> dict[str, Any]:
    """What peft's configuration, in memory or as a file beside the adapters, says of them."""
    targets = list(lora.targets) if lora.targets else "all-linear"
    return {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}


def add_adapters(model: "PreTrainedModel", lora: Lora, seed: int) -> None:
    """Freeze `model` and add trainable adapters; every rank of a learner must give the same `seed`.

    B is zero, so that the model computes what it did. Raises ImportError without the extra `lora`, and ValueError when
    `targets` name no layer of the model, one that is not linear, or one whose weight is the embeddings' too: merged, an
    adapter would change both.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(**peft_settings(lora), task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    embeddings = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        layer = getattr(module, "base_layer", None)
        if layer is None:
            continue
        if not isinstance(layer, torch.nn.Linear):
            raise ValueError(f"model.lora.targets: {name} is a {type(layer).__name__}, not a linear layer")
        if layer.weight is embeddings:
            raise ValueError(f"model.lora.targets: {name} shares its weight with the embeddings")


def adapter_parameters(model: "torch.nn.Module") -> "dict[str, torch.nn.Parameter]":
    """The adapters of a model, A [rank, in] and B [out, rank] of each layer that has one; {} of a plain model.

    By the names of an adapter file of peft, which vLLM reads too: `base_model.model.<layer>.lora_A.weight`.
    """
    return {
        f"base_model.model.{name.removesuffix(f'.{ADAPTER_NAME}.weight')}.weight": parameter
        for name, parameter in model.named_parameters()
        if ADAPTER_PART in name
    }
