"""xtrain: the library.  A Qwen3-style decoder, its optimizer, its training step, and its files.

How it reads, top to bottom:

1. Config and presets   every size of a model, checked in one place
2. Arena                all parameters in one flat buffer; Hugging Face's names are views of it
3. Decoder              embedding, blocks, head; loss and logits
4. Optimizer            AdamW over the arena, learning-rate schedule
5. Step                 the one way to train: micro-steps, then an update
6. Files                config.json + model.safetensors, as transformers reads and writes them
7. Tokenizer            byte-level BPE: learned, GPT-2's, or plain bytes; cutting text safely
8. Evaluation           loss and bits per byte of held-out tokens
9. Generation           sampling with a cache of keys and values
10. Checkpoints         a Hugging Face folder and the optimizer's state, whole or not there at all
11. Command lines       what train.py and sample.py share: settings as flags, exit codes

    model = xtrain.Decoder(xtrain.Config(dim=64, layers=2, heads=4, kv_heads=2, vocab_size=211))
    step = xtrain.Step(model, xtrain.AdamW(model, lr=3e-4))
    step.micro(tokens, targets)             # int arrays [batch, seq]; adds to the gradients
    loss, grad_norm = step.update(lr=3e-4)  # one optimizer step; clears them
    xtrain.save_pretrained(model, "folder")
"""
import argparse
import dataclasses
import difflib
import errno
import hashlib
import itertools
import json
import math
import operator
import os
import re
import resource
import shutil
import sys
import typing

import numpy as np
import safetensors
import tokenizers

try:
    import tomllib
except ImportError:             # Python 3.10
    import tomli as tomllib

import autograd as A
import tensor as T
from tensor import Dropout, Tensor, say

__version__ = "0.1.0"

# ---- 1. Config and presets -----------------------------------------------------------------------

class Refused(ValueError):
    """Input that cannot be used.  Its text is the one line that the user reads: what is wrong,
    where, and what to do."""


@dataclasses.dataclass
class Config:
    """The sizes and switches of a decoder.  The defaults are a model that suits a laptop."""
    vocab_size: int = 50257         # logical; the arena rounds it up to 64 rows
    dim: int = 256                  # width of the residual stream
    layers: int = 6
    heads: int = 8                  # query heads
    kv_heads: int = None            # key and value heads; default heads (MHA), 1 is MQA
    head_dim: int = None            # default dim / heads; even, at most 256
    ffn: int = None                 # width of SwiGLU; default 8/3 dim, up to a multiple of 64
    tie_embeddings: bool = False    # one tensor for embedding and head
    qk_norm: bool = True            # RMSNorm on each q and k head: Qwen3; without it, Llama
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0            # on the two residual branches, in [0, 1)
    max_seq: int = 1024             # written to config.json; RoPE itself has no limit
    flash: bool = True              # attention in tiles; False: composed, the reference
    recompute: bool = False         # keep one tensor a block, run it again going back

    def __post_init__(self):
        for name in ("vocab_size", "dim", "layers", "heads", "max_seq"):
            self.positive(name)
        self.kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        self.positive("kv_heads")
        if self.heads % self.kv_heads:
            raise Refused(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: "
                          "give one that divides it")
        if self.head_dim is None:
            if self.dim % self.heads:
                raise Refused(f"dim={self.dim} is not a multiple of heads={self.heads}: "
                                 "give head_dim")
            self.head_dim = self.dim//self.heads
        self.ffn = round_up(8*self.dim//3) if self.ffn is None else self.ffn
        self.positive("head_dim")
        self.positive("ffn")
        if self.head_dim % 2 or self.head_dim > 256:
            raise Refused(f"head_dim={self.head_dim} must be even (RoPE) and at most 256")
        if not 0 <= self.dropout < 1:
            raise Refused(f"dropout={self.dropout} must lie in [0, 1)")
        for name in ("dropout", "rope_theta", "norm_eps"):
            setattr(self, name, float(getattr(self, name)))
        if not (self.rope_theta > 0 and self.norm_eps > 0):
            raise Refused(f"rope_theta={self.rope_theta} and norm_eps={self.norm_eps} must be "
                             "positive")

    def positive(self, name):
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise Refused(f"{name}={value!r} must be a positive whole number")
        setattr(self, name, int(value))     # NumPy's integers overflow, and JSON takes none

    def flops_per_token(self, seq):
        """FLOPs of forward + backward: 6 (weights of all products) + 6 layers heads head_dim seq.
        """
        block = self.dim*(2*self.heads + 2*self.kv_heads)*self.head_dim + 3*self.dim*self.ffn
        products = self.layers*block + self.vocab_size*self.dim
        return 6*products + 6*self.layers*self.heads*self.head_dim*seq


def round_up(n, multiple=64):
    return -(-n//multiple)*multiple


def sizes(dim, layers, heads, head_dim, ffn, **more):
    return {"dim": dim, "layers": layers, "heads": heads, "head_dim": head_dim, "ffn": ffn, **more}


# Arguments of Config by name; v0 to v8 grow from 41 thousand to 226 million core parameters.
PRESETS = {
    "laptop": {},
    "v0": sizes(32, 4, 2, 16, 64),
    "v1": sizes(256, 8, 8, 32, 1024),
    "v2": sizes(384, 12, 12, 32, 1536),
    "v3": sizes(512, 16, 16, 32, 2048),
    **{f"v{i}": sizes(768, 18, 24, 32, 2048) for i in (4, 5, 6, 7)},
    "v8": sizes(1024, 18, 32, 32, 2730),
    "gpt2": sizes(768, 12, 12, 64, 2048),
    "qwen3-0.6b": sizes(1024, 28, 16, 128, 3072, kv_heads=8, vocab_size=151936, tie_embeddings=True,
                        rope_theta=1e6, max_seq=40960),
}


# ---- 2. Arena ------------------------------------------------------------------------------------

class Matrix(typing.NamedTuple):
    """One stored tensor of the arena, and the Hugging Face tensors that lie in it.

    `parts` maps a name to (first row, logical shape); rows and columns beyond it are padding, which
    is zero and stays zero.
    """
    shape: tuple
    parts: dict


def layout(c):
    """{physical name: Matrix} in arena order: embedding, head | layer matrices | norms."""
    vocab, ffn = round_up(c.vocab_size), round_up(c.ffn, 32)
    q, kv = c.heads*c.head_dim, c.kv_heads*c.head_dim
    one = lambda name, physical, logical: Matrix(physical, {name: (0, logical)})
    matrices = {"embed": one("model.embed_tokens.weight", (vocab, c.dim), (c.vocab_size, c.dim))}
    vectors = {}
    if not c.tie_embeddings:
        matrices["head"] = one("lm_head.weight", (vocab, c.dim), (c.vocab_size, c.dim))
    for i in range(c.layers):
        at = f"model.layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        matrices[f"{i}.qkv"] = Matrix((q + 2*kv, c.dim), {
            attn + "q_proj.weight": (0, (q, c.dim)), attn + "k_proj.weight": (q, (kv, c.dim)),
            attn + "v_proj.weight": (q + kv, (kv, c.dim))})
        matrices[f"{i}.o"] = one(attn + "o_proj.weight", (c.dim, q), (c.dim, q))
        matrices[f"{i}.gate_up"] = Matrix((2*ffn, c.dim), {
            mlp + "gate_proj.weight": (0, (c.ffn, c.dim)),
            mlp + "up_proj.weight": (ffn, (c.ffn, c.dim))})
        matrices[f"{i}.down"] = one(mlp + "down_proj.weight", (c.dim, ffn), (c.dim, c.ffn))
        vectors[f"{i}.norm1"] = one(at + "input_layernorm.weight", (c.dim,), (c.dim,))
        vectors[f"{i}.norm2"] = one(at + "post_attention_layernorm.weight", (c.dim,), (c.dim,))
        if c.qk_norm:
            vectors[f"{i}.q_norm"] = one(attn + "q_norm.weight", (c.head_dim,), (c.head_dim,))
            vectors[f"{i}.k_norm"] = one(attn + "k_norm.weight", (c.head_dim,), (c.head_dim,))
    vectors["norm"] = one("model.norm.weight", (c.dim,), (c.dim,))
    return matrices | vectors


