"""What several tests share: a tiny model whose attention matters, and the same transformer once more, in numpy."""

import numpy as np
import torch

from model import GPT, GPTConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = 2**31 - 1
HEADS = [(4, 4), (4, 1), (6, 2)]  # query heads, kv heads


def rng(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def tiny(seed=0, n_head=4, n_kv_head=2, dtype=torch.float32, **options) -> GPT:
    """A random model with weights so large that each key it loses shows in its logits; no bias 0, no norm weight 1."""
    sizes = dict(block_size=64, vocab_size=23, n_layer=2, n_embd=24) | options
    model = GPT(GPTConfig(n_head=n_head, n_kv_head=n_kv_head, **sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
            else:
                p.copy_(noise * (0.25 if "embed" in name or "head" in name else 1.2 * p.shape[1] ** -0.5))
    return model.to(DEVICE, dtype)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


class Reference:
    """The forward pass of a GPT's weights in float64 numpy, one row, from the formulas. RoPE turns complex numbers."""

    def __init__(self, model: GPT):
        self.config = model.config
        self.weights = {name: p.detach().double().cpu().numpy() for name, p in model.named_parameters()}
        self.weights.setdefault("head.weight", self.weights["embed.weight"])

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * self.weights[f"{name}.weight"]

    def rope(self, x, positions):
        """x (T,heads,hs): the pair (x_i, x_{i + hs/2}) is a complex number, turned by position * theta^(-2i/hs)."""
        half = x.shape[-1] // 2
        frequency = self.config.rope_theta ** (-2 * np.arange(half) / x.shape[-1])
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.asarray(positions)[:, None, None] * frequency)
        return np.concatenate([z.real, z.imag], -1)

    def qkv(self, layer, x, positions):
        """q (T,nh,hs), k, v (T,nkv,hs) of the residual stream x (T,C)."""
        at, c = f"blocks.{layer}.attention", self.config
        heads = self.norm(x, f"blocks.{layer}.norm1") @ self.weights[f"{at}.qkv.weight"].T
        heads = (heads + self.weights.get(f"{at}.qkv.bias", 0)).reshape(len(x), -1, c.head_dim)
        q, k, v = np.split(heads, [c.n_head, c.n_head + c.n_kv_head], axis=1)
        if c.qk_norm:
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        return self.rope(q, positions), self.rope(k, positions), v

    def residual(self, layer, x, y):
        """x after the rest of the block, given what attention returned: y (T,nh,hs)."""
        at = f"blocks.{layer}"
        x = x + y.reshape(len(x), -1) @ self.weights[f"{at}.attention.out.weight"].T
        gate, up = np.split(self.norm(x, f"{at}.norm2") @ self.weights[f"{at}.mlp.gate_up.weight"].T, 2, axis=-1)
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{at}.mlp.down.weight"].T

    def logits(self, x):
        return self.norm(x, "norm") @ self.weights["head.weight"].T

    def forward(self, tokens, seen=None):
        """Logits (T,V). seen (T,T) bool: may the query (row) see the key (column)? None is causal."""
        x, T, c = self.weights["embed.weight"][tokens], len(tokens), self.config
        seen = np.tri(T, dtype=bool) if seen is None else seen
        for layer in range(c.n_layer):
            q, k, v = self.qkv(layer, x, np.arange(T))
            k, v = (np.repeat(z, c.n_head // c.n_kv_head, axis=1) for z in (k, v))
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
            x = self.residual(layer, x, np.einsum("hij,jhd->ihd", softmax(np.where(seen, scores, -np.inf)), v))
        return self.logits(x)
