"""Draw the pictures of README and documents anew: docs/images, from runs that ship.

    python scripts/renew_pictures.py

They are the figures of the pages that `--html` writes, on a white ground. A test draws them again and compares.
"""

from __future__ import annotations

import re
from pathlib import Path

import meshwright as mw
from meshwright.report.figures import INK, memory_over_time_svg, waterfall_svg
from meshwright.report.scale import efficiency_svg

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
GROUND = '<rect width="100%" height="100%" fill="white"/>'


def pictures() -> dict[str, str]:
    """Return the SVG text of each picture by the name of its file."""
    ranking = mw.plan(
        model="llama3.1-70b", cluster="h100-8x32", global_sequences=512, sequence_length=8192, engine="megatron", top=1
    )
    over_time = mw.estimate("llama3-70b").memory_over_time
    assert over_time is not None
    scaled = mw.scale(
        model="llama3.1-70b", cluster="h100-8x16", global_sequences=1024, sequence_length=8192, engine="megatron",
        devices=[128, 512, 2048],
    )  # fmt: skip
    assert scaled.curve is not None
    return {
        "plan.svg": _alone(waterfall_svg(ranking.estimates[0].step.components_s)),
        "memory.svg": _alone(memory_over_time_svg(over_time)),
        "scaling.svg": _alone(efficiency_svg(scaled.curve)),
    }


def _alone(figure: str) -> str:
    """The figure for wide windows as a file of its own."""
    wide = figure[: figure.index("</svg>") + len("</svg>")]
    if "xmlns=" not in wide:
        wide = wide.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    wide = wide.replace("currentColor", INK)
    return re.sub(r"(<svg [^>]*>)", rf"\1{GROUND}", wide, count=1) + "\n"


def main() -> None:
    """Write all pictures."""
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
