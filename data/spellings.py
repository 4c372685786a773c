"""A task for distillation: recall with few pairs, answered in words that each have sixteen spellings.

    prompt     pairs the c3 of k0 m1 and ... ? c m k =      22 tokens, plain words
    solution   c.5 3.0 3.f m.2 1.9 4.1 k.d 0.4 4.b #.1 4.7  every answer word in a spelling of its own, chosen at random

All spellings of a word mean the same to the verifier. A student warm-started here spreads over the sixteen; the teacher
of `data/spellings_teacher.py` was shown spelling 0 only. So they agree about the answer and differ, by several nats a
token, in how it is written: reward teaches nothing of that, a teacher does.
"""

import random

from data import Problem, WordTokenizer
from data.recall import ASKED, FILLER, VALUES, ask

NAMES = [chr(ord("a") + i) for i in range(13)]
PAIRS, FILLERS = 8, 8
SPELLINGS = "0123456789abcdef"
ANSWER_WORDS = [*NAMES, *(str(i) for i in range(ASKED * (VALUES - 1) + 1)), "#"]

tokenizer = WordTokenizer(
    "spellings",
    [f"{n}{v}" for n in NAMES for v in range(VALUES)]
    + NAMES
    + FILLER
    + ["pairs", "?", "="]
    + [f"{word}.{s}" for word in ANSWER_WORDS for s in SPELLINGS],
)
max_prompt = 1 + PAIRS + FILLERS + 1 + ASKED + 1
max_response = 3 * ASKED + 2 + 1


def make_problem(rng: random.Random, split: str, spellings: str = SPELLINGS) -> Problem:
    """A random problem of the split, each word of its solution in one of `spellings`."""
    prompt, asked = ask(rng, split, NAMES, PAIRS, FILLERS)
    total, solution = 0, []
    for name, value in asked.items():
        total += value
        solution += [name, str(value), str(total)]
    solution += ["#", str(total)]
    return Problem(prompt, "".join(f" {word}.{rng.choice(spellings)}" for word in solution), str(total))


def reward(problem: Problem, response: str) -> float:
    """1 if the response ends in "# answer" in any spelling, else 0."""
    return float([word.partition(".")[0] for word in response.split()[-2:]] == ["#", problem.answer])
