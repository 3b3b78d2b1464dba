"""The simulation behind the table of `on_stale`: whatever the load, each way keeps its promise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_async.messages import Lease
from seed_async.tools.bandit import HARD_CLASSES, NUM_CLASSES
from seed_async.tools.bench_staleness import HEADER, STRATEGIES, Scenario, Simulation, main

SMALL = Scenario(groups=2, group_size=3, sigma=1.0, updates=8, batches_played=1.0, train_share=0.5, seed=0)
SCENARIOS = st.builds(
    Scenario,
    groups=st.integers(1, 3),
    group_size=st.integers(1, 3),
    sigma=st.floats(0, 2),
    updates=st.integers(1, 8),
    batches_played=st.sampled_from([0.5, 1.0, 3.0]),
    train_share=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=150, deadline=None)
@given(scenario=SCENARIOS, strategy=st.sampled_from(STRATEGIES), max_staleness=st.integers(0, 3))
def test_every_schedule_ends_within_the_bound_and_wait_wastes_nothing(scenario, strategy, max_staleness) -> None:
    """Through the real buffer: the run comes to its end, no trained token is too old, the books balance."""
    if not scenario.players:
        return
    outcome = Simulation(scenario, strategy, max_staleness).run()
    accounting = outcome.accounting
    assert accounting["balance_ok"] and 0 <= min(outcome.ages, default=0) <= max(outcome.ages, default=0)
    assert max(outcome.ages, default=0) <= max_staleness
    assert accounting["trained"] == scenario.updates * scenario.groups * scenario.group_size
    if strategy.on_stale == "wait" or (strategy.gate and max_staleness == 0):
        assert outcome.wasted_s == 0 and accounting["dropped"] == {} and accounting["masked"]["tokens"] == 0
        assert accounting["bias"]["slowest_decile_trained"] == pytest.approx(1.0)
    if strategy.on_stale == "mask":
        assert accounting["dropped"] == {}


def test_the_figures_are_those_of_a_schedule_that_is_known() -> None:
    """Equal episodes and a learner without cost, K = 0: one second an update, nothing lost."""
    scenario = Scenario(groups=2, group_size=3, sigma=0.0, updates=8, batches_played=1.0, train_share=0.0, seed=0)
    for strategy in STRATEGIES:
        outcome = Simulation(scenario, strategy, 0).run()
        assert outcome.elapsed_s == pytest.approx(8.0) and outcome.wasted_s == 0
        assert outcome.trained_s == pytest.approx(8.0 * scenario.players)


def test_dropping_loses_the_slow_episodes_and_masking_keeps_more_of_them() -> None:
    """The bias that the counters show."""
    shares = {}
    for strategy in STRATEGIES:
        bias = Simulation(SMALL, strategy, 1).run().accounting["bias"]
        shares[strategy.name] = bias["slowest_decile_trained"]
        assert bias["length_ratio"] <= 1.0 + 1e-9
    assert shares["drop, no gate"] < shares["wait"] == pytest.approx(1.0)


def test_a_row_ends_with_its_time_and_hard_games_take_longer() -> None:
    """All rows have the same time, so that their rewards can be compared."""
    scenario = replace(SMALL, updates=1000, seconds=12.5, difficulty_share=0.5, learners=2)
    for strategy in STRATEGIES:
        outcome = Simulation(scenario, strategy, 1).run()
        assert outcome.elapsed_s == 12.5 and outcome.rewards.shape == (2, NUM_CLASSES)
    times = [
        [
            scenario.episode_s(Lease(lease_id="", group_id="", member=0, task_index=task, seed=seed))
            for seed in range(400)
        ]
        for task in (0, NUM_CLASSES - 1)
    ]
    assert np.mean(times[0]) < 0.5 * np.mean(times[1])


def test_dropping_the_slow_keeps_hard_games_from_being_learned() -> None:
    """The bias, as reward: per update `drop` learns less than `wait` where episodes are long."""
    scenario = replace(SMALL, groups=8, group_size=8, updates=24, difficulty_share=0.5, learners=8, learning_rate=20.0)
    hard = {}
    for strategy in STRATEGIES:
        outcome = Simulation(scenario, strategy, 1).run()
        assert outcome.updates == 24
        hard[strategy.name] = outcome.rewards[:, -HARD_CLASSES:].mean()
    assert hard["drop, no gate"] < hard["drop"] < hard["wait"]


def test_the_command_prints_a_markdown_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each bound and strategy."""
    main(["--staleness", "0", "1", "--seconds", "9", "--groups", "2", "--group-size", "2", "--learners", "2"])
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|") == len(HEADER) + 1
    assert len(rows) == 2 * len(STRATEGIES) and all(row.count("|") == len(HEADER) + 1 for row in rows)
