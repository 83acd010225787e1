import numpy as np
import pytest

from rl_core import Batch, Ragged, RLError, RowKey
from rl_core.data.columns import COLUMNS, ColumnSpec, column_dtype, column_spec, declare_column
from rl_core.errors import DataError, ShapeError


def test_known_columns_have_the_types_that_travel():
    assert column_spec("input_ids") == ColumnSpec(
        dtype="int32", is_ragged=True, meaning="Prompt and response tokens of one trajectory."
    )
    assert column_dtype("loss_mask") == np.bool_
    assert column_dtype("reward") == np.float32
    assert not column_spec("reward").is_ragged


def test_every_column_says_what_it_means_in_a_sentence():
    for name, spec in COLUMNS.items():
        assert spec.meaning.endswith("."), name
        assert np.dtype(spec.dtype).kind in "bif", name


def test_an_unknown_column_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"unknown column 'logprobs'.*input_ids.*`declare_column`"):
        column_spec("logprobs")
    assert issubclass(DataError, RLError)
    assert issubclass(DataError, ValueError)


@pytest.fixture
def _own():
    yield
    COLUMNS.pop("own_value", None)


@pytest.mark.usefixtures("_own")
def test_a_column_of_ones_own_is_declared_once_or_the_same_again():
    spec = ColumnSpec(dtype="float16", is_ragged=False, meaning="Something.")
    declare_column("own_value", spec)
    declare_column("own_value", ColumnSpec(dtype="float16", is_ragged=False, meaning="In other words."))
    assert column_spec("own_value") == spec
    for other in (ColumnSpec(dtype="float32", is_ragged=False, meaning="."), _ragged("float16")):
        with pytest.raises(DataError, match="'own_value' is already declared"):
            declare_column("own_value", other)
    with pytest.raises(DataError, match="'reward' is already declared"):
        declare_column("reward", _ragged("float32"))


@pytest.mark.parametrize("dtype", ["object", "str", "datetime64[s]", "complex64", "S4"])
def test_columns_hold_numbers_or_bools(dtype):
    with pytest.raises(DataError, match="'own_value' must contain numbers or bools"):
        declare_column("own_value", _ragged(dtype))
    assert "own_value" not in COLUMNS


@pytest.mark.parametrize("name", ["", "#prompt", "#"])
def test_names_of_the_keys_of_rows_are_not_columns(name):
    with pytest.raises(DataError, match="must not be empty or begin with '#'"):
        declare_column(name, _ragged("float32"))


def _ragged(dtype):
    return ColumnSpec(dtype=dtype, is_ragged=True, meaning="Something.")


def test_routed_experts_have_layers_and_choices_for_each_token():
    key, offsets = RowKey("p0", 0, 0), np.array([0, 3])
    experts = Ragged(np.full((3, 4, 2), -1, dtype=np.int16), offsets)

    assert Batch([key], {"routed_experts": experts}).ragged("routed_experts").element_shape == (4, 2)
    with pytest.raises(ShapeError, match=r"'routed_experts' must have a value of 2 axes a token; found \(4,\)"):
        Batch([key], {"routed_experts": Ragged(np.zeros((3, 4), np.int16), offsets)})
