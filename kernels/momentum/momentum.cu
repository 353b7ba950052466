// What a rank makes of its gradient before the residual: the CUDA side of momentum.cpp, and what is kept of it.
#include "momentum/momentum.h"

#include "common/device.cuh"

template <class T>
__device__ void correct(const T* velocity, const T* gradient, u64 n, T factor, T scale, u32 nesterov, T most,
                        T* corrected, T* sent) {
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        T u, added;
        next_velocity(velocity[i], gradient[i], factor, scale, nesterov != 0, most, &u, &added);
        corrected[i] = u;
        if (sent != corrected) sent[i] = added;
    }
}
KERNEL momentum_f32(const float* velocity, const float* gradient, u64 n, float factor, float scale, u32 nesterov,
                    float* corrected, float* sent) {
    correct(velocity, gradient, n, factor, scale, nesterov, 3.402823466e38f, corrected, sent);
}
KERNEL momentum_f64(const double* velocity, const double* gradient, u64 n, double factor, double scale, u32 nesterov,
                    double* corrected, double* sent) {
    correct(velocity, gradient, n, factor, scale, nesterov, 1.7976931348623157e308, corrected, sent);
}

template <class T>
__device__ void scale_by_squares(const T* squares, const T* gradient, const T* momentum, u64 n, Scaling<T> by,
                                 T most, T* next, T* added) {
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        T v, sum;
        next_square(squares[i], gradient[i], momentum[i], by, most, &v, &sum);
        next[i] = v;
        added[i] = sum;
    }
}
KERNEL scaled_momentum_f32(const float* squares, const float* gradient, const float* momentum, u64 n, float beta2,
                           float fresh, float correction, float faded, float eps, float scale, float* next,
                           float* added) {
    const Scaling<float> by = {beta2, fresh, correction, faded, eps, scale};
    scale_by_squares(squares, gradient, momentum, n, by, 3.402823466e38f, next, added);
}
KERNEL scaled_momentum_f64(const double* squares, const double* gradient, const double* momentum, u64 n, double beta2,
                           double fresh, double correction, double faded, double eps, double scale, double* next,
                           double* added) {
    const Scaling<double> by = {beta2, fresh, correction, faded, eps, scale};
    scale_by_squares(squares, gradient, momentum, n, by, 1.7976931348623157e308, next, added);
}

// Unless *bad says that the gradient is not finite: velocity = corrected, or 0 if that is null.
FLOAT_KERNEL(keep, (T* velocity, const T* corrected, u64 n, const i32* bad),
    if (bad && *bad) return;
    for (u64 i = grid_thread(); i < n; i += grid_threads()) velocity[i] = corrected ? corrected[i] : (T)0)

// Unless *bad says so: velocity[sent] = 0.
FLOAT_KERNEL(clear, (T* velocity, const u32* sent, u64 count, const i32* bad),
    if (bad && *bad) return;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) velocity[sent[i]] = (T)0)
