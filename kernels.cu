// kernels.cu: every CUDA kernel of xtrain.
//
// How it reads, top to bottom:
//
//  1. Types          bf16, vectors of 16 bytes, PTX, sums over warps and blocks
//  2. Elementwise    strided copies, arithmetic with broadcasting, activations, casts
//  3. Philox         Philox4x32-10, masks, dropout with a residual
//  4. Rows           sums, softmax, cross-entropy
//  5. Norms          RMSNorm with the residual's addition, and its backward
//  6. RoPE           QK-norm + RoPE, and their backward
//  7. SwiGLU         and its backward
//  8. Embedding      lookup, and the deterministic sum of its gradient
//  9. Optimizer      sums of squares, clipping, AdamW
// 10. Product        a tiled one, the readable reference of cuBLAS's
// 11. Attention      FlashAttention forward and backward on tensor cores
//
// tensor.py compiles what a run needs with NVRTC, which finds no headers: none is included.  Every
// kernel is a template, asked for by name ("add_rmsnorm<bf16, 8>").  Every parameter has 8 bytes: a
// pointer, an idx or a double.  W is the number of elements that a thread moves at once, 16 bytes
// where rows and addresses allow it, else 1.
//
// What a kernel computes depends on shapes alone: no floating-point atomics, and every sum has one
// order.  Sums of products, which a compiler may fuse or not, are spelled where the CPU must agree
// to the bit (AdamW, sums of squares, dropout, casts); elsewhere it may choose.

// ---- 1. Types -----------------------------------------------------------------------------------

typedef long long idx;
struct bf16 { unsigned short bits; };           // the upper half of an fp32; arithmetic is fp32

#define LOG2_E 1.4426950408889634f
#define LOWEST -3.402823466e38f                 // finite, so that LOWEST - LOWEST is 0 and not NaN

__device__ unsigned to_bf16(float x);

// ---- PTX: begin
// 16 or 4 bytes from global to shared memory, behind the back of the thread; zeros if not `there`
__device__ __forceinline__ void copy16(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
                 "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::
                 "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void copies_wait() {     // until at most LEFT groups are under way
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r brings the address of row r of matrix i, and
// gets of it row lane/4, columns 2 (lane%4) and one more; turned: that of the transposed matrix
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(at)) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(unsigned (&r)[4], const void* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(at)) : "memory");
}
// c[16, 8] += a[16, 16] b[16, 8]
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ unsigned two_bf16(float x, float y) {    // x in the lower half
    unsigned both;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
#else
    both = to_bf16(x) | to_bf16(y) << 16;
#endif
    return both;
}
// What was written before a fence and a store behind it is seen by whoever loads what that stored
// and then passes a fence
__device__ __forceinline__ unsigned load_flag(const unsigned* x) {
    unsigned y;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(y) : "l"(x) : "memory");
    return y;
}
__device__ __forceinline__ void store_flag(unsigned* y, unsigned x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(y), "r"(x) : "memory");
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// ---- PTX: end

// The bits of the nearest bf16, ties to even; a NaN keeps its upper half and is made quiet.  With
// integers, as on the CPU, whose to_bf16() says why this rounds.
__device__ unsigned to_bf16(float x) {
    unsigned u = __float_as_uint(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded;
}

__device__ __forceinline__ float load(const float* x) { return *x; }
__device__ __forceinline__ float load(const bf16* x) {
    return __uint_as_float((unsigned)x->bits << 16);
}
__device__ __forceinline__ void store(float* y, float x) { *y = x; }
__device__ __forceinline__ void store(bf16* y, float x) { y->bits = (unsigned short)to_bf16(x); }


// ---- Vectors
// A thread takes W elements at a time, 16 bytes where rows and addresses allow it (the host chooses
// W).  In registers they are fp32, a vf<W>, as the CPU core calls its vectors.

template <int W> struct vf {
    float at[W];
    __device__ __forceinline__ float& operator[](int i) { return at[i]; }
    __device__ __forceinline__ float operator[](int i) const { return at[i]; }
};

#define LANEWISE(OP) \
    template <int W> \
    __device__ __forceinline__ vf<W> operator OP(vf<W> a, const vf<W>& b) { \
        _Pragma("unroll") for (int i = 0; i < W; ++i) a[i] = a[i] OP b[i]; \
        return a; \
    } \
    template <int W> \
    __device__ __forceinline__ vf<W> operator OP(vf<W> a, float b) { \
        _Pragma("unroll") for (int i = 0; i < W; ++i) a[i] = a[i] OP b; \
        return a; \
    }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)

template <int W> __device__ __forceinline__ vf<W> all(float x) {
    vf<W> v;
    #pragma unroll
    for (int i = 0; i < W; ++i) v[i] = x;
    return v;
}

template <int W> __device__ __forceinline__ float sum_of(const vf<W>& v) {
    float sum = v[0];
    #pragma unroll
    for (int i = 1; i < W; ++i) sum += v[i];
    return sum;
}

template <int BYTES> struct Unit;               // what one access moves
template <> struct Unit<2> { typedef unsigned short type; };
template <> struct Unit<4> { typedef unsigned type; };
template <> struct Unit<8> { typedef uint2 type; };
template <> struct Unit<16> { typedef uint4 type; };

// W elements as they lie in memory
template <class real, int W> struct Raw {
    static constexpr int bytes = W*sizeof(real), step = bytes < 16 ? bytes : 16;
    typedef typename Unit<step>::type unit;
    union {
        unit units[bytes/step];
        real items[W];
        unsigned words[(bytes + 3)/4];
    };
};

template <int W>
__device__ __forceinline__ vf<W> widen(const Raw<float, W>& raw) {
    vf<W> v;
    #pragma unroll
    for (int i = 0; i < W; ++i) v[i] = raw.items[i];
    return v;
}
template <int W>
__device__ __forceinline__ vf<W> widen(const Raw<bf16, W>& raw) {
    vf<W> v;
    if constexpr (W == 1) v[0] = load(raw.items);
    #pragma unroll
    for (int i = 0; i < W/2; ++i) {
        v[2*i] = __uint_as_float(raw.words[i] << 16);
        v[2*i + 1] = __uint_as_float(raw.words[i] & 0xffff0000);
    }
    return v;
}

template <int W>
__device__ __forceinline__ void narrow(const vf<W>& v, Raw<float, W>& raw) {
    #pragma unroll
    for (int i = 0; i < W; ++i) raw.items[i] = v[i];
}
template <int W>
__device__ __forceinline__ void narrow(const vf<W>& v, Raw<bf16, W>& raw) {
    // The instruction rounds as to_bf16 does, but makes all NaNs one: they go the long way
    bool nan = false;
    #pragma unroll
    for (int i = 0; i < W; ++i) nan = nan || v[i] != v[i];
    if constexpr (W == 1) {
        store(raw.items, v[0]);
    } else if (nan) {
        #pragma unroll
        for (int i = 0; i < W/2; ++i) raw.words[i] = to_bf16(v[2*i]) | to_bf16(v[2*i + 1]) << 16;
    } else {
        #pragma unroll
        for (int i = 0; i < W/2; ++i) raw.words[i] = two_bf16(v[2*i], v[2*i + 1]);
    }
}

template <int W, class real>
__device__ __forceinline__ vf<W> load(const real* x) {
    Raw<real, W> raw;
    #pragma unroll
    for (int i = 0; i < raw.bytes/raw.step; ++i)
        raw.units[i] = ((const typename Raw<real, W>::unit*)x)[i];
    return widen(raw);
}

template <int W, class real>
__device__ __forceinline__ void put(real* y, const Raw<real, W>& raw) {
    #pragma unroll
    for (int i = 0; i < raw.bytes/raw.step; ++i)
        ((typename Raw<real, W>::unit*)y)[i] = raw.units[i];
}
template <int W, class real>
__device__ __forceinline__ void store(real* y, const vf<W>& v) {
    Raw<real, W> raw;
    narrow(v, raw);
    put(y, raw);
}

// The same where only `left` elements are there; the others are `fill`, and are not touched
template <int W, class real>
__device__ __forceinline__ vf<W> load(const real* x, idx left, float fill = 0.0f) {
    if (left >= W) return load<W>(x);
    vf<W> v = all<W>(fill);
    #pragma unroll
    for (int i = 0; i < W; ++i) if (i < left) v[i] = load(x + i);
    return v;
}
template <int W, class real>
__device__ __forceinline__ void store(real* y, const vf<W>& v, idx left) {
    if (left >= W) {
        store(y, v);
        return;
    }
    #pragma unroll
    for (int i = 0; i < W; ++i) if (i < left) store(y + i, v[i]);
}


// ---- Threads

// This thread's number in the whole grid, of blocks of `size`
__device__ __forceinline__ idx thread_of_all(int size) {
    return (idx)blockIdx.x*size + threadIdx.x;
}

// a = quotient b + rest, for a >= 0 and b > 0.  Division of 64 bits is a subroutine, several times
// as long as that of 32, which nearly always is enough.
__device__ __forceinline__ void divide(idx a, idx b, idx& quotient, idx& rest) {
    quotient = (a | b) >> 32 ? a/b : (unsigned)a/(unsigned)b;
    rest = a - quotient*b;
}

struct Sum { template <class X> static __device__ X of(X a, X b) { return a + b; } };
struct Most { template <class X> static __device__ X of(X a, X b) { return a > b ? a : b; } };
struct Least { template <class X> static __device__ X of(X a, X b) { return a < b ? a : b; } };

// x of T neighbouring threads joined, in a fixed order, for all of them.  Up to a warp by shuffles:
// a butterfly, where both partners add the same two numbers and so stay equal.  All threads of a
// block must call it, whether they have a row or not.
template <class Op, int T, class X>
__device__ __forceinline__ X joined(X x) {
    #pragma unroll
    for (int step = 1; step < (T < 32 ? T : 32); step *= 2)
        x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, step));
    if constexpr (T > 32) {
        __shared__ X part[32];                  // one for each warp
        int warp = threadIdx.x/32, first = threadIdx.x/T*(T/32);
        __syncthreads();                        // `part` of an earlier call has been read
        if (threadIdx.x%32 == 0) part[warp] = x;
        __syncthreads();
        x = part[first];
        for (int i = 1; i < T/32; ++i) x = Op::of(x, part[first + i]);
    }
    return x;
}


// ---- 2. Elementwise -----------------------------------------------------------------------------
// A thread, a vector: enough of them are in flight at a time to keep memory busy, 32 KB or more of
// loads on each processor, where latency times bandwidth is about 30 KB.

enum { ADD, SUB, MUL, DIV, SILU, GELU, EXP };

// Sizes of up to 8 axes, and strides of two arrays along them, in elements; `axes` of them count
struct Walk { idx shape[8], a[8], b[8]; };

// Where element i of a walk in row-major order lies in both arrays
template <class whole>
__device__ __forceinline__ void locate(const Walk& w, int axes, whole i, idx& a, idx& b) {
    a = b = 0;
    for (int k = axes - 1; k > 0; --k) {
        whole n = (whole)w.shape[k], next = i/n;
        a += (idx)(i - next*n)*w.a[k];
        b += (idx)(i - next*n)*w.b[k];
        i = next;
    }
    a += (idx)i*w.a[0];
    b += (idx)i*w.b[0];
}

// dst = src, n items; `whole` is a type that n fits in, of 32 bits if it can be, see divide()
template <class item, class whole>
__global__ void __launch_bounds__(256) copy_strided(const item* src, item* dst, idx n, idx axes,
                                                    Walk w) {
    idx i = thread_of_all(256), a, b;
    if (i >= n) return;
    locate(w, (int)axes, (whole)i, a, b);
    dst[b] = src[a];
}

