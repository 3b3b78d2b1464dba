"""Images on their way into an engine: bounds before anything is decoded, their places among the ids, refusals."""

import io
import json
import struct
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from seed_async.actors.engines.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_JPEG_SCANS,
    MAX_JPEG_SEGMENTS,
    MAX_PNG_CHUNKS,
    ImageFaultError,
    ImageReader,
    decode_image,
    open_reader,
)
from seed_async.actors.engines.torch_engine import TorchEngine
from seed_async.ports import RequestRefusedError, Sampling
from tests.reference.engines import drain
from tests.reference.vision_models import (
    PLACEHOLDER,
    image_processor,
    picture,
    prompt_with_images,
    submit_greedy,
    tiny_vision_model,
    write_vision_model,
)

SMALL = picture(16, 16)
PROMPT = prompt_with_images(3, "image", 2)
CONTEXT = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    reader = ImageReader(PLACEHOLDER, image_processor())
    return TorchEngine(tiny_vision_model("qwen2_vl"), max_slots=2, max_context_tokens=CONTEXT, image_reader=reader)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG of any size in a hundred bytes: its pixels are one short deflate stream that unpacks to too few."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b""))
        + png_chunk(b"IEND", b"")
    )


def gif() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, format="GIF")
    return file.getvalue()


@pytest.mark.parametrize(
    ("prompt", "images", "named"),
    [
        (PROMPT, [], "0 images for 1 placeholders"),
        (PROMPT, [SMALL, SMALL], "2 images for 1 placeholders"),
        (prompt_with_images(5), [SMALL], "1 images for 0 placeholders"),
        (np.full(3, PLACEHOLDER), [SMALL] * 3, "follow each other"),
        (prompt_with_images(*["image"] * 20), [SMALL] * 20, f"120 tokens, the context of {CONTEXT} leaves no room"),
        # Nothing could be decoded of the next one: its header alone has said how many positions it takes.
        (prompt_with_images(44, "image", 9), [png_header(24, 24)], "the prompt has 64 tokens"),
        (PROMPT, [b""], "image 0 is no PNG or JPEG"),
        (PROMPT, [b"\x89PNG\r\n\x1a\n"], "a PNG ends early"),
        (PROMPT, [gif()], "image 0 is no PNG or JPEG"),
        (PROMPT, [SMALL[:-30]], "a PNG ends early"),
        (PROMPT, [png_header(16, 16)], "cannot be decoded"),
        (PROMPT, [picture(2000, 8)], "image 0 has 2000x8 pixels: .*aspect ratio"),
        (PROMPT, [png_header(4000, 4000)], f"image 0 has 4000x4000, more than {MAX_IMAGE_PIXELS} pixels"),
        (PROMPT, [png_header(10_000, 10_000)], f"more than {MAX_IMAGE_PIXELS} pixels"),
        (PROMPT, [png_header(60_000, 60_000)], f"more than {MAX_IMAGE_PIXELS} pixels"),
        (PROMPT, [SMALL + bytes(MAX_IMAGE_BYTES)], f"more than {MAX_IMAGE_BYTES}"),
    ],
)
def test_images_that_cannot_be_served_are_refused_with_the_limit_and_leave_nothing(engine, prompt, images, named):
    with pytest.raises(RequestRefusedError, match=named):
        engine.submit("a", prompt, Sampling(temperature=0.0, max_new_tokens=2), "act", images)
    assert engine.health().waiting == 0
    name = submit_greedy(engine, PROMPT, [SMALL], 2)
    assert drain(engine)[name].token_ids.size == 2


def test_too_many_images_are_refused(engine):
    ids = np.tile([PLACEHOLDER, 1], MAX_IMAGES + 1)
    reader = ImageReader(PLACEHOLDER, image_processor())
    with pytest.raises(ImageFaultError, match=f"{MAX_IMAGES + 1} images are more than {MAX_IMAGES}"):
        reader.place(ids, [SMALL] * (MAX_IMAGES + 1))


def test_damaged_bytes_are_decoded_or_refused_by_the_one_error():
    """Files of both kinds, with some bytes at a random place replaced, left out or added."""
    reader = ImageReader(PLACEHOLDER, image_processor())
    rng = np.random.default_rng(0)
    outcomes = set()
    for good in (picture(32, 24, seed=1), picture(32, 24, seed=1, kind="JPEG")):
        for _ in range(300):
            damaged = bytearray(good)
            at, size = int(rng.integers(len(good))), int(rng.integers(1, 9))
            damaged[at : at + size] = rng.bytes(int(rng.integers(0, 9)))
            try:
                (image,) = reader.place(PROMPT, [bytes(damaged)]).images
                decode_image(image.content)
                outcomes.add("served")
            except ImageFaultError:
                outcomes.add("refused")
    assert outcomes == {"served", "refused"}


def test_an_image_takes_a_position_for_each_square_of_patches_after_merging():
    """As many as the image processor makes."""
    processor = image_processor()
    reader = ImageReader(PLACEHOLDER, processor)
    ids = prompt_with_images(2, "image", 3, "image", 1)
    contents = [picture(41, 17), picture(7, 90, kind="JPEG")]
    prompt = reader.place(ids, contents)
    for image, content in zip(prompt.images, contents, strict=True):
        made = processor(images=[Image.open(io.BytesIO(content))], return_tensors="np")
        assert image.grid == tuple(made["image_grid_thw"][0])
        assert image.stop - image.start == len(made["pixel_values"]) // 4
        assert set(prompt.ids[image.start : image.stop].tolist()) == {image.key} and image.key < 0
        np.testing.assert_array_equal(reader.pixels(image), made["pixel_values"])
    assert prompt.images[0].start == 3 and prompt.images[0].key != prompt.images[1].key
    np.testing.assert_array_equal(reader.compact(prompt), ids)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "1", "I;16", "LA"])
