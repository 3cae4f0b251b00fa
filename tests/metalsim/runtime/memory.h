// The checker: clang calls it for every access; shadow memory knows what is defined and who touched it when.
#pragma once
#include "lane.h"

enum Memory { DEVICE = 0, THREADGROUP = 1 };  // as in Lane.bflags and in the barriers' epochs

// Is the access of that stamp ordered before the current lane's?
static inline int ordered(const Stamp& s, int mem) {
  if (s.tg != tgi) return mem == THREADGROUP;  // nothing orders device memory; the other is another instance
  if (s.thread == cur->idx + 1 || s.tg_epoch < tg_ep[mem]) return 1;
  u32 group = cur->idx >> 5;
  return ((s.thread - 1) >> 5) == group && s.sg_epoch < sgs[group].ep[mem];
}
static inline int races(const Stamp& s, int atomic, int mem) {
  return s.thread && !(atomic && s.atomic) && !ordered(s, mem);
}

struct Access {
  u8* addr;
  u64 off;  // in its buffer, or in threadgroup memory
  u32 n;
  int write, atomic;  // write: 0 read, 1 write, 2 both (an atomic)
  u64 pc;
  int mem, buf;
};
static void race(int kind, const Stamp& with, int was_write, const Access& x) {
  Err* e = add_err(kind, x.pc, (u64)with.pc + (u64)__ehdr_start, x.buf, x.off, x.n, 0, 0, 0, 0);
  if (!e) return;
  if (e->count == 1) {
    e->tg2 = with.tg;
    e->lane2 = with.thread - 1;
    e->was_write = was_write;
    e->now_write = x.write != 0;
  }
  if (kind != BENIGN_RACE || cur->pend) return;
  cur->pend = x.addr;
  cur->pend_n = x.n > 32 ? 32 : x.n;
  memcpy(cur->pend_old, x.addr, cur->pend_n);
  cur->pend_err = e;
}
// At most one finding: an access to 16 bytes is one mistake, not 16.
static int judge(const Access& x, u8 flag, const Cell& c) {
  if (x.write != 1 && !(flag & DEFINED)) {
    add_err(UNINIT, x.pc, 0, x.buf, x.off, x.n, 0, 0, 0, 0);
    return 1;
  }
  if (!L->races) return 0;
  if (races(c.write, x.atomic, x.mem)) {
    race(x.write ? BENIGN_RACE : RACE, c.write, 1, x);
    return 1;
  }
  if (!x.write) return 0;
  const Stamp* readers[] = {&c.read, &c.earlier};
  for (int i = 0; i < 2; i++)
    if (races(*readers[i], x.atomic, x.mem)) {
      race(RACE, *readers[i], 0, x);
      return 1;
    }
  return 0;
}
static void shadow(const Access& x, u8* flags, Cell* cells) {
  u32 pc = (u32)(x.pc - (u64)__ehdr_start);
  Stamp now = {cur->idx + 1, tgi, tg_ep[x.mem], sgs[cur->idx >> 5].ep[x.mem], pc, (u8)x.atomic};
  int told = 0;
  for (u64 i = x.off; i < x.off + x.n; i++) {
    Cell& c = cells[i];
    if (!told) told = judge(x, flags[i], c);
    if (x.write) {
      flags[i] |= DEFINED | WRITTEN;
      c.write = now;
    }
    if (x.write != 1) {
      flags[i] |= READ;
      if (c.read.thread != now.thread || c.read.tg != now.tg) c.earlier = c.read;
      c.read = now;
    }
  }
}

