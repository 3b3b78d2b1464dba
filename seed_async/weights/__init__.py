"""Weights as a verified transaction between one publisher and many receivers, without torch at import.

`publisher` and `receiver` hold the rules. Below them are two seams (`seams`): the control plane says who holds what
and what is newest (`control_zmq`, `control_rpc`); the transport brings the bytes (`segments` for shared memory,
`broadcast` for gloo and NCCL). `opening` builds both ends from a topology.
"""

from seed_async.weights.manifest import WeightsCorruptError, WeightsGoneError, build_manifest, verified_arrays
from seed_async.weights.opening import open_publisher, open_receiver
from seed_async.weights.publisher import WeightPublisher, WeightsRefusedError
from seed_async.weights.receiver import WeightReceiver
from seed_async.weights.seams import ControlLink, ControlPlane, Deadlines, ReceiverRole, WeightSource, WeightTransport
from seed_async.weights.segments import KEPT_SEGMENTS, SegmentSource, SegmentStore, read_segment

__all__ = [
    "KEPT_SEGMENTS",
    "ControlLink",
    "ControlPlane",
    "Deadlines",
    "ReceiverRole",
    "SegmentSource",
    "SegmentStore",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSource",
    "WeightTransport",
    "WeightsCorruptError",
    "WeightsGoneError",
    "WeightsRefusedError",
    "build_manifest",
    "open_publisher",
    "open_receiver",
    "read_segment",
    "verified_arrays",
]
