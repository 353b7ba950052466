// Top-k of a residual and a gradient whose sum is written elsewhere.
#pragma once

#include "common/cpu.h"

DR_API int dr_finite_f32(const u32* words, u64 n, int threads);
DR_API int dr_finite_f64(const u64* words, u64 n, int threads);

inline bool all_finite(const float* x, u64 n, int threads) { return dr_finite_f32((const u32*)x, n, threads); }
inline bool all_finite(const double* x, u64 n, int threads) { return dr_finite_f64((const u64*)x, n, threads); }

// A vector in several pieces of memory, one behind the other.
template <class T>
struct Pieces {
    const u64* addresses;  // of each piece
    const u64* ends;       // where it ends in the vector
    u64 count;             // of the pieces; 0: there is no vector

    const T* at(u64 piece) const { return (const T*)(uintptr_t)addresses[piece]; }
    u64 begin(u64 piece) const { return piece ? ends[piece - 1] : 0; }
    bool finite(int threads) const {
        for (u64 piece = 0; piece < count; ++piece)
            if (!all_finite(at(piece), ends[piece] - begin(piece), threads)) return false;
        return true;
    }
};

// out = dense + grads (if there are none, out is not written), then as dr_topk_f32. `out` is `dense`, or memory apart from
// it and from the pieces. Without `finite`: ERR_NOT_FINITE if a piece (dense, if there are none) has NaN or infinity;
// `dense` is unchanged then, unless it is `out`.
i64 topk_into(const float* dense, const Pieces<float>& grads, float* out, u64 n, u64 k, bool finite, u32* indices,
              float* values, int threads);
