import bisect, ctypes, hashlib, io, os, platform, re, struct, subprocess, sys, tempfile, time
from . import codegen, toolchain

_HERE = os.path.dirname(os.path.abspath(__file__))
INC, RT = os.path.join(_HERE, "include"), os.path.join(_HERE, "src", "msim_rt.cpp")
CACHE = os.environ.get("MSIM_CACHE", os.path.expanduser("~/.cache/metalsim"))
MARCH = {"x86_64": ["-march=x86-64-v3"]}.get(platform.machine(), [])
BASE = ["-x", "c++", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-fvisibility=hidden", *MARCH]
KERNEL = ["-O1", "-gline-tables-only", "-gdwarf-4", "-nostdinc", "-nostdinc++", "-fno-threadsafe-statics", "-fno-math-errno", "-fno-vectorize", "-fno-slp-vectorize",
          "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-Xclang", "-ffloat16-excess-precision=none",
          "-Xclang", "-fbfloat16-excess-precision=none", "-Wno-everything", "-Wno-reserved-user-defined-literal", "-Wimplicit-float-conversion", "-Wsometimes-uninitialized", "-Wuninitialized",
          "-Werror=vla", "-fno-caret-diagnostics", "-fdiagnostics-color=never", "-ferror-limit=40", "-ftemplate-backtrace-limit=2"]
CHECK = ["-fsanitize=kernel-address,alignment,bounds,shift,integer-divide-by-zero,float-cast-overflow", "-fno-sanitize-trap=all", "-fsanitize-recover=all",
         *sum([["-mllvm", f] for f in ("-asan-instrumentation-with-call-threshold=0", "-asan-stack=0", "-asan-globals=0", "-asan-opt=0", "-asan-use-after-return=never")], [])]


def _bytes(p):
    with open(p, "rb") as f: return f.read()


def _write(p, s):
    with open(p, "w") as f: f.write(s)


class MetalCompileError(Exception):
    pass


def mlx_include():
    try:
        import mlx.core as mx
        p = os.path.join(os.path.dirname(mx.__file__), "include")
        return p if os.path.exists(os.path.join(p, "mlx/backend/metal/kernels/utils.h")) else None
    except ImportError:
        return None


_mirror = None


def mirror():
    """MLX's own kernel headers (shipped in the mlx wheel) passed through codegen.rewrite, in the cache."""
    global _mirror
    m = mlx_include()
    if _mirror or not m: return _mirror
    sub = "mlx/backend/metal/kernels"
    h = hashlib.sha256(_bytes(os.path.join(_HERE, "codegen.py")) + m.encode())
    files = []
    for root, _, fs in os.walk(os.path.join(m, sub)):
        for f in fs:
            p = os.path.join(root, f); files.append(os.path.relpath(p, m)); st = os.stat(p); h.update(f"{p}{st.st_size}{st.st_mtime_ns}".encode())
    d = os.path.join(CACHE, "mlx-" + h.hexdigest()[:16])
    if not os.path.exists(d):
        t = d + f".{os.getpid()}.tmp"
        for f in files:
            if os.path.exists(os.path.join(INC, f)): continue  # overlaid
            os.makedirs(os.path.dirname(os.path.join(t, f)), exist_ok=True)
            _write(os.path.join(t, f), codegen.rewrite(_bytes(os.path.join(m, f)).decode())[0])
        try: os.rename(t, d)
        except OSError: pass
    _mirror = d
    return d


def _run(cmd):
    return subprocess.run(cmd, capture_output=True, text=True)


def _src_hash():
    h = hashlib.sha256()
    for root, _, fs in sorted(os.walk(INC)):
        for f in sorted(fs):
            h.update(_bytes(os.path.join(root, f)))
    h.update(_bytes(RT))
    return h.hexdigest()[:16]


_HASH = _src_hash()


def _rt_obj(tc):
    key = hashlib.sha256((tc.ident + _HASH + " ".join(MARCH)).encode()).hexdigest()[:16]
    out = os.path.join(CACHE, f"rt-{key}.o")
    if not os.path.exists(out):
        os.makedirs(CACHE, exist_ok=True)
        tmp = f"{out}.{os.getpid()}.tmp"
        r = _run(tc.cc + BASE + ["-O2", "-w", "-c", RT, "-o", tmp])
        if r.returncode: raise RuntimeError(r.stderr)
        os.replace(tmp, out)
    return out


IDS = ["thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threads_per_threadgroup", "dispatch_threads_per_threadgroup", "threadgroups_per_grid", "threads_per_grid", "grid_size", "grid_origin"]
IDS1 = ["thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup", "threads_per_simdgroup", "thread_execution_width", "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup", "thread_index_in_quadgroup"]


def unit(name, parts, kname, tdef, params, use_mlx_utils):
    header, sig, source, _ = parts
    h, _ = codegen.rewrite(header)
    s, _ = codegen.rewrite(source)
    t = "#include <metal_stdlib>\n"
    t += '#include "mlx/backend/metal/kernels/utils.h"\n' if use_mlx_utils else "using namespace metal; typedef half float16_t; typedef bfloat bfloat16_t;\n"
    t += f'#line 1 "{name}.header.metal"\n{h}\n#line 1 "{name}.signature"\n{sig}#line 1 "{name}.metal"\n{s}\n}}\n#line 1 "msim_entry"\n'
    t += "struct alignas(16) msim_ids { uint3 " + ", ".join(IDS) + "; uint " + ", ".join(IDS1) + "; };\n"
    args, b = [], 0
    for kind, i, ty, ref in params:
        if kind == "attr": args.append(f"d->{i}")
        else: args.append(f"({ty}*)b[{b}]" if ref == "*" else f"*({ty}*)b[{b}]"); b += 1
    t += 'extern "C" MSIM_NOSAN __attribute__((visibility("default"))) void msim_entry(void** b, const msim_ids* d) { ' + f"{kname}{tdef}({', '.join(args)}); }}\n"
    return t


class Elf:
    """Just enough ELF: symbol table (threadgroup variables)."""
    def __init__(self, path):
        d = _bytes(path)
        shoff, = struct.unpack_from("<Q", d, 0x28); n, = struct.unpack_from("<H", d, 0x3C)
        secs = [struct.unpack_from("<IIQQQQIIQQ", d, shoff + 64 * i) for i in range(n)]
        self.tg = []
        for s in secs:
            if s[1] != 2: continue
            st = secs[s[6]]
            for o in range(s[4], s[4] + s[5], 24):
                nm, info, oth, shn, val, sz = struct.unpack_from("<IBBHQQ", d, o)
                e = d.index(b"\0", st[4] + nm); name = d[st[4] + nm:e].decode()
                if shn and shn < n and sz and (info & 15) == 1:
                    sn = secs[shn]
                    self.tg.append((val, sz, name, shn))
        shstr, = struct.unpack_from("<H", d, 0x3E)
        def secname(i):
            o = secs[shstr][4] + secs[i][0]; return d[o:d.index(b"\0", o)].decode()
        self.tg_va = next((secs[i][3] for i in range(n) if secname(i) == "msim_tg"), 0)
        self.tg = sorted({(v, z, m) for v, z, m, i in self.tg if secname(i) == "msim_tg" and "msim_pad_" not in m})

    @staticmethod
    def pretty(m):
        r = re.findall(r"E(\d+)([A-Za-z_].*)$", m)
        if r:
            n = int(r[-1][0]); return r[-1][1][:n]
        return m


class Lines:
    def __init__(self, path):
        self.ok = False
        try:
            from elftools.elf.elffile import ELFFile
        except ImportError:
            return
        f = ELFFile(io.BytesIO(_bytes(path)))
        if not f.has_dwarf_info(): return
        di = f.get_dwarf_info(); rows, inl = [], []
        for cu in di.iter_CUs():
            lp = di.line_program_for_CU(cu)
            if lp is None: continue
            v5 = lp.header.version >= 5
            names = [x.name.decode() for x in lp.header.file_entry]
            fn = lambda i: names[i if v5 else i - 1] if 0 <= (i if v5 else i - 1) < len(names) else "?"
            prev = None
            for e in lp.get_entries():
                s = e.state
                if s is None: continue
                rows.append((s.address, None if s.end_sequence else (fn(s.file), s.line, s.column)))
            rl = di.range_lists()
            for die in cu.iter_DIEs():
                if die.tag != "DW_TAG_inlined_subroutine": continue
                a = die.attributes
                if "DW_AT_call_line" not in a: continue
                call = (fn(a["DW_AT_call_file"].value), a["DW_AT_call_line"].value, 0)
                if "DW_AT_low_pc" in a:
                    lo = a["DW_AT_low_pc"].value; hi = a["DW_AT_high_pc"].value
                    inl.append((lo, lo + hi if hi < lo else hi, call))
                elif "DW_AT_ranges" in a and rl is not None:
                    base = cu.get_top_DIE().attributes.get("DW_AT_low_pc"); base = base.value if base else 0
                    for r in rl.get_range_list_at_offset(a["DW_AT_ranges"].value):
                        if hasattr(r, "begin_offset"): inl.append((base + r.begin_offset, base + r.end_offset, call))
        rows.sort(key=lambda r: (r[0], r[1] is not None))
        self.addr = [r[0] for r in rows]; self.rows = rows
        self.inl = sorted(inl, key=lambda r: r[1] - r[0])  # innermost (smallest) first
        self.ok = True

    def at(self, pc):
        if not self.ok: return f"pc+{pc:#x}"
        i = bisect.bisect_right(self.addr, pc) - 1
        r = self.rows[i][1] if i >= 0 else None
        if r is None: return f"pc+{pc:#x}"
        internal = lambda p: p.endswith("msl.h")
        if internal(r[0]):
            for lo, hi, call in self.inl:
                if lo <= pc < hi and not internal(call[0]): r = call; break
        return f"{r[0]}:{r[1]}" + (f":{r[2]}" if r[2] else "")


class Compiled:
    def __init__(self, path, warnings, seconds, cached):
        self.path, self.warnings, self.seconds, self.cached = path, warnings, seconds, cached
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(path)
        self.lib.msim_tg_bytes.restype = ctypes.c_uint64
        self.elf = Elf(path)
        self._lines = None

    @property
    def lines(self):
        if self._lines is None: self._lines = Lines(self.path)
        return self._lines

    @property
    def tg_bytes(self):
        return sum(z for _, z, _ in self.elf.tg)


_mem = {}


def compile_unit(text, *, checked, strict_as, extra=(), keep=None):
    tc = toolchain.find()
    inc = ["-I", INC]
    m = mirror()
    if m: inc += ["-I", m]
    flags = BASE + KERNEL + (CHECK if checked else []) + [f"-DMSIM_AS={int(strict_as)}", *extra]
    key = hashlib.sha256("\0".join([tc.ident, _HASH, text, str(m), *flags]).encode()).hexdigest()[:24]
    if key in _mem: return _mem[key]
    so, wf = os.path.join(CACHE, key + ".so"), os.path.join(CACHE, key + ".txt")
    t0, cached = time.time(), os.path.exists(so) and os.path.exists(wf)
    if not cached:
        os.makedirs(CACHE, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as d:
            src, obj, tmp = (os.path.join(d, x) for x in ("k.cpp", "k.o", "k.so"))
            _write(src, text)
            r = _run(tc.cc + flags + inc + ["-c", src, "-o", obj])
            if r.returncode:
                raise MetalCompileError(r.stderr.replace(d + "/", ""))
            l = _run(tc.ld + ["-shared", "-Bsymbolic" if tc.ld[0].endswith("zig") else "-fPIC", obj, _rt_obj(tc), "-o", tmp])
            if l.returncode: raise RuntimeError("link: " + l.stderr)
            _write(wf, r.stderr)
            os.replace(tmp, so)
    c = Compiled(so, _bytes(wf).decode(), time.time() - t0, cached)
    _mem[key] = c
    return c