// The same where the source is dense along the last axis but one, and the result along the last:
// tiles of 32 x 32 pass through shared memory, so that a warp reads neighbours, and writes them.
template <class item>
__global__ void __launch_bounds__(256) copy_turned(const item* src, item* dst, idx axes, Walk w) {
    __shared__ item tile[32][33];               // 33: the items of a column in different banks
    int p = (int)axes - 2, q = (int)axes - 1, x = threadIdx.x%32, y = threadIdx.x/32;
    idx across = (w.shape[q] + 31)/32, down = (w.shape[p] + 31)/32;
    idx batch = blockIdx.x/(across*down), t = blockIdx.x%(across*down), a = 0, b = 0;
    idx p0 = t/across*32, q0 = t%across*32;
    if (p > 0) locate(w, p, batch, a, b);
    for (int i = y; i < 32; i += 8)
        if (p0 + x < w.shape[p] && q0 + i < w.shape[q])
            tile[i][x] = src[a + (p0 + x)*w.a[p] + (q0 + i)*w.a[q]];
    __syncthreads();                            // what is written next was read by other threads
    for (int i = y; i < 32; i += 8)
        if (p0 + i < w.shape[p] && q0 + x < w.shape[q])
            dst[b + (p0 + i)*w.b[p] + (q0 + x)*w.b[q]] = tile[x][i];
}

__device__ __forceinline__ float apply(idx kind, float a, float b) {
    return kind == ADD ? a + b : kind == SUB ? a - b : kind == MUL ? a*b : __fdiv_rn(a, b);
}

// c = a (kind) b, n vectors, c dense; a_along and b_along say whether an operand advances within a
// vector (1) or is the same element throughout (0)
template <int W, class whole>
__global__ void __launch_bounds__(256) binary(idx kind, const float* a, const float* b, float* c,
                                              idx n, idx axes, idx a_along, idx b_along, Walk w) {
    idx i = thread_of_all(256), at, bt;
    if (i >= n) return;
    locate(w, (int)axes, (whole)i, at, bt);
    vf<W> u = a_along ? load<W>(a + at) : all<W>(a[at]);
    vf<W> v = b_along ? load<W>(b + bt) : all<W>(b[bt]);
    #pragma unroll
    for (int j = 0; j < W; ++j) u[j] = apply(kind, u[j], v[j]);
    store(c + i*W, u);
}

// y += alpha x; y may be x
template <class real, int W>
__global__ void __launch_bounds__(256) axpy(double alpha, const real* x, real* y, idx n) {
    idx i = thread_of_all(256)*W;
    if (i < n)
        store(y + i, load<W>(y + i, n - i) + load<W>(x + i, n - i)*(float)alpha, n - i);
}

// y = alpha x; y may be x
template <class real, int W>
__global__ void __launch_bounds__(256) scale(double alpha, const real* x, real* y, idx n) {
    idx i = thread_of_all(256)*W;
    if (i < n) store(y + i, load<W>(x + i, n - i)*(float)alpha, n - i);
}

template <class real, int W>
__global__ void __launch_bounds__(256) fill(real* x, double value, idx n) {
    idx i = thread_of_all(256)*W;
    if (i < n) store(x + i, all<W>((float)value), n - i);
}

// y = x, converted
template <class from, class real, int W>
__global__ void __launch_bounds__(256) cast(const from* x, real* y, idx n) {
    idx i = thread_of_all(256)*W;
    if (i < n) store(y + i, load<W>(x + i, n - i), n - i);
}


// ---- Activations
// The CPU core's formulas, s being the sigmoid:
//   silu(x) = x s(x)                            silu' = s(x) (1 + x (1 - s(x)))
//   gelu(x) = x s(x (P + Q x^2))                gelu' = s (1 + x (1 - s) (P + 3 Q x^2))
// with P = 2 sqrt(2/pi) and Q = 0.044715 P

// 1/x for x of 1 and more: the instruction errs by 1 ulp, a step of Newton's halves that
__device__ __forceinline__ float reciprocal(float x) {
    float r = __fdividef(1.0f, x);
    return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// 1/(1 + e^-x) by e^-|x|, which cannot overflow: s(-x) = e^-x s(x)
__device__ __forceinline__ float sigmoid(float x) {
    float e = expf(-fabsf(x)), s = reciprocal(1.0f + e);
    return x < 0.0f ? e*s : s;
}

// e^x; 0 below the smallest normal number, as on the CPU
__device__ __forceinline__ float fexp(float x) { return x < -87.336f ? 0.0f : expf(x); }

#define GELU_P 1.5957691216057308f
#define GELU_Q 0.0713548162726009f

__device__ __forceinline__ float silu_slope(float x, float s) {
    return s*fmaf(x, 1.0f - s, 1.0f);
}

// Beyond +-1,000, where it has long been 0 or 1, x stays there: 0 times an infinite square is NaN.
// Comparisons and not fminf, which would drop a NaN.
__device__ __forceinline__ float gelu_slope(float x) {
    x = x > 1000.0f ? 1000.0f : x < -1000.0f ? -1000.0f : x;
    float square = GELU_Q*x*x, s = sigmoid(x*(square + GELU_P));
    return s*fmaf(x*(1.0f - s), fmaf(3.0f, square, GELU_P), 1.0f);
}

__device__ __forceinline__ float activation(idx kind, float x) {
    if (kind == EXP) return fexp(x);
    return x*sigmoid(kind == SILU ? x : x*fmaf(GELU_Q*x, x, GELU_P));
}
__device__ __forceinline__ float slope(idx kind, float x) {
    return kind == SILU ? silu_slope(x, sigmoid(x)) : kind == GELU ? gelu_slope(x) : fexp(x);
}

// y = f(x); y may be x
template <int W>
__global__ void __launch_bounds__(256) unary(idx kind, const float* x, float* y, idx n) {
    idx i = thread_of_all(256)*W;
    if (i >= n) return;
    vf<W> v = load<W>(x + i, n - i);
    #pragma unroll
    for (int j = 0; j < W; ++j) v[j] = activation(kind, v[j]);
    store(y + i, v, n - i);
}

// dx = dy f'(x); dx may be dy
template <int W>
__global__ void __launch_bounds__(256) unary_backward(idx kind, const float* x, const float* dy,
                                                      float* dx, idx n) {
    idx i = thread_of_all(256)*W;
    if (i >= n) return;
    vf<W> v = load<W>(x + i, n - i), d = load<W>(dy + i, n - i);
    #pragma unroll
    for (int j = 0; j < W; ++j) v[j] = d[j]*slope(kind, v[j]);
    store(dx + i, v, n - i);
}


// ---- 3. Philox ----------------------------------------------------------------------------------
// Philox4x32-10 (Salmon et al., SC11), to the bit the CPU core's: counter (sequence in the whole
// run, 64 bit; site; element/4), the word is element % 4, element = position*dim + channel.

__device__ __forceinline__ uint4 philox_block(idx key, idx sequence, idx site, idx quad) {
    unsigned k0 = (unsigned)key, k1 = (unsigned)((unsigned long long)key >> 32);
    uint4 c = make_uint4((unsigned)sequence, (unsigned)((unsigned long long)sequence >> 32),
                         (unsigned)site, (unsigned)quad);
    #pragma unroll
    for (int r = 0; r < 10; ++r) {
        c = make_uint4(__umulhi(0xCD9E8D57u, c.z) ^ c.y ^ k0, 0xCD9E8D57u*c.z,
                       __umulhi(0xD2511F53u, c.x) ^ c.w ^ k1, 0xD2511F53u*c.x);
        k0 += 0x9E3779B9u;                      // golden ratio - 1 and sqrt(3) - 1, times 2^32
        k1 += 0xBB67AE85u;
    }
    return c;
}

// Which words a mask reads.  The number of the batch's first sequence changes from step to step,
// and a recorded step finds it in memory.
struct Mask {
    idx key, site, threshold, first;
    const idx* first_at;                        // or 0
};

// Words of the elements from `element` on, W of them; a multiple of 4 if W is
template <int W>
__device__ __forceinline__ void draw(const Mask& m, idx sequence, idx element,
                                     unsigned (&word)[W]) {
    sequence += m.first_at ? *m.first_at : m.first;
    #pragma unroll
    for (int i = 0; i < W; i += 4) {
        uint4 c = philox_block(m.key, sequence, m.site, (element + i)/4);
        if constexpr (W == 1) {
            word[0] = element%4 == 0 ? c.x : element%4 == 1 ? c.y : element%4 == 2 ? c.z : c.w;
        } else {
            word[i] = c.x, word[i + 1] = c.y, word[i + 2] = c.z, word[i + 3] = c.w;
        }
    }
}

// n blocks of 4 words for quad, quad + 1, ...
template <int W>
__global__ void __launch_bounds__(256) philox(idx key, idx sequence, idx site, idx quad, idx n,
                                              unsigned* out) {
    static_assert(W == 4, "words of a block");
    idx i = thread_of_all(256);
    if (i >= n) return;
    uint4 c = philox_block(key, sequence, site, quad + i);
    out[W*i] = c.x, out[W*i + 1] = c.y, out[W*i + 2] = c.z, out[W*i + 3] = c.w;
}

// out (bytes) = 1 where dropout keeps the element; `each` elements a sequence, n in all
template <int W>
__global__ void __launch_bounds__(256) philox_mask(unsigned char* out, idx each, idx n, Mask m) {
    idx i = thread_of_all(256)*W, sequence, element;
    if (i >= n) return;
    unsigned word[W];
    divide(i, each, sequence, element);
    draw(m, sequence, element, word);
    #pragma unroll
    for (int j = 0; j < W; ++j) out[i + j] = word[j] >= (unsigned)m.threshold;
}

// y = residual + x mask factor, residual may be 0 (then nothing is added), or y, and y may be x
template <class from, class real, int W>
__global__ void __launch_bounds__(256) dropout(const from* x, const real* residual, real* y,
                                               idx each, idx n, Mask m, double factor) {
    idx i = thread_of_all(256)*W, sequence, element;
    if (i >= n) return;
    vf<W> v = load<W>(x + i), more = residual ? load<W>(residual + i) : all<W>(0.0f);
    unsigned word[W];
    divide(i, each, sequence, element);
    draw(m, sequence, element, word);
    #pragma unroll
    for (int j = 0; j < W; ++j) {               // each operation rounded by itself
        v[j] = word[j] >= (unsigned)m.threshold ? __fmul_rn(v[j], (float)factor) : 0.0f;
        if (residual) v[j] = __fadd_rn(more[j], v[j]);
    }
    store(y + i, v);
}


// ---- 4. Rows ------------------------------------------------------------------------------------
// T threads share a row: a warp where there are many short ones, else a block.  Every sum is that
// of a thread over its elements, T*W apart, and then joined(): the order depends on the shape only.

// y[r, piece] = sum of a piece of x[r, :]
template <int T, int W>
__global__ void __launch_bounds__(256) sum_rows(const float* x, float* y, idx tasks, idx cols,
                                                idx pieces, idx size) {
    idx task = (idx)blockIdx.x*(256/T) + threadIdx.x/T, row, piece;
    divide(task, pieces, row, piece);
    idx start = piece*size, end = task < tasks ? min(cols, start + size) : start;
    vf<W> sum = all<W>(0.0f);
    #pragma unroll 4
    for (idx i = start + threadIdx.x%T*W; i < end; i += T*W) sum = sum + load<W>(x + row*cols + i);
    float total = joined<Sum, T>(sum_of(sum));
    if (task < tasks && threadIdx.x%T == 0) y[task] = total;
}

// e^d for d <= 0
__device__ __forceinline__ float weight(float d) { return power_of_two(d*LOG2_E); }

// A sum of e^(x - top) of the elements so far, top the largest of them (Milakov and Gimelshein,
// 2018).  NaNs are no maximum, but their weight is one.
struct Online { float top, sum; };

template <int U, int W>
__device__ __forceinline__ void add(Online& o, const vf<W> (&v)[U]) {
    float top = o.top;
    #pragma unroll
    for (int u = 0; u < U; ++u)
        #pragma unroll
        for (int j = 0; j < W; ++j) top = fmaxf(top, v[u][j]);
    vf<W> sum = all<W>(0.0f);
    #pragma unroll
    for (int u = 0; u < U; ++u)
        #pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += weight(v[u][j] - top);
    o.sum = fmaf(o.sum, weight(o.top - top), sum_of(sum));
    o.top = top;
}

// The row's maximum to o.top; returns the sum, in double as thousands are added up
template <int T>
__device__ __forceinline__ double join(Online& o) {
    float top = joined<Most, T>(o.top);
    double total = joined<Sum, T>((double)(o.sum*weight(o.top - top)));
    o.top = top;
    return total;
}

// y = softmax of every row of x; y may be x
template <int T, int W>
__global__ void __launch_bounds__(256) softmax(const float* x, float* y, idx rows, idx cols) {
    idx row = (idx)blockIdx.x*(256/T) + threadIdx.x/T, end = row < rows ? cols : 0;
    Online o = {LOWEST, 0.0f};
    for (idx i = threadIdx.x%T*W; i < end; i += T*W) {
        vf<W> v[1] = {load<W>(x + row*cols + i)};
        add(o, v);
    }
    float factor = (float)(1.0/join<T>(o));
    for (idx i = threadIdx.x%T*W; i < end; i += T*W) {
        vf<W> v = load<W>(x + row*cols + i);
        #pragma unroll
        for (int j = 0; j < W; ++j) v[j] = weight(v[j] - o.top)*factor;
        store(y + row*cols + i, v);
    }
}

// dx_i = y_i (dy_i - sum_j y_j dy_j); dx may be dy: it is first written when the sum is known
template <int T, int W>
__global__ void __launch_bounds__(256) softmax_backward(const float* y, const float* dy, float* dx,
                                                        idx rows, idx cols) {
    idx row = (idx)blockIdx.x*(256/T) + threadIdx.x/T, end = row < rows ? cols : 0;
    vf<W> sum = all<W>(0.0f);
    #pragma unroll 4
    for (idx i = threadIdx.x%T*W; i < end; i += T*W)
        sum = sum + load<W>(y + row*cols + i)*load<W>(dy + row*cols + i);
    float dot = joined<Sum, T>(sum_of(sum));
    for (idx i = threadIdx.x%T*W; i < end; i += T*W)
        store(dx + row*cols + i,
              load<W>(y + row*cols + i)*(load<W>(dy + row*cols + i) - dot));
}

// Cross-entropy:  loss = ln(sum_j e^x_j) - x_target;  dx_j = (softmax_j - [j = target]) scale
// A block takes a row, in steps of 4 vectors a thread, twice: for the sum, and for the gradient.
// What shared memory holds of the row (`kept` elements from its start, a multiple of T*W) is read
// from memory only once; the rest is often still in L2.

template <int W, int T> struct Row {            // a logit row, and its share in shared memory
    static constexpr int step = 4*T*W;
    float* x;
    float* room;
    idx cols, kept;

    __device__ __forceinline__ idx place(idx start, int u) const {
        return start + (u*T + (int)threadIdx.x)*W;
    }
};

// The gradient of a row to dx, which is x, or, in bf16, starts where x does.
// In bf16 a step of elements from `start` to `end` is written over the logits from start/2 to
// end/2.  These have been read before, by some thread: the barrier between reading a step and
// writing it makes sure that it was by all.  What lies in shared memory need not be waited for.
template <class real, int W, int T>
__device__ __forceinline__ void write_gradient(const Row<W, T>& row, real* dx, idx target,
                                               float top, float total, float factor, idx padded) {
    for (idx start = 0; start < row.cols; start += row.step) {
        vf<W> v[4];
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            idx i = row.place(start, u);
            v[u] = start + u*T*W < row.kept ? load<W>(row.room + i)
                                            : load<W>(row.x + i, row.cols - i);
        }
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            idx i = row.place(start, u);
            #pragma unroll
            for (int j = 0; j < W; ++j) v[u][j] = weight(v[u][j] - top);
            if (target - i >= 0 && target - i < W) {
                #pragma unroll
                for (int j = 0; j < W; ++j) if (i + j == target) v[u][j] -= total;
            }
            v[u] = v[u]*factor;                 // factor (e - total) is scale (p - 1)
        }
        if (sizeof(real) < sizeof(float) && start + row.step > 2*row.kept) __syncthreads();
        #pragma unroll
        for (int u = 0; u < 4; ++u)
            store(dx + row.place(start, u), v[u], row.cols - row.place(start, u));
    }
    __syncthreads();                            // the last step has been read, too
    for (idx i = row.cols + threadIdx.x; i < padded; i += T) store(dx + i, 0.0f);
}

