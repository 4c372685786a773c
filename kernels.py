"""Attention under a shadow mask, one integer per key: query i sees key j exactly when j <= i < evicted_at[j].

From plain to fast: `shadow_attention_reference` is the definition, `_masked_sdpa` is what a CPU runs, and the Triton
kernels at the end (FlashAttention, arXiv 2307.08691, with a birth and a death per key, and never a T x T matrix) are
what a GPU runs. With TRITON_INTERPRET=1 set, CPU tensors go through the kernels too: slowly, for tests.
"""

from __future__ import annotations  # so that `tl.constexpr` below is only a name where triton is missing

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit, INTERPRET = triton.jit, triton.knobs.runtime.interpret
except ImportError:
    triton, INTERPRET = None, False

    def jit(kernel):
        """Without triton the kernels below stay plain functions that nothing calls."""
        return kernel


try:
    from flash_attn import flash_attn_func
except ImportError:  # optional: dense_attention then uses what PyTorch brings along
    flash_attn_func = None

NEVER = 2**31 - 1  # evicted_at of a key that survives; every value >= T means the same


# ---------------------------------------------------------------------------------------------------------------------
# The definition, and the entry points.


def visible(evicted_at):
    """The shadow mask in full: may query i (row) see key j (column)? For pictures, tests and the CPU.

    evicted_at (B, nkv, T) int32 -> (B, nkv, T, T) bool
    """
    i = torch.arange(evicted_at.shape[-1], device=evicted_at.device)  # (T,)
    return (i <= i[:, None]) & (i[:, None] < evicted_at[..., None, :])  # (B, nkv, T, T)


def shadow_attention_reference(q, k, v, evicted_at, scale=None):
    """Softmax attention written out, the oracle for everything below: same shapes and result as `shadow_attention`.

    Computes in float32, or in float64 for float64 inputs. A query that sees no key outputs 0 and gets gradient 0.
    """
    q, k, v = _checked(q, k, v, evicted_at)
    out_dtype, dtype = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]  # query heads per kv head
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        k, v, seen = (x.repeat_interleave(group, dim=1) for x in (k, v, visible(evicted_at)))
        scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)  # (B, nh, T, T)
        # a finite floor under the maximum: a row of -inf then gives exp(-inf) = 0, not exp(-inf + inf) = nan
        top = scores.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).min)  # (B, nh, T, 1)
        p = (scores - top).exp()  # (B, nh, T, T)
        total = p.sum(dim=-1, keepdim=True)  # (B, nh, T, 1), at least 1 unless the query sees nothing
        return (p / total.masked_fill(total == 0, 1) @ v).to(out_dtype)  # (B, nh, T, hs)


def dense_attention(q, k, v, scale=None):
    """Plain causal attention, by flash-attn where it is installed and applies, else by PyTorch's SDPA.

    q (B, nh, T, hs), k and v (B, nkv, T, hs) -> (B, nh, T, hs)
    """
    q, k, v = _checked(q, k, v)
    half = q.dtype in (torch.float16, torch.bfloat16)
    if flash_attn_func is not None and q.is_cuda and half:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # flash-attn wants (B, T, heads, hs)
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
    if q.is_cuda and not half:  # here only SDPA's plain T x T path shares kv heads, so give every query head its own
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] < q.shape[1])


def shadow_attention(q, k, v, evicted_at=None, scale=None):
    """Causal attention that also hides evicted keys: query i sees key j exactly when j <= i < evicted_at[j].

    q (B, nh, T, hs), k and v (B, nkv, T, hs), evicted_at (B, nkv, T) int32 -> (B, nh, T, hs), differentiable in q, k
    and v. evicted_at=None is plain causal attention, scale=None is hs ** -0.5. A query that sees no key outputs 0 and
    gets gradient 0. Under autocast the inputs are cast first, as SDPA casts them. Inputs that do not fit each other
    raise ValueError.
    """
    if evicted_at is None:
        return dense_attention(q, k, v, scale)
    q, k, v = _checked(q, k, v, evicted_at)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.dtype == torch.float64 or not (q.is_cuda or INTERPRET):
        return _masked_sdpa(q, k, v, evicted_at, scale)
    if triton is None:
        _warn_slow()
        return _masked_sdpa(q, k, v, evicted_at, scale)
    birth = lifetime_order(evicted_at, tile_size(q.dtype, q.shape[-1]))  # (B, nkv, T): the s-th key and its birth
    death = evicted_at.gather(2, birth)  # (B, nkv, T)
    k, v = (x.gather(2, birth[..., None].expand_as(x)) for x in (k, v))  # autograd turns their gradients back around
    return attend(q, k, v, birth.int(), death, scale)


