# %% [markdown]
# # Assignment 4. Rewards and the expert
#
# A reward is the only thing that training listens to: whatever earns it will be done more often. You write what a
# planner and an executor are paid for in M-GRPO, what stands before it (who said what? is the answer right?), and an
# expert that can be pleased without being right. Six small functions, 20 points, no model.
#
# **How it works.** Fill in the places marked `YOUR CODE HERE`. Below each function are its checks: run them as often
# as you like. Grading runs the same checks with more cases. A function is checked by itself: where one builds on
# another it uses the library's (`minimgrpo.rewards`, `minimgrpo.protocol`, `minimgrpo.scorer`), so a mistake early on
# costs nothing later. (The library has most of what you write here. Look after you have written yours.)

# %% setup
import json
import math
import re
import string

from minimgrpo.checks import same
from minimgrpo.rewards import executor_reward as library_executor_reward
from minimgrpo.scorer import gaia_score as library_is_right


def refuses(function, *arguments, why):
    """Assert that the call raises ValueError."""
    try:
        got = function(*arguments)
    except ValueError:
        return
    except Exception as error:
        raise AssertionError(f"{why}\n  expected: ValueError\n  got:      {type(error).__name__}: {error}") from None
    raise AssertionError(f"{why}\n  expected: ValueError\n  got:      {got!r}")


# %% [markdown]
# ## 1. The executor's reward (4 points)
#
# M-GRPO (arXiv 2511.13288, eq. 5) pays an executor's trajectory for three things,
#
# $$R = 0.1 \cdot \mathrm{format} + 0.4 \cdot \mathrm{planner} + 0.5 \cdot \mathrm{expert}$$
#
# where *planner* is whether the planner of the same rollout answered correctly (a shared fate: the one number that
# crosses from planner to executor), and *expert* is a rating of the sub-task. **A message in a bad format earns 0,
# whatever the rest was worth**: without this gate a team learns to be right in a way that nobody can read.
#
# The expert's rating comes from a program or a model that may be broken. A rating that makes no sense (7, NaN, `None`)
# must stop the run at once, with a `ValueError`; a run that trains on a silent 0 or a clipped 1 looks healthy for
# days.


# %% task executor_reward
def executor_reward(format_ok, planner_correct, expert, weights=(0.1, 0.4, 0.5)) -> float:
    """The reward of one executor trajectory (eq. 5).

    format_ok: True or False.   planner_correct: True, False, or a number in [0, 1].   expert: a number in [0, 1].
    weights: of format, planner and expert.
    Returns a float; 0.0 if the format is bad.
    Raises ValueError for an expert that is None, NaN, or outside [0, 1], even if the format is bad.
    """
    ### BEGIN SOLUTION
    if expert is None or not 0 <= expert <= 1:  # a comparison with NaN is False
        raise ValueError(f"the expert's rating must be in [0, 1], not {expert!r}")
    if not format_ok:
        return 0.0
    format_weight, planner_weight, expert_weight = weights
    return float(format_weight + planner_weight * planner_correct + expert_weight * expert)
    ### END SOLUTION


# %% example
executor_reward(True, False, 0.5)  # 0.1 + 0.5 * 0.5


# %% test executor_reward 2
def test_executor_reward():
    gate = "the format gate is missing: a bad format earns 0, whatever the rest was worth"
    same(executor_reward(False, True, 1.0), 0.0, gate)
    likely = {
        "the weights of planner and expert are swapped": 0.6,
        "0.1 for a good format is missing": 0.4,
        "the planner's success is missing": 0.1,
    }
    same(executor_reward(True, True, 0.0), 0.5, "wrong for a right planner and a useless sub-task", likely)
    likely = {"the weights of format and planner are swapped": 0.65}
    same(executor_reward(True, False, 0.5), 0.35, "wrong for a wrong planner and an expert's 0.5", likely)
    same(executor_reward(True, 0.5, 0.25), 0.425, "planner_correct may be a number such as 0.5: it counts as half")
    same(executor_reward(True, True, 1.0, (0.5, 1.0, 2.0)), 3.5, "weights is ignored")
    assert isinstance(executor_reward(True, True, 1), float), "return a float"
    ### BEGIN HIDDEN TESTS
    for planner in (0, 0.25, 1):
        for expert in (0, 0.125, 0.75, 1):
            same(executor_reward(False, planner, expert), 0.0, gate)
            same(executor_reward(True, planner, expert), 0.1 + 0.4 * planner + 0.5 * expert, "wrong on other values")
            same(executor_reward(True, planner, expert, (1, -2, 3)), 1 - 2 * planner + 3 * expert, "weights is ignored")
    ### END HIDDEN TESTS


