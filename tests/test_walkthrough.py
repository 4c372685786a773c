"""The notebook's code cells run from top to bottom, in a namespace and a process of their own; they assert things."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = """
import json, matplotlib
matplotlib.use("Agg")
space = {}
for cell in json.load(open("walkthrough.ipynb"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
"""


def test_the_notebook_is_kept_without_outputs_and_asserts_what_it_says():
    cells = json.loads((ROOT / "walkthrough.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 10 and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert all("assert" in "".join(cell["source"]) for cell in code[1:])  # each claim can fail; the first makes a model


@pytest.mark.slow
def test_the_notebook_runs():
    pytest.importorskip("matplotlib")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "largest gap to the sampler: full view" in done.stdout
