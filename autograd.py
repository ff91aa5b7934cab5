"""autograd: the tape.  An operation is a forward and a backward over rows of the table.

How it reads, top to bottom:

1. The tape        nodes, sinks, and the walk back from a loss
2. Switches        `no_grad`, and `recompute`, which forgets activations and runs a function again
3. Primitives      arithmetic with broadcasting, views, products, activations, reductions
4. Model           the coarse operations that the decoder is made of
5. Operators       + - * / @ [...] and methods, put on `Tensor`

An operation calls rows on its inputs and ends in `record(out, inputs, backward)`.  The function
`backward(g, *sinks)` gets the gradient of `out` and for each input a `Sink`, or None where none is
wanted.  A sink takes a gradient in one of two ways, so that nothing is cleared or copied in vain:

    sink.give(d)                   d is a gradient that the caller owns: kept if first, added if not
    sink.fill(lambda out, acc: …)  for kernels that add themselves: write to `out`, add if acc

Lifetime.  A node holds the sinks of its inputs and, in the closure, what its backward needs, but
never its own output; the walk drops both as it passes.  So there are no reference cycles, memory
returns to the pool the moment it is free, and a second walk over the same graph is an error.  What
costs little to make again is not kept at all: an operation may say how (`again`), and one that
needs its output later asks for it through `saved`.  Nodes are numbered as they are made: going
through them from the highest number down visits every consumer before its producer.
Nothing here knows one device from another: `tensor` says what differs.
"""
import builtins
import contextlib
import functools
import heapq
import itertools
import math
import threading

import numpy as np

import tensor as T
from tensor import KEEP_BELOW, Dropout, Tensor

# ---- 1. The tape ---------------------------------------------------------------------------------

_numbers = itertools.count()


class Switch(threading.local):
    """Whether this thread records: one that samples does not stop another from training."""
    on = True


_recording = Switch()


class Node:
    """One recorded operation: where the gradients of its inputs go, the way back, how to make its
    outputs again, and the gradients of its outputs so far.

    `shared` outputs are slices that tile one storage (q, k and v); their gradients are such slices
    too, so that the backward can treat them as the one tensor they came from.
    """
    # sinks: per input, None where no gradient is wanted.  layouts: shape, strides, offset and dtype
    # per output.  grads: per output, None until a consumer has given one.  base: what shared
    # gradients lie in.  again: None, or a function that gives all outputs once more.
    __slots__ = ("number", "sinks", "backward", "again", "layouts", "device", "shared", "base",
                 "lent", "grads")

    def __init__(self, sinks, backward, again, outs, shared):
        self.number, self.sinks, self.backward = next(_numbers), sinks, backward
        self.again = again
        self.layouts = [(t.shape, t.strides, t.offset, t.dtype) for t in outs]
        self.device = outs[0].device
        self.shared = shared
        self.base, self.lent, self.grads = None, set(), [None]*len(outs)

    def room(self, i):
        """The place of output i's gradient, to write in; a new tensor if another has it already."""
        taken = i in self.lent
        self.lent.add(i)
        return self.elsewhere(i) if taken else self.place(i)

    def elsewhere(self, i):
        """A new tensor like output i."""
        shape, _, _, dtype = self.layouts[i]
        return T.empty(shape, dtype, self.device)

    def place(self, i):
        """Where the gradient of output i lies: a new tensor, or its slice of the shared one."""
        shape, strides, offset, dtype = self.layouts[i]
        if not self.shared:
            return self.elsewhere(i)
        if self.base is None:
            # The slices tile their storage without gaps, from its start: their offsets hold here
            self.base = T.empty((builtins.sum(math.prod(at[0]) for at in self.layouts),), dtype,
                                self.device)
        return self.base.view(shape, strides, offset)

    def gradients(self):
        """The gradients by output; slices that nobody wrote are zero."""
        if self.shared:
            for i, g in enumerate(self.grads):
                if g is None:
                    self.grads[i] = self.place(i)
                    zero = T.zeros((), self.grads[i].dtype, self.device)
                    T.copy(T.expand(zero, self.grads[i].shape, "zero"), self.grads[i])
        return self.grads


