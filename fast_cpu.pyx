# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=False
"""fast_cpu: every CPU kernel of xtrain, written once and compiled once per instruction set.

How it reads, top to bottom:

1. Vectors and team    the few lines of C that name vector types, threads, scratch
2. Buffer pool         memory that a training step recycles without page faults
3. exp and friends     one exponential for softmax, SiLU, GELU and the loss
4. Elementwise         strided copies, broadcasting arithmetic, activations, casts
5. Philox              counter-based random words, the dropout masks
6. Matrix products     packed panels, register tiles, epilogues in the store
7. Row operations      norms, RoPE, softmax, SwiGLU, the loss, embeddings
8. Attention           tiles of queries and keys with an online softmax
9. Narrow heads        a loss and its gradients from tiles of logits that are never stored
10. Optimizer          sums of squares and AdamW over the flat parameter buffer

Conventions.  The functions that Python calls take plain integer addresses (a memoryview costs 240
ns a call, an address 10) and sizes in elements; every pointer is to contiguous fp32 unless the
docstring says otherwise, and nothing here checks shapes: `tensor.py` does.  One call opens at most
one parallel region.  Work is cut by shape alone and every sum has a fixed order, so a result has
the same bits for any number of threads.  Kernels are `noexcept nogil`; constants are written
`<float>1.5`, because a bare one would promote the arithmetic to double.

bf16 is how activations may be stored, not another arithmetic.  Row kernels are written once over
`real`, an element of either type, and compute in fp32.  Products and attention take operands of
bf16 in the tiles that fp32 takes in three parts, only in one (section 6), by AMX, by AVX-512 BF16
or by taking words apart.  A flag `half` says that activations are bf16; weights, their gradients
and statistics are fp32 always.
"""
from cython.parallel cimport parallel, prange, threadid
from cpython.buffer cimport PyBuffer_FillInfo
from libc.math cimport INFINITY, exp2, isfinite, log, logf, sqrt, sqrtf
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset


# ---- 1. Vectors and team ----------------------------------------------------------------------
# GCC's and clang's vector extension: Cython takes `vf` for a float, so `a*b + c` passes straight
# through to C, where it is VL floats wide.  MR x NR is the register tile of the matrix product:
# MR*NV accumulators, NV vectors of B and one broadcast of A must fit in the register file
# (AVX-512: 28 + 2 + 1 of 32; AVX2 and SSE2: 12 + 2 + 1 of 16; NEON: 24 + 3 + 1 of 32).
# It is as large as they allow, since MR + NV loads feed MR*NV multiply-adds: 16 feed 28 with
# AVX-512, which at two of each a cycle leaves the loads time to spare.  Vectors are `aligned(4)`
# because rows start anywhere, and `may_alias` because they look at plain floats and ints.

cdef extern from *:
    """
    #include <stdlib.h>
    #if defined(_WIN32)
    #error "xtrain builds on Linux and macOS (on Windows: inside WSL)"
    #endif
    #include <sys/mman.h>
    #if defined(__AVX512F__)
    enum { VL = 16, MR = 14, NV = 2 };
    #define LANES(F, s) F(s,0),F(s,1),F(s,2),F(s,3),F(s,4),F(s,5),F(s,6),F(s,7), \
        F(s,8),F(s,9),F(s,10),F(s,11),F(s,12),F(s,13),F(s,14),F(s,15)
    #elif defined(__AVX2__)
    enum { VL = 8, MR = 6, NV = 2 };
    #define LANES(F, s) F(s,0),F(s,1),F(s,2),F(s,3),F(s,4),F(s,5),F(s,6),F(s,7)
    #else
    #if defined(__aarch64__)
    enum { VL = 4, MR = 8, NV = 3 };
    #else
    enum { VL = 4, MR = 6, NV = 2 };
    #endif
    #define LANES(F, s) F(s,0),F(s,1),F(s,2),F(s,3)
    #endif
    enum { NR = NV * VL };
    typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
    typedef int vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
    typedef unsigned vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
    typedef unsigned short vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    typedef unsigned u32a __attribute__((may_alias));
    #define VZERO ((vf){0})
    #define HZERO ((vh){0})
    #if defined(__AVX512F__)
    #include <immintrin.h>
    #endif
    /* VL bf16 as fp32, and back, rounded to nearest even; a NaN stays one (see to_bf16) */
    #if defined(__AVX512F__)
    #define WORDS(h) ((vu)_mm512_cvtepu16_epi32((__m256i)(h)))
    #else
    #define WORDS(h) __builtin_convertvector(h, vu)
    #endif
    #define WIDEN(h) ((vf)(WORDS(h) << 16))
    #define ZIP(x, y) ((vf)(WORDS(x) | WORDS(y) << 16))     /* words of two, x below y */
    #if defined(__AVX512BF16__)
    enum { WITH_DOT = 1 };
    #define NARROW(x) ((vh)_mm512_cvtneps_pbh((__m512)(x)))
    #define ROUND(x) WIDEN(NARROW(x))
    /* both rounded at once, x before y; words of two, x below y */
    #define BOTH(x, y) ((vf)_mm512_cvtne2ps_pbh((__m512)(y), (__m512)(x)))
    static inline vf PAIRS(vf x, vf y) {
        const vh zip = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
        const __m512i order = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)zip),
            _mm256_add_epi16((__m256i)zip, _mm256_set1_epi16(8)), 1);
        return (vf)_mm512_permutexvar_epi16(order, (__m512i)BOTH(x, y)); }
    /* fp32 sums += products of pairs of bf16, each pair in a word */
    #define DOT(s, x, y) ((vf)_mm512_dpbf16_ps((__m512)(s), (__m512bh)(x), (__m512bh)(y)))
    #else
    enum { WITH_DOT = 0 };
    static inline vf ROUND(vf x) {
        vu u = (vu)x, nan = (vu)(x != x), upper = u & 0xffff0000u;
        return (vf)(((u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u & ~nan)
                    | ((upper | 0x400000u) & nan)); }
    #define NARROW(x) __builtin_convertvector((vu)ROUND(x) >> 16, vh)
    #define BOTH(x, y) (x)              /* these two are not called */
    #define PAIRS(x, y) PAIR(ROUND(x), ROUND(y))
    #define DOT(s, x, y) ((s) + LOWER(x)*LOWER(y) + UPPER(x)*UPPER(y))
    #endif
    /* past the caches, to a multiple of the vector's size */
    #if defined(__AVX512F__)
    enum { WITH_STREAM = 1 };
    #define STREAM(p, x) _mm512_stream_ps((float*)(p), (__m512)(x))
    #define STREAM_HALF(p, h) _mm256_stream_si256((__m256i*)(p), (__m256i)(h))
    #else
    enum { WITH_STREAM = 0 };
    #define STREAM(p, x) (void)(x)
    #define STREAM_HALF(p, h) (void)(h)
    #endif
    /* a product rounded by itself: of a*b - c*d gcc fuses one to a multiply-add in this copy of a
       loop, the other in that, and another again in the next build */
    #if defined(__AVX512F__)
    static inline vf ROUNDED(vf x) { __asm__("" : "+v"(x)); return x; }
    #elif defined(__AVX__)
    static inline vf ROUNDED(vf x) { __asm__("" : "+x"(x)); return x; }
    #else
    static inline vf ROUNDED(vf x) { __asm__("" : "+m"(x)); return x; }
    #endif
    /* lane-wise a > b ? a : b (b where either is NaN): an instruction, which gcc does not see */
    #if defined(__AVX__)
    static inline vf vmax(vf a, vf b) {
        vf m; __asm__("vmaxps %2, %1, %0" : "=v"(m) : "v"(a), "v"(b)); return m; }
    #else
    static inline vf vmax(vf a, vf b) { vi m = a > b; return (vf)(((vi)a & m) | ((vi)b & ~m)); }
    #endif
    static inline int f2i(float x) { int i; __builtin_memcpy(&i, &x, 4); return i; }
    static inline float i2f(int i) { float x; __builtin_memcpy(&x, &i, 4); return x; }
    /* VL x VL transpose of words, those after `rows` zero: butterflies of distance 1, 2, 4, 8 */
    #define LOW(s, t) (((t) & (s)) ? (t) - (s) + VL : (t))
    #define HIGH(s, t) (((t) & (s)) ? (t) + VL : (t) + (s))
    #if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
    #define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
    #else
    #define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
    #endif
    #define BUTTERFLY(s) for (int i = 0; i < VL; i++) if (!(i & s)) { vi a = r[i], b = r[i + s]; \
        r[i] = SHUFFLE(a, b, LANES(LOW, s)); \
        r[i + s] = SHUFFLE(a, b, LANES(HIGH, s)); }
    static inline void transpose_tile(const float* src, Py_ssize_t ls, Py_ssize_t rows, float* dst,
                                      Py_ssize_t ld) {
        vi r[VL];
        for (int i = 0; i < VL; i++) r[i] = i < rows ? *(const vi*)(src + i * ls) : (vi){0};
        BUTTERFLY(1) BUTTERFLY(2)
    #if defined(__AVX2__)
        BUTTERFLY(4)
    #endif
    #if defined(__AVX512F__)
        BUTTERFLY(8)
    #endif
        for (int i = 0; i < VL; i++) *(vi*)(dst + i * ld) = r[i];
    }
    #if defined(_OPENMP)
    enum { WITH_OPENMP = 1 };
    #else
    enum { WITH_OPENMP = 0 };
    #endif
    #if defined(MADV_HUGEPAGE)
    #define huge_pages(p, n) madvise(p, n, MADV_HUGEPAGE)
    #else
    #define huge_pages(p, n) 0
    #endif
    /* Tiles of bf16 with fp32 sums: 0 and 1 are sums, 2 rows of A, 3 and 4 columns of B.  No more,
       or AMX crawls beside a busy hyper-thread, which takes its share of the physical tiles: with 8
       in use a multiply takes 27 ns there, with these 5 it takes 9; alone 7.4 and 7.9. */
    #if defined(__AMX_BF16__)
    enum { WITH_AMX = 1 };
    #define AMX_OPEN() do { \
        struct { unsigned char palette, no[15]; unsigned short bytes[16]; unsigned char row[16]; } \
            shape = {1, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}}; \
        _tile_loadconfig(&shape); } while (0)
    #define AMX_CLOSE() _tile_release()
    #define AMX_ZERO() do { _tile_zero(0); _tile_zero(1); } while (0)
    #define AMX_LOAD(c, ld) do { \
        _tile_loadd(0, c, 4*(ld)); _tile_loadd(1, (c) + 16, 4*(ld)); } while (0)
    #define AMX_A(p) _tile_loadd(2, p, 64)
    #define AMX_B(p) do { _tile_loadd(3, p, 64); _tile_loadd(4, (p) + 256, 64); } while (0)
    #define AMX_ADD() do { _tile_dpbf16ps(0, 2, 3); _tile_dpbf16ps(1, 2, 4); } while (0)
    #define AMX_STORE(c, ld) do { \
        _tile_stored(0, c, 4*(ld)); _tile_stored(1, (c) + 16, 4*(ld)); } while (0)
    #else
    enum { WITH_AMX = 0 };
    #define AMX_OPEN() (void)0
    #define AMX_CLOSE() (void)0
    #define AMX_ZERO() (void)0
    #define AMX_LOAD(c, ld) (void)(c)
    #define AMX_A(p) (void)(p)
    #define AMX_B(p) (void)(p)
    #define AMX_ADD() (void)0
    #define AMX_STORE(c, ld) (void)(c)
    #endif
    /* the halves of words, which are bf16, as fp32; two of these in one word, x below y */
    #define UPPER(x) ((vf)((vu)(x) & 0xffff0000u))
    #define LOWER(x) ((vf)((vu)(x) << 16))
    /* 1/x for normal x; AVX-512: 14 bits and a step of Newton's, 1 ulp, in 5 cycles, not 16 */
    #if defined(__AVX512F__)
    static inline vf RECIPROCAL(vf x) {
        vf r = (vf)_mm512_rcp14_ps((__m512)x); return r + r*(1.0f - x*r); }
    #else
    #define RECIPROCAL(x) (1.0f/(x))
    #endif
    #if defined(__AVX512F__)
    #define SUM16(v) _mm512_reduce_add_ps((__m512)(v))
    #else
    #define SUM16(v) 0
    #endif
    #define BROADCAST(p) ((vf)((vu){0} + *(const u32a*)(p)))
    #define PAIR(x, y) ((vf)(((vu)(x) >> 16) | (vu)(y)))
    #define PAIR_OF_ONES i2f(0x3f803f80)
    #define LOG2_E 1.44269504f
    #define LN_2 0.693147181f
    /* 2^x = 2^r 2^n, x <= 0, by the polynomials with the least largest relative error that are 1 at
       0; n = floor(x) where there are instructions for both, else n = round(x) */
    #if defined(__AVX512F__)
    #define FRACTION(x) ((vf)_mm512_reduce_ps((__m512)(x), 9))
    #define SCALE(p, x) ((vf)_mm512_maskz_scalef_ps(  /* 0 below -126, and so no denormals */ \
        _mm512_cmp_ps_mask((__m512)(x), _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), \
        (__m512)(p), (__m512)(x)))
    static inline vf POW2(vf x) {                     /* 0.8e-7 */
        vf r = FRACTION(x);
        return SCALE(((((1.867118494e-3f*r + 9.017054790e-3f)*r + 5.579989572e-2f)*r
                       + 2.401644548e-1f)*r + 6.931513114e-1f)*r + 1.0f, x); }
    static inline vf POW2_SHORT(vf x) {               /* 0.9e-4, a twentieth of what bf16 rounds */
        vf r = FRACTION(x);
        return SCALE(((7.706521994e-2f*r + 2.276469811e-1f)*r + 6.951163395e-1f)*r + 1.0f, x); }
    #else
    static inline vf POW2(vf x) {                     /* 0.9e-7 */
        /* adding 1.5*2^23 + 127 rounds, and leaves n + 127, an exponent, in the low bits; from
           x = -127 on that is 0, and so is the product */
        vf c = vmax(VZERO - 127.0f, x), t = c + 12583039.0f, r = c - (t - 12583039.0f);
        return (vf)((vi)t << 23)*(
            ((((1.326472731e-3f*r + 9.671512991e-3f)*r + 5.550733582e-2f)*r
              + 2.402224243e-1f)*r + 6.931470037e-1f)*r + 1.0f); }
    #define POW2_SHORT POW2
    #endif
    /* spelled out between two loops of a region: what Cython emits has none at a loop's end */
    #if defined(_OPENMP)
    #define barrier() _Pragma("omp barrier")
    #else
    #define barrier() (void)0
    #endif
    #define fetch_add(p, n) __atomic_fetch_add(p, n, __ATOMIC_RELAXED)
    #define prefetch(p) __builtin_prefetch(p)       /* past the end it reads nothing: no fault */
    #define prefetch_write(p) __builtin_prefetch(p, 1)
    #define prefetch_l2(p) __builtin_prefetch(p, 0, 2)
    /* A register tile, sums[rows][cols], in three steps.  Macros with unrolled loops, as only these
       leave it in registers: a function's sums, or a plain loop's, pass through the stack. */
    #define EACH(rows, cols) _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) \
        _Pragma("GCC unroll 3") for (int j = 0; j < cols; j++)
    #define TILE_CLEAR(sums, rows, cols) do { EACH(rows, cols) sums[i][j] = VZERO; } while (0)
    #define TILE_LOAD(sums, rows, cols, c, ldc) do { \
        EACH(rows, cols) sums[i][j] = ((const vf*)((c) + i*(ldc)))[j]; } while (0)
    /* forget what is known of an address, or it is kept from before a loop at a register's cost */
    #define FORGET(p) __asm__("" : "+r"(p))
    /* AVX-512 can broadcast within a multiply-add: an instruction less a row, but a load more.
       With 4 rows of 14 a tile is 4 % faster, 11 % beside a busy hyper-thread.  x - 0 is x. */
    #if defined(__AVX512F__)
    #define WITHIN(i) ((i) * 2 / 7 != ((i) + 1) * 2 / 7)
    #define ADD_WITHIN(s, x, row) \
        __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(s) : "v"(row), "m"(x))
    #define ADD(s, x, row) __asm__("vfmadd231ps %2, %1, %0" : "+v"(s) : "v"(row), "v"(x))
    #else
    #define WITHIN(i) 0
    #define ADD_WITHIN(s, x, row) s += (x) * row
    #define ADD(s, x, row) s += x * row
    #endif
    #define TILE_ADD(sums, rows, cols, a, step, b) do { \
        vf row_[cols], x_; EACH(1, cols) row_[j] = ((const vf*)(b))[j]; \
        EACH(rows, cols) { \
            if (__builtin_constant_p(step) && WITHIN(i)) \
                ADD_WITHIN(sums[i][j], (a)[i*(step)], row_[j]); \
            else { x_ = (a)[i*(step)] - VZERO; ADD(sums[i][j], x_, row_[j]); } } \
        __asm__ volatile("" ::: "memory"); } while (0)  /* or loads are hoisted, and sums spilled */
    /* the same for a word of rows of A, 16 apart, and two vectors of words: pairs of bf16 */
    enum { DOT_ROWS = VL == 16 ? 8 : 4 };
    #define DOT_ADD(sums, rows, a, b, c) do { vf x_, y_ = *(const vf*)(b), z_ = *(const vf*)(c); \
        _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) { x_ = BROADCAST((a) + 16*i); \
            sums[i][0] = DOT(sums[i][0], x_, y_); sums[i][1] = DOT(sums[i][1], x_, z_); } \
        } while (0)
    #define TILE_STORE(sums, rows, cols, c, ldc, acc) do { \
        if (acc) { EACH(rows, cols) ((vf*)((c) + i*(ldc)))[j] += sums[i][j]; } \
        else { EACH(rows, cols) ((vf*)((c) + i*(ldc)))[j] = sums[i][j]; } } while (0)
    #define fmaf1(a, b, c) __builtin_fmaf(a, b, c)      /* one rounding, spelled out */
    """
    enum: VL, MR, NV, NR, WITH_OPENMP, WITH_AMX, WITH_DOT, WITH_STREAM, DOT_ROWS
    ctypedef float vf
    ctypedef uint16_t vh
    ctypedef int vi
    ctypedef uint32_t u32a
    const vf VZERO
    const vh HZERO
    vf WIDEN(vh) noexcept nogil
    vf ZIP(vh, vh) noexcept nogil
    vh NARROW(vf) noexcept nogil
    vf ROUND(vf) noexcept nogil
    vf DOT(vf, vf, vf) noexcept nogil
    const float LOG2_E, LN_2, PAIR_OF_ONES
    vf vmax(vf, vf) noexcept nogil
    int f2i(float) noexcept nogil
    float i2f(int) noexcept nogil
    float fmaf1(float, float, float) noexcept nogil
    void transpose_tile(const float*, Py_ssize_t, Py_ssize_t, float*, Py_ssize_t) noexcept nogil
    int huge_pages(void*, size_t) noexcept nogil
    void AMX_OPEN() noexcept nogil
    void AMX_CLOSE() noexcept nogil
    void AMX_ZERO() noexcept nogil
    void AMX_LOAD(const float*, Py_ssize_t) noexcept nogil
    void AMX_A(const float*) noexcept nogil
    void AMX_B(const float*) noexcept nogil
    void AMX_ADD() noexcept nogil
    void AMX_STORE(float*, Py_ssize_t) noexcept nogil
    vf UPPER(vf) noexcept nogil
    vf PAIR(vf, vf) noexcept nogil
    vf PAIRS(vf, vf) noexcept nogil
    vf BOTH(vf, vf) noexcept nogil
    void STREAM(void*, vf) noexcept nogil
    void STREAM_HALF(void*, vh) noexcept nogil
    vf ROUNDED(vf) noexcept nogil
    vf BROADCAST(const float*) noexcept nogil
    vf RECIPROCAL(vf) noexcept nogil
    float SUM16(vf) noexcept nogil
    vf POW2(vf) noexcept nogil
    vf POW2_SHORT(vf) noexcept nogil
    void barrier() noexcept nogil
    Py_ssize_t fetch_add(Py_ssize_t*, Py_ssize_t) noexcept nogil
    void prefetch(const void*) noexcept nogil
    void TILE_CLEAR(vf (*)[3], int, int) noexcept nogil
    void FORGET(void*) noexcept nogil
    void TILE_LOAD(vf (*)[3], int, int, const float*, Py_ssize_t) noexcept nogil
    void TILE_ADD(vf (*)[3], int, int, const float*, Py_ssize_t, const float*) noexcept nogil
    void DOT_ADD(vf (*)[3], int, const float*, const float*, const float*) noexcept nogil
    void TILE_STORE(vf (*)[3], int, int, float*, Py_ssize_t, bint) noexcept nogil
    void prefetch_write(const void*) noexcept nogil
    void prefetch_l2(const void*) noexcept nogil

cdef extern from "sys/mman.h" nogil:
    void* mmap(void*, size_t, int, int, int, long)
    int munmap(void*, size_t)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS
    void* MAP_FAILED

ctypedef Py_ssize_t idx

# Kernels on activations are written once for both types of an element: `load` and `store` convert,
# all arithmetic is fp32.  Functions that Python calls take a flag `half` for bf16.
ctypedef fused real:                # an element in memory: fp32, or the bits of a bf16
    float
    uint16_t

ctypedef fused other:               # that of another array
    float
    uint16_t

# A parallel region costs about 1 us while the team spins: below this size one thread is faster.
# THREADS is read when a call starts; tensor.py sets it to the number of physical cores.
cdef enum:
    SERIAL_BELOW = 16384
    RUNS = 64                       # a thread beyond the 64th shares another's run
cdef int THREADS = 1


def set_threads(int n):
    """Use n threads (>= 1) from the next call on; results do not depend on it."""
    global THREADS
    THREADS = n if n > 0 else 1


def get_threads():
    """The size of the thread team."""
    return THREADS


def info():
    """What this build is: vector lanes, register tile, whether OpenMP and AMX are in, and an
    instruction for sums of products of bf16; the rows from which on a product's sums are those of
    panels, whatever their number."""
    return {"lanes": VL, "tile": (MR, NR), "openmp": bool(WITH_OPENMP), "amx": bool(WITH_AMX),
            "bf16": bool(WITH_AMX or WITH_DOT), "panels_from": SPLIT_FROM}


cdef inline int team(idx elements) noexcept nogil:
    """How many threads a call over so many elements gets."""
    return 1 if elements < SERIAL_BELOW else THREADS


# Tasks of a loop that a team shares.  Each thread takes those of its own run first, in order, and
# then what others have left: so rows stay with one thread, and in its caches, from operation to
# operation (5 to 8 % of a small model's step), and a thread that is held up by other processes
# holds up no other.

cdef struct Run:
    idx taken
    char alone[56]                  # each on a cache line of its own

cdef struct Tasks:
    int runs
    Run run[RUNS]


cdef void deal(Tasks* tasks, int threads) noexcept nogil:
    """A run for each thread; nothing is taken yet."""
    cdef int i
    tasks.runs = threads if threads < RUNS else RUNS
    for i in range(tasks.runs):
        tasks.run[i].taken = 0


cdef inline idx take(Tasks* tasks, idx n) noexcept nogil:
    """The calling thread's next one of n tasks, or -1 when all are taken."""
    cdef int i, own = threadid() % tasks.runs, run
    cdef idx end, length
    for i in range(tasks.runs):
        run = (own + i) % tasks.runs
        end = n*(run + 1)//tasks.runs
        length = end - n*run//tasks.runs
        if tasks.run[run].taken < length:       # a look before a write that others would notice
            length -= fetch_add(&tasks.run[run].taken, 1)
            if length > 0:
                return end - length
    return -1


def empty_region(idx repeats):
    """Open and close `repeats` parallel regions on the whole team, to time one."""
    cdef idx i
    cdef uint8_t seen[64]
    for i in range(repeats):
        with nogil, parallel(num_threads=THREADS):
            seen[threadid() % 64] = 1       # something, so that the region is not compiled away


cdef float chains(idx repeats) noexcept nogil:
    """12 independent chains of `repeats` vector multiply-adds; returns something that needs them.

    Two units of latency 4 need 8 chains to stay busy; 12 and two constants fit in 16 registers.
    """
    cdef vf acc[12]
    cdef vf half = VZERO + <float>0.5, one = VZERO + <float>1.0, total = VZERO
    cdef idx i, j
    for j in range(12):
        acc[j] = VZERO
    for i in range(repeats):
        for j in range(12):
            acc[j] = acc[j]*half + one          # tends to 2: never a denormal, never infinite
    for j in range(12):
        total = total + acc[j]
    return (<float*>&total)[0]


cdef float tile_chains(idx repeats) noexcept nogil:
    """`repeats` rounds of two multiply-adds of AMX tiles; returns something that needs them."""
    cdef float tiles[3*256]
    cdef float sums[512]
    cdef idx i
    for i in range(3*256):          # words of two bf16 near 1: zeros would run faster than numbers
        tiles[i] = PAIR_OF_ONES
    AMX_OPEN()
    AMX_ZERO()
    AMX_A(tiles)
    AMX_B(tiles + 256)
    for i in range(repeats):
        AMX_ADD()
    AMX_STORE(sums, 32)
    AMX_CLOSE()
    return sums[0]


cdef float dot_chains(idx repeats) noexcept nogil:
    """12 independent chains of `repeats` sums of pairs of bf16."""
    cdef vf acc[12]
    cdef vf pair = VZERO + <float>PAIR_OF_ONES, total = VZERO
    cdef idx i, j
    for j in range(12):
        acc[j] = VZERO
    for i in range(repeats):
        for j in range(12):
            acc[j] = DOT(acc[j], pair, pair)
    for j in range(12):
        total = total + acc[j]
    return (<float*>&total)[0]


