"""Export of the policy as a plain Hugging Face folder that transformers loads as it is."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from seed_async.learner.checkpoint import read_manifest, restore_policy

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export_policy(model: PreTrainedModel, tokenizer_from: Path, out: Path) -> None:
    """Write the model (safetensors) and the tokenizer files of `tokenizer_from` to `out`.

    Everything is written beside `out` first and renamed, so that `out` is never half a model.
    """
    staging = out.with_name(out.name + ".staging")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, staging / name)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)


def merge_checkpoint(checkpoint: Path, model_dir: Path, out: Path) -> int:
    """Export a training checkpoint; `model_dir` is what the run started from. Returns the checkpoint's version.

    The result is loaded again with plain transformers, and must give the same logits. Raises ValueError for a damaged
    checkpoint or one of another model.
    """
    manifest = read_manifest(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    restore_policy(checkpoint, model)
    export_policy(model, model_dir, out)
    ids = torch.arange(min(16, model.config.vocab_size)).unsqueeze(0)
    with torch.no_grad():
        expected, found = (each(ids).logits for each in (model, AutoModelForCausalLM.from_pretrained(out)))
    if not torch.equal(expected, found):
        raise ValueError(f"{out} gives other logits than {checkpoint}: it is not to be used")
    return manifest.version