class Flat:
    """The arena's memory: `weights`, and `grads` of the same shape, made when first asked for."""

    def __init__(self, size, device):
        self.weights, self._grads = T.zeros((size,), device=device), None
        self.weights.storage.packs = {}         # products may keep packed copies of weights

    @property
    def grads(self):
        if self._grads is None:
            self._grads = T.zeros(self.weights.shape, device=self.weights.device)
        return self._grads


class Parameter(Tensor):
    """A view of the arena whose `grad` is the same view of the gradient arena."""
    __slots__ = ("flat",)

    def __init__(self, flat, shape, strides, offset):
        super().__init__(flat.weights.storage, shape, strides, offset, requires_grad=True)
        self.flat = flat

    @property
    def grad(self):
        if self._grad is None:
            self._grad = self.flat.grads.view(self.shape, self.strides, self.offset)
        return self._grad


class Arena:
    """All parameters in one flat f32 tensor, each from a multiple of 128 elements; zero in between.

    weights, and grads of the same shape, are flat tensors.  `physical` are the tensors
    that the model computes with, `named` the Hugging Face tensors; both are views.  `decayed` is
    the number of elements, from the start, that weight decay applies to: the matrices.
    """

    def __init__(self, config, device):
        self.physical, self.named, self.decayed, at, spots = {}, {}, 0, 0, {}
        for name, matrix in layout(config).items():
            spots[name] = at
            at = round_up(at + math.prod(matrix.shape), 128)
            if len(matrix.shape) == 2:
                self.decayed = at
        self.flat = Flat(at, device)
        for name, (shape, parts) in layout(config).items():
            strides = T.contiguous_strides(shape)
            self.physical[name] = Parameter(self.flat, shape, strides, spots[name])
            for part, (row, logical) in parts.items():
                at = spots[name] + row*strides[0]
                self.named[part] = Parameter(self.flat, logical, strides, at)

    weights = property(lambda self: self.flat.weights)
    grads = property(lambda self: self.flat.grads)


# ---- 3. Decoder ----------------------------------------------------------------------------------

class Cache:
    """Keys and values of the positions so far, in one tensor made once: what generating reads.

    kv [layers, 2, batch, kv_heads, room, head_dim] of the model's dtype; a head's keys are one run
    of memory, which attention reads by stride.  `length` of `room` positions are filled.
    """

    def __init__(self, config, batch, room, device=None, dtype="f32"):
        c = config
        self.kv = T.empty((c.layers, 2, batch, c.kv_heads, room, c.head_dim), dtype, device)
        self.batch, self.room, self.length = batch, room, 0

    def slots(self, layer, which, batch, start, end):
        """Positions start to end of k (which 0) or v (1): a view [batch, end - start, heads, dim].
        """
        _, _, rows, heads, positions, dim = self.kv.strides
        shape = (batch, end - start, self.kv.shape[3], self.kv.shape[5])
        offset = layer*self.kv.strides[0] + which*self.kv.strides[1] + start*positions
        return self.kv.view(shape, (rows, positions, heads, dim), offset)

    def join(self, layer, k, v):
        """Put k, v [batch or 1, n, kv_heads, head_dim] behind layer's; views of all so far.

        A batch of 1 is written to every row: samples that share a prompt compute it once.
        """
        seen = []
        for which, t in enumerate((k, v)):
            end = self.length + t.shape[1]
            into = self.slots(layer, which, self.batch, self.length, end)
            T.copy(T.expand(t, into.shape, "cache"), into)
            seen.append(self.slots(layer, which, t.shape[0], 0, end))
        return seen


class Decoder:
    """A decoder-only transformer in Qwen3's form (Llama's without qk_norm).

    Pre-norm blocks of grouped-query attention with RoPE and of SwiGLU, RMSNorm everywhere, no
    biases. Matrices start as N(0, 0.02^2), those that write to the residual stream (o_proj,
    down_proj) as N(0, 0.02^2 / (2 layers)) (GPT-2's rule), norms as 1; drawn on the host, by name
    in file order, from `seed`. `seed` also keys the dropout masks.
    """

    def __init__(self, config, device=None, dtype="f32", seed=0):
        if dtype not in T.FLOATS:
            raise ValueError(f"dtype {dtype!r}: wants 'f32' or 'bf16'")
        self.config, self.device, self.dtype = config, device or T.DEVICE, dtype
        self.seed, self.training = seed, True
        self.arena = Arena(config, self.device)
        self.tables = {}
        rng = np.random.default_rng(seed)
        for name, p in self.arena.named.items():
            if p.ndim == 1:
                p.set_(np.ones(p.shape, np.float32))
                continue
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02/math.sqrt(2*config.layers) if into_residual else 0.02
            p.set_(rng.standard_normal(p.shape, np.float32)*np.float32(std))

    def parameters(self):
        """{Hugging Face name: Tensor}, each stored tensor once, in the shapes of the files."""
        return dict(self.arena.named)

    @property
    def total_params(self):
        """Parameters, padding not counted."""
        return sum(p.size for p in self.arena.named.values())

    @property
    def core_params(self):
        """Parameters without embedding and head."""
        ends = (self.arena.named.get(n) for n in ("model.embed_tokens.weight", "lm_head.weight"))
        return self.total_params - sum(p.size for p in ends if p is not None)

    def train(self, on=True):
        """Dropout on (or off)."""
        self.training = on
        return self

    def eval(self):
        """Dropout off."""
        return self.train(False)

    def zero_grad(self):
        """All gradients := 0."""
        T.fill(self.arena.grads, 0.0)

    def rope(self, seq, start=0):
        """cos and sin [seq, head_dim/2] of positions from start on; tables have a power of two.
        """
        # Tables of every length are kept: a recorded step goes on reading those that it has seen
        length, c = 1 << (start + seq - 1).bit_length(), self.config
        if length not in self.tables:
            self.tables[length] = T.cos_sin(length, c.head_dim, c.rope_theta, device=self.device)
        return [t.view((seq, t.shape[1]), offset=start*t.shape[1]) for t in self.tables[length]]

    def block(self, i, first_sequence, cache=None):
        """Layer i as a function of the residual stream alone: what recompute runs again."""
        c, w = self.config, self.arena.physical
        start = 0 if cache is None else cache.length
        dropout = c.dropout if self.training and cache is None else 0.0

        def run(x):
            B, S, _ = x.shape
            site = lambda place: Dropout(dropout, self.seed, first_sequence, 4*i + place)
            y = A.add_rmsnorm(x, None, w[f"{i}.norm1"], c.norm_eps)
            qkv = A.linear(y, w[f"{i}.qkv"])
            q, k, v = A.qk_norm_rope(qkv, *self.rope(S, start), c.heads, c.kv_heads,
                                     w.get(f"{i}.q_norm"), w.get(f"{i}.k_norm"), c.norm_eps)
            k, v = (k, v) if cache is None else cache.join(i, k, v)
            a = A.attention(q, k, v, c.flash).reshape(B, S, c.heads*c.head_dim)
            x = A.linear(a, w[f"{i}.o"], residual=x, dropout=site(0))
            y = A.add_rmsnorm(x, None, w[f"{i}.norm2"], c.norm_eps)
            return A.mlp(y, w[f"{i}.gate_up"], w[f"{i}.down"], residual=x, dropout=site(1))

        return run

    def hidden(self, tokens, order=None, first_sequence=0, cache=None):
        """The normed residual stream [batch, seq, dim] after the last block.

        With a cache the tokens come after those that it holds (under no_grad: it has no gradient).
        """
        w = self.arena.physical
        x = A.embed(tokens, w["embed"], order, self.dtype)
        for i in range(self.config.layers):
            run = self.block(i, first_sequence, cache)
            x = A.recompute(run, x) if self.config.recompute else run(x)
        return A.add_rmsnorm(x, None, w["norm"], self.config.norm_eps)

    def head(self):
        w = self.arena.physical
        return w.get("head", w["embed"])

    def __call__(self, tokens):
        """Logits [batch, seq, vocab_size] of tokens [batch, seq]."""
        tokens = self.ids("tokens", tokens)
        logits = A.linear(self.hidden(tokens), self.head(), dtype="f32")
        return logits[..., :self.config.vocab_size]

    def cache(self, batch, length):
        """A Cache for `batch` sequences of at most `length` tokens; give it to `decode`."""
        return Cache(self.config, batch, length, self.device, self.dtype)

    @T.marked
    def decode(self, tokens, cache):
        """Logits [batch, vocab_size] after the last of tokens [batch, n], which follow the cached.

        A batch of 1 fills every row of the cache.  No dropout, nothing is recorded.  ValueError if
        the cache is full or of another batch.  Past max_seq RoPE simply goes on.
        """
        tokens = self.ids("tokens", tokens)
        batch, n = tokens.shape
        if batch not in (1, cache.batch):
            raise ValueError(f"decode: {batch} sequences, but the cache holds {cache.batch}")
        if cache.length + n > cache.room:
            raise ValueError(f"decode: the cache has room for {cache.room} tokens, "
                             f"{cache.length} + {n} do not fit")
        with A.no_grad():
            last = self.hidden(tokens, cache=cache)[:, -1]
            cache.length += n
            logits = A.linear(last, self.head(), dtype="f32")
            return logits[..., :self.config.vocab_size]

    def loss(self, tokens, targets, order=None, first_sequence=0, denominator=None, now=False):
        """Mean cross-entropy over counted targets, a 0-d tensor: call backward() on it.

        tokens, targets: ints [batch, seq]; targets of -1 are not counted.  order: the stable
        argsort of the flattened tokens (computed if not given).  first_sequence: number of row 0 in
        the whole run, which dropout masks depend on.  denominator: counted targets of the whole
        global batch, if this is a part of one.  now: gradients of the head along with the loss (see
        autograd.head_loss).
        """
        tokens, targets = self.ids("tokens", tokens), self.ids("targets", targets, lowest=-1)
        if tokens.shape != targets.shape:
            raise ValueError(f"loss: tokens {tokens.shape} and targets {targets.shape} differ")
        if order is not None and not isinstance(order, Tensor):
            order = T.tensor(order, self.device)
        x = self.hidden(tokens, order, first_sequence)
        return A.head_loss(x, self.head(), targets, denominator, self.config.vocab_size, now)

    def ids(self, name, values, lowest=0):
        """Ints [batch, seq] in [lowest, vocab_size) as an i64 tensor; else Value- or IndexError."""
        t = values
        if not isinstance(t, Tensor):
            t = T.tensor(np.asarray(values, dtype=np.int64), self.device)
        if t.ndim != 2 or not t.size:
            raise ValueError(f"{name}: wants a non-empty [batch, seq], got {t.shape}")
        T.check_ids(name, t, self.config.vocab_size, lowest)
        return t


