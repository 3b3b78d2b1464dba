"""Plays the same commands in our engine and in the original one and compares everything that a player sees.

The short tests play for a few seconds each. `make test-alfworld-long` sets SEED_ASYNC_DIFFERENTIAL_STEPS, and then the
long one compares at least so many steps.
"""

import itertools
import json
import lzma
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from seed_async.envs.alfworld import original
from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.expert import AlfworldExpert
from seed_async.envs.alfworld.model import CLEAN, COOL, HOT, SLICED, Game, make_goal
from seed_async.envs.alfworld.pddl import parse_problem, write_problem
from seed_async.envs.alfworld.suite import AlfworldSuite
from seed_async.envs.alfworld.vocabulary import VOCABULARIES, VocabularyName
from seed_async.envs.contract import Info, Observation

_REASON = original.unavailable_reason()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(_REASON), reason=_REASON)]

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "alfworld"
BUDGET_S = 6.0
"""Seconds of play a test; the original makes 15 to 45 steps a second."""

LONG_STEPS = int(os.environ.get("SEED_ASYNC_DIFFERENTIAL_STEPS", "0"))
LONG_GAMES = 300
LONG_STEPS_A_GAME = 60
BLOCKS: tuple[tuple[VocabularyName, bool], ...] = (("move", False), ("put", False), ("move", True), ("put", True))
"""Vocabulary, and whether the original is given our own domain and grammar instead of the installed ones."""

Player = Callable[[Engine, str, random.Random], str]


class Played(NamedTuple):
    """How much was compared, and the first difference, if any."""

    steps: int
    difference: str


def _random_player(engine: Engine, text: str, rng: random.Random) -> str:
    """Prefer commands that change something, so that states pile up."""
    commands = engine.admissible()
    changing = [command for command in commands if not command.startswith(("go ", "look", "inventory", "examine"))]
    return rng.choice(changing if changing and rng.random() < 0.7 else commands)


def _shuttling_player(engine: Engine, text: str, rng: random.Random) -> str:
    """Move things between receptacles of one location and look: the corner where objects lie `next to` a receptacle."""
    crowded = [places for places in engine.board.here if len(places) > 1]
    if crowded and not rng.randrange(8):
        return f"go to {engine.board.receptacle_names[rng.choice(rng.choice(crowded))]}"
    commands = engine.admissible()
    moves = [c for c in commands if c.startswith(("take", "move", "put", "open", "slice"))]
    return rng.choice(moves) if moves and rng.random() < 0.7 else rng.choice(["look", rng.choice(commands)])


def _hostile_player(engine: Engine, text: str, rng: random.Random) -> str:
    """Play commands that are nearly right, about entities that exist, and plain rubbish."""
    board = engine.board
    item, place = rng.choice(board.item_names), rng.choice(board.receptacle_names)
    here = [board.receptacle_names[number] for number in board.here[engine.location]] or [place]
    held = board.item_names[engine.held] if engine.held >= 0 else item
    near = rng.choice(here)
    nearly = [
        f"take {item} from {near}", f"move {held} to {near}", f"put {held} in/on {near}", f"examine {item}",
        f"examine {place}", f"open {place}", f"close {near}", f"use {item}", f"heat {held} with {near}",
        f"clean {held} with {near}", f"cool {held} with {near}", f"slice {item} with {held}", f"go to {place}",
        f"  go to {place} ", f"go  to {place}", f"Go to {place}", f"go to {item}", f"take {item}", "", "look around",
        "help", "inventory now", f"open {item}", f"use {place}", f"go to {place}\n", f"go to {place}\x00", "go to",
    ]  # fmt: skip
    return rng.choice(nearly) if rng.random() < 0.6 else _random_player(engine, text, rng)


class _ExpertPlayer:
    """The expert as a player, fed with our engine's text."""

    def __init__(self, vocabulary: VocabularyName) -> None:
        self._expert = AlfworldExpert(vocabulary)
        self._started = False

    def __call__(self, engine: Engine, text: str, rng: random.Random) -> str:
        game = engine.board.game
        seen = Observation(
            text=text,
            admissible=engine.admissible(),
            info=Info(task=game.task, task_type=game.goal.task_type, valid=engine.valid),
        )
        if not self._started:
            self._expert.reset(seen)
            self._started = True
        return self._expert.act(seen)


