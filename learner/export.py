"""Export of the policy as a plain Hugging Face folder that transformers loads as it is."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

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
