// Reads the JSON of a safetensors header, if it is written as savers write it: without spaces or
// escapes, and with the fields of a tensor in the usual order. All else is left to the caller
// (src/packhorse/storage/safetensors_header.py), which knows every rule and finds every fault.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "common/layout.hpp"

namespace packhorse {

// A tensor as a header describes it. Its text was not checked to be UTF-8.
struct FileEntry {
    std::string_view name, dtype;
    std::vector<uint64_t> shape;
    uint64_t start = 0, stop = 0;
};

struct FileEntries {
    std::vector<FileEntry> entries;
    std::string_view metadata;  // the JSON of `__metadata__`; empty if there is none
};

class FileHeaderReader {
  public:
    explicit FileHeaderReader(std::string_view text) : text_(text) {}

    // Whether the header is written as usual.
    bool read(FileEntries& found) {
        if (!skip("{")) return false;
        bool is_first = true;
        while (!skip("}")) {
            if (!is_first && !skip(",")) return false;
            is_first = false;
            std::string_view name;
            if (!read_string(name) || !skip(":")) return false;
            if (name == "__metadata__") {
                if (!found.metadata.empty() || !read_metadata(found.metadata)) return false;
                continue;
            }
            FileEntry entry;
            entry.name = name;
            if (!read_entry(entry)) return false;
            found.entries.push_back(std::move(entry));
        }
        const std::string_view rest = text_.substr(at_);
        return std::all_of(rest.begin(), rest.end(), [](char c) { return c == ' '; });
    }

  private:
    bool skip(std::string_view token) {
        if (text_.substr(at_, token.size()) != token) return false;
        at_ += token.size();
        return true;
    }

    // A string without escapes.
    bool read_string(std::string_view& found) {
        if (!skip("\"")) return false;
        const std::size_t start = at_;
        while (at_ < text_.size() && text_[at_] != '"') {
            if (text_[at_] == '\\' || static_cast<unsigned char>(text_[at_]) < 0x20) return false;
            ++at_;
        }
        found = text_.substr(start, at_ - start);
        return skip("\"");
    }

    // An integer below 10^18.
    bool read_size(uint64_t& found) {
        const std::size_t start = at_;
        for (found = 0; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            if (at_ - start == 18) return false;
            found = 10 * found + static_cast<uint64_t>(text_[at_] - '0');
        }
        return at_ > start && (at_ == start + 1 || text_[start] != '0');
    }

    bool read_entry(FileEntry& entry) {
        if (!skip("{\"dtype\":") || !read_string(entry.dtype) || !skip(",\"shape\":["))
            return false;
        while (!skip("]")) {
            uint64_t size = 0;
            if ((!entry.shape.empty() && !skip(",")) || !read_size(size)) return false;
            entry.shape.push_back(size);
            if (entry.shape.size() > kMaxDims) return false;
        }
        return skip(",\"data_offsets\":[") && read_size(entry.start) && skip(",") &&
               read_size(entry.stop) && skip("]}");
    }

    // An object without objects in it, as far as brackets and quotes tell.
    bool read_metadata(std::string_view& found) {
        const std::size_t start = at_;
        if (!skip("{")) return false;
        for (bool is_string = false; at_ < text_.size(); ++at_) {
            const char c = text_[at_];
            if (c == '"') is_string = !is_string;
            if (is_string && c == '\\') ++at_;
            if (!is_string && c == '{') return false;
            if (is_string || c != '}') continue;
            found = text_.substr(start, ++at_ - start);
            return true;
        }
        return false;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

}  // namespace packhorse
