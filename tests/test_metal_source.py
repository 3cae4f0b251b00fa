"""What Apple's compiler refuses and the simulator's takes, found in the text of metal/*.metal; and
the text that a launch hands to MLX."""

import re

import pytest

from mlxspec.kernels.metal import source
from tests.kernels.mutants import FILES, SKIPPED, original

SPACES = r"\b(?:device|constant|threadgroup|thread|ray_data|object_data)\b"
TYPES = r"\b(?:void|bool|half|float|bfloat|char|short|int|long|size_t|u?int(?:8|16|32|64)_t|[us](?:char|short|int|long)|uchar|ushort|uint|ulong|vec\s*<[^<>]*>|[TPLU])\d?\b|\bvec\s*<[^<>]*>"
# Each refused by "The Metal Shading Language Specification", 4, or a reserved word of C++ that it
# has no meaning for.
REFUSED = {
    "double": r"\bdouble\d?\b",
    "long double": r"\blong\s+double\b",
    "static": r"\bstatic\b(?!_)",
    "thread_local": r"\bthread_local\b",
    "goto": r"\bgoto\b",
    "exceptions": r"\b(?:try|catch|throw|noexcept)\b",
    "allocation": r"\b(?:new|delete)\b",
    "run-time types": r"\b(?:dynamic_cast|typeid|virtual)\b",
    "lambda": r"\[[&=]?\]\s*\(",
    "register or asm": r"\b(?:register|asm)\b",
    "wide characters": r"\b(?:wchar_t|char16_t|char32_t)\b",
    "header of C++": r"#\s*include\s*<(?!metal_|MetalPerformancePrimitives/)",
}
# Words that Metal takes for itself, here as the name of something.
RESERVED = (
    "device|constant|threadgroup|threadgroup_imageblock|ray_data|object_data|kernel|vertex|fragment"
    "|sampler|texture|texture2d|visible|intersection|mesh|object|patch|half|bfloat|ushort|uchar"
    "|uint|ulong|simdgroup_matrix|packed_float3|as_type|discard_fragment"
)
NAMED = re.compile(rf"(?:{TYPES})\s*[*&]?\s*({RESERVED})\s*(?=[=;,)\[{{(])")
FUNCTION = re.compile(
    r"^[ \t]*(?:inline|constexpr|template[^;{]*?|void|[A-Za-z_][\w<>, ]*?)\s+[*&]?\s*(\w+)\s*\(([^;{}]*)\)\s*\{",
    re.M,
)
POINTER = re.compile(r"(?:" + TYPES + r")\s*(?:const\s*)?[*&](?!&|=)\s*\w*")


def bare(text: str) -> str:
    """Without comments and preprocessor lines, line for line."""
    return SKIPPED.sub(lambda m: re.sub(r"\S", " ", m.group()), text)


def without_space(text: str) -> list[str]:
    """Pointers and references that name no address space: in declarations, parameters and casts."""
    found = []
    for m in POINTER.finditer(text):
        start = max(text.rfind(c, 0, m.start()) for c in ";{}(,<")
        before = text[start + 1 : m.start()]
        product = re.search(r"[\w)\]]\s*$", before) and not re.search(
            rf"(?:{SPACES}|const|constexpr|return)\s*$", before
        )
        if not re.search(SPACES, before + m.group()) and not product:
            found.append(m.group())
    return found


def recursive(text: str) -> list[str]:
    """Functions that reach a call of themselves."""
    starts = [(m[1], m.start(), m.end()) for m in FUNCTION.finditer(text)]
    calls: dict[str, set[str]] = {}
    names = {name for name, _, _ in starts}
    for name, _, begin in starts:
        depth, end = 1, begin
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        called = set(re.findall(r"\b(\w+)\s*(?:<[^;(){}]*>)?\s*\(", text[begin:end]))
        calls.setdefault(name, set()).update(called & names)
    found = []
    for name in calls:
        reached, todo = set(), [name]
        while todo:
            for other in calls.get(todo.pop(), ()):
                if other not in reached:
                    reached.add(other)
                    todo.append(other)
        if name in reached:
            found.append(name)
    return found


def faults(text: str) -> list[str]:
    text = text if "#include <" in text else "#include <metal_stdlib>\n" + text
    headers = re.findall(REFUSED["header of C++"], text)
    text = bare(text)
    found = [name for name, refused in REFUSED.items() if re.search(refused, text)]
    found += [f"include {each}" for each in headers]
    found += [f"reserved {m[1]}" for m in NAMED.finditer(text)]
    found += [f"no address space: {each}" for each in without_space(text)]
    return found + [f"recursion: {name}" for name in recursive(text)]


@pytest.mark.parametrize("file", FILES)
def test_the_kernels_have_nothing_that_metal_refuses(file: str) -> None:
    assert faults(original(file)) == []
    assert {m[1] for m in FUNCTION.finditer(bare(original(file)))} >= {
        name for name in re.findall(r"^(?:void|inline \w+) (\w+)\(", original(file), re.M)
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("void f(float* x) { }", 1),
        ("void f(const float* x) { }", 1),
        ("void f(device float* x) { float& y = x[0]; }", 1),
        ("void f(device float* x) { const float* y = (const float*)x; }", 2),
        ("void f(device float* x, threadgroup T* s) { device int* y = (device int*)x; }", 0),
        ("template <typename T> void f(thread T (&x)[4], T y) { x[0] = y * y; }", 0),
        ("float f(float a, float b) { return a * b; }", 0),
        ("float f(float a, int n) { return float(n) * a + T(n) * a; }", 0),
        ("bool f(int a, int b) { return a && b; }", 0),
        ("float f(float a) { double b = a; return b; }", 1),
        ("float f(float a) { static float b = a; return b; }", 1),
        ("int f(int n) { return n ? f(n - 1) : 0; }", 1),
        ("int g(int n);\nint f(int n) { return g(n); }\nint g(int n) { return f(n); }", 2),
        ("int g(int n) { return n; }\nint f(int n) { return g(n); }", 0),
        ("void f(device int* x) { int sampler = 0; x[0] = sampler; }", 1),
        ("void f(device int* x, int kernel) { x[0] = 0; }", 1),
        ("#include <vector>\nvoid f() { }", 1),
        ("void f() { goto end; end: return; }", 1),
        ("void f() { auto g = [&](int n) { return n; }; }", 1),
        ("// float* x; double y; static\nvoid f() { }", 0),
    ],
)
def test_each_fault_is_found(text: str, found: int) -> None:
    assert len(faults(text)) == found, faults(text)


@pytest.mark.parametrize("file", FILES)
def test_what_is_launched_has_no_comments_and_the_same_lines(file: str) -> None:
    """MLX hashes header and source at each launch."""
    text, whole = source(file), original(file)
    assert "//" not in text and len(text) < len(whole)
    lines = zip(text.splitlines(), whole.splitlines(), strict=True)
    assert all(line == before.partition("//")[0].rstrip() for line, before in lines)
