"""Equal values have equal text, and only they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.core.text import digest_of, name_text, parse_name, text_of


@dataclass(frozen=True)
class Fields:
    text: str
    number: int | None
    names: tuple[str, ...]


names = st.one_of(st.text(max_size=8), st.sampled_from(["none", "1", "-", "a=b", "[a,b]", "a b", '"', "a\nb", "true"]))


@given(first=names, second=names)
def test_names_are_told_apart_and_read_back(first: str, second: str) -> None:
    assert parse_name(name_text(first)) == first
    assert (name_text(first) == name_text(second)) == (first == second)
    assert "\n" not in name_text(first) and len(name_text(first).splitlines()) <= 1


values = st.builds(Fields, names, st.none() | st.integers(), st.lists(names, max_size=3).map(tuple))


@given(first=values, second=values)
def test_text_is_injective(first: Fields, second: Fields) -> None:
    assert (text_of(first) == text_of(second)) == (first == second)


def test_the_text_of_a_model() -> None:
    model = ModelSpec(
        "tiny",
        (WeightSpec("w", (8, 4), "float32"), WeightSpec("odd name", (3,), "uint8", (2,))),
        (SegmentSpec("s", 0, ("w",)), SegmentSpec("head", None, ())),
    )
    assert model.text() == (
        "ModelSpec name=tiny kept=[]\n"
        "  weights: 2\n"
        "    WeightSpec name=w shape=[8,4] dtype=float32 strides=none\n"
        '    WeightSpec name="odd name" shape=[3] dtype=uint8 strides=[2]\n'
        "  segments: 2\n"
        "    SegmentSpec name=s layer=0 reads=[w]\n"
        "    SegmentSpec name=head layer=none reads=[]\n"
    )
    assert model.digest == digest_of(model.text()) and len(model.digest) == 64
    assert replace(model, name="other").digest != model.digest


def test_devices_print_too() -> None:
    assert text_of(DeviceSpec("host", "host", 2**33)) == (
        "DeviceSpec kind=host name=host memory_bytes=8589934592 granularity_bytes=4096 spare_cores=0\n"
    )