template <class real, int W, int T>
__global__ void __launch_bounds__(T) cross_entropy(
        float* logits, idx ld, const idx* targets, double* losses, idx cols, double factor,
        const double* denominator_at, idx write, idx padded, idx kept) {
    extern __shared__ uint4 shared[];
    Row<W, T> row = {logits + blockIdx.x*ld, (float*)shared, cols, kept};
    idx target = targets[blockIdx.x];
    if (target < 0) {                           // not counted
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (write)
            for (idx i = (int)threadIdx.x*W; i < padded; i += T*W)
                store((real*)row.x + i, all<W>(0.0f), padded - i);
        return;
    }
    float at_target = row.x[target];            // before it is overwritten
    Online o = {LOWEST, 0.0f};
    for (idx start = 0; start < cols; start += row.step) {
        vf<W> v[4];
        #pragma unroll
        for (int u = 0; u < 4; ++u)
            v[u] = load<W>(row.x + row.place(start, u), cols - row.place(start, u),
                           -__int_as_float(0x7f800000));
        add(o, v);
        #pragma unroll
        for (int u = 0; u < 4; ++u)             // each thread will find what it has put there
            if (start + u*T*W < kept) store(row.room + row.place(start, u), v[u]);
    }
    double total = join<T>(o);
    if (threadIdx.x == 0) losses[blockIdx.x] = (double)o.top - at_target + log(total);
    if (!write) return;
    float by = (float)(denominator_at ? factor / *denominator_at : factor);
    write_gradient(row, (real*)row.x, target, o.top, (float)total, (float)(by/total), padded);
}

// out = the sum of n doubles over the denominator, or over that at an address
template <int T>
__global__ void __launch_bounds__(T) mean_loss(const double* losses, idx n, double denominator,
                                               const double* denominator_at, float* out) {
    double sum = 0;
    #pragma unroll 4
    for (idx i = threadIdx.x; i < n; i += T) sum += losses[i];
    sum = joined<Sum, T>(sum);
    if (threadIdx.x == 0) *out = (float)(sum/(denominator_at ? *denominator_at : denominator));
}

// out = how many of n ids are 0 or more; at least 1
template <int T>
__global__ void __launch_bounds__(T) count(const idx* ids, idx n, double* out) {
    idx sum = 0;
    #pragma unroll 4
    for (idx i = threadIdx.x; i < n; i += T) sum += ids[i] >= 0;
    sum = joined<Sum, T>(sum);
    if (threadIdx.x == 0) *out = (double)max(sum, (idx)1);
}

// out[2] = least and largest of n >= 1 ids
template <int T>
__global__ void __launch_bounds__(T) id_range(const idx* ids, idx n, idx* out) {
    idx low = ids[0], high = ids[0];
    #pragma unroll 4
    for (idx i = threadIdx.x; i < n; i += T) low = min(low, ids[i]), high = max(high, ids[i]);
    low = joined<Least, T>(low);
    high = joined<Most, T>(high);
    if (threadIdx.x == 0) out[0] = low, out[1] = high;
}


// ---- 5. Norms -----------------------------------------------------------------------------------
// RMS norm:  y = x r w with r = 1/sqrt(mean(x^2) + eps);  with t = dy w:
//   dx = r t - x r^3 mean(t x),  dw = sum over rows of dy x r
// T threads share a row, V vectors each: all of it lies in registers and is read once.  All loads
// of a row are issued before the first store, which might overwrite what they read.

// Where this thread's k-th vector of a row starts
template <int W, int T>
__device__ __forceinline__ int column(int k) { return (k*T + threadIdx.x%T)*W; }

// total = x + residual, y = norm of total; residual (and then total) may be 0
template <class real, int W, int T, int V>
__global__ void __launch_bounds__(T < 256 ? 256 : T) add_rmsnorm(
        const real* x, const real* residual, const float* w, real* total, real* y, float* rstd,
        idx rows, idx dim, double eps) {
    constexpr int block = T < 256 ? 256 : T;
    idx row = (idx)blockIdx.x*(block/T) + threadIdx.x/T, start = row*dim;
    int end = row < rows ? (int)dim : 0;
    vf<W> v[V], more[V], squares = all<W>(0.0f);
    #pragma unroll
    for (int k = 0; k < V; ++k) {
        int i = column<W, T>(k);
        v[k] = i < end ? load<W>(x + start + i) : all<W>(0.0f);
        more[k] = residual && i < end ? load<W>(residual + start + i) : all<W>(0.0f);
    }
    #pragma unroll
    for (int k = 0; k < V; ++k) {
        int i = column<W, T>(k);
        if (residual) {                         // the norm is that of the total as it is stored
            Raw<real, W> raw;
            narrow(v[k] + more[k], raw);
            if (total && i < end) put(total + start + i, raw);
            v[k] = widen(raw);
        }
        squares = squares + v[k]*v[k];
    }
    float r = 1.0f/sqrtf(joined<Sum, T>(sum_of(squares))/(float)dim + (float)eps);
    #pragma unroll
    for (int k = 0; k < V; ++k) {
        int i = column<W, T>(k);
        if (i < end) store(y + start + i, v[k]*r*load<W>(w + i));
    }
    if (end && threadIdx.x%T == 0) rstd[row] = r;
}

// The block's sums by column: those of its groups added in order, in shared memory, by one group
// after the other
template <int W, int T, int V, int groups>
__device__ __forceinline__ void write_sums(const vf<W> (&sums)[V], float* out, idx dim) {
    __shared__ float room[groups > 1 ? T*V*W : 1];
    for (int g = 0; g < groups; ++g) {
        #pragma unroll
        for (int k = 0; k < V && g == threadIdx.x/T; ++k)
            #pragma unroll
            for (int j = 0; j < W; ++j) {
                int i = column<W, T>(k) + j;
                float sum = g > 0 ? room[i] + sums[k][j] : sums[k][j];
                if (g < groups - 1) room[i] = sum;
                else if (i < dim) out[i] = sum;
            }
        __syncthreads();                        // the next group reads what this one has written
    }
}

