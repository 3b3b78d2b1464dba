"""A receiver's end of a control plane that has no other end."""

from seed_async.messages import WeightsOrders, WeightsPoll


class HeardLink:
    """Keeps what the receiver has reported last."""

    def __init__(self) -> None:
        """Nothing was heard."""
        self.heard: WeightsPoll | None = None

    def report(self, report: WeightsPoll) -> None:
        """Keep it."""
        self.heard = report

    def orders(self, timeout_s: float) -> WeightsOrders | None:
        """Nobody orders."""
        return None

    def close(self) -> None:
        """Leave."""