class Sink:
    """Where the gradient of one input goes: its node's slot, or the `grad` of a leaf.

    Consumers add in the order of the walk, which is fixed, so the sum has the same bits every time.
    A sink does not hold the input's elements, unless it is a leaf.
    """
    __slots__ = ("leaf", "node", "index")

    def __init__(self, t):
        self.leaf, self.node, self.index = t if t.node is None else None, t.node, t.index

    @property
    def held(self):
        """The gradient so far; None if nobody has given any."""
        return self.leaf.grad if self.node is None else self.node.grads[self.index]

    @property
    def dtype(self):
        """That of the input, and of its gradient."""
        return self.leaf.dtype if self.node is None else self.node.layouts[self.index][3]

    def keep(self, d):
        """Put d itself there, in place of what was held."""
        if self.node is None:
            self.leaf.grad = d
        else:
            self.node.grads[self.index] = d

    def room(self):
        """Memory to write a gradient to, for kernels that overwrite; then hand it to `give`."""
        if self.node is None:
            return T.empty(self.leaf.shape, self.leaf.dtype, self.leaf.device)
        if self.held is not None:       # writing to its place would lose it
            return self.node.elsewhere(self.index)
        return self.node.room(self.index)

    def give(self, d):
        """Take over d, which the caller owns and will not touch again; add it to what is held."""
        held, node = self.held, self.node
        if d.dtype != self.dtype:
            d = T.cast(d, self.dtype)
        if held is not None:
            T.accumulate(held, d)
        elif node is None or not node.shared:
            self.keep(T.packed(d))              # contiguous, so that `fill` can add to it
        elif node.base is not None and d.storage is node.base.storage:
            self.keep(d)                        # written in place, through `room`
        else:
            self.keep(T.copy(d, node.place(self.index)))

    def lend(self, d):
        """Like `give` for a gradient that has been given to another sink or lives on."""
        if self.held is None:
            d = T.copy(d)
        self.give(d)

    def fill(self, write):
        """Let write(out, acc) put the gradient straight where it belongs, adding if acc."""
        # Kernels want contiguous memory.  For a slice of a shared gradient they write to memory of
        # its own, which `give` then copies or adds.
        held = self.held
        if held is not None and held.contiguous:
            write(held, True)
        else:
            out = self.room()
            out = out if out.contiguous else T.empty(out.shape, out.dtype, out.device)
            write(out, False)
            self.give(out)


def adding(sink, write):
    """write(place) with what the sink holds, or zeros, for kernels that only add; None for no sink.
    """
    if sink:
        sink.fill(lambda out, acc: write(out if acc else T.fill(out, 0.0)))
    else:
        write(None)


def tracked(t):
    """Does a gradient flow to this tensor?"""
    return t is not None and (t.requires_grad or t.node is not None)


def saved(*tensors):
    """A function that gives these tensors to a backward, as a tuple.

    Outputs of an operation that can make them again are not held: it will run once for all of them.
    They are if they are small (tensor.KEEP_BELOW), or if someone has written to them since (their
    memory is new, and starts at version 0).
    """
    node = tensors[0].node
    size = builtins.sum(t.size*T.ITEMSIZE[t.dtype] for t in tensors)
    if (node is None or node.again is None or size < KEEP_BELOW[node.device]
            or any(t.node is not node or t.version for t in tensors)):
        return lambda: tensors
    again, picks = node.again, [t.index for t in tensors]

    def made():
        outs = again()
        return tuple(outs[i] for i in picks)

    return made


def unless_written(again, reads):
    """`again`, or an error if one of the tensors that it reads has been written to since now."""
    versions = [t.version for t in reads]

    def checked():
        if [t.version for t in reads] != versions:
            raise RuntimeError("backward: what this graph kept was overwritten since the forward, "
                               "by set_, an optimizer, or a walk that freed it: compute it again")
        return again()

    return checked


