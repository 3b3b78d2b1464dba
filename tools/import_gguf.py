"""Makes a Hugging Face folder, for `model.path`, of a model that is to be had as a GGUF file. Needs the extra `gguf`.

The weights are what the file's quantisation has left of them. The tokenizer, its chat template and the ids that end a
response come from the file too.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from seed_async.text import ChatTokenizer


def import_gguf(file: Path, out: Path) -> int:
    """Write the model of `file` to `out` in float32; returns its number of parameters.

    Raises OSError or ValueError for a file that transformers cannot read, ChatTemplateError for one without a template.
    """
    source = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    # What was read is not quantised any more: saving refuses a model that says it is.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None  # type: ignore[assignment]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id if pad is None else pad
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    ChatTokenizer.load(out)
    return int(model.num_parameters())


def main() -> None:
    """Parse the options and import the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the .gguf file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    number = import_gguf(options.file, options.out)
    print(f"{number / 1e6:.1f} million parameters -> {options.out}")


if __name__ == "__main__":
    main()
