"""Fit-Poly, slow and obvious (DeepReduce, section 5)."""

import struct

import numpy as np

BLOCK = 256


def sort(values):
    """The values from the largest to the smallest (a stable sort), and the index of each."""
    values = np.asarray(values, np.float32) + np.float32(0)
    order = np.argsort(-values.astype(np.float64), kind="stable")
    return values[order], order


def total(products):
    """A sum in the order of kernels/curve_fit/fit.h: blocks of 256 terms in 8 lanes."""
    padded = np.zeros(-(-len(products) // BLOCK) * BLOCK)
    padded[: len(products)] = products
    result = 0.0
    for block in padded.reshape(-1, BLOCK // 8, 8):
        lanes = np.zeros(8)
        for row in block:
            lanes = lanes + row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        result += lanes[0]
    return result


def distances(y):
    """The distance of each point from the chord between the first and the last point."""
    slope = (y[-1] - y[0]) / (len(y) - 1)
    return np.abs((y[0] + slope * np.arange(len(y))) - y)


def knots(y, wanted, points):
    """The begins of the segments. A segment is cut at the point farthest from its chord that leaves at least ``points``
    points on both sides."""
    begins = [0]
    while len(begins) < wanted:
        best = (0.0, None)
        for begin, end in zip(begins, [*begins[1:], len(y)], strict=True):
            d = distances(y[begin:end])[points : end - begin - points + 1] if end - begin >= 2 * points else []
            if len(d) and max(d) > best[0]:
                best = (max(d), begin + points + int(np.argmax(d)))
        if best[1] is None:
            break
        begins = sorted([*begins, best[1]])
    return begins


def heuristic(y, degree):
    """The number of segments by lemma 1 (lines) or remark 4 (constants): p knots make p + 1 segments, at most 1024."""
    if len(y) < 3:
        return 1
    change = abs((y[0] - y[1]) - (y[-2] - y[-1]))
    knots = np.ceil(2 * np.sqrt(change)) if degree else np.ceil(change / np.sqrt(2) - 1)
    return 1 + int(np.clip(knots, 0, 1023))


def places(m):
    return (2.0 * np.arange(m) - (m - 1)) * (1.0 / (m - 1)) if m > 1 else np.zeros(1)


def ratio(k, m):
    return float(k * k) * (float(m) * m - k * k) / ((4.0 * k * k - 1.0) * (float(m - 1) * (m - 1)))


def gram(m, terms):
    """The first ``terms`` Gram polynomials on m points."""
    t, rows = places(m), [np.ones(m)]
    for k in range(1, terms):
        before = ratio(k - 1, m) * rows[-2] if k > 1 else 0.0 * t
        rows.append(t * rows[-1] - before)
    return rows


def encode(values, degree, segments):
    """The section and the order."""
    ordered, order = sort(values)
    positives, negatives = int((ordered > 0).sum()), int((ordered < 0).sum())
    section = struct.pack("<III", degree, positives, negatives)
    for y in (ordered[:positives], ordered[len(ordered) - negatives :]):
        if len(y) == 0:
            continue
        y = y.astype(np.float64)
        magnitudes = np.abs(y)
        begins = knots(y, heuristic(y, degree) if segments is None else segments, degree + 1)
        section += struct.pack("<Iff", len(begins), magnitudes.min(), magnitudes.max())
        section += np.array(begins[1:], "<u4").tobytes()
        for begin, end in zip(begins, [*begins[1:], len(y)], strict=True):
            m = end - begin
            norm = float(m)
            for k, row in enumerate(gram(m, min(degree + 1, m))):
                norm *= ratio(k, m) if k else 1.0
                section += struct.pack("<f", np.float32(total(magnitudes[begin:end] * row) / (norm * magnitudes.max())))
    return np.frombuffer(section, np.uint8), order


def decode(section, count):
    """The sorted values, by Clenshaw's rule."""
    words, floats = np.frombuffer(bytes(section), "<u4"), np.frombuffer(bytes(section), "<f4").astype(np.float64)
    degree, positives, negatives = map(int, words[:3])
    out, at = np.zeros(count, np.float32), 3
    for first, m, sign in ((0, positives, 1), (count - negatives, negatives, -1)):
        if m == 0:
            continue
        segments, least, largest = int(words[at]), floats[at + 1], floats[at + 2]
        ends = [0, *map(int, words[at + 3 : at + 2 + segments]), m]
        at += 2 + segments
        for begin, end in zip(ends, ends[1:], strict=False):
            size = end - begin
            terms = min(degree + 1, size)
            t, c = places(size), floats[at : at + terms]
            at += terms
            b0, b1 = np.full(size, c[-1]), np.zeros(size)
            for k in range(terms - 2, -1, -1):
                b0, b1 = (c[k] + t * b0) - ratio(k + 1, size) * b1, b0
            out[first + begin : first + end] = sign * np.clip(b0 * largest, least, largest)
    return out


def least_squares(values, degree, segments):
    """The fitted values in the order of ``values``, from NumPy's regression and with unrounded coefficients."""
    ordered, order = sort(values)
    out = np.zeros(len(ordered))
    for side in (np.flatnonzero(ordered > 0), np.flatnonzero(ordered < 0)):
        if len(side) == 0:
            continue
        y = ordered[side].astype(np.float64)
        begins = knots(y, segments, degree + 1)
        for begin, end in zip(begins, [*begins[1:], len(y)], strict=True):
            t = places(end - begin)
            fit = np.polynomial.Legendre.fit(t, y[begin:end], min(degree, end - begin - 1), domain=[-1, 1])
            out[side[begin:end]] = np.clip(fit(t), y.min(), y.max())
    back = np.empty_like(out)
    back[order] = out
    return back
