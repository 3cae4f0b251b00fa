// Runs a grid on one CPU thread: one fiber per GPU thread, SIMD-groups of 32 in lockstep at SIMD operations,
// true barriers, and an order of lanes and threadgroups that a seed chooses.
#include "memory.h"

static u32 rs;
static u32 rnd() {
  rs = rs * 1664525u + 1013904223u;
  return rs >> 8;
}
// Seed 0: ascending, 1: descending, else shuffled.
static void perm(u32* p, u32 n) {
  for (u32 i = 0; i < n; i++) p[i] = i;
  if (L->order_seed == 1)
    for (u32 i = 0; i < n; i++) p[i] = n - 1 - i;
  else if (L->order_seed > 1)
    for (u32 i = n; i > 1; i--) {
      u32 j = rnd() % i, t = p[i - 1];
      p[i - 1] = p[j];
      p[j] = t;
    }
}

// advance one SIMD-group until every lane waits at a threadgroup barrier or has finished
static void run_sg(u32 g) {
  SG& s = sgs[g];
  u32 lo = g * 32, n = nl - lo < 32 ? nl - lo : 32, order[32];
  perm(order, n);
  for (;;) {
    for (u32 i = 0; i < n; i++) {
      Lane* l = &lanes[lo + order[i]];
      if (l->st == READY) {
        resume(l);
        if (aborting) return;
      }
    }
    // all blocked. Lanes waiting for a SIMD op / simdgroup_barrier at one site go together.
    Lane* pick = 0;
    u32 waiting = 0, sites = 0, tgbar = 0, done = 0;
    for (u32 i = 0; i < n; i++) {
      Lane* l = &lanes[lo + i];
      if (l->st == DONE)
        done++;
      else if (l->st == W_TGBAR)
        tgbar++;
      else {
        waiting++;
        if (!pick)
          pick = l, sites = 1;
        else if (l->site != pick->site || l->file != pick->file || l->st != pick->st) {
          sites++;
          if (l->site < pick->site) pick = l;
        }
      }
    }
    if (!waiting) return;
    u32 mask = 0;
    for (u32 i = 0; i < n; i++) {
      Lane* l = &lanes[lo + i];
      if ((l->st == W_SIMD || l->st == W_SGBAR) && l->st == pick->st && l->site == pick->site &&
          l->file == pick->file)
        mask |= 1u << i;
    }
    if (sites > 1 || tgbar || done) {
      cur = pick;
      add_err(SIMD_DIV, 0, 0, -1, 0, 0, pick->file, pick->site, mask, (i64)pick->what);
      cur = 0;
    }
    u32 ph = s.ph & 1;
    int lead = 1;
    int bf = 0;
    u32 isbar = pick->st == W_SGBAR;
    for (u32 i = 0; i < n; i++)
      if (mask >> i & 1) bf |= lanes[lo + i].bflags;
    if (!isbar) {  // lanes left waiting had published into this phase: move them to the next one
      for (u32 i = 0; i < n; i++) {
        Lane* l = &lanes[lo + i];
        if (l->st == W_SIMD && !(mask >> i & 1)) {
          memcpy(s.slot[1 - ph][i], s.slot[l->phase][i], 64);
          l->phase = 1 - ph;
        } else if (mask >> i & 1 && l->phase != ph) {
          memcpy(s.slot[ph][i], s.slot[l->phase][i], 64);
          l->phase = ph;
        }
      }
      s.ph++;
    } else {
      if (bf & 1) s.ep[0]++;
      if (bf & 2) s.ep[1]++;
    }
    for (u32 i = 0; i < n; i++) {
      Lane* l = &lanes[lo + order[i]];
      if (mask >> (order[i]) & 1) {
        l->st = READY;
        l->mask = mask;
        l->leader = lead;
        lead = 0;
      }
    }
  }
}
static void identify(Ids& d, u32 i, U3 tgp, U3 sz, U3 ntg) {
  d.thread_position_in_threadgroup = {i % sz.x, i / sz.x % sz.y, i / (sz.x * sz.y), 0};
  d.threadgroup_position_in_grid = tgp;
  d.thread_position_in_grid = {tgp.x * L->tg[0] + d.thread_position_in_threadgroup.x,
                               tgp.y * L->tg[1] + d.thread_position_in_threadgroup.y,
                               tgp.z * L->tg[2] + d.thread_position_in_threadgroup.z, 0};
  d.threads_per_threadgroup = sz;
  d.dispatch_threads_per_threadgroup = {L->tg[0], L->tg[1], L->tg[2], 0};
  d.threadgroups_per_grid = ntg;
  d.threads_per_grid = d.grid_size = {L->grid[0], L->grid[1], L->grid[2], 0};
  d.grid_origin = {0, 0, 0, 0};
  u32 nom = L->tg[0] * L->tg[1] * L->tg[2];
  d.thread_index_in_threadgroup = i;
  d.thread_index_in_simdgroup = i & 31;
  d.simdgroup_index_in_threadgroup = i >> 5;
  d.simdgroups_per_threadgroup = (nl + 31) / 32;
  d.dispatch_simdgroups_per_threadgroup = (nom + 31) / 32;
  d.threads_per_simdgroup = d.thread_execution_width = 32;
  d.quadgroup_index_in_threadgroup = i / 4;
  d.quadgroups_per_threadgroup = (nl + 3) / 4;
  d.dispatch_quadgroups_per_threadgroup = (nom + 3) / 4;
  d.thread_index_in_quadgroup = i & 3;
}
// One threadgroup: its SIMD-groups run in turn from barrier to barrier.
static void run_tg(U3 tgp, U3 sz, U3 ntg) {
  nl = sz.x * sz.y * sz.z;
  u32 ng = (nl + 31) / 32;
  tg_ep[0] = tg_ep[1] = 1;
  cur = 0;
  if (tgsz) {
    memset(__start_msim_tg, 0xff, tgsz);
    memset(tgflags, 0, tgsz);
  }
  for (u32 i = 0; i < nl; i++) {
    Lane& l = lanes[i];
    l.idx = i;
    l.st = READY;
    l.pend = 0;
    l.bflags = 0;
    l.hi = stacks + (u64)(i + 1) * L->stack;
    l.lo = stacks + (u64)i * L->stack;
    l.sp = mkstack(l.hi, lane_main);
    identify(l.ids, i, tgp, sz, ntg);
  }
  for (u32 g = 0; g < ng; g++) {
    sgs[g].ph = 0;
    sgs[g].ep[0] = sgs[g].ep[1] = 1;
  }
  u32 order[32];
  for (;;) {
    perm(order, ng);
    for (u32 g = 0; g < ng; g++) {
      run_sg(order[g]);
      if (aborting) return;
    }
    u32 done = 0;
    Lane* b = 0;
    int div = 0, bf = 0;
    for (u32 i = 0; i < nl; i++) {
      Lane* l = &lanes[i];
      if (l->st == DONE)
        done++;
      else {
        if (!b)
          b = l;
        else if (l->site != b->site || l->file != b->file)
          div = 1;
        bf |= l->bflags;
      }
    }
    if (done == nl) return;
    cur = b;
    if (done) add_err(BARRIER_EXIT, 0, 0, -1, 0, 0, b->file, b->site, done, nl);
    if (div) add_err(BARRIER_DIV, 0, 0, -1, 0, 0, b->file, b->site, 0, 0);
    cur = 0;
    if (bf & 1) tg_ep[0]++;
    if (bf & 2) tg_ep[1]++;
    for (u32 i = 0; i < nl; i++)
      if (lanes[i].st == W_TGBAR) lanes[i].st = READY;
  }
}
static u64 paged(u64 n) { return (n + 4095) & ~4095ul; }
static void release(void* p, u64 n) {
  if (p) munmap(p, paged(n));
}
static const u64 GAP = 65536;  // between buffers; nothing may touch it

