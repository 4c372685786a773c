"""The transformer: RoPE, RMSNorm, grouped-query attention, SwiGLU. One forward, three uses.

    logits = model(idx)                          learner, full view: causal attention
    logits = model(idx, evicted_at=evicted_at)   learner, masked: each query sees what the sampler saw
    logits = model(idx, cache=cache)             sampler: prompts first, then one token a call

How to read it: `GPT.forward` first. The three uses differ in one function, `attend`, that is handed to every layer.

Left out: dropout (RL turns it off), sharding, and a table of rotary angles (they are computed from the positions, in
float32 or better, whatever the dtype of the weights).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import dense_attention, shadow_attention


@dataclass
class GPTConfig:
    block_size: int = 128  # longest sequence, prompt and response together, in tokens
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_kv_head: int = 2  # query heads share the keys and values of a kv head (arXiv 2305.13245)
    n_embd: int = 64
    head_dim: int | None = None  # default n_embd / n_head; some models choose it freely
    ffn_dim: int | None = None  # SwiGLU width; default 8/3 n_embd, rounded up to a multiple of 32
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, float] | None = None  # Llama 3's, see rope_angles
    norm_eps: float = 1e-6
    qk_norm: bool = False  # RMSNorm on every head's queries and keys, before the rotation
    qkv_bias: bool = False
    tie_head: bool = True  # the output head is the embedding

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                raise ValueError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}, or give head_dim")
            self.head_dim = self.n_embd // self.n_head
        if self.head_dim % 2 or self.head_dim > 256:
            raise ValueError(f"head_dim={self.head_dim} must be even (RoPE rotates pairs) and at most 256")
        if self.ffn_dim is None:
            self.ffn_dim = 32 * math.ceil(8 * self.n_embd / 3 / 32)


def rope_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: tuple | None = None
) -> tuple[Tensor, Tensor]:
    """cos of position * theta^(-2i/hs), i < hs/2, twice, and -sin, sin: each (B,1,T,hs), positions (B,T).

    RoPE, arXiv 2104.09864, as `rotate` wants it.

    scaling (factor, low, high, length) is Llama 3's way to a longer context: pairs that turn fewer than `low` times
    in `length` tokens turn `factor` times slower, those that turn more than `high` times as before, others between.
    """
    dtype = torch.promote_types(dtype, torch.float32)  # bf16 holds integers exactly only up to 256
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim)  # (hs/2,)
    if scaling is not None:
        factor, low, high, length = scaling
        turns = length * frequency / (2 * math.pi)  # (hs/2,)
        frequency = torch.lerp(frequency / factor, frequency, ((turns - low) / (high - low)).clamp(0, 1))
    angles = positions[:, None, :, None].to(dtype) * frequency  # (B, 1, T, hs/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # (B, 1, T, hs) each


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + hs/2}) of x (B,h,T,hs) by their angles (the half-split convention of Llama, Qwen)."""
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)  # (B, h, T, hs)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight, arXiv 1910.07467; the weight follows x: bf16 heads keep the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        nh, nkv, hs, C = config.n_head, config.n_kv_head, config.head_dim, config.n_embd
        self.qkv = nn.Linear(C, (nh + 2 * nkv) * hs, bias=config.qkv_bias)
        self.out = nn.Linear(nh * hs, C, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(hs, config.norm_eps)
            self.k_norm = RMSNorm(hs, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable) -> Tensor:
        nh, nkv, hs = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        heads = self.qkv(x).unflatten(-1, (nh + 2 * nkv, hs)).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        qk, v = heads.split((nh + nkv, nkv), dim=1)
        if self.config.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, :nh]), self.k_norm(qk[:, nh:])), dim=1)
        # Rotated at birth: a cached key needs no position, so no order.
        q, k = rotate(qk, *rope).split((nh, nkv), dim=1)
        y = attend(q, k, v)  # (B, nh, T, hs)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, T, C)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), arXiv 2002.05202; gate and up are one matrix."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable) -> Tensor:
        x = x + self.attention(self.norm1(x), rope, attend)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None):
        """Weights from `generator`: N(0, 1/fan_in), those into the residual stream scaled by 1/sqrt(2L) once more."""
        super().__init__()
        self.config = config
        self.recompute = False  # True: keep only each block's input, run the block again in the backward pass
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:  # small models learn to copy several times sooner than from the usual constant 0.02
                into_residual = name.endswith(("out.weight", "down.weight"))
                std = p.shape[1] ** -0.5 / (math.sqrt(2 * config.n_layer) if into_residual else 1)
                nn.init.normal_(p, std=std, generator=generator)
        if config.tie_head:
            self.head.weight = self.embed.weight

    @classmethod
    def from_pretrained(cls, folder_or_hub_id, block_size: int | None = None) -> "GPT":
        """A Qwen3, Qwen2, Llama 3 or SmolLM2 model with float32 weights: data/pretrained.py says more."""
        from data import pretrained  # only whoever loads foreign weights needs the safetensors package

        folder = pretrained.find_folder(folder_or_hub_id)
        config = pretrained.read_config(folder, block_size)
        with torch.device("meta"):  # shapes only: no memory, no random numbers
            model = cls(config)
        model.load_state_dict(pretrained.read_weights(folder, model), assign=True)
        if config.tie_head:
            model.head.weight = model.embed.weight
        return model

    def save_pretrained(self, folder, source=None) -> None:
        """Write a folder that `from_pretrained` and transformers read; `source`: copy that folder's tokenizer too."""
        from data import pretrained

        pretrained.write(self, folder, source)

    def forward(self, idx: Tensor, evicted_at: Tensor | None = None, cache=None) -> Tensor:
        """Logits (B,T,V) of token ids idx (B,T): the head on `hidden`."""
        return self.head(self.hidden(idx, evicted_at, cache))

    def hidden(self, idx: Tensor, evicted_at: Tensor | None = None, cache=None) -> Tensor:
        """The normalised last hidden states (B,T,C) of token ids idx (B,T).

        evicted_at (L,B,nkv,T) int32: key j of row b, layer l, kv head h is seen by the queries i with
        j <= i < evicted_at[l,b,h,j]; None is the full view (SMD, arXiv 2605.06850).
        cache: a kv_compress.KVCache, fed with the prompts (N,P) once and then with one token a row (B,1); only each
        row's last token comes back, (N,1,C) or (B,1,C).
        Raises ValueError if T > block_size, or if both evicted_at and cache are given.
        """
        T = idx.shape[1]
        if cache is None and self.config.block_size < T:
            raise ValueError(f"{T} tokens in a row, but block_size={self.config.block_size}")
        if cache is not None and evicted_at is not None:
            raise ValueError("give evicted_at (learner) or cache (sampler), not both: a cache hides what it evicted")

        positions = torch.arange(T, device=idx.device)[None] if cache is None else cache.advance(T)  # (1|B, T)
        c = self.config
        rope = rope_angles(positions, c.head_dim, c.rope_theta, self.embed.weight.dtype, c.rope_scaling)
        x = self.embed(idx)  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            if cache is not None:
                attend = partial(cache.attend, layer)
            elif evicted_at is not None:
                attend = partial(shadow_attention, evicted_at=evicted_at[layer])
            else:
                attend = dense_attention
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, attend, use_reentrant=False)
            else:
                x = block(x, rope, attend)
        if cache is not None:
            x = cache.last(x)  # (B, 1, C)
        return self.norm(x)  # (B, T, C)
