"""Sizes and rates as people write them: ``7B`` parameters, ``100 Mbit/s``. What can be read in two ways is an error."""

from __future__ import annotations

import math
import re

from hvd_deepreduce.tools.output import misused

NUMBER = r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*"
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
RATES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
MOST_RATE = 1e15
"""Bits per second that no link reaches."""


def count(text: str, what: str) -> float:
    """A positive number that may end in K, M, B (or G) or T: ``25.6M``, ``7B``."""
    found = re.fullmatch(NUMBER + "([kmgbt]?)", text.rstrip(), re.IGNORECASE)
    number = float(found[1].replace("_", "")) * COUNTS[found[2].lower()] if found else 0.0
    if not 0 < number < math.inf:
        misused(f"{what} is {text!r}; it must be a positive number, which may end in K, M or B, such as 25.6M or 7B")
    return number


def bits_per_second(text: str, what: str) -> float:
    """A rate. ``1G``, ``1Gbit``, ``1Gb/s`` and ``1gbps`` are bits; ``1GB/s`` and ``1Gbyte/s`` are bytes."""
    found = re.fullmatch(NUMBER + r"([kmgt]?)(i?)((?:bits?|bytes?|b)?)((?:/s|/sec|ps|)?)", text.rstrip(), re.IGNORECASE)
    if found is None or not float(found[1].replace("_", "")):
        misused(
            f"{what} is {text!r}; it must be a positive rate in bits per second, such as 1G, 100 Mbit/s or 10gbps; for "
            "bytes write GB/s"
        )
    digits, prefix, binary, unit, per = found.groups()
    number = float(digits.replace("_", ""))
    if not prefix and not unit:
        misused(f"{what} is {text!r}: {digits} what? {digits}G is {digits} Gbit/s, and {digits}M is {digits} Mbit/s")
    if unit == "B" and (per == "PS" or not per):
        misused(
            f"{what} is {text!r}, which may mean bits or bytes: write {digits}{prefix}bit/s or, for bytes, "
            f"{digits}{prefix}B/s"
        )
    rate = number * (BINARY if binary else RATES)[prefix.lower()]
    rate *= 8 if unit == "B" or unit.lower().startswith("byte") else 1
    if not rate <= MOST_RATE:
        misused(f"{what} is {text!r}, which is {rate / 1e9:.3g} Gbit/s: no link is so fast")
    return rate
