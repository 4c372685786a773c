"""Countdown: make a target from three or four numbers with + - * / and parentheses, for a pretrained model.

    prompt     Use the numbers 4, 25, 7 with + - * / and parentheses to make 72. ...
    solution   <answer>(25 - 7) * 4</answer>

The last <answer>...</answer> of the response counts, and it must be an expression: every given number exactly once, no
other number, no sign, exact rational division. The verifier has its own parser, without recursion.
"""

import random
import re
import zlib
from fractions import Fraction

from data import Problem

LONGEST = 200  # characters of an expression; four numbers need about 20
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    """Raises ZeroDivisionError."""
    return {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[operator](b)


def evaluate(expression: str, numbers: list[int]) -> Fraction | None:
    """The value of an expression that uses each of `numbers` exactly once; None if it is not one, or divides by 0.

    Two stacks (Dijkstra's shunting yard): an operator waits until one that binds no tighter, or a parenthesis, follows.
    """
    if len(expression) > LONGEST or re.search(r"[^0-9+\-*/()\s]", expression):
        return None
    tokens = re.findall(r"[0-9]+|[^\s0-9]", expression)
    if sorted(t for t in tokens if t.isdigit()) != sorted(map(str, numbers)):  # so 007 is not 7, and no value explodes
        return None
    values: list[Fraction] = []
    waiting: list[str] = []

    def run(least: int) -> None:
        while waiting and PRECEDENCE.get(waiting[-1], 0) >= least:
            b, a = values.pop(), values.pop()
            values.append(apply(waiting.pop(), a, b))

    after_value = False  # what may follow: an operator or ")" after a value, a number or "(" elsewhere
    try:
        for token in tokens:
            if after_value != (token in PRECEDENCE or token == ")"):
                return None
            if token.isdigit():
                values.append(Fraction(token))
            elif token == "(":
                waiting.append(token)
            elif token == ")":
                run(1)
                if not waiting:
                    return None
                waiting.pop()
            else:
                run(PRECEDENCE[token])
                waiting.append(token)
            after_value = token.isdigit() or token == ")"
        if not after_value or "(" in waiting:
            return None
        run(1)
    except ZeroDivisionError:
        return None
    return values[0]


def make_problem(rng: random.Random, split: str) -> Problem:
    """Random numbers of 1..50 and an integer target of 10..100 that they make; one prompt in 16 belongs to "eval"."""
    while True:
        numbers = [rng.randint(1, 50) for _ in range(rng.choice((3, 4)))]
        terms = [(Fraction(n), str(n)) for n in numbers]
        while len(terms) > 1:
            (a, left), (b, right) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            operator = rng.choice("+-*/" if b else "+-*")
            terms.append((apply(operator, a, b), f"({left} {operator} {right})"))
        [(target, expression)] = terms
        if target.denominator > 1 or not 10 <= target <= 100 or target in numbers:
            continue
        prompt = (
            f"Use the numbers {', '.join(map(str, numbers))} with + - * / and parentheses to make {target}. Use every "
            "number exactly once. Think step by step, then write the expression in <answer> </answer> tags, like "
            "<answer>(1 + 2) * 3</answer>."
        )
        if (zlib.crc32(prompt.encode()) % 16 == 0) == (split == "eval"):
            answer = f"{' '.join(map(str, numbers))} -> {target}"
            return Problem(prompt, f"<answer>{expression[1:-1]}</answer>", answer)


def value(problem: Problem, response: str) -> Fraction | None:
    """What the response's last answer makes of the problem's numbers; None if it is no such expression."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None
    numbers = problem.answer.split(" -> ")[0].split()
    return evaluate(response[start + len("<answer>") : end], [int(n) for n in numbers])


def reward(problem: Problem, response: str) -> float:
    """1 if the response's last answer is an expression of the problem's numbers with the target's value, else 0."""
    return float(value(problem, response) == int(problem.answer.split(" -> ")[1]))


def shaping(problem: Problem, response: str) -> float:
    """Partial credit: 1 for an expression of the right numbers, whatever its value."""
    return float(value(problem, response) is not None)
