"""The adaptive coder of windows, as docs/container.md draws it, one symbol at a time."""

from math import comb

from tests.oracle.bitpack import field, to_bits, to_bytes

WINDOW = 128
RUNS = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (6, 1), (8, 2), (12, 2), (16, 3), (24, 3), (32, 5), (64, 6), (128, 7),
        (256, 8), (512, 10), (1536, 25)]  # fmt: skip
COUNTS = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 2), (12, 3), (20, 4), (36, 5), (68, 6)]


class Model:
    def __init__(self):
        self.start = [4096 * i for i in range(16)]
        self.seen = 0

    def slots(self):
        return [(start * 4080 >> 16) + i for i, start in enumerate(self.start)] + [4096]

    def adapt(self, symbol):
        rate = 2 + sum(self.seen >= limit for limit in (4, 12, 28, 90, 400))
        self.seen += 1
        for i, x in enumerate(self.start):
            self.start[i] = x - (x >> rate) if i <= symbol else x + ((65535 - x) >> rate)


class Models:
    """Those of runs, of counts and of values, each by its context, made when they are first used."""

    def __init__(self):
        self.found = {}
        self.fast = self.slow = 0

    def of(self, *context):
        return self.found.setdefault(context, Model())

    def of_density(self, kind):
        return self.of(kind, (self.fast + self.slow).bit_length())

    def add(self, count):
        self.fast += (count * 65536 - self.fast) >> 1
        self.slow += (count * 65536 - self.slow) >> 4


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


def encode(indices, codes=None, code_bits=0):
    symbols, bits, models = [], [], Models()  # symbols: (first slot, end)

    def put(slots, symbol):
        symbols.append((slots[symbol], slots[symbol + 1]))

    def put_number(model, ranges, number):
        symbol = max(s for s, (begin, _) in enumerate(ranges) if begin <= number)
        put(model.slots(), symbol)
        model.adapt(symbol)
        bits.extend(field(number - ranges[symbol][0], ranges[symbol][1]))

    def put_part(places, length):
        n = len(places)
        if n in (0, length):
            return
        if n == 1:
            bits.extend(field(places[0], length.bit_length() - 1))
            return
        first = [place for place in places if place < length // 2]
        slots, found = halves(length, n)
        symbol, more = found[len(first)]
        bits.extend(more)
        put(slots, symbol)
        put_part(first, length // 2)
        put_part([place - length // 2 for place in places[len(first) :]], length // 2)

    at, before, low_bits = 0, 7, max(0, code_bits - 4)
    windows = {}
    for number, index in enumerate(indices):
        windows.setdefault(index // WINDOW, []).append(number)
    for window, numbers in windows.items():
        put_number(models.of_density("run"), RUNS, window - at)
        for _ in range(min(window - at, 64)):
            models.add(0)
        put_number(models.of_density("count"), COUNTS, len(numbers) - 1)
        models.add(len(numbers))
        put_part([indices[number] % WINDOW for number in numbers], WINDOW)
        for number in numbers if code_bits else []:
            model, top = models.of("value", value_context(len(numbers), before)), codes[number] >> low_bits
            put(model.slots(), top)
            model.adapt(top)
            bits.extend(field(codes[number] % 2**low_bits, low_bits))
            before = top
        at = window + 1
    lanes = 1 if len(indices) < 512 else 4
    states, words = [2**16] * lanes, []
    for i in reversed(range(len(symbols))):
        (start, end), x = symbols[i], states[i % lanes]
        if x >= (end - start) << 20:
            words.insert(0, x % 2**16)
            x >>= 16
        states[i % lanes] = x // (end - start) * 4096 + x % (end - start) + start
    number, head = len(words), []
    while number > 127:
        head.append(number % 128 + 128)
        number //= 128
    head.append(number)
    parts = [x.to_bytes(4, "little") for x in states] + [word.to_bytes(2, "little") for word in words]
    return bytes(head) + b"".join(parts) + to_bytes(bits)


def decode(section, count, code_bits=0):
    """The indices and codes of a section that ``encode`` wrote."""
    at = number = place = 0
    while True:
        byte, at = section[at], at + 1
        number, place = number + byte % 128 * 2**place, place + 7
        if byte < 128:
            break
    lanes = 1 if count < 512 else 4
    words = [int.from_bytes(section[at + 2 * i : at + 2 * i + 2], "little") for i in range(2 * lanes + number)]
    states = [words[2 * i] + words[2 * i + 1] * 2**16 for i in range(lanes)]
    words, bits = words[2 * lanes :], to_bits(section[at + 4 * lanes + 2 * number :])
    models, indices, codes, used = Models(), [], [], 0

    def get(slots):
        nonlocal used
        lane, used = used % lanes, used + 1
        slot = states[lane] % 4096
        symbol = max(s for s in range(16) if slots[s] <= slot)
        states[lane] = (slots[symbol + 1] - slots[symbol]) * (states[lane] // 4096) + slot - slots[symbol]
        if states[lane] < 2**16:
            states[lane] = states[lane] * 2**16 + words.pop(0)
        return symbol

    def get_bits(width):
        taken = [bits.pop(0) for _ in range(width)]
        return sum(bit << j for j, bit in enumerate(taken))

    def get_adapted(model):
        symbol = get(model.slots())
        model.adapt(symbol)
        return symbol

    def get_number(model, ranges):
        begin, width = ranges[get_adapted(model)]
        return begin + get_bits(width)

    def get_part(n, length):
        if n in (0, length):
            return list(range(n))
        if n == 1:
            return [get_bits(length.bit_length() - 1)]
        slots, found = halves(length, n)
        symbol = get(slots)
        k = next(k for k, (one, _) in found.items() if one == symbol)
        if found[k][1]:
            k = get_bits(7)
        first = get_part(k, length // 2)
        return first + [length // 2 + place for place in get_part(n - k, length // 2)]

    window, before, low_bits = 0, 7, max(0, code_bits - 4)
    while len(indices) < count:
        run = get_number(models.of_density("run"), RUNS)
        for _ in range(min(run, 64)):
            models.add(0)
        n = get_number(models.of_density("count"), COUNTS) + 1
        models.add(n)
        indices += [(window + run) * WINDOW + place for place in get_part(n, WINDOW)]
        for _ in range(n if code_bits else 0):
            before = get_adapted(models.of("value", value_context(n, before)))
            codes.append(before * 2**low_bits + get_bits(low_bits))
        window += run + 1
    assert states == [2**16] * lanes and not words and len(bits) < 8 and not any(bits)
    return indices, codes
