# Meshwright on PyTorch for CUDA, for `meshwright launch`: docs/guides/launch.md has the commands.
# This recipe has not been built.
#
#     docker build -f containers/cuda.Dockerfile -t registry.example/train:1 .
#
# PyTorch publishes the base. Public Dockerfiles and their notes name this tag, with Python 3.12.3 of Ubuntu, PyTorch
# 2.13.0+cu130 and the digest sha256:db80a41f8428644cebcb3d75b0b62df334ab6c0e75785951eb25f48bfbd42407 (2026-08). For
# drivers before CUDA 13 there is 2.13.0-cuda12.6-cudnn9-runtime. Another base, such as NVIDIA's, needs Python 3.11 and
# PyTorch 2.11 or newer.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${BASE}

# Triton compiles its launchers with a C compiler and Python's headers. NCCL opens libibverbs when it starts, and
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
RUN sh /opt/meshwright/containers/install.sh cuda /opt/meshwright "${EXTRAS}"

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
