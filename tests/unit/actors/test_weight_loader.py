"""The canary: an engine that does not compute what the learner computed never serves a version, and is named."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from prometheus_client import generate_latest

from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.actors.weight_loader import EngineBrokenError, WeightLoader
from seed_async.learner.scoring import load_policy, score_canary
from seed_async.messages import Canary
from seed_async.metrics import Metrics
from seed_async.ports import Sampling, ScoringEngine
from seed_async.topology import Lora
from seed_async.transport import Client, Server
from seed_async.weights import (
    Deadlines,
    SegmentSource,
    SegmentStore,
    WeightPublisher,
    WeightReceiver,
    WeightsRefusedError,
)
from seed_async.weights.canary import canary_gap_nats, canary_text
from seed_async.weights.control_zmq import ZmqControl, ZmqLink
from tests.fakes.engines import ForgetsATensor, RuinsATensor
from tests.reference.generate_reference import (
    VOCABULARY,
    add_random_adapters,
    greedy_reference,
    plain_twin,
    score_reference,
    tiny_model,
    weights_of,
)

PROMPT = np.arange(5, dtype=np.int32)
TOLERANCE_NATS = 1e-3
WAIT_S = 20.0


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices."""
    torch.set_num_threads(1)


def published(version: int) -> tuple[dict[str, np.ndarray], Canary]:
    """The weights of a version and what they give the canary, by the slow reference."""
    model, text = tiny_model(seed=version), canary_text(VOCABULARY)
    logprobs = score_reference(plain_twin(model), text.prompt_ids, text.response_ids)
    return weights_of(model), Canary(vocabulary=VOCABULARY, logprobs=tuple(logprobs.tolist()))


class Served:
    """An engine with its loader, on a thread that takes every version as a policy server does."""

    def __init__(self, engine: ScoringEngine, endpoint: str, name: str) -> None:
        """Connect."""
        self.engine, self.metrics = engine, Metrics("policy", "0")
        self._client = Client(endpoint, name)
        self.receiver = WeightReceiver(ZmqLink(self._client), SegmentSource(), name, "policy", Deadlines())
        self.logs: list[Any] = []
        log = structlog.wrap_logger(None, processors=[self._keep])
        self.loader = WeightLoader(engine, self.receiver, name, TOLERANCE_NATS, self.metrics, log)
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _keep(self, _: Any, level: str, event: Any) -> Any:
        self.logs.append(dict(event) | {"level": level})
        raise structlog.DropEvent

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() and self.error is None:
            update = self.receiver.poll(0.02)
            if update is not None:
                try:
                    self.loader.load(update)
                except EngineBrokenError as error:
                    self.error = error

    def stop(self) -> None:
        """Stand still, so that a test may look."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """Leave."""
        self.stop()
        self.receiver.close()

    def alarms(self) -> list[Any]:
        """What was logged as an error."""
        return [line for line in self.logs if line["level"] == "error"]

    def sample(self, name: str) -> float | None:
        """A metric's value."""
        return self.metrics.registry.get_sample_value(f"seed_async_{name}")


class Setup:
    """A publisher with its engines."""

    def __init__(self, folder: Path) -> None:
        """Listen below `folder`."""
        self.endpoint = f"ipc://{folder}/weights"
        self.publisher = WeightPublisher(ZmqControl(Server(self.endpoint)), SegmentStore(folder / "segments"))
        self.served: list[Served] = []

    def serve(self, engine: ScoringEngine, name: str = "policy-0") -> Served:
        """Start an engine."""
        served = Served(engine, self.endpoint, name)
        self.served.append(served)
        served.start()
        return served

    def publish(self, version: int, replicas: int = 1) -> tuple[str, ...]:
        """Publish and wait."""
        self.publisher.publish(version, *published(version))
        return self.publisher.wait_acknowledged(version, "policy", replicas, WAIT_S)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """Give a publisher; everything is closed at the end."""
    made = Setup(tmp_path)
    yield made
    for served in made.served:
        served.close()
    made.publisher.close()


def make(kind: type[TorchEngine] = TorchEngine) -> Any:
    """An engine without weights in service."""
    return kind(tiny_model(seed=99), max_slots=2, max_context_tokens=64, version=-1)


