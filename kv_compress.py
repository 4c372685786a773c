"""The sampler's side of the blindfold: a KV cache of fixed size, eviction policies, the shadow recorder, rollout().

The one idea (Shadow Mask Distillation, arXiv 2605.06850, replays what the sampler saw): an evicted key never comes
back, so one integer per key is the whole mask,

    evicted_at[l, b, h, j] = position of the first query that no longer sees key j
    visible(i, j)          = j <= i < evicted_at[l, b, h, j]

The cache makes it physical. Each (layer, row, kv head) owns S slots, allocated once. Keys carry their rotation from
birth, so the order of slots means nothing and *evicting is overwriting*: the new key is written over the victim's slot
and the recorder notes one integer. Nothing is sliced, copied or grown.

How to read it: `rollout`, then `KVCache._decode` (one token), `_prefill` (the prompts), then the policies. At last
`SharedPrompts`, with which the learner reads the rollout again.

Left out: paging, prefix sharing between prompts, top-k and top-p sampling (the learner could not replay them exactly).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = 2**31 - 1  # evicted_at of a key that survives
COLDEST = 1e-3  # temperature above 0: below, logits divided by it could leave float32


# ---------------------------------------------------------------------------------------------------------------------
# Policies: which key is worth its slot? A policy scores the keys of one layer, higher stays.


@dataclass
class LayerView:
    """What a policy sees of one layer: B rows, nkv kv heads, S slots. What it did not ask for is None."""

    k: Tensor  # (B,nkv,S,hs) rotated keys
    pos: Tensor  # (B,nkv,S) int32 position of the key in each slot, -1 where the slot is free
    window_attn: Tensor | None = (
        None  # (B,nkv,S) attention of the last max(recent,1) queries, mean over them and the heads
    )
    total_attn: Tensor | None = None  # (B,nkv,S) attention of all queries so far, sum over them, mean over the heads
    noise: Tensor | None = None  # (B,nkv,S) one uniform number per key, drawn at its birth


POLICIES: dict[str, Callable[[LayerView], Tensor]] = {}


def policy(*needs: str):
    """Decorator: register a function LayerView -> scores (B,nkv,S) under its own name, with the statistics it needs."""

    def register(score: Callable[[LayerView], Tensor]):
        score.needs = set(needs)
        POLICIES[score.__name__] = score
        return score

    return register


@policy("window_attn")
def snapkv(c: LayerView) -> Tensor:
    """SnapKV (arXiv 2404.14469): what the latest queries look at."""
    return c.window_attn


@policy("total_attn")
def h2o(c: LayerView) -> Tensor:
    """Heavy hitters (H2O, arXiv 2306.14048): what all queries together looked at."""
    return c.total_attn


@policy()
def streaming(c: LayerView) -> Tensor:
    """Attention sinks and a sliding window (StreamingLLM, arXiv 2309.17453): the oldest goes."""
    return c.pos.float()


@policy("noise")
def random(c: LayerView) -> Tensor:
    """The control: any key may go."""
    return c.noise


@policy("window_attn")
def rkv(c: LayerView) -> Tensor:
    """R-KV (arXiv 2505.24133): 0.1 importance - 0.9 redundancy.

    Redundancy of key j is the softmax over the row's keys of its mean cosine similarity to the others,
    k^_j . (sum_i k^_i - k^_j) / (n - 1): linear time, since the sum is shared and k^_j . k^_j = 1.
    """
    filled = c.pos >= 0  # (B, nkv, S)
    n = filled.sum(-1, keepdim=True)  # (B, nkv, 1)
    inverse_norm = filled / torch.linalg.vector_norm(c.k, dim=-1).clamp(min=1e-12)  # (B, nkv, S)
    total = inverse_norm.to(c.k.dtype)[:, :, None] @ c.k  # (B, nkv, 1, hs) sum of unit keys
    cosine = ((c.k @ total.mT).squeeze(-1) * inverse_norm - 1) / (n - 1).clamp(min=1)  # (B, nkv, S)
    return 0.1 * c.window_attn - 0.9 * cosine.masked_fill(~filled, -torch.inf).softmax(-1)


def attention_received(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The attention that each key gets: sum over the queries, mean over the query heads of its kv head, (B,nkv,S).

    softmax(q k^T / sqrt(hs)) over the keys at positions 0 <= k_pos <= q_pos, in at least float32. q (B,nh,W,hs) at
    q_pos (B,W), k (B,nkv,S,hs) at k_pos (B,nkv,S); -1 means no query, no key.
    """
    (B, nh, W, hs), (nkv, S) = q.shape, k_pos.shape[1:]
    g = nh // nkv
    scores = (q * hs**-0.5).reshape(B, nkv, g * W, hs) @ k.mT  # (B, nkv, g*W, S): no key is repeated
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).view(B, nkv, g, W, S)
    hidden = (k_pos < 0)[:, :, None] | (k_pos[:, :, None] > q_pos[:, None, :, None])  # (B, nkv, W, S)
    probs = scores.masked_fill_(hidden[:, :, None], torch.finfo(scores.dtype).min).softmax(-1).flatten(2, 3)
    share = (q_pos >= 0).to(probs.dtype).repeat(1, g) / g  # (B, g*W)
    return (share[:, None, None] @ probs).squeeze(2)


