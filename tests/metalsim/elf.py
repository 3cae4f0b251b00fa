"""Just enough of ELF and DWARF 4 to name what a finding is about: threadgroup variables and source
lines.

Rule: reads what our own compiler wrote, nothing else's.
"""

import bisect
import re
import struct
from collections.abc import Iterator
from pathlib import Path

ROW = tuple[int, str]  # address, "file:line:column" or "" where a sequence ends


class Elf:
    """threadgroup: (address, bytes, name) of each variable, in order. base: where their section
    starts."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        (offset,) = struct.unpack_from("<Q", self.data, 0x28)
        count, names = struct.unpack_from("<HH", self.data, 0x3C)
        headers = [
            struct.unpack_from("<IIQQQQIIQQ", self.data, offset + 64 * i) for i in range(count)
        ]
        self.sections = [(self.text(headers[names][4] + header[0]), header) for header in headers]
        self.base = next((header[3] for name, header in self.sections if name == "msim_tg"), 0)
        self.threadgroup = sorted(set(self.variables()))
        self.rows: list[ROW] | None = None

    def text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def variables(self) -> Iterator[tuple[int, int, str]]:
        for _, header in self.sections:
            if header[1] != 2:  # SHT_SYMTAB
                continue
            strings = self.sections[header[6]][1][4]
            for at in range(header[4], header[4] + header[5], 24):
                name, info, _, section, value, size = struct.unpack_from("<IBBHQQ", self.data, at)
                if not (size and 0 < section < len(self.sections) and info & 15 == 1):  # STT_OBJECT
                    continue
                symbol = self.text(strings + name)
                if self.sections[section][0] == "msim_tg" and "msim_pad_" not in symbol:
                    yield value, size, symbol

    def where(self, pc: int) -> str:
        """The source line of an address."""
        if self.rows is None:
            found = next(
                ((h[4], h[5]) for name, h in self.sections if name == ".debug_line"), (0, 0)
            )
            self.rows = sorted(
                lines(self.data[found[0] : sum(found)]), key=lambda row: (row[0], row[1] != "")
            )
        at = bisect.bisect_right(self.rows, pc, key=lambda row: row[0]) - 1
        return (self.rows[at][1] if at >= 0 else "") or f"address {pc:#x}"


def plain(symbol: str) -> str:
    """A variable's name out of its mangled one."""
    found = re.findall(r"E(\d+)([A-Za-z_].*)$", symbol)
    return found[-1][1][: int(found[-1][0])] if found else symbol


class Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def leb(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text, self.at = self.data[self.at : end].decode(), end + 1
        return text


def lines(section: bytes) -> Iterator[ROW]:
    """The line table of each unit; raises ValueError on another version than 4."""
    unit = Reader(section)
    while unit.at < len(section):
        length = unit.take("I")
        start = unit.at
        yield from program(Reader(section[: start + length], start))
        unit.at = start + length


def program(unit: Reader) -> Iterator[ROW]:
    if (version := unit.take("H")) != 4:
        raise ValueError(f"line table of DWARF {version}: compile with -gdwarf-4")
    header = unit.take("I")
    code = unit.at + header
    step, _, _, low, span, special = (unit.take(form) for form in "BBBbBB")
    operands = [unit.take("B") for _ in range(special - 1)]
    while unit.string():
        pass
    files = [""]
    while name := unit.string():
        files.append(name)
        for _ in range(3):
            unit.leb()
    unit.at = code
    address, file, line, column = 0, 1, 1, 0
    while unit.at < len(unit.data):
        op = unit.take("B")
        if op >= special:
            address += (op - special) // span * step
            line += low + (op - special) % span
            yield address, f"{files[file]}:{line}:{column}"
        elif op == 0:
            size = unit.leb()
            end, extended = unit.at + size, unit.take("B")
            if extended == 1:
                yield address, ""
                address, file, line, column = 0, 1, 1, 0
            elif extended == 2:
                address = unit.take("Q")
            unit.at = end
        elif op == 1:
            yield address, f"{files[file]}:{line}:{column}"
        elif op == 2:
            address += unit.leb() * step
        elif op == 3:
            line += unit.leb(signed=True)
        elif op == 4:
            file = unit.leb()
        elif op == 5:
            column = unit.leb()
        elif op == 8:
            address += (255 - special) // span * step
        elif op == 9:
            address += unit.take("H")
        else:
            for _ in range(operands[op - 1]):
                unit.leb()
