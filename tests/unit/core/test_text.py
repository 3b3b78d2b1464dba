"""Chat templates and ids: append-only, no id twice, and templates that cannot reach outside their sandbox."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.learner.init_model import CHAT_TEMPLATE, END, PAD
from seed_async.text import (
    IMAGE_PART,
    Chat,
    ChatTemplateError,
    ChatTokenizer,
    MixedChat,
    read_vocabulary_size,
    text_part,
)
from tests.fakes.chat import IMAGE, STRIPS_EARLIER_THINKING, raw_tokenizer, tiny_chat, tiny_vision_chat

STRIPS_EARLIER_TURNS = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ADDS_THINKING_TO_THE_PROMPT = CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}")


def write_model(folder: Path, **files: object) -> Path:
    """Write a model folder's text side; a value of None leaves that file out."""
    given: dict[str, object] = {
        "tokenizer.json": raw_tokenizer().to_str(),
        "chat_template.jinja": CHAT_TEMPLATE,
        "generation_config.json": {"eos_token_id": 1},
        "config.json": {"eos_token_id": 2},
    }
    for name, content in (given | files).items():
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_ids_of_an_episode_are_those_of_the_whole_chat() -> None:
    """Growing turn by turn gives the ids of rendering it at once, so that training sees what was acted."""
    chat = tiny_chat()
    responses = ["<action>go to shelf 1</action>", "<action>look</action>"]
    ids = chat.first_prompt("Task: a mug.")
    for response, user in zip(responses, ["Nothing happens.", "You see 🙂."], strict=True):
        sampled = np.append(chat.encode(response), np.int32(chat.eos_ids[0]))
        ids = np.concatenate([ids, sampled, chat.next_prompt(user, after_eos=True)])
    messages = [Chat("user", "Task: a mug."), Chat("assistant", responses[0]), Chat("user", "Nothing happens.")]
    messages += [Chat("assistant", responses[1]), Chat("user", "You see 🙂.")]
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, chat.encode(chat.render(messages, add_generation_prompt=True)))


def test_a_response_cut_by_the_token_limit_is_closed_by_the_next_prompt() -> None:
    """EOS comes once, from the response or from the template."""
    chat = tiny_chat()
    open_ended, closed = chat.next_prompt("hm", after_eos=False), chat.next_prompt("hm", after_eos=True)
    assert open_ended[0] == chat.eos_ids[0]
    np.testing.assert_array_equal(open_ended[1:], closed)
    assert chat.eos_ids[0] not in closed[:1]


def test_a_template_that_puts_something_before_its_eos_keeps_it() -> None:
    """Only a leading EOS is dropped."""
    chat = tiny_chat(CHAT_TEMPLATE.replace("+ '<|end|>'", "+ '!<|end|>'"))
    np.testing.assert_array_equal(chat.next_prompt("hm", after_eos=True), chat.next_prompt("hm", after_eos=False))


@pytest.mark.parametrize("template", [STRIPS_EARLIER_TURNS, STRIPS_EARLIER_THINKING, ADDS_THINKING_TO_THE_PROMPT])
def test_a_template_that_rewrites_earlier_turns_is_noticed_and_no_chat_is_continued(template: str) -> None:
    """The transcript layout and the prefix cache need an append-only chat; single prompts do not."""
    chat = tiny_chat(template)
    assert not chat.append_only and chat.first_prompt("hm").size
    with pytest.raises(ChatTemplateError, match="not append-only"):
        chat.next_prompt("hm", after_eos=True)


def test_the_projects_own_template_is_append_only() -> None:
    """Also for responses that think."""
    assert tiny_chat().append_only


def test_a_template_may_leave_a_loop_early() -> None:
    """Published templates look for the last question that way."""
    stops = CHAT_TEMPLATE.replace(
        "{% endfor %}", "{% if message['content'] == 'stop' %}{% break %}{% endif %}{% endfor %}"
    )
    messages = [Chat("user", "stop"), Chat("assistant", "unseen")]
    assert tiny_chat(stops).render(messages, add_generation_prompt=False) == "<|user|>stop<|end|>"


def test_a_chat_prompt_is_the_whole_chat_rendered_anew() -> None:
    """Earlier thinking is gone where the template strips it."""
    messages = [Chat("user", "a"), Chat("assistant", "<think>why</think>look"), Chat("user", "b")]
    chat = tiny_chat(STRIPS_EARLIER_THINKING)
    ids = chat.chat_prompt(messages)
    np.testing.assert_array_equal(ids, chat.encode(chat.render(messages, add_generation_prompt=True)))
    assert "look" in chat.decode(ids) and "why" not in chat.decode(ids)
    np.testing.assert_array_equal(chat.chat_prompt(messages[:1]), chat.first_prompt("a"))


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__.json }}",
    "{{ messages.append.__self__.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__.__base__}'.format(messages) }}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(escape: str) -> None:
    """Templates come with models, from anywhere."""
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        tiny_chat(escape + CHAT_TEMPLATE)


