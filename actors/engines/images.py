"""Images of a prompt, up to the pixels that a vision tower takes: bounds, places among the ids, decoding.

The ids of a prompt hold one placeholder for each image. An engine computes as many positions as the image has patches
after merging, so the placeholder is repeated that often, and each repetition holds the image's key instead of the
placeholder: a negative number made of the image's bytes. Prompts with the same ids and other images thereby have
different ids, which is what prefixes are compared by.
"""

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from transformers import AutoConfig, PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Architectures whose images are served; they share one way of cutting an image into patches."""
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"

MAX_IMAGES = 64
"""Images of one prompt."""
MAX_IMAGE_BYTES = 8 << 20
"""Bytes of one image as it comes, PNG or JPEG."""
MAX_IMAGE_PIXELS = 3840 * 2160
"""Pixels of one image when it is decoded (25 MB), read from its header before anything is."""

_FORMATS = ("PNG", "JPEG")
_PILLOW_ERRORS = (
    OSError,  # no image, an unknown kind, or one that ends early
    SyntaxError,  # what Pillow calls a broken chunk of a PNG
    ValueError,  # text chunks that unpack to too much, sizes that are none
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""What Pillow raises for bytes that are no good image: whatever its reader of the format stumbles over."""


class ImageFaultError(ValueError):
    """Images that cannot be part of a prompt; the message names the limit."""


class PlacedImage(NamedTuple):
    """An image and its place: positions `start:stop` of the prompt, whose ids are all `key`.

    `grid` counts its patches before merging: time (always 1), height, width.
    """

    content: bytes
    key: int
    start: int
    stop: int
    grid: tuple[int, int, int]


class PlacedPrompt(NamedTuple):
    """A prompt as an engine computes it: `ids` int [P] with every image at its full length, and the images in order."""

    ids: np.ndarray
    images: tuple[PlacedImage, ...] = ()


