// What the two backends' curve fitting has in common: the choices that a curve rests on, and what is made of the sums
// over its points. kernels/curve_fit/fit_poly.cpp and fit_dexp.cpp draw the sections and say where the formulas come from.
#ifndef HVD_DEEPREDUCE_CURVES_H
#define HVD_DEEPREDUCE_CURVES_H

#include "common/common.h"

#ifndef DR_CUDA
#include <cmath>
#endif

// A sum over a side is taken in blocks of this many elements (the last one filled up with zeros), in float64: within
// a block, element j goes to lane j % 8 in order; then lanes 0+4, 1+5, 2+6, 3+7, then 0+2, 1+3, then 0+1; then the
// blocks in order.
const u64 FIT_BLOCK = 256;

// A decoder can clamp to 0 < least <= largest < infinity, and the result is finite and of the right sign.
DR_HD bool valid_range(float least, float largest) {
    return 0.0f < least && least <= largest && largest <= 3.402823466e+38f;
}

// ---- Piecewise polynomials.
const u32 MAX_DEGREE = 15, MAX_SEGMENTS = 1024;

// Lemma 1 gives p = ceil(2 sqrt(M)) knots for a piecewise linear fit, remark 4 ceil(M / sqrt(2) - 1) for a constant
// one, M = |(C_1 - C_2) - (C_m-1 - C_m)|; p knots make p + 1 segments.
DR_HD u32 heuristic_segments(const float* sorted, u64 m, u32 degree) {
    if (m < 3) return 1;
    const double start = (double)sorted[0] - (double)sorted[1], end = (double)sorted[m - 2] - (double)sorted[m - 1];
    const double change = fabs(start - end);
    const double knots = ceil(degree ? 2.0 * sqrt(change) : change / sqrt(2.0) - 1.0), most = MAX_SEGMENTS - 1;
    return 1 + (u32)(knots < 0.0 ? 0.0 : knots > most ? most : knots);
}

// ---- Two exponentials.

// The least difference of b and d, for rates about 1 and less; in proportion above. The exponentials of closer rates
// are almost one function: a and c would be large numbers that cancel. Rates so spread still make every curve that
// closer ones make, to about gap^2 / 8 of it.
const double GAP = 0.125;

struct Rates {
    float b, d;
};

// Rates within what m points can show (e^-16 from one point to the next), and apart by the gap.
DR_HD Rates spread(double middle, double half, u64 m) {
    const double limit = 16.0 * (double)(i64)m, size = fabs(middle);
    const double least = 0.5 * GAP * (1.0 < size ? size : 1.0);
    half = half < least ? least : half;
    double b = middle - half, d = middle + half;
    b = b < -limit ? -limit : b;
    d = d < 2.0 - limit ? 2.0 - limit : d;
    return {(float)(limit - 2.0 < b ? limit - 2.0 : b), (float)(limit < d ? limit : d)};
}

// The sums of u, w and y, and of their products with q and each other.
struct Sums {
    double u1, uq, uu, uw, uy, w1, wq, ww, wy, y1, yq, yy;
};

// Of u, w, y without their parts along 1 and q.
struct Moments {
    double uu, uw, ww, uy, wy, yy;
};

DR_HD Moments moments_of(const Sums& s, u64 m) {
    const double n = (double)(i64)m, qq = n * (n + 1.0) / (3.0 * (n - 1.0));
    return {s.uu - s.u1 * s.u1 / n - s.uq * s.uq / qq, s.uw - s.u1 * s.w1 / n - s.uq * s.wq / qq,
            s.ww - s.w1 * s.w1 / n - s.wq * s.wq / qq, s.uy - s.u1 * s.y1 / n - s.uq * s.yq / qq,
            s.wy - s.w1 * s.y1 / n - s.wq * s.yq / qq, s.yy - s.y1 * s.y1 / n - s.yq * s.yq / qq};
}

struct Curve {
    float a, c;
    Rates rates;
    double error;  // squared, that is left
};

// The second linear system: a and c for given rates, by least squares over e = e^(b x) and f = e^(d x).
DR_HD Curve curve_of(Rates rates, double ee, double ef, double ff, double ey, double fy, double yy) {
    const double determinant = ee * ff - ef * ef;
    double a = ee > 0.0 ? ey / ee : 0.0, c = 0.0;  // one point, or exponentials that are one function: e alone
    if (determinant > 1e-12 * ee * ff) {
        a = (ey * ff - fy * ef) / determinant;
        c = (ee * fy - ef * ey) / determinant;
    }
    return {(float)a, (float)c, rates, yy - a * ey - c * fy};
}

// Least-squares A, B of the first system give the rates. Where that cannot be used, the next of these is:
//   u and w (nearly) dependent: A = 0, the rates B = wy / ww and 0, an exponential and a constant;
//   complex roots: two rates about their real part;
//   a fit worse than a straight line's: the better of an exponential and a constant, and two rates about 0, which is
//   nearly that line.
// integrate() gives the Moments, solve(rates) a Curve.
template <class Integrate, class Solve>
DR_HD Curve best_curve(u64 m, Integrate integrate, Solve solve) {
    if (m < 3) return solve(spread(0.0, 0.0, m));
    const Moments s = integrate();
    const double single = s.ww > 1e-20 * (double)(i64)m ? s.wy / s.ww : 0.0;
    const double determinant = s.uu * s.ww - s.uw * s.uw;
    double middle = 0.5 * single, half = fabs(middle);
    if (determinant > 1e-12 * s.uu * s.ww) {
        const double A = (s.uy * s.ww - s.wy * s.uw) / determinant, B = (s.uu * s.wy - s.uw * s.uy) / determinant;
        const double squared = 0.25 * B * B + A;
        middle = 0.5 * B;
        half = squared > 0.0 ? sqrt(squared) : 0.0;
    }
    Curve best = solve(spread(middle, half, m));
    if (best.error > s.yy)
        for (u32 way = 0; way < 2; ++way) {
            const Rates rates = way == 0 ? spread(0.5 * single, fabs(0.5 * single), m) : spread(0.0, 0.0, m);
            const Curve other = solve(rates);
            if (other.error < best.error) best = other;
        }
    return best;
}

#endif