def multiply_adds(idx repeats, bint half=False):
    """Run `repeats` rounds of multiply-adds that touch no memory on every thread; returns FLOPs.

    Over the seconds it took, that is the peak that the speed of a step is compared with.
    half: of bf16, by what this build has for them.
    """
    cdef float seen[64]
    with nogil, parallel(num_threads=THREADS):
        if half and WITH_AMX:
            seen[threadid() % 64] = tile_chains(repeats)
        elif half:
            seen[threadid() % 64] = dot_chains(repeats)
        else:
            seen[threadid() % 64] = chains(repeats)
    if half and WITH_AMX:
        return 2*2*16*16*32*repeats*THREADS
    return 2*12*VL*(2 if half else 1)*repeats*THREADS


cdef inline idx least(idx a, idx b) noexcept nogil:
    """The smaller of two sizes."""
    return a if a < b else b


cdef inline idx most(idx a, idx b) noexcept nogil:
    """The larger of two sizes."""
    return a if a > b else b


# ---- 2. Buffer pool -----------------------------------------------------------------------------
# A step repeats its shapes, so a dropped buffer waits in a reserve for the next request of exactly
# its size: after two steps no request reaches the operating system, and no page is faulted in
# (writing fresh 4 KB pages runs at 2 GB/s, recycled ones at 25).  Small buffers are cut from 16 MB
# blocks, larger ones get a block each; blocks start at 2 MB and ask for huge pages.
#
# Nothing is locked: all of this runs under the GIL, and a kernel takes its scratch before it lets
# go of that.  A block lives as long as anything refers to it: a buffer, an address in the reserve,
# or CURRENT.

cdef enum:
    ALIGN = 64                      # a cache line, and the widest vector
    HUGE = 1 << 21                  # one huge page
    PAGE = 1 << 16                  # a multiple of every system's page size
    BLOCK = 1 << 24                 # small buffers are cut from blocks of this size
    OWN_BLOCK = 1 << 22             # from here up a buffer has its own block

cdef dict RESERVE = {}              # nbytes -> [(address, block), ...], free to be handed out again
cdef Block CURRENT = None           # the block that small buffers are cut from now

cdef struct Pool:
    idx reserved, used, peak        # bytes
    idx blocks

cdef Pool POOL                      # all zero


