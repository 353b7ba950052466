// Accumulate and select on the device: the CUDA side of kernels/select/select.cpp, block.cpp and sum.cpp.
//
// Top-k in six launches, none of which the host waits for:
//     sample    a magnitude that a little more than k elements reach; and is the gradient finite?
//     collect   dense += gradient; the elements that reach it, in index order: the candidates
//     count x 3 the k-th largest magnitude of the candidates, eleven bits at a time (float64: x 6)
//     take      what is larger, and of equals the first, in index order
// Where the sample misled (fewer than k candidates, or more than there is room for), count and take read all elements
// in place of the candidates: slower, and the same result.
//
// `bad` (or null): whether the gradient has NaN or infinity. Where it is not 0, nothing is accumulated.
#include "common/device.cuh"

template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
    typedef u32 type;
};
template <>
struct BitsOf<double> {
    typedef u64 type;
};

template <class T>
__device__ __forceinline__ const T* unless(const i32* bad, const T* gradient) {
    return bad && *bad ? nullptr : gradient;
}

const u32 BINS = 2048;
const u32 SAMPLES = 32 * THREADS;

struct Digit {
    u32 digit;
    u64 above;  // elements of larger digits
};

// The digit of the k-th largest element (k >= 1), from a count of each digit.
__device__ Digit find_digit(const u32* counts, u64 k) {
    __shared__ Digit found;
    const u32 each = BINS / THREADS, first = BINS - 1 - each * threadIdx.x;
    u64 own = 0, total;
    for (u32 j = 0; j < each; ++j) own += counts[first - j];
    u64 above = block_scan(own, &total);
    if (above < k && k <= above + own) {
        u32 d = first;
        for (; above + counts[d] < k; --d) above += counts[d];
        found.digit = d;
        found.above = above;
    }
    __syncthreads();
    const Digit result = found;
    __syncthreads();
    return result;
}

// state[0]: the least magnitude bits of a candidate. One block. Where no sample can say (few elements, or nearly all
// wanted) every element but zeros is one.
template <class T>
__device__ void sample(const T* dense, const T* gradient, u64 n, u64 k, u64* state) {
    const u32 key_bits = sizeof(T) == 4 ? 0 : 32;
    const u64 samples = n / 8 < SAMPLES ? n / 8 : SAMPLES;
    const double expected = (double)k * (double)samples / (double)n, deviation = sqrt(expected);
    const u64 rank = (u64)(expected + 5.0 * (deviation > 2.0 ? deviation : 2.0));
    if (samples < 512 || rank >= samples) {
        if (threadIdx.x == 0) state[0] = 1;
        return;
    }
    __shared__ u32 counts[BINS];
    u32 keys[SAMPLES / THREADS];
#pragma unroll
    for (u32 j = 0; j < SAMPLES / THREADS; ++j) {
        const u64 i = (u64)j * THREADS + threadIdx.x;
        keys[j] = 0;
        if (i >= samples) continue;
        const u64 first = n * i / samples, next = n * (i + 1) / samples;
        const u64 at = first + fmix32((u32)i) % (next - first);
        keys[j] = (u32)((u64)magnitude_bits(gradient ? accumulated(dense[at], gradient[at]) : dense[at]) >> key_bits);
    }
    u32 prefix = 0;
    u64 left = rank + 1;
    for (u32 shift = 20;; shift -= 11) {
        for (u32 d = threadIdx.x; d < BINS; d += THREADS) counts[d] = 0;
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < SAMPLES / THREADS; ++j)
            if ((u64)j * THREADS + threadIdx.x < samples && (keys[j] >> (shift + 11)) == prefix >> (shift + 11))
                atomicAdd(counts + (keys[j] >> shift & (BINS - 1)), 1u);
        __syncthreads();
        const Digit digit = find_digit(counts, left);
        prefix |= digit.digit << shift;
        left -= digit.above;
        if (shift == 9) break;
    }
    const u64 least = (u64)prefix << key_bits;
    if (threadIdx.x == 0) state[0] = least ? least : 1;
}

