"""Engines of TensorRT: the model exported to ONNX, built into a plan whose attention is a plugin of ours."""
