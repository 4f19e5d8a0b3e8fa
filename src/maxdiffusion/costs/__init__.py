"""Cost model of a denoise step; arithmetic only.

chips        TPUs and their slices            flops       FLOPs of a forward, bounds, MFU
links        seconds of collectives           kernel_time cycles of kernels from their code
step_time    seconds of a step and a video    estimate    seconds of a step without compiling
planner      the best attention of a slice    published   calibration with measured steps
"""
