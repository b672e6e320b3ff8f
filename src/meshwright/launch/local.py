"""One torchrun a host. On several hosts the same command is given on each of them, with one address to meet at."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.launch.request import RESTARTS, Dispatch, LaunchRequest

PORT = 29500


def dispatch(request: LaunchRequest, *, python: str, rendezvous: str | None) -> Dispatch:
    """torchrun with the processes of this host.

    python       the interpreter
    rendezvous   HOST[:PORT] of one of the hosts, by which all of them find each other; None: one host

    Raises InputError when there are several nodes and no address, or one node and an address.
    """
    if request.exclude:
        raise InputError("hosts to leave out are for slurm and kubernetes", got=", ".join(request.exclude))
    variables = {v.name: v.value for v in request.environment}
    if request.resume:
        variables[RESTARTS] = "1"
    words = [f"{name}={value}" for name, value in variables.items()]
    command = (
        *(("env", *words) if words else ()), python, "-m", "meshwright.engines.torchrun",
        *_meeting(request, rendezvous), "--nproc-per-node", str(request.devices_per_node),
        "--max-restarts", str(request.max_restarts),
        "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *script(request.argv),
    )  # fmt: skip
    files = {str(request.folder / path): text for path, text in request.files.items()}
    notes = []
    if request.num_nodes > 1:
        notes.append(
            f"give this command on each of the {request.num_nodes} hosts; they see the same {request.folder}"
        )
    return Dispatch(files=files, commands=(command,), notes=tuple(notes))


def script(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The engine's command as torchrun takes it: its own interpreter runs Python, anything else is a program."""
    return argv[1:] if argv[0] == "python" else ("--no-python", *argv)


def _meeting(request: LaunchRequest, rendezvous: str | None) -> tuple[str, ...]:
    if request.num_nodes == 1:
        if rendezvous is not None:
            raise InputError("one host has nobody to meet", got=f"--rendezvous {rendezvous}")
        return ("--standalone",)
    if rendezvous is None:
        raise InputError(
            f"the run needs {request.num_nodes} hosts, which must find each other",
            hint="--rendezvous HOST:PORT with one of the hosts, the same on all of them",
        )
    host, _, port = rendezvous.rpartition(":") if ":" in rendezvous else (rendezvous, "", str(PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError("--rendezvous", got=rendezvous, allowed="HOST or HOST:PORT")
    return (
        "--nnodes", str(request.num_nodes), "--rdzv-backend", "c10d", "--rdzv-id", request.name,
        "--rdzv-endpoint", f"{host}:{port}",
    )  # fmt: skip
