"""Each process is shown the CUDA devices that it is meant to have, and no others."""

import pytest
from pydantic import ValidationError

from seed_async.placement import place_gpus, visible_devices
from seed_async.topology import Topology

MODEL = {"path": "model"}


def topology(method: str = "seed", transport: str = "shm", **roles: dict[str, object]) -> Topology:
    return Topology.model_validate(
        {"method": method, "model": MODEL, "roles": roles, "weights": {"transport": transport}}
    )


def test_on_the_cpu_nobody_is_given_a_device() -> None:
    assert place_gpus(topology()) == {}


def test_devices_are_dealt_out_in_order_and_the_ranks_see_each_others() -> None:
    placed = place_gpus(
        topology(
            learner={"device": "cuda", "ranks": 3},
            policy={"device": "cuda", "engine": "vllm", "replicas": 2, "vllm": {"tensor_parallel": 2}},
            analyzers={"device": "cuda"},
        )
    )
    assert placed == {
        ("learner", 0): (0, 1, 2),
        ("learner", 1): (0, 1, 2),
        ("learner", 2): (0, 1, 2),
        ("policy", 0): (3, 4),
        ("policy", 1): (5, 6),
        ("analyzer", 0): (7,),
    }


def test_named_devices_stand_and_the_others_go_around_them() -> None:
    placed = place_gpus(
        topology(
            learner={"device": "cuda", "ranks": 2},
            policy={"device": "cuda", "replicas": 2, "gpus": [1, 0]},
            analyzers={"device": "cuda", "gpus": [1]},
        )
    )
    assert placed["policy", 0] == (1,) and placed["policy", 1] == (0,)
    assert placed["analyzer", 0] == (1,), "shared with a policy server, because both name it"
    assert placed["learner", 0] == (2, 3)


def test_a_sender_by_nccl_has_a_device_behind_those_of_the_workers() -> None:
    options = {"tensor_parallel": 2, "weight_transfer": "nccl"}
    placed = place_gpus(topology(policy={"device": "cuda", "engine": "vllm", "vllm": options}))
    assert placed == {("policy", 0): (0, 1, 2)}


@pytest.mark.parametrize(
    ("method", "expected"), [("seed", 3), ("grpo", 2), ("seed_static", 2)], ids=["seed", "grpo", "seed_static"]
)
def test_nccl_gives_one_to_each_that_sends_or_receives(method: str, expected: int) -> None:
    placed = place_gpus(topology(method, "nccl"))
    assert sorted(gpu for gpus in placed.values() for gpu in gpus) == list(range(expected))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"policy": {"gpus": [0]}}, "have no effect with device cpu"),
        ({"policy": {"device": "cuda", "replicas": 2, "gpus": [0]}}, "names 1 devices, the role needs 2"),
        ({"learner": {"device": "cuda", "ranks": 2, "gpus": [0, 0]}}, "each rank needs a device of its own"),
        (
            {"policy": {"device": "cuda", "engine": "vllm", "vllm": {"tensor_parallel": 2}, "gpus": [3, 3]}},
            "are those of one process, and not different",
        ),
        ({"policy": {"engine": "vllm", "vllm": {"weight_transfer": "ipc"}}}, "ipc is for device cuda; device is cpu"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(roles: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        topology(**roles)


def test_numbers_count_among_the_devices_that_the_launcher_sees() -> None:
    assert visible_devices((0, 2), {}) == "0,2"
    assert visible_devices((0, 2), {"CUDA_VISIBLE_DEVICES": "4, 5,GPU-8f3a"}) == "4,GPU-8f3a"
    assert visible_devices((), {"CUDA_VISIBLE_DEVICES": "4"}) == ""
    with pytest.raises(IndexError):
        visible_devices((0,), {"CUDA_VISIBLE_DEVICES": ""})