def record(out, inputs, backward, always=False, shared=False, again=None, reads=()):
    """Put `out`, a tensor or a tuple of them, on the tape, if anything asks for a gradient.

    again() gives all outputs once more, bit by bit, from the tensors `reads` (or None); worth it
    where that is cheap (see `saved`).
    What is returned is a new view that knows the node.  The `out` of the row does not, so that the
    closure of a backward may hold it without a cycle.
    """
    if not _recording.on:
        return out
    sinks = [Sink(t) if tracked(t) else None for t in inputs]
    if not always and not any(sinks):
        return out
    outs = out if isinstance(out, tuple) else (out,)
    again = again and unless_written(again, [t for t in reads if t is not None])
    node, fresh = Node(sinks, backward, again, outs, shared), []
    for i, t in enumerate(outs):
        t = t.detach()
        t.node, t.index = node, i
        fresh.append(t)
    return tuple(fresh) if isinstance(out, tuple) else fresh[0]


def backward(out, gradient=None):
    """Add the gradient of `out` to the `grad` of every leaf with requires_grad that it depends on.

    `gradient` (array or Tensor of out's shape) is where to start; by default 1 for one element.
    """
    if out.node is None:
        raise RuntimeError("backward: nothing that this tensor came from requires a gradient")
    if gradient is None:
        T.need(out.size == 1, "backward", "only one element needs no `gradient`, not", out)
        gradient = T.fill(T.empty(out.shape, out.dtype, out.device), 1.0)
    else:
        gradient = T.copy(lift(gradient, out))
        T.need(gradient.shape == out.shape, "backward", "gradient and tensor differ", gradient, out)
    walk([(out, gradient)])


def walk(starts):
    """Go back from (tensor, its gradient or None) pairs, the node recorded last always first."""
    queue, queued = [], set()

    def enqueue(node):
        if node is not None and node not in queued:
            if node.backward is None:
                raise RuntimeError("backward: this graph was walked and freed; compute it again")
            queued.add(node)
            heapq.heappush(queue, (-node.number, node))

    for out, gradient in starts:
        if gradient is not None:
            enqueue(out.node)
            Sink(out).give(gradient)
    while queue:
        node = heapq.heappop(queue)[1]
        sinks, step, grads = node.sinks, node.backward, node.gradients()
        node.sinks, node.backward, node.again = (), None, None
        node.grads, node.base = [None]*len(grads), None
        step(grads[0] if len(grads) == 1 else tuple(grads), *sinks)
        for sink in sinks:
            if sink and sink.node is not None and sink.held is not None:
                enqueue(sink.node)
        del sinks, step, grads              # or its buffers would outlive the next node


# ---- 2. Switches ---------------------------------------------------------------------------------

@contextlib.contextmanager
def recording(on):
    """Context in which the tape is on or off; it nests, and an exception restores it as well."""
    before, _recording.on = _recording.on, on
    try:
        yield
    finally:
        _recording.on = before


def no_grad():
    """Context in which nothing is recorded: evaluation, sampling."""
    return recording(False)


def recompute(fn, *inputs):
    """fn(*inputs), keeping nothing on the way: the backward runs it again (Chen et al., 2016).

    fn must be a pure function of `inputs` and of leaves; it draws the same dropout masks the second
    time (they are a function of their position), so every bit is that of the plain call.  No input
    need be tracked, for fn reaches its weights by itself.
    """
    with no_grad():
        out = fn(*inputs)

    def backward(g, *sinks):
        # A tape of its own that ends at fresh leaves in place of the inputs, and at the weights
        fresh, before = [t if t is None else t.detach() for t in inputs], []
        for t, sink in zip(fresh, sinks):
            before.append(sink.held if sink else None)
            if sink:                # go on adding to what is held: the order of the plain call
                t.requires_grad, t.grad = True, before[-1]
        with recording(True):
            again = fn(*fresh)
        again = again if isinstance(again, tuple) else (again,)
        walk(list(zip(again, g if len(again) > 1 else (g,))))
        # What was held has been added to in place already
        for t, sink, held in zip(fresh, sinks, before):
            if sink and t.grad is not held:
                sink.give(t.grad)

    return record(out, inputs, backward, always=True)


# ---- 3. Primitives -------------------------------------------------------------------------------
# In the formulas dx is the gradient of the loss by x, and g (or dY) that by the operation's result.

def lift(value, like=None):
    """A Tensor as it is; a number or array as a new f32 one, where `like` (if a Tensor) lies."""
    if isinstance(value, Tensor):
        return value
    value = np.asarray(value)
    if value.dtype.kind not in "biuf":
        raise TypeError(f"an operand is a tensor, a number or an array of numbers, not {value!r}")
    return T.tensor(value.astype(np.float32), like.device if isinstance(like, Tensor) else None)


