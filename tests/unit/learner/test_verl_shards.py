"""Merging the shards of another trainer."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from seed_async.cli import app
from seed_async.learner.scoring import auto_class
from tests.unit.learner.builders import tiny_model
from tests.unit.learner.test_ranks import run_ranks


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three workers leave: 48 rows of the vocabulary and 8 of a key head are no multiples of 3."""
    folder = tmp_path_factory.mktemp("actor")
    run_ranks("verl_worker", 3, str(folder))
    tiny_model("qwen2").save_pretrained(folder / "huggingface")
    (folder / "huggingface" / "model.safetensors").unlink()
    (folder / "huggingface" / "tokenizer.json").write_text("{}")
    return folder


def merge(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *arguments])
    return result.exit_code, result.output.replace("\n", " ")


def test_pickled_shards_are_read_only_on_the_users_word(shards: Path, tmp_path: Path) -> None:
    code, output = merge(str(shards), "--out", str(tmp_path / "out"))
    assert code == 2 and "give --trust" in output
    assert not (tmp_path / "out").exists()


def test_shards_become_the_model_that_they_were_cut_from(shards: Path, tmp_path: Path) -> None:
    code, output = merge(str(shards), "--out", str(tmp_path / "out"), "--trust")
    assert code == 0, output
    merged = auto_class(tmp_path / "out").from_pretrained(tmp_path / "out")
    expected = dict(tiny_model("qwen2").named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in merged.named_parameters())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_missing_rank_and_a_missing_configuration_are_named(shards: Path, tmp_path: Path) -> None:
    for path in shards.glob("*rank_[02].pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code, output = merge(str(tmp_path), "--out", str(tmp_path / "out"), "--trust")
    assert code == 2 and "no huggingface/config.json" in output
    code, output = merge(
        str(tmp_path), "--out", str(tmp_path / "out"), "--trust", "--model", str(shards / "huggingface")
    )
    assert code == 2 and "ranks [0, 2], of a world size of [3]" in output
