"""The bytes of a container, field by field, from the table of docs/container.md."""

import struct

from tests.oracle.checksum import checksum

FIELDS = [  # name, format, offset
    ("magic", "4s", 0), ("version", "B", 4), ("sparsifier", "B", 5), ("index", "B", 6), ("value", "B", 7),
    ("dtype", "B", 8), ("flags", "B", 9), ("reserved", "H", 10), ("checksum", "I", 12),
    ("numel", "I", 16), ("count", "I", 20), ("seed", "I", 24), ("parameter", "I", 28), ("step", "I", 32),
    ("digest", "I", 36), ("index_bytes", "Q", 40), ("value_bytes", "Q", 48), ("order_bytes", "Q", 56),
]  # fmt: skip


def read(data: bytes) -> dict:
    return {name: struct.unpack_from("<" + kind, data, at)[0] for name, kind, at in FIELDS}


def write(header: dict, sections: list[bytes]) -> bytes:
    head = b"".join(struct.pack("<" + kind, header[name]) for name, kind, _ in FIELDS)
    return repaired(head + b"".join(section + bytes(-len(section) % 8) for section in sections))


def changed(data: bytes, **fields) -> bytes:
    """The container with other values in some header fields, and the correct checksum."""
    out = bytearray(data)
    for name, kind, at in FIELDS:
        if name in fields:
            struct.pack_into("<" + kind, out, at, fields[name])
    return repaired(bytes(out))


def repaired(data: bytes) -> bytes:
    """The container with the correct checksum of the bytes that its header announces, as far as they exist."""
    header = read(data)
    end = 64 + sum(-(-header[name] // 8) * 8 for name in ("index_bytes", "value_bytes", "order_bytes"))
    whole = data[: min(end, len(data) // 4 * 4)]
    return data[:12] + struct.pack("<I", checksum(whole)) + data[16:]
