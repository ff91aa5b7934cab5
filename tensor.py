"""tensor: arrays, the memory under them, and one table of operations for every device.

How it reads, top to bottom:

1. The CPU core       which build of fast_cpu this machine can run, how many threads it gets
2. Tensor             storage + offset + shape + strides + dtype + device; NumPy in and out
3. The table          `@row` puts an operation on record: name, signature, dtypes, a benchmark shape
4. Primitives         copies, arithmetic with broadcasting, products, activations, reductions
5. The model's rows   embedding, norms, linear, RoPE, attention, SwiGLU, head with loss
6. Training's rows    block sums, clipping, AdamW, Newton-Schulz, casts, dropout masks

A row is a plain function on tensors that knows nothing of gradients; `autograd.py` builds the tape
from rows, and `silu_backward` is a row like any other.  Rows allocate their results, except where
an argument is called `out`; acc=True then means "add to what is there".  Rows accept any strides
and copy where a kernel wants contiguous memory; the model's own calls never need that copy.

Adding an operation: a kernel in fast_cpu.pyx, a row here, a forward + backward in autograd.py, a
line in test_all.py.  README.md does it once, step by step.
"""
import array
import atexit
import builtins
import ctypes
import functools
import importlib.machinery
import importlib.util
import inspect
import math
import os
import sys
import sysconfig
import time
import typing

import numpy as np

# ---- 1. The CPU core -----------------------------------------------------------------------------

# Name of a build: the flags of /proc/cpuinfo that it was compiled for and needs, in rising order of
# speed. setup.py reads this literal as text and compiles fast_cpu.pyx once for each entry.
INSTRUCTION_SETS = {
    "baseline": (),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "avx512": ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512bf16": ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq",
                   "avx512_bf16"),
    "amx": ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq",
            "avx512_bf16", "amx_tile", "amx_bf16"),
}


def cpu_flags():
    """This processor's instruction sets by their names in /proc/cpuinfo; empty off x86 Linux."""
    try:
        with open("/proc/cpuinfo") as f:
            lines = [line for line in f if line.startswith("flags")]
    except OSError:
        return set()
    return set(lines[0].split(":", 1)[1].split()) if lines else set()


def runnable(name):
    """Can this machine run the build `name`?  AMX also needs the kernel's leave for tile data."""
    if not set(INSTRUCTION_SETS[name]) <= cpu_flags():
        return False
    if name == "amx":
        request_permission, tile_data = 0x1023, 18
        return ctypes.CDLL(None).syscall(158, request_permission, tile_data) == 0
    return True


def builds():
    """{name: file} of the compiled cores that lie beside this file, in rising order."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "isa")
    file = "fast_cpu" + sysconfig.get_config_var("EXT_SUFFIX")
    paths = {name: os.path.join(folder, name, file) for name in INSTRUCTION_SETS}
    return {name: path for name, path in paths.items() if os.path.exists(path)}


def load_core():
    """(name, module) of the fastest build that runs here, or of the one that XTRAIN_ISA names."""
    # How long an idle team spins before it sleeps: 2,000 rounds, about 40 us, cover the gaps
    # between operations.  Longer is no faster, and beside other work it costs a factor (LOG.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    there, forced = builds(), os.environ.get("XTRAIN_ISA")
    if not there:
        raise ImportError("xtrain's CPU core is not built: run 'pip install -e .' in its folder")
    if forced and (forced not in there or not runnable(forced)):
        usable = ", ".join(name for name in there if runnable(name))
        raise ImportError(f"XTRAIN_ISA={forced}: not built or not runnable here; usable: {usable}")
    name = forced or [name for name in there if runnable(name)][-1]
    loader = importlib.machinery.ExtensionFileLoader("fast_cpu", there[name])
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("fast_cpu", loader))
    loader.exec_module(module)
    return name, module


def cgroup_cores():
    """The processor quota of this process's control group, in cores; inf without one."""
    old = "/sys/fs/cgroup/cpu/cpu.cfs_"
    for files in (["/sys/fs/cgroup/cpu.max"], [old + "quota_us", old + "period_us"]):
        try:
            quota, period = " ".join(open(f).read() for f in files).split()
            if quota not in ("max", "-1"):
                return int(quota)/int(period)
        except (OSError, ValueError):
            continue
    return math.inf


def affinity(process=0):
    """Logical processors that a process (0: this one) may run on."""
    ask = getattr(os, "sched_getaffinity", lambda pid: set(range(os.cpu_count() or 1)))
    return ask(process)


def physical_cores():
    """Physical cores that this process may use: hyper-threads would only share their FMA units."""
    siblings = set()
    for cpu in affinity():
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                siblings.add(f.read())
        except OSError:
            siblings.add(str(cpu))
    return max(1, int(min(len(siblings), cgroup_cores())))


def ranks_beside():
    """How many processes of one job share this one's cores, by what their launcher has told them.

    A launcher that has bound each to cores of its own may itself run on more than they do.
    """
    sizes = (os.environ.get(name, "") for name in (
        "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"))
    ranks = max(int(size) if size.isdigit() else 1 for size in sizes)
    return 1 if ranks > 1 and affinity(os.getppid()) > affinity() else max(1, ranks)


ISA, core = load_core()
pool_stats, pool_trim = core.pool_stats, core.pool_trim
threads = core.get_threads


