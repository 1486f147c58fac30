# %% [markdown]
# # Assignment 6. An evaluation that can be trusted
#
# "Our agent solves 42 % of GAIA." Of which tasks? Are the ones in it that crashed? That nobody could grade? Was it
# interrupted, and with which adapter did it go on? Is 42 % more than the 38 % of the others? You write the functions
# that decide what such a number means. Six of them, 20 points, no model.
#
# A **record** is one attempt at one task, a dict with (among others)
#
# * `task_id`, `attempt` (0, 1, ...): together its key;
# * `correct`: `True`, `False`, or `None` where nobody could grade it (no gold answer, an unreadable judge);
# * `status`: `"ok"`, `"error"` (something raised) or `"timeout"`.
#
# **How it works.** Fill in the places marked `YOUR CODE HERE`. Below each function are its checks: run them as often
# as you like. Grading runs the same checks with more cases. A function is checked by itself: none calls another, so a
# mistake early on costs nothing later. (The library has most of what you write here. Look after you have written
# yours.)

# %% setup
import itertools
import json
import math
from pathlib import Path
from unittest import mock

from minimgrpo.checks import same
from minimgrpo.crash import restore, watch
from minimgrpo.log import publish as library_publish
from minimgrpo.log import read as library_read


def outcome_of(function, *arguments, **options):
    """What the call returns, or the error it raises as text."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refuses(function, *arguments, why):
    """Assert that the call raises ValueError."""
    got = outcome_of(function, *arguments)
    refused = isinstance(got, str) and got.startswith(("ValueError", "DataError"))
    assert refused, f"{why}\n  expected: ValueError\n  got:      {got!r}"


# %% [markdown]
# ## 1. What did the judge say? (2 points)
#
# Where answers cannot be compared by rule, a language model judges. It is asked for a JSON object such as `{"reason":
# "...", "correct": true}` and mostly replies with it, alone or between other words. Never look for a word: "CORRECT"
# stands in "INCORRECT", and in "not correct". What cannot be read is not wrong, it is **ungraded**.


# %% task verdict
def verdict(reply: str) -> bool | None:
    """The judge's verdict.

    The JSON is what stands from the first "{" to the last "}" of the reply. Returns its "correct" if that is true or
    false, and None for everything else: no JSON, no object, no "correct", a text or a number in its place. Raises
    nothing.
    """
    ### BEGIN SOLUTION
    start, end = reply.find("{"), reply.rfind("}")
    try:
        found = json.loads(reply[start : end + 1])
    except (ValueError, RecursionError):
        return None
    correct = found.get("correct") if start >= 0 and isinstance(found, dict) else None
    return correct if isinstance(correct, bool) else None
    ### END SOLUTION


# %% example
verdict('Let me see.\n```json\n{"reason": "the same city", "correct": true}\n```'), verdict("INCORRECT")


# %% test verdict 2
def test_verdict():
    def expect(reply, wanted, why):
        got = outcome_of(verdict, reply)
        assert got is wanted, f"{why}\n  the judge said: {reply[:200]}\n  expected: {wanted}\n  got:      {got!r}"

    expect('{"reason": "the same city", "correct": true}', True, "a plain yes: read the JSON, look for no word")
    expect('{"reason": "another city", "correct": false}', False, "a plain no: read the JSON, look for no word")
    expect('{"reason": "not incorrect", "correct": true}', True, "only the value of correct counts, no other word")
    expect('I think:\n```json\n{"correct": false}\n```\nDone.', False, "there may be other words around the JSON")
    expect("INCORRECT", None, "no JSON, no verdict: CORRECT stands in INCORRECT")
    expect("The answer is correct.", None, "no JSON, no verdict: a word may mean anything")
    expect("", None, "unreadable is ungraded (None), not wrong (False)")
    expect('{"reason": "I cannot tell"}', None, "a reply without correct is ungraded (None), not wrong (False)")
    expect('{"correct": "false"}', None, 'the text "false" is no verdict, and bool("false") is True')
    expect('{"correct": fals', None, "a reply that was cut off must not raise")
    ### BEGIN HIDDEN TESTS
    expect('{"correct": null}', None, "null is no verdict")
    expect('{"correct": 1}', None, "a number is no verdict")
    expect('[{"correct": true}, {"correct": false}]', None, "two verdicts are none")
    expect("}{", None, "braces in the wrong order must not raise")
    expect("true", None, "only an object is a verdict")
    expect('{"a":' * 100_000 + "}", None, "nested too deep must not raise")
    expect('{"reason": "Curaçao {sic}", "correct": true}', True, "braces inside the reason are fine")
    ### END HIDDEN TESTS


# %% [markdown]
# ## 2. One table (5 points)
#
# Records of one attempt a task become five counts, a rate and an interval.
#
# * An error or a time-out is an attempt that failed. It **stays in the denominator** (its `correct` is `False`) and is
#   counted besides. An evaluation that leaves out what crashed measures something nicer.
# * What nobody could grade (`correct` is `None`) is neither right nor wrong: it is **counted, and not in the rate**.
#   (An error at a task without a gold answer is both an error and ungraded.)
# * The interval is Wilson's, over the graded attempts, with $z = 1.96$: for a rate $p$ of $n$
#
# $$\frac{1}{1 + \frac{z^2}{n}} \left( p + \frac{z^2}{2n} \pm z \sqrt{\frac{p (1 - p)}{n} + \frac{z^2}{4 n^2}} \right)$$
#
# The textbook's $p \pm z \sqrt{p (1 - p) / n}$ says "0 % ± 0" after 0 of 20, where 16 % is still possible.


# %% task report
def report(records: list) -> dict:
    """What some records, one attempt a task, amount to.

    records: dicts with "correct" (True, False, None) and "status" ("ok", "error", "timeout").
    Returns {"n": all records, "right": ..., "errors": ..., "timeouts": ..., "ungraded": ...,
    "rate": right ones among the graded, "ci95": (low, high)}; rate and ci95 are None if nothing is graded.
    """
    ### BEGIN SOLUTION
    right = sum(record["correct"] is True for record in records)
    ungraded = sum(record["correct"] is None for record in records)
    n, z = len(records) - ungraded, 1.96
    rate = right / n if n else None
    interval = None
    if n:
        centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
        interval = (centre - half, centre + half)
    return {
        "n": len(records),
        "right": right,
        "errors": sum(record["status"] == "error" for record in records),
        "timeouts": sum(record["status"] == "timeout" for record in records),
        "ungraded": ungraded,
        "rate": rate,
        "ci95": interval,
    }
    ### END SOLUTION


# %% setup
def some_records(right=0, wrong=0, errors=0, timeouts=0, ungraded=0, ungraded_errors=0):
    """Records of these kinds, in a mixed order."""
    kinds = [(True, "ok")] * right + [(False, "ok")] * wrong + [(False, "error")] * errors
    kinds += [(False, "timeout")] * timeouts + [(None, "ok")] * ungraded + [(None, "error")] * ungraded_errors
    kinds = kinds[::2] + kinds[1::2]
    return [{"task_id": f"t{i}", "attempt": 0, "correct": c, "status": s} for i, (c, s) in enumerate(kinds)]


# %% example
report(some_records(right=3, wrong=4, errors=2, timeouts=1, ungraded=2))


# %% test report 3
def test_report():
    got = report(some_records(right=3, wrong=4, errors=2, timeouts=1))
    likely = {"errors and time-outs are wrong: they stay in the denominator": 3 / 7}
    likely |= {"time-outs are wrong as well: they stay in the denominator": 3 / 9}
    likely |= {"errors are wrong as well: they stay in the denominator": 3 / 8}
    same(got["rate"], 0.3, "the rate of 3 right ones among 10 attempts", likely)
    counts = {"n": 10, "right": 3, "errors": 2, "timeouts": 1, "ungraded": 0}
    found = {name: got.get(name) for name in counts}
    assert found == counts, f"wrong counts\n  expected: {counts}\n  got:      {found}"
    got = report(some_records(right=3, wrong=5, ungraded=2))
    likely = {"None is ungraded, not wrong: it is not in the rate": 0.3, "None is ungraded, not right": 0.5}
    likely |= {"None is ungraded: it is not in the rate, neither as right nor as wrong": 5 / 8}
    same(got["rate"], 0.375, "the rate of 3 right ones among 8 graded", likely)
    assert got["n"] == 10, f"n counts all records, 10, also the ungraded: nothing leaves in silence, not {got['n']}"
    assert got["ungraded"] == 2, f"2 attempts are ungraded, not {got['ungraded']}"
    got = report(some_records(right=2, wrong=2, errors=1, ungraded=1, ungraded_errors=1))
    same(got["rate"], 0.4, "an error without a gold answer is ungraded, so not in the rate")
    assert (got["errors"], got["ungraded"]) == (2, 2), "an error without a gold answer is both an error and ungraded"
    got = outcome_of(report, some_records(ungraded=3))
    alright = isinstance(got, dict) and got["rate"] is None and got["ci95"] is None
    assert alright, f"nothing is graded: rate and ci95 are None, not 0 and no ZeroDivisionError: {got}"
    ### BEGIN HIDDEN TESTS
    for kinds in itertools.product((0, 1, 5), (0, 2), (0, 3), (0, 1), (0, 4), (0, 1)):
        right, wrong, errors, timeouts, ungraded, both = kinds
        got, graded = report(some_records(*kinds)), right + wrong + errors + timeouts
        counts = {"n": sum(kinds), "right": right, "errors": errors + both}
        counts |= {"timeouts": timeouts, "ungraded": ungraded + both}
        found = {name: got.get(name) for name in counts}
        assert found == counts, f"wrong counts for {kinds}\n  expected: {counts}\n  got:      {found}"
        if graded:
            same(got["rate"], right / graded, f"a wrong rate for {kinds}")
        else:
            assert got["rate"] is None, f"nothing is graded: the rate is None, not {got['rate']}"
    ### END HIDDEN TESTS


# %% test report__interval 2
def test_report__interval():
    likely = {
        "this is p +- z * sqrt(p (1 - p) / n); Wilson's interval was asked for": [0.1302826, 0.4851020],
        "z is 1.96, not 1.645": [0.1829600, 0.4686811],
        "the term z^2 / 4n^2 under the root is missing": [0.1778775, 0.4870198],
    }
    got = report(some_records(right=8, wrong=18))["ci95"]
    same(list(got), [0.1650112, 0.4998861], "8 of 26 is 16.5 % to 50.0 %", likely)
    got = report(some_records(wrong=20))["ci95"]
    likely = {"0 of 20 does not mean exactly 0: this is not Wilson's interval": [0.0, 0.0]}
    same(list(got), [0.0, 0.1611301], "0 of 20 is 0 to 16.1 %", likely)
    got = report(some_records(right=8, wrong=10, errors=8, ungraded=14))["ci95"]
    same(list(got), [0.1650112, 0.4998861], "the interval is over the graded attempts: 8 of 26, whatever is ungraded")
    ### BEGIN HIDDEN TESTS
    z = 1.96
    for right, wrong in ((1, 0), (5, 5), (99, 1), (1, 164), (20, 0)):
        low, high = report(some_records(right, wrong))["ci95"]
        n, p = right + wrong, right / (right + wrong)
        for bound in (low, high):  # Wilson's bounds solve this equation
            same((bound - p) ** 2, z**2 * bound * (1 - bound) / n, f"not Wilson's interval for {right} of {n}")
        assert low < high, f"low comes first, and an interval has a width: {low}, {high}"
    ### END HIDDEN TESTS


# %% [markdown]
# ## 3. pass@k (3 points)
#
# With several attempts a task one also asks: would at least one of $k$ be right? The plausible $1 - (1 - c/n)^k$ is
# biased (it draws the same attempt twice). Unbiased, from $n$ attempts of which $c$ were right, is the share of the
# choices of $k$ attempts that have a right one among them:
#
# $$\mathrm{pass@}k = 1 - \binom{n - c}{k} \Big/ \binom{n}{k}$$
#
# With fewer than $k$ attempts nothing can be said: an error, not a guess.


# %% task pass_at_k
def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of pass@k from n attempts of which c were right.

    Raises ValueError for k < 1, for n < k, and for a c that is not in 0..n.
    """
    ### BEGIN SOLUTION
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} from {n} attempts, {c} right")
    return 1 - math.comb(n - c, k) / math.comb(n, k)
    ### END SOLUTION


