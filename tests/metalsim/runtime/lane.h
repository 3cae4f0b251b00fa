// The state of a launch, findings, and what a kernel calls: lanes publish, wait, and are resumed.
#pragma once
#include "fiber.h"

enum { READY, W_SIMD, W_SGBAR, W_TGBAR, DONE };
struct Lane {
  void* sp;
  u8* lo;
  u8* hi;
  u32 st, idx;  // idx: in the threadgroup
  u32 site;     // of the SIMD operation or barrier that it waits at: line << 10 | column
  const char* file;
  const char* what;
  int bflags;  // kinds of memory that the barrier orders
  u32 mask;    // lanes that went together, and whether this one computes for them
  int leader;
  u32 phase;
  Ids ids;
  u8* pend;  // a racing write whose outcome is not yet seen, and the bytes before it
  u32 pend_n;
  u8 pend_old[32];
  Err* pend_err;
};
struct SG {
  alignas(16) u8 slot[2][32][64];
  u8 result[2][64];
  u32 ph;     // which of the two slots is being filled
  u32 ep[2];  // barriers so far: device, threadgroup memory
};
// When a byte was touched: by which thread of which threadgroup, between which barriers of that kind of
// memory.
struct Stamp {
  u32 thread;  // its index in the threadgroup + 1; 0 = never
  u32 tg, tg_epoch, sg_epoch, pc;
  u8 atomic;
};
struct Cell {  // the last write and the last two readers: a second reader must not hide a race with the first
  Stamp write, read, earlier;
};

static Launch* L;
static Lane* lanes;
static SG* sgs;
static Lane* cur;
static void* main_sp;
static u32 nl, tgi, tg_ep[2];  // lanes in this threadgroup, its index, its barriers so far
static void** argv_;
static int aborting;
static u8 *arena, *arena_end;
static u32* pagebuf;  // page -> buffer index + 1
static u8* tgflags;
static Cell* tgcells;
static u64 tgsz;
static u64 tmax_ns, t0_ns;
static u64 nacc;
static u8* stacks;
static u64 stacks_sz;

static u64 now_ns() {
  tspec t;
  clock_gettime(1, &t);
  return (u64)t.s * 1000000000ul + t.ns;
}
static void* zalloc(u64 n) { return mmap(0, (n + 4095) & ~4095ul, PROT_RW, MAP_PA, -1, 0); }

static Err* add_err(int kind, u64 pc, u64 pc2, int buf, i64 off, u32 size, const char* file, u32 site, i64 a,
                    i64 b) {
  u64 base = (u64)__ehdr_start;
  if (pc) pc -= base;
  if (pc2 > base) pc2 -= base;
  for (u32 i = 0; i < L->nerrs; i++) {
    Err& e = L->errs[i];
    if (e.kind == kind && e.pc == pc && e.site == site && e.file == file && e.buf == buf) {
      e.count++;
      return &e;
    }
  }
  if (L->nerrs >= L->maxerrs) return 0;
  Err& e = L->errs[L->nerrs++];
  e.kind = kind;
  e.count = 1;
  e.pc = pc;
  e.pc2 = pc2;
  e.buf = buf;
  e.off = off;
  e.size = size;
  e.file = file;
  e.site = site;
  e.a = a;
  e.b = b;
  e.tg = tgi;
  e.lane = cur ? cur->idx : ~0u;
  e.tg2 = e.lane2 = ~0u;
  return &e;
}
static void yield_() {
  Lane* c = cur;
  L->n_switch++;
  sw(&c->sp, main_sp);
}
static void abort_lane() {
  aborting = 1;
  L->aborted = 1;
  if (cur)
    for (;;) yield_();
}

static void lane_main() {
  msim_entry(argv_, &cur->ids);
  cur->st = DONE;
  yield_();
  __builtin_trap();
}
static void flush_pending(Lane* l) {  // was the racing write a write of the same bytes?
  if (!l->pend) return;
  if (l->pend_err && memcmp(l->pend, l->pend_old, l->pend_n) != 0) l->pend_err->kind = RACE;
  l->pend = 0;
}
static void resume(Lane* l) {
  cur = l;
  L->n_switch++;
  sw(&main_sp, l->sp);
  flush_pending(l);
  cur = 0;
}

extern "C" unsigned msim_lane() { return cur->idx & 31; }
extern "C" void msim_report(int kind, const char* file, unsigned site, long a, long b) {
  add_err(kind, 0, 0, -1, 0, 0, file, site, a, b);
}
extern "C" unsigned msim_order() { return L->order_seed; }
extern "C" void msim_tensor_element(unsigned i, unsigned capacity) {
  add_err(TENSOR_ELEMENT, (u64)__builtin_return_address(0) - 1, 0, -1, 0, 0, 0, 0, i, capacity);
}
struct msim_xchg {
  u8* slots;
  u8* result;
  u32 mask;
  u32 lane;
  int leader;
};
extern "C" void msim_simd_exchange(const void* v, unsigned n, const char* what, const char* file,
                                   unsigned site, msim_xchg* out) {
  Lane* l = cur;
  SG& s = sgs[l->idx >> 5];
  L->n_simd++;
  u32 ph = s.ph & 1;
  memcpy(s.slot[ph][l->idx & 31], v, n);
  l->phase = ph;
  l->st = W_SIMD;
  l->site = site;
  l->file = file;
  l->what = what;
  yield_();
  out->slots = s.slot[l->phase][0];
  out->result = s.result[l->phase];
  out->mask = l->mask;
  out->lane = l->idx & 31;
  out->leader = l->leader;
}
extern "C" void msim_barrier(int flags, int simd, const char* file, unsigned site) {
  Lane* l = cur;
  L->n_bar++;
  l->bflags = flags;
  l->st = simd ? W_SGBAR : W_TGBAR;
  l->site = site;
  l->file = file;
  l->what = simd ? "simdgroup_barrier" : "threadgroup_barrier";
  yield_();
}
extern "C" void msim_fence(int) {}