// *bad becomes ERR_NOT_FINITE where a number is NaN or infinite. Read as vectors of words, by `workers` blocks.
template <class T>
__device__ void find_nonfinite(const T* x, u64 n, u32 worker, u32 workers, i32* bad) {
    typedef typename BitsOf<T>::type Bits;
    const Bits infinity = sizeof(T) == 4 ? (Bits)0x7F800000u : (Bits)0x7FF0000000000000ull;
    const u32 size = Vector<T>::SIZE;
    const u64 vectors = aligned16(x) ? n / size : 0, first = (u64)worker * THREADS + threadIdx.x;
    const u64 stride = (u64)workers * THREADS;
    bool found = false;
    for (u64 v = first; v < vectors; v += stride) {
        const Vector<T> four = *(const Vector<T>*)(x + v * size);
        for (u32 j = 0; j < size; ++j) found |= magnitude_bits(four.x[j]) >= infinity;
    }
    for (u64 i = vectors * size + first; i < n; i += stride) found |= magnitude_bits(x[i]) >= infinity;
    if (__syncthreads_or(found) && threadIdx.x == 0) atomicMin(bad, ERR_NOT_FINITE);
}

// dense += gradient (unless null); elements of at least `least` magnitude bits go, in index order, to `indices` and
// `values`, as many as there is room for; *count: how many they are.
//
//     a tile:  four rows of THREADS vectors; vector v of row r holds the elements (r * THREADS + v) * SIZE + ...
template <class T>
__device__ void collect(T* dense, const T* gradient, u64 n, typename BitsOf<T>::type least, u64* status, u32* indices,
                        T* values, u64 room, u64* count) {
    const u32 size = Vector<T>::SIZE, rows = 4;
    const u64 tile_size = (u64)rows * THREADS * size;
    const u32 tiles = (u32)((n + tile_size - 1) / tile_size);
    const bool vectors = aligned16(dense) && aligned16(gradient);
    for (u32 tile; (tile = next_tile(status, tiles)) < tiles;) {
        Vector<T> x[rows];
        u32 keep[rows];
        u64 own = 0;  // 16 bits a row
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
            const u64 at = (u64)tile * tile_size + ((u64)r * THREADS + threadIdx.x) * size;
            keep[r] = 0;
            if (vectors && at + size <= n) {
                x[r] = *(const Vector<T>*)(dense + at);
                if (gradient) {
                    const Vector<T> g = *(const Vector<T>*)(gradient + at);
                    for (u32 j = 0; j < size; ++j) x[r].x[j] = accumulated(x[r].x[j], g.x[j]);
                    *(Vector<T>*)(dense + at) = x[r];
                }
                for (u32 j = 0; j < size; ++j) keep[r] |= (u32)(magnitude_bits(x[r].x[j]) >= least) << j;
            } else {
                for (u32 j = 0; j < size; ++j) {
                    if (at + j >= n) continue;
                    x[r].x[j] = dense[at + j];
                    if (gradient) {
                        x[r].x[j] = accumulated(x[r].x[j], gradient[at + j]);
                        dense[at + j] = x[r].x[j];
                    }
                    keep[r] |= (u32)(magnitude_bits(x[r].x[j]) >= least) << j;
                }
            }
            own |= (u64)__popc(keep[r]) << (16 * r);
        }
        u64 total, before = block_scan(own, &total);
        u64 sum = 0;
        for (u32 r = 0; r < rows; ++r) sum += total >> (16 * r) & 0xFFFF;
        u64 place = tiles_before(status, tile, sum);
        if (threadIdx.x == 0 && tile == tiles - 1) *count = place + sum;
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
            const u64 at = (u64)tile * tile_size + ((u64)r * THREADS + threadIdx.x) * size;
            u64 to = place + (before >> (16 * r) & 0xFFFF);
#pragma unroll
            for (u32 j = 0; j < size; ++j)
                if (keep[r] >> j & 1) {
                    if (to < room) {
                        indices[to] = (u32)(at + j);
                        values[to] = x[r].x[j];
                    }
                    ++to;
                }
            place += total >> (16 * r) & 0xFFFF;
        }
    }
}

// Where count and take read.
template <class T>
struct Source {
    const u32* indices;  // null: all elements
    const T* values;
    u64 count;
};

template <class T>
__device__ Source<T> source_of(const T* dense, u64 n, u64 k, const u32* indices, const T* values, u64 room,
                               const u64* state) {
    const u64 candidates = state[1];
    if (candidates < k || candidates > room) return {nullptr, dense, n};
    return {indices, values, candidates};
}

