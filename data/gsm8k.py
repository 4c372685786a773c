"""GSM8K (arXiv 2110.14168): grade-school word problems, for a pretrained model. The last number of the response counts.

The public files train.jsonl and test.jsonl (MIT licence) are read from the folder that the environment variable
NANOSMD_GSM8K names, by default data/gsm8k/, where this puts them:

    for f in train test; do curl -fL --create-dirs -o data/gsm8k/$f.jsonl \\
        https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/$f.jsonl; done
"""

import json
import os
import random
import re
from collections import deque
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from data import Problem

ASK = "\n\nThink step by step. The last line of your answer must be the final number alone."
# A sign is none after a digit or a word (10-5, x-5). Digits are ASCII, since int() reads all alphabets'.
NUMBER = re.compile(r"(?:(?<![\w).])-)?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def final_number(text: str) -> Fraction | None:
    """The last number of a text: 1,234 and $1,234.00 are 1234, and "72." ends a sentence. None if there is no number.

    A number of more than 30 characters counts as none.
    """
    last = deque(NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")), maxlen=1)
    if not last or len(last[0][0]) > 30:
        return None
    number = Fraction(last[0][1].replace(",", ""))
    return -number if last[0][0].startswith("-") else number


@lru_cache
def load(path: Path) -> list[Problem]:
    """The problems of a public file. Raises ValueError if it is missing, or names the line that is not a problem."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; the head of data/gsm8k.py has the command that fetches it")
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            item = json.loads(line)
            solution = re.sub(r"<<.*?>>", "", item["answer"])  # a calculator's notes
            steps, answer = solution.rsplit("####", 1)
            problems.append(
                Problem(item["question"].strip() + ASK, f"{steps.strip()}\n{answer.strip()}", answer.strip())
            )
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path}:{number}: not a problem {{"question": "...", "answer": "... #### 1"}}') from None
        if final_number(answer) is None:
            raise ValueError(f"{path}:{number}: {answer!r} is no number")
    if not problems:
        raise ValueError(f"{path}: the file is empty")
    return problems


def make_problem(rng: random.Random, split: str) -> Problem:
    """A random problem of the public split: train.jsonl for "train", test.jsonl for "eval"."""
    folder = Path(os.environ.get("NANOSMD_GSM8K") or Path(__file__).parent / "gsm8k")
    return rng.choice(load(folder / {"train": "train.jsonl", "eval": "test.jsonl"}[split]))


def reward(problem: Problem, response: str) -> float:
    """1 if the last number of the response is the answer, else 0."""
    return float(final_number(response) == final_number(problem.answer))
