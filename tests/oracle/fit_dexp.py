"""Fit-DExp, slow and obvious (DeepReduce, appendix E).

``rates`` and ``fit`` solve the two linear systems with NumPy's least squares. ``encode`` solves them with the float64
operations, and in the order, that every device must use.
"""

import struct

import numpy as np

from tests.oracle.fit_poly import BLOCK, sort, total

LN2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
FACTORIALS = [6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0]


def exp(x):
    """e^x with the operations of exp64 in kernels/curve_fit/fit_dexp.h."""
    x = np.clip(np.asarray(x, np.float64), -708.0, 709.0)
    magic = 6755399441055744.0
    n = (x * 1.4426950408889634 + magic) - magic
    r = (x - n * LN2[0]) - n * LN2[1]
    e = np.full_like(r, 1.0 / FACTORIALS[0])
    for factorial in FACTORIALS[1:]:
        e = e * r + 1.0 / factorial
    for one in (0.5, 1.0, 1.0):
        e = e * r + one
    return e * np.exp2(n)


def term(rate, x, exp=exp):
    return exp(rate * (x - (1.0 if rate > 0 else 0.0)))


def rates(y):
    """b and d of the decreasing curve y, possibly complex: the integral equation with trapezoids and four unknowns."""
    x = np.linspace(0, 1, len(y))
    s = np.concatenate([[0], np.cumsum((y[1:] + y[:-1]) / 2)]) / (len(y) - 1)
    ss = np.concatenate([[0], np.cumsum((s[1:] + s[:-1]) / 2)]) / (len(y) - 1)
    (a, b, _, _), *_ = np.linalg.lstsq(np.stack([ss, s, x, np.ones_like(x)], 1), y, rcond=None)
    return sorted(np.roots([1.0, -b, -a]), key=lambda z: z.real)


def fit(y):
    """The fitted curve. The rates must be real."""
    x = np.linspace(0, 1, len(y))
    basis = np.stack([term(rate, x, np.exp) for rate in rates(y)], 1)
    factors, *_ = np.linalg.lstsq(basis, y, rcond=None)
    return basis @ factors


def running(steps):
    """Running sums by blocks: each block starts at zero and is added to the last sum of the block before."""
    out, base = [], 0.0
    for at in range(0, len(steps), BLOCK):
        out.append(base + np.cumsum(np.concatenate([[0.0], steps[at : at + BLOCK]]))[1:])
        base = base + np.cumsum(np.concatenate([[0.0], steps[at : at + BLOCK]]))[-1]
    return np.concatenate(out)


def moments(y):
    m = len(y)
    h = 1.0 / (m - 1)
    mean = (total(y) - 0.5 * (y[0] + y[-1])) * h
    y = y - mean
    w = running(np.concatenate([[0.0], (0.5 * h) * (y[:-1] + y[1:])]))
    x = np.arange(m) * h
    u = running(np.concatenate([[0.0], (0.5 * h) * (w[:-1] + w[1:])])) + mean * ((0.5 * x) * (x - 1.0))
    q = 2.0 * x - 1.0
    qq = m * (m + 1.0) / (3.0 * (m - 1.0))

    def dot(f, g):
        return (total(f * g) - total(f) * total(g) / m) - total(f * q) * total(g * q) / qq

    return dot(u, u), dot(u, w), dot(w, w), dot(u, y), dot(w, y), dot(y, y)


def spread(middle, half, m):
    half = max(half, 0.0625 * max(1.0, abs(middle)))
    limit = 16.0 * m
    return np.float32(np.clip(middle - half, -limit, limit - 2)), np.float32(np.clip(middle + half, 2 - limit, limit))


def solve(y, b, d):
    x = np.arange(len(y)) * (1.0 / (len(y) - 1)) if len(y) > 1 else np.zeros(1)
    e, f = term(float(b), x), term(float(d), x)
    ee, ef, ff, ey, fy = total(e * e), total(e * f), total(f * f), total(e * y), total(f * y)
    determinant = ee * ff - ef * ef
    a, c = (ey / ee if ee > 0 else 0.0), 0.0
    if determinant > 1e-12 * ee * ff:
        a, c = (ey * ff - fy * ef) / determinant, (ee * fy - ef * ey) / determinant
    return (total(y * y) - a * ey) - c * fy, (np.float32(a), b, np.float32(c), d)


def parameters(y):
    m = len(y)
    if m < 3:
        return solve(y, *spread(0.0, 0.0, m))[1]
    uu, uw, ww, uy, wy, yy = moments(y)
    single = wy / ww if ww > 1e-20 * m else 0.0
    middle, half = 0.5 * single, abs(0.5 * single)
    determinant = uu * ww - uw * uw
    if determinant > 1e-12 * uu * ww:
        a, b = (uy * ww - wy * uw) / determinant, (uu * wy - uw * uy) / determinant
        middle, half = 0.5 * b, np.sqrt(max(0.25 * b * b + a, 0.0))
    best = solve(y, *spread(middle, half, m))
    if best[0] > yy:
        for rate in (0.5 * single, 0.0):
            best = min(best, solve(y, *spread(rate, abs(rate), m)), key=lambda found: found[0])
    return best[1]


def encode(values):
    """The section and the order."""
    ordered, order = sort(values)
    positives, negatives = ordered[ordered > 0], ordered[ordered < 0]
    section = struct.pack("<II", len(positives), len(negatives))
    for y in (positives.astype(np.float64), -negatives[::-1].astype(np.float64)):
        if len(y):
            section += struct.pack("<6f", y[-1], y[0], *parameters(y * (1.0 / y[0])))
    return np.frombuffer(section, np.uint8), order


def decode(section, count):
    """The sorted values."""
    positives, negatives = map(int, np.frombuffer(bytes(section[:8]), "<u4"))
    floats = np.frombuffer(bytes(section[8:]), "<f4").astype(np.float64)
    out, at = np.zeros(count, np.float32), 0
    for first, m, sign in ((0, positives, 1), (count - negatives, negatives, -1)):
        if m == 0:
            continue
        least, largest, a, b, c, d = floats[at : at + 6]
        at += 6
        x = np.arange(m) * (1.0 / (m - 1)) if m > 1 else np.zeros(1)
        curve = np.clip((a * term(b, x) + c * term(d, x)) * largest, least, largest)
        out[first : first + m] = sign * curve[::sign]
    return out
