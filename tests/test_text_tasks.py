"""The tasks in plain text: countdown, gsm8k, arithmetic, reasoning-gym. What is right is 1, and nothing else is."""

import importlib.util
import json
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Problem, arithmetic, countdown, gsm8k

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200)
COUNTDOWN = Problem("", "", "3 7 25 50 -> 128")
ITEMS = [
    ("Ann has 3 boxes of 24 pens. How many pens?", "She has 3*24=<<3*24=72>>72 pens.\n#### 72"),
    ("A car costs $1,000 more than 250 dollars.", "It costs 1000+250=<<1000+250=1250>>1,250.\n#### 1,250"),
    ("It was 4 degrees and fell by 9.", "4-9=<<4-9=-5>>-5\n#### -5"),
]
HOSTILE = [
    "", " ", "\x00", "9**9**9", "9^9^9", "9**9**9**9", "1/0", "(" * 1_000_000, "()" * 500_000, "7" * 1_000_000,
    "-" * 1_000_000, "1," * 500_000, "1.1." * 250_000, " " * 1_000_000, "<answer>" * 100_000, "</answer><answer>",
    "__import__('os')", "nan", "inf", "1e999", "٣", "²", "\ud800", "<answer>9**9**9</answer>", "<answer>1/0</answer>",
    "<answer>" + "(" * 1_000_000 + "</answer>", "<answer>" + "1+" * 500_000 + "1</answer>", "<answer></answer>",
]  # fmt: skip


@pytest.fixture
def gsm8k_folder(tmp_path, monkeypatch) -> Path:
    for name in ("train.jsonl", "test.jsonl"):
        lines = [json.dumps({"question": f"{name} {q}", "answer": a}) for q, a in ITEMS]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("NANOSMD_GSM8K", str(tmp_path))
    gsm8k.load.cache_clear()
    return tmp_path


@pytest.mark.parametrize("task", [countdown, gsm8k, arithmetic])
def test_solutions_are_right_and_splits_share_nothing(task, gsm8k_folder):
    rng, prompts = random.Random(0), {"train": set(), "eval": set()}
    for split, seen in prompts.items():
        for _ in range(200):
            problem = task.make_problem(rng, split)
            assert task.reward(problem, problem.solution) == 1
            assert task.reward(problem, "") == 0  # an answer that stands in the prompt alone does not count
            seen.add(problem.prompt)
    assert not prompts["train"] & prompts["eval"]
    assert task.make_problem(random.Random(3), "train") == task.make_problem(random.Random(3), "train")


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_responses_are_wrong_at_once(response, gsm8k_folder):
    start = time.perf_counter()
    for task in (countdown, gsm8k, arithmetic):
        assert task.reward(task.make_problem(random.Random(0), "train"), response) == 0
    assert countdown.shaping(COUNTDOWN, response) == 0
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 7 + 25 + 50", 85),
        ("50-25-7-3", 15),  # from left to right
        ("50 / 25 / 7 * 3", Fraction(6, 7)),
        ("3 + 7 * 25 - 50", 128),
        ("(50 - 25) * (7 - 3)", 100),
        ("((3+((7))*25)-50)", 128),
        ("50/(3 - 25/7)", Fraction(-350, 4)),
        ("3 + 7 + 25", None),  # each number once
        ("3 + 7 + 25 + 50 + 3", None),
        ("3 + 7 + 25 + 49", None),
        ("37 + 25 + 50", None),
        ("03 + 7 + 25 + 50", None),
        ("3 7 25 50", None),
        ("3 + 7 + 25 + 50 = 85", None),
        ("-3 + 7 + 25 + 50", None),
        ("3 + + 7 + 25 + 50", None),
        ("3 + 7 + 25 + 50 +", None),
        ("3 (7 + 25) + 50", None),
        ("(3 + 7 + 25 + 50", None),
        ("3 + 7 + 25 + 50)", None),
        ("3 ** 7 + 25 + 50", None),
        ("3 // 7 + 25 + 50", None),
        ("() 3 + 7 + 25 + 50", None),
        ("3.0 + 7 + 25 + 50", None),
        ("50 / (25 - 25) + 3 + 7", None),
    ],
)
def test_countdown_evaluates_what_uses_each_number_once(expression, value):
    assert countdown.evaluate(expression, [3, 7, 25, 50]) == value
    assert countdown.shaping(COUNTDOWN, f"<answer>{expression}</answer>") == (value is not None)
    assert countdown.reward(COUNTDOWN, f"<answer>{expression}</answer>") == (value == 128)