# %% example
pass_at_k(n=4, c=1, k=2)


# %% test pass_at_k 3
def test_pass_at_k():
    likely = {
        "1 - (1 - c/n)^k is biased: it may draw the same attempt twice": 0.4375,
        "at least one of the k, not all of them": 0.0,
        "at least one of all n attempts was right; of k of them is asked": 1.0,
        "this is the chance of one attempt, for every k": 0.25,
    }
    same(pass_at_k(4, 1, 2), 0.5, "1 of 4 attempts right: 3 of the 6 pairs have it", likely)
    likely = {"this is the chance that none is right": 0.1}
    same(pass_at_k(5, 2, 3), 0.9, "2 of 5 right: 9 of the 10 triples have one of them", likely)
    same(pass_at_k(4, 1, 1), 0.25, "pass@1 is the share of right attempts")
    same(pass_at_k(4, 0, 2), 0.0, "none right")
    same(pass_at_k(4, 3, 2), 1.0, "only one wrong: every pair has a right one")
    refuses(pass_at_k, 3, 1, 4, why="3 attempts cannot say what 4 would do: raise ValueError for n < k")
    refuses(pass_at_k, 3, 3, 4, why="3 attempts cannot say what 4 would do, even if all are right")
    refuses(pass_at_k, 3, 4, 2, why="4 right ones of 3 attempts are a mistake somewhere")
    ### BEGIN HIDDEN TESTS
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            same(pass_at_k(n, c, k), sum(map(any, choices)) / len(choices), f"wrong for n={n}, c={c}, k={k}")
    same(pass_at_k(2000, 3, 1000), 1 - 1000 * 999 * 998 / (2000 * 1999 * 1998), "wrong, or overflown, for n=2000")
    refuses(pass_at_k, 3, 1, 0, why="k begins at 1")
    refuses(pass_at_k, 3, -1, 2, why="a negative count is a mistake somewhere")
    refuses(pass_at_k, 0, 0, 1, why="no attempts: nothing can be said")
    ### END HIDDEN TESTS