@functools.cache
def _warn_slow():
    warnings.warn("triton is not installed: shadow attention builds T x T masks, which is slow and large", stacklevel=3)


def _masked_sdpa(q, k, v, evicted_at, scale):
    group = q.shape[1] // k.shape[1]
    seen = visible(evicted_at)  # (B, nkv, T, T)
    empty = ~seen.any(dim=-1, keepdim=True)  # (B, nkv, T, 1)
    # SDPA promises nothing for a query without keys: let it see them all, then zero its output and so its gradient
    seen, empty = (x.repeat_interleave(group, dim=1) for x in (seen | empty, empty))  # (B, nh, T, T) and (B, nh, T, 1)
    if q.is_cuda:  # SDPA on CUDA takes a mask or shared kv heads, not both, without falling back to its plain path
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
    return out.masked_fill(empty, 0)  # (B, nh, T, hs)


def _checked(q, k, v, evicted_at=None):
    """q, k and v, cast where autocast asks for it; ValueError unless they fit each other and evicted_at."""

    def need(fine, rule):
        if not fine:
            tensors = [x for x in (q, k, v, evicted_at) if x is not None]
            given = ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in tensors)
            raise ValueError(f"attention needs {rule}; q, k, v (and evicted_at) are {given}")

    need(q.ndim == k.ndim == 4 and 0 not in q.shape, "q (B, nh, T, hs) and k, v (B, nkv, T, hs), no size 0")
    (B, nh, T, hs), nkv = q.shape, k.shape[1]
    need(k.shape == v.shape == (B, nkv, T, hs), "k and v (B, nkv, T, hs) with the B, T and hs of q")
    need(nkv > 0 and nh % nkv == 0, "nh to be a multiple of nkv")
    need(hs <= 256, "a head size hs of at most 256")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    need(q.dtype == k.dtype == v.dtype and q.dtype in types, f"q, k and v of one type out of {types}")
    need(q.device == k.device == v.device, "q, k and v on one device")
    if evicted_at is not None:
        need(evicted_at.shape == (B, nkv, T), "evicted_at of shape (B, nkv, T)")
        need(evicted_at.dtype == torch.int32 and evicted_at.device == q.device, "evicted_at as torch.int32, beside q")
    return q, k, v


# ---------------------------------------------------------------------------------------------------------------------
# Lifetime order and tiles. The kernels work on tiles of queries x keys and skip a tile that no query needs. Survivors
# lie scattered among dead keys, so in natural order nearly every tile holds one, and nothing is skipped. But the order
# of keys means nothing to attention: put keys that die together into one tile, and the tile dies with them.