# ---- 4. Optimizer --------------------------------------------------------------------------------

class AdamW:
    """AdamW with torch's arithmetic, over the arena: decay on matrices, none on vectors.

    grad_clip scales all gradients by min(1, grad_clip/(norm + 1e-6));  None does not clip.  A norm
    that is not finite leaves weights and moments as they were and sets `nonfinite`, which stays
    set.
    """

    def __init__(self, model, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                 grad_clip=None):
        self.arena, self.lr, self.betas = model.arena, lr, betas
        self.eps, self.weight_decay = eps, weight_decay
        self.grad_clip = math.inf if grad_clip is None else grad_clip
        if not self.grad_clip > 0:
            raise ValueError(f"grad_clip={grad_clip} must be positive")
        self.m, self.v = (T.zeros(self.arena.weights.shape, device=model.device) for _ in range(2))
        self.clip, self.steps = T.zeros((4,), "f64", model.device), 0

    @property
    def nonfinite(self):
        """Has any gradient norm been infinite or NaN?"""
        return bool(self.clip.numpy()[3])

    def step(self, lr=None):
        """Update the weights, clear the gradients, return the gradient norm (before clipping)."""
        self.apply(T.tensor64(self.hyper(lr), self.arena.weights.device))
        return self.outcome()

    def hyper(self, lr=None):
        """Count a step; its numbers for `adamw`, f64 [2, 7]: for matrices, for vectors."""
        lr, (beta1, beta2) = self.lr if lr is None else lr, self.betas
        if not math.isfinite(lr):
            raise ValueError(f"lr={lr} is not finite")
        self.steps += 1
        bias = 1 - beta1**self.steps, 1 - beta2**self.steps
        return np.array([[lr, beta1, beta2, self.eps, decay, *bias]
                         for decay in (self.weight_decay, 0.0)])

    def apply(self, hyper):
        """The device's part of a step: norm, clipping, update; gradients := 0."""
        arena = self.arena
        T.grad_clip(T.sumsq(arena.grads), self.grad_clip, self.clip)
        for i, (start, end) in enumerate(((0, arena.decayed),
                                          (arena.decayed, arena.weights.size))):
            parts = [flat.view((end - start,), offset=start)
                     for flat in (arena.weights, arena.grads, self.m, self.v)]
            T.adamw(*parts, hyper.view((7,), offset=hyper.offset + 7*i), self.clip)

    def outcome(self):
        """The gradient norm of the last step, which does not count if that is not finite.

        To be asked at most once a step: on a GPU it waits until the step is done.
        """
        norm, _, finite, _ = self.clip.numpy().tolist()
        self.steps -= not finite
        return norm

    def zero_grad(self):
        """All gradients := 0 (a step has done so already)."""
        T.fill(self.arena.grads, 0.0)

    def moments(self, flat):
        """{Hugging Face name: view} of a flat moment."""
        return {name: flat.view(p.shape, p.strides, p.offset)
                for name, p in self.arena.named.items()}

    def state(self):
        """{"m.<name>", "v.<name>": array}: with the weights and `steps`, all that continuing needs.
        """
        return {f"{k}.{name}": t.numpy() for k, flat in (("m", self.m), ("v", self.v))
                for name, t in self.moments(flat).items()}

    def load_state(self, state, steps):
        """Take over arrays of `state()` and the number of updates; KeyError if one is missing."""
        for k, flat in (("m", self.m), ("v", self.v)):
            for name, t in self.moments(flat).items():
                t.set_(state[f"{k}.{name}"])
        self.steps = steps


def cosine(step, steps, lr, min_lr=0.0, warmup=0):
    """The learning rate of update `step`, which counts from 1 to `steps`.

    lr*step/warmup up to the warm-up's end, then half a cosine down to min_lr at the last step.
    """
    if step <= warmup:
        return lr*step/warmup
    progress = (step - warmup)/max(1, steps - warmup)
    return min_lr + 0.5*(lr - min_lr)*(1 + math.cos(math.pi*min(1.0, progress)))