// dx (+)= the formula above + more, for the rows of a chunk, `step` of them, which is a block's:
// its groups of T threads take them in turn.  part [chunk, dim], if not 0: the chunk's sum of dw.
// dx may be dy or more.
template <class real, int W, int T, int V>
__global__ void __launch_bounds__(T < 256 ? 256 : T) add_rmsnorm_backward(
        const real* dy, const real* more, const real* total, const float* w, const float* rstd,
        real* dx, idx acc, float* part, idx rows, idx dim, idx step) {
    constexpr int groups = (T < 256 ? 256 : T)/T;
    int group = threadIdx.x/T;
    idx first = blockIdx.x*step, last = min(rows, first + step);
    vf<W> sums[V];
    #pragma unroll
    for (int k = 0; k < V; ++k) sums[k] = all<W>(0.0f);
    for (idx next = first; next < last; next += groups) {   // all groups go on to the last round
        idx row = next + group, start = row*dim;
        int end = row < last ? (int)dim : 0;
        float r = row < last ? rstd[row] : 0.0f;
        vf<W> d[V], x[V], old[V], dot = all<W>(0.0f);
        #pragma unroll
        for (int k = 0; k < V; ++k) {
            int i = column<W, T>(k);
            d[k] = i < end ? load<W>(dy + start + i) : all<W>(0.0f);
            x[k] = i < end ? load<W>(total + start + i) : all<W>(0.0f);
            old[k] = more && i < end ? load<W>(more + start + i) : all<W>(0.0f);
            if (acc && i < end) old[k] = old[k] + load<W>(dx + start + i);
        }
        #pragma unroll
        for (int k = 0; k < V; ++k) {
            int i = column<W, T>(k);
            sums[k] = sums[k] + d[k]*(x[k]*r);
            if (i < end) d[k] = d[k]*load<W>(w + i);
            dot = dot + d[k]*x[k];
        }
        float c = joined<Sum, T>(sum_of(dot))*r/(float)dim*r*r;
        #pragma unroll
        for (int k = 0; k < V; ++k) {
            int i = column<W, T>(k);
            if (i < end) store(dx + start + i, d[k]*r - x[k]*c + old[k]);
        }
    }
    if (part) write_sums<W, T, V, groups>(sums, part + blockIdx.x*dim, dim);
}

// dw += the sum over chunks of part [chunks, n]: LANES threads a column, chunks dealt to them in
// turn, their sums added in order
template <int LANES>
__global__ void __launch_bounds__(32*LANES) add_chunks(const float* part, idx chunks, idx n,
                                                       float* dw) {
    __shared__ float sums[LANES][32];
    int x = threadIdx.x%32, lane = threadIdx.x/32;
    idx i = (idx)blockIdx.x*32 + x;
    float sum = 0.0f;
    #pragma unroll 8
    for (idx c = lane; c < chunks; c += LANES) if (i < n) sum += part[c*n + i];
    sums[lane][x] = sum;
    __syncthreads();
    if (lane > 0 || i >= n) return;
    for (int l = 1; l < LANES; ++l) sum += sums[l][x];
    dw[i] += sum;
}


// ---- 6. RoPE ------------------------------------------------------------------------------------
// RoPE (Su et al., 2021) turns the pair (x_i, x_{i + half}) by the angle of (position, i); its
// backward turns it back:
//   y_i = x_i cos - x_{i + half} sin,  y_{i + half} = x_{i + half} cos + x_i sin
// A row holds heads + kv_heads heads that are normed and turned, then kv_heads values that are not.
// L lanes share a head: vectors at i and at i + half, V of each, which are partners.

// One product of each pair rounded by itself, so that no compiler chooses which one is fused
template <int W>
__device__ __forceinline__ void rotate(vf<W>& a, vf<W>& b, const vf<W>& cos, const vf<W>& sin) {
    #pragma unroll
    for (int j = 0; j < W; ++j) {
        float x = a[j], y = b[j];
        a[j] = fmaf(x, cos[j], -__fmul_rn(y, sin[j]));
        b[j] = fmaf(y, cos[j], __fmul_rn(x, sin[j]));
    }
}

template <class real, int W, int L, int V>
__global__ void __launch_bounds__(256) qk_norm_rope(
        const real* qkv, real* out, const float* qw, const float* kw, const float* cos,
        const float* sin, float* rstd, idx rows, idx seq, idx heads, idx kv_heads, idx dim,
        double eps) {
    idx item = (idx)blockIdx.x*(256/L) + threadIdx.x/L, row, head, turn, position;
    divide(item, heads + 2*kv_heads, row, head);
    divide(row, seq, turn, position);
    int half = (int)dim/2, end = row < rows ? half : 0;
    bool turned = head < heads + kv_heads;
    const float* w = head < heads ? qw : kw;
    const real* x = qkv + item*dim;
    vf<W> a[V], b[V], squares = all<W>(0.0f);
    #pragma unroll
    for (int k = 0; k < V; ++k) {
        int i = column<W, L>(k);
        a[k] = i < end ? load<W>(x + i) : all<W>(0.0f);
        b[k] = i < end ? load<W>(x + half + i) : all<W>(0.0f);
        squares = squares + a[k]*a[k] + b[k]*b[k];
    }
    float r = 1.0f/sqrtf(joined<Sum, L>(sum_of(squares))/(float)dim + (float)eps);
    #pragma unroll
    for (int k = 0; k < V; ++k) {
        int i = column<W, L>(k);
        if (i >= end) continue;
        if (turned && w) a[k] = a[k]*r*load<W>(w + i), b[k] = b[k]*r*load<W>(w + half + i);
        if (turned) rotate(a[k], b[k], load<W>(cos + position*half + i),
                           load<W>(sin + position*half + i));
        if (!turned && out == qkv) continue;
        store(out + item*dim + i, a[k]);
        store(out + item*dim + half + i, b[k]);
    }
    if (rstd && w && turned && end && threadIdx.x%L == 0)
        rstd[row*(heads + kv_heads) + head] = r;
}

