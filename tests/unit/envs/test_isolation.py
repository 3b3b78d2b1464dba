"""One bad environment costs one episode: real worker processes that hang, crash, raise, leak and talk nonsense."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil
import pytest

from seed_async.envs.contract import GameFormatError, StepResult
from seed_async.envs.isolation import EnvironmentFailedError, LocalHost, ProcessHost, isolation_of, open_host
from seed_async.envs.registry import open_suite
from seed_async.topology import Env
from tests.fakes.boxes import BoxesSuite
from tests.fakes.trouble import STEPS_TO_WIN, TroubleGame, TroubleSuite

Result = TypeVar("Result")
TROUBLE = "tests.fakes.trouble:TroubleSuite"


def env(**given: object) -> Env:
    """Deadlines that a test can wait for."""
    settings = {"id": TROUBLE, "step_timeout_s": 2.0, "episode_timeout_s": 60.0, "max_memory_mb": 512}
    return Env.model_validate(settings | given)


def with_host(play: Callable[[ProcessHost], Awaitable[Result]], **given: object) -> Result:
    """Run `play` on a host, which is closed whatever happens."""

    async def run() -> Result:
        host = ProcessHost(env(**given))
        try:
            return await play(host)
        finally:
            host.close()

    return asyncio.run(run())


async def win(host: ProcessHost, task: str = "train/fine-0") -> StepResult:
    """Play a game to its end."""
    await host.reset(task)
    for _ in range(STEPS_TO_WIN):
        result = await host.step("go")
    assert result.terminated and result.observation.info.won
    return result


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(*pids: int) -> None:
    deadline_s = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"{pids} are still there"
        time.sleep(0.05)


def test_games_play_on_in_one_process_of_their_own() -> None:
    async def play(host: ProcessHost) -> None:
        await win(host)
        pid = host.pid
        assert pid is not None and pid != os.getpid()
        assert f"of {pid}." in (await win(host)).observation.text, "the environment is in that process"
        assert host.pid == pid, "a new game needs no new process"
        with pytest.raises(GameFormatError, match=r"^train/unplayable has no end$"):
            await host.reset("train/unplayable")
        assert host.pid == pid, "a game that cannot be played is no failure of the environment"

    with_host(play)


@pytest.mark.parametrize(
    ("trouble", "kind", "said"),
    [
        ("hang_reset", "timeout", "no answer to reset within 2 s"),
        ("hang_step", "timeout", "no answer to step within 2 s"),
        ("stop_step", "timeout", "no answer to step within 2 s"),
        ("crash_step", "died", "ended with signal SIGSEGV"),
        ("exit_step", "raised", "SystemExit: 3"),
        ("raise_reset", "raised", "ZeroDivisionError: a bug of the user's"),
        ("raise_step", "raised", "ZeroDivisionError: a bug of the user's"),
        ("leak_step", "raised", "MemoryError"),
        ("garbage_step", "garbage", "in the answer to step"),
        ("flood_step", "garbage", "the limit is"),
        ("nonsense", "garbage", "Expected `float`, got `str`"),
        ("surrogate", "raised", "UnicodeEncodeError"),
    ],
)
def test_trouble_costs_one_episode_and_the_next_game_has_a_fresh_process(trouble: str, kind: str, said: str) -> None:
    async def play(host: ProcessHost) -> None:
        await win(host)
        pid = host.pid
        with pytest.raises(EnvironmentFailedError, match=said) as failure:
            await win(host, f"train/{trouble}")
        assert failure.value.kind == kind
        assert host.pid is None and pid is not None and gone(pid)
        with pytest.raises(EnvironmentFailedError, match="without a reset"):
            await host.step("go")
        await win(host)
        assert host.pid not in (None, pid)

    with_host(play)


def test_a_worker_killed_or_stopped_from_outside_fails_its_episode_only() -> None:
    async def play(host: ProcessHost) -> None:
        for number, kind in ((signal.SIGKILL, "died"), (signal.SIGSTOP, "timeout")):
            await host.reset("train/fine-0")
            pid = host.pid
            assert pid is not None
            os.kill(pid, number)
            with pytest.raises(EnvironmentFailedError) as failure:
                await host.step("go")
            assert failure.value.kind == kind and gone(pid)
            await win(host)

    with_host(play)


def test_an_episode_of_slow_steps_ends_at_its_own_deadline() -> None:
    async def play(host: ProcessHost) -> None:
        with pytest.raises(EnvironmentFailedError) as failure:
            await win(host, "train/slow")
        assert failure.value.kind == "timeout"

    with_host(play, episode_timeout_s=1.0)


def test_other_games_go_on_while_one_hangs() -> None:
    """The event loop never waits for a worker."""

    async def play(host: ProcessHost) -> None:
        other = ProcessHost(env())
        try:
            await other.reset("train/fine-0")
            hanging = asyncio.create_task(win(host, "train/hang_reset"))
            games, longest_s = 0, 0.0
            while not hanging.done():
                started_s = time.monotonic()
                await win(other)
                games, longest_s = games + 1, max(longest_s, time.monotonic() - started_s)
            with pytest.raises(EnvironmentFailedError):
                await hanging
            assert games > 20 and longest_s < 1.5
        finally:
            other.close()

    with_host(play)


def test_a_cancelled_episode_leaves_no_process() -> None:
    async def play(host: ProcessHost) -> None:
        await win(host)
        pid = host.pid
        task = asyncio.create_task(win(host, "train/hang_step"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pid is not None and gone(pid)

    with_host(play)


def test_what_an_environment_has_started_ends_with_it() -> None:
    async def play(host: ProcessHost) -> None:
        await win(host)
        assert host.pid is not None
        worker = psutil.Process(host.pid)
        task = asyncio.create_task(win(host, "train/child_step"))
        while not worker.children():
            await asyncio.sleep(0.05)
        children = worker.children()
        with pytest.raises(EnvironmentFailedError):
            await task
        wait_until_gone(*(child.pid for child in children))

    with_host(play)


def test_a_suite_that_cannot_make_an_environment_says_so() -> None:
    async def play(host: ProcessHost) -> None:
        with pytest.raises(EnvironmentFailedError, match="OSError: the simulator is not installed"):
            await host.reset("train/fine-0")

    with_host(play, id="tests.fakes.trouble:BrokenSuite")


OWNER = """
import asyncio, os, signal, sys
from seed_async.envs.isolation import ProcessHost
from seed_async.topology import Env
async def main():
    hosts = [ProcessHost(Env(id="tests.fakes.trouble:TroubleSuite")) for _ in range(2)]
    for host in hosts:
        await host.reset("train/fine-0")
    os.kill(hosts[1].pid, signal.SIGSTOP)
    print(*(host.pid for host in hosts), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_owner_however_it_dies_even_stopped_ones(how: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2 and not any(map(gone, pids))
    owner.send_signal(how)
    owner.wait(10)
    owner.stdout.close()
    wait_until_gone(*pids)


@pytest.mark.parametrize("trouble", ["raise_reset", "raise_step", "exit_step", "nonsense", "surrogate"])
def test_in_process_too_whatever_is_raised_costs_one_episode(trouble: str) -> None:
    made: list[TroubleGame] = []

    def make() -> TroubleGame:
        made.append(TroubleGame())
        return made[-1]

    async def play(task: str) -> None:
        await host.reset(task)
        for _ in range(STEPS_TO_WIN):
            await host.step("go")

    host = LocalHost(make)
    asyncio.run(play("train/fine-0"))
    with pytest.raises(EnvironmentFailedError) as failure:
        asyncio.run(play(f"train/{trouble}"))
    assert failure.value.kind == "raised"
    asyncio.run(play("train/fine-0"))
    assert len(made) == 2, "an environment that failed is not used again"
    with pytest.raises(GameFormatError, match="no end"):
        asyncio.run(play("train/unplayable"))


def test_the_suite_says_whether_it_may_block_and_the_topology_has_the_last_word() -> None:
    assert isolation_of(open_suite(Env()), Env()) == "none"
    blocking = TroubleSuite(env())
    assert isolation_of(blocking, env()) == "process"
    assert isolation_of(blocking, env(isolation="none")) == "none"
    assert isolation_of(BoxesSuite(Env()), Env(isolation="process")) == "process"
    assert isinstance(open_host(blocking, env()), ProcessHost)
    assert isinstance(open_host(BoxesSuite(Env()), Env()), LocalHost)
