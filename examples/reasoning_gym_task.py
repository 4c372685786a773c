"""Any of reasoning-gym's hundred procedural tasks behind this project's interface (pip install reasoning-gym).

    REASONING_GYM=number_sorting python train.py --task=examples.reasoning_gym_task --init_from=MODEL_FOLDER

Its verifiers give partial credit, even for an empty answer: only a score of exactly 1 counts here. An answer longer
than LONGEST, or with a power or factorial that a verifier might evaluate, is wrong.
"""

import os
import random
import re
import zlib
from functools import lru_cache

import reasoning_gym

from data import Problem

NAME = os.environ.get("REASONING_GYM", "chain_sum")
LONGEST = 500
ASK = "\n\nGive the final answer in <answer> </answer> tags."


@lru_cache(maxsize=4096)
def entry(seed: int):
    """The dataset of one item that this seed makes, and the item."""
    dataset = reasoning_gym.create_dataset(NAME, size=1, seed=seed)
    return dataset, dataset[0]


def make_problem(rng: random.Random, split: str) -> Problem:
    """A random item; one question in 16 belongs to "eval". Problem.answer is its seed, from which it is made again."""
    while True:
        seed = rng.getrandbits(31)
        item = entry(seed)[1]
        if (zlib.crc32(item["question"].encode()) % 16 == 0) == (split == "eval"):
            return Problem(item["question"] + ASK, f"<answer>{item['answer']}</answer>", str(seed))


def reward(problem: Problem, response: str) -> float:
    """1 if the verifier gives the response's last <answer> full marks, else 0."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    answer = response[start + len("<answer>") : end].strip()
    if start < 0 or len(answer) > LONGEST or re.search(r"\*\*|\^|!|factorial|pow", answer):
        return 0.0
    dataset, item = entry(int(problem.answer))
    try:
        return float(dataset.score_answer(answer, item) == 1.0)
    except Exception:  # a verifier may choke on an answer: then it is wrong
        return 0.0