// The block's sums by channel: joined over the heads that share a warp, then warp after warp
template <int W, int L, int V>
__device__ __forceinline__ void write_head_sums(vf<W> (&sums)[2*V], float* out, int half) {
    __shared__ float room[8][256];              // of each warp
    int warp = threadIdx.x/32, lane = threadIdx.x%32;
    __syncthreads();                            // room of an earlier call has been read
    #pragma unroll
    for (int k = 0; k < 2*V; ++k)
        #pragma unroll
        for (int j = 0; j < W; ++j) {
            float sum = sums[k][j];
            #pragma unroll
            for (int step = L; step < 32; step *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            int i = column<W, L>(k/2) + j;
            if (lane < L && i < half) room[warp][k%2*half + i] = sum;
        }
    __syncthreads();
    if (threadIdx.x >= 2*half) return;
    float sum = room[0][threadIdx.x];
    for (int g = 1; g < 8; ++g) sum += room[g][threadIdx.x];
    out[threadIdx.x] = sum;
}

// What the backward of one kind of head, q or k, needs: `heads` of them from number `first` on
struct Kind { const float* w; idx first, heads; };

// The backward of a chunk's heads of one kind; part [dim], unless 0: their sum of dw
template <class real, int W, int L, int V>
__device__ __forceinline__ void turn_back(
        const Kind& kind, real* d, const real* qkv, const float* cos, const float* sin,
        const float* rstd, idx first, idx last, idx seq, idx turned, idx all_heads, idx dim,
        float* part) {
    int half = (int)dim/2;
    vf<W> sums[2*V];
    #pragma unroll
    for (int k = 0; k < 2*V; ++k) sums[k] = all<W>(0.0f);
    for (idx next = 0; next < (last - first)*kind.heads; next += 256/L) {
        idx row, head, turn, position;
        divide(next + threadIdx.x/L, kind.heads, row, head);
        row += first, head += kind.first;
        divide(row, seq, turn, position);
        idx start = (row*all_heads + head)*dim;
        int end = row < last ? half : 0;
        float r = kind.w && end ? rstd[row*turned + head] : 0.0f;
        vf<W> a[V], b[V], x[V], y[V], dot = all<W>(0.0f);
        #pragma unroll
        for (int k = 0; k < V; ++k) {
            int i = column<W, L>(k);
            bool there = i < end;
            a[k] = there ? load<W>((const real*)d + start + i) : all<W>(0.0f);
            b[k] = there ? load<W>((const real*)d + start + half + i) : all<W>(0.0f);
            x[k] = there && kind.w ? load<W>(qkv + start + i) : all<W>(0.0f);
            y[k] = there && kind.w ? load<W>(qkv + start + half + i) : all<W>(0.0f);
            if (there) rotate(a[k], b[k], load<W>(cos + position*half + i),
                              load<W>(sin + position*half + i)*-1.0f);
        }
        if (kind.w) {
            #pragma unroll
            for (int k = 0; k < V; ++k) {
                int i = column<W, L>(k);
                sums[2*k] = sums[2*k] + a[k]*(x[k]*r);
                sums[2*k + 1] = sums[2*k + 1] + b[k]*(y[k]*r);
                if (i >= half) continue;
                a[k] = a[k]*load<W>(kind.w + i);
                b[k] = b[k]*load<W>(kind.w + half + i);
                dot = dot + a[k]*x[k] + b[k]*y[k];
            }
            float c = joined<Sum, L>(sum_of(dot))*r/(float)dim*r*r;
            #pragma unroll
            for (int k = 0; k < V; ++k) a[k] = a[k]*r - x[k]*c, b[k] = b[k]*r - y[k]*c;
        }
        #pragma unroll
        for (int k = 0; k < V; ++k) {
            int i = column<W, L>(k);
            if (i < end) store(d + start + i, a[k]), store(d + start + half + i, b[k]);
        }
    }
    if (part) write_head_sums<W, L, V>(sums, part, half);
}

// d(out) becomes d(qkv) in place, for the rows of a chunk; part [2, chunks, dim], or 0: the chunk's
// sums of dw, q's and k's
template <class real, int W, int L, int V>
__global__ void __launch_bounds__(256) qk_norm_rope_backward(
        real* d, const real* qkv, const float* qw, const float* kw, const float* cos,
        const float* sin, const float* rstd, idx rows, idx seq, idx heads, idx kv_heads, idx dim,
        float* part, idx chunks, idx step) {
    idx first = blockIdx.x*step, last = min(rows, first + step);
    for (int k = 0; k < 2; ++k) {
        Kind kind = {k ? kw : qw, k ? heads : 0, k ? kv_heads : heads};
        turn_back<real, W, L, V>(kind, d, qkv, cos, sin, rstd, first, last, seq, heads + kv_heads,
                                 heads + 2*kv_heads, dim,
                                 part ? part + (k*chunks + blockIdx.x)*dim : 0);
    }
}


// ---- 7. SwiGLU ----------------------------------------------------------------------------------
// h = silu(gate)*up;  dgate = dh up silu'(gate),  dup = dh silu(gate)   (Shazeer, 2020)
// gate and up are the halves of a row; W divides ffn.

// h from gu = gate | up
template <class real, int W>
__global__ void __launch_bounds__(256) swiglu(const real* gu, real* h, idx n, idx ffn) {
    idx i = thread_of_all(256)*W, row, column;
    if (i >= n) return;
    divide(i, ffn, row, column);
    vf<W> gate = load<W>(gu + i + row*ffn), up = load<W>(gu + i + row*ffn + ffn);
    #pragma unroll
    for (int j = 0; j < W; ++j) gate[j] = gate[j]*sigmoid(gate[j])*up[j];
    store(h + i, gate);
}

// gu becomes its gradient, dh becomes h
template <class real, int W>
__global__ void __launch_bounds__(256) swiglu_backward(real* gu, real* dh, idx n, idx ffn) {
    idx i = thread_of_all(256)*W, row, column;
    if (i >= n) return;
    divide(i, ffn, row, column);
    real* at = gu + i + row*ffn;
    vf<W> gate = load<W>((const real*)at), up = load<W>((const real*)at + ffn);
    vf<W> d = load<W>((const real*)dh + i);
    #pragma unroll
    for (int j = 0; j < W; ++j) {
        float g = gate[j], u = up[j], s = sigmoid(g), silu = g*s;
        gate[j] = d[j]*u*silu_slope(g, s);
        up[j] = d[j]*silu;
        d[j] = silu*u;
    }
    store(at, gate);
    store(at + ffn, up);
    store(dh + i, d);
}


// ---- 8. Embedding -------------------------------------------------------------------------------
// y_i = w[token_i];  dw[token] += dy_i of all its positions, in the order of a stable sort, which
// brings a token's positions together: a run.

template <class real, int W>
__global__ void __launch_bounds__(256) embed(const idx* tokens, const float* w, real* y, idx n,
                                             idx dim) {
    idx i = thread_of_all(256)*W, place, column;
    if (i >= n*dim) return;
    divide(i, dim, place, column);
    store(y + i, load<W>(w + tokens[place]*dim + column));
}

// A frequent token's run is thousands of rows long, too long for one thread after another.  So a
// run is cut where a place of the order is a multiple of 32, and a warp takes a segment and 32 W
// columns of it.  A run in one piece is added to dw at once.  Of others each group of 32 places has
// at most two segments: one that comes from the group before (sum 2g), and one that goes on
// (sum 2g + 1); join_runs adds them up.  So every sum has one order, which only the tokens decide.

struct Order {
    const idx* tokens;
    const idx* order;
    idx n;

    __device__ __forceinline__ idx token(idx place) const { return tokens[order[place]]; }
    // How many of the 32 places place, place + step, ... hold the token, from the first on
    __device__ __forceinline__ int same(idx token, idx place, idx step) const {
        idx mine = place + (int)threadIdx.x%32*step;
        bool equal = mine < n && this->token(mine < n ? mine : place) == token;
        unsigned other = ~__ballot_sync(0xffffffffu, equal);
        return other ? __ffs(other) - 1 : 32;
    }
};

template <class real, int W>
__global__ void __launch_bounds__(256) embed_backward(Order o, const real* dy, float* dw,
                                                      float* part, idx dim, idx slices) {
    idx place, slice, lane = threadIdx.x%32;
    divide(thread_of_all(256)/32, slices, place, slice);
    if (place >= o.n) return;
    idx token = o.token(place), group = place/32, i = (slice*32 + lane)*W;
    bool starts = place == 0 || o.token(place - 1) != token;
    if (!starts && place%32) return;            // the whole warp leaves
    int count = min(o.same(token, place, 1), 32 - (int)(place%32));
    bool goes_on = (place + count)%32 == 0 && place + count < o.n
                   && o.token(place + count) == token;
    bool whole = starts && !goes_on;
    idx mine = o.order[min(place + lane, o.n - 1)];
    float* out = whole ? dw + token*dim : part + (2*group + starts)*dim;
    vf<W> sum = whole && i < dim ? load<W>((const float*)out + i) : all<W>(0.0f);
    for (int start = 0; start < count; start += 8) {
        vf<W> v[8];                             // loads in flight, ahead of ordered additions
        #pragma unroll
        for (int k = 0; k < 8; ++k) {
            idx row = __shfl_sync(0xffffffffu, mine, (start + k)%32);
            v[k] = start + k < count && i < dim ? load<W>(dy + row*dim + i) : all<W>(0.0f);
        }
        #pragma unroll
        for (int k = 0; k < 8; ++k) if (start + k < count) sum = sum + v[k];
    }
    if (i < dim) store(out + i, sum);
}

// dw += the sums of the runs that go on past their group; a warp for the group where one starts
template <int W>
__global__ void __launch_bounds__(256) join_runs(Order o, const float* part, float* dw, idx dim,
                                                 idx slices) {
    idx group, slice, lane = threadIdx.x%32;
    divide(thread_of_all(256)/32, slices, group, slice);
    idx next = (group + 1)*32, i = (slice*32 + lane)*W;
    if (next >= o.n) return;
    idx token = o.token(next);
    if (o.token(next - 1) != token || (group > 0 && o.token(next - 33) == token)) return;
    vf<W> sum = all<W>(0.0f);
    if (i < dim) sum = load<W>((const float*)dw + token*dim + i)
                       + load<W>(part + (2*group + 1)*dim + i);
    int count = 32;
    for (idx g = group + 1; count == 32; g += 32) {
        count = g*32 < o.n ? o.same(token, g*32, 32) : 0;
        #pragma unroll 8
        for (int k = 0; k < count; ++k)
            if (i < dim) sum = sum + load<W>(part + 2*(g + k)*dim + i);
    }
    if (i < dim) store(dw + token*dim + i, sum);
}


// ---- 9. Optimizer -------------------------------------------------------------------------------

#define SQUARES 65536                           // elements per partial sum of the global norm
#define LANES 1024                              // running sums of one, see the CPU's square_sum

// out[b] = the sum of squares of block b, in double: lane j adds up elements j, j + 1024, ..., then
// halves of the lanes are added until one is left
template <int W>
__global__ void __launch_bounds__(256) sumsq(const float* x, double* out, idx n) {
    __shared__ double lane[LANES];
    idx start = (idx)blockIdx.x*SQUARES;
    int end = (int)min(n - start, (idx)SQUARES);
    double sum[4] = {0, 0, 0, 0};               // of lanes (c*256 + thread)*W + j
    #pragma unroll 8
    for (int i = 0; i < end; i += LANES)
        #pragma unroll
        for (int c = 0; c < 4/W; ++c) {
            int at = i + (c*256 + (int)threadIdx.x)*W;
            vf<W> v = load<W>(x + start + at, end - at);
            #pragma unroll
            for (int j = 0; j < W; ++j) sum[c*W + j] = fma((double)v[j], (double)v[j],
                                                           sum[c*W + j]);
        }
    #pragma unroll
    for (int c = 0; c < 4; ++c) lane[(c/W*256 + threadIdx.x)*W + c%W] = sum[c];
    for (int half = LANES/2; half > 0; half /= 2) {
        __syncthreads();                        // a half reads what another thread has added
        for (int j = threadIdx.x; j < half; j += 256) lane[j] += lane[j + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = lane[0];
}

// out[4] = norm, factor, finite, flag; the sum of the blocks in order, by one thread, while the
// others bring the next blocks
template <int T>
__global__ void __launch_bounds__(T) grad_clip(const double* blocks, idx n, double limit,
                                               double* out) {
    __shared__ double room[2][T];
    double total = 0, mine = threadIdx.x < n ? blocks[threadIdx.x] : 0;
    for (idx start = 0; start < n; start += T) {
        double* now = room[start/T%2];
        now[threadIdx.x] = mine;
        idx next = start + T + threadIdx.x;
        mine = next < n ? blocks[next] : 0;
        __syncthreads();                        // `now` is full, and the other is read: two rounds
        int count = (int)min(n - start, (idx)T);
        if (threadIdx.x == 0) {
            #pragma unroll 8
            for (int i = 0; i < count; ++i) total = __dadd_rn(total, now[i]);
        }
    }
    if (threadIdx.x > 0) return;
    double norm = __dsqrt_rn(total), factor = __ddiv_rn(limit, __dadd_rn(norm, 1e-6));
    bool finite = norm - norm == 0;
    out[0] = norm;
    out[1] = factor < 1 ? factor : 1;
    out[2] = finite;
    out[3] = out[3] != 0 || !finite;
}

// AdamW's numbers as fp32, formed in double as on the CPU
struct Step { float scale, blend1, beta2, blend2, root, eps, keep, minus_step; };

__device__ __forceinline__ Step step_of(const double* hyper, const double* clip) {
    double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], decay = hyper[4];
    Step s;
    s.scale = (float)clip[1];
    s.blend1 = (float)__dsub_rn(1.0, beta1);
    s.beta2 = (float)beta2;
    s.blend2 = (float)__dsub_rn(1.0, beta2);
    s.root = (float)__dsqrt_rn(hyper[6]);
    s.eps = (float)hyper[3];
    s.keep = (float)__dsub_rn(1.0, __dmul_rn(lr, decay));
    s.minus_step = (float)__ddiv_rn(-lr, hyper[5]);
    return s;
}

// a/b and sqrt(a), rounded once.  The compiler's code for both leaves its fast path for operands of
// 0 (rows of tokens not seen yet have m = v = 0), for one many times as long: they never see any.  That made a step of AdamW 2.8 times as fast (3.78 to 1.34 ms on 124 M parameters, H200).
__device__ __forceinline__ float quotient(float a, float b) {
    bool zero = a == 0.0f && b > 0.0f;
    float q = __fdiv_rn(zero ? b : a, b);
    return zero ? a : q;
}
__device__ __forceinline__ float root_of(float a) {
    float r = __fsqrt_rn(a > 0.0f ? a : 1.0f);
    return a > 0.0f ? r : a;                    // 0 and NaN as they are
}

// One step of AdamW (Loshchilov and Hutter, 2019), as the CPU core's adamw() spells it:
//   m = fma(1 - beta1, fma(g, scale, -m), m)
//   v = fma((1 - beta2)*g', g', beta2*v)                  with g' = g*scale
//   p = fma(-lr/bias1, m/(sqrt(v)/sqrt(bias2) + eps), p*(1 - lr*decay))
// each operation rounded once.  mirror, if not 0, is p in bf16.  g becomes 0, also where the norm
// was not finite and nothing else changes.
template <int W>
__global__ void __launch_bounds__(256) adamw(float* p, float* g, float* m, float* v, bf16* mirror,
                                             idx n, const double* hyper, const double* clip) {
    __shared__ Step shared_step;
    idx i = thread_of_all(256)*W, left = n - i;
    vf<W> a = load<W>((const float*)p + i, left), b = load<W>((const float*)g + i, left);
    vf<W> c = load<W>((const float*)m + i, left), d = load<W>((const float*)v + i, left);
    if (threadIdx.x == 0) shared_step = step_of(hyper, clip);   // while the loads are under way
    __syncthreads();
    Step s = shared_step;
    store(g + i, all<W>(0.0f), left);
    if (clip[2] == 0) return;
    #pragma unroll
    for (int j = 0; j < W; ++j) {
        float grad = __fmul_rn(b[j], s.scale);
        c[j] = __fmaf_rn(s.blend1, __fmaf_rn(b[j], s.scale, -c[j]), c[j]);
        d[j] = __fmaf_rn(__fmul_rn(s.blend2, grad), grad, __fmul_rn(s.beta2, d[j]));
        float down = __fadd_rn(quotient(root_of(d[j]), s.root), s.eps);
        a[j] = __fmaf_rn(s.minus_step, quotient(c[j], down), __fmul_rn(a[j], s.keep));
    }
    store(p + i, a, left);
    store(m + i, c, left);
    store(v + i, d, left);
    if (mirror) store(mirror + i, a, left);
}


// ---- 10. Product --------------------------------------------------------------------------------
// C (+)= op(A) op(B) for any shape: what cuBLASLt is tested against, and what runs where that knows
// no algorithm.  A block makes a tile of 64 x 64 of C, a thread 4 x 4: from 16 + 16 numbers of
// shared memory a step of k it makes 16 x 16 products a quarter warp, so that the multiply-adds and
// not the loads are the limit.

// An element of op(X) as fp32; in a product of bf16 an fp32 is rounded to that first
template <class real>
__device__ __forceinline__ float element(const real* x, idx at, bool there, bool rounds) {
    float v = there ? load(x + at) : 0.0f;
    return rounds ? __uint_as_float(to_bf16(v) << 16) : v;
}

template <class A, class B, class C, int TA, int TB>
__global__ void __launch_bounds__(256) tiled_gemm(
        const A* a, idx lda, const B* b, idx ldb, C* c, idx ldc, idx m, idx n, idx k, idx acc,
        idx rounds) {
    __shared__ __align__(16) float as[16][68];  // op(A)'s tile, transposed; rows of 272 bytes, so
    __shared__ __align__(16) float bs[16][68];  // that four neighbours are one access
    int t = threadIdx.x, y = t/16*4, x = t%16*4;
    idx across = (n + 63)/64, row0 = blockIdx.x/across*64, col0 = blockIdx.x%across*64;
    float sum[4][4] = {};
    for (idx k0 = 0; k0 < k; k0 += 16) {
        #pragma unroll
        for (int e = t; e < 1024; e += 256) {   // neighbours in memory go to neighbouring threads
            int i = TA ? e%64 : e/16, u = TA ? e/64 : e%16, j = TB ? e/16 : e%64,
                w = TB ? e%16 : e/64;
            idx r = row0 + i, s = col0 + j;
            as[u][i] = element(a, TA ? (k0 + u)*lda + r : r*lda + k0 + u, r < m && k0 + u < k,
                               rounds);
            bs[w][j] = element(b, TB ? s*ldb + k0 + w : (k0 + w)*ldb + s, s < n && k0 + w < k,
                               rounds);
        }
        __syncthreads();                        // the tiles are complete
        #pragma unroll
        for (int u = 0; u < 16; ++u) {
            vf<4> p = load<4>((const float*)&as[u][y]), q = load<4>((const float*)&bs[u][x]);
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(p[i], q[j], sum[i][j]);
        }
        __syncthreads();                        // and read, before the next ones overwrite them
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            idx r = row0 + y + i, s = col0 + x + j;
            if (r < m && s < n)
                store(c + r*ldc + s, acc ? load((const C*)c + r*ldc + s) + sum[i][j] : sum[i][j]);
        }
}


// ---- 11. Attention ------------------------------------------------------------------------------
// One head, causal; query i sees the keys j <= i + shift, shift = Sk - Sq:
//
//   forward     s = scale q k^T     p = exp(s - m)        l = sum p    o = p v / l    L = m + ln l
//   backward    p = exp(s - L)      delta = sum(do * o)   ds = p * (do v^T - delta)
//               dv = p^T do         dk = scale ds^T q     dq = scale ds k
//
// after FlashAttention-2 (Dao, 2023), as in the CPU core: weights exist for one tile of queries by
// keys at a time, in registers, and tiles that lie wholly in the future are never visited.
//
// All seven products go through `multiply`, on tensor cores by m16n8k16: bf16 times bf16, summed in
// fp32.  An fp32 goes in three PARTS: it is the exact sum of three bf16, its mantissa's bits 1-8,
// 9-16 and 17-24, and of the nine products of parts the three smallest, below 2^-23 of the whole,
// are left out (Henry, Tang and Heinecke, 2019).  That is fp32's accuracy at a sixth of the rate of
// bf16, which is as fast as fp32 units get at their best.  But a tensor core cuts a sum off where
// fp32 rounds it, so in parts it only adds up what one tile contributes, large and small products
// apart; sums over tiles grow outside (Ootomo and Yokota, 2022).
//
// A head size between the sizes of tiles takes the next larger, columns from `dim` on being 0.
// Rows past the end of a sequence are 0 as well, and contribute nothing to any sum.

struct View { char* start; idx batch, position, head; };    // by strides in elements; last axis 1

struct Attention {
    idx sq, sk, heads, kv_heads, dim;
    idx items;              // pairs of batch and head that have tasks of their own
    idx team;               // of which so many go together, see task_of()
    double scale;
    View q, k, v, o;
};

struct Gradients { View dy, dq, dk, dv; };

template <int PARTS> struct InMemory { typedef bf16 real; };
template <> struct InMemory<3> { typedef float real; };

template <class real>
__device__ real* rows_of(const View& x, idx batch, idx position, idx head) {
    return (real*)x.start + batch*x.batch + position*x.position + head*x.head;
}


// ---- Tiles in shared memory
// A row is WIDTH elements, in chunks of 8, 16 bytes.  ldmatrix reads a chunk of 8 rows at a time,
// which would all lie in the same banks if a row is a multiple of 128 bytes: so the chunks of a row
// change places, by XOR with the row, and lie in different ones.  Rows shorter than 128 bytes share
// a line, and fewer bits of the row are enough.

__device__ __forceinline__ char* room(unsigned at) {
    extern __shared__ uint4 shared[];
    return (char*)shared + at;
}

template <int PARTS, int HEIGHT, int WIDTH>
struct Tile {
    static constexpr int height = HEIGHT, chunks = WIDTH/8;
    static constexpr int plane = 2*HEIGHT*WIDTH, bytes = PARTS*plane;
    static constexpr int power = chunks & -chunks, swap = power < 8 ? power : 8;
    unsigned at;                                // a multiple of 128

    __device__ __forceinline__ unsigned place(int part, int row, int column) const {
        return at + part*plane + (row*chunks + (column/8 ^ row/(8/swap)%swap))*16;
    }
    // The place 16 i rows and 16 j columns on, for constants i and j: all but the XOR is part of
    // the instruction that uses it.  The columns passed must lie within an aligned power of two.
    static __device__ __forceinline__ unsigned on(unsigned from, int part, int i, int j) {
        return (from ^ 2*j % swap*16) + part*plane + (16*i*chunks + 2*j/swap*swap)*16;
    }
};

// x as the sum of PARTS bf16, two at once in each word
template <int PARTS>
__device__ __forceinline__ void split(float x, float y, unsigned (&part)[PARTS]) {
    if constexpr (PARTS == 1) {
        part[0] = two_bf16(x, y);
    } else {
        #pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            unsigned a = __float_as_uint(x), b = __float_as_uint(y);
            part[i] = a >> 16 | (b & 0xffff0000);
            x -= __uint_as_float(a & 0xffff0000);   // exact: what is left needs 8 bits less
            y -= __uint_as_float(b & 0xffff0000);
        }
    }
}

// A row's elements are moved 8 at a time.  WIDE says that a head has a multiple of 8 of them, that
// all rows are aligned, so that 8 bf16 are one access of 16 bytes and 8 fp32 two, and that a tile
// spans less than 2^31 elements.  What is not so goes one by one, in kernels of their own: with both ways
// in one loop each 16 bytes took 45 instructions, a third of all that the forward pass executed.

// Eight elements, of which `count` exist: 0 for the others
template <int WIDE>
__device__ __forceinline__ void load8(const float* x, int count, float (&y)[8]) {
    if constexpr (WIDE) {
        float4 zero = {}, a = count > 0 ? ((const float4*)x)[0] : zero;
        float4 b = count > 0 ? ((const float4*)x)[1] : zero;
        y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w;
        y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
    } else {
        for (int i = 0; i < 8; ++i) y[i] = i < count ? x[i] : 0;
    }
}

template <int WIDE>
__device__ __forceinline__ void load8(const bf16* x, int count, float (&y)[8]) {
    if constexpr (WIDE) {
        uint4 zero = {}, a = count > 0 ? *(const uint4*)x : zero;
        unsigned words[4] = {a.x, a.y, a.z, a.w};
        #pragma unroll
        for (int i = 0; i < 8; ++i)
            y[i] = __uint_as_float(i % 2 ? words[i/2] & 0xffff0000 : words[i/2] << 16);
    } else {
        for (int i = 0; i < 8; ++i) y[i] = i < count ? load(x + i) : 0;
    }
}

// Eight elements to a chunk of a tile.  bf16 may still be under way afterwards, see copies_wait().
template <int WIDE, class T>
__device__ __forceinline__ void bring_chunk(T tile, int row, int column, const bf16* x, int count) {
    char* to = room(tile.place(0, row, column));
    if constexpr (WIDE) copy16(to, x, count > 0);
    else for (int i = 0; i < 8; ++i) ((bf16*)to)[i].bits = i < count ? x[i].bits : 0;
}

template <int WIDE, class T>
__device__ __forceinline__ void bring_chunk(T tile, int row, int column, const float* x,
                                            int count) {
    float y[8];
    unsigned words[4][3];
    load8<WIDE>(x, count, y);
    #pragma unroll
    for (int i = 0; i < 4; ++i) split<3>(y[2*i], y[2*i + 1], words[i]);
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
        uint4 chunk = {words[0][i], words[1][i], words[2][i], words[3][i]};
        *(uint4*)room(tile.place(i, row, column)) = chunk;
    }
}

