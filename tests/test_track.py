"""Trackers: what reaches them, that nothing is sent anywhere unasked, and what a missing package says."""

import sys
from types import ModuleType

import pytest

from minimgrpo import track, train

MEASURED = {
    "step": 3,
    "planner": {"step": 3, "role": "planner", "reward": 0.5, "kl": None, "calls": [4, 0, 2]},
    "executor": {"step": 3, "role": "executor", "expert": 0.25, "stop_reasons": {"result": 6, "length": 1}},
}
FLAT = {
    **{"planner/reward": 0.5, "planner/calls/0": 4, "planner/calls/1": 0, "planner/calls/2": 2},
    **{"executor/expert": 0.25, "executor/stop_reasons/result": 6},
    "executor/stop_reasons/length": 1,
}


class Fake(ModuleType):
    """Stands in for wandb, trackio and torch.utils.tensorboard, and writes down what is asked of it."""

    def __init__(self, name):
        super().__init__(name)
        self.happened = []

    def init(self, **options):
        self.happened.append(("init", options))

    def log(self, values, step):
        self.happened.append(("log", values, step))

    def finish(self):
        self.happened.append("finish")

    close = finish

    def SummaryWriter(self, folder, purge_step):
        self.happened.append(("open", folder, purge_step))
        return self

    def add_scalar(self, key, value, step):
        self.happened.append((key, value, step))


@pytest.fixture
def fake(monkeypatch):
    def fake(name):
        module = Fake(track.MODULES[name])
        monkeypatch.setitem(sys.modules, track.MODULES[name], module)
        return module

    return fake


def test_a_trackers_numbers_are_flat():
    assert track.numbers(MEASURED) == FLAT


@pytest.mark.parametrize("mode", [None, "online", "disabled"])
def test_wandb_is_offline_unless_its_own_variable_says_otherwise(fake, tmp_path, monkeypatch, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    module = fake("wandb")
    with track.tracker("wandb", tmp_path / "mine", {"seed": 1}) as tell:
        tell(MEASURED)
    (_, options), logged, finished = module.happened
    assert options == {
        **{"project": "minimgrpo", "name": "mine", "config": {"seed": 1}},
        **{"dir": str(tmp_path / "mine"), "mode": mode or "offline", "settings": {"silent": True}},
    }
    assert logged == ("log", FLAT, 3) and finished == "finish"


def test_trackio_gets_the_same(fake, tmp_path):
    module = fake("trackio")
    with track.tracker("trackio", tmp_path / "mine", {"seed": 1}) as tell:
        tell(MEASURED)
    options = {"project": "minimgrpo", "name": "mine", "config": {"seed": 1}}
    assert module.happened == [("init", options), ("log", FLAT, 3), "finish"]


def test_tensorboard_gets_one_scalar_a_number(fake, tmp_path):
    module = fake("tensorboard")
    with track.tracker("tensorboard", tmp_path, {}) as tell:
        tell(MEASURED)
    opened, *scalars, closed = module.happened
    assert opened == ("open", str(tmp_path / "tensorboard"), 0) and closed == "finish"
    assert scalars == [(key, value, 3) for key, value in FLAT.items()]


def test_a_resumed_run_is_drawn_once(tmp_path):
    """The real TensorBoard, where it is installed: what is told again replaces what was there."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in ((1, 2), (1, 2, 3)):
        with track.tracker("tensorboard", tmp_path, {}) as tell:
            for step in steps:
                tell({"step": step, "planner": {"reward": step / 2}})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("planner/reward")] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_tracker_is_closed_after_ctrl_c(fake, tmp_path):
    module = fake("trackio")
    with pytest.raises(KeyboardInterrupt), track.tracker("trackio", tmp_path, {}):
        raise KeyboardInterrupt
    assert module.happened[-1] == "finish"


def test_without_a_tracker_nothing_is_imported(tmp_path):
    before = set(sys.modules)
    with track.tracker(None, tmp_path, {}) as tell:
        tell(MEASURED)
    assert set(sys.modules) == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", track.MODULES)
def test_a_missing_package_is_one_sentence_before_anything_else(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, track.MODULES[name], None)  # its import fails
    with pytest.raises(SystemExit) as exit_:
        train.main([str(tmp_path / "run"), "--track", name])
    text = capsys.readouterr().err
    assert exit_.value.code == 2 and text.count("\n") == 1 and f"pip install {name}" in text
    assert not (tmp_path / "run").exists()


def test_train_tells_the_tracker_every_step_and_after_a_resume_from_the_first(fake, folders, tmp_path, capsys):
    small = ["--model", str(folders["llama"]), "--threads", "1", "--questions", "2", "--rollouts", "2", "--length", "4"]
    module = fake("wandb")
    arguments = [str(tmp_path / "run"), *small, "--steps", "2", "--track", "wandb"]
    assert train.main(arguments) == 0
    assert [entry[2] for entry in module.happened if entry[0] == "log"] == [1, 2]
    assert train.main([str(tmp_path / "run"), "--track", "wandb", "--resume"]) == 0
    assert [entry[2] for entry in module.happened if entry[0] == "log"] == [1, 2, 1, 2]
    logged = module.happened[1][1]
    assert logged["planner/trajectories"] == 4 and logged["planner/stop_reasons/length"] >= 0
    assert capsys.readouterr().err == ""
