// Maps parts of a file, gives the system all advice about them, and checks what is read. Its
// argument is the file, which it makes. There are twins of these calls, so `make windows` runs this
// as well.
#include <fcntl.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "common/advice.hpp"
#include "common/mapping.hpp"
#if defined(_WIN32)
#include <io.h>
#endif

using namespace packhorse;

namespace {

uint8_t byte_at(std::size_t i) {
    return static_cast<uint8_t>(i * 2654435761u >> 13);
}

void check(bool is_true, const char* what) {
    if (is_true) return;
    std::fprintf(stderr, "not true: %s\n", what);
    std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    check(argc == 2, "there is one argument, the file to make");
    constexpr std::size_t kNbytes = (std::size_t{1} << 22) + 12345;
    std::vector<uint8_t> bytes(kNbytes);
    for (std::size_t i = 0; i < kNbytes; ++i) bytes[i] = byte_at(i);
    std::ofstream(argv[1], std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), kNbytes);
#if defined(_WIN32)
    const int file = _open(argv[1], _O_RDONLY | _O_BINARY);
#else
    const int file = open(argv[1], O_RDONLY);
#endif
    check(file >= 0, "the file can be opened");
    const std::size_t starts[] = {0, 1, 4095, 4096, 65536, 70001, std::size_t{1} << 20};
    for (const std::size_t start : starts)
        for (const std::size_t n : {std::size_t{1}, std::size_t{100000}, kNbytes - start}) {
            const auto loss = std::make_shared<Loss>(false);
            const Mapping mapping(file, start, n, loss);
            will_need(mapping.data(), n);
            will_sample(mapping.data(), n);
            read_now(mapping.data(), n);
            check(mapping.nbytes() >= n, "the mapping has all bytes");
            for (std::size_t i = 0; i < n; ++i)
                check(mapping.data()[i] == byte_at(start + i), "a mapped byte is the file's");
            check(!*loss, "no part of the file is lost");
        }
    bool throws = false;
    try {
        const Mapping mapping(-1, 0, 1, std::make_shared<Loss>(false));
    } catch (const std::system_error&) {
        throws = true;
    }
    check(throws, "a file that is not open cannot be mapped");
    want_huge_pages(bytes.data(), kNbytes);
    check(is_used(bytes.data(), kNbytes), "memory that was written is used");
    std::vector<uint8_t> none;
    will_need(none.data(), 0);
    will_sample(none.data(), 0);
    read_now(none.data(), 0);
    std::printf("%zu mappings, no fault\n", count_mappings());
}