# %% [markdown]
# ## 4. What is still to do? (3 points)
#
# An evaluation of hours is interrupted. Its records are lines of JSON, of which the last may be torn. Each names the
# `config_hash` of everything that the answers depend on: adapters, temperature, tools, tasks.
#
# * The key of a record is `(task_id, attempt)`: an attempt at a task does not stand for the next attempt at it.
# * An attempt that ended in an `"error"` is tried again (perhaps the network was down). `"ok"` is done, whether right
#   or wrong, and so is `"timeout"`: the same limit would stop it again.
# * A record of **another** `config_hash` is another experiment's, and is as if it were not there.
# * A line counts when its newline is there. What stands behind the last newline is torn, **ignored and counted**, even
#   if it happens to look like JSON. Damage anywhere else is an error: something else is wrong.


# %% task unfinished
def unfinished(task_ids: list, attempts: int, data: bytes, config_hash: str) -> tuple:
    """The attempts that an interrupted evaluation still has to make.

    data: the bytes of its records, a line of JSON (UTF-8) each, with "task_id", "attempt", "status", "config_hash".
    Returns (keys, torn): the keys (task_id, attempt) to do, attempt 0 of all tasks first, in the order of task_ids;
    and the number of torn lines, 0 or 1.
    Raises ValueError, with "line N" (from 1) in the message, for another line that is not JSON.
    """
    ### BEGIN SOLUTION
    *lines, rest = data.split(b"\n")
    done = set()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line.decode("utf-8"))
        except ValueError:
            raise ValueError(f"the records are damaged in line {number}") from None
        if record["config_hash"] == config_hash and record["status"] != "error":
            done.add((record["task_id"], record["attempt"]))
    keys = [(task, attempt) for attempt in range(attempts) for task in task_ids]
    return [key for key in keys if key not in done], int(bool(rest))
    ### END SOLUTION


