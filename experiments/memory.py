"""What four ways of keeping a budget cost in memory over a long generation, step by step.

    grow       no eviction: the cache grows by torch.cat, as a plain decoding loop does
    slice      evict by slicing: the survivors are copied out of the grown cache (SMD's warning: old and new at once)
    mask       full cache and a mask: smooth, exact, and frees nothing (the simulation in SMD's public code)
    overwrite  this project: a new key is written over the victim's slot

No model: random queries, keys and values go through one attention layer's cache, `LAYERS` times, with sinks and a
sliding window as the policy of all three that evict, so that the numbers are the caches' own.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from kv_compress import KVCache

LAYERS, ROWS, HEADS, KV_HEADS, HEAD_DIM, PROMPT = 4, 8, 8, 4, 64, 64
SINKS = 4
WAYS = ("grow", "slice", "mask", "overwrite")


class Grown:
    """Keys and values (B,nkv,T,hs) of one layer that grow by concatenation; keep() says which stay."""

    def __init__(self, way, budget):
        self.way, self.budget, self.k, self.v = way, budget, None, None

    def attend(self, q, k, v):
        self.k, self.v = (x if old is None else torch.cat((old, x), 2) for old, x in ((self.k, k), (self.v, v)))
        T, mask = self.k.shape[2], None
        if self.way == "slice" and self.budget < T:  # drop the oldest that is no sink
            keep = torch.cat((torch.arange(SINKS), torch.arange(T - self.budget + SINKS, T)))
            self.k, self.v = self.k[:, :, keep], self.v[:, :, keep]
        if self.way == "mask":
            at = torch.arange(T)
            mask = ((at < SINKS) | (at >= T - self.budget + SINKS))[None]  # (1, T)
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)

    @property
    def kv_bytes(self):
        return self.k.nbytes + self.v.nbytes


class Slots:
    """The project's cache behind the same two names."""

    def __init__(self, budget, tokens):
        config = SimpleNamespace(n_layer=LAYERS, n_head=HEADS, n_kv_head=KV_HEADS, head_dim=HEAD_DIM)
        how = {"kv_budget": budget, "policy": "streaming", "sinks": SINKS, "recent": 0}
        self.cache = KVCache(config, [PROMPT] * ROWS, 1, tokens, **how)

    @property
    def kv_bytes(self):
        return self.cache.kv_bytes


def peak_mb() -> float:
    """The most memory this process has had in RAM so far, in MB, where Linux says; else nan."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), float("nan"))


def generate(way: str, tokens: int, budget: int, every: int = 64) -> dict:
    """Decode `tokens` tokens a row; KV bytes and the process's peak memory (MB over its start) every so many."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads, T):
        return torch.randn(ROWS, heads, T, HEAD_DIM, generator=generator)

    start = peak_mb()
    slots = Slots(budget, tokens) if way == "overwrite" else None
    layers = [Grown(way, budget) for _ in range(LAYERS)]
    steps, kv, peak, total = [], [], [], 0.0
    for step in range(tokens + 1):
        T = 1 if step else PROMPT
        if slots:
            slots.cache.advance(T)
        for layer in range(LAYERS):
            q, k, v = draw(HEADS, T), draw(KV_HEADS, T), draw(KV_HEADS, T)
            y = slots.cache.attend(layer, q, k, v) if slots else layers[layer].attend(q, k, v)
            total += y[..., -1, :].double().sum().item()
        if step % every == 0:
            steps.append(step)
            kv.append((slots.kv_bytes if slots else sum(x.kv_bytes for x in layers)) / 2**20)
            peak.append(peak_mb() - start)
    return {"step": steps, "kv_mb": kv, "output_sum": total, "measured_once": {"peak_mb": peak}}


MODELS = {  # layers, kv heads, head size: from the models' config.json
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-4B, Qwen3-8B": (36, 8, 128),
    "Llama-3.1-8B": (32, 8, 128),
}


def gigabytes(model: str, rows: int, length: int) -> float:
    """GB (1e9) of K and V in bf16: 2 tensors x layers x kv heads x head size x 2 bytes x rows x length."""
    layers, heads, size = MODELS[model]
    return 2 * layers * heads * size * 2 * rows * length / 1e9
