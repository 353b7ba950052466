"""3LC's quartic and zero-run encoding (Lim et al., SysML 2019, sections 3.2 and 3.3), one digit at a time."""


def pack(digits: list[int]) -> bytes:
    """Digits 0, 1, 2 in five parts. A byte has one digit of each part, that of the first part the most significant."""
    m = -(-len(digits) // 5)
    padded = digits + [1] * (5 * m - len(digits))
    parts = [padded[m * p : m * (p + 1)] for p in range(5)]
    return bytes(81 * a + 27 * b + 9 * c + 3 * d + e for a, b, c, d, e in zip(*parts, strict=True))


def unpack(packed: bytes, count: int) -> list[int]:
    parts: list[list[int]] = [[], [], [], [], []]
    for byte in packed:
        for p in (4, 3, 2, 1, 0):
            byte, digit = divmod(byte, 3)
            parts[p].append(digit)
    return sum(parts, [])[:count]


def zero_runs(packed: bytes) -> bytes:
    """Replaces runs of 2 to 14 bytes of 121 by 241 plus their length, from the left, each as long as possible."""
    out = bytearray()
    while packed:
        run = 0
        while run < min(14, len(packed)) and packed[run] == 121:
            run += 1
        out.append(241 + run if run > 1 else packed[0])
        packed = packed[max(run, 1) :]
    return bytes(out)


def expand(section: bytes) -> bytes:
    return b"".join(bytes([121] * (byte - 241)) if byte > 242 else bytes([byte]) for byte in section)
