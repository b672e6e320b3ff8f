"""One torchrun per host. Each of several hosts runs the same command with the same rendezvous address."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.launch.request import RESTARTS, Dispatch, LaunchRequest

PORT = 29500


def dispatch(request: LaunchRequest, *, python: str, rendezvous: str | None) -> Dispatch:
    """Return torchrun with the processes of this host.

    python       the interpreter
    rendezvous   HOST[:PORT] of one of the hosts, where they rendezvous; None: one host

    Raises InputError when there are several nodes and no address, or one node and an address.
    """
    variables = {v.name: v.value for v in request.environment}
    if request.resume:
        variables[RESTARTS] = "1"
    assignments = [f"{name}={value}" for name, value in variables.items()]
    command = (
        *(("env", *assignments) if assignments else ()), python, "-m", "meshwright.engines.torchrun",
        *_rendezvous_options(request, rendezvous), *request.torchrun_options,
        "--max-restarts", str(request.max_restarts),
        "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *script(request.argv),
    )  # fmt: skip
    files = {str(request.folder / path): text for path, text in request.files.items()}
    notes = []
    if request.num_nodes > 1:
        notes.append(
            f"run this command on each of the {request.num_nodes} hosts; {request.folder} must be the same on all"
        )
    return Dispatch(files=files, commands=(command,), notes=tuple(notes))


def torchrun(request: LaunchRequest, python: str) -> tuple[str, ...]:
    """Return torchrun on each of the nodes, whose environment has its rank and the address of the first."""
    return (
        python, "-m", "meshwright.engines.torchrun", "--nnodes", str(request.num_nodes), *request.torchrun_options,
        *script(request.argv),
    )  # fmt: skip


def script(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engine's command as torchrun takes it: torchrun's interpreter runs Python, else it is a program."""
    return argv[1:] if argv[0] == "python" else ("--no-python", *argv)


def _rendezvous_options(request: LaunchRequest, rendezvous: str | None) -> tuple[str, ...]:
    if request.num_nodes == 1:
        if rendezvous is not None:
            raise InputError("one host needs no rendezvous", got=f"--rendezvous {rendezvous}")
        return ("--standalone",)
    if rendezvous is None:
        raise InputError(
            f"the run needs {request.num_nodes} hosts, which need an address to rendezvous",
            hint="--rendezvous HOST:PORT with one of the hosts, the same on all of them",
        )
    host, _, port = rendezvous.rpartition(":") if ":" in rendezvous else (rendezvous, "", str(PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError("--rendezvous", got=rendezvous, allowed="HOST or HOST:PORT")
    return (
        "--nnodes", str(request.num_nodes), "--rdzv-backend", "c10d", "--rdzv-id", request.name,
        "--rdzv-endpoint", f"{host}:{port}",
    )  # fmt: skip
