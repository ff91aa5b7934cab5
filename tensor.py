"""tensor: arrays, the memory under them, and one table of operations for every device.

How it reads, top to bottom:

1. The CPU core       which build of fast_cpu this machine can run, how many threads it gets
2. The CUDA core      the same functions on a GPU: kernels.cu through CuPy, products by cuBLASLt
3. Tensor             storage + offset + shape + strides + dtype + device; NumPy in and out
4. The table          `@row` puts an operation on record: name, signature, dtypes, a benchmark shape
5. Primitives         copies, arithmetic with broadcasting, products, activations, reductions
6. The model's rows   embedding, norms, linear, RoPE, attention, SwiGLU, head with loss
7. Training's rows    block sums, clipping, AdamW, Newton-Schulz, casts, dropout masks
8. Programs           a function of host numbers that a GPU records once and then replays

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
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import math
import os
import struct
import sys
import sysconfig
import threading
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
    usable = [name for name in there if runnable(name)]
    if not usable:
        raise ImportError("xtrain's CPU core is not built for this processor: run 'pip install "
                          "-e .' in its folder")
    if forced and forced not in usable:
        raise ImportError(f"XTRAIN_ISA={forced}: not built or not runnable here; usable: "
                          + ", ".join(usable))
    name = forced or usable[-1]
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


def peak_flops(dtype="f32", rounds=100_000, repeats=5, device="cpu"):
    """FLOP/s of multiply-adds in registers on all threads, the best of a few short runs (~20 ms).

    It is measured, since the clock under vector load is written nowhere.  In bf16 it is that of
    what this build multiplies bf16 with.  On a GPU it is that of a large product.
    """
    if device != "cpu":
        return cuda().peak_flops(dtype, repeats)

    def once():
        start = time.perf_counter()
        return core.multiply_adds(rounds, dtype == "bf16")/(time.perf_counter() - start)
    return max(once() for _ in range(repeats))


def bandwidth(elements=1 << 24, repeats=5, device="cpu"):
    """Bytes a second that a read and a write of large arrays move: 64 MB each on all threads, or
    2 GB each on a GPU."""
    if device != "cpu":
        return cuda().bandwidth(repeats)
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


# ---- 2. The CUDA core ----------------------------------------------------------------------------
# The functions of the CPU core once more, with the same parameters, on device memory: a row calls
# whichever core its tensors lie with, and a test compares the two signatures.  Nothing of this is
# imported before the first tensor on a GPU.
#
# Everything runs on one stream, in order.  So a buffer may return to the pool while kernels still
# use it: whoever gets it next comes later on the stream.

class NoDevice(ValueError):
    """There is no GPU to compute on; its text says in one line why, and what to do."""


class Unusable(NoDevice):
    """There is a GPU, or at least its driver, but something is missing to compute on it."""


def say(line):
    """Tell the user something that is no error, on stderr: stdout belongs to results."""
    print(f"xtrain: {line}", file=sys.stderr, flush=True)


def out_of_memory(error):
    """Does an exception say that memory ran out?  CUDA's two layers have words of their own."""
    words = "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"
    return isinstance(error, MemoryError) or str(error).startswith(words)


KERNELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels.cu")
TENSOR_CORES = 80                       # compute capability with bf16: Ampere
SEVERAL_DEVICES = False                 # may tensors differ in where they lie?


def cache_folder():
    """Where what can be made again is kept: $XTRAIN_CACHE, else ~/.cache/xtrain."""
    return os.environ.get("XTRAIN_CACHE") or os.path.expanduser("~/.cache/xtrain")