def set_threads(n=None):
    """Use n threads; by default OMP_NUM_THREADS, or every physical core, shared with the other
    ranks of a job on this machine.  No result changes."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    mine = max(1, physical_cores()//ranks_beside())
    core.set_threads(n or (int(asked) if asked.isdigit() and int(asked) else mine))


def peak_flops(dtype="f32", rounds=100_000, repeats=5):
    """FLOP/s of multiply-adds in registers on all threads, the best of a few short runs (~20 ms).

    It is measured, since the clock under vector load is written nowhere.  In bf16 it is that of
    what this build multiplies bf16 with.
    """
    def once():
        start = time.perf_counter()
        return core.multiply_adds(rounds, dtype == "bf16")/(time.perf_counter() - start)
    return max(once() for _ in range(repeats))


def bandwidth(elements=1 << 24, repeats=5):
    """Bytes a second that a read and a write of large arrays move on all threads (64 MB each)."""
    x, y = core.Buffer(4*elements), core.Buffer(4*elements)
    core.fill(x.address, 1.0, elements)

    def once():
        start = time.perf_counter()
        core.scale(1.0, x.address, y.address, elements)
        return 8*elements/(time.perf_counter() - start)
    return max(once() for _ in range(repeats))


set_threads()
if hasattr(os, "register_at_fork"):     # a forked child has no team: waiting for it would never end
    os.register_at_fork(after_in_child=lambda: core.set_threads(1))


# ---- 2. Tensor -----------------------------------------------------------------------------------

# NumPy's type and the bytes of each dtype.  bf16 is the upper half of an fp32: what is stored; all
# arithmetic is fp32.
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "f64": np.dtype(np.float64),
          "i64": np.dtype(np.int64), "i32": np.dtype(np.int32), "u8": np.dtype(np.uint8)}
ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class Storage:
    """A piece of memory and its version.

    Every write from outside, or by an optimizer, raises the version: what is derived from a tensor
    (packed weights, bf16 mirrors) remembers which version it was made from.
    """
    # packs: None, or for weights what products keep of them (see packed_weight)
    __slots__ = ("buffer", "address", "device", "version", "packs")

    def __init__(self, nbytes, device):
        if device != "cpu":
            raise ValueError(f"device {device!r}: this build of xtrain computes on 'cpu'")
        self.buffer = core.Buffer(nbytes)
        self.address, self.device, self.version = self.buffer.address, device, 0
        self.packs = None


class Tensor:
    """An n-dimensional view of a storage.

    shape, strides (in elements, 0 repeats) and offset address it; dtype is a key of DTYPES.
    ptr is the address of the first element.
    `requires_grad`, `grad` (a Tensor of the same shape, or None), `node` and `index` belong to
    autograd.py, which also gives this class its operators.
    """
    __slots__ = ("storage", "shape", "strides", "offset", "dtype", "ptr", "requires_grad", "_grad",
                 "node", "index")

    def __init__(self, storage, shape, strides, offset=0, dtype="f32", requires_grad=False):
        self.storage, self.shape, self.strides = storage, shape, strides
        self.offset, self.dtype, self.requires_grad = offset, dtype, requires_grad
        self.ptr = storage.address + offset*ITEMSIZE[dtype]     # a kernel asks more than once
        self._grad = self.node = None
        self.index = 0

    device = property(lambda self: self.storage.device)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    version = property(lambda self: self.storage.version)

    @property
    def grad(self):
        return self._grad

    @grad.setter
    def grad(self, value):
        self._grad = value

    def view(self, shape, strides=None, offset=None):
        """Another view of this storage; by default contiguous and from the same start."""
        shape = tuple(shape)
        strides = contiguous_strides(shape) if strides is None else strides
        offset = self.offset if offset is None else offset
        return Tensor(self.storage, shape, strides, offset, self.dtype)

    def detach(self):
        """The same elements, off the tape."""
        return Tensor(self.storage, self.shape, self.strides, self.offset, self.dtype)

    @property
    def contiguous(self):
        """Is this a gapless row-major array?"""
        return self.strides == contiguous_strides(self.shape)

    def array(self):
        """A NumPy array that shares this tensor's memory (bf16 as its bits, uint16)."""
        dtype = DTYPES[self.dtype]
        return np.ndarray(self.shape, dtype, self.storage.buffer, self.offset*dtype.itemsize,
                          [s*dtype.itemsize for s in self.strides])

    def numpy(self):
        """A NumPy copy; bf16 comes as float32."""
        source = cast(self, "f32") if self.dtype == "bf16" else self
        return source.array().copy()

    def item(self):
        """The one element as a Python number; ValueError if there are more."""
        return self.numpy().item()

    def set_(self, values):
        """Overwrite with an array of exactly this shape: the one way to write from outside."""
        values = np.asarray(values)
        if values.shape != self.shape:
            raise ValueError(f"set_: a tensor of shape {self.shape} cannot take {values.shape}")
        if self.dtype == "bf16":
            values = cast(tensor(values.astype(np.float32)), "bf16").array()
        self.array()[...] = values
        self.storage.version += 1
        return self

    def __len__(self):
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __repr__(self):
        values = np.array2string(self.numpy(), precision=4, threshold=20, edgeitems=3)
        return f"Tensor({values}, shape={self.shape}, {self.dtype}, {self.device})"

    __hash__ = object.__hash__
    __array_ufunc__ = None          # NumPy number or array on the left: ours is the operator


