"""The numpy backend: what the others are measured against."""

from edgeinfer_kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
