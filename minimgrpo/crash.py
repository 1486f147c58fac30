"""What a crash would leave behind: watch code that writes files, and look at the disk at every moment of it.

    with watch(folder) as seen:
        publish(folder / "rows.jsonl", rows)
    for moment in seen.moments:
        moment.killed       # {name: bytes}: what the next process finds if this one is killed then
        moment.unplugged    # {name: bytes}: what it finds if the power fails then

Nothing is killed, and the result is the same every time. A kill (SIGKILL) takes a process's memory and leaves the files
as the operating system has them, so a copy of the folder, made after each call that the code makes, is what a kill at
that moment leaves: half-written files, temporary names, what still stands in Python's buffers missing. To test a
resume, lay such a copy out with ``restore`` and start the code again.

A power failure also takes what the operating system has not written to the disk yet. The model is the worst case: a
file has the bytes of its last ``os.fsync`` (none: it is empty), under the name that it has now. That a new name itself
may be lost is in ``Watch.loose``: the names of which the folder was not fsynced afterwards (POSIX systems only).

``os.fsync`` is noted here, not carried out. What is written by another thread or process is not seen call by call.
``plain_locale`` is the other accident: a machine whose encoding is not ours.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock


@dataclass(frozen=True)
class Moment:
    """The folder's files (names relative to it, "/" between parts) after the call ``after``, as a crash leaves them."""

    after: str
    killed: dict[str, bytes]
    unplugged: dict[str, bytes]


@dataclass
class Watch:
    """``moments`` that differ, in order; ``loose``: names that a power failure could still undo, right now."""

    folder: Path
    moments: list[Moment] = field(default_factory=list)
    loose: set[str] = field(default_factory=set)
    _on_disk: dict[int, bytes] = field(default_factory=dict)  # inode -> its bytes at the last fsync
    _inodes: dict[str, int] = field(default_factory=dict)
    _last: str = ""

    def states(self) -> list[dict[str, bytes]]:
        """What a kill or a power failure at some moment leaves, each state once."""
        found = []
        for moment in self.moments:
            found += [files for files in (moment.killed, moment.unplugged) if files not in found]
        return found

    def _look(self, after: str) -> None:
        files, inodes = {}, {}
        for folder, _, names in os.walk(self.folder):
            for name in sorted(names):
                path = os.path.join(folder, name)
                key = os.path.relpath(path, self.folder).replace(os.sep, "/")
                with _READ(path, "rb") as file:
                    files[key], inodes[key] = file.read(), os.fstat(file.fileno()).st_ino
        self.loose |= {key for key in inodes.keys() | self._inodes.keys() if inodes.get(key) != self._inodes.get(key)}
        self._on_disk = {inode: self._on_disk[inode] for inode in inodes.values() if inode in self._on_disk}
        self._inodes = inodes
        moment = Moment(after, files, {key: self._on_disk.get(inodes[key], b"") for key in files})
        if not self.moments or (moment.killed, moment.unplugged) != (
            self.moments[-1].killed,
            self.moments[-1].unplugged,
        ):
            self.moments.append(moment)

    def _start(self) -> None:
        self._look("the start")
        self._on_disk = {self._inodes[key]: data for key, data in self.moments[0].killed.items()}
        self.loose.clear()
        self.moments.clear()
        self._look("the start")

    def _fsync(self, file) -> None:
        sys.setprofile(None)  # what happens here is not the watched code's doing
        try:
            self._note(file)
        finally:
            sys.setprofile(self._event)

    def _note(self, file) -> None:
        handle = file if isinstance(file, int) else file.fileno()
        known = os.fstat(handle)  # raises for a closed file, as the real one does
        self._look(self._last)
        if stat.S_ISDIR(known.st_mode):
            for key in list(self.loose):
                if os.stat(os.path.dirname(self.folder / key)).st_ino == known.st_ino:
                    self.loose.discard(key)
        for key, inode in self._inodes.items():
            if inode == known.st_ino:
                self._on_disk[inode] = self.moments[-1].killed[key]
        self._last = "os.fsync"
        self._look(self._last)

    def _event(self, _frame, event: str, arg) -> None:
        if event == "c_return" and _touches_files(arg):
            self._last = arg.__name__
            self._look(self._last)


_READ = io.open
_IN_FILES = {"write", "writelines", "flush", "close", "truncate", "__exit__", "detach"}
_IN_OS = {
    "open",
    "close",
    "write",
    "writev",
    "pwrite",
    "truncate",
    "ftruncate",
    "rename",
    "replace",
    "unlink",
    "remove",
}
_IN_OS |= {"link", "symlink", "sendfile", "copy_file_range"}


def _touches_files(function) -> bool:
    """Whether a built-in function can change files: some of the os module's, of an open file's methods, and open."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, io.IOBase):
        return function.__name__ in _IN_FILES
    return getattr(owner, "__name__", "") in ("posix", "nt", "io", "_io") and function.__name__ in _IN_OS


@contextlib.contextmanager
def watch(folder: str | Path) -> Iterator[Watch]:
    """Watch ``folder`` (it must exist, with its sub-folders) while the block runs in this thread."""
    seen = Watch(Path(folder))
    seen._start()
    before = sys.getprofile()
    with mock.patch.object(os, "fsync", seen._fsync), mock.patch.object(os, "fdatasync", seen._fsync, create=True):
        sys.setprofile(seen._event)
        try:
            yield seen
        finally:
            sys.setprofile(before if callable(before) else None)  # cProfile's cannot be set from Python
            seen._look("the end")


def restore(folder: str | Path, files: dict[str, bytes]) -> Path:
    """Lay out ``files``, as a moment has them, in a new ``folder`` -> the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@contextlib.contextmanager
def plain_locale() -> Iterator[None]:
    """While the block runs, a text file that is opened without an encoding is ASCII, as under the locale "C"."""

    def plain(file, mode="r", buffering=-1, encoding=None, *rest, **named):
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "ascii"
        return _READ(file, mode, buffering, encoding, *rest, **named)

    places = [(builtins, "open"), (io, "open")]
    if shell := sys.modules.get("IPython.core.interactiveshell"):  # a notebook's `open` is one of its own
        places.append((shell, "io_open"))
    if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10: what Path.open calls
        places.append((pathlib._NormalAccessor, "open"))
    with contextlib.ExitStack() as patches:
        for place, name in places:
            new = staticmethod(plain) if isinstance(place, type) else plain
            patches.enter_context(mock.patch.object(place, name, new, create=True))
        yield
