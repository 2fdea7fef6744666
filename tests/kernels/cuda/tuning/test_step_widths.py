"""Which numbers of tokens have steps: slow ones are padded."""

from edgeinfer_kernels.cuda.tuning.step_timer import fast_widths


def test_a_number_of_tokens_that_is_slower_than_a_larger_one_is_padded_to_it() -> None:
    seconds = {1: 1.0, 2: 1.16, 3: 1.30, 4: 1.25, 5: 1.9, 6: 1.9, 7: 2.0, 8: 1.89, 16: 3.0}
    assert fast_widths(seconds) == (1, 2, 4, 8, 16)
    assert fast_widths({1: 1.0, 2: 1.1, 3: 1.2, 16: 1.3}) == (1, 2, 3, 16)
    assert fast_widths({3: 1.0, 4: 0.9}) == (4,)
