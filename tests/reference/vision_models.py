"""Tiny models with a vision tower, pictures for them, and what plain transformers gives for both."""

import copy
import io
from itertools import count
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from seed_async.actors.engines.attention import register_slotted_attention
from seed_async.actors.engines.torch_engine import VISION_ATTENTION
from seed_async.ports import Engine, Sampling

VOCABULARY = 64
START, END, PLACEHOLDER = 60, 61, 62
"""What comes before an image, after it and for it."""
WORDS = 60
"""Ids below are text."""
PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
"""Pixels of a side of the square that becomes one position."""

_VISION = {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "num_heads": 2, "depth": 2}
VISION = {
    "qwen2_vl": _VISION | {"embed_dim": 16, "hidden_size": 32},
    # Windows of two by two positions in the first layer, the whole image in the second.
    "qwen2_5_vl": _VISION
    | {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "window_size": 2 * SIDE,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": _VISION
    | {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
CONFIGS = {"qwen2_vl": Qwen2VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig, "qwen3_vl": Qwen3VLConfig}
FAMILIES = tuple(CONFIGS)


def vision_config(family: str, vocabulary: int = VOCABULARY, placeholder: int = PLACEHOLDER, context: int = 256):
    """Three layers with grouped heads; deepstack features reach the first two."""
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if family == "qwen3_vl":
        text["head_dim"] = 8
    return CONFIGS[family](
        text_config=text,
        vision_config=VISION[family],
        image_token_id=placeholder,
        video_token_id=vocabulary - 1,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def tiny_vision_model(family: str, seed: int = 0, **changes: int) -> PreTrainedModel:
    """A model with the engine's attention and weights so large that argmaxes vary, with pictures too."""
    register_slotted_attention()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        vision_config(family, **changes), attn_implementation=VISION_ATTENTION
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim >= 2 else 1)
        # Never the best token: the plain loop would look for another image.
        model.lm_head.weight[model.config.image_token_id] = 0
    return model


def vision_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the attention that transformers itself calls eager, also in the vision tower."""
    twin = AutoModelForImageTextToText.from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    return twin


def image_processor(**changes: object) -> Qwen2VLImageProcessorPil:
    """Cuts images for the tiny towers; at most 24 positions for one."""
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": 24 * SIDE * SIDE}
    return Qwen2VLImageProcessorPil(**{"size": size, "patch_size": PATCH, "merge_size": MERGE} | changes)


def write_vision_model(folder: Path, model: PreTrainedModel) -> Path:
    """A model folder without its text side."""
    model.save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Random blocks of colour, so that neighbouring positions differ."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 4), -(-width // 4), 3), dtype=np.uint8)
    pixels = blocks.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def prompt_with_images(*parts: int | str, seed: int = 0) -> np.ndarray:
    """Ids int32: a number stands for so many words, "image" for a placeholder between its marks."""
    rng = np.random.default_rng(seed)
    ids = [
        [START, PLACEHOLDER, END] if isinstance(part, str) else rng.integers(2, WORDS, part).tolist() for part in parts
    ]
    return np.concatenate(ids).astype(np.int32)


def vision_logprobs(twin: PreTrainedModel, prompt: np.ndarray, images: list[bytes], response: np.ndarray) -> np.ndarray:
    """Log-probs float64 [T, V] at each of the T tokens of a response: one whole forward pass, no cache."""
    extra: dict[str, torch.Tensor] = {}
    counts = np.ones(prompt.size, dtype=np.int64)
    if images:
        pictures = [Image.open(io.BytesIO(each)) for each in images]
        extra = dict(image_processor()(images=pictures, return_tensors="pt"))
        counts[prompt == PLACEHOLDER] = (extra["image_grid_thw"].prod(dim=1) // MERGE**2).numpy()
    ids = torch.from_numpy(np.concatenate([np.repeat(prompt, counts), response]).astype(np.int64))[None]
    assert not images or PLACEHOLDER not in response, "the plain loop would look for another image"
    if images:
        extra["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    with torch.no_grad():
        logits = twin(input_ids=ids, use_cache=False, **extra).logits[0, -response.size - 1 : -1].double()
    return torch.log_softmax(logits, dim=-1).numpy()


def check_greedy(
    twin: PreTrainedModel, prompt: np.ndarray, images: list[bytes], ids: np.ndarray, scores: np.ndarray
) -> None:
    """Each id is the best one after those before it, with the log-prob that `scores` says."""
    logprobs = vision_logprobs(twin, prompt, images, ids)
    assert ids.tolist() == logprobs.argmax(axis=1).tolist()
    assert np.abs(scores - logprobs.max(axis=1)).max() < 1e-4


def vision_scores(twin: PreTrainedModel, prompt: np.ndarray, images: list[bytes], response: np.ndarray) -> np.ndarray:
    """Log-probs of a given response."""
    return vision_logprobs(twin, prompt, images, response)[np.arange(response.size), response]


_numbers = count()


def submit_greedy(engine: Engine, prompt: np.ndarray, images: list[bytes], num_tokens: int) -> str:
    """Ask for a greedy response; its id."""
    request_id = str(next(_numbers))
    engine.submit(request_id, prompt, Sampling(temperature=0.0, max_new_tokens=num_tokens), "act", images)
    return request_id