// A tile from rows of x, of which `rows` are left; the others and columns from `dim` on are 0
template <int THREADS, int WIDE, class T, class real>
__device__ __forceinline__ void bring(T tile, const real* x, idx stride, idx rows, int dim) {
    constexpr int ALL = T::height*T::chunks, ROUNDS = (ALL + THREADS - 1)/THREADS;
    constexpr int UNROLL = WIDE && sizeof(real) == 2 ? ROUNDS : 1;
    int left = (int)min(rows, (idx)T::height);
    #pragma unroll UNROLL
    for (int round = 0; round < ROUNDS; ++round) {
        // unsigned, so that the compiler sees what successive rounds have in common; and of 32 bits
        // where the host has seen that a tile spans no more
        unsigned i = threadIdx.x + round*THREADS, row = i/T::chunks, column = i % T::chunks*8;
        if (ALL % THREADS && i >= ALL) break;
        int count = (int)row < left ? dim - (int)column : 0;
        const real* from = x + (WIDE ? row*(unsigned)stride + column : row*stride + column);
        bring_chunk<WIDE>(tile, row, column, from, count);
    }
}


// ---- Products of tiles
// Of m16n8k16's operands a lane, with row = lane/4 and pair = 2*(lane%4), holds
//
//   a[16, 16]   a0 [row, pair]   a1 [row + 8, pair]   a2 [row, pair + 8]   a3 [row + 8, pair + 8]
//   b[16, 8]    b0 [pair, row]   b1 [pair + 8, row]
//   c[16, 8]    c0, c1 [row, pair]   c2, c3 [row + 8, pair]
//
// each pair being two neighbours, for b two of a column.  So c, rounded, is half an operand a.
// An ldmatrix fetches an a, or two b side by side, from rows or (turned) from columns.

template <bool TURNED, class T>
struct Left {                           // a[m, k] = tile[first + m, k], turned: tile[k, first + m]
    unsigned at;                            // what this lane fetches of the first one
    __device__ __forceinline__ Left(T tile, int first) {
        int lane = threadIdx.x % 32;
        at = TURNED ? tile.place(0, lane%8 + lane/16*8, first + lane/8%2*8)
                    : tile.place(0, first + lane%16, lane/16*8);
    }
    __device__ __forceinline__ void operator()(int part, int m, int k, unsigned (&a)[4]) const {
        if constexpr (TURNED) load_matrices_turned(a, room(T::on(at, part, k, m)));
        else load_matrices(a, room(T::on(at, part, m, k)));
    }
};

template <bool TURNED, class T>
struct Right {                          // b[k, n] = tile[k, first + n], turned: tile[first + n, k]
    unsigned at;
    __device__ __forceinline__ Right(T tile, int first) {
        int lane = threadIdx.x % 32;
        at = TURNED ? tile.place(0, first + lane%8 + lane/16*8, lane/8%2*8)
                    : tile.place(0, lane%16, first + lane/16*8);
    }
    __device__ __forceinline__ void operator()(int part, int n, int k, unsigned (&b)[4]) const {
        if constexpr (TURNED) load_matrices(b, room(T::on(at, part, n, k)));
        else load_matrices_turned(b, room(T::on(at, part, k, n)));
    }
};

// The result of a product as the left operand of another
template <int PARTS, int M, int K>
struct Held {
    unsigned word[PARTS][M][K][4];

