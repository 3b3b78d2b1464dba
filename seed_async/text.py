"""Tokens and chat templates without torch: the `tokenizers` library and a sandboxed template renderer.

Ids are kept as sampled; nothing here decodes and encodes a response again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from seed_async.ports import TextStream

Role = Literal["system", "user", "assistant"]
_SENTINEL = "\x02response\x02"
"""Stands for a response while a template is rendered; no template or observation holds this control character."""


_PROBES = (_SENTINEL, f"<think>why</think>{_SENTINEL}")
"""Responses that an append-only template leaves as they are; published ones are known to strip earlier thinking."""


class ChatTemplateError(ValueError):
    """A chat template that cannot be used: missing, failing, or not append-only where that is needed."""


class Chat(NamedTuple):
    """One chat message."""

    role: Role
    content: str


class MixedChat(NamedTuple):
    """One chat message with images among its texts: parts as chat templates know them (`IMAGE_PART`, `text_part`)."""

    role: Role
    content: tuple[Mapping[str, str], ...]


IMAGE_PART: Mapping[str, str] = {"type": "image"}
"""Stands for an image; the template of a vision model writes its placeholder there."""


def text_part(text: str) -> Mapping[str, str]:
    """Text beside an image."""
    return {"type": "text", "text": text}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTokenizer:
    """The tokenizer and chat template of a Hugging Face folder. Immutable; safe to share."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, eos_ids: Sequence[int], image_token_id: int | None = None
    ) -> None:
        """Compile the template and find out whether it is append-only. Raises ChatTemplateError when it fails.

        `image_token_id` is the placeholder of an image in the ids; None for a text model.
        """
        self._tokenizer, self.image_token_id = tokenizer, image_token_id
        # Published templates use `break`, as the library they are written for lets them.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(template)
        self.eos_ids = tuple(eos_ids)
        self.append_only = self._find_append_only()
        """Whether a chat only ever grows at its end, so that sampled ids can stay where they are (transcript layout);
        no for templates that strip earlier thinking, or that put into the open turn what they leave out of a past one.
        """

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTokenizer":
        """Read `tokenizer.json`, the chat template and the end-of-sequence ids of a model folder.

        Raises FileNotFoundError naming the missing file, ChatTemplateError for an unusable template.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the folder holds no tokenizer")
        return cls(
            Tokenizer.from_file(str(path)),
            _read_template(model_dir),
            _read_eos_ids(model_dir),
            _read_json(model_dir / "config.json").get("image_token_id"),
        )

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render(self, messages: Sequence[Chat | MixedChat], *, add_generation_prompt: bool) -> str:
        """Render a chat as text. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages], add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError) as error:  # TypeError: a template of texts that is given parts
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of rendered text, int32 [T]; special tokens in the text are recognised, none is added."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids without special tokens."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def text_stream(self) -> TextStream:
        """Open the text of one response: `decode`, one id at a time."""
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(self._tokenizer, token_id) or ""

    def first_prompt(self, user: str) -> np.ndarray:
        """Ids of a chat that opens with one user message, up to where the response begins, int32 [P]."""
        return self.chat_prompt([Chat("user", user)])

    def chat_prompt(self, messages: Sequence[Chat | MixedChat]) -> np.ndarray:
        """Ids of a whole chat, rendered anew, up to where the next response begins, int32 [P]."""
        return self.encode(self.render(messages, add_generation_prompt=True))

    def next_prompt(self, user: str, *, after_eos: bool) -> np.ndarray:
        """Ids that follow a response: its end (unless the response sampled it), the next user message, the new turn.

        `after_eos` says whether the response's last id is an end-of-sequence id. int32 [P]. Raises ChatTemplateError
        when the template is not append-only.
        """
        if not self.append_only:
            raise ChatTemplateError(
                "the chat template is not append-only (it rewrites earlier turns): a chat cannot be continued by ids"
            )
        chat = [Chat("user", ""), Chat("assistant", _SENTINEL), Chat("user", user)]
        tail = self.render(chat, add_generation_prompt=True).rpartition(_SENTINEL)[2]
        ids = self.encode(tail)
        return ids[1:] if after_eos and ids.size and int(ids[0]) in self.eos_ids else ids

    def _find_append_only(self) -> bool:
        opening = [Chat("user", "a")]
        prompt = self.render(opening, add_generation_prompt=True)
        return all(
            self.render(
                [*opening, Chat("assistant", response), Chat("user", "b")], add_generation_prompt=True
            ).startswith(prompt + response)
            for response in _PROBES
        )


def read_vocabulary_size(model_dir: Path) -> int:
    """Number of token ids of a model folder; a vision model keeps it in the section of its language model.

    Raises KeyError for a folder whose config.json does not say.
    """
    config = _read_json(model_dir / "config.json")
    return int(config.get("text_config", config)["vocab_size"])


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _read_template(model_dir: Path) -> str:
    path = model_dir / "chat_template.jinja"
    template = (
        path.read_text() if path.is_file() else _read_json(model_dir / "tokenizer_config.json").get("chat_template")
    )
    if not isinstance(template, str):
        raise ChatTemplateError(f"{model_dir} holds no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _read_eos_ids(model_dir: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(model_dir / name).get("eos_token_id")
        if eos is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    raise ChatTemplateError(f"{model_dir} names no eos_token_id in generation_config.json or config.json")
