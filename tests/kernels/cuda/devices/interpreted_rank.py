"""A rank of tensor parallel as tests start it: on a GPU if there is one, else in the fixed interpreter."""

from edgeinfer.loading.tensor.rank import main
from tests.kernels.cuda.conftest import HAS_GPU

if __name__ == "__main__":
    if HAS_GPU:
        main()
    else:
        from tests.kernels.cuda.interpreter import fixed_interpreter

        with fixed_interpreter():
            main()
