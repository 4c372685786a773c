"""A fork with another eviction policy: TOVA (arXiv 2401.06104) drops what the newest query looks at least.

    python -m examples.tova                          the default job with it
    python -m examples.tova --kv_budget=24           evicting while it decodes, too

All heads of a layer decide together. A window of one query (recent=1) makes `window_attn` that of the newest.
"""

import sys

from torch import Tensor

import train
from kv_compress import LayerView, policy


@policy("window_attn")
def tova(c: LayerView) -> Tensor:
    return c.window_attn.mean(1, keepdim=True).expand_as(c.window_attn)  # (B, nkv, S)


if __name__ == "__main__":
    train.main(["--sinks=0", "--recent=1", *sys.argv[1:], "--policy=tova"])
