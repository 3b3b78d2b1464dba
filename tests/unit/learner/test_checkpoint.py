"""Checkpoints: an exact resume, whatever a kill leaves behind, and no damaged one is ever taken."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from seed_async.learner.checkpoint import (
    MANIFEST,
    NEWEST,
    OPTIMIZER,
    POLICY,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriter,
    Snapshot,
    newest_checkpoint,
    read_manifest,
    restore,
    take_snapshot,
    write_checkpoint,
)
from seed_async.learner.export import merge_checkpoint


def make_model(hidden: int = 16, tied: bool = True) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """A tiny random Llama and its optimizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Random batches from torch's own generator, so that the random state matters too."""
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 40, (2, 8))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def only_file(folder: Path) -> Path:
    """The file of the one rank."""
    (path,) = folder.iterdir()
    return path


def snapshot(version: int = 1) -> Snapshot:
    return take_snapshot(version, 1.5, *make_model())


@pytest.mark.parametrize("tied", [True, False])
def test_a_resume_continues_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model, optimizer = make_model(tied=tied)
    train(model, optimizer, 5)
    folder = write_checkpoint(tmp_path, take_snapshot(5, 12.5, model, optimizer), keep=2)
    uninterrupted = train(model, optimizer, 10)
    torch.manual_seed(99)
    resumed, its_optimizer = make_model(tied=tied)
    restore(folder, resumed, its_optimizer)
    assert train(resumed, its_optimizer, 10) == uninterrupted
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(resumed.named_parameters())[name])
    manifest = read_manifest(folder)
    assert (manifest.version, manifest.training_s) == (5, 12.5)


def test_training_may_go_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    model, optimizer = make_model()
    train(model, optimizer, 1)
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.submit(take_snapshot(1, 0.0, model, optimizer))
    train(model, optimizer, 3)
    writer.wait()
    restore(tmp_path / "version-00000001", model, optimizer)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_an_error_of_the_writer_reaches_the_learner(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "file", keep=2)
    writer.submit(snapshot())
    with pytest.raises(CheckpointError, match="file"):
        writer.wait()


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "manifest", "foreign"])
def test_a_damaged_checkpoint_is_passed_over_by_name_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    good = write_checkpoint(tmp_path, snapshot(1), keep=3)
    bad = write_checkpoint(tmp_path, snapshot(2), keep=3)
    assert newest_checkpoint(tmp_path) == (bad, read_manifest(bad))
    weights, moments = only_file(bad / POLICY), only_file(bad / OPTIMIZER)
    content = bytearray(weights.read_bytes())
    match damage:
        case "flip":
            content[-3] ^= 1
            weights.write_bytes(content)
        case "cut":
            weights.write_bytes(content[:-1])
        case "lose":
            moments.unlink()
        case "manifest":
            (bad / MANIFEST).write_text("{")
        case "foreign":
            text = (bad / MANIFEST).read_text()
            (bad / MANIFEST).write_text(text.replace('"format": 2', '"format": 7'))
    told: list[str] = []
    assert newest_checkpoint(tmp_path, told.append) == (good, read_manifest(good))
    assert len(told) == 1 and str(bad) in told[0]


def test_none_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing") is None
    (tmp_path / "version-x").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_only_the_newest_are_kept_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    for version in range(1, 5):
        write_checkpoint(tmp_path, snapshot(version), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NEWEST, "version-00000003", "version-00000004"]
    assert (tmp_path / NEWEST).read_text() == "version-00000004\n"
    only_file(tmp_path / "version-00000004" / POLICY).write_bytes(b"")
    write_checkpoint(tmp_path, snapshot(5), keep=2)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found[1].version == 5
    assert (tmp_path / "version-00000003").is_dir()


def test_another_models_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, snapshot(), keep=1)
    other, optimizer = make_model(hidden=32)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(CheckpointMismatchError, match=r"another model.*embed_tokens"):
        restore(folder, other, optimizer)
    assert all(map(torch.equal, before, other.parameters()))


def test_a_merged_checkpoint_is_a_plain_model_folder(tmp_path: Path) -> None:
    start, optimizer = make_model()
    start.save_pretrained(tmp_path / "start")
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (tmp_path / "start" / name).write_text("{}")
    train(start, optimizer, 2)
    folder = write_checkpoint(tmp_path / "checkpoints", take_snapshot(2, 0.0, start, optimizer), keep=1)
    assert merge_checkpoint(folder, tmp_path / "start", tmp_path / "merged") == 2
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(map(torch.equal, start.parameters(), merged.parameters()))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / "merged" / name).is_file()
    only_file(folder / POLICY).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged files"):
        merge_checkpoint(folder, tmp_path / "start", tmp_path / "again")
    assert not (tmp_path / "again").exists()


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from seed_async.learner.checkpoint import Snapshot, newest_checkpoint, write_checkpoint

def write_for_ever(root, version, pipe):
    torch.set_num_threads(1)
    while True:
        version += 1
        tensor = torch.full((50_000,), float(version))
        write_checkpoint(root, Snapshot(version, 0.0, {"w": tensor}, {"random_state": tensor}), keep=2)
        os.write(pipe, version.to_bytes(8, "little"))

root, rng, finished = Path(sys.argv[1]), random.Random(0), 0
for _ in range(int(sys.argv[2])):
    reader, writer = os.pipe()
    pid = os.fork()  # what has imported torch already, so that a kill costs no start
    if pid == 0:
        write_for_ever(root, finished, writer)
    finished = int.from_bytes(os.read(reader, 8), "little")
    time.sleep(rng.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(writer)
    while more := os.read(reader, 8):
        finished = int.from_bytes(more, "little")
    os.close(reader)
    found = newest_checkpoint(root)
    assert found is not None and found[1].version >= finished, (found, finished)
    finished = found[1].version
print(finished)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Forty kills of a process that does nothing but write; what it had finished is never lost."""
    command = [sys.executable, "-c", KILLS, str(tmp_path), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and int(done.stdout) >= 40, done.stderr
    assert len(list(tmp_path.glob("version-*"))) <= 4


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from seed_async.learner.checkpoint import CheckpointWriter, Snapshot
writer = CheckpointWriter(Path(sys.argv[1]), keep=2)
for version, size in enumerate((1_000, 1_000_000), start=1):
    tensor = torch.zeros(size)
    writer.submit(Snapshot(version, 0.0, {"w": tensor}, {"random_state": tensor}))
    writer.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""


def test_a_write_that_the_disk_refuses_leaves_the_old_checkpoint_whole_and_says_so(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the same failing write."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"CheckpointError: {tmp_path}/version-00000002 was not written: rank 0: OSError(27, " in done.stderr
    found = newest_checkpoint(tmp_path)
    assert found is not None and found[1].version == 1
