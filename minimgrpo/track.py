"""Send what the steps measure to a tracker as well: ``python -m minimgrpo.train RUN --track tensorboard``.

Optional (``pip install -e ".[track]"``) and off unless asked for; all of it is in ``RUN/<role>/metrics.jsonl``
anyway. Nothing here goes to the network by itself: TensorBoard writes to ``RUN/tensorboard``, trackio to its local
database, and wandb to ``RUN/wandb``, offline, unless the environment variable WANDB_MODE says otherwise.

A resumed run is told from its first step on, so its curves are whole: TensorBoard drops what it had, the others begin a
second run of the same name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

MODULES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}


def missing(name: str) -> str | None:
    """A sentence about what to install, None when the tracker can be used."""
    try:
        importlib.import_module(MODULES[name])
    except ImportError as error:
        return f"--track {name} needs a package that is not here ({error}): pip install {name}, or leave the flag out"
    return None


@contextlib.contextmanager
def tracker(name: str | None, root: Path, config: dict) -> Iterator[Callable[[dict], None]]:
    """Open a tracker for the run in ``root`` -> a function that takes what a step measured (``Team.measured``).

    With ``name`` None the function does nothing. The tracker is closed at the end, also after Ctrl-C.
    """
    if name is None:
        yield lambda measured: None
        return
    module = importlib.import_module(MODULES[name])
    if name == "tensorboard":
        writer = module.SummaryWriter(str(root / "tensorboard"), purge_step=0)
        close = writer.close

        def send(values: dict[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
    else:
        quiet = {"dir": str(root), "mode": os.environ.get("WANDB_MODE", "offline"), "settings": {"silent": True}}
        module.init(project="minimgrpo", name=root.name, config=config, **(quiet if name == "wandb" else {}))
        send, close = module.log, module.finish
    try:
        yield lambda measured: send(numbers(measured), step=measured["step"])
    finally:
        close()


def numbers(measured: dict) -> dict[str, float]:
    """What trackers can draw: a flat dict of numbers; what was not measured in this step is left out.

    >>> numbers({"step": 1, "planner": {"role": "planner", "reward": 0.5, "kl": None, "calls": [3, 1]}})
    {'planner/reward': 0.5, 'planner/calls/0': 3, 'planner/calls/1': 1}
    """
    flat: dict = {}
    for role in (key for key in measured if key != "step"):
        for name, value in measured[role].items():
            parts = dict(enumerate(value)) if isinstance(value, list) else value
            many = parts.items() if isinstance(parts, dict) else ()
            flat |= {f"{role}/{name}/{part}": number for part, number in many} or {f"{role}/{name}": value}
        flat.pop(f"{role}/step", None)  # it is the axis
    return {key: value for key, value in flat.items() if isinstance(value, int | float)}
