"""Stage 1: which tokens carry loss, the learning rate, and that a tiny model learns."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from seed_async.layouts import plain_rows
from seed_async.learner.init_model import init_model
from seed_async.learner.sft import RowTooLongError, chat_row, learning_rate, load_rows, train
from seed_async.text import Chat, ChatTokenizer
from seed_async.topology import Stage1, Topology
from tests.fakes.chat import tiny_chat, write_corpus
from tests.fakes.episodes import make_lease, make_trajectory, make_turn, small_topology

Message = dict[str, Any]


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str, *, learn: bool = True) -> Message:
    """A response, with or without loss."""
    return {"role": "assistant", "content": content, "train": learn}


def test_loss_falls_on_trained_responses_and_their_end_only() -> None:
    """A random command of a demonstration is context, not a lesson."""
    chat = tiny_chat()
    messages = [
        user("a"),
        assistant("first"),
        user("b"),
        assistant("mistake", learn=False),
        user("c"),
        assistant("third"),
    ]
    row = chat_row(messages, chat)
    learnt = row.token_ids[row.response_mask]
    end = np.array(chat.eos_ids[:1], dtype=np.int32)
    expected = [chat.encode("first"), end, chat.encode("third"), end]
    np.testing.assert_array_equal(learnt, np.concatenate(expected))
    mistake = np.append(chat.encode("mistake"), chat.eos_ids[0])
    unweighted = row.token_ids[row.weights(0.3) == 0]
    np.testing.assert_array_equal(unweighted, np.append(row.token_ids[:1], mistake))


def test_a_row_has_the_ids_of_the_rendered_chat() -> None:
    """Up to the end of the last response."""
    chat = tiny_chat()
    row = chat_row([user("a"), assistant("x"), user("b"), assistant("y")], chat)
    whole = [Chat("user", "a"), Chat("assistant", "x"), Chat("user", "b"), Chat("assistant", "y")]
    np.testing.assert_array_equal(row.token_ids, chat.encode(chat.render(whole, add_generation_prompt=False)))


def test_a_demonstration_has_the_ids_of_the_same_episode_acted() -> None:
    """Stage 1 and reinforcement learning see one format."""
    chat = tiny_chat()
    turns = []
    for index, (text, response) in enumerate([("a", "x"), ("b", "y")]):
        prompt = chat.next_prompt(text, after_eos=True) if index else chat.first_prompt(text)
        ids = np.append(chat.encode(response), chat.eos_ids[0]).astype(np.int32)
        turns.append(replace(make_turn([0] * ids.size, prompt=prompt.tolist()), response_ids=ids))
    (acted,) = plain_rows(make_trajectory(make_lease(), "i", turns))
    shown = chat_row([user("a"), assistant("x"), user("b"), assistant("y")], chat)
    np.testing.assert_array_equal(acted.token_ids, shown.token_ids)
    np.testing.assert_array_equal(acted.response_mask, shown.response_mask)


def write_rows(path: Path, *chats: list[Message]) -> None:
    """One chat a line."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def test_an_over_long_row_is_an_error_with_its_file_and_line(tmp_path: Path) -> None:
    """It is never cut: that would lose the task or the answer."""
    short, long = [user("a"), assistant("b")], [user("a " * 300), assistant("b")]
    write_rows(tmp_path / "a.jsonl", short)
    write_rows(tmp_path / "b.jsonl", short, long)
    with pytest.raises(RowTooLongError, match=r"b\.jsonl:2: \d+ tokens, the context has 64"):
        load_rows(tmp_path, tiny_chat(), 64)
    assert len(load_rows(tmp_path, tiny_chat(), 4096)) == 3


def test_rows_without_anything_to_learn_are_left_out(tmp_path: Path) -> None:
    """And a folder of such rows is an error."""
    write_rows(tmp_path / "a.jsonl", [user("a"), assistant("b", learn=False)])
    with pytest.raises(ValueError, match="no training rows"):
        load_rows(tmp_path, tiny_chat(), 64)


@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_the_learning_rate_warms_up_and_falls_like_a_cosine(total: int) -> None:
    """Linear to the peak over a tenth, half of it in the middle of the rest, near zero at the end."""
    settings = Stage1(lr=2.0, warmup_share=0.1)
    rates = [learning_rate(step, total, settings) for step in range(total)]
    assert all(0 < rate <= 2.0 for rate in rates) and max(rates) == 2.0
    warmup = max(1, round(0.1 * total))
    assert rates[:warmup] == pytest.approx([2.0 * (step + 1) / warmup for step in range(warmup)])
    expected = [1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)) for step in range(warmup, total)]
    assert rates[warmup:] == pytest.approx(expected)
    assert sorted(rates[warmup - 1 :], reverse=True) == rates[warmup - 1 :]


def tiny_topology(**stage1: Any) -> Topology:
    """A model of a few thousand parameters."""
    init = {
        "hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "vocabulary_size": 320,
        "max_context_tokens": 128,
    }  # fmt: skip
    return small_topology(
        model={"init": init},
        analysis={"max_context_tokens": 128, "max_output_tokens": 8},
        stage1={"epochs": 40, "batch_rows": 4, "lr": 1e-2, "threads": 1} | stage1,
    )


def test_a_tiny_models_loss_falls_and_the_folder_is_complete(tmp_path: Path) -> None:
    """The result loads, acts in the same chat format, and its metrics are on disk."""
    data = tmp_path / "data"
    data.mkdir()
    write_corpus(data)
    topology = tiny_topology()
    init_model(topology, tmp_path / "initial", data)
    train(topology, tmp_path / "initial", data, tmp_path / "out")
    with (data / "sft_metrics.csv").open() as file:
        losses = [float(line["loss"]) for line in csv.DictReader(file)]
    assert losses[-1] < 0.5 * losses[0]
    assert ChatTokenizer.load(tmp_path / "out").eos_ids == ChatTokenizer.load(tmp_path / "initial").eos_ids
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_same_seed_trains_the_same_model_and_the_token_budget_changes_nothing(tmp_path: Path) -> None:
    """Packing is a matter of memory only."""
    data = tmp_path / "data"
    data.mkdir()
    write_corpus(data)
    init_model(tiny_topology(), tmp_path / "initial", data)
    curves = []
    for name, budget in (("a", 4096), ("b", 4096), ("c", 1)):
        topology = tiny_topology(epochs=2, token_budget=budget)
        train(topology, tmp_path / "initial", data, tmp_path / name)
        with (data / "sft_metrics.csv").open() as file:
            curves.append([float(line["loss"]) for line in csv.DictReader(file)])
    assert curves[0] == curves[1] == pytest.approx(curves[2], rel=1e-4)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