def test_a_template_may_refuse_a_chat() -> None:
    """By `raise_exception`, as published templates do."""
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
    )
    with pytest.raises(ChatTemplateError, match="no system role"):
        tiny_chat(refusing).render([Chat("system", "x")], add_generation_prompt=False)


@given(st.text())
def test_any_text_survives_encoding(text: str) -> None:
    """The vocabulary is byte level."""
    assert tiny_chat().decode(tiny_chat().encode(text)) == text


def test_special_tokens_are_recognised_on_encoding_and_left_out_on_decoding() -> None:
    """And none is added."""
    chat = tiny_chat()
    ids = chat.encode(f"<|user|>mug{END}")
    assert list(ids[[0, -1]]) == [raw_tokenizer().token_to_id("<|user|>"), chat.eos_ids[0]]
    assert chat.decode(ids) == "mug"
    assert chat.encode("<action>").size == 1 and chat.decode(chat.encode("<action>")) == "<action>"
    assert ids.max() < chat.vocabulary_size


def test_an_emoji_cut_in_half_decodes_to_replacement_characters() -> None:
    """The token limit may cut anywhere; the text can still be sent."""
    ids = tiny_chat().encode("🙂")
    assert ids.size > 1
    assert "\ufffd" in tiny_chat().decode(ids[:-1])


def test_a_model_folder_gives_template_and_every_end_id(tmp_path: Path) -> None:
    """generation_config.json goes before config.json."""
    folder = write_model(tmp_path, **{"generation_config.json": {"eos_token_id": [1, 0]}})
    chat = ChatTokenizer.load(folder)
    assert chat.eos_ids == (1, 0) == (raw_tokenizer().token_to_id(END), raw_tokenizer().token_to_id(PAD))
    np.testing.assert_array_equal(chat.first_prompt("x"), tiny_chat().first_prompt("x"))


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    """As in older checkpoints; so may the end id in config.json alone."""
    changes = {"chat_template.jinja": None, "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE}}
    assert ChatTokenizer.load(write_model(tmp_path, **changes, **{"generation_config.json": None})).eos_ids == (2,)


@pytest.mark.parametrize(
    ("missing", "error", "match"),
    [
        (["tokenizer.json"], FileNotFoundError, "tokenizer.json"),
        (["chat_template.jinja"], ChatTemplateError, "no chat template"),
        (["generation_config.json", "config.json"], ChatTemplateError, "eos_token_id"),
    ],
)
def test_an_incomplete_model_folder_is_named(
    tmp_path: Path, missing: list[str], error: type[Exception], match: str
) -> None:
    """The message says which file is missing."""
    folder = write_model(tmp_path, **dict.fromkeys(missing))
    with pytest.raises(error, match=match):
        ChatTokenizer.load(folder)


def test_the_template_of_a_vision_model_writes_a_placeholder_for_each_image(tmp_path: Path) -> None:
    """Whose id its configuration names; the texts beside it are those of a plain message."""
    chat = tiny_vision_chat()
    mixed = MixedChat("user", (text_part("Task: "), IMAGE_PART, text_part("a mug."), IMAGE_PART))
    text = chat.render([mixed, Chat("assistant", "look")], add_generation_prompt=False)
    mark = f"<|vision_start|>{IMAGE}<|vision_end|>"
    assert text == f"<|user|>Task: {mark}a mug.{mark}<|end|><|assistant|>look<|end|>"
    assert chat.chat_prompt([mixed]).tolist().count(chat.image_token_id) == 2
    assert tiny_chat().image_token_id is None
    folder = write_model(tmp_path, **{"config.json": {"eos_token_id": 2, "image_token_id": 77}})
    assert ChatTokenizer.load(folder).image_token_id == 77


def test_a_template_of_texts_fails_on_parts_as_templates_fail() -> None:
    """Not with an error of its own kind."""
    with pytest.raises(ChatTemplateError, match="the chat template failed"):
        tiny_chat().chat_prompt([MixedChat("user", (IMAGE_PART,))])


@pytest.mark.parametrize("config", [{"vocab_size": 48}, {"text_config": {"vocab_size": 48}, "vision_config": {}}])
def test_the_vocabulary_is_that_of_the_language_model(config: dict[str, object], tmp_path: Path) -> None:
    """Which a vision model keeps in a section of its own."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocabulary_size(tmp_path) == 48
