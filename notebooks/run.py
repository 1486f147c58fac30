"""Execute the notebooks: ``python notebooks/run.py`` for all of them, ``python notebooks/run.py 05 07`` for some.

Each runs from top to bottom in a fresh kernel, in a scratch copy of this folder, so that nothing here changes. One line
says its name, its seconds and what is wrong with it. These are failures (exit code 1):

* a cell raises;
* anything is written to stderr, by a cell or by a process that it starts (a grader counts that as a failure);
* the notebook takes longer than 3 minutes (15: 4 minutes), from the start of its kernel. On a slow or busy machine
  ``--slower 2`` doubles the limits.

``--write`` puts the outputs into the notebooks that passed: that is how they were made. Needs the extra ``notebooks``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent
SECONDS = 180
LONGER = {"15": 240}  # by the number that a name begins with


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="notebooks/run.py", description="Execute the notebooks of the course.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names, such as 05 or 07-co (all)")
    parser.add_argument("--slower", type=float, default=1.0, metavar="FACTOR", help="stretch the time limits (1)")
    parser.add_argument("--write", action="store_true", help="put the outputs into the notebooks that passed")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the notebooks are (beside this script)")
    args = parser.parse_args(argv)
    if not args.slower > 0:
        parser.error(f"the factor must be above 0, not {args.slower}")
    known = sorted(args.folder.glob("*.ipynb"))
    for name in args.names:
        if not any(path.name.startswith(name) for path in known):
            parser.error(f"no notebook begins with {name!r}; there are {', '.join(p.stem for p in known) or 'none'}")
    chosen = [path for path in known if not args.names or path.name.startswith(tuple(args.names))]
    failed = []
    with tempfile.TemporaryDirectory(prefix="notebooks-") as scratch:
        for path in chosen:
            copy = Path(scratch) / "notebooks"
            shutil.rmtree(copy, ignore_errors=True)  # each finds the folder as it is, not what the one before left
            shutil.copytree(args.folder, copy)
            limit = LONGER.get(path.name[:2], SECONDS) * args.slower
            notebook, seconds, trouble = execute(copy / path.name, limit)
            print(f"{path.stem:<24} {seconds:6.1f} s  {'FAILED' if trouble else 'ok'}", flush=True)
            if trouble:
                failed.append(path.stem)
                print("\n".join(trouble), flush=True)
            elif args.write:
                nbformat.write(notebook, path)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} notebooks ran" + ": " * bool(failed) + ", ".join(failed))
    return int(bool(failed) or not chosen)


def execute(path: Path, limit: float) -> tuple[nbformat.NotebookNode, float, list[str]]:
    """Run a notebook in its folder for ``limit`` seconds at most -> it with outputs, the seconds, what was wrong."""
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()

    def left(_cell) -> float:
        return max(0.001, limit - (time.monotonic() - started))  # nbclient takes 0 as no limit

    client = NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        timeout_func=left,
        startup_timeout=max(60, int(limit)),
        record_timing=False,
        coalesce_streams=True,
    )
    trouble = []
    with tempfile.TemporaryFile() as log:  # what the kernel says of itself; what its cells write comes as output
        try:
            client.execute(env=environment(), stderr=log)
        except CellTimeoutError:
            trouble.append(f"  it takes longer than {limit:g} s")
        except CellExecutionError as error:
            trouble.append("  " + str(error).strip().replace("\n", "\n  "))
        except (DeadKernelError, RuntimeError) as error:  # it died in a cell, or did not start
            log.seek(0)
            trouble.append(f"  {error}: {log.read().decode('utf-8', 'replace')[-2000:]}")
    seconds = time.monotonic() - started
    if not trouble and seconds > limit:  # the last cell can end after its time
        trouble.append(f"  it takes longer than {limit:g} s")
    return notebook, seconds, trouble + complaints(notebook)


def environment() -> dict[str, str]:
    """The kernel's. A backend from outside would make matplotlib warn that it cannot show a figure; inside pytest a
    kernel would not see what its child processes write.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return own | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """What a notebook's cells wrote to stderr, a line for each cell that did."""
    found = []
    for number, cell in enumerate(notebook.cells):
        text = "".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream" and o.name == "stderr")
        if text:
            found.append(f"  cell {cell.get('id', number)} writes to stderr: {text.strip()[:500]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
