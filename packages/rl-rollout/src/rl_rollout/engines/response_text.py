"""Decodes a response as its tokens arrive, and finds stop strings in it."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Decodes token ids to text, including special tokens."""

CONTEXT_TOKENS = 8
"""Maximum number of prompt tokens to decode: a space depends on one, and a character has up to four."""
MAX_BYTES = 4
"""Maximum bytes of a character; each may have its own token."""
MAX_WINDOW = 64
"""Maximum number of tokens that are decoded again if they are not text."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class ResponseText:
    """Text of tokens that arrive in pieces. Handles characters and stop strings that span several tokens.

    Attributes:
        matched_stop: The stop string found. If one token completes several, the one that begins first.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], *, stop: Sequence[str] = ()) -> None:
        """Begin after a prompt, whose text is not searched.

        Args:
            decode: Decodes token ids to text.
            prompt_ids: The prompt, or its last tokens.
            stop: Strings that end the text.
        """
        self.matched_stop: str | None = None
        self._decode = decode
        self._stop = tuple(stop)
        self._num_held = max(map(len, self._stop), default=1) - 1
        self._held = ""
        self._window: list[int] = []  # tokens of the last complete characters, and those after them
        self._num_whole = 0
        self._num_taken = 0  # characters of the window's text
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        ends = (context[-size:] for size in range(1, len(context)))
        self._set_window(next((ids for ids in ends if decode(ids).strip(UNKNOWN)), context))

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that is safe to show: no partial character, and no possible part of a stop string.

        With stop strings, it holds back up to one character less than the length of the longest stop string.
        """
        given = []
        for token_id in token_ids:
            if self.matched_stop is None:
                self._window.append(token_id)
                self._search(self._new_text())
                given.append(self._release(self._num_held))
        return "".join(given)

    def finish(self) -> str:
        """Return the remaining text after the last token."""
        if self.matched_stop is None and self._window:
            self._search(self._decode(self._window)[self._num_taken :])
        return self._release(0)

    def _new_text(self) -> str:
        """Return the characters that later tokens cannot change."""
        text = self._decode(self._window)
        is_whole = not text.endswith(UNKNOWN)
        begin, end = self._num_taken, len(text)
        if not is_whole:  # the first bytes of a character, or no text
            num_tokens = len(self._window) - self._num_whole
            end = _num_settled(text) if num_tokens >= MAX_BYTES else begin
        self._num_taken = max(begin, end)
        if is_whole and end > begin:
            self._set_window(self._window[self._num_whole :])
        elif len(self._window) > MAX_WINDOW:
            self._set_window(self._window[-CONTEXT_TOKENS:])
            self._num_whole = 0
        return text[begin:end]

    def _set_window(self, token_ids: list[int]) -> None:
        self._window, self._num_whole = token_ids, len(token_ids)
        self._num_taken = _num_settled(self._decode(token_ids)) if token_ids else 0

    def _search(self, new: str) -> None:
        """Add new characters to the held text, up to a stop string in them."""
        if not new:
            return
        searched = len(self._held)
        self._held += new
        found = [(self._held.find(one, max(searched - len(one) + 1, 0)), one) for one in self._stop]
        begin, matched = min((match for match in found if match[0] >= 0), default=(len(self._held), None))
        self._held, self.matched_stop = self._held[:begin], matched

    def _release(self, num_held: int) -> str:
        cut = len(self._held) if self.matched_stop is not None else max(len(self._held) - num_held, 0)
        given, self._held = self._held[:cut], self._held[cut:]
        return given


def _num_settled(text: str) -> int:
    """Count characters that will not change. Decoders show a character's first bytes as one or as three U+FFFD."""
    num_unknown = len(text) - len(text.rstrip(UNKNOWN))
    return len(text) - min(num_unknown, MAX_BYTES - 1)
