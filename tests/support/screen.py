"""What a terminal of 80 columns shows after the bytes that a program wrote to it."""

import re

CODE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07]*\x07|[=>])")
COLUMNS = 80


def shown(written: str) -> str:
    """All lines, also those that have scrolled away. Knows what rich and readline write: moves up,
    left and right, erasing, and colours, which are dropped."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(written):
        if code := CODE.match(written, at):
            at = code.end()
            number = int(code[1]) if code[1] and code[1].isdigit() else 0
            match code[2]:
                case "A":
                    row = max(0, row - max(number, 1))
                case "C":
                    column += max(number, 1)
                case "D":
                    column = max(0, column - max(number, 1))
                case "K":
                    lines[row] = "" if number == 2 else lines[row][:column]
                case "J":
                    lines[row:] = [lines[row][:column]]
            continue
        letter, at = written[at], at + 1
        if letter == "\r":
            column = 0
        elif letter == "\b":
            column = max(0, column - 1)
        elif letter == "\n" or column == COLUMNS:
            row, column = row + 1, 0 if letter != "\n" else column
            lines += [""] * (row == len(lines))
        if letter not in "\r\n\b\x07":
            line = lines[row].ljust(column)
            lines[row] = line[:column] + letter + line[column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)