def unbroadcast(g, shape):
    """Sum a gradient over the axes that broadcasting added to `shape`, or stretched.

    An element that was read n times gets the sum of n gradients.  Returns g itself if none was.
    """
    lead = g.ndim - len(shape)
    axes = tuple(i for i in range(g.ndim) if i < lead or shape[i - lead] == 1 != g.shape[i])
    return T.sum(g, axes).view(shape) if axes else g


def add(a, b):
    """a + b, broadcasting; da = db = g, which only one of the two can take over."""
    a, b = lift(a, b), lift(b, a)

    def backward(g, sa, sb):
        if sa:
            sa.give(unbroadcast(g, a.shape))
        if sb:
            sb.lend(unbroadcast(g, b.shape))

    return record(T.add(a, b), (a, b), backward)


def sub(a, b):
    """a - b, broadcasting; da = g, db = -g."""
    a, b = lift(a, b), lift(b, a)

    def backward(g, sa, sb):
        if sb:
            sb.give(T.scale(unbroadcast(g, b.shape), -1.0))
        if sa:
            sa.give(unbroadcast(g, a.shape))

    return record(T.sub(a, b), (a, b), backward)


def mul(a, b):
    """a * b, broadcasting; da = g b, db = g a."""
    a, b = lift(a, b), lift(b, a)

    def backward(g, sa, sb):
        if sa:
            sa.give(unbroadcast(T.mul(g, b), a.shape))
        if sb:
            sb.give(unbroadcast(T.mul(g, a), b.shape))

    return record(T.mul(a, b), (a, b), backward)


def div(a, b):
    """a / b, broadcasting; da = g/b, db = -g a/b^2 = -da a/b."""
    a, b = lift(a, b), lift(b, a)

    def backward(g, sa, sb):
        da = T.div(g, b)
        if sb:
            sb.give(unbroadcast(T.scale(T.div(T.mul(da, a), b), -1.0), b.shape))
        if sa:
            sa.give(unbroadcast(da, a.shape))

    return record(T.div(a, b), (a, b), backward)


def neg(x):
    """-x."""
    return mul(x, -1.0)


def matmul(a, b):
    """a [..., m, k] @ b [..., k, n], batch axes broadcast; dA = dC B^T, dB = A^T dC."""
    def product(sink, x, y, shape):
        # Without batch axes to sum over, the product itself writes to the gradient or adds to it
        if np.broadcast_shapes(x.shape[:-2], y.shape[:-2]) == shape[:-2]:
            sink.fill(lambda out, acc: T.matmul(x, y, out, acc))
        else:
            sink.give(unbroadcast(T.matmul(x, y), shape))

    def backward(g, sa, sb):
        g = T.packed(g)
        if sa:
            product(sa, g, T.transposed(b), a.shape)
        if sb:
            product(sb, T.transposed(a), g, b.shape)

    return record(T.matmul(a, b), (a, b), backward)


def unary(forward, backward_row):
    """An elementwise function as an operation, from its row and that of dx = g f'(x)."""
    def operation(x):
        return record(forward(x), (x,), lambda g, sink: sink.give(backward_row(g, x)))
    operation.__name__, operation.__doc__ = forward.name, forward.doc
    return operation


silu = unary(T.silu, T.silu_backward)
gelu = unary(T.gelu, T.gelu_backward)
exp = unary(T.exp, T.exp_backward)


