"""What each way to bound the age of what is trained costs: a simulated clock drives the real buffer.

Run as `python -m seed_async.tools.bench_staleness [--sigma 1] [--staleness 0 1 2 4 8]`; it prints a Markdown table.
Episode times are log-normal, `--difficulty-share` of the spread being that of the games: the hard ones take longer.
Tokens are sampled evenly over them, and new weights reach running episodes at once. The learner takes `--train-share`
of the time in which the players play one batch. Rows without a gate open a group whenever a player is free: the
buffer's own gate is held open. What is trained trains the policies of `bandit`; all rows have the same time.
"""

import argparse
import heapq
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np

from seed_async.learner.buffer import GroupBuffer
from seed_async.learner.ledger import Fate
from seed_async.messages import Lease, Sample, Trajectory, Turn
from seed_async.tools.bandit import HARD_CLASSES, NUM_CLASSES, BanditLearners
from seed_async.topology import Topology

TOKENS_A_MEAN_EPISODE: Final = 32
"""Enough to see where in an episode the versions change."""
NEVER_S: Final = 1e9
ACTOR: Final = "player"
SHOWN_AGES: Final = 4


class Strategy(NamedTuple):
    """A row of the table: the topology's `on_stale`, and whether the admission gate is in force."""

    name: str
    on_stale: str
    gate: bool


STRATEGIES: Final = (
    Strategy("drop, no gate", "drop", False),
    Strategy("mask, no gate", "mask", False),
    Strategy("drop", "drop", True),
    Strategy("mask", "mask", True),
    Strategy("wait", "wait", True),
)


class UngatedBuffer(GroupBuffer):
    """Counts nothing as admitted, so that its gate is always open."""

    @property
    def groups_admitted(self) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class Scenario:
    """The load: episodes of mean 1 s, `players` at a time, `batches_played` times the trajectories of a batch.

    It ends after `updates` or `seconds`, whichever comes first.
    """

    groups: int
    group_size: int
    sigma: float
    updates: float
    batches_played: float
    train_share: float
    seed: int
    seconds: float = NEVER_S
    difficulty_share: float = 0.0
    learners: int = 1
    learning_rate: float = 1.0

    @property
    def players(self) -> int:
        """Episodes at a time: batches_played * groups * group_size."""
        return round(self.batches_played * self.groups * self.group_size)

    @property
    def train_s(self) -> float:
        """Seconds of an update: train_share * groups * group_size * 1 s / players."""
        return self.train_share * self.groups * self.group_size / self.players

    def topology(self, on_stale: str, max_staleness: int) -> Topology:
        """A run with these groups and this bound; nothing of it is ever launched."""
        return Topology.model_validate(
            {
                "method": "grpo",
                "model": {"path": "simulated"},
                "run": {"seed": self.seed},
                "loss": {"divide_by_std": self.group_size > 1},
                "rollout": {"groups_per_update": self.groups, "group_size": self.group_size},
                "staleness": {"max": max_staleness, "on_stale": on_stale},
                "buffer": {"lease_timeout_s": NEVER_S, "max_bytes": 1 << 40},
            }
        )

    def episode_s(self, lease: Lease) -> float:
        """Seconds of an episode, the same for a lease in every row: exp(sigma z - sigma^2 / 2), of mean 1.

        z = sqrt(share) d + sqrt(1 - share) e, with d the normal quantile of the game's class and e of the lease.
        """
        difficulty = NormalDist().inv_cdf((class_of(lease.task_index) + 0.5) / NUM_CLASSES)
        luck = np.random.default_rng(lease.seed).standard_normal()
        z = self.difficulty_share**0.5 * difficulty + (1 - self.difficulty_share) ** 0.5 * luck
        return float(np.exp(self.sigma * z - self.sigma**2 / 2))


def class_of(task_index: int) -> int:
    """The class of a game, which says how hard it is."""
    return task_index % NUM_CLASSES


