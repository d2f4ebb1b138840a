"""Format numbers for users: three digits and a decimal prefix."""

from __future__ import annotations

_PREFIXES = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))


def format_count(n: float) -> str:
    """Format a count: `2.15 G`, `524 k`, `64`."""
    for size, prefix in _PREFIXES:
        if abs(n) >= size:
            return f"{n / size:.3g}{prefix}"
    return f"{n:.3g}" if n != int(n) else str(int(n))


def format_bytes(n: float) -> str:
    """Format a number of bytes: `134 MB`, `4.1 kB`, `0 B`."""
    text = format_count(n)
    return f"{text}B" if " " in text else f"{text} B"


def format_number(name: str, n: float) -> str:
    """Format a number of a decision with its name, which implies the unit."""
    if "byte" in name or name.startswith("room"):
        return f"{format_bytes(n)} {name.removeprefix('bytes').strip()}".strip()
    return f"{format_count(n)} {name}"
