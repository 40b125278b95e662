"""The one place where units are scaled: files hold human units in the key, the program holds base units.

Bytes, seconds, operations, bytes per second. GB is 1e9 bytes, GiB is 2**30.
"""

from __future__ import annotations

GB = 1e9
GIB = 2.0**30
MIB = 2.0**20
SECONDS_PER_DAY = 86400.0


def nine_digits(value: float) -> float:
    """A number as every export states it: the last bits of a sum never make two outputs differ.

    >>> nine_digits(1 / 3)
    0.333333333
    """
    return float(f"{value:.9g}")


# suffix of a TOML key -> (suffix of the field, factor); the longest suffix wins
SUFFIXES: dict[str, tuple[str, float]] = {
    "_gbit_per_s": ("_bytes_per_s", 1e9 / 8),
    "_gb_per_s": ("_bytes_per_s", 1e9),
    "_tflops": ("_flops", 1e12),
    "_gib": ("_bytes", GIB),
    "_gb": ("_bytes", GB),
    "_ms": ("_seconds", 1e-3),
    "_us": ("_seconds", 1e-6),
    "_minutes": ("_seconds", 60.0),
    "_hours": ("_seconds", 3600.0),
}


def base_unit(key: str) -> tuple[str, float]:
    """The field name and the factor that a human key stands for.

    >>> base_unit("hbm_gb_per_s")
    ('hbm_bytes_per_s', 1000000000.0)
    >>> base_unit("num_layers")
    ('num_layers', 1.0)
    """
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if key.endswith(suffix):
            replacement, factor = SUFFIXES[suffix]
            return key.removesuffix(suffix) + replacement, factor
    return key, 1.0


def three(value: float) -> str:
    """A number in three digits, without an exponent for large ones that people still read.

    >>> three(0.123456), three(21.44), three(12345.6), three(2e120)
    ('0.123', '21.4', '12,346', '2e+120')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def four(value: float) -> str:
    """A number in four digits, without an exponent for large ones that people still read.

    >>> four(2.65464), four(123456.7)
    ('2.655', '123,457')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
