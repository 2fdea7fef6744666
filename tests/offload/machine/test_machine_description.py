"""A line of text describes a machine; an invalid one gives a one-line error."""

import pytest

from edgeinfer_offload.machine.description import DescriptionError, describe_machine
from edgeinfer_offload.machine.graphics_cards import cards, find_card
from edgeinfer_offload.machine.peer_sums import NVLINK, PCIE
from tests.offload.model_shapes import GIB


def test_a_known_card_is_a_complete_description() -> None:
    machine = describe_machine("rtx 4060 laptop")
    assert machine.origin == "described"
    assert machine.graphics is not None
    assert machine.link is not None
    assert machine.graphics.name == "RTX 4060 Laptop"
    assert machine.graphics.free_bytes == 8 * GIB
    assert machine.graphics.bytes_per_second == pytest.approx(0.9 * 256e9)
    assert machine.link.to_gpu == pytest.approx(0.8 * 8 * 1.969e9)
    assert machine.processor.total_bytes == 16 * GIB


@pytest.mark.parametrize(
    "text",
    [
        "rtx 4060 laptop: 8GiB, 256GB/s, pcie 12GB/s, 64GB/s ram, 32GiB ram",
        "RTX 4060 Laptop:pcie 12 GB/s , ram 64gb/s, 32 gb ram,256 GB/s vram",
        "NVIDIA GeForce RTX 4060 Laptop GPU, ram 32GiB, 64GB/s ram, pcie 12GB/s",
        "8GiB vram, 256GB/s, 29 TFLOPS, pcie 12GB/s, 64GB/s RAM, 32GiB RAM",
        "mine: 8192MiB, 256GB/s, 29tflops, pcie 12GB/s, 64GB/s ram, 32GiB ram, 8 threads",
    ],
)
def test_equivalent_descriptions_are_equal(text: str) -> None:
    machine = describe_machine(text)
    assert machine.graphics is not None
    assert machine.link is not None
    assert machine.graphics.total_bytes == 8 * GIB
    assert machine.graphics.bytes_per_second == pytest.approx(0.9 * 256e9)
    assert machine.graphics.operations_per_second == pytest.approx(0.4 * 29e12)
    assert machine.link.to_gpu == pytest.approx(12e9)
    assert machine.processor.bytes_per_second == pytest.approx(0.8 * 64e9)
    assert machine.processor.free_bytes == 24 * GIB


def test_lanes_and_generations_give_the_link() -> None:
    for text, rate in (("pcie 4 x8", 12.6e9), ("pcie 5.0 x16", 50.4e9), ("pcie 3", 12.6e9)):
        machine = describe_machine(f"8GiB, 256GB/s, {text}")
        assert machine.link is not None
        assert machine.link.to_gpu == pytest.approx(rate, rel=0.01)


def test_several_cards_add_up_sums_by_their_link() -> None:
    for text, peers in (
        ("2x rtx 3090", PCIE),
        ("2x rtx 3090 24GiB, nvlink", NVLINK),
        ("2x h200", NVLINK),
        ("3x mine: 8GiB, 256GB/s, nvlink", NVLINK),
    ):
        assert describe_machine(text).peers == peers
    with pytest.raises(DescriptionError, match="'nvlink' in 'cpu, nvlink': 'cpu' means no GPU"):
        describe_machine("cpu, nvlink")


