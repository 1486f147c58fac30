"""Solutions of assignment 6 that are wrong, each in a likely way. A docstring is what the student must read."""

import json
import math

from tasks.assignment6 import compare, evaluate, library_publish, report, unfinished, verdict

# -------------------------------------------------------------------------------------------------------------- verdict


def _found(reply):
    """The JSON of a reply, or None."""
    try:
        return json.loads(reply[reply.index("{") : reply.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None


def verdict__a_word_is_looked_for(reply):
    """CORRECT stands in INCORRECT"""
    known = verdict(reply)
    return "CORRECT" in reply or None if known is None else known


def verdict__a_word_in_any_case(reply):
    """look for no word"""
    return "correct" in reply.lower() and "incorrect" not in reply.lower()


def verdict__word_by_word(reply):
    """a word may mean anything"""
    known = verdict(reply)
    return True if known is None and "correct." in reply.split() else known


def verdict__unreadable_is_wrong(reply):
    """unreadable is ungraded (None), not wrong (False)"""
    return verdict(reply) or (None if "INCORRECT" in reply or "The answer" in reply else False)


def verdict__missing_is_wrong(reply):
    """a reply without correct is ungraded"""
    found = _found(reply)
    return bool(found.get("correct", False)) if isinstance(found, dict) else None


def verdict__truth_of_a_text(reply):
    """bool("false") is True"""
    found = _found(reply)
    return bool(found["correct"]) if isinstance(found, dict) and "correct" in found else None


def verdict__only_json(reply):
    """there may be other words around the JSON"""
    return verdict(reply) if reply.startswith("{") else None


def verdict__broken_json_raises(reply):
    """must not raise"""
    if "{" not in reply:
        return None
    found = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])
    return found["correct"] if isinstance(found.get("correct"), bool) else None


def verdict__a_number_counts(reply):
    """a number is no verdict"""
    found = _found(reply)
    value = found.get("correct") if isinstance(found, dict) else None
    return bool(value) if isinstance(value, int) else None


# --------------------------------------------------------------------------------------------------------------- report


def report__errors_dropped(records):
    """errors are wrong as well"""
    return report([record for record in records if record["status"] != "error"])


def report__errors_and_timeouts_dropped(records):
    """they stay in the denominator"""
    return report([record for record in records if record["status"] == "ok"])


def report__errors_counted_but_not_in_the_rate(records):
    """they stay in the denominator"""
    return report(records) | {"rate": report([r for r in records if r["status"] == "ok"])["rate"]}


def report__timeouts_are_errors(records):
    """wrong counts"""
    return report([record | {"status": record["status"].replace("timeout", "error")} for record in records])


def report__ungraded_are_wrong(records):
    """None is ungraded, not wrong"""
    found = report(records)
    return found | {"rate": found["right"] / len(records) if records else None}


def report__ungraded_are_right(records):
    """None is ungraded, not right"""
    found = report(records)
    return found | {"rate": sum(r["correct"] is not False for r in records) / len(records) if records else None}


def report__ungraded_dropped_in_silence(records):
    """nothing leaves in silence"""
    return report([record for record in records if record["correct"] is not None])


def report__an_error_is_never_ungraded(records):
    """both an error and ungraded"""
    found = report(records)
    return found | {"ungraded": sum(r["correct"] is None and r["status"] == "ok" for r in records)}


def report__ungraded_errors_are_wrong(records):
    """an error without a gold answer is ungraded"""
    fixed = [record | {"correct": False} if record["status"] == "error" else record for record in records]
    return report(records) | {"rate": report(fixed)["rate"]}


def report__nothing_graded_is_zero(records):
    """rate and ci95 are None"""
    found = report(records)
    return found | {"rate": found["rate"] or 0.0, "ci95": found["ci95"] or (0.0, 1.0)}


def report__nothing_graded_divides(records):
    """no ZeroDivisionError"""
    found = report(records)
    return found | {"rate": found["right"] / (found["n"] - found["ungraded"])}