def test_pictures_of_every_mode_become_colours(mode):
    file = io.BytesIO()
    source = Image.new(mode, (16, 24)) if mode == "I;16" else Image.open(io.BytesIO(picture(16, 24))).convert(mode)
    source.save(file, format="PNG")
    reader = ImageReader(PLACEHOLDER, image_processor())
    (image,) = reader.place(PROMPT, [file.getvalue()]).images
    assert reader.pixels(image).shape == (24, 3 * 2 * 4 * 4)


def test_a_folder_says_how_its_images_are_cut(tmp_path):
    write_vision_model(tmp_path, tiny_vision_model("qwen2_5_vl"))
    reader = open_reader(tmp_path)
    assert reader is not None and reader.place(PROMPT, [SMALL]).ids.size == PROMPT.size + 3
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    for key, value in (("patch_size", 7), ("merge_size", 1), ("temporal_patch_size", 1), ("do_resize", False)):
        path.write_text(json.dumps(settings | {key: value}))
        with pytest.raises(ValueError, match=f"{key} is"):
            open_reader(tmp_path)
    path.unlink()
    whole = tmp_path / "processor_config.json"
    whole.write_text(json.dumps({"image_processor": settings}))
    reader = open_reader(tmp_path)
    assert reader is not None and reader.place(PROMPT, [SMALL]).ids.size == PROMPT.size + 3
    whole.write_text("{}")
    bare = open_reader(tmp_path)
    assert bare is not None and bare.place(PROMPT[:3], []).ids.size == 3, "texts are served"
    with pytest.raises(ImageFaultError, match=r"its folder has no preprocessor_config\.json"):
        bare.place(PROMPT, [SMALL])


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_what_unpacks_beside_the_pixels_is_never_read() -> None:
    """A colour profile of 16 MB in each of 500 chunks: read one by one they take a minute."""
    profile = png_chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(1 << 24)))
    plain = saved(Image.new("RGB", (16, 16), "red"))
    start = len(png_chunk(b"IHDR", bytes(13))) + 8
    bomb = plain[:start] + profile * 500 + plain[start:]
    began_s = time.process_time()
    assert decode_image(bomb).getpixel((3, 3)) == (255, 0, 0)
    assert time.process_time() - began_s < 1.0


def test_files_that_take_long_to_read_for_their_size_are_refused() -> None:
    jpeg = saved(Image.new("RGB", (16, 16)), "JPEG")
    scan = jpeg.index(b"\xff\xda")
    with pytest.raises(ImageFaultError, match=f"more than {MAX_JPEG_SCANS} scans"):
        decode_image(jpeg[:scan] + jpeg[scan:-2] * (MAX_JPEG_SCANS + 1) + jpeg[-2:])
    with pytest.raises(ImageFaultError, match=f"more than {MAX_JPEG_SEGMENTS} segments"):
        decode_image(jpeg[:2] + b"\xff\xfe\x00\x02" * MAX_JPEG_SEGMENTS + jpeg[2:])
    with pytest.raises(ImageFaultError, match=f"more than {MAX_PNG_CHUNKS} chunks"):
        decode_image(SMALL[:8] + png_chunk(b"tEXt", b"") * MAX_PNG_CHUNKS + SMALL[8:])


def test_a_progressive_jpeg_is_taken() -> None:
    image = Image.effect_noise((64, 64), 50).convert("RGB")
    assert decode_image(saved(image, "JPEG", progressive=True)).size == (64, 64)


def test_all_images_of_a_prompt_share_one_bound(engine: TorchEngine) -> None:
    ids, images = prompt_with_images(3, *["image"] * 5), [png_header(3840, 2160)] * 5
    with pytest.raises(RequestRefusedError, match="pixels in all, more than"):
        engine.submit("a", ids, Sampling(temperature=0.0, max_new_tokens=1), "act", images)


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_photograph_is_seen_upright_and_placed_by_its_upright_size(orientation: int) -> None:
    image = Image.new("RGB", (32, 16), "white")
    image.paste("black", (0, 0, 16, 8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    content = saved(image, "JPEG", exif=exif, quality=95)
    with Image.open(io.BytesIO(content)) as lying:
        upright = ImageOps.exif_transpose(lying).convert("RGB")
    seen = decode_image(content)
    assert seen.size == upright.size and np.abs(np.asarray(seen, int) - np.asarray(upright, int)).max() == 0
    reader = ImageReader(PLACEHOLDER, image_processor())
    (placed,) = reader.place(PROMPT, [content]).images
    assert reader.pixels(placed).shape[0] == placed.grid[1] * placed.grid[2]


def test_sixteen_bits_of_grey_keep_their_range_and_transparency_is_white() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, axis=0)
    grey = np.asarray(decode_image(saved(Image.fromarray(ramp))))[0, :, 0]
    assert np.abs(grey.astype(int) - np.arange(256)).max() <= 1
    assert decode_image(saved(Image.new("RGBA", (4, 4), (255, 0, 0, 0)))).getpixel((0, 0)) == (255, 255, 255)