@functools.lru_cache(maxsize=4096)      # a step asks 500 times for a handful of shapes
def contiguous_strides(shape):
    """Row-major strides in elements: (2, 3, 4) -> (12, 4, 1)."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def empty(shape, dtype="f32", device="cpu"):
    """A new contiguous tensor; its contents are undefined."""
    shape = tuple(shape)
    storage = Storage(math.prod(shape)*ITEMSIZE[dtype], device)
    return Tensor(storage, shape, contiguous_strides(shape), dtype=dtype)


def zeros(shape, dtype="f32", device="cpu"):
    """A new tensor of zeros."""
    out = empty(shape, dtype, device)
    out.array()[...] = 0
    return out


def tensor(values, device="cpu", requires_grad=False):
    """Copy an array, list or number into a new tensor.

    Floats become f32, integers and booleans i64 (int32 stays i32, uint8 u8); TypeError for others.
    """
    values = np.asarray(values)
    if values.dtype.kind in "iub":
        dtype = {np.dtype(np.int32): "i32", np.dtype(np.uint8): "u8"}.get(values.dtype, "i64")
    elif values.dtype.kind == "f":
        dtype = "f32"
    else:
        raise TypeError(f"tensor: an array of {values.dtype} is neither numbers nor booleans")
    out = empty(values.shape, dtype, device)
    out.array()[...] = values
    out.requires_grad = requires_grad
    return out


def need(true, name, why, *tensors):
    """Raise a ValueError that names the operation, what is wrong and the shapes, unless `true`."""
    if not true:
        shapes = " and ".join(str(t.shape) for t in tensors if t is not None)
        raise ValueError(f"{name}: {why}: {shapes}")


# ---- 3. The table --------------------------------------------------------------------------------

# Parameters that are not of a row's own dtypes, whatever the row.  Weights, their gradients and
# what rows keep of their sums are f32 also where activations are bf16.
FIXED = {"tokens": ("i64",), "targets": ("i64",), "order": ("i64",), "blocks": ("f64",),
         "hyper": ("f64",), "clip": ("f64",)} | dict.fromkeys(
             ("w", "dw", "cos", "sin", "q_weight", "k_weight", "dq_weight", "dk_weight", "rstd",
              "lse"), ("f32",))
FLOATS = ("f32", "bf16")


class Row:
    """One operation: a call checks dtypes and runs the implementation of the tensors' device.

    A row whose dtypes are FLOATS takes activations of both; if it `rounds`, bf16 is computed in f32
    and the result rounded, as suits primitives.
    """

    def __init__(self, cpu, dtypes, bench, flops, rounds):
        self.flops, self.rounds = flops, rounds
        self.name, self.doc, self.signature = cpu.__name__, cpu.__doc__, inspect.signature(cpu)
        self.cpu, self.cuda, self.dtypes, self.bench = cpu, None, dtypes, bench
        self.names, self.__doc__ = tuple(self.signature.parameters), cpu.__doc__
        self.wants = [FIXED.get(name, dtypes) for name in self.names]
        self.plain = all("f32" in wants for wants in self.wants)

    def __call__(self, *args, **kwargs):
        if self.plain and not kwargs and not DEBUG:
            for value in args:
                if value.__class__ is Tensor and value.dtype != "f32":
                    break
            else:                       # as nearly always: half of the time a check by name takes
                return self.cpu(*args)
        for value, wants in zip(args, self.wants):
            if isinstance(value, Tensor) and value.dtype not in wants:
                self.refuse(value, wants)
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.dtype not in FIXED.get(name, self.dtypes):
                self.refuse(value, FIXED.get(name, self.dtypes))
        run = self.rounded if self.rounds else self.cpu
        return timed(self, run, args, kwargs) if DEBUG else run(*args, **kwargs)

    def rounded(self, *args, **kwargs):
        """The row in f32; bf16 if no f32 but single numbers went in (what comes of those is f32).
        """
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        dtypes = {t.dtype for t in tensors if t.dtype in FLOATS and t.ndim}
        wide = lambda t: cast(t, "f32") if isinstance(t, Tensor) and t.dtype == "bf16" else t
        out = self.cpu(*map(wide, args), **{name: wide(t) for name, t in kwargs.items()})
        back = lambda t: cast(t, "bf16") if dtypes == {"bf16"} and t.ndim else t
        return tuple(map(back, out)) if isinstance(out, tuple) else back(out)

    def refuse(self, value, wants):
        """A tensor of another dtype than the row computes with."""
        raise TypeError(f"{self.name}: wants {wants[0]}, got {value.dtype} {value.shape}")


TABLE = {}


def row(bench, dtypes=("f32",), flops=None, rounds=False):
    """Decorator: enter a function into the table; bench() returns arguments of a typical size.

    flops(*args) counts the multiply-adds, times two, of a call, where it is products that cost.
    rounds: see Row.
    """
    def enter(cpu):
        TABLE[cpu.__name__] = Row(cpu, dtypes, bench, flops, rounds)
        return TABLE[cpu.__name__]
    return enter


# XTRAIN_DEBUG=2 prints a line for each row and shapes when the program ends, XTRAIN_DEBUG=1 one for
# each row.  Bytes are those of a call's tensors, in and out, once each; the limit is the larger of
# FLOPs over peak_flops() (of bf16, if a tensor is) and bytes over bandwidth(), so what stays in a
# cache can exceed 100 %, as do rows that touch only a part of a table (embed).
if os.environ.get("XTRAIN_DEBUG", "0") not in ("", "0", "1", "2"):
    raise ImportError(f"XTRAIN_DEBUG={os.environ['XTRAIN_DEBUG']}: wants 1 (a line an operation) "
                      "or 2 (and shape)")
DEBUG = int(os.environ.get("XTRAIN_DEBUG") or 0)


class Spent:
    """Calls, seconds (without those of rows inside), FLOPs, bytes and dtype of one line."""

    def __init__(self, dtype):
        self.calls, self.seconds, self.flops, self.bytes, self.dtype = 0, 0.0, 0, 0, dtype


SPENT = {}                          # lines by (name, shapes, dtype)
inside = [0.0]                      # seconds of the rows inside each open one


def timed(row, run, args, kwargs):
    """A call of a row, on record."""
    inside.append(0.0)
    start = time.perf_counter()
    out = run(*args, **kwargs)
    seconds = time.perf_counter() - start
    own = seconds - inside.pop()
    inside[-1] += seconds
    tensors = [t for t in (*args, *kwargs.values(), *(out if isinstance(out, tuple) else (out,)))
               if isinstance(t, Tensor)]
    shapes = " ".join("x".join(map(str, t.shape)) for t in args if isinstance(t, Tensor))
    dtype = "bf16" if any(t.dtype == "bf16" for t in tensors) else "f32"
    line = SPENT.setdefault((row.name, shapes if DEBUG > 1 else "", dtype), Spent(dtype))
    line.calls, line.seconds = line.calls + 1, line.seconds + own
    line.flops += row.flops(*args) if row.flops else 0
    line.bytes += builtins.sum({t.ptr: t.size*DTYPES[t.dtype].itemsize for t in tensors}.values())
    return out


def report():
    """Print what was recorded, the most expensive first, against the limits measured now."""
    peak = {dtype: peak_flops(dtype) for dtype in sorted({s.dtype for s in SPENT.values()})}
    peaks = " and ".join(f"{p/1e9:.0f} GFLOP/s ({dtype})" for dtype, p in peak.items())
    stream = bandwidth()
    print(f"xtrain: {sum_of('calls')} calls, {sum_of('seconds'):.3f} s; limits {peaks}, "
          f"{stream/1e9:.1f} GB/s on {threads()} threads ({ISA})\n"
          f"{'operation':24}{'calls':>7}{'ms':>10}{'%':>6}{'GFLOP/s':>9}{'GB/s':>7}{'limit':>7}"
          "  dtype and shapes", file=sys.stderr)
    for (name, shapes, _), s in sorted(SPENT.items(), key=lambda item: -item[1].seconds):
        seconds = max(s.seconds, 1e-9)
        limit = max(s.flops/peak[s.dtype], s.bytes/stream)/seconds
        print(f"{name:24}{s.calls:7}{1e3*seconds:10.2f}{100*seconds/sum_of('seconds'):6.1f}"
              f"{s.flops/seconds/1e9:9.1f}{s.bytes/seconds/1e9:7.1f}{limit:7.0%}  {s.dtype:4} "
              f"{shapes}", file=sys.stderr)


def sum_of(field):
    """The total of a field over all lines."""
    return builtins.sum(getattr(s, field) for s in SPENT.values())


if DEBUG:
    atexit.register(report)


def sample(*shape):
    """Random values of a shape, for the benchmark arguments of rows."""
    return tensor(np.random.default_rng(0).standard_normal(shape, np.float32))


def ids(*shape, below=1000):
    """Random token ids of a shape, for the benchmark arguments of rows."""
    return tensor(np.random.default_rng(0).integers(0, below, shape))


def address(t):
    """The address of a tensor, or 0 for None."""
    return 0 if t is None else t.ptr


def longs(*numbers):
    """(array, address) of int64 numbers for a kernel; the array must outlive the call."""
    packed = array.array("q", numbers)
    return packed, packed.buffer_info()[0]


def packed(t):
    """The tensor itself if contiguous, else a contiguous copy."""
    return t if t.contiguous else copy(t)


def flat2(t):
    """A contiguous [..., n] as [rows, n]."""
    return t.view((math.prod(t.shape[:-1]), t.shape[-1]))


# ---- 4. Primitives -------------------------------------------------------------------------------

MAX_AXES = 8                        # of a strided walk in the core


@row(lambda: (sample(1024, 4096).view((4096, 1024), (1, 4096)),), dtypes=tuple(DTYPES))
def copy(x, out=None):
    """x in a new contiguous tensor, or in `out` (of the same shape, any strides)."""
    out = empty(x.shape, x.dtype, x.device) if out is None else out
    need(out.shape == x.shape, "copy", "shapes differ", x, out)
    need(x.ndim <= MAX_AXES, "copy", f"more than {MAX_AXES} axes", x)
    shape, sa = longs(*x.shape)
    xs, xa = longs(*x.strides)
    os_, oa = longs(*out.strides)
    core.copy_strided(x.ptr, out.ptr, x.ndim, sa, xa, oa, DTYPES[x.dtype].itemsize)
    return out


def expand(x, shape, name):
    """x broadcast to a shape by NumPy's rules, as a view with zero strides."""
    lead = len(shape) - x.ndim
    need(lead >= 0, name, f"cannot be broadcast to {tuple(shape)}", x)
    strides = [0]*lead
    for n, size, stride in zip(shape[lead:], x.shape, x.strides):
        need(size in (1, n), name, f"cannot be broadcast to {tuple(shape)}", x)
        strides.append(stride if size == n else 0)
    return x.view(shape, tuple(strides))


def broadcast(name, a, b, skip=0):
    """The common shape of two tensors without their last `skip` axes; ValueError names both."""
    try:
        return np.broadcast_shapes(a.shape[:a.ndim - skip], b.shape[:b.ndim - skip])
    except ValueError:
        what = "batch axes" if skip else "shapes"
        raise ValueError(f"{name}: {what} do not broadcast: {a.shape} and {b.shape}") from None


