"""The codec: exact round trips, and one error type for everything that is no message."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.codec import ARRAY_DTYPES, AnyMessage, MalformedMessageError, decode, encode
from seed_async.messages import (
    Ack,
    AnalysisJobs,
    Beat,
    GenerateReply,
    GenerateRequest,
    Lease,
    LeaseGrant,
    Trajectory,
    Turn,
)
from seed_async.ports import Sampling


def make_turn(num_tokens: int) -> Turn:
    return Turn(
        observation="You see a mug.",
        response="<think>…</think><action>take mug</action> 🙂",
        action="take mug",
        parsed=True,
        valid=True,
        prompt_ids=np.arange(num_tokens + 3, dtype=np.int32),
        response_ids=np.arange(num_tokens, dtype=np.int32),
        behaviour_logprob=-np.linspace(0, 1, num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, 7, dtype=np.int32),
    )


def make_trajectory(num_turns: int = 3, num_tokens: int = 5) -> Trajectory:
    return Trajectory.of(
        [make_turn(num_tokens) for _ in range(num_turns)],
        trajectory_id="t",
        lease_id="l",
        group_id="g",
        member=0,
        actor="a",
        incarnation="i",
        task_id="x",
        task="find the mug",
        task_type="look",
        vocabulary="small",
        task_line="l",
        status="won",
        episode_return=1.0,
        started_at_s=1.0,
        ended_at_s=2.0,
    )


def make_reply(**arrays: Any) -> GenerateReply:
    fields: dict[str, Any] = {"token_ids": np.arange(3, dtype=np.int32)}
    fields |= {"logprobs": np.zeros(3, np.float32), "versions": np.zeros(3, np.int32)} | arrays
    return GenerateReply(request_id="r", finish_reason="stop", cached_tokens=0, **fields)


def body_with(reference: Any) -> bytes:
    """The body of a reply whose first array has another reference."""
    fields = msgspec.msgpack.decode(encode(make_reply())[0])
    return msgspec.msgpack.encode(fields | {"token_ids": reference})


def reason_of(frames: list[Any], types: Any = AnyMessage) -> str:
    with pytest.raises(MalformedMessageError) as caught:
        decode(frames, types)
    return caught.value.reason


def test_a_trajectory_survives_the_round_trip() -> None:
    sent = make_trajectory()
    got = decode(encode(sent))
    assert isinstance(got, Trajectory)
    assert (got.trajectory_id, got.status, got.episode_return) == ("t", "won", 1.0)
    for mine, theirs in zip(sent.turns, got.turns, strict=True):
        assert mine.response == theirs.response
        for name in ("prompt_ids", "response_ids", "behaviour_logprob", "versions"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype


def test_a_message_without_arrays_is_one_frame_and_any_number_of_arrays_makes_two() -> None:
    assert len(encode(Ack())) == 1
    assert len(encode(make_trajectory(num_turns=50))) == 2


@given(
    dtype=st.sampled_from(sorted(ARRAY_DTYPES)),
    shape=st.lists(st.integers(0, 4), max_size=4),
    flip=st.booleans(),
)
def test_every_allowed_dtype_shape_and_memory_order_survives(dtype: str, shape: list[int], flip: bool) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    array = array.T if flip else array
    got = decode(encode(make_reply(token_ids=array, logprobs=np.ones(1, np.float32))))
    assert isinstance(got, GenerateReply)
    assert got.token_ids.shape == array.shape
    np.testing.assert_array_equal(got.token_ids, array)
    np.testing.assert_array_equal(got.logprobs, [1])


def test_decoded_arrays_are_read_only_even_over_a_writable_buffer() -> None:
    frames = encode(make_reply())
    got = decode([frames[0], memoryview(bytearray(frames[1]))])
    assert isinstance(got, GenerateReply)
    with pytest.raises(ValueError, match="read-only"):
        got.token_ids[0] = 1


def test_a_change_after_encoding_does_not_reach_the_frames() -> None:
    ids = np.arange(3, dtype=np.int32)
    frames = encode(make_reply(token_ids=ids))
    ids[:] = 9
    got = decode(frames)
    assert isinstance(got, GenerateReply)
    assert got.token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.array(["a"]), np.zeros(2, ">i4"), np.zeros(2, np.complex64)]
)
def test_an_array_outside_the_allowed_dtypes_is_refused_by_the_sender(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="GenerateReply holds an array"):
        encode(make_reply(token_ids=array))


def test_a_message_of_another_type_is_refused() -> None:
    assert reason_of(encode(Ack()), Beat) == "schema"
    assert reason_of([msgspec.msgpack.encode({"type": "Nonsense"})]) == "schema"
    assert isinstance(decode(encode(Ack()), Ack | Beat), Ack)


def test_an_unknown_field_is_refused_at_any_depth() -> None:
    assert reason_of([msgspec.msgpack.encode({"type": "Ack", "status": "accepted", "surprise": 1})]) == "schema"
    lease = Lease(lease_id="l", group_id="g", member=0, task_index=0, seed=0)
    fields = msgspec.msgpack.decode(encode(LeaseGrant(leases=(lease,)))[0])
    fields["leases"][0]["surprise"] = 1
    assert reason_of([msgspec.msgpack.encode(fields)]) == "schema"


@pytest.mark.parametrize("cut", [1, 4, 20])
def test_a_truncated_array_frame_is_refused(cut: int) -> None:
    body, arrays = encode(make_trajectory())
    assert reason_of([body, arrays[:-cut]]) == "array_size"


def test_array_bytes_that_nothing_refers_to_are_refused() -> None:
    body, arrays = encode(make_trajectory())
    assert reason_of([body, bytes(arrays) + bytes(8)]) == "array_size"
    assert reason_of([encode(Ack())[0], b"x"]) == "array_size"


@pytest.mark.parametrize("num_frames", [0, 3, 100])
def test_another_number_of_frames_is_refused(num_frames: int) -> None:
    assert reason_of([b"x"] * num_frames) == "frame_count"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (None, "array_ref"),
        ([0, "<i4"], "array_ref"),
        ([8, "<i4", [3]], "array_ref"),
        ([-8, "<i4", [3]], "array_ref"),
        (["0", "<i4", [3]], "array_ref"),
        ([0, "<i4", 3], "array_ref"),
        ([0, "|O", [2]], "array_dtype"),
        ([0, ["<i4"], [3]], "array_dtype"),
        ([0, "<i4", [-3]], "array_shape"),
        ([0, "<i4", [True]], "array_shape"),
        ([0, "<i4", [1, 1, 1, 1, 3]], "array_shape"),
        ([0, "<i4", [0, 2**63]], "array_shape"),
        ([0, "<i4", [2**63, 2**63]], "array_size"),
        ([0, "<i4", [100]], "array_size"),
    ],
)
def test_a_wrong_array_reference_is_refused_by_its_reason(reference: Any, reason: str) -> None:
    assert reason_of([body_with(reference), encode(make_reply())[1]]) == reason


def test_deep_nesting_is_refused_without_exhausting_the_stack() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    body = msgspec.msgpack.encode({"type": "GenerateReply", "token_ids": msgspec.Raw(deep)})
    assert reason_of([body]) == "nesting"


def test_text_that_is_not_utf_8_is_refused() -> None:
    assert reason_of([bytes(encode(Ack(detail="abc"))[0]).replace(b"abc", b"\xff\xff\xff")]) == "msgpack"


@given(frames=st.lists(st.binary(max_size=64), max_size=3))
def test_random_frames_raise_nothing_but_the_one_error(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessageError):
        decode(frames)


@given(data=st.data())
def test_a_message_with_flipped_bytes_decodes_or_raises_the_one_error(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(AnalysisJobs(trajectories=(make_trajectory(1, 2),)))]
    frame = frames[0]
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = decode([bytes(frame) for frame in frames])
    except MalformedMessageError as error:
        assert error.reason
    else:
        assert isinstance(got, AnyMessage)


def test_images_travel_as_their_bytes_and_a_request_without_any_is_as_it_was() -> None:
    """So that the version of the protocol stays."""
    fields: dict[str, Any] = {"request_id": "r", "prompt_ids": np.arange(5, dtype=np.int32), "kind": "act"}
    fields["sampling"] = Sampling(temperature=0.5, max_new_tokens=3)
    images = (b"\x89PNG\x00", bytes(range(256)) * 9)
    whole = decode(encode(GenerateRequest(**fields, images=images)))
    assert isinstance(whole, GenerateRequest) and whole.images == images
    np.testing.assert_array_equal(whole.prompt_ids, fields["prompt_ids"])
    plain = encode(GenerateRequest(**fields))
    assert set(msgspec.msgpack.decode(plain[0])) == {"type", *fields}
    again = decode(plain)
    assert isinstance(again, GenerateRequest) and again.images == ()
    with pytest.raises(MalformedMessageError, match="images"):
        decode([msgspec.msgpack.encode(msgspec.msgpack.decode(plain[0]) | {"images": ["text"]}), *plain[1:]])
