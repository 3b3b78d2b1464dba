"""Images over HTTP: OpenAI's content parts, only as data: URLs, and a clear refusal by a text model."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.chat import IMAGE, tiny_vision_chat
from tests.fakes.endpoints import RunningEndpoint, ask, chat_body
from tests.reference.vision_models import MERGE, PATCH, picture

WIDTH, HEIGHT = 40, 16
POSITIONS = WIDTH * HEIGHT // (PATCH * MERGE) ** 2


@pytest.fixture(scope="module")
def endpoint() -> Iterator[RunningEndpoint]:
    """An endpoint of a model that takes images."""
    made = RunningEndpoint(images=True)
    yield made
    made.close()


def image_part(content: bytes, kind: str = "png", **changes: Any) -> dict[str, Any]:
    """A part as OpenAI's clients send it."""
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url} | changes}


def body_of(*parts: dict[str, Any] | str, **changes: Any) -> dict[str, Any]:
    """A request with one message of parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return chat_body(messages=[{"role": "user", "content": content}], temperature=0, **changes)


def logprobs(answer: Any) -> list[float]:
    """Of the sampled tokens."""
    return [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]


def test_an_image_is_seen_where_it_stands_and_counted(endpoint: RunningEndpoint) -> None:
    """Another image gives another answer, the same one is found cached."""
    first, other = picture(WIDTH, HEIGHT, seed=1), picture(WIDTH, HEIGHT, seed=2, kind="JPEG")
    body = body_of("Task: ", image_part(first), "what is it?", logprobs=True)
    status, answer = ask(endpoint, body)
    assert status == 200, answer
    seen = f"<|user|>Task: <|vision_start|>{IMAGE}<|vision_end|>what is it?<|end|><|assistant|>"
    text = tiny_vision_chat().encode(seen)
    assert answer["usage"]["prompt_tokens"] == text.size - 1 + POSITIONS
    status, again = ask(endpoint, body)
    assert again["choices"][0]["message"] == answer["choices"][0]["message"]
    assert logprobs(again) == pytest.approx(logprobs(answer), abs=1e-4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == text.size - 2 + POSITIONS
    status, different = ask(endpoint, body_of("Task: ", image_part(other, "jpeg"), "what is it?", logprobs=True))
    assert status == 200 and logprobs(different) != pytest.approx(logprobs(answer), abs=1e-2)


def test_an_answer_about_an_image_is_the_same_streamed_to_openais_client(endpoint: RunningEndpoint) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: make setup")
    body = body_of("Task: ", image_part(picture(WIDTH, HEIGHT, seed=1)), "what is it?")
    status, answer = ask(endpoint, body)
    assert status == 200, answer
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", timeout=60, max_retries=0)
    chunks = list(client.chat.completions.create(**body, stream=True))
    shown = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert shown == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}], "nothing fetched"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}], "nothing fetched"),
        ([image_part(b"", "svg+xml")], "only data:image/png"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}], "is not"),
        ([image_part(picture(16, 16), detail="high")], "detail"),
        ([image_part(b"no image")], "image 0 is no PNG or JPEG"),
        ([image_part(picture(16, 16)), IMAGE], "1 images for 2 placeholders"),
        ([IMAGE], "0 images for 1 placeholders"),
        (["mug ", image_part(picture(40, 32))] * 15, "the context of 256 leaves no room"),
    ],
)
def test_images_that_cannot_be_served_are_refused(endpoint: RunningEndpoint, parts: list[Any], named: str) -> None:
    """With the reason, and nothing is opened but what the request holds."""
    status, answer = ask(endpoint, body_of(*parts))
    assert status == 400 and named in answer["error"]["message"], answer


def test_a_text_model_says_that_it_takes_no_images() -> None:
    """Before its template is asked to render any."""
    running = RunningEndpoint()
    status, answer = ask(running, body_of("Task: ", image_part(picture(16, 16))))
    running.close()
    assert status == 400 and answer["error"]["message"] == "this model takes no images"


def test_parts_of_text_only_are_one_text(endpoint: RunningEndpoint) -> None:
    """As before, with either kind of model."""
    messages = [{"role": "user", "content": "Task: put it."}]
    whole = ask(endpoint, chat_body(messages=messages, temperature=0))[1]
    parted = ask(endpoint, body_of("Task: ", "put it."))[1]
    assert whole["choices"] == parted["choices"]