def test_countdown_division_by_zero_is_no_value():
    assert countdown.evaluate("3 / (7 - 7)", [3, 7, 7]) is None


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>3 + 7 * 25 - 50</answer>", 1),
        ("I try <answer>3</answer>, no: <answer>3 + 7 * 25 - 50</answer> it is.", 1),
        ("<answer>3 + 7 * 25 - 50</answer> or <answer>3</answer>", 0),  # the last counts
        ("3 + 7 * 25 - 50", 0),
        ("<answer>3 + 7 * 25 - 50", 0),
        ("<answer>128</answer>", 0),
    ],
)
def test_countdown_takes_the_last_answer(response, reward):
    assert countdown.reward(COUNTDOWN, response) == reward


@FUZZ
@given(st.text("0123456789 +-*/()", max_size=30))
def test_countdown_agrees_with_python_or_says_no(expression):
    """Where the parser gives a value, Python's own (on fractions) gives the same one."""
    numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in expression).split()]
    if (value := countdown.evaluate(expression, numbers)) is not None:
        tokens = "".join(f"Fraction({c})" if c.isdigit() else c for c in countdown.re.split(r"([0-9]+)", expression))
        assert eval(tokens.strip(), {"Fraction": Fraction}) == value


@FUZZ
@given(st.text(max_size=100))
def test_any_text_is_graded(text):
    assert countdown.reward(COUNTDOWN, f"<answer>{text}</answer>") == 0
    assert arithmetic.reward(Problem("", "", "12345678"), text) in (0, 1)
    gsm8k.final_number(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 72.", 72),
        ("72", 72),
        ("72.00", 72),
        ("$1,234.", 1234),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("she pays -$5", -5),
        ("\N{MINUS SIGN}5", -5),
        ("10-5", 5),
        ("10 - 5 = 5", 5),
        ("x-5", 5),
        ("1, 2, 3", 3),
        ("1,2,3", 3),
        ("1,23", 23),
        (".5", Fraction(1, 2)),
        ("**42**", 42),
        ("#### 42", 42),
        ("\\boxed{42}", 42),
        ("42 apples and nothing more", 42),
        ("none", None),
        ("", None),
        ("٣", None),
        ("9" * 31, None),
    ],
)
def test_the_final_number(text, number):
    assert gsm8k.final_number(text) == number


def test_gsm8k_reads_the_public_form(gsm8k_folder):
    problems = gsm8k.load(gsm8k_folder / "train.jsonl")
    assert [p.answer for p in problems] == ["72", "1,250", "-5"]
    assert problems[0].prompt.startswith("train.jsonl Ann has") and problems[0].solution == "She has 3*24=72 pens.\n72"
    assert gsm8k.reward(problems[1], "So the price is $1250.00.") == 1
    assert gsm8k.reward(problems[1], "So the price is 1,251.") == 0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "there is no such file; the head of data/gsm8k.py has the command"),
        ("", "the file is empty"),
        ("{", ":1: not a problem"),
        ('{"question": "?"}', ":1: not a problem"),
        ('{"question": "?", "answer": "no mark"}', ":1: not a problem"),
        ('{"question": "?", "answer": "#### many"}', ":1: ' many' is no number"),
    ],
)
def test_a_bad_file_is_named(gsm8k_folder, content, named):
    path = gsm8k_folder / "train.jsonl"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=named) as error:
        gsm8k.make_problem(random.Random(0), "train")
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "number_sorting"])
def test_reasoning_gym_counts_full_marks_only(name, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("REASONING_GYM", name)
    path = Path(__file__).parent.parent / "examples" / "reasoning_gym_task.py"
    spec = importlib.util.spec_from_file_location("reasoning_gym_task", path)
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    rng = random.Random(0)
    problems = [task.make_problem(rng, split) for split in ("train", "eval") for _ in range(3)]
    assert len({p.prompt for p in problems}) == 6
    for problem in problems:
        assert task.reward(problem, f"Well. {problem.solution}") == 1
        for response in ("", "<answer></answer>", "<answer>-1</answer>", problem.solution[8:-9], *HOSTILE):
            assert task.reward(problem, response) == 0
