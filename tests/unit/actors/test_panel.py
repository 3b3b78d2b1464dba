"""The evaluation panel: fixed games, each played once, and both averages."""

import asyncio

import pytest

from seed_async.actors.panel import PanelGame, choose_panel, play_panel, summarise_panel
from seed_async.actors.rollout import EpisodePlayer
from seed_async.envs.isolation import LocalHost
from seed_async.topology import Rollout
from tests.fakes.chat import tiny_chat
from tests.fakes.play import CorridorSuite, ScriptedGenerator

GO = "<action>go</action>"


def test_a_panel_is_the_same_every_time_and_in_the_splits_order() -> None:
    """Scores of different runs can be compared."""
    tasks = [f"t{number:03}" for number in range(200)]
    panel = choose_panel(tasks, 50)
    assert panel == choose_panel(tasks, 50) and len(set(panel)) == 50
    assert list(panel) == sorted(panel) and list(panel) != tasks[:50]


def test_a_panel_of_a_small_split_is_the_whole_split() -> None:
    """And no game twice."""
    assert choose_panel(["a", "b"], 10) == ("a", "b")


@pytest.mark.parametrize("concurrency", [1, 2, 16])
def test_every_game_is_played_once_in_panel_order_with_its_own_seed(concurrency: int) -> None:
    """However many play at once."""
    generator = ScriptedGenerator(tiny_chat(), lambda _: GO)
    rollout = Rollout(prompt_style="compact", max_context_tokens=400, max_response_tokens=40)
    player = EpisodePlayer(tiny_chat(), generator, rollout, temperature=0.4, kind="evaluate")
    suite = CorridorSuite()
    panel = choose_panel(suite.tasks("valid"), 5)
    games = asyncio.run(play_panel(player, lambda: LocalHost(suite.make), panel, concurrency, 3))
    assert [game.task_id for game in games] == list(panel)
    assert all(game.won and game.steps == 2 for game in games)
    assert len({sampling.seed for sampling in generator.samplings}) == 10
    assert all(game.version_min < game.version_max for game in games)


def test_the_failure_of_one_game_ends_the_panel() -> None:
    """A score over fewer games would be another score."""
    player = EpisodePlayer(
        tiny_chat(), ScriptedGenerator(tiny_chat(), lambda _: GO), Rollout(), temperature=0.4, kind="evaluate"
    )
    with pytest.raises(ExceptionGroup):
        asyncio.run(play_panel(player, lambda: LocalHost(CorridorSuite().make), ["valid/0", "missing"], 2, 0))


def test_a_summary_holds_pooled_and_macro_average_and_the_versions_seen() -> None:
    """The two differ when types are unequally frequent."""
    games = [
        PanelGame("a", "put", won=True, steps=2, version_min=3, version_max=3),
        PanelGame("b", "put", won=True, steps=4, version_min=4, version_max=5),
        PanelGame("c", "put", won=False, steps=9, version_min=3, version_max=4),
        PanelGame("d", "heat", won=False, steps=5, version_min=4, version_max=4),
    ]
    line = summarise_panel(games, 4, 0.0, final=True)
    assert (line["won"], line["games"], line["success"]) == (2, 4, 0.5)
    assert line["macro_success"] == pytest.approx((2 / 3 + 0) / 2)
    assert line["by_task_type"] == {"heat": [0, 1], "put": [2, 3]}
    assert (line["version"], line["version_min"], line["version_max"]) == (4, 3, 5)
    assert line["mean_steps"] == 5 and line["final"] and line["seconds"] > 0
