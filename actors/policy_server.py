"""Policy server: samples responses for actors and the evaluation actor at the newest weights.

Consumes generation requests and weight versions. Waits for the first published version before it serves anything.
Produces responses whose tokens carry the version that sampled them. Unblocked by requests and by the publisher.
Stops on SIGTERM; whoever waits for a response asks the next incarnation again.
"""

import time

import numpy as np

from seed_async.actors.endpoint.desk import RequestDesk
from seed_async.actors.endpoint.server import Endpoint, Served
from seed_async.actors.engines.opening import open_engine
from seed_async.actors.weight_flip import FlipGate
from seed_async.actors.weight_loader import open_loader
from seed_async.api_key import read_api_key
from seed_async.messages import Ack, Cancel, GenerateReply, GenerateRequest, Ping
from seed_async.ports import Generation, RequestRefusedError
from seed_async.reporting import report_engine
from seed_async.role import RoleContext
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology
from seed_async.transport import Request
from seed_async.weights import open_receiver
from seed_async.weights.receiver import Update

IDLE_WAIT_S = 0.02
MAX_CONTEXT_SLACK_TOKENS = 8
"""Room beyond the longest context of a rollout, so that the engine's own limit is never the tighter one."""


class PolicyServer:
    """One engine behind one socket."""

    def __init__(self, context: RoleContext) -> None:
        """Load the initial checkpoint as a skeleton; its weights are replaced before anything is served."""
        topology, run_dir = context.topology, context.run_dir
        self._context = context
        self._tokenizer = ChatTokenizer.load(run_dir.initial_model(topology))
        self._engine = open_engine(
            topology.roles.policy,
            run_dir.initial_model(topology),
            self._tokenizer,
            max_waiting=_most_requests(topology),
            max_context_tokens=topology.rollout.max_context_tokens + MAX_CONTEXT_SLACK_TOKENS,
            version=-1,
            lora=topology.model.served_adapters,
        )
        context.pulse.step()
        self._weights = open_receiver(context, "policy")
        self._loader = open_loader(context, topology.roles.policy, self._engine, self._weights)
        self._flip: FlipGate[Update] = FlipGate(topology.weights.in_flight, topology.weights.finish_timeout_s)
        self._desk: RequestDesk | None = None
        self._open: dict[str, Request] = {}
        self._held: list[Request] = []

    def run(self) -> None:
        """Serve until told to stop."""
        context = self._context
        while not context.stop.is_set() and self._loader.version < 0:
            context.pulse.beat()
            self._take_weights(wait_s=0.2)
        server = context.serve(context.run_dir.policy_endpoint(context.topology, context.index))
        endpoint = self._open_endpoint()
        while not context.stop.is_set():
            context.pulse.beat()
            self._take_weights(wait_s=0.0)
            for request in server.poll(0.0 if self._num_running else IDLE_WAIT_S):
                context.pulse.beat()  # the images of a request are decoded here
                self._accept(request)
            if self._desk is not None:
                self._desk.exchange(self._engine, self._loader.version, admit=not self._flip.holds_requests)
            for generation in self._engine.step():
                self._answer(generation)
            self._report()
        if endpoint is not None:
            endpoint.close()
        server.close()
        self._weights.close()

    @property
    def _num_running(self) -> int:
        return len(self._open) + (self._desk.num_running if self._desk is not None else 0)

    def _open_endpoint(self) -> Endpoint | None:
        """Serve chats over HTTP where the topology asks for it."""
        context, topology = self._context, self._context.topology
        http = topology.roles.policy.http
        if http is None:
            return None
        self._desk = RequestDesk(http.max_open)
        self._desk.exchange(self._engine, self._loader.version)
        served = Served(topology.run.name, self._tokenizer, topology.rollout.max_context_tokens, read_api_key(http))
        endpoint = Endpoint(
            http.host,
            http.port + context.index if http.port else 0,
            served,
            self._desk,
            http.max_open,
            lambda status: context.metrics.counter("http_requests_total", status=str(status)).inc(),
        )
        context.log.info("serving chats", host=http.host, port=endpoint.port, model=served.model)
        return endpoint

    def _take_weights(self, wait_s: float) -> None:
        received = self._weights.poll(wait_s)
        if received is not None:
            self._flip.offer(received, time.monotonic())
        update = self._flip.take(self._num_running, time.monotonic())
        if update is None:
            return
        with (
            self._context.timeline.span("load_weights", update[0].version),
            self._context.metrics.histogram("weight_sync_seconds").time(),
        ):
            self._loader.load(update)
        held, self._held = self._held, []
        for request in held:
            self._accept(request)

    def _accept(self, request: Request) -> None:
        message = request.message
        if isinstance(message, Ping):
            request.reply(Ack())
        elif isinstance(message, Cancel):
            self._cancel(message.request_id)
            request.reply(Ack())
        elif isinstance(message, GenerateRequest) and message.request_id in self._open:
            # Asked again over a new connection, the old one having been lost in a long step: the answer goes there.
            self._open[message.request_id] = request
        elif self._flip.holds_requests:
            self._held.append(request)
        elif isinstance(message, GenerateRequest):
            try:
                self._engine.submit(
                    message.request_id, message.prompt_ids, message.sampling, message.kind, message.images
                )
            except RequestRefusedError as error:
                request.reply(_refusal(message.request_id, str(error)))
            else:
                self._open[message.request_id] = request
        else:
            request.reply(Ack(status="refused", detail="a policy server answers GenerateRequest only"))

    def _cancel(self, request_id: str) -> None:
        """Its asker has gone to another server."""
        self._engine.cancel(request_id)
        self._held = [
            each
            for each in self._held
            if not (isinstance(each.message, GenerateRequest) and each.message.request_id == request_id)
        ]

    def _answer(self, generation: Generation) -> None:
        if self._desk is not None and self._desk.answer(generation):
            return
        self._open.pop(generation.request_id).reply(
            GenerateReply(
                request_id=generation.request_id,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                versions=generation.versions,
                finish_reason=generation.finish_reason,
                cached_tokens=generation.cached_tokens,
            )
        )

    def _report(self) -> None:
        report_engine(self._context.metrics, self._engine.health())


def _most_requests(topology: Topology) -> int:
    """Requests that can be open at once when every asker uses this server: a healthy run is never refused one."""
    evaluation = topology.roles.evaluation
    playing = topology.roles.actors.replicas * topology.roles.actors.games_each
    http = topology.roles.policy.http
    return playing + (evaluation.concurrency if evaluation else 0) + (http.max_open if http else 0)


def _refusal(request_id: str, error: str) -> GenerateReply:
    nothing = np.zeros(0, dtype=np.int32)
    return GenerateReply(
        request_id=request_id,
        token_ids=nothing,
        logprobs=np.zeros(0, dtype=np.float32),
        versions=nothing,
        finish_reason="cancelled",
        cached_tokens=0,
        error=error,
    )


def run(context: RoleContext) -> None:
    """Run one policy server."""
    import torch

    torch.set_num_threads(context.topology.roles.policy.threads)
    PolicyServer(context).run()