def lifetime_order(evicted_at, block=64):
    """A permutation of the T keys that puts like lives into the same tile: evicted_at (B, nkv, T) int32 -> int64.

    The sequence is cut into stretches of whole tiles, and the keys of a stretch are sorted by death. Long stretches
    part the deaths well but mix births; stretches of just under sqrt(n) of the n tiles balance the two.
    """
    T = evicted_at.shape[-1]
    stretch = block * max(1, int(((T - 1) // block) ** 0.5))
    birth = torch.arange(T, device=evicted_at.device)  # (T,)
    return (birth // stretch * (T + 1) + evicted_at.clamp(0, T)).argsort(dim=-1, stable=True)  # (B, nkv, T)


FULL, PARTIAL, SKIPPED = 0, 1, 2  # what a tile is: every query sees every key, some do, none does


def tile_states(birth, death, block):
    """What each tile of `block` queries x `block` keys is; n = ceil(T / block) tiles either way.

    birth, death (B, nkv, T) int32 -> (B, nkv, n queries, n keys) uint8
    """
    T = birth.shape[-1]
    pad = (0, -T % block)  # keys past the end: never born, already dead
    birth = F.pad(birth, pad, value=NEVER).unflatten(-1, (-1, block))  # (B, nkv, n, block)
    death = F.pad(death, pad, value=0).unflatten(-1, (-1, block))  # (B, nkv, n, block)
    first_birth, last_birth = (x[..., None, :] for x in birth.aminmax(dim=-1))  # (B, nkv, 1, n)
    first_death, last_death = (x[..., None, :] for x in death.aminmax(dim=-1))  # (B, nkv, 1, n)
    first_query = torch.arange(0, T, block, device=birth.device)[:, None]  # (n, 1)
    last_query = (first_query + block - 1).clamp_max(T - 1)  # (n, 1)
    some = (first_birth <= last_query) & (first_query < last_death)  # (B, nkv, n, n)
    every = (last_birth <= first_query) & (last_query < first_death)  # (B, nkv, n, n), implies some
    return (SKIPPED - some.byte() - every.byte()).byte()


def visited_tiles(evicted_at, lifetimes=True, block=64):
    """How many tiles the kernels visit for evicted_at (B, nkv, T), in lifetime or in natural order -> (B, nkv) int64.

    Dense causal attention visits n * (n + 1) / 2 tiles per kv head, n = ceil(T / block).
    """
    T = evicted_at.shape[-1]
    natural = torch.arange(T, device=evicted_at.device).expand_as(evicted_at)
    birth = lifetime_order(evicted_at, block) if lifetimes else natural  # (B, nkv, T)
    return (tile_states(birth.int(), evicted_at.gather(2, birth), block) != SKIPPED).sum(dim=(-2, -1))


def _visits(states):
    """The tiles that each of n tiles meets, as a list: full ones first, then partial, then skipped; and where in that
    list each of the three starts.

    states (B, nkv, n, n) uint8 -> (B, nkv, n, n) int32 and (B, nkv, n, 3) int32
    """
    starts = torch.stack([(states < kind).sum(dim=-1) for kind in (FULL, PARTIAL, SKIPPED)], dim=-1)  # (B, nkv, n, 3)
    return states.contiguous().argsort(dim=-1).int(), starts.int()


# ---------------------------------------------------------------------------------------------------------------------
# The kernels. Every tensor is contiguous, so that a head is one (T, HEAD) matrix; HEAD is hs, PADDED the next power of
# two, which Triton's tiles must have. Query head number b * nh + h shares kv head number (b * nh + h) // group. A tile
# that loads past the end reads zeros, keys there are dead and queries there are not stored. All sums are float32.


@jit
def _load_rows(matrix, rows, T, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Some rows of a (T, HEAD) matrix, zeros outside of it -> (len(rows), PADDED)"""
    columns = tl.arange(0, PADDED)
    inside = (rows[:, None] < T) & (columns[None, :] < HEAD)
    return tl.load(matrix + rows[:, None] * HEAD + columns[None, :], mask=inside, other=0.0)


@jit
def _load_keys(K, V, BIRTH, DEATH, kv_head, keys, T, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """A tile of keys and values (BLOCK, PADDED), and their births and deaths (BLOCK,)."""
    k = _load_rows(K + kv_head * T * HEAD, keys, T, HEAD, PADDED)
    v = _load_rows(V + kv_head * T * HEAD, keys, T, HEAD, PADDED)
    birth = tl.load(BIRTH + kv_head * T + keys, mask=keys < T, other=0)
    death = tl.load(DEATH + kv_head * T + keys, mask=keys < T, other=0)  # a key past the end is dead at birth
    return k, v, birth, death


@jit
def _store_rows(matrix, rows, values, T, HEAD: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    inside = (rows[:, None] < T) & (columns[None, :] < HEAD)
    tl.store(matrix + rows[:, None] * HEAD + columns[None, :], values.to(matrix.dtype.element_ty), mask=inside)


@jit
def _dot_t(a, b):
    """a @ b transposed. "ieee" concerns float32 only: its default, TF32, keeps 10 bits."""
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@jit
def _scores(a, b, scale, queries, birth, death, partial):
    """One tile of scores, a @ b transposed, -inf where the query does not see the key.

    In units of log2, because exp2 is the exponential that the hardware has: 1.4427 is log2(e). One of a and b is
    queries, the other keys; `queries`, `birth` and `death` come shaped to match.
    """
    s = _dot_t(a, b) * (scale * 1.4426950408889634)
    if partial:  # the mask costs about as much as the exponential, and most tiles of long-lived keys are full
        s = tl.where((birth <= queries) & (queries < death), s, float("-inf"))
    return s


@jit
def _forward_kernel(Q, K, V, BIRTH, DEATH, KEY_TILES, STARTS, OUT, LSE, scale, T, group,
                    HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: BLOCK queries of one head, a running softmax over the tiles of keys they visit."""
    n = tl.cdiv(T, BLOCK)
    tile = tl.program_id(0) % n
    head = (tl.program_id(0) // n).to(tl.int64)  # 64 bits: head * T * HEAD may pass 2**31
    kv_head = head // group
    queries = tile * BLOCK + tl.arange(0, BLOCK)
    q = _load_rows(Q + head * T * HEAD, queries, T, HEAD, PADDED)  # (BLOCK, PADDED)

    top = tl.full([BLOCK], -1e30, tl.float32)  # highest score so far; finite, so that exp2(-inf - top) is 0, never nan
    total = tl.zeros([BLOCK], tl.float32)  # sum of exp2(score - top)
    out = tl.zeros([BLOCK, PADDED], tl.float32)  # sum of exp2(score - top) * value
    visits = kv_head * n + tile
    for partial in tl.static_range(2):  # unrolled: full tiles, then those that need the mask
        for i in range(tl.load(STARTS + visits * 3 + partial), tl.load(STARTS + visits * 3 + partial + 1)):
            keys = tl.load(KEY_TILES + visits * n + i) * BLOCK + tl.arange(0, BLOCK)
            k, v, birth, death = _load_keys(K, V, BIRTH, DEATH, kv_head, keys, T, HEAD, PADDED)
            s = _scores(q, k, scale, queries[:, None], birth[None, :], death[None, :], partial)  # (BLOCK, BLOCK)
            new_top = tl.maximum(top, tl.max(s, axis=1))
            p = tl.exp2(s - new_top[:, None])  # (queries, keys)
            fade = tl.exp2(top - new_top)  # what earlier sums are worth under the new top
            total = total * fade + tl.sum(p, axis=1)
            out = tl.dot(p.to(v.dtype), v, acc=out * fade[:, None], input_precision="ieee")
            top = new_top

    total = tl.where(total == 0, 1.0, total)  # saw nothing: output 0; any finite LSE will do for the backward pass
    _store_rows(OUT + head * T * HEAD, queries, out / total[:, None], T, HEAD, PADDED)
    tl.store(LSE + head * T + queries, top + tl.log2(total), mask=queries < T)


@jit
def _backward_q_kernel(Q, K, V, BIRTH, DEATH, KEY_TILES, STARTS, OUT, LSE, DOUT, DELTA, DQ, scale, T, group,
                       HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: the gradient of BLOCK queries of one head, and delta, which the other backward kernel reads.

    With p = exp2(s - lse) and dp = dout v^T, the softmax's gradient is ds = p * (dp - delta), where delta is the mean
    of dp under p, which is also the dot product of dout and out.
    """
    n = tl.cdiv(T, BLOCK)
    tile = tl.program_id(0) % n
    head = (tl.program_id(0) // n).to(tl.int64)
    kv_head = head // group
    queries = tile * BLOCK + tl.arange(0, BLOCK)
    q = _load_rows(Q + head * T * HEAD, queries, T, HEAD, PADDED)  # (BLOCK, PADDED)
    dout = _load_rows(DOUT + head * T * HEAD, queries, T, HEAD, PADDED)  # (BLOCK, PADDED)
    out = _load_rows(OUT + head * T * HEAD, queries, T, HEAD, PADDED)  # (BLOCK, PADDED)
    lse = tl.load(LSE + head * T + queries, mask=queries < T, other=0.0)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(DELTA + head * T + queries, delta, mask=queries < T)

    dq = tl.zeros([BLOCK, PADDED], tl.float32)
    visits = kv_head * n + tile
    for partial in tl.static_range(2):
        for i in range(tl.load(STARTS + visits * 3 + partial), tl.load(STARTS + visits * 3 + partial + 1)):
            keys = tl.load(KEY_TILES + visits * n + i) * BLOCK + tl.arange(0, BLOCK)
            k, v, birth, death = _load_keys(K, V, BIRTH, DEATH, kv_head, keys, T, HEAD, PADDED)
            s = _scores(q, k, scale, queries[:, None], birth[None, :], death[None, :], partial)  # (BLOCK, BLOCK)
            ds = tl.exp2(s - lse[:, None]) * (_dot_t(dout, v) - delta[:, None])  # (queries, keys)
            dq = tl.dot(ds.to(k.dtype), k, acc=dq, input_precision="ieee")
    _store_rows(DQ + head * T * HEAD, queries, dq * scale, T, HEAD, PADDED)


@jit
def _backward_kv_kernel(Q, K, V, BIRTH, DEATH, QUERY_TILES, STARTS, LSE, DOUT, DELTA, DK, DV, scale, T, group,
                        HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: the gradients of BLOCK keys and values of one kv head, over all query heads that share it.

    Scores are computed keys x queries here, as the products below want them.
    """
    n = tl.cdiv(T, BLOCK)
    tile = tl.program_id(0) % n
    kv_head = (tl.program_id(0) // n).to(tl.int64)
    keys = tile * BLOCK + tl.arange(0, BLOCK)
    k, v, birth, death = _load_keys(K, V, BIRTH, DEATH, kv_head, keys, T, HEAD, PADDED)

    dk = tl.zeros([BLOCK, PADDED], tl.float32)
    dv = tl.zeros([BLOCK, PADDED], tl.float32)
    visits = kv_head * n + tile
    for head in range(kv_head * group, kv_head * group + group):
        for partial in tl.static_range(2):
            for i in range(tl.load(STARTS + visits * 3 + partial), tl.load(STARTS + visits * 3 + partial + 1)):
                queries = tl.load(QUERY_TILES + visits * n + i) * BLOCK + tl.arange(0, BLOCK)
                q = _load_rows(Q + head * T * HEAD, queries, T, HEAD, PADDED)  # (BLOCK, PADDED)
                dout = _load_rows(DOUT + head * T * HEAD, queries, T, HEAD, PADDED)  # (BLOCK, PADDED)
                lse = tl.load(LSE + head * T + queries, mask=queries < T, other=0.0)  # past the end dout, delta are 0
                delta = tl.load(DELTA + head * T + queries, mask=queries < T, other=0.0)
                s = _scores(k, q, scale, queries[None, :], birth[:, None], death[:, None], partial)
                p = tl.exp2(s - lse[None, :])  # (keys, queries)
                dv = tl.dot(p.to(dout.dtype), dout, acc=dv, input_precision="ieee")
                ds = p * (_dot_t(v, dout) - delta[None, :])  # (keys, queries)
                dk = tl.dot(ds.to(q.dtype), q, acc=dk, input_precision="ieee")
    _store_rows(DK + kv_head * T * HEAD, keys, dk * scale, T, HEAD, PADDED)
    _store_rows(DV + kv_head * T * HEAD, keys, dv, T, HEAD, PADDED)


# ---------------------------------------------------------------------------------------------------------------------
# From PyTorch to the kernels. A custom operator is opaque to torch.compile: no graph break, nothing traced inside.


def attend(q, k, v, birth, death, scale):
    """Attention through the kernels, with keys in any order: query i sees a key exactly when birth <= i < death.

    q (B, nh, T, hs), k and v (B, nkv, T, hs), birth and death (B, nkv, T) int32 -> (B, nh, T, hs)
    """
    dtype, block = q.dtype, tile_size(q.dtype, q.shape[-1])
    if INTERPRET:  # the interpreter multiplies the bit patterns of bfloat16 as if they were integers
        q, k, v = (x.float() for x in (q, k, v))
    out, _ = _attend(q, k, v, birth, death, tile_states(birth, death, block), block, scale)
    return out.to(dtype)


def tile_size(dtype, hs):
    """Queries, and keys, per tile: what fits the registers (`python -m experiments.bench compile` shows it)."""
    if dtype == torch.float32:  # no tensor cores: each product keeps its operands in registers too
        return 32 if hs <= 64 else 16
    return 64 if hs <= 128 else 32


def warps(kernel, hs):
    """Warps per program: the kernel that holds two gradients of wide heads needs the registers of eight."""
    return 8 if kernel is _backward_kv_kernel and hs > 64 else 4


def _launch(kernel, q, k, heads, block, *args):
    (B, nh, T, hs), nkv = q.shape, k.shape[1]
    padded = max(16, triton.next_power_of_2(hs))
    grid = (triton.cdiv(T, block) * B * heads,)  # all on one axis: the others end at 65,535
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[grid](*args, T, nh // nkv, hs, padded, block, num_warps=warps(kernel, hs), num_stages=2)


@torch.library.custom_op("nanosmd::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, birth: Tensor, death: Tensor, states: Tensor, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    inputs = [x.contiguous() for x in (q, k, v, birth, death)]
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)  # (B, nh, T, hs) and (B, nh, T)
    _launch(_forward_kernel, q, k, q.shape[1], block, *inputs, *_visits(states), out, lse, scale)
    return out, lse


@torch.library.custom_op("nanosmd::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, birth: Tensor, death: Tensor, states: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor, block: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs, dout = [x.contiguous() for x in (q, k, v, birth, death)], dout.contiguous()
    dq, dk, dv, delta = (x.new_empty(x.shape) for x in (q, k, v, lse))
    rows, columns = _visits(states), _visits(states.mT)
    _launch(_backward_q_kernel, q, k, q.shape[1], block, *inputs, *rows, out, lse, dout, delta, dq, scale)
    _launch(_backward_kv_kernel, q, k, k.shape[1], block, *inputs, *columns, lse, dout, delta, dk, dv, scale)
    return dq, dk, dv


@_attend.register_fake
def _(q, k, v, birth, death, states, block, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attend_backward.register_fake
def _(q, k, v, birth, death, states, out, lse, dout, block, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.block, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, dout, _dlse):
    return *_attend_backward(*ctx.saved_tensors, dout, ctx.block, ctx.scale), None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)
