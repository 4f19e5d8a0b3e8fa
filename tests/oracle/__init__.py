"""diffusers as the judge: tiny checkpoints made with its classes, and what it makes of them."""

import os

# Some virtual CPUs advertise AMX and trap on it; torch in bf16 dies there without a Python error.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