def parts(n, size):
    """How many parts of `size` cover n."""
    return -(-n//size)


def real(half):
    """The kernels' name of a type of elements."""
    return "bf16" if half else "float"


def threads_for(cols):
    """Threads that share a row: a warp where rows are short."""
    return 32 if cols <= 1024 else 256


def whole(n):
    """The kernels' type of whole numbers up to n: 32 bits divide several times as fast as 64."""
    return "unsigned" if n < 1 << 32 else "idx"


MASK = "Qqqqq"                          # struct codes of kernels.cu's Mask


class Kernels:
    """The kernels of kernels.cu: each instantiation compiled by NVRTC when it is first launched,
    and kept on disk under a hash of all that its code depends on.
    """

    def __init__(self, capability):
        from cupy.cuda import function, nvrtc
        self.nvrtc, self.module = nvrtc, function.Module
        self.version = ".".join(map(str, nvrtc.getVersion()))
        with open(KERNELS, encoding="utf-8") as f:
            self.source = f.read()
        known = nvrtc.getSupportedArchs()
        if capability < min(known):
            raise Unusable(f"the card's compute capability {capability/10} is less than what this "
                           f"CUDA compiles for, {min(known)/10} and more: {OLDER}")
        # A card newer than the compiler gets the newest code there is, for the driver to translate
        self.native = capability in known
        real = capability if self.native else max(n for n in known if n <= capability)
        self.arch = f"{'sm' if self.native else 'compute'}_{real}{'a' if real == 90 else ''}"
        self.functions, self.modules = {}, []       # by name expression; to keep them loaded
        self.compiled = False                       # anything?

    def __getitem__(self, name):
        """The handle of a kernel by its C++ name, such as "add_rmsnorm<bf16, 8>"."""
        if name not in self.functions:
            lowered, code = self.load(name)
            module = self.module()
            module.load(code)
            self.modules.append(module)
            self.functions[name] = module.get_function(lowered).ptr
        return self.functions[name]

    def load(self, name):
        """(name in the object code, object code), from the disk or the compiler."""
        key = hashlib.sha256("\0".join((self.source, self.arch, self.version, name)).encode())
        path = os.path.join(cache_folder(), "kernels", key.hexdigest()[:32])
        try:
            with open(path, "rb") as f:
                lowered, code = f.read().split(b"\n", 1)
            return lowered.decode(), code
        except (OSError, ValueError):
            lowered, code = self.compile(name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.{os.getpid()}", "wb") as f:
                f.write(lowered.encode() + b"\n" + code)
            os.replace(f.name, path)
        except OSError:                 # a cache that cannot be written only costs time
            pass
        return lowered, code

    def compile(self, name):
        """(name in the object code, object code) of one instantiation."""
        if not self.compiled and sys.stderr.isatty():       # a minute of silence looks like a hang
            say(f"compiling kernels for {self.arch}, once: they stay in {cache_folder()}")
        self.compiled, nvrtc = True, self.nvrtc
        program = nvrtc.createProgram(self.source, "kernels.cu", [], [])
        try:
            nvrtc.addNameExpression(program, name)
            nvrtc.compileProgram(program, ("-std=c++17", f"--gpu-architecture={self.arch}"))
            lowered = nvrtc.getLoweredName(program, name)
            code = nvrtc.getCUBIN(program) if self.native else nvrtc.getPTX(program)
        except nvrtc.NVRTCError as e:
            lines = nvrtc.getProgramLog(program).splitlines()
            first = next((line for line in lines if "error" in line), str(e))
            raise Unusable(f"kernels.cu: {name} does not compile for {self.arch}: {first}"
                           ) from None
        finally:
            nvrtc.destroyProgram(program)
        text = lambda value: value.decode() if isinstance(value, bytes) else value
        return text(lowered), code if isinstance(code, bytes) else code.encode()


class Products:
    """Matrix products by cuBLASLt, through ctypes on the library that CuPy has loaded.

    CuPy's own wrappers refuse to run while a graph is recorded.  cuBLASLt takes its workspace with
    each call, and a third matrix C beside the result: the residual, added before the one rounding.
    A row-major matrix is its transpose in BLAS's column-major eyes, so C = op(A) op(B) is asked for
    as C^T = op(B)^T op(A)^T.  fp32 means fp32: TF32 stays off.
    """
    F32, BF16 = 0, 14                           # cudaDataType
    WORKSPACE = 32 << 20                        # what NVIDIA recommends for Hopper

    class Choice(ctypes.Structure):             # cublasLtMatmulHeuristicResult_t
        _fields_ = [("algorithm", ctypes.c_uint64*8), ("workspace", ctypes.c_size_t),
                    ("status", ctypes.c_int), ("waves", ctypes.c_float),
                    ("reserved", ctypes.c_int*4)]

    def __init__(self):
        from cuda.pathfinder import load_nvidia_dynamic_lib
        self.lib = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        self.lib.cublasLtGetVersion.restype = ctypes.c_size_t
        number = self.lib.cublasLtGetVersion()          # 130200 is 13.2.0
        self.version = f"{number//10000}.{number//100 % 100}.{number % 100}"
        self.handle, self.plans = self.made("cublasLtCreate"), {}
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def call(self, name, *args):
        status, no_memory = getattr(self.lib, name)(*args), 3
        if status == no_memory:
            raise MemoryError(f"{name} got none from the GPU")
        if status:
            raise RuntimeError(f"{name} failed with status {status}")

    def made(self, create, *args):
        """What a function that creates something stores through its first parameter."""
        out = ctypes.c_void_p()
        self.call(create, ctypes.byref(out), *args)
        return out

    def matrix(self, dtype, rows, cols, ld, batch, stride):
        """A layout; rows and cols as BLAS sees them."""
        u64, i64 = ctypes.c_uint64, ctypes.c_int64
        out = self.made("cublasLtMatrixLayoutCreate", dtype, u64(rows), u64(cols), i64(ld))
        if batch > 1:
            for attribute, value in ((5, ctypes.c_int32(batch)), (6, i64(stride))):
                self.call("cublasLtMatrixLayoutSetAttribute", out, attribute, ctypes.byref(value),
                          ctypes.sizeof(value))
        return out

    def plan(self, m, n, k, a, b, c, d, batch, alignment):
        """(descriptor, four layouts, algorithm or None) for matrices (dtype, ld, transposed, step).

        The algorithm is the library's first guess for these sizes: timing several would be a little
        faster, but two runs might choose differently, and then their bits would differ.
        """
        compute_f32, trans_a, trans_b, max_workspace, reduction, alignment_a = 68, 3, 4, 1, 3, 5
        what = self.made("cublasLtMatmulDescCreate", compute_f32, self.F32)
        for attribute, (_, _, transposed, _) in ((trans_a, b), (trans_b, a)):
            flag = ctypes.c_int32(transposed)
            self.call("cublasLtMatmulDescSetAttribute", what, attribute, ctypes.byref(flag), 4)
        shapes = ((k, n) if b[2] else (n, k)), ((m, k) if a[2] else (k, m)), (n, m), (n, m)
        layouts = [self.matrix(dtype, *shape, ld, batch, step)
                   for shape, (dtype, ld, _, step) in zip(shapes, (b, a, c, d))]
        wish = self.made("cublasLtMatmulPreferenceCreate")
        # Products that are cut along k may add their parts in fp32 only: in bf16 the error of such a
        # sum was 96 times that of one rounding
        in_compute_type = 2
        limits = [(max_workspace, ctypes.c_uint64(self.WORKSPACE)),
                  (reduction, ctypes.c_uint32(in_compute_type))]
        limits += [(alignment_a + i, ctypes.c_uint32(x)) for i, x in enumerate(alignment)]
        for attribute, value in limits:
            self.call("cublasLtMatmulPreferenceSetAttribute", wish, attribute, ctypes.byref(value),
                      ctypes.sizeof(value))
        choice, found = self.Choice(), ctypes.c_int()
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, what, *layouts, wish, 1, ctypes.byref(choice), ctypes.byref(found))
        self.call("cublasLtMatmulPreferenceDestroy", wish)
        return what, layouts, choice if status == 0 and found.value else None

    def run(self, a, b, c, d, m, n, k, beta, workspace, stream, batch=1):
        """D = op(A) op(B) + beta C; each matrix (address, dtype, ld, transposed, batch step).

        False if the library has no algorithm for them, and nothing was done.
        """
        lowest = lambda x: x & -x               # addresses are multiples of this power of two
        alignment = tuple(lowest(x[0] | 256) for x in (b, a, c, d))
        key = m, n, k, a[1:], b[1:], c[1:], d[1:], batch, alignment
        if key not in self.plans:
            self.plans[key] = self.plan(m, n, k, a[1:], b[1:], c[1:], d[1:], batch, alignment)
        what, layouts, choice = self.plans[key]
        if choice is None:
            return False
        pointer, ref = ctypes.c_void_p, ctypes.byref
        la, lb, lc, ld = layouts
        self.call("cublasLtMatmul", self.handle, what, ref(self.one), pointer(b[0]), la,
                  pointer(a[0]), lb, ref(self.one if beta else self.zero), pointer(c[0]), lc,
                  pointer(d[0]), ld, ref(choice.algorithm), pointer(workspace),
                  ctypes.c_size_t(self.WORKSPACE), pointer(stream))
        return True


class DeviceBuffer:
    """`nbytes` of device memory, contents undefined; back to its pool when dropped."""
    __slots__ = ("cuda", "memory", "address", "nbytes")

    def __init__(self, cuda, nbytes):
        self.cuda, self.nbytes = cuda, 0        # what __del__ gives back if the next line fails
        self.memory = cuda.allocate(nbytes)
        self.address, self.nbytes = self.memory.ptr, nbytes
        cuda.used += nbytes
        cuda.peak = max(cuda.peak, cuda.used)

    def __del__(self):
        self.cuda.used -= self.nbytes


class Arguments(threading.local):
    """This thread's room for the parameters of a launch, in the driver's form: a buffer, its size.
    """

    def __init__(self):
        self.room, self.size = ctypes.create_string_buffer(1024), ctypes.c_size_t()
        buffer_pointer, buffer_size = 1, 2      # CU_LAUNCH_PARAM_...
        self.table = (ctypes.c_void_p*5)(
            buffer_pointer, ctypes.addressof(self.room), buffer_size, ctypes.addressof(self.size))
        self.address = ctypes.addressof(self.table)


class Cuda:
    """One GPU: its stream, memory, kernels and products, and the CPU core's functions on it.

    Training programs (section 8) take their memory from a pool of their own, since a recorded one
    goes on using it: `recorded` says that there is one.
    waits counts the calls that let the host wait until the device is idle, held those in which it
    was two steps ahead; used and peak are bytes handed out, the products' workspace included.
    """
    ADD, SUB, MUL, DIV = core.ADD, core.SUB, core.MUL, core.DIV
    SILU, GELU, EXP = core.SILU, core.GELU, core.EXP
    HALF_A, HALF_B, HALF_C = core.HALF_A, core.HALF_B, core.HALF_C

    def __init__(self):
        import cupy
        from cupy_backends.cuda.api import driver
        self.cupy, self.runtime, self.driver = cupy, cupy.cuda.runtime, driver
        about = self.runtime.getDeviceProperties(0)
        self.name, self.capability = about["name"].decode(), 10*about["major"] + about["minor"]
        self.memory_size = about["totalGlobalMem"]
        self.shared_memory = about["sharedMemPerBlockOptin"]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()               # the pool hands out memory per stream
        self.pool, self.program_pool = self.pools = [cupy.cuda.MemoryPool(self.grow)
                                                     for _ in range(2)]
        self.recorded = False
        self.arguments, self.raised = Arguments(), {}
        self.used = self.peak = self.waits = self.held = 0
        self.kept = None                # while recording, a list of what replays will read
        self.kernels = Kernels(self.capability)
        self.products = None if os.environ.get("XTRAIN_PRODUCTS") == "own" else Products()
        self.workspace = DeviceBuffer(self, Products.WORKSPACE if self.products else 0)
        self.libraries = (f"CuPy {cupy.__version__}, NVRTC {self.kernels.version}, cuBLASLt "
                          f"{self.products.version if self.products else 'unused'}")
        if self.capability < TENSOR_CORES:
            say(f"the {self.name} multiplies no bf16, which begins with compute capability "
                f"{TENSOR_CORES/10}: computing in f32, with attention of products and a softmax")

    # Memory

    def Buffer(self, nbytes):
        """Device memory with an `address`."""
        return DeviceBuffer(self, nbytes)

    scratch = Buffer

    def allocate(self, nbytes):
        """Memory of the pool; MemoryError says how much was asked for, and of how much."""
        try:
            return self.pool.malloc(max(1, nbytes))
        except MemoryError:
            free, size = self.runtime.memGetInfo()
            raise MemoryError(f"{nbytes/2**30:.2f} GB asked of the {self.name}: of its "
                              f"{size/2**30:.1f} GB {self.used/2**30:.1f} are in use here, "
                              f"{free/2**30:.1f} free") from None

    def grow(self, nbytes):
        """New memory for a pool, from the driver; what pools hold unused goes back if need be.

        MemoryError, not CuPy's error, if there is none: at that CuPy would empty the pool that
        asks, and with it what a recorded program uses.
        """
        cuda = self.cupy.cuda
        for last in (False, True):
            try:
                return cuda.MemoryPointer(cuda.Memory(nbytes), 0)
            except RuntimeError as e:
                if not out_of_memory(e):
                    raise
                if last or self.kept is not None:       # nothing is freed while recording
                    raise MemoryError(str(e)) from None
            self.release()

    def release(self):
        """Give what the pools hold unused back to the driver, but for what recordings use."""
        gc.collect()
        for pool in self.pools[:1] if self.recorded else self.pools:
            pool.free_all_blocks()

    @contextlib.contextmanager
    def allocating(self, pool):
        """Context in which buffers come from this pool."""
        before, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = before

    def write(self, address, array):
        """Copy a C-contiguous NumPy array to the device.

        A recorded copy reads the array again at every replay: the recording keeps it.
        """
        if self.kept is not None:
            self.kept.append(array)
        if array.nbytes:
            self.runtime.memcpyAsync(address, array.ctypes.data, array.nbytes,
                                     self.runtime.memcpyHostToDevice, self.stream.ptr)

    def read(self, address, count, code):
        """`count` elements at an address, as NumPy's type `code`; waits for the device."""
        out = np.empty(count, code)
        self.waits += 1
        if out.nbytes:
            self.runtime.memcpyAsync(out.ctypes.data, address, out.nbytes,
                                     self.runtime.memcpyDeviceToHost, self.stream.ptr)
        self.stream.synchronize()
        return out

    def memset(self, address, byte, nbytes):
        """Every byte := byte."""
        if nbytes:
            self.runtime.memsetAsync(address, byte, nbytes, self.stream.ptr)

    def synchronize(self):
        """Wait until everything is done."""
        self.waits += 1
        self.stream.synchronize()

    # Limits

    def seconds(self, run, repeats):
        """The least time of a few runs on the device."""
        event, best = self.cupy.cuda.Event, math.inf
        for _ in range(repeats):
            start, end = event(), event()
            start.record(self.stream)
            run()
            end.record(self.stream)
            self.synchronize()
            best = min(best, self.cupy.cuda.get_elapsed_time(start, end)/1e3)
        return best

    def peak_flops(self, dtype, repeats):
        """FLOP/s of a product of 8,192 x 8,192 random matrices (zeros would run 13 % faster)."""
        n, out = 8192, None
        ones = fill(empty((1, n, n), dtype, "cuda"), 1.0)
        a = dropout(ones, Dropout(0.5, 1, 0, 0)).view((n, n))
        out = empty((n, n), dtype, "cuda")
        best = self.seconds(lambda: matmul(a, a, out), repeats)
        del ones, a, out
        self.tidy()
        return 2*n**3/best

    def bandwidth(self, repeats):
        """Bytes a second of a copy of 2 GB within the device, read and written."""
        x, y = (self.Buffer(1 << 31) for _ in range(2))
        best = self.seconds(lambda: self.copy_bytes(x.address, y.address, 1 << 31), repeats)
        del x, y
        self.tidy()
        return (1 << 32)/best

    def tidy(self):
        """Give unused memory back to the driver, and let the peak start from what is in use."""
        self.synchronize()
        self.release()
        self.peak = self.used

    # Launches

    def launch(self, name, grid, block, formats, *args, shared=0):
        """Launch kernels.cu's `name` (as C++ spells it) on the stream.

        formats: a struct code per parameter, which all have 8 bytes (q: integers, addresses;
        d: doubles).  shared: bytes of dynamic shared memory.
        """
        function = self.kernels[name]
        if shared > self.raised.get(name, 48 << 10):            # more must be asked for
            max_dynamic_shared = 8
            self.driver.funcSetAttribute(function, max_dynamic_shared, shared)
            self.raised[name] = shared
        a, (x, y, z) = self.arguments, (*grid, 1, 1)[:3]
        struct.pack_into("<" + formats, a.room, 0, *args)
        a.size.value = 8*len(args)
        self.driver.launchKernel(function, x, y, z, block, 1, 1, shared, self.stream.ptr, 0,
                                 a.address)

    # Products

    def gemm(self, a, lda, ta, b, ldb, tb, c, ldc, m, n, k, acc, packed=0, h=0, residual=0,
             threshold=0, key=0, first_sequence=0, site=0, seq=1, keep_scale=1.0, half=0):
        """C (+)= op(A) op(B); then, if asked, C = residual + dropout(C), or h = SwiGLU of C."""
        half_c = bool(half & self.HALF_C)
        if threshold or keep_scale != 1.0:
            # dropout wants the unrounded product: fp32, beside C if that is bf16
            room = self.scratch(4*m*n) if half_c else None
            at, ld = (room.address, n) if half_c else (c, ldc)
            self.product(a, lda, ta, b, ldb, tb, at, ld, m, n, k, acc, 0, half & ~self.HALF_C)
            self.add_dropout(at, residual, c, m//seq, seq, n, first_sequence, site, key, threshold,
                             keep_scale, False, half_c)
        else:
            self.product(a, lda, ta, b, ldb, tb, c, ldc, m, n, k, acc, residual, half)
        if h:
            self.swiglu(c, h, m, n//2, half_c)

    def gemm_batch(self, a, lda, ta, b, ldb, tb, c, ldc, m, n, k, acc, batch, offsets, half=0):
        """`batch` products of one shape; offsets int64 [batch, 3]: where A, B and C of each start.

        Neighbours whose starts grow by equal steps are one call.
        """
        at = np.ctypeslib.as_array((ctypes.c_int64*(3*batch)).from_address(offsets))
        at = at.reshape(batch, 3)
        sizes = [2 if half & flag else 4 for flag in (self.HALF_A, self.HALF_B, self.HALF_C)]
        first = 0
        while first < batch:
            step, n_items = (0, 0, 0), 1
            if first + 1 < batch and at[first + 1, 2] != at[first, 2]:
                step = tuple((at[first + 1] - at[first]).tolist())
                while first + n_items < batch and tuple(
                        (at[first + n_items] - at[first + n_items - 1]).tolist()) == step:
                    n_items += 1
            starts = [base + size*offset for base, size, offset
                      in zip((a, b, c), sizes, at[first].tolist())]
            self.product(starts[0], lda, ta, starts[1], ldb, tb, starts[2], ldc, m, n, k, acc, 0,
                         half, n_items, step)
            first += n_items

    def product(self, a, lda, ta, b, ldb, tb, c, ldc, m, n, k, acc, residual, half, batch=1,
                step=(0, 0, 0)):
        """C = op(A) op(B) + (C if acc, else residual, which has C's shape, or 0), `batch` times."""
        if not (m and n and batch):
            return
        kinds = [Products.BF16 if half & flag else Products.F32
                 for flag in (self.HALF_A, self.HALF_B, self.HALF_C)]
        if k and self.products:
            left, right = (a, kinds[0], lda, ta, step[0]), (b, kinds[1], ldb, tb, step[1])
            out = c, kinds[2], ldc, False, step[2]
            extra = (residual, kinds[2], n, False, step[2]) if residual else out
            if self.products.run(left, right, extra, out, m, n, k, acc or residual,
                                 self.workspace.address, self.stream.ptr, batch):
                return
        sizes = [2 if half & flag else 4 for flag in (self.HALF_A, self.HALF_B, self.HALF_C)]
        for i in range(batch):
            at = [base + size*s*i for base, size, s in zip((a, b, c), sizes, step)]
            if residual:                # contiguous, as C then is
                self.copy_bytes(residual, at[2], m*n*sizes[2])
            self.tiled_gemm(at[0], lda, ta, at[1], ldb, tb, at[2], ldc, m, n, k,
                            bool(acc or residual), half)

    def copy_bytes(self, source, destination, nbytes):
        """Copy within the device."""
        self.runtime.memcpyAsync(destination, source, nbytes, self.runtime.memcpyDeviceToDevice,
                                 self.stream.ptr)

    # Elementwise

    def launch_over(self, name, n, formats, *args, each=256, shared=0):
        """Launch blocks of 256 threads that have `each` items, for n of them; none for n = 0."""
        if n:
            self.launch(name, (parts(n, each),), 256, formats, *args, shared=shared)

    @staticmethod
    def width(half, size, *addresses):
        """How many elements a thread moves at once: 16 bytes where rows of `size` elements and all
        addresses are multiples of that, else one."""
        most = 8 if half else 4
        return most if size % most == 0 and all(at % 16 == 0 for at in addresses) else 1

    @staticmethod
    def walk(ndim, shape, *strides):
        """[(size, stride, stride)] by axis from host addresses of int64 arrays.

        Axes that both arrays cross as if they were one become one: less to divide by.
        """
        sizes, a, b = ((ctypes.c_int64*ndim).from_address(at)[:] for at in (shape, *strides))
        axes = [(1, 0, 0)]
        for axis in zip(sizes, a, b):
            n, s, t = axis
            last = axes[-1]
            if n == 1 and len(axes) + last[0] > 2:
                continue
            if last[0] == 1 or last[1:] == (n*s, n*t):
                axes[-1] = last[0]*n, s, t
            else:
                axes.append(axis)
        return axes

    @staticmethod
    def walk_numbers(axes):
        """What a Walk of these axes consists of: sizes, strides, strides."""
        return [x for column in zip(*axes, *[(1, 0, 0)]*(MAX_AXES - len(axes))) for x in column]

    def copy_strided(self, src, dst, ndim, shape, src_strides, dst_strides, itemsize):
        axes = self.walk(ndim, shape, src_strides, dst_strides)
        n = math.prod(size for size, _, _ in axes)
        item = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2"}[itemsize]
        walk = self.walk_numbers(axes)
        if len(axes) > 1 and axes[-2][1] == 1 == axes[-1][2] and n:     # turned
            tiles = n//(axes[-2][0]*axes[-1][0])*parts(axes[-2][0], 32)*parts(axes[-1][0], 32)
            self.launch(f"copy_turned<{item}>", (tiles,), 256, "qqq24q", src, dst, len(axes), *walk)
        else:
            self.launch_over(f"copy_strided<{item}, {whole(n)}>", n, "qqqq24q", src, dst, n,
                             len(axes), *walk)

    def binary(self, kind, a, b, c, ndim, shape, a_strides, b_strides):
        axes = self.walk(ndim, shape, a_strides, b_strides)
        size, *along = axes[-1]
        W = self.width(False, size, a, b, c) if set(along) <= {0, 1} and all(
            s % 4 == t % 4 == 0 for _, s, t in axes[:-1]) else 1
        axes[-1] = size//W, *(s*W for s in along)
        n = math.prod(size for size, _, _ in axes)
        self.launch_over(f"binary<{W}, {whole(n)}>", n, "8q24q", kind, a, b, c, n, len(axes),
                         *(int(s > 0) for s in along), *self.walk_numbers(axes))

    def axpy(self, alpha, x, y, n, half=False):
        W = self.width(half, 0, x, y)
        self.launch_over(f"axpy<{real(half)}, {W}>", n, "dqqq", alpha, x, y, n, each=256*W)

    def scale(self, alpha, x, y, n):
        W = self.width(False, 0, x, y)
        self.launch_over(f"scale<float, {W}>", n, "dqqq", alpha, x, y, n, each=256*W)

    def fill(self, x, value, n, half=False):
        W = self.width(half, 0, x)
        self.launch_over(f"fill<{real(half)}, {W}>", n, "qdq", x, value, n, each=256*W)

    def unary(self, kind, x, y, n):
        W = self.width(False, 0, x, y)
        self.launch_over(f"unary<{W}>", n, "qqqq", kind, x, y, n, each=256*W)

    def unary_backward(self, kind, x, dy, dx, n):
        W = self.width(False, 0, x, dy, dx)
        self.launch_over(f"unary_backward<{W}>", n, "qqqqq", kind, x, dy, dx, n, each=256*W)

    def cast_bf16(self, x, y, n):
        W = self.width(True, 0, x, y)
        self.launch_over(f"cast<float, bf16, {W}>", n, "qqq", x, y, n, each=256*W)

    def cast_f32(self, x, y, n):
        W = self.width(True, 0, x, y)
        self.launch_over(f"cast<bf16, float, {W}>", n, "qqq", x, y, n, each=256*W)

    # Dropout

    def philox(self, key, sequence, site, quad, n, out):
        self.launch_over("philox<4>", n, "QQqqqq", key, sequence, site, quad, n, out)

    @staticmethod
    def mask(first_sequence, site, key, threshold):
        """The numbers of a Mask; first_sequence is one, or a tensor for the device to look into."""
        held = isinstance(first_sequence, Tensor)
        return key, site, threshold, *((0, first_sequence.ptr) if held else (first_sequence, 0))

    def philox_mask(self, out, sequences, first_sequence, seq, dim, site, key, threshold):
        n, W = sequences*seq*dim, 4 if seq*dim % 4 == 0 else 1
        self.launch_over(f"philox_mask<{W}>", n, "qqq" + MASK, out, seq*dim, n,
                         *self.mask(first_sequence, site, key, threshold), each=256*W)

    def dropout(self, x, y, sequences, seq, dim, first_sequence, site, key, threshold, scale,
                half=False):
        self.add_dropout(x, 0, y, sequences, seq, dim, first_sequence, site, key, threshold, scale,
                         half, half)

    def add_dropout(self, x, residual, y, sequences, seq, dim, first_sequence, site, key, threshold,
                    scale, half_x, half):
        """y = residual + dropout(x); residual may be 0, and x fp32 where the others are bf16."""
        n, W = sequences*seq*dim, self.width(half, seq*dim, x, residual, y)
        self.launch_over(f"dropout<{real(half_x)}, {real(half)}, {W}>", n, "qqqqq" + MASK + "d", x,
                         residual, y, seq*dim, n, *self.mask(first_sequence, site, key, threshold),
                         scale, each=256*W)

    # Rows

    def sum_rows(self, x, y, rows, cols):
        size = 1 << 15                  # of a long row's pieces, each a task of its own
        pieces, W = max(1, parts(cols, size)), self.width(False, cols, x)
        if pieces > 1:
            between = self.scratch(4*rows*pieces)
            self.rows(f"sum_rows<256, {W}>", 256, rows*pieces, "6q", x, between.address,
                      rows*pieces, cols, pieces, size)
            x, cols, W = between.address, pieces, 1
        T = threads_for(cols)
        self.rows(f"sum_rows<{T}, {W}>", T, rows, "6q", x, y, rows, cols, 1, cols)

    def rows(self, name, T, rows, formats, *args):
        """Launch a kernel in which T threads of a block of 256 share a row."""
        self.launch_over(name, rows, formats, *args, each=256//T)

    def softmax(self, x, y, rows, cols):
        T, W = threads_for(cols), self.width(False, cols, x, y)
        self.rows(f"softmax<{T}, {W}>", T, rows, "qqqq", x, y, rows, cols)

    def softmax_backward(self, y, dy, dx, rows, cols):
        T, W = threads_for(cols), self.width(False, cols, y, dy, dx)
        self.rows(f"softmax_backward<{T}, {W}>", T, rows, "5q", y, dy, dx, rows, cols)

    def cross_entropy(self, logits, ld, targets, losses, rows, cols, scale, write_gradient,
                      cols_padded, half=False, denominator_at=0):
        T, W = 512, self.width(False, ld, logits)
        step = T*W                      # shared memory holds whole ones, at most half of what is
        kept = min(parts(cols, step), self.shared_memory//2//(4*step))*step     # there: two blocks
        if rows:
            self.launch(f"cross_entropy<{real(half)}, {W}, {T}>", (rows,), T, "5qd4q", logits, ld,
                        targets, losses, cols, scale, denominator_at, bool(write_gradient),
                        cols_padded, kept, shared=4*kept)

    def mean_loss(self, losses, n, denominator, out, denominator_at=0):
        self.launch("mean_loss<1024>", (1,), 1024, "qqdqq", losses, n, denominator, denominator_at,
                    out)

    def count(self, ids, n, out):
        self.launch("count<1024>", (1,), 1024, "qqq", ids, n, out)

    def id_range(self, ids, n):
        out = self.scratch(16)
        self.launch("id_range<1024>", (1,), 1024, "qqq", ids, n, out.address)
        return tuple(self.read(out.address, 2, np.int64).tolist())

    # Layers

    @staticmethod
    def shares(vectors):
        """(T, V): how many threads share a row, and how many vectors each of them holds."""
        T = 32
        while parts(vectors, T) > 4 and T < 1024:
            T *= 2
        return T, max(1, parts(vectors, T))

    def add_rmsnorm(self, x, residual, w, total, y, rstd, rows, dim, eps, half=False):
        W = self.width(half, dim, x, residual, w, total, y)
        T, V = self.shares(parts(dim, W))
        block = max(T, 256)
        if rows:
            self.launch(f"add_rmsnorm<{real(half)}, {W}, {T}, {V}>", (parts(rows, block//T),),
                        block, "8qd", x, residual, w, total, y, rstd, rows, dim, eps)

    def add_rmsnorm_backward(self, dy, dtotal, total, w, rstd, dx, acc, dw, rows, dim, half=False):
        W = self.width(half, dim, dy, dtotal, total, w, dx)
        T, V = self.shares(parts(dim, W))
        block = max(T, 256)
        step = max(block//T, parts(rows, 1024))         # rows of a chunk, which has one sum for dw
        chunks = parts(rows, step)
        part = self.scratch(4*chunks*dim if dw else 0)
        if rows:
            self.launch(f"add_rmsnorm_backward<{real(half)}, {W}, {T}, {V}>", (chunks,), block,
                        "11q", dy, dtotal, total, w, rstd, dx, acc, part.address if dw else 0, rows,
                        dim, step)
            self.add_chunks(part.address, chunks, dim, dw)

    def add_chunks(self, part, chunks, n, dw):
        """dw, unless 0, += the sums of chunks, part [chunks, n]."""
        lanes = 32 if chunks > 64 else 8
        if dw:
            self.launch(f"add_chunks<{lanes}>", (parts(n, 32),), 32*lanes, "qqqq", part, chunks, n,
                        dw)

    def head_shares(self, half, head_dim, *addresses):
        """(W, L, V): elements at a time, lanes that share a head, and pairs of vectors of each."""
        W = self.width(half, head_dim//2, *addresses)
        vectors = parts(head_dim//2, W)
        L = min(32, 1 << (vectors - 1).bit_length())
        return W, L, parts(vectors, L)

    def qk_norm_rope(self, qkv, out, qw, kw, cos, sin, rstd, rows, seq, heads, kv_heads, head_dim,
                     eps, half=False):
        W, L, V = self.head_shares(half, head_dim, qkv, out, qw, kw, cos, sin)
        self.rows(f"qk_norm_rope<{real(half)}, {W}, {L}, {V}>", L, rows*(heads + 2*kv_heads),
                  "12qd", qkv, out, qw, kw, cos, sin, rstd, rows, seq, heads, kv_heads, head_dim,
                  eps)

    def qk_norm_rope_backward(self, dqkv, qkv, qw, kw, dqw, dkw, cos, sin, rstd, rows, seq, heads,
                              kv_heads, head_dim, half=False):
        W, L, V = self.head_shares(half, head_dim, dqkv, qkv, qw, kw, cos, sin)
        step = max(4, parts(rows, 1024))
        chunks = parts(rows, step)
        part = self.scratch(8*chunks*head_dim if dqw or dkw else 0)
        if not rows:
            return
        self.launch(f"qk_norm_rope_backward<{real(half)}, {W}, {L}, {V}>", (chunks,), 256, "15q",
                    dqkv, qkv, qw, kw, cos, sin, rstd, rows, seq, heads, kv_heads, head_dim,
                    part.address if dqw or dkw else 0, chunks, step)
        self.add_chunks(part.address, chunks, head_dim, dqw)
        self.add_chunks(part.address + 4*chunks*head_dim, chunks, head_dim, dkw)

    def swiglu(self, gu, h, rows, ffn, half=False):
        W = self.width(half, ffn, gu, h)
        self.launch_over(f"swiglu<{real(half)}, {W}>", rows*ffn, "qqqq", gu, h, rows*ffn, ffn,
                         each=256*W)

    def swiglu_backward(self, gu, dh, rows, ffn, half=False):
        W = self.width(half, ffn, gu, dh)
        self.launch_over(f"swiglu_backward<{real(half)}, {W}>", rows*ffn, "qqqq", gu, dh, rows*ffn,
                         ffn, each=256*W)

    def embed(self, tokens, w, y, n, dim, half=False):
        W = self.width(half, dim, w, y)
        self.launch_over(f"embed<{real(half)}, {W}>", n*dim, "5q", tokens, w, y, n, dim,
                         each=256*W)

    def embed_backward(self, tokens, order, dy, dw, n, dim, half=False):
        W = self.width(half, dim, dy, dw)
        slices, groups = parts(dim, 32*W), parts(n, 32)
        part = self.scratch(8*groups*dim)
        self.launch_over(f"embed_backward<{real(half)}, {W}>", n*slices, "8q", tokens, order, n, dy,
                         dw, part.address, dim, slices, each=8)
        self.launch_over(f"join_runs<{W}>", groups*slices, "7q", tokens, order, n, part.address, dw,
                         dim, slices, each=8)

    # Optimizer

    def sumsq(self, x, out, n):
        self.launch_over(f"sumsq<{self.width(False, 0, x)}>", n, "qqq", x, out, n, each=65536)

    def grad_clip(self, blocks, n, limit, out):
        self.launch("grad_clip<256>", (1,), 256, "qqdq", blocks, n, limit, out)

    def adamw(self, p, g, m, v, mirror, n, hyper, clip):
        W = self.width(False, 0, p, g, m, v, mirror)
        self.launch_over(f"adamw<{W}>", n, "8q", p, g, m, v, mirror, n, hyper, clip, each=256*W)

    def tiled_gemm(self, a, lda, ta, b, ldb, tb, c, ldc, m, n, k, acc, half=0):
        """C (+)= op(A) op(B) by the kernel of our own: the reference of the products."""
        types = ", ".join(real(half & flag) for flag in (self.HALF_A, self.HALF_B, self.HALF_C))
        self.launch(f"tiled_gemm<{types}, {int(ta)}, {int(tb)}>", (parts(m, 64)*parts(n, 64),), 256,
                    "11q", a, lda, b, ldb, c, ldc, m, n, k, acc, half)

    # Attention

    # Kernels by (head size, half), the fastest first; the first one that a card has shared memory
    # for is taken.  Forward: M, WARPS, KEYS, STAGES; backward: ROWS, KEYS, HALVES, STAGES, BLOCKS.
    FORWARD = {(16, True): [(2, 4, 64, 2)], (32, True): [(2, 4, 64, 2)],
               (64, True): [(2, 4, 64, 2)],
               (96, True): [(2, 4, 64, 2)], (128, True): [(2, 4, 64, 2)],
               (256, True): [(1, 8, 64, 2), (1, 4, 32, 2)],
               (16, False): [(1, 4, 64, 1)], (32, False): [(1, 4, 64, 1)],
               (64, False): [(1, 4, 64, 1)], (96, False): [(1, 4, 32, 1)],
               (128, False): [(1, 4, 32, 1)], (256, False): [(1, 4, 32, 1), (1, 2, 16, 1)]}
    BACKWARD = {(16, True): [(128, 128, 1, 2, 1)], (32, True): [(128, 128, 1, 2, 1)],
                (64, True): [(128, 128, 1, 2, 1), (64, 64, 1, 2, 3)],
                (96, True): [(64, 96, 1, 2, 1)],
                (128, True): [(64, 128, 1, 2, 1), (32, 64, 1, 2, 2)],
                (256, True): [(32, 128, 2, 2, 1), (16, 64, 2, 2, 2)],
                (16, False): [(64, 64, 1, 1, 2)], (32, False): [(64, 64, 1, 1, 2)],
                (64, False): [(32, 64, 1, 1, 2)],
                (96, False): [(32, 48, 1, 1, 2), (16, 48, 1, 1, 2)],
                (128, False): [(32, 64, 1, 1, 1), (16, 32, 1, 1, 2)],
                (256, False): [(16, 32, 2, 1, 1), (16, 16, 2, 1, 2)]}
    TOGETHER = 512              # tasks that go together, two for each of 132 processors and as many
                                # again: heads whose keys share L2; results do not depend on it

    def attention_kernel(self, table, dim, half, room):
        """(template arguments, bytes of shared memory); room(size, parts, ...) says how many."""
        # a block's limit, by the CUDA programming guide's table of compute capabilities
        limit = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(self.capability, 99) << 10
        size, parts_ = next(n for n in (16, 32, 64, 96, 128, 256) if n >= dim), 1 if half else 3
        for choice in table[size, half]:
            nbytes = room(size, parts_, *choice)
            if nbytes <= limit:
                return (size, parts_, *choice), nbytes
        raise ValueError(f"attention: heads of {dim} need {nbytes >> 10} KB of shared memory, "
                         f"the {self.name} has {limit >> 10}")

    @staticmethod
    def attention_layout(dims, views, half):
        """(B, Sq, Sk, H, KV, dim, whether the kernels may be WIDE, views with strides)."""
        n = 6 + 3*len(views)
        sizes = (ctypes.c_int64*n).from_address(dims)[:]
        views = [(at, *sizes[6 + 3*i:9 + 3*i]) for i, at in enumerate(views)]
        nbytes = 2 if half else 4
        wide = sizes[5] % 8 == 0 and all(
            at % 16 == 0 and all(s*nbytes % 16 == 0 for s in strides) and 0 <= strides[1] < 1 << 23
            for at, *strides in views)
        return (*sizes[:6], int(wide), builtins.sum(views, ()))

    def attention(self, q, k, v, o, lse, dims, scale, half=False):
        """o = softmax(scale q k^T) v, causal, and L; parameters as in the CPU core."""
        B, sq, sk, H, KV, dim, wide, views = self.attention_layout(dims, (q, k, v, o), half)
        if B*sq*H == 0:
            return
        (size, parts_, M, warps, keys, stages), nbytes = self.attention_kernel(
            self.FORWARD, dim, half,
            lambda size, parts_, M, warps, keys, stages: 2*parts_*size*(16*M*warps + 2*stages*keys))
        blocks = parts(sq, 16*M*warps)
        self.launch(f"attention<{size}, {parts_}, {wide}, {M}, {warps}, {keys}, {stages}>",
                    (B*H*blocks,), 32*warps, "qqqqqqqd" + "q"*17, sq, sk, H, KV, dim, B*H,
                    parts(self.TOGETHER, blocks), scale, *views, lse, shared=nbytes)

    def attention_backward(self, q, k, v, o, lse, dy, dq, dk, dv, dims, scale, half=False):
        """dq, dk, dv from dy, the gradient of o; parameters as in the CPU core."""
        B, sq, sk, H, KV, dim, wide, views = self.attention_layout(
            dims, (q, k, v, o, dy, dq, dk, dv), half)
        if B*sq*H == 0:
            return
        (size, parts_, rows, keys, halves, stages, per), nbytes = self.attention_kernel(
            self.BACKWARD, dim, half, lambda size, parts_, rows, keys, halves, stages, per:
            2*parts_*(2*size*keys + rows*keys) + stages*(4*parts_*size*rows + 8*rows))
        blocks, tiles = parts(sk, keys), B*H*parts(sq, rows)*halves
        about = (sq, sk, H, KV, dim, B*H, parts(self.TOGETHER, blocks), scale, *views[:16])
        row_sums = self.scratch(8*B*H*sq)
        self.launch(f"attention_rows<{real(half)}, {wide}>", (parts(B*H*sq, 32),), 256,
                    "qqqqqqqd" + "q"*22, *about, *views[16:20], lse, row_sums.address)
        shares = self.scratch(4*tiles*rows*size//halves)    # of dq; and whose turn it is to add one
        turns = self.scratch(4*(tiles + 1))
        self.memset(turns.address, 0, 4*(tiles + 1))
        self.launch(f"attention_backward<{size}, {parts_}, {wide}, {rows}, {keys}, {halves}, "
                    f"{stages}, {per}>", (B*KV*blocks*halves,), 2*keys, "qqqqqqqd" + "q"*35, *about[:5],
                    B*KV, *about[6:], *views[16:], row_sums.address, shares.address, turns.address,
                    shared=nbytes)


@functools.lru_cache(maxsize=None)
def cuda():
    """The CUDA core, made when first asked for; NoDevice says why there is none."""
    global SEVERAL_DEVICES
    find_card()
    try:
        made = Cuda()
    except (ImportError, RuntimeError) as e:
        if out_of_memory(e):
            raise
        if type(e).__name__.startswith("CUDA"):         # an error of the runtime or the driver
            raise Unusable(f"the card cannot be used ({e})") from None
        raise Unusable(f"a part of CUDA is missing ({str(e).split(': ')[0]}): "
                       f"{install(driver_version())}") from None
    SEVERAL_DEVICES = True
    return made


def find_card():
    """NoDevice, or Unusable where there is a driver, unless CuPy sees a card."""
    have = driver_version()
    refusal = Unusable if have else NoDevice
    try:
        import cupy
    except ImportError as e:
        reason = str(e).strip(" =\n").rpartition("\n")[2].strip()   # CuPy's text has ten lines
        where = "" if have else ", on a machine with a card and NVIDIA's driver"
        raise refusal(f"CuPy, which reaches the GPU, cannot be imported ({reason}): "
                      f"{install(have)}{where}") from None
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as e:
        count, reason, wants = 0, str(e).split(":")[0], runtime.runtimeGetVersion()
        if 0 < have//1000 < wants//1000:
            raise Unusable(f"the NVIDIA driver supports CUDA {version_text(have)}, CuPy was built "
                           f"for {version_text(wants)}: update the driver" + (
                               f", or {OLDER}" if have >= 12000 else "")) from None
        if reason != "cudaErrorNoDevice":
            raise refusal(f"no NVIDIA driver answers ({reason}): is there a card, and does "
                          "nvidia-smi list it?") from None
    if count == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise NoDevice("the NVIDIA driver lists no card" + (
            "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"))


def driver_version():
    """The CUDA version that NVIDIA's driver supports, 1000*major + 10*minor; 0 without a driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def install(version):
    """The command that installs what a driver for a CUDA version (0: unknown) needs."""
    return f"pip install -e '.[{'cuda12' if version//1000 == 12 else 'cuda'}]'"


OLDER = "pip uninstall cupy-cuda13x; " + install(12000)     # what older drivers and cards need


def version_text(number):
    """13020 -> "13.2"."""
    return f"{number//1000}.{number % 1000//10}"


def backend(device):
    """The core that computes on a device."""
    if device == "cpu":
        return core
    if device != "cuda":
        raise ValueError(f"device {device!r}: wants 'cpu' or 'cuda'")
    return cuda()


def has_bf16(device):
    """Can a device multiply bf16, and so compute attention in tiles?  GPUs can from Ampere on."""
    return device == "cpu" or cuda().capability >= TENSOR_CORES


# Results below this many bytes are kept for the backward even if they can be made again, by device.
# On a CPU a model with rows that small needs no memory saved, and making them again takes nano 6 %
# of a step.  On a GPU making them again costs as much as making them: 3 % of gpt2's step, for 3 GB
# of 13.
KEEP_BELOW = {"cpu": 1 << 22, "cuda": math.inf}


# ---- 3. Tensor -----------------------------------------------------------------------------------

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
    # packs: None, or for weights what products keep of them (see packed_weight, half_weight).
    # bounds: None, or for ids on a GPU the (least, largest), as the host saw them
    __slots__ = ("buffer", "address", "device", "version", "packs", "core", "bounds")

    def __init__(self, nbytes, device, buffer=None, start=0):
        self.core, self.device = backend(device), device
        self.buffer = self.core.Buffer(nbytes) if buffer is None else buffer
        self.address, self.version = self.buffer.address + start, 0
        self.packs = self.bounds = None


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
    core = property(lambda self: self.storage.core)     # the functions for this device
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
        """A NumPy array that shares this tensor's memory (bf16 as its bits, uint16); on the CPU."""
        if self.device != "cpu":
            raise TypeError(f"array: this tensor lies on '{self.device}': numpy() copies it")
        dtype = DTYPES[self.dtype]
        return np.ndarray(self.shape, dtype, self.storage.buffer, self.offset*dtype.itemsize,
                          [s*dtype.itemsize for s in self.strides])

    def numpy(self):
        """A NumPy copy; bf16 comes as float32."""
        return (cast(self, "f32") if self.dtype == "bf16" else self).bits()

    def bits(self):
        """A NumPy copy in the stored type: bf16 as uint16."""
        if self.device == "cpu":
            return self.array().copy()
        x = packed(self)
        return self.core.read(x.ptr, x.size, DTYPES[x.dtype]).reshape(x.shape)

    def to(self, device):
        """This tensor if it lies there already, else a copy, off the tape."""
        if device == self.device:
            return self
        out = empty(self.shape, self.dtype, device)
        return out.put(self.bits())

    def put(self, values):
        """Overwrite with an array of the stored type and of this shape; counts as no version."""
        if self.device == "cpu":
            self.array()[...] = values
        elif self.contiguous:
            self.core.write(self.ptr, np.ascontiguousarray(values, DTYPES[self.dtype]))
        else:
            dense = empty(self.shape, self.dtype, self.device)
            copy(dense.put(np.broadcast_to(values, self.shape)), self)
        return self

    def item(self):
        """The one element as a Python number; ValueError if there are more."""
        return self.numpy().item()

    def set_(self, values):
        """Overwrite with an array of exactly this shape: the one way to write from outside."""
        values = np.asarray(values)
        if values.shape != self.shape:
            raise ValueError(f"set_: a tensor of shape {self.shape} cannot take {values.shape}")
        if self.dtype == "bf16":
            values = cast(tensor(values.astype(np.float32), "cpu"), "bf16").array()
        self.put(values)
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


DEVICE = "cpu"                      # see set_default_device


def set_default_device(device):
    """Where tensors are made that are not told where, "cpu" or "cuda"; returns what it was."""
    global DEVICE
    backend(device)
    before, DEVICE = DEVICE, device
    return before


def empty(shape, dtype="f32", device=None):
    """A new contiguous tensor on the device, or the default one; its contents are undefined."""
    shape = tuple(shape)
    storage = Storage(math.prod(shape)*ITEMSIZE[dtype], device or DEVICE)
    return Tensor(storage, shape, contiguous_strides(shape), dtype=dtype)


def zeros(shape, dtype="f32", device=None):
    """A new tensor of zeros."""
    out = empty(shape, dtype, device)
    if out.device == "cpu":
        out.array()[...] = 0
    else:
        out.core.memset(out.ptr, 0, out.size*ITEMSIZE[dtype])
    return out


def tensor(values, device=None, requires_grad=False):
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
    out = empty(values.shape, dtype, device).put(values)
    if out.device != "cpu" and dtype == "i64" and values.size:
        out.storage.bounds = int(values.min()), int(values.max())
    out.requires_grad = requires_grad
    return out


def need(true, name, why, *tensors):
    """Raise a ValueError that names the operation, what is wrong and the shapes, unless `true`."""
    if not true:
        shapes = " and ".join(str(t.shape) for t in tensors if t is not None)
        raise ValueError(f"{name}: {why}: {shapes}")


# ---- 4. The table --------------------------------------------------------------------------------

# Parameters that are not of a row's own dtypes, whatever the row.  Weights, their gradients and
# what rows keep of their sums are f32 also where activations are bf16.
FIXED = {"tokens": ("i64",), "targets": ("i64",), "order": ("i64",), "blocks": ("f64",),
         "hyper": ("f64",), "clip": ("f64",), "denominator": ("f64",)} | dict.fromkeys(
             ("w", "dw", "cos", "sin", "q_weight", "k_weight", "dq_weight", "dk_weight", "rstd",
              "lse"), ("f32",))
FLOATS = ("f32", "bf16")


class Row:
    """One operation: a call checks dtypes and devices, and runs the function.

    What a row does on a device is in the core of its tensors: two cores, one table.
    A row whose dtypes are FLOATS takes activations of both; if it `rounds`, bf16 is computed in f32
    and the result rounded, as suits primitives.
    """

    def __init__(self, run, dtypes, bench, flops, rounds):
        self.flops, self.rounds = flops, rounds
        self.name, self.doc, self.signature = run.__name__, run.__doc__, inspect.signature(run)
        self.run, self.dtypes, self.bench = marked(run), dtypes, bench
        self.names, self.__doc__ = tuple(self.signature.parameters), run.__doc__
        self.wants = [FIXED.get(name, dtypes) for name in self.names]
        self.plain = all("f32" in wants for wants in self.wants)

    def __call__(self, *args, **kwargs):
        if self.plain and not kwargs and not DEBUG and not SEVERAL_DEVICES:
            for value in args:
                if value.__class__ is Tensor and value.dtype != "f32":
                    break
            else:                       # as nearly always: half of the time a check by name takes
                return self.run(*args)
        for value, wants in zip(args, self.wants):
            if isinstance(value, Tensor) and value.dtype not in wants:
                self.refuse(value, wants)
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.dtype not in FIXED.get(name, self.dtypes):
                self.refuse(value, FIXED.get(name, self.dtypes))
        if SEVERAL_DEVICES:
            devices = {t.device for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
            if len(devices) > 1:
                raise ValueError(f"{self.name}: tensors lie on {' and '.join(sorted(devices))}: "
                                 "move them with .to(device)")
        run = self.rounded if self.rounds else self.run
        return timed(self, run, args, kwargs) if DEBUG else run(*args, **kwargs)

    def rounded(self, *args, **kwargs):
        """The row in f32; bf16 if no f32 but single numbers went in (what comes of those is f32).
        """
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        dtypes = {t.dtype for t in tensors if t.dtype in FLOATS and t.ndim}
        wide = lambda t: cast(t, "f32") if isinstance(t, Tensor) and t.dtype == "bf16" else t
        out = self.run(*map(wide, args), **{name: wide(t) for name, t in kwargs.items()})
        back = lambda t: cast(t, "bf16") if dtypes == {"bf16"} and t.ndim else t
        return tuple(map(back, out)) if isinstance(out, tuple) else back(out)

    def refuse(self, value, wants):
        """A tensor of another dtype than the row computes with."""
        raise TypeError(f"{self.name}: wants {wants[0]}, got {value.dtype} {value.shape}")


# XTRAIN_NVTX=1 puts ranges with the names of rows and of the parts of a step into a profile of
# Nsight Systems.
NVTX = os.environ.get("XTRAIN_NVTX", "0") not in ("", "0")
if NVTX:
    try:
        from cupy.cuda import nvtx
    except ImportError as e:
        raise ImportError(f"XTRAIN_NVTX: wants CuPy ({e}): {install(driver_version())}") from None


def marked(run):
    """A function as a range of a profile, under XTRAIN_NVTX; else the function itself."""
    if not NVTX:
        return run

    @functools.wraps(run)
    def ranged(*args, **kwargs):
        nvtx.RangePush(run.__name__)
        try:
            return run(*args, **kwargs)
        finally:
            nvtx.RangePop()
    return ranged


TABLE = {}


def row(bench, dtypes=("f32",), flops=None, rounds=False):
    """Decorator: enter a function into the table; bench() returns arguments of a typical size.

    flops(*args) counts the multiply-adds, times two, of a call, where it is products that cost.
    rounds: see Row.
    """
    def enter(run):
        TABLE[run.__name__] = Row(run, dtypes, bench, flops, rounds)
        return TABLE[run.__name__]
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
    """Calls, seconds (without those of rows inside), FLOPs, bytes, and limit of one line."""

    def __init__(self, limit):
        self.calls, self.seconds, self.flops, self.bytes, self.limit = 0, 0.0, 0, 0, limit


SPENT = {}                          # lines by (name, shapes, dtype, device)
inside = [0.0]                      # seconds of the rows inside each open one


def timed(row, run, args, kwargs):
    """A call of a row, on record."""
    inside.append(0.0)
    wait = finished(args)               # a launch returns long before its kernel has run
    start = time.perf_counter()
    out = run(*args, **kwargs)
    wait()
    seconds = time.perf_counter() - start
    own = seconds - inside.pop()
    inside[-1] += seconds
    tensors = [t for t in (*args, *kwargs.values(), *(out if isinstance(out, tuple) else (out,)))
               if isinstance(t, Tensor)]
    shapes = " ".join("x".join(map(str, t.shape)) for t in args if isinstance(t, Tensor))
    dtype = "bf16" if any(t.dtype == "bf16" for t in tensors) else "f32"
    limit = dtype, next((t.device for t in tensors), "cpu")
    line = SPENT.setdefault((row.name, shapes if DEBUG > 1 else "", limit), Spent(limit))
    line.calls, line.seconds = line.calls + 1, line.seconds + own
    line.flops += row.flops(*args) if row.flops else 0
    line.bytes += builtins.sum({t.ptr: t.size*DTYPES[t.dtype].itemsize for t in tensors}.values())
    return out


def finished(args):
    """Wait for the GPU if a row's arguments lie on one; returns how to wait again."""
    device = next((t.device for t in args if isinstance(t, Tensor)), DEVICE)
    wait = (lambda: None) if device == "cpu" else cuda().synchronize
    wait()
    return wait


def report():
    """Print what was recorded, the most expensive first, against the limits measured now."""
    limits = sorted({s.limit for s in SPENT.values()})
    peak = {limit: peak_flops(limit[0], device=limit[1]) for limit in limits}
    stream = {device: bandwidth(device=device) for device in sorted({d for _, d in limits})}
    peaks = " and ".join(f"{p/1e9:.0f} GFLOP/s ({d})" for (d, _), p in peak.items())
    speeds = " and ".join(f"{b/1e9:.1f} GB/s on " + (
        f"{threads()} threads ({ISA})" if d == "cpu" else cuda().name) for d, b in stream.items())
    print(f"xtrain: {sum_of('calls')} calls, {sum_of('seconds'):.3f} s; limits {peaks}, {speeds}\n"
          f"{'operation':24}{'calls':>7}{'ms':>10}{'%':>6}{'GFLOP/s':>9}{'GB/s':>7}{'limit':>7}"
          "  dtype and shapes", file=sys.stderr)
    for (name, shapes, _), s in sorted(SPENT.items(), key=lambda item: -item[1].seconds):
        seconds = max(s.seconds, 1e-9)
        limit = max(s.flops/peak[s.limit], s.bytes/stream[s.limit[1]])/seconds
        print(f"{name:24}{s.calls:7}{1e3*seconds:10.2f}{100*seconds/sum_of('seconds'):6.1f}"
              f"{s.flops/seconds/1e9:9.1f}{s.bytes/seconds/1e9:7.1f}{limit:7.0%}  "
              f"{s.limit[0]:4} {shapes}", file=sys.stderr)


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


# ---- 5. Primitives -------------------------------------------------------------------------------

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
    x.core.copy_strided(x.ptr, out.ptr, x.ndim, sa, xa, oa, DTYPES[x.dtype].itemsize)
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
    a.core.binary(kind, a.ptr, b.ptr, out.ptr, len(shape), da, aa, ba)
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
        x.core.axpy(1.0, x.ptr, out.ptr, x.size, x.dtype == "bf16")
    else:
        copy(add(out, x), out)
    return out


@row(lambda: (sample(4096, 1024), 2.0), FLOATS, rounds=True)
def scale(x, factor):
    """x * factor for a Python number."""
    x = packed(x)
    out = empty(x.shape, "f32", x.device)
    x.core.scale(factor, x.ptr, out.ptr, x.size)
    return out


@row(lambda: (sample(4096, 1024), 0.0), FLOATS)
def fill(out, value):
    """Every element of a contiguous tensor := value."""
    need(out.contiguous, "fill", "not contiguous", out)
    out.core.fill(out.ptr, value, out.size, out.dtype == "bf16")
    return out


def activation(kind, x):
    """f(x) elementwise, f being a kind of the core's unary functions."""
    x = packed(x)
    out = empty(x.shape, "f32", x.device)
    x.core.unary(kind, x.ptr, out.ptr, x.size)
    return out


def activation_backward(kind, dy, x):
    """dy * f'(x) elementwise."""
    dy, x = packed(dy), packed(x)
    dx = empty(x.shape, "f32", x.device)
    x.core.unary_backward(kind, x.ptr, dy.ptr, dx.ptr, x.size)
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
    x.core.sum_rows(last.ptr, out.ptr, out.size, x.size//max(out.size, 1))
    return out


@row(lambda: (sample(4096, 1024),), FLOATS, rounds=True)
def softmax(x):
    """Over the last axis, the maximum subtracted."""
    need(x.ndim and x.shape[-1], "softmax", "wants [..., at least one class], got", x)
    x = packed(x)
    out = empty(x.shape, "f32", x.device)
    x.core.softmax(x.ptr, out.ptr, x.size//x.shape[-1], x.shape[-1])
    return out


@row(lambda: (sample(4096, 1024), softmax(sample(4096, 1024))), FLOATS, rounds=True)
def softmax_backward(dy, y):
    """y * (dy - sum(dy * y)), from the result y."""
    dy, y = packed(dy), packed(y)
    dx = empty(y.shape, "f32", y.device)
    y.core.softmax_backward(y.ptr, dy.ptr, dx.ptr, y.size//y.shape[-1], y.shape[-1])
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
    a, b = rounded_for(out, a, b)
    (a, lda, ta), (b, ldb, tb), ldc = operand(a), operand(b), out.strides[-2] if m > 1 else n
    if not batch or math.prod(batch) == 1:
        half = 0 if a.dtype == b.dtype == out.dtype == "f32" else halves(a, b, out)
        a.core.gemm(a.ptr, lda, ta, b.ptr, ldb, tb, out.ptr, ldc, m, n, k, acc,
                  0 if b.storage.packs is None else packed_weight(b, ldb, tb, m, n, k, half), 0, 0,
                  0, 0, 0, 0, 1, 1.0, half)
    else:
        at = np.stack([starts(t, batch) for t in (a, b, out)], 1)
        a.core.gemm_batch(a.ptr, lda, ta, b.ptr, ldb, tb, out.ptr, ldc, m, n, k, acc, len(at),
                        at.ctypes.data, halves(a, b, out))
    return out


def halves(a, b, c):
    """Which arrays of a product are bf16, as the core's flags; 0 for a product in f32."""
    return ((core.HALF_A if a.dtype == "bf16" else 0) | (core.HALF_B if b.dtype == "bf16" else 0)
            | (core.HALF_C if c.dtype == "bf16" else 0))


def rounded_for(out, *operands):
    """The operands of a product, in bf16 if any of them or the result is: what a GPU multiplies.

    The CPU's core rounds on its own, as it packs.
    """
    if out.device == "cpu" or all(t.dtype == "f32" for t in (out, *operands)):
        return operands
    return [t if t.dtype == "bf16" else half_weight(t) for t in operands]


def half_weight(w):
    """w in bf16; of a weight the copy is kept until its version changes.

    On a GPU that is the mirror of the whole arena, which `adamw` keeps up.  On a CPU products of
    few rows, a token's, read weights in place: half the bytes are half the time.
    """
    packs = w.storage.packs
    if packs is None:
        return cast(w, "bf16")
    if w.device != "cpu":
        return Tensor(mirror(w).storage, w.shape, w.strides, w.offset, "bf16")
    key = "bf16", w.offset, w.shape, w.strides
    if key not in packs or packs[key][0] != w.version:
        packs[key] = w.version, cast(w, "bf16")
    return packs[key][1]


def mirror(w):
    """The bf16 copy of the arena that the weight w lies in, made again if w was written to since.
    """
    packs, version = w.storage.packs, w.version
    if "mirror" not in packs:
        packs["mirror"] = None, empty((w.storage.buffer.nbytes//4,), "bf16", w.device)
    made_from, out = packs["mirror"]
    if made_from != version:
        w.core.cast_bf16(w.storage.address, out.ptr, out.size)
        packs["mirror"] = version, out
    return out


def refresh(w):
    """Bring the bf16 mirror of an arena up to date, if it has one: a replay does not ask for that.
    """
    if w.storage.packs and "mirror" in w.storage.packs:
        mirror(w)


def packed_weight(b, ldb, tb, m, n, k, half):
    """Address of op(b) [k, n] packed for products, if b is a weight that is used again; else 0.

    A first use packs as it goes.  The second use of a version shows that there are several
    (micro-steps, recompute, chunks of the head, evaluation): from then on the panels are kept until
    the version changes, at the cost of their memory.  No bit depends on it.
    """
    packs = b.storage.packs
    if packs is None or m < 16 or b.device != "cpu":
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
    dlogits, losses, targets = copy(logits), empty((rows,), "f64", logits.device), packed(targets)
    counted, loss = count(targets), empty((), "f32", logits.device)
    logits.core.cross_entropy(dlogits.ptr, cols, targets.ptr, losses.ptr, rows, cols, 1.0, 1, cols,
                              denominator_at=counted.ptr)
    logits.core.mean_loss(losses.ptr, rows, 1.0, loss.ptr, counted.ptr)
    return loss, dlogits


def count(targets):
    """How many targets count, f64 [1]: those of 0 and more; 1 if none does, to divide by."""
    targets, out = packed(targets), empty((1,), "f64", targets.device)
    targets.core.count(targets.ptr, targets.size, out.ptr)
    return out


def check_ids(name, tokens, below, lowest=0):
    """Token ids outside [lowest, below) are an IndexError, before they become a wild pointer."""
    if tokens.dtype != "i64":
        raise TypeError(f"{name}: wants i64 ids, got {tokens.dtype} {tokens.shape}")
    bounds = tokens.storage.bounds if tokens.size else (0, 0)
    if bounds is None:                  # of ids that came from the host it is known
        dense = packed(tokens)
        bounds = dense.core.id_range(dense.ptr, dense.size)
        tokens.storage.bounds = None if tokens.device == "cpu" else bounds
    check_bounds(name, bounds, lowest, below, tokens.shape)


def check_host(name, ids, lowest, below):
    """Refuse an int64 array that is not a non-empty [batch, seq] of ids in [lowest, below)."""
    if ids.ndim != 2 or not ids.size:
        raise ValueError(f"{name}: wants a non-empty [batch, seq], got {ids.shape}")
    dense = np.ascontiguousarray(ids)
    check_bounds(name, core.id_range(dense.ctypes.data, dense.size), lowest, below, ids.shape)


def check_bounds(name, bounds, lowest, below, shape):
    """IndexError unless (least, largest) of some ids lie in [lowest, below)."""
    if not lowest <= bounds[0] <= bounds[1] < below:
        raise IndexError(f"{name}: ids must lie in [{lowest}, {below}), got {bounds[0]} to "
                         f"{bounds[1]} in {shape}")


# ---- 6. The model's rows -------------------------------------------------------------------------

@row(lambda: (ids(8, 512), sample(1000, 512)))
def embed(tokens, w, dtype="f32"):
    """w[tokens]: ids [...] and w [vocab, dim] -> [..., dim] of the dtype."""
    check_ids("embed", tokens, w.shape[0])
    tokens, w = packed(tokens), packed(w)
    out = empty((*tokens.shape, w.shape[1]), dtype, w.device)
    w.core.embed(tokens.ptr, w.ptr, out.ptr, tokens.size, w.shape[1], dtype == "bf16")
    return out


@row(lambda: (sample(4096, 512), ids(4096), argsort(ids(4096)), zeros((1000, 512))), FLOATS)
def embed_backward(dy, tokens, order, dw):
    """dw[token] += rows of dy, by token in `order`, the stable argsort of the tokens."""
    need(order.size == tokens.size and dy.size == tokens.size*dw.shape[-1], "embed_backward",
         "dy, order, tokens and dw do not fit", dy, order, tokens, dw)
    check_ids("embed_backward", order, tokens.size)
    check_ids("embed_backward", tokens, dw.shape[0])
    dy, tokens, order = packed(dy), packed(tokens), packed(order)
    dw.core.embed_backward(tokens.ptr, order.ptr, dy.ptr, dw.ptr, tokens.size, dw.shape[1],
                        dy.dtype == "bf16")
    return dw


def argsort(tokens):
    """The stable argsort of the flattened ids; the loader hands it over with each batch."""
    return tensor(np.argsort(tokens.numpy().reshape(-1), kind="stable"), tokens.device)


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
    x.core.add_rmsnorm(x.ptr, address(residual), w.ptr, 0 if residual is None else total.ptr, y.ptr,
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
    dy.core.add_rmsnorm_backward(dy.ptr, address(dtotal), total.ptr, w.ptr, rstd.ptr, out.ptr, acc,
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
    first_sequence: int     # number of row 0 of the batch in the whole run; on a GPU also a tensor
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
    x, w = rounded_for(out, x, w)
    (w, ldw, tw), x, half = operand(w), packed(x), halves(x, w, out)
    n, k = w.shape
    x.core.gemm(x.ptr, k, False, w.ptr, ldw, not tw, out.ptr, n, m, n, k, False,
              packed_weight(w, ldw, not tw, m, n, k, half), *epilogue, half=half)


@row(lambda: (sample(8, 512, 512), Dropout(0.1, 1, 0, 0)), FLOATS)
def dropout(x, how):
    """x * mask / (1 - p) for x [batch, seq, dim]; applied to dy it is its own backward."""
    need(x.ndim == 3, "dropout", "wants [batch, seq, dim], got", x)
    x = packed(x)
    out = empty(x.shape, x.dtype, x.device)
    x.core.dropout(x.ptr, out.ptr, *x.shape, how.first_sequence, how.site, how.seed, how.threshold,
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
    qkv.core.qk_norm_rope(qkv.ptr, out.ptr, address(q_weight), address(k_weight), cos.ptr, sin.ptr,
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
    dout.core.qk_norm_rope_backward(dout.ptr, qkv.ptr, address(q_weight), address(k_weight),
                               address(dq_weight), address(dk_weight), cos.ptr, sin.ptr,
                               address(rstd), B*S, S, heads, kv_heads, head_dim, half)
    return dout


def cos_sin(seq, head_dim, theta=10000.0, start=0, device=None):
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
    q.core.attention(q.ptr, k.ptr, v.ptr, out.ptr, lse.ptr, at, scale, half)
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
    q.core.attention_backward(q.ptr, k.ptr, v.ptr, o.ptr, lse.ptr, do.ptr, dq.ptr, dk.ptr, dv.ptr,
                              at, scale, half)
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
    gu.core.swiglu(gu.ptr, h.ptr, gu.size//max(1, gu.shape[-1]), h.shape[-1], gu.dtype == "bf16")
    return h


@row(lambda: (sample(4096, 1365), sample(4096, 2*1365)), FLOATS)
def swiglu_backward(dh, gu):
    """gu := d(gu), dh := h, in place, from dh [..., ffn] and gu [..., 2*ffn] = gate | up.

    -> (d(gu), h): what the products on both sides need, of one pass.
    """
    half = alike("swiglu_backward", dh, gu)
    dh = packed(dh)
    gu.core.swiglu_backward(gu.ptr, dh.ptr, dh.size//max(1, dh.shape[-1]), dh.shape[-1], half)
    gu.storage.version += 1
    dh.storage.version += 1
    return gu, dh


# Rows of logits that exist at a time: 2^23 elements are 32 MB, enough for the head's gradient
# (which is read and written once a chunk) to be bound by arithmetic, not by memory.
CHUNK_ELEMENTS = 1 << 23
GPU_CHUNK_ELEMENTS = 1 << 28        # 1 GB: a GPU's products want thousands of rows
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
    denominator: a number, or on a GPU a tensor, f64 [1].
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
    narrow = dim <= NARROW and x.device == "cpu"
    head, elements = narrow_head if narrow else wide_head, CHUNK_ELEMENTS
    elements = CHUNK_ELEMENTS if x.device == "cpu" else GPU_CHUNK_ELEMENTS
    most = NARROW_ROWS if narrow else max(128, elements//padded)
    chunks = max(1, -(-rows//most))
    step = max(1, min(rows, -(-rows//chunks//32)*32))       # chunks of equal size, in whole tiles
    losses = empty((rows,), "f64", x.device)
    cut = lambda t, start: t.view((min(step, rows - start), dim), offset=t.offset + start*dim)
    for start in range(0, max(1, rows), step):      # without rows dw is 0
        head(cut(x, start), w, targets.ptr + start*8, losses.ptr + start*8, vocab,
             weight, denominator, dx and (cut(dx[0], start), dx[1]),
             dw and (dw[0], dw[1] or start > 0))
    loss = empty((), "f32", x.device)
    divisor, at = number(denominator)
    x.core.mean_loss(losses.ptr, rows, divisor, loss.ptr, at)
    return loss


def number(value):
    """A number as (value, address of a double on the device or 0), one of which counts."""
    return (1.0, value.ptr) if isinstance(value, Tensor) else (value, 0)


def wide_head(x, w, targets, losses, vocab, weight, denominator, dx, dw):
    """A chunk of head_loss (targets, losses: addresses); its logits become their gradient."""
    rows, padded = x.shape[0], w.shape[0]
    half = x.dtype == "bf16"
    logits = matmul(x, transposed(w), empty((rows, padded), "f32", x.device))
    divisor, at = number(denominator)
    x.core.cross_entropy(logits.ptr, padded, targets, losses, rows, vocab, weight/divisor,
                         bool(dx or dw), padded, half, at)
    if half:                            # the gradient lies in the first half of each row
        logits = Tensor(logits.storage, logits.shape, (2*padded, 1), 0, "bf16")
    if dx:
        matmul(logits, w, *dx)
    if dw:
        matmul(transposed(logits), x, *dw)


def narrow_head(x, w, targets, losses, vocab, weight, denominator, dx, dw):
    """A chunk of head_loss (targets, losses: addresses) whose logits are never stored."""
    (out, add), (out_w, add_w) = dx or (None, False), dw or (None, False)
    x.core.head_loss(x.ptr, w.ptr, targets, losses, *x.shape, w.shape[0], vocab,
                     weight/denominator, address(out), add, address(out_w), add_w,
                     x.dtype == "bf16")


def transposed(t):
    """The last two axes swapped, as a view."""
    swap = lambda sizes: (*sizes[:-2], sizes[-1], sizes[-2])
    return t.view(swap(t.shape), swap(t.strides))


# ---- 7. Training's rows --------------------------------------------------------------------------

@row(lambda: (sample(1 << 22),))
def sumsq(x):
    """fp64 sums of squares of blocks of 65,536 elements, f64 [blocks].

    The global norm is their sum in order: it does not depend on who computed which.
    """
    x = packed(x)
    out = empty((-(-x.size//65536),), "f64", x.device)
    x.core.sumsq(x.ptr, out.ptr, x.size)
    return out


@row(lambda: (sumsq(sample(1 << 22)), 1.0, zeros((4,), "f64")), dtypes=("f64",))
def grad_clip(blocks, limit, out):
    """out f64 [4] := norm, factor min(1, limit/(norm + 1e-6)), finite (1 or 0), and a flag.

    The flag stays 1 once a norm was not finite.  The factor is torch's clip_grad_norm_; a limit of
    inf does not clip.  The norm stays on the device, where `adamw` reads it.
    """
    blocks.core.grad_clip(blocks.ptr, blocks.size, limit, out.ptr)
    return out


@row(lambda: (sample(1 << 20), sample(1 << 20), zeros((1 << 20,)), zeros((1 << 20,)),
              tensor64([1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05]), tensor64([1.0, 1.0, 1.0, 0.0])))
def adamw(p, g, m, v, hyper, clip):
    """One step of AdamW (Loshchilov and Hutter, 2019) with torch's arithmetic, in place.

    hyper f64 [7]: lr, beta1, beta2, eps, weight decay, 1 - beta1^t, 1 - beta2^t; clip f64 [4] from
    `grad_clip`: a norm that is not finite leaves p, m and v as they were.  g := 0 as it is read.
    """
    half = 0
    if p.storage.packs and "mirror" in p.storage.packs:
        half = half_weight(p).ptr
    p.core.adamw(p.ptr, g.ptr, m.ptr, v.ptr, half, p.size, hyper.ptr, clip.ptr)
    wrote(p)
    return p


def wrote(p):
    """Note that a parameter's storage was written to, its bf16 mirror (if there is one) included.
    """
    p.storage.version += 1
    if p.storage.packs and "mirror" in p.storage.packs:
        p.storage.packs["mirror"] = p.version, p.storage.packs["mirror"][1]


def tensor64(values, device=None):
    """Numbers as f64, for settings that a kernel reads."""
    values = np.asarray(values, np.float64)
    return empty(values.shape, "f64", device).put(values)


@row(lambda: (sample(256, 512), 5))
def newton_schulz(x, steps=5):
    """x [rows, cols] -> nearly orthogonal, singular values near 1 (Muon; Jordan et al., 2024).

    X := x/|x|, then `steps` times X := 3.4445 X + (-4.7750 A + 2.0315 A A) X with A = X X^T, on the
    wide orientation, where A is the smaller square.
    """
    need(x.ndim == 2, "newton_schulz", "wants a matrix, got", x)
    tall = x.shape[0] > x.shape[1]
    norm = math.sqrt(np.add.accumulate(sumsq(x).numpy())[-1])
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
    (x.core.cast_bf16 if dtype == "bf16" else x.core.cast_f32)(x.ptr, out.ptr, x.size)
    return out


@row(lambda: ((8, 512, 512), Dropout(0.1, 1, 0, 0)), dtypes=("u8",))
def philox_mask(shape, how):
    """The mask of a `Dropout` over [batch, seq, dim]: u8, 1 where kept."""
    B, S, dim = shape
    out = empty(shape, "u8")
    out.core.philox_mask(out.ptr, B, how.first_sequence, S, dim, how.site, how.seed, how.threshold)
    return out


# ---- 8. Programs ---------------------------------------------------------------------------------
# A training step is the same thousand launches over and over, and launching from Python takes
# longer than a small model's kernels run.  So on a GPU it is recorded once, as a CUDA graph, and
# from then on replayed with one call.  What changes from step to step lies in tensors of a fixed
# place, which the host fills before each replay; all else a replay finds where the recording left
# it.

class Slot:
    """A pinned piece of host memory, from which copies run while the host goes on, and an event:
    the last copy from it is done."""

    def __init__(self, gpu, nbytes):
        self.memory = gpu.cupy.cuda.alloc_pinned_memory(nbytes)
        self.bytes = np.frombuffer(self.memory, np.uint8, nbytes)
        self.event = gpu.cupy.cuda.Event(disable_timing=True)


class Program:
    """run(*fixed, **inputs) on a device, for inputs that the host has: numbers, arrays of them.

    On a CPU every call runs the function.  On a GPU the first does, in a pool that only programs
    use; the second is recorded, and replayed from then on: so the recording finds all its memory in
    the pool, and nobody else gets that memory afterwards.  `run` gets arrays as tensors, and there
    numbers too, [1], i64 or f64.  Its result is returned; of a replay it is the same tensor again.
    Shapes may not change, nor the objects `fixed`, nor anything else that `run` reads from Python.
    """

    def __init__(self, run, device, record=True):
        self.run, self.device, self.record = run, device, record and not DEBUG
        self.calls, self.tensors, self.graph, self.out = 0, None, None, None

    def __call__(self, *fixed, **inputs):
        if self.device == "cpu":
            lift = lambda x: (tensor if is_ids(x) else tensor64)(x, "cpu")
            return self.run(*fixed, **{name: lift(x) if isinstance(x, np.ndarray) else x
                                       for name, x in inputs.items()})
        gpu = cuda()
        self.upload(gpu, {name: np.atleast_1d(np.asarray(x, np.int64 if is_ids(x) else np.float64))
                          for name, x in inputs.items()})
        with gpu.allocating(gpu.program_pool):
            if self.record and self.calls and self.graph is None:
                self.capture(gpu, fixed)
            if self.graph is None:
                self.out = self.run(*fixed, **self.tensors)
            else:
                self.graph.launch(gpu.stream)
        self.calls += 1
        return self.out

    @property
    def replayed(self):
        """Was the last call a replay, of which Python saw nothing?"""
        return self.graph is not None

    def capture(self, gpu, fixed):
        """Record a call as a graph; where that cannot be done, say why and go on without.

        While recording nothing is computed: if it fails, the inputs and all that the call would
        have written are as they were, for the call without a graph that follows.
        """
        self.out, gpu.kept = None, []   # what `out` holds can be used again
        try:
            gpu.stream.begin_capture()
            self.out = self.run(*fixed, **self.tensors)
            self.graph, self.kept = gpu.stream.end_capture(), gpu.kept
            self.graph.upload(gpu.stream)       # what memory the driver wants for it, it wants now
            gpu.recorded = True
        except BaseException as e:
            with contextlib.suppress(RuntimeError):     # that it has failed, once more
                gpu.stream.end_capture()                # or the stream would go on recording
            self.out, self.graph, self.kept, self.record = None, None, None, False
            if not isinstance(e, Exception):            # Ctrl-C
                raise
            reason = (str(e) or type(e).__name__).splitlines()[0]
            say(f"no CUDA graph of {self.run.__name__} ({reason}): going on kernel by kernel, as "
                "with --no-graph")
        finally:
            gpu.kept = None

    def upload(self, gpu, arrays):
        """Copy the inputs to their places, without waiting for the device.

        One copy for all of them, from one of two pinned slots in turn: the host may be filling one
        while the copy from the other waits for its place in the stream.  It is never more than two
        calls ahead; being held back so, by a busy device, is not a wait that lets one run dry.
        """
        if self.tensors is None:
            self.place(gpu, arrays)
        self.slots.reverse()
        slot = self.slots[0]
        if not slot.event.done:
            gpu.held += 1
            slot.event.synchronize()
        for (start, x), t in zip(self.layout(arrays), self.tensors.values()):
            need(t.shape == x.shape, "a recorded step", "inputs may not change their shape", t)
            slot.bytes[start:start + x.nbytes] = x.reshape(-1).view(np.uint8)
        gpu.runtime.memcpyAsync(self.room.address, slot.memory.ptr, self.room.nbytes,
                                gpu.runtime.memcpyHostToDevice, gpu.stream.ptr)
        slot.event.record(gpu.stream)

    @staticmethod
    def layout(arrays):
        """Where in the slots each array starts, with the array."""
        starts = itertools.accumulate((-(-x.nbytes//256)*256 for x in arrays.values()), initial=0)
        return list(zip(starts, arrays.values()))

    def place(self, gpu, arrays):
        """Make the inputs' tensors: views of one buffer."""
        start, last = self.layout(arrays)[-1]
        self.room, self.tensors = gpu.Buffer(start + last.nbytes), {}
        self.slots = [Slot(gpu, self.room.nbytes) for _ in range(2)]
        for name, (start, x) in zip(arrays, self.layout(arrays)):
            storage = Storage(x.nbytes, self.device, self.room, start)
            if is_ids(x):               # whoever calls has checked them
                storage.bounds = 0, 0
            self.tensors[name] = Tensor(storage, x.shape, contiguous_strides(x.shape),
                                        dtype="i64" if is_ids(x) else "f64")


def is_ids(x):
    """Is it whole numbers, one or an array?"""
    return np.asarray(x).dtype.kind in "iu"
