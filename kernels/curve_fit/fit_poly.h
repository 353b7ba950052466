// Piecewise polynomials through sorted values (DeepReduce, section 5). The section, in 32-bit words:
//
//     section:  | degree | positives | negatives | side of the positives | side of the negatives |
//     side:     | segments p | least float32 | largest float32 | knots [p - 1] | coefficients float32 |
//
// A side without values is left out. A knot is the place where a segment (but the first) begins, counted from the
// side's first value. Each segment has min(degree + 1, points) coefficients of Gram's polynomials, segment by segment.
// They give the magnitude as a share of `largest`. Point i of m has t = (2 i - (m - 1)) * (1 / (m - 1)), or 0 for
// m = 1.
#pragma once

#include "curve_fit/curves.h"

const u32 MAX_DEGREE = 15, MAX_SEGMENTS = 1024, MAX_TERMS = MAX_DEGREE + 1;

// Gram's polynomials, orthogonal on m points at even steps of t in [-1, 1]: P_0 = 1, P_1 = t,
// P_k+1 = t P_k - gram_ratio(k) P_k-1. gram_ratio(k) is also <P_k, P_k> / <P_k-1, P_k-1>, and <P_0, P_0> = m.
DR_HD double gram_ratio(u32 k, u64 m) {
    const double square = (double)k * (double)k, points = (double)m, steps = (double)(m - 1);
    return square * (points * points - square) / ((4.0 * square - 1.0) * (steps * steps));
}

// One step of Clenshaw's sum of c_k P_k, from the highest k down: b_k from b_k+1, b_k+2 and ratio = gram_ratio(k + 1).
DR_HD double gram_step(double c, double t, double b1, double ratio, double b2) { return (c + t * b1) - ratio * b2; }

// The number of coefficients of a segment.
DR_HD u32 fit_terms(u32 degree, u64 points) { return degree + 1 < points ? degree + 1 : (u32)points; }

// The most words that a section of `count` values takes; segments: the most of a side, 0 for the heuristic.
DR_HD u64 fit_poly_bound(u64 count, u32 degree, u32 segments) {
    const u64 wanted = segments ? segments : MAX_SEGMENTS, possible = count / (degree + 1) + 1;
    return 9 + 2 * (u64)(degree + 2) * (wanted < possible ? wanted : possible);
}

// The float64 numbers of scratch memory that an encoder on the device needs: MAX_TERMS for each block of a segment of
// either side.
DR_HD u64 fit_poly_scratch(u64 count) { return MAX_TERMS * (count / FIT_BLOCK + 2 * MAX_SEGMENTS); }

// Lemma 1 gives p = ceil(2 sqrt(M)) knots for a piecewise linear fit, remark 4 ceil(M / sqrt(2) - 1) for a constant
// one, M = |(C_1 - C_2) - (C_m-1 - C_m)|. p knots make p + 1 segments.
DR_HD u32 heuristic_segments(const float* sorted, u64 m, u32 degree) {
    if (m < 3) return 1;
    const double start = (double)sorted[0] - (double)sorted[1], end = (double)sorted[m - 2] - (double)sorted[m - 1];
    const double change = fabs(start - end);
    const double knots = ceil(degree ? 2.0 * sqrt(change) : change / sqrt(2.0) - 1.0), most = MAX_SEGMENTS - 1;
    return 1 + (u32)(knots < 0.0 ? 0.0 : knots > most ? most : knots);
}
