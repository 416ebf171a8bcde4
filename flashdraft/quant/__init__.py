"""NVFP4 for the linear leaves of any module. What a draft's files say of it is ../quantized.py, the command is ../quantize."""
