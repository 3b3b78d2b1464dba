"""The HTTP endpoint: chats of OpenAI's own client, refusals with their reasons, and clients that leave."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from seed_async.actors.endpoint.chat import BadRequestError, VisibleText, read_request
from seed_async.actors.endpoint.desk import DeskFullError, RequestDesk
from seed_async.actors.endpoint.server import MAX_BODY_BYTES
from seed_async.ports import Sampling
from tests.fakes.chat import tiny_chat
from tests.fakes.endpoints import CONTEXT, MODEL, RunningEndpoint, ask, chat_body, text_engine


@pytest.fixture(scope="module")
def endpoint() -> Iterator[RunningEndpoint]:
    """One endpoint for the tests that leave it as it was."""
    made = RunningEndpoint()
    yield made
    made.close()


def sampled_text(running: RunningEndpoint, **changes: Any) -> str:
    """The text of an answer."""
    return str(ask(running, chat_body(**changes))[1]["choices"][0]["message"]["content"])


def test_openais_client_gets_text_usage_logprobs_and_the_version(endpoint: RunningEndpoint) -> None:
    """A whole answer and a streamed one are the same."""
    openai = pytest.importorskip("openai", reason="openai is not installed: make setup")
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", timeout=60, max_retries=0)
    (model,) = client.models.list().data
    assert model.id == MODEL and model.version == "v12"
    asked = chat_body(logprobs=True)
    whole = client.chat.completions.create(**asked)
    assert whole.system_fingerprint == "v12" and whole.choices[0].finish_reason == "length"
    prompt = tiny_chat().first_prompt(asked["messages"][0]["content"])
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt.size, 12)
    scored = whole.choices[0].logprobs.content
    assert len(scored) == 12 and all(each.logprob <= 0 for each in scored)
    assert "".join(each.token for each in scored) == whole.choices[0].message.content
    again = client.chat.completions.create(**asked)
    assert again.choices == whole.choices, "the seed decides"
    assert again.usage.prompt_tokens_details.cached_tokens == prompt.size - 1

    endpoint.pace_s = 0.02
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    endpoint.pace_s = 0.0
    parts = [each.choices[0] for each in chunks if each.choices]
    assert len(parts) > 4, "it came in parts"
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    streamed = [each for part in parts if part.logprobs for each in part.logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in scored]
    assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in scored], abs=1e-4)
    assert chunks[-1].usage.completion_tokens == 12


def test_a_stop_string_ends_the_text_before_it(endpoint: RunningEndpoint) -> None:
    """In both kinds of answers."""
    whole = sampled_text(endpoint, max_tokens=40)
    stop = whole[8:11]
    status, answer = ask(endpoint, chat_body(max_tokens=40, stop=[stop, "never said"]))
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == whole[: whole.find(stop)]
    assert answer["usage"]["completion_tokens"] < 40


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({"n": 2}, 400, "n: Input should be 1"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"tools": []}, 400, "tools: Extra inputs are not permitted"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": "mug " * CONTEXT}]}, 400, f"context of {CONTEXT}"),
        ({"model": "other"}, 404, "'other' is not served here, only 'tiny'"),
        ({"temperature": 1e-30}, 400, "temperature 1e-30"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_reason(
    endpoint: RunningEndpoint, changes: dict[str, Any], status: int, named: str
) -> None:
    """In the form that OpenAI's clients read."""
    found, answer = ask(endpoint, chat_body(**changes))
    assert (
        found == status and named in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000])
def test_what_is_no_request_is_refused_and_the_server_lives(endpoint: RunningEndpoint, content: bytes) -> None:
    """Whatever the bytes are."""
    assert ask(endpoint, content)[0] == 400
    assert ask(endpoint, path="/health") == (200, {"status": "ok", "model": MODEL, "version": 12})


def test_a_body_without_length_or_beyond_the_limit_is_refused(endpoint: RunningEndpoint) -> None:
    """Before it is read."""
    assert ask(endpoint, b"{}", **{"Content-Length": str(MAX_BODY_BYTES + 1)})[0] == 413
    assert ask(endpoint, b"{}", **{"Content-Length": "-1"})[0] == 411
    assert ask(endpoint, b"{}", **{"Content-Type": "text/plain"})[0] == 415, "what a web page may send anywhere"
    assert ask(endpoint, path="/nothing")[0] == 404