def axes_of(x, axis, name):
    """An axis argument (None, int or tuple) as a sorted tuple of non-negative axes."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    for a in axes:
        T.need(-x.ndim <= a < x.ndim, name, f"there is no axis {a} in", x)
    return tuple(sorted({a % x.ndim for a in axes}))


def sum(x, axis=None, keepdims=False):
    """The sum over an axis, a tuple of axes, or all of them; dx is g repeated along them."""
    axes = axes_of(x, axis, "sum")
    kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))   # as with keepdims
    out = T.sum(x, axes)
    out = T.cast(out, x.dtype).view(kept) if keepdims else out

    def backward(g, sink):
        sink.give(T.copy(T.expand(T.packed(g).view(kept), x.shape, "sum")))

    return record(out, (x,), backward)


def mean(x, axis=None, keepdims=False):
    """The mean over an axis, a tuple of axes, or all of them."""
    T.need(x.size, "mean", "no elements in", x)
    total = sum(x, axis, keepdims)
    return mul(total, total.size/x.size)


def softmax(x):
    """y = e^x / sum e^x over the last axis; dx = y (g - sum g y), from y alone."""
    y = T.softmax(x)
    return record(y, (x,), lambda g, sink: sink.give(T.softmax_backward(g, y)))


def cross_entropy(logits, targets):
    """The mean over targets >= 0 of logsumexp(row) - row[target].

    logits [..., classes], targets i64 [...]; targets below 0 are not counted.  The gradient,
    (softmax - [class = target])/count, comes along with the loss; g, one number, scales it."""
    targets = targets if isinstance(targets, Tensor) else T.tensor(targets, logits.device)
    loss, dlogits = T.cross_entropy(logits, targets)
    return record(loss, (logits, None), lambda g, sink, _: sink.give(T.mul(dlogits, g)))


def reshape(x, *shape):
    """The same elements in another shape, one size may be -1; copied only if not contiguous."""
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        shape = tuple(x.size//max(rest, 1) if n == -1 else n for n in shape)
    T.need(math.prod(shape) == x.size, "reshape", f"cannot become {shape}", x)

    def backward(g, sink):
        sink.give(T.packed(g).view(x.shape))

    return record(T.packed(x).view(shape), (x,), backward)


def transpose(x, *axes):
    """The axes in another order, as a view; by default the last two swapped."""
    axes = axes or (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    fit = all(-x.ndim <= a < x.ndim for a in axes) and len({a % x.ndim for a in axes}) == x.ndim
    T.need(fit and len(axes) == x.ndim, "transpose", f"axes {axes} do not fit", x)
    axes = tuple(a % x.ndim for a in axes)
    out = x.view([x.shape[a] for a in axes], tuple(x.strides[a] for a in axes))

    def backward(g, sink):
        back = [axes.index(i) for i in range(x.ndim)]
        sink.give(g.view([g.shape[a] for a in back], tuple(g.strides[a] for a in back)))

    return record(out, (x,), backward)


def slice(x, key):
    """x[key] for integers, slices and ... : a view; dx is g at these places and 0 elsewhere."""
    out = sliced(x, key)

    def backward(g, sink):
        def write(out, acc):
            T.accumulate(sliced(out if acc else T.fill(out, 0.0), key), g)
        sink.fill(write)

    return record(out, (x,), backward)


def sliced(x, key):
    """Basic indexing as a view, without the tape."""
    key, everything = key if isinstance(key, tuple) else (key,), builtins.slice(None)
    for at, k in enumerate(key):
        if k is Ellipsis:
            key = key[:at] + (everything,)*(x.ndim - len(key) + 1) + key[at + 1:]
            break
    T.need(len(key) <= x.ndim, "slice", f"{len(key)} indices are too many for", x)
    shape, strides, offset = [], [], x.offset
    key = key + (everything,)*(x.ndim - len(key))
    for n, stride, k in zip(x.shape, x.strides, key):
        if isinstance(k, builtins.slice):
            start, stop, step = k.indices(n)
            shape.append(len(range(start, stop, step)))
            strides.append(stride*step)
            offset += start*stride if shape[-1] else 0
        else:
            if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
                raise TypeError(f"slice: an index is a whole number or a slice, not {k!r}")
            if not -n <= k < n:
                raise IndexError(f"slice: index {k} lies outside an axis of {n} in {x.shape}")
            offset += k % n*stride
    return x.view(shape, tuple(strides), offset)


def repeat_kv(x, groups):
    """[batch, seq, kv_heads, head_dim] -> [batch, seq, kv_heads*groups, head_dim].

    Query head h reads KV head h // groups, so the copies of a head are neighbours; dx is their sum.
    """
    T.need(x.ndim == 4, "repeat_kv", "wants [batch, seq, kv_heads, head_dim], got", x)
    B, S, H, D = x.shape
    wide = x.view((B, S, H, groups, D), (*x.strides[:3], 0, x.strides[3]))

    def backward(g, sink):
        sink.give(T.sum(T.packed(g).view((B, S, H, groups, D)), (3,)))

    return record(T.copy(wide).view((B, S, H*groups, D)), (x,), backward)


def dropout(x, how):
    """Dropout of x [batch, seq, dim] with a `Dropout`; None is the identity.

    y = mask x/(1 - p), so dx = mask g/(1 - p): the same row, which draws the same mask again.
    """
    if how is None or how.p == 0:
        return x
    return record(T.dropout(x, how), (x,), lambda g, sink: sink.give(T.dropout(g, how)))


# ---- 4. Model ------------------------------------------------------------------------------------
# Weight gradients go through `fill` straight into the parameter's own gradient: the product adds to
# it, and micro-steps need no buffer of their own.

def embed(tokens, w, order=None, dtype="f32"):
    """w[tokens] in the dtype; `order`, the stable argsort of the tokens, is computed if not given.

    dw[t] is the sum of g over the positions of t, taken in that order: one order, so one result.
    """
    def backward(g, _, sink, __):
        sorted_ids = T.argsort(tokens) if order is None else order
        adding(sink, lambda dw: T.embed_backward(g, tokens, sorted_ids, dw))

    return record(T.embed(tokens, w, dtype), (None, w, None), backward)


def add_rmsnorm(x, residual, w, eps=1e-6):
    """RMSNorm of x -> y; with a residual (total, y), total = x + residual being what is normed.

    total and y both go on to consumers, so both bring gradients; with t = dy w and r = rstd,
    dx = dresidual = dtotal + r t - total r^3 mean(t total),  dw = sum over rows of dy total r.
    y is not kept: it is made again from the total.
    """
    total, y, rstd = T.add_rmsnorm(x, residual, w, eps)
    total, first = total.detach(), 1 if residual is None else 0     # the first of the outputs

    def backward(g, sx, sr, sw):
        dtotal, dy = (None, g) if first else g
        dy = T.zeros(total.shape, total.dtype, total.device) if dy is None else dy
        one = None if sx and sr else sx or sr   # the only one that wants it: no copy is needed

        def run(out, acc, dw):
            T.add_rmsnorm_backward(dy, dtotal, total, w, rstd, out, acc, dw)

        # One pass of the kernel makes dx and dw, hence one `fill` inside the other
        def with_weight(dw):
            if one:
                one.fill(lambda out, acc: run(out, acc, dw))
                return
            both = T.empty(total.shape, total.dtype, total.device)
            run(both, False, dw)
            if sx:
                sr.lend(both)
                sx.give(both)

        adding(sw, with_weight)

    return record(y if first else (total, y), (x, residual, w), backward,
                  again=lambda: T.add_rmsnorm(total, None, w, eps)[first:2], reads=(total, w))


def linear(x, w, residual=None, dropout=None, dtype=None):
    """residual + dropout(x w^T) in the dtype, by default x's: x [..., in], w [out, in].

    dX = dY W, dW = dY^T X.
    """
    how = dropout if dropout is not None and dropout.p > 0 else None
    keep = saved(x)

    def backward(g, sx, sw, sr):
        d = T.flat2(T.packed(T.dropout(g, how) if how else g))
        product_gradients(d, w, keep, sx, sw)
        if sr:
            sr.give(g)      # last: sx may be the same, and would add to the g that it reads

    return record(T.linear(x, w, residual, how, dtype), (x, w, residual), backward)


def weight_gradient(sink, d, x):
    """dW (+)= d^T x for d [rows, out] and x [..., in], straight into the weight's gradient."""
    sink.fill(lambda out, acc: T.matmul(T.transposed(d), T.flat2(T.packed(x)), out, acc))


