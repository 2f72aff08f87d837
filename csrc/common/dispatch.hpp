// The instruction sets. Every operation takes an Isa as an argument: there is no global state, and
// a caller can force a path. A function marked PACKHORSE_AVX2 or PACKHORSE_AVX512 may be called
// only if detect_isa() returns at least that.
//
// kAvx512 needs F, BW, DQ and VL (Skylake-X and later). kAvx512Vbmi2 needs VBMI, VBMI2 and IFMA as
// well (Ice Lake, Zen 4 and later): VBMI2 expands and compresses bytes, which puts units in the
// order by class and back, and expands words of 16 bits, which fills the lanes of the rANS decoder;
// VBMI looks bytes up in tables of 128 (that decoder) and 256 (csrc/tables); IFMA has products of
// 52 bits (rans/encode_short_avx512.hpp).
#pragma once

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Packhorse's C++ core is written for little-endian machines"
#endif

#if defined(__x86_64__)
#define PACKHORSE_X86 1
#include <immintrin.h>
// Newer clangs count the instruction for CRC32C apart from the rest of SSE4.2.
#define PACKHORSE_AVX2 __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,sse4.2,crc32")))
#define PACKHORSE_AVX512                                                             \
    __attribute__((                                                                  \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,lzcnt,popcnt,sse4." \
               "2,crc32")))
#define PACKHORSE_AVX512_VBMI2                                                                  \
    __attribute__((                                                                             \
        target("avx512vbmi,avx512vbmi2,avx512ifma,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi," \
               "bmi2,lzcnt,popcnt,sse4."                                                        \
               "2,crc32")))
// For functions that need has_vpclmulqdq() as well.
#define PACKHORSE_AVX2_VPCLMULQDQ \
    __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,sse4.2,crc32,pclmul,vpclmulqdq")))
#define PACKHORSE_VPCLMULQDQ                                                         \
    __attribute__((                                                                  \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,lzcnt,popcnt,sse4." \
               "2,crc32,pclmul,vpclmulqdq")))
#else
#define PACKHORSE_X86 0
#endif

#if defined(__aarch64__)
#define PACKHORSE_ARM 1
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#else
#define PACKHORSE_ARM 0
#endif

#include <cstddef>
#include <cstdint>

#include "common/layout.hpp"

namespace packhorse {

// Memory that will be read and written next, to be fetched into L2 a little at a time while a slow
// loop computes. Coding a chunk takes about as long as its memory traffic: with this the two
// overlap, without it they follow each other (docs/decisions.md). Addresses are never dereferenced
// and may lie outside of any buffer.
struct Ahead {
    uintptr_t read = 0;
    uintptr_t write = 0;
    std::size_t read_step = 0;  // bytes for each round of 128 units
    std::size_t write_step = 0;

    PACKHORSE_INLINE void step() {
        for (const uintptr_t end = read + read_step; read < end; read += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(read), 0, 2);
        for (const uintptr_t end = write + write_step; write < end; write += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(write), 1, 2);
    }

    // Does a quarter of a step, for loops that are faster if fetches are spread. Lines are fetched
    // in order, some of them twice.
    PACKHORSE_INLINE void quarter_step() {
        for (std::size_t at = 0; at < read_step / 4; at += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(read + at), 0, 2);
        read += read_step / 4;
        for (std::size_t at = 0; at < write_step / 4; at += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(write + at), 1, 2);
        write += write_step / 4;
    }
};

enum class Isa : int { kPortable = 0, kNeon = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Vbmi2 = 4 };
constexpr int kIsaCount = 5;

// Each path may use the instructions of all lower paths of its architecture, so compare with >=.
// kNeon is below all paths of x86-64, so that a comparison with one of those is false on ARM.
bool operator==(Isa, Isa) = delete;

inline Isa detect_isa() {
#if PACKHORSE_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
                      __builtin_cpu_supports("sse4.2");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2 && avx512)
        return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                       __builtin_cpu_supports("avx512ifma")
                   ? Isa::kAvx512Vbmi2
                   : Isa::kAvx512;
    if (avx2) return Isa::kAvx2;
#endif
    return PACKHORSE_ARM ? Isa::kNeon : Isa::kPortable;
}

// Whether this machine has a path, by its number.
inline bool has_isa(int isa) {
    const bool other_architecture = isa == static_cast<int>(Isa::kNeon) && !PACKHORSE_ARM;
    return 0 <= isa && isa <= static_cast<int>(detect_isa()) && !other_architecture;
}

// Whether there are carry-less products of whole vectors. The first processors with AVX-512 lack
// them (Cascade Lake); Ice Lake and Zen 4 have them, and so do some that have AVX2 alone (Zen 3,
// Alder Lake).
inline bool has_vpclmulqdq() {
#if PACKHORSE_X86
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
#else
    return false;
#endif
}

// Whether a processor of ARM has the instructions for CRC32C, which came with ARMv8.1. Every
// processor of Apple has them; elsewhere only Linux is asked.
inline bool has_crc32() {
#if PACKHORSE_ARM && defined(__linux__)
    static const bool found = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
    return found;
#elif PACKHORSE_ARM && defined(__APPLE__)
    return true;
#else
    return false;
#endif
}

// Runs a loop that compilers vectorise, with AVX2 where it is allowed. `work` is a lambda marked
// PACKHORSE_VECTORISED, so that it is inlined into its caller and compiled for the caller's
// instructions. The lambda and its captures must be values: otherwise stores to bytes might change
// them, and nothing would be vectorised.
#define PACKHORSE_VECTORISED __attribute__((always_inline))

#if PACKHORSE_X86
template <class Work>
PACKHORSE_AVX2 inline void run_avx2(Work work) {
    work();
}

template <class Work>
PACKHORSE_AVX512 inline void run_avx512(Work work) {
    work();
}
#endif

template <class Work>
inline void vectorised(Isa isa, Work work) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) return run_avx2(work);
#endif
    (void)isa;
    work();
}

// Does the same with AVX-512 where it is allowed, for loops that gain from it.
template <class Work>
inline void vectorised_wide(Isa isa, Work work) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return run_avx512(work);
#endif
    vectorised(isa, work);
}

// Keeps the compiler from collecting several values in a vector, which takes longer than to use
// them where they are.
template <class T>
PACKHORSE_INLINE void keep_in_register(T& value) {
    asm("" : "+r"(value));
}

// Keeps the compiler from replacing a store and narrower loads of `value` by shuffles, which are
// slower because one port does them all.
template <class T>
PACKHORSE_INLINE void keep_in_memory(T& value) {
    asm("" : "+m"(value));
}

}  // namespace packhorse
