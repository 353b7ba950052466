// What a rank makes of its gradient before the residual, for one element: the velocity of deep gradient compression,
// and the mean square of scaled momentum.
#pragma once

#include "common/common.h"

// `x` limited to the finite numbers, where `most` is the largest; `gradient` if that is not finite. Without branches, so
// that loops are vectorized.
template <class T>
DR_HD T limited(T x, T gradient, T most) {
    const bool finite = (gradient >= -most) & (gradient <= most);
    const T high = x > most ? most : x, low = high < -most ? -most : high;
    return finite ? low : gradient;
}

// The next velocity, and what is added to the residual.
template <class T>
DR_HD void next_velocity(T velocity, T gradient, T factor, T scale, bool nesterov, T most, T* corrected, T* sent) {
    const T g = scale * gradient;
    const T u = nesterov ? factor * limited(velocity + g, gradient, most) : factor * velocity + g;
    *corrected = limited(u, gradient, most);
    *sent = nesterov ? limited(*corrected + g, gradient, most) : *corrected;
}

DR_HD float root(float x) { return sqrtf(x); }
DR_HD double root(double x) { return sqrt(x); }

// beta2 and 1 - beta2; 1 - beta2^t at step t; 1 - decay; eps; the factor of the gradient.
template <class T>
struct Scaling {
    T beta2, fresh, correction, faded, eps, scale;
};

// The next mean square, and what is added to the residual, which is the momentum: the scaled gradient, less what the
// momentum loses by its decay. A square below 0, which the state of another memory may have, counts as 0. Without
// branches, as above.
template <class T>
DR_HD void next_square(T square, T gradient, T momentum, Scaling<T> by, T most, T* next, T* added) {
    const bool finite = (gradient >= -most) & (gradient <= most);
    const T g = by.scale * gradient, kept = square > 0 ? square : (T)0;
    const T sum = by.beta2 * kept + by.fresh * g * g, v = sum < most ? sum : most;
    const T mean = v / by.correction;
    const T u = g / (root(mean < most ? mean : most) + by.eps);
    const T change = u - by.faded * momentum, high = change < most ? change : most;
    const T low = high > -most ? high : -most;
    *next = finite ? v : gradient;
    *added = finite ? low : gradient;
}