def test_a_machine_may_have_no_gpu() -> None:
    for text in ("cpu", "CPU: 90GB/s ram, 64GiB ram, 16 threads, 2000 gops", "90GB/s ram"):
        assert describe_machine(text).graphics is None
    processor = describe_machine("cpu: 90GB/s ram, 64GiB ram, 16 threads, 2000 gops").processor
    assert (processor.threads, processor.total_bytes) == (16, 64 * GIB)
    assert processor.operations_per_second == 2e12


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rtx 4061", "'rtx 4061': no such card in the table; known are RTX 4060"),
        ("rtx 4060, 12 bananas", "'12 bananas' in 'rtx 4060, 12 bananas': wanted a known card, or terms as"),
        ("mine", "'mine': no such card in the table"),
        ("a100", "'a100': which one? A100 40GB or A100 80GB"),
        ("mine: pcie 12GB/s", "'mine': no such card in the table"),
        ("mine: 8GiB", "'mine': no card in the table, and described without its bandwidth, as 256GB/s"),
        ("mine: 256GB/s", "'mine': no card in the table, and described without its memory, as 8GiB"),
        ("8GiB", "a GPU was described without its bandwidth, as 256GB/s"),
        ("256GB/s", "a GPU was described without its memory, as 8GiB"),
        ("mine: 0GiB, 256GB/s", "'0GiB': saw 0, wanted a positive number"),
        ("x: 8GiB, 256GB/s, pcie 9 x8", "'pcie 9 x8' in "),
        ("", "'': wanted a known card, or terms as"),
        (" : , ", "' : , ': wanted a known card, or terms as"),
        ("x: 8GiB, 256Gb/s", "'256Gb/s' in 'x: 8GiB, 256Gb/s': saw bits a second, wanted bytes, as 256GB/s"),
        ("x: 8GiB, 256GB/s, pcie 64gbps", "'pcie 64gbps' in "),
        ("x: 8GiB, 256GB/s, 12GB", "'12GB' in 'x: 8GiB, 256GB/s, 12GB': saw '8GiB' before, wanted one"),
        ("rtx 4090, pcie 4 x8, pcie 12GB/s", "'pcie 12GB/s' in "),
        ("cpu: 8GiB, 90GB/s ram", "'8GiB' in 'cpu: 8GiB, 90GB/s ram': 'cpu' means no GPU"),
    ],
)
def test_an_invalid_description_is_named(text: str, wrong: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        describe_machine(text)
    assert str(caught.value).startswith(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rate", "bytes_per_second"),
    [("1000GB/s", 1e12), ("1000 gb/s vram", 1e12), ("1TB/s", 1e12), ("1000GiB/s", 1000 * GIB)],
)
def test_a_rate_has_a_unit(rate: str, bytes_per_second: float) -> None:
    machine = describe_machine(f"mine: 8GiB, {rate}")
    assert machine.graphics is not None
    assert machine.graphics.bytes_per_second == pytest.approx(0.9 * bytes_per_second)


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("rtx 4060 laptop 8GB", "RTX 4060 Laptop", 8),
        ("RTX4060Ti 16 GB", "RTX 4060 Ti", 16),
        ("4090", "RTX 4090", 24),
        ("4070 ti super", "RTX 4070 Ti SUPER", 16),
        ("5060ti 8gb, 64GB/s ram", "RTX 5060 Ti", 8),
        ("gtx 1660super", "GTX 1660 SUPER", 6),
        ("3080 12gb", "RTX 3080 12GB", 12),
        ("nvidia geforce rtx 3070 mobile", "RTX 3070 Laptop", 8),
        ("RTX 2080 Max-Q", "RTX 2080 Laptop", 8),
        ("a100 80GB", "A100 80GB", 80),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40),
        ("a100: 40GiB", "A100 40GB", 40),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("h200", "H200", 141),
        ("Tesla T4", "T4", 16),
        ("l4", "L4", 24),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell", 96),
    ],
)
def test_cards_are_found_by_common_and_driver_names(text: str, name: str, gib: float) -> None:
    graphics = describe_machine(text).graphics
    assert graphics is not None
    assert (graphics.name, graphics.total_bytes) == (name, gib * GIB)


def test_common_cards_are_in_the_table() -> None:
    numbers = [
        *(f"rtx {n}" for n in (2060, 2070, 2080, 3050, 3060, 3070, 3080, 3090, 4060, 4070, 4080, 4090)),
        *(f"rtx {n}" for n in (5050, 5060, 5070, 5080, 5090)),
        *(f"rtx {n} laptop" for n in (2060, 3050, 3060, 3070, 3080, 4050, 4060, 4070, 4080, 4090)),
        *(f"rtx {n} laptop" for n in (5050, 5060, 5070, 5080, 5090)),
        *("gtx 1650", "gtx 1660", "gtx 1660 ti", "l4", "h100", "h200", "t4", "rtx 6000 ada", "a100 40gb"),
    ]
    assert [name for name in numbers if find_card(name) is None] == []


def test_every_card_is_found_by_its_driver_name_and_plausible() -> None:
    for card in cards():
        family, _, rest = card.name.partition(" ")
        assert find_card(f"NVIDIA GeForce {family} {rest}") == card
        assert find_card(f"{family} {rest} GPU".lower()) == card
        assert 2 <= card.gib <= 192
        assert 90 <= card.gb_s <= 8000
        assert card.pcie in (3, 4, 5)
        assert 3 <= card.tflop_s <= 2500
    assert find_card("rtx 4070ti super") == find_card("RTX 4070 Ti SUPER")
    assert find_card("radeon 7900") is None


def test_several_cards_of_a_kind_are_several_gpus() -> None:
    one, two = describe_machine("rtx 3090, 64GiB ram"), describe_machine("2x rtx 3090, 64GiB ram")
    assert [gpu.index for gpu in two.gpus] == [0, 1]
    assert two.gpus[0] == one.gpus[0]
    assert two.processor == one.processor
    assert len(describe_machine("3 x my card: 8GiB, 256GB/s").gpus) == 3


@pytest.mark.parametrize("text", ["0x rtx 3090", "17x rtx 3090", "2x cpu"])
def test_a_number_of_cards_is_checked(text: str) -> None:
    with pytest.raises(DescriptionError, match="wanted 1 to 16 cards, as '2x rtx 3090'"):
        describe_machine(text)
