"""A policy server's own loop, with a real publisher and real clients in other threads."""

import threading
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import structlog

from seed_async.actors.policy_server import PolicyServer
from seed_async.learner.init_model import init_model
from seed_async.learner.scoring import load_policy, score_canary
from seed_async.messages import Ack, Cancel, GenerateReply, GenerateRequest, Message
from seed_async.metrics import Metrics
from seed_async.ports import Sampling
from seed_async.pulse import Pulse
from seed_async.role import RoleContext
from seed_async.rundir import RunDir
from seed_async.timeline import Timeline
from seed_async.topology import Topology
from seed_async.transport import Client
from seed_async.weights import open_publisher
from tests.fakes.chat import write_corpus
from tests.reference.generate_reference import weights_of

WAIT_S = 60.0
ROOM = {"analysis": {"max_context_tokens": 2048, "max_output_tokens": 64}}
LONG = Sampling(temperature=1.0, max_new_tokens=200, seed=3)
PROMPT = np.arange(5, dtype=np.int32)


def context_of(role: str, topology: Topology, stop: threading.Event) -> RoleContext:
    """What a process of this role is given."""
    run_dir = RunDir(topology.run_dir)
    return RoleContext(
        role=role,
        index=0,
        incarnation="a",
        topology=topology,
        run_dir=run_dir,
        metrics=Metrics(role, "0"),
        timeline=Timeline(run_dir.timeline / f"{role}.jsonl", role, "0"),
        pulse=Pulse(run_dir.pulse(f"{role}-0")),
        log=structlog.get_logger(),
        stop=stop,
    )


@pytest.fixture(scope="module")
def asking() -> Iterator[RoleContext]:
    """The context of those who ask a policy server that serves version 0."""
    size = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48, "vocabulary_size": 340}
    with TemporaryDirectory() as name:
        topology = Topology.model_validate({"run": {"dir": name}, "model": {"init": size}} | ROOM)
        stop = threading.Event()
        run_dir = RunDir(topology.run_dir)
        for folder in (run_dir.stage1, run_dir.sockets()):
            folder.mkdir(parents=True)
        init_model(topology, run_dir.model, write_corpus(run_dir.stage1))
        policy = load_policy(run_dir.model)
        publisher = open_publisher(context_of("learner", topology, stop))
        thread = threading.Thread(target=PolicyServer(context_of("policy", topology, stop)).run)
        thread.start()
        publisher.publish(0, weights_of(policy), score_canary(policy, "float32"))
        assert publisher.wait_acknowledged(0, "policy", 1, WAIT_S) == ()
        yield context_of("actor", topology, stop)
        stop.set()
        thread.join(WAIT_S)
        publisher.close()


def connect(context: RoleContext) -> Client:
    return context.connect(context.run_dir.policy_endpoint(context.topology, 0), "policy-0")


def ask(client: Client, request_id: str) -> int:
    return client.submit(GenerateRequest(request_id=request_id, prompt_ids=PROMPT, sampling=LONG, kind="act"))


def answer(client: Client, sequence: int) -> Message:
    replies: dict[int, Message] = {}
    while sequence not in replies:
        replies |= dict(client.poll(WAIT_S))
    return replies[sequence]


def test_a_request_that_is_asked_again_over_a_new_connection_is_answered_there(
    asking: RoleContext,
) -> None:
    first, second = connect(asking), connect(asking)
    try:
        ask(first, "r1")
        first.call(Cancel(request_id="none"), WAIT_S)  # it has come in before this one
        reply = answer(second, ask(second, "r1"))
        assert isinstance(reply, GenerateReply) and reply.error == ""
        assert reply.token_ids.size == LONG.max_new_tokens and set(reply.versions) == {0}
    finally:
        first.close()
        second.close()


def test_a_cancelled_request_ends_early_and_other_messages_are_refused(asking: RoleContext) -> None:
    client = connect(asking)
    try:
        sequence = ask(client, "r2")
        assert client.call(Cancel(request_id="r2"), WAIT_S) == Ack()
        reply = answer(client, sequence)
        assert isinstance(reply, GenerateReply) and reply.finish_reason == "cancelled"
        assert reply.token_ids.size < LONG.max_new_tokens
        refused = client.call(Ack(), WAIT_S)
        assert isinstance(refused, Ack) and refused.status == "refused"
    finally:
        client.close()