# %% setup
def saved(task_id, attempt=0, status="ok", config_hash="now", **more):
    """One record as a line of a file."""
    record = {"task_id": task_id, "attempt": attempt, "status": status, "config_hash": config_hash, **more}
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


# %% example
unfinished(["a", "b"], 2, saved("a") + saved("b", status="error"), "now")


# %% test unfinished 3
def test_unfinished():
    def expect(data, keys, torn, why, tasks=("a", "b"), attempts=2):
        got = outcome_of(unfinished, list(tasks), attempts, data, "now")
        readable = isinstance(got, tuple) and len(got) == 2
        found = ([tuple(key) for key in got[0]], got[1]) if readable else got
        assert found == (keys, torn), f"{why}\n  expected: {keys}, {torn} torn\n  got:      {found}"

    everything = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    expect(b"", everything, 0, "nothing is done: everything is to do, attempt 0 of all tasks first")
    expect(saved("a"), everything[1:], 0, "the key is (task_id, attempt): attempt 0 at a task is not attempt 1 at it")
    wrong = saved("a", correct=False) + saved("b", correct=True)
    expect(wrong, everything[2:], 0, "a wrong answer is done: to try until it is right is cheating")
    expect(saved("a") + saved("b", status="error"), everything[1:], 0, "an error is tried again")
    expect(saved("a", status="timeout"), everything[1:], 0, "a time-out is done: the same limit would stop it again")
    expect(
        saved("b", status="error") + saved("b"), [("a", 0), ("a", 1), ("b", 1)], 0, "this error was tried again: done"
    )
    why = "a record of another config_hash is another experiment's: it does not count"
    expect(saved("a", config_hash="before") + saved("b"), [("a", 0), ("a", 1), ("b", 1)], 0, why)
    why = "a torn last line is ignored and counted, never fatal"
    expect(saved("a") + b'{"task_id": "b", "att', everything[1:], 1, why)
    why = "a line counts when its newline is there: this one is torn, though it looks whole"
    expect(saved("a") + saved("b")[:-1], everything[1:], 1, why)
    got = outcome_of(unfinished, ["a"], 1, saved("a") + b"{oops}\n" + saved("a"), "now")
    told = isinstance(got, str) and "Error" in got and "line 2" in got
    assert told, f"damage before the end is not a torn line: raise ValueError and name line 2, not {got}"
    ### BEGIN HIDDEN TESTS
    data = saved("é", note="one\u2028two") + saved("b", 1)
    expect(data, [("b", 0), ("é", 1)], 0, "a line ends at \\n only, and is UTF-8", tasks=("é", "b"))
    expect(saved("é")[:-1] + b"\xc3", [("é", 0)], 1, "torn", tasks=("é",), attempts=1)
    expect(saved("é")[:17], [("é", 0)], 1, "torn inside a character, and no error", tasks=("é",), attempts=1)
    expect(saved("x") + saved("a", 7), everything, 0, "records of unknown tasks and attempts change nothing")
    data = b"".join(saved(task, attempt) for task, attempt in everything)
    expect(data, [], 0, "all done: nothing is to do")
    expect(data, [("c", 0), ("c", 1)], 0, "tasks that were added are to do", tasks=("a", "c", "b"))
    ### END HIDDEN TESTS