def wsd(step, steps, lr, min_lr=0.0, warmup=0):
    """Warm-up, stable, decay: lr up to the last fifth of the steps, then a line down to min_lr.

    Source: MiniCPM (Hu et al. 2024).  A run can be stretched without a new schedule.
    """
    if step <= warmup:
        return lr*step/warmup
    left = (steps - step)/max(1, steps//5)
    return min_lr + (lr - min_lr)*min(1.0, left)


def constant(step, steps, lr, min_lr=0.0, warmup=0):
    """lr*step/warmup, then lr."""
    return lr*min(1.0, step/warmup) if warmup else lr


SCHEDULES = {"cosine": cosine, "wsd": wsd, "constant": constant}


# ---- 5. Step -------------------------------------------------------------------------------------

class Step:
    """The one way to train: any number of micro-steps, which add gradients, then an update.

    comm, if given, joins several processes: comm.all_reduce(tensor) replaces a tensor by its sum
    over all.  graph: on a GPU, record the step once and replay it (tensor.Program).
    """

    def __init__(self, model, optimizer, comm=None, graph=True):
        self.model, self.optimizer, self.comm, self.graph = model, optimizer, comm, graph
        self.sequences = 0              # trained on so far: numbers the next one
        self.loss = T.zeros((2,), device=model.device)  # of the micro-steps so far; of the update
        self.programs = {}              # by what a recording holds fixed

    @T.marked
    def micro(self, tokens, targets, order=None, first_sequence=None, counted=None):
        """Forward and backward of one micro-batch, ints [batch, seq].

        counted: targets >= 0 in the whole global batch (all micro-steps, all ranks), known before
        the step; by default this micro-batch is all of it.  first_sequence: number of row 0 in the
        whole run, which dropout depends on; by default the one after the last.
        Returns its part of the loss, a 0-d tensor that is valid until the next call; on a GPU
        nothing has been waited for, and `.item()` does.
        """
        model, c = self.model, self.model.config
        tokens, targets = np.asarray(tokens, np.int64), np.asarray(targets, np.int64)
        T.check_host("tokens", tokens, 0, c.vocab_size)
        T.check_host("targets", targets, -1, c.vocab_size)
        if tokens.shape != targets.shape:
            raise ValueError(f"loss: tokens {tokens.shape} and targets {targets.shape} differ")
        order = np.argsort(tokens, axis=None, kind="stable") if order is None else np.asarray(order)
        T.check_host("order", order.reshape(1, -1), 0, tokens.size)
        T.need(order.size == tokens.size, "micro", "order and tokens do not fit", order, tokens)
        first_sequence = self.sequences if first_sequence is None else first_sequence
        self.sequences = first_sequence + len(tokens)
        counted = max(1, int((targets >= 0).sum()) if counted is None else int(counted))
        T.refresh(model.arena.weights)          # someone may have set one since the last step
        program = self.program(Step.forward_backward, tokens.shape, c.dropout, c.recompute, c.flash,
                               model.training, model.seed)
        return program(self, tokens=tokens, targets=targets,
                       order=order.astype(np.int64, copy=False),
                       first_sequence=int(first_sequence), counted=float(counted))

    def forward_backward(self, tokens, targets, order, first_sequence, counted):
        """What a micro-step does on the device."""
        loss = self.model.loss(tokens, targets, order, first_sequence, counted, now=True)
        loss.backward()
        T.accumulate(self.loss.view((), offset=0), loss)
        return loss.detach()

    @T.marked
    def update(self, lr=None, wait=True):
        """One optimizer step -> (loss of the global batch, gradient norm before clipping).

        wait=False returns nothing, and on a GPU before anything is done; `outcome` waits.
        """
        if self.comm is not None:
            self.comm.all_reduce(self.model.arena.grads)
            self.comm.all_reduce(self.loss)
        program = self.program(Step.apply, self.optimizer.grad_clip)
        program(self, hyper=self.optimizer.hyper(lr))
        if program.replayed:
            T.wrote(self.model.arena.weights)
        return self.outcome() if wait else None

    def apply(self, hyper):
        """What an update does on the device."""
        now, last = (self.loss.view((), offset=i) for i in range(2))
        T.copy(now, last)
        T.fill(now, 0.0)
        self.optimizer.apply(hyper)

    def outcome(self):
        """(loss of the last update's global batch, its gradient norm); at most once an update."""
        return self.loss.numpy()[1].item(), self.optimizer.outcome()

    def forget(self):
        """Drop the gradients and losses of the micro-steps since the last update."""
        self.model.zero_grad()
        T.fill(self.loss, 0.0)

    def program(self, run, *key):
        """The program of a function, one for each of the values that a recording holds fixed."""
        key = run.__name__, *key
        if key not in self.programs:
            self.programs[key] = T.Program(run, self.model.device, self.graph)
        return self.programs[key]


# ---- 6. Files ------------------------------------------------------------------------------------

def config_json(c, dtype="float32"):
    """A Config as the dict of Hugging Face's config.json: Qwen3, or Llama without QK-norm."""
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "use_sliding_window": False}
    if not c.qk_norm:
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    return kind | {
        "vocab_size": c.vocab_size, "hidden_size": c.dim, "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps, "max_position_embeddings": c.max_seq,
        "tie_word_embeddings": c.tie_embeddings, "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "dtype": dtype, "torch_dtype": dtype,
        # both spellings: transformers 5 reads the second, everything older the first
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}}


# What xtrain can do of the fields of config.json; an absent field takes the first value.
SUPPORTED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
             "use_sliding_window": (False,), "rope_type": ("default",)}


