"""Types of values in a run file, and the base of its sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def whole(value: object) -> object:
    """`15e12` is a float to YAML and a count to everybody else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def readable(text: str) -> str:
    """The text. Raises ValueError where nothing of it can be seen, or some of it cannot be printed."""
    if not text.isprintable() or not text.strip():
        raise ValueError("must be printable text")
    return text


Lax = Field(strict=False)  # an enum from its value, a tuple from a list; the items stay strict

Text = Annotated[str, Field(max_length=4096), AfterValidator(readable)]
Count = Annotated[int, BeforeValidator(whole), Field(gt=0, le=10**9)]
CountOrZero = Annotated[int, BeforeValidator(whole), Field(ge=0, le=10**9)]
Size = Annotated[int, BeforeValidator(whole), Field(gt=0, le=10**7)]
SizeOrZero = Annotated[int, BeforeValidator(whole), Field(ge=0, le=10**7)]
Tokens = Annotated[int, BeforeValidator(whole), Field(gt=0, le=10**17)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
NotNegative = Annotated[float, Field(ge=0, le=1e12)]
Ratio = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class RunFileSection(BaseModel):
    """A mapping of the run file: its keys are known, its values are what they look like."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
