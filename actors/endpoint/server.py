"""The HTTP side: a thread for each connection, which reads a request, leaves it at the desk and writes what comes back.

GET /health, GET /v1/models, POST /v1/chat/completions. Bounded everywhere: connections, bytes of a body, open requests,
and the time that a client may take. A client that leaves takes its request with it.
"""

import hmac
import json
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, cast
from uuid import uuid4

from seed_async.actors.endpoint.chat import (
    BadRequestError,
    ChatRequest,
    Frame,
    VisibleText,
    chunk,
    completion,
    error_body,
    logprob_content,
    read_request,
    usage,
    usage_chunk,
)
from seed_async.actors.endpoint.desk import DeskClosedError, DeskFullError, RequestDesk, Ticket
from seed_async.ports import Generation, RequestRefusedError, Sampled
from seed_async.text import ChatTokenizer

MAX_BODY_BYTES = 2 << 20
MAX_IDLE_CONNECTIONS = 64
"""Connections beside those whose requests are open: clients keep one for their next request."""
IDLE_TIMEOUT_S = 30.0
"""A client that sends or takes nothing for this long is dropped."""
LOOK_INTERVAL_S = 0.1
"""How often a waiting thread looks whether its client is still there."""
SILENT_S = 30.0
"""An engine's loop that has not turned for this long is not healthy."""


class Served(NamedTuple):
    """What is served: `context` tokens hold prompt and response; `model` is its name; without `api_key` to anybody."""

    model: str
    tokenizer: ChatTokenizer
    context: int
    api_key: str | None = None


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        """`status` is HTTP's, `kind` and `code` are OpenAI's."""
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, code)


class ClientLeftError(Exception):
    """Nobody reads the answer."""


