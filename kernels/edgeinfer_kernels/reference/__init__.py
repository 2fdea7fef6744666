"""The numpy backend, the reference for tests of the other backends."""

from edgeinfer_kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