def config_from_json(j):
    """A Config from config.json's dict; Refused names the field that xtrain cannot do."""
    rope, scaling = j.get("rope_parameters") or {}, j.get("rope_scaling") or {}
    kinds = [d.get("rope_type", d.get("type")) for d in (scaling, rope)]
    found = {"rope_type": next((k for k in kinds if k not in (None, "default")), None)} | j
    if j.get("model_type") not in ("qwen3", "llama"):
        raise Refused(f"model_type {j.get('model_type')!r} is not 'qwen3' or 'llama'")
    for field, good in SUPPORTED.items():
        if found.get(field) not in (None, *good):
            raise Refused(f"{field} {found[field]!r} is not supported, only {good[0]!r}")
    names = {"vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn",
             "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    missing = [name for name in names if name not in j]
    if missing:
        raise Refused(f"{', '.join(missing)} missing")
    return Config(
        **{ours: j[theirs] for theirs, ours in names.items()}, qk_norm=j["model_type"] == "qwen3",
        kv_heads=j.get("num_key_value_heads"), head_dim=j.get("head_dim"),
        tie_embeddings=j.get("tie_word_embeddings", False), norm_eps=j.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or j.get("rope_theta") or 10000.0,
        max_seq=j.get("max_position_embeddings", 1024))


# A dtype in the words of config.json and of safetensors.
FILE_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def save_pretrained(model, folder, dtype="f32", tokenizer=None):
    """Write config.json and model.safetensors, which transformers' from_pretrained opens.

    dtype: "f32" keeps every bit, "bf16" rounds to nearest even.  ValueError for others.  With a
    tokenizer its files too, and generation_config.json, which says what ends a text.
    """
    if dtype not in FILE_DTYPES:
        raise ValueError(f"save_pretrained: dtype {dtype!r} is not one of {', '.join(FILE_DTYPES)}")
    os.makedirs(folder, exist_ok=True)
    write_json(os.path.join(folder, "config.json"), config_json(model.config, FILE_DTYPES[dtype]))
    weights = {name: T.packed(T.cast(p, dtype)) for name, p in model.parameters().items()}
    save_arrays({name: t.bits() for name, t in weights.items()},
                os.path.join(folder, "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save(folder)
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
        write_json(os.path.join(folder, "generation_config.json"), ends)


def save_arrays(arrays, path):
    """Write {name: array} as a safetensors file; uint16 is the bits of bf16.

    The header's length, the header as JSON, then all bytes.  By hand, since safetensors' NumPy
    writer knows no bf16 and hides the system's error on a full disk.  One metadata key, which
    transformers asks for, and sorted names: equal states are equal files.
    """
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, x in sorted(arrays.items()):
        header[name] = {"dtype": {"float32": "F32", "uint16": "BF16"}[x.dtype.name],
                        "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" "*(-len(text) % 8)               # tensors start at a multiple of 8 bytes
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, x in sorted(arrays.items()):
            f.write(np.ascontiguousarray(x).data)


def weight_files(folder):
    """The safetensors files of a folder: model.safetensors if it is there, else its index's."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index) and not os.path.exists(os.path.join(folder, "model.safetensors")):
        try:
            with open(index, encoding="utf-8") as f:
                names = sorted(set(json.load(f)["weight_map"].values()))
            return [os.path.join(folder, name) for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise Refused(f"{index}: not an index of weights ({type(e).__name__}: {e})") from None
    return [os.path.join(folder, "model.safetensors")]


def read_safetensors(path):
    """Yield (name, array) of a safetensors file; bf16 and fp16 come as fp32.

    Through deserialize, since safetensors' NumPy loader knows no bf16.
    """
    try:
        with open(path, "rb") as f:
            entries = safetensors.deserialize(f.read())
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; a model's folder holds its weights as "
                      "model.safetensors beside config.json") from None
    except safetensors.SafetensorError as e:
        raise Refused(f"{path}: not a whole safetensors file ({e}): copy it again, or take another "
                      "checkpoint") from None
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}
    for name, entry in entries:
        if entry["dtype"] not in kinds:
            raise Refused(f"{path}: {name} is {entry['dtype']}, not one of {', '.join(kinds)}")
        values = np.frombuffer(entry["data"], kinds[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        yield name, values.astype(np.float32)


def load_pretrained(folder, device=None, dtype="f32"):
    """A Decoder from a folder with config.json and safetensors, Qwen3's or Llama's.

    Needs no tokenizer.  Refused names tensors that are missing, unexpected or of another shape.
    """
    path = os.path.join(folder, "config.json")
    try:
        with open(path) as f:
            config = config_from_json(json.load(f))
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; give a checkpoint (of a run: its step-* folder) or a "
                      "Hugging Face folder") from None
    except json.JSONDecodeError as e:
        raise Refused(f"{path}: not JSON ({e})") from None
    except (AttributeError, TypeError, ValueError) as e:
        raise Refused(f"{path}: {'' if isinstance(e, Refused) else 'malformed: '}{e}") from None
    model = Decoder(config, device, dtype)
    waiting = model.parameters()
    for file in weight_files(folder):
        for name, values in read_safetensors(file):
            # a tied head may be written out too, old Llamas carry RoPE's frequencies
            if name == "lm_head.weight" and config.tie_embeddings or name.endswith(".inv_freq"):
                continue
            if name not in waiting:
                raise Refused(f"{file}: tensor {name} has no place in the model of config.json")
            p = waiting.pop(name)
            if values.shape != p.shape:
                raise Refused(f"{file}: {name} is {values.shape}, config.json wants {p.shape}")
            p.set_(values)
    if waiting:
        raise Refused(f"{folder}: {len(waiting)} tensors missing, first {next(iter(waiting))}")
    return model.eval()


# ---- 7. Tokenizer --------------------------------------------------------------------------------
# One mechanism, a byte-level BPE of the `tokenizers` library: `bpe:N` learns its merges, `gpt2` has
# GPT-2's, `bytes` has none.  Every byte string has ids, so that there is no unknown token.

END_OF_TEXT = "<|endoftext|>"       # separates documents; the last id, made by no text
PIECE, LONGEST = 1 << 12, 1 << 15   # characters of a piece: wanted, and at most; 4,096 encode 15 %
BATCH = 1 << 19                     # faster than 65,536.  Characters encoded in parallel


def byte_symbols():
    """The 256 characters that stand for the bytes in a byte-level BPE's files (GPT-2's choice).

    A printable byte is its own Latin-1 character; the others take U+0100, U+0101, ... in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256))
    return [chr(b) if b in printable else next(others) for b in range(256)]


SYMBOLS = byte_symbols()
BYTE_OF = {symbol: b for b, symbol in enumerate(SYMBOLS)}

# No pre-token of GPT-2, Qwen or Llama holds a character other than space followed by a space, or a
# letter or digit followed by a line end or punctuation (which a line end may stick to).  Not every
# script writes spaces.
SAFE_CUT = re.compile(r"[^\s](?= )|[^\W_](?=[\r\n,.、。，！？])")


def pieces(blocks, separator=END_OF_TEXT):
    """Cut text into pieces that can be encoded one by one -> yields (text, ends a document).

    blocks: iterable of str; where it is cut says nothing.  separator: what documents are split at,
    and left out; None for one document.  Documents of white space alone are left out.  A document
    is cut after 4,096 characters at the first place that no token crosses, so that pieces and whole
    have the same ids; only 32,768 characters without such a place are cut anywhere.
    """
    blocks, buffer, at, whole = iter(blocks), "", 0, False
    width, inside = len(separator or ""), False
    while True:
        # a decision needs to see as far as it may reach, else it would depend on the blocks
        while not whole and len(buffer) - at < LONGEST + width:
            block = next(blocks, None)
            buffer, at, whole = buffer[at:] + (block or ""), 0, block is None
        if at == len(buffer):
            break
        wanted, end = at + PIECE, -1
        if separator:
            end = buffer.find(separator, at, wanted + width)
        if end < 0:
            most = min(at + LONGEST, len(buffer))
            found = SAFE_CUT.search(buffer, wanted, most) if wanted < most else None
            cut = found.end() if found else most
            end = buffer.find(separator, wanted, cut + width - 1) if separator else -1
        text, ends = (buffer[at:cut], False) if end < 0 else (buffer[at:end], True)
        at += len(text) + width*ends
        if inside or not text.isspace() and text:
            yield text, ends
            inside = not ends
    if inside:
        yield "", True


class Tokenizer:
    """Text <-> ids, by a byte-level BPE.

    kind         "bpe:600", "gpt2", "bytes"
    vocab_size   number of ids, end of text included (the highest id + 1)
    eot          id of end of text, which no text encodes to; None if a loaded one has none
    pieces       the bytes of each id; b"" for end of text and other special ones
    lengths      int64 [vocab_size], how many they are: what bits per byte is counted with
    """

    def __init__(self, core, kind, eot):
        """core: a tokenizers.Tokenizer with byte-level symbols; KeyError if they are not."""
        core.encode_special_tokens = True       # text that spells a special token stays text
        self.core, self.kind, self.eot = core, kind, eot
        vocab, added = core.get_vocab(), core.get_added_tokens_decoder()
        self.vocab_size = max(vocab.values()) + 1
        self.pieces = [b""]*self.vocab_size
        for symbol, i in vocab.items():
            if i not in added:
                self.pieces[i] = bytes(BYTE_OF[c] for c in symbol)
            elif not added[i].special:
                self.pieces[i] = symbol.encode()
        self.lengths = np.array([len(piece) for piece in self.pieces], np.int64)

    # -- making one

    @staticmethod
    def parse(spec):
        """A `--tokenizer` string -> ("bpe", ids in all), ("gpt2", None) or ("bytes", None)."""
        found = re.fullmatch("bpe:([0-9]{1,9})", spec)
        size = int(found[1]) if found else None
        if spec in ("gpt2", "bytes") or size and 257 <= size <= 1_000_000:
            return (spec if size is None else "bpe"), size
        raise Refused(f"--tokenizer {spec!r}: give gpt2, bytes, or bpe:N with N from 257 to "
                      "1000000 ids in all")

    @classmethod
    def make(cls, spec, texts=()):
        """The tokenizer of a `--tokenizer` string; bpe:N learns from texts, an iterable of str."""
        kind, size = cls.parse(spec)
        return cls.train(texts, size) if kind == "bpe" else getattr(cls, kind)()

    @classmethod
    def assemble(cls, kind, vocab=None, merges=None, trainer=None, texts=()):
        """Vocabulary {symbols: id} and merges, given or learned; end of text gets the last id."""
        core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
        core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = tokenizers.decoders.ByteLevel()
        if trainer:
            core.train_from_iterator(texts, trainer)
        core.add_special_tokens([END_OF_TEXT])
        return cls(core, kind, core.token_to_id(END_OF_TEXT))

    @classmethod
    def train(cls, texts, size):
        """Learn a BPE of `size` ids from texts, an iterable of str that is read once.

        Equal texts give equal ids.  Pairs seen once are not merged: a small corpus gives fewer ids,
        which is said.  Memory follows the number of different words, not the length of the text.
        """
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size - 1, min_frequency=2, show_progress=False, initial_alphabet=SYMBOLS)
        made = cls.assemble(f"bpe:{size}", trainer=trainer, texts=texts)
        if made.vocab_size < size:
            say(f"bpe:{size}: the corpus has too few different words, going on with "
                f"{made.vocab_size} ids")
        return made

    @classmethod
    def bytes(cls):
        """The id of a byte is its value, 256 is end of text."""
        return cls.assemble("bytes", {symbol: b for b, symbol in enumerate(SYMBOLS)}, [])

    @classmethod
    def gpt2(cls):
        """GPT-2's 50257 ids, from tiktoken's ranks: the two parts that BPE merges into each token
        are what its bytes come to with the merges before it."""
        ranks = gpt2_ranks()
        symbols = {token: "".join(SYMBOLS[b] for b in token) for token in ranks}
        merges = []
        for token in sorted((t for t in ranks if len(t) > 1), key=ranks.get):
            left, right = bpe_parts(token, ranks)
            merges.append((symbols[left], symbols[right]))
        return cls.assemble("gpt2", {symbols[t]: rank for t, rank in ranks.items()}, merges)

    # -- text and ids

    def encode(self, text):
        """The ids of a text, a list; end of text is never one of them."""
        return self.core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts):
        """The ids of several texts, encoded in parallel."""
        batch = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def stream(self, texts):
        """Encode what `pieces` yields in bounded memory: yields (ids, text, ends a document).

        ids: int64 array; end of text closes it where a document ends.
        """
        waiting, characters = [], 0
        for piece in itertools.chain(texts, [None]):
            if piece is None or characters >= BATCH:
                for ids, (text, ends) in zip(self.encode_batch(t for t, _ in waiting), waiting):
                    yield np.array(ids + [self.eot]*ends, np.int64), text, ends
                waiting, characters = [], 0
            if piece is not None:
                waiting.append(piece)
                characters += len(piece[0])

    def decode_bytes(self, ids):
        """The bytes of ids; special ones, and ids that do not exist, have none."""
        return b"".join(self.pieces[i] for i in ids if 0 <= i < self.vocab_size)

    def decode(self, ids):
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    @property
    def digest(self):
        """SHA-256 (hex) of what each id means and of the merges: equal for equal tokenizers."""
        # not of tokenizer.json's text, which another version of the library may write otherwise
        merges = json.loads(self.core.to_str())["model"]["merges"]
        merges = "\n".join(m if isinstance(m, str) else " ".join(m) for m in merges)
        meaning = self.lengths.tobytes() + b"".join(self.pieces)
        return hashlib.sha256(meaning + f"{self.eot} {merges}".encode()).hexdigest()

    # -- files

    def save(self, folder):
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer opens.
        """
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "xtrain_kind": self.kind,
                  "add_prefix_space": False, "clean_up_tokenization_spaces": False,
                  "model_max_length": 10**30}
        if self.eot is not None:
            end = self.core.id_to_token(self.eot)
            config |= {"bos_token": end, "eos_token": end}
        os.makedirs(folder, exist_ok=True)
        self.core.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            f.write(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder):
        """The tokenizer of a folder's tokenizer.json, any byte-level BPE; Refused if it is not."""
        path = os.path.join(folder, "tokenizer.json")
        try:
            with open(path, encoding="utf-8") as f:
                text = f.read()
            check_byte_level(json.loads(text))
            core = tokenizers.Tokenizer.from_str(text)
            config = load_if_there(os.path.join(folder, "tokenizer_config.json"))
            end = config.get("eos_token")
            end = end.get("content") if isinstance(end, dict) else end
            eot = core.token_to_id(END_OF_TEXT)
            if eot is None and end:
                eot = core.token_to_id(end)
            return cls(core, config.get("xtrain_kind", f"bpe:{core.get_vocab_size()}"), eot)
        except FileNotFoundError:
            raise Refused(f"{path}: no such file; give a folder with a tokenizer.json") from None
        # what `tokenizers` raises is a plain Exception
        except Exception as e:
            raise Refused(f"{path}: not a byte-level BPE that can be used "
                          f"({type(e).__name__}: {one_line(e)}); GPT-2's, Qwen's and Llama 3's "
                          "are, SentencePiece ones are not") from None


