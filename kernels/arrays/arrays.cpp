// What both ends of an exchange do with a dense vector: add containers into it, read it and settle it at the support.
#include <memory>
#include <new>

#include "sort/radix.h"
#include "common/stream_copy.h"

// One decoded container: values at indices, or (indices null) a value for each element.
template <class T>
struct Part {
    const u32* indices;
    const T* values;
    u64 count;
};

template <class T>
static void sum_run(T* out, u64 begin, u64 end, const Part<T>* parts, int count, T scale) {
    // A block of the output is zeroed, summed and scaled in the second-level cache, then written once.
    constexpr u64 block = 65536 / sizeof(T);
    alignas(64) thread_local T sums[block];
    std::vector<u64> at((size_t)count);
    for (int p = 0; p < count; ++p) {
        if (!parts[p].indices) continue;
        u64 low = 0, high = parts[p].count;
        while (low < high) {
            const u64 middle = (low + high) / 2;
            if (parts[p].indices[middle] < begin) low = middle + 1;
            else high = middle;
        }
        at[(size_t)p] = low;
    }
    for (u64 first = begin; first < end; first += block) {
        const u64 size = first + block < end ? block : end - first;
        std::memset(sums, 0, size * sizeof(T));
        for (int p = 0; p < count; ++p) {
            const Part<T>& part = parts[p];
            if (part.indices) {
                u64 i = at[(size_t)p];
                for (; i < part.count && part.indices[i] - first < size; ++i)
                    sums[part.indices[i] - first] += part.values[i];
                at[(size_t)p] = i;
            } else {
                for (u64 i = 0; i < size; ++i) sums[i] += part.values[first + i];
            }
        }
        if (scale != (T)1)
            for (u64 i = 0; i < size; ++i) sums[i] *= scale;
        stream_copy(out + first, sums, size * sizeof(T));
    }
    stream_fence();
}

template <class T>
static void sum(T* out, u64 n, const u64* indices, const u64* values, const u64* counts, int count, double scale,
                int threads) {
    std::vector<Part<T>> parts;
    for (int p = 0; p < count; ++p) parts.push_back({(const u32*)indices[p], (const T*)values[p], counts[p]});
    parallel_runs(n, threads, 1 << 20,
                  [&](int, u64 begin, u64 end) { sum_run<T>(out, begin, end, parts.data(), count, (T)scale); });
}

// out[i] = scale * (sum over parts, in their order, of the part's value at i). `indices` and `values` hold addresses;
// the indices of a part are sorted, unique and below n.
DR_API void dr_sum_f32(float* out, u64 n, const u64* indices, const u64* values, const u64* counts, int count,
                       double scale, int threads) {
    sum<float>(out, n, indices, values, counts, count, scale, threads);
}
DR_API void dr_sum_f64(double* out, u64 n, const u64* indices, const u64* values, const u64* counts, int count,
                       double scale, int threads) {
    sum<double>(out, n, indices, values, counts, count, scale, threads);
}

DR_API void dr_gather_f32(const float* dense, const u32* indices, u64 count, float* values) {
    for (u64 i = 0; i < count; ++i) values[i] = dense[indices[i]];
}
DR_API void dr_gather_f64(const double* dense, const u32* indices, u64 count, double* values) {
    for (u64 i = 0; i < count; ++i) values[i] = dense[indices[i]];
}

// dense[indices] -= values. The lines are far apart and known early, so they are asked for ahead.
template <class T, class V>
static void settle(T* dense, const u32* indices, u64 count, const V* values) {
    const u64 ahead = 32;
    for (u64 i = 0; i < count; ++i) {
        if (i + ahead < count) __builtin_prefetch(dense + indices[i + ahead], 1);
        dense[indices[i]] -= (T)values[i];
    }
}
DR_API void dr_settle_f32(float* dense, const u32* indices, u64 count, const float* values) {
    settle(dense, indices, count, values);
}
DR_API void dr_settle_f64(double* dense, const u32* indices, u64 count, const double* values) {
    settle(dense, indices, count, values);
}

DR_CLONES static u32 checksum(const u8* bytes, u64 words) {
    u32 sum = 0;
    for (u64 i = 0; i < words; ++i) {
        u32 word;
        std::memcpy(&word, bytes + 4 * i, 4);
        sum += checksum_word(word, (u32)i);
    }
    return sum;
}

// The sum of checksum_word over all 32-bit words of a container but its word 3, where the sum is kept, modulo 2^32.
DR_API u32 dr_checksum(const u8* bytes, u64 size) {
    u32 own;
    std::memcpy(&own, bytes + 12, 4);
    return checksum(bytes, size / 4) - checksum_word(own, 3);
}

// The images of 0 .. count-1, in another order, in runs: f(run, its size). Values that must walk on stay among the
// lanes, and new ones fill them up.
template <class F>
__attribute__((always_inline)) static inline void feistel_images(const Feistel& key, u64 count, F f) {
    const u32 lanes = 512;
    u32 walking[lanes], images[lanes];
    u64 next = 0;
    for (u32 left = 0; left || next < count;) {
        while (left < lanes && next < count) walking[left++] = (u32)next++;
        for (u32 i = 0; i < left; ++i) walking[i] = feistel_step(walking[i], key);
        u32 found = 0, still = 0;
        for (u32 i = 0; i < left; ++i) {
            const u32 value = walking[i];
            const bool inside = value < key.domain;
            images[found] = walking[still] = value;
            found += inside;
            still += !inside;
        }
        left = still;
        f(images, found);
    }
}

DR_CLONES static void set_images(const Feistel& key, u64 count, u64* bitmap) {
    feistel_images(key, count, [=](const u32* images, u32 found) {
        for (u32 i = 0; i < found; ++i) bitmap[images[i] >> 6] |= 1ull << (images[i] & 63);
    });
}

DR_CLONES static void list_images(const Feistel& key, u64 count, u32* list) {
    feistel_images(key, count, [&](const u32* images, u32 found) {
        std::memcpy(list, images, 4 * found);
        list += found;
    });
}

// Random-k: the sorted images of 0 .. count-1 under the keyed permutation of [0, numel). -1 where there is no memory.
DR_API int dr_random_indices(u64 numel, u64 count, u32 seed, u32 parameter, u32 step, u32* indices) {
    const Philox4 k = philox4x32(seed, parameter, 0, step, STREAM_RANDOMK, 0);
    const Feistel key = feistel(numel, k.x, k.y, k.z);
    if (numel / 64 > count) {  // fewer words to sort than a bitmap has
        const std::unique_ptr<u32[]> spare(new (std::nothrow) u32[2 * count]);
        if (!spare) return -1;
        list_images(key, count, spare.get());
        const u32* const sorted = radix_sort(spare.get(), spare.get() + count, count, 0, bits_for(numel));
        if (count) std::memcpy(indices, sorted, 4 * count);
        return 0;
    }
    const u64 words = (numel + 63) / 64;
    const std::unique_ptr<u64[]> bitmap(new (std::nothrow) u64[words]());
    if (!bitmap) return -1;
    set_images(key, count, bitmap.get());
    u64 found = 0;
    for (u64 w = 0; w < words; ++w)
        for (u64 word = bitmap[w]; word; word &= word - 1)
            indices[found++] = (u32)(w * 64 + (u64)__builtin_ctzll(word));
    return 0;
}
