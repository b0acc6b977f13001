"""The fuzzers' corpus, replayed: what was found once is understood or refused for good."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
REPLAY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import targets
done = {}
for folder in sorted((Path(sys.argv[1]) / "corpus").iterdir()):
    files = sorted(folder.iterdir())
    targets.TARGETS[folder.name](files[0].read_bytes())  # what is imported late, and made once
    for path in files:
        try:
            targets.check(folder.name, path.read_bytes())
        except BaseException as e:
            raise SystemExit(f"{path}: {e!r}")
    done[folder.name] = len(files)
most = 0
for name, files in targets.greedy(400_000).items():
    for data in files:
        try:
            most = max(most, targets.check(name, data) / len(data))
        except BaseException as e:
            raise SystemExit(f"{name}: {data[:20]}: {e!r}")
print(json.dumps([done, most]))
"""


@pytest.fixture(scope="module")
def replayed():
    """In a process of its own: the guard cannot be taken off again."""
    command = [sys.executable, "-c", REPLAY, str(FUZZ)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


def test_the_corpus_is_understood_or_refused(replayed):
    assert len(replayed[0]) == 9
    assert all(replayed[0].values())


def test_memory_is_bounded_by_the_size_of_a_file(replayed):
    """The guard compares each with its bound; here, that the greediest came near it."""
    assert 16 < replayed[1] < 64
