"""A rank of tensor parallel as tests start it: on a GPU if there is one, else in the fixed interpreter. Its
small chunks are added up in several parts.
"""

from edgeinfer.loading.tensor.rank import main
from edgeinfer_kernels.cuda.tensor import chunk_sums
from tests.kernels.cuda.conftest import HAS_GPU


def start() -> None:
    """Serve the pipe whose file descriptor is the program's argument."""
    chunk_sums.PRODUCT_ELEMENTS = 16 * 32
    if HAS_GPU:
        main()
    else:
        from tests.kernels.cuda.interpreter import fixed_interpreter

        with fixed_interpreter():
            main()


if __name__ == "__main__":
    start()