# %% [markdown]
# ## 5. The loop (4 points)
#
# Now do what is to do. Each attempt becomes a record, and every `batch` records are published in a file of their own,
# so that a kill loses one batch at most.
#
# * `solve(question)` is the agent. It gets the question and **nothing else**: an agent that can see the gold answer
#   will find it. It may raise, and one bad task must not end an evaluation of hours: `TimeoutError` makes a record
#   with status `"timeout"`, any other `Exception` one with status `"error"`. (`KeyboardInterrupt` is no `Exception`:
#   Ctrl-C must stop.)
# * `grade(prediction, gold)` is ours. If it raises, that is our bug, and it must not count as the agent's: let it out.
# * Where the gold answer is `None`, nobody can grade: `correct` is `None`, and `grade` is not called.


# %% task evaluate
def evaluate(tasks: dict, keys: list, solve, grade, folder: Path, config_hash: str, batch: int = 2) -> None:
    """Make the attempts ``keys``, in order, and publish their records, ``batch`` of them in a file.

    tasks: task_id -> {"question": ..., "gold": a text or None}.   keys: (task_id, attempt), as from task 4.
    folder: exists, and may hold files of an interrupted evaluation. Publishes folder/"batch-NNNN.jsonl", from 0001 on,
    under the next numbers that are free, with library_publish(path, records).
    A record: {"task_id", "attempt", "prediction", "correct", "status", "error", "config_hash"}. After an error or a
    time-out: prediction None, error "ValueError: its message", correct False (None without a gold answer). Else error
    is None.
    """
    ### BEGIN SOLUTION
    for start in range(0, len(keys), batch):
        records = []
        for task_id, attempt in keys[start : start + batch]:
            task, prediction, status, problem = tasks[task_id], None, "ok", None
            try:
                prediction = solve(task["question"])
            except Exception as error:
                status = "timeout" if isinstance(error, TimeoutError) else "error"
                problem = f"{type(error).__name__}: {error}"
            correct = None if task["gold"] is None else status == "ok" and grade(prediction, task["gold"])
            records.append(
                {
                    "task_id": task_id,
                    "attempt": attempt,
                    "prediction": prediction,
                    "correct": correct,
                    "status": status,
                    "error": problem,
                    "config_hash": config_hash,
                }
            )
        number = 1
        while (folder / f"batch-{number:04d}.jsonl").exists():
            number += 1
        library_publish(folder / f"batch-{number:04d}.jsonl", records)
    ### END SOLUTION


# %% setup
TASKS = {
    "t1": {"question": "2 + 2?", "gold": "4"},
    "t2": {"question": "capital of Ghana?", "gold": "Accra"},
    "t3": {"question": "crash", "gold": "7"},
    "t4": {"question": "sleep", "gold": "8"},
    "t5": {"question": "who knows?", "gold": None},
    "t6": {"question": "3 + 3?", "gold": "6"},
    "t7": {"question": "crash", "gold": None},
}


def sample_agent(question):
    """An agent that adds up, knows no capitals, and has its moments."""
    if question == "crash":
        raise RuntimeError("out of memory")
    if question == "sleep":
        raise TimeoutError("5 s")
    return str(sum(map(int, question[:-1].split("+")))) if "+" in question else "Curaçao"


def sample_grader(prediction, gold):
    """Whether both texts are the same; that one is missing is a mistake."""
    if not isinstance(prediction, str) or not isinstance(gold, str):
        raise TypeError(f"grade({prediction!r}, {gold!r})")
    return prediction == gold


