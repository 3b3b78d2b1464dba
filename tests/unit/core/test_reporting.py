"""What is refused is counted by reason and named in the log, and a flood of it is no flood of lines."""

from structlog import get_logger
from structlog.testing import capture_logs

from seed_async.metrics import Metrics
from seed_async.reporting import RejectionLog


def test_every_message_is_counted_and_one_a_second_is_logged() -> None:
    metrics = Metrics("buffer", "0")
    with capture_logs() as logs:
        rejections = RejectionLog(get_logger(), metrics, interval_s=3600)
        for number in range(1000):
            rejections.note(f"peer-{number}", "schema" if number % 2 else "header", "x" * 10_000)
    assert len(logs) == 1
    assert (logs[0]["peer"], logs[0]["reason"], len(logs[0]["detail"])) == ("peer-0", "header", 200)
    counter = metrics.registry.get_sample_value
    assert counter("seed_async_rejected_frames_total", {"reason": "schema"}) == 500
    assert counter("seed_async_rejected_frames_total", {"reason": "header"}) == 500


def test_the_next_line_tells_how_many_were_left_out() -> None:
    with capture_logs() as logs:
        rejections = RejectionLog(get_logger(), Metrics("buffer", "0"), interval_s=0)
        rejections.note("a", "schema", "")
        rejections._next_s = float("inf")
        rejections.note("b", "schema", "")
        rejections.note("c", "schema", "")
        rejections._next_s = 0
        rejections.note("d", "schema", "")
    assert [(line["peer"], line["left_out"]) for line in logs] == [("a", 0), ("d", 2)]