class ImageReader:
    """Finds the images' places in a prompt and makes their pixels, as one model wants both."""

    def __init__(self, image_token_id: int, processor: Qwen2VLImageProcessorPil | None) -> None:
        """`image_token_id` is the placeholder of an image; without `processor` every image is refused."""
        self.image_token_id, self._processor = image_token_id, processor

    def place(self, prompt_ids: np.ndarray, images: Sequence[bytes]) -> PlacedPrompt:
        """Put `images` at the placeholders of `prompt_ids` int [P]; reads their headers only. Raises ImageFaultError.

        A prompt without images has no placeholder either.
        """
        at = np.flatnonzero(prompt_ids == self.image_token_id)
        if at.size != len(images):
            raise ImageFaultError(
                f"{len(images)} images for {at.size} placeholders (id {self.image_token_id}): each needs exactly one"
            )
        if not images:
            return PlacedPrompt(prompt_ids)
        if len(images) > MAX_IMAGES:
            raise ImageFaultError(f"{len(images)} images are more than {MAX_IMAGES}")
        if (np.diff(at) == 1).any():
            raise ImageFaultError("two placeholders follow each other: images need a token between them")
        grids = [self._grid(index, content) for index, content in enumerate(images)]
        keys = [_key(content) for content in images]
        counts = np.ones(prompt_ids.size, dtype=np.int64)
        counts[at] = [height * width // self._merge**2 for _, height, width in grids]
        ids = prompt_ids.astype(np.int64)
        ids[at] = keys
        stops = counts.cumsum()[at]
        starts = stops - counts[at]
        placed = map(PlacedImage, images, keys, starts.tolist(), stops.tolist(), grids)
        return PlacedPrompt(np.repeat(ids, counts), tuple(placed))

    def compact(self, prompt: PlacedPrompt) -> np.ndarray:
        """The ids as they came, int32 [P]: with one placeholder for each image."""
        kept = np.ones(prompt.ids.size, dtype=bool)
        for image in prompt.images:
            kept[image.start + 1 : image.stop] = False
        ids: np.ndarray = np.where(prompt.ids < 0, self.image_token_id, prompt.ids)[kept].astype(np.int32)
        return ids

    def pixels(self, image: PlacedImage) -> np.ndarray:
        """The patches of an image, float32 [patches, values], in the order that the vision tower takes them."""
        made = self._known_processor()(images=[decode_image(image.content)], return_tensors="np")
        if tuple(made["image_grid_thw"][0]) != image.grid:
            raise ValueError(f"the image has {made['image_grid_thw'][0]} patches, its header said {image.grid}")
        patches: np.ndarray = made["pixel_values"]
        return patches

    @property
    def _merge(self) -> int:
        return int(self._known_processor().merge_size)

    def _known_processor(self) -> Qwen2VLImageProcessorPil:
        if self._processor is None:
            raise ImageFaultError(f"this model takes no images: its folder has no {PREPROCESSOR_FILE}")
        return self._processor

    def _grid(self, index: int, content: bytes) -> tuple[int, int, int]:
        """Patches of an image, from its header."""
        processor = self._known_processor()
        width, height = _image_size(index, content)
        patch, size = int(processor.patch_size), processor.size
        try:
            tall, wide = smart_resize(height, width, patch * self._merge, size["shortest_edge"], size["longest_edge"])
        except ValueError as error:
            raise ImageFaultError(f"image {index} has {width}x{height} pixels: {error}") from error
        return 1, tall // patch, wide // patch


def open_reader(path: Path) -> ImageReader | None:
    """The reader for the images of a model folder; None for a model that takes none.

    Raises ValueError when the folder's way of cutting images is not that of its vision tower.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type not in VISION_MODEL_TYPES:
        return None
    if not _has_image_processor(path):
        return ImageReader(config.image_token_id, None)
    processor = Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)
    _check_processor(processor, config.vision_config)
    return ImageReader(config.image_token_id, processor)


def _has_image_processor(path: Path) -> bool:
    """Whether a model folder describes its image processor: in a file of its own, or among all of its processors."""
    whole = path / PROCESSOR_FILE
    return (path / PREPROCESSOR_FILE).is_file() or (
        whole.is_file() and "image_processor" in json.loads(whole.read_text())
    )


def _check_processor(processor: Qwen2VLImageProcessorPil, vision: PretrainedConfig) -> None:
    for mine, theirs in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if getattr(processor, mine) != getattr(vision, theirs):
            raise ValueError(
                f"{PREPROCESSOR_FILE}: {mine} is {getattr(processor, mine)}, the vision tower's {theirs} is "
                f"{getattr(vision, theirs)}"
            )
    if not processor.do_resize:
        raise ValueError(f"{PREPROCESSOR_FILE}: do_resize is off, but patches need whole multiples of their size")


def decode_image(content: bytes) -> Image.Image:
    """Decode an image whose size was found to be within bounds, as RGB. Raises ImageFaultError."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            return image.convert("RGB")
    except _PILLOW_ERRORS as error:
        raise ImageFaultError(f"an image cannot be decoded: {error}") from error


def _image_size(index: int, content: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header: no pixel is unpacked. Raises ImageFaultError."""
    if len(content) > MAX_IMAGE_BYTES:
        raise ImageFaultError(f"image {index} has {len(content)} bytes, more than {MAX_IMAGE_BYTES}")
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:  # twice Pillow's own limit, which is beyond ours
        raise ImageFaultError(f"image {index} has more than {MAX_IMAGE_PIXELS} pixels") from error
    except _PILLOW_ERRORS as error:
        raise ImageFaultError(f"image {index} is no {' or '.join(_FORMATS)}") from error
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageFaultError(f"image {index} has {width}x{height}, more than {MAX_IMAGE_PIXELS} pixels")
    return width, height


def _key(content: bytes) -> int:
    """A negative 64-bit number that only these bytes have."""
    return -1 - (int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1)