def elementwise(name, kind, a, b):
    """a (kind) b with broadcasting, in a new contiguous tensor."""
    shape = broadcast(name, a, b)
    need(len(shape) <= MAX_AXES, name, f"more than {MAX_AXES} axes", a, b)
    a, b, out = expand(a, shape, name), expand(b, shape, name), empty(shape, "f32", a.device)
    dims, da = longs(*shape)
    astrides, aa = longs(*a.strides)
    bstrides, ba = longs(*b.strides)
    core.binary(kind, a.ptr, b.ptr, out.ptr, len(shape), da, aa, ba)
    return out


@row(lambda: (sample(4096, 1024), sample(1024)), FLOATS, rounds=True)
def add(a, b):
    """a + b, broadcasting."""
    return elementwise("add", core.ADD, a, b)


@row(lambda: (sample(4096, 1024), sample(1024)), FLOATS, rounds=True)
def sub(a, b):
    """a - b, broadcasting."""
    return elementwise("sub", core.SUB, a, b)


@row(lambda: (sample(4096, 1024), sample(1024)), FLOATS, rounds=True)
def mul(a, b):
    """a * b, broadcasting."""
    return elementwise("mul", core.MUL, a, b)


@row(lambda: (sample(4096, 1024), sample(1024)), FLOATS, rounds=True)
def div(a, b):
    """a / b, broadcasting."""
    return elementwise("div", core.DIV, a, b)


@row(lambda: (sample(4096, 1024), sample(4096, 1024)), FLOATS)
def accumulate(out, x):
    """out += x, both of one shape and any strides."""
    need(out.shape == x.shape, "accumulate", "shapes differ", out, x)
    x = x if x.dtype == out.dtype else cast(x, out.dtype)
    if out.contiguous:
        x = packed(x)
        core.axpy(1.0, x.ptr, out.ptr, x.size, x.dtype == "bf16")
    else:
        copy(add(out, x), out)
    return out


@row(lambda: (sample(4096, 1024), 2.0), FLOATS, rounds=True)
def scale(x, factor):
    """x * factor for a Python number."""
    x = packed(x)
    out = empty(x.shape, "f32", x.device)
    core.scale(factor, x.ptr, out.ptr, x.size)
    return out


@row(lambda: (sample(4096, 1024), 0.0), FLOATS)
def fill(out, value):
    """Every element of a contiguous tensor := value."""
    need(out.contiguous, "fill", "not contiguous", out)
    if out.dtype == "bf16":
        out.array()[...] = cast(tensor(np.float32(value)), "bf16").array()
    else:
        core.fill(out.ptr, value, out.size)
    return out


def activation(kind, x):
    """f(x) elementwise, f being a kind of the core's unary functions."""
    x = packed(x)
    out = empty(x.shape, "f32", x.device)
    core.unary(kind, x.ptr, out.ptr, x.size)
    return out


def activation_backward(kind, dy, x):
    """dy * f'(x) elementwise."""
    dy, x = packed(dy), packed(x)
    dx = empty(x.shape, "f32", x.device)
    core.unary_backward(kind, x.ptr, dy.ptr, dx.ptr, x.size)
    return dx


@row(lambda: (sample(4096, 1024),), FLOATS, rounds=True)
def silu(x):
    """x * sigmoid(x)."""
    return activation(core.SILU, x)


@row(lambda: (sample(4096, 1024), sample(4096, 1024)), FLOATS, rounds=True)
def silu_backward(dy, x):
    """dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
    return activation_backward(core.SILU, dy, x)


@row(lambda: (sample(4096, 1024),), FLOATS, rounds=True)
def gelu(x):
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016)."""
    return activation(core.GELU, x)


@row(lambda: (sample(4096, 1024), sample(4096, 1024)), FLOATS, rounds=True)
def gelu_backward(dy, x):
    """dy * gelu'(x)."""
    return activation_backward(core.GELU, dy, x)


@row(lambda: (sample(4096, 1024),), FLOATS, rounds=True)
def exp(x):
    """e^x to 2 ulp; 0 below -87.3, inf above 88.7, NaN kept."""
    return activation(core.EXP, x)


@row(lambda: (sample(4096, 1024), sample(4096, 1024)), FLOATS, rounds=True)
def exp_backward(dy, x):
    """dy * e^x."""
    return activation_backward(core.EXP, dy, x)


