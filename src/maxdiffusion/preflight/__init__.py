"""Compile a job for a TPU that is not there, and say what will happen.

topology   TPU devices by name, without a TPU      chips      what a chip can do
flops      work of a forward, bounds, MFU           released   sizes of released models
hlo        scheduled programs, read                 bundles    kernels' machine code, read
programs   every program of a job, compiled         step_time  seconds of a denoise step
report     all of it as words and as JSON
"""
