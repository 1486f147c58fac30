"""Run the checks of an assignment so that what a student's code does costs nothing but that code's own points.

The same functions check a cell of a notebook (``check(test_ratio)``, also under nbgrader) and a file (``pytest``):

* code that hangs is stopped after ``SECONDS`` and the next check runs;
* what it prints is kept short, and what it writes to stderr is shown on stdout (nbgrader gives no points for a cell
  that wrote to stderr);
* it runs in an empty folder of its own, with torch's default dtype float32 and gradients on; the current folder, the
  random states and the default dtype are put back afterwards.

A check runs in a thread, because that works in every system and in a notebook's kernel; a loop in Python is ended from
outside, and what cannot be ended (one endless call in C) is left behind and no longer waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SECONDS = float(os.environ.get("MINIMGRPO_CHECK_SECONDS", "20"))  # a check's limit; the checks take far less
SHOWN = 2000  # characters of what a student's code prints
CELL = "# %%"  # a line that begins so begins a new cell, as editors have it


class TooLong(BaseException):
    """Raised inside code that ran too long; not an Exception, so that ``except Exception`` does not catch it."""


def same(got: Any, expected: Any, says: str, likely: dict[str, Any] | None = None, tolerance: float = 1e-5) -> None:
    """Assert that ``got`` is ``expected``: numbers, (nested) lists of them or tensors, NaN nowhere.

    ``says`` is the first line of the AssertionError: what is probably wrong, in words that help. ``likely`` has better
    words for values that a well-known mistake gives: {words: value}.

    >>> same([0.1 + 0.2, 1], torch.tensor([0.3, 1.0]), "the sums are wrong")
    >>> same(-2.0, 2.0, "wrong", {"the sign is reversed": -2.0})
    Traceback (most recent call last):
    AssertionError: the sign is reversed
      expected: 2.0
      got:      -2.0
    >>> same(float("nan"), 0.0, "all masked must give 0, not NaN")
    Traceback (most recent call last):
    AssertionError: all masked must give 0, not NaN
      expected: 0.0
      got:      nan
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, and not this module's
    if _close(got, expected, tolerance):
        return
    says = next((words for words, value in (likely or {}).items() if _close(got, value, tolerance)), says)
    raise AssertionError(f"{says}\n  expected: {_shown(expected)}\n  got:      {_shown(got)}")


def _close(got: Any, expected: Any, tolerance: float) -> bool:
    try:
        a, b = _tensor(got), _tensor(expected)
        return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())
    except (TypeError, ValueError, RuntimeError):
        return False  # not numbers, or a ragged list


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().double()
    return torch.tensor(value, dtype=torch.float64)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def check(test: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Run ``test``; raise what it raises, or an AssertionError when it takes longer than ``seconds``."""
    __tracebackhide__ = True
    errors: list[BaseException] = []

    def run() -> None:
        __tracebackhide__ = True
        try:
            test()
        except BaseException as error:  # SystemExit as well: exit() in a student's code must not end the kernel
            errors.append(error)

    with _protected():
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            thread.join(seconds)
            late = thread.is_alive()
        finally:
            _end(thread)
    if late:
        raise AssertionError(f"still running after {seconds:g} s: is there a loop that never ends?")
    if errors:
        if isinstance(errors[0], SystemExit | KeyboardInterrupt):
            raise AssertionError(f"the code ended with {type(errors[0]).__name__}, not with a return")
        raise errors[0]


def _end(thread: threading.Thread) -> None:
    """Raise TooLong inside the thread, several times in case something catches it."""
    for _ in range(5):
        if not thread.is_alive():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TooLong))
        thread.join(0.1)


class _Short(io.StringIO):
    """Keeps the first ``SHOWN`` characters: an endless loop of prints must not fill the memory or the notebook."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, SHOWN - self.tell())])
        return len(text)


@contextlib.contextmanager
def _protected() -> Iterator[None]:
    """An empty current folder, stdout and stderr caught; afterwards all as before, and what was printed shown."""
    here, dtype, states = os.getcwd(), torch.get_default_dtype(), (random.getstate(), torch.get_rng_state())
    out, err = _Short(), _Short()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _stderr_of_c():
        try:
            os.chdir(folder)
            torch.set_default_dtype(torch.float32)  # whatever an earlier cell made of it
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            os.chdir(here)
            torch.set_default_dtype(dtype)
            random.setstate(states[0])
            torch.set_rng_state(states[1])
    if out.getvalue():
        print(out.getvalue().rstrip())
    if err.getvalue():
        print(f"(on stderr) {err.getvalue().rstrip()}")


@contextlib.contextmanager
def _stderr_of_c() -> Iterator[None]:
    """What C code and child processes write to file descriptor 2 goes nowhere."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none, as in a program with windows only
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stderr.flush()
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(sink)
        os.close(kept)


class Submission:
    """A student's file, run cell by cell like a notebook: a cell that fails leaves the other cells' functions usable.

    ``submission.name`` is what the file calls ``name``; when there is no such thing, a function that says why.
    ``submission.problems`` says what went wrong while the file was read and run, a sentence each.
    """

    def __init__(self, path: str | Path, seconds: float = SECONDS):
        self._path, self._names, self._read = Path(path), {"__name__": Path(path).stem}, True
        self.problems: list[str] = []
        for line, cell in cells(self._text()):
            try:
                check(lambda line=line, cell=cell: self._run("\n" * (line - 1) + cell), seconds)
            except Exception as error:
                self.problems.append(f"the cell at line {line} stopped with {type(error).__name__}: {error}")

    def _text(self) -> str:
        """The file's text; of a file that cannot be read nothing, and a problem that says why."""
        try:
            text = self._path.read_text(encoding="utf-8-sig")  # some editors begin a UTF-8 file with a mark
            if "\0" not in text:  # as it is in UTF-16 without a mark
                return text
            self.problems.append(f"{self._path.name} is not UTF-8 text: save it as UTF-8")
        except UnicodeDecodeError:
            self.problems.append(f"{self._path.name} is not UTF-8 text: save it as UTF-8")
        except OSError as error:
            self.problems.append(f"{self._path.name} cannot be read: {error.strerror}")
        self._read = False
        return ""

    def _run(self, code: str) -> None:
        exec(compile(code, str(self._path), "exec"), self._names)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        undefined = [f"{self._path.name} does not define {name}"] if self._read else []
        why = "; ".join([*undefined, *self.problems])

        def missing(*_args: Any, **_options: Any) -> None:
            __tracebackhide__ = True
            raise AssertionError(why)

        return missing


def cells(text: str) -> list[tuple[int, str]]:
    """Cut a file at its lines that begin with ``# %%`` -> (number of the first line, text) of each cell.

    >>> cells("import torch\\n# %% one\\nx = 1\\n# %% two\\ny = 2\\n")
    [(1, 'import torch\\n'), (2, '# %% one\\nx = 1\\n'), (4, '# %% two\\ny = 2\\n')]
    """
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not found or line.startswith(CELL):
            found.append((number, line))
        else:
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
    """For the student copy's conftest.py: pytest runs its tests through ``check``."""
    __tracebackhide__ = True
    check(pyfuncitem.obj)
    return True
