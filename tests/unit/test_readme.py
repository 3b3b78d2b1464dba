"""README's map matches the tree, and its commands exist with the options that it gives them."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from seed_async.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MAP = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
COMMANDS = re.findall(r"^seed-async .*$", BLOCKS, re.MULTILINE)
TARGETS = re.findall(r"^make (\S+)", BLOCKS, re.MULTILINE)


@pytest.mark.parametrize("path", MAP)
def test_a_path_of_the_map_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_map_names_every_top_level_folder() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    unnamed = folders - {name.rstrip("/") for name in MAP} - {"runs", "build", "dist", "seed_async.egg-info"}
    assert unnamed == set()


@pytest.mark.parametrize("path", re.findall(r"`((?:docs|docker|seed_async|topologies)/[\w./-]+)`", README))
def test_a_path_of_the_text_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_that_it_is_given(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    group = typer.main.get_command(app)
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]  # type: ignore[attr-defined]
    assert not hasattr(group, "commands"), f"{command}: no such command"
    known = {option for parameter in group.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_first_command_after_make_runs_as_it_stands() -> None:
    (validate,) = [command for command in COMMANDS if "validate" in command]
    words = shlex.split(validate)[1:]
    words[words.index("--topology") + 1] = str(ROOT / words[words.index("--topology") + 1])
    assert CliRunner().invoke(app, words).exit_code == 0
