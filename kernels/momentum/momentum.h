// The velocity of deep gradient compression, for one element.
#pragma once

#include "common/common.h"

// `x` limited to the finite numbers, where `most` is the largest; `gradient` if that is not finite.
template <class T>
DR_HD T limited(T x, T gradient, T most) {
    if (!(gradient >= -most && gradient <= most)) return gradient;
    return x > most ? most : x < -most ? -most : x;
}

// The next velocity, and what is added to the residual.
template <class T>
DR_HD void next_velocity(T velocity, T gradient, T factor, T scale, bool nesterov, T most, T* corrected, T* sent) {
    const T g = scale * gradient;
    const T u = nesterov ? factor * limited(velocity + g, gradient, most) : factor * velocity + g;
    *corrected = limited(u, gradient, most);
    *sent = nesterov ? limited(*corrected + g, gradient, most) : *corrected;
}
