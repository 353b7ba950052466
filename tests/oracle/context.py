"""The adaptive coder of windows, as docs/container.md draws it, one symbol at a time."""

from math import comb

from tests.oracle.bitpack import field, to_bytes

WINDOW = 128
RUNS = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (6, 1), (8, 2), (12, 2), (16, 3), (24, 3), (32, 5), (64, 6), (128, 7),
        (256, 8), (512, 10), (1536, 25)]  # fmt: skip
COUNTS = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 1), (10, 1), (12, 2), (16, 2), (20, 3),
          (28, 4), (44, 5), (76, 6)]  # fmt: skip


class Model:
    def __init__(self, counts):
        self.counts = counts
        self.remake()

    def saw(self, symbol):
        self.counts[symbol] += 16
        self.changed = True

    def remake(self):
        if sum(self.counts) > 2**15:
            self.counts = [(count + 1) // 2 for count in self.counts]
        factor = 4080 * 2**19 // sum(self.counts)
        self.changed = False
        self.slots = [(sum(self.counts[:s]) * factor >> 19) + s for s in range(16)] + [4096]


def from_chances(chances):
    """Counts of 16 symbols, of which symbol s or a higher one has the chance ``chances[s] / 384``."""
    return [above - below + 1 for above, below in zip(chances, [*chances[1:], 0], strict=True)]


def of_runs(octave):
    return from_chances([384 * 2**40 // (2**20 + 3 * begin * 2**octave) ** 2 for begin, _ in RUNS])


def of_counts(octave, least):
    mean = 3 * 2 ** max(octave, 8)
    q = 2**16 * mean // (mean + 2**20)
    powers = [2**16]
    for _ in range(128):
        powers.append(powers[-1] * q >> 16)
    chances = [power * (2**16 + n * (2**16 - q)) for n, power in enumerate(powers)]
    return from_chances([384 * chances[begin + least] // chances[least] for begin, _ in COUNTS])


class Models:
    """Those of runs, of counts and of values, each by its context, made when they are first used."""

    def __init__(self, code_bits):
        self.code_bits = code_bits
        self.found = {}

    def remake(self):
        for model in self.found.values():
            if model.changed:
                model.remake()

    def of(self, kind, *context):
        if (kind, context) not in self.found:
            if kind == "run":
                counts = of_runs(context[0])
            elif kind == "value":
                counts = [8 if s < 2**self.code_bits else 0 for s in range(16)]
            else:
                counts = of_counts(context[0], int(kind == "first"))
            self.found[kind, context] = Model(counts)
        return self.found[kind, context]


class Part:
    """A part of the section: where it begins and ends, and what it has seen."""

    def __init__(self, window, index, end, density):
        self.window, self.index, self.end = window, index, end
        self.fast = self.slow = density
        self.before = 7

    def octave(self):
        return (self.fast + self.slow).bit_length()

    def context(self):
        return self.octave(), (2 * self.fast >= self.slow) + (self.fast >= 2 * self.slow)

    def add(self, count):
        self.fast = (self.fast + count * 65536) // 2
        self.slow = (15 * self.slow + count * 65536) // 16

    def add_empty(self, windows):
        fade = 65536
        for _ in range(min(windows, 64)):
            fade = fade * 15 // 16
        self.fast >>= min(windows, 31)
        self.slow = self.slow * fade >> 16


class Remakes:
    """Remakes the models before some rounds."""

    def __init__(self, models):
        self.models, self.round, self.next = models, 0, 8

    def begin_round(self):
        if self.round == self.next:
            self.models.remake()
            self.next += self.next // 4 if self.next < 2048 else 512
        self.round += 1


def pair_code(low, high, level):
    """Two different places of ``2**level``: the first, and the distance to the second less 1, going round."""
    first, second = (low, high) if high - low <= 2**level // 2 else (high, low)
    return first + (((second - first) % 2**level - 1) << level)


def halves(length, n):
    """Slots of the symbols of a part, and the symbol and the bits of each k."""
    half = length // 2
    least, most = max(0, n - half), min(n, half)
    wide = most - least >= 16
    symbols, weights = {}, [0] * 16
    for k in range(least, most + 1):
        symbol = min(max(k - n // 2 + 7, 0), 15) if wide else k - least
        symbols[k] = symbol, field(k, 7) if wide and symbol in (0, 15) else []
        weights[symbol] += comb(half, k) * comb(half, n - k)
    total = sum(weights)
    shift = max(0, total.bit_length() - 112)
    shares = [1 + (weight >> shift) * 4080 // (total >> shift) if weight else 0 for weight in weights]
    shares[shares.index(max(shares))] += 4096 - sum(shares)
    return [sum(shares[:i]) for i in range(17)], symbols


def value_context(n, before):
    magnitude = (before - 8 if before > 7 else 7 - before) // 2
    return 4 * sum(n >= limit for limit in (2, 4, 8)) + magnitude


def encode(indices, numel, codes=None, code_bits=0):
    symbols, bits, models = [], [], Models(code_bits)  # symbols: (part, first slot, end)
    number_of_parts, low_bits = (4 if len(indices) >= 4096 else 1), max(0, code_bits - 4)
    density = len(indices) * 65536 // -(-numel // WINDOW)
    heads = [(0, 0)]
    for p in range(1, number_of_parts):
        window = indices[len(indices) * p // 4] // WINDOW
        heads.append((window, next(i for i, index in enumerate(indices) if index // WINDOW == window)))
    ends = [index for _, index in heads[1:]] + [len(indices)]
    parts = [Part(window, index, end, density) for (window, index), end in zip(heads, ends, strict=True)]

    def put(slots, symbol):
        symbols.append((parts.index(part), slots[symbol], slots[symbol + 1]))

    def put_adapted(model, symbol):
        put(model.slots, symbol)
        model.saw(symbol)

    def put_number(model, ranges, number):
        symbol = max(s for s, (begin, _) in enumerate(ranges) if begin <= number)
        put_adapted(model, symbol)
        bits.extend(field(number - ranges[symbol][0], ranges[symbol][1]))

    def put_places(places, length):
        n, level = len(places), length.bit_length() - 1
        if n in (0, length):
            return
        if n == 1:
            bits.extend(field(places[0], level))
            return
        if n == 2 and level >= 5:
            bits.extend(field(pair_code(*places, level), 2 * level - 1))
            return
        first = [place for place in places if place < length // 2]
        slots, found = halves(length, n)
        symbol, more = found[len(first)]
        bits.extend(more)
        put(slots, symbol)
        put_places(first, length // 2)
        put_places([place - length // 2 for place in places[len(first) :]], length // 2)

    remakes = Remakes(models)
    while any(part.index < part.end for part in parts):
        remakes.begin_round()
        for part in parts:
            if part.index == part.end:
                continue
            crowded = part.octave() >= 16
            if not crowded:
                run = indices[part.index] // WINDOW - part.window
                put_number(models.of("run", *part.context()), RUNS, run)
                part.add_empty(run)
                part.window += run
            near = range(part.index, min(part.index + WINDOW, part.end))
            here = [i for i in near if indices[i] // WINDOW == part.window]
            n = len(here)
            put_number(models.of("count" if crowded else "first", *part.context()), COUNTS, n if crowded else n - 1)
            part.add(n)
            put_places([indices[i] % WINDOW for i in here], WINDOW)
            for i in here if code_bits else []:
                put_adapted(models.of("value", value_context(n, part.before)), codes[i] >> low_bits)
                bits.extend(field(codes[i] % 2**low_bits, low_bits))
                part.before = codes[i] >> low_bits
            part.index += n
            part.window += 1
    states, words = [2**16] * number_of_parts, []
    for p, start, end in reversed(symbols):
        x = states[p]
        if x >= (end - start) << 20:
            words.append(x % 2**16)
            x >>= 16
        states[p] = x // (end - start) * 4096 + x % (end - start) + start
    number, section = len(words), []
    while number > 127:
        section.append(number % 128 + 128)
        number //= 128
    section.append(number)
    words.reverse()
    numbers = [(x, 4) for x in [*sum(heads[1:], ()), *states]] + [(x, 2) for x in words]
    return bytes(section) + b"".join(x.to_bytes(size, "little") for x, size in numbers) + to_bytes(bits)
