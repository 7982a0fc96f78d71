"""Running a TensorRT engine: a step's lists in, the candidates out, decode steps as CUDA graphs.

inputs      a step as the engine's inputs: which profile, padded how, laid out where; arithmetic only
executor    bindings, contexts, graphs and copies over an engine and a device
opening     from an engine directory to an executor: checks, memory, plugin

Not run on a GPU: everything here has been run against a device that only records.
"""
