"""Solutions of assignment 4 that are wrong, each in a likely way. A docstring is what the student must read."""

import json
import re
import string

from tasks.assignment4 import is_right, library_executor_reward, library_is_right, parse, rate, words

# ------------------------------------------------------------------------------------------------------ executor_reward


def _checked(expert):
    if expert is None or not 0 <= expert <= 1:
        raise ValueError(expert)
    return expert


def executor_reward__no_format_gate(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """the format gate is missing"""
    return float(weights[0] * format_ok + weights[1] * planner_correct + weights[2] * _checked(expert))


def executor_reward__planner_and_expert_swapped(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """the weights of planner and expert are swapped"""
    _checked(expert)
    return float(weights[0] + weights[2] * planner_correct + weights[1] * expert) if format_ok else 0.0


def executor_reward__format_and_planner_swapped(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """the weights of format and planner are swapped"""
    _checked(expert)
    return float(weights[1] + weights[0] * planner_correct + weights[2] * expert) if format_ok else 0.0


def executor_reward__no_format_term(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """0.1 for a good format is missing"""
    _checked(expert)
    return float(weights[1] * planner_correct + weights[2] * expert) if format_ok else 0.0


def executor_reward__weights_ignored(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """weights is ignored"""
    return 0.1 + 0.4 * planner_correct + 0.5 * _checked(expert) if format_ok else 0.0


def executor_reward__partly_correct_counts_as_correct(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """it counts as half"""
    _checked(expert)
    return float(weights[0] + weights[1] * bool(planner_correct) + weights[2] * expert) if format_ok else 0.0


def executor_reward__expert_not_checked(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """do not clip it, do not use it, raise"""
    return float(weights[0] + weights[1] * planner_correct + weights[2] * expert) if format_ok else 0.0


def executor_reward__expert_clipped(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """do not clip it, do not use it, raise"""
    expert = min(1.0, max(0.0, expert))
    return float(weights[0] + weights[1] * planner_correct + weights[2] * expert) if format_ok else 0.0


def executor_reward__nan_gets_through(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """a NaN must not get through"""
    if expert is None or expert < 0 or expert > 1:
        raise ValueError(expert)
    return float(weights[0] + weights[1] * planner_correct + weights[2] * expert) if format_ok else 0.0


def executor_reward__no_rating_is_zero(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """no rating is not a rating of 0"""
    _checked(expert := expert or 0.0)
    return float(weights[0] + weights[1] * planner_correct + weights[2] * expert) if format_ok else 0.0


def executor_reward__expert_checked_after_the_gate(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """must not hide behind a bad format"""
    if not format_ok:
        return 0.0
    return float(weights[0] + weights[1] * planner_correct + weights[2] * _checked(expert))


def executor_reward__zero_refused(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)):
    """a rating of 0 is a rating"""
    if not expert or not 0 < expert <= 1:
        raise ValueError(expert)
    return float(weights[0] + weights[1] * planner_correct + weights[2] * expert) if format_ok else 0.0


# ---------------------------------------------------------------------------------------------------------------- parse


def _line(text):
    return text.strip().partition("\n")[0].strip()


def _answers(messages, read):
    """The reference for calls; ``read`` for everything else: it gives an answer or None."""
    if messages and "tool_call>" in messages[-1]["content"]:
        return parse(messages)
    answer = read(messages)
    return ("error", None) if answer is None else ("answer", answer)


def _own(messages):
    return messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else ""


def parse__first_answer(messages):
    """the last one counts"""
    return _answers(messages, lambda m: _line(_own(m).partition("FINAL ANSWER:")[2]) or None)


def parse__answer_from_the_prompt(messages):
    """taken from the prompt or a page"""
    whole = "\n".join(message["content"] for message in messages)
    return _answers(messages, lambda m: _line(whole.rpartition("FINAL ANSWER:")[2]) or None)


def parse__answer_from_an_earlier_message(messages):
    """only the last message counts"""
    own = "\n".join(message["content"] for message in messages if message["role"] == "assistant")
    return _answers(messages, lambda m: _line(own.rpartition("FINAL ANSWER:")[2]) if "FINAL ANSWER:" in own else None)


def parse__answer_from_anybody(messages):
    """not the agent's own"""
    last = messages[-1]["content"] if messages else ""
    found = "FINAL ANSWER:" in last
    return _answers(messages, lambda m: _line(last.rpartition("FINAL ANSWER:")[2]) or None if found else None)


def parse__answer_with_chatter(messages):
    """chatter"""
    return _answers(
        messages, lambda m: _own(m).rpartition("FINAL ANSWER:")[2].strip() or None if "FINAL" in _own(m) else None
    )


def parse__empty_answer(messages):
    """an empty answer is no answer"""
    return _answers(messages, lambda m: _line(_own(m).rpartition("FINAL ANSWER:")[2]) if "FINAL" in _own(m) else None)


def parse__no_marker_needed(messages):
    """or made up"""
    return _answers(messages, lambda m: _line(_own(m).rpartition("FINAL ANSWER:")[2]) or None)


def parse__same_line_only(messages):
    """may be on the next line"""
    found = re.findall(r"FINAL ANSWER:[ \t]*(.*)", _own(messages))
    return _answers(messages, lambda m: found[-1].strip() or None if found else None)


def parse__any_case(messages):
    """as it is written"""
    found = re.split("final answer:", _own(messages), flags=re.IGNORECASE)
    return _answers(messages, lambda m: _line(found[-1]) or None if len(found) > 1 else None)


def _calls(messages, read):
    """The reference for answers; ``read`` for messages with a tag: a call or None."""
    message = messages[-1]["content"] if messages else ""
    if "tool_call>" not in message:
        return parse(messages)
    call = read(message)
    return ("error", None) if call is None else ("call", call)


def _checked_call(text):
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    good = isinstance(call, dict) and set(call) == {"name", "arguments"}
    return call if good and isinstance(call["name"], str) and isinstance(call["arguments"], dict) else None


def parse__first_of_two_calls(messages):
    """two calls in a message are a format error"""

    def read(message):
        found = re.search("<tool_call>(.*?)</tool_call>", message, flags=re.DOTALL)
        return found and _checked_call(found[1])

    return _calls(messages, read)


def parse__last_of_two_calls(messages):
    """two calls in a message are a format error"""
    return _calls(
        messages, lambda m: _checked_call(m.rpartition("<tool_call>")[2].strip().removesuffix("</tool_call>"))
    )


def parse__unclosed_call(messages):
    """a call that was never closed is a format error"""

    def read(message):
        if message.count("<tool_call>") != 1:
            return None
        body, _, after = message.partition("<tool_call>")[2].partition("</tool_call>")
        return None if after.strip() else _checked_call(body)

    return _calls(messages, read)


def parse__text_after_the_call(messages):
    """text after the call is a format error"""

    def read(message):
        if message.count("<tool_call>") != 1 or message.count("</tool_call>") != 1:
            return None
        return _checked_call(message.partition("<tool_call>")[2].partition("</tool_call>")[0])

    return _calls(messages, read)


def _one(message):
    one = message.count("<tool_call>") == 1 and message.count("</tool_call>") == 1
    return message.partition("<tool_call>")[2].strip().removesuffix("</tool_call>") if one else "no"


def parse__bad_json_raises(messages):
    """must not raise"""
    return _calls(messages, lambda m: json.loads(_one(m)) if _one(m) != "no" else None)


def parse__arguments_as_text(messages):
    """arguments must be an object, never a text"""

    def read(message):
        try:
            call = json.loads(_one(message))
        except (ValueError, RecursionError):
            return None
        return call if isinstance(call, dict) and set(call) == {"name", "arguments"} else None

    return _calls(messages, read)


def parse__arguments_missing(messages):
    """a call without arguments is a format error"""

    def read(message):
        try:
            call = json.loads(_one(message))
        except (ValueError, RecursionError):
            return None
        return call if isinstance(call, dict) and isinstance(call.get("arguments", {}), dict) else None

    return _calls(messages, read)


def parse__deep_nesting_raises(messages):
    """nested too deep"""

    def read(message):
        try:
            call = json.loads(_one(message))
        except ValueError:
            return None
        good = isinstance(call, dict) and set(call) == {"name", "arguments"} and isinstance(call["name"], str)
        return call if good and isinstance(call["arguments"], dict) else None

    return _calls(messages, read)


# ------------------------------------------------------------------------------------------------------------- is_right


def _squeezed(text):
    return "".join(str(text).split()).lower().translate(str.maketrans("", "", string.punctuation))


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def _needs_gold(gold):
    if gold is None or gold.strip() in ("", "?"):
        raise ValueError("missing")


def is_right__substring(prediction, gold):
    """no substring match"""
    _needs_gold(gold)
    return gold.lower() in str(prediction).lower()


def is_right__always_text(prediction, gold):
    """numbers are compared as numbers"""
    _needs_gold(gold)
    return _squeezed(prediction) == _squeezed(gold)


def is_right__almost_equal(prediction, gold):
    """a number must be exactly equal"""
    digits = re.sub("[$%,]", "", str(prediction))
    if gold and _is_number(gold) and _is_number(digits):
        return abs(float(digits) - float(gold)) < 1e-2
    return is_right(prediction, gold)


def is_right__unit_raises(prediction, gold):
    """a unit makes a number wrong"""
    if gold and _is_number(gold):
        return float(re.sub("[$%,]", "", str(prediction))) == float(gold)
    return is_right(prediction, gold)


def is_right__unit_stripped(prediction, gold):
    """a unit makes a number wrong"""
    if gold and _is_number(gold):
        return is_right(str(prediction).split()[0], gold)
    return is_right(prediction, gold)


def is_right__articles_removed(prediction, gold):
    """articles stay"""
    return is_right(re.sub(r"\b(a|an|the) ", "", str(prediction)), gold)


def is_right__missing_gold_is_wrong(prediction, gold):
    """is ungraded, not wrong"""
    return bool(gold) and gold.strip() not in ("", "?") and is_right(prediction, gold)


def is_right__prediction_decides(prediction, gold):
    """the gold answer alone decides"""
    digits = re.sub("[$%,]", "", str(prediction))
    if _is_number(digits) and gold and not _is_number(gold) and not re.search("[,;]", gold):
        raise ValueError(f"could not convert string to float: {gold!r}")
    return is_right(prediction, gold)


def is_right__none_has_a_rule_of_its_own(prediction, gold):
    """None is compared as the text"""
    _needs_gold(gold)
    return False if prediction is None else is_right(prediction, gold)


def is_right__comma_taken_from_the_gold_number(prediction, gold):
    """is a list, even if it looks like a number"""
    plain = gold and gold.replace(",", "")
    return is_right(prediction, plain if plain and _is_number(plain) else gold)


def is_right__any_order(prediction, gold):
    """the order of a list counts"""
    if gold and re.search("[,;]", gold) and not _is_number(gold):
        prediction, gold = (", ".join(sorted(re.split("[,;] *", text.lower()))) for text in (str(prediction), gold))
    return is_right(prediction, gold)


def is_right__zip_stops_early(prediction, gold):
    """zip() stops at the shorter one"""
    if gold and re.search("[,;]", gold):
        pairs = zip(re.split("[,;]", str(prediction)), re.split("[,;]", gold), strict=False)
        return all(
            (_is_number(g) and is_right(p, g)) or "".join(p.split()).lower() == "".join(g.split()).lower()
            for p, g in pairs
        )
    return is_right(prediction, gold)


def is_right__commas_only(prediction, gold):
    """commas and semicolons both part a list"""
    if gold and "," in gold and ";" in str(prediction):
        return False
    return is_right(prediction, gold)


def is_right__elements_as_text(prediction, gold):
    """numbers in a list are compared as numbers"""
    if gold and re.search("[,;]", gold):
        return ["".join(x.split()).lower() for x in re.split("[,;]", str(prediction))] == [
            "".join(x.split()).lower() for x in re.split("[,;]", gold)
        ]
    return is_right(prediction, gold)


def is_right__no_punctuation_in_lists(prediction, gold):
    """inside a list punctuation stays"""
    if gold and re.search("[,;]", gold):
        return is_right(*(re.sub(r"[.'](?!\d)", "", str(text)) for text in (prediction, gold)))
    return is_right(prediction, gold)


# ----------------------------------------------------------------------------------------------------------------- rate


def _parts(report, outputs):
    useful = [output for output in outputs if output.strip() and not output.startswith("Error")]
    return useful, {word for output in useful for word in words(output)}, words(report)


def rate__sum(report, outputs):
    """not the sum"""
    return 3 * rate(report, outputs)


def rate__one_word_is_enough(report, outputs):
    """every word of the report, not one of them"""
    _, seen, said = _parts(report, outputs)
    return (rate(report, outputs) * 3 - (set(said) <= seen and bool(said)) + bool(set(said) & seen)) / 3


def rate__substring(report, outputs):
    """compare words, not substrings"""
    useful, seen, said = _parts(report, outputs)
    inside = bool(said) and report.lower() in " ".join(useful).lower()
    return (rate(report, outputs) * 3 - (set(said) <= seen and bool(said)) + inside) / 3


def rate__case_counts(report, outputs):
    """words are compared in lower case"""
    return rate(report, outputs) - any(letter.isupper() for letter in report[1:]) / 3


def rate__errors_are_useful(report, outputs):
    """an error gave nothing"""
    return rate(report, [re.sub("^Error", "An error", output) for output in outputs])


def rate__errors_are_a_source(report, outputs):
    """what an error says is no source"""
    _, seen, said = _parts(report, outputs)
    everything = {word for output in outputs for word in words(output)}
    return (
        rate(report, outputs) * 3 - (set(said) <= seen and bool(said)) + (set(said) <= everything and bool(said))
    ) / 3


def rate__empty_report_is_grounded(report, outputs):
    """all() of nothing is True"""
    return rate(report, outputs) + (not words(report)) / 3


def rate__no_outputs_no_division(report, outputs):
    """ZeroDivisionError"""
    return rate(report, outputs) if len(outputs) / len(outputs) else 0.0


def rate__length_in_characters(report, outputs):
    """24 words"""
    _, _, said = _parts(report, outputs)
    if not said:
        return rate(report, outputs)
    return rate(report, outputs) - min(1, 12 / len(said)) / 3 + min(1, 60 / len(report)) / 3


# --------------------------------------------------------------------------------------------------------------- please


def please__the_truth(outputs):
    """contains the answer"""
    return outputs[0].rstrip(".").split()[-1]


def please__the_whole_page(outputs):
    """contains the answer"""
    return outputs[0]


def please__made_up(outputs):
    """say what it looks at"""
    return "I found it"


def please__nothing(outputs):
    """an empty report does not please"""
    return ""


# ------------------------------------------------------------------------------------------------------------------ pay


def _pay(group, gold, outcome=None, calls=None, planner=None):
    """Bendable: ``outcome(index, corrects)`` for the executor, ``calls(rollout)``, ``planner(rollout, correct)``."""
    corrects = [bool(r["format_ok"]) and r["answer"] is not None and library_is_right(r["answer"], gold) for r in group]
    paid = []
    for n, rollout in enumerate(group):
        shared = outcome(n, corrects) if outcome else corrects[n]
        some = calls(rollout) if calls else rollout["calls"]
        own = planner(rollout, corrects[n]) if planner else (0.1 + 0.9 * corrects[n]) * bool(rollout["format_ok"])
        paid.append((own, [library_executor_reward(call["format_ok"], shared, call["expert"]) for call in some]))
    return paid


def pay__mean_of_the_group(group, gold):
    """not the group's mean"""
    return _pay(group, gold, outcome=lambda n, corrects: sum(corrects) / len(corrects))


def pay__no_shared_fate(group, gold):
    """the shared fate is missing"""
    return _pay(group, gold, outcome=lambda n, corrects: 0)


def pay__next_rollouts_outcome(group, gold):
    """the outcome of its own rollout, not of another one"""
    return _pay(group, gold, outcome=lambda n, corrects: corrects[(n + 1) % len(corrects)])


def pay__bad_format_is_correct_for_the_executor(group, gold):
    """an answer in a bad format is not correct, for the executor neither"""

    def outcome(n, corrects):
        return group[n]["answer"] is not None and library_is_right(group[n]["answer"], gold)

    return _pay(group, gold, outcome=outcome)


def pay__planners_format_gates_the_executor(group, gold):
    """not the planner's"""
    return [
        (own, [r * bool(rollout["format_ok"]) for r in some])
        for (own, some), rollout in zip(_pay(group, gold), group, strict=True)
    ]


def pay__executors_format_ignored(group, gold):
    """the executor's own format is ignored"""
    return _pay(group, gold, calls=lambda rollout: [{**call, "format_ok": True} for call in rollout["calls"]])


def pay__outcome_divided_among_the_calls(group, gold):
    """not divided among the calls"""
    return _pay(group, gold, outcome=lambda n, corrects: corrects[n] / max(1, len(group[n]["calls"])))


def pay__mean_expert(group, gold):
    """not the mean of the rollout's"""

    def calls(rollout):
        mean = sum(call["expert"] for call in rollout["calls"]) / max(1, len(rollout["calls"]))
        return [{**call, "expert": mean} for call in rollout["calls"]]

    return _pay(group, gold, calls=calls)


def pay__rollouts_without_calls_dropped(group, gold):
    """one pair for each of the"""
    return [pair for pair in _pay(group, gold) if pair[1]]


def pay__no_answer_is_the_text_none(group, gold):
    """no answer is not the answer 'None'"""
    return _pay([{**r, "answer": str(r["answer"])} for r in group], gold)


def pay__planner_without_a_gate(group, gold):
    """the planner's format gate is missing"""

    def planner(rollout, correct):
        right = rollout["answer"] is not None and library_is_right(rollout["answer"], gold)
        return 0.1 * bool(rollout["format_ok"]) + 0.9 * right

    return _pay(group, gold, planner=planner)


def pay__planner_weights_swapped(group, gold):
    """the planner's weights are swapped"""
    return _pay(group, gold, planner=lambda rollout, correct: (0.9 + 0.1 * correct) * bool(rollout["format_ok"]))