static void device_access(Access x) {
  u64 a = (u64)x.addr;
  u32 page = pagebuf[(a - (u64)arena) >> 12];
  if (page) {
    Buf& b = L->bufs[page - 1];
    x.off = a - (u64)b.p;
    x.buf = page - 1;
    if (x.off + x.n <= b.size) {
      if (x.write && !b.writable) {
        add_err(WRITE_CONST, x.pc, 0, x.buf, x.off, x.n, 0, 0, 0, 0);
        return;
      }
      if (x.write) b.written_bytes += x.n;
      if (x.write != 1) b.read_bytes += x.n;
      if (b.writable)
        shadow(x, b.flags, b.cells);
      else
        for (u64 i = x.off; i < x.off + x.n; i++) b.flags[i] |= READ;
      return;
    }
  }
  int nearest = 0;
  u64 least = ~0ul;
  for (u32 i = 0; i < L->nbufs; i++) {
    u64 lo = (u64)L->bufs[i].p, hi = lo + L->bufs[i].size, d = a < lo ? lo - a : a < hi ? 0 : a - hi;
    if (d < least) least = d, nearest = i;
  }
  i64 off = (i64)(a - (u64)L->bufs[nearest].p);
  add_err(x.write ? OOB_WRITE : OOB_READ, x.pc, 0, nearest, off, x.n, 0, 0, 0, 0);
  if (x.write) abort_lane();
}
static void threadgroup_access(Access x) {
  u64 m = (u64)x.addr - (u64)__ehdr_start;
  int in = -1, near = -1;
  for (u32 i = 0; i < L->nsyms; i++) {
    if (m >= L->syms[i].lo && m + x.n <= L->syms[i].hi) in = i;
    if (m >= L->syms[i].lo) near = i;
  }
  if (in < 0) {
    i64 off = near >= 0 ? (i64)(m - L->syms[near].lo) : 0;
    add_err(TG_OOB, x.pc, 0, near >= 0 ? 1000 + near : -1, off, x.n, 0, 0, x.write, 0);
    if (x.write && x.addr >= __stop_msim_tg) abort_lane();  // the simulator's own variables lie there
    return;
  }
  x.off = (u64)x.addr - (u64)__start_msim_tg;
  x.buf = 1000 + in;
  x.mem = THREADGROUP;
  shadow(x, tgflags, tgcells);
}
static void access(u64 a, u64 n, int write, int atomic, u64 pc) {
  Lane* l = cur;
  if (!l || (a >= (u64)l->lo && a + n <= (u64)l->hi)) return;
  if (l->pend) flush_pending(l);
  nacc++;
  if (!(nacc & 0xfffff) && tmax_ns && now_ns() - t0_ns > tmax_ns) {
    add_err(TIMEOUT, pc, 0, -1, 0, 0, 0, 0, 0, 0);
    abort_lane();
  }
  Access x = {(u8*)a, 0, (u32)n, write, atomic, pc, DEVICE, -1};
  if (a >= (u64)arena && a < (u64)arena_end)
    device_access(x);
  else if (tgsz && a >= (u64)__start_msim_tg && a < (u64)_end)
    threadgroup_access(x);  // what lies behind it no kernel may touch
  else if (a >= (u64)__ehdr_start && a < (u64)_end) {
    if (!write) return;
    add_err(WRITE_CONST, pc, 0, -1, 0, n, 0, 0, 0, 0);
    abort_lane();  // it may be a variable of the simulator's own
  } else if (a >= (u64)stacks && a < (u64)stacks + stacks_sz)
    add_err(FOREIGN_STACK, pc, 0, -1, 0, n, 0, 0, 0, 0);
  else {
    add_err(WILD, pc, 0, -1, (i64)a, n, 0, 0, write, 0);
    abort_lane();
  }
}
#define PC ((u64)__builtin_return_address(0) - 1)
extern "C" {
// clang calls these before each access
#define LS(n)                                                       \
  void __asan_load##n##_noabort(u64 a) { access(a, n, 0, 0, PC); }  \
  void __asan_store##n##_noabort(u64 a) { access(a, n, 1, 0, PC); } \
  void __asan_load##n(u64 a) { access(a, n, 0, 0, PC); }            \
  void __asan_store##n(u64 a) { access(a, n, 1, 0, PC); }
LS(1)
LS(2)
LS(4)
LS(8)
LS(16)
void __asan_loadN_noabort(u64 a, u64 n) { access(a, n, 0, 0, PC); }
void __asan_storeN_noabort(u64 a, u64 n) { access(a, n, 1, 0, PC); }
void __asan_handle_no_return() {}
void* __asan_memcpy(void* d, const void* s, u64 n) {
  access((u64)s, n, 0, 0, PC);
  access((u64)d, n, 1, 0, PC);
  return memcpy(d, s, n);
}
void* __asan_memmove(void* d, const void* s, u64 n) {
  access((u64)s, n, 0, 0, PC);
  access((u64)d, n, 1, 0, PC);
  return memmove(d, s, n);
}
void* __asan_memset(void* d, int v, u64 n) {
  access((u64)d, n, 1, 0, PC);
  return memset(d, v, n);
}
void msim_atomic_access(const volatile void* p, unsigned n, int write, void* pc) {
  if (L->checked) access((u64)p, n, write, 1, (u64)pc - 1);
}
struct Loc {
  const char* file;
  u32 line, col;
};
static void ub(int k, Loc* l, i64 a, i64 b) {
  add_err(k, 0, 0, -1, 0, 0, l->file, (l->line << 10) | (l->col & 1023), a, b);
}
void __ubsan_handle_out_of_bounds(Loc* l, u64 i) { ub(UB_BOUNDS, l, (i64)i, 0); }
void __ubsan_handle_local_out_of_bounds() { add_err(UB_BOUNDS, PC, 0, -1, 0, 0, 0, 0, 0, 0); }
struct TM {
  Loc l;
  void* ty;
  u8 al, kind;
};
void __ubsan_handle_type_mismatch_v1(TM* d, u64 p) {
  ub(p ? MISALIGN : WILD, &d->l, 1 << d->al, (i64)(p & ((1ul << d->al) - 1)));
  if (!p) abort_lane();
}
void __ubsan_handle_shift_out_of_bounds(Loc* l, u64 a, u64 b) { ub(UB_SHIFT, l, (i64)a, (i64)b); }
void __ubsan_handle_divrem_overflow(Loc* l, u64 a, u64 b) {
  ub(UB_DIV, l, (i64)a, (i64)b);
  abort_lane();
}
void __ubsan_handle_float_cast_overflow(Loc* l, u64 a) { ub(UB_FCAST, l, (i64)a, 0); }
void __ubsan_handle_load_invalid_value(Loc* l, u64 a) { ub(UB_OTHER, l, (i64)a, 0); }
// half/bfloat conversions for targets/toolchains whose libgcc lacks them
__attribute__((weak)) __bf16 __truncsfbf2(float f) {
  u32 u;
  __builtin_memcpy(&u, &f, 4);
  unsigned short r = (u & 0x7fffffff) > 0x7f800000 ? (unsigned short)((u >> 16) | 64)
                                                   : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  __bf16 b;
  __builtin_memcpy(&b, &r, 2);
  return b;
}
__attribute__((weak)) __bf16 __truncdfbf2(double d) { return __truncsfbf2((float)d); }
}
