// The vector instructions that the CPU kernels use, chosen at run time.
#include <algorithm>
#include <cstdlib>

#include "common/cpu.h"

// 0: portable code, 1: AVX2, 2: AVX-512. The environment variable HVD_DEEPREDUCE_VECTOR (portable, avx2) lowers it, so
// that tests reach each level.
DR_API int dr_vector_level() {
#ifdef DR_X86
    static const int level = [] {
        __builtin_cpu_init();
        int best = 0;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) best = 1;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2"))
            best = 2;
        const char* wanted = std::getenv("HVD_DEEPREDUCE_VECTOR");
        if (wanted && std::strcmp(wanted, "portable") == 0) best = 0;
        if (wanted && std::strcmp(wanted, "avx2") == 0) best = std::min(best, 1);
        return best;
    }();
    return level;
#else
    return 0;
#endif
}
