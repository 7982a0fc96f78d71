"""The TensorRT plugin `lowkv::PagedAttention`: paged attention inside an engine, by the kernels of `kvattention.gpu`.

    trt = kvattention.tensorrt.libraries.import_tensorrt()
    kvattention.tensorrt.register(trt, kernels)     # before an ONNX file is parsed, or an engine deserialized

libraries   importing TensorRT
fields      what a plugin knows of its layer
plugin      the plugin, its creator, their registration
"""

from kvattention.tensorrt.fields import FIELDS, PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, PluginFields
from kvattention.tensorrt.plugin import INPUTS, register

__all__ = ["FIELDS", "INPUTS", "PLUGIN_NAME", "PLUGIN_NAMESPACE", "PLUGIN_VERSION", "PluginFields", "register"]
