"""The seams of weight publication: what a control plane and a transport must do, and the deadlines of the phases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from seed_async.messages import WeightsManifest, WeightsOrders, WeightsPoll
from seed_async.weights.manifest import ByteBuffer

ReceiverRole = Literal["policy", "analyzer"]


@dataclass(frozen=True)
class Deadlines:
    """How long each phase of a publication may take, in seconds.

    A receiver that is late for one is given up by name, as long as another one is in time.
    """

    transfer_s: float = 60.0
    """The bytes are with the receiver."""
    verify_s: float = 60.0
    """Their digest is checked."""
    acknowledge_s: float = 60.0
    """They are in use; with `in_flight: finish` the running requests end first."""


class ControlPlane(Protocol):
    """The publisher's end of the control plane. Called from one thread; none of it waits for a peer."""

    def announce(self, manifest: WeightsManifest) -> None:
        """Make `manifest` the newest version and tell every receiver, also those that come later."""
        ...

    def pin(self, version: int) -> None:
        """Tell every receiver that `version` is in service: new analyses start at it or at a newer one."""
        ...

    def reports(self, timeout_s: float) -> list[WeightsPoll]:
        """Return the latest report of each receiver that has said something new, [] when none did in time."""
        ...

    def health(self) -> Mapping[str, float]:
        """Return for each receiver the seconds since it was last heard."""
        ...

    def close(self) -> None:
        """Leave, within a deadline."""
        ...


class ControlLink(Protocol):
    """A receiver's end of the control plane. Called from one thread; none of it waits for a peer but `orders`."""

    def report(self, report: WeightsPoll) -> None:
        """Say what this receiver holds and does: the acknowledgement of a version, a refusal, a phase."""
        ...

    def orders(self, timeout_s: float) -> WeightsOrders | None:
        """Return the newest orders once, None when there are none that were not returned before."""
        ...

    def close(self) -> None:
        """Leave, within a deadline."""
        ...


class WeightTransport(Protocol):
    """The publisher's end of a transport."""

    def stage(self, version: int, tensors: Mapping[str, np.ndarray], attempt: int) -> WeightsManifest:
        """Take a copy of the tensors and offer it to every receiver; returns at once with its manifest."""
        ...

    def close(self) -> None:
        """Withdraw everything that is offered."""
        ...


class WeightSource(Protocol):
    """A receiver's end of a transport. `receive` runs on a thread of its own, one at a time, that may be abandoned."""

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Return the bytes of a version, not verified yet.

        Raises WeightsGoneError when a newer version has replaced it, WeightsCorruptError when what came cannot be it,
        TimeoutError, and ConnectionError when the transfer broke.
        """
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
