"""When a policy server may change its weights: at once, or after the requests that run have finished.

`continue`: at once; the tokens of a running request carry the version that sampled each of them. `finish`: the requests
that run end under the old version, new ones wait meanwhile, and a deadline bounds both.
"""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

InFlight = Literal["continue", "finish"]
Update = TypeVar("Update")


@dataclass
class FlipGate(Generic[Update]):
    """Holds the newest verified version until it may be loaded. The time is passed in."""

    mode: InFlight
    finish_timeout_s: float
    _waiting: Update | None = None
    _deadline_s: float = 0.0

    @property
    def holds_requests(self) -> bool:
        """Whether new requests have to wait for the version that is about to be loaded."""
        return self._waiting is not None

    def offer(self, update: Update, now_s: float) -> None:
        """Take a verified version; a newer one replaces it under the first one's deadline."""
        if self._waiting is None:
            self._deadline_s = now_s + self.finish_timeout_s
        self._waiting = update

    def take(self, num_running: int, now_s: float) -> Update | None:
        """Return the version to load now, once; None while requests finish or when there is none."""
        if self.mode == "finish" and num_running > 0 and now_s < self._deadline_s:
            return None
        update, self._waiting = self._waiting, None
        return update
