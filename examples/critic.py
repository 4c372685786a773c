"""A fork with another baseline for distillation: a learned critic, which vOPD's closed form makes unnecessary.

    python -m examples.critic config/vopd.toml --out_dir=out-critic

v(state) is the linear function of the student's last hidden state that fits r = log q - log pi best over the past
tokens, older ones fading. It is fitted before it sees the tokens it judges, so it depends on the state alone and leaves
the mean gradient as it is; but it has to be learned, is linear, and lags behind a student that moves.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from losses import token_logprobs

FADE, RIDGE = 0.9, 1.0  # what a chunk of tokens leaves of the older ones; what keeps the first fits small
seen = {"xx": 0.0, "xr": 0.0}  # sums over past tokens: x x' (C+1, C+1) and x r (C+1, 1)


def critic(student: Tensor, tutor: Tensor, targets: Tensor, states: Tensor, config: train.Config) -> Tensor:
    r = token_logprobs(tutor, targets, config.temperature) - token_logprobs(
        student, targets, config.temperature
    )  # (c,)
    x = F.pad(states.float(), (0, 1), value=1.0)  # (c, C + 1)
    xx, xr = seen["xx"] + RIDGE * torch.eye(x.shape[1]).to(x), seen["xr"] + torch.zeros_like(x[:1].mT)
    v = (x @ torch.linalg.solve(xx, xr)).squeeze(1)  # (c,)
    seen["xx"] = FADE * seen["xx"] + x.mT @ x
    seen["xr"] = FADE * seen["xr"] + x.mT @ r[:, None]
    return r - v


train.OPD["critic"] = critic

if __name__ == "__main__":
    train.main([*sys.argv[1:], "--opd=critic"])
