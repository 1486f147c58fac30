"""What a student's code does must cost nothing but its own points."""

import contextlib
import os
import random
import sys
import threading
import time

import pytest
import torch

from minimgrpo.checks import SHOWN, Submission, check, same


def test_a_check_passes_or_raises_what_the_test_raises():
    ran = []
    check(lambda: ran.append(1))
    assert ran == [1]

    def fails():
        raise AssertionError("the sign is reversed")

    with pytest.raises(AssertionError, match="the sign is reversed"):
        check(fails)
    with pytest.raises(ZeroDivisionError):
        check(lambda: 1 / 0)


def endless():
    while True:
        pass


def stubborn():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


@pytest.mark.parametrize("hangs", [endless, stubborn])
def test_what_hangs_is_ended(hangs):
    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(AssertionError, match=r"still running after 0.3 s"):
        check(hangs, seconds=0.3)
    assert time.monotonic() - started < 15
    deadline = time.monotonic() + 15
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before, "the loop is still burning a processor"
    check(lambda: None)


def test_a_sleep_is_not_waited_for():
    with pytest.raises(AssertionError, match="still running"):
        check(lambda: time.sleep(60), seconds=0.3)


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_leaving_fails_the_check_and_nothing_else(leave):
    def leaves():
        raise leave

    with pytest.raises(AssertionError, match=leave.__name__):
        check(leaves)


def test_nothing_reaches_stderr(capfd):
    def noisy():
        print("a word", file=sys.stderr)
        os.write(2, b"from C")
        os.system("echo from a child >&2")
        print("on stdout")

    check(noisy)
    out, err = capfd.readouterr()
    assert err == ""
    assert "on stdout" in out
    assert "(on stderr) a word" in out
    os.write(2, b"after")
    assert capfd.readouterr().err == "after", "stderr must work again after the check"


def test_endless_prints_stay_short(capfd):
    def talks():
        while True:
            print("and so on")

    with pytest.raises(AssertionError, match="still running"):
        check(talks, seconds=0.3)
    assert 0 < len(capfd.readouterr().out) <= SHOWN + 100


def test_files_and_global_states_are_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assignment1.ipynb").write_text("mine", encoding="utf-8")
    states, seen = (random.getstate(), torch.get_rng_state()), []

    def untidy():
        seen.append(os.listdir("."))
        open("assignment1.ipynb", "w").close()
        os.mkdir("folder")
        os.chdir("folder")
        random.seed(1)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        raise RuntimeError("in the middle of it")

    with pytest.raises(RuntimeError):
        check(untidy)
    assert seen == [[]], "the check must begin in an empty folder"
    assert os.getcwd() == str(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["assignment1.ipynb"]
    assert (tmp_path / "assignment1.ipynb").read_text(encoding="utf-8") == "mine"
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_what_an_earlier_cell_did_to_torch_does_not_matter():
    def usual():
        assert torch.ones(1).dtype == torch.float32
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad

    try:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        check(usual)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


FILE = """\
import torch

# %% task first
def first():
    return torch.ones(2)


# %% task second
defn second():
    pass


# %% task third
print("noise", file=__import__("sys").stderr)
while True:
    pass


def third():
    return 3


# %% task fourth
def fourth():
    return first() * 4
"""


def test_a_broken_cell_costs_only_its_own_functions(tmp_path, capfd):
    path = tmp_path / "assignment1.py"
    path.write_text(FILE, encoding="utf-8")
    submission = Submission(path, seconds=0.5)
    assert submission.fourth().tolist() == [4, 4]
    with pytest.raises(AssertionError, match=r"does not define second.*cell at line 8 stopped with SyntaxError"):
        submission.second()
    with pytest.raises(AssertionError, match=r"cell at line 13 stopped with AssertionError: still running"):
        submission.third(1, key=2)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "cp1252"])
def test_a_file_that_is_not_utf8_is_an_answer_that_fails(tmp_path, encoding):
    path = tmp_path / "assignment1.py"
    path.write_text("# %% task f\ndef f():\n    return 'é'\n", encoding=encoding)
    submission = Submission(path)
    with pytest.raises(AssertionError, match=r"^assignment1\.py is not UTF-8 text: save it as UTF-8$"):
        submission.f()
    assert submission.problems == ["assignment1.py is not UTF-8 text: save it as UTF-8"]


def test_utf8_with_a_mark_is_read_and_a_lost_file_is_not(tmp_path):
    path = tmp_path / "assignment1.py"
    path.write_text("def f():\n    return 'é'\n", encoding="utf-8-sig")
    assert Submission(path).f() == "é" and not Submission(path).problems
    with pytest.raises(AssertionError, match=r"^lost\.py cannot be read: "):
        Submission(tmp_path / "lost.py").f()


def test_errors_name_the_line_of_the_file(tmp_path):
    path = tmp_path / "assignment1.py"
    path.write_text("\n\n# %% task f\ndef f():\n    return 1 / 0\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        check(Submission(path).f)
    last = caught.traceback[-1]
    assert (last.lineno + 1, str(last.path)) == (5, str(path))


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        (1, 1.0, True),
        ([1, 2], torch.tensor([1, 2]), True),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1, 2], True),
        ([True, False], [1, 0], True),
        (1.0, 1.0 + 1e-6, True),
        (1.0, 1.0001, False),
        ([1.0], 1.0, False),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0]], False),
        (float("nan"), float("nan"), False),
        (None, 0.0, False),
        ("1", 1.0, False),
        (torch.zeros(2, 1), torch.zeros(1, 2), False),
    ],
)
def test_same(got, expected, equal):
    if equal:
        same(got, expected, "differs")
    else:
        with pytest.raises(AssertionError, match="differs"):
            same(got, expected, "differs")
