"""Generations of accelerators: which device succeeds which, by line of products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.catalog.entries import DATA
from meshwright.files import record_of, toml_table


@dataclass(frozen=True, kw_only=True)
class ProductLine:
    """Accelerators that succeed one another, oldest generation first."""

    vendor: str
    name: str
    generations: tuple[tuple[str, ...], ...]
    source: str

    def index(self, accelerator: str) -> int | None:
        """Number of the generation of an accelerator, from 0; None: it is not of this line."""
        return next((i for i, names in enumerate(self.generations) if accelerator in names), None)


@cache
def product_lines() -> tuple[ProductLine, ...]:
    """All known lines."""
    return tuple(record_of(ProductLine, row) for row in toml_table(DATA / "generations.toml")["line"])


def line_of_succession(older: str, newer: str) -> ProductLine | None:
    """The line in which `newer` is of a later generation than `older`; None: there is none.

    >>> line_of_succession("tpu-v4", "tpu-v5p").name
    'TPUs with 3D tori'
    >>> line_of_succession("tpu-v5e", "tpu-v5p") is None, line_of_succession("h200", "a100") is None
    (True, True)
    """
    for line in product_lines():
        first, second = line.index(older), line.index(newer)
        if first is not None and second is not None and first < second:
            return line
    return None
