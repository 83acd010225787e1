"""Pictures of coloured squares, questions about them, and the answers of demonstrations."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
EMPTY = "none"
GRID = 2
CELL = 16
"""Width and height of a cell in pixels; a picture has GRID x GRID cells, each with one square or none."""

SQUARE = 10
FILLED_SHARE = 0.75
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 1000, 200, 200


@dataclass(frozen=True, slots=True)
class Problem:
    """A picture and a question about it.

    Attributes:
        cells: Colour of each cell, row by row, or EMPTY.
        colour: The colour to count.
        seed: Seed of the squares' places in their cells, and of the picture's noise.
    """

    cells: tuple[str, ...]
    colour: str
    seed: int

    @property
    def question(self) -> str:
        """The question, without the picture."""
        return f"How many {self.colour} squares?"

    @property
    def answer(self) -> str:
        """The number of squares of the colour."""
        return str(self.cells.count(self.colour))

    @property
    def hasty_answer(self) -> str:
        """The number of squares of any colour, which is right for few pictures."""
        return str(len(self.cells) - self.cells.count(EMPTY))

    @property
    def described_answer(self) -> str:
        """The colour of each cell, then the answer, such as " red none blue red:2"."""
        return f"{''.join(f' {cell}' for cell in self.cells)}:{self.answer}"

    def picture(self) -> NDArray[np.uint8]:
        """Return the picture, [32, 32, 3]."""
        draw = np.random.default_rng(self.seed)
        pixels = np.full((GRID * CELL, GRID * CELL, 3), 70.0)
        for index, cell in enumerate(self.cells):
            top, left = np.array(divmod(index, GRID)) * CELL + draw.integers(0, CELL - SQUARE + 1, 2)
            if cell != EMPTY:
                pixels[top : top + SQUARE, left : left + SQUARE] = COLOURS[cell]
        return np.clip(pixels + draw.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)


def split_problems(seed: int = 0) -> dict[str, list[Problem]]:
    """Return problems with different pictures in three parts.

    Use `train` for training and `validation` to choose settings; `test` is only reported.
    """
    draw = random.Random(seed)
    names = list(COLOURS)
    problems = []
    for index in range(NUM_TRAIN + NUM_VALIDATION + NUM_TEST):
        cells = [draw.choice(names) if draw.random() < FILLED_SHARE else EMPTY for _ in range(GRID * GRID)]
        problems.append(Problem(cells=tuple(cells), colour=draw.choice(names), seed=index))
    return {
        "train": problems[:NUM_TRAIN],
        "validation": problems[NUM_TRAIN : NUM_TRAIN + NUM_VALIDATION],
        "test": problems[NUM_TRAIN + NUM_VALIDATION :],
    }