// What `passes` counts say of the k-th largest magnitude: its `known` bits.
template <class Bits>
struct Known {
    Bits prefix, known;
    u64 above;
    u32 shift;  // of the next digit
    Bits open;  // its bits
};

template <class Bits>
__device__ Known<Bits> known_after(const u32* counts, u32 passes, u64 k) {
    const u32 top = sizeof(Bits) * 8 - 1;
    const Bits all = ~(Bits)0 >> 1;
    Known<Bits> now = {0, 0, 0, top - 11, (Bits)(all & (~(Bits)0 << (top - 11)))};
    for (u32 pass = 0; pass < passes; ++pass) {
        const Digit digit = find_digit(counts + pass * BINS, k - now.above);
        now.prefix |= (Bits)digit.digit << now.shift;
        now.above += digit.above;
        now.known |= now.open;
        now.shift = now.shift > 11 ? now.shift - 11 : 0;
        now.open = all & ~now.known & (~(Bits)0 << now.shift);
    }
    return now;
}

// Pass `pass` of the digits, from the top: how often each occurs among the magnitudes that agree with what is known.
template <class T>
__device__ void count_digits(Source<T> from, u32 pass, u64 k, u32* counts) {
    typedef typename BitsOf<T>::type Bits;
    __shared__ u32 own[BINS];
    const Known<Bits> now = known_after<Bits>(counts, pass, k);
    for (u32 d = threadIdx.x; d < BINS; d += THREADS) own[d] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < from.count; i += grid_threads()) {
        const Bits bits = magnitude_bits(from.values[i]);
        if ((bits & now.known) == now.prefix) atomicAdd(own + (u32)((bits & now.open) >> now.shift), 1u);
    }
    __syncthreads();
    for (u32 d = threadIdx.x; d < BINS; d += THREADS)
        if (own[d]) atomicAdd(counts + pass * BINS + d, own[d]);
}

// The k largest, in index order; ties go to the lower index.
template <class T>
__device__ void take(Source<T> from, u64 k, const u32* counts, u32 passes, u64* status, u32* indices, T* values) {
    typedef typename BitsOf<T>::type Bits;
    const Known<Bits> now = known_after<Bits>(counts, passes, k);
    const u64 ties = k - now.above, tile_size = 4 * THREADS;
    const u32 tiles = (u32)((from.count + tile_size - 1) / tile_size);
    for (u32 tile; (tile = next_tile(status, tiles)) < tiles;) {
        const u64 at = (u64)tile * tile_size + 4 * threadIdx.x;
        T x[4];
        u64 own = 0;  // ties | larger << 31: both are below 2^31
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            if (at + j >= from.count) continue;
            x[j] = from.values[at + j];
            const Bits bits = magnitude_bits(x[j]);
            own += bits > now.prefix ? 1ull << 31 : (u64)(bits == now.prefix);
        }
        u64 total, place = block_scan(own, &total);
        place += tiles_before(status, tile, total);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            if (at + j >= from.count) continue;
            const u64 tied = place & 0x7FFFFFFF, larger = place >> 31;
            const Bits bits = magnitude_bits(x[j]);
            if (bits > now.prefix || (bits == now.prefix && tied < ties)) {
                const u64 to = larger + (tied < ties ? tied : ties);
                indices[to] = from.indices ? from.indices[at + j] : (u32)(at + j);
                values[to] = x[j];
            }
            place += bits > now.prefix ? 1ull << 31 : (u64)(bits == now.prefix);
        }
    }
}

