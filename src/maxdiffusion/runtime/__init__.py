"""Files, videos, logging, timing, profiling and TPU flags."""
