"""ThoughtCount: tokens that an answer spends on its thought, the marks around it included."""

from serving.dialect import THINK, THOUGHT


class ThoughtCount:
    """Sees the text of one token after the other. An answer that does not begin with a thought has none."""

    def __init__(self, *, in_thought: bool) -> None:
        self.num_tokens = 0
        self._in_thought = in_thought
        self._is_over = False
        self._num_seen = 0
        self._text = ""

    def see(self, text: str) -> None:
        if self._is_over:
            return
        self._num_seen += 1
        self._text += text
        if not self._in_thought:
            self._look_for_begin()
        if self._in_thought:
            self.num_tokens = self._num_seen
            self._is_over = THOUGHT in self._text
            self._text = self._text[-len(THOUGHT) :]

    def _look_for_begin(self) -> None:
        begin = self._text.lstrip()
        self._in_thought = begin.startswith(THINK)
        self._is_over = not (self._in_thought or THINK.startswith(begin))
        self._text = begin