// state: | least magnitude bits | candidates |;  counts: 2048 a pass, zeros at first.
#define TOPK(suffix, T)                                                                                               \
    KERNEL topk_sample_##suffix(const T* dense, const T* gradient, u64 n, u64 k, u64* state, i32* bad) {              \
        if (blockIdx.x == 0) sample(dense, gradient, n, k, state);                                                    \
        const u32 workers = gridDim.x > 1 ? gridDim.x - 1 : 1;                                                        \
        if (bad && blockIdx.x + workers >= gridDim.x)                                                                 \
            find_nonfinite(gradient, n, blockIdx.x + workers - gridDim.x, workers, bad);                              \
    }                                                                                                                 \
    KERNEL topk_collect_##suffix(T* dense, const T* gradient, u64 n, const i32* bad, u64* state, u64* status,         \
                                 u32* indices, T* values, u64 room) {                                                 \
        const BitsOf<T>::type least = (BitsOf<T>::type)state[0];                                                      \
        collect(dense, unless(bad, gradient), n, least, status, indices, values, room, state + 1);                    \
    }                                                                                                                 \
    KERNEL topk_count_##suffix(const T* dense, u64 n, u64 k, const u32* indices, const T* values, u64 room,           \
                               const u64* state, u32 pass, u32* counts) {                                             \
        count_digits(source_of(dense, n, k, indices, values, room, state), pass, k, counts);                          \
    }                                                                                                                 \
    KERNEL topk_take_##suffix(const T* dense, u64 n, u64 k, const u32* indices, const T* values, u64 room,            \
                              const u64* state, const u32* counts, u32 passes, u64* status, u32* taken, T* out) {     \
        take(source_of(dense, n, k, indices, values, room, state), k, counts, passes, status, taken, out);            \
    }                                                                                                                 \
    KERNEL threshold_##suffix(T* dense, const T* gradient, u64 n, const i32* bad, u64 least, u64* status,             \
                              u32* indices, T* values, u64 room, u64* count) {                                        \
        collect(dense, unless(bad, gradient), n, (BitsOf<T>::type)least, status, indices, values, room, count);       \
    }                                                                                                                 \
    KERNEL finite_##suffix(const T* x, u64 n, i32* bad) { find_nonfinite(x, n, blockIdx.x, gridDim.x, bad); }
TOPK(f32, float)
TOPK(f64, double)

template <class T>
__device__ void add(T* dense, const T* gradient, u64 n) {
    const u32 size = Vector<T>::SIZE;
    const u64 vectors = aligned16(dense) && aligned16(gradient) ? n / size : 0;
    for (u64 v = grid_thread(); v < vectors; v += grid_threads()) {
        Vector<T> x = *(const Vector<T>*)(dense + v * size);
        const Vector<T> g = *(const Vector<T>*)(gradient + v * size);
        for (u32 j = 0; j < size; ++j) x.x[j] = accumulated(x.x[j], g.x[j]);
        *(Vector<T>*)(dense + v * size) = x;
    }
    for (u64 i = vectors * size + grid_thread(); i < n; i += grid_threads()) dense[i] = accumulated(dense[i], gradient[i]);
}

// norms[b]: a block of elements by a warp. Element j of it in lane j % 8, in order, then lanes 0+4, 1+5, 2+6, 3+7, then
// 0+2, 1+3, then 0+1, as in kernels/select/block.cpp: so eight lanes of the warp add, and all of it load.
template <class T>
__device__ void block_norms(T* dense, const T* gradient, u64 n, u64 block, u32 l2, double* norms) {
    const u64 blocks = (n + block - 1) / block, stride = grid_threads() / 32;
    for (u64 b = grid_thread() / 32; b < blocks; b += stride) {
        const u64 begin = b * block, end = begin + block < n ? begin + block : n;
        double sum = 0.0;
        for (u64 base = begin; base < end; base += 32) {
            const u64 i = base + lane_number();
            double x = 0.0;
            if (i < end) {
                T value = dense[i];
                if (gradient) dense[i] = value = accumulated(value, gradient[i]);
                x = value < (T)0 ? -(double)value : (double)value;
                if (l2) x = x * x;
            }
            for (u32 part = 0; part < 32; part += 8) sum += __shfl_sync(WHOLE_WARP, x, (lane_number() & 7) + part);
        }
        for (u32 half = 4; half; half /= 2) sum += __shfl_down_sync(WHOLE_WARP, sum, half);
        const double largest = 1.7976931348623157e308;
        if (lane_number() == 0) norms[b] = sum <= largest ? sum : largest;
    }
}

template <class T>
__device__ void gather(const T* dense, const u32* indices, u64 count, T* values) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) values[i] = dense[indices[i]];
}
template <class T>
__device__ void settle(T* dense, const u32* indices, u64 count, const T* values) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) dense[indices ? indices[i] : i] -= values[i];
}

// The first i of sorted a[count] with a[i] >= value, found by a warp: 32 chunks at a time.
__device__ u64 lower_bound(const u32* a, u64 count, u64 value) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 step = (high - low + 31) / 32, probe = low + (lane_number() + 1) * step - 1;
        const u32 below = (u32)__popc(__ballot_sync(WHOLE_WARP, probe < high && a[probe] < value));
        low += below * step;
        high = low + step - 1 < high ? low + step - 1 : high;
    }
    return low;
}