# ---------------------------------------------------------------------------------------------------------------------
# The cache


def check_options(
    kv_budget: int = 0,
    prompt_budget: int | float = 0,
    policy: str = "snapkv",
    sinks: int = 4,
    recent: int = 8,
    pool: int = 5,
    interval: int = 4,
) -> None:
    """Raise ValueError, naming the value and what is allowed, unless a KVCache can be built with these options."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
    for name, value, least in (
        ("sinks", sinks, 0),
        ("recent", recent, 0),
        ("pool", pool, 1),
        ("interval", interval, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    if pool % 2 == 0:
        raise ValueError(f"pool={pool}: must be odd, so that a key sits in the middle of its neighbours")
    floor = sinks + recent + 1  # the protected keys and one that may go
    rule = f"must be 0 (no limit) or at least sinks + recent + 1 = {floor}"
    if kv_budget != 0 and kv_budget < floor:
        raise ValueError(f"kv_budget={kv_budget}: {rule}")
    if isinstance(prompt_budget, float):
        if not 0 <= prompt_budget <= 1:
            raise ValueError(f"prompt_budget={prompt_budget}: a fraction must be in (0, 1], or 0 for no limit")
    elif prompt_budget != 0 and prompt_budget < floor:
        raise ValueError(f"prompt_budget={prompt_budget}: a number of keys {rule}; or give a fraction such as 0.25")
    if kv_budget and interval > kv_budget - sinks:
        raise ValueError(
            f"interval={interval}: must be at most kv_budget - sinks = {kv_budget - sinks}, "
            "or a cache could turn over between two refreshes of its scores"
        )


class KVCache:
    """K and V of B = N*G rows in S slots per (layer, row, kv head), and the record of what was evicted when.

    config: n_layer, n_head, n_kv_head, head_dim. prompt_lens: N prompt lengths; row b = n*G + g belongs to prompt n.
    kv_budget: S at most, prompt and response together (0: as many as needed). prompt_budget: prompt keys that survive
    the prefill, an int or a float fraction of each prompt (0: all that fit). Positions < sinks and the `recent` newest
    keys are never evicted. pool: neighbours (odd) over which the prompt's window attention is averaged. interval:
    tokens between two refreshes of the policy's scores. dtype: of K and V. generator: for the noise of `random`.

    Feed it through `GPT.forward(idx, cache=cache)`: the right-padded prompts (N,P) once, then (B,1) tokens.
    `evicted_at` (L,B,nkv,T) int32 is the record; set `active` (B,) bool to stop recording finished rows.

    The slots fill from the left: a prompt's keys, at most `max_keep`; behind those of the longest prompt a column a
    token, the same for all rows; then what shorter prompts left free; only then a victim's slot is taken.
    """

    def __init__(
        self,
        config,
        prompt_lens: list[int],
        group_size: int,
        max_new_tokens: int,
        *,
        kv_budget: int = 0,
        prompt_budget: int | float = 0,
        policy: str = "snapkv",
        sinks: int = 4,
        recent: int = 8,
        pool: int = 5,
        interval: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ):
        check_options(kv_budget, prompt_budget, policy, sinks, recent, pool, interval)
        self.score_fn = POLICIES[policy]
        self.sinks, self.recent, self.pool, self.interval, self.generator = sinks, recent, pool, interval, generator

        def survivors(P: int) -> int:
            """How many keys of a P-token prompt are kept after its prefill."""
            keep = prompt_budget if isinstance(prompt_budget, int) else max(sinks + recent + 1, int(prompt_budget * P))
            return min(P, keep if prompt_budget else P, kv_budget if kv_budget else P)

        N, self.G, P = len(prompt_lens), group_size, max(prompt_lens)
        L, B, nh, nkv, hs = config.n_layer, N * group_size, config.n_head, config.n_kv_head, config.head_dim
        keep = [survivors(p) for p in prompt_lens]
        needed = max(keep) + max_new_tokens
        self.S = S = min(kv_budget, needed) if kv_budget else needed
        self.compress_prompt = keep != prompt_lens
        self.evicts = needed - 1 > S  # the last token is never fed
        # Lengths are known on the host, so the decode loop never has to ask the device how full a row is.
        self.min_keep, self.max_keep = min(keep), max(keep)
        self.longest, self.max_new_tokens = P, max_new_tokens
        self.step = -2  # -1: the prompts are being fed, i: the i-th response token is
        # Of each prompt: its length, and how many of its keys survive; then the same of each row.
        self.lens, self.keeps = torch.tensor(prompt_lens, device=device), torch.tensor(keep, device=device)  # (N,)
        self.prompt_len, self.keep = (x.repeat_interleave(group_size) for x in (self.lens, self.keeps))  # (B,)

        stats_dtype = torch.promote_types(dtype, torch.float32)

        def allocate(*shape: int, fill=0.0, dtype=stats_dtype) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.k = allocate(L, B, nkv, S, hs, dtype=dtype)  # zeros: a free slot is masked, but 0 * NaN would be NaN
        self.v = allocate(L, B, nkv, S, hs, dtype=dtype)
        self.filled = torch.arange(S, device=device) < self.keep[:, None]  # (B, S)
        record = allocate(L, B, nkv, P + max_new_tokens + 1, fill=NEVER, dtype=torch.int32)
        self.record, self.evicted_at = record, record[..., :-1]  # the last column is for victims that are none
        self.active = allocate(B, fill=True, dtype=torch.bool)
        self.rows = torch.arange(B, device=device)  # (B,) which row of the rollout each row of the cache is
        self.heads = torch.arange(nkv, device=device)[None]  # (1, nkv)
        # What only the choice of victims needs: of every slot, and the last W queries (query i stands at (i - P) % W).
        needs, self.W = self.score_fn.needs if self.evicts else (), max(recent, 1)
        self.pos = allocate(L, B, nkv, S, fill=-1, dtype=torch.int32) if self.evicts else None
        self.scores = allocate(L, B, nkv, S) if self.evicts else None
        self.total_attn = allocate(L, B, nkv, S) if "total_attn" in needs else None
        self.noise = allocate(L, B, nkv, S) if "noise" in needs else None
        self.ring = allocate(L, B, nh, self.W, hs, dtype=dtype) if "window_attn" in needs else None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V storage, all layers and rows."""
        return self.k.untyped_storage().nbytes() + self.v.untyped_storage().nbytes()

    @property
    def policy_bytes(self) -> int:
        """Bytes that eviction costs beside K and V: slot positions, scores and the policy's statistics."""
        kept = (self.pos, self.scores, self.total_attn, self.noise, self.ring)
        return sum(t.untyped_storage().nbytes() for t in kept if t is not None)

    def advance(self, T: int) -> Tensor:
        """Start the next forward of T tokens a row; returns their positions: (1,P) for the prompts, then (B,1)."""
        self.step += 1
        P, new = self.longest, self.max_new_tokens
        if (P if self.step == -1 else 1) != T or self.step >= new:
            raise ValueError(
                f"{T} tokens a row in call {self.step + 2}: a cache takes {P} once, then 1 up to {new} times"
            )
        if self.step == -1:
            return torch.arange(T, device=self.k.device)[None]
        self.t = self.prompt_len + self.step  # (B,) position of the token being fed
        self.now = self.t.int()[:, None]  # (B, 1) the same, as it is recorded
        self.late = self.step - (self.S - self.max_keep)  # tokens since the columns behind the longest prompt ran out
        self.column = self.max_keep + self.step if self.late < 0 else None
        if self.late < 0:
            self.filled[:, self.column] = True
        else:
            self.free = self.keep + self.late  # (B,) the slot to fill, if it is one that the row's prompt left free
            self.full = self.free >= self.max_keep  # (B,)
            self.filled.scatter_(1, self.free.clamp(max=self.S - 1)[:, None], True)
            self.index = torch.arange(len(self.t), device=self.t.device)[:, None]  # (B, 1)
            self.noted = self.now.masked_fill(~self.active[:, None], NEVER)  # (B, 1) evicted_at of a victim
        if self.ring is not None:
            age = (self.step - 1 - torch.arange(self.W, device=self.k.device, dtype=torch.int32)) % self.W
            self.ring_pos = (self.now - 1 - age).clamp(min=-1)  # (B, W) -1 before the first query
        ragged = self.min_keep + max(self.late + 1, 0) < self.max_keep  # a row has a free slot among those in use
        self.seen = self.filled[:, None, None, : self.max_keep + self.step + 1] if ragged else None
        return self.t[:, None]

    def keep_rows(self, kept: Tensor) -> None:
        """Go on with the given rows (n,) alone: what they own moves to the front, in the storage that is there."""
        for name in ("k", "v", "pos", "scores", "total_attn", "noise", "ring"):
            if (x := getattr(self, name)) is not None:
                for layer in x:
                    layer[: len(kept)] = layer[kept]
                setattr(self, name, x[:, : len(kept)])
        for name in ("prompt_len", "keep", "filled", "active", "rows"):
            setattr(self, name, getattr(self, name)[kept])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (B,nkv,T,hs), attend with q (B,nh,T,hs); returns (B,nh,T,hs). During the prompts B is N."""
        return self._prefill(layer, q, k, v) if self.step == -1 else self._decode(layer, q, k, v)

    def last(self, x: Tensor) -> Tensor:
        """The hidden states (B,1,C) of each row's last token, from x (B,T,C) of the current forward."""
        return x if self.step >= 0 else x[torch.arange(len(x), device=x.device), self.lens - 1][:, None]

    def _window_attn(self, ring: Tensor, ring_pos: Tensor, k: Tensor, k_pos: Tensor) -> Tensor:
        """Attention that the queries of a ring (B,nh,W,hs) at ring_pos (B,W) give to each key: (B,nkv,S)."""
        total = 0
        # A few queries at a time: the probabilities of all of them, in at least float32, could outgrow K itself.
        size = k.element_size()
        block = max(1, k.shape[-1] * k.shape[1] * size // (ring.shape[1] * max(size, 4)))
        for q, q_pos in zip(ring.split(block, dim=2), ring_pos.split(block, dim=1), strict=True):
            total = total + attention_received(q, k, q_pos, k_pos)  # (B, nkv, S)
        return total / (ring_pos >= 0).sum(1)[:, None, None]

    def _protect(self, scores: Tensor, pos: Tensor, newest: Tensor) -> Tensor:
        """The policy's scores (B,nkv,S) with what may never be evicted at +inf; newest (B,1) is the last position."""
        return scores.masked_fill((pos < self.sinks) | (pos > (newest - self.recent)[..., None]), torch.inf)

    def _prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The prompts attend densely, are compressed once, and fill the slots of their G samples.

        Only this layer's full K and V exist meanwhile. A dropped prompt key is last seen by the prompt's last query,
        at P - 1, so its evicted_at is P.
        """
        (N, nkv, P, hs), W, K = k.shape, self.W, self.max_keep
        length = self.lens[:, None]  # (N, 1)
        pos = torch.arange(P, device=k.device).expand(N, P)
        pos = pos.masked_fill(pos >= length, -1)  # (N, P) padding is no key and no query
        view = LayerView(k, pos[:, None].expand(N, nkv, P))
        needs = self.score_fn.needs if self.compress_prompt or self.evicts else ()
        if "total_attn" in needs:
            blocks = zip(q.split(64, dim=2), pos.split(64, dim=1), strict=True)  # never P x P at once
            view.total_attn = sum(attention_received(qb, k, pb, view.pos) for qb, pb in blocks)
        if "noise" in needs:
            view.noise = torch.rand(N, nkv, P, device=k.device, generator=self.generator)
        if "window_attn" in needs:
            at = length - W + torch.arange(W, device=k.device)  # (N, W) the last W queries, some before the first
            window = q.gather(2, at.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, hs))  # (N, nh, W, hs)
            if self.evicts:
                self._samples(self.ring[layer])[:] = window[:, None]
            if self.compress_prompt:
                attn = self._window_attn(window, at.clamp(min=-1), k, view.pos)  # (N, nkv, P)
                in_window = view.pos >= (length - W)[:, None]
                pooled = F.avg_pool1d(attn.masked_fill(in_window, 0), self.pool, stride=1, padding=self.pool // 2)
                view.window_attn = torch.where(in_window, attn, pooled)

        scores = self.score_fn(view) if self.compress_prompt else torch.zeros_like(view.pos, dtype=torch.float32)
        scores = self._protect(scores, view.pos, length - 1).masked_fill(view.pos < 0, -torch.inf)
        kept = scores.argsort(dim=-1, descending=True, stable=True)[..., :K]  # (N, nkv, K) best first
        beyond = torch.arange(K, device=k.device) >= self.keeps[:, None, None]  # a shorter prompt keeps fewer
        kept = kept.masked_fill(beyond, P).sort(dim=-1).values  # in prompt order; P marks a slot that stays free
        index = kept.clamp(max=P - 1)
        for slots, prompt in ((self.k, k), (self.v, v)):
            self._samples(slots[layer])[..., :K, :] = prompt.gather(2, index[..., None].expand(-1, -1, -1, hs))[:, None]
        for slots, prompt in ((self.total_attn, view.total_attn), (self.noise, view.noise)):
            if slots is not None:
                self._samples(slots[layer])[..., :K] = prompt.gather(2, index)[:, None]
        if self.evicts:
            self._samples(self.pos[layer])[..., :K] = kept.masked_fill(kept == P, -1)[:, None]
        alive = torch.zeros(N, nkv, P + 1, dtype=torch.bool, device=k.device).scatter_(2, kept, True)[..., :P]
        dropped = (view.pos >= 0) & ~alive  # (N, nkv, P)
        self._samples(self.evicted_at[layer])[..., :P] = torch.where(dropped, length[:, None], NEVER)[:, None]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token a row: choose the victim, overwrite it, note it, attend, update the statistics, in this order."""
        B, nh, _, hs = q.shape
        K, V = self.k[layer], self.v[layer]
        at = (slice(None), slice(None), self.column)  # the slots of this token: [at] is (B, nkv, ...)
        if self.evicts:
            pos, scores = self.pos[layer], self.scores[layer]
            if self.step % self.interval == 0 and self.late + self.interval > 0:  # or a row would fill up unscored
                view = LayerView(K, pos)
                view.total_attn = None if self.total_attn is None else self.total_attn[layer]
                view.noise = None if self.noise is None else self.noise[layer]
                if self.ring is not None:
                    view.window_attn = self._window_attn(self.ring[layer], self.ring_pos, K, pos)
                scores.copy_(self.score_fn(view))
            if self.column is None:
                victim = self._protect(scores, pos, self.now - 1).argmin(-1)  # (B, nkv)
                slot = torch.where(self.full[:, None], victim, self.free[:, None])  # (B, nkv)
                at = (self.index, self.heads, slot)
                # A free slot has the position -1: its "victim" goes to the last column of the record.
                self.record[layer][self.rows[:, None], self.heads, pos[at].long()] = self.noted
            pos[at] = self.now
            scores[at] = torch.inf  # unknown until the next refresh; a scored key is always left to evict

        K[at], V[at] = k[:, :, 0], v[:, :, 0]
        n = min(self.max_keep + self.step + 1, self.S)  # the slots behind these are free in every row
        grouped = q.view(B, K.shape[1], -1, hs)  # (B, nkv, g, hs): query heads of a kv head are queries of its keys
        y = F.scaled_dot_product_attention(grouped, K[:, :, :n], V[:, :, :n], attn_mask=self.seen)
        if self.total_attn is not None:  # SDPA keeps its probabilities to itself: once more
            logits = (grouped * hs**-0.5 @ K[:, :, :n].mT).to(self.total_attn.dtype)  # (B, nkv, g, n)
            if self.seen is not None:
                logits.masked_fill_(~self.seen, -torch.inf)
            self.total_attn[layer][at] = 0
            self.total_attn[layer, :, :, :n].add_(logits.softmax(-1).mean(2))
        if self.noise is not None:
            drawn = torch.rand(B, K.shape[1], device=k.device, generator=self.generator)
            self.noise[layer][at] = drawn.to(self.noise.dtype)
        if self.ring is not None:
            self.ring[layer][:, :, self.step % self.W] = q[:, :, 0]
        return y.reshape(B, nh, 1, hs)

    def _samples(self, x: Tensor) -> Tensor:
        """View (B, ...) as (N, G, ...): what a prompt computed once is written to its G samples by broadcasting."""
        return x.unflatten(0, (-1, self.G))


# ---------------------------------------------------------------------------------------------------------------------
# The rollout


@dataclass
class Rollout:
    """B = N*G sampled rows, right-padded with token 0 to the longest, T. Row b = n*G + g continues prompt n."""

    prompt: Tensor  # (B,) int64: n
    tokens: Tensor  # (B,T) int64: prompt, response with its EOS, padding
    prompt_len: Tensor  # (B,) int64
    length: Tensor  # (B,) int64: prompt and response
    response_mask: Tensor  # (B,T) bool: the sampled tokens, EOS among them (stopping is an action)
    finished: Tensor  # (B,) bool: EOS was drawn
    logp: Tensor  # (B,T) float32, nats: the sampler's own; logp[b,t] scores tokens[b,t], 0 off the response
    evicted_at: Tensor  # (L,B,nkv,T) int32: the shadow mask; 0 on padding
    kv_bytes: int  # allocated K and V storage, all layers and rows
    kv_bytes_dense: int  # the same with a slot for every token
    policy_bytes: int  # what choosing victims costs beside that

    def select(self, rows: Tensor) -> "Rollout":
        """The given rows (b,) alone, cut to the longest of them; the byte counts stay those of the whole rollout."""
        T = int(self.length[rows].max())
        by_row = {name: getattr(self, name)[rows] for name in ("prompt", "prompt_len", "length", "finished")}
        by_token = {name: getattr(self, name)[rows, :T] for name in ("tokens", "response_mask", "logp")}
        return replace(self, **by_row, **by_token, evicted_at=self.evicted_at[:, rows, :, :T])


class SharedPrompts:
    """The learner's pass over a rollout, each prompt once: its samples attend to the same keys, as in the sampler.

    A prompt is compressed after its prefill, so its own queries see all of it, in every sample alike. Stands where the
    cache stands: `model.hidden(shared.tokens, cache=shared)` gives the hidden states (n,C) that score the batch's n
    response tokens, row by row; exactly what whole rows (B,T) with `evicted_at` give, from N*P + B*R tokens instead.

    masked: with the sampler's view, else with the full one. R is the longest response less one: the last sampled token
    is never fed.
    """

    def __init__(self, batch: Rollout, masked: bool):
        numbers, self.prompt = batch.prompt.unique(return_inverse=True)  # (N,) and (B,), the prompt of each row
        self.prompt_len, self.count, T = batch.prompt_len, batch.length - batch.prompt_len, batch.tokens.shape[1]
        N, B, P, R = len(numbers), len(self.prompt), int(self.prompt_len.max()), int(self.count.max()) - 1
        self.prompts, self.responses = (N, P), (B, R)
        device = batch.tokens.device
        some_row = numbers.scatter(0, self.prompt, torch.arange(B, device=device))  # (N,) a row that has the prompt
        places = torch.arange(P, device=device)
        self.at = self.prompt_len[:, None] + torch.arange(R, device=device)  # (B, R)
        response = batch.tokens.gather(1, self.at.clamp(max=T - 1))  # (B, R)
        self.tokens = torch.cat((batch.tokens[some_row, :P].flatten(), response.flatten()))[None]  # (1, N*P + B*R)
        self.positions = torch.cat((places.repeat(N), self.at.flatten()))[None]  # the same
        # The keys of a row's responses: its prompt, beside which NEVER hides padding, and the response itself.
        prompt_key = torch.where(places < self.prompt_len[:, None], places, NEVER)  # (B, P)
        self.key_at = torch.cat((prompt_key, self.at), dim=1)[:, None]  # (B, 1, P + R)
        self.evicted_at = batch.evicted_at.new_full((1, 1, 1, 1), NEVER).expand(len(batch.evicted_at), B, 1, P + R)
        if masked:
            column = self.key_at.clamp(max=T - 1).expand(*batch.evicted_at.shape[:3], -1)
            self.evicted_at = batch.evicted_at.gather(-1, column)  # (L, B, nkv, P + R)

    def advance(self, T: int) -> Tensor:
        """The positions (1, N*P + B*R) of the tokens."""
        return self.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Prompts attend to themselves, responses to their prompt and themselves: q (1,nh,M,hs) -> (1,nh,M,hs)."""
        M = self.prompts[0] * self.prompts[1]
        q_prompt, k_prompt, v_prompt = (x[0, :, :M].unflatten(1, self.prompts).transpose(0, 1) for x in (q, k, v))
        q, k, v = (x[0, :, M:].unflatten(1, self.responses).transpose(0, 1) for x in (q, k, v))  # (B, nh|nkv, R, hs)
        k, v = (torch.cat((p[self.prompt], r), dim=2) for p, r in ((k_prompt, k), (v_prompt, v)))  # (B, nkv, P + R, hs)
        seen = self.key_at[:, None] <= self.at[:, None, :, None]  # (B, 1, R, P + R)
        seen = seen & (self.at[:, None, :, None] < self.evicted_at[layer][:, :, None])  # (B, nkv, R, P + R)
        idle = self.at >= (self.prompt_len + self.count - 1)[:, None]  # (B, R) padding: it sees all, rather than NaN
        seen = seen | idle[:, None, :, None]
        group = q.shape[1] // k.shape[1]  # the query heads that share a kv head are so many more queries of it
        q, seen = q.unflatten(1, (-1, group)).flatten(2, 3), seen.repeat(1, 1, group, 1)  # (B, nkv, group*R, hs|P + R)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y = y.unflatten(2, (group, -1)).flatten(1, 2)  # (B, nh, R, hs)
        y_prompt = F.scaled_dot_product_attention(q_prompt, k_prompt, v_prompt, is_causal=True, enable_gqa=True)
        return torch.cat([x.transpose(0, 1).flatten(1, 2) for x in (y_prompt, y)], dim=1)[None]

    def last(self, x: Tensor) -> Tensor:
        """Of x (1, N*P + B*R, C) the states (n,C) that score response tokens: a prompt's last, then the response's."""
        M = self.prompts[0] * self.prompts[1]
        first = x[0, self.prompt * self.prompts[1] + self.prompt_len - 1]  # (B, C)
        states = torch.cat((first[:, None], x[0, M:].unflatten(0, self.responses)), dim=1)  # (B, R + 1, C)
        return states[torch.arange(states.shape[1], device=x.device) < self.count[:, None]]


def rollout(
    model,
    prompts: list[list[int]],
    group_size: int,
    max_new_tokens: int,
    *,
    eos_ids: list[int],
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], None] | None = None,
    **cache_options,
) -> Rollout:
    """Sample group_size responses to each prompt with a (compressed) cache, and record what each query saw.

    prompts: N lists of token ids, of any lengths. eos_ids: each of them ends a row. temperature divides the logits;
    0 is greedy decoding, whose logp is that at temperature 1. generator: on the model's device. on_token: called
    with the tokens (B,) of each step as they are drawn, 0 in rows that have ended. cache_options: kv_budget,
    prompt_budget, policy, sinks, recent, pool, interval of KVCache; the default is the dense cache.
    Raises ValueError naming the value and what is allowed: an empty prompt, a prompt that leaves no room in
    model.config.block_size for max_new_tokens, an id outside of the vocabulary, a temperature below 0, or a bad
    cache option.
    """
    config, device = model.config, next(model.parameters()).device
    lens = [len(p) for p in prompts]
    if not prompts or not min(lens):
        which = f"prompt {lens.index(0)} of {len(lens)} is empty" if prompts else "no prompts"
        raise ValueError(f"{which}: a rollout needs at least one prompt, each of at least one token")
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size={group_size}, max_new_tokens={max_new_tokens}: both must be at least 1")
    if max(lens) + max_new_tokens > config.block_size:
        raise ValueError(
            f"a prompt of {max(lens)} tokens and max_new_tokens={max_new_tokens} exceed block_size={config.block_size}"
        )
    if wrong := [i for p in prompts for i in p if not 0 <= i < config.vocab_size]:
        raise ValueError(f"token id {wrong[0]} in a prompt: must be in 0..{config.vocab_size - 1}")
    if not (temperature == 0 or temperature >= COLDEST):
        raise ValueError(f"temperature={temperature}: must be 0 (greedy) or at least {COLDEST}")

    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else next(model.parameters()).dtype
    N, G, B, P = len(prompts), group_size, len(prompts) * group_size, max(lens)
    cache = KVCache(config, lens, G, max_new_tokens, dtype=dtype, device=device, generator=generator, **cache_options)

    padded = torch.zeros(N, P, dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    padded = padded.to(device)
    prompt_len = torch.tensor(lens, device=device).repeat_interleave(G)  # (B,)
    length = prompt_len.clone()
    eos = torch.tensor(list(eos_ids), device=device)
    sampled = torch.zeros(B, max_new_tokens, dtype=torch.int64, device=device)
    sampled_logp, finished = torch.zeros(sampled.shape, device=device), torch.zeros_like(length, dtype=torch.bool)

    with torch.inference_mode():  # beyond no_grad: what is made in here never takes part in a backward pass
        logits = model(padded, cache=cache).repeat_interleave(G, dim=0)  # (B, 1, V): one prefill a prompt
        for step in range(max_new_tokens):
            logits = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32)) / (temperature or 1.0)
            all_logp = logits.log_softmax(-1)  # (n, V) of the n rows still in the cache
            if temperature == 0:
                token = all_logp.argmax(-1)  # (n,)
            else:  # one uniform number a row, against the running sum of its probabilities
                below = all_logp.exp().cumsum(-1, dtype=torch.float64)  # (n, V)
                u = torch.rand(len(below), 1, dtype=torch.float64, device=device, generator=generator)  # in [0, 1)
                token = torch.searchsorted(below, u * below[:, -1:], right=True).squeeze(1)
            token = token.masked_fill(~cache.active, 0)  # a row that has ended is padded
            sampled[cache.rows, step] = token
            token_logp = all_logp.gather(1, token[:, None]).squeeze(1).float()  # (n,)
            sampled_logp[cache.rows, step] = token_logp.masked_fill(~cache.active, 0)
            length[cache.rows] += cache.active
            if on_token is not None:
                on_token(sampled[:, step])
            cache.active &= ~torch.isin(token, eos)
            finished[cache.rows] = ~cache.active
            if step + 1 == max_new_tokens:
                break  # the last sampled token is never fed, so it evicts nothing
            if device.type == "cpu" or step % 16 == 15:  # the host would have to wait for another device
                left = cache.active.nonzero().squeeze(1)  # (n,)
                if len(left) == 0:
                    break
                if device.type == "cpu" and len(left) <= 0.75 * len(token):  # here, fewer rows are less work
                    cache.keep_rows(left)
                    token = token[left]
            logits = model(token[:, None], cache=cache)  # (n, 1, V)

    at = prompt_len[:, None] + torch.arange(max_new_tokens, device=device)  # (B, R)
    tokens = F.pad(padded.repeat_interleave(G, dim=0), (0, max_new_tokens)).scatter(1, at, sampled)  # (B, P + R)
    logp = torch.zeros(tokens.shape, device=device).scatter(1, at, sampled_logp)  # (B, P + R)
    T = int(length.max())
    position = torch.arange(T, device=device)
    real = position < length[:, None]  # (B, T)
    return Rollout(
        prompt=torch.arange(B, device=device) // G,
        tokens=tokens[:, :T],
        prompt_len=prompt_len,
        length=length,
        response_mask=real & (position >= prompt_len[:, None]),
        finished=finished,
        logp=logp[:, :T],
        evicted_at=cache.evicted_at[..., :T].masked_fill(~real[:, None], 0),  # padding is evicted before it is born
        kv_bytes=cache.kv_bytes,
        kv_bytes_dense=cache.kv_bytes // cache.S * (P + max_new_tokens),
        policy_bytes=cache.policy_bytes,
    )
