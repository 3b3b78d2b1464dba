"""The manifest of a version: names, shapes, dtypes and offsets of its tensors in one run of bytes, and their digest."""

import mmap
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256

import numpy as np

from seed_async.messages import TensorSpec, WeightsManifest

ByteBuffer = bytes | bytearray | memoryview | mmap.mmap
ALIGNMENT_BYTES = 64
GROUP_BYTES = 4 << 20
"""Tensors below this travel together up to about this size, larger ones alone: a small message costs as much in
latency as a megabyte in bandwidth."""


class WeightsCorruptError(RuntimeError):
    """Bytes that do not have the manifest's size or digest; the version is refused."""


class WeightsGoneError(RuntimeError):
    """A newer version has replaced the one that was asked for."""


def digest_of(buffer: ByteBuffer) -> str:
    """Return the digest that a manifest carries: SHA-256, which processors have instructions for."""
    return sha256(buffer).hexdigest()


def layout(tensors: Mapping[str, np.ndarray]) -> tuple[tuple[TensorSpec, ...], int]:
    """Return where each tensor lies, in the given order, and the size of the whole in bytes."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name=name, dtype=tensor.dtype.name, shape=tensor.shape, offset_bytes=offset))
        offset += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(specs), offset


def _in_memory(num_bytes: int) -> np.ndarray:
    return np.zeros(num_bytes, dtype=np.uint8)


def build_manifest(
    version: int,
    tensors: Mapping[str, np.ndarray],
    segment: str,
    attempt: int,
    allocate: Callable[[int], np.ndarray] = _in_memory,
) -> tuple[WeightsManifest, np.ndarray]:
    """Copy the tensors into one run of bytes (uint8 [N], zeros from `allocate`) and describe it.

    `segment` says where receivers find it.
    """
    specs, num_bytes = layout(tensors)
    image = allocate(num_bytes)
    for spec, tensor in zip(specs, tensors.values(), strict=True):
        image[spec.offset_bytes : spec.offset_bytes + tensor.nbytes] = (
            np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        )
    manifest = WeightsManifest(
        version=version,
        segment=segment,
        num_bytes=num_bytes,
        digest=digest_of(image.data),
        tensors=specs,
        attempt=attempt,
    )
    return manifest, image


def verified_arrays(manifest: WeightsManifest, buffer: ByteBuffer) -> dict[str, np.ndarray]:
    """Return the tensors as read-only views of `buffer`. Raises WeightsCorruptError for any byte not as announced."""
    fault = f"version {manifest.version}: {manifest.segment} does not have the announced "
    if len(buffer) != manifest.num_bytes:
        raise WeightsCorruptError(fault + "size")
    if digest_of(buffer) != manifest.digest:
        raise WeightsCorruptError(fault + "digest")
    arrays = {}
    for spec in manifest.tensors:
        size = int(np.prod(spec.shape, dtype=np.int64))
        flat = np.frombuffer(buffer, dtype=np.dtype(spec.dtype), count=size, offset=spec.offset_bytes)
        flat.flags.writeable = False
        arrays[spec.name] = flat.reshape(spec.shape)
    return arrays


def transfer_ranges(manifest: WeightsManifest, group_bytes: int = GROUP_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges that a collective sends one by one: small tensors grouped, each large one alone."""
    start = 0
    ends = [spec.offset_bytes for spec in manifest.tensors[1:]] + [manifest.num_bytes]
    for spec, end in zip(manifest.tensors, ends, strict=True):
        if end - spec.offset_bytes >= group_bytes and spec.offset_bytes > start:
            yield start, spec.offset_bytes
            start = spec.offset_bytes
        if end - start >= group_bytes or (end == manifest.num_bytes and end > start):
            yield start, end
            start = end
