"""test_all: every test of xtrain, on oracles of its own.

    pytest test_all.py                 all that needs neither a GPU nor torch, about a minute
    pytest test_all.py -m smoke        the short subset (10 s) that every instruction set also runs
    pytest test_all.py -m parity       against transformers (skipped where it is not installed;
                                       a failure instead if XTRAIN_REQUIRE_PARITY is set)
    XTRAIN_SLOW=1 pytest test_all.py -m slow      exp over every float, a run killed 30 times

How it reads, top to bottom:

 1. Tools             tensors in and out, errors relative to the largest, finite differences
 2. Oracles           the formula of each operation, of Philox and of the whole decoder, in float64
 3. Operation cases   one line a case; each runs forward, backward and three kinds of fan-out
 4. The table         every row documented, benchmarked and tested; exp, Philox, dropout, casts
 5. Tape              no_grad, recompute, repeated backward, operators, errors that name shapes
 6. Model             presets, gradients of every parameter, mutation, overfit, files, Step
 7. Parity            logits, loss, gradients and 20 AdamW steps against transformers
 8. Bitwise promises  threads, seeds, recompute, dropout 0, accumulation of 1, resume
 9. Accumulation      4x4 = 16x1 = 8x2 with dropout and ignored targets; flash = composed
10. bf16              rounded once, the rule of errors, exact sums, bitwise promises, the model
11. Memory            empty regions, page faults, a constant pool, padding that stays zero
12. Instruction sets  the smoke subset once more for every build this machine can run
13. Data              tokenizers, chunk edges, refusals, the cache, the loader, evaluation
14. Generation        cache, sampling, greedy parity, sample.py and what it refuses
15. Training          the command: resume, signals, kills, damage, bad input, what it leaves

An operation of yours is one line in section 3: case(name, function, float64 formula, shapes).
The harness compares the result with the formula and the gradient of every input with its central
differences.  Errors are relative to the largest entry.  No tolerance is tuned to a case: the
contract is 1e-4, and what is held here is 1e-5.
"""
import contextlib
import dataclasses
import errno
import gc
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from functools import cache, partial
from types import SimpleNamespace
from typing import Callable, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # NumPy's team would fight with ours

import numpy as np
import pytest

import autograd as ag
import sample
import tensor
import train
import xtrain

TOLERANCE = 1e-5                # relative to the largest entry, forward and backward
STEP = 1e-6                     # of a central difference, in float64, for values of size one
THREADS = tensor.threads()      # what the machine gave us; tests that change it put it back
ag.KEEP_BELOW = {"cpu": 0, "cuda": 0}      # tensors take the way of large ones: made again


def devices():
    """The devices that tests run on: a GPU too where CuPy sees one."""
    try:
        tensor.cuda()
    except tensor.NoDevice as e:
        assert "XTRAIN_REQUIRE_GPU" not in os.environ, f"tests on a GPU were asked for: {e}"
        return ["cpu"]
    return ["cpu", "cuda"]


DEVICES = devices()


def pytest_generate_tests(metafunc):
    """Each test runs on every device, but what is marked cpu."""
    if len(DEVICES) > 1 and not metafunc.definition.get_closest_marker("cpu"):
        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """Where tensors are made that are not told where, and what --device auto means."""
    name = getattr(request, "param", "cpu")
    before = tensor.set_default_device(name)
    monkeypatch.setenv("XTRAIN_DEVICE", name)
    yield name
    tensor.set_default_device(before)


@pytest.fixture(autouse=True)
def _restore_threads():
    """Give the next test the thread team that this one found."""
    yield
    tensor.set_threads(THREADS)


# ---- 1. Tools -----------------------------------------------------------------------------------
# Random numbers come from generators seeded by names, so that a case has the same inputs whether it
# runs alone or with all others, today or next year.

def own(array, grad=False):
    """An xtrain tensor of a NumPy array; floats become f32."""
    array = np.asarray(array)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return tensor.tensor(array, requires_grad=grad)


def norm_and_turn(x, settings, *weights):
    """qk_norm_rope with cos and sin from arrays, wherever x lies."""
    cos, sin, *heads = settings
    return ag.qk_norm_rope(x, own(cos), own(sin), *heads, *weights)


def rng_of(name):
    """A generator of random numbers that depends on the name alone (not on Python's hash)."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def ints(high, *shape, low=0, seed=0):
    """Random int64 in [low, high): tokens, targets."""
    return np.random.default_rng(seed).integers(low, high, shape)


def far(*shape):
    """An input whose entries keep away from zero: |x| >= 0.7 (for divisors)."""
    def make(rng):
        x = rng.standard_normal(shape, np.float32)
        return x + np.float32(0.7)*np.where(x < 0, -1, 1).astype(np.float32)
    return make


def shifted(*shape):
    """An input around 1, so that its sum is not a difference of large numbers."""
    return lambda rng: rng.standard_normal(shape, np.float32) + np.float32(1)


def error(actual, expected):
    """The largest deviation, relative to the largest expected entry.

    Entry by entry would be too strict where sums cancel, a norm too lenient for one wrong entry.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if expected.size == 0:
        return 0.0
    return np.abs(actual - expected).max()/max(np.abs(expected).max(), 1e-30)


def assert_close(actual, expected, tolerance=TOLERANCE, what=""):
    """Entries agree within `tolerance` of the largest one (a NaN never does)."""
    worst = error(actual, expected)
    assert worst <= tolerance, f"{what}: relative error {worst:.2e} > {tolerance:.0e}"


def assert_same_bits(a, b, what=""):
    """Two arrays are equal to the last bit."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {b.shape}"
    different = int((a.view(np.uint8) != b.view(np.uint8)).sum())
    assert not different, f"{what}: {different} of {a.nbytes} bytes differ"


def directions(shape, rng, most=160, units=6, signs=3):
    """Directions to probe a gradient in: every entry of a small tensor; of a large one a few
    entries, and a few vectors of random signs, which notice any single wrong entry."""
    size = int(np.prod(shape))
    chosen = range(size) if size <= most else rng.choice(size, units, replace=False)
    for i in chosen:
        unit = np.zeros(size)
        unit[i] = 1
        yield unit.reshape(shape)
    for _ in range(signs if size > most else 0):
        yield rng.choice([-1.0, 1.0], shape)


def slopes(f, arrays, which, probes):
    """Central differences of the scalar function f(*arrays) along each probe of arrays[which]."""
    # A step of 1e-6 on values around 1 leaves ten digits: 1e-12 of curvature, 1e-10 of rounding.
    arrays = [np.asarray(a, np.float64) for a in arrays]
    x, result = arrays[which], []
    for probe in probes:
        ends = [f(*arrays[:which], x + h*probe, *arrays[which + 1:]) for h in (STEP, -STEP)]
        result.append((ends[0] - ends[1])/(2*STEP))
    return np.array(result)


def gradient_error(gradient, probes, truth, vanishing):
    """How far an analytic gradient is from the central differences `truth` along `probes`.

    A unit vector's difference counts against the largest entry, a sign vector's against the norm.
    Where the true gradient is zero (softmax of one entry) it counts against `vanishing`, the
    size of the other gradients.
    """
    # A NaN anywhere in the gradient reaches every deviation, since NaN*0 is NaN.
    gradient = np.asarray(gradient, np.float64)
    largest, norm = np.abs(gradient).max(), np.sqrt((gradient*gradient).sum())
    if np.abs(truth).max() < 1e-6*vanishing:
        largest = norm = vanishing
    deviations = []
    for probe, slope in zip(probes, truth):
        size = largest if np.count_nonzero(probe) == 1 else norm
        deviations.append(abs((gradient*probe).sum() - slope)/max(size, 1e-30))
    return np.max(deviations)       # NumPy's maximum, unlike Python's, is NaN if anything is


# ---- 2. Oracles ---------------------------------------------------------------------------------
# The formulas, in float64, as plainly as they can be written.  Nothing here is shared with xtrain:
# a misunderstanding would have to be made twice.  Section 7 compares them with torch.

def sigmoid64(x):
    """1/(1 + e^-x)."""
    return 1/(1 + np.exp(-x))


def silu64(x):
    """x*sigmoid(x)."""
    return x*sigmoid64(x)


def gelu64(x):
    """GPT-2's GELU, the tanh form."""
    return 0.5*x*(1 + np.tanh(np.sqrt(2/np.pi)*(x + 0.044715*x**3)))


def softmax64(x):
    """Softmax over the last axis; -inf gets no weight."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e/e.sum(-1, keepdims=True)


def rmsnorm64(x, w, eps=1e-6):
    """x/rms(x)*w over the last axis."""
    return x/np.sqrt((x*x).mean(-1, keepdims=True) + eps)*w


def add_rmsnorm64(x, residual, w, eps=1e-6):
    """The sum and its norm."""
    return x + residual, rmsnorm64(x + residual, w, eps)


def rope_tables64(positions, head_dim, theta=10000.0):
    """cos and sin, [positions, head_dim/2]."""
    frequency = theta**(-np.arange(0, head_dim, 2)/head_dim)
    angle = np.arange(positions)[:, None]*frequency
    return np.cos(angle), np.sin(angle)


def rope64(x, cos, sin):
    """Rotate-half RoPE on [B, S, heads, head_dim]."""
    half = x.shape[-1]//2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a*cos - b*sin, b*cos + a*sin], -1)


def qk_norm_rope64(qkv, cos, sin, heads, kv_heads, qw=None, kw=None, eps=1e-6):
    """Split the fused projection, normalise q and k per head, rotate them."""
    b, s, width = qkv.shape
    x = qkv.reshape(b, s, heads + 2*kv_heads, -1)
    q, k, v = x[:, :, :heads], x[:, :, heads:heads + kv_heads], x[:, :, heads + kv_heads:]
    if qw is not None:
        q, k = rmsnorm64(q, qw, eps), rmsnorm64(k, kw, eps)
    return rope64(q, cos, sin), rope64(k, cos, sin), v


def attention64(q, k, v, scale=None):
    """Causal attention on [B, S, heads, head_dim]; query i sees keys up to i + Sk - Sq."""
    # each kv head is repeated for the heads that share it; then heads come before positions
    group = q.shape[2]//k.shape[2]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k.repeat(group, 2), v.repeat(group, 2)))
    scores = q @ k.swapaxes(2, 3)*(q.shape[-1]**-0.5 if scale is None else scale)
    sq, sk = scores.shape[2:]
    future = np.arange(sk) > np.arange(sq)[:, None] + sk - sq
    return (softmax64(np.where(future, -np.inf, scores)) @ v).transpose(0, 2, 1, 3)


def mlp64(x, gate_up, down, residual=0.0):
    return gate_up_swiglu64(x, gate_up) @ down.T + residual


def gate_up_swiglu64(x, w):
    """silu(x gate') * (x up'), gate and up being the halves of w."""
    gate, up = np.split(x @ w.T, 2, -1)
    return silu64(gate)*up


def losses64(logits, targets):
    """-log probability of each target, 0 where it is -1."""
    top = logits.max(-1)
    total = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets < 0, 0.0, total - picked)


def cross_entropy64(logits, targets, denominator=None):
    """The sum over counted targets divided by their number (or by `denominator`)."""
    return losses64(logits, targets).sum()/(denominator or (targets >= 0).sum())


def head_loss64(x, w, targets, denominator=None, vocab=None):
    """Cross entropy of x w', over the first `vocab` rows of w."""
    return cross_entropy64(x @ w[:vocab].T, targets, denominator)