// Buffers in one arena, filled with 0xff where nothing was given, so that what is not written shows.
static u64 place_buffers(Launch* l, void** argv) {
  u64 total = GAP, off = GAP;
  for (u32 i = 0; i < l->nbufs; i++) total += paged(l->bufs[i].size) + GAP;
  arena = (u8*)zalloc(total);
  arena_end = arena + total;
  pagebuf = (u32*)zalloc((total >> 12) * 4 + 4);
  for (u32 i = 0; i < l->nbufs; i++) {
    Buf& b = l->bufs[i];
    u64 sz = paged(b.size);
    argv[i] = b.p = arena + off;
    for (u64 k = 0; k < sz; k += 4096) pagebuf[(off + k) >> 12] = i + 1;
    memset(b.p - 4096, 0xff, 4096 + sz + 4096);  // strays read NaN in the unchecked mode too
    if (b.in) memcpy(b.p, b.in, b.size);
    b.cells = b.writable && l->checked ? (Cell*)zalloc((b.size + 16) * sizeof(Cell)) : 0;
    off += sz + GAP;
  }
  return total;
}
static u32 edge(u32 grid, u32 at, u32 tg) { return grid - at * tg < tg ? grid - at * tg : tg; }
static void run_grid(Launch* l) {
  u32 *g = l->grid, *t = l->tg;
  U3 ntg = {(g[0] + t[0] - 1) / t[0], (g[1] + t[1] - 1) / t[1], (g[2] + t[2] - 1) / t[2], 0};
  u32 n = ntg.x * ntg.y * ntg.z;
  u32* order = (u32*)zalloc(n * 4ul);
  perm(order, n);
  for (u32 k = 0; k < n && !aborting; k++) {
    tgi = order[k];
    U3 p = {tgi % ntg.x, tgi / ntg.x % ntg.y, tgi / (ntg.x * ntg.y), 0};
    run_tg(p, {edge(g[0], p.x, t[0]), edge(g[1], p.y, t[1]), edge(g[2], p.z, t[2]), 0}, ntg);
    l->n_tg++;
    if (!aborting && tmax_ns && now_ns() - t0_ns > tmax_ns) {
      add_err(TIMEOUT, 0, 0, -1, 0, 0, 0, 0, 0, 0);
      l->aborted = aborting = 1;
    }
  }
  release(order, n * 4ul);
}

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int msim_launch(Launch* l) {
  L = l;
  aborting = 0;
  nacc = 0;
  rs = l->order_seed * 2654435761u + 1;
  t0_ns = now_ns();
  tmax_ns = (u64)(l->timeout * 1e9);
  void* argv[128];
  argv_ = argv;
  u64 total = place_buffers(l, argv);
  tgsz = __start_msim_tg ? (u64)(__stop_msim_tg - __start_msim_tg) : 0;
  tgflags = tgsz ? (u8*)zalloc(tgsz) : 0;
  tgcells = tgsz ? (Cell*)zalloc(tgsz * sizeof(Cell)) : 0;
  u64 threads = (u64)l->tg[0] * l->tg[1] * l->tg[2];
  stacks_sz = threads * l->stack;
  stacks = (u8*)zalloc(stacks_sz);
  lanes = (Lane*)zalloc(threads * sizeof(Lane));
  sgs = (SG*)zalloc((threads + 31) / 32 * sizeof(SG));
  run_grid(l);
  for (u32 i = 0; i < l->nbufs; i++) {
    Buf& b = l->bufs[i];
    if (b.out) memcpy(b.out, b.p, b.size);
    release(b.cells, (b.size + 16) * sizeof(Cell));
  }
  release(arena, total);
  release(pagebuf, (total >> 12) * 4 + 4);
  release(stacks, stacks_sz);
  release(lanes, threads * sizeof(Lane));
  release(sgs, (threads + 31) / 32 * sizeof(SG));
  release(tgflags, tgsz);
  release(tgcells, tgsz * sizeof(Cell));
  l->n_access = nacc;
  L = 0;
  return (int)l->nerrs;
}
