"""Pictures of coloured squares, questions about them, and the answers of demonstrations."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 50)}
GRID = 4
CELL = 8
"""Width and height of a cell in pixels; a picture has GRID x GRID cells, each with one square or none."""

SQUARE = 6
FILLED_SHARE = 0.7
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 2000, 200, 200


@dataclass(frozen=True, slots=True)
class Problem:
    """A picture and a question about it.

    Attributes:
        cells: Colour of each cell, row by row; None is empty.
        colour: The colour to count.
        seed: Seed of the squares' places in their cells, and of the picture's noise.
    """

    cells: tuple[str | None, ...]
    colour: str
    seed: int

    @property
    def question(self) -> str:
        """The question, without the picture."""
        return f"How many {self.colour} squares?"

    @property
    def row_counts(self) -> list[int]:
        """Number of the colour's squares in each row of cells."""
        return [self.cells[row * GRID : (row + 1) * GRID].count(self.colour) for row in range(GRID)]

    @property
    def answer(self) -> str:
        """The number of squares, such as "4"."""
        return str(sum(self.row_counts))

    @property
    def hasty_answer(self) -> str:
        """The number of squares in the upper half, which is right for a fifth of the pictures."""
        return str(sum(self.row_counts[: GRID // 2]))

    @property
    def counted_answer(self) -> str:
        """The squares of each row, then the answer, such as "1,0,2,1:4"."""
        return f"{','.join(map(str, self.row_counts))}:{self.answer}"

    def picture(self) -> NDArray[np.uint8]:
        """Return the picture, [32, 32, 3]."""
        draw = np.random.default_rng(self.seed)
        pixels = np.full((GRID * CELL, GRID * CELL, 3), 70.0)
        for index, colour in enumerate(self.cells):
            top, left = np.array(divmod(index, GRID)) * CELL + draw.integers(0, CELL - SQUARE + 1, 2)
            if colour is not None:
                pixels[top : top + SQUARE, left : left + SQUARE] = COLOURS[colour]
        return np.clip(pixels + draw.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)


def final_answer(response: str) -> str:
    """Return the answer in a response: the text after its last colon, else the whole response."""
    return response.rpartition(":")[2]


def split_problems(seed: int = 0) -> dict[str, list[Problem]]:
    """Return problems with different pictures in three parts.

    Use `train` for training and `validation` to choose settings; `test` is only reported.
    """
    draw = random.Random(seed)
    problems = []
    for index in range(NUM_TRAIN + NUM_VALIDATION + NUM_TEST):
        cells = [draw.choice(list(COLOURS)) if draw.random() < FILLED_SHARE else None for _ in range(GRID * GRID)]
        problems.append(Problem(tuple(cells), draw.choice(list(COLOURS)), index))
    return {
        "train": problems[:NUM_TRAIN],
        "validation": problems[NUM_TRAIN : NUM_TRAIN + NUM_VALIDATION],
        "test": problems[NUM_TRAIN + NUM_VALIDATION :],
    }
