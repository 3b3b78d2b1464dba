"""Solves a game by full knowledge of it, which verifies generated games and gives every game a short solution."""

from seed_async.envs.alfworld.board import NOBODY, Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.model import PROCESSOR
from seed_async.envs.contract import GameFormatError

_PROCESS_VERBS = {"sinkbasin": "clean", "microwave": "heat", "fridge": "cool"}


class _Planner:
    """Writes down commands while it plays them, so that a plan is checked by its making."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.engine = Engine(board)
        self.commands: list[str] = []

    def do(self, command: str) -> None:
        self.engine.play(command)
        self.commands.append(command)

    def go(self, place: int) -> None:
        if self.board.game.receptacles[place].location != self.engine.location:
            self.do(f"go to {self.board.receptacle_names[place]}")

    def reach(self, place: int) -> None:
        """Go to a receptacle and open it if it is closed."""
        self.go(place)
        if self.board.game.receptacles[place].openable and not self.engine.opened[place]:
            self.do(f"open {self.board.receptacle_names[place]}")

    def fetch(self, item: int, source: int) -> None:
        self.reach(source)
        self.do(f"take {self.board.item_names[item]} from {self.board.receptacle_names[source]}")

    def put(self, item: int, target: int) -> None:
        self.reach(target)
        self.do(self.board.words.place(self.board.item_names[item], self.board.receptacle_names[target]))

    def process(self, item: int, state: int) -> None:
        kind = PROCESSOR[state]
        place = next(n for n, place in enumerate(self.board.game.receptacles) if place.kind == kind)
        self.go(place)
        self.do(f"{_PROCESS_VERBS[kind]} {self.board.item_names[item]} with {self.board.receptacle_names[place]}")

    def closed(self, place: int) -> bool:
        return self.board.game.receptacles[place].openable and not self.engine.opened[place]

    def sources(self, avoid: int) -> list[tuple[int, int]]:
        """Return (object, receptacle) pairs that can serve the goal and are not at `avoid`, the easiest first."""
        goal, found = self.board.game.goal, []
        for place, contents in enumerate(self.engine.contents):
            for number in contents:
                item = self.board.game.items[number]
                useful = item.kind == goal.item and item.pickupable and (not goal.state or item.can_become(goal.state))
                if useful and place != avoid:
                    found.append((self.closed(place), number, place))
        return [(number, place) for _, number, place in sorted(found)]


def _look(planner: _Planner) -> None:
    goal, items = planner.board.game.goal, planner.board.game.items
    planner.fetch(*planner.sources(NOBODY)[0])
    lamp, place = next(
        (item, place)
        for place, contents in enumerate(planner.engine.contents)
        for item in contents
        if items[item].kind == goal.lamp and items[item].toggleable
    )
    planner.go(place)
    planner.do(f"use {planner.board.item_names[lamp]}")


def _place(planner: _Planner) -> None:
    goal, game = planner.board.game.goal, planner.board.game

    # The receptacle that already holds the most of what is wanted, then one that needs no opening.
    def needs(place: int) -> tuple[int, bool]:
        held = sum(game.items[item].kind == goal.item for item in planner.engine.contents[place])
        return (-held if not goal.state else 0, planner.closed(place))

    target = min(planner.board.goal_places, key=needs)
    while not planner.engine.won:
        pairs = planner.sources(NOBODY if goal.state else target)
        if not pairs or len(planner.commands) > 40:
            raise GameFormatError(f"game {game.name} has no solution that the oracle can find")
        item, source = pairs[0]
        planner.fetch(item, source)
        if goal.state:
            planner.process(item, goal.state)
        planner.put(item, target)


def solve(board: Board) -> tuple[str, ...]:
    """Return a short command list that wins the game. Raises GameFormatError when it finds none."""
    planner = _Planner(board)
    if not planner.engine.won:
        (_look if board.game.goal.lamp else _place)(planner)
    if not planner.engine.won:
        raise GameFormatError(f"game {board.game.name} is not won by the oracle's plan")
    return tuple(planner.commands)
