// Reads the JSON of a file's header, which an adversary chose. Nothing crashes, and a header is
// accepted only if its rows are, byte for byte, those that a saver writes for what was read.
//
// Input: the JSON.
#include "frame/file_header.hpp"

#include <string>

#include "common.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::string_view kMetadataKey = "\"__metadata__\":";

// The row of a tensor as a saver writes it.
std::string row_of(const FileEntry& entry) {
    std::string row = "\"" + std::string(entry.name) + "\":{\"dtype\":\"";
    row += std::string(entry.dtype) + "\",\"shape\":[";
    for (std::size_t d = 0; d < entry.shape.size(); ++d)
        row += (d > 0 ? "," : "") + std::to_string(entry.shape[d]);
    row += "],\"data_offsets\":[" + std::to_string(entry.start) + ",";
    return row + std::to_string(entry.stop) + "]}";
}

// Checks that a text has a piece at a place, which may be outside of it.
void claim_piece(std::string_view text, const char* place, std::string_view piece) {
    const auto start = reinterpret_cast<uintptr_t>(text.data());
    const auto at = reinterpret_cast<uintptr_t>(place);
    claim(at >= start && at - start <= text.size(), "what was read lies in the text");
    claim(text.substr(at - start, piece.size()) == piece, "what was read is what is there");
}

void check(std::string_view text, const FileEntries& found) {
    std::size_t n_rows = found.entries.size(), nbytes = 2;  // with the brackets
    for (const FileEntry& entry : found.entries) {
        const std::string row = row_of(entry);
        claim(entry.shape.size() <= kMaxDims, "no shape has too many dimensions");
        claim_piece(text, entry.name.data() - 1, row);
        nbytes += row.size();
    }
    if (!found.metadata.empty()) {
        claim_piece(text, found.metadata.data() - kMetadataKey.size(), kMetadataKey);
        claim_piece(text, found.metadata.data(), found.metadata);
        claim(found.metadata.back() == '}', "metadata are an object");
        nbytes += kMetadataKey.size() + found.metadata.size();
        ++n_rows;
    }
    nbytes += n_rows > 0 ? n_rows - 1 : 0;  // commas
    claim(nbytes <= text.size() && text.substr(nbytes).find_first_not_of(' ') == text.npos,
          "only spaces follow the rows");
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    using namespace packhorse;
    const std::string_view text(reinterpret_cast<const char*>(data), nbytes);
    FileEntries found;
    if (FileHeaderReader(text).read(found)) fuzz::check(text, found);
    return 0;
}