class Endpoint:
    """Listens from its making until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        served: Served,
        desk: RequestDesk,
        max_open: int,
        on_answer: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_answer` is told the status of each answer, on any thread. Raises OSError when the port is taken."""
        self._server = _Server((host, port), served, desk, max_open + MAX_IDLE_CONNECTIONS, on_answer)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="http")
        self._thread.start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        served: Served,
        desk: RequestDesk,
        max_connections: int,
        on_answer: Callable[[int], None],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.served, self.desk, self.on_answer = served, desk, on_answer
        self.started_s = int(time.time())
        self._places = threading.BoundedSemaphore(max_connections)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, unless there are too many; then the client finds the connection closed."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have left; the rest goes to stderr, which is the log."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S
    server_version, sys_version = "seed-async", ""

    @property
    def _owner(self) -> _Server:
        return cast(_Server, self.server)

    def do_GET(self) -> None:
        """Answer a question about the server."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a chat."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not logged."""

    def _answer(self, work: Callable[[], None]) -> None:
        try:
            work()
        except HttpError as error:
            self.close_connection = True  # a body may not have been read
            self._send(error.status, error.body)
        except ClientLeftError:
            self.close_connection = True

    def _get(self) -> None:
        owner = self._owner
        if self.path == "/health":
            silent = owner.desk.silent_s() > SILENT_S
            state = {
                "status": "stalled" if silent else "ok",
                "model": owner.served.model,
                "version": owner.desk.version,
            }
            self._send(503 if silent else 200, state)
            return
        self._check_key()
        if self.path != "/v1/models":
            raise HttpError(404, f"there is nothing at {self.path}")
        entry = {
            "id": owner.served.model,
            "object": "model",
            "created": owner.started_s,
            "owned_by": "seed-async",
            "version": f"v{owner.desk.version}",
            "max_model_len": owner.served.context,
        }
        self._send(200, {"object": "list", "data": [entry]})

    def _post(self) -> None:
        self._check_key()
        if self.path != "/v1/chat/completions":
            raise HttpError(404, f"there is nothing at {self.path}")
        served, desk, content = self._owner.served, self._owner.desk, self._read_body()
        try:
            request = read_request(content, served.model, served.tokenizer, served.context)
        except BadRequestError as error:
            raise HttpError(404 if error.code == "model_not_found" else 400, str(error), code=error.code) from error
        try:
            ticket = desk.ask(
                request.prompt_ids, request.sampling, stream=bool(request.body.stream), images=request.images
            )
        except DeskFullError as error:
            raise HttpError(429, f"{error}: try again later", "rate_limit_error", "rate_limit_exceeded") from error
        try:
            self._reply(request, ticket)
        finally:
            ticket.left.set()

    def _check_key(self) -> None:
        expected = self._owner.served.api_key
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if expected is not None and not hmac.compare_digest(given.encode(), expected.encode()):
            raise HttpError(401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")

    def _read_body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            # A web page may send other types anywhere unasked; for this one the browser asks first, and is refused.
            raise HttpError(415, "send the body as Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise HttpError(411, "give the length of the body as Content-Length")
        if int(length) > MAX_BODY_BYTES:
            raise HttpError(413, f"the body has {length} bytes; the limit is {MAX_BODY_BYTES}")
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            raise ClientLeftError
        return content

    def _reply(self, request: ChatRequest, ticket: Ticket) -> None:
        frame = Frame(f"chatcmpl-{uuid4().hex}", int(time.time()), self._owner.served.model)
        text = VisibleText(self._owner.served.tokenizer.text_stream(), request.sampling.stop)
        if request.body.stream:
            self._reply_stream(request, ticket, frame, text)
            return
        (generation,) = (event for event in self._events(ticket) if isinstance(event, Generation))
        shown = text.push(generation.token_ids) + text.rest()
        logprobs = logprob_content(text.pieces, generation.logprobs) if request.body.logprobs else None
        version, counts = _version(generation), _counts(generation)
        self._send(200, completion(frame, version, shown, generation.finish_reason, logprobs, counts))

    def _reply_stream(self, request: ChatRequest, ticket: Ticket, frame: Frame, text: VisibleText) -> None:
        """Server-sent events; the connection ends with them. A refusal before the first of them is a plain answer."""
        events = self._events(ticket)
        event = next(events)
        self._start_stream(frame)
        try:
            while not isinstance(event, Generation):
                self._show(request, frame, text, event)
                event = next(events)
        except HttpError as error:
            self._event(error.body)
            return
        new = slice(ticket.num_shown, None)
        self._show(request, frame, text, Sampled(event.token_ids[new], event.logprobs[new]))
        version, rest, options = _version(event), text.rest(), request.body.stream_options
        self._event(chunk(frame, version, {"content": rest} if rest else {}, event.finish_reason))
        if options is not None and options.include_usage:
            self._event(usage_chunk(frame, version, _counts(event)))
        self._write(b"data: [DONE]\n\n")

    def _start_stream(self, frame: Frame) -> None:
        self.close_connection = True
        self._owner.on_answer(200)
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")):
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self._event(chunk(frame, self._owner.desk.version, {"role": "assistant", "content": ""}))

    def _show(self, request: ChatRequest, frame: Frame, text: VisibleText, sampled: Sampled) -> None:
        """Send what ids add, if they add anything that the client wants to see."""
        known = len(text.pieces)
        new = text.push(sampled.token_ids)
        scored = None
        if request.body.logprobs and sampled.token_ids.size:
            scored = logprob_content(text.pieces[known:], sampled.logprobs)
        if new or scored:
            self._event(chunk(frame, self._owner.desk.version, {"content": new}, logprobs=scored))

    def _events(self, ticket: Ticket) -> Iterator[Sampled | Generation]:
        """What the engine's thread hands over, up to the end of the response. Raises HttpError, ClientLeftError."""
        while True:
            try:
                event = ticket.events.get(timeout=LOOK_INTERVAL_S)
            except queue.Empty:
                if self._client_left():
                    raise ClientLeftError from None
                continue
            if isinstance(event, DeskClosedError):
                raise HttpError(503, str(event), "server_error")
            if isinstance(event, RequestRefusedError):
                raise HttpError(400, str(event))
            yield event
            if isinstance(event, Generation):
                return

    def _client_left(self) -> bool:
        """Whether the client has closed its end; what it may have sent beyond its request stays unread."""
        readable, _, _ = select.select([self.connection], [], [], 0.0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def _event(self, data: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _write(self, content: bytes) -> None:
        try:
            self.wfile.write(content)
        except (ConnectionError, TimeoutError) as error:
            raise ClientLeftError from error

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self._owner.on_answer(status)
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)
        except (ConnectionError, TimeoutError):
            self.close_connection = True


def _version(generation: Generation) -> int:
    """The newest version that sampled a token of the response."""
    return int(generation.versions.max()) if generation.versions.size else -1


def _counts(generation: Generation) -> dict[str, Any]:
    return usage(generation.prompt_tokens, generation.token_ids.size, generation.cached_tokens)