PLAYERS: dict[str, Callable[[VocabularyName], Player]] = {
    "random": lambda vocabulary: _random_player,
    "shuttling": lambda vocabulary: _shuttling_player,
    "hostile": lambda vocabulary: _hostile_player,
    "expert": _ExpertPlayer,
}


def compare(
    real: original.OriginalEngine,
    game: Game,
    problem: str,
    vocabulary: VocabularyName,
    player: Player,
    rng: random.Random,
    num_steps: int,
) -> Played:
    """Play one game in both engines until the first difference, `num_steps` or a win."""
    engine = Engine(Board(game, vocabulary))
    ours, history = engine.seen(engine.reset()), ["(start)"]
    theirs = real.reset(problem, game.task)
    for step in range(num_steps + 1):
        if ours != theirs:
            return Played(step, f"{game.name}, after {history}:\nours   {ours}\ntheirs {theirs}")
        if ours.won or step == num_steps:
            return Played(step, "")
        command = player(engine, ours.text, rng)
        history.append(command)
        ours, theirs = engine.seen(engine.play(command)), real.step(command)
    raise AssertionError("unreachable")


def scene_games(limit: int, rng: random.Random, split: str = "valid_seen") -> Iterator[tuple[Game, str]]:
    """Yield games of the shared scenes with their own problem texts."""
    with lzma.open(SHARED / f"{split}.jsonl.xz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    for record in rng.sample(records, min(limit, len(records))):
        params = record["pddl_params"]
        goal = make_goal(
            record["task_type"],
            params["object_target"],
            params["parent_target"],
            params["toggle_target"],
            sliced=params["object_sliced"],
            movable=params["mrecep_target"],
        )
        problem = record["pddl_problem"]
        game = parse_problem(
            problem, name=record["id"], floor_plan=record["floor_plan"], task=record["task"], goal=goal
        )
        yield game, problem


def generated_games(limit: int, rng: random.Random) -> Iterator[tuple[Game, str]]:
    """Yield generated games of mixed sizes with the problem texts that we write for them."""
    small = AlfworldSuite(max_receptacles=6, num_objects=6)
    large = AlfworldSuite(min_receptacles=8, max_receptacles=14, num_objects=16)
    for _ in range(limit):
        suite = rng.choice([small, large])
        game = suite.board(rng.choice(suite.tasks("train"))).game
        yield game, write_problem(game)


def crowded_games(limit: int, rng: random.Random) -> Iterator[tuple[Game, str]]:
    """Yield generated games made odd: shared locations, objects in two receptacles, open doors, states at the start."""
    for game, _ in generated_games(limit, rng):
        spots = [rng.randrange(max(1, len(game.receptacles) // 2)) for _ in game.receptacles]
        places = tuple(
            replace(place, location=spots[number], opened=place.openable and rng.random() < 0.3)
            for number, place in enumerate(game.receptacles)
        )
        items = []
        for item in game.items:
            inside = {*item.receptacles, *rng.sample(range(len(places)), rng.randrange(2))}
            items.append(
                replace(
                    item,
                    receptacles=tuple(sorted(inside)),
                    locations=frozenset(places[number].location for number in inside),
                    state=rng.choice([0, 0, CLEAN, HOT, SLICED, CLEAN | COOL]) if item.pickupable else 0,
                )
            )
        used = sorted({place.location for place in places} | {game.start})
        odd = replace(
            game,
            receptacles=tuple(replace(place, location=used.index(place.location)) for place in places),
            items=tuple(
                replace(item, locations=frozenset(used.index(location) for location in item.locations))
                for item in items
            ),
            locations=tuple(game.locations[location] for location in used),
            start=used.index(game.start),
        )
        if not Engine(Board(odd, "move")).won:
            yield odd, write_problem(odd)


def mixed_games(rng: random.Random, *, with_train: bool) -> Iterator[tuple[Game, str]]:
    """Yield shared scenes (where the checkout has them), generated games and odd rooms in turn.

    Reading the scenes of `train` takes seconds, which only the long comparison spends.
    """
    sources = [generated_games(10**6, rng), crowded_games(10**6, rng)]
    if SHARED.is_dir():
        train = [scene_games(1000, rng, "train")] if with_train else []
        sources = [scene_games(168, rng), sources[0], *train, sources[1]]
    return itertools.chain.from_iterable(zip(*sources, strict=False))


def run(
    games: Iterator[tuple[Game, str]],
    vocabulary: VocabularyName,
    seed: int,
    budget_s: float = BUDGET_S,
    own_texts: bool = False,
) -> Played:
    """Compare games in turn with every player until the time is spent or a difference is found."""
    rng, real, steps = random.Random(seed), original.OriginalEngine(vocabulary, own_texts=own_texts), 0
    end = time.monotonic() + budget_s
    for number, (game, problem) in enumerate(games):
        make_player = list(PLAYERS.values())[number % len(PLAYERS)]
        played = compare(real, game, problem, vocabulary, make_player(vocabulary), rng, num_steps=40)
        steps += played.steps
        if played.difference or time.monotonic() > end:
            return Played(steps, played.difference)
    return Played(steps, "")


@pytest.mark.parametrize("vocabulary", list(VOCABULARIES))
def test_real_scenes_read_the_same_in_both_engines(vocabulary: VocabularyName) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the shared games are not at {SHARED}")
    played = run(scene_games(168, random.Random(1)), vocabulary, seed=1)
    assert not played.difference, played.difference
    assert played.steps


@pytest.mark.parametrize("vocabulary", list(VOCABULARIES))
def test_generated_games_read_the_same_in_both_engines(vocabulary: VocabularyName) -> None:
    played = run(generated_games(1000, random.Random(2)), vocabulary, seed=2)
    assert not played.difference, played.difference
    assert played.steps


@pytest.mark.parametrize("vocabulary", list(VOCABULARIES))
def test_odd_rooms_read_the_same_in_both_engines(vocabulary: VocabularyName) -> None:
    played = run(crowded_games(1000, random.Random(3)), vocabulary, seed=3)
    assert not played.difference, played.difference
    assert played.steps


@pytest.mark.parametrize("vocabulary", list(VOCABULARIES))
def test_the_texts_of_the_games_that_we_write_read_like_the_installed_ones(vocabulary: VocabularyName) -> None:
    played = run(mixed_games(random.Random(4), with_train=False), vocabulary, seed=4, own_texts=True)
    assert not played.difference, played.difference
    assert played.steps


@pytest.mark.skipif(not LONG_STEPS, reason="the long comparison: make test-alfworld-long")
@pytest.mark.parametrize("block", range(len(BLOCKS)), ids=["move", "put", "move-our-texts", "put-our-texts"])
def test_hundreds_of_games_and_thousands_of_steps_read_the_same(block: int) -> None:
    vocabulary, own_texts = BLOCKS[block]
    rng, real = random.Random(101 + block), original.OriginalEngine(vocabulary, own_texts=own_texts)
    # Five players against four kinds of game, so that each player meets each kind.
    players = itertools.cycle([*PLAYERS.values(), PLAYERS["expert"]])
    games, steps, started_s = Counter[str](), 0, time.monotonic()
    for (game, problem), make_player in zip(mixed_games(rng, with_train=True), players, strict=False):
        played = compare(real, game, problem, vocabulary, make_player(vocabulary), rng, LONG_STEPS_A_GAME)
        assert not played.difference, played.difference
        steps += played.steps
        games["generated" if game.name.startswith("generated/") else "scenes"] += 1
        if steps * len(BLOCKS) >= LONG_STEPS and games.total() * len(BLOCKS) >= LONG_GAMES:
            break
    told = ", ".join(f"{number} {kind}" for kind, number in games.items())
    print(f"no difference in {games.total()} games ({told}), {steps} steps, {time.monotonic() - started_s:.0f} s")
    assert steps * len(BLOCKS) >= LONG_STEPS and games.total() * len(BLOCKS) >= LONG_GAMES
