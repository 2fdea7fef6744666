"""Argument structures: fields by name, at the offsets that compiled code reads."""

import ctypes

import pytest

from edgeinfer_kernels.cpu.runtime import (
    block_args,
    embedding_args,
    experts_args,
    kernel_args,
    recurrent_args,
)
from edgeinfer_kernels.cpu.runtime.kernel_args import (
    EXCHANGE_WORDS,
    SENT,
    ExchangeWords,
    NormArgs,
    ThreadPoolArgs,
)
from edgeinfer_kernels.cpu.runtime.structure import Structure, field_types, is_address, offset_of

STRUCTURES = [
    found
    for module in (kernel_args, block_args, embedding_args, experts_args, recurrent_args)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Structure) and found is not Structure
]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_field_has_a_type_and_addresses_have_eight_bytes(structure: type[Structure]) -> None:
    for name, kind in field_types(structure).items():
        assert (
            offset_of(structure, name) % ctypes.alignment(ctypes.c_int64 if is_address(kind) else kind) == 0
        )
        assert name != "address"  # In compiled code this is the address of the structure.
        assert not is_address(kind) or getattr(structure, name).size == 8


def test_fields_written_by_threads_are_on_separate_cache_lines() -> None:
    offsets = [offset_of(ThreadPoolArgs, name) for name in field_types(ThreadPoolArgs)]
    assert offsets == [64 * index for index in range(len(offsets))]
    assert [offset_of(ExchangeWords, name) for name in ("sent", "answered")] == [0, 128]
    assert (EXCHANGE_WORDS, SENT) == (64, 0)


def test_fields_are_written_by_name_and_others_are_zero() -> None:
    norm = NormArgs(epsilon=1e-5, width=80)
    assert (norm.kind, norm.width, norm.weight) == (0, 80, 0)
    assert norm.epsilon == pytest.approx(1e-5)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(
        TypeError, match="NormArgs: saw the field eps, wanted kind, epsilon, weight, bias, width"
    ):
        NormArgs(eps=1e-5)
