"""Messages to frames and back: msgpack for the struct, raw bytes for its arrays, no pickle.

Frame 0 is the msgpack body. Each array in it is replaced by a reference `[offset, dtype, shape]` into frame 1, where
the bytes of all arrays follow one another in the order of their references, each padded to 8 bytes. One frame for
all of them, because a batch of long episodes holds ten thousand arrays and ZeroMQ pays for each frame.
"""

import functools
import math
import operator
import threading
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from seed_async import messages
from seed_async.messages import Message

Buffer = bytes | memoryview

# Keyed by numpy's `dtype.str`. Little-endian whatever the host; everything else, objects above all, is refused.
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ("|b1", "|u1", "<u2", "<i4", "<i8", "<f4", "<f8")
}
MAX_ARRAY_DIMS = 4
_ALIGNMENT_BYTES = 8  # the largest item

AnyMessage: Any = functools.reduce(
    operator.or_,
    (kind for kind in vars(messages).values() if isinstance(kind, type) and Message in kind.__bases__),
)
"""Union of every message type, for `decode`; a value at run time, typed as Any."""


class MalformedMessageError(Exception):
    """Frames that are no message. `reason` is a short slug to count by.

    Not a ValueError: msgspec would turn that into its own error when it is raised inside a decoding hook.
    """

    def __init__(self, reason: str, detail: str) -> None:
        """Keep the slug apart from the readable detail."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class _Decoding(threading.local):
    """The array bytes of the message that this thread decodes now, and how far they are used.

    A decoder takes its hook once and costs 50 µs to build, so the hook finds them here and not in a closure.
    """

    arrays = memoryview(b"")
    used_bytes = 0


_decoding = _Decoding()


def encode(message: Message) -> list[Buffer]:
    """Return the one or two frames of `message`. Arrays are copied, so that a resend still sends what was meant.

    Raises TypeError for an array dtype outside `ARRAY_DTYPES` and for any other value that is not plain data.
    """
    chunks: list[bytes] = []
    offset = 0

    def array_to_ref(value: Any) -> tuple[int, str, tuple[int, ...]]:
        nonlocal offset
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(message).__name__} holds a {type(value).__name__}, which has no wire format")
        if value.dtype.str not in ARRAY_DTYPES:
            raise TypeError(f"{type(message).__name__} holds an array of {value.dtype.str}, not of {[*ARRAY_DTYPES]}")
        ref = (offset, value.dtype.str, value.shape)
        num_padding = -value.nbytes % _ALIGNMENT_BYTES
        chunks.append(value.tobytes())
        chunks.append(bytes(num_padding))
        offset += value.nbytes + num_padding
        return ref

    body = msgspec.msgpack.encode(message, enc_hook=array_to_ref)
    return [body, b"".join(chunks)] if chunks else [body]


def decode(frames: Sequence[Buffer], types: Any = AnyMessage) -> Message:
    """Return the message in `frames`, which must be of `types` (a message type or a union of them).

    Arrays are read-only views of frame 1. Raises MalformedMessageError and nothing else for bad input.
    """
    if len(frames) not in (1, 2):
        raise MalformedMessageError("frame_count", f"{len(frames)} frames; a message has 1 or 2")
    _decoding.arrays = memoryview(frames[1] if len(frames) == 2 else b"").toreadonly()
    _decoding.used_bytes = 0
    try:
        message = cast(Message, _decoder(types).decode(frames[0]))
        num_unused = _decoding.arrays.nbytes - _decoding.used_bytes
    except msgspec.ValidationError as error:
        raise MalformedMessageError("schema", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError("msgpack", str(error)) from error
    except RecursionError as error:
        raise MalformedMessageError("nesting", "the body is nested too deeply") from error
    finally:
        _decoding.arrays = memoryview(b"")
    if num_unused:
        raise MalformedMessageError("array_size", f"{num_unused} array bytes are not referenced")
    return message


@functools.cache
def _decoder(types: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(types, dec_hook=_ref_to_array)


def _ref_to_array(_kind: type, ref: Any) -> np.ndarray:
    """Arrays are the only type that msgspec does not know itself; `ref` may be anything that msgpack can say."""
    if type(ref) is not list or len(ref) != 3 or ref[0] != _decoding.used_bytes or type(ref[2]) is not list:
        raise MalformedMessageError("array_ref", f"no [offset, dtype, shape] at {_decoding.used_bytes}: {ref!r:.200}")
    offset, (_, name, shape) = _decoding.used_bytes, ref
    dtype = ARRAY_DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise MalformedMessageError("array_dtype", f"{name!r:.200} is not in {[*ARRAY_DTYPES]}")
    if len(shape) > MAX_ARRAY_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedMessageError("array_shape", f"{shape!r:.200} is not at most {MAX_ARRAY_DIMS} sizes from 0")
    num_bytes = math.prod(shape) * dtype.itemsize
    end = offset + num_bytes + -num_bytes % _ALIGNMENT_BYTES
    if end > _decoding.arrays.nbytes:
        raise MalformedMessageError("array_size", f"{name} {shape} at {offset} ends past {_decoding.arrays.nbytes}")
    _decoding.used_bytes = end
    try:
        return np.ndarray(shape, dtype, _decoding.arrays, offset)
    except (ValueError, OverflowError) as error:
        # An empty array may still claim sizes beyond what an index can hold.
        raise MalformedMessageError("array_shape", str(error)) from error