cdef class Block:
    """One mapping of the operating system, `size` bytes from a 2 MB boundary."""
    # the first `cut` bytes have been handed out at least once
    cdef size_t address, size, cut
    cdef idx live                   # buffers of it that are in use

    def __cinit__(self, size_t size):
        # mmap aligns to pages only, so map HUGE bytes too many and give back both ends
        cdef size_t head
        cdef void* p = mmap(NULL, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            -1, 0)
        if p == MAP_FAILED:
            raise MemoryError(f"the system refused {size:,} bytes ({POOL.used:,} are in use)")
        head = (HUGE - <size_t>p % HUGE) % HUGE     # bytes in front of the first 2 MB boundary
        if head:
            munmap(p, head)
        if HUGE - head:
            munmap(<char*>p + head + size, HUGE - head)
        self.address, self.size = <size_t>p + head, size
        # advice for whole huge pages only; a refusal costs speed, so its result is not looked at
        huge_pages(<void*>self.address, size // HUGE * HUGE)
        POOL.reserved += size
        POOL.blocks += 1

    def __dealloc__(self):
        if self.address:
            munmap(<void*>self.address, self.size)
            POOL.reserved -= self.size
            POOL.blocks -= 1


cdef class Buffer:
    """`nbytes` of 64-byte-aligned memory, contents undefined; back to the pool when dropped."""
    cdef readonly size_t address, nbytes
    cdef size_t room                # nbytes in whole cache lines: the key in the reserve
    cdef Block block

    def __cinit__(self, size_t nbytes):
        global CURRENT
        cdef list waiting
        cdef size_t room = (nbytes + ALIGN - 1) // ALIGN * ALIGN
        if room == 0:               # an empty buffer has an address of its own as well
            room = ALIGN
        waiting = RESERVE.get(room)
        if waiting:                 # the one dropped last: most likely it is still in a cache
            self.address, self.block = waiting.pop()
        elif room >= OWN_BLOCK:
            self.block = Block((room + PAGE - 1) // PAGE * PAGE)    # whole pages
            self.address = self.block.address
        else:
            # what is left at the end of the old block, less than OWN_BLOCK bytes, stays unused
            if CURRENT is None or CURRENT.cut + room > CURRENT.size:
                CURRENT = Block(BLOCK)
            self.block = CURRENT
            self.address = CURRENT.address + CURRENT.cut
            CURRENT.cut += room
        self.nbytes, self.room = nbytes, room
        self.block.live += 1
        POOL.used += room
        if POOL.used > POOL.peak:
            POOL.peak = POOL.used

    def __dealloc__(self):
        # no block: the system refused one; no reserve: the interpreter is taking its modules down
        if self.block is not None and RESERVE is not None:
            self.block.live -= 1
            RESERVE.setdefault(self.room, []).append((self.address, self.block))
            POOL.used -= self.room

    def __getbuffer__(self, Py_buffer* view, int flags):
        # An array over this memory refers to the Buffer, which so cannot return to the pool first
        PyBuffer_FillInfo(view, self, <void*>self.address, self.nbytes, 0, flags)


def pool_trim():
    """Give blocks with no buffer in use back to the system, between phases of a program.

    Only addresses in the reserve, and CURRENT, still refer to such a block: without them it is
    unmapped.
    """
    global CURRENT
    if CURRENT is not None and CURRENT.live == 0:
        CURRENT = None
    for room in list(RESERVE):
        RESERVE[room] = [(a, b) for a, b in RESERVE[room] if (<Block>b).live]
        if not RESERVE[room]:
            del RESERVE[room]


def pool_stats(bint reset_peak=False):
    """Bytes "reserved" from the system, "used" now, "peak" of used, and the count of "blocks"."""
    stats = {"reserved": POOL.reserved, "used": POOL.used, "peak": POOL.peak,
             "blocks": POOL.blocks}
    if reset_peak:
        POOL.peak = POOL.used
    return stats


# ---- 3. exp and friends --------------------------------------------------------------------------
# Scalar, branch-free, without state: every loop over these is vectorised by the compiler.

cdef inline float fexp(float x) noexcept nogil:
    """e^x to 2 ulp on [-87.3, 88.7]; 0 below, inf above, NaN kept.

    Cephes: x = n ln2 + r with ln2 in two constants so that n*ln2 is exact, a polynomial of degree 7
    for e^r on |r| <= ln2/2, and 2^n by exponent bits, in two factors since 2^128 alone would
    overflow.  Below -87.336 the result would be denormal (an assist of 150 cycles on some
    machines): flushed to 0.
    """
    cdef float low = <float>-87.336, high = <float>89.0
    cdef float c, t, n, r, p
    cdef int k, half
    c = low if x < low else x       # comparisons with NaN are false: it passes both clamps
    c = high if c > high else c
    # Floats from 2^23 to 2^24 are 1 apart, so adding 1.5*2^23 rounds to an integer, for negative
    # values too; subtracting it again gives n, the lowest bits of t hold n as an int.
    t = c*<float>1.44269504088896341 + <float>12582912.0    # 1.5*2^23
    n = t - <float>12582912.0
    # 355/512 has 9 significant bits and n at most 8: the product is exact, and so is c minus it
    r = c - n*<float>0.693359375
    r = r - n*<float>-2.12194440e-4
    # e^r = 1 + r + r^2 P(r), by Horner's rule
    p = <float>1.9875691500e-4
    p = p*r + <float>1.3981999507e-3
    p = p*r + <float>8.3334519073e-3
    p = p*r + <float>4.1665795894e-2
    p = p*r + <float>1.6666665459e-1
    p = p*r + <float>5.0000001201e-1
    p = p*(r*r) + r + <float>1.0
    # 0x4b400000 are the bits of 1.5*2^23; a power of two is its exponent + 127, shifted into place
    k = f2i(t) - 0x4b400000
    half = k >> 1
    p = p*i2f((half + 127) << 23)*i2f((k - half + 127) << 23)
    return <float>0.0 if x < low else p


cdef inline vf weight(vf x) noexcept nogil:
    """2^x of VL lanes that are at most 0 (or NaN), to 2 ulp; 0 below -126.5.

    For the weights of a softmax: with scores in units of ln2, an exp is half of fexp's work.
    """
    return POW2(x)


cdef inline vf half_weight(vf x) noexcept nogil:
    """The same where it is rounded to bf16: with AVX-512 to 1e-4, in 6 instructions instead of 8.
    """
    return POW2_SHORT(x)


cdef inline vf sigmoid(vf x) noexcept nogil:
    """s = 1/(1 + e^-x), by e^-|x| as in `weight`, which cannot overflow: s(-x) = e^-x s(x)."""
    cdef vf e = weight((<vf>(<vi>x & 0x7fffffff))*-LOG2_E)
    cdef vf s = RECIPROCAL(e + <float>1.0)
    cdef vi negative = <vi>x >> 31
    return <vf>((<vi>s & ~negative) | (<vi>(e*s) & negative))


# ---- 4. Elementwise ------------------------------------------------------------------------------
# One idiom throughout: a flat array is cut into parts of PART elements, a table into groups of
# grain(cols) rows, and the team takes them from a common counter.  The kernels are scalar loops
# that carry nothing from one element to the next, so the compiler turns them into vectors.  A
# branch on a `kind` stands outside such loops: one test a part, and every loop stays a vector loop.

cpdef enum:                         # the `kind` of binary(), then of unary(); Python sees these too
    ADD, SUB, MUL, DIV
    SILU, GELU, EXP

cdef enum:
    PART = 8192                     # elements a thread takes at a time: 32 KB, the size of an L1
    PIECE = 2048                    # longest run of a strided walk: small enough for the stack
    BAND = 16                       # most lines of a task: a tile of a transpose
    AXES = 10                       # most axes of a strided walk: 8 and the two in front


cdef inline idx parts(idx n, idx size) noexcept nogil:
    """How many parts of `size` cover n elements."""
    return (n + size - 1)//size


cdef inline idx extent(idx t, idx n) noexcept nogil:
    """The length of part t of n elements: PART, the last one shorter."""
    return least(PART, n - t*PART)


cdef inline idx grain(idx cols) noexcept nogil:
    """How many rows of `cols` elements a thread takes at a time: about PART elements."""
    return most(1, PART//most(1, cols))


# Strided walks.  A walk runs over two operands in step.  A task is up to BAND neighbouring lines of
# up to PIECE elements, and lies at offsets a and b of the operands and c of a dense result.  To
# find a task takes divisions, one an axis, which are paid once for up to 32,768 elements.

cdef struct Walk:
    idx tasks, elements             # of the whole walk
    idx lines, inner                # the two innermost axes, the others around them:
    int axes
    idx shape[AXES]
    idx a[AXES]                     # strides; a[axes] from line to line, a[axes + 1] inside one
    idx b[AXES]


cdef struct Task:
    idx a, b, c
    idx lines, n                    # so many lines of n elements


cdef Walk plan(int ndim, size_t shape, size_t a_strides, size_t b_strides) noexcept nogil:
    """Drop axes of size 1 and merge neighbours that both operands cross evenly.

    Dense operands of any rank become one line that way, heads cut out of a wider row become lines.
    shape and both strides are int64 [ndim]; the caller sees to it that no more than 8 axes remain.
    """
    cdef const int64_t* n = <const int64_t*>shape
    cdef const int64_t* a = <const int64_t*>a_strides
    cdef const int64_t* b = <const int64_t*>b_strides
    cdef Walk w
    cdef int i, k = 2               # axes kept so far, two of size 1 in front of them
    w.shape[0], w.a[0], w.b[0] = 1, 0, 0
    w.shape[1], w.a[1], w.b[1] = 1, 0, 0
    for i in range(ndim):
        if n[i] == 1:
            continue
        # One step of the axis outside is the whole of this one, in both operands: they are one axis
        if k > 2 and w.a[k - 1] == a[i]*n[i] and w.b[k - 1] == b[i]*n[i]:
            w.shape[k - 1] *= n[i]
        else:
            w.shape[k] = n[i]
            k += 1
        w.a[k - 1], w.b[k - 1] = a[i], b[i]
    w.axes, w.lines, w.inner = k - 2, w.shape[k - 2], w.shape[k - 1]
    w.tasks, w.elements = parts(w.lines, BAND)*parts(w.inner, PIECE), w.lines*w.inner
    for i in range(k - 2):
        w.tasks *= w.shape[i]
        w.elements *= w.shape[i]
    return w


cdef inline Task locate(const Walk* w, idx t) noexcept nogil:
    """Task t: counted along the pieces of a line first, then the bands, then the outer axes."""
    cdef idx pieces = parts(w.inner, PIECE), bands = parts(w.lines, BAND), i
    cdef idx start = t%pieces*PIECE, line = t//pieces%bands*BAND
    cdef int k = w.axes
    cdef Task task
    t = t//pieces//bands
    task.a = line*w.a[k] + start*w.a[k + 1]
    task.b = line*w.b[k] + start*w.b[k + 1]
    task.c = (t*w.lines + line)*w.inner + start
    task.lines, task.n = least(BAND, w.lines - line), least(PIECE, w.inner - start)
    for k in range(w.axes - 1, -1, -1):
        i, t = t%w.shape[k], t//w.shape[k]
        task.a += i*w.a[k]
        task.b += i*w.b[k]
    return task


ctypedef fused item:
    uint8_t
    uint16_t
    uint32_t
    uint64_t


cdef void copy_across(const item* src, idx a_step, item* dst, idx b_line, idx b_step, idx lines,
                      idx n) noexcept nogil:
    """dst[j, i] = src[i, j]: lines of the result are neighbours in the source (a transpose).

    Whole tiles of 4-byte items go through registers and touch each cache line once: with rows 4 KB
    apart, a column falls into one set of the L1, and no line would still be there the second time.
    """
    cdef idx t, i, j, k, l, across = parts(lines, VL)
    for t in range(parts(n, VL)*across):
        i, j = t//across*VL, t%across*VL
        if sizeof(item) == 4 and b_step == 1 and i + VL <= n and j + VL <= lines:
            transpose_tile(<const float*>(src + i*a_step + j), a_step, VL,
                           <float*>(dst + j*b_line + i), b_line)
            continue
        # edges, and items of other sizes: the same tile, an item at a time
        for k in range(i, least(i + VL, n)):
            for l in range(j, least(j + VL, lines)):
                dst[l*b_line + k*b_step] = src[l + k*a_step]


cdef void copy_band(const item* src, item* dst, const Walk* w, idx t) noexcept nogil:
    """Task t of a strided copy."""
    cdef Task task = locate(w, t)
    cdef idx i, j, a_line = w.a[w.axes], b_line = w.b[w.axes]
    cdef idx a_step = w.a[w.axes + 1], b_step = w.b[w.axes + 1]
    src += task.a
    dst += task.b
    if a_line == 1:                 # neighbours in the source lie on different lines
        copy_across(src, a_step, dst, b_line, b_step, task.lines, task.n)
        return
    for j in range(task.lines):
        if a_step == 1 and b_step == 1:
            memcpy(dst + j*b_line, src + j*a_line, task.n*sizeof(item))
        else:
            for i in range(task.n):
                dst[j*b_line + i*b_step] = src[j*a_line + i*a_step]


def copy_strided(size_t src, size_t dst, int ndim, size_t shape, size_t src_strides,
                 size_t dst_strides, int itemsize):
    """dst[...] = src[...], items of 1, 2, 4 or 8 bytes; int64 shape, int64 strides in items.

    src and dst must not overlap, and no stride of dst may be 0: two tasks would write one place.
    """
    cdef Walk w = plan(ndim, shape, src_strides, dst_strides)
    cdef idx t
    for t in prange(w.tasks, nogil=True, schedule='dynamic', chunksize=grain(BAND*w.inner),
                    num_threads=team(w.elements)):
        if itemsize == 1:
            copy_band(<const uint8_t*>src, <uint8_t*>dst, &w, t)
        elif itemsize == 2:
            copy_band(<const uint16_t*>src, <uint16_t*>dst, &w, t)
        elif itemsize == 4:
            copy_band(<const uint32_t*>src, <uint32_t*>dst, &w, t)
        else:
            copy_band(<const uint64_t*>src, <uint64_t*>dst, &w, t)


cdef inline const float* dense(const float* x, idx step, float* room, idx n) noexcept nogil:
    """n elements of x side by side: x itself, or a copy in `room` if strided or repeated.

    The copy stays in L1, and the arithmetic needs one loop per kind instead of one for each mixture
    of strides.
    """
    cdef idx i
    if step == 1:
        return x
    if step == 0:
        fill_part(x[0], room, n)
    else:
        for i in range(n):
            room[i] = x[i*step]
    return room


cdef void binary_line(int kind, const float* a, const float* b, float* c, idx n) noexcept nogil:
    """c = a (kind) b."""
    cdef idx i
    if kind == ADD:
        for i in range(n):
            c[i] = a[i] + b[i]
    elif kind == SUB:
        for i in range(n):
            c[i] = a[i] - b[i]
    elif kind == MUL:
        for i in range(n):
            c[i] = a[i]*b[i]
    elif kind == DIV:
        for i in range(n):
            c[i] = a[i]/b[i]


cdef void binary_band(int kind, const float* a, const float* b, float* c, const Walk* w,
                      idx t) noexcept nogil:
    """Task t of c = a (kind) b."""
    cdef float a_room[PIECE]        # 8 KB each, on the stack of the thread
    cdef float b_room[PIECE]
    cdef Task task = locate(w, t)
    cdef idx j, k = w.axes
    for j in range(task.lines):
        binary_line(kind, dense(a + task.a + j*w.a[k], w.a[k + 1], a_room, task.n),
                    dense(b + task.b + j*w.b[k], w.b[k + 1], b_room, task.n),
                    c + task.c + j*w.inner, task.n)


def binary(int kind, size_t a, size_t b, size_t c, int ndim, size_t shape, size_t a_strides,
           size_t b_strides):
    """c = a (ADD, SUB, MUL or DIV) b, c dense; int64 shape and strides, stride 0 broadcasts."""
    cdef Walk w = plan(ndim, shape, a_strides, b_strides)
    cdef idx t
    for t in prange(w.tasks, nogil=True, schedule='dynamic', chunksize=grain(BAND*w.inner),
                    num_threads=team(w.elements)):
        binary_band(kind, <const float*>a, <const float*>b, <float*>c, &w, t)


cdef void axpy_part(float alpha, const real* x, real* y, idx n) noexcept nogil:
    """One part of axpy()."""
    cdef idx i = 0
    while i < n:
        store(y + i, load(y + i, n - i) + load(x + i, n - i)*alpha, n - i)
        i += VL


def axpy(float alpha, size_t x, size_t y, idx n, bint half=False):
    """y += alpha*x; y may be x (the tape adds a gradient to itself in x + x)."""
    cdef idx t
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        if half:
            axpy_part(alpha, <const uint16_t*>x + t*PART, <uint16_t*>y + t*PART, extent(t, n))
        else:
            axpy_part(alpha, <const float*>x + t*PART, <float*>y + t*PART, extent(t, n))


cdef void scale_part(float alpha, const float* x, float* y, idx n) noexcept nogil:
    """One part of scale(), or a row of another kernel."""
    cdef idx i
    for i in range(n):
        y[i] = alpha*x[i]


def scale(float alpha, size_t x, size_t y, idx n):
    """y = alpha*x; y may be x."""
    cdef idx t
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        scale_part(alpha, <const float*>x + t*PART, <float*>y + t*PART, extent(t, n))


cdef void fill_part(float value, float* x, idx n) noexcept nogil:
    """One part of fill(), or a row of another kernel."""
    cdef idx i
    for i in range(n):
        x[i] = value


def fill(size_t x, float value, idx n, bint half=False):
    """x = value everywhere."""
    cdef uint16_t rounded = to_bf16((<uint32_t*>&value)[0])
    cdef idx t, i
    if half:
        for i in range(n):
            (<uint16_t*>x)[i] = rounded
        return
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        fill_part(value, <float*>x + t*PART, extent(t, n))


# Activations, s the sigmoid.  A new one is a function, its slope, and a branch in each dispatcher.
#   silu(x) = x s(x)                            silu' = s(x) (1 + x (1 - s(x)))
#   gelu(x) = x/2 (1 + tanh z) = x s(2z)        gelu' = s(2z) (1 + x (1 - s(2z)) 2z')
#   with 2z = x (P + Q x^2) and 2z' = P + 3 Q x^2, where P = 2 sqrt(2/pi) and Q = 0.044715 P
# The second form of gelu holds because (1 + tanh z)/2 = s(2z); both slopes because s' = s (1 - s).

cdef inline vf silu(vf x) noexcept nogil:
    """x s(x)."""
    return x*sigmoid(x)


cdef inline vf silu_slope(vf x) noexcept nogil:
    """silu'(x), from one sigmoid."""
    cdef vf s = sigmoid(x)
    return s*(x*(<float>1.0 - s) + <float>1.0)


cdef inline vf gelu(vf x) noexcept nogil:
    """x s(x (P + Q x^2))."""
    return x*sigmoid(x*(<float>0.0713548162726009*x*x + <float>1.5957691216057308))


cdef inline vf gelu_slope(vf x) noexcept nogil:
    """gelu'(x), from one sigmoid; square = Q x^2.

    Beyond +-1,000, where it has long been 0 or 1, x stays there: 0 times an infinite square is NaN.
    """
    cdef vf square, s, far = VZERO - <float>1000.0
    x = VZERO - vmax(far, VZERO - vmax(far, x))
    square = <float>0.0713548162726009*x*x
    s = sigmoid(x*(square + <float>1.5957691216057308))
    return s*(x*(<float>1.0 - s)*(<float>3.0*square + <float>1.5957691216057308) + <float>1.0)


cdef void unary_part(int kind, const float* x, float* y, idx n) noexcept nogil:
    """y = f(x)."""
    cdef idx i = 0
    if kind == SILU or kind == GELU:
        while i < n:
            store(y + i, silu(load(x + i, n - i)) if kind == SILU else gelu(load(x + i, n - i)),
                  n - i)
            i += VL
    elif kind == EXP:
        for i in range(n):
            y[i] = fexp(x[i])


cdef void unary_backward_part(int kind, const float* x, const float* dy, float* dx,
                              idx n) noexcept nogil:
    """dx = dy f'(x)."""
    cdef idx i = 0
    cdef vf v
    if kind == SILU or kind == GELU:
        while i < n:
            v = load(x + i, n - i)
            v = silu_slope(v) if kind == SILU else gelu_slope(v)
            store(dx + i, load(dy + i, n - i)*v, n - i)
            i += VL
    elif kind == EXP:
        for i in range(n):
            dx[i] = dy[i]*fexp(x[i])


def unary(int kind, size_t x, size_t y, idx n):
    """y = f(x) for f one of the kinds, such as SILU or GELU (the tanh form); y may be x."""
    cdef idx t
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        unary_part(kind, <const float*>x + t*PART, <float*>y + t*PART, extent(t, n))


def unary_backward(int kind, size_t x, size_t dy, size_t dx, idx n):
    """dx = dy f'(x), everything recomputed from x; dx may be dy."""
    cdef idx t
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        unary_backward_part(kind, <const float*>x + t*PART, <const float*>dy + t*PART,
                            <float*>dx + t*PART, extent(t, n))


# bf16 is the upper half of an fp32.  Integers only, so all builds (and a GPU) agree to the bit.

cdef inline uint16_t to_bf16(uint32_t u) noexcept nogil:
    """The bits of the nearest bf16, ties to even; a NaN keeps its upper half and is made quiet.

    Adding 0x7fff, or 0x8000 where the kept half is odd, carries into it exactly when it must round
    up; a NaN could be carried to infinity or zero, so it goes another way.
    """
    cdef uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16
    cdef uint32_t quiet = (u >> 16) | 0x40
    return <uint16_t>(quiet if (u & 0x7fffffff) > 0x7f800000 else rounded)


cdef void cast_bf16_part(const u32a* x, uint16_t* y, idx n) noexcept nogil:
    """One part of cast_bf16()."""
    cdef idx i
    for i in range(n):
        y[i] = to_bf16(x[i])


def cast_bf16(size_t x, size_t y, idx n):
    """y (bf16 bits) = x (fp32), rounded to nearest even."""
    cdef idx t
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        cast_bf16_part(<const u32a*>x + t*PART, <uint16_t*>y + t*PART, extent(t, n))


cdef void cast_f32_part(const uint16_t* x, u32a* y, idx n) noexcept nogil:
    """One part of cast_f32(): sixteen zero bits below."""
    cdef idx i
    for i in range(n):
        y[i] = <uint32_t>x[i] << 16


def cast_f32(size_t x, size_t y, idx n):
    """y (fp32) = x (bf16 bits), exactly."""
    cdef idx t
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        cast_f32_part(<const uint16_t*>x + t*PART, <u32a*>y + t*PART, extent(t, n))


# ---- 5. Philox -----------------------------------------------------------------------------------
# Philox4x32-10 (Salmon et al., SC11): ten rounds of two 32x32 -> 64 bit products turn (key,
# counter) into four random words, with no state: any word of any mask can be drawn alone.  The
# counter of a dropout mask is (sequence in the whole run, 64 bit; site; element/4), the word is
# element % 4, where an element is position*dim + channel.  Batch shape, micro-step, rank and thread
# never enter, so recomputation, resuming and every way of cutting up a batch see the same mask.

cdef enum:
    DRAW = 1024                     # elements per batch of random words (4 KB on the stack)
    SPREAD = 4096                   # elements per task of a mask; whole quads


cdef inline uint32_t high(uint32_t a, uint32_t b) noexcept nogil:
    """The upper half of the 64-bit product."""
    return <uint32_t>((<uint64_t>a*b) >> 32)


cdef inline void philox_block(uint64_t key, uint64_t sequence, uint32_t site, uint32_t quad,
                              uint32_t* w) noexcept nogil:
    """Four words for counter (low and high of sequence, site, quad); key words low, high of key."""
    cdef uint32_t m0 = 0xD2511F53, m1 = 0xCD9E8D57
    cdef uint32_t k0 = <uint32_t>key, k1 = <uint32_t>(key >> 32)
    cdef uint32_t c0 = <uint32_t>sequence, c1 = <uint32_t>(sequence >> 32), c2 = site, c3 = quad
    cdef int r
    for r in range(10):
        c0, c1, c2, c3 = high(m1, c2) ^ c1 ^ k0, m1*c2, high(m0, c0) ^ c3 ^ k1, m0*c0
        k0 += <uint32_t>0x9E3779B9                  # golden ratio - 1 and sqrt(3) - 1, times 2^32
        k1 += <uint32_t>0xBB67AE85
    w[0], w[1], w[2], w[3] = c0, c1, c2, c3


cdef void philox_words(uint64_t key, uint64_t sequence, uint32_t site, uint32_t quad, idx n,
                       uint32_t* w) noexcept nogil:
    """n blocks for quad, quad + 1, ...: independent, so the compiler makes vectors of them."""
    cdef idx i
    for i in range(n):
        philox_block(key, sequence, site, quad + <uint32_t>i, w + 4*i)


def philox(uint64_t key, uint64_t sequence, uint32_t site, uint32_t quad, idx n, size_t out):
    """n blocks of 4 uint32 words; counters (sequence low, sequence high, site, quad + 0 .. n-1)."""
    cdef idx t, step = PART//4
    for t in prange(parts(n, step), nogil=True, schedule='dynamic', num_threads=team(4*n)):
        philox_words(key, sequence, site, quad + <uint32_t>(t*step), least(step, n - t*step),
                     <uint32_t*>out + 4*t*step)


cdef void dropout_row(float* x, idx n, idx first, uint64_t key, uint64_t sequence, uint32_t site,
                      uint32_t threshold, float scale) noexcept nogil:
    """x[i] = x[i]*scale if the word of element first + i is >= threshold, else 0 (i in 0..n).

    With threshold = floor(p 2^32) an element is dropped with probability p, to 2^-32.
    """
    cdef uint32_t words[DRAW]
    cdef uint32_t* w
    cdef idx i, count
    while n > 0:
        count = least(n, DRAW - first%4)            # the batch starts at a whole quad
        philox_words(key, sequence, site, <uint32_t>(first//4), parts(first%4 + count, 4), words)
        w = words + first%4                         # past the words of elements before `first`
        for i in range(count):
            x[i] = x[i]*scale if w[i] >= threshold else <float>0.0
        x += count
        first += count
        n -= count


cdef void mask_row(uint8_t* out, idx n, idx first, uint64_t key, uint64_t sequence, uint32_t site,
                   uint32_t threshold) noexcept nogil:
    """The same decisions as bytes 1 and 0: dropout of a row of ones, so the two cannot disagree."""
    cdef float ones[DRAW]
    cdef idx i, j = 0, count
    while j < n:
        count = least(DRAW, n - j)
        fill_part(<float>1.0, ones, count)
        dropout_row(ones, count, first + j, key, sequence, site, threshold, <float>1.0)
        for i in range(count):
            out[j + i] = ones[i] > <float>0.0
        j += count


def philox_mask(size_t out, idx sequences, uint64_t first_sequence, idx seq, idx dim, uint32_t site,
                uint64_t key, uint32_t threshold):
    """out [sequences, seq, dim] (bytes): 1 where dropout keeps the element.

    Tasks start at multiples of SPREAD within a sequence, so no quad of words is drawn twice.
    """
    cdef idx t, b, j, n = seq*dim, tasks = parts(n, SPREAD)
    for t in prange(sequences*tasks, nogil=True, schedule='dynamic', num_threads=team(sequences*n)):
        b, j = t//tasks, t%tasks*SPREAD
        mask_row(<uint8_t*>out + b*n + j, least(SPREAD, n - j), j, key,
                 first_sequence + <uint64_t>b, site, threshold)


cdef inline void copy_row(const real* x, other* y, idx n) noexcept nogil:
    """y = x, converted."""
    cdef idx i = 0
    while i < n:
        store(y + i, load(x + i, n - i), n - i)
        i += VL


cdef void dropout_piece(const real* x, real* y, idx n, idx first, uint64_t key, uint64_t sequence,
                        uint32_t site, uint32_t threshold, float scale) noexcept nogil:
    """One task of dropout(): masked in fp32 on the stack (16 KB, in L1)."""
    cdef float room[SPREAD]
    copy_row(x, &room[0], n)
    dropout_row(room, n, first, key, sequence, site, threshold, scale)
    copy_row(<const float*>&room[0], y, n)


def dropout(size_t x, size_t y, idx sequences, idx seq, idx dim, uint64_t first_sequence,
            uint32_t site, uint64_t key, uint32_t threshold, float scale, bint half=False):
    """y = x*mask*scale over [sequences, seq, dim]; y may be x.  Backward is the same map of dy.

    scale is 1/(1 - p), so that the expected value stays; no mask is stored, it is drawn again.
    """
    cdef idx t, b, at, count, n = seq*dim, tasks = parts(n, SPREAD)
    for t in prange(sequences*tasks, nogil=True, schedule='dynamic', num_threads=team(sequences*n)):
        b = t//tasks
        at, count = b*n + t%tasks*SPREAD, least(SPREAD, n - t%tasks*SPREAD)
        if half:
            dropout_piece(<const uint16_t*>x + at, <uint16_t*>y + at, count, at - b*n, key,
                          first_sequence + <uint64_t>b, site, threshold, scale)
        else:
            dropout_piece(<const float*>x + at, <float*>y + at, count, at - b*n, key,
                          first_sequence + <uint64_t>b, site, threshold, scale)


# ---- 6. Matrix products --------------------------------------------------------------------------
# C[m, n] (+)= op(A)[m, k] op(B)[k, n], row-major, in three levels (Goto and van de Geijn, 2008):
#
#   K in slices of KC      B is packed into panels of NR columns, A into panels of MR rows
#   M in blocks            a task packs the panels of its rows, which stay in L2 from then on, and
#                          leads one panel of B after the other past them
#   tiles of MR x NR       accumulators live in registers while a panel of A meets a panel of B
#
# Sizes, for AVX-512.  A tile of a whole slice takes 14*512 = 7,168 cycles and touches 28 KB of A,
# 64 KB of B and 1.8 KB of C: 13 bytes a cycle, which L2 delivers.  A block of BLOCK_ROWS is 290 KB,
# so with the panel of B in use and the next one it fits an L2 of 1 MB, and B, which comes from L3,
# is read once a block: 64 KB in 72 thousand cycles.
#
# One operand is packed by the whole team first, the other by the task that uses it: B and blocks of
# rows, or, where there are few rows, A and panels of columns, which go from their source to L1.
# A weight can also come packed: `pack_b` does it once, for as long as the weight stays as it is.
#
# bf16 is packed as it is, or rounded, in one part, and multiplied by AMX, by AVX-512 BF16, or as
# two fp32 of each word.  Sums grow beside C, which could not hold them, in a strip that stays in
# L1, and are rounded once, after the epilogue; weight gradients are fp32 and take sums as fp32
# does.
#
# In parts.  AMX multiplies bf16 16 times as fast as fp32 is multiplied elsewhere, and an fp32 is
# the exact sum of three bf16, its mantissa's bits 1-8, 9-16 and 17-24 (cut off, so all have its
# sign).
# Of the nine products of a1 + a2 + a3 with b1 + b2 + b3 the three smallest are below 2^-23 of the
# whole; the other six, each exact, are added up in fp32: as accurate as a chain of multiply-adds
# (rms 0.6e-7 of the largest entry at k = 512; the chain's is 1.2e-7), in 6/16 of the time.
# Source: the splitting is Henry, Tang and Heinecke's ("Leveraging the bfloat16 AI datatype", 2019).
# An infinite entry gives NaN instead of an infinity; what lies below 2^-126 counts as 0.
#
# An element of C is always the sum over k in one order within a slice, plus the slices in order:
# neither the number of threads nor the position in a tile enters, so the bits are those of one
# thread.

cdef enum:
    KC = 512                # depth of a slice
    KC_BESIDE = 384         # where its sums stay in L1 anyway: a panel of B leaves them more room
    PAST_FROM = 1 << 23     # elements of a C in bf16 from which on nothing of it would be found in
                            # a cache again; a line that is not read first costs half
    PAST_BYTES = 1 << 23    # the same for rows that something else reads next
    DEEP = 4096             # k from which on sums beside C would take too much of L2
    BLOCK_ROWS = 140        # rows of a block where B's panels are shared
    BLOCK_HALVES = 280      # the same of bf16 into fp32: B's panels are read half as often, dW of
                            # xl512 +7 to +13 %; where sums lie beside C, -5 to -20
    LOW_ROWS = 560          # up to so many rows A is shared: 1.1 MB a slice, or 1.7 in parts
    HALF_L2 = 300000        # floats of A's rows, in a slice, that stay in L2 while columns go by
    NC = 8192               # columns of B that are packed at a time: 16 MB, within L3
    GROUP = 8               # panels of a task of packing at most: long runs of memory
    ROOM = 1 << 18          # floats that are packed at a time, unless a slice is larger
    LITTLE = 12288          # floats of scratch that the stack has room for
    TASKS = 4               # tasks a thread gets at least: one may be slowed by other processes
    TILE_MAX = 32*32        # room for one tile
    AHEAD = 8               # rows that are fetched ahead while packing, or in an epilogue
    FETCH = 2048            # bytes that row operations fetch ahead of where they read
    PARALLEL_FROM = 1 << 20 # multiply-adds below which one thread is faster than a team
    THIN = 4                # rows of the low register tiles, or twice as many; 8 sums still hide
                            # the latency, and one token's products consist of these
    SPLIT = 32              # columns of a tile in parts, and k of a step
    SPLIT_ROWS = 16         # its rows
    SPLIT_FROM = 16         # rows from which on a product is one of panels: fewer are bound by
                            # reading B; and, where there is AMX, is computed in parts
    SPLIT_COLUMNS = 32      # columns that pay for packing parts, 0.2 ns an element of A more
    PART_ROOM = 8           # floats that 16 elements take in each part
    SHARED = 1 << 20        # floats of a shared operand whose slices are all needed at once
    PIECES = 64             # columns of a product of few rows that are finished at a time

cdef struct Product:
    const void* a           # [m, k], or [k, m] if ta
    const void* b           # [k, n], or [n, k] if tb
    void* c                 # [m, n], not overlapping a or b
    bint half               # operands are, or get rounded to, bf16
    bint half_a, half_b, half_c     # are bf16 in memory
    idx lda, ldb, ldc, m, n, k
    bint ta, tb, acc        # acc: add to C instead of overwriting it
    const float* packed     # all of B as `pack_b` leaves it; or NULL
    const void* residual    # [m, n] with C's leading dimension, added in the end; or NULL
    void* h                 # [m, n/2]: silu of C's left half times its right half; or NULL
    idx seq                 # rows of C per sequence, for the dropout of the product
    uint64_t key, first_sequence
    uint32_t site, threshold    # threshold 0: no dropout
    float keep_scale
    # What follows from these, see lay_out()
    int parts               # bf16 parts of an operand: 1, 3, or 0 where it is fp32
    bint beside             # sums of a block grow beside C, in all slices: C cannot hold them
    bint past               # C is written past the caches
    idx mr, rows            # rows of a tile, panels of A
    idx nr, halves, columns     # 2 if h is wanted; panels of B in each of so many halves
    idx depth, slices       # of K: none a sliver, 520 is 2*260, not 512 + 8
    idx a_room, b_room      # floats from one panel to the next

# What is at hand, packed, of slices s0 .. s1 of K: panels q0 .. q1 of B's columns (of each half),
# or all of A's rows.  NULL: a task packs what it needs by itself.
cdef struct Part:
    const float* a
    const float* b
    idx q0, q1, s0, s1
    idx b_from              # the slice that b begins with: s0, or 0 where B came packed
    idx group               # panels of a task of packing


cdef void lay_out(Product* p) noexcept nogil:
    """Fill in how the product is cut."""
    cdef idx slices, step
    # deep products take sums in fp32 first: their panels, perhaps packed before, are those of fp32
    slices = most(1, parts(p.k, KC_BESIDE if p.half_c and p.k <= DEEP else KC))
    p.parts = 0
    if p.half:
        p.parts = 1
    elif WITH_AMX and p.m >= SPLIT_FROM and p.n >= SPLIT_COLUMNS:
        p.parts = 3
    p.beside = p.half_c
    p.past = p.half_c and p.m*p.n >= PAST_FROM and p.residual == NULL
    step = SPLIT if p.parts else 1
    p.mr, p.nr = SPLIT_ROWS if p.parts else MR, SPLIT if p.parts else NR
    p.rows, p.halves = parts(p.m, p.mr), 2 if p.h != NULL else 1
    p.columns = parts(p.n//p.halves, p.nr)
    p.depth = most(1, parts(parts(p.k, slices), step)*step)
    p.slices = most(1, parts(p.k, p.depth))
    p.a_room = p.depth*PART_ROOM*p.parts
    p.b_room = 2*p.a_room
    if not p.parts:
        p.a_room, p.b_room = p.depth*MR + VL, p.depth*NR    # `pack` may spill into VL more


cdef void pack(const float* x, idx ld, bint across, idx kc, idx rows, idx width,
               float* out) noexcept nogil:
    """Pack up to `width` of the matrix's remaining `rows` into out[kc, width], zero-padded.

    Element (r, k) lies at x[r*ld + k], or at x[k*ld + r] if `across`.  Whole vectors of rows are
    moved where the matrix has enough of them: the last vector may then spill over `width` into the
    next k, which is written after it (vectors go down, k goes up), or into the VL floats of slack
    at the end.  Panels of B never spill, NR being whole vectors: they lie side by side, and other
    threads may be packing the neighbours.
    """
    cdef idx k = 0, r, g, vectors = (width + VL - 1)//VL
    if across and vectors*VL <= rows:   # reading whole vectors stays within the matrix
        for k in range(kc):
            for g in range(vectors - 1, -1, -1):
                prefetch(x + (k + AHEAD)*ld + g*VL)
                (<vf*>(out + k*width + g*VL))[0] = (<const vf*>(x + k*ld + g*VL))[0]
        return
    # Rows of the matrix become columns of the panel, VL x VL at a time
    while not across and k + VL <= kc:
        for g in range(vectors - 1, -1, -1):
            if (g + 1)*VL <= rows:
                transpose_tile(x + g*VL*ld + k, ld, VL, out + k*width + g*VL, width)
            else:
                transpose_tile(x + g*VL*ld + k, ld, rows - g*VL, out + k*width + g*VL, width)
        k += VL
    # What is left: the last k, or a panel at the matrix's edge
    rows = least(rows, width)
    while k < kc:
        for r in range(rows):
            out[k*width + r] = x[k*ld + r] if across else x[r*ld + k]
        for r in range(rows, width):
            out[k*width + r] = 0
        k += 1


cdef inline idx tiles_of(bint across, bint turn) noexcept nogil:
    """Tiles side by side in a panel: A has 16 rows, B 32 columns."""
    return 1 if across == turn else 2


cdef inline void split_step(const bint full, const bint across, const bint turn, const float* x,
                            idx ld, idx kc, idx rows, float* out) noexcept nogil:
    """A step of a panel in three parts, see pack_parts; `kc` k, `rows` rows of it, if not `full`.

    A word holds k and k + 16.
    """
    cdef float words[3*256]
    cdef vf u, v, x_u, x_v
    cdef idx t, i, s, left, tiles = tiles_of(across, turn)
    cdef const float* y
    cdef float* w
    for t in range(tiles):
        w = &words[0] if turn else out + 256*t
        for i in range(16):
            if across:
                y, left = x + i*ld + 16*t, 16 if full else most(0, rows - 16*t)
                prefetch(y + 32*ld)
                prefetch(y + 48*ld)
                u = load(y, left if full or i < kc else 0)
                v = load(y + 16*ld, left if full or i + 16 < kc else 0)
            else:
                y, left = x + (16*t + i)*ld, 32 if full else kc if 16*t + i < rows else 0
                u, v = load(y, left), load(y + 16, 16 if full else most(0, left - 16))
            for s in range(3):
                x_u, x_v = UPPER(u), UPPER(v)
                (<vf*>(w + 256*s*(1 if turn else tiles) + 16*i))[0] = PAIR(x_u, x_v)
                u, v = u - x_u, v - x_v
        for s in range(3 if turn else 0):
            transpose_tile(words + 256*s, 16, 16, out + (tiles*s + t)*256, 16)


cdef inline vf pair(const real* x, const real* y, idx left, idx left_y) noexcept nogil:
    """VL words, each a bf16 of x below one of y; zeros where none are left."""
    if real is float:
        return PAIRS(load(x, left), load(y, left_y))
    else:
        return ZIP(load_half(x, left), load_half(y, left_y))


cdef inline void half_step(const bint full, const bint across, const bint turn, const real* x,
                           idx ld, idx kc, idx rows, float* out) noexcept nogil:
    """A step of a panel in one part, see pack_parts.  A word holds neighbours in k.

    So 32 k of a row that does not lie across are copied, or rounded, as they are.
    """
    cdef float words[256]
    cdef idx t, i, j, left, left_y
    cdef const real* y
    cdef float* w
    for t in range(tiles_of(across, turn)):
        w = &words[0] if turn else out + 256*t
        for i in range(16):
            if across:
                y, left = x + 2*i*ld + 16*t, 16 if full else most(0, rows - 16*t)
                prefetch(y + 32*ld)
                prefetch(y + 33*ld)
                left_y = left if full or 2*i + 1 < kc else 0
                left = left if full or 2*i < kc else 0
                for j in range(16//VL):
                    (<vf*>(w + 16*i))[j] = pair(y + j*VL, y + ld + j*VL, most(0, left - j*VL),
                                                most(0, left_y - j*VL))
            else:
                y, left = x + (16*t + i)*ld, 32 if full else least(32, kc)
                half_row(y, left if full or 16*t + i < rows else 0, <uint16_t*>(w + 16*i))
        if turn:
            turn_words(words, out + 256*t)


cdef inline void store_both(void* y, vf a, vf b) noexcept nogil:
    """2*VL elements of bf16."""
    if WITH_DOT:
        (<vf*>y)[0] = BOTH(a, b)
    else:
        store(<uint16_t*>y, a, VL)
        store(<uint16_t*>y + VL, b, VL)


cdef inline void half_row(const real* x, idx left, uint16_t* y) noexcept nogil:
    """32 elements as bf16, zeros from `left` on."""
    cdef idx j
    if real is float:
        for j in range(16//VL):
            store_both(y + 2*j*VL, load(x + 2*j*VL, most(0, left - 2*j*VL)),
                       load(x + (2*j + 1)*VL, most(0, left - (2*j + 1)*VL)))
    else:
        memset(y, 0, 64 if left < 32 else 0)
        memcpy(y, x, 64 if left >= 32 else 2*left)


cdef inline void turn_words(const float* x, float* y) noexcept nogil:
    """y = transpose of x, 16 x 16 words."""
    cdef idx i, j
    for i in range(16//VL):
        for j in range(16//VL):
            transpose_tile(x + 16*i*VL + j*VL, 16, VL, y + 16*j*VL + i*VL, 16)


cdef inline void pack_step(const bint full, const bint across, const bint turn, const int count,
                           const real* x, idx ld, idx kc, idx rows, float* out) noexcept nogil:
    """The step of `count` parts."""
    if count == 1:
        half_step(full, across, turn, x, ld, kc, rows, out)
    elif real is float:                 # bf16 has no more than one
        split_step(full, across, turn, x, ld, kc, rows, out)


cdef inline void pack_any(bint across, bint turn, const int count, const real* x, idx ld, idx kc,
                          idx rows, float* out) noexcept nogil:
    """pack_step by constants: a whole step needs no conditions."""
    if rows < 16*tiles_of(across, turn) or kc < 32:
        pack_step(False, across, turn, count, x, ld, kc, rows, out)
    elif across and turn:
        pack_step(True, True, True, count, x, ld, 32, 32, out)
    elif across:
        pack_step(True, True, False, count, x, ld, 32, 32, out)
    elif turn:
        pack_step(True, False, True, count, x, ld, 32, 32, out)
    else:
        pack_step(True, False, False, count, x, ld, 32, 32, out)


cdef void pack_parts(const real* x, idx ld, bint across, idx kc, idx rows, bint turn, int count,
                     float* out, idx room) noexcept nogil:
    """Rows of the matrix in parts, zero-padded, as panels of 16 (A) or 32 (B), `room` floats apart.

    A step of 32 k is, part after part, tiles of 16 x 16 words, a word holding two k.
    A's tiles have a row a row, B's a column a column, of words: what comes the other way is turned.
    If rows lie across, all panels take a step before any takes the next: memory read in long runs
    is a third faster than in the 64 or 128 bytes that a panel has of a row.
    """
    cdef idx width = 16*tiles_of(across, turn), step = count*16*width   # floats of a panel's step
    cdef idx panels = parts(rows, width), steps = parts(kc, 32), i, t, s
    cdef const real* y
    for i in range(panels*steps):
        t, s = (i % panels, i//panels) if across else (i//steps, i % steps)
        y = x + (32*s*ld + t*width if across else t*width*ld + 32*s)
        if count == 1:
            pack_any(across, turn, 1, y, ld, kc - 32*s, rows - t*width, out + t*room + s*step)
        else:
            pack_any(across, turn, 3, y, ld, kc - 32*s, rows - t*width, out + t*room + s*step)


cdef void pack_rows(const Product* p, idx first, idx end, idx s, float* out) noexcept nogil:
    """Panels first .. end of A's rows, slice s, each a_room after the last."""
    cdef idx pc = s*p.depth, kc = least(p.depth, p.k - pc), i = first*p.mr, t
    cdef idx start = pc*p.lda + i if p.ta else i*p.lda + pc, rows = least(p.m, end*p.mr) - i
    if p.half_a:
        pack_parts(<const uint16_t*>p.a + start, p.lda, p.ta, kc, rows, p.ta, 1, out, p.a_room)
    elif p.parts:
        pack_parts(<const float*>p.a + start, p.lda, p.ta, kc, rows, p.ta, p.parts, out, p.a_room)
    for t in range(0 if p.parts else end - first):
        pack(<const float*>p.a + start + t*MR*(1 if p.ta else p.lda), p.lda, p.ta, kc,
             p.m - i - t*MR, MR, out + t*p.a_room)


cdef void pack_columns(const Product* p, idx first, idx end, idx half, idx s,
                       float* out) noexcept nogil:
    """Panels first .. end of the columns of a half of B, slice s, each b_room after the last."""
    cdef idx pc = s*p.depth, kc = least(p.depth, p.k - pc), j = first*p.nr + half*(p.n//2), t
    cdef idx start = j*p.ldb + pc if p.tb else pc*p.ldb + j
    cdef idx columns = least(p.n - j, (end - first)*p.nr)
    if p.half_b:
        pack_parts(<const uint16_t*>p.b + start, p.ldb, not p.tb, kc, columns, p.tb, 1, out,
                   p.b_room)
    elif p.parts:
        pack_parts(<const float*>p.b + start, p.ldb, not p.tb, kc, columns, p.tb, p.parts, out,
                   p.b_room)
    for t in range(0 if p.parts else end - first):
        pack(<const float*>p.b + start + t*NR*(p.ldb if p.tb else 1), p.ldb, not p.tb, kc,
             p.n - j - t*NR, NR, out + t*p.b_room)


cdef void register_tile(idx kc, const float* a, const float* b, float* c, idx ldc, bint acc,
                        const float* y, idx step, idx count) noexcept nogil:
    """C[MR, NR] (+)= one panel of A, [kc, MR], times one of B, [kc, NR]; MR*NV sums in registers.

    Every sum is one chain in ascending k; there are enough of them to hide the latency of an FMA.
    C joins at the end, in one addition: a slice's sum is complete before it meets the others.
    On the way the lines of C are fetched, a row every fourth k, and `count` rows `step` apart of
    the panel that comes next, from y on: all at once they would hold up the loads of B.
    """
    cdef vf sums[14][3]     # MR and NV are constants of the build, at most 14 and 3
    cdef float* z = c
    cdef idx k
    TILE_CLEAR(sums, MR, NV)
    for k in range(kc//4):
        if k < MR:
            prefetch_write(z)               # a row that starts anywhere has NV + 1 lines
            prefetch_write(z + NR//2)
            prefetch_write(z + NR - 1)
            z = z + ldc
        if k < count:
            prefetch_l2(y)
            prefetch_l2(y + NR//2)
            prefetch_l2(y + NR - 1)
            y = y + step
        TILE_ADD(sums, MR, NV, a, 1, b)
        TILE_ADD(sums, MR, NV, a + MR, 1, b + NR)
        TILE_ADD(sums, MR, NV, a + 2*MR, 1, b + 2*NR)
        TILE_ADD(sums, MR, NV, a + 3*MR, 1, b + 3*NR)
        a = a + 4*MR
        b = b + 4*NR
    for k in range(kc % 4):
        TILE_ADD(sums, MR, NV, a, 1, b)
        a = a + MR
        b = b + NR
    TILE_STORE(sums, MR, NV, c, ldc, acc)


cdef inline void low_tile(const int rows, idx kc, const float* a, const float* b,
                          float* c) noexcept nogil:
    """The first rows of register_tile, overwriting: the same sums without those nobody asks for."""
    cdef vf sums[2*THIN][3]
    cdef idx k
    TILE_CLEAR(sums, rows, NV)
    for k in range(kc):
        TILE_ADD(sums, rows, NV, a, 1, b)
        a = a + MR
        b = b + NR
    TILE_STORE(sums, rows, NV, c, NR, False)


cdef void merge(const float* tile, idx ld, float* c, idx ldc, bint acc, idx rows,
                idx cols) noexcept nogil:
    """C[rows, cols] (+)= the upper left part of a tile that was computed beside it."""
    cdef idx i, j
    cdef vf v
    for i in range(rows):
        j = 0
        while j < cols:
            v = load(tile + i*ld + j, cols - j)
            if acc:
                v = v + load(c + i*ldc + j, cols - j)
            store(c + i*ldc + j, v, cols - j)
            j += VL


cdef void edge_tile(idx kc, const float* a, const float* b, float* c, idx ldc, bint acc,
                    idx rows, idx cols) noexcept nogil:
    """A tile at the edge of C: computed beside it, of which rows x cols are kept.

    The panels are padded with zeros; the sums that are kept are those of a tile in the middle.
    """
    cdef float whole[TILE_MAX]
    if rows <= THIN:
        low_tile(THIN, kc, a, b, whole)
    elif rows <= 2*THIN and MR > 2*THIN:
        low_tile(2*THIN, kc, a, b, whole)
    else:
        register_tile(kc, a, b, whole, NR, False, b, 0, 0)
    merge(whole, NR, c, ldc, acc, rows, cols)


cdef inline void six_products(const float* a, const float* b) noexcept nogil:
    """A step of a tile in parts, from the smallest product to the largest, with 7 loads."""
    AMX_A(a)
    AMX_B(b + 4*256)
    AMX_ADD()                       # a1 b3
    AMX_B(b + 2*256)
    AMX_ADD()                       # a1 b2
    AMX_A(a + 256)
    AMX_ADD()                       # a2 b2
    AMX_B(b)
    AMX_ADD()                       # a2 b1
    AMX_A(a + 2*256)
    AMX_ADD()                       # a3 b1
    AMX_A(a)
    AMX_ADD()                       # a1 b1


cdef inline void multiply_step(const int count, const float* a, const float* b) noexcept nogil:
    """A step of a tile on AMX, in so many parts."""
    if count == 1:
        AMX_A(a)
        AMX_B(b)
        AMX_ADD()
    else:
        six_products(a, b)


cdef void dot_tile(idx steps, const float* a, const float* b, float* c, idx ldc,
                   bint acc) noexcept nogil:
    """The same tile in one part without AMX: DOT_ROWS rows by two vectors at a time, pair by pair.
    """
    cdef vf sums[8][3]
    cdef const float* u
    cdef const float* v
    cdef float* z
    cdef idx i, j, k, t, next = 256 if VL == 16 else VL     # from the first vector to the second
    for i in range(SPLIT_ROWS//DOT_ROWS):
        for j in range(SPLIT//(2*VL)):
            u, z = a + 16*DOT_ROWS*i, c + DOT_ROWS*i*ldc + 2*VL*j
            v = b + 2*VL*j//16*256 + 2*VL*j % 16
            if acc:
                TILE_LOAD(sums, DOT_ROWS, 2, z, ldc)
            else:
                TILE_CLEAR(sums, DOT_ROWS, 2)
            for t in range(steps):
                for k in range(16):
                    DOT_ADD(sums, DOT_ROWS, u, v, v + next)
                    u, v = u + 1, v + 16
                u, v = u + 240, v + 256                     # the next step
            TILE_STORE(sums, DOT_ROWS, 2, z, ldc, False)


cdef inline void split_tile(const int count, idx steps, const float* a, const float* b, float* c,
                            idx ldc, bint acc, idx rows, idx cols, const float* y, idx step,
                            idx ahead, const char* z, idx z_row, idx z_width) noexcept nogil:
    """The tile in parts: C[rows, cols] (+)= one panel of A times one of B, both of 32 a step.

    Fetched on the way as in register_tile; z: where rows of z_width bytes (or 0) will be written.
    The sums go on from C instead of joining it: two loads instead of 32 additions, and 8,192 k are
    still only 256 roundings.
    """
    cdef float tile[TILE_MAX]
    cdef idx k, i, each = parts(SPLIT_ROWS, most(1, steps)) if z_width else 0
    cdef bint whole = rows == SPLIT_ROWS and cols == SPLIT
    cdef float* into = c if whole else tile         # at an edge of C: computed beside it
    cdef idx row = ldc if whole else SPLIT
    if acc and not whole:
        memset(tile, 0, TILE_MAX*sizeof(float))
        merge(c, ldc, tile, SPLIT, False, rows, cols)
    if not WITH_AMX:
        dot_tile(steps, a, b, into, row, acc)
    else:
        if acc:
            AMX_LOAD(into, row)
        else:
            AMX_ZERO()
        for k in range(steps):
            for i in range(each):
                prefetch_write(z)
                if z_width > 64:
                    prefetch_write(z + 64)
                prefetch_write(z + z_width - 1)
                z = z + z_row
            for i in range(ahead):
                prefetch_l2(y)
                prefetch_l2(y + SPLIT//2)
                prefetch_l2(y + SPLIT - 1)
                y = y + step
            multiply_step(count, a, b)
            a = a + count*256
            b = b + count*512
        AMX_STORE(into, row)
    if not whole:
        merge(tile, SPLIT, c, ldc, False, rows, cols)


cdef inline void finish_row(const Product* p, const float* sums, idx second, real* c,
                            const real* r, real* h, idx n) noexcept nogil:
    """n elements of a row of C from their sums: C = sums (+ C) (+ residual), h = SwiGLU of halves.

    The sums of the second half lie `second` after those of the first.  They are C itself where C
    is fp32; h is made of what C holds, rounded or not, so that it can be made from that again.
    """
    cdef idx j = 0
    cdef vf v
    if h != NULL:                       # whole panels: see gemm()
        prefetch_write(h + AHEAD*(p.n//2))
        prefetch_write(h + AHEAD*(p.n//2) + p.nr//2)
        if real is float:
            swiglu_row(<const float*>c, <const float*>c + p.n//2, h, n)
        else:
            while j < n:
                swiglu_halves(sums + j, second, <uint16_t*>c + j, p.n//2, <uint16_t*>h + j, p.past)
                j += 2*VL
        return
    while j < n and (p.beside or r != NULL):
        v = load(sums + j, n - j)
        if p.beside and p.acc:
            v = v + load(<const real*>c + j, n - j)
        if r != NULL:
            v = load(r + j, n - j) + v
        store(c + j, v, n - j)
        j += VL


cdef inline void swiglu_halves(const float* sums, idx second, uint16_t* c, idx up, uint16_t* h,
                               bint past) noexcept nogil:
    """The next 2*VL elements of SwiGLU in bf16, gate and up perhaps past the caches."""
    cdef vf g0, g1, u0, u1
    g0, g1 = ROUND((<const vf*>sums)[0]), ROUND((<const vf*>sums)[1])
    u0, u1 = ROUND((<const vf*>(sums + second))[0]), ROUND((<const vf*>(sums + second))[1])
    if WITH_DOT and past and (<size_t>c | <size_t>(c + up)) % 64 == 0:
        STREAM(c, BOTH(g0, g1))
        STREAM(c + up, BOTH(u0, u1))
    else:
        store_both(c, g0, g1)
        store_both(c + up, u0, u1)
    store_both(h, silu(g0)*u0, silu(g1)*u1)


cdef inline void store_all(uint16_t* y, const vf* x, bint past) noexcept nogil:
    """SPLIT elements of C, rounded; past the caches where asked, and where they are a line."""
    if WITH_DOT and past and <size_t>y % 64 == 0:
        STREAM(y, BOTH(x[0], x[1]))
    else:
        half_row(<const float*>x, SPLIT, y)


cdef void finish(const Product* p, idx i0, idx i1, idx j0, idx j1, float* sums, idx ld,
                 idx second) noexcept nogil:
    """The epilogue of finished rows and columns, still in L1: dropout, then residual, or SwiGLU.

    Their sums' rows are ld apart, those of the second half of a row begin `second` after its first.
    The mask depends on an element's place in C, so it does not matter how C was cut into blocks.
    """
    cdef idx i, at, sequence, position, n = j1 - j0
    if p.half_c and n == SPLIT and not (p.acc or p.threshold or p.residual != NULL or p.h != NULL):
        for i in range(i0, i1):             # as most products: nothing but to round
            store_all(<uint16_t*>p.c + i*p.ldc + j0, <const vf*>(sums + (i - i0)*ld), p.past)
        return
    for i in range(i0, i1):
        if p.threshold:
            sequence, position = i//p.seq, i % p.seq
            dropout_row(sums, n, position*p.n + j0, p.key, p.first_sequence + <uint64_t>sequence,
                        p.site, p.threshold, p.keep_scale)
        at = i*p.ldc + j0
        if p.half_c and n == SPLIT:     # a copy with constants: loops without tails
            finish_row(p, sums, second, <uint16_t*>p.c + at,
                       ahead_of(<const uint16_t*>p.residual, at, p.ldc),
                       <uint16_t*>p.h + i*(p.n//2) + j0 if p.h != NULL else NULL, SPLIT)
        elif p.half_c:
            finish_row(p, sums, second, <uint16_t*>p.c + at,
                       ahead_of(<const uint16_t*>p.residual, at, p.ldc),
                       <uint16_t*>p.h + i*(p.n//2) + j0 if p.h != NULL else NULL, n)
        else:
            finish_row(p, sums, second, <float*>p.c + at,
                       ahead_of(<const float*>p.residual, at, p.ldc),
                       <float*>p.h + i*(p.n//2) + j0 if p.h != NULL else NULL, n)
        sums = sums + ld


cdef inline const real* ahead_of(const real* residual, idx at, idx ld) noexcept nogil:
    """The residual from `at` on, if there is one; rows to come are fetched."""
    if residual == NULL:
        return NULL
    prefetch(residual + at + AHEAD*ld)
    prefetch(residual + at + AHEAD*ld + SPLIT//2)
    return residual + at


cdef inline float* panel_at(const Product* p, const Part* have, idx q, idx half,
                            idx s) noexcept nogil:
    """Where panel q of a half of B's columns, slice s, lies in what is at hand."""
    cdef idx columns = have.q1 - have.q0
    return <float*>have.b + (((s - have.b_from)*p.halves + half)*columns + q - have.q0)*p.b_room


cdef inline float* rows_at(const Product* p, const Part* have, idx t, idx s) noexcept nogil:
    """Where panel t of A's rows, slice s, lies in what is at hand."""
    return <float*>have.a + ((s - have.s0)*p.rows + t)*p.a_room


cdef void multiply_panel(const Product* p, const Part* have, idx first, idx end, idx q, idx half,
                         idx s, const float* a, float* own, float* c, idx ldc) noexcept nogil:
    """Panels first .. end of A's rows, lying at `a`, times panel q of a half of B, slice s of K.

    Sums go to c, which is C itself unless they grow beside it.
    """
    cdef idx pc = s*p.depth, kc = least(p.depth, p.k - pc), count = end - first
    cdef idx j = q*p.nr + half*(p.n//2), cols = least(p.nr, p.n - j), rows, t, ahead = kc, step = 0
    cdef const float* b = own
    cdef const float* y = own       # what to fetch ahead, in rows of nr: nothing while step is 0
    cdef bint acc = p.acc and not p.beside or s > 0
    cdef idx size = 2 if p.half_c else 4, width = size*least(p.nr, p.n - j)     # bytes
    cdef const char* z = <const char*>p.c + size*(first*p.mr*p.ldc + j)
    if p.beside and (s + 1 < p.slices or p.past):
        width = 0
    if have.b != NULL:
        b = panel_at(p, have, q, half, s)
        y, step, ahead = b + p.b_room, p.nr, p.b_room//p.nr
    else:
        pack_columns(p, q, q + 1, half, s, own)
        if not p.tb and not p.half_b:
            y, step = <const float*>p.b + pc*p.ldb + j + p.nr, p.ldb
    ahead = parts(ahead, count) if step else 0      # the next panel is fetched a part a tile
    for t in range(count):
        rows = p.mr if p.beside else least(p.mr, p.m - (first + t)*p.mr)
        cols = p.nr if p.beside else cols
        if p.parts == 1:
            split_tile(1, parts(kc, SPLIT), a, b, c, ldc, acc, rows, cols, y, step,
                       parts(ahead*SPLIT, kc) if kc else 0, z, size*p.ldc, width)
        elif p.parts:
            split_tile(3, parts(kc, SPLIT), a, b, c, ldc, acc, rows, cols, y, step,
                       parts(ahead*SPLIT, kc) if kc else 0, z, size*p.ldc, width)
        elif rows == MR and cols == NR:
            register_tile(kc, a, b, c, ldc, acc, y, step, ahead)
        else:
            edge_tile(kc, a, b, c, ldc, acc, rows, cols)
        a, y, c, z = a + p.a_room, y + ahead*step, c + p.mr*ldc, z + size*p.mr*p.ldc


cdef void multiply_block(const Product* p, const Part* have, idx first, idx end, idx q0, idx q1,
                         float* own) noexcept nogil:
    """One task: panels first .. end of A's rows, q0 .. q1 of B's columns, the slices at hand.

    `own` is the thread's: one panel of B, sums that grow beside C, then A's panels, which are in
    that core's L2 from then on: of a slice, or of all where a panel of C takes them in turn.
    """
    cdef idx s = have.s0, to, i, q, half, ld = p.ldc
    cdef bint epilogue = p.threshold or p.residual != NULL or p.h != NULL or p.beside
    cdef float* sums = own + p.b_room
    cdef float* packed = sums + sums_room(p, end - first)
    cdef const float* a
    if p.parts:
        AMX_OPEN()
    while s < have.s1:
        to = have.s1 if p.beside else s + 1
        for i in range(s, to if have.a == NULL else s):
            pack_rows(p, first, end, i, packed + (i - s)*(end - first)*p.a_room)
        for q in range(q0, q1):
            for half in range(p.halves):
                for i in range(s, to):
                    a = packed + (i - s)*(end - first)*p.a_room
                    if have.a != NULL:
                        a = rows_at(p, have, first, i)
                    if p.beside:
                        multiply_panel(p, have, first, end, q, half, i, a, own,
                                       sums + half*p.nr, p.halves*p.nr)
                    else:
                        multiply_panel(p, have, first, end, q, half, i, a, own, <float*>p.c
                                       + first*p.mr*ld + q*p.nr + half*(p.n//2), ld)
            # After the last slice these columns are final: no other task writes to them
            if epilogue and to == p.slices:
                if p.beside:
                    finish(p, first*p.mr, least(p.m, end*p.mr), q*p.nr,
                           least(p.n, q*p.nr + p.nr), sums, p.halves*p.nr, p.nr)
                else:
                    finish(p, first*p.mr, least(p.m, end*p.mr), q*p.nr,
                           least(p.n, q*p.nr + p.nr), <float*>p.c + first*p.mr*ld + q*p.nr, ld,
                           p.n//2)
        s = to
    if p.parts:
        AMX_CLOSE()


cdef inline Part whole(const Product* p) noexcept nogil:
    """All of the product, B packed if it came so."""
    cdef Part all
    all.a, all.b, all.q0, all.q1, all.s0, all.s1 = NULL, p.packed, 0, p.columns, 0, p.slices
    all.b_from, all.group = 0, 1
    return all


cdef inline idx low_panels(const Product* p) noexcept nogil:
    """Panels of A up to which A is shared."""
    return LOW_ROWS//p.mr


cdef inline idx at_once(const Product* p) noexcept nogil:
    """Slices of A that a block has ready."""
    return p.slices if p.beside else 1


cdef inline idx tallest(const Product* p) noexcept nogil:
    """Panels of a block at most; all slices of one that has them ready stay in L2."""
    cdef idx most_panels = least(p.rows, low_panels(p))
    if p.beside:
        most_panels = least(most_panels, HALF_L2//(p.a_room*p.slices))
    return most(1, most_panels)


cdef inline idx sums_room(const Product* p, idx panels) noexcept nogil:
    """Floats of sums that grow beside C."""
    return panels*p.mr*p.halves*p.nr if p.beside else 0


cdef idx own_room(const Product* p) noexcept nogil:
    """Floats of scratch a thread needs: a panel of B, sums, and the tallest block of A's."""
    return p.b_room + sums_room(p, tallest(p)) + tallest(p)*p.a_room*at_once(p)


cdef void multiply_serial(const Product* p, float* own) noexcept nogil:
    """One product on the calling thread; its sums are those of multiply_team."""
    cdef idx first = 0
    cdef Part all = whole(p)
    while first < p.rows:
        multiply_block(p, &all, first, least(p.rows, first + tallest(p)), 0, p.columns, own)
        first += tallest(p)


cdef inline idx shared_tasks(const Product* p, Part* have, int threads) noexcept nogil:
    """Into how many tasks packing what there is room for at hand is cut; sets `group`."""
    cdef idx panels = p.rows if have.a != NULL else have.q1 - have.q0, halves
    halves = (have.s1 - have.s0)*(1 if have.a != NULL else p.halves)
    have.group = most(1, least(GROUP, halves*panels//(2*threads)))
    return halves*parts(panels, have.group)


cdef void share_group(const Product* p, const Part* have, idx t) noexcept nogil:
    """One of these tasks: panels side by side of a slice, or of a half of it."""
    cdef idx panels = p.rows if have.a != NULL else have.q1 - have.q0
    cdef idx groups = parts(panels, have.group), first = t % groups*have.group
    cdef idx end = least(panels, first + have.group), s = t//groups, half = 0
    if have.a != NULL:
        pack_rows(p, first, end, have.s0 + s, rows_at(p, have, first, have.s0 + s))
    else:
        s, half = have.s0 + s//p.halves, s % p.halves
        pack_columns(p, have.q0 + first, have.q0 + end, half, s,
                     panel_at(p, have, have.q0 + first, half, s))


# How the team shares a product, all from its shape and the number of threads.
cdef struct Plan:
    bint a, b               # the operand that is packed by the team, if any
    idx wide, deep          # columns (in panels) and slices at a time
    idx blocks, ranges      # tasks: of A's rows, of B's columns
    idx room                # floats that are shared


cdef Plan share(const Product* p, int threads) noexcept nogil:
    """A shared, and ranges of columns, where B is much larger; else B, and blocks of A's rows.

    A shared A goes in as many blocks as make one a slice that L2 holds beside a busy hyper-thread:
    B is then packed once a block, which costs less than A from L3 for every panel of B.
    """
    cdef Plan plan
    cdef idx slice, tall = BLOCK_HALVES if p.parts == 1 and not p.beside else BLOCK_ROWS
    plan.a = p.rows <= low_panels(p) and p.n >= 2*p.m
    plan.b = not plan.a and p.packed == NULL
    plan.wide = least(p.columns, NC//p.nr//p.halves) if plan.b else p.columns
    if plan.b and p.beside:
        plan.wide = least(plan.wide, most(1, SHARED//(p.b_room*p.slices*p.halves)))
    slice = p.rows*p.a_room if plan.a else plan.wide*p.halves*p.b_room
    plan.deep = p.slices
    if (plan.a or plan.b) and not p.beside:
        plan.deep = least(p.slices, most(1, ROOM//slice))
    plan.room = plan.deep*slice if plan.a or plan.b else 0
    plan.blocks = parts(p.rows*p.a_room*at_once(p), HALF_L2) if plan.a else 1
    plan.blocks = most(plan.blocks, parts(p.rows, tallest(p)))
    plan.ranges = least(p.columns, parts(TASKS*threads, plan.blocks)) if plan.a else 1
    if not plan.a:
        plan.blocks = least(p.rows, most(plan.blocks, most(parts(p.rows*p.mr, tall),
                                                           TASKS*threads)))
    return plan


cdef void multiply_team(const Product* p, const Plan* plan, float* room, float* own,
                        int threads) noexcept nogil:
    """One product on the team: for a part at a time, pack what is shared, then the tasks.

    All threads run the outer loops, with equal bounds; the loops over tasks are shared.  The first
    barrier keeps a thread from reading a panel before it is packed, the second from overwriting
    one that another still reads.  Tasks are dealt anew on the other side of a barrier than taken.
    """
    cdef idx each = own_room(p), columns, shared, t, i, j, n = plan.blocks*plan.ranges
    cdef Part have, all = whole(p)
    cdef Tasks packing, multiplying
    deal(&packing, threads)
    with nogil, parallel(num_threads=threads):
        have = all
        if plan.a:
            have.a = room
        elif plan.b:
            have.b = room
        while have.q0 < all.q1:
            have.q1, have.s0 = least(all.q1, have.q0 + plan.wide), 0
            columns = have.q1 - have.q0
            while have.s0 < all.s1:
                have.s1 = least(all.s1, have.s0 + plan.deep)
                have.b_from = have.s0 if plan.b else 0
                if threadid() == 0:
                    deal(&multiplying, threads)
                shared = shared_tasks(p, &have, threads) if plan.a or plan.b else 0
                t = take(&packing, shared)
                while t >= 0:
                    share_group(p, &have, t)
                    t = take(&packing, shared)
                barrier()
                if threadid() == 0:
                    deal(&packing, threads)
                t = take(&multiplying, n)
                while t >= 0:
                    i, j = t//plan.ranges, t % plan.ranges
                    multiply_block(p, &have, p.rows*i//plan.blocks, p.rows*(i + 1)//plan.blocks,
                                   have.q0 + columns*j//plan.ranges,
                                   have.q0 + columns*(j + 1)//plan.ranges, own + threadid()*each)
                    t = take(&multiplying, n)
                barrier()
                have.s0 = have.s1
            have.q0 = have.q1


cdef inline void dots(const int rows, const int cols, const real* a, idx lda, const real* b,
                      idx ldb, idx k, float* c, idx ldc, bint acc) noexcept nogil:
    """C[rows, cols] (+)= rows of A times rows of B, VL sums each, k in ascending steps of VL."""
    cdef vf sums[4][4]
    cdef vf w[4]
    cdef vf x
    cdef idx t, i, j, left
    for i in range(rows):
        for j in range(cols):
            sums[i][j] = VZERO
    for t in range(k//VL):
        for j in range(cols):
            w[j] = load(b + j*ldb + t*VL, VL)
            prefetch(b + (j + 2*cols)*ldb + t*VL)   # hardware begins anew with each row
        for i in range(rows):
            x = load(a + i*lda + t*VL, VL)
            for j in range(cols):
                sums[i][j] = sums[i][j] + x*w[j]
    t, left = k//VL*VL, k % VL
    for i in range(rows):
        x = load(a + i*lda + t, left)
        for j in range(cols):
            c[i*ldc + j] = lane_sum(sums[i][j] + x*load(b + j*ldb + t, left)) + (
                c[i*ldc + j] if acc else <float>0.0)


cdef inline void few_columns(const Product* p, const real* a, const real* b, idx n, float* c,
                             idx ldc, bint acc) noexcept nogil:
    """The next n columns of a product of few rows with a transposed B, which is read once.

    Four rows of B at a time: as many streams as hardware follows with ease; they are in L1 when
    A's next four rows come.
    """
    cdef idx i, r, j = 0, rows, step
    while j < n:
        for i in range(0, p.m, 4):
            rows = least(4, p.m - i)
            if j + 4 > n:
                for r in range(i, i + rows):    # an edge: element by element
                    dots(1, 1, a + r*p.lda, p.lda, b, p.ldb, p.k, c + r*ldc + j, ldc, acc)
            elif rows == 4:
                dots(4, 4, a + i*p.lda, p.lda, b, p.ldb, p.k, c + i*ldc + j, ldc, acc)
            elif rows == 3:
                dots(3, 4, a + i*p.lda, p.lda, b, p.ldb, p.k, c + i*ldc + j, ldc, acc)
            elif rows == 2:
                dots(2, 4, a + i*p.lda, p.lda, b, p.ldb, p.k, c + i*ldc + j, ldc, acc)
            else:
                dots(1, 4, a + i*p.lda, p.lda, b, p.ldb, p.k, c + i*ldc + j, ldc, acc)
        step = 1 if j + 4 > n else 4
        j, b = j + step, b + step*p.ldb


cdef void few_rows(const Product* p, idx j0, idx j1) noexcept nogil:
    """Columns j0 .. j1 of a product of few rows with a transposed B, in place; `half_a == half_b`.
    """
    cdef float beside[16*PIECES]
    cdef idx j = j0, n, ld = PIECES if p.beside else p.ldc
    cdef float* c
    while j < j1:
        n = least(PIECES, j1 - j)
        c = &beside[0] if p.beside else <float*>p.c + j
        if p.half_b:
            few_columns(p, <const uint16_t*>p.a, <const uint16_t*>p.b + j*p.ldb, n, c, ld,
                        p.acc and not p.beside)
        else:
            few_columns(p, <const float*>p.a, <const float*>p.b + j*p.ldb, n, c, ld, p.acc)
        finish(p, 0, p.m, j, j + n, c, ld, 0)
        j += n


cdef void run_deep(Product* p):
    """A product whose sums take a place of their own, all in fp32, and then are finished."""
    cdef Buffer sums = Buffer(p.m*p.n*sizeof(float))
    cdef float* s = <float*>sums.address
    cdef Product q = p[0]
    cdef idx t, step = most(1, PART//most(1, p.n)), n = p.n//2 if p.h != NULL else p.n
    q.c, q.ldc, q.half_c, q.acc, q.threshold = s, p.n, False, False, 0
    q.residual = q.h = NULL
    run_product(&q)
    lay_out(p)
    for t in prange(parts(p.m, step), nogil=True, schedule='dynamic', num_threads=team(p.m*p.n)):
        finish(p, t*step, least(p.m, t*step + step), 0, n, s + t*step*p.n, p.n, p.n//2)


cdef void run_product(Product* p):
    """Take scratch (for which the GIL is needed), then compute on one thread or the team."""
    cdef int threads = 1 if p.m*p.n*p.k < PARALLEL_FROM else THREADS
    cdef idx t, step
    cdef Buffer own, room
    cdef Plan plan
    cdef float little[LITTLE + 16]      # for 64^3, whose buffer would take a tenth of the time
    if p.half_c and p.k > DEEP and p.m >= SPLIT_FROM:
        run_deep(p)
        return
    lay_out(p)
    if p.m < SPLIT_FROM and p.tb and not p.ta and p.half_a == p.half_b and p.half_a == p.half:
        step = most(4, parts(p.n, 4*TASKS*threads)*4)       # columns of a task
        for t in prange(parts(p.n, step), nogil=True, schedule='dynamic',
                        num_threads=1 if p.n*p.k < SERIAL_BELOW else THREADS):
            few_rows(p, t*step, least(p.n, t*step + step))
        return
    if threads == 1 and own_room(p) <= LITTLE:
        multiply_serial(p, <float*>((<size_t>little + 63)//64*64))
        return
    own = Buffer(threads*own_room(p)*4)
    if threads == 1:
        with nogil:
            multiply_serial(p, <float*>own.address)
        return
    plan = share(p, threads)
    room = Buffer(4*plan.room)
    multiply_team(p, &plan, <float*>room.address, <float*>own.address, threads)


cpdef enum:                             # flags of a product in bf16: which of its arrays are that
    HALF_A = 1
    HALF_B = 2
    HALF_C = 4                          # with residual and h


cdef inline void set_types(Product* p, int half) noexcept nogil:
    """Take over the flags; 0 is a product in fp32."""
    p.half = half != 0
    p.half_a, p.half_b = half & HALF_A != 0, half & HALF_B != 0
    p.half_c = half & HALF_C != 0


def pack_room(idx n, idx k, int half=0):
    """Bytes that `pack_b` writes."""
    cdef Product p
    memset(&p, 0, sizeof(Product))
    p.m, p.n, p.k = SPLIT_FROM, n, k
    set_types(&p, half)
    lay_out(&p)
    return p.slices*p.columns*p.b_room*sizeof(float)


def pack_b(size_t b, idx ldb, bint tb, size_t out, idx n, idx k, int half=0):
    """Pack op(B) [k, n], [n, k] if tb, for products of 16 rows and more that take it as `packed`.
    """
    cdef Product p
    cdef Part all
    cdef idx t, tasks
    memset(&p, 0, sizeof(Product))
    p.b, p.ldb, p.tb, p.m, p.n, p.k = <const void*>b, ldb, tb, SPLIT_FROM, n, k
    set_types(&p, half)
    lay_out(&p)
    all = whole(&p)
    all.b = <const float*>out
    tasks = shared_tasks(&p, &all, THREADS)
    for t in prange(tasks, nogil=True, schedule='dynamic', num_threads=team(n*k)):
        share_group(&p, &all, t)


def gemm(size_t a, idx lda, bint ta, size_t b, idx ldb, bint tb, size_t c, idx ldc, idx m, idx n,
         idx k, bint acc, size_t packed=0, size_t h=0, size_t residual=0, uint32_t threshold=0,
         uint64_t key=0, uint64_t first_sequence=0, uint32_t site=0, idx seq=1,
         double keep_scale=1.0, int half=0):
    """C (+)= op(A) op(B); then, if asked, C = residual + dropout(C), or h = SwiGLU of C's halves.

    Row i is position i % seq of sequence first_sequence + i//seq.  Leading dimensions are in
    elements; `residual` has C's.  Shapes are those of Product; c overlaps nothing else.
    half: in bf16, with fp32 sums; which arrays are bf16 (HALF_A, HALF_B, HALF_C), others fp32.
    """
    cdef Product p
    p.a, p.b, p.c = <const void*>a, <const void*>b, <void*>c
    p.lda, p.ldb, p.ldc, p.m, p.n, p.k = lda, ldb, ldc, m, n, k
    p.ta, p.tb, p.acc = ta, tb, acc
    set_types(&p, half)
    p.packed = <const float*>packed if m >= SPLIT_FROM else NULL
    p.residual, p.seq = <const void*>residual, seq
    p.key, p.first_sequence, p.site = key, first_sequence, site
    p.threshold, p.keep_scale = threshold, <float>keep_scale
    # halves of whole panels, or in a pass apart
    p.h = <void*>h if n % (2*(SPLIT if half else NR)) == 0 and m >= SPLIT_FROM else NULL
    run_product(&p)
    if h and p.h == NULL:
        swiglu(c, h, m, n//2, p.half_c)


def gemm_batch(size_t a, idx lda, bint ta, size_t b, idx ldb, bint tb, size_t c, idx ldc, idx m,
               idx n, idx k, bint acc, idx batch, size_t offsets, int half=0):
    """`batch` products of one shape; offsets int64 [batch, 3]: where A, B and C of each start.

    The offsets express any broadcasting.  With `acc`, items that share a C must be neighbours: a
    task is a run of items with one C, which it adds in order.
    """
    cdef const int64_t* at = <const int64_t*>offsets
    cdef idx i, each
    # One product a task, each thread with scratch for both operands: nobody waits for a barrier
    cdef int threads = 1 if batch*m*n*k < PARALLEL_FROM else THREADS
    cdef Product p
    memset(&p, 0, sizeof(Product))
    p.lda, p.ldb, p.ldc, p.m, p.n, p.k = lda, ldb, ldc, m, n, k
    p.ta, p.tb, p.acc = ta, tb, acc
    set_types(&p, half)
    lay_out(&p)
    each = own_room(&p)
    cdef Buffer scratch = Buffer(threads*each*4)
    for i in prange(batch, nogil=True, num_threads=threads, schedule='dynamic'):
        if i == 0 or at[3*i + 2] != at[3*i - 1]:    # the first item of a run
            batch_run(&p, a, b, c, at, i, batch, <float*>scratch.address + threadid()*each)


cdef void batch_run(const Product* shape, size_t a, size_t b, size_t c, const int64_t* at, idx i,
                    idx batch, float* own) noexcept nogil:
    """Items i, i + 1, ... of a batch as long as they write to the same C."""
    cdef Product p = shape[0]
    cdef int64_t target = at[3*i + 2]
    while i < batch and at[3*i + 2] == target:
        p.a = <const void*>(a + at[3*i]*(2 if p.half_a else 4))
        p.b = <const void*>(b + at[3*i + 1]*(2 if p.half_b else 4))
        p.c = <void*>(c + target*(2 if p.half_c else 4))
        multiply_serial(&p, own)
        i += 1


# ---- 7. Row operations ---------------------------------------------------------------------------
# A row is read from memory once; whatever else a formula needs comes from L1 or L2.  All sums along
# a row are row_sum: 4*VL running sums, then a fixed tree.  Sums over rows (gradients of norm
# weights) go by fixed chunks of rows into scratch, and the chunks are added in order.  Large
# results are written past the caches.
#
# A loop over `load` and `store` is a vector loop with its tail built in: used where there are
# accumulators, or rows so short (a head) that a vectorised scalar loop would mostly check aliasing.


cdef inline vf load(const real* x, idx left) noexcept nogil:
    """The next VL elements, zeros from `left` on; memory past them is not read."""
    cdef vf v
    if real is float:
        if left >= VL:
            return (<const vf*>x)[0]
        v = VZERO
        memcpy(&v, x, left*sizeof(real))
        return v
    else:
        return WIDEN(load_half(x, left))


cdef inline vh load_half(const uint16_t* x, idx left) noexcept nogil:
    """The same of bf16, as they are."""
    cdef vh h = HZERO
    if left >= VL:
        return (<const vh*>x)[0]
    memcpy(&h, x, left*sizeof(uint16_t))
    return h


cdef inline void store(real* y, vf v, idx left) noexcept nogil:
    """The next VL elements of y = v, but no more than `left`."""
    cdef vh h
    if real is float:
        if left >= VL:
            (<vf*>y)[0] = v
        else:
            memcpy(y, &v, left*sizeof(real))
    else:
        h = NARROW(v)
        if left >= VL:
            (<vh*>y)[0] = h
        else:
            memcpy(y, &h, left*sizeof(real))


cdef inline void store_past(real* y, vf v, idx left, bint past) noexcept nogil:
    """store; `past` the caches if so, and if y is aligned as goes_past wants it."""
    if WITH_STREAM and past and left >= VL:
        if real is float:
            STREAM(y, v)
        else:
            STREAM_HALF(y, NARROW(v))
    else:
        store(y, v, left)


cdef inline bint goes_past(const real* y, idx elements, idx row) noexcept nogil:
    """Is y, `elements` in rows of `row`, written past the caches: large, and in whole lines?

    Nothing of it would still be there when it is read, and a line that is written without being
    read first costs half.  Copying 32 MB that way: 29 instead of 17 GB/s; 2 MB: the same.
    """
    return (WITH_STREAM and elements*sizeof(real) >= PAST_BYTES and row % (2*VL) == 0
            and <size_t>y % 64 == 0)


cdef inline void copy_past(const real* x, real* y, idx n, bint past) noexcept nogil:
    """y = x."""
    cdef idx i = 0
    while i < n:
        store_past(y + i, load(x + i, n - i), n - i, past)
        i += VL


cdef inline void fetch(const real* x) noexcept nogil:
    """Ask for what lies FETCH bytes past x.

    The processor does that too, but starts anew on every page: in rmsnorm of 8 MB +30 %, RoPE and
    SwiGLU's gradient +15 %.
    """
    prefetch(<const char*>x + FETCH)


cdef inline vf lane_product(const real* a, const real* b, const float* c, idx i,
                            idx left) noexcept nogil:
    """The next VL of a*b*c, where b and c may be NULL."""
    cdef vf v = load(a + i, left)
    if b != NULL:
        v = v*load(b + i, left)
    if c != NULL:
        v = v*load(c + i, left)
    return v


cdef inline float lane_sum(vf v) noexcept nogil:
    """The VL lanes of v, halved up to four times (VL is 4, 8 or 16)."""
    cdef float lane[16]
    cdef int i
    if VL == 16:
        return SUM16(v)
    (<vf*>lane)[0] = v
    for i in range(VL >> 1):
        lane[i] += lane[i + (VL >> 1)]
    for i in range(VL >> 2):
        lane[i] += lane[i + (VL >> 2)]
    for i in range(VL >> 3):
        lane[i] += lane[i + (VL >> 3)]
    for i in range(VL >> 4):
        lane[i] += lane[i + (VL >> 4)]
    return lane[0]


cdef inline float row_sum(const real* a, const real* b, const float* c, idx n) noexcept nogil:
    """Sum of a*b*c, where b and c may be NULL; four chains hide the latency of an add.

    The tail joins chain 0, padded with zeros: the order of the sum depends on n alone.
    """
    cdef vf acc[4]
    cdef idx i = 0
    cdef int j
    for j in range(4):
        acc[j] = VZERO
    while i + 4*VL <= n:
        for j in range(4):
            acc[j] = acc[j] + lane_product(a, b, c, i + j*VL, VL)
        i += 4*VL
    while i < n:
        acc[0] = acc[0] + lane_product(a, b, c, i, n - i)
        i += VL
    return lane_sum((acc[0] + acc[1]) + (acc[2] + acc[3]))


cdef inline float row_max(const float* x, idx n) noexcept nogil:
    """The largest of n elements.  NaNs may be passed over: the exponentials bring them back."""
    cdef vf top[4]
    cdef float lane[16]
    cdef float best = x[0]
    cdef idx i = 0
    cdef int j
    if n >= 4*VL:
        for j in range(4):
            top[j] = (<const vf*>(x + j*VL))[0]
        while i + 4*VL <= n:
            for j in range(4):
                top[j] = vmax((<const vf*>(x + i + j*VL))[0], top[j])
            i += 4*VL
        (<vf*>lane)[0] = vmax(vmax(top[0], top[1]), vmax(top[2], top[3]))
        for j in range(VL):
            best = lane[j] if lane[j] > best else best
    while i < n:
        best = x[i] if x[i] > best else best
        i += 1
    return best


# Sums and softmax:  y_i = e_i/sum e, e_i = exp(x_i - max x);  dx_i = y_i (dy_i - sum_j y_j dy_j)
# The maximum cancels out of y, but keeps e from overflowing and its sum at 1 or more.

def sum_rows(size_t x, size_t y, idx rows, idx cols):
    """y[r] = sum of x[r, :].  Tasks are blocks of rows, so that few long rows also use the team."""
    cdef idx t, r, j, blocks = most(1, parts(cols, PART))
    cdef Buffer scratch = Buffer(rows*blocks*sizeof(float))
    cdef float* part = <float*>scratch.address
    with nogil, parallel(num_threads=team(rows*cols)):
        # part [rows, blocks]
        for t in prange(rows*blocks, schedule='dynamic', chunksize=grain(cols)):
            r, j = t//blocks, t%blocks
            part[t] = row_sum(<const float*>x + r*cols + j*PART, <const float*>NULL, NULL,
                              extent(j, cols))
        barrier()                       # a row's blocks come from any thread
        for r in prange(rows, schedule='dynamic', chunksize=grain(blocks)):
            (<float*>y)[r] = row_sum(<const float*>part + r*blocks, <const float*>NULL, NULL,
                                     blocks)


cdef double exp_row(const float* x, float* y, idx n, float top) noexcept nogil:
    """y = exp(x - top) unless y is NULL, top the row's maximum; returns the sum.

    In double from PIECE to PIECE: a long row (a vocabulary) loses nothing more.
    """
    cdef vf sums[4]
    cdef vf e, part
    cdef double total = 0
    cdef idx i = 0, end, k
    while i < n:
        end = least(n, i + PIECE)
        for k in range(4):
            sums[k] = VZERO
        while i + 4*VL <= end:
            for k in range(4):
                e = weight(((<const vf*>(x + i))[k] - top)*LOG2_E)
                sums[k] = sums[k] + e
                if y != NULL:
                    (<vf*>(y + i))[k] = e
            i += 4*VL
        while i < end:
            e, part = weight((load(x + i, end - i) - top)*LOG2_E), VZERO
            memcpy(&part, &e, least(VL, end - i)*sizeof(float))     # no lanes past the end
            sums[0] = sums[0] + part
            if y != NULL:
                store(y + i, e, end - i)
            i += VL
        i = end
        total += lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))
    return total


cdef void softmax_row(const float* x, float* y, idx n) noexcept nogil:
    """One row: a single division, then products."""
    cdef double total = exp_row(x, y, n, row_max(x, n))
    scale_part(<float>(1.0/total), y, y, n)


def softmax(size_t x, size_t y, idx rows, idx cols):
    """y = softmax of every row of x; y may be x."""
    cdef idx r
    for r in prange(rows, nogil=True, schedule='dynamic', chunksize=grain(cols),
                    num_threads=team(rows*cols)):
        softmax_row(<const float*>x + r*cols, <float*>y + r*cols, cols)


cdef void softmax_backward_row(const float* y, const float* dy, float* dx, idx n) noexcept nogil:
    """One row; dx is first written when the sum is known, so it may be dy."""
    cdef float dot = row_sum(y, dy, NULL, n)
    cdef idx i
    for i in range(n):
        dx[i] = y[i]*(dy[i] - dot)


def softmax_backward(size_t y, size_t dy, size_t dx, idx rows, idx cols):
    """dx from the softmax y and its gradient dy; dx may be dy."""
    cdef idx r
    for r in prange(rows, nogil=True, schedule='dynamic', chunksize=grain(cols),
                    num_threads=team(rows*cols)):
        softmax_backward_row(<const float*>y + r*cols, <const float*>dy + r*cols,
                             <float*>dx + r*cols, cols)


# Cross-entropy:  loss = ln(sum_j e^x_j) - x_target;  dx_j = (softmax_j - [j = target]) scale
# with the logarithm as top + ln(sum_j e^(x_j - top)), top = max x: that sum is at least 1.

cdef inline double loss_row(float* x, idx target, idx cols, float scale, bint write, real* dx,
                            idx padded) noexcept nogil:
    """One row's loss; with `write` its gradient to dx, exactly 0 in padded columns.

    dx may be x, or, of half the size, start where x does: it stays behind what is read.
    """
    cdef float top, factor
    cdef double total, loss = 0
    cdef idx i = 0
    if target >= 0:
        top = row_max(x, cols)
        loss = <double>top - x[target]              # before the row is overwritten
        total = exp_row(x, x if write else NULL, cols, top)
        loss += log(total)
    if write and target >= 0:
        factor = <float>(scale/total)
        x[target] -= <float>total                   # factor (e - total) is scale (p - 1)
        while i < cols:
            store(dx + i, load(<const float*>x + i, cols - i)*factor, cols - i)
            i += VL
        memset(dx + cols, 0, (padded - cols)*sizeof(real))
    elif write:
        memset(dx, 0, padded*sizeof(real))
    return loss


def cross_entropy(size_t logits, idx ld, size_t targets, size_t losses, idx rows, idx cols,
                  scale, bint write_gradient, idx cols_padded, bint half=False,
                  size_t denominator_at=0):
    """losses[r] (double) of logits [rows, ld]; targets are int64, below 0 = not counted, loss 0.

    With write_gradient the logits become their gradient times scale, and columns from cols to
    cols_padded become 0; without it they stay as they are.  half: the gradient is bf16, and takes
    the first half of each row.  Losses are double because thousands of them are added up.  A target
    lies below cols, and cols_padded is at most ld.  denominator_at: address of a double that scale
    is divided by, or 0.
    """
    cdef idx r
    cdef float* x
    cdef float factor = scale/(<double*>denominator_at)[0] if denominator_at else scale
    for r in prange(rows, nogil=True, schedule='dynamic', chunksize=grain(cols),
                    num_threads=team(rows*cols)):
        x = <float*>logits + r*ld
        if half:
            (<double*>losses)[r] = loss_row(x, (<const int64_t*>targets)[r], cols, factor,
                                            write_gradient, <uint16_t*>x, cols_padded)
        else:
            (<double*>losses)[r] = loss_row(x, (<const int64_t*>targets)[r], cols, factor,
                                            write_gradient, x, cols_padded)


def mean_loss(size_t losses, idx n, double denominator, size_t out, size_t denominator_at=0):
    """out (fp32) = the sum of n doubles, pairwise, over the denominator, or that at an address."""
    if denominator_at:
        denominator = (<double*>denominator_at)[0]
    (<float*>out)[0] = <float>(pairwise(<const double*>losses, n)/denominator)


cdef double pairwise(const double* x, idx n) noexcept nogil:
    """The sum of n doubles as a balanced tree, so that rounding grows with the logarithm of n."""
    cdef idx i, middle = n//2
    cdef double total = 0
    if n > 64:
        return pairwise(x, middle) + pairwise(x + middle, n - middle)
    for i in range(n):
        total += x[i]
    return total


def count(size_t ids, idx n, size_t out):
    """out (double) = how many of n int64 ids are 0 or more, the targets that count; at least 1."""
    cdef idx i, total = 0
    for i in range(n):
        total += (<const int64_t*>ids)[i] >= 0
    (<double*>out)[0] = <double>most(1, total)


# RMS norm:  y = x r w with r = 1/sqrt(mean(x^2) + eps);  with t = dy w:
#   dx = r t - x r^3 mean(t x),  dw = sum over rows of dy x r
# The second term of dx is what x_j does to all y_i through r: dr/dx_j = -r^3 x_j/n.

cdef inline float norm_factor(const real* x, idx n, float eps) noexcept nogil:
    """r of a row."""
    return <float>1.0/sqrtf(row_sum(x, x, NULL, n)/<float>n + eps)


cdef inline void norm_row_backward(const real* dy, const real* x, const float* w, float r,
                                   real* dx, bint acc, const real* more, float* dw,
                                   idx n) noexcept nogil:
    """dx (+)= the formula above + more, dw += dy x r; more and dw may be NULL, dx may be dy.

    Everything that needs the whole row of dy is in c, before the first store to dx.
    """
    cdef float c = row_sum(dy, x, w, n)*r/<float>n*r*r
    cdef vf g, v, d
    cdef idx i = 0, left
    while i < n:
        left = n - i
        fetch(dy + i)
        fetch(x + i)
        g, v = load(dy + i, left), load(x + i, left)
        d = g*load(w + i, left)*r - v*c
        if more != NULL:
            d = d + load(more + i, left)
        if acc:
            d = d + load(dx + i, left)
        if dw != NULL:
            store(dw + i, load(<const float*>dw + i, left) + g*(v*r), left)
        store(dx + i, d, left)
        i += VL


cdef inline void add_rows(const float* a, const float* b, float* y, idx n) noexcept nogil:
    """y = a + b; y may be a."""
    cdef idx i
    for i in range(n):
        y[i] = a[i] + b[i]


cdef inline float add_norm_row(const real* x, const real* residual, const float* w, real* total,
                               real* y, idx n, float eps, bint past) noexcept nogil:
    """Row of add_rmsnorm; a total that nobody wants is formed in y, which is then overwritten."""
    cdef float r
    cdef idx i = 0
    if residual != NULL:
        total = y if total == NULL else total
        while i < n:
            store(total + i, load(x + i, n - i) + load(residual + i, n - i), n - i)
            i += VL
        x = total
    r, i = norm_factor(x, n, eps), 0
    while i < n:
        fetch(x + i)
        store_past(y + i, load(x + i, n - i)*r*load(w + i, n - i), n - i, past)
        i += VL
    return r


cdef void norm_rows(const real* x, const real* residual, const float* w, real* total, real* y,
                    float* rstd, idx rows, idx dim, float eps):
    """add_rmsnorm for one type of element."""
    cdef idx r, t, step = grain(dim), n = parts(rows, step)
    cdef bint past = goes_past(<const real*>y, rows*dim, dim)
    cdef Tasks tasks
    deal(&tasks, team(rows*dim))
    with nogil, parallel(num_threads=tasks.runs):
        t = take(&tasks, n)
        while t >= 0:
            for r in range(t*step, least(rows, t*step + step)):
                rstd[r] = add_norm_row(
                    x + r*dim, residual + r*dim if residual != NULL else NULL, w,
                    total + r*dim if total != NULL else NULL, y + r*dim, dim, eps,
                    past)
            t = take(&tasks, n)


def add_rmsnorm(size_t x, size_t residual, size_t w, size_t total, size_t y, size_t rstd, idx rows,
                idx dim, float eps, bint half=False):
    """total = x + residual, y = rmsnorm(total) w, rstd[rows] = r.

    x, residual, total and y are [rows, dim], w is [dim]; rstd is kept for the backward.
    Without a residual (0) y = rmsnorm(x) w, total is left alone.  total may be 0, x or residual.
    """
    if half:
        norm_rows(<const uint16_t*>x, <const uint16_t*>residual, <const float*>w, <uint16_t*>total,
                  <uint16_t*>y, <float*>rstd, rows, dim, eps)
    else:
        norm_rows(<const float*>x, <const float*>residual, <const float*>w, <float*>total,
                  <float*>y, <float*>rstd, rows, dim, eps)


cdef inline idx chunk_rows(idx rows) noexcept nogil:
    """Rows per chunk of a sum over rows: at most 64 chunks, of at least 8 rows.

    The number of rows decides, not that of threads, or the order of the sum would change with it.
    """
    return most(8, parts(rows, 64))


cdef void add_chunks(const float* part, idx chunks, idx stride, float* dw, idx n) noexcept nogil:
    """dw += the chunks' sums, chunk by chunk."""
    cdef idx c
    for c in range(chunks):
        add_rows(dw, part + c*stride, dw, n)


cdef inline void norm_chunk(const real* dy, const real* dtotal, const real* total, const float* w,
                            const float* rstd, real* dx, bint acc, float* dw, idx rows,
                            idx n) noexcept nogil:
    """Backward of one chunk of rows; dw (or NULL) is its own and starts here."""
    cdef idx r
    if dw != NULL:
        fill_part(<float>0.0, dw, n)
    for r in range(rows):
        norm_row_backward(dy + r*n, total + r*n, w, rstd[r], dx + r*n, acc,
                          dtotal + r*n if dtotal != NULL else NULL, dw, n)


cdef void norm_rows_backward(const real* dy, const real* dtotal, const real* total, const float* w,
                             const float* rstd, real* dx, bint acc, float* dw, idx rows, idx dim):
    """add_rmsnorm_backward for one type of element."""
    cdef idx c, r, step = chunk_rows(rows), chunks = parts(rows, step)
    cdef Buffer scratch = Buffer(chunks*dim*sizeof(float) if dw != NULL else 0)
    cdef float* part = <float*>scratch.address
    cdef Tasks tasks
    deal(&tasks, team(rows*dim))
    with nogil, parallel(num_threads=tasks.runs):
        c = take(&tasks, chunks)
        while c >= 0:
            r = c*step
            norm_chunk(dy + r*dim, dtotal + r*dim if dtotal != NULL else NULL, total + r*dim, w,
                       rstd + r, dx + r*dim, acc, part + c*dim if dw != NULL else NULL,
                       least(step, rows - r), dim)
            c = take(&tasks, chunks)
    # The region has ended, so every chunk is complete; one thread adds them in order
    if dw != NULL:
        add_chunks(part, chunks, dim, dw, dim)


def add_rmsnorm_backward(size_t dy, size_t dtotal, size_t total, size_t w, size_t rstd, size_t dx,
                         bint acc, size_t dw, idx rows, idx dim, bint half=False):
    """dx (+)= gradient through the norm + dtotal; dw += its gradient.  dtotal and dw may be 0.

    dx may be dy or dtotal.  All are [rows, dim], but w and dw [dim] and rstd [rows].
    """
    if half:
        norm_rows_backward(<const uint16_t*>dy, <const uint16_t*>dtotal, <const uint16_t*>total,
                           <const float*>w, <const float*>rstd, <uint16_t*>dx, acc, <float*>dw,
                           rows, dim)
    else:
        norm_rows_backward(<const float*>dy, <const float*>dtotal, <const float*>total,
                           <const float*>w, <const float*>rstd, <float*>dx, acc, <float*>dw, rows,
                           dim)


# RoPE turns the pair (x_i, x_{i + half}) by the angle of (position, i); its backward turns it back:
#   y_i = x_i cos - x_{i + half} sin,  y_{i + half} = x_{i + half} cos + x_i sin   (Su et al., 2021)
# The pairs are those of Hugging Face's files (the paper turns neighbours).
# A row holds heads + kv_heads heads that are normed and turned, then kv_heads values that are not.

cdef inline void rotate(const real* x, const float* w, float r, const float* cos, const float* sin,
                        float sign, real* y, idx half, bint past) noexcept nogil:
    """y = one head x, times r w unless w is NULL, turned (back with sign -1); y may be x."""
    cdef vf a, b, c, s
    cdef idx i = 0, left
    while i < half:
        left = half - i
        fetch(x + i)
        fetch(x + half + i)
        a, b = load(x + i, left), load(x + half + i, left)
        if w != NULL:
            a, b = a*r*load(w + i, left), b*r*load(w + half + i, left)
        c, s = load(cos + i, left), load(sin + i, left)*sign
        store_past(y + i, a*c - ROUNDED(b*s), left, past)
        store_past(y + half + i, b*c + ROUNDED(a*s), left, past)
        i += VL


cdef inline void qk_row(const real* qkv, real* out, const float* qw, const float* kw,
                        const float* cos, const float* sin, float* rstd, idx heads, idx kv_heads,
                        idx n, float eps, bint past) noexcept nogil:
    """Norm (where there are weights) and RoPE of one row's heads of n elements, values copied."""
    cdef const float* w
    cdef float r = 1
    cdef idx h, turned = heads + kv_heads
    for h in range(turned):
        w = qw if h < heads else kw
        if w != NULL:
            r = norm_factor(qkv + h*n, n, eps)
            if rstd != NULL:
                rstd[h] = r
        rotate(qkv + h*n, w, r, cos, sin, <float>1.0, out + h*n, n//2, past)
    if out != qkv:
        copy_past(qkv + turned*n, out + turned*n, kv_heads*n, past)


cdef void qk_rows(const real* qkv, real* out, const float* qw, const float* kw, const float* cos,
                  const float* sin, float* rstd, idx rows, idx seq, idx heads, idx kv_heads,
                  idx head_dim, float eps):
    """qk_norm_rope for one type of element."""
    cdef idx r, half = head_dim//2, turned = heads + kv_heads, width = (turned + kv_heads)*head_dim
    cdef idx t, step = grain(width), n = parts(rows, step)
    cdef bint past = goes_past(<const real*>out, rows*width, half)
    cdef Tasks tasks
    deal(&tasks, team(rows*width))
    with nogil, parallel(num_threads=tasks.runs):
        t = take(&tasks, n)
        while t >= 0:
            for r in range(t*step, least(rows, t*step + step)):
                qk_row(qkv + r*width, out + r*width, qw, kw, cos + r%seq*half, sin + r%seq*half,
                       rstd + r*turned if rstd != NULL else NULL, heads, kv_heads, head_dim, eps,
                       past)
            t = take(&tasks, n)


def qk_norm_rope(size_t qkv, size_t out, size_t qw, size_t kw, size_t cos, size_t sin, size_t rstd,
                 idx rows, idx seq, idx heads, idx kv_heads, idx head_dim, float eps,
                 bint half=False):
    """qkv -> out [rows, heads + 2 kv_heads, head_dim]: q and k heads normed (if qw, kw), then RoPE.

    Row r stands at position r % seq of cos and sin [seq, head_dim/2]; rstd [rows, heads + kv_heads]
    may be 0, out may be qkv.
    """
    if half:
        qk_rows(<const uint16_t*>qkv, <uint16_t*>out, <const float*>qw, <const float*>kw,
                <const float*>cos, <const float*>sin, <float*>rstd, rows, seq, heads, kv_heads,
                head_dim, eps)
    else:
        qk_rows(<const float*>qkv, <float*>out, <const float*>qw, <const float*>kw,
                <const float*>cos, <const float*>sin, <float*>rstd, rows, seq, heads, kv_heads,
                head_dim, eps)


cdef inline void qk_row_backward(real* d, const real* qkv, const float* qw, const float* kw,
                                 float* dw, const float* cos, const float* sin, const float* rstd,
                                 idx heads, idx kv_heads, idx n) noexcept nogil:
    """Turn back, then the norm's backward in place; dw holds this chunk's sums, q's then k's.

    All heads of a kind share one weight: they add to dw head by head, row by row.
    """
    cdef const float* w
    cdef idx h
    for h in range(heads + kv_heads):
        w = qw if h < heads else kw
        rotate(<const real*>d + h*n, NULL, <float>1.0, cos, sin, <float>-1.0, d + h*n, n//2,
               False)
        if w != NULL:
            norm_row_backward(<const real*>d + h*n, qkv + h*n, w, rstd[h], d + h*n, False,
                              <const real*>NULL, dw if h < heads else dw + n, n)


cdef inline void qk_chunk(real* d, const real* qkv, const float* qw, const float* kw, float* dw,
                          const float* cos, const float* sin, const float* rstd, idx first,
                          idx end, idx seq, idx heads, idx kv_heads, idx n) noexcept nogil:
    """Backward of the rows first .. end."""
    cdef idx r, turned = heads + kv_heads, width = (turned + kv_heads)*n
    fill_part(<float>0.0, dw, 2*n)
    for r in range(first, end):
        qk_row_backward(d + r*width, qkv + r*width, qw, kw, dw, cos + r%seq*(n//2),
                        sin + r%seq*(n//2), rstd + r*turned, heads, kv_heads, n)


cdef void qk_rows_backward(real* dqkv, const real* qkv, const float* qw, const float* kw,
                           float* dqw, float* dkw, const float* cos, const float* sin,
                           const float* rstd, idx rows, idx seq, idx heads, idx kv_heads, idx n):
    """qk_norm_rope_backward for one type of element."""
    cdef idx c, step = chunk_rows(rows), chunks = parts(rows, step)
    cdef Tasks tasks
    # part [chunks, 2, n]: each chunk's sums for q's weight, then for k's
    cdef Buffer scratch = Buffer(chunks*2*n*sizeof(float))
    cdef float* part = <float*>scratch.address
    deal(&tasks, team(rows*(heads + 2*kv_heads)*n))
    with nogil, parallel(num_threads=tasks.runs):
        c = take(&tasks, chunks)
        while c >= 0:
            qk_chunk(dqkv, qkv, qw, kw, part + c*2*n, cos, sin, rstd, c*step,
                     least(rows, (c + 1)*step), seq, heads, kv_heads, n)
            c = take(&tasks, chunks)
    if dqw != NULL:
        add_chunks(part, chunks, 2*n, dqw, n)
    if dkw != NULL:
        add_chunks(part + n, chunks, 2*n, dkw, n)


def qk_norm_rope_backward(size_t dqkv, size_t qkv, size_t qw, size_t kw, size_t dqw, size_t dkw,
                          size_t cos, size_t sin, size_t rstd, idx rows, idx seq, idx heads,
                          idx kv_heads, idx head_dim, bint half=False):
    """dqkv holds d(out) and becomes d(qkv), in place, values untouched; dqw and dkw are added to.

    qw, kw, dqw, dkw may be 0; rstd is needed where qw or kw is given.  dqkv and qkv are
    [rows, heads + 2 kv_heads, head_dim], and qkv is the forward's input: with weights, that may not
    have run in place.
    """
    if half:
        qk_rows_backward(<uint16_t*>dqkv, <const uint16_t*>qkv, <const float*>qw, <const float*>kw,
                         <float*>dqw, <float*>dkw, <const float*>cos, <const float*>sin,
                         <const float*>rstd, rows, seq, heads, kv_heads, head_dim)
    else:
        qk_rows_backward(<float*>dqkv, <const float*>qkv, <const float*>qw, <const float*>kw,
                         <float*>dqw, <float*>dkw, <const float*>cos, <const float*>sin,
                         <const float*>rstd, rows, seq, heads, kv_heads, head_dim)


# SwiGLU:  h = silu(gate)*up;  dgate = dh up silu'(gate),  dup = dh silu(gate)   (Shazeer, 2020)
# gate and up are the halves of a row, as the one product with the fused weight leaves them; their
# gradients take the same places, for that product's backward, and h takes that of dh, for the next
# product's, which so need not keep it.

cdef inline void swiglu_row(const real* gate, const real* up, real* h, idx n) noexcept nogil:
    """One row of h."""
    cdef idx i = 0
    while i < n:
        store(h + i, silu(load(gate + i, n - i))*load(up + i, n - i), n - i)
        i += VL


cdef inline void swiglu_backward_row(real* gate, real* up, real* dh, idx n) noexcept nogil:
    """One row; the sigmoid is computed again from gate."""
    cdef vf g, u, d, s
    cdef idx i = 0
    while i < n:
        fetch(<const real*>gate + i)
        fetch(<const real*>up + i)
        fetch(<const real*>dh + i)
        g, u = load(<const real*>gate + i, n - i), load(<const real*>up + i, n - i)
        d = load(<const real*>dh + i, n - i)
        s = sigmoid(g)
        store(gate + i, d*u*(s*(g*(<float>1.0 - s) + <float>1.0)), n - i)
        store(up + i, d*(g*s), n - i)
        store(dh + i, g*s*u, n - i)
        i += VL


cdef void swiglu_rows(real* gu, real* h, idx rows, idx ffn, bint backward):
    """The rows of one of the two below, shared by the team."""
    cdef idx r, t, step = grain(ffn), n = parts(rows, step)
    cdef Tasks tasks
    deal(&tasks, team(2*rows*ffn))
    with nogil, parallel(num_threads=tasks.runs):
        t = take(&tasks, n)
        while t >= 0:
            for r in range(t*step, least(rows, t*step + step)):
                if backward:
                    swiglu_backward_row(gu + 2*r*ffn, gu + (2*r + 1)*ffn, h + r*ffn, ffn)
                else:
                    swiglu_row(<const real*>gu + 2*r*ffn, <const real*>gu + (2*r + 1)*ffn,
                               h + r*ffn, ffn)
            t = take(&tasks, n)


def swiglu(size_t gu, size_t h, idx rows, idx ffn, bint half=False):
    """h [rows, ffn] from gu [rows, 2 ffn] = gate | up."""
    if half:
        swiglu_rows(<uint16_t*>gu, <uint16_t*>h, rows, ffn, False)
    else:
        swiglu_rows(<float*>gu, <float*>h, rows, ffn, False)


def swiglu_backward(size_t gu, size_t dh, idx rows, idx ffn, bint half=False):
    """gu [rows, 2 ffn] becomes its gradient, in place, from dh [rows, ffn], which becomes h."""
    if half:
        swiglu_rows(<uint16_t*>gu, <uint16_t*>dh, rows, ffn, True)
    else:
        swiglu_rows(<float*>gu, <float*>dh, rows, ffn, True)


def id_range(size_t ids, idx n):
    """(least, largest) of n >= 1 int64 ids: what they are checked by before they address memory."""
    cdef const int64_t* x = <const int64_t*>ids
    cdef int64_t low = x[0], high = x[0]
    cdef idx i
    for i in range(n):
        low, high = x[i] if x[i] < low else low, x[i] if x[i] > high else high
    return low, high


# Embedding:  y_i = w[token_i];  dw[token] += dy_i of all its positions, in a stable sort's order
# The sort brings a token's positions together, in ascending order: a row of dw has one writer, so
# it takes no atomics, and its sum has one order.

def embed(size_t tokens, size_t w, size_t y, idx n, idx dim, bint half=False):
    """y[i] = w[tokens[i]]: tokens int64 [n], w [vocabulary, dim], y [n, dim]."""
    cdef idx i
    cdef const float* x
    for i in prange(n, nogil=True, schedule='dynamic', chunksize=grain(dim),
                    num_threads=team(n*dim)):
        x = <const float*>w + (<const int64_t*>tokens)[i]*dim
        if half:
            copy_row(x, <uint16_t*>y + i*dim, dim)
        else:
            copy_row(x, <float*>y + i*dim, dim)


cdef inline void embed_run(const int64_t* tokens, const int64_t* order, const real* dy, float* dw,
                           idx i, idx n, idx dim) noexcept nogil:
    """If a token's run starts at place i of the order, add it all: a row of dw has one writer."""
    cdef int64_t token = tokens[order[i]]
    cdef const real* x
    cdef float* y = dw + token*dim
    cdef idx j
    if i > 0 and tokens[order[i - 1]] == token:
        return
    while i < n and tokens[order[i]] == token:
        x, j = dy + order[i]*dim, 0
        while j < dim:
            store(y + j, load(<const float*>y + j, dim - j) + load(x + j, dim - j), dim - j)
            j += VL
        i += 1


def embed_backward(size_t tokens, size_t order, size_t dy, size_t dw, idx n, idx dim,
                   bint half=False):
    """dw[tokens[i]] += dy[i]; order (int64) is the stable argsort of tokens.

    Every place of the order is a task, but only the first of a token's run has work to do.
    """
    cdef idx i
    for i in prange(n, nogil=True, schedule='dynamic', chunksize=grain(dim),
                    num_threads=team(n*dim)):
        if half:
            embed_run(<const int64_t*>tokens, <const int64_t*>order, <const uint16_t*>dy,
                      <float*>dw, i, n, dim)
        else:
            embed_run(<const int64_t*>tokens, <const int64_t*>order, <const float*>dy, <float*>dw,
                      i, n, dim)


# ---- 8. Attention -------------------------------------------------------------------------------
# One head, causal; query i sees the keys j <= i + Sk - Sq, so the last query sees every key:
#
#   forward     s = scale q k^T     p = exp(s - m)        l = sum p     o = p v / l     L = m + ln l
#   backward    p = exp(s - L)      delta = sum(do * o)   ds = p * (do v^T - delta)
#               dv = p^T do         dk = scale ds^T q     dq = scale ds k
#
# after FlashAttention-2 (Dao, 2023).  Weights exist for one tile of queries by keys at a time:
# forward corrects the maximum m and the sum l so far as keys arrive, backward makes p again from L.
# delta is what the softmax's backward subtracts, the sum over keys of p * (do v^T): as o is the
# sum of p * v, it is do . o, known before any tile of p.
#
# Tiles that lie wholly in the future are never visited, and in a tile on the diagonal each register
# tile stops there.
#
# Scores lie transposed, s[key][query]: a lane is a query, so the softmax runs down the tile and
# needs no sum across lanes.  They are in units of ln2, q carrying scale/ln2, so that a weight is a
# power of two.  Operands are first copied into scratch with zeros around them, or packed: that
# leaves one mechanism for every length, stride and head size, and rows a power of two apart no
# longer push one another out of the cache.
#
# All seven products go through `multiply`, from a left and a right operand, on one register tile of
# AR rows by two vectors: 8 x 2 sums cover the latency of two FMA a cycle (2 x 4), and 6 x 2 is what
# 16 registers hold.  With AMX and heads that are large enough they are in parts, and the operands
# packed as in section 6.  What is made tile by tile, p and ds, is packed as a right operand where
# that can be, half as dear as a left one that comes transposed: hence o^T = v^T p, and dq^T.
#
# While rows go by, a panel two vectors wide (8 to 16 KB) stays in the first-level cache of 32 to 48
# KB.  TILE queries x KEYS keys are 64 x 128 or 48 x 96; all that such a tile of backward touches,
# 270 KB at head size 64 and 480 at 128, fits the second level of 1 to 2 MB.

cdef extern from *:
    """
    enum { AR = MR < 8 ? MR : 8, AL = 2 * VL, TILE = 8 * AR, KEYS = 2 * TILE };
    """
    enum: AR, AL, TILE, KEYS

cdef enum:
    FAR = 1 << 30                   # a distance to the diagonal that hides nothing
    SPLIT_DIM = 48                  # head size from which on parts pay for packing p and ds
    SPLIT_KEYS = 512                # keys from which on they pay at heads of 32, for scores only:
                                    # 2 % at 512 keys, 8 at 2,048; at heads of 16 they never do

cdef struct View:                   # [batch, position, head, dim] by strides, the last one 1
    char* start
    idx batch, position, head       # these strides, in elements

cdef struct Attention:
    idx batch, sq, sk, heads, kv_heads, dim     # heads is a multiple of kv_heads
    idx wide                        # dim rounded up to AL, the row length of every tile in scratch
    idx keys                        # sk in whole blocks of keys, or, unless split, tiles
    bint half                       # q, k, v, ... are bf16 in memory
    int parts                       # of operands of scores and v do^T, see section 6
    bint weights                    # also of the products with p and ds
    float scale, factor             # factor: what scores still lack, where q does not carry it
    float* lse                      # L [batch, heads, sq]
    # q, o, dy, dq have sq positions and heads, the others sk and kv_heads; `describe` fills them in
    # this order, and forward has only the first four
    View q, k, v, o, dy, dq, dk, dv


cdef inline idx at(const View* x, idx b, idx position, idx head) noexcept nogil:
    """Where the `dim` elements of one head at one position start, in elements."""
    return b*x.batch + position*x.position + head*x.head


cdef void describe(Attention* a, const int64_t* dims, const size_t* address, int views,
                   float* lse, float scale, bint half) noexcept nogil:
    """Fill `a` from Python's integers: six sizes, then three strides a view, in its own order."""
    cdef View* view = &a.q
    cdef idx unit
    cdef int i
    a.batch, a.sq, a.sk = dims[0], dims[1], dims[2]
    a.heads, a.kv_heads, a.dim = dims[3], dims[4], dims[5]
    a.wide = (a.dim + AL - 1)//AL*AL
    a.half, a.scale, a.factor, a.lse, a.parts = half, scale, 1, lse, 0
    # a factor that is not positive would turn maxima round: then q carries it, as in fp32
    a.weights = ((WITH_AMX or WITH_DOT) and scale > 0 if half else WITH_AMX and a.dim >= SPLIT_DIM)
    if half and a.weights:
        a.parts, a.factor = 1, scale*LOG2_E
    elif WITH_AMX and not half and (a.weights or a.dim >= 32 and a.sk >= SPLIT_KEYS):
        a.parts = 3
    unit = KEYS if a.weights else TILE
    a.keys = parts(a.sk, unit)*unit
    for i in range(views):
        view[i].start = <char*>address[i]
        view[i].batch, view[i].position = dims[6 + 3*i], dims[7 + 3*i]
        view[i].head = dims[8 + 3*i]


cdef int attention_team(const Attention* a) noexcept nogil:
    """A score and its weight cost about as much as dim/16 elements of a row operation."""
    return team(a.batch*a.heads*a.sq*a.sk*a.dim//16)


cdef void stage(const real* x, idx ld, idx rows, idx cols, float alpha, float* y, idx height,
                idx width) noexcept nogil:
    """y[height, width] = alpha * x[rows, cols] with zeros around it.

    Rows of x are ld apart.  A prefetch past its end reads nothing and cannot fault.
    """
    cdef idx i, j
    for i in range(rows):
        for j in range((cols + 15)//16):        # hardware does not prefetch rows a page apart
            prefetch(x + (i + 8)*ld + 16*j)
        for j in range(width//VL):
            store(y + i*width + j*VL, load(x + i*ld + j*VL, most(0, cols - j*VL))*alpha, VL)
    memset(y + rows*width, 0, (height - rows)*width*sizeof(float))


cdef void stage_view(const Attention* a, const View* x, idx b, idx position, idx head, idx rows,
                     float alpha, float* y, idx height) noexcept nogil:
    """The same of rows of a head."""
    cdef idx start = at(x, b, position, head)
    if a.half:
        stage(<const uint16_t*>x.start + start, x.position, rows, a.dim, alpha, y, height, a.wide)
    else:
        stage(<const float*>x.start + start, x.position, rows, a.dim, alpha, y, height, a.wide)


cdef inline void scale_row(const float* x, float factor, real* y, idx n, bint add=False,
                           bint past=False) noexcept nogil:
    """y (+)= factor x, rows as short as a head; y may be x."""
    cdef idx j = 0
    cdef vf v
    while j < n:
        v = load(x + j, n - j)*factor
        if add:
            v = v + load(<const real*>y + j, n - j)
        store_past(y + j, v, n - j, past)
        j += VL


cdef inline void put_row(const Attention* a, const float* x, float factor, real* y) noexcept nogil:
    """A head at one position, at y; past the caches, attention gains 6 to 20 %."""
    scale_row(x, factor, y, a.dim, False, goes_past(y, a.batch*a.sq*a.heads*a.dim, a.dim))


cdef inline void put(const Attention* a, const float* x, float factor, const View* y, idx b,
                     idx position, idx head) noexcept nogil:
    """The same, at its place in a view."""
    if a.half:
        put_row(a, x, factor, <uint16_t*>y.start + at(y, b, position, head))
    else:
        put_row(a, x, factor, <float*>y.start + at(y, b, position, head))


cdef void flip(const float* x, idx rows, idx cols, float* y) noexcept nogil:
    """y[cols, rows] = transpose of x[rows, cols], both in whole vectors."""
    cdef idx i, j
    for i in range(rows//VL):
        for j in range(cols//VL):
            transpose_tile(x + i*VL*cols + j*VL, cols, VL, y + j*VL*rows + i*VL, rows)


# An operand of `multiply`.  As it lies: element (i, t) of the left one at x[i*row + t*step], (t, j)
# of the right one at x[t*step + j].  In parts: packed, panels of 16 rows or 32 columns that are
# `row` floats apart.
cdef struct Operand:
    int parts
    const float* x
    idx row, step


cdef inline Operand operand(int count, const float* x, idx row, idx step) noexcept nogil:
    """An operand in so many parts, or, with 0, one that is not packed."""
    cdef Operand made
    made.parts, made.x, made.row, made.step = count, x, row, step
    return made


cdef inline idx room_in(int count, idx n) noexcept nogil:
    """Floats that n elements of an operand take: so many parts of half a float, or one."""
    return n*count//2 if count else n


cdef inline idx panel_room(int count, idx depth, idx width) noexcept nogil:
    """Floats of a packed panel, `width` rows or columns."""
    return parts(depth, SPLIT)*PART_ROOM*2*count*width


cdef Operand left(int count, const float* x, idx row, idx step, idx rows, idx depth,
                  float* room) noexcept nogil:
    """x[i*row + t*step], one of row and step being 1, as a left operand of depth t."""
    if not count:
        return operand(0, x, row, step)
    pack_parts(x, row*step, row == 1, depth, rows, row == 1, count, room,
               panel_room(count, depth, SPLIT_ROWS))
    return operand(count, room, panel_room(count, depth, SPLIT_ROWS), 0)


cdef Operand right(int count, const float* x, idx ld, bint turned, idx cols, idx depth,
                   float* room) noexcept nogil:
    """x [depth, cols], or [cols, depth] if turned (which takes whole tiles), as a right operand."""
    if not count and not turned:
        return operand(0, x, 0, ld)
    if not count:
        flip(x, TILE, ld, room)
        return operand(0, room, 0, TILE)
    pack_parts(x, ld, not turned, depth, cols, turned, count, room,
               panel_room(count, depth, SPLIT))
    return operand(count, room, panel_room(count, depth, SPLIT), 0)


cdef Operand view_as(const Attention* a, const View* x, idx b, idx position, idx head, bint across,
                     idx depth, idx rows, bint turn, float* room) noexcept nogil:
    """Rows of a head, from where they lie, as an operand in parts; arguments as of `pack_parts`."""
    cdef idx start = at(x, b, position, head), width = 16*tiles_of(across, turn)
    cdef idx panel = panel_room(a.parts, depth, width)
    if a.half:
        pack_parts(<const uint16_t*>x.start + start, x.position, across, depth, rows, turn, 1, room,
                   panel)
    else:
        pack_parts(<const float*>x.start + start, x.position, across, depth, rows, turn, a.parts,
                   room, panel)
    return operand(a.parts, room, panel, 0)


cdef inline Operand rows_from(Operand a, idx i) noexcept nogil:
    """A left operand without its first i rows, whole panels."""
    a.x = a.x + (i//SPLIT_ROWS if a.parts else i)*a.row
    return a


cdef inline Operand columns_from(Operand b, idx j) noexcept nogil:
    """A right operand without its first j columns, whole panels."""
    b.x = b.x + (j//SPLIT*b.row if b.parts else j)
    return b


cdef void multiply(idx rows, idx cols, idx depth, Operand a, Operand b, float* c, idx ldc, bint add,
                   idx first) noexcept nogil:
    """c[i, j] (+)= sum over t < depth of a[i, t] b[t, j], by register tiles.

    The register tile at row r may leave out t below r + first: there a is known to be 0.  Rows and
    columns are rounded up to whole register tiles; there must be memory for that.  A sum takes t in
    ascending order, with `add` going on from c.
    """
    cdef idx r = 0, j, low, tall = SPLIT_ROWS if a.parts else AR
    cdef const float* y
    while r < rows:
        j, low = 0, least(depth, most(0, r + first))
        while j < cols:
            if a.parts:
                low = low//SPLIT
                if a.parts == 1:
                    parts_tile(1, parts(depth, SPLIT) - low, a.x + low*256,
                               b.x + j//SPLIT*b.row + low*512, c + j, ldc, add)
                else:
                    parts_tile(3, parts(depth, SPLIT) - low, a.x + low*3*256,
                               b.x + j//SPLIT*b.row + low*3*512, c + j, ldc, add)
                low = low*SPLIT
            else:
                y = b.x + low*b.step + j
                # a copy for each way to lie: with constants a tile of depth 32 is 3 to 6 % faster
                if a.row == 1:
                    strided_tile(depth - low, a.x + low*a.step, 1, a.step, y, b.step, c + j, ldc,
                                 add)
                elif a.row == TILE:
                    strided_tile(depth - low, a.x + low, TILE, 1, y, b.step, c + j, ldc, add)
                else:
                    strided_tile(depth - low, a.x + low, a.row, 1, y, b.step, c + j, ldc, add)
            j += AL
        a, c = rows_from(a, tall), c + tall*ldc
        r += tall


cdef inline void strided_tile(idx depth, const float* a, const idx row, const idx step,
                              const float* b, idx ldb, float* c, idx ldc, bint add) noexcept nogil:
    """c[AR, AL] (+)= sum over t < depth of a[i*row + t*step] b[t*ldb + j]."""
    cdef vf sums[AR][3]
    cdef idx t
    if add:
        TILE_LOAD(sums, AR, 2, c, ldc)
    else:
        TILE_CLEAR(sums, AR, 2)
    for t in range(depth):
        TILE_ADD(sums, AR, 2, a, row, b)
        a += step
        b += ldb
    FORGET(c)
    TILE_STORE(sums, AR, 2, c, ldc, False)


cdef inline void parts_tile(const int count, idx steps, const float* a, const float* b, float* c,
                            idx ldc, bint add) noexcept nogil:
    """c[SPLIT_ROWS, SPLIT] (+)= a panel of a left operand times one of a right, in parts."""
    cdef idx k
    if not WITH_AMX:
        dot_tile(steps, a, b, c, ldc, add)
        return
    if add:
        AMX_LOAD(c, ldc)
    else:
        AMX_ZERO()
    for k in range(steps):
        multiply_step(count, a, b)
        a = a + count*256
        b = b + count*512
    AMX_STORE(c, ldc)


# From here on a tile is `queries` x `keys`, and its query i sees its keys j <= i + shift.

cdef inline idx seen(idx lane, idx keys, idx shift) noexcept nogil:
    """How many keys of a tile the last of the AL queries from `lane` on sees."""
    return most(0, least(keys, lane + AL + shift))


cdef inline void scores(Operand k, Operand q, float* s, idx ld, const Attention* a, idx lane,
                        idx keys, idx shift) noexcept nogil:
    """s[key][query] = k q^T for AL queries, down to the diagonal, in whole register tiles.

    Keys that none of them sees are left out; softmax_lanes and gradient_lanes put zeros there.
    """
    multiply(seen(lane, keys, shift), AL, a.dim, k, columns_from(q, lane), s, ld, False, -FAR)


cdef void gather(Operand v, Operand p, float* ot, const Attention* a, idx queries, idx keys,
                 idx shift, bint add) noexcept nogil:
    """o^T[wide, TILE] (+)= v^T p, each AL queries from the keys that they see."""
    cdef idx lane = 0
    while lane < queries:
        multiply(a.dim, AL, seen(lane, keys, shift), v, columns_from(p, lane), ot + lane, TILE,
                 add, -FAR)
        lane += AL


cdef inline void fade_columns(float* ot, const float* fade, idx wide) noexcept nogil:
    """o^T[:, query] *= fade[query]."""
    cdef idx i, j
    for i in range(wide):
        for j in range(0, TILE//VL):
            (<vf*>(ot + i*TILE))[j] = (<vf*>(ot + i*TILE))[j]*(<const vf*>fade)[j]


cdef void hide(float* s, idx ld, float value, idx lane, idx keys, idx shift) noexcept nogil:
    """s[key][query] = value, for AL queries from `lane` on, where the key lies in the future."""
    cdef idx key, j
    for key in range(most(0, lane + shift + 1), keys):
        for j in range(least(AL, key - shift - lane)):
            s[key*ld + j] = value


cdef void softmax_lanes(float* s, idx ld, float* m, float* l, float* fade, idx lane, idx keys,
                        idx shift, float factor, float* halves) noexcept nogil:
    """Scores of AL queries to weights 2^(factor (s - m)); m and l, maximum and sum so far, move on.

    fade = 2^(factor (old m - m)) is what all that was summed before shrinks by:
    m = max(old m, max s),  l = old l * fade + sum 2^(factor (s - m)).  The sum runs over keys in
    order.  The maximum skips a NaN: the weights show it.
    Weights replace scores, or go to `halves`, a panel of a right operand of bf16 [keys, queries].
    """
    cdef vf top[2]
    cdef vf sums[2]
    cdef vf e
    cdef vf* x
    cdef idx count = seen(lane, keys, shift), key, j
    hide(s, ld, -INFINITY, lane, count, shift)
    for j in range(2):
        top[j] = (<const vf*>m)[j]
    for key in range(count):
        x = <vf*>(s + key*ld)
        for j in range(2):
            top[j] = vmax(x[j], top[j])
    for j in range(2):
        e = weight(((<const vf*>m)[j] - top[j])*factor)
        sums[j] = (<const vf*>l)[j]*e
        (<vf*>fade)[j] = e
        (<vf*>m)[j] = top[j]
        top[j] = top[j]*factor
    if halves != NULL:
        weights_in_halves(s, count, top, sums, factor, halves)
    else:
        for key in range(count):
            x = <vf*>(s + key*ld)
            for j in range(2):
                e = weight(x[j]*factor - top[j])
                x[j] = e
                sums[j] = sums[j] + e
        hide(s, ld, 0, lane, keys, shift)       # never scored, but read by a register tile of o
    for j in range(2):
        (<vf*>l)[j] = sums[j]


cdef inline void weights_in_halves(const float* s, idx count, const vf* top, vf* sums, float factor,
                                   float* out) noexcept nogil:
    """The weights of AL queries for `count` keys, s[count, AL], as a panel of words of two keys.

    A step of 32 keys is filled up with zeros.
    """
    cdef vf e[2][2]
    cdef vf x
    cdef const vf* y = <const vf*>s
    cdef float* z = out
    cdef idx key, j
    for key in range(0, count - 1, 2):
        for j in range(2):
            e[0][j] = half_weight(y[j]*factor - top[j])
            e[1][j] = half_weight(y[2 + j]*factor - top[j])
            sums[j] = sums[j] + e[0][j] + e[1][j]
            (<vf*>(z + j*256))[0] = PAIRS(e[0][j], e[1][j])
        y = y + 4
        z = z + (272 if (key + 2) % SPLIT == 0 else 16)     # the second 16 queries lie in between
    if count % 2:
        for j in range(2):
            x = half_weight(y[j]*factor - top[j])
            sums[j] = sums[j] + x
            (<vf*>word_at(out, count - 1, j))[0] = PAIRS(x, VZERO)
    for key in range((count + 1)//2*2, parts(count, SPLIT)*SPLIT, 2):
        for j in range(2):
            (<vf*>word_at(out, key, j))[0] = VZERO


cdef inline float* word_at(float* panel, idx key, idx j) noexcept nogil:
    """Where the words of an even key and the next lie in a panel of a right operand, 16 queries."""
    return panel + key//SPLIT*512 + j*256 + key % SPLIT//2*16


cdef void forward_tile(const Attention* a, idx b, idx h, idx q0, Operand k, Operand v,
                       float* room) noexcept nogil:
    """o and L of at most TILE queries from q0 on, of one head; k, and v^T a KEYS at a time."""
    cdef idx queries = least(TILE, a.sq - q0), ahead = q0 + a.sk - a.sq
    cdef idx wide = a.wide, tile = TILE*wide
    cdef idx end = ahead + queries, k0 = 0, keys, shift, lane, i
    cdef Operand qt, p
    # The thread's scratch: q [TILE, wide], o^T [wide, TILE], s [KEYS, TILE], m, l, fade [TILE]
    cdef float* q = room
    cdef float* ot = room + tile
    cdef float* s = room + 2*tile
    cdef float* m = s + KEYS*TILE
    cdef float* l = m + TILE
    cdef float* fade = l + TILE
    cdef float* packed = fade + TILE            # q^T, then p
    cdef float* weights = packed + room_in(a.parts, tile)
    cdef float* halves = weights if a.parts == 1 else NULL
    qt = queries_as(a, &a.q, b, q0, h, queries, a.scale*LOG2_E, q, packed)
    for i in range(TILE):
        m[i] = <float>-1e30                     # finite: m - m is no NaN where nothing is visible
    memset(l, 0, TILE*sizeof(float))
    memset(ot, 0, tile*sizeof(float))           # queries that see nothing, or are not there
    while k0 < end:
        keys, shift, lane = least(KEYS, end - k0), ahead - k0, 0
        while lane < queries:
            if halves != NULL:                  # scores of some queries are used at once: in L1
                scores(rows_from(k, k0), qt, s, AL, a, lane, keys, shift)
                softmax_lanes(s, AL, m + lane, l + lane, fade + lane, lane, keys, shift, a.factor,
                              halves + lane//SPLIT*panel_room(1, KEYS, SPLIT))
            else:
                scores(rows_from(k, k0), qt, s + lane, TILE, a, lane, keys, shift)
                softmax_lanes(s + lane, TILE, m + lane, l + lane, fade + lane, lane, keys, shift,
                              1, NULL)
            lane += AL
        if k0:
            fade_columns(ot, fade, wide)
        if halves != NULL:
            p = operand(1, halves, panel_room(1, KEYS, SPLIT), 0)
        else:
            p = right(a.parts if a.weights else 0, s, TILE, False, queries, keys, weights)
        gather(block_from(a, v, k0), p, ot, a, queries, keys, shift, k0 > 0)
        k0 += KEYS
    flip(ot, wide, TILE, q)
    # One division a row at the very end; a query that saw nothing has l = 0: L = -inf and o = 0
    for i in range(queries):
        a.lse[(b*a.heads + h)*a.sq + q0 + i] = m[i]*a.factor*LN_2 + logf(l[i])
        put(a, q + i*wide, 0 if l[i] == 0 else 1/l[i], &a.o, b, q0 + i, h)


cdef Operand queries_as(const Attention* a, const View* x, idx b, idx q0, idx h, idx queries,
                        float alpha, float* staged, float* room) noexcept nogil:
    """Rows of a tile, transposed, as a right operand [dim, queries]; times alpha unless bf16.

    bf16 is packed from where it lies: rounding a multiple of it would cost half its accuracy.
    """
    if a.parts == 1:
        return view_as(a, x, b, q0, h, False, a.dim, queries, True, room)
    stage_view(a, x, b, q0, h, queries, alpha, staged, TILE)
    return right(a.parts, staged, a.wide, True, queries, a.dim, room)


cdef Operand key_rows(const Attention* a, int count, const View* x, idx b, idx head, idx keys,
                      float* room) noexcept nogil:
    """The first keys of k or v [keys, dim] as a left operand: in parts, or else staged.

    As they lie, register tiles would read past the end.
    """
    if count:
        return view_as(a, x, b, 0, head, False, a.dim, keys, False, room)
    stage_view(a, x, b, 0, head, keys, 1, room, parts(keys, TILE)*TILE)
    return operand(0, room, a.wide, 1)


cdef inline Operand turned(Operand a) noexcept nogil:
    """The transpose of a left operand as it lies."""
    a.row, a.step = a.step, a.row
    return a


cdef Operand key_columns(const Attention* a, const View* x, idx b, idx head, idx keys,
                         float* room) noexcept nogil:
    """The same transposed, [dim, keys], for `block_from`: packed in blocks of KEYS keys."""
    cdef Operand made
    cdef idx k0 = 0
    if not a.weights:
        return turned(key_rows(a, 0, x, b, head, keys, room))
    made = operand(a.parts, room, panel_room(a.parts, KEYS, SPLIT_ROWS), 0)
    while k0 < keys:
        pack_block(a, x, b, k0, head, least(KEYS, keys - k0), block_from(a, made, k0).x, made.row)
        k0 += KEYS
    return made


cdef inline void pack_block(const Attention* a, const View* x, idx b, idx k0, idx head, idx keys,
                            const float* out, idx room) noexcept nogil:
    """A block of it; panels are those of KEYS keys, however many there are."""
    cdef idx start = at(x, b, k0, head)
    if a.half:
        pack_parts(<const uint16_t*>x.start + start, x.position, True, keys, a.dim, True, 1,
                   <float*>out, room)
    else:
        pack_parts(<const float*>x.start + start, x.position, True, keys, a.dim, True, a.parts,
                   <float*>out, room)


cdef inline Operand block_from(const Attention* a, Operand v, idx k0) noexcept nogil:
    """Of such an operand, the block from key k0 on."""
    v.x = v.x + room_in(v.parts, k0*a.wide)
    return v


cdef void forward_chunk(const Attention* a, idx b, idx h, idx q0, idx last,
                        float* room) noexcept nogil:
    """o and L of the queries q0 .. last of one head, for which k and v are made ready once."""
    cdef idx g = h//(a.heads//a.kv_heads), each = room_in(a.parts, a.keys*a.wide)
    cdef idx keys = most(0, last + a.sk - a.sq)
    cdef Operand k, v
    if a.parts:
        AMX_OPEN()
    k = key_rows(a, a.parts, &a.k, b, g, keys, room)
    v = key_columns(a, &a.v, b, g, keys, room + each)
    while q0 < last:
        forward_tile(a, b, h, q0, k, v, room + 2*each)
        q0 += TILE
    if a.parts:
        AMX_CLOSE()


cdef inline void query_over(const Attention* a, const real* q, const real* k, const real* v,
                            real* out, float* lse, float* room) noexcept nogil:
    """o and L of a single query of one head, as when generating: k and v are read once, in place.

    Reading them is all that this costs: a tile would have one row in use, staging a second pass.
    Scratch: q and o [wide], s [sk], all of whose scores are there before the first weight.
    """
    cdef idx key, i
    cdef float* x = room
    cdef float* o = room + a.wide
    cdef float* s = room + 2*a.wide
    cdef float top = <float>-1e30, total = 0, w
    cdef vf sums
    stage(q, 0, 1, a.dim, a.scale, x, 1, a.wide)
    memset(o, 0, a.wide*sizeof(float))
    for key in range(a.sk):
        sums, i = VZERO, 0
        while i < a.dim:
            sums = sums + load(<const float*>x + i, VL)*load(k + key*a.k.position + i, a.dim - i)
            i += VL
        s[key] = lane_sum(sums)
        top = s[key] if s[key] > top else top
    for key in range(a.sk):
        w, i = fexp(s[key] - top), 0
        total += w
        while i < a.dim:
            store(o + i, load(<const float*>o + i, VL) + load(v + key*a.v.position + i,
                                                              a.dim - i)*w, VL)
            i += VL
    lse[0] = top + logf(total)
    scale_row(o, 1/total, out, a.dim)


cdef void one_query(const Attention* a, idx b, idx h, float* room) noexcept nogil:
    """The single query of a head."""
    cdef idx g = h//(a.heads//a.kv_heads), q = at(&a.q, b, 0, h), k = at(&a.k, b, 0, g)
    cdef idx v = at(&a.v, b, 0, g), o = at(&a.o, b, 0, h)
    cdef float* lse = a.lse + b*a.heads + h
    if a.half:
        query_over(a, <const uint16_t*>a.q.start + q, <const uint16_t*>a.k.start + k,
                   <const uint16_t*>a.v.start + v, <uint16_t*>a.o.start + o, lse, room)
    else:
        query_over(a, <const float*>a.q.start + q, <const float*>a.k.start + k,
                   <const float*>a.v.start + v, <float*>a.o.start + o, lse, room)


def attention(size_t q, size_t k, size_t v, size_t o, size_t lse, size_t dims, float scale,
              bint half=False):
    """o = softmax(scale q k^T) v, causal, and L = ln of the softmax's denominator for backward.

    dims: int64 B, Sq, Sk, H, KV, head_dim, then the strides (batch, position, head) of q, k, v, o
    in elements; the last axis is contiguous.  lse is [B, H, Sq].  Query head h reads kv head
    h // (H/KV).  A query that sees no key (only where Sq > Sk) gets o = 0 and L = -inf.
    """
    cdef Attention a
    cdef size_t[4] address = [q, k, v, o]
    describe(&a, <const int64_t*>dims, address, 4, <float*>lse, scale, half)
    cdef idx tiles = parts(a.sq, TILE), heads = a.batch*a.heads
    cdef int threads = most(1, least(heads*tiles, attention_team(&a)))
    # A task is a head, or as many of its tiles as leave TASKS a thread: the fewer tasks, the less
    # often k and v are staged (of the time at 4 heads of 2,048: 7 % in tasks of 4 tiles)
    cdef idx step = TILE*most(1, least(tiles, heads*tiles//(TASKS*threads)))
    cdef idx chunks = parts(a.sq, step), n = heads*chunks, t, first
    # Per thread: k and v; q and o^T; s; m, l and fade; q^T and p as operands.  One query: q, o, s
    cdef idx size = (2*room_in(a.parts, a.keys*a.wide) + 2*TILE*a.wide + KEYS*TILE + 3*TILE
                     + room_in(a.parts, TILE*a.wide) + room_in(a.parts, KEYS*TILE))
    if a.sq == 1 and a.sk > 0:
        size = 2*a.wide + a.keys
    cdef Buffer scratch = Buffer(threads*size*sizeof(float))
    cdef float* room = <float*>scratch.address
    cdef Tasks tasks
    deal(&tasks, threads)
    with nogil, parallel(num_threads=threads):
        t = take(&tasks, n)
        while t >= 0:
            first = (chunks - 1 - t % chunks)*step      # late queries see the most: they go first
            if a.sq == 1 and a.sk > 0:
                one_query(&a, t//a.heads, t % a.heads, room + threadid()*size)
            else:
                forward_chunk(&a, t//chunks//a.heads, t//chunks % a.heads, first,
                              least(a.sq, first + step), room + threadid()*size)
            t = take(&tasks, n)


cdef inline void fetch_row(const char* x, idx n) noexcept nogil:
    """Ask for n bytes, line by line."""
    cdef idx i
    for i in range(0, n, 64):
        prefetch(x + i)


cdef void row_dots(const Attention* a, idx b, idx q0, idx h, idx queries, float* z) noexcept nogil:
    """z[row] = sum of dy*o over a head, for TILE rows from q0 on; 0 past the last query.

    Rows lie far apart, so those to come are asked for: backward gains 1 to 7 %.
    """
    cdef idx i, x, y, size = 2 if a.half else 4
    for i in range(TILE):
        z[i] = 0
        if i < queries:
            fetch_row(a.dy.start + size*at(&a.dy, b, q0 + i + AHEAD, h), size*a.dim)
            fetch_row(a.o.start + size*at(&a.o, b, q0 + i + AHEAD, h), size*a.dim)
            x, y = at(&a.dy, b, q0 + i, h), at(&a.o, b, q0 + i, h)
            if a.half:
                z[i] = row_sum(<const uint16_t*>a.dy.start + x, <const uint16_t*>a.o.start + y,
                               NULL, a.dim)
            else:
                z[i] = row_sum(<const float*>a.dy.start + x, <const float*>a.o.start + y, NULL,
                               a.dim)


# p and ds of a tile as operands of bf16: rows of keys for dv and dk, ds also for dq^T.
cdef struct Halves:
    float* p                        # left [keys, queries]
    float* ds
    float* dst                      # ds as a right operand [keys, queries]


cdef void gradient_lanes(float* p, float* ds, idx ld, const float* lse, const float* delta,
                         idx lane, idx keys, idx shift, float factor,
                         const Halves* halves) noexcept nogil:
    """Scores p to weights 2^(factor p - L); ds, which comes as v do^T, to p*(ds - delta).

    p and ds are those of AL queries; lse, in units of ln2, and delta theirs.  The results take
    their places, or go to `halves`.
    """
    cdef vf total[2]
    cdef vf mean[2]
    cdef vf e
    cdef vf* x
    cdef vf* y
    cdef idx key, j, count = seen(lane, keys, shift)
    for j in range(2):
        total[j], mean[j] = (<const vf*>lse)[j], (<const vf*>delta)[j]
    if halves != NULL:
        hide(p, ld, -INFINITY, lane, count, shift)
        hide(ds, ld, 0, lane, count, shift)
        gradients_in_halves(p, ds, total, mean, count, factor, lane, halves)
        return
    for key in range(count):
        x, y = <vf*>(p + key*ld), <vf*>(ds + key*ld)
        for j in range(2):
            e = weight(x[j]*factor - total[j])
            x[j] = e
            y[j] = e*(y[j] - mean[j])
    hide(p, ld, 0, lane, keys, shift)           # set, not multiplied: exp may have overflowed there
    hide(ds, ld, 0, lane, keys, shift)


cdef inline void gradients_in_halves(const float* p, const float* ds, const vf* total,
                                     const vf* mean, idx count, float factor, idx lane,
                                     const Halves* halves) noexcept nogil:
    """gradient_lanes of p, ds [count, AL]; a step of 32 keys is filled up with zeros."""
    cdef vf e[2]
    cdef vf d[2][2]
    cdef const vf* x = <const vf*>p
    cdef const vf* y = <const vf*>ds
    cdef idx key, j, t, row
    cdef float* dst = halves.dst + lane//SPLIT*panel_room(1, KEYS, SPLIT)
    for key in range(0, parts(count, SPLIT)*SPLIT, 2):
        row = key//16*panel_room(1, TILE, SPLIT_ROWS) + lane//SPLIT*256 + key % 16*16
        if key + 2 > count:                         # the last key, or none
            close_gradients(x, y, total, mean, count - key, factor, halves.p + row,
                            halves.ds + row, dst, key)
            continue
        for t in range(2):
            for j in range(2):
                e[j] = half_weight(x[2*t + j]*factor - total[j])
                d[t][j] = e[j]*(y[2*t + j] - mean[j])
            store_both(halves.p + row + 16*t, e[0], e[1])
            store_both(halves.ds + row + 16*t, d[t][0], d[t][1])
        for j in range(2):
            (<vf*>word_at(dst, key, j))[0] = PAIRS(d[0][j], d[1][j])
        x, y = x + 4, y + 4


cdef void close_gradients(const vf* x, const vf* y, const vf* total, const vf* mean, idx left,
                          float factor, float* p, float* ds, float* dst, idx key) noexcept nogil:
    """Two keys, of which one or none is left: zeros for the rest."""
    cdef vf e[2]
    cdef vf d[2]
    cdef idx j
    for j in range(2):
        e[j], d[j] = VZERO, VZERO
        if left > 0:
            e[j] = half_weight(x[j]*factor - total[j])
            d[j] = e[j]*(y[j] - mean[j])
        (<vf*>word_at(dst, key, j))[0] = PAIRS(d[j], VZERO)
    store_both(p, e[0], e[1])
    store_both(ds, d[0], d[1])
    store_both(p + 16, VZERO, VZERO)
    store_both(ds + 16, VZERO, VZERO)


cdef inline Operand by_keys(const Attention* a, const float* x, const float* halves, idx keys,
                            idx queries, float* room) noexcept nogil:
    """p or ds of a tile as a left operand [keys, queries]: in bf16 it is there already."""
    if a.parts == 1:
        return operand(1, halves, panel_room(1, TILE, SPLIT_ROWS), 0)
    return left(a.parts if a.weights else 0, x, TILE, 1, keys, queries, room)


cdef void backward_tile(const Attention* a, idx b, idx h, idx q0, Operand k, Operand v, Operand kt,
                        float* dk, float* dv, float* room) noexcept nogil:
    """dq of at most TILE queries from q0 on, of one head; adds their part of dk and dv."""
    cdef idx queries = least(TILE, a.sq - q0), ahead = q0 + a.sk - a.sq
    cdef idx wide = a.wide, tile = TILE*wide, each = room_in(a.parts, tile)
    cdef int count = a.parts if a.weights else 0
    # Whole register tiles of keys: the odd ones lie in every query's future and get p = ds = 0.
    cdef idx end = (ahead + queries + AR - 1)//AR*AR, k0 = 0, keys, shift, lane, ld, i
    cdef Operand qt, dyt, q_rows, dy_rows, dst
    cdef Halves halves
    # Scratch: q, dy [TILE, wide], dq^T [wide, TILE], p, ds [KEYS, TILE], lse, delta [TILE]
    cdef float* q = room
    cdef float* dy = room + tile
    cdef float* dqt = room + 2*tile
    cdef float* p = room + 3*tile
    cdef float* ds = p + KEYS*TILE
    cdef float* lse = ds + KEYS*TILE
    cdef float* delta = lse + TILE
    cdef float* packed = delta + TILE           # q^T, dy^T, q, dy; p or ds, or in bf16 p, ds, ds
    cdef float* weights = packed + 4*each
    halves.p, halves.ds = weights, weights + room_in(1, KEYS*TILE)
    halves.dst = halves.ds + room_in(1, KEYS*TILE)
    stage(<const float*>a.lse + (b*a.heads + h)*a.sq + q0, queries, 1, queries, LOG2_E, lse, 1,
          TILE)
    row_dots(a, b, q0, h, queries, delta)
    qt = queries_as(a, &a.q, b, q0, h, queries, a.scale*LOG2_E, q, packed)
    dyt = queries_as(a, &a.dy, b, q0, h, queries, 1, dy, packed + each)
    if a.parts == 1:
        q_rows = view_as(a, &a.q, b, q0, h, True, queries, a.dim, False, packed + 2*each)
        dy_rows = view_as(a, &a.dy, b, q0, h, True, queries, a.dim, False, packed + 3*each)
    else:
        q_rows = right(count, q, wide, False, wide, queries, packed + 2*each)
        dy_rows = right(count, dy, wide, False, wide, queries, packed + 3*each)
    memset(dqt, 0, tile*sizeof(float))
    while k0 < end:
        keys, shift, lane = least(KEYS, end - k0), ahead - k0, 0
        while lane < queries:
            i, ld = lane, TILE
            if a.parts == 1:                    # used at once, and small enough for L1
                i, ld = 0, AL
            scores(rows_from(k, k0), qt, p + i, ld, a, lane, keys, shift)
            scores(rows_from(v, k0), dyt, ds + i, ld, a, lane, keys, shift)
            gradient_lanes(p + i, ds + i, ld, lse + lane, delta + lane, lane, keys, shift,
                           a.factor, &halves if a.parts == 1 else NULL)
            lane += AL
        # dv += p^T dy;  dk += ds^T q, dq += ds k, both scaled at the end
        multiply(keys, wide, queries, by_keys(a, p, halves.p, keys, queries, weights), dy_rows,
                 dv + k0*wide, wide, True, -shift)
        multiply(keys, wide, queries, by_keys(a, ds, halves.ds, keys, queries, weights), q_rows,
                 dk + k0*wide, wide, True, -shift)
        if a.parts == 1:
            dst = operand(1, halves.dst, panel_room(1, KEYS, SPLIT), 0)
        else:
            dst = right(count, ds, TILE, False, queries, keys, weights)
        gather(block_from(a, kt, k0), dst, dqt, a, queries, keys, shift, k0 > 0)
        k0 += KEYS
    flip(dqt, wide, TILE, q)
    for i in range(queries):
        put(a, q + i*wide, a.scale, &a.dq, b, q0 + i, h)


cdef void backward_head(const Attention* a, idx b, idx g, float* room) noexcept nogil:
    """dq, dk, dv of one kv head: its query heads one by one, the queries of each in order.

    So dk and dv have a single writer and one order of summation; they grow in the thread's scratch
    and are copied out once.
    """
    cdef idx group = a.heads//a.kv_heads, size = a.keys*a.wide, each = room_in(a.parts, size)
    cdef idx h, q0, i
    cdef float* dk = room
    cdef float* dv = room + size
    cdef Operand k, v, kt
    room = room + 2*size
    if a.parts:
        AMX_OPEN()
    k = key_rows(a, a.parts, &a.k, b, g, a.sk, room)
    v = key_rows(a, a.parts, &a.v, b, g, a.sk, room + each)
    kt = key_columns(a, &a.k, b, g, a.sk, room + 2*each) if a.parts else turned(k)
    memset(dk, 0, 2*size*sizeof(float))         # dv follows dk
    for h in range(g*group, (g + 1)*group):
        q0 = 0
        while q0 < a.sq:
            backward_tile(a, b, h, q0, k, v, kt, dk, dv, room + (3 if a.parts else 2)*each)
            q0 += TILE
    if a.parts:
        AMX_CLOSE()
    for i in range(a.sk):                       # q carries scale/ln2, or nothing
        put(a, dk + i*a.wide, a.scale if a.parts == 1 else LN_2, &a.dk, b, i, g)
        put(a, dv + i*a.wide, 1, &a.dv, b, i, g)


def attention_backward(size_t q, size_t k, size_t v, size_t o, size_t lse, size_t dy, size_t dq,
                       size_t dk, size_t dv, size_t dims, float scale, bint half=False):
    """dq, dk, dv (overwritten) from dy, the gradient of o, and the o and lse that `attention` left.

    dims as for `attention`, with the strides of q, k, v, o, dy, dq, dk, dv.  The three results
    overlap neither each other nor the rest.  A task is a whole kv head, of which there are B*KV.
    """
    cdef Attention a
    cdef size_t[8] address = [q, k, v, o, dy, dq, dk, dv]
    describe(&a, <const int64_t*>dims, address, 8, <float*>lse, scale, half)
    cdef idx n = a.batch*a.kv_heads, t
    cdef int threads = most(1, least(n, attention_team(&a)))
    # Per thread: dk and dv; k, v and k^T; tiles of queries; p and ds; lse and delta; q and dy both
    # ways, and p or ds, as operands; in bf16 p and twice ds
    cdef idx size = (2*a.keys*a.wide + (3 if a.parts else 2)*room_in(a.parts, a.keys*a.wide)
                     + 3*TILE*a.wide + 2*KEYS*TILE + 2*TILE + 4*room_in(a.parts, TILE*a.wide)
                     + (3 if a.parts == 1 else 1)*room_in(a.parts, KEYS*TILE))
    cdef Buffer scratch = Buffer(threads*size*sizeof(float))
    cdef float* room = <float*>scratch.address
    cdef Tasks tasks
    deal(&tasks, threads)
    with nogil, parallel(num_threads=threads):
        t = take(&tasks, n)
        while t >= 0:
            backward_head(&a, t//a.kv_heads, t % a.kv_heads, room + threadid()*size)
            t = take(&tasks, n)


# ---- 9. Narrow heads -----------------------------------------------------------------------------
# Cross-entropy of logits s = x w^T that never reach memory:
#
#   top = max s     sum = sum_j e^(s_j - top)     loss = top - s_target + ln(sum)
#   p = e^(s - top)/sum       dw = scale (p - [j = target])^T x       dx = scale (p - [..]) w
#
# A tile of logits is made for the sum, and again for p: four products where three would do.  At
# dim 32 they are cheaper than writing rows*vocab floats, reading them back and packing them twice:
# the head takes 25 ms instead of 31 (512 rows, 50,257 words, 2 threads); at dim 128 it is slower.
#
# A task is a range of words for all rows.  What it has of dw is complete; what it has of sums and
# dx joins that of the other ranges in their order.  As in section 8 tiles are s[word][row], a lane
# is a row, and scores are in units of ln2, here because w is staged as w/ln2.

cdef enum:
    HEAD_WORDS = 256                # words of a range at least
    HEAD_RANGES = 64                # ranges at most: each keeps its share of dx
    HEAD_PASSES = 4                 # ranges' sums, rows' losses, ranges' gradients, rows' dx

cdef struct Head:
    const void* x                   # [rows, dim]
    const float* w                  # [words, dim], of which the first `vocab` count
    const int64_t* targets          # [rows], below 0 where a row does not count
    double* losses                  # [rows]
    void* dx                        # [rows, dim], or NULL
    float* dw                       # [words, dim], or NULL
    bint half, add_x, add_w         # x and dx are bf16; add to them
    idx rows, dim, words, vocab
    float scale                     # of the gradients
    # What follows from these
    int parts                       # of operands of scores; if 1, of all
    float unit                      # of scores, in nats: ln2 where w is staged as w/ln2
    idx wide, tall                  # dim in whole vectors, and wide in whole register tiles
    idx tiles, each, ranges         # tiles of rows, words of a range
    float* score                    # [tiles, TILE]: the target's score
    float* top                      # [ranges, tiles, TILE]: a range's largest score; of range 0
    float* sum                      # later that of all; and its sum of 2^(s - top), later 1/sum
    float* shares                   # [ranges, tiles, tall, TILE]: a range's share of dx, across

# A thread's scratch for a range and a tile of rows.
cdef struct Desk:
    float* w                        # [each, wide], in units of ln2; in bf16 w^T as an operand
    float* dw                       # [each, wide]
    float* x                        # [TILE, wide], or [TILE, dim] of bf16
    float* s                        # [KEYS, TILE]
    float* fade                     # [TILE]
    Operand w_rows, xt, x_rows      # w, x^T and x as operands
    Operand p_rows, p               # p by words, and across
    float* room[5]                  # theirs


cdef idx lay_desk(const Head* h, float* room, Desk* d) noexcept nogil:
    """Places in `room`, which takes the floats that are returned."""
    cdef idx w = h.each*h.wide, x = TILE*h.wide
    d.w = room
    d.dw = d.w + w
    d.x = d.dw + w
    d.s = d.x + x
    d.fade = d.s + KEYS*TILE
    d.room[0] = d.fade + TILE
    d.room[1] = d.room[0] + w*3//2
    d.room[2] = d.room[1] + x*3//2
    d.room[3] = d.room[2] + x//2
    d.room[4] = d.room[3] + KEYS*TILE//2
    return d.room[4] + KEYS*TILE//2 - room


cdef void lay_words(const Head* h, idx first, idx words, Desk* d) noexcept nogil:
    """A range of w as operands."""
    cdef idx k0 = 0, panel = panel_room(1, KEYS, SPLIT_ROWS)
    cdef const float* w = h.w + first*h.dim
    if h.parts == 1:
        d.w_rows = left(1, w, h.dim, 1, words, h.dim, d.room[0])
        while k0 < words:               # w^T, a block of words at a time
            pack_parts(w + k0*h.dim, h.dim, True, least(KEYS, words - k0), h.dim, True, 1,
                       d.w + room_in(1, k0*h.wide), panel)
            k0 += KEYS
        return
    stage(w, h.dim, words, h.dim, LOG2_E, d.w, h.each, h.wide)
    d.w_rows = left(h.parts, d.w, h.wide, 1, h.each, h.dim, d.room[0])


cdef inline Operand words_across(const Head* h, const Desk* d, idx k0) noexcept nogil:
    """w^T [dim, words from k0 on], a block of them."""
    if h.parts == 1:
        return operand(1, d.w + room_in(1, k0*h.wide), panel_room(1, KEYS, SPLIT_ROWS), 0)
    return operand(0, d.w + k0*h.wide, 1, h.wide)


cdef void lay_rows(const Head* h, idx tile, Desk* d) noexcept nogil:
    """A tile of x as operands; rows that do not count are 0: their p is, and 0 times NaN is not."""
    cdef idx q0 = tile*TILE, rows = least(TILE, h.rows - q0), i
    cdef uint16_t* y = <uint16_t*>d.x
    if h.parts == 1:
        for i in range(rows):
            if h.targets[q0 + i] < 0:
                memset(y + i*h.dim, 0, h.dim*sizeof(uint16_t))
            else:
                memcpy(y + i*h.dim, <const uint16_t*>h.x + (q0 + i)*h.dim, h.dim*sizeof(uint16_t))
        pack_parts(<const uint16_t*>y, h.dim, False, h.dim, rows, True, 1, d.room[1],
                   d.xt.row)
        pack_parts(<const uint16_t*>y, h.dim, True, rows, h.dim, False, 1, d.room[2],
                   d.x_rows.row)
        return
    if h.half:
        stage(<const uint16_t*>h.x + q0*h.dim, h.dim, rows, h.dim, 1, d.x, TILE, h.wide)
    else:
        stage(<const float*>h.x + q0*h.dim, h.dim, rows, h.dim, 1, d.x, TILE, h.wide)
    for i in range(rows):
        if h.targets[q0 + i] < 0:
            memset(d.x + i*h.wide, 0, h.wide*sizeof(float))
    d.xt = right(h.parts, d.x, h.wide, True, TILE, h.dim, d.room[1])


cdef void head_sums(const Head* h, idx r, idx tile, idx words, const Desk* d) noexcept nogil:
    """Maximum and sum of a range of words, for a tile of rows; the scores of targets in it."""
    cdef idx k0 = 0, keys, q, word, lane
    cdef float* top = h.top + (r*h.tiles + tile)*TILE
    cdef float* total = h.sum + (r*h.tiles + tile)*TILE
    fill_part(-INFINITY, top, TILE)
    fill_part(0, total, TILE)
    while k0 < words:
        keys = least(KEYS, words - k0)
        multiply(keys, TILE, h.dim, rows_from(d.w_rows, k0), d.xt, d.s, TILE, False, -FAR)
        for q in range(tile*TILE, least(h.rows, tile*TILE + TILE)):
            word = h.targets[q] - r*h.each - k0
            if 0 <= word < keys:
                h.score[q] = d.s[word*TILE + q % TILE]
        for lane in range(TILE//AL):
            softmax_lanes(d.s + lane*AL, TILE, top + lane*AL, total + lane*AL, d.fade, 0, keys, FAR,
                          h.unit*LOG2_E, NULL)
        k0 += KEYS


cdef void weigh(const Head* h, idx tile, idx first, idx keys, float* s) noexcept nogil:
    """In place: scores of words from `first` on to p, less 1 at a row's target."""
    cdef const float* top = h.top + tile*TILE
    cdef const float* scale = h.sum + tile*TILE
    cdef float factor = h.unit*LOG2_E
    cdef idx q, key, j, word
    cdef vf* x
    cdef vf base[16]                # TILE//VL of them
    for j in range(TILE//VL):
        base[j] = (<const vf*>top)[j]*factor
    for key in range(keys):
        x = <vf*>(s + key*TILE)
        for j in range(TILE//VL):
            x[j] = weight(x[j]*factor - base[j])*(<const vf*>scale)[j]
    for q in range(tile*TILE, least(h.rows, tile*TILE + TILE)):
        word = h.targets[q] - first
        if 0 <= word < keys:
            s[word*TILE + q % TILE] -= 1


cdef void halve(const float* p, idx keys, const Operand* rows,
                const Operand* across) noexcept nogil:
    """p [keys, TILE] as operands of bf16: by keys, and across; filled up to whole steps."""
    cdef idx key, j, t, lane
    cdef vf x[2][2]
    cdef float* y
    for lane in range(TILE//SPLIT):
        for key in range(0, parts(keys, SPLIT)*SPLIT, 2):
            for t in range(2):
                y = <float*>rows.x + (key + t)//16*rows.row + lane*256 + (key + t) % 16*16
                for j in range(2):
                    x[t][j] = VZERO
                    if key + t < keys:
                        x[t][j] = ROUND((<const vf*>(p + (key + t)*TILE + lane*SPLIT))[j])
                    store(<uint16_t*>y + j*VL, x[t][j], VL)
            for j in range(2):
                (<vf*>word_at(<float*>across.x + lane*across.row, key, j))[0] = PAIR(
                    x[0][j], x[1][j])


cdef void head_gradients(const Head* h, idx r, idx tile, idx words, const Desk* d) noexcept nogil:
    """What a tile of rows adds to a range's dw, and the range's share of their dx."""
    cdef idx k0 = 0, rows = least(TILE, h.rows - tile*TILE), keys
    cdef float* share = h.shares + (r*h.tiles + tile)*TILE*h.tall
    while k0 < words:
        keys = least(KEYS, words - k0)
        multiply(keys, TILE, h.dim, rows_from(d.w_rows, k0), d.xt, d.s, TILE, False, -FAR)
        weigh(h, tile, r*h.each + k0, keys, d.s)
        if h.parts == 1:
            halve(d.s, keys, &d.p_rows, &d.p)
        if h.dw != NULL:
            multiply(keys, h.wide, rows, d.p_rows, d.x_rows, d.dw + k0*h.wide, h.wide, True, -FAR)
        if h.dx != NULL:
            multiply(h.dim, TILE, keys, words_across(h, d, k0), d.p, share, TILE, k0 > 0, -FAR)
        k0 += KEYS


cdef void head_range(const Head* h, idx r, bint gradients, float* room) noexcept nogil:
    """The task of a range of words: its sums, or its gradients."""
    cdef idx first = r*h.each, words = least(h.each, h.vocab - first), tile, i
    cdef Desk d
    lay_desk(h, room, &d)
    d.xt = operand(1, d.room[1], panel_room(1, h.dim, SPLIT), 0)
    d.x_rows, d.p_rows = operand(0, d.x, 0, h.wide), operand(0, d.s, TILE, 1)
    d.p = operand(0, d.s, 0, TILE)
    if h.parts == 1:
        d.x_rows = operand(1, d.room[2], panel_room(1, TILE, SPLIT), 0)
        d.p_rows = operand(1, d.room[3], panel_room(1, TILE, SPLIT_ROWS), 0)
        d.p = operand(1, d.room[4], panel_room(1, KEYS, SPLIT), 0)
    AMX_OPEN()
    lay_words(h, first, words, &d)
    if gradients:
        memset(d.dw, 0, h.each*h.wide*sizeof(float))
    for tile in range(h.tiles):
        lay_rows(h, tile, &d)
        if gradients:
            head_gradients(h, r, tile, words, &d)
        else:
            head_sums(h, r, tile, words, &d)
    AMX_CLOSE()
    for i in range(words if gradients and h.dw != NULL else 0):
        scale_row(d.dw + i*h.wide, h.scale, h.dw + (first + i)*h.dim, h.dim, h.add_w)


cdef void close_row(const Head* h, idx q) noexcept nogil:
    """The loss of a row, from what the ranges have; what `weigh` needs takes range 0's place."""
    cdef idx r, lanes = h.tiles*TILE
    cdef bint counts = q < h.rows and h.targets[q] >= 0
    cdef float top = -INFINITY
    cdef double total = 0, octaves = h.unit*1.4426950408889634      # 1 in units of ln2
    for r in range(h.ranges):
        top = h.top[r*lanes + q] if h.top[r*lanes + q] > top else top
    for r in range(h.ranges):
        total += h.sum[r*lanes + q]*exp2((<double>h.top[r*lanes + q] - top)*octaves)
    h.top[q], h.sum[q] = top, <float>(1/total) if counts else 0
    if q < h.rows:
        h.losses[q] = (<double>top - h.score[q])*h.unit + log(total) if counts else 0


cdef void head_tile(const Head* h, idx tile, bint gradients, float* room) noexcept nogil:
    """The task of a tile of rows: its losses, or dx, the ranges' shares of it in their order."""
    cdef idx i, r, at, size = TILE*h.tall
    cdef float* total = h.shares + tile*size
    cdef float scale = h.scale if h.parts == 1 else h.scale*LN_2
    if not gradients:
        for i in range(TILE):
            close_row(h, tile*TILE + i)
        return
    for r in range(1, h.ranges):
        add_rows(total, total + r*h.tiles*size, total, size)
    flip(total, h.wide, TILE, room)
    for i in range(least(TILE, h.rows - tile*TILE)):
        at = (tile*TILE + i)*h.dim
        if h.half:
            scale_row(room + i*h.wide, scale, <uint16_t*>h.dx + at, h.dim, h.add_x)
        else:
            scale_row(room + i*h.wide, scale, <float*>h.dx + at, h.dim, h.add_x)


cdef void run_head(const Head* h, int threads, idx size, float* room) noexcept nogil:
    """The passes; a barrier after each, since every task reads what all of the last pass left."""
    cdef Tasks tasks[HEAD_PASSES]
    cdef int i, passes = HEAD_PASSES if h.dx != NULL else 3 if h.dw != NULL else 2
    cdef idx t, n
    for i in range(passes):
        deal(&tasks[i], threads)
    with nogil, parallel(num_threads=threads):
        for i in range(passes):
            n = h.tiles if i % 2 else h.ranges
            t = take(&tasks[i], n)
            while t >= 0:
                if i % 2:
                    head_tile(h, t, i > 1, room + threadid()*size)
                else:
                    head_range(h, t, i > 1, room + threadid()*size)
                t = take(&tasks[i], n)
            barrier()


def head_loss(size_t x, size_t w, size_t targets, size_t losses, idx rows, idx dim, idx words,
              idx vocab, float scale, size_t dx=0, bint add_x=False, size_t dw=0,
              bint add_w=False, bint half=False):
    """losses[rows] (double) and, where there is a place for them, gradients times scale.

    x [rows, dim], bf16 if half, w [words, dim] of which `vocab` count, targets int64 [rows]: below
    vocab, and below 0 for a loss and gradients of 0.  dx [rows, dim] and dw [words, dim] are
    written, or added to; rows of dw past the vocabulary get 0.
    """
    cdef Head h
    cdef Desk d
    h.x, h.w, h.targets, h.losses = <void*>x, <float*>w, <int64_t*>targets, <double*>losses
    h.dx, h.add_x, h.dw, h.add_w, h.half = <void*>dx, add_x, <float*>dw, add_w, half
    h.parts = (1 if WITH_AMX or WITH_DOT else 0) if half else 3*WITH_AMX
    h.unit = 1 if h.parts == 1 else 0.6931471805599453
    h.rows, h.dim, h.words, h.vocab, h.scale = rows, dim, words, vocab, scale
    h.wide, h.tiles = parts(dim, AL)*AL, parts(rows, TILE)
    h.tall = parts(h.wide, AR)*AR
    h.each = parts(most(HEAD_WORDS, parts(vocab, HEAD_RANGES)), KEYS)*KEYS
    h.ranges = parts(vocab, h.each)
    cdef idx lanes = h.tiles*TILE, size = lay_desk(&h, NULL, &d)
    cdef int threads = team(rows*vocab)
    cdef Buffer kept = Buffer(lanes*(1 + h.ranges*(2 + (h.tall if dx else 0)))*sizeof(float))
    cdef Buffer scratch = Buffer(threads*size*sizeof(float))
    h.score = <float*>kept.address
    h.top = h.score + lanes
    h.sum = h.top + h.ranges*lanes
    h.shares = h.sum + h.ranges*lanes
    run_head(&h, threads, size, <float*>scratch.address)
    if dw and not add_w:
        memset(h.dw + vocab*dim, 0, (words - vocab)*dim*sizeof(float))


# ---- 10. Optimizer -------------------------------------------------------------------------------

# Blocks are counted from the start of the flat gradient buffer and added up in order by the caller,
# so the norm has one value whoever computes which blocks.
cdef enum:
    SQUARES = 65536                     # elements per partial sum of the global norm
    LANES = 1024                        # running sums of one


cdef double square_sum(const float* x, idx n) noexcept nogil:
    """Sum of squares in double: lane j adds up x[j], x[j + 1024], ..., then halves of the lanes.

    The square of an fp32 is exact in double, so fused or not the bits are the same in every build.
    1,024 lanes whatever VL is: so many sums a GPU's block runs beside one another, and here they
    take 8 KB of L1.
    """
    cdef double lane[LANES]
    cdef idx i = 0, j, half = LANES//2
    for j in range(LANES):
        lane[j] = 0
    while i + LANES <= n:
        for j in range(LANES):
            lane[j] += <double>x[i + j]*<double>x[i + j]
        i += LANES
    for j in range(n - i):
        lane[j] += <double>x[i + j]*<double>x[i + j]
    while half > 0:
        for j in range(half):
            lane[j] += lane[j + half]
        half //= 2
    return lane[0]


def sumsq(size_t x, size_t out, idx n):
    """out[b] (double) = sum of squares of block b of 65,536 elements, the last one shorter."""
    cdef idx b
    for b in prange(parts(n, SQUARES), nogil=True, schedule='dynamic', num_threads=team(n)):
        (<double*>out)[b] = square_sum(<const float*>x + b*SQUARES, least(SQUARES, n - b*SQUARES))


cdef void adamw_part(float* p, float* g, float* m, float* v, idx n, float scale, float blend1,
                     float beta2, float blend2, float root, float eps, float keep,
                     float minus_step) noexcept nogil:
    """The formula of adamw() for one part; every multiply-add is spelled, so no build chooses."""
    cdef float grad
    cdef idx i
    for i in range(n):
        grad = g[i]*scale                           # enters products only: nothing to contract
        m[i] = fmaf1(blend1, fmaf1(g[i], scale, -m[i]), m[i])
        v[i] = fmaf1(blend2*grad, grad, beta2*v[i])
        p[i] = fmaf1(minus_step, m[i]/(sqrtf(v[i])/root + eps), p[i]*keep)
        g[i] = <float>0.0                           # read for the last time, and in L1: free here


def grad_clip(size_t blocks, idx n, double limit, size_t out):
    """out [4] (double) = norm, the factor min(1, limit/(norm + 1e-6)), finite (1 or 0), a flag.

    blocks are sumsq's; they are added in order, so the norm has one value whoever computed which.
    The flag stays 1 once a norm was not finite.
    """
    cdef idx i
    cdef double total = 0, norm
    cdef double* y = <double*>out
    for i in range(n):
        total += (<const double*>blocks)[i]
    norm = sqrt(total)
    y[0] = norm
    y[1] = limit/(norm + 1e-6) if limit/(norm + 1e-6) < 1 else 1.0
    y[2] = isfinite(norm) != 0
    y[3] = 1.0 if y[3] != 0 or not y[2] else 0.0


def adamw(size_t p, size_t g, size_t m, size_t v, size_t mirror, idx n, size_t hyper, size_t clip):
    """One step of AdamW (torch's) over n elements; g is zeroed.

    hyper (double): lr, beta1, beta2, eps, weight decay, bias1, bias2 with bias_i = 1 - beta_i^step;
    clip: grad_clip's, whose second is grad_scale here; the third is 0 where nothing may change.
    mirror: a bf16 copy of p to keep up, which is a GPU's; 0 here.
    Loshchilov and Hutter (2019), with m = beta1 m + (1 - beta1) g' written as an interpolation:

        m = fma(1 - beta1, fma(g, grad_scale, -m), m)
        v = fma((1 - beta2)*g', g', beta2*v)                  with g' = g*grad_scale
        p = fma(-lr/bias1, m/(sqrt(v)/sqrt(bias2) + eps), p*(1 - lr*weight_decay))

    in fp32, each operation above rounded once, so that a GPU can repeat it to the bit.  1 - beta1,
    1 - beta2, -lr/bias1, sqrt(bias2) and 1 - lr*weight_decay are formed in double as Python
    objects, where no compiler fuses them, and rounded to fp32 once.
    """
    lr, beta1, beta2, eps, weight_decay, bias1, bias2 = [(<double*>hyper)[i] for i in range(7)]
    cdef float scale = (<double*>clip)[1], blend1 = 1.0 - beta1, decay2 = beta2
    cdef float root = sqrt(bias2), tiny = eps, keep = 1.0 - lr*weight_decay, minus_step = -lr/bias1
    cdef float blend2 = 1.0 - beta2
    cdef idx t, a
    if (<double*>clip)[2] == 0:
        fill(g, 0.0, n)
        return
    for t in prange(parts(n, PART), nogil=True, schedule='dynamic', num_threads=team(n)):
        a = t*PART
        adamw_part(<float*>p + a, <float*>g + a, <float*>m + a, <float*>v + a, extent(t, n), scale,
                   blend1, decay2, blend2, root, tiny, keep, minus_step)
