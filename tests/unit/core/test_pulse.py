"""The pulse: a counter that stands still is silence, the start has its own steps, and a restart begins anew."""

import subprocess
import sys
from pathlib import Path

from seed_async.pulse import Pulse, PulseWatch, Silence, read_counts


def test_silence_counts_from_the_start_the_last_step_and_the_last_beat(tmp_path: Path) -> None:
    now_s = [100.0]
    watch = PulseWatch(tmp_path / "pulse" / "actor-0", lambda: now_s[0])
    now_s[0] += 20
    assert watch.silence() == Silence(20, starting=True)  # not even the file is there
    pulse = Pulse(tmp_path / "pulse" / "actor-0")
    now_s[0] += 20
    assert watch.silence() == Silence(40, starting=True)
    pulse.step()
    assert watch.silence() == Silence(0, starting=True)
    now_s[0] += 5
    assert watch.silence() == Silence(5, starting=True)
    pulse.beat()
    assert watch.silence() == Silence(0, starting=False)
    now_s[0] += 7
    assert watch.silence() == Silence(7, starting=False)
    pulse.beat()
    assert watch.silence() == Silence(0, starting=False)


def test_a_restarted_process_is_not_blamed_for_its_predecessor(tmp_path: Path) -> None:
    now_s = [100.0]
    watch = PulseWatch(tmp_path / "p", lambda: now_s[0])
    old = Pulse(tmp_path / "p")
    old.beat()
    assert watch.silence() == Silence(0, starting=False)
    now_s[0] += 50
    watch.restart()
    assert watch.silence() == Silence(0, starting=True)
    old.beat()  # a last beat of the dead goes nowhere
    new = Pulse(tmp_path / "p")
    now_s[0] += 50
    assert watch.silence() == Silence(50, starting=True)
    new.beat()
    assert watch.silence() == Silence(0, starting=False)
    now_s[0] += 3
    assert watch.silence() == Silence(3, starting=False)


def test_beats_are_seen_by_another_process(tmp_path: Path) -> None:
    pulse, watch = Pulse(tmp_path / "p"), PulseWatch(tmp_path / "p")
    program = "import sys, pathlib; from seed_async.pulse import Pulse; Pulse(pathlib.Path(sys.argv[1])).beat()"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "p")], check=True)
    assert not watch.silence().starting
    assert read_counts(tmp_path / "p") == (1, 0)
    pulse.step()
    pulse.beat()
    assert read_counts(tmp_path / "p") == (1, 1)
