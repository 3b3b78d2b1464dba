"""What the torch engine computes for images: rotary positions of prompts that hold them, features of the vision tower.

Features are made when the first position of an image is computed and dropped when its last one is. So an image whose
keys and values are found cached costs nothing, and after a change of weights, which computes all positions of running
requests anew, its features are made anew too.
"""

from typing import Any, cast

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from seed_async.actors.engines.images import VISION_MODEL_TYPES, ImageReader, PlacedImage
from seed_async.actors.engines.queueing import Request
from seed_async.actors.engines.slots import SlotTable

DEEPSTACK_MODEL_TYPES = ("qwen3_vl",)
"""Architectures that add features to the hidden states behind the first layers of the language model as well."""


def takes_images(config: PretrainedConfig) -> bool:
    """Whether a model has a vision tower. Raises ValueError for one whose images are not known here."""
    if config.model_type in VISION_MODEL_TYPES:
        return True
    if getattr(config, "vision_config", None) is not None:
        known = ", ".join(VISION_MODEL_TYPES)
        raise ValueError(f"model type {config.model_type!r} takes images, but only {known} are served")
    return False


class Vision:
    """The images of the requests in the slots of a table."""

    def __init__(self, model: PreTrainedModel, reader: ImageReader, table: SlotTable) -> None:
        """`model` has one of VISION_MODEL_TYPES."""
        self._model: Any = model.base_model
        self._reader, self._table = reader, table
        self._embed = cast(torch.nn.Embedding, model.get_input_embeddings())
        self._deepstack = model.config.model_type in DEEPSTACK_MODEL_TYPES
        # Along time, height and width, [3, slots, context]; the same three wherever there is no image before.
        self._positions = np.zeros((3, *table.ids.shape), dtype=np.int32)
        self._features: dict[int, torch.Tensor] = {}

    def place(self, slot: int, request: Request) -> None:
        """Take over a request that was placed in `slot` of the table."""
        size, limit = request.prompt_ids.size, int(self._table.length_limit[slot])
        shift = 0
        if request.images:
            # The ids matter for their shape only: the kinds say where the images are.
            kinds = torch.from_numpy((request.prompt_ids < 0).astype(np.int32))
            grids = torch.tensor([image.grid for image in request.images])
            positions, shifts = self._model.get_rope_index(kinds[None].long(), kinds[None], image_grid_thw=grids)
            self._positions[:, slot, :size] = positions[:, 0].numpy()
            shift = int(shifts[0, 0])
        else:
            self._positions[:, slot, :size] = np.arange(size)
        self._positions[:, slot, size:limit] = np.arange(size, limit) + shift

    def inputs(self, ids: np.ndarray, slots: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
        """What the language model takes for a packed row of ids [T]: `counts` [B] from `starts` [B] on in `slots` [B].

        `position_ids` int64 [3, 1, T], and `input_ids` [1, T], or `inputs_embeds` [1, T, d] where the row holds images.
        """
        device = self._embed.weight.device
        along = np.arange(ids.size) + np.repeat(starts - (counts.cumsum() - counts), counts)
        positions = self._positions[:, np.repeat(slots, counts), along].astype(np.int64)
        inputs: dict[str, Any] = {"position_ids": torch.from_numpy(positions).to(device)[:, None]}
        packed = torch.from_numpy(ids).to(device)[None]
        if ids.min() >= 0:
            return inputs | {"input_ids": packed}
        seen = packed < 0
        features = self._pending_features(slots, counts, starts)
        embeds = self._embed(packed.clamp(min=0))
        embeds[seen] = features[0]
        if self._deepstack:
            inputs |= {"visual_pos_masks": seen, "deepstack_visual_embeds": list(features[1:])}
        return inputs | {"inputs_embeds": embeds}

    def forget_done(self) -> None:
        """Drop the features of images that no running request has still to compute."""
        if self._features:
            table = self._table
            wanted = {
                image.key
                for slot, request in enumerate(table.requests)
                if request is not None
                for image in request.images
                if image.stop > table.cached[slot]
            }
            self._features = {key: features for key, features in self._features.items() if key in wanted}

    def forget_all(self) -> None:
        """Drop the features that old weights made."""
        self._features.clear()

    def _pending_features(self, slots: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Features [1 + deep, n, d] of the n image positions among the pending ones, in their order."""
        parts = []
        for slot, start, stop in zip(slots.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True):
            request = self._table.requests[slot]
            for image in request.images if request is not None else ():
                first, last = max(image.start, start), min(image.stop, stop)
                if first < last:
                    parts.append(self._image_features(image)[:, first - image.start : last - image.start])
        return torch.cat(parts, dim=1)

    def _image_features(self, image: PlacedImage) -> torch.Tensor:
        """Features [1 + deep, n, d] of a whole image: what stands for its positions, and what later layers add."""
        if image.key not in self._features:
            weight = self._embed.weight
            patches = torch.from_numpy(self._reader.pixels(image)).to(weight.device)
            grid = torch.tensor([image.grid], device=weight.device)
            made = self._model.get_image_features(patches, grid, return_dict=True)
            layers = [made.pooler_output, *(made.deepstack_features if self._deepstack else ())]
            # One image at a time: what a request gets does not depend on whose images come with it.
            self._features[image.key] = torch.stack([layer[0] for layer in layers]).to(weight.dtype)
        return self._features[image.key]
