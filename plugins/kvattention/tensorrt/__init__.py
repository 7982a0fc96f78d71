"""The TensorRT plugin `lowkv::PagedAttention`: paged attention inside an engine, by the kernels of `kvattention.gpu`."""
