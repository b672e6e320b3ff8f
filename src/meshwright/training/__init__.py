"""Parts that all engines on PyTorch share. No engine is imported here.

data/            sources, tokenizers, packing, batches
models/          the modules of a decoder and their weight initialization
evaluation/      losses of texts, multiple choice, lm-evaluation-harness
generation/      text from a trained model, with cached keys and values
weights/         Hugging Face safetensors in and out
checkpoints/     training states on disk
conversion       checkpoints to and from Hugging Face formats
optimizer        by name, on fp32 `masters`: `optimizer_updates`, `optimizer_states` (16 or 8 bits), `muon`
step_gemms       GEMM shapes of a step; `gemm_tuning`: the kernels chosen for them
device, machine  this machine as PyTorch and as other programs see it
cpu_libraries    environment of OpenMP and oneDNN
processes        one process a device; `rendezvous`, `signals`, `watchdog`
profiling/       a trace of some steps, and their time by category of kernel
metrics          throughput, MFU and statistics of steps
run_identity     settings that identify a run, and settings that may change; `fingerprints` of its data and weights
telemetry        files of a run: steps, events, record; `clock`, `trackers`
"""
