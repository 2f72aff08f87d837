// A plug-in for QEMU that counts the instructions of an emulated program. It prints the count so
// far whenever the program reads a clock, as core.cpp does before and after each round.
//
// QEMU's header comes with its sources only, so what is used of it is declared here (version 1 of
// the interface).
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>

extern "C" {
struct qemu_plugin_tb;
using Translate = void (*)(uint64_t, qemu_plugin_tb*);
using SystemCall = void (*)(uint64_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                            uint64_t, uint64_t, uint64_t, uint64_t);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, Translate);
void qemu_plugin_register_vcpu_syscall_cb(uint64_t, SystemCall);
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb*, int, void*, uint64_t);
std::size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb*);

extern __attribute__((visibility("default"))) const int qemu_plugin_version;
const int qemu_plugin_version = 1;
}

namespace {

constexpr int kAdd = 0;
constexpr int64_t kClockGettime = 113;  // on 64-bit ARM

uint64_t count;

void translate(uint64_t, qemu_plugin_tb* block) {
    qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &count, qemu_plugin_tb_n_insns(block));
}

void system_call(uint64_t, unsigned, int64_t number, uint64_t, uint64_t, uint64_t, uint64_t,
                 uint64_t, uint64_t, uint64_t, uint64_t) {
    if (number == kClockGettime) std::fprintf(stderr, "%" PRIu64 "\n", count);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void*,
                                                                          int, char**) {
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    qemu_plugin_register_vcpu_syscall_cb(id, system_call);
    return 0;
}