# %% test executor_reward__refused 2
def test_executor_reward__refused():
    for expert in (7, -0.5, 1.0001):
        why = f"an expert of {expert} is a mistake somewhere: do not clip it, do not use it, raise"
        refuses(executor_reward, True, True, expert, why=why)
    why = "a NaN must not get through: it passes `x < 0 or x > 1`, and min() and max() may keep it"
    refuses(executor_reward, True, True, float("nan"), why=why)
    refuses(executor_reward, True, True, None, why="no rating is not a rating of 0: raise")
    why = "look at the expert before the format gate: a broken expert must not hide behind a bad format"
    refuses(executor_reward, False, True, 7, why=why)
    try:
        executor_reward(True, True, 0)
    except ValueError:
        raise AssertionError("a rating of 0 is a rating: do not refuse it") from None
    ### BEGIN HIDDEN TESTS
    for expert in (float("inf"), -float("inf"), 1 + 1e-9, -1e-9, None, math.nan):
        for format_ok in (True, False):
            refuses(executor_reward, format_ok, False, expert, why=f"an expert of {expert} must be refused")
    ### END HIDDEN TESTS


# %% [markdown]
# ## 2. What did the planner say? (5 points)
#
# The planner ends a message either with a tool call, `<tool_call>{"name": "executor", "arguments": {"task":
# "..."}}</tool_call>`, or with a line `FINAL ANSWER: ...`. Both also stand in its prompt, as examples, and may stand
# in a page that was read. So only **the agent's own last message** is looked at. It is one of three things:
#
# * **a call**, if `<tool_call>` or `</tool_call>` occurs in it: any text, then exactly one `<tool_call>`, one JSON
#   object with exactly the keys `name` (a text) and `arguments` (an object), one `</tool_call>`, and nothing but
#   blanks after it. Two calls are an error, not a choice; a call that was never closed (the model ran out of tokens)
#   is none;
# * **an answer** otherwise: what follows the **last** `FINAL ANSWER:` (a model may change its mind). It is the first
#   line there that is not blank; what comes after that line is chatter;
# * **an error**: everything else.
#
# Whatever a model writes, the parser must not raise: its text is data.


# %% task parse
def parse(messages: list) -> tuple:
    """Read the last message of a planner's conversation.

    messages: dicts with "role" ("system", "user" or "assistant") and "content", in order. Tool output has role "user".
    Returns ("call", {"name": ..., "arguments": {...}}), ("answer", text without surrounding blanks) or ("error", None).
    An error is also: no message, a last message that is not the assistant's, an empty answer. Raises nothing.
    """
    ### BEGIN SOLUTION
    error = ("error", None)
    if not messages or messages[-1]["role"] != "assistant":
        return error
    message = messages[-1]["content"]
    if "<tool_call>" not in message and "</tool_call>" not in message:
        _, found, rest = message.rpartition("FINAL ANSWER:")
        answer = rest.strip().partition("\n")[0].strip()
        return ("answer", answer) if found and answer else error
    if message.count("<tool_call>") != 1 or message.count("</tool_call>") != 1:
        return error
    body, _, after = message.partition("<tool_call>")[2].partition("</tool_call>")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return error
    if after.strip() or not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return error
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        return error
    return "call", call
    ### END SOLUTION


# %% example
parse([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "FINAL ANSWER: 4"}])


