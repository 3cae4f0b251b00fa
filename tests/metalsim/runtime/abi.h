// What Python and the runtime share (tests/metalsim/abi.py has the same structs), and the libc that is used.
#pragma once
typedef unsigned char u8;
typedef unsigned u32;
typedef unsigned long u64;
typedef long i64;
extern "C" {
void* memset(void*, int, u64);
void* memcpy(void*, const void*, u64);
void* memmove(void*, const void*, u64);
int memcmp(const void*, const void*, u64);
void* mmap(void*, u64, int, int, int, i64);
int munmap(void*, u64);
struct tspec {
  i64 s, ns;
};
int clock_gettime(int, tspec*);
}
#define PROT_RW 3
#define MAP_PA 0x4022 /* PRIVATE|ANON|NORESERVE */
#define HID __attribute__((visibility("hidden")))

enum Kind {
  OOB_READ = 1,
  OOB_WRITE,
  WRITE_CONST,
  UNINIT,
  RACE,
  BENIGN_RACE,
  BARRIER_DIV,
  SIMD_DIV = 9,
  SHUF_INACTIVE = 10,
  WILD,
  UB_BOUNDS,
  MISALIGN,
  UB_SHIFT,
  UB_DIV,
  UB_FCAST,
  TIMEOUT,
  FOREIGN_STACK,
  BARRIER_EXIT,
  UB_OTHER,
  TG_OOB,
  TENSOR_LANES,
  TENSOR_ELEMENT,
  TENSOR_UNWRITTEN
};
struct Err {
  int kind;
  u32 count;
  u64 pc, pc2;
  u32 tg, lane, tg2, lane2;
  int buf;
  u32 size;
  i64 off;
  const char* file;
  u32 site;
  i64 a, b;
  int was_write, now_write;
};
// What is known of one byte of a buffer. Python passes the flags in, DEFINED where a value was given.
enum Flag { DEFINED = 1, WRITTEN = 2, READ = 4 };
struct Buf {
  const void* in;
  void* out;
  u64 size;
  int writable;
  u8* flags;                      // one per byte; null in the unchecked mode
  u64 read_bytes, written_bytes;  // as the lanes asked for them
  u8* p;                          // from here on the runtime's own
  struct Cell* cells;
};
struct Sym {
  u64 lo, hi;
};
struct Launch {
  Buf* bufs;
  u32 nbufs;
  u32 grid[3], tg[3];
  u32 checked, races, order_seed, stack;
  double timeout;
  Sym* syms;
  u32 nsyms;
  Err* errs;
  u32 maxerrs, nerrs;
  u64 n_access, n_switch, n_simd, n_bar, n_tg;
  int aborted;
};
struct alignas(16) U3 {
  u32 x, y, z, pad;
};
struct alignas(16) Ids {
  U3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid,
      threads_per_threadgroup, dispatch_threads_per_threadgroup, threadgroups_per_grid, threads_per_grid,
      grid_size, grid_origin;
  u32 thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
      simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, threads_per_simdgroup,
      thread_execution_width, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup,
      dispatch_quadgroups_per_threadgroup, thread_index_in_quadgroup;
};
extern "C" void msim_entry(void** bufs, const Ids* ids);
extern "C" {
extern u8 __start_msim_tg[] __attribute__((weak)) HID;
extern u8 __stop_msim_tg[] __attribute__((weak)) HID;
extern u8 __ehdr_start[] HID;
extern u8 _end[] HID;
}