def product_gradients(d, w, keep, sx, sw):
    """Those of x w^T from d, its own: dX = d w, dW = d^T x, for x from keep()."""
    if sw:
        weight_gradient(sw, d, *keep())
    if sx:
        sx.fill(lambda out, acc: T.matmul(d, w, T.flat2(out), acc))


def qk_norm_rope(qkv, cos, sin, heads, kv_heads, q_weight=None, k_weight=None, eps=1e-6):
    """RMSNorm per head (if weights are given) and RoPE of a fused projection -> q, k, v.

    qkv [batch, seq, (heads + 2 kv_heads)*head_dim]; q, k, v [batch, seq, its heads, head_dim] are
    slices of one tensor, and so are their gradients: the backward runs in place on that one.
    RoPE's is the rotation back, that of the norm follows; v's gradient is in place already.  The
    three are not kept but made again from qkv."""
    def run():
        out, rstd = T.qk_norm_rope(qkv, cos, sin, heads, kv_heads, q_weight, k_weight, eps)
        (B, S, _, D), strides, start = out.shape, out.strides, out.offset
        return [out.view((B, S, n, D), strides, start + first*D) for first, n in
                ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))], rstd

    (q, k, v), rstd = run()
    shape = (*q.shape[:2], heads + 2*kv_heads, q.shape[3])

    def backward(g, sink, sq, sk):
        fused = g[0].view(shape, offset=0)      # q's slice is the first: this is all three
        # One pass for all three, so both places must be known before it
        adding(sq, lambda dq: adding(sk, lambda dk: T.qk_norm_rope_backward(
            fused, qkv, cos, sin, heads, kv_heads, q_weight, k_weight, rstd, dq, dk)))
        if sink:
            sink.give(fused.view(qkv.shape))

    return record((q, k, v), (qkv, q_weight, k_weight), backward, shared=True,
                  again=lambda: run()[0], reads=(qkv, cos, sin, q_weight, k_weight))


