"""When a policy server changes its weights: at once, or after the running requests, never later than its deadline."""

from seed_async.actors.weight_flip import FlipGate


def test_continue_takes_a_version_at_once() -> None:
    """Whatever runs goes on under it."""
    gate: FlipGate[str] = FlipGate("continue", 10.0)
    assert gate.take(3, 0.0) is None
    gate.offer("v1", 0.0)
    assert gate.take(3, 0.0) == "v1"
    assert gate.take(3, 0.0) is None and not gate.holds_requests


def test_finish_lets_the_running_requests_end_and_holds_new_ones() -> None:
    """Then the version is taken, once."""
    gate: FlipGate[str] = FlipGate("finish", 10.0)
    gate.offer("v1", 0.0)
    assert gate.take(2, 1.0) is None and gate.holds_requests
    assert gate.take(1, 9.0) is None
    assert gate.take(0, 9.5) == "v1"
    assert not gate.holds_requests and gate.take(0, 10.0) is None


def test_finish_ends_at_its_deadline_with_the_newest_version() -> None:
    """A newer version does not extend the wait."""
    gate: FlipGate[str] = FlipGate("finish", 10.0)
    gate.offer("v1", 0.0)
    gate.offer("v2", 8.0)
    assert gate.take(1, 9.9) is None
    assert gate.take(1, 10.0) == "v2"
    gate.offer("v3", 20.0)
    assert gate.take(1, 29.0) is None, "the next version has a deadline of its own"