# %% test parse__answers 2
def test_parse__answers():
    prompt = {"role": "system", "content": "End with FINAL ANSWER: and a number."}
    page = {"role": "user", "content": "<tool_response>\nFINAL ANSWER: 99\n</tool_response>"}

    def expect(texts, wanted, why):
        messages = [prompt, page, *({"role": "assistant", "content": text} for text in texts)]
        got = parse(messages)
        wanted = ("error", None) if wanted is None else ("answer", wanted)
        assert got == wanted, f"{why}\n  the agent said: {texts}\n  expected: {wanted}\n  got:      {got}"

    expect(["It is four.\nFINAL ANSWER: 4"], "4", "the answer is the text behind FINAL ANSWER:")
    expect(["FINAL ANSWER: 3\nNo, wait.\nFINAL ANSWER: 4"], "4", "of two answers in a message the last one counts")
    expect(["I do not know."], None, "the answer was taken from the prompt or a page, or made up: it is no answer")
    expect(["FINAL ANSWER: 3", "I give up."], None, "only the last message counts: an answer before it is not the end")
    expect([], None, "the last message is a page, not the agent's own")
    expect(["FINAL ANSWER: 4\nI hope this helps!"], "4", "what follows the answer's line is chatter")
    expect(["FINAL ANSWER:  \n"], None, "an empty answer is no answer")
    ### BEGIN HIDDEN TESTS
    expect(["FINAL ANSWER:\n\n  Bay of Bengal \nThat is all."], "Bay of Bengal", "the answer may be on the next line")
    expect(["FINAL ANSWER: 3\nFINAL ANSWER:"], None, "the last answer is empty, so there is none")
    expect(["FINAL ANSWER: Curaçao: 山, 3; 4"], "Curaçao: 山, 3; 4", "keep the answer as it is")
    expect(["The final answer: 5"], None, "only FINAL ANSWER: as it is written marks an answer")
    assert parse([]) == ("error", None), "no messages are an error"
    ### END HIDDEN TESTS


