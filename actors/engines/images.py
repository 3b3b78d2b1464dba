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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image
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
MAX_PROMPT_PIXELS = 4 * MAX_IMAGE_PIXELS
"""Pixels of all images of a prompt: decoding them takes a second of the thread that advances the engine."""
MAX_JPEG_SEGMENTS = 1000
"""Segments before the pixels of a JPEG; cameras write some twenty."""
MAX_JPEG_SCANS = 100
"""Passes over the pixels; a progressive JPEG has about ten, and each costs as much as a whole plain one."""
MAX_PNG_CHUNKS = 10_000
"""Of a few thousand bytes each, as encoders write them, that is more than MAX_IMAGE_BYTES."""

_FORMATS = ("PNG", "JPEG")
_PNG_SIGNATURE, _JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_PNG_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
"""What the pixels are made of. Colour profiles, texts and further frames are left out: they unpack to any size."""
_START_OF_SCAN = 0xDA
_TURNS: Mapping[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What puts an image upright, by the orientation of its EXIF data."""
_SIDEWAYS = (5, 6, 7, 8)
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
        sizes = [_image_size(index, content) for index, content in enumerate(images)]
        num_pixels = sum(width * height for width, height in sizes)
        if num_pixels > MAX_PROMPT_PIXELS:
            raise ImageFaultError(f"the images have {num_pixels} pixels in all, more than {MAX_PROMPT_PIXELS}")
        grids = [self._grid(index, *size) for index, size in enumerate(sizes)]
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

    def _grid(self, index: int, width: int, height: int) -> tuple[int, int, int]:
        """Patches of an image of that many pixels."""
        processor = self._known_processor()
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
    """Decode an image whose size was found to be within bounds: upright RGB, on white where it is transparent.

    Raises ImageFaultError.
    """
    file = _quick_to_read(content)
    try:
        with Image.open(file, formats=_FORMATS) as image:
            turn, plain = _TURNS.get(_orientation(image)), _eight_bits(image)
            if plain.has_transparency_data:
                plain = plain.convert("RGBA")
                plain = Image.alpha_composite(Image.new("RGBA", plain.size, "white"), plain)
            rgb = plain.convert("RGB")
            return rgb if turn is None else rgb.transpose(turn)
    except _PILLOW_ERRORS as error:
        raise ImageFaultError(f"an image cannot be decoded: {error}") from error


def _image_size(index: int, content: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header: no pixel is unpacked. Raises ImageFaultError."""
    if len(content) > MAX_IMAGE_BYTES:
        raise ImageFaultError(f"image {index} has {len(content)} bytes, more than {MAX_IMAGE_BYTES}")
    file = _quick_to_read(content)
    try:
        with Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if _orientation(image) in _SIDEWAYS:
                width, height = height, width
    except Image.DecompressionBombError as error:  # twice Pillow's own limit, which is beyond ours
        raise ImageFaultError(f"image {index} has more than {MAX_IMAGE_PIXELS} pixels") from error
    except _PILLOW_ERRORS as error:
        raise ImageFaultError(f"image {index} is no {' or '.join(_FORMATS)}") from error
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageFaultError(f"image {index} has {width}x{height}, more than {MAX_IMAGE_PIXELS} pixels")
    return width, height


def _quick_to_read(content: bytes) -> io.BytesIO:
    """The image as a file that takes no longer to read than its size says. Raises ImageFaultError."""
    if content.startswith(_PNG_SIGNATURE):
        content = _bare_png(content)
    elif content.startswith(_JPEG_SIGNATURE):
        _check_jpeg(content)
    return io.BytesIO(content)


def _bare_png(content: bytes) -> bytes:
    """The PNG without what is not needed for its pixels."""
    kept, at = [_PNG_SIGNATURE], len(_PNG_SIGNATURE)
    for _ in range(MAX_PNG_CHUNKS):
        kind = content[at + 4 : at + 8]
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        if len(kind) < 4 or end > len(content):
            raise ImageFaultError("a PNG ends early")
        if kind in _PNG_CHUNKS:
            kept.append(content[at:end])
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise ImageFaultError(f"a PNG has more than {MAX_PNG_CHUNKS} chunks")


def _check_jpeg(content: bytes) -> None:
    """Refuse a JPEG with so many segments or scans that reading it takes long."""
    # Within the pixels a 0xff is followed by 0, so that these two bytes are a scan; elsewhere they hardly ever occur.
    if content.count(bytes((0xFF, _START_OF_SCAN))) > MAX_JPEG_SCANS:
        raise ImageFaultError(f"a JPEG has more than {MAX_JPEG_SCANS} scans")
    at = len(_JPEG_SIGNATURE)
    for _ in range(MAX_JPEG_SEGMENTS):
        if content[at : at + 1] != b"\xff" or content[at + 1 : at + 2] == bytes((_START_OF_SCAN,)):
            return  # the pixels, or what Pillow will refuse
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    raise ImageFaultError(f"a JPEG has more than {MAX_JPEG_SEGMENTS} segments before its pixels")


def _orientation(image: Image.Image) -> object:
    """How its EXIF data say that the image lies: 1 upright, up to 8. Other values mean nothing."""
    if image.format == "PNG":  # has none any more, and Pillow would decode the pixels to look for it
        return 1
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image with 8 bits a pixel and channel: Pillow would cut 16 bits of grey off at 255."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _key(content: bytes) -> int:
    """A negative 64-bit number that only these bytes have."""
    return -1 - (int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1)
