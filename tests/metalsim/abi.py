"""The structs of runtime/abi.h as ctypes.

Rule: field by field the same as there; nothing else here knows the layout.
"""

from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)

DEFINED, WRITTEN, READ = 1, 2, 4  # flags of a byte of a buffer
NO_LANE = 0xFFFFFFFF
THREADGROUP_BUFFERS = 1000  # Err.buf from here on names a threadgroup variable


class Err(Structure):
    kind: int
    count: int
    pc: int
    pc2: int
    tg: int
    lane: int
    tg2: int
    lane2: int
    buf: int
    size: int
    off: int
    file: bytes | None
    site: int
    a: int
    b: int
    was_write: int
    now_write: int
    _fields_ = (
        ("kind", c_int),
        ("count", c_uint32),
        ("pc", c_uint64),
        ("pc2", c_uint64),
        ("tg", c_uint32),
        ("lane", c_uint32),
        ("tg2", c_uint32),
        ("lane2", c_uint32),
        ("buf", c_int),
        ("size", c_uint32),
        ("off", c_int64),
        ("file", c_char_p),
        ("site", c_uint32),
        ("a", c_int64),
        ("b", c_int64),
        ("was_write", c_int),
        ("now_write", c_int),
    )


class Buf(Structure):
    size: int
    read_bytes: int
    written_bytes: int
    _fields_ = (
        ("given", c_void_p),
        ("out", c_void_p),
        ("size", c_uint64),
        ("writable", c_int),
        ("flags", c_void_p),
        ("read_bytes", c_uint64),
        ("written_bytes", c_uint64),
        ("p", c_void_p),
        ("cells", c_void_p),
    )


class Launch(Structure):
    nerrs: int
    aborted: int
    _fields_ = (
        ("bufs", POINTER(Buf)),
        ("nbufs", c_uint32),
        ("grid", c_uint32 * 3),
        ("tg", c_uint32 * 3),
        ("checked", c_uint32),
        ("races", c_uint32),
        ("order_seed", c_uint32),
        ("stack", c_uint32),
        ("timeout", c_double),
        ("syms", POINTER(c_uint64)),
        ("nsyms", c_uint32),
        ("errs", POINTER(Err)),
        ("maxerrs", c_uint32),
        ("nerrs", c_uint32),
        ("n_access", c_uint64),
        ("n_switch", c_uint64),
        ("n_simd", c_uint64),
        ("n_bar", c_uint64),
        ("n_tg", c_uint64),
        ("aborted", c_int),
    )
