"""Fuzz what reads files from strangers, guided by coverage (atheris, libFuzzer).

    pip install atheris
    python tests/fuzz/fuzz.py vault -max_total_time=300 NEW tests/fuzz/corpus/vault
    python tests/fuzz/fuzz.py --seeds   # write good files of each kind into the corpus

The first folder takes what is found. Options are libFuzzer's. `tests/test_fuzz.py` replays the
corpus; a file that made a target fail belongs there when it is mended.
"""

import hashlib
import os
import sys
import tracemalloc
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    if sys.argv[1:] == ["--seeds"]:
        import targets

        for name, files in targets.seeds().items():
            folder = HERE / "corpus" / name
            folder.mkdir(parents=True, exist_ok=True)
            for data in files:
                (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)
        return
    import atheris

    with atheris.instrument_imports(include=["smoe_mlx"]):
        import targets
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in targets.TARGETS:
        sys.exit(f"{name!r}: one of {', '.join(targets.TARGETS)}")
    for data in targets.seeds()[name]:  # what is imported late, and made once
        targets.TARGETS[name](data)
    tracemalloc.start()
    options = ["-timeout=20", "-rss_limit_mb=4096", f"-dict={HERE / 'json.dict'}"]
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:]], lambda data: targets.check(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
    os._exit(0)
