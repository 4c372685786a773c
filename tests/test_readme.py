"""The README's code does what the README shows."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_picture_is_what_its_code_prints(capsys):
    code = re.search(r"```python\n(.+?)```", README, re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    shown = re.search(r"```\n(# \..+?)```", README, re.DOTALL)[1]
    assert capsys.readouterr().out.splitlines() == [re.match(r"[#. ]+[#.]", line)[0] for line in shown.splitlines()]