@row(lambda: (sample(4096, 1024), (1,)), FLOATS, rounds=True)
def sum(x, axes):
    """The sum over a tuple of axes (non-negative, distinct), which disappear."""
    kept = [i for i in range(x.ndim) if i not in axes]
    order = kept + sorted(axes)
    last = packed(x.view([x.shape[i] for i in order], tuple(x.strides[i] for i in order)))
    out = empty([x.shape[i] for i in kept], "f32", x.device)
    core.sum_rows(last.ptr, out.ptr, out.size, x.size//max(out.size, 1))
    return out


@row(lambda: (sample(4096, 1024),), FLOATS, rounds=True)
def softmax(x):
    """Over the last axis, the maximum subtracted."""
    need(x.ndim and x.shape[-1], "softmax", "wants [..., at least one class], got", x)
    x = packed(x)
    out = empty(x.shape, "f32", x.device)
    core.softmax(x.ptr, out.ptr, x.size//x.shape[-1], x.shape[-1])
    return out


@row(lambda: (sample(4096, 1024), softmax(sample(4096, 1024))), FLOATS, rounds=True)
def softmax_backward(dy, y):
    """y * (dy - sum(dy * y)), from the result y."""
    dy, y = packed(dy), packed(y)
    dx = empty(y.shape, "f32", y.device)
    core.softmax_backward(y.ptr, dy.ptr, dx.ptr, y.size//y.shape[-1], y.shape[-1])
    return dx


def operand(t):
    """A matrix view as (tensor, leading dimension, transposed?); copied if it is neither."""
    shape, strides = t.shape, t.strides
    if len(shape) > 2:
        shape, strides = shape[-2:], strides[-2:]
    (rows, cols), (down, along) = shape, strides
    if along == 1 and down >= cols:
        return t, down, False
    if down == 1 and along >= rows:
        return t, along, True
    if along == 1 == rows or down == 1 == cols:         # a single row, or column, at any distance
        return t, max(rows, cols), rows > 1
    return copy(t), cols, False


def starts(t, batch):
    """Where each matrix of a broadcast batch starts, in elements from t.ptr: int64 [items]."""
    wide = expand(t, (*batch, *t.shape[-2:]), "matmul")
    return sum_outer([np.arange(n)*s for n, s in zip(batch, wide.strides)])


def sum_outer(steps):
    """All sums of one entry of each array, the last array fastest: [2, 3 entries] -> 6 sums."""
    at = np.zeros(1, np.int64)
    for step in steps:
        at = np.add.outer(at, step).reshape(-1)
    return at


@row(lambda: (sample(1024, 1024), sample(1024, 1024)),
     FLOATS, lambda a, b, *_: 2*max(a.size*b.shape[-1], b.size*a.shape[-2]))
def matmul(a, b, out=None, acc=False):
    """a [..., m, k] @ b [..., k, n] -> [..., m, n]; batch axes broadcast.

    `out` is a tensor to write to (acc: to add to), with contiguous rows.  Transposed views are read
    in place, so that C = op(A) op(B) also covers a product's gradients: dA = dC B^T, dB = A^T dC.
    If any of the three is bf16, operands that are not are rounded to it; sums are f32.
    """
    left, right = a.shape, b.shape      # looked up once: half of a product of 64^3 is Python
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        need(False, "matmul", "wants [..., m, k] and [..., k, n], got", a, b)
    m, n, k = left[-2], right[-1], left[-1]
    batch = broadcast("matmul", a, b, skip=2) if len(left) + len(right) > 4 else ()
    shape = (*batch, m, n) if batch else (m, n)
    if out is None:
        out = empty(shape, "bf16" if "bf16" in (a.dtype, b.dtype) else "f32", a.device)
    if out.shape != shape or (n > 1 and out.strides[-1] != 1):
        need(False, "matmul", f"the result is {shape} with contiguous rows, not", out)
    (a, lda, ta), (b, ldb, tb), ldc = operand(a), operand(b), out.strides[-2] if m > 1 else n
    if not batch or math.prod(batch) == 1:
        half = 0 if a.dtype == b.dtype == out.dtype == "f32" else halves(a, b, out)
        core.gemm(a.ptr, lda, ta, b.ptr, ldb, tb, out.ptr, ldc, m, n, k, acc,
                  0 if b.storage.packs is None else packed_weight(b, ldb, tb, m, n, k, half), 0, 0,
                  0, 0, 0, 0, 1, 1.0, half)
    else:
        at = np.stack([starts(t, batch) for t in (a, b, out)], 1)
        core.gemm_batch(a.ptr, lda, ta, b.ptr, ldb, tb, out.ptr, ldc, m, n, k, acc, len(at),
                        at.ctypes.data, halves(a, b, out))
    return out


def halves(a, b, c):
    """Which arrays of a product are bf16, as the core's flags; 0 for a product in f32."""
    return ((core.HALF_A if a.dtype == "bf16" else 0) | (core.HALF_B if b.dtype == "bf16" else 0)
            | (core.HALF_C if c.dtype == "bf16" else 0))


def half_weight(w):
    """w in bf16; the copy of a weight is kept until its version changes.

    Products of few rows, a token's, read weights in place: half the bytes are half the time.
    """
    packs, key = w.storage.packs, ("bf16", w.offset, w.shape, w.strides)
    if packs is None:
        return cast(w, "bf16")
    if key not in packs or packs[key][0] != w.version:
        packs[key] = w.version, cast(w, "bf16")
    return packs[key][1]


def packed_weight(b, ldb, tb, m, n, k, half):
    """Address of op(b) [k, n] packed for products, if b is a weight that is used again; else 0.

    A first use packs as it goes.  The second use of a version shows that there are several
    (micro-steps, recompute, chunks of the head, evaluation): from then on the panels are kept until
    the version changes, at the cost of their memory.  No bit depends on it.
    """
    packs = b.storage.packs
    if packs is None or m < 16:
        return 0
    key, version = (b.offset, ldb, tb, n, k, half), b.version
    if key not in packs or packs[key][0] != version:
        packs[key] = version, None
        return 0
    if packs[key][1] is None:
        packs[key] = version, core.Buffer(core.pack_room(n, k, half))
        core.pack_b(b.ptr, ldb, tb, packs[key][1].address, n, k, half)
    return packs[key][1].address


@row(lambda: (sample(4096, 1000), ids(4096)), FLOATS, rounds=True)
def cross_entropy(logits, targets):
    """Mean over targets >= 0 of logsumexp(row) - row[target], 0-d -> (loss, dlogits)."""
    rows, cols = flat2(packed(logits)).shape
    need(targets.size == rows, "cross_entropy", "wants [..., classes] and targets [...], got",
         logits, targets)
    check_ids("cross_entropy", targets, cols, lowest=-1)
    counted = max(1, int((targets.array() >= 0).sum()))
    dlogits, losses = copy(logits), empty((rows,), "f64", logits.device)
    targets = packed(targets)
    core.cross_entropy(dlogits.ptr, cols, targets.ptr, losses.ptr, rows, cols, 1.0/counted, 1, cols)
    return tensor(losses.array().sum()/counted), dlogits


def check_ids(name, tokens, below, lowest=0):
    """Token ids outside [lowest, below) are an IndexError, before they become a wild pointer."""
    if tokens.dtype != "i64":
        raise TypeError(f"{name}: wants i64 ids, got {tokens.dtype} {tokens.shape}")
    dense = packed(tokens)
    low, high = core.id_range(dense.ptr, dense.size) if dense.size else (0, 0)
    if not lowest <= low <= high < below:
        raise IndexError(f"{name}: ids must lie in [{lowest}, {below}), got {low} to {high} in "
                         f"{tokens.shape}")


# ---- 5. The model's rows -------------------------------------------------------------------------

@row(lambda: (ids(8, 512), sample(1000, 512)))
def embed(tokens, w, dtype="f32"):
    """w[tokens]: ids [...] and w [vocab, dim] -> [..., dim] of the dtype."""
    check_ids("embed", tokens, w.shape[0])
    tokens, w = packed(tokens), packed(w)
    out = empty((*tokens.shape, w.shape[1]), dtype, w.device)
    core.embed(tokens.ptr, w.ptr, out.ptr, tokens.size, w.shape[1], dtype == "bf16")
    return out


@row(lambda: (sample(4096, 512), ids(4096), argsort(ids(4096)), zeros((1000, 512))), FLOATS)
def embed_backward(dy, tokens, order, dw):
    """dw[token] += rows of dy, by token in `order`, the stable argsort of the tokens."""
    need(order.size == tokens.size and dy.size == tokens.size*dw.shape[-1], "embed_backward",
         "dy, order, tokens and dw do not fit", dy, order, tokens, dw)
    check_ids("embed_backward", order, tokens.size)
    check_ids("embed_backward", tokens, dw.shape[0])
    dy, tokens, order = packed(dy), packed(tokens), packed(order)
    core.embed_backward(tokens.ptr, order.ptr, dy.ptr, dw.ptr, tokens.size, dw.shape[1],
                        dy.dtype == "bf16")
    return dw


def argsort(tokens):
    """The stable argsort of the flattened ids; the loader hands it over with each batch."""
    return tensor(np.argsort(tokens.array().reshape(-1), kind="stable"))


def alike(name, *tensors):
    """TypeError unless the tensors (or None) are of one dtype; is that bf16?"""
    dtypes = {t.dtype for t in tensors if t is not None}
    if len(dtypes) > 1:
        raise TypeError(f"{name}: wants activations of one dtype, got {' and '.join(dtypes)}")
    return dtypes == {"bf16"}


@row(lambda: (sample(4096, 512), sample(4096, 512), sample(512)), FLOATS)
def add_rmsnorm(x, residual, w, eps=1e-6):
    """total = x + residual; y = total / sqrt(mean(total^2) + eps) * w (Zhang and Sennrich, 2019).

    x, residual [..., dim] (residual may be None: total is then x itself), w [dim] -> total, y, and
    rstd [rows] for the backward.
    """
    need(w.shape == x.shape[-1:], "add_rmsnorm", "wants [..., dim] and a weight [dim], got", x, w)
    need(residual is None or residual.shape == x.shape, "add_rmsnorm", "shapes differ", x, residual)
    half = alike("add_rmsnorm", x, residual)
    x, w = packed(x), packed(w)
    rows, dim = flat2(x).shape
    total = x if residual is None else empty(x.shape, x.dtype, x.device)
    y, rstd = empty(x.shape, x.dtype, x.device), empty((rows,), "f32", x.device)
    residual = None if residual is None else packed(residual)
    core.add_rmsnorm(x.ptr, address(residual), w.ptr, 0 if residual is None else total.ptr, y.ptr,
                     rstd.ptr, rows, dim, eps, half)
    return total, y, rstd


@row(lambda: (sample(4096, 512), None, sample(4096, 512), sample(512), sample(4096),
              zeros((4096, 512)), True, zeros((512,))), FLOATS)
def add_rmsnorm_backward(dy, dtotal, total, w, rstd, out, acc, dw):
    """out := d(total) through the norm, plus dtotal unless None; added to out if acc.

    dw [dim], unless None, has the weight's gradient added to it.
    """
    half = alike("add_rmsnorm_backward", dy, dtotal, total, out)
    dy, total, w = packed(dy), packed(total), packed(w)
    dtotal = None if dtotal is None else packed(dtotal)
    rows, dim = flat2(total).shape
    core.add_rmsnorm_backward(dy.ptr, address(dtotal), total.ptr, w.ptr, rstd.ptr, out.ptr, acc,
                              address(dw), rows, dim, half)
    return out


class Dropout(typing.NamedTuple):
    """Which random words a dropout reads (Philox4x32-10; Salmon et al., 2011).

    Key = seed, counter = (number of the sequence in the whole run, site, element/4), the word is
    element % 4, with element = position*dim + channel.  An element is kept iff its word is at least
    floor(p * 2^32).  Batch shape, rank and micro-step do not enter: every way of cutting up a run,
    and every recomputation, draws the same mask.
    """
    p: float
    seed: int
    first_sequence: int     # number of row 0 of the batch in the whole run
    site: int               # layer*4 + place in the layer

    @property
    def threshold(self):
        """Words below it are dropped."""
        if not 0 <= self.p < 1:
            raise ValueError(f"dropout: p = {self.p} must lie in [0, 1)")
        return int(self.p*2**32)

    @property
    def keep_scale(self):
        """What a kept element is multiplied by."""
        return 1.0/(1.0 - self.p)


NO_DROPOUT = Dropout(0.0, 0, 0, 0)


@row(lambda: (sample(8, 512, 512), sample(512, 512), sample(8, 512, 512), Dropout(0.1, 1, 0, 0)),
     FLOATS, lambda x, w, *_: 2*x.size*w.shape[0])
def linear(x, w, residual=None, dropout=None, dtype=None):
    """residual + dropout(x w^T): x [..., in], w [out, in], residual [..., out] -> [..., out].

    Dropout and residual are applied while the product's block is in cache.  With dropout x is
    [batch, seq, in].  dtype: of the result, by default x's.
    """
    need(w.ndim == 2 and x.ndim and x.shape[-1] == w.shape[1], "linear",
         "wants [..., in] and [out, in], got", x, w)
    need(dropout is None or x.ndim == 3, "linear", "dropout wants [batch, seq, in], got", x)
    out = empty((*x.shape[:-1], w.shape[0]), dtype or x.dtype, x.device)
    need(residual is None or residual.shape == out.shape, "linear", "product and residual differ",
         out, residual)
    alike("linear", out, residual)
    residual, how = None if residual is None else packed(residual), dropout or NO_DROPOUT
    product(x, w, out, 0, address(residual), how.threshold, how.seed, how.first_sequence, how.site,
            x.shape[-2] if x.ndim > 1 else 1, how.keep_scale)
    return out


def product(x, w, out, *epilogue):
    """out = x w^T by the core, with what its gemm takes from `h` on."""
    m = math.prod(x.shape[:-1])
    w = half_weight(w) if x.dtype == "bf16" and m < 16 else w
    (w, ldw, tw), x, half = operand(w), packed(x), halves(x, w, out)
    n, k = w.shape
    core.gemm(x.ptr, k, False, w.ptr, ldw, not tw, out.ptr, n, m, n, k, False,
              packed_weight(w, ldw, not tw, m, n, k, half), *epilogue, half=half)


@row(lambda: (sample(8, 512, 512), Dropout(0.1, 1, 0, 0)), FLOATS)
def dropout(x, how):
    """x * mask / (1 - p) for x [batch, seq, dim]; applied to dy it is its own backward."""
    need(x.ndim == 3, "dropout", "wants [batch, seq, dim], got", x)
    x = packed(x)
    out = empty(x.shape, x.dtype, x.device)
    core.dropout(x.ptr, out.ptr, *x.shape, how.first_sequence, how.site, how.seed, how.threshold,
                 how.keep_scale, x.dtype == "bf16")
    return out


@row(lambda: (sample(8, 512, 16*32), *cos_sin(512, 32), 8, 4, sample(32), sample(32)), FLOATS)
def qk_norm_rope(qkv, cos, sin, heads, kv_heads, q_weight=None, k_weight=None, eps=1e-6):
    """RMSNorm of each q and k head (with weights), then RoPE (Su et al., 2021).

    qkv [batch, seq, (heads + 2 kv_heads) * head_dim]; cos, sin [seq, head_dim/2]; weights
    [head_dim] or None.  Channel i turns with channel i + head_dim/2, as in Hugging Face's files.
    -> out [batch, seq, heads + 2 kv_heads, head_dim] with the v part copied, and rstd
    [rows, heads + kv_heads] (None without weights).
    """
    parts = heads + 2*kv_heads
    need(qkv.ndim == 3 and qkv.shape[2] % parts == 0, "qk_norm_rope",
         f"wants [batch, seq, {parts}*head_dim] for {heads} + 2*{kv_heads} heads, got", qkv)
    B, S, width = qkv.shape
    head_dim = width//parts
    need(cos.shape == sin.shape == (S, head_dim//2) and head_dim % 2 == 0, "qk_norm_rope",
         "cos and sin want [seq, head_dim/2] for", cos, qkv)
    need((q_weight is None) == (k_weight is None), "qk_norm_rope", "one weight is missing", qkv)
    for w in (q_weight, k_weight):
        need(w is None or w.shape == (head_dim,), "qk_norm_rope", "a weight wants [head_dim] for",
             w, qkv)
    qkv, cos, sin = packed(qkv), packed(cos), packed(sin)
    out = empty((B, S, parts, head_dim), qkv.dtype, qkv.device)
    rstd = None if q_weight is None else empty((B*S, heads + kv_heads), "f32", qkv.device)
    core.qk_norm_rope(qkv.ptr, out.ptr, address(q_weight), address(k_weight), cos.ptr, sin.ptr,
                      address(rstd), B*S, S, heads, kv_heads, head_dim, eps, qkv.dtype == "bf16")
    return out, rstd


@row(lambda: (sample(8, 512, 16, 32), sample(8, 512, 16*32), *cos_sin(512, 32), 8, 4, sample(32),
              sample(32), sample(4096, 12), zeros((32,)), zeros((32,))), FLOATS)
def qk_norm_rope_backward(dout, qkv, cos, sin, heads, kv_heads, q_weight, k_weight, rstd,
                          dq_weight, dk_weight):
    """dout [batch, seq, heads + 2 kv_heads, head_dim] := d(qkv), in place; += for the weights."""
    B, S, parts, head_dim = dout.shape
    half = alike("qk_norm_rope_backward", dout, qkv)
    qkv, cos, sin = packed(qkv), packed(cos), packed(sin)
    core.qk_norm_rope_backward(dout.ptr, qkv.ptr, address(q_weight), address(k_weight),
                               address(dq_weight), address(dk_weight), cos.ptr, sin.ptr,
                               address(rstd), B*S, S, heads, kv_heads, head_dim, half)
    return dout


def cos_sin(seq, head_dim, theta=10000.0, start=0, device="cpu"):
    """RoPE's cos and sin [seq, head_dim/2] of positions start, start + 1, ...

    Computed in fp64, used in fp32: channel pair i turns by position * theta^(-2i/head_dim).
    """
    frequency = theta**(-np.arange(0, head_dim, 2, dtype=np.float64)/head_dim)
    angle = np.outer(np.arange(start, start + seq, dtype=np.float64), frequency)
    return tensor(np.cos(angle), device), tensor(np.sin(angle), device)


def check_heads(name, q, k, v):
    """ValueError unless q [batch, Sq, heads, head_dim] and k, v [batch, Sk, kv_heads, ...] fit."""
    need(q.ndim == k.ndim == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3], name,
         "wants q [batch, Sq, heads, head_dim], k and v [batch, Sk, kv_heads, head_dim], got",
         q, k, v)
    need(q.shape[2] % k.shape[2] == 0, name, "heads are not a multiple of kv heads", q, k)
    need(k.shape[1] >= q.shape[1], name, "fewer keys than queries", q, k)


def head_layout(q, k, v, *more):
    """(int64 array, its address) of sizes and strides for the attention kernels.

    Heads are read by stride, so q, k and v may be slices of one fused tensor.
    """
    strides = [s for t in (q, k, v, *more) for s in t.strides[:3]]
    return longs(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], *strides)


def lanes(t):
    """The tensor, or a copy of it if the last axis is not contiguous."""
    return t if t.strides[-1] == 1 else copy(t)


@row(lambda: (sample(8, 512, 8, 64), sample(8, 512, 4, 64), sample(8, 512, 4, 64), 0.125),
     FLOATS, lambda q, k, *_: 4*q.size*(k.shape[1] - q.shape[1]//2))
def attention(q, k, v, scale):
    """Causal softmax(scale q k^T) v in tiles (FlashAttention-2; Dao, 2023).

    q [batch, Sq, heads, head_dim], k and v [batch, Sk, kv_heads, head_dim], Sk >= Sq: query i sees
    keys 0 .. i + Sk - Sq.  Nothing of size Sq x Sk exists.  -> (out, shaped like q; L, f32
    [batch, heads, Sq], the logsumexp of each row of scores).
    """
    check_heads("attention", q, k, v)
    half = alike("attention", q, k, v)
    q, k, v = lanes(q), lanes(k), lanes(v)
    B, S, H, D = q.shape
    out, lse = empty(q.shape, q.dtype, q.device), empty((B, H, S), "f32", q.device)
    dims, at = head_layout(q, k, v, out)
    core.attention(q.ptr, k.ptr, v.ptr, out.ptr, lse.ptr, at, scale, half)
    return out, lse


@row(lambda: (sample(2, 512, 4, 64),)*5 + (sample(2, 4, 512), 0.125) + (zeros((2, 512, 4, 64)),)*3,
     FLOATS, lambda do, q, k, *_: 10*q.size*(k.shape[1] - q.shape[1]//2))
def attention_backward(do, q, k, v, o, lse, scale, dq, dk, dv):
    """dq, dk, dv := the gradients, with the weights computed again from L, tile by tile.

    The gradients of a KV head are summed over its query heads in head order.
    """
    for d, like in ((do, q), (o, q), (dq, q), (dk, k), (dv, v)):
        need(d.shape == like.shape, "attention_backward", "a gradient wants the shape of", like, d)
    half = alike("attention_backward", do, q, k, v, o, dq, dk, dv)
    do, q, k, v = lanes(do), lanes(q), lanes(k), lanes(v)
    dims, at = head_layout(q, k, v, o, do, dq, dk, dv)
    core.attention_backward(q.ptr, k.ptr, v.ptr, o.ptr, lse.ptr, do.ptr, dq.ptr, dk.ptr, dv.ptr, at,
                            scale, half)
    return dq, dk, dv


@row(lambda: (sample(4096, 512), sample(2*1365, 512)), FLOATS,
     lambda x, w: 2*x.size*w.shape[0])
def gate_up_swiglu(x, w):
    """silu(x gate^T) * (x up^T) for w [2*ffn, in] = gate rows, then up rows (Shazeer, 2020).

    -> (h [..., ffn], gu [..., 2*ffn], kept for the backward).
    """
    need(w.ndim == 2 and w.shape[0] % 2 == 0 and x.shape[-1] == w.shape[1], "gate_up_swiglu",
         "wants [..., in] and [2*ffn, in], got", x, w)
    gu = empty((*x.shape[:-1], w.shape[0]), x.dtype, x.device)
    h = empty((*x.shape[:-1], w.shape[0]//2), x.dtype, x.device)
    product(x, w, gu, h.ptr)
    return h, gu


@row(lambda: (sample(4096, 2*1365),), FLOATS)
def swiglu(gu):
    """silu(gate) * up of gu [..., 2*ffn] = gate | up -> h [..., ffn], bit by bit the product's."""
    gu = packed(gu)
    h = empty((*gu.shape[:-1], gu.shape[-1]//2), gu.dtype, gu.device)
    core.swiglu(gu.ptr, h.ptr, gu.size//max(1, gu.shape[-1]), h.shape[-1], gu.dtype == "bf16")
    return h


@row(lambda: (sample(4096, 1365), sample(4096, 2*1365)), FLOATS)
def swiglu_backward(dh, gu):
    """gu := d(gu), dh := h, in place, from dh [..., ffn] and gu [..., 2*ffn] = gate | up.

    -> (d(gu), h): what the products on both sides need, of one pass.
    """
    half = alike("swiglu_backward", dh, gu)
    dh = packed(dh)
    core.swiglu_backward(gu.ptr, dh.ptr, dh.size//max(1, dh.shape[-1]), dh.shape[-1], half)
    gu.storage.version += 1
    dh.storage.version += 1
    return gu, dh


# Rows of logits that exist at a time: 2^23 elements are 32 MB, enough for the head's gradient
# (which is read and written once a chunk) to be bound by arithmetic, not by memory.
CHUNK_ELEMENTS = 1 << 23
# With so few columns of x logits are never stored, see the core's section 9.  There too the rows go
# in chunks: up to 64 ranges of the vocabulary each keep a share of dx (at dim 32, 16 MB in all).
NARROW, NARROW_ROWS = 48, 2048


def narrow_flops(x, w, targets, denominator, vocab, weight=1.0, dx=None, dw=None):
    """Of the products within a narrow head; those of a wide one are lines of their own."""
    return 2*x.size*vocab*(4 if dx or dw else 1) if x.shape[1] <= NARROW else 0


@row(lambda: (sample(2048, 256), sample(1024, 256), ids(2048), 2048, 1000), FLOATS, narrow_flops)
def head_loss(x, w, targets, denominator, vocab, weight=1.0, dx=None, dw=None):
    """Cross-entropy of the head in chunks of rows: the [rows, vocab] logits never exist.

    The sum over targets >= 0 of logsumexp(row) - row[target], over `denominator`; 0-d f32.
    x [rows, dim], w [physical vocabulary, dim] of which the first `vocab` rows count, targets i64
    [rows].  With dx and dw, pairs (out, acc), gradients times `weight` are written on the way.
    """
    check_ids("head_loss", targets, vocab, lowest=-1)
    need(x.ndim == w.ndim == 2 and x.shape[1] == w.shape[1] and targets.size == x.shape[0],
         "head_loss", "wants [rows, dim], [vocab, dim] and targets [rows], got", x, w, targets)
    need(1 <= vocab <= w.shape[0], "head_loss", f"a vocabulary of {vocab} does not fit", w)
    for place, like in ((dx, x), (dw, w)):
        need(not place or (place[0].shape == like.shape and place[0].contiguous
                           and place[0].dtype == like.dtype), "head_loss",
             f"a gradient wants contiguous {like.dtype} like", like, place and place[0])
    x, w, targets = packed(x), packed(w), packed(targets)
    (rows, dim), padded = x.shape, w.shape[0]
    head = narrow_head if dim <= NARROW else wide_head
    most = NARROW_ROWS if dim <= NARROW else max(128, CHUNK_ELEMENTS//padded)
    chunks = max(1, -(-rows//most))
    step = max(1, min(rows, -(-rows//chunks//32)*32))       # chunks of equal size, in whole tiles
    losses = empty((rows,), "f64", x.device)
    cut = lambda t, start: t.view((min(step, rows - start), dim), offset=t.offset + start*dim)
    for start in range(0, max(1, rows), step):      # without rows dw is 0
        head(cut(x, start), w, targets.ptr + start*8, losses.ptr + start*8, vocab,
             weight/denominator, dx and (cut(dx[0], start), dx[1]),
             dw and (dw[0], dw[1] or start > 0))
    loss = empty((), "f32", x.device)
    core.fill(loss.ptr, losses.array().sum()/denominator, 1)
    return loss


def wide_head(x, w, targets, losses, vocab, scale, dx, dw):
    """A chunk of head_loss (targets, losses: addresses); its logits become their gradient."""
    rows, padded = x.shape[0], w.shape[0]
    half = x.dtype == "bf16"
    logits = matmul(x, transposed(w), empty((rows, padded), "f32", x.device))
    core.cross_entropy(logits.ptr, padded, targets, losses, rows, vocab, scale, bool(dx or dw),
                       padded, half)
    if half:                            # the gradient lies in the first half of each row
        logits = Tensor(logits.storage, logits.shape, (2*padded, 1), 0, "bf16")
    if dx:
        matmul(logits, w, *dx)
    if dw:
        matmul(transposed(logits), x, *dw)


def narrow_head(x, w, targets, losses, vocab, scale, dx, dw):
    """A chunk of head_loss (targets, losses: addresses) whose logits are never stored."""
    (out, add), (out_w, add_w) = dx or (None, False), dw or (None, False)
    core.head_loss(x.ptr, w.ptr, targets, losses, *x.shape, w.shape[0], vocab, scale, address(out),
                   add, address(out_w), add_w, x.dtype == "bf16")


def transposed(t):
    """The last two axes swapped, as a view."""
    swap = lambda sizes: (*sizes[:-2], sizes[-1], sizes[-2])
    return t.view(swap(t.shape), swap(t.strides))


# ---- 6. Training's rows --------------------------------------------------------------------------

@row(lambda: (sample(1 << 22),))
def sumsq(x):
    """fp64 sums of squares of blocks of 65,536 elements, f64 [blocks].

    The global norm is their sum in order: it does not depend on who computed which.
    """
    x = packed(x)
    out = empty((-(-x.size//65536),), "f64", x.device)
    core.sumsq(x.ptr, out.ptr, x.size)
    return out


@row(lambda: (sumsq(sample(1 << 22)), 1.0, zeros((4,), "f64")), dtypes=("f64",))
def grad_clip(blocks, limit, out):
    """out f64 [4] := norm, factor min(1, limit/(norm + 1e-6)), finite (1 or 0), and a flag.

    The flag stays 1 once a norm was not finite.  The factor is torch's clip_grad_norm_; a limit of
    inf does not clip.  The norm stays on the device, where `adamw` reads it.
    """
    norm = math.sqrt(np.add.accumulate(blocks.array())[-1])
    factor = min(1.0, limit/(norm + 1e-6)) if limit < math.inf else 1.0
    finite = math.isfinite(norm)
    out.array()[:] = norm, factor, finite, max(out.array()[3], not finite)
    return out


@row(lambda: (sample(1 << 20), sample(1 << 20), zeros((1 << 20,)), zeros((1 << 20,)),
              tensor64([1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05]), tensor64([1.0, 1.0, 1.0, 0.0])))
def adamw(p, g, m, v, hyper, clip):
    """One step of AdamW (Loshchilov and Hutter, 2019) with torch's arithmetic, in place.

    hyper f64 [7]: lr, beta1, beta2, eps, weight decay, 1 - beta1^t, 1 - beta2^t; clip f64 [4] from
    `grad_clip`: a norm that is not finite leaves p, m and v as they were.  g := 0 as it is read.
    """
    lr, beta1, beta2, eps, decay, bias1, bias2 = hyper.array().tolist()
    norm, factor, finite, _ = clip.array().tolist()
    if finite:
        core.adamw(p.ptr, g.ptr, m.ptr, v.ptr, p.size, lr, beta1, beta2, eps, decay, bias1, bias2,
                   factor)
        p.storage.version += 1
    else:
        fill(g, 0.0)
    return p


def tensor64(values, device="cpu"):
    """Numbers as f64, for settings that a kernel reads."""
    out = empty((len(values),), "f64", device)
    out.array()[:] = values
    return out


@row(lambda: (sample(256, 512), 5))
def newton_schulz(x, steps=5):
    """x [rows, cols] -> nearly orthogonal, singular values near 1 (Muon; Jordan et al., 2024).

    X := x/|x|, then `steps` times X := 3.4445 X + (-4.7750 A + 2.0315 A A) X with A = X X^T, on the
    wide orientation, where A is the smaller square.
    """
    need(x.ndim == 2, "newton_schulz", "wants a matrix, got", x)
    tall = x.shape[0] > x.shape[1]
    norm = math.sqrt(np.add.accumulate(sumsq(x).array())[-1])
    x = scale(transposed(x) if tall else x, 1.0/(norm + 1e-7))
    for _ in range(steps):
        a = matmul(x, transposed(x))
        b = accumulate(scale(a, -4.7750), scale(matmul(a, a), 2.0315))
        x = accumulate(scale(x, 3.4445), matmul(b, x))
    return copy(transposed(x)) if tall else x


@row(lambda: (sample(4096, 1024), "bf16"), dtypes=("f32", "bf16"))
def cast(x, dtype):
    """f32 -> bf16 rounds to nearest even (NaN stays NaN); bf16 -> f32 is exact."""
    if x.dtype == dtype:
        return x
    if {x.dtype, dtype} != {"f32", "bf16"}:
        raise TypeError(f"cast: {x.dtype} to {dtype}: only f32 and bf16 convert")
    x = packed(x)
    out = empty(x.shape, dtype, x.device)
    (core.cast_bf16 if dtype == "bf16" else core.cast_f32)(x.ptr, out.ptr, x.size)
    return out


@row(lambda: ((8, 512, 512), Dropout(0.1, 1, 0, 0)), dtypes=("u8",))
def philox_mask(shape, how):
    """The mask of a `Dropout` over [batch, seq, dim]: u8, 1 where kept."""
    B, S, dim = shape
    out = empty(shape, "u8")
    core.philox_mask(out.ptr, B, how.first_sequence, S, dim, how.site, how.seed, how.threshold)
    return out
