// Fields of equal width, written on the device.
#pragma once

#include "bits/bits.h"
#include "common/device.cuh"

// Each thread builds one word of the packed string from the fields that overlap it:
//
//     word w:      bits   32 w ... 32 w + 31
//     field i:     bits   i width ... (i + 1) width - 1
//
// words: ceil(count * width / 32). This thread is number `thread` of `threads`, which may be all of the grid.
template <class T>
__device__ void pack(const T* values, u64 count, u32 width, u32* words, u64 thread, u64 threads) {
    const u64 total = (count * width + 31) / 32;
    for (u64 w = thread; w < total; w += threads) {
        const u64 begin = w * 32;
        u32 word = 0;
        for (u64 i = begin / width; i < count && i * width < begin + 32; ++i) {
            const u64 at = i * width, value = values[i];
            word |= at >= begin ? (u32)(value << (at - begin)) : (u32)(value >> (begin - at));
        }
        words[w] = word;
    }
}