    __device__ __forceinline__ void take(const float (&c)[M][2*K][4]) {
        #pragma unroll
        for (int m = 0; m < M; ++m)
            #pragma unroll
            for (int k = 0; k < K; ++k)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* two = c[m][2*k + i/2] + i % 2*2;
                    unsigned part[PARTS];
                    split<PARTS>(two[0], two[1], part);
                    #pragma unroll
                    for (int j = 0; j < PARTS; ++j) word[j][m][k][i] = part[j];
                }
    }
    __device__ __forceinline__ void operator()(int part, int m, int k, unsigned (&a)[4]) const {
        #pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = word[part][m][k][i];
    }
};

// c[16 M, 8 N] += a[16 M, 16 K] b[16 K, 8 N], in bf16
template <int K, int M, int N, class A, class B>
__device__ __forceinline__ void multiply_halves(float (&c)[M][N][4], const A& a, const B& b) {
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        unsigned left[M][4], right[4];
        #pragma unroll
        for (int m = 0; m < M; ++m) a(0, m, k, left[m]);
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            b(0, n/2, k, right);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(c[m][n], left[m], right[0], right[1]);
                mma(c[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// The same in parts, columns 8 first .. 8 (first + WIDTH) of it
template <int K, int WIDTH, int M, int N, class A, class B>
__device__ __forceinline__ void multiply_parts(float (&c)[M][N][4], int first, const A& a,
                                               const B& b) {
    float large[M][WIDTH][4] = {}, small[M][WIDTH][4] = {};
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        unsigned left[3][M][4], right[3][4];
        #pragma unroll
        for (int i = 0; i < 3*M; ++i) a(i/M, i % M, k, left[i/M][i % M]);
        #pragma unroll
        for (int n = 0; n < WIDTH; n += 2) {
            #pragma unroll
            for (int i = 0; i < 3; ++i) b(i, (first + n)/2, k, right[i]);
            #pragma unroll
            for (int m = 0; m < 2*M; ++m) {
                unsigned b0[3] = {right[0][m % 2*2], right[1][m % 2*2], right[2][m % 2*2]};
                unsigned b1[3] = {right[0][m % 2*2 + 1], right[1][m % 2*2 + 1],
                                  right[2][m % 2*2 + 1]};
                #pragma unroll
                for (int i = 0; i < 3; ++i)
                    #pragma unroll
                    for (int j = 0; j < 3 - i; ++j)
                        mma(i + j ? small[m/2][n + m % 2] : large[m/2][n + m % 2], left[i][m/2],
                            b0[j], b1[j]);
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int n = 0; n < WIDTH; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) c[m][first + n][i] += large[m][n][i] + small[m][n][i];
}

// In parts WIDTH of the N columns at a time, for which there are sums beside c
template <int PARTS, int K, int WIDTH, int M, int N, class A, class B>
__device__ __forceinline__ void multiply(float (&c)[M][N][4], const A& a, const B& b) {
    static_assert(N % 2 == 0 && WIDTH % 2 == 0 && N % WIDTH == 0, "columns go in pairs of tiles");
    if constexpr (PARTS == 1) {
        multiply_halves<K>(c, a, b);
    } else {
        #pragma unroll
        for (int first = 0; first < N; first += WIDTH) multiply_parts<K, WIDTH>(c, first, a, b);
    }
}

// y[row, column] = factor*c of a product's tile, from rows first_row and columns first_column on
template <int WIDE, int M, int N, class real>
__device__ __forceinline__ void put(const float (&c)[M][N][4], const float (&factor)[M][2],
                                    real* y, idx stride, idx rows, int first_row,
                                    int first_column, int dim) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 2*M; ++i) {
        int row = first_row + 8*i + lane/4;
        if (row >= rows) continue;
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            int column = first_column + 8*n + lane % 4*2;
            real* to = y + row*stride + column;
            float a = c[i/2][n][i % 2*2]*factor[i/2][i % 2];
            float b = c[i/2][n][i % 2*2 + 1]*factor[i/2][i % 2];
            if constexpr (!WIDE) {
                if (column < dim) store(to, a);
                if (column + 1 < dim) store(to + 1, b);
            } else if (column < dim) {
                if constexpr (sizeof(real) == 2) *(unsigned*)to = two_bf16(a, b);
                else *(float2*)to = make_float2(a, b);
            }
        }
    }
}

// Tasks of `team` items go together, first block first: so those under way share what they read in
// L2, and the last to start are, where first blocks are long, short.
struct Task { idx item, block; };

__device__ __forceinline__ Task task_of(const Attention& a, idx t, idx blocks) {
    idx first = t/(a.team*blocks)*a.team, count = min(a.team, a.items - first);
    t -= first*blocks;
    return {first + t % count, t/count};
}


// ---- Forward
// A block of 16 M WARPS queries, M times 16 a warp, passes the keys in ascending order, KEYS at a
// time.  The tile after the next one is on its way from memory while one is used, if STAGES is 2.

// s to weights 2^(factor s - m) of the maximum so far; m and l by row, `fade` what they scale the
// past with.  Returns whether that changes anything.
template <int M, int N>
__device__ __forceinline__ bool weights_of(float (&s)[M][N][4], float (&top)[M][2],
                                           float (&total)[M][2], float (&fade)[M][2],
                                           float factor) {
    bool changed = false;
    #pragma unroll
    for (int i = 0; i < 2*M; ++i) {
        float* old = &top[i/2][i % 2];
        float most = *old, sum = 0;
        #pragma unroll
        for (int n = 0; n < N; ++n)
            most = max(most, max(s[i/2][n][i % 2*2], s[i/2][n][i % 2*2 + 1]));
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));    // the 4 lanes of a row
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
        // a row that has seen no key yet has weights 2^-inf, not 2^(inf - inf)
        float shift = most == -__int_as_float(0x7f800000) ? 0 : most*factor;
        fade[i/2][i % 2] = power_of_two(*old*factor - shift);
        changed |= most != *old;
        *old = most;
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
                float* x = &s[i/2][n][i % 2*2 + j];
                *x = power_of_two(*x*factor - shift);
                sum += *x;
            }
        total[i/2][i % 2] = total[i/2][i % 2]*fade[i/2][i % 2] + sum;
    }
    return changed;
}

// `value` for what lies in the future: column - row > distance as this lane counts them, or, where
// rows are keys, row - column
template <bool TURNED, int M, int N>
__device__ __forceinline__ void hide(float (&s)[M][N][4], int distance, float value) {
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                int ahead = 8*n + i % 2 - 16*m - i/2*8;
                if ((TURNED ? -ahead : ahead) > distance) s[m][n][i] = value;
            }
}

template <int D, int PARTS, int WIDE, int M, int WARPS, int KEYS, int STAGES>
__global__ void __launch_bounds__(32*WARPS) attention(Attention a, float* lse) {
    constexpr int ROWS = 16*M*WARPS, THREADS = 32*WARPS, WIDTH = PARTS == 1 ? D/8 : 2;
    typedef typename InMemory<PARTS>::real real;
    typedef Tile<PARTS, ROWS, D> Queries;
    typedef Tile<PARTS, KEYS, D> Keys;
    constexpr Queries q = {0};

    idx blocks = (a.sq + ROWS - 1)/ROWS, shift = a.sk - a.sq;
    Task task = task_of(a, blockIdx.x, blocks);
    idx batch = task.item/a.heads, head = task.item % a.heads;
    idx kv_head = head/(a.heads/a.kv_heads);
    idx q0 = (blocks - 1 - task.block)*ROWS;        // late queries see the most: they go first
    idx end = min(a.sq, q0 + ROWS) + shift;         // of the keys that any of them sees
    int dim = (int)a.dim, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    const real* keys = rows_of<real>(a.k, batch, 0, kv_head);
    const real* values = rows_of<real>(a.v, batch, 0, kv_head);

    auto bring_keys = [&](idx k0) {
        unsigned at = Queries::bytes + (unsigned)(k0/KEYS % STAGES)*2*Keys::bytes;
        bring<THREADS, WIDE>(Keys{at}, keys + k0*a.k.position, a.k.position, a.sk - k0, dim);
        bring<THREADS, WIDE>(Keys{at + Keys::bytes}, values + k0*a.v.position, a.v.position,
                             a.sk - k0, dim);
    };

    bring<THREADS, WIDE>(q, rows_of<real>(a.q, batch, q0, head), a.q.position, a.sq - q0, dim);
    if (end > 0 && STAGES == 2) bring_keys(0);
    copies_commit();
    // With a negative scale the least score is ahead: q changes its sign instead.  A scale of 0 is
    // a tiny one, as the scores of hidden keys, -inf, times 0 would be NaN.
    float scale = (float)a.scale, factor = max(fabsf(scale)*LOG2_E, 1e-30f);
    if (scale < 0) {
        copies_wait<0>();
        __syncthreads();
        for (int i = threadIdx.x; i < Queries::bytes/4; i += THREADS)
            ((unsigned*)room(0))[i] ^= 0x80008000;
    }

    float o[M][D/8][4] = {}, top[M][2], total[M][2] = {}, fade[M][2];
    for (int i = 0; i < 2*M; ++i) top[i/2][i % 2] = -__int_as_float(0x7f800000);
    for (idx k0 = 0; k0 < end; k0 += KEYS) {
        if (STAGES == 1) {
            __syncthreads();                        // the last tile is no longer read
            bring_keys(k0);
            copies_commit();
        }
        copies_wait<0>();
        __syncthreads();                            // everybody's part of this tile is here, and
        if (STAGES == 2 && k0 + KEYS < end) bring_keys(k0 + KEYS);      // the last one read
        copies_commit();
        Keys k = {Queries::bytes + (unsigned)(k0/KEYS % STAGES)*2*Keys::bytes};
        Keys v = {k.at + Keys::bytes};

        float s[M][KEYS/8][4] = {};
        multiply<PARTS, D/16, KEYS/8>(s, Left<false, Queries>(q, 16*M*warp),
                                      Right<true, Keys>(k, 0));
        if (k0 + KEYS > q0 + shift + 1)
            hide<false>(s, (int)(q0 + shift - k0) + 16*M*warp + lane/4 - lane % 4*2,
                        -__int_as_float(0x7f800000));
        if (__any_sync(0xffffffffu, weights_of(s, top, total, fade, factor)))
            #pragma unroll
            for (int i = 0; i < M*D/8*4; ++i)
                o[i/(D/2)][i/4 % (D/8)][i % 4] *= fade[i/(D/2)][i/2 % 2];
        Held<PARTS, M, KEYS/16> p;
        p.take(s);
        multiply<PARTS, KEYS/16, WIDTH>(o, p, Right<false, Keys>(v, 0));
    }

    float* to = lse + task.item*a.sq;
    #pragma unroll
    for (int i = 0; i < 2*M; ++i) {
        float sum = total[i/2][i % 2];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        idx row = q0 + 16*M*warp + 8*i + lane/4;
        if (lane % 4 == 0 && row < a.sq) to[row] = top[i/2][i % 2]*factor/LOG2_E + logf(sum);
        fade[i/2][i % 2] = sum > 0 ? 1/sum : 0;
    }
    put<WIDE>(o, fade, rows_of<real>(a.o, batch, q0, head), a.o.position, a.sq - q0, 16*M*warp, 0,
              dim);
}


// ---- Backward
// `rows` is, for each row of each head, L in units of ln2, and from a.items*sq on delta.  8 lanes a
// row; neighbours are the heads of one position, as they lie in memory.

