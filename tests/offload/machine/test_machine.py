"""A machine goes through JSON unchanged; what isn't one is refused."""

import json
from dataclasses import replace

import pytest

from edgeinfer_offload.machine.hardware import Machine
from tests.offload.model_shapes import cpu_only, laptop, server


@pytest.mark.parametrize("machine", [laptop(), server(), cpu_only()])
def test_a_machine_survives_json(machine: Machine) -> None:
    measured = replace(machine, processor=replace(machine.processor, kernels={"Q4_K": 4e10}))
    assert Machine.from_json(measured.to_json()) == measured


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"processor": 5}, "saw 5, wanted a Processor"),
        ({"colour": "red"}, "Machine: fields colour"),
        ({"link": {"to_gpu": 1e9}}, "Link: fields from_gpu, pageable_from_gpu, pageable_to_gpu"),
        ({"disk_bytes_per_second": "fast"}, "Machine.disk_bytes_per_second: saw 'fast', wanted a number"),
    ],
)
def test_what_is_no_machine_is_refused(change: dict[str, object], text: str) -> None:
    content = json.loads(cpu_only().to_json()) | change
    content = {name: value for name, value in content.items() if value is not None or name in change}
    with pytest.raises(ValueError, match=text):
        Machine.from_json(json.dumps(content))


def test_a_format_that_was_not_measured_is_read_at_a_share_of_the_bandwidth() -> None:
    processor = replace(laptop().processor, kernels={"Q4_K": 2e10})
    assert processor.rate("Q4_K") == 2e10
    assert processor.rate("Q8_0") == pytest.approx(0.9 * 50e9)
