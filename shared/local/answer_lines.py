"""Writes an answer to the terminal as it comes: lines broken between words, thoughts dimmed and apart.

A word may come in several pieces, so a line is broken by going back: what was written of the word is erased and
written again on the next line, as Ollama's command does. Where the output is no terminal, the answer alone is written.
"""

from __future__ import annotations

import shutil
from typing import TextIO
from unicodedata import east_asian_width

from shared.local.chat_session import AnswerPiece

DIM, PLAIN = "\033[2m", "\033[0m"


class AnswerLines:
    """One answer. `end` is called however it ended."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._columns = shutil.get_terminal_size().columns if output.isatty() else 0  # 0: no terminal
        self._column = 0
        self._word = ""  # the last of the line, which may go on
        self._thinking = False

    def write(self, piece: AnswerPiece) -> None:
        """Write what came."""
        if not self._columns:
            self._output.write("" if piece.thought else piece.text)
        else:
            self._turn(piece.thought)
            for character in piece.text:
                self._put(character)
        self._output.flush()

    def end(self) -> None:
        """End the line, and what was dimmed."""
        self._output.write((PLAIN if self._thinking else "") + "\n")
        self._output.flush()

    def _turn(self, thought: bool) -> None:
        """Between thoughts and answer comes an empty line."""
        if thought == self._thinking:
            return
        self._thinking = thought
        self._output.write(DIM if thought else PLAIN + "\n\n")
        self._column, self._word = 0, ""

    def _put(self, character: str) -> None:
        width = _columns(character)
        full = self._column + width >= self._columns
        if character == "\n" or (full and character == " "):
            self._output.write("\n")
            self._column, self._word = 0, ""
            return
        if full:
            self._break()
        self._word = "" if character == " " else self._word + character
        self._column += width
        self._output.write(character)

    def _break(self) -> None:
        """Go on in the next line, with the word that was begun; a word of a whole line is cut."""
        width = sum(map(_columns, self._word))
        if width >= self._column:
            width, self._word = 0, ""
        self._output.write(f"\033[{width}D\033[K\n{self._word}" if width else "\n")
        self._column = width


def _columns(character: str) -> int:
    """How many columns a terminal gives a character."""
    return 2 if east_asian_width(character) in "WF" else 1
