"""Row keys stored in arrays behave like a tuple of `RowKey`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.row_keys import RowKey, RowKeys
from rl_core.errors import DataError

FAST = settings(max_examples=80, deadline=None)
KEYS = st.lists(
    st.builds(RowKey, st.sampled_from(["p", "q", "p0", ""]), st.integers(0, 3), st.integers(0, 2)), max_size=8
)


@FAST
@given(KEYS)
def test_keys_read_like_a_tuple(keys):
    found = RowKeys.of(keys)
    assert found == tuple(keys)
    assert tuple(keys) == found
    assert list(found) == keys
    assert len(found) == len(keys)
    assert [found[i] for i in range(-len(keys), len(keys))] == keys * 2
    assert found[1:3] == tuple(keys[1:3])
    assert repr(found) == repr(tuple(keys))
    assert hash(found) == hash(RowKeys.of(list(keys)))
    assert all(key in found for key in keys)
    assert RowKey("r", 0, 0) not in found
    assert found != (*keys, RowKey("r", 0, 0))
    assert found != "p"
    for key in found:
        assert (type(key.session_index), type(key.output_index)) == (int, int)


def test_keys_that_are_arrays_already_stay():
    keys = RowKeys.of([RowKey("p", 0, 0)])
    assert RowKeys.of(keys) is keys


@FAST
@given(st.lists(KEYS, min_size=1, max_size=4))
def test_keys_are_joined_like_tuples(parts):
    joined = RowKeys.concat([RowKeys.of(part) for part in parts])
    assert list(joined) == [key for part in parts for key in part]
    assert len(set(joined.uids)) == len(joined.uids)


@FAST
@given(KEYS, st.data())
def test_keys_are_selected_like_a_list_with_their_prompts_alone(keys, data):
    indices = data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=8)) if keys else []
    selected = RowKeys.of(keys).select(np.asarray(indices, dtype=np.int64))
    assert list(selected) == [keys[i] for i in indices]
    if len({key.prompt_uid for key in keys}) > 1:
        assert set(selected.uids) == {keys[i].prompt_uid for i in indices}
    assert list(selected.compact()) == list(selected)
    assert (selected.prompts.dtype, selected.sessions.dtype) == (np.int32, np.int32)


@FAST
@given(KEYS)
def test_prompts_are_numbered_by_first_appearance(keys):
    seen = {}
    expected = [seen.setdefault(key.prompt_uid, len(seen)) for key in keys]
    assert RowKeys.of(keys).by_first_appearance().tolist() == expected
    order = np.arange(len(keys))[::-1].copy()
    seen = {}
    expected = [seen.setdefault(key.prompt_uid, len(seen)) for key in keys[::-1]]
    assert RowKeys.of(keys).select(order).by_first_appearance().tolist() == expected


@FAST
@given(KEYS)
def test_rows_are_put_in_order_of_group_session_and_output(keys):
    found = RowKeys.of(keys)
    groups = found.by_first_appearance()
    order = found.in_order(groups)
    expected = sorted(range(len(keys)), key=lambda i: (groups[i], keys[i].session_index, keys[i].output_index))
    assert order.tolist() == expected


@FAST
@given(KEYS)
def test_a_row_that_appears_twice_is_named(keys):
    doubled = {key for key in keys if keys.count(key) > 1}
    if not doubled:
        RowKeys.of(keys).check_unique()
        return
    with pytest.raises(DataError, match="appears twice") as caught:
        RowKeys.of(keys).check_unique()
    assert any(str(tuple(key)) in str(caught.value) for key in doubled)


@pytest.mark.parametrize("index", [2**31, 2**70, -(2**31) - 1])
def test_indices_that_do_not_fit_are_refused(index):
    for key in (RowKey("p", index, 0), RowKey("p", 0, index)):
        with pytest.raises(DataError, match=rf"fit in int32; found row \('p', .*{index}"):
            RowKeys.of([RowKey("p", 0, 0), key])