def greedy(engine: TorchEngine, num_tokens: int = 6) -> tuple[list[int], list[int]]:
    """Ids and versions of a greedy response."""
    engine.submit("greedy", PROMPT, Sampling(temperature=0.0, max_new_tokens=num_tokens), "act")
    done = [each for _ in range(num_tokens) for each in engine.step()]
    return done[0].token_ids.tolist(), done[0].versions.tolist()


def expected(version: int) -> list[int]:
    """The greedy response of a version's weights."""
    return greedy_reference(plain_twin(tiny_model(seed=version)), PROMPT, 6)[0]


def test_a_healthy_engine_serves_each_version_and_reports_its_gap(setup: Setup) -> None:
    """Numeric noise, in a metric."""
    served = setup.serve(make())
    for version in (0, 1):
        assert setup.publish(version) == ()
    served.stop()
    gap = served.sample("canary_gap_nats")
    assert gap is not None and 0 < gap < 1e-4
    assert b"canary_refusals" not in generate_latest(served.metrics.registry)
    assert served.loader.version == 1 and greedy(served.engine) == (expected(1), [1] * 6)


def test_an_engine_that_forgets_a_tensor_is_refused_by_name_and_goes_on_with_the_old_weights(setup: Setup) -> None:
    """The version is not acknowledged: with nobody else to serve it, the publisher says so at once."""
    engine = make(ForgetsATensor)
    served = setup.serve(engine)
    assert setup.publish(0) == ()
    engine.faults = 1_000_000
    started_s = time.monotonic()
    with pytest.raises(WeightsRefusedError, match="version 1: policy-0 found another canary than the learner, 3 times"):
        setup.publish(1)
    assert time.monotonic() - started_s < WAIT_S / 2
    served.stop()
    (alarm, *_) = served.alarms()
    assert (alarm["engine"], alarm["version"], alarm["serves"]) == ("policy-0", 1, 0)
    assert alarm["gap_nats"] > TOLERANCE_NATS
    assert served.sample("canary_refusals_total") == 3
    assert served.loader.version == 0 and greedy(engine) == (expected(0), [0] * 6)


def test_a_load_that_fails_once_is_repeated_and_no_token_is_sampled_in_between(setup: Setup) -> None:
    """The publisher stages the version again."""
    engine = make(ForgetsATensor)
    served = setup.serve(engine)
    setup.publish(0)
    engine.faults = 1
    assert setup.publish(1) == ()
    served.stop()
    assert len(served.alarms()) == 1 and setup.publisher.num_refused == 1
    assert greedy(engine) == (expected(1), [1] * 6)


def test_an_engine_whose_first_load_is_refused_serves_nothing_until_one_is_right(setup: Setup) -> None:
    """There is nothing to go back to."""
    engine = make(ForgetsATensor)
    engine.faults = 2
    served = setup.serve(engine)
    assert setup.publish(0) == ()
    served.stop()
    assert [alarm["serves"] for alarm in served.alarms()] == [-1, -1]
    assert greedy(engine) == (expected(0), [0] * 6)


def test_requests_that_run_go_on_with_the_old_weights_after_a_refusal(setup: Setup) -> None:
    """Their cached keys are computed again."""
    engine = make(ForgetsATensor)
    served = setup.serve(engine)
    setup.publish(0)
    served.stop()
    engine.submit("runs", PROMPT, Sampling(temperature=0.0, max_new_tokens=6), "act")
    engine.step()
    tensors, canary = published(1)
    manifest = setup.publisher.publish(1, tensors, canary)
    engine.faults = 1
    assert not served.loader.load((manifest, tensors))
    done = [each for _ in range(5) for each in engine.step()]
    assert done[0].token_ids.tolist() == expected(0) and done[0].versions.tolist() == [0] * 6


def test_beside_a_healthy_engine_the_broken_one_is_given_up_by_name(setup: Setup) -> None:
    """The run goes on, and the next version is tried again."""
    broken, healthy = make(ForgetsATensor), make()
    setup.serve(broken, "policy-0"), setup.serve(healthy, "policy-1")
    assert setup.publish(0, replicas=2) == ()
    broken.faults = 1_000_000
    assert set(setup.publish(1, replicas=2)) == {"policy-0"}
    broken.faults = 0
    assert setup.publish(2, replicas=2) == ()
    for served in setup.served:
        served.stop()
    assert greedy(broken) == greedy(healthy) == (expected(2), [2] * 6)