def philox64(key, c0, c1, c2, c3):
    """Philox4x32-10 on arrays of counters: uint32 [..., 4].  key is 64 bits wide."""
    c = [np.asarray(x, np.uint64) for x in np.broadcast_arrays(c0, c1, c2, c3)]
    # a round multiplies two of the words to 64 bits and crosses the halves; keys are bumped by the
    # golden ratio and sqrt(3) - 1 (Salmon et al., 2011)
    low, shift = np.uint64(0xffffffff), np.uint64(32)
    k0, k1 = key & 0xffffffff, key >> 32
    for _ in range(10):
        p, q = c[0]*np.uint64(0xD2511F53), c[2]*np.uint64(0xCD9E8D57)
        c = [q >> shift ^ c[1] ^ np.uint64(k0), q & low, p >> shift ^ c[3] ^ np.uint64(k1), p & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xffffffff, (k1 + 0xBB67AE85) & 0xffffffff
    return np.stack(c, -1).astype(np.uint32)


def mask64(shape, p, seed, first_sequence, site):
    """Dropout's mask for [B, S, dim], scaled: entry e of a sequence has word e%4 of counter e/4."""
    # sequences down, entries across; each entry picks its word of four
    batch, seq, dim = shape
    entry = np.arange(seq*dim)
    sequence = (first_sequence + np.arange(batch))[:, None]
    words = philox64(seed, sequence & 0xffffffff, sequence >> 32, site, (entry//4)[None])
    word = np.take_along_axis(words, np.broadcast_to(entry % 4, words.shape[:2])[..., None], -1)
    return ((word >= int(p*2**32))/(1 - p)).reshape(shape)


def decoder64(c, w, tokens, dropped=lambda x, site: x):
    """Logits of a Qwen3 decoder: c its configuration, w {Hugging Face name: float64 array}."""
    embedding = w["model.embed_tokens.weight"]
    x = embedding[tokens]
    batch, seq, _ = x.shape
    cos, sin = rope_tables64(seq, c.head_dim, c.rope_theta)
    for i in range(c.layers):
        # attention: normed input, one projection after another, mixed, added to the stream
        layer = {n.split(".", 3)[3]: a for n, a in w.items() if n.startswith(f"model.layers.{i}.")}
        h = rmsnorm64(x, layer["input_layernorm.weight"], c.norm_eps)
        qkv = np.concatenate([h @ layer[f"self_attn.{n}_proj.weight"].T for n in "qkv"], -1)
        norms = [layer.get(f"self_attn.{n}_norm.weight") for n in "qk"]
        q, k, v = qk_norm_rope64(qkv, cos, sin, c.heads, c.kv_heads, *norms, c.norm_eps)
        mixed = attention64(q, k, v).reshape(batch, seq, -1)
        x = x + dropped(mixed @ layer["self_attn.o_proj.weight"].T, 4*i)
        # SwiGLU, the same way; dropout's sites are 4*layer and 4*layer + 1
        h = rmsnorm64(x, layer["post_attention_layernorm.weight"], c.norm_eps)
        h = silu64(h @ layer["mlp.gate_proj.weight"].T)*(h @ layer["mlp.up_proj.weight"].T)
        x = x + dropped(h @ layer["mlp.down_proj.weight"].T, 4*i + 1)
    return rmsnorm64(x, w["model.norm.weight"], c.norm_eps) @ w.get("lm_head.weight", embedding).T


def decoder_loss64(c, w, tokens, targets, first_sequence=0, seed=0, denominator=None):
    """The training loss of decoder64, dropout included."""
    def dropped(x, site):
        return x*mask64(x.shape, c.dropout, seed, first_sequence, site)
    # without dropout no mask is drawn, which halves the time of the finite differences
    logits = decoder64(c, w, tokens, dropped) if c.dropout else decoder64(c, w, tokens)
    return cross_entropy64(logits, targets, denominator)


def adamw64(p, g, m, v, step, lr, betas=(0.9, 0.95), eps=1e-8, decay=0.1, scale=1.0):
    """One step of torch's AdamW: new p, m, v."""
    # moments, bias correction, decoupled decay
    g = g*scale
    m, v = betas[0]*m + (1 - betas[0])*g, betas[1]*v + (1 - betas[1])*g*g
    root = np.sqrt(v)/np.sqrt(1 - betas[1]**step)
    return p*(1 - lr*decay) - lr/(1 - betas[0]**step)*m/(root + eps), m, v


# ---- 3. Operation cases -------------------------------------------------------------------------
# case(name, own function, float64 formula, inputs...): an input is a shape (of normal numbers) or a
# function of the generator.  Register tiles are 14x32, 6x16 or 8x12, attention tiles 128 wide:
# shapes lie on and beside those edges, at 1, and above 16,384 elements, where threads share work.

class Case(NamedTuple):
    """One line of the tables below; `own` may be several ways to do the same."""
    name: str
    own: Callable | tuple
    oracle: Callable
    inputs: tuple

    def __str__(self):
        return self.name


CASES: dict[str, Case] = {}


def case(name, own_function, oracle, *inputs):
    """Enter a case; names are unique because they seed the inputs."""
    assert name not in CASES, f"two cases are called {name}"
    CASES[name] = Case(name, own_function, oracle, inputs)


# Arithmetic.  Each shape pair broadcasts in another way: not at all, at one end, at both, a 0-d
# tensor, a vector over rows; the last five are above one task, where the gradient's sum is shared.
for a, b in [((1,), (1,)), ((7, 33), (7, 33)), ((3, 1, 5), (4, 1)), ((), (2, 3)), ((5, 1), (1, 7)),
             ((130, 131), (130, 131)), ((130, 131), (131,)), ((131,), (129, 131)),
             ((2, 129, 65), (2, 1, 65)), ((9, 2051), (9, 1))]:
    case(f"add {a} {b}", ag.add, np.add, a, b)
    case(f"sub {a} {b}", ag.sub, np.subtract, a, b)
    case(f"mul {a} {b}", ag.mul, np.multiply, a, b)
    case(f"div {a} {b}", ag.div, np.divide, a, far(*b))
# Operators, Python numbers on either side, and one tensor used several times: every use adds to the
# gradient, so that each expression is also a test of the order in which the tape sums.
case("operators", lambda x, y: (x + y)*x - y/x, lambda x, y: (x + y)*x - y/x, far(5, 7), (5, 7))
case("numbers", lambda x: 2 - (3*x + 1)/4 + 5/x - 2*(x - 1),
     lambda x: 2 - (3*x + 1)/4 + 5/x - 2*(x - 1), far(3, 5))
case("unary minus", lambda x: -x, lambda x: -x, (3, 5))
case("x + x", lambda x: x + x, lambda x: 2*x, (5, 7))
case("x - x*x", lambda x: x - x*x, lambda x: x - x*x, (5, 7))
case("x/x*x", lambda x: x/x*x, lambda x: x + 0, far(5, 7))
case("chain of uses", lambda x: ((x*x)*x + x)*(x*x), lambda x: x**5 + x**3, (9,))

# Functions of one tensor: one entry, around a vector's width, none at all, above one task.  A
# softmax of one entry has gradient zero; the wide ones are nearly one-hot.
for name in ("silu", "gelu", "exp"):
    formula = {"silu": silu64, "gelu": gelu64, "exp": np.exp}[name]
    for shape in [(1,), (3, 5), (15,), (17,), (2, 0, 3), (129, 130)]:
        case(f"{name} {shape}", getattr(ag, name), formula, shape)
    case(f"{name} of a transpose", lambda x, f=getattr(ag, name): f(ag.transpose(x, 1, 0)),
         lambda x, f=formula: f(x.T), (5, 3))
for shape in [(1, 1), (4, 1), (1, 7), (3, 16), (5, 17), (2, 3, 33), (2, 8195), (129, 131)]:
    case(f"softmax {shape}", ag.softmax, softmax64, shape)
    case(f"softmax, wide {shape}", lambda x: ag.softmax(x*4.0), lambda x: softmax64(4*x), shape)
    case(f"softmax, extreme {shape}", lambda x: ag.softmax(x*1e4), lambda x: softmax64(1e4*x),
         shape)

# Sums, over every kind of axis; few long rows and many short ones take different ways.  Entries lie
# around 1: a sum that cancels would measure its own condition, not the summation.
for shape, axis in [((1,), None), ((4, 5), None), ((4, 5), 0), ((4, 5), 1), ((3, 4, 5), 1),
                    ((3, 4, 5), (0, 2)), ((3, 4, 5), -1), ((1, 40000), 1), ((40000, 1), 0),
                    ((130, 131), None), ((130, 131), 0)]:
    for keep in (False, True):
        case(f"sum {shape} {axis} {keep}", partial(ag.sum, axis=axis, keepdims=keep),
             partial(np.sum, axis=axis, keepdims=keep), shifted(*shape))
        case(f"mean {shape} {axis} {keep}", partial(ag.mean, axis=axis, keepdims=keep),
             partial(np.mean, axis=axis, keepdims=keep), shifted(*shape))

# Shapes and views: the gradient must come back through the same strides.
case("reshape", lambda x: ag.reshape(x, (4, 15)), lambda x: x.reshape(4, 15), (3, 4, 5))
case("reshape -1", lambda x: ag.reshape(x, (-1, 10)), lambda x: x.reshape(-1, 10), (3, 4, 5))
case("reshape of a transpose", lambda x: ag.reshape(ag.transpose(x, 1, 0, 2), (20, 3)),
     lambda x: x.transpose(1, 0, 2).reshape(20, 3), (3, 4, 5))
case("transpose", lambda x: ag.transpose(x, 2, 0, 1), lambda x: x.transpose(2, 0, 1), (3, 4, 5))
for shape in [(129, 131), (9, 2051), (2051, 9)]:
    case(f"transpose, large {shape}", lambda x: ag.transpose(x, 1, 0)*2.0, lambda x: 2*x.T, shape)
for key in [np.s_[1], np.s_[-1], np.s_[1:], np.s_[:, 2], np.s_[..., 1:3], np.s_[1:2, ::2],
            np.s_[:, :, -2:], np.s_[0, 1:3, ::3], np.s_[::-1, 3:0:-2], np.s_[2:1]]:
    case(f"slice {key}", lambda x, key=key: ag.slice(x, key), lambda x, key=key: x[key], (3, 4, 5))
# one tensor sliced twice: its gradient is put together from overlapping parts
case("x[key]", lambda x: x[:, 1]*x[:, 0] + x[:, 1], lambda x: x[:, 1]*x[:, 0] + x[:, 1], (3, 4, 5))
case("overlapping slices", lambda x: x[1:]*x[:-1], lambda x: x[1:]*x[:-1], (130, 131))
for groups in (1, 3):
    case(f"repeat_kv {groups}", partial(ag.repeat_kv, groups=groups),
         lambda x, groups=groups: x.repeat(groups, 2), (2, 5, 3, 4))

# Products [m, k] by [k, n], on and beside the register tiles; then views that the product reads in
# place or has to copy, batches that broadcast, and both operands the same.
for m, k, n in [(1, 1, 1), (1, 7, 33), (13, 5, 31), (14, 64, 32), (15, 65, 33), (6, 16, 16),
                (7, 17, 17), (5, 1, 129), (129, 257, 65), (127, 130, 259), (28, 513, 64),
                (2, 600, 1030), (3, 5, 8225)]:
    case(f"matmul {m} {k} {n}", ag.matmul, np.matmul, (m, k), (k, n))
case("matmul of a transpose", lambda a, b: ag.transpose(a, 1, 0) @ b, lambda a, b: a.T @ b,
     (15, 13), (15, 33))
case("matmul by a transpose", lambda a, b: a @ ag.transpose(b, 1, 0), lambda a, b: a @ b.T,
     (13, 15), (33, 15))
case("matmul of transposes", lambda a, b: ag.transpose(a, 1, 0) @ ag.transpose(b, 1, 0),
     lambda a, b: a.T @ b.T, (129, 131), (33, 129))
case("matmul of slices", lambda a, b: a[1:, 2:] @ b[:, 1:], lambda a, b: a[1:, 2:] @ b[:, 1:],
     (9, 20), (18, 34))
case("matmul of every other", lambda a, b: a[::2, ::3] @ b[1::2],
     lambda a, b: a[::2, ::3] @ b[1::2], (9, 20), (15, 34))
case("matmul of nothing", ag.matmul, np.matmul, (2, 0), (0, 3))
case("matmul, batched", ag.matmul, np.matmul, (2, 3, 15, 17), (2, 3, 17, 33))
case("matmul, batch broadcast", ag.matmul, np.matmul, (2, 3, 7, 5), (3, 5, 9))
case("matmul, one matrix for a batch", ag.matmul, np.matmul, (4, 7, 5), (5, 9))
case("matmul, large batch", ag.matmul, np.matmul, (9, 33, 65), (9, 65, 31))
case("x @ x", lambda x: x @ x, lambda x: x @ x, (17, 17))
case("x @ x'", lambda x: x @ ag.transpose(x, 1, 0), lambda x: x @ x.T, (15, 33))

# linear: the product with its epilogues, on the tile's edges; residual and weight may be the input.
for rows, inner, out in [(1, 1, 1), (3, 5, 7), (13, 31, 33), (14, 32, 64), (15, 33, 65),
                         (130, 67, 129), (3, 1100, 33), (3, 5, 8225)]:
    case(f"linear {rows} {inner} {out}", ag.linear, lambda x, w: x @ w.T,
         (rows, inner), (out, inner))
    case(f"linear + residual {rows} {inner} {out}", ag.linear, lambda x, w, r: x @ w.T + r,
         (rows, inner), (out, inner), (rows, out))
case("linear, 3 axes", ag.linear, lambda x, w: x @ w.T, (2, 15, 33), (17, 33))
case("linear, residual = input", lambda x, w: ag.linear(x, w, x), lambda x, w: x @ w.T + x,
     (2, 7, 17), (17, 17))
case("linear, weight = input", lambda x: ag.linear(x, x), lambda x: x @ x.T, (15, 17))
case("linear of a slice", lambda x, w: ag.linear(x[:, 1:], w), lambda x, w: x[:, 1:] @ w.T,
     (3, 8, 17), (33, 17))
case("linear by a transpose", lambda x, w: ag.linear(x, ag.transpose(w, 1, 0)), lambda x, w: x @ w,
     (3, 8, 17), (17, 33))

# Dropout at a fixed seed is a linear function.  Seed and sequence number need all their 64 bits.
DROPS = ag.Dropout(0.3, 1234567890123, (1 << 33) + 5, 4*7 + 1)
for shape, inner in [((1, 1, 4), 5), ((2, 7, 33), 1100), ((2, 70, 130), 60), ((2, 2, 8225), 3)]:
    batch, seq, dim = shape
    case(f"dropout {shape}", lambda x: ag.dropout(x, DROPS), lambda x: x*mask64(x.shape, *DROPS),
         shape)
    case(f"linear, dropout {shape}", lambda x, w, r: ag.linear(x, w, r, DROPS),
         lambda x, w, r: x @ w.T*mask64(r.shape, *DROPS) + r,
         (batch, seq, inner), (dim, inner), shape)
    case(f"linear, dropout alone {shape}", lambda x, w: ag.linear(x, w, dropout=DROPS),
         lambda x, w: x @ w.T*mask64((*x.shape[:2], len(w)), *DROPS),
         (batch, seq, inner), (dim, inner))

# Norms: alone, with a residual, with both results used or only one.
for shape in [(1, 1), (3, 5), (2, 3, 16), (5, 17), (1, 1000), (2, 65, 129), (1100, 7)]:
    # with one channel x/|x| is flat: an eps of x's own size gives it a gradient
    wide = 0.5 if shape[-1] == 1 else 1e-6
    case(f"rmsnorm {shape}", lambda x, w, e=wide: ag.add_rmsnorm(x, None, w, eps=e),
         partial(rmsnorm64, eps=wide), shape, shape[-1:])
    case(f"add_rmsnorm {shape}", partial(ag.add_rmsnorm, eps=wide),
         partial(add_rmsnorm64, eps=wide), shape, shape, shape[-1:])
case("rmsnorm, eps 1e-2", lambda x, w: ag.add_rmsnorm(x*0.1, None, w, eps=1e-2),
     lambda x, w: rmsnorm64(x*0.1, w, 1e-2), (5, 33), (33,))
case("add_rmsnorm(x, x)", lambda x, w: ag.add_rmsnorm(x, x, w), lambda x, w: add_rmsnorm64(x, x, w),
     (5, 17), (17,))
case("add_rmsnorm, sum unused", lambda x, r, w: ag.add_rmsnorm(x, r, w)[1],
     lambda x, r, w: rmsnorm64(x + r, w), (5, 17), (5, 17), (17,))
case("add_rmsnorm, norm unused", lambda x, r, w: ag.add_rmsnorm(x, r, w)[0] + w,
     lambda x, r, w: x + r + w, (5, 17), (5, 17), (17,))

# Embedding: tokens repeat, so their rows' gradients add up; some never occur, and get exactly zero.
for n, vocab, dim in [((1,), 1, 1), ((7,), 3, 5), ((2, 9), 11, 17), ((3, 65), 67, 96)]:
    tokens = ints(vocab, *n)
    order = np.argsort(tokens, axis=None, kind="stable")
    case(f"embed {n} {vocab} {dim}", lambda w, t=tokens: ag.embed(own(t), w),
         lambda w, t=tokens: w[t], (vocab, dim))
    case(f"embed, order given {n} {vocab} {dim}",
         lambda w, t=tokens, o=order: ag.embed(own(t), w, own(o)),
         lambda w, t=tokens: w[t], (vocab, dim))

# Norm and rotation of q and k, with the tables that the formula gets too (fp32 values).
for batch, seq, heads, kv, dim in [(1, 1, 1, 1, 2), (2, 7, 6, 2, 10), (1, 5, 15, 5, 6),
                                   (2, 33, 4, 1, 32), (1, 9, 2, 2, 34), (2, 65, 6, 2, 16),
                                   (9, 130, 1, 1, 4)]:
    tables = [x.astype(np.float32) for x in rope_tables64(seq, dim, 100.0)]
    settings = (*tables, heads, kv)
    qkv = (batch, seq, (heads + 2*kv)*dim)
    case(f"qk_norm_rope {batch} {seq} {heads}/{kv} {dim}",
         lambda x, q, k, s=settings: norm_and_turn(x, s, q, k),
         lambda x, q, k, s=settings: qk_norm_rope64(x, *s, q, k), qkv, (dim,), (dim,))
    case(f"rope {batch} {seq} {heads}/{kv} {dim}", lambda x, s=settings: norm_and_turn(x, s),
         lambda x, s=settings: qk_norm_rope64(x, *s), qkv)

# B, Sq, Sk, heads, kv heads, head_dim: tiles of 128, decoding (Sq < Sk), shared heads, odd sizes.
ATTENTIONS = [(1, 1, 1, 1, 1, 2), (2, 7, 7, 6, 2, 10), (1, 33, 33, 15, 5, 6),
              (2, 127, 127, 2, 1, 16), (1, 128, 128, 2, 2, 32), (1, 129, 129, 3, 1, 18),
              (1, 257, 257, 2, 1, 34), (1, 1, 40, 4, 2, 16), (2, 5, 133, 4, 1, 8),
              (1, 130, 258, 2, 2, 4), (1, 3, 3, 1, 1, 256), (2, 40, 40, 2, 2, 64),
              (2, 1, 133, 6, 2, 26), (1, 300, 300, 2, 1, 8), (1, 257, 400, 1, 1, 12),
              (1, 37, 530, 2, 1, 32), (1, 513, 513, 1, 1, 40)]
# Every length around a tile, every kind of head_dim, three ways to share keys: taken in turn.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 126, 130, 255, 256)
WIDTHS = (2, 6, 10, 14, 18, 26, 30, 32, 34, 48, 50, 62, 66, 98, 126, 130)
SHARES = ((6, 2), (15, 5), (2, 1), (3, 3))
ATTENTIONS += [(1, n, n, *heads, width) for n, heads, width
               in zip(LENGTHS, itertools.cycle(SHARES), WIDTHS[5:] + WIDTHS[:5])]


def both(run):
    """An attention case for the tiled and for the composed way: `run` gets flash as well."""
    return tuple(partial(run, flash=flash) for flash in (True, False))


for batch, sq, sk, heads, kv, dim in ATTENTIONS:
    case(f"attention {batch} {sq}/{sk} {heads}/{kv} {dim}", both(ag.attention), attention64,
         (batch, sq, heads, dim), (batch, sk, kv, dim), (batch, sk, kv, dim))
# one tensor as q, k and v; slices of one tensor; another scale; weights close to one-hot
case("attention, one tensor", both(lambda x, flash: ag.attention(x, x, x, flash)),
     lambda x: attention64(x, x, x), (2, 19, 3, 8))
case("attention, slices",
     both(lambda x, flash: ag.attention(x[:, :, :6], x[:, :, 6:8], x[:, :, 8:], flash)),
     lambda x: attention64(x[:, :, :6], x[:, :, 6:8], x[:, :, 8:]), (2, 33, 10, 10))
case("attention, scale", both(partial(ag.attention, scale=0.5)), partial(attention64, scale=0.5),
     *[(1, 20, 2, 16)]*3)
case("attention, sharp", both(lambda q, k, v, flash: ag.attention(q*6.0, k, v, flash)),
     lambda q, k, v: attention64(q*6.0, k, v), (1, 140, 2, 16), *[(1, 140, 1, 16)]*2)

# SwiGLU, with a ffn that is no multiple of anything.
for rows, dim, ffn in [((1,), 1, 1), ((3,), 5, 7), ((2, 15), 33, 31), ((14,), 32, 64),
                       ((2, 65), 32, 129)]:
    case(f"gate_up_swiglu {rows} {dim} {ffn}", ag.gate_up_swiglu, gate_up_swiglu64,
         (*rows, dim), (2*ffn, dim))
    case(f"mlp {rows} {dim} {ffn}", ag.mlp, mlp64, (*rows, dim), (2*ffn, dim), (dim, ffn),
         (*rows, dim))

case("gate_up_swiglu and linear", lambda x, up, down: ag.linear(ag.gate_up_swiglu(x, up), down),
     mlp64, (2, 65, 32), (2*129, 32), (32, 129))            # h is made again for down's gradient

# The loss: ignored targets, the last class always among the others, and a head whose padding rows
# hold numbers that must get neither probability nor gradient.
for rows, dim, vocab, padded in [((1,), 1, 2, 2), ((2, 7), 5, 11, 11), ((2, 7), 5, 11, 64),
                                 ((3, 43), 33, 211, 256), ((15,), 17, 33, 33),
                                 ((1, 130), 16, 129, 192), ((2, 4), 3, 5003, 5056),
                                 ((2, 50), 48, 700, 704), ((3, 43), 49, 211, 256),
                                 ((2, 4), 64, 5003, 5056)]:         # from 49 on by stored logits
    aims = ints(vocab, *rows, low=-1, seed=3)
    aims.flat[0] = vocab - 1
    case(f"head_loss {rows} {dim} {vocab}/{padded}",
         lambda x, w, t=aims, n=vocab: ag.head_loss(x, w, own(t), vocab=n),
         lambda x, w, t=aims, n=vocab: head_loss64(x, w, t, vocab=n), (*rows, dim), (padded, dim))
    case(f"head_loss, denominator {rows} {dim} {vocab}/{padded}",
         lambda x, w, t=aims, n=vocab: ag.head_loss(x, w, own(t), denominator=37, vocab=n),
         lambda x, w, t=aims, n=vocab: head_loss64(x, w, t, 37, n), (*rows, dim), (padded, dim))
    case(f"cross_entropy {rows} {vocab} {dim} {padded}",
         lambda x, t=aims: ag.cross_entropy(x, own(t)), lambda x, t=aims: cross_entropy64(x, t),
         (*rows, vocab))
case("cross_entropy, extreme", lambda x: ag.cross_entropy(x*1e4, own(np.arange(7))),
     lambda x: cross_entropy64(x*1e4, np.arange(7)), (7, 33))
case("head_loss, weight = input", lambda x: ag.head_loss(x, x, own(np.arange(9)[::-1].copy())),
     lambda x: head_loss64(x, x, np.arange(9)[::-1]), (9, 17))


# From a line of the tables to a test.

def as_list(results):
    """An operation's results as a list."""
    return list(results) if isinstance(results, tuple) else [results]


def weighted(results, weights):
    """The scalar sum(weights*results), of tensors or arrays; its gradient is the weights."""
    if isinstance(results[0], tensor.Tensor):
        terms = [ag.sum(r*own(w)) for r, w in zip(results, weights)]
    else:
        terms = [np.sum(r*np.float64(w)) for r, w in zip(results, weights)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def draw(case):
    """A case's inputs, and for each of its results weights to make a scalar of it."""
    # all fp32 numbers, which the oracle gets exactly; the weights play the part of dL/d(result)
    rng = rng_of(case.name)
    arrays = [x(rng) if callable(x) else rng.standard_normal(x, np.float32) for x in case.inputs]
    exact = as_list(case.oracle(*(a.astype(np.float64) for a in arrays)))
    return arrays, exact, [rng.standard_normal(np.shape(e)).astype(np.float32) for e in exact]


def truths(case, arrays, weights):
    """Per input: the probed directions and the central differences of the oracle along them."""
    def scalar(*inputs):
        return weighted(as_list(case.oracle(*inputs)), weights)

    # other numbers than the inputs': a probe must not be aligned with what it probes
    rng = rng_of(case.name + " probes")
    probed = [list(directions(a.shape, rng)) for a in arrays]
    return [(p, slopes(scalar, arrays, i, p)) for i, p in enumerate(probed) if p]


def assert_gradients(leaves, truth, weights, times, what):
    """The leaves' gradients are `times` the truth."""
    sizes = [s for _, s in truth] + [w for w in weights if w.size]
    vanishing = max(np.abs(x).max() for x in sizes)
    for i, (leaf, (probes, slope)) in enumerate(zip(leaves, truth)):
        worst = gradient_error(leaf.grad.numpy()/times, probes, slope, vanishing)
        assert worst <= TOLERANCE, f"{what}: gradient of input {i} is off by {worst:.2e}"


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_operation(case):
    """Result, gradient of every input, fan-out in a graph, addition to an earlier gradient."""
    arrays, exact, weights = draw(case)
    # the oracle's answers serve every way to compute the case
    truth = truths(case, arrays, weights)
    for function in as_list(case.own):
        leaves = [own(a, grad=True) for a in arrays]
        results = as_list(function(*leaves))
        assert len(results) == len(exact)
        for r, e in zip(results, exact):
            assert_close(r.numpy(), e, what="result")
        if truth:                   # an empty tensor has no gradient to probe
            weighted(results, weights).backward()
            assert_gradients(leaves, truth, weights, 1, "one use")
            check_fan_out(function, leaves, truth, weights)


def check_fan_out(function, leaves, truth, weights):
    """The leaves already hold a gradient; three more uses, two of them in one graph, add up."""
    # these inputs are results themselves: one use writes their gradient, the other adds to it
    inner = [x*1.0 for x in leaves]
    twice = [weighted(as_list(function(*inner)), weights) for _ in range(2)]
    (twice[0] + twice[1]).backward()
    assert_gradients(leaves, truth, weights, 3, "two more uses, added to the first")
    weighted(as_list(function(*leaves)), weights).backward()
    assert_gradients(leaves, truth, weights, 4, "one more use of the leaves")


@pytest.mark.parametrize("narrow", [48, 0])
def test_head_at_the_edges(monkeypatch, narrow):
    """Both ways of the head: huge logits cost no accuracy, rows without a target bring nothing,
    no rows give a gradient of 0, what does not fit is refused."""
    monkeypatch.setattr(tensor, "NARROW", narrow)
    rng = rng_of("edges of the head")

    def head(x, w, aims):
        dx, dw = tensor.empty(x.shape), tensor.empty(w.shape)
        loss = tensor.head_loss(own(x), own(w), own(np.array(aims, int)), 1, len(w), 1.0,
                                (dx, False), (dw, False))
        return loss.item(), dx.numpy(), dw.numpy()

    x = rng.standard_normal((9, 32)).astype(np.float32)*3e3
    w = np.tile(rng.standard_normal((100, 32)).astype(np.float32), (3, 1))
    best = (x.astype(np.float64) @ w.T).argmax(1)
    loss, _, dw = head(x, w, best)                      # each word three times: ln 3 a row
    assert abs(loss/len(x) - np.log(3)) < 1e-5
    assert abs(dw.astype(np.float64).sum(0)).max() < 3e-6*abs(dw).max()
    assert head(np.float32([[100.3]]), np.float32([[99.7]]), [0])[0] == 0
    assert abs(head(np.float32([[1e16]]), np.float32([[-1e16]]*2), [1])[0] - np.log(2)) < 1e-6
    x = np.ones((3, 8), np.float32)
    stored = tensor.DEVICE != "cpu" or not narrow       # then 0 times NaN is in dw
    x[1], x[2] = 2.0 if stored else np.nan, 1e38
    loss, dx, dw = head(x, w[:, :8], [3, -1, -1])
    assert np.isfinite(loss) and np.isfinite(dw).all() and not dx[1:].any() and dx[0].any()
    assert np.isnan(head(x[1:2]*np.float32(np.nan), w[:, :8], [3])[0])
    assert not head(np.zeros((0, 8)), w[:, :8], [])[2].any()
    short, aims = (tensor.zeros((2, 8)), False), own(np.array([0, 1, 2]))
    for vocab, places in ((0, {}), (301, {}), (300, {"dx": short}), (300, {"dw": short})):
        with pytest.raises((ValueError, IndexError), match="head_loss"):
            tensor.head_loss(own(np.ones((3, 8))), own(w[:, :8]), aims, 1, vocab, **places)


def test_rows_refuse_places_that_do_not_fit():
    """Rows that are told where to write say so, instead of writing past it or leaving gaps."""
    x, two = tensor.zeros((3, 4)), tensor.zeros((2, 4))
    ids = lambda *values: own(np.array(values))
    q, short = tensor.zeros((1, 3, 2, 8)), tensor.zeros((1, 2, 2, 8))
    lse = tensor.zeros((1, 2, 3))
    refused = {
        "matmul": lambda: tensor.matmul(x, tensor.zeros((4, 3)),
                                        tensor.transposed(tensor.zeros((3, 3)))),
        "embed_backward": lambda: tensor.embed_backward(x, ids(0, 1, 2), ids(0, 1, 2), two),
        "embed_backward ": lambda: tensor.embed_backward(two, ids(0, 1, 1), ids(0, 1, 2), two),
        "attention_backward": lambda: tensor.attention_backward(q, q, q, q, q, lse, 1.0, short, q,
                                                                q)}
    for name, run in refused.items():
        with pytest.raises((ValueError, IndexError), match=name.strip()):
            run()


@pytest.mark.parametrize("narrow", [48, 0])
def test_head_in_chunks(monkeypatch, narrow):
    """The head's loss and gradients do not depend on how many rows are computed at a time."""
    # the smallest chunk has 128 rows: 270 rows make three, the last one short
    monkeypatch.setattr(tensor, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(tensor, "NARROW_ROWS", 128)
    monkeypatch.setattr(tensor, "NARROW", narrow)
    x, w, aims = (3, 90, 33), (128, 33), ints(100, 3, 90, low=-1)
    test_operation(Case("chunks", lambda x, w: ag.head_loss(x, w, own(aims), vocab=100),
                        lambda x, w: head_loss64(x, w, aims, vocab=100), (x, w)))


# ---- 4. The table -------------------------------------------------------------------------------
# Rows are functions of buffers; the cases above reach them through the tape.  Here: that none is
# left out, and the rows and promises that have no gradient.

def run_case(case):
    """Forward and backward of a case, unchecked."""
    arrays, _, weights = draw(case)
    for function in as_list(case.own):
        leaves = [own(a, grad=True) for a in arrays]
        weighted(as_list(function(*leaves)), weights).backward()


def test_every_row_is_tested(monkeypatch):
    """The cases above and the tests of training's rows call each row of the table."""
    called = set()

    # every row, also when another row calls it, runs its `run`
    def spy(row, function):
        def run(*args, **kwargs):
            called.add(row.name)
            return function(*args, **kwargs)
        return run

    for row in tensor.TABLE.values():
        monkeypatch.setattr(row, "run", spy(row, row.run))
    for one in CASES.values():
        if "(2, 0, 3)" not in one.name:         # nothing to go backward from
            run_case(one)
    # rows that no tape reaches
    for test in (test_bf16_casts, test_adamw, test_newton_schulz, test_philox_mask):
        test()
    assert called == set(tensor.TABLE)


@pytest.mark.parametrize("name", tensor.TABLE)
def test_row(name):
    """A row has a docstring, dtypes, and benchmark arguments that run."""
    # tensor.py's own checks must accept the arguments that it benchmarks with
    row = tensor.TABLE[name]
    assert row.name == name and row.doc and row.dtypes
    assert set(row.dtypes) <= set(tensor.DTYPES)
    row(*row.bench())


@pytest.mark.cpu
@pytest.mark.smoke
def test_both_cores_have_the_same_functions():
    """What rows call of a core has the same parameters, with the same defaults, in both."""
    text = inspect.getsource(tensor)
    called = set(re.findall(r"\w+\.core\.(\w+)\(", text)) | {"cast_bf16", "cast_f32"}
    called -= {"Buffer", "read", "write", "memset", "head_loss"}    # one core's own
    assert len(called) > 30
    for name in called:
        cpu = inspect.signature(getattr(tensor.core, name))
        gpu = inspect.signature(getattr(tensor.Cuda, name)).parameters.values()
        plain = lambda p: (p.name, p.default)
        assert list(map(plain, cpu.parameters.values())) == list(map(plain, gpu))[1:], name


@pytest.mark.smoke
def check_product(rng, m, n, k):
    """One product with random transpositions, written or added, into rows that are wider."""
    flip_a, flip_b, acc = rng.integers(0, 2, 3).astype(bool)
    a = rng.standard_normal((k, m) if flip_a else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if flip_b else (k, n)).astype(np.float32)
    # the result is written into rows that are three longer; those three must survive
    c = rng.standard_normal((m, n + 3)).astype(np.float32)
    wide = own(c)
    ta, tb = (ag.transpose(own(x), 1, 0) if flip else own(x)
              for x, flip in ((a, flip_a), (b, flip_b)))
    tensor.matmul(ta, tb, wide.view((m, n), (n + 3, 1)), bool(acc))
    product = (a.T if flip_a else a).astype(np.float64) @ (b.T if flip_b else b)
    result = wide.numpy()
    assert_close(result[:, :n], product + acc*c[:, :n], 2e-6, f"{m} {n} {k}")
    assert_same_bits(result[:, n:], c[:, n:], f"{m} {n} {k}: beyond the rows")


def test_products():
    """Products of awkward sizes, all four transpositions, written or added, into wide rows."""
    rng = rng_of("products")
    sizes = (1, 2, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16, 17, 28, 31, 32, 33, 65, 130)
    depths = (1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 511, 512, 513, 1025)
    for _ in range(400):
        (m, n), k = rng.choice(sizes, 2), rng.choice(depths)
        check_product(rng, m, n, k)


@pytest.mark.cpu
@pytest.mark.smoke
def test_large_products():
    """Those wide enough for parts (on AMX), and tall enough for every way of sharing the work; the
    same bits on one thread."""
    rng, threads = rng_of("large products"), tensor.threads()
    try:
        for m, n, k in ((16, 256, 33), (17, 300, 31), (33, 257, 700), (47, 1200, 64),
                        (560, 300, 32), (561, 256, 513), (600, 1201, 20), (1200, 545, 1030),
                        (300, 8300, 9)):
            check_product(rng, m, n, k)
            a, b = own(rng.standard_normal((m, k))), own(rng.standard_normal((k, n)))
            results = []
            for count in (1, 2, 3):
                tensor.set_threads(count)
                results.append(tensor.matmul(a, b).numpy())
            for other in results[1:]:
                assert_same_bits(other, results[0], f"{m} {n} {k}")
    finally:
        tensor.set_threads(threads)


@pytest.mark.cpu
@pytest.mark.smoke
def test_rounds_of_a_product():
    """Where a product packs and multiplies in turns, no thread runs ahead of another: more threads
    than cores, again and again, and always the bits of one thread."""
    rng = rng_of("rounds")
    x, y = own(rng.standard_normal((1500, 256))), own(rng.standard_normal((1500, 600)))
    tensor.set_threads(1)
    alone = tensor.matmul(tensor.transposed(x), y).numpy()
    for threads in (2, 3, 5)*8:
        tensor.set_threads(threads)
        assert_same_bits(tensor.matmul(tensor.transposed(x), y).numpy(), alone, f"{threads}")


@pytest.mark.cpu
@pytest.mark.smoke
def test_rounds_of_a_narrow_head():
    """Its passes wait for one another: more threads than cores, and always the bits of one thread;
    the loss has the same ones without gradients."""
    rng = rng_of("narrow head")
    rows, dim, vocab, words = 300, 20, 5001, 5056
    x, w = own(rng.standard_normal((rows, dim))), own(rng.standard_normal((words, dim)))
    aims = own(ints(vocab, rows, low=-1))

    def head(threads):
        tensor.set_threads(threads)
        dx, dw = tensor.empty((rows, dim)), tensor.empty((words, dim))
        loss = tensor.head_loss(x, w, aims, 77, vocab, 0.5, (dx, False), (dw, False))
        plain = tensor.head_loss(x, w, aims, 77, vocab)
        return np.concatenate([t.numpy().ravel() for t in (loss, plain, dx, dw)])
    alone = head(1)
    assert alone[0] == alone[1] and not alone[2 + rows*dim + vocab*dim:].any()
    for threads in (2, 3, 5)*8:
        assert_same_bits(head(threads), alone, f"{threads}")


def test_products_keep_all_bits():
    """A product with powers of two is exact to the last of 24 bits, in three parts as well: a part
    left out, or rounded instead of cut off, would show."""
    rng = rng_of("all bits")
    x = rng.integers(-2**24, 2**24, (40, 256)).astype(np.float32)*np.float32(2)**-20
    scales = np.float32(2)**rng.integers(-30, 30, 256)
    for left, right in ((x, np.diag(scales)), (np.diag(scales[:40]), x)):
        assert_same_bits(tensor.matmul(own(left), own(right)).numpy(),
                         (left.astype(np.float64) @ right).astype(np.float32))


def test_products_show_nan():
    """A NaN in an operand is NaN in its whole row or column of the result, and nowhere else."""
    a, b = np.ones((40, 300), np.float32), np.ones((300, 270), np.float32)
    a[7, 299], b[3, 11] = np.nan, np.nan
    bad = np.isnan(tensor.matmul(own(a), own(b)).numpy())
    assert bad[7].all() and bad[:, 11].all() and bad.sum() == 40 + 270 - 1


def test_the_harness_can_fail():
    """A gradient off by 1e-4, one wrong entry among many, a NaN: each is noticed."""
    # x^3 on 20,000 entries, which are probed in six entries and three directions
    x = rng_of("harness").standard_normal((200, 100))
    probes = list(directions(x.shape, rng_of("probes")))
    truth = slopes(lambda a: np.sum(a**3), [x], 0, probes)
    right = 3*x*x
    spoiled, missing = right.copy(), right.copy()
    spoiled[7, 7] *= 1.5
    missing[3, 3] = np.nan
    assert gradient_error(right, probes, truth, 1) < 1e-7
    for wrong in (right*1.0001, spoiled, missing):
        assert not gradient_error(wrong, probes, truth, 1) <= TOLERANCE


def ulps(x):
    """The largest error of exp at the float32 array x, in units of the last place."""
    # double precision errs by 1e-9 of a float's last place
    truth = np.exp(x.astype(np.float64))
    return (np.abs(ag.exp(own(x)).numpy() - truth)/np.spacing(truth.astype(np.float32))).max()


def floats(low, high, stride=1):
    """Every stride-th float32 between low and high (of one sign), in pieces of about a million."""
    # floats of one sign are ordered as their bits are
    first, last = sorted(int(np.float32(x).view(np.uint32)) for x in (low, high))
    for start in range(first, last + 1, stride << 20):
        bits = np.arange(start, min(start + (stride << 20), last + 1), stride, dtype=np.uint32)
        yield bits.view(np.float32)


@pytest.mark.cpu
@pytest.mark.smoke
def test_exp():
    """exp is within 2 ulp on [-87.3, 88.7], 0 and inf beyond, and keeps a NaN."""
    for piece in itertools.chain(floats(0, 88.7, 997), floats(-0.0, -87.3, 997)):
        assert ulps(piece) <= 2
    # the bounds themselves, both zeros, a denormal; then beyond, and NaNs in vector and tail
    ends = np.array([-87.3, 88.7, -0.0, 0.0, 1e-40], np.float32)
    assert ulps(ends) <= 2
    assert (ag.exp(own(np.float32([-88.5, -104, -1e30, -np.inf]))).numpy() == 0).all()
    assert np.isposinf(ag.exp(own(np.float32([88.8, 89.5, 1e30, np.inf]))).numpy()).all()
    nan = np.zeros(37, np.float32)
    nan[[0, 17, 36]] = np.nan
    assert_same_bits(np.isnan(ag.exp(own(nan)).numpy()), np.isnan(nan))


@pytest.mark.cpu
def test_weights_and_sigmoids():
    """The power of two behind softmax and silu: exact sums, right tails, nothing odd for any
    finite float."""
    x = np.linspace(-60, 0, 200_001, dtype=np.float32).reshape(3, -1)
    truth = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    truth /= truth.sum(1, keepdims=True)
    # a score that lies d below the largest has d*2^-24 of it as rounding error in its weight
    assert (np.abs(ag.softmax(own(x)).numpy()/truth - 1) < 1e-6 + 20*2.0**-23).all()
    far = own(np.float32([[0, -86, -88, -1e30, -np.inf]]))
    assert (ag.softmax(far).numpy()[0, [0, 2, 3, 4]] == [1, 0, 0, 0]).all()
    for piece in itertools.chain(floats(1e-38, 3e38, 99991), floats(-1e-38, -3e38, 99991)):
        y = ag.silu(own(piece)).numpy()
        assert np.isfinite(y).all()
        with np.errstate(over="ignore"):
            error = np.abs(y - silu64(piece.astype(np.float64)))
        # as above: e^-|x| has the rounding error of x
        assert (error <= (1e-6 + 1e-7*np.minimum(np.abs(piece), 90))*np.abs(y) + 1e-30).all()


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.skipif("XTRAIN_SLOW" not in os.environ, reason="XTRAIN_SLOW=1 sweeps every float")
def test_exp_of_every_float():
    """The same bound for all 2.2 billion floats of the range."""
    for piece in itertools.chain(floats(0, 88.7), floats(-0.0, -87.3)):
        assert ulps(piece) <= 2


@pytest.mark.parametrize("name", ["silu", "gelu", "softmax", "add_rmsnorm", "sum", "matmul"])
def test_nan_survives(name):
    """A NaN in the input is in the result."""
    x = np.ones((17, 33), np.float32)
    x[5, 7] = np.nan
    calls = {"add_rmsnorm": lambda t: ag.add_rmsnorm(t, None, own(np.ones(33, np.float32))),
             "matmul": lambda t: t @ own(np.ones((33, 16), np.float32)),
             "sum": lambda t: ag.sum(t, axis=1)}
    result = calls.get(name, getattr(ag, name))(own(x)).numpy()
    assert np.isnan(result[5]).any() and np.isfinite(result[4]).all()


def philox(key, counter, blocks=1):
    """The words of the core's generator: [blocks, 4], the last counter word counting up."""
    out = np.empty((blocks, 4), np.uint32)
    c0, c1, c2, c3 = counter
    tensor.core.philox(key[0] | key[1] << 32, c0 | c1 << 32, c2, c3, blocks, out.ctypes.data)
    return out


# Key, counter and words of Random123's known-answer tests.
ONES = 0xffffffff
VECTORS = [((0, 0), (0, 0, 0, 0), (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
           ((ONES, ONES), (ONES,)*4, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
           ((0xa4093822, 0x299f31d0), (0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
            (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1))]


@pytest.mark.smoke
@pytest.mark.parametrize("key, counter, words", VECTORS)
def test_philox(key, counter, words):
    """The published vectors of philox4x32-10, for the core and for the oracle; then counting up."""
    assert philox(key, counter)[0].tolist() == list(words)
    assert philox64(key[0] | key[1] << 32, *counter).tolist() == list(words)
    # the last word does not carry into the third, so counting stops at its end
    count = 1 if counter[3] == ONES else 37
    assert_same_bits(philox(key, counter, count),
                     philox64(key[0] | key[1] << 32, *counter[:3], counter[3] + np.arange(count)))


@pytest.mark.smoke
def test_dropout():
    """Kept fraction and mean are right, the mask is Philox's, other seeds and sites differ."""
    x = np.ones((16, 64, 256), np.float32)
    for p in (0.1, 0.5, 0.9):
        drop = ag.Dropout(p, 7, 0, 1)
        y = ag.dropout(own(x), drop).numpy()
        assert_same_bits(y != 0, mask64(x.shape, *drop) != 0, "mask")
        assert abs((y != 0).mean() - (1 - p)) < 0.01
        assert abs(y.mean() - 1) < 0.01
    # averaged over many seeds every entry comes back
    few = rng_of("E[out]").standard_normal((1, 8, 16)).astype(np.float32)
    mean = np.mean([ag.dropout(own(few), ag.Dropout(0.2, s, 0, 0)).numpy() for s in range(4000)], 0)
    assert error(mean, few) < 0.05
    # all parts of the address matter, also beyond 32 bits
    seen = {ag.dropout(own(x), ag.Dropout(0.5, *at)).numpy().tobytes()
            for at in itertools.product((7, 8, 7 + (1 << 32)), (0, 16, 1 << 32), (0, 1, 4))}
    assert len(seen) == 27


def test_dropout_follows_the_sequence():
    """A sequence's mask depends on its number in the run, not on its place in the batch."""
    x = np.ones((5, 9, 32), np.float32)
    whole = ag.dropout(own(x), ag.Dropout(0.5, 3, 100, 2)).numpy()
    for i in range(5):
        alone = ag.dropout(own(x[:1]), ag.Dropout(0.5, 3, 100 + i, 2)).numpy()
        assert_same_bits(alone[0], whole[i])


def test_philox_mask():
    """The mask on its own is the one that dropout applies."""
    shape, how = (3, 7, 20), ag.Dropout(0.4, 5, 6, 7)
    assert_same_bits(tensor.philox_mask(shape, how).numpy() != 0, mask64(shape, *how) != 0)


def test_newton_schulz():
    """Five steps on matrices of both orientations against the same steps in float64."""
    for shape in [(1, 1), (17, 33), (33, 17), (130, 64)]:
        # by definition on the wide orientation, so that x x' is the smaller square
        x = rng_of("newton").standard_normal(shape).astype(np.float32)
        y = x.astype(np.float64)/(np.sqrt((x.astype(np.float64)**2).sum()) + 1e-7)
        y = y.T if shape[0] > shape[1] else y
        for _ in range(5):
            a = y @ y.T
            y = 3.4445*y + (-4.7750*a + 2.0315*a @ a) @ y
        assert_close(tensor.newton_schulz(own(x)).numpy(), y.T if shape[0] > shape[1] else y)


def test_bf16_casts():
    """f32 -> bf16 rounds to nearest even and keeps NaN and inf; the way back is exact."""
    # ties to both sides, the overflow to inf, infinities, NaNs whose payload rounding could lose,
    # denormals; then random patterns
    bits = rng_of("bf16").integers(0, 1 << 32, 40000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x7f7fffff, 0x7f800000,
                      0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff, 0, 0x80000000, 1,
                      0x00008000], np.uint32)
    bits = np.concatenate([edges, bits])
    x = bits.view(np.float32)
    # half of the dropped unit is added, less one if the kept part is even
    wide = bits.astype(np.uint64)
    expected = ((wide + 0x7fff + (wide >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)

    def round_trip(a):
        return tensor.cast(tensor.cast(own(a), "bf16"), "f32").numpy()

    back = round_trip(x)
    assert_same_bits(tensor.cast(own(x), "bf16").numpy(), back)
    assert_same_bits(np.isnan(back), np.isnan(x), "NaN")
    numbers = ~np.isnan(x)
    assert_same_bits(back[numbers], expected[numbers], "rounded")
    assert_same_bits(round_trip(back[numbers]), back[numbers], "exact")


# ---- 5. Tape ------------------------------------------------------------------------------------
# What a user of the tape relies on: what is recorded and what is not, what adds up, what is freed,
# and errors that say which operation met which shapes.

def leaf(*shape, seed=0):
    """A random leaf."""
    return own(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), grad=True)


def test_tensors():
    """Shape, dtype and values go in and come out; numpy() is a copy."""
    for name, dtype in dict(f32=np.float32, i32=np.int32, i64=np.int64, u8=np.uint8).items():
        array = np.arange(12, dtype=dtype).reshape(3, 4)
        t = own(array)
        assert (t.shape, t.dtype, t.ndim, t.size, t.device) == ((3, 4), name, 2, 12, tensor.DEVICE)
        assert_same_bits(t.numpy(), array)
        t.numpy()[...] = 0
        assert_same_bits(t.numpy(), array, "numpy() shares memory")
        assert_same_bits(own(array.T).numpy(), array.T.copy(), "strided source")
        assert_same_bits(own(array[::-1, ::2]).numpy(), array[::-1, ::2].copy(), "strided source")
    t = tensor.zeros((2, 3))
    assert t.dtype == "f32" and not t.numpy().any()
    t.set_(np.full((2, 3), 2.5))
    assert (t.numpy() == 2.5).all() and own(np.float32(4)).item() == 4
    with pytest.raises(ValueError, match=r"2, 3.*3, 2|3, 2.*2, 3"):
        t.set_(np.zeros((3, 2)))


def test_no_grad():
    """Inside no_grad nothing is recorded, also after an exception inside."""
    x = leaf(3, 4)
    # an exception must not leave the recording switched off
    with pytest.raises(KeyError), ag.no_grad():
        raise KeyError
    with ag.no_grad():
        y = ag.silu(x)*2.0
    with pytest.raises(RuntimeError):
        ag.sum(y).backward()
    ag.sum(ag.silu(x)).backward()
    assert x.grad is not None


def test_constants_get_no_gradient():
    """A tensor that asks for none has none, whatever it is combined with."""
    x, k = leaf(3, 4), own(np.ones((4, 5), np.float32))
    ag.sum(x @ k).backward()
    assert k.grad is None and x.grad is not None


def test_two_losses_accumulate():
    """Leaf gradients add up over two graphs."""
    x = leaf(5, 7)
    ag.sum(x*x).backward()
    ag.sum(x*3.0).backward()
    assert_close(x.grad.numpy(), 2*x.numpy() + 3)


def test_backward_with_a_gradient():
    """A result of any shape goes backward from a given gradient; a wrong one is an error."""
    x = leaf(5, 7)
    seed = rng_of("seed").standard_normal((5, 7)).astype(np.float32)
    (x*x).backward(own(seed))
    assert_close(x.grad.numpy(), 2*x.numpy()*seed)
    with pytest.raises(ValueError, match=r"5, 7.*7, 5|7, 5.*5, 7"):
        (x*x).backward(own(seed.T.copy()))
    with pytest.raises(ValueError, match="5, 7"):
        (x*x).backward()


def test_second_backward_is_an_error():
    """A graph is dropped as it is walked; walking it again says so."""
    x = leaf(5, 7)
    loss = ag.sum(ag.silu(x)*x)
    loss.backward()
    before = x.grad.numpy()
    with pytest.raises(RuntimeError, match="backward|graph"):
        loss.backward()
    assert_same_bits(x.grad.numpy(), before, "the failed call changed a gradient")


@pytest.mark.parametrize("drop", [None, ag.Dropout(0.3, 1, 2, 3)], ids=["plain", "dropout"])
def test_recompute(drop):
    """recompute runs its function twice and changes no bit of result or gradients."""
    calls = []

    def block(x, w):
        calls.append(1)
        return ag.linear(ag.silu(ag.linear(x, w)), w, x, drop)

    # the input is also used outside, the weight twice inside: sums must keep their order
    answers = []
    for run in (block, partial(ag.recompute, block)):
        x, w = leaf(2, 9, 33, seed=1), leaf(33, 33, seed=2)
        inner = x*2.0
        y = run(inner, w)
        ag.sum(y*y + inner).backward()
        answers.append([t.numpy() for t in (y, x.grad, w.grad)])
    assert len(calls) == 3
    for a, b in zip(*answers):
        assert_same_bits(a, b)


# Operations whose outputs are made again for the backward, on sizes with and without whole panels.
MADE_AGAIN = {
    "norm": lambda: [ag.add_rmsnorm(leaf(3, 5, 70), None, leaf(70))],
    "add and norm": lambda: ag.add_rmsnorm(leaf(3, 5, 70), leaf(3, 5, 70), leaf(70)),
    "rope": lambda: ag.qk_norm_rope(leaf(2, 7, 8*6), *tensor.cos_sin(7, 6), 4, 2),
    "norm and rope": lambda: ag.qk_norm_rope(leaf(2, 7, 8*6), *tensor.cos_sin(7, 6), 4, 2,
                                             leaf(6), leaf(6)),
    **{f"swiglu {rows} {ffn}": lambda rows=rows, ffn=ffn:
       [ag.gate_up_swiglu(leaf(rows, 33), leaf(2*ffn, 33))]
       for rows in (1, 15, 16, 100) for ffn in (7, 32, 70, 352)},
}


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_made_again_with_the_same_bits(name):
    """`saved` gives what the operation gave, all of it or one output, and holds none of it."""
    outs = list(MADE_AGAIN[name]())
    before, keep = [t.numpy() for t in outs], ag.saved(*outs)
    last = ag.saved(outs[-1])
    del outs
    for a, b in zip(keep(), before, strict=True):
        assert_same_bits(a.numpy(), b)
    assert_same_bits(last()[0].numpy(), before[-1])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("rows, ffn", [(1, 7), (15, 32), (16, 70), (100, 352)])
@pytest.mark.parametrize("tracked", ["x up down r", "x up down", "down", "r", "up", "x"])
@pytest.mark.parametrize("own_residual", [True, False])
def test_mlp_is_its_two_operations(dtype, p, rows, ffn, tracked, own_residual):
    """The same bits, result and every gradient, with dropout; the residual may be x itself."""
    values = [np.random.default_rng(i).standard_normal(shape).astype(np.float32)
              for i, shape in enumerate([(2, rows, 33), (2*ffn, 33), (33, ffn),
                                           (2, rows, 33)])]
    two = lambda x, up, down, r, how: ag.linear(ag.gate_up_swiglu(x, up), down, r, how)
    results = []
    for run in (ag.mlp, two):
        x, r = ((own16 if dtype == "bf16" else own)(v, grad=True) for v in values[::3])
        up, down = (own(v, grad=True) for v in values[1:3])
        leaves = {"x": x, "up": up, "down": down, "r": r if own_residual else x}
        wanted = {id(leaves[name]) for name in tracked.split()}
        for t in leaves.values():
            t.requires_grad = id(t) in wanted
        out = run(x, up, down, leaves["r"], ag.Dropout(p, 5, 3, 1))
        ag.sum(out*out).backward()
        assert all((t.grad is not None) == t.requires_grad for t in leaves.values())
        results.append([out.numpy(), *(t.grad.numpy() for t in leaves.values() if t.requires_grad)])
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a).all() and a.any()
        assert_same_bits(a, b)


def test_swiglu_of_no_columns():
    """ffn = 0: what is added is nothing, forward and backward."""
    x, up, down, r = leaf(3, 4), leaf(0, 4), leaf(4, 0), leaf(3, 4)
    out = ag.mlp(x, up, down, r)
    assert_same_bits(out.numpy(), r.numpy())
    ag.sum(out).backward()
    assert not x.grad.numpy().any() and (r.grad.numpy() == 1).all()


def test_slopes_far_out():
    """0 or 1 for every finite x that is large enough."""
    x = np.float32([1e3, 1e6, 2e13, 1e18, 1e20, 3e38])
    for f in (ag.silu, ag.gelu):
        t = own(np.concatenate([x, -x]), grad=True)
        f(t).backward(np.ones(12, np.float32))
        assert (t.grad.numpy() == [1]*6 + [0]*6).all(), f


def test_saved_holds_what_nobody_makes_again():
    """Leaves, plain results and outputs of two operations are given back as they are."""
    x, y = leaf(3, 4), ag.silu(leaf(3, 4))
    h = ag.gate_up_swiglu(x, leaf(10, 4))
    for tensors in ((x,), (y,), (x, y), (h, y)):
        assert all(a is b for a, b in zip(ag.saved(*tensors)(), tensors, strict=True))


def test_made_again_after_writing():
    """Written to before it is used, an output is kept; what it is made from, written to before the
    backward, is an error; so is a second walk, and it leaves no gradient."""
    x, w, up, v = leaf(4, 8), leaf(8), leaf(12, 8), leaf(5, 6)
    h = ag.gate_up_swiglu(x, up)
    h.set_(np.zeros(h.shape, np.float32))
    ag.sum(ag.linear(h, v)).backward()
    assert not v.grad.numpy().any()
    for changed in (w, x):
        y = ag.add_rmsnorm(x, None, w)
        loss = ag.sum(ag.linear(y, up))
        changed.set_(changed.numpy())
        with pytest.raises(RuntimeError, match="overwritten since the forward"):
            loss.backward()
    v.grad, h = None, ag.gate_up_swiglu(x, up)
    losses = [ag.sum(ag.linear(h, t)) for t in (leaf(3, 6), v)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match="compute it again"):
        losses[1].backward()
    assert v.grad is None


@pytest.mark.parametrize("rows", [3, 16, 40])
def test_swiglu_of_an_empty_sum(rows):
    """No columns to sum over: gate, up and h are zero, every one of them."""
    for t in [tensor.fill(tensor.empty((rows, 256)), 7.0) for _ in range(4)]:
        del t                                       # what the pool hands out next is not zero
    for t in tensor.gate_up_swiglu(tensor.empty((rows, 0)), tensor.empty((256, 0))):
        assert not t.numpy().any()


@pytest.mark.cpu
def test_a_step_keeps_no_more_than_it_must():
    """Between forward and backward: per position and layer the stream before attention and MLP,
    q, k and v before RoPE, attention's result, gate and up; and what is small."""
    c = xtrain.Config(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, ffn=192)
    model = xtrain.Decoder(c)
    tokens = np.zeros((4, 256), np.int64)
    before = tensor.pool_stats()["used"]
    loss = model.loss(tokens, tokens)
    held = tensor.pool_stats()["used"] - before
    floats = c.layers*(2*c.dim + (c.heads + 2*c.kv_heads)*c.head_dim + c.dim + 2*c.ffn)
    floats += 2*c.dim                                   # the stream after the last block, normed
    floats += c.layers*(2 + c.heads + c.kv_heads + c.heads)     # rstd of norms and heads, lse
    assert held <= 1.05*4*tokens.size*floats + (1 << 16), (held, 4*tokens.size*floats)
    loss.backward()


@pytest.mark.cpu
def test_recompute_keeps_only_its_inputs():
    """Between forward and backward a recomputed block holds no more than its inputs and result."""
    def block(x):
        for _ in range(8):
            x = ag.silu(x)*x
        return x

    # the block makes 16 tensors, of which a plain run keeps what its backward needs
    used = []
    for run in (block, partial(ag.recompute, block)):
        x = leaf(64, 1024)
        before = tensor.pool_stats()["used"]
        y = run(x)
        used.append((tensor.pool_stats()["used"] - before)/(64*1024*4))
        ag.sum(y).backward()
        del x, y
    assert used[1] <= 1.1 < 7 < used[0]     # in tensors of x's size


# Calls that cannot work, and the two shapes that the message must hold.
A, B = (2, 3), (4, 5)
MISMATCHES = {
    "add": (lambda: leaf(*A) + leaf(*B), A, B),
    "sub": (lambda: leaf(*A) - leaf(*B), A, B),
    "mul": (lambda: leaf(*A)*leaf(*B), A, B),
    "div": (lambda: leaf(*A)/leaf(*B), A, B),
    "matmul": (lambda: leaf(*A) @ leaf(*B), A, B),
    "linear": (lambda: ag.linear(leaf(*A), leaf(*B)), A, B),
    "linear ": (lambda: ag.linear(leaf(2, 3), leaf(4, 3), leaf(4, 2)), (2, 4), (4, 2)),
    "add_rmsnorm": (lambda: ag.add_rmsnorm(leaf(*A), leaf(*B), leaf(3)), A, B),
    "add_rmsnorm ": (lambda: ag.add_rmsnorm(leaf(*A), None, leaf(5)), A, (5,)),
    "gate_up_swiglu": (lambda: ag.gate_up_swiglu(leaf(*A), leaf(4, 7)), A, (4, 7)),
    "reshape": (lambda: ag.reshape(leaf(*A), (4, 2)), A, (4, 2)),
    "cross_entropy": (lambda: ag.cross_entropy(leaf(*A), own(np.zeros(7, int))), A, (7,)),
    "head_loss": (lambda: ag.head_loss(leaf(*A), leaf(*B), own(np.zeros(2, int))), A, B),
    "head_loss ": (lambda: ag.head_loss(leaf(*A), leaf(5, 3), own(np.zeros(7, int))), A, (7,)),
    "qk_norm_rope": (lambda: ag.qk_norm_rope(leaf(1, 4, 24), leaf(5, 4), leaf(5, 4), 1, 1),
                     (1, 4, 24), (5, 4)),
    "qk_norm_rope ": (lambda: ag.qk_norm_rope(leaf(1, 4, 24), leaf(4, 4), leaf(4, 4), 1, 1,
                                              leaf(6), leaf(8)), (1, 4, 24), (6,)),
    "repeat_kv": (lambda: ag.repeat_kv(leaf(*A), 2), A, A),
}
# q and k of two head_dims, heads that cannot be shared out, fewer keys than queries
for q, k in [((1, 4, 2, 8), (1, 4, 2, 6)), ((1, 4, 3, 8), (1, 4, 2, 8)),
             ((1, 4, 2, 8), (1, 3, 2, 8))]:
    for flash in (True, False):
        MISMATCHES[f"attention {q} {k} {flash}"] = (
            lambda q=q, k=k, f=flash: ag.attention(leaf(*q), leaf(*k), leaf(*k), f), q, k)


@pytest.mark.parametrize("name", MISMATCHES)
def test_shape_errors(name):
    """Shapes that do not fit are a ValueError that names the operation and both shapes."""
    call, *shapes = MISMATCHES[name]
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert name.split()[0] in message
    for shape in shapes:
        assert re.search(r"\b" + ", ".join(map(str, shape)) + r"\b", message), message


# Where each operation takes f32, given whole numbers instead.
WHOLE = {
    "matmul": lambda t: leaf(5, 4) @ t, "add": lambda t: leaf(4, 4) + t, "softmax": ag.softmax,
    "silu": ag.silu, "gelu": ag.gelu, "exp": ag.exp, "sum": ag.sum,
    "linear": lambda t: ag.linear(t, leaf(3, 4)), "linear ": lambda t: ag.linear(leaf(3, 4), t),
    "linear  ": lambda t: ag.linear(leaf(4, 3), leaf(4, 3), t),
    "add_rmsnorm": lambda t: ag.add_rmsnorm(t, None, leaf(4)),
    "add_rmsnorm ": lambda t: ag.add_rmsnorm(leaf(4, 4), t, leaf(4)),
    "gate_up_swiglu": lambda t: ag.gate_up_swiglu(leaf(3, 4), t),
    "head_loss": lambda t: ag.head_loss(t, leaf(9, 4), own(np.zeros(4, int))),
    "cross_entropy": lambda t: ag.cross_entropy(t, own(np.zeros(4, int))),
    "embed": lambda t: ag.embed(own(np.zeros(4, int)), t),
    "dropout": lambda t: ag.dropout(t.view((1, 4, 4)), ag.Dropout(0.5, 0, 0, 0)),
    "attention": lambda t: ag.attention(*[t.view((1, 4, 1, 4))]*3),
    "qk_norm_rope": lambda t: ag.qk_norm_rope(t.view((1, 4, 4)), leaf(4, 1), leaf(4, 1), 0, 1)}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_refused(name):
    """Integers where f32 is computed are a TypeError, not their bits read as floats."""
    with pytest.raises(TypeError, match=name.strip()):
        WHOLE[name](own(np.ones((4, 4), np.int64)))


def test_numbers_of_numpy():
    """A NumPy number or array on either side of an operator gives a Tensor, on the tape."""
    x, row = leaf(2, 3), np.array([1, 2, 3], np.float32)
    for result, expected in [(np.float32(2)*x, 2*x.numpy()), (x*np.float64(2), 2*x.numpy()),
                             (row + x, row + x.numpy()), (x - row, x.numpy() - row)]:
        assert isinstance(result, tensor.Tensor)
        assert_close(result.numpy(), expected)


def test_order_of_tokens_that_does_not_fit():
    """An order that is not one of these tokens is an error, before it becomes an address."""
    tokens = own(np.array([3, 1, 2, 1, 0]))
    for order in ([0, 1, 2], [0, 1, 2, 3, 5], [0, 1, 2, 3, -1]):
        with pytest.raises((ValueError, IndexError), match="embed"):
            ag.sum(ag.embed(tokens, leaf(4, 3), own(np.array(order)))).backward()


def test_tokens_out_of_range():
    """A token or target outside the vocabulary is an error, not a wild read."""
    for token in (11, -1, 1 << 40):
        with pytest.raises((ValueError, IndexError), match="embed"):
            ag.embed(own(np.array([0, token])), leaf(11, 8))
    for target in (11, -2):
        with pytest.raises((ValueError, IndexError), match="head_loss"):
            ag.head_loss(leaf(2, 8), leaf(16, 8), own(np.array([0, target])), vocab=11)
    with pytest.raises(ValueError, match="head_loss"):
        ag.head_loss(leaf(2, 8), leaf(16, 8), own(np.array([0, 1])), vocab=17)


def test_threads_record_on_their_own():
    """no_grad in one Python thread leaves the others recording."""
    inside, done = threading.Event(), threading.Event()

    def sample():
        with ag.no_grad():
            inside.set()
            done.wait(10)

    other = threading.Thread(target=sample)
    other.start()
    inside.wait(10)
    x = leaf(3)
    y = x*2.0
    done.set()
    other.join()
    ag.sum(y).backward()
    assert_close(x.grad.numpy(), np.full(3, 2.0))


def test_nothing_to_learn():
    """A batch whose targets are all -1 has loss 0 and gradient 0, whatever the denominator."""
    for counted in (None, 0, 5):
        model = build()
        tokens, targets = batch_of(model.config)
        assert xtrain.Step(model, xtrain.AdamW(model)).micro(
            tokens, np.full_like(targets, -1), counted=counted).item() == 0
        assert not model.arena.grads.numpy().any()


ALIASES = {
    "twice": lambda y: (y, y), "overlapping": lambda y: (y[:3], y[1:]),
    "reshaped": lambda y: (y, y.reshape(12)), "reversed": lambda y: (y[::-1], y),
    "gaps": lambda y: (y[1:2], y[3:]), "one": lambda y: (y,)}


@pytest.mark.parametrize("cut", ALIASES.values(), ids=ALIASES)
def test_recompute_of_several_outputs(cut):
    """Outputs that share memory, in any way, have gradients of their own."""
    grads = []
    for run in (lambda f, x: f(x), ag.recompute):
        x = leaf(4, 3)
        outs = run(lambda x: cut(ag.silu(x)), x)
        total = ag.sum(x)
        for i, out in enumerate(outs):
            total = total + ag.sum(out*(out + 10.0**i))
        total.backward()
        grads.append(x.grad.numpy())
    assert_close(*grads)


def test_strided_tokens_and_targets():
    """Windows cut from one tensor train like arrays."""
    model = build()
    window = np.random.default_rng(0).integers(0, model.config.vocab_size, (4, 9))
    losses = [model.loss(w[:, :-1], w[:, 1:]).item() for w in (window, own(window))]
    assert losses[0] == losses[1]


def test_after_a_gradient_that_is_not_finite():
    """A skipped update clears the gradients, so that the next one is as if it had not been."""
    model = build()
    step = xtrain.Step(model, xtrain.AdamW(model))
    step.micro(*batch_of(model.config))
    model.arena.grads.view((1,)).set_([np.nan])
    assert np.isnan(step.update(1e-3)[1]) and not model.arena.grads.numpy().any()
    step.micro(*batch_of(model.config))
    assert np.isfinite(step.update(1e-3)[1]) and step.optimizer.steps == 1


def test_saved_over_shards(tmp_path):
    """What is saved last is what is loaded, also where an index of older shards remains."""
    model = build()
    xtrain.save_pretrained(model, str(tmp_path))
    os.rename(tmp_path/"model.safetensors", tmp_path/"old.safetensors")
    index = {"weight_map": dict.fromkeys(model.parameters(), "old.safetensors")}
    (tmp_path/"model.safetensors.index.json").write_text(json.dumps(index))
    norm = xtrain.load_pretrained(str(tmp_path)).parameters()["model.norm.weight"]
    assert (norm.numpy() == 1).all()
    model.parameters()["model.norm.weight"].set_(norm.numpy()*5)
    xtrain.save_pretrained(model, str(tmp_path))
    norm = xtrain.load_pretrained(str(tmp_path)).parameters()["model.norm.weight"]
    assert (norm.numpy() == 5).all()


def test_step_numbers_its_sequences():
    """Left to itself, Step draws other dropout masks in every step."""
    model = build(dropout=0.5)
    step = xtrain.Step(model, xtrain.AdamW(model))
    losses = [(step.micro(*batch_of(model.config)).item(), step.update(0.0))[0] for _ in range(3)]
    assert len(set(losses)) == 3


def test_numpy_sizes(tmp_path):
    """Sizes that are NumPy's numbers are taken as Python's: no overflow, and they can be saved."""
    model = build(layers=np.int64(2), vocab_size=np.int16(37), norm_eps=np.float32(1e-6))
    xtrain.save_pretrained(model, str(tmp_path))
    assert xtrain.load_pretrained(str(tmp_path)).config.layers == 2


def test_rates_that_are_none():
    """A learning rate or a clip that is no number is refused before it reaches a weight."""
    model = build()
    for lr in (np.nan, np.inf):
        with pytest.raises(ValueError, match="lr"):
            xtrain.AdamW(model).step(lr)
    for clip in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="grad_clip"):
            xtrain.AdamW(model, grad_clip=clip)
    with pytest.raises(TypeError, match="operand"):
        leaf(3) + None


def test_recompute_of_one_input_twice():
    """A function of (x, x) gives x both its gradients, recomputed or not."""
    grads = []
    for run in (lambda a, b: a*a*b, partial(ag.recompute, lambda a, b: a*a*b)):
        x = leaf(5, 7)
        ag.sum(run(x, x)).backward()
        grads.append(x.grad.numpy())
    assert_same_bits(*grads)


def test_one_slice_as_two_inputs():
    """q, k and v are slices of one tensor, as are their gradients; k may also serve as v."""
    grads = []
    for flash in (True, False):
        x = leaf(1, 5, 3*8)
        q, k, _ = ag.qk_norm_rope(x, *tensor.cos_sin(5, 8), 1, 1)
        ag.sum(ag.attention(q, k, k, flash)*2.0 + q).backward()
        grads.append(x.grad.numpy())
    assert_close(*grads)


def test_too_many_axes():
    """A strided walk has eight axes at most: one more is an error that names the shape."""
    x = own(np.zeros((2,)*11))
    with pytest.raises(ValueError, match=r"copy: more than 8 axes: \(2, 2"):
        ag.transpose(x, *range(11)[::-1]).reshape(-1)


@pytest.mark.parametrize("key", [None, True, [0, 1], np.array([0, 1]), 1.0, (0, None)], ids=repr)
def test_keys_that_are_not_basic(key):
    """What basic indexing does not cover is a TypeError, not a wrong view."""
    with pytest.raises(TypeError, match="slice"):
        leaf(3, 4)[key]


def test_dropout_of_everything():
    """A probability outside [0, 1) is an error that says so."""
    for p in (1.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="dropout: p"):
            tensor.dropout(leaf(1, 2, 4), ag.Dropout(p, 0, 0, 0))


@pytest.mark.cpu
def test_a_dropped_model_is_freed():
    """Model, gradients and optimizer go back to the pool without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = tensor.pool_stats()["used"]
        model = build()
        step = xtrain.Step(model, xtrain.AdamW(model))
        step.micro(*batch_of(model.config))
        step.update()
        del model, step
        assert tensor.pool_stats()["used"] == before
    finally:
        gc.enable()


# ---- 6. Model -----------------------------------------------------------------------------------
# The whole decoder against decoder64: logits, loss, every parameter's gradient; then configuration,
# optimizer and files.

# TINY is for finite differences: no two of its sizes are equal.  SMALL is large enough for threads
# to share its operations.
TINY = dict(vocab_size=19, dim=12, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=10, max_seq=64)
SMALL = dict(vocab_size=211, dim=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=341,
             max_seq=128)
MODELS = {"gqa": {}, "tied, plain q and k": dict(tie_embeddings=True, qk_norm=False, kv_heads=1),
          "dropout": dict(dropout=0.25), "recomputed": dict(dropout=0.25, recompute=True),
          "composed attention": dict(flash=False)}


def build(seed=0, **settings):
    """A Decoder of TINY, or of what overrides it."""
    return xtrain.Decoder(xtrain.Config(**{**TINY, **settings}), seed=seed)


def scatter(model, seed=0):
    """Overwrite all weights by random ones large enough for every gradient to matter."""
    # a matrix keeps the size of what it multiplies; a fresh model's attention is nearly flat
    rng = np.random.default_rng(seed)
    for p in model.parameters().values():
        x = rng.standard_normal(p.shape)
        p.set_((1 + 0.2*x if p.ndim == 1 else x/np.sqrt(p.shape[1])).astype(np.float32))
    return model


def weights64(model):
    """{name: float64 array} of a model's parameters, the oracle's input."""
    return {name: p.numpy().astype(np.float64) for name, p in model.parameters().items()}


def weights_of(model):
    """{name: float32 array} of a model's parameters."""
    return {name: p.numpy() for name, p in model.parameters().items()}


def batch_of(config, batch=2, seq=7, seed=0, ignored=0.2):
    """Random tokens and targets [batch, seq], a share of the targets ignored.

    Targets are random too, not the next tokens: nothing in the loss may rely on that.
    """
    tokens = ints(config.vocab_size, batch, seq, seed=seed)
    targets = ints(config.vocab_size, batch, seq, seed=seed + 1)
    targets[np.random.default_rng(seed).random(targets.shape) < ignored] = -1
    return tokens, targets


def model_truth(name):
    """Central differences of the float64 decoder by every parameter: {name: (probes, slopes)}."""
    # how the model computes does not enter the formula
    formula = {k: v for k, v in MODELS[name].items() if k not in ("recompute", "flash")}
    return truth_of(tuple(formula.items()))


@cache
def truth_of(settings):
    """model_truth of a tuple of settings."""
    model = scatter(build(**dict(settings)))
    tokens, targets = batch_of(model.config)
    weights = weights64(model)
    names, arrays = list(weights), list(weights.values())

    def loss(*values):
        return decoder_loss64(model.config, dict(zip(names, values)), tokens, targets, 3)

    probed = [list(directions(a.shape, rng_of(n))) for n, a in weights.items()]
    return {n: (p, slopes(loss, arrays, i, p)) for i, (n, p) in enumerate(zip(names, probed))}


def with_gradients(name):
    """The model of MODELS[name] after one backward, and its loss."""
    model = scatter(build(**MODELS[name]))
    loss = model.loss(*batch_of(model.config), first_sequence=3)
    loss.backward()
    return model, loss.item()


def worst_gradient_error(model, truth):
    """The largest relative error of any parameter's gradient; truth is model_truth's."""
    parameters = model.parameters()
    assert set(parameters) == set(truth)
    vanishing = max(np.abs(slope).max() for _, slope in truth.values())
    return np.max([gradient_error(parameters[n].grad.numpy(), *at, vanishing)
                   for n, at in truth.items()])


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_model_gradients(name):
    """Loss and every parameter's gradient against the float64 decoder."""
    model, loss = with_gradients(name)
    exact = decoder_loss64(model.config, weights64(model), *batch_of(model.config), 3)
    assert abs(loss/exact - 1) < 1e-6
    assert worst_gradient_error(model, model_truth(name)) <= TOLERANCE


# Each kind of parameter, in both layers.
KINDS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
         "input_layernorm", "post_attention_layernorm"]
NAMES = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
         *(f"model.layers.{i}.{kind}.weight" for i in (0, 1) for kind in KINDS)]


@pytest.mark.parametrize("name", NAMES)
def test_mutation(name):
    """Any one parameter's gradient times 1.1 makes the gradient check fail."""
    # the check must notice at the contract's 1e-4, ten times what it is held to
    model, _ = with_gradients("gqa")
    assert set(model.parameters()) == set(NAMES)
    gradient = model.parameters()[name].grad
    gradient.set_(gradient.numpy()*np.float32(1.1))
    with pytest.raises(AssertionError):
        assert worst_gradient_error(model, model_truth("gqa")) <= 1e-4


@pytest.mark.parametrize("settings", [
    dict(), dict(heads=15, kv_heads=5, head_dim=8, dim=120), dict(kv_heads=1, ffn=1365),
    dict(qk_norm=False, tie_embeddings=True), dict(head_dim=66, rope_theta=12345.0, norm_eps=1e-5)])
def test_logits(settings):
    """Logits and loss of a larger model against the float64 decoder."""
    model = scatter(build(**{**SMALL, **settings}))
    tokens, targets = batch_of(model.config, 3, 67)
    logits = model(tokens)
    assert logits.shape == (3, 67, 211)
    assert_close(logits.numpy(), decoder64(model.config, weights64(model), tokens))
    exact = decoder_loss64(model.config, weights64(model), tokens, targets)
    assert abs(model.loss(tokens, targets).item()/exact - 1) < 1e-6
    # another denominator only scales
    assert abs(model.loss(tokens, targets, denominator=1000).item()*1000
               /(exact*(targets >= 0).sum()) - 1) < 1e-6


def parameter_counts(c):
    """Core (all but the vocabulary's matrices) and total parameters, from the formula."""
    attention = c.dim*c.head_dim*(2*c.heads + 2*c.kv_heads)
    norms = 2*c.dim + (2*c.head_dim if c.qk_norm else 0)
    core = c.layers*(attention + 3*c.dim*c.ffn + norms) + c.dim
    return core, core + c.vocab_size*c.dim*(1 if c.tie_embeddings else 2)


# Core and total parameters, as the project's first issue states them.
PRESET_SIZES = {"v0": ("41K", "3.26M"), "v1": ("8.4M", "34M"), "v2": ("28M", "67M"),
                "v3": ("67M", "119M"), **{f"v{i}": ("127M", "205M") for i in range(4, 8)},
                "v8": ("226M", "329M")}


@pytest.mark.parametrize("name", PRESET_SIZES)
def test_presets(name):
    """Presets have the sizes that the project states."""
    def short(n, like):
        digits = len(like.split(".")[1]) - 1 if "." in like else 0
        return f"{n/1e3:.{digits}f}K" if like.endswith("K") else f"{n/1e6:.{digits}f}M"
    counts = parameter_counts(xtrain.Config(**xtrain.PRESETS[name]))
    assert tuple(map(short, counts, PRESET_SIZES[name])) == PRESET_SIZES[name]


def test_parameter_counts():
    """A model counts its logical parameters, tied ones once, and lists each stored tensor once."""
    for settings in ({}, dict(tie_embeddings=True), dict(qk_norm=False)):
        model = build(**settings)
        assert (model.core_params, model.total_params) == parameter_counts(model.config)
        assert sum(p.size for p in model.parameters().values()) == model.total_params


# The field that the message must name, and settings that are wrong in it.
BAD_CONFIGS = {"kv_heads": dict(heads=4, kv_heads=3), "head_dim": dict(head_dim=7),
               "dim": dict(dim=0), "layers": dict(layers=-1), "dropout": dict(dropout=1.0),
               "heads": dict(heads=0), "vocab_size": dict(vocab_size=0), "ffn": dict(ffn=-5),
               "dim ": dict(dim=13, head_dim=None)}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(name):
    """A configuration that cannot be built is a ValueError that names the field."""
    with pytest.raises(ValueError, match=name.strip()):
        build(**BAD_CONFIGS[name])


def test_bad_batches():
    """Tokens outside the vocabulary and shapes that differ are clear errors."""
    model = build()
    tokens, targets = batch_of(model.config)
    with pytest.raises((ValueError, IndexError)):
        model.loss(tokens + 19, targets)
    with pytest.raises(ValueError):
        model.loss(tokens, targets[:, :-1])


def test_set_reaches_the_products():
    """p.set_ is seen by the next forward (packed weights are thrown away); numpy() is a copy."""
    model, other = scatter(build(**SMALL), 1), scatter(build(**SMALL), 2)
    tokens, _ = batch_of(model.config)
    model(tokens)                   # whatever is packed once per version is packed now
    for name, p in model.parameters().items():
        p.numpy()[...] = 0
        before = model.arena.weights.version
        p.set_(other.parameters()[name].numpy())
        assert model.arena.weights.version > before
    assert_same_bits(model(tokens).numpy(), other(tokens).numpy())


def test_an_update_raises_the_version():
    """What is made from weights (panels, mirrors) can see that an optimizer has written them."""
    model = build()
    opt = xtrain.AdamW(model)
    model.loss(*batch_of(model.config)).backward()
    before = model.arena.weights.version
    opt.step()
    assert model.arena.weights.version > before


def test_dropout_only_in_training():
    """Dropout changes the loss in training and nothing after eval()."""
    # two models of the same weights, one of which drops half of each branch
    dropped, plain = scatter(build(dropout=0.5)), scatter(build())
    batch = batch_of(plain.config)
    assert dropped.training
    assert dropped.loss(*batch).item() != plain.loss(*batch).item()
    dropped.eval()
    assert not dropped.training
    assert dropped.loss(*batch).item() == plain.loss(*batch).item()
    assert_same_bits(dropped(batch[0]).numpy(), plain(batch[0]).numpy())
    dropped.train()
    assert dropped.loss(*batch).item() != plain.loss(*batch).item()


def test_causality():
    """Logits at a position do not depend on later tokens, to the bit.

    Not even through a tile of attention that holds both: a weight of 0 times anything finite is 0.
    """
    model = scatter(build(**SMALL))
    tokens, _ = batch_of(model.config, 2, 40)
    changed = tokens.copy()
    changed[:, 23:] = 5
    before, after = model(tokens).numpy(), model(changed).numpy()
    assert_same_bits(before[:, :23], after[:, :23])
    assert (before[:, 23:] != after[:, 23:]).any()


@pytest.mark.smoke
def test_overfit():
    """One batch of 27 tokens, predicted from its start, is learned to a loss under 0.005."""
    # position and left context make every target unique: a perfect score is possible
    text = np.frombuffer(b"every layer can be read now.", np.uint8).astype(np.int64)
    tokens, targets = text[None, :-1], text[None, 1:]
    assert tokens.size == 27
    model = build(vocab_size=256, dim=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
    step = xtrain.Step(model, xtrain.AdamW(model, weight_decay=0.0, grad_clip=1.0))
    for i in range(200):
        step.micro(tokens, targets)
        step.update(xtrain.cosine(i + 1, 200, 3e-3, 3e-4, 10))
    assert model.loss(tokens, targets).item() < 0.005
    assert (model(tokens).numpy().argmax(-1) == targets).all()


@pytest.mark.smoke
def test_adamw():
    """Twenty steps of AdamW with clipping on given gradients against the float64 formula."""
    model = scatter(build())
    opt = xtrain.AdamW(model, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.3, grad_clip=1.0)
    state, clipped = {n: [w, 0*w, 0*w] for n, w in weights64(model).items()}, []
    for step in range(1, 21):
        rng = np.random.default_rng(step)
        model.loss(*batch_of(model.config)).backward()          # makes the gradients' arena
        gradients = {}
        for n, p in model.parameters().items():
            gradients[n] = rng.standard_normal(p.shape)*0.004*step  # norms on both sides of 1
            p.grad.set_(gradients[n].astype(np.float32))
        # the norm comes back unclipped; clipping scales by 1/(norm + 1e-6), as torch does
        norm = np.sqrt(sum((g*g).sum() for g in gradients.values()))
        assert abs(opt.step(lr=1e-2/step)/norm - 1) < 1e-6
        clipped.append(norm > 1)
        for n, g in gradients.items():
            decay, clip = 0.3 if g.ndim > 1 else 0.0, min(1, 1/(norm + 1e-6))
            p, m, v = state[n]
            state[n] = adamw64(p, g, m, v, step, 1e-2/step, (0.8, 0.9), 1e-8, decay, clip)
    assert any(clipped) and not all(clipped)
    for n, p in model.parameters().items():
        assert_close(p.numpy(), state[n][0], 1e-6, n)
        assert not p.grad.numpy().any(), "the optimizer zeroes as it reads"


def fma32(a, b, c):
    """a*b + c of float32 arrays, rounded once (a float64 holds their product exactly)."""
    return (np.float64(a)*np.float64(b) + np.float64(c)).astype(np.float32)


@pytest.mark.smoke
def test_adamw_to_the_bit():
    """The update is these float32 operations, each rounded once, on every device."""
    # inputs from Philox, not from NumPy: the same numbers wherever this runs
    f, n = np.float32, 70001
    words = philox64(5, np.arange(n), 0, 0, 0)[:, :3]/2.0**32 - 0.5
    p, g, m = words.astype(f).T*f(0.1)
    v, (lr, b1, b2, eps, decay, bias1, bias2, factor) = g*g, (
        1e-3, 0.9, 0.95, 1e-8, 0.1, 1 - 0.9**3, 1 - 0.95**3, 0.37)
    ours = [own(x) for x in (p, g, m, v)]
    hyper, clip = [lr, b1, b2, eps, decay, bias1, bias2], [1.0, factor, 1.0, 0.0]
    tensor.adamw(*ours, tensor.tensor64(hyper), tensor.tensor64(clip))
    # constants are formed in double and rounded once
    scaled = g*f(factor)
    m = fma32(f(1 - b1), fma32(g, f(factor), -m), m)
    v = fma32(f(1 - b2)*scaled, scaled, f(b2)*v)
    p = fma32(f(-lr/bias1), m/(np.sqrt(v)/f(np.sqrt(bias2)) + f(eps)), p*f(1 - lr*decay))
    for t, expected in zip(ours, (p, 0*g, m, v)):
        assert_same_bits(np.abs(t.numpy()), np.abs(expected))       # 0 may be -0
        assert (t.numpy() == expected).all()


def test_block_sums():
    """Sums of squares by blocks of 65,536: right, and the same when the array is cut at blocks."""
    block = 65536
    x = rng_of("sumsq").standard_normal(3*block + 17).astype(np.float32)
    sums = tensor.sumsq(own(x)).numpy()
    parts = [x[i:i + block] for i in range(0, len(x), block)]
    assert sums.dtype == np.float64
    assert_close(sums, [np.sum(part.astype(np.float64)**2) for part in parts], 1e-13)
    assert_same_bits(sums, np.concatenate([tensor.sumsq(own(part)).numpy() for part in parts]))


def test_nonfinite_gradients_change_nothing():
    """An update with a NaN in the gradients leaves weights and moments as they were."""
    model = scatter(build())
    opt = xtrain.AdamW(model)
    model.loss(*batch_of(model.config)).backward()
    opt.step()
    model.loss(*batch_of(model.config)).backward()
    flat = model.arena.weights, opt.m, opt.v
    before = [x.numpy() for x in flat]
    grad = model.parameters()["model.norm.weight"].grad
    grad.set_(np.full(grad.shape, np.nan, np.float32))
    assert not np.isfinite(opt.step())
    assert opt.nonfinite
    for a, b in zip(before, flat):
        assert_same_bits(a, b.numpy())


def test_schedule():
    """Warm-up to the full rate at step W, a half cosine to the lowest at the last step."""
    # steps count from 1; the last one has the lowest rate exactly
    rates = np.array([xtrain.cosine(s, 100, 1e-3, 1e-4, 10) for s in range(0, 101)])
    assert_close(rates[1:11], 1e-3*np.arange(1, 11)/10, 1e-12)
    assert_close(rates[10:], 1e-4 + 9e-4*(1 + np.cos(np.pi*np.arange(91)/90))/2, 1e-12)


@pytest.mark.parametrize("settings", [{}, dict(tie_embeddings=True),
                                      dict(qk_norm=False, rope_theta=500.0)])
def test_files(tmp_path, settings):
    """save_pretrained, load_pretrained: the same model; a Hugging Face folder, padding trimmed."""
    from safetensors import safe_open
    model = scatter(build(**settings))
    xtrain.save_pretrained(model, str(tmp_path/"out"))
    twin = xtrain.load_pretrained(str(tmp_path/"out"), dtype="f32")
    for name, p in model.parameters().items():
        assert_same_bits(twin.parameters()[name].numpy(), p.numpy(), name)
    tokens, _ = batch_of(model.config)
    assert_same_bits(twin(tokens).numpy(), model(tokens).numpy())

    # one metadata key, logical shapes, both spellings of theta
    with safe_open(tmp_path/"out"/"model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == {
            n: p.shape for n, p in model.parameters().items()}
    config = json.loads((tmp_path/"out"/"config.json").read_text())
    assert config["model_type"] == ("qwen3" if model.config.qk_norm else "llama")
    assert config["vocab_size"] == 19 and config["intermediate_size"] == 10
    assert config["rope_theta"] == model.config.rope_theta
    assert config["rope_parameters"]["rope_theta"] == model.config.rope_theta


def edit_config(folder, **changes):
    """Change entries of a config.json; None removes one."""
    path = folder/"config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_foreign_files(tmp_path):
    """Shards with an index, either spelling of theta and a copy of the tied head are read."""
    from safetensors.numpy import load_file, save_file
    model = scatter(build(rope_theta=777.0, tie_embeddings=True))
    tokens, _ = batch_of(model.config)
    xtrain.save_pretrained(model, str(tmp_path))
    arrays = load_file(tmp_path/"model.safetensors")
    (tmp_path/"model.safetensors").unlink()
    # every other tensor goes to the second file
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(arrays)}
    for file in set(files.values()):
        save_file({n: a for n, a in arrays.items() if files[n] == file}, tmp_path/file)
    (tmp_path/"model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for without in ("rope_theta", "rope_parameters"):
        xtrain.save_pretrained(model, str(tmp_path/"config"))
        (tmp_path/"config.json").write_text((tmp_path/"config"/"config.json").read_text())
        edit_config(tmp_path, **{without: None})
        twin = xtrain.load_pretrained(str(tmp_path), dtype="f32")
        assert_same_bits(twin(tokens).numpy(), model(tokens).numpy(), without)


def test_bf16_files(tmp_path):
    """Weights stored as bf16 are read as the fp32 numbers that they are."""
    model = scatter(build())
    xtrain.save_pretrained(model, str(tmp_path))
    # safetensors by hand: the header's length, the header, the bytes (NumPy has no bf16)
    header, data, rounded = {}, b"", {}
    for name, p in model.parameters().items():
        half = (p.numpy().view(np.uint32) >> 16).astype(np.uint16)
        rounded[name] = (half.astype(np.uint32) << 16).view(np.float32)
        ends = [len(data), len(data) + half.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(p.shape), "data_offsets": ends}
        data += half.tobytes()
    text = json.dumps(header).encode()
    text += b" "*(-len(text) % 8)
    (tmp_path/"model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    twin = xtrain.load_pretrained(str(tmp_path), dtype="f32")
    for name, p in twin.parameters().items():
        assert_same_bits(p.numpy(), rounded[name], name)


# Entries of config.json that would change the result, and one that is needed.
UNSUPPORTED = [dict(hidden_act="gelu"), dict(attention_bias=True), dict(model_type="gpt2"),
               dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4)),
               dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=None),
               dict(rope_scaling=dict(rope_type="yarn", factor=4.0)),
               dict(use_sliding_window=True), dict(hidden_size=None)]


@pytest.mark.parametrize("change", UNSUPPORTED, ids=str)
def test_unsupported_files(tmp_path, change):
    """A config.json that asks for what the decoder is not is an error that names the field."""
    xtrain.save_pretrained(build(), str(tmp_path))
    edit_config(tmp_path, **change)
    words = "|".join(change).replace("rope_parameters", "rope").replace("rope_scaling", "rope")
    with pytest.raises(ValueError, match=words):
        xtrain.load_pretrained(str(tmp_path), dtype="f32")


def test_files_that_do_not_fit(tmp_path):
    """A folder whose weights are missing or misshapen is an error that names the tensor."""
    from safetensors.numpy import load_file, save_file
    xtrain.save_pretrained(scatter(build()), str(tmp_path))
    # once without the tensor, once with a column too few
    path, name = tmp_path/"model.safetensors", "model.layers.1.mlp.up_proj.weight"
    arrays = load_file(path)
    full = arrays.pop(name)
    for spoiled in ({}, {name: full[:, :-1].copy()}):
        save_file({**arrays, **spoiled}, path, {"format": "pt"})
        with pytest.raises((ValueError, KeyError), match=re.escape(name)):
            xtrain.load_pretrained(str(tmp_path), dtype="f32")


# ---- 7. Parity with transformers ----------------------------------------------------------------
# Their model gets random weights and saves a folder; ours is read from it.  From there on the two
# are compared number by number, and what ours saves goes back to them.  transformers computes in
# fp32 (its norms and softmax even in a float64 model) and therefore errs about as much as we do.

PARITY = {"mha": dict(kv_heads=4), "gqa 6/2": dict(dim=96, heads=6, kv_heads=2, ffn=1365),
          "gqa 15/5": dict(dim=120, heads=15, kv_heads=5, head_dim=8), "mqa": dict(kv_heads=1),
          "wide heads": dict(head_dim=48), "theta 12345": dict(rope_theta=12345.0),
          "tied": dict(tie_embeddings=True), "ffn 1365": dict(ffn=1365, layers=1),
          "llama": dict(qk_norm=False), "llama, tied, 6/2": dict(qk_norm=False, tie_embeddings=True,
                                                                 dim=96, heads=6, kv_heads=2)}
BASE = dict(vocab_size=211, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=341,
            max_seq=128, rope_theta=10000.0, qk_norm=True, tie_embeddings=False, norm_eps=1e-6)


def reference():
    """torch and transformers; without them the test is skipped, or fails if they were promised."""
    try:
        import torch
        import transformers
    except ImportError as missing:
        if os.environ.get("XTRAIN_REQUIRE_PARITY"):
            pytest.fail(f"XTRAIN_REQUIRE_PARITY is set, but: {missing}")
        pytest.skip(str(missing))
    torch.set_num_threads(1)        # a second spinning team would only disturb ours
    return torch, transformers


def their_model(settings, seed=0):
    """A transformers model with random weights large enough for every gradient to matter."""
    torch, transformers = reference()
    s = {**BASE, **settings}
    family = "Qwen3" if s["qk_norm"] else "Llama"
    config = getattr(transformers, family + "Config")(
        vocab_size=s["vocab_size"], hidden_size=s["dim"], num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"],
        intermediate_size=s["ffn"], tie_word_embeddings=s["tie_embeddings"],
        rms_norm_eps=s["norm_eps"], max_position_embeddings=s["max_seq"],
        rope_parameters={"rope_type": "default", "rope_theta": s["rope_theta"]},
        attn_implementation="eager")
    # smaller than scatter's: two fp32 programs drift apart faster the sharper attention is
    model = getattr(transformers, family + "ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            x = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2*x if p.ndim == 1 else 0.7*x/p.shape[1]**0.5)
    return model.train()


def pair(name, folder):
    """Their model of PARITY[name], and ours read from the folder that they saved."""
    theirs = their_model(PARITY[name])
    theirs.save_pretrained(folder)
    return theirs, xtrain.load_pretrained(str(folder), dtype="f32")


def their_loss(model, tokens, targets):
    """Logits and cross entropy over the counted targets, by torch."""
    torch, _ = reference()
    logits = model(torch.from_numpy(tokens)).logits
    return logits, torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-1)


@pytest.mark.parity
@pytest.mark.parametrize("name", PARITY)
def test_parity(name, tmp_path):
    """Logits within 1e-5, loss 1e-6, every gradient 1e-5 of its largest entry; files both ways."""
    _, transformers = reference()
    theirs, ours = pair(name, tmp_path/"theirs")
    tokens, targets = batch_of(ours.config, 3, 37)
    logits, loss = their_loss(theirs, tokens, targets)
    assert_close(ours(tokens).numpy(), logits.detach().numpy(), 1e-5, "logits")
    our_loss = ours.loss(tokens, targets)
    assert abs(our_loss.item()/loss.item() - 1) < 1e-6

    # the same names on both sides, and each gradient by itself
    loss.backward()
    our_loss.backward()
    gradients = {n: p.grad.numpy() for n, p in theirs.named_parameters()}
    assert set(gradients) == set(ours.parameters())
    for n, p in ours.parameters().items():
        assert_close(p.grad.numpy(), gradients[n], 1e-5, n)

    # the way back: their class, their reader, the same bits
    xtrain.save_pretrained(ours, str(tmp_path/"ours"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path/"ours",
                                                             attn_implementation="eager")
    assert type(back) is type(theirs)
    again = their_loss(back, tokens, targets)[0]
    assert_same_bits(again.detach().numpy(), logits.detach().numpy(), "their model of our files")


def their_adamw(model, lr, decay):
    """torch's AdamW with decay on matrices only."""
    torch, _ = reference()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [dict(params=matrices, weight_decay=decay), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def schedule(step, steps=20, warmup=5, low=0.1):
    """The factor on the learning rate: linear up to `warmup`, then half a cosine down to `low`."""
    if step < warmup:
        return step/warmup
    return low + (1 - low)*(1 + np.cos(np.pi*(step - warmup)/(steps - warmup)))/2


@pytest.mark.parity
@pytest.mark.parametrize("fed", [True, False], ids=["same gradients", "trained freely"])
@pytest.mark.parametrize("name", PARITY)
def test_parity_of_training(name, fed, tmp_path):
    """Twenty steps of AdamW, clip 1 and schedule: weights within 5e-6 (freely: their rms)."""
    torch, _ = reference()
    theirs, ours = pair(name, tmp_path)
    reference_opt = their_adamw(theirs, 1e-3, 0.1)
    opt = xtrain.AdamW(ours, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=1.0)
    for i in range(1, 21):
        # both go forward and backward on the same batch
        batch = batch_of(ours.config, 3, 37, seed=i)
        reference_opt.zero_grad()
        their_loss(theirs, *batch)[1].backward()
        ours.loss(*batch).backward()
        if fed:
            for n, p in theirs.named_parameters():
                ours.parameters()[n].grad.set_(p.grad.numpy())
        # both clip, both follow the schedule
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in reference_opt.param_groups:
            group["lr"] = 1e-3*schedule(i)
        reference_opt.step()
        assert abs(opt.step(lr=xtrain.cosine(i, 20, 1e-3, 1e-4, 5))/norm.item() - 1) < 1e-4
    # freely trained, a gradient near zero takes its sign from rounding and Adam makes a full step
    # of it: single entries part, the mass does not
    for n, p in theirs.named_parameters():
        off = np.abs(ours.parameters()[n].numpy() - p.detach().numpy())
        assert (off.max() if fed else np.sqrt((off*off).mean())) <= 5e-6, n


@pytest.mark.parity
def test_oracles():
    """The float64 formulas of section 2 against torch in float64."""
    torch, _ = reference()
    f = torch.nn.functional
    x, w = (rng_of(n).standard_normal((7, 33)) for n in "xw")
    q, k, v = (rng_of(n).standard_normal((2, 9, h, 8)) for n, h in zip("qkv", (6, 2, 2)))
    t, aims = torch.from_numpy, ints(33, 7, low=-1)
    heads = [t(a).transpose(1, 2) for a in (q, k, v)]
    mixed = f.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    for ours, theirs in [
            (silu64(x), f.silu(t(x))), (gelu64(x), f.gelu(t(x), approximate="tanh")),
            (softmax64(x), f.softmax(t(x), -1)),
            (rmsnorm64(x, w[0]), f.rms_norm(t(x), (33,), t(w[0]), 1e-6)),
            (cross_entropy64(x, aims), f.cross_entropy(t(x), t(aims), ignore_index=-1)),
            (attention64(q, k, v), mixed.transpose(1, 2))]:
        assert_close(ours, theirs.numpy(), 1e-12)


# ---- 8. Bitwise promises ------------------------------------------------------------------------
# The same bits: weights, moments and losses after some steps, whatever changes that may not matter.
# Most tests compare with one run, dropped_run, made once; SMALL is large enough for threads.

def advance(step, tokens, targets, lr=1e-3, accum=1, first=0):
    """One update from a batch cut into `accum` micro-steps; returns (loss, gradient norm)."""
    # the loss's denominator is that of the whole batch, and so are the sequences' numbers
    counted, size = int((targets >= 0).sum()), len(tokens)//accum
    for i in range(0, len(tokens), size):
        part = slice(i, i + size)
        step.micro(tokens[part], targets[part], first_sequence=first + i, counted=counted)
    return step.update(lr)


def left_behind(log, model, opt):
    """Losses, weights and moments, as arrays by name."""
    return {"log": np.array(log), "weights": model.arena.weights.numpy(),
            "m": opt.m.numpy(), "v": opt.v.numpy()}


def train_on(model, opt, steps=range(4), batch=4, seq=66, accum=1):
    """Some updates on random batches; returns all that they leave behind.

    `steps` are numbers in the whole run, which batches and dropout masks follow from.
    """
    step, log = xtrain.Step(model, opt), []
    for i in steps:
        tokens, targets = batch_of(model.config, batch, seq, seed=100 + i)
        log.append(advance(step, tokens, targets, accum=accum, first=i*batch))
    return left_behind(log, model, opt)


def fresh(**settings):
    """What train leaves of a new SMALL model."""
    model = build(**{**SMALL, **settings})
    return train_on(model, xtrain.AdamW(model, grad_clip=1.0))


def assert_same_run(a, b):
    """Two results of train are equal to the bit."""
    for key in a:
        assert_same_bits(a[key], b[key], key)


def dropped_run():
    """The run that several others must repeat."""
    return dropped_run_on(tensor.DEVICE)


@cache
def dropped_run_on(device):
    """That on a device, computed once."""
    return fresh(dropout=0.1)


@pytest.mark.cpu
@pytest.mark.smoke
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads(threads):
    """Any number of threads gives the same bits."""
    tensor.set_threads(threads)
    assert tensor.threads() == threads
    assert_same_run(fresh(dropout=0.1), dropped_run())


def test_two_runs():
    """The same seed repeats to the bit; another seed starts elsewhere."""
    assert_same_run(fresh(dropout=0.1), dropped_run())
    arenas = [build(seed=seed).arena.weights.numpy() for seed in (1, 2)]
    assert (arenas[0] != arenas[1]).any()


def test_made_again_or_kept(monkeypatch):
    """A step has the same bits whether activations are kept or made again for the backward."""
    monkeypatch.setattr(ag, "KEEP_BELOW", dict.fromkeys(ag.KEEP_BELOW, 1 << 30))
    assert_same_run(fresh(dropout=0.1), dropped_run())


def test_recompute_in_the_model():
    """Recomputed blocks redraw the same dropout and give the same bits."""
    assert_same_run(fresh(dropout=0.1, recompute=True), dropped_run())


def test_no_dropout():
    """Dropout of 0 is no dropout: in the model and in the operation."""
    assert_same_run(fresh(dropout=0.0), fresh())
    x, w, r = leaf(2, 9, 33), leaf(17, 33), leaf(2, 9, 17)
    none = ag.Dropout(0.0, 1, 2, 3)
    assert_same_bits(ag.linear(x, w, r, none).numpy(), ag.linear(x, w, r).numpy())


def test_accumulation_of_one():
    """Step with one micro-step equals loss.backward and opt.step."""
    model = build(**SMALL, dropout=0.1)
    opt, log = xtrain.AdamW(model, grad_clip=1.0), []
    for i in range(4):
        loss = model.loss(*batch_of(model.config, 4, 66, seed=100 + i), first_sequence=4*i)
        loss.backward()
        log.append((loss.item(), opt.step(lr=1e-3)))
    assert_same_run(left_behind(log, model, opt), dropped_run())


def test_groups_of_one():
    """GQA with as many kv heads as heads is MHA; shared kv heads are repeated ones."""
    assert_same_run(fresh(kv_heads=4), fresh(kv_heads=None))
    # a model of two kv heads, and one of four that holds each of them twice
    model, twin = scatter(build(**SMALL)), build(**{**SMALL, "kv_heads": 4})
    for name, p in model.parameters().items():
        value = p.numpy()
        if re.search("[kv]_proj", name):        # each kv head twice
            value = value.reshape(2, 32, -1).repeat(2, 0).reshape(128, -1)
        twin.parameters()[name].set_(value)
    tokens, _ = batch_of(model.config, 2, 66)
    assert_close(twin(tokens).numpy(), model(tokens).numpy(), 1e-6)


def test_order_given():
    """The loader's argsort of the tokens changes nothing but the time."""
    model = build(**SMALL)
    tokens, targets = batch_of(model.config, 4, 66)
    gradients = []
    for order in (None, np.argsort(tokens, axis=None, kind="stable")):
        model.loss(tokens, targets, order).backward()
        gradients.append(model.arena.grads.numpy())
        model.zero_grad()
    assert gradients[0].any()
    assert_same_bits(*gradients)


def test_resume(tmp_path):
    """Save, ten more steps; load, the same ten steps: the same bits, with dropout."""
    from safetensors.numpy import load_file, save_file
    model = build(**SMALL, dropout=0.1)
    opt = xtrain.AdamW(model, grad_clip=1.0)
    train_on(model, opt, range(3))
    xtrain.save_pretrained(model, str(tmp_path))
    save_file(opt.state(), tmp_path/"optimizer.safetensors")
    straight = train_on(model, opt, range(3, 13))

    # all that is left of the first model is its files
    twin = xtrain.load_pretrained(str(tmp_path), dtype="f32").train()
    twin.config.dropout = 0.1                   # no part of a Hugging Face folder
    opt = xtrain.AdamW(twin, grad_clip=1.0)
    opt.load_state(load_file(tmp_path/"optimizer.safetensors"), steps=3)
    assert_same_run(train_on(twin, opt, range(3, 13)), straight)


# ---- 9. Accumulation and flash attention --------------------------------------------------------
# Sums in another order: not the same bits, but the same result to the last digits.

@pytest.mark.smoke
@pytest.mark.parametrize("accum", [2, 4, 16])
def test_accumulation(accum):
    """16 sequences in 1, 2, 4 or 16 micro-steps: one loss, one gradient, whatever is ignored."""
    # 16x1 is the reference for 8x2, 4x4 and 1x16 (sequences per micro-step x micro-steps)
    answers = []
    for parts in (1, accum):
        model = scatter(build(**{**SMALL, "layers": 1}, dropout=0.2))
        opt = xtrain.AdamW(model, grad_clip=None)
        tokens, targets = batch_of(model.config, 16, 33)
        targets[1], targets[2, 5:], targets[12:15] = -1, -1, -1     # uneven, whole sequences
        step, counted, size = xtrain.Step(model, opt), int((targets >= 0).sum()), 16//parts
        for i in range(0, 16, size):
            part = slice(i, i + size)
            step.micro(tokens[part], targets[part], first_sequence=70 + i, counted=counted)
        gradients = {n: p.grad.numpy() for n, p in model.parameters().items()}
        answers.append((step.update(1e-3)[0], gradients))
    (loss, gradients), (other_loss, other) = answers
    assert abs(other_loss/loss - 1) < 1e-6
    for name in gradients:
        assert_close(other[name], gradients[name], 1e-5, name)


def test_flash_against_composed():
    """Tiled and composed attention in a model: logits, loss and gradients within 1e-5."""
    flash, composed = (scatter(build(**{**SMALL, "max_seq": 300}, flash=f)) for f in (True, False))
    tokens, targets = batch_of(flash.config, 2, 259)
    assert_close(flash(tokens).numpy(), composed(tokens).numpy(), 1e-5)
    for model in (flash, composed):
        model.loss(tokens, targets).backward()
    for name, p in flash.parameters().items():
        assert_close(p.grad.numpy(), composed.parameters()[name].grad.numpy(), 1e-5, name)


@pytest.mark.cpu
def test_packed_weights():
    """Micro-steps that use a version of the weights again read packed copies: the same bits as
    without, none left of an older version, and no copies while each weight is used once."""
    results = []
    for keep in (True, False):
        model = scatter(build(**SMALL))
        step = xtrain.Step(model, xtrain.AdamW(model, grad_clip=1.0))
        packs = model.arena.weights.storage.packs
        if not keep:
            model.arena.weights.storage.packs = None
        history = []
        for micro_steps in (1, 3, 1, 2):
            for i in range(micro_steps):
                step.micro(*batch_of(model.config, 2, 40, seed=i), counted=80*micro_steps)
            copies = sum(copy is not None for _, copy in packs.values())
            assert (copies > 0) == (keep and micro_steps > 1), micro_steps
            history.append(step.update(1e-3))
        weights = {name: p.numpy() for name, p in model.parameters().items()}
        results.append((history, weights))
    (history, weights), (other_history, other) = results
    assert history == other_history
    for name in weights:
        assert_same_bits(weights[name], other[name], name)


# ---- 10. bf16 -----------------------------------------------------------------------------------
# Four oracles, from the strictest to the loosest.  Where nothing needs rounding, bf16 has the bits
# of f32.  What the design rounds once is the float64 formula rounded once.  What it rounds more
# often errs at most twice (gradients three times) what the same formula errs that is composed of
# bf16 primitives, which round after every step.  And no bit depends on threads, packing,
# recompute or neighbours.
#
# An input in parentheses is an activation, stored in bf16; one in brackets a weight, f32.

UNIT = 2.0**-9          # half a unit in the last of 8 bits, relative to a number just under 2


def rounded(x):
    """The bf16 numbers nearest to x, ties to even, as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def own16(array, grad=False):
    """An xtrain tensor in bf16."""
    t = tensor.cast(own(np.asarray(array, np.float32)), "bf16")
    t.requires_grad = grad
    return t


def normal16(rng, shape):
    """Normal numbers that bf16 can hold."""
    return rounded(rng.standard_normal(shape, np.float32))


def build16(seed=0, **settings):
    """`build` in bf16."""
    return xtrain.Decoder(xtrain.Config(**{**TINY, **settings}), dtype="bf16", seed=seed)


# Rounded once.  A second rounding, a sum kept in bf16 between blocks of K, a weight or a table
# rounded that should not be (or not rounded that should be) breaks the bound in a quarter of the
# entries or more.

def half_unit(x):
    """Half the distance of neighbouring bf16 numbers around x: the most that one rounding errs."""
    return np.ldexp(1.0, np.frexp(x)[1] - 9)*(x != 0)


def assert_rounded_once(actual, exact, what=""):
    """Each entry is within half a unit of the truth, and f32's error before it was rounded."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    granted = half_unit(exact) + TOLERANCE*np.abs(exact).max() + 1e-30
    worst = (np.abs(actual - exact)/granted).max()
    assert worst <= 1, f"{what}: {worst:.2f} times the error of one rounding"


ONCE: dict[str, Case] = {}


def once(name, own_function, oracle, *inputs):
    """Enter a case of one rounding; weights stay f32 numbers that bf16 cannot hold."""
    assert name not in ONCE, f"two cases are called {name}"
    ONCE[name] = Case(name, own_function, oracle, inputs)


def sum_and_norm64(x, residual, w, eps=1e-6):
    """add_rmsnorm, whose norm is that of the rounded sum, the only one that is stored."""
    return x + residual, rmsnorm64(np.float64(rounded(x + residual)), w, eps)


# Primitives.  A number or a 0-d tensor is used as it is, in f32.
for a, b in [((1,), (1,)), ((7, 33), (33,)), ((3, 1, 5), (4, 1)), ((130, 131), (130, 131))]:
    once(f"add {a} {b}", ag.add, np.add, a, b)
    once(f"sub {a} {b}", ag.sub, np.subtract, a, b)
    once(f"mul {a} {b}", ag.mul, np.multiply, a, b)
    once(f"div {a} {b}", ag.div, np.divide, a, far(*b))
once("x*s", ag.mul, np.multiply, (65, 33), [])
once("s - x", ag.sub, np.subtract, [], (65, 33))
once("0.3*x", lambda x: 0.3*x, lambda x: 0.3*x, (65, 33))
once("-x of a slice", lambda x: -x[:, 1::2], lambda x: -x[:, 1::2], (9, 33))
for shape in [(1,), (3, 17), (129, 130)]:
    once(f"exp {shape}", ag.exp, np.exp, shape)
    once(f"silu {shape}", ag.silu, silu64, shape)
    once(f"gelu {shape}", ag.gelu, gelu64, shape)
    once(f"softmax {shape}", ag.softmax, softmax64, shape)
    once(f"sum {shape}", lambda x: ag.sum(x, -1), lambda x: x.sum(-1), shifted(*shape))
    once(f"sum of all {shape}", ag.sum, np.sum, shifted(*shape))
once("sum of 40,000", lambda x: ag.sum(x, 0), lambda x: x.sum(0), shifted(40000, 2))
once("sum, axes kept", lambda x: ag.sum(x, None, True), lambda x: x.sum(keepdims=True),
     shifted(5, 7))             # a result with axes is bf16, or x/x.sum() would become f32
once("softmax of a transpose", lambda x: ag.softmax(ag.transpose(x)), lambda x: softmax64(x.T),
     (17, 5))

# Products: rows and columns around tiles of 16 and 32, K odd, K over 512 and over 1024.
for m, n, k in [(1, 1, 1), (1, 33, 31), (3, 1, 65), (5, 17, 33), (15, 16, 32), (16, 15, 1),
                (16, 32, 64), (17, 33, 65), (31, 31, 31), (32, 65, 513), (33, 129, 1025),
                (48, 16, 1100), (1, 259, 1030), (7, 8225, 3), (600, 70, 33)]:
    once(f"linear {m} {n} {k}", ag.linear, lambda x, w: x @ rounded(w).T, (m, k), [n, k])
    once(f"linear + residual {m} {n} {k}", ag.linear, lambda x, w, r: x @ rounded(w).T + r,
         (m, k), [n, k], (m, n))
    once(f"matmul {m} {n} {k}", ag.matmul, np.matmul, (m, k), (k, n))
    once(f"matmul by a weight {m} {n} {k}", ag.matmul, lambda x, w: x @ rounded(w), (m, k), [k, n])
once("linear of a slice", lambda x, w: ag.linear(x[:, 1:], w), lambda x, w: x[:, 1:] @ rounded(w).T,
     (3, 8, 17), [33, 17])
once("linear of every other", lambda x, w: ag.linear(x[..., ::2], w[:, 1:]),
     lambda x, w: x[..., ::2] @ rounded(w)[:, 1:].T, (2, 9, 34), [33, 18])
once("linear by a transpose", lambda x, w: ag.linear(x, ag.transpose(w)),
     lambda x, w: x @ rounded(w), (3, 8, 17), [17, 33])
once("matmul of transposes", lambda a, b: ag.transpose(a) @ ag.transpose(b),
     lambda a, b: a.T @ b.T, (129, 33), (35, 129))
once("matmul of slices", lambda a, b: a[1:, 2:] @ b[:, 1:], lambda a, b: a[1:, 2:] @ b[:, 1:],
     (18, 35), (33, 18))
once("matmul, batched", ag.matmul, np.matmul, (2, 3, 15, 33), (2, 3, 33, 17))
once("matmul, batch broadcast", ag.matmul, np.matmul, (2, 3, 17, 5), (3, 5, 9))

# Dropout scales and adds the residual before it rounds.
for shape, inner in [((1, 1, 4), 5), ((2, 7, 33), 1100), ((2, 33, 130), 65)]:
    once(f"dropout {shape}", lambda x: ag.dropout(x, DROPS), lambda x: x*mask64(x.shape, *DROPS),
         shape)
    once(f"linear, dropout {shape}", lambda x, w, r: ag.linear(x, w, r, DROPS),
         lambda x, w, r: x @ rounded(w).T*mask64(r.shape, *DROPS) + r,
         (*shape[:2], inner), [shape[2], inner], shape)

# Norms and rotation: from bf16 to bf16 with all between in f32, so that a weight of 1.001, which
# bf16 cannot hold, is not lost.
for shape in [(1, 1), (3, 5), (2, 15, 16), (5, 33), (1, 1100), (2, 65, 129)]:
    once(f"rmsnorm {shape}", lambda x, w: ag.add_rmsnorm(x, None, w), rmsnorm64, shape,
         [shape[-1]])
    once(f"add_rmsnorm {shape}", ag.add_rmsnorm, sum_and_norm64, shape, shape, [shape[-1]])
once("qk_norm_rope of a slice",
     lambda x, q, k: ag.qk_norm_rope(x[:, 1:, ::2], *tensor.cos_sin(8, 6), 4, 2, q, k),
     lambda x, q, k: qk_norm_rope64(x[:, 1:, ::2], *rope_tables64(8, 6), 4, 2, q, k),
     (2, 9, 2*8*6), [6], [6])
once("rmsnorm of a slice", lambda x, w: ag.add_rmsnorm(x[:, 1:, ::2], None, w),
     lambda x, w: rmsnorm64(x[:, 1:, ::2], w), (2, 9, 66), [33])
for batch, seq, heads, kv, dim in [(1, 1, 1, 1, 2), (2, 7, 6, 2, 8), (1, 5, 15, 5, 20),
                                   (1, 33, 4, 1, 32), (2, 17, 2, 2, 96), (1, 9, 3, 1, 128)]:
    tables = [x.astype(np.float32) for x in rope_tables64(seq, dim, 100.0)]
    settings = (*tables, heads, kv)
    once(f"qk_norm_rope {batch} {seq} {heads}/{kv} {dim}",
         lambda x, q, k, s=settings: norm_and_turn(x, s, q, k),
         lambda x, q, k, s=settings: qk_norm_rope64(x, *s, q, k),
         (batch, seq, (heads + 2*kv)*dim), [dim], [dim])
    once(f"rope {batch} {seq} {heads}/{kv} {dim}", lambda x, s=settings: norm_and_turn(x, s),
         lambda x, s=settings: qk_norm_rope64(x, *s), (batch, seq, (heads + 2*kv)*dim))


def drawn16(rng, shape, weights_too=False):
    """(array, is it a weight?) of an input of a case; activations always fit bf16."""
    if isinstance(shape, list):
        x = rng.standard_normal(shape, np.float32)
        return (rounded(x) if weights_too else x), True
    return rounded(shape(rng)) if callable(shape) else normal16(rng, shape), False


@pytest.mark.smoke
@pytest.mark.parametrize("case", ONCE.values(), ids=str)
def test_bf16_rounds_once(case):
    """Result = the float64 formula, rounded: catches partial sums in bf16, a product rounded before
    its residual or dropout, weights rounded in norms or not rounded in products."""
    rng = rng_of(case.name + " once")
    drawn = [drawn16(rng, shape) for shape in case.inputs]
    exact = as_list(case.oracle(*(a.astype(np.float64) for a, _ in drawn)))
    results = as_list(case.own(*((own if weight else own16)(a) for a, weight in drawn)))
    for r, e in zip(results, exact, strict=True):
        assert r.dtype == ("bf16" if r.ndim else "f32")         # a single number is not rounded
        (assert_rounded_once if r.ndim else assert_close)(r.numpy(), e, what=case.name)


@pytest.mark.smoke
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 33, 5), (5, 17, 33), (15, 31, 16),
                                     (16, 33, 32), (33, 65, 17), (520, 33, 65), (1100, 16, 31)])
def test_bf16_gradients_of_a_product(m, n, k):
    """dx is rounded once, dw not at all, the residual's is g itself: catches a weight gradient that
    passes through bf16 (an error of 2e-3), or one that sums its rows there."""
    rng = rng_of(f"gradients {m} {n} {k}")
    x, g, w = normal16(rng, (m, k)), normal16(rng, (m, n)), rng.standard_normal((n, k))
    tx, tr, tw = own16(x, True), own16(g, True), own(w, True)
    ag.linear(tx, tw, tr).backward(own16(g))
    assert [t.grad.dtype for t in (tx, tr, tw)] == ["bf16", "bf16", "f32"]
    assert_rounded_once(tx.grad.numpy(), np.float64(g) @ rounded(w), "dx")
    assert_close(tw.grad.numpy(), np.float64(g).T @ x, what="dw")
    assert_same_bits(tr.grad.numpy(), g, "dresidual")


def test_bf16_many_micro_steps():
    """A hundred equal gradients add up to a hundred: kept in bf16, the sum would stand still after
    some (256 + 1 is 256 there) or drift."""
    x, w = own16(np.ones((16, 33))), own(np.zeros((17, 33)), grad=True)
    norm = own(np.ones(33), grad=True)
    for _ in range(100):
        ag.linear(x, w).backward(own16(np.full((16, 17), 0.34375)))
        ag.add_rmsnorm(x, None, norm, 0.0).backward(own16(np.full((16, 33), 0.34375)))
    assert_close(w.grad.numpy(), np.full((17, 33), 100*16*0.34375), what="product")
    assert_close(norm.grad.numpy(), np.full(33, 100*16*0.34375), what="norm")


# The rule: the same formula from primitives, all of them in bf16, weights as well.  Its products
# are sums of rounded products, so that what is measured does not measure itself.

def made(function, slope):
    """A primitive that the table lacks: function(x) and g*slope(x), computed in f32 and rounded."""
    def operation(x):
        values = x.numpy()
        return ag.record(own16(function(values)), (x,),
                         lambda g, sink: sink.give(own16(g.numpy()*slope(values))))
    return operation


naive_log = made(np.log, lambda x: 1/x)
naive_rsqrt = made(lambda x: x**-0.5, lambda x: -0.5*x**-1.5)


def naive_product(x, w):
    """x w^T."""
    terms = x.reshape(-1, 1, x.shape[-1])*w.reshape(1, *w.shape)
    return ag.sum(terms, -1).reshape(*x.shape[:-1], w.shape[0])


def naive_linear(x, w, residual=None, how=None):
    """residual + dropout(x w^T)."""
    y = naive_product(x, w)
    y = naive_dropout(y, how) if how else y
    return y if residual is None else y + residual


def naive_dropout(x, how):
    """x times its scaled mask."""
    return x*own16(mask64(x.shape, *how))


def naive_rmsnorm(x, w, eps=1e-6):
    """x/rms(x)*w."""
    return x*naive_rsqrt(ag.mean(x*x, -1, True) + eps)*w


def naive_add_rmsnorm(x, residual, w, eps=1e-6):
    """The sum and its norm."""
    total = x + residual
    return total, naive_rmsnorm(total, w, eps)


def naive_rope(x, cos, sin):
    """x cos + (-second half | first half) sin; the halves change places by a product with 0, 1, -1.
    """
    one, none = np.eye(x.shape[-1]//2), np.zeros((x.shape[-1]//2,)*2)
    cos, sin = (own16(np.concatenate([t, t], -1)[:, None]) for t in (cos, sin))
    return x*cos + x @ own16(np.block([[none, one], [-one, none]]))*sin


def naive_qk_norm_rope(qkv, cos, sin, heads, kv_heads, qw=None, kw=None):
    """q, k, v of the fused projection."""
    x = qkv.reshape(*qkv.shape[:2], heads + 2*kv_heads, -1)
    q, k, v = x[:, :, :heads], x[:, :, heads:heads + kv_heads], x[:, :, heads + kv_heads:]
    if qw is not None:
        q, k = naive_rmsnorm(q, qw), naive_rmsnorm(k, kw)
    return naive_rope(q, cos, sin), naive_rope(k, cos, sin), v


def naive_attention(q, k, v, scale=None):
    """softmax(scale q k^T + mask) v."""
    group, (sq, sk) = q.shape[2]//k.shape[2], (q.shape[1], k.shape[1])
    q, k, v = (ag.transpose(t, 0, 2, 1, 3)
               for t in (q, ag.repeat_kv(k, group), ag.repeat_kv(v, group)))
    future = own16(np.triu(np.full((sq, sk), -np.inf), sk - sq + 1))
    scores = q @ ag.transpose(k)*(q.shape[-1]**-0.5 if scale is None else scale)
    return ag.transpose(ag.softmax(scores + future) @ v, 0, 2, 1, 3)


def naive_swiglu(x, w):
    """silu(x gate^T) * (x up^T)."""
    half = w.shape[0]//2
    return ag.silu(naive_product(x, w[:half]))*naive_product(x, w[half:])


def naive_mlp(x, gate_up, down, residual):
    """A SwiGLU block."""
    return naive_product(naive_swiglu(x, gate_up), down) + residual


def naive_head(x, w, targets, denominator=None, vocab=None):
    """Cross entropy of x w^T over the first `vocab` rows of w."""
    logits = naive_product(x.reshape(-1, x.shape[-1]), w[:vocab])
    aims, top = targets.reshape(-1, 1), own16(logits.numpy().max(-1, keepdims=True))
    total = naive_log(ag.sum(ag.exp(logits - top), -1, True)) + top
    picked = ag.sum(logits*own16(np.arange(logits.shape[1]) == aims), -1, True)
    return ag.sum((total - picked)*own16(aims >= 0))*(1/(denominator or (aims >= 0).sum()))


RULE: dict[str, Case] = {}


def rule(name, own_function, naive, *inputs):
    """Enter a case of the rule; its truth is own_function in f32."""
    assert name not in RULE, f"two cases are called {name}"
    RULE[name] = Case(name, own_function, naive, inputs)


for rows, inner, out in [(1, 1, 1), (3, 31, 7), (15, 33, 17), (16, 32, 33), (33, 65, 16),
                         (130, 67, 31), (3, 1100, 33), (17, 513, 15)]:
    rule(f"linear {rows} {inner} {out}", ag.linear, naive_linear, (rows, inner), [out, inner])
    rule(f"linear + residual {rows} {inner} {out}", ag.linear, naive_linear, (rows, inner),
         [out, inner], (rows, out))
    rule(f"matmul {rows} {inner} {out}", lambda a, b: a @ ag.transpose(b), naive_product,
         (rows, inner), (out, inner))
rule("linear, residual = input", lambda x, w: ag.linear(x, w, x),
     lambda x, w: naive_linear(x, w, x), (2, 17, 17), [17, 17])
rule("linear of slices", lambda x, w: ag.linear(x[:, 1:, ::2], w[1:]),
     lambda x, w: naive_product(x[:, 1:, ::2], w[1:]), (3, 8, 34), [33, 17])
for shape, inner in [((1, 1, 4), 5), ((2, 7, 33), 1100), ((2, 33, 66), 31)]:
    rule(f"dropout {shape}", lambda x: ag.dropout(x, DROPS), lambda x: naive_dropout(x, DROPS),
         shape)
    rule(f"linear, dropout {shape}", lambda x, w, r: ag.linear(x, w, r, DROPS),
         lambda x, w, r: naive_linear(x, w, r, DROPS), (*shape[:2], inner), [shape[2], inner],
         shape)
rule("mean", lambda x: ag.mean(x, -1), lambda x: ag.sum(x, -1)*(1/65), shifted(33, 65))
rule("softmax", ag.softmax, lambda x: ag.exp(x)/ag.sum(ag.exp(x), -1, True), (33, 65))
rule("silu", ag.silu, lambda x: x/(ag.exp(-x) + 1), (33, 65))

for shape in [(1, 2), (3, 5), (2, 15, 16), (5, 33), (1, 1100), (2, 65, 129)]:
    rule(f"rmsnorm {shape}", lambda x, w: ag.add_rmsnorm(x, None, w), naive_rmsnorm, shape,
         [shape[-1]])
    rule(f"add_rmsnorm {shape}", ag.add_rmsnorm, naive_add_rmsnorm, shape, shape, [shape[-1]])
rule("add_rmsnorm(x, x)", lambda x, w: ag.add_rmsnorm(x, x, w),
     lambda x, w: naive_add_rmsnorm(x, x, w), (5, 33), [33])
rule("add_rmsnorm, sum unused", lambda x, r, w: ag.add_rmsnorm(x, r, w)[1],
     lambda x, r, w: naive_rmsnorm(x + r, w), (5, 17), (5, 17), [17])
rule("rmsnorm of a slice", lambda x, w: ag.add_rmsnorm(x[:, 1:, ::2], None, w),
     lambda x, w: naive_rmsnorm(x[:, 1:, ::2], w), (2, 9, 66), [33])

for batch, seq, heads, kv, dim in [(1, 1, 1, 1, 2), (2, 7, 6, 2, 8), (1, 33, 15, 5, 20),
                                   (1, 17, 4, 1, 32), (2, 15, 2, 2, 96), (1, 9, 3, 1, 128)]:
    tables = [x.astype(np.float32) for x in rope_tables64(seq, dim, 100.0)]
    settings = (*tables, heads, kv)
    rule(f"qk_norm_rope {batch} {seq} {heads}/{kv} {dim}",
         lambda x, q, k, s=settings: norm_and_turn(x, s, q, k),
         lambda x, q, k, s=settings: naive_qk_norm_rope(x, *s, q, k),
         (batch, seq, (heads + 2*kv)*dim), [dim], [dim])
    rule(f"rope {batch} {seq} {heads}/{kv} {dim}", lambda x, s=settings: norm_and_turn(x, s),
         lambda x, s=settings: naive_qk_norm_rope(x, *s), (batch, seq, (heads + 2*kv)*dim))

# Tiles of 64 queries and 128 keys: at their edges, decoding (fewer queries than keys), every kind
# of head size; one key alone has weight 1 and gradient 0.
for batch, sq, sk, heads, kv, dim in [
        (1, 1, 1, 1, 1, 2), (2, 7, 7, 6, 2, 8), (1, 15, 15, 15, 5, 20), (1, 16, 16, 2, 2, 16),
        (1, 17, 17, 6, 2, 32), (2, 31, 31, 2, 1, 8), (1, 63, 63, 15, 5, 2), (1, 64, 64, 2, 1, 64),
        (1, 65, 65, 6, 2, 80), (1, 127, 127, 2, 2, 96), (1, 128, 128, 2, 1, 128),
        (1, 129, 129, 3, 1, 20), (1, 193, 193, 2, 1, 32), (1, 257, 257, 1, 1, 16),
        (1, 1, 40, 6, 2, 16), (2, 5, 133, 2, 1, 64), (1, 65, 129, 2, 2, 8), (1, 16, 272, 2, 1, 80),
        (1, 63, 320, 1, 1, 32), (1, 33, 128, 15, 5, 128)]:
    rule(f"attention {batch} {sq}/{sk} {heads}/{kv} {dim}", both(ag.attention), naive_attention,
         (batch, sq, heads, dim), (batch, sk, kv, dim), (batch, sk, kv, dim))
rule("attention, one tensor", both(lambda x, flash: ag.attention(x, x, x, flash)),
     lambda x: naive_attention(x, x, x), (2, 19, 3, 8))
rule("attention, slices",
     both(lambda x, flash: ag.attention(x[:, :, :6], x[:, :, 6:8], x[:, :, 8:], flash)),
     lambda x: naive_attention(x[:, :, :6], x[:, :, 6:8], x[:, :, 8:]), (2, 33, 10, 20))
rule("attention, strided", both(lambda x, flash: ag.attention(*[x[:, 1:, :, ::2]]*3, flash)),
     lambda x: naive_attention(*[x[:, 1:, :, ::2]]*3), (1, 66, 2, 32))
rule("attention, scale", both(partial(ag.attention, scale=0.5)),
     partial(naive_attention, scale=0.5), *[(1, 20, 2, 16)]*3)
rule("attention, sharp", both(lambda q, k, v, flash: ag.attention(q*8.0, k, v, flash)),
     lambda q, k, v: naive_attention(q*8.0, k, v), (1, 140, 2, 16), *[(1, 140, 1, 16)]*2)

for rows, dim, ffn in [((1,), 1, 1), ((3,), 5, 17), ((2, 15), 33, 31), ((16,), 32, 64),
                       ((17,), 65, 33), ((2, 33), 31, 70), ((5,), 1030, 9)]:
    rule(f"gate_up_swiglu {rows} {dim} {ffn}", ag.gate_up_swiglu, naive_swiglu, (*rows, dim),
         [2*ffn, dim])
    rule(f"mlp {rows} {dim} {ffn}", ag.mlp, naive_mlp, (*rows, dim), [2*ffn, dim], [dim, ffn],
         (*rows, dim))
rule("gate_up_swiglu of a slice", lambda x, w: ag.gate_up_swiglu(x[:, 1:], w),
     lambda x, w: naive_swiglu(x[:, 1:], w), (2, 9, 33), [34, 33])

# Both ways of the head (narrow up to 48), padding rows that hold numbers, targets of -1.
for rows, dim, vocab, padded in [((1,), 1, 2, 2), ((2, 7), 5, 11, 64), ((15,), 31, 33, 33),
                                 ((17,), 33, 129, 192), ((2, 4), 48, 1003, 1024),
                                 ((3, 13), 49, 211, 256), ((2, 8), 65, 1003, 1024),
                                 ((5,), 530, 61, 64)]:
    aims = ints(vocab, *rows, low=-1, seed=3)
    aims.flat[0] = vocab - 1
    for bottom in (None, 37):
        rule(f"head_loss {rows} {dim} {vocab}/{padded} {bottom}",
             lambda x, w, t=aims, n=vocab, d=bottom: ag.head_loss(x*2.0, w, own(t), d, n),
             lambda x, w, t=aims, n=vocab, d=bottom: naive_head(x*2.0, w, t, d, n),
             (*rows, dim), [padded, dim])


def deviations(actual, exact, least=0.0):
    """The error's rms and largest entry, relative to those of the truth.

    A truth of zero (the gradient of a softmax of one entry) counts as being `least` everywhere.
    """
    actual, size = np.asarray(actual, np.float64), np.abs(np.asarray(exact, np.float64))
    assert actual.shape == size.shape, f"shape {actual.shape}, expected {size.shape}"
    wrong = np.abs(actual - exact)
    size = size if size.max() > 1e-6*least else np.full_like(size, least)
    return np.array([np.sqrt((wrong**2).mean()/(size**2).mean()), wrong.max()/size.max()])


def allowed(naive, size, factor):
    """What the rule grants where the naive way has errors of `naive`.

    A few entries may be right by luck, so an error under UNIT counts as UNIT: twice that is 2^-8,
    the most that one correct rounding errs.  A naive way without any error in many entries had
    nothing to round; nor then has ours.
    """
    if size >= 32 and not naive.any():
        return np.full(2, TOLERANCE)
    return factor*np.maximum(naive, UNIT)


def assert_rule(ours, naive, exact, factor, what, least=0.0):
    """The rule of the design: ours errs at most `factor` times what the naive way errs."""
    limit = allowed(deviations(naive, exact, least), np.size(exact), factor)
    found = deviations(ours, exact, least)
    assert (found <= limit).all(), f"{what}: rms and largest error {found}, allowed {limit}"


def answers(function, arrays, kinds, weights=None):
    """Results of a function of leaves, their gradients, and the weights that made a scalar."""
    leaves = [kind(a, True) for kind, a in zip(kinds, arrays)]
    results = as_list(function(*leaves))
    if weights is None:
        rng = rng_of(str([r.shape for r in results]))
        weights = [normal16(rng, r.shape) for r in results]
    weighted(results, weights).backward()
    return results, [leaf.grad for leaf in leaves], weights


@pytest.mark.smoke
@pytest.mark.parametrize("case", RULE.values(), ids=str)
def test_bf16_operation(case):
    """Results within 2 times, gradients within 3 times the naive error; each dtype as it should be:
    catches a wrong formula, a backward that reads what was rounded twice, a lost contribution."""
    rng = rng_of(case.name + " rule")
    arrays, is_weight = zip(*(drawn16(rng, shape, True) for shape in case.inputs))
    # the truth in f32 on the same numbers; the naive way's weights are bf16 too
    ways = as_list(case.own)
    exact, slopes, weights = answers(ways[0], arrays, [own]*len(arrays))
    naive, naive_slopes, _ = answers(case.oracle, arrays, [own16]*len(arrays), weights)
    least = max(np.abs(g.numpy()).max() for g in slopes)
    for way in ways:
        results, grads, _ = answers(way, arrays, [own if w else own16 for w in is_weight], weights)
        assert [r.dtype for r in results] == ["bf16" if r.ndim else "f32" for r in results]
        assert [g.dtype for g in grads] == ["f32" if w else "bf16" for w in is_weight]
        for r, n, e in zip(results, naive, exact, strict=True):
            assert_rule(r.numpy(), n.numpy(), e.numpy(), 2, "result")
        for i, (g, n, e) in enumerate(zip(grads, naive_slopes, slopes)):
            assert_rule(g.numpy(), n.numpy(), e.numpy(), 3, f"gradient of input {i}", least)


# Ways to be wrong in bf16 alone: the result, the gradient, or one entry in 561 off by 3 %.
def off(x, forward=1.0, backward=1.0, entry=0.0):
    """x and its gradient times these factors, and one entry more, in bf16 only."""
    if x.dtype == "f32":
        return x
    spot = np.ones(x.shape)
    spot.flat[np.abs(x.numpy()).argmax()] += entry
    return ag.record(own16(x.numpy()*forward*spot), (x,),
                     lambda g, sink: sink.give(own16(g.numpy()*backward)))


@pytest.mark.parametrize("wrong", [dict(forward=1.03), dict(backward=1.03), dict(entry=0.03), {}],
                         ids=str)
def test_the_rule_can_fail(wrong):
    """Results or gradients wrong by 3 % break the rule, and so does a single entry."""
    run = partial(test_bf16_operation, Case(
        "off", lambda x, w: off(ag.linear(x, w), **wrong), naive_linear, ((33, 65), [17, 65])))
    if not wrong:
        run()
        return
    with pytest.raises(AssertionError, match="rms and largest"):
        run()


# Nothing to round: small whole numbers, whose sums bf16 holds as well as f32.  Fan-out, views and
# every kind of broadcasting; in brackets a weight.
EXACT = {
    "x + x": (lambda x: x + x, (5, 7)),
    "x*x - x": (lambda x: x*x - x, (5, 7)),
    "chain": (lambda x: (x + x)*x - x + x, (5, 7)),
    "numbers": (lambda x: 2 - (4*x + 2)*0.5 - x/0.25, (3, 5)),
    "broadcast": (lambda x, y: (x + y)*y, (3, 1, 5), (4, 1)),
    "overlapping slices": (lambda x: x[1:]*x[:-1], (9, 7)),
    "slices": (lambda x: (x[:, 1]*x[:, 0], x[::-1, 2], x[..., 1:3]), (3, 4, 5)),
    "views": (lambda x: (x.reshape(4, 15), ag.transpose(x, 2, 0, 1)*x[0, 0, 0]), (3, 4, 5)),
    "reshape of a transpose": (lambda x: ag.transpose(x, 1, 0, 2).reshape(20, 3), (3, 4, 5)),
    "repeat_kv": (lambda x: ag.repeat_kv(x, 3), (2, 5, 2, 4)),
    "sum": (lambda x: (ag.sum(x, 0), ag.sum(x, 1, True)), (9, 7)),
    "two operations": (lambda x, w: (ag.linear(x, w), x*2.0, ag.linear(x, w, x)), (16, 7), [7, 7]),
    "x @ x'": (lambda x: x @ ag.transpose(x), (15, 9)),
    "linear of slices": (lambda x, w: ag.linear(x[:, 1:], w[1:]), (2, 9, 7), [18, 7]),
    "gradient transposed": (lambda x, w: ag.transpose(ag.linear(x, w)), (16, 7), [9, 7]),
    "weight twice": (lambda x, w: (ag.linear(x, w), ag.linear(x[1:], w)), (17, 9), [33, 9]),
    "recompute": (lambda x: ag.recompute(lambda x: x*x - x, x) + x, (5, 7)),
    "recompute of one twice": (lambda x: ag.recompute(lambda a, b: a*b - b, x, x), (5, 7)),
    "sum without norm": (lambda x, r: ag.add_rmsnorm(x, r, own(np.ones(7)))[0], (5, 7), (5, 7)),
    "rope at 0": (lambda x: ag.qk_norm_rope(x, *tensor.cos_sin(1, 4), 2, 1), (3, 1, 16)),
    "v alone": (lambda x: ag.qk_norm_rope(x, *tensor.cos_sin(5, 4), 2, 1)[2], (3, 5, 16))}


@pytest.mark.smoke
@pytest.mark.parametrize("name", EXACT)
def test_bf16_is_exact_on_whole_numbers(name):
    """Results and gradients equal f32's, in their own dtypes: catches a lost or doubled use, a
    gradient left in another dtype, one that was read with the wrong strides or item size."""
    function, *shapes = EXACT[name]
    rng = rng_of(name + " whole")
    arrays = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    weights, runs = None, []
    for act in (own, own16):
        kinds = [own if isinstance(shape, list) else act for shape in shapes]
        results, grads, weights = answers(function, arrays, kinds, weights)
        weights = [np.sign(w) for w in weights]
        if act is own16:
            assert all(r.dtype == "bf16" for r in results)
            assert [g.dtype for g in grads] == ["f32" if k is own else "bf16" for k in kinds]
        runs.append([t.numpy() + 0.0 for t in results])     # -0 is 0
        runs.append([t.numpy() + 0.0 for t in answers(function, arrays, kinds, weights)[1]])
    for a, b in zip(runs[0] + runs[1], runs[2] + runs[3], strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("shape, vocab, dim", [((1,), 1, 1), ((2, 9), 11, 17), ((3, 65), 67, 96)])
def test_bf16_embedding(shape, vocab, dim):
    """Rows are the weights rounded; the weight's gradient is the f32 sum of bf16 rows, to the bit:
    catches one that rounds as it adds up a token's places."""
    tokens, rng = ints(vocab, *shape), rng_of("embedding")
    w, g = rng.standard_normal((vocab, dim)), normal16(rng, (*shape, dim))
    for order in (None, own(np.argsort(tokens, axis=None, kind="stable"))):
        ours, truth = own(w, grad=True), own(w, grad=True)
        result = ag.embed(own(tokens), ours, order, dtype="bf16")
        assert result.dtype == "bf16"
        assert_same_bits(result.numpy(), rounded(w)[tokens])
        result.backward(own16(g))
        ag.embed(own(tokens), truth, order).backward(own(g))
        assert ours.grad.dtype == "f32"
        assert_same_bits(ours.grad.numpy(), truth.grad.numpy())


def test_bf16_loss_is_f32():
    """Equal logits cost ln(vocab) to 1e-6 (bf16 has 5.34375 for ln 211 = 5.35186), and many rows
    err as the mean of their roundings does: catches a loss that was rounded or summed in bf16."""
    targets, rng = ints(211, 500, low=-1), rng_of("loss")
    counted = (targets >= 0).sum()
    for dim in (33, 65):                            # the narrow way and the wide one
        w, x = normal16(rng, (256, dim)), normal16(rng, (500, dim))/8
        flat = ag.head_loss(own16(0*x), own(w), own(targets), vocab=211)
        assert flat.dtype == "f32" and abs(flat.item() - np.log(211)) < 1e-5
        # a row errs by its target's rounding less the mean of all: at most half a unit each, so
        # 0.8 of that as standard deviation, and five of them for the mean of independent rows
        exact = head_loss64(np.float64(x), np.float64(w), targets, vocab=211)
        unit = half_unit(np.abs(np.float64(x) @ w.T).max())
        loss = ag.head_loss(own16(x), own(w), own(targets), vocab=211).item()
        assert abs(loss - exact) < 4*unit/np.sqrt(counted)


def test_bf16_swiglu_of_what_is_stored():
    """h comes from gate and up as they were rounded: silu(gate)*up of the stored, rounded once."""
    for rows, dim, ffn in [(1, 33, 7), (16, 32, 64), (33, 65, 31), (100, 513, 33)]:
        rng = rng_of(f"stored {rows}")
        x, w = normal16(rng, (rows, dim)), rng.standard_normal((2*ffn, dim))/np.sqrt(dim)
        h, gu = tensor.gate_up_swiglu(own16(x), own(w))
        assert h.dtype == gu.dtype == "bf16"
        assert_rounded_once(gu.numpy(), np.float64(x) @ rounded(w).T, "gate and up")
        gate, up = np.split(gu.numpy().astype(np.float64), 2, -1)
        assert_rounded_once(h.numpy(), silu64(gate)*up, "h")
        assert_same_bits(tensor.swiglu(gu).bits(), h.bits(), "made again")


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_bf16_far_positions(theta):
    """RoPE is exact past position 256, where bf16 has no odd numbers left: a position, an angle or
    a table in bf16 would be off by up to radians."""
    seq, start, dim = 851, 250, 32
    x = normal16(rng_of("far"), (1, seq, 3*dim))
    cos, sin = (t[start:] for t in rope_tables64(start + seq, dim, theta))
    model = build16(head_dim=dim, rope_theta=theta)
    tables = model.rope(seq, start)
    for t, exact in zip(tables, (cos, sin)):
        assert t.dtype == "f32"
        assert_close(t.numpy(), exact, 1e-7)
    exact = qk_norm_rope64(np.float64(x), cos, sin, 1, 1)
    for t, e in zip(ag.qk_norm_rope(own16(x), *tables, 1, 1), exact):
        assert_rounded_once(t.numpy(), e)


def test_bf16_keeps_nan_and_inf():
    """A NaN is NaN in its whole row or column, whatever its payload, and inf stays inf: catches
    casts on the way into a product that only add half a unit."""
    x, w = np.ones((40, 300), np.float32), np.ones((270, 300), np.float32)
    # half a unit more would make inf of the first weight's bits and -0 of the second's
    x[7, 299], w.view(np.uint32)[[11, 13], 3] = np.nan, (0x7f800001, 0x7fffffff)
    for y in (ag.linear(own16(x), own(w)), own16(x) @ ag.transpose(own16(w)),
              own16(x) @ ag.transpose(own(w))):
        bad = np.isnan(y.numpy())
        assert bad[7].all() and bad[:, [11, 13]].all() and bad.sum() == 270 + 2*39
    w[:3, 0] = np.inf, -np.inf, 3.4e38                      # the last one rounds to inf
    for few in (1, 5, 40):
        y = ag.linear(own16(np.ones((few, 300))), own(w[:3])).numpy()
        assert (y == [np.inf, -np.inf, np.inf]).all()
        assert (ag.embed(own(np.arange(3)), own(w[:3]), dtype="bf16").numpy()[:, 0] == y[0]).all()
    assert np.isnan(ag.silu(own16([np.nan, 1.0])).numpy()[0])
    assert (tensor.cast(own16([np.inf, -np.inf]), "f32").numpy() == [np.inf, -np.inf]).all()


def test_bf16_promotion():
    """A number or 0-d tensor leaves bf16 as it is, an f32 tensor with axes makes f32; each operand
    has a gradient of its own dtype."""
    x, s, f = own16(np.ones((3, 4)), True), own(np.float32(3), True), own(np.ones(4), True)
    for y in (x*2.5, 2 - x, x/3, x*s, s + x, -x, np.float32(2)*x, x + own16(np.ones(4))):
        assert y.dtype == "bf16", y
    for y in (x + f, f*x, x/f, f - x):
        assert y.dtype == "f32", y
    ag.sum(x*s*x + x*f).backward()
    assert (x.grad.dtype, s.grad.dtype, f.grad.dtype) == ("bf16", "f32", "f32")
    assert (x.grad.numpy() == 7).all() and s.grad.item() == 12 and (f.grad.numpy() == 3).all()


@pytest.mark.parametrize("first", [True, False], ids=["f32 first", "bf16 first"])
def test_bf16_gradients_of_two_dtypes(first):
    """A bf16 result used by an f32 and by a bf16 operation, in either order, gets one bf16 gradient
    that is their sum: catches a sum over memory of the wrong item size."""
    x, f, seen = own16(np.ones((5, 7)), True), own(np.full(7, 2.0)), []

    def look(g, sink):
        seen.append(g.dtype)
        sink.give(g)

    y = ag.record(tensor.copy(x), (x,), look)
    wide, narrow = (lambda: ag.sum(y*f)), (lambda: ag.sum(y*3.0))
    total = wide() + narrow() if first else narrow() + wide()
    total.backward()
    assert seen == ["bf16"] and x.grad.dtype == "bf16" and (x.grad.numpy() == 5).all()


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dim", [64, 48])
def test_large_results_have_the_bits_of_small_ones(dtype, dim):
    """8 MB and more are written past the caches (in whole lines only: not at 48), less is not."""
    batch, rng = 20, np.random.default_rng(3)
    draw = lambda *shape: (own16 if dtype == "bf16" else own)(rng.standard_normal(shape))
    cos_sin, w = tensor.cos_sin(512, dim), own(rng.standard_normal(8*dim))

    def run(x, dy):
        q, k, v = (x.view((x.shape[0], 512, 8, dim), (512*24*dim, 24*dim, dim, 1),
                          x.offset + 8*i*dim) for i in range(3))
        out, lse = tensor.attention(q, k, v, 0.1)
        grads = [tensor.empty(q.shape, dtype) for _ in range(3)]
        tensor.attention_backward(dy, q, k, v, out, lse, 0.1, *grads)
        turned = tensor.qk_norm_rope(x, *cos_sin, 8, 8)[0]
        return out, *grads, turned, tensor.add_rmsnorm(out.view((*out.shape[:2], 8*dim)), None, w,
                                                       1e-6)[1]

    x, dy = draw(batch, 512, 24*dim), draw(batch, 512, 8, dim)
    whole = [t.numpy() for t in run(x, dy)]
    assert all(t.size*tensor.ITEMSIZE[dtype] >= 1 << 22 for t in whole)
    for i in range(batch):
        for one, part in zip(run(x[i:i + 1], dy[i:i + 1]), whole, strict=True):
            assert_same_bits(one.numpy(), part[i:i + 1])


# What the decoder calls, and what it gets.

RESULTS = {"embed": "bf16", "add_rmsnorm": "bf16 bf16 f32", "qk_norm_rope": "bf16 f32",
           "attention": "bf16 f32", "linear": "bf16", "gate_up_swiglu": "bf16 bf16",
           "swiglu_backward": "bf16 bf16", "dropout": "bf16", "head_loss": "f32"}


def test_bf16_rows(monkeypatch):
    """The decoder's rows take and give bf16; statistics and loss are f32: catches activations that
    are cast back and forth, which would be right and slow."""
    call, seen = tensor.Row.__call__, {}

    def spy(row, *args, **kwargs):
        results = call(row, *args, **kwargs)
        tensors = [t for t in as_list(results) if t is not None]
        seen.setdefault(row.name, set()).add(" ".join(t.dtype for t in tensors))
        if any(isinstance(t, tensor.Tensor) and t.dtype == "bf16" for t in (*args, *tensors)):
            assert "bf16" in row.dtypes or row.name == "embed", row.name
        return results

    monkeypatch.setattr(tensor.Row, "__call__", spy)
    model = scatter(build16(dropout=0.25))
    step = xtrain.Step(model, xtrain.AdamW(model))
    step.micro(*batch_of(model.config))
    assert {name: seen[name] for name in RESULTS} == {n: {d} for n, d in RESULTS.items()}
    assert {p.grad.dtype for p in model.parameters().values()} == {"f32"}
    flat = model.arena.weights, model.arena.grads, step.optimizer.m, step.optimizer.v
    assert {t.dtype for t in flat} == {"f32"}


@pytest.mark.cpu
def test_bf16_halves_the_activations():
    """Between forward and backward everything but rstd and lse takes two bytes an element."""
    c = xtrain.Config(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, ffn=192)
    model, tokens = xtrain.Decoder(c, dtype="bf16"), np.zeros((4, 256), np.int64)
    for _ in range(3):                                  # what is made once a version is there now
        model.loss(tokens, tokens).backward()
    before = tensor.pool_stats()["used"]
    loss = model.loss(tokens, tokens)
    held = tensor.pool_stats()["used"] - before
    wide = c.layers*(2*c.dim + (c.heads + 2*c.kv_heads)*c.head_dim + c.dim + 2*c.ffn) + 2*c.dim
    small = c.layers*(2 + c.heads + c.kv_heads + c.heads)
    assert held <= 1.05*tokens.size*(2*wide + 4*small) + (1 << 16), (held, tokens.size*2*wide)
    loss.backward()


def leaf16(*shape, seed=0):
    """A random leaf in bf16."""
    return own16(np.random.default_rng(seed).standard_normal(shape), grad=True)


# As MADE_AGAIN, from activations in bf16.
MADE_AGAIN16 = {
    "norm": lambda: [ag.add_rmsnorm(leaf16(3, 5, 70), None, leaf(70))],
    "add and norm": lambda: ag.add_rmsnorm(leaf16(3, 5, 70), leaf16(3, 5, 70, seed=1), leaf(70)),
    "rope": lambda: ag.qk_norm_rope(leaf16(2, 7, 8*6), *tensor.cos_sin(7, 6), 4, 2),
    "norm and rope": lambda: ag.qk_norm_rope(leaf16(2, 7, 8*6), *tensor.cos_sin(7, 6), 4, 2,
                                             leaf(6), leaf(6)),
    **{f"swiglu {rows} {ffn}": lambda rows=rows, ffn=ffn:
       [ag.gate_up_swiglu(leaf16(rows, 33), leaf(2*ffn, 33))]
       for rows in (1, 15, 16, 17, 100) for ffn in (7, 32, 70, 352)}}


@pytest.mark.parametrize("name", MADE_AGAIN16)
def test_bf16_made_again_with_the_same_bits(name):
    """What the backward makes again is what the forward gave: catches a norm of a sum, or a SwiGLU
    of gate and up, that was computed before they were rounded."""
    outs = list(MADE_AGAIN16[name]())
    before, keep = [t.numpy() for t in outs], ag.saved(*outs)
    del outs
    for a, b in zip(keep(), before, strict=True):
        assert a.dtype == "bf16"
        assert_same_bits(a.numpy(), b)


# Bitwise promises.

@pytest.mark.cpu
@pytest.mark.smoke
@pytest.mark.parametrize("n, k", [(1, 1), (33, 31), (17, 65), (96, 513), (300, 1030), (1100, 33)])
def test_bf16_rows_stand_alone(n, k):
    """A row's bits do not depend on the rows beside it (16 or more), nor a NaN's on where it is:
    catches an edge of a tile that is summed in another order, or that reads past it."""
    rng = rng_of(f"alone {n} {k}")
    x, w, r = normal16(rng, (100, k)), own(rng.standard_normal((n, k))), normal16(rng, (100, n))
    whole = ag.linear(own16(x), w, own16(r)).numpy()
    for start, end in ((0, 16), (0, 17), (1, 32), (3, 36), (16, 64), (35, 100), (68, 100)):
        part = ag.linear(own16(x[start:end]), w, own16(r[start:end])).numpy()
        assert_same_bits(part, whole[start:end], f"rows {start} to {end}")
    x[20] = np.nan
    spoiled = ag.linear(own16(x), w, own16(r)).numpy()
    assert np.isnan(spoiled[20]).all()
    assert_same_bits(np.delete(spoiled, 20, 0), np.delete(whole, 20, 0), "beside a NaN")


@pytest.mark.cpu
@pytest.mark.smoke
def test_bf16_threads_in_products():
    """A product and those of its gradients, written and added, have the bits of one thread on
    several, more than cores as well."""
    rng = rng_of("threads")
    for m, n, k in ((1, 8225, 33), (33, 1200, 64), (560, 300, 33), (600, 545, 1030)):
        x, g, w = normal16(rng, (m, k)), normal16(rng, (m, n)), rng.standard_normal((n, k))
        runs = []
        for count in (1, 2, 3, 8):
            tensor.set_threads(count)
            leaves = own16(x, True), own(w, True)
            for _ in range(2):                          # the second adds to the first
                y = ag.linear(*leaves)
                y.backward(own16(g))
            runs.append([t.numpy() for t in (y, *(leaf.grad for leaf in leaves))])
        for run in runs[1:]:
            for a, b in zip(run, runs[0]):
                assert_same_bits(a, b, f"{m} {n} {k}")


def fresh16(**settings):
    """What train_on leaves of a new SMALL model in bf16."""
    model = build16(**{**SMALL, **settings})
    return train_on(model, xtrain.AdamW(model, grad_clip=1.0))


def dropped_run16():
    """The run that several others must repeat."""
    return dropped_run16_on(tensor.DEVICE)


@cache
def dropped_run16_on(device):
    """That on a device, computed once."""
    return fresh16(dropout=0.1)


@pytest.mark.cpu
@pytest.mark.smoke
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bf16_threads(threads):
    """Any number of threads gives the same bits."""
    tensor.set_threads(threads)
    assert_same_run(fresh16(dropout=0.1), dropped_run16())


def test_bf16_recompute():
    """Recomputed blocks redraw the same dropout and give the same bits, as does a second run."""
    assert_same_run(fresh16(dropout=0.1), dropped_run16())
    assert_same_run(fresh16(dropout=0.1, recompute=True), dropped_run16())


def test_bf16_made_again_or_kept(monkeypatch):
    """A step has the same bits whether activations are kept or made again for the backward."""
    monkeypatch.setattr(ag, "KEEP_BELOW", dict.fromkeys(ag.KEEP_BELOW, 1 << 30))
    assert_same_run(fresh16(dropout=0.1), dropped_run16())


def test_bf16_is_not_f32():
    """The run in bf16 is another than in f32, and near it: catches a dtype that does nothing."""
    exact, ours = fresh(dropout=0.1)["log"], dropped_run16()["log"]
    assert (exact != ours).any()
    assert_close(ours, exact, 2*UNIT, "losses and norms")


def test_bf16_accumulation_of_one():
    """Step with one micro-step, whose head writes its gradients ahead, equals loss.backward."""
    model = build16(**SMALL, dropout=0.1)
    opt, log = xtrain.AdamW(model, grad_clip=1.0), []
    for i in range(4):
        loss = model.loss(*batch_of(model.config, 4, 66, seed=100 + i), first_sequence=4*i)
        loss.backward()
        log.append((loss.item(), opt.step(lr=1e-3)))
    assert_same_run(left_behind(log, model, opt), dropped_run16())


def test_bf16_resume(tmp_path):
    """Save, five more steps; load, the same five: the same bits.  Catches masters saved or loaded
    through bf16, and panels of the weights before."""
    from safetensors.numpy import load_file, save_file
    model = build16(**SMALL, dropout=0.1)
    opt = xtrain.AdamW(model, grad_clip=1.0)
    train_on(model, opt, range(3))
    xtrain.save_pretrained(model, str(tmp_path))
    save_file(opt.state(), tmp_path/"optimizer.safetensors")
    before = weights_of(model)
    straight = train_on(model, opt, range(3, 8))

    twin = xtrain.load_pretrained(str(tmp_path), dtype="bf16").train()
    assert twin.dtype == "bf16"
    for name, p in twin.parameters().items():
        assert_same_bits(p.numpy(), before[name], name)
    twin.config.dropout = 0.1                   # no part of a Hugging Face folder
    opt = xtrain.AdamW(twin, grad_clip=1.0)
    opt.load_state(load_file(tmp_path/"optimizer.safetensors"), steps=3)
    assert_same_run(train_on(twin, opt, range(3, 8)), straight)


@pytest.mark.cpu
def test_bf16_packed_weights():
    """Whether weights come packed or not, no bit differs, over updates and over numbers of
    micro-steps: catches panels of an older version, or rounded in another way."""
    results = []
    for keep in (True, False):
        model = scatter(build16(**SMALL))
        step = xtrain.Step(model, xtrain.AdamW(model, grad_clip=1.0))
        if not keep:
            model.arena.weights.storage.packs = None
        history = []
        for micro_steps in (1, 3, 1, 2):
            for i in range(micro_steps):
                step.micro(*batch_of(model.config, 2, 40, seed=i), counted=80*micro_steps)
            history.append(step.update(1e-3))
        results.append({"history": np.array(history), "weights": model.arena.weights.numpy()})
    assert_same_run(*results)


@pytest.mark.smoke
@pytest.mark.parametrize("vocab", [70, 600, 4200])
def test_bf16_head_in_chunks(monkeypatch, vocab):
    """dx has the bits of one chunk when there are several, the later ones on packed weights:
    catches panels cut for sums in bf16 that are read as those of fp32 (512 k a slice, or 384)."""
    rng, runs = rng_of("chunks"), []
    x, t = normal16(rng, (300, 64)), rng.integers(-1, vocab, 300)
    values = rng.standard_normal((vocab, 64))/8
    for elements, packs in ((1 << 23, None), (1, {})):      # the smallest chunk has 128 rows
        monkeypatch.setattr(tensor, "CHUNK_ELEMENTS", elements)
        leaf, w = own16(x, True), own(values, True)
        w.storage.packs = packs
        ag.head_loss(leaf, w, own(t)).backward()
        runs.append((leaf.grad.numpy(), w.grad.numpy()))
    assert_same_bits(runs[0][0], runs[1][0], "dx")
    assert_close(runs[0][1], runs[1][1], what="dw")


@pytest.mark.cpu
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("m, n, k", [(64, 200, 9000), (160, 320, 4200), (256, 512, 1536),
                                     (560, 1120, 1100), (561, 300, 2000), (33, 2000, 4100)])
def test_packed_weights_in_rounds(m, n, k, dtype):
    """Few rows share A in rounds of slices, while a packed B is there from its first slice on: the
    second use of a weight has the bits of the first, on one thread and several."""
    rng, runs = rng_of(f"rounds {m} {k}"), []
    x, w = own16(rng.standard_normal((m, k))), own(rng.standard_normal((n, k))/8)
    x, w.storage.packs = tensor.cast(x, dtype), {}
    for threads in (2, 2, 3, 1):
        tensor.set_threads(threads)
        out = tensor.empty((m, n))              # sums in C itself, also of bf16
        tensor.matmul(x, tensor.transposed(w), out)
        runs += [out.numpy(), ag.linear(x, w).numpy()]
    exact = x.numpy().astype(np.float64) @ (rounded(w.numpy()) if dtype == "bf16" else
                                            w.numpy()).T.astype(np.float64)
    assert_close(runs[0], exact)
    for i in range(2, len(runs)):
        assert_same_bits(runs[i], runs[i % 2], f"use {i//2}")


@pytest.mark.parametrize("m", [1, 15, 16])
def test_bf16_results_of_f32(m):
    """f32 times f32 into bf16 rounds its operands, whatever the number of rows, and adds once."""
    rng = rng_of("f32 into bf16")
    a, b = rng.standard_normal((m, 511)), rng.standard_normal((40, 511))
    out = own16(np.ones((m, 40)))
    tensor.matmul(own(a), tensor.transposed(own(b)), out, True)
    assert_rounded_once(out.numpy(), 1 + rounded(a).astype(np.float64) @ rounded(b).T)


@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_bf16_attention_of_any_scale(scale):
    """A scale that is not positive: all keys alike, or the smallest score ahead."""
    rng = rng_of("scale")
    x = [normal16(rng, (1, 70, 2, 16)) for _ in range(3)]
    rule = Case("scale", partial(ag.attention, scale=scale), partial(naive_attention, scale=scale),
                [lambda _, a=a: a for a in x])
    test_bf16_operation(rule)


@pytest.mark.cpu
@pytest.mark.smoke
@pytest.mark.parametrize("half_c", [True, False], ids=["to bf16", "to f32"])
@pytest.mark.parametrize("rows", [16, 100, 700])
def test_bf16_products_of_packed_weights(rows, half_c):
    """A weight that comes packed gives the bits of one that does not, for every depth at which
    slices are cut in another way, and for results of both dtypes in turn."""
    for k in (33, 400, 513, 1200, 4096, 4130):
        rng, runs = rng_of(f"packed {k}"), []
        x, values = own16(rng.standard_normal((rows, k))), rng.standard_normal((k, 70))
        for packs in (None, {}):
            w = own(values)
            w.storage.packs = packs
            outs = [tensor.empty((rows, 70), dtype) for dtype in ("bf16", "f32")*3]
            for out in outs if half_c else reversed(outs):
                tensor.matmul(x, w, out)
            runs.append([out.numpy() for out in outs])
        for a, b in zip(runs[0], runs[1]):
            assert_same_bits(a, b, f"{rows} {k}")


def test_bf16_set_reaches_the_products():
    """p.set_ is seen by the next forward: the bf16 copies of weights follow their version."""
    model, other = scatter(build16(**SMALL), 1), scatter(build16(**SMALL), 2)
    tokens, _ = batch_of(model.config)
    for _ in range(3):              # whatever is packed once per version is packed now
        model(tokens)
    for name, p in model.parameters().items():
        p.set_(other.parameters()[name].numpy())
    assert_same_bits(model(tokens).numpy(), other(tokens).numpy())


def test_bf16_masks():
    """Dropout in bf16 draws Philox's mask, in the backward too, by the number of the sequence."""
    x, drop = np.ones((5, 9, 32)), ag.Dropout(0.5, 3, 100, 2)
    mask = mask64(x.shape, *drop)
    t, w = own16(x, True), own(np.eye(32))
    y = ag.dropout(t, drop)
    y.backward(own16(x))
    assert_same_bits(y.numpy(), np.float32(mask))           # 0 or 2
    assert_same_bits(t.grad.numpy(), np.float32(mask))
    assert_same_bits(ag.linear(t, w, None, drop).numpy(), np.float32(mask))
    for i in range(5):
        alone = ag.linear(own16(x[:1]), w, None, drop._replace(first_sequence=100 + i)).numpy()
        assert_same_bits(alone[0], np.float32(mask[i]), f"sequence {i}")


@pytest.mark.smoke
@pytest.mark.parametrize("accum", [2, 4, 16])
def test_bf16_accumulation(accum):
    """16x1, 4x4 and 2x8 draw the same masks and round the same activations; only f32 sums of
    weight gradients have another order: within 1e-5, where other masks would differ by tenths."""
    runs = []
    for parts in (1, accum):
        model = scatter(build16(**{**SMALL, "layers": 1}, dropout=0.2))
        step = xtrain.Step(model, xtrain.AdamW(model, grad_clip=None))
        tokens, targets = batch_of(model.config, 16, 33)
        targets[1], targets[2, 5:], targets[12:15] = -1, -1, -1     # uneven, whole sequences
        counted, size = int((targets >= 0).sum()), 16//parts
        for i in range(0, 16, size):
            part = slice(i, i + size)
            step.micro(tokens[part], targets[part], first_sequence=70 + i, counted=counted)
        gradients = {n: p.grad.numpy() for n, p in model.parameters().items()}
        runs.append((step.update(1e-3)[0], gradients))
    (loss, gradients), (other_loss, other) = runs
    assert abs(other_loss/loss - 1) < 1e-6
    for name in gradients:
        assert_close(other[name], gradients[name], 1e-5, name)


# The whole decoder.

def naive_decoder(c, w, tokens):
    """decoder64 without its head, from bf16 primitives: the normed stream; w {name: leaf}."""
    x = ag.embed(own(tokens), w["model.embed_tokens.weight"], dtype="bf16")
    tables, (batch, seq) = rope_tables64(tokens.shape[1], c.head_dim, c.rope_theta), tokens.shape
    for i in range(c.layers):
        layer = {n.split(".", 3)[3]: t for n, t in w.items() if n.startswith(f"model.layers.{i}.")}
        # attention
        h = naive_rmsnorm(x, layer["input_layernorm.weight"])
        q, k, v = (naive_product(h, layer[f"self_attn.{n}_proj.weight"]).reshape(
            batch, seq, -1, c.head_dim) for n in "qkv")
        q, k = (naive_rope(naive_rmsnorm(t, layer[f"self_attn.{n}_norm.weight"]), *tables)
                for n, t in (("q", q), ("k", k)))
        mixed = naive_attention(q, k, v).reshape(batch, seq, -1)
        x = x + naive_product(mixed, layer["self_attn.o_proj.weight"])
        # SwiGLU
        h = naive_rmsnorm(x, layer["post_attention_layernorm.weight"])
        h = (ag.silu(naive_product(h, layer["mlp.gate_proj.weight"]))
             *naive_product(h, layer["mlp.up_proj.weight"]))
        x = x + naive_product(h, layer["mlp.down_proj.weight"])
    return naive_rmsnorm(x, w["model.norm.weight"])


# No size is a multiple of a tile, and each head gradient has 20 entries, too many for luck.
MIDDLE = dict(vocab_size=61, dim=50, layers=2, heads=6, kv_heads=2, head_dim=20, ffn=70, max_seq=64)
DECODERS = {"flash": {}, "composed": dict(flash=False),
            "15/5": dict(heads=15, kv_heads=5, layers=1, recompute=True)}


def outcome(loss, logits, leaves):
    """{name: array} of the loss, the logits and, after a backward, each parameter's gradient."""
    loss.backward()
    gradients = {n: t.grad.numpy() for n, t in leaves.items()}
    return {"loss": loss.numpy(), "logits": logits.numpy(), **gradients}


def three_ways(settings, seed):
    """The outcomes of a decoder of bf16's own numbers in f32, in bf16, and naively in bf16."""
    models = [scatter(build16(**settings), seed), scatter(build(**settings), seed)]
    for p in (p for model in models for p in model.parameters().values()):
        p.set_(rounded(p.numpy()))
    tokens, targets = batch_of(models[0].config, 2, 33, seed)
    ours, exact = (outcome(m.loss(tokens, targets), m(tokens), m.parameters()) for m in models)
    leaves = {n: (own if "embed" in n else own16)(p.numpy(), True)
              for n, p in models[0].parameters().items()}
    x, head = naive_decoder(models[0].config, leaves, tokens), leaves["lm_head.weight"]
    return exact, ours, outcome(naive_head(x, head, targets), naive_product(x, head), leaves)


@pytest.mark.parametrize("name", DECODERS)
def test_bf16_decoder(name):
    """Loss, logits and every gradient against f32 and the decoder of primitives: catches a lost or
    doubled gradient between operations, a residual stream or norm rounded once too often."""
    ways = three_ways({**MIDDLE, **DECODERS[name]}, seed=1)
    for key, exact in ways[0].items():
        factor = 2 if key in ("loss", "logits") else 3
        assert_rule(ways[1][key], ways[2][key], exact, factor, key)


@pytest.mark.smoke
def test_bf16_overfit():
    """27 tokens are learned to a loss under 0.005, as in f32, and then recited from the cache."""
    text = np.frombuffer(b"every layer can be read now.", np.uint8).astype(np.int64)
    tokens, targets = text[None, :-1], text[None, 1:]
    model = build16(vocab_size=256, dim=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
    step = xtrain.Step(model, xtrain.AdamW(model, weight_decay=0.0, grad_clip=1.0))
    for i in range(200):
        step.micro(tokens, targets)
        step.update(xtrain.cosine(i + 1, 200, 3e-3, 3e-4, 10))
    assert model.loss(tokens, targets).item() < 0.005
    assert (model(tokens).numpy().argmax(-1) == targets).all()
    assert list(xtrain.generate(model, text[:1].tolist(), 27, temperature=0)) == text[1:].tolist()


def test_bf16_small_updates():
    """Norm weights leave 1.0 at a learning rate of 3e-4: kept in bf16, 1 - 3e-4 would be 1 again,
    step after step.  (Next to 1 bf16 has 0.99609375.)"""
    model = build16(**SMALL)
    train_on_rate = xtrain.Step(model, xtrain.AdamW(model, grad_clip=1.0))
    for i in range(20):
        train_on_rate.micro(*batch_of(model.config, 2, 33, seed=i))
        train_on_rate.update(3e-4)
    for name, p in model.parameters().items():
        if p.ndim == 1:
            moved = np.abs(p.numpy() - 1)       # steps up and down may add up to exactly 0
            assert (moved > 0).mean() > 0.9 and 1e-4 < moved.max() < 20*3e-4*1.5, name


def test_bf16_optimizer_is_f32s():
    """From the same weights and gradients an update has the bits of a model in f32: catches masters
    or moments in bf16."""
    runs = []
    for model in (build(), build16()):
        opt, log = xtrain.AdamW(model, grad_clip=1.0), []
        for i in range(3):
            grads = model.arena.grads
            grads.set_(np.random.default_rng(i).standard_normal(grads.shape).astype(np.float32))
            log.append(opt.step(1e-3))
        runs.append(left_behind(log, model, opt))
    assert_same_run(*runs)


def test_bf16_weight_decay():
    """Weights of exactly 1 shrink by 3e-5 a step, which bf16 cannot see, and 300 steps later their
    product has followed: catches decay of a bf16 copy, and copies that are not made again."""
    model = build16(**SMALL)
    opt = xtrain.AdamW(model, weight_decay=0.1)
    names = [n for n, p in model.parameters().items() if p.ndim == 2]
    for name in names:
        p = model.parameters()[name]
        p.set_(np.ones(p.shape, np.float32))
    tokens, _ = batch_of(model.config)
    expected = np.float32(1)
    for _ in range(300):                        # no gradient, only decay
        opt.step(lr=3e-4)
        expected = expected*np.float32(1 - 3e-4*0.1)
    for name in names:
        assert_close(model.parameters()[name].numpy(), np.full(
            model.parameters()[name].shape, expected), 1e-6, name)
    # all hidden entries are equal, so the norm makes them 1 and a logit is the sum of a row
    logits = model(tokens).numpy()
    assert_close(logits, np.full(logits.shape, 128*expected), 2*UNIT)
    assert np.abs(logits - 128).min() > 0.5


@pytest.mark.parametrize("cut", [[300], [280] + [1]*20, [1]*40, [70, 1, 1, 15, 16, 17, 180]],
                         ids=["one go", "prompt and some", "token by token", "mixed"])
def test_bf16_cache(cut):
    """Logits with a cache of bf16 are as near to f32's as those of the full forward (rows of fewer
    than 16 may be summed in another order): a wrong position or key would be far off."""
    model, exact = scatter(build16(**SMALL)).eval(), scatter(build(**SMALL)).eval()
    tokens = ints(211, 2, sum(cut))
    cached, at, got = model.cache(2, sum(cut)), 0, []
    assert cached.kv.dtype == "bf16"
    for n in cut:
        got.append(model.decode(tokens[:, at:at + n], cached).numpy())
        at += n
    ends = np.cumsum(cut) - 1
    assert_rule(np.stack(got, 1), model(tokens).numpy()[:, ends], exact(tokens).numpy()[:, ends],
                2, "decode")


def test_files_of_a_bf16_model(tmp_path):
    """Files of a bf16 model hold its f32 masters; saved as bf16, their roundings, which another
    bf16 model computes the same logits with (its products would have rounded them anyway)."""
    model = scatter(build16()).eval()
    for name, p in model.parameters().items():
        if p.ndim == 1:                         # norms are used unrounded
            p.set_(rounded(p.numpy()))
    tokens, _ = batch_of(model.config)
    for dtype, stored in (("f32", lambda x: x), ("bf16", rounded)):
        xtrain.save_pretrained(model, str(tmp_path/dtype), dtype=dtype)
        twin = xtrain.load_pretrained(str(tmp_path/dtype), dtype="bf16")
        for name, p in model.parameters().items():
            assert_same_bits(twin.parameters()[name].numpy(), stored(p.numpy()), name)
        assert_same_bits(twin(tokens).numpy(), model(tokens).numpy(), dtype)


def test_bf16_padding_stays_zero():
    """After 20 steps all outside the logical parameters is 0, as in f32."""
    model = build16(**{**SMALL, "head_dim": 18}, dropout=0.1)
    values = weights_of(model)
    for p in model.parameters().values():
        p.set_(np.ones(p.shape, np.float32))
    padding = model.arena.weights.numpy() == 0
    for name, p in model.parameters().items():
        p.set_(values[name])
    opt = xtrain.AdamW(model)
    train_on(model, opt, range(20), batch=2, seq=20)
    model.loss(*batch_of(model.config)).backward()
    for t in (model.arena.weights, model.arena.grads, opt.m, opt.v):
        assert not t.numpy()[padding].any() and t.numpy()[~padding].any()


@pytest.mark.parametrize("dtype", ["f16", "bfloat16", "", None])
def test_other_dtypes_are_refused(dtype):
    """A dtype that is none is an error that names it, not a model in another one."""
    with pytest.raises(ValueError, match=re.escape(repr(dtype))):
        xtrain.Decoder(xtrain.Config(**TINY), dtype=dtype)


# ---- 11. Memory ---------------------------------------------------------------------------------
# A training step must cost no memory management: no fresh pages, no growth, no cycles that only the
# collector could free.

EMPTY_REGION = """
import time, tensor
tensor.set_threads(2)
best, end = 1.0, time.perf_counter() + 20
while best > 3e-6 and time.perf_counter() < end:
    start = time.perf_counter()
    tensor.core.empty_region(20)
    best = min(best, (time.perf_counter() - start)/20)
print(best*1e6)
"""


@pytest.mark.cpu
@pytest.mark.skipif(not tensor.core.info()["openmp"], reason="this build has no OpenMP")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor")
def test_empty_region():
    """An empty parallel region on two threads costs at most 3 us (the best of many tries)."""
    # Its two threads on two cores and short batches: beside other work, some still run undisturbed.
    done = subprocess.run([sys.executable, "-c", EMPTY_REGION], capture_output=True, text=True,
                          cwd=os.path.dirname(os.path.abspath(tensor.__file__)),
                          env={**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"})
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 3, f"{done.stdout.strip()} us at best"


@contextlib.contextmanager
def no_collector():
    """Without Python's cycle collector: what is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.cpu
@pytest.mark.parametrize("recompute", [False, True])
def test_steps_reuse_memory(recompute):
    """From the fourth step on the pool neither grows nor shrinks, and few pages are faulted in.

    With the collector off, so that a cycle through a tape node would show as growth.
    """
    # weights, gradients, moments and logits are over 40 MB: 10,000 pages that could fault
    model = build(**{**SMALL, "vocab_size": 8000}, dropout=0.1, recompute=recompute)
    step = xtrain.Step(model, xtrain.AdamW(model, grad_clip=1.0))
    batches = [batch_of(model.config, 4, 128, seed=i) for i in range(20)]
    pools, faults = [], []
    with no_collector():
        for tokens, targets in batches:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            advance(step, tokens, targets, accum=2)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            pools.append({k: v for k, v in tensor.pool_stats().items() if k != "peak"})
    assert all(p == pools[2] for p in pools[3:]), pools[2:]
    assert max(faults[3:]) <= 100, faults


@pytest.mark.cpu
def test_nothing_is_left():
    """A dropped model, its gradients and its optimizer give all their memory back."""
    with no_collector():
        before = tensor.pool_stats()["used"]
        model = build(**SMALL)
        opt = xtrain.AdamW(model)
        train_on(model, opt, range(2))
        assert tensor.pool_stats()["used"] >= before + 4*4*model.total_params
        del model, opt
        gc.collect()                            # parameters and arena know each other
        assert tensor.pool_stats()["used"] == before
    tensor.pool_trim()


@pytest.mark.parametrize("settings", [{}, dict(tie_embeddings=True)])
def test_padding_stays_zero(settings):
    """After 20 steps all outside the logical parameters is 0: weights, gradients, both moments."""
    # where no parameter reaches: found by writing 1 to all of them
    model = build(**{**SMALL, "head_dim": 18}, **settings, dropout=0.1)
    values = weights_of(model)
    for p in model.parameters().values():
        p.set_(np.ones(p.shape, np.float32))
    arena = model.arena
    padding = arena.weights.numpy() == 0
    assert padding.sum() == padding.size - model.total_params > 0
    for name, p in model.parameters().items():
        p.set_(values[name])

    # the gradients are looked at before an update, which clears them
    opt = xtrain.AdamW(model)
    train_on(model, opt, range(20), batch=2, seq=20)
    model.loss(*batch_of(model.config)).backward()
    flat = dict(weights=arena.weights, gradients=arena.grads, m=opt.m, v=opt.v)
    for name, array in ((n, t.numpy()) for n, t in flat.items()):
        assert not array[padding].any(), f"{name}: padding is not zero"
        assert array[~padding].any()


def run_here(code, **environment):
    """What a Python with this environment prints (stdout, stderr), beside the modules."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=os.path.dirname(os.path.abspath(tensor.__file__)),
                          env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
                          | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.cpu
@pytest.mark.parametrize("environment, share", [
    ({}, 1), ({"LOCAL_WORLD_SIZE": "2"}, 2), ({"OMPI_COMM_WORLD_LOCAL_SIZE": "64"}, 64),
    ({"MPI_LOCALNRANKS": "2", "OMP_NUM_THREADS": "5"}, None), ({"LOCAL_WORLD_SIZE": "many"}, 1)])
def test_ranks_share_the_cores(environment, share):
    """Ranks of one job on this machine divide its cores, unless the user has said how many threads;
    a number that is none is ignored."""
    threads, cores = map(int, run_here("import tensor as t; print(t.threads(), t.physical_cores())",
                                       **environment)[0].split())
    assert threads == (5 if share is None else max(1, cores//share))


@pytest.mark.cpu
def test_ranks_that_are_bound():
    """A launcher that runs on more cores than its ranks has divided them already."""
    code = """
import os, subprocess, sys
inner = "import tensor as t; print(t.ranks_beside())"
both = sorted(os.sched_getaffinity(0))
bind = lambda: os.sched_setaffinity(0, both[:1])
for how in (None, bind):
    print(subprocess.run([sys.executable, "-c", inner], preexec_fn=how, capture_output=True).stdout)
"""
    if len(tensor.affinity()) < 2:
        pytest.skip("one processor")
    out, _ = run_here(code, LOCAL_WORLD_SIZE="2")
    assert out.split() == ["b'2\\n'", "b'1\\n'"]


def test_how_to_go_on(capsys):
    """A run that was stopped before its end goes on to it; one at its end needs more steps."""
    for step, why, how in [(3, "stopped", "runs/a"), (4, "stopped", "runs/a --steps 8"),
                           (4, None, "runs/a --steps 8")]:
        run = SimpleNamespace(step=step, s=SimpleNamespace(steps=4, data="book.txt"))
        train.finish(run, "runs/a", SimpleNamespace(tokens=0), why, caught=True)
        assert capsys.readouterr().out.splitlines()[-1].endswith(f" --resume {how}")


@pytest.mark.cpu
@pytest.mark.parametrize("level", ["1", "2"])
def test_debug_lines(level):
    """XTRAIN_DEBUG: a line for each operation (2: and shape), the most expensive first, whose times
    leave out those of rows inside; FLOPs are counted by the formula."""
    code = """
import tensor as t
x, w = t.sample(64, 300), t.sample(500, 300)
for _ in range(3):
    t.linear(x, w)
t.linear(x, t.sample(200, 300))
t.head_loss(x, w, t.ids(64, below=400), 64, 400)
"""
    out, lines = run_here(code, XTRAIN_DEBUG=level)
    head, titles, *rows = lines.strip().splitlines()
    assert out == "" and "limits" in head and "GFLOP/s" in titles
    table = [line.split() for line in rows]
    times = [float(row[2]) for row in table]
    assert times == sorted(times, reverse=True)
    calls = {row[0]: sum(int(r[1]) for r in table if r[0] == row[0]) for row in table}
    assert calls == {"linear": 4, "head_loss": 1, "matmul": 1}
    assert [row[-2:] for row in table if row[1] == "3"] == ([["64x300", "500x300"]]*(level == "2"))
    (_, _, ms, _, rate, *_), = [row for row in table if row[0] == "matmul"]
    assert float(rate) == pytest.approx(2*64*500*300/float(ms)/1e6, rel=0.05, abs=0.2)
    assert run_here(code) == ("", "")
    mixed = run_here(code + "t.linear(t.cast(x, 'bf16'), w)", XTRAIN_DEBUG=level)[1]
    assert "(bf16) and" in mixed and "(f32)" in mixed and "(bf16)" not in head
    assert {"f32", "bf16"} == {line.split()[7] for line in mixed.splitlines()[2:]}


# ---- 12. Instruction sets -----------------------------------------------------------------------
# A process loads one build, so that the others run in processes of their own.

def other_builds():
    """The builds beside the loaded one that this machine can run."""
    return [name for name in tensor.builds() if name != tensor.ISA and tensor.runnable(name)]


@pytest.mark.cpu
@pytest.mark.parametrize("name", other_builds())
def test_instruction_set(name):
    """The smoke subset passes with another build loaded, and stops at its first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "smoke", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, __file__], env={**os.environ, "XTRAIN_ISA": name},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


# ---- 13. Data -----------------------------------------------------------------------------------
# Tokenizers against transformers and tiktoken, text against its pieces, the cache against damage,
# the loader against its own description.

SHARED = pathlib.Path(__file__).resolve().parent.parent/"shared"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of tokens for this test alone."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path/"cache"))
    return tmp_path/"cache"


def awkward_text(length, seed=0):
    """Text of all that may go wrong at an edge: runs of white space, CRLF, scripts, contractions.

    The parts are random, so that with many cuts every pair of neighbours meets an edge.
    """
    parts = ["the ", "cat's", "we'll ", "don't", "_a", "x", "==", "...\n", "); \r\n", "123", "4 5",
             " ", "  ", "\t", "\n", "\r\n", "\n\n  ", "\u2028", "\x85", "\xa0", "\u3000 ", "\x1c ",
             "été", "字，", "．", " 漢字仮名", "。", "😀", " 👩\u200d👧", "e\u0301 ", "\ufeff",
             "<|endoftext|", "a b"]
    draw = np.random.default_rng(seed).integers(0, len(parts), length)
    return "".join([parts[i] for i in draw])


def vocabulary_for_tests(spec):
    """The tokenizer `spec`; GPT-2's needs the cached vocabulary, else the test is skipped."""
    if spec == "gpt2":
        if not (SHARED/"tiktoken").is_dir() and "TIKTOKEN_CACHE_DIR" not in os.environ:
            pytest.skip("no vocabulary of GPT-2 without network")
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED/"tiktoken"))
    return xtrain.Tokenizer.make(spec, [awkward_text(20000)])


def refused(*words):
    """pytest.raises of a Refused that is one line and holds all words."""
    seen = "".join(f"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(xtrain.Refused, match=rf"\A{seen}.+\Z")


@pytest.mark.cpu
@pytest.mark.parametrize("spec, size", [("bpe:300", 300), ("bytes", 257), ("gpt2", 50257)])
def test_tokenizer(spec, size, tmp_path):
    """Sizes, round trips, lengths; end of text is last and never made by text; files keep all."""
    t, text = vocabulary_for_tests(spec), awkward_text(3000, seed=1) + "\0\U0010ffff<|endoftext|>"
    ids = t.encode(text)
    assert (t.kind, t.vocab_size, t.eot) == (spec, size, size - 1) and t.eot not in ids
    assert t.decode(ids) == text and t.decode_bytes(ids) == text.encode()
    assert t.encode_batch([text, "", "a"]) == [ids, [], t.encode("a")]
    assert t.lengths[ids].sum() == len(text.encode()) and t.lengths[t.eot] == 0
    assert [t.lengths[i] for i in ids] == [len(t.pieces[i]) for i in ids]
    assert t.decode(t.encode("é")[:1]) in ("\ufffd", "é") and t.decode([t.eot, 10**6]) == ""
    if spec == "bytes":
        assert ids == list(text.encode())
    t.save(tmp_path)
    back = xtrain.Tokenizer.load(tmp_path)
    assert back.encode(text) == ids and back.pieces == t.pieces
    assert (back.kind, back.eot, back.digest) == (t.kind, t.eot, t.digest)


@pytest.mark.cpu
def test_gpt2_is_tiktoken():
    """Merges rebuilt from ranks give the ids of tiktoken itself."""
    t, text = vocabulary_for_tests("gpt2"), awkward_text(20000, seed=2)
    import tiktoken
    assert t.encode(text) == tiktoken.get_encoding("gpt2").encode_ordinary(text)


@pytest.mark.cpu
@pytest.mark.parity
@pytest.mark.parametrize("spec", ["bpe:600", "gpt2", "bytes"])
def test_auto_tokenizer(spec, tmp_path):
    """transformers opens the folder, with our config.json in it, and finds the same ids."""
    _, transformers = reference()
    t, text = vocabulary_for_tests(spec), awkward_text(20000, seed=3)
    t.save(tmp_path)
    config = xtrain.config_json(xtrain.Config(vocab_size=t.vocab_size))
    (tmp_path/"config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ids = t.encode(text)
    assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == t.eot and len(theirs) == t.vocab_size


@pytest.mark.cpu
def test_learning_is_deterministic():
    """Another process, with another hash seed, learns the same ids from the same text."""
    text = awkward_text(20000)
    code = ("import sys, xtrain; text = sys.stdin.buffer.read().decode(); "
            "print(xtrain.Tokenizer.make('bpe:600', [text]).digest)")
    digests = {subprocess.run([sys.executable, "-c", code], input=text.encode(), check=True,
                              stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parent,
                              env={**os.environ, "PYTHONHASHSEED": str(i)}).stdout for i in (1, 2)}
    assert digests == {xtrain.Tokenizer.make("bpe:600", [text]).digest.encode() + b"\n"}


@pytest.mark.cpu
def test_small_corpus_gives_fewer_ids(capsys):
    """bpe:N on little text says on stderr with how many ids it goes on."""
    t = xtrain.Tokenizer.make("bpe:5000", ["low lower lowest"])
    assert 257 <= t.vocab_size < 300 and t.eot == t.vocab_size - 1
    assert f"going on with {t.vocab_size} ids" in capsys.readouterr().err


@pytest.mark.cpu
@pytest.mark.parametrize("spec", ["bpe:256", "bpe:1000001", "bpe:", "bpe:-5", "bpe:1e3", "BPE:300",
                                  "", "word", "gpt2 ", "bpe:٣٠٠"])
def test_tokenizer_refuses(spec):
    """Nonsense is refused in one line that names the range."""
    with refused("--tokenizer", "257", "1000000"):
        xtrain.Tokenizer.make(spec)


@pytest.mark.cpu
def test_gpt2_without_network(tmp_path):
    """No cache and no network: one line says which files to put where."""
    code = "import xtrain; xtrain.Tokenizer.gpt2()"
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path), "no_proxy": "", "NO_PROXY": "",
           "https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True,
                          cwd=pathlib.Path(__file__).parent)
    last = done.stderr.strip().split("\n")[-1]
    assert "Refused" in last and "TIKTOKEN_CACHE_DIR" in last and done.returncode
    for name in ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "vocab.bpe", "encoder.json"):
        assert name in last


@pytest.mark.cpu
@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model": {"type": "Unigram"}}',
                                     '{"model": {"type": "BPE"}, "pre_tokenizer": null}'])
def test_load_refuses(content, tmp_path):
    """A tokenizer.json that is missing, broken or of another kind is refused in one line."""
    if content is not None:
        (tmp_path/"tokenizer.json").write_text(content)
    with refused("tokenizer.json"):
        xtrain.Tokenizer.load(tmp_path)


def qwen_words(t):
    """Qwen's pre-tokens in place of GPT-2's: other rules for line ends, digits and punctuation."""
    from tokenizers import Regex, pre_tokenizers
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    t.core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return t


@pytest.mark.cpu
def test_load_another_family(tmp_path):
    """Rules of a folder's own survive loading; its end of text comes from tokenizer_config.json."""
    t, text = qwen_words(vocabulary_for_tests("bpe:400")), awkward_text(3000, seed=5)
    t.save(tmp_path)
    for name, old, new in (("tokenizer.json", "<|endoftext|>", "<|end_of_text|>"),
                           ("tokenizer_config.json", "<|endoftext|>", "<|end_of_text|>"),
                           ("tokenizer_config.json", "xtrain_kind", "some_other_key")):
        path = tmp_path/name
        path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    back = xtrain.Tokenizer.load(str(tmp_path))
    assert back.encode(text) == t.encode(text) != vocabulary_for_tests("bpe:400").encode(text)
    assert (back.eot, back.kind, back.pieces) == (t.eot, "bpe:400", t.pieces)


@pytest.mark.cpu
@pytest.mark.parametrize("words, size, cut", [("gpt2", 5_000_000, 1 << 12), ("gpt2", 200_000, 1),
                                              ("qwen", 200_000, 1)])
def test_chunk_edges(words, size, cut, monkeypatch):
    """Text in pieces has the ids of the whole: edges in white space, CRLF, several scripts."""
    monkeypatch.setattr(xtrain, "PIECE", cut)
    t, text = xtrain.Tokenizer.make("bpe:600", [awkward_text(20000)]), awkward_text(size//3)
    t, text = (qwen_words(t) if words == "qwen" else t), text[:size]
    cuts = list(xtrain.pieces([text]))
    assert "".join(p for p, _ in cuts) == text and len(cuts) > len(text)/(cut + 200)
    ids = np.concatenate([ids for ids, _, _ in t.stream(cuts)])
    assert ids[-1] == t.eot and ids[:-1].tolist() == t.encode(text)


@pytest.mark.cpu
@pytest.mark.parametrize("cut, longest", [(1, 3), (4, 9), (16, 50), (1 << 12, 1 << 15)])
def test_pieces_do_not_depend_on_blocks(cut, longest, monkeypatch):
    """Documents and pieces are the same for any blocks; separators at every place of an edge."""
    monkeypatch.setattr(xtrain, "PIECE", cut)
    monkeypatch.setattr(xtrain, "LONGEST", longest)
    mark = xtrain.END_OF_TEXT
    documents = ["a b", "x"*40, " ", "", "é"*7 + " y\n", "<|endoftext|", "word "*30]
    text = mark.join([*documents, *documents[::-1], ""])
    whole = list(xtrain.pieces([text]))
    for n in (1, 7, 13, 64):
        assert list(xtrain.pieces(text[i:i + n] for i in range(0, len(text), n))) == whole
    joined = "".join(p + mark*ends for p, ends in whole)
    kept = [d for d in documents + documents[::-1] if d.strip()]
    assert joined == "".join(d + mark for d in kept)
    assert max(len(p) for p, _ in whole) <= longest


def write(path, content):
    """A file of bytes or text, its folders made; returns its path as a string."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.cpu
@pytest.mark.parametrize("name, content, words", [
    ("a.txt", b"", ["corpus is empty", "0 bytes"]),
    ("a.txt", b"<|endoftext|>\n<|endoftext|> \n", ["corpus is empty", "endoftext"]),
    ("a.txt", b"good \xff", ["a.txt", "byte 5", "--encoding", "--errors replace"]),
    ("a.txt", b"x"*(1 << 20) + b"\xe6\xbc", ["byte 1048576", "--encoding"]),
    ("a.txt", b"x"*((1 << 20) - 1) + b"\xe6\xbcx", ["byte 1048575", "--encoding"]),
    ("a.txt", b"x", ["too few"]),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', ["a.jsonl", "line 3"]),
    ("a.jsonl", b'{"txt": "a"}\n', ["line 1", "text"]),
    ("a.jsonl", b'{"text": 5}\n', ["line 1", "text"]),
    ("a.jsonl", b'["text"]\n', ["line 1", "text"]),
    ("a.jsonl", b"["*100000, ["line 1", "text"]),
    ("a.jsonl", b'{"text": "\\ud800"}', ["line 1", "surrogate", "--errors replace"]),
    ("sub/a.bin", b"text", [".txt", ".jsonl", "no file"]),
])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_corpus_refuses(name, content, words, tokenizer, tmp_path, cache):
    """Each bad corpus is refused in one line with place and way out, and leaves nothing behind."""
    write(tmp_path/"data"/name, content)
    with refused(*words):
        train.prepare(str(tmp_path/"data"), tokenizer, progress=False)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.cpu
def test_flags_of_prepare_refuse(tmp_path, cache, monkeypatch):
    """Missing and unreadable paths, unknown encodings and error handlers are refused."""
    file = write(tmp_path/"a.txt", "some text")
    for words, path, options in [
            (["nowhere", "no such file"], str(tmp_path/"nowhere"), {}),
            (["neither"], os.devnull, {}),
            (["--encoding", "klingon"], file, dict(encoding="klingon")),
            (["--encoding", "base64"], file, dict(encoding="base64")),
            (["--errors", "hope"], file, dict(errors="hope")),
            (["--tokenizer"], file, dict(tokenizer="bpe:1"))]:
        with refused(*words):
            train.prepare(path, progress=False, **options)
    # root may read everything, so that the error is made by hand
    def denied(*_):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(train, "open", denied, raising=False)
    with refused("a.txt", "Permission denied"):
        train.prepare(file, progress=False)


@pytest.mark.cpu
def test_ways_out_of_bad_bytes(tmp_path, cache):
    """--errors replace and --encoding do what the refusal promises; a BOM is left out."""
    text = lambda path, **o: (lambda t, x: t.decode(np.concatenate([x.train, x.held_out])))(
        *train.prepare(path, "bytes", progress=False, **o))
    latin = write(tmp_path/"latin.txt", "caf\xe9 au lait".encode("latin-1"))
    assert text(latin, errors="replace") == "caf\ufffd au lait"
    assert text(latin, encoding="latin-1") == "caf\xe9 au lait"
    assert text(write(tmp_path/"bom.txt", b"\xef\xbb\xbfabcd\r\n")) == "abcd\r\n"
    assert text(write(tmp_path/"wide.txt", "漢字".encode("utf-16")), encoding="utf-16") == "漢字"
    half = write(tmp_path/"half.jsonl", '{"text": "oha\\ud800b"}')
    assert text(half, errors="replace") == "oha?b"


@pytest.mark.cpu
def test_documents(tmp_path, cache):
    """A folder's files in sorted order, split at the separator; .jsonl by line; no hidden ones."""
    data = tmp_path/"data"
    write(data/"b.txt", "one<|endoftext|>two\n")
    write(data/"a"/"z.jsonl", '{"text": "zero<|endoftext|>"}\r\n\n{"id": 1, "text": "half"}')
    for name in (".hidden.txt", ".git/x.txt", "c.bin"):
        write(data/name, "never")
    corpus = train.Corpus(str(data), progress=False)
    assert list(corpus.pieces("")) == [("one", True), ("two\n", False), ("", True),
                                       ("zero<|endoftext|>", False), ("", True),
                                       ("half", False), ("", True)]
    t, x = train.prepare(str(data), "bytes", progress=False)
    ids = np.concatenate([x.train, x.held_out])
    assert x.documents == 4 and (ids == t.eot).sum() == 4 and ids[-1] == t.eot
    assert sorted(t.decode(d) for d in np.split(ids, np.flatnonzero(ids == t.eot) + 1)[:-1]) == [
        "half", "one", "two\n", "zero<|endoftext|>"]


@pytest.mark.cpu
def test_default_corpus():
    """The standard library, without what is installed into it and without its tests."""
    files = train.Corpus(progress=False).files
    names = [set(pathlib.Path(f).parts) for f in files]
    assert len(files) > 300 and any(f.endswith("argparse.py") for f in files)
    assert not any(n & {"site-packages", "dist-packages", "test", "tests"} for n in names)


@pytest.mark.cpu
def test_held_out_by_document(tmp_path, cache):
    """About 5 % of the documents, by their content alone: order and neighbours do not matter."""
    documents = [f"document {i} " + "x"*(i % 50) for i in range(2000)]
    held = []
    for k, some in enumerate((documents, documents[::-1], documents[:1000])):
        path = write(tmp_path/f"{k}.txt", xtrain.END_OF_TEXT.join(some))
        t, x = train.prepare(path, "bytes", progress=False)
        held.append(set(t.decode(x.held_out).split("document ")[1:]))
        assert x.train[-1] == x.held_out[-1] == t.eot
    assert held[0] == held[1] and 60 <= len(held[0]) <= 140 and held[2] < held[0]
    # one document: the last 5 % of its tokens, in order
    text = "".join(map(str, range(400)))
    t, x = train.prepare(write(tmp_path/"one.txt", text), "bytes", progress=False)
    assert len(x.held_out) == (len(text) + 1)//20 and t.decode([*x.train, *x.held_out]) == text


@pytest.mark.cpu
def test_cache_of_tokens(tmp_path, cache, capsys, monkeypatch):
    """Found again by content, made again when damaged, never mixed up, optional."""
    path = write(tmp_path/"a.txt", awkward_text(3000))
    prepare = partial(train.prepare, tokenizer="bpe:300", progress=False)
    t, x = prepare(path)
    assert x.train.dtype == np.uint16 and not x.train.flags.writeable
    again = prepare(write(tmp_path/"moved.txt", awkward_text(3000)))[1]
    assert (again.folder, again.digest) == (x.folder, x.digest)
    others = [prepare(path, tokenizer="bpe:301"), prepare(path, errors="replace"),
              prepare(write(tmp_path/"b.txt", awkward_text(3001))),
              prepare(path, tokenizer=xtrain.Tokenizer.make("bpe:300", [awkward_text(999, 7)]))]
    assert len({x.folder, *(o.folder for _, o in others)}) == 5
    assert [o.digest == x.digest for _, o in others] == [False, True, False, False]
    assert prepare(path, tokenizer=t)[1].folder == x.folder     # a stored one, of the same kind
    capsys.readouterr()

    # a flipped bit of an id, of the split, a cut end, an old magic, a broken tokenizer
    file = pathlib.Path(x.folder, "tokens.bin")
    good, vocabulary = file.read_bytes(), pathlib.Path(x.folder, "tokenizer.json")
    flip = lambda i: good[:i] + bytes([good[i] ^ 1]) + good[i + 1:]
    for damaged in (flip(len(good) - 1), flip(16), good[:-2], good[:10], flip(0), None):
        if damaged is None:
            vocabulary.write_text("{")
        else:
            file.write_bytes(damaged)
        assert prepare(path)[1].digest == x.digest
        assert "making it again" in capsys.readouterr().err
        assert file.read_bytes() == good
    assert not [n for n in os.listdir(cache) if n.startswith(".")]

    monkeypatch.setenv("XTRAIN_CACHE", write(tmp_path/"blocked", "a file") + "/cache")
    _, elsewhere = prepare(path)
    assert elsewhere.digest == x.digest and "cannot be written" in capsys.readouterr().err
    folder = elsewhere.folder
    assert os.path.isdir(folder)
    del elsewhere, _
    gc.collect()
    assert not os.path.exists(folder)


@pytest.mark.cpu
def test_wide_ids(tmp_path, cache):
    """More than 65,536 ids are stored in 32 bits."""
    t = xtrain.Tokenizer.bytes()
    t.core.add_tokens([f"word{i}" for i in range(70000)])
    t = xtrain.Tokenizer(t.core, "wide", 256)
    path = write(tmp_path/"a.txt", "a word69999 b"*9)
    _, x = train.prepare(path, t, progress=False)
    assert x.train.dtype == np.uint32 and 257 + 69999 in x.train


@pytest.mark.cpu
def test_bounded_memory(tmp_path):
    """9 MB more of corpus take less than 9 MB more of memory (measured in fresh processes)."""
    code = ("import resource, sys, train; train.prepare(sys.argv[1], 'bpe:400', progress=False); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    peak = []
    for n in (1, 4):
        path = write(tmp_path/f"{n}.txt", "some words, and another line\n"*100_000*n)
        out = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True,
                             cwd=pathlib.Path(__file__).parent,
                             env={**os.environ, "XTRAIN_CACHE": str(tmp_path/"cache")}).stdout
        peak.append(int(out)/1024)
    assert peak[1] - peak[0] < 9, peak


def sequences_of(steps, n=1003, seq=8, seed=3, **split):
    """All (number, tokens) of some updates, over all ranks, sorted by number."""
    rows, ranks = [], split.get("ranks", 1)
    for step, rank in itertools.product(steps, range(ranks)):
        loader = train.Loader(np.arange(n, dtype=np.uint16), seq, seed=seed, rank=rank, **split)
        micros, counted = loader.step(step)
        assert counted == loader.sequences*seq and len(micros) == split.get("accum", 1)
        for micro in micros:
            assert (micro.targets == micro.tokens + 1).all()
            assert (micro.order == np.argsort(micro.tokens.ravel(), kind="stable")).all()
            assert micro.tokens.dtype == micro.targets.dtype == micro.order.dtype == np.int64
            rows += [(micro.first_sequence + i, *row)
                     for i, row in enumerate(micro.tokens.tolist())]
    return sorted(rows)


@pytest.mark.cpu
def test_loader_split():
    """The same sequences under the same numbers for 16x1, 4x4, 8x2, and over ranks."""
    want = sequences_of(range(1, 20), batch=16)
    assert [row[0] for row in want] == list(range(19*16))
    for batch, accum, ranks in ((4, 4, 1), (8, 2, 1), (1, 16, 1), (4, 2, 2), (2, 2, 4), (8, 1, 2)):
        assert sequences_of(range(1, 20), batch=batch, accum=accum, ranks=ranks) == want


@pytest.mark.cpu
def test_loader_epochs():
    """An epoch is every window once, at one offset; the next has another order and offset."""
    loader = train.Loader(np.arange(1003, dtype=np.uint16), 8, 7, seed=3)
    assert loader.windows == 1003//8 - 1 and loader.epoch_steps == -(-loader.windows//7)
    starts = [row[1] for row in sequences_of(range(1, 4*loader.epoch_steps), batch=7)]
    epochs = [starts[i:i + loader.windows] for i in range(0, 3*loader.windows, loader.windows)]
    for epoch in epochs:
        offset = min(epoch)
        assert sorted(epoch) == [offset + 8*i for i in range(loader.windows)] and 0 <= offset < 8
    assert epochs[0] != sorted(epochs[0]) and len({tuple(np.argsort(e)) for e in epochs}) == 3
    assert sequences_of([5], batch=7, seed=4) != sequences_of([5], batch=7)
    # any order of calls gives the same batch: a resumed run needs no state
    far_first = [loader.step(n)[0][0].tokens.tolist() for n in (60, 2, 60)]
    assert far_first[0] == far_first[2] and far_first[1] == loader.step(2)[0][0].tokens.tolist()


@pytest.mark.cpu
def test_loader_order_is_fixed():
    """The order of the data for one seed, written down: a NumPy that differs would break resume."""
    order, offset = train.Loader(np.arange(100), 8, 1, seed=1337).epoch(1)
    assert (order.tolist(), offset) == ([7, 2, 6, 8, 0, 5, 4, 10, 9, 1, 3], 2)


@pytest.mark.cpu
def test_loader_is_short():
    """Down to one window it works; below, both numbers are named."""
    micro, = train.Loader(np.arange(9), 8, 2).step(3)[0]
    assert micro.tokens.tolist() == [list(range(8))]*2
    with refused("9 tokens", "has 8", "--seq"):
        train.Loader(np.arange(8), 8, 1)
    for n in range(9, 60):              # no window reaches over the end
        sequences_of(range(1, 9), n=n, batch=3)


@pytest.mark.cpu
@pytest.mark.parametrize("n, seq, batch", [(50, 8, 3), (2, 8, 3), (49, 8, 2), (9, 8, 1),
                                           (30, 100, 4)])
def test_evaluate(n, seq, batch):
    """The mean over windows that do not overlap, each target once; dropout off; mode put back."""
    model, tokens = scatter(build(dropout=0.5)), ints(19, n).astype(np.uint16)
    lengths = np.arange(model.config.vocab_size)
    loss, bpb = xtrain.evaluate(model, tokens, lengths, seq, batch)
    assert model.training
    model.eval()
    nats = 0.0
    for i in range(0, n - 1, seq):
        window = tokens[i:i + seq + 1].astype(np.int64)[None]
        nats += model.loss(window[:, :-1], window[:, 1:]).item()*(window.size - 1)
    assert_close([loss, bpb], [nats/(n - 1), nats/np.log(2)/lengths[tokens[1:]].sum()])
    xtrain.evaluate(model, tokens, lengths, seq, batch)
    assert not model.training
    short = xtrain.evaluate(model, tokens, lengths, seq, batch, limit=1)
    assert short == xtrain.evaluate(model, tokens[:2], lengths, seq, batch)
    with refused("1 tokens", "at least 2"):
        xtrain.evaluate(model, tokens[:1], lengths, seq)


# ---- 14. Generation -----------------------------------------------------------------------------
# The cache against the full forward, sampling against its definition, and sample.py as a user runs
# it, with the bytes tokenizer and a small model.

CACHED = {"gqa": {}, "mha": dict(kv_heads=4), "mqa": dict(kv_heads=1), "tied": dict(
    tie_embeddings=True), "llama": dict(qk_norm=False), "past max_seq": dict(max_seq=8),
    "composed": dict(flash=False), "dropout": dict(dropout=0.3, recompute=True)}
CUTS = [[150], [1]*150, [70, 1, 1, 3, 75], [149, 1]]      # how 150 tokens come in


@pytest.mark.parametrize("cut", CUTS, ids=["one go", "token by token", "mixed", "prompt and one"])
@pytest.mark.parametrize("name", CACHED)
def test_cache(name, cut):
    """Logits with the cache are those of the full forward: a wrong position, a stale or shifted
    key, or dropout left on would show."""
    model = scatter(xtrain.Decoder(xtrain.Config(**{**SMALL, **CACHED[name]})))
    tokens = ints(211, 2, 150)
    full = model.eval()(tokens).numpy()
    cache, at = model.train().cache(2, 150), 0
    for n in cut:
        got = model.decode(tokens[:, at:at + n], cache).numpy()
        at += n
        assert_close(got, full[:, at - 1], what=f"after {at}")
    with pytest.raises(ValueError, match="room for 150"):
        model.decode(tokens[:, :1], cache)


@pytest.mark.cpu
@pytest.mark.parametrize("k", [1, 3, 511, 512, 513, 1300])
@pytest.mark.parametrize("n", [1, 33, 500])
def test_few_rows(n, k):
    """A row's bits do not depend on how many there are beside it, up to 15 or from 16 on; a slice
    of k summed in another order, or a panel's edge in the wrong place, would show."""
    rng = rng_of(f"few rows {n} {k}")
    a, w, r = (own(rng.standard_normal(shape)) for shape in ((700, k), (n, k), (700, n)))
    for most, fewer in ((15, (1, 2, 4, 5, 6, 11, 14)), (700, (16, 31, 32, 33, 64, 577))):
        whole = tensor.linear(a[:most], w, r[:most]).numpy()
        for m in fewer:
            part = tensor.linear(a[:m], w, r[:m]).numpy()
            assert_same_bits(part, whole[:m], f"{m} rows")


def test_shared_prompt():
    """A prompt of one row fills every row of the cache, to the bit (a broadcast that copied only
    the first would show), and other batches are refused."""
    model, tokens = scatter(build()), ints(19, 1, 9)
    one, three = model.cache(1, 12), model.cache(3, 12)
    model.decode(tokens, one)
    model.decode(tokens, three)
    more = ints(19, 3, 1, seed=1)
    rows = model.decode(more, three).numpy()
    alone = model.decode(more[2:], one).numpy()[0]
    if tensor.DEVICE == "cpu":          # a GPU's products depend on how many rows they have
        assert_same_bits(alone, rows[2])
    assert_close(alone, rows[2], 1e-6)
    with pytest.raises(ValueError, match="the cache holds 3"):
        model.decode(more[:2], three)


def chances(logits, temperature, top_k, top_p):
    """The probabilities that `choose` shall draw from, by the definition, in float64."""
    x = logits.astype(np.float64)/temperature
    p = np.exp(x - x.max())
    kept = sorted(range(len(p)), key=lambda i: (-p[i], i))[:top_k]
    whole, reached, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        if reached >= top_p:
            break
        nucleus.append(i)
        reached += p[i]/whole
    out = np.zeros(len(p))
    out[nucleus] = p[nucleus]
    return out/out.sum()


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1.0, None, 1.0), (0.5, None, 1.0), (3.0, 5, 1.0), (1.0, None, 0.6), (1.0, 4, 0.7),
    (2.0, 20, 0.95), (1.0, 1, 1.0), (1.0, None, 1e-9), (1.0, 99, 0.5)])
def test_sampling(temperature, top_k, top_p):
    """Over an even grid of u, each id comes as often as the definition says: catches a wrong
    order of top-k and top-p, a nucleus one too small or large, a shifted cumulative sum."""
    logits = rng_of("sampling").standard_normal(50).astype(np.float32)*2
    grid = (np.arange(4000) + 0.5)/4000
    drawn = [xtrain.choose(logits, u, temperature, top_k, top_p) for u in grid]
    found = np.bincount(drawn, minlength=50)/len(grid)
    wanted = chances(logits, temperature, top_k, top_p)
    assert np.abs(found - wanted).max() <= 1.5/len(grid)
    assert not found[wanted == 0].any()


def test_sampling_at_the_edges():
    """The last u stays within the kept ids, tiny temperatures are greedy, NaN is refused."""
    logits = np.array([0, 3, -200, 3, -1000], np.float32)
    assert xtrain.choose(logits, 1 - 2**-53, 1.0) in (1, 3)
    assert xtrain.choose(logits, 0.0, 1.0) == 0
    assert xtrain.choose(logits, 0.0, 1e-300) == xtrain.choose(logits, 0.9, 0) == 1
    for bad in (np.nan, np.inf):
        with pytest.raises(xtrain.Refused, match="not finite"):
            xtrain.choose(np.array([0, bad], np.float32), 0.5, 1.0)


def test_samples_are_their_own():
    """Sample i of a seed is the same alone and in a group, and differs from the others; catches a
    random stream that is shared, and rows that leak into each other."""
    model = scatter(build())
    group = list(xtrain.generate_batch(model, [1, 2], 20, seed=5, indices=range(6)))
    columns = [list(column) for column in zip(*group)]
    alone = [list(xtrain.generate(model, [1, 2], 20, seed=5, index=i)) for i in range(6)]
    assert columns == alone
    assert len({tuple(column) for column in columns}) == 6
    assert list(xtrain.generate(model, [1, 2], 20, seed=6)) != alone[0]


def test_generation_stops():
    """A sample ends before `stop`, others go on; all ended, or max_new reached, ends all."""
    model = scatter(build())
    columns = list(zip(*xtrain.generate_batch(model, [3], 40, seed=1, indices=range(4))))
    stop = columns[0][5]
    ended = list(zip(*xtrain.generate_batch(model, [3], 40, seed=1, indices=range(4), stop=stop)))
    for whole, cut in zip(columns, ended):
        n = whole.index(stop) if stop in whole else len(whole)
        assert cut[:n] == whole[:n] and not any(i is not None for i in cut[n:])
    assert len(list(xtrain.generate(model, [3], 7, 0))) == 7
    with pytest.raises(xtrain.Refused, match="empty"):
        next(xtrain.generate(model, [], 1))


def test_save_bf16(tmp_path):
    """bf16 files round to nearest even and say so; an unknown dtype is refused."""
    model = scatter(build())
    xtrain.save_pretrained(model, str(tmp_path), "bf16")
    assert json.loads((tmp_path/"config.json").read_text())["dtype"] == "bfloat16"
    twin = xtrain.load_pretrained(str(tmp_path)).parameters()
    for name, p in model.parameters().items():
        bits = p.numpy().view(np.uint32)
        even = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
        assert_same_bits(twin[name].numpy().view(np.uint32), even, name)
    with pytest.raises(ValueError, match="'f16'"):
        xtrain.save_pretrained(model, str(tmp_path), "f16")


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gqa 6/2", "mqa", "llama"])
def test_greedy_parity(name, tmp_path):
    """transformers' generate gives the same 48 ids for each of ten prompts."""
    torch, _ = reference()
    theirs = their_model(PARITY[name], 3).eval()
    with torch.no_grad():
        theirs.model.embed_tokens.weight.mul_(3)    # or the same id would come again and again
    theirs.save_pretrained(tmp_path)
    ours, seen = xtrain.load_pretrained(str(tmp_path)), set()
    for i in range(10):
        ids = ints(211, 1 + 2*i, seed=i)
        prompt = torch.from_numpy(ids)[None]
        out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48,
                              do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted = out[0, len(ids):].tolist()
        assert list(xtrain.generate(ours, ids.tolist(), 48, 0)) == wanted
        seen |= set(wanted)
    assert len(seen) > 50


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A run folder with one whole and one cut checkpoint of a model over bytes."""
    run, tokenizer = tmp_path_factory.mktemp("run"), xtrain.Tokenizer.bytes()
    model = scatter(build(vocab_size=tokenizer.vocab_size, max_seq=64))
    xtrain.save_pretrained(model, str(run/"step-00000004"), tokenizer=tokenizer)
    (run/"step-00000007").mkdir()
    return run, model.eval(), tokenizer


@pytest.fixture
def say_it(speaker, capsysbinary):
    """Run sample.py's main on the speaker -> (exit code, stdout, stderr), both bytes."""
    def run(*flags, model=speaker[0]):
        code = xtrain.exit_code(sample.main, ["--model", str(model), *map(str, flags)])
        return code, *capsysbinary.readouterr()
    return run


def test_text_in_whole_characters(speaker):
    """A character that comes in three tokens is shown once it is whole; a rest becomes U+FFFD."""
    text = sample.Text(speaker[2], "", [])
    assert [text.add(b) for b in "€!".encode()] == ["", "", "€", "!"]
    assert [text.add(b) for b in "€".encode()[:2]] + [text.end()] == ["", "", "\ufffd"]
    assert text.text == "€!\ufffd"


def test_sample(speaker, say_it):
    """stdout is prompt and text and nothing else; several, and --json, hold the same samples."""
    _, model, tokenizer = speaker
    ids = tokenizer.encode("Zß")
    texts = [tokenizer.decode(list(xtrain.generate(model, ids, 12, 0.8, seed=1337, index=i,
                                                   stop=tokenizer.eot))) for i in range(10)]
    flags = ("--prompt", "Zß", "--max-new", 12)
    assert say_it(*flags) == (0, ("Zß" + texts[0]).encode(), b"")
    assert say_it(*flags, "--num", 10)[1].decode() == "\n---\n".join("Zß" + t for t in texts)
    lines = [json.loads(line) for line in say_it(*flags, "--num", 10, "--json")[1].splitlines()]
    assert [line["text"] for line in lines] == ["Zß" + t for t in texts]
    assert all(line["ids"][:len(ids)] == ids for line in lines)
    # an empty prompt is end of text, which is among the ids and not in the text
    empty = json.loads(say_it("--max-new", 3, "--json")[1])
    assert empty["ids"][0] == tokenizer.eot and "endoftext" not in empty["text"]


def test_sample_past_the_context(say_it):
    """The warning comes once, on stderr, and only where the context is left."""
    code, out, err = say_it("--max-new", 100, "--num", 9, "--temperature", 1)
    assert code == 0 and err.count(b"past the context of 64") == 1 and b"context" not in out
    assert not say_it("--max-new", 63)[2]


def test_sample_in_a_locale_without_utf8(speaker):
    """A real process under LC_ALL=C writes UTF-8 and takes a UTF-8 prompt."""
    command = [sys.executable, sample.__file__, "--model", speaker[0], "--max-new", "1",
               "--temperature", "0", "--prompt", "日本"]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=plain, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith("日本".encode()), done.stderr


def test_sample_measures(speaker, say_it, tmp_path):
    """--eval is the mean cross-entropy of the file's tokens, and per byte in bits."""
    _, model, tokenizer = speaker
    (tmp_path/"text").write_bytes("Grüße, 40 tokens".encode())
    ids = np.array(tokenizer.encode("Grüße, 40 tokens"))
    logits = model(ids[None, :-1]).numpy()[0].astype(np.float64)
    nats = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    found = json.loads(say_it("--eval", tmp_path/"text", "--json")[1])
    assert abs(found["loss"]/nats.mean() - 1) < 1e-5
    assert abs(found["bits_per_byte"]/(nats.mean()/np.log(2)) - 1) < 1e-5    # a byte a token


def test_sample_exports(speaker, say_it, tmp_path):
    """--export writes a folder that loads to the same bits, and no folder twice."""
    _, model, tokenizer = speaker
    assert say_it("--export", tmp_path/"out")[0] == 0
    twin = xtrain.load_pretrained(str(tmp_path/"out")).parameters()
    for name, p in model.parameters().items():
        assert_same_bits(twin[name].numpy(), p.numpy(), name)
    assert xtrain.Tokenizer.load(str(tmp_path/"out")).digest == tokenizer.digest
    code, out, err = say_it("--export", tmp_path/"out")
    assert code == 2 and not out and b"not empty" in err
    assert say_it("--export", tmp_path/"half", "--dtype", "bf16")[0] == 0
    assert json.loads((tmp_path/"half"/"config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(os.listdir(tmp_path)) == ["half", "out"]


@pytest.mark.parametrize("flags, words", [
    ("--temperature -1", "--temperature"), ("--temperature nan", "--temperature"),
    ("--temperature inf", "--temperature"), ("--top-k 0", "leave it out for no limit"),
    ("--top-p 0", "--top-p"), ("--top-p 1.01", "--top-p"), ("--num 0", "--num"),
    ("--num 1001", "--num"), ("--max-new 0", "--max-new"), ("--seed -1", "--seed"),
    ("--seed 18446744073709551616", "--seed"), ("--tempreture 1", "--temperature"),
    *[("--device cuda", "cuda")]*(len(DEVICES) == 1), ("--dtype fp8", "bf16"),
    ("--eval nowhere", "nowhere"),
    ("--eval .", "directory"), ("--export setup.py", "is a file"), ("--export=", "empty"),
    ("--prompt \udce9", "UTF-8")])
def test_sample_refuses(say_it, monkeypatch, flags, words):
    """One line that names what is wrong, exit code 2, nothing on stdout."""
    monkeypatch.chdir(os.path.dirname(os.path.abspath(__file__)))
    code, out, err = say_it(*flags.split())
    assert code == 2 and not out and err.startswith(b"xtrain: error: ") and err.count(b"\n") == 1
    assert words in err.decode(), err


@pytest.mark.parametrize("file, keep, words", [
    ("config.json", None, "config.json"), ("config.json", 30, "config.json"),
    ("model.safetensors", None, "model.safetensors"), ("model.safetensors", 99, "safetensors"),
    ("model.safetensors", 9000, "safetensors"), ("tokenizer.json", None, "tokenizer.json"),
    ("tokenizer.json", 99, "tokenizer.json")])
def test_sample_refuses_folders(speaker, say_it, tmp_path, file, keep, words):
    """A file that is missing (keep None) or cut to so many bytes is named in one line."""
    shutil.copytree(speaker[0]/"step-00000004", tmp_path/"m")
    whole = (tmp_path/"m"/file).read_bytes()
    (tmp_path/"m"/file).unlink()
    if keep is not None:
        assert keep < len(whole)
        (tmp_path/"m"/file).write_bytes(whole[:keep])
    code, out, err = say_it(model=tmp_path/"m")
    assert code == 2 and not out and err.startswith(b"xtrain: error: ") and err.count(b"\n") == 1
    assert words in err.decode(), err


# ---- 15. The command that trains ----------------------------------------------------------------
# Runs of a model so small that a step takes a millisecond, in this process unless a signal or the
# state of a fresh interpreter is what is tested.

SHORT_RUN = ("--tokenizer=bytes --dim=16 --layers=1 --heads=2 --kv-heads=1 --seq=8 --batch=2 "
        "--accum-steps=3 --dropout=0.1 --log-every=1 --eval-every=5 --eval-tokens=64 --keep=99 "
        "--steps=12").split()
STORY = "".join(f"The {i}th fox sat on a mat of {i*i} straws, and said so.\n" for i in range(18))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that runs train.py's main in an empty folder on a small text -> exit code."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path/"cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path/"story.txt").write_text(STORY)
    return lambda *flags: xtrain.exit_code(train.main, ["--data=story.txt", *SHORT_RUN, *flags])


def rows_of(run):
    """metrics.jsonl without the speed, which no two runs share."""
    with open(os.path.join(run, "metrics.jsonl")) as f:
        rows = [json.loads(line) for line in f]
    return [{k: v for k, v in row.items() if k != "tok_s"} for row in rows]


def assert_equal_runs(a, b):
    """Two runs logged the same and ended in the same bits of weights and moments."""
    assert rows_of(a) == rows_of(b)
    ends = [list(xtrain.checkpoints(run).values())[-1] for run in (a, b)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (open(os.path.join(end, name), "rb").read() for end in ends)
        assert first == second, name
    assert json.load(open(f"{a}/best.json")) == json.load(open(f"{b}/best.json"))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("stops", [(7,), (5,), (3, 8), (1, 2, 3, 11)])
def test_resume_equals_straight(start, stops, dtype):
    """Stopping anywhere (5 is right after an evaluation), once or often, changes no bit."""
    assert start("--out=straight", "--save-every=1", f"--dtype={dtype}") == 0
    source = "straight"
    for i, (stop, then) in enumerate(zip(stops, (*stops[1:], 12))):
        # go on in a folder of its own, and only up to the next stop
        shutil.copytree(f"{source}/step-{stop:08d}", f"part{i}/step-{stop:08d}")
        shutil.copy(f"{source}/metrics.jsonl", f"part{i}/metrics.jsonl")
        assert start(f"--resume=part{i}", "--save-every=1") == 0
        source = f"part{i}"
    assert_equal_runs("straight", source)
    assert xtrain.run_dtype(xtrain.find_model(source)) == dtype


@pytest.mark.parametrize("ratio", [1.4, 1.6])
def test_auto_is_bf16_where_that_is_faster(start, monkeypatch, capsys, ratio):
    """--dtype auto takes bf16 only if it was measured to be clearly faster, and says what it took.
    """
    monkeypatch.setattr(tensor, "peak_flops", lambda dtype="f32", device="cpu": (
        ratio if dtype == "bf16" else 1.0))
    wanted = "bf16" if ratio > 1.5 and tensor.core.info()["bf16"] else "f32"
    wanted = "bf16" if tensor.DEVICE == "cuda" else wanted
    assert start("--bench=1", "--vocab-size=300") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == wanted
    assert start("--bench=1", "--vocab-size=300", "--dtype=bf16") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == "bf16"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_samples_are_computed_as_the_run_was(start, monkeypatch, dtype):
    """sample.py takes the run's dtype, unless told another; a folder that no run wrote is f32."""
    assert start("--out=a", "--steps=1", f"--dtype={dtype}") == 0
    seen, load = [], xtrain.load_pretrained
    monkeypatch.setattr(xtrain, "load_pretrained", lambda folder, device, dtype: (
        seen.append(dtype), load(folder, device, dtype))[1])
    model = ["--model=a", "--max-new=2", "--prompt=x"]
    for flags in (model, [*model, "--dtype=f32"], [*model, "--dtype=bf16"], [*model, "--export=b"],
                  ["--model=b", "--max-new=2", "--prompt=x"]):
        assert xtrain.exit_code(sample.main, flags) == 0
    assert seen == [dtype, "f32", "bf16", dtype, "f32"]
    assert json.load(open("b/config.json"))["dtype"] == "float32"


def test_resume_at_the_end_of_an_epoch(start):
    """The next epoch's order follows although no state of the loader is saved."""
    assert start("--out=straight", "--save-every=1", "--steps=30", "--eval-every=30") == 0
    rows = rows_of("straight")
    tokens = train.prepare("story.txt", "bytes", progress=False)[1]
    loader = train.Loader(tokens.train, 8, 2, 3, 1337)
    end = loader.epoch_steps
    assert 2 < end < 28 and len(rows) == 31
    for step in (end - 1, end, end + 1):
        assert start(f"--resume=straight/step-{step:08d}", "--steps=30", "--eval-every=30",
                     f"--out=from{step}") == 0
        assert_equal_runs("straight", f"from{step}")


def test_resume_takes_over_settings(start, capsys):
    """Stored settings are defaults; what may change does; what may not is named; done is done."""
    assert start("--out=a", "--weight-decay=0.3", "--steps=4") == 0
    assert xtrain.exit_code(train.main, ["--resume=a", "--steps=6"]) == 0      # --data too
    settings = json.load(open("a/settings.json"))
    assert settings["weight_decay"] == 0.3 and settings["dim"] == 16 and settings["steps"] == 6
    assert [r["step"] for r in rows_of("a") if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert len(os.listdir("cache")) == 1                # the stored tokenizer found its tokens
    capsys.readouterr()
    assert start("--resume=a", "--steps=6") == 0 and "already" in capsys.readouterr().out
    for flags in (["--dim=32"], ["--seed=1"], ["--tokenizer=bpe:300"], ["--no-qk-norm"],
                  ["--preset=v1"], ["--vocab-size=300"]):
        assert start("--resume=a", "--steps=9", *flags) == 2
        assert flags[0].split("=")[0].replace("--no-", "--") in capsys.readouterr().err
    open("story.txt", "a").write("One more fox.\n")
    assert start("--resume=a", "--steps=9") == 2
    assert "--data" in capsys.readouterr().err and rows_of("a")[-1]["step"] == 6


def test_resume_of_an_older_checkpoint_keeps_the_later_one(start):
    """Nothing is lost when a run is taken up before its end, and the later one is out of the way.
    """
    assert start("--out=a", "--save-every=1", "--steps=6") == 0
    assert start("--resume=a/step-00000003", "--steps=4") == 0
    assert list(xtrain.checkpoints("a")) == [1, 2, 3, 4]
    assert os.path.exists("a/.later-step-00000006/model.safetensors")
    assert rows_of("a")[-1]["step"] == 4
    assert json.loads(open("a/.later-metrics.jsonl").readlines()[-1])["step"] == 6


def test_one_process_a_folder(start, tmp_path, capsys):
    """A second process that would write into the same run is refused, and spoils nothing."""
    process = spawn(tmp_path, "--out=a", "--steps=100000", "--eval-every=100000")
    wait_for_step(tmp_path/"a", 5, process)
    assert start("--out=a") == 2 and "another process" in capsys.readouterr().err
    process.terminate()
    assert process.wait(timeout=60) == 143 and xtrain.checkpoints("a")


def test_other_peoples_files_stay(start, tmp_path):
    """A run folder may have other things in it; what a killed run left is taken away."""
    for name in (".venv3.11", ".notes.1", ".step-00000001.77", "notes.dying"):
        (tmp_path/"here"/name).mkdir(parents=True)
    assert start("--out=here", "--steps=2") == 0
    left = set(os.listdir("here"))
    assert {".venv3.11", ".notes.1", "notes.dying"} <= left and ".step-00000001.77" not in left


def test_text_may_lie_beside_runs(start, tmp_path):
    """--data of a folder that holds runs takes none of their files for text."""
    (tmp_path/"here").mkdir()
    (tmp_path/"here"/"a.txt").write_text(STORY)
    for out in ("here/a", "here/b"):
        assert start("--data=here", f"--out={out}", "--steps=2") == 0
    digests = {json.load(open(f"here/{run}/step-00000002/state.json"))["data"] for run in "ab"}
    assert len(digests) == 1


@pytest.mark.parametrize("junk", [b"{}\n", b"7\n", b"\xff\xfe\n", b'{"step": 9'])
def test_odd_lines_in_metrics(start, junk):
    """What is no row of metrics is left out when a run goes on; rows around it stay."""
    assert start("--out=a", "--steps=3") == 0
    rows = rows_of("a")
    with open("a/metrics.jsonl", "r+b") as f:
        lines = f.read().splitlines(keepends=True)
        f.seek(0)
        f.write(b"".join(lines[:1] + [junk if junk.endswith(b"\n") else b""] + lines[1:] + [junk]))
    assert start("--resume=a", "--steps=5") == 0
    assert rows_of("a")[:len(rows)] == rows and rows_of("a")[-1]["step"] == 5


def test_begun_again(start, tmp_path):
    """A run that was killed before its first checkpoint holds nothing: its folder is free."""
    process = spawn(tmp_path, "--out=a", "--steps=100000", "--eval-every=100000")
    wait_for_step(tmp_path/"a", 5, process)
    process.kill()
    process.wait()
    assert start("--out=a", "--steps=2") == 0 and rows_of("a")[-1]["step"] == 2


def test_nobody_reads(start, tmp_path):
    """A run whose reader has gone trains on, and a signal still saves."""
    process = spawn(tmp_path, "--out=a", "--steps=100000", "--eval-every=100000")
    process.stdout.close()
    process.stderr.close()
    wait_for_step(tmp_path/"a", 50, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130 and xtrain.checkpoints("a")


def test_best_goes_along(start):
    """A run resumed into another folder has the best checkpoint there too."""
    assert start("--out=a", "--steps=2", "--eval-every=2") == 0
    assert start("--resume=a", "--out=b", "--steps=6", "--lr=3", "--warmup=0", "--keep=1") == 0
    assert json.load(open("b/best.json"))["step"] == 2 and list(xtrain.checkpoints("b")) == [2, 6]


def test_linked_checkpoint(start, tmp_path):
    """A checkpoint that was moved and linked back: pruning takes the link, not the files."""
    assert start("--out=a", "--steps=2", "--save-every=1") == 0
    os.rename("a/step-00000001", "moved")
    os.symlink(tmp_path/"moved", "a/step-00000001")
    assert start("--resume=a", "--steps=6", "--save-every=1", "--keep=1") == 0
    assert not os.path.lexists("a/step-00000001") and os.path.exists("moved/state.json")


def test_longer_sequences(start):
    """--seq beyond what the model had: config.json says so."""
    assert start("--out=a", "--steps=1") == 0
    flags = ["--data=story.txt", "--steps=1", "--init-from=a", "--out=b", "--seq=40"]
    assert xtrain.exit_code(train.main, flags) == 0
    assert json.load(open("b/step-00000001/config.json"))["max_position_embeddings"] == 40


def test_patience_is_new_after_a_resume(start):
    """A run that patience stopped goes on when it is told to."""
    flags = ["--lr=3", "--grad-clip=1000", "--eval-every=2", "--patience=2", "--warmup=0"]
    assert start("--out=a", "--steps=100", *flags) == 0
    first = rows_of("a")[-1]["step"]
    assert first < 100 and start("--resume=a", "--steps=100", *flags) == 0
    assert rows_of("a")[-1]["step"] >= first + 4


def test_divergence_in_evaluation(start, capsys):
    """Weights that are finite and useless: code 3 from the evaluation, not a refusal."""
    assert start("--out=a", "--steps=30", "--eval-every=1", "--warmup=0", "--lr=1e38") == 3
    assert capsys.readouterr().err.count("\n") == 1


def damage(path, how):
    """Cut a file in half, flip one bit in its middle, or delete it."""
    data = bytearray(open(path, "rb").read())
    data[len(data)//2] ^= 1
    if how == "gone":
        os.remove(path)
    else:
        open(path, "wb").write(data if how == "flipped" else data[:len(data)//2])


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json",
                                  "config.json", "tokenizer.json"])
def test_resume_refuses_damage(start, capsys, name, how):
    """One line that names the file; the run's own files stay as they were."""
    assert start("--out=a", "--steps=2") == 0
    before = open("a/metrics.jsonl").read()
    damage(f"a/step-00000002/{name}", how)
    capsys.readouterr()
    assert start("--resume=a", "--steps=3") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and (name in error or how == "gone"), error
    assert open("a/metrics.jsonl").read() == before


def spawn(folder, *flags, **environment):
    """train.py as a process of its own, in `folder`."""
    script = os.path.join(os.path.dirname(os.path.abspath(train.__file__)), "train.py")
    command = [sys.executable, script, "--data=story.txt", *SHORT_RUN, *flags]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def wait_for_step(run, step, process):
    """Return once metrics.jsonl has reached a step."""
    for _ in range(3000):
        rows = train.read_metrics(os.path.join(run, "metrics.jsonl"))
        if rows and rows[-1]["step"] >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_at_any_moment(start, tmp_path, number):
    """A signal saves and ends with its code, a kill loses what came after the last checkpoint; both
    go on to the bits of the uninterrupted run."""
    flags = ["--steps=400", "--eval-every=150", "--save-every=40", "--keep=2"]
    assert start("--out=straight", *flags) == 0
    process = spawn(tmp_path, "--out=a", *flags)
    wait_for_step(tmp_path/"a", 61, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), err
    last = list(xtrain.checkpoints("a"))[-1]
    assert last < 400 and (last % 40 == 0 or number != signal.SIGKILL)
    assert start("--resume=a", *flags) == 0
    rows = rows_of("a")
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 401))
    assert_equal_runs("straight", "a")


@pytest.mark.slow
@pytest.mark.skipif("XTRAIN_SLOW" not in os.environ, reason="XTRAIN_SLOW=1 kills for minutes")
def test_thirty_kills(start, tmp_path):
    """A run that saves every step, killed 30 times at random moments (mostly within a save): its
    newest checkpoint always goes on, and the end has the bits of the uninterrupted run."""
    flags = ["--steps=2400", "--eval-every=100", "--save-every=1", "--keep=3"]
    assert start("--out=straight", *flags) == 0
    rng, kills = np.random.default_rng(1), 0
    while kills < 30:
        last = max(xtrain.checkpoints("a"), default=0)
        process = spawn(tmp_path, *(["--resume=a"] if last else ["--out=a"]), *flags)
        time.sleep(rng.uniform(0.5, 1.6) if last else 3)
        if process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"ended by itself after {kills} kills: {out[-300:]} {err}")
        process.kill()
        out, err = process.communicate()
        assert not err, err
        kills += 1
        logged = [int(n) for n in re.findall(rb"^step +(\d+)/", out, re.M)]
        assert not logged or logged[0] == last + 1, (last, logged[:3])
        print(f"kill {kills}: from {last}, logged {logged[:1]} to {logged[-1:]}, newest checkpoint "
              f"{max(xtrain.checkpoints('a'), default=0)}")
    assert start("--resume=a", *flags) == 0
    assert_equal_runs("straight", "a")
    assert not [name for name in os.listdir("a") if name.startswith(".")]   # nothing half-written


def test_what_a_run_leaves(start, capsys):
    """Files, metrics, the newest and the best checkpoint, the next command, tokens = speed · time.
    """
    assert start("--save-every=1", "--keep=2", "--lr=0.02", "--steps=10") == 0
    out, run = capsys.readouterr().out, "runs/laptop-1"
    best = json.load(open(f"{run}/best.json"))
    rows = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
    training, evaluation = ([r for r in rows if key in r] for key in ("loss", "val_loss"))
    assert [list(r) for r in training] == [["step", "loss", "grad_norm", "lr", "tok_s"]]*10
    assert [list(r) for r in evaluation] == [["step", "val_loss", "val_bpb"]]*2
    assert best["val_loss"] == min(r["val_loss"] for r in evaluation)
    assert list(xtrain.checkpoints(run)) == sorted({9, 10, best["step"]})
    assert not [name for name in os.listdir(run) if name.startswith(".")]
    tokens, seconds, speed = re.search(
        r"trained on ([\d,]+) tokens in ([\d.]+) s: ([\d,]+) tok/s", out).groups()
    assert int(tokens.replace(",", "")) == 10*2*3*8
    # the three figures are rounded as they are printed
    assert abs(480/float(speed.replace(",", "")) - float(seconds)) <= 0.06
    assert abs(sum(48/r["tok_s"] for r in training) - float(seconds)) <= 0.06
    assert f"sample.py --model {run}" in out and f"--resume {run}" in out
    assert start("--steps=1") == 0 and os.path.isdir("runs/laptop-2")


def test_logged_loss_is_the_mean_over_the_batch(start):
    """The first logged loss is that of the fresh model on the loader's first batch."""
    assert start("--out=a", "--steps=1", "--dropout=0", "--lr=1e-9") == 0
    tokenizer, tokens = train.prepare("story.txt", "bytes", progress=False)
    micros, _ = train.Loader(tokens.train, 8, 6, 1, 1337).step(1)
    folder = "a/step-00000001"
    model = xtrain.load_pretrained(folder, dtype=xtrain.run_dtype(folder))
    assert abs(model.loss(*micros[0][:2]).item() - rows_of("a")[0]["loss"]) < 1e-5


def test_checkpoint_cleans_up_after_a_full_disk(start, monkeypatch, capsys):
    """Exit 4, one line, earlier checkpoints untouched, nothing half-written."""
    assert start("--out=a", "--steps=2") == 0

    def full(arrays, path):
        raise OSError(errno.ENOSPC, "No space left on device", path)
    monkeypatch.setattr(xtrain, "save_arrays", full)
    capsys.readouterr()
    assert start("--resume=a", "--steps=4") == 4
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "No space left" in error and "a/" in error
    assert [n for n in os.listdir("a") if "step" in n] == ["step-00000002"]
    assert xtrain.load_state("a/step-00000002")["step"] == 2


def test_divergence_stops_with_code_3(start, capsys):
    """A loss or norm that is not finite: the step, what to try, and the good checkpoint stays."""
    assert start("--out=a", "--steps=3") == 0
    capsys.readouterr()
    assert start("--resume=a", "--steps=60", "--lr=1e30", "--warmup=0", "--save-every=1000",
                 "--eval-every=1000") == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--lr" in error and "a/step-00000003" in error
    assert all(math.isfinite(v) for row in rows_of("a") for v in row.values())
    assert xtrain.load_state("a/step-00000003")["step"] == 3


def test_config_file(start, tmp_path):
    """A TOML file sets what flags set, is checked as they are, and flags win."""
    (tmp_path/"c.toml").write_text("lr = 0.01\nweight-decay = 0.25\nqk_norm = false\nsteps = 3\n")
    assert xtrain.exit_code(train.main, ["--data=story.txt", "--config=c.toml", *SHORT_RUN[:-1],
                                         "--lr=0.02", "--out=a"]) == 0
    s = json.load(open("a/settings.json"))
    assert (s["lr"], s["weight_decay"], s["qk_norm"], s["steps"]) == (0.02, 0.25, False, 3)


def test_overfit_patience_minutes(start, capsys):
    """--overfit learns its one batch; --patience and --max-minutes stop early, saved."""
    assert start("--out=a", "--overfit", "--steps=250", "--lr=0.02", "--dropout=0",
                 "--eval-every=250") == 0
    losses = [r["loss"] for r in rows_of("a") if "loss" in r]
    assert losses[0] > 5 and losses[-1] < 0.2
    assert start("--out=b", "--steps=400", "--lr=0.02", "--dropout=0", "--eval-every=4",
                 "--patience=2") == 0
    evaluations = [r["val_loss"] for r in rows_of("b") if "val_loss" in r]
    assert len(evaluations) < 100 and min(evaluations) == evaluations[-3]
    capsys.readouterr()
    assert start("--out=c", "--steps=100000", "--max-minutes=0.01", "--save-every=100000",
                 "--eval-every=100000", "--log-every=100000") == 0
    last, = xtrain.checkpoints("c")
    assert 0 < last < 100000 and "--max-minutes" in capsys.readouterr().out


def test_init_from(start, capsys):
    """A new run from the weights of a checkpoint: its sizes, its tokenizer, step 1."""
    assert start("--out=a", "--steps=4") == 0
    weights = xtrain.load_pretrained("a/step-00000004").parameters()
    flags = ["--data=story.txt", "--init-from=a/step-00000004", "--seq=8", "--steps=1",
             "--lr=1e-12", "--out=b", "--weight-decay=0"]
    assert xtrain.exit_code(train.main, flags) == 0
    after = xtrain.load_pretrained("b/step-00000001").parameters()
    for name, p in weights.items():
        assert_close(after[name].numpy(), p.numpy(), 1e-6, name)
    assert json.load(open("b/settings.json"))["tokenizer"] == "bytes"
    capsys.readouterr()
    assert xtrain.exit_code(train.main, [*flags, "--out=c", "--dim=32"]) == 2
    assert "--dim 32" in capsys.readouterr().err and not os.path.exists("c")


@pytest.mark.parity
@pytest.mark.parametrize("spec", ["bpe:600", "gpt2", "bytes"])
def test_checkpoint_in_transformers(start, spec):
    """transformers opens a checkpoint, tokenizer included, and continues ten prompts with the same
    48 tokens."""
    torch, transformers = reference()
    vocabulary_for_tests(spec)                  # skips where GPT-2's is not to be had
    # an order of words to learn, so that greedy text is not one letter for ever; and other words,
    # for 600 ids
    words = " ".join("abcdefghijklmnopqrstuvwxyz"[i] + str(i*i) for i in range(26)) + "\n"
    open("story.txt", "w").write(words*400 + awkward_text(8000, seed=5))
    assert start("--out=a", f"--tokenizer={spec}", "--steps=60", "--lr=0.02", "--dim=32",
                 "--seq=32", "--batch=4", "--eval-every=60", "--log-every=60", "--dropout=0") == 0
    folder, = xtrain.checkpoints("a").values()
    tokenizer, ours = xtrain.Tokenizer.load(folder), xtrain.load_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    auto, said = transformers.AutoTokenizer.from_pretrained(folder), set()
    for i in range(10):
        prompt = words[5*i:8*i + 5]
        ids = tokenizer.encode(prompt)
        given = auto(prompt, return_tensors="pt")
        assert given["input_ids"][0].tolist() == ids
        out = theirs.generate(**given, max_new_tokens=48, do_sample=False)[0].tolist()
        mine = list(xtrain.generate(ours, ids, 48, 0, stop=tokenizer.eot))
        # theirs ends with end of text, ours before it
        assert out[len(ids):] == mine + [tokenizer.eot]*(len(mine) < 48), (i, prompt)
        said |= set(mine)
    assert len(said) > 10


def test_bench_ends_in_json(start, capsys):
    """The last line is JSON with the contract's keys, and its figures belong together."""
    assert start("--bench=3", "--vocab-size=300") == 0
    r = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"tok_s", "ms", "best_ms", "GFLOP_s", "mfu", "peak_GB", "params_M", "loss", "device",
            "dtype"} <= set(r)
    assert abs(r["tok_s"]*r["ms"]/1e3/48 - 1) < 1e-3 and r["best_ms"] <= r["ms"]
    assert math.isfinite(r["loss"]) and 0 < r["mfu"] < 1 and not os.path.exists("runs")


@pytest.mark.parametrize("environment", [{"LC_ALL": "C"}, {"TERM": "dumb", "LC_ALL": "C.UTF-8"}])
def test_output_to_a_pipe_is_clean(start, tmp_path, environment):
    """No control characters but line ends, nothing on stderr, text that decodes."""
    out, err = spawn(tmp_path, "--out=a", "--steps=6", **environment).communicate(timeout=60)
    text = out.decode()
    assert not err and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), (text, err)
    assert "held-out loss" in text and "step  6/" not in text and "step 6/6" in text


BAD_INPUT = [       # flags, what the one line must contain
    ("--learning-rate=1", "unknown flag --learning-rate: did you mean --lr?"),
    ("--head=2", "did you mean --heads?"),
    ("stray", "stray"), ("--lr=abc", "--lr abc: wants"), ("--lr=nan", "--lr"), ("--lr=inf", "--lr"),
    ("--lr=-1", "--lr -1.0: must be > 0"), ("--dim=-4", "--dim -4"), ("--dim=0", "--dim 0"),
    ("--layers=0", "--layers"), ("--seq=0", "--seq"), ("--batch=0", "--batch"),
    ("--steps=0", "--steps"), ("--accum-steps=-1", "--accum-steps"), ("--steps=1.5", "--steps"),
    ("--heads=3", "heads=3"), ("--heads=4 --kv-heads=3", "kv_heads=3"),
    ("--kv-heads=4", "kv_heads=4"), ("--head-dim=7", "head_dim=7"), ("--dropout=1", "--dropout"),
    ("--dropout=nan", "--dropout"), ("--preset=huge", "--preset"), ("--seed=-1", "--seed"),
    ("--vocab-size=100", "--vocab-size 100: bytes has 257"), ("--device=tpu", "--device"),
    ("--dtype=fp8", "--dtype"), ("--beta2=1", "--beta2"), ("--grad-clip=0", "--grad-clip"),
    ("--tokenizer=bpe:10", "--tokenizer"), ("--tokenizer=word", "--tokenizer"),
    ("--data=nowhere.txt", "nowhere.txt: no such"), ("--data=empty.txt", "empty"),
    ("--data=one.txt", "too few"), ("--data=short.txt --seq=512", "512.* 513 .*20"),
    ("--data=latin.txt", "latin.txt: not utf-8 at byte 3"),
    ("--data=bad.jsonl", "bad.jsonl: line 2"), ("--data=folder", "folder"),
    ("--data=/proc/self/mem", "cannot be read|empty"), ("--resume=nothing", "--resume nothing"),
    ("--resume=folder", "no checkpoint"), ("--out=story.txt", "--out story.txt"),
    ("--out=/proc/xtrain", "--out /proc/xtrain"), ("--out=taken", "--resume taken"),
    ("--config=nowhere.toml", "nowhere.toml"), ("--config=bad.toml", "bad.toml"),
    ("--config=odd.toml", "odd.toml: unknown setting heats: did you mean heads"),
    ("--config=type.toml", "lr must be a number"), ("--config=twice.toml", "twice"),
    ("--config=self.toml", "unknown setting config"),
    ("--out=foreign", "settings.json that no run"),
    ("--out=", "--out is empty"), ("--init-from=", "--init-from is empty"),
    ("--bench=2 --out=x", "--bench and --out"),
    ("--init-from=taken --preset=v1", "--init-from and --preset"),
    ("--init-from=folder", "folder"), ("--threads=0", "--threads"), ("--bench=0", "--bench"),
    ("--encoding=utf-99", "--encoding"),
    ("--batch=9999999999", "--batch"), ("--layers=100000000", "--layers"),
    *[("--device=cuda", "--device cuda: ")]*(len(DEVICES) == 1), ("--threads=0", "must be >= 1"),
    ("--config=far.toml", "unknown setting qqq: --help"),
]


@pytest.mark.parametrize("flags, wanted", BAD_INPUT, ids=[flags for flags, _ in BAD_INPUT])
def test_bad_input(start, tmp_path, capsys, flags, wanted):
    """One line on stderr that names what is wrong, exit code 2, and no run folder left behind."""
    files = {"empty.txt": b"", "one.txt": b"a", "short.txt": b"a short story, no more",
             "latin.txt": b"caf\xe9", "bad.jsonl": b'{"text": "good"}\n{"text": \n',
             "bad.toml": b"lr = = 2", "odd.toml": b"heats = 2", "far.toml": b"qqq = 2",
             "type.toml": b"lr = true", "twice.toml": b"kv-heads = 1\nkv_heads = 2",
             "self.toml": b"config = 'bad.toml'",
             "taken/step-00000001/config.json": b"", "taken/step-00000001/model.safetensors": b"",
             "foreign/settings.json": b"{}"}
    for folder in ("folder", "foreign", "taken/step-00000001"):
        (tmp_path/folder).mkdir(parents=True)
    for name, data in files.items():
        (tmp_path/name).write_bytes(data)
    before = sorted(os.listdir())
    assert start(*flags.split()) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(r"xtrain: error: .+\n", captured.err), captured.err
    assert re.search(wanted, captured.err), captured.err
    assert not os.path.exists("runs") or not os.listdir("runs")
    assert sorted(set(os.listdir()) - {"cache", "runs"}) == before


def test_wrong_debug_level():
    """XTRAIN_DEBUG takes 1 and 2; anything else is one line."""
    run = subprocess.run([sys.executable, "sample.py"], capture_output=True, text=True,
                         env=os.environ | {"XTRAIN_DEBUG": "yes"},
                         cwd=os.path.dirname(os.path.abspath(tensor.__file__)))
    assert run.returncode == 2 and re.fullmatch(r"xtrain: error: XTRAIN_DEBUG=yes.*\n", run.stderr)


def test_checkpoint_of_another_program(start, tmp_path, capsys):
    """What the library saved, and a state with settings of another version, cannot be resumed."""
    assert start("--out=a", "--steps=1") == 0
    folder, = xtrain.checkpoints("a").values()
    model = xtrain.load_pretrained(folder)
    other = xtrain.save_checkpoint("b", model, xtrain.AdamW(model), None, {"step": 1})
    state = xtrain.load_state(folder)
    state["settings"]["colour"] = 32
    state["seal"] = xtrain.seal(state)
    xtrain.write_json(f"{folder}/state.json", state)
    capsys.readouterr()
    for source, what in (("b", "no 'settings'"), (other, "no 'settings'"), ("a", "'colour'")):
        assert start(f"--resume={source}", "--steps=3") == 2
        err = capsys.readouterr().err
        assert re.fullmatch(r"xtrain: error: --resume .+--init-from.+\n", err) and what in err, err


def test_newest_checkpoint_is_not_whole(start, capsys):
    """A run goes on from the newest whole checkpoint, says so, and keeps the other aside."""
    assert start("--out=a", "--steps=4", "--save-every=1") == 0
    os.remove("a/step-00000004/config.json")
    assert start("--resume=a", "--steps=5") == 0
    out = capsys.readouterr().out
    assert "step-00000004 is not whole" in out and "step-00000004 is later" in out
    assert os.path.exists("a/.later-step-00000004/model.safetensors")


def test_schedules():
    """Up in a line, then a half cosine, a late line or nothing; the last step has min_lr."""
    for name, f in xtrain.SCHEDULES.items():
        assert abs(f(5, 100, 1.0, 0.1, 10) - 0.5) < 1e-12 and f(10, 100, 1.0, 0.1, 10) == 1.0, name
        assert abs(f(100, 100, 1.0, 0.1, 10) - (1.0 if name == "constant" else 0.1)) < 1e-12, name
    assert abs(xtrain.cosine(55, 100, 1.0, 0.1, 10) - 0.55) < 1e-12
    assert xtrain.wsd(80, 100, 1.0, 0.1, 10) == 1.0 and abs(xtrain.wsd(90, 100, 1.0) - 0.5) < 1e-12


def test_readme_names_every_flag():
    """The README's table of settings is complete."""
    text = open(os.path.join(os.path.dirname(os.path.abspath(train.__file__)), "README.md")).read()
    for f in dataclasses.fields(train.Settings):
        assert f"`{xtrain.flag(f.name)}" in text, f.name
