// Block norms: the gradient is added to the residual, and the norm of each block is taken, in one pass.
#include <limits>
#include <cfloat>
#include <cmath>

#include "common/cpu.h"

// Four lanes: the compiler keeps vectors of this size in registers, and compares them without loops.
typedef double Lanes __attribute__((vector_size(32)));

// The order of summation, the same on every machine and on the GPU: float64, element j of a block in lane j % 8, then
//
//     lane 0 += 4, 1 += 5, 2 += 6, 3 += 7;   then   0 += 2, 1 += 3;   then   0 += 1
//
// The l2 norm is left squared, which orders blocks in the same way.

// Blocks of one element: the lanes' sum is the element.
template <class T>
DR_CLONES static void element_norms(T* dense, const T* grad, bool l2, u64 first, u64 last, double* norms) {
    for (u64 i = first; i < last; ++i) {
        if (grad) dense[i] = accumulated(dense[i], grad[i]);
        const double x = std::fabs((double)dense[i]), norm = l2 ? x * x : x;
        norms[i] = norm <= DBL_MAX ? norm : DBL_MAX;
    }
}

template <class T>
DR_CLONES static void block_norms(T* dense, const T* grad, u64 n, u64 block, bool l2, u64 first, u64 last,
                                  double* norms) {
    typedef T Four __attribute__((vector_size(4 * sizeof(T))));
    const Four most = Four{} + std::numeric_limits<T>::max();
    const auto add = [=](u64 i, Lanes& sums) {
        Four x;
        std::memcpy(&x, dense + i, sizeof x);
        if (grad) {
            Four g;
            std::memcpy(&g, grad + i, sizeof g);
            x += g;  // as `accumulated`
            x = x < most ? x : most;
            x = x > -most ? x : -most;
            std::memcpy(dense + i, &x, sizeof x);
        }
        const Lanes wide = __builtin_convertvector(l2 ? x : x < (T)0 ? -x : x, Lanes);
        sums += l2 ? wide * wide : wide;
    };
    for (u64 b = first; b < last; ++b) {
        const u64 begin = b * block, end = begin + block < n ? begin + block : n;
        Lanes low = {}, high = {};
        u64 i = begin;
        for (; i + 8 <= end; i += 8) {
            add(i, low);
            add(i + 4, high);
        }
        double lane[8];
        std::memcpy(lane, &low, sizeof low);
        std::memcpy(lane + 4, &high, sizeof high);
        for (u64 j = 0; i < end; ++i, ++j) {
            if (grad) dense[i] = accumulated(dense[i], grad[i]);
            const double x = std::fabs((double)dense[i]);
            lane[j] += l2 ? x * x : x;
        }
        for (int half = 4; half; half /= 2)
            for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
        norms[b] = lane[0] <= DBL_MAX ? lane[0] : DBL_MAX;
    }
}

template <class T>
static void block_norms(T* dense, const T* grad, u64 n, u64 block, bool l2, double* norms, int threads) {
    const u64 blocks = (n + block - 1) / block, grain = block < (1 << 20) ? (1 << 20) / block : 1;
    parallel_runs(blocks, threads, grain, [&](int, u64 first, u64 last) {
        if (block == 1) return element_norms(dense, grad, l2, first, last, norms);
        block_norms(dense, grad, n, block, l2, first, last, norms);
    });
}

// dense += grad (unless null), then norms[b] is the sum of squares (l2) or of magnitudes of the elements
// [b * block, (b + 1) * block), at most the largest float64. block >= 1.
DR_FLOATS(void, block_norms, (T* dense, const T* grad, u64 n, u64 block, int l2, double* norms, int threads),
    block_norms(dense, grad, n, block, l2 != 0, norms, threads))
