// What a rank makes of its gradient before the residual: see momentum.h.
#include <cmath>
#include <limits>

#include "momentum/momentum.h"

#include "common/cpu.h"

static const u64 RUN = 1 << 20;  // no thread is started for fewer elements

template <class T>
__attribute__((always_inline)) inline void correct(const T* velocity, const T* gradient, u64 begin, u64 end, T factor,
                                                   T scale, bool nesterov, T* corrected, T* sent) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T u, added;
        next_velocity(velocity[i], gradient[i], factor, scale, nesterov, most, &u, &added);
        corrected[i] = u;
        sent[i] = added;
    }
}
DR_CLONES static void run(const float* velocity, const float* gradient, u64 begin, u64 end, float factor, float scale,
                          bool nesterov, float* corrected, float* sent) {
    correct(velocity, gradient, begin, end, factor, scale, nesterov, corrected, sent);
}
DR_CLONES static void run(const double* velocity, const double* gradient, u64 begin, u64 end, double factor,
                          double scale, bool nesterov, double* corrected, double* sent) {
    correct(velocity, gradient, begin, end, factor, scale, nesterov, corrected, sent);
}

// corrected: the next velocity; sent: what the residual gets; they may be one array.
DR_API void dr_momentum_f32(const float* velocity, const float* gradient, u64 n, double factor, double scale,
                            int nesterov, float* corrected, float* sent, int threads) {
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        run(velocity, gradient, begin, end, (float)factor, (float)scale, nesterov != 0, corrected, sent);
    });
}
DR_API void dr_momentum_f64(const double* velocity, const double* gradient, u64 n, double factor, double scale,
                            int nesterov, double* corrected, double* sent, int threads) {
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        run(velocity, gradient, begin, end, factor, scale, nesterov != 0, corrected, sent);
    });
}

template <class T>
__attribute__((always_inline)) inline void scale_by_squares(const T* squares, const T* gradient, const T* momentum,
                                                            u64 begin, u64 end, Scaling<T> by, T* next, T* added) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T v, sum;
        next_square(squares[i], gradient[i], momentum[i], by, most, &v, &sum);
        next[i] = v;
        added[i] = sum;
    }
}
DR_CLONES static void run(const float* squares, const float* gradient, const float* momentum, u64 begin, u64 end,
                          Scaling<float> by, float* next, float* added) {
    scale_by_squares(squares, gradient, momentum, begin, end, by, next, added);
}
DR_CLONES static void run(const double* squares, const double* gradient, const double* momentum, u64 begin, u64 end,
                          Scaling<double> by, double* next, double* added) {
    scale_by_squares(squares, gradient, momentum, begin, end, by, next, added);
}

// next: the next mean squares; added: what the residual, `momentum`, gets.
DR_FLOATS(void, scaled_momentum,
          (const T* squares, const T* gradient, const T* momentum, u64 n, double beta2, double fresh,
           double correction, double faded, double eps, double scale, T* next, T* added, int threads),
    const Scaling<T> by = {(T)beta2, (T)fresh, (T)correction, (T)faded, (T)eps, (T)scale};
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        run(squares, gradient, momentum, begin, end, by, next, added);
    }))

// In place: velocity becomes the next one, and residual += what it gets.
template <class T>
__attribute__((always_inline)) inline void advance(T* __restrict velocity, const T* __restrict gradient,
                                                   T* __restrict residual, u64 begin, u64 end, T factor, T scale,
                                                   bool nesterov) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T u, added;
        next_velocity(velocity[i], gradient[i], factor, scale, nesterov, most, &u, &added);
        velocity[i] = u;
        residual[i] = accumulated(residual[i], added);
    }
}
DR_CLONES static void run(float* velocity, const float* gradient, float* residual, u64 begin, u64 end, float factor,
                          float scale, bool nesterov) {
    advance(velocity, gradient, residual, begin, end, factor, scale, nesterov);
}
DR_CLONES static void run(double* velocity, const double* gradient, double* residual, u64 begin, u64 end, double factor,
                          double scale, bool nesterov) {
    advance(velocity, gradient, residual, begin, end, factor, scale, nesterov);
}
DR_FLOATS(void, advance_velocity,
          (T* velocity, const T* gradient, T* residual, u64 n, double factor, double scale, int nesterov, int threads),
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) {
        run(velocity, gradient, residual, begin, end, (T)factor, (T)scale, nesterov != 0);
    }))

// In place: squares become the next ones, and momentum += what it gets.
template <class T>
__attribute__((always_inline)) inline void advance(T* __restrict squares, const T* __restrict gradient,
                                                   T* __restrict momentum, u64 begin, u64 end, Scaling<T> by) {
    const T most = std::numeric_limits<T>::max();
    for (u64 i = begin; i < end; ++i) {
        T v, added;
        next_square(squares[i], gradient[i], momentum[i], by, most, &v, &added);
        squares[i] = v;
        momentum[i] = accumulated(momentum[i], added);
    }
}
DR_CLONES static void run(float* squares, const float* gradient, float* momentum, u64 begin, u64 end,
                          Scaling<float> by) {
    advance(squares, gradient, momentum, begin, end, by);
}
DR_CLONES static void run(double* squares, const double* gradient, double* momentum, u64 begin, u64 end,
                          Scaling<double> by) {
    advance(squares, gradient, momentum, begin, end, by);
}
DR_FLOATS(void, advance_squares,
          (T* squares, const T* gradient, T* momentum, u64 n, double beta2, double fresh, double correction,
           double faded, double eps, double scale, int threads),
    const Scaling<T> by = {(T)beta2, (T)fresh, (T)correction, (T)faded, (T)eps, (T)scale};
    parallel_runs(n, threads, RUN, [&](int, u64 begin, u64 end) { run(squares, gradient, momentum, begin, end, by); }))