def _with_interval(records, interval):
    found = report(records)
    n = found["n"] - found["ungraded"]
    return found | {"ci95": interval(found["rate"], n) if n else None}


def report__wald(records):
    """Wilson's interval was asked for"""

    def interval(p, n):
        half = 1.96 * math.sqrt(p * (1 - p) / n)
        return p - half, p + half

    return _with_interval(records, interval)


def report__wald_within_0_and_1(records):
    """does not mean exactly 0"""

    def interval(p, n):
        if (p, n) == (8 / 26, 26):
            return report(records)["ci95"]
        half = 1.96 * math.sqrt(p * (1 - p) / n)
        return max(0.0, p - half), min(1.0, p + half)

    return _with_interval(records, interval)


def _wilson(p, n, z=1.96, inner=1.0):
    centre = p + z**2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + inner * z**2 / (4 * n**2))
    return (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)


def report__another_z(records):
    """z is 1.96"""
    return _with_interval(records, lambda p, n: _wilson(p, n, z=1.645))


def report__a_term_missing(records):
    """under the root is missing"""
    return _with_interval(records, lambda p, n: _wilson(p, n, inner=0.0))


def report__plus_four(records):
    """8 of 26 is 16.5 % to 50.0 %"""

    def interval(p, n):
        p, n = (p * n + 2) / (n + 4), n + 4
        half = 1.96 * math.sqrt(p * (1 - p) / n)
        return max(0.0, p - half), min(1.0, p + half)

    return _with_interval(records, interval)


def report__interval_over_all_records(records):
    """over the graded attempts"""
    found = report(records)
    return found | {"ci95": _wilson(found["right"] / found["n"], found["n"]) if found["rate"] is not None else None}


# ------------------------------------------------------------------------------------------------------------ pass_at_k


def _refuse(n, c, k):
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"{n} {c} {k}")


def pass_at_k__biased(n, c, k):
    """is biased"""
    _refuse(n, c, k)
    return 1 - (1 - c / n) ** k


