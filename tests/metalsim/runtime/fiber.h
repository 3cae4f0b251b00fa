// The switch between stacks: sw saves what a call preserves and jumps; mkstack makes a stack that starts in
// f.
#pragma once
#include "abi.h"

#if defined(__x86_64__)
__attribute__((naked, noinline)) static void sw(void** save, void* to) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n "
      "movq %rsp,(%rdi)\n movq %rsi,%rsp\n popq %r15\n popq %r14\n popq %r13\n "
      "popq %r12\n popq %rbx\n popq %rbp\n ret\n ");
}
static void* mkstack(u8* top, void (*f)()) {
  u64* s = (u64*)((u64)top & ~15ul);
  *--s = 0;
  *--s = (u64)f;
  for (int i = 0; i < 6; i++) *--s = 0;
  return s;
}
#elif defined(__aarch64__)
__attribute__((naked, noinline)) static void sw(void** save, void* to) {
  asm("sub sp,sp,#160\n stp x19,x20,[sp]\n stp x21,x22,[sp,#16]\n stp x23,x24,[sp,#32]\n "
      "stp x25,x26,[sp,#48]\n stp x27,x28,[sp,#64]\n stp x29,x30,[sp,#80]\n "
      "stp d8,d9,[sp,#96]\n stp d10,d11,[sp,#112]\n stp d12,d13,[sp,#128]\n "
      "stp d14,d15,[sp,#144]\n mov x9,sp\n str x9,[x0]\n mov sp,x1\n ldp x19,x20,[sp]\n "
      "ldp x21,x22,[sp,#16]\n ldp x23,x24,[sp,#32]\n ldp x25,x26,[sp,#48]\n "
      "ldp x27,x28,[sp,#64]\n ldp x29,x30,[sp,#80]\n ldp d8,d9,[sp,#96]\n "
      "ldp d10,d11,[sp,#112]\n ldp d12,d13,[sp,#128]\n ldp d14,d15,[sp,#144]\n "
      "add sp,sp,#160\n ret\n ");
}
static void* mkstack(u8* top, void (*f)()) {
  u64* s = (u64*)((u64)top & ~15ul);
  s -= 20;
  for (int i = 0; i < 20; i++) s[i] = 0;
  s[11] = (u64)f;
  return s;
}
#else
#error "add a context switch for this CPU"
#endif