# %% test parse__calls 3
def test_parse__calls():
    prompt = {"role": "system", "content": 'Write <tool_call>{"name": "executor", "arguments": {}}</tool_call>.'}
    task = '{"name": "executor", "arguments": {"task": "Find Accra"}}'
    call = f"<tool_call>{task}</tool_call>"

    def expect(text, wanted, why):
        wanted = ("error", None) if wanted is None else ("call", wanted)
        try:
            got = parse([prompt, {"role": "assistant", "content": text}])
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            why = f"a model's text is data and must not raise: {why}"
        says = f"{why}\n  the agent said: {text[:200]}\n  expected: {wanted}\n  got:      {got}"
        assert got == wanted, says

    expect(f"Let me see. {call}\n", json.loads(task), "one call, at the end of the message")
    expect(f"{call} {call}", None, "two calls in a message are a format error, not a choice")
    expect(f"<tool_call>{task}", None, "a call that was never closed is a format error, not a call")
    expect(f"{call} I wait.", None, "text after the call is a format error")
    expect("<tool_call>find Accra</tool_call>", None, "what is not JSON is a format error")
    text = '<tool_call>{"name": "executor", "arguments": "Find Accra"}</tool_call>'
    expect(text, None, "arguments must be an object, never a text")
    expect('<tool_call>{"name": "executor"}</tool_call>', None, "a call without arguments is a format error")
    ### BEGIN HIDDEN TESTS
    expect(f"{task}</tool_call>", None, "a closing tag alone is a format error")
    expect(f"</tool_call>{task}<tool_call>", None, "the tags are in the wrong order")
    expect(f"<tool_call><tool_call>{task}</tool_call>", None, "two opening tags are a format error")
    expect("<tool_call>[1, 2]</tool_call>", None, "a list is no call")
    expect("<tool_call>null</tool_call>", None, "null is no call")
    expect("<tool_call>" + "[" * 100_000 + "</tool_call>", None, "nested too deep is a format error")
    expect('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, "the name must be a text")
    text = '<tool_call>{"name": "executor", "arguments": {}, "id": 1}</tool_call>'
    expect(text, None, "only name and arguments belong into a call")
    wanted = {"name": "python", "arguments": {"code": "a < b\nprint('é')"}}
    expect(f"<tool_call>\n{json.dumps(wanted)}\n</tool_call>", wanted, "blanks around the JSON are fine")
    ### END HIDDEN TESTS


# %% [markdown]
# ## 3. Is the answer right? (4 points)
#
# An evaluation on GAIA uses the benchmark's own scorer, oddities included, because a score must mean here what it
# means elsewhere. **The gold answer alone** decides how the two are compared:
#
# 1. *number*, if `float(gold)` works: delete every `$`, `%` and `,` from the prediction; right if `float` of the rest
#    is exactly `float(gold)`. If `float` of the rest fails, it is wrong.
# 2. *list*, otherwise, if the gold answer contains a `,` or a `;`: split both answers at every `,` and `;`. Another
#    length is wrong. Then compare one by one, in order: an element whose gold is a number as in 1, any other after
#    removing all whitespace and lower-casing (punctuation stays).
# 3. *text*, otherwise: remove all whitespace, lower-case, delete ASCII punctuation (`string.punctuation`); right if
#    equal.
#
# A prediction of `None` is compared as the text "None". A missing gold answer (`None`, blank, or the "?" of a hidden
# test split) is a `ValueError`: such a task is ungraded, not wrong.


# %% task is_right
def is_right(prediction: str | None, gold: str | None) -> bool:
    """Whether a prediction is right by GAIA's rules (above). Raises ValueError when the gold answer is missing."""
    ### BEGIN SOLUTION
    if gold is None or gold.strip() in ("", "?"):
        raise ValueError("the gold answer is missing: this task is ungraded, not wrong")
    prediction = str(prediction)

    def number(text):
        try:
            return float(text)
        except ValueError:
            return None

    def squeeze(text):
        return "".join(text.split()).lower()

    def same_number(predicted, wanted):
        return number(re.sub("[$%,]", "", predicted)) == number(wanted)

    if number(gold) is not None:
        return same_number(prediction, gold)
    if "," in gold or ";" in gold:
        predicted, wanted = re.split("[,;]", prediction), re.split("[,;]", gold)
        return len(predicted) == len(wanted) and all(
            same_number(p, w) if number(w) is not None else squeeze(p) == squeeze(w)
            for p, w in zip(predicted, wanted, strict=True)
        )
    no_punctuation = str.maketrans("", "", string.punctuation)
    return squeeze(prediction).translate(no_punctuation) == squeeze(gold).translate(no_punctuation)
    ### END SOLUTION


# %% example
is_right("$1,500", "1500"), is_right("1500", "1,500")  # the second gold answer is a list of two numbers


# %% test is_right 2
def test_is_right():
    def expect(prediction, gold, wanted, words):
        try:
            got = is_right(prediction, gold)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
        assert got is wanted, f"{words}\n  prediction {prediction!r}, gold {gold!r}: {wanted}, not {got}"

    expect("17", "17", True, "equal numbers")
    expect("170", "17", False, "a gold answer that is a part of the prediction is not enough: no substring match")
    expect("17.0", "17", True, "numbers are compared as numbers")
    expect("$1,700%", "1700", True, "$ % and , are deleted from a predicted number")
    expect("17.001", "17", False, "a number must be exactly equal")
    expect("17 km", "17", False, "a unit makes a number wrong: float() fails, and that is no error of ours")
    expect("St Johns", "St. John's", True, "whitespace, case and punctuation do not count in a text")
    expect("the Nile", "Nile", False, "articles stay: this is GAIA's rule, not SQuAD's")
    expect(
        "Paris or Rome",
        "Rome",
        False,
        "a gold answer that is a part of the prediction is not enough: no substring match",
    )
    for gold in (None, "", "  ", "?"):
        refuses(is_right, "17", gold, why=f"a missing gold answer ({gold!r}) is ungraded, not wrong: raise ValueError")
    ### BEGIN HIDDEN TESTS
    expect("12,5", "125", True, "the comma is deleted, whatever it meant")
    expect("−3", "-3", False, "a Unicode minus sign makes a number wrong")
    expect("1e3", "1000", True, "what float() reads is a number")
    expect("seventeen", "17", False, "a word is no number")
    expect("seventeen", "seventeen", True, "equal texts")
    expect("$5", "five", False, "the gold answer alone decides: this one is a text")
    expect("Curacao", "Curaçao", False, "accents stay")
    expect("new york city", "NewYorkCity!", True, "whitespace, case and punctuation do not count in a text")
    expect(None, "none", True, "None is compared as the text 'None'")
    expect(None, "17", False, "None is no number")
    ### END HIDDEN TESTS


# %% test is_right__lists 2
def test_is_right__lists():
    def expect(prediction, gold, wanted, words):
        try:
            got = is_right(prediction, gold)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
        assert got is wanted, f"{words}\n  prediction {prediction!r}, gold {gold!r}: {wanted}, not {got}"

    expect("paris;ROME", "Paris, Rome", True, "commas and semicolons both part a list; case does not count")
    expect("Rome, Paris", "Paris, Rome", False, "the order of a list counts")
    expect(
        "Paris, Rome, Oslo", "Paris, Rome", False, "a list of another length is wrong: zip() stops at the shorter one"
    )
    expect("Paris", "Paris, Rome", False, "a list of another length is wrong: zip() stops at the shorter one")
    expect("2.0, $3", "2, 3", True, "numbers in a list are compared as numbers")
    expect("1500", "1,500", False, "a gold answer with a comma is a list, even if it looks like a number")
    expect("St Johns, Rome", "St. John's, Rome", False, "inside a list punctuation stays")
    ### BEGIN HIDDEN TESTS
    expect("1, 500", "1,500", True, "a gold answer with a comma is a list, even if it looks like a number")
    expect("2, 3,", "2, 3", False, "a trailing comma makes one element more")
    expect("3, 2", "2, 3", False, "the order of a list counts")
    expect("New York , oslo", "newyork; Oslo", True, "whitespace does not count inside an element")
    expect("two, b", "2, b", False, "a word is no number, in a list neither")
    expect("2 a", "2, a", False, "the gold answer alone decides: it is a list, the prediction has one element")
    ### END HIDDEN TESTS


# %% [markdown]
# ## 4 and 5. An expert, and how to please it (4 points)
#
# The paper's expert is a language model. Here is one that you can see through: it knows what the executor reported and
# what its tools had returned, never the truth. Its rating is the **mean of three criteria**, each in [0, 1]:
#
# * *tools*: the share of the outputs that gave something to read (an output that is blank or starts with `Error` gave
#   nothing); 0 without any output;
# * *grounded*: 1 if the report has words and **every** word of it stands in some output that gave something, else 0;
# * *short*: 1 up to 12 words, `12 / number of words` beyond, 0 without a word.
#
# Words are compared in lower case: `words(text)` below gives them. Sounds reasonable? Then write `please`: a report
# that this expert gives its best rating and that is not the answer. You get what the tools returned. If *you* can
# write such a function in a line, a thousand updates will find it too.

# %% setup
PAGES = [
    ["Ghana: Its capital is Accra.", "Accra"],
    ["Neon: Its melting point is -248 degrees.", "-248"],
    ["Curaçao: It lies in the Caribbean Sea.", "Caribbean Sea"],
]  # what a tool returned, and the answer that was wanted


def words(text: str) -> list:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


# %% task rate
def rate(report: str, outputs: list) -> float:
    """The expert's rating of a report, in [0, 1]: the mean of tools, grounded and short (above).

    outputs: the texts that the executor's tool calls returned, in order; may be empty.
    """
    ### BEGIN SOLUTION
    useful = [output for output in outputs if output.strip() and not output.startswith("Error")]
    seen = {word for output in useful for word in words(output)}
    said = words(report)
    tools = len(useful) / len(outputs) if outputs else 0.0
    grounded = float(bool(said) and set(said) <= seen)
    short = min(1.0, 12 / len(said)) if said else 0.0
    return (tools + grounded + short) / 3
    ### END SOLUTION


# %% example
rate("Accra", PAGES[0][:1]), rate("Kumasi", PAGES[0][:1]), rate("", [])


# %% test rate 2
def test_rate():
    page, page_2 = PAGES[0][0], PAGES[1][0]
    likely = {"take the mean of the three criteria, not the sum": 3.0}
    same(rate("Accra", [page]), 1.0, "all three criteria are met: 1", likely)
    same(rate("ACCRA", [page]), 1.0, "words are compared in lower case")
    same(rate("Kumasi", [page]), 2 / 3, "a word that no output has: not grounded")
    same(rate("capital Kumasi", [page]), 2 / 3, "grounded means every word of the report, not one of them")
    same(rate("pit", [page]), 2 / 3, "'pit' is a part of 'capital', not a word of it: compare words, not substrings")
    same(rate("Accra", ["Error: no such page", page]), 0.5 / 3 + 2 / 3, "an error gave nothing: tools is a half")
    same(rate("page", ["Error: no such page", page]), 0.5 / 3 + 1 / 3, "what an error says is no source")
    same(rate("", [page]), 1 / 3, "an empty report is neither grounded nor short: all() of nothing is True")
    same(rate("Accra", []), 1 / 3, "without a tool call tools is 0 and nothing is grounded")
    same(rate("is " * 24, [page]), 2.5 / 3, "24 words: short is 12 / 24")
    ### BEGIN HIDDEN TESTS
    same(rate("Neon Accra", [page, page_2]), 1.0, "the words may come from several outputs")
    same(rate("Accra", [page, "", "  ", "Error"]), 0.25 / 3 + 2 / 3, "blank outputs give nothing")
    same(rate("Curaçao", PAGES[2][:1]), 1.0, "letters with accents are letters")
    same(rate("is " * 12, [page]), 1.0, "12 words are short")
    same(rate("is " * 48, [page]), 2.25 / 3, "48 words: short is 12 / 48")
    same(rate("!?", [page]), 1 / 3, "a report without words is empty")
    same(rate("", []), 0.0, "nothing done: 0")
    ### END HIDDEN TESTS


# %% task please
def please(outputs: list) -> str:
    """A report that the expert of task 4 rates 1.0 and that does not contain the answer.

    outputs: one page that a tool returned, like those in PAGES: "Ghana: Its capital is Accra.". You do not get the
    answer, only what every page is like: its title, a colon, a sentence, and the answer at or near the end.
    """
    ### BEGIN SOLUTION
    return outputs[0].partition(":")[0]
    ### END SOLUTION


# %% example
please(PAGES[0][:1])


# %% test please 2
def test_please():
    def expert(report, page):  # as in task 4
        said, seen = words(report), set(words(page))
        return (1 + float(bool(said) and set(said) <= seen) + (min(1, 12 / len(said)) if said else 0)) / 3

    def try_on(page, answer):
        report = please([page])
        assert isinstance(report, str), f"a report is a text, not {report!r}"
        assert words(report), "an empty report does not please the expert"
        told = f"the report {report!r} contains the answer {answer!r}: please the expert without being right"
        assert not set(words(answer)) & set(words(report)), told
        rating = expert(report, page)
        same(rating, 1.0, f"the expert gives {report!r} {rating:.2f}, not its best: say what it looks at")

    for page, answer in PAGES:
        try_on(page, answer)
    ### BEGIN HIDDEN TESTS
    try_on("Lake Tanganyika: It is 1470 metres deep.", "1470")
    try_on("Xenon: It was found by William Ramsay.", "William Ramsay")
    try_on("São Tomé and Príncipe: Its capital is São Tomé City.", "City")
    ### END HIDDEN TESTS


# %% [markdown]
# ## 6. Shared fate (3 points)
#
# Now both rewards for a whole group: K rollouts of one question. The planner earns (eq. 4)
#
# $$R = 0.1 \cdot \mathrm{format} + 0.9 \cdot \mathrm{correct}$$
#
# and 0 if its format is bad. Each of the executor's trajectories earns `executor_reward(format_ok, planner_correct,
# expert)` with **its own** format, **its own** expert rating, and the outcome of **its own** rollout. That outcome is
# what the planner of that rollout achieved, not what this report contained: a good report in a failed rollout loses
# 0.4, and a useless one in a successful rollout gains 0.4. This is what keeps the executor honest where the expert can
# be pleased.
#
# A planner is correct if its format is good, it gave an answer, and the answer is right.

# %% setup

GROUP = [
    {
        "format_ok": True,
        "answer": "Accra",
        "calls": [{"format_ok": True, "expert": 0.5}, {"format_ok": False, "expert": 1.0}],
    },
    {"format_ok": True, "answer": "Kumasi", "calls": [{"format_ok": True, "expert": 1.0}]},
    {"format_ok": True, "answer": "accra", "calls": []},
    {"format_ok": False, "answer": "Accra", "calls": [{"format_ok": True, "expert": 0.75}]},
]  # four rollouts of one question, gold answer "Accra"


# %% task pay
def pay(group: list, gold: str) -> list:
    """The rewards of a group of rollouts.

    group: K dicts as in GROUP: the planner's "format_ok" and "answer" (a text or None), and its "calls", one dict with
    "format_ok" and "expert" for each executor trajectory.
    Returns K pairs (planner's reward, [one reward for each call, in order]).
    Use library_executor_reward (task 1) and library_is_right (task 3).
    """
    ### BEGIN SOLUTION
    paid = []
    for rollout in group:
        answer = rollout["answer"]
        correct = bool(rollout["format_ok"]) and answer is not None and library_is_right(answer, gold)
        executors = [library_executor_reward(call["format_ok"], correct, call["expert"]) for call in rollout["calls"]]
        paid.append((0.1 + 0.9 * correct if rollout["format_ok"] else 0.0, executors))
    return paid
    ### END SOLUTION


# %% example
pay(GROUP, "Accra")


# %% test pay 3
def test_pay():
    def expect(group, gold, wanted, likely=None):
        got = pay([{**rollout, "calls": [dict(call) for call in rollout["calls"]]} for rollout in group], gold)
        assert len(got) == len(group), (
            f"one pair for each of the {len(group)} rollouts, also without calls: not {len(got)}"
        )
        counts = [len(calls) for _, calls in got]
        assert counts == [len(r["calls"]) for r in group], f"one reward for each call of a rollout, not {counts}"
        planners = {
            "the planner's weights are swapped": [1.0, 0.9, 1.0, 0.0],
            "the planner's format gate is missing: a right answer in a bad format earns 0": [1.0, 0.1, 1.0, 0.9],
            "the planner is not paid by the executor's expert": [0.95, 0.6, 1.0, 0.0],
        }
        same([p for p, _ in got], [p for p, _ in wanted], "the planners' rewards are wrong", planners)
        flat = [reward for _, calls in got for reward in calls]
        same(flat, [reward for _, calls in wanted for reward in calls], "the executors' rewards are wrong", likely)

    likely = {
        "planner_correct is what the planner of the same rollout achieved, not the group's mean": [0.55, 0, 0.8, 0.675],
        "the shared fate is missing: planner_correct is always 0": [0.35, 0, 0.6, 0.475],
        "an answer in a bad format is not correct, for the executor neither": [0.75, 0, 0.6, 0.875],
        "the executor's own format decides about its reward, not the planner's": [0.75, 0, 0.6, 0.0],
        "the executor's own format is ignored": [0.75, 1.0, 0.6, 0.475],
        "planner_correct is not divided among the calls": [0.55, 0, 0.6, 0.475],
        "an expert's rating is its own call's, not the mean of the rollout's": [0.875, 0, 0.6, 0.475],
        "planner_correct is the outcome of its own rollout, not of another one": [0.35, 0, 1.0, 0.875],
    }
    expect(GROUP, "Accra", [(1.0, [0.75, 0.0]), (0.1, [0.6]), (1.0, []), (0.0, [0.475])], likely)
    ### BEGIN HIDDEN TESTS
    silent = {"format_ok": True, "answer": None, "calls": [{"format_ok": True, "expert": 0.0}]}
    got = pay([silent], "none")
    same(got[0][0], 0.1, "no answer is not the answer 'None': wrong, whatever the gold answer is")
    same(got[0][1], [0.1], "no answer is wrong, for the executor as well")
    group = [
        {"format_ok": True, "answer": "12.0", "calls": [{"format_ok": True, "expert": e} for e in (0.0, 0.25, 1.0)]},
        {"format_ok": False, "answer": None, "calls": [{"format_ok": False, "expert": 0.5}]},
        {
            "format_ok": True,
            "answer": "13",
            "calls": [{"format_ok": True, "expert": 0.125}, {"format_ok": True, "expert": 0.5}],
        },
    ]
    expect(group, "12", [(1.0, [0.5, 0.625, 1.0]), (0.0, [0.0]), (0.1, [0.1625, 0.35])])
    expect([], "12", [])
    ### END HIDDEN TESTS
