"""Writes the hindsight analysis of a finished trajectory from full knowledge of the game.

The sentences are regular on purpose: a small model is to learn to write them. After a success the skill is the workflow
that won; after a failure it names the mistake, with its warning sign, and then the workflow that would have won.
"""

from collections.abc import Sequence
from typing import NamedTuple

from seed_async.envs.alfworld.board import NOBODY, Board
from seed_async.envs.alfworld.model import CLEAN, COOL, HOT
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.replay import Record, lamp_is_on, replay, winning_items
from seed_async.envs.contract import Analysis, Step

_VERBS = {CLEAN: "clean", HOT: "heat", COOL: "cool"}
_DONE = {CLEAN: "cleaned", HOT: "heated", COOL: "cooled"}
_MANY_VISITS = 3
"""Visits to one place without finding anything that count as the mistake."""
_MANY_INVALID = 3
"""Commands without effect that count as the mistake, if they are also a third of all."""
_MAX_QUOTED_WORDS = 6
"""A longer command is not quoted in an analysis."""


class _Mistake(NamedTuple):
    """A failure's core: what happened, and the rule that avoids it (it follows `do not`)."""

    happened: str
    rule: str


class _Teller:
    """Words things with the names of one game."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.goal = board.game.goal

    def item(self, item: int) -> str:
        return self.board.item_names[item]

    def place(self, place: int) -> str:
        return self.board.receptacle_names[place]

    def at(self, place: int) -> str:
        """Return `in cabinet 2` or `on desk 1`."""
        return f"{'in' if self.board.game.receptacles[place].openable else 'on'} {self.place(place)}"

    def was(self, place: int) -> str:
        """Return where something was at the start, as in `was in closed cabinet 2`."""
        receptacle = self.board.game.receptacles[place]
        if receptacle.openable and not receptacle.opened:
            return f"was in closed {self.place(place)}"
        return f"was {self.at(place)}"

    def workflow(self, record: Record) -> str:
        """Return the order of actions that won in `record`, or nothing when it did not win by taking an object."""
        items, target = winning_items(record)
        sources = record.first_sources
        taken = [item for item in items if item in sources]
        if not taken:
            return ""
        where = self.was(sources[taken[0]])
        if self.goal.lamp:
            if record.lamp is None:
                return ""
            lamp, stand = record.lamp
            return (
                f"find the {self.goal.item} (it {where}), take it, go to {self.place(stand)} and use {self.item(lamp)}"
            )
        if len(taken) < len(items):
            put = self.board.words.place("it", self.place(target))
            other = next(self.item(item) for item in items if item not in sources)
            return f"find one more {self.goal.item} (it {where}), take it, then {put} beside {other}"
        if self.goal.count == 2:
            told = ", ".join(f"{self.item(item)} {self.was(sources[item])}" for item in items)
            put = self.board.words.place("both", self.place(target))
            return f"find two {self.goal.item} ({told}), take one at a time and {put}"
        put = self.board.words.place("it", self.place(target))
        tool = record.tools.get(taken[0])
        # An object that was hot from the start needs no tool.
        if not self.goal.state or tool is None:
            return f"find the {self.goal.item} (it {where}), take it, then {put}"
        verb = _VERBS[self.goal.state]
        return f"find the {self.goal.item} (it {where}), take it, {verb} it with {self.place(tool)}, then {put}"


def _won_summary(teller: _Teller, record: Record) -> str:
    items, target = winning_items(record)
    sources, goal = record.first_sources, teller.goal
    found = " and ".join(f"{teller.item(item)} {teller.at(sources[item])}" for item in items if item in sources)
    if goal.lamp and record.lamp is not None:
        done = f"used {teller.item(record.lamp[0])}"
    else:
        processed = f"{_DONE[goal.state]} it, " if goal.state else ""
        done = f"{processed}put {'both' if goal.count == 2 else 'it'} {teller.at(target)}"
    return f"won in {record.num_steps} steps: found {found}, {done}." if found else f"won in {record.num_steps} steps."


def _usable(teller: _Teller, item: int) -> bool:
    return teller.board.game.items[item].kind == teller.goal.item


def _clumsy(record: Record) -> _Mistake | None:
    count = len(record.invalid)
    if count < _MANY_INVALID or 3 * count < record.num_steps:
        return None
    command = record.invalid[-1].strip()
    quotable = 0 < len(command.split()) <= _MAX_QUOTED_WORDS and len(command) <= 60 and command.isprintable()
    named = f'"{command}"' if quotable and '"' not in command else "commands that do nothing"
    return _Mistake(f"{count} commands did nothing", f"repeat {named}")


def _not_found(teller: _Teller, record: Record) -> _Mistake:
    """Word the mistake of an episode in which no object of the wanted type was ever taken."""
    kind = teller.goal.item
    seen = [item for item in record.seen if _usable(teller, item)]
    if seen and record.engine.held == NOBODY:
        item = seen[0]
        where = teller.at(record.seen[item])
        return _Mistake(f"saw {teller.item(item)} {where} but never took it", f"walk past {teller.item(item)} {where}")
    if record.takes:
        wrong = teller.item(record.takes[-1][0])
        return _Mistake(f"took {wrong} instead of a {kind}", f"take {wrong} when you need a {kind}")
    shut = [
        place
        for place in record.visits
        if place not in record.looked_into and any(_usable(teller, item) for item in teller.board.contents[place])
    ]
    if shut:
        return _Mistake(f"did not open {teller.place(shut[0])}", f"leave {teller.place(shut[0])} closed")
    place, times = max(record.visits.items(), key=lambda pair: (pair[1], -pair[0]), default=(NOBODY, 0))
    if times >= _MANY_VISITS:
        name = teller.place(place)
        return _Mistake(f"went to {name} {times} times, never found the {kind}", f"go back to {name} without need")
    if not record.visits:
        return _Mistake("went nowhere", "stand still")
    last = teller.place(next(reversed(record.visits)))
    return _Mistake(
        f"searched {len(record.visits)} places, never found the {kind}", f"end the search at {last} without a {kind}"
    )


def _not_lit(teller: _Teller, record: Record) -> _Mistake:
    engine, kind = record.engine, teller.goal.item
    if engine.held == NOBODY or not _usable(teller, engine.held):
        last = next(item for item, _ in reversed(record.takes) if _usable(teller, item))
        return _Mistake(
            f"took {teller.item(last)} but put it down", f"put {teller.item(last)} down before using the lamp"
        )
    if lamp_is_on(record):
        return _Mistake(f"used the lamp away from the {kind}", f"leave the lamp without holding the {kind}")
    return _Mistake(
        f"took {teller.item(engine.held)} but used no lamp", f"carry {teller.item(engine.held)} past the lamp"
    )


def _one_of_two(teller: _Teller, record: Record) -> _Mistake | None:
    """Word the mistake of a task for two objects when at least one is where the task wants it."""
    filled = {
        place: [item for item in record.engine.contents[place] if _usable(teller, item)]
        for place in teller.board.goal_places
    }
    used = [place for place, items in filled.items() if items]
    if len(used) > 1:
        first, second = (teller.place(place) for place in used[:2])
        return _Mistake(f"put one in {first}, one in {second}", f"split the two over {first} and {second}")
    if used:
        item = teller.item(filled[used[0]][0])
        return _Mistake(f"put only {item} {teller.at(used[0])}", f"stop after {item}")
    return None


def _not_placed(teller: _Teller, record: Record) -> _Mistake:
    """Word the mistake of an episode in which a wanted object was taken but the goal was not reached."""
    goal, engine = teller.goal, record.engine
    if goal.count == 2:
        mistake = _one_of_two(teller, record)
        if mistake is not None:
            return mistake
    item = next(item for item, _ in reversed(record.takes) if _usable(teller, item))
    name = teller.item(item)
    wrong = [place for put, place in record.puts if put == item and place not in teller.board.goal_places]
    if goal.state and not any(engine.states[other] & goal.state for other, _ in record.takes if _usable(teller, other)):
        verb = _VERBS[goal.state]
        put = [place for put, place in record.puts if put == item]
        before = f"put {name} down" if put else f"carry {name} around"
        return _Mistake(f"took {name} but did not {verb} it", f"{before} before you {verb} it")
    if wrong and engine.held != item:
        return _Mistake(f"put {name} {teller.at(wrong[-1])}", f"put {name} {teller.at(wrong[-1])}")
    return _Mistake(f"took {name} but never put it in a {goal.receptacle}", f"carry {name} around")


def _find_mistake(teller: _Teller, record: Record) -> _Mistake:
    clumsy = _clumsy(record)
    if clumsy is not None:
        return clumsy
    if not any(_usable(teller, item) for item, _ in record.takes):
        return _not_found(teller, record)
    return _not_lit(teller, record) if teller.goal.lamp else _not_placed(teller, record)


def annotate(board: Board, steps: Sequence[Step], won: bool) -> Analysis:
    """Return the analysis of a trajectory: at most 25 words of summary and 40 of skill.

    The commands of `steps` are replayed, so that what happened is known rather than guessed from the text. A
    trajectory marked as won that the replay does not win is told by the oracle's own solution.
    """
    teller = _Teller(board)
    record = replay(board, [step.action for step in steps])
    best = teller.workflow(replay(board, solve(board))) or f"{board.game.task}"
    if won:
        skill = teller.workflow(record) or best
        return Analysis(episode_summary=_won_summary(teller, record), episode_skill=f"{skill}.")
    mistake = _find_mistake(teller, record)
    return Analysis(
        episode_summary=f"failed after {record.num_steps} steps: {mistake.happened}.",
        episode_skill=f"do not {mistake.rule}. instead {best}.",
    )
