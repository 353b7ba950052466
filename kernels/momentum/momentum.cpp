// What a rank makes of its gradient before the residual: see momentum.h.
#include <cmath>
#include <limits>

#include "momentum/momentum.h"

#include "common/cpu.h"

static const u64 RUN = 1 << 20;  // no thread is started for fewer elements

template <class T>
DR_CLONES static void correct(const T* velocity, const T* gradient, u64 begin, u64 end, T factor, T scale, bool nesterov,
                              T* corrected, T* sent) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T u, added;
        next_velocity(velocity[i], gradient[i], factor, scale, nesterov, most, &u, &added);
        corrected[i] = u;
        sent[i] = added;
    }
}

// corrected: the next velocity; sent: what the residual gets; they may be one array.
DR_FLOATS(void, momentum,
          (const T* velocity, const T* gradient, u64 n, double factor, double scale, int nesterov, T* corrected,
           T* sent, int threads),
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        correct(velocity, gradient, begin, end, (T)factor, (T)scale, nesterov != 0, corrected, sent);
    }))

template <class T>
DR_CLONES static void scale_by_squares(const T* squares, const T* gradient, const T* momentum, u64 begin, u64 end,
                                       Scaling<T> by, T* next, T* added) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T v, sum;
        next_square(squares[i], gradient[i], momentum[i], by, most, &v, &sum);
        next[i] = v;
        added[i] = sum;
    }
}

// next: the next mean squares; added: what the residual, `momentum`, gets.
DR_FLOATS(void, scaled_momentum,
          (const T* squares, const T* gradient, const T* momentum, u64 n, double beta2, double fresh,
           double correction, double faded, double eps, double scale, T* next, T* added, int threads),
    const Scaling<T> by = {(T)beta2, (T)fresh, (T)correction, (T)faded, (T)eps, (T)scale};
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        scale_by_squares(squares, gradient, momentum, begin, end, by, next, added);
    }))

template <class T>
DR_CLONES static void advance_velocity(T* __restrict velocity, const T* __restrict gradient, T* __restrict residual,
                                       u64 begin, u64 end, T factor, T scale, bool nesterov) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T u, added;
        next_velocity(velocity[i], gradient[i], factor, scale, nesterov, most, &u, &added);
        velocity[i] = u;
        residual[i] = accumulated(residual[i], added);
    }
}

// In place: velocity becomes the next one, and residual += what it gets.
DR_FLOATS(void, advance_velocity,
          (T* velocity, const T* gradient, T* residual, u64 n, double factor, double scale, int nesterov, int threads),
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        advance_velocity(velocity, gradient, residual, begin, end, (T)factor, (T)scale, nesterov != 0);
    }))

template <class T>
DR_CLONES static void advance_squares(T* __restrict squares, const T* __restrict gradient, T* __restrict momentum,
                                      u64 begin, u64 end, Scaling<T> by) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T v, added;
        next_square(squares[i], gradient[i], momentum[i], by, most, &v, &added);
        squares[i] = v;
        momentum[i] = accumulated(momentum[i], added);
    }
}

// In place: squares become the next ones, and momentum += what it gets.
DR_FLOATS(void, advance_squares,
          (T* squares, const T* gradient, T* momentum, u64 n, double beta2, double fresh, double correction,
           double faded, double eps, double scale, int threads),
    const Scaling<T> by = {(T)beta2, (T)fresh, (T)correction, (T)faded, (T)eps, (T)scale};
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        advance_squares(squares, gradient, momentum, begin, end, by);
    }))