template <class T>
struct Part {
    const u32* indices;  // null: a value for each element
    const T* values;
    u64 count;
};

// A tile of the output is zeroed (`more`: read), summed and scaled in shared memory, then written once.
const u32 SUM_TILE = 2048;

template <class T>
__device__ void sum(T* out, u64 n, T scale, u32 more, u32 parts, const Part<T>* part) {
    __shared__ T sums[SUM_TILE];
    __shared__ u64 range[8][2];
    const u64 begin = (u64)blockIdx.x * SUM_TILE, size = n - begin < SUM_TILE ? n - begin : SUM_TILE;
    for (u32 i = threadIdx.x; i < size; i += THREADS) sums[i] = more ? out[begin + i] : (T)0;
    const u32 p = warp_number();
    if (p < parts && part[p].indices) {
        const u64 from = lower_bound(part[p].indices, part[p].count, begin);
        const u64 to = from + lower_bound(part[p].indices + from, part[p].count - from, begin + size);
        if (lane_number() == 0) range[p][0] = from, range[p][1] = to;
    }
    for (u32 q = 0; q < parts; ++q) {
        __syncthreads();
        if (part[q].indices) {
            for (u64 i = range[q][0] + threadIdx.x; i < range[q][1]; i += THREADS)
                sums[part[q].indices[i] - begin] += part[q].values[i];
        } else {
            for (u32 i = threadIdx.x; i < size; i += THREADS) sums[i] += part[q].values[begin + i];
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < size; i += THREADS) out[begin + i] = scale != (T)1 ? sums[i] * scale : sums[i];
}

#define DENSE(suffix, T)                                                                                              \
    KERNEL add_##suffix(T* dense, const T* gradient, u64 n, const i32* bad) {                                         \
        if (!bad || !*bad) add(dense, gradient, n);                                                                   \
    }                                                                                                                 \
    KERNEL block_norms_##suffix(T* dense, const T* gradient, u64 n, const i32* bad, u64 block, u32 l2, double* norms) { \
        block_norms(dense, unless(bad, gradient), n, block, l2, norms);                                               \
    }                                                                                                                 \
    KERNEL gather_##suffix(const T* dense, const u32* indices, u64 count, T* values) {                                \
        gather(dense, indices, count, values);                                                                        \
    }                                                                                                                 \
    KERNEL scatter_##suffix(const T* values, const u32* places, u64 count, T* out) {                                  \
        for (u64 i = grid_thread(); i < count; i += grid_threads()) out[places[i]] = values[i];                       \
    }                                                                                                                 \
    KERNEL settle_##suffix(T* dense, const u32* indices, u64 count, const T* values, const i32* bad) {                \
        if (!bad || !*bad) settle(dense, indices, count, values);                                                     \
    }                                                                                                                 \
    KERNEL sum_##suffix(T* out, u64 n, T scale, u32 more, u32 parts, const u32* i0, const T* v0, u64 c0,              \
                        const u32* i1, const T* v1, u64 c1, const u32* i2, const T* v2, u64 c2, const u32* i3,        \
                        const T* v3, u64 c3, const u32* i4, const T* v4, u64 c4, const u32* i5, const T* v5, u64 c5,  \
                        const u32* i6, const T* v6, u64 c6, const u32* i7, const T* v7, u64 c7) {                     \
        const Part<T> part[8] = {{i0, v0, c0}, {i1, v1, c1}, {i2, v2, c2}, {i3, v3, c3},                              \
                                 {i4, v4, c4}, {i5, v5, c5}, {i6, v6, c6}, {i7, v7, c7}};                             \
        sum(out, n, scale, more, parts, part);                                                                        \
    }
DENSE(f32, float)
DENSE(f64, double)

// Random-k: sets the bits of the images of 0 .. count-1 in a bitmap of zeros.
KERNEL random_bits(u64 numel, u64 count, u32 seed, u32 parameter, u32 step, u32* bitmap) {
    const Philox4 k = philox4x32(seed, parameter, 0, step, STREAM_RANDOMK, 0);
    const Feistel key = feistel(numel, k.x, k.y, k.z);
    for (u64 i = grid_thread(); i < count; i += grid_threads()) {
        const u32 index = feistel_permute((u32)i, key);
        atomicOr(bitmap + (index >> 5), 1u << (index & 31));
    }
}
