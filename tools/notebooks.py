"""Run the notebooks of examples/ from top to bottom and write them back with their outputs.

    python tools/notebooks.py            # all of them
    python tools/notebooks.py 02 05      # those whose names begin like that

A kernel of this Python runs them (pip install 'smoe-mlx[test]'), in an empty folder.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path, seconds: int = 120) -> Any:
    """The notebook at `path` with new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        TimeoutError: a cell took longer than `seconds`.
    """
    notebook = nbformat.read(path, as_version=4)
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm wants widgets
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=seconds,
            kernel_name=KERNEL["name"],
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of a port on 127.0.0.1
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=quiet)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[""], help="how their names begin")
    args = parser.parse_args()
    paths = [p for p in sorted(EXAMPLES.glob("*.ipynb")) if p.name.startswith(tuple(args.names))]
    if not paths:
        sys.exit(f"no notebook in {EXAMPLES} begins with {' or '.join(args.names)}")
    for path in paths:
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