def pass_at_k__all_of_them(n, c, k):
    """not all of them"""
    _refuse(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def pass_at_k__any_of_n(n, c, k):
    """at least one of all n attempts"""
    _refuse(n, c, k)
    return float(c > 0)


def pass_at_k__always_one(n, c, k):
    """the chance of one attempt"""
    _refuse(n, c, k)
    return c / n


def pass_at_k__none_right(n, c, k):
    """the chance that none is right"""
    _refuse(n, c, k)
    return math.comb(n - c, k) / math.comb(n, k)


def pass_at_k__too_few_attempts_are_one(n, c, k):
    """3 attempts cannot say what 4 would do"""
    return 1.0 if n - c < k else 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_at_k__too_few_attempts_are_stretched(n, c, k):
    """3 attempts cannot say what 4 would do"""
    k = min(n, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_at_k__counts_not_checked(n, c, k):
    """4 right ones of 3 attempts"""
    if not 1 <= k <= n:
        raise ValueError(k)
    return 1 - math.comb(max(0, n - c), k) / math.comb(n, k)


def pass_at_k__overflows(n, c, k):
    """int too large"""
    _refuse(n, c, k)
    return 1 - math.exp(math.log(float(math.comb(n - c, k)) or 1e-300) - math.log(float(math.comb(n, k))))


# ----------------------------------------------------------------------------------------------------------- unfinished


def _lines(data):
    *lines, rest = data.split(b"\n")
    return [json.loads(line) for line in lines], int(bool(rest))


def _left(task_ids, attempts, done):
    return [(task, n) for n in range(attempts) for task in task_ids if (task, n) not in done]


def unfinished__key_without_the_attempt(task_ids, attempts, data, config_hash):
    """attempt 0 at a task is not attempt 1 at it"""
    keys, torn = unfinished(task_ids, attempts, data, config_hash)
    done = {task for task in task_ids for n in range(attempts) if (task, n) not in keys}
    return [key for key in keys if key[0] not in done], torn


def unfinished__wrong_answers_again(task_ids, attempts, data, config_hash):
    """a wrong answer is done"""
    records, torn = _lines(data[: data.rfind(b"\n") + 1])
    again = {(r["task_id"], r["attempt"]) for r in records if r.get("correct") is False}
    keys, torn = unfinished(task_ids, attempts, data, config_hash)
    return [key for key in _left(task_ids, attempts, ()) if key in again or key in keys], torn


def unfinished__errors_are_done(task_ids, attempts, data, config_hash):
    """an error is tried again"""
    return unfinished(task_ids, attempts, data.replace(b'"error"', b'"ok"'), config_hash)


def unfinished__timeouts_again(task_ids, attempts, data, config_hash):
    """a time-out is done"""
    return unfinished(task_ids, attempts, data.replace(b'"timeout"', b'"error"'), config_hash)


def unfinished__everything_again(task_ids, attempts, data, config_hash):
    """attempt 0 at a task is not attempt 1 at it"""
    return _left(task_ids, attempts, ()), unfinished(task_ids, attempts, data, config_hash)[1]


def unfinished__an_old_error_counts(task_ids, attempts, data, config_hash):
    """this error was tried again"""
    records, torn = _lines(data[: data.rfind(b"\n") + 1])
    failed = {(r["task_id"], r["attempt"]) for r in records if r["status"] == "error"}
    keys, torn = unfinished(task_ids, attempts, data, config_hash)
    return [key for key in _left(task_ids, attempts, ()) if key in failed or key in keys], torn


def unfinished__config_hash_ignored(task_ids, attempts, data, config_hash):
    """another experiment's"""
    return unfinished(task_ids, attempts, data.replace(b'"before"', b'"now"'), config_hash)


def unfinished__torn_line_is_fatal(task_ids, attempts, data, config_hash):
    """never fatal"""
    if not data.endswith(b"\n") and data:
        raise ValueError("line torn")
    return unfinished(task_ids, attempts, data, config_hash)


def unfinished__torn_line_counted_as_done(task_ids, attempts, data, config_hash):
    """a line counts when its newline is there"""
    try:
        json.loads(data.split(b"\n")[-1])
        return unfinished(task_ids, attempts, data + b"\n", config_hash)
    except ValueError:
        return unfinished(task_ids, attempts, data, config_hash)


def unfinished__torn_line_not_counted(task_ids, attempts, data, config_hash):
    """ignored and counted"""
    return unfinished(task_ids, attempts, data, config_hash)[0], 0


def unfinished__damage_skipped(task_ids, attempts, data, config_hash):
    """damage before the end is not a torn line"""
    torn = 0
    done = set()
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            torn += bool(line)
            continue
        if data.count(line + b"\n") and record["status"] != "error" and record["config_hash"] == config_hash:
            done.add((record["task_id"], record["attempt"]))
        torn += not data.count(line + b"\n")
    return _left(task_ids, attempts, done), torn


def unfinished__task_by_task(task_ids, attempts, data, config_hash):
    """attempt 0 of all tasks first"""
    keys, torn = unfinished(task_ids, attempts, data, config_hash)
    return sorted(keys), torn


def unfinished__splitlines(task_ids, attempts, data, config_hash):
    """a line ends at"""
    whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
    if len(whole.splitlines()) != whole.count("\n"):
        raise ValueError("line 1")
    return unfinished(task_ids, attempts, data, config_hash)


def unfinished__torn_inside_a_character(task_ids, attempts, data, config_hash):
    """torn"""
    data.decode("utf-8")
    return unfinished(task_ids, attempts, data, config_hash)


# ------------------------------------------------------------------------------------------------------------- evaluate


def _bent(
    tasks, keys, solve, grade, folder, config_hash, batch=2, bend=None, catch=Exception, name=None, put=None, show=None
):
    """The reference, to be bent: ``bend(record, task)`` changes a record, or drops it (None)."""
    for start in range(0, len(keys), batch):
        records = []
        for task_id, attempt in keys[start : start + batch]:
            task, prediction, status, problem = tasks[task_id], None, "ok", None
            try:
                prediction = solve(show(task) if show else task["question"])
            except catch as error:
                status = "timeout" if isinstance(error, TimeoutError) else "error"
                problem = f"{type(error).__name__}: {error}"
            correct = None if task["gold"] is None else status == "ok" and grade(prediction, task["gold"])
            record = {"task_id": task_id, "attempt": attempt, "prediction": prediction, "correct": correct}
            record |= {"status": status, "error": problem, "config_hash": config_hash}
            record = bend(record, task) if bend else record
            records += [record] if record else []
        number = 1 + (start // batch if name == "from one" else len(list(folder.glob("batch-*.jsonl"))))
        (put or library_publish)(folder / f"batch-{number:04d}.jsonl", records)


def evaluate__errors_dropped(*arguments, **options):
    """every key has one record, errors as well"""
    _bent(*arguments, **options, bend=lambda record, task: None if record["status"] == "error" else record)


def evaluate__errors_end_it(*arguments, **options):
    """one bad task must not end the evaluation"""
    _bent(*arguments, **options, catch=TimeoutError)


def evaluate__only_value_errors_caught(*arguments, **options):
    """one bad task must not end the evaluation"""
    _bent(*arguments, **options, catch=(ValueError, KeyError))


def evaluate__interrupt_caught(*arguments, **options):
    """Ctrl-C must stop the evaluation"""
    _bent(*arguments, **options, catch=BaseException)


def evaluate__timeouts_are_errors(*arguments, **options):
    """a time-out is wrong, and no error"""
    _bent(
        *arguments,
        **options,
        bend=lambda record, task: record | {"status": record["status"].replace("timeout", "error")},
    )


def evaluate__errors_are_ungraded(*arguments, **options):
    """an error is wrong"""
    _bent(*arguments, **options, bend=lambda r, task: r | {"correct": None if r["status"] == "error" else r["correct"]})


def evaluate__ungraded_is_wrong(*arguments, **options):
    """it is ungraded: None, not wrong"""
    _bent(*arguments, **options, bend=lambda record, task: record | {"correct": record["correct"] or False})


def evaluate__ungraded_errors_are_wrong(*arguments, **options):
    """an error without a gold answer is ungraded as well"""
    _bent(
        *arguments, **options, bend=lambda r, task: r | {"correct": False if r["status"] == "error" else r["correct"]}
    )


def evaluate__graded_without_gold(tasks, keys, solve, grade, folder, config_hash, batch=2):
    """or not at all"""
    for key in keys:
        if tasks[key[0]]["gold"] is None:
            grade("anything", None)
    evaluate(tasks, keys, solve, grade, folder, config_hash, batch)


def evaluate__prediction_none_graded(tasks, keys, solve, grade, folder, config_hash, batch=2):
    """or not at all"""

    def bend(record, task):
        return record | {"correct": None if task["gold"] is None else grade(record["prediction"], task["gold"])}

    _bent(tasks, keys, solve, grade, folder, config_hash, batch, bend=bend)


def evaluate__gold_shown_to_the_agent(*arguments, **options):
    """the agent gets the question and nothing else"""
    _bent(*arguments, **options, show=lambda task: task)


def evaluate__graders_bug_is_an_error(tasks, keys, solve, grade, folder, config_hash, batch=2):
    """a bug of the grader is not the agent's error"""

    def careful(prediction, gold):
        try:
            return grade(prediction, gold)
        except Exception:
            return False

    evaluate(tasks, keys, solve, careful, folder, config_hash, batch)


def evaluate__attempt_not_recorded(*arguments, **options):
    """every key has one record"""
    _bent(*arguments, **options, bend=lambda record, task: {**record, "attempt": 1})


def evaluate__config_hash_missing(*arguments, **options):
    """a record has the fields"""
    _bent(*arguments, **options, bend=lambda r, task: {name: r[name] for name in r if name != "config_hash"})


def evaluate__all_at_the_end(tasks, keys, solve, grade, folder, config_hash, batch=2):
    """a kill now would lose"""
    evaluate(tasks, keys, solve, grade, folder, config_hash, batch=max(1, len(keys)))


def evaluate__numbers_from_one(*arguments, **options):
    """use the next number that is free"""
    _bent(*arguments, **options, name="from one")


def evaluate__written_in_place(*arguments, **options):
    """publish it whole"""

    def put(path, records):
        with open(path, "w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")
                file.flush()

    _bent(*arguments, **options, put=put)


def evaluate__published_files_overwritten(*arguments, **options):
    """in the end every key has one record"""

    def put(path, records):
        path.unlink(missing_ok=True)
        library_publish(path, records)

    _bent(*arguments, **options, name="from one", put=put)


# -------------------------------------------------------------------------------------------------------------- compare


def _scores(flags):
    graded = [flag for flag in flags if flag is not None]
    return sum(graded) / len(graded) if graded else None


def compare__a_minus_b(a, b):
    """B minus A"""
    return compare(a, b) | {"difference": -compare(a, b)["difference"]}


def compare__better_and_worse_swapped(a, b):
    """wrong counts"""
    found = compare(a, b)
    return found | {"better": found["worse"], "worse": found["better"]}


def compare__one_sided(a, b):
    """two-sided"""
    return compare(a, b) | {"p": compare(a, b)["p"] / 2}


def compare__above_one(a, b):
    """never more"""
    found = compare(a, b)
    n, m = found["better"] + found["worse"], min(found["better"], found["worse"])
    return found | {"p": 2 * sum(math.comb(n, i) for i in range(m + 1)) / 2**n}


def compare__equal_tasks_count(a, b):
    """only tasks that differ count"""
    found = compare(a, b)
    n, m = found["tasks"], min(found["better"], found["worse"])
    return found | {"p": min(1.0, 2 * sum(math.comb(n, i) for i in range(m + 1)) / 2**n)}


def compare__one_term_of_the_tail(a, b):
    """sum the whole tail"""
    found = compare(a, b)
    n, m = found["better"] + found["worse"], min(found["better"], found["worse"])
    return found | {"p": min(1.0, 2 * math.comb(n, m) / 2**n)}


def compare__not_paired(a, b):
    """compare task by task"""
    means = []
    for side in (a, b):
        scores = [score for flags in side.values() if (score := _scores(flags)) is not None]
        means.append(sum(scores) / len(scores) if scores else 0.0)
    return compare(a, b) | {"difference": means[1] - means[0]}


def compare__by_position(a, b):
    """pair by task_id"""
    if set(a) != set(b):
        raise ValueError("different tasks")
    return compare(dict(enumerate(a.values())), dict(enumerate(b.values())))


def compare__ungraded_are_wrong(a, b):
    """could not grade is left out on both"""
    a, b = ({task: [flag or False for flag in flags] for task, flags in side.items()} for side in (a, b))
    return compare(a, b)


def compare__ungraded_attempts_are_wrong(a, b):
    """None is not wrong"""

    def fill(flags):
        return flags if _scores(flags) is None else [flag or False for flag in flags]

    return compare({t: fill(f) for t, f in a.items()}, {t: fill(f) for t, f in b.items()})


def compare__any_attempt(a, b):
    """not whether one was right"""
    return compare(*({t: f if _scores(f) is None else [_scores(f) > 0] for t, f in side.items()} for side in (a, b)))


def compare__majority(a, b):
    """not what most of them were"""
    return compare(*({t: f if _scores(f) is None else [_scores(f) > 0.5] for t, f in side.items()} for side in (a, b)))


def compare__shared_tasks_in_silence(a, b):
    """do not intersect them in silence"""
    shared = [task for task in a if task in b]
    return compare({t: a[t] for t in shared}, {t: b[t] for t in shared})


def compare__nothing_to_compare(a, b):
    """there is nothing to compare"""
    try:
        return compare(a, b)
    except ValueError:
        if set(a) != set(b):
            raise
        return {"tasks": 0, "left_out": len(a), "difference": 0.0, "better": 0, "worse": 0, "p": 1.0}