def published_records(folder):
    """All records of an evaluation, in the order of its files."""
    return [record for path in sorted(folder.glob("batch-????.jsonl")) for record in library_read(path)]


def new_folder():
    """An empty folder for a check."""
    folder = Path(f"folder-{len(list(Path.cwd().iterdir()))}")
    folder.mkdir()
    return folder


# %% test evaluate 2
@mock.patch("os.fsync", lambda file: None)  # these folders need not outlive a power failure
def test_evaluate():
    def only_the_question(question):
        assert question == "2 + 2?", f"the agent gets the question and nothing else, not {question!r}"
        return "4"

    folder = new_folder()
    evaluate({"t1": dict(TASKS["t1"])}, [("t1", 0)], only_the_question, sample_grader, folder, "now")
    records = published_records(folder)
    assert len(records) == 1, f"one key makes one record, in batch-0001.jsonl, not {len(records)}"
    assert records[0]["status"] == "ok", records[0]["error"]
    keys, folder = [(task, 0) for task in TASKS], new_folder()
    try:
        evaluate(
            {key: dict(task) for key, task in TASKS.items()}, list(keys), sample_agent, sample_grader, folder, "now"
        )
    except TypeError as error:
        raise AssertionError(f"grade is called with a text and a gold answer, or not at all: {error}") from None
    except (RuntimeError, TimeoutError) as error:
        raise AssertionError(f"one bad task must not end the evaluation: {error!r}") from None
    records = published_records(folder)
    found = [(record["task_id"], record["attempt"]) for record in records]
    assert found == keys, f"every key has one record, errors as well\n  expected: {keys}\n  got:      {found}"
    by_task = {record["task_id"]: record for record in records}
    names = ["task_id", "attempt", "prediction", "correct", "status", "error", "config_hash"]
    got = sorted(by_task["t1"])
    assert got == sorted(names), f"a record has the fields {sorted(names)}, not {got}"

    def expect(task, why, **wanted):
        got = {name: by_task[task][name] for name in wanted}
        right = all(type(got[name]) is type(value) and got[name] == value for name, value in wanted.items())
        assert right, f"{why}\n  {task}: expected {wanted}\n  {task}: got      {got}"

    expect("t1", "a right answer", prediction="4", correct=True, status="ok", error=None, config_hash="now")
    expect("t2", "a wrong answer", prediction="Curaçao", correct=False, status="ok", error=None, config_hash="now")
    wanted = {"prediction": None, "correct": False, "status": "error", "error": "RuntimeError: out of memory"}
    expect("t3", "an error is wrong, and says what it was", **wanted)
    wanted = {"prediction": None, "correct": False, "status": "timeout", "error": "TimeoutError: 5 s"}
    expect("t4", "a time-out is wrong, and no error", **wanted)
    expect(
        "t5", "without a gold answer it is ungraded: None, not wrong", prediction="Curaçao", correct=None, status="ok"
    )
    expect("t7", "an error without a gold answer is ungraded as well", correct=None, status="error", prediction=None)

    def broken(prediction, gold):
        raise ZeroDivisionError("a bug of the grader")

    folder = new_folder()
    got = outcome_of(evaluate, {"t1": dict(TASKS["t1"])}, [("t1", 0)], sample_agent, broken, folder, "now")
    told = str(got).startswith("ZeroDivisionError")
    assert told, (
        f"a bug of the grader is not the agent's error: let it out, do not record it: {published_records(folder)}"
    )
    ### BEGIN HIDDEN TESTS
    folder, keys = new_folder(), [("t6", 0), ("t1", 0), ("t6", 1), ("t2", 3)]
    evaluate(
        {key: dict(task) for key, task in TASKS.items()}, keys, sample_agent, sample_grader, folder, "then", batch=3
    )
    found = [(record["task_id"], record["attempt"]) for record in published_records(folder)]
    assert found == keys, f"several attempts at a task have a record each\n  expected: {keys}\n  got:      {found}"
    assert {record["config_hash"] for record in published_records(folder)} == {"then"}, (
        "every record names its config_hash"
    )
    evaluate(TASKS, [], sample_agent, sample_grader, folder, "then")
    assert len(published_records(folder)) == 4, "nothing to do: nothing is added"
    ### END HIDDEN TESTS


