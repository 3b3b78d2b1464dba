"""The control plane over ZeroMQ: each receiver keeps one long poll open, which is also its report.

"I hold version u with digest d and have seen announcement a: what is new?" So a receiver that starts late, restarts or
was slow gets the newest version by itself, and its next poll is the acknowledgement. Nothing is ever pushed, so nobody
has to be found: a dead receiver costs nothing, and neither does one that comes.
"""

import threading
import time
from collections.abc import Mapping

from seed_async.messages import Ack, WeightsManifest, WeightsOrders, WeightsPoll
from seed_async.transport import Client, Request, Server
from seed_async.weights.board import ReportBoard, has_news

HOLD_S = 1.0
"""How long an unanswered poll is held; receivers ask again at once."""
POLL_S = 0.02


class ZmqControl:
    """The publisher's end: a thread that owns the socket and answers polls."""

    def __init__(self, server: Server) -> None:
        """Start answering; `server` belongs to the thread from now on."""
        self._server, self._board = server, ReportBoard()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weights-control")
        self._thread.start()

    def announce(self, manifest: WeightsManifest) -> None:
        """Every poll that does not know it is answered now."""
        self._board.announce(manifest)

    def pin(self, version: int) -> None:
        """Every poll that does not know it is answered now."""
        self._board.pin(version)

    def reports(self, timeout_s: float) -> list[WeightsPoll]:
        """Return the polls that have come since the last call."""
        return self._board.take(timeout_s)

    def health(self) -> Mapping[str, float]:
        """A poll comes at least every `HOLD_S` from a receiver whose loop turns."""
        return self._board.ages_s()

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        self._thread.join()

    def _serve(self) -> None:
        held: list[tuple[float, WeightsPoll, Request]] = []
        while not self._closing:
            for request in self._server.poll(POLL_S):
                if isinstance(request.message, WeightsPoll):
                    self._board.note(request.message)
                    held.append((time.monotonic() + HOLD_S, request.message, request))
                else:
                    request.reply(Ack(status="refused", detail="this endpoint answers WeightsPoll only"))
            orders = self._board.orders()
            held = [item for item in held if not self._answer(*item, orders)]
        self._server.close()

    @staticmethod
    def _answer(deadline_s: float, poll: WeightsPoll, request: Request, orders: WeightsOrders) -> bool:
        if has_news(poll, orders):
            request.reply(orders)
        elif time.monotonic() > deadline_s:
            request.reply(Ack(detail="nothing newer"))
        else:
            return False
        return True


class ZmqLink:
    """A receiver's end: one open poll at a time."""

    def __init__(self, client: Client) -> None:
        """`client` is connected to the publisher."""
        self._client = client
        self._report: WeightsPoll | None = None
        self._open: int | None = None

    def report(self, report: WeightsPoll) -> None:
        """Replace the open poll by one that says this."""
        self._report = report
        if self._open is not None:
            self._client.abandon(self._open)
        self._open = self._client.submit(report)

    def orders(self, timeout_s: float) -> WeightsOrders | None:
        """Return the answer to the open poll if there is one, and ask again."""
        if self._open is None and self._report is not None:
            self._open = self._client.submit(self._report)
        found = None
        for sequence, reply in self._client.poll(timeout_s):
            if sequence == self._open:
                self._open = None
                found = reply if isinstance(reply, WeightsOrders) else found
        return found

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()
