import numpy as np
import pytest

from rl_core import COLUMNS, ColumnSpec, RLError
from rl_core.columns import column_dtype, column_spec
from rl_core.errors import DataError


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
    with pytest.raises(DataError, match=r"unknown column 'logprobs'.*input_ids.*columns\.py"):
        column_spec("logprobs")
    assert issubclass(DataError, RLError)
    assert issubclass(DataError, ValueError)