def test_the_key_is_asked_for_everywhere_but_at_health() -> None:
    """A server that is reached from outside has one."""
    running = RunningEndpoint(api_key="s3cret")
    try:
        assert ask(running, path="/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer \u00e9"}):
            status, answer = ask(running, chat_body(), **headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert ask(running, path="/v1/models", Authorization="Bearer s3cret")[0] == 200
        assert ask(running, chat_body(), Authorization="Bearer s3cret")[0] == 200
        assert running.statuses == [200, 401, 401, 401, 200, 200]
    finally:
        running.close()


def send(running: RunningEndpoint, body: dict[str, Any]) -> socket.socket:
    """Send a request and read nothing."""
    host, port = running.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(stream: bool) -> None:
    """While it runs, and while it waits for a slot."""
    running = RunningEndpoint(max_slots=1)
    running.pace_s = 0.05
    try:
        clients = [send(running, chat_body(max_tokens=200, stream=stream)) for _ in range(3)]
        deadline_s = time.monotonic() + 20
        while running.engine.health().running + running.engine.health().waiting < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for client in clients:
            client.close()
        running.wait_idle()
        assert running.engine.health().generated_tokens < 200
    finally:
        running.close()


def test_more_requests_than_may_be_open_are_told_to_come_again() -> None:
    """The rest is served."""
    running = RunningEndpoint(max_open=2, max_slots=1)
    running.pace_s = 0.05
    try:
        clients = [send(running, chat_body(max_tokens=100)) for _ in range(2)]
        deadline_s = time.monotonic() + 20
        while running.desk._num_open < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        status, answer = ask(running, chat_body())
        assert status == 429 and answer["error"]["message"] == "2 requests are open already: try again later"
        for client in clients:
            client.close()
        running.wait_idle()
        running.pace_s = 0.0
        assert ask(running, chat_body())[0] == 200
    finally:
        running.close()


def test_a_server_that_ends_tells_those_that_wait() -> None:
    """Instead of leaving them."""
    running = RunningEndpoint()
    running.pace_s = 0.1
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(running, chat_body(max_tokens=200))))
    thread.start()
    deadline_s = time.monotonic() + 20
    while not running.engine.health().running and time.monotonic() < deadline_s:
        time.sleep(0.01)
    running.close()
    thread.join(timeout=20)
    assert answers[0][0] == 503 and "ending" in answers[0][1]["error"]["message"]


def test_many_requests_at_once_are_all_answered_and_leave_nothing(endpoint: RunningEndpoint) -> None:
    """Twenty threads on four slots."""
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(ask(endpoint, chat_body(seed=number))[0]))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 20
    endpoint.wait_idle()


def test_the_desk_counts_a_request_until_the_engine_has_ended_it() -> None:
    """Also one whose client left before the engine saw it."""
    desk, engine = RequestDesk(1), text_engine()
    sampling = Sampling(temperature=0.0, max_new_tokens=2)
    first = desk.ask(np.arange(3, dtype=np.int32), sampling, stream=False)
    with pytest.raises(DeskFullError, match="1 requests are open"):
        desk.ask(np.arange(3, dtype=np.int32), sampling, stream=False)
    first.left.set()
    desk.exchange(engine, 0)
    second = desk.ask(np.arange(3, dtype=np.int32), sampling, stream=False)
    desk.exchange(engine, 0, admit=False)
    assert engine.health().waiting == 0, "held back while weights wait"
    desk.exchange(engine, 0)
    (done,) = [each for _ in range(2) for each in engine.step()]
    assert desk.answer(done) and not desk.answer(done)
    assert second.events.get(timeout=1) is done


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    """And shown when it does not."""
    texts = iter(["go <", "/act", "or <", "/action", "> on"])
    text = VisibleText(lambda _: next(texts), ("</action>",))
    one = np.zeros(1, dtype=np.int32)
    assert [text.push(one) for _ in range(5)] == ["go ", "", "</actor ", "", ""]
    assert text.rest() == ""
    texts = iter(["a <", "/a"])
    text = VisibleText(lambda _: next(texts), ("</action>",))
    assert text.push(np.zeros(2, dtype=np.int32)) + text.rest() == "a </a"


def test_without_a_limit_the_response_may_fill_the_context() -> None:
    """And a negative seed is a seed."""
    body = chat_body(seed=-1)
    del body["max_tokens"]
    request = read_request(json.dumps(body).encode(), MODEL, tiny_chat(), CONTEXT)
    assert request.sampling.max_new_tokens == CONTEXT - request.prompt_ids.size
    assert request.sampling.seed == (1 << 63) - 1
    with pytest.raises(BadRequestError, match="leaves no room"):
        read_request(json.dumps(body).encode(), MODEL, tiny_chat(), request.prompt_ids.size)