@dataclass
class Outcome:
    """What a simulated run comes to. `trained_s` and `wasted_s` are seconds of playing, summed over the players.

    `rewards` [L, C] are the learners' expected returns in each class at the end.
    """

    elapsed_s: float = 0.0
    updates: int = 0
    trained_s: float = 0.0
    wasted_s: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    accounting: dict[str, Any] = field(default_factory=dict)
    rewards: np.ndarray = field(default_factory=lambda: np.zeros((1, NUM_CLASSES)))


def _trajectory(lease: Lease, started_s: float, seconds: float, published_s: Sequence[float]) -> Trajectory:
    """An episode of one turn; a token is of the newest version that was published when it was sampled."""
    num_tokens = max(1, round(seconds * TOKENS_A_MEAN_EPISODE))
    sampled_s = started_s + seconds * np.arange(num_tokens) / num_tokens
    versions = np.searchsorted(np.asarray(published_s), sampled_s, side="right").astype(np.int32)
    turn = Turn(
        observation="",
        response="",
        action="",
        parsed=True,
        valid=True,
        opening="x",
        prompt_ids=np.zeros(1, dtype=np.int32),
        response_ids=np.zeros(num_tokens, dtype=np.int32),
        behaviour_logprob=np.zeros(num_tokens, dtype=np.float32),
        versions=versions,
    )
    return Trajectory.of(
        (turn,),
        trajectory_id=lease.lease_id,
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        member=lease.member,
        actor=ACTOR,
        incarnation=ACTOR,
        task_id=str(lease.task_index),
        task="",
        task_type="",
        vocabulary="",
        task_line="",
        status="won",
        episode_return=1.0,
        started_at_s=started_s,
        ended_at_s=started_s + seconds,
    )


class Simulation:
    """Players, a learner and one real buffer on a clock that jumps from event to event."""

    def __init__(self, scenario: Scenario, strategy: Strategy, max_staleness: int) -> None:
        """Nothing is played yet."""
        self._scenario, self._max_staleness = scenario, max_staleness
        kind = GroupBuffer if strategy.gate else UngatedBuffer
        self._buffer = kind(scenario.topology(strategy.on_stale, max_staleness), 1, self._note_fate)
        self._buffer.hello(ACTOR, ACTOR, num_tasks=1 << 16, tasks_digest="")
        self._buffer.advance(0)
        self._published_s: list[float] = []  # when version 1, 2, ... came
        self._playing: list[tuple[float, int, Lease, float]] = []  # a heap by the time of the end
        self._free = scenario.players
        self._number = 0
        self._outcome = Outcome()
        self._learners = BanditLearners(scenario.learners, scenario.group_size, scenario.learning_rate, scenario.seed)

    def run(self) -> Outcome:
        """Play and train until enough updates are made or the time is up."""
        now_s, training_until_s = 0.0, NEVER_S
        batch: tuple[Sample, ...] = ()
        while len(self._published_s) < self._scenario.updates:
            self._start_episodes(now_s)
            if not batch:
                batch = self._buffer.take_batch(len(self._published_s))
                training_until_s = now_s + self._scenario.train_s if batch else NEVER_S
                self._start_episodes(now_s)
            next_end_s = self._playing[0][0] if self._playing else NEVER_S
            if min(training_until_s, next_end_s) > self._scenario.seconds:
                now_s = self._scenario.seconds
                break
            if training_until_s <= next_end_s:
                now_s = training_until_s
                self._learn(batch)
                batch = ()
                self._published_s.append(now_s)
                self._buffer.advance(len(self._published_s))
            else:
                now_s, _, lease, started_s = heapq.heappop(self._playing)
                self._buffer.submit(_trajectory(lease, started_s, now_s - started_s, self._published_s), now_s)
                self._free += 1
        self._outcome.elapsed_s, self._outcome.accounting = now_s, self._buffer.accounting()
        self._outcome.updates = len(self._published_s)
        self._outcome.rewards = self._learners.rewards()
        return self._outcome

    def _learn(self, batch: Sequence[Sample]) -> None:
        """Train the bandit on the tokens of a batch that are young enough."""
        versions = [sample.trajectory.versions for sample in batch]
        lengths = [each.size for each in versions]
        classes = np.repeat([class_of(int(sample.trajectory.task_id)) for sample in batch], lengths)
        ages = len(self._published_s) - np.concatenate(versions)
        episodes = np.repeat(np.arange(len(batch)), lengths)
        self._learners.update(classes, episodes, np.concatenate(versions), ages <= self._max_staleness)

    def _start_episodes(self, now_s: float) -> None:
        leases = self._buffer.grant(ACTOR, ACTOR, self._free, now_s)
        self._free -= len(leases)
        for lease in leases:
            self._number += 1
            end_s = now_s + self._scenario.episode_s(lease)
            heapq.heappush(self._playing, (end_s, self._number, lease, now_s))

    def _note_fate(self, sample: Sample, fate: Fate, version: int, age: int) -> None:
        """Add up the tokens that the loss would read, and the playing time that those and the others stand for."""
        trajectory = sample.trajectory
        ages = version - trajectory.versions
        young = ages[ages <= self._max_staleness] if fate == "trained" else ages[:0]
        seconds = trajectory.ended_at_s - trajectory.started_at_s
        self._outcome.ages.update(young.tolist())
        self._outcome.trained_s += seconds * young.size / ages.size
        self._outcome.wasted_s += seconds * (1 - young.size / ages.size)


