"""Marks of tests that need what Windows lacks, each with the reason."""

import os

import pytest

from edgeinfer_kernels.system.direct_files import can_read_directly

IS_WINDOWS = os.name == "nt"
NEEDS_PREAD = pytest.mark.skipif(not can_read_directly(), reason="Windows has no pread")
NEEDS_MODES = pytest.mark.skipif(IS_WINDOWS, reason="a user's folders are private there, without modes")
NEEDS_CUT_MAPPINGS = pytest.mark.skipif(IS_WINDOWS, reason="Windows cuts no file that is mapped")
NEEDS_SIGNALS = pytest.mark.skipif(IS_WINDOWS, reason="Ctrl-C reaches every program of a console there")
NEEDS_ANY_NAME = pytest.mark.skipif(IS_WINDOWS, reason="file names have no such characters there")
