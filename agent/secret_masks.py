"""Masks secrets in the output and the reports of tasks."""

from collections.abc import Iterable

from agent.sealed import Secrets

MASK = b"***"
_MIN_LINE_BYTES = 8


class Masker:
    """Replaces secret values in a byte stream that is processed in pieces."""

    def __init__(self, values: Iterable[str]) -> None:
        found = set()
        for value in values:
            found.add(value.encode())
            # A key with several lines is often printed line by line, with other text in between.
            found.update(line for line in value.encode().splitlines() if len(line) >= _MIN_LINE_BYTES)
        self._values = tuple(sorted(value for value in found if value))
        self.longest = max(map(len, self._values), default=0)

    @classmethod
    def of(cls, secrets: Secrets) -> "Masker":
        """Returns a masker for the secrets of all jobs, because a task may print a secret received from another job."""
        return cls(value for values in secrets.values() for value in values.values())

    def mask(self, text: bytes, start: int = 0) -> bytes:
        """Returns `text` from `start` on, masked, including the rest of a secret that begins before `start`."""
        out = []
        for first, last in self._spans(text):
            if last > start:
                out += [text[start:first] if first > start else b"", MASK]
                start = last
        return b"".join([*out, text[start:]])

    def mask_words(self, words: str, *, is_cut: bool) -> str:
        """Returns a short text, masked. If `is_cut`, an incomplete secret at the end of the text is masked, too."""
        text = words.encode(errors="replace")
        end = self.cut(text, final=not is_cut, whole_lines=False)
        return (self.mask(text[:end]) + (MASK if end < len(text) else b"")).decode(errors="replace")

    def cut(self, text: bytes, *, final: bool, whole_lines: bool) -> int:
        """Returns how many bytes at the start of `text` can be masked before the rest of the stream is known.

        Unless `final`, this excludes a possible beginning of a secret at the end of `text`. With `whole_lines`, it also
        excludes an incomplete last line.
        """
        limit = len(text) if final else self._undecided(text)
        if whole_lines and not final:
            limit = text.rfind(b"\n", 0, limit) + 1
        for first, last in self._spans(text):
            if first < limit < last:
                limit = first
        return limit

    def _spans(self, text: bytes) -> list[tuple[int, int]]:
        """Returns the start and end of secrets in `text`, sorted, with overlapping ones merged."""
        found = []
        for value in self._values:
            at = text.find(value)
            while at >= 0:
                found.append((at, at + len(value)))
                at = text.find(value, at + 1)
        merged: list[tuple[int, int]] = []
        for first, last in sorted(found):
            if merged and first < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return merged

    def _undecided(self, text: bytes) -> int:
        """Returns where a possible beginning of a secret at the end of `text` starts; `len(text)` if there is none."""
        limit = len(text)
        for value in self._values:
            at = text.find(value[:1], max(0, len(text) - len(value) + 1))
            while 0 <= at < limit:
                if value.startswith(text[at:]):
                    limit = at
                at = text.find(value[:1], at + 1)
        return limit
