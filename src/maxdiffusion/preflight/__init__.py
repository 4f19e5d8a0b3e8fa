"""Compiles a job for a TPU slice that is not there, and reports what it will do.

job         the job of a config on described devices      devices     TPU devices by name
compile     every program of the job                      kernels     its kernels alone
readers/    scheduled HLO, cycles, collectives, bundles   report      text and JSON
command     compile -> read -> report                     ranking     several attentions or slices
tile_search, tiles, tune   the best block sizes of kernels
benchmark   denoise steps on devices of this machine      plots       charts and heat maps
"""
