"""The bench on a small random model: every section is printed, and the parts of a step add up to the whole."""

import contextlib
import io
import re

import pytest

from minimgrpo import bench, log
from minimgrpo.servers import Config, Team

SMALL = {"steps": 1, "questions": 2, "rollouts": 2, "threads": 1}


def test_the_parts_of_a_step_add_up_to_the_whole(folders, capsys, monkeypatch):
    def in_this_process(command: list[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(command[-1])
        return printed.getvalue()

    monkeypatch.setattr(bench.subprocess, "check_output", in_this_process)  # a new one takes seconds to import torch
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    assert bench.main([f"--model={folders['llama']}", "--no-trl", *flags]) == 0

    out = capsys.readouterr().out
    assert re.findall(r"^(\d)\. ", out, re.M) == ["1", "2", "3", "4", "5"]
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) %$", out, re.M)
    table = {part: [float(number) for number in numbers] for part, *numbers in rows}
    assert list(table) == [*bench.TIMED, "rest", "all"]
    *parts, whole = table.values()
    for column, rounding in enumerate((0.0005, 0.0005, 0.05)):
        assert sum(row[column] for row in parts) == pytest.approx(whole[column], abs=rounding * (len(parts) + 1))
    assert table["sampling"][0] > 0 and table["log"][1] > 0 and table["checkpoints"][1] > 0


def test_a_nested_part_is_taken_out_of_the_outer_one(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(bench.time, "process_time", lambda: next(clock))  # every look at the clock takes one second
    meter = bench.Meter()
    inner = meter.timed("inner")(lambda: None)
    meter.timed("outer")(lambda: (inner(), inner()))()
    meter.charge()
    assert meter.cpu == {"rest": 2, "outer": 3, "inner": 2}
    assert meter.running == ["rest"]


def test_the_alignment_is_measured_on_batches_of_the_right_size(load, converse, tmp_path):
    policy = load()
    team = Team(Config(**SMALL, d_max=1), policy, tmp_path / "run", [], tools=None)
    executed = converse(policy, "executor", rows=4)  # two questions of two rollouts, one call each
    outcomes = [{"question_id": t.question_id, "rollout": t.rollout, "correct": float(t.rollout)} for t in executed]
    log.publish(team.log.outcomes(1), outcomes)
    rows = bench.alignment_rows(team, executed, repeats=1)
    assert [row[1] for row in rows] == ["4", "4", str(4 * bench.D_MAX)]
    assert rows[0][3] == "1.00"
    assert [t.copies for t in executed] == [1, 1, 1, 1]  # the measured batch itself is left as it was


@pytest.mark.parametrize(
    "flags", [["--steps", "0"], ["--rollouts", "1"], ["--model", "no-such-model"], ["--seed", "x"]]
)
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([*flags, "--no-trl"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
