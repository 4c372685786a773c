"""A fork with another task: write eight digits in order.

    python train.py --task=examples.sort

prompt     sort 3 1 4 1 5 9 2 6 =
solution   1 1 2 3 4 5 6 9
"""

import random
import zlib

from data import Problem, WordTokenizer

tokenizer = WordTokenizer("sort", [*"0123456789", "sort", "="])
max_prompt, max_response = 10, 9  # in tokens, EOS counted


def make_problem(rng: random.Random, split: str) -> Problem:
    """Eight random digits; one prompt in 16, chosen by a checksum of its text, belongs to "eval"."""
    while True:
        digits = rng.choices("0123456789", k=8)
        prompt = " ".join(["", "sort", *digits, "="])
        if (zlib.crc32(prompt.encode()) % 16 == 0) == (split == "eval"):
            answer = " ".join(["", *sorted(digits)])
            return Problem(prompt, answer, answer)


def reward(problem: Problem, response: str) -> float:
    return float(response == problem.answer)