def attention(q, k, v, flash=True, scale=None):
    """Causal attention of q [B, Sq, heads, head_dim] over k, v [B, Sk, kv_heads, head_dim], like q.

    flash: in tiles, nothing of size Sq x Sk is kept.  Otherwise, and where a device has no tiles,
    composed of products and a softmax: the readable reference, and the oracle of the tests.
    With p the weights:
    dv = p^T g,  ds = p (g v^T - sum over dim of g*out),  dq = scale ds k,  dk = scale ds^T q.
    p is computed again from lse, the logsumexp of each query's scores.
    """
    scale = q.shape[-1]**-0.5 if scale is None else scale
    if not (flash and T.has_bf16(q.device)):
        return composed_attention(q, k, v, scale)
    out, lse = T.attention(q, k, v, scale)
    keep = saved(q, k, v)

    def backward(g, *sinks):
        inputs = keep()
        # The kernel writes by stride: into the slices of one gradient where q, k and v are slices
        rooms = [s.room() if s else T.empty(t.shape, t.dtype, t.device)
                 for s, t in zip(sinks, inputs)]
        T.attention_backward(g, *inputs, out, lse, scale, *rooms)
        for s, d in zip(sinks, rooms):
            if s:
                s.give(d)

    return record(out, (q, k, v), backward)


def composed_attention(q, k, v, scale):
    """softmax(scale q k^T + causal mask) v from primitives, with the KV heads repeated."""
    T.check_heads("attention", q, k, v)
    groups, (Sq, Sk) = q.shape[2]//k.shape[2], (q.shape[1], k.shape[1])
    q, k, v = (transpose(t, 0, 2, 1, 3) for t in (q, repeat_kv(k, groups), repeat_kv(v, groups)))
    scores = add(mul(matmul(q, transpose(k)), scale), future(Sq, Sk, q.dtype, q.device))
    return transpose(matmul(softmax(scores), v), 0, 2, 1, 3)


@functools.cache
def future(Sq, Sk, dtype, device):
    """What hides the keys after each query: 0 and -inf, [Sq, Sk].

    Query i stands at position i + Sk - Sq and sees the keys up to there.
    """
    mask = np.triu(np.full((Sq, Sk), -np.inf, np.float32), Sk - Sq + 1)
    return T.cast(T.tensor(mask, device), dtype)


def gate_up_swiglu(x, w):
    """silu(x gate^T) * (x up^T) for w [2*ffn, in] = gate rows, then up rows.

    With gu = x w^T saved, the row turns it into d(gu) in place; then dX = d(gu) w, dW = d(gu)^T x.
    The result is not kept: it is made again from gu.
    """
    h, gu = T.gate_up_swiglu(x, w)
    keep = saved(x)

    def backward(g, sx, sw):
        product_gradients(T.flat2(T.swiglu_backward(g, gu)[0]), w, keep, sx, sw)

    return record(h, (x, w), backward, again=lambda: (T.swiglu(gu),), reads=(gu,))


