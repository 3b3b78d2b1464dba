"""OpenAI's chat completions as plain data: what a client may ask, and what it is answered. No threads, no sockets."""

import base64
import binascii
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from seed_async.ports import FinishReason, Sampling, TextStream
from seed_async.text import IMAGE_PART, Chat, ChatTemplateError, ChatTokenizer, MixedChat, text_part

MAX_STOP_STRINGS = 4
DEFAULT_TEMPERATURE = 1.0
_DATA_URL = re.compile(r"data:image/(png|jpeg);base64,")


class BadRequestError(ValueError):
    """A request that cannot be served; `code` is OpenAI's word for why, where there is one."""

    def __init__(self, message: str, code: str | None = None) -> None:
        """`message` is for the client."""
        super().__init__(message)
        self.code = code


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TextPart(_Strict):
    """Text in a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    """An image as it comes in JSON; nothing is fetched."""

    url: str
    detail: Literal["auto"] | None = None

    @field_validator("url")
    @classmethod
    def _holds_the_image(cls, url: str) -> str:
        if not _DATA_URL.match(url):
            raise ValueError("only data:image/png;base64,... and data:image/jpeg;base64,... are taken, nothing fetched")
        try:
            base64.b64decode(url.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"what follows base64, is not: {error}") from error
        return url

    @property
    def content(self) -> bytes:
        """The bytes of the image."""
        return base64.b64decode(self.url.partition(",")[2])


class ImagePart(_Strict):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(_Strict):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]
    name: str | None = None

    @property
    def images(self) -> list[bytes]:
        """The images, in order."""
        parts = [] if isinstance(self.content, str) else self.content
        return [part.image_url.content for part in parts if isinstance(part, ImagePart)]

    @property
    def for_template(self) -> Chat | MixedChat:
        """The message as a template takes it: parts where there is an image, one text where there is none."""
        if isinstance(self.content, str):
            return Chat(self.role, self.content)
        parts = [text_part(part.text) if isinstance(part, TextPart) else IMAGE_PART for part in self.content]
        if IMAGE_PART in parts:
            return MixedChat(self.role, tuple(parts))
        return Chat(self.role, "".join(part["text"] for part in parts))


class StreamOptions(_Strict):
    """What a stream shows beside the text."""

    include_usage: bool = False


StopString = Annotated[str, Field(min_length=1)]


class ChatBody(_Strict):
    """The body of a request. What would change the response and is not done here is refused, not ignored."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: Annotated[float, Field(ge=1, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(NamedTuple):
    """A request that can be served: `prompt_ids` int32 [P] with a placeholder for each of `images`."""

    body: ChatBody
    prompt_ids: np.ndarray
    sampling: Sampling
    images: tuple[bytes, ...] = ()


def read_request(content: bytes, model: str, tokenizer: ChatTokenizer, context: int) -> ChatRequest:
    """The request in a body of JSON, to the served `model` with a context of so many tokens. Raises BadRequestError."""
    try:
        body = ChatBody.model_validate_json(content)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()[:5]]
        raise BadRequestError("; ".join(faults)) from error
    if body.model != model:
        raise BadRequestError(f"the model {body.model!r} is not served here, only {model!r}", "model_not_found")
    images = tuple(image for message in body.messages for image in message.images)
    if images and tokenizer.image_token_id is None:
        raise BadRequestError("this model takes no images")
    try:
        prompt_ids = tokenizer.chat_prompt([message.for_template for message in body.messages])
    except ChatTemplateError as error:
        raise BadRequestError(str(error)) from error
    room = context - prompt_ids.size
    if room < 1:
        raise BadRequestError(
            f"the messages have {prompt_ids.size} tokens, the context of {context} leaves no room for a response",
            "context_length_exceeded",
        )
    wanted = body.max_completion_tokens or body.max_tokens or room
    sampling = Sampling(
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        max_new_tokens=min(wanted, room),
        seed=secrets.randbits(63) if body.seed is None else body.seed % (1 << 63),
        stop_ids=tokenizer.eos_ids,
        stop=body.stop_strings,
    )
    return ChatRequest(body, prompt_ids, sampling, images)


class VisibleText:
    """The text that a client sees of a response: what comes before the first stop string.

    What may be the beginning of one is held back until it is clear that it is not.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        """`stream` is new."""
        self._stream, self._stop = stream, tuple(stop)
        self._held, self._over = "", False
        self.pieces: list[str] = []
        """The text of each id so far, the stop strings' too."""

    def push(self, token_ids: np.ndarray) -> str:
        """Take ids int32 [T]; the text that may be shown now."""
        new = [self._stream(int(token_id)) for token_id in token_ids]
        self.pieces += new
        if self._over:
            return ""
        text = self._held + "".join(new)
        ends = [at for at in map(text.find, self._stop) if at >= 0]
        if ends:
            self._over, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` with which `string` begins."""
    return next((size for size in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:size])), 0)


class Frame(NamedTuple):
    """What every answer to one request begins with."""

    completion_id: str
    created_s: int
    model: str

    def fields(self, kind: str, version: int) -> dict[str, Any]:
        """The first fields of an answer; the version of the weights is the fingerprint."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": f"v{version}",
        }


def usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Token counts; those of the completion are what was sampled, the end-of-sequence id included."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def logprob_content(pieces: Sequence[str], logprobs: np.ndarray) -> dict[str, Any]:
    """Text and log-prob of each sampled token, at the temperature it was sampled with."""
    return {
        "content": [
            {"token": piece, "logprob": float(logprob), "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(pieces, logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion(
    frame: Frame, version: int, text: str, reason: FinishReason, logprobs: dict[str, Any] | None, counts: dict[str, Any]
) -> dict[str, Any]:
    """A whole answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "finish_reason": reason,
        "logprobs": logprobs,
    }
    return frame.fields("chat.completion", version) | {"choices": [choice], "usage": counts}


def chunk(
    frame: Frame,
    version: int,
    delta: dict[str, str],
    reason: FinishReason | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A part of a streamed answer."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return frame.fields("chat.completion.chunk", version) | {"choices": [choice]}


def usage_chunk(frame: Frame, version: int, counts: dict[str, Any]) -> dict[str, Any]:
    """The last part of a streamed answer, where it was asked for."""
    return frame.fields("chat.completion.chunk", version) | {"choices": [], "usage": counts}


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
