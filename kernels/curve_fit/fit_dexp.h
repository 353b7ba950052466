// y = a e^(b x) + c e^(d x) through sorted values (DeepReduce, section 5 and appendix E). The section, in 32-bit words:
//
//     section:  | positives | negatives | side of the positives | side of the negatives |
//     side:     | least float32 | largest float32 | a | b | c | d |  (float32)
//
// A side without values is left out. y is the magnitude as a share of `largest`, and falls on both sides: point i of a
// side of m, counted from its largest magnitude, has x = i * (1 / (m - 1)), or 0 for m = 1. An exponential with a
// positive rate is e^(b (x - 1)), so that no term exceeds 1, and a and c are about as large as y.
#pragma once

#include "curve_fit/curves.h"

// e^x for finite x, in float64 operations alone (no library's exp, whose last bit differs between machines):
// x = n ln 2 + r with n an integer and |r| <= 0.347, e^r by its Taylor series to r^13, times 2^n. Relative error below
// 4e-16. x is clamped to [-708, 709].
DR_HD double exp64(double x) {
    x = x < -708.0 ? -708.0 : x;
    x = x > 709.0 ? 709.0 : x;
    union {
        double value;
        u64 bits;
    } power;
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: a sum with it holds the rounded integer in its low bits
    power.value = x * 1.4426950408889634 + magic;
    const double n = power.value - magic;
    // ln 2 in two parts, the first of 33 bits: n times it is exact.
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double e = 1.0 / 6227020800.0;
    e = e * r + 1.0 / 479001600.0;
    e = e * r + 1.0 / 39916800.0;
    e = e * r + 1.0 / 3628800.0;
    e = e * r + 1.0 / 362880.0;
    e = e * r + 1.0 / 40320.0;
    e = e * r + 1.0 / 5040.0;
    e = e * r + 1.0 / 720.0;
    e = e * r + 1.0 / 120.0;
    e = e * r + 1.0 / 24.0;
    e = e * r + 1.0 / 6.0;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    power.bits = (power.bits + 1023u) << 52;
    return e * power.value;
}

// One exponential of fit_dexp at x in [0, 1]. A growing one is written from x = 1 back, so that none exceeds 1.
DR_HD double dexp_term(double rate, double x) { return exp64(rate * (x - (rate > 0.0 ? 1.0 : 0.0))); }

const u32 DEXP_HEADER_WORDS = 2, DEXP_SIDE_WORDS = 6;

// The most words that a section takes.
const u32 FIT_DEXP_BOUND = DEXP_HEADER_WORDS + 2 * DEXP_SIDE_WORDS;

// The first word of a side. The negatives' side comes after the positives', if there are any.
DR_HD u64 dexp_side(bool negative, u64 positives) {
    return negative && positives ? DEXP_HEADER_WORDS + DEXP_SIDE_WORDS : DEXP_HEADER_WORDS;
}

// The bytes of a section.
DR_HD u64 dexp_bytes(u64 positives, u64 negatives) {
    return 4 * (DEXP_HEADER_WORDS + DEXP_SIDE_WORDS * ((u64)(positives > 0) + (u64)(negatives > 0)));
}

// For an encoder on the device: the most FIT blocks of both sides, and the float64 numbers of scratch memory, which
// Side in fit_dexp.cu divides.
DR_HD u64 fit_dexp_blocks(u64 count) { return count / FIT_BLOCK + 2; }
DR_HD u64 fit_dexp_scratch(u64 count) { return 33 * fit_dexp_blocks(count); }

// The least difference of b and d for rates up to about 1; for larger rates, in proportion to them. The exponentials of
// closer rates are almost one function, and a and c would be large numbers that cancel. Rates this far apart still give
// every curve that closer rates give, with a relative error of about GAP^2 / 8.
const double GAP = 0.125;

struct Rates {
    float b, d;
};

// The rates middle - half and middle + half, limited to what m points can show (e^-16 from one point to the next) and
// at least GAP apart.
DR_HD Rates spread(double middle, double half, u64 m) {
    const double limit = 16.0 * (double)(i64)m, size = fabs(middle);
    const double least = 0.5 * GAP * (1.0 < size ? size : 1.0);
    half = half < least ? least : half;
    double b = middle - half, d = middle + half;
    b = b < -limit ? -limit : b;
    d = d < 2.0 - limit ? 2.0 - limit : d;
    return {(float)(limit - 2.0 < b ? limit - 2.0 : b), (float)(limit < d ? limit : d)};
}

// The sums of u, w and y, and of their products with q and with each other; fit_dexp.cpp defines the functions.
struct Sums {
    double u1, uq, uu, uw, uy, w1, wq, ww, wy, y1, yq, yy;
};

// The products of u, w and y after 1 and q are projected out of them.
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
    double error;  // the squared error that is left
};

// The second linear system: a and c for given rates, by least squares over e = e^(b x) and f = e^(d x). The arguments
// are the sums of their products with each other and with y.
DR_HD Curve curve_of(Rates rates, double ee, double ef, double ff, double ey, double fy, double yy) {
    const double determinant = ee * ff - ef * ef;
    double a = ee > 0.0 ? ey / ee : 0.0, c = 0.0;  // for one point, or exponentials that are one function: e alone
    if (determinant > 1e-12 * ee * ff) {
        a = (ey * ff - fy * ef) / determinant;
        c = (ee * fy - ef * ey) / determinant;
    }
    return {(float)a, (float)c, rates, yy - a * ey - c * fy};
}

// The rates of the curve of a side of m points. The least-squares solution A, B of the first linear system gives them,
// except:
//   - u and w are (nearly) dependent: A = 0, so the rates are B = wy / ww and 0, an exponential and a constant;
//   - the roots are complex: two rates about their real part;
//   - the fit is worse than a straight line: the better one of an exponential and a constant, and of two rates about 0,
//     which is nearly that line.
const u32 WAYS = 3;
struct Ways {
    Rates rates[WAYS];
    double line;  // the squared error of a straight line
};

DR_HD Ways ways_of(const Moments& s, u64 m) {
    const double single = s.ww > 1e-20 * (double)(i64)m ? s.wy / s.ww : 0.0;
    const double determinant = s.uu * s.ww - s.uw * s.uw;
    double middle = 0.5 * single, half = fabs(middle);
    if (determinant > 1e-12 * s.uu * s.ww) {
        const double A = (s.uy * s.ww - s.wy * s.uw) / determinant, B = (s.uu * s.wy - s.uw * s.uy) / determinant;
        const double squared = 0.25 * B * B + A;
        middle = 0.5 * B;
        half = squared > 0.0 ? sqrt(squared) : 0.0;
    }
    return {{spread(middle, half, m), spread(0.5 * single, fabs(0.5 * single), m), spread(0.0, 0.0, m)}, s.yy};
}

// Of fewer than 3 points.
DR_HD Ways ways_of_few(u64 m) {
    const Rates rates = spread(0.0, 0.0, m);
    return {{rates, rates, rates}, 1e300};
}

// solve(way) returns the Curve of ways.rates[way].
template <class Solve>
DR_HD Curve best_curve(const Ways& ways, Solve solve) {
    Curve best = solve(0);
    if (best.error > ways.line)
        for (u32 way = 1; way < WAYS; ++way) {
            const Curve other = solve(way);
            if (other.error < best.error) best = other;
        }
    return best;
}
