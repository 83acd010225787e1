"""Rows and their columns: records, batches, ragged columns, row keys and the wire format."""

from rl_core.data.batch import Batch, Column, image_extras
from rl_core.data.columns import COLUMNS, ColumnSpec, column_spec, declare_column
from rl_core.data.outside_text import encodable, encodable_json
from rl_core.data.ragged import Index, Ragged, offsets_of, token_positions
from rl_core.data.records import (
    NO_VERSION,
    BoolArray,
    ExpertArray,
    FinishReason,
    FloatArray,
    ImageSpan,
    IntArray,
    Json,
    Prompt,
    Timings,
    Trajectory,
    are_equal_rewards,
)
from rl_core.data.row_keys import RowKey

__all__ = [
    "COLUMNS",
    "NO_VERSION",
    "Batch",
    "BoolArray",
    "Column",
    "ColumnSpec",
    "ExpertArray",
    "FinishReason",
    "FloatArray",
    "ImageSpan",
    "Index",
    "IntArray",
    "Json",
    "Prompt",
    "Ragged",
    "RowKey",
    "Timings",
    "Trajectory",
    "are_equal_rewards",
    "column_spec",
    "declare_column",
    "encodable",
    "encodable_json",
    "image_extras",
    "offsets_of",
    "token_positions",
]