def mlp(x, gate_up, down, residual=None, dropout=None):
    """linear(gate_up_swiglu(x, gate_up), down, residual, dropout): a SwiGLU block in one.

    Bit by bit the two, but the pass that makes d(gu) of dh makes h as well, in its place: for xl512
    a pass over gate and up less, 3 % of a step in bf16.
    """
    h, gu = T.gate_up_swiglu(x, gate_up)
    keep, how = saved(x), dropout if dropout is not None and dropout.p > 0 else None

    def backward(g, sx, s_up, s_down, sr):
        d = T.flat2(T.packed(T.dropout(g, how) if how else g))
        if sx or s_up:
            dgu, h = (T.flat2(t) for t in T.swiglu_backward(T.matmul(d, down), T.flat2(gu)))
        elif s_down:
            h = T.flat2(T.swiglu(gu))
        if s_down:
            weight_gradient(s_down, d, h)
        if sr:
            sr.give(g)      # nothing reads g from here on; before sx, as the two operations do
        if sx or s_up:
            product_gradients(dgu, gate_up, keep, sx, s_up)

    return record(T.linear(h, down, residual, how), (x, gate_up, down, residual), backward)


def head_loss(x, w, targets, denominator=None, vocab=None, now=False):
    """Cross-entropy of x [..., dim] under the head w [rows, dim], of which `vocab` rows count.

    The logits never exist as a whole.  The sum over targets >= 0, divided by `denominator` (by
    default their number).  By chunks of rows, dlogits = (softmax - [class = target])/denominator,
    dx = dlogits w, dw += dlogits^T x.  The backward computes each chunk of logits again; with `now`
    the gradients are computed along with the loss, which saves that product but is only right if
    backward() follows, from exactly this loss: `Step` does.
    """
    vocab = w.shape[0] if vocab is None else vocab
    if denominator is None:
        denominator = T.count(targets).item()
    if not isinstance(denominator, Tensor):
        denominator = max(1, denominator)       # a batch without targets has loss 0
    x2, flat = T.flat2(T.packed(x)), T.packed(targets).view((targets.size,))

    def gradients(weight, sx, sw):
        # The row writes both gradients on the way, so both places must be known before it is called
        def with_dw(dw):
            def run(dx, acc):
                pair = None if dx is None else (T.flat2(dx), acc)
                loss.append(T.head_loss(x2, w, flat, denominator, vocab, weight, pair, dw))
            sx.fill(run) if sx else run(None, False)
        loss = []
        sw.fill(lambda dw, acc: with_dw((dw, acc))) if sw else with_dw(None)
        return loss[0]

    if now and _recording.on:
        # dx waits in the grad of a leaf, dw is added where it belongs at once: g is taken to be 1
        ahead = x.detach()
        loss = gradients(1.0, Sink(ahead) if tracked(x) else None, Sink(w) if tracked(w) else None)
        return record(loss, (x, w), lambda g, sx, sw: sx and sx.give(ahead.grad))
    loss = T.head_loss(x2, w, flat, denominator, vocab)
    return record(loss, (x, w), lambda g, sx, sw: gradients(g.item(), sx, sw))


# ---- 5. Operators --------------------------------------------------------------------------------

def attach():
    """Give `Tensor` its operators and methods: they live here because they record."""
    Tensor.__add__, Tensor.__radd__ = add, lambda a, b: add(b, a)
    Tensor.__sub__, Tensor.__rsub__ = sub, lambda a, b: sub(b, a)
    Tensor.__mul__, Tensor.__rmul__ = mul, lambda a, b: mul(b, a)
    Tensor.__truediv__, Tensor.__rtruediv__ = div, lambda a, b: div(b, a)
    Tensor.__neg__, Tensor.__matmul__, Tensor.__getitem__ = neg, matmul, slice
    for operation in (backward, sum, mean, reshape, transpose, softmax, exp, silu, gelu, matmul):
        setattr(Tensor, operation.__name__, operation)


attach()
