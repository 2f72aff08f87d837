// Reading files, and ending with a message, in the benchmarks' programs of C++.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace packhorse {

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

inline std::vector<uint8_t> read_file(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (file == nullptr || std::fseek(file, 0, SEEK_END) != 0)
        fail(std::string(path) + ": no file");
    std::vector<uint8_t> bytes(static_cast<std::size_t>(std::ftell(file)));
    std::rewind(file);
    const bool is_whole = std::fread(bytes.data(), 1, bytes.size(), file) == bytes.size();
    std::fclose(file);
    if (!is_whole || bytes.empty()) fail(std::string(path) + ": nothing to read");
    return bytes;
}

}  // namespace packhorse
