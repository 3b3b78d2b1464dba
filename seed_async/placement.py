"""Which CUDA devices each process of a run is given."""

from collections.abc import Mapping
from itertools import count, islice

from seed_async.topology import Topology

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable by which the driver shows a process some devices only, numbered anew from 0."""
ProcessName = tuple[str, int]
"""Role and index."""


def place_gpus(topology: Topology) -> dict[ProcessName, tuple[int, ...]]:
    """Return the device numbers of every process that needs some.

    What the topology names stands. The rest goes, in the order learner, policy servers, analyzers, to the next devices
    that are named nowhere. All ranks of the learner see all of its devices: rank r uses the r-th. With
    `weights.transport: nccl` a process on the CPU gets one too, to receive by.
    """
    roles, nccl = topology.roles, int(topology.weights.transport == "nccl")
    named = {*roles.learner.gpus, *(gpu for _, _, settings in topology.engine_roles for gpu in settings.gpus)}
    free = (number for number in count() if number not in named)
    placed: dict[ProcessName, tuple[int, ...]] = {}
    needed = roles.learner.ranks if roles.learner.device == "cuda" else nccl
    if needed:
        all_of_them = roles.learner.gpus or tuple(islice(free, needed))
        placed |= {("learner", rank): all_of_them for rank in range(roles.learner.ranks)}
    for role, _, settings in topology.engine_roles:
        to_receive = 0 if role == "analyzer" and topology.pins_analyzer else nccl
        each, numbers = settings.gpus_each or to_receive, iter(settings.gpus or free)
        if each:
            placed |= {(role, index): tuple(islice(numbers, each)) for index in range(settings.replicas)}
    return placed


def visible_devices(gpus: tuple[int, ...], environment: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child that is given `gpus`, numbers among those that this process sees.

    Raises IndexError for a number beyond them, which `check_machine` finds first.
    """
    shown = environment.get(CUDA_VISIBLE_DEVICES)
    if shown is None:
        return ",".join(map(str, gpus))
    own = [name.strip() for name in shown.split(",") if name.strip()]
    return ",".join(own[number] for number in gpus)
