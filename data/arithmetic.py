"""Sums of two digits from 1 to 9, 81 in all, which a small pretrained model sometimes gets right.

The last number of the response counts.

prompt     What is 4 + 7? Answer with the number only.
solution   11
"""

import random
import zlib

from data import Problem
from data.gsm8k import final_number

TERMS, LARGEST = 2, 9


def make_problem(rng: random.Random, split: str) -> Problem:
    """A random sum; one prompt in 16 belongs to "eval"."""
    while True:
        terms = [rng.randint(1, LARGEST) for _ in range(TERMS)]
        prompt = f"What is {' + '.join(map(str, terms))}? Answer with the number only."
        if (zlib.crc32(prompt.encode()) % 16 == 0) == (split == "eval"):
            return Problem(prompt, str(sum(terms)), str(sum(terms)))


def reward(problem: Problem, response: str) -> float:
    """1 if the last number of the response is the sum, else 0."""
    return float(final_number(response) == int(problem.answer))
