// What the CPU kernels share: the C ABI, the run-time choice of vector code, threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "common/common.h"

#define DR_API extern "C" __attribute__((visibility("default")))

// The function for two types T: dr_<name>_f32 and dr_<name>_f64, for floats; dr_<name>8 and dr_<name>32, for codes.
#define DR_FLOATS(result, name, parameters, ...)                                    \
    namespace of_f32 { DR_API result dr_##name##_f32 parameters { __VA_ARGS__; } }  \
    namespace of_f64 { DR_API result dr_##name##_f64 parameters { __VA_ARGS__; } }
#define DR_CODES(result, name, parameters, ...)                                     \
    namespace of_u8 { DR_API result dr_##name##8 parameters { __VA_ARGS__; } }      \
    namespace of_u32 { DR_API result dr_##name##32 parameters { __VA_ARGS__; } }

#if defined(__x86_64__) && defined(__GNUC__)
#define DR_X86 1
// Functions whose loops the compiler vectorizes are compiled for three instruction sets; the loader chooses one.
#if !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define DR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef DR_CLONES
#define DR_CLONES
#endif

// The vector instructions to use: 0 portable code, 1 AVX2, 2 AVX-512.
DR_API int dr_vector_level();

// Splits [0, n) into at most `threads` runs, at multiples of `grain`, and calls f(thread, begin, end) for all of them
// at the same time. The split depends only on n and `threads`, so results can be joined in order. An exception of a run
// (only std::bad_alloc occurs) is rethrown after all runs have ended.
template <class F>
void parallel_runs(u64 n, int threads, u64 grain, F f) {
    const u64 grains = (n + grain - 1) / grain;
    u64 count = threads < 1 ? 1 : (u64)threads;
    if (count > grains) count = grains ? grains : 1;
    const auto begin = [&](u64 t) { return t == count ? n : (grains * t / count) * grain; };
    std::exception_ptr failure;
    std::mutex guard;
    const auto run = [&](u64 t) {
        try {
            f((int)t, begin(t), begin(t + 1));
        } catch (...) {
            const std::lock_guard<std::mutex> lock(guard);
            failure = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve((size_t)count);
    for (u64 t = 1; t < count; ++t) {
        try {
            others.emplace_back(run, t);
        } catch (const std::system_error&) {
            run(t);  // the system has no more threads, so the run takes place here
        }
    }
    run(0);
    for (auto& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
}

inline u64 load64(const u8* p) {
    u64 word;
    std::memcpy(&word, p, 8);
    return word;
}

// Eight bytes from `p` on. Only those before `end` are read; the others are zero.
inline u64 load64_tail(const u8* p, const u8* end) {
    u64 word = 0;
    if (p < end) std::memcpy(&word, p, end - p < 8 ? (size_t)(end - p) : 8);
    return word;
}
