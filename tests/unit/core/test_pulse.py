"""The pulse: start-up is never a hang, a counter that stands still is, and a restart begins anew."""

import subprocess
import sys
from pathlib import Path

from seed_async.pulse import Pulse, PulseWatch


def test_silence_counts_from_the_last_beat_and_start_up_is_never_silence(tmp_path: Path) -> None:
    now_s = [100.0]
    watch = PulseWatch(tmp_path / "pulse" / "actor-0", lambda: now_s[0])
    now_s[0] += 1000
    assert watch.silent_s() == 0  # not even the file is there
    pulse = Pulse(tmp_path / "pulse" / "actor-0")
    now_s[0] += 1000
    assert watch.silent_s() == 0  # no beat yet
    pulse.beat()
    assert watch.silent_s() == 0
    now_s[0] += 7
    assert watch.silent_s() == 7
    pulse.beat()
    assert watch.silent_s() == 0


def test_a_restarted_process_is_not_blamed_for_its_predecessor(tmp_path: Path) -> None:
    now_s = [100.0]
    watch = PulseWatch(tmp_path / "p", lambda: now_s[0])
    old = Pulse(tmp_path / "p")
    old.beat()
    assert watch.silent_s() == 0
    now_s[0] += 50
    watch.restart()
    assert watch.silent_s() == 0
    old.beat()  # a last beat of the dead goes nowhere
    new = Pulse(tmp_path / "p")
    now_s[0] += 50
    assert watch.silent_s() == 0
    new.beat()
    assert watch.silent_s() == 0
    now_s[0] += 3
    assert watch.silent_s() == 3


def test_beats_are_seen_by_another_process(tmp_path: Path) -> None:
    pulse, watch = Pulse(tmp_path / "p"), PulseWatch(tmp_path / "p")
    program = "import sys, pathlib; from seed_async.pulse import Pulse; Pulse(pathlib.Path(sys.argv[1])).beat()"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "p")], check=True)
    assert watch.silent_s() == 0
    assert (tmp_path / "p").read_bytes() == (1).to_bytes(8, "little")
    pulse.beat()
    assert (tmp_path / "p").read_bytes() == (1).to_bytes(8, "little")
