"""Training kernels: one operation, several routes (plain PyTorch, Triton, libraries), chosen by data and recorded.

    operations      the table of operations and their routes (imports no PyTorch)
    routes          a route, a call, and the reason why a route cannot serve a call
    dispatch        which route serves a call: run file, tuned table of the device, default of the architecture
    inspection      compiles every Triton kernel for every architecture without a GPU
    architectures   what a kernel may use on an architecture: registers, shared memory, threads

Each operation has a module with the reference in plain PyTorch, which is its specification, and its other routes.
"""
