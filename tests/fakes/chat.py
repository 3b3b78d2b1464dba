"""A tiny trained tokenizer with the project's own chat template, for tests that need real ids."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer

from seed_async.learner.init_model import CHAT_TEMPLATE, END, train_tokenizer
from seed_async.text import ChatTokenizer

LINES = (
    "Task: put a clean mug on the shelf.",
    "You are in the middle of a room. You see a drawer 1, a shelf 1, a sinkbasin 1 and a mug 1.",
    "<action>go to shelf 1</action>",
    "Nothing happens.",
    'Analyse the episode. {"episode_summary": "won", "episode_skill": "take the mug, clean it, put it down"}',
)
STRIPS_EARLIER_THINKING = CHAT_TEMPLATE.replace(
    "+ message['content'] +", "+ (message['content'].split('</think>') | last) +"
)
"""What published templates of reasoning models do: not append-only."""


IMAGE = "<|image_pad|>"
IMAGE_TOKENS = ("<|vision_start|>", IMAGE, "<|vision_end|>")
PARTS_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}",
    "{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>",
)
"""What published templates of vision models do with a content of parts."""


def write_corpus(folder: Path) -> Path:
    """Write a few chats as Stage 1 would."""
    rows = [
        {"messages": [{"role": "user", "content": line}, {"role": "assistant", "content": line, "train": True}]}
        for line in LINES
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@cache
def raw_tokenizer() -> Tokenizer:
    """Train once a session; immutable by agreement."""
    with TemporaryDirectory() as folder:
        return train_tokenizer(write_corpus(Path(folder)), 340)


@cache
def raw_vision_tokenizer() -> Tokenizer:
    """The same with the tokens of an image."""
    tokenizer = Tokenizer.from_str(raw_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in IMAGE_TOKENS])
    return tokenizer


def tiny_vision_chat() -> ChatTokenizer:
    """A chat tokenizer whose template writes placeholders."""
    tokenizer = raw_vision_tokenizer()
    return ChatTokenizer(tokenizer, PARTS_TEMPLATE, [tokenizer.token_to_id(END)], tokenizer.token_to_id(IMAGE))


def tiny_chat(template: str = CHAT_TEMPLATE, extra_eos: tuple[str, ...] = ()) -> ChatTokenizer:
    """Return a chat tokenizer; the template can be replaced by a bad one."""
    tokenizer = raw_tokenizer()
    ends = tokenizer.encode("".join([END, *extra_eos]), add_special_tokens=False).ids
    return ChatTokenizer(tokenizer, template, ends)
