"""What receivers have said last, shared by the thread that hears them and the thread that waits for them."""

import threading
import time
from collections.abc import Callable

from seed_async.messages import WeightsManifest, WeightsOrders, WeightsPoll

FORGET_AFTER_S = 60.0
"""A receiver reports every second or so; one that was silent for this long is dead or has another name now."""


class ReportBoard:
    """The latest report of each receiver, and the orders for all of them. Thread safe, and bounded: the dead go."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Nobody has said anything, nothing is announced."""
        self._changed = threading.Condition(threading.RLock())
        self._clock_s = clock_s
        self._latest: dict[str, tuple[float, WeightsPoll]] = {}
        self._fresh: dict[str, WeightsPoll] = {}
        self._orders = WeightsOrders(pinned=-1, manifest=None)

    def note(self, report: WeightsPoll) -> None:
        """Keep a report; forget receivers that have been silent for too long."""
        now_s = self._clock_s()
        with self._changed:
            self._latest[report.receiver] = (now_s, report)
            self._fresh[report.receiver] = report
            for name in [name for name, (at_s, _) in self._latest.items() if now_s - at_s > FORGET_AFTER_S]:
                self.drop(name)
            self._changed.notify_all()

    def drop(self, receiver: str) -> None:
        """Forget a receiver until it reports again."""
        with self._changed:
            self._latest.pop(receiver, None)
            self._fresh.pop(receiver, None)

    def take(self, timeout_s: float) -> list[WeightsPoll]:
        """Return what is new since the last call, waiting up to `timeout_s` for anything."""
        with self._changed:
            if not self._fresh:
                self._changed.wait(timeout_s)
            fresh, self._fresh = list(self._fresh.values()), {}
            return fresh

    def ages_s(self) -> dict[str, float]:
        """Return the seconds since each receiver was heard."""
        now_s = self._clock_s()
        with self._changed:
            return {name: now_s - at_s for name, (at_s, _) in self._latest.items()}

    def announce(self, manifest: WeightsManifest) -> None:
        """Change the orders: the newest version."""
        with self._changed:
            self._orders = WeightsOrders(pinned=self._orders.pinned, manifest=manifest)

    def pin(self, version: int) -> None:
        """Change the orders: the version in service, which never goes back."""
        with self._changed:
            self._orders = WeightsOrders(pinned=max(version, self._orders.pinned), manifest=self._orders.manifest)

    def orders(self) -> WeightsOrders:
        """Return the present orders."""
        with self._changed:
            return self._orders


def has_news(report: WeightsPoll, orders: WeightsOrders) -> bool:
    """Whether `orders` say anything that the sender of `report` does not know."""
    key = orders.manifest.key if orders.manifest else ""
    return key != report.seen or orders.pinned != report.pinned
