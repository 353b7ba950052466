// Accumulate and select: the CUDA side of select.cpp.
//
// Top-k takes six launches (nine for float64), and the host waits for none of them:
//     sample      finds a magnitude that a little more than k elements reach; tells whether the gradient is finite
//     collect     dense += gradient; the elements that reach the magnitude, in index order, are the candidates
//     count (x3)  finds the k-th largest magnitude of the candidates, eleven bits per launch (float64: x6)
//     take        takes the larger ones, and the first of equal ones, in index order
// If the sample misled (there are fewer than k candidates, or more than there is room for), count and take read all
// elements in place of the candidates, which is slower and gives the same result. If fewer than k elements are not zero,
// take fills up with the first zeros and counts them, so that what it writes are valid indices in any case.
//
// `bad` (or null): if *bad is not 0, the gradient is not finite, and nothing is accumulated.
#include "arrays/finite.cuh"

const u32 BINS = 2048;  // of a digit of eleven bits, as in ops/select.py
const u32 SAMPLES = 32 * THREADS;

struct Digit {
    u32 digit;
    u64 above;  // the number of elements with larger digits
};

// The digit of the k-th largest element (k >= 1). counts: of the elements with each digit.
__device__ Digit find_digit(const u32* counts, u64 k) {
    __shared__ Digit found;
    const u32 each = BINS / THREADS, first = BINS - 1 - each * threadIdx.x;
    u64 sum = 0, total;
    for (u32 j = 0; j < each; ++j) sum += counts[first - j];
    u64 above = block_scan(sum, &total);
    if (above < k && k <= above + sum) {
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

// Blocks 0 .. samplers - 1, of which each thread takes a sample: many blocks, since the places are far apart and a
// multiprocessor waits for only so many at once. The last block to have its samples goes on. state[0]: the least
// magnitude bits of a candidate; 1, so that all elements but zeros are candidates, if no sample can tell (there are few
// elements, or k is nearly n). keys: a place for each sample; the caller gives that of the candidates, which come later.
// *taken: how many samplers are ready; zero before the launch.
template <class T>
__device__ void sample(const T* dense, const T* gradient, u64 n, u64 k, u32 samplers, u32* keys, u64* state,
                       u32* taken) {
    const u32 key_bits = sizeof(T) == 4 ? 0 : 32;
    const u64 samples = n / 8 < SAMPLES ? n / 8 : SAMPLES;
    const double expected = (double)k * (double)samples / (double)n, deviation = sqrt(expected);
    const u64 rank = (u64)(expected + 5.0 * (deviation > 2.0 ? deviation : 2.0));
    if (samples < 512 || rank >= samples) {
        if (grid_thread() == 0) state[0] = 1;
        return;
    }
    __shared__ u32 counts[BINS];
    __shared__ bool last;
    const u64 i = grid_thread();
    if (i < samples) {
        // Divisions of 64 bits take long; nearly always the number of samples is a power of two.
        const bool all = samples == SAMPLES;
        const u64 first = all ? n * i / SAMPLES : n * i / samples;
        const u64 next = all ? n * (i + 1) / SAMPLES : n * (i + 1) / samples;
        const u64 at = first + fmix32((u32)i) % (u32)(next - first);
        *(volatile u32*)(keys + i) =
            (u32)((u64)magnitude_bits(gradient ? accumulated(dense[at], gradient[at]) : dense[at]) >> key_bits);
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(taken, 1u) + 1 == samplers;
    __syncthreads();
    if (!last) return;
    __threadfence();
    u32 key[SAMPLES / THREADS];
#pragma unroll
    for (u32 j = 0; j < SAMPLES / THREADS; ++j) {
        const u32 s = j * THREADS + threadIdx.x;
        key[j] = s < samples ? *(const volatile u32*)(keys + s) : 0;
    }
    u32 prefix = 0;
    u64 left = rank + 1;
    for (u32 shift = 20;; shift -= 11) {
        for (u32 d = threadIdx.x; d < BINS; d += THREADS) counts[d] = 0;
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < SAMPLES / THREADS; ++j)
            if (j * THREADS + threadIdx.x < samples && key[j] >> (shift + 11) == prefix >> (shift + 11))
                atomicAdd(counts + (key[j] >> shift & (BINS - 1)), 1u);
        __syncthreads();
        const Digit digit = find_digit(counts, left);
        prefix |= digit.digit << shift;
        left -= digit.above;
        if (shift == 9) break;
    }
    const u64 least = (u64)prefix << key_bits;
    if (threadIdx.x == 0) state[0] = least ? least : 1;
}

// dense += gradient (unless null), then the elements with at least `least` magnitude bits go, in index order, to
// `indices` and `values`, the first `room` of them. *count: how many there are.
//
//     a tile:  four rows of THREADS vectors of 16 bytes; vector v of row r begins with element (r * THREADS + v) * SIZE,
//              less `lead`, so that vectors begin at multiples of 16 bytes in memory
template <class T>
__device__ void collect(T* __restrict__ dense, const T* __restrict__ gradient, u64 n, typename BitsOf<T>::type least,
                        u64* status, u32* indices, T* values, u64 room, u64* count) {
    const u32 size = Vector<T>::SIZE, rows = 4;
    const u64 tile_size = (u64)rows * THREADS * size;
    const u32 lead = (u32)((u64)dense & 15) / sizeof(T);
    const u32 tiles = (u32)((n + lead + tile_size - 1) / tile_size);
    const bool vectors = !gradient || ((u64)gradient & 15) == ((u64)dense & 15);
    for (u32 tile; (tile = next_tile(status, tiles)) < tiles;) {
        Vector<T> x[rows], g[rows];
        u32 keep[rows];
        u64 kept = 0;  // 16 bits a row
        // All loads come before the first store, so that they wait for the memory together.
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
            const i64 at = (i64)((u64)tile * tile_size + ((u64)r * THREADS + threadIdx.x) * size) - lead;
            if (vectors && at >= 0 && (u64)at + size <= n) {
                x[r] = *(const Vector<T>*)(dense + at);
                if (gradient) g[r] = *(const Vector<T>*)(gradient + at);
            } else {
                for (u32 j = 0; j < size; ++j) {
                    const bool there = at + (i64)j >= 0 && (u64)(at + j) < n;
                    x[r].x[j] = there ? dense[at + j] : (T)0;
                    g[r].x[j] = there && gradient ? gradient[at + j] : (T)0;
                }
            }
        }
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
            const i64 at = (i64)((u64)tile * tile_size + ((u64)r * THREADS + threadIdx.x) * size) - lead;
            if (gradient) {
                for (u32 j = 0; j < size; ++j) x[r].x[j] = accumulated(x[r].x[j], g[r].x[j]);
                if (vectors && at >= 0 && (u64)at + size <= n) {
                    *(Vector<T>*)(dense + at) = x[r];
                } else {
                    for (u32 j = 0; j < size; ++j)
                        if (at + (i64)j >= 0 && (u64)(at + j) < n) dense[at + j] = x[r].x[j];
                }
            }
            keep[r] = 0;
            for (u32 j = 0; j < size; ++j)
                if (at + (i64)j >= 0 && (u64)(at + j) < n) keep[r] |= (u32)(magnitude_bits(x[r].x[j]) >= least) << j;
            kept |= (u64)__popc(keep[r]) << (16 * r);
        }
        u64 total, before = block_scan(kept, &total);
        u64 sum = 0;
        for (u32 r = 0; r < rows; ++r) sum += total >> (16 * r) & 0xFFFF;
        u64 place = tiles_before(status, tile, sum);
        if (threadIdx.x == 0 && tile == tiles - 1) *count = place + sum;
#pragma unroll
        for (u32 r = 0; r < rows; ++r) {
            const u64 at = (u64)tile * tile_size + ((u64)r * THREADS + threadIdx.x) * size - lead;
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

// What count and take read: the candidates, or all elements (indices null).
template <class T>
struct Source {
    const u32* indices;
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

// What is known of the k-th largest magnitude after some passes.
template <class Bits>
struct Known {
    Bits prefix, known;  // its known bits, and a mask of them
    u64 above;           // the number of elements that are larger in these bits
    u32 shift;           // of the next digit
    Bits open;           // a mask of the next digit
};

template <class Bits>
__device__ Known<Bits> known_at_first() {
    const u32 top = sizeof(Bits) * 8 - 1;
    return {0, 0, 0, top - 11, (Bits)((~(Bits)0 >> 1) & (~(Bits)0 << (top - 11)))};
}
template <class Bits>
__device__ void learn_digit(Known<Bits>& now, const u32* counts, u64 k) {
    const Digit digit = find_digit(counts, k - now.above);
    now.prefix |= (Bits)digit.digit << now.shift;
    now.above += digit.above;
    now.known |= now.open;
    now.shift = now.shift > 11 ? now.shift - 11 : 0;
    now.open = (~(Bits)0 >> 1) & ~now.known & (~(Bits)0 << now.shift);
}
template <class Bits>
__device__ Known<Bits> known_after(const u32* counts, u32 passes, u64 k) {
    Known<Bits> now = known_at_first<Bits>();
    for (u32 pass = 0; pass < passes; ++pass) learn_digit(now, counts + pass * BINS, k);
    return now;
}

// Counts digit `pass`, from the top, of the magnitudes that agree with what is known.
template <class T>
__device__ void count_digits(Source<T> from, u32 pass, u64 k, u32* counts) {
    typedef typename BitsOf<T>::type Bits;
    __shared__ u32 local[BINS];
    const Known<Bits> now = known_after<Bits>(counts, pass, k);
    for (u32 d = threadIdx.x; d < BINS; d += THREADS) local[d] = 0;
    __syncthreads();
    for (u64 i = grid_thread(); i < from.count; i += grid_threads()) {
        const Bits bits = magnitude_bits(from.values[i]);
        if ((bits & now.known) == now.prefix) atomicAdd(local + (u32)((bits & now.open) >> now.shift), 1u);
    }
    __syncthreads();
    for (u32 d = threadIdx.x; d < BINS; d += THREADS)
        if (local[d]) atomicAdd(counts + pass * BINS + d, local[d]);
}

// The k largest, in index order; of equal magnitudes those of lower index. The number of zeros among them is added to
// *zeros.
template <class T>
__device__ void take(Source<T> from, u64 k, const u32* counts, u32 passes, u64* status, u32* indices, T* values,
                     u64* zeros) {
    typedef typename BitsOf<T>::type Bits;
    const Known<Bits> now = known_after<Bits>(counts, passes, k);
    if (now.prefix == 0 && grid_thread() == 0) atomicAdd(zeros, k - now.above);
    const u64 ties = k - now.above, tile_size = 4 * THREADS;
    const u32 tiles = (u32)((from.count + tile_size - 1) / tile_size);
    for (u32 tile; (tile = next_tile(status, tiles)) < tiles;) {
        const u64 at = (u64)tile * tile_size + 4 * threadIdx.x;
        T x[4];
        u64 sum = 0;  // ties | larger << 31: both are below 2^31
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            if (at + j >= from.count) continue;
            x[j] = from.values[at + j];
            const Bits bits = magnitude_bits(x[j]);
            sum += bits > now.prefix ? 1ull << 31 : (u64)(bits == now.prefix);
        }
        u64 total, place = block_scan(sum, &total);
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

// state: | least magnitude bits of a candidate | number of candidates |. counts: BINS per pass, zeros before the
// launches.

// The first blocks sample. If `bad` is not null, the others look for NaN and infinity. state[1], which collect sets to the
// number of candidates, counts the samplers until then.
template <class T>
__device__ void sample_and_check(const T* dense, const T* gradient, u64 n, u64 k, u32 samplers, u32* keys, u64* state,
                                 i32* bad) {
    if (blockIdx.x < samplers) sample(dense, gradient, n, k, samplers, keys, state, (u32*)(state + 1));
    else if (bad) find_nonfinite(gradient, n, blockIdx.x - samplers, gridDim.x - samplers, bad);
}
FLOAT_KERNEL(topk_sample, (const T* dense, const T* gradient, u64 n, u64 k, u32 samplers, u32* keys, u64* state,
                           i32* bad),
    sample_and_check(dense, gradient, n, k, samplers, keys, state, bad))

FLOAT_KERNEL(topk_collect, (T* dense, const T* gradient, u64 n, const i32* bad, u64* state, u64* status, u32* indices,
                            T* values, u64 room),
    collect(dense, unless(bad, gradient), n, (BitsOf<T>::type)state[0], status, indices, values, room, state + 1))

FLOAT_KERNEL(topk_count, (const T* dense, u64 n, u64 k, const u32* indices, const T* values, u64 room, const u64* state,
                          u32 pass, u32* counts),
    count_digits(source_of(dense, n, k, indices, values, room, state), pass, k, counts))

FLOAT_KERNEL(topk_take, (const T* dense, u64 n, u64 k, const u32* indices, const T* values, u64 room, const u64* state,
                         const u32* counts, u32 passes, u64* status, u32* taken, T* out, u64* zeros),
    take(source_of(dense, n, k, indices, values, room, state), k, counts, passes, status, taken, out, zeros))

// least: the magnitude bits that an element must have. *count: how many elements have them.
FLOAT_KERNEL(threshold, (T* dense, const T* gradient, u64 n, const i32* bad, u64 least, u64* status, u32* indices,
                         T* values, u64 room, u64* count),
    collect(dense, unless(bad, gradient), n, (BitsOf<T>::type)least, status, indices, values, room, count))

// dense += gradient (unless null), then the k largest of each chunk, `last` of the last one, chunk after chunk; of equal
// magnitudes those of lower index, zeros too. The number of zeros is added to *zeros. A block takes a chunk, and finds
// its k-th largest magnitude by counting digits of eleven bits. It has HELD elements a thread of it in registers, so that
// their loads are under way together: a chunk that is not larger is read once.
//
//     held:   | warp 0: row 0, row 1, ... | warp 1: row 0, row 1, ... | ...      a row: one element for each lane
template <class T>
__device__ void topk_of_chunks(T* dense, const T* gradient, u64 n, u64 chunk, u64 k, u64 last, u32* indices, T* values,
                               u64* zeros) {
    typedef typename BitsOf<T>::type Bits;
    const u32 HELD = 64 / sizeof(T);
    __shared__ u32 counts[BINS];
    const u64 chunks = (n + chunk - 1) / chunk;
    const u32 of_thread = warp_number() * HELD * 32 + lane_number(), lanes_before = (1u << lane_number()) - 1;
    for (u64 c = blockIdx.x; c < chunks; c += gridDim.x) {
        const u64 begin = c * chunk, most = c + 1 == chunks ? last : k;
        const u32 size = (u32)(n - begin < chunk ? n - begin : chunk);
        T x[HELD];
        const auto load = [&](u32 first, const T* from, T* to) {
#pragma unroll
            for (u32 row = 0; row < HELD; ++row) to[row] = first + 32 * row < size ? from[begin + first + 32 * row] : (T)0;
        };
        Known<Bits> now = known_at_first<Bits>();
        for (const T* added = gradient; now.open; added = nullptr) {
            for (u32 d = threadIdx.x; d < BINS; d += THREADS) counts[d] = 0;
            __syncthreads();
            for (u32 base = 0; base < size; base += HELD * THREADS) {
                const u32 first = base + of_thread;
                if (!now.known || size > HELD * THREADS) load(first, dense, x);
                if (added) {
                    T more[HELD];
                    load(first, added, more);
#pragma unroll
                    for (u32 row = 0; row < HELD; ++row) {
                        x[row] = accumulated(x[row], more[row]);
                        if (first + 32 * row < size) dense[begin + first + 32 * row] = x[row];
                    }
                }
#pragma unroll
                for (u32 row = 0; row < HELD; ++row) {
                    const Bits bits = magnitude_bits(x[row]);
                    if (first + 32 * row < size && (bits & now.known) == now.prefix)
                        atomicAdd(counts + (u32)((bits & now.open) >> now.shift), 1u);
                }
            }
            __syncthreads();
            learn_digit(now, counts, most);
        }
        const u64 ties = most - now.above;
        if (now.prefix == 0 && threadIdx.x == 0) atomicAdd(zeros, ties);
        u64 before = 0;  // as in `take`: ties | larger << 31
        for (u32 base = 0; base < size; base += HELD * THREADS) {
            const u32 first = base + of_thread;
            if (size > HELD * THREADS) load(first, dense, x);
            // The lanes of a row whose elements are larger, or tied.
            const auto larger = [&](u32 row) {
                return __ballot_sync(WHOLE_WARP, first + 32 * row < size && magnitude_bits(x[row]) > now.prefix);
            };
            const auto tied = [&](u32 row) {
                return __ballot_sync(WHOLE_WARP, first + 32 * row < size && magnitude_bits(x[row]) == now.prefix);
            };
            u64 of_warp = 0, total;
#pragma unroll
            for (u32 row = 0; row < HELD; ++row) of_warp += (u64)__popc(larger(row)) << 31 | (u32)__popc(tied(row));
            u64 place = before + warps_before(of_warp, &total);
            before += total;
#pragma unroll
            for (u32 row = 0; row < HELD; ++row) {
                const u32 above = larger(row), equal = tied(row), own = lanes_before + 1;
                const u64 ties_before = (place & 0x7FFFFFFF) + (u32)__popc(equal & lanes_before);
                if (above & own || (equal & own && ties_before < ties)) {
                    const u64 to = c * k + (place >> 31) + (u32)__popc(above & lanes_before) +
                                   (ties_before < ties ? ties_before : ties);
                    indices[to] = (u32)begin + first + 32 * row;
                    values[to] = x[row];
                }
                place += (u64)__popc(above) << 31 | (u32)__popc(equal);
            }
        }
    }
}
FLOAT_KERNEL(topk_of_chunks, (T* dense, const T* gradient, u64 n, const i32* bad, u64 chunk, u64 k, u64 last,
                              u32* indices, T* values, u64* zeros),
    topk_of_chunks(dense, unless(bad, gradient), n, chunk, k, last, indices, values, zeros))