# %% test evaluate__killed 2
@mock.patch("os.fsync", lambda file: None)  # the copies need not outlive a power failure
def test_evaluate__killed():
    def keys_left(keys, folder):  # task 4
        done = {(record["task_id"], record["attempt"]) for record in published_records(folder)}
        return [key for key in keys if key not in done]

    def kill_everywhere(keys, batch):
        folder, solved = new_folder(), []

        def watched(question):
            safe = len(published_records(folder))
            lost = len(solved) - safe
            assert lost < batch, f"a kill now would lose {lost} finished attempts: publish every {batch} records"
            solved.append(question)
            return sample_agent(question)

        with watch(folder) as seen:
            evaluate(TASKS, list(keys), watched, sample_grader, folder, "now", batch=batch)
        end = {path.name: path.read_bytes() for path in folder.iterdir()}
        for moment in seen.moments:
            for name in [name for name in moment.killed if name.endswith(".jsonl")]:
                whole = moment.killed[name] == moment.unplugged[name] == end.get(name)
                assert whole, (
                    f"after {moment.after}() a reader, or a power failure, finds half of {name}: publish it whole"
                )
        problems = {record["error"] for record in published_records(folder)}
        for problem in problems:
            assert "a kill now" not in str(problem), problem
        for files in seen.states():
            again = restore(new_folder() / "again", files)
            there = {name: f"{len(data)} bytes" for name, data in files.items()}
            where = f"\n  (started again after a kill that left {there})"
            try:
                evaluate(TASKS, keys_left(keys, again), sample_agent, sample_grader, again, "now", batch=batch)
                found = sorted((record["task_id"], record["attempt"]) for record in published_records(again))
            except Exception as error:
                why = f"it cannot go on, {type(error).__name__}: {error}"
                raise AssertionError(
                    f"{why}: use the next number that is free, and publish whole files{where}"
                ) from None
            wanted = sorted(keys)
            assert found == wanted, (
                f"in the end every key has one record\n  expected: {wanted}\n  got:      {found}{where}"
            )
            for name, data in files.items():
                changed = name.endswith(".jsonl") and (again / name).read_bytes() != data
                assert not changed, f"{name} was published and has been changed{where}"

    kill_everywhere([("t1", 0), ("t2", 0), ("t3", 0), ("t1", 1), ("t6", 1)], batch=2)

    def stop(question):
        if question == "crash":
            raise KeyboardInterrupt
        return sample_agent(question)

    folder = new_folder()
    try:
        evaluate(TASKS, [("t1", 0), ("t2", 0), ("t3", 0), ("t6", 0)], stop, sample_grader, folder, "now")
        stopped = False
    except KeyboardInterrupt:
        stopped = True
    assert stopped, "Ctrl-C must stop the evaluation: catch Exception, not BaseException, and nothing without a name"
    got = [record["task_id"] for record in published_records(folder)]
    assert got == ["t1", "t2"], f"what was finished before Ctrl-C stays: t1 and t2, not {got}"
    ### BEGIN HIDDEN TESTS
    kill_everywhere([("t5", 0), ("t4", 0), ("t6", 0), ("t7", 0)], batch=1)
    kill_everywhere([("t1", n) for n in range(5)], batch=3)
    ### END HIDDEN TESTS


# %% [markdown]
# ## 6. Is B better than A? (3 points)
#
# Two policies were evaluated on the same tasks. Hard tasks are hard for both, so compare them **task by task**: the
# noise of which tasks there are cancels out.
#
# * A task's score is its share of right attempts among its graded ones. A task without a graded attempt on one side is
#   left out **on both sides**, and counted.
# * The *sign test* asks: if both were equally good, how likely would the tasks that differ fall as unevenly as this,
#   or more? With `better` tasks up, `worse` down, $n$ the sum of the two (tasks that are equal say nothing) and $m$
#   the smaller of them, two-sided and exact:
#
# $$p = \min\Big(1,\; 2 \sum_{i=0}^{m} \binom{n}{i} \Big/ 2^n\Big)$$


# %% task compare
def compare(a: dict, b: dict) -> dict:
    """B against A on the same tasks.

    a, b: task_id -> what its attempts came to, a list of True, False or None (ungraded).
    Returns {"tasks": compared, "left_out": ..., "difference": mean score of B minus that of A, over the compared tasks,
    "better": tasks at which B scores higher, "worse": lower, "p": of the sign test}.
    Raises ValueError if a and b have different tasks, or none can be compared.
    """
    ### BEGIN SOLUTION
    if set(a) != set(b):
        raise ValueError("different tasks: only the same can be compared in pairs")
    differences = []
    for task in a:
        graded = [[flag for flag in flags if flag is not None] for flags in (a[task], b[task])]
        if all(graded):
            score_a, score_b = (sum(flags) / len(flags) for flags in graded)
            differences.append(score_b - score_a)
    if not differences:
        raise ValueError("no task was graded on both sides")
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    n, m = better + worse, min(better, worse)
    return {
        "tasks": len(differences),
        "left_out": len(a) - len(differences),
        "difference": sum(differences) / len(differences),
        "better": better,
        "worse": worse,
        "p": min(1.0, 2 * sum(math.comb(n, i) for i in range(m + 1)) / 2**n),
    }
    ### END SOLUTION


