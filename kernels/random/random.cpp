// Random-k: the CPU side of random.h.
#include <memory>
#include <new>

#include "random/random.h"
#include "sort/radix.h"

// Calls f(images, number of images) for runs of the images of first .. end-1, in another order. A value that is not yet
// below the domain stays in its lane for another step; new values fill the other lanes.
template <class F>
__attribute__((always_inline)) static inline void feistel_images(const Feistel& key, u64 first, u64 end, F f) {
    const u32 lanes = 512;
    u32 walking[lanes], images[lanes];
    u64 next = first;
    for (u32 left = 0; left || next < end;) {
        while (left < lanes && next < end) walking[left++] = (u32)next++;
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

DR_CLONES static void set_images(const Feistel& key, u64 first, u64 end, u64* bitmap) {
    feistel_images(key, first, end, [=](const u32* images, u32 found) {
        for (u32 i = 0; i < found; ++i) bitmap[images[i] >> 6] |= 1ull << (images[i] & 63);
    });
}

DR_CLONES static void list_images(const Feistel& key, u64 first, u64 end, u32* list) {
    feistel_images(key, first, end, [&](const u32* images, u32 found) {
        std::memcpy(list, images, 4 * found);
        list += found;
    });
}

// indices: the sorted images of first .. first + count - 1. Returns 0, or -1 if memory is short.
DR_API int dr_random_indices(u64 numel, u64 first, u64 count, u32 seed, u32 parameter, u32 step, u32* indices) {
    const Feistel key = random_permutation(numel, seed, parameter, step);
    if (numel / 64 > count) {  // sorting is cheaper than reading a bitmap
        const std::unique_ptr<u32[]> spare(new (std::nothrow) u32[2 * count]);
        if (!spare) return -1;
        list_images(key, first, first + count, spare.get());
        const u32* const sorted = radix_sort(spare.get(), spare.get() + count, count, 0, bits_for(numel));
        if (count) std::memcpy(indices, sorted, 4 * count);
        return 0;
    }
    const u64 words = (numel + 63) / 64;
    const std::unique_ptr<u64[]> bitmap(new (std::nothrow) u64[words]());
    if (!bitmap) return -1;
    set_images(key, first, first + count, bitmap.get());
    u64 found = 0;
    for (u64 w = 0; w < words; ++w)
        for (u64 word = bitmap[w]; word; word &= word - 1)
            indices[found++] = (u32)(w * 64 + (u64)__builtin_ctzll(word));
    return 0;
}
