"""Tuned GEMMs of one device: the file that `meshwright tune gemm` writes and that a run names as `gemm_tuning`.

    CPU      threads of a process, and a route for each GEMM (`kernels.linear`)
    NVIDIA   the library that PyTorch prefers, cuBLAS or cuBLASLt; PyTorch's TunableOp has no other kernels there
    AMD      TunableOp: one of all kernels of rocBLAS and hipBLASLt for each GEMM

No choice changes a number format or a sum: results differ by rounding. The file is of one device and one version of
PyTorch, and refused on any other.

Sources: documentation of torch.cuda.tunable and torch.backends.cuda.preferred_blas_library, PyTorch 2.13.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from meshwright.errors import InputError
from meshwright.files import document_of, refused_with
from meshwright.json_values import parse_json
from meshwright.kernels.linear import GemmKind, GemmRoute, LinearShape, routes_of, using_routes
from meshwright.specs.plan import Plan
from meshwright.training import device as devices
from meshwright.training.step_gemms import Gemm

SCHEMA = "meshwright gemm tuning 1"
LIBRARIES = {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"}
MOST_BYTES = 16 * 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RETUNE_HINT = "`meshwright tune gemm RUN.yaml --out FILE` makes one here"


@dataclass(frozen=True, kw_only=True)
class GemmChoices:
    """Choices for the GEMMs of a run. A field without a value leaves PyTorch's default."""

    threads: int | None = None  # of a process, on a CPU
    routes: Mapping[Gemm, GemmRoute] = field(default_factory=dict)  # on a CPU
    library: str | None = None  # on a GPU
    tunable_op: tuple[str, ...] = ()  # lines of a file of TunableOp

    @property
    def is_usual(self) -> bool:
        """True if nothing was chosen."""
        return self == GemmChoices()

    def describe(self, gemms: Collection[Gemm]) -> str:
        """The choices in words, for a run with these `gemms`."""
        parts = []
        if self.threads is not None:
            parts.append("1 thread" if self.threads == 1 else f"{self.threads} threads")
        if self.routes:
            parts.append(f"{len(set(self.routes) & set(gemms))} of {len(gemms)} GEMMs by another route")
        if self.library is not None:
            parts.append(LIBRARIES[self.library])
        if self.tunable_op:
            chosen = sum(not line.startswith("Validator") for line in self.tunable_op)
            parts.append(f"{chosen} kernels of TunableOp")
        return ", ".join(parts) or "nothing chosen"


@dataclass(frozen=True, kw_only=True)
class TuningConditions:
    """Device and software that choices are valid for."""

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
    """The conditions of this process."""
    toolkit = None if device.type == "cpu" else torch.version.hip or torch.version.cuda
    return TuningConditions(device=devices.device_name(device), torch=torch.__version__, toolkit=toolkit)


# --- the file ---


