"""Paged attention on NVIDIA GPUs: kernels in Triton language, launched by Triton, by the driver, or by TensorRT.

schedule    what a step's kernels do: lists made once per step on the host
variants    which kernels there are, with their arguments and constants
launches    grids and argument lists of a layer's launches
kernels     the kernels (imports Triton)
attention   `kvattention.Attention` on a device
compile     kernels ahead of time, to a folder of cubins
driver      a device without Torch, and the launcher of cubins
limits      what a multiprocessor holds
check       the static check of all variants
"""
