"""The bench on a small random model: it prints every section, and the parts of a step add up to the whole."""

import re

import pytest

from minimgrpo import bench


def test_the_parts_of_a_step_add_up_to_the_whole(folders, capsys):
    flags = ["--model", str(folders["llama"]), "--steps", "1", "--questions", "2", "--rollouts", "2", "--threads", "1"]
    assert bench.main([*flags, "--no-trl"]) == 0
    out = capsys.readouterr().out
    for number in range(1, 6):
        assert f"\n{number}. " in out
    table = {
        row[0]: [float(x) for x in row[1:]] for row in re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) %", out, re.M)
    }
    assert list(table) == [*bench.TIMED, "rest", "all"]
    whole = table.pop("all")
    assert whole[0] > 0
    for column in range(3):
        assert sum(row[column] for row in table.values()) == pytest.approx(
            whole[column], abs=0.001 * len(table) * 50 ** (column == 2)
        )
    assert table["sampling"][0] > 0


def test_nested_parts_are_counted_once():
    meter = bench.Meter()
    inner = meter.timed("inner")(lambda: sum(range(300_000)))
    outer = meter.timed("outer")(lambda: [inner(), sum(range(300_000))])
    outer()
    meter.charge()
    assert meter.running == ["rest"]
    assert set(meter.cpu) == {"rest", "outer", "inner"}
    assert all(meter.wall[part] > 0 for part in meter.wall)


@pytest.mark.parametrize(
    "flags", [["--steps", "0"], ["--rollouts", "1"], ["--model", "no-such-model"], ["--seed", "x"]]
)
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([*flags, "--no-trl"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
