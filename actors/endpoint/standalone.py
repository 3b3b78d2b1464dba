"""`seed-async serve`: one model folder behind the endpoint, without a run.

Consumes requests of the endpoint's desk. Waits for them. Produces responses. Unblocked by clients. Stops when told.
"""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig

from seed_async.actors.endpoint.desk import RequestDesk
from seed_async.actors.endpoint.server import Endpoint, Served
from seed_async.actors.engines.opening import open_engine
from seed_async.api_key import read_api_key
from seed_async.text import ChatTokenizer
from seed_async.topology_roles import Http, Policy

IDLE_WAIT_S = 0.2
DEFAULT_CONTEXT_TOKENS = 4096
"""Where the model was made for more: each slot may hold as many keys and values."""


def serve_until_signalled(model: Path, policy: Policy, http: Http, max_context_tokens: int | None) -> None:
    """Serve until Ctrl-C or SIGTERM, and print where. Raises OSError. For the main thread."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    torch.set_num_threads(policy.threads)

    def say(port: int, name: str) -> None:
        print(f"serving {name} at http://{http.host}:{port}/v1", flush=True)

    serve_model(model, policy, http, max_context_tokens, stop, say)


def serve_model(
    model: Path,
    policy: Policy,
    http: Http,
    max_context_tokens: int | None,
    stop: threading.Event,
    on_open: Callable[[int, str], None],
) -> None:
    """Serve the folder `model` until `stop`. `on_open` is told the port and the model's name. Raises OSError."""
    config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    context = min(max_context_tokens or DEFAULT_CONTEXT_TOKENS, int(config.max_position_embeddings))
    tokenizer = ChatTokenizer.load(model)
    engine = open_engine(policy, model, tokenizer, max_context_tokens=context, max_waiting=http.max_open)
    desk = RequestDesk(http.max_open)
    desk.exchange(engine, engine.health().version)
    served = Served(model.resolve().name, tokenizer, context, read_api_key(http))
    endpoint = Endpoint(http.host, http.port, served, desk, http.max_open)
    on_open(endpoint.port, served.model)
    while not stop.is_set():
        desk.exchange(engine, engine.health().version)
        for generation in engine.step():
            desk.answer(generation)
        if not desk.num_running:
            desk.wait(IDLE_WAIT_S)
    desk.close()
    endpoint.close()