def one_line(error):
    """The text of an exception without its line breaks."""
    return " ".join(str(error).split())


def load_if_there(path):
    """A JSON file's object, or {} where there is none."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def check_byte_level(j):
    """ValueError unless tokenizer.json's object j is a BPE over bytes."""
    model, before = j.get("model") or {}, j.get("pre_tokenizer") or {}
    steps = [before, *before.get("pretokenizers", [])]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"its model is {model['type']!r}")
    if not any(step.get("type") == "ByteLevel" for step in steps):
        raise ValueError("its pre_tokenizer has no ByteLevel")


def gpt2_ranks():
    """{bytes of a token: id} of GPT-2, from tiktoken's cache or its download."""
    import tiktoken                 # takes a while, and only `gpt2` needs it
    try:
        return tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as e:          # whatever requests, DNS, a proxy or a damaged file may raise
        site = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
        files = " and ".join(f"{name} as {hashlib.sha1((site + name).encode()).hexdigest()}"
                             for name in ("vocab.bpe", "encoder.json"))
        raise Refused(
            f"--tokenizer gpt2: its vocabulary is not cached and cannot be fetched "
            f"({type(e).__name__}); set TIKTOKEN_CACHE_DIR to a folder that holds, from {site}, "
            f"{files} (the SHA-1 of the address), or use bpe:N or bytes") from None


def bpe_parts(token, ranks):
    """The two tokens that `token` is merged from, by the merges that rank before it."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, math.inf) for a, b in zip(parts, parts[1:])]
        i = pairs.index(min(pairs))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


# ---- 8. Evaluation -------------------------------------------------------------------------------

@T.marked
def evaluate(model, tokens, lengths, seq, batch=8, limit=None):
    """Held-out loss -> (nats per token, bits per byte).

    tokens: int array [n], cut into windows that do not overlap: each token but the first is
    predicted once, from those of its window.  lengths: bytes of each id (Tokenizer.lengths).
    limit: predict only the first so many.  The last batch is filled up with targets of -1, so that
    all have one shape; windows are shorter than seq only where there are fewer tokens.  Dropout and
    recording are off; the model's mode is put back.  Refused if there is nothing to predict.

    Bits per byte = (sum of nats) / (ln 2 · bytes of the targets), comparable between tokenizers;
    NaN if the targets have no bytes (end of text has none, its nats count).
    """
    tokens = tokens[:None if limit is None else limit + 1]
    count = len(tokens) - 1
    if count < 1:
        raise Refused(f"evaluation: {len(tokens)} tokens are too few, at least 2 are needed "
                      "(one to read, one to predict): give more text, or a larger --eval-tokens")
    seq = min(seq, count)
    batch = min(batch, -(-count//seq))
    nats, size, training = 0.0, 0, model.training
    model.eval()
    try:
        for start in range(0, count, batch*seq):
            window = np.asarray(tokens[start:start + batch*seq + 1], np.int64)
            inputs, targets = (np.full(batch*seq, fill, np.int64) for fill in (0, -1))
            n = len(window) - 1
            inputs[:n], targets[:n] = window[:-1], window[1:]
            with A.no_grad():
                loss = model.loss(inputs.reshape(batch, seq), targets.reshape(batch, seq))
            nats += loss.item()*n
            size += int(lengths[window[1:]].sum())
    finally:
        model.train(training)
    return nats/count, nats/(math.log(2)*size) if size else math.nan


# ---- 9. Generation -------------------------------------------------------------------------------

PREFILL = 512                       # tokens of a prompt at a time: bounds the activations' memory


def choose(logits, u, temperature, top_k=None, top_p=1.0):
    """One id of logits [vocab], by u, a number uniform in [0, 1); temperature 0 is the argmax.

    Softmax of logits/temperature; of that the top_k likeliest ids (all that tie with the last);
    of those, renormalised, the fewest whose probabilities reach top_p (nucleus sampling; Holtzman
    et al., 2020), at least one.  The order is transformers'.  In float64, on the host.
    """
    top = logits.max()
    if not math.isfinite(top):
        raise Refused("the model's logits are not finite: its weights are damaged or its training "
                      "diverged; take an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):            # a tiny temperature: -inf is what it means
        x = (logits.astype(np.float64) - top)/temperature
    if top_k is not None and top_k < x.size:
        x[x < np.partition(x, -top_k)[-top_k]] = -np.inf
    p = np.exp(x)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]     # what the likelier ids reach without this one
        p[order[before >= top_p]] = 0
    total = np.cumsum(p)
    # The first id whose cumulative probability exceeds u; rounding must not lead past the last one
    at = min(u*total[-1], np.nextafter(total[-1], 0))
    return int(np.searchsorted(total, at, side="right"))


def uniforms(seed, index):
    """Endless numbers in [0, 1), 53 bits each: the stream of sample `index` (Philox4x64)."""
    words = np.random.Philox(key=np.array([seed, index], np.uint64))
    while True:
        yield (words.random_raw() >> 11)*2.0**-53


def generate_batch(model, ids, max_new, temperature=1.0, top_k=None, top_p=1.0, seed=0,
                   indices=(0,), stop=None):
    """Continue the prompt `ids` once for each of `indices`, all together; see `choose`.

    Yields lists, at most max_new: the next id of each sample, or None where one has ended.  A
    sample ends before the id `stop`, which is not part of it.  Sample i depends on seed and i
    alone, not on what else is computed along with it.
    """
    if not len(ids):
        raise Refused("generate: the prompt is empty: start from end of text")
    cache, going = model.cache(len(indices), len(ids) + max_new), [True]*len(indices)
    streams = [uniforms(seed, i) for i in indices]
    for start in range(0, len(ids), PREFILL):
        logits = model.decode([ids[start:start + PREFILL]], cache)
    logits = np.repeat(logits.numpy(), len(indices), 0)
    for n in range(max_new):
        new = [choose(row, next(u), temperature, top_k, top_p) for row, u in zip(logits, streams)]
        going = [on and i != stop for on, i in zip(going, new)]
        if not any(going):
            return
        yield [i if on else None for on, i in zip(going, new)]
        if n + 1 < max_new:     # rows that have ended are computed on and not looked at
            logits = model.decode(np.array(new)[:, None], cache).numpy()


def generate(model, ids, max_new, temperature=1.0, top_k=None, top_p=1.0, seed=0, index=0,
             stop=None):
    """Yield at most max_new ids that continue the prompt `ids`: sample `index` of `seed`.

        for i in generate(model, tokenizer.encode("Once"), 100, stop=tokenizer.eot): ...
    """
    for new in generate_batch(model, ids, max_new, temperature, top_k, top_p, seed, (index,), stop):
        yield new[0]


# ---- 10. Checkpoints -----------------------------------------------------------------------------
# A checkpoint `step-00000100` is a Hugging Face folder with two files more: optimizer.safetensors
# (m.<name>, v.<name>) and state.json (the step, the settings, a sha256 of every other file).

def publish(path, write):
    """Have write(temporary path) make a file or folder, then give it its name in one step.

    The temporary name is beside it and starts with a dot.  Everything is on the disk before the
    rename, so whoever sees `path` sees all of it, even after a power cut.
    """
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        write(temporary)
        for place, _, files in os.walk(temporary):
            for file in files:
                flush(os.path.join(place, file))
        flush(temporary)
        if os.path.isdir(path):
            discard(path)
        os.replace(temporary, path)
        flush(folder)
    except BaseException as e:
        if isinstance(e, OSError):
            e.filename = e.filename or path         # write() alone does not know where
        remove(temporary)
        raise


def flush(path):
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path):
    """Delete a file or folder if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)                 # of a link itself, not what it names