HEADER: Final = (
    "K",
    "on_stale",
    "trained / capacity",
    "wasted of played",
    "tokens kept",
    "length ratio",
    "slowest tenth",
    "ages of tokens 0, 1, 2, 3, 4+",
    "updates",
    "reward",
    "in hard games",
)


def row(scenario: Scenario, strategy: Strategy, max_staleness: int) -> tuple[str, ...]:
    """Simulate one row of the table."""
    outcome = Simulation(scenario, strategy, max_staleness).run()
    bias = outcome.accounting["bias"]
    total = sum(outcome.ages.values())
    older = sum(number for age, number in outcome.ages.items() if age >= SHOWN_AGES)
    ages = [outcome.ages[age] for age in range(SHOWN_AGES)] + [older]
    return (
        str(max_staleness),
        strategy.name,
        f"{outcome.trained_s / (scenario.players * outcome.elapsed_s):.0%}",
        f"{outcome.wasted_s / (outcome.wasted_s + outcome.trained_s):.0%}",
        f"{bias['trained_token_share']:.0%}",
        f"{bias['length_ratio']:.2f}",
        f"{bias['slowest_decile_trained']:.0%}",
        " ".join(f"{number / total:.0%}" for number in ages),
        str(outcome.updates),
        _with_error(outcome.rewards.mean(axis=1)),
        _with_error(outcome.rewards[:, -HARD_CLASSES:].mean(axis=1)),
    )


def _with_error(values: np.ndarray) -> str:
    """Mean over the learners [L] and its standard error."""
    return f"{values.mean():.3f} ± {values.std(ddof=1) / values.size**0.5:.3f}"


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="the bounds K")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the logarithm of an episode's time")
    parser.add_argument("--groups", type=int, default=8, help="groups of an update")
    parser.add_argument(
        "--group-size", type=int, default=8, help="trajectories of a group; 1 shows what grouping costs"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated seconds of a row; an episode has one")
    parser.add_argument("--difficulty-share", type=float, default=0.5, help="share of the game in the spread of times")
    parser.add_argument("--learners", type=int, default=16, help="policies that live through each schedule")
    parser.add_argument("--learning-rate", type=float, default=20.0, help="of the bandit's policies")
    parser.add_argument("--batches-played", type=float, default=1.0, help="players over trajectories of a batch")
    parser.add_argument("--train-share", type=float, default=0.5, help="time of an update over that of playing a batch")
    parser.add_argument("--seed", type=int, default=0, help="decides the episode times")
    options = parser.parse_args(arguments)
    scenario = Scenario(
        groups=options.groups,
        group_size=options.group_size,
        sigma=options.sigma,
        updates=float("inf"),
        batches_played=options.batches_played,
        train_share=options.train_share,
        seed=options.seed,
        seconds=options.seconds,
        difficulty_share=options.difficulty_share,
        learners=options.learners,
        learning_rate=options.learning_rate,
    )
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for max_staleness in options.staleness:
        for strategy in STRATEGIES:
            print("| " + " | ".join(row(scenario, strategy, max_staleness)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
