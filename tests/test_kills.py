"""The short form of check_kills.py."""

import json
import subprocess
import sys
from pathlib import Path


def test_killed_at_random_moments_there_is_the_old_state_or_the_new_one():
    command = [sys.executable, Path(__file__).with_name("check_kills.py"), "--times", "4"]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    states = json.loads(out.stdout)
    assert states.keys() == {"shatter", "session", "usage"}
    assert {sum(x.values()) for x in states.values()} == {4}
