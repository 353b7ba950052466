// Copies to memory that is not read again soon.
#pragma once

#include "common/cpu.h"

#ifdef DR_X86
#include <immintrin.h>
#endif

static const u64 STREAMED = 256 << 10;  // bytes from which on an array is not written through the cache

// Stores that bypass the cache are fast for whole lines. Where blocks of an array meet within a line, a processor that
// has to write to it both ways waits for memory, so blocks end with lines.
template <class T>
inline u64 before_line(const T* at) { return ((u64)-(uintptr_t)at & 63) / sizeof(T); }  // elements up to the next line
template <class T>
inline u64 past_line(const T* at) { return ((uintptr_t)at & 63) / sizeof(T); }  // elements since the last line's end

// Copies with stores that bypass the cache, so that dst is not read into the cache before it is written.
inline void stream_copy(void* dst, const void* src, u64 bytes) {
#ifdef DR_X86
    u8* d = (u8*)dst;
    const u8* s = (const u8*)src;
    const u64 head = (u64)(-(uintptr_t)d & 15) < bytes ? (u64)(-(uintptr_t)d & 15) : bytes;
    std::memcpy(d, s, head);
    d += head, s += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, d += 64, s += 64)
        for (int j = 0; j < 4; ++j)
            _mm_stream_si128((__m128i*)(d + 16 * j), _mm_loadu_si128((const __m128i*)(s + 16 * j)));
    std::memcpy(d, s, bytes);
#else
    std::memcpy(dst, src, bytes);
#endif
}

// To be called before another thread reads what stream_copy has written.
inline void stream_fence() {
#ifdef DR_X86
    _mm_sfence();
#endif
}
