"""Export of the policy as a plain Hugging Face folder that transformers loads as it is."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from seed_async.adapters import add_adapters
from seed_async.learner.adapters import plain_parameters
from seed_async.learner.checkpoint import read_manifest, restore_policy
from seed_async.learner.scoring import auto_class
from seed_async.topology import Lora

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What a model folder holds beside configuration and weights: how texts become ids and images become patches."""


def export_weights(weights: Mapping[str, torch.Tensor], model_dir: Path, out: Path) -> PreTrainedModel:
    """Write `weights` with the configuration and tokenizer of `model_dir` to `out`, in the dtype given there.

    Returns the model that was written.

    Raises ValueError when they are not those of that model.
    """
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    model: PreTrainedModel = auto_class(model_dir).from_config(config, dtype=config.dtype or torch.float32)
    parameters = dict(model.named_parameters())
    if different := sorted(
        name
        for name in parameters.keys() | weights.keys()
        if name not in parameters or name not in weights or parameters[name].shape != weights[name].shape
    ):
        raise ValueError(f"the weights are not those of {model_dir}: {', '.join(different[:5])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    export_policy(model, model_dir, out)
    return model


def export_policy(model: PreTrainedModel, tokenizer_from: Path, out: Path) -> None:
    """Write the model (safetensors) and the tokenizer and processor files of `tokenizer_from` to `out`.

    Everything is written beside `out` first and renamed, so that `out` is never half a model.
    """
    staging = out.with_name(out.name + ".staging")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    for name in COPIED_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, staging / name)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)


def merge_checkpoint(checkpoint: Path, model_dir: Path, out: Path, lora: Lora | None = None) -> int:
    """Export a training checkpoint; `model_dir` is what the run started from. Returns the checkpoint's version.

    With `lora` it holds adapters of that model, which are merged into its weights. The result is loaded again with
    plain transformers, and must give the same logits. Raises ValueError for a damaged checkpoint or another model's.
    """
    manifest = read_manifest(checkpoint)
    model = auto_class(model_dir).from_pretrained(model_dir, local_files_only=True)
    if lora is not None:
        add_adapters(model, lora, seed=0)
    restore_policy(checkpoint, model)
    check_export(export_weights(dict(plain_parameters(model, lambda tensor: tensor)), model_dir, out), out)
    return manifest.version


def check_export(model: PreTrainedModel, out: Path) -> None:
    """Raise ValueError unless the folder `out`, loaded with plain transformers, gives the logits of `model`."""
    ids = torch.arange(min(16, model.config.get_text_config().vocab_size)).unsqueeze(0)
    again = auto_class(out).from_pretrained(out, local_files_only=True)
    with torch.no_grad():
        expected, found = (each(input_ids=ids).logits for each in (model, again))
    if not torch.equal(expected, found):
        raise ValueError(f"{out} gives other logits than what it was made from: it is not to be used")