def to_text(found: GemmTuning) -> str:
    """The file's text."""
    c = found.choices
    routes = [{**asdict(gemm), "route": route} for gemm, route in c.routes.items()]
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
    """Read the file at `path`. Raises InputError where it is not a valid tuning file."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"gemm_tuning {name!r} cannot be read ({reason})", hint=RETUNE_HINT) from None
    try:
        document = parse_json(data.decode("utf-8"))
    except ValueError:
        raise InputError(f"gemm_tuning {name!r} is cut short or no JSON document", hint=RETUNE_HINT) from None
    refusal = f"{name} is no file of tuned GEMMs"
    with refused_with(refusal, hint=RETUNE_HINT):
        return _from_document(document_of(document, schema=SCHEMA, refusal=refusal))


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
        if not all(isinstance(size, int) and size > 0 for size in shape.values()) or row["format"] not in DTYPES:
            raise ValueError(f"GEMM: {row!r}")
        gemm = Gemm(format=row["format"], kernel=GemmKind(row["kernel"]), **shape)
        routes[gemm] = GemmRoute(row["route"])
    lines = tuple(given["tunable_op"])
    if not all(isinstance(line, str) and line.isprintable() for line in lines):
        raise ValueError("tunable_op: lines of text")
    own = ("schema", "conditions", "choices")
    return GemmTuning(
        conditions=TuningConditions(**document["conditions"]),
        choices=GemmChoices(threads=threads, routes=routes, library=library, tunable_op=lines),
        details={key: value for key, value in document.items() if key not in own},
    )


def require(found: GemmTuning, *, device: torch.device, plan: Plan, gemms: Collection[Gemm], name: str) -> None:
    """Raise InputError where `found` was not tuned for this device, this PyTorch, or any GEMM of the run."""
    here = conditions(device)
    for what, key in (("device", "device"), ("version of PyTorch", "torch"), ("CUDA or HIP", "toolkit")):
        got, allowed = getattr(found.conditions, key), getattr(here, key)
        if got != allowed:
            raise InputError(f"gemm_tuning {name!r} is of another {what}", got=got, allowed=allowed, hint=RETUNE_HINT)
    routes = found.choices.routes
    for gemm, route in routes.items():  # processors of one name differ in what they multiply
        if route not in (here_has := routes_of(DTYPES[gemm.format])):
            raise InputError(
                f"gemm_tuning {name!r} has a route for {gemm.format} that this processor lacks",
                got=str(route), allowed="; ".join(here_has), hint=RETUNE_HINT,
            )  # fmt: skip
    if routes and plan.tensor > 1:
        raise InputError(
            f"gemm_tuning {name!r} has routes, and GEMMs that tensor parallelism shards take none",
            got=f"tensor = {plan.tensor}", allowed="1", hint=RETUNE_HINT,
        )  # fmt: skip
    if routes and not set(routes) & set(gemms):
        raise InputError(f"gemm_tuning {name!r} has no GEMM of this run", hint=RETUNE_HINT)


# --- in use ---


@contextmanager
def using(choices: GemmChoices | None, device: torch.device) -> Iterator[None]:
    """Use `choices` for GEMMs while the context is open."""
    with ExitStack() as stack:
        if choices is not None and device.type == "cpu":
            stack.enter_context(using_routes(_by_layer(choices.routes)))
            if choices.threads is not None:
                stack.enter_context(_changed(torch.get_num_threads, torch.set_num_threads, choices.threads))
        elif choices is not None:
            if choices.library is not None:
                library = torch.backends.cuda.preferred_blas_library
                stack.enter_context(_changed(library, library, choices.library))
            if choices.tunable_op:
                stack.enter_context(_tunable_op(choices.tunable_op))
        yield


def _by_layer(routes: Mapping[Gemm, GemmRoute]) -> dict[LinearShape, dict[GemmKind, GemmRoute]]:
    found: dict[LinearShape, dict[GemmKind, GemmRoute]] = {}
    for p, route in routes.items():
        found.setdefault((DTYPES[p.format], p.m, p.n, p.k), {})[p.kernel] = route
    return found


@contextmanager
def _changed(read: Callable[[], Any], write: Callable[[Any], object], value: object) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def _tunable_op(lines: Sequence[str]) -> Iterator[None]:
    """Use the kernels in these lines. No other GEMM is tuned, and PyTorch's own file is neither read nor written."""
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
                    "PyTorch refuses the tuned kernels: they are of other versions of its libraries", hint=RETUNE_HINT
                )
            yield
        finally:
            tunable.enable(False)


@contextmanager
def tuning_kernels(*, most_ms: int) -> Iterator[None]:
    """Let TunableOp choose a kernel for each GEMM that runs while the context is open."""
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
    """TunableOp's choices so far, as lines of its file, without choices of the default."""
    from torch.cuda import tunable

    # torch annotates one result as a tuple; the function returns a tuple of them.
    results = cast(tuple[tuple[str, str, str, float], ...], tunable.get_results())
    chosen = [result for result in results if result[2] != "Default"]
    if not chosen:
        return ()
    validators = [f"Validator,{key},{value}" for key, value in tunable.get_validators()]
    return (*validators, *(",".join(str(part) for part in result) for result in chosen))
