"""How matrix products are made on one device: what `meshwright tune gemm` found, and a run names as `gemm_tuning`.

    CPU      threads of a process, and a route for each product (`models.product`)
    NVIDIA   the library that PyTorch prefers, cuBLAS or cuBLASLt; PyTorch's TunableOp has nothing to choose from there
    AMD      TunableOp: one of all kernels of rocBLAS and hipBLASLt for each product

None of them changes a format or what is summed: results differ by rounding. The file is of one device and one version
of PyTorch, and refused on any other.

Sources: documentation of torch.cuda.tunable and torch.backends.cuda.preferred_blas_library, PyTorch 2.13.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import InputError
from meshwright.specs.plan import Plan
from meshwright.training import device as devices
from meshwright.training.models.linear import GemmKind, GemmRoute, LinearShape, using_routes
from meshwright.training.step_gemms import Gemm

SCHEMA = "meshwright gemm tuning 1"
LIBRARIES = {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"}
MOST_BYTES = 16 * 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AGAIN = "`meshwright tune gemm RUN.yaml --out FILE` makes one here"


@dataclass(frozen=True, kw_only=True)
class GemmChoices:
    """How products are made. What is left out stays as it is."""

    threads: int | None = None  # of a process, on a CPU
    routes: Mapping[Gemm, GemmRoute] = field(default_factory=dict)  # on a CPU
    library: str | None = None  # on a GPU
    tunable_op: tuple[str, ...] = ()  # lines of a file of TunableOp

    @property
    def is_usual(self) -> bool:
        """Whether nothing was chosen."""
        return self == GemmChoices()

    def describe(self, products: Collection[Gemm]) -> str:
        """What was chosen, for a run that makes `products`."""
        parts = []
        if self.threads is not None:
            parts.append("1 thread" if self.threads == 1 else f"{self.threads} threads")
        if self.routes:
            parts.append(
                f"{len(set(self.routes) & set(products))} of {len(products)} products by another route"
            )
        if self.library is not None:
            parts.append(LIBRARIES[self.library])
        if self.tunable_op:
            chosen = sum(not line.startswith("Validator") for line in self.tunable_op)
            parts.append(f"{chosen} kernels of TunableOp")
        return ", ".join(parts) or "nothing chosen"


@dataclass(frozen=True, kw_only=True)
class TuningConditions:
    """Where choices hold."""

    device: str  # as its driver has it
    torch: str
    toolkit: str | None  # version of CUDA or HIP; None on a CPU


@dataclass(frozen=True, kw_only=True)
class GemmTuning:
    """The content of a tuning file."""

    conditions: TuningConditions
    choices: GemmChoices
    details: Mapping[str, Any] = field(default_factory=dict)  # what was measured: for readers


def conditions(device: torch.device) -> TuningConditions:
    """Those of this process."""
    toolkit = None if device.type == "cpu" else torch.version.hip or torch.version.cuda
    return TuningConditions(device=devices.device_name(device), torch=torch.__version__, toolkit=toolkit)


# --- the file ---


def to_text(found: GemmTuning) -> str:
    """The file's text."""
    c = found.choices
    routes = [{**asdict(product), "route": route} for product, route in c.routes.items()]
    document = {
        "schema": SCHEMA,
        "conditions": asdict(found.conditions),
        "choices": {
            "threads": c.threads, "library": c.library, "tunable_op": list(c.tunable_op), "routes": routes,
        },
        **found.details,
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def load(path: str | os.PathLike[str]) -> GemmTuning:
    """The file at `path`. Raises InputError with what is wrong with it."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"gemm_tuning {name!r} cannot be read ({reason})", hint=AGAIN) from None
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise InputError(f"gemm_tuning {name!r} is cut short or no JSON document", hint=AGAIN) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        got = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InputError(f"{name} is no file of tuned products", got=got, allowed=SCHEMA)
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{name} is no file of tuned products: {what}", hint=AGAIN) from None


def _from_document(document: dict[str, Any]) -> GemmTuning:
    given = document["choices"]
    threads, library = given["threads"], given["library"]
    if threads is not None and not (isinstance(threads, int) and 0 < threads <= 4096):
        raise ValueError(f"threads: {threads!r}")
    if library not in (None, *LIBRARIES):
        raise ValueError(f"library: {library!r}")
    routes = {}
    for row in given["routes"]:
        shape = {name: row[name] for name in ("m", "n", "k")}
        if (
            not all(isinstance(size, int) and size > 0 for size in shape.values())
            or row["format"] not in DTYPES
        ):
            raise ValueError(f"product: {row!r}")
        product = Gemm(format=row["format"], kernel=GemmKind(row["kernel"]), **shape)
        routes[product] = GemmRoute(row["route"])
    lines = tuple(given["tunable_op"])
    if not all(isinstance(line, str) and line.isprintable() for line in lines):
        raise ValueError("tunable_op: lines of text")
    own = ("schema", "conditions", "choices")
    return GemmTuning(
        conditions=TuningConditions(**document["conditions"]),
        choices=GemmChoices(threads=threads, routes=routes, library=library, tunable_op=lines),
        details={key: value for key, value in document.items() if key not in own},
    )


def require(
    found: GemmTuning, *, device: torch.device, plan: Plan, products: Collection[Gemm], name: str
) -> None:
    """Raise InputError where `found` was not tuned for this device, this PyTorch, or any product of the run."""
    here = conditions(device)
    for what, key in (("device", "device"), ("version of PyTorch", "torch"), ("CUDA or HIP", "toolkit")):
        got, allowed = getattr(found.conditions, key), getattr(here, key)
        if got != allowed:
            raise InputError(
                f"gemm_tuning {name!r} is of another {what}", got=got, allowed=allowed, hint=AGAIN
            )
    routes = found.choices.routes
    if routes and plan.tensor > 1:
        raise InputError(
            f"gemm_tuning {name!r} has routes, and products that tensor parallelism divides take none",
            got=f"tensor = {plan.tensor}", allowed="1", hint=AGAIN,
        )  # fmt: skip
    if routes and not set(routes) & set(products):
        raise InputError(f"gemm_tuning {name!r} has no product of this run", hint=AGAIN)


# --- in use ---


@contextmanager
def using(choices: GemmChoices | None, device: torch.device) -> Iterator[None]:
    """Make products so while the context is open."""
    with ExitStack() as stack:
        if choices is not None and device.type == "cpu":
            stack.enter_context(using_routes(_by_layer(choices.routes)))
            if choices.threads is not None:
                stack.enter_context(_threads(choices.threads))
        elif choices is not None:
            if choices.library is not None:
                stack.enter_context(_library(choices.library))
            if choices.tunable_op:
                stack.enter_context(_tunable_op(choices.tunable_op))
        yield


def _by_layer(routes: Mapping[Gemm, GemmRoute]) -> dict[LinearShape, dict[GemmKind, GemmRoute]]:
    found: dict[LinearShape, dict[GemmKind, GemmRoute]] = {}
    for p, route in routes.items():
        found.setdefault((DTYPES[p.format], p.m, p.n, p.k), {})[p.kernel] = route
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def _tunable_op(lines: Sequence[str]) -> Iterator[None]:
    """Kernels as these lines have them; nothing more is tuned, and PyTorch's own file is neither read nor written."""
    from torch.cuda import tunable

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.csv"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        tunable.tuning_enable(False)
        tunable.set_filename(str(path))
        tunable.enable(True)
        try:
            if not tunable.read_file(str(path)):
                raise InputError(
                    "PyTorch refuses the tuned kernels: they are of other versions of its libraries",
                    hint=AGAIN,
                )
            yield
        finally:
            tunable.enable(False)


@contextmanager
def tuning_kernels(*, most_ms: int) -> Iterator[None]:
    """Let TunableOp choose a kernel for each product that is made while the context is open."""
    from torch.cuda import tunable

    with tempfile.TemporaryDirectory() as folder:
        tunable.set_filename(str(Path(folder) / "tuned.csv"))
        tunable.set_max_tuning_duration(most_ms)
        tunable.enable(True)
        tunable.tuning_enable(True)
        try:
            yield
        finally:
            tunable.tuning_enable(False)
            tunable.enable(False)


def tuned_kernels() -> tuple[str, ...]:
    """What TunableOp has chosen so far, as lines of its file; those that stay with the default say nothing."""
    from torch.cuda import tunable

    chosen = [result for result in tunable.get_results() if result[2] != "Default"]
    if not chosen:
        return ()
    validators = [f"Validator,{key},{value}" for key, value in tunable.get_validators()]
    return (*validators, *(",".join(str(part) for part in result) for result in chosen))