def discard(path):
    """Delete a folder, first renamed to begin with a dot: half of it never bears its name."""
    folder, name = os.path.split(os.path.abspath(path))
    dying = os.path.join(folder, f".{name}.dying")
    remove(dying)
    os.rename(path, dying)
    remove(dying)


def write_json(path, value):
    """One JSON file, indented, ending in a newline."""
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=2) + "\n")


def sha256(path):
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def seal(state):
    """The SHA-256 of a state without its own seal: notices a changed byte in state.json."""
    text = json.dumps({k: v for k, v in state.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def save_checkpoint(run, model, optimizer, tokenizer, state):
    """Write the folder run/step-%08d, step = state["step"]; returns its path.

    tokenizer may be None.  state: whatever JSON can hold; `load_state` gives it back.
    """
    def write(folder):
        save_pretrained(model, folder, tokenizer=tokenizer)
        save_arrays(optimizer.state(), os.path.join(folder, "optimizer.safetensors"))
        sums = {name: sha256(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
        whole = state | {"sha256": sums}
        write_json(os.path.join(folder, "state.json"), whole | {"seal": seal(whole)})

    path = os.path.join(run, f"step-{state['step']:08d}")
    publish(path, write)
    return path


def load_state(folder):
    """The state that save_checkpoint wrote; Refused if any file of the folder is damaged."""
    path = os.path.join(folder, "state.json")
    instead = "resume from another step-* folder, or start from its weights with --init-from"
    try:
        with open(path, encoding="utf-8") as f:
            state = json.load(f)
        intact = seal(state) == state["seal"]
    except FileNotFoundError:
        raise Refused(f"{folder}: no state.json, so there is no training to resume: --init-from "
                      "starts a new run from its weights") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise Refused(f"{path}: damaged: {instead}")
    for name, good in state["sha256"].items():
        file = os.path.join(folder, name)
        if not os.path.exists(file) or sha256(file) != good:
            raise Refused(f"{file}: damaged or missing (its SHA-256 differs from the one in "
                          f"state.json): {instead}")
    return state


def load_optimizer(optimizer, folder, steps):
    """Give an optimizer the moments of a checkpoint and its number of updates."""
    path = os.path.join(folder, "optimizer.safetensors")
    try:
        optimizer.load_state(dict(read_safetensors(path)), steps)
    except KeyError as e:
        raise Refused(f"{path}: {e} is missing") from None


def prune(run, keep, best=None):
    """Delete all but the newest `keep` checkpoints of a run and the step `best`."""
    steps = checkpoints(run)
    for step in list(steps)[:-keep]:
        if step != best:
            discard(steps[step])


# ---- 11. Command lines --------------------------------------------------------------------------
# What train.py and sample.py share: a dataclass of settings is the command line, bad input is one
# line on stderr, and an exit code says how it ended.

def setting(default, text, unit="", group="", **limits):
    """A field of a dataclass of settings.

    text is the help, unit what the number counts.  limits: choices (a tuple), least, most (both
    allowed), above, below (both not).  The annotation is int, float, str or bool; a bool is the
    pair --name and --no-name.
    """
    about = {"help": text, "unit": unit, "group": group, **limits}
    return dataclasses.field(default=default, metadata=about)


# Our flags, and what they are called in nanoGPT, llm.c, transformers and mlx-lm.
OTHER_NAMES = {
    "--lr": ("learning-rate",), "--batch": ("batch-size", "micro-batch-size"),
    "--seq": ("block-size", "seq-len", "context-length"), "--steps": ("max-iters", "iters"),
    "--layers": ("n-layer", "num-layers"), "--heads": ("n-head", "num-heads"),
    "--dim": ("n-embd", "hidden-size"), "--accum-steps": ("gradient-accumulation-steps",),
    "--data": ("dataset", "train-file"),
    "--max-new": ("max-tokens", "max-new-tokens", "tokens", "length"),
    "--num": ("num-samples", "n-samples")}


class Parser(argparse.ArgumentParser):
    """argparse that refuses in xtrain's way: one line, the nearest flag named."""

    def error(self, message):
        wanted = re.fullmatch(r"argument (\S+): invalid (.+) value: '(.*)'", message)
        message = f"{wanted[1]} {wanted[3]}: wants a {wanted[2]}" if wanted else message
        raise Refused(f"{message} (--help lists all flags)")


def flag(name):
    return "--" + name.replace("_", "-")


def whole_or_finite(kind):
    """A converter for argparse: int, or a float that is neither nan nor infinite."""
    def convert(text):
        value = kind(text)
        if not math.isfinite(value):
            raise ValueError
        return value
    convert.__name__ = {int: "whole number", float: "finite number"}[kind]
    return convert


def parser_of(settings, program, description, epilog=""):
    """The Parser of a dataclass of settings: one flag a field, grouped, defaults in the help."""
    parser = Parser(program, description=description, epilog=epilog, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {}
    for f in dataclasses.fields(settings):
        about = f.metadata
        group = groups.setdefault(about["group"], None) or parser.add_argument_group(about["group"])
        groups[about["group"]] = group
        text = about["help"] + ("" if f.default in (None, "") else f" (default {f.default})")
        if about["unit"]:
            text = f"{about['unit']}: {text}"
        # SUPPRESS: the namespace then holds what was given and nothing else, so that presets, files
        # and the settings of a resumed run can come in between
        more = {"dest": f.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if f.type is bool:
            group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, **more)
        elif "choices" in about:
            group.add_argument(flag(f.name), choices=about["choices"], **more)
        else:
            kind = f.type if f.type is str else whole_or_finite(f.type)
            group.add_argument(flag(f.name), type=kind, metavar=f.type.__name__.upper(), **more)
    return parser


def parse(settings, parser, argv, source=""):
    """{field: value} of the flags that argv gives, each checked; Refused names what is wrong.

    source says where the flags come from if not from the command line.
    """
    try:
        given, unknown = parser.parse_known_args(argv)
    except Refused as e:
        raise Refused(f"{source}{e}") from None
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        name = unknown[0].split("=")[0]
        plain = name.lstrip("-").replace("_", "-")
        near = [ours for ours, others in OTHER_NAMES.items() if plain in others and ours in known]
        near += difflib.get_close_matches(name, known, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}? (--help lists all)" if near else "--help lists all flags"
        what = "unknown flag {}" if name.startswith("-") else "{} belongs to no flag"
        raise Refused(f"{source}{what.format(name)}: {hint}")
    fields = {f.name: f for f in dataclasses.fields(settings)}
    for name, value in vars(given).items():
        if value == "" and fields[name].metadata["unit"] == "path":
            raise Refused(f"{source}{flag(name)} is empty: give a path, or leave it out")
        check_limits(source + flag(name), value, fields[name].metadata)
    return vars(given)


LIMITS = {"least": (operator.ge, ">="), "above": (operator.gt, ">"), "most": (operator.le, "<="),
          "below": (operator.lt, "<")}


def check_limits(name, value, about):
    """Refused unless the value lies within the limits of its setting."""
    limits = [(*LIMITS[word], about[word]) for word in LIMITS if word in about]
    if not all(holds(value, bound) for holds, _, bound in limits):
        wanted = " and ".join(f"{sign} {bound}" for _, sign, bound in limits)
        raise Refused(f"{name} {value}: must be {wanted}; it is: {about['help']}")


def toml_flags(settings, path):
    """The settings of a TOML file as flags, so that one parser checks both."""
    try:
        with open(path, "rb") as f:
            values = tomllib.load(f)
    except OSError as e:
        raise Refused(f"--config {path}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise Refused(f"--config {path}: not TOML ({e})") from None
    known = {f.name: f.type for f in dataclasses.fields(settings) if f.name != "config"}
    flags, seen = [], set()
    for key, value in values.items():
        name = key.replace("-", "_")
        kind = known.get(name)
        if kind is None:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "--help lists all, with - for _"
            raise Refused(f"--config {path}: unknown setting {key}: {hint}")
        if name in seen or "\0" in str(value):
            raise Refused(f"--config {path}: {key} is there twice, or has a zero byte in it")
        if (kind is bool) != isinstance(value, bool) or not isinstance(value, (int, float, str)):
            wanted = "true or false" if kind is bool else "a number or a string"
            raise Refused(f"--config {path}: {key} must be {wanted}")
        seen.add(name)
        # with =, so that -1 is a value and not a flag
        flags.append(f"{flag(name)}={value}" if kind is not bool else
                     flag(name if value else f"no_{name}"))
    return flags


def checkpoints(folder, whole=True):
    """{step: path} of a run folder's checkpoints, of those that are whole or all, in rising order.

    A folder gets its name when it is complete (it is written under one that starts with a dot); a
    copy that was cut short shows in what it lacks.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    found = {int(m[1]): os.path.join(folder, m[0])
             for m in (re.fullmatch(r"step-(\d{8,})", name) for name in names) if m}
    return {step: path for step, path in sorted(found.items())
            if not whole or all(os.path.exists(os.path.join(path, name))
                                for name in ("config.json", "model.safetensors"))}


def find_model(path=None, runs="runs"):
    """The folder with config.json that a path means: itself, or the newest checkpoint of a run.

    Without a path, the newest checkpoint under `runs`.  Refused says what was looked for.
    """
    if path is None:
        names = os.listdir(runs) if os.path.isdir(runs) else ()
        found = [p for name in names for p in checkpoints(os.path.join(runs, name)).values()]
        newest = max(found, key=os.path.getmtime, default=None)
        if newest is None:
            raise Refused(f"no checkpoint under {runs}/: train one with 'python train.py', or name "
                          "a folder with --model")
        return newest
    if os.path.exists(os.path.join(path, "config.json")):
        return path
    if steps := checkpoints(path):
        return list(steps.values())[-1]
    if not os.path.isdir(path):
        raise Refused(f"{path}: no such folder" if not os.path.exists(path) else
                      f"{path}: is a file, wants a run, a checkpoint or a Hugging Face folder")
    raise Refused(f"{path}: holds neither a checkpoint (step-00000001, …) nor a config.json")


class Machine(typing.NamedTuple):
    """Where a run computes."""
    device: str
    dtype: str
    core: str           # what computes, a CPU's build or a GPU with its libraries: with another,
                        # results differ in the last bits
    name: str           # for people
    peak: float         # FLOP/s, measured
    how: str            # by what


def machine(device="auto", dtype="auto", threads=None):
    """The Machine that --device, --dtype and --threads mean; Refused if it is not there."""
    if threads is not None:
        T.set_threads(threads)
    if find_device(device, dtype) == "cuda":
        return gpu_machine(dtype)
    dtype = fast_dtype() if dtype == "auto" else dtype
    count = T.threads()
    name = f"cpu ({T.ISA}, {count} thread{'s' if count > 1 else ''})"
    return Machine("cpu", dtype, f"cpu {T.ISA}", name, T.peak_flops(dtype),
                   "multiply-adds in registers")


def find_device(device="auto", dtype="auto"):
    """"cpu" or "cuda", as --device asks; Refused if it is not there or cannot do the dtype.

    auto is the GPU if there is one; XTRAIN_DEVICE can say otherwise.
    """
    device = os.environ.get("XTRAIN_DEVICE") or device if device == "auto" else device
    if device == "cpu":
        return "cpu"
    try:
        gpu = T.cuda()
    except T.NoDevice as e:
        if device == "cuda":
            raise Refused(f"--device cuda: {e}") from None
        if isinstance(e, T.Unusable):           # somebody paid for a card and would not get it
            say(f"computing on the CPU: {e}")
        return "cpu"
    if dtype == "bf16" and not T.has_bf16("cuda"):
        raise Refused(f"--dtype bf16: the {gpu.name} (compute capability {gpu.capability/10}) "
                      f"multiplies no bf16, which begins with {T.TENSOR_CORES/10}: use --dtype f32")
    return "cuda"


def gpu_machine(dtype):
    """The Machine of the GPU; auto is bf16 on every card that has it."""
    gpu = T.cuda()
    dtype = ("bf16" if T.has_bf16("cuda") else "f32") if dtype == "auto" else dtype
    what = f"{gpu.name}, compute capability {gpu.capability/10}"
    driver = T.version_text(T.driver_version())
    return Machine("cuda", dtype, f"cuda {what}, {gpu.libraries}",
                   f"cuda ({what}, {gpu.memory_size/2**30:.0f} GB, driver for CUDA {driver}, "
                   f"{gpu.libraries})", T.peak_flops(dtype, device="cuda"),
                   "a product of 8,192 x 8,192 matrices")


def fast_dtype():
    """bf16 where this processor multiplies it clearly faster than fp32, as just measured; else f32.

    AMX: 13 times as fast.  AVX-512 BF16: twice on AMD's Zen 4, half as fast on Intel's.
    """
    if not T.core.info()["bf16"]:
        return "f32"
    return "bf16" if T.peak_flops("bf16") > 1.5*T.peak_flops() else "f32"


def run_dtype(folder, device="cpu"):
    """What the run that wrote a checkpoint computed in, if the device can; f32 for other people's
    folders."""
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
            dtype = json.load(f)["versions"]["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return "f32"
    return dtype if dtype in T.FLOATS and T.has_bf16(device) else "f32"


def peak_memory(device="cpu"):
    """Most memory held at once, in bytes: of the process (ru_maxrss), or handed out on the GPU."""
    if device != "cpu":
        return T.cuda().peak
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most*1024


def exit_code(main, argv, less="a smaller --batch, --seq or model, or --recompute"):
    """Run main(argv) and turn how it ended into an exit code, with one line on stderr.

    0 fine (or what main returns); 2 bad input; 4 out of memory or disk; 130 interrupted.  less:
    what needs less memory, unless the exception says so itself, as `less`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:              # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")    # where UTF-8 is not to be had
    try:
        return main(argv) or 0
    except (Refused, T.NoDevice) as e:
        return complain(e, 2)
    except KeyboardInterrupt:
        return complain("interrupted", 130)
    except (MemoryError, RuntimeError) as e:
        if not T.out_of_memory(e):
            raise
        less, why = getattr(e, "less", less), f" ({e})" if str(e) else ""
        return complain(f"out of memory{why}: {less} needs less", 4)
    except BrokenPipeError:                     # the reader of a pipe has gone (| head): no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        where = f"{e.filename}: " if e.filename else ""
        return complain(f"{where}{e.strerror or e}" + (": free some space" if full else ""),
                        4 if full else 2)


def terminal():
    """Can stderr show a bar that is drawn over and over?"""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def complain(message, code):
    """One line on stderr; returns the exit code."""
    print("xtrain: error: " + one_line(message), file=sys.stderr, flush=True)
    return code