template <class real, int WIDE>
__global__ void __launch_bounds__(256) attention_rows(Attention a, View dy, const float* lse,
                                                      float* rows) {
    idx i = blockIdx.x*32ll + threadIdx.x/8, n = a.items*a.sq;
    idx head = i % a.heads, position = i/a.heads % a.sq, batch = i/a.heads/a.sq;
    float sum = 0;
    if (i < n) {
        const real* x = rows_of<real>(dy, batch, position, head);
        const real* y = rows_of<real>(a.o, batch, position, head);
        // a lane takes every eighth chunk of 8; the order of the sum depends on dim alone
        for (int j = threadIdx.x % 8*8; j < a.dim; j += 64) {
            float u[8], w[8];
            load8<WIDE>(x + j, (int)a.dim - j, u);
            load8<WIDE>(y + j, (int)a.dim - j, w);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum += u[e]*w[e];
        }
    }
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (i < n && threadIdx.x % 8 == 0) {
        idx row = (batch*a.heads + head)*a.sq + position;
        rows[row] = lse[row]*LOG2_E;
        rows[n + row] = sum;
    }
}

// A block of KEYS keys of one kv head, 16 a warp, passes the queries that see them, ROWS at a time:
// those of its query heads one after the other, the last queries first.  Scores lie transposed,
// s[key][query], so that p and ds are left operands of dv and dk as they lie in registers, and dv
// and dk grow there; only for dq goes ds through shared memory.  With HALVES 2 a block of keys has
// two tasks, each for half the columns of dq, dk and dv.  BLOCKS should fit on a processor.
//
// dq of a block of queries is the sum over the blocks of keys, in ascending order, to the bit in
// every run: `turns` says how many have added their share to `sums`.  The first one writes, and the
// last one stores dq.  Tasks get their numbers in ascending order of blocks as they start, so what
// a task waits for is under way, and as all take queries in the same order, the wait is for a task
// one step ahead.  First blocks have the longest tasks and start first, so the end is not ragged.

// p from scores and L, and ds from p, do v^T and delta; L and delta by column
template <int N>
__device__ __forceinline__ void weights_again(float (&s)[1][N][4], const float* lse, float factor) {
    #pragma unroll
    for (int n = 0; n < N; ++n) {
        float2 l = *(const float2*)(lse + 8*n + threadIdx.x % 4*2);
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            s[0][n][i] = power_of_two(s[0][n][i]*factor - (i % 2 ? l.y : l.x));
    }
}

template <int N>
__device__ __forceinline__ void gradients_of(const float (&p)[1][N][4], float (&ds)[1][N][4],
                                             const float* delta) {
    #pragma unroll
    for (int n = 0; n < N; ++n) {
        float2 mean = *(const float2*)(delta + 8*n + threadIdx.x % 4*2);
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            ds[0][n][i] = p[0][n][i]*(ds[0][n][i] - (i % 2 ? mean.y : mean.x));
    }
}

// What a warp holds of ds, rows of keys from `row` on, into the tile of all
template <int PARTS, int K, class T>
__device__ __forceinline__ void put_scores(const Held<PARTS, 1, K>& ds, T tile, int row) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int part = 0; part < PARTS; ++part)
        #pragma unroll
        for (int k = 0; k < K; ++k)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                ((unsigned*)room(tile.place(part, row + lane/4 + i % 2*8, 16*k + i/2*8)))[lane % 4]
                    = ds.word[part][0][k][i];
}

// The sums of dq so far, as the threads hold them: past L1, where there may be what was here before
template <int THREADS, int M, int N>
__device__ __forceinline__ void read_share(float (&dq)[M][N][4], const float4* share) {
    #pragma unroll
    for (int i = 0; i < M*N; ++i) {
        float4 x = __ldcg(share + i*THREADS);
        dq[i/N][i % N][0] = x.x, dq[i/N][i % N][1] = x.y;
        dq[i/N][i % N][2] = x.z, dq[i/N][i % N][3] = x.w;
    }
}

template <int THREADS, int M, int N>
__device__ __forceinline__ void write_share(const float (&dq)[M][N][4], float4* share) {
    #pragma unroll
    for (int i = 0; i < M*N; ++i) {
        const float (&x)[4] = dq[i/N][i % N];
        __stcg(share + i*THREADS, make_float4(x[0], x[1], x[2], x[3]));
    }
}

template <int D, int PARTS, int WIDE, int ROWS, int KEYS, int HALVES, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(2*KEYS, BLOCKS) attention_backward(
        Attention a, Gradients d, const float* rows, float* sums, unsigned* turns) {
    constexpr int THREADS = 2*KEYS, WARPS = KEYS/16, COLUMNS = D/HALVES;
    // of dq a warp makes 16 M rows by 32 columns; the squarer that is, the less is fetched for it
    constexpr int PIECES = COLUMNS < 32 ? 1 : COLUMNS/32, ACROSS = PIECES < WARPS ? PIECES : WARPS;
    constexpr int M = ROWS*ACROSS/WARPS/16, N = COLUMNS/ACROSS/8, STEP = ROWS/8 < 4 ? ROWS/8 : 4;
    static_assert(M > 0 && M*N*4*THREADS == ROWS*COLUMNS, "dq is dealt out evenly");
    typedef typename InMemory<PARTS>::real real;
    typedef Tile<PARTS, KEYS, D> Keys;
    typedef Tile<PARTS, ROWS, D> Queries;
    typedef Tile<PARTS, KEYS, ROWS> Scores;
    constexpr Keys k = {0}, v = {Keys::bytes};
    constexpr Scores scores = {2*Keys::bytes};
    constexpr int STAGES_AT = scores.at + Scores::bytes;
    constexpr int STAGE = 2*Queries::bytes + 8*ROWS;        // q, dy, L, delta

    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(turns, 1u);
    __syncthreads();
    idx shift = a.sk - a.sq, blocks = (a.sq + ROWS - 1)/ROWS, group = a.heads/a.kv_heads;
    Task task = task_of(a, ticket/HALVES, (a.sk + KEYS - 1)/KEYS);
    int half = ticket % HALVES, dim = (int)a.dim, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    idx batch = task.item/a.kv_heads, kv_head = task.item % a.kv_heads, k0 = task.block*KEYS;
    idx first = max(0ll, k0 - shift)/ROWS;                  // block of queries that sees k0
    idx all = a.items*group*a.sq;                           // rows of all heads
    unsigned* done = nullptr;                               // a turn that is to be passed on
    float scale = (float)a.scale, factor = scale*LOG2_E;

    auto bring_queries = [&](idx head, idx block, unsigned stage) {
        Queries q = {STAGES_AT + stage*STAGE}, dy = {q.at + Queries::bytes};
        idx q0 = block*ROWS, left = a.sq - q0;
        bring<THREADS, WIDE>(q, rows_of<real>(a.q, batch, q0, head), a.q.position, left, dim);
        bring<THREADS, WIDE>(dy, rows_of<real>(d.dy, batch, q0, head), d.dy.position, left, dim);
        unsigned i = threadIdx.x, row = i % ROWS;           // of L, then of delta
        static_assert(2*ROWS <= THREADS, "one round brings both");
        if (i < 2*ROWS)
            copy4(room(dy.at + Queries::bytes + 4*i),
                  rows + (batch*a.heads + head)*a.sq + q0 + (i < ROWS ? 0 : all) + row, row < left);
        copies_commit();
    };

    bring<THREADS, WIDE>(k, rows_of<real>(a.k, batch, k0, kv_head), a.k.position, a.sk - k0, dim);
    bring<THREADS, WIDE>(v, rows_of<real>(a.v, batch, k0, kv_head), a.v.position, a.sk - k0, dim);
    if (STAGES == 2) bring_queries(kv_head*group, blocks - 1, 0);
    float dk[1][COLUMNS/8][4] = {}, dv[1][COLUMNS/8][4] = {};
    unsigned stage = 0;
    for (idx head = kv_head*group, block = blocks - 1; head < (kv_head + 1)*group;) {
        idx next = block > first ? block - 1 : blocks - 1, next_head = head + (block <= first);
        if (STAGES == 1) {
            __syncthreads();                                // the last tiles are no longer read
            bring_queries(head, block, 0);
        }
        copies_wait<0>();
        __syncthreads();            // everybody's part of these tiles is here, the last are read
        idx at = ((batch*a.heads + head)*blocks + block)*HALVES + half;
        unsigned* turn = turns + 1 + at;
        unsigned seen = threadIdx.x == 0 ? load_flag(turn) : 0;     // on its way until it is used
        if (STAGES == 2 && next_head < (kv_head + 1)*group)
            bring_queries(next_head, next, stage ^ 1);
        Queries q = {STAGES_AT + stage*STAGE}, dy = {q.at + Queries::bytes};
        const float* lse = (const float*)room(dy.at + Queries::bytes);
        idx q0 = block*ROWS;

        float p[1][ROWS/8][4] = {}, ds[1][ROWS/8][4] = {};
        multiply<PARTS, D/16, STEP>(p, Left<false, Keys>(k, 16*warp), Right<true, Queries>(q, 0));
        weights_again(p, lse, factor);
        if (k0 + KEYS > q0 + shift + 1)     // set, not multiplied: it may have overflowed there
            hide<true>(p, (int)(q0 + shift - k0) - 16*warp - lane/4 + lane % 4*2, 0);
        multiply<PARTS, D/16, STEP>(ds, Left<false, Keys>(v, 16*warp), Right<true, Queries>(dy, 0));
        gradients_of(p, ds, lse + ROWS);
        Held<PARTS, 1, ROWS/16> held;
        held.take(p);
        multiply<PARTS, ROWS/16, 2>(dv, held, Right<false, Queries>(dy, half*COLUMNS));
        held.take(ds);
        put_scores(held, scores, 16*warp);

        if (threadIdx.x == 0) {
            fence();                        // by now the last share has long been written
            if (done) store_flag(done, (unsigned)task.block + 1);
            for (; seen != task.block; fence()) __nanosleep(32), seen = load_flag(turn);
        }
        __syncthreads();                    // ds of all keys is here, and it is this task's turn
        float4* share = (float4*)(sums + at*ROWS*COLUMNS) + threadIdx.x;
        float dq[M][N][4] = {};
        if (task.block > 0) read_share<THREADS>(dq, share);
        multiply<PARTS, ROWS/16, 2>(dk, held, Right<false, Queries>(q, half*COLUMNS));
        int row = warp/ACROSS*16*M, column = half*COLUMNS + warp % ACROSS*8*N;
        multiply<PARTS, KEYS/16, 2>(dq, Left<true, Scores>(scores, row),
                                    Right<false, Keys>(k, column));
        if (task.block == (min(a.sq, q0 + ROWS) + shift - 1)/KEYS) {
            float scales[M][2];
            for (int i = 0; i < 2*M; ++i) scales[i/2][i % 2] = scale;
            put<WIDE>(dq, scales, rows_of<real>(d.dq, batch, q0, head), d.dq.position, a.sq - q0,
                      row, column, dim);
            done = nullptr;
        } else {
            write_share<THREADS>(dq, share);
            done = turn;
        }
        head = next_head, block = next, stage ^= STAGES - 1;
    }
    __syncthreads();
    if (done && threadIdx.x == 0) fence(), store_flag(done, (unsigned)task.block + 1);
    float ones[1][2] = {{1, 1}}, scales[1][2] = {{scale, scale}};
    put<WIDE>(dk, scales, rows_of<real>(d.dk, batch, k0, kv_head), d.dk.position, a.sk - k0,
              16*warp, half*COLUMNS, dim);
    put<WIDE>(dv, ones, rows_of<real>(d.dv, batch, k0, kv_head), d.dv.position, a.sk - k0,
              16*warp, half*COLUMNS, dim);
}
