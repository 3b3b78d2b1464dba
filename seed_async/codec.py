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


_WIRE_NAMES = {dtype: name for name, dtype in ARRAY_DTYPES.items()}


class _Arrays:
    """The array bytes of one message, how far they are used, and the whole of them as an array of each dtype asked for.

    A slice of such an array costs a third of a new array over the buffer, and an episode holds dozens.
    """

    __slots__ = ("_buffer", "num_bytes", "used_bytes", "views")

    def __init__(self, frame: Buffer) -> None:
        self._buffer = memoryview(frame).toreadonly()
        self.num_bytes = self._buffer.nbytes
        self.used_bytes = 0
        self.views: dict[str, tuple[np.ndarray, int]] = {}

    def view(self, name: object) -> tuple[np.ndarray, int]:
        """Return all bytes as an array, and its item's size. Raises MalformedMessageError for a foreign dtype."""
        dtype = ARRAY_DTYPES.get(name) if type(name) is str else None
        if type(name) is not str or dtype is None:
            raise MalformedMessageError("array_dtype", f"{name!r:.200} is not in {[*ARRAY_DTYPES]}")
        if name not in self.views:
            whole = np.ndarray((self.num_bytes // dtype.itemsize,), dtype, self._buffer)
            self.views[name] = whole, dtype.itemsize
        return self.views[name]

    def take(self, whole: np.ndarray, item_bytes: int, size: int) -> np.ndarray:
        """Return the next `size` items. Raises MalformedMessageError when the bytes do not reach."""
        start = self.used_bytes
        num_bytes = size * item_bytes
        end = start + num_bytes + -num_bytes % _ALIGNMENT_BYTES
        if end > self.num_bytes:
            raise MalformedMessageError("array_size", f"{size} items at {start} end past {self.num_bytes}")
        self.used_bytes = end
        first = start // item_bytes
        return whole[first : first + size]


_NO_ARRAYS = _Arrays(b"")


class _Decoding(threading.local):
    """The message that this thread decodes now.

    A decoder takes its hook once and costs 50 µs to build, so the hook finds it here and not in a closure.
    """

    arrays = _NO_ARRAYS


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
        name = _WIRE_NAMES.get(value.dtype)
        if name is None:
            raise TypeError(f"{type(message).__name__} holds an array of {value.dtype.str}, not of {[*ARRAY_DTYPES]}")
        ref = (offset, name, value.shape)
        content = value.tobytes()
        chunks.append(content)
        offset += len(content)
        if num_padding := -offset % _ALIGNMENT_BYTES:
            chunks.append(bytes(num_padding))
            offset += num_padding
        return ref

    body = msgspec.msgpack.encode(message, enc_hook=array_to_ref)
    return [body, b"".join(chunks)] if chunks else [body]


def decode(frames: Sequence[Buffer], types: Any = AnyMessage) -> Message:
    """Return the message in `frames`, which must be of `types` (a message type or a union of them).

    Arrays are read-only views of frame 1. Raises MalformedMessageError and nothing else for bad input.
    """
    if len(frames) not in (1, 2):
        raise MalformedMessageError("frame_count", f"{len(frames)} frames; a message has 1 or 2")
    arrays = _decoding.arrays = _Arrays(frames[1] if len(frames) == 2 else b"")
    try:
        message = cast(Message, _decoder(types).decode(frames[0]))
        num_unused = arrays.num_bytes - arrays.used_bytes
    except msgspec.ValidationError as error:
        raise MalformedMessageError("schema", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError("msgpack", str(error)) from error
    except RecursionError as error:
        raise MalformedMessageError("nesting", "the body is nested too deeply") from error
    finally:
        _decoding.arrays = _NO_ARRAYS
    if num_unused:
        raise MalformedMessageError("array_size", f"{num_unused} array bytes are not referenced")
    return message


@functools.cache
def _decoder(types: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(types, dec_hook=_ref_to_array)


def _ref_to_array(_kind: type, ref: Any) -> np.ndarray:
    """Arrays are the only type that msgspec does not know itself; `ref` may be anything that msgpack can say."""
    arrays = _decoding.arrays
    try:
        offset, name, (size,) = ref
        whole, item_bytes = arrays.views[name]
    except (TypeError, ValueError, KeyError):
        return _any_ref_to_array(arrays, ref)
    start = arrays.used_bytes
    if offset != start or type(size) is not int or size < 0:
        return _any_ref_to_array(arrays, ref)
    # The same as `take`, without the call: this runs once for each array of each message.
    end = start + (size * item_bytes + _ALIGNMENT_BYTES - 1 & -_ALIGNMENT_BYTES)
    if end > arrays.num_bytes:
        return _any_ref_to_array(arrays, ref)
    arrays.used_bytes = end
    first = start // item_bytes
    return whole[first : first + size]


def _any_ref_to_array(arrays: _Arrays, ref: Any) -> np.ndarray:
    """The same for the first array of a dtype, for more or fewer dimensions than one, and for what is no reference."""
    if type(ref) is not list or len(ref) != 3 or ref[0] != arrays.used_bytes or type(ref[2]) is not list:
        raise MalformedMessageError("array_ref", f"no [offset, dtype, shape] at {arrays.used_bytes}: {ref!r:.200}")
    _, name, shape = ref
    whole, item_bytes = arrays.view(name)
    if len(shape) > MAX_ARRAY_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedMessageError("array_shape", f"{shape!r:.200} is not at most {MAX_ARRAY_DIMS} sizes from 0")
    flat = arrays.take(whole, item_bytes, math.prod(shape))
    try:
        return flat.reshape(shape)
    except (ValueError, OverflowError) as error:
        # An empty array may still claim sizes beyond what an index can hold.
        raise MalformedMessageError("array_shape", str(error)) from error
