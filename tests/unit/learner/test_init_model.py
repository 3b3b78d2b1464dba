"""The tiny model: reproducible, able to encode any text, and a plain Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from seed_async.learner.init_model import END, PAD, TAGS, build_model, init_model
from seed_async.text import Chat, ChatTokenizer
from seed_async.topology import Topology
from tests.fakes.chat import raw_tokenizer, write_corpus
from tests.fakes.episodes import small_topology

INIT = {
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "intermediate_size": 32,
    "vocabulary_size": 320,
    "max_context_tokens": 64,
}
CHAT = [
    Chat("user", "Task: find the mug.\n  🙂 "),
    Chat("assistant", "<action>look</action>"),
    Chat("user", "<|end|>?"),
]


def topology() -> Topology:
    """A topology that makes its own model."""
    sizes = {"max_context_tokens": 64, "max_response_tokens": 8}
    return small_topology(
        model={"init": INIT}, rollout=sizes, analysis={"max_context_tokens": 64, "max_output_tokens": 8}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written model."""
    out = tmp_path_factory.mktemp("model") / "out"
    init_model(topology(), out, write_corpus(tmp_path_factory.mktemp("corpus")))
    return out


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    """Every random choice derives from run.seed."""
    settings = topology().model.init
    assert settings is not None
    first, again, other = (build_model(settings, raw_tokenizer(), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_same_corpus_gives_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Byte for byte."""
    init_model(topology(), tmp_path / "again", write_corpus(tmp_path))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@given(text=st.text())
def test_any_text_encodes_and_decodes_exactly(text: str) -> None:
    """Byte level: there is no unknown token."""
    ids = raw_tokenizer().encode(text, add_special_tokens=False).ids
    assert raw_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_each_tag_is_one_ordinary_token() -> None:
    """Decoding keeps tags and drops the special tokens."""
    for tag in TAGS:
        ids = raw_tokenizer().encode(tag, add_special_tokens=False).ids
        assert len(ids) == 1 and raw_tokenizer().decode(ids, skip_special_tokens=True) == tag
    assert raw_tokenizer().decode(raw_tokenizer().encode(END).ids, skip_special_tokens=True) == ""


def test_the_folder_loads_in_plain_transformers_and_renders_as_ours(folder: Path) -> None:
    """Same text, same ids, with and without a generation prompt."""
    theirs, ours = AutoTokenizer.from_pretrained(folder, local_files_only=True), ChatTokenizer.load(folder)
    messages = [message._asdict() for message in CHAT]
    for add_generation_prompt in (True, False):
        rendered = ours.render(CHAT, add_generation_prompt=add_generation_prompt)
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        assert theirs.apply_chat_template(messages, tokenize=False, **options) == rendered
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert list(ids) == ours.encode(rendered).tolist()
    assert (theirs.eos_token, theirs.pad_token) == (END, PAD)
    assert theirs.decode(ours.encode("<action>look</action>")) == "<action>look</action>"


def test_the_model_loads_in_plain_transformers_with_end_pad_and_vocabulary(folder: Path) -> None:
    """Pad and end differ: masking by pad must never hide a true end."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ours = ChatTokenizer.load(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == ours.vocabulary_size <= INIT["vocabulary_size"]
    assert ours.eos_ids == (model.generation_config.eos_token_id,) == (config["eos_token_id"],)
    assert model.generation_config.pad_token_id == config["pad_token_id"] != config["eos_token_id"]
    with torch.no_grad():
        logits = model(torch.from_numpy(ours.first_prompt("Task").astype(np.int64))[None]).logits
    assert logits.shape[-1] == ours.vocabulary_size and bool(torch.isfinite(logits).all())


def test_a_missing_corpus_or_an_existing_model_is_refused(tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(ValueError, match=r"no \*\.jsonl"):
        init_model(topology(), tmp_path / "out", tmp_path)
    with pytest.raises(ValueError, match=r"model\.init"):
        init_model(small_topology(), tmp_path / "out", write_corpus(tmp_path))
    assert not (tmp_path / "out").exists()
