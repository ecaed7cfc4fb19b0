"""Any-Precision quantization: an 8-bit code a weight, whose top b bits are its b-bit code (Park et al., ICML 2024)."""

from pwjax.anyprec.dequantize import dequantize, relative_error
from pwjax.anyprec.quantizer import Quantized, quantize

__all__ = ["Quantized", "dequantize", "quantize", "relative_error"]
