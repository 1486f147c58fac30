"""Many runs, side by side, each remembered in a file of its own: what is there is not made again.

Processes are started by "spawn": the interpreter behind the Python tool hangs in a forked one.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from minimgrpo import log
from minimgrpo.experiments.setting import Setting
from minimgrpo.log import LogError

Say = Callable[[int, int, Setting, dict], None]
"""``say(done, of, setting, result)`` is told of every run that has been made."""


def path_of(setting: Setting, folder: Path) -> Path:
    return folder / f"{setting.key}.json"


def remembered(setting: Setting, folder: Path) -> dict | None:
    """The run's result, None when it has not been made. Raises LogError when the file is damaged or another run's."""
    path = path_of(setting, folder)
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["setting"] != setting.facts():
            raise ValueError("it is of another setting")
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(f"{path} is damaged ({error}): remove it and run again") from None
    return result


def perform_all(settings: list[Setting], folder: Path, jobs: int, say: Say = lambda *_: None) -> list[dict]:
    """The results of all settings, in order; ``jobs`` processes make those that are not remembered."""
    found = {setting: remembered(setting, folder) for setting in settings}
    missing = [setting for setting, result in found.items() if result is None]
    for number, (setting, result) in enumerate(_made(missing, folder, jobs), 1):
        log.publish_text(path_of(setting, folder), json.dumps(result) + "\n")
        found[setting] = json.loads(json.dumps(result))
        say(number, len(missing), setting, result)
    return [found[setting] for setting in settings]


def _made(missing: list[Setting], folder: Path, jobs: int):
    """(setting, result) of each, as they come. Of runs with the same warm start one goes first, and makes it."""
    if jobs == 1 or len(missing) < 2:
        for setting in missing:
            yield setting, _perform(setting, folder)
        return
    waiting: dict[tuple, list[Setting]] = {}  # warm start -> the runs that wait for it
    at_once = []
    for setting in missing:
        if not setting.warmed:
            at_once.append(setting)
        elif _start_of(setting) in waiting:
            waiting[_start_of(setting)].append(setting)
        else:
            waiting[_start_of(setting)] = []
            at_once.insert(0, setting)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        futures = {pool.submit(_perform, setting, folder): setting for setting in at_once}
        while futures:
            future = next(as_completed(futures))
            setting = futures.pop(future)
            yield setting, future.result()
            for freed in waiting.pop(_start_of(setting), []):
                futures[pool.submit(_perform, freed, folder)] = freed
    except BaseException:
        for process in multiprocessing.active_children():  # nothing is lost but the runs they are in
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_of(setting: Setting) -> tuple:
    return setting.warmed, setting.hits, setting.sentences, setting.demonstrations, setting.config.model


def _begin() -> None:
    """A worker: Ctrl-C is the parent's to answer, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


def _perform(setting: Setting, folder: Path) -> dict:
    from minimgrpo.experiments.trainer import perform  # seconds of imports, which the parent does without

    result = perform(setting, folder)
    gc.collect()  # a policy and its bound methods hold each other, and few objects are many bytes
    return result
