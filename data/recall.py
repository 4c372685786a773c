"""The default task: look up three of sixteen name=value pairs that stand among filler, and add the values.

    prompt     pairs the c3 of k0 m1 and ... ? c m k =      54 tokens, a pair is one token
    solution   c 3 3 m 1 4 k 0 4 # 4                        name, value, running sum; then the answer (and EOS)

The prompt is mostly noise, so a good eviction policy can drop most of its keys; but what it must keep depends on the
question, and each step of the chain of thought needs another pair. A sampler that lost a pair has to guess.
"""

import random
import zlib

from data import Problem, WordTokenizer

NAMES = [chr(ord("a") + i) for i in range(20)]
VALUES = 4  # 0..3
PAIRS, FILLERS, ASKED = 16, 32, 3
FILLER = ["and", "as", "at", "but", "by", "for", "from", "in", "of", "on", "or", "so", "that", "the", "to", "with"]

tokenizer = WordTokenizer(
    "recall",
    [f"{n}{v}" for n in NAMES for v in range(VALUES)]
    + NAMES
    + FILLER
    + [str(i) for i in range(ASKED * (VALUES - 1) + 1)]
    + ["pairs", "?", "=", "#"],
)
max_prompt = 1 + PAIRS + FILLERS + 1 + ASKED + 1
max_response = 3 * ASKED + 2 + 1


def ask(rng: random.Random, split: str, names: list[str], pairs: int, fillers: int) -> tuple[str, dict[str, int]]:
    """A random prompt of the split, and the value of each name it asks for, in order.

    One prompt in 16, chosen by a checksum of its text, belongs to "eval".
    """
    while True:
        values = {name: rng.randrange(VALUES) for name in rng.sample(names, pairs)}
        words = [f"{n}{v}" for n, v in values.items()] + rng.choices(FILLER, k=fillers)
        rng.shuffle(words)
        asked = rng.sample(list(values), ASKED)
        prompt = "".join(f" {w}" for w in ["pairs", *words, "?", *asked, "="])
        if (zlib.crc32(prompt.encode()) % 16 == 0) == (split == "eval"):
            return prompt, {name: values[name] for name in asked}


def make_problem(rng: random.Random, split: str, fillers: int | None = None) -> Problem:
    """A random problem of the split, "train" or "eval"."""
    prompt, asked = ask(rng, split, NAMES, PAIRS, FILLERS if fillers is None else fillers)
    total, solution = 0, ""
    for name, value in asked.items():
        total += value
        solution += f" {name} {value} {total}"
    return Problem(prompt, f"{solution} # {total}", str(total))


def reward(problem: Problem, response: str) -> float:
    """1 if the response ends in "# answer", else 0; the chain of thought before it is not judged."""
    return float(response.split()[-2:] == ["#", problem.answer])
