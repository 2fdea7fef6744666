"""GGUF files and the block formats of their tensors."""

from edgeinfer_quant_formats.codecs import decode, encode
from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.formats import FORMATS, FormatSpec, block_format
from edgeinfer_quant_formats.gguf.reader import GGUFFile
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.gguf.writer import GGUFWriter

__all__ = [
    "FORMATS",
    "FormatError",
    "FormatSpec",
    "GGUFFile",
    "GGUFWriter",
    "TensorInfo",
    "block_format",
    "decode",
    "encode",
]