def test_an_engine_that_is_wrong_even_with_the_old_weights_ends_its_process(setup: Setup) -> None:
    """Nothing it could serve is right."""
    engine = make(RuinsATensor)
    served = setup.serve(engine)
    setup.publish(0)
    engine.ruined = True
    setup.publisher.publish(1, *published(1))
    deadline_s = time.monotonic() + WAIT_S
    while served.error is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert isinstance(served.error, EngineBrokenError) and "policy-0 went back from version 1 to 0" in str(served.error)


def test_refused_adapters_are_replaced_by_those_in_service(setup: Setup, tmp_path: Path) -> None:
    """The base weights are never touched."""
    lora, text = Lora(rank=3), canary_text(VOCABULARY)
    tiny_model().save_pretrained(tmp_path)
    models = [load_policy(tmp_path) for _ in range(2)]
    versions = [add_random_adapters(model, lora, seed) for seed, model in enumerate(models)]
    canary = score_canary(models[0], "float32")
    engine = TorchEngine(load_model(tmp_path, lora=lora), max_slots=1, max_context_tokens=64, version=-1)
    served = setup.serve(engine)
    setup.publisher.publish(0, versions[0], canary)
    setup.publisher.wait_acknowledged(0, "policy", 1, WAIT_S)
    setup.publisher.publish(1, versions[1], canary)
    with pytest.raises(WeightsRefusedError):
        setup.publisher.wait_acknowledged(1, "policy", 1, WAIT_S)
    served.stop()
    assert served.loader.version == engine.health().version == 0
    assert canary_gap_nats(canary.logprobs, engine.score(*text)) < 1e-5
    engine.load_weights(1, versions[1])
    assert canary_gap_nats(score_canary(models[1], "float32").logprobs, engine.score(*text)) < 1e-5
    assert canary_gap_nats(canary.logprobs, engine.score(*text)) > 0.1


def test_the_learner_and_the_torch_engine_agree_on_the_canary(tmp_path: Path) -> None:
    """Two forward passes that share no code."""
    model = tiny_model(seed=3)
    model.save_pretrained(tmp_path)
    canary = score_canary(load_policy(tmp_path), "float32")
    text = canary_text(canary.vocabulary)
    engine = TorchEngine(model, max_slots=1, max_context_tokens=16)
    assert canary_gap_nats(canary.logprobs, engine.score(text.prompt_ids, text.response_ids)) < 1e-4


def test_scoring_leaves_the_requests_that_run_alone() -> None:
    """Neither advanced nor disturbed, however few slots there are."""
    engine = TorchEngine(tiny_model(), max_slots=1, max_context_tokens=32)
    engine.submit("runs", PROMPT, Sampling(temperature=0.0, max_new_tokens=6), "act")
    engine.step()
    before, text = engine.health(), canary_text(VOCABULARY)
    found = engine.score(text.prompt_ids, text.response_ids)
    np.testing.assert_allclose(found, score_reference(plain_twin(tiny_model()), *text), atol=1e-4)
    assert engine.health() == before
    done = [each for _ in range(5) for each in engine.step()]
    assert done[0].token_ids.tolist() == expected(0)


def test_the_canary_is_a_function_of_the_vocabulary_alone() -> None:
    """And its ids are in it."""
    text = canary_text(300)
    assert (text.prompt_ids.size, text.response_ids.size) == (24, 16)
    np.testing.assert_array_equal(np.concatenate(text), np.concatenate(canary_text(300)))
    assert max(map(np.max, text)) < 300 and len(set(text.response_ids.tolist())) > 8


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_a_gap_that_is_no_number_is_beyond_every_tolerance(wrong: float) -> None:
    """NaN compares as false."""
    assert canary_gap_nats([-1.0, -2.0], np.array([-1.0, wrong])) == float("inf")
    assert canary_gap_nats([-1.0, -2.0], np.array([-1.0, -2.5])) == pytest.approx(0.5)