# %% setup
def two_sides(*pairs):
    """Two evaluations: a task for each pair of attempts."""
    return [{f"t{i}": list(pair[side]) for i, pair in enumerate(pairs)} for side in (0, 1)]


YES, NO, UNGRADED = [True], [False], [None]


# %% example
compare(*two_sides((NO, YES), (NO, YES), (NO, YES), (NO, YES), (NO, YES), (YES, YES)))


# %% test compare 3
def test_compare():
    got = compare(*two_sides(*[(NO, YES)] * 5, (YES, NO), *[(YES, YES)] * 2, *[(NO, NO)] * 2))
    likely = {"the sign is reversed: B minus A": -0.4}
    same(got["difference"], 0.4, "B is right at 7 of 10 tasks, A at 3", likely)
    found = {name: got[name] for name in ("tasks", "left_out", "better", "worse")}
    wanted = {"tasks": 10, "left_out": 0, "better": 5, "worse": 1}
    assert found == wanted, f"wrong counts\n  expected: {wanted}\n  got:      {found}"
    likely = {
        "two-sided: as uneven in either direction, so twice the tail": 7 / 64,
        "only tasks that differ count: n is better + worse": 22 / 1024,
        "as unevenly as this or more: sum the whole tail": 12 / 64,
    }
    same(got["p"], 14 / 64, "5 better, 1 worse: p = 2 (1 + 6) / 64", likely)
    same(compare(*two_sides((NO, YES), (YES, NO)))["p"], 1.0, "1 better, 1 worse: p is 1, never more")
    same(compare(*two_sides((NO, NO)))["p"], 1.0, "no difference anywhere: p is 1")
    got = compare(*two_sides((NO, YES), (YES, UNGRADED), (UNGRADED, NO), (YES, YES)))
    found, why = (
        (got["tasks"], got["left_out"]),
        "a task that one side could not grade is left out on both, and counted",
    )
    assert found == (2, 2), f"{why}: 2 compared and 2 left out, not {found[0]} and {found[1]}"
    likely = {"compare task by task: leave out on both sides what one side could not grade": 0.0}
    same(got["difference"], 0.5, "over the two tasks that both graded: B 2, A 1", likely)
    got = compare(*two_sides(([True, False, False, False], [True, True, False, None]), (YES, YES)))
    likely = {"None is not wrong: it is not among the graded attempts": (2 / 4 - 1 / 4) / 2}
    likely |= {"a task's score is its share of right attempts, not whether one was right": 0.0}
    likely |= {"a task's score is its share of right attempts, not what most of them were": 0.5}
    same(got["difference"], (2 / 3 - 1 / 4) / 2, "the mean over tasks of the difference of their scores", likely)
    why = "different tasks cannot be compared in pairs: do not intersect them in silence"
    refuses(compare, {"t1": YES, "t2": YES}, {"t1": YES, "t3": NO}, why=why)
    refuses(compare, {"t1": UNGRADED}, {"t1": YES}, why="no task was graded on both sides: there is nothing to compare")
    ### BEGIN HIDDEN TESTS
    refuses(compare, {"t1": YES}, {"t1": YES, "t2": YES}, why=why)
    refuses(compare, {}, {}, why="no tasks: there is nothing to compare")
    for better, worse in itertools.product(range(7), range(7)):
        got = compare(*two_sides((YES, YES), *[(NO, YES)] * better, *[(YES, NO)] * worse))
        n = better + worse
        rows = [sum(coins) for coins in itertools.product((0, 1), repeat=n)] if n <= 10 else []
        if rows:  # as unevenly as this or more, among all 2^n
            wanted = sum(abs(heads - n / 2) >= abs(better - n / 2) for heads in rows) / 2**n
            same(got["p"], wanted, f"p for {better} better and {worse} worse")
        assert (got["better"], got["worse"]) == (better, worse), f"better and worse are {better} and {worse}, not {got}"
        same(got["difference"], (better - worse) / (n + 1), "the difference of the means")
    got = compare({"t1": YES, "t2": NO, "t3": NO}, {"t3": NO, "t2": NO, "t1": YES})
    assert (got["better"], got["worse"]) == (0, 0), f"pair by task_id, not by position: no task differs, not {got}"
    ### END HIDDEN TESTS
