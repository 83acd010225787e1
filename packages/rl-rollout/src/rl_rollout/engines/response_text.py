"""The text of a response whose tokens come one by one, and the stop string in it."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Text of tokens, special ones included."""

CONTEXT_TOKENS = 8
"""What is decoded again before new tokens: more than a character's four bytes, and the word that decoders look back."""
MAX_PENDING = 3
"""Characters at the end that may be parts of one: decoders show its first bytes as one or as three U+FFFD."""


class ResponseText:
    """Text of tokens that come in pieces; right where a character or a stop string spans several tokens.

    Attributes:
        matched_stop: The stop string that was found; of several that one token completes, the one that begins first.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], *, stop: Sequence[str] = ()) -> None:
        """Begin after a prompt, whose text is not searched.

        Args:
            decode: Text of tokens.
            prompt_ids: The prompt, or its last tokens.
            stop: Strings that end the text.
        """
        self.matched_stop: str | None = None
        self._decode = decode
        self._stop = tuple(stop)
        self._num_held = max(map(len, self._stop), default=1) - 1
        self._held = ""
        self._set_window(list(prompt_ids[-CONTEXT_TOKENS:]))

    def feed(self, token_ids: Sequence[int]) -> str:
        """What may be shown now: no half character, nothing of a stop string, nor what may become one.

        With stop strings the last characters are held back, one less than the longest of them has.
        """
        given = []
        for token_id in token_ids:
            if self.matched_stop is None:
                self._window.append(token_id)
                text = self._decode(self._window)
                self._take(text, _num_settled(text))
                given.append(self._release(self._num_held))
        return "".join(given)

    def finish(self) -> str:
        """The rest, once there are no more tokens."""
        if self.matched_stop is None and self._window:
            text = self._decode(self._window)
            self._take(text, len(text))
        return self._release(0)

    def _take(self, text: str, end: int) -> None:
        """Move new characters of the window's text to those that are held back, and search these."""
        new, self._num_taken = text[self._num_taken : end], max(self._num_taken, end)
        if len(self._window) > 2 * CONTEXT_TOKENS:
            self._set_window(self._window[-CONTEXT_TOKENS:])
        if not new:
            return
        self._held += new
        found = [(self._held.find(one), one) for one in self._stop]
        begin, matched = min((match for match in found if match[0] >= 0), default=(len(self._held), None))
        self._held, self.matched_stop = self._held[:begin], matched

    def _release(self, num_held: int) -> str:
        cut = len(self._held) if self.matched_stop is not None else max(len(self._held) - num_held, 0)
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def _set_window(self, token_ids: list[int]) -> None:
        self._window = token_ids
        self._num_taken = _num_settled(self._decode(token_ids)) if token_ids else 0


def _num_settled(text: str) -> int:
    """How many characters stay as they are, whatever follows."""
    num_pending = len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    return len(text) - min(num_pending, MAX_PENDING)
