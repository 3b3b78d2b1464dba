"""A real engine on a tiny random model behind a real endpoint, on a thread that advances it as a server does."""

import http.client
import json
import threading
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from seed_async.actors.endpoint.desk import RequestDesk
from seed_async.actors.endpoint.server import Endpoint, Served
from seed_async.actors.engines.attention import ATTENTION_NAME, register_slotted_attention
from seed_async.actors.engines.images import ImageReader
from seed_async.actors.engines.torch_engine import TorchEngine
from tests.fakes.chat import tiny_chat, tiny_vision_chat
from tests.reference.vision_models import image_processor, tiny_vision_model

MODEL = "tiny"
CONTEXT = 256


def text_engine(max_slots: int = 4, version: int = 12, max_waiting: int = 64) -> TorchEngine:
    """An engine whose ids are those of the tiny tokenizer."""
    register_slotted_attention()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_chat().vocabulary_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    return TorchEngine(
        model,
        max_slots=max_slots,
        max_context_tokens=CONTEXT,
        max_waiting=max_waiting,
        version=version,
        open_stream=tiny_chat().text_stream,
    )


def vision_engine(max_slots: int = 4) -> TorchEngine:
    """The same for a model with a vision tower."""
    chat = tiny_vision_chat()
    assert chat.image_token_id is not None
    model = tiny_vision_model(
        "qwen2_5_vl", vocabulary=chat.vocabulary_size, placeholder=chat.image_token_id, context=CONTEXT
    )
    return TorchEngine(
        model,
        max_slots=max_slots,
        max_context_tokens=CONTEXT,
        version=12,
        open_stream=chat.text_stream,
        image_reader=ImageReader(chat.image_token_id, image_processor()),
    )


class RunningEndpoint:
    """Serves until `close`; `pace_s` is slept between two steps, so that a test can be in time."""

    def __init__(
        self, *, api_key: str | None = None, max_open: int = 64, max_slots: int = 4, images: bool = False
    ) -> None:
        """Start at a free port; with `images` the model is one that takes them."""
        self.engine = vision_engine(max_slots) if images else text_engine(max_slots)
        self.desk, self.pace_s = RequestDesk(max_open), 0.0
        self.statuses: list[int] = []
        served = Served(MODEL, tiny_vision_chat() if images else tiny_chat(), CONTEXT, api_key)
        self.desk.exchange(self.engine, 12)
        self._endpoint = Endpoint("127.0.0.1", 0, served, self.desk, max_open, self.statuses.append)
        self.url = f"http://127.0.0.1:{self._endpoint.port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while not self._stop.is_set():
            self.desk.exchange(self.engine, self.engine.health().version)
            for generation in self.engine.step():
                self.desk.answer(generation)
            time.sleep(self.pace_s)
            if not self.desk.num_running:
                self.desk.wait(0.02)
        self.desk.close()

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until the engine has nothing left; raises AssertionError."""
        deadline_s = time.monotonic() + timeout_s
        while self.desk._num_open or self.engine.health().running:
            assert time.monotonic() < deadline_s, self.engine.health()
            time.sleep(0.02)

    def stop_engine(self) -> None:
        """End the loop as a server does at its end."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """End everything."""
        self.stop_engine()
        self._endpoint.close()


def chat_body(**changes: Any) -> dict[str, Any]:
    """A request."""
    messages = [{"role": "user", "content": "Task: put a clean mug on the shelf."}]
    return {"model": MODEL, "messages": messages, "max_tokens": 12, "seed": 3} | changes


def ask(
    running: RunningEndpoint, body: Any = None, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any]:
    """Status and JSON of an answer; GET without a body."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    connection.request("GET" if content is None else "POST", path, content, headers)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer
