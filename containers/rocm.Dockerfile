# Meshwright on PyTorch for ROCm, for `meshwright launch`: docs/guides/launch.md has the commands.
# This recipe has not been built.
#
#     docker build -f containers/rocm.Dockerfile -t registry.example/train:1 .
#
# AMD publishes the base. A Dockerfile of MONAI under AMD's copyright starts from this tag, and says that ROCm in it is
# a Python package, without /opt/rocm. Public notes on its sibling with PyTorch 2.11.0 report PyTorch 2.11.0+rocm7.14.0
# and Triton 3.7.1 (2026-09). Another base needs Python 3.11 and PyTorch 2.11 or newer.
ARG BASE=rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.12.0
FROM ${BASE}

# Triton compiles its launchers with a C compiler and Python's headers. RCCL opens libibverbs when it starts, and
# communicates by TCP without it; a network adapter that Ubuntu's providers do not know needs its vendor's library.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc libc6-dev python3-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
# `launch` calls python, and Ubuntu has python3 alone.
RUN command -v python || ln -s "$(command -v python3)" /usr/local/bin/python

# The version is in the source, so the build needs no history of git.
COPY pyproject.toml README.md LICENSE /opt/meshwright/
COPY containers/install.sh /opt/meshwright/containers/
COPY src /opt/meshwright/src

ARG EXTRAS=kernels,torchtitan
RUN sh /opt/meshwright/containers/install.sh hip /opt/meshwright "${EXTRAS}"

# Built data. Any user may write here, so that Slurm's may; a shared folder can be mounted over it.
RUN mkdir -p /var/cache/meshwright && chmod 1777 /var/cache/meshwright
ENV MESHWRIGHT_CACHE=/var/cache/meshwright

# The image has no .git, so that a record names the commit of the run's folder. This label names the image's.
ARG COMMIT=unknown
LABEL org.opencontainers.image.revision=${COMMIT}

# No ENTRYPOINT: a launcher gives the command.
WORKDIR /workspace

# The user of a pod. pyxis and apptainer take the user who submits.
ARG RUN_AS=0
USER ${RUN_AS}
